"""Errors of a user as one line on stderr and an exit status; running out of memory in the words of every device."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # of our own code


class ConfigError(ValueError):
    """Something in the settings that the user can put right. Scripts end with exit status 2 on it."""


def is_out_of_memory(e: BaseException) -> bool:
    """Whether e says so: a MemoryError, or torch's RuntimeError in the words of CUDA, MPS, Linux or Windows."""
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(e, MemoryError) or (isinstance(e, RuntimeError) and any(w in str(e) for w in words))


@contextmanager
def one_line_errors(if_out_of_memory: str = "take a smaller input") -> Iterator[None]:
    """Turns what a user can cause into one line on stderr and an exit status: 2 for settings, 1 otherwise.

    That is any OSError, a package that is not installed, running out of memory (the line then tells the remedy given),
    and a ValueError that our own code raised; one that comes out of a library is a defect of ours and keeps its
    traceback, as all do with DESKGPT_TRACEBACK=1. Text that the terminal's encoding lacks is shown as "?".
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader of our output, such as `head`, has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except (ValueError, OSError, RuntimeError, MemoryError, ModuleNotFoundError) as e:
        raised_in = Path(traceback.extract_tb(e.__traceback__)[-1].filename).resolve()
        inside = raised_in.is_relative_to(ROOT) and "site-packages" not in raised_in.parts
        if is_out_of_memory(e):
            message = f"out of memory; {if_out_of_memory}"
        elif isinstance(e, OSError):
            message = f"cannot use {e.filename}: {e.strerror}" if e.filename else str(e)
        elif isinstance(e, ValueError) and inside:
            message = str(e)
        elif isinstance(e, ModuleNotFoundError) and e.name and "." not in e.name:  # a package, not a part of one
            message = f"this needs the package {e.name}, which is not installed: pip install {e.name}"
        else:
            raise
        if os.environ.get("DESKGPT_TRACEBACK"):
            raise
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(2 if isinstance(e, ConfigError) else 1) from None
