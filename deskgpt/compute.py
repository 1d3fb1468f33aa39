"""How a pass computes: its mode, dtype, losses and seeds. compiling.py chooses the mode by rule."""

import random
from collections.abc import Callable, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deskgpt.device import DTYPES
from deskgpt.errors import shortened


@dataclass(frozen=True)
class ComputeMode:
    """How a micro-batch is computed.

    The default is eager float32; the others are compared with it.
    """

    dtype: str = "float32"  # of the matmuls
    compiled: bool = False  # the transformer or its blocks, and the softmax of the loss
    cpu_kernels: bool = False  # ours in C++ (cpu_kernels.cpp)
    recompute: str = "none"  # full: the backward pass computes the blocks' activations again
    residual_dtype: str = "float32"  # of the residual stream
    cuda_graph: bool = False  # a micro-batch's kernels are queued by one call (cuda_graph.py)
    loss_chunks: int = 1  # in which a card computes the loss of a micro-batch: the fewest that fit

    def __str__(self) -> str:
        words = {
            self.dtype: True,
            f"residual stream in {self.residual_dtype}": self.residual_dtype != "float32",
            "C++ kernels": self.cpu_kernels,
            "compiled": self.compiled,
            "not compiled": not self.compiled,
            "CUDA graph": self.cuda_graph,
            f"loss in {self.loss_chunks} chunks": self.loss_chunks > 1,
        }
        return ", ".join(word for word, is_so in words.items() if is_so)


Pass = Callable[..., dict[str, Tensor]]  # takes tensors and numbers, returns tensors by name


# ---- dtype and seeds -----------------------------------------------------------------------------


def autocast(device: torch.device, dtype: str, cached: bool = True) -> AbstractContextManager:
    """Return a context in which matmuls run in `dtype`; for float32, one that does nothing.

    cached: it keeps the casts of weights until its end, for weights that are used again.
    """
    if dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[dtype], cache_enabled=cached)


def named_losses(result: Any, taken: Set[str] = frozenset({"loss"})) -> dict[str, Tensor]:
    """Return the losses that GPT.forward returns, by name. Training adds all of them; the val loss
    is `loss`.

    taken: names that a further loss may not have. Raises ValueError for another result.
    """
    match result:
        case (_, loss):
            further: dict[str, Any] = {}
        case (_, loss, dict(further)):
            pass
        case _:
            loss = None
            further = {}
    losses = {"loss": loss, **further}
    is_number = all(isinstance(part, Tensor) and part.numel() == 1 for part in losses.values())
    if not is_number or taken & further.keys():
        raise ValueError(
            f"GPT.forward returns {shortened(result)}: with targets it must return (None, loss), "
            "or (None, loss, {name: further loss}); each is a tensor of one number, under a name "
            "that the log has not"
        )
    return losses


def seed_all(seed: int, device: torch.device) -> None:
    """Seed the generators that a model on this device may draw from: torch's and Python's own.

    torch.manual_seed would take half a millisecond without a GPU: it notes the stack for a GPU that
    may come yet.
    """
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
