"""Whether the tool can be trusted: a config is asked against itself, where each difference that is found is false."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tqdm import tqdm

from bench.asking import running
from bench.asking import statistics as sure
from bench.asking.arms import Arm
from bench.asking.running import DistEnv

ROUNDS = 8  # of a question, unless it is decided sooner
SIMULATED = 20_000  # questions whose losses are drawn from those of the real runs


@dataclass(frozen=True)
class Outcome:
    """How many questions found a difference that is not there."""

    asked: int
    false: int

    def __str__(self) -> str:
        """With the 95% interval of the share (Clopper and Pearson, Biometrika 26, 1934)."""
        from scipy import stats

        found = stats.binomtest(self.false, self.asked).proportion_ci(0.95)
        share = f"{self.false / self.asked:.1%} ({found.low:.1%} to {found.high:.1%})"
        return f"{self.false:,} of {self.asked:,} answers were false, {share}"


def ask_itself(place: DistEnv, arm: Arm, first_seed: int, questions: int) -> tuple[Outcome, Outcome]:
    """(of real questions, of simulated ones) of an arm against itself. Each real run has a seed of its own.

    The simulated questions draw from the losses of the real runs, so they have the noise of real seeds.
    """

    def answered(number: int) -> tuple[list[float], bool]:
        """The losses of a question, and whether its answer is false."""
        losses: tuple[list[float], list[float]] = ([], [])
        for n in range(ROUNDS):
            for i, of_arm in enumerate(losses):
                seed = first_seed + (2 * number + i) * ROUNDS + n
                of_arm.append(running.run(place, arm, seed)["val_loss"])
            if finds_something(*losses):
                break
        return [*losses[0], *losses[1]], finds_something(*losses)

    with ThreadPoolExecutor(place.jobs) as pool:
        try:
            found = list(tqdm(pool.map(answered, range(questions)), total=questions, unit="question", disable=None))
        except BaseException:
            running.stop_all()
            raise
    real = Outcome(questions, sum(is_false for _, is_false in found))
    return real, simulated([loss for losses, _ in found for loss in losses], SIMULATED)


def simulated(losses: Sequence[float], questions: int) -> Outcome:
    """Questions of two arms whose losses are drawn from the same ones, looked at after each round."""
    draw = random.Random(0)
    false = 0
    for _ in range(questions):
        a = draw.choices(losses, k=ROUNDS)
        b = draw.choices(losses, k=ROUNDS)
        false += any(finds_something(a[:n], b[:n]) for n in range(sure.LEAST, ROUNDS + 1))
    return Outcome(questions, false)


def finds_something(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether the interval of the difference of two equal arms leaves out zero."""
    return sure.verdict(sure.difference(a, b), None) != "open"
