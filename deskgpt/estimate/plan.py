"""What a run needs, said before it starts: its size, memory by part, time. On this machine, or on a card elsewhere.

    python train.py config/train_fineweb_125m.py --dry_run=True
    python train.py config/train_fineweb_125m.py --plan_for="RTX 4070"
    python train.py config/train_fineweb_125m.py --plan_for=H100 --world=1024 --dp_shard=64

Memory is rehearsed (memory.py), peaks and sizes of cards are published ones (peaks.py), and the share of the peak
that a run reaches is assumed. So a plan for a card needs no GPU, and measures nothing here; one for many ranks does not
need them either: what they send each other follows from the sizes (traffic.py).
"""

from __future__ import annotations

import functools
import math
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from deskgpt.compute import sharding
from deskgpt.compute.batching import Batching
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.runner import Variant
from deskgpt.estimate import traffic
from deskgpt.estimate.fit import USABLE, largest_batch
from deskgpt.estimate.memory import MakeOptimizer, Step, memory
from deskgpt.kernels import cpu_kernels, replacements, verify
from deskgpt.system import hardware, peaks
from deskgpt.system.formatting import BYTES, clock, millions, with_unit
from deskgpt.system.peaks import Card
from model import GPT, GPTConfig

ASSUMED_MFU = 0.4  # share of a device's peak that a run reaches
LONGEST_REHEARSED = 1 << 22  # tokens of context
NARROW = 16  # channels of a head, and tokens of the vocabulary, of the model that kernels are compared on
# Time of a step by activation_checkpoint: measured on a CPU, 4 layers of 384 (docs/your-machine.md).
TIME_WITH_CHECKPOINTS = {"none": 1.0, "selective": 1.14, "full": 1.26}


@dataclass(frozen=True)
class Machine:
    """One device that a run is planned for: this machine's, or a card of the table."""

    name: str
    device_type: str
    dtype: str  # of the matmuls
    memory_bytes: float | None  # None if not known
    free_bytes: float | None  # of it, what a run can get
    peak: tuple[float, str] | None  # FLOP/s that MFU refers to, and their source

    @classmethod
    def at_hand(cls, device: torch.device, dtype: str) -> Machine:
        """dtype: of the matmuls, or auto. Measures the device's peak."""
        if dtype == "auto":
            dtype = peaks.fast_dtype(device)
        flops, source = peaks.peak_flops(device, dtype)
        peak = None if math.isnan(flops) else (flops, source)
        memory_bytes = hardware.memory_bytes(device)
        free_bytes = hardware.usable_memory_bytes(device)
        return cls(hardware.device_name(device), device.type, dtype, memory_bytes, free_bytes, peak)

    @classmethod
    def of_card(cls, card: Card, dtype: str) -> Machine:
        """card: its first size of memory counts. AMD's cards count as CUDA's, as in torch's build for them."""
        if dtype == "auto":
            dtype = card.fast_dtype()
        memory_bytes = card.memory_gb[0] * 2**30  # a maker's GB of memory is a GiB
        return cls(card.name, "cuda", dtype, memory_bytes, memory_bytes, card.peak(dtype))

    def usable_bytes(self) -> float | None:
        """How much of a GPU's memory a run may take; None if that is not known, and for CPUs and Apple chips."""
        if self.free_bytes is None or self.device_type != "cuda":
            return None
        return USABLE * self.free_bytes


# ---- the run -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """The run that a plan is for."""

    config: GPTConfig
    batching: Batching  # of one rank of all
    max_iters: int
    make_optimizer: MakeOptimizer
    dtype: str = "auto"
    attention: str = "auto"
    compiled: bool = True
    activation_checkpoint: str = "none"
    dp_shard: int = 1
    reshard_after_forward: bool = True
    sync_each_batch: bool = True

    @functools.cached_property
    def flops_per_step(self) -> int:
        """Forward and backward, over all ranks."""
        return GPT.without_storage(self.config).estimate_flops() * self.batching.tokens_per_step

    def step(self, machine: Machine) -> Step:
        """A step of this run on that machine. Where weights are shared: to be called within sharding.fake_ranks."""
        # Only a run shows which attention is faster on a CPU. Explicit attention takes more memory.
        is_option = replacements.may_be_explicit(machine.device_type, self.config.block_size, self.config.dropout)
        is_wanted = self.attention == "explicit" or (self.attention == "auto" and not cpu_kernels.may_exist())
        attention = "explicit" if is_option and is_wanted else "flash"
        reference_only = functions_as_written(self.config)
        shard = None
        shards = sharding.shards_of(self.dp_shard, self.batching.world)
        if shards > 1:
            mesh = sharding.make_mesh("cpu", shards, self.batching.world)
            reshard = self.reshard_after_forward
            shard = functools.partial(sharding.shard, mesh=mesh, reshard_after_forward=reshard, dtype=machine.dtype)
        return Step(
            self.config,
            self.batching.batch_size,
            Variant(machine.dtype, self.compiled, attention, self.activation_checkpoint, reference_only),
            machine.device_type,
            accumulates=self.batching.micro_steps > 1,
            make_optimizer=self.make_optimizer,
            shard=shard,
            sync_each_batch=self.sync_each_batch,
        )


