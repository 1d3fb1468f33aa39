"""Mistakes of a user, each through the real script: one line names the value and the remedy, and no
file changes.
"""

import os
import shutil

import pytest
import torch
from conftest import POSIX, TINY, contents, fails, flags, raises_one_line, run_tiny

import train
from data.batches import Split
from deskgpt.checkpoint import load_checkpoint

# The words of the error, by the arguments; its status is 2 if the settings cannot be anywhere.
IMPOSSIBLE = {
    "--n_head=3": ["n_embd=16", "n_head=3", "--n_head=2"],
    "config/train_shakespeare.py": ["config/train_shakespeare.py", "did you mean config/"],
    "--n_layer=1000000": ["n_layer=1000000", "1,000"],
}
IMPOSSIBLE_HERE = {
    "--batch_size=1e12": ["batch_size=1000000000000", "gradient_accumulation_steps=2"],
    "--n_embd=32768": ["M parameters", "GiB", "take a smaller"],
    "--dataset=README.md": ["dataset README.md has no train.bin"],
    "--dataset=text": ["python data/text/prepare.py"],
    "--block_size=200000": ["val*.bin: 111,540", "--block_size=111539"],
    "--init_from=gpt2": ["init_from=gpt2", "connect once"],  # without a network
    "--init_from=resume --block_size=64": ["block_size=64", "--block_size=16"],
}


def test_wrong_setting_is_named_with_its_remedy_and_changes_no_file(
    chars, script, tmp_path, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    run_tiny(chars, tmp_path)
    before = contents(tmp_path)
    for arguments, named in (IMPOSSIBLE | IMPOSSIBLE_HERE).items():
        new = {} if "resume" in arguments else TINY | {"dataset": chars}
        done = script("train.py", *flags(**new, out_dir=tmp_path), *arguments.split())
        fails(done, *named, code=1 + (arguments in IMPOSSIBLE))
        assert contents(tmp_path) == before
    # Alone, and with a run's folder
    fails(script("train.py"), "train.py config/train_shakespeare_char_cpu.py", code=2)
    fails(script("sample.py", tmp_path), f"--out_dir={tmp_path}", code=2)


@POSIX
def test_run_whose_train_bin_is_cut_short_saves_and_ends(chars, tmp_path, monkeypatch):
    data = shutil.copytree(chars, tmp_path / "data")
    read = Split.train_batch

    def cut_short(self, rows):
        if rows[0] // 4 == 20:  # of step 20
            os.truncate(data / "train.bin", 1000)
        return read(self, rows)

    monkeypatch.setattr(Split, "train_batch", cut_short)
    with raises_one_line("train.bin", "shorter"):
        run_tiny(data, tmp_path, max_iters=50)
    assert 0 < load_checkpoint(tmp_path).iter_num <= 20


def test_micro_batch_of_an_untrusted_checkpoint_is_refused_before_it_takes_memory(
    chars, script, tmp_path, monkeypatch
):
    run_tiny(chars, tmp_path)
    monkeypatch.setattr("deskgpt.device.usable_memory_bytes", lambda device: 1 << 30)
    monkeypatch.setattr(train, "named_losses", lambda *_: pytest.fail("it was tried"))
    found = torch.load(tmp_path / "ckpt.pt")
    found["config"]["batch_size"] = 1 << 20
    torch.save(found, tmp_path / "ckpt.pt")
    arguments = flags(init_from="resume", out_dir=tmp_path, resume_changed=True)
    fails(script("train.py", *arguments), "batch_size=1048576", "1.0 GiB", "--batch_size=")
