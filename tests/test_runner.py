from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from gloo import on_ranks
from tiny_models import MODERN_SETTINGS, SMALL, make, tokens
from torch._dynamo.testing import CompileCounter

from deskgpt.compute import compiling
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.runner import Runner, Variant, bfloat16_residual, compile_one, parts_of
from deskgpt.kernels import replacements
from deskgpt.kernels.verify import compare_passes
from model import GPT, GPTConfig

COMPILED = Variant("bfloat16", compiled=True, attention="explicit")
RECOMPUTED = Variant(compiled=True, checkpoint="selective")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "backend", "settings"),
    [
        pytest.param(COMPILED, "inductor", {"activation": "gelu"}, marks=pytest.mark.nightly),
        (COMPILED, "inductor", MODERN_SETTINGS),
        # What is computed again is decided before inductor writes kernels.
        (RECOMPUTED, "aot_eager_decomp_partition", MODERN_SETTINGS),
    ],
)
def test_compiled_blocks_have_the_losses_and_gradients_of_the_eager_model(variant, backend, settings, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(replacements, "LOGITS_ON_CPU", 1000)  # so that they are chunked
    model = make(replace(SMALL, n_layer=1, **settings))
    passes: list[tuple[float, list[Any]]] = []
    x, y = tokens(2, 4, 32)
    for tried in (variant, replace(variant, compiled=False, checkpoint="none")):
        runner = Runner(model, tried)
        try:
            losses = [runner.forward_backward(x, y, 2).item() for _ in range(2)]
        except Exception as e:
            if "compiler" in str(e).lower():
                pytest.skip("no working C++ compiler here")
            raise
        passes.append((sum(losses), [p.grad for p in runner.parameters]))
        model.zero_grad()
    (loss, gradients), (expected_loss, expected) = passes
    is_rounded = variant.dtype == "bfloat16"
    assert loss == pytest.approx(expected_loss, rel=1e-2 if is_rounded else 1e-5)
    for a, b in zip(gradients, expected, strict=True):
        assert a.stride() == b.stride()  # which the fused AdamW takes for granted
        assert (a - b).norm() <= (0.05 if is_rounded else 1e-5) * b.norm() + 1e-6


def test_blocks_with_a_residual_stream_in_bfloat16_have_the_gradients_of_float32():
    dtypes = []

    def block(reference, module, x, context):
        dtypes.append(x.dtype)
        return reference(module, x, context)

    model = make(replace(SMALL, **MODERN_SETTINGS))
    x, y = tokens(2, 4, 32)
    expected = Runner(model, Variant()).measured((x, y), 1)[:2]
    runner = Runner(model, Variant("bfloat16"))
    runner.replacements = runner.replacements | {"Block.forward": bfloat16_residual(block)}
    found = runner.measured((x, y), 1)[:2]
    assert dtypes == 2 * [torch.bfloat16]
    compare_passes("the stream", "bfloat16", runner.names, found, expected)


def test_loss_that_is_kept_in_an_attribute_trains_compiled_too(monkeypatch):
    forward = GPT.forward

    def with_attribute(self: Any, idx: Any, targets: Any = None) -> Any:
        logits, loss = forward(self, idx, targets)
        self.aux = sum(block.attn.c_attn.weight.square().mean() for block in self.transformer.h)
        return logits, loss + 0.01 * self.aux

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(GPT, "forward", with_attribute)
    x, y = tokens(2, 4, 32)
    model = make()
    losses = [Runner(model, variant).forward_backward(x, y).item() for variant in (Variant(compiled=True), Variant())]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_blocks_with_a_constant_for_each_layer_have_a_graph_each(monkeypatch):
    """More than torch's limit of eight, after which it would go on uncompiled."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter, dynamic=False))
    compiling.prepare(torch.device("meta"))
    add = compile_one(None)
    for n in range(12):
        assert add(torch.add, torch.ones(3), n)[0] == 1 + n
    assert counter.frame_count == 12


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


@pytest.mark.parametrize("further", [{"loss": torch.ones(())}, {"z": 0.5}, {"z": torch.ones(2)}], ids=str)
def test_further_loss_that_would_replace_the_loss_or_cannot_be_added_is_refused(further):
    assert parts_of((None, torch.ones(()), {"z": torch.ones(1)})).keys() == {"loss", "z"}
    with pytest.raises(ValueError, match=r"GPT\.forward returns a further loss '(loss|z)'"):
        parts_of((None, torch.ones(()), further))
