"""Where a run's time goes: training steps, evaluation, saving, waiting for data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from deskgpt.system import hardware


@dataclass(frozen=True)
class Window:
    """The steps between two log lines."""

    step_s: float  # mean time of a step
    data_wait: float  # share of the time that was spent waiting for data


class StepTimer:
    """Seconds of a run by what they were spent on: training steps, evaluation, saving, waiting for data.

    The clock of the steps runs but for the blocks of `evaluation` and `saving`, also when these raise. It is read when
    the device has finished what is queued.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.wait_s = 0.0  # of the training time, spent waiting for data
        self.eval_s = 0.0
        self.save_s = 0.0
        self.last_eval_s = 0.0
        self.last_save_s = 0.0
        self._train_s = 0.0  # until the clock was last started
        self._started_at: float | None = None  # None while the clock stands still
        self._window_began_s = 0.0  # training time and
        self._window_wait_s = 0.0  # wait for data at the start of the window
        self._window_steps = 0

    def start(self) -> None:
        hardware.synchronize(self.device)
        self._started_at = time.perf_counter()

    def train_s(self) -> float:
        """Seconds of all steps so far, the wait for data included."""
        if self._started_at is None:
            return self._train_s
        hardware.synchronize(self.device)
        return self._train_s + time.perf_counter() - self._started_at

    def step_done(self) -> None:
        self._window_steps += 1

    def add_wait(self, seconds: float) -> None:
        """For data."""
        self.wait_s += seconds

    def end_window(self) -> Window:
        """The steps since the last window, which end now."""
        now_s = self.train_s()
        window_s = now_s - self._window_began_s
        wait_s = self.wait_s - self._window_wait_s
        window = Window(window_s / self._window_steps, wait_s / window_s)
        self._window_began_s = now_s
        self._window_wait_s = self.wait_s
        self._window_steps = 0
        return window

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Times an evaluation while the clock of the steps stands still."""
        began = self._stop()
        try:
            yield
        finally:
            self.last_eval_s = time.perf_counter() - began
            self.eval_s += self.last_eval_s
            self.start()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Times what saving costs the loop while the clock of the steps stands still."""
        began = self._stop()
        try:
            yield
        finally:
            self.last_save_s = time.perf_counter() - began
            self.save_s += self.last_save_s
            self.start()

    def _stop(self) -> float:
        self._train_s = self.train_s()
        self._started_at = None
        return time.perf_counter()
