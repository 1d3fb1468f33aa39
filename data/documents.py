"""Documents as a stream: rows of parquet and jsonl files, documents of txt files, on this machine or on the hub."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.text_files import PACKED, documents_of, expanded, lines_in
from data.tokenizer import valid_unicode

FORMATS = (".parquet", *(f"{name}{packed}" for name in (".jsonl", ".txt") for packed in PACKED))
BATCH_CHARS = 1 << 19  # many, so that handing a batch to a thread costs nothing in comparison
ROWS = 64  # of a parquet file that are decoded at once
BUFFER = 8 << 20  # bytes: without a buffer, pyarrow reads the text of a row group, often gigabytes, at once


@dataclass(frozen=True)
class Source:
    """Files of documents: rows of parquet (also hf:// URLs), lines of jsonl, what <|endoftext|> separates in txt."""

    name: str  # as meta.json records it
    files: list[str]
    text_column: str = "text"
    revision: str | None = None  # of a data set on the hub

    def batches(self, file: int, row: int) -> Iterator[tuple[int, int, list[str]]]:
        """Yield the documents from this row of this file on, some at a time: (file, row of the first one, texts).

        Raises ValueError, ImportError.
        """
        for number in range(file, len(self.files)):
            texts: list[str] = []
            n_chars = 0
            try:
                for text in self._texts(self.files[number], row):
                    texts.append(text)
                    n_chars += len(text)
                    if n_chars >= BATCH_CHARS:
                        yield number, row, texts
                        row += len(texts)
                        texts = []
                        n_chars = 0
            except ImportError:
                raise
            except Exception as e:  # the errors of the hub, of its HTTP client, of pyarrow and of json share no class
                raise ValueError(self._reason(self.files[number], row + len(texts), e)) from None
            if texts:
                yield number, row, texts
            row = 0

    def _texts(self, path: str, first: int) -> Iterator[str]:
        """Yield the documents of one file from row `first` on."""
        name = path.lower()
        if name.endswith(".parquet"):
            return self._parquet_texts(path, first)
        lines = lines_in(Path(path))
        documents = documents_of(lines) if ".txt" in name[-8:] else map(self._json_text, lines)
        return itertools.islice(documents, first, None)

    def _parquet_texts(self, path: str, first: int) -> Iterator[str]:
        from pyarrow.parquet import ParquetFile

        file: Any = path
        if "://" in path:
            from huggingface_hub import HfFileSystem

            file = HfFileSystem().open(path)
        with ParquetFile(file, buffer_size=BUFFER) as parquet:
            if self.text_column not in parquet.schema_arrow.names:
                raise KeyError(self.text_column)
            for group in range(parquet.num_row_groups):
                n_rows = parquet.metadata.row_group(group).num_rows
                if first < n_rows:
                    batches = parquet.iter_batches(ROWS, [group], [self.text_column])
                    values = itertools.chain.from_iterable(batch[self.text_column].to_pylist() for batch in batches)
                    yield from map(self._text, itertools.islice(values, first, None))
                first = max(0, first - n_rows)

    def _json_text(self, line: str) -> str:
        # Read line by line: as a table, the other columns would have to keep their types.
        return valid_unicode(self._text(json.loads(line)[self.text_column])) if line.strip() else ""

    def _text(self, value: Any) -> str:
        if not isinstance(value, str | None):
            raise ValueError(f"{self.text_column} holds {type(value).__name__}, not text")
        return value or ""

    def _reason(self, path: str, row: int, e: Exception) -> str:
        """Return the error's message after reading this row of a file has raised e."""
        where = f"{path}, line {row + 1}," if ".jsonl" in path.lower()[-10:] else path
        reason = e.msg if isinstance(e, json.JSONDecodeError) else first_line(e)
        if isinstance(e, KeyError):
            return f"{where} has no column {self.text_column!r}; name the one with the text: --text_column"
        if "://" in path:
            return (
                f"{path} cannot be read ({reason}); was the network lost? The same command continues where it stopped"
            )
        return f"{where} cannot be read ({reason}); repair it or leave it out; finished shards are kept"


def local_source(paths: list[Path], text_column: str) -> Source:
    """Return a source of these files, of folders all readable ones in name order. Raises ValueError."""
    files = expanded(paths, FORMATS)
    for path in files:
        if not path.exists():
            raise ValueError(f"--source {path} does not exist")
        if not path.name.lower().endswith(FORMATS):
            raise ValueError(f"--source {path} is not a *.parquet, *.jsonl or *.txt file (the latter also packed)")
    n_bytes = sum(path.stat().st_size for path in files)
    names = ", ".join(path.name for path in files[:3])
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return Source(f"{names}{more} ({n_bytes:,} bytes)", [os.path.abspath(path) for path in files], text_column)


def first_line(e: Exception) -> str:
    """Return the first line of an error's message, at most 160 characters; its class if it has no message."""
    return (str(e).strip() or type(e).__name__).splitlines()[0][:160]
