"""bench/asking/statistics.py: what the intervals promise, against scipy and by simulation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import integrate, stats

from bench.asking import statistics as sure

LONGEST = 30  # runs of each arm in a simulated question


@pytest.mark.parametrize(("k", "nu"), [(4, 3), (2, 6), (20, 19), (10, 38)])
def test_critical_t_is_where_the_bayes_factor_reaches_one_over_alpha(k: float, nu: int) -> None:
    """Against the definition: t has a noncentral distribution whose shift is drawn from N(0, k g)."""
    t = sure.critical_t(k, nu)

    def weighed(delta: float) -> float:
        return float(
            stats.nct.pdf(t, nu, math.sqrt(k) * delta) * stats.norm.pdf(delta, 0, math.sqrt(sure.EFFECT_VARIANCE))
        )

    mixture, _ = integrate.quad(weighed, -15, 15, points=[0, t / math.sqrt(k)], limit=200)
    assert mixture / stats.t.pdf(t, nu) == pytest.approx(1 / sure.ALPHA, rel=1e-4)


def questions(n: int, correlation: float, effect: float, seed: int) -> Any:
    """Losses (n, LONGEST) of two arms whose seeds are correlated; b's are lower by effect."""
    draw: Any = np.random.default_rng(seed)
    shared = draw.normal(size=(n, LONGEST)) * math.sqrt(correlation)
    own = math.sqrt(1 - correlation)
    a = shared + own * draw.normal(size=(n, LONGEST))
    b = shared + own * draw.normal(size=(n, LONGEST)) - effect
    return a, b


@pytest.mark.slow
@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_interval_holds_the_truth_at_all_looks_together(correlation: float) -> None:
    """Looking after each run and stopping at the first wrong answer: false answers stay below 5%."""
    a, b = questions(300, correlation, effect=0.3, seed=1)
    missed = 0
    for of_a, of_b in zip(a, b, strict=True):
        looks = [sure.difference(of_a[:n], of_b[:n]) for n in range(sure.LEAST, LONGEST + 1)]
        missed += any(not e.low <= 0.3 <= e.high for e in looks)
    assert missed <= stats.binom.ppf(0.999, len(a), sure.ALPHA)


@pytest.mark.slow
def test_an_ordinary_interval_would_be_wrong_far_more_often() -> None:
    """The defect that the module exists for; the test above can fail."""
    a, b = questions(300, 0.0, effect=0.0, seed=2)
    wrong = 0
    for of_a, of_b in zip(a, b, strict=True):
        wrong += any(stats.ttest_ind(of_a[:n], of_b[:n]).pvalue < 0.05 for n in range(sure.LEAST, LONGEST + 1))
    assert wrong > 0.12 * len(a)


@pytest.mark.parametrize(("paired", "n"), [(False, 4), (False, 12), (True, 8), (True, 30)])
def test_smallest_difference_is_found_with_the_promised_power(paired: bool, n: int) -> None:
    effect = sure.smallest(n, 1.0, paired)
    draw: Any = np.random.default_rng(3)
    found = 0
    for _ in range(2000):
        a = draw.normal(effect, 1, n)
        b = draw.normal(0, 1, n)
        e = sure.of_one_sample(a) if paired else sure.of_two_samples(a, b)
        found += e.low > 0
    assert found / 2000 == pytest.approx(sure.POWER, abs=4 * math.sqrt(0.16 / 2000))


def test_runs_for_is_the_least_number_that_resolves() -> None:
    n = sure.runs_for(0.5, 1.0, paired=False)
    assert sure.smallest(n, 1.0, False) <= 0.5 < sure.smallest(n - 1, 1.0, False)
    assert sure.runs_for(1e-9, 1.0, paired=False) == sure.MOST


def test_pairs_are_used_where_seeds_agree_and_only_there() -> None:
    a, b = questions(200, 0.95, 0.0, seed=4)
    of_pairs = sum(sure.difference(x[:8], y[:8]).paired for x, y in zip(a, b, strict=True))
    a, b = questions(200, 0.0, 0.0, seed=5)
    by_luck = sum(sure.difference(x[:8], y[:8]).paired for x, y in zip(a, b, strict=True))
    assert of_pairs > 150
    assert by_luck < 50


def test_no_difference_is_an_equivalence_test() -> None:
    wide = sure.Estimate(0.001, 0.02, 5, False, 0.01)
    assert sure.verdict(wide, 0.01) == "open"  # no difference was found, and none was excluded
    narrow = sure.Estimate(0.001, 0.005, 50, False, 0.01)
    assert sure.verdict(narrow, 0.01) == "same"
    assert sure.verdict(narrow, None) == "open"
    assert sure.verdict(sure.Estimate(0.005, 0.003, 50, False, 0.01), 0.01) == "same"  # real, and too small to matter
    assert sure.verdict(sure.Estimate(0.02, 0.005, 50, False, 0.01), 0.01) == "better"
    assert sure.verdict(sure.Estimate(-0.02, 0.005, 50, False, 0.01), 0.01) == "worse"


def test_nothing_is_decided_before_four_runs() -> None:
    assert math.isinf(sure.difference([1.0, 1.1, 1.0], [5.0, 5.1, 5.0]).half)
    assert math.isinf(sure.smallest(3, 1.0, True))


@pytest.mark.slow
def test_several_arms_share_the_error() -> None:
    """Of three equal arms, some pair is told apart in less than 5% of the questions."""
    draw: Any = np.random.default_rng(6)
    wrong = 0
    alpha = sure.alpha_of_each(3)
    for _ in range(200):
        x: Any = draw.normal(size=(3, 20))
        pairs = [(0, 1), (0, 2), (1, 2)]
        looks = [sure.difference(x[i, :n], x[j, :n], alpha) for n in range(4, 21) for i, j in pairs]
        wrong += any(e.low > 0 or e.high < 0 for e in looks)
    assert wrong <= stats.binom.ppf(0.999, 200, sure.ALPHA)


def test_interaction_of_two_changes() -> None:
    draw: Any = np.random.default_rng(7)
    base, x, y = draw.normal(2.0, 0.01, (3, 30))
    both = draw.normal(1.5, 0.01, 30)  # alone each gains nothing
    e = sure.interaction(base, [x, y], both)
    assert e.low < 0.5 < e.high
    assert e.low > 0


def test_limit_of_the_noise_of_two_pairs_is_above_it_as_often_as_promised() -> None:
    pairs = np.random.default_rng(5).normal(size=(4000, 2))
    above = sum(sure.most_noise_of_pairs(list(pair), [0.0, 0.0]) > 1 for pair in pairs)
    assert stats.binomtest(above, 4000, sure.SURE).pvalue > 1e-4
