"""When a run saves and stops besides what its step count says: signals, time, damaged token files.

Importing this imports no torch: train.py sees to signals before that, which takes seconds.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from deskgpt.run.diagnosis import EvalRecord, without_improvement

if TYPE_CHECKING:
    from deskgpt.compute.distributed import DistContext

# ---- signals -------------------------------------------------------------------------------------------------

# What a terminal, a batch system or the system at shutdown sends. Slurm warns with SIGUSR1; SIGBREAK is Windows'
# Ctrl+Break.
NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGBREAK")
SIGNALS = tuple(number for number in signal.Signals if number.name in NAMES)

SIGNAL_STATUS = 128  # and its number: what shells and batch systems expect of a process that a signal has ended

# A terminal that closes sends SIGHUP, and so does its shell; systemd can send SIGHUP right after SIGTERM. Signals that
# follow the first one within this time are the same request, not a second one.
ONE_REQUEST_S = 1.0


class SignalHandler:
    """The signal that asked this process to stop, if any."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.installed_at: float | None = None  # about the instant of the script's start
        self._numbers: list[int] = []
        self._heard_at = 0.0

    def install(self) -> None:
        """Let the signals end this process at once, also in the middle of a call that takes minutes.

        Ignored signals (nohup, background jobs) stay ignored.
        """
        self.signal = None
        self.installed_at = time.perf_counter()
        self._numbers = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        for number in self._numbers:
            signal.signal(number, signal.SIG_DFL)

    def listen(self) -> None:
        """Handle the signals here from now on, since there is work to save; a second one ends the process."""
        numbers, self._numbers = self._numbers, []
        for number in numbers:
            signal.signal(number, self._handle)

    def has_signal(self) -> bool:
        return self.signal is not None

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
    """Write a line to stderr, on the first rank only. Not through print(), which the signal may have interrupted."""
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            os.write(2, f"{line}\n".encode())


# ---- what is due -----------------------------------------------------------------------------------------------

ERROR = "an error"
REASONS = ("", "save", "max_hours", *(number.name for number in SIGNALS), ERROR)  # if ranks differ, the last one


class StopController:
    """Decides when to save and stop, the same on all ranks. `reason` is why the run ends, None while it trains."""

    def __init__(self, dist: DistContext, started: float, max_hours: float, save_minutes: float, patience: int) -> None:
        """started: the instant of the run's start."""
        self.reason: str | None = None
        self.dist = dist
        self.save_minutes = save_minutes
        self.patience = patience
        self._ends_at = started + (3600 * max_hours or math.inf)
        self._failure: Exception | None = None
        self._saved_at = time.perf_counter()
        signal_handler.signal = None  # an earlier run in the same process may have left one

    def poll(self, has_work: bool) -> bool:
        """Set `reason` if the run should stop. Return whether a checkpoint is due that no evaluation asks for.

        has_work: something would be lost if a signal ended the process at once; from now on it is handled here.
        """
        if has_work:
            signal_handler.listen()
        now = time.perf_counter()
        reason = "save" if now >= self._saved_at + (60 * self.save_minutes or math.inf) else ""
        if now >= self._ends_at:
            reason = "max_hours"
        agreed = self._agree(reason)
        if agreed not in ("", "save"):
            self.reason = agreed
        return agreed == "save"

    def saved(self) -> None:
        """Count save_minutes from now on: a checkpoint was begun."""
        self._saved_at = time.perf_counter()

    def is_interrupted(self) -> bool:
        """Return whether a signal has broken off an evaluation on some rank, and set `reason`."""
        agreed = self._agree("")
        self.reason = agreed or self.reason
        return bool(agreed)

    def _agree(self, reason: str) -> str:
        """Return the strongest reason on any rank: an error, then a signal, then `reason`."""
        if signal_handler.signal:
            reason = signal.Signals(signal_handler.signal).name
        return REASONS[int(self.dist.max(REASONS.index(reason)))]

    def check_patience(self, evaluations: Sequence[EvalRecord]) -> None:
        """Set `reason` after `patience` evaluations in a row without an improvement."""
        if 0 < self.patience <= without_improvement(evaluations):
            self.reason = "patience"

    def until_signal(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items until a signal comes. Ranks end at the same item: they may need each other."""
        for item in items:
            if not self.dist.all(signal_handler.signal is None):
                return
            yield item

    # ---- the end -----------------------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """End the run because of this error, which `leave` raises after the last save.

        With several ranks it is raised at once: the others are in the step.
        """
        if self.dist.world > 1:
            raise error
        self._failure = error
        self.reason = ERROR

    def leave(self) -> None:
        """Raise what the run ends with: its error, or SystemExit with the conventional status after a signal."""
        if self._failure is not None:
            raise self._failure
        if self.reason and self.reason in signal.Signals.__members__:
            raise SystemExit(SIGNAL_STATUS + signal.Signals[self.reason])
