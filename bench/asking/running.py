"""Runs of train.py for a question: each once, and resumed if it was killed.

A run's out_dir is named by a digest of all that its result depends on. A finished run keeps its
log.jsonl and a result.json there, which every later question finds.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from bench.asking.arms import Arm, digest, last_line
from deskgpt.files import file_sha256, write_atomically
from deskgpt.logger import read_events

IN_USE = "is in use by"  # what train.py prints about an out_dir that another run has
WAIT_S = 1.0


@dataclass(frozen=True)
class Trainer:
    """Train arms by train.py, and keep the runs."""

    folder: Path  # of all runs
    data: str  # digest of the data
    machine: str

    def run(self, arm: Arm, seed: int) -> dict[str, Any]:
        """Return the result of the arm's run with this seed: the kept one, or by train.py, which
        resumes a killed run.

        Raises ValueError if train.py fails for another reason than a loss that has become infinite;
        KeyboardInterrupt if the user stops it, after it has saved.
        """
        own = [
            *arm.identity(),
            seed,
            self.data,
            self.machine,
            torch.get_num_threads(),
            torch.__version__,
        ]
        out_dir = self.folder.resolve() / digest(own)
        self.folder.mkdir(parents=True, exist_ok=True)
        t0 = time.perf_counter()
        with FileLock(f"{out_dir}.lock"):  # another question may be at work on this run
            kept = out_dir / "result.json"
            if kept.exists():
                return dict(json.loads(kept.read_bytes()))
            events = train_to_the_end(arm, seed, out_dir)
            found = result(arm, events)
            # It may have begun in an earlier process.
            found["wall_s"] = max(time.perf_counter() - t0, found["train_s"])
            write_atomically(kept, json.dumps(found).encode())
            for path in out_dir.glob("ckpt*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return found


def train_to_the_end(arm: Arm, seed: int, out_dir: Path) -> list[dict[str, Any]]:
    """Train until the last step or a loss that is not finite.

    Return the events of the log. Raises as Trainer.run.
    """
    log = out_dir / "log.jsonl"
    events = read_events(log) if log.exists() else []
    while not has_ended(events, arm.steps):
        status, message = train(arm, seed, out_dir)
        events = read_events(log) if log.exists() else []
        if status > 0 and has_diverged(events):
            break
        if IN_USE in message:  # by a run that outlived its question, which was killed
            time.sleep(WAIT_S)
        elif status or not has_ended(events, arm.steps):
            raise ValueError(
                f"{arm.label} ({arm.name}) cannot run: {message or f'exit status {status}'}"
            )
    return events


def train(arm: Arm, seed: int, out_dir: Path) -> tuple[int, str]:
    """Follow a run of train.py to its end.

    Return its exit status and the last line of its stderr.
    """
    settings = arm.settings | {"seed": seed, "out_dir": out_dir}
    if any(out_dir.glob("ckpt*")):
        settings["init_from"] = "resume"
    arguments = [f"--{name}={value}" for name, value in settings.items() if value != ""]
    command = [sys.executable, "train.py", *arguments]
    print(f"{arm.label}, seed {seed}: training in {out_dir}", file=sys.stderr, flush=True)
    # A session of its own: Ctrl+C reaches it once, from here.
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=arm.folder, start_new_session=True, **quiet)
    try:
        _, errors = process.communicate()
    except BaseException:
        process.send_signal(signal.SIGTERM)  # it saves and ends
        process.communicate()
        raise
    return process.returncode, last_line(errors)


def data_digest(folder: Path) -> str:
    """Return a digest of the content of all files of a folder of token files."""
    paths = sorted([*folder.glob("*.bin"), *folder.glob("*.mask")])
    return digest([[path.name, file_sha256(path)] for path in paths])


def has_ended(events: list[dict[str, Any]], steps: int) -> bool:
    """Return True if the log has the end of the last step; a run that was stopped has an end too,
    before that.
    """
    return bool(events) and events[-1]["event"] == "end" and events[-1]["iter"] >= steps


def has_diverged(events: list[dict[str, Any]]) -> bool:
    """Return True if the last step or evaluation of a log is not finite.

    An error's message may name anything.
    """
    known = [e for e in events if e["event"] in ("bad_step", "iter", "eval")]
    if not known:
        return False
    last = known[-1]
    loss = last["val_loss"] if last["event"] == "eval" else last["loss"]
    return loss is None or last["event"] == "bad_step"


def result(arm: Arm, events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what is kept of a finished run: its last val loss, and a digest of the windows that it
    read.

    A run that diverged is worth what guessing is: its loss is the logarithm of the vocabulary, or
    its last if higher. Raises ValueError if the loss or the gradients were never finite: that is a
    defect of the arm, not a loss.
    """
    evaluations = [e for e in events if e["event"] == "eval"]
    if not evaluations or evaluations[0]["val_loss"] is None:
        raise ValueError(
            f"{arm.label} ({arm.name}) is broken: its val loss is not finite before the first step"
        )
    diverged = has_diverged(events)
    if diverged and all(e["grad_norm"] is None for e in events if e["event"] == "iter"):
        raise ValueError(
            f"{arm.label} ({arm.name}) is broken: no step has a finite loss and gradients"
        )
    last = [e for e in evaluations if e["val_loss"] is not None][-1]
    loss = last["val_loss"]
    if diverged:
        start = next(e for e in events if e["event"] == "start")
        loss = max(loss, math.log(start["model_args"]["vocab_size"]))
    return {
        "has_diverged": diverged,
        "val_loss": loss,
        "eval_digest": last["eval_digest"],
        "train_s": last.get("train_s") or 0.0,
    }
