"""Documents to shards of token ids: read as a stream, tokenized on all cores, continued where a run was stopped.

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
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from data.tokenizer import Ids, Tokenizer, pieces
from data.tokens import HEADER_BYTES, file_sha256, llmc_header, read_tokens, write_atomically

FORMATS = {".parquet": "parquet", ".jsonl": "json", ".txt": "text"}  # by suffix, as `datasets` calls them
PACKED = (".gz", ".zst")
TASK_CHARS = 1 << 19  # a task of the tokenizing threads; far more than what handing it over costs
ATTEMPTS, LONGEST_PAUSE_S = 9, 60  # 1 + 2 + 4 + ... + 60 + 60: about four minutes without network

Row = tuple[int, int, bool, str]  # file, row, whether a document begins with it, text
Encoded = tuple[int, int, bool, Ids, int]  # the same with token ids for the text, and the text's bytes
Result = TypeVar("Result")

# ---- reading -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """Files of documents, local or hf:// URLs: rows of parquet and jsonl files, whole txt files."""

    name: str  # what meta.json calls it
    files: list[str]
    text_column: str = "text"
    revision: str | None = None  # of a data set on the hub

    def rows(self, file: int, row: int) -> Iterator[Row]:
        """(file, row, whether a document begins here, text) from there on; a txt file's rows are pieces of it.

        Waits and tries again where the network fails. Raises ValueError where it stays away or a file is damaged.
        """
        failures = 0
        while file < len(self.files):
            begins = format_of(self.files[file]) != "text"
            try:
                for text in self._texts(self.files[file], row):
                    yield file, row, begins or row == 0, text
                    row, failures = row + 1, 0
                file, row = file + 1, 0
            except Exception as e:  # the hub's, its HTTP client's, pyarrow's and json's errors share no class
                if not is_network_fault(e):
                    raise self.unreadable(self.files[file], e) from None
                failures += 1
                wait_or_give_up(e, failures)

    def _texts(self, path: str, first: int) -> Iterator[str]:
        import datasets
        from pyarrow.dataset import ParquetFragmentScanOptions

        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs, over many lines, what it raises
        kind = format_of(path)
        options: dict[str, Any] = {
            # pre_buffer=True, the default, holds all that was read of a file until its end: 2 GB of the hub's.
            "parquet": {
                "columns": [self.text_column],
                "batch_size": 256,
                "fragment_scan_options": ParquetFragmentScanOptions(pre_buffer=False),
            },
            "json": {},
            "text": {"sample_by": "line", "keep_linebreaks": True},
        }[kind]
        rows = datasets.load_dataset(kind, data_files=[path], split="train", streaming=True, **options)
        if kind == "text":
            yield from itertools.islice(pieces_of_lines(r["text"] for r in rows), first, None)
            return
        for table in (rows.skip(first) if first else rows).with_format("arrow").iter(batch_size=64):
            column = table[self.text_column]
            if not any(kind in str(column.type) for kind in ("string", "null")):
                raise ValueError(f"column {self.text_column} holds {column.type}, not text")
            yield from (text or "" for text in column.to_pylist())

    def unreadable(self, path: str, e: Exception) -> ValueError:
        """What to raise where reading path raised e."""
        text = str(e)
        if isinstance(e, KeyError) or "No match for FieldRef" in text:
            return ValueError(f"{path} has no column {self.text_column!r}; name the one with the text: --text_column")
        reason = (text.strip() or type(e).__name__).splitlines()[0][:160]
        return ValueError(f"{path} cannot be read as {format_of(path)} ({reason}); finished shards are kept")


def format_of(path: str) -> str:
    """parquet, json or text, by suffix. Raises ValueError."""
    suffixes = [s for s in Path(path).suffixes if s not in PACKED]
    if not suffixes or suffixes[-1] not in FORMATS:
        raise ValueError(f"{path} is none of *{', *'.join(FORMATS)}, the last two also packed as {' or '.join(PACKED)}")
    return FORMATS[suffixes[-1]]


def pieces_of_lines(lines: Iterator[str], size: int = 1 << 20) -> Iterator[str]:
    """As `pieces`, of a text that comes line by line: at least `size` characters, cut where no encoding notices."""
    held: list[str] = []
    n = 0
    for line in lines:
        if n >= size and not line[0].isspace() and len(held[-1]) > 1 and not held[-1][-2].isspace():
            yield "".join(held)
            held, n = [], 0
        held.append(line)
        n += len(line)
    if held:
        yield "".join(held)


