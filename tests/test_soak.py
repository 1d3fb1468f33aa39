"""bench/soak.py: real runs, killed."""

from __future__ import annotations

import os
import re

import pytest


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs fork")
@pytest.mark.parametrize(("ranks", "kills"), [(1, 3), (2, 2)])
def test_run_that_is_killed_in_saves_ends_as_an_undisturbed_one(ranks, kills, script):
    done = script("bench/soak.py", f"--ranks={ranks}", f"--kills={kills}")
    assert done.code == 0, done.out + done.err
    assert re.fullmatch(rf"{kills} kills, at most \d+ steps lost, differences: none", done.out.splitlines()[-1])
