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
from conftest import ROOT, TINY, assert_equal, events, flags, tiny, trajectory, weights
from tiny_models import MODERN_SETTINGS
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import train
from data.token_files import write_dataset
from data.tokenizer import BytesTokenizer
from deskgpt.checkpoint import store
from deskgpt.machine.provenance import git_commit
from deskgpt.run.run import Run
from train import TrainConfig, main, resumed_settings

EXTENDED = ("--max_iters=8", "--lr_decay_iters=6")  # a run of TINY with two steps more, at the least learning rate
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
    a, b = (store.load(tmp_path / run) for run in ("whole", "halves"))
    for key in ("model", "optimizer", "scaler", "iter_num", "best_val_loss"):
        assert_equal(getattr(a, key), getattr(b, key))


def test_resumed_run_may_compute_activations_again_and_is_bit_identical(chars, tmp_path):
    options = {"lr_decay_iters": 6, "dropout": 0.3, "dtype": "bfloat16"}
    main(tiny(chars, tmp_path / "whole", **options))
    main(tiny(chars, tmp_path / "halves", max_iters=3, activation_checkpoint="selective", **options))
    main(tiny(chars, tmp_path / "halves", init_from="resume", activation_checkpoint="full", **options))
    assert trajectory(tmp_path / "whole") == trajectory(tmp_path / "halves")
    a, b = (store.load(tmp_path / run) for run in ("whole", "halves"))
    assert_equal(a.model, b.model)
    assert a.model_args == b.model_args  # it is not part of the model


@pytest.mark.slow
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
    assert 0 < store.load(out_dir).iter_num < 60
    assert "iter 4: loss" in (tmp_path / "terminal").read_text()  # nothing printed waits in a buffer
    # The settings of the run are the checkpoint's: nothing has to be typed again.
    assert script("train.py", "--init_from=resume", f"--out_dir={out_dir}").code == 0
    assert trajectory(tmp_path / "whole") == trajectory(out_dir)
    assert_equal(weights(tmp_path / "whole"), weights(out_dir))


def test_float16_scaler_is_saved_and_restored(chars, tmp_path):
    main(tiny(chars, tmp_path, dtype="float16", max_iters=3))
    saved = store.load(tmp_path)
    assert saved.scaler is not None
    assert saved.scaler["scale"] > 0
    saved.scaler["scale"] = 128.0
    store.save(saved, tmp_path, best=False)
    main(tiny(chars, tmp_path, dtype="float16", init_from="resume"))
    scaler = store.load(tmp_path).scaler
    assert scaler is not None
    assert scaler["scale"] == 128.0
    assert scaler["_growth_tracker"] == 6


def keep_average(monkeypatch: pytest.MonkeyPatch, at: str) -> list[AveragedModel]:
    """An average of the weights in train.py, from the call of Run's method `at` on: the latest run's is the last."""
    averages: list[AveragedModel] = []
    method = getattr(Run, at)
    step = train.step_if_finite

    def begun(run: Run, *args: Any) -> None:
        method(run, *args)
        averages.append(AveragedModel(run.runner.model, multi_avg_fn=get_ema_multi_avg_fn(0.9)))
        run.keep("average", averages[-1])

        def step_and_average(*args: Any) -> None:
            step(*args)
            averages[-1].update_parameters(run.runner.model)

        monkeypatch.setattr(train, "step_if_finite", step_and_average)

    monkeypatch.setattr(Run, at, begun)
    return averages


@pytest.mark.parametrize("at", ["know", "resume"])  # before a resumed run has its state, and after
def test_what_a_run_keeps_is_saved_and_comes_back_bit_for_bit(chars, tmp_path, monkeypatch, at):
    averages = keep_average(monkeypatch, "know")
    main(tiny(chars, tmp_path / "whole", lr_decay_iters=6))
    main(tiny(chars, tmp_path / "halves", lr_decay_iters=6, max_iters=3))
    if at == "resume":
        monkeypatch.undo()
        averages += keep_average(monkeypatch, at)
    main(tiny(chars, tmp_path / "halves", lr_decay_iters=6, init_from="resume"))
    whole, halves = (store.load(tmp_path / run).parts for run in ("whole", "halves"))
    assert_equal(halves, whole)
    assert whole is not None
    assert whole["average"]["n_averaged"] == 6
    assert not torch.equal(whole["average"]["module.lm_head.weight"], weights(tmp_path / "whole")["lm_head.weight"])


@pytest.mark.parametrize("entry", [3, {}, {"n_averaged": "x"}, {"module.lm_head.weight": torch.zeros(2)}])
def test_kept_state_that_does_not_fit_is_refused_in_one_line(chars, tmp_path, monkeypatch, entry):
    keep_average(monkeypatch, "know")
    main(tiny(chars, tmp_path, max_iters=3))
    saved = store.load(tmp_path)
    store.save(replace(saved, parts={"average": entry}), tmp_path, best=False)
    with pytest.raises(ValueError, match=rf"^{tmp_path}: its average does not fit what the run keeps \(.+\)$"):
        main(tiny(chars, tmp_path, init_from="resume"))


