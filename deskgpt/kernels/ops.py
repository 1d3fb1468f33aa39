"""Attention and activations, in C++ on a CPU that has our library (cpu_kernels.py), else by torch.

Each docstring says what the function computes, and the tests hold its kernels to that.

Shape legend: B batch, T time, S time of keys, H heads, D head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import deskgpt.kernels.cpu_kernels as cpu_kernels


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True) of q, k, v (B, H, T, D).

    bench/results/2026-11-25-cpu-kernels.md has the times of our kernel and of torch's.
    """
    if not dropout and cpu_kernels.takes(q, k, v):
        return torch.ops.deskgpt.causal_attention(q, k, v)[0]
    if q.device.type == "mps":
        T = q.size(2)
        return matmul_attention(q, k, v, torch.ones(T, T, dtype=torch.bool, device=q.device).tril(), dropout)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float = 0.0) -> Tensor:
    """F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout), q (B, H, T, D), k, v (B, H, S, D).

    mask (T, S): True where a query may look at a key; None: everywhere.
    """
    if q.device.type == "mps":
        return matmul_attention(q, k, v, mask, dropout)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)


def matmul_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """masked_attention by matmuls, for MPS.

    There torch's fused attention lets tokens see later ones in 16 bits (pytorch issue 195910), and is wrong for few
    queries that are transposed (181133, in 2.11). It serves passes without gradients only, so training loses nothing.
    """
    scores = (q @ k.mT * q.size(-1) ** -0.5).float()  # (B, H, T, S)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = F.dropout(scores.softmax(-1), dropout)
    return weights.type_as(v) @ v


def gelu_tanh(x: Tensor) -> Tensor:
    """F.gelu(x, approximate="tanh"). Our kernel takes half the time of torch's tanh on a CPU."""
    if cpu_kernels.takes(x):
        return torch.ops.deskgpt.activation(x, "gelu_tanh")
    return F.gelu(x, approximate="tanh")


def relu2(x: Tensor) -> Tensor:
    """F.relu(x) squared (Primer, arXiv:2109.08668). Our kernel takes a third of the time of the two steps on a CPU."""
    if cpu_kernels.takes(x):
        return torch.ops.deskgpt.activation(x, "relu2")
    x = F.relu(x)
    return x * x  # x.square() is a power to CUDA's autocast, which computes it in float32
