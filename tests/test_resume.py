from __future__ import annotations

import os
import pickle
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import (
    TINY,
    assert_equal,
    assert_one_line,
    assert_same_run,
    contents,
    events,
    flags,
    raises_one_line,
    tiny,
    until,
    weights,
)
from tiny_models import MODERN_SETTINGS

from data.prepared import write_dataset
from data.tokenizer import BytesTokenizer
from deskgpt.checkpoint import store
from deskgpt.run.log import git_commit
from deskgpt.run.settings import resumed_settings
from train import TrainConfig, main

RUNS: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": 0.3},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dropout": 0.3, "dtype": "bfloat16", "gradient_accumulation_steps": 3},
    "muon": MODERN_SETTINGS | {"optimizer": "muon", "lr_schedule": "linear", "dtype": "bfloat16"},
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "dropout")) for n in RUNS])
def test_resumed_run_is_bit_identical_to_one_that_was_not_interrupted(chars, tmp_path, name):
    """Computing activations again, in one half, changes no bit."""
    settings = RUNS[name] | {"lr_decay_iters": 6}
    main(tiny(chars, tmp_path / "full", **settings))
    main(tiny(chars, tmp_path / "halves", max_iters=3, **settings))
    main(tiny(chars, tmp_path / "halves", init_from="resume", activation_checkpoint="full", **settings))
    assert_same_run(tmp_path / "full", tmp_path / "halves")
    assert [e["iter"] for e in events(tmp_path / "halves", "iter")] == list(range(6))


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_killed_run_resumes_as_if_nothing_had_happened(chars, tmp_path, script, begin):
    settings = {"max_iters": 60, "eval_interval": 5, "dropout": 0.1}
    main(tiny(chars, tmp_path / "full", **settings))
    out_dir = tmp_path / "killed"
    command = [sys.executable, "train.py", *flags(**TINY | settings, dataset=chars, out_dir=out_dir)]
    process = begin(tmp_path / "terminal", *command)
    until(lambda: (out_dir / "ckpt.pt").exists())
    process.kill()
    process.wait()
    assert 0 < store.load(out_dir).iter_num < 60
    assert script("train.py", "--init_from=resume", f"--out_dir={out_dir}").code == 0
    assert_same_run(tmp_path / "full", out_dir)


def test_settings_override_the_checkpoints_except_the_models_size_in_a_config_file(out, tmp_path):
    """As in nanoGPT."""
    (tmp_path / "config.py").write_text("n_layer = 5\nbias = True\neval_interval = 5\n")
    argv = [str(tmp_path / "config.py"), f"--out_dir={out}", "--learning_rate=1e-4"]
    found = resumed_settings(TrainConfig, argv, str(out))
    expected = {"n_layer": 2, "bias": False, "eval_interval": 5, "learning_rate": 1e-4, "max_iters": 4}
    assert {name: found[name] for name in expected} == expected


def test_untrusted_checkpoint_sends_no_data_to_another_machine(out, capfd):
    saved = store.load(out)

    def resumed(*argv: str, **settings: Any) -> dict[str, Any]:
        store.save(replace(saved, config=saved.config | settings), out, best=False)
        return resumed_settings(TrainConfig, list(argv), str(out))

    for value in (True, torch.tensor([])):
        assert resumed(wandb_log=value)["wandb_log"] is False
        assert_one_line(capfd.readouterr().out, out, "--wandb_log=")
    elsewhere = {"dataset": r"\\host\share"}
    with raises_one_line("host", out, "--dataset="):
        resumed(**elsewhere)
    assert resumed("--wandb_log=True", "--dataset=//host/share", wandb_log=True, **elsewhere)["wandb_log"] is True


# ---- what has changed ----------------------------------------------------------------------------------------


def write_random(folder: Path, train: int = 0, val: int = 0) -> Path:
    """Write a data folder of random tokens from two seeds, without meta.json, as in nanoGPT."""
    folder.mkdir(exist_ok=True)
    chars = {i: chr(i + 40) for i in range(64)}
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 64, "itos": chars}))
    for split, seed in (("train", train), ("val", val)):
        np.random.default_rng(seed).integers(0, 64, 4000).astype(np.uint16).tofile(folder / f"{split}.bin")
    return folder


@pytest.fixture(scope="module")
def half(tmp_path_factory) -> Path:
    """Return a folder with data/, and with out/, which holds the first half of a run."""
    folder = tmp_path_factory.mktemp("half")
    main(tiny(write_random(folder / "data"), folder / "out", max_iters=4, lr_decay_iters=6, dropout=0.1))
    return folder


@pytest.fixture
def out(half, tmp_path) -> Path:
    """Return a copy of the first half's folder, to resume in."""
    return Path(shutil.copytree(half / "out", tmp_path / "out"))


def second_half(half: Path, out_dir: Path, **settings: Any) -> TrainConfig:
    unchanged = {"lr_decay_iters": 6, "dropout": 0.1, "init_from": "resume"}
    return tiny(half / "data", out_dir, **unchanged | settings)


# What is changed, and the names and values that the error has.
CHANGES: list[tuple[str, Any, tuple[str, ...]]] = [
    ("batch_size", 8, ("sequences per step: 4 before, 8 now", "windows per evaluation: 8 before, 16 now")),
    ("seed", 1, ("seed: 1337 before, 1 now",)),
    ("eval_iters", 3, ("windows per evaluation: 8 before, 12 now",)),
    ("lr_decay_iters", 7, ("learning rate at step 3", "lr_decay_iters")),
    ("learning_rate", 1e-3, ("learning rate at step 0", "learning_rate")),
    ("dataset", "other", ("train data, ", "val data, ")),
]


