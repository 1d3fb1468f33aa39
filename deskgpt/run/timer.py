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

    The clock of the steps runs from `resume` to `pause`; both wait for the device to finish what is queued.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.train_s = 0.0  # of finished windows, the wait for data included
        self.wait_s = 0.0  # of it waiting for data
        self.eval_s = 0.0
        self.save_s = 0.0
        self.last_eval_s = 0.0
        self.last_save_s = 0.0
        self._window_s = 0.0
        self._window_steps = 0
        self._window_wait_s = 0.0
        self._resumed_at = 0.0

    def resume(self) -> None:
        hardware.synchronize(self.device)
        self._resumed_at = time.perf_counter()

    def pause(self) -> None:
        hardware.synchronize(self.device)
        self._window_s += time.perf_counter() - self._resumed_at

    def trained_s(self) -> float:
        """Seconds of all steps up to the last pause."""
        return self.train_s + self._window_s

    def step_done(self) -> None:
        self._window_steps += 1

    def waited(self, seconds: float) -> None:
        """For data."""
        self._window_wait_s += seconds

    def end_window(self) -> Window:
        """The steps since the last window, which end now."""
        self.pause()
        self.resume()
        window = Window(self._window_s / self._window_steps, self._window_wait_s / self._window_s)
        self.train_s += self._window_s
        self.wait_s += self._window_wait_s
        self._window_s = 0.0
        self._window_wait_s = 0.0
        self._window_steps = 0
        return window

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Times an evaluation, while the clock of the steps stands still."""
        self.pause()
        t0 = time.perf_counter()
        yield
        self.last_eval_s = time.perf_counter() - t0
        self.eval_s += self.last_eval_s
        self.resume()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Times what saving costs the loop, while the clock of the steps stands still."""
        self.pause()
        t0 = time.perf_counter()
        yield
        self.last_save_s = time.perf_counter() - t0
        self.save_s += self.last_save_s
        self.resume()
