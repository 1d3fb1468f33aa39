"""The cross-entropy of a large vocabulary without ever keeping all logits.

Shape legend: B batch, T time, C channels, V vocabulary, N = B * T.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import deskgpt.kernels.cpu_kernels as cpu_kernels

Logits = Callable[[Tensor], Tensor]  # hidden states (..., C) to logits (..., V)

# Up to this number of logits, all are computed at once. More are computed, used and dropped in chunks, on a CPU of this
# size: smaller chunks cost speed, larger ones only memory. 2^25 are 667 tokens of GPT-2's vocabulary, 134 MB in float32
# (bench/results/2026-11-22-loss.md). On a GPU each chunk also reads and writes the whole gradient of the head, 309 MB
# for GPT-2 in float32, which only thousands of tokens outweigh: there are a few chunks of any micro-batch, and logits
# take less than a tenth of what the blocks keep.
LOGITS_ON_CPU = 1 << 25
LOGITS_ON_GPU = 8192 * 50304
CHUNKS_ON_GPU = 4
BYTES_WITH_KERNEL = 1 << 28  # of a chunk's logits, in place of LOGITS_ON_CPU: our softmax takes no memory but theirs
WHOLE_TILES = 128  # chunks are multiples of this number of tokens: tiles of matmuls are whole
CAST = "ToCopyBackward0"  # autocast keeps the cast of a weight for all its uses
HOOKS_OF_MODULES = "BackwardHookFunctionBackward"


def chunked_cross_entropy(
    logits: Logits, x: Tensor, targets: Tensor, vocab_size: int, compiled: bool = False
) -> Tensor:
    """F.cross_entropy(logits(x), targets, ignore_index=-1) in float32, holding the logits of a chunk of tokens only.

    logits: any function of hidden states (..., C) to (..., V) that treats each token alone, such as GPT.logits. It is
    called once for each chunk (1, n, C); its parameters get their gradients. x (B, T, C), targets (B, T) int64.
    vocab_size: V, from which the size of a chunk follows. compiled: the softmax as one graph of torch.compile. Without
    a target the loss is 0. More than LOGITS_ON_CPU logits have no second derivative.

    The gradients of a chunk are taken while its logits exist: nothing of size (N, V) is kept for a backward pass, and
    no matmul runs twice. All logits are computed at once if the gradients of the chunks do not add up to the whole: if
    logits depends on other activations than x, has hooks on what it computes, or takes other parameters for other
    tokens. Why own code: torch 2.13's `linear_cross_entropy` takes a weight, not a function, is no faster and rounds a
    bfloat16 loss to 3 digits, torch 2.11 has none, and recomputing with `torch.utils.checkpoint` costs a fourth matmul
    (bench/results/2026-11-22-loss.md).
    """
    N = targets.numel()
    if N * vocab_size <= LOGITS_ON_CPU:
        return cross_entropy(logits, x, targets)
    h = x.flatten(0, 1)  # (N, C)
    rows = targets.flatten()
    chunk = tokens_per_chunk(N, vocab_size, logits_at_once(h, N * vocab_size))
    n_targets = (rows != -1).sum().clamp(min=1)
    if not torch.is_grad_enabled():
        loss = torch.zeros((), device=h.device)
        for h_of_chunk, targets_of_chunk in zip(h.split(chunk), rows.split(chunk), strict=True):
            loss += Chunk(logits, h_of_chunk, targets_of_chunk, compiled).loss()
        return loss / n_targets
    first = [Chunk(logits, h[:chunk], rows[:chunk], compiled)]  # its graph shows the parameters; used, then dropped
    leaves = first[0].leaves()
    if leaves is None:
        return cross_entropy(logits, x, targets)
    try:
        return ChunkedCrossEntropy.apply(h, rows, logits, chunk, compiled, first, *leaves) / n_targets
    except OtherParametersError:
        return cross_entropy(logits, x, targets)


class OtherParametersError(RuntimeError):
    """A chunk's logits depend on something that the first chunk's did not depend on."""


def cross_entropy(logits: Logits, x: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of hidden states x (B, T, C), with all logits at once."""
    loss = F.cross_entropy(logits(x).flatten(0, 1).float(), targets.flatten(), ignore_index=-1)
    return loss.masked_fill((targets == -1).all(), 0.0)  # torch's mean of no targets is NaN


def logits_at_once(h: Tensor, n_logits: int) -> int:
    """Return how many of n_logits a chunk has at most, by what suits the device of h."""
    if h.device.type == "cuda":
        return logits_on_gpu(n_logits)
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else h.dtype
    return BYTES_WITH_KERNEL // dtype.itemsize if dtype in cpu_kernels.dtypes() else LOGITS_ON_CPU


