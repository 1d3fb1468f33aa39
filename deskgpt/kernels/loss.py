"""The cross-entropy of a large vocabulary without ever keeping all logits.

Shape legend: B batch, T time, C channels, V vocabulary, N = B * T.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from deskgpt.kernels import cpu_kernels

Logits = Callable[[Tensor], Tensor]  # hidden states (n, C) to logits (n, V)

# Up to this number of logits, all are computed at once. More are computed, used and dropped in chunks, on a CPU of this
# size: smaller chunks cost speed, larger ones only memory. 2^25 are 667 tokens of GPT-2's vocabulary, 134 MB in float32
# (bench/results/2026-11-22-loss.md). On a GPU each chunk also reads and writes the whole gradient of the head, 309 MB
# for GPT-2 in float32, which only thousands of tokens outweigh.
LOGITS_ON_CPU = 1 << 25
LOGITS_ON_GPU = 4096 * 50304
BYTES_WITH_KERNEL = 1 << 28  # of a chunk's logits, in place of LOGITS_ON_CPU: our softmax takes no memory but theirs
WHOLE_TILES = 128  # chunks are multiples of this number of tokens: tiles of matmuls are whole
KEEP_NO_RESULT = ("MmBackward0", "AddmmBackward0")  # operations whose result may be overwritten before their backward
CAST = "ToCopyBackward0"  # autocast keeps the cast of a weight for all its uses


def chunked_cross_entropy(
    logits: Logits, x: Tensor, targets: Tensor, vocab_size: int, compiled: bool = False
) -> Tensor:
    """F.cross_entropy(logits(x), targets, ignore_index=-1) in float32, holding the logits of a chunk of tokens only.

    logits: any function of hidden states (n, C) to (n, V) that treats each token alone, such as GPT.logits; its
    parameters get their gradients. x (B, T, C), targets (B, T) int64. vocab_size: V, from which the size of a chunk
    follows. compiled: the softmax as one graph of torch.compile. Without a target the loss is 0.

    The gradients of a chunk are taken while its logits exist: nothing of size (N, V) is kept for a backward pass, and
    no matmul runs twice. Why own code: torch 2.13's `linear_cross_entropy` takes a weight, not a function, is no faster
    and rounds a bfloat16 loss to 3 digits, torch 2.11 has none, and recomputing with `torch.utils.checkpoint` costs a
    fourth matmul (bench/results/2026-11-22-loss.md).
    """
    h = x.flatten(0, 1)  # (N, C)
    targets = targets.flatten()
    N = len(h)
    if N * vocab_size <= LOGITS_ON_CPU:
        return cross_entropy(logits, h, targets)
    chunk = tokens_per_chunk(N, vocab_size, logits_at_once(h))
    n_targets = (targets >= 0).sum().clamp(min=1)
    if not torch.is_grad_enabled():
        loss = torch.zeros((), device=h.device)
        for rows, targets_of_rows in zip(h.split(chunk), targets.split(chunk), strict=True):
            loss += Chunk(logits, rows, targets_of_rows, compiled).loss()
        return loss / n_targets
    first = [Chunk(logits, h[:chunk], targets[:chunk], compiled)]  # its graph shows the parameters; used, then dropped
    parameters = parameters_of(first[0].logits, first[0].began_at)
    if parameters is None:
        return cross_entropy(logits, h, targets)
    return ChunkedCrossEntropy.apply(h, targets, logits, chunk, compiled, first, *parameters) / n_targets


def cross_entropy(logits: Logits, h: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of hidden states h (N, C), with all logits at once."""
    loss = F.cross_entropy(logits(h).float(), targets, ignore_index=-1)
    return loss.masked_fill((targets < 0).all(), 0.0)  # torch's mean of no targets is NaN


def logits_at_once(h: Tensor) -> int:
    """Return how many logits a chunk has, by what suits the device of h."""
    if h.device.type == "cuda":
        return LOGITS_ON_GPU
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else h.dtype
    return BYTES_WITH_KERNEL // dtype.itemsize if dtype in cpu_kernels.dtypes() else LOGITS_ON_CPU


def tokens_per_chunk(N: int, V: int, logits: int) -> int:
    """Return the tokens of a chunk of N: whole tiles, and all chunks of one size if that at most halves them."""
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


def parameters_of(logits: Tensor, began_at: int) -> list[nn.Parameter] | None:
    """Return the parameters that a backward pass from logits reaches.

    None if it also reaches what was computed before began_at, the sequence number of the first operation on the
    hidden states: then a chunk's backward pass would go through the whole model.
    """
    found: dict[nn.Parameter, None] = {}  # in the order of the walk
    seen = set()
    nodes: list[Any] = [logits.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter):
            found[variable] = None
        elif variable is None and node._sequence_nr() < began_at and node.name() != CAST:
            return None
        nodes += [following for following, _ in node.next_functions]
    return list(found)


