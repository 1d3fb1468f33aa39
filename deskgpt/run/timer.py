"""Where a run's time goes: steps, evaluation, saving, compiling, waiting for data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from deskgpt.system import hardware


class StepTimer:
    """Seconds of a run by what they were spent on: training steps, evaluation, saving, waiting for data.

    The clock of the steps stands still in the blocks of `spent_on`, also when these raise, and while torch.compile
    compiles. It is read when the device has finished what is queued.
    """

    def __init__(self, device: torch.device, compile_s: Callable[[], float] = lambda: 0.0) -> None:
        """compile_s: returns the seconds that this process has spent compiling so far."""
        self.device = device
        self._compile_s = compile_s
        self._compiled_before_s = 0.0  # by the start of the clock
        self.wait_s = 0.0  # of the training time, spent waiting for data
        self.total_s = {"evaluation": 0.0, "saving": 0.0}
        self.last_s = {"evaluation": 0.0, "saving": 0.0}
        self._train_s = 0.0  # until the clock was last started
        self._started_at: float | None = None  # None while the clock stands still
        self._window_began_s = 0.0  # training time at the start of the window
        self._window_wait_s = 0.0  # wait for data by then
        self._window_steps = 0
        self._window_tokens = 0

    def start(self) -> None:
        hardware.synchronize(self.device)
        self._compiled_before_s = self._compile_s()
        self._started_at = time.perf_counter()

    def train_s(self) -> float:
        """Return the seconds of all steps so far, the wait for data included."""
        if self._started_at is None:
            return self._train_s
        hardware.synchronize(self.device)
        compiling_s = self._compile_s() - self._compiled_before_s
        return self._train_s + time.perf_counter() - self._started_at - compiling_s

    def step_done(self, tokens: int) -> None:
        self._window_steps += 1
        self._window_tokens += tokens

    def add_wait(self, seconds: float) -> None:
        """Add to the time that was spent waiting for data."""
        self.wait_s += seconds

    def end_window(self) -> tuple[float, float, float]:
        """Return (seconds per step, tokens per second, share of time spent waiting for data) since the last call."""
        now_s = self.train_s()
        window_s = now_s - self._window_began_s
        wait_s = self.wait_s - self._window_wait_s
        per_step = (window_s / self._window_steps, self._window_tokens / window_s, wait_s / window_s)
        self._window_began_s = now_s
        self._window_wait_s = self.wait_s
        self._window_steps = self._window_tokens = 0
        return per_step

    @contextmanager
    def spent_on(self, what: str) -> Iterator[None]:
        """Time evaluation or saving, while the clock of the steps stands still."""
        self._train_s = self.train_s()
        self._started_at = None
        began = time.perf_counter()
        try:
            yield
        finally:
            self.last_s[what] = time.perf_counter() - began
            self.total_s[what] += self.last_s[what]
            self.start()
