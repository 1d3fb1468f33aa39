"""Linear layers in 8-bit floats. The CPU's matmuls of them are exact, so they show what cards compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import raises_one_line, tiny
from torch import Tensor, nn

import train
from deskgpt.checkpoint import store
from deskgpt.kernels.fp8 import E4M3, E5M2, Linear, fp8_linear, rounded, use_fp8
from deskgpt.run.log import read_events


def test_matmuls_are_those_of_the_rounded_matrices():
    torch.manual_seed(0)
    x = torch.randn(2, 16, 64, requires_grad=True)
    weight = torch.randn(48, 64, requires_grad=True)
    bias = torch.randn(48, requires_grad=True)
    grad = torch.randn(2, 16, 48)
    y = fp8_linear(x, weight, bias)
    y.backward(grad)
    assert x.grad is not None
    assert weight.grad is not None

    def exact(t: Tensor, dtype: torch.dtype) -> Tensor:
        values, scale = rounded(t.detach(), dtype)
        assert values.float().abs().max() == torch.finfo(dtype).max  # the whole range of the format is used
        return values.double() * scale.double()

    x8 = exact(x, E4M3).flatten(0, 1)
    w8 = exact(weight, E4M3)
    g8 = exact(grad, E5M2).flatten(0, 1)
    near: Any = {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(y.flatten(0, 1).double(), x8 @ w8.T + bias.double(), **near)
    torch.testing.assert_close(x.grad.flatten(0, 1).double(), g8 @ w8, **near)
    torch.testing.assert_close(weight.grad.double(), g8.T @ x8, **near)
    torch.testing.assert_close(bias.grad, grad.sum((0, 1)))


def test_only_training_passes_of_whole_sizes_are_in_8_bits():
    torch.manual_seed(0)
    layer = Linear(32, 48)
    layer.fp8 = True
    plain = nn.Linear(32, 48)
    plain.load_state_dict(layer.state_dict())
    for x in (torch.randn(1, 15, 32), torch.randn(1, 16, 32)):
        assert torch.equal(layer(x), plain(x)) == (x.size(1) == 15)
        with torch.no_grad():
            assert torch.equal(layer(x), plain(x))


def test_zeros_stay_zeros_and_nan_is_seen():
    weight = torch.randn(16, 16)
    assert not fp8_linear(torch.zeros(16, 16), weight).any()
    assert fp8_linear(torch.full((16, 16), torch.nan), weight).isnan().all()


def test_run_in_8_bits_learns_and_says_so(chars, tmp_path, capfd):
    best = train.main(tiny(chars, tmp_path / "fp8", fp8=True, max_iters=30, eval_interval=30))
    plain = train.main(tiny(chars, tmp_path / "plain", max_iters=30, eval_interval=30))
    assert best == pytest.approx(plain, abs=0.05)
    assert best != plain
    assert "8-bit matmuls in 8 of 9 linear layers\n" in capfd.readouterr().out
    (start, *_) = read_events(tmp_path / "fp8" / "log.jsonl")
    assert start["fp8"] is True
    assert all(w.dtype == torch.float32 for w in store.load(str(tmp_path / "fp8" / "ckpt.pt")).model.values())


def test_device_and_sizes_without_8_bit_matmuls_are_refused():
    with raises_one_line("fp8=True", "--fp8=False"):
        use_fp8(Linear(16, 16), torch.device("mps"))
    with raises_one_line("multiples of 16", "--n_embd", "--fp8=False"):
        use_fp8(Linear(16, 24), torch.device("cpu"))
