"""The training loop against a plain one, its schedule, and the numbers that it prints and logs."""

import itertools
import math
import re
import shutil
import signal
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import (
    CPU,
    assert_equal,
    assert_one_line,
    assert_same_run,
    contents,
    events,
    logged,
    raises_one_line,
    run_tiny,
    shell,
    slow,
    tiny,
    vector,
    weights,
)
from plain_loop import plain_loop
from tiny_models import make, tokens

import train
from data.batches import Split
from deskgpt.checkpoint import load_checkpoint, save_checkpoint
from deskgpt.compute import ComputeMode
from deskgpt.distributed import DistContext
from deskgpt.evaluation import Evaluation, evaluation_loss
from deskgpt.logger import RunLogger, StepTimer, read_events
from deskgpt.stopping import StopConditions, signal_handler
from model import GPT, GPTConfig
from train import TrainConfig, main


@pytest.mark.parametrize(
    "settings",
    [
        # The last of four batches of an evaluation is not full, and four are too few for an error.
        {"grad_clip": 1.1, "eval_tokens": 7 * 16},
        {"grad_clip": 0.0, "optimizer": "muon", "eval_iters": 8},
    ],
)
def test_run_trains_evaluates_and_logs_what_a_plain_loop_does(settings, chars, tmp_path):
    """Gradient clipping, schedule, weight decay, accumulation, a loss mask, masks of dropout, order
    of batches, both splits; and each number of the log, between whose lines are several steps.
    """
    data = Path(shutil.copytree(chars, tmp_path / "data"))
    n_tokens = (data / "train.bin").stat().st_size // 2
    mask = np.random.default_rng(0).integers(0, 2, n_tokens, np.uint8)
    mask.tofile(data / "train.mask")
    settings = settings | {"dropout": 0.2, "gradient_accumulation_steps": 2, "batch_size": 2}
    c = tiny(data, tmp_path, log_interval=3, eval_interval=4, seed=7, **settings)
    main(c)
    saved = load_checkpoint(tmp_path)
    vocab_size = saved.model_args["vocab_size"]
    expected, losses, norms = plain_loop(c, vocab_size)
    for name, w in saved.model.items():
        torch.testing.assert_close(w, expected[name], rtol=1e-4, atol=1e-5, msg=name)

    first = 0  # step since the last line
    for e, step in zip(events(tmp_path, "iter"), (0, 3, 5), strict=True):
        since = norms[first : step + 1]
        first = step + 1
        rate = train.learning_rate(c.schedule(), step)
        found = (e["loss"], e["grad_norm"], e["lr"], e["tokens_per_s"] * e["time_ms"] / 1e3)
        assert found == pytest.approx((losses[step], norms[step], rate, 64), rel=1e-5)
        assert (e["iter"], e["tokens"]) == (step, 64 * first)
        clipped = [norm > c.grad_clip for norm in since]
        assert e["clip_rate"] == (statistics.fmean(clipped) if c.grad_clip else None)
    assert logged(tmp_path, "eval", "tokens") == [0, 256, 384]

    n = c.eval_tokens // 16 or 16
    model = GPT.from_state(GPTConfig(**saved.model_args), expected, "plain").eval()
    e = events(tmp_path, "eval")[-1]
    for name in ("train", "val"):
        split = Split(data, name, c.block_size, vocab_size)
        x, y = map(torch.from_numpy, split.eval_batch(np.arange(n), n))
        assert e[f"{name}_loss"] == pytest.approx(model(x, y)[1].item(), rel=1e-5)
    means = [model(x[i : i + 2], y[i : i + 2])[1].item() for i in range(0, n, 2)]
    assert e["val_batches"] == pytest.approx(means, rel=1e-5)
    error = pytest.approx(statistics.stdev(means) / 8**0.5, rel=1e-3)
    assert e["val_se"] == (None if c.eval_tokens else error)
    names = ("iter", "train_loss", "val_loss", "val_se")
    rows = [tuple(e[name] for name in names) for e in events(tmp_path, "eval")]
    assert rows == vars(saved)["progress"]["evaluations"]
    assert saved.best_val_loss == min(row[2] for row in rows)
    assert [*vars(saved)["metadata"]["learning rates"]] == [*"012345"]  # of the steps done


