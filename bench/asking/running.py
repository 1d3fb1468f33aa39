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
from deskgpt.files import file_sha256, lock_out_dir, write_atomically
from deskgpt.logger import read_events

WAIT_S = 1.0
Events = list[dict[str, Any]]  # of a log.jsonl


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
        machine = [self.machine, torch.get_num_threads(), torch.__version__]
        out_dir = self.folder.resolve() / digest([*arm.identity(), seed, self.data, *machine])
        self.folder.mkdir(parents=True, exist_ok=True)
        t0 = time.perf_counter()
        with FileLock(f"{out_dir}.lock"):  # another question may be at work on this run
            kept = out_dir / "result.json"
            if kept.exists():
                return dict(json.loads(kept.read_bytes()))
            found = result(arm, train_to_the_end(arm, seed, out_dir))
            # A run that began in an earlier process has trained for longer than this one took.
            found["wall_s"] = max(time.perf_counter() - t0, found["wall_s"])
            write_atomically(kept, json.dumps(found).encode())
            for path in out_dir.glob("ckpt*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return found


def train_to_the_end(arm: Arm, seed: int, out_dir: Path) -> Events:
    """Train until the last step, or until train.py says that the run has diverged.

    Return the events of the log. Raises as Trainer.run.
    """
    log = out_dir / "log.jsonl"
    steps = arm.settings["max_iters"]
    events = read_events(log) if log.exists() else []
    while not has_ended(events, steps):
        status, message = train(arm, seed, out_dir)
        events = read_events(log) if log.exists() else []
        if has_diverged(events):
            break
        if is_in_use(out_dir):  # by a run that outlived its question, which was killed
            time.sleep(WAIT_S)
        elif status or not has_ended(events, steps):
            raise ValueError(
                f"{arm.label} ({arm.text}) cannot run: {message or f'exit status {status}'}"
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
    print(f"{arm.label}, seed {seed}: training in {out_dir}", file=sys.stderr, flush=True)
    process = subprocess.Popen(
        [sys.executable, "train.py", *arguments],
        cwd=arm.folder,
        start_new_session=True,  # Ctrl+C reaches it once, from here
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, errors = process.communicate()
    except BaseException:
        process.send_signal(signal.SIGTERM)  # it saves and ends
        process.communicate()
        raise
    return process.returncode, last_line(errors)


def is_in_use(out_dir: Path) -> bool:
    """Return True if a run is at work in an out_dir: no word of an error says so, its lock does."""
    try:
        with lock_out_dir(out_dir):
            return False
    except ValueError:
        return True


def data_digest(folder: Path) -> str:
    """Return a digest of the content of all files of a folder of token files."""
    paths = sorted([*folder.glob("*.bin"), *folder.glob("*.mask")])
    return digest([[path.name, file_sha256(path)] for path in paths])


def has_diverged(events: Events) -> bool:
    """Return True if train.py has ended the run because its losses or gradients were not finite.

    An event of the log says so. An error's message may name anything, and a full disk may follow
    a single bad step.
    """
    return any(e["event"] == "diverged" for e in events)


def has_ended(events: Events, steps: int) -> bool:
    """Return True if the log has the end of the last step, or the run has diverged; a run that was
    stopped has an end too, before that.
    """
    ends = [e["iter"] for e in events if e["event"] == "end"]
    return has_diverged(events) or max(ends, default=-1) >= steps


def result(arm: Arm, events: Events) -> dict[str, Any]:
    """Return what is kept of a finished run: its last val loss, and a digest of the windows that it
    read.

    A run that diverged is worth what guessing is: its loss is the logarithm of the vocabulary, or
    its last if higher. Raises ValueError if the loss or the gradients were never finite: that is a
    defect of the arm, not a loss.
    """
    diverged = has_diverged(events)
    evaluations = [e for e in events if e["event"] == "eval" and e["val_loss"] is not None]
    learned = any(e["grad_norm"] is not None for e in events if e["event"] == "iter")
    if not evaluations or (diverged and not learned):
        raise ValueError(
            f"{arm.label} ({arm.text}) is broken: its val loss is not finite before the first "
            "step, or its gradients at all steps"
        )
    last = evaluations[-1]
    loss = last["val_loss"]
    if diverged:
        start = next(e for e in events if e["event"] == "start")
        loss = max(loss, math.log(start["model_args"]["vocab_size"]))
    return {
        "has_diverged": diverged,
        "val_loss": loss,
        "eval_digest": last["eval_digest"],
        "wall_s": last.get("train_s") or 0.0,
    }
