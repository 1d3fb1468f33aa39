"""What a run records: events as JSON lines, Weights & Biases if asked, where its time went, and its provenance."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from deskgpt.machine import hardware
from deskgpt.machine.files import is_at

# Metrics that Weights & Biases gets, under nanoGPT's names where it has them.
WANDB_NAMES = {name: name for name in ("iter", "loss", "lr", "mfu", "mfu_measured", "tokens_per_s", "grad_norm")}
WANDB_NAMES |= {"train_loss": "train/loss", "val_loss": "val/loss", "val_bpb": "val/bpb"}

SILENCE_S = 10.0  # not_silent says something this often
DAY_S = 24 * 60 * 60

# ---- the log -------------------------------------------------------------------------------------------------


class RunLog:
    """Events as JSON lines, each written at once. A resumed run appends to the file, beginning with a new "start".

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
            line = (json.dumps({"event": event, **known}) + "\n").encode()
            if event == "start":
                self.start_line = line
            try:
                self._append(line)
            except OSError as e:
                self._failed(e)
        if self.wandb_run and event in ("iter", "eval"):
            metrics = {WANDB_NAMES[k]: v for k, v in fields.items() if k in WANDB_NAMES and v is not None}
            for name in {"mfu", "mfu_measured"} & metrics.keys():
                metrics[name] *= 100  # nanoGPT logs percent
            self._wandb(lambda run: run.log(metrics, step=fields["iter"]))
        if self.wandb_run and event == "tasks":
            figures = {f"tasks/{task}/{k}": v for task, found in fields["results"].items() for k, v in found.items()}
            self._wandb(lambda run: run.log(figures, step=fields["iter"]))

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


def open_to_append(path: Path) -> FileIO:
    """The log at path, unbuffered, with its last line ended. Raises OSError."""
    file = open(path, "a+b", buffering=0)  # noqa: SIM115 (it stays open as long as the run)
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
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [event for event in map(event_of, lines) if event is not None]


def event_of(line: str) -> dict[str, Any] | None:
    """The event of a line of log.jsonl; None where it is no whole event."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):  # a line of brackets only
        return None
    return event if isinstance(event, dict) and "event" in event else None


# ---- time ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """The steps between two log lines."""

    step_s: float  # mean time of a step
    data_wait: float  # share of the time that was spent waiting for data


class StepTimer:
    """Seconds of a run by what they were spent on: training steps, evaluation, saving, waiting for data.

    The clock of the steps runs from `resume` to `pause`; both wait for the device to finish what is queued.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.train_s = 0.0  # of finished windows, the wait for data included
        self.wait_s = 0.0  # of it waiting for data
        self.eval_s = 0.0
        self.save_s = 0.0
        self.last_eval_s = 0.0
        self.last_save_s = 0.0
        self._window_s = 0.0
        self._window_steps = 0
        self._resumed_at = 0.0

    def resume(self) -> None:
        hardware.synchronize(self.device)
        self._resumed_at = time.perf_counter()

    def pause(self) -> None:
        hardware.synchronize(self.device)
        self._window_s += time.perf_counter() - self._resumed_at

    def trained_s(self) -> float:
        """Seconds of all steps up to the last pause."""
        return self.train_s + self._window_s

    def step_done(self) -> None:
        self._window_steps += 1

    def end_window(self, wait_s: float) -> Window:
        """The steps since the last window, which end now; wait_s: how long they waited for data."""
        self.pause()
        self.resume()
        window = Window(self._window_s / self._window_steps, wait_s / self._window_s)
        self.train_s += self._window_s
        self.wait_s += wait_s
        self._window_s = 0.0
        self._window_steps = 0
        return window

    @contextmanager
    def evaluation(self, more: bool = False) -> Iterator[None]:
        """Times an evaluation, while the clock of the steps stands still. more: it belongs to the one before."""
        self.pause()
        t0 = time.perf_counter()
        yield
        seconds = time.perf_counter() - t0
        self.last_eval_s = seconds + (self.last_eval_s if more else 0.0)
        self.eval_s += seconds
        self.resume()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Times what saving costs the loop, while the clock of the steps stands still."""
        self.pause()
        t0 = time.perf_counter()
        yield
        self.last_save_s = time.perf_counter() - t0
        self.save_s += self.last_save_s
        self.resume()


@contextmanager
def not_silent(what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Says `what` every ten seconds until the block ends."""
    done = threading.Event()
    t0 = time.perf_counter()

    def tell() -> None:
        while not done.wait(SILENCE_S):
            say(f"{what} ({clock(time.perf_counter() - t0)})")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def clock(seconds: float) -> str:
    """Seconds as 42.0s, 3m07s, 5h02m or, from two days on, 3.4 days."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    if seconds >= 2 * DAY_S:
        return f"{seconds / DAY_S:,.1f} days"
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes}m{s:02}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"


# ---- provenance ----------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Versions of what a run's figures depend on."""
    packages = {p: metadata.version(p) for p in ("numpy", "torch")}
    cuda = {"cuda": torch.version.cuda} if torch.version.cuda else {}
    return {"python": platform.python_version(), **packages, **cuda, "platform": platform.platform()}


def git_commit() -> str | None:
    """Commit of the code that runs, with "+changes" where files differ from it; None outside a git checkout."""
    try:
        describe = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), "describe", "--always", "--abbrev=12"]
        # --exclude=* leaves tags out: the commit itself, not a distance to some tag
        out = subprocess.run([*describe, "--dirty=+changes", "--exclude=*"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return out.stdout.strip() or None
