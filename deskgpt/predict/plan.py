"""What a run needs, said before it starts: its size, memory by part, time. On this machine, or on a card elsewhere.

    python train.py config/train_fineweb_125m.py --dry_run=True
    python train.py config/train_fineweb_125m.py --plan_for="RTX 4070"
    python train.py config/train_fineweb_125m.py --plan_for=all
    python train.py config/train_fineweb_125m.py --plan_for=H100 --world=1024 --dp_shard=64

Memory is rehearsed (memory.py), peaks and sizes of cards are published ones (gpu_peaks.py), and the share of the peak
that a run reaches is known or assumed (known_runs.py). So a plan for a card needs no GPU, and measures nothing here.
Nor does one for many ranks need them: what they send each other is rehearsed too (traffic.py).
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
from deskgpt.machine import gpu_peaks, hardware, peak_flops
from deskgpt.machine.gpu_peaks import Card
from deskgpt.machine.terminal import not_silent
from deskgpt.machine.words import BYTES, clock, with_unit
from deskgpt.predict import known_runs, traffic
from deskgpt.predict.fit import USABLE
from deskgpt.predict.known_runs import KnownRun
from deskgpt.predict.memory import MakeOptimizer, Step, memory
from model import GPT, GPTConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

LONGEST_REHEARSED = 1 << 22  # tokens of context
NARROW = 16  # channels of a head, and tokens of the vocabulary, of the model that kernels are compared on
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
        """What a run may take of the memory of a GPU; None if it is not known, and of a CPU's or an Apple chip's."""
        if self.free_bytes is None or self.device_type != "cuda":
            return None
        return USABLE * self.free_bytes

    def loss_logits(self) -> int:
        """Of a chunk of the loss, if this is a CUDA card."""
        return kernels.logits_for_memory(self.memory_bytes or 0)


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

    def tokens(self) -> int:
        """Per step."""
        return self.batching.tokens_per_step

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
            loss_logits=machine.loss_logits(),
            make_optimizer=self.make_optimizer,
            shard=None if self.mesh is None else self.shard,
        )

    def shard(self, model: GPT) -> None:
        assert self.mesh is not None
        sharding.shard(model, self.mesh, self.reshard_after_forward)


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
    """As many micro-batches per step as so many ranks can share, `steps` or the next larger number, which it says."""
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
    with traffic.fake_ranks(world) if shards > 1 else nullcontext():
        if shards > 1:
            run = replace(run, mesh=sharding.make_mesh("cpu", shards, world))
        if plan_for == "all":
            say_cards(run, ranks)
            return
        card = gpu_peaks.find_card(plan_for) if plan_for else None
        machine = Machine.of_card(card, run.dtype) if card else Machine.at_hand(ranks.device, run.dtype)
        say_memory(run, machine, ranks)
        say_time(run, machine, ranks)
        if world > 1:
            say_traffic(run, machine, ranks)
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
    ranks.say(f"tokens per step: {run.tokens():,} = {split.batch_size} x {split.accumulation} x {split.block_size}")
    ranks.say(worlds_in_words(split.accumulation, run.dp_shard))
    ranks.say(f"FLOPs per step, forward and backward: {model.estimate_flops() * run.tokens():.3e}")


def worlds_in_words(steps: int, dp_shard: int) -> str:
    """On how many ranks the same experiment can run: those that share the micro-batches of a step evenly."""
    shard = max(1, dp_shard)
    worlds = ", ".join(str(n) for n in range(shard, steps + 1, shard) if steps % n == 0)
    of_shard = f" and are multiples of dp_shard={shard}" if shard > 1 else ""
    return (
        f"numbers of ranks for the same experiment: {worlds or 'none'}; they divide gradient_accumulation_steps={steps}"
        f"{of_shard}"
    )


def say_memory(run: Planned, machine: Machine, ranks: Ranks) -> None:
    parts = memory(run.step(machine)) | buckets(run)
    total = sum(parts.values())
    of = f" of {hardware.memory_in_words(machine.free_bytes, machine.memory_bytes)}" if machine.free_bytes else " GiB"
    ranks.say(f"predicted peak memory of {machine.name}, {machine.dtype}: {total / 2**30:.2f}{of}")
    ranks.say("  " + ", ".join(f"{part} {size / 2**30:.2f}" for part, size in parts.items()) + " GiB")
    fits = Fitting(run).largest(machine)
    if fits is not None:
        said = "none"
        if fits:
            accumulation = run.batching.sequences // fits
            said = f"--batch_size={fits} --gradient_accumulation_steps={accumulation}"
        ranks.say(f"  largest micro-batch predicted to fit, at the same tokens per step: {said}")


def say_time(run: Planned, machine: Machine, ranks: Ranks) -> None:
    if machine.peak is None:
        ranks.say(f"time: n/a, because no peak of {machine.name} in {machine.dtype} is known")
        return
    peak, source = machine.peak
    speed = Speed.expected(run, machine, peak)
    if speed.known:
        ranks.say(f"a known run of these sizes on {speed.known.card} took {speed.known.took()} ({speed.known.source})")
    ranks.say(
        f"at {speed.mfu:.1%} ({speed.basis}) of {run.batching.world} x {peak / 1e12:.2f} TFLOP/s ({source}): "
        f"{brief(speed.step_s)} per step, {clock(speed.step_s * run.max_iters)} for {run.max_iters:,} steps of "
        f"{run.tokens() * run.max_iters:.3g} tokens, without evaluation"
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


def buckets(run: Planned) -> dict[str, int]:
    """A further part of the memory: DDP's copy of the gradients, which it sends."""
    if run.batching.world == 1 or run.mesh:
        return {}
    return {"buckets": sum(p.nbytes for p in GPT.without_storage(run.config).parameters())}


