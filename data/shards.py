"""Documents to shards of token ids: tokenized in several threads, continued where an earlier run stopped.

The shards of a folder, or of each part of it, are one sequence of tokens, cut every `shard_tokens`; each document
begins with the tokenizer's end-of-text token. For each shard a record has the place in the source where it ends, so
that any of them can be made again, byte for byte, without those before it.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from data.documents import Row, Source
from data.meta_files import write_meta
from data.token_files import HEADER_BYTES, find_tokens, llmc_header
from data.tokenizer import Ids, Tokenizer, encoded_document
from deskgpt.system.files import file_sha256, replacing

TASK_CHARS = 1 << 19  # in one task of a tokenizing thread: many, so that handing it over costs nothing in comparison

Entry = dict[str, Any]  # of a shard in meta.json: tokens, sha256, end and, for the last one, last


class Position(NamedTuple):
    """A place in the tokens of a source."""

    file: int
    row: int  # of the file
    used: int  # tokens of the row before this place


# ---- tokenizing ----------------------------------------------------------------------------------------------


class TokenStream:
    """The tokens of a source from a position on."""

    def __init__(self, source: Source, tokenizer: Tokenizer, position: Position) -> None:
        self.position = position  # of the next token
        self._ids = np.zeros(0, np.uint16)  # the tokens left of the row at hand
        self._rows = encoded_rows(source, tokenizer, position)

    def take(self, at_most: int) -> Ids:
        """The next tokens of one row, no more than at_most; none at the end of the source."""
        while not len(self._ids):
            row, ids = next(self._rows, (None, self._ids))
            if row is None:
                return ids
            used = self.position.used if (row.file, row.row) == self.position[:2] else 0
            self.position = Position(row.file, row.row, used)
            self._ids = ids[used:]
        taken = self._ids[:at_most]
        self._ids = self._ids[at_most:]
        file, row_number, used = self.position
        more = len(self._ids) > 0
        self.position = Position(file, row_number, used + len(taken)) if more else Position(file, row_number + 1, 0)
        return taken


def encoded_rows(source: Source, tokenizer: Tokenizer, position: Position) -> Iterator[tuple[Row, Ids]]:
    """The rows of a source with their ids, encoded ahead in several threads. Raises ValueError as Source.rows."""
    # Threads, not processes: tiktoken releases Python's lock, nothing is copied, and none is left when this is killed.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    waiting = deque[Future[list[tuple[Row, Ids]]]]()
    pool = ThreadPoolExecutor(cores)
    try:
        for task in tasks(source.rows(position.file, position.row)):
            waiting.append(pool.submit(encode_rows, tokenizer, task))
            if len(waiting) > 2 * cores:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def tasks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Rows in groups of at least TASK_CHARS characters."""
    held: list[Row] = []
    n_chars = 0
    for row in rows:
        held.append(row)
        n_chars += len(row.text)
        if n_chars >= TASK_CHARS:
            yield held
            held = []
            n_chars = 0
    yield held


def encode_rows(tokenizer: Tokenizer, rows: list[Row]) -> list[tuple[Row, Ids]]:
    return [(row, encoded_document(tokenizer, row.text)) for row in rows]


# ---- writing -------------------------------------------------------------------------------------------------


def plan(val_tokens: int, train_tokens: float, shard_tokens: int, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Names and sizes of the shards: val_000000.bin, train_000001.bin ..., the prefix before each number."""
    number = itertools.count()
    for split, left in (("val", val_tokens), ("train", train_tokens)):
        while left > 0:
            yield f"{split}_{prefix}{next(number):06}.bin", int(min(shard_tokens, left))
            left -= shard_tokens


def is_there(path: Path, size: int, entry: Entry) -> bool:
    """Whether the file has the tokens of its entry, and these are at least `size` or all that the source has."""
    try:
        _, tokens = find_tokens(path)
    except (OSError, ValueError):
        return False
    return tokens == entry.get("tokens") and (tokens >= size or "last" in entry)


def is_complete(folder: Path, shards: Iterable[tuple[str, int]], entries: dict[str, Entry]) -> bool:
    """Whether folder holds every one of the shards, or all that its source has."""
    for name, size in shards:
        if not is_there(folder / name, size, entries.get(name, {})):
            return False
        if "last" in entries[name]:
            break
    return True


def write_shards(
    folder: Path,
    meta: dict[str, Any],
    record: str,
    source: Source,
    tokenizer: Tokenizer,
    shards: Iterable[tuple[str, int]],
    damaged: list[str],
) -> None:
    """Writes the shards that folder lacks or that are damaged, and after each of them meta, as the file `record`.

    The shard with which the source ends is marked "last" there. Raises ValueError if the source cannot be read or has
    changed, OSError.
    """
    entries: dict[str, Entry] = meta["files"]
    position = Position(0, 0, 0)
    stream: TokenStream | None = None
    before: Entry = {}  # of the shard before this one
    for name, size in shards:
        old = entries.get(name, {})
        if is_there(folder / name, size, old) and name not in damaged:
            entry = old
            position = Position(*entry["end"])
            stream = None  # it is still before this shard
        else:
            stream = stream or TokenStream(source, tokenizer, position)
            entry = write_shard(folder / name, size, stream)
            if entry.get("tokens") == old.get("tokens", 0) and entry.get("sha256") != old.get("sha256"):
                raise ValueError(f"{folder / name} is not as it was: its source has changed; take another --out")
            if entry:
                entries[name] = entry
            else:
                before["last"] = True
            write_meta(folder, meta, record)
        if not entry or "last" in entry:
            break
        before = entry


def write_shard(path: Path, size: int, stream: TokenStream) -> Entry:
    """Writes `size` tokens of the stream, or all that are left. Returns their entry in meta.json, {} for none."""
    ids = stream.take(size)
    if not len(ids):
        return {}
    bar = tqdm(total=size, desc=path.name, unit="tok", unit_scale=True, disable=None, leave=False, smoothing=0.05)
    try:
        with closing(bar), replacing(path) as file:
            file.write(bytes(HEADER_BYTES))  # room for it: the number of tokens is not known yet
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
