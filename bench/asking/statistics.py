"""How a question is decided: intervals that hold however often one looks at them, what they cost, and the verdict.

A question compares the losses of runs of two arms. The loss of a run depends on its seed; between seeds it is taken to
be normally distributed. Whoever looks after each run and stops as soon as an ordinary 95% interval leaves out zero is
wrong far more often than 5%. An **anytime-valid** interval (a confidence sequence) may be looked at after every run:
with probability 1 - alpha it holds the true difference at all looks together. It is 1.5 to 2.5 times as wide here.

The derivation, in four steps. n_a and n_b runs have the means a and b and the pooled standard deviation s:

1.  t = (a - b) / (s sqrt(1/n_a + 1/n_b)) has nu = n_a + n_b - 2 degrees of freedom. For paired differences t is that of
    one sample of n differences, with nu = n - 1. What follows needs only t, nu and the effective number
    k = n_a n_b / (n_a + n_b), which is n for pairs.
2.  Suppose the true difference is delta standard deviations. The ratio of the likelihood of t under delta ~ N(0, g) to
    that under delta = 0, where the unknown mean and scale have right Haar priors, is the Bayes factor

        B(t) = (1 + k g)^(-1/2) * [ (1 + t^2/nu) / (1 + t^2/(nu (1 + k g))) ]^((nu + 1)/2).

3.  While the true difference is zero, B is a nonnegative martingale of mean 1 as runs are added (Hendriksen, de Heide
    and Gruenwald, "Optional stopping with Bayes factors", Bayesian Analysis 16, 2021; for one sample it is a t-test
    martingale of Wang and Ramdas, "Anytime-valid t-tests and confidence sequences for Gaussian means with unknown
    variance", 2024, arXiv 2310.03722). By Ville's inequality it ever reaches 1/alpha with probability at most alpha.
4.  So the values d for which B of (a - b - d) stays below 1/alpha are a confidence sequence. Solving B(t) = 1/alpha
    for t gives `critical_t`, which takes the place of Student's quantile.

The formula of step 2 is that of Rouder, Speckman, Sun, Morey and Iverson, Psychonomic Bulletin & Review 16 (2009),
with a fixed variance g of the effect.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

ALPHA = 0.05
POWER = 0.8
EFFECT_VARIANCE = 4.0  # g: differences of about two standard deviations between seeds are expected
LEAST = 4  # runs of each arm before anything is decided: with 3, no difference below 5 standard deviations can be
SURE = 0.9  # of a limit of the noise, from the few runs of a pilot
MOST = 10_000  # runs of an arm; nobody waits for more


@dataclass(frozen=True)
class Estimate:
    """The difference of two arms: mean loss of the first less that of the second; above 0, the second is better."""

    d: float
    half: float  # half the width of its anytime-valid interval; infinite before LEAST runs
    n: int  # runs of each arm
    paired: bool  # whether it stands on differences between runs with the same seed
    sd: float  # between seeds: of a difference where paired, else of a run

    @property
    def low(self) -> float:
        return self.d - self.half

    @property
    def high(self) -> float:
        return self.d + self.half


# ---- intervals -----------------------------------------------------------------------------------------------


def critical_t(k: float, nu: float, alpha: float = ALPHA) -> float:
    """The t beyond which B(t) > 1/alpha (step 4); infinite where no t is.

    k: effective number of runs; nu: degrees of freedom. With r = ((1 + k g) / alpha^2)^(1/(nu + 1)), B(t) = 1/alpha
    reads (1 + t^2/nu) = r (1 + t^2/(nu (1 + k g))), so t^2 = nu (r - 1) / (1 - r / (1 + k g)).
    """
    shrink = 1 + k * EFFECT_VARIANCE
    r = (shrink / alpha**2) ** (1 / (nu + 1))
    if r >= shrink:
        return math.inf
    return math.sqrt(nu * (r - 1) / (1 - r / shrink))


def of_one_sample(values: Sequence[float], alpha: float = ALPHA) -> Estimate:
    """The mean of independent values, such as differences of pairs, with its interval."""
    n = len(values)
    mean = statistics.fmean(values)
    sd = statistics.stdev(values) if n > 1 else math.nan
    half = critical_t(n, n - 1, alpha) * sd / math.sqrt(n) if n >= LEAST else math.inf
    return Estimate(mean, half, n, True, sd)


def of_two_samples(a: Sequence[float], b: Sequence[float], alpha: float = ALPHA) -> Estimate:
    """The mean of a less the mean of b, of equally many runs that are not paired; their variances taken as equal."""
    n = len(a)
    gap = statistics.fmean(a) - statistics.fmean(b)
    sd = math.sqrt((statistics.variance(a) + statistics.variance(b)) / 2) if n > 1 else math.nan
    half = critical_t(n / 2, 2 * n - 2, alpha) * sd * math.sqrt(2 / n) if n >= LEAST else math.inf
    return Estimate(gap, half, n, False, sd)


def difference(a: Sequence[float], b: Sequence[float], alpha: float = ALPHA) -> Estimate:
    """The difference of two arms; a[i] and b[i] have the same seed.

    The first LEAST pairs decide, once for all looks, whether the differences are analysed as pairs: where that gives
    the narrower interval. Choosing anew at each look would find the narrow one by luck. An arm whose values are all
    equal is a known number, with which there is only one sample.
    """
    first_a = a[:LEAST]
    first_b = b[:LEAST]
    if len(set(first_a)) == 1 or len(set(first_b)) == 1:
        return of_one_sample([x - y for x, y in zip(a, b, strict=True)], alpha)
    of_pairs = of_one_sample([x - y for x, y in zip(first_a, first_b, strict=True)], alpha)
    if of_pairs.half < of_two_samples(first_a, first_b, alpha).half:
        return of_one_sample([x - y for x, y in zip(a, b, strict=True)], alpha)
    return of_two_samples(a, b, alpha)


def interaction(
    base: Sequence[float], alone: Sequence[Sequence[float]], together: Sequence[float], alpha: float = ALPHA
) -> Estimate:
    """By how much changes together gain more than the sum of what each gains alone, seed by seed.

    base: losses without a change; alone: of each change (two of them are a 2 x 2 design); together: with all of them.
    """
    gains = [a - b for a, b in zip(base, together, strict=True)]
    for one in alone:
        gains = [gain - (a - b) for gain, a, b in zip(gains, base, one, strict=True)]
    return of_one_sample(gains, alpha)


# ---- the verdict ---------------------------------------------------------------------------------------------


def verdict(e: Estimate, resolve: float | None) -> str:
    """better, worse, same or open. same: the whole interval lies within +-resolve, an equivalence test.

    A difference below `resolve` does not matter, so same comes first. The interval is a confidence sequence, so all
    three may be asked at each look: one of them is wrong, ever, with probability at most alpha.
    """
    if resolve is not None and max(-e.low, e.high) < resolve:
        return "same"
    if e.low > 0:
        return "better"
    if e.high < 0:
        return "worse"
    return "open"


def alpha_of_each(intervals: int) -> float:
    """The share of ALPHA for each of several intervals, so that all of them hold together (Bonferroni)."""
    return ALPHA / max(1, intervals)


# ---- the price -----------------------------------------------------------------------------------------------


def smallest(n: int, sd: float, paired: bool, alpha: float = ALPHA) -> float:
    """The smallest true difference that n runs of each arm tell from zero with probability POWER; infinite for few.

    sd: as Estimate's. t then has the noncentral distribution with delta = d / standard error. Stopping early can only
    raise the power; t below -critical_t, a wrong sign, is left out.
    """
    if n < LEAST:
        return math.inf
    k = n if paired else n / 2
    nu = n - 1 if paired else 2 * n - 2
    limit = critical_t(k, nu, alpha)
    if math.isinf(limit):
        return math.inf
    from scipy.special import nctdtrinc

    shift = nctdtrinc(nu, 1 - POWER, limit)  # the delta with which t stays below limit with probability 1 - POWER
    return float(shift * sd / math.sqrt(k))


def runs_for(goal: float, sd: float, paired: bool, alpha: float = ALPHA) -> int:
    """The runs of each arm that resolve `goal`; MOST where no fewer do."""
    low = LEAST
    high = MOST
    while low < high:
        middle = (low + high) // 2
        if smallest(middle, sd, paired, alpha) <= goal:
            high = middle
        else:
            low = middle + 1
    return low


def noise(arms: Sequence[Sequence[float]]) -> float:
    """The standard deviation between seeds, pooled over arms; NaN where no arm has two runs."""
    variances = [(len(of_arm) - 1, statistics.variance(of_arm)) for of_arm in arms if len(of_arm) > 1]
    freedom = sum(weight for weight, _ in variances)
    return math.sqrt(sum(weight * variance for weight, variance in variances) / freedom) if freedom else math.nan


def most_noise_of_pairs(a: Sequence[float], b: Sequence[float]) -> float:
    """The upper limit, with probability SURE, of the standard deviation of differences; 8 times that of two pairs.

    (n - 1) times the variance of n normal values over their true variance has the chi-squared distribution.
    """
    from scipy.special import chdtri

    gaps = [x - y for x, y in zip(a, b, strict=True)]
    freedom = len(gaps) - 1
    return statistics.stdev(gaps) / math.sqrt(chdtri(freedom, SURE) / freedom)
