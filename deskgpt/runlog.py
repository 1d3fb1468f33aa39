"""What a run records beside its terminal lines: JSON lines in a file and, if asked, Weights & Biases."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

WANDB_NAMES = {k: k for k in ("iter", "loss", "lr", "mfu", "tokens_per_s", "grad_norm")}
WANDB_NAMES |= {"train_loss": "train/loss", "val_loss": "val/loss"}


class RunLog:
    """Events as JSON lines, each flushed as it is written; a resumed run appends, beginning with a new "start".

    path None records nothing there. wandb_run, where there is one, gets the metrics under nanoGPT's names.
    """

    def __init__(self, path: Path | None, wandb_run: Any = None) -> None:
        try:
            self.file = open(path, "a+") if path else None  # noqa: SIM115 (it stays open as long as the run)
            if self.file and self.file.tell() and not Path(self.file.name).read_bytes().endswith(b"\n"):
                self.file.write("\n")  # a crash or a full disk left the last line torn
        except OSError as e:
            raise OSError(f"cannot write {path}: {e.strerror}; choose another --out_dir") from None
        self.wandb_run = wandb_run

    def write(self, event: str, **fields: Any) -> None:
        if self.file:
            # JSON has no NaN and no infinity: null
            known = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
            try:
                self.file.write(json.dumps({"event": event, **known}) + "\n")
                self.file.flush()
            except OSError as e:
                raise OSError(
                    f"cannot write {self.file.name}: {e.strerror}; free some disk space and start again, "
                    "with --init_from=resume where there is a checkpoint"
                ) from None
        if self.wandb_run and event in ("iter", "eval"):
            metrics = {WANDB_NAMES[k]: v for k, v in fields.items() if k in WANDB_NAMES}
            if "mfu" in metrics:
                metrics["mfu"] *= 100  # nanoGPT logs per cent
            self._wandb(lambda run: run.log(metrics, step=fields["iter"]))

    def close(self) -> None:
        if self.file:
            self.file.close()
        self._wandb(lambda run: run.finish())

    def _wandb(self, call: Callable[[Any], None]) -> None:
        """Calls wandb where it is used; what fails there ends its part of the log and not the run."""
        if self.wandb_run:
            try:
                call(self.wandb_run)
            except Exception as e:
                print(f"wandb failed ({' '.join(str(e).split())[:200]}); the run goes on without it", file=sys.stderr)
                self.wandb_run = None


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


def clock(seconds: float) -> str:
    """Seconds as 42.0s, 3m07s or 5h02m."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes}m{s:02}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a log.jsonl, in their order. Raises OSError where the file cannot be read.

    A crash can tear a line, and a run may be writing the last one just now: lines that are no whole event are skipped.
    """
    events = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "event" in event:
            events.append(event)
    return events
