from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, assert_equal, assert_one_line, assert_same_run, contents, events, flags, tiny, weights
from tiny_models import MODERN_SETTINGS

from data.prepared import write_dataset
from data.splits import FINGERPRINTED
from data.tokenizer import BytesTokenizer
from deskgpt.checkpoint import store
from deskgpt.run.log import git_commit
from deskgpt.run.settings import resumed_settings
from export import training_of
from train import TrainConfig, main

FAST = MODERN_SETTINGS | {"optimizer": "muon", "lr_schedule": "linear", "dtype": "bfloat16"}

MUCH = {"dropout": 0.3, "dtype": "bfloat16", "gradient_accumulation_steps": 3}
# A run's settings, and what each of its halves has instead and may change without changing a bit.
RUNS: list[Any] = [
    ({"dropout": 0.3}, {}, {}),
    pytest.param({"dtype": "float16"}, {}, {}, marks=pytest.mark.slow),
    pytest.param(
        MUCH, {"activation_checkpoint": "selective"}, {"activation_checkpoint": "full"}, marks=pytest.mark.slow
    ),
    pytest.param(FAST, {}, {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("options", "first", "second"), RUNS)
def test_resumed_run_is_bit_identical_to_one_that_was_not_interrupted(chars, tmp_path, options, first, second):
    options = {"lr_decay_iters": 6} | options
    main(tiny(chars, tmp_path / "whole", **options))
    main(tiny(chars, tmp_path / "halves", max_iters=3, **options | first))
    main(tiny(chars, tmp_path / "halves", init_from="resume", **options | second))
    assert_same_run(tmp_path / "whole", tmp_path / "halves")
    assert [e["iter"] for e in events(tmp_path / "halves", "iter")] == list(range(6))


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_killed_run_resumes_as_if_nothing_had_happened(chars, tmp_path, script):
    settings = {"max_iters": 60, "eval_interval": 5, "dropout": 0.1}
    main(tiny(chars, tmp_path / "whole", **settings))
    out_dir = tmp_path / "killed"
    command = [sys.executable, "train.py", *flags(**TINY | settings, dataset=chars, out_dir=out_dir)]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with open(tmp_path / "terminal", "w") as file, subprocess.Popen(command, cwd=ROOT, stdout=file, env=env) as process:
        while not (out_dir / "ckpt.pt").exists():
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert 0 < store.load(out_dir).iter_num < 60
    assert "iter 4: loss" in (tmp_path / "terminal").read_text()  # nothing printed waits in a buffer
    # The settings of the run are the checkpoint's: nothing has to be typed again.
    assert script("train.py", "--init_from=resume", f"--out_dir={out_dir}").code == 0
    assert_same_run(tmp_path / "whole", out_dir)


def test_run_that_is_over_only_evaluates_when_resumed(half, out):
    before = (out / "ckpt.pt").read_bytes()
    main(second_half(half, out, max_iters=4))
    assert (out / "ckpt.pt").read_bytes() == before
    assert [e["iter"] for e in events(out, "eval")] == [0, 3, 4, 4]


def test_settings_given_on_resume_win_over_the_checkpoints_but_for_the_models_size_in_a_config_file(out, tmp_path):
    """As in nanoGPT."""
    (tmp_path / "config.py").write_text("n_layer = 5\nbias = True\neval_interval = 5\n")
    argv = [str(tmp_path / "config.py"), f"--out_dir={out}", "--learning_rate=1e-4"]
    found = resumed_settings(TrainConfig, argv, str(out))
    names = ("n_layer", "bias", "eval_interval", "learning_rate", "max_iters")
    assert [found[name] for name in names] == [2, False, 5, 1e-4, 4]


def test_checkpoint_from_elsewhere_sends_nothing_away(out, script, capfd):
    saved = store.load(out)

    def resumed(*argv: str, **settings: Any) -> dict[str, Any]:
        store.save(replace(saved, config=saved.config | settings), out, best=False)
        return resumed_settings(TrainConfig, list(argv), str(out))

    assert resumed(wandb_log=True)["wandb_log"] is False
    assert_one_line(capfd.readouterr().out, out, "--wandb_log=True")
    assert resumed(wandb_log=torch.tensor([]))["wandb_log"] is False
    elsewhere = {"dataset": r"\\host\share"}
    with pytest.raises(ValueError, match="host") as e:
        resumed(**elsewhere)
    assert_one_line(e.value, out, "--dataset=")
    assert resumed("--wandb_log=True", "--dataset=//host/share", wandb_log=True, **elsewhere)["wandb_log"] is True
    without = replace(saved, config=saved.config | elsewhere, tokenizer={})
    store.save(without, out, best=False)
    done = script("sample.py", f"--out_dir={out}", "--device=cpu")
    assert done.code == 1
    assert_one_line(done.err, "host", "not on this machine")
    assert training_of(without)["source of the data"] is None


# ---- what has changed ----------------------------------------------------------------------------------------

SHIFTED = {"train": 1, "val": 2}


def write_bytes(folder: Path, seeds: dict[str, int] | None = None, tokens: int = 4000) -> Path:
    """A data folder of random bytes, without meta.json, as in nanoGPT."""
    folder.mkdir(exist_ok=True)
    chars = {i: chr(i + 40) for i in range(64)}
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 64, "itos": chars}))
    for split, seed in ({"train": 0, "val": 0} | (seeds or {})).items():
        np.random.default_rng(seed).integers(0, 64, tokens).astype(np.uint16).tofile(folder / f"{split}.bin")
    return folder


