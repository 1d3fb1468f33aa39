"""How a model runs in training: as it is or compiled, in which precision; on one device, or one of several under DDP.

On a CPU without DDP a compiled micro-batch is one graph of forward and backward pass, which inductor fuses and plans
as a whole. Elsewhere it is `torch.compile(model)`, whose two graphs keep autograd's hooks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from tqdm import tqdm

from data.loader import to_device
from data.splits import Split
from deskgpt import compiling, hardware
from model import ACTIVATIONS, GPT, LinearCrossEntropy, causal_mask, chunk_cross_entropy, chunked_cross_entropy


@dataclass(frozen=True)
class Form:
    """How a micro-batch is computed. The default is the plain one, against which the others are checked."""

    dtype: str = "float32"  # of the matmuls
    compiled: bool = False
    explicit: bool = False  # attention as plain matmuls around a softmax, not one flash kernel: CPU, training only

    def __str__(self) -> str:
        explicit = ", explicit attention" if self.explicit else ""
        return f"{self.dtype}{explicit}, {'compiled' if self.compiled else 'not compiled'}"


# Inductor's own exact GELU on a CPU takes more than twice the time of torch's kernel, and the chunks of the loss,
# unrolled into a graph, would keep the gradients of all their logits until the graph's end: both stay whole in it.
torch.library.define("deskgpt::gelu", "(Tensor x) -> Tensor")
torch.library.impl("deskgpt::gelu", "CPU", F.gelu)
torch.library.register_fake("deskgpt::gelu", torch.empty_like)
torch.library.define("deskgpt::gelu_backward", "(Tensor grad, Tensor x) -> Tensor")
torch.library.impl("deskgpt::gelu_backward", "CPU", torch.ops.aten.gelu_backward.default)
torch.library.register_fake("deskgpt::gelu_backward", lambda grad, x: torch.empty_like(x))
torch.library.register_autograd(
    "deskgpt::gelu",
    lambda ctx, grad: torch.ops.deskgpt.gelu_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
opaque_gelu = torch.ops.deskgpt.gelu.default


@cache
def compiled_chunk() -> Callable[..., Tensor]:
    """The body of the loss's loop as a graph: half the time between its matmuls on a CPU (LOG.md, 2026-11-22)."""
    return torch.compile(chunk_cross_entropy, dynamic=False)


