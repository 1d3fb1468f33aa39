"""Errors that a user can cause become one line on stderr and an exit status; output that gives a
terminal no commands.

A script runs its main function in one_line_errors. With DESKGPT_TRACEBACK=1 every error keeps its
traceback.
"""

import argparse
import difflib
import importlib.util
import io
import os
import platform
import re
import shlex
import shutil
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]  # the folder of our own code

# What torch's RuntimeErrors contain when memory runs out: CUDA, HIP, MPS; Linux; Windows; CUBLAS,
# CUSPARSE and CUDNN; NCCL's own buffers. A shared memory that is too small for a kernel of Triton's
# ("out of resource") is something else: no smaller batch helps.
OUT_OF_MEMORY = re.compile(
    "out of memory|can't allocate memory|not enough "
    "memory|_ALLOC_FAILED|_ALLOCATION_FAILED|Failed to CUDA calloc"
)
# It is looked for in an error's class and text: gloo's errors have no class of their own.
LOST_RANK = re.compile("^Dist[A-Z]|gloo/transport|Application timeout caused pair closure")


class ConfigError(ValueError):
    """A mistake in the settings, which the user can correct. Scripts end with exit status 2."""


class DataError(ValueError):
    """Token files that a run reads are damaged or gone.

    The run saves its last complete step and ends.
    """


class OneLineParser(argparse.ArgumentParser):
    """A parser of a script's arguments, which raises a ConfigError with an example if they are
    wrong.
    """

    def __init__(self, doc: str | None) -> None:
        """doc: the script's docstring, whose first indented line is the example; None under python
        -OO.
        """
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, description=doc, formatter_class=formatter)
        found = re.search(r"^ {4}(.+)$", doc or "", re.M)
        self.example = f"; for example: {found[1]}" if found else ""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message + self.example)


@contextmanager
def one_line_errors(
    if_out_of_memory: str = "take a smaller input", ignore_write_errors: bool = False
) -> Iterator[None]:
    """End the script with one line on stderr and an exit status after an error that a user can
    cause.

    The exit status is 2 for a ConfigError, 130 for Ctrl+C and 1 otherwise. if_out_of_memory: the
    remedy to print when memory runs out. ignore_write_errors: continue when nothing can be printed.
    """
    try:
        with safe_output(ignore_write_errors):
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
            # A path or a value in it may hold line ends, or escape sequences.
            line = escape_control_chars(" ".join(message.split()))
            rank = os.environ.get("RANK")
            where = f" (rank {rank} on {platform.node()})" if rank else ""
            sys.stderr.write(f"error: {line}{where}\n")  # in one piece: ranks share it
        raise SystemExit(2 if isinstance(e, ConfigError) else 1) from None


def message_for_user(e: Exception, if_out_of_memory: str) -> str | None:
    """Return the line to print for an error that a user can cause; None for a defect, which needs
    its traceback.

    A ValueError counts as the user's only if our own code raised it: out of a library, it is a
    defect of ours.
    """
    if is_out_of_memory(e):
        return f"out of memory; {if_out_of_memory}"
    if isinstance(e, RuntimeError) and LOST_RANK.search(f"{type(e).__name__} {e}"):
        return (
            f"lost the other ranks ({reason(e)}); the line of the one that ended first says why, "
            "and one without a line hangs; start the same command again, with --init_from=auto"
        )
    if type(e).__name__ == "CheckpointError":  # torch's, of a pass that is not checked (kernels.py)
        return (
            "activation_checkpoint=full: a block keeps other tensors in the backward pass; take "
            "--activation_checkpoint=none"
        )
    if isinstance(e, OSError):
        return f"cannot use {e.filename}: {e.strerror}" if e.filename else e.strerror or str(e)
    # A package, not a module inside one.
    if isinstance(e, ModuleNotFoundError) and e.name and "." not in e.name:
        return f"this needs the package {e.name}, which is not installed: pip install {e.name}"
    if isinstance(e, ValueError) and raised_in_our_code(e):
        return str(e)
    return None


def is_out_of_memory(e: BaseException) -> bool:
    """Return whether memory ran out: a MemoryError, or a RuntimeError in which torch says so."""
    return isinstance(e, MemoryError) or (
        isinstance(e, RuntimeError) and bool(OUT_OF_MEMORY.search(str(e)))
    )


def raised_in_our_code(e: Exception) -> bool:
    """Return whether a file of this repository raised e.

    An environment in .venv is inside its folder, but not ours.
    """
    file = Path(traceback.extract_tb(e.__traceback__)[-1].filename).resolve()
    return file.is_relative_to(ROOT) and "site-packages" not in file.parts


