"""The loss in chunks is the plain cross-entropy of the logits, whatever computes them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import raises_one_line
from torch import Tensor
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from deskgpt.kernels import chunked_cross_entropy, loss

B, T, C, V = 3, 20, 8, 50


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Chunks of 16 tokens, also with our kernel, in any dtype."""
    monkeypatch.setattr(loss, "LOGITS_ON_CPU", 16 * V)
    monkeypatch.setattr(loss, "BYTES_WITH_KERNEL", 16 * V * 4)
    monkeypatch.setattr(loss, "WHOLE_TILES", 1)


class Net(nn.Module):
    """Hidden states of some tokens, and a head with further parameters. `logits` is one of HEADS."""

    def __init__(self, logits: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=draw))

        self.wte = parameter(V, C)
        self.head = parameter(V, C)
        self.bias = parameter(V)
        self.number = parameter(1)
        self.wide = parameter(4 * C, C)
        self.narrow = parameter(C, 4 * C)
        self.function = logits
        self.calls = 0
        self.kept: list[Tensor] = []

    def hidden(self, idx: Tensor) -> Tensor:
        x = F.rms_norm(F.embedding(idx, self.wte), (C,))
        self.activation = x.mean() * self.number
        return x

    def logits(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.function(self, x)


def by_rows(net: Net, x: Tensor) -> Tensor:
    """Only tokens from 40 on, of which the first chunk has none, use the bias."""
    y = F.linear(x, net.head)
    rare = F.rms_norm(net.wte[40:], (C,)).detach()
    chosen = (x[..., None, :] == rare).all(-1).any(-1)
    return y.index_put((chosen,), (y[chosen] + net.bias).type_as(y)) if chosen.any() else y


def keeping(net: Net, x: Tensor) -> Tensor:
    y = F.linear(x, net.head)
    net.kept.append(y.detach())
    return y


HEADS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "linear": lambda net, x: F.linear(x, net.head),
    "tied": lambda net, x: F.linear(x, net.wte),
    "bias": lambda net, x: F.linear(x, net.head, net.bias),
    "cap with a learned number": lambda net, x: net.number * torch.tanh(F.linear(x, net.head) / net.number),
    "float32": lambda net, x: 15 * torch.tanh(F.linear(x, net.head).float() / 15),
    "mlp": lambda net, x: F.linear(F.linear(F.gelu(F.linear(x, net.wide)), net.narrow) + x, net.head),
    "head that is not trained": lambda net, x: F.linear(x, net.head.detach()),
    "activation": lambda net, x: F.linear(x, net.head) * net.activation,
    "no hidden states": lambda net, x: net.bias.expand(*x.shape[:-1], V),
    "masked token": lambda net, x: F.linear(x, net.head).index_fill(-1, torch.tensor([0]), -torch.inf),
    "other parameters": by_rows,
    "kept": keeping,
}
AT_ONCE = {"activation", "no hidden states", "other parameters"}


def a_batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    idx = torch.randint(1, V, (B, T + 1), generator=draw)
    idx[0] = 1 + idx[0] % 20  # see by_rows
    y = idx[:, 1:].clone()
    y[0, 3:7] = -1
    y[2] = -1
    return idx[:, :-1], y


def plain(net: Net, x: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(net.logits(x).flatten(0, 1).float(), targets.flatten(), ignore_index=-1)


def chunked(net: Net, x: Tensor, targets: Tensor) -> Tensor:
    return chunked_cross_entropy(net.logits, x, targets, V)


def results(net: Net, function: Callable[..., Tensor], dtype: str = "float32") -> list[Tensor]:
    """The loss without and with gradients, and all gradients of two micro-batches."""
    idx, y = a_batch()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        with torch.no_grad():
            without = function(net, net.hidden(idx), y)
        values = [without]
        for ids, of_ids in ((idx, y), (idx.flip(0), y.flip(0))):
            values.append(function(net, net.hidden(ids), of_ids) * 0.5)
            values[-1].backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]
    return [value.detach() for value in values] + gradients


def assert_close(found: list[Tensor], expected: list[Tensor], dtype: str = "float32") -> None:
    assert all(x.isfinite().all() for x in expected)
    largest = max(x.norm() for x in expected)
    for a, b in zip(found, expected, strict=True):
        limit = 1e-5 if dtype == "float32" else 2e-2
        assert (a.float() - b.float()).norm() <= limit * max(b.norm(), 1e-2 * largest)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", HEADS)
def test_loss_in_chunks_is_the_plain_one_with_all_gradients(head, dtype, kernels):
    whole, parts = Net(HEADS[head]), Net(HEADS[head])
    expected = results(whole, plain, dtype=dtype)
    found = results(parts, chunked, dtype=dtype)
    assert_close(found, expected, dtype)
    assert parts.calls >= 3 * 2 or head in AT_ONCE


