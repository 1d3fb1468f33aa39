"""Intervals of means and of differences, as textbooks have them."""

from __future__ import annotations

import math

import pytest

from bench.analysis.noise import difference, interval, t_quantile


@pytest.mark.parametrize(
    ("freedom", "error", "t"), [(1, 0.05, 12.706), (2, 0.05, 4.303), (10, 0.05, 2.228), (10, 0.01, 3.169)]
)
def test_quantiles_are_those_of_the_tables(freedom, error, t):
    assert t_quantile(freedom, error) == pytest.approx(t, abs=5e-4)
    assert t_quantile(10**9) == pytest.approx(1.96, abs=1e-3)


def test_interval_and_difference_are_the_textbooks():
    assert interval([1.0, 2.0, 3.0]) == (2.0, pytest.approx(4.303 / math.sqrt(3), rel=1e-4))
    assert interval([1.5]) == (1.5, None)
    # variances 1 and 4 of three values each: (1/3 + 4/3)^2 / ((1/3)^2 / 2 + (4/3)^2 / 2) = 2.94 degrees of freedom
    gap, half = difference([1.0, 2.0, 3.0], [10.0, 12.0, 14.0])
    assert (gap, half) == (10.0, pytest.approx(4.303 * math.sqrt(5 / 3), rel=1e-4))
    assert difference([1.0], [2.0, 3.0]) == (1.5, None)
    assert difference([1.0, 1.0], [1.0, 1.0]) == (0.0, 0.0)
