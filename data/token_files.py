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

import os
import re
from pathlib import Path
from typing import Any

from data.meta_files import read_nanogpt, read_record
from data.tokenizer import padded_vocab_size, short_name

MAGIC = 20240520
MAGICS = (MAGIC, 20240801)  # the latter of files with 32-bit ids, which are an error
VERSION = 1
HEADER_BYTES = 1024
TOKEN_BYTES = 2
MASK_SUFFIX = ".mask"
GPT2 = {"tokenizer": {"name": "gpt2"}, "vocab_size": 50257, "end_of_text": 50256}


# ---- the files of a split ------------------------------------------------------------------------


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
        own = folder / "prepare.py"
        script = (
            os.path.relpath(own)
            if own.exists()
            else f"data/text/prepare.py FILE --name {folder.name}"
        )
        state = (
            f"has no {split}.bin or numbered {split}_*.bin" if folder.is_dir() else "does not exist"
        )
        if folder.is_file():
            raise ValueError(
                f"dataset={folder} is a file; name its folder: --dataset={folder.parent}"
            )
        raise ValueError(
            f"dataset folder {folder} {state}; make it with python {script}, or name one "
            "that data/ has"
        )
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
