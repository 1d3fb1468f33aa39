"""Documents to token files: read from files here or on the hub, tokenized in several threads."""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data.text_files import PACKED, documents_of, lines_in
from data.tokenizer import Ids, Tokenizer, encoded_document, valid_unicode
from deskgpt.system.files import replacing

FORMATS = (".parquet", *(f"{name}{packed}" for name in (".jsonl", ".txt") for packed in PACKED))
BATCH_CHARS = 1 << 19  # many, so that handing a batch to a thread costs nothing in comparison
ROWS = 64  # of a parquet file that are decoded at once
BUFFER = 8 << 20  # bytes: without a buffer, pyarrow reads the text of a row group, often gigabytes, at once

Entry = dict[str, Any]  # of a shard in meta.json: tokens, sha256, and cut if there were more tokens


# ---- documents -----------------------------------------------------------------------------------------------


def documents_in_file(path: str, text_column: str) -> Iterator[str]:
    """Yield the documents of a file: rows of parquet (also hf:// URLs), lines of jsonl, what <|endoftext|> separates.

    Raises ValueError, ImportError.
    """
    name = path.lower()
    number = 1  # of a line of jsonl
    try:
        if name.endswith(".parquet"):
            yield from parquet_texts(path, text_column)
        elif ".txt" in name[-8:]:
            yield from documents_of(lines_in(Path(path)))
        else:
            # Read line by line: as a table, the other columns would have to keep their types.
            for number, line in enumerate(lines_in(Path(path)), 1):  # noqa: B007
                if line.strip():
                    yield valid_unicode(as_text(json.loads(line)[text_column], text_column))
    except ImportError:
        raise
    except Exception as e:  # the errors of the hub, of its HTTP client, of pyarrow and of json share no class
        where = f"{path}, line {number}," if ".jsonl" in name[-10:] else path
        if isinstance(e, KeyError):
            remedy = "name the one with the text: --text_column"
            raise ValueError(f"{where} has no column {text_column!r}; {remedy}") from None
        reason = e.msg if isinstance(e, json.JSONDecodeError) else first_line(e)
        remedy = "repair it or leave it out; finished shards are kept"
        if "://" in path:
            remedy = "was the network lost? The same command continues after the finished shards"
        raise ValueError(f"{where} cannot be read ({reason}); {remedy}") from None


def parquet_texts(path: str, text_column: str) -> Iterator[str]:
    """Yield the texts of a column of a parquet file. Raises KeyError if it has no such column."""
    from pyarrow.parquet import ParquetFile

    file: Any = path
    if "://" in path:
        from huggingface_hub import HfFileSystem

        file = HfFileSystem().open(path)
    with ParquetFile(file, buffer_size=BUFFER) as parquet:
        if text_column not in parquet.schema_arrow.names:
            raise KeyError(text_column)
        for group in range(parquet.num_row_groups):
            for batch in parquet.iter_batches(ROWS, [group], [text_column]):
                yield from (as_text(value, text_column) for value in batch[text_column].to_pylist())


def as_text(value: Any, text_column: str) -> str:
    """Return a value of the column with the text; "" for none. Raises ValueError if it is not text."""
    if not isinstance(value, str | None):
        raise ValueError(f"{text_column} holds {type(value).__name__}, not text")
    return value or ""


def first_line(e: Exception) -> str:
    """Return the first line of an error's message, at most 160 characters; its class if it has no message."""
    return (str(e).strip() or type(e).__name__).splitlines()[0][:160]


# ---- tokens --------------------------------------------------------------------------------------------------


def batches_of(documents: Iterable[str]) -> Iterator[list[str]]:
    """Yield documents in lists of about BATCH_CHARS characters."""
    batch: list[str] = []
    n_chars = 0
    for document in documents:
        batch.append(document)
        n_chars += len(document)
        if n_chars >= BATCH_CHARS:
            yield batch
            batch = []
            n_chars = 0
    if batch:
        yield batch


def tokens_in(documents: Iterable[str], tokenizer: Tokenizer) -> Iterator[Ids]:
    """Yield the tokens of documents in pieces, encoded ahead in several threads."""

    def encode(batch: list[str]) -> Ids:
        return np.concatenate([encoded_document(tokenizer, text) for text in batch])

    # Threads, not processes: tiktoken releases Python's lock, nothing is copied, and none is left when this is killed.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    waiting = deque[Future[Ids]]()
    pool = ThreadPoolExecutor(cores)
    try:
        for batch in batches_of(documents):
            waiting.append(pool.submit(encode, batch))
            if len(waiting) > 2 * cores:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class TokenStream:
    """Tokens that come in pieces and are taken some at a time."""

    def __init__(self, pieces: Iterator[Ids]) -> None:
        self._pieces = pieces
        self._ids = np.zeros(0, np.uint16)  # the tokens left of the current piece

    def take(self, at_most: float) -> Ids:
        """Return some of the next tokens, at most this many; none at the end."""
        while not len(self._ids):
            piece = next(self._pieces, None)
            if piece is None:
                break
            self._ids = piece
        n = int(min(at_most, len(self._ids)))
        taken = self._ids[:n]
        self._ids = self._ids[n:]
        return taken


def write_shard(path: Path, at_most: float, stream: TokenStream) -> Entry:
    """Write the tokens of a stream, at most this many. Return their entry in meta.json, {} if there are none."""
    ids = stream.take(at_most)
    if not len(ids):
        return {}
    bar = tqdm(desc=path.name, unit="tok", unit_scale=True, disable=None, leave=False, smoothing=0.05)
    tokens = 0
    digest = hashlib.sha256()
    try:
        with closing(bar), replacing(path) as file:
            while len(ids):
                content = ids.astype("<u2", copy=False).tobytes()
                file.write(content)
                digest.update(content)
                tokens += len(ids)
                bar.update(len(ids))
                ids = stream.take(at_most - tokens)
    except OSError as e:
        remedy = "finished shards are kept: free some disk space and run the same command again"
        raise OSError(f"cannot write {path}: {e.strerror or e}; {remedy}") from None
    print(f"{path.name}: {tokens:,} tokens", flush=True)
    entry = {"tokens": tokens, "sha256": digest.hexdigest()}
    return entry | {"cut": True} if tokens == at_most else entry
