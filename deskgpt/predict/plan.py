"""What a run needs, said before it starts: its size, memory by part, time. On this machine, or on a card elsewhere.

    python train.py config/train_fineweb_125m.py --dry_run=True
    python train.py config/train_fineweb_125m.py --plan_for="RTX 4070"
    python train.py config/train_fineweb_125m.py --plan_for=all
    python train.py config/train_fineweb_125m.py --plan_for=H100 --world=1024 --dp_shard=64

Memory is rehearsed (memory.py), peaks and sizes of cards are published ones (gpu_peaks.py), and the share of the peak
that a run reaches is known or assumed (known_runs.py). So a plan for a card needs no GPU, and measures nothing here.
A plan for many ranks does not need them either: what they send each other follows from the sizes (traffic.py).
"""

from __future__ import annotations

import bisect
import functools
import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from deskgpt.compute import sharding
from deskgpt.compute.batching import Batching
from deskgpt.compute.ranks import Ranks
from deskgpt.compute.runner import Form
from deskgpt.faster import held, kernels
from deskgpt.machine import gpu_peaks, hardware, known_runs, peak_flops
from deskgpt.machine.gpu_peaks import Card
from deskgpt.machine.terminal import not_silent
from deskgpt.machine.words import BYTES, clock, with_unit
from deskgpt.predict import traffic
from deskgpt.predict.fit import USABLE
from deskgpt.predict.memory import MakeOptimizer, Step, memory, steps_on_fakes
from model import GPT, GPTConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

LONGEST_REHEARSED = 1 << 22  # tokens of context
NARROW = 16  # channels of a head, and tokens of the vocabulary, of the model that kernels are compared on
LARGEST_PLANNED = 1 << 17  # tokens of a micro-batch: 128 x 1024 fill 80 GB
rehearsed = functools.cache(memory)  # a table of cards asks for the same steps again and again
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
    card: Card | None  # its row in gpu_peaks.py

    @classmethod
    def at_hand(cls, device: torch.device, dtype: str) -> Machine:
        """dtype: of the matmuls, or auto. Measures the device's peak."""
        if dtype == "auto":
            dtype = peak_flops.fast_dtype(device)
        name = hardware.device_name(device)
        flops, source = peak_flops.peak_flops(device, dtype)
        peak = None if math.isnan(flops) else (flops, source)
        memory_bytes = hardware.memory_bytes(device)
        free_bytes = hardware.usable_memory_bytes(device)
        return cls(name, device.type, dtype, memory_bytes, free_bytes, peak, peak_flops.card_of(device))

    @classmethod
    def of_card(cls, card: Card, dtype: str) -> Machine:
        """card: with one size of memory at most. AMD's cards count as CUDA's, as in torch's build for them."""
        device_type = "mps" if card.maker == "Apple" else "cuda"
        if dtype == "auto":
            dtype = card.fast_dtype()
        memory_bytes = card.memory_gb[0] * 2**30 if card.memory_gb else None  # a maker's GB of memory is a GiB
        return cls(card.name, device_type, dtype, memory_bytes, memory_bytes, card.peak_in_training(dtype), card)

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
    compiled: bool = True
    activation_checkpoint: str = "none"
    dp_shard: int = 1
    reshard_after_forward: bool = True
    mesh: DeviceMesh | None = None  # of ranks that share weights; None: each has all of them

    @functools.cached_property
    def flops_per_step(self) -> int:
        """Forward and backward, over all ranks."""
        return GPT.without_storage(self.config).estimate_flops() * self.batching.tokens_per_step

    @functools.cached_property
    def as_written(self) -> tuple[str, ...]:
        return functions_as_written(self.config)

    def step(self, machine: Machine) -> Step:
        """A step of this run on that machine."""
        # Only a run shows which attention is faster on a CPU. Explicit attention takes more memory.
        explicit = kernels.may_be_explicit(machine.device_type, self.config.block_size, self.config.dropout)
        return Step(
            self.config,
            self.batching.batch_size,
            Form(machine.dtype, self.compiled, explicit, self.activation_checkpoint, self.as_written),
            machine.device_type,
            accumulates=self.batching.micro_steps > 1,
            make_optimizer=self.make_optimizer,
            shard=None if self.mesh is None else self.shard,
        )

    def shard(self, model: GPT) -> None:
        assert self.mesh is not None
        sharding.shard(model, self.mesh, self.reshard_after_forward)

    def memory(self, machine: Machine) -> dict[str, int]:
        """Bytes at the peak of a step on that machine, by part; DDP has a copy of the gradients, which it sends."""
        parts = dict(rehearsed(self.step(machine)))
        if self.batching.world > 1 and not self.mesh:
            parts["buckets"] = sum(p.nbytes for p in GPT.without_storage(self.config).parameters())
        return parts


