"""When a run ends: signals, time, patience; the schedule that max_minutes shortens.

Importing this imports no torch: train.py handles signals before that, which takes seconds.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from deskgpt.distributed import DistContext


# ---- signals -------------------------------------------------------------------------------------

# Terminals, batch systems and the system at shutdown send these. Slurm warns with SIGUSR1;
# SIGBREAK is Windows' Ctrl+Break.
SIGNAL_NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGBREAK")
SIGNALS = tuple(number for number in signal.Signals if number.name in SIGNAL_NAMES)

# Shells and batch systems expect this and the signal's number of a process that a signal ended.
SIGNAL_STATUS = 128

# A terminal that closes sends SIGHUP, and so does its shell; systemd can send SIGHUP right after
# SIGTERM. Signals that follow the first one within this time are the same request, not a second
# one.
ONE_REQUEST_S = 1.0


class SignalHandler:
    """The signal that asked this process to stop, if any."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.installed_at: float | None = None  # about the instant of the script's start
        self._numbers: list[int] = []
        self._heard_at = 0.0

    def install(self) -> None:
        """Let the signals end this process at once, also in the middle of a call that takes
        minutes.

        Ignored signals (nohup, background jobs) stay ignored.
        """
        self.signal = None
        self.installed_at = time.perf_counter()
        self._numbers = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        for number in self._numbers:
            signal.signal(number, signal.SIG_DFL)

    def handle_signals(self) -> None:
        """Handle the signals here from now on, since there is work to save; a second one ends the
        process.
        """
        numbers, self._numbers = self._numbers, []
        for number in numbers:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.signal is None:
            self._heard_at = time.monotonic()
            self.signal = number
            print_to_stderr(f"{name}: saving after this step; a second signal leaves at once")
        elif time.monotonic() - self._heard_at > ONE_REQUEST_S:
            print_to_stderr(f"{name} once more: leaving at once")
            os._exit(SIGNAL_STATUS + self.signal)


signal_handler = SignalHandler()


def print_to_stderr(line: str) -> None:
    """Write a line to stderr, on the first rank only.

    Not through print(), which the signal may have interrupted.
    """
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            os.write(2, f"{line}\n".encode())


# ---- when to save and to stop --------------------------------------------------------------------

ERROR_REASON = "an error"
# Why a run saves or ends. A reason of yours in StopConditions.update belongs here, too: ranks agree
# by its place in this list. If theirs differ, the one further on counts.
REASONS = ("", "save", "max_hours", *(number.name for number in SIGNALS), ERROR_REASON)


class StopSettings(Protocol):
    """The settings of train.py that this file reads."""

    @property
    def eval_interval(self) -> int: ...
    @property
    def save_minutes(self) -> float: ...
    @property
    def max_hours(self) -> float: ...
    @property
    def max_minutes(self) -> float: ...
    @property
    def patience(self) -> int: ...
    def schedule(self) -> Schedule: ...


class Timer(Protocol):
    """The part of logger.py's StepTimer that `replan` reads."""

    last_s: dict[str, float]

    def train_s(self) -> float: ...


WARMUP_SHARE = 0.1  # at most so much of the steps that fit into max_minutes is warm-up
FEW_STEPS = 50  # below which a user is told that the minutes are too few
PLANS = 40  # how often the steps are planned, evenly spread over the run


