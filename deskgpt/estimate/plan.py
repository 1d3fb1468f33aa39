"""Print what a run needs, before it starts: its size, memory by part, time. On this machine, or on a card elsewhere.

    python train.py config/train_fineweb_125m.py --dry_run=True
    python train.py config/train_fineweb_125m.py --plan_for="RTX 4070"
    python train.py config/train_fineweb_125m.py --plan_for="1024x H100" --dp_shard=64

Memory is predicted (memory.py); on a CPU, what this process holds already counts. The time is a range, from the
device's peak (peaks.py) and the share of it that known runs on its kind of device have reached.
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
from deskgpt.estimate.fit import USABLE_SHARE, largest_batch
from deskgpt.estimate.memory import Step, memory, with_fewest_chunks
from deskgpt.system import hardware, peaks
from deskgpt.system.terminal import clock, in_gib, millions
from model import GPT, GPTConfig

Config = Any  # a TrainConfig of train.py, which is above this room: naming it here would be a circle

# Tokens/s of one card that trains GPT-2's 124M at a context of 1,024 in 16 bits: the slowest and the fastest known run,
# or the only one. docs/figures.md has the sources: others' reports, and on the H200 our own runs.
REPORTED = {
    "GeForce RTX 4070": (56_100,),
    "GeForce RTX 4090": (106_000, 110_000),
    "A100-SXM4": (109_000, 230_000),
    "H100 HBM3": (460_000,),
    "H200": (469_355, 599_844),
}
REPORTED_MODEL = GPTConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024, bias=False)
REPORTED_VOCABULARIES = (50257, 50304)  # GPT-2's, and padded
# Cards of one kind have the same compute units, and memory in about the same proportion. Others are each of their own.
KINDS = {"GeForce": "GeForce", "H100": "Hopper", "H200": "Hopper", "GH200": "Hopper"}
# MFU on two processors: 4 layers of 128, and 12 of 768 (bench/results/2026-11-25-cpu-kernels.md and -speed-zen4.md).
MFU_ON_CPU = (0.40, 0.85)
# Of what a step takes on a CPU, oneDNN's workspaces and the allocator's gaps, by peaks of real processes: 0.41 to 0.52
# for five models of 4 to 12 layers (a Xeon with 2 threads, 2026-11-27), more for a model of a few MB.
WORKSPACES_ON_CPU = 0.45
# Times as long as a step takes with activation_checkpoint=full: 4 layers of 384 on a CPU (docs/training.md), and 12 of
# 768 on an H200 (bench/results/2026-11-27-h200.md).
RECOMPUTING_ON_CPU = 1.26
RECOMPUTING_ON_GPU = 1.69


def dry_run(config: Config, model_config: GPTConfig, dist: DistContext) -> bool:
    """Print what a run needs, here or on the cards that plan_for names. Return whether it fits into the memory."""
    model_config = replace(model_config, block_size=config.block_size)
    dtype = config.dtype
    card: peaks.Card | None
    if config.plan_for:
        ranks, planned, memory_gb = peaks.find_cards(config.plan_for)
        card = planned
        name = planned.name
        device_type = "cuda"  # AMD's cards count as CUDA's
        dtype = planned.fast_dtype() if dtype == "auto" else dtype
        peak = planned.peak(dtype)
        free_bytes = total_bytes = memory_gb * 2**30  # a maker's GB of memory is a GiB
    else:
        ranks = dist.world
        card = peaks.card_of(dist.device)
        name = hardware.device_name(dist.device)
        device_type = dist.device.type
        dtype = peaks.fast_dtype(dist.device) if dtype == "auto" else dtype
        peak = peaks.peak_flops(dist.device, dtype)
        free_bytes = hardware.usable_memory_bytes(dist.device)
        total_bytes = hardware.memory_bytes(dist.device)
    batching = Batching.of(config, world=ranks)
    flops_per_step = print_size(config, model_config, batching, dist)
    # As choose_variant decides it for a long run.
    compiled = config.compile is not False and device_type == "cuda"
    residual_dtype = "bfloat16" if compiled and dtype == "bfloat16" else "float32"
    variant = Variant(dtype, compiled, False, config.activation_checkpoint, residual_dtype)
    step = Step(model_config, batching.batch_size, variant, device_type, shards_of(config.dp_shard, ranks), ranks > 1)
    step = with_fewest_chunks(step, USABLE_SHARE * total_bytes)
    parts = memory(step)
    if device_type == "cpu":
        parts["workspaces"] = round(WORKSPACES_ON_CPU * sum(parts.values()))
        parts["process"] = psutil.Process().memory_info().rss  # Python, torch and what it has loaded
    total = sum(parts.values())
    has = hardware.memory_in_words(free_bytes, total_bytes)
    dist.print0(f"predicted peak memory of {name}, {dtype}: {in_gib(total)} of {has}")
    dist.print0("  " + ", ".join(f"{part} {in_gib(size)}" for part, size in parts.items()) + " GiB")
    limit = free_bytes
    if device_type == "cuda":
        limit = int(USABLE_SHARE * free_bytes)
        sequences = batching.sequences // ranks
        largest = largest_batch(replace(step, batch_size=sequences), sequences, limit)
        flags = batching.with_batch_size(largest).flags() if largest else "none"
        dist.print0(f"  largest micro-batch predicted to fit, at the same tokens per step: {flags}")
    if total > limit:
        dist.print0("time: n/a, because this micro-batch does not fit")
        return False
    if config.activation_checkpoint == "full":
        flops_per_step *= RECOMPUTING_ON_CPU if device_type == "cpu" else RECOMPUTING_ON_GPU
    print_time(config, batching, flops_per_step, peak, usual_mfu(card, device_type), dist)
    return True


def usual_mfu(card: peaks.Card | None, device_type: str = "cpu") -> tuple[float, float, str]:
    """Return the range of MFU that known runs reach on this card or its kind, and in words what they ran on.

    A card has its own range if two of its runs are known. Where no run on its kind is known, it is that of all cards.
    card: None on a CPU, and on a GPU that the table does not have.
    """
    if device_type == "cpu" and card is None:
        return (*MFU_ON_CPU, "known runs on CPUs")
    known = [peaks.find_card(name) for name in REPORTED]
    own = [each for each in known if each == card and len(REPORTED[each.name]) > 1]
    alike = [each for each in known if card and kind_of(each) == kind_of(card)]
    cards = own or alike or known
    names = " and ".join(each.name for each in own or alike)
    basis = f"known runs on {names or 'other kinds of cards, as none is known on this one'}"
    flops = GPT.without_storage(REPORTED_MODEL).estimate_flops()
    shares = [flops * speed / each.flops["float16"] for each in cards for speed in REPORTED[each.name]]
    return min(shares), max(shares), basis


def kind_of(card: peaks.Card) -> str:
    """Return a name for the cards that reach about the same share of their peaks."""
    return KINDS.get(card.name.split()[0], card.name)


def is_geforce(card: peaks.Card) -> bool:
    """Return whether it is a GeForce card, which clocks above its rating and whose memory feeds it well."""
    return kind_of(card) == "GeForce"


def reported_speed(config: GPTConfig, device_name: str, dtype: str = "bfloat16", recompute: str = "none") -> str:
    """Return the known tokens/s of this model, computed in this way, on this card; "" if none are known."""
    model = replace(config, bias=False, vocab_size=REPORTED_MODEL.vocab_size)
    is_same = model == REPORTED_MODEL and config.vocab_size in REPORTED_VOCABULARIES
    if is_same and dtype != "float32" and recompute == "none":
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
    seconds = flops_per_step / (flops * world)
    steps = config.max_iters
    sending = ", and without what ranks send each other" if world > 1 else ""
    dist.print0(
        f"at {low:.0%} to {high:.0%} ({basis}) of {world} x {flops / 1e12:.2f} TFLOP/s ({source}): "
        f"{seconds / high:.4g} to {seconds / low:.4g}s per step, {clock(steps * seconds / high)} to "
        f"{clock(steps * seconds / low)} for {steps:,} steps of {steps * batching.tokens_per_step:.3g} tokens, "
        f"without evaluation{sending}"
    )
