"""How a model runs in training: plain or compiled, in which precision; on one device, or on one of several.

On a CPU without DDP, a compiled micro-batch is one graph of forward and backward pass, which inductor fuses and plans
as a whole. Elsewhere, and where activations are checkpointed, it is `torch.compile(model)`, whose two graphs keep
autograd's hooks. Where ranks share weights (sharding.py), blocks are compiled one by one, within the hooks that gather
their weights.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from deskgpt.compute import compiling, sharding
from deskgpt.compute.ranks import Ranks
from deskgpt.faster import kernels
from deskgpt.machine import hardware
from model import GPT


@dataclass(frozen=True)
class Form:
    """How a micro-batch is computed. The default is the plain form, with which the others are compared."""

    dtype: str = "float32"  # of the matmuls
    compiled: bool = False
    explicit: bool = False  # attention as in kernels.explicit_attention

    def __str__(self) -> str:
        explicit = ", explicit attention" if self.explicit else ""
        compiled = "compiled" if self.compiled else "not compiled"
        return f"{self.dtype}{explicit}, {compiled}"


@dataclass(frozen=True)
class Evaluation:
    loss: float  # mean, in nats per token
    standard_error: float | None  # what other text of this length would change; None where too few batches tell


@contextmanager
def computed_by(forwards: dict[nn.Module, Callable[..., Tensor]]) -> Iterator[None]:
    """Within the block, these modules compute by these functions. Hooks around them, as FSDP's, stay as they are."""
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.forward


