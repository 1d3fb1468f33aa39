"""What a run records: events as JSON lines, and Weights & Biases if asked."""

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

from deskgpt.system.files import note_once, read_small
from deskgpt.system.terminal import reason

# Weights & Biases gets every number of a step and of an evaluation; these under nanoGPT's names.
NANOGPTS_NAMES = {"train_loss": "train/loss", "val_loss": "val/loss", "val_bpb": "val/bpb"}

NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # in a folder from elsewhere, a link could name any file of the user
MOST_BYTES = 1 << 30  # of a log that is read whole; a line has about 450, so these are two million steps


class RunLog:
    """Events as JSON lines, each written at once. A resumed run appends, from a new "start" on.

    path None writes no file. wandb_run, if given, gets the metrics too. Raises OSError if the file cannot be
    written at first; later the run continues without the lines that fail.
    """

    def __init__(self, path: Path | None, wandb_run: Any = None) -> None:
        self.path = path
        self.wandb_run = wandb_run
        if path:
            try:
                self._append(b"")
            except OSError as e:
                raise OSError(f"cannot write {path}: {e.strerror}; choose another --out_dir") from None

    def write(self, event: str, **fields: Any) -> None:
        if self.path:
            known = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
            line = json.dumps({"event": event, **known}).encode() + b"\n"  # JSON has no NaN
            try:
                self._append(line)
            except OSError as e:
                note_once(f"cannot write {self.path}: {e.strerror}; the run continues and tries again")
        if self.wandb_run and event in ("iter", "eval"):
            numbers = {name: value for name, value in fields.items() if isinstance(value, int | float)}
            metrics = {NANOGPTS_NAMES.get(name, name): value for name, value in numbers.items()}
            if "mfu" in metrics:
                metrics["mfu"] *= 100  # nanoGPT logs percent
            self._wandb(lambda run: run.log(metrics, step=fields["iter"]))

    def _append(self, line: bytes) -> None:
        """Also ends a line that a crash left torn. Raises OSError, with the file as it was before."""
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b", buffering=0, opener=lambda p, flags: os.open(p, flags | NO_LINK, 0o666)) as file:
            size = file.tell()
            file.seek(max(0, size - 1))
            if size and file.read(1) != b"\n":
                line = b"\n" + line
            try:
                while line:
                    line = line[file.write(line) :]
            except OSError:
                file.truncate(size)
                raise

    def close(self) -> None:
        self._wandb(lambda run: run.finish())

    def _wandb(self, call: Callable[[Any], None]) -> None:
        """Call wandb, if it is used. An error there ends its part of the log, not the run."""
        if self.wandb_run:
            try:
                call(self.wandb_run)
            except Exception as e:
                print(f"wandb failed ({reason(e)}); the run continues without it", file=sys.stderr)
                self.wandb_run = None


def start_wandb(project: str, name: str, config: dict[str, Any], run_id: str | None) -> Any:
    """Start a Weights & Biases run, or continue run_id's. WANDB_MODE=offline needs neither account nor network.

    Raises ImportError if the package is missing or does not fit, ValueError if wandb refuses.
    """
    import wandb

    if run_id := os.environ.get("WANDB_RUN_ID", run_id):
        print(f"note: W&B leaves out steps that run {run_id} has: for a copied or rewound folder, set WANDB_RUN_ID")
    try:
        return wandb.init(project=project, name=name, config=config, id=run_id, resume="allow")
    except Exception as e:  # wandb's own errors, and pydantic's for a bad WANDB_ variable
        raise ValueError(
            f"wandb cannot start: {reason(e)}; WANDB_MODE=offline keeps the run on this disk, --wandb_log=False leaves "
            "it out"
        ) from None


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a log.jsonl, in their order. Raises OSError if the file cannot be read.

    A crash can tear a line, and a run may be writing the last one just now: incomplete lines are skipped.
    Raises ValueError if it has more than MOST_BYTES.
    """
    lines = read_small(path, MOST_BYTES).decode("utf-8", errors="replace").splitlines()
    return [event for event in map(event_of, lines) if event is not None]


def event_of(line: str) -> dict[str, Any] | None:
    """Return the event of a line of log.jsonl; None if it is no complete event.

    Logs written until 2026-11-26 have a "crc" in each, which is not compared.
    """
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):  # a line of brackets only
        return None
    return event if isinstance(event, dict) and "event" in event else None


# ---- what a run's figures come from --------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Return the versions of what a run's figures depend on."""
    import torch

    packages = {p: metadata.version(p) for p in ("numpy", "torch")}
    cuda = {"cuda": torch.version.cuda} if torch.version.cuda else {}
    return {"python": platform.python_version(), **packages, **cuda, "platform": platform.platform()}


def git_commit() -> str | None:
    """Return the commit of the code, with "+changes" if files differ; outside a git checkout, DESKGPT_COMMIT."""
    elsewhere = os.environ.get("DESKGPT_COMMIT")
    try:
        describe = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), "describe", "--always", "--abbrev=12"]
        # --exclude=* leaves tags out: the commit itself, not a distance to some tag
        describe += ["--dirty=+changes", "--exclude=*"]
        # A hook of git sets GIT_DIR and others, which would name another repository.
        env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        out = subprocess.run(describe, capture_output=True, text=True, timeout=10, env=env)
    except (OSError, subprocess.TimeoutExpired):
        return elsewhere
    return out.stdout.strip() or elsewhere


def code_versions(variant: Any, device: Any) -> dict[str, Any]:
    """Return commit, versions, device and variant, for checkpoints: a resumed run prints a change and continues."""
    from deskgpt.system import hardware

    on_cpu = device.type == "cpu"  # whose full name has the number of threads, which ranks share
    name = hardware.processor() if on_cpu else hardware.device_name(device)
    return {"code": git_commit(), "versions": versions(), "device": name, "variant": str(variant)}
