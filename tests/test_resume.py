from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, TINY, assert_equal, events, flags, tiny, trajectory, weights
from tiny_models import MODERN_SETTINGS

from deskgpt import checkpoint
from train import TrainConfig, main

FAST = MODERN_SETTINGS | {"optimizer": "muon", "lr_schedule": "linear", "dtype": "bfloat16"}


@pytest.mark.parametrize(
    "options", [{}, {"dropout": 0.3}, {"dtype": "bfloat16"}, {"gradient_accumulation_steps": 3}, FAST]
)
def test_resumed_run_is_bit_identical_to_one_that_was_not_interrupted(chars, tmp_path, options):
    options = {"lr_decay_iters": 6} | options
    main(tiny(chars, tmp_path / "whole", **options))
    main(tiny(chars, tmp_path / "halves", max_iters=3, **options))
    main(tiny(chars, tmp_path / "halves", init_from="resume", **options))
    assert trajectory(tmp_path / "whole") == trajectory(tmp_path / "halves")
    assert list(trajectory(tmp_path / "whole")["iter"]) == list(range(6))
    a, b = (checkpoint.load(tmp_path / run) for run in ("whole", "halves"))
    for key in ("model", "optimizer", "scaler", "iter_num", "best_val_loss"):
        assert_equal(getattr(a, key), getattr(b, key))


@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_killed_run_goes_on_as_if_nothing_had_happened(chars, tmp_path, script):
    settings = TINY | {"dataset": chars, "max_iters": 60, "eval_interval": 5, "dropout": 0.1}
    main(TrainConfig(**(settings | {"dataset": str(chars), "out_dir": str(tmp_path / "whole")})))
    out_dir = tmp_path / "killed"
    command = [sys.executable, "train.py", *flags(**settings, out_dir=out_dir)]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with open(tmp_path / "terminal", "w") as file, subprocess.Popen(command, cwd=ROOT, stdout=file, env=env) as process:
        while not (out_dir / "ckpt.pt").exists():
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert 0 < checkpoint.load(out_dir).iter_num < 60
    assert "iter 4: loss" in (tmp_path / "terminal").read_text()  # nothing printed waits in a buffer
    # The settings of the run are the checkpoint's: nothing has to be typed again.
    assert script("train.py", "--init_from=resume", f"--out_dir={out_dir}").code == 0
    assert trajectory(tmp_path / "whole") == trajectory(out_dir)
    assert_equal(weights(tmp_path / "whole"), weights(out_dir))


def test_float16_scaler_is_saved_and_restored(chars, tmp_path):
    main(tiny(chars, tmp_path, dtype="float16", max_iters=3))
    saved = checkpoint.load(tmp_path)
    assert saved.scaler is not None
    assert saved.scaler["scale"] > 0
    saved.scaler["scale"] = 128.0
    checkpoint.save(saved, tmp_path, best=False)
    main(tiny(chars, tmp_path, dtype="float16", init_from="resume"))
    scaler = checkpoint.load(tmp_path).scaler
    assert scaler is not None
    assert scaler["scale"] == 128.0
    assert scaler["_growth_tracker"] == 6


def test_run_that_is_over_only_evaluates_when_resumed(chars, tmp_path):
    main(tiny(chars, tmp_path))
    before = (tmp_path / "ckpt.pt").read_bytes()
    main(tiny(chars, tmp_path, init_from="resume"))
    assert (tmp_path / "ckpt.pt").read_bytes() == before
    assert [e["iter"] for e in events(tmp_path, "eval")] == [0, 3, 6, 6]


def test_run_goes_on_from_its_best_checkpoint_by_that_files_name(chars, tmp_path, script):
    main(tiny(chars, tmp_path))
    (tmp_path / "ckpt.pt").unlink()
    done = script("train.py", "--init_from=resume", f"--out_dir={tmp_path / 'ckpt_best.pt'}", "--max_iters=8")
    assert done.code == 0, done.err
    assert checkpoint.load(tmp_path).iter_num == 8
    assert [e["iter"] for e in events(tmp_path, "eval")] == [0, 3, 6, 6, 8]


def test_config_file_of_another_size_resumes_a_run_of_this_size_as_in_nanogpt(chars, tmp_path, script):
    main(tiny(chars, tmp_path, bias=True))
    (tmp_path / "config.py").write_text("n_layer = 5\nbias = False\neval_interval = 4\n")
    resume = ["--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=8"]
    done = script("train.py", tmp_path / "config.py", *resume)
    assert done.code == 0, done.err
    settings = events(tmp_path, "start")[1]["settings"]
    assert (settings["n_layer"], settings["bias"], settings["eval_interval"]) == (2, True, 4)


def test_settings_given_on_resume_win_over_the_checkpoints(chars, tmp_path, script):
    main(tiny(chars, tmp_path))
    done = script("train.py", "--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=8", "--learning_rate=1e-4")
    assert done.code == 0, done.err
    assert [e["lr"] for e in events(tmp_path, "iter")][-1] < 1e-4
    group = checkpoint.load(tmp_path).optimizer["param_groups"][0]
    assert group["betas"] == (0.9, 0.95)
    assert events(tmp_path, "start")[1]["settings"]["n_embd"] == TINY["n_embd"]
