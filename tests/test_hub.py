"""data/fineweb_edu/prepare.py with a hub of our own, whose connections break, and export.py --push_to_hub."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import assert_one_line, contents, shell
from fake_hub import SHA, Hub, serve
from fineweb import PREPARE, SMALL, as_bytes, tokens, write_documents
from test_export import saved

from data.meta_files import read_record
from model import GPTConfig

pytestmark = pytest.mark.slow


@pytest.fixture
def hub(tmp_path, documents):
    root = tmp_path / "hub"
    repo = root / "HuggingFaceFW" / "fineweb-edu"
    third = len(documents) // 3
    for i in range(3):
        part = documents[i * third : (i + 1) * third if i < 2 else None]
        write_documents(repo / "sample" / "10BT" / f"{i:03}_00000.parquet", part)
    write_documents(repo / "data" / "CC-MAIN-2013-20" / "train-00000.parquet", documents[:3])
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
    done = online(hub, tmp_path, "--subset=CC-MAIN-2013-20", "--val_tokens=5000")
    assert done.returncode == 0, done.stderr
    (hub.root / "HuggingFaceFW").rename(hub.root / "gone")
    for down, named in ((False, ["404"]), (True, ["network", "--source FILE"])):
        hub.down = down
        done = online(hub, tmp_path / "other")
        assert done.returncode == 1
        assert_one_line(done.stderr, *named)


# ---- uploads -------------------------------------------------------------------------------------------------


class Api:
    """Stands for huggingface_hub.HfApi, and for a hub with one user."""

    files: dict[str, bytes]  # of the one repository, by name
    refuses = ""  # the method that fails

    def answer(self, method: str) -> None:
        if method == self.refuses:
            raise RuntimeError("401 Client Error\nInvalid user token.")

    def whoami(self) -> dict[str, str]:
        self.answer("whoami")
        return {"name": "tester"}

    def create_repo(self, name: str, private: bool, exist_ok: bool) -> str:
        self.answer("create_repo")
        assert (name, private, exist_ok) == ("tester/mine", True, True)
        return f"https://hub/{name}"

    def create_commit(self, name: str, additions: list[Any], commit_message: str) -> None:
        self.answer("create_commit")
        for addition in additions:
            with addition.as_file() as file:
                self.files[addition.path_in_repo] = file.read()


@pytest.fixture
def export(tmp_path, script, monkeypatch):
    """Runs export.py with the checkpoint in tmp_path/out."""
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr(Api, "files", {}, raising=False)
    saved(tmp_path / "out", GPTConfig(block_size=32, vocab_size=256, n_layer=1, n_head=2, n_embd=8), {"name": "bytes"})
    return lambda *args: script("export.py", f"--out_dir={tmp_path / 'out'}", *args)


@pytest.mark.parametrize("to", ["my-model", "my.gguf"])
def test_export_is_uploaded_whole_with_its_card_to_a_private_repository(tmp_path, export, to):
    if to == "my.gguf":
        pytest.importorskip("gguf")
    assert export(f"--to={tmp_path / 'unasked'}").code == 0
    assert Api.files == {}
    done = export(f"--to={tmp_path / to}", "--push_to_hub=mine")
    assert done.code == 0, done.err
    assert "https://hub/tester/mine" in done.out.splitlines()[-1]
    card = Api.files.pop("README.md") if to == "my.gguf" else Api.files["README.md"]
    assert b"# tester/mine" in card
    assert Api.files == (contents(tmp_path / to) if to == "my-model" else {to: (tmp_path / to).read_bytes()})


def test_upload_that_fails_is_one_line_with_the_remedy(tmp_path, export, monkeypatch):
    new = tmp_path / "new"
    for name, refuses in (("a/b/c", ""), ("mine", "whoami")):
        monkeypatch.setattr(Api, "refuses", refuses)
        done = export(f"--to={new}", f"--push_to_hub={name}")
        assert done.code == 1
        assert_one_line(done.err, f"push_to_hub={name}", "hf auth login")
        assert not new.exists()
    monkeypatch.setattr(Api, "refuses", "create_commit")
    done = export(f"--to={new}", "--push_to_hub=mine")
    assert done.code == 1
    assert_one_line(done.err, f"hf upload tester/mine {new}")
    assert (new / "model.safetensors").exists()
