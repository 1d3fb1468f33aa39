"""The training loop against a plain one, its schedule, and the numbers that it prints and logs."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    CPU,
    assert_equal,
    assert_one_line,
    contents,
    events,
    raises_one_line,
    shell,
    tiny,
    weights,
)
from gloo import run

import train
from data.batches import BatchSplit, Split, eval_batches
from deskgpt.checkpoint import load_checkpoint, save_checkpoint
from deskgpt.compute import ComputeMode
from deskgpt.distributed import DistContext
from deskgpt.evaluation import evaluate
from deskgpt.stopping import StepTimer, StopConditions, signal_handler
from model import GPT, GPTConfig
from train import TrainConfig, main


def plain_loop(c: TrainConfig, vocab_size: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train as c says, in torch alone. Return the weights and the losses."""
    torch.manual_seed(c.seed)
    model = GPT(GPTConfig.from_settings(c, vocab_size))
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": c.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=c.learning_rate, betas=(c.beta1, c.beta2))
    split = Split(Path(c.dataset), "train", c.block_size, vocab_size, c.seed)
    losses = []
    B, n = c.batch_size, c.gradient_accumulation_steps
    for step in range(c.max_iters):
        for group in optimizer.param_groups:
            group["lr"] = train.learning_rate(c.schedule(), step)
        losses.append(0.0)
        for micro in range(n):
            x, y = (
                torch.from_numpy(a)
                for a in split.train_batch(step, micro * B + np.arange(B), B * n)
            )
            torch.manual_seed(train.micro_batch_seed(c.seed, step, micro))
            loss = model(x, y)[1] / n
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), c.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict()), losses


def test_run_trains_and_evaluates_what_a_plain_loop_does(chars, tmp_path):
    """Gradient clipping, schedule, weight decay, accumulation, masks of dropout, order of batches,
    and both splits.
    """
    settings = {
        "dropout": 0.2,
        "gradient_accumulation_steps": 2,
        "batch_size": 2,
        "grad_clip": 0.05,
        "seed": 7,
    }
    c = tiny(chars, tmp_path, max_iters=5, **settings)
    main(c)
    saved = load_checkpoint(tmp_path)
    vocab_size = saved.model_args["vocab_size"]
    expected, losses = plain_loop(c, vocab_size)
    assert [e["loss"] for e in events(tmp_path, "iter")] == pytest.approx(losses, rel=1e-6)
    for name, w in weights(tmp_path).items():
        torch.testing.assert_close(w, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    assert all(e["clip_rate"] == 1.0 for e in events(tmp_path, "iter"))
    model = GPT.from_state(GPTConfig(**saved.model_args), expected, "plain").eval()
    for name in ("train", "val"):
        x, y = (
            torch.from_numpy(a)
            for a in Split(chars, name, c.block_size, vocab_size).eval_batch(np.arange(4), 4)
        )
        assert events(tmp_path, "eval")[-1][f"{name}_loss"] == pytest.approx(
            model(x, y)[1].item(), rel=1e-5
        )


def test_max_hours_are_hours(monkeypatch):
    for seconds, reason in ((3500, None), (3700, "max_hours")):
        monkeypatch.setattr(signal_handler, "installed_at", time.perf_counter() - seconds)
        stops = StopConditions(TrainConfig(max_hours=1.0), DistContext(CPU))
        stops.check(False, time.perf_counter())
        assert stops.reason == reason


def test_log_line_has_the_numbers_of_its_own_step_and_the_last_step_has_one(chars, tmp_path):
    for interval in (1, 3):
        main(
            tiny(
                chars, tmp_path / str(interval), log_interval=interval, max_iters=6, eval_interval=4
            )
        )
    every = events(tmp_path / "1", "iter")
    some = events(tmp_path / "3", "iter")
    assert [e["iter"] for e in some] == [0, 3, 5]
    assert [e["grad_norm"] for e in some] == [every[step]["grad_norm"] for step in (0, 3, 5)]
    assert [e["tokens"] for e in some] == [64, 256, 384]
    assert [e["tokens"] for e in events(tmp_path / "3", "eval")] == [0, 256, 384]


def test_wait_for_data_is_that_of_the_steps_since_the_last_line():
    timer = StepTimer(CPU)
    timer.start()
    timer.add_wait(0.5)
    waits_s = [
        timer.log_window(1, 1, time.perf_counter(), timer.spent_s()).wait_s for _ in range(2)
    ]
    assert waits_s == [0.5, 0.0]


def test_compiling_counts_neither_as_training_nor_as_evaluation(monkeypatch):
    now = [0.0]
    compiled = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    timer = StepTimer(CPU, lambda: compiled[0])
    timer.start()
    now[0], compiled[0] = 10.0, 7.0  # a step of 3 s
    with timer.timed("evaluation"):
        now[0], compiled[0] = 110.0, 67.0  # an evaluation of 40 s
    now[0] = 111.0  # another step
    assert (timer.train_s(), timer.last_s["evaluation"]) == (4.0, 40.0)


@pytest.mark.parametrize("log_interval", [1, 1000])
def test_time_of_a_step_has_no_evaluation_and_no_save_in_it(
    log_interval, chars, tmp_path, monkeypatch
):
    """A step takes 1 s of a clock, an evaluation of one split 100 s and a save 10 s."""
    clock = time.perf_counter
    later_s = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + later_s)

    def taking(seconds, function):
        def call(*args, **kwargs):
            nonlocal later_s
            later_s += seconds
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(train, "named_losses", taking(1, train.named_losses))
    monkeypatch.setattr(train, "evaluate", taking(100, train.evaluate))
    monkeypatch.setattr("deskgpt.saving.save_checkpoint", taking(10, save_checkpoint))
    main(
        tiny(
            chars,
            tmp_path,
            max_iters=4,
            eval_interval=1,
            save_minutes=0.0,
            log_interval=log_interval,
        )
    )
    [end] = events(tmp_path, "end")
    assert end["train_s"] == pytest.approx(4, abs=2)
    assert end["eval_s"] == pytest.approx(5 * 2 * 100, abs=5)
    assert end["save_s"] == pytest.approx(4 * 10, abs=5)
    if log_interval == 1:
        assert [e["time_ms"] for e in events(tmp_path, "iter")] == pytest.approx(
            [1000] * 4, abs=900
        )