@pytest.fixture(scope="module")
def half(tmp_path_factory) -> Path:
    """A folder with data, and with out/, which holds the first half of a run."""
    folder = tmp_path_factory.mktemp("half")
    main(tiny(write_bytes(folder / "data"), folder / "out", max_iters=4, lr_decay_iters=6, dropout=0.1))
    return folder


@pytest.fixture
def out(half, tmp_path) -> Path:
    """A copy of the first half's folder, to go on in."""
    return Path(shutil.copytree(half / "out", tmp_path / "out"))


def second_half(half: Path, out_dir: Path, **settings: Any) -> TrainConfig:
    usual = {"lr_decay_iters": 6, "dropout": 0.1, "init_from": "resume"}
    return tiny(half / "data", out_dir, **usual | settings)


# What is changed, and the names and values that the error has.
MATTERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "batch_size": (8, ("sequences per step: 4 before, 8 now", "windows per evaluation: 8 before, 16 now")),
    "seed": (1, ("seed: 1,337 before, 1 now",)),
    "dropout": (0.2, ("dropout: 0.1 before, 0.2 now",)),
    "weight_decay": (0.0, ("weight_decay: 0.1 before, 0.0 now",)),
    "beta2": (0.99, ("beta2: 0.95 before, 0.99 now",)),
    "grad_clip": (2.0, ("grad_clip: 1.0 before, 2.0 now",)),
    "eval_iters": (3, ("windows per evaluation: 8 before, 12 now",)),
    "lr_decay_iters": (7, ("learning rate at step 3", "lr_decay_iters")),
    "warmup_iters": (0, ("learning rate at step 0", "warmup_iters")),
    "learning_rate": (1e-3, ("learning rate at step ", "learning_rate")),
    "dataset": ("other", ("train data, ", "val data, ")),
}


def test_change_of_what_is_learned_or_compared_is_refused_and_changes_no_file(half, tmp_path):
    out = half / "out"
    before = contents(out)
    for name, (value, named) in MATTERS.items():
        new = str(write_bytes(tmp_path / "other", SHIFTED)) if name == "dataset" else value
        with pytest.raises(ValueError, match="another experiment") as e:
            main(second_half(half, out, **{name: new}))
        assert_one_line(e.value, out, *named, "--resume_changed=True", f"--init_from={out}")
    assert contents(out) == before


@pytest.mark.slow
def test_best_losses_of_other_val_data_are_not_compared(half, out, tmp_path, capsys):
    """The first evaluation, of the weights at the start, is the best."""
    best = (out / "ckpt_best.pt").read_bytes()
    store.save(replace(store.load(out), best_val_loss=0.5), out, best=False)  # which this data never has
    other = write_bytes(tmp_path / "other", {"val": 3})
    c = second_half(half, out, dataset=str(other), resume_changed=True, eval_interval=4)
    main(c)
    printed = capsys.readouterr().out
    changed = re.findall("^changed: (.*?)[,:] ", printed, re.M)
    assert "val data" in changed
    assert "train data" not in changed
    aside = out / "previous-1" / "ckpt_best.pt"
    assert str(aside.parent) in printed
    assert aside.read_bytes() == best
    assert store.load(out / "ckpt_best.pt").best_val_loss > 0.5
    evaluations = (store.load(out).progress or {})["evaluations"]
    assert [step for step, *_ in evaluations] == [4, 6]
    main(replace(c, resume_changed=False))  # from now on it is this data's run
    assert "changed" not in capsys.readouterr().out


