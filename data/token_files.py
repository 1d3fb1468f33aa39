"""Token files: their format, the files of a split, and the description of a data folder.

A data folder holds the files of two splits, train and val: little-endian uint16 token ids, either bare (nanoGPT) or
after llm.c's header of 256 int32 (magic 20240520, version 1, number of tokens). meta.json beside them lists the files
and describes tokenizer and source. If it is missing, nanoGPT's meta.pkl is read, and the files are found by their
names: train.bin, or numbered shards such as train_000001.bin or fineweb_train_000001.bin.

Beside a token file there may be a loss mask of the same name, `train*.mask` or `val*.mask`: one uint8 per token, 0 if
it is not learned as a target. Either all shards of a split have one or none has.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data.meta_files import read_nanogpt, read_record
from data.tokenizer import padded_vocab_size, short_name
from deskgpt.system.errors import DataError
from deskgpt.system.limits import allow_open_files

MAGIC = 20240520
MAGICS = (MAGIC, 20240801)  # the latter of files with 32-bit ids, which are an error
VERSION = 1
HEADER_BYTES = 1024
TOKEN_BYTES = 2
MASK_SUFFIX = ".mask"
GPT2 = {"tokenizer": {"name": "gpt2"}, "vocab_size": 50257, "end_of_text": 50256}

# ---- one file ------------------------------------------------------------------------------------------------


def open_tokens(path: Path) -> NumberFile:
    """Open a token file for reading. Raises ValueError if the file is not a token file, OSError."""
    size = path.stat().st_size if path.is_file() else 0
    head = np.fromfile(path, "<i4", 3).tolist() if size else []
    magic, version, tokens = [*head, 0, 0, 0][:3]  # a bare file may be shorter than a header
    if not size:
        reason = "it is missing or empty"
    elif magic in MAGICS:
        if magic == MAGIC and version == VERSION and tokens and size == HEADER_BYTES + TOKEN_BYTES * tokens:
            return NumberFile(path, "<u2", HEADER_BYTES, tokens)
        reason = f"its header says {tokens:,} tokens of version {version}, magic {magic}, and it has {size:,} bytes"
    elif size % TOKEN_BYTES:
        reason = f"it has {size:,} bytes, an odd number"
    else:
        return NumberFile(path, "<u2", 0, size // TOKEN_BYTES)
    raise ValueError(f"{path} is not a file of uint16 tokens: {reason}; prepare the data again")


class NumberFile:
    """An open token file or loss mask, `len(file)` numbers. If a new file replaces it, the old one is still read.

    Several threads may read at once. Raises OSError.
    """

    def __init__(self, path: Path, dtype: str, begin: int, n: int) -> None:
        self.path = path
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (it stays open as long as this object)
        self._dtype = np.dtype(dtype)
        self._begin = begin
        self._n = n
        self.n_bytes = begin + n * self._dtype.itemsize
        self._written_ns = os.fstat(self._file.fileno()).st_mtime_ns

    def __len__(self) -> int:
        return self._n

    def read(self, first: int, n: int) -> npt.NDArray[Any]:
        """Return a copy of numbers first .. first + n - 1. Raises DataError, if the file has become shorter, too."""
        size = max(0, min(n, self._n - first)) * self._dtype.itemsize
        begin = self._begin + first * self._dtype.itemsize
        # Not memory-mapped: if somebody cuts the file, reading past its new end would end the process with SIGBUS.
        try:
            if hasattr(os, "pread"):
                content = os.pread(self._file.fileno(), size, begin)
            else:
                with open(self.path, "rb") as file:  # Windows has no pread, and replaces no open file
                    file.seek(begin)
                    content = file.read(size)
        except OSError as e:
            raise DataError(f"cannot read {self.path}: {e.strerror}") from None
        now = os.fstat(self._file.fileno()).st_size
        if now < self.n_bytes or len(content) < size:
            raise DataError(
                f"{self.path} became shorter while it was in use: it had {self.n_bytes:,} bytes, now it has {now:,}; "
                "prepare the data again, then resume"
            )
        return np.frombuffer(content, self._dtype).copy()

    def sha256(self) -> str:
        """Return the SHA-256 of the whole file, in hex digits."""
        self._file.seek(0)
        return hashlib.file_digest(self._file, "sha256").hexdigest()

    def was_written(self) -> bool:
        """Return whether somebody has written into the file since it was opened, or since the last call."""
        before = self._written_ns
        self._written_ns = os.fstat(self._file.fileno()).st_mtime_ns
        return self._written_ns != before


# ---- the files of a split ------------------------------------------------------------------------------------


def dataset_folder(name: str) -> Path:
    """Return the folder that a run's --dataset means: one below data/, else a path as it is typed."""
    below = Path(__file__).parent / name
    is_path = len(Path(name).parts) > 1 or Path(name).exists()
    return Path(name) if is_path and not below.exists() else below


