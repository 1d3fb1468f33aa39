"""Times training programs in turns: what bench/speed.py and bench/qualify.py share.

A contestant is train.py, or another program that prints nanoGPT's log lines. It runs as a process of its own on random
tokens, its step times are those that it prints itself, and it is stopped after enough steps.
"""

from __future__ import annotations

import pickle
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.output import markdown_table
from data.token_files import write_tokens
from deskgpt.run.log import read_events

ROOT = Path(__file__).resolve().parents[1]
PYTHON = [sys.executable, "-u"]  # unbuffered, because nanoGPT does not flush its lines
LEAST_STEPS = 3  # in a round; the first step does not count

ITER = re.compile(r"iter \d+: loss \S+, time ([\d.]+)ms")

# Settings of a run with more steps than anyone waits for: it is stopped. nanoGPT's train.py knows these too.
# compile=auto takes it for a long run.
ENDLESS = ["--max_iters=1000000", "--eval_interval=1000000", "--eval_iters=1", "--log_interval=1", "--wandb_log=False"]
# What our train.py needs in addition.
OURS = [*ENDLESS, "--eval_tokens=0", "--init_from=scratch", "--align_documents=False", "--auto_batch=False"]
OURS += ["--eval_only=False", "--dry_run=False", "--plan_for="]


@dataclass
class Contestant:
    """A program that is timed, and what was measured in its rounds so far."""

    name: str
    command: list[str]
    cwd: Path
    out_dir: Path | None = None  # with a log.jsonl; a peer has none
    status: str = ""  # why there are no figures
    start: dict[str, Any] = field(default_factory=dict)  # our log's first event, or what is known of a peer
    rounds_ms: list[list[float]] = field(default_factory=list)  # by round, of each step but the first ones
    first_s: list[float] = field(default_factory=list)  # by round, of the first step and all compiling before it
    peak_bytes: list[int] = field(default_factory=list)  # by round, as our log has it


def ours(name: str, settings: Sequence[str], folder: Path, cwd: Path = ROOT) -> Contestant:
    """train.py of the checkout cwd with these settings, on the tokens in folder."""
    out_dir = folder / "runs" / re.sub(r"\W+", "-", name)
    own = [f"--dataset={folder}", f"--out_dir={out_dir}"]
    return Contestant(name, [*PYTHON, "train.py", *settings, *OURS, *own], cwd, out_dir)


# ---- data ----------------------------------------------------------------------------------------------------


@contextmanager
def random_tokens(vocab_size: int) -> Iterator[Path]:
    """A folder of random tokens for the time of the block."""
    # inductor's processes may still be ending when the folder is removed
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmp:
        write_data(Path(tmp) / "data", vocab_size)
        yield Path(tmp) / "data"


def write_data(folder: Path, vocab_size: int) -> None:
    """Writes random tokens, which make the same work as real ones, in files that both nanoGPT and deskGPT read."""
    if not 1 <= vocab_size < 1 << 16:
        raise ValueError(f"--vocab_size {vocab_size}: token files hold 1 to {(1 << 16) - 1}")
    folder.mkdir()
    draw = np.random.default_rng(0)
    for split, n in (("train", 1 << 20), ("val", 1 << 16)):
        write_tokens(folder / f"{split}.bin", draw.integers(0, min(vocab_size, 50257), n, np.uint16))
    if vocab_size < 50000:  # without this file both take GPT-2's vocabulary, of 50304 rows
        (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab_size}))


# ---- runs ----------------------------------------------------------------------------------------------------


def in_turns(runs: Sequence[Contestant], rounds: int, steps: int = 0, seconds: float = 10.0) -> None:
    """Runs the contestants in turns. One that fails gets its reason as status and is left out of later rounds.

    steps 0: about `seconds` seconds of steps in each round.
    """
    for number in range(rounds):
        alive = [x for x in runs if not x.status]
        # In another order each round, so that no drift of the machine favours one of them.
        for x in random.Random(number).sample(alive, len(alive)):
            run(x, steps, seconds)
            outcome = x.status or f"{statistics.median(x.rounds_ms[-1]):.4g} ms/step"
            print(f"round {number + 1}, {x.name}: {outcome}", flush=True)


