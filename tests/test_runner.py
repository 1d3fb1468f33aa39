from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import torch
from gloo import on_ranks
from tiny_models import MODERN_SETTINGS

from deskgpt.compute.distributed import DistContext
from deskgpt.compute.runner import Runner, Variant, parts_of
from deskgpt.kernels import replacements
from model import GPT, GPTConfig


def make(bfloat16: bool = False, compiled: bool = False, checkpoint: str = "none", **settings: Any) -> Runner:
    torch.manual_seed(0)
    sizes = {"block_size": 32, "vocab_size": 100, "n_layer": 2, "n_head": 2, "n_embd": 32}
    model = GPT(GPTConfig(**(sizes | settings)))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    dtype = "bfloat16" if bfloat16 else "float32"
    variant = Variant(dtype, compiled, attention="explicit" if bfloat16 else "flash", checkpoint=checkpoint)
    return Runner(model, variant)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 100, (4, 33), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def taken(runner: Runner, micro_steps: int) -> tuple[float, list[torch.Tensor]]:
    """The sum of the losses of some micro-batches, and the gradients that they leave."""
    try:
        loss = sum(runner.forward_backward(*batch(), micro_steps).item() for _ in range(micro_steps))
    except Exception as e:
        if runner.variant.compiled and "compiler" in str(e).lower():
            pytest.skip("no working C++ compiler here")
        raise
    return loss, [p.grad for p in runner.parameters if p.grad is not None]


def assert_same_passes(compiled: Runner, plain: Runner) -> None:
    is_rounded = plain.variant.dtype == "bfloat16"
    for micro_steps in (1, 2):
        loss, expected = taken(plain, micro_steps)
        got, gradients = taken(compiled, micro_steps)
        assert got == pytest.approx(loss, rel=1e-2 if is_rounded else 1e-5)
        assert len(gradients) == len(expected) == len(plain.parameters)
        for a, b in zip(gradients, expected, strict=True):
            assert a.stride() == b.stride()  # which the fused AdamW takes for granted
            assert (a - b).norm() <= (0.05 if is_rounded else 1e-5) * b.norm() + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("settings", [pytest.param({"activation": "gelu"}, marks=pytest.mark.nightly), MODERN_SETTINGS])
def test_compiled_blocks_give_the_losses_and_gradients_of_the_eager_model(settings, monkeypatch):
    monkeypatch.setattr(replacements, "LOGITS_ON_CPU", 1000)  # so that they are chunked
    compiled = make(bfloat16=True, compiled=True, n_layer=1, **settings)
    assert_same_passes(compiled, make(bfloat16=True, n_layer=1, **settings))


@pytest.mark.slow
def test_compiled_model_that_computes_activations_again_has_the_gradients_of_the_eager_one(monkeypatch):
    # As for inductor, without its kernels. What is computed again is decided before they are written.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    compiled = make(compiled=True, checkpoint="selective", **MODERN_SETTINGS)
    assert_same_passes(compiled, make(**MODERN_SETTINGS))


class WithExperts(GPT):
    """Of two heads, the first token decides which is used."""

    def __init__(self, config):
        super().__init__(config)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(config.n_embd, config.n_embd) for _ in range(2))

    def forward(self, idx, targets=None):
        x = self.experts[int(idx[0, 0]) % 2](self.transformer(idx))
        return None, self.loss(x, targets)


@pytest.mark.skipif(sys.platform == "win32", reason="needs gloo as Linux and macOS have it")
def test_experts_of_which_some_get_no_gradient_train_on_two_ranks(tmp_path):
    def work(ranks: DistContext) -> list[float]:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"block_size": 8, "vocab_size": 100, "n_layer": 1, "n_head": 1, "n_embd": 8}
        runner = Runner(WithExperts(GPTConfig(**sizes)), Variant())
        runner.distribute(torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.int64))
        norms = []
        for first in (0, 1, 1, 0):
            x = torch.full((2, 8), first + 2 * ranks.rank)
            runner.forward_backward(x, x)
            norms.append(round(runner.gradient_norms().norm().item(), 5))
            runner.model.zero_grad()
        runner.leave_ranks()
        return norms

    first, second = on_ranks(work, 2, tmp_path)
    assert first == second


def test_evaluation_of_a_compiled_model_on_a_cpu_is_that_of_the_eager_one():
    losses = []
    for runner in (make(compiled=True), make()):
        with runner.evaluating():
            losses.append(runner.loss(*batch()))
    assert torch.equal(*losses)


@pytest.mark.parametrize("further", [{"loss": torch.ones(())}, {"z": 0.5}, {"z": torch.ones(2)}], ids=str)
def test_further_loss_that_would_replace_the_loss_or_cannot_be_added_is_refused(further):
    assert parts_of((None, torch.ones(()), {"z": torch.ones(1)})).keys() == {"loss", "z"}
    with pytest.raises(ValueError, match=r"GPT\.forward returns a further loss '(loss|z)'"):
        parts_of((None, torch.ones(()), further))
