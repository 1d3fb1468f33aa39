"""Documents as a stream: rows of parquet and jsonl files, whole txt files, on this machine or on the hub."""

from __future__ import annotations

import glob
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from tqdm import tqdm

from data.tokenizer import pieces_of_lines

FORMATS = {".parquet": "parquet", ".jsonl": "json", ".txt": "text"}
PACKED = (".gz", ".zst")
PACKED_RATIO = 3  # bytes of text per byte of a packed file, about
ATTEMPTS = 9  # at one place of the source, each of them with the attempts that the hub's own library makes
LONGEST_PAUSE_S = 60  # between attempts: 1, 2, 4 ... 60, 60 seconds

Result = TypeVar("Result")


class Row(NamedTuple):
    file: int
    row: int  # of the file
    begins: bool  # whether a document begins with it
    text: str


@dataclass(frozen=True)
class Source:
    """Files of documents, local or hf:// URLs: rows of parquet and lines of jsonl files, whole txt files.

    A txt file's rows are pieces of it; its line ends become "\\n".
    """

    name: str  # as meta.json records it
    files: list[str]
    text_column: str = "text"
    revision: str | None = None  # of a data set on the hub

    def rows(self, file: int, row: int) -> Iterator[Row]:
        """The rows from there on. Waits and tries again where the network fails.

        Raises ValueError where the network keeps failing or a file is damaged.
        """
        failures = 0
        while file < len(self.files):
            path = self.files[file]
            is_text = format_of(path) == "text"
            try:
                for text in self._texts(path, row):
                    yield Row(file, row, not is_text or row == 0, text)
                    row += 1
                    failures = 0
                file += 1
                row = 0
            except ImportError:
                raise
            except Exception as e:  # the hub's, its HTTP client's, pyarrow's and json's errors share no class
                if not is_network_fault(e):
                    raise self.unreadable(path, e) from None
                failures += 1
                wait_or_give_up(e, failures)

    def unreadable(self, path: str, e: Exception) -> ValueError:
        """The error to raise after reading path has raised e."""
        reason = first_line(e)
        if isinstance(e, KeyError) or "No match for FieldRef" in reason:
            return ValueError(f"{path} has no column {self.text_column!r}; name the one with the text: --text_column")
        return ValueError(
            f"{path} cannot be read as {format_of(path)} ({reason}); repair it or leave it out; finished shards are "
            "kept"
        )

    def _texts(self, path: str, first: int) -> Iterator[str]:
        """The texts of one file from row `first` on."""
        import datasets

        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs, over many lines, the errors it raises
        kind = format_of(path)
        if kind == "parquet":
            yield from self._texts_of_parquet(path, first)
            return
        if path.endswith(".zst"):
            import zstandard  # noqa: F401 (`datasets` unpacks with it: if it is missing, this line says so)
        options = {"sample_by": "line", "keep_linebreaks": True}
        stream = datasets.load_dataset("text", data_files=as_patterns(path), split="train", streaming=True, **options)
        lines = (row["text"] for row in stream)
        # Read jsonl line by line: as a table, its other columns would have to keep their types.
        texts = pieces_of_lines(lines) if kind == "text" else map(self._text_of_json, lines)
        yield from itertools.islice(texts, first, None)

    def _texts_of_parquet(self, path: str, first: int) -> Iterator[str]:
        import datasets
        from pyarrow import types
        from pyarrow.dataset import ParquetFragmentScanOptions

        stream = datasets.load_dataset(
            "parquet",
            data_files=as_patterns(path),
            split="train",
            streaming=True,
            columns=[self.text_column],
            batch_size=256,
            # pre_buffer=True, the default, holds all that was read of a file until its end: 2 GB of the hub's.
            fragment_scan_options=ParquetFragmentScanOptions(pre_buffer=False),
        )
        if first:
            stream = stream.skip(first)
        for table in stream.with_format("arrow").iter(batch_size=64):
            column = table[self.text_column]
            kind = column.type.value_type if types.is_dictionary(column.type) else column.type
            if not (types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind)):
                raise ValueError(f"column {self.text_column} holds {column.type}, not text")
            for text in column.to_pylist():
                yield text or ""

    def _text_of_json(self, line: str) -> str:
        """The text of a line of a jsonl file; none in an empty line. Raises ValueError, KeyError."""
        if line.isspace():
            return ""
        value = json.loads(line.lstrip("\ufeff"))
        text = value[self.text_column] if isinstance(value, dict) else value
        if not isinstance(value, dict) or not isinstance(text, str | None):
            raise ValueError(f"a line holds {type(text).__name__}, not an object with text in {self.text_column}")
        return (text or "").encode("utf-8", "replace").decode()  # json can spell halves of surrogate pairs