def test_schedule_may_compute_with_numpy(chars, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "learning_rate", lambda c, step: np.interp(step, [0, 6], [1e-2, 1e-3]))
    main(tiny(chars, tmp_path))
    assert store.load(tmp_path).iter_num == 6


def test_run_that_is_over_only_evaluates_when_resumed(chars, tmp_path):
    main(tiny(chars, tmp_path))
    before = (tmp_path / "ckpt.pt").read_bytes()
    main(tiny(chars, tmp_path, init_from="resume"))
    assert (tmp_path / "ckpt.pt").read_bytes() == before
    assert [e["iter"] for e in events(tmp_path, "eval")] == [0, 3, 6, 6]


def test_run_goes_on_from_its_best_checkpoint_by_that_files_name(chars, tmp_path, script):
    main(tiny(chars, tmp_path))
    (tmp_path / "ckpt.pt").unlink()
    done = script("train.py", "--init_from=resume", f"--out_dir={tmp_path / 'ckpt_best.pt'}", *EXTENDED)
    assert done.code == 0, done.err
    assert store.load(tmp_path).iter_num == 8
    assert [e["iter"] for e in events(tmp_path, "eval")] == [0, 3, 6, 6, 8]


def test_config_file_of_another_size_resumes_a_run_of_this_size_as_in_nanogpt(chars, tmp_path, script):
    main(tiny(chars, tmp_path, bias=True))
    (tmp_path / "config.py").write_text("n_layer = 5\nbias = False\neval_interval = 4\n")
    resume = ["--init_from=resume", f"--out_dir={tmp_path}", *EXTENDED]
    done = script("train.py", tmp_path / "config.py", *resume)
    assert done.code == 0, done.err
    settings = events(tmp_path, "start")[1]["settings"]
    assert (settings["n_layer"], settings["bias"], settings["eval_interval"]) == (2, True, 4)


def test_settings_given_on_resume_win_over_the_checkpoints(chars, tmp_path, script):
    main(tiny(chars, tmp_path))
    resume = ["--init_from=resume", f"--out_dir={tmp_path}", "--resume_changed=True"]
    done = script("train.py", *resume, "--max_iters=8", "--learning_rate=1e-4")
    assert done.code == 0, done.err
    assert [e["lr"] for e in events(tmp_path, "iter")][-1] < 1e-4
    group = store.load(tmp_path).optimizer["param_groups"][0]
    assert group["betas"] == (0.9, 0.95)
    assert events(tmp_path, "start")[1]["settings"]["n_embd"] == TINY["n_embd"]


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


def second_half(half: Path, out_dir: Path, **settings: Any) -> TrainConfig:
    usual = {"lr_decay_iters": 6, "dropout": 0.1, "init_from": "resume"}
    return tiny(half / "data", out_dir, **usual | settings)


MATTERS = {
    "batch_size": (8, "sequences per step: 4 before, 8 now; windows per evaluation: 8 before, 16 now"),
    "seed": (1, "seed: 1,337 before, 1 now"),
    "dropout": (0.2, "dropout: 0.1 before, 0.2 now"),
    "weight_decay": (0.0, "weight_decay: 0.1 before, 0.0 now"),
    "beta2": (0.99, "beta2: 0.95 before, 0.99 now"),
    "grad_clip": (2.0, "grad_clip: 1.0 before, 2.0 now"),
    "eval_iters": (3, "windows per evaluation: 8 before, 12 now"),
    "lr_decay_iters": (7, r"learning rate at step 3: 0\.0086\d+ before, 0\.0091\d+ now; schedule: max_iters 4, lr"),
    "warmup_iters": (0, r"learning rate at step 0: 0\.00333333 before, 0\.01 now; schedule: max_iters 4, warmup_"),
    "learning_rate": (1e-3, r"learning rate at step \d: 0\.\d+ before, 0\.\d+ now; schedule: max_iters 4, learning_"),
    "dataset": ("other", "train data: fingerprint .* before, fingerprint .* now; val data: fingerprint .* before"),
}  # fmt: skip