def test_loss_of_no_targets_is_zero_and_so_are_its_gradients(kernels):
    def untargeted(net: Net, x: Tensor, targets: Tensor) -> Tensor:
        return chunked(net, x, torch.full_like(targets, -1))

    assert not any(x.any() for x in results(Net(HEADS["mlp"]), untargeted))


def test_logits_that_a_model_keeps_for_its_log_stay_as_they_are(kernels):
    net = Net(keeping)
    results(net, chunked)
    idx, _ = a_batch()
    first = F.linear(net.hidden(idx), net.head).flatten(0, 1).detach()
    assert torch.equal(torch.cat([y.flatten(0, 1) for y in net.kept[:4]]), first)


def test_hooks_of_parameters_and_modules_get_each_gradient_once_and_whole():
    """Of a head that is tied to the embedding, which has a gradient of its own."""

    def seen(function: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        head = nn.Linear(C, V)
        net = Net(lambda net, x: head(x))
        head.weight = net.wte
        found: list[Tensor] = []

        def keep_norm(module: Any, inputs: Any, outputs: Any) -> None:
            found.append(outputs[0].norm())

        def double(gradient: Tensor) -> Tensor:
            found.append(gradient.clone())
            return 2 * gradient

        head.register_full_backward_hook(keep_norm)
        for p in head.parameters():
            p.register_hook(double)
        gradients = results(net, function)[3:]
        return sorted(found, key=Tensor.numel) + gradients

    assert_close(seen(chunked), seen(plain))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_heads_that_share_a_matrix_in_one_pass(dtype):
    """As for the token after the next one. Autocast casts the matrix once, for both."""

    def two(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def both(net: Net, x: Tensor, targets: Tensor) -> Tensor:
            later = F.linear(x[:, :-1], net.narrow @ net.wide)
            return function(net, x, targets) + 0.3 * function(net, later, targets[:, 1:])

        return both

    found = results(Net(HEADS["tied"]), two(chunked), dtype=dtype)
    assert_close(found, results(Net(HEADS["tied"]), two(plain), dtype=dtype), dtype)


def test_graph_can_be_kept_for_another_pass_and_a_second_derivative_is_refused():
    gradients = []
    idx, targets = a_batch()
    for function in (plain, chunked):
        net: Any = Net(HEADS["linear"])
        value = function(net, net.hidden(idx), targets)
        (alone,) = torch.autograd.grad(value, net.head, retain_graph=True)
        (2 * value).backward()
        gradients.append([alone, net.head.grad / 2])
    assert_close(gradients[1], gradients[0])
    assert torch.equal(*gradients[1])
    with raises_one_line("no second derivative", "create_graph=True", "GPT.loss", kind=RuntimeError):
        torch.autograd.grad(chunked(net, net.hidden(idx), targets), net.head, create_graph=True)


def test_further_loss_of_what_logits_has_kept_is_refused():
    """It would be that of the last chunk, and its gradient would end there."""

    def keeping_z(net: Net, x: Tensor) -> Tensor:
        y = F.linear(x, net.head)
        net.kept = [y.logsumexp(-1)]
        return y

    net = Net(keeping_z)
    idx, targets = a_batch()
    total = chunked(net, net.hidden(idx), targets) + net.kept[0].square().mean()
    with raises_one_line("keeps a tensor", "GPT.logits", "GPT.forward", kind=RuntimeError):
        total.backward()


def test_weight_that_is_computed_once_and_cached_gets_its_gradients():
    """torch's weight_norm, in and out of its cache."""

    def gradients(function: Callable[..., Tensor], cache: Callable[[], Any] = nullcontext) -> list[Any]:
        torch.manual_seed(0)
        head = weight_norm(nn.Linear(C, V))
        net = Net(lambda net, x: head(x))
        idx, targets = a_batch()
        with cache():
            function(net, net.hidden(idx), targets).backward()
        return [p.grad for p in (*head.parameters(), net.wte)]

    assert_close(gradients(chunked), gradients(plain))
    assert_close(gradients(chunked, parametrize.cached), gradients(plain))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_that_a_card_compiles_is_the_one_that_is_not_compiled(dtype):
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 33, generator=draw).mul(4).to(dtype)
    targets = torch.randint(33, (7,), generator=draw)
    ignored = torch.tensor([False, True, False, False, True, False, False])
    eager, fused = logits.clone(), logits.clone()
    losses = [loss.gradient_(eager, targets, ignored), loss.fused_gradient_(fused, targets, ignored)]
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(fused, eager)