def test_settings_that_a_run_may_change_are_refused_in_the_loop_with_what_to_read():
    config = TrainConfig().in_loop()
    assert config.grad_clip == 1.0
    for name, instead in train.READ_FROM_STATE.items():
        with pytest.raises(AttributeError, match=rf"config\.{name} .* read {instead}"):
            getattr(config, name)


def test_max_hours_are_hours_and_may_end_before_there_is_a_loss(
    chars, tmp_path, monkeypatch, capsys
):
    for seconds, reason in ((3500, None), (3700, "max_hours")):
        monkeypatch.setattr(signal_handler, "installed_at", time.perf_counter() - seconds)
        monkeypatch.setattr(signal_handler, "signal", signal.SIGTERM)  # of an earlier run
        stops = StopConditions(TrainConfig(max_hours=1.0), DistContext(CPU))
        stops.update(False, time.perf_counter())
        assert stops.reason == reason
    main(tiny(chars, tmp_path, max_hours=1e-9))
    assert "val loss n/a: the run ended before its first eval" in capsys.readouterr().out
    assert logged(tmp_path, "end", "best_val_loss") == [None]  # JSON has no infinity


def test_steps_that_fit_into_max_minutes_leave_time_for_their_evaluations(monkeypatch):
    """A step takes 2 s; an evaluation, after every four of them and at the end, takes 3 s."""
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0)
    timer = Mock(train_s=lambda: 4.0, last_s={"evaluation": 3.0, "saving": 0.0})
    for max_iters in (12, 10**6):
        config = TrainConfig(
            max_minutes=1.0, eval_interval=4, lr_decay_iters=1000, max_iters=max_iters
        )
        plan = StopConditions(config, DistContext(CPU)).replan(config.schedule(), 9, 7, timer)
        fit = max(n for n in range(99) if 2 * n + 3 * n / 4 + 3 <= 60)
        assert plan.max_iters == min(max_iters, 9 + fit)
        assert (plan.warmup_iters, plan.lr_decay_iters) == (
            math.ceil(plan.max_iters / 10),
            plan.max_iters,
        )


def test_time_that_is_left_is_that_of_the_steps_evaluations_and_saves_to_come():
    logger = Mock(config=TrainConfig(eval_interval=4), _ends_at=math.inf)
    logger.timer.last_s = {"evaluation": 6.0, "saving": 1.0}
    for end in (8, 10):
        logger.state.schedule.max_iters = end
        for step in range(end):
            to_come = range(step + 1, end + 1)
            evaluations = [s for s in to_come if s % 4 == 0 or s == end]
            expected = 2.0 * (len(to_come) - 1) + 7.0 * len(evaluations)
            assert RunLogger._left_s(logger, step, 2.0) == expected


def test_evaluation_computes_in_the_dtype_of_the_run():
    model, x = make(), tokens(2, 9)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x, x)[1]
    assert evaluation_loss(model, ComputeMode("bfloat16"), x, x)["loss"] == expected
    assert expected != model(x, x)[1]


def test_compiling_counts_neither_as_training_nor_as_evaluation_and_waiting_once(monkeypatch):
    now = [0.0]
    compiled = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    timer = StepTimer(CPU, lambda: compiled[0], lambda: 1.5)
    now[0], compiled[0] = 10.0, 7.0  # a step of 3 s
    assert timer.log_window(1, 60, 10.0, timer.spent_s()) == (1, 60, 3, 1.5)
    with timer.timed("evaluation"):
        now[0], compiled[0] = 110.0, 67.0  # an evaluation of 40 s
    now[0] = 112.0  # two steps
    assert (timer.train_s(), timer.last_s["evaluation"]) == (5.0, 40.0)
    assert timer.log_window(2, 60, 112.0, timer.spent_s()) == (2, 60, 2, 0)


