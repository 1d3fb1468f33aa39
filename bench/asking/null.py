"""How often the tool is wrong, and keeps its price: simulated questions have known answers.

python -m bench.asking.null 20000 1000   # the tables of bench/results/2026-11-26-ask-simulated.md
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bench.asking import statistics as sure
from bench.asking.statistics import ALPHA, LEAST, PILOT, Looks

LONGEST = 30  # rounds of a question

Noise = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def normal(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return draw.normal(size=shape)


def skewed(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """A gamma distribution of skewness 1.5, as val losses between seeds have (bench/results/README.md)."""
    k = (2 / 1.5) ** 2
    return (draw.gamma(k, size=shape) - k) / math.sqrt(k)


def exponential(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Skewness 2."""
    return draw.exponential(size=shape) - 1


def losses(draw: np.random.Generator, noise: Noise, shape: tuple[int, ...], correlation: float = 0.0) -> np.ndarray:
    """Losses of equal arms, shape (questions, arms, rounds), whose seeds share their luck."""
    common = noise(draw, (shape[0], 1, shape[2]))
    return math.sqrt(correlation) * common + math.sqrt(1 - correlation) * noise(draw, shape)


def first_found(looks: Looks, alpha: float = ALPHA) -> np.ndarray:
    """The round at which the interval first leaves out zero; infinite where it never does."""
    found = looks.log_e(looks.gap) >= math.log(1 / alpha)
    return np.where(found.any(-1), found.argmax(-1) + LEAST, np.inf)


def false_answers(n: int, noise: Noise, correlation: float = 0.0, ratio: float = 1.0) -> float:
    """The share of n questions of equal arms that find a difference; a scatters `ratio` times as much as b."""
    x = losses(np.random.default_rng(1), noise, (n, 2, LONGEST), correlation)
    a, b = ratio * x[:, 0], x[:, 1]
    return float(np.isfinite(first_found(Looks.of(a - b, a, b))).mean())


def false_beside_a_number(n: int, noise: Noise) -> float:
    """The share of n questions that tell an arm from the number that is its mean."""
    x = noise(np.random.default_rng(1), (n, LONGEST))
    return float(np.isfinite(first_found(Looks.of(x))).mean())


def kept_price(n: int, effect: float, correlation: float = 0.0, earlier: int = 0) -> float:
    """The share of n questions that find a planted effect by the high end of the price that the pilot named.

    earlier: runs of the first arm that the ledger has.
    """
    draw = np.random.default_rng(2)
    kept = 0
    for _ in range(n):
        a, b = losses(draw, normal, (1, 2, sure.MOST), correlation)[0]
        known: Any = [draw.normal(size=earlier)] if earlier else []
        _, high = sure.price(sure.noise_of(a[:PILOT], b[:PILOT], known), effect)
        kept += bool(first_found(Looks.of(a + effect - b, a + effect, b)) <= high)
    return kept / n


def rounds_of_four(n: int, correlation: float, effect: float) -> float:
    """The median number of rounds until the best of four arms, `effect` below the others, has beaten all of them."""
    x = losses(np.random.default_rng(3), normal, (n, 4, LONGEST), correlation)
    best = x[:, 0] - effect
    ends = [first_found(Looks.of(x[:, i] - best, x[:, i], best), sure.alpha_of_each(6)) for i in (1, 2, 3)]
    return float(np.median(np.max(ends, axis=0)))


def table(n: int, priced: int) -> Iterator[str]:
    """The tables of the page, a line each."""
    yield f"| {n:,} questions of equal arms, {LONGEST} rounds | normal | skewed | exponential |\n|---|--:|--:|--:|"
    noises = (normal, skewed, exponential)
    for ratio in (1.0, 2.0, 4.0, 8.0):
        for correlation in (0.0, 0.9):
            cells = [f"{false_answers(n, noise, correlation, ratio):.1%}" for noise in noises]
            yield f"| sd ratio {ratio:g}, correlation {correlation} | {' | '.join(cells)} |"
    cells = [f"{false_beside_a_number(n, noise):.1%}" for noise in noises]
    yield f"| an arm and the number that is its mean | {' | '.join(cells)} |"
    yield f"\n| {priced:,} questions each, planted effect | found at the price | with six earlier runs |\n|---|--:|--:|"
    for effect in (0.5, 1.0, 2.0):
        for correlation in (0.0, 0.5, 0.9):
            cells = [f"{kept_price(priced, effect, correlation, earlier):.1%}" for earlier in (0, 6)]
            yield f"| {effect:g} sd, correlation {correlation} | {' | '.join(cells)} |"
    yield f"\nFour arms at correlation 0.9, the best 1 sd below: median {rounds_of_four(n, 0.9, 1.0):g} rounds."


if __name__ == "__main__":
    for line in table(int(sys.argv[1]), int(sys.argv[2])):
        print(line, flush=True)
