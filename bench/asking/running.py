"""Runs of train.py for a question: each once, resumed where it was killed, and recorded in the ledger."""

from __future__ import annotations

import functools
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.analysis.logs import median_ms, mfu, read_run, tokens_per_s
from bench.asking.arms import Arm
from bench.asking.held_out import fingerprint
from bench.asking.ledger import Ledger, digest
from deskgpt.run.lock import if_free
from deskgpt.run.log import read_events
from deskgpt.system import hardware
from deskgpt.system.errors import ConfigError

# Settings with which every run ends at its last step; a commit may be older than some of them.
TO_THE_END: dict[str, Any] = {"max_minutes": 0.0, "max_hours": 0.0, "patience": 0, "eval_only": False, "dry_run": False}
TO_THE_END |= {"wandb_log": False, "sample_interval": 0}
TRIES = 3  # of a run that something kills
LONGEST_S = 7 * 86400.0  # that a run of an earlier question is waited for
IN_USE = "is in use by"  # what train.py says of an out_dir that another run has
NOT_FINITE = re.compile(r"\b(nan|inf|infinite)\b|not finite", re.IGNORECASE)
STOPPED = (-signal.SIGINT, -signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGTERM)


@dataclass(frozen=True)
class DistEnv:
    """Where and how all runs of a question run."""

    ledger: Ledger
    data: Path
    device: str = "auto"
    jobs: int = 1  # runs at a time, which share the processor's cores
    evaluations: int = 10  # of a run at least, for its curve; 0: as many as the config has
    alone: str = ""  # names the only question that may use these runs: speeds compare where arms took turns

    @property
    def threads(self) -> int:
        """Of each run: they round differently with another number."""
        return max(1, torch.get_num_threads() // self.jobs)

    @functools.cached_property
    def windows(self) -> str:
        """Names the data that arms train on and are judged by."""
        return fingerprint(self.data)

    @functools.cached_property
    def machine(self) -> str:
        return hardware.device_name(hardware.resolve_device(self.device))

    def key(self, arm: Arm, seed: int) -> str:
        """The run's name in the ledger: of everything that its result depends on."""
        facts = [arm.code, arm.learning_settings(), arm.steps, seed, self.windows, self.machine, self.threads]
        return digest([*facts, torch.__version__, *([self.alone] if self.alone else [])])


def run(place: DistEnv, arm: Arm, seed: int, until: float = math.inf) -> dict[str, Any]:
    """The arm's run with this seed: from the ledger, or by train.py, which resumes a run that was killed.

    until: of time.perf_counter; a run that still goes on then is saved and stopped. Raises ConfigError for that,
    ValueError where train.py refuses, or fails for another reason than losses that are not finite; KeyboardInterrupt
    where the user stops it, after it has saved.
    """
    if arm.known is not None:
        figures_of_it = dict.fromkeys(("val_loss", "val_se", "step_ms", "mfu", "tokens_per_s", "parameters"), arm.known)
        return figures_of_it | {"outcome": "known", "curve": [], "wall_s": 0.0, "reused": True}
    key = place.key(arm, seed)
    out_dir = out_dir_of(place, arm, seed)
    t0 = time.perf_counter()
    for _ in range(TRIES):
        status, said = 0, ""
        known = in_ledger(place, key, out_dir)
        if known is not None:
            return known | {"reused": True}
        if ended(out_dir / "log.jsonl", arm.steps):
            break
        status, said = train(place, arm, seed, out_dir, until)
        if status in STOPPED:
            raise KeyboardInterrupt
        if status < 0:
            said = f"a run of {arm.label} was killed (signal {-status}) and goes on from its checkpoint"
            print(said, file=sys.stderr)
        elif IN_USE not in said:
            break
    diverged = status > 0 and bool(NOT_FINITE.search(said))
    if status and not diverged:
        raise ValueError(f"{arm.label} ({arm.what}) cannot run: {said or f'exit status {status}'}")

    found = figures(out_dir / "log.jsonl", diverged)
    wall_s = max(time.perf_counter() - t0, found["train_s"] or 0.0)  # a resumed run took longer than its last part
    found |= {"key": key, "seed": seed, "steps": arm.steps, "code": arm.code, "wall_s": wall_s}
    place.ledger.add("run", **found, windows=place.windows, threads=place.threads, settings=arm.learning_settings())
    for path in out_dir.iterdir():
        if path.name != "log.jsonl":
            # Another question that waited for this run may remove them too.
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    return found | {"reused": False}


def in_ledger(place: DistEnv, key: str, out_dir: Path) -> dict[str, Any] | None:
    """The finished run of this key, once no other question, or one that was killed, is at work on it."""
    known = place.ledger.run(key)
    if known is None:
        with if_free(out_dir, wait_s=LONGEST_S):
            place.ledger.read()
        known = place.ledger.run(key)
    return known


def out_dir_of(place: DistEnv, arm: Arm, seed: int) -> Path:
    return place.ledger.folder / "runs" / place.key(arm, seed)


def run_all(place: DistEnv, wanted: Sequence[tuple[Arm, int]], until: float = math.inf) -> list[dict[str, Any]]:
    """The runs of arms with seeds, place.jobs at a time. Raises as run does, after the others have saved and ended."""
    with ThreadPoolExecutor(place.jobs) as pool:
        try:
            return list(pool.map(lambda one: run(place, one[0], one[1], until), wanted))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            stop_all()
            raise


def train(place: DistEnv, arm: Arm, seed: int, out_dir: Path, until: float = math.inf) -> tuple[int, str]:
    """(exit status, last line of stderr) of a run of train.py that is followed to its end. Raises as run does."""
    every = arm.settings["eval_interval"]
    if place.evaluations:
        every = min(every, max(1, arm.steps // place.evaluations))
    given = {"dataset": place.data.resolve(), "out_dir": out_dir.resolve(), "seed": seed, "device": place.device}
    given |= {"max_iters": arm.steps, "eval_interval": every}
    given |= {name: value for name, value in TO_THE_END.items() if name in arm.settings}
    if any(out_dir.glob("ckpt*")):
        given["init_from"] = "resume"
    command = [sys.executable, "train.py", *arm.arguments, *(f"--{name}={value}" for name, value in given.items())]
    env = os.environ | ({"OMP_NUM_THREADS": str(place.threads)} if place.jobs > 1 else {})
    with tempfile.TemporaryFile("w+") as stderr:
        # A session of its own: Ctrl+C reaches it once, from here.
        process = subprocess.Popen(
            command, cwd=arm.folder, env=env, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True
        )
        running.add(process)
        try:
            process.wait(None if math.isinf(until) else max(0.0, until - time.perf_counter()))
        except BaseException as e:
            process.send_signal(signal.SIGTERM)  # it saves and ends
            process.wait()
            if isinstance(e, subprocess.TimeoutExpired):
                raise ConfigError(
                    f"the --budget ended during the first runs, at a run of {arm.label}: it is saved, and the same "
                    "question with more budget, or with --anyway, goes on there"
                ) from None
            raise
        finally:
            running.discard(process)
        stderr.seek(0)
        lines = [line for line in stderr.read().splitlines() if line.strip()]
    return process.returncode, (lines or [""])[-1].removeprefix("error: ")


running: set[subprocess.Popen[bytes]] = set()


def stop_all() -> None:
    """Ends the runs of all threads, after they have saved."""
    for process in list(running):
        process.send_signal(signal.SIGTERM)


def ended(log: Path, steps: int) -> bool:
    """Whether the run of this log reached its last step; one that was stopped has an end too, before that.

    Another process may have followed it there.
    """
    return log.exists() and any(e["event"] == "end" and e["iter"] >= steps for e in read_events(log)[-1:])


def figures(log: Path, diverged: bool) -> dict[str, Any]:
    """What the ledger keeps of a finished run: its curve, last loss, speed and circumstances.

    A run that diverged is worth what guessing is: its loss is the logarithm of the vocabulary, or its last if higher.
    """
    run = read_run(str(log))
    start = run.start
    curve = [[e["iter"], e["val_loss"]] for e in run.val]
    guessing = math.log(start["vocab_size"])
    loss = curve[-1][1] if curve else guessing
    if diverged:
        loss = max(loss, guessing)
    return {
        "outcome": "diverged" if diverged else "ended",
        "val_loss": loss,
        "val_se": run.val[-1].get("val_se") if run.val else None,
        "curve": curve,
        "step_ms": median_ms(run),
        "mfu": mfu(run),
        "tokens_per_s": tokens_per_s(run),
        "train_s": run.val[-1]["train_s"] if run.val else None,
        "tokens_per_step": run.tokens_per_step,
        "flops_per_token": run.flops_per_token,
        "parameters": start.get("parameters"),
        "form": [start.get(name) for name in ("dtype", "compiled", "attention")],
        "device": start.get("device"),
        "versions": start.get("versions"),
        "ended": round(time.time()),
    }
