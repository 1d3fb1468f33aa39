from __future__ import annotations

import math
import random
import re
import shlex
import statistics
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from conftest import TINY, TORCHRUN, assert_equal, events, flags, shell, tiny, trajectory, weights
from hypothesis import given
from hypothesis import strategies as st

from bench.analysis import learning
from bench.analysis.runs import Run
from data.splits import Split
from deskgpt.checkpoint import store
from deskgpt.compute.runner import Evaluation, Form, Runner
from deskgpt.run.diagnosis import (
    Evaluated,
    Evidence,
    SpikeWatch,
    advice,
    bad_parameters,
    clip_rate,
    overfit,
    without_improvement,
)
from deskgpt.run.health import Health
from deskgpt.run.start import StartingPoint
from deskgpt.run.stops import Due, Stops
from train import main

# ---- planting what goes wrong --------------------------------------------------------------------------------


class Plant:
    """Goes wrong in steps of a run: after their backward passes, `damage(runner, parts)` changes gradients or losses.

    parts: the losses, by name. A batch goes wrong again when it comes again.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.damage: Callable[[Runner, dict[str, torch.Tensor]], None] | None = None
        self.at: range | tuple[int, ...] = ()  # which micro-batches of the test
        self.batches: list[torch.Tensor] = []  # those trained on
        self.bad_batches: list[torch.Tensor] = []
        trained: tuple[torch.Tensor, dict[str, torch.Tensor]] | None = None  # what goes backward next
        forward = Runner.forward
        backward = Runner.backward

        def noted(runner, x, y, *args):
            nonlocal trained
            loss, parts = forward(runner, x, y, *args)
            trained = (x, parts) if len(args) == 2 else None  # trying out gives no weight
            return loss, parts

        def planted(runner, loss):
            backward(runner, loss)
            if trained is None:
                return
            x, parts = trained
            if len(self.batches) in self.at:
                self.bad_batches.append(x)
            self.batches.append(x)
            if self.damage is not None and any(torch.equal(x, bad) for bad in self.bad_batches):
                self.damage(runner, parts)

        monkeypatch.setattr(Runner, "forward", noted)
        monkeypatch.setattr(Runner, "backward", planted)


@pytest.fixture
def plant(monkeypatch):
    return Plant(monkeypatch)


def bad_gradient(runner, parts):
    runner.model.transformer.h[1].mlp.c_fc.weight.grad[0, 0] = math.nan


def leap(runner, parts):
    parts["loss"] = parts["loss"] + 5


# ---- gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"optimizer": "muon"}])
def test_step_with_a_bad_gradient_is_skipped_and_logged_with_its_windows(chars, tmp_path, plant, options):
    plant.damage = bad_gradient
    plant.at = (2,)
    main(tiny(chars, tmp_path, **options))
    [bad] = events(tmp_path, "bad_step")
    assert bad["iter"] == 2
    assert bad["which"] == "those of transformer.h.1.mlp.c_fc.weight, 1 of 15 parameters"
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
def test_bad_steps_in_a_row_end_a_run_with_evidence_and_checkpoint(chars, tmp_path, plant, monkeypatch, first_bad):
    plant.damage = bad_gradient
    plant.at = range(first_bad, 100)
    monkeypatch.setattr(Stops, "due", lambda stops, step, has_work: Due(stop=None, save=True))
    if first_bad:
        norms = r"gradient norms before: [^;]*, clipped in \d of the last 5 good steps"
        kept = re.escape(f"the last checkpoint is {tmp_path / 'ckpt.pt'} of step 5") + "[^;]*"
        remedy = "try a lower --learning_rate"
    else:
        norms = "no step before was good"
        kept = "no checkpoint was saved yet"
        remedy = "no update of this run came before, so it is not the learning rate: check .*"
    steps = rf"in 3 steps in a row, {first_bad} to {first_bad + 2} \(float32(, explicit attention)?, not compiled\)"
    which = r"those of transformer\.h\.1\.mlp\.c_fc\.weight, 1 of 15 parameters"
    with pytest.raises(ValueError, match=f"^gradients are not finite {steps}: {which}; {norms}; {kept}; {remedy}$"):
        main(tiny(chars, tmp_path, max_iters=20, eval_interval=20, max_bad_steps=3))
    assert len(plant.batches) == first_bad + 3
    assert all(e["iter"] <= first_bad for e in events(tmp_path, "save"))  # none of the bad steps


def test_bad_steps_that_are_not_in_a_row_do_not_end_a_run(chars, tmp_path, plant):
    plant.damage = bad_gradient
    plant.at = range(0, 20, 2)
    main(tiny(chars, tmp_path, max_iters=20, max_bad_steps=2))
    assert len(events(tmp_path, "bad_step")) == 10


def test_numbers_that_wait_on_the_device_until_a_log_line_say_the_same(chars, tmp_path, plant, monkeypatch):
    """As on CUDA, where asking at each step would wait for it."""
    plant.damage = bad_gradient
    plant.at = (3, 23)
    settings = {"max_iters": 20, "log_interval": 7, "eval_interval": 10, "grad_clip": 0.7}
    main(tiny(chars, tmp_path / "at-once", **settings))
    monkeypatch.setattr(Health, "is_full", False)
    main(tiny(chars, tmp_path / "later", **settings))
    for kind in ("bad_step", "iter", "eval"):
        at_once, later = (events(tmp_path / run, kind) for run in ("at-once", "later"))
        for name in ("iter", "loss", "grad_norm", "clip_rate", "rows", "windows", "val_loss"):
            assert [e.get(name) for e in at_once] == [e.get(name) for e in later], (kind, name)
    assert_equal(weights(tmp_path / "at-once"), weights(tmp_path / "later"))


def test_clip_rate_is_the_share_of_the_steps_since_the_last_log_line(chars, tmp_path):
    main(tiny(chars, tmp_path / "each", max_iters=12))
    norms = [e["grad_norm"] for e in events(tmp_path / "each", "iter")]
    clip = statistics.median(norms)
    main(tiny(chars, tmp_path / "all", max_iters=12, grad_clip=0))
    assert {e["clip_rate"] for e in events(tmp_path / "all", "iter")} == {None}
    assert [clip_rate(norms[i : i + 4], clip) for i in (0, 4)] == [
        sum(norm > clip for norm in norms[i : i + 4]) / 4 for i in (0, 4)
    ]
    main(tiny(chars, tmp_path / "some", max_iters=12, log_interval=4, grad_clip=1e-3))
    assert [e["clip_rate"] for e in events(tmp_path / "some", "iter")] == [1.0] * 4
    assert [e["iter"] for e in events(tmp_path / "some", "iter")] == [0, 4, 8, 11]


@pytest.mark.slow
def test_bad_gradient_on_one_of_two_ranks_is_skipped_by_both(chars, tmp_path):
    code = (
        "import math, os, sys\n"
        "sys.path.insert(0, '.')\n"
        "import train\n"
        "from configurator import build, read_settings\n"
        "from model import GPT\n"
        "forward = GPT.forward\n"
        "steps = []\n"
        "def spoiled(model, x, y=None):\n"
        "    logits, loss = forward(model, x, y)\n"
        "    if started and model.training:\n"
        "        steps.append(1)\n"
        "        loss = loss * (math.nan if len(steps) == 3 and os.environ['RANK'] == '1' else 1)\n"
        "    return logits, loss\n"
        "started = []\n"
        "take = train.Loader.step\n"
        "train.Loader.step = lambda loader: started.append(1) or take(loader)\n"
        "GPT.forward = spoiled\n"
        "train.main(build(train.TrainConfig, read_settings(train.TrainConfig, sys.argv[1:])))\n"
    )
    (tmp_path / "two.py").write_text(code)
    settings = TINY | {"gradient_accumulation_steps": 2, "dataset": chars, "out_dir": tmp_path / "out"}
    done = shell(*TORCHRUN[:-1], tmp_path / "two.py", *flags(**settings))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("gradients are not finite") == 1
    [bad] = events(tmp_path / "out", "bad_step")
    assert (bad["iter"], bad["which"], bad["loss"]) == (2, "those of all parameters", None)
    saved = store.load(tmp_path / "out")
    assert all(w.isfinite().all() for w in saved.model.values())
    assert {int(s["step"]) for s in saved.optimizer["state"].values()} == {5}


def test_advice_follows_from_the_evidence():
    low = Form("bfloat16", compiled=True)
    usual = "try a lower --learning_rate, then --compile=False, then --dtype=float32"
    assert advice(Evidence(low, no_update_before=False)) == usual
    assert advice(Evidence(Form(), no_update_before=False)) == "try a lower --learning_rate"
    clipped = Evidence(Form(), no_update_before=False, clip_rate=0.95)
    assert advice(clipped) == "try a lower --learning_rate or a longer --warmup_iters"
    one_layer = Evidence(low, no_update_before=False, in_part=True, clip_rate=0.1)
    assert advice(one_layer).startswith("try --dtype=float32, then --compile=False")
    first = Evidence(low, no_update_before=True)
    assert advice(first).endswith("not the learning rate: try --compile=False, then --dtype=float32")
    assert "the weights that it starts from, and the data" in advice(Evidence(Form(), no_update_before=True))
    broken = Evidence(low, no_update_before=True, broken_weight="lm_head.weight")
    assert advice(broken) == "the weights themselves are not finite (lm_head.weight): go on from another checkpoint"


def test_bad_parameters_are_named_by_depth():
    names = ["wte", "h.0", "h.1", "head"]
    inf = math.inf
    assert bad_parameters([1, math.nan, inf, 1], names) == "those of h.0 to h.1, 2 of 4 parameters"
    assert bad_parameters([1, 1, inf, 1], names) == "those of h.1, 1 of 4 parameters"
    assert bad_parameters([inf] * 4, names) == "those of all parameters"
    assert bad_parameters([1, 1, 1, 1], names) == "their norm is too large for a number"


def test_weights_that_are_broken_when_a_run_resumes_are_said_to_be_the_cause(chars, tmp_path, monkeypatch):
    main(tiny(chars, tmp_path))
    make_model = StartingPoint.model

    def broken(start, make):
        model = make_model(start, make)
        model.get_parameter("transformer.ln_f.weight").data[0] = math.nan
        return model

    monkeypatch.setattr(StartingPoint, "model", broken)
    message = r"the best one is .*ckpt_best\.pt; the weights .* \(transformer\.ln_f\.weight\): go on from another"
    with pytest.raises(ValueError, match=message):
        main(tiny(chars, tmp_path, init_from="resume"))


@pytest.mark.slow
def test_overflow_of_float16_counts_only_below_a_loss_scale_of_1(chars, tmp_path, plant):
    plant.damage = bad_gradient
    plant.at = range(2, 100)
    with pytest.raises(ValueError, match=r"in 3 steps in a row, 19 to 21 \(float16.*, loss scale 0\.\d+\)"):
        main(tiny(chars, tmp_path, dtype="float16", max_iters=60, eval_interval=10, max_bad_steps=3))


# ---- spikes --------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.floats(0.01, 0.5), st.floats(0.0, 3.0))
def test_noise_and_a_falling_loss_are_no_spikes_and_a_leap_is_one(seed, noise, fall):
    draw = random.Random(seed)
    watch = SpikeWatch()
    losses = [2.0 + fall * math.exp(-step / 30) + draw.gauss(0, noise) for step in range(300)]
    assert all(watch.see(loss) is None for loss in losses)
    median = watch.see(2.0 + 20 * noise + 0.5)
    assert median == statistics.median(losses[-100:])
    assert all(watch.see(9.0) is None for _ in range(50))  # it has been said


def test_spike_watch_ignores_what_is_no_number_and_sees_what_is_infinite():
    watch = SpikeWatch()
    for step in range(40):
        assert watch.see(math.nan if step == 20 else 2.0) is None
    assert watch.see(math.inf) == 2.0
    assert all(math.isfinite(loss) for loss in watch.losses)


SPIKED = {"max_iters": 60, "eval_interval": 20, "log_interval": 4, "learning_rate": 1e-3}


def test_spike_is_logged_and_the_run_goes_on(chars, tmp_path, plant, capsys):
    plant.damage = leap
    plant.at = (45,)
    main(tiny(chars, tmp_path, **SPIKED))
    [spike] = events(tmp_path, "spike")
    assert spike["iter"] == 45
    assert spike["rows"] == [180, 183]
    assert spike["loss"] > spike["median"] + 4
    assert "step 45: loss spike, " in capsys.readouterr().out
    assert store.load(tmp_path).iter_num == 60
    assert events(tmp_path, "end")[0]["spikes"] == 1


def test_spike_ends_the_run_where_it_should(chars, tmp_path, plant, script):
    plant.damage = leap
    plant.at = (45,)
    done = script("train.py", *flags(**TINY | SPIKED | {"on_spike": "stop"}, dataset=chars, out_dir=tmp_path))
    assert done.code == 1
    last = re.escape(f"the last checkpoint is {tmp_path / 'ckpt.pt'} of step 40")
    assert re.fullmatch(rf"error: on_spike=stop: the loss leapt to .* at step 45; {last}, .*\n", done.err)
    assert store.load(tmp_path).iter_num == 40


@pytest.mark.parametrize("later", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rewind_goes_on_after_the_spikes_batch_and_a_resumed_run_does_too(later, chars, tmp_path, plant, monkeypatch):
    if later:
        monkeypatch.setattr(Health, "is_full", False)
    plant.damage = leap
    plant.at = (45,)
    main(tiny(chars, tmp_path / "whole", on_spike="rewind", **SPIKED))
    [back] = events(tmp_path / "whole", "rewind")
    assert (back["iter"], back["spike"], back["skipped_batches"]) == (40, 45, 6)
    after_spike, _ = Split(chars, "train", 16, 1 << 16, 1337).train_batch(46, np.arange(4), 4)
    assert np.array_equal(plant.batches[-20], after_spike)  # what step 40 trained on
    saved = store.load(tmp_path / "whole")
    assert saved.iter_num == 60
    assert saved.health is not None
    assert saved.health["skipped_batches"] == 6
    assert {int(s["step"]) for s in saved.optimizer["state"].values()} == {60}

    # The same run, killed after it went back and resumed.
    def killed(stops, step, has_work):
        if step == 42 and events(tmp_path / "halves", "rewind"):
            raise KeyboardInterrupt
        return Due(stop=None, save=False)

    with monkeypatch.context() as patched:
        patched.setattr(Stops, "due", killed)
        with pytest.raises(KeyboardInterrupt):
            main(tiny(chars, tmp_path / "halves", on_spike="rewind", **SPIKED))
    for thread in threading.enumerate():
        if thread.name == "saver":  # the end of a process waits for it
            thread.join()
    main(tiny(chars, tmp_path / "halves", on_spike="rewind", init_from="resume", **SPIKED))
    for run in ("whole", "halves"):
        assert len(events(tmp_path / run, "rewind")) == 1
    assert_equal(weights(tmp_path / "whole"), weights(tmp_path / "halves"))
    assert_equal(saved.optimizer, store.load(tmp_path / "halves").optimizer)
    assert saved.health == store.load(tmp_path / "halves").health


def test_spike_before_the_first_checkpoint_does_not_end_a_run(chars, tmp_path, plant, capsys):
    plant.damage = leap
    plant.at = (45,)
    main(tiny(chars, tmp_path, on_spike="rewind", **SPIKED | {"eval_interval": 1000}))
    assert "no checkpoint was saved yet, so the run goes on" in capsys.readouterr().out
    assert not events(tmp_path, "rewind")


@pytest.mark.slow
def test_spikes_that_other_batches_do_not_avoid_end_the_run(chars, tmp_path, plant):
    plant.damage = leap
    plant.at = range(45, 10**6)
    with pytest.raises(ValueError, match="5 times back to step 40, and the loss leapt again: it is not the data"):
        main(tiny(chars, tmp_path, on_spike="rewind", **SPIKED))
    assert [e["iter"] for e in events(tmp_path, "rewind")] == [40] * 5


def test_health_in_a_checkpoint_that_is_damaged_is_an_error_of_one_line(chars, tmp_path):
    main(tiny(chars, tmp_path))
    saved = store.load(tmp_path)
    for damage in ({}, {"losses": 3}, {"skipped_batches": -1}, {"evaluations": [[1, 2]]}, {"rewinds_there": True}):
        state = None if saved.health is None else (saved.health | damage if damage else {})
        store.save(store.Checkpoint(**vars(saved) | {"health": state}), tmp_path, best=False)
        with pytest.raises(ValueError, match="skipped batches and past losses is damaged"):
            main(tiny(chars, tmp_path, init_from="resume"))


# ---- evaluations ---------------------------------------------------------------------------------------------


def evaluations(*val_losses: float, error: float | None = 0.1, train_losses: tuple[float, ...] = ()) -> list[Evaluated]:
    falling = train_losses or tuple(-float(i) for i in range(len(val_losses)))
    return [Evaluated(i * 10, falling[i], loss, error) for i, loss in enumerate(val_losses)]


def test_improvement_must_exceed_the_standard_error_and_small_ones_add_up():
    assert without_improvement([]) == 0
    assert without_improvement(evaluations(3.0, 2.0, 1.0)) == 0
    assert without_improvement(evaluations(3.0, 2.95, 2.92)) == 2
    assert without_improvement(evaluations(3.0, 2.95, 2.92, 2.89)) == 0
    assert without_improvement(evaluations(3.0, 3.5, 2.95, error=None)) == 0
    assert without_improvement(evaluations(3.0, 3.5, 3.0, error=None)) == 2


losses = st.floats(0.1, 5.0)


@given(st.lists(st.tuples(losses, losses, st.none() | st.floats(0.01, 0.3)), min_size=1, max_size=8))
def test_overfitting_is_what_comparisons_of_runs_call_so(rows):
    rows = [(step * 10, *row) for step, row in enumerate(rows)]
    run = Run("a", evals=[dict(zip(("iter", "train_loss", "val_loss", "val_se"), row, strict=True)) for row in rows])
    found = overfit([Evaluated(*row) for row in rows])
    if rows[-1][3] is not None:
        assert found == learning.overfit(run)
    else:
        assert found is None


def test_patience_ends_a_run_and_a_resumed_one_goes_on_counting(chars, tmp_path, capsys):
    flat = {"learning_rate": 0.0, "min_lr": 0.0, "max_iters": 30, "eval_interval": 5}
    main(tiny(chars, tmp_path / "whole", patience=3, **flat))
    assert [e["iter"] for e in events(tmp_path / "whole", "eval")] == [0, 5, 10, 15]
    assert store.load(tmp_path / "whole").iter_num == 15
    out = capsys.readouterr().out
    assert "patience=3: the last 3 evaluations improved by no more than the standard error; the lowest val loss" in out
    assert "resume:  python train.py --init_from=resume" in out
    assert "--max_iters" not in out
    assert re.search(r"^resume: .* --patience=0$", out, re.M)  # with the same patience nothing would be left to do
    main(tiny(chars, tmp_path / "halves", patience=3, **flat | {"max_iters": 10}))
    main(tiny(chars, tmp_path / "halves", patience=3, init_from="resume", **flat))
    assert [e["iter"] for e in events(tmp_path / "halves", "eval")] == [0, 5, 10, 10, 15]
    main(tiny(chars, tmp_path / "halves", patience=5, init_from="resume", **flat))
    assert [e["iter"] for e in events(tmp_path / "halves", "eval")][-3:] == [15, 20, 25]


def test_overfitting_is_said_once(chars, tmp_path, monkeypatch, capsys):
    values = iter([(3.0, 3.0), (2.0, 2.0), (1.0, 2.5), (0.9, 2.6), (0.8, 2.7), (0.7, 2.8)])
    now: list[tuple[float, float]] = []

    def planned(runner, *_):
        if not now:
            now.append(next(values))
            return Evaluation(now[0][0], 0.1)
        return Evaluation(now.pop()[1], 0.1)

    monkeypatch.setattr(Runner, "evaluate", planned)
    main(tiny(chars, tmp_path, max_iters=10, eval_interval=2))
    out = capsys.readouterr().out
    assert out.count("overfitting: the val loss is 0.5000 above that of step 2, while the train loss has fallen") == 1
    assert [(e["iter"], e["best_iter"]) for e in events(tmp_path, "overfit")] == [(4, 2)]


# ---- the end -------------------------------------------------------------------------------------------------


def test_end_of_a_run_gives_commands_that_work(chars, tmp_path, script):
    out_dir = tmp_path / "my first run"
    done = script("train.py", *flags(**TINY, dataset=chars, out_dir=out_dir))
    assert re.search(r"^6 steps: .* of training .*; warm-up .*; best val loss \d\.\d{4}$", done.out, re.M)
    assert f"best model of step 6: {out_dir / 'ckpt_best.pt'}\n" in done.out
    commands = {name: shlex.split(line) for name, line in re.findall(r"^(\w[\w ]+): +python (.*)$", done.out, re.M)}
    assert list(commands) == ["sample", "resume", "compare"]
    sampled = script(*commands["sample"], "--num_samples=1", "--max_new_tokens=3", "--device=cpu")
    assert sampled.code == 0, sampled.err
    assert script(*commands["resume"]).code == 0
    assert store.load(out_dir).iter_num == 12
    compared = script(*commands["compare"][:-1], out_dir)
    assert compared.code == 0, compared.err


def test_evaluating_only_says_nothing_of_what_comes_next(chars, tmp_path, capsys):
    main(tiny(chars, tmp_path))
    capsys.readouterr()
    main(tiny(chars, tmp_path, init_from="resume", eval_only=True))
    out = capsys.readouterr().out
    assert "step 6: train loss" in out
    assert "sample:" not in out
    assert trajectory(tmp_path)["eval"].keys() == {0, 3, 6}
