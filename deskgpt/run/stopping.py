"""When a run saves and stops beside what its step count says: signals, time, damaged token files.

After the first signal a run finishes its step and saves; a second one ends it at once. Importing this imports no torch:
train.py listens before that, which takes seconds.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from deskgpt.compute.distributed import DistContext

T = TypeVar("T")

# ---- signals -------------------------------------------------------------------------------------------------

# What a terminal, a batch system or the system at shutdown sends; SIGBREAK is Windows' Ctrl+Break.
NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGBREAK")
SIGNALS = tuple(signal.Signals[name] for name in NAMES if name in signal.Signals.__members__)

SIGNAL_STATUS = 128  # and its number: what shells and batch systems expect of a process that a signal has ended

LOOK_S = 1.0  # how often a rank looks whether its torchrun is there

# A terminal that closes sends SIGHUP, and so does its shell; systemd can send SIGHUP right after SIGTERM. Signals that
# follow the first one within this time are the same wish to stop, not a second one.
ONE_WISH_S = 1.0


class Listener:
    """The signal that asked this process to stop, if any.

    A thread hears them. Python's own handlers wait for the main thread, which can be inside one call of torch for
    minutes, or for another rank for ever, and they take two equal signals meanwhile for one.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.has_work_to_save = False  # until then a signal ends the process at once
        self._heard_at = 0.0
        self._torchrun: int | None = None  # its process, if it has started this one
        self._leaves_at: float | None = None
        self._ends: tuple[socket.socket, socket.socket] | None = None

    def listen(self) -> None:
        """From now on the signals are handled here, but for those that are ignored (nohup, jobs in the background)."""
        self.signal = None
        self.has_work_to_save = False
        if self._ends is None:
            self._ends = socket.socketpair()
            self._ends[1].setblocking(False)
            if "TORCHELASTIC_RUN_ID" in os.environ:
                self._torchrun = os.getppid()
                self._ends[0].settimeout(LOOK_S)
            threading.Thread(target=self._hear, daemon=True).start()
        signal.set_wakeup_fd(self._ends[1].fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, frame: None)

    def has_signal(self) -> bool:
        return self.signal is not None

    def _hear(self) -> None:
        assert self._ends is not None
        while True:
            heard = b""
            with suppress(TimeoutError):
                heard = self._ends[0].recv(64)  # the C part of Python's handler sends a byte for each signal
            for number in heard:
                if number in SIGNALS:
                    self._handle(number)
            if self._torchrun and self._torchrun != os.getppid():
                self._leave_without_torchrun()

    def _handle(self, number: int) -> None:
        name = signal.Signals(number).name
        if not self.has_work_to_save:
            print0(f"{name}: there is nothing to save")
            os._exit(SIGNAL_STATUS + number)  # an exception could end up in the middle of some import
        if self.signal is None:
            self._heard_at = time.monotonic()
            self.signal = number
            print0(f"{name}: saving after this step; a second signal leaves at once")
        elif time.monotonic() - self._heard_at > ONE_WISH_S:
            print0(f"{name} once more: leaving at once")
            os._exit(SIGNAL_STATUS + self.signal)

    def _leave_without_torchrun(self) -> None:
        """Stops as if asked to, which a torchrun that was killed cannot do.

        Leaves after as long as torchrun gives ranks that it stops, which the variable says from PyTorch 2.13 on: this
        one may be waiting for a rank that sleeps or is gone.
        """
        if self._leaves_at is None:
            shutdown_s = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or 30)
            self._leaves_at = time.monotonic() + shutdown_s
            if self.signal is None:
                print0("torchrun is gone")
                self._handle(signal.SIGTERM)
        elif time.monotonic() > self._leaves_at:
            print0("torchrun is gone, and the step takes too long: leaving at once")
            os._exit(SIGNAL_STATUS + signal.SIGTERM)


signal_handler = Listener()


def print0(line: str) -> None:
    """A line on stderr, of the first rank only; the main thread may be printing just now, so not through print()."""
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            os.write(2, f"{line}\n".encode())


# ---- what is due -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Due:
    """What a run is to do before its next step."""

    stop: str | None  # why it ends, such as a signal's name; None to go on
    save: bool  # whether a checkpoint is due that no evaluation asks for


