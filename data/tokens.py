"""Token files: their format, a reader of many shards as one split, and the deterministic order of batches.

A data folder holds `train*.bin` and `val*.bin`: little-endian uint16 token ids, either bare (nanoGPT) or behind
llm.c's header of 256 int32 (magic 20240520, version 1, number of tokens). Several files of a split are its
shards, in name order. `meta.json` beside them describes tokenizer, source and files; nanoGPT's `meta.pkl` is
read where there is no meta.json.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data.tokenizer import Ids, Tokenizer, padded_vocab_size

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
SCANNED = 1 << 28  # a split of at most so many tokens is checked at the start, within a second; others as they are read
GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment: 2^64 / golden ratio
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

# ---- files ---------------------------------------------------------------------------------------------------


def write_atomically(path: Path, content: bytes | bytearray) -> None:
    """Writes path through a temporary file, so that it holds the old content or the new, never a part."""
    tmp = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(tmp, "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except OSError as e:
        with suppress(OSError):  # where the folder itself is none
            tmp.unlink(missing_ok=True)
        raise OSError(
            f"cannot write {path}: {e.strerror or e}; free some disk space or choose another folder"
        ) from None


def write_tokens(path: Path, ids: Ids, header: bool = False) -> None:
    """Writes token ids (n,) as a token file, with llm.c's header if asked."""
    write_atomically(path, (llmc_header(len(ids)) if header else b"") + ids.astype("<u2").tobytes())


def llmc_header(tokens: int) -> bytes:
    """What precedes so many tokens in a file of llm.c's format."""
    head = np.zeros(HEADER_BYTES // 4, "<i4")
    head[:3] = MAGIC, VERSION, tokens
    return head.tobytes()


def read_tokens(path: Path) -> Ids:
    """The token ids (n,) of a file, memory-mapped. Raises ValueError where the file is not a token file."""
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{path} is empty; prepare the data again")
    if size >= HEADER_BYTES:
        magic, version, count = np.fromfile(path, "<i4", 3)
        # Both must match: bare tokens can begin with the magic's two halves, hardly with the version behind it.
        if magic == MAGIC and version == VERSION:
            needed = HEADER_BYTES + 2 * int(count)
            if size != needed:
                raise ValueError(
                    f"{path}: a header of {count:,} tokens makes {needed:,} bytes, the file has {size:,}; "
                    "prepare the data again"
                )
            return np.memmap(path, "<u2", "r", HEADER_BYTES, (int(count),))
    if size % 2:
        raise ValueError(
            f"{path} has {size:,} bytes, an odd number, and so is not uint16 tokens; prepare the data again"
        )
    return np.memmap(path, "<u2", "r")


def write_dataset(folder: Path, splits: dict[str, Ids], tokenizer: Tokenizer, source: str) -> dict[str, Any]:
    """Writes {"train": ids, "val": ids} as bare token files with their meta.json, which it returns.

    val.bin gets its name last: wherever this stops, folder holds the old data, the new, or a split too few.
    Raises ValueError where other shards are in the way, OSError where the disk is full (the old data stays).
    """
    files = {f"{split}.bin": {"tokens": len(ids), "sha256": sha256(ids.astype("<u2"))} for split, ids in splits.items()}
    meta = {"tokenizer": tokenizer.meta(), "vocab_size": tokenizer.vocab_size, "source": source, "files": files}
    others = {p.name for split in splits for p in folder.glob(f"{split}*.bin")} - set(files)
    if others:
        raise ValueError(
            f"{folder} holds other shards ({', '.join(sorted(others))}), which would be read too; choose another name"
        )
    new = {name: folder / f"{name}.new" for name in files}
    try:
        for path, ids in zip(new.values(), splits.values(), strict=True):
            write_tokens(path, ids)
        (folder / "val.bin").unlink(missing_ok=True)
        os.replace(new["train.bin"], folder / "train.bin")
        write_atomically(folder / "meta.json", json.dumps(meta, indent=1).encode())
        os.replace(new["val.bin"], folder / "val.bin")
    finally:
        for path in new.values():
            with suppress(OSError):
                path.unlink(missing_ok=True)
    return meta


def sha256(content: Any) -> str:
    return hashlib.sha256(content).hexdigest()


def file_sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def is_prepared(folder: Path, source: str) -> bool:
    """Whether folder holds what was prepared from `source`, unharmed: every file has its size and checksum."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        sums = {name: file_sha256(folder / name) for name in meta["files"]}
        return meta["source"] == source and all(sums[n] == f["sha256"] for n, f in meta["files"].items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


class BuiltinsOnly(pickle.Unpickler):
    """Unpickles dicts, lists, strings and numbers; refuses whatever would import or call something."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only plain values are read")


