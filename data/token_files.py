"""Token files: their format, the files of a split, and the description of a data folder.

A data folder holds the files of two splits, train and val: little-endian uint16 token ids, either
bare (nanoGPT) or after llm.c's header of 256 int32 (magic 20240520, version 1, number of tokens).
meta.json beside them lists the files and describes tokenizer and source. If it is missing,
nanoGPT's meta.pkl is read, and the files are found by their names: train.bin, or numbered shards
such as train_000001.bin or fineweb_train_000001.bin.

Beside a token file there may be a loss mask of the same name, `train*.mask` or `val*.mask`: one
uint8 per token, 0 if it is not learned as a target. Either all shards of a split have one or none
has.

meta.json holds its own SHA-256 under the key "sha256": that of everything else in it, as JSON with
sorted keys and no spaces. Files without that key come from older versions.

Anybody may have made these files. Reading them runs no code and raises nothing but ValueError and
OSError.
"""

import io
import json
import os
import pickle
import re
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.tokenizer import MOST_IDS, from_meta, tokens_of
from deskgpt.errors import did_you_mean, python_command, reason
from deskgpt.files import Fields, check_record, is_number, read_small, sha256
from deskgpt.limits import allow_open_files

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 1024
TOKEN_BYTES = 2
MASK_SUFFIX = ".mask"
LOOKED_AT = 256  # numbers at the beginning of a file that tell ids of 32 bits
NOT_BARE = (MAGIC, 20240801)  # files begin with these; the latter are llm.c's ids of 32 bits

GPT2 = {"tokenizer": {"name": "gpt2"}, "vocab_size": 50257}
CHECKSUM = "sha256"  # the key of meta.json's own checksum
JSON_BYTES = 64 << 20  # at most; that of 3,500 shards, 350B tokens, has 0.7 MB
PICKLE_BYTES = 4 << 20  # at most; one of 65,536 characters has 1.1 MB

# The keys of a record that are read; prepare.py compares the rest with its own settings.
META: Fields = {
    "vocab_size": lambda value: is_number(value) and 1 <= value <= MOST_IDS,
    # Chat data has the length of its windows here.
    "packed": lambda value: value is None or (is_number(value) and value >= 1),
    "chat": lambda value: isinstance(value, str | None),
}
ENTRY: Fields = {
    "tokens": is_number,
    "sha256": lambda value: re.fullmatch("[0-9a-f]{64}", value) is not None,
}


class Numbers(NamedTuple):
    """Where the numbers of a token file or loss mask are: n of them from the byte `begin` on."""

    path: Path
    begin: int
    n: int


# ---- the files of a split ------------------------------------------------------------------------


def split_files(
    folder: Path, split: str, block_size: int
) -> tuple[list[Numbers], list[Numbers], bool]:
    """Return the shards of a split that hold a window, their loss masks (none if all tokens are
    targets), and whether they are packed into windows.

    Raises ValueError if a file is damaged or too short, OSError.
    """
    record = read_record(folder)
    packed = record.get("packed")
    if packed not in (None, block_size):
        raise ValueError(
            f"{folder} is packed into windows of {packed:,} tokens, and block_size={block_size}; "
            f"try --block_size={packed}, or prepare the data again with --block_size={block_size}"
        )
    found = [tokens_in_file(path) for path in token_files(folder, split, record)]
    shards = [shard for shard in found if shard.n > block_size]
    if not shards:
        longest = max(shard.n for shard in found)
        raise ValueError(
            f"block_size={block_size} needs {block_size + 1} tokens in a row, "
            f"{folder}/{split}*.bin: {longest:,}; try more data, or "
            f"--block_size={max(1, longest - 1)}"
        )
    masks = [Numbers(shard.path.with_suffix(MASK_SUFFIX), 0, shard.n) for shard in shards]
    is_listed = any(name.startswith(split) for name in record.get("masks", {}))
    if not is_listed and not any(mask.path.exists() for mask in masks):
        masks = []
    for path, _, n in masks:
        if not path.is_file() or path.stat().st_size != n:
            raise ValueError(
                f"the loss mask {path} must have {n:,} bytes, one for each token; prepare the "
                "data again"
            )
    allow_open_files()
    return shards, masks, bool(packed)


