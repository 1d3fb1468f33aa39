"""Numbers that go bad: gradients, spikes, evaluations that no longer improve, and losses outside of
the usual band.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shlex
import statistics
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, assert_one_line, events, flags, raises_one_line, tiny
from gloo import run
from hypothesis import given
from hypothesis import strategies as st

import train
from configurator import read_settings
from data.batches import Loader
from deskgpt import loss_bands
from deskgpt.checkpoint import load_checkpoint
from deskgpt.loss_bands import band_sentence
from deskgpt.monitor import LossMonitor
from deskgpt.stopping import EvalRecord, without_improvement
from deskgpt.train_state import SpikeDetector
from train import TrainConfig, main

BAD = "transformer.h.1.mlp.c_fc.weight"


@pytest.fixture
def faults(monkeypatch) -> SimpleNamespace:
    """Return what goes wrong in a run, which the test sets, and the batches that were trained on so
    far.
    """
    # Steps with a NaN, batches with a higher loss.
    found = SimpleNamespace(bad_gradients=(), spikes=(), batches=[])
    step, build_optimizer, record = Loader.step, train.build_optimizer, LossMonitor.add

    def counted(loader):
        for batch in step(loader):
            found.batches.append(batch.x)
            yield batch

    def spoil(gradient):
        # Of two ranks, on one
        is_bad = len(found.batches) - 1 in found.bad_gradients and os.environ.get("RANK") != "0"
        return gradient.index_fill(0, torch.tensor([0]), math.nan) if is_bad else gradient

    def with_hook(config, model, dtype):
        model.get_parameter(BAD).register_hook(spoil)
        return build_optimizer(config, model, dtype)

    def record_spike(health, at, loss, *norms):
        record(health, at, loss + 5 * (health.state.step in found.spikes), *norms)

    monkeypatch.setattr(Loader, "step", counted)
    monkeypatch.setattr(train, "build_optimizer", with_hook)
    monkeypatch.setattr(LossMonitor, "add", record_spike)
    return found


def test_step_with_a_bad_gradient_is_skipped_and_logged_with_its_windows(chars, tmp_path, faults):
    faults.bad_gradients = (2,)
    main(tiny(chars, tmp_path))
    [bad] = events(tmp_path, "bad_step")
    assert bad["iter"] == 2
    assert_one_line(bad["which"], BAD, "1 of 15")
    assert bad["rows"] == [8, 11]
    tokens = np.fromfile(chars / "train.bin", np.uint16)
    [begins] = bad["windows"].values()
    windows = np.stack([tokens[begin : begin + 16] for begin in begins])
    assert np.array_equal(windows, faults.batches[2].numpy())
    saved = load_checkpoint(tmp_path)
    assert saved.iter_num == 6
    assert {int(s["step"]) for s in saved.optimizer["state"].values()} == {5}


@pytest.mark.parametrize("first_bad", [0, 5])
def test_bad_steps_in_a_row_end_a_run_and_leave_its_last_good_checkpoint(
    chars, tmp_path, faults, first_bad
):
    faults.bad_gradients = range(first_bad, 100)
    named = ["no checkpoint was saved yet", "not the learning rate"]
    if first_bad:
        faults.bad_gradients = (1, 3, *faults.bad_gradients)  # these two are not in a row
        named = [str(tmp_path), "step 5", "a lower --learning_rate"]
    with raises_one_line(f"{first_bad} to {first_bad + 9}", "float32", BAD, "1 of 15", *named):
        main(tiny(chars, tmp_path, max_iters=30, eval_interval=1))
    assert len(faults.batches) == first_bad + 10
    # None of the last bad steps
    assert all(e["iter"] <= first_bad for e in events(tmp_path, "save"))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_run_whose_loss_is_nan_keeps_the_last_good_checkpoint(dtype, chars, tmp_path):
    """Broken weights can have a finite val loss in 16 bits."""
    main(tiny(chars, tmp_path, dtype=dtype, max_iters=3))
    before = (tmp_path / "ckpt.pt").read_bytes()
    changed = {"max_iters": 40, "learning_rate": 1e30, "resume_changed": True}
    with pytest.raises(ValueError, match="step 3|the checkpoint before it is intact"):
        main(tiny(chars, tmp_path, dtype=dtype, init_from="resume", **changed))
    assert (tmp_path / "ckpt.pt").read_bytes() == before


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs fork")
def test_bad_gradient_on_one_of_two_ranks_is_skipped_by_both(chars, tmp_path, faults, capfd):
    faults.bad_gradients = (2,)
    run(2, tiny(chars, tmp_path, gradient_accumulation_steps=2))
    assert capfd.readouterr().out.count("gradients are not finite") == 1
    [bad] = events(tmp_path, "bad_step")
    assert (bad["iter"], bad["which"][:7]) == (2, "1 of 15")
    assert {int(s["step"]) for s in load_checkpoint(tmp_path).optimizer["state"].values()} == {5}


@pytest.mark.slow
def test_overflow_of_float16_counts_only_below_a_loss_scale_of_1(chars, tmp_path, faults):
    faults.bad_gradients = range(2, 100)
    with raises_one_line("19 to 28", "float16", "loss scale 0."):
        main(tiny(chars, tmp_path, dtype="float16", max_iters=60, eval_interval=60))


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


@pytest.mark.slow
def test_spike_is_logged_and_on_spike_says_whether_the_run_ends(chars, tmp_path, faults, capsys):
    faults.spikes = (45,)
    settings = {"max_iters": 60, "eval_interval": 20, "log_interval": 4, "learning_rate": 1e-3}
    main(tiny(chars, tmp_path / "go", **settings | {"eval_interval": 1000}))
    [spike] = events(tmp_path / "go", "spike")
    assert (spike["iter"], spike["rows"]) == (45, [180, 183])
    assert spike["loss"] > spike["median"] + 4
    assert "step 45: loss spike, " in capsys.readouterr().out
    assert load_checkpoint(tmp_path / "go").iter_num == 60
    faults.batches.clear()
    with raises_one_line("on_spike=stop", "step 45", tmp_path / "stop", "step 40"):
        main(tiny(chars, tmp_path / "stop", on_spike="stop", **settings))
    assert load_checkpoint(tmp_path / "stop").iter_num == 40


def test_improvement_must_exceed_the_standard_error_and_small_ones_add_up():
    losses = [3.0, 2.95, 2.92, 2.89]
    records = [EvalRecord(i, 0.0, loss, 0.1) for i, loss in enumerate(losses)]
    assert [without_improvement(records[:n]) for n in (1, 2, 3, 4)] == [0, 1, 2, 0]
    assert without_improvement([r._replace(standard_error=None) for r in records]) == 0


@pytest.mark.slow
def test_patience_ends_a_run_and_a_resumed_one_continues_counting(chars, tmp_path, capsys):
    flat = {"learning_rate": 0.0, "min_lr": 0.0, "max_iters": 30, "eval_interval": 5}
    main(tiny(chars, tmp_path / "full", patience=3, **flat))
    assert [e["iter"] for e in events(tmp_path / "full", "eval")] == [0, 5, 10, 15]
    assert load_checkpoint(tmp_path / "full").iter_num == 15
    out = capsys.readouterr().out
    assert "stopped by patience at step 15\n" in out
    # With the same patience nothing would be left to do.
    assert re.search(r"^resume: .* --patience=0$", out, re.M)
    main(tiny(chars, tmp_path / "halves", patience=3, **flat | {"max_iters": 10}))
    main(tiny(chars, tmp_path / "halves", patience=3, init_from="resume", **flat))
    assert [e["iter"] for e in events(tmp_path / "halves", "eval")] == [0, 5, 10, 10, 15]


def test_end_of_a_run_prints_commands_that_work(chars, tmp_path, script):
    out_dir = tmp_path / "my first run"
    done = script("train.py", *flags(**TINY, dataset=chars, out_dir=out_dir))
    assert re.search(r"^6 steps: .*\n.*\nbest val loss \d\.\d{4}$", done.out, re.M)
    commands = {
        name: shlex.split(line)
        for name, line in re.findall(r"^(\w[\w ]+): +python (.*)$", done.out, re.M)
    }
    assert list(commands) == ["sample", "page", "train longer", "report", "compare"]
    del commands["page"]  # it serves until it is stopped
    commands["sample"] += ["--num_samples=1", "--max_new_tokens=3", "--device=cpu"]
    commands["compare"][-1] = out_dir
    for command in commands.values():
        ended = script(*command)
        assert ended.code == 0, ended.err
    assert [e["iter"] for e in events(out_dir, "iter")] == list(range(12))
    assert load_checkpoint(out_dir).iter_num == 12


# ---- the band of runs that differ only in their seed ---------------------------------------------


@pytest.mark.slow
def test_end_of_a_run_says_whether_its_losses_are_those_of_other_seeds(
    chars, tmp_path, capfd, monkeypatch
):
    settings: dict[str, Any] = {
        "learning_rate": 1e-3,
        "max_iters": 20,
        "lr_decay_iters": 20,
        "eval_interval": 10,
    }
    monkeypatch.setattr(loss_bands, "FOLDER", tmp_path)
    main(tiny(chars, tmp_path / "0", **settings))
    start = events(tmp_path / "0", "start")[0]
    data = (start["val_sha256"], start["train_tokens"])
    assert "as usual" not in capfd.readouterr().out  # nothing is known yet
    found = {e["iter"]: [e["val_loss"]] * 8 for e in events(tmp_path / "0", "eval")}
    band = {
        "experiment": loss_bands.seed_invariant_key(start["settings"], *data),
        "val_losses": found,
    }
    (tmp_path / "tiny.json").write_text(json.dumps(band))
    for other in ({"learning_rate": 3e-3}, {"eval_iters": 4}):
        assert loss_bands.compare_with_bands(start["settings"] | other, data, {20: 3.0}) == ""
    assert loss_bands.compare_with_bands(start["settings"], ("other text", 7), {20: 3.0}) == ""
    # Of the same batch
    other_split = {"batch_size": 2, "gradient_accumulation_steps": 2, "eval_iters": 4}
    main(tiny(chars, tmp_path / "split", **settings | other_split))
    assert re.search(r"^as usual: .* at step 20,", capfd.readouterr().out, re.M)


def test_band_has_a_width_although_all_seeds_begin_at_one_loss_and_says_nothing_of_other_steps():
    band = {0: [4.1, 4.1], 2: [4.1, 4.1]}
    assert [band_sentence(band, {2: loss}).split(":")[0] for loss in (4.1005, math.nan)] == [
        "as usual",
        "unusual",
    ]
    assert band_sentence(band, {0: math.nan}).startswith("unusual")
    # Random weights say nothing yet
    assert band_sentence(band, {0: 4.1005}) == band_sentence(band, {5: 1.0}) == ""


@pytest.mark.parametrize(
    "path", [*(ROOT / "config/loss_bands").glob("*.json")], ids=lambda path: path.stem
)
def test_kept_bands_are_those_of_the_shipped_configs(path):
    record = json.loads(path.read_text())
    settings = read_settings(TrainConfig, [str(ROOT / "config" / f"{path.stem}.py")])
    data = (record["experiment"]["val_sha256"], record["experiment"]["train_tokens"])
    remedy = (
        f"the config has changed: remove {path.name}, or write the losses of eight new runs in it"
    )
    assert record["experiment"] == loss_bands.seed_invariant_key(settings, *data), remedy
    assert len(record["seeds"]) >= 8
