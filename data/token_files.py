"""Token files: their format, a reader of many shards as one split, and the deterministic order of batches.

A data folder holds `train*.bin` and `val*.bin`: little-endian uint16 token ids, either bare (nanoGPT) or behind
llm.c's header of 256 int32 (magic 20240520, version 1, number of tokens). Several files of a split are its
shards, in name order. `meta.json` beside them describes tokenizer, source and files; nanoGPT's `meta.pkl` is
read where there is no meta.json.
"""

from __future__ import annotations

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
from deskgpt.files import file_sha256, sha256, write_atomically

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
I64 = npt.NDArray[np.int64]

# ---- files ---------------------------------------------------------------------------------------------------


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
