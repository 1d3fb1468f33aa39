"""What a training run needs, before it does: memory part by part, the micro-batch that fits, time.

Memory comes from a rehearsal, not from formulas: the GPT of model.py goes forward and backward on fake tensors
(shapes without storage) while the bytes alive are counted. It takes about a second and follows model.py wherever it
goes. `device_type="cuda"` gives CUDA's figures on any machine: attention and dropout, which keep other tensors
there, are replaced by CUDA's.

Not counted, of what `torch.cuda.max_memory_allocated` counts: workspaces of cuBLAS and of attention's backward pass,
DDP's buckets (4 bytes per parameter). The CUDA context and the allocator's gaps come on top: leave a tenth free.
"""

from __future__ import annotations

import math
import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deskgpt import hardware, peak_flops
from deskgpt.runlog import clock
from deskgpt.runner import Runner, all_max
from model import GPT, LONGEST_EXPLICIT, GPTConfig, causal_mask

if TYPE_CHECKING:
    from data.splits import Split
    from train import TrainConfig

USABLE = 0.9  # of a GPU's memory: the rest is CUDA's context and the allocator's gaps
REHEARSED = 1 << 16  # tokens of a rehearsal; larger batches are extrapolated
ASSUMED_MFU = 0.4  # of a run that has not been measured yet

# Of a run that is given minutes, not steps:
EVAL_SHARE = 0.2  # of its time for evaluation, at most
LEAST_EVAL_BATCHES = 8  # of each split: fewer say nothing of their own noise
WARMUP_SHARE = 0.1  # of its steps for the learning rate's warm-up, at most
TIMED, TIMED_S = 7, 3.0  # steps that are timed, at most, and seconds

# ---- memory --------------------------------------------------------------------------------------------------


def memory(
    config: GPTConfig,
    batch_size: int,
    dtype: str,
    device_type: str,
    compiled: bool,
    accumulates: bool = True,
    explicit: bool = False,
) -> dict[str, int]:
    """Bytes alive at the peak of a training step of one rank, by part; their sum is the peak.

    dtype is that of the matmuls, resolved. accumulates: whether a step has several micro-batches, so that earlier
    gradients are alive in a forward pass. explicit: see runner.Form. activations: what the forward pass keeps until the
    loss begins, token ids included. logits: all that the loss adds to it, or, where that needs more, what the backward
    pass does. optimizer: AdamW's moments; Muon keeps less, and while it steps, when the activations are gone, takes
    about as much.
    """
    n = REHEARSED // config.block_size or 1
    if batch_size > 2 * n:  # what is alive grows by the same for each sequence more
        small = memory(config, n, dtype, device_type, compiled, accumulates, explicit)
        large = memory(config, 2 * n, dtype, device_type, compiled, accumulates, explicit)
        return {k: small[k] + (large[k] - small[k]) * (batch_size - n) // n for k in small}
    cpu = torch.device("cpu")  # of the fake tensors: without CUDA, torch runs no pass on fake ones of CUDA
    with fake_tensors(device_type), Live(device_type) as live:
        model = GPT(config)
        model.transformer.mask = causal_mask(config.block_size) if explicit else None
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        for p in model.parameters():
            p.grad = torch.empty_like(p) if accumulates else None
        before, kept = live.bytes, 0
        idx, targets = (torch.zeros(batch_size, config.block_size, dtype=torch.int64) for _ in range(2))

        def loss_begins(*_: Any) -> None:
            nonlocal kept
            kept = live.bytes - before

        model.transformer.register_forward_hook(loss_begins)
        live.peak = 0
        with hardware.autocast(cpu, dtype):
            loss = model(idx, targets)[1]
        forward, live.peak = live.peak - weights, 0
        loss.backward()
        backward = live.peak - weights
    if compiled:  # its backward pass hands over all gradients at the end; only then are they added to those there
        backward = max(backward, 2 * weights if accumulates else weights)
    # clip_grad_norm_ and the fused AdamW work in place.
    rest = max(forward, backward)
    gradients = weights if accumulates or backward > forward else 0
    activations = min(kept, rest - gradients)
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": 2 * weights,
        "activations": activations,
        "logits": rest - gradients - activations,
    }


def largest_batch(config: GPTConfig, batch_size: int, dtype: str, device_type: str, limit_bytes: float) -> int:
    """The largest micro-batch of batch_size, batch_size/2, batch_size/4 ... predicted to fit; 0 where none does."""
    while sum(memory(config, batch_size, dtype, device_type, compiled=True).values()) > limit_bytes:
        if batch_size % 2:
            return 0
        batch_size //= 2
    return batch_size


