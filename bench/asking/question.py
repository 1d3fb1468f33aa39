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
from bench.asking import statistics as stats
from bench.asking.arms import Arm
from bench.asking.ledger import digest
from bench.asking.running import Place
from bench.asking.statistics import LEAST, MOST, PILOT, Estimate
from deskgpt.system.errors import ConfigError
from deskgpt.system.terminal import clock

UNSEEN = 5e-5  # nats; a difference that four decimals do not show never matters


@dataclass
class Question:
    """What is asked, the runs so far, and what is known after the last round of them."""

    arms: list[Arm]
    place: Place
    min_effect: float | None  # the smallest difference that matters, in nats
    budget_s: float
    first_seed: int
    began: float = field(default_factory=time.perf_counter)
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by label, in the order of seeds
    rounds: int = 0
    estimates: dict[tuple[str, str], Estimate] = field(default_factory=dict)  # by pair of labels, in their order
    alive: list[str] = field(default_factory=list)  # labels of the arms that can still win
    verdict: str = "open"  # better: one arm is left; same: those left do not differ by min_effect; open
    price: dict[str, float] = field(default_factory=dict)  # the first one that was named: effect, low, high

    def __post_init__(self) -> None:
        self.alive = [arm.label for arm in self.arms]
        self.runs = {label: [] for label in self.alive}
        self.alpha = stats.alpha_of_each(math.comb(len(self.arms), 2))
        self.same_within = self.min_effect or UNSEEN

    @property
    def digest(self) -> str:
        """The question's name in the ledger; it does not depend on its price. Other seeds make another question."""
        arms = [[arm.code, arm.learning_settings(), arm.steps] for arm in self.arms]
        return digest([arms, self.place.windows, self.min_effect, self.place.machine, self.first_seed])

    def values(self, label: str) -> list[float]:
        return [run["val_loss"] for run in self.runs[label]]

    def arms_alive(self) -> list[Arm]:
        return [arm for arm in self.arms if arm.label in self.alive]

    # ---- runs --------------------------------------------------------------------------------------------

    def answered(self) -> Iterator[str]:
        """Does rounds of runs, one of each arm that can still win, and gives the verdict after each.

        Ends when the question is decided, or the next round does not fit into the budget. Raises as running.run does.
        """
        for n in range(MOST):
            if n >= PILOT and self.spent_s() + self.round_s() > self.budget_s and not self.is_known(n):
                return
            self.do_round(n)
            self.check_judgement()
            self.rounds = n + 1
            self.update_verdicts()
            yield self.verdict
            if self.verdict != "open":
                return

    def do_round(self, n: int) -> None:
        """One run of each arm with the next seed."""
        for arm in self.arms_alive():
            self.runs[arm.label].append(running.run(self.place, arm, self.first_seed + n))

    def check_judgement(self) -> None:
        """Raises ConfigError where arms were evaluated on different windows; logs of older code do not say it."""
        digests = {run["eval_digest"] for runs in self.runs.values() for run in runs if run.get("eval_digest")}
        if len(digests) > 1:
            raise ConfigError(
                f"the arms were judged on different windows (digests {', '.join(sorted(digests))}), so their losses do "
                "not compare; leave block_size and the tokenizer equal"
            )

    def is_known(self, n: int) -> bool:
        """Whether the ledger has the runs of round n, so that they cost nothing."""
        keys = [self.place.key(arm, self.first_seed + n) for arm in self.arms_alive()]
        return all(self.place.ledger.run(key) for key in keys)

    def spent_s(self) -> float:
        return time.perf_counter() - self.began

    def round_s(self) -> float:
        """Seconds of a round of the arms that can still win, runs from the ledger counted as what they took."""
        return sum(statistics.median(run["wall_s"] for run in self.runs[label]) for label in self.alive)

    # ---- what is known -----------------------------------------------------------------------------------

    def update_verdicts(self) -> None:
        """Compares all pairs of arms that can still win, and drops those that cannot any more."""
        verdicts = {}
        for x, y in itertools.combinations(self.alive, 2):
            self.estimates[x, y] = stats.difference(self.values(x), self.values(y), self.alpha)
            verdicts[x, y] = stats.verdict(self.estimates[x, y], self.same_within)
        worse = {x for (x, _), verdict in verdicts.items() if verdict == "better"}
        worse |= {y for (_, y), verdict in verdicts.items() if verdict == "worse"}
        self.alive = [label for label in self.alive if label not in worse]
        open_pairs = [pair for pair in itertools.combinations(self.alive, 2) if verdicts[pair] == "open"]
        if len(self.alive) == 1:
            self.verdict = "better"
        else:
            self.verdict = "open" if open_pairs else "same"

    def text_error(self, x: str, y: str) -> float | None:
        """The error that the text leaves to the difference of two arms, from the seeds that both have."""
        n = min(len(self.runs[x]), len(self.runs[y]))
        a = [run.get("val_batches") or [] for run in self.runs[x][:n]]
        b = [run.get("val_batches") or [] for run in self.runs[y][:n]]
        return stats.error_of_text(a, b)

    # ---- the price ---------------------------------------------------------------------------------------

    def noise(self) -> stats.Noise:
        """Of the two best arms that have the same seeds, pooled with earlier runs of these arms in the ledger."""
        arms = sorted(self.arms_alive(), key=lambda arm: statistics.fmean(self.values(arm.label)))[:2]
        seeds = set(range(self.first_seed, self.first_seed + self.rounds))
        earlier = []
        for arm in arms:
            settings = arm.learning_settings()
            earlier.append(self.place.ledger.repeats(settings, arm.steps, self.place.windows, seeds))
        return stats.noise_of(self.values(arms[0].label), self.values(arms[1].label), earlier)

    def affordable(self) -> int:
        """Runs of each arm within the budget, with those so far and those that the ledger has."""
        n = self.rounds
        while self.is_known(n):
            n += 1
        left_s = max(0.0, self.budget_s - self.spent_s())
        return min(MOST, n + int(left_s / max(self.round_s(), 1e-3)))

    def price_line(self) -> str:
        """What the question costs by the noise of the runs so far. Raises ConfigError where the budget is too small."""
        noise = self.noise()
        n = self.affordable()
        effect = self.min_effect or noise.sd
        low, high = stats.price(noise, effect, self.alpha)
        self.price = self.price or {"effect": effect, "low": low, "high": high}
        runs = f"{low:,} to {high:,}" if high <= MOST else f"{min(low, MOST):,} to more than {MOST:,}"
        price = f"{effect:.4g} nats costs {runs} runs of each arm ({stats.POWER:.0%})"
        pays = f"the budget, {clock(self.budget_s)}, pays {n} of each at {clock(self.round_s())} a round"
        too_much = low if self.min_effect else LEAST
        if n < too_much and self.rounds <= PILOT:
            raise ConfigError(f"{price}; {pays}, which does not fit: give it a larger --budget")
        return f"noise {noise.sd:.4g} nats between seeds; {price}; {pays}"
