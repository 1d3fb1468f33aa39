"""Signals that end a run: after the first one it finishes its step and saves; a second one ends it at once.

The standard library is all that this needs: train.py listens before it imports torch, which takes seconds.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from contextlib import suppress

# What a terminal, a batch system or the system at shutdown sends; SIGBREAK is Windows' Ctrl+Break.
NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGBREAK")
SIGNALS = tuple(signal.Signals[name] for name in NAMES if name in signal.Signals.__members__)

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
        self._ends: tuple[socket.socket, socket.socket] | None = None

    def listen(self) -> None:
        """From now on the signals are handled here, but for those that are ignored (nohup, jobs in the background)."""
        self.signal = None
        self.has_work_to_save = False
        if self._ends is None:
            self._ends = socket.socketpair()
            self._ends[1].setblocking(False)
            threading.Thread(target=self._hear, daemon=True).start()
        signal.set_wakeup_fd(self._ends[1].fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, frame: None)

    def _hear(self) -> None:
        assert self._ends is not None
        while True:
            for number in self._ends[0].recv(64):  # the C part of Python's handler sends a byte for each signal
                if number in SIGNALS:
                    self._handle(number)

    def _handle(self, number: int) -> None:
        name = signal.Signals(number).name
        if not self.has_work_to_save:
            say(f"{name}: there is nothing to save")
            os._exit(exit_status(number))  # an exception could end up in the middle of some import
        if self.signal is None:
            self._heard_at = time.monotonic()
            self.signal = number
            say(f"{name}: saving after this step; a second signal leaves at once")
        elif time.monotonic() - self._heard_at > ONE_WISH_S:
            say(f"{name} once more: leaving at once")
            os._exit(exit_status(self.signal))


listener = Listener()


def exit_status(number: int) -> int:
    """What shells and batch systems expect of a process that a signal has ended."""
    return 128 + number


def say(line: str) -> None:
    """A line on stderr, of the first rank only; the main thread may be printing just now, so not through print()."""
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            os.write(2, f"{line}\n".encode())
