"""Linear layers whose forward pass and input gradient are 8-bit matmuls, FP8 or INT8, to measure what they would save.

The gradient of the weight stays in the dtype of the activations. Scales are dynamic: each tensor's own for FP8, each
row's for INT8. Nothing trains with this.

Shape legend: N tokens, I input channels, O output channels.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn as nn
from torch import Tensor

from model import GPT

EightBits = Literal["fp8", "int8"]

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
INT8_MAX = 127
LEAST_SCALE = 1e-12  # of a tensor of zeros


def matmul(a: Tensor, b: Tensor, kind: EightBits, fast: bool = False) -> Tensor:
    """a @ b.T of a (N, I) and b (O, I), rounded to 8 bits and multiplied in them; (N, O) in a's dtype.

    fast: FP8's sums may be rounded as they grow, as torchao has it in the forward pass alone.
    """
    if kind == "fp8":
        a8, a_scale = to_fp8(a)
        b8, b_scale = to_fp8(b)
        # The second factor has to be laid out by columns.
        y = torch._scaled_mm(
            a8, b8.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16, use_fast_accum=fast
        )
        return y.to(a.dtype)
    a8, a_scale = to_int8(a)
    b8, b_scale = to_int8(b)
    return (torch._int_mm(a8, b8.t()).float() * a_scale * b_scale.t()).to(a.dtype)


def to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x / scale by rows of memory, scale of the whole tensor)."""
    scale = (x.abs().amax().float() / FP8_MAX).clamp(min=LEAST_SCALE)
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).contiguous(), scale


def to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x / scale by rows of memory, scale (rows, 1))."""
    scale = (x.abs().amax(1, keepdim=True).float() / INT8_MAX).clamp(min=LEAST_SCALE)
    return (x.float() / scale).round().to(torch.int8).contiguous(), scale


class EightBitMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kind: EightBits) -> Tensor:
        """x (N, I), weight (O, I); returns (N, O)."""
        ctx.save_for_backward(x, weight)
        ctx.kind = kind
        return matmul(x, weight, kind, fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].to(x.dtype)
        return matmul(grad, weight.t(), ctx.kind), (grad.t() @ x).to(weight.dtype), None


class EightBitLinear(nn.Module):
    def __init__(self, linear: nn.Linear, kind: EightBits) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        y = EightBitMatmul.apply(x.to(dtype).flatten(0, -2), self.weight, self.kind).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias.to(dtype)


def use_eight_bits(model: GPT, kind: EightBits) -> None:
    """Swaps the linear layers of the blocks, not the head, for layers with the same parameters."""
    block: Any
    for block in model.transformer.h:
        block.attn.c_attn = EightBitLinear(block.attn.c_attn, kind)
        block.attn.c_proj = EightBitLinear(block.attn.c_proj, kind)
        block.mlp.c_fc = EightBitLinear(block.mlp.c_fc, kind)
        block.mlp.c_proj = EightBitLinear(block.mlp.c_proj, kind)