class StopConditions:
    """Decides when to save and stop, the same on all ranks.

    `reason` is why the run ends, None while it trains.
    """

    def __init__(self, config: StopSettings, dist: DistContext) -> None:
        self.reason: str | None = None
        self.dist = dist
        self.started = signal_handler.installed_at or time.perf_counter()  # instant
        self.save_minutes = config.save_minutes
        self.patience = config.patience
        self.smaller: dict[str, int] | None = None  # the settings with which the run goes on
        self.max_hours_end = self.started + (3600 * config.max_hours or math.inf)
        self.max_minutes_end = self.started + (60 * config.max_minutes or math.inf)
        self._asked_for = config.schedule()  # before max_minutes shortens it
        self._eval_interval = config.eval_interval
        self._next_plan = 1  # the step at which max_minutes plans again
        self._failure: Exception | None = None
        signal_handler.signal = None  # an earlier run in the same process may have left one

    def update(self, can_save: bool, saved_at: float) -> bool:
        """Set `reason` if the run should stop.

        Return whether a checkpoint is due that no evaluation asks for.

        can_save: something would be lost if a signal ended the process at once; from now on it is
        handled here. saved_at: the instant of the last save.
        """
        if can_save:
            signal_handler.handle_signals()
        now = time.perf_counter()
        reason = "save" if now >= saved_at + (60 * self.save_minutes or math.inf) else ""
        if now >= self.max_hours_end:
            reason = "max_hours"
        agreed = self._agree(reason)
        if agreed not in ("", "save"):
            self.reason = agreed
        return agreed == "save"

    def note_signal(self) -> bool:
        """Set `reason` if a signal has cut an evaluation short on some rank.

        Return whether it has.
        """
        agreed = self._agree("")
        self.reason = agreed or self.reason
        return bool(agreed)

    def _agree(self, reason: str) -> str:
        """Return the strongest reason on any rank: an error, then a signal, then `reason`."""
        if signal_handler.signal:
            reason = signal.Signals(signal_handler.signal).name
        if reason not in REASONS:
            raise ValueError(f"{reason} is no reason to stop that ranks know: add it to REASONS")
        return REASONS[int(self.dist.max(REASONS.index(reason)))]

    def check_patience(self, without_improvement: int) -> None:
        """Set `reason` after `patience` evaluations in a row without an improvement."""
        if 0 < self.patience <= without_improvement:
            self.reason = "patience"

    def replan(self, schedule: Schedule, step: int, first_step: int, timer: Timer) -> Schedule:
        """Return the schedule that fits into max_minutes after `step` steps, evaluations included.

        It is planned PLANS times, from the steps that this process has taken since first_step. The
        schedule ends with max_iters, so it ends on time. A run that would end earlier by itself
        keeps its own, and so does one without max_minutes.
        """
        if self.max_minutes_end == math.inf or step < self._next_plan:
            return schedule
        wanted = self._asked_for
        step_s = self.dist.max(timer.train_s() / (step - first_step))
        eval_s = self.dist.max(sum(timer.last_s.values()))
        left_s = -self.dist.max(time.perf_counter() - self.max_minutes_end)  # the least of all
        # The last evaluation comes after the steps, the others between them.
        fit = int((left_s - eval_s) / (step_s + eval_s / self._eval_interval))
        max_iters = min(wanted.max_iters, step + max(0, fit))
        self._next_plan = step + max(1, max_iters // PLANS)
        if step == first_step + 1:
            is_enough = max_iters >= min(FEW_STEPS, wanted.max_iters)
            few = "" if is_enough else ", too few to learn much: give it more minutes"
            self.dist.print0(f"max_minutes leaves time for about {max_iters:,} steps{few}")
        return replace(
            wanted,
            max_iters=max_iters,
            warmup_iters=min(wanted.warmup_iters, math.ceil(max_iters * WARMUP_SHARE)),
            lr_decay_iters=min(wanted.lr_decay_iters, max_iters),
        )

    def stop_on_signal(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items until a signal comes.

        Ranks end at the same item: they may need each other.
        """
        for item in items:
            if not self.dist.all(signal_handler.signal is None):
                return
            yield item

    # ---- the end ---------------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """End the run because of this error, which `exit` raises after the last save.

        With several ranks it is raised at once: the others are in the step.
        """
        if self.dist.world > 1:
            raise error
        error.__context__ = None  # the pass that ran out of memory: its frames hold activations
        self._failure = error
        self.smaller = getattr(error, "smaller", None)
        self.reason = ERROR_REASON

    def exit(self) -> None:
        """Raise the run's error, if it has one, or SystemExit with the conventional status after a
        signal.
        """
        if self._failure is not None:
            raise self._failure
        if self.reason and self.reason in signal.Signals.__members__:
            raise SystemExit(SIGNAL_STATUS + signal.Signals[self.reason])


# ---- how long a run is ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """The settings that say when a run ends and which learning rate a step has, by their names in
    train.py.
    """

    max_iters: int
    learning_rate: float
    min_lr: float | None
    decay_lr: bool
    lr_schedule: str
    warmup_iters: int
    lr_decay_iters: int

    @property
    def end(self) -> int:
        """Return the step at which min_lr is reached."""
        return self.lr_decay_iters or self.max_iters

    def warning(self) -> str:
        """Return a line if the warm-up is longer than the run, else ""."""
        last = min(self.max_iters, self.end)
        if not self.decay_lr or not self.warmup_iters >= last > 0:
            return ""
        name = "max_iters" if last == self.max_iters else "lr_decay_iters"
        return (
            f"warmup_iters={self.warmup_iters} is not below {name}={last}: the warm-up never "
            f"reaches learning_rate={self.learning_rate:g}; try --warmup_iters={last // 10}"
        )