def say_ranks(run: Planned, shards: int, ranks: Ranks) -> None:
    world = run.batching.world
    copies = "each with all weights" if shards == 1 else f"{world // shards:,} x {shards:,} that share weights"
    ranks.say(f"{world:,} ranks, {copies}; micro-batches of each rank and step: {run.batching.micro_steps}")


def say_traffic(run: Planned, machine: Machine, ranks: Ranks) -> None:
    """Says what each rank sends in a step, and how long that takes on NETWORKS."""
    sent = traffic.of_step(run.step(machine), run.batching.micro_steps, run.batching.world)
    of_kind = {kind: sum(n for group, n in sent.items() if group.kind == kind) for kind in traffic.KINDS}
    in_words = [f"{kind} {with_unit(n, BYTES)}" for kind, n in of_kind.items() if n]
    ranks.say(f"each rank sends per step: {', '.join(in_words)}")
    if machine.peak is None:
        return
    speed = Speed.expected(run, machine, machine.peak[0])
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
    """The micro-batches that keep the tokens of a run's step, and the bytes that they take on CUDA.

    Bytes are rehearsed where they are asked for, once each, however many cards there are.
    """

    def __init__(self, run: Planned) -> None:
        sequences = run.batching.sequences // run.batching.world
        largest = min(sequences, max(1, LARGEST_PLANNED // run.config.block_size))
        self.run = run
        self.sequences = sequences
        self.batch_sizes = [n for n in range(1, largest + 1) if sequences % n == 0]
        self.peak_bytes = functools.cache(self._peak_bytes)

    def _peak_bytes(self, batch_size: int, dtype: str, loss_logits: int) -> int:
        run = self.run
        form = Form(dtype, run.compiled, checkpoint=run.activation_checkpoint, as_written=run.as_written)
        step = Step(self.run.config, batch_size, form, "cuda", batch_size < self.sequences, loss_logits)
        shard = None if self.run.mesh is None else self.run.shard
        parts = memory(replace(step, make_optimizer=self.run.make_optimizer, shard=shard))
        return sum(parts.values()) + sum(buckets(self.run).values())

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
    def expected(cls, run: Planned, machine: Machine, peak: float) -> Speed:
        """On the ranks of the run, each on such a machine of `peak` FLOP/s."""
        mfu, basis = known_runs.expected_mfu(machine.card, run.config, machine.dtype)
        flops = known_runs.flops_per_token(run.config) * run.tokens()
        like = known_runs.known_run(machine.card, run.config, machine.dtype)
        known = like if like and like.is_of(run.config) else None
        return cls(mfu, basis, flops / (mfu * peak * run.batching.world), known)


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


def say_cards(run: Planned, ranks: Ranks) -> None:
    """Says which cards the run fits into and how long it takes there, the fastest first."""
    with not_silent("still rehearsing micro-batches", ranks.say):
        rows = sorted(rows_of_cards(run), key=Row.step_s)
    lines = [HEAD, *(row.cells(run.max_iters) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    ranks.say("")
    for line in lines:
        cells = [f"{cell:{a}{width}}" for cell, a, width in zip(line, ALIGNED, widths, strict=True)]
        ranks.say("  ".join(cells).rstrip())
    ranks.say("")
    ranks.say(f"micro-batch: the largest predicted to fit into {USABLE:.0%} of the memory, at the same tokens per step")
    ranks.say(f"run: {run.max_iters:,} steps on {run.batching.world} of these cards, without evaluation")
    ranks.say(
        f"mfu: share of the published peak; {known_runs.ASSUMED_MFU:.0%} is assumed where nothing is known, so do not "
        "rank such a card against one with a known run"
    )


def rows_of_cards(run: Planned) -> list[Row]:
    """A row for each card and each size of its memory.

    Apple's chips are left out: no figures in 16 bits are published for them, and memory is predicted for CUDA.
    """
    machines = []
    for card in gpu_peaks.table():
        if card.maker != "Apple":
            sizes = [replace(card, memory_gb=(gb,)) for gb in card.memory_gb] or [card]
            machines += [Machine.of_card(of_one_size, run.dtype) for of_one_size in sizes]
    fitting = Fitting(run)
    rows = []
    for machine in machines:
        fits = fitting.largest(machine)
        speed = None
        if machine.peak and fits != 0:
            speed = Speed.expected(run, machine, machine.peak[0])
        rows.append(Row(machine, fits, speed))
    return rows
