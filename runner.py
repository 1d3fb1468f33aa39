"""How a model runs in training: as it is, or compiled where that pays; on one device, or one of several under DDP.

On a CPU without DDP a compiled micro-batch is one graph of forward and backward pass, which inductor fuses and plans
as a whole. Elsewhere it is `torch.compile(model)`, whose two graphs keep autograd's hooks.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from tqdm import tqdm

import model as model_module
from data.loader import to_device
from data.tokens import Split
from model import ACTIVATIONS, GPT, LinearCrossEntropy, causal_mask, chunk_cross_entropy, chunked_cross_entropy
from runlog import clock

# What compiling a CPU's graph takes and the share of a step that it saves: round figures of runs with 2 to 6 layers
# on two cores (LOG.md, 2026-11-22), where they varied by half.
COLD_S, COLD_S_PER_LAYER = 15.0, 3.0
WARM_S, WARM_S_PER_LAYER = 2.0, 1.0
SAVED = 0.25

# Inductor tries at each start whether the compiler knows AVX2 and AVX-512, as all that torch's headers compile with do:
# 8 of 30 s with an empty cache, 2.5 of 8 with a warm one (LOG.md, 2026-11-22). What the processor has is looked up.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


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

    def __init__(self, model: GPT, amp: AbstractContextManager, scaler: Any, compiled: bool, distributed: bool) -> None:
        self.model, self.amp, self.scaler, self.compiled = model, amp, scaler, compiled
        self.distributed = distributed
        self.module: nn.Module = model
        self.trained: nn.Module | None = None  # module under DDP
        self.graph: Callable[[Tensor, Tensor, int], tuple[Tensor, tuple[Tensor, ...]]] | None = None
        self.parameters = list(model.parameters())
        on_cpu = self.parameters[0].device.type == "cpu"
        model.chunked_loss = opaque_loss if compiled else LinearCrossEntropy.apply
        if on_cpu:
            model.transformer.mask = causal_mask(model.config.block_size, compiled)
        plain = ACTIVATIONS[model.config.activation]
        block: Any
        for block in model.transformer.h:
            block.mlp.activation = opaque_gelu if compiled and on_cpu and plain is F.gelu else plain
            vars(block.mlp.c_proj).pop("forward", None)
            if compiled and on_cpu:
                block.mlp.c_proj.forward = partial(narrow, block.mlp.c_proj)
        if compiled and on_cpu and not distributed and not scaler.is_enabled():
            torch._dynamo.config.trace_autograd_ops = True
            self.graph = torch.compile(self._loss_and_gradients, fullgraph=True)
        elif compiled:
            self.module = torch.compile(model)  # type: ignore[assignment]

    def _loss_and_gradients(self, x: Tensor, y: Tensor, micro_steps: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        with self.amp:
            loss = self.model(x, y)[1] / micro_steps
        # Laid out as the parameters are: the fused AdamW goes through both in the order of memory, without a check.
        return loss.detach(), tuple(grad.contiguous() for grad in torch.autograd.grad(loss, self.parameters))

    def distribute(self, device: torch.device) -> None:
        """From now on gradients are averaged over the ranks, once per step."""
        self.trained = DDP(self.module, device_ids=[device.index] if device.type == "cuda" else None)

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

    @torch.no_grad()
    def evaluate(
        self, split: Split, windows: int, batch_size: int, rank: int = 0, world: int = 1
    ) -> tuple[float, float | None]:
        """(mean loss in nats per token over a fixed set of at most so many windows, its standard error).

        The error is what other text of this length would change, from the spread of the batches' means; None for
        fewer than eight batches, which tell too little of it. The ranks share the batches.
        """
        device = self.parameters[0].device
        self.module.eval()
        n, losses = split.n_eval_windows(windows), []
        firsts = range(rank * batch_size, n, world * batch_size)  # first row of each batch of this rank
        # disable=None: shown only on a terminal
        for first in tqdm(firsts, "evaluating", leave=False, disable=True if rank else None):
            x, y = to_device(split.eval_batch(first + np.arange(batch_size), n), device)
            with self.amp:
                losses.append(self.module(x, y)[1] * min(batch_size, n - first))  # the last batch may hold fewer
        self.module.train()
        sums = torch.stack(losses).cpu().double() if losses else torch.zeros(0, dtype=torch.float64)
        mean = all_sum(sums.sum(), device).item() / n
        rows = torch.tensor([min(batch_size, n - first) for first in firsts], dtype=torch.float64)
        squares = all_sum((sums - mean * rows).square().sum(), device).item()
        batches = -(-n // batch_size)
        return mean, math.sqrt(squares * batches / (batches - 1)) / n if batches >= 8 else None


def all_sum(x: Tensor, device: torch.device) -> Tensor:
    """The sum of x over all ranks."""
    if dist.is_initialized():
        x = x.to(device)  # nccl reduces what is on the GPU only
        dist.all_reduce(x)
    return x


# ---- whether to compile --------------------------------------------------------------------------------------


def decide(runner: Runner, batch: tuple[Tensor, Tensor], micro_batches: int) -> tuple[bool, str]:
    """Whether compiling pays for a run of so many micro-batches like `batch` on this CPU, and why.

    Times two uncompiled micro-batches, which are not the first. Leaves gradients behind.
    """
    times = []
    for _ in range(2):
        t0 = time.perf_counter()
        runner.backward(*batch)
        times.append(time.perf_counter() - t0)
    layers, saved_s = runner.model.config.n_layer, SAVED * min(times) * micro_batches
    warm_s, cold_s = WARM_S + WARM_S_PER_LAYER * layers, COLD_S + COLD_S_PER_LAYER * layers
    if saved_s <= warm_s:  # looking into the cache would only load torch._dynamo, for over a second
        return False, (
            f"compile=auto: not compiling, which takes at least about {clock(warm_s)} "
            f"and saves about {clock(saved_s)} of this run"
        )
    warm = marker(runner, batch).exists()
    cost_s = warm_s if warm else cold_s
    pays = saved_s > cost_s
    return pays, (
        f"compile=auto: {'compiling' if pays else 'not compiling'}, which takes about {clock(cost_s)} "
        f"({'' if warm else 'not '}in the cache) and saves about {clock(saved_s)} of this run"
    )


def marker(runner: Runner, batch: tuple[Tensor, Tensor]) -> Path:
    """A file in inductor's cache that says: this model, micro-batch, dtype, torch and code have been compiled."""
    code = Path(model_module.__file__).read_bytes() + Path(__file__).read_bytes()
    dtype = getattr(runner.amp, "fast_dtype", None)  # of autocast, where it is on
    what = (runner.model.config, batch[0].shape, dtype, runner.distributed, torch.__version__)
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / f"deskgpt-{hashlib.sha256(repr(what).encode() + code).hexdigest()[:16]}"


def drop_unfinished(error: Exception, since: float) -> bool:
    """Whether compiling failed on a library that a killed run left unfinished in inductor's cache; deletes that.

    since: the time (time.time) when this run began to compile: what is newer is not deleted.
    """
    dropped = False
    for name in re.findall(r"(/\S+\.so): file too short", str(error)):
        with suppress(OSError):
            if os.stat(name).st_mtime < since:
                os.unlink(name)
                dropped = True
    return dropped


def mark_compiled(runner: Runner, batch: tuple[Tensor, Tensor]) -> None:
    """Notes in inductor's cache what has been compiled, for `decide` in later runs."""
    with suppress(OSError):
        marker(runner, batch).touch()
