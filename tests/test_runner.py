from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import MODERN_SETTINGS

from deskgpt.compute.runner import Form, Runner, parts_of
from deskgpt.faster import kernels
from model import GPT, GPTConfig


def make(bfloat16: bool = False, compiled: bool = False, checkpoint: str = "none", **settings: Any) -> Runner:
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=32, vocab_size=100, n_layer=2, n_head=2, n_embd=32, **settings))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    dtype = "bfloat16" if bfloat16 else "float32"
    return Runner(model, Form(dtype, compiled, attention="explicit" if bfloat16 else "flash", checkpoint=checkpoint))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 100, (4, 33), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def taken(runner: Runner, micro_steps: int) -> tuple[float, list[torch.Tensor]]:
    """The sum of the losses of some micro-batches, and the gradients that they leave."""
    try:
        loss = sum(runner.forward_backward(*batch(), micro_steps).item() for _ in range(micro_steps))
    except Exception as e:
        if runner.form.compiled and "compiler" in str(e).lower():
            pytest.skip("no working C++ compiler here")
        raise
    return loss, [p.grad for p in runner.parameters if p.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "chunked", "bfloat16", "checkpoint"),
    [
        ({"activation": "gelu"}, True, True, "none"),
        (MODERN_SETTINGS, False, False, "selective"),
    ],
)
def test_compiled_graph_gives_the_losses_and_gradients_of_the_plain_model(
    settings, chunked, bfloat16, checkpoint, monkeypatch
):
    if chunked:
        monkeypatch.setattr(kernels, "LOGITS_ON_CPU", 1000)
    plain = make(bfloat16, **settings)
    compiled = make(bfloat16, compiled=True, checkpoint=checkpoint, **settings)
    # One graph of both passes would compute no activations again.
    assert (compiled.graph is None) == (checkpoint != "none")
    for micro_steps in (1, 2):
        loss, expected = taken(plain, micro_steps)
        got, gradients = taken(compiled, micro_steps)
        assert got == pytest.approx(loss, rel=1e-2 if bfloat16 else 1e-5)
        assert len(gradients) == len(expected) == len(plain.parameters)
        for a, b in zip(gradients, expected, strict=True):
            assert a.stride() == b.stride()  # which the fused AdamW takes for granted
            assert (a - b).norm() <= (0.05 if bfloat16 else 1e-5) * b.norm() + 1e-6


def test_evaluation_of_a_compiled_graph_is_that_of_the_plain_model():
    losses = []
    for runner in (make(compiled=True), make()):
        with runner.evaluating():
            losses.append(runner.loss(*batch()))
    assert torch.equal(*losses)


def test_opaque_gelu_is_gelu_with_its_gradient():
    kernels.register_operators()
    x = torch.randn(1000, requires_grad=True)
    y = torch.ops.deskgpt.activation(x, "gelu")
    z = F.gelu(x)
    assert torch.equal(y, z)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(z.sum(), x)[0])
    torch.library.opcheck(torch.ops.deskgpt.activation.default, (x, "gelu"))


def test_opaque_loss_keeps_to_the_rules_of_compiled_operations(monkeypatch):
    kernels.register_operators()
    monkeypatch.setattr(kernels, "compiled_softmax_", lambda: kernels.softmax_)
    h, w = torch.randn(12, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    t = torch.randint(0, 20, (12,))
    op = torch.ops.deskgpt.chunked_cross_entropy.default
    for needs_grad in (True, False):
        args = (h, w, t, torch.float32, 5, needs_grad, False)
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))
    ours = op(h, w, t, torch.float32, 5, True, False)[0]
    plain = F.cross_entropy(h @ w.t(), t, reduction="sum")
    torch.testing.assert_close(torch.autograd.grad(ours, (h, w)), torch.autograd.grad(plain, (h, w)))


@pytest.mark.parametrize("further", [{"loss": torch.ones(())}, {"z": 0.5}, {"z": torch.ones(2)}], ids=str)
def test_further_loss_that_would_replace_the_loss_or_cannot_be_added_is_refused(further):
    assert parts_of((None, torch.ones(()), {"z": torch.ones(1)})).keys() == {"loss", "z"}
    with pytest.raises(ValueError, match=r"GPT\.forward returns a further loss '(loss|z)'"):
        parts_of((None, torch.ones(()), further))
