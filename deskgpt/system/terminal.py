"""Standard output that outlives its terminal, pipe or disk, obeys no stranger, and is not silent for long.

The standard library is all that this needs, as in stops.py.
"""

from __future__ import annotations

import io
import os
import re
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from deskgpt.system.formatting import clock

SILENCE_S = 10.0  # not_silent says something this often


def open_standard_files() -> None:
    """Opens the null device as each of stdin, stdout and stderr that is closed.

    Otherwise the next file to be opened gets its number, and what a library prints would end up in a checkpoint.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            os.set_inheritable(number, True)


class LastingFile(io.FileIO):
    """A file of which a write that fails, and all later ones, go to the null device."""

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
            while written is None:  # another program has set the terminal or pipe to non-blocking
                select.select([], [self], [])
                written = super().write(data)
        except OSError:  # EPIPE: its reader has ended; EIO: the terminal is gone; ENOSPC: the disk is full
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return len(data)
        return written


@contextmanager
def lasting_output() -> Iterator[None]:
    """Makes sys.stdout and sys.stderr outlive what they write to, until the block ends."""
    before = sys.stdout, sys.stderr
    sys.stdout = lasting(sys.stdout, 1)
    sys.stderr = lasting(sys.stderr, 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def lasting(stream: TextIO | None, number: int) -> TextIO:
    """The stream on a LastingFile; on the null device if it is None, which it is where it was closed at the start.

    Streams that are no files, as in notebooks or on Windows' console, cannot fail like this and are returned.
    """
    if stream is None:
        return io.TextIOWrapper(io.BufferedWriter(LastingFile(number, "w", closefd=False)), encoding="utf-8")
    buffer = getattr(stream, "buffer", None)
    if not isinstance(stream, io.TextIOWrapper) or not isinstance(getattr(buffer, "raw", buffer), io.FileIO):
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(LastingFile(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


# What a terminal takes for a command, but for "one line up", which progress bars need, and the ends of lines and pages.
COMMANDS = re.compile(r"\x1b(?!\[A)|[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f-\x9f]")


def harmless(text: str) -> str:
    """The text, in which what a terminal would take for commands is spelled out, such as \\x1b."""
    return COMMANDS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


class Harmless:
    """A stream of text that is made harmless."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(harmless(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def harmless_output() -> Iterator[None]:
    """Makes sys.stdout and sys.stderr Harmless until the block ends: names and text may be a stranger's."""
    before: Any = sys.stdout, sys.stderr
    streams: Any = [stream and Harmless(stream) for stream in before]
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


@contextmanager
def flushed_output() -> Iterator[None]:
    """Writes out at its end what the block has printed. Raises OSError, after which Python does not try it again."""
    try:
        yield
    finally:
        try:
            if sys.stdout:
                sys.stdout.flush()
        except OSError as e:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
            if isinstance(e, BrokenPipeError):
                raise
            raise OSError(f"cannot print: {e.strerror}; make room, or print to another place") from None


@contextmanager
def not_silent(what: str, print0: Callable[[str], None]) -> Iterator[None]:
    """Says `what` every ten seconds until the block ends."""
    done = threading.Event()
    t0 = time.perf_counter()

    def tell() -> None:
        while not done.wait(SILENCE_S):
            print0(f"{what} ({clock(time.perf_counter() - t0)})")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
