"""What a run needs, printed before it starts: its size, memory by part, time. On this machine, or on a card elsewhere.

    python train.py config/train_fineweb_125m.py --dry_run=True
    python train.py config/train_fineweb_125m.py --plan_for="RTX 4070"
    python train.py config/train_fineweb_125m.py --plan_for="1024x H100" --dp_shard=64

Memory is predicted (memory.py). On a CPU a real micro-batch is timed, and what this process holds already counts. For a
card the time is a range, from the published peak (peaks.py) and the share of it that known runs have reached.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import psutil
import torch

from data.batching import Batching
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.sharding import describe_shards, shards_of
from deskgpt.compute.variant import Variant
from deskgpt.estimate.fit import USABLE, largest_batch
from deskgpt.estimate.memory import MakeOptimizer, Step, memory
from deskgpt.system import hardware, peaks
from deskgpt.system.terminal import clock, in_gib, millions
from model import GPT, GPTConfig

Config = Any  # a TrainConfig of train.py, which is above this room: naming it here would be a circle

# Shares of the 16-bit peak that runs of about 124M parameters have reached, by others' figures: nanoGPT issues 110 and
# 182 and pull request 225, llm.c discussion 481. Cards whose 16-bit peak is only twice that of float32 (GeForce) are
# fed well by their memory; the larger of them less.
SHARES = {
    "GeForce RTX 4070": (0.69, 0.82, "known runs of 40M and 125M parameters on an RTX 4070"),
    "GeForce": (0.5, 0.82, "known runs on an RTX 4070 and an RTX 4090"),
    "other": (0.3, 0.63, "known runs on A100 and H100"),
}
# Of what a step takes on a CPU, oneDNN's workspaces and the allocator's gaps, by peaks of real processes: 0.41 to 0.52
# for five models of 4 to 12 layers (a Xeon with 2 threads, 2026-11-27), more for a model of a few MB.
WORKSPACES_ON_CPU = 0.45
LONGEST_TIMED = 2e12  # FLOPs of a micro-batch that is timed: some seconds on a slow CPU
# Time of a step by activation_checkpoint: measured on a CPU, 4 layers of 384 (docs/training.md).
TIME_WITH_CHECKPOINTS = {"none": 1.0, "selective": 1.14, "full": 1.26}


def dry_run(config: Config, model_config: GPTConfig, make_optimizer: MakeOptimizer, dist: DistContext) -> bool:
    """Print what a run needs, here or on the cards that plan_for names. Return whether it fits into the memory."""
    ranks, card = peaks.find_cards(config.plan_for) if config.plan_for else (dist.world, None)
    plan = Plan(config, model_config, make_optimizer, ranks, dist)
    plan.print_size()
    if card is not None:
        dtype = card.fast_dtype() if config.dtype == "auto" else config.dtype
        total_bytes = card.memory_gb[0] * 2**30  # a maker's GB of memory is a GiB; AMD's cards count as CUDA's
        fits = plan.print_memory("cuda", dtype, card.name, total_bytes, total_bytes)
        plan.print_time(fits, card.peak(dtype), card)
        return fits
    device = dist.device
    dtype = peaks.fast_dtype(device) if config.dtype == "auto" else config.dtype
    free_bytes = hardware.usable_memory_bytes(device)
    total_bytes = hardware.memory_bytes(device)
    fits = plan.print_memory(device.type, dtype, hardware.device_name(device), free_bytes, total_bytes)
    if device.type == "cpu" and fits and plan.flops_per_step / plan.batching.accumulation < LONGEST_TIMED:
        plan.print_measured_time(device, dtype)
    else:
        plan.print_time(fits, peaks.peak_flops(device, dtype))
    if device.type != "cuda":
        dist.print0('on a card that you do not have here: --plan_for="RTX 4070", on eight: --plan_for="8x H100"')
    return fits


def usual_mfu(card: peaks.Card | None) -> tuple[float, float, str]:
    """Return the range of shares of the peak that runs reach, and what it rests on."""
    if card is None:
        return SHARES["other"]
    if card.name in SHARES:
        return SHARES[card.name]
    return SHARES["GeForce" if card.flops["float16"] <= 2.2 * card.flops["float32"] else "other"]


class Plan:
    """The sections of what dry_run prints."""

    def __init__(
        self,
        config: Config,
        model_config: GPTConfig,
        make_optimizer: MakeOptimizer,
        ranks: int,
        dist: DistContext,
    ) -> None:
        self.config = config
        self.model_config = replace(model_config, block_size=config.block_size)
        self.batching = Batching.of(
            config.batch_size,
            config.gradient_accumulation_steps,
            config.block_size,
            config.eval_iters,
            config.eval_tokens,
            world=ranks,
        )
        self.make_optimizer = make_optimizer
        self.print0 = dist.print0
        self.model = GPT.without_storage(self.model_config)
        tokens = self.batching.tokens_per_step
        self.flops_per_step = self.model.estimate_flops() * tokens  # of all ranks
        self.all_steps = f"{config.max_iters:,} steps of {tokens * config.max_iters:.3g} tokens"

    def print_size(self) -> None:
        """Print the model's size and what a step has."""
        trained = self.model.num_params()
        positions = sum(p.numel() for p in self.model.parameters()) - trained
        self.print0(
            f"number of parameters: {millions(trained)}, and {millions(positions)} of position embeddings; "
            f"vocabulary of {self.model_config.vocab_size:,}"
        )
        b = self.batching
        self.print0(f"tokens per step: {b.tokens_per_step:,} = {b.batch_size} x {b.accumulation} x {b.block_size}")
        self.print0(f"FLOPs per step, forward and backward: {self.flops_per_step:.3e}")
        if b.world > 1:
            shards = describe_shards(self.config.dp_shard, b.world)
            self.print0(f"{b.world:,} ranks{shards}; micro-batches of each rank and step: {b.micro_steps}")

    def print_memory(self, device_type: str, dtype: str, name: str, free_bytes: float, total_bytes: float) -> bool:
        """Print the memory of a step, by part; return whether it fits."""
        batching = self.batching
        compiled = self.config.compile is not False and device_type == "cuda"
        residual_dtype = "bfloat16" if compiled and dtype == "bfloat16" else "float32"
        variant = Variant(dtype, compiled, False, self.config.activation_checkpoint, residual_dtype)
        shards = shards_of(self.config.dp_shard, batching.world)
        step = Step(self.model_config, batching.batch_size, variant, device_type, self.make_optimizer, shards)
        parts = memory(step)
        if batching.world > 1 and shards == 1:
            parts["buckets"] = parts["weights"]  # DDP's copy of the gradients, which it sends
        if device_type == "cpu":
            parts["workspaces"] = round(WORKSPACES_ON_CPU * sum(parts.values()))
            parts["process"] = psutil.Process().memory_info().rss  # Python, torch and what it has loaded
        total = sum(parts.values())
        has = hardware.memory_in_words(free_bytes, total_bytes)
        self.print0(f"predicted peak memory of {name}, {dtype}: {in_gib(total)} of {has}")
        self.print0("  " + ", ".join(f"{part} {in_gib(size)}" for part, size in parts.items()) + " GiB")
        if device_type != "cuda":
            return total <= free_bytes
        sequences = batching.sequences // batching.world
        limit = USABLE * free_bytes - parts.get("buckets", 0)
        largest = largest_batch(replace(step, batch_size=sequences), sequences, limit)
        flags = batching.with_batch_size(largest).flags() if largest else "none"
        self.print0(f"  largest micro-batch predicted to fit, at the same tokens per step: {flags}")
        return total <= USABLE * free_bytes

    def print_measured_time(self, device: torch.device, dtype: str) -> None:
        """Time a real micro-batch of this CPU, not compiled; print what all steps and evaluations take."""
        config, batching = self.config, self.batching
        model = GPT(self.model_config)
        x = torch.randint(self.model_config.vocab_size, (batching.batch_size, batching.block_size))
        times: list[float] = []
        for _ in range(3):  # the first is slower
            t0 = time.perf_counter()
            with hardware.autocast(device, dtype):
                loss = model(x, x)[1]
            loss.backward()
            times.append(time.perf_counter() - t0)
        step_s = min(times) * batching.micro_steps * TIME_WITH_CHECKPOINTS[config.activation_checkpoint]
        n_evaluations = config.max_iters // config.eval_interval + 1
        # Of both splits; forward is a third of a pass.
        evaluation_s = 2 * math.ceil(batching.eval_windows / batching.batch_size) * min(times) / 3
        self.print0(
            f"a micro-batch takes {min(times):.3g}s here (timed, {dtype}, not compiled, without our kernels): "
            f"{step_s:.3g}s per step, {clock(step_s * config.max_iters + n_evaluations * evaluation_s)} for "
            f"{self.all_steps} and {n_evaluations:,} evaluations"
        )

    def print_time(self, fits: bool, peak: tuple[float, str] | None, card: peaks.Card | None = None) -> None:
        """Print the range of times of a step and of all, from the peak FLOP/s and its source."""
        if not fits:
            self.print0("time: n/a, because this micro-batch does not fit")
            return
        if peak is None or not peak[0] > 0:
            self.print0("time: n/a, because no peak in this dtype is known")
            return
        flops, source = peak
        low, high, basis = usual_mfu(card)
        world = self.batching.world
        seconds = self.flops_per_step * TIME_WITH_CHECKPOINTS[self.config.activation_checkpoint] / (flops * world)
        steps = self.config.max_iters
        sending = ", and without what ranks send each other" if world > 1 else ""
        self.print0(
            f"at {low:.0%} to {high:.0%} ({basis}) of {world} x {flops / 1e12:.2f} TFLOP/s ({source}): "
            f"{seconds / high:.3g} to {seconds / low:.3g}s per step, {clock(steps * seconds / high)} to "
            f"{clock(steps * seconds / low)} for {self.all_steps}, without evaluation{sending}"
        )
