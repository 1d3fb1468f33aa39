"""Kills a run by SIGKILL at random moments, resumes it each time, and compares it with a run that nobody disturbed.

    python bench/soak.py                   # 200 kills
    python bench/soak.py --kills=20
    python bench/soak.py --ranks=2         # kills of a random rank, after which the other one must end by itself
    python bench/soak.py --ranks=4 --dp_shard=-1 --save_async=False    # with settings of train.py

Both runs are train.py on generated text, with a small model and dropout; they save every ten steps. All is in a
temporary folder. A quarter of the kills of a single rank come while it starts, the others in a save. After each kill
there must be a checkpoint no older than the last save that log.jsonl reports, and a best one no worse than the best it
reports. In the end all weights, the optimizer and what was logged must be those of the undisturbed run, in every bit.
The last line says what differs; the exit status is 1 then.

The ranks are forks of this process, which has imported torch: they start in a moment. Not for Windows.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import runpy
import signal
import socket
import statistics
import sys
import tempfile
import time
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

import torch

from bench.timing import ROOT
from data.text.prepare import prepare
from deskgpt.checkpoint import store
from deskgpt.checkpoint.store import Checkpoint
from deskgpt.run import log
from deskgpt.system.errors import ConfigError, one_line_errors

SAVE_INTERVAL = 10  # steps
START_S = 1.0  # a run that is killed while it starts is killed within this time
SAVES_PER_KILL = 3  # that a run makes before it is killed, at most
DIST_TIMEOUT_S = 20
OTHERS_S = DIST_TIMEOUT_S + 30.0  # after a kill, in which the other ranks end
SMALL: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16, "batch_size": 4, "dropout": 0.1}
SMALL |= {
    "learning_rate": 1e-2,
    "warmup_iters": 2,
    "eval_iters": 2,
    "device": "cpu",
    "dtype": "float32",
    "compile": False,
    "dist_timeout_s": DIST_TIMEOUT_S,
}
LOGGED = {"iter": ("loss", "lr", "grad_norm", "tokens"), "eval": ("train_loss", "val_loss", "lr")}


def command(data: Path, out_dir: Path, max_iters: int, ranks: int) -> list[str]:
    """The script and the arguments that start a run in out_dir, or go on with the one there."""
    settings = SMALL | {"gradient_accumulation_steps": ranks, "max_iters": max_iters}
    settings |= {"eval_interval": SAVE_INTERVAL, "dataset": data, "out_dir": out_dir, "init_from": "auto"}
    return ["train.py", *(f"--{name}={value}" for name, value in settings.items())]


def write_data(folder: Path) -> Path:
    """Token files of random words."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(1, 6))) for _ in range(50)]
    data = folder / "data"
    prepare(" ".join(draw.choices(words, k=20_000)), data, "char", "random words")
    return data


def events(out_dir: Path, kind: str) -> list[dict[str, Any]]:
    path = out_dir / "log.jsonl"
    return [event for event in log.read_events(path) if event["event"] == kind] if path.exists() else []


