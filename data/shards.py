"""Documents to shards of token ids: tokenized in several threads, continued where an earlier run stopped.

The shards are one sequence of tokens, cut every `shard_tokens`; each document begins with the tokenizer's end-of-text
token. The record of each shard has the position in the source where it ends, so that any of them can be made again,
byte for byte, without the ones before it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from data.documents import Source
from data.token_files import HEADER_BYTES, llmc_header
from data.tokenizer import Ids, Tokenizer, encoded_document
from deskgpt.system.files import file_sha256, replacing

Entry = dict[str, Any]  # of a shard in meta.json: tokens, sha256, end and, for the last one of the source, last


class Position(NamedTuple):
    """A position in the tokens of a source: this many tokens after the beginning of a row."""

    file: int
    row: int  # of the file
    used: int


# ---- tokenizing ----------------------------------------------------------------------------------------------


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
