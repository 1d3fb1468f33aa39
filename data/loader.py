"""Which rank reads which rows, and these rows as tensors on a device, made ahead of the training loop by threads."""

from __future__ import annotations

import functools
import itertools
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from data.splits import I64, Split

THREADS = 4  # several, since a disk answers several requests as fast as one
AHEAD = 8  # micro-batches

Batch = tuple[Tensor, Tensor]  # inputs and targets, each (batch_size, block_size) int64
Weighted = tuple[Tensor, Tensor, float | None]  # and what Runner.backward takes as the weight of its loss

# ---- the plan ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchPlan:
    """How an optimizer step's global batch, and an evaluation, are split into micro-batches and ranks."""

    batch_size: int  # sequences per micro-batch
    micro_steps: int = 1  # micro-batches per optimizer step, on each rank
    rank: int = 0
    world: int = 1

    @classmethod
    def of(cls, batch_size: int, gradient_accumulation_steps: int, rank: int, world: int) -> BatchPlan:
        """gradient_accumulation_steps counts the micro-batches of all ranks.

        Raises ValueError if they cannot share it.
        """
        if gradient_accumulation_steps % world:
            nearest = (gradient_accumulation_steps // world + 1) * world
            raise ValueError(
                f"gradient_accumulation_steps={gradient_accumulation_steps} does not divide among {world} ranks; "
                f"try --gradient_accumulation_steps={nearest}"
            )
        return cls(batch_size, gradient_accumulation_steps // world, rank, world)

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step."""
        return self.batch_size * self.micro_steps * self.world

    def number(self, micro_step: int) -> int:
        """That of this rank's micro-batch among those of the step, over all ranks: the same rows at any world size."""
        return micro_step * self.world + self.rank

    def rows(self, micro_step: int) -> I64:
        """This rank's rows (batch_size,) of the global batch in one micro-batch."""
        return self.number(micro_step) * self.batch_size + np.arange(self.batch_size)

    def eval_rows(self, n: int) -> Iterator[I64]:
        """This rank's rows of an evaluation of n windows, a batch at a time. Rows from n on are padding.

        All ranks have equally many batches, some of them perhaps of padding only: where weights are sharded, a rank
        that had finished would leave the others waiting for its part.
        """
        for first in range(0, n, self.world * self.batch_size):
            yield first + self.rank * self.batch_size + np.arange(self.batch_size)


# ---- tensors -------------------------------------------------------------------------------------------------


def to_device(batch: tuple[I64, I64], device: torch.device) -> Batch:
    """A batch as tensors on the device; on CUDA without waiting for the work queued there."""
    x = torch.from_numpy(batch[0])
    y = torch.from_numpy(batch[1])
    if device.type == "cuda":
        x = x.pin_memory()
        y = y.pin_memory()
    return x.to(device, non_blocking=True), y.to(device, non_blocking=True)


def first_micro_batch(split: Split, plan: BatchPlan, device: torch.device, rows: int) -> Batch:
    """The first sequences of the first step's global batch, (rows, block_size) each.

    With a loss mask, they begin with the first sequence that has something to learn.
    """
    first = split.first_counted_row()
    return to_device(split.train_batch(0, first + np.arange(rows), plan.global_batch), device)


def eval_batches(
    split: Split, plan: BatchPlan, at_most: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor, float]]:
    """This rank's batches of a fixed set of windows, `at_most` in all: inputs, targets, number of windows in them.

    The last batch may hold fewer windows than rows. With a loss mask, the number is that of the targets that are
    learned, in windows. A terminal shows a progress bar.
    """
    n = split.n_eval_windows(at_most)
    batches = list(plan.eval_rows(n))
    for rows in tqdm(batches, "evaluating", leave=False, disable=True if plan.rank else None):
        batch = split.eval_batch(rows, n)
        count = float((batch[1] >= 0).sum() / split.block_size) if split.masks else int((rows < n).sum())
        yield *to_device(batch, device), count


class Loader:
    """The training micro-batches of one rank, from optimizer step `step` on, in the order of `Split.train_batch`.

    The threads read the token files, pin and, on CUDA, copy in a stream of their own. While they keep up, training
    waits neither for the disk nor for the copy. What they raise is raised by `next`.
    """

    def __init__(self, split: Split, plan: BatchPlan, device: torch.device, step: int = 0) -> None:
        self.split = split
        self.plan = plan
        self.device = device
        self._wait_s = 0.0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._order = self._steps(step)
        self._pool = ThreadPoolExecutor(THREADS, "loader")
        self._ahead: deque[Future[Weighted]] = deque()
        self._counted = functools.lru_cache(AHEAD)(self._count)  # by step
        for _ in range(AHEAD):
            self._submit()

    def next(self) -> Weighted:
        """(inputs, targets, weight) of the next micro-batch.

        The weight is None where every target is learned. With a loss mask, it is what the micro-batch's mean loss
        counts in the step's: its share of the targets that are learned in the whole global batch, times the ranks over
        which gradients are averaged. So the step's loss is the mean over these targets, however the batch is split.
        """
        t0 = time.perf_counter()
        x, y, weight = self._ahead.popleft().result()
        self._wait_s += time.perf_counter() - t0
        self._submit()
        if self._stream is not None:
            here = torch.cuda.current_stream(self.device)
            here.wait_stream(self._stream)
            for tensor in (x, y):
                tensor.record_stream(here)  # otherwise the next copy would get its memory while it is still read
        return x, y, weight

    def take_wait_s(self) -> float:
        """Seconds that `next` has waited since this was last asked."""
        wait_s = self._wait_s
        self._wait_s = 0.0
        return wait_s

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _steps(self, step: int) -> Iterator[tuple[int, I64]]:
        for now in itertools.count(step):
            for micro_step in range(self.plan.micro_steps):
                yield now, self.plan.rows(micro_step)

    def _submit(self) -> None:
        step, rows = next(self._order)
        self._ahead.append(self._pool.submit(self._make, step, rows))

    def _make(self, step: int, rows: I64) -> Weighted:
        batch = self.split.train_batch(step, rows, self.plan.global_batch)
        weight = None
        if self.split.masks:
            counted = self._counted(step)
            weight = self.plan.world * float(counted[rows].sum() / max(1, counted.sum()))
        with torch.cuda.stream(self._stream):  # does nothing without a stream
            return *to_device(batch, self.device), weight

    def _count(self, step: int) -> I64:
        """The targets that are learned in each row of a step's global batch, of all ranks."""
        return self.split.counted(step, np.arange(self.plan.global_batch), self.plan.global_batch)