def functions_as_written(config: GPTConfig) -> tuple[str, ...]:
    """Functions of model.py that no kernel may stand in for, because model.py was changed; remembered.

    They are compared on a narrow model of the same kind, since a plan is for models of any size.
    """
    n_embd = min(config.n_embd, NARROW * config.n_head)
    length = min(config.block_size, replacements.LONGEST_EXPLICIT)
    narrow = replace(config, n_layer=min(config.n_layer, 2), n_embd=n_embd, block_size=length)
    narrow = replace(narrow, vocab_size=min(config.vocab_size, NARROW))

    def compare() -> dict[str, str]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            tokens = torch.randint(narrow.vocab_size, (2, length))
            return verify.wrong_replacements(
                GPT(narrow), replacements.replacements_for("cpu").items(), tokens[:1], tokens[1:]
            )

    return tuple(sorted(verify.problems_of(f"plan: {verify.digest(narrow)}, kernels", compare)))


# ---- the report ----------------------------------------------------------------------------------------------


def dry_run(run: Planned, plan_for: str, ranks: DistContext) -> None:
    """Says what a run needs, here or on the card that plan_for names. Raises ValueError for a context too long."""
    if run.config.block_size > LONGEST_REHEARSED:
        raise ValueError(
            f"block_size={run.config.block_size} is too long to rehearse; try --block_size={LONGEST_REHEARSED} or less"
        )
    if plan_for:
        machine = Machine.of_card(peaks.find_card(plan_for), run.dtype)
    else:
        machine = Machine.at_hand(ranks.device, run.dtype)
    say_size(run, machine, ranks)
    world = run.batching.world
    shares = sharding.shards_of(run.dp_shard, world) > 1
    with sharding.fake_ranks(world) if shares else nullcontext():
        fits = say_memory(run, machine, ranks)
    say_time(run, machine, fits, ranks)
    if machine.device_type != "cuda":
        ranks.print0('on a card that you do not have here: --plan_for="RTX 4070"')


def say_size(run: Planned, machine: Machine, ranks: DistContext) -> None:
    model = GPT.without_storage(run.config)
    positions = sum(p.numel() for p in model.parameters()) - model.num_params()
    ranks.print0(
        f"number of parameters: {millions(model.num_params())}, and {millions(positions)} of position embeddings; "
        f"vocabulary of {run.config.vocab_size:,}"
    )
    split = run.batching
    ranks.print0(
        f"tokens per step: {split.tokens_per_step:,} = {split.batch_size} x {split.accumulation} x {split.block_size}"
    )
    ranks.print0(f"FLOPs per step, forward and backward: {run.flops_per_step:.3e}")
    if split.world > 1:
        shards = sharding.describe_shards(run.dp_shard, split.world)
        ranks.print0(f"{split.world:,} ranks{shards}; micro-batches of each rank and step: {split.micro_steps}")
        n = sharding.shards_of(run.dp_shard, split.world)
        reshard = run.reshard_after_forward
        make = run.make_optimizer
        sent = traffic.sent_in_step(run.config, split, n, reshard, make, machine.dtype, run.sync_each_batch)
        in_words = [f"{kind} {with_unit(size, BYTES)}" for kind, size in sent.items()]
        ranks.print0(f"each rank sends per step: {', '.join(in_words)}")


def say_memory(run: Planned, machine: Machine, ranks: DistContext) -> bool:
    """Says the memory of a step, by part; returns whether it fits. It does where the machine's memory is not known."""
    step = run.step(machine)
    parts = memory(step)
    if run.batching.world > 1 and step.shard is None:
        parts["buckets"] = parts["weights"]  # DDP's copy of the gradients, which it sends
    total = sum(parts.values())
    has = hardware.memory_in_words(machine.free_bytes, machine.memory_bytes)
    ranks.print0(f"predicted peak memory of {machine.name}, {machine.dtype}: {total / 2**30:.2f} of {has}")
    ranks.print0("  " + ", ".join(f"{part} {size / 2**30:.2f}" for part, size in parts.items()) + " GiB")

    usable = machine.usable_bytes()
    if usable is not None:
        sequences = run.batching.sequences // run.batching.world
        largest = largest_batch(replace(step, batch_size=sequences), sequences, usable - parts.get("buckets", 0))
        flags = f"--batch_size={largest} --gradient_accumulation_steps={run.batching.sequences // max(1, largest)}"
        ranks.print0(
            f"  largest micro-batch predicted to fit, at the same tokens per step: {flags if largest else 'none'}"
        )
    limit = usable or machine.free_bytes
    return limit is None or total <= limit


def say_time(run: Planned, machine: Machine, fits: bool, ranks: DistContext) -> None:
    if not fits:
        ranks.print0("time: n/a, because this micro-batch does not fit")
        return
    if machine.peak is None:
        ranks.print0(f"time: n/a, because no peak of {machine.name} in {machine.dtype} is known")
        return
    peak, source = machine.peak
    computing_s = run.flops_per_step / (ASSUMED_MFU * peak * run.batching.world)
    step_s = computing_s * TIME_WITH_CHECKPOINTS[run.activation_checkpoint]
    step = f"{step_s:.3g}s" if step_s < 60 else clock(step_s)  # steps of small models take milliseconds
    again = "" if run.activation_checkpoint == "none" else ", with activations computed again"
    sending = ", and without what ranks send each other" if run.batching.world > 1 else ""
    ranks.print0(
        f"at {ASSUMED_MFU:.0%} (assumed) of {run.batching.world} x {peak / 1e12:.2f} TFLOP/s ({source}){again}: "
        f"{step} per step, {clock(step_s * run.max_iters)} for {run.max_iters:,} steps of "
        f"{run.batching.tokens_per_step * run.max_iters:.3g} tokens, without evaluation{sending}"
    )
