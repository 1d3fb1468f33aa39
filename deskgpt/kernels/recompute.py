"""Activation checkpointing: blocks compute their activations again in the backward pass instead of keeping them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from deskgpt.kernels import cpu_kernels

MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def attention_operators() -> tuple[Any, ...]:
    """Torch's fused attention, by device. Without one of them, selective checkpoints compute its result again."""
    names = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    packets = [getattr(torch.ops.aten, f"_scaled_dot_product_{name}", None) for name in names]
    return tuple(packet.default for packet in packets if packet is not None)


ATTENTION = attention_operators()


def recomputed_block(which: str, dropout: float) -> Callable[..., Any]:
    """The replacement of Block.forward. Gradients stay bit-equal where nothing is compiled.

    which: full, which keeps each block's input only; selective, which also keeps what takes long to compute, see
    is_kept. Passes without gradients are left alone. Raises ValueError for a block whose second pass would differ.
    """
    options: dict[str, Any] = {}
    if which == "selective":
        policy = functools.partial(is_kept, dropout)
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)

    def computed_again(plain: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(block, *args, **kwargs)
        before = kept_between_passes(block)
        out = checkpoint(plain, block, *args, use_reentrant=False, **options, **kwargs)
        if kept_between_passes(block) != before:
            raise ValueError(
                f"activation_checkpoint={which}: blocks that change buffers, or draw from Python's random numbers, "
                "would compute something else the second time; take --activation_checkpoint=none"
            )
        return out

    return computed_again


def kept_between_passes(block: nn.Module) -> Any:
    """What a block may change that checkpoints do not set back, to be compared; nothing while it is compiled."""
    if torch.compiler.is_compiling():  # after a check of what is not compiled
        return None
    return random.getstate(), [(id(x), x._version) for x in block.buffers()]


def is_kept(dropout: float, context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether selective checkpointing keeps what op returns: attention and its matmuls, not those of the MLP.

    The MLP's first result is its largest, and no gradient needs the last one. Attention with dropout is computed again:
    it draws random numbers, and without it the dropouts after it would draw others than in the forward pass.
    """
    if op in MATMULS:
        n_in, n_out = args[-1].shape  # to 3C and C in attention, to 4C and C in the MLP
        return n_in <= n_out < 4 * n_in
    return (op in ATTENTION or str(op) == cpu_kernels.ATTENTION) and not dropout
