"""The training loop against a plain one, and the numbers that it logs."""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import events, raises_one_line, tiny, weights
from gloo import run

import train
from data.splits import Split
from deskgpt.checkpoint import store
from deskgpt.run.schedule import Schedule
from model import GPT, GPTConfig
from train import TrainConfig, main


def plain_loop(c: TrainConfig, vocab_size: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train as c says, in torch alone. Return the weights and the losses."""
    torch.manual_seed(c.seed)
    model = GPT(GPTConfig.from_settings(c, vocab_size))
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": c.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=c.learning_rate, betas=(c.beta1, c.beta2))
    split = Split(Path(c.dataset), "train", c.block_size, vocab_size, c.seed)
    losses = []
    B, n = c.batch_size, c.gradient_accumulation_steps
    for step in range(c.max_iters):
        for group in optimizer.param_groups:
            group["lr"] = train.learning_rate(Schedule.of(c), step)
        losses.append(0.0)
        for micro in range(n):
            x, y = (torch.from_numpy(a) for a in split.train_batch(step, micro * B + np.arange(B), B * n))
            torch.manual_seed(train.random_stream(c.seed, step, micro))
            loss = model(x, y)[1] / n
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), c.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict()), losses


def test_run_trains_what_a_plain_loop_trains(chars, tmp_path):
    """Gradient clipping, schedule, weight decay, accumulation, masks of dropout and order of batches."""
    settings = {"dropout": 0.2, "gradient_accumulation_steps": 2, "batch_size": 2, "grad_clip": 0.05, "seed": 7}
    c = tiny(chars, tmp_path, max_iters=5, **settings)
    main(c)
    expected, losses = plain_loop(c, store.load(tmp_path).model_args["vocab_size"])
    assert [e["loss"] for e in events(tmp_path, "iter")] == pytest.approx(losses, rel=1e-6)
    for name, w in weights(tmp_path).items():
        torch.testing.assert_close(w, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    assert all(e["clip_rate"] == 1.0 for e in events(tmp_path, "iter"))


@pytest.mark.parametrize("log_interval", [1, 1000])
def test_time_of_a_step_has_no_evaluation_and_no_save_in_it(log_interval, chars, tmp_path, monkeypatch):
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
    monkeypatch.setattr(store, "save", taking(10, store.save))
    main(tiny(chars, tmp_path, max_iters=4, eval_interval=1, save_minutes=0.0, log_interval=log_interval))
    [end] = events(tmp_path, "end")
    assert end["train_s"] == pytest.approx(4, abs=2)
    assert end["eval_s"] == pytest.approx(5 * 2 * 100, abs=5)
    assert end["save_s"] == pytest.approx(4 * 10, abs=5)
    if log_interval == 1:
        assert [e["time_ms"] for e in events(tmp_path, "iter")] == pytest.approx([1000] * 4, abs=900)


@pytest.mark.skipif(os.name == "nt", reason="needs fork")
def test_tokens_per_second_and_mfu_count_all_ranks(chars, tmp_path):
    run(2, tiny(chars, tmp_path, gradient_accumulation_steps=2, max_iters=3))
    start = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])
    assert (start["world_size"], start["tokens_per_step"]) == (2, 2 * 4 * 16)
    for e in events(tmp_path, "iter"):
        assert e["tokens_per_s"] * e["time_ms"] / 1e3 == pytest.approx(start["tokens_per_step"])
        assert e["mfu"] == pytest.approx(e["tokens_per_s"] * start["flops_per_token"] / start["peak_flops"])


def test_val_loss_is_that_of_the_val_split_and_the_train_loss_that_of_the_train_split(chars, tmp_path):
    c = tiny(chars, tmp_path, max_iters=4, eval_interval=4, dropout=0.3)  # which an evaluation does not apply
    main(c)
    saved = store.load(tmp_path)
    model = GPT.from_state(GPTConfig(**saved.model_args), dict(saved.model), "run").eval()
    last = events(tmp_path, "eval")[-1]
    for name in ("train", "val"):
        split = Split(chars, name, c.block_size, saved.model_args["vocab_size"])
        x, y = (torch.from_numpy(a) for a in split.eval_batch(np.arange(8), 8))
        with torch.no_grad():
            assert last[f"{name}_loss"] == pytest.approx(model(x, y)[1].item(), rel=1e-5)


def test_val_loss_that_is_not_finite_ends_the_run(chars, tmp_path, monkeypatch):
    evaluate = train.evaluate
    monkeypatch.setattr(train, "evaluate", lambda *args: replace(evaluate(*args), loss=math.nan))
    with raises_one_line("val loss is nan at step 0", "float32"):
        main(tiny(chars, tmp_path))


def test_norms_of_float16_are_those_of_the_gradients_without_the_loss_scale(chars, tmp_path):
    for dtype in ("float32", "float16"):
        main(tiny(chars, tmp_path / dtype, dtype=dtype, max_iters=3, grad_clip=0.1))
    for a, b in zip(events(tmp_path / "float16", "iter"), events(tmp_path / "float32", "iter"), strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=0.05)
        assert a["loss"] == pytest.approx(b["loss"], rel=0.01)


# auto_batch, the micro-batch at which memory runs out, and whether a smaller one is tried.
@pytest.mark.parametrize(("auto_batch", "fails_at", "halves"), [("auto", 0, True), (True, 2, False), (False, 0, False)])
def test_memory_that_runs_out_in_the_first_step_halves_the_micro_batch_and_trains_the_same(
    auto_batch, fails_at, halves, chars, tmp_path, monkeypatch
):
    """The third step or --auto_batch=False end the run and name the settings."""
    settings = {"batch_size": 4, "max_iters": 3, "learning_rate": 1e-3}
    c = tiny(chars, tmp_path / "short", auto_batch=auto_batch, **settings)
    named_losses = train.named_losses
    calls = itertools.count()

    def short_of_memory(logits, loss):
        if next(calls) == fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return named_losses(logits, loss)

    monkeypatch.setattr(train, "named_losses", short_of_memory)
    if not halves:
        with raises_one_line("out of memory", "batch_size=4", "--batch_size=2", "--gradient_accumulation_steps=2"):
            main(c)
        return
    main(c)
    main(tiny(chars, tmp_path / "full", **settings))
    for name, w in weights(tmp_path / "full").items():
        torch.testing.assert_close(weights(tmp_path / "short")[name], w, rtol=1e-4, atol=1e-6)
    assert store.load(tmp_path / "short").config["batch_size"] == 2
    assert [e["iter"] for e in events(tmp_path / "short", "eval")] == [0, 3]
