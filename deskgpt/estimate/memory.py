"""The memory of a training step, predicted part by part before a run starts.

It comes from a rehearsal, not from formulas: the GPT of model.py goes forward and backward, and the run's optimizer
takes a step, on fake tensors (shapes without storage) while the bytes alive are counted. It takes about a second and
follows model.py wherever it goes. A compiled step counts as one that is not compiled, but for the softmax of the loss:
what torch.compile chooses to compute again may save more.

The fake tensors are the CPU's for a GPU too, which need not be here; AsOnCuda makes them keep what CUDA's kernels keep.
Fake CUDA tensors would do without it, but torch's CPU build ends the process when autograd meets one ("PyTorch is not
linked with support for cuda devices", torch 2.13).

Checked against real runs on a CPU: the counting, within 2%. The sums for CUDA: against what inductor's own code
allocates on fake tensors of a card (bench/check_cards.py), 5% too high for GPT-2, 14% for the fast recipe; no card has
measured them. Workspaces of cuBLAS and of attention's backward pass are not counted; the CUDA context and the
allocator's gaps come on top: leave a tenth free.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from deskgpt.compute.variant import Variant
from deskgpt.system import hardware
from deskgpt.system.terminal import reason
from model import GPT, GPTConfig

MakeOptimizer = Callable[[GPT], torch.optim.Optimizer]


@dataclass(frozen=True)
class Step:
    """A training step of one rank, as far as its memory depends on it."""

    config: GPTConfig
    batch_size: int  # sequences per micro-batch
    variant: Variant
    device_type: str
    accumulates: bool = True  # several micro-batches: earlier gradients are alive in a forward pass
    make_optimizer: MakeOptimizer | None = None  # None: AdamW
    shards: int = 1  # ranks that share one copy of weights, gradients and optimizer states
    gathers_all: bool = False  # sharded: whole weights of all blocks stay for the backward pass
    keeps_gradients: bool = False  # sharded: whole gradients until the end of a step


def memory(step: Step) -> dict[str, int]:
    """Bytes alive at the peak of the step, by part; their sum is the peak.

    activations are what the forward pass keeps until the loss begins, token ids included. logits are all that the loss
    adds to it, or what the backward pass adds, if that is more. optimizer is what the optimizer keeps, or what it takes
    in its step, if that is more than what is gone by then. Of a sharded model, gathered are whole weights.

    Raises ValueError where the passes, or the optimizer, need numbers, which fake tensors lack.
    """
    live = Live()
    try:
        with FakeTensorMode(), AsOnCuda(step), live:
            seen = rehearse(step, live)
    except RuntimeError as e:
        raise ValueError(
            "this model, or its optimizer, cannot be rehearsed, because it needs numbers that a rehearsal lacks "
            f"({reason(e)}): a dry run and --auto_batch are not for it"
        ) from None
    weights = seen["weights"]
    forward, backward = seen["forward"], seen["backward"]
    if step.variant.compiled:  # all gradients come at the end of its pass; only then are they added to those there
        backward = max(backward, 2 * weights if step.accumulates else weights)
    rest = max(forward, backward)
    gradients = weights if step.accumulates or backward > forward else 0
    activations = min(seen["kept"], rest - gradients)
    parts = {
        "weights": weights,
        "gradients": gradients,
        "optimizer": max(seen["optimizer"], seen["update"] - rest),
        "activations": activations,
        "logits": rest - gradients - activations,
    }
    return parts if step.shards == 1 else sharded(step, parts)


def sharded(step: Step, parts: dict[str, int]) -> dict[str, int]:
    """The parts of one of several ranks that share a copy: FSDP gathers embedding and head, and two blocks at a time.

    The blocks are gathered in the dtype of the run, the rest in float32. A closed formula, not a rehearsal.
    """
    parts = dict(parts)
    whole = parts["weights"]
    for name in ("weights", "gradients", "optimizer"):
        is_whole = name == "gradients" and step.keeps_gradients
        parts[name] = whole if is_whole else parts[name] // step.shards
    of_blocks = GPT.without_storage(step.config).transformer.h.parameters()
    block = sum(p.nbytes for p in of_blocks) // step.config.n_layer
    gathered = block // 2 if step.variant.dtype == "bfloat16" else block
    if step.variant.dtype == "bfloat16" and step.variant.recompute == "none":
        parts["activations"] -= step.config.n_layer * gathered  # autocast's copies, which gathering makes needless
    n_gathered = step.config.n_layer if step.gathers_all else min(2, step.config.n_layer)
    return parts | {"gathered": whole - step.config.n_layer * block + n_gathered * gathered}


def rehearse(step: Step, live: Live) -> dict[str, int]:
    """Takes a step on fake tensors; returns bytes.

    weights; kept: by the forward pass for the backward pass; optimizer: what it keeps; forward, backward, update: the
    peaks of the three beyond the weights, of which only update counts the optimizer.
    """
    config, variant = step.config, step.variant
    seen: dict[str, int] = {}
    model = GPT(config)
    model.transformer.recompute = variant.recompute
    if variant.residual_dtype != "float32":
        model.transformer.residual_dtype = hardware.DTYPES[variant.residual_dtype]
    weights = seen["weights"] = sum(p.nbytes for p in model.parameters())
    idx = torch.zeros(step.batch_size, config.block_size, dtype=torch.int64)
    targets = torch.zeros_like(idx)
    if step.accumulates:
        for p in model.parameters():
            p.grad = torch.empty_like(p)
    before = live.bytes - idx.nbytes - targets.nbytes

    def loss_begins(*_: Any) -> None:
        seen["kept"] = live.bytes - before

    hook = model.transformer.register_forward_hook(loss_begins)
    live.peak = 0
    with hardware.autocast(torch.device("cpu"), variant.dtype, cached=variant.recompute == "none"):
        loss = model(idx, targets)[1]
    seen["forward"] = live.peak - weights
    live.peak = 0
    # loss.backward() would turn AsOnCuda off, which activations that are computed again need.
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
    seen["backward"] = live.peak - weights
    del loss
    hook.remove()

    gradients = [p.grad for p in model.parameters()]  # kept, since Muon drops them in its step
    before = live.bytes
    live.peak = 0
    make = step.make_optimizer
    optimizer = torch.optim.AdamW(model.parameters(), fused=True) if make is None else make(model)
    optimizer.step()
    seen["optimizer"] = live.bytes - before
    seen["update"] = live.peak - weights
    del gradients
    return seen


# ---- counting ------------------------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """Counts the bytes of the storages that operations have made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._sizes: dict[int, int] = {}  # of the storages alive, by their address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        self.peak = max(self.peak, self.bytes + self._workspace(func, args, out))
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.bytes += storage.nbytes()
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)

    def _workspace(self, func: Any, args: Any, out: Any) -> int:
        """Bytes that a kernel takes for copies of its arguments in the result's dtype, and frees again."""
        if func is not torch.ops.aten.log_softmax.int_out:
            return 0
        tensors = [t for t in args if isinstance(t, Tensor) and t.dim()]
        return sum(t.numel() * out.element_size() for t in tensors if t.dtype != out.dtype)


