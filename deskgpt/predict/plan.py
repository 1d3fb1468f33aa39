"""What a run needs, said before it starts: its size, memory by part, time. On this machine, or on a card elsewhere.

    python train.py config/train_fineweb_125m.py --dry_run=True
    python train.py config/train_fineweb_125m.py --plan_for="RTX 4070"
    python train.py config/train_fineweb_125m.py --plan_for=all
    python train.py config/train_fineweb_125m.py --plan_for=H100 --world=1024 --dp_shard=64

Memory is rehearsed (estimate.py), peaks and sizes of cards are published ones (gpu_peaks.py), and the share of the peak
that a run reaches is known or assumed (known_runs.py). So a plan for a card needs no GPU, and measures nothing here.
Nor does one for many ranks need them: what they send each other is rehearsed too (traffic.py).
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from deskgpt.compute import sharding
from deskgpt.compute.ranks import Ranks
from deskgpt.faster import kernels
from deskgpt.machine import gpu_peaks, hardware, peak_flops
from deskgpt.machine.gpu_peaks import Card
from deskgpt.predict import known_runs, traffic
from deskgpt.predict import memory as estimate
from deskgpt.predict.known_runs import KnownRun
from deskgpt.run.log import clock, not_silent
from model import BYTES, GPT, GPTConfig, with_unit

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from train import TrainConfig

LONGEST_REHEARSED = 1 << 22  # tokens of context
LARGEST_PLANNED = 1 << 17  # tokens of a micro-batch: 128 x 1024, as in config/gpu_80gb.py


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
        """dtype: as in TrainConfig. Measures the device's peak."""
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
        """What a run may take of the memory of a GPU; None if it is not known, and of a CPU's or an Apple chip's."""
        if self.free_bytes is None or self.device_type != "cuda":
            return None
        return estimate.USABLE * self.free_bytes

    def loss_logits(self) -> int:
        """Of a chunk of the loss, if this is a CUDA card."""
        return kernels.logits_for_memory(self.memory_bytes or 0)


# ---- the report ----------------------------------------------------------------------------------------------


def dry_run(c: TrainConfig, config: GPTConfig, ranks: Ranks) -> None:
    """Says what a run of c with this model needs. Raises ValueError for a context too long to rehearse."""
    if config.block_size > LONGEST_REHEARSED:
        raise ValueError(
            f"block_size={config.block_size} is too long to rehearse; try --block_size={LONGEST_REHEARSED} or less"
        )
    if c.world:
        ranks = replace(ranks, world=c.world)
        c = shared(c, ranks)
    shards = sharding.shards_of(c.dp_shard, ranks.world)
    say_size(c, config, ranks)
    if ranks.world > 1:
        say_ranks(c, shards, ranks)
    with traffic.fake_ranks(ranks.world) if shards > 1 else nullcontext():
        mesh = sharding.make_mesh("cpu", shards, ranks.world) if shards > 1 else None
        if c.plan_for == "all":
            say_cards(c, config, ranks, mesh)
            return
        card = gpu_peaks.find_card(c.plan_for) if c.plan_for else None
        machine = Machine.of_card(card, c.dtype) if card else Machine.at_hand(ranks.device, c.dtype)
        say_memory(c, config, machine, ranks, mesh)
        say_time(c, config, machine, ranks)
        if ranks.world > 1:
            say_traffic(c, config, machine, ranks, mesh)
    if machine.device_type != "cuda" and not card:
        ranks.say('on a card that you do not have here: --plan_for="RTX 4070", or --plan_for=all for a table')


