"""When a run saves and stops beside what its step count says: signals, time, damaged token files."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from deskgpt.compute.ranks import Ranks
from deskgpt.run import stopping
from deskgpt.run.stopping import listener

T = TypeVar("T")


@dataclass(frozen=True)
class Due:
    """What a run is to do before its next step."""

    stop: str | None  # why it ends, such as a signal's name; None to go on
    save: bool  # whether a checkpoint is due that no evaluation asks for


class Stops:
    """What one rank finds due is due for all."""

    # Where the ranks' wishes differ, the largest counts.
    SAVE = 1
    TIME_IS_UP = 2
    SIGNAL = 0x100  # and its number
    FAILURE = 0x200

    def __init__(
        self, ranks: Ranks, began: float, max_hours: float, save_interval: int, save_minutes: float, shared: bool
    ) -> None:
        """began: the instant of the run's start; each limit is off at 0. shared: whether ranks share weights."""
        self.ranks = ranks
        self.ends_at = began + 3600 * max_hours if max_hours else math.inf
        self.save_interval = save_interval
        self.save_minutes = save_minutes
        self.shared = shared
        self.saved_at = time.perf_counter()
        self.failure: Exception | None = None
        listener.signal = None  # an earlier run in the same process may have left one

    def due(self, step: int, has_work: bool) -> Due:
        """has_work: whether something would be lost if a signal ended the process at once."""
        listener.has_work_to_save = has_work
        now = time.perf_counter()
        by_steps = self.save_interval > 0 and step % self.save_interval == 0
        by_time = self.save_minutes > 0 and now >= self.saved_at + 60 * self.save_minutes
        wish = self.SAVE if by_steps or by_time else 0
        if now >= self.ends_at:
            wish = self.TIME_IS_UP
        agreed = self.ranks.agree(max(wish, self._interruption()))
        return Due(self._reason(agreed), agreed == self.SAVE)

    def interrupted(self) -> str | None:
        """Why what took long was broken off, such as an evaluation; None if it was not."""
        return self._reason(self.ranks.agree(self._interruption()))

    def has_signal(self) -> bool:
        """Whether one has come to this rank."""
        return listener.signal is not None

    # ---- what may be broken off --------------------------------------------------------------------------

    def until_signal(self, items: Iterable[T]) -> Iterator[T]:
        """The items, until a signal comes. Ranks that share weights end at the same item."""
        for item in items:
            stop = listener.signal or 0
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
            raise SystemExit(stopping.exit_status(signal.Signals[stop]))

    def _interruption(self) -> int:
        if self.failure:
            return self.FAILURE
        return self.SIGNAL + listener.signal if listener.signal else 0

    def _reason(self, wish: int) -> str | None:
        if wish <= self.SAVE:
            return None
        reasons = {self.TIME_IS_UP: "max_hours", self.FAILURE: "an error"}
        return reasons.get(wish) or signal.Signals(wish - self.SIGNAL).name