@pytest.mark.skipif(os.name == "nt", reason="needs fork")
def test_tokens_per_second_and_mfu_count_all_ranks(chars, tmp_path):
    run(2, tiny(chars, tmp_path, gradient_accumulation_steps=2, max_iters=3))
    start = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])
    assert (start["world_size"], start["tokens_per_step"]) == (2, 2 * 4 * 16)
    for e in events(tmp_path, "iter"):
        assert e["tokens_per_s"] * e["time_ms"] / 1e3 == pytest.approx(start["tokens_per_step"])
        assert e["mfu"] == pytest.approx(
            e["tokens_per_s"] * start["flops_per_token"] / start["peak_flops"]
        )


def test_mfu_above_1_is_called_wrong_once_and_a_time_limit_bounds_what_is_left(
    chars, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("deskgpt.peaks.peak_flops", lambda device, dtype: (1.0, "measured"))
    main(tiny(chars, tmp_path, max_iters=10**7, eval_interval=10**7, max_minutes=1e-3))
    out = capsys.readouterr().out
    assert "as many of 10,000,000 steps as fit into 0.001 minutes" in out
    assert out.count("warning: mfu ") == 1
    assert re.search(r"^iter 0: .* eta 0\.\ds$", out, re.M)


def test_val_loss_that_is_not_finite_ends_the_run(chars, tmp_path, monkeypatch):
    evaluate = train.evaluate
    monkeypatch.setattr(train, "evaluate", lambda *args: replace(evaluate(*args), loss=math.nan))
    with raises_one_line("val loss is nan at step 0", "float32"):
        main(tiny(chars, tmp_path))


def test_norms_of_float16_are_those_of_the_gradients_without_the_loss_scale(chars, tmp_path):
    for dtype in ("float32", "float16"):
        main(tiny(chars, tmp_path / dtype, dtype=dtype, max_iters=3, grad_clip=0.1))
    for a, b in zip(
        events(tmp_path / "float16", "iter"), events(tmp_path / "float32", "iter"), strict=True
    ):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=0.05)
        assert a["loss"] == pytest.approx(b["loss"], rel=0.01)


