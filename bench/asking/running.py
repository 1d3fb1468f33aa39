"""A question: two arms that take turns on shared seeds, until the difference is decided or the
budget is spent; and its runs of train.py, each made once, and resumed if it was killed.

A run's out_dir is named by a digest of all that its result depends on. A finished run keeps its
log.jsonl and a result.json there, which every later question finds.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from bench.asking.arms import Arm, digest, last_line
from bench.asking.statistics import LEAST, MOST, PILOT, POWER, Estimate, cost, decide, difference
from deskgpt.errors import ConfigError, clock
from deskgpt.files import file_sha256, lock_out_dir, write_atomically
from deskgpt.logger import read_events

WAIT_S = 1.0
Events = list[dict[str, Any]]  # of a log.jsonl

UNSEEN = 5e-5  # nats; a difference that four decimals do not show never matters
STATUS = {"better": 0, "worse": 1, "same": 1, "open": 3}  # of the script, by verdict


# ---- runs of train.py ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Trainer:
    """Train arms by train.py, and keep the runs."""

    folder: Path  # of all runs
    data: str  # digest of the data
    machine: str  # device, threads and torch

    def run(self, arm: Arm, seed: int) -> dict[str, Any]:
        """Return the result of the arm's run with this seed: the kept one, or by train.py, which
        resumes a killed run.

        Raises ValueError if train.py fails for another reason than a loss that has become infinite;
        KeyboardInterrupt if the user stops it, after it has saved.
        """
        out_dir = self.folder.resolve() / digest([*arm.identity(), seed, self.data, self.machine])
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


# ---- the question --------------------------------------------------------------------------------


@dataclass
class Question:
    """Two arms, their runs so far, and the estimate after the last round of them."""

    a: Arm
    b: Arm
    trainer: Trainer
    min_effect: float | None  # the smallest difference that matters, in nats
    budget_s: float
    first_seed: int
    # In the order of seeds
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {"a": [], "b": []})
    estimate: Estimate = field(init=False)  # after the last round: the loss of a less that of b
    verdict: str = "open"  # of b: better, worse, same, or open

    @property
    def rounds(self) -> int:
        return len(self.runs["b"])

    def values(self) -> tuple[list[float], list[float]]:
        """Return the val losses of a's and of b's runs."""
        a, b = ([run["val_loss"] for run in runs] for runs in self.runs.values())
        return a, b

    def run_rounds(self) -> Iterator[str]:
        """Run rounds, one run of each arm, and give a line after each that decides nothing.

        Ends when the question is decided, or the next round does not fit into the budget. Raises as
        Trainer.run does.
        """
        while self.verdict == "open" and self.rounds < max(PILOT, self.affordable()):
            seed = self.first_seed + self.rounds
            for arm in (self.a, self.b):
                self.runs[arm.label].append(self.trainer.run(arm, seed))
            self.check_windows()
            self.estimate = difference(*self.values())
            self.verdict = decide(self.estimate, self.min_effect or UNSEEN)
            if self.verdict == "open":
                yield f"round {self.rounds}: {self.summary()}; {self.cost_line()}"

    def check_windows(self) -> None:
        """Raise ConfigError if arms were evaluated on different windows."""
        digests = {str(run["eval_digest"]) for runs in self.runs.values() for run in runs}
        if len(digests) > 1:
            raise ConfigError(
                "the arms were evaluated on different windows (digests "
                f"{', '.join(sorted(digests))}), so their losses do not compare; leave "
                "block_size and the tokenizer equal"
            )

    def round_s(self) -> float:
        """Return the seconds of a round, whenever its runs were made."""
        return sum(run["wall_s"] for runs in self.runs.values() for run in runs) / self.rounds

    def affordable(self) -> int:
        """Return the rounds that the budget pays, with those so far."""
        return min(MOST, int(self.budget_s / self.round_s())) if self.rounds else 0

    def cost(self) -> int | None:
        """Return the runs of each arm that find a difference of min_effect; None if that is not
        known, or beyond MOST.
        """
        if self.min_effect is None or self.rounds < PILOT:
            return None
        return cost(*self.values(), self.min_effect)

    def cost_line(self) -> str:
        """Return the cost of the question, by the scatter of the arms so far, and what the budget
        pays.
        """
        round_s = self.round_s()
        line = (
            f"the budget, {clock(self.budget_s)}, pays {self.affordable():,} at "
            f"{clock(round_s)} a round"
        )
        if self.affordable() < LEAST:
            enough = math.ceil(LEAST * round_s)
            line += f", and no answer comes before {LEAST}: raise it to --budget={enough}s or more"
        if self.min_effect is None or self.rounds < PILOT:
            return line
        number = self.cost() or f"more than {MOST}"
        takes = f"a difference of {self.min_effect:g} nats takes {number} runs of each arm"
        return f"{takes} (in {POWER:.0%} of such questions); {line}"

    def answer(self) -> dict[str, Any]:
        """Return the answer after the last round: a sentence, its figures and the exit status of
        the script.
        """
        if self.verdict == "same":
            sentence = f"a and b do not differ by {self.min_effect or UNSEEN:g} nats"
        elif self.verdict == "open":
            sentence = "Not enough yet"
        else:
            sentence = f"b ({self.b.text}) is {self.verdict}"
        e = self.estimate
        return {
            "verdict": self.verdict,
            "status": STATUS[self.verdict],
            "sentence": f"{sentence}: {self.summary()}.",
            "difference": -e.d,  # val loss of b less that of a, in nats
            "interval": [-e.high, -e.low] if e.known else None,
            "n": e.n,
            "cost": self.cost(),
            "arms": {"a": self.a.text, "b": self.b.text},
            "values": dict(zip("ab", self.values(), strict=True)),
        }

    def summary(self) -> str:
        """Return the loss of b less that of a with the 95% interval over seeds, and both arms' mean
        losses.
        """
        e = self.estimate
        limits = "too few runs for an interval"
        if e.known:
            limits = f"95% interval {nats(-e.high)} to {nats(-e.low)}"
        a, b = map(statistics.fmean, self.values())
        line = f"val loss of b less that of a {nats(-e.d)} nats ({limits}, n = {e.n})"
        line += f"; means a {a:.4f}, b {b:.4f}"
        for label, runs in self.runs.items():
            if diverged := sum(run["has_diverged"] for run in runs):
                line += (
                    f"; {diverged} of {len(runs)} runs of {label} diverged and count as guessing"
                )
        return line


def nats(value: float) -> str:
    """Return a difference with four decimals, zero without a minus."""
    return f"{value:+z.4f}"
