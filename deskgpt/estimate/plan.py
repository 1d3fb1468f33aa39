"""What a run needs, printed before it starts: its size, memory by part, time. On this machine, or on a card elsewhere.

    python train.py config/train_fineweb_125m.py --dry_run=True
    python train.py config/train_fineweb_125m.py --plan_for="RTX 4070"
    python train.py config/train_fineweb_125m.py --plan_for=H100 --world=1024 --dp_shard=64

Memory is rehearsed (memory.py). On a CPU a real micro-batch is timed, and what this process holds already counts. For a
card the time is a range, from the published peak (peaks.py) and the share of it that known runs have reached.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from train import TrainConfig

# Shares of the bfloat16 peak that runs reach, and what they rest on. Cards whose 16-bit peak is only twice that of
# float32 (GeForce) are fed well by their memory; the others are not, and no run on one is known here.
OF_GEFORCE = (0.69, 0.82, "known runs of 40M and 125M parameters on an RTX 4070")
OF_OTHERS = (0.35, 0.6, "assumed, no run on such a card is known")
LONGEST_TIMED = 2e12  # FLOPs of a micro-batch that is timed: some seconds on a slow CPU
# Time of a step by activation_checkpoint: measured on a CPU, 4 layers of 384 (docs/training.md).
TIME_WITH_CHECKPOINTS = {"none": 1.0, "selective": 1.14, "full": 1.26}


def dry_run(config: TrainConfig, model_config: GPTConfig, make_optimizer: MakeOptimizer, dist: DistContext) -> None:
    """Prints what a run needs, here or on the card that plan_for names."""
    plan = Plan(config, model_config, make_optimizer, dist)
    plan.print_size()
    if config.plan_for:
        card = peaks.find_card(config.plan_for)
        dtype = card.fast_dtype() if config.dtype == "auto" else config.dtype
        total_bytes = card.memory_gb[0] * 2**30  # a maker's GB of memory is a GiB; AMD's cards count as CUDA's
        fits = plan.print_memory("cuda", dtype, card.name, total_bytes, total_bytes)
        plan.print_time(fits, card.peak(dtype), card)
        return
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
        dist.print0('on a card that you do not have here: --plan_for="RTX 4070"')


def usual_mfu(card: peaks.Card | None) -> tuple[float, float, str]:
    """The range of shares of the peak that runs reach, and what it rests on."""
    is_geforce = card is not None and card.flops["float16"] <= 2.2 * card.flops["float32"]
    return OF_GEFORCE if is_geforce else OF_OTHERS


class Plan:
    """The parts of what dry_run prints."""

    def __init__(
        self, config: TrainConfig, model_config: GPTConfig, make_optimizer: MakeOptimizer, dist: DistContext
    ) -> None:
        self.config = config
        self.model_config = replace(model_config, block_size=config.block_size)
        self.batching = Batching.of(
            config.batch_size,
            config.gradient_accumulation_steps,
            config.block_size,
            config.eval_iters,
            config.eval_tokens,
            0,
            dist.world,
        )  # of one rank of all
        self.make_optimizer = make_optimizer
        self.print0 = dist.print0
        self.model = GPT.without_storage(self.model_config)
        self.flops_per_step = self.model.estimate_flops() * self.batching.tokens_per_step  # of all ranks

    def print_size(self) -> None:
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
        """Prints the memory of a step, by part; returns whether it fits."""
        config, batching = self.config, self.batching
        compiled = config.compile is not False and device_type == "cuda"
        step = Step(
            self.model_config,
            batching.batch_size,
            Variant(dtype, compiled, recompute=config.activation_checkpoint),
            device_type,
            accumulates=batching.micro_steps > 1,
            make_optimizer=self.make_optimizer,
            shards=shards_of(config.dp_shard, batching.world),
        )
        parts = memory(step)
        if batching.world > 1 and step.shards == 1:
            parts["buckets"] = parts["weights"]  # DDP's copy of the gradients, which it sends
        if device_type == "cpu":
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
        """Times a real micro-batch of this CPU, not compiled, and prints what all steps and evaluations take."""
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
            f"{self.of_all_steps()} and {n_evaluations:,} evaluations"
        )

    def print_time(self, fits: bool, peak: tuple[float, str] | None, card: peaks.Card | None = None) -> None:
        """Prints the range of times of a step and of all, from the peak FLOP/s and its source."""
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
            f"{clock(steps * seconds / low)} for {self.of_all_steps()}, without evaluation{sending}"
        )

    def of_all_steps(self) -> str:
        steps = self.config.max_iters
        return f"{steps:,} steps of {self.batching.tokens_per_step * steps:.3g} tokens"
