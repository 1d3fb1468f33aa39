"""Make up logs of runs: log.jsonl, and what nanoGPT prints."""

import json
from pathlib import Path
from typing import Any

SETTINGS: dict[str, Any] = {"n_layer": 2, "n_embd": 16, "block_size": 8, "batch_size": 4}
SETTINGS |= {"gradient_accumulation_steps": 2, "learning_rate": 1e-3, "max_iters": 400}
SETTINGS |= {"lr_decay_iters": 0, "seed": 1, "dataset": "chars", "init_from": "scratch"}
START: dict[str, Any] = {"parameters": 120.0, "flops_per_token": 1000, "peak_flops": 4e6}
START |= {"device": "a chip", "world_size": 1, "git_commit": "abc", "val_sha256": "f00"}


def log(path: Path, val: dict[int, float], ms: float = 100.0, **changed: Any) -> str:
    """Write the log.jsonl of a run with these val losses by step; 64 tokens and ms a step, 1000
    FLOPs per token.
    """
    settings = {name: changed.pop(name, value) for name, value in SETTINGS.items()}
    windows = changed.pop("eval_digest", "abc")
    per_step = settings["batch_size"] * settings["gradient_accumulation_steps"] * 8
    start = {"iter": 0, "settings": settings, "tokens_per_step": per_step}
    lines = [{"event": "start"} | start | START | changed]
    for i in range(max(val) + 1):
        done = {"iter": i, "tokens": i * per_step, "train_s": i * ms / 1e3}
        if i in val:
            losses = {"train_loss": 3.0, "val_loss": val[i], "eval_digest": windows}
            lines.append({"event": "eval"} | losses | done)
        if i < max(val):
            step = {"loss": 3.0, "grad_norm": 1.0, "time_ms": ms, "train_s": (i + 1) * ms / 1e3}
            lines.append({"event": "iter"} | done | step)
    lines.append({"event": "end", "iter": max(val)})
    path.mkdir(parents=True, exist_ok=True)
    (path / "log.jsonl").write_text("".join(json.dumps(e) + "\n" for e in lines))
    return str(path)


def nanogpt(times: dict[int, float], evaluated: tuple[int, ...], mfu: float = -100.0) -> str:
    """Return what nanoGPT prints for steps that take these times in all, by step in ms."""
    out = []
    for i, ms in times.items():
        if i in evaluated:
            out.append(f"step {i}: train loss {4 - i / 100:.4f}, val loss {4.1 - i / 100:.4f}")
        out.append(f"iter {i}: loss {4 - i / 100:.4f}, time {ms:.2f}ms, mfu {mfu:.2f}%")
    return "\n".join(out) + "\n"


# Of nanoGPT's steps in ms: the first warms up, and some have an evaluation before them.
TIMES = dict.fromkeys(range(0, 100, 10), 1000.0) | {0: 9000.0, 40: 6000.0, 80: 6000.0}


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
