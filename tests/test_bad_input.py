"""Mistakes of a user, each through the real script: one line names the value and the remedy, and no file changes."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY, assert_one_line, contents, files_of_at_most, flags

import train
from data.prepared import write_dataset
from data.tokenizer import BytesTokenizer
from deskgpt.checkpoint import store
from deskgpt.system import hardware
from train import TrainConfig, main


@pytest.fixture(scope="module")
def finished(chars, tmp_path_factory) -> Path:
    out_dir = tmp_path_factory.mktemp("finished")
    main(TrainConfig(**(TINY | {"dataset": str(chars), "out_dir": str(out_dir)})))
    return out_dir


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """The out_dir of a finished run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def assert_fails(run, script):
    """Checks that a script ends with one line of error that names these, and changes no file of the run."""

    def check(named: list[str], *args: str | Path, code: int = 1, path: str = "train.py") -> None:
        before = contents(run)
        done = script(path, *args)
        assert done.code == code, done.err
        assert done.err.startswith("error: ")
        assert_one_line(done.err, *named)
        assert contents(run) == before

    return check


# An argument, and what its error names: the value, and where there is one the remedy. test_configurator.py has more.
SETTINGS = {
    "--n_head=3": ["n_embd=16", "n_head=3", "--n_head=2"],
    "--batch_size=1e12": ["batch_size=1000000000000", "gradient_accumulation_steps=1"],
    "config/train_shakespeare.py": ["config/train_shakespeare.py", "did you mean config/"],
    # models that no machine holds, and numbers that nothing can count with
    "--n_layer=1000000": ["n_layer=1000000", "1,000"],
    "--n_embd=1099511627776": ["n_embd=1099511627776", "1,048,576"],
}


def test_settings(chars, run, assert_fails):
    for argument, named in SETTINGS.items():
        assert_fails(named, *flags(**TINY, dataset=chars, out_dir=run), argument, code=2)
    for device in ("cuda:99", "tpu", "meta"):
        assert_fails([device, "--device="], *flags(**TINY | {"dataset": chars, "out_dir": run, "device": device}))
    for name in ("x.pt", "ckpt.pt"):  # a new run in what would be a checkpoint
        named = [str(run / name), "--out_dir="]
        assert_fails(named, *flags(**TINY, dataset=chars, out_dir=run / name))


def test_data(tmp_path, run, assert_fails):
    """Other faults of data: test_token_files.py, test_splits.py."""
    settings = TINY | {"out_dir": run}
    ids = np.zeros(1000, np.uint16)
    write_dataset(tmp_path / "cut", {"train": ids, "val": ids}, BytesTokenizer(), "test")
    os.truncate(tmp_path / "cut" / "train.bin", 20)
    named = ["train.bin", "10", "meta.json", "prepare the data again"]
    assert_fails(named, *flags(**settings, dataset=tmp_path / "cut"))
    assert_fails(["python data/text/prepare.py"], *flags(**settings, dataset="text"))


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows does not cut open files")
@pytest.mark.parametrize("eval_interval", [3, 10**6])
def test_run_whose_train_bin_is_cut_short_saves_and_ends(tmp_path, script, eval_interval):
    ids = np.random.default_rng(0).integers(0, 256, 100_000, np.uint16)
    write_dataset(tmp_path / "data", {"train": ids, "val": ids}, BytesTokenizer(), "test")
    log = tmp_path / "run" / "log.jsonl"

    def cut() -> None:
        while not log.exists() or '"iter": 5' not in log.read_text():
            time.sleep(0.01)
        os.truncate(tmp_path / "data" / "train.bin", 1000)

    threading.Thread(target=cut, daemon=True).start()
    settings = TINY | {"dataset": tmp_path / "data", "out_dir": tmp_path / "run", "max_iters": 10**6}
    done = script("train.py", *flags(**settings | {"eval_interval": eval_interval, "max_hours": 0.02}))
    assert done.code == 1
    assert_one_line(done.err, "error: ", "train.bin", "200,000")
    stopped = re.search(r"^stopped by an error at step (\d+)$", done.out, re.M)
    assert stopped
    assert store.load(tmp_path / "run").iter_num == int(stopped[1]) > 5


def test_resumed_run_refuses_another_size(run, assert_fails):
    for name, value in (("block_size", 64), ("n_layer", 5)):
        named = [f"{name}={value}", f"--{name}={TINY[name]}"]
        assert_fails(named, "--init_from=resume", f"--out_dir={run}", f"--{name}={value}")


def test_model_larger_than_the_memory(chars, run, assert_fails):
    settings = TINY | {"dataset": chars, "out_dir": run}
    named = ["M parameters", "GiB", "take a smaller"]
    assert_fails(named, *flags(**settings | {"n_embd": 1 << 15, "n_layer": 1}))


@pytest.mark.slow
def test_micro_batch_larger_than_the_memory_is_refused_before_any_is_taken(run, assert_fails, monkeypatch):
    """Of a stranger's checkpoint; one of the command line goes the same way."""
    monkeypatch.setattr(hardware, "usable_memory_bytes", lambda device: 1 << 30)
    monkeypatch.setattr(train, "named_losses", lambda *_: pytest.fail("it was tried"))
    found = torch.load(run / "ckpt.pt")
    found["config"]["batch_size"] = 1 << 20
    del found["format"]  # or its checksum would be missed
    torch.save(found, run / "ckpt.pt")
    assert_fails(["batch_size=1048576", "1.0 GiB", "--batch_size="], "--init_from=resume", f"--out_dir={run}")


@pytest.mark.slow
def test_no_network(chars, tmp_path, assert_fails, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert_fails(["init_from=gpt2", "connect once"], "--init_from=gpt2", f"--dataset={chars}")


@pytest.mark.slow
def test_full_disk_while_training(chars, run, script):
    before = contents(run)
    settings: dict[str, Any] = {"init_from": "resume", "out_dir": run, "max_iters": 12, "device": "cpu"}
    settings["resume_changed"] = True  # the schedule
    with files_of_at_most(kib=20):  # room for log.jsonl, not for a checkpoint
        done = script("train.py", *flags(**settings))
    assert done.code == 1
    assert_one_line(done.err, "error: ", "ckpt.pt", "free some disk space")
    # It continued after the first failure.
    assert len(re.findall(r"^cannot write .*ckpt.*the run continues", done.out, re.M)) == 2
    assert "iter 11: loss" in done.out
    after = contents(run)
    assert after.keys() == before.keys()
    assert after["ckpt.pt"] == before["ckpt.pt"]


def test_folder_that_cannot_be_written(chars, tmp_path, assert_fails):
    (tmp_path / "file").write_text("")
    settings = TINY | {"dataset": chars, "out_dir": tmp_path / "file"}
    assert_fails([f"{tmp_path}/file", "another folder"], *flags(**settings))
