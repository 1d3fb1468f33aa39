"""How a model runs in training: plain or compiled, in which precision; on one device, or on one of several.

On a CPU without DDP, a compiled micro-batch is one graph of forward and backward pass, which inductor fuses and plans
as a whole. Elsewhere, and where activations are checkpointed, it is `torch.compile(model)`, whose two graphs keep
autograd's hooks. On several ranks, without dropout, blocks and the loss are compiled one by one: their gradients are
there, and DDP sends them, while earlier blocks still go backward; and they stay within the hooks that gather sharded
weights.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from deskgpt.compute import compiling, sharding
from deskgpt.compute.distributed import DistContext
from deskgpt.kernels import recompute, replacements, verify
from deskgpt.kernels.overridable import replacing
from deskgpt.system import hardware, torch_internals
from model import GPT


@dataclass(frozen=True)
class Variant:
    """How a micro-batch is computed. The default is the plain form, with which the others are compared."""

    dtype: str = "float32"  # of the matmuls
    compiled: bool = False
    attention: str = "flash"  # one of kernels.KINDS
    checkpoint: str = "none"  # activations that are computed again: none, full or selective
    reference_only: tuple[str, ...] = ()  # functions of model.py whose faster forms are not right

    def facts(self) -> dict[str, Any]:
        """What is recorded of a form."""
        return {"dtype": self.dtype, "compiled": self.compiled, "attention": self.attention}

    def __str__(self) -> str:
        attention = "" if self.attention == "flash" else f", {replacements.in_words(self.attention)}"
        compiled = "compiled" if self.compiled else "not compiled"
        return f"{self.dtype}{attention}, {compiled}"


@dataclass(frozen=True)
class Evaluation:
    loss: float  # mean, in nats per token
    standard_error: float | None  # what other text of this length would change; None if too few batches tell
    windows: int = 0  # that were read, over all ranks
    batch_losses: tuple[float, ...] = ()  # the mean loss of each of this rank's batches, to compare runs in pairs


class Runner:
    """A model in one form: `forward` and `backward` take a micro-batch, `evaluate` the loss over many.

    Where forward and backward pass are one graph, evaluation runs uncompiled, which saves compiling it too.
    """

    def __init__(self, model: GPT, form: Variant, distributed: bool = False, sync_each_batch: bool = True) -> None:
        self.model = model
        self.form = form
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in named]  # of the parameters that train, in the order of the forward pass
        self.parameters = [p for _, p in named]
        self.device = next(model.parameters()).device
        # Checkpointed, no weights in 16 bits need to stay: the backward pass casts them again.
        keeps_all = form.checkpoint == "none"
        self.amp = hardware.autocast(self.device, form.dtype, cached=keeps_all)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=form.dtype == "float16")
        self.module: nn.Module = model  # takes (x, y) in evaluation
        self.trained: nn.Module | None = None  # module under DDP
        self.has_unused: bool | None = None  # whether some parameters get no gradient; None before the first pass
        self.sharded = sharding.is_sharded(model)
        self.sync_each_batch = sync_each_batch  # of sharded ones; DDP always sends gradients once per step
        self.forms = replacements_of(form, self.device, model.config.dropout)
        self.graph: Callable[..., Any] | None = None
        if form.compiled:
            replacements.register_operators()
            # Selective checkpoints warn of operations in place. A block has none.
            logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
            if self.device.type == "cpu":
                compiling.set_up_inductor()
            is_one_graph = self.device.type == "cpu" and keeps_all and not distributed and not self.scaler.is_enabled()
            # Blocks that are compiled alone draw other masks of dropout than a whole model, as one process has it.
            if self.sharded or (distributed and not model.config.dropout):
                for name in ("Block.forward", "GPT.loss"):
                    self.forms[name] = compiled_alone(self.forms.get(name))
            # In one graph of both passes torch computes nothing again that draws random numbers, as all attention may.
            elif is_one_graph and torch_internals.traces_autograd():
                self.graph = torch.compile(self._losses_and_gradients, fullgraph=True)
            else:
                self.module = torch.compile(model)  # type: ignore[assignment]

    def distribute(self, x: Tensor, y: Tensor) -> None:
        """From now on gradients are averaged over the ranks, once per step. A sharded model does so by itself.

        (x, y): any micro-batch.
        """
        if self.sharded:
            return
        if self.has_unused is None:
            self.forward_backward(x, y)
            self.drop_gradients()
        (share,) = sharding.means(float(bool(self.has_unused)), device=self.device)  # a rank's own text may use fewer
        options: dict[str, Any] = {"find_unused_parameters": share > 0}
        is_new = "forward_sync_buffers" in inspect.signature(DDP).parameters  # its name from torch 2.13 on
        has_state = len(self.model.state_dict()) > len(dict(self.model.named_parameters(remove_duplicate=False)))
        options["forward_sync_buffers" if is_new else "broadcast_buffers"] = has_state  # the rotary table is no state
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        self.trained = DDP(self.module, device_ids=device_ids, **options)
        # After its first backward pass DDP arranges the gradients anew, which from three ranks on are then summed in
        # another order. Without this pass the first step of a resumed run would differ from that of the whole run.
        self.forward_backward(x, y)
        self.drop_gradients()

    def leave_ranks(self) -> None:
        """Ends the averaging, before Ranks.close ends the process group.

        Otherwise DDP would be the last to hold the group, which is then freed under Python's lock. There it waits for a
        thread of gloo that may want the lock to free a tensor: the process would hang (pytorch issue 56297).
        """
        self.trained = None

    # ---- a micro-batch -----------------------------------------------------------------------------------

    @contextmanager
    def micro_batch(self, last: bool = True) -> Iterator[None]:
        """Within the block, a micro-batch goes forward and backward. The last one of a step exchanges gradients.

        So does each micro-batch of a sharded model with sync_each_batch; without it, ranks keep whole gradients.
        """
        if self.sharded:
            self.model.set_requires_gradient_sync(last or self.sync_each_batch)  # type: ignore[operator]
        alone = self.trained is not None and not last
        exchanged = self.trained.no_sync() if alone else nullcontext()  # type: ignore[operator, union-attr]
        with replacing(self.forms), exchanged:
            yield

    def forward(
        self, x: Tensor, y: Tensor, micro_steps: int = 1, weight: float | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What a micro-batch adds to the loss of a step, to go backward from; and its parts by name, without gradients.

        The parts are "loss" and what else GPT.forward returns. Each is divided by micro_steps or, for data with a loss
        mask, multiplied by weight (data/loader.py).
        """
        if self.graph is not None:
            parts, gradients = self.graph(x, y, micro_steps)
            factor = 1.0 if weight is None else weight * micro_steps  # not in the graph, which is the one compared
            parts = {name: part * factor for name, part in parts.items()} if weight is not None else parts
            return WithGradients.apply(total_of(parts), factor, gradients, *self.parameters), parts
        with self.amp:
            parts = parts_of((self.trained or self.module)(x, y))
            parts = {n: part / micro_steps if weight is None else part * weight for n, part in parts.items()}
        return total_of(parts), {name: part.detach() for name, part in parts.items()}

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of a loss of `forward` to those there."""
        self.scaler.scale(loss).backward()

    def forward_backward(self, x: Tensor, y: Tensor, micro_steps: int = 1) -> Tensor:
        """Both passes of a micro-batch, to try them: buffers stay. Returns its loss, divided by micro_steps."""
        with verify.keeping_buffers(self.model), self.micro_batch():
            loss, parts = self.forward(x, y, micro_steps)
            self.backward(loss)
        if self.has_unused is None:
            self.has_unused = any(p.grad is None for p in self.parameters)
        return parts["loss"]

    def _losses_and_gradients(self, x: Tensor, y: Tensor, micro_steps: int) -> tuple[dict[str, Tensor], Any]:
        with self.amp:
            parts = {name: part / micro_steps for name, part in parts_of(self.model(x, y)).items()}
        trained = [p for p in self.parameters if p.requires_grad]  # not those that a change has frozen for a while
        gradients = dict(zip(trained, torch.autograd.grad(total_of(parts), trained, allow_unused=True), strict=True))
        # Laid out like the parameters: the fused AdamW goes through both in the order of memory, without a check.
        found = [gradients.get(p) for p in self.parameters]
        laid_out = tuple(None if g is None else g.contiguous() for g in found)
        return {name: part.detach() for name, part in parts.items()}, laid_out

    # ---- gradients ---------------------------------------------------------------------------------------

    def gradients(self) -> list[Tensor]:
        """Those of all parameters that have one; of sharded ones this rank's rows."""
        return [sharding.local(p.grad) for p in self.parameters if p.grad is not None]

    def gradient_norms(self) -> Tensor:
        """The norms (parameters,) of all gradients, 0 where there is none; sharded ones count as a whole."""
        found = iter(torch._foreach_norm(self.gradients()))
        nothing = torch.zeros((), device=self.device)
        norms = torch.stack([nothing if p.grad is None else next(found) for p in self.parameters])
        if self.sharded:
            squares = norms.double().square()
            dist.all_reduce(squares, group=sharding.shard_group(self.parameters[0]))
            norms = squares.sqrt().float()
        return norms

    def drop_gradients(self) -> None:
        for p in self.parameters:
            p.grad = None

    # ---- evaluation --------------------------------------------------------------------------------------

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within the block, `loss` may be called: there is no dropout, and gathered weights are kept."""
        self.module.eval()
        try:
            with replacing(self.forms):
                yield
        finally:
            self.module.train()
        if self.sharded:
            sharding.drop_gathered(self.model)

    @torch.no_grad()
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of a micro-batch, without gradients and without what training adds to it; see evaluating."""
        with self.amp:
            return self.module(x, y)[1]

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor, float]], ranks: DistContext) -> Evaluation:
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
        error = math.sqrt(squares * n_batches / (n_batches - 1)) / n_rows if n_batches >= 8 else None
        batch_losses = tuple(round(loss, 6) for loss in (sums / rows_of).tolist())
        return Evaluation(mean, error, round(n_rows), batch_losses)


