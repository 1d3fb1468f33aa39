"""Whether the tool can be trusted: a config is asked against itself, and simulated questions have known answers.

python -m bench.asking.null       # the tables of bench/results/2026-11-26-ask-simulated.md, one process, minutes
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from tqdm import tqdm

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
        losses: tuple[list[float], list[float]] = ([], [])
        for n in range(ROUNDS):
            for i, of_arm in enumerate(losses):
                seed = first_seed + (2 * number + i) * ROUNDS + n
                of_arm.append(running.run(place, arm, seed)["val_loss"])
            if sure.verdict(sure.difference(*losses), 0.0) != "open":
                return True
        return False

    with ThreadPoolExecutor(place.jobs) as pool:
        found = list(tqdm(pool.map(is_false, range(questions)), total=questions, unit="question", disable=None))
    return f"{arm.what} against itself: {sum(found)} of {questions} answers were false"


# ---- simulated -----------------------------------------------------------------------------------------------


def normal(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return draw.normal(size=shape)


def skewed(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Mean 0, standard deviation 1, skewness SKEW: a gamma distribution."""
    k = (2 / SKEW) ** 2
    return (draw.gamma(k, size=shape) - k) / math.sqrt(k)


def pairs(draw: Any, noise: Draw, n: int, rounds: int, correlation: float = 0.0, ratio: float = 1.0) -> Any:
    """Losses (n, rounds) of two equal arms with common luck; a scatters `ratio` times as much as b."""
    common = math.sqrt(correlation) * noise(draw, (n, rounds))
    own = math.sqrt(1 - correlation)
    return ratio * (common + own * noise(draw, (n, rounds))), common + own * noise(draw, (n, rounds))


def first_found(a: np.ndarray, b: np.ndarray, alpha: float = ALPHA) -> np.ndarray:
    """The round (n,) at which the interval first leaves out zero; infinite where it never does."""
    looks = Looks.of(a - b, a, b)
    found = looks.log_e(looks.gap) >= math.log(1 / alpha)
    return np.where(found.any(-1), found.argmax(-1) + LEAST, np.inf)


def false_answers(n: int, noise: Draw, **how: float) -> float:
    """The share of n questions of equal arms, looked at after each round, that find a difference."""
    a, b = pairs(np.random.default_rng(1), noise, n, LONGEST, **how)
    return float(np.isfinite(first_found(a, b)).mean())


def kept_price(n: int, noise: Draw, effect: float, earlier: int = 0, **how: float) -> float:
    """The share of n questions that find a planted effect by the high end of the price that two runs of each named."""
    draw = np.random.default_rng(2)
    kept = 0
    for _ in range(n):
        a, b = pairs(draw, noise, 1, sure.MOST, **how)
        a = a + effect
        known = [noise(draw, (earlier,))] if earlier else []
        high = sure.price(sure.noise_of(a[0, :2], b[0, :2], known), effect)[1]
        looks = Looks.of(a - b, a, b)
        found = (looks.log_e(looks.gap) >= math.log(1 / ALPHA)) & (looks.gap > 0)
        kept += bool(found[0, : max(0, high + 1 - LEAST)].any())
    return kept / n


def rounds_of_four(n: int, correlation: float, effect: float) -> float:
    """The median number of rounds until the best of four arms, `effect` below the others, has beaten all of them."""
    draw = np.random.default_rng(3)
    common = math.sqrt(correlation) * draw.normal(size=(n, 1, LONGEST))
    losses = common + math.sqrt(1 - correlation) * draw.normal(size=(n, 4, LONGEST))
    losses[:, 0] -= effect
    ends = [first_found(losses[:, i], losses[:, 0], sure.alpha_of_each(6)) for i in (1, 2, 3)]
    return float(np.median(np.max(ends, axis=0)))


def tables(n: int = 20_000, priced: int = 1000) -> list[str]:
    """The figures of the page, a line each."""
    lines = [f"false answers of {n:,} questions of equal arms, {LONGEST} rounds:"]
    for correlation in (0.0, 0.5, 0.9):
        lines.append(f"  normal, correlation {correlation}: {false_answers(n, normal, correlation=correlation):.2%}")
    lines.append(f"  skewness {SKEW}: {false_answers(n, skewed):.2%}")
    lines.append(f"  normal, sd ratio 4: {false_answers(n, normal, ratio=4.0):.2%}")
    lines.append(f"  skewness {SKEW}, sd ratio 4: {false_answers(n, skewed, ratio=4.0):.2%}")
    lines.append(f"  skewness -{SKEW}, sd ratio 4: {false_answers(n, lambda *of: -skewed(*of), ratio=4.0):.2%}")
    lines.append(f"planted effects found by the high end of the price, of {priced:,} questions:")
    for effect in (1.0, 2.0):
        for correlation in (0.0, 0.5, 0.9):
            share = kept_price(priced, normal, effect, correlation=correlation)
            with_earlier = kept_price(priced, normal, effect, earlier=6, correlation=correlation)
            about = f"  {effect:g} sd, correlation {correlation}: {share:.1%}"
            lines.append(f"{about}; with six earlier runs {with_earlier:.1%}")
    lines.append(f"four arms, correlation 0.9, the best 1 sd below: median {rounds_of_four(n, 0.9, 1.0):g} rounds")
    return lines


if __name__ == "__main__":
    for line in tables(*(int(word) for word in sys.argv[1:])):
        print(line, flush=True)