class Live(TorchDispatchMode):
    """Counts the bytes of the storages that operations have made and that are still alive."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.device_type = device_type
        self._sizes: dict[int, int] = {}  # of the storages alive, by their address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and (key := (storage := t.untyped_storage())._cdata) not in self._sizes:
                self._sizes[key] = storage.nbytes()
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._free, key)
        self.peak = max(self.peak, self.bytes + self._workspace(func, args, out))
        return out

    def _free(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)

    def _workspace(self, func: Any, args: Any, out: Any) -> int:
        """Bytes that a kernel takes for copies of its arguments in the result's dtype, and frees again."""
        if func is torch.ops.aten.log_softmax.int_out:
            # CUDA reads only float16 as it is: aten/src/ATen/native/SoftMax.cpp.
            needed = self.device_type != "cuda" or args[0].dtype != torch.float16
        else:  # TensorIterator casts as it reads on CUDA, before it on a CPU
            needed = self.device_type == "cpu" and func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
        tensors = [t for t in args if isinstance(t, Tensor) and t.dim()]
        return sum(t.numel() * out.element_size() for t in tensors if t.dtype != out.dtype) if needed else 0


@contextmanager
def fake_tensors(device_type: str) -> Iterator[None]:
    """New tensors are fake ones on the CPU; for "cuda", with the attention and the dropout that CUDA has."""

    def attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            q, k, v = (t.to(torch.get_autocast_dtype("cpu")) for t in (q, k, v))
        # The flash kernel keeps q, k, v, its result and logsumexp (B, H, T); float32 takes another, which does too.
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return torch.native_dropout(x, p, True)[0] if training and p else x  # keeps a mask of one byte per element

    cuda: dict[str, Any] = {"scaled_dot_product_attention": attention, "dropout": dropout}
    with FakeTensorMode(), mock.patch.multiple(F, **cuda) if device_type == "cuda" else nullcontext():
        yield


# ---- what fits -----------------------------------------------------------------------------------------------


