"""Activation checkpointing: blocks compute their activations again in the backward pass instead of keeping them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import deskgpt.kernels.cpu_kernels as cpu_kernels

MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def attention_operators() -> tuple[Any, ...]:
    """Return torch's fused attention, by device. Selective checkpoints compute the result of others again."""
    names = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    packets = [getattr(torch.ops.aten, f"_scaled_dot_product_{name}", None) for name in names]
    return tuple(packet.default for packet in packets if packet is not None)


ATTENTION = attention_operators()


def recomputed(block: nn.Module, x: Tensor, context: Any, which: str, dropout: float) -> Tensor:
    """block(x, context), whose activations the backward pass computes again; gradients stay bit-equal.

    which: full, which keeps the block's input only; selective, which also keeps what takes long to compute, see
    is_kept. dropout: of attention. Raises ValueError for a block whose second pass would differ.
    """
    context_fn: Callable[[], Any] | None = None
    if which == "selective":
        policy = functools.partial(is_kept, dropout)
        context_fn = functools.partial(create_selective_checkpoint_contexts, policy)
    options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}
    before = state_between_passes(block)
    out = checkpoint(block, x, context, use_reentrant=False, **options)
    if state_between_passes(block) != before:
        raise ValueError(
            f"activation_checkpoint={which}: blocks that change buffers, or draw from Python's random numbers, "
            "would compute something else the second time; take --activation_checkpoint=none"
        )
    return out


def state_between_passes(block: nn.Module) -> Any:
    """Return what a block may change and checkpoints do not set back, to be compared."""
    return random.getstate(), [(id(x), x._version) for x in block.buffers()]


def is_kept(dropout: float, context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    """Return whether selective checkpointing keeps the result of op: attention and its matmuls, not the MLP's.

    The MLP's first result is its largest, and no gradient needs the last one. Attention with dropout is computed again:
    it draws random numbers, and without it the dropouts after it would draw others than in the forward pass.
    """
    if op in MATMULS:
        n_in, n_out = args[-1].shape  # to 3C and C in attention, to 4C and C in the MLP
        return n_in <= n_out < 4 * n_in
    return (op in ATTENTION or str(op) == cpu_kernels.ATTENTION) and not dropout
