"""Predict the memory of a training step from the model's sizes. Nothing runs, here or on a card.

The weights are model.py's, whatever it has, and the optimizer's states are AdamW's. The activations are counted for the
layers of model.py as it comes: a changed block keeps others. Checked against steps on a CPU, by torch's profiler:
within 10% (tests/test_memory.py), and 4% too low on an H200. Not counted: workspaces of cuBLAS and of attention's
backward pass, the CUDA context and the allocator's gaps. Leave a tenth free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from deskgpt.compute.variant import Variant
from deskgpt.kernels import loss
from model import GPT, GPTConfig

# On a card, the fewest that fit. For a GPT-2 of 124M each further one reads and writes 0.69 GB: the head's gradient is
# cast and added. Eight cost as much as another micro-batch does beside its tokens.
LOSS_CHUNKS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Step:
    """A training step of one rank, as far as its memory depends on it."""

    config: GPTConfig
    batch_size: int  # sequences per micro-batch
    variant: Variant
    device_type: str
    shards: int = 1  # ranks that share one copy of weights, gradients and optimizer states
    ddp: bool = False  # each of several ranks has a copy of its own

    @property
    def tokens(self) -> int:
        return self.batch_size * self.config.block_size

    @property
    def matmul_bytes(self) -> int:
        """Return the bytes of a number in the matmuls' dtype."""
        return 4 if self.variant.dtype == "float32" else 2

    @property
    def residual_bytes(self) -> int:
        """Return the bytes of a number of the residual stream."""
        return 4 if self.variant.residual_dtype == "float32" else 2


def memory(step: Step) -> dict[str, int]:
    """Return the bytes alive at the peak of a step, by part; their sum is the peak.

    activations are what the forward pass keeps for the backward pass. logits are what the loss adds, or what the
    backward pass adds for the block that it computes again, whichever is larger. gradients count in full, although a
    step of one micro-batch has all of them only when most activations are gone. Of a model that several ranks share,
    gathered are the full weights that a rank holds at one time. buckets are DDP's copies of the gradients, to send.
    """
    model = GPT.without_storage(step.config)
    weights = sum(p.nbytes for p in model.parameters())
    blocks = sum(p.nbytes for p in model.transformer.h.parameters())
    width = step.tokens * step.config.n_embd
    kept = kept_by_block(step, step.variant.recompute)
    activations = step.config.n_layer * kept + 2 * width * step.residual_bytes
    if step.matmul_bytes == 2 and step.variant.recompute == "none" and step.shards == 1:
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


def with_fewest_chunks(step: Step, limit_bytes: float) -> Step:
    """Return the step with the fewest of LOSS_CHUNKS that are predicted to fit, or with the most; on a CPU as it is."""
    if step.device_type != "cuda":
        return step
    for chunks in LOSS_CHUNKS:
        step = replace(step, variant=replace(step.variant, loss_chunks=chunks))
        if sum(memory(step).values()) <= limit_bytes:
            break
    return step


def kept_by_block(step: Step, recompute: str) -> int:
    """Return the bytes that one block keeps of a micro-batch for its backward pass."""
    config = step.config
    C = config.n_embd
    H = config.n_head
    m = step.matmul_bytes
    r = step.residual_bytes
    is_eager = not step.variant.compiled
    if recompute == "full":
        return step.tokens * r * C  # the block's input
    of_channel = 2 * r + 2 * m  # inputs and outputs of both norms
    of_channel += 3 * m + m  # q, k, v and what attention returns
    of_channel += 4 * m + 4 * m  # the MLP before and after its activation
    if config.qk_norm or config.position == "rope":
        of_channel += 2 * m  # normalized and rotated q and k
    if config.qk_norm and is_eager:
        of_channel += 12 if m == 2 else 4  # copies of q and k, in float32
    if config.norm == "rms" and is_eager and step.device_type == "cpu":
        of_channel += 8  # torch has no RMS norm kernel for a CPU
    of_head = 4  # attention's logarithms of sums
    if config.dropout and step.device_type == "cpu":  # without fused kernels
        of_channel += 9  # masks in float32
        of_head += 12 * config.block_size  # attention's weights, their mask and their product
    elif config.dropout:
        of_channel += 2  # masks
    return step.tokens * (of_channel * C + of_head * H)


def loss_bytes(step: Step) -> int:
    """Return the bytes that the loss adds: a chunk of logits, their gradient, and gradients of the head."""
    V, C = step.config.vocab_size, step.config.n_embd
    m = step.matmul_bytes
    if step.tokens * V <= loss.LOGITS_ON_CPU:
        return step.tokens * V * (m + 8)
    by_kernel = step.variant.cpu_kernels and step.device_type == "cpu"
    chunk = loss.tokens_per_chunk(step.tokens, V, step.device_type, step.variant.loss_chunks, m * by_kernel)
    softmax = chunk * V * (m if by_kernel or step.variant.compiled else 4 if m == 4 else 8)
    head = V * C * 4
    in_16_bits = V * C * m if m == 2 else 0
    sum_before = head if chunk < step.tokens else 0  # of the gradients of earlier chunks
    with_logits = chunk * V * m + softmax + sum_before
    with_gradient = chunk * V * m + V * C * m + 2 * sum_before
    scaled = (sum_before or V * C * m) + head
    of_inputs = step.tokens * C * step.residual_bytes
    return max(with_logits, with_gradient, scaled) + in_16_bits + of_inputs
