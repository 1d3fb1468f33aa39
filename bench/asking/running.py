"""Runs of train.py for a question: each once, resumed where it was killed, and recorded in the ledger."""

from __future__ import annotations

import functools
import math
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from bench.asking.arms import Arm, last_line
from bench.asking.held_out import fingerprint
from bench.asking.ledger import Ledger, digest
from deskgpt.run.log import read_events
from deskgpt.system import hardware

# Settings with which every run ends at its last step; a commit may be older than some of them.
TO_THE_END: dict[str, Any] = {"max_minutes": 0.0, "max_hours": 0.0, "patience": 0, "eval_only": False, "dry_run": False}
TO_THE_END |= {"wandb_log": False, "sample_interval": 0}
IN_USE = "is in use by"  # what train.py prints about an out_dir that another run has
NOT_FINITE = re.compile(r"\b(nan|inf|infinite)\b|not finite", re.IGNORECASE)
WAIT_S = 1.0  # between two lines of progress


@dataclass(frozen=True)
class Place:
    """Where and how all runs of a question run."""

    ledger: Ledger
    data: Path
    device: str = "auto"
    evaluates_once: bool = True  # besides the evaluation at the start; False: as often as the config says
    tell: Callable[[str], None] = lambda text: None  # called every second with what runs

    @functools.cached_property
    def windows(self) -> str:
        """Names the data that arms train on and are judged by."""
        return fingerprint(self.data)

    @functools.cached_property
    def machine(self) -> str:
        return hardware.device_name(hardware.resolve_device(self.device))

    def key(self, arm: Arm, seed: int) -> str:
        """The run's name in the ledger: of everything that its result depends on."""
        what = [arm.code, arm.learning_settings(), arm.steps, seed, self.windows, self.evaluates_once]
        return digest([*what, self.machine, torch.get_num_threads(), torch.__version__])

    def out_dir(self, arm: Arm, seed: int) -> Path:
        return self.ledger.folder / "runs" / self.key(arm, seed)


def run(place: Place, arm: Arm, seed: int) -> dict[str, Any]:
    """The arm's run with this seed: from the ledger, or by train.py, which resumes a run that was killed.

    Raises ValueError where train.py refuses, or fails for another reason than losses that are not finite;
    KeyboardInterrupt where the user stops it, after it has saved.
    """
    key = place.key(arm, seed)
    out_dir = place.out_dir(arm, seed)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    t0 = time.perf_counter()
    with FileLock(f"{out_dir}.lock"):  # another question may be at work on this run
        place.ledger.read()
        known = place.ledger.run(key)
        if known is not None:
            return known
        diverged = train_to_the_end(place, arm, seed, out_dir)
        found = figures(read_events(out_dir / "log.jsonl"), diverged)
        wall_s = max(time.perf_counter() - t0, found["train_s"] or 0.0)  # a resumed run took longer than its last part
        found |= {"key": key, "seed": seed, "steps": arm.steps, "code": arm.code, "wall_s": wall_s}
        place.ledger.add("run", **found, windows=place.windows, settings=arm.learning_settings())
        for path in out_dir.glob("ckpt*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return found


def train_to_the_end(place: Place, arm: Arm, seed: int, out_dir: Path) -> bool:
    """Trains until the last step. Returns whether the run diverged instead. Raises as run does."""
    log = out_dir / "log.jsonl"
    while not ended(log, arm.steps):
        status, message = train(place, arm, seed, out_dir)
        if status > 0 and NOT_FINITE.search(message):
            return True
        if IN_USE in message:  # by a run that outlived its question, which was killed
            time.sleep(WAIT_S)
        elif status or not ended(log, arm.steps):
            raise ValueError(f"{arm.label} ({arm.what}) cannot run: {message or f'exit status {status}'}")
    return False


def train(place: Place, arm: Arm, seed: int, out_dir: Path) -> tuple[int, str]:
    """(exit status, last line of stderr) of a run of train.py that is followed to its end."""
    given = {"dataset": place.data.resolve(), "out_dir": out_dir.resolve(), "seed": seed, "device": place.device}
    given["max_iters"] = arm.steps
    if place.evaluates_once:
        given["eval_interval"] = arm.steps
    given |= {name: value for name, value in TO_THE_END.items() if name in arm.settings}
    if any(out_dir.glob("ckpt*")):
        given["init_from"] = "resume"
    command = [sys.executable, "train.py", *arm.arguments, *(f"--{name}={value}" for name, value in given.items())]
    with tempfile.TemporaryFile("w+") as stderr:
        # A session of its own: Ctrl+C reaches it once, from here.
        process = subprocess.Popen(
            command, cwd=arm.folder, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True
        )
        try:
            while process.poll() is None:
                step = last_event(out_dir / "log.jsonl").get("iter", 0)
                place.tell(f"{arm.label}, seed {seed}: step {step:,} of {arm.steps:,}")
                with suppress(subprocess.TimeoutExpired):
                    process.wait(WAIT_S)
        except BaseException:
            process.send_signal(signal.SIGTERM)  # it saves and ends
            process.wait()
            raise
        stderr.seek(0)
        return process.returncode, last_line(stderr.read())


def last_event(log: Path) -> dict[str, Any]:
    """The last event of a run's log; {} where it has none yet."""
    events = read_events(log) if log.exists() else []
    return events[-1] if events else {}


def ended(log: Path, steps: int) -> bool:
    """Whether the run of this log reached its last step; one that was stopped has an end too, before that."""
    last = last_event(log)
    return last.get("event") == "end" and last["iter"] >= steps


def figures(events: list[dict[str, Any]], diverged: bool) -> dict[str, Any]:
    """What the ledger keeps of a finished run: its last loss, and what it was judged on.

    A run that diverged is worth what guessing is: its loss is the logarithm of the vocabulary, or its last if higher.
    Logs of older commits do not say what an evaluation read: eval_digest is None and val_batches empty there.
    """
    start = [e for e in events if e["event"] == "start"][-1]
    evals = [e for e in events if e["event"] == "eval" and e["val_loss"] is not None]
    last = evals[-1] if evals else {}
    guessing = math.log(start["model_args"]["vocab_size"])
    loss = last.get("val_loss", guessing)
    return {
        "outcome": "diverged" if diverged else "ended",
        "val_loss": max(loss, guessing) if diverged else loss,
        "val_batches": last.get("val_batches") or [],
        "eval_digest": last.get("eval_digest"),
        "train_s": last.get("train_s"),
    }