@pytest.mark.parametrize("name", MATTERS)
def test_change_of_what_is_learned_or_compared_is_refused_and_changes_no_file(half, tmp_path, name):
    value, message = MATTERS[name]
    if name == "dataset":
        value = str(write_bytes(tmp_path / "other", SHIFTED))
    out = Path(shutil.copytree(half / "out", tmp_path / "out"))
    before = {path: path.read_bytes() for path in out.iterdir()}
    remedy = rf"\. Go on all the same with --resume_changed=True, or begin .*: --init_from={out}$"
    if name == "lr_decay_iters":
        remedy = r"\. --lr_decay_iters=6 keeps the schedule" + remedy
    with pytest.raises(ValueError, match=rf"^{out} is of another experiment: .*{message}.*{remedy}"):
        main(second_half(half, out, **{name: value}))
    assert {path: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize(
    "same", [{"batch_size": 2, "gradient_accumulation_steps": 2, "eval_iters": 4}, {"momentum": 0.5}]
)
def test_same_experiment_is_resumed_without_a_word(half, tmp_path, same, capsys):
    out = Path(shutil.copytree(half / "out", tmp_path / "out"))
    main(second_half(half, out, **same, max_iters=4))
    assert "changed" not in capsys.readouterr().out


def test_schedule_may_end_otherwise_while_its_past_stays(half, tmp_path, capsys):
    """As where a trapezoid is extended before its decay begins."""
    out = tmp_path / "out"
    main(tiny(half / "data", out, lr_schedule="trapezoid", cooldown_iters=2, max_iters=3, lr_decay_iters=6))
    schedule = {"lr_schedule": "trapezoid", "cooldown_iters": 3}
    main(tiny(half / "data", out, init_from="resume", max_iters=9, **schedule))
    said = "changed: schedule: max_iters 3, lr_decay_iters 6, cooldown_iters 2 before, "
    assert f"{said}max_iters 9, lr_decay_iters 0, cooldown_iters 3 now\n" in capsys.readouterr().out
    assert store.load(out).iter_num == 9


@pytest.mark.parametrize("interval", [3, 4])  # 4: the first evaluation, of the weights at the start, is the best
def test_best_losses_of_other_val_data_are_not_compared(half, tmp_path, capsys, interval):
    out = Path(shutil.copytree(half / "out", tmp_path / "out"))
    best = (out / "ckpt_best.pt").read_bytes()
    saved = store.load(out)
    store.save(replace(saved, best_val_loss=0.5), out, best=False)  # which this data never has
    other = write_bytes(tmp_path / "other", {"val": 3})
    c = second_half(half, out, dataset=str(other), resume_changed=True, eval_interval=interval)
    main(c)
    said = capsys.readouterr().out
    assert re.search(r"^changed: val data: fingerprint \w+ before, fingerprint \w+ now$", said, re.M)
    assert "train data" not in said
    assert f"ckpt_best.pt is now in {out / 'previous-1'}" in said
    assert (out / "previous-1" / "ckpt_best.pt").read_bytes() == best
    assert store.load(out / "ckpt_best.pt").best_val_loss > 0.5
    evaluations = (store.load(out).health or {})["evaluations"]
    assert [step for step, *_ in evaluations] == ([4, 6] if interval == 4 else [6])
    main(replace(c, resume_changed=False))  # from now on it is this data's run
    assert "changed" not in capsys.readouterr().out


def test_meta_jsons_checksums_tell_data_apart_that_begin_alike(tmp_path, monkeypatch):
    monkeypatch.setattr("data.splits.FINGERPRINTED", 100)
    ids = np.arange(4000, dtype=np.uint16) % 256
    for end in (0, 1):
        ids[-1] = end
        write_dataset(tmp_path / str(end), {"train": ids, "val": ids[:500]}, BytesTokenizer(), "x")
    main(tiny(tmp_path / "0", tmp_path / "out", max_iters=2))
    with pytest.raises(ValueError, match=r"experiment: train data: sha256 \w+ before, sha256 \w+ now\. Go on"):
        main(tiny(tmp_path / "1", tmp_path / "out", init_from="resume", max_iters=2))
    path = tmp_path / "1" / "meta.json"
    meta = json.loads(path.read_text())
    del meta["sha256"], meta["files"]  # without a list of checksums, only the beginning is known
    path.write_text(json.dumps(meta))
    main(tiny(tmp_path / "1", tmp_path / "out", init_from="resume", max_iters=2))


def test_older_checkpoints_know_how_many_tokens_there_were(half, tmp_path):
    out = Path(shutil.copytree(half / "out", tmp_path / "out"))
    store.save(replace(store.load(out), facts=None, train_tokens=3000), out, best=False)
    with pytest.raises(ValueError, match=r"experiment: train data: tokens 3,000 before, tokens 4,000 now\. Go on"):
        main(second_half(half, out))
    store.save(replace(store.load(out), facts=None, train_tokens=None), out, best=False)
    main(second_half(half, out, max_iters=4))  # nanoGPT's know nothing of their data


def test_facts_of_a_damaged_checkpoint_are_not_compared(half, tmp_path):
    out = Path(shutil.copytree(half / "out", tmp_path / "out"))
    damaged: list[Any] = [
        [],
        {"train data": [1], "code": {"a": 1}, "versions": 3},
        {"val data": {"tokens": None}, 3: 4},
    ]
    for facts in damaged:
        store.save(replace(store.load(out), facts=facts), out, best=False)
        main(second_half(half, out, max_iters=4))


def test_other_code_and_form_are_only_said(half, tmp_path, capsys):
    out = Path(shutil.copytree(half / "out", tmp_path / "out"))
    saved = store.load(out)
    earlier = {"code": "0123456789ab", "versions": saved.facts["versions"] | {"torch": "1.0"}}  # type: ignore[index]
    store.save(replace(saved, facts=saved.facts | earlier), out, best=False)  # type: ignore[operator]
    main(second_half(half, out, max_iters=4, dtype="bfloat16"))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed")]
    if git_commit():
        assert lines.pop(0).startswith("changed: code: 0123456789ab before, ")
    assert lines[0] == f"changed: versions: torch 1.0 before, torch {torch.__version__} now"
    assert re.fullmatch(r"changed: form: float32, .* before, bfloat16, .* now", lines[1])
    assert len(lines) == 2


def test_permission_for_a_change_is_not_saved_and_a_new_micro_batch_keeps_the_evaluation(half, tmp_path):
    out = Path(shutil.copytree(half / "out", tmp_path / "out"))
    main(second_half(half, out, seed=5, resume_changed=True, max_iters=5))
    argv = ["--init_from=resume", f"--out_dir={out}"]
    split = ["--batch_size=2", "--gradient_accumulation_steps=2"]
    assert resumed_settings(argv, str(out))["resume_changed"] is False
    assert resumed_settings(argv, str(out))["eval_tokens"] == 0
    assert resumed_settings([*argv, *split], str(out))["eval_tokens"] == 2 * 4 * 16
    assert resumed_settings([*argv, *split, "--eval_iters=3"], str(out))["eval_tokens"] == 0


def test_steps_past_max_iters_are_an_error(half, tmp_path):
    with pytest.raises(ValueError, match=r"out is at step 4, past max_iters=2: raise --max_iters"):
        main(second_half(half, half / "out", max_iters=2))


# ---- a new run with a checkpoint's weights -------------------------------------------------------------------


def test_run_begins_with_a_checkpoints_weights_and_nothing_else_of_it(half, tmp_path, script):
    other = write_bytes(tmp_path / "other", SHIFTED)
    own = [f"--out_dir={tmp_path / 'out'}", f"--dataset={other}", "--device=cpu", "--dtype=float32", "--compile=False"]
    own += ["--max_iters=0", "--eval_iters=2", "--batch_size=4", "--gradient_accumulation_steps=1", "--block_size=8"]
    before = {path: path.read_bytes() for path in (half / "out").iterdir()}
    for source in (half / "out", half / "out" / "ckpt_best.pt"):
        done = script("train.py", f"--init_from={source}", *own)
        assert done.code == 0, done.err
        assert "step 0: train loss" in done.out
        start = events(tmp_path / "out", "start")[0]
        assert (start["iter"], start["model_args"]["n_layer"], start["settings"]["block_size"]) == (0, 2, 8)
    main(tiny(other, tmp_path / "trained", init_from=str(half / "out"), max_iters=1, learning_rate=0.0))
    assert_equal(weights(tmp_path / "trained"), weights(half / "out"))
    saved = store.load(tmp_path / "trained")
    assert saved.iter_num == 1
    assert {int(s["step"]) for s in saved.optimizer["state"].values()} == {1}
    assert {path: path.read_bytes() for path in (half / "out").iterdir()} == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"out_dir": "same"},
            "is where the new run would write, too: choose another --out_dir, or .*--init_from=resume",
        ),
        ({"n_layer": 3}, "n_layer=3, but .* has n_layer=2: leave it out"),
        ({"block_size": 32}, "block_size=32 exceeds the model's 16"),
        ({"dataset": "bytes"}, r"vocabulary of 256 \(tokenizer bytes\), the model one of 64"),
    ],
)
def test_new_run_that_does_not_fit_the_checkpoint_is_refused(half, tmp_path, settings, message):
    if "dataset" in settings:
        ids = np.arange(4000, dtype=np.uint16) % 256
        write_dataset(tmp_path / "bytes", {"train": ids, "val": ids}, BytesTokenizer(), "x")
        settings = {"dataset": str(tmp_path / "bytes")}
    if "out_dir" in settings:
        settings = {"out_dir": str(half / "out" / ".." / "out")}
    c = tiny(half / "data", tmp_path / "out", init_from=str(half / "out" / "ckpt.pt"))
    before = (half / "out" / "ckpt.pt").read_bytes()
    with pytest.raises(ValueError, match=message):
        main(replace(c, **settings))
    assert (half / "out" / "ckpt.pt").read_bytes() == before
    assert not (tmp_path / "out").exists()
