"""Helpers for the tests of data/fineweb_edu/prepare.py."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from conftest import Finished, assert_one_line

from data.fineweb_edu.prepare import arguments, main

PREPARE = "data/fineweb_edu/prepare.py"
END_OF_TEXT = 255  # of --tokenizer=bytes
PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": lambda content: pa.compress(content, "zstd", asbytes=True),
}


def write_documents(path: Path, texts: Sequence[str | None], column: str = "text") -> Path:
    """Write a file of documents, with one more column, in the format of its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"id": list(range(len(texts))), column: pa.array(texts, pa.string())}), path, 100)
        return path
    lines = "".join(json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(texts)).encode()
    path.write_bytes(PACK[path.suffix](lines) if path.suffix in PACK else lines)
    return path


def as_bytes(texts: list[str]) -> bytes:
    """Return the tokens of documents with --tokenizer=bytes, one byte per token."""
    return b"".join(bytes([END_OF_TEXT]) + text.encode() for text in texts if text)


def tokens(folder: Path) -> np.ndarray:
    """Return all tokens of a folder in the order they were made."""
    paths = [folder / "val_000000.bin", *sorted(folder.glob("train_*.bin"))]
    return np.concatenate([np.fromfile(path, "<u2") for path in paths])


Script = Callable[..., Finished]
SMALL = ("--tokenizer=bytes", "--shard_bytes=1", "--val_tokens=50_000")  # a shard for each file


def fails(done: Finished, *named: object) -> str:
    """Return the error of a script that ended with status 1: one line, which names these."""
    assert done.code == 1, done
    assert_one_line(done.err, *named)
    return done.err


def made(*options: str | Path) -> None:
    """Run prepare.py; raise what goes wrong."""
    main(arguments([*map(str, options)]))


# Put before code, this ends the process at once before or after one of its renames.
UNTIL_RENAME = """
import itertools, os, sys
at, after, *options = sys.argv[1:]
rename, calls = os.replace, itertools.count(1)
def rename_or_end(old, new):
    is_last = next(calls) == int(at)
    if is_last and after == "before":
        os._exit(9)
    rename(old, new)
    if is_last:
        os._exit(9)
os.replace = rename_or_end
"""
