"""The functions of deskgpt that model.py needs, in plain torch: export.py copies this file.

Imports of these names from deskgpt are rewritten to come from here (export_hugging_face.py).

Shape legend: B batch, T time, S time with what is cached, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

# ---- what model.py imports -----------------------------------------------------------------------

Linear = nn.Linear
LayerNorm = nn.LayerNorm
RMSNorm = nn.RMSNorm
AtLeast1 = int
Fraction = float


def Range(*limits: float, **further: float) -> None:
    """Stand for the range of a setting, whose value was checked before it was exported."""


def check_fields(config: Any) -> None:
    """Leave a configuration as it is."""


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    T = q.size(2)
    # A mask, not is_causal: with that, tokens see later ones in 16 bits on MPS (pytorch issue
    # 195910).
    return masked_attention(
        q, k, v, torch.ones(T, T, dtype=torch.bool, device=q.device).tril(), dropout
    )


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float = 0.0
) -> Tensor:
    # MPS is wrong for few queries that are transposed (pytorch issue 181133).
    return F.scaled_dot_product_attention(
        q.contiguous(), k.contiguous(), v.contiguous(), mask, dropout
    )


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def relu2(x: Tensor) -> Tensor:
    return F.relu(x) * F.relu(x)


def add_norm(x: Tensor, y: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    x = x + y
    return x, norm(x)


def split_heads(
    qkv: Tensor, n_head: int, qk_norm: bool, rotary: Tensor | None
) -> tuple[Tensor, ...]:
    qkv = qkv.unflatten(2, (3, n_head, -1))  # (B, T, 3, H, D)
    q, k, v = qkv.transpose(1, 3).unbind(2)  # each (B, H, T, D)
    if qk_norm:
        q = F.rms_norm(q, q.shape[-1:], eps=1e-5).type_as(v)
        k = F.rms_norm(k, k.shape[-1:], eps=1e-5).type_as(v)
    if rotary is not None:
        q = rotate(q, rotary)
        k = rotate(k, rotary)
    return q, k, v


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate pairs of channels of x (B, H, T, D) by the angles of their positions.

    rotary (2, T, D / 2) holds the rows of rotary_table for these positions. The product of a query
    and a key then depends on their distance alone.
    """
    cos, sin = rotary
    # In float32: bfloat16's 8 bits are too few for angles. The pairs that turn together are
    # (i, i + D / 2).
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).type_as(x)


def token_shift(x: Tensor, n: int, before: Tensor | None = None) -> Tensor:
    if before is None:
        before = torch.zeros_like(x[:, :1, :n])
    return torch.cat((torch.cat((before, x[:, :-1, :n]), 1), x[:, :, n:]), -1)


def checkpoint_block(block: nn.Module, x: Tensor, context: Any) -> Tensor:
    return block(x, context)


def chunked_cross_entropy(
    logits: Callable[[Tensor], Tensor], x: Tensor, targets: Tensor, *chunks: Any
) -> Tensor:
    """Return the mean loss of hidden states x (B, T, C), with all logits at once."""
    loss = F.cross_entropy(logits(x).flatten(0, 1).float(), targets.flatten(), ignore_index=-1)
    return loss.masked_fill((targets == -1).all(), 0.0)  # torch's mean of no targets is NaN
