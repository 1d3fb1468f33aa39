"""How sure a mean and a difference of means are, from a few repeats: seeds, or rounds of a benchmark."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# 97.5% quantiles of Student's t for 1 to 30 degrees of freedom, as printed in statistical tables.
T975 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228]
T975 += [2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086]
T975 += [2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042]


def t975(freedom: float) -> float:
    """The 97.5% quantile of Student's t for `freedom` degrees of freedom, rounded down, but 1 at least."""
    if freedom >= 31:
        return 1.96 + 2.5 / freedom
    return T975[max(1, int(freedom)) - 1]


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """(mean, half the width of its 95% interval); the half width is None for a single value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None
    return mean, t975(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float | None]:
    """(mean of b - mean of a, half the width of its 95% interval), by Welch's test.

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
    return gap, t975(freedom) * math.sqrt(variance)
