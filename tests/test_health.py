from __future__ import annotations

import itertools
import math
import os
import random
import re
import shlex
import statistics

import numpy as np
import pytest
import torch
from conftest import TINY, assert_equal, assert_one_line, events, flags, tiny
from gloo import run
from hypothesis import given
from hypothesis import strategies as st

import train
from data.loader import Loader
from data.splits import Split
from deskgpt.checkpoint import store
from deskgpt.run.diagnosis import EvalRecord, SpikeDetector, without_improvement
from deskgpt.run.health import Health
from deskgpt.run.init_state import InitState
from train import main

# ---- planting what goes wrong --------------------------------------------------------------------------------


BAD = "transformer.h.1.mlp.c_fc.weight"


class Plant:
    """Goes wrong in steps of a run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bad_gradients: range | tuple[int, ...] = ()  # at which steps
        self.leaps: range | tuple[int, ...] = ()  # at which batches, when they come again, too
        self.batches: list[torch.Tensor] = []  # those trained on
        step, build_model, record = Loader.step, InitState.build_model, Health.record

        def noted(loader):
            for batch in step(loader):
                self.batches.append(batch.x)
                yield batch

        def spoil(gradient):
            gradient = gradient.clone()
            if len(self.batches) - 1 in self.bad_gradients:
                gradient[0, 0] = math.nan
            return gradient

        def spoiled(init, *args):
            model = build_model(init, *args)
            model.get_parameter(BAD).register_hook(spoil)
            return model

        def leapt(health, at, loss, *norms):
            record(health, at, loss + 5 * (health.state.position in self.leaps), *norms)

        monkeypatch.setattr(Loader, "step", noted)
        monkeypatch.setattr(InitState, "build_model", spoiled)
        monkeypatch.setattr(Health, "record", leapt)


@pytest.fixture
def plant(monkeypatch):
    return Plant(monkeypatch)


# ---- gradients -----------------------------------------------------------------------------------------------


def test_step_with_a_bad_gradient_is_skipped_and_logged_with_its_windows(chars, tmp_path, plant):
    plant.bad_gradients = (2,)
    main(tiny(chars, tmp_path))
    [bad] = events(tmp_path, "bad_step")
    assert bad["iter"] == 2
    assert_one_line(bad["which"], BAD, "1 of 15")
    assert bad["rows"] == [8, 11]
    tokens = np.fromfile(chars / "train.bin", np.uint16)
    [begins] = bad["windows"].values()
    windows = np.stack([tokens[begin : begin + 16] for begin in begins])
    assert np.array_equal(windows, plant.batches[2].numpy())
    saved = store.load(tmp_path)
    assert saved.iter_num == 6
    assert {int(s["step"]) for s in saved.optimizer["state"].values()} == {5}
    assert events(tmp_path, "end")[0]["bad_steps"] == 1


@pytest.mark.parametrize("first_bad", [0, 5])
def test_bad_steps_in_a_row_end_a_run_with_evidence_and_checkpoint(chars, tmp_path, plant, first_bad):
    plant.bad_gradients = range(first_bad, 100)
    if first_bad:
        plant.bad_gradients = (1, 3, *plant.bad_gradients)  # these two are not in a row
    with pytest.raises(ValueError, match="gradients are not finite") as e:
        main(tiny(chars, tmp_path, max_iters=30, eval_interval=1))
    known = ["no checkpoint was saved yet", "not the learning rate"]
    if first_bad:
        known = [f"{tmp_path / 'ckpt.pt'}", "step 5", "a lower --learning_rate"]
    assert_one_line(e.value, f"{first_bad} to {first_bad + 9}", "float32", BAD, "1 of 15", *known)
    assert len(plant.batches) == first_bad + 10
    assert all(e["iter"] <= first_bad for e in events(tmp_path, "save"))  # none of the last bad steps


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_run_whose_loss_is_no_number_keeps_the_last_good_checkpoint(dtype, chars, tmp_path):
    """Broken weights can have a finite val loss in 16 bits."""
    main(tiny(chars, tmp_path, dtype=dtype, max_iters=3))
    before = (tmp_path / "ckpt.pt").read_bytes()
    changed = {"max_iters": 40, "learning_rate": 1e30, "resume_changed": True}
    with pytest.raises(ValueError, match="step 3|the checkpoint before it is intact"):
        main(tiny(chars, tmp_path, dtype=dtype, init_from="resume", **changed))
    assert (tmp_path / "ckpt.pt").read_bytes() == before


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs fork")
def test_bad_gradient_on_one_of_two_ranks_is_skipped_by_both(chars, tmp_path, monkeypatch, capfd):
    named_losses = train.named_losses
    passes = itertools.count()

    def spoiled(logits, loss):
        is_bad = next(passes) == 2 and os.environ["RANK"] == "1"
        return named_losses(logits, loss * (math.nan if is_bad else 1))

    monkeypatch.setattr(train, "named_losses", spoiled)
    run(2, tiny(chars, tmp_path, gradient_accumulation_steps=2))
    assert capfd.readouterr().out.count("gradients are not finite") == 1
    [bad] = events(tmp_path, "bad_step")
    assert bad["iter"] == 2
    assert_one_line(bad["which"], "15 of 15")
    saved = store.load(tmp_path)
    assert all(w.isfinite().all() for w in saved.model.values())
    assert {int(s["step"]) for s in saved.optimizer["state"].values()} == {5}


@pytest.mark.slow
def test_overflow_of_float16_counts_only_below_a_loss_scale_of_1(chars, tmp_path, plant):
    plant.bad_gradients = range(2, 100)
    with pytest.raises(ValueError, match="gradients are not finite") as e:
        main(tiny(chars, tmp_path, dtype="float16", max_iters=60, eval_interval=60))
    assert_one_line(e.value, "19 to 28", "float16", "loss scale 0.")


# ---- spikes --------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.floats(0.01, 0.5), st.floats(0.0, 3.0))
def test_noise_and_a_falling_loss_are_no_spikes_and_a_leap_is_one(seed, noise, fall):
    draw = random.Random(seed)
    detector = SpikeDetector()
    losses = [2.0 + fall * math.exp(-step / 30) + draw.gauss(0, noise) for step in range(300)]
    assert all(detector.add(loss) is None for loss in losses)
    assert detector.add(math.nan) is None  # its gradients are bad
    leapt = draw.choice([2.0 + 20 * noise + 0.5, math.inf])
    assert detector.add(leapt) == statistics.median(losses[-100:])
    assert all(detector.add(9.0) is None for _ in range(50))  # it has been said


SPIKED = {"max_iters": 60, "eval_interval": 20, "log_interval": 4, "learning_rate": 1e-3}


@pytest.mark.slow
def test_spike_is_logged_and_the_run_continues_without_a_checkpoint_to_return_to(chars, tmp_path, plant, capsys):
    plant.leaps = (45,)
    main(tiny(chars, tmp_path, **SPIKED | {"on_spike": "rewind", "eval_interval": 1000}))
    [spike] = events(tmp_path, "spike")
    assert (spike["iter"], spike["rows"]) == (45, [180, 183])
    assert spike["loss"] > spike["median"] + 4
    assert "step 45: loss spike, " in capsys.readouterr().out
    assert store.load(tmp_path).iter_num == 60
    assert events(tmp_path, "end")[0]["spikes"] == 1
    assert not events(tmp_path, "rewind")


@pytest.mark.slow
def test_spike_ends_the_run_where_it_should(chars, tmp_path, plant, script):
    plant.leaps = (45,)
    done = script("train.py", *flags(**TINY | SPIKED | {"on_spike": "stop"}, dataset=chars, out_dir=tmp_path))
    assert done.code == 1
    assert_one_line(done.err, "error: on_spike=stop", "step 45", tmp_path / "ckpt.pt", "step 40")
    assert store.load(tmp_path).iter_num == 40


@pytest.mark.slow
def test_rewind_continues_after_the_spikes_batch_and_a_resumed_run_does_too(chars, tmp_path, plant):
    plant.leaps = (45,)
    settings = SPIKED | {"on_spike": "rewind", "eval_interval": 10, "lr_decay_iters": 60}
    main(tiny(chars, tmp_path / "whole", **settings))
    [back] = events(tmp_path / "whole", "rewind")
    assert (back["iter"], back["spike"], back["skipped_batches"]) == (40, 45, 6)
    after_spike, _ = Split(chars, "train", 16, 1 << 16, 1337).train_batch(46, np.arange(4), 4)
    assert np.array_equal(plant.batches[-20], after_spike)  # what step 40 trained on
    main(tiny(chars, tmp_path / "halves", **settings | {"max_iters": 50}))
    main(tiny(chars, tmp_path / "halves", init_from="resume", **settings))
    assert len(events(tmp_path / "halves", "rewind")) == 1
    whole = store.load(tmp_path / "whole")
    halves = store.load(tmp_path / "halves")
    assert_equal(whole.model, halves.model)
    assert_equal(whole.optimizer, halves.optimizer)
    assert {int(s["step"]) for s in whole.optimizer["state"].values()} == {whole.iter_num} == {60}


@pytest.mark.slow
def test_spikes_that_other_batches_do_not_avoid_end_the_run(chars, tmp_path, plant):
    plant.leaps = range(45, 10**6)
    with pytest.raises(ValueError, match="5 times back to step 40"):
        main(tiny(chars, tmp_path, on_spike="rewind", **SPIKED))
    assert [e["iter"] for e in events(tmp_path, "rewind")] == [40] * 5


# ---- evaluations ---------------------------------------------------------------------------------------------


def test_improvement_must_exceed_the_standard_error_and_small_ones_add_up():
    def count(*val_losses: float, error: float | None = 0.1) -> int:
        return without_improvement([EvalRecord(i, 0.0, loss, error) for i, loss in enumerate(val_losses)])

    assert count(3.0, 2.0, 1.0) == 0
    assert count(3.0, 2.95, 2.92) == 2
    assert count(3.0, 2.95, 2.92, 2.89) == 0
    assert count(3.0, 3.5, 2.95, error=None) == 0


@pytest.mark.slow
def test_patience_ends_a_run_and_a_resumed_one_continues_counting(chars, tmp_path, capsys):
    flat = {"learning_rate": 0.0, "min_lr": 0.0, "max_iters": 30, "eval_interval": 5}
    main(tiny(chars, tmp_path / "whole", patience=3, **flat))
    assert [e["iter"] for e in events(tmp_path / "whole", "eval")] == [0, 5, 10, 15]
    assert store.load(tmp_path / "whole").iter_num == 15
    out = capsys.readouterr().out
    assert re.search("^patience=3: ", out, re.M)
    assert "--max_iters" not in out
    assert re.search(r"^resume: .* --patience=0$", out, re.M)  # with the same patience nothing would be left to do
    main(tiny(chars, tmp_path / "halves", patience=3, **flat | {"max_iters": 10}))
    main(tiny(chars, tmp_path / "halves", patience=3, init_from="resume", **flat))
    assert [e["iter"] for e in events(tmp_path / "halves", "eval")] == [0, 5, 10, 10, 15]


# ---- the end -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_end_of_a_run_gives_commands_that_work(chars, tmp_path, script):
    out_dir = tmp_path / "my first run"
    done = script("train.py", *flags(**TINY, dataset=chars, out_dir=out_dir))
    assert re.search(r"^6 steps: .*; best val loss \d\.\d{4}$", done.out, re.M)
    assert f"best model of step 6: {out_dir / 'ckpt_best.pt'}\n" in done.out
    commands = {name: shlex.split(line) for name, line in re.findall(r"^(\w[\w ]+): +python (.*)$", done.out, re.M)}
    assert list(commands) == ["sample", "resume", "report", "compare"]
    why = r"^resume: .* --resume_changed=True\n +.*--resume_changed=True turns off the check"
    assert re.search(why, done.out, re.M)
    commands["sample"] += ["--num_samples=1", "--max_new_tokens=3", "--device=cpu"]
    commands["compare"][-1] = out_dir
    for command in commands.values():
        ended = script(*command)
        assert ended.code == 0, ended.err
    assert store.load(out_dir).iter_num == 12