def smaller_batch(
    batch_size: int,
    accumulation: int,
    eval_iters: int,
    config: GPTConfig,
    dtype: str,
    device: torch.device,
    goes_on: bool,
) -> dict[str, int]:
    """Settings of the same training with a smaller micro-batch, after this one did not fit: half, where it goes_on.

    Raises ValueError where it does not, which names those of the largest micro-batch predicted to fit, and where
    there is no smaller one. eval_iters counts micro-batches too, 0 where other settings say what is evaluated.
    """
    name, limit = hardware.device_name(device), hardware.memory_bytes(device)
    if batch_size == 1:
        half = max(1, config.block_size // 2)
        raise ValueError(
            f"out of memory: not even batch_size=1 fits into {name}; try --block_size={half} or a smaller model"
        )
    smaller = 1 if batch_size % 2 else batch_size // 2
    if not goes_on and device.type == "cuda" and limit:
        smaller = largest_batch(config, smaller, dtype, device.type, USABLE * limit) or 1
    factor = batch_size // smaller
    same = {"batch_size": smaller, "gradient_accumulation_steps": accumulation * factor}
    same |= {"eval_iters": eval_iters * factor} if eval_iters else {}
    if not goes_on:
        flags = " ".join(f"--{k}={v}" for k, v in same.items())
        raise ValueError(
            f"out of memory: batch_size={batch_size} does not fit into {name}; try {flags}, which is the same "
            "training, or --auto_batch=True"
        )
    return same


# ---- time ----------------------------------------------------------------------------------------------------


def eval_windows(c: TrainConfig) -> int:
    """Windows of each split that an evaluation reads, at most."""
    return math.ceil(c.eval_tokens / c.block_size) or c.eval_iters * c.batch_size


def steps_within(
    seconds: float,
    c: TrainConfig,
    runner: Runner,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    splits: tuple[Split, ...],
    start_iter: int,
    world: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Settings with which a run of c ends in about so many seconds, of one that would take longer; the rest stays.

    Steps and evaluation are timed. max_iters becomes the steps that fit, and what is longer than these in the schedule
    is shortened. Where evaluations would take more than EVAL_SHARE of the time, they read less. All ranks get the same
    settings. Leaves the weights as they are.
    """
    seconds = max(seconds, 0.0)
    step_s = all_max(time_step(runner, optimizer, batch, c.gradient_accumulation_steps // world), runner.device)
    batch_s = all_max(time_evaluation(runner, batch), runner.device)
    windows = eval_windows(c)
    batches = sum(math.ceil(split.n_eval_windows(windows) / (c.batch_size * world)) for split in splits)
    settings: dict[str, Any] = {}

    def evaluations(steps: int) -> int:
        """At the beginning, after each eval_interval steps and at the end."""
        return 2 + (steps - 1) // c.eval_interval

    steps = c.max_iters - start_iter
    if steps * step_s + evaluations(steps) * batches * batch_s > seconds:
        most = int(EVAL_SHARE * seconds / (evaluations(int(seconds / step_s)) * batch_s))
        per_split = max(LEAST_EVAL_BATCHES, most // len(splits))
        if batches > per_split * len(splits):
            batches = per_split * len(splits)
            if c.eval_tokens:
                settings["eval_tokens"] = per_split * c.batch_size * world * c.block_size
            else:
                settings["eval_iters"] = per_split * world
        eval_s = batches * batch_s
        fit = int((seconds - 2 * eval_s) / (step_s + eval_s / c.eval_interval))
        steps = max(1, min(steps, fit))
        settings["max_iters"] = start_iter + steps
        settings["warmup_iters"] = min(c.warmup_iters, math.ceil(steps * WARMUP_SHARE))
        settings["lr_decay_iters"] = min(c.lr_decay_iters, settings["max_iters"])
        settings["cooldown_iters"] = min(c.cooldown_iters, steps)
    tokens = steps * c.batch_size * c.gradient_accumulation_steps * c.block_size
    eval_s = batches * batch_s
    total_s = steps * step_s + evaluations(steps) * eval_s
    say(
        f"max_minutes={c.max_minutes:g}: {steps:,} steps of about {step_s * 1e3:.3g} ms ({tokens:,} tokens) and "
        f"{evaluations(steps)} evaluations of about {clock(eval_s)}: done in about {clock(total_s)}"
    )
    return settings


def time_step(
    runner: Runner, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], micro_steps: int
) -> float:
    """Median seconds of an optimizer step of so many micro-batches; with a learning rate of 0, and no state left."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    passes, updates = [], []
    for _ in range(TIMED):
        t0 = time.perf_counter()
        runner.backward(*batch, micro_steps)
        hardware.synchronize(runner.device)
        t1 = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(runner.parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        hardware.synchronize(runner.device)
        passes.append(t1 - t0)
        updates.append(time.perf_counter() - t1)
        if sum(passes) > TIMED_S:
            break
    optimizer.state.clear()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    # The first update makes the optimizer's state.
    return micro_steps * statistics.median(passes) + statistics.median(updates[1:] or updates)


@torch.no_grad()
def time_evaluation(runner: Runner, batch: tuple[Tensor, Tensor]) -> float:
    """Median seconds of a micro-batch of evaluation."""
    times = []
    runner.module.eval()
    for _ in range(3):
        t0 = time.perf_counter()
        with runner.amp:
            runner.module(*batch)
        hardware.synchronize(runner.device)
        times.append(time.perf_counter() - t0)
    runner.module.train()
    return statistics.median(times)


# ---- dry run -------------------------------------------------------------------------------------------------


def report(
    config: GPTConfig,
    device: torch.device,
    dtype: str,
    compiled: bool,
    batch_size: int,
    accumulation: int,
    world: int,
    steps: int,
    say: Callable[[str], None],
) -> None:
    """Says what a run of so many steps needs; accumulation counts the micro-batches of all ranks. Raises ValueError."""
    if config.block_size > 1 << 22:
        raise ValueError(f"block_size={config.block_size} is too long to rehearse; try --block_size={1 << 22} or less")
    with torch.device("meta"):
        model = GPT(config)
    tokens = batch_size * accumulation * config.block_size
    flops = model.estimate_flops() * tokens
    positions = sum(p.numel() for p in model.parameters()) - model.num_params()
    say(
        f"number of parameters: {model.num_params() / 1e6:.2f}M, and {positions / 1e6:.2f}M of position embeddings; "
        f"vocabulary of {config.vocab_size:,}"
    )
    say(f"tokens per step: {tokens:,} = {batch_size} x {accumulation} x {config.block_size}")
    say(f"FLOPs per step, forward and backward: {flops:.3e}")
    # Which attention is faster on a CPU shows in a run only; explicit attention takes more.
    explicit = device.type == "cpu" and not config.dropout and config.block_size <= LONGEST_EXPLICIT
    parts = memory(config, batch_size, dtype, device.type, compiled, accumulation > world, explicit)
    total, limit = sum(parts.values()), hardware.memory_bytes(device)
    of = f" of {limit / 2**30:.1f} GiB" if limit else ""
    say(f"predicted peak memory of {hardware.device_name(device)}, {dtype}: {total / 2**30:.2f}{of}")
    say("  " + ", ".join(f"{part} {size / 2**30:.2f}" for part, size in parts.items()) + " GiB")
    if limit and device.type == "cuda":
        fits = largest_batch(config, 1 << 12, dtype, device.type, USABLE * limit)
        say(f"  largest micro-batch predicted to fit, of the powers of 2: {fits or 'none'}")
    peak, source = peak_flops.peak_flops(device, dtype)
    step_s = flops / (ASSUMED_MFU * peak * world)
    say(
        f"at an assumed {ASSUMED_MFU:.0%} of {world} x {peak / 1e12:.2f} TFLOP/s ({source}): {clock(step_s)} per step, "
        f"{clock(step_s * steps)} for {steps:,} steps of {tokens * steps:.3g} tokens, without evaluation"
    )
