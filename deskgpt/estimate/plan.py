"""Print what a run needs, before it starts: its size, memory by part, time. On this machine, or on a card elsewhere.

    python train.py config/train_fineweb_125m.py --dry_run=True
    python train.py config/train_fineweb_125m.py --plan_for="RTX 4070"
    python train.py config/train_fineweb_125m.py --plan_for="1024x H100" --dp_shard=64

Memory is predicted (memory.py); on a CPU, what this process holds already counts. The time is a range, from the
device's peak (peaks.py) and the share of it that known runs have reached.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import psutil

from data.batching import Batching
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.sharding import describe_shards, shards_of
from deskgpt.compute.variant import Variant
from deskgpt.estimate.fit import USABLE, largest_batch
from deskgpt.estimate.memory import Step, memory, with_fewest_chunks
from deskgpt.system import hardware, peaks
from deskgpt.system.terminal import clock, in_gib, millions
from model import GPT, GPTConfig

Config = Any  # a TrainConfig of train.py, which is above this room: naming it here would be a circle

# Tokens/s of one card that trains GPT-2's 124M at a context of 1,024 in 16 bits: the slowest and the fastest run that
# others report, or the only one. docs/figures.md has the sources.
REPORTED = {
    "GeForce RTX 4070": (56_100,),
    "GeForce RTX 4090": (106_000, 110_000),
    "A100-SXM4": (109_000, 230_000),
    "H100 HBM3": (270_000, 460_000),
}
REPORTED_MODEL = GPTConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024, bias=False)
# Of what a step takes on a CPU, oneDNN's workspaces and the allocator's gaps, by peaks of real processes: 0.41 to 0.52
# for five models of 4 to 12 layers (a Xeon with 2 threads, 2026-11-27), more for a model of a few MB.
WORKSPACES_ON_CPU = 0.45
# Time of a step by activation_checkpoint: measured on a CPU, 4 layers of 384 (docs/training.md).
TIME_WITH_CHECKPOINTS = {"none": 1.0, "full": 1.26}


def dry_run(config: Config, model_config: GPTConfig, dist: DistContext) -> bool:
    """Print what a run needs, here or on the cards that plan_for names. Return whether it fits into the memory."""
    ranks, card = peaks.find_cards(config.plan_for) if config.plan_for else (dist.world, None)
    model_config = replace(model_config, block_size=config.block_size)
    batching = Batching.of(config, world=ranks)
    flops_per_step = print_size(config, model_config, batching, dist)
    if card is not None:
        name = card.name
        device_type = "cuda"  # AMD's cards count as CUDA's
        dtype = card.fast_dtype()
        free_bytes = total_bytes = card.memory_gb * 2**30  # a maker's GB of memory is a GiB
    else:
        name = hardware.device_name(dist.device)
        device_type = dist.device.type
        dtype = peaks.fast_dtype(dist.device)
        free_bytes = hardware.usable_memory_bytes(dist.device)
        total_bytes = hardware.memory_bytes(dist.device)
    if config.dtype != "auto":
        dtype = config.dtype
    # As choose_variant decides it for a long run.
    compiled = config.compile is not False and device_type == "cuda"
    residual_dtype = "bfloat16" if compiled and dtype == "bfloat16" else "float32"
    variant = Variant(dtype, compiled, False, config.activation_checkpoint, residual_dtype)
    step = Step(model_config, batching.batch_size, variant, device_type, shards_of(config.dp_shard, ranks))
    step = with_fewest_chunks(step, USABLE * total_bytes)
    parts = memory(step)
    if ranks > 1 and step.shards == 1:
        parts["buckets"] = parts["weights"]  # DDP's copy of the gradients, which it sends
    if device_type == "cpu":
        parts["workspaces"] = round(WORKSPACES_ON_CPU * sum(parts.values()))
        parts["process"] = psutil.Process().memory_info().rss  # Python, torch and what it has loaded
    total = sum(parts.values())
    has = hardware.memory_in_words(free_bytes, total_bytes)
    dist.print0(f"predicted peak memory of {name}, {dtype}: {in_gib(total)} of {has}")
    dist.print0("  " + ", ".join(f"{part} {in_gib(size)}" for part, size in parts.items()) + " GiB")
    limit = free_bytes
    if device_type == "cuda":
        limit = int(USABLE * free_bytes)
        sequences = batching.sequences // ranks
        largest = largest_batch(replace(step, batch_size=sequences), sequences, limit - parts.get("buckets", 0))
        flags = batching.with_batch_size(largest).flags() if largest else "none"
        dist.print0(f"  largest micro-batch predicted to fit, at the same tokens per step: {flags}")
    if total > limit:
        dist.print0("time: n/a, because this micro-batch does not fit")
        return False
    peak = card.peak(dtype) if card else peaks.peak_flops(dist.device, dtype)
    print_time(config, batching, flops_per_step, peak, usual_mfu(card), dist)
    return True


def usual_mfu(card: peaks.Card | None) -> tuple[float, float, str]:
    """Return the range of shares of the peak that others' runs reach, and the cards: this one, or those of its kind.

    GeForce cards, whose 16-bit peak is only twice that of float32, are fed well by their memory; others less.
    """
    if card is not None and len(REPORTED.get(card.name, ())) > 1:
        cards = [card]
    else:
        kind = card is not None and is_geforce(card)
        cards = [each for each in map(peaks.find_card, REPORTED) if is_geforce(each) == kind]
    flops = GPT.without_storage(REPORTED_MODEL).estimate_flops()
    shares = [flops * speed / each.flops["float16"] for each in cards for speed in REPORTED[each.name]]
    return min(shares), max(shares), f"others' runs on {' and '.join(each.name for each in cards)}"


def is_geforce(card: peaks.Card) -> bool:
    """Return whether its 16-bit peak is only about twice that of float32, as GeForce cards have it."""
    return card.flops["float16"] <= 2.2 * card.flops["float32"]


def reported_speed(config: GPTConfig, device_name: str) -> str:
    """Return the tokens/s that others report of this model on this card; "" if none are known."""
    if any(getattr(config, name) != getattr(REPORTED_MODEL, name) for name in ("n_layer", "n_embd", "block_size")):
        return ""
    with suppress(ValueError):
        return " to ".join(f"{speed:,}" for speed in REPORTED.get(peaks.find_card(device_name).name, ()))
    return ""


def print_size(config: Config, model_config: GPTConfig, batching: Batching, dist: DistContext) -> float:
    """Print the model's size and what a step has. Return the FLOPs of a step of all ranks."""
    model = GPT.without_storage(model_config)
    trained = model.num_params()
    positions = sum(p.numel() for p in model.parameters()) - trained
    flops = model.estimate_flops() * batching.tokens_per_step
    dist.print0(
        f"number of parameters: {millions(trained)}, and {millions(positions)} of position embeddings; "
        f"vocabulary of {model_config.vocab_size:,}"
    )
    b = batching
    dist.print0(f"tokens per step: {b.tokens_per_step:,} = {b.batch_size} x {b.accumulation} x {b.block_size}")
    dist.print0(f"FLOPs per step, forward and backward: {flops:.3e}")
    if b.world > 1:
        shards = describe_shards(config.dp_shard, b.world)
        dist.print0(f"{b.world:,} ranks{shards}; micro-batches of each rank and step: {b.micro_steps}")
    return flops


def print_time(
    config: Config,
    batching: Batching,
    flops_per_step: float,
    peak: tuple[float, str] | None,
    shares: tuple[float, float, str],
    dist: DistContext,
) -> None:
    """Print the range of times of a step and of all, from the peak FLOP/s and the shares of it that runs reach."""
    if peak is None or not peak[0] > 0:
        dist.print0("time: n/a, because no peak in this dtype is known")
        return
    flops, source = peak
    low, high, basis = shares
    world = batching.world
    seconds = flops_per_step * TIME_WITH_CHECKPOINTS[config.activation_checkpoint] / (flops * world)
    steps = config.max_iters
    sending = ", and without what ranks send each other" if world > 1 else ""
    dist.print0(
        f"at {low:.0%} to {high:.0%} ({basis}) of {world} x {flops / 1e12:.2f} TFLOP/s ({source}): "
        f"{seconds / high:.4g} to {seconds / low:.4g}s per step, {clock(steps * seconds / high)} to "
        f"{clock(steps * seconds / low)} for {steps:,} steps of {steps * batching.tokens_per_step:.3g} tokens, "
        f"without evaluation{sending}"
    )
