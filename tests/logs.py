"""Make up logs of runs: log.jsonl, and what nanoGPT prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deskgpt.logger import read_events

SETTINGS: dict[str, Any] = {"n_layer": 2, "n_embd": 16, "block_size": 8, "batch_size": 4}
SETTINGS |= {"gradient_accumulation_steps": 2, "learning_rate": 1e-3, "max_iters": 400}
SETTINGS |= {"lr_decay_iters": 0, "seed": 1, "dataset": "chars"}
START: dict[str, Any] = {"parameters": 120.0, "flops_per_token": 1000, "peak_flops": 4e6}
START |= {"device": "a chip", "git_commit": "abc", "tokenizer": "char", "val_sha256": "f00"}


def log(path: Path, val: dict[int, float], ms: float = 100.0, **changed: Any) -> str:
    """Write the log.jsonl of a run with these val losses by step; 64 tokens and ms a step, 1000
    FLOPs per token.
    """
    s = SETTINGS | changed.pop("settings", {})
    s |= {k: changed.pop(k) for k in [*changed] if k in SETTINGS}
    per_step = s["batch_size"] * s["gradient_accumulation_steps"] * s["block_size"]
    start = START | {"tokens_per_step": per_step} | changed
    lines = [{"event": "start", "iter": 0, "settings": s} | start]
    for i in range(max(val) + 1):
        if i in val:
            losses = {"train_loss": val[i] - 0.1, "val_loss": val[i], "eval_digest": "abc"}
            done = {"tokens": i * per_step, "train_s": i * ms / 1e3}
            lines.append({"event": "eval", "iter": i} | losses | done)
        if i < max(val):
            step = {"loss": 3.0, "grad_norm": 1.0, "time_ms": ms * (1 + 0.1 * (i % 3 - 1))}
            step["train_s"] = (i + 1) * ms / 1e3
            lines.append({"event": "iter", "iter": i} | step)
    lines.append({"event": "end", "iter": max(val)})
    path.mkdir(parents=True, exist_ok=True)
    (path / "log.jsonl").write_bytes("".join(json.dumps(e) + "\n" for e in lines).encode())
    return str(path)


def rewrite(path: str, changed: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Add the fields that a function returns to each event of a log."""
    file = Path(path) / "log.jsonl"
    file.write_text("\n".join(json.dumps(event | changed(event)) for event in read_events(file)))


def nanogpt(times: dict[int, float], evaluated: tuple[int, ...], mfu: float = -100.0) -> str:
    """Return what nanoGPT prints for steps that take these times in all, by step in ms."""
    out = []
    for i, ms in times.items():
        if i in evaluated:
            out += [
                f"step {i}: train loss {4 - i / 100:.4f}, val loss {4.1 - i / 100:.4f}",
                "saving checkpoint to out",
            ]
        out.append(f"iter {i}: loss {4 - i / 100:.4f}, time {ms:.2f}ms, mfu {mfu:.2f}%")
    return "\n".join(out) + "\n"


# Of nanoGPT's steps in ms: the first warms up, and some have an evaluation before them.
TIMES = dict.fromkeys(range(0, 100, 10), 1000.0) | {
    0: 9000.0,
    20: 1010.0,
    30: 990.0,
    40: 6000.0,
    80: 6000.0,
}


# ---- a checkout of nanoGPT, which cannot be had offline ------------------------------------------

# Takes its settings and prints its lines, with a clock that stops before a step has ended.
TRAIN = """
import os, sys, time
on_cpu = "--device=cpu" in sys.argv
assert f"--compile={not on_cpu}" in sys.argv, sys.argv
assert any(a.startswith("--n_embd=") for a in sys.argv), sys.argv
data = next(a for a in sys.argv if a.startswith("--dataset=")).split("=")[1]
assert os.path.exists(os.path.join(data, "meta.pkl"))
assert os.getcwd() == os.path.dirname(os.path.abspath(__file__))
time.sleep(0.3)
for i in range(1000):
    print(f"iter {i}: loss 4.2000, time 0.50ms, mfu -100.00%")
    time.sleep(0.2)
"""


def nanogpt_checkout(folder: Path) -> str:
    """Write a stand-in into folder; return it as --peer names it."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(TRAIN)
    return f"--peer=nanogpt:{folder}"