# auto_batch, the micro-batch at which memory runs out, and whether a smaller one is tried.
@pytest.mark.parametrize(
    ("auto_batch", "fails_at", "halves"), [("auto", 0, True), (True, 2, True), (False, 2, False)]
)
def test_memory_that_runs_out_halves_the_micro_batch_and_trains_the_same(
    auto_batch, fails_at, halves, chars, tmp_path, monkeypatch
):
    """The log has the smaller one. --auto_batch=False saves the steps that are done, and names the
    settings.
    """
    c = tiny(chars, tmp_path / "short", auto_batch=auto_batch, max_iters=3, learning_rate=1e-3)
    named_losses = train.named_losses
    calls = itertools.count()

    def short_of_memory(logits, loss):
        if next(calls) == fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return named_losses(logits, loss)

    monkeypatch.setattr(train, "named_losses", short_of_memory)
    if not halves:
        with raises_one_line(
            "out of memory", "batch_size=4", "--batch_size=2", "--gradient_accumulation_steps=2"
        ):
            train.main_that_fits(c)
        assert load_checkpoint(tmp_path / "short").iter_num == fails_at
        return
    train.main_that_fits(c)
    assert [e["batch_size"] for e in events(tmp_path / "short", "out_of_memory")] == [2]
    main(replace(c, out_dir=str(tmp_path / "full")))
    for name, w in weights(tmp_path / "full").items():
        torch.testing.assert_close(weights(tmp_path / "short")[name], w, rtol=1e-4, atol=1e-6)
    assert load_checkpoint(tmp_path / "short").config["batch_size"] == 2
    assert {e["iter"] for e in events(tmp_path / "short", "eval")} == {0, 3}


def test_printed_lines_are_nanogpts_and_the_log_has_all_that_its_figures_depend_on(
    chars, tmp_path, capsys
):
    main(tiny(chars, tmp_path))
    out, err = capsys.readouterr()
    assert err == ""  # no progress bar into a pipe
    steps = events(tmp_path, "iter")
    evaluations = events(tmp_path, "eval")
    printed = re.findall(
        r"^iter (\d+): loss (\d+\.\d{4}), time (\d+\.\d\d)ms, mfu \d+\.\d\d%", out, re.M
    )
    assert printed == [(str(e["iter"]), f"{e['loss']:.4f}", f"{e['time_ms']:.2f}") for e in steps]
    printed = re.findall(
        r"^step (\d+): train loss (\d+\.\d{4}), val loss (\d+\.\d{4})\b", out, re.M
    )
    assert printed == [
        (str(e["iter"]), f"{e['train_loss']:.4f}", f"{e['val_loss']:.4f}") for e in evaluations
    ]
    assert (len(steps), len(evaluations)) == (6, 3)
    first = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])
    assert first["event"] == "start"
    assert first["settings"] == asdict(tiny(chars, tmp_path))
    model = GPT.from_state(
        GPTConfig(**load_checkpoint(tmp_path).model_args), weights(tmp_path), "out"
    )
    assert (first["parameters"], first["flops_per_token"]) == (
        model.num_params(),
        model.estimate_flops(),
    )
    # Without +cu130 in the wheel's metadata
    assert torch.__version__.startswith(first["versions"]["torch"])
    assert events(tmp_path, "end")[0]["peak_memory_bytes"] > 1e6


@pytest.mark.parametrize("n", [7, 24])
def test_evaluation_is_the_mean_over_its_windows_the_last_batch_too(n, chars, tmp_path):
    """In batches of three.

    The standard error is that of the mean of their losses, from eight of them on.
    """
    c = tiny(chars, tmp_path, batch_size=3)
    model = GPT(GPTConfig.from_settings(c, vocab_size=100)).train()
    split = Split(chars, "val", c.block_size, 100)
    x, y = (torch.from_numpy(a) for a in split.eval_batch(np.arange(n), n))
    batches = eval_batches(split, BatchSplit(3, eval_tokens=n), CPU)
    found = evaluate(model, ComputeMode(), batches, DistContext(CPU))
    assert found.loss == pytest.approx(model(x, y)[1].item(), rel=1e-6)
    assert model.training
    means = [model(x[i : i + 3], y[i : i + 3])[1].item() for i in range(0, n, 3)]
    error = pytest.approx(statistics.stdev(means) / 8**0.5, rel=1e-3) if n == 24 else None
    assert found.standard_error == error