@torch.library.custom_op("deskgpt::chunked_cross_entropy", mutates_args=())
def opaque_cross_entropy(
    h: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, chunk: int, needs_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    body = compiled_chunk() if needs_grad else chunk_cross_entropy  # evaluation is not worth a second compilation
    return chunked_cross_entropy(h, weight, targets, dtype, chunk, needs_grad, body)


@opaque_cross_entropy.register_fake
def _(
    h: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, chunk: int, needs_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grad_h, grad_w = (torch.empty_like(t) if needs_grad else t.new_empty(0) for t in (h, weight))
    return h.new_empty((), dtype=torch.float32), grad_h, grad_w


opaque_cross_entropy.register_autograd(
    lambda ctx, grad, *_: (*(grad * saved for saved in ctx.saved_tensors), None, None, None, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*output[1:]),
)


def opaque_loss(*args: Any) -> Tensor:
    return opaque_cross_entropy(*args)[0]


def narrow(layer: nn.Linear, x: Tensor) -> Tensor:
    """layer(x), its weight transposed first. The weight's gradient is then made with the wide x as the operand that
    is transposed, which on a CPU takes three quarters of the time of the other way round (LOG.md, 2026-11-21).
    """
    y = x @ layer.weight.t().contiguous()
    return y if layer.bias is None else y + layer.bias


class Runner:
    """A model as it trains: `backward` adds a micro-batch's gradients, `module` takes (x, y) in evaluation.

    The joint graph is for training; evaluation then runs uncompiled, which saves compiling it.
    """

    def __init__(self, model: GPT, form: Form, distributed: bool = False) -> None:
        self.model, self.form, self.distributed = model, form, distributed
        self.module: nn.Module = model
        self.trained: nn.Module | None = None  # module under DDP
        self.graph: Callable[[Tensor, Tensor, int], tuple[Tensor, tuple[Tensor, ...]]] | None = None
        self.parameters = list(model.parameters())
        self.device = self.parameters[0].device
        self.amp = hardware.autocast(self.device, form.dtype)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=form.dtype == "float16")
        on_cpu = self.device.type == "cpu"
        # Made once: a compiled graph is one for these very objects.
        self._mask = causal_mask(model.config.block_size).to(self.device) if form.explicit else None
        self._activation = ACTIVATIONS[model.config.activation]
        if form.compiled and on_cpu and self._activation is F.gelu:
            self._activation = opaque_gelu
        self._narrow = [partial(narrow, block.mlp.c_proj) for block in self._blocks() if form.compiled and on_cpu]
        self.use()
        if not form.compiled:
            return
        if on_cpu:
            compiling.set_up_inductor()
        if on_cpu and not distributed and not self.scaler.is_enabled():
            torch._dynamo.config.trace_autograd_ops = True
            self.graph = torch.compile(self._loss_and_gradients, fullgraph=True)
        else:
            self.module = torch.compile(model)  # type: ignore[assignment]

    def use(self) -> None:
        """Puts the model into this form, after another runner had it in its own."""
        self.model.chunked_loss = opaque_loss if self.form.compiled else LinearCrossEntropy.apply
        self.model.transformer.mask = self._mask
        for i, block in enumerate(self._blocks()):
            block.mlp.activation = self._activation
            vars(block.mlp.c_proj).pop("forward", None)
            if self._narrow:
                block.mlp.c_proj.forward = self._narrow[i]

    def _blocks(self) -> list[Any]:
        return list(self.model.transformer.h)

    def _loss_and_gradients(self, x: Tensor, y: Tensor, micro_steps: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        with self.amp:
            loss = self.model(x, y)[1] / micro_steps
        # Laid out as the parameters are: the fused AdamW goes through both in the order of memory, without a check.
        return loss.detach(), tuple(grad.contiguous() for grad in torch.autograd.grad(loss, self.parameters))

    def distribute(self) -> None:
        """From now on gradients are averaged over the ranks, once per step."""
        self.trained = DDP(self.module, device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def backward(self, x: Tensor, y: Tensor, micro_steps: int = 1, last: bool = True) -> Tensor:
        """Adds the gradients of the loss of (x, y), divided by micro_steps, to those there; returns that loss.

        last: whether it is the step's last micro-batch, with which the ranks exchange gradients.
        """
        if self.graph:
            loss, grads = self.graph(x, y, micro_steps)
            for p, grad in zip(self.parameters, grads, strict=True):
                p.grad = grad if p.grad is None else p.grad.add_(grad)
            return loss
        module = self.trained or self.module
        with nullcontext() if last else getattr(module, "no_sync", nullcontext)():  # DDP's, where it is one
            with self.amp:
                loss = module(x, y)[1] / micro_steps
            self.scaler.scale(loss).backward()
        return loss.detach()

    def gradients(self) -> list[Tensor]:
        """Those of all parameters, in their order."""
        return [p.grad for p in self.parameters if p.grad is not None]

    @torch.no_grad()
    def evaluate(
        self, split: Split, windows: int, batch_size: int, rank: int = 0, world: int = 1
    ) -> tuple[float, float | None]:
        """(mean loss in nats per token over a fixed set of at most so many windows, its standard error).

        The error is what other text of this length would change, from the spread of the batches' means; None for
        fewer than eight batches, which tell too little of it. The ranks share the batches.
        """
        self.module.eval()
        n, losses = split.n_eval_windows(windows), []
        firsts = range(rank * batch_size, n, world * batch_size)  # first row of each batch of this rank
        # disable=None: shown only on a terminal
        for first in tqdm(firsts, "evaluating", leave=False, disable=True if rank else None):
            x, y = to_device(split.eval_batch(first + np.arange(batch_size), n), self.device)
            with self.amp:
                losses.append(self.module(x, y)[1] * min(batch_size, n - first))  # the last batch may hold fewer
        self.module.train()
        sums = torch.stack(losses).cpu().double() if losses else torch.zeros(0, dtype=torch.float64)
        mean = all_sum(sums.sum(), self.device).item() / n
        rows = torch.tensor([min(batch_size, n - first) for first in firsts], dtype=torch.float64)
        squares = all_sum((sums - mean * rows).square().sum(), self.device).item()
        batches = -(-n // batch_size)
        return mean, math.sqrt(squares * batches / (batches - 1)) / n if batches >= 8 else None


def all_sum(x: Tensor, device: torch.device) -> Tensor:
    """The sum of x over all ranks."""
    if dist.is_initialized():
        x = x.to(device)  # nccl reduces what is on the GPU only
        dist.all_reduce(x)
    return x


def all_max(x: float, device: torch.device) -> float:
    """The largest x of all ranks."""
    tensor = torch.tensor(x, dtype=torch.float64)
    if dist.is_initialized():
        tensor = tensor.to(device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()
