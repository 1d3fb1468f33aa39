"""The rows of a batch as tensors on a device, made ahead of the training loop by threads."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from data.batching import Batching
from data.splits import I64, Split

THREADS = 4  # several, since a disk answers several requests as fast as one
AHEAD = 8  # micro-batches


class MicroBatch(NamedTuple):
    """One of the parts in which a rank goes through a step's global batch."""

    x: Tensor  # inputs (batch_size, block_size) int64
    y: Tensor  # targets, the same
    weight: float  # of its mean loss in the step's: 1 / micro-batches, or its share of the learned targets
    number: int  # of this micro-batch in its step, counted over all ranks
    is_last: bool  # of the step


# ---- tensors -------------------------------------------------------------------------------------------------


def to_device(batch: tuple[I64, I64], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a batch as tensors on the device; on CUDA without waiting: the copy queues up behind earlier work."""
    x = torch.from_numpy(batch[0])
    y = torch.from_numpy(batch[1])
    if device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    return x.to(device), y.to(device)  # on MPS, a copy in the background may read memory that is already freed


def eval_batches(split: Split, batching: Batching, device: torch.device) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Yield this rank's batches of a fixed set of windows: inputs, targets, number of learned targets, in windows.

    The last batch may hold fewer windows than rows. A terminal shows a progress bar. Raises DataError.
    """
    n = split.n_eval_windows(batching.eval_windows)
    batches = list(batching.eval_rows(n))
    for rows in tqdm(batches, "evaluating", leave=False, disable=True if batching.rank else None):
        batch = split.eval_batch(rows, n)
        yield *to_device(batch, device), float((batch[1] >= 0).sum() / split.block_size)


class Loader:
    """The training micro-batches of one rank, from a position in the order of `Split.train_batch` on.

    Threads read the token files and copy to the device. `step` raises DataError if a file turns out to be damaged.
    """

    def __init__(
        self,
        split: Split,
        batching: Batching,
        device: torch.device,
        position: int = 0,
        waited: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        """waited: is called with the seconds that training waited for a micro-batch."""
        self.split = split
        self.device = device
        self.waited = waited
        self._pool = ThreadPoolExecutor(THREADS, "loader")
        self._n_learned = functools.lru_cache(AHEAD)(split.n_learned)
        self._ahead: deque[Future[tuple[MicroBatch, Any]]] = deque()
        self.seek(position, batching)

    def seek(self, position: int, batching: Batching) -> None:
        """Continue from the global batch at this position, perhaps in another cut."""
        self.batching = batching
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()
        self._next = position * self.batching.micro_steps
        for _ in range(AHEAD):
            self._submit()

    def step(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches of the next step, whose losses times their weights make the step's.

        With a loss mask, the weight is the micro-batch's share of the learned targets in the global batch, times the
        ranks over which gradients are averaged: the step's loss is the mean over these targets.
        """
        for _ in range(self.batching.micro_steps):
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
        position, micro_step = divmod(self._next, self.batching.micro_steps)
        self._ahead.append(self._pool.submit(self._make, position, micro_step))
        self._next += 1

    def _make(self, position: int, micro_step: int) -> tuple[MicroBatch, Any]:
        """Return a micro-batch; on CUDA also the event of its copy, which this thread queues on a stream of its own."""
        rows = self.batching.rows(micro_step)
        batch = self.split.train_batch(position, rows, self.batching.sequences)
        weight = 1 / self.batching.micro_steps
        if self.split.masks:
            n_learned = self._n_learned(position, self.batching.sequences)
            weight = self.batching.world * float(n_learned[rows].sum() / max(1, n_learned.sum()))
        x, y = to_device(batch, self.device)
        is_last = micro_step == self.batching.micro_steps - 1
        micro_batch = MicroBatch(x, y, weight, self.batching.number(micro_step), is_last)
        copied = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
        return micro_batch, copied
