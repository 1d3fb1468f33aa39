"""Signals that end a run: after the first one it finishes its step and saves; a second one ends it at once.

The standard library is all that this needs: train.py listens before it imports torch, which takes seconds.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType

# What a terminal, a batch system or the system at shutdown sends; SIGBREAK is Windows' Ctrl+Break.
NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGBREAK")


class Listener:
    """The signal that asked this process to stop, if any."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.has_work_to_save = False  # until then a signal ends the process at once

    def listen(self) -> None:
        """From now on the signals are handled here, but for those that are ignored (nohup, jobs in the background)."""
        for name in NAMES:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if not self.has_work_to_save:
            say(f"{name} before the first step: there is nothing to save")
            os._exit(exit_status(number))  # an exception could end up in the middle of some import
        if self.signal is not None:
            say(f"{name} once more: leaving at once")
            os._exit(exit_status(number))
        self.signal = number
        say(f"{name}: saving after this step; a second signal leaves at once")


listener = Listener()


def exit_status(number: int) -> int:
    """What shells and batch systems expect of a process that a signal has ended."""
    return 128 + number


def say(line: str) -> None:
    """A line on stderr, of the first rank only; print() must not be used while a signal is handled."""
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            os.write(2, f"{line}\n".encode())
