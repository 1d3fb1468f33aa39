"""Times training programs: what bench/speed.py and bench/sweep.py share.

A contestant is train.py, or another program that prints nanoGPT's log lines. It runs as a process of its own on random
tokens, its step times are those that it prints itself, and it is stopped after enough steps.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data.token_files import write_tokens
from deskgpt.run.log import read_events
from deskgpt.system.files import sha256

ROOT = Path(__file__).resolve().parents[1]
PYTHON = [sys.executable, "-u"]  # unbuffered, because nanoGPT does not flush its lines
LEAST_STEPS = 3  # of a round that is timed by the clock; the first step does not count

ITER = re.compile(r"iter (\d+): loss \S+, time ([\d.]+)ms")
WARM_UP = re.compile(r"warm-up took ([\d.]+)s")
DATA_WAIT = re.compile(r"data wait ([\d.]+)%")

# Settings of a run with more steps than anyone waits for: it is stopped. nanoGPT's train.py knows these too.
# compile=auto takes it for a long run.
ENDLESS = ["--max_iters=1000000", "--eval_interval=1000000", "--eval_iters=1", "--log_interval=1", "--wandb_log=False"]
# What our train.py needs in addition.
OURS = [*ENDLESS, "--eval_tokens=0", "--init_from=scratch", "--align_documents=False", "--auto_batch=False"]
OURS += ["--eval_only=False", "--dry_run=False", "--plan_for="]


class Failed(ValueError):
    """A run that ended before enough of its steps were timed; `reason` says why in a few words."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass
class Contestant:
    """A program that is timed, and what was measured in its rounds so far."""

    name: str
    command: list[str]
    cwd: Path
    rounds_ms: list[list[float]] = field(default_factory=list)  # by round, of each step but the first ones
    first_s: list[float] = field(default_factory=list)  # by round, of the first step and all compiling before it
    process_bytes: list[int] = field(default_factory=list)  # by round, peak memory of the process
    start: dict[str, Any] = field(default_factory=dict)  # our log's first event, or what is known of a peer
    data_waits: list[float] = field(default_factory=list)  # of our log lines: share of the time waited for data
    logged_bytes: list[int] = field(default_factory=list)  # by round, peak in our log; on CUDA torch's allocator's
    env: dict[str, str] = field(default_factory=dict)  # added to this process's own
    on_gpu: bool = False

    def step_ms(self) -> dict[str, float]:
        """Median, 10th and 90th percentile of the step times of all rounds, in ms."""
        times = sorted(ms for times in self.rounds_ms for ms in times)
        return {"ms": statistics.median(times), "p10": times[len(times) // 10], "p90": times[len(times) * 9 // 10]}


# ---- data ----------------------------------------------------------------------------------------------------


def vocab_size_for(dataset: str) -> int:
    """The vocabulary that a data set's name suggests: characters of Shakespeare, or GPT-2's tokens."""
    return 65 if dataset.endswith("_char") else 50257


def write_data(folder: Path, vocab_size: int) -> None:
    """Writes random tokens, which make the same work as real ones, in files that both nanoGPT and deskGPT read."""
    if not 1 <= vocab_size < 1 << 16:
        raise ValueError(f"--vocab_size {vocab_size}: token files hold 1 to {(1 << 16) - 1}")
    folder.mkdir()

    draw = np.random.default_rng(0)
    files = {}
    for split, n in (("train", 1 << 20), ("val", 1 << 16)):
        ids = draw.integers(0, vocab_size, n, np.uint16)
        write_tokens(folder / f"{split}.bin", ids)
        files[f"{split}.bin"] = {"tokens": n, "sha256": sha256(ids.astype("<u2"))}

    tokenizer = {"name": "gpt2"}
    if vocab_size < 50000:
        tokenizer = {"name": "char", "chars": "".join(chr(0x4E00 + i) for i in range(vocab_size))}
        # Without this file nanoGPT takes a vocabulary of 50304.
        (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab_size}))
    meta = {"tokenizer": tokenizer, "vocab_size": vocab_size, "source": "random", "files": files}
    (folder / "meta.json").write_text(json.dumps(meta))


