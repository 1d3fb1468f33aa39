"""A question: arms that take turns on shared seeds until the difference is decided or the budget is spent."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.asking import running
from bench.asking import statistics as sure
from bench.asking.arms import Arm
from bench.asking.ledger import digest
from bench.asking.running import Place
from bench.asking.statistics import LEAST, MOST, Estimate
from deskgpt.system.errors import ConfigError
from deskgpt.system.terminal import clock

PILOT = 2  # runs of each arm, after which the price is known
UNSEEN = 5e-5  # a difference of losses that four decimals do not show never matters


@dataclass(frozen=True)
class Figure:
    """A figure of the ledger's runs that can be asked about."""

    unit: str  # of a difference
    sign: int = 1  # -1: more of it is better
    is_rate: bool = False  # compared by 100 times its logarithm: noise and gains of speeds are shares

    def value(self, found: float) -> float:
        """What arms are compared by; less is better."""
        return self.sign * (100 * math.log(found) if self.is_rate else found)


FIGURES = {
    "val_loss": Figure("nats"),
    "val_se": Figure("nats"),
    "step_ms": Figure("%", is_rate=True),
    "mfu": Figure("%", -1, is_rate=True),
    "tokens_per_s": Figure("%", -1, is_rate=True),
    "parameters": Figure("parameters"),
}


@dataclass
class Look:
    """What is known after some runs of each arm."""

    n: int
    estimates: dict[tuple[str, str], Estimate]  # by pair of labels, the first one before the second in the alphabet
    alive: list[str]  # labels of the arms that can still win
    dropped: dict[str, str]  # of the others, the arm that each is worse than
    verdict: str  # better: one arm is left; same: those left do not differ by min_effect; open
    interaction: Estimate | None = None  # what changes gain together beyond what each gains alone


@dataclass
class Question:
    """What is asked, and the runs so far."""

    arms: list[Arm]
    place: Place
    min_effect: float | None  # the smallest difference that matters, in the figure's unit
    budget_s: float
    first_seed: int
    figure: str = "val_loss"
    together: bool = False  # the last arm has the changes of all but the first: do their gains add up?
    anyway: bool = False  # goes on although the budget cannot answer
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by label, in the order of seeds
    looks: list[Look] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.runs = {arm.label: [] for arm in self.arms}
        n = len(self.arms)
        self.alpha = sure.alpha_of_each(n if self.together else n * (n - 1) // 2)
        self.same_within = self.min_effect or (UNSEEN if self.figure == "val_loss" else 0.0)

    @property
    def digest(self) -> str:
        """The question's name in the ledger; it does not depend on its price. Other seeds make another question."""
        arms = [[arm.code, arm.learning_settings(), arm.steps] for arm in self.arms]
        return digest([arms, self.place.windows, self.figure, self.min_effect, self.place.machine, self.first_seed])

    def values(self, label: str) -> list[float]:
        """The figure of the arm's runs, so that lower is better."""
        found = [run[self.figure] for run in self.runs[label] if run.get(self.figure) is not None]
        if len(found) < len(self.runs[label]):
            raise ConfigError(f"--figure={self.figure}: runs of {label} are too short to have it; take more steps")
        return [FIGURES[self.figure].value(value) for value in found]

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
        """One run of each arm with the next seed. Every other round goes backwards, so that a slow hour hits all."""
        labels = self.alive()
        arms = [arm for arm in self.arms if arm.label in labels]
        order = arms if n % 2 == 0 else arms[::-1]
        found = running.run_all(self.place, [(arm, self.first_seed + n) for arm in order])
        for arm, run in zip(order, found, strict=True):
            self.runs[arm.label].append(run)

    def check_judgement(self) -> None:
        """Raises ConfigError where arms were evaluated on different windows; logs of older code do not say it."""
        if self.figure != "val_loss":
            return
        digests = {run["eval_digest"] for runs in self.runs.values() for run in runs if run.get("eval_digest")}
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
        """The arms that can still win, but for figures that are known."""
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
        before = self.looks[-1] if self.looks else None
        labels = self.alive()
        dropped = dict(before.dropped) if before else {}
        estimates = dict(before.estimates) if before else {}
        values = {label: self.values(label) for label in labels}
        n = len(values[labels[0]])
        verdicts = {}
        for x, y in itertools.combinations(labels, 2):
            estimates[x, y] = sure.difference(values[x], values[y], self.alpha)
            verdicts[x, y] = sure.verdict(estimates[x, y], self.same_within)
        if self.together:
            first, *alone, last = labels
            extra = sure.interaction(values[first], [values[x] for x in alone], values[last], self.alpha)
            asked = [verdicts[first, x] for x in [*alone, last]] + [sure.verdict(extra, self.same_within)]
            return Look(n, estimates, labels, {}, "open" if "open" in asked else verdicts[first, last], extra)
        for (x, y), found in verdicts.items():
            if found == "better":
                dropped[x] = y
            if found == "worse":
                dropped[y] = x
        alive = [label for label in labels if label not in dropped]
        open_pairs = [pair for pair, found in verdicts.items() if found == "open" and set(pair) <= set(alive)]
        verdict = "better" if len(alive) == 1 else "open" if open_pairs else "same"
        return Look(n, estimates, alive, dropped, verdict)

    # ---- the price ---------------------------------------------------------------------------------------

    def noise(self) -> sure.Noise:
        """Of the two best arms that have the same seeds, pooled with earlier runs of these arms in the ledger."""
        arms = sorted(self.run_next(), key=lambda arm: statistics.fmean(self.values(arm.label)))[:2]
        values = [self.values(arm.label) for arm in arms]
        earlier = []
        if self.figure == "val_loss":
            seeds = set(range(self.first_seed, self.first_seed + len(values[0])))
            windows = self.place.windows
            ledger = self.place.ledger
            earlier = [ledger.repeats(arm.learning_settings(), arm.steps, windows, seeds) for arm in arms]
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
        unit = FIGURES[self.figure].unit
        noise = self.noise()
        n = self.affordable()
        effect = self.min_effect or noise.sd
        low, high = sure.price(noise, effect, self.alpha)
        price = f"{effect:.4g} {unit} costs {runs_range(low, high)} of each arm ({sure.POWER:.0%})"
        pays = f"the budget, {clock(self.budget_s)}, pays {n} of each at {clock(self.round_s())} a round"
        too_much = low if self.min_effect else LEAST
        if n < too_much and len(self.looks) <= PILOT and not self.anyway:
            raise ConfigError(f"{price}; {pays}, which does not fit; --anyway goes on")
        return f"noise {noise.sd:.4g} {unit} between seeds; {price}; {pays}"


def runs_range(low: int, high: int) -> str:
    """The price in words."""
    if low > MOST:
        return f"more than {MOST:,} runs"
    return f"{low:,} to {high:,} runs" if high <= MOST else f"{low:,} to more than {MOST:,} runs"
