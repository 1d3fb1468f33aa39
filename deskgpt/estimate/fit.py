"""Refuse a model or a micro-batch that does not fit into memory, and find the largest micro-batch that does."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from data.batching import Batching
from deskgpt.compute.variant import Variant
from deskgpt.estimate.memory import Step, memory, with_fewest_chunks
from deskgpt.system import hardware, peaks
from deskgpt.system.terminal import in_gib, millions
from model import GPT, GPTConfig

SURELY = 0.7  # a step takes at least this share of its predicted peak
ENOUGH_S = 0.05  # at the peak, for which auto_batch enlarges a micro-batch: 64 x 1024 for 124M on an H200
USABLE = 0.9  # of a GPU's usable memory: the rest is the allocator's gaps and what is not counted


def refuse_beyond_memory(
    config: GPTConfig, device: torch.device, trains: bool = False, shards: int = 1, builds: bool = True
) -> None:
    """Raise ValueError if the memory cannot hold the model, before any of it is taken.

    trains: with gradients, and at least one moment of each weight for the optimizer. shards: how many ranks share one
    copy. builds: whether this rank builds the model, which it does in the machine's own memory.
    """
    model = GPT.without_storage(config)
    weights = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    gathers = trains and shards > 1  # weights and two moments, for a checkpoint
    needed_on = {torch.device("cpu"): float(builds * weights * (3 if gathers else 1))}
    needed_on[device] = max((3 if trains else 1) * weights / shards, needed_on.get(device, 0.0))
    for each, needed in needed_on.items():
        if needed > hardware.usable_memory_bytes(each):
            n = sum(p.numel() for p in model.parameters())
            more = f", {in_gib(needed)} GiB with gradients and optimizer" if needed > weights else ""
            raise ValueError(
                f"n_layer={config.n_layer}, n_embd={config.n_embd}, block_size={config.block_size} make a model of "
                f"{millions(n)} parameters, {in_gib(weights)} GiB in float32{more}; {described(each)}: "
                "take a smaller model"
            )


def described(device: torch.device) -> str:
    """Return a sentence such as "NVIDIA GeForce RTX 4070 has 10.9 GiB free (12.0 in all)"."""
    has = hardware.memory_in_words(hardware.usable_memory_bytes(device), hardware.memory_bytes(device))
    return f"{hardware.device_name(device)} has {has}"


def refuse_large_batch(
    config: GPTConfig, device: torch.device, shards: int, batching: Batching, variant: Variant
) -> None:
    """Raise ValueError, naming a smaller micro-batch, if a CPU surely lacks the memory to train with this one.

    Only on a CPU: there the system ends a process that takes too much. GPUs raise an error. shards: as above.
    """
    if device.type != "cpu":
        return
    refuse_beyond_memory(config, device, True, shards)  # no micro-batch helps a model that is too large
    needed = SURELY * sum(memory(Step(config, batching.batch_size, variant, "cpu", shards=shards)).values())
    if needed > hardware.usable_memory_bytes(device):
        halved_batch(device, False, batching)


def halved_batch(device: torch.device, may_halve: bool, batching: Batching) -> Batching:
    """Return the same training in half the micro-batch, after `batching` did not fit, and print it.

    Raises ValueError, naming the settings, unless it may be halved, and at a micro-batch of one sequence.
    """
    n = batching.batch_size
    if n == 1:
        half = max(1, batching.block_size // 2)
        raise ValueError(
            f"out of memory: not even batch_size=1 fits; {described(device)}; "
            f"try --block_size={half} or a smaller model"
        )
    same = batching.with_batch_size(1 if n % 2 else n // 2)
    if not may_halve:
        raise ValueError(
            f"out of memory: batch_size={n} does not fit into memory ({described(device)}); try {same.flags()}, which "
            "is the same training"
        )
    print(f"out of memory: continuing with {same.flags()}, which is the same training", flush=True)
    return same


def larger_batch(config: GPTConfig, device: torch.device, batching: Batching, variant: Variant) -> Batching:
    """Return the same training in a micro-batch of ENOUGH_S or a little more, or the largest that is predicted to fit.

    What each micro-batch costs beside its matmuls is then small: queueing, casts of weights, sums of gradients.
    The limit is all memory of the device, not what is free just now: the same run takes the same micro-batch each time.
    """
    peak, _ = peaks.peak_flops(device, variant.dtype)
    sequences = ENOUGH_S * peak / (GPT.without_storage(config).estimate_flops() * batching.block_size)
    if not math.isfinite(sequences):  # no peak is known
        return batching
    of_rank = batching.sequences // batching.world
    enough = next((n for n in range(math.ceil(sequences), of_rank) if of_rank % n == 0), of_rank)
    step = Step(config, enough, variant, device.type)
    largest = largest_batch(step, of_rank, USABLE * hardware.memory_bytes(device))
    return batching if largest <= batching.batch_size else batching.with_batch_size(largest)


def largest_batch(step: Step, sequences: int, limit_bytes: float) -> int:
    """Return the largest micro-batch up to step's that divides a rank's sequences and is predicted to fit, or 0.

    It may need the loss in chunks: a larger micro-batch saves more than they cost.
    """
    for n in range(step.batch_size, 0, -1):
        if sequences % n:
            continue
        smallest = with_fewest_chunks(replace(step, batch_size=n), limit_bytes)
        if sum(memory(smallest).values()) <= limit_bytes:
            return n
    return 0
