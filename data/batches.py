"""The batches of a run: which tokens are in which row, how a step is split, tensors on the device.

Batch order is a pure function of (seed, step, row of the global batch), so there is no state to
save. How a step is split into micro-batches and ranks changes nothing about what is learned.
Threads read the token files ahead of the training loop.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from data.token_files import Numbers, split_files
from deskgpt.errors import DataError

# T is block_size, the number of tokens of a window.
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[Any]  # of uint64, which NumPy's types do not let meet a plain int

CHECKED_TOKENS = 1 << 20  # of the first shard: their ids are checked before a run begins
GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment: 2^64 / golden ratio
FEISTEL_ROUNDS = 6
THREADS = 4  # of the loader: several, since a disk answers several requests as fast as one
MICRO_BATCHES_AHEAD = 8  # the loader makes so many before they are asked for


class Split:
    """The windows of one split: inputs and targets of block_size tokens, targets one token further
    on.

    In an epoch every shard is cut into consecutive windows. Their inputs do not overlap and never
    cross the shard's end. The first window starts at an offset drawn for that epoch, so that later
    epochs see other cuts; the order of the windows is a pseudo-random permutation.

    Packed data has windows of a fixed size (in meta.json), and is read in exactly these, all of
    them in each epoch. Masked targets are -1.

    Raises ValueError if files are missing, damaged or too short. Each call that reads raises
    DataError for damage and for ids of vocab_size and more.
    """

    def __init__(
        self, folder: Path, split: str, block_size: int, vocab_size: int, seed: int = 0
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.seed = seed
        shards, masks, is_packed = split_files(folder, split, block_size)
        self.shards = [NumberFile(found, "<u2") for found in shards]
        self.masks = [NumberFile(found, "u1") for found in masks]  # one for each shard, or none
        self.files = [*self.shards, *self.masks]
        self.lengths = np.array([shard.n for shard in self.shards], np.int64)
        self.tokens = int(self.lengths.sum())
        # All windows without overlap, per shard. Packed data is read in exactly these.
        self._eval_windows = (self.lengths - 1) // block_size
        self._windows = self._eval_windows
        offsets = np.ones_like(self.lengths)  # to choose from, per shard
        if not is_packed:
            # One window fewer than could fit, so that all of them fit whichever offset is drawn. A
            # shard with room for one window only has that one, and fewer offsets.
            self._windows = np.maximum(1, (self.lengths - block_size) // block_size)
            offsets = np.minimum(block_size, self.lengths - self._windows * block_size)
        self._offsets = offsets.astype(np.uint64)
        self.n_windows = int(self._windows.sum())  # per epoch
        self.damage: DataError | None = None  # found by a check of the files meanwhile
        first = np.zeros(1, np.int64)
        self._check_ids(first, first, self.shards[0].read(0, CHECKED_TOKENS)[None])  # others later
        if self.masks and not any(mask.read(1, mask.n).any() for mask in self.masks):
            raise ValueError(
                f"{self.masks[0].path}: it leaves no token to learn; prepare the data again"
            )

    # ---- training --------------------------------------------------------------------------------

    def train_batch(self, rows: I64) -> tuple[I64, I64]:
        """Return (inputs, targets), each (len(rows), T), of rows of the training data: the windows
        of all epochs, in the order in which steps read them.
        """
        return self._read(*self.sequence_offsets(rows))

    def sequence_offsets(self, rows: I64) -> tuple[I64, I64]:
        """Return (shard, its first token), each (len(rows),), of the windows of train_batch."""
        epoch = rows // self.n_windows
        key = epoch_keys(self.seed, epoch)
        window = permute(rows % self.n_windows, self.n_windows, key)
        shard, window_of_shard = locate(window, self._windows)
        offset = splitmix64(key + shard.astype(np.uint64)) % self._offsets[shard]
        start = window_of_shard * self.block_size + offset.astype(np.int64)
        return shard, start

    def n_unmasked(self, first: int, n: int) -> I64:
        """Return the learned targets (n,) in each of n rows of the training data."""
        return self._unmasked(*self.sequence_offsets(first + np.arange(n))).sum(1)

    # ---- evaluation ------------------------------------------------------------------------------

    def n_eval_windows(self, at_most: int) -> int:
        """Return the number of windows without overlap to evaluate: at most at_most, or all."""
        return min(at_most, int(self._eval_windows.sum()))

    def eval_batch(self, rows: I64, n: int) -> tuple[I64, I64]:
        """Return (inputs, targets) of rows of a fixed set of n evenly spaced windows; rows past n
        have targets of -1.
        """
        window = np.minimum(rows, n - 1) * self._eval_windows.sum() // n
        shard, window_of_shard = locate(window, self._eval_windows)
        x, y = self._read(shard, window_of_shard * self.block_size)
        # Fill the last batch rather than shorten it: a new shape would be compiled again.
        y[rows >= n] = -1
        return x, y

    # ---- reading ---------------------------------------------------------------------------------

    def _read(self, shard: I64, start: I64) -> tuple[I64, I64]:
        """Return (inputs, targets), each (len(shard), T), of windows from start[i] of shard[i]."""
        block = read_rows(self.shards, shard, start, self.block_size + 1)
        self._check_ids(shard, start, block)
        x = block[:, :-1].astype(np.int64)
        y = block[:, 1:].astype(np.int64)
        if self.masks:
            y[~self._unmasked(shard, start)] = -1
        return x, y

    def _unmasked(self, shard: I64, start: I64) -> npt.NDArray[np.bool_]:
        """Return which targets (len(shard), T) of these windows are learned."""
        return read_rows(self.masks, shard, start + 1, self.block_size) != 0

    def _check_ids(self, shard: I64, start: I64, block: npt.NDArray[np.uint16]) -> None:
        """Raise DataError if block (rows, tokens), read from these places, has too large an id."""
        if block.max() < self.vocab_size:
            return
        row, column = np.argwhere(block >= self.vocab_size)[0]
        path = self.shards[shard[row]].path
        raise DataError(
            f"{path}: token {start[row] + column:,} is {block[row, column]}, and the vocabulary "
            f"ends at {self.vocab_size - 1}; the file does not belong to this tokenizer or model"
        )


class NumberFile:
    """An open token file or loss mask of n numbers.

    If a new file replaces it, the old one is still read. Several threads may read at once. Raises
    OSError.
    """

    def __init__(self, numbers: Numbers, dtype: str) -> None:
        self.path = numbers.path
        self.n = numbers.n
        self._begin = numbers.begin
        self.file = open(self.path, "rb", buffering=0)  # noqa: SIM115 (it stays open as long as this object)
        self._dtype = np.dtype(dtype)

    def read(self, first: int, n: int) -> npt.NDArray[Any]:
        """Return a copy of numbers first .. first + n - 1.

        Raises DataError, if the file has become shorter, too.
        """
        size = max(0, min(n, self.n - first)) * self._dtype.itemsize
        begin = self._begin + first * self._dtype.itemsize
        # Not memory-mapped: if somebody cuts the file, reading past its new end would end the
        # process with SIGBUS.
        try:
            if hasattr(os, "pread"):
                content = os.pread(self.file.fileno(), size, begin)
            else:  # Windows, which replaces no open file
                with open(self.path, "rb") as file:
                    file.seek(begin)
                    content = file.read(size)
        except OSError as e:
            raise DataError(f"cannot read {self.path}: {e.strerror}") from None
        if len(content) < size:
            raise DataError(
                f"{self.path} became shorter while it was in use; prepare the data again, then "
                "resume"
            )
        return np.frombuffer(content, self._dtype).copy()


def read_rows(files: Sequence[NumberFile], file: I64, start: I64, n: int) -> npt.NDArray[Any]:
    """Return n numbers from start[i] of files[file[i]] in each row i."""
    places = zip(file.tolist(), start.tolist(), strict=True)
    return np.stack([files[number].read(first, n) for number, first in places])


def locate(window: I64, windows_per_shard: I64) -> tuple[I64, I64]:
    """Return (shard, number within that shard) of windows that are numbered through all shards."""
    ends: I64 = windows_per_shard.cumsum()
    shard = np.searchsorted(ends, window, side="right")
    return shard, window - (ends[shard] - windows_per_shard[shard])


# ---- pseudo-random order -------------------------------------------------------------------------


def epoch_keys(seed: int, epochs: I64) -> U64:
    """Return one uint64 key per epoch number."""
    base = splitmix64(np.array([seed % 2**64], np.uint64))
    return splitmix64(base + epochs.astype(np.uint64) * GOLDEN)


def permute(i: I64, n: int, key: U64) -> I64:
    """Return where positions i (rows,) of 0..n-1 go under pseudo-random permutations, in O(1) each.

    A Feistel network permutes the smallest range 0..4^k-1 that holds n numbers. A result of n or
    more is sent through it again until it falls below n ("cycle walking", Black & Rogaway, CT-RSA
    2002). key (rows,): a permutation for each row.
    """
    half_bits = max(1, math.ceil((n - 1).bit_length() / 2))
    x = feistel(i.astype(np.uint64), half_bits, key)
    outside = x >= n
    while outside.any():
        x[outside] = feistel(x[outside], half_bits, key[outside])
        outside = x >= n
    return x.astype(np.int64)


def feistel(x: U64, half_bits: int, key: U64) -> U64:
    """Apply a pseudo-random bijection of the numbers of 2·half_bits bits for each key (n,)."""
    mask = (1 << half_bits) - 1
    left = x >> half_bits
    right = x & mask
    for r in range(FEISTEL_ROUNDS):
        new_right = left ^ (splitmix64(right + key + r * GOLDEN % 2**64) & mask)
        left = right
        right = new_right
    return (left << half_bits) | right


def splitmix64(x: U64) -> U64:
    """Apply a bijection of uint64 that looks random: splitmix64's finalizer (Steele, Lea & Flood,
    OOPSLA 2014). It makes a random stream of its own from a seed and counters.
    """
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


# ---- how a step is split -------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchSplit:
    """How a global batch is cut into micro-batches and ranks: any two cuts train the same.

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
            nearest = math.ceil(self.grad_accum_steps / self.world) * self.world
            raise ValueError(
                f"gradient_accumulation_steps={self.grad_accum_steps} is not a multiple of "
                f"{self.world}, the number of ranks; try --gradient_accumulation_steps={nearest}"
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
        """Return the same training in micro-batches of this size, which must divide the batch."""
        steps, rest = divmod(self.global_batch_size, batch_size)
        assert not rest
        tokens = self.settings()["eval_tokens"]
        return replace(self, batch_size=batch_size, grad_accum_steps=steps, eval_tokens=tokens)

    def settings(self) -> dict[str, int]:
        """Return the settings of train.py that ask for this cut and these evaluations."""
        return {
            "batch_size": self.batch_size,
            "gradient_accumulation_steps": self.grad_accum_steps,
            "eval_tokens": self.eval_tokens or self.eval_sequences * self.block_size,
        }

    def flags(self) -> str:
        """Return the command line for this cut."""
        return " ".join(f"--{name}={value}" for name, value in self.settings().items())

    def index(self, micro_step: int) -> int:
        """Return the number of this rank's micro-batch within the step, over all ranks."""
        return micro_step * self.world + self.rank

    def rows(self, micro_step: int) -> I64:
        """Return this rank's rows (batch_size,) of the global batch in one micro-batch."""
        return self.index(micro_step) * self.batch_size + np.arange(self.batch_size)


# ---- tensors on the device -----------------------------------------------------------------------


@dataclass(frozen=True)
class MicroBatch:
    """One of the parts in which a rank goes through a step's global batch."""

    x: Tensor  # inputs (batch_size, block_size) int64
    y: Tensor  # targets, the same
    # Its share of the step's loss: 1 / micro-batches, or its part of the learned targets.
    weight: float
    index: int  # of this micro-batch in its step, counted over all ranks
    is_last: bool  # whether it ends the step


def to_device(ids: I64, device: torch.device) -> Tensor:
    """Return token ids as a tensor on the device; on CUDA without waiting: the copy queues up
    behind earlier work.
    """
    tokens = torch.from_numpy(ids)
    if device.type == "cuda":  # on MPS, such a copy may read memory that is already freed
        return tokens.pin_memory().to(device, non_blocking=True)
    return tokens.to(device)


class Loader:
    """The training micro-batches of one rank, from a step in `Split.train_batch`'s order on.

    Threads read the token files and copy to the device. `step` raises DataError if a file turns out
    to be damaged.
    """

    def __init__(
        self,
        split: Split,
        batching: BatchSplit,
        device: torch.device,
        position: int = 0,
        row0: int = 0,
    ) -> None:
        """position: the first step to be read. row0: the row at which step 0 begins: not 0 if
        earlier steps were larger or smaller.
        """
        self._row0 = row0
        self.split = split
        self.batching = batching
        self.device = device
        self.wait_s = 0.0  # that training waited for micro-batches
        self._pool = ThreadPoolExecutor(THREADS, "loader")
        self._n_unmasked = functools.lru_cache(MICRO_BATCHES_AHEAD)(split.n_unmasked)
        self._ahead: deque[Future[tuple[MicroBatch, Any]]] = deque()
        self._next = position * batching.micro_steps_per_rank
        for _ in range(MICRO_BATCHES_AHEAD):
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
        if self._next - MICRO_BATCHES_AHEAD != step * self.batching.micro_steps_per_rank:
            raise ValueError(
                f"step {step} does not begin where the step before ended: each step reads all of "
                "its micro-batches, once, since a resumed run counts on it; for more or fewer of "
                "them change --gradient_accumulation_steps"
            )
        for _ in range(self.batching.micro_steps_per_rank):
            t0 = time.perf_counter()
            micro, copied = self._ahead.popleft().result()
            if self.split.damage is not None:
                raise self.split.damage
            if copied is not None:
                stream = torch.cuda.current_stream(self.device)
                stream.wait_event(copied)
                micro.x.record_stream(stream)
                micro.y.record_stream(stream)
            self.wait_s += time.perf_counter() - t0
            self._submit()
            yield micro

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _submit(self) -> None:
        step, micro_step = divmod(self._next, self.batching.micro_steps_per_rank)
        self._ahead.append(self._pool.submit(self._make, step, micro_step))
        self._next += 1

    def _make(self, step: int, micro_step: int) -> tuple[MicroBatch, Any]:
        """Return a micro-batch; on CUDA also the event of its copy, which this thread queues on a
        stream of its own.
        """
        batching = self.batching
        rows = batching.rows(micro_step)
        n = batching.global_batch_size
        first = step * n + self._row0
        x, y = self.split.train_batch(first + rows)
        weight = 1 / batching.micro_steps_per_rank
        if self.split.masks:
            n_unmasked = self._n_unmasked(first, n)
            weight = batching.world * float(n_unmasked[rows].sum() / max(1, n_unmasked.sum()))
        is_last = micro_step == batching.micro_steps_per_rank - 1
        inputs = to_device(x, self.device)
        targets = to_device(y, self.device)
        copied = None
        if self.device.type == "cuda":
            copied = torch.cuda.current_stream(self.device).record_event()
        return MicroBatch(inputs, targets, weight, batching.index(micro_step), is_last), copied
