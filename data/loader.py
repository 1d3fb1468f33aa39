"""Batches of a split as tensors on a device, made ahead of the training loop by threads."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from data.splits import I64, Split

THREADS, AHEAD = 4, 8  # ahead: micro-batches; several at once, since a disk answers several as fast as one


def to_device(batch: tuple[I64, I64], device: torch.device) -> tuple[Tensor, Tensor]:
    """A batch as tensors on the device; on CUDA without waiting for the work queued there."""
    x, y = (torch.from_numpy(a) for a in batch)
    if device.type == "cuda":
        x, y = x.pin_memory(), y.pin_memory()
    return x.to(device, non_blocking=True), y.to(device, non_blocking=True)


class Loader:
    """The micro-batches of one rank, from optimizer step `step` on, in the order of `Split.train_batch`.

    The threads read the token files, pin and, on CUDA, copy in a stream of their own, so that neither the disk nor
    the copy is waited for, as long as they keep up. What they raise is raised by `next`.
    """

    def __init__(
        self,
        split: Split,
        device: torch.device,
        batch_size: int,
        micro_steps: int,
        step: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.split, self.device, self.wait_s = split, device, 0.0  # wait_s: seconds that `next` has waited
        self._global_batch = batch_size * micro_steps * world
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._order = self._rows(batch_size, micro_steps, step, rank, world)
        self._pool = ThreadPoolExecutor(THREADS, "loader")
        self._ahead: deque[Future[tuple[Tensor, Tensor]]] = deque()
        for _ in range(AHEAD):
            self._submit()

    def next(self) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of the next micro-batch, each (batch_size, block_size) int64."""
        t0 = time.perf_counter()
        x, y = self._ahead.popleft().result()
        self.wait_s += time.perf_counter() - t0
        self._submit()
        if self._stream:
            here = torch.cuda.current_stream(self.device)
            here.wait_stream(self._stream)
            for tensor in (x, y):
                tensor.record_stream(here)  # or its memory would be given to the next copy while still read from
        return x, y

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _submit(self) -> None:
        self._ahead.append(self._pool.submit(self._make, *next(self._order)))

    def _make(self, step: int, rows: I64) -> tuple[Tensor, Tensor]:
        batch = self.split.train_batch(step, rows, self._global_batch)
        with torch.cuda.stream(self._stream):  # nothing where there is none
            return to_device(batch, self.device)

    def _rows(self, batch_size: int, micro_steps: int, step: int, rank: int, world: int) -> Iterator[tuple[int, I64]]:
        for now in itertools.count(step):
            for micro in range(micro_steps):
                yield now, np.arange(batch_size) + (micro * world + rank) * batch_size
