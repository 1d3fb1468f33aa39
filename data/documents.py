"""Documents as a stream: rows of parquet and jsonl files, documents of txt files, on this machine or on the hub."""

from __future__ import annotations

import glob
import itertools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from data.text_files import documents_of, expanded, lines_in
from data.tokenizer import valid_unicode

FORMATS = re.compile(r"\.(?:(parquet)|(jsonl|txt)(?:\.(?:gz|zst|bz2|xz))?)$", re.IGNORECASE)


class Row(NamedTuple):
    file: int
    row: int  # of the file
    text: str  # a document


@dataclass(frozen=True)
class Source:
    """Files of documents: rows of parquet (also hf:// URLs), lines of jsonl, what <|endoftext|> separates in txt."""

    name: str  # as meta.json records it
    files: list[str]
    text_column: str = "text"
    revision: str | None = None  # of a data set on the hub

    def rows(self, file: int, row: int) -> Iterator[Row]:
        """The rows from there on. Raises ValueError if one cannot be read."""
        for number in range(file, len(self.files)):
            try:
                for text in self._texts(self.files[number], row):
                    yield Row(number, row, text)
                    row += 1
            except ImportError:
                raise
            except Exception as e:  # the hub's, its HTTP client's, pyarrow's and json's errors share no class
                raise self._unreadable(self.files[number], row, e) from None
            row = 0

    def _texts(self, path: str, first: int) -> Iterator[str]:
        """The documents of one file from row `first` on."""
        kind = format_of(path)
        if kind == "parquet":
            return self._texts_of_parquet(path, first)
        lines = lines_in(Path(path))
        documents = map(self._text_of_json, lines) if kind == "jsonl" else documents_of(lines)
        return itertools.islice(documents, first, None)

    def _texts_of_parquet(self, path: str, first: int) -> Iterator[str]:
        import datasets
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
        for table in stream.skip(first).with_format("arrow").iter(batch_size=64):
            yield from map(self._text_of, table[self.text_column].to_pylist())

    def _text_of_json(self, line: str) -> str:
        """The text of a line of a jsonl file; none in an empty line. Raises ValueError, KeyError, TypeError."""
        # Read line by line: as a table, the other columns would have to keep their types.
        return valid_unicode(self._text_of(json.loads(line)[self.text_column])) if line.strip() else ""

    def _text_of(self, value: Any) -> str:
        """A value of the text column as text. Raises ValueError."""
        if not isinstance(value, str | None):
            raise ValueError(f"{self.text_column} holds {type(value).__name__}, not text")
        return value or ""

    def _unreadable(self, path: str, row: int, e: Exception) -> ValueError:
        """The error to raise after reading this row of path has raised e."""
        reason = e.msg if isinstance(e, json.JSONDecodeError) else first_line(e)
        place = f"{path}, line {row + 1}," if format_of(path) == "jsonl" else path
        if "://" in path:
            advice = "was the network lost? The same command goes on after the finished shards"
            return ValueError(f"{path} cannot be read ({reason}); {advice}")
        if isinstance(e, KeyError) or "No match for FieldRef" in reason:
            return ValueError(f"{place} has no column {self.text_column!r}; name the one with the text: --text_column")
        return ValueError(f"{place} cannot be read ({reason}); repair it or leave it out; finished shards are kept")


def format_of(path: Path | str) -> str | None:
    """parquet, jsonl or txt, by suffix; None of another file."""
    found = FORMATS.search(str(path))
    return (found[1] or found[2]).lower() if found else None


# ---- files on this machine ----------------------------------------------------------------------------------


def local_source(paths: list[Path], text_column: str) -> Source:
    """Files, and all readable files in folders, in name order. Raises ValueError if there are none."""
    files: list[Path] = []
    for path in expanded(paths):
        if not path.exists():
            raise ValueError(f"--source {path} does not exist")
        found = [file for file in path.rglob("*") if is_documents(path, file)] if path.is_dir() else [path]
        if not found or not all(map(format_of, found)):
            raise ValueError(f"--source {path} is or holds no *.parquet, *.jsonl or *.txt (the latter also packed)")
        files += sorted(found)
    size = sum(file.stat().st_size for file in files)
    names = ", ".join(file.name for file in files[:3])
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return Source(f"{names}{more} ({size:,} bytes)", [os.path.abspath(file) for file in files], text_column)


def is_documents(folder: Path, path: Path) -> bool:
    """Whether to read a file found in folder: of a known format, not hidden."""
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return path.is_file() and format_of(path) is not None and not hidden


def first_line(e: Exception) -> str:
    """What e says, in one line of at most 160 characters; its class if it says nothing."""
    return (str(e).strip() or type(e).__name__).splitlines()[0][:160]
