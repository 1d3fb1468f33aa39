from __future__ import annotations

import math

import pytest

from bench.analysis.noise import difference, interval, t975


def test_interval_is_the_textbooks():
    mean, half = interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.303 / math.sqrt(3))
    assert interval([1.5]) == (1.5, None)


def test_difference_is_welchs():
    # variances 1 and 4 of three values each: (1/3 + 4/3)^2 / ((1/3)^2 / 2 + (4/3)^2 / 2) = 2.94 degrees of freedom
    d, half = difference([1.0, 2.0, 3.0], [10.0, 12.0, 14.0])
    assert d == 10.0
    assert half == pytest.approx(4.303 * math.sqrt(5 / 3))
    assert difference([1.0], [2.0, 3.0]) == (1.5, None)
    assert difference([1.0, 1.0], [1.0, 1.0]) == (0.0, 0.0)


def test_quantiles_fall_to_the_normal_distributions():
    values = [t975(n) for n in range(1, 200)]
    assert values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx(1.97, abs=0.01)
