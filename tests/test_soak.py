"""Runs of two ranks of which one is killed by SIGKILL at random moments, compared with one that nobody disturbed.

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
from conftest import ROOT, TINY, TORCHRUN, assert_same_run, events, flags

from deskgpt.checkpoint import store

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")]

KILLS = int(os.environ.get("DESKGPT_SOAK_KILLS", "5"))
SAVE_INTERVAL = 10  # steps
SAVES_PER_KILL = 3  # at most, that a run makes before it is killed
OTHERS_S = 50  # after a kill, in which the other ranks end: dist_timeout_s and 30 s


def start(log: Path, settings: dict[str, Any]) -> subprocess.Popen[bytes]:
    """A run of two ranks that begins in out_dir, or goes on there. log: for what it prints."""
    with open(log, "wb") as file:
        return subprocess.Popen([sys.executable, *TORCHRUN[1:], *flags(**settings)], cwd=ROOT, stdout=file, stderr=file)


def kill_one_rank(process: subprocess.Popen[bytes], log: Path, draw: random.Random) -> bool:
    """Kills a rank about a random save; False if the run ended before."""
    saves = draw.randint(1, SAVES_PER_KILL)
    while log.read_text().count("saving checkpoint") < saves:
        if process.poll() is not None:
            return False
        time.sleep(0.001)
    time.sleep(draw.uniform(0, 0.05))
    try:
        draw.choice(psutil.Process(process.pid).children()).kill()
    except (psutil.NoSuchProcess, IndexError):
        return False
    process.wait(OTHERS_S)
    return True


def assert_nothing_lost(out_dir: Path) -> None:
    """There is a checkpoint that is no older than the last save, and a best one no worse than the log says."""
    saves = events(out_dir, "save")
    if not saves:
        return
    assert store.resume(out_dir).iter_num >= saves[-1]["iter"]
    losses = {e["iter"]: e["val_loss"] for e in events(out_dir, "eval")}
    best = [losses[e["iter"]] for e in saves if e["best"]]
    if best:
        assert store.load(store.best_of(out_dir) or "").best_val_loss <= min(best)


@pytest.mark.parametrize("more", [{}, {"dp_shard": -1, "save_async": False}], ids=["two ranks", "sharded"])
def test_run_that_is_killed_in_saves_ends_as_an_undisturbed_one(more, chars, tmp_path):
    settings = TINY | {"dropout": 0.1, "eval_interval": SAVE_INTERVAL, "gradient_accumulation_steps": 2} | more
    settings |= {"max_iters": 2 * SAVES_PER_KILL * SAVE_INTERVAL * KILLS, "dataset": chars, "init_from": "auto"}
    settings |= {"dist_timeout_s": 20}
    log = tmp_path / "log.txt"
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    assert start(log, settings | {"out_dir": whole}).wait() == 0, log.read_text()
    draw = random.Random(1)
    kills = 0
    process = start(log, settings | {"out_dir": killed})
    while kills < KILLS and kill_one_rank(process, log, draw):
        kills += 1
        assert_nothing_lost(killed)
        process = start(log, settings | {"out_dir": killed})
    assert process.wait() == 0, log.read_text()
    assert kills
    assert_same_run(whole, killed)
