"""bench/asking/statistics.py: what the intervals promise, against scipy and by simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import integrate, stats

from bench.asking import null
from bench.asking import statistics as sure
from bench.asking.statistics import ALPHA, LEAST, Estimate, Looks


@pytest.mark.parametrize(("k", "nu"), [(4, 3), (2, 6), (20, 19)])
def test_bayes_factor_is_a_ratio_of_likelihoods(k: float, nu: int) -> None:
    """Against the definition: t has a noncentral distribution whose shift is drawn from N(0, k g)."""
    t = 3.0

    def weighed(delta: float) -> float:
        prior = stats.norm.pdf(delta, 0, math.sqrt(sure.EFFECT_VARIANCE))
        return float(stats.nct.pdf(t, nu, math.sqrt(k) * delta) * prior)

    mixture, _ = integrate.quad(weighed, -15, 15, points=[0, t / math.sqrt(k)], limit=200)
    found = math.exp(float(sure.log_bayes_factor(t * t, k, nu)))
    assert found == pytest.approx(mixture / stats.t.pdf(t, nu), rel=1e-4)


@pytest.mark.parametrize("how", [{}, {"correlation": 0.9}, {"ratio": 2.0}, {"ratio": 4.0}], ids=str)
@pytest.mark.parametrize("noise", [null.normal, null.skewed, null.exponential], ids=lambda noise: noise.__name__)
def test_equal_arms_are_told_apart_in_less_than_5_percent_looked_at_after_each_run(noise, how) -> None:
    assert null.false_answers(4000, noise, **how) <= stats.binom.ppf(0.999, 4000, ALPHA) / 4000
    if not how and noise is not null.exponential:
        assert null.false_beside_a_number(4000, noise) <= stats.binom.ppf(0.999, 4000, ALPHA) / 4000


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_planted_effect_is_found_at_the_named_price(correlation) -> None:
    share = null.kept_price(80, 2.0, correlation)
    assert share >= stats.binom.ppf(0.001, 80, sure.POWER) / 80


def test_four_arms_use_what_their_seeds_share() -> None:
    assert null.rounds_of_four(300, correlation=0.9, effect=1.0) <= 10


def test_intervals_of_later_looks_lie_within_earlier_ones_and_hold_what_is_told() -> None:
    draw = np.random.default_rng(4)
    for _ in range(20):
        a, b = draw.normal(1.5, 1, 20), draw.normal(0, 1, 20)
        looks = [sure.difference(a[:n], b[:n]) for n in range(2, 21)]
        verdicts = [sure.verdict(e, 0.1) for e in looks if sure.verdict(e, 0.1) != "open"]
        assert not looks[0].known
        assert len(set(verdicts)) <= 1
        for before, after in itertools.pairwise(looks):
            assert before.low <= after.low <= after.high <= before.high
        first = null.first_found(Looks.of(a - b, a, b))
        assert next((e.n for e in looks if e.low > 0 or e.high < 0), math.inf) == first


def test_identical_training_is_the_same_and_a_number_is_one_sample() -> None:
    losses = [3.21, 3.19, 3.25, 3.2, 3.22]
    e = sure.difference(losses, [x + 1e-7 for x in losses])
    assert sure.verdict(e, 5e-5) == "same"
    assert (round(e.low, 4), round(e.high, 4)) == (0.0, 0.0)
    assert sure.verdict(sure.difference(losses, [3.0] * 5), 0.0) == "better"


def test_no_difference_is_an_equivalence_test() -> None:
    assert sure.verdict(Estimate(0.001, -0.02, 0.02, 5), 0.01) == "open"
    assert sure.verdict(Estimate(3.0, -16.9, 22.9, 50), 20) == "open"
    assert sure.verdict(Estimate(0.001, -0.004, 0.006, 50), 0.01) == "same"
    assert sure.verdict(Estimate(0.005, 0.002, 0.008, 50), 0.01) == "same"  # real, and too small to matter
    assert sure.verdict(Estimate(0.02, 0.015, 0.025, 50), 0.01) == "better"
    assert sure.verdict(Estimate(-0.02, -0.025, -0.015, 50), 0.01) == "worse"


def test_e_bh_bounds_the_false_discovery_rate_of_a_list() -> None:
    assert sure.e_bh([]) == []
    assert sure.e_bh([19.0]) == []
    assert sure.e_bh([21.0, 1.0]) == []
    assert sure.e_bh([41.0, 1.0, 45.0]) == [0, 2]  # 3 / (0.05 * 2) = 30


def test_price_falls_with_the_effect_and_with_what_is_known_of_the_noise() -> None:
    draw = np.random.default_rng(8)
    few, more = (sure.noise_of(*draw.normal(size=(2, n))) for n in (2, 12))
    for noise in (few, more):
        low, high = sure.price(noise, noise.sd)
        assert LEAST <= low <= high
        assert sure.price(noise, 3 * noise.sd)[1] <= high
    ratios = [high / low for low, high in (sure.price(noise, noise.sd) for noise in (few, more))]
    assert ratios[1] < ratios[0]
    assert sure.price(more, 1e-6 * more.sd)[1] > sure.MOST
    for n in (60, sure.MOST):  # renewed while the question is open
        assert sure.price(sure.noise_of(*draw.normal(size=(2, n))), 0.3)[0] > n