# ---- what differs on CUDA ------------------------------------------------------------------------------------


class AsOnCuda(TorchFunctionMode):
    """In a step on CUDA, functions whose kernels keep other tensors there, or take other memory, do so here."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.step.device_type != "cuda":
            return func(*args, **kwargs)
        is_autocast = torch.is_autocast_enabled("cpu")
        if func is F.scaled_dot_product_attention:
            # The flash kernel keeps q, k, v, its result and logsumexp (B, H, T). float32's kernel does too.
            if is_autocast:
                args = tree_map_only(Tensor, lambda x: x.to(torch.get_autocast_dtype("cpu")), args)
            dropout = kwargs.get("dropout_p", 0.0)
            return torch.ops.aten._scaled_dot_product_flash_attention(*args[:3], dropout, True)[0]
        if func is F.rms_norm:  # one kernel, in float32; layer norm's keeps the same, and the means
            x, *more = args
            return F.layer_norm(x.float() if is_autocast else x, *more, **kwargs)
        if func is F.dropout and kwargs["p"] and kwargs["training"]:
            return torch.native_dropout(args[0], kwargs["p"], True)[0]  # keeps a mask of one byte per element
        if func is torch.log_softmax and self.step.variant.compiled:
            return args[0]  # in place: takes no memory
        if func is torch.log_softmax and args[0].dtype == torch.float16:  # read as it is: ATen/native/SoftMax.cpp
            return torch.empty(args[0].shape, dtype=torch.float32)
        return func(*args, **kwargs)
