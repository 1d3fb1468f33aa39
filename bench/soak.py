"""Kills a run by SIGKILL at random moments, resumes it each time, and compares it with a run that nobody disturbed.

    python bench/soak.py                   # 200 kills, about 20 minutes
    python bench/soak.py --kills=20
    python bench/soak.py --save=soak       # writes bench/results/DATE-soak.md and .json as well

Both runs are train.py on generated text, with a small model and dropout; they save every ten steps. All is in a
temporary folder. A fifth of the kills come while the process starts, the others while it trains. After each kill there
must be a checkpoint no older than the last save that log.jsonl reports, and a best one no worse than the best it
reports. In the end all weights, the optimizer and what was logged must be those of the undisturbed run, in every bit.
Ends with exit status 1 where something differs.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

import torch

from bench import output
from bench.output import markdown_table
from bench.timing import ROOT
from data.text.prepare import prepare
from deskgpt import checkpoint, runlog
from deskgpt.checkpoint import Checkpoint
from deskgpt.errors import one_line_errors

SAVE_INTERVAL = 10  # steps
STEPS_PER_KILL = 60  # that a process makes before it is killed, on average; the run has twice as many
START_S = 3.0  # a process that is killed while it starts is killed within this time
SMALL: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16, "batch_size": 4, "dropout": 0.1}
SMALL |= {"learning_rate": 1e-2, "warmup_iters": 2, "eval_iters": 2, "device": "cpu", "dtype": "float32", "compile": False}
LOGGED = {"iter": ("loss", "lr", "grad_norm", "tokens"), "eval": ("train_loss", "val_loss", "lr")}


def command(data: Path, out_dir: Path, max_iters: int) -> list[str]:
    """What starts a run in out_dir, or goes on with the one there."""
    if any((out_dir / name).exists() for name in (checkpoint.NAME, checkpoint.BEST)):
        return [sys.executable, "train.py", "--init_from=resume", f"--out_dir={out_dir}"]
    settings = SMALL | {"gradient_accumulation_steps": 1, "max_iters": max_iters, "eval_interval": SAVE_INTERVAL}
    settings |= {"dataset": data, "out_dir": out_dir}
    return [sys.executable, "train.py", *(f"--{name}={value}" for name, value in settings.items())]


def write_data(folder: Path) -> Path:
    """Token files of random words."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(1, 6))) for _ in range(50)]
    data = folder / "data"
    prepare(" ".join(draw.choices(words, k=20_000)), data, "char", "random words")
    return data


def events(out_dir: Path, kind: str) -> list[dict[str, Any]]:
    path = out_dir / "log.jsonl"
    return [event for event in runlog.read_events(path) if event["event"] == kind] if path.exists() else []


def start(data: Path, out_dir: Path, max_iters: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command(data, out_dir, max_iters), cwd=ROOT, stdout=subprocess.DEVNULL)


def run_and_kill(data: Path, out_dir: Path, max_iters: int, draw: random.Random, train_s: float) -> bool:
    """Lets a process of the run live for a random time; False if it has come to the run's end before.

    train_s: how long it trains, on average. Raises RuntimeError where the process fails by itself.
    """
    starts = len(events(out_dir, "start"))
    process = start(data, out_dir, max_iters)
    try:
        if draw.random() < 0.2:
            time.sleep(draw.uniform(0, START_S))
        else:
            while len(events(out_dir, "start")) == starts and process.poll() is None:
                time.sleep(0.02)
            time.sleep(draw.uniform(0, 2 * train_s))
        if process.poll() not in (None, 0):
            raise RuntimeError(f"train.py ended with exit status {process.returncode}")
        return process.poll() is None
    finally:
        process.kill()
        process.wait()


def steps_lost(out_dir: Path) -> int:
    """The steps that were logged after the checkpoint. Raises RuntimeError where a checkpoint was lost."""
    saves = events(out_dir, "save")
    if not saves:
        return len(events(out_dir, "iter"))
    last = checkpoint.resume(out_dir)
    if last.iter_num < saves[-1]["iter"]:
        raise RuntimeError(f"step {saves[-1]['iter']} was saved, ckpt.pt is of step {last.iter_num}")
    losses = {e["iter"]: e["val_loss"] for e in events(out_dir, "eval")}
    best_reported = min([losses[e["iter"]] for e in saves if e["best"]], default=math.inf)
    if best_reported < math.inf:
        best = checkpoint.load(out_dir / checkpoint.BEST).best_val_loss
        if best > best_reported or last.best_val_loss != best:
            raise RuntimeError(f"val loss {best_reported} was saved as the best, ckpt_best.pt has {best}")
    return max(0, events(out_dir, "iter")[-1]["iter"] + 1 - last.iter_num)


