"""How a question is decided: one interval that may be looked at after every run, and what a difference costs.

Whoever looks after each run and stops as soon as an ordinary 95% interval leaves out zero is wrong far more often than
5%. The interval here is **anytime-valid**, a confidence sequence: with probability 1 - alpha it holds the true
difference of two arms' losses at all looks together.

1.  The t statistic of n paired differences has nu = n - 1 degrees of freedom and k = n effective runs; that of two
    samples of n runs each has nu = 2n - 2 and k = n / 2.
2.  The likelihood of t where the true difference in standard deviations is delta ~ N(0, g), over that where it is 0, is

        B(t) = (1 + k g)^(-1/2) * [ (1 + t^2/nu) / (1 + t^2/(nu (1 + k g))) ]^((nu + 1)/2)

    (Rouder, Speckman, Sun, Morey and Iverson, Psychonomic Bulletin & Review 16, 2009, with a fixed variance g).
3.  While the true difference is zero, B is a nonnegative martingale of mean 1 as runs are added (Hendriksen, de Heide
    and Gruenwald, Bayesian Analysis 16, 2021; Wang and Ramdas, arXiv 2310.03722). So is the mean E of the paired and
    the unpaired factor, an **e-value**: by Ville's inequality it ever reaches 1/alpha with probability at most alpha.
4.  The differences d for which E of (a - b - d) stays below 1/alpha are the interval of a look. Intervals are
    intersected over all looks, so a later look never takes back what an earlier one has excluded.

This is theory of normal noise. Arms that are skewed and scatter differently break it: a few runs that happen to lie
close together hide how much their arm scatters. So the larger of the two variances stands for both in the unpaired
factor, and E is divided by the cube of the ratio of the arms' standard deviations; one sample, beside a known number,
has its E multiplied by (1 - 2/n)^4. Both only ever lower E. Simulated, false answers stay below 5% also where the noise
is exponential and one arm scatters four times as much (bench/results/2026-11-26-ask-simulated.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Values = Sequence[float] | np.ndarray  # of the runs of an arm

ALPHA = 0.05
POWER = 0.8  # share of questions that the high end of a price is enough for
EARLY = 0.1  # share of questions that the low end of a price is enough for
EFFECT_VARIANCE = 4.0  # g: differences of about two standard deviations between seeds are expected
LEAST = 4  # runs of each arm before anything is decided
PILOT = 3  # runs of each arm, after which the price is known
MOST = 1000  # runs of each arm; prices go no further
SIMULATED = 500  # questions that a price is read from
TINY = 1e-30  # variance of runs that do not differ


@dataclass(frozen=True)
class Estimate:
    """The difference of two arms: mean loss of the first less that of the second; above 0, the second is better."""

    d: float
    low: float  # of its anytime-valid interval; minus infinity before LEAST runs
    high: float
    n: int  # runs of each arm
    e: float = 1.0  # the e-value against no difference, at the last look

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return math.isfinite(self.high - self.low)


# ---- e-values ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Looks:
    """What is known of questions after LEAST and more runs of each arm: arrays of the shape (..., looks)."""

    n: np.ndarray  # (looks,) runs of each arm
    gap: np.ndarray  # mean of a less mean of b
    var_gap: np.ndarray  # of the paired differences
    var_a: np.ndarray | None = None  # None where there is one sample, of differences only
    var_b: np.ndarray | None = None

    @classmethod
    def of(cls, gaps: np.ndarray, a: np.ndarray | None = None, b: np.ndarray | None = None) -> Looks:
        """gaps: differences by run, (..., n); a and b: what they are of, where the arms are two samples."""
        mean, var_gap = moments(gaps)
        n = np.arange(LEAST, gaps.shape[-1] + 1)
        if a is None or b is None:
            return cls(n, mean, var_gap)
        return cls(n, mean, var_gap, moments(a)[1], moments(b)[1])

    def log_e(self, distance: Any) -> np.ndarray:
        """The logarithm of E at each look, for a true difference that lies `distance` from `gap`."""
        square = np.square(distance)
        paired = log_bayes_factor(self.n * square / self.var_gap, self.n, self.n - 1)
        if self.var_a is None or self.var_b is None:
            return paired + 4 * np.log(1 - 2 / self.n)
        larger = np.maximum(self.var_a, self.var_b)
        unpaired = log_bayes_factor(self.n / 2 * square / larger, self.n / 2, 2 * self.n - 2)
        uneven = 1.5 * np.abs(np.log(self.var_a / self.var_b))
        return np.logaddexp(paired, unpaired) - math.log(2) - uneven

    def half(self, alpha: float) -> np.ndarray:
        """Half the width of the interval of each look; infinite where no difference could be excluded."""
        goal = math.log(1 / alpha)
        high = 1e6 * np.sqrt(self.var_gap) + np.sqrt(TINY)
        low = np.zeros_like(high)
        is_finite = self.log_e(high) > goal
        for _ in range(60):
            middle = (low + high) / 2
            is_excluded = self.log_e(middle) > goal
            high = np.where(is_excluded, middle, high)
            low = np.where(is_excluded, low, middle)
        return np.where(is_finite, high, np.inf)


def moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(mean, variance) of the first n of x along the last axis, for each n from LEAST on."""
    n = np.arange(1, x.shape[-1] + 1)
    centre = x[..., :1]
    mean = np.cumsum(x - centre, -1) / n
    variance = (np.cumsum((x - centre) ** 2, -1) - n * mean**2) / np.maximum(n - 1, 1)
    return (mean + centre)[..., LEAST - 1 :], np.maximum(variance, TINY)[..., LEAST - 1 :]


