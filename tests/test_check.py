"""What --dry_run and `make qualify` find wrong with a model, each named in one sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_equal
from tiny_models import MODERN, SMALL, make, tokens
from torch import Tensor

import model as definition
from deskgpt.compute.check import check_model
from deskgpt.compute.variant import Variant
from deskgpt.kernels import causal_attention, cpu_kernels
from model import GPT


def problems_of(model: GPT, variant: Variant | None = None) -> list[str]:
    idx = tokens(2, 33)
    return check_model(model, variant or Variant(), idx[:, :-1], idx[:, 1:])


def seeing_the_future(q: Tensor, k: Tensor, v: Tensor, context: Any, dropout: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def loss_with_smoothing(self: GPT, x: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(self.logits(x).flatten(0, 1), targets.flatten(), label_smoothing=0.1)


def loss_of_the_head(self: GPT, x: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(self.logits(x.detach()).flatten(0, 1), targets.flatten())


def rounding(x: Tensor) -> Tensor:
    """An activation that is wrong in bfloat16 only."""
    y = F.gelu(x, approximate="tanh")
    return y * 1.5 if y.dtype == torch.bfloat16 else y


@pytest.mark.parametrize("config", [SMALL, MODERN])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nothing_is_wrong_with_the_model_as_it_is(config, dtype):
    model = make(config)
    before = {name: w.clone() for name, w in model.state_dict().items()}
    kernels = cpu_kernels.may_exist() and dtype != "float16"
    residual_dtype = "bfloat16" if dtype == "bfloat16" else "float32"
    assert problems_of(model, Variant(dtype, cpu_kernels=kernels, residual_dtype=residual_dtype)) == []
    assert_equal(dict(model.state_dict()), before)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    cpu_kernels.unload()


@pytest.mark.slow
def test_compiled_blocks_compute_what_the_model_says(monkeypatch):
    monkeypatch.setattr("deskgpt.kernels.loss.LOGITS_ON_CPU", 1000)  # so that the loss is computed in chunks
    config = replace(MODERN, n_layer=1)
    try:
        assert problems_of(make(config), Variant("bfloat16", compiled=True)) == []
    except Exception as e:
        if "compiler" in str(e).lower():
            pytest.skip("no working C++ compiler here")
        raise


@pytest.mark.parametrize(
    ("changed", "change", "named"),
    [
        ("model.attention", seeing_the_future, ["tokens see later ones"]),  # of layers that begin as zeros, too
        ("model.GPT.loss", loss_with_smoothing, ["is not the cross-entropy of the logits"]),
        ("model.GPT.loss", loss_of_the_head, ["no gradient reaches transformer.", "more"]),
        ("model.gelu_tanh", rounding, ["bfloat16", "the gradient of", "differs from eager float32's"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_change_that_breaks_the_model_is_named(changed, change, named, monkeypatch):
    monkeypatch.setattr(changed, change)
    problems = problems_of(GPT(MODERN) if changed == "model.attention" else make(), Variant("bfloat16"))
    assert problems
    for part in named:
        assert part in problems[-1]
        assert "\n" not in problems[-1]


def test_parameter_that_nothing_uses_is_named_and_one_that_is_not_trained_is_not():
    model = make()
    model.register_parameter("scale", torch.nn.Parameter(torch.ones(3)))
    assert problems_of(model) == ["no gradient reaches scale"]
    model.get_parameter("scale").requires_grad_(False)
    assert problems_of(model) == []


@pytest.mark.skipif(not cpu_kernels.may_exist(), reason="for Linux on a processor with AVX2 or AVX-512")
@pytest.mark.parametrize("factor", [0.0, torch.nan])
def test_kernel_that_is_wrong_is_named_with_its_variant(factor, monkeypatch):
    """One of 32 positions is lost, or is not a number, if our kernels are in use."""

    def wrong(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        y = causal_attention(q, k, v, dropout)
        is_last = torch.arange(q.size(2))[:, None] == q.size(2) - 1
        return torch.where(is_last, y * factor, y) if cpu_kernels.dtypes() else y

    monkeypatch.setattr(definition, "causal_attention", wrong)
    [loss, gradient] = problems_of(make(), Variant(cpu_kernels=True))
    cpu_kernels.unload()
    assert "C++ kernels, not compiled: the loss differs" in loss
    assert "C++ kernels, not compiled: the gradient of" in gradient
