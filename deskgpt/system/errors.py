"""Errors that a user can cause become one line on stderr and an exit status.

A script runs its main function in one_line_errors. With DESKGPT_TRACEBACK=1 every error keeps its traceback.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from deskgpt.system.terminal import harmless, reason, safe_output

ROOT = Path(__file__).resolve().parents[2]  # the folder of our own code

# What torch's RuntimeErrors contain when memory runs out: CUDA, HIP, MPS; Linux; Windows; CUBLAS, CUSPARSE and CUDNN;
# NCCL's own buffers. A shared memory that is too small for a kernel of Triton's ("out of resource") is something else:
# no smaller batch helps.
OUT_OF_MEMORY = re.compile(
    "out of memory|can't allocate memory|not enough memory|_ALLOC_FAILED|_ALLOCATION_FAILED|Failed to CUDA calloc"
)
# Recognise gloo's errors by their text, others by class.
LOST_RANK = re.compile("gloo/transport|Application timeout caused pair closure")
LOST_RANK_ERRORS = ("DistBackendError", "DistNetworkError", "DistStoreError")


class ConfigError(ValueError):
    """A mistake in the settings, which the user can correct. Scripts end with exit status 2."""


class DataError(ValueError):
    """Token files that a run reads are damaged or gone. The run saves its last complete step and ends."""


class OneLineParser(argparse.ArgumentParser):
    """A parser of a script's arguments, which raises a ConfigError with an example if they are wrong."""

    def __init__(self, doc: str | None) -> None:
        """doc: the script's docstring, whose first indented line is the example; None under python -OO."""
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, description=doc, formatter_class=formatter)
        found = re.search(r"^ {4}(.+)$", doc or "", re.M)
        self.example = f"; for example: {found[1]}" if found else ""

    def print_help(self, file: Any = None) -> None:
        """Print as argparse does, but raise OSError if that cannot be printed."""
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message + self.example)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, with the home folder in place of "~", which a shell leaves alone after "--to="."""
        home = os.path.expanduser("~")
        words = [str(word) for word in (sys.argv[1:] if args is None else args)]
        words = [re.sub(r"^(--[\w-]+=|)~(?=/|$)", lambda found: found[1] + home, word) for word in words]
        return super().parse_args(words, namespace)


@contextmanager
def one_line_errors(if_out_of_memory: str = "take a smaller input", output_lasts: bool = False) -> Iterator[None]:
    """End the script with one line on stderr and an exit status after an error that a user can cause.

    The exit status is 2 for a ConfigError, 130 for Ctrl+C and 1 otherwise. if_out_of_memory: the remedy to print when
    memory runs out. output_lasts: continue when nothing can be printed.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # characters that the terminal's encoding lacks become "?"
    try:
        if sys.stdout is None and not output_lasts:
            raise OSError("standard output is closed: print to a file, or to /dev/null")
        with safe_output(output_lasts):
            yield
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # the program that read our output, such as `head`, has ended
        raise SystemExit(1) from None
    except Exception as e:
        message = message_for_user(e, if_out_of_memory)
        if message is None or os.environ.get("DESKGPT_TRACEBACK"):
            raise
        with suppress(OSError):  # the terminal may be gone
            sys.stderr.write(f"error: {of_this_rank(message)}\n")  # in one piece: other ranks write there, too
        raise SystemExit(2 if isinstance(e, ConfigError) else 1) from None


def of_this_rank(message: str) -> str:
    """Return the message in one line without control characters; of several ranks it names this one and its host."""
    line = harmless(" ".join(message.split()))  # a path or a value in it may hold line ends, or escape sequences
    if os.environ.get("WORLD_SIZE", "1") == "1" or "RANK" not in os.environ:
        return line
    return f"rank {os.environ['RANK']} on {platform.node()}: {line}"


def message_for_user(e: Exception, if_out_of_memory: str) -> str | None:
    """Return the line to print for an error that a user can cause; None for a defect, which needs its traceback.

    A ValueError counts as the user's only if our own code raised it: out of a library, it is a defect of ours.
    """
    if is_out_of_memory(e):
        return f"out of memory; {if_out_of_memory}"
    if isinstance(e, RuntimeError) and (LOST_RANK.search(str(e)) or type(e).__name__ in LOST_RANK_ERRORS):
        why = re.sub(r"^\[.*?\.cc:\d+\] ", "", str(e).splitlines()[0].partition(". ")[0])  # without gloo's source file
        return (
            f"lost the other ranks ({why}); the line of the one that ended first says why, and one without a line "
            "hangs; start the same command again, with --init_from=auto"
        )
    if isinstance(e, OSError):
        return f"cannot use {e.filename}: {e.strerror}" if e.filename else e.strerror or str(e)
    if isinstance(e, ModuleNotFoundError) and e.name and "." not in e.name:  # a package, not a module inside one
        return f"this needs the package {e.name}, which is not installed: pip install {e.name}"
    if isinstance(e, ImportError) and not raised_in_our_code(e):
        *_, (frame, _) = traceback.walk_tb(e.__traceback__)
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        return f"the package {package} is installed, but cannot be imported: {reason(e)}"
    if isinstance(e, ValueError) and raised_in_our_code(e):
        return str(e)
    return None


def is_out_of_memory(e: BaseException) -> bool:
    """Return whether memory ran out: a MemoryError, or a RuntimeError in which torch says so."""
    return isinstance(e, MemoryError) or (isinstance(e, RuntimeError) and bool(OUT_OF_MEMORY.search(str(e))))


def raised_in_our_code(e: Exception) -> bool:
    """Return whether a file of this repository raised e. An environment in .venv is inside its folder, but not ours."""
    file = Path(traceback.extract_tb(e.__traceback__)[-1].filename).resolve()
    return file.is_relative_to(ROOT) and "site-packages" not in file.parts
