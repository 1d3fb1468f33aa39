"""Documents to shards of token ids, tokenized in several threads, continued where a run was stopped.

The shards of a folder are one sequence of tokens, cut every `shard_tokens`; what a document begins with is the
tokenizer's end-of-text token. meta.json records for each shard where in the source it ends, so that any of them
can be made again, byte for byte, without those before it.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from data.documents import Row, Source
from data.token_files import HEADER_BYTES, llmc_header, read_tokens
from data.tokenizer import Ids, Tokenizer, pieces
from deskgpt.files import file_sha256, write_atomically

TASK_CHARS = 1 << 19  # a task of the tokenizing threads; far more than what handing it over costs


class Encoded(NamedTuple):
    file: int
    row: int
    begins: bool
    ids: Ids
    n_bytes: int  # of the text, in UTF-8


# ---- tokenizing ----------------------------------------------------------------------------------------------


def encode_rows(tokenizer: Tokenizer, rows: list[Row]) -> list[Encoded]:
    """Rows with token ids in place of their text; empty documents have none."""
    parts = [pieces(row.text) for row in rows]
    encoded = iter(tokenizer.encode_batch([piece for of_row in parts for piece in of_row]))
    first, none = np.array([tokenizer.end_of_text], np.uint16), np.zeros(0, np.uint16)
    out = []
    for row, of_row in zip(rows, parts, strict=True):
        ids = [first if row.begins and row.text else none, *(next(encoded) for _ in of_row)]
        out.append(Encoded(row.file, row.row, row.begins, np.concatenate(ids), len(row.text.encode())))
    return out


class TokenStream:
    """The tokens of a source from a position on: [file, row, tokens of that row that are left behind]."""

    def __init__(self, source: Source, tokenizer: Tokenizer, threads: int, position: list[int]) -> None:
        self.position, self.bytes_read = position, 0
        self.documents = 0  # begun so far
        self._skip, self._ids = position[2], np.zeros(0, np.uint16)
        tokenizer.encode_batch(["x"])  # builds what it needs, before several threads ask for it
        self._rows = self._encoded(source, tokenizer, threads)

    def take(self, at_most: int) -> Ids:
        """The next tokens, at most so many and of one row; none at the end of the source."""
        while not len(self._ids):
            encoded = next(self._rows, None)
            if encoded is None:
                return self._ids
            self.bytes_read += encoded.n_bytes
            self.documents += encoded.begins and not self._skip and len(encoded.ids) > 0
            self.position, self._ids = [encoded.file, encoded.row, self._skip], encoded.ids[self._skip :]
            self._skip = 0
        taken, self._ids = self._ids[:at_most], self._ids[at_most:]
        file, row, used = self.position
        self.position = [file, row, used + len(taken)] if len(self._ids) else [file, row + 1, 0]
        return taken

    def _encoded(self, source: Source, tokenizer: Tokenizer, threads: int) -> Iterator[Encoded]:
        # Threads, not processes: tiktoken lets go of Python's lock, fastokens is faster in one thread than what
        # reads and writes, nothing is copied between processes, and killing the one process leaves none behind.
        pool, waiting = ThreadPoolExecutor(threads), deque[Future[list[Encoded]]]()
        reading, fault = tasks(source.rows(*self.position[:2])), None
        try:
            while True:
                try:
                    task = next(reading, None)
                except ValueError as e:  # what was read before it is finished first
                    task, fault = None, e
                if task is None:
                    break
                waiting.append(pool.submit(encode_rows, tokenizer, task))
                if len(waiting) > 2 * threads:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
            if fault:
                raise fault
        finally:
            pool.shutdown(cancel_futures=True)

    def close(self) -> None:
        self._rows.close()  # type: ignore[attr-defined]


def tasks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Rows in groups of at least TASK_CHARS characters."""
    held, n = [], 0
    for row in rows:
        held.append(row)
        n += len(row.text)
        if n >= TASK_CHARS:
            yield held
            held, n = [], 0
    if held:
        yield held


# ---- writing -------------------------------------------------------------------------------------------------


def plan(val_tokens: int, train_tokens: float, shard_tokens: int) -> Iterator[tuple[str, int]]:
    """Names and sizes of the shards: val_000000.bin, then train_000001.bin and so on; train_tokens may be inf."""
    number = itertools.count()
    for split, left in (("val", val_tokens), ("train", train_tokens)):
        while left > 0:
            yield f"{split}_{next(number):06}.bin", int(min(shard_tokens, left))
            left -= shard_tokens


def is_there(path: Path, size: int, entry: dict[str, Any]) -> bool:
    """Whether the file has the tokens that its entry in meta.json says, and these are `size` or all that are left."""
    try:
        return (
            bool(entry) and len(read_tokens(path)) == entry["tokens"] and (entry["tokens"] >= size or "last" in entry)
        )
    except (OSError, ValueError):
        return False


