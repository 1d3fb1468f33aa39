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
factor, and E is divided by the cube of the ratio of the arms' standard deviations, which only ever lowers E. Simulated,
false answers stay below 5% also where the noise is exponential and one arm scatters four times as much
(bench/results/2026-11-26-ask-simulated.md).

bench/compare.py does not know how often its user has looked. `interval` and `welch` are ordinary 95% intervals.
"""

from __future__ import annotations

import functools
import math
import statistics
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
FEWEST_BATCHES = 8  # of an evaluation, for an error of the text
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
    var_a: np.ndarray
    var_b: np.ndarray

    @classmethod
    def of(cls, a: np.ndarray, b: np.ndarray) -> Looks:
        """a, b: losses by run, (..., n). Runs that all end at one loss, as diverged ones do, scatter as the others."""
        n = np.arange(LEAST, a.shape[-1] + 1)
        gap, var_gap = moments(a - b)
        var_a, var_b = moments(a)[1], moments(b)[1]
        return cls(n, gap, var_gap, np.where(var_a == TINY, var_b, var_a), np.where(var_b == TINY, var_a, var_b))

    def log_e(self, distance: Any) -> np.ndarray:
        """The logarithm of E at each look, for a true difference that lies `distance` from `gap`."""
        square = np.square(distance)
        paired = log_bayes_factor(self.n * square / self.var_gap, self.n, self.n - 1)
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
    """The difference of two arms; a[i] and b[i] have the same seed."""
    x = np.array(a, float)
    y = np.array(b, float)
    n = len(x)
    d = float((x - y).mean())
    if n < LEAST:
        return Estimate(d, -math.inf, math.inf, n)
    looks = Looks.of(x, y)
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


# ---- ordinary intervals --------------------------------------------------------------------------------------


@functools.cache
def t_quantile(freedom: int, error: float = ALPHA) -> float:
    """The t that is exceeded up or down with probability `error`, for this many degrees of freedom.

    With t = sqrt(freedom) tan(angle), the density of the angle is proportional to cos(angle)^(freedom - 1).
    """
    freedom = min(freedom, 10_000)
    angles = np.linspace(0, math.pi / 2, 100_001)
    density = np.cos(angles) ** (freedom - 1)
    share = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(np.interp(1 - error, share / share[-1], angles))


def interval(values: Values) -> tuple[float, float | None]:
    """(mean, half the width of its 95% interval); the half width is None for a single value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None
    return mean, t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def welch(
    a: Values, b: Values, error: float = ALPHA, noise: tuple[float, int] | None = None
) -> tuple[float, float | None]:
    """(mean of b - mean of a, half the width of its 1 - error interval), of arms whose variances may differ.

    noise: (variance between runs, its degrees of freedom), as known from elsewhere, for an arm of a single run. The
    half width is None where such an arm has none. Welch, Biometrika 34 (1947).
    """
    gap = statistics.fmean(b) - statistics.fmean(a)
    if len(a) < 2 or len(b) < 2:
        if noise is None:
            return gap, None
        variance, freedom = noise
        return gap, t_quantile(freedom, error) * math.sqrt(variance * (1 / len(a) + 1 / len(b)))
    variance_a = statistics.variance(a) / len(a)  # of a's mean
    variance_b = statistics.variance(b) / len(b)
    variance = variance_a + variance_b
    if variance == 0:
        return gap, 0.0
    exact = variance**2 / (variance_a**2 / (len(a) - 1) + variance_b**2 / (len(b) - 1))
    return gap, t_quantile(max(1, int(exact)), error) * math.sqrt(variance)


def error_of_text(a: Sequence[Values], b: Sequence[Values]) -> float | None:
    """Half the 95% interval that another text of this size would leave to the difference of two arms with these seeds.

    a, b: by run, the loss of each batch of its evaluation. From the differences batch by batch; None where the runs'
    batches are not the same, or too few.
    """
    sizes = {len(losses) for losses in (*a, *b)}
    if len(sizes) != 1 or min(sizes) < FEWEST_BATCHES:
        return None
    gaps = np.array(a) - np.array(b)
    return interval(gaps.mean(axis=0).tolist())[1]


# ---- the price -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noise:
    """What the runs so far say about noise."""

    gaps: np.ndarray  # (n,) differences of runs with the same seed less their mean
    sums: np.ndarray  # (n,) the same of their sums
    earlier: float = 0.0  # variance between seeds of earlier runs of these arms
    earlier_df: int = 0  # its degrees of freedom

    @property
    def sd(self) -> float:
        """The standard deviation between seeds, as it is estimated."""
        squares = float(np.square(self.gaps).sum() + np.square(self.sums).sum()) / 2
        df = 2 * len(self.gaps) - 2
        return math.sqrt((squares + self.earlier_df * self.earlier) / (df + self.earlier_df))


def noise_of(a: Values, b: Values, earlier: Sequence[Values] = ()) -> Noise:
    """Of two arms with the same seeds. earlier: groups of runs that differ in seed."""
    x = np.array(a, float)
    y = np.array(b, float)
    groups = [np.array(group, float) for group in earlier if len(group) > 1]
    df = sum(len(group) - 1 for group in groups)
    squares = float(sum(np.square(group - group.mean()).sum() for group in groups))
    gaps = x - y
    sums = x + y
    return Noise(gaps - gaps.mean(), sums - sums.mean(), squares / max(1, df), df)


def draw_noise(noise: Noise, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(variance of a difference, of a sum) that the runs may have, each (SIMULATED,).

    A sum of squares over its true variance has the chi-squared distribution. Earlier runs weigh the draws by their
    likelihood, and a little by how little two arms share their seeds' luck: a few pairs hardly tell that.
    """
    n = SIMULATED * 20
    df = len(noise.gaps) - 1
    gap = max(TINY, float(np.square(noise.gaps).sum())) / draw.chisquare(df, n)
    total = max(TINY, float(np.square(noise.sums).sum())) / draw.chisquare(df, n)
    of_a_run = (gap + total) / 4
    weights = np.full(n, 1 / n)
    if noise.earlier_df and noise.earlier:
        log_weight = -noise.earlier_df / 2 * (np.log(of_a_run) + noise.earlier / of_a_run)
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
    total = np.sqrt(var_total)[:, None] * draw.normal(size=(SIMULATED, runs))
    total[:, :n] = total[:, :n].mean(1, keepdims=True) + noise.sums
    looks = Looks.of((total + gap) / 2 + effect, (total - gap) / 2)
    found = (looks.log_e(looks.gap) >= math.log(1 / alpha)) & (looks.gap > 0)
    found[:, : max(0, n + 1 - LEAST)] = False  # it is open after n runs
    return np.where(found.any(1), found.argmax(1) + LEAST, runs + 1)
