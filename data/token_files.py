"""Token files: their format, the files of a split, and the description of a data folder.

A data folder holds the files of two splits, train and val: little-endian uint16 token ids, either bare (nanoGPT) or
after llm.c's header of 256 int32 (magic 20240520, version 1, number of tokens). meta.json beside them lists the files
and describes tokenizer and source. If it is missing, nanoGPT's meta.pkl is read, and the files are found by their
names: train.bin, or numbered shards such as train_000001.bin or fineweb_train_000001.bin.

Beside a token file there may be a loss mask of the same name, `train*.mask` or `val*.mask`: one uint8 per token, 0 if
it is not learned as a target. Either all shards of a split have one or none has.
"""

from __future__ import annotations

import codecs
import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from data.meta_files import read_nanogpt, read_record
from data.tokenizer import Ids, padded_vocab_size
from deskgpt.system.files import sha256, write_atomically

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 1024
TOKEN_BYTES = 2
MASK_SUFFIX = ".mask"
CHUNK = 1 << 20  # tokens that are read at once from a file that is read whole
MANY_FILES = 100  # a process may open 1,024 on most Linux systems, 256 on macOS, unless it asks for more
GPT2 = {"tokenizer": {"name": "gpt2"}, "vocab_size": 50257, "end_of_text": 50256}

WINDOWS_LOCK = threading.Lock()  # Windows has no pread: seeking and reading are two calls
LEAST_OF_GPT2 = 1 << 15  # the largest id of a thousand tokens of text; vocabularies of characters or 32,000 stay below

# What other files begin with that people have beside token files.
FOREIGN = {
    b"\x93NUMPY": "a NumPy file",
    b"PK\x03\x04": "a zip archive (npz or pt)",
    b"\x1f\x8b\x08": "packed with gzip",
    b"\x28\xb5\x2f\xfd": "packed with zstd",
    b"BZh": "packed with bzip2",
    b"\xfd7zXZ": "packed with xz",
    b"PAR1": "a parquet file",
    b"ARROW1": "an Arrow file",
    b"GGUF": "a GGUF file",
    b"\x89HDF": "an HDF5 file",
    b"MMIDIDX": "an index of Megatron",
    b"version https://git-lfs": "a pointer of Git LFS",
    b"<!DOCTYPE": "an HTML page",
    b"<html": "an HTML page",
    (20240801).to_bytes(4, "little"): "llm.c's format with 32-bit token ids",
}
SAMPLED = 1 << 16  # tokens at the beginning of a bare file that are checked for being 32-bit
LEAST_SAMPLED = 64
LARGEST_HIGH_HALF = 3  # of 32-bit ids below 2^18, larger than any vocabulary in use


# ---- one file ------------------------------------------------------------------------------------------------


def write_tokens(path: Path, ids: Ids, header: bool = False) -> None:
    """Writes token ids (n,) as a token file, with llm.c's header if asked. Raises OSError."""
    content = ids.astype("<u2").tobytes()
    if header:
        content = llmc_header(len(ids)) + content
    write_atomically(path, content)


