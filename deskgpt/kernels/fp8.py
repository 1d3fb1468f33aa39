"""Linear layers whose matmuls are in 8-bit floats while they train (train.py's fp8=True).

Inputs and weights are rounded to e4m3, which has 3 bits of mantissa, and gradients to e5m2, which has their range; each
tensor has one scale, so that its largest value is the format's (arXiv:2209.05433). Products are summed in float32.
Cards of compute capability 8.9 and later multiply 8-bit floats twice as fast as bfloat16. A CPU rounds alike and is
slower, so what this does to a loss can be seen there.

Shape legend: N tokens, I channels of the input, O of the output.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
MULTIPLE = 16  # cuBLAS takes 8-bit matrices of such sizes only
SMALLEST_SCALE = 1e-30  # of a tensor of zeros
CAPABILITY = (8, 9)  # of CUDA devices that multiply 8-bit floats: RTX 40, L4, H100 and later


class Linear(nn.Linear):
    """nn.Linear; with `fp8` set (use_fp8), its training passes are those of fp8_linear.

    Passes without gradients, as in evaluations and sampling, stay in the run's dtype. So do batches whose number of
    tokens is no multiple of 16.
    """

    fp8 = False

    def forward(self, x: Tensor) -> Tensor:
        n_tokens = x.numel() // x.size(-1)
        if self.fp8 and torch.is_grad_enabled() and n_tokens % MULTIPLE == 0:
            return fp8_linear(x, self.weight, self.bias)
        return super().forward(x)


def has_fp8(device: torch.device) -> bool:
    """Return whether the device multiplies 8-bit floats, faster than others."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY


def use_fp8(model: nn.Module, device: torch.device) -> None:
    """Set `fp8` of the blocks' Linear layers whose sizes are multiples of 16. Other layers stay in the run's dtype.

    So does the head: rounding the gradient of its logits costs more than its matmuls gain.

    Raises ValueError if the device has no such matmuls, or no layer such sizes.
    """
    if not has_fp8(device) and device.type != "cpu":
        raise ValueError("fp8=True needs a card of compute capability 8.9 or later (RTX 40, H100); try --fp8=False")
    layers = [m for m in model.modules() if isinstance(m, Linear)]
    for layer in layers:
        layer.fp8 = layer.in_features % MULTIPLE == 0 and layer.out_features % MULTIPLE == 0
    if not any(layer.fp8 for layer in layers):
        raise ValueError(
            f"fp8=True needs widths that are multiples of {MULTIPLE}; try another --n_embd, or --fp8=False"
        )


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear(x, weight, bias) with its three matmuls in 8 bits: x (..., I), weight (O, I), bias (O,).

    The result is in autocast's dtype, if that is on, else in that of x.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    y = Fp8Matmul.apply(x.flatten(0, -2), weight, dtype).unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias.to(dtype)


class Fp8Matmul(torch.autograd.Function):
    """x @ weight.T of matrices that are rounded to 8 bits, as is the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """x (N, I) @ weight.T (I, O), in dtype."""
        x8, x_scale = rounded(x, E4M3)
        w8, w_scale = rounded(weight, E4M3)
        ctx.save_for_backward(x8, x_scale, w8, w_scale)
        ctx.dtypes = (x.dtype, weight.dtype)
        return matmul(x8, x_scale, w8, w_scale, dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """grad (N, O) of the loss by the product."""
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        g8, g_scale = rounded(grad, E5M2)
        # cuBLAS multiplies rows by rows, so what is summed over must lie in rows.
        by_x = matmul(g8, g_scale, w8.t().contiguous(), w_scale, grad.dtype)
        by_weight = matmul(g8.t().contiguous(), g_scale, x8.t().contiguous(), x_scale, grad.dtype)
        x_dtype, weight_dtype = ctx.dtypes
        return by_x.to(x_dtype), by_weight.to(weight_dtype), None


def rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x / scale in dtype, and the scale (), which makes the largest value dtype's largest."""
    scale = (x.abs().amax().float() / torch.finfo(dtype).max).clamp(min=SMALLEST_SCALE)
    return (x.float() / scale).to(dtype), scale


def matmul(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """(a * a_scale) @ (b * b_scale).T of 8-bit a (M, K) and b (N, K), in dtype.

    fast: sums with fewer bits on Hopper, as is usual in forward passes. torch 2.11 can neither compile its public
    F.scaled_mm nor run it on a CPU.
    """
    return torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=dtype, use_fast_accum=fast)