@pytest.mark.parametrize(("name", "value", "named"), CHANGES)
def test_another_experiment_is_refused_and_changes_no_file(name, value, named, half, tmp_path):
    out = half / "out"
    before = contents(out)
    if name == "dataset":
        value = str(write_random(tmp_path / "other", train=1, val=2))
    with raises_one_line("another experiment", out, *named, "--resume_changed=True", f"--init_from={out}"):
        main(second_half(half, out, **{name: value}))
    assert contents(out) == before


@pytest.mark.slow
def test_best_losses_of_other_val_data_are_not_compared(half, out, tmp_path, capsys):
    best = (out / "ckpt_best.pt").read_bytes()
    store.save(replace(store.load(out), best_val_loss=0.5), out, best=False)  # which the other data never has
    other = write_random(tmp_path / "other", val=3)
    c = second_half(half, out, dataset=str(other), resume_changed=True, eval_interval=4)
    main(c)
    printed = capsys.readouterr().out
    changed = re.findall("^changed: (.*?)[,:] ", printed, re.M)
    assert "val data" in changed
    assert "train data" not in changed
    assert str(out / "previous-1") in printed
    assert (out / "previous-1" / "ckpt_best.pt").read_bytes() == best
    assert store.load(out / "ckpt_best.pt").best_val_loss > 0.5
    main(replace(c, resume_changed=False))  # from now on it is this data's run
    assert "changed" not in capsys.readouterr().out


def test_changed_code_library_and_dtype_are_printed_and_the_run_resumes(half, out, capsys):
    saved = store.load(out)
    assert saved.metadata is not None
    earlier = {"code": "0123456789ab", "versions": saved.metadata["versions"] | {"torch": "1.0"}}
    store.save(replace(saved, metadata=saved.metadata | earlier), out, best=False)
    main(second_half(half, out, max_iters=4, dtype="bfloat16"))
    assert [e["iter"] for e in events(out, "eval")] == [0, 3, 4, 4]  # a finished run evaluates
    *code, versions, variant = re.findall("^changed: .*", capsys.readouterr().out, re.M)
    assert len(code) == bool(git_commit())
    assert_one_line(versions, "torch: '1.0' before", torch.__version__)
    assert_one_line(variant, "float32", "bfloat16")


def test_resume_changed_is_not_saved_and_another_micro_batch_evaluates_the_same_tokens(half, out):
    main(second_half(half, out, seed=5, resume_changed=True, max_iters=5))
    argv = [f"--out_dir={out}", "--batch_size=2", "--gradient_accumulation_steps=2"]
    found = resumed_settings(TrainConfig, argv, str(out))
    assert (found["resume_changed"], found["eval_tokens"]) == (False, 2 * 4 * 16)
    assert resumed_settings(TrainConfig, [*argv, "--eval_iters=3"], str(out))["eval_tokens"] == 0


@pytest.mark.slow
def test_resumed_run_keeps_the_steps_that_its_minutes_came_to(chars, tmp_path, capsys):
    out_dir = str(tmp_path)
    main(tiny(chars, tmp_path, max_minutes=60.0, max_iters=4))
    for argv in (["--init_from=resume"], ["--init_from=auto", "--max_minutes=0.01", "--max_iters=9"]):
        found = resumed_settings(TrainConfig, [f"--out_dir={out_dir}", *argv], out_dir)
        assert (found["init_from"], found["max_iters"], found["max_minutes"]) == ("resume", 4, 0.0)
    assert_one_line(capsys.readouterr().out.splitlines()[-1], "max_minutes", "max_iters=4")


# ---- a new run with a checkpoint's weights -------------------------------------------------------------------


@pytest.mark.slow
def test_new_run_takes_a_checkpoints_weights_and_nothing_else_of_it(half, tmp_path):
    source = half / "out" / "ckpt_best.pt"
    other = write_random(tmp_path / "other", train=1, val=2)
    before = contents(half / "out")
    main(tiny(other, tmp_path / "out", init_from=str(source), block_size=8, max_iters=1, learning_rate=0.0))
    expected = weights(source)
    expected["transformer.wpe.weight"] = expected["transformer.wpe.weight"][:8]
    saved = store.load(tmp_path / "out")
    assert_equal(dict(saved.model), expected)
    assert saved.iter_num == 1
    assert {int(s["step"]) for s in saved.optimizer["state"].values()} == {1}
    assert [e["iter"] for e in events(tmp_path / "out", "eval")] == [0, 1]
    assert contents(half / "out") == before


def test_new_run_that_does_not_fit_the_checkpoint_is_refused(half, tmp_path):
    ids = np.arange(4000, dtype=np.uint16) % 256
    write_dataset(tmp_path / "bytes", {"train": ids, "val": ids}, BytesTokenizer(), "x")
    c = tiny(half / "data", tmp_path / "out", init_from=str(half / "out" / "ckpt.pt"))
    for settings, named in (
        ({"n_layer": 3}, ("n_layer=3", "n_layer=2: use --n_layer=2")),
        ({"block_size": 32}, ("block_size=32", "16")),
        ({"dataset": str(tmp_path / "bytes")}, ("256", "tokenizer bytes", "64")),
    ):
        with raises_one_line(*named):
            main(replace(c, **settings))
    assert not (tmp_path / "out").exists()