def train_as(rank: int, ranks: int, port: int, arguments: list[str], log: Path) -> None:
    """What torchrun's worker of this rank does with `python ARGUMENTS`, in a fork of this process."""
    if ranks > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}}
    file = open(log, "a", buffering=1)  # noqa: SIM115 (until the process ends)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = file
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def run_ranks(
    arguments: list[str], ranks: int, log: Path, draw: random.Random | None = None, save_s: float = 0.0
) -> bool:
    """Runs the ranks, to the end or until `draw` says when one is killed; False if none was.

    log: for what they print; save_s: about how long a save takes. Raises RuntimeError where the run fails by itself, or
    where the other ranks do not end after a kill.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log.write_text("")
    forks = multiprocessing.get_context("fork")
    processes = [forks.Process(target=train_as, args=(n, ranks, port, arguments, log)) for n in range(ranks)]
    try:
        for process in processes:
            process.start()
        if draw is not None:
            kill_one(processes, log, draw, save_s)
        for process in processes:
            process.join(OTHERS_S if draw else None)
        statuses = [process.exitcode for process in processes]
        was_killed = statuses.count(-signal.SIGKILL) == 1
        if None in statuses or (any(statuses) and not was_killed):
            raise RuntimeError(f"the ranks ended with {statuses}: {log.read_text()[-2000:]}")
        return was_killed
    finally:
        for process in processes:
            process.kill()


def kill_one(processes: list[ForkProcess], log: Path, draw: random.Random, save_s: float) -> None:
    """Kills a rank while the run starts, or at a random moment of one of its next saves, unless the run ends before."""
    # Of several ranks, those that are left would wait for the one that never started until their timeout.
    saves_left = draw.randint(0 if len(processes) == 1 else 1, SAVES_PER_KILL)
    latest_s = 1.2 * save_s if saves_left else START_S
    with open(log) as lines:
        while saves_left:
            line = lines.readline()
            saves_left -= line.startswith("saving checkpoint")
            if not line:
                if not processes[0].is_alive():
                    return
                time.sleep(0.001)
    time.sleep(draw.uniform(0, latest_s))
    draw.choice(processes).kill()


def steps_lost(out_dir: Path) -> int:
    """The steps that were logged after the checkpoint. Raises RuntimeError where a checkpoint was lost."""
    saves = events(out_dir, "save")
    if not saves:
        return len(events(out_dir, "iter"))
    last = store.resume(out_dir)
    if last.iter_num < saves[-1]["iter"]:
        raise RuntimeError(f"step {saves[-1]['iter']} was saved, ckpt.pt is of step {last.iter_num}")
    losses = {e["iter"]: e["val_loss"] for e in events(out_dir, "eval")}
    best_reported = min([losses[e["iter"]] for e in saves if e["best"]], default=math.inf)
    if best_reported < math.inf:
        path = store.best_of(out_dir)
        best = store.load(path).best_val_loss if path else math.inf
        if best > best_reported or last.best_val_loss != best:
            raise RuntimeError(f"val loss {best_reported} was saved as the best, {path} has {best}")
    return max(0, events(out_dir, "iter")[-1]["iter"] + 1 - last.iter_num)


def differences(a: Path, b: Path) -> list[str]:
    """In what two runs differ: checkpoints, and what they logged at any time."""
    found = []
    for name, path in {"last": lambda folder: folder, "best": store.best_of}.items():
        one, other = (contents(store.whole(store.load(path(folder)))) for folder in (a, b))
        found += [f"{name} {key}" for key in one.keys() | other.keys() if one.get(key) != other.get(key)]
    for kind, names in LOGGED.items():
        expected = {e["iter"]: [e[name] for name in names] for e in events(a, kind)}
        seen = {e["iter"] for e in events(b, kind)}
        wrong = [e["iter"] for e in events(b, kind) if expected.get(e["iter"]) != [e[name] for name in names]]
        found += [f"{kind} of step {step}" for step in [*wrong, *(expected.keys() - seen)]]
    return found


def contents(saved: Checkpoint) -> dict[str, list[Any]]:
    """The numbers of a checkpoint, by name."""
    numbers = {f"model {name}": w.tolist() for name, w in saved.model.items()}
    for i, moments in saved.optimizer["state"].items():
        numbers |= {f"optimizer {i} {name}": torch.as_tensor(value).tolist() for name, value in moments.items()}
    return numbers | {"iter_num": [saved.iter_num], "best_val_loss": [saved.best_val_loss]}


def soak(folder: Path, kills: int, seed: int, ranks: int, more: list[str]) -> list[str]:
    """In what a run that was killed so often differs from an undisturbed one. more: settings of the run.

    Raises RuntimeError where a kill has lost something.
    """
    max_iters = 2 * SAVES_PER_KILL * SAVE_INTERVAL * kills
    draw = random.Random(seed)
    data = write_data(folder)
    whole = folder / "whole"
    killed = folder / "killed"

    run_ranks([*command(data, whole, max_iters, ranks), *more], ranks, folder / "whole.log")
    save_s = statistics.median(event["write_s"] for event in events(whole, "save"))
    again = [*command(data, killed, max_iters, ranks), *more]

    lost: list[int] = []
    while len(lost) < kills and run_ranks(again, ranks, folder / "killed.log", draw, save_s):
        lost.append(steps_lost(killed))
        print(f"kill {len(lost)}: {lost[-1]} of {max_iters:,} steps lost", flush=True)
    if not events(killed, "end"):
        run_ranks(again, ranks, folder / "killed.log")
    found = differences(whole, killed)
    print(f"{len(lost)} kills, at most {max(lost, default=0)} steps lost, differences: {', '.join(found) or 'none'}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    a, more = parser.parse_known_args()
    if a.kills < 1 or a.ranks < 1:
        raise ConfigError(f"--kills={a.kills} --ranks={a.ranks}: at least 1 of each")
    if not hasattr(os, "fork"):
        raise ConfigError("soak.py needs processes that fork, which this system has not; take Linux or macOS")
    import torch._dynamo

    import train  # noqa: F401 (what each fork needs)

    torch.set_num_threads(1)  # a fork has none of its parent's threads
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        return 1 if soak(Path(folder), a.kills, a.seed, a.ranks, more) else 0


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main())