def read_meta(folder: Path) -> dict[str, Any]:
    """What tokenizer made a folder's token files: {"tokenizer": its meta(), "vocab_size": ..., "end_of_text": ...}.

    end_of_text: the token between documents, None where there is none or it is not known.

    From meta.json, else nanoGPT's meta.pkl, else GPT-2's as nanoGPT assumes. Raises ValueError where the
    description cannot be read.
    """
    path = folder / "meta.json"
    try:
        if path.exists():
            meta = json.loads(path.read_text())
            tokenizer, vocab_size = dict(meta["tokenizer"]), int(meta["vocab_size"])
            if vocab_size < 1 or (tokenizer["name"] == "char" and len(tokenizer["chars"]) != vocab_size):
                raise ValueError(f"vocab_size={vocab_size} does not fit the tokenizer")
            return {"tokenizer": tokenizer, "vocab_size": vocab_size, "end_of_text": meta.get("end_of_text")}
        path = folder / "meta.pkl"
        if path.exists():
            meta = BuiltinsOnly(io.BytesIO(path.read_bytes())).load()
            itos = meta.get("itos")  # some folders of nanoGPT users have a vocab_size only: enough to train on
            chars = {"name": "char", "chars": "".join(itos[i] for i in range(len(itos)))} if itos else {}
            return {"tokenizer": chars, "vocab_size": int(meta["vocab_size"]), "end_of_text": None}
    except Exception as e:  # a damaged pickle can raise nearly anything
        raise ValueError(
            f"{path} does not describe token files ({type(e).__name__}: {e}); prepare the data again"
        ) from None
    return {"tokenizer": {"name": "gpt2"}, "vocab_size": 50257, "end_of_text": 50256}


def check_vocabulary(
    folder: Path, meta: dict[str, Any], model_vocab: int, model_tokenizer: dict[str, Any] | None
) -> None:
    """Raises ValueError where the data was not made with the tokenizer that the model was trained with."""
    data_tokenizer, n = meta["tokenizer"], meta["vocab_size"]
    same_size = model_vocab in (n, padded_vocab_size(data_tokenizer, n))
    if not same_size or (model_tokenizer and data_tokenizer and model_tokenizer != data_tokenizer):
        names = [t.get("name", "unknown") if t else "unknown" for t in (data_tokenizer, model_tokenizer)]
        differ = "" if not same_size else ", and their characters differ"
        raise ValueError(
            f"{folder} has a vocabulary of {n} (tokenizer {names[0]}), the model one of {model_vocab} "
            f"(tokenizer {names[1]}){differ}; prepare the data with the model's tokenizer, or use --init_from=scratch"
        )


# ---- order ---------------------------------------------------------------------------------------------------


