"""The rows of a batch as tensors on a device, made ahead of the training loop by threads."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from data.splits import I64, Split
from deskgpt.compute.batching import Batching

THREADS = 4  # several, since a disk answers several requests as fast as one
AHEAD = 8  # micro-batches

Batch = tuple[Tensor, Tensor]  # inputs and targets, each (batch_size, block_size) int64


class MicroBatch(NamedTuple):
    """One of the parts in which a rank goes through a step's global batch."""

    x: Tensor  # inputs (batch_size, block_size) int64
    y: Tensor  # targets, the same
    weight: float | None  # what its mean loss counts in the step's, if that is not 1 / micro_steps; see Loader.step
    number: int  # of this micro-batch in its step, counted over all ranks
    is_last: bool  # of the step


# ---- tensors -------------------------------------------------------------------------------------------------


def to_device(batch: tuple[I64, I64], device: torch.device) -> Batch:
    """A batch as tensors on the device; on CUDA without waiting for the work queued there."""
    x = torch.from_numpy(batch[0])
    y = torch.from_numpy(batch[1])
    if device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    return x.to(device), y.to(device)  # on MPS, a copy in the background may read memory that is already freed


def first_micro_batch(split: Split, batching: Batching, device: torch.device, rows: int) -> Batch:
    """The first sequences of the first step's global batch, (rows, block_size) each.

    With a loss mask, they begin with the first sequence that has something to learn.
    """
    first = split.first_learned_row()
    return to_device(split.train_batch(0, first + np.arange(rows), batching.sequences), device)


def eval_batches(split: Split, batching: Batching, device: torch.device) -> Iterator[tuple[Tensor, Tensor, float]]:
    """This rank's batches of a fixed set of windows: inputs, targets, number of targets that are learned, in windows.

    The last batch may hold fewer windows than rows. A terminal shows a progress bar.
    """
    n = split.n_eval_windows(batching.eval_windows)
    batches = list(batching.eval_rows(n))
    for rows in tqdm(batches, "evaluating", leave=False, disable=True if batching.rank else None):
        batch = split.eval_batch(rows, n)
        yield *to_device(batch, device), float((batch[1] >= 0).sum() / split.block_size)


class Loader:
    """The training micro-batches of one rank, from a position in the order of `Split.train_batch` on.

    Threads read the token files, pin and, on CUDA, copy in a stream of their own. What they raise is raised by `step`.
    """

    def __init__(
        self,
        split: Split,
        batching: Batching,
        device: torch.device,
        position: int = 0,
        waited: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        """waited: is told how long training waited for a micro-batch."""
        self.split = split
        self.batching = batching
        self.device = device
        self.waited = waited
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(THREADS, "loader")
        self._n_learned = functools.lru_cache(AHEAD)(self._learned_of_rows)  # by position
        self._ahead: deque[Future[MicroBatch]] = deque()
        self.seek(position)

    def seek(self, position: int) -> None:
        """Goes on from the global batch at this position."""
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()
        self._next = position * self.batching.micro_steps
        for _ in range(AHEAD):
            self._submit()

    def step(self) -> Iterator[MicroBatch]:
        """The micro-batches of the next step.

        With a loss mask, their weight is the micro-batch's share of the targets that are learned in the whole global
        batch, times the ranks over which gradients are averaged: the step's loss is the mean over these targets.
        """
        for _ in range(self.batching.micro_steps):
            t0 = time.perf_counter()
            batch = self._ahead.popleft().result()
            self.waited(time.perf_counter() - t0)
            self._submit()
            if self._stream is not None:
                here = torch.cuda.current_stream(self.device)
                here.wait_stream(self._stream)
                for tensor in (batch.x, batch.y):
                    tensor.record_stream(here)  # otherwise the next copy would get its memory while it is still read
            yield batch

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _submit(self) -> None:
        position, micro_step = divmod(self._next, self.batching.micro_steps)
        self._ahead.append(self._pool.submit(self._make, position, micro_step))
        self._next += 1

    def _make(self, position: int, micro_step: int) -> MicroBatch:
        rows = self.batching.rows(micro_step)
        batch = self.split.train_batch(position, rows, self.batching.sequences)
        weight = None
        if self.split.masks:
            n_learned = self._n_learned(position)
            weight = self.batching.world * float(n_learned[rows].sum() / max(1, n_learned.sum()))
        with torch.cuda.stream(self._stream):  # does nothing without a stream
            x, y = to_device(batch, self.device)
        is_last = micro_step == self.batching.micro_steps - 1
        return MicroBatch(x, y, weight, self.batching.number(micro_step), is_last)

    def _learned_of_rows(self, position: int) -> I64:
        """The targets that are learned in each row of a global batch, of all ranks."""
        return self.split.n_learned(position, np.arange(self.batching.sequences), self.batching.sequences)
