"""The predicted memory of a step, against real steps on a CPU; and what fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import TINY, assert_one_line, events, flags, tiny, trajectory
from tiny_models import MODERN_SETTINGS
from torch.profiler import ProfilerActivity, profile

from deskgpt.compute.optimizer import make_optimizer
from deskgpt.compute.variant import Variant
from deskgpt.estimate.memory import MakeOptimizer, Step, memory
from deskgpt.kernels import replacements
from deskgpt.kernels.overridable import replacing
from model import GPT, GPTConfig
from train import main

CPU = torch.device("cpu")
SMALL = GPTConfig(block_size=64, vocab_size=512, n_layer=2, n_head=4, n_embd=64, bias=False)


# ---- against real steps --------------------------------------------------------------------------------------


def adamw(model: GPT) -> torch.optim.Optimizer:
    return make_optimizer(model, "adamw", 0.1, 1e-3, (0.9, 0.95), 0.95)


def muon(model: GPT) -> torch.optim.Optimizer:
    return make_optimizer(model, "muon", 0.1, 1e-3, (0.9, 0.95), 0.95)


def real_peak(config: GPTConfig, batch_size: int, variant: Variant, micro_steps: int, make: MakeOptimizer) -> int:
    """The most bytes that torch's allocator holds in a real step on the CPU, by its profiler."""
    model = GPT(config)
    optimizer = make(model)
    runner = Runner(model, variant)
    x, y = (torch.randint(0, config.vocab_size, (batch_size, config.block_size)) for _ in "xy")

    def step() -> None:
        for _ in range(micro_steps):
            with replacing(runner.replacements):
                with runner.amp:
                    loss = model(x, y)[1]
                loss.backward()
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


# Not compiled, a block of GPT-2's keeps 16 tensors of its input's size and full checkpointing one; selective keeps 6.
CASES: list[tuple[GPTConfig, int, Variant, int, int, MakeOptimizer]] = [
    # model, batch, variant, tokens in a chunk of the loss (some make it in one piece), micro-batches, optimizer
    (SMALL, 16, Variant("float16"), 256, 1, adamw),
    (replace(SMALL, dropout=0.1, block_size=48), 8, Variant("float32", checkpoint="full"), 128, 2, adamw),
    (replace(SMALL, **MODERN_SETTINGS), 4, Variant("bfloat16", checkpoint="selective"), 64, 2, muon),
]


@pytest.mark.parametrize(("config", "batch_size", "variant", "chunk", "micro_steps", "make"), CASES)
def test_prediction_is_the_peak_of_a_real_step(config, batch_size, variant, chunk, micro_steps, make, monkeypatch):
    # Without oneDNN, whose workspaces are not counted and depend on the processor.
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    monkeypatch.setattr(replacements, "LOGITS_ON_CPU", chunk * config.vocab_size)
    predicted = memory(Step(config, batch_size, variant, "cpu", micro_steps > 1, make))
    assert sum(predicted.values()) == pytest.approx(real_peak(config, batch_size, variant, micro_steps, make), rel=0.02)
    assert predicted["weights"] == sum(p.nbytes for p in GPT(config).parameters())
    if micro_steps > 1:  # else they may come after the peak
        assert predicted["gradients"] == predicted["weights"]


# ---- in a run ------------------------------------------------------------------------------------------------


@pytest.fixture
def memory_for_five_sequences(monkeypatch):
    """A machine on which a pass of more than 5 sequences runs out of memory, as CUDA says it."""
    forward: Callable[..., Any] = GPT.forward

    def limited(self, idx, targets=None):
        if idx.size(0) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(self, idx, targets)

    monkeypatch.setattr(GPT, "forward", limited)


@pytest.mark.slow
def test_batch_that_does_not_fit_is_halved_also_when_it_resumes_and_the_training_is_the_same(
    chars, tmp_path, script, memory_for_five_sequences
):
    out = tmp_path / "auto"
    settings = TINY | {"batch_size": 16, "auto_batch": True, "lr_decay_iters": 6, "max_iters": 3}
    done = script("train.py", *flags(**settings, dataset=chars, out_dir=out))
    assert "out of memory: going on with" in done.out
    done = script("train.py", f"--out_dir={out}", "--init_from=resume", "--max_iters=6")
    assert done.code == 0, done.err
    assert "out of memory" not in done.out
    main(tiny(chars, tmp_path / "by_hand", batch_size=4, gradient_accumulation_steps=4, eval_iters=8))
    taken = events(out, "start")[0]["settings"]
    assert (taken["batch_size"], taken["gradient_accumulation_steps"], taken["eval_tokens"]) == (4, 4, 8 * 4 * 16)
    assert trajectory(out) == trajectory(tmp_path / "by_hand")


def test_batch_that_does_not_fit_names_the_settings_that_keep_the_training(
    chars, tmp_path, script, memory_for_five_sequences
):
    done = script("train.py", *flags(**TINY | {"batch_size": 8}, dataset=chars, out_dir=tmp_path))
    assert done.code == 1
    flags_of_same = "--batch_size=4 --gradient_accumulation_steps=2 --eval_tokens=256"
    assert_one_line(done.err, "batch_size=8", flags_of_same, "--auto_batch=True")
    assert not (tmp_path / "log.jsonl").exists()
