"""Where a run's time goes: steps, evaluation, saving, compiling, waiting for data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from deskgpt.system import hardware


class StepTimer:
    """Seconds of a run by what they were spent on: training steps, evaluation, saving, waiting for data.

    Its clock is read when the device has finished what is queued, and stands still while torch.compile compiles. What
    the blocks of `spent_on` take is not of the steps, also if they raise.
    """

    def __init__(self, device: torch.device, compile_s: Callable[[], float] = lambda: 0.0) -> None:
        """compile_s: returns the seconds that this process has spent compiling so far."""
        self.device = device
        self._compile_s = compile_s
        self.wait_s = 0.0  # of the training time, spent waiting for data
        self.total_s = {"evaluation": 0.0, "saving": 0.0}
        self.last_s = {"evaluation": 0.0, "saving": 0.0}
        self._started_at = self._now()
        self.window_ended_s = 0.0  # training time at the end of the last window
        self._window_wait_s = 0.0  # wait for data by then

    def start(self) -> None:
        """Count the time of the steps from now on."""
        self._started_at = self._now()

    def _now(self) -> float:
        hardware.synchronize(self.device)
        return time.perf_counter() - self._compile_s()

    def train_s(self) -> float:
        """Return the seconds of all steps so far, the wait for data included. Not within a block of spent_on."""
        return self._now() - self._started_at - sum(self.total_s.values())

    def add_wait(self, seconds: float) -> None:
        """Add to the time that was spent waiting for data."""
        self.wait_s += seconds

    def spent_s(self) -> tuple[float, float]:
        """Return the seconds of compiling and of waiting for data so far, for `end_window`."""
        return self._compile_s(), self.wait_s

    def end_window(
        self, steps: int, tokens: int, done_at: float, spent_s: tuple[float, float]
    ) -> tuple[float, float, float]:
        """Return what the steps since the last call took: (seconds per step, tokens per second, share of waiting).

        done_at: when the device had done the last of them. spent_s: by the time that it was queued.
        """
        compile_s, total_wait_s = spent_s
        now_s = done_at - compile_s - self._started_at - sum(self.total_s.values())
        window_s = now_s - self.window_ended_s
        wait_s = total_wait_s - self._window_wait_s
        self.window_ended_s = now_s
        self._window_wait_s = total_wait_s
        return window_s / steps, tokens / window_s, wait_s / window_s

    @contextmanager
    def spent_on(self, what: str) -> Iterator[None]:
        """Time evaluation or saving."""
        began = self._now()
        try:
            yield
        finally:
            self.last_s[what] = self._now() - began
            self.total_s[what] += self.last_s[what]
