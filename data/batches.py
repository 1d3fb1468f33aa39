"""The batches of a run: which tokens are in which row, how a step is split, tensors on the device.

Batch order is a pure function of (seed, step, row of the global batch), so there is no state to
save. How a step is split into micro-batches and ranks changes nothing about what is learned.
Threads read the token files ahead of the training loop.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm

from data.meta_files import read_record
from data.token_files import (
    HEADER_BYTES,
    MAGIC,
    MAGICS,
    MASK_SUFFIX,
    TOKEN_BYTES,
    VERSION,
    listed_checksums,
    token_files,
)
from deskgpt.errors import DataError
from deskgpt.limits import allow_open_files

# T is block_size, the number of tokens of a window.
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

CHUNK = 1 << 20  # tokens that are read at once, if it is not for a batch
FINGERPRINTED = 1 << 20  # tokens at the beginning of each shard
FINGERPRINTED_SHARDS = 1024  # at most, evenly spread
GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment: 2^64 / golden ratio
FEISTEL_ROUNDS = 6


class Split:
    """The windows of one split: inputs and targets of block_size tokens, targets one token further
    on.

    In an epoch every shard is cut into consecutive windows. Their inputs do not overlap and never
    cross the shard's end. The first window starts at an offset drawn for that epoch, so that later
    epochs see other cuts; the order of the windows is a pseudo-random permutation. Which window
    goes into which row of which batch is a pure function of (seed, step, row of the global batch):
    there is no state to save, and micro-batches and ranks change nothing.

    Packed data has windows of a fixed size (in meta.json), and is read in exactly these, all of
    them in each epoch. Masked targets are -1; windows without any other target are not evaluated.

    Raises ValueError if files are missing, damaged or too short. Each call that reads raises
    DataError for damage and for ids of vocab_size and more.
    """

    def __init__(
        self, folder: Path, split: str, block_size: int, vocab_size: int, seed: int = 0
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.seed = seed
        packed = read_record(folder).get("packed")
        if packed not in (None, block_size):
            raise ValueError(
                f"{folder} is packed into windows of {packed:,} tokens, and "
                f"block_size={block_size}; try --block_size={packed}, or prepare the data "
                f"again with --block_size={block_size}"
            )
        found = open_shards(folder, split)
        self.shards = [shard for shard in found if len(shard) > block_size]
        if not self.shards:
            longest = max(map(len, found))
            raise ValueError(
                f"block_size={block_size} needs {block_size + 1} tokens in a row, "
                f"{folder}/{split}*.bin: {longest:,}; try more data, or "
                f"--block_size={max(1, longest - 1)}"
            )
        self.masks = open_masks(folder, split, self.shards)  # one for each shard, or none
        self.lengths = np.array([len(shard) for shard in self.shards], np.int64)
        self.tokens = int(self.lengths.sum())
        first = np.zeros(1, np.int64)
        # The others as they are read
        self._check_ids(first, first, self.shards[0].read(0, CHUNK)[None])
        # One window fewer than could fit, so that all of them fit whichever offset below block_size
        # is drawn. A shard with room for one window only has that one, and fewer offsets. Per shard
        # and epoch
        self._windows = np.maximum(1, (self.lengths - block_size) // block_size)
        # To choose from, per shard
        self._offsets = np.minimum(block_size, self.lengths - self._windows * block_size)
        self._eval_windows = (self.lengths - 1) // block_size  # per shard
        if packed:
            self._windows = self._eval_windows
            self._offsets = np.ones_like(self._offsets)
        self.n_windows = int(self._windows.sum())  # per epoch
        self._evaluated = self._windows_with_targets() if self.masks else None  # None: all of them
        # Raises an error that a check of the files has found meanwhile.
        self.check: Callable[[], None] = lambda: None
        if not self.n_eval_windows(1):
            raise ValueError(
                f"{self.masks[0].path}: it leaves no token to learn; prepare the data again"
            )

    # ---- training --------------------------------------------------------------------------------

    def train_batch(self, step: int, rows: I64, global_batch: int) -> tuple[I64, I64]:
        """Return (inputs, targets), each (len(rows), T), of rows 0..global_batch-1 of optimizer
        step `step`.
        """
        return self._read(*self.sequence_offsets(step, rows, global_batch))

    def sequence_offsets(self, step: int, rows: I64, global_batch: int) -> tuple[I64, I64]:
        """Return (shard, its first token), each (len(rows),), of the windows of train_batch."""
        position = step * global_batch + rows  # in the sequence of all windows of all epochs
        epoch = position // self.n_windows
        key = epoch_keys(self.seed, epoch)
        window = permute(position % self.n_windows, self.n_windows, key)
        shard, window_of_shard = locate(window, self._windows)
        offset = splitmix64(key + shard.astype(np.uint64)) % self._offsets[shard].astype(np.uint64)
        start = window_of_shard * self.block_size + offset.astype(np.int64)
        return shard, start

    def n_unmasked(self, step: int, global_batch: int, row0: int = 0) -> I64:
        """Return how many targets the loss masks leave (global_batch,) in each row of optimizer
        step `step`; row0: as Loader's.
        """
        rows = np.arange(global_batch) + row0
        return self._unmasked(*self.sequence_offsets(step, rows, global_batch)).sum(1)

    # ---- evaluation ------------------------------------------------------------------------------

    def n_eval_windows(self, at_most: int) -> int:
        """Return the size of the evaluation set: all windows without overlap that the split has, at
        most at_most.
        """
        return min(
            at_most,
            int(self._eval_windows.sum()) if self._evaluated is None else len(self._evaluated),
        )

    def eval_batch(self, rows: I64, n: int) -> tuple[I64, I64]:
        """Return as train_batch, of rows of a fixed set of n evenly spaced windows; rows past n
        have targets of -1.
        """
        window = np.minimum(rows, n - 1) * self.n_eval_windows(2**62) // n
        if self._evaluated is not None:
            window = self._evaluated[window]
        shard, window_of_shard = locate(window, self._eval_windows)
        x, y = self._read(shard, window_of_shard * self.block_size)
        # Fill the last batch rather than shorten it: a new shape would be compiled again.
        y[rows >= n] = -1
        return x, y

    def eval_digest(self, n: int) -> str:
        """Return 16 hex digits of the SHA-256 of what an evaluation of n windows reads, and of
        block_size.
        """
        digest = hashlib.sha256(f"{self.block_size} {n}".encode())
        for x, y in self.eval_chunks(n):
            digest.update(x.astype("<i4").tobytes())
            digest.update(y.astype("<i4").tobytes())
        return digest.hexdigest()[:16]

    def eval_chunks(self, n: int) -> Iterator[tuple[I64, I64]]:
        """Yield inputs and targets of an evaluation of n windows, about CHUNK tokens at a time."""
        at_once = max(1, CHUNK // self.block_size)
        for first in range(0, n, at_once):
            yield self.eval_batch(np.arange(first, min(first + at_once, n)), n)

    def _windows_with_targets(self) -> I64:
        """Return the numbers of the windows without overlap, through all shards, that have a
        learned target.
        """
        T = self.block_size
        windows = zip(self.masks, self._eval_windows.tolist(), strict=True)
        return np.flatnonzero(
            np.concatenate([mask.read(1, n * T).reshape(n, T).any(1) for mask, n in windows])
        )

    # ---- about the files -------------------------------------------------------------------------

    def fingerprint(self) -> str:
        """Return 16 hex digits that tell these tokens: SHA-256 of the shards' lengths and first
        2^20 tokens each.

        Masks, if there are any, are part of it. With more than 1,024 shards, it has every n-th one
        and an n-th of these tokens, so that it never reads more than 2 GB.
        """
        every = math.ceil(len(self.shards) / FINGERPRINTED_SHARDS)
        digest = hashlib.sha256(self.lengths.tobytes())
        for file in [*self.shards[::every], *self.masks[::every]]:
            digest.update(file.read(0, FINGERPRINTED // every).tobytes())
        return digest.hexdigest()[:16]

    def files(self) -> list[NumberFile]:
        return [*self.shards, *self.masks]

    # ---- reading ---------------------------------------------------------------------------------

    def _read(self, shard: I64, start: I64) -> tuple[I64, I64]:
        """Return (inputs, targets), each (len(shard), T), of windows, given the shard and first
        token of each.
        """
        block = read_rows(self.shards, shard, start, self.block_size + 1)
        self._check_ids(shard, start, block)
        x = block[:, :-1].astype(np.int64)
        y = block[:, 1:].astype(np.int64)
        if self.masks:
            y[~self._unmasked(shard, start)] = -1
        return x, y

    def _unmasked(self, shard: I64, start: I64) -> npt.NDArray[np.bool_]:
        """Return which targets (len(shard), T) of windows are learned, given the shard of each and
        its first token.
        """
        return read_rows(self.masks, shard, start + 1, self.block_size) != 0

    def _check_ids(self, shard: I64, start: I64, block: npt.NDArray[np.uint16]) -> None:
        """Raise DataError if block (rows, tokens) has too large an id; row i begins at start[i] of
        shard[i].
        """
        if block.max() < self.vocab_size:
            return
        row, column = np.argwhere(block >= self.vocab_size)[0]
        path = self.shards[shard[row]].path
        raise DataError(
            f"{path}: token {start[row] + column:,} is {block[row, column]}, and the "
            f"vocabulary ends at {self.vocab_size - 1}; the file does not belong to this "
            "tokenizer or model"
        )


def read_rows(files: Sequence[NumberFile], file: I64, start: I64, n: int) -> npt.NDArray[Any]:
    """Return n numbers from start[i] of files[file[i]] in each row i."""
    return np.stack(
        [files[f].read(first, n) for f, first in zip(file.tolist(), start.tolist(), strict=True)]
    )


def locate(window: I64, windows_per_shard: I64) -> tuple[I64, I64]:
    """Return (shard, number within that shard) of windows that are numbered through all shards."""
    ends: I64 = windows_per_shard.cumsum()
    shard = np.searchsorted(ends, window, side="right")
    return shard, window - (ends[shard] - windows_per_shard[shard])


# ---- pseudo-random order -------------------------------------------------------------------------


def epoch_keys(seed: int, epochs: I64) -> U64:
    """Return one uint64 key per epoch number."""
    return splitmix64(
        splitmix64(np.array([seed % 2**64], np.uint64))
        + epochs.astype(np.uint64) * np.uint64(GOLDEN)
    )


def permute(i: I64, n: int, key: U64) -> I64:
    """Return where position i of 0..n-1 goes under a pseudo-random permutation: O(1) time and
    memory per element.

    A Feistel network permutes the smallest range 0..4^k-1 that holds n numbers. A result of n or
    more is sent through it again until it falls below n ("cycle walking", Black & Rogaway, CT-RSA
    2002). i and key broadcast together.
    """
    half_bits = max(1, math.ceil((n - 1).bit_length() / 2))
    x, key = np.broadcast_arrays(i.astype(np.uint64), key)
    x = x.copy()
    todo = np.ones(x.shape, bool)
    while todo.any():
        x[todo] = feistel(x[todo], half_bits, key[todo])
        todo = x >= np.uint64(n)
    return x.astype(np.int64)


def feistel(x: U64, half_bits: int, key: U64) -> U64:
    """Apply a pseudo-random bijection of the numbers of 2·half_bits bits for each key. x, key:
    (n,).
    """
    half = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left = x >> half
    right = x & mask
    for r in range(FEISTEL_ROUNDS):
        mixed = splitmix64(right + key + np.uint64(r * GOLDEN % 2**64)) & mask
        new_right = left ^ mixed
        left = right
        right = new_right
    return (left << half) | right


def splitmix64(x: U64) -> U64:
    """Apply a bijection of uint64 that looks random (splitmix64's finalizer: Steele, Lea & Flood,
    OOPSLA 2014).

    x: of any shape. It makes a random stream of its own from a seed and counters, as in `keys`.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# ---- how a step is split -------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchSplit:
    """How a global batch is cut into micro-batches and ranks.

    Any two cuts of the same global batch train the same.

    Raises ValueError if the ranks cannot share the micro-batches equally.
    """

    batch_size: int  # sequences per micro-batch
    grad_accum_steps: int = 1  # micro-batches per optimizer step, over all ranks
    block_size: int = 1  # tokens per sequence
    eval_iters: int = 1  # micro-batches of each split that an evaluation reads, at most
    eval_tokens: int = 0  # tokens that it reads instead; 0 = eval_iters
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if self.grad_accum_steps % self.world:
            nearest = (self.grad_accum_steps // self.world + 1) * self.world
            raise ValueError(
                f"gradient_accumulation_steps={self.grad_accum_steps} does not divide "
                f"among {self.world} ranks; try --gradient_accumulation_steps={nearest}"
            )

    @property
    def micro_steps_per_rank(self) -> int:
        """Return the micro-batches per optimizer step on each rank."""
        return self.grad_accum_steps // self.world

    @property
    def global_batch_size(self) -> int:
        """Return the sequences per optimizer step, over all ranks: the global batch."""
        return self.batch_size * self.grad_accum_steps

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.block_size

    @property
    def eval_sequences(self) -> int:
        """Return the windows of each split that an evaluation reads, at most."""
        return math.ceil(self.eval_tokens / self.block_size) or self.eval_iters * self.batch_size

    def with_batch_size(self, batch_size: int) -> BatchSplit:
        """Return the same training in micro-batches of this size, which must divide the sequences
        of a step.
        """
        assert self.global_batch_size % batch_size == 0
        grad_accum_steps = self.global_batch_size // batch_size
        eval_tokens = self.eval_tokens or self.eval_sequences * self.block_size
        return replace(
            self, batch_size=batch_size, grad_accum_steps=grad_accum_steps, eval_tokens=eval_tokens
        )

    def settings(self) -> dict[str, int]:
        """Return the settings of train.py that ask for this cut and these evaluations."""
        return {
            "batch_size": self.batch_size,
            "gradient_accumulation_steps": self.grad_accum_steps,
            "eval_tokens": self.eval_tokens or self.eval_sequences * self.block_size,
        }

    def flags(self) -> str:
        """Return what a user types for this cut."""
        return " ".join(f"--{name}={value}" for name, value in self.settings().items())

    def index(self, micro_step: int) -> int:
        """Return the number of this rank's micro-batch within the step, over all ranks."""
        return micro_step * self.world + self.rank

    def rows(self, micro_step: int) -> I64:
        """Return this rank's rows (batch_size,) of the global batch in one micro-batch: the same at
        any world size.
        """
        return self.index(micro_step) * self.batch_size + np.arange(self.batch_size)

    def eval_rows(self, n: int) -> Iterator[I64]:
        """Yield this rank's rows of an evaluation of n windows, a batch at a time.

        Rows from n on are padding.

        All ranks have equally many batches: where weights are sharded, each needs the others.
        """
        for first in range(0, n, self.world * self.batch_size):
            yield first + self.rank * self.batch_size + np.arange(self.batch_size)


# ---- tensors on the device -----------------------------------------------------------------------


THREADS = 4  # several, since a disk answers several requests as fast as one
AHEAD = 8  # micro-batches


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One of the parts in which a rank goes through a step's global batch."""

    x: Tensor  # inputs (batch_size, block_size) int64
    y: Tensor  # targets, the same
    # Of its mean loss in the step's: 1 / micro-batches, or its share of the learned targets.
    weight: float
    index: int  # of this micro-batch in its step, counted over all ranks
    is_last: bool  # of the step


# ---- tensors -------------------------------------------------------------------------------------


def to_device(batch: tuple[I64, I64], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a batch as tensors on the device; on CUDA without waiting: the copy queues up behind
    earlier work.
    """
    x = torch.from_numpy(batch[0])
    y = torch.from_numpy(batch[1])
    if device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(
            device, non_blocking=True
        )
    # On MPS, a copy in the background may read memory that is already freed.
    return x.to(device), y.to(device)


def eval_batches(
    split: Split, batching: BatchSplit, device: torch.device
) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Yield this rank's batches of a fixed set of windows: inputs, targets, number of learned
    targets, in windows.

    The last batch may hold fewer windows than rows. A terminal shows a progress bar. Raises
    DataError.
    """
    n = split.n_eval_windows(batching.eval_sequences)
    batches = list(batching.eval_rows(n))
    for rows in tqdm(batches, "evaluating", leave=False, disable=True if batching.rank else None):
        batch = split.eval_batch(rows, n)
        yield *to_device(batch, device), float((batch[1] >= 0).sum() / split.block_size)


class Loader:
    """The training micro-batches of one rank, from a position in the order of `Split.train_batch`
    on.

    Threads read the token files and copy to the device. `step` raises DataError if a file turns out
    to be damaged.
    """

    def __init__(
        self,
        split: Split,
        batching: BatchSplit,
        device: torch.device,
        position: int = 0,
        waited: Callable[[float], object] = lambda seconds: None,
        row0: int = 0,
    ) -> None:
        """waited: is called with the seconds that training waited for a micro-batch. row0: the row
        at which step 0 begins: not 0 if earlier steps were larger or smaller.
        """
        self._row0 = row0
        self.split = split
        self.device = device
        self.waited = waited
        self._pool = ThreadPoolExecutor(THREADS, "loader")
        self._n_unmasked = functools.lru_cache(AHEAD)(split.n_unmasked)
        self._ahead: deque[Future[tuple[MicroBatch, Any]]] = deque()
        self.restart_at(position, batching)

    def restart_at(self, position: int, batching: BatchSplit) -> None:
        """Continue from the global batch at this position, perhaps in another cut."""
        self.batching = batching
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()
        self._next = position * self.batching.micro_steps_per_rank
        self._ahead_of_step: int | None = None  # the position, at the first call of `step`
        for _ in range(AHEAD):
            self._submit()

    def step(self, step: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches of this step, the next one, whose losses times their weights make
        the step's.

        Raises ValueError if the last step was not read to its end, or another one after it: a
        resumed run would read other batches.

        With a loss mask, the weight is the micro-batch's share of the learned targets in the global
        batch, times the ranks over which gradients are averaged: the step's loss is the mean over
        these targets.
        """
        position, rest = divmod(self._next - AHEAD, self.batching.micro_steps_per_rank)
        if self._ahead_of_step is None:
            self._ahead_of_step = position - step
        if rest or position - step != self._ahead_of_step:
            raise ValueError(
                f"step {step} does not begin where the step before ended: each step reads all of "
                "its micro-batches, once, since a resumed run counts on it; for more or fewer of "
                "them change --gradient_accumulation_steps"
            )
        for _ in range(self.batching.micro_steps_per_rank):
            t0 = time.perf_counter()
            batch, copied = self._ahead.popleft().result()
            self.split.check()
            if copied is not None:
                stream = torch.cuda.current_stream(self.device)
                stream.wait_event(copied)
                batch.x.record_stream(stream)
                batch.y.record_stream(stream)
            self.waited(time.perf_counter() - t0)
            self._submit()
            yield batch

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _submit(self) -> None:
        position, micro_step = divmod(self._next, self.batching.micro_steps_per_rank)
        self._ahead.append(self._pool.submit(self._make, position, micro_step))
        self._next += 1

    def _make(self, position: int, micro_step: int) -> tuple[MicroBatch, Any]:
        """Return a micro-batch; on CUDA also the event of its copy, which this thread queues on a
        stream of its own.
        """
        rows = self.batching.rows(micro_step)
        global_batch = self.batching.global_batch_size
        batch = self.split.train_batch(position, rows + self._row0, global_batch)
        weight = 1 / self.batching.micro_steps_per_rank
        if self.split.masks:
            n_unmasked = self._n_unmasked(position, global_batch, self._row0)
            weight = self.batching.world * float(n_unmasked[rows].sum() / max(1, n_unmasked.sum()))
        x, y = to_device(batch, self.device)
        is_last = micro_step == self.batching.micro_steps_per_rank - 1
        micro_batch = MicroBatch(x, y, weight, self.batching.index(micro_step), is_last)
        copied = (
            torch.cuda.current_stream(self.device).record_event()
            if self.device.type == "cuda"
            else None
        )
        return micro_batch, copied


# ---- the files of a split ------------------------------------------------------------------------

AT_ONCE = 512 << 20  # bytes that are verified before the run begins: in a second or so


class Checksums:
    """Compare the files of splits, masks included, with the checksums that meta.json lists.

    Raises DataError if one differs; of a large data set, `check` raises that later. `state` tells
    the log what is compared.
    """

    def __init__(self, folder: Path, splits: Iterable[Split]) -> None:
        self._listed = listed_checksums(folder)
        files = [
            file for split in splits for file in split.files() if file.path.name in self._listed
        ]
        self._fault: Exception | None = None
        self._thread = threading.Thread(
            target=self._compare, args=[files], name="checksums", daemon=True
        )
        self._thread.start()
        if not self._listed:
            self.state = "no checksums (no meta.json that lists files)"
        elif sum(file.n_bytes for file in files) <= AT_ONCE:
            self._thread.join()
            self.check()
            self.state = "checksums verified"
        else:
            self.state = "checksums are verified while it trains"

    def check(self) -> None:
        """Raise DataError if a file has turned out to be another so far. Cheap: for each step."""
        if self._fault is not None:
            raise DataError(str(self._fault))

    def _compare(self, files: list[NumberFile]) -> None:
        try:
            for file in files:
                if file.sha256() != self._listed[file.path.name]:
                    raise ValueError(
                        f"{file.path} is damaged or was changed (its checksum); prepare "
                        "the data again"
                    )
        except Exception as e:  # raised by `check`
            self._fault = e


def open_tokens(path: Path) -> NumberFile:
    """Open a token file for reading. Raises ValueError if the file is not a token file, OSError."""
    size = path.stat().st_size if path.is_file() else 0
    head = np.fromfile(path, "<i4", 3).tolist() if size else []
    magic, version, tokens = [*head, 0, 0, 0][:3]  # a bare file may be shorter than a header
    if not size:
        reason = "it is missing or empty"
    elif magic in MAGICS:
        if (
            magic == MAGIC
            and version == VERSION
            and tokens
            and size == HEADER_BYTES + TOKEN_BYTES * tokens
        ):
            return NumberFile(path, "<u2", HEADER_BYTES, tokens)
        reason = (
            f"its header says {tokens:,} tokens of version {version}, magic {magic}, "
            f"and it has {size:,} bytes"
        )
    elif size % TOKEN_BYTES:
        reason = f"it has {size:,} bytes, an odd number"
    else:
        return NumberFile(path, "<u2", 0, size // TOKEN_BYTES)
    raise ValueError(f"{path} is not a file of uint16 tokens: {reason}; prepare the data again")


class NumberFile:
    """An open token file or loss mask, `len(file)` numbers.

    If a new file replaces it, the old one is still read.

    Several threads may read at once. Raises OSError.
    """

    def __init__(self, path: Path, dtype: str, begin: int, n: int) -> None:
        self.path = path
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (it stays open as long as this object)
        self._dtype = np.dtype(dtype)
        self._begin = begin
        self._n = n
        self.n_bytes = begin + n * self._dtype.itemsize
        self._written_ns = os.fstat(self._file.fileno()).st_mtime_ns

    def __len__(self) -> int:
        return self._n

    def read(self, first: int, n: int) -> npt.NDArray[Any]:
        """Return a copy of numbers first .. first + n - 1.

        Raises DataError, if the file has become shorter, too.
        """
        size = max(0, min(n, self._n - first)) * self._dtype.itemsize
        begin = self._begin + first * self._dtype.itemsize
        # Not memory-mapped: if somebody cuts the file, reading past its new end would end the
        # process with SIGBUS.
        try:
            if hasattr(os, "pread"):
                content = os.pread(self._file.fileno(), size, begin)
            else:
                # Windows has no pread, and replaces no open file.
                with open(self.path, "rb") as file:
                    file.seek(begin)
                    content = file.read(size)
        except OSError as e:
            raise DataError(f"cannot read {self.path}: {e.strerror}") from None
        now = os.fstat(self._file.fileno()).st_size
        if now < self.n_bytes or len(content) < size:
            raise DataError(
                f"{self.path} became shorter while it was in use: it had {self.n_bytes:,} "
                f"bytes, now it has {now:,}; prepare the data again, then resume"
            )
        return np.frombuffer(content, self._dtype).copy()

    def sha256(self) -> str:
        """Return the SHA-256 of the whole file, in hex digits."""
        self._file.seek(0)
        return hashlib.file_digest(self._file, "sha256").hexdigest()

    def was_written(self) -> bool:
        """Return whether somebody has written into the file since it was opened, or since the last
        call.
        """
        before = self._written_ns
        self._written_ns = os.fstat(self._file.fileno()).st_mtime_ns
        return self._written_ns != before


def open_shards(folder: Path, split: str) -> list[NumberFile]:
    """Open all shards of a split.

    Raises ValueError if one is damaged or not as meta.json lists it, OSError.
    """
    paths = token_files(folder, split)
    entries = read_record(folder).get("files", {})
    allow_open_files()
    shards = [open_tokens(path) for path in paths]
    for shard in shards:
        n = len(shard)
        listed = entries.get(shard.path.name, {}).get("tokens", n)
        if n != listed:
            raise ValueError(
                f"{shard.path} has {n:,} tokens, and meta.json lists {listed:,}; prepare "
                "the data again"
            )
    return shards


def open_masks(folder: Path, split: str, shards: list[NumberFile]) -> list[NumberFile]:
    """Open the loss masks of a split's shards: 0 if a token is not a target; [] if all tokens are.

    Raises ValueError if one is missing or has another length.
    """
    paths = [shard.path.with_suffix(MASK_SUFFIX) for shard in shards]
    listed = any(name.startswith(split) for name in read_record(folder).get("masks", {}))
    if not listed and not any(path.exists() for path in paths):
        return []
    masks = []
    for path, shard in zip(paths, shards, strict=True):
        size = path.stat().st_size if path.is_file() else 0
        if size != len(shard):
            raise ValueError(
                f"the loss mask {path} has {size:,} bytes, and {shard.path.name} "
                f"{len(shard):,} tokens, which need one each; prepare the data again"
            )
        masks.append(NumberFile(path, "u1", 0, size))
    return masks