def run(x: Contestant, steps: int, seconds: float) -> None:
    """One round: starts x, adds the step times that it prints to x, and stops it after `steps` steps.

    steps 0 means about `seconds` seconds of steps, at least LEAST_STEPS. Where x ends earlier, its status says why.
    """
    process = subprocess.Popen(
        x.command, cwd=x.cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout is not None
    last = ""
    times_ms: list[float] = []
    enough = False
    try:
        for line in process.stdout:
            last = line.strip() or last
            if found := ITER.search(line):
                times_ms.append(float(found[1]))
                by_clock = len(times_ms) >= LEAST_STEPS and sum(times_ms) >= seconds * 1e3
                enough = len(times_ms) >= steps if steps else by_clock
            if enough:
                break
        else:
            process.wait()  # for its own exit status, not the one that kill would give it
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    if not enough:
        x.status = reason_of(last, process.returncode)
        return
    first_kept = max(1, min(10, len(times_ms) // 5))  # the first steps still allocate memory
    x.rounds_ms.append(times_ms[first_kept:])
    if x.out_dir:
        events = read_events(x.out_dir / "log.jsonl")
        x.start = {name: value for name, value in events[0].items() if name != "settings"}  # they name folders here
        # The event of the last step may not be written yet; the peak was reached before it.
        x.peak_bytes += [e["peak_memory_bytes"] for e in events if e.get("peak_memory_bytes")][-1:]
    x.first_s.append(x.start.get("warm_up_s", 0.0) + times_ms[0] / 1e3)


def reason_of(last: str, status: int) -> str:
    """Why a run ended too early, from its last line and its exit status."""
    if status == -9:  # SIGKILL, which Windows has not
        return "out of memory, killed by the system"
    if "out of memory" in last.lower():
        return "out of memory"
    says_why = last and not ITER.search(last)
    return f"failed: {last.removeprefix('error: ') if says_why else f'exit status {status}'}"


# ---- figures -------------------------------------------------------------------------------------------------


def table(runs: Sequence[Contestant]) -> list[dict[str, Any]]:
    """A row of figures for each contestant; what a peer does not log is as in the first run that has figures."""
    measured = [x for x in runs if not x.status]
    if not measured:
        raise ValueError(f"no run has figures; {runs[0].name}: {runs[0].status}")
    first = measured[0]
    rows = []
    for x in runs:
        row: dict[str, Any] = {"name": x.name, "status": x.status}
        if not x.status:
            row |= figures(x, first)
        rows.append(row)
    return rows


def figures(x: Contestant, first: Contestant) -> dict[str, Any]:
    """Figures of a contestant, beside those of the first one: time per token / first, from rounds taken in turns."""
    start = first.start | x.start
    tokens = start["tokens_per_step"]
    times = sorted(ms for of_round in x.rounds_ms for ms in of_round)
    ms = statistics.median(times)
    per_token = [statistics.median(of_round) / tokens for of_round in x.rounds_ms]
    first_per_token = [statistics.median(of_round) / first.start["tokens_per_step"] for of_round in first.rounds_ms]
    ratios = [a / b for a, b in zip(per_token, first_per_token, strict=False)]
    flops = start["flops_per_token"] * tokens
    return {
        "dtype": start.get("dtype"),
        "compiled": start.get("compiled"),
        "tokens_per_step": tokens,
        "ms": ms,
        "p10": times[len(times) // 10],
        "p90": times[len(times) * 9 // 10],
        "tokens_per_s": tokens / ms * 1e3,
        "least": 1e3 / max(per_token),
        "most": 1e3 / min(per_token),
        "mfu": flops / ms * 1e3 / start["peak_flops"],
        "peak": f"{start['peak_flops'] / 1e12:.2f} TFLOP/s ({start['peak_source']})",
        "first_s": min(x.first_s),  # of several rounds one with a warm compile cache
        "memory_gb": max(x.peak_bytes) / 1e9 if x.peak_bytes else None,
        "ratio": statistics.median(ratios),
        "ratio_least": min(ratios),
        "ratio_most": max(ratios),
    }


def as_markdown(rows: Sequence[dict[str, Any]]) -> str:
    head = ["", "dtype", "compiled", "tokens/step", "ms/step (p10, p90)", "tokens/s (rounds)", "MFU", "first step"]
    head += ["peak memory", "time per token / first"]
    body = []
    for r in rows:
        if r["status"]:
            body.append([r["name"], r["status"], *[""] * (len(head) - 2)])
            continue
        cells = [r["name"], r["dtype"] or "n/a", {None: "n/a", True: "yes", False: "no"}[r["compiled"]]]
        cells += [f"{r['tokens_per_step']:,}", f"{r['ms']:.4g} ({r['p10']:.4g}, {r['p90']:.4g})"]
        cells += [f"{r['tokens_per_s']:,.0f} ({r['least']:,.0f} to {r['most']:,.0f})"]
        cells += [f"{r['mfu']:.1%}", f"{r['first_s']:.1f} s"]
        cells.append("n/a" if r["memory_gb"] is None else f"{r['memory_gb']:.2f} GB")
        body.append([*cells, f"{r['ratio']:.2f} ({r['ratio_least']:.2f} to {r['ratio_most']:.2f})"])
    return markdown_table(head, body, left_columns=3)


def peaks_in_words(rows: Sequence[dict[str, Any]]) -> str:
    return "MFU refers to " + " and ".join(dict.fromkeys(r["peak"] for r in rows if not r["status"]))
