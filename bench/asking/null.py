"""How often the tool is wrong: a config is asked against itself, and simulated questions have known answers.

python -m bench.asking.null 20000 600   # the table of bench/results/2026-11-26-ask-simulated.md
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bench.asking import running
from bench.asking import statistics as sure
from bench.asking.arms import Arm
from bench.asking.running import Place
from bench.asking.statistics import ALPHA, LEAST, Looks

ROUNDS = 8  # of a real question, unless it is decided sooner
LONGEST = 30  # rounds of a simulated one
SKEW = 1.5  # of val losses between seeds (bench/results/README.md)

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def ask_itself(place: Place, arm: Arm, first_seed: int, questions: int) -> str:
    """How many questions of an arm against itself find a difference. Each run has a seed of its own."""

    def is_false(number: int) -> bool:
        found: tuple[list[float], list[float]] = ([], [])
        for n in range(ROUNDS):
            for i, of_arm in enumerate(found):
                seed = first_seed + (2 * number + i) * ROUNDS + n
                of_arm.append(running.run(place, arm, seed)["val_loss"])
            if sure.verdict(sure.difference(*found), 0.0) != "open":
                return True
        return False

    found = running.in_parallel(place.jobs, is_false, range(questions))
    return f"{arm.what} against itself: {sum(found)} of {questions} answers were false"


# ---- simulated -----------------------------------------------------------------------------------------------


def normal(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return draw.normal(size=shape)


def skewed(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Mean 0, standard deviation 1, skewness SKEW: a gamma distribution."""
    k = (2 / SKEW) ** 2
    return (draw.gamma(k, size=shape) - k) / math.sqrt(k)


def losses(draw: Any, noise: Draw, shape: tuple[int, ...], correlation: float = 0.0) -> np.ndarray:
    """Losses of equal arms (questions, arms, rounds) whose seeds share their luck."""
    common = noise(draw, (shape[0], 1, shape[2]))
    return math.sqrt(correlation) * common + math.sqrt(1 - correlation) * noise(draw, shape)


def first_found(a: np.ndarray, b: np.ndarray, alpha: float = ALPHA) -> np.ndarray:
    """The round at which the interval first leaves out zero; infinite where it never does. a, b: (..., rounds)."""
    looks = Looks.of(a - b, a, b)
    found = looks.log_e(looks.gap) >= math.log(1 / alpha)
    return np.where(found.any(-1), found.argmax(-1) + LEAST, np.inf)


def false_answers(n: int, noise: Draw, correlation: float = 0.0, ratio: float = 1.0) -> float:
    """The share of n questions of equal arms that find a difference; a scatters `ratio` times as much as b."""
    x = losses(np.random.default_rng(1), noise, (n, 2, LONGEST), correlation)
    return float(np.isfinite(first_found(ratio * x[:, 0], x[:, 1])).mean())


def kept_price(n: int, effect: float, correlation: float = 0.0, earlier: int = 0) -> float:
    """The share of n questions that find a planted effect by the high end of the price that two runs of each named."""
    draw = np.random.default_rng(2)
    kept = 0
    for _ in range(n):
        a, b = losses(draw, normal, (1, 2, sure.MOST), correlation)[0]
        known: Any = [draw.normal(size=earlier)] if earlier else []
        _, high = sure.price(sure.noise_of(a[:2], b[:2], known), effect)
        kept += bool(first_found(a + effect, b) <= high)
    return kept / n


def rounds_of_four(n: int, correlation: float, effect: float) -> float:
    """The median number of rounds until the best of four arms, `effect` below the others, has beaten all of them."""
    x = losses(np.random.default_rng(3), normal, (n, 4, LONGEST), correlation)
    ends = [first_found(x[:, i], x[:, 0] - effect, sure.alpha_of_each(6)) for i in (1, 2, 3)]
    return float(np.median(np.max(ends, axis=0)))


def table(n: int, priced: int) -> Iterator[str]:
    """The table of the page, a line each."""
    yield f"| {n:,} questions of equal arms, {LONGEST} rounds | false answers |\n|---|--:|"
    for noise in (normal, skewed):
        for ratio in (1.0, 4.0):
            for correlation in (0.0, 0.9):
                share = false_answers(n, noise, correlation, ratio)
                yield f"| {noise.__name__}, sd ratio {ratio:g}, correlation {correlation} | {share:.1%} |"
    yield f"\n| {priced:,} questions each, planted effect | found at the price | with six earlier runs |\n|---|--:|--:|"
    for effect in (1.0, 2.0):
        for correlation in (0.0, 0.5, 0.9):
            shares = [kept_price(priced, effect, correlation, earlier) for earlier in (0, 6)]
            yield f"| {effect:g} sd, correlation {correlation} | {shares[0]:.1%} | {shares[1]:.1%} |"
    yield f"\nFour arms at correlation 0.9, the best 1 sd below: median {rounds_of_four(n, 0.9, 1.0):g} rounds."


if __name__ == "__main__":
    for line in table(int(sys.argv[1]), int(sys.argv[2])):
        print(line, flush=True)