def test_mfu_above_1_is_called_wrong_once_and_a_time_limit_bounds_what_is_left(
    chars, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("deskgpt.peaks.peak_flops", lambda device, dtype: (1.0, "measured"))
    run_tiny(chars, tmp_path, max_iters=10**7, eval_interval=10**7, max_minutes=1e-3)
    out, err = capsys.readouterr()
    assert err.count("note: mfu above 100%") == 1
    assert re.search(r"^iter 0: .* eta 0\.\ds$", out, re.M)


def test_val_loss_that_is_not_finite_ends_the_run(chars, tmp_path, monkeypatch):
    for bad in (math.nan, math.inf):
        monkeypatch.setattr(train, "evaluate", Mock(return_value=Evaluation(bad, None)))
        with raises_one_line(f"val loss is {bad} at step 0", "float32"):
            run_tiny(chars, tmp_path)


def test_norms_of_float16_are_those_of_the_gradients_without_the_loss_scale(
    chars, tmp_path, monkeypatch
):
    monkeypatch.setattr("deskgpt.compiling.default_dtype", lambda device: "float16")
    for dtype in ("float32", "auto"):
        c = tiny(chars, tmp_path / dtype, dtype=dtype, decay_lr=False, grad_clip=0.1)
        main(replace(c, max_iters=3))
        main(replace(c, init_from="resume"))
    assert vars(load_checkpoint(tmp_path / "auto"))["scaler"]["_growth_tracker"] == 6
    for name, rel in (("grad_norm", 0.05), ("loss", 0.01)):
        found = logged(tmp_path / "auto", "iter", name)
        expected = logged(tmp_path / "float32", "iter", name)
        assert found == pytest.approx(expected, rel=rel)


def runs_out_of_memory(monkeypatch, fails_at):
    """Let memory run out in this micro-batch. Return a list that grows with each one."""
    named_losses = train.named_losses
    calls = []

    def short_of_memory(*args):
        calls.append(1)
        if len(calls) == fails_at + 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return named_losses(*args)

    monkeypatch.setattr(train, "named_losses", short_of_memory)
    return calls


# And the micro-batch at which memory runs out, of two in each step.
@pytest.mark.parametrize(("auto_batch", "fails_at"), [("auto", 0), (True, 3), (False, 5)])
def test_memory_that_runs_out_halves_the_micro_batch_and_trains_the_same(
    auto_batch, fails_at, chars, tmp_path, monkeypatch
):
    """The log has the smaller one. --auto_batch=False saves the steps that are done, and names the
    settings.
    """
    short, full = tmp_path / "short", tmp_path / "full"
    settings = {"auto_batch": auto_batch, "gradient_accumulation_steps": 2, "learning_rate": 1e-3}
    c = tiny(chars, short, max_iters=3, **settings)
    main(replace(c, out_dir=str(full)))
    runs_out_of_memory(monkeypatch, fails_at)
    if not auto_batch:
        named = ("batch_size=4", "--batch_size=2", "--gradient_accumulation_steps=4")
        with raises_one_line("out of memory", *named):
            train.main_that_fits(c)
        assert load_checkpoint(short).iter_num == 2
        main(replace(c, init_from="resume"))
        return assert_same_run(full, short)
    train.main_that_fits(c)
    assert logged(short, "out_of_memory", "batch_size") == [2]
    torch.testing.assert_close(vector(short), vector(full), rtol=1e-4, atol=1e-6)
    assert load_checkpoint(short).config["batch_size"] == 2
    assert {*logged(short, "eval")} == {0, 3}


@slow
def test_memory_that_runs_out_leaves_the_schedule_that_max_minutes_planned(
    chars, tmp_path, monkeypatch, capsys
):
    """Its first two steps take 5 s each of a clock; the loss of the third has no memory."""
    calls = runs_out_of_memory(monkeypatch, 2)
    clock = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 5 * min(2, len(calls)))
    c = tiny(chars, tmp_path, max_iters=1000, eval_interval=1000, max_minutes=1.0)
    train.main_that_fits(c)
    assert "changed:" not in capsys.readouterr().out
    first, second = logged(tmp_path, "start", "settings")
    assert [s["batch_size"] for s in (first, second)] == [4, 2]
    planned = second["max_iters"]
    assert 6 < planned < 13
    assert load_checkpoint(tmp_path).iter_num == planned
    schedule = replace(c, max_iters=planned).schedule()
    rates = [train.learning_rate(schedule, step) for step in range(2, planned)]
    assert logged(tmp_path, "iter", "lr")[2:] == pytest.approx(rates)


