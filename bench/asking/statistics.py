"""How a question is decided: one interval that may be checked after every run.

Whoever checks after each run and stops as soon as an ordinary 95% interval leaves out zero is wrong
far more often than 5%. The interval here is **anytime-valid**, a confidence sequence: with
probability 1 - alpha it holds the true difference of two arms' losses at all checks together.

1.  The t statistic of n paired differences has nu = n - 1 degrees of freedom and k = n effective
    runs; that of two samples of n runs each has nu = 2n - 2 and k = n / 2.
2.  The likelihood of t if the true difference in standard deviations is delta ~ N(0, g), over that
    if it is 0, is

        B(t) = (1 + k g)^(-1/2) * [ (1 + t^2/nu) / (1 + t^2/(nu (1 + k g))) ]^((nu + 1)/2)

    (Rouder, Speckman, Sun, Morey and Iverson, Psychonomic Bulletin & Review 16, 2009, with a fixed
    variance g).
3.  While the true difference is zero, B is a nonnegative martingale of mean 1 as runs are added
    (Hendriksen, de Heide and Gruenwald, Bayesian Analysis 16, 2021; Wang and Ramdas, arXiv
    2310.03722). So is the mean E of the paired and the unpaired factor, an **e-value**: by Ville's
    inequality it ever reaches 1/alpha with probability at most alpha.
4.  The differences d for which E of (a - b - d) stays below 1/alpha are the interval of a check.
    Intervals are intersected over all checks, so a later one never takes back what an earlier one
    has excluded.

This is theory of normal noise. Arms that are skewed and scatter differently break it: a few runs
that happen to lie close together hide how much their arm scatters. So the larger of the two
variances stands for both in the unpaired factor, and E is divided by the cube of the ratio of the
arms' standard deviations, which only ever lowers E. docs/asking.md has the rates that simulations
measure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Values = Sequence[float] | np.ndarray  # losses of the runs of an arm

ALPHA = 0.05
EFFECT_VARIANCE = 4.0  # g: differences of about two standard deviations between seeds are expected
LEAST = 4  # runs of each arm before anything is decided
TINY = 1e-30  # variance of runs that do not differ


@dataclass(frozen=True)
class Estimate:
    """The difference of two arms: mean loss of the first less the second's; above 0, the second is
    better.
    """

    d: float
    low: float  # of its anytime-valid interval; minus infinity before LEAST runs
    high: float
    n: int  # runs of each arm

    @property
    def known(self) -> bool:
        """Return True if there is an interval."""
        return math.isfinite(self.high - self.low)


# ---- the interval --------------------------------------------------------------------------------


def moments(a: Values, b: Values) -> tuple[np.ndarray, ...]:
    """Return n, and after n runs of each arm the mean of a less that of b, and the variances of the
    paired differences, of a and of b: arrays (..., checks), a check for each n from LEAST on.

    a, b: losses by run, (..., runs). Runs that all end at one loss, as diverged ones do, are taken
    to scatter as the other arm's.
    """
    x = np.asarray(a, float)
    y = np.asarray(b, float)
    n = np.arange(LEAST, x.shape[-1] + 1)
    gap = np.cumsum(x - y, -1)[..., n - 1] / n
    var_a = variances(x, n)
    var_b = variances(y, n)
    scatter_a = np.where(var_a == TINY, var_b, var_a)
    scatter_b = np.where(var_b == TINY, var_a, var_b)
    return n, gap, variances(x - y, n), scatter_a, scatter_b


def variances(x: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Return the variance of the first n of x along the last axis, for each n."""
    return np.maximum(np.stack([x[..., :k].var(-1, ddof=1) for k in n], -1), TINY)


def log_e(
    distance: np.ndarray, n: np.ndarray, var_gap: np.ndarray, var_a: np.ndarray, var_b: np.ndarray
) -> np.ndarray:
    """Return the logarithm of E at each check, for a true difference that lies `distance` from the
    one that was found.
    """
    square = np.square(distance)
    paired = log_bayes_factor(n * square / var_gap, n, n - 1)
    unpaired = log_bayes_factor(n / 2 * square / np.maximum(var_a, var_b), n / 2, 2 * n - 2)
    log_sd_ratio = np.abs(np.log(var_a / var_b)) / 2
    return np.logaddexp(paired, unpaired) - math.log(2) - 3 * log_sd_ratio


def log_bayes_factor(t_square: np.ndarray, k: np.ndarray, nu: np.ndarray) -> np.ndarray:
    """Return the logarithm of B(t), step 2 above. k: effective number of runs; nu: degrees of
    freedom.
    """
    shrink = 1 + k * EFFECT_VARIANCE
    ratio = np.log1p(t_square / nu) - np.log1p(t_square / (nu * shrink))
    return (nu + 1) / 2 * ratio - np.log(shrink) / 2


def difference(a: Values, b: Values, alpha: float = ALPHA) -> Estimate:
    """Return the difference of two arms; a[i] and b[i] have the same seed."""
    runs = len(a)
    if runs < LEAST:
        return Estimate(float(np.subtract(a, b).mean()), -math.inf, math.inf, runs)
    n, gap, *scatter = moments(a, b)
    goal = math.log(1 / alpha)
    # Half the width of each check's interval: bisect, since E grows with the distance.
    inner = np.zeros(len(n))
    outer = 1e6 * np.sqrt(scatter[0])
    for _ in range(40):
        middle = (inner + outer) / 2
        is_excluded = log_e(middle, n, *scatter) > goal
        outer = np.where(is_excluded, middle, outer)
        inner = np.where(is_excluded, inner, middle)
    # It is infinite if no difference could be excluded.
    half = np.where(log_e(outer, n, *scatter) > goal, outer, np.inf)
    low = np.maximum.accumulate(gap - half)
    high = np.minimum.accumulate(gap + half)
    last = np.flatnonzero(low <= high)[-1]  # they cross with probability alpha at most
    return Estimate(float(gap[-1]), float(low[last]), float(high[last]), runs)


def decide(e: Estimate, min_effect: float) -> str:
    """Return better, worse, same or open, of the first arm. same: the whole interval lies within
    +-min_effect, an equivalence test.

    A difference below `min_effect` does not matter, so same comes first. The interval is a
    confidence sequence, so all three may be asked at each check: one of them is wrong, ever, with
    probability at most alpha.
    """
    if max(-e.low, e.high) < min_effect:
        return "same"
    if e.high < 0:
        return "better"
    return "worse" if e.low > 0 else "open"