@pytest.mark.slow
def test_meta_jsons_checksums_tell_data_apart_that_begin_alike(tmp_path):
    ids = (np.arange(FINGERPRINTED + 1000) % 256).astype(np.uint16)
    for end in (0, 1):
        ids[-1] = end
        write_dataset(tmp_path / str(end), {"train": ids, "val": ids[:500]}, BytesTokenizer(), "x")
    main(tiny(tmp_path / "0", tmp_path / "out", max_iters=2))
    c = tiny(tmp_path / "1", tmp_path / "out", init_from="resume", max_iters=2)
    with pytest.raises(ValueError, match="another experiment: train data, sha256"):
        main(c)
    path = tmp_path / "1" / "meta.json"
    meta = json.loads(path.read_text())
    del meta["sha256"], meta["files"]  # without a list of checksums, only the beginning is known
    path.write_text(json.dumps(meta))
    main(c)


def test_other_code_and_another_variant_are_printed_and_the_run_resumes(half, out, capsys):
    saved = store.load(out)
    earlier = {"code": "0123456789ab", "versions": saved.metadata["versions"] | {"torch": "1.0"}}  # type: ignore[index]
    store.save(replace(saved, metadata=saved.metadata | earlier), out, best=False)  # type: ignore[operator]
    main(second_half(half, out, max_iters=4, dtype="bfloat16"))
    lines = re.findall("^changed: .*", capsys.readouterr().out, re.M)
    if git_commit():
        assert_one_line(lines.pop(0), "code", "0123456789ab")
    versions, variant = lines
    assert_one_line(versions, "torch: 1.0 before", f"{torch.__version__} now")
    assert_one_line(variant, "float32", "bfloat16")


def test_permission_for_a_change_is_not_saved_and_a_new_micro_batch_keeps_the_evaluation(half, out):
    main(second_half(half, out, seed=5, resume_changed=True, max_iters=5))
    argv = ["--init_from=resume", f"--out_dir={out}"]
    split = ["--batch_size=2", "--gradient_accumulation_steps=2"]
    assert resumed_settings(TrainConfig, argv, str(out))["resume_changed"] is False
    for more, eval_tokens in (([], 0), (split, 2 * 4 * 16), ([*split, "--eval_iters=3"], 0)):
        assert resumed_settings(TrainConfig, [*argv, *more], str(out))["eval_tokens"] == eval_tokens


# ---- a new run with a checkpoint's weights -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", "ckpt_best.pt"])
def test_run_begins_with_a_checkpoints_weights_and_nothing_else_of_it(name, half, tmp_path):
    source = half / "out" / name
    other = write_bytes(tmp_path / "other", SHIFTED)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"out_dir": "{half}/out/../out"}, ("--out_dir", "--init_from=resume")),
        ({"n_layer": 3}, ("n_layer=3", "n_layer=2: use --n_layer=2")),
        ({"block_size": 32}, ("block_size=32", "16")),
        ({"dataset": "{tmp}/bytes"}, ("256", "tokenizer bytes", "64")),
    ],
)
def test_new_run_that_does_not_fit_the_checkpoint_is_refused(half, tmp_path, settings, named):
    ids = np.arange(4000, dtype=np.uint16) % 256
    write_dataset(tmp_path / "bytes", {"train": ids, "val": ids}, BytesTokenizer(), "x")
    settings = {k: v.format(half=half, tmp=tmp_path) if isinstance(v, str) else v for k, v in settings.items()}
    with pytest.raises(ValueError, match="=") as e:
        main(replace(tiny(half / "data", tmp_path / "out", init_from=str(half / "out" / "ckpt.pt")), **settings))
    assert_one_line(e.value, *named)
    assert not (tmp_path / "out").exists()
