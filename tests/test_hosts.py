"""bench/hosts.py, and bench/soak.py with several ranks: real runs, killed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from conftest import shell

from bench import hosts

KEPT: dict[str, Any] = {"steps_lost": hosts.SAVE_INTERVAL, "orphans": 0, "differences": []}


def test_steps_lost_are_those_that_were_made_again():
    def log(*steps: int | str) -> list[dict[str, Any]]:
        """A number is a step, "start 7" a start from step 7."""
        return [
            {"event": "iter", "iter": step} if isinstance(step, int) else {"event": "start", "iter": int(step[6:])}
            for step in steps
        ]

    assert hosts.steps_lost(log("start 0", 0, 1, 2)) == 0
    assert hosts.steps_lost(log("start 0", 0, 1, 2, "start 3", 3)) == 0
    assert hosts.steps_lost(log("start 0", 0, 1, 2, "start 1", 1, "start 0", 0)) == 4
    assert hosts.steps_lost(log("start 0", "start 0")) == 0


@pytest.mark.parametrize(
    ("facts", "broken"),
    [
        (KEPT, []),
        (KEPT | {"steps_lost": hosts.SAVE_INTERVAL + 1}, ["11 steps are lost"]),
        (KEPT | {"orphans": 2}, ["2 processes are left"]),
        (KEPT | {"differences": ["ckpt.pt: model x"]}, ["it differs from the undisturbed run: ckpt.pt: model x"]),
    ],
)
def test_each_promise_that_a_run_breaks_is_in_the_table(facts, broken):
    assert hosts.broken_promises(facts) == broken
    row = hosts.table({"none": facts | {"broken": broken}}).splitlines()[-1]
    assert ("; ".join(broken) or "kept") in row


def test_machine_without_namespaces_skips_with_the_reason(monkeypatch, capfd):
    monkeypatch.setenv("PATH", "")
    assert hosts.within_namespaces([]) == 0
    assert capfd.readouterr().out.startswith("skipped, since there can be no hosts on this machine: ")


@pytest.mark.slow
def test_run_on_two_hosts_survives_a_killed_worker(tmp_path):
    done = shell("python", "bench/hosts.py", "--hosts=2", "--ranks=1", "--fault=kill-worker")
    assert done.returncode == 0, done.stdout + done.stderr
    if done.stdout.startswith("skipped"):
        pytest.skip(done.stdout)
    row = [cell.strip() for cell in done.stdout.splitlines()[-1].split("|")[1:-1]]
    assert (row[0], row[5], row[6], row[8]) == ("kill-worker", "0", "equal", "kept")
    assert not any("run/netns/h" in line for line in Path("/proc/mounts").read_text().splitlines())


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs fork")
@pytest.mark.parametrize("ranks", [1, 2])
def test_run_that_is_killed_in_saves_ends_as_an_undisturbed_one(ranks, script):
    done = script("bench/soak.py", f"--ranks={ranks}", "--kills=3")
    assert done.code == 0, done.out + done.err
    row = [cell.strip() for cell in done.out.splitlines()[-1].split("|")]
    assert (row[1], row[-2]) == ("3", "none")