# ---- standard output, numbers for people ---------------------------------------------------------


# Control characters, except ends of lines and pages, "one line up", which progress bars need, and
# colours, which W&B's lines have.
COMMANDS = re.compile(
    r"\x1b(?!\[(?:A|(?:[01]|22|39|[39][0-7])?m))|[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f-\x9f]"
)


def escape_control_chars(text: str) -> str:
    """Return the text with commands to a terminal spelled out, such as \\x1b."""
    return COMMANDS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def require_torch() -> None:
    """End the script with one line if this Python has no torch, as outside of the environment, or
    lacks another package that every script needs.
    """
    needed = ("torch", "numpy", "psutil", "tqdm", "filelock")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        activate = f"source {ROOT}/.venv/bin/activate"
        if os.name == "nt":
            activate = rf"{ROOT}\.venv\Scripts\activate"
        sys.exit(
            f"error: {sys.executable} has no {', '.join(missing)}; enter the environment that make "
            f"train makes: {activate} (or install what is missing)"
        )


def python_command() -> str:
    """Return the Python that runs this as one types it here."""
    if shutil.which("python") == sys.executable:
        return "python"
    return min(os.path.relpath(sys.executable), sys.executable, key=len)


def to_type(label: str, *words: object) -> str:
    """Return a command to type, after a label, in lines of at most 80 columns where words allow."""
    lines = [label]
    for word in words:
        quoted = shlex.quote(str(word))
        if len(lines[-1]) + len(quoted) > 77:
            lines.append("    ")
        lines[-1] += f"{quoted} "
    return "\\\n".join(lines).rstrip()


def open_standard_files() -> None:
    """Open the null device for each of stdin, stdout and stderr that is closed.

    Otherwise the next file to be opened gets its number, and what a library prints would end up in
    a checkpoint.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            os.set_inheritable(number, True)


class Output:
    """A text stream that spells out control characters.

    What it cannot write goes to the null device from then on: without an error if
    ignore_write_errors, as a run of days needs it.
    """

    def __init__(self, stream: Any, ignore_write_errors: bool) -> None:
        self.stream = stream or open(os.devnull, "w")  # noqa: SIM115 (closed at the start)
        self.ignore_write_errors = ignore_write_errors

    def write(self, text: str) -> int:
        with self._surviving():
            self.stream.write(escape_control_chars(text))
        return len(text)

    def flush(self) -> None:
        with self._surviving():
            self.stream.flush()

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            # EPIPE: its reader has ended; EIO: the terminal is gone; ENOSPC: the disk is full.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.stream.fileno())  # or Python tries it again at its end
            os.close(null)
            if not self.ignore_write_errors:
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def safe_output(ignore_write_errors: bool = False) -> Iterator[None]:
    """Wrap sys.stdout and sys.stderr in Output until the block ends, then flush them.

    Raises OSError unless ignore_write_errors.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # characters that its encoding lacks become "?"
        sys.stdout.reconfigure(errors="replace")
    stdout: Any = Output(sys.stdout, ignore_write_errors)
    stderr: Any = Output(sys.stderr, ignore_write_errors)
    with redirect_stdout(stdout), redirect_stderr(stderr):
        try:
            yield
        finally:
            stderr.flush()
            stdout.flush()


# ---- numbers and times ---------------------------------------------------------------------------

LONGEST_VALUE = 100  # characters of a value in a message
LONGEST_REASON = 200  # of a library's error


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return a hint of the known word that is most like this one; `otherwise` if none is."""
    similar = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {similar[0]}?" if similar else otherwise


def millions(parameters: int) -> str:
    """Return a model's size as nanoGPT prints it, such as 123.59M."""
    return f"{parameters / 1e6:.2f}M"


def in_gib(size: float | None) -> str:
    """Return bytes in GiB."""
    return "n/a" if size is None else f"{size / 2**30:.2f}"


def clock(seconds: float) -> str:
    """Return seconds as 42.0s, 3m07s or 5h02m."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes}m{s:02}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"


def reason(e: Exception) -> str:
    """Return the message of a library's error, short enough for a part of a line; its class if it
    has none.
    """
    text = " ".join(str(e).split()) or type(e).__name__
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} ..."


def shortened(value: Any) -> str:
    """Return the repr of a value, shortened; its type if it has none, as very large numbers
    have.
    """
    try:
        text = repr(value)
    except Exception:  # a config file can define any class
        return f"<{type(value).__name__}>"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


class BatchTooLargeError(ValueError):
    """Memory does not suffice for a micro-batch. The message has the remedy."""

    smaller: dict[str, int] | None = None  # the settings with which the run may go on by itself