def test_printed_lines_are_nanogpts_and_the_log_has_all_that_its_figures_depend_on(
    chars, tmp_path, capsys
):
    c = tiny(chars, tmp_path)
    began = time.perf_counter()
    main(c)
    took = time.perf_counter() - began
    out, err = capsys.readouterr()
    assert err == ""  # no progress bar into a pipe
    for e in events(tmp_path, "iter"):
        numbers = f"loss {e['loss']:.4f}, time {e['time_ms']:.2f}ms, mfu {100 * e['mfu']:.2f}%"
        assert f"\niter {e['iter']}: {numbers}" in out
    for e in events(tmp_path, "eval"):
        numbers = f"train loss {e['train_loss']:.4f}, val loss {e['val_loss']:.4f}"
        numbers += f", bits per byte {e['val_loss'] / math.log(2):.4f}"  # a byte a token
        assert f"\nstep {e['iter']}: {numbers}" in out
    start, *_, end = read_events(tmp_path / "log.jsonl")
    assert (start["event"], start["settings"]) == ("start", asdict(c))
    model = GPT(GPTConfig(**start["model_args"]))
    assert 0 < start["warm_up_s"] < took
    assert start["parameters"] == model.num_params()
    assert start["flops_per_token"] == model.estimate_flops()
    # Without +cu130 in the wheel's metadata
    assert torch.__version__.startswith(start["versions"]["torch"])
    assert end["peak_memory_bytes"] > 1e6


def test_new_run_in_a_used_folder_keeps_the_old_ones_files_and_eval_only_changes_none(
    chars, tmp_path, capsys
):
    c = tiny(chars, tmp_path / "out")
    only = replace(c, eval_only=True)
    main(only)
    assert not Path(c.out_dir).exists()
    main(c)
    before = contents(Path(c.out_dir))
    capsys.readouterr()
    main(replace(only, init_from="resume", batch_size=2, max_iters=3))
    assert contents(Path(c.out_dir)) == before
    out = capsys.readouterr().out
    assert len(re.findall(r"^step 6: train loss \d.*, val loss \d", out, re.M)) == 1
    assert "sample:" not in out  # nothing new to sample from
    main(replace(c, seed=2, max_iters=0))
    earlier = tmp_path / "out" / "previous-1"
    assert contents(earlier) == before
    assert str(earlier) in capsys.readouterr().out


def test_learning_rate_warms_up_and_falls_as_the_schedule_says():
    usual = {"learning_rate": 1.0, "min_lr": 0.1, "warmup_iters": 9, "lr_decay_iters": 109}
    for settings, rates in (
        ({}, {0: 0.1, 4: 0.5, 9: 1.0, 84: 0.2318, 109: 0.1, 150: 0.1}),
        ({"lr_decay_iters": 0, "max_iters": 109, "min_lr": None}, {59: 0.55, 109: 0.1}),
        ({"decay_lr": False}, {3: 1.0}),
        ({"lr_schedule": "linear", "min_lr": 0.0}, {59: 0.5, 108: 0.01, 109: 0.0}),
        ({"lr_schedule": "trapezoid"}, {87: 1.0, 98: 0.55, 109: 0.1}),
    ):
        schedule = TrainConfig(**usual | settings).schedule()
        found = {step: train.learning_rate(schedule, step) for step in rates}
        assert found == pytest.approx(rates, abs=0.003)


def test_schedule_that_contradicts_itself_is_named():
    for name in ("max_iters", "lr_decay_iters"):
        settings: dict[str, Any] = {name: 200}
        warmup = TrainConfig(**settings).schedule().warning()
        assert_one_line(warmup, "warmup_iters=2000", f"{name}=200", "--warmup_iters=20")
    assert not TrainConfig().schedule().warning()