def differences(a: Path, b: Path) -> list[str]:
    """In what two runs differ: checkpoints, and what they logged at any time."""
    found = []
    for name in (checkpoint.NAME, checkpoint.BEST):
        one, other = contents(checkpoint.load(a / name)), contents(checkpoint.load(b / name))
        found += [f"{name}: {key}" for key in one.keys() | other.keys() if not same(one.get(key), other.get(key))]
    for kind, names in LOGGED.items():
        expected = {e["iter"]: [e[name] for name in names] for e in events(a, kind)}
        seen = {e["iter"] for e in events(b, kind)}
        wrong = [e["iter"] for e in events(b, kind) if expected.get(e["iter"]) != [e[name] for name in names]]
        found += [f"{kind} of step {step}" for step in [*wrong, *(expected.keys() - seen)]]
    return found


def contents(saved: Checkpoint) -> dict[str, Any]:
    """The numbers of a checkpoint, by name."""
    numbers: dict[str, Any] = {f"model {name}": w for name, w in saved.model.items()}
    for i, moments in saved.optimizer["state"].items():
        numbers |= {f"optimizer {i} {name}": value for name, value in moments.items()}
    return numbers | {"iter_num": saved.iter_num, "best_val_loss": saved.best_val_loss}


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b


def soak(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """What came of the kills. Raises RuntimeError where a kill has lost something."""
    max_iters = 2 * STEPS_PER_KILL * kills
    draw = random.Random(seed)
    data = write_data(folder)
    whole = folder / "whole"
    killed = folder / "killed"
    subprocess.run(command(data, whole, max_iters), cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    (end,) = events(whole, "end")
    train_s = (end["train_s"] + end["eval_s"] + end["save_s"]) / max_iters * STEPS_PER_KILL

    lost: list[int] = []
    done = 0
    logged = 0  # steps, those computed twice counted twice
    while done < kills and run_and_kill(data, killed, max_iters, draw, train_s):
        done += 1
        steps = steps_lost(killed)
        iters = events(killed, "iter")
        if len(iters) > logged:
            lost.append(steps)
            print(f"kill {done}: after step {iters[-1]['iter']:,} of {max_iters:,}, {steps} steps lost", flush=True)
        else:
            print(f"kill {done}: before a first step", flush=True)
        logged = len(iters)
    if not events(killed, "end"):
        subprocess.run(command(data, killed, max_iters), cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    return {
        "kills": done,
        "steps": max_iters,
        "processes": len(events(killed, "start")),
        "steps_lost": lost,
        "differences": differences(whole, killed),
        "start": events(whole, "start")[0],
    }


def table(result: dict[str, Any]) -> str:
    lost = result["steps_lost"] or [0]
    head = ("kills", "steps of the run", "steps lost to a kill: median", "most", "save interval", "differences")
    row = (
        str(result["kills"]),
        f"{result['steps']:,}",
        f"{statistics.median(lost):g}",
        str(max(lost)),
        str(SAVE_INTERVAL),
        ", ".join(result["differences"]) or "none",
    )
    return markdown_table(head, [row])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    parser.add_argument("--save", metavar="NAME", help="write bench/results/DATE-NAME.md and .json as well")
    a = parser.parse_args()
    output.check_name(a.save)
    if a.kills < 1:
        raise ValueError(f"--kills {a.kills}: at least 1")
    with tempfile.TemporaryDirectory() as folder:
        result = soak(Path(folder), a.kills, a.seed)
    print(table(result))
    if a.save:
        text = f"# Soak\n\n{output.about(result['start'])}\n\n```sh\n{output.command_line('soak.py')}\n```\n\n"
        text += f"{table(result)}\n\nA kill is SIGKILL at a random moment; the run is resumed after each.\n"
        output.save(a.save, text, result, None)
    return 1 if result["differences"] else 0


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main())
