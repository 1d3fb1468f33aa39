"""Where a run's time goes: steps, evaluation, saving, waiting for data; and how many steps fit into max_minutes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deskgpt.compute.batching import Batching
from deskgpt.compute.runner import Runner
from deskgpt.run.train_state import TrainState
from deskgpt.system import hardware
from deskgpt.system.terminal import clock

if TYPE_CHECKING:
    from train import TrainConfig


class StepTimer:
    """Seconds of a run by what they were spent on: training steps, evaluation, saving, waiting for data.

    The clock of the steps runs but for the blocks of `spent_on`, also when these raise. It is read when
    the device has finished what is queued.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
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
        self._started_at = time.perf_counter()

    def train_s(self) -> float:
        """Seconds of all steps so far, the wait for data included."""
        if self._started_at is None:
            return self._train_s
        hardware.synchronize(self.device)
        return self._train_s + time.perf_counter() - self._started_at

    def step_done(self, tokens: int) -> None:
        self._window_steps += 1
        self._window_tokens += tokens

    def add_wait(self, seconds: float) -> None:
        """For data."""
        self.wait_s += seconds

    def end_window(self) -> tuple[float, float, float]:
        """(seconds per step, tokens per second, share of time spent waiting for data) since this was last called."""
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
        """Times evaluation or saving, while the clock of the steps stands still."""
        self._train_s = self.train_s()
        self._started_at = None
        began = time.perf_counter()
        try:
            yield
        finally:
            self.last_s[what] = time.perf_counter() - began
            self.total_s[what] += self.last_s[what]
            self.start()


# ---- max_minutes ---------------------------------------------------------------------------------------------

EVAL_SHARE = 0.2  # at most this share of the time is spent on evaluation
LEAST_EVAL_BATCHES = 8  # each split gives at least this many batches: fewer say nothing about their own noise
WARMUP_SHARE = 0.1  # of the steps warm the learning rate up at most
BACKWARD = 3.0  # times a forward pass, with it: a guess, until the first steps are done
PLANS = 40  # how often the steps are planned anew, evenly spread over the run
FEW_STEPS = 100  # with which hardly any model learns


class TimeBudget:
    """Sets max_iters, and what is longer in the schedule, so that the run ends max_minutes after its start.

    The rate of learning follows the share of max_iters that is done, so it follows the share of time. Ranks plan
    together. A run that would end earlier by itself keeps its settings.
    """

    def __init__(self, config: TrainConfig, started: float, state: TrainState) -> None:
        """started: when the clock began. Raises ValueError where a resumed run's schedule would change."""
        self.is_limited = config.max_minutes > 0 and not config.eval_only
        keeps_schedule = not config.decay_lr or config.lr_decay_iters or config.resume_changed
        if self.is_limited and state.first_step > 0 and not keeps_schedule:
            raise ValueError(
                f"max_minutes={config.max_minutes:g} gives the resumed run's schedule another end: add "
                "--resume_changed=True, or keep the schedule with --lr_decay_iters"
            )
        self.config = config
        self.wanted = replace(config)  # as the user wants it: a copy
        self.state = state
        self.dist = state.dist
        self.ends_at = started + 60 * config.max_minutes
        self._next_step = 0  # at which the steps are planned anew
        self._planned_at = (state.first_step, 0.0)  # step, and training time

    def plan(
        self, batching: Batching, eval_windows: Callable[[Batching], Sequence[int]], batch: tuple[Tensor, Tensor]
    ) -> Batching:
        """Makes the first plan from timed forward passes. Returns the batching with the evaluations that it allows.

        eval_windows: the number of windows per split that one evaluation reads. batch: a micro-batch. If evaluations
        would take more than EVAL_SHARE of the time, they read less.
        """
        if not self.is_limited:
            return batching
        config = self.config
        windows = eval_windows(batching)
        seconds = self._seconds_left()
        batch_s = self.dist.max(time_evaluation(self.state.runner, batch))
        step_s = BACKWARD * batch_s * batching.micro_steps
        eval_batches = sum(batching.eval_batches(n) for n in windows)
        n_evaluations = 2 + int(seconds / step_s) // config.eval_interval
        affordable = int(EVAL_SHARE * seconds / (n_evaluations * batch_s))
        per_split = max(LEAST_EVAL_BATCHES, affordable // len(windows))
        if eval_batches > per_split * len(windows):
            eval_batches = per_split * len(windows)
            config.eval_tokens = per_split * batching.batch_size * batching.world * batching.block_size
        eval_s = eval_batches * batch_s
        self._set_steps(step_s, eval_s, n_missing=2, at_least=1)
        steps = config.max_iters - self.state.first_step
        self._next_step = self.state.step + 1  # from then on by what steps took
        few = ", which is too few to learn much" if steps < min(FEW_STEPS, self.wanted.max_iters) else ""
        self.dist.print0(
            f"max_minutes={config.max_minutes:g}: about {steps:,} steps of {step_s * 1e3:.3g} ms{few} "
            f"({steps * batching.tokens_per_step:,} tokens), evaluations of {clock(eval_s)}; planned anew as it runs"
        )
        return Batching.of(asdict(config), batching.rank, batching.world)

    def replan(self, timer: StepTimer) -> None:
        """Plans anew at PLANS moments of the run, from the steps since the last plan."""
        step = self.state.step
        if not self.is_limited:
            return
        if step < self._planned_at[0]:  # after a rewind
            self._planned_at = (step, timer.train_s())
        if step < self._next_step or step == self._planned_at[0]:
            return
        train_s = timer.train_s()
        step_s = self.dist.max((train_s - self._planned_at[1]) / (step - self._planned_at[0]))
        self._planned_at = (step, train_s)
        self._set_steps(step_s, self.dist.max(sum(timer.last_s.values())), n_missing=1)

    def _set_steps(self, step_s: float, eval_s: float, n_missing: int, at_least: int = 0) -> None:
        """n_missing: evaluations besides those after each eval_interval steps: at the end, and at the start."""
        config, wanted = self.config, self.wanted
        step = self.state.step
        fit = int((self._seconds_left() - n_missing * eval_s) / (step_s + eval_s / config.eval_interval))
        config.max_iters = min(wanted.max_iters, step + max(at_least, fit))
        steps = config.max_iters - self.state.first_step
        if self.state.first_step == 0 or config.resume_changed:  # otherwise the steps so far would have had other rates
            config.warmup_iters = min(wanted.warmup_iters, math.ceil(steps * WARMUP_SHARE))
            config.lr_decay_iters = min(wanted.lr_decay_iters, config.max_iters)
            config.cooldown_iters = min(wanted.cooldown_iters, steps)
        self._next_step = step + max(1, steps // PLANS)

    def _seconds_left(self) -> float:
        return -self.dist.max(-max(self.ends_at - time.perf_counter(), 0.0))  # the least of all ranks


def time_evaluation(runner: Runner, batch: tuple[Tensor, Tensor]) -> float:
    """Median seconds of a micro-batch of evaluation."""
    times = []
    with runner.evaluating():
        for _ in range(3):
            t0 = time.perf_counter()
            runner.loss(*batch)
            hardware.synchronize(runner.device)
            times.append(time.perf_counter() - t0)
    return statistics.median(times)
