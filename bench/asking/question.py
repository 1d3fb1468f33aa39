"""A question: arms that take turns on shared seeds until the difference is decided or the budget is spent."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.asking import running
from bench.asking import statistics as sure
from bench.asking.arms import Arm
from bench.asking.ledger import digest
from bench.asking.running import Place
from bench.asking.statistics import LEAST, MOST, PILOT, Estimate
from deskgpt.system.errors import ConfigError
from deskgpt.system.terminal import clock

UNSEEN = 5e-5  # nats; a difference that four decimals do not show never matters
FEWEST_BATCHES = 8  # of an evaluation, for an error of the text
NULL_ROUNDS = 8  # of a question of a config against itself, unless it is decided sooner


@dataclass
class Look:
    """What is known after some runs of each arm."""

    n: int
    estimates: dict[tuple[str, str], Estimate]  # by pair of labels, the first one before the second in the alphabet
    alive: list[str]  # labels of the arms that can still win
    dropped: dict[str, str]  # of the others, the arm that each is worse than
    verdict: str  # better: one arm is left; same: those left do not differ by min_effect; open


@dataclass
class Question:
    """What is asked, and the runs so far."""

    arms: list[Arm]
    place: Place
    min_effect: float | None  # the smallest difference that matters, in nats
    budget_s: float
    first_seed: int
    anyway: bool = False  # goes on although the budget cannot answer
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by label, in the order of seeds
    looks: list[Look] = field(default_factory=list)
    price: dict[str, float] = field(default_factory=dict)  # the first one that was named: effect, low, high
    began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.runs = {arm.label: [] for arm in self.arms}
        n = len(self.arms)
        self.alpha = sure.alpha_of_each(n * (n - 1) // 2)
        self.same_within = self.min_effect or UNSEEN

    @property
    def digest(self) -> str:
        """The question's name in the ledger; it does not depend on its price. Other seeds make another question."""
        arms = [[arm.code, arm.learning_settings(), arm.steps] for arm in self.arms]
        return digest([arms, self.place.windows, self.min_effect, self.place.machine, self.first_seed])

    def values(self, label: str) -> list[float]:
        return [run["val_loss"] for run in self.runs[label]]

    # ---- runs --------------------------------------------------------------------------------------------

    def answered(self) -> Iterator[Look]:
        """Does rounds of runs, one of each arm that can still win, and gives what is known after each.

        Ends when the question is decided, or the next round does not fit into the budget. Raises as running.run does.
        """
        for n in range(MOST):
            if n >= PILOT and self.spent_s() + self.round_s() > self.budget_s and not self.is_known(n):
                return
            self.do_round(n)
            self.check_judgement()
            self.looks.append(self.look())
            yield self.looks[-1]
            if self.looks[-1].verdict != "open":
                return

    def do_round(self, n: int) -> None:
        """One run of each arm with the next seed."""
        arms = [arm for arm in self.arms if arm.label in self.alive()]
        found = running.run_all(self.place, [(arm, self.first_seed + n) for arm in arms])
        for arm, run in zip(arms, found, strict=True):
            self.runs[arm.label].append(run)

    def check_judgement(self) -> None:
        """Raises ConfigError where arms were evaluated on different windows; logs of older code do not say it."""
        runs = itertools.chain.from_iterable(self.runs.values())
        digests = {run["eval_digest"] for run in runs if run.get("eval_digest")}
        if len(digests) > 1:
            raise ConfigError(
                f"the arms were judged on different windows ({', '.join(sorted(map(str, digests)))}), so their "
                "losses do not compare; leave block_size and the tokenizer equal"
            )

    def alive(self) -> list[str]:
        return self.looks[-1].alive if self.looks else list(self.runs)

    def is_known(self, n: int) -> bool:
        """Whether the ledger has the runs of round n, so that they cost nothing."""
        keys = [self.place.key(arm, self.first_seed + n) for arm in self.run_next()]
        return bool(keys) and all(self.place.ledger.run(key) for key in keys)

    def run_next(self) -> list[Arm]:
        """The arms that can still win, but for published losses."""
        return [arm for arm in self.arms if arm.label in self.alive() and arm.known is None]

    def spent_s(self) -> float:
        return time.perf_counter() - self.began

    def round_s(self) -> float:
        """Seconds of a round of the arms that can still win, runs from the ledger counted as what they took."""
        each = [statistics.median(run["wall_s"] for run in self.runs[arm.label]) for arm in self.run_next()]
        waves = math.ceil(len(each) / self.place.jobs)
        return sum(each) / max(1, len(each)) * waves

    # ---- what is known -----------------------------------------------------------------------------------

    def look(self) -> Look:
        """Compares all pairs of arms that have equally many runs."""
        before = self.looks[-1] if self.looks else Look(0, {}, list(self.runs), {}, "open")
        values = {label: self.values(label) for label in before.alive}
        estimates = dict(before.estimates)
        dropped = dict(before.dropped)
        verdicts = {}
        for x, y in itertools.combinations(before.alive, 2):
            estimates[x, y] = sure.difference(values[x], values[y], self.alpha)
            verdicts[x, y] = sure.verdict(estimates[x, y], self.same_within)
            if verdicts[x, y] == "better":
                dropped[x] = y
            if verdicts[x, y] == "worse":
                dropped[y] = x
        alive = [label for label in before.alive if label not in dropped]
        of_alive = [verdicts[pair] for pair in itertools.combinations(alive, 2)]
        verdict = "same"
        if "open" in of_alive:
            verdict = "open"
        if len(alive) == 1:
            verdict = "better"
        return Look(before.n + 1, estimates, alive, dropped, verdict)

    def text_error(self, x: str, y: str) -> float | None:
        """Half the 95% interval of the difference that another text of this size would leave with the same seeds.

        From the differences of two arms batch by batch of the evaluation; None where the batches are not the same.
        """
        pairs = zip(self.runs[x], self.runs[y], strict=False)
        both = [(a.get("val_batches") or [], b.get("val_batches") or []) for a, b in pairs]
        sizes = {len(losses) for pair in both for losses in pair}
        if len(sizes) != 1 or min(sizes) < FEWEST_BATCHES:
            return None
        gaps = np.mean([np.subtract(a, b) for a, b in both], axis=0)
        return float(1.96 * gaps.std(ddof=1) / math.sqrt(len(gaps)))

    # ---- the price ---------------------------------------------------------------------------------------

    def noise(self) -> sure.Noise:
        """Of the two best arms that have the same seeds, pooled with earlier runs of these arms in the ledger."""
        arms = sorted(self.run_next(), key=lambda arm: statistics.fmean(self.values(arm.label)))[:2]
        values = [self.values(arm.label) for arm in arms]
        seeds = set(range(self.first_seed, self.first_seed + len(values[0])))
        earlier = []
        for arm in arms:
            settings = arm.learning_settings()
            earlier.append(self.place.ledger.repeats(settings, arm.steps, self.place.windows, seeds))
        return sure.noise_of(values[0], values[1] if len(values) > 1 else None, earlier)

    def affordable(self) -> int:
        """Runs of each arm within the budget, with those so far and those that the ledger has."""
        n = len(self.runs[self.alive()[0]])
        while self.is_known(n):
            n += 1
        left_s = max(0.0, self.budget_s - self.spent_s())
        return min(MOST, n + int(left_s / max(self.round_s(), 1e-3)))

    def price_line(self) -> str:
        """What the question costs by the noise of the runs so far. Raises ConfigError where the budget is too small."""
        noise = self.noise()
        n = self.affordable()
        effect = self.min_effect or noise.sd
        low, high = sure.price(noise, effect, self.alpha)
        self.price = self.price or {"effect": effect, "low": low, "high": high}
        price = f"{effect:.4g} nats costs {runs_range(low, high)} of each arm ({sure.POWER:.0%})"
        pays = f"the budget, {clock(self.budget_s)}, pays {n} of each at {clock(self.round_s())} a round"
        too_much = low if self.min_effect else LEAST
        if n < too_much and len(self.looks) <= PILOT and not self.anyway:
            raise ConfigError(f"{price}; {pays}, which does not fit; --anyway goes on")
        return f"noise {noise.sd:.4g} nats between seeds; {price}; {pays}"


def runs_range(low: int, high: int) -> str:
    """The price in words."""
    if low > MOST:
        return f"more than {MOST:,} runs"
    return f"{low:,} to {high:,} runs" if high <= MOST else f"{low:,} to more than {MOST:,} runs"


def ask_itself(place: Place, arm: Arm, first_seed: int, questions: int) -> str:
    """How many questions of an arm against itself find a difference. Each run has a seed of its own."""

    def is_false(number: int) -> bool:
        first = first_seed + 2 * number * NULL_ROUNDS
        a: list[float] = []
        b: list[float] = []
        for seed in range(first, first + NULL_ROUNDS):
            a.append(running.run(place, arm, seed)["val_loss"])
            b.append(running.run(place, arm, seed + NULL_ROUNDS)["val_loss"])
            if sure.verdict(sure.difference(a, b), 0.0) != "open":
                return True
        return False

    found = running.in_parallel(place.jobs, is_false, range(questions))
    return f"{arm.what} against itself: {sum(found)} of {questions} answers were false"
