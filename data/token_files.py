"""Token files: their format, the files of a split, and the description of a data folder.

A data folder holds `train*.bin` and `val*.bin`: little-endian uint16 token ids, either bare (nanoGPT) or after
llm.c's header of 256 int32 (magic 20240520, version 1, number of tokens). Several files of one split are its
shards, in name order. `meta.json` in the same folder describes tokenizer, source and files; where it is missing,
nanoGPT's `meta.pkl` is read.
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

from data.tokenizer import Ids, Tokenizer, padded_vocab_size
from deskgpt.files import file_sha256, sha256, write_atomically

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 1024

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
    """The token ids (n,) of a file, memory-mapped. Raises ValueError where the file is not a token file."""
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{path} is empty; prepare the data again")
    if size >= HEADER_BYTES:
        magic, version, tokens = np.fromfile(path, "<i4", 3).tolist()
        # Both must match: bare tokens may happen to begin with the magic, but hardly with the version after it.
        if magic == MAGIC and version == VERSION:
            expected = HEADER_BYTES + 2 * tokens
            if size != expected:
                raise ValueError(
                    f"{path}: its header says {tokens:,} tokens, which take {expected:,} bytes, and the file has "
                    f"{size:,}; prepare the data again"
                )
            return np.memmap(path, "<u2", "r", HEADER_BYTES, (tokens,))
    if size % 2:
        raise ValueError(
            f"{path} has {size:,} bytes, an odd number: these are not uint16 tokens; prepare the data again"
        )
    return np.memmap(path, "<u2", "r")


# ---- the files of a split ------------------------------------------------------------------------------------


def token_files(folder: Path, split: str) -> list[Path]:
    """The shards of a split, in order. Raises ValueError, which says how to make them, where there are none."""
    paths = sorted(folder.glob(f"{split}*.bin"))
    if not paths:
        raise ValueError(how_to_make(folder, split))
    return paths


def how_to_make(folder: Path, split: str) -> str:
    """The message where a split has no files: the script that makes them, or the data that there is instead."""
    script = folder / "prepare.py"
    if script.exists():
        return f"{folder} has no {split}*.bin; run: python {os.path.relpath(script)}"
    state = f"has no {split}*.bin" if folder.is_dir() else "does not exist"
    prepared = sorted({path.parent.name for path in folder.parent.glob("*/train*.bin")})
    if prepared:
        return f"dataset folder {folder} {state}; prepared: {', '.join(prepared)}"
    scripts = sorted(path.parent.name for path in Path(__file__).parent.glob("*/prepare.py"))
    return f"dataset folder {folder} {state}; python data/{{{','.join(scripts)}}}/prepare.py makes some"


def check_listed(folder: Path, split: str, found: dict[str, int]) -> None:
    """Raises ValueError where a file that meta.json lists for the split is missing or has another number of tokens.

    found: the number of tokens of each file, by name.
    """
    try:
        files = json.loads((folder / "meta.json").read_text())["files"]
        listed = {name: entry["tokens"] for name, entry in files.items() if name.startswith(split)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # nanoGPT's folders have no such list
    for name, tokens in listed.items():
        if found.get(name) == tokens:
            continue
        state = f"has {found[name]:,}" if name in found else "is not there"
        raise ValueError(
            f"{folder / name} {state}, and meta.json lists it with {tokens:,} tokens; prepare the data again"
        )


def listed_sha256(folder: Path, split: str) -> str | None:
    """One checksum for those that meta.json lists for the split's files; None where one is not listed."""
    try:
        files = json.loads((folder / "meta.json").read_text())["files"]
        listed = [files[path.name]["sha256"] for path in token_files(folder, split)]
        return sha256("\n".join(listed).encode())[:16]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


# ---- a whole data set ----------------------------------------------------------------------------------------


def write_dataset(folder: Path, splits: dict[str, Ids], tokenizer: Tokenizer, source: str) -> dict[str, Any]:
    """Writes {"train": ids, "val": ids} as bare token files with their meta.json, which it returns.

    val.bin gets its name last: wherever this stops, the folder holds the old data, the new, or no val.bin. Raises
    ValueError if other shards are in the way, OSError if the disk is full, with the old data unharmed.
    """
    files = {}
    for split, ids in splits.items():
        files[f"{split}.bin"] = {"tokens": len(ids), "sha256": sha256(ids.astype("<u2"))}
    meta = {"tokenizer": tokenizer.meta(), "vocab_size": tokenizer.vocab_size, "source": source, "files": files}
    others = {path.name for split in splits for path in folder.glob(f"{split}*.bin")} - set(files)
    if others:
        raise ValueError(
            f"{folder} holds other shards ({', '.join(sorted(others))}), which would be read too; choose another name"
        )
    new = {name: folder / f"{name}.new" for name in files}
    try:
        # First everything that takes space, then the names.
        for split, ids in splits.items():
            write_tokens(new[f"{split}.bin"], ids)
        (folder / "val.bin").unlink(missing_ok=True)
        os.replace(new["train.bin"], folder / "train.bin")
        write_meta(folder, meta)
        os.replace(new["val.bin"], folder / "val.bin")
    finally:
        for path in new.values():
            with suppress(OSError):
                path.unlink(missing_ok=True)
    return meta