def tokens_in_file(path: Path) -> Numbers:
    """Return where the tokens of a file are.

    Raises ValueError if it is not a token file, OSError.
    """
    size = path.stat().st_size if path.is_file() else 0
    head = np.fromfile(path, "<i4", LOOKED_AT) if size else np.zeros(0, "<i4")
    magic, version, n = [*head.tolist(), 0, 0, 0][:3]  # a bare file may be shorter
    is_whole = size == HEADER_BYTES + TOKEN_BYTES * n
    if magic == MAGIC and version == VERSION and is_whole and n:
        return Numbers(path, HEADER_BYTES, n)
    # Ids of 32 bits, read as uint16, would have token 0 in every second place.
    has_32_bits = len(head) == LOOKED_AT and head.min() >= 0 and 1 < head.max() < MOST_IDS
    if not size or size % TOKEN_BYTES or magic in NOT_BARE or has_32_bits:
        raise ValueError(
            f"{path} ({size:,} bytes) is not a whole file of uint16 tokens, bare or with llm.c's "
            "header; prepare the data again, or write bare ids: ids.astype('<u2').tofile(path)"
        )
    return Numbers(path, 0, size // TOKEN_BYTES)


def dataset_folder(name: str) -> Path:
    """Return the folder that a run's --dataset means: one below data/, else a path that exists."""
    below = Path(__file__).parent / name
    return below if below.exists() or not Path(name).exists() else Path(name)


def token_files(folder: Path, split: str, record: dict[str, Any]) -> list[Path]:
    """Return the shards of a split, in order.

    record: of meta.json, which lists them. Otherwise they are found by their names; these must be
    of one kind. Raises ValueError, which says how to make them, if there are none.
    """
    listed = sorted(name for name in record.get("files", {}) if name.startswith(split))
    if listed or (folder / f"{split}.bin").exists():
        return [folder / name for name in listed or [f"{split}.bin"]]
    numbered = re.compile(rf"(.*[_-])?{split}([_-]?\d[\d_-]*)?\.bin")
    found = {
        path: match[1]
        for path in sorted(folder.glob("*.bin"))
        if (match := numbered.fullmatch(path.name))
    }
    if len(set(found.values())) != 1:
        names = ", ".join(path.name for path in found)[:200] or "no *.bin"
        command = f"data/text/prepare.py FILE --name {folder.name}"
        if (folder / "prepare.py").exists():
            command = os.path.relpath(folder / "prepare.py")
        remedy = f"make it with {python_command()} {command}, or name one that data/ has"
        if not folder.exists():
            beside = folder.parent
            others = [*beside.glob("*/prepare.py"), *beside.glob("*/train*.bin")]
            remedy = did_you_mean(folder.name, [path.parent.name for path in others], remedy)
        raise ValueError(
            f"dataset {folder} has no {split}.bin and no numbered {split}_*.bin of one kind; it "
            f"has {names}: {remedy}"
        )
    return list(found)


def listed_checksums(record: dict[str, Any], split: str = "") -> dict[str, str]:
    """Return the SHA-256 of each token file and mask that meta.json lists for a split, in name
    order.
    """
    entries = record.get("files", {}) | record.get("masks", {})
    names = sorted(name for name in entries if name.startswith(split))
    return {name: entries[name]["sha256"] for name in names}


# ---- the description -----------------------------------------------------------------------------


def read_meta(folder: Path) -> dict[str, Any]:
    """Return the description of a folder: "tokenizer" (its meta(), {} if unknown), "vocab_size",
    and all else in meta.json.

    Without meta.json, it comes from nanoGPT's meta.pkl, else GPT-2's is assumed, as nanoGPT does.
    Raises ValueError if the description cannot be read.
    """
    return read_record(folder) or read_nanogpt(folder) or GPT2


@contextmanager
def described(path: Path) -> Iterator[None]:
    """Turn any error about the content of a description into a ValueError that names the file."""
    try:
        yield
    except OSError:
        raise
    except Exception as e:  # damaged or malicious content can raise nearly anything
        raise ValueError(
            f"{path} does not describe token files ({reason(e)}); delete it and prepare the data "
            "again"
        ) from None


def read_record(folder: Path) -> dict[str, Any]:
    """Return everything that a folder's meta.json records, {} without one.

    Raises ValueError if it is damaged or cannot be right, OSError.
    """
    path = folder / "meta.json"
    if not os.path.lexists(path):
        return {}
    with described(path):
        meta: dict[str, Any] = json.loads(read_small(path, JSON_BYTES))
        check_record(meta, META, required=("tokenizer", "vocab_size"))
        if CHECKSUM in meta and meta[CHECKSUM] != checksum_of(meta):
            raise ValueError("its checksum differs: it is damaged or was changed by hand")
        check_tokenizer(meta["tokenizer"], meta["vocab_size"])
        for key, suffix in (("files", ".bin"), ("masks", MASK_SUFFIX)):
            for name, entry in meta.get(key, {}).items():
                # A name from elsewhere must not lead out of the folder.
                if not re.fullmatch(rf"(train|val)[\w.-]*\{suffix}", name, re.ASCII):
                    raise ValueError(
                        f"{reprlib.repr(name)} is not a name such as train*{suffix} or val*{suffix}"
                    )
                check_record(entry, ENTRY, required=("tokens", "sha256"))
    return meta


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
        size = len(tokens_of(tokenizer["merges"])) + 1
    else:
        size = from_meta(tokenizer).vocab_size
    if size != vocab_size:
        raise ValueError(f"vocab_size={vocab_size} does not fit the tokenizer")


class PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only plain values are read")


def read_nanogpt(folder: Path) -> dict[str, Any]:
    """Return the description in nanoGPT's meta.pkl, {"tokenizer", "vocab_size"}; {} without one.

    The tokenizer is {} if it is not one of characters. Raises ValueError as read_record, OSError.
    """
    path = folder / "meta.pkl"
    if not os.path.lexists(path):
        return {}
    with described(path):
        meta = PlainUnpickler(io.BytesIO(read_small(path, PICKLE_BYTES))).load()
        check_record(meta, META, required=["vocab_size"])
        itos = meta.get("itos") or {}
        pieces = [itos[i] for i in range(len(itos))]
        is_char = bool(pieces) and all(len(piece) == 1 for piece in pieces)
        tokenizer = {"name": "char", "chars": "".join(pieces)} if is_char else {}
        check_tokenizer(tokenizer, meta["vocab_size"])
    return {"tokenizer": tokenizer, "vocab_size": meta["vocab_size"]}
