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
from bench.asking.running import DistEnv
from bench.asking.statistics import LEAST, Estimate
from deskgpt.system.errors import ConfigError
from deskgpt.system.formatting import clock

PILOT = 2  # runs of each arm, after which the price is known


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
    verdict: str  # better: one arm is left; same: those left do not differ by `resolve`; open
    interaction: Estimate | None = None  # what changes gain together beyond what each gains alone


@dataclass
class Question:
    """What is asked, and the runs so far."""

    arms: list[Arm]
    place: DistEnv
    resolve: float | None  # the smallest difference that matters, in the figure's unit
    budget_s: float
    first_seed: int
    figure: str = "val_loss"
    together: bool = False  # the last arm has the changes of all but the first: do their gains add up?
    tuned: str = ""  # the setting that was tuned for each arm
    anyway: bool = False  # goes on although the budget cannot answer
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by label, in the order of seeds
    looks: list[Look] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.runs = {arm.label: [] for arm in self.arms}
        n = len(self.arms)
        self.alpha = sure.alpha_of_each(n if self.together else n * (n - 1) // 2)

    @property
    def digest(self) -> str:
        """The question's name in the ledger; it does not depend on its price."""
        arms = [[arm.code, arm.learning_settings(), arm.steps] for arm in self.arms]
        return digest([arms, self.place.windows, self.figure, self.resolve, self.place.machine])

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
        for n in itertools.count():
            if n >= PILOT and self.spent_s() + self.round_s() > self.budget_s and not self.is_known(n):
                return
            self.do_round(n)
            look = self.look()
            self.looks.append(look)
            yield look
            if look.verdict != "open":
                return

    def do_round(self, n: int) -> None:
        """One run of each arm with the next seed. Every other round goes backwards, so that a slow hour hits all."""
        labels = self.looks[-1].alive if self.looks else [arm.label for arm in self.arms]
        arms = [arm for arm in self.arms if arm.label in labels]
        order = arms if n % 2 == 0 else arms[::-1]
        until = self.began + self.budget_s if n < PILOT and not self.anyway else math.inf
        found = running.run_all(self.place, [(arm, self.first_seed + n) for arm in order], until)
        for arm, run in zip(order, found, strict=True):
            self.runs[arm.label].append(run)

    def is_known(self, n: int) -> bool:
        """Whether the ledger has the runs of round n, so that they cost nothing."""
        keys = [self.place.key(arm, self.first_seed + n) for arm in self.run_next()]
        return bool(keys) and all(self.place.ledger.run(key) for key in keys)

    def run_next(self) -> list[Arm]:
        """The arms that can still win, but for figures that are known."""
        labels = self.looks[-1].alive if self.looks else list(self.runs)
        return [arm for arm in self.arms if arm.label in labels and arm.known is None]

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
        labels = before.alive if before else list(self.runs)
        dropped = dict(before.dropped) if before else {}
        estimates = dict(before.estimates) if before else {}
        n = len(self.runs[labels[0]])
        values = {label: self.values(label) for label in labels}
        if self.together:
            return self.look_together(n, values)
        verdicts = {}
        for x, y in itertools.combinations(labels, 2):
            estimate = sure.difference(values[x], values[y], self.alpha)
            estimates[x, y] = estimate
            verdicts[x, y] = sure.verdict(estimate, self.resolve)
            if verdicts[x, y] == "better":
                dropped[x] = y
            if verdicts[x, y] == "worse":
                dropped[y] = x
        alive = [label for label in labels if label not in dropped]
        open_pairs = [pair for pair, of_pair in verdicts.items() if of_pair == "open" and set(pair) <= set(alive)]
        verdict = "better" if len(alive) == 1 else "open" if open_pairs else "same"
        return Look(n, estimates, alive, dropped, verdict)

    def look_together(self, n: int, values: dict[str, list[float]]) -> Look:
        """Compares each arm with the first one, and all changes together with the sum of each alone. None is dropped.

        The verdict is that of all changes together, once nothing is open.
        """
        first, *alone, last = values
        pairs = itertools.combinations(values, 2)
        estimates = {(x, y): sure.difference(values[x], values[y], self.alpha) for x, y in pairs}
        extra = sure.interaction(values[first], [values[x] for x in alone], values[last], self.alpha)
        asked = [estimates[first, x] for x in [*alone, last]]
        verdicts = [sure.verdict(e, self.resolve) for e in [*asked, extra]]
        verdict = "open" if "open" in verdicts else sure.verdict(estimates[first, last], self.resolve)
        return Look(n, estimates, list(values), {}, verdict, extra)

    # ---- the price ---------------------------------------------------------------------------------------

    def price(self) -> Price:
        """What the budget can resolve, and what `resolve` takes, by the noise of the runs so far."""
        sd, paired = self.noise()
        n = self.affordable()
        resolves = sure.smallest(n, sd, paired, self.alpha)
        needed = None if self.resolve is None else sure.runs_for(self.resolve, sd, paired, self.alpha)
        return Price(sd, paired, n, resolves, needed, self.round_s(), self.looks[-1].n)

    def noise(self) -> tuple[float, bool]:
        """(standard deviation, whether it is that of differences between runs of one seed) of the first two arms.

        Few pairs hardly tell how much they scatter, so they count only where their upper limit is below the noise
        between seeds, of which a difference has twice the variance.
        """
        (x, y), pair = next(iter(self.looks[-1].estimates.items()))
        if pair.n >= LEAST:
            return pair.sd, pair.paired
        between_seeds = sure.noise([self.values(arm.label) for arm in self.arms if arm.known is None])
        of_pairs = sure.most_noise_of_pairs(self.values(x), self.values(y))
        if of_pairs < math.sqrt(2) * between_seeds:
            return of_pairs, True
        return between_seeds, False

    def affordable(self) -> int:
        """Runs of each arm within the budget, with those so far and those that the ledger has."""
        n = self.looks[-1].n
        while self.is_known(n):
            n += 1
        left_s = max(0.0, self.budget_s - self.spent_s())
        return min(sure.MOST, n + int(left_s / max(self.round_s(), 1e-3)))

    def check_affordable(self) -> None:
        """Raises ConfigError where the budget is over before anything can be decided."""
        is_over = self.looks[-1].n < PILOT and self.spent_s() > self.budget_s
        if is_over or (self.looks[-1].n == PILOT and self.affordable() < LEAST):
            raise ConfigError(
                f"--budget={clock(self.budget_s)} pays {self.affordable()} runs of each arm at "
                f"{clock(self.round_s())} a round, and an answer takes {LEAST} at least: "
                f"{clock(LEAST * self.round_s())}; --anyway goes on"
            )

    def left_s(self) -> float | None:
        """About how much longer it takes, at the difference seen so far or the one to be resolved; None: too long."""
        look = self.looks[-1]
        needed = LEAST
        asked = [e for (x, y), e in look.estimates.items() if x in look.alive and y in look.alive]
        for e in [*asked, look.interaction]:
            if e is not None and look.n >= PILOT and sure.verdict(e, self.resolve) == "open":
                goal = max(abs(e.d), self.resolve or 0.0)
                needed = max(needed, sure.runs_for(goal, e.sd, e.paired, self.alpha))
        return None if needed >= sure.MOST else max(1, needed - look.n) * self.round_s()


@dataclass(frozen=True)
class Price:
    """What is known of a question's price, after a pilot."""

    sd: float  # between seeds
    paired: bool
    affordable: int  # runs of each arm within the budget, those so far included
    resolves: float  # with them
    needed: int | None  # runs of each arm to resolve what is asked
    round_s: float
    done: int

    def lines(self, question: Question) -> list[str]:
        """In words."""
        unit = FIGURES[question.figure].unit
        of = "of a difference between runs of one seed" if self.paired else "between seeds"
        said = [
            f"noise: {self.sd:.4g} {unit} {of}, from {self.done} runs of each arm; {clock(self.round_s)} a round",
            f"the budget, {clock(question.budget_s)}, pays {self.affordable} runs of each arm, which tell "
            f"{self.resolves:.4g} {unit} from zero (95% intervals, {sure.POWER:.0%} power)",
        ]
        if self.needed is not None:
            many = f"{sure.MOST:,} and more" if self.needed >= sure.MOST else f"about {self.needed}"
            rest = max(0, self.needed - self.done) * self.round_s
            said.append(f"--resolve={question.resolve:g} takes {many} runs of each arm, {clock(rest)} more")
        return said

    def check(self, question: Question) -> None:
        """Raises ConfigError where the budget cannot resolve what is asked."""
        if question.resolve is not None and self.resolves > question.resolve:
            assert self.needed is not None
            raise ConfigError(
                f"--budget={clock(question.budget_s)} cannot resolve {question.resolve:g}: its {self.affordable} runs "
                f"of each arm resolve {self.resolves:.4g}, and {question.resolve:g} takes about {self.needed} runs of "
                f"each, {clock(self.needed * self.round_s)}; --anyway goes on"
            )