def log_bayes_factor(t_square: Any, k: Any, nu: Any) -> np.ndarray:
    """Step 2 above. k: effective number of runs; nu: degrees of freedom."""
    shrink = 1 + k * EFFECT_VARIANCE
    ratio = np.log1p(t_square / nu) - np.log1p(t_square / (nu * shrink))
    return (nu + 1) / 2 * ratio - np.log(shrink) / 2


# ---- intervals -----------------------------------------------------------------------------------------------


def difference(a: Values, b: Values, alpha: float = ALPHA) -> Estimate:
    """The difference of two arms; a[i] and b[i] have the same seed.

    An arm whose values are all equal is a known number, with which there is only one sample.
    """
    x, y = np.array(a, float), np.array(b, float)
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return of_gaps(x - y, alpha)
    return estimate(x - y, Looks.of(x - y, x, y), alpha)


def of_gaps(gaps: np.ndarray, alpha: float = ALPHA) -> Estimate:
    """The mean of independent differences (n,)."""
    return estimate(gaps, Looks.of(gaps), alpha)


def estimate(gaps: np.ndarray, looks: Looks, alpha: float) -> Estimate:
    n = len(gaps)
    d = float(gaps.mean())
    if n < LEAST:
        return Estimate(d, -math.inf, math.inf, n)
    half = looks.half(alpha)
    low = np.maximum.accumulate(looks.gap - half)
    high = np.minimum.accumulate(looks.gap + half)
    last = np.flatnonzero(low <= high)[-1]  # they cross with probability alpha at most
    e = math.exp(min(700.0, float(looks.log_e(looks.gap)[-1])))
    return Estimate(d, float(low[last]), float(high[last]), n, e)


def verdict(e: Estimate, min_effect: float) -> str:
    """better, worse, same or open. same: the whole interval lies within +-min_effect, an equivalence test.

    A difference below `min_effect` does not matter, so same comes first. The interval is a confidence sequence, so all
    three may be asked at each look: one of them is wrong, ever, with probability at most alpha.
    """
    if max(-e.low, e.high) < min_effect:
        return "same"
    if e.low > 0:
        return "better"
    if e.high < 0:
        return "worse"
    return "open"


def alpha_of_each(intervals: int) -> float:
    """The share of ALPHA for each of several intervals, so that all of them hold together (Bonferroni)."""
    return ALPHA / max(1, intervals)


def e_bh(e_values: Values, alpha: float = ALPHA) -> list[int]:
    """Which of these null hypotheses are rejected so that at most alpha of the rejections are false, on average.

    However the e-values depend on each other (Wang and Ramdas, "False discovery rate control with e-values", Journal of
    the Royal Statistical Society B 84, 2022): the k largest, for the largest k of which all are at least m / (alpha k).
    """
    order = sorted(range(len(e_values)), key=lambda i: -e_values[i])
    enough = [k for k, i in enumerate(order, 1) if e_values[i] >= len(e_values) / (alpha * k)]
    return sorted(order[: max(enough, default=0)])


