"""data/fineweb_edu/prepare.py with a hub of our own, whose connections break."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import assert_one_line, shell
from fake_hub import SHA, Hub, serve
from fineweb import PREPARE, SMALL, as_bytes, tokens, write_documents

from data.meta_files import read_record

pytestmark = pytest.mark.slow


@pytest.fixture
def hub(tmp_path, documents):
    root = tmp_path / "hub"
    repo = root / "HuggingFaceFW" / "fineweb-edu"
    third = len(documents) // 3
    for i in range(3):
        part = documents[i * third : (i + 1) * third if i < 2 else None]
        write_documents(repo / "sample" / "10BT" / f"{i:03}_00000.parquet", part)
    with serve(root) as server:
        yield server


def online(hub: Hub, tmp_path: Path, *args: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs prepare.py against our hub, in a process of its own: the hub's address is read on import."""
    env = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "no_proxy": "127.0.0.1"}
    env |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return shell("python", PREPARE, *SMALL, *args, "--out", tmp_path / "out", env=env)


def test_subset_streams_from_the_hub_in_parts_of_one_revision_through_faults_of_the_network(tmp_path, hub, documents):
    for number, faults in ((1, ["503"]), (0, ["cut"])):
        hub.faults = faults
        for _ in range(3):  # where the hub's own library gives up, the same command continues
            done = online(hub, tmp_path, f"--part={number}/2")
            if done.returncode == 0:
                break
            assert_one_line(done.stderr.splitlines()[-1], "same command continues")
        assert done.returncode == 0, done.stderr
    meta = read_record(tmp_path / "out")
    assert (meta["source"], meta["revision"]) == ("HuggingFaceFW/fineweb-edu, sample-10BT", SHA)
    assert tokens(tmp_path / "out").astype(np.uint8).tobytes() == as_bytes(documents)
    hub.requests.clear()
    assert "already prepared" in online(hub, tmp_path, "--part=0/2").stdout
    assert hub.requests == []


def test_what_the_hub_does_not_have_and_a_network_that_stays_away_are_one_line(tmp_path, hub):
    assert_one_line(online(hub, tmp_path, "--subset=nope").stderr, "--subset nope", "sample-10BT")
    (hub.root / "HuggingFaceFW").rename(hub.root / "gone")
    assert_one_line(online(hub, tmp_path).stderr, "404")
    hub.down = True
    done = online(hub, tmp_path)
    assert done.returncode == 1
    assert_one_line(done.stderr, "network", "--source FILE")