def as_patterns(path: str) -> list[str]:
    """The patterns that `datasets` takes for the one file with this very name, or for a URL."""
    return [path if "://" in path else glob.escape(path)]


def format_of(path: str) -> str:
    """parquet, json or text, by suffix. Raises ValueError."""
    name = Path(path).name.lower()
    packed = name.endswith(PACKED)
    suffix = Path(Path(name).stem if packed else name).suffix
    if suffix not in FORMATS or (packed and suffix == ".parquet"):
        raise ValueError(
            f"{path} is not one of *{', *'.join(FORMATS)}; the last two may also be packed, as {' or '.join(PACKED)}"
        )
    return FORMATS[suffix]


# ---- files on this machine ----------------------------------------------------------------------------------


def local_source(paths: list[Path], text_column: str) -> Source:
    """Files, and all readable files in folders, in name order. Raises ValueError where there are none."""
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"--source {path} does not exist")
        found = [p for p in path.rglob("*") if is_documents(path, p)] if path.is_dir() else [path]
        if not found:
            raise ValueError(f"--source {path} holds no *{', *'.join(FORMATS)} (or these packed: {', '.join(PACKED)})")
        files += sorted(found)
    for file in files:
        format_of(str(file))
    names = ", ".join(file.name for file in files[:3])
    if len(files) > 3:
        names += f" and {len(files) - 3} more"
    size = sum(file.stat().st_size for file in files)
    return Source(f"{names} ({size:,} bytes)", [os.path.abspath(file) for file in files], text_column)


def is_documents(folder: Path, path: Path) -> bool:
    """Whether to read a file found in folder: not hidden, no link to another file there, of a known format."""
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    twice = path.is_symlink() and path.resolve().is_relative_to(folder.resolve())
    try:
        return path.is_file() and not hidden and not twice and bool(format_of(str(path)))
    except ValueError:
        return False


def text_bytes(source: Source) -> int:
    """Bytes of text in local files, about. Raises ValueError where a parquet file is damaged."""
    from pyarrow import ArrowException
    from pyarrow.parquet import read_metadata

    total = 0
    for path in source.files:
        if format_of(path) != "parquet":
            total += os.path.getsize(path) * (PACKED_RATIO if path.endswith(PACKED) else 1)
            continue
        try:
            metadata = read_metadata(path)
        except (ArrowException, OSError) as e:
            raise source.unreadable(path, e) from None
        for group in range(metadata.num_row_groups):
            for column in metadata.row_group(group).to_dict()["columns"]:
                if column["path_in_schema"] == source.text_column:
                    total += column["total_uncompressed_size"]
    return total


# ---- network -------------------------------------------------------------------------------------------------


def is_network_fault(e: BaseException) -> bool:
    """Whether the cause of e is a connection or a server (status 408, 429, 500 and more)."""
    cause: BaseException | None = e
    while cause is not None:
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status is not None:
            return status in (408, 429) or status >= 500
        # The system's, httpx's, requests's, aiohttp's: no common class, but these names.
        names = {c.__name__ for c in type(cause).__mro__}
        if names & {"ConnectionError", "TimeoutError", "SSLError", "TransportError", "RequestException", "ClientError"}:
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def retried(call: Callable[[], Result]) -> Result:
    """The result of call, which is repeated where the network fails.

    Raises ValueError where the network keeps failing or the hub refuses.
    """
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # it reports each attempt of its own, over many lines
    failures = 0
    while True:
        try:
            return call()
        except Exception as e:
            if is_network_fault(e):
                failures += 1
                wait_or_give_up(e, failures)
                continue
            if not hasattr(e, "response"):
                raise
            reason = " ".join(str(e).split())[:160]
            raise ValueError(f"the hub refuses ({reason}...); does it ask for an account? hf auth login") from None


def wait_or_give_up(e: Exception, failures: int) -> None:
    """Sleeps longer with each failure in a row. Raises ValueError, with what to run next, after the last attempt."""
    reason = first_line(e)
    if failures >= ATTEMPTS or "offline" in type(e).__name__.lower():
        raise ValueError(
            f"the network failed {failures} times ({reason}); finished shards are kept, and the same command goes "
            "on after them; --source FILE reads local files"
        ) from None
    pause_s = min(2 ** (failures - 1), LONGEST_PAUSE_S)
    tqdm.write(f"network: {reason}; attempt {failures + 1} of {ATTEMPTS} in {pause_s}s")
    time.sleep(pause_s)


def first_line(e: Exception) -> str:
    """What e says, in one line of at most 160 characters; its class where it says nothing."""
    return (str(e).strip() or type(e).__name__).splitlines()[0][:160]
