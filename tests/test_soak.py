"""Real runs that are killed by SIGKILL at random moments and resumed, compared with one that nobody disturbed.

pytest tests/test_soak.py                            # a few kills of each kind
DESKGPT_SOAK_KILLS=200 pytest tests/test_soak.py
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import ROOT, TINY, TORCHRUN, assert_equal, events, flags, trajectory

from deskgpt.checkpoint import store

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")]

KILLS = int(os.environ.get("DESKGPT_SOAK_KILLS", "5"))
SAVE_INTERVAL = 10  # steps
SAVES_PER_KILL = 3  # at most, that a run makes before it is killed
OTHERS_S = 50  # after a kill, in which the other ranks end: dist_timeout_s and 30 s


def start(ranks: int, log: Path, settings: dict[str, Any]) -> subprocess.Popen[bytes]:
    """A run that begins in out_dir, or goes on there. log: for what it prints."""
    command = [sys.executable, "train.py"] if ranks == 1 else [sys.executable, *TORCHRUN[1:]]
    with open(log, "wb") as file:
        return subprocess.Popen([*command, *flags(**settings)], cwd=ROOT, stdout=file, stderr=file)


def kill_one_rank(process: subprocess.Popen[bytes], ranks: int, log: Path, draw: random.Random) -> bool:
    """Kills a rank about a random save, or a single one also while it starts; False if the run ended before."""
    saves = draw.randint(0 if ranks == 1 else 1, SAVES_PER_KILL)
    while log.read_text().count("saving checkpoint") < saves:
        if process.poll() is not None:
            return False
        time.sleep(0.001)
    time.sleep(draw.uniform(0, 0.05 if saves else 3.0))
    try:
        workers = psutil.Process(process.pid).children() if ranks > 1 else [psutil.Process(process.pid)]
        draw.choice(workers).kill()
    except (psutil.NoSuchProcess, IndexError):
        return False
    process.wait(OTHERS_S)
    return True


def assert_nothing_lost(out_dir: Path) -> None:
    """There is a checkpoint that is no older than the last save, and a best one no worse than the log says."""
    saves = events(out_dir, "save") if (out_dir / "log.jsonl").exists() else []
    if not saves:
        return
    assert store.resume(out_dir).iter_num >= saves[-1]["iter"]
    losses = {e["iter"]: e["val_loss"] for e in events(out_dir, "eval")}
    best = [losses[e["iter"]] for e in saves if e["best"]]
    if best:
        path = store.best_of(out_dir)
        assert path is not None
        assert store.load(path).best_val_loss <= min(best)


@pytest.mark.parametrize(
    ("ranks", "more"),
    [(1, {}), (2, {}), (2, {"dp_shard": -1, "save_async": False})],
    ids=["one process", "two ranks", "sharded"],
)
def test_run_that_is_killed_in_saves_ends_as_an_undisturbed_one(ranks, more, chars, tmp_path):
    own = {"dropout": 0.1, "eval_interval": SAVE_INTERVAL, "gradient_accumulation_steps": ranks, "dist_timeout_s": 20}
    own |= {"max_iters": 2 * SAVES_PER_KILL * SAVE_INTERVAL * KILLS, "dataset": chars, "init_from": "auto"}
    log = tmp_path / "log.txt"
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    assert start(ranks, log, TINY | own | more | {"out_dir": whole}).wait() == 0, log.read_text()
    draw = random.Random(1)
    kills = 0
    while kills < KILLS:
        process = start(ranks, log, TINY | own | more | {"out_dir": killed})
        if not kill_one_rank(process, ranks, log, draw):
            assert process.wait() == 0, log.read_text()
            break
        kills += 1
        assert_nothing_lost(killed)
    assert start(ranks, log, TINY | own | more | {"out_dir": killed}).wait() == 0, log.read_text()
    assert kills
    for one, other in ((whole, killed), (store.best_of(whole) or "", store.best_of(killed) or "")):
        a = store.whole(store.load(one))
        b = store.whole(store.load(other))
        assert_equal(dict(a.model), dict(b.model))
        assert_equal(a.optimizer["state"], b.optimizer["state"])
        assert (a.iter_num, a.best_val_loss) == (b.iter_num, b.best_val_loss)
    assert trajectory(whole) == trajectory(killed)