def logits_on_gpu(n_logits: int) -> int:
    """Return how many of n_logits a chunk has at most on CUDA."""
    return max(LOGITS_ON_GPU, n_logits // CHUNKS_ON_GPU)


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


class Chunk:
    """The logits of some tokens, which become their gradient."""

    def __init__(self, logits: Logits, h: Tensor, targets: Tensor, compiled: bool) -> None:
        """h (n, C) hidden states, targets (n,) with -1 ignored. With gradients on, the logits keep their graph."""
        self.h = h.detach()
        self.began_at = 0  # the sequence number of autograd's first operation on h
        if torch.is_grad_enabled():
            self.h = self.h.requires_grad_()
            view = self.h.view_as(self.h)
            self.began_at = view.grad_fn._sequence_nr()  # type: ignore[union-attr]
        self.targets = targets
        self.compiled = compiled
        self.logits = logits(self.h[None])  # (1, n, V)
        self.is_shared = is_held_elsewhere(self.logits)

    def leaves(self) -> list[Tensor] | None:
        """Return the leaves, mostly parameters, that a backward pass from the logits reaches, without h.

        None if h is not among them, or if the pass also reaches what was computed before this chunk, or calls hooks
        of modules: such a pass cannot be cut into chunks.
        """
        found: dict[Tensor, None] = {}  # in the order of the walk
        seen = set()
        nodes: list[Any] = [self.logits.grad_fn]
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                found[leaf] = None
                continue
            is_earlier = node._sequence_nr() < self.began_at and node.name() != CAST
            if is_earlier or node.name() == HOOKS_OF_MODULES:
                return None
            nodes += [following for following, _ in node.next_functions]
        if self.h not in found:
            return None
        del found[self.h]
        return list(found)

    def loss(self) -> Tensor:
        """Return the sum of the cross-entropy, without gradients. It can be called once."""
        return self._become_gradient(self._own_logits())

    def loss_and_gradients(self, leaves: Sequence[Tensor]) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
        """Return the sum of the cross-entropy, and its gradients by h and by the leaves. It can be called once."""
        gradient = self._own_logits()
        loss = self._become_gradient(gradient)
        with without_hooks(leaves):
            # Chunks may share a part of the graph: the cast of a weight, or another function of it that is cached.
            options = {"allow_unused": True, "retain_graph": True}
            by_h, *by_leaves = torch.autograd.grad(self.logits, (self.h, *leaves), gradient[None], **options)
        self.h.register_hook(refuse)  # of what logits has kept with its graph, as for a further loss
        return loss, by_h, tuple(by_leaves)

    def _own_logits(self) -> Tensor:
        """Return the logits (n, V) without their graph, to be overwritten: a copy if anything else holds them."""
        logits = self.logits.detach().squeeze(0)
        return logits.clone() if self.is_shared else logits

    def _become_gradient(self, logits: Tensor) -> Tensor:
        """Overwrite logits by the gradient of the summed cross-entropy, softmax - onehot(target); return the sum."""
        ignored = self.targets == -1
        targets = self.targets.masked_fill(ignored, 0)
        if logits.device.type == "cuda":  # in one pass, without a look at `ignored`, for which the CPU would wait
            return (fused_gradient_ if self.compiled else gradient_)(logits, targets, ignored)
        if cpu_kernels.takes(logits) and logits.is_contiguous():
            log_p = cpu_kernels.softmax_(logits, targets)
            logits[torch.arange(len(logits)), targets] = log_p.expm1().to(logits.dtype)
            if ignored.any():
                logits.masked_fill_(ignored[:, None], 0.0)
            return -log_p.masked_fill(ignored, 0.0).sum()
        return gradient_(logits, targets, ignored)


def refuse(gradient: Tensor) -> None:
    """Raise RuntimeError: a backward pass that ends at the hidden states of one chunk would be lost."""
    raise RuntimeError(
        "GPT.logits keeps a tensor that has gradients, and is called for one chunk after the other: compute the tensor "
        "in GPT.forward, or GPT.loss by F.cross_entropy of self.logits(x)"
    )


def is_held_elsewhere(tensor: Tensor) -> bool:
    """Return whether anything but one attribute of the caller, such as autograd or a log, holds the tensor's memory."""
    alone = torch.empty(1)
    if tensor._base is not None:  # it is a view, as the result of a linear layer may be
        alone = alone.view(1)
    if sys.getrefcount(tensor) - 1 > sys.getrefcount(alone) or holders_of(tensor) > holders_of(alone):
        return True
    base = tensor._base
    base_alone = alone._base
    return base is not None and sys.getrefcount(base) > sys.getrefcount(base_alone)


def holders_of(tensor: Tensor) -> float:
    """Return how many tensors have this memory, and the object that asks; infinity if torch does not say it."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return math.inf if count is None else count(tensor.untyped_storage()._cdata)


def add_to(totals: list[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
    """Add the gradients of a chunk to the totals, in place.

    Autograd may give two leaves that were added the same tensor, and one that was summed a number that is expanded:
    the totals are never these.
    """
    taken = set()
    for i, gradient in enumerate(gradients):
        if gradient is None:
            continue
        total = totals[i]
        if total is not None:
            total.add_(gradient)
        elif gradient.data_ptr() in taken or 0 in gradient.stride():
            totals[i] = gradient.clone(memory_format=torch.contiguous_format)
        else:
            totals[i] = gradient
            taken.add(gradient.data_ptr())


@contextmanager
def without_hooks(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Within the block hooks of leaves are not called: the run's backward pass calls them, with whole gradients."""
    hooked = [(leaf, leaf._backward_hooks) for leaf in leaves if leaf._backward_hooks]
    for leaf, _ in hooked:
        leaf._backward_hooks = None
    try:
        yield
    finally:
        for leaf, hooks in hooked:
            leaf._backward_hooks = hooks


def gradient_(logits: Tensor, targets: Tensor, ignored: Tensor) -> Tensor:
    """Overwrite logits (n, V) by the gradient of the sum of the cross-entropy, and return the sum, in float32.

    targets (n,) int64; ignored (n,): True where a target does not count. Nothing is multiplied by 0 there: logits may
    be infinite.
    """
    log_p = torch.log_softmax(logits, 1, dtype=torch.float32)
    log_p_target = log_p.gather(1, targets[:, None])  # (n, 1)
    gradient = log_p.exp_().scatter_(1, targets[:, None], log_p_target.expm1())
    logits.copy_(gradient.masked_fill_(ignored[:, None], 0.0))
    return -log_p_target.squeeze(1).masked_fill(ignored, 0.0).sum()


def fused_gradient_(logits: Tensor, targets: Tensor, ignored: Tensor) -> Tensor:
    """gradient_ on CUDA, by one compiled kernel; only what a target adds is a step of its own."""
    index = targets[:, None]
    target_logits = logits.gather(1, index).squeeze(1).float()
    log_p_target = target_logits - compiled_softmax_()(logits, ignored)
    gradient_of_target = log_p_target.expm1().masked_fill(ignored, 0.0)
    logits.scatter_(1, index, gradient_of_target[:, None].to(logits.dtype))
    return -log_p_target.masked_fill(ignored, 0.0).sum()


def softmax_(logits: Tensor, ignored: Tensor) -> Tensor:
    """Overwrite logits (n, V) by their softmax, 0 in rows that are ignored (n,); return their logsumexp, in float32."""
    x = logits.float()
    normaliser = x.logsumexp(1)  # (n,)
    logits.copy_(torch.where(ignored[:, None], 0.0, (x - normaliser[:, None]).exp()))
    return normaliser


@functools.cache
def compiled_softmax_() -> Callable[[Tensor, Tensor], Tensor]:
    """Return softmax_ as one kernel, which reads a row while it is in the card's cache."""
    return torch.compile(softmax_)


class ChunkedCrossEntropy(torch.autograd.Function):
    """The sum of the cross-entropy over chunks, for autograd. The gradients are taken in the forward pass."""

    @staticmethod
    def forward(ctx, h, targets, logits, chunk, compiled, first, *leaves):
        loss = torch.zeros((), dtype=torch.float32, device=h.device)
        grad_h = torch.empty_like(h)
        gradients: list[Tensor | None] = [None] * len(leaves)
        for begin in range(0, len(h), chunk):
            rows = slice(begin, begin + chunk)
            if first:
                part = first.pop()
            else:
                with torch.enable_grad():
                    part = Chunk(logits, h[rows], targets[rows], compiled)
                own_leaves = part.leaves()
                if own_leaves is None or not {*own_leaves} <= {*leaves}:
                    raise OtherParametersError
            part_loss, by_h, by_leaves = part.loss_and_gradients(leaves)
            del part  # its logits, before those of the next chunk exist
            loss += part_loss
            grad_h[rows] = by_h
            add_to(gradients, by_leaves)
        ctx.save_for_backward(grad_h, *gradients)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: a loss in chunks has no second derivative; compute GPT.loss by F.cross_entropy of "
                "self.logits(x)"
            )
        # The saved gradients are scaled in place, unless another backward pass may need them (retain_graph=True).
        is_last = not torch._C._autograd._get_current_graph_task_keep_graph()
        scaled = [g if g is None else g.mul_(grad_loss) if is_last else g * grad_loss for g in ctx.saved_tensors]
        return scaled[0], None, None, None, None, None, *scaled[1:]