AGREE_S = 1.0  # ranks agree about this often: at each step all would wait for the slowest of them once more
WISHES = ("", "save", "max_hours", *(number.name for number in SIGNALS), "an error")  # where ranks differ, the last


class StopController:
    """What one rank finds due is due for all.

    A rank alone looks at each step. Several agree after so many steps as take about a second, and before an evaluation.
    """

    def __init__(
        self, ranks: DistContext, began: float, max_hours: float, save_interval: int, save_minutes: float, shared: bool
    ) -> None:
        """began: the instant of the run's start; each limit is off at 0. shared: whether ranks share weights."""
        self.ranks = ranks
        self.ends_at = began + 3600 * max_hours if max_hours else math.inf
        self.save_interval = save_interval
        self.save_minutes = save_minutes
        self.shared = shared
        self.saved_at = time.perf_counter()
        self.failure: Exception | None = None
        self.agreed_at = self.saved_at
        self.steps_since = -1  # the ranks last agreed; the first call of `due` comes before the first step
        self.steps_between = 1  # two agreements, which is the same on all ranks
        signal_handler.signal = None  # an earlier run in the same process may have left one

    def due(self, step: int, has_work: bool, evaluates: bool) -> Due:
        """has_work: whether something would be lost if a signal ended the process at once."""
        signal_handler.has_work_to_save = has_work
        by_steps = self.save_interval > 0 and step % self.save_interval == 0
        if self.ranks.world > 1:
            self.steps_since += 1
            if self.steps_since < self.steps_between and not evaluates:
                return Due(stop=None, save=by_steps)
            self._space_agreements()
        now = time.perf_counter()
        by_time = self.save_minutes > 0 and now >= self.saved_at + 60 * self.save_minutes
        wish = "save" if by_steps or by_time else ""
        if now >= self.ends_at:
            wish = "max_hours"
        agreed = self._agreed(wish)
        return Due(stop=None if agreed in ("", "save") else agreed, save=agreed == "save")

    def _space_agreements(self) -> None:
        """Chooses after how many steps the ranks agree next, from the time since they last did on the slowest one.

        At most twice as many as before: steps may become slower.
        """
        now = time.perf_counter()
        slowest_us = self.ranks.agree(round(1e6 * (now - self.agreed_at)) + 1)
        fitting = int(self.steps_since * 1e6 * AGREE_S / slowest_us)
        self.steps_between = max(1, min(fitting, 2 * self.steps_between))
        self.agreed_at = now
        self.steps_since = 0

    def interrupted(self) -> str | None:
        """Why what took long was broken off, such as an evaluation; None if it was not."""
        return self._agreed("") or None

    def _agreed(self, wish: str) -> str:
        """What counts most of this wish, a signal and an error on whichever rank."""
        if signal_handler.signal:
            wish = signal.Signals(signal_handler.signal).name
        if self.failure:
            wish = "an error"
        return WISHES[self.ranks.agree(WISHES.index(wish))]

    # ---- what may be broken off --------------------------------------------------------------------------

    def until_signal(self, items: Iterable[T]) -> Iterator[T]:
        """The items, until a signal comes. Ranks that share weights end at the same item."""
        for item in items:
            stop = signal_handler.signal or 0
            if self.ranks.agree(stop) if self.shared else stop:
                return
            yield item

    @contextmanager
    def catching(self) -> Iterator[None]:
        """An error of a token file within the block makes the run save and end, and is raised then.

        With several ranks it is raised at once: the others are in the step.
        """
        try:
            yield
        except (ValueError, OSError) as e:
            if self.ranks.world > 1:
                raise
            self.failure = e

    def until_failure(self, items: Iterable[T]) -> Iterator[T]:
        """The items, up to the first that a token file does not give; see catching."""
        iterator = iter(items)
        while True:
            item = None
            with self.catching():
                item = next(iterator, None)
            if item is None:
                return
            yield item

    # ---- the end -----------------------------------------------------------------------------------------

    def leave(self, stop: str | None) -> None:
        """Raises what the run ends with: its error, or SystemExit with the conventional status after a signal."""
        if self.failure is not None:
            raise self.failure
        if stop is not None and stop in signal.Signals.__members__:
            raise SystemExit(SIGNAL_STATUS + signal.Signals[stop])
