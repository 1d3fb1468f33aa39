"""bench/asking/statistics.py: what the intervals promise, against scipy and by simulation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import integrate, stats

from bench.asking import statistics as own
from bench.asking.statistics import ALPHA, LEAST, PILOT, Estimate, Looks

ROUNDS = 30  # of a question

Noise = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def normal(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return draw.normal(size=shape)


def skewed(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """A gamma distribution of skewness 1.5, as val losses between seeds have."""
    k = (2 / 1.5) ** 2
    return (draw.gamma(k, size=shape) - k) / math.sqrt(k)


def exponential(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return draw.exponential(size=shape) - 1


def losses(noise: Noise, shape: tuple[int, int, int], correlation: float = 0.0) -> np.ndarray:
    """Losses of equal arms, shape (questions, arms, rounds), whose seeds share their luck."""
    draw = np.random.default_rng(1)
    common = noise(draw, (shape[0], 1, shape[2]))
    return math.sqrt(correlation) * common + math.sqrt(1 - correlation) * noise(draw, shape)


def first_found(a: np.ndarray, b: np.ndarray, alpha: float = ALPHA) -> np.ndarray:
    """The round at which the interval first leaves out zero; infinite where it never does."""
    looks = Looks.of(a, b)
    found = looks.log_e(looks.gap) >= math.log(1 / alpha)
    return np.where(found.any(-1), found.argmax(-1) + LEAST, np.inf)


@pytest.mark.parametrize(("k", "nu"), [(4, 3), (2, 6), (20, 19)])
def test_bayes_factor_is_a_ratio_of_likelihoods(k: float, nu: int) -> None:
    """Against the definition: t has a noncentral distribution whose shift is drawn from N(0, k g)."""
    t = 3.0

    def weighed(delta: float) -> float:
        prior = stats.norm.pdf(delta, 0, math.sqrt(own.EFFECT_VARIANCE))
        return float(stats.nct.pdf(t, nu, math.sqrt(k) * delta) * prior)

    mixture, _ = integrate.quad(weighed, -15, 15, points=[0, t / math.sqrt(k)], limit=200)
    found = math.exp(float(own.log_bayes_factor(t * t, k, nu)))
    assert found == pytest.approx(mixture / stats.t.pdf(t, nu), rel=1e-4)


@pytest.mark.parametrize(("correlation", "ratio"), [(0.0, 1.0), (0.9, 1.0), (0.0, 2.0), (0.0, 4.0)])
@pytest.mark.parametrize("noise", [normal, skewed, exponential], ids=lambda noise: noise.__name__)
def test_equal_arms_are_told_apart_in_less_than_5_percent_looked_at_after_each_run(noise, correlation, ratio) -> None:
    x = losses(noise, (4000, 2, ROUNDS), correlation)
    false = np.isfinite(first_found(ratio * x[:, 0], x[:, 1])).mean()
    assert false <= stats.binom.ppf(0.999, 4000, ALPHA) / 4000


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_planted_effect_is_found_at_the_named_price(correlation) -> None:
    kept = 0
    for a, b in losses(normal, (80, 2, own.MOST), correlation):
        _, high = own.price(own.noise_of(a[:PILOT], b[:PILOT]), 2.0)
        kept += bool(first_found(a + 2.0, b) <= high)
    assert kept >= stats.binom.ppf(0.001, 80, own.POWER)


def test_four_arms_use_what_their_seeds_share() -> None:
    x = losses(normal, (4000, 4, ROUNDS), correlation=0.9)
    best = x[:, 0] - 1.0
    ends = [first_found(x[:, i], best, own.alpha_of_each(6)) for i in (1, 2, 3)]
    assert np.median(np.max(ends, axis=0)) <= 10


def test_intervals_of_later_looks_lie_within_earlier_ones_and_hold_what_is_told() -> None:
    draw = np.random.default_rng(4)
    for _ in range(20):
        a, b = draw.normal(1.5, 1, 20), draw.normal(0, 1, 20)
        looks = [own.difference(a[:n], b[:n]) for n in range(2, 21)]
        verdicts = [own.verdict(e, 0.1) for e in looks if own.verdict(e, 0.1) != "open"]
        assert not looks[0].known
        assert len(set(verdicts)) <= 1
        for before, after in itertools.pairwise(looks):
            assert before.low <= after.low <= after.high <= before.high
        assert next((e.n for e in looks if e.low > 0 or e.high < 0), math.inf) == first_found(a, b)


def test_identical_training_is_the_same_and_an_arm_that_always_diverges_is_worse() -> None:
    trained = [3.21, 3.19, 3.25, 3.2, 3.22]
    e = own.difference(trained, [x + 1e-7 for x in trained])
    assert own.verdict(e, 5e-5) == "same"
    assert (round(e.low, 4), round(e.high, 4)) == (0.0, 0.0)
    assert own.verdict(own.difference(trained, [4.17] * 5), 0.0) == "worse"


def test_no_difference_is_an_equivalence_test() -> None:
    assert own.verdict(Estimate(0.001, -0.02, 0.02, 5), 0.01) == "open"
    assert own.verdict(Estimate(3.0, -16.9, 22.9, 50), 20) == "open"
    assert own.verdict(Estimate(0.001, -0.004, 0.006, 50), 0.01) == "same"
    assert own.verdict(Estimate(0.005, 0.002, 0.008, 50), 0.01) == "same"  # real, and too small to matter
    assert own.verdict(Estimate(0.02, 0.015, 0.025, 50), 0.01) == "better"
    assert own.verdict(Estimate(-0.02, -0.025, -0.015, 50), 0.01) == "worse"


def test_e_bh_bounds_the_false_discovery_rate_of_a_list() -> None:
    assert own.e_bh([]) == []
    assert own.e_bh([19.0]) == []
    assert own.e_bh([21.0, 1.0]) == []
    assert own.e_bh([41.0, 1.0, 45.0]) == [0, 2]  # 3 / (0.05 * 2) = 30


def test_price_falls_with_the_effect_and_with_what_is_known_of_the_noise() -> None:
    draw = np.random.default_rng(8)
    few = own.noise_of(*draw.normal(size=(2, 2)))
    more = own.noise_of(*draw.normal(size=(2, 12)))
    for noise in (few, more):
        low, high = own.price(noise, noise.sd)
        assert LEAST <= low <= high
        assert own.price(noise, 3 * noise.sd)[1] <= high
    ratios = [high / low for low, high in (own.price(noise, noise.sd) for noise in (few, more))]
    assert ratios[1] < ratios[0]
    assert own.price(more, 1e-6 * more.sd)[1] > own.MOST
    for n in (60, own.MOST):  # renewed while the question is open
        assert own.price(own.noise_of(*draw.normal(size=(2, n))), 0.3)[0] > n


def test_ordinary_intervals_are_the_textbooks() -> None:
    for freedom, error in ((1, ALPHA), (10, 0.01), (7, 1e-5), (10**9, ALPHA)):
        assert own.t_quantile(freedom, error) == pytest.approx(stats.t.isf(error / 2, freedom), rel=2e-4)
    assert own.interval([1.0, 2.0, 3.0]) == (2.0, pytest.approx(4.303 / math.sqrt(3), rel=1e-4))
    assert own.interval([1.5]) == (1.5, None)
    a, b = [1.0, 2.0, 3.0], [10.0, 12.0, 14.0]
    found = stats.ttest_ind(b, a, equal_var=False)
    gap, half = own.welch(a, b)
    # the fraction of a degree of freedom is left out: 2.94 counts as 2
    assert (gap, half) == (10.0, pytest.approx(4.303 * math.sqrt(5 / 3), rel=1e-4))
    assert half > gap - found.confidence_interval().low
    assert own.welch([1.0], [2.0, 3.0]) == (1.5, None)
    assert own.welch([1.0], [2.0], noise=(0.5, 2)) == (1.0, pytest.approx(4.303, rel=1e-4))
