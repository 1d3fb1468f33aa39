"""Refuse a model or a micro-batch that does not fit into memory, and find the largest micro-batch that does."""

from __future__ import annotations

from dataclasses import replace

import torch

from data.batching import Batching
from deskgpt.compute.variant import Variant
from deskgpt.estimate.memory import Step, memory, with_fewest_chunks
from deskgpt.system import hardware, peaks
from deskgpt.system.terminal import in_gib, millions
from model import GPT, GPTConfig

MIN_SHARE_OF_PREDICTION = 0.7  # of its predicted peak memory, which a step surely takes
USABLE_SHARE = 0.9  # of a GPU's memory: the rest is the allocator's gaps and what is not counted

# What a micro-batch costs however few tokens it has, for auto_batch.
FIXED_BYTES_PER_PARAMETER = 36  # moved: 4.5 GB for GPT-2's 124M, by bench/check_cards.py at 4 and 8 x 1024
FLOPS_PER_BYTE = 200  # that a card multiplies while its memory moves one, at both peaks: 76 (RTX 3090) to 295 (H100)
QUEUEING_S_PER_LAYER = 1.6e-3  # in which the CPU queues the kernels of a layer, both passes: 19.2 ms for 12 on an H200
TARGET_FIXED_SHARE = 0.02  # of a micro-batch's time: twice the tokens would then gain 1%


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
    predicted = sum(memory(Step(config, batching.batch_size, variant, "cpu", shards=shards)).values())
    if MIN_SHARE_OF_PREDICTION * predicted > hardware.usable_memory_bytes(device):
        halved_batch(device, False, batching)


class BatchTooLargeError(ValueError):
    """Memory does not suffice for a micro-batch. The message has the remedy."""


def halved_batch(device: torch.device, may_halve: bool, batching: Batching) -> Batching:
    """Return the same training in half the micro-batch, after `batching` did not fit.

    Raises BatchTooLargeError, naming the settings, unless it may be halved, and at a micro-batch of one sequence.
    """
    n = batching.batch_size
    if n == 1:
        half = max(1, batching.block_size // 2)
        raise BatchTooLargeError(
            f"out of memory: not even batch_size=1 fits; {described(device)}; "
            f"try --block_size={half} or a smaller model"
        )
    same = batching.with_batch_size(1 if n % 2 else n // 2)
    if not may_halve:
        raise BatchTooLargeError(
            f"out of memory: batch_size={n} does not fit into memory ({described(device)}); try {same.flags()}, which "
            "is the same training"
        )
    return same


def larger_batch(config: GPTConfig, device: torch.device, batching: Batching, variant: Variant) -> int:
    """Return the micro-batch, in sequences, whose fixed costs are small on this device, or the largest that fits.

    Fixed costs are the bytes that are moved for each parameter (casts of weights, sums of gradients), which may take
    TARGET_FIXED_SHARE of the time, and the queueing of kernels, which no longer shows if the card works as long. What
    fits is predicted, in all memory of the device, not in what is free just now: the same run takes the same
    micro-batch each time. The given micro-batch is never made smaller.
    """
    model = GPT.without_storage(config)
    sequence_flops = model.estimate_flops() * batching.block_size
    fixed_bytes = FIXED_BYTES_PER_PARAMETER * sum(p.numel() for p in model.parameters())
    fixed_flops = fixed_bytes * FLOPS_PER_BYTE / TARGET_FIXED_SHARE
    peak, _ = peaks.peak_flops(device, variant.dtype)
    if peak > 0:  # not NaN
        fixed_flops = max(fixed_flops, QUEUEING_S_PER_LAYER * config.n_layer * peak)
    of_rank = batching.sequences // batching.world
    divisors = [n for n in range(1, of_rank + 1) if of_rank % n == 0]
    enough = next((n for n in divisors if n * sequence_flops >= fixed_flops), of_rank)
    step = Step(config, enough, variant, device.type, ddp=batching.world > 1)
    largest = largest_batch(step, of_rank, USABLE_SHARE * hardware.memory_bytes(device))
    return max(largest, batching.batch_size)


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
