"""Documents to shards of token ids: read from files here or on the hub, tokenized in several threads.

The shards are one sequence of tokens, cut every `shard_tokens`; each document begins with the tokenizer's end-of-text
token. The record of each shard has the position in the source where it ends, so that any of them can be made again,
byte for byte, without the ones before it.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from data.text_files import PACKED, documents_of, expanded, lines_in
from data.token_files import HEADER_BYTES, llmc_header
from data.tokenizer import Ids, Tokenizer, encoded_document, valid_unicode
from deskgpt.system.files import file_sha256, replacing

FORMATS = (".parquet", *(f"{name}{packed}" for name in (".jsonl", ".txt") for packed in PACKED))
BATCH_CHARS = 1 << 19  # many, so that handing a batch to a thread costs nothing in comparison
ROWS = 64  # of a parquet file that are decoded at once
BUFFER = 8 << 20  # bytes: without a buffer, pyarrow reads the text of a row group, often gigabytes, at once

Entry = dict[str, Any]  # of a shard in meta.json: tokens, sha256, end and, for the last one of the source, last


class Position(NamedTuple):
    """A position in the tokens of a source: this many tokens after the beginning of a row."""

    file: int
    row: int  # of the file
    used: int


# ---- documents -----------------------------------------------------------------------------------------------


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
        if isinstance(e, KeyError):
            return f"{where} has no column {self.text_column!r}; name the one with the text: --text_column"
        reason = e.msg if isinstance(e, json.JSONDecodeError) else first_line(e)
        remedy = "repair it or leave it out; finished shards are kept"
        if "://" in path:
            remedy = "was the network lost? The same command continues after the finished shards"
        return f"{where} cannot be read ({reason}); {remedy}"


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


# ---- tokens --------------------------------------------------------------------------------------------------


class TokenStream:
    """The tokens of a source from a position on."""

    def __init__(self, source: Source, tokenizer: Tokenizer, start: Position) -> None:
        self.position = start._replace(used=0)  # of the next token
        self._ids = np.zeros(0, np.uint16)  # the tokens left of the current batch of documents
        self._batches = encoded_batches(source, tokenizer, start)
        left = start.used
        while left and len(skipped := self.take(left)):
            left -= len(skipped)

    def take(self, at_most: int) -> Ids:
        """Return some of the next tokens, at most this many; none at the end of the source. Raises as Source.batches"""
        while not len(self._ids):
            batch = next(self._batches, None)
            if batch is None:
                return self._ids
            file, row, self._ids = batch
            self.position = Position(file, row, 0)
        taken = self._ids[:at_most]
        self._ids = self._ids[at_most:]
        self.position = self.position._replace(used=self.position.used + len(taken))
        return taken


def encoded_batches(source: Source, tokenizer: Tokenizer, start: Position) -> Iterator[tuple[int, int, Ids]]:
    """Yield the batches of a source, encoded ahead in several threads: (file, row of the first document, ids)."""

    def encode(file: int, row: int, texts: list[str]) -> tuple[int, int, Ids]:
        return file, row, np.concatenate([encoded_document(tokenizer, text) for text in texts])

    # Threads, not processes: tiktoken releases Python's lock, nothing is copied, and none is left when this is killed.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    waiting = deque[Future[tuple[int, int, Ids]]]()
    pool = ThreadPoolExecutor(cores)
    try:
        for batch in source.batches(start.file, start.row):
            waiting.append(pool.submit(encode, *batch))
            if len(waiting) > 2 * cores:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


# ---- shards --------------------------------------------------------------------------------------------------


def missing_shards(
    shards: Iterable[tuple[str, int]], entries: dict[str, Entry], harmed: Sequence[str] = ()
) -> Iterator[tuple[str, int, Position]]:
    """Yield name, size and first position of the shards to make: without an entry, harmed, or shorter than planned.

    The caller adds the entry of each before it asks for the next one, unless the source has ended.
    """
    start = Position(0, 0, 0)
    for name, size in shards:
        entry = entries.get(name)
        if entry is None or name in harmed or (entry["tokens"] < size and "last" not in entry):
            yield name, size, start
        if name not in entries or "last" in entries[name]:
            return
        start = Position(*entries[name]["end"])


def write_shard(path: Path, size: int, stream: TokenStream) -> Entry:
    """Write `size` tokens of the stream, or all that are left. Returns their entry in meta.json, {} for none."""
    ids = stream.take(size)
    if not len(ids):
        return {}
    bar = tqdm(total=size, desc=path.name, unit="tok", unit_scale=True, disable=None, leave=False, smoothing=0.05)
    try:
        with closing(bar), replacing(path) as file:
            file.write(bytes(HEADER_BYTES))  # replaced below, when the number of tokens is known
            tokens = 0
            while len(ids):
                file.write(ids.astype("<u2", copy=False).tobytes())
                tokens += len(ids)
                bar.update(len(ids))
                ids = stream.take(size - tokens) if tokens < size else ids[:0]
            file.seek(0)
            file.write(llmc_header(tokens))
            file.flush()
            checksum = file_sha256(Path(file.name))
    except OSError as e:
        remedy = "finished shards are kept: free some disk space and run the same command again"
        raise OSError(f"cannot write {path}: {e.strerror or e}; {remedy}") from None
    print(f"{path.name}: {tokens:,} tokens", flush=True)
    entry = {"tokens": tokens, "sha256": checksum, "end": stream.position}
    return entry | {"last": True} if tokens < size else entry
