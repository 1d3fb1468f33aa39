"""What a run records: events as JSON lines, and Weights & Biases if asked."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import zlib
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

from deskgpt.system.files import is_at, read_small

# Weights & Biases gets every number of a step and of an evaluation; these under nanoGPT's names.
NANOGPTS_NAMES = {"train_loss": "train/loss", "val_loss": "val/loss", "val_bpb": "val/bpb"}
PERCENT = ("mfu", "mfu_measured")  # nanoGPT logs percent

MOST_BYTES = 1 << 30  # of a log that is read whole; a line has about 450, so these are two million steps


# ---- the log -------------------------------------------------------------------------------------------------


class RunLog:
    """Events as JSON lines, each with a checksum and written at once. A resumed run appends, from a new "start" on.

    path None writes no file. wandb_run, if given, gets the metrics too. earlier_wandb_run_id: of a resumed run.
    """

    def __init__(self, path: Path | None, wandb_run: Any = None, earlier_wandb_run_id: str | None = None) -> None:
        self.path = path
        self.file: FileIO | None = None
        self.start_line = b""  # of the last "start" event
        self.has_failed = False
        if path:
            try:
                self.file = open_to_append(path)
            except OSError as e:
                raise OSError(f"cannot write {path}: {e.strerror}; choose another --out_dir") from None
        self.wandb_run = wandb_run
        self.wandb_run_id = wandb_run.id if wandb_run else earlier_wandb_run_id

    def write(self, event: str, **fields: Any) -> None:
        if self.path:
            known = {name: null_if_not_finite(value) for name, value in fields.items()}
            line = with_checksum(json.dumps({"event": event, **known})) + b"\n"
            if event == "start":
                self.start_line = line
            try:
                self._append(line)
            except OSError as e:
                self._failed(e)
        if self.wandb_run and event in ("iter", "eval"):
            numbers = {name: value for name, value in fields.items() if isinstance(value, int | float)}
            numbers = {name: 100 * value if name in PERCENT else value for name, value in numbers.items()}
            metrics = {NANOGPTS_NAMES.get(name, name): value for name, value in numbers.items()}
            self._wandb(lambda run: run.log(metrics, step=fields["iter"]))

    def _append(self, line: bytes) -> None:
        """Raises OSError, with the file ending in a whole line. A file that was deleted or moved is begun anew."""
        assert self.path is not None
        if self.file is None or not is_at(self.path, self.file):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.file is not None:
                self.file.close()
            self.file = open_to_append(self.path)
            if line != self.start_line and not self.file.tell():
                print(f"{self.path} was deleted or moved: the log goes on in a new file", file=sys.stderr)
                line = self.start_line + line
        size = self.file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self.file.write(line) :]
        except OSError:
            self.file.truncate(size)
            raise

    def _failed(self, e: OSError) -> None:
        if not self.has_failed:
            print(f"cannot write {self.path}: {e.strerror}; the run goes on, and tries again", file=sys.stderr)
        self.has_failed = True

    def close(self) -> None:
        if self.file:
            self.file.close()
        self._wandb(lambda run: run.finish())

    def _wandb(self, call: Callable[[Any], None]) -> None:
        """Calls wandb, if it is used. An error there ends its part of the log, not the run."""
        if self.wandb_run:
            try:
                call(self.wandb_run)
            except Exception as e:
                print(f"wandb failed ({' '.join(str(e).split())[:200]}); the run goes on without it", file=sys.stderr)
                self.wandb_run = None


def without_following(path: str, flags: int) -> int:
    """Opens a file that is no symbolic link. Windows needs a privilege to make those, and has no such flag."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def open_to_append(path: Path) -> FileIO:
    """The log at path, unbuffered, with its last line ended. Raises OSError, also where it is a symbolic link.

    In a stranger's out_dir a link could name any file of the user.
    """
    file = open(path, "a+b", buffering=0, opener=without_following)  # noqa: SIM115 (it stays open as long as the run)
    size = file.tell()
    if size:
        file.seek(size - 1)
        if file.read(1) != b"\n":
            file.write(b"\n")  # a crash left the last line torn
    return file


def null_if_not_finite(value: Any) -> Any:
    """value, but None for NaN and infinity, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def start_wandb(project: str, name: str, config: dict[str, Any], run_id: str | None) -> Any:
    """A new Weights & Biases run, or the one that run_id names. WANDB_MODE=offline needs neither account nor network.

    Raises ValueError where the package is missing or wandb refuses.
    """
    try:
        import wandb
    except ImportError:
        raise ValueError("wandb_log=True needs the package wandb: pip install wandb, or --wandb_log=False") from None
    try:
        return wandb.init(project=project, name=name, config=config, id=run_id, resume="allow")
    except wandb.Error as e:
        reason = " ".join(str(e).split())[:200]
        raise ValueError(f"wandb cannot start: {reason}; WANDB_MODE=offline keeps the run on this disk") from None


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a log.jsonl, in their order. Raises OSError where the file cannot be read.

    A crash can tear a line, and a run may be writing the last one just now: lines that are no whole event are skipped.
    Raises ValueError where it has more than MOST_BYTES.
    """
    lines = read_small(path, MOST_BYTES).decode("utf-8", errors="replace").splitlines()
    return [event for event in map(event_of, lines) if event is not None]


def event_of(line: str) -> dict[str, Any] | None:
    """The event of a line of log.jsonl; None if it is no whole event, or differs from what was written.

    An event with a "crc" is verified. Logs from before 2026-11-23 have none.
    """
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):  # a line of brackets only
        return None
    if not isinstance(event, dict) or "event" not in event:
        return None
    line = line.strip()
    without = re.sub(r', "crc": "[0-9a-f]{8}"}$', "}", line)
    return event if "crc" not in event or with_checksum(without) == line.encode() else None


def with_checksum(line: str) -> bytes:
    """A JSON object with a last field "crc": the CRC-32 of its text without that field."""
    return f'{line[:-1]}, "crc": "{zlib.crc32(line.encode()):08x}"}}'.encode()
