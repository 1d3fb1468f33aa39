"""Documents to shards of token ids: tokenized in several threads, continued where an earlier run stopped.

The shards of a folder, or of each part of it, are one sequence of tokens, cut every `shard_tokens`; each document
begins with the tokenizer's end-of-text token. meta.json, or the part's own record, says for each shard where in the
source it ends, so that any of them can be made again, byte for byte, without those before it.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from data.documents import Row, Source
from data.token_files import HEADER_BYTES, llmc_header, read_tokens, write_meta
from data.tokenizer import Ids, Tokenizer, pieces
from deskgpt.system.files import file_sha256, replacing

TASK_CHARS = 1 << 19  # in one task of a tokenizing thread: many, so that handing it over costs nothing in comparison

Entry = dict[str, Any]  # of a shard in meta.json: tokens, documents, sha256, end and, for the last one, last


class Position(NamedTuple):
    """A place in the tokens of a source."""

    file: int
    row: int  # of the file
    used: int  # tokens of the row before this place


class Encoded(NamedTuple):
    """A row with token ids instead of its text."""

    file: int
    row: int
    begins: bool
    ids: Ids


# ---- tokenizing ----------------------------------------------------------------------------------------------


class TokenStream:
    """The tokens of a source from a position on."""

    def __init__(self, source: Source, tokenizer: Tokenizer, threads: int, position: Position) -> None:
        self.position = position  # of the next token
        self.documents = 0  # begun so far
        self._skip = position.used  # tokens to leave out of the next row
        self._begins = False  # whether a document begins with the row at hand
        self._ids = np.zeros(0, np.uint16)  # the tokens left of the row at hand
        tokenizer.encode_batch(["x"])  # builds what it needs, before several threads ask for it
        self._rows = encoded_rows(source, tokenizer, threads, position)

    def at_end(self) -> bool:
        """Whether no tokens are left."""
        while not len(self._ids):
            encoded = next(self._rows, None)
            if encoded is None:
                return True
            self._begin(encoded)
        return False

    def take(self, at_most: int) -> Ids:
        """The next tokens of one row, no more than at_most; none at the end of the source."""
        if self.at_end():
            return self._ids
        taken = self._ids[:at_most]
        self._ids = self._ids[at_most:]
        file, row, used = self.position
        self.documents += self._begins and used == 0
        row_is_used_up = len(self._ids) == 0
        self.position = Position(file, row + 1, 0) if row_is_used_up else Position(file, row, used + len(taken))
        return taken

    def close(self) -> None:
        self._rows.close()

    def _begin(self, encoded: Encoded) -> None:
        """Makes this row the one at hand."""
        self._begins = encoded.begins
        self.position = Position(encoded.file, encoded.row, self._skip)
        self._ids = encoded.ids[self._skip :]
        self._skip = 0


def encoded_rows(
    source: Source, tokenizer: Tokenizer, threads: int, position: Position
) -> Generator[Encoded, None, None]:
    """The rows of a source, encoded ahead in several threads. Raises ValueError where the source cannot be read."""
    # Threads, not processes: tiktoken releases Python's lock, and one thread of fastokens is faster than reading and
    # writing. Nothing is copied between processes, and no process is left when this one is killed.
    pool = ThreadPoolExecutor(threads)
    waiting = deque[Future[list[Encoded]]]()
    try:
        for task in tasks(source.rows(position.file, position.row)):
            waiting.append(pool.submit(encode_rows, tokenizer, task))
            if len(waiting) > 2 * threads:
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
    if held:
        yield held


def encode_rows(tokenizer: Tokenizer, rows: list[Row]) -> list[Encoded]:
    """Rows with token ids instead of their text; empty documents have none."""
    pieces_of_rows = [pieces(row.text) for row in rows]
    encoded = iter(tokenizer.encode_batch([piece for of_row in pieces_of_rows for piece in of_row]))
    end_of_text = np.array([tokenizer.end_of_text], np.uint16)
    nothing = np.zeros(0, np.uint16)
    out = []
    for row, of_row in zip(rows, pieces_of_rows, strict=True):
        parts = [end_of_text if row.begins and row.text else nothing]
        for _ in of_row:
            parts.append(next(encoded))
        out.append(Encoded(row.file, row.row, row.begins, np.concatenate(parts)))
    return out


# ---- writing -------------------------------------------------------------------------------------------------


def plan(val_tokens: int, train_tokens: float, shard_tokens: int, part: str = "") -> Iterator[tuple[str, int]]:
    """Names and sizes of the shards: val_000000.bin, then train_000001.bin and so on; train_tokens may be inf.

    part: stands before the numbers.
    """
    number = itertools.count()
    for split, split_tokens in (("val", val_tokens), ("train", train_tokens)):
        left = split_tokens
        while left > 0:
            yield f"{split}_{part}{next(number):06}.bin", int(min(shard_tokens, left))
            left -= shard_tokens


def is_there(path: Path, size: int, entry: Entry) -> bool:
    """Whether the file has the tokens of its entry, and these are at least `size` or all that the source has."""
    if not entry:
        return False
    try:
        tokens = len(read_tokens(path))
    except (OSError, ValueError):
        return False
    enough = entry["tokens"] >= size or "last" in entry
    return tokens == entry["tokens"] and enough


def write_shards(
    folder: Path,
    meta: dict[str, Any],
    source: Source,
    tokenizer: Tokenizer,
    shards: Iterable[tuple[str, int]],
    damaged: list[str],
    threads: int,
    total: float = math.inf,
    record: str = "meta.json",
) -> None:
    """Writes the shards that folder lacks or that are damaged, and after each of them meta, as the file `record`.

    The last one that the source fills is marked "last" there. `total` tokens are expected, inf if that is not known.
    Raises ValueError where the source cannot be read or has changed, OSError where folder cannot be written.
    """
    entries: dict[str, Entry] = meta["files"]
    position = Position(0, 0, 0)
    previous: str | None = None  # name of the shard before this one
    stream: TokenStream | None = None
    with progress_bar(total) as bar:
        try:
            for name, size in shards:
                old = entries.get(name, {})

                # ---- a shard that is there: go on after it ----
                if is_there(folder / name, size, old) and name not in damaged:
                    bar.update(old["tokens"])
                    position = Position(*old["end"])
                    previous = name
                    if stream:  # which is still before this shard
                        stream.close()
                        stream = None
                    if "last" in old:
                        break
                    continue

                # ---- one that is not ----
                made_alike = bool(old) and (old["tokens"] == size or "last" in old)
                if stream is None:
                    stream = TokenStream(source, tokenizer, threads, position)
                bar.set_description(name)
                entry = write_shard(folder / name, size, stream, bar, old["sha256"] if made_alike else None)
                if entry:
                    entries[name] = entry
                    previous = name
                ended = entry is None or entry["tokens"] < size or "last" in old
                if ended and previous:
                    entries[previous]["last"] = True
                write_meta(folder, meta, record)
                if ended:
                    break
        finally:
            if stream:
                stream.close()


def write_shard(path: Path, size: int, stream: TokenStream, bar: tqdm, sha256: str | None) -> Entry | None:
    """Writes `size` tokens of the stream, or all that are left; returns the entry for meta.json.

    Writes nothing and returns None if no tokens are left. sha256 is the checksum that the file must get, None if it
    may be any. Raises ValueError where it gets another, OSError where the disk is full.
    """
    t0 = time.perf_counter()
    documents_before = stream.documents
    if stream.at_end():
        if sha256 is not None:
            raise source_has_changed(path)
        return None
    try:
        with replacing(path) as file:
            file.write(bytes(HEADER_BYTES))  # room for it: the number of tokens is not known yet
            tokens = 0
            while tokens < size and not stream.at_end():
                ids = stream.take(size - tokens)
                file.write(ids.astype("<u2", copy=False).tobytes())
                tokens += len(ids)
                bar.update(len(ids))
            file.seek(0)
            file.write(llmc_header(tokens))
            file.flush()
            checksum = file_sha256(Path(file.name))
            if sha256 not in (None, checksum):
                raise source_has_changed(path)
    except OSError as e:
        raise OSError(
            f"cannot write {path}: {e.strerror or e}; finished shards are kept: free some disk space and run the same "
            "command again"
        ) from None
    documents = stream.documents - documents_before
    tokens_per_s = tokens / (time.perf_counter() - t0)
    tqdm.write(f"{path.name}: {tokens:,} tokens, {documents:,} documents, {tokens_per_s:,.0f} tokens/s")
    return {"tokens": tokens, "documents": documents, "sha256": checksum, "end": stream.position}


def source_has_changed(path: Path) -> ValueError:
    """The error to raise where a shard would differ from the one that meta.json describes."""
    return ValueError(f"{path} would come out unlike before: its source has changed; prepare into another --out")


# ---- what is shown -------------------------------------------------------------------------------------------


def progress_bar(total: float) -> tqdm:
    """A bar of tokens, on a terminal only and not in one of several processes, whose bars would mix."""
    hidden = True if multiprocessing.parent_process() else None
    return tqdm(total=total if total < math.inf else None, unit="tok", unit_scale=True, disable=hidden, smoothing=0.05)