# ---- the price -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noise:
    """What the runs so far say about noise."""

    gaps: np.ndarray  # (n,) differences of runs with the same seed less their mean; of runs, where there is one arm
    sums: np.ndarray | None  # the same of their sums; None where the other arm is a known number
    earlier: float = 0.0  # variance between seeds of earlier runs of these arms
    earlier_df: int = 0  # its degrees of freedom

    @property
    def sd(self) -> float:
        """The standard deviation between seeds, as it is estimated."""
        squares = float(np.square(self.gaps).sum())
        df = len(self.gaps) - 1
        if self.sums is not None:
            squares = (squares + float(np.square(self.sums).sum())) / 2
            df = 2 * df
        return math.sqrt((squares + self.earlier_df * self.earlier) / (df + self.earlier_df))


def noise_of(a: Values, b: Values | None, earlier: Sequence[Values] = ()) -> Noise:
    """Of two arms with the same seeds; b is None for a known number. earlier: groups of runs that differ in seed."""
    x = np.array(a, float)
    y = np.zeros_like(x) if b is None else np.array(b, float)
    groups = [np.array(group, float) for group in earlier if len(group) > 1]
    df = sum(len(group) - 1 for group in groups)
    squares = float(sum(np.square(group - group.mean()).sum() for group in groups))
    gaps = x - y
    sums = x + y
    return Noise(gaps - gaps.mean(), None if b is None else sums - sums.mean(), squares / max(1, df), df)


def draw_noise(noise: Noise, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(variance of a difference, of a sum) that the runs may have, each (SIMULATED,).

    A sum of squares over its true variance has the chi-squared distribution. Earlier runs weigh the draws by their
    likelihood, and a little by how little two arms share their seeds' luck: a few pairs hardly tell that.
    """
    n = SIMULATED * 20
    df = len(noise.gaps) - 1
    gap = max(TINY, float(np.square(noise.gaps).sum())) / draw.chisquare(df, n)
    total = np.zeros(n)
    of_a_run = gap
    if noise.sums is not None:
        total = max(TINY, float(np.square(noise.sums).sum())) / draw.chisquare(df, n)
        of_a_run = (gap + total) / 4
    weights = np.full(n, 1 / n)
    if noise.earlier_df and noise.earlier:
        log_weight = -noise.earlier_df / 2 * (np.log(of_a_run) + noise.earlier / of_a_run)
        if noise.sums is not None:
            log_weight += np.log(gap / of_a_run) / 4
        weights = np.exp(log_weight - log_weight.max())
        weights /= weights.sum()
    chosen = draw.choice(n, SIMULATED, p=weights)
    return gap[chosen], total[chosen]


def price(noise: Noise, effect: float, alpha: float = ALPHA) -> tuple[int, int]:
    """(low, high) runs of each arm that find a difference of `effect`: EARLY of questions end by low, POWER by high.

    MOST + 1 where MOST runs are not enough. The questions are simulated: their runs so far scatter as they do, and the
    rest has the noise that they leave possible.
    """
    for runs in (48, 200, MOST):
        if runs < len(noise.gaps):
            continue
        ends, counts = np.unique(decided_after(noise, effect, alpha, runs), return_counts=True)
        share = np.cumsum(counts) / SIMULATED
        low = int(ends[np.abs(share - EARLY).argmin()])
        high = int(ends[np.abs(share - POWER).argmin()])
        if share[ends <= runs].max(initial=0.0) >= POWER:
            return low, high
    return low, MOST + 1


def decided_after(noise: Noise, effect: float, alpha: float, runs: int) -> np.ndarray:
    """The number of runs (SIMULATED,) after which simulated questions find `effect`; runs + 1 for those that do not."""
    draw = np.random.default_rng(0)
    n = len(noise.gaps)
    var_gap, var_total = draw_noise(noise, draw)
    gap = np.sqrt(var_gap)[:, None] * draw.normal(size=(SIMULATED, runs))
    gap[:, :n] = gap[:, :n].mean(1, keepdims=True) + noise.gaps
    if noise.sums is None:
        looks = Looks.of(gap + effect)
    else:
        total = np.sqrt(var_total)[:, None] * draw.normal(size=(SIMULATED, runs))
        total[:, :n] = total[:, :n].mean(1, keepdims=True) + noise.sums
        looks = Looks.of(gap + effect, (total + gap) / 2 + effect, (total - gap) / 2)
    found = (looks.log_e(looks.gap) >= math.log(1 / alpha)) & (looks.gap > 0)
    found[:, : max(0, n + 1 - LEAST)] = False  # it is open after n runs
    return np.where(found.any(1), found.argmax(1) + LEAST, runs + 1)
