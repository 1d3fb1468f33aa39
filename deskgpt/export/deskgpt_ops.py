"""What model.py imports from deskgpt, in plain torch: for folders that are used without deskgpt (carry.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Linear = nn.Linear
AtLeast1 = int
Fraction = float


class Range:
    """The range of a setting, of which deskgpt checked the value."""

    def __init__(self, low: float = 0, high: float = 0, below: float = 0) -> None:
        pass


def check_fields(config: Any) -> None:
    pass


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    if q.device.type == "mps":  # in 16 bits it lets tokens see later ones without a mask (pytorch issue 195910)
        T = q.size(2)
        return masked_attention(q, k, v, torch.ones(T, T, dtype=torch.bool, device=q.device).tril(), dropout)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float = 0.0) -> Tensor:
    # MPS is wrong for few queries that are transposed (pytorch issue 181133).
    return F.scaled_dot_product_attention(q.contiguous(), k.contiguous(), v.contiguous(), mask, dropout)


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def relu2(x: Tensor) -> Tensor:
    return F.relu(x) * F.relu(x)


def recomputed(block: nn.Module, x: Tensor, context: Any) -> Tensor:
    return checkpoint(block, x, context, use_reentrant=False)


def chunked_cross_entropy(logits: Callable[[Tensor], Tensor], x: Tensor, targets: Tensor, *chunks: Any) -> Tensor:
    total = F.cross_entropy(logits(x).flatten(0, 1).float(), targets.flatten(), ignore_index=-1, reduction="sum")
    return total / (targets != -1).sum().clamp(min=1)
