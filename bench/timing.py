"""What bench/speed.py and bench/sweep.py time with: train.py, or another program with nanoGPT's log lines, as a process
of its own, by the times that it logs itself. And how benchmarks write what they found.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data.token_files import write_tokens
from deskgpt.files import sha256

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PYTHON = [sys.executable, "-u"]  # unbuffered, for nanoGPT's lines
ITER = re.compile(r"iter (\d+): loss \S+, time ([\d.]+)ms")
LEAST_STEPS = 3  # of a round timed by the clock: the first is left out

# A run of more than enough steps, which is stopped: what nanoGPT's train.py knows too, and what ours needs besides.
# With so many steps, compile=auto decides for a long run.
ENDLESS = ["--max_iters=1000000", "--eval_interval=1000000", "--eval_iters=1", "--log_interval=1", "--wandb_log=False"]
OURS = [*ENDLESS, "--eval_tokens=0", "--init_from=scratch", "--align_documents=False", "--auto_batch=False"]
OURS += ["--eval_only=False", "--dry_run=False"]

THEN_RUN = """
import runpy, sys
sys.argv.pop(0)
sys.path.insert(0, "")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Failed(ValueError):
    """A run that ended before it was timed; `reason` in a few words."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass
class Contestant:
    name: str
    command: list[str]
    cwd: Path
    rounds: list[list[float]] = field(default_factory=list)  # ms of each step, without the first ones
    first_s: list[float] = field(default_factory=list)  # of the first step, with what was compiled before it
    memory: list[int] = field(default_factory=list)  # peak bytes of the process
    start: dict[str, Any] = field(default_factory=dict)  # our log's first line, or what is known of a peer
    waits: list[float] = field(default_factory=list)  # share of the time in which our loop waited for data
    logged_memory: list[int] = field(default_factory=list)  # peak bytes that our log has: on CUDA, of torch's allocator
    env: dict[str, str] = field(default_factory=dict)  # beside this process's own
    on_gpu: bool = False


# ---- commands ------------------------------------------------------------------------------------------------


def start_with(code: str, script: str) -> list[str]:
    """Python's arguments that run `script` as if they were its name, after some code; the script's own follow."""
    if not code:
        return [script]
    return ["-c", code + THEN_RUN, script]


def memory_cap(memory_gb: float | None, device: str) -> str:
    """Code that makes a CUDA card act as one of so many GB (2^30 bytes), for start_with; none for None.

    It limits torch's allocator: on a real card of that size CUDA's context takes some of it. Raises ValueError on other
    devices, and where the card has less.
    """
    if memory_gb is None:
        return ""
    if not device.startswith("cuda"):
        raise ValueError(f"--memory_gb {memory_gb:g} caps a CUDA card, the device is {device}; leave it out")
    index = int(device.partition(":")[2] or 0)
    total = card_bytes(index)
    if not 0 < memory_gb * 2**30 <= total:
        raise ValueError(f"--memory_gb {memory_gb:g}: {device} has {total / 2**30:.1f}; take less, and more than 0")
    return f"import torch\ntorch.cuda.set_per_process_memory_fraction({memory_gb * 2**30 / total!r}, {index})"


@functools.cache
def card_bytes(index: int) -> int:
    """Memory of a CUDA card, asked in another process: in this one the question would take some of it."""
    code = f"import torch; print(torch.cuda.get_device_properties({index}).total_memory)"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


# ---- data and runs -------------------------------------------------------------------------------------------


def write_data(folder: Path, vocab_size: int) -> None:
    """Random tokens in the files of both programs: the work is the same whatever they are."""
    if not 1 <= vocab_size < 1 << 16:
        raise ValueError(f"--vocab_size {vocab_size}: token files hold 1 to {(1 << 16) - 1}")
    draw = np.random.default_rng(0)
    folder.mkdir()
    tokens = {split: draw.integers(0, vocab_size, n, np.uint16) for split, n in (("train", 1 << 20), ("val", 1 << 16))}
    for split, ids in tokens.items():
        write_tokens(folder / f"{split}.bin", ids)
    files = {f"{s}.bin": {"tokens": len(ids), "sha256": sha256(ids.astype("<u2"))} for s, ids in tokens.items()}
    small = "".join(map(chr, range(0x4E00, 0x4E00 + vocab_size))) if vocab_size < 50000 else ""
    tokenizer = {"name": "char", "chars": small} if small else {"name": "gpt2"}
    meta = {"tokenizer": tokenizer, "vocab_size": vocab_size, "source": "random", "files": files}
    (folder / "meta.json").write_text(json.dumps(meta))
    if small:  # nanoGPT takes 50304 where there is none
        (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab_size}))


def run(x: Contestant, steps: int, seconds: float = 0.0) -> int:
    """One round: starts x, reads the times it logs of so many steps, or for 0 of about so many seconds, and stops it.

    Returns the number of steps, those left out included. Raises Failed where it ends before.
    """
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(x.command, cwd=x.cwd, env=os.environ | x.env, **options)
    times, waits, seen, warm_up_s, enough = [], [], [""], 0.0, False
    assert process.stdout is not None
    try:
        for line in process.stdout:
            seen.append(line.rstrip())
            if found := re.search(r"warm-up took ([\d.]+)s", line):
                warm_up_s = float(found[1])
            if found := re.search(r"data wait ([\d.]+)%", line):
                waits.append(float(found[1]) / 100)
            if found := ITER.search(line):
                times.append(float(found[2]))
                if enough := len(times) >= (steps or LEAST_STEPS) and (steps > 0 or sum(times) >= seconds * 1e3):
                    break
        if not enough:
            process.wait()  # how it ended, not how the next line ends it
        peak = peak_memory(process.pid, x.on_gpu) if enough else None
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    if not enough:
        lost = process.returncode == -signal.SIGKILL or "out of memory" in " ".join(seen[-3:]).lower()
        said = not ITER.match(seen[-1]) and seen[-1].removeprefix("error: ")
        last = said or f"exit status {process.returncode}"
        killed = ", killed by the system" if process.returncode == -signal.SIGKILL else ""
        raise Failed(
            f"{x.name} ended after {len(times)} steps: {' / '.join(filter(None, seen[-3:])) or last}{killed}",
            f"out of memory{killed}" if lost else f"failed: {last}",
        )
    x.memory += [peak] if peak else []
    x.waits += waits
    x.first_s.append(warm_up_s + times[0] / 1e3)
    x.rounds.append(times[max(1, min(10, len(times) // 5)) :])  # the first ones still allocate
    log = [a for a in x.command if a.startswith("--out_dir=")]
    path = Path(log[-1].split("=", 1)[1], "log.jsonl") if log else Path("none")
    if path.exists():
        # Its line for the last step may not be there yet; the peak was reached before.
        events = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        x.start = events[0]
        del x.start["settings"]  # those of this machine's folders among them
        x.logged_memory += [e["peak_memory_bytes"] for e in events if e.get("peak_memory_bytes")][-1:]
    return len(times)


def peak_memory(pid: int, on_gpu: bool) -> int | None:
    """Bytes of a process: what it has on the GPU, or its peak in RAM; None where the system does not say."""
    if on_gpu:  # a container may see other process numbers than the driver, or none
        query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        try:
            lines = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
            return next((int(mib) * 2**20 for p, mib in (line.split(",") for line in lines) if int(p) == pid), None)
        except (OSError, ValueError):
            return None
    status = Path(f"/proc/{pid}/status")
    found = re.search(r"VmHWM:\s+(\d+)", status.read_text()) if status.exists() else None
    return int(found[1]) * 1024 if found else None


# ---- results -------------------------------------------------------------------------------------------------


def about(*starts: dict[str, Any]) -> str:
    """Today, the machine, versions and commit, from the first of some runs' start events; the compilers of them all."""
    start = starts[0]
    made_by = dict.fromkeys(f", {s['compiler']}" for s in starts if s.get("compiler"))
    facts = f"{start['device']}; {start['versions']}{''.join(made_by)}, commit {start['git_commit']}"
    return f"{time.strftime('%Y-%m-%d')}, {facts}"


def command_line(script: str) -> str:
    """What was typed, without the name of the user's folder."""
    return shlex.join(["python", f"bench/{script}", *sys.argv[1:]]).replace(str(Path.home()), "~")


def check_name(name: str | None) -> None:
    """ValueError where --save's name is none for a file."""
    if name is not None and not re.fullmatch(r"\w[\w.+-]*", name):
        raise ValueError(f"--save {name!r}: a name of letters, digits, dots and dashes, such as speed-124m")


def write_results(
    folder: Path, name: str, text: str, result: dict[str, Any], draw: Callable[[Path], None] | None
) -> None:
    """folder/name.md, .json and, where there is something to draw with, .png; dots in the name stay."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text + (f"\n![]({name}.png)\n" if draw else ""), encoding="utf-8")
    (folder / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
    if draw:
        draw(folder / f"{name}.png")


def save(name: str, text: str, result: dict[str, Any], draw: Callable[[Path], None] | None) -> None:
    """write_results in bench/results, with today's date before the name."""
    write_results(RESULTS, f"{time.strftime('%Y-%m-%d')}-{name}", text, result, draw)
