"""Linear layers in 8-bit floats. The CPU's matmuls of them are exact, so they show what cards compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import events, raises_one_line, tiny, weights
from torch import Tensor

import train
from deskgpt.kernels.fp8 import E4M3, E5M2, Linear, fp8_linear, rounded, use_fp8


def test_matmuls_are_those_of_the_rounded_matrices():
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((2, 16, 64), (48, 64), (48,)))
    grad = torch.randn(2, 16, 48)
    y = fp8_linear(x, weight, bias)
    by_x, by_weight, by_bias = torch.autograd.grad(y, (x, weight, bias), grad)

    def exact(t: Tensor, dtype: torch.dtype) -> Tensor:
        values, scale = rounded(t.detach(), dtype)
        assert values.float().abs().max() == torch.finfo(dtype).max  # the whole range of the format is used
        return values.double() * scale.double()

    x8 = exact(x, E4M3).flatten(0, 1)
    w8 = exact(weight, E4M3)
    g8 = exact(grad, E5M2).flatten(0, 1)
    near: Any = {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(y.flatten(0, 1).double(), x8 @ w8.T + bias.double(), **near)
    torch.testing.assert_close(by_x.flatten(0, 1).double(), g8 @ w8, **near)
    torch.testing.assert_close(by_weight.double(), g8.T @ x8, **near)
    torch.testing.assert_close(by_bias, grad.sum((0, 1)))


def test_only_training_passes_of_whole_sizes_are_in_8_bits():
    torch.manual_seed(0)
    layer = Linear(32, 48)
    layer.fp8 = True
    for n in (15, 16):
        x = torch.randn(1, n, 32)
        plain = F.linear(x, layer.weight, layer.bias)
        assert torch.equal(layer(x), plain) == (n == 15)
        with torch.no_grad():
            assert torch.equal(layer(x), plain)


def test_zeros_stay_zeros_and_nan_is_seen():
    weight = torch.randn(16, 16)
    assert not fp8_linear(torch.zeros(16, 16), weight).any()
    assert fp8_linear(torch.full((16, 16), torch.nan), weight).isnan().all()


def test_run_in_8_bits_learns_and_says_so(chars, tmp_path, capfd):
    best = train.main(tiny(chars, tmp_path / "fp8", fp8=True, max_iters=30, eval_interval=30))
    plain = train.main(tiny(chars, tmp_path / "plain", max_iters=30, eval_interval=30))
    assert best == pytest.approx(plain, abs=0.05)
    assert best != plain
    assert "8-bit matmuls in 8 of 9 linear layers\n" in capfd.readouterr().out  # all but the head
    assert events(tmp_path / "fp8", "start")[0]["fp8"] is True
    assert {w.dtype for w in weights(tmp_path / "fp8").values()} == {torch.float32}


def test_device_and_sizes_without_8_bit_matmuls_are_refused():
    with raises_one_line("fp8=True", "--fp8=False"):
        use_fp8(Linear(16, 16), torch.device("mps"))
    with raises_one_line("multiples of 16", "--n_embd", "--fp8=False"):
        use_fp8(Linear(16, 24), torch.device("cpu"))