def token_files(folder: Path, split: str) -> list[Path]:
    """Return the shards of a split, in order. Raises ValueError, which says how to make them, if there are none.

    meta.json lists them. Otherwise they are found by their names; these must be of one kind.
    """
    listed = [folder / name for name in sorted(read_record(folder).get("files", {})) if name.startswith(split)]
    alone = folder / f"{split}.bin"
    if listed or alone.exists():
        return listed or [alone]
    numbered = re.compile(rf"(.*[_-])?{split}([_-]?\d[\d_-]*)?\.bin")
    found = {path: match[1] for path in sorted(folder.glob("*.bin")) if (match := numbered.fullmatch(path.name))}
    if not found:
        own = folder / "prepare.py"
        script = os.path.relpath(own) if own.exists() else f"data/text/prepare.py FILE --name {folder.name}"
        state = f"has no {split}.bin or numbered {split}_*.bin" if folder.is_dir() else "does not exist"
        if folder.is_file():
            raise ValueError(f"dataset={folder} is a file; name its folder: --dataset={folder.parent}")
        raise ValueError(f"dataset folder {folder} {state}; make it with python {script}, or name one that data/ has")
    if len(set(found.values())) > 1:
        names = ", ".join(path.name for path in found)
        raise ValueError(
            f"{folder} has several files for {split} ({names[:200]}); leave one kind of them in the folder"
        )
    return list(found)


def open_shards(folder: Path, split: str) -> list[NumberFile]:
    """Open all shards of a split. Raises ValueError if one is damaged or not as meta.json lists it, OSError."""
    paths = token_files(folder, split)
    entries = read_record(folder).get("files", {})
    allow_open_files()
    shards = [open_tokens(path) for path in paths]
    for shard in shards:
        n = len(shard)
        listed = entries.get(shard.path.name, {}).get("tokens", n)
        if n != listed:
            raise ValueError(f"{shard.path} has {n:,} tokens, and meta.json lists {listed:,}; prepare the data again")
    return shards


def open_masks(folder: Path, split: str, shards: list[NumberFile]) -> list[NumberFile]:
    """Open the loss masks of a split's shards: 0 if a token is not a target; [] if all tokens are.

    Raises ValueError if one is missing or has another length.
    """
    paths = [shard.path.with_suffix(MASK_SUFFIX) for shard in shards]
    listed = any(name.startswith(split) for name in read_record(folder).get("masks", {}))
    if not listed and not any(path.exists() for path in paths):
        return []
    masks = []
    for path, shard in zip(paths, shards, strict=True):
        size = path.stat().st_size if path.is_file() else 0
        if size != len(shard):
            raise ValueError(
                f"the loss mask {path} has {size:,} bytes, and {shard.path.name} {len(shard):,} tokens, which need one "
                "each; prepare the data again"
            )
        masks.append(NumberFile(path, "u1", 0, size))
    return masks


def listed_checksums(folder: Path, split: str = "") -> dict[str, str]:
    """Return the SHA-256 of each token file, then of each mask, that meta.json lists for a split, in name order."""
    record = read_record(folder)
    entries = sorted(record.get("files", {}).items()) + sorted(record.get("masks", {}).items())
    return {name: entry["sha256"] for name, entry in entries if name.startswith(split)}


# ---- the description -----------------------------------------------------------------------------------------


def read_meta(folder: Path) -> dict[str, Any]:
    """Return a folder's {"tokenizer": its meta(), {} if unknown, "vocab_size": ..., "end_of_text": ...}.

    It comes from meta.json, else from nanoGPT's meta.pkl, else GPT-2's is assumed, as nanoGPT does. end_of_text is the
    token that documents begin with, None if there is none. Raises ValueError if the description cannot be read.
    """
    meta = read_record(folder) or read_nanogpt(folder) or GPT2
    return {name: meta.get(name) for name in ("tokenizer", "vocab_size", "end_of_text")}


def check_vocabulary(
    folder: Path, meta: dict[str, Any], model_vocab: int, model_tokenizer: dict[str, Any] | None
) -> None:
    """Raise ValueError if the data was not made with the tokenizer that the model was trained with.

    model_tokenizer is None if it is not known; then the sizes must match, padded or not.
    """
    tokenizer = meta["tokenizer"]
    same_size = model_vocab in (meta["vocab_size"], padded_vocab_size(tokenizer, meta["vocab_size"]))
    if same_size and (not model_tokenizer or not tokenizer or model_tokenizer == tokenizer):
        return
    raise ValueError(
        f"{folder} has a vocabulary of {meta['vocab_size']} (tokenizer {short_name(tokenizer)}), the model one of "
        f"{model_vocab} (tokenizer {short_name(model_tokenizer or {})}); prepare the data with the model's tokenizer, "
        "or use --init_from=scratch"
    )