# ---- runs ----------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What a run has printed while it was timed."""

    lines: list[str] = field(default_factory=lambda: [""])
    times_ms: list[float] = field(default_factory=list)  # of its steps
    data_waits: list[float] = field(default_factory=list)
    warm_up_s: float = 0.0
    enough: bool = False  # whether it took all steps that were wanted


def run(x: Contestant, steps: int, seconds: float = 0.0) -> int:
    """One round: starts x, adds the step times that it prints to x, and stops it after `steps` steps.

    steps 0 means about `seconds` seconds of steps. Returns the number of steps, counting those left out of the times.
    Raises Failed where x ends earlier.
    """
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(x.command, cwd=x.cwd, env=os.environ | x.env, **options)
    assert process.stdout is not None
    peak = None
    try:
        seen = watch(process.stdout, steps, seconds)
        if seen.enough:
            peak = peak_memory(process.pid, x.on_gpu)
        else:
            process.wait()  # for its own exit status, not the one that kill would give it
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    if not seen.enough:
        raise failure(x.name, seen, process.returncode)

    times = seen.times_ms
    first_kept = max(1, min(10, len(times) // 5))  # the first steps still allocate memory
    x.rounds_ms.append(times[first_kept:])
    x.first_s.append(seen.warm_up_s + times[0] / 1e3)
    x.data_waits += seen.data_waits
    if peak:
        x.process_bytes.append(peak)
    read_own_log(x)
    return len(times)


def watch(output: Iterable[str], steps: int, seconds: float) -> Seen:
    """Reads a run's output until it took enough steps, or to its end."""
    seen = Seen()
    for line in output:
        seen.lines.append(line.rstrip())
        if found := WARM_UP.search(line):
            seen.warm_up_s = float(found[1])
        if found := DATA_WAIT.search(line):
            seen.data_waits.append(float(found[1]) / 100)
        if found := ITER.search(line):
            seen.times_ms.append(float(found[2]))
            seen.enough = are_enough(seen.times_ms, steps, seconds)
            if seen.enough:
                break
    return seen


def are_enough(times_ms: list[float], steps: int, seconds: float) -> bool:
    if steps:
        return len(times_ms) >= steps
    return len(times_ms) >= LEAST_STEPS and sum(times_ms) >= seconds * 1e3


def failure(name: str, seen: Seen, status: int) -> Failed:
    """Why a run ended too early, from its last lines and its exit status."""
    killed = status == -9  # SIGKILL, which Windows has not
    by_system = ", killed by the system" if killed else ""
    last_lines = [line for line in seen.lines[-3:] if line]
    last = seen.lines[-1].removeprefix("error: ")
    if not last or ITER.match(last):
        last = f"exit status {status}"
    reason = f"failed: {last}"
    if killed or "out of memory" in " ".join(last_lines).lower():
        reason = f"out of memory{by_system}"
    shown = " / ".join(last_lines) or last
    return Failed(f"{name} ended after {len(seen.times_ms)} steps: {shown}{by_system}", reason)


def read_own_log(x: Contestant) -> None:
    """Adds what the log.jsonl in x's out_dir says; a peer has none."""
    folders = [a.removeprefix("--out_dir=") for a in x.command if a.startswith("--out_dir=")]
    if not folders:
        return
    path = Path(folders[-1], "log.jsonl")
    if not path.exists():
        return
    events = read_events(path)
    x.start = events[0]
    del x.start["settings"]  # they name folders of this machine
    # The event of the last step may not be written yet; the peak was reached before it.
    peaks = [e["peak_memory_bytes"] for e in events if e.get("peak_memory_bytes")]
    x.logged_bytes += peaks[-1:]


def peak_memory(pid: int, on_gpu: bool) -> int | None:
    """Bytes of a process: what it has on the GPU now, or its peak in RAM; None if the system does not say."""
    if on_gpu:
        return gpu_memory(pid)
    status = Path(f"/proc/{pid}/status")
    found = re.search(r"VmHWM:\s+(\d+)", status.read_text()) if status.exists() else None
    return int(found[1]) * 1024 if found else None


def gpu_memory(pid: int) -> int | None:
    """Bytes that a process has on the GPU; None in a container, which may see other process numbers or none."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        for line in subprocess.run(query, capture_output=True, text=True).stdout.splitlines():
            process, mib = line.split(",")
            if int(process) == pid:
                return int(mib) * 2**20
    except (OSError, ValueError):
        pass
    return None
