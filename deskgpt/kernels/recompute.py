"""Activation checkpointing: blocks compute their activations again in the backward pass instead of keeping them."""

from __future__ import annotations

import random
from typing import Any

import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recomputed(block: nn.Module, x: Tensor, context: Any) -> Tensor:
    """block(x, context), of which only x is kept: the backward pass computes the rest again, with bit-equal gradients.

    Raises ValueError for a block whose second pass would differ.
    """
    before = state_between_passes(block)
    out = checkpoint(block, x, context, use_reentrant=False)
    if state_between_passes(block) != before:
        raise ValueError(
            "activation_checkpoint=full: blocks that change buffers, or draw from Python's random numbers, would "
            "compute something else the second time; take --activation_checkpoint=none"
        )
    return out


def state_between_passes(block: nn.Module) -> Any:
    """Return what a block may change and checkpoints do not set back, to be compared."""
    return random.getstate(), [(id(x), x._version) for x in block.buffers()]
