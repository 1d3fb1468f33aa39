"""Numbers that go bad: gradients, spikes, evaluations that no longer improve, and losses outside of
the usual band.
"""

import json
import math
import os
import random
import re
import shlex
import statistics
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import (
    POSIX,
    ROOT,
    TINY,
    assert_one_line,
    events,
    flags,
    logged,
    raises_one_line,
    run_tiny,
    slow,
    tiny,
)
from gloo import run
from hypothesis import given
from hypothesis import strategies as st

import train
from configurator import read_settings
from data.batches import Split
from deskgpt import loss_bands
from deskgpt.checkpoint import load_checkpoint
from deskgpt.evaluation import EvalRecord, without_improvement
from deskgpt.loss_bands import band_sentence
from deskgpt.monitor import LossMonitor
from deskgpt.train_state import SpikeDetector
from train import TrainConfig, main

BAD = "transformer.h.1.mlp.c_fc.weight"


@pytest.fixture
def faults(monkeypatch):
    """Return which micro-batches have a NaN in their gradients, which the test sets, and the number
    of all so far.
    """
    found = SimpleNamespace(bad=(), passes=0)
    build_optimizer = train.build_optimizer

    def spoil(gradient):
        found.passes += 1
        # Of two ranks, on one
        is_bad = found.passes - 1 in found.bad and os.environ.get("RANK") != "0"
        return gradient.index_fill(0, torch.tensor([0]), math.nan) if is_bad else gradient

    def with_hook(config, model, dtype):
        model.get_parameter(BAD).register_hook(spoil)
        return build_optimizer(config, model, dtype)

    monkeypatch.setattr(train, "build_optimizer", with_hook)
    return found


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=[slow, POSIX])])
def test_step_with_a_bad_gradient_is_skipped_and_logged_with_its_loss_and_windows(
    world, chars, tmp_path, faults, capfd
):
    """One of its two micro-batches, of two ranks one each, has it; so the loss is their mean."""
    c = tiny(chars, tmp_path, batch_size=2, gradient_accumulation_steps=2)
    faults.bad = (4 // world,)
    run(world, c)
    assert capfd.readouterr().out.count("gradients are not finite") == 1
    [bad] = events(tmp_path, "bad_step")
    assert_one_line(bad["which"], BAD, "1 of 15")
    assert (bad["iter"], bad["rows"]) == (2, [8, 11])
    assert bad["loss"] == pytest.approx(logged(tmp_path, "iter", "loss")[2])
    tokens = np.fromfile(chars / "train.bin", np.uint16)
    [begins] = bad["windows"].values()
    windows = [tokens[begin : begin + 16] for begin in begins]
    expected = Split(chars, "train", 16, 256, c.seed).train_batch(np.arange(8, 12))[0]
    assert np.array_equal(windows, expected)
    saved = load_checkpoint(tmp_path)
    assert saved.iter_num == 6
    assert {int(s["step"]) for s in saved.optimizer["state"].values()} == {5}


@pytest.mark.parametrize("first_bad", [0, 5])
def test_bad_steps_in_a_row_end_a_run_and_leave_its_last_good_checkpoint(
    chars, tmp_path, faults, first_bad
):
    faults.bad = range(first_bad, 100)
    named = ["no checkpoint was saved yet", "not the learning rate"]
    if first_bad:
        faults.bad = (1, 3, *faults.bad)  # these two are not in a row
        named = [str(tmp_path), "step 5", "a lower --learning_rate"]
    with raises_one_line(f"{first_bad} to {first_bad + 9}", "float32", BAD, "1 of 15", *named):
        run_tiny(chars, tmp_path, max_iters=30, eval_interval=1)
    assert faults.passes == first_bad + 10
    # None of the last bad steps
    assert max(logged(tmp_path, "save"), default=0) <= first_bad


def test_overflow_of_float16_counts_only_below_a_loss_scale_of_1(chars, tmp_path, faults):
    faults.bad = range(2, 100)
    with raises_one_line("19 to 28", "float16", "loss scale 0."):
        run_tiny(chars, tmp_path, dtype="float16", max_iters=60, eval_interval=60)


@given(st.integers(0, 2**32), st.floats(0.01, 0.5), st.floats(0.0, 3.0))
def test_noise_and_a_falling_loss_are_not_spikes_and_a_sudden_rise_is_one(seed, noise, fall):
    draw = random.Random(seed)
    detector = SpikeDetector()
    losses = [2.0 + fall * math.exp(-step / 30) + draw.gauss(0, noise) for step in range(300)]
    assert all(detector.add(loss) is None for loss in losses)
    assert detector.add(math.nan) is None  # its gradients are bad
    risen = draw.choice([2.0 + 20 * noise + 0.5, math.inf])
    assert detector.add(risen) == statistics.median(losses[-100:])
    assert all(detector.add(9.0) is None for _ in range(50))  # it is reported once


@slow
@pytest.mark.parametrize(("on_spike", "saved"), [("go", 60), ("stop", 40)])
def test_spike_is_logged_and_on_spike_says_whether_the_run_ends(
    on_spike, saved, chars, tmp_path, monkeypatch, capsys
):
    add = LossMonitor.add
    monkeypatch.setattr(
        LossMonitor,
        "add",
        lambda self, step, loss, *norms: add(self, step, loss + 5 * (step == 45), *norms),
    )
    settings = {"max_iters": 60, "eval_interval": 20, "log_interval": 4, "learning_rate": 1e-3}
    named = ("on_spike=stop", "step 45", tmp_path, "step 40")
    with raises_one_line(*named) if on_spike == "stop" else nullcontext():
        run_tiny(chars, tmp_path, on_spike=on_spike, **settings)
    [spike] = events(tmp_path, "spike")
    assert (spike["iter"], spike["rows"]) == (45, [180, 183])
    assert spike["loss"] > spike["median"] + 4
    assert "step 45: loss spike, " in capsys.readouterr().out
    assert load_checkpoint(tmp_path).iter_num == saved


def test_improvement_must_exceed_the_standard_error_and_small_ones_add_up():
    losses = [3.0, 2.95, 2.92, 2.89]
    records = [EvalRecord(i, 0.0, loss, 0.1) for i, loss in enumerate(losses)]
    assert [without_improvement(records[:n]) for n in (1, 2, 3, 4)] == [0, 1, 2, 0]
    assert without_improvement([r._replace(standard_error=None) for r in records]) == 0


@slow
def test_patience_ends_a_run_and_a_resumed_one_continues_counting(chars, tmp_path, capsys):
    flat = {"learning_rate": 0.0, "min_lr": 0.0, "eval_interval": 5, "patience": 3}
    c = tiny(chars, tmp_path, max_iters=10, **flat)
    main(c)
    main(replace(c, init_from="resume", max_iters=30))
    assert logged(tmp_path, "eval") == [0, 5, 10, 10, 15]
    assert load_checkpoint(tmp_path).iter_num == 15
    out = capsys.readouterr().out
    assert "stopped by patience at step 15\n" in out
    # With the same patience nothing would be left to do.
    assert re.search(r"^resume: .*(\\\n.*)* --patience=0$", out, re.M)


@slow
def test_end_of_a_run_prints_commands_that_work(chars, tmp_path, script):
    out_dir = tmp_path / "my first run"
    done = script("train.py", *flags(**TINY, dataset=chars, out_dir=out_dir))
    assert re.search(r"^6 steps: .*\n.*\nbest val loss \d\.\d{4}$", done.out, re.M)
    commands = {
        name: shlex.split(line)
        for name, line in re.findall(
            r"^(\w[\w ]+): +\S*python3? (.*)$", done.out.replace(" \\\n   ", ""), re.M
        )
    }
    assert list(commands) == ["sample", "page", "train longer", "report", "compare"]
    del commands["page"]  # it serves until it is stopped
    commands["sample"] += ["--num_samples=1", "--max_new_tokens=3", "--device=cpu"]
    commands["compare"][-1] = out_dir
    for command in commands.values():
        ended = script(*command)
        assert ended.code == 0, ended.err
    assert logged(out_dir, "iter") == [*range(12)]
    assert load_checkpoint(out_dir).iter_num == 12


# ---- the band of runs that differ only in their seed ---------------------------------------------


@slow
def test_end_of_a_run_says_whether_its_losses_are_those_of_other_seeds(
    chars, tmp_path, capfd, monkeypatch
):
    monkeypatch.setattr(loss_bands, "FOLDER", tmp_path)
    out = tmp_path / "out"
    c = tiny(chars, out, learning_rate=1e-3, max_iters=20, eval_interval=10)
    main(c)
    assert "as usual" not in capfd.readouterr().out  # nothing is known yet
    [start] = events(out, "start")
    data = (start["val_sha256"], start["train_tokens"])
    key = loss_bands.seed_invariant_key(start["settings"], *data)
    losses = {e["iter"]: [e["val_loss"]] * 8 for e in events(out, "eval")}
    (tmp_path / "tiny.json").write_text(json.dumps({"experiment": key, "val_losses": losses}))
    # Of the same batch
    main(replace(c, batch_size=2, gradient_accumulation_steps=2, eval_iters=4))
    assert re.search(r"^as usual: .* at step 20,", capfd.readouterr().out, re.M)
    main(replace(c, learning_rate=3e-3))  # another experiment
    assert "usual" not in capfd.readouterr().out


def test_band_has_a_width_although_all_seeds_begin_at_one_loss_and_says_nothing_of_other_steps():
    sentence = partial(band_sentence, {0: [4.1, 4.1], 2: [4.1, 4.1]})
    assert sentence({2: 4.1005}).startswith("as usual:")
    assert sentence({2: math.nan}).startswith("unusual:")
    assert sentence({0: math.nan}).startswith("unusual:")
    assert sentence({0: 4.1005}) == sentence({5: 1.0}) == ""  # random weights say nothing yet
    assert "at step 0," in sentence({0: 9.0, 2: 4.1})  # where it first left the band


def test_kept_bands_are_those_of_the_shipped_configs():
    """Where a config has changed: remove its band, or write the losses of eight new runs in it."""
    for path in (ROOT / "config/loss_bands").iterdir():
        record = json.loads(path.read_text())
        settings = read_settings(TrainConfig, [f"{ROOT}/config/{path.stem}.py"])
        experiment = record["experiment"]
        data = (experiment["val_sha256"], experiment["train_tokens"])
        assert experiment == loss_bands.seed_invariant_key(settings, *data), path
        assert len(record["seeds"]) >= 8