def mix(x: U64) -> U64:
    """A bijection of uint64 that looks random (splitmix64's finalizer: Steele, Lea & Flood, OOPSLA 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def keys(seed: int, epochs: I64) -> U64:
    """One uint64 key per epoch number."""
    return mix(mix(np.array([seed % 2**64], np.uint64)) + epochs.astype(np.uint64) * np.uint64(GOLDEN))


def permute(i: I64, n: int, key: U64) -> I64:
    """Where position i of 0..n-1 goes under a pseudo-random permutation: O(1) time and memory an element.

    A Feistel network permutes the numbers of 2·half bits, the smallest such power of 4 that holds n; what lands
    past n is sent through again ("cycle walking", Black & Rogaway, CT-RSA 2002). i and key broadcast together.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    x, key = np.broadcast_arrays(i.astype(np.uint64), key)
    x, todo = x.copy(), np.ones(x.shape, bool)
    while todo.any():
        y, k = x[todo], key[todo]
        left, right = y >> half, y & mask
        for r in range(6):
            left, right = right, left ^ (mix(right + k + np.uint64(r * GOLDEN % 2**64)) & mask)
        x[todo] = (left << half) | right
        todo = x >= np.uint64(n)
    return x.astype(np.int64)


class Split:
    """The windows of one split: inputs and targets of block_size tokens, targets one token further on.

    In an epoch every shard is cut into consecutive windows, whose inputs do not overlap and never cross the
    shard's end; the first starts at an offset drawn for that epoch, so that later epochs see other cuts. Their
    order is a pseudo-random permutation. Which window goes into which row of which batch is a pure function of
    (seed, step, row of the global batch): there is no state to save, and nothing depends on how the global
    batch is split into micro-batches and ranks.

    With document_start, the token that documents begin with, a window of train_batch moves on to the first such
    token within its block_size; it stays where there is none. Then some tokens are in two windows, some in none.

    Raises ValueError where files are missing, damaged or too short, or hold ids of vocab_size and more.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        block_size: int,
        vocab_size: int,
        seed: int = 0,
        document_start: int | None = None,
    ) -> None:
        shards = [(path, read_tokens(path)) for path in token_files(folder, split)]
        check_listed(folder, split, {path.name: len(ids) for path, ids in shards})
        long_enough = [(path, ids) for path, ids in shards if len(ids) > block_size]
        if not long_enough:
            longest = max(len(ids) for _, ids in shards)
            shorter = f"try --block_size={longest - 1} or more data" if longest > 1 else "it needs more data"
            raise ValueError(
                f"block_size={block_size} needs {block_size + 1} tokens in a row, {folder}/{split}*.bin has "
                f"{longest:,}; {shorter}"
            )
        self.paths, self.shards = [p for p, _ in long_enough], [ids for _, ids in long_enough]
        self.block_size, self.vocab_size, self.seed = block_size, vocab_size, seed
        self.document_start = document_start
        self.lengths = np.array([len(ids) for ids in self.shards], np.int64)
        self.tokens = int(self.lengths.sum())
        if self.tokens <= SCANNED:
            for shard, ids in enumerate(self.shards):
                self._check(np.array([shard]), np.array([0]), ids[None])
        # One window fewer than could fit, except in a shard with room for one only: so every offset below
        # block_size leaves room for them all.
        counts = np.maximum(1, (self.lengths - block_size) // block_size)
        self.offsets = np.minimum(block_size, self.lengths - counts * block_size)  # number of possible offsets
        self.ends = counts.cumsum()
        self.n_windows = int(self.ends[-1])  # per epoch

    def train_batch(self, step: int, rows: I64, global_batch: int) -> tuple[I64, I64]:
        """(inputs, targets), each (len(rows), block_size), of rows 0..global_batch-1 of optimizer step `step`."""
        position = step * global_batch + rows
        epoch, i = position // self.n_windows, position % self.n_windows
        key = keys(self.seed, epoch)
        window = permute(i, self.n_windows, key)
        shard = np.searchsorted(self.ends, window, side="right")
        first = window - (self.ends - np.diff(self.ends, prepend=0))[shard]
        offset = (mix(key + shard.astype(np.uint64)) % self.offsets.astype(np.uint64)[shard]).astype(np.int64)
        start = first * self.block_size + offset
        if self.document_start is not None:
            start = np.array([self._aligned(*at) for at in zip(shard, start, strict=True)])
        return self._read(shard, start)

    def eval_batch(self, rows: I64, n: int) -> tuple[I64, I64]:
        """As train_batch, of rows of a fixed set of n evenly spaced windows; rows past n have targets of -1."""
        counts = (self.lengths - 1) // self.block_size
        ends = counts.cumsum()
        window = np.minimum(rows, n - 1) * int(ends[-1]) // n
        shard = np.searchsorted(ends, window, side="right")
        x, y = self._read(shard, (window - (ends - counts)[shard]) * self.block_size)
        y[rows >= n] = -1  # the last batch keeps its shape: a new one would be compiled anew
        return x, y

    def n_eval_windows(self, at_most: int) -> int:
        """Size of the evaluation set: every window without overlap that the split has, or at_most of them."""
        return min(at_most, int(((self.lengths - 1) // self.block_size).sum()))

    def fingerprint(self) -> str:
        """Tells these tokens from others: SHA-256 of each shard's length and first 2^20 tokens, 16 hex digits."""
        digest = hashlib.sha256(self.lengths.tobytes())
        for ids in self.shards:
            digest.update(ids[: 1 << 20].tobytes())
        return digest.hexdigest()[:16]

    def _aligned(self, shard: int, start: int) -> int:
        """The first document's start from `start` on, within a window's length and not too near the shard's end."""
        ids, T = self.shards[shard], self.block_size
        begins = np.flatnonzero(ids[start : min(start + T, len(ids) - T)] == self.document_start)
        return start + int(begins[0]) if len(begins) else start

    def _read(self, shard: I64, start: I64) -> tuple[I64, I64]:
        T = self.block_size
        block = np.stack([self.shards[s][o : o + T + 1] for s, o in zip(shard, start, strict=True)]).astype(np.int64)
        self._check(shard, start, block)
        return block[:, :-1].copy(), block[:, 1:].copy()

    def _check(self, shard: I64, start: I64, block: npt.NDArray[Any]) -> None:
        """Raises ValueError where a row of block (rows, tokens), from `start` of its shard, has an id too large."""
        if block.max() >= self.vocab_size:
            row, column = np.argwhere(block >= self.vocab_size)[0]
            raise ValueError(
                f"{self.paths[shard[row]]}: token {start[row] + column:,} is {block[row, column]}, and the vocabulary "
                f"ends at {self.vocab_size - 1}; the file does not belong to this tokenizer or model"
            )


