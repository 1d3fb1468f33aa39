"""Standard output that survives a closed terminal, spells out control characters and prints a heartbeat."""

from __future__ import annotations

import os
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

SILENCE_S = 10.0  # not_silent prints something this often

# What a terminal takes for a command, but for "one line up", which progress bars need, and the ends of lines and pages.
COMMANDS = re.compile(r"\x1b(?!\[A)|[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f-\x9f]")


def harmless(text: str) -> str:
    """The text, in which what a terminal would take for commands is spelled out, such as \\x1b."""
    return COMMANDS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


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


class Output:
    """A text stream that spells out control characters; with `lasts`, what it cannot write goes to the null device."""

    def __init__(self, stream: Any, lasts: bool) -> None:
        self.stream = stream
        self.lasts = lasts

    def write(self, text: str) -> int:
        self._try(self.stream.write, harmless(text))
        return len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, operation: Callable[..., Any], *args: str) -> None:
        try:
            operation(*args)
        except OSError:  # EPIPE: its reader has ended; EIO: the terminal is gone; ENOSPC: the disk is full
            if not self.lasts:
                raise
            to_null_device(self.stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def to_null_device(stream: Any) -> None:
    """Sends what a stream still holds, and all that comes, to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


@contextmanager
def safe_output(lasts: bool = False) -> Iterator[None]:
    """Makes sys.stdout and sys.stderr safe until the block ends, see Output, and writes out what the block printed.

    lasts: output that cannot be written is lost without an error, as a run of days wants it. Raises OSError otherwise.
    """
    before: Any = sys.stdout, sys.stderr
    for number, stream in enumerate(before, start=1):
        with suppress(OSError, AttributeError):  # Windows has no such modes before Python 3.12
            if stream is not None and not os.get_blocking(number):
                os.set_blocking(number, True)  # another program on the same terminal or pipe has changed that
    null: Any = open(os.devnull, "w")  # noqa: SIM115 (open until the end)
    wrapped: Any = [Output(stream or null, lasts) for stream in before]
    sys.stdout, sys.stderr = wrapped
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        flush(*wrapped)


def flush(stdout: Output, stderr: Output) -> None:
    """Writes out both streams. Raises OSError, after which Python does not try it again."""
    stderr.flush()
    try:
        stdout.flush()
    except OSError as e:
        to_null_device(stdout.stream)
        if isinstance(e, BrokenPipeError):
            raise
        raise OSError(f"cannot print: {e.strerror}; make room, or print to another place") from None


@contextmanager
def not_silent(what: str, print0: Callable[[str], None]) -> Iterator[None]:
    """Prints `what` every ten seconds until the block ends."""
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


# ---- numbers and times ---------------------------------------------------------------------------------------

LONGEST_VALUE = 100  # characters of a value in a message
DAY_S = 24 * 60 * 60


def millions(parameters: int) -> str:
    """A model's size as nanoGPT prints it, such as 123.59M."""
    return f"{parameters / 1e6:.2f}M"


def in_gib(size: float | None) -> str:
    """Bytes in GiB."""
    return "n/a" if size is None else f"{size / 2**30:.2f}"


def in_tera(per_s: float | None) -> str:
    """FLOP/s in TFLOP/s."""
    return "n/a" if per_s is None else f"{per_s / 1e12:.4g}"


def clock(seconds: float) -> str:
    """Seconds as 42.0s, 3m07s, 5h02m or, from two days on, 3.4 days."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    if seconds >= 2 * DAY_S:
        return f"{seconds / DAY_S:,.1f} days"
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes}m{s:02}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"


def reason(e: Exception) -> str:
    """What an error of a library says, as a part of a line."""
    return textwrap.shorten(str(e), 200, placeholder=" ...")


def shortened(value: Any) -> str:
    """A value in a message: its repr, shortened; its type where it has none, as very large numbers have."""
    try:
        text = repr(value)
    except Exception:  # a config file can define any class
        return f"<{type(value).__name__}>"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