class Progress(tqdm):
    """A bar of tokens that shows MB/s of text and the disk space left, on a terminal only."""

    n: int

    def __init__(self, folder: Path, total: int | None) -> None:
        super().__init__(total=total, unit="tok", unit_scale=True, disable=None, smoothing=0.05)
        self.folder, self.t0, self.bytes_read = folder, time.perf_counter(), 0

    def skip(self, tokens: int) -> None:
        """Counts what was there already, which tells nothing about the speed."""
        if not self.disable:
            self.initial += tokens
            self.n += tokens
            self.last_print_n = self.n

    def advance(self, tokens: int, bytes_read: int) -> None:
        self.bytes_read += bytes_read
        elapsed_s = time.perf_counter() - self.t0
        if elapsed_s > 2:
            mb_per_s = self.bytes_read / 1e6 / elapsed_s
            self.set_postfix_str(f"{mb_per_s:.1f} MB/s, {free_space(self.folder)}", refresh=False)
            self.t0, self.bytes_read = time.perf_counter(), 0
        self.update(tokens)


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def free_space(folder: Path) -> str:
    return f"{gigabytes(shutil.disk_usage(folder).free)} free"


def write_shard(path: Path, size: int, stream: TokenStream, bar: Progress, sha256: str | None) -> dict[str, Any]:
    """Writes `size` tokens of the stream, or all that are left, under a temporary name first; its entry for meta.json.

    Writes nothing where none are left. sha256 is the checksum to come, where it is known. Raises ValueError where
    another comes, OSError where the disk is full.
    """
    tmp = path.with_name(path.name + ".tmp")
    documents, written = stream.documents, 0
    try:
        with open(tmp, "wb") as f:
            f.write(bytes(HEADER_BYTES))
            before = stream.bytes_read
            while written < size and len(ids := stream.take(size - written)):
                f.write(ids.astype("<u2", copy=False).tobytes())
                written += len(ids)
                bar.advance(len(ids), stream.bytes_read - before)
                before = stream.bytes_read
            f.seek(0)
            f.write(llmc_header(written))
            f.flush()
            os.fsync(f.fileno())
        entry = {"tokens": written, "documents": stream.documents - documents, "sha256": file_sha256(tmp)}
        if sha256 not in (None, entry["sha256"]):
            raise ValueError(
                f"{path} would come out unlike before: its source is not what it was; prepare into another --out"
            )
        if written:
            os.replace(tmp, path)
        return entry | {"end": stream.position}
    except OSError as e:
        raise OSError(
            f"cannot write {path}: {e.strerror or e}; finished shards are kept: free some disk space and run the same "
            "command again"
        ) from None
    finally:
        with suppress(OSError):
            tmp.unlink(missing_ok=True)


def write_shards(
    folder: Path,
    meta: dict[str, Any],
    source: Source,
    tokenizer: Tokenizer,
    shards: Iterable[tuple[str, int]],
    damaged: list[str],
    threads: int,
    total: int | None,
) -> None:
    """Writes those of the shards that folder lacks or that are damaged, and meta.json anew after each.

    The one with which the source ends is marked "last" there. `total` tokens are expected, None where unknown.
    Raises ValueError where the source cannot be read or has changed, OSError where folder cannot be written.
    """
    entries: dict[str, dict[str, Any]] = meta["files"]
    stream: TokenStream | None = None
    position, before = [0, 0, 0], ""
    with Progress(folder, total) as bar:
        try:
            for name, size in shards:
                old = entries.get(name, {})
                if is_there(folder / name, size, old) and name not in damaged:
                    bar.skip(old["tokens"])
                    position, before = old["end"], name
                    if stream:
                        stream.close()
                        stream = None
                    if "last" in old:
                        break
                    continue
                size = max(size, old.get("tokens", 0))  # a smaller one would leave a gap before the next
                stream = stream or TokenStream(source, tokenizer, threads, position)
                t0, bytes_before = time.perf_counter(), stream.bytes_read
                bar.set_description(name)
                same = old["sha256"] if old and (old["tokens"] == size or "last" in old) else None
                new = write_shard(folder / name, size, stream, bar, same)
                mb_per_s = (stream.bytes_read - bytes_before) / 1e6 / (time.perf_counter() - t0)
                ended = new["tokens"] < size or "last" in old
                if new["tokens"]:
                    entries[name], before = new, name
                    tqdm.write(
                        f"{name}: {new['tokens']:,} tokens, {new['documents']:,} documents, {mb_per_s:.1f} MB/s, "
                        f"{free_space(folder)}"
                    )
                if ended and before:
                    entries[before]["last"] = True
                write_atomically(folder / "meta.json", json.dumps(meta, indent=1).encode())
                if ended:
                    break
        finally:
            if stream:
                stream.close()
