"""What the tests of data/fineweb_edu/prepare.py share."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from conftest import ROOT, Finished

from data.token_files import read_tokens

PREPARE = "data/fineweb_edu/prepare.py"
REAL_DOCUMENTS = ROOT.parent / "shared" / "data" / "fineweb_edu_schema"
END_OF_TEXT = 255  # of --encoding=bytes


def write_documents(path: Path, texts: Sequence[str | None], column: str = "text") -> Path:
    """Writes a file of documents, with one more column, in the format of its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"id": list(range(len(texts))), column: pa.array(texts, pa.string())}), path, 100)
        return path
    lines = "".join(json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(texts)).encode()
    pack: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstandard.compress}
    path.write_bytes(pack[path.suffix](lines) if path.suffix in pack else lines)
    return path


def as_bytes(texts: list[str]) -> bytes:
    """What --encoding=bytes makes of documents, one byte per token."""
    return b"".join(bytes([END_OF_TEXT]) + text.encode() for text in texts if text)


def tokens(folder: Path) -> np.ndarray:
    """All tokens of a folder in the order they were made."""
    paths = sorted(folder.glob("*.bin"), key=lambda p: p.stem.split("_")[1])
    return np.concatenate([read_tokens(p) for p in paths])


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.glob("[!.]*"))}


Script = Callable[..., Finished]
SMALL = ("--encoding=bytes", "--shard_tokens=250_000", "--val_tokens=50_000")


def fails(done: Finished) -> str:
    assert done.code == 1
    (line,) = done.err.splitlines()
    return line


def copied(prepared: tuple[Path, Path], to: Path) -> list[str]:
    """A copy of the prepared folder in `to`; the command that prepares it."""
    for name, content in contents(prepared[1]).items():
        (to / name).write_bytes(content)
    return [PREPARE, "--source", str(prepared[0]), *SMALL, "--out", str(to)]


def harm(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2] + b"xx")
