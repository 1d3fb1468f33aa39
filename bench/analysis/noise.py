"""How sure a mean and a difference of means are, from a few repeats: seeds, rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# 97.5% quantiles of Student's t for 1 to 30 degrees of freedom, as printed in statistical tables.
T975 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228]
T975 += [2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086]
T975 += [2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042]


def t975(freedom: float) -> float:
    """The 97.5% quantile of Student's t, of the next lower whole number of degrees of freedom, at least 1."""
    return T975[max(1, int(freedom)) - 1] if freedom < 31 else 1.96 + 2.5 / freedom


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """(mean, half width of its 95% interval); None for the width of a single value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None
    return mean, t975(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float | None]:
    """(mean of b - mean of a, half width of its 95% interval): Welch's, None where either is a single value.

    Welch, Biometrika 34 (1947): the variances may differ.
    """
    d = statistics.fmean(b) - statistics.fmean(a)
    if len(a) < 2 or len(b) < 2:
        return d, None
    va, vb = (statistics.variance(x) / len(x) for x in (a, b))
    if va + vb == 0:
        return d, 0.0
    freedom = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
    return d, t975(freedom) * math.sqrt(va + vb)
