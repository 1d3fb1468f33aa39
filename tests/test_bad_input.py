"""Mistakes of a user, each through the real script: one line names the value and the remedy, and no
file changes.
"""

import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import POSIX, TINY, contents, fails, flags, raises_one_line, run_tiny

import train
from data.batches import Split
from deskgpt.checkpoint import load_checkpoint


@pytest.fixture(scope="module")
def finished(chars, tmp_path_factory):
    out_dir = tmp_path_factory.mktemp("finished")
    run_tiny(chars, out_dir)
    return out_dir


@pytest.fixture
def run(finished, tmp_path):
    """Return the out_dir of a finished run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


# Arguments, the words of the error, and the status: 2 if the settings cannot be, 1 if they cannot
# be here.
SETTINGS = [
    ("--n_head=3", ["n_embd=16", "n_head=3", "--n_head=2"], 2),
    ("--batch_size=1e12", ["batch_size=1000000000000", "gradient_accumulation_steps=2"], 1),
    ("config/train_shakespeare.py", ["config/train_shakespeare.py", "did you mean config/"], 2),
    ("--n_layer=1000000", ["n_layer=1000000", "1,000"], 2),
    ("--n_embd=32768", ["M parameters", "GiB", "take a smaller"], 1),
    ("--dataset=README.md", ["dataset README.md has no train.bin"], 1),
    ("--dataset=text", ["python data/text/prepare.py"], 1),
    ("--block_size=200000", ["val*.bin: 111,540", "--block_size=111539"], 1),
    ("--init_from=gpt2", ["init_from=gpt2", "connect once"], 1),  # without a network
    ("--init_from=resume --block_size=64", ["block_size=64", "--block_size=16"], 1),
]


def test_wrong_setting_is_named_with_its_remedy_and_changes_no_file(
    chars, run, script, tmp_path, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    before = contents(run)
    for arguments, named, code in SETTINGS:
        new = {} if "resume" in arguments else TINY | {"dataset": chars}
        done = script("train.py", *flags(**new, out_dir=run), *arguments.split())
        fails(done, *named, code=code)
        assert contents(run) == before


def test_script_alone_and_with_a_runs_folder_says_what_to_type(run, script):
    fails(script("train.py"), "train.py config/train_shakespeare_char_cpu.py", code=2)
    fails(script("sample.py", run), f"--out_dir={run}", code=2)


@POSIX
def test_run_whose_train_bin_is_cut_short_saves_and_ends(run, chars, tmp_path, monkeypatch):
    data = shutil.copytree(chars, tmp_path / "data")
    read = Split.train_batch

    def cut_short(self, rows):
        if rows[0] // 4 == 20:  # of step 20
            os.truncate(data / "train.bin", 1000)
        return read(self, rows)

    monkeypatch.setattr(Split, "train_batch", cut_short)
    with raises_one_line("train.bin", "shorter"):
        run_tiny(data, run, max_iters=50)
    assert 0 < load_checkpoint(run).iter_num <= 20


def test_micro_batch_of_an_untrusted_checkpoint_is_refused_before_it_takes_memory(
    run, script, monkeypatch
):
    monkeypatch.setattr("deskgpt.device.usable_memory_bytes", lambda device: 1 << 30)
    monkeypatch.setattr(train, "named_losses", lambda *_: pytest.fail("it was tried"))
    found = torch.load(run / "ckpt.pt")
    found["config"]["batch_size"] = 1 << 20
    torch.save(found, run / "ckpt.pt")
    arguments = flags(init_from="resume", out_dir=run, resume_changed=True)
    fails(script("train.py", *arguments), "batch_size=1048576", "1.0 GiB", "--batch_size=")