def functions_as_written(config: GPTConfig) -> tuple[str, ...]:
    """Functions of model.py that no kernel may stand in for, because model.py was changed; remembered.

    They are compared on a narrow model of the same kind, since a plan is for models of any size.
    """
    n_embd = min(config.n_embd, NARROW * config.n_head)
    length = min(config.block_size, kernels.LONGEST_EXPLICIT)
    narrow = replace(config, n_layer=min(config.n_layer, 2), n_embd=n_embd, block_size=length)
    narrow = replace(narrow, vocab_size=min(config.vocab_size, NARROW))

    def compare() -> dict[str, str]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            tokens = torch.randint(narrow.vocab_size, (2, length))
            return held.all_wrong_kernels(GPT(narrow), False, tokens[:1], tokens[1:])

    return tuple(sorted(held.problems_of(f"plan: {held.digest(narrow)}, kernels", compare)))


def shared(steps: int, world: int, ranks: Ranks) -> int:
    """The micro-batches per step that `world` ranks can share: `steps`, or the next larger number, which it says."""
    if steps % world == 0 or world == ranks.world:
        return steps
    nearest = (steps // world + 1) * world
    ranks.say(
        f"gradient_accumulation_steps={steps} does not divide among {world:,} ranks; this is the plan of "
        f"--gradient_accumulation_steps={nearest}"
    )
    return nearest


# ---- the report ----------------------------------------------------------------------------------------------


def dry_run(run: Planned, plan_for: str, ranks: Ranks) -> None:
    """Says what a run needs, here or on the card that plan_for names. Raises ValueError for a context too long."""
    if run.config.block_size > LONGEST_REHEARSED:
        raise ValueError(
            f"block_size={run.config.block_size} is too long to rehearse; try --block_size={LONGEST_REHEARSED} or less"
        )
    world = run.batching.world
    shards = sharding.shards_of(run.dp_shard, world)
    say_size(run, ranks)
    if world > 1:
        say_ranks(run, shards, ranks)
    with sharding.fake_ranks(world) if shards > 1 else nullcontext():
        if shards > 1:
            run = replace(run, mesh=sharding.make_mesh("cpu", shards, world))
        if plan_for == "all":
            say_cards(run, ranks)
            return
        card = gpu_peaks.find_card(plan_for) if plan_for else None
        machine = Machine.of_card(card, run.dtype) if card else Machine.at_hand(ranks.device, run.dtype)
        fits = say_memory(run, machine, ranks)
    say_time(run, machine, fits, ranks)
    if machine.device_type != "cuda" and not card:
        ranks.say('on a card that you do not have here: --plan_for="RTX 4070", or --plan_for=all for a table')


def say_size(run: Planned, ranks: Ranks) -> None:
    model = GPT.without_storage(run.config)
    positions = sum(p.numel() for p in model.parameters()) - model.num_params()
    ranks.say(
        f"number of parameters: {model.num_params() / 1e6:.2f}M, and {positions / 1e6:.2f}M of position embeddings; "
        f"vocabulary of {run.config.vocab_size:,}"
    )
    split = run.batching
    ranks.say(
        f"tokens per step: {split.tokens_per_step:,} = {split.batch_size} x {split.accumulation} x {split.block_size}"
    )
    ranks.say(worlds_in_words(split.accumulation, run.dp_shard))
    ranks.say(f"FLOPs per step, forward and backward: {run.flops_per_step:.3e}")


def worlds_in_words(steps: int, dp_shard: int) -> str:
    """On how many ranks the same experiment can run: those that share the micro-batches of a step evenly."""
    shard = max(1, dp_shard)
    worlds = ", ".join(str(n) for n in range(shard, steps + 1, shard) if steps % n == 0)
    of_shard = f" and are multiples of dp_shard={shard}" if shard > 1 else ""
    return (
        f"numbers of ranks for the same experiment: {worlds or 'none'}; they divide gradient_accumulation_steps={steps}"
        f"{of_shard}"
    )


def say_ranks(run: Planned, shards: int, ranks: Ranks) -> None:
    world = run.batching.world
    copies = "each with all weights" if shards == 1 else f"{world // shards:,} x {shards:,} that share weights"
    ranks.say(f"{world:,} ranks, {copies}; micro-batches of each rank and step: {run.batching.micro_steps}")

    sent = traffic.sent_in_step(run.config, run.batching, shards, run.reshard_after_forward, run.make_optimizer)
    in_words = [f"{kind} {with_unit(n, BYTES)}" for kind, n in sent.items()]
    ranks.say(f"each rank sends per step: {', '.join(in_words)}")


def say_memory(run: Planned, machine: Machine, ranks: Ranks) -> bool:
    """Says the memory of a step, by part; returns whether it fits. It does where the machine's memory is not known."""
    parts = run.memory(machine)
    total = sum(parts.values())
    of = f" of {hardware.memory_in_words(machine.free_bytes, machine.memory_bytes)}" if machine.free_bytes else " GiB"
    ranks.say(f"predicted peak memory of {machine.name}, {machine.dtype}: {total / 2**30:.2f}{of}")
    ranks.say("  " + ", ".join(f"{part} {size / 2**30:.2f}" for part, size in parts.items()) + " GiB")
    if not steps_on_fakes(run.config, run.make_optimizer):
        ranks.say("  optimizer: that of AdamW, because this optimizer's step cannot be rehearsed without real numbers")
    largest = largest_micro_batch(run, machine)
    if largest is not None:
        flags = f"--batch_size={largest} --gradient_accumulation_steps={run.batching.sequences // max(1, largest)}"
        ranks.say(
            f"  largest micro-batch predicted to fit, at the same tokens per step: {flags if largest else 'none'}"
        )
    limit = machine.usable_bytes() or machine.free_bytes
    return limit is None or total <= limit


def say_time(run: Planned, machine: Machine, fits: bool, ranks: Ranks) -> None:
    if not fits:
        ranks.say("time: n/a, because this micro-batch does not fit")
        return
    if machine.peak is None:
        ranks.say(f"time: n/a, because no peak of {machine.name} in {machine.dtype} is known")
        return
    peak, source = machine.peak
    speed = Speed.expected(run, machine, peak)
    if speed.known:
        ranks.say(f"a known run of these sizes on {machine.name} took {speed.known}")
    again = "" if run.activation_checkpoint == "none" else ", with activations computed again"
    sending = ", and without what ranks send each other" if run.batching.world > 1 else ""
    ranks.say(
        f"at {speed.mfu:.1%} ({speed.basis}) of {run.batching.world} x {peak / 1e12:.2f} TFLOP/s ({source}){again}: "
        f"{brief(speed.step_s)} per step, {clock(speed.step_s * run.max_iters)} for {run.max_iters:,} steps of "
        f"{run.batching.tokens_per_step * run.max_iters:.3g} tokens, without evaluation{sending}"
    )


# ---- what fits -----------------------------------------------------------------------------------------------


def largest_micro_batch(run: Planned, machine: Machine) -> int | None:
    """The largest micro-batch predicted to fit that keeps the tokens of a step; 0 if none fits, None if not known."""
    usable = machine.usable_bytes()
    if usable is None:
        return None
    batch_sizes = micro_batches(run)
    n_fitting = bisect.bisect_right(batch_sizes, usable, key=functools.partial(peak_bytes, run, machine))
    return batch_sizes[n_fitting - 1] if n_fitting else 0


def micro_batches(run: Planned) -> list[int]:
    """The sizes of micro-batches that keep the tokens of a step."""
    sequences = run.batching.sequences // run.batching.world
    largest = min(sequences, max(1, LARGEST_PLANNED // run.config.block_size))
    return [n for n in range(1, largest + 1) if sequences % n == 0]


def peak_bytes(run: Planned, machine: Machine, batch_size: int) -> int:
    return sum(replace(run, batching=run.batching.with_batch_size(batch_size)).memory(machine).values())


# ---- time ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speed:
    """How fast a run is expected to be."""

    mfu: float  # without activation checkpoints
    basis: str  # where mfu comes from
    step_s: float
    known: str  # what a known run of these sizes took

    @classmethod
    def expected(cls, run: Planned, machine: Machine, peak: float) -> Speed:
        """On the ranks of the run, each on such a machine of `peak` FLOP/s."""
        flops_per_token = run.flops_per_step / run.batching.tokens_per_step
        mfu, basis = known_runs.expected_mfu(machine.card, flops_per_token, machine.dtype)
        computing_s = run.flops_per_step / (mfu * peak * run.batching.world)
        step_s = computing_s * TIME_WITH_CHECKPOINTS[run.activation_checkpoint]
        near = known_runs.known_run(machine.card, flops_per_token, machine.dtype)
        known = f"{near.took()} ({near.source})" if near and near.is_of(flops_per_token) else ""
        return cls(mfu, basis, step_s, known)


def brief(step_s: float) -> str:
    """Seconds with three digits: steps of small models take milliseconds."""
    return f"{step_s:.3g}s" if step_s < 60 else clock(step_s)


# ---- all cards -----------------------------------------------------------------------------------------------

HEAD = ("card", "GB", "dtype", "micro-batch", "step", "run", "mfu", "known run")
ALIGNED = "<>>>>><<"  # to the left, to the right


def say_cards(run: Planned, ranks: Ranks) -> None:
    """Says which cards the run fits into and how long it takes there."""
    with not_silent("still rehearsing micro-batches", ranks.say):
        lines = [HEAD, *(cells(run, machine) for machine in machines(run.dtype))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    ranks.say("")
    for line in lines:
        aligned = [f"{cell:{a}{width}}" for cell, a, width in zip(line, ALIGNED, widths, strict=True)]
        ranks.say("  ".join(aligned).rstrip())
    ranks.say("")
    ranks.say(f"micro-batch: the largest predicted to fit into {USABLE:.0%} of the memory, at the same tokens per step")
    ranks.say(f"run: {run.max_iters:,} steps on {run.batching.world} of these cards, without evaluation")
    ranks.say(
        f"mfu: share of the published peak; {known_runs.ASSUMED_MFU:.0%} is assumed where nothing is known. The cards "
        "are in the order of their peaks, because times from a known share and from an assumed one do not compare"
    )


def machines(dtype: str) -> list[Machine]:
    """Each card with each size of its memory, by its peak, the highest first.

    Apple's chips are left out: no figures in 16 bits are published for them, and memory is predicted for CUDA.
    """
    found = []
    for card in gpu_peaks.table():
        if card.maker != "Apple":
            sizes = [replace(card, memory_gb=(gb,)) for gb in card.memory_gb] or [card]
            found += [Machine.of_card(of_one_size, dtype) for of_one_size in sizes]
    return sorted(found, key=lambda machine: machine.peak[0] if machine.peak else 0.0, reverse=True)


def cells(run: Planned, machine: Machine) -> tuple[str, ...]:
    """What the table says of this run on such a card."""
    gb = "n/a" if machine.memory_bytes is None else f"{machine.memory_bytes / 2**30:.0f}"
    fits = largest_micro_batch(run, machine)
    about = (machine.name, gb, machine.dtype, "n/a" if fits is None else str(fits or "none"))
    if fits == 0 or machine.peak is None:
        return *about, "n/a", "n/a", "n/a", ""
    speed = Speed.expected(run, machine, machine.peak[0])
    whole = clock(speed.step_s * run.max_iters)
    return *about, brief(speed.step_s), whole, f"{speed.mfu:.0%} {speed.basis}", speed.known