class Runner:
    """A model in one form: `backward` adds the gradients of a micro-batch, `evaluate` takes the loss over many.

    Where forward and backward pass are one graph, evaluation runs uncompiled, which saves compiling it too.
    """

    def __init__(self, model: GPT, form: Form, distributed: bool = False) -> None:
        self.model = model
        self.form = form
        self.parameters = list(model.parameters())
        self.device = self.parameters[0].device
        # Checkpointed, no weights in 16 bits need to stay: the backward pass casts them again.
        keeps_all = model.activation_checkpoint == "none"
        self.amp = hardware.autocast(self.device, form.dtype, cached=keeps_all)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=form.dtype == "float16")
        self.module: nn.Module = model  # takes (x, y) in evaluation
        self.trained: nn.Module | None = None  # module under DDP
        self.sharded = sharding.is_sharded(model)
        self.forwards: dict[nn.Module, Callable[..., Tensor]] = {}  # of blocks that are compiled one by one
        self.graph: Callable[[Tensor, Tensor, int], tuple[Tensor, tuple[Tensor, ...]]] | None = None
        if form.compiled:
            kernels.register_operators()
            # Selective checkpoints warn of operations in place. A block has none.
            logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
            if self.device.type == "cpu":
                compiling.set_up_inductor()
            if self.sharded:
                self.forwards = {block: torch.compile(block.forward) for block in model.transformer.h}
            # In one graph of both passes torch computes nothing again that draws random numbers, as all attention may.
            elif self.device.type == "cpu" and keeps_all and not distributed and not self.scaler.is_enabled():
                torch._dynamo.config.trace_autograd_ops = True
                self.graph = torch.compile(self._loss_and_gradients, fullgraph=True)
            else:
                self.module = torch.compile(model)  # type: ignore[assignment]

    def distribute(self, x: Tensor, y: Tensor) -> None:
        """From now on gradients are averaged over the ranks, once per step. A sharded model does so by itself.

        (x, y): any micro-batch.
        """
        if self.sharded:
            return
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        self.trained = DDP(self.module, device_ids=device_ids, broadcast_buffers=False)
        # After its first backward pass DDP arranges the gradients anew, which from three ranks on are then summed in
        # another order. Without this pass the first step of a resumed run would differ from that of the whole run.
        self.backward(x, y)
        self.drop_gradients()

    def backward(
        self, x: Tensor, y: Tensor, micro_steps: int = 1, last: bool = True, weight: float | None = None
    ) -> Tensor:
        """Adds the gradients of the loss of (x, y), divided by micro_steps, to those there; returns that loss.

        last: whether it is the step's last micro-batch, with which the ranks exchange gradients. weight: what the loss
        is multiplied by instead, of data with a loss mask (Loader.next).
        """
        with kernels.explicit_attention(self.form.explicit), computed_by(self.forwards):
            if self.graph is not None:
                loss, grads = self.graph(x, y, micro_steps)
                if weight is not None:  # not in the graph, which then is the one that was compiled and checked
                    loss = loss * (weight * micro_steps)
                    torch._foreach_mul_(grads, weight * micro_steps)
                for p, grad in zip(self.parameters, grads, strict=True):
                    p.grad = grad if p.grad is None else p.grad.add_(grad)
                return loss
            module = self.trained or self.module
            exchanged = nullcontext() if last or self.trained is None else self.trained.no_sync()  # type: ignore[operator]
            with exchanged:
                with self.amp:
                    loss = module(x, y)[1]
                    loss = loss / micro_steps if weight is None else loss * weight
                self.scaler.scale(loss).backward()
            return loss.detach()

    def _loss_and_gradients(self, x: Tensor, y: Tensor, micro_steps: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        with self.amp:
            loss = self.model(x, y)[1] / micro_steps
        grads = torch.autograd.grad(loss, self.parameters)
        # Laid out like the parameters: the fused AdamW goes through both in the order of memory, without a check.
        return loss.detach(), tuple(grad.contiguous() for grad in grads)

    def gradients(self) -> list[Tensor]:
        """Those of all parameters, in their order; of sharded ones this rank's rows."""
        return [sharding.local(p.grad) for p in self.parameters if p.grad is not None]

    def gradient_norms(self) -> Tensor:
        """The norms (parameters,) of all gradients; sharded ones count as a whole."""
        norms = torch.stack(torch._foreach_norm(self.gradients()))
        if self.sharded:
            squares = norms.double().square()
            dist.all_reduce(squares, group=sharding.shard_group(self.parameters[0]))
            norms = squares.sqrt().float()
        return norms

    def drop_gradients(self) -> None:
        for p in self.parameters:
            p.grad = None

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within the block, `loss` may be called: there is no dropout, and gathered weights are kept."""
        self.module.eval()
        try:
            yield
        finally:
            self.module.train()
        if self.sharded:
            sharding.drop_gathered(self.model)

    @torch.no_grad()
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of a micro-batch, without gradients; see evaluating."""
        with self.amp, computed_by(self.forwards):
            return self.module(x, y)[1]

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor, float]], ranks: Ranks) -> Evaluation:
        """The mean loss over the batches of all ranks: inputs, targets and the number of rows that count.

        With a loss mask, that number is the targets that are learned, in rows, and the mean is over these targets.
        The standard error comes from the spread of the batches' means. Fewer than eight tell too little of it.
        """
        losses = []
        counts = []
        with self.evaluating():
            for x, y, rows in batches:
                loss = self.loss(x, y)  # of padding too: other ranks may need the weights of this one
                if rows:
                    losses.append(loss * rows)
                    counts.append(rows)

        sums = torch.stack(losses).cpu().double() if losses else torch.zeros(0, dtype=torch.float64)
        rows_of = torch.tensor(counts, dtype=torch.float64)
        n_rows = ranks.sum(rows_of.sum()).item()
        n_batches = int(ranks.sum(torch.tensor(len(counts), dtype=torch.float64)).item())
        mean = ranks.sum(sums.sum()).item() / n_rows if n_rows else math.nan
        squares = ranks.sum((sums - mean * rows_of).square().sum()).item()
        if n_batches < 8:
            return Evaluation(mean, None)
        return Evaluation(mean, math.sqrt(squares * n_batches / (n_batches - 1)) / n_rows)
