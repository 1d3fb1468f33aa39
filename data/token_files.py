"""Token files: their format, the files of a split, and the description of a data folder.

A data folder holds the files of two splits, train and val: little-endian uint16 token ids, either
bare (nanoGPT) or after llm.c's header of 256 int32 (magic 20240520, version 1, number of tokens).
meta.json beside them lists the files and describes tokenizer and source. If it is missing,
nanoGPT's meta.pkl is read, and the files are found by their names: train.bin, or numbered shards
such as train_000001.bin or fineweb_train_000001.bin.

Beside a token file there may be a loss mask of the same name, `train*.mask` or `val*.mask`: one
uint8 per token, 0 if it is not learned as a target. Either all shards of a split have one or none
has.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.meta_files import read_nanogpt, read_record
from data.tokenizer import padded_vocab_size, short_name
from deskgpt.limits import allow_open_files

MAGIC = 20240520
MAGICS = (MAGIC, 20240801)  # the latter of files with 32-bit ids, which are an error
VERSION = 1
HEADER_BYTES = 1024
TOKEN_BYTES = 2
MASK_SUFFIX = ".mask"
NUMPY_MAGIC = int.from_bytes(b"\x93NUM", "little", signed=True)
LOOKED_AT = 256  # numbers at the beginning of a file that tell ids of 32 bits
GPT2 = {"tokenizer": {"name": "gpt2"}, "vocab_size": 50257, "end_of_text": 50256}


class Numbers(NamedTuple):
    """Where the numbers of a token file or loss mask are: n of them from the byte `begin` on."""

    path: Path
    dtype: str
    begin: int
    n: int


# ---- the files of a split ------------------------------------------------------------------------


def split_files(
    folder: Path, split: str, block_size: int
) -> tuple[list[Numbers], list[Numbers], bool]:
    """Return the shards of a split that hold a window, their loss masks (none if all tokens are
    targets), and whether they are packed into windows.

    Raises ValueError if a file is damaged, too short, or not as meta.json lists it, OSError.
    """
    record = read_record(folder)
    packed = record.get("packed")
    if packed not in (None, block_size):
        raise ValueError(
            f"{folder} is packed into windows of {packed:,} tokens, and block_size={block_size}; "
            f"try --block_size={packed}, or prepare the data again with --block_size={block_size}"
        )
    found = [tokens_in_file(path) for path in token_files(folder, split)]
    for path, _, _, n in found:
        listed = record.get("files", {}).get(path.name, {}).get("tokens", n)
        if n != listed:
            raise ValueError(
                f"{path} has {n:,} tokens, and meta.json lists {listed:,}; prepare the data again"
            )
    shards = [shard for shard in found if shard.n > block_size]
    if not shards:
        longest = max(shard.n for shard in found)
        raise ValueError(
            f"block_size={block_size} needs {block_size + 1} tokens in a row, "
            f"{folder}/{split}*.bin: {longest:,}; try more data, or "
            f"--block_size={max(1, longest - 1)}"
        )
    masks = [Numbers(s.path.with_suffix(MASK_SUFFIX), "u1", 0, s.n) for s in shards]
    is_listed = any(name.startswith(split) for name in record.get("masks", {}))
    if not is_listed and not any(mask.path.exists() for mask in masks):
        masks = []
    for path, _, _, n in masks:
        size = path.stat().st_size if path.is_file() else 0
        if size != n:
            raise ValueError(
                f"the loss mask {path} has {size:,} bytes, and its token file {n:,} tokens, which "
                "need one each; prepare the data again"
            )
    allow_open_files()
    return shards, masks, bool(packed)


def tokens_in_file(path: Path) -> Numbers:
    """Return where the tokens of a file are.

    Raises ValueError if it is not a token file, OSError.
    """
    size = path.stat().st_size if path.is_file() else 0
    head = np.fromfile(path, "<i4", LOOKED_AT) if size else np.zeros(0, "<i4")
    magic, version, tokens = [*head.tolist(), 0, 0, 0][:3]  # a bare file may be shorter
    bare = Numbers(path, "<u2", 0, size // TOKEN_BYTES)
    llmc = Numbers(path, "<u2", HEADER_BYTES, tokens)
    if not size:
        reason = "it is missing or empty"
    elif magic == NUMPY_MAGIC:
        reason = "it is a .npy file; write the bare ids: ids.astype('<u2').tofile('train.bin')"
    elif magic in MAGICS:
        is_whole = size == HEADER_BYTES + TOKEN_BYTES * tokens
        if magic == MAGIC and version == VERSION and tokens and is_whole:
            return llmc
        reason = (
            f"its header says {tokens:,} tokens of version {version}, magic {magic}, "
            f"and it has {size:,} bytes"
        )
    elif size % TOKEN_BYTES:
        reason = f"it has {size:,} bytes, an odd number"
    elif len(head) == LOOKED_AT and head.min() >= 0 and 1 < head.max() < 1 << 16:
        # As uint16, every second one would be token 0.
        reason = "its ids have 32 bits; write 16: ids.astype('<u2').tofile('train.bin')"
    else:
        return bare
    raise ValueError(f"{path} is not a file of uint16 tokens: {reason}; prepare the data again")


def dataset_folder(name: str) -> Path:
    """Return the folder that a run's --dataset means: one below data/, else a path as it is
    typed.
    """
    below = Path(__file__).parent / name
    is_path = len(Path(name).parts) > 1 or Path(name).exists()
    return Path(name) if is_path and not below.exists() else below


def token_files(folder: Path, split: str) -> list[Path]:
    """Return the shards of a split, in order.

    Raises ValueError, which says how to make them, if there are none.

    meta.json lists them. Otherwise they are found by their names; these must be of one kind.
    """
    listed = [
        folder / name
        for name in sorted(read_record(folder).get("files", {}))
        if name.startswith(split)
    ]
    alone = folder / f"{split}.bin"
    if listed or alone.exists():
        return listed or [alone]
    numbered = re.compile(rf"(.*[_-])?{split}([_-]?\d[\d_-]*)?\.bin")
    found = {
        path: match[1]
        for path in sorted(folder.glob("*.bin"))
        if (match := numbered.fullmatch(path.name))
    }
    if not found:
        if folder.is_file():
            raise ValueError(
                f"dataset={folder} is a file; name its folder: --dataset={folder.parent}"
            )
        state = f"has no {split}.bin or numbered {split}_*.bin"
        remedy = f"make it with python data/text/prepare.py FILE --name {folder.name}"
        if (folder / "prepare.py").exists():
            remedy = f"make it with python {os.path.relpath(folder / 'prepare.py')}"
        elif not folder.is_dir():
            state = "does not exist"
            others = [path.parent.name for path in folder.parent.glob("*/prepare.py")]
            others += [path.parent.name for path in folder.parent.glob("*/train*.bin")]
            if like := difflib.get_close_matches(folder.name, others, 1):
                remedy = f"did you mean {like[0]}? Else {remedy}"
        raise ValueError(f"dataset folder {folder} {state}; {remedy}, or name one that data/ has")
    if len(set(found.values())) > 1:
        names = ", ".join(path.name for path in found)
        raise ValueError(
            f"{folder} has several files for {split} ({names[:200]}); leave one kind of "
            "them in the folder"
        )
    return list(found)


def listed_checksums(folder: Path, split: str = "") -> dict[str, str]:
    """Return the SHA-256 of each token file, then of each mask, that meta.json lists for a split,
    in name order.
    """
    record = read_record(folder)
    entries = sorted(record.get("files", {}).items()) + sorted(record.get("masks", {}).items())
    return {name: entry["sha256"] for name, entry in entries if name.startswith(split)}


# ---- the description -----------------------------------------------------------------------------


def read_meta(folder: Path) -> dict[str, Any]:
    """Return a folder's {"tokenizer": its meta(), {} if unknown, "vocab_size": ..., "end_of_text":
    ...}.

    It comes from meta.json, else from nanoGPT's meta.pkl, else GPT-2's is assumed, as nanoGPT does.
    end_of_text is the token that documents begin with, None if there is none. Raises ValueError if
    the description cannot be read.
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
    same_size = model_vocab in (
        meta["vocab_size"],
        padded_vocab_size(tokenizer, meta["vocab_size"]),
    )
    if same_size and (not model_tokenizer or not tokenizer or model_tokenizer == tokenizer):
        return
    raise ValueError(
        f"{folder} has a vocabulary of {meta['vocab_size']} (tokenizer "
        f"{short_name(tokenizer)}), the model one of {model_vocab} (tokenizer "
        f"{short_name(model_tokenizer or {})}); prepare the data with the model's "
        "tokenizer, or use --init_from=scratch"
    )
