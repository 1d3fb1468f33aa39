"""Documents as a stream: rows of parquet and jsonl files, documents of txt files, on this machine or on the hub."""

from __future__ import annotations

import glob
import io
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from tqdm import tqdm

from data.text_files import check_text, expanded
from data.tokenizer import END_OF_TEXT, pieces_of_lines, valid_unicode

FORMATS = {".parquet": "parquet", ".jsonl": "json", ".txt": "text"}
PACKED = (".gz", ".zst")
SUFFIXES = re.compile(r".*(?:(?P<parquet>\.parquet)|(?P<text>\.jsonl|\.txt)(?:\.gz|\.zst)?)", re.DOTALL)
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
    """Files of documents, local or hf:// URLs: rows of parquet and lines of jsonl files, documents of txt files.

    A txt file is one document, or several if lines with <|endoftext|> separate them. Its rows are pieces of documents,
    and its line ends become "\\n".
    """

    name: str  # as meta.json records it
    files: list[str]
    text_column: str = "text"
    revision: str | None = None  # of a data set on the hub

    def rows(self, file: int, row: int) -> Iterator[Row]:
        """The rows from there on. Waits and tries again if the network fails.

        Raises ValueError if the network keeps failing or a file is damaged.
        """
        failures = 0
        while file < len(self.files):
            path = self.files[file]
            try:
                for begins, text in self._texts(path, row):
                    yield Row(file, row, begins, text)
                    row += 1
                    failures = 0
                file += 1
                row = 0
            except ImportError:
                raise
            except Exception as e:  # the hub's, its HTTP client's, pyarrow's and json's errors share no class
                if not is_network_fault(e):
                    raise self._unreadable(path, row, e) from None
                failures += 1
                wait_or_give_up(e, failures)

    def _texts(self, path: str, first: int) -> Iterator[tuple[bool, str]]:
        """(whether a document begins, text) of the rows of one file from row `first` on."""
        kind = format_of(path)
        if kind == "parquet":
            for text in self._texts_of_parquet(path, first):
                yield True, text
            return
        import fsspec  # type: ignore[import-untyped]

        if path.endswith(".zst"):
            import zstandard  # noqa: F401 (fsspec unpacks with it: if it is missing, this line says so)
        with fsspec.open(path, "rb", compression="infer") as file:
            texts: Iterator[tuple[bool, str]]
            if kind == "json":
                texts = ((True, self._text_of_json(line)) for line in io.BufferedReader(file))
            else:
                texts = pieces_of_documents(path, io.TextIOWrapper(file, encoding="utf-8-sig"))
            yield from itertools.islice(texts, first, None)

    def _texts_of_parquet(self, path: str, first: int) -> Iterator[str]:
        import datasets
        from pyarrow import types
        from pyarrow.dataset import ParquetFragmentScanOptions

        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs, over many lines, the errors it raises
        stream = datasets.load_dataset(
            "parquet",
            data_files=[path if "://" in path else glob.escape(path)],  # which it takes for a pattern
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
            is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
            if not (is_text or types.is_null(kind)):
                raise ValueError(f"column {self.text_column} holds {column.type}, not text")
            for text in column.to_pylist():
                yield text or ""

    def _text_of_json(self, content: bytes) -> str:
        """The text of a line of a jsonl file; none in an empty line. Raises ValueError, KeyError."""
        line = content.decode("utf-8-sig")  # -sig: some editors put a mark first
        if not line.strip():
            return ""
        # Read line by line: as a table, the other columns would have to keep their types.
        value = json.loads(line)
        if not isinstance(value, dict):
            raise ValueError(f"it holds {type(value).__name__}, not an object")
        text = value[self.text_column]
        if not isinstance(text, str | None):
            raise ValueError(f"{self.text_column} holds {type(text).__name__}, not text")
        return valid_unicode(text or "")

    def _unreadable(self, path: str, row: int, e: Exception) -> ValueError:
        """The error to raise after reading this row of path has raised e."""
        kind = format_of(path)
        place = f"{path}, line {row + 1}," if kind == "json" else path
        reason = e.msg if isinstance(e, json.JSONDecodeError) else first_line(e)
        if isinstance(e, KeyError) or "No match for FieldRef" in reason:
            return ValueError(f"{place} has no column {self.text_column!r}; name the one with the text: --text_column")
        return ValueError(
            f"{place} cannot be read as {kind} ({reason}); repair it or leave it out; finished shards are kept"
        )


def pieces_of_documents(path: str, lines: Iterator[str]) -> Iterator[tuple[bool, str]]:
    """(whether a document begins, piece of text) of a text that comes line by line."""
    for is_separator, document in itertools.groupby(lines, lambda line: line.rstrip() == END_OF_TEXT):
        if not is_separator:
            for number, piece in enumerate(pieces_of_lines(document)):
                check_text(path, piece)
                yield number == 0, piece


def format_of(path: str) -> str:
    """parquet, json or text, by suffix. Raises ValueError."""
    match = SUFFIXES.fullmatch(Path(path).name.lower())
    if match is None:
        raise ValueError(
            f"{path} is not one of *{', *'.join(FORMATS)}; the last two may also be packed, as {' or '.join(PACKED)}"
        )
    return FORMATS[match["parquet"] or match["text"]]


# ---- files on this machine ----------------------------------------------------------------------------------


def local_source(paths: list[Path], text_column: str) -> Source:
    """Files, and all readable files in folders, in name order. Raises ValueError if there are none."""
    files: list[Path] = []
    for path in expanded(paths):
        if not path.exists():
            raise ValueError(f"--source {path} does not exist")
        found = [p for p in path.rglob("*") if is_documents(path, p)] if path.is_dir() else [path]
        if not found:
            raise ValueError(f"--source {path} holds no *{', *'.join(FORMATS)} (or these packed: {', '.join(PACKED)})")
        files += sorted(found)
    size = 0
    for file in files:
        format_of(str(file))
        size += file.stat().st_size
    names = ", ".join(file.name for file in files[:3])
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return Source(f"{names}{more} ({size:,} bytes)", [os.path.abspath(file) for file in files], text_column)


def is_documents(folder: Path, path: Path) -> bool:
    """Whether to read a file found in folder: not hidden, no link to another file there, of a known format."""
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    twice = path.is_symlink() and path.resolve().is_relative_to(folder.resolve())
    known = SUFFIXES.fullmatch(path.name.lower()) is not None
    return path.is_file() and known and not hidden and not twice


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
    """The result of call, which is repeated if the network fails.

    Raises ValueError if the network keeps failing or the hub refuses.
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
    """What e says, in one line of at most 160 characters; its class if it says nothing."""
    return (str(e).strip() or type(e).__name__).splitlines()[0][:160]
