"""Runs of two ranks of which one is killed by SIGKILL at random moments, compared with an undisturbed run.

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

import psutil
import pytest
from conftest import TINY, TORCHRUN, assert_same_run, flags

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")]

KILLS = int(os.environ.get("DESKGPT_SOAK_KILLS", "5"))
SAVE_INTERVAL = 10  # steps
SAVES_PER_KILL = 3  # at most, that a run makes before it is killed
OTHERS_S = 50  # in which the other ranks end after a kill: dist_timeout_s and 30 s


def kill_one_rank(process: subprocess.Popen[bytes], log: Path, draw: random.Random) -> bool:
    """Kill a rank near a random save. Return False if the run ended before."""
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


@pytest.mark.parametrize("dp_shard", [1, -1])
def test_run_that_is_killed_in_saves_ends_as_an_undisturbed_one(dp_shard, chars, tmp_path, begin):
    def start(out_dir: Path) -> subprocess.Popen[bytes]:
        log.write_text("")
        return begin(log, sys.executable, *TORCHRUN[1:], *flags(**settings, out_dir=out_dir))

    settings = TINY | {"dropout": 0.1, "eval_interval": SAVE_INTERVAL, "gradient_accumulation_steps": 2}
    settings |= {"max_iters": 2 * SAVES_PER_KILL * SAVE_INTERVAL * KILLS, "dataset": chars, "init_from": "auto"}
    settings |= {"dist_timeout_s": 20, "dp_shard": dp_shard}
    log = tmp_path / "log.txt"
    assert start(tmp_path / "full").wait() == 0, log.read_text()
    draw = random.Random(1)
    kills = 0
    process = start(tmp_path / "killed")
    while kills < KILLS and kill_one_rank(process, log, draw):
        kills += 1
        process = start(tmp_path / "killed")
    assert process.wait() == 0, log.read_text()
    assert kills
    assert_same_run(tmp_path / "full", tmp_path / "killed")
