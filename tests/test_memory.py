"""The predicted memory of a step, against real steps on a CPU; and what fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import TINY, assert_one_line, flags, raises_one_line, tiny, trajectory
from tiny_models import MODERN_SETTINGS
from torch.profiler import ProfilerActivity, profile

from data.batching import Batching
from deskgpt.compute.optimizer import make_optimizer
from deskgpt.compute.variant import Variant, apply_variant
from deskgpt.estimate import fit
from deskgpt.estimate.memory import Step, memory
from deskgpt.kernels import loss
from deskgpt.system import hardware
from model import GPT, GPTConfig
from train import main

CPU = torch.device("cpu")
SMALL = GPTConfig(block_size=64, vocab_size=512, n_layer=4, n_head=4, n_embd=64, bias=False)


# ---- against real steps --------------------------------------------------------------------------------------


def real_peak(config: GPTConfig, batch_size: int, variant: Variant, micro_steps: int) -> int:
    """Return the most bytes that torch's allocator holds in a real step on the CPU, by its profiler."""
    model = GPT(config)
    optimizer = make_optimizer(model, "adamw", 0.1, 1e-3, (0.9, 0.95), 0.95)
    apply_variant(model, variant)
    x, y = (torch.randint(0, config.vocab_size, (batch_size, config.block_size)) for _ in "xy")

    def step() -> None:
        for _ in range(micro_steps):
            with hardware.autocast(CPU, variant.dtype, cached=variant.recompute == "none"):
                total = model(x, y)[1]
            total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()  # makes what the optimizer keeps
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    kept = [value for state in optimizer.state.values() for value in state.values()]  # moments, and numbers of steps
    return peak + sum(tensor.nbytes for tensor in (*model.parameters(), *kept, x, y))


CASES: list[tuple[GPTConfig, int, Variant, int, int]] = [
    # model, batch, variant, tokens in a chunk of the loss (some make it in one piece), micro-batches
    (SMALL, 8, Variant("float16"), 128, 2),
    (replace(SMALL, block_size=48), 16, Variant("float32", recompute="full"), 128, 2),
    (replace(SMALL, **MODERN_SETTINGS), 16, Variant("float32"), 256, 2),
    (replace(SMALL, **MODERN_SETTINGS), 8, Variant("bfloat16", recompute="full"), 64, 2),
]


@pytest.mark.parametrize(("config", "batch_size", "variant", "chunk", "micro_steps"), CASES)
def test_prediction_is_within_a_tenth_of_a_real_step(config, batch_size, variant, chunk, micro_steps, monkeypatch):
    # Without oneDNN, whose workspaces depend on the processor.
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    monkeypatch.setattr(loss, "LOGITS_ON_CPU", chunk * config.vocab_size)
    predicted = memory(Step(config, batch_size, variant, "cpu"))
    assert sum(predicted.values()) == pytest.approx(real_peak(config, batch_size, variant, micro_steps), rel=0.1)
    assert predicted["weights"] == sum(p.nbytes for p in GPT(config).parameters())


# ---- what fits -----------------------------------------------------------------------------------------------


def test_micro_batch_that_surely_does_not_fit_is_refused_before_it_is_tried(chars, tmp_path, script):
    settings = TINY | {"batch_size": 1 << 19, "n_embd": 256, "block_size": 256}
    done = script("train.py", *flags(**settings, dataset=chars, out_dir=tmp_path))
    assert done.code == 1
    assert_one_line(done.err, "batch_size=524288", "--batch_size=262144 --gradient_accumulation_steps=2")


def test_larger_micro_batch_divides_the_step_and_fits(monkeypatch):
    batching = Batching(batch_size=1, accumulation=96, block_size=64)
    for limit_bytes, expected in ((1 << 40, 96), (50 << 20, 48), (1, 1)):
        monkeypatch.setattr(hardware, "memory_bytes", lambda device, limit_bytes=limit_bytes: limit_bytes)
        found = fit.larger_batch(SMALL, CPU, batching, Variant())
        assert found.sequences == 96
        assert found.batch_size <= expected


# ---- in a run ------------------------------------------------------------------------------------------------


@pytest.fixture
def memory_for_five_sequences(monkeypatch):
    """Set up a machine on which a training pass of more than 5 sequences runs out of memory, with CUDA's error."""
    forward: Callable[..., Any] = GPT.forward

    def limited(self, idx, targets=None):
        if idx.size(0) > 5 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(self, idx, targets)

    monkeypatch.setattr(GPT, "forward", limited)


def test_micro_batch_of_one_sequence_is_not_halved():
    with raises_one_line("not even batch_size=1", "--block_size=32"):
        fit.halved_batch(CPU, True, Batching(batch_size=1, block_size=64))


@pytest.mark.slow
def test_batch_that_does_not_fit_is_halved_also_when_it_resumes_and_the_training_is_the_same(
    chars, tmp_path, script, memory_for_five_sequences
):
    out = tmp_path / "auto"
    settings = TINY | {"batch_size": 16, "auto_batch": True, "lr_decay_iters": 6, "max_iters": 3}
    done = script("train.py", *flags(**settings, dataset=chars, out_dir=out))
    assert "out of memory: continuing with" in done.out
    done = script("train.py", f"--out_dir={out}", "--init_from=resume", "--max_iters=6")
    assert done.code == 0, done.err
    assert "out of memory" not in done.out
    main(tiny(chars, tmp_path / "by_hand", batch_size=4, gradient_accumulation_steps=4, eval_iters=8))
    assert trajectory(out)["iter"] == trajectory(tmp_path / "by_hand")["iter"]  # it was halved after an evaluation


def test_batch_that_does_not_fit_names_the_settings_that_keep_the_training(
    chars, tmp_path, script, memory_for_five_sequences
):
    settings = TINY | {"batch_size": 8, "auto_batch": False}
    done = script("train.py", *flags(**settings, dataset=chars, out_dir=tmp_path))
    assert done.code == 1
    flags_of_same = "--batch_size=4 --gradient_accumulation_steps=2 --eval_tokens=256"
    assert_one_line(done.err, "batch_size=8", flags_of_same)