# Whether each evaluation is followed by a save, save_minutes, and the steps that are saved.
@pytest.mark.parametrize(
    ("always", "minutes", "saved"),
    [(True, 0.0, [1, 2, 3, 4, 5]), (False, 0.0, [1, 4]), (False, 0.9, [1, 3, 4])],
)
def test_run_keeps_the_best_model_saves_as_asked_and_times_steps_evaluations_and_saves_apart(
    always, minutes, saved, chars, tmp_path, monkeypatch
):
    """A step takes 1 s of a clock, an evaluation of one split 30 s and a save 10 s. The best model
    has the lowest val loss, but random weights are never the best.
    """
    clock = time.perf_counter
    later_s = 0
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + later_s)

    def takes(seconds, where, function):
        def call(*args):
            nonlocal later_s
            later_s += seconds
            return function(*args)

        monkeypatch.setattr(where, call)

    # train and val, at each of six evaluations
    losses = iter((1.0, 1.5, 6.0, 3.0, 2.0, 5.0, 3.0, 4.0, 4.0, 2.0, 5.0, 6.0))
    takes(1, "train.named_losses", train.named_losses)
    takes(30, "train.evaluate", lambda *_: Evaluation(next(losses), None))
    takes(10, "deskgpt.saving.save_checkpoint", save_checkpoint)
    settings = {"always_save_checkpoint": always, "save_minutes": minutes, "log_interval": 3}
    assert run_tiny(chars, tmp_path, max_iters=5, eval_interval=1, **settings) == 1.5
    assert logged(tmp_path, "save") == saved
    for name, step in (("ckpt.pt", saved[-1]), ("ckpt_best.pt", 4)):
        found = load_checkpoint(tmp_path / name)
        assert (found.iter_num, found.best_val_loss) == (step, 2.0)
    [end] = events(tmp_path, "end")
    evaluations = logged(tmp_path, "eval", "eval_s")
    times = [end["train_s"], end["eval_s"], sum(evaluations), end["save_s"]]
    assert times == pytest.approx([5, 360, 360, 10 * len(saved)], abs=4)
    # Of steps 0, 3 and 4
    assert logged(tmp_path, "iter", "time_ms") == pytest.approx([1000] * 3, abs=900)


def test_run_ends_with_the_error_of_its_last_save_alone(chars, tmp_path, monkeypatch):
    """Its first save has failed, too."""
    failed = OSError("no space left")
    save = Mock(side_effect=[failed, None, failed, failed])
    monkeypatch.setattr("deskgpt.saving.save_checkpoint", save)
    run_tiny(chars, tmp_path)
    with raises_one_line("no space left", kind=OSError):
        run_tiny(chars, tmp_path)


@slow
def test_finetuning_that_only_gets_worse_keeps_the_weights_it_began_with_as_the_best(
    chars, tmp_path, capsys
):
    """It takes the weights, of a shorter context, and nothing else of a checkpoint, which stays as
    it is.
    """
    base, out = tmp_path / "base", tmp_path / "out"
    run_tiny(chars, base, max_iters=60, eval_interval=60)
    before = contents(base)
    worse = {"learning_rate": 3.0, "warmup_iters": 0, "grad_clip": 0.0, "block_size": 8}
    worse["dropout"] = 0.1
    run_tiny(chars, out, init_from=str(base), **worse)
    assert contents(base) == before
    best, last = load_checkpoint(out / "ckpt_best.pt"), load_checkpoint(out)
    expected = weights(base)
    expected["transformer.wpe.weight"] = expected["transformer.wpe.weight"][:8]
    assert_equal(dict(best.model), expected)
    assert best.best_val_loss == min(logged(out, "eval", "val_loss"))
    assert (best.iter_num, last.iter_num, last.model_args["dropout"]) == (0, 6, 0.1)
    assert {int(s["step"]) for s in last.optimizer["state"].values()} == {6}
    assert f"best intact model, of step 0: {out / 'ckpt_best.pt'}" in capsys.readouterr().out


def test_run_whose_checkpoints_could_not_be_read_back_ends_before_it_begins(
    chars, tmp_path, monkeypatch
):
    build_model = train.build_model

    def with_adapter(*args):
        model = build_model(*args)
        model.adapter = torch.nn.Linear(2, 2)  # which GPT itself does not make
        return model

    monkeypatch.setattr(train, "build_model", with_adapter)
    with raises_one_line("no run could resume", "adapter.weight"):
        run_tiny(chars, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@slow
def test_importing_the_scripts_does_nothing():
    code = """
import os, sys, torch
before = dict(os.environ)
import train, sample, export, bench.report, data.chat.prepare, data.fineweb_edu.prepare
assert dict(os.environ) == before
slow = {"wandb", "datasets", "tiktoken", "transformers", "safetensors", "torch._dynamo"}
slow |= {"tokenizers", "lm_eval"}
assert not slow & {*sys.modules}, slow & {*sys.modules}
"""
    done = shell("python", "-c", code)
    assert (done.stdout, done.stderr) == ("", "")


def test_ranks_random_streams_differ_between_steps_and_micro_batches():
    numbers = itertools.product(range(2), range(20), range(20))
    seeds = {train.micro_batch_seed(*of_each) for of_each in numbers}
    assert len(seeds) == 800
    assert 0 <= min(seeds) < max(seeds) < 2**63