def replacements_of(form: Variant, device: torch.device, dropout: float) -> dict[str, Callable[..., Any]]:
    """What stands in for functions of model.py in this form."""
    forms = replacements.replacements_for(device.type, form.attention, form.compiled)
    if form.checkpoint != "none":
        forms["Block.forward"] = recompute.block_form(form.checkpoint, dropout)
    return {name: stand_in for name, stand_in in forms.items() if name not in form.reference_only}


def compiled_alone(stand_in: Callable[..., Any] | None) -> Callable[..., Any]:
    """What stands in for a function of model.py and is a graph of its own, which all blocks share. stand_in: in it."""
    compiled: dict[Any, Callable[..., Any]] = {}

    def forward(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if plain not in compiled:
            inside = plain if stand_in is None else functools.partial(stand_in, plain)
            compiled[plain] = torch.compile(inside)
        return compiled[plain](*args, **kwargs)

    return forward


def parts_of(returned: tuple[Any, ...]) -> dict[str, Tensor]:
    """The losses by name that GPT.forward has returned. Raises ValueError where a further one cannot be added."""
    _, loss, *more = returned
    further = more[0] if more else {}
    for name, part in further.items():
        if name == "loss" or not isinstance(part, Tensor) or part.numel() != 1:
            raise ValueError(
                f"GPT.forward returns a further loss {name!r}: it must be a tensor of one number, under another name "
                "than loss"
            )
    return {"loss": loss} | further


def total_of(parts: dict[str, Tensor]) -> Tensor:
    total, *more = parts.values()
    for part in more:
        total = total + part
    return total


class WithGradients(torch.autograd.Function):
    """A loss whose gradients are known already: going backward from it hands them to the parameters."""

    @staticmethod
    def forward(ctx, loss, factor, gradients, *parameters):
        ctx.factor = factor
        ctx.gradients = gradients
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx, upstream):
        gradients = ctx.gradients
        ctx.gradients = None  # so that parameters take them over without a copy
        factor = ctx.factor * upstream.item()
        if factor != 1.0:
            torch._foreach_mul_([g for g in gradients if g is not None], factor)
        return None, None, None, *gradients
