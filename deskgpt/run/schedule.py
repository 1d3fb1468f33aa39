"""How long a run is, its learning rate, and how many steps fit into max_minutes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, fields, replace
from typing import Any

from deskgpt.compute.distributed import DistContext
from deskgpt.run.timer import StepTimer

Config = Any  # a TrainConfig of train.py, which is above this room: naming it here would be a circle


@dataclass(frozen=True)
class Schedule:
    """The settings that say when a run ends and which learning rate a step has, by their names in train.py."""

    max_iters: int
    learning_rate: float
    min_lr: float | None
    decay_lr: bool
    lr_schedule: str
    warmup_iters: int
    lr_decay_iters: int

    @classmethod
    def of(cls, config: Config) -> Schedule:
        """Return the schedule that the settings ask for."""
        return cls(**{f.name: getattr(config, f.name) for f in fields(cls)})

    @property
    def end(self) -> int:
        """Return the step at which min_lr is reached."""
        return self.lr_decay_iters or self.max_iters

    def warnings(self) -> list[str]:
        """Return a line for each pair of settings that contradict each other."""
        found = []
        last = min(self.max_iters, self.end)
        if self.decay_lr and self.warmup_iters >= last > 0:
            name = "max_iters" if last == self.max_iters else "lr_decay_iters"
            found.append(
                f"warmup_iters={self.warmup_iters} is not below {name}={last}: the warm-up never reaches "
                f"learning_rate={self.learning_rate:g}; try --warmup_iters={last // 10}"
            )
        if self.decay_lr and self.min_lr is not None and self.min_lr > self.learning_rate:
            found.append(f"min_lr={self.min_lr:g} is above learning_rate={self.learning_rate:g}: the rate rises")
        return found


EXPECTED_MFU = 0.4  # when a run's length is predicted
WARMUP_SHARE = 0.1  # of the steps warm the learning rate up at most
PLANS = 40  # how often the steps are planned, evenly spread over the run


class TimeBudget:
    """Fits a new run into max_minutes from its start: max_iters, and what is longer in the schedule.

    The schedule ends with max_iters, so it ends on time. Ranks plan together. A run that would end earlier by itself
    keeps its schedule. Without max_minutes nothing changes.
    """

    def __init__(self, config: Config, started: float, dist: DistContext) -> None:
        """started: when the clock began."""
        self.wanted = Schedule.of(config)
        self.is_limited = config.max_minutes > 0 and not config.eval_only
        self.eval_interval: int = config.eval_interval
        self.ends_at = started + 60 * config.max_minutes
        self.dist = dist
        self._next_step = 1  # at which the steps are planned

    def replan(self, schedule: Schedule, step: int, timer: StepTimer) -> Schedule:
        """Return the schedule that fits after `step` steps: planned PLANS times, from the steps so far."""
        if not self.is_limited or step < self._next_step:
            return schedule
        wanted = self.wanted
        step_s = self.dist.max(timer.train_s() / step)
        eval_s = self.dist.max(sum(timer.last_s.values()))
        left_s = -self.dist.max(time.perf_counter() - self.ends_at)  # the least of all ranks
        # The last evaluation comes after the steps, the others between them.
        fit = int((left_s - eval_s) / (step_s + eval_s / self.eval_interval))
        max_iters = min(wanted.max_iters, step + max(0, fit))
        self._next_step = step + max(1, max_iters // PLANS)
        return replace(
            wanted,
            max_iters=max_iters,
            warmup_iters=min(wanted.warmup_iters, math.ceil(max_iters * WARMUP_SHARE)),
            lr_decay_iters=min(wanted.lr_decay_iters, max_iters),
        )