def is_network_fault(e: BaseException) -> bool:
    """Whether e, or what led to it, is a connection's fault or a server's (status 429, 500 and more)."""
    cause: BaseException | None = e
    while cause is not None:
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status is not None:
            return status == 429 or status >= 500
        # httpx, requests, aiohttp: no common class, but these names
        names = {c.__name__ for c in type(cause).__mro__}
        if names & {"ConnectionError", "TimeoutError", "TransportError", "Timeout", "ClientError"}:
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def retried(call: Callable[[], Result]) -> Result:
    """What call returns, tried again where the network fails."""
    for failures in itertools.count(1):
        try:
            return call()
        except Exception as e:
            if not is_network_fault(e):
                raise
            wait_or_give_up(e, failures)
    raise AssertionError


def wait_or_give_up(e: Exception, failures: int) -> None:
    """Sleeps longer with each failure in a row. Raises ValueError, with what to run next, after the last attempt."""
    reason = (str(e).strip() or type(e).__name__).splitlines()[0][:160]
    if failures >= ATTEMPTS or "offline" in type(e).__name__.lower():
        raise ValueError(
            f"the network failed {failures} times ({reason}); finished shards are kept, and the same command goes "
            "on behind them; --source FILE reads local files"
        ) from None
    pause_s = min(2 ** (failures - 1), LONGEST_PAUSE_S)
    tqdm.write(f"network: {reason}; attempt {failures + 1} of {ATTEMPTS} in {pause_s}s")
    time.sleep(pause_s)


# ---- tokenizing ----------------------------------------------------------------------------------------------


def encode_rows(tokenizer: Tokenizer, rows: list[Row]) -> list[Encoded]:
    """Rows with their token ids, and UTF-8 bytes, in place of their text; empty documents have no tokens."""
    parts = [pieces(text) for *_, text in rows]
    encoded = iter(tokenizer.encode_batch([piece for of_row in parts for piece in of_row]))
    first = np.array([tokenizer.end_of_text], np.uint16)
    out = []
    for (file, row, begins, text), of_row in zip(rows, parts, strict=True):
        ids = [first] * (begins and text != "") + [next(encoded) for _ in of_row]
        out.append((file, row, begins, np.concatenate(ids) if ids else first[:0], len(text.encode())))
    return out


class TokenStream:
    """The tokens of a source from a position on: [file, row, tokens of that row that are left behind]."""

    def __init__(self, source: Source, tokenizer: Tokenizer, threads: int, position: list[int]) -> None:
        self.position, self.bytes_read = position, 0
        self.documents = self.empty = 0  # begun so far; rows without text
        self._skip, self._ids = position[2], np.zeros(0, np.uint16)
        self._begins = False
        self._rows = self._encoded(source, tokenizer, threads)

    def take(self, at_most: int) -> Ids:
        """The next tokens, at most so many and of one row; none at the end of the source."""
        while not len(self._ids):
            encoded = next(self._rows, None)
            if encoded is None:
                return self._ids
            file, row, begins, self._ids, n_bytes = encoded
            self.bytes_read += n_bytes
            self.empty += begins and not len(self._ids)
            self.documents += begins and not self._skip and len(self._ids) > 0
            self.position, self._ids, self._skip = [file, row, self._skip], self._ids[self._skip :], 0
        taken, self._ids = self._ids[:at_most], self._ids[at_most:]
        file, row, used = self.position
        self.position = [file, row, used + len(taken)] if len(self._ids) else [file, row + 1, 0]
        return taken

    def _encoded(self, source: Source, tokenizer: Tokenizer, threads: int) -> Iterator[Encoded]:
        # Threads, not processes: the encoder lets go of Python's lock, nothing is copied between processes, and
        # killing the one process leaves none behind.
        pool = ThreadPoolExecutor(threads)
        waiting: deque[Future[list[Encoded]]] = deque()
        fault: ValueError | None = None
        try:
            try:
                for task in tasks(source.rows(*self.position[:2])):
                    waiting.append(pool.submit(encode_rows, tokenizer, task))
                    if len(waiting) > 2 * threads:
                        yield from waiting.popleft().result()
            except ValueError as e:  # what was read before it is finished first
                fault = e
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
        n += len(row[3])
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


