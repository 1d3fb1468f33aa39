"""How sure a mean and a difference of means are, from a few repeats: seeds, or batches of an evaluation."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence

import numpy as np


@functools.cache
def t_quantile(freedom: int, error: float = 0.05) -> float:
    """The t that is exceeded up or down with probability `error`, for this many degrees of freedom.

    With t = sqrt(freedom) tan(angle), the density of the angle is proportional to cos(angle)^(freedom - 1).
    """
    freedom = min(freedom, 10_000)
    angles = np.linspace(0, math.pi / 2, 100_001)
    density = np.cos(angles) ** (freedom - 1)
    share = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(np.interp(1 - error, share / share[-1], angles))


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """(mean, half the width of its 95% interval); the half width is None for a single value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None
    return mean, t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def difference(a: Sequence[float], b: Sequence[float], error: float = 0.05) -> tuple[float, float | None]:
    """(mean of b - mean of a, half the width of its 1 - error interval), by Welch's test.

    The half width is None if a or b is a single value. Welch, Biometrika 34 (1947): the variances may differ.
    """
    gap = statistics.fmean(b) - statistics.fmean(a)
    if len(a) < 2 or len(b) < 2:
        return gap, None
    variance_a = statistics.variance(a) / len(a)  # of a's mean
    variance_b = statistics.variance(b) / len(b)
    variance = variance_a + variance_b
    if variance == 0:
        return gap, 0.0
    freedom = variance**2 / (variance_a**2 / (len(a) - 1) + variance_b**2 / (len(b) - 1))
    return gap, t_quantile(max(1, int(freedom)), error) * math.sqrt(variance)