def shared(c: TrainConfig, ranks: Ranks) -> TrainConfig:
    """c, with as many micro-batches as all ranks can share. Raises ValueError where these are too many."""
    steps = c.gradient_accumulation_steps
    if steps % ranks.world == 0:
        return c
    nearest = (steps // ranks.world + 1) * ranks.world
    ranks.say(
        f"gradient_accumulation_steps={steps} does not divide among {ranks.world:,} ranks; this is the plan of "
        f"--gradient_accumulation_steps={nearest}"
    )
    return replace(c, gradient_accumulation_steps=nearest)


def tokens_per_step(c: TrainConfig, config: GPTConfig) -> int:
    return c.batch_size * c.gradient_accumulation_steps * config.block_size


def say_size(c: TrainConfig, config: GPTConfig, ranks: Ranks) -> None:
    with torch.device("meta"):  # the model without storage for its parameters
        model = GPT(config)
    positions = sum(p.numel() for p in model.parameters()) - model.num_params()
    ranks.say(
        f"number of parameters: {model.num_params() / 1e6:.2f}M, and {positions / 1e6:.2f}M of position embeddings; "
        f"vocabulary of {config.vocab_size:,}"
    )
    tokens = tokens_per_step(c, config)
    ranks.say(f"tokens per step: {tokens:,} = {c.batch_size} x {c.gradient_accumulation_steps} x {config.block_size}")
    ranks.say(worlds_in_words(c))
    ranks.say(f"FLOPs per step, forward and backward: {model.estimate_flops() * tokens:.3e}")


def worlds_in_words(c: TrainConfig) -> str:
    """On how many ranks the same experiment can run: those that share the micro-batches of a step evenly."""
    steps = c.gradient_accumulation_steps
    shard = max(1, c.dp_shard)
    worlds = ", ".join(str(n) for n in range(shard, steps + 1, shard) if steps % n == 0)
    of_shard = f" and are multiples of dp_shard={shard}" if shard > 1 else ""
    return (
        f"numbers of ranks for the same experiment: {worlds or 'none'}; they divide gradient_accumulation_steps={steps}"
        f"{of_shard}"
    )


def say_memory(
    c: TrainConfig, config: GPTConfig, machine: Machine, ranks: Ranks, mesh: DeviceMesh | None = None
) -> None:
    accumulates = c.gradient_accumulation_steps > ranks.world
    # Only a run shows which attention is faster on a CPU. Explicit attention takes more memory.
    explicit = kernels.may_be_explicit(machine.device_type, config.block_size, config.dropout)
    parts = estimate.memory(
        config,
        c.batch_size,
        machine.dtype,
        machine.device_type,
        c.compile is not False,
        accumulates,
        explicit,
        machine.loss_logits(),
        activation_checkpoint=c.activation_checkpoint,
        shard=sharder(c, mesh),
    ) | buckets(config, ranks.world, mesh)
    total = sum(parts.values())
    of = f" of {hardware.memory_in_words(machine.free_bytes, machine.memory_bytes)}" if machine.free_bytes else " GiB"
    ranks.say(f"predicted peak memory of {machine.name}, {machine.dtype}: {total / 2**30:.2f}{of}")
    ranks.say("  " + ", ".join(f"{part} {size / 2**30:.2f}" for part, size in parts.items()) + " GiB")
    fits = Fitting(c, config, ranks.world, mesh).largest(machine)
    if fits is not None:
        said = "none"
        if fits:
            accumulation = c.batch_size * c.gradient_accumulation_steps // fits
            said = f"--batch_size={fits} --gradient_accumulation_steps={accumulation}"
        ranks.say(f"  largest micro-batch predicted to fit, at the same tokens per step: {said}")


def say_time(c: TrainConfig, config: GPTConfig, machine: Machine, ranks: Ranks) -> None:
    if machine.peak is None:
        ranks.say(f"time: n/a, because no peak of {machine.name} in {machine.dtype} is known")
        return
    peak, source = machine.peak
    speed = Speed.expected(c, config, machine, peak, ranks.world)
    if speed.known:
        ranks.say(f"a known run of these sizes on {speed.known.card} took {speed.known.took()} ({speed.known.source})")
    ranks.say(
        f"at {speed.mfu:.1%} ({speed.basis}) of {ranks.world} x {peak / 1e12:.2f} TFLOP/s ({source}): "
        f"{brief(speed.step_s)} per step, {clock(speed.step_s * c.max_iters)} for {c.max_iters:,} steps of "
        f"{tokens_per_step(c, config) * c.max_iters:.3g} tokens, without evaluation"
    )


# ---- several ranks -------------------------------------------------------------------------------------------

GPUS = 8  # of a host


@dataclass(frozen=True)
class Network:
    """What connects hosts of 8 GPUs; published line rates, in bytes per second and direction."""

    name: str
    within: float  # between GPUs of a host, each
    across: float  # between hosts, of all of a host's ports


NETWORKS = [
    # NVIDIA's data sheets of H100 (NVLink: 900 GB/s in both directions) and DGX H100 (a port of 400 Gb/s for each GPU)
    Network("NVLink 4, and 8 x 400 Gb/s InfiniBand among hosts", 450e9, 8 * 50e9),
    Network("NVLink 4, and 400 Gb/s InfiniBand among hosts", 450e9, 50e9),
    # PCI-SIG: 16 GT/s in each of 16 lanes, 128 of 130 bits
    Network("PCIe 4.0 x16, and 100 Gb/s Ethernet among hosts", 31.5e9, 12.5e9),
]


def sharder(c: TrainConfig, mesh: DeviceMesh | None) -> Callable[[GPT], None] | None:
    """What shards a model as in a run of c; None under DDP."""
    return None if mesh is None else lambda model: sharding.shard(model, mesh, c.reshard_after_forward)


def buckets(config: GPTConfig, world: int, mesh: DeviceMesh | None) -> dict[str, int]:
    """A further part of the memory: DDP's copy of the gradients, which it sends."""
    return {} if world == 1 or mesh else {"buckets": 4 * config.count_parameters(config.vocab_size)}


def say_ranks(c: TrainConfig, shards: int, ranks: Ranks) -> None:
    copies = "each with all weights" if shards == 1 else f"{ranks.world // shards:,} x {shards:,} that share weights"
    micro_steps = c.gradient_accumulation_steps // ranks.world
    ranks.say(f"{ranks.world:,} ranks, {copies}; micro-batches of each rank and step: {micro_steps}")


def say_traffic(c: TrainConfig, config: GPTConfig, machine: Machine, ranks: Ranks, mesh: DeviceMesh | None) -> None:
    """Says what each rank sends in a step, and how long that takes on NETWORKS."""
    sent = traffic.of_step(c, config, mesh, ranks.world)
    of_kind = {kind: sum(n for group, n in sent.items() if group.kind == kind) for kind in traffic.KINDS}
    in_words = [f"{kind} {with_unit(n, BYTES)}" for kind, n in of_kind.items() if n]
    ranks.say(f"each rank sends per step: {', '.join(in_words)}")
    if machine.peak is None:
        return
    speed = Speed.expected(c, config, machine, machine.peak[0], ranks.world)
    ranks.say(
        f"on hosts of {GPUS}, at line rates: communication, and the step from all of it overlapping with computing to "
        "none (no run has shown yet how much does)"
    )
    for network in NETWORKS:
        sending_s = sending_time(sent, network)
        least_s = max(speed.step_s, sending_s)
        most_s = speed.step_s + sending_s
        mfu = f"mfu {speed.mfu * speed.step_s / least_s:.1%} to {speed.mfu * speed.step_s / most_s:.1%}"
        ranks.say(f"  {network.name}: {brief(sending_s)}, step {brief(least_s)} to {brief(most_s)}, {mfu}")


def sending_time(sent: dict[traffic.Group, float], network: Network) -> float:
    """Seconds for what each rank sends, as in rings that leave a host once; latencies are not counted.

    Groups of neighbours have one ring in a host. Those that hold the same rows have one for each rank of it.
    """
    seconds = 0.0
    for group, n in sent.items():
        within_s = n / network.within
        if (group.ranks - 1) * group.stride < GPUS:
            seconds += within_s
        else:
            leaving = GPUS if group.kind == "all-to-all" else min(group.stride, GPUS)
            seconds += max(within_s, leaving * n / network.across)
    return seconds


# ---- what fits -----------------------------------------------------------------------------------------------


class Fitting:
    """The micro-batches that keep the tokens of c's step, and the bytes that they take on CUDA.

    Bytes are rehearsed where they are asked for, once each, however many cards there are.
    """

    def __init__(self, c: TrainConfig, config: GPTConfig, world: int, mesh: DeviceMesh | None = None) -> None:
        sequences = c.batch_size * c.gradient_accumulation_steps // world
        largest = min(sequences, max(1, LARGEST_PLANNED // config.block_size))
        self.batch_sizes = [n for n in range(1, largest + 1) if sequences % n == 0]

        @functools.cache
        def peak_bytes(batch_size: int, dtype: str, loss_logits: int) -> int:
            compiled = c.compile is not False
            accumulates = batch_size < sequences
            options: dict[str, Any] = {"loss_logits": loss_logits, "activation_checkpoint": c.activation_checkpoint}
            options["shard"] = sharder(c, mesh)
            parts = estimate.memory(config, batch_size, dtype, "cuda", compiled, accumulates, **options)
            return sum(parts.values()) + sum(buckets(config, world, mesh).values())

        self.peak_bytes = peak_bytes

    def largest(self, machine: Machine) -> int | None:
        """The largest micro-batch predicted to fit; 0 where none does, None where the memory is not known."""
        usable = machine.usable_bytes()
        if usable is None:
            return None

        def peak_bytes(batch_size: int) -> int:
            return self.peak_bytes(batch_size, machine.dtype, machine.loss_logits())

        n_fitting = bisect.bisect_right(self.batch_sizes, usable, key=peak_bytes)
        return self.batch_sizes[n_fitting - 1] if n_fitting else 0


# ---- time ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speed:
    """How fast a run is expected to be."""

    mfu: float
    basis: str  # where mfu comes from
    step_s: float
    known: KnownRun | None  # of the same model

    @classmethod
    def expected(cls, c: TrainConfig, config: GPTConfig, machine: Machine, peak: float, world: int) -> Speed:
        """On `world` of these machines, each of `peak` FLOP/s."""
        mfu, basis = known_runs.expected_mfu(machine.card, config, machine.dtype)
        flops = known_runs.flops_per_token(config) * tokens_per_step(c, config)
        run = known_runs.known_run(machine.card, config, machine.dtype)
        known = run if run and run.is_of(config) else None
        return cls(mfu, basis, flops / (mfu * peak * world), known)


def brief(step_s: float) -> str:
    """Seconds with three digits: steps of small models take milliseconds."""
    return f"{step_s:.3g}s" if step_s < 60 else clock(step_s)


# ---- all cards -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What the table says of a card with one size of memory; None is not known."""

    machine: Machine
    fits: int | None  # the largest micro-batch predicted to fit, 0 if none does
    speed: Speed | None  # None where nothing fits, too

    def step_s(self) -> float:
        return self.speed.step_s if self.speed else math.inf

    def cells(self, steps: int) -> tuple[str, ...]:
        memory = self.machine.memory_bytes
        gb = "n/a" if memory is None else f"{memory / 2**30:.0f}"
        fits = "n/a" if self.fits is None else str(self.fits or "none")
        card = (self.machine.name, gb, self.machine.dtype, fits)
        speed = self.speed
        if speed is None:
            return *card, "n/a", "n/a", "n/a", ""
        known = speed.known.took() if speed.known else ""
        return *card, brief(speed.step_s), clock(speed.step_s * steps), f"{speed.mfu:.0%} {speed.basis}", known


HEAD = ("card", "GB", "dtype", "micro-batch", "step", "run", "mfu", "known run")
ALIGNED = "<>>>>><<"  # to the left, to the right


def say_cards(c: TrainConfig, config: GPTConfig, ranks: Ranks, mesh: DeviceMesh | None) -> None:
    """Says which cards the run fits into and how long it takes there, the fastest first."""
    with not_silent("still rehearsing micro-batches", ranks.say):
        rows = sorted(rows_of_cards(c, config, ranks.world, mesh), key=Row.step_s)
    lines = [HEAD, *(row.cells(c.max_iters) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    ranks.say("")
    for line in lines:
        cells = [f"{cell:{a}{width}}" for cell, a, width in zip(line, ALIGNED, widths, strict=True)]
        ranks.say("  ".join(cells).rstrip())
    ranks.say("")
    ranks.say(
        f"micro-batch: the largest predicted to fit into {estimate.USABLE:.0%} of the memory, at the same tokens per "
        "step"
    )
    ranks.say(f"run: {c.max_iters:,} steps on {ranks.world} of these cards, without evaluation")
    ranks.say(
        f"mfu: share of the published peak; {known_runs.ASSUMED_MFU:.0%} is assumed where nothing is known, so do not "
        "rank such a card against one with a known run"
    )


def rows_of_cards(c: TrainConfig, config: GPTConfig, world: int, mesh: DeviceMesh | None) -> list[Row]:
    """A row for each card and each size of its memory.

    Apple's chips are left out: no figures in 16 bits are published for them, and memory is predicted for CUDA.
    """
    machines = []
    for card in gpu_peaks.table():
        if card.maker != "Apple":
            sizes = [replace(card, memory_gb=(gb,)) for gb in card.memory_gb] or [card]
            machines += [Machine.of_card(of_one_size, c.dtype) for of_one_size in sizes]
    fitting = Fitting(c, config, world, mesh)
    rows = []
    for machine in machines:
        fits = fitting.largest(machine)
        speed = None
        if machine.peak and fits != 0:
            speed = Speed.expected(c, config, machine, machine.peak[0], world)
        rows.append(Row(machine, fits, speed))
    return rows