@pytest.mark.slow
def test_new_run_in_a_used_folder_keeps_the_old_ones_files_and_eval_only_changes_none(
    chars, tmp_path, capsys
):
    out_dir = tmp_path / "out"
    main(tiny(chars, out_dir, eval_only=True))
    assert not out_dir.exists()
    main(tiny(chars, out_dir))
    before = contents(out_dir)
    capsys.readouterr()
    main(tiny(chars, out_dir, eval_only=True, init_from="resume", batch_size=2, max_iters=3))
    assert contents(out_dir) == before
    out = capsys.readouterr().out
    assert f"resuming {out_dir} at step 6" in out
    assert len(re.findall(r"^step 6: train loss \d.*, val loss \d", out, re.M)) == 1
    assert "sample:" not in out  # nothing new to sample from
    main(tiny(chars, out_dir, seed=2, max_iters=0))
    assert contents(out_dir / "previous-1") == before
    assert str(out_dir / "previous-1") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({}, {0: 0.1, 4: 0.5, 8: 0.9, 9: 1.0, 59: 0.55, 109: 0.1, 150: 0.1}),
        ({"lr_decay_iters": 0, "max_iters": 109, "min_lr": None}, {59: 0.55, 109: 0.1}),
        ({"decay_lr": False}, {3: 1.0}),
        ({"lr_schedule": "linear", "min_lr": 0.0}, {0: 0.1, 9: 1.0, 59: 0.5, 108: 0.01, 109: 0.0}),
        ({"lr_schedule": "trapezoid"}, {9: 1.0, 87: 1.0, 98: 0.55, 109: 0.1}),
    ],
)
def test_learning_rate_warms_up_and_falls_as_the_schedule_says(settings, rates):
    usual = {
        "learning_rate": 1.0,
        "min_lr": 0.1,
        "warmup_iters": 9,
        "lr_decay_iters": 109,
        "max_iters": 200,
    }
    schedule = TrainConfig(**usual | settings).schedule()
    assert [train.learning_rate(schedule, step) for step in rates] == pytest.approx(
        [*rates.values()], abs=0.003
    )


def test_schedule_that_contradicts_itself_is_named():
    for name, config in (
        ("max_iters", TrainConfig(max_iters=200)),
        ("lr_decay_iters", TrainConfig(lr_decay_iters=200)),
    ):
        [warmup] = config.schedule().warnings()
        assert_one_line(warmup, "warmup_iters=2000", f"{name}=200", "--warmup_iters=20")
    [min_lr] = TrainConfig(min_lr=1e-3, learning_rate=1e-5).schedule().warnings()
    assert_one_line(min_lr, "min_lr=0.001", "learning_rate=1e-05")
    assert TrainConfig().schedule().warnings() == []


@pytest.mark.slow
@pytest.mark.parametrize("always", [True, False])
def test_finetuning_that_only_gets_worse_keeps_the_weights_it_began_with_as_the_best(
    always, chars, tmp_path, capsys
):
    """It takes the weights, of a shorter context, and nothing else of a checkpoint, which stays as
    it is.
    """
    base = tmp_path / "base"
    main(tiny(chars, base, max_iters=60, eval_interval=60))
    before = contents(base)
    worse = {
        "learning_rate": 3.0,
        "warmup_iters": 0,
        "grad_clip": 0.0,
        "init_from": str(base),
        "block_size": 8,
    }
    main(tiny(chars, tmp_path / "out", always_save_checkpoint=always, **worse))
    assert contents(base) == before
    evaluations = events(tmp_path / "out", "eval")
    assert [e["iter"] for e in evaluations] == [0, 3, 6]
    assert evaluations[0]["val_loss"] == min(e["val_loss"] for e in evaluations)
    best = load_checkpoint(tmp_path / "out" / "ckpt_best.pt")
    expected = weights(base)
    expected["transformer.wpe.weight"] = expected["transformer.wpe.weight"][:8]
    assert_equal(dict(best.model), expected)
    last = load_checkpoint(tmp_path / "out")
    assert (best.iter_num, last.iter_num) == (0, 6 if always else 0)  # only what improves is saved
    assert {int(s["step"]) for s in last.optimizer["state"].values()} <= {last.iter_num}
    assert f"best model of step 0: {tmp_path / 'out' / 'ckpt_best.pt'}" in capsys.readouterr().out


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
        main(tiny(chars, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
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
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_ranks_random_streams_differ_between_steps_and_micro_batches():
    seeds = {
        train.micro_batch_seed(seed, step, number)
        for seed in (0, 1)
        for step in range(20)
        for number in range(20)
    }
    assert len(seeds) == 800
    assert all(0 <= seed < 2**63 for seed in seeds)