def token_files(folder: Path, split: str) -> list[Path]:
    """The shards of a split, in order. Raises ValueError where there is none."""
    paths = sorted(folder.glob(f"{split}*.bin"))
    if not paths:
        raise ValueError(missing(folder, split))
    return paths


def check_listed(folder: Path, split: str, found: dict[str, int]) -> None:
    """Raises ValueError where meta.json lists files of a split that are not there, or with other numbers of tokens."""
    path = folder / "meta.json"
    try:
        listed = {k: v["tokens"] for k, v in json.loads(path.read_text())["files"].items() if k.startswith(split)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # nanoGPT's folders have no such list
    for name, tokens in listed.items():
        if found.get(name) != tokens:
            there = f"has {found[name]:,}" if name in found else "is not there"
            raise ValueError(
                f"{folder / name} {there}, and meta.json lists it with {tokens:,} tokens; prepare the data again"
            )


def missing(folder: Path, split: str) -> str:
    """What to say where a split has no files: how to make them, or which data there is instead."""
    script = folder / "prepare.py"
    if script.exists():
        return f"{folder} has no {split}*.bin; run: python {os.path.relpath(script)}"
    others = sorted({p.parent.name for p in folder.parent.glob("*/train*.bin")})
    scripts = sorted(p.parent.name for p in Path(__file__).parent.glob("*/prepare.py"))
    have = f"prepared: {', '.join(others)}" if others else f"python data/{{{','.join(scripts)}}}/prepare.py makes some"
    state = f"has no {split}*.bin" if folder.is_dir() else "does not exist"
    return f"dataset folder {folder} {state}; {have}"
