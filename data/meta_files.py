"""Read and check the descriptions beside token files: meta.json, and nanoGPT's meta.pkl.

Anybody may have made them.

meta.json holds its own SHA-256 under the key "sha256": that of everything else in it, as JSON with
sorted keys and no spaces. Files without that key come from older versions.

Reading runs no code and raises nothing but ValueError and OSError.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data.tokenizer import MOST_IDS, from_meta, tokens_of
from deskgpt.files import Fields, check_record, is_number, read_small, sha256

CHECKSUM = "sha256"  # the key of meta.json's own checksum
JSON_BYTES = 64 << 20  # at most; that of 3,500 shards, 350B tokens, has 0.7 MB
PICKLE_BYTES = 4 << 20  # at most; one of 65,536 characters has 1.1 MB

# What is read of a record; prepare.py compares the rest with its own settings.
META: Fields = {
    "tokenizer": lambda value: isinstance(value, dict),
    "vocab_size": lambda value: is_number(value) and 1 <= value <= MOST_IDS,
    "end_of_text": lambda value: value is None or is_number(value),
    "files": lambda value: isinstance(value, dict),
    # of chat data
    "masks": lambda value: isinstance(value, dict),
    "packed": lambda value: value is None or (is_number(value) and value >= 1),
    "chat": lambda value: isinstance(value, str | None),
}
ENTRY: Fields = {
    "tokens": is_number,
    "sha256": lambda value: (
        isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None
    ),
}

# ---- meta.json -----------------------------------------------------------------------------------


def read_record(folder: Path) -> dict[str, Any]:
    """Return everything that a folder's meta.json records, {} without one.

    Raises ValueError if it is damaged or cannot be right, OSError.
    """
    with described(folder / "meta.json") as path:
        if not os.path.lexists(path):
            return {}
        try:
            meta = json.loads(read_small(path, JSON_BYTES))
            if isinstance(meta, dict) and CHECKSUM in meta and meta[CHECKSUM] != checksum_of(meta):
                raise ValueError(
                    "its checksum is not the one of its content: it is damaged or was "
                    "changed by hand"
                )
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        check_record(meta, META, required=("tokenizer", "vocab_size"))
        check_tokenizer(meta["tokenizer"], meta["vocab_size"])
        if (meta.get("end_of_text") or 0) >= meta["vocab_size"]:
            raise ValueError(
                f"end_of_text={meta['end_of_text']} is not below vocab_size={meta['vocab_size']}"
            )
        for key, suffix in (("files", ".bin"), ("masks", ".mask")):
            for name, entry in meta.get(key, {}).items():
                # Nothing outside of the folder
                if not re.fullmatch(rf"(train|val)[\w.-]*\{suffix}", name, re.ASCII):
                    raise ValueError(
                        f"{reprlib.repr(name)} is not a name such as train*{suffix} or val*{suffix}"
                    )
                check_record(entry, ENTRY, required=("tokens", "sha256"))
    return meta


@contextmanager
def described(path: Path) -> Iterator[Path]:
    """Name the file in a ValueError about a description."""
    try:
        yield path
    except ValueError as e:
        raise ValueError(
            f"{path} does not describe token files ({e}); delete it and prepare the data again"
        ) from None


def to_json(meta: dict[str, Any]) -> bytes:
    """Return the content of a meta.json, its checksum included."""
    return json.dumps(meta | {CHECKSUM: checksum_of(meta)}, indent=1).encode()


def checksum_of(meta: dict[str, Any]) -> str:
    """Return the checksum of a record, CHECKSUM itself left out."""
    content = {key: value for key, value in meta.items() if key != CHECKSUM}
    return sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def check_tokenizer(tokenizer: dict[str, Any], vocab_size: int) -> None:
    """Raise ValueError if a tokenizer's description is wrong or does not fit the size of the
    vocabulary.
    """
    if tokenizer in ({}, {"name": "gpt2"}):
        return
    if tokenizer.get("name") == "bpe":  # without tiktoken, which may not be installed
        size = len(tokens_of(tokenizer.get("merges"))) + 1
    else:
        size = from_meta(tokenizer).vocab_size
    if size != vocab_size:
        raise ValueError(f"vocab_size={vocab_size} does not fit the tokenizer")


# ---- meta.pkl ------------------------------------------------------------------------------------


class PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only plain values are read")


def read_nanogpt(folder: Path) -> dict[str, Any]:
    """Return the description in nanoGPT's meta.pkl, {"tokenizer", "vocab_size", "end_of_text"}; {}
    without one.

    The tokenizer is {} if it is not one of characters. Raises ValueError as read_record, OSError.
    """
    with described(folder / "meta.pkl") as path:
        if not os.path.lexists(path):
            return {}
        try:
            meta = PlainUnpickler(io.BytesIO(read_small(path, PICKLE_BYTES))).load()
            check_record(meta, META, required=["vocab_size"])
            itos = meta.get("itos") or {}
            pieces = [itos[i] for i in range(meta["vocab_size"] if itos else 0)]
            ids = {piece: i for i, piece in enumerate(pieces)}
            if not len(ids) == len(pieces) == len(itos) or meta.get("stoi") not in (None, ids):
                raise ValueError("vocab_size, itos and stoi contradict each other")
            is_char = bool(pieces) and all(len(piece) == 1 for piece in pieces)
            tokenizer = {"name": "char", "chars": "".join(pieces)} if is_char else {}
        except Exception as e:  # a damaged pickle can raise nearly anything
            raise ValueError(f"{type(e).__name__}: " + " ".join(str(e).split())[:200]) from None
    return {"tokenizer": tokenizer, "vocab_size": meta["vocab_size"], "end_of_text": None}
