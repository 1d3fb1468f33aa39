"""bench/asking/statistics.py: what the intervals promise, by simulation."""

import itertools
import math

import numpy as np
import pytest
from conftest import ROOT
from scipy import stats

from bench.asking import statistics as own
from bench.asking.statistics import ALPHA, LEAST, Estimate

PAGE = (ROOT / "docs" / "asking.md").read_text(encoding="utf-8")
# The cells of the page's table of false answers.
TABLE = PAGE.partition("<!-- false answers -->\n")[2].partition("\n\n")[0].splitlines()[2:]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE]
CHECKS = (8, 30, 60)  # rounds, the columns of the page's table
NOISE = {"normal": stats.norm(), "skewed by 1.5": stats.gamma((2 / 1.5) ** 2)}
NOISE |= {"exponential": stats.expon(), "lognormal": stats.lognorm(1)}


def noise(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return noise of mean 0 and variance 1, but for the last kind, whose arm diverges in 5% of its
    runs.
    """
    draw = np.random.default_rng(1)
    of_kind = NOISE.get(kind, NOISE["normal"])
    x = (of_kind.rvs(shape, random_state=draw) - of_kind.mean()) / of_kind.std()
    if kind not in NOISE:
        x[:, 0] += np.where(draw.random(x[:, 0].shape) < 0.05, 9.5, -0.5)
    return x


def decided_after(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the round at which the interval first leaves out zero; infinite if it never does."""
    n, gap, *variances = own.moments(a, b)
    is_decided = own.log_e(gap, n, *variances) >= math.log(1 / ALPHA)
    return np.where(is_decided.any(-1), is_decided.argmax(-1) + LEAST, np.inf)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row[:2]))
def test_equal_arms_are_told_apart_as_rarely_as_the_page_says(row):
    """A share of 2,000 questions is the printed one, within what 1 of 1,000 samples exceeds."""
    kind, ratio, *printed = row
    x = noise(kind, (2000, 2, CHECKS[-1]))
    ends = decided_after(x[:, 0] * float(ratio), x[:, 1])
    for n, share in zip(CHECKS, printed, strict=True):
        p = float(share.rstrip("%")) / 100
        # The page has rounded it
        low, high = stats.binom.ppf([0.0005, 0.9995], 2000, [max(0, p - 0.0005), p + 0.0005])
        assert low <= (ends <= n).sum() <= high


def test_intervals_of_later_checks_lie_within_earlier_ones_and_hold_what_is_told():
    draw = np.random.default_rng(4)
    for drift in (0, 0, 20):  # with the last one, intervals cross
        a = draw.normal(1.5, 1, 30)
        b = draw.normal(0, 1, 30)
        a[8:] -= drift
        estimates = [own.difference(a[:n], b[:n]) for n in range(2, 31)]
        assert not estimates[0].known
        for before, after in itertools.pairwise(estimates):
            assert before.low <= after.low <= after.high <= before.high
        told = [e.n for e in estimates if e.low > 0 or e.high < 0]
        assert min(told, default=math.inf) == decided_after(a, b)


def test_no_difference_is_an_equivalence_test():
    expected = {
        (-0.02, 0.02): "open",
        (-0.004, 0.006): "same",
        (0.002, 0.008): "same",  # real, and too small to matter
        (0.015, 0.025): "worse",
        (-0.025, -0.015): "better",
    }
    assert {k: own.decide(Estimate(0.0, *k, 50), 0.01) for k in expected} == expected
    trained = [3.21, 3.19, 3.25, 3.2, 3.22]
    assert own.decide(own.difference(trained, [x + 1e-7 for x in trained]), 5e-5) == "same"
