"""The loss of a model over many micro-batches, of all ranks, and whether it still improves."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from data.batches import BatchSplit, Split, to_device
from deskgpt.compute import ComputeMode, Pass, autocast, named_losses
from deskgpt.device import free_unused
from deskgpt.distributed import DistContext, free_gathered
from model import GPT

BATCHES_FOR_ERROR = 8  # fewer say too little about their own spread


@dataclass(frozen=True)
class Evaluation:
    loss: float  # mean, in nats per token
    # How much the loss would scatter over other text of this length; None below BATCHES_FOR_ERROR.
    standard_error: float | None
    windows: int = 0  # that were read, over all ranks
    # The mean loss of each of this rank's batches, to compare runs in pairs.
    batch_losses: tuple[float, ...] = ()


class EvalRecord(NamedTuple):
    """The numbers of an evaluation that a run remembers."""

    step: int
    train_loss: float
    val_loss: float
    standard_error: float | None  # of val_loss


def without_improvement(evaluations: Sequence[EvalRecord]) -> int:
    """Count the last evaluations in a row that are not below the best before them by a standard
    error.

    Small steps down add up: the best is the last one that counted as an improvement. Where the
    standard error is not known, any lower loss counts.
    """
    best = math.inf
    n = 0
    for e in evaluations:
        if e.val_loss < best - (e.standard_error or 0.0):
            best = e.val_loss
            n = 0
        else:
            n += 1
    return n


def eval_batches(
    split: Split, batching: BatchSplit, device: torch.device
) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Yield this rank's batches of a fixed set of windows: inputs, targets, number of learned
    targets, in windows.

    The last batch may hold fewer windows than rows. All ranks have equally many batches: where
    weights are sharded, each needs the others. A terminal shows a progress bar. Raises DataError.
    """
    n = split.n_eval_windows(batching.eval_sequences)
    firsts = range(0, n, batching.world * batching.batch_size)
    for first in tqdm(firsts, "evaluating", leave=False, disable=True if batching.rank else None):
        x, y = split.eval_batch(first + batching.rows(0), n)
        n_learned = float((y >= 0).sum() / split.block_size)
        yield to_device(x, device), to_device(y, device), n_learned


def evaluation_loss(
    model: nn.Module, compute: ComputeMode, x: Tensor, y: Tensor
) -> dict[str, Tensor]:
    """Return the loss of one batch: all that a CUDA graph records of an evaluation."""
    with autocast(x.device, compute.dtype):
        return {"loss": named_losses(model(x, y))["loss"]}


def exact_answers(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many answers of each row (B,) the likeliest tokens write exactly, and how many
    answers there are (B,).

    logits (B, T, V); targets (B, T), -1 outside of answers: an answer is a run of targets. A model
    that always takes the likeliest token writes it just if each of its tokens is the likeliest
    after those before it.
    """
    is_target = targets != -1
    is_first = is_target & ~F.pad(is_target, (1, 0))[:, :-1]
    number = is_first.cumsum(1)  # the number of a target's answer, from 1 on
    is_wrong = is_target & (logits.argmax(-1) != targets)
    n_wrong = torch.zeros_like(F.pad(number, (0, 1))).scatter_add(1, number, is_wrong.long())
    n_answers = is_first.sum(1)
    return n_answers - (n_wrong > 0).sum(1), n_answers


@torch.no_grad()
def share_answered(
    model: GPT,
    compute: ComputeMode,
    batches: Iterable[tuple[Tensor, Tensor, float]],
    dist: DistContext,
) -> float:
    """Return the share of the answers in the batches of all ranks that the model writes exactly;
    NaN without one.
    """
    counts = torch.zeros(2, dtype=torch.float64)
    model.eval()
    for x, y, _ in batches:
        with autocast(dist.device, compute.dtype):
            logits = model(x)[0]
        counts += torch.stack([n.sum() for n in exact_answers(logits, y)]).cpu()
    model.train()
    n_exact, n_answers = dist.sum(counts).tolist()
    return n_exact / n_answers if n_answers else math.nan


@torch.no_grad()
def evaluate(
    model: GPT,
    compute: ComputeMode,
    batches: Iterable[tuple[Tensor, Tensor, float]],
    dist: DistContext,
    loss_of: Pass,
) -> Evaluation:
    """Return the mean loss over the batches of all ranks, without dropout and without the further
    losses of training.

    batches: inputs (B, T), targets (B, T) and the number of rows that count; with a loss mask that
    is a fraction, learned targets / block_size. loss_of: evaluation_loss of x and y, or its graph.
    The standard error comes from the spread of the batches' means.
    """
    losses = []
    counts = []
    # On a CPU, evaluate uncompiled: another compilation takes longer than it saves.
    is_eager = compute.compiled and dist.device.type == "cpu"
    stance = torch.compiler.set_stance("force_eager") if is_eager else nullcontext()
    model.eval()
    try:
        with stance:
            for x, y, rows in batches:
                # Compute padding, too: ranks that share weights need each other.
                loss = loss_of(x, y)["loss"]
                if rows:
                    losses.append(loss * rows)
                    counts.append(rows)
    finally:
        model.train()
        free_gathered(model)
        free_unused(dist.device)  # a step makes tensors of other sizes

    sums = torch.tensor([loss.item() for loss in losses], dtype=torch.float64)
    rows_of = torch.tensor(counts, dtype=torch.float64)
    own = torch.tensor((sums.sum(), rows_of.sum(), len(counts)), dtype=torch.float64)
    loss_sum, n_rows, n_batches = dist.sum(own).tolist()
    mean = loss_sum / n_rows if n_rows else math.nan
    squares = dist.sum((sums - mean * rows_of).square().sum()).item()
    error = None
    if n_batches >= BATCHES_FOR_ERROR:
        error = math.sqrt(squares * n_batches / (n_batches - 1)) / n_rows
    batch_losses = tuple(round(loss, 6) for loss in (sums / rows_of).tolist())
    return Evaluation(mean, error, round(n_rows), batch_losses)
