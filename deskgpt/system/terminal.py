"""Standard output that survives a closed terminal and gives it no commands; numbers for people."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

# Control characters, except ends of lines and pages, "one line up", which progress bars need, and colours, which W&B's
# lines have.
COMMANDS = re.compile(r"\x1b(?!\[(?:A|(?:[01]|22|39|[39][0-7])?m))|[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f-\x9f]")


def harmless(text: str) -> str:
    """Return the text with commands to a terminal spelled out, such as \\x1b."""
    return COMMANDS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def open_standard_files() -> None:
    """Open the null device for each of stdin, stdout and stderr that is closed.

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
        self.stream = stream or open(os.devnull, "w")  # noqa: SIM115 (closed at the start)
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
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.stream.fileno())  # or Python tries it again at its end
            os.close(null)
            if not self.lasts:
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def safe_output(lasts: bool = False) -> Iterator[None]:
    """Wrap sys.stdout and sys.stderr in Output until the block ends, then flush them.

    lasts: output that cannot be written is lost without an error, as a run of days needs it. Raises OSError otherwise.
    """
    stdout: Any = Output(sys.stdout, lasts)
    stderr: Any = Output(sys.stderr, lasts)
    with redirect_stdout(stdout), redirect_stderr(stderr):
        try:
            yield
        finally:
            stderr.flush()
            stdout.flush()


# ---- numbers and times ---------------------------------------------------------------------------------------

LONGEST_VALUE = 100  # characters of a value in a message
LONGEST_REASON = 200  # of a library's error
DAY_S = 24 * 60 * 60


def millions(parameters: int) -> str:
    """Return a model's size as nanoGPT prints it, such as 123.59M."""
    return f"{parameters / 1e6:.2f}M"


def in_gib(size: float | None) -> str:
    """Return bytes in GiB."""
    return "n/a" if size is None else f"{size / 2**30:.2f}"


def in_tera(per_s: float | None) -> str:
    """Return FLOP/s in TFLOP/s."""
    return "n/a" if per_s is None else f"{per_s / 1e12:.4g}"


def clock(seconds: float) -> str:
    """Return seconds as 42.0s, 3m07s, 5h02m or, from two days on, 3.4 days."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    if seconds >= 2 * DAY_S:
        return f"{seconds / DAY_S:,.1f} days"
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes}m{s:02}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"


def reason(e: Exception) -> str:
    """Return the message of a library's error, short enough for a part of a line; its class if it has none."""
    text = " ".join(str(e).split()) or type(e).__name__
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} ..."


def shortened(value: Any) -> str:
    """Return the repr of a value, shortened; its type if it has none, as very large numbers have."""
    try:
        text = repr(value)
    except Exception:  # a config file can define any class
        return f"<{type(value).__name__}>"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