class Chunk:
    """The logits of some tokens, which become their gradient."""

    def __init__(self, logits: Logits, h: Tensor, targets: Tensor, compiled: bool) -> None:
        """h (n, C) hidden states, targets (n,) with -1 ignored. With gradients on, the logits keep their graph."""
        self.h = h.detach()
        self.began_at = 0
        if torch.is_grad_enabled():
            self.h = self.h.requires_grad_()
            view = self.h.view_as(self.h)
            self.began_at = view.grad_fn._sequence_nr()  # type: ignore[union-attr]
        self.targets = targets
        self.compiled = compiled
        self.logits = logits(self.h)  # (n, V)

    def loss(self) -> Tensor:
        """Return the sum of the cross-entropy, without gradients. The logits are overwritten."""
        return self._become_gradient(self.logits)

    def loss_and_gradients(self, parameters: list[Tensor]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return the sum of the cross-entropy, and its gradients by h and by the parameters. It can be called once."""
        gradient = self.logits.detach()
        if type(self.logits.grad_fn).__name__ not in KEEP_NO_RESULT:
            gradient = gradient.clone()
        loss = self._become_gradient(gradient)
        by_h, *by_parameters = torch.autograd.grad(self.logits, (self.h, *parameters), gradient)
        return loss, by_h, tuple(by_parameters)

    def _become_gradient(self, logits: Tensor) -> Tensor:
        """Overwrite logits by the gradient of the summed cross-entropy, softmax - onehot(target); return the sum."""
        learned = self.targets >= 0
        targets = self.targets.clamp(min=0)
        if logits.device.type == "cuda":  # in one pass, without a look at `learned`, for which the CPU would wait
            return (compiled_gradient_() if self.compiled else gradient_)(logits, targets, learned)
        if cpu_kernels.takes(logits) and logits.is_contiguous():
            log_p = cpu_kernels.softmax_(logits, targets)
            logits[torch.arange(len(logits)), targets] = log_p.expm1().to(logits.dtype)
            if not learned.all():
                logits.mul_(learned[:, None])
            return -(log_p * learned).sum()
        return gradient_(logits, targets, learned)


def gradient_(logits: Tensor, targets: Tensor, learned: Tensor) -> Tensor:
    """Overwrite logits (n, V) by the gradient of the sum of the cross-entropy, and return the sum, in float32.

    targets (n,) int64; learned (n,): False where a target does not count.
    """
    log_p = torch.log_softmax(logits, 1, dtype=torch.float32)
    log_p_target = log_p.gather(1, targets[:, None])  # (n, 1)
    gradient = log_p.exp_().scatter_(1, targets[:, None], log_p_target.expm1())
    logits.copy_(gradient.mul_(learned[:, None]))
    return -(log_p_target.squeeze(1) * learned).sum()


def fused_gradient_(logits: Tensor, targets: Tensor, learned: Tensor) -> Tensor:
    """gradient_ for torch.compile: elementwise, it keeps nothing of the logits' size but them.

    A scatter would make the gradient a tensor of its own in float32: 0.8 GB for 4096 tokens of GPT-2's vocabulary.
    """
    log_p = torch.log_softmax(logits, 1, dtype=torch.float32)
    is_target = torch.arange(logits.size(1), device=logits.device) == targets[:, None]  # (n, V)
    gradient = torch.where(is_target, log_p.expm1(), log_p.exp())
    log_p_target = log_p.gather(1, targets[:, None]).squeeze(1)
    logits.copy_(gradient * learned[:, None])
    return -(log_p_target * learned).sum()


@functools.cache
def compiled_gradient_() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return gradient_ as one graph, which writes over the logits as it reads them."""
    return torch.compile(fused_gradient_)


class ChunkedCrossEntropy(torch.autograd.Function):
    """The sum of the cross-entropy over chunks, for autograd. The gradients are taken in the forward pass."""

    @staticmethod
    def forward(ctx, h, targets, logits, chunk, compiled, first, *parameters):
        loss = torch.zeros((), dtype=torch.float32, device=h.device)
        grad_h = torch.empty_like(h)
        gradients: list[Tensor | None] = [None] * len(parameters)
        for begin in range(0, len(h), chunk):
            rows = slice(begin, begin + chunk)
            with torch.enable_grad():
                part = first.pop() if first else Chunk(logits, h[rows], targets[rows], compiled)
            part_loss, by_h, by_parameters = part.loss_and_gradients(parameters)
            del part  # its logits, before those of the next chunk exist
            loss += part_loss
            grad_h[rows] = by_h
            for i, gradient in enumerate(by_parameters):
                gradients[i] = gradient if gradients[i] is None else gradients[i].add_(gradient)
        ctx.save_for_backward(grad_h, *gradients)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        grad_h, *gradients = ctx.saved_tensors
        return grad_h.mul_(grad_loss), None, None, None, None, None, *[g.mul_(grad_loss) for g in gradients]
