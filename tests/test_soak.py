"""bench/soak.py: real runs, killed."""

from __future__ import annotations

import os

import pytest


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs fork")
@pytest.mark.parametrize("ranks", [1, 2])
def test_run_that_is_killed_in_saves_ends_as_an_undisturbed_one(ranks, script):
    done = script("bench/soak.py", f"--ranks={ranks}", "--kills=3")
    assert done.code == 0, done.out + done.err
    row = [cell.strip() for cell in done.out.splitlines()[-1].split("|")]
    assert (row[1], row[-2]) == ("3", "none")