def is_whole(path: Path, entry: dict[str, Any]) -> bool:
    """Whether the file is there, with as many tokens as its entry in meta.json says."""
    try:
        return bool(entry) and len(read_tokens(path)) == entry["tokens"]
    except (OSError, ValueError):
        return False


def write_shard(path: Path, size: int, stream: TokenStream, bar: Progress) -> dict[str, Any]:
    """Writes `size` tokens of the stream, or all that are left, under a temporary name first; its entry for meta.json.

    Writes nothing where none are left. Raises OSError where the disk is full.
    """
    tmp = path.with_name(path.name + ".tmp")
    documents, written = stream.documents, 0
    try:
        with open(tmp, "wb") as f:
            f.write(bytes(HEADER_BYTES))
            while written < size and len(ids := stream.take(size - written)):
                f.write(ids.astype("<u2", copy=False).tobytes())
                written += len(ids)
                bar.advance(len(ids), stream.bytes_read)
            f.seek(0)
            f.write(llmc_header(written))
            f.flush()
            os.fsync(f.fileno())
        entry = {"tokens": written, "documents": stream.documents - documents, "sha256": file_sha256(tmp)}
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


class Progress(tqdm):
    """A bar of tokens that shows MB/s of text and the disk space left, on a terminal only."""

    def __init__(self, folder: Path, total: int | None) -> None:
        super().__init__(total=total, unit="tok", unit_scale=True, disable=None, smoothing=0.05)
        self.folder, self.t0, self.bytes_before = folder, time.perf_counter(), 0
        self.n: int

    def skip(self, tokens: int) -> None:
        """Counts what was there already, which tells nothing about the speed."""
        if not self.disable:
            self.initial += tokens
            self.n += tokens
            self.last_print_n = self.n

    def advance(self, tokens: int, bytes_read: int) -> None:
        elapsed_s = time.perf_counter() - self.t0
        if elapsed_s > 2:
            mb_per_s = (bytes_read - self.bytes_before) / 1e6 / elapsed_s
            self.set_postfix_str(f"{mb_per_s:.1f} MB/s, {free_gb(self.folder)} free", refresh=False)
            self.t0, self.bytes_before = time.perf_counter(), bytes_read
        self.update(tokens)


def free_gb(folder: Path) -> str:
    return f"{shutil.disk_usage(folder).free / 1e9:.1f} GB"


def write_shards(
    folder: Path,
    meta: dict[str, Any],
    source: Source,
    tokenizer: Tokenizer,
    shards: Iterator[tuple[str, int]],
    threads: int,
    total: int | None,
) -> None:
    """Writes those of the shards that folder lacks, and meta.json anew after each.

    The one with which the source ends is marked "last" there. `total` tokens are expected, None where unknown.
    Raises ValueError where the source cannot be read or has changed, OSError where folder cannot be written.
    """
    entries: dict[str, dict[str, Any]] = meta["files"]
    stream: TokenStream | None = None
    position, before = [0, 0, 0], ""
    with Progress(folder, total) as bar:
        for name, size in shards:
            old = entries.get(name, {})
            if is_whole(folder / name, old) and (old["tokens"] >= size or "last" in old):
                bar.skip(old["tokens"])
                position, before = old["end"], name
                if stream:
                    stream.close()
                    stream = None
            else:
                stream = stream or TokenStream(source, tokenizer, threads, position)
                t0, bytes_before = time.perf_counter(), stream.bytes_read
                bar.set_description(name)
                new = write_shard(folder / name, size, stream, bar)
                mb_per_s = (stream.bytes_read - bytes_before) / 1e6 / (time.perf_counter() - t0)
                if old and old["tokens"] == new["tokens"] and old["sha256"] != new["sha256"]:
                    raise ValueError(f"{folder / name} came out unlike before: {source.name} is not what it was")
                if new["tokens"]:
                    entries[name], before = new, name
                    tqdm.write(
                        f"{name}: {new['tokens']:,} tokens, {new['documents']:,} documents, {mb_per_s:.1f} MB/s, "
                        f"{free_gb(folder)} free"
                    )
                ended = new["tokens"] < size
                if ended and before:
                    entries[before]["last"] = True
                write_atomically(folder / "meta.json", json.dumps(meta, indent=1).encode())
                if ended:
                    break
            if "last" in entries[name]:
                break
    if stream:
        stream.close()
