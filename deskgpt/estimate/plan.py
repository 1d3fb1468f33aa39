"""What a run needs, printed before it starts: its size, memory by part, time. On this machine, or on a card elsewhere.

    python train.py config/train_fineweb_125m.py --dry_run=True
    python train.py config/train_fineweb_125m.py --plan_for="RTX 4070"
    python train.py config/train_fineweb_125m.py --plan_for=H100 --world=1024 --dp_shard=64

Memory is rehearsed (memory.py). On a CPU a real micro-batch is timed, and what this process holds already counts. For a
card the time is a range, from the published peak (peaks.py) and the share of it that known runs have reached.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import psutil
import torch

from deskgpt.compute.batching import Batching
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.runner import Variant
from deskgpt.compute.sharding import describe_shards, shards_of
from deskgpt.estimate.fit import USABLE, largest_batch
from deskgpt.estimate.memory import MakeOptimizer, Step, memory
from deskgpt.system import hardware, peaks
from deskgpt.system.terminal import clock, millions
from model import GPT, GPTConfig

if TYPE_CHECKING:
    from train import TrainConfig

# Shares of the bfloat16 peak that runs reach, and what they rest on. Cards whose 16-bit peak is only twice that of
# float32 (GeForce) are fed well by their memory; the others are not, and no run on one is known here.
OF_GEFORCE = (0.69, 0.82, "known runs of 40M and 125M parameters on an RTX 4070")
OF_OTHERS = (0.35, 0.6, "assumed, no run on such a card is known")
LONGEST_REHEARSED = 1 << 22  # tokens of context
LONGEST_TIMED = 2e12  # FLOPs of a micro-batch that is timed: some seconds on a slow CPU
# Time of a step by activation_checkpoint: measured on a CPU, 4 layers of 384 (docs/training.md).
TIME_WITH_CHECKPOINTS = {"none": 1.0, "selective": 1.14, "full": 1.26}


@dataclass(frozen=True)
class Planned:
    """The run that a plan is for."""

    settings: TrainConfig
    config: GPTConfig
    batching: Batching  # of one rank of all
    make_optimizer: MakeOptimizer

    def flops_per_step(self) -> int:
        """Forward and backward, over all ranks."""
        return GPT.without_storage(self.config).estimate_flops() * self.batching.tokens_per_step

    def step(self, device_type: str, dtype: str) -> Step:
        c = self.settings
        attention = "explicit" if c.attention == "explicit" else "flash"
        compiled = c.compile is not False and device_type == "cuda"
        return Step(
            self.config,
            self.batching.batch_size,
            Variant(dtype, compiled, attention, c.activation_checkpoint),
            device_type,
            accumulates=self.batching.micro_steps > 1,
            make_optimizer=self.make_optimizer,
            shards=shards_of(c.dp_shard, self.batching.world),
            gathers_all=not c.reshard_after_forward,
            keeps_gradients=not c.sync_each_batch and self.batching.micro_steps > 1,
        )


def dry_run(run: Planned, plan_for: str, dist: DistContext) -> None:
    """Prints what a run needs, here or on the card that plan_for names. Raises ValueError for a context too long."""
    if run.config.block_size > LONGEST_REHEARSED:
        raise ValueError(
            f"block_size={run.config.block_size} is too long to rehearse; try --block_size={LONGEST_REHEARSED} or less"
        )
    print_size(run, dist)
    if plan_for:
        card = peaks.find_card(plan_for)
        dtype = card.fast_dtype() if run.settings.dtype == "auto" else run.settings.dtype
        total_bytes = card.memory_gb[0] * 2**30  # a maker's GB of memory is a GiB; AMD's cards count as CUDA's
        fits = print_memory(run, run.step("cuda", dtype), card.name, total_bytes, total_bytes, dist)
        print_time(run, fits, card.peak(dtype), card, dist)
        return
    device = dist.device
    dtype = peaks.fast_dtype(device) if run.settings.dtype == "auto" else run.settings.dtype
    free_bytes = hardware.usable_memory_bytes(device)
    name = hardware.device_name(device)
    fits = print_memory(run, run.step(device.type, dtype), name, free_bytes, hardware.memory_bytes(device), dist)
    micro_flops = run.flops_per_step() / run.batching.accumulation
    if device.type == "cpu" and fits and micro_flops < LONGEST_TIMED:
        print_measured_time(run, dtype, dist)
    else:
        print_time(run, fits, peaks.peak_flops(device, dtype), None, dist)
    if device.type != "cuda":
        dist.print0('on a card that you do not have here: --plan_for="RTX 4070"')


def usual_mfu(card: peaks.Card | None) -> tuple[float, float, str]:
    """The range of shares of the peak that runs reach, and what it rests on."""
    is_geforce = card is not None and card.flops["float16"] <= 2.2 * card.flops["float32"]
    return OF_GEFORCE if is_geforce else OF_OTHERS


def print_size(run: Planned, dist: DistContext) -> None:
    model = GPT.without_storage(run.config)
    positions = sum(p.numel() for p in model.parameters()) - model.num_params()
    dist.print0(
        f"number of parameters: {millions(model.num_params())}, and {millions(positions)} of position embeddings; "
        f"vocabulary of {run.config.vocab_size:,}"
    )
    split = run.batching
    dist.print0(
        f"tokens per step: {split.tokens_per_step:,} = {split.batch_size} x {split.accumulation} x {split.block_size}"
    )
    dist.print0(f"FLOPs per step, forward and backward: {run.flops_per_step():.3e}")
    if split.world > 1:
        shards = describe_shards(run.settings.dp_shard, split.world)
        dist.print0(f"{split.world:,} ranks{shards}; micro-batches of each rank and step: {split.micro_steps}")


def print_memory(run: Planned, step: Step, name: str, free_bytes: float, total_bytes: float, dist: DistContext) -> bool:
    """Prints the memory of a step, by part; returns whether it fits."""
    parts = memory(step)
    if run.batching.world > 1 and step.shards == 1:
        parts["buckets"] = parts["weights"]  # DDP's copy of the gradients, which it sends
    if step.device_type == "cpu":
        parts["process"] = psutil.Process().memory_info().rss  # Python, torch and what it has loaded
    total = sum(parts.values())
    has = hardware.memory_in_words(free_bytes, total_bytes)
    dist.print0(f"predicted peak memory of {name}, {step.variant.dtype}: {total / 2**30:.2f} of {has}")
    dist.print0("  " + ", ".join(f"{part} {size / 2**30:.2f}" for part, size in parts.items()) + " GiB")
    if step.device_type != "cuda":
        return total <= free_bytes
    usable = USABLE * free_bytes
    sequences = run.batching.sequences // run.batching.world
    largest = largest_batch(replace(step, batch_size=sequences), sequences, usable - parts.get("buckets", 0))
    flags = f"--batch_size={largest} --gradient_accumulation_steps={run.batching.sequences // max(1, largest)}"
    dist.print0(f"  largest micro-batch predicted to fit, at the same tokens per step: {flags if largest else 'none'}")
    return total <= usable


def print_measured_time(run: Planned, dtype: str, dist: DistContext) -> None:
    """Times a real micro-batch of this CPU, not compiled, and prints what all steps and evaluations take."""
    device = dist.device
    model = GPT(run.config)
    split = run.batching
    x = torch.randint(run.config.vocab_size, (split.batch_size, split.block_size))
    times: list[float] = []
    while len(times) < 2 or (sum(times) < 1 and len(times) < 20):  # the first is slower
        t0 = time.perf_counter()
        with hardware.autocast(device, dtype):
            loss = model(x, x)[1]
        loss.backward()
        times.append(time.perf_counter() - t0)
    step_s = min(times) * split.micro_steps * TIME_WITH_CHECKPOINTS[run.settings.activation_checkpoint]
    n_evaluations = run.settings.max_iters // run.settings.eval_interval + 1
    batches = 2 * -(-split.eval_windows // split.batch_size)  # of both splits; forward is a third of a pass
    total_s = step_s * run.settings.max_iters + n_evaluations * batches * min(times) / 3
    dist.print0(
        f"a micro-batch takes {min(times):.3g}s here (timed, {dtype}, not compiled, without our kernels): "
        f"{step_s:.3g}s per step, {clock(total_s)} for {run.settings.max_iters:,} steps of "
        f"{split.tokens_per_step * run.settings.max_iters:.3g} tokens and {n_evaluations:,} evaluations"
    )


def print_time(
    run: Planned, fits: bool, peak: tuple[float, str] | None, card: peaks.Card | None, dist: DistContext
) -> None:
    """Prints the range of times of a step and of all, from the peak FLOP/s and its source."""
    if not fits:
        dist.print0("time: n/a, because this micro-batch does not fit")
        return
    if peak is None or not peak[0] > 0:
        dist.print0("time: n/a, because no peak in this dtype is known")
        return
    flops, source = peak
    low, high, basis = usual_mfu(card)
    again = TIME_WITH_CHECKPOINTS[run.settings.activation_checkpoint]
    fastest_s, slowest_s = (run.flops_per_step() * again / (mfu * flops * run.batching.world) for mfu in (high, low))
    sending = ", and without what ranks send each other" if run.batching.world > 1 else ""
    dist.print0(
        f"at {low:.0%} to {high:.0%} ({basis}) of {run.batching.world} x {flops / 1e12:.2f} TFLOP/s ({source}): "
        f"{fastest_s:.3g} to {slowest_s:.3g}s per step, {clock(fastest_s * run.settings.max_iters)} to "
        f"{clock(slowest_s * run.settings.max_iters)} for {run.settings.max_iters:,} steps of "
        f"{run.batching.tokens_per_step * run.settings.max_iters:.3g} tokens, without evaluation{sending}"
    )
