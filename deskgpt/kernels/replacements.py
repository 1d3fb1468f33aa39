"""Faster replacements for functions of model.py, each with the measurement that justifies it.

replacement(reference, *args) is called in place of reference(*args), the function of model.py: see overridable.py. It
leaves to the reference what it is not made for. Importing this file registers nothing: `register_operators` is called
before the first compilation.

Shape legend: B batch, T time, C channels, H heads, D = C // H, V vocabulary, N = B * T.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deskgpt.kernels import cpu_kernels

Reference = Callable[..., Tensor]

# flash: torch's fused kernels; explicit: the matmuls of model.py; kernels: ours in C++ (cpu_kernels.py), which compute
# the activation and the loss, too.
KINDS = ("flash", "explicit", "kernels")


def replacements_for(
    device_type: str, attention: str = "flash", compiled: bool = False, refused: Collection[str] = ()
) -> dict[str, Callable[..., Any]]:
    """What replaces functions of model.py, by their names, on this kind of device.

    attention: one of KINDS. compiled: for torch.compile. refused: names of those that are wrong here;
    the next best takes their place, or the function itself.
    """
    best = {}
    for name, candidates in candidates_for(device_type, attention, compiled).items():
        right = [c for c in candidates if c.__name__ not in refused]
        if right:
            best[name] = right[0]
    return best


def candidates_for(device_type: str, attention: str, compiled: bool = False) -> dict[str, list[Callable[..., Any]]]:
    """For each function what may replace it, the best first."""
    options: dict[str, list[Callable[..., Any]]] = {"GPT.loss": [chunked_loss], "attention": [], "activation": []}
    # On MPS, torch's fused attention lets tokens see later ones in 16 bits (pytorch's issue 195910) and is wrong for
    # few queries that are transposed (181133, in 2.11). It is for passes without gradients only, so that model.py's
    # matmuls are as fast in training.
    if device_type != "mps":
        options["attention"] = [explicit_attention if attention == "explicit" else flash_attention]
    if compiled and device_type == "cpu":
        options["activation"] = [compiled_gelu]
    if attention == "kernels":
        options["attention"].insert(0, kernel_attention)
        options["activation"].insert(0, kernel_activation)
        options["GPT.loss"].insert(0, kernel_loss)
    return options


def describe(replacement: Callable[..., Any] | None) -> str:
    """In words, such as "C++ attention" for kernel_attention."""
    if replacement is None:
        return "model.py itself"
    return replacement.__name__.replace("kernel_", "C++ ").replace("_", " ")


def as_compared(replacement: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement as it is compared with the reference.

    The loss has at least three chunks, since it would leave a few tokens to the reference; explicit_attention is
    flash_attention, as in an evaluation; others are compared as they are.
    """
    if replacement is explicit_attention:
        return flash_attention
    if replacement not in (chunked_loss, kernel_loss):
        return replacement

    def loss(reference: Reference, model: Any, x: Tensor, targets: Tensor) -> Tensor:
        V = model.lm_head.weight.size(0)
        return replacement(reference, model, x, targets, loss_logits=V * max(1, targets.numel() // 3))

    return loss


# ---- attention -----------------------------------------------------------------------------------------------


def flash_attention(reference: Reference, q: Tensor, k: Tensor, v: Tensor, *positions_and_dropout: Any) -> Tensor:
    """Causal attention by torch's fused kernels, for all tokens of a text and for a new one after those in a cache.

    On a CPU a new token of 4 layers of 128 takes 753 us with them, 915 us without (2026-11-23).
    """
    _, _, dropout = positions_and_dropout
    T = q.size(2)
    if T == 1:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
    if k.size(2) != T:
        return reference(q, k, v, *positions_and_dropout)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


def explicit_attention(reference: Reference, q: Tensor, k: Tensor, v: Tensor, *positions_and_dropout: Any) -> Tensor:
    """With gradients, the matmuls of model.py, which keep B·H·T·T weights; without, flash_attention."""
    if not torch.is_grad_enabled():
        return flash_attention(reference, q, k, v, *positions_and_dropout)
    return reference(q, k, v, *positions_and_dropout)


def kernel_attention(reference: Reference, q: Tensor, k: Tensor, v: Tensor, *positions_and_dropout: Any) -> Tensor:
    """Causal attention by our kernel; by flash_attention with dropout, and for what the kernel does not take.

    bench/results/2026-11-25-cpu-kernels.md has the times of both.
    """
    _, _, dropout = positions_and_dropout
    if dropout or q.size(2) == 1 or not cpu_kernels.takes(q, k, v):
        return flash_attention(reference, q, k, v, *positions_and_dropout)
    o, _ = torch.ops.deskgpt.causal_attention(q, k, v)
    return o


# ---- activation --------------------------------------------------------------------------------------------


def compiled_gelu(reference: Reference, x: Tensor, name: str) -> Tensor:
    """GELU on a CPU, where inductor's erf and tanh take most of its time.

    The exact one as one operator of torch, which takes less than half the time of inductor's; that with tanh by the
    identity (1 + tanh(u)) / 2 = sigmoid(2u), which takes 0.4 of the time (bench/results/2026-11-25-cpu-kernels.md).
    """
    if name == "gelu":
        return torch.ops.deskgpt.activation(x, name)
    if name == "gelu_tanh":
        z = x.float()
        return (z * torch.sigmoid(z * (1.5957691216057308 + 0.07135481627260025 * z * z))).type_as(x)
    return reference(x, name)


def kernel_activation(reference: Reference, x: Tensor, name: str) -> Tensor:
    """An activation by our kernel: half the time of torch's tanh, a third of relu2 in two steps.

    The exact GELU is oneDNN's already.
    """
    if name in cpu_kernels.ACTIVATIONS and cpu_kernels.takes(x):
        return torch.ops.deskgpt.activation(x, name)
    return compiled_gelu(reference, x, name) if torch.compiler.is_compiling() else reference(x, name)


# ---- loss ----------------------------------------------------------------------------------------------------

# Up to this number of logits, a batch's are computed at once, by the reference. More are computed, used and dropped in
# chunks, of this size on a CPU: smaller chunks cost speed, larger ones only memory. 2^25 are 667 tokens of GPT-2's
# vocabulary, 134 MB in float32 (bench/results/2026-11-22-loss.md). On a GPU every chunk also reads and writes the whole
# gradient of the head, 309 MB for GPT-2 in float32, which only thousands of tokens outweigh. In bfloat16 a chunk there
# takes 0.4 GB compiled and 2 GB not compiled, by rehearsal. Other sizes are measured by bench/qualify.py.
LOGITS_ON_CPU = 1 << 25
LOGITS_ON_GPU = 4096 * 50304
BYTES_WITH_KERNEL = 1 << 28  # of a chunk's logits, in place of LOGITS_ON_CPU: our softmax takes no memory but theirs
WHOLE_TILES = 128  # chunks are multiples of this number of tokens: tiles of matmuls are whole


def tokens_per_chunk(N: int, V: int, logits: int) -> int:
    """Tokens of a chunk of N tokens' logits: whole tiles, and all chunks of one size if that at most halves them."""
    most = max(1, logits // V)
    if most >= N:
        return N
    if most < WHOLE_TILES:
        return most
    largest = most - most % WHOLE_TILES
    for tokens in range(largest, largest // 2, -WHOLE_TILES):
        if N % tokens == 0:
            return tokens
    return largest


def chunked_loss(
    reference: Reference,
    model: Any,
    x: Tensor,
    targets: Tensor,
    loss_logits: int | None = None,
    by_kernel: bool = False,
) -> Tensor:
    """The mean cross-entropy of a linear head, in float32, whose logits are never kept whole.

    model: the GPT; x (B, T, C) hidden states, targets (B, T) with -1 ignored. loss_logits: how many logits to compute
    at once, None for what suits the device. by_kernel: with the softmax of cpu_kernels.py.
    """
    h = x.flatten(0, 1)  # (N, C)
    targets_of_h = targets.flatten()
    weight = model.lm_head.weight
    N, V = h.size(0), weight.size(0)
    device = h.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else h.dtype
    by_kernel = by_kernel and dtype in cpu_kernels.dtypes()
    usual = LOGITS_ON_GPU if device == "cuda" else LOGITS_ON_CPU
    if by_kernel:
        usual = BYTES_WITH_KERNEL // dtype.itemsize
    chunk = tokens_per_chunk(N, V, loss_logits or usual)
    if chunk == N and N * V <= LOGITS_ON_CPU:
        return reference(model, x, targets)
    needs_grad = torch.is_grad_enabled()
    if torch.compiler.is_compiling():
        operator = torch.ops.deskgpt.chunked_cross_entropy.default
        total, _, _ = operator(h, weight, targets_of_h, dtype, chunk, needs_grad, by_kernel)
    else:
        in_place = cpu_kernels.softmax_ if by_kernel else softmax_
        total = ChunkedCrossEntropy.apply(h, weight, targets_of_h, dtype, chunk, needs_grad, in_place)
    return total / (targets_of_h >= 0).sum().clamp(min=1)


def kernel_loss(reference: Reference, model: Any, x: Tensor, targets: Tensor, loss_logits: int | None = None) -> Tensor:
    """chunked_loss with our softmax."""
    return chunked_loss(reference, model, x, targets, loss_logits, by_kernel=True)


def softmax_(logits: Tensor, targets: Tensor) -> Tensor:
    """Turns logits (N, V) into probabilities, in place; returns the logarithms (N,) of the targets', in float32."""
    log_p = torch.log_softmax(logits, 1, dtype=torch.float32)
    log_p_target = log_p.gather(1, targets[:, None]).squeeze(1)
    logits.copy_(log_p.exp_())
    return log_p_target


class ChunkedCrossEntropy(torch.autograd.Function):
    """chunked_cross_entropy for autograd. Its forward pass runs with gradients off, hence needs_grad."""

    @staticmethod
    def forward(ctx, h, weight, targets, dtype, chunk, needs_grad, in_place):
        loss, *grads = chunked_cross_entropy(h, weight, targets, dtype, chunk, needs_grad, in_place)
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        grad_h, grad_w = ctx.saved_tensors
        return grad_h.mul_(grad_loss), grad_w.mul_(grad_loss), None, None, None, None, None


def chunked_cross_entropy(
    h: Tensor,
    weight: Tensor,
    targets: Tensor,
    dtype: torch.dtype,
    chunk: int,
    needs_grad: bool,
    softmax_of_full_chunk_: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of the cross-entropy of `h @ weight.T` against `targets`, and its gradients, holding one chunk of logits.

    The gradients of a chunk are taken while its logits exist: nothing of size (N, V) is kept for a backward pass, and
    no matmul runs twice. Matmuls run in `dtype`, softmax and sums in float32. The gradients are like h and weight, or
    empty without needs_grad. softmax_of_full_chunk_ is softmax_, eager or compiled; a last chunk that is not full is
    not worth a second compilation.

    Why own code: torch 2.13's `linear_cross_entropy` is no faster and rounds a bfloat16 loss to 3 digits, torch 2.11
    has none, and recomputing with `torch.utils.checkpoint` costs a fourth matmul (bench/results/2026-11-22-loss.md).
    """
    with torch.autocast(h.device.type, enabled=False):
        w = weight.to(dtype)
        loss = torch.zeros((), dtype=torch.float32, device=h.device)
        grad_h = torch.empty_like(h) if needs_grad else h.new_empty(0)
        grad_w = torch.empty_like(weight) if needs_grad else weight.new_empty(0)
        for first in range(0, h.size(0), chunk):
            rows = slice(first, first + chunk)
            h_rows = h[rows].to(dtype)
            in_place = softmax_of_full_chunk_ if len(h_rows) == chunk else softmax_
            loss += cross_entropy_of_chunk(h_rows, w, targets[rows], grad_h[rows], grad_w, in_place, first == 0)
    return loss, grad_h, grad_w


def cross_entropy_of_chunk(
    h: Tensor,
    w: Tensor,
    targets: Tensor,
    grad_h: Tensor,
    grad_w: Tensor,
    in_place: Callable[[Tensor, Tensor], Tensor],
    is_first: bool,
) -> Tensor:
    """Sum of the cross-entropy of `h @ w.T`. Writes its gradient by h into grad_h and adds that by w to grad_w.

    h and grad_h (chunk, C), w and grad_w (V, C), targets (chunk,) with -1 ignored. Empty grad_w: no gradients wanted.
    in_place: softmax_. is_first: grad_w holds nothing yet. The logits are dropped before the next chunk: otherwise two
    of them would overlap.
    """
    kept = targets >= 0
    targets = targets.clamp(min=0)
    logits = h @ w.t()  # (chunk, V)
    log_p_target = in_place(logits, targets)
    if grad_w.numel():
        # d loss / d logits = softmax - onehot(target)
        grad_logits = logits
        grad_logits[torch.arange(len(h), device=h.device), targets] = log_p_target.expm1().to(h.dtype)
        # Ignored rows drop out of the narrow factors.
        torch.mul(grad_logits @ w, kept[:, None], out=grad_h)
        add_matmul_(grad_w, grad_logits.t(), h * kept[:, None], is_first)
    return -(log_p_target * kept).sum()


def add_matmul_(total: Tensor, a: Tensor, b: Tensor, is_first: bool = False) -> None:
    """Adds a @ b to total or, is_first, writes it there: zeros to add to would cost a pass over the head's gradient.

    On CUDA, a matmul of 16 bits sums into a float32 total itself (meta: as there, which older torch cannot rehearse).
    torch takes a float32 total there since github.com/pytorch/pytorch/pull/167931.
    """
    if is_first and total.device.type == "cpu":
        if a.dtype == total.dtype:
            torch.mm(a, b, out=total)
        else:
            total.copy_(a @ b)
        return
    if is_first:
        total.zero_()
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, out=total)
    elif total.device.type in ("cuda", "meta") and not torch.version.hip and torch.__version__ >= "2.13":
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


# ---- operators for torch.compile -----------------------------------------------------------------------------


@functools.cache
def register_operators() -> None:
    """Makes the operators known that stay opaque to inductor. Called before a compilation; later calls do nothing.

    chunked_cross_entropy is one because its loop, unrolled into a graph, would keep the gradients of all logits until
    the graph's end.
    """
    cpu_kernels.register_operators()

    @torch.library.custom_op("deskgpt::chunked_cross_entropy", mutates_args=())
    def operator(
        h: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, chunk: int, needs_grad: bool, by_kernel: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        in_place = cpu_kernels.softmax_ if by_kernel else compiled_softmax_()
        return chunked_cross_entropy(h, weight, targets, dtype, chunk, needs_grad, in_place)

    @operator.register_fake
    def fake(
        h: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, chunk: int, needs_grad: bool, by_kernel: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad_h = torch.empty_like(h) if needs_grad else h.new_empty(0)
        grad_w = torch.empty_like(weight) if needs_grad else weight.new_empty(0)
        return h.new_empty((), dtype=torch.float32), grad_h, grad_w

    def backward(ctx, grad_loss, *_):  # the saved gradients are results of the operator, not inputs: nothing for them
        grad_h, grad_w = ctx.saved_tensors
        return grad_loss * grad_h, grad_loss * grad_w, None, None, None, None, None

    operator.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*output[1:]))


@functools.cache
def compiled_softmax_() -> Callable[[Tensor, Tensor], Tensor]:
    """softmax_ as one graph, which writes over the logits as it reads them: a chunk then takes no memory but theirs.

    On a CPU with AMX this took the whole loss from 685 to 581 ms (docs/decisions.md, equal chunks).
    """
    return torch.compile(softmax_, dynamic=False)
