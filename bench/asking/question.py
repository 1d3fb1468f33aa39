"""A question: arms that take turns on shared seeds until the difference is decided or the budget is spent."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.asking import statistics as stats
from bench.asking.arms import Arm
from bench.asking.ledger import digest
from bench.asking.running import Trainer
from bench.asking.statistics import MOST, PILOT, POWER, Cost, Estimate
from deskgpt.system.errors import ConfigError
from deskgpt.system.terminal import clock

UNSEEN = 5e-5  # nats; a difference that four decimals do not show never matters


@dataclass
class Question:
    """What is asked, the runs so far, and what is known after the last round of them."""

    arms: list[Arm]
    trainer: Trainer
    min_effect: float | None  # the smallest difference that matters, in nats
    budget_s: float
    first_seed: int
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by label, in the order of seeds
    rounds: int = 0
    estimates: dict[tuple[str, str], Estimate] = field(default_factory=dict)  # by pair of labels, in their order
    remaining: list[str] = field(default_factory=list)  # labels of the arms that can still win
    verdict: str = "open"  # better: one arm is left; same: those left do not differ by min_effect; open

    def __post_init__(self) -> None:
        self.remaining = [arm.label for arm in self.arms]
        self.runs = {label: [] for label in self.remaining}
        self.alpha = stats.alpha_of_each(math.comb(len(self.arms), 2))
        self.same_within = self.min_effect or UNSEEN

    @property
    def digest(self) -> str:
        """Return the question's name in the ledger; it does not depend on the budget. Other seeds make another one."""
        return digest([[self.trainer.key(arm, self.first_seed) for arm in self.arms], self.min_effect])

    def values(self, label: str) -> list[float]:
        """Return the val losses of an arm's runs."""
        return [run["val_loss"] for run in self.runs[label]]

    # ---- runs --------------------------------------------------------------------------------------------

    def run_rounds(self) -> Iterator[str]:
        """Run rounds, one run of each arm that can still win, and give the verdict after each.

        Ends when the question is decided, or the next round does not fit into the budget. Raises as Trainer.run does.
        """
        while self.verdict == "open" and self.rounds < max(PILOT, self.affordable()):
            for arm in self.arms:
                if arm.label in self.remaining:
                    self.runs[arm.label].append(self.trainer.run(arm, self.first_seed + self.rounds))
            self.check_windows()
            self.rounds += 1
            self.update_verdict()
            yield self.verdict

    def check_windows(self) -> None:
        """Raise ConfigError if arms were evaluated on different windows; logs of older code do not say it."""
        digests = {run["eval_digest"] for runs in self.runs.values() for run in runs if run.get("eval_digest")}
        if len(digests) > 1:
            raise ConfigError(
                f"the arms were evaluated on different windows (digests {', '.join(sorted(digests))}), so their losses "
                "do not compare; leave block_size and the tokenizer equal"
            )

    def spent_s(self) -> float:
        """Return the seconds that the question's runs took, whenever that was."""
        return sum(run["wall_s"] for runs in self.runs.values() for run in runs)

    def round_s(self) -> float:
        """Return the seconds of a round of the arms that can still win."""
        return sum(statistics.median(run["wall_s"] for run in self.runs[label]) for label in self.remaining)

    def affordable(self) -> int:
        """Return the runs of each arm within the budget, with those so far."""
        if not self.rounds:
            return 0
        left_s = max(0.0, self.budget_s - self.spent_s())
        return min(MOST, self.rounds + int(left_s / max(self.round_s(), 1e-3)))

    # ---- what is known -----------------------------------------------------------------------------------

    def update_verdict(self) -> None:
        """Compare all pairs of arms that can still win, and drop those that cannot any more."""
        verdicts = {}
        for x, y in itertools.combinations(self.remaining, 2):
            self.estimates[x, y] = stats.difference(self.values(x), self.values(y), self.alpha)
            verdicts[x, y] = stats.verdict(self.estimates[x, y], self.same_within)
        worse = {x for (x, _), verdict in verdicts.items() if verdict == "better"}
        worse |= {y for (_, y), verdict in verdicts.items() if verdict == "worse"}
        self.remaining = [label for label in self.remaining if label not in worse]
        left = [verdicts[pair] for pair in itertools.combinations(self.remaining, 2)]
        if len(self.remaining) == 1:
            self.verdict = "better"
        else:
            self.verdict = "open" if "open" in left else "same"

    def ranked(self) -> list[str]:
        """Return the arms' labels, the best one first, and those that can no longer win last."""

        def rank(label: str) -> tuple[bool, float]:
            return label not in self.remaining, statistics.fmean(self.values(label))

        return sorted(self.runs, key=rank)

    def cost_line(self) -> str:
        """Return what the question costs and what the budget can tell, by the scatter of the two best arms so far."""
        x, y = self.ranked()[:2]
        cost = Cost.of(self.values(x), self.values(y), self.alpha)
        n = self.affordable()
        found = []
        if self.min_effect:
            needed = cost.runs(self.min_effect)
            number = f"{needed:,}" if needed else f"more than {MOST:,}"
            found.append(f"a difference of {self.min_effect:g} nats takes {number} runs of each arm")
        smallest = cost.smallest(n)
        if smallest is None:
            tells = "too few for any"
        else:
            tells = f"enough for {smallest:.2g} nats"
        found.append(f"the budget, {clock(self.budget_s)}, pays {n:,} at {clock(self.round_s())} a round, {tells}")
        return f"{'; '.join(found)} (in {POWER:.0%} of such questions)"

    # ---- the answer --------------------------------------------------------------------------------------

    def answer(self) -> dict[str, Any]:
        """Return the answer after the last round: a sentence, its figures and the exit status of the script."""
        first = self.arms[0].label
        best = self.ranked()[0]
        if self.verdict == "same":
            verdict = "same"
            status = 1 if first in self.remaining else 0
            sentence = f"No difference beyond {self.same_within:g} nats between {' and '.join(self.remaining)}"
        elif self.verdict == "better":
            verdict = "worse" if best == first else "better"
            status = 1 if best == first else 0
            name = next(arm.name for arm in self.arms if arm.label == best)
            sentence = f"{best} ({name}) is better"
        else:
            verdict = "not enough yet"
            status = 3
            sentence = "Not enough yet"
        pairs = []
        for (x, y), e in self.estimates.items():
            limits = {} if e.known else {"low": None, "high": None}  # JSON has no infinity
            pairs.append({"first": x, "second": y} | asdict(e) | limits)
        return {
            "verdict": verdict,
            "status": status,
            "sentence": f"{sentence}: {self.summary()}.",
            "min_effect": self.min_effect,
            "rounds": self.rounds,
            "best": best,
            "pairs": pairs,
            "arms": {arm.label: arm.text for arm in self.arms},
            "steps": {arm.label: arm.steps for arm in self.arms},
            "values": {label: self.values(label) for label in self.runs},
            "diverged": {label: self.diverged(label) for label in self.runs},
        }

    def diverged(self, label: str) -> int:
        """Return how many runs of an arm diverged."""
        return sum(run["outcome"] == "diverged" for run in self.runs[label])

    def summary(self) -> str:
        """Return how much lower the loss of the best arm is than each other one's, and all arms' mean losses."""
        best, *others = self.ranked()
        means = [f"{label} {statistics.fmean(self.values(label)):.4f}" for label in sorted(self.runs)]
        found = [f"{best} is lower than {label} by {self.gap(best, label)}" for label in others]
        found.append(f"mean val losses {', '.join(means)}")
        for label, runs in self.runs.items():
            if self.diverged(label):
                found.append(f"{self.diverged(label)} of {len(runs)} runs of {label} diverged and count as guessing")
        return "; ".join(found)

    def gap(self, x: str, y: str) -> str:
        """Return how much lower x's loss is than y's, with the 95% interval over seeds and the runs of each."""
        e = self.estimates[min(x, y), max(x, y)]
        sign = 1 if x > y else -1
        low, high = sorted((sign * e.low, sign * e.high))
        limits = f"95% interval {nats(low)} to {nats(high)}" if e.known else "too few runs for an interval"
        return f"{nats(sign * e.d)} nats ({limits}, n = {e.n})"


def nats(value: float) -> str:
    """Return a loss with four decimals, zero without a sign."""
    return f"{round(value, 4) + 0.0:.4f}"