def is_prepared(folder: Path, source: str) -> bool:
    """Whether folder holds what was prepared from `source`, unharmed: every file has the checksum of meta.json."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        unharmed = [file_sha256(folder / name) == entry["sha256"] for name, entry in meta["files"].items()]
        return meta["source"] == source and all(unharmed)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """Writes the description of a folder's token files to its meta.json. Raises OSError."""
    write_atomically(folder / "meta.json", json.dumps(meta, indent=1).encode())


# ---- the description -----------------------------------------------------------------------------------------


def read_meta(folder: Path) -> dict[str, Any]:
    """The description of a folder's token files: {"tokenizer": its meta(), "vocab_size": ..., "end_of_text": ...}.

    It comes from meta.json, else from nanoGPT's meta.pkl, else it is GPT-2's, as nanoGPT assumes. end_of_text is the
    token between documents, None if the data has no such token or it is not known; an unknown tokenizer is {}.
    Raises ValueError where the description cannot be read.
    """
    for path, read in ((folder / "meta.json", from_json), (folder / "meta.pkl", from_pickle)):
        if not path.exists():
            continue
        try:
            return read(path)
        except Exception as e:  # a damaged pickle can raise nearly anything
            raise ValueError(
                f"{path} does not describe token files ({type(e).__name__}: {e}); prepare the data again"
            ) from None
    return {"tokenizer": {"name": "gpt2"}, "vocab_size": 50257, "end_of_text": 50256}


def from_json(path: Path) -> dict[str, Any]:
    """The description in a meta.json. Raises an exception of any class where it is damaged."""
    meta = json.loads(path.read_text())
    tokenizer = dict(meta["tokenizer"])
    vocab_size = int(meta["vocab_size"])
    if vocab_size < 1 or (tokenizer["name"] == "char" and len(tokenizer["chars"]) != vocab_size):
        raise ValueError(f"vocab_size={vocab_size} does not fit the tokenizer")
    return {"tokenizer": tokenizer, "vocab_size": vocab_size, "end_of_text": meta.get("end_of_text")}


def from_pickle(path: Path) -> dict[str, Any]:
    """The description in nanoGPT's meta.pkl. Raises an exception of any class where it is damaged."""
    meta = BuiltinsOnly(io.BytesIO(path.read_bytes())).load()
    tokenizer: dict[str, Any] = {}
    itos = meta.get("itos")  # some folders of nanoGPT users have a vocab_size only: enough to train on
    if itos:
        tokenizer = {"name": "char", "chars": "".join(itos[i] for i in range(len(itos)))}
    return {"tokenizer": tokenizer, "vocab_size": int(meta["vocab_size"]), "end_of_text": None}


class BuiltinsOnly(pickle.Unpickler):
    """Unpickles dicts, lists, strings and numbers; refuses everything that would import or call something."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only plain values are read")


def check_vocabulary(
    folder: Path, meta: dict[str, Any], model_vocab: int, model_tokenizer: dict[str, Any] | None
) -> None:
    """Raises ValueError where the data was not made with the tokenizer that the model was trained with.

    model_tokenizer is None where it is not known; then the sizes must match, padded or not.
    """
    data_tokenizer = meta["tokenizer"]
    data_vocab = meta["vocab_size"]
    same_size = model_vocab in (data_vocab, padded_vocab_size(data_tokenizer, data_vocab))
    both_known = bool(model_tokenizer and data_tokenizer)
    if same_size and (not both_known or model_tokenizer == data_tokenizer):
        return
    data_name = data_tokenizer.get("name", "unknown")
    model_name = (model_tokenizer or {}).get("name", "unknown")
    difference = ", and their characters differ" if same_size else ""
    raise ValueError(
        f"{folder} has a vocabulary of {data_vocab} (tokenizer {data_name}), the model one of {model_vocab} "
        f"(tokenizer {model_name}){difference}; prepare the data with the model's tokenizer, or use "
        "--init_from=scratch"
    )
