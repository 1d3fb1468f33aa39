"""Predict the memory of a training step from the model's sizes, what fits, and how long a run
takes. Nothing runs.

    python train.py config/train_fineweb_125m.py --dry_run=True
    python train.py config/train_fineweb_125m.py --plan_for="RTX 4070"
    python train.py config/train_fineweb_125m.py --plan_for="1024x H100" --dp_shard=64

The weights are model.py's, whatever it has, and the optimizer's states are AdamW's. The activations
are counted for the layers of model.py as it comes: a changed block keeps others. Checked against
steps on a CPU: within 12%, most within 10% (tests/test_memory.py). For cards, only against counts
of what compiled steps allocate (bench/results/2026-11-28-check-cards.md): no card has run this
code.
Not counted: workspaces of cuBLAS and of attention's backward pass, the CUDA context and the
allocator's gaps. Leave a tenth free.

The time is a range, from the device's peak (peaks.py) and the share of it that known runs reached.
"""

import math
import shlex
import sys
from dataclasses import dataclass, replace
from typing import Protocol

import psutil
import torch

from data.batches import BatchSplit
from deskgpt import device as machine
from deskgpt import kernels, peaks
from deskgpt.compiling import ComputeSettings, default_dtype
from deskgpt.compute import ComputeMode
from deskgpt.device import memory_in_words
from deskgpt.distributed import DistContext, shards_of
from deskgpt.errors import BatchTooLargeError, clock, in_gib, millions
from model import GPT, GPTConfig

# On a card, the fewest that fit. For a GPT-2 of 124M each further one reads and writes 0.69 GB: the
# head's gradient is cast and added. Eight cost as much as another micro-batch does beside its
# tokens.
LOSS_CHUNKS = (1, 2, 4, 8)