def llmc_header(tokens: int) -> bytes:
    """The header of a file in llm.c's format that holds this number of tokens."""
    head = np.zeros(HEADER_BYTES // 4, "<i4")
    head[:3] = MAGIC, VERSION, tokens
    return head.tobytes()


def read_tokens(path: Path) -> Ids:
    """The token ids (n,) of a file, memory-mapped. Raises ValueError if the file is not a token file, OSError."""
    begin, tokens = find_tokens(path)
    return np.memmap(path, "<u2", "r", begin, (tokens,))


def find_tokens(path: Path) -> tuple[int, int]:
    """(first byte, number) of the tokens in a file. Raises ValueError if it is not a token file, OSError."""
    status = path.stat()
    size = status.st_size
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a file; prepare the data again")
    if size == 0:
        raise ValueError(f"{path} is empty; prepare the data again")
    with open(path, "rb") as file:
        head = file.read(TOKEN_BYTES * SAMPLED)
    for magic_bytes, kind in FOREIGN.items():
        if head.startswith(magic_bytes):
            raise ValueError(f"{path} is {kind}, not bare uint16 tokens or llm.c's format; prepare the data again")
    if head[8:10] == b'{"':
        raise ValueError(f"{path} is a safetensors file, not bare uint16 tokens; prepare the data again")
    if size >= HEADER_BYTES:
        magic, version, tokens = np.frombuffer(head, "<i4", 3).tolist()
        expected = HEADER_BYTES + TOKEN_BYTES * tokens
        # Bare tokens may happen to begin with the magic, but hardly with another part of a header that fits too.
        right = [magic == MAGIC, version == VERSION, size == expected]
        if all(right) and tokens:
            return HEADER_BYTES, tokens
        if sum(right) >= 2:
            raise ValueError(
                f"{path}: its header says {tokens:,} tokens, which take {expected:,} bytes, and the file has "
                f"{size:,} (magic {magic}, version {version}); prepare the data again"
            )
    if size % TOKEN_BYTES:
        raise ValueError(
            f"{path} has {size:,} bytes, an odd number: these are not uint16 tokens; prepare the data again"
        )
    if looks_like_text(head):
        raise ValueError(f"{path} holds text, and uint16 tokens are expected; prepare it: python data/text/prepare.py")
    if looks_like_32_bits(np.frombuffer(head, "<u2")):
        raise ValueError(
            f"{path} holds 32-bit or 64-bit token ids, and uint16 is expected; prepare the data again, or convert it: "
            "np.fromfile(FILE, np.uint32).astype(np.uint16).tofile(FILE)"
        )
    return 0, size // TOKEN_BYTES


def looks_like_text(head: bytes) -> bool:
    """Whether a file begins with UTF-8 without control characters, such as the zeros of small token ids."""
    with suppress(UnicodeDecodeError):
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
        return len(head) >= LEAST_SAMPLED and not re.search(r"[\0-\x08\x0e-\x1f\x7f]", text)
    return False


def looks_like_32_bits(ids: Ids) -> bool:
    """Whether numbers that were read as uint16 are the halves of larger ones: every second one is next to nothing."""
    if len(ids) < LEAST_SAMPLED:
        return False
    return bool(ids[1::2].max() <= LARGEST_HIGH_HALF and len(np.unique(ids[::2])) > LEAST_SAMPLED // 4)


class NumberFile:
    """An open file of numbers: `len(file)` of them. If a new file replaces it, the old content is still read.

    Several threads may read at once. Raises OSError.
    """

    def __init__(self, path: Path, dtype: str, begin: int, n: int) -> None:
        self.path = path
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (it stays open as long as this object)
        self._dtype = np.dtype(dtype)
        self._begin = begin
        self._n = n
        self.opened = os.fstat(self._file.fileno())
        self._written = (self.opened.st_size, self.opened.st_mtime_ns)

    def __len__(self) -> int:
        return self._n

    def read(self, first: int, n: int) -> npt.NDArray[Any]:
        """A copy of numbers first .. first + n - 1. Raises ValueError if the file has become shorter."""
        n = max(0, min(n, self._n - first))
        size = n * self._dtype.itemsize
        # Not memory-mapped: if somebody cuts the file, reading past its new end would end the process with SIGBUS.
        content = read_at(self._file, size, self._begin + first * self._dtype.itemsize)
        had = self._begin + self._n * self._dtype.itemsize
        now = os.fstat(self._file.fileno()).st_size
        if now < had or len(content) < size:
            raise ValueError(
                f"{self.path} became shorter while it was in use: it had {had:,} bytes, now it has {now:,}; "
                "prepare the data again, then resume"
            )
        return np.frombuffer(content, self._dtype).copy()

    def chunks(self) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """All numbers, CHUNK at a time, each time with the place of the first one. Raises ValueError as read."""
        for first in range(0, len(self), CHUNK):
            yield first, self.read(first, CHUNK)

    def was_replaced(self) -> bool:
        """Whether another file is at its path now, or none."""
        try:
            return not os.path.samestat(self.path.stat(), self.opened)
        except OSError:
            return True

    def was_written(self) -> bool:
        """Whether somebody has written into the file since it was opened, or since this was last asked."""
        before = self._written
        if not self.was_replaced():
            now = self.path.stat()
            self._written = (now.st_size, now.st_mtime_ns)
        return self._written != before


def read_at(file: FileIO, size: int, begin: int) -> bytes:
    """The bytes of an open file from `begin` on, fewer at its end. Several threads may read at once."""
    if hasattr(os, "pread"):
        return os.pread(file.fileno(), size, begin)
    with WINDOWS_LOCK:
        file.seek(begin)
        return file.read(size)


class Shard(NumberFile):
    """A token file that is open for reading. Raises ValueError if the file is not a token file, OSError."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "<u2", *find_tokens(path))


class Mask(NumberFile):
    """The loss mask of a shard: 0 where a token is not learned. Raises ValueError if it is missing or too short."""

    def __init__(self, shard: Shard) -> None:
        path = mask_of(shard.path)
        size = path.stat().st_size if path.is_file() else 0
        if size != len(shard):
            raise ValueError(
                f"the loss mask {path} has {size:,} bytes, and {shard.path.name} {len(shard):,} tokens, which need one "
                "each; prepare the data again"
            )
        super().__init__(path, "u1", 0, size)


def mask_of(path: Path) -> Path:
    """Where the loss mask of a token file is, if it has one."""
    return path.with_suffix(MASK_SUFFIX)


# ---- the files of a split ------------------------------------------------------------------------------------


class SplitFiles(NamedTuple):
    """The token files of a split in a folder."""

    read: list[Path]  # the shards, in order
    ignored: list[Path]  # others whose names are those of the split
    listed: bool  # whether meta.json lists them; otherwise they were found by their names


def split_files(folder: Path, split: str) -> SplitFiles:
    """The files of a split. Raises ValueError, which says how to make them, if there are none or too many kinds."""
    pattern = re.compile(rf"(?P<prefix>.*[_-])?{split}(?P<number>[_-]?\d[\d_-]*)?(?P<rest>.*)\.bin")
    found = {path: match for path in sorted(folder.glob("*.bin")) if (match := pattern.fullmatch(path.name))}
    listed = [folder / name for name in sorted(read_record(folder).get("files", {})) if name.startswith(split)]
    if listed:
        return SplitFiles(listed, [path for path in found if path not in listed], True)
    if not found:
        raise ValueError(how_to_make(folder, split))
    # train.bin before train_000.bin, and these before train_old.bin.
    kinds = [(match["prefix"], bool(match["rest"]), bool(match["number"])) for match in found.values()]
    best = min((rest, number) for _, rest, number in kinds)
    read = [path for path, (_, *kind) in zip(found, kinds, strict=True) if tuple(kind) == best]
    if len({found[path]["prefix"] for path in read}) > 1 or (best[0] and len(read) > 1):
        names = ", ".join(path.name for path in read[:4])
        raise ValueError(f"{folder} has several files for {split} ({names}); leave one kind of them in the folder")
    return SplitFiles(read, [path for path in found if path not in read], False)


def token_files(folder: Path, split: str) -> list[Path]:
    """The shards of a split, in order. Raises ValueError, which says how to make them, if there are none."""
    return split_files(folder, split).read


def open_shards(folder: Path, split: str) -> list[Shard]:
    """All shards of a split, open. Raises ValueError if one is damaged or not as meta.json lists it, OSError."""
    paths = token_files(folder, split)
    entries = read_record(folder).get("files", {})
    if len(paths) > MANY_FILES:
        allow_more_files(2 * len(paths))  # with masks
    shards = []
    for path in paths:
        shard = Shard(path) if path.exists() else None
        n = len(shard or ())
        expected = entries.get(path.name, {}).get("tokens", n)
        if shard is None or n != expected:
            raise ValueError(
                f"{path} has {n:,} tokens, and meta.json lists it with {expected:,}; prepare the data again"
            )
        shards.append(shard)
    return shards


def allow_more_files(n: int) -> None:
    """Lets this process have n more files open than the system allows at first, or as many as it may allow."""
    with suppress(ImportError, OSError, ValueError):  # Windows has no such limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY:
            most = soft + n if hard == resource.RLIM_INFINITY else min(soft + n, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def how_to_make(folder: Path, split: str) -> str:
    """The message if a split has no files: the script that makes them, or the data that there is instead."""
    state = f"has no {split}*.bin" if folder.is_dir() else "does not exist"
    prepared = sorted({path.parent.name for path in folder.parent.glob("*/train*.bin")} - {folder.name})
    if (folder / "prepare.py").exists():
        remedy = f"run: python {os.path.relpath(folder / 'prepare.py')}"
    elif prepared:
        remedy = f"prepared: {', '.join(prepared[:10])}"
    else:
        scripts = sorted(path.parent.name for path in Path(__file__).parent.glob("*/prepare.py"))
        remedy = f"python data/{{{','.join(scripts)}}}/prepare.py makes some"
    return f"dataset folder {folder} {state}; {remedy}"


def open_masks(folder: Path, split: str, shards: list[Shard]) -> list[Mask]:
    """The loss masks of a split's shards; [] if every token is learned. Raises ValueError if one is missing."""
    listed = any(name.startswith(split) for name in read_record(folder).get("masks", {}))
    if listed or any(mask_of(shard.path).exists() for shard in shards):
        return [Mask(shard) for shard in shards]
    return []


def listed_with_masks(meta: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a folder's record says about each token file and each mask."""
    return meta.get("files", {}) | meta.get("masks", {})


def listed_sha256(folder: Path, split: str) -> str | None:
    """One checksum for those that meta.json lists for the split's files; None if it lists none."""
    files = listed_with_masks(read_record(folder))
    paths = token_files(folder, split)
    if any(path.name not in files for path in paths):
        return None
    names = [path.name for path in (*paths, *map(mask_of, paths)) if path.name in files]
    return sha256("\n".join(files[name]["sha256"] for name in names).encode())[:16]


# ---- the description -----------------------------------------------------------------------------------------


def read_meta(folder: Path) -> dict[str, Any]:
    """The description of a folder's token files: {"tokenizer": its meta(), "vocab_size": ..., "end_of_text": ...}.

    It comes from meta.json, else from nanoGPT's meta.pkl, else GPT-2's is assumed, as nanoGPT does. end_of_text is the
    token between documents, None if the data has no such token or it is not known; an unknown tokenizer is {}.
    Raises ValueError if the description cannot be read.
    """
    meta = read_record(folder) or read_nanogpt(folder)
    if not meta:
        is_gpt2 = largest_id(folder) >= LEAST_OF_GPT2
        meta = GPT2 if is_gpt2 else {"tokenizer": {}, "vocab_size": 50304}  # as many rows as GPT-2's take
    return {name: meta.get(name) for name in ("tokenizer", "vocab_size", "end_of_text")}


def largest_id(folder: Path) -> int:
    """The largest token id at the beginning of a split; that of GPT-2 if the folder has no tokens."""
    for split in ("val", "train"):
        with suppress(ValueError, OSError):
            return int(read_tokens(token_files(folder, split)[0])[:CHUNK].max())
    return 50256


def assumptions(folder: Path) -> list[str]:
    """What is taken for granted about a folder without a list of its files or without a description, in sentences."""
    found = []
    for split in ("train", "val"):
        files = split_files(folder, split)
        names = ", ".join(path.name for path in files.read[:3]) + (", ..." if len(files.read) > 3 else "")
        if not files.listed and names != f"{split}.bin":
            found.append(f"no meta.json lists the files: {split} is, in name order, {len(files.read)} files: {names}")
        if files.ignored:
            found.append(
                f"{split} is read from {names}; not read: {', '.join(path.name for path in files.ignored[:3])}"
            )
    if not any(os.path.lexists(folder / name) for name in ("meta.json", "meta.pkl")):
        largest = largest_id(folder)
        whose = "taken for GPT-2's" if largest >= LEAST_OF_GPT2 else "not GPT-2's, so their text is not known"
        found.append(
            f"{folder} has no meta.json or meta.pkl: its ids, 0 to {largest:,} at the beginning, are {whose}; a "
            "vocabulary of GPT-2's size is assumed"
        )
    return found


def check_vocabulary(
    folder: Path, meta: dict[str, Any], model_vocab: int, model_tokenizer: dict[str, Any] | None
) -> None:
    """Raises ValueError if the data was not made with the tokenizer that the model was trained with.

    model_tokenizer is None if it is not known; then the sizes must match, padded or not.
    """
    data_tokenizer = meta["tokenizer"]
    data_vocab = meta["vocab_size"]
    same_size = model_vocab in (data_vocab, padded_vocab_size(data_tokenizer, data_vocab))
    both_known = bool(model_tokenizer and data_tokenizer)
    if same_size and (not both_known or model_tokenizer == data_tokenizer):
        return
    data_name = data_tokenizer.get("name", "unknown")
    model_name = (model_tokenizer or {}).get("name", "unknown")
    difference = ", and their tokens differ" if same_size else ""
    raise ValueError(
        f"{folder} has a vocabulary of {data_vocab} (tokenizer {data_name}), the model one of {model_vocab} "
        f"(tokenizer {model_name}){difference}; prepare the data with the model's tokenizer, or use "
        "--init_from=scratch"
    )