@dataclass(frozen=True)
class StepShape:
    """A training step of one rank, as far as its memory depends on it."""

    config: GPTConfig
    batch_size: int  # sequences per micro-batch
    compute: ComputeMode
    device_type: str
    shards: int = 1  # ranks that share one copy of weights, gradients and optimizer states
    ddp: bool = False  # each of several ranks has a copy of its own

    @property
    def tokens(self) -> int:
        return self.batch_size * self.config.block_size

    @property
    def matmul_bytes(self) -> int:
        """Return the bytes of a number in the matmuls' dtype."""
        return 4 if self.compute.dtype == "float32" else 2

    @property
    def residual_bytes(self) -> int:
        """Return the bytes of a number of the residual stream."""
        return 4 if self.compute.residual_dtype == "float32" else 2

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes that are alive in the step, as predicted."""
        return sum(step_memory(self).values())


def step_memory(step: StepShape) -> dict[str, int]:
    """Return the bytes alive at the peak of a step, by part; their sum is the peak.

    activations: the forward pass keeps them for the backward pass. logits: the loss adds them; if
    the backward pass adds more for the block that it computes again, it is that.
    gradients count in full, although a step of one micro-batch has all of them only when most
    activations are gone. Of a model that several ranks share, gathered are the full weights that a
    rank holds at one time. buckets are DDP's copies of the gradients, to send.
    """
    model = GPT.without_storage(step.config)
    weights = sum(p.nbytes for p in model.parameters())
    blocks = sum(p.nbytes for p in model.transformer.h.parameters())
    width = step.tokens * step.config.n_embd
    kept = kept_by_block(step, step.compute.recompute)
    activations = step.config.n_layer * kept + 2 * width * step.residual_bytes
    if step.matmul_bytes == 2 and step.compute.recompute == "none" and step.shards == 1:
        activations += blocks // 2  # autocast's copies of the matrices
    computed_again = kept_by_block(step, "none") - kept + 2 * width * step.matmul_bytes
    parts = {
        "weights": weights,
        "gradients": weights,
        "optimizer": 2 * weights,  # AdamW's moments; Muon has one of a matrix
        "activations": activations,
        "logits": max(loss_bytes(step), computed_again),
    }
    if step.shards == 1:
        return parts | {"buckets": weights} if step.ddp else parts
    for name in ("weights", "gradients", "optimizer"):
        parts[name] //= step.shards
    # FSDP gathers embedding and head in float32, and two blocks at a time in the dtype of the run.
    two_blocks = min(2, step.config.n_layer) * blocks // step.config.n_layer
    return parts | {"gathered": weights - blocks + two_blocks * step.matmul_bytes // 4}


def with_fewest_chunks(step: StepShape, limit_bytes: float) -> StepShape:
    """Return the step with the fewest of LOSS_CHUNKS that are predicted to fit, or with the most;
    on a CPU as it is.
    """
    if step.device_type != "cuda":
        return step
    for chunks in LOSS_CHUNKS:
        step = replace(step, compute=replace(step.compute, loss_chunks=chunks))
        if step.peak_bytes <= limit_bytes:
            break
    return step


def kept_by_block(step: StepShape, recompute: str) -> int:
    """Return the bytes that one block keeps of a micro-batch for its backward pass."""
    config = step.config
    C = config.n_embd
    H = config.n_head
    m = step.matmul_bytes
    r = step.residual_bytes
    if recompute == "full":
        return step.tokens * r * C  # the block's input
    of_channel = 2 * r + 2 * m  # inputs and outputs of both norms
    of_channel += 3 * m + m  # q, k, v and what attention returns
    of_channel += 4 * m + 4 * m  # the MLP before and after its activation
    if config.qk_norm or config.position == "rope":
        of_channel += 2 * m  # normalized and rotated q and k
    if config.qk_norm and not step.compute.compiled and not step.compute.cpu_kernels:
        of_channel += 12  # copies of q and k in float32, or of what an RMS norm takes on a CPU
    of_head = 4  # attention's logarithms of sums
    if config.dropout and step.device_type == "cpu":  # without fused kernels
        of_channel += 9  # masks in float32
        of_head += 12 * config.block_size  # attention's weights, their mask and their product
    elif config.dropout:
        of_channel += 2  # masks
    return step.tokens * (of_channel * C + of_head * H)


def loss_bytes(step: StepShape) -> int:
    """Return the bytes that the loss adds: a chunk of logits, their gradient, and gradients of the
    head.
    """
    V, C = step.config.vocab_size, step.config.n_embd
    m = step.matmul_bytes
    if step.tokens * V <= kernels.LOGITS_ON_CPU:
        return step.tokens * V * (m + 8)
    chunk = kernels.tokens_per_chunk(
        step.tokens, V, step.device_type, step.compute.loss_chunks, kernel_bytes=0
    )
    softmax = chunk * V * (m if step.compute.compiled else 4 if m == 4 else 8)
    head = V * C * 4
    in_16_bits = V * C * m if m == 2 else 0
    sum_before = head if chunk < step.tokens else 0  # of the gradients of earlier chunks
    with_logits = chunk * V * m + softmax + sum_before
    with_gradient = chunk * V * m + V * C * m + 2 * sum_before
    scaled = (sum_before or V * C * m) + head
    of_inputs = step.tokens * C * step.residual_bytes
    return max(with_logits, with_gradient, scaled) + in_16_bits + of_inputs


# ---- what fits -----------------------------------------------------------------------------------


MIN_SHARE_OF_PREDICTION = 0.7  # a step surely takes this share of its predicted peak memory
USABLE_SHARE = 0.9  # of a GPU's memory: the rest is gaps and workspaces, which are not counted

# Bytes that a micro-batch moves however few tokens it has, for auto_batch: 3.6 GB for GPT-2's 124M.
# bench/check_cards.py counts 11.8 GB at 8 x 1024 and 20.0 GB at 16 x 1024.
FIXED_BYTES_PER_PARAMETER = 29
# A card computes so many FLOPs while its memory moves a byte: 76 (RTX 3090) to 295 (H100).
FLOPS_PER_BYTE = 200
# The CPU queues the kernels of a layer in this time, for both passes: 19.2 ms for 12 on an H200.
QUEUEING_S_PER_LAYER = 1.6e-3
TARGET_FIXED_SHARE = 0.02  # of a micro-batch's time: twice the tokens would then gain 1%


def check_model_fits(
    config: GPTConfig, device: torch.device, trains: bool = False, shards: int = 1
) -> None:
    """Raise ValueError if the device's memory cannot hold the model, before any of it is taken.

    trains: with gradients, and at least one moment of each weight for the optimizer. shards: how
    many ranks share one copy.
    """
    model = GPT.without_storage(config)
    weights = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    needed = (3 if trains else 1) * weights / shards
    if needed > machine.usable_memory_bytes(device):
        n = sum(p.numel() for p in model.parameters())
        raise ValueError(
            f"n_layer={config.n_layer}, n_embd={config.n_embd}, block_size={config.block_size} "
            f"make a model of {millions(n)} parameters, which needs {in_gib(needed)} GiB in "
            f"float32; {describe_memory(device)}: take a smaller model"
        )


def describe_memory(device: torch.device) -> str:
    """Return a sentence such as "NVIDIA GeForce RTX 4070 has 10.9 GiB free (12.0 in all)"."""
    has = memory_in_words(machine.usable_memory_bytes(device), machine.memory_bytes(device))
    return f"{machine.device_name(device)} has {has}"


def check_batch_fits(
    config: GPTConfig, device: torch.device, shards: int, batching: BatchSplit, compute: ComputeMode
) -> None:
    """Raise ValueError, naming a smaller micro-batch, if a CPU surely lacks the memory to train
    with this one.

    Only on a CPU: there the system ends a process that takes too much. GPUs raise an error. shards:
    as above.
    """
    if device.type != "cpu":
        return
    check_model_fits(config, device, True, shards)  # no micro-batch helps a model that is too large
    step = StepShape(config, batching.batch_size, compute, "cpu", shards=shards)
    if MIN_SHARE_OF_PREDICTION * step.peak_bytes > machine.usable_memory_bytes(device):
        raise batch_too_large(device, batching, may_halve=False)


def batch_too_large(
    device: torch.device, batching: BatchSplit, may_halve: bool
) -> BatchTooLargeError:
    """Return the error of a micro-batch that does not fit. It names the settings that are the same
    training in half the micro-batch, and has them as `smaller` if the run may take them by itself.
    """
    n = batching.batch_size
    if n == 1:
        half = max(1, batching.block_size // 2)
        return BatchTooLargeError(
            f"out of memory: not even batch_size=1 fits; {describe_memory(device)}; "
            f"try --block_size={half} or a smaller model"
        )
    same = batching.with_batch_size(1 if n % 2 else n // 2)
    error = BatchTooLargeError(
        f"out of memory: batch_size={n} does not fit into memory "
        f"({describe_memory(device)}); try {same.flags()}, which is the same training"
    )
    if may_halve:
        error.smaller = same.settings()
    return error


def larger_batch(
    config: GPTConfig, device: torch.device, batching: BatchSplit, compute: ComputeMode
) -> int:
    """Return the micro-batch, in sequences, whose fixed costs are small on this device, or the
    largest that fits.

    Fixed costs are the bytes that are moved for each parameter (casts of weights, sums of
    gradients), which may take TARGET_FIXED_SHARE of the time, and the queueing of kernels, which no
    longer shows if the card works as long. What fits is predicted, in all memory of the device, not
    in what is free just now: the same run takes the same micro-batch each time. The given
    micro-batch is never made smaller.
    """
    model = GPT.without_storage(config)
    fixed_bytes = FIXED_BYTES_PER_PARAMETER * sum(p.numel() for p in model.parameters())
    fixed_flops = fixed_bytes * FLOPS_PER_BYTE / TARGET_FIXED_SHARE
    peak, _ = peaks.peak_flops(device, compute.dtype)
    # A peak that is NaN, unknown, changes nothing.
    fixed_flops = max(fixed_flops, QUEUEING_S_PER_LAYER * config.n_layer * peak)
    enough = fixed_flops / model.estimate_flops() / batching.block_size
    step = StepShape(config, batching.batch_size, compute, device.type, ddp=batching.world > 1)
    of_rank = batching.global_batch_size // batching.world
    limit_bytes = USABLE_SHARE * machine.memory_bytes(device)
    return max(largest_batch(step, of_rank, limit_bytes, enough), batching.batch_size)


def largest_batch(
    step: StepShape, sequences: int, limit_bytes: float, enough: float = math.inf
) -> int:
    """Return the largest micro-batch that divides a rank's sequences and is predicted to fit, but
    none beyond the first with `enough` sequences; 0 if none fits.

    It may need the loss in chunks: a larger micro-batch saves more than they cost.
    """
    largest = 0
    for n in range(1, sequences + 1):
        if largest >= enough or sequences % n:
            continue
        smallest = with_fewest_chunks(replace(step, batch_size=n), limit_bytes)
        if smallest.peak_bytes > limit_bytes:
            break
        largest = n
    return largest


# ---- --dry_run and --plan_for --------------------------------------------------------------------


class PlanSettings(ComputeSettings, Protocol):
    """The settings of train.py that a plan reads."""

    @property
    def plan_for(self) -> str: ...
    @property
    def block_size(self) -> int: ...
    @property
    def max_iters(self) -> int: ...
    def batch_split(self, rank: int = 0, world: int = 1) -> BatchSplit: ...


# The least and the most MFU of known runs, by what the names of such devices have in common. On
# cards, of GPT-2's 124M at a context of 1,024 in 16 bits (docs/figures.md); compute units of H100
# and H200 are the same. Both on CPUs are of two cores: 4 layers of 128 with AMX, 2,000 steps of 768
# tokens in 45.2 s (docs/figures.md) where matmuls reach 2.5 TFLOP/s
# (bench/results/2026-11-26-speed-amx.md); and 12 of 768 (2026-11-25-speed-zen4.md).
KNOWN_MFU = {
    "GeForce": (0.55, 0.82),
    "A100": (0.30, 0.63),
    "H100": (0.40, 0.52),
    "H200": (0.40, 0.52),
    "other kinds of cards": (0.30, 0.82),
    "CPUs": (0.07, 0.85),
}
# On a CPU, oneDNN's workspaces and the allocator's gaps take this share of a step's memory on top.
# By peaks of real processes it was 0.41 to 0.52 for five models of 4 to 12 layers (a Xeon with 2
# threads, 2026-11-27), and more for a model of a few MB.
WORKSPACES_ON_CPU = 0.45
# Times as long as a step takes with activation_checkpoint=full: 4 layers of 384 on a CPU
# (docs/training.md), and 12 of 768 on an H200 (bench/results/2026-11-27-h200.md).
RECOMPUTING_ON_CPU = 1.26
RECOMPUTING_ON_GPU = 1.69


def dry_run(config: PlanSettings, model_config: GPTConfig, dist: DistContext) -> bool:
    """Print the memory and the time that a run needs, here or on the cards that plan_for names.

    Return whether it fits into the memory.
    """
    model_config = replace(model_config, block_size=config.block_size)
    dtype = config.dtype
    if config.plan_for:
        ranks, card, memory_gb = peaks.find_cards(config.plan_for)
        name = card.name
        device_type = "cuda"  # AMD's cards count as CUDA's
        dtype = card.default_dtype() if dtype == "auto" else dtype
        peak, source = card.peak(dtype) or (math.nan, "")
        free_bytes = total_bytes = memory_gb * 2**30  # a maker's GB of memory is a GiB
    else:
        ranks = dist.world
        name = machine.device_name(dist.device)
        device_type = dist.device.type
        dtype = default_dtype(dist.device) if dtype == "auto" else dtype
        peak, source = peaks.peak_flops(dist.device, dtype)
        free_bytes = machine.usable_memory_bytes(dist.device)
        total_bytes = machine.memory_bytes(dist.device)
    batching = config.batch_split(world=ranks)
    # choose_compute decides the same, if Triton is there.
    compiled = config.compile is not False and device_type == "cuda"
    residual_dtype = "bfloat16" if compiled and dtype == "bfloat16" else "float32"
    compute = ComputeMode(dtype, compiled, False, config.activation_checkpoint, residual_dtype)
    shards = shards_of(config.dp_shard, ranks)
    step = StepShape(model_config, batching.batch_size, compute, device_type, shards, ddp=ranks > 1)
    step = with_fewest_chunks(step, USABLE_SHARE * total_bytes)
    parts = step_memory(step)
    limit = free_bytes
    if device_type == "cpu":
        parts["workspaces"] = round(WORKSPACES_ON_CPU * sum(parts.values()))
        # Python, torch and what it has loaded.
        parts["process"] = psutil.Process().memory_info().rss
    elif device_type == "cuda":
        limit = int(USABLE_SHARE * free_bytes)
    total = sum(parts.values())
    fits = total <= limit

    model = GPT.without_storage(model_config)
    flops: float = model.estimate_flops() * batching.tokens_per_step
    sizes = ", ".join(f"{part} {in_gib(size)}" for part, size in parts.items())
    lines = [
        f"number of parameters: {millions(model.num_params())}; vocabulary of "
        f"{model_config.vocab_size:,}",
        f"tokens per step: {batching.tokens_per_step:,} = {batching.batch_size} x "
        f"{batching.grad_accum_steps} x {batching.block_size}",
        f"FLOPs per step, forward and backward: {flops:.3e}",
        f"predicted peak memory of {name}, {dtype}: {in_gib(total)} of "
        f"{memory_in_words(free_bytes, total_bytes)}",
        f"  {sizes} GiB",
    ]
    if device_type == "cuda":
        largest = largest_batch(step, batching.global_batch_size // ranks, limit)
        flags = batching.with_batch_size(largest).flags() if largest else "none"
        lines.append(f"  largest micro-batch predicted to fit, in the same batch: {flags}")
    if not fits:
        lines.append("time: n/a, because this micro-batch does not fit")
    elif math.isnan(peak):
        lines.append("time: n/a, because no peak in this dtype is known")
    else:
        other = "CPUs" if device_type == "cpu" else "other kinds of cards"
        kind = next((kind for kind in KNOWN_MFU if kind in name), other)
        low, high = KNOWN_MFU[kind]
        if config.activation_checkpoint == "full":
            flops *= RECOMPUTING_ON_CPU if device_type == "cpu" else RECOMPUTING_ON_GPU
        fastest_s = flops / (peak * ranks * high)
        slowest_s = flops / (peak * ranks * low)
        steps = config.max_iters
        lines.append(
            f"at an MFU of {low:.0%} to {high:.0%} (known runs on {kind}; not measured here: a "
            f"run's first steps say) of {ranks} x {peak / 1e12:.2f} TFLOP/s ({source}): "
            f"{fastest_s:.4g} to {slowest_s:.4g}s per step, {clock(steps * fastest_s)} to "
            f"{clock(steps * slowest_s)} for {steps:,} steps of "
            f"{steps * batching.tokens_per_step:.3g} tokens, without evaluation"
            f"{' and what ranks send each other' if ranks > 1 else ''}"
        )
        tokens = batching.tokens_per_step
        is_asked = ("--dry_run", "--plan_for")  # not in the command of the run itself
        words = [word for word in sys.argv if not word.startswith(is_asked)]
        lines += [  # a row of docs/start.md's tables
            "| machine | command | time, predicted | val loss | tokens/s |",
            f"| {ranks} x {name} | python {shlex.join(words)} | {clock(steps * fastest_s)} to "
            f"{clock(steps * slowest_s)} | not known | {tokens / slowest_s:,.0f} to "
            f"{tokens / fastest_s:,.0f} |",
        ]
    dist.print0("\n".join(lines))
    return fits
