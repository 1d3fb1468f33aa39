"""A question: two arms that take turns on shared seeds until the difference is decided or the
budget is spent.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.asking.arms import Arm
from bench.asking.running import Trainer
from bench.asking.statistics import MOST, PILOT, POWER, Estimate, cost, decide, difference
from deskgpt.errors import ConfigError, clock

UNSEEN = 5e-5  # nats; a difference that four decimals do not show never matters
STATUS = {"better": 0, "worse": 1, "same": 1, "open": 3}  # of the script, by verdict


@dataclass
class Question:
    """Two arms, their runs so far, and the estimate after the last round of them."""

    a: Arm
    b: Arm
    trainer: Trainer
    min_effect: float | None  # the smallest difference that matters, in nats
    budget_s: float
    first_seed: int
    # In the order of seeds
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {"a": [], "b": []})
    estimate: Estimate = field(init=False)  # after the last round: the loss of a less that of b
    verdict: str = "open"  # of b: better, worse, same, or open

    @property
    def rounds(self) -> int:
        return len(self.runs["b"])

    @property
    def same_within(self) -> float:
        return self.min_effect or UNSEEN

    def values(self, label: str) -> list[float]:
        """Return the val losses of an arm's runs."""
        return [run["val_loss"] for run in self.runs[label]]

    # ---- runs ------------------------------------------------------------------------------------

    def run_rounds(self) -> Iterator[str]:
        """Run rounds, one run of each arm, and give a line after each that decides nothing.

        Ends when the question is decided, or the next round does not fit into the budget. Raises as
        Trainer.run does.
        """
        while self.verdict == "open" and self.rounds < max(PILOT, self.affordable()):
            seed = self.first_seed + self.rounds
            self.runs["a"].append(self.trainer.run(self.a, seed))
            self.runs["b"].append(self.trainer.run(self.b, seed))
            self.check_windows()
            self.estimate = difference(self.values("a"), self.values("b"))
            self.verdict = decide(self.estimate, self.same_within)
            if self.verdict == "open":
                costs = f"; {self.cost_line()}" if self.rounds >= PILOT else ""
                yield f"round {self.rounds}: {self.summary()}{costs}"

    def check_windows(self) -> None:
        """Raise ConfigError if arms were evaluated on different windows."""
        digests = {str(run["eval_digest"]) for runs in self.runs.values() for run in runs}
        if len(digests) > 1:
            raise ConfigError(
                "the arms were evaluated on different windows (digests "
                f"{', '.join(sorted(digests))}), so their losses do not compare; leave "
                "block_size and the tokenizer equal"
            )

    def round_s(self) -> float:
        """Return the seconds of a round."""
        return sum(statistics.median(run["wall_s"] for run in runs) for runs in self.runs.values())

    def affordable(self) -> int:
        """Return the runs of each arm within the budget, with those so far, whenever they were
        run.
        """
        if not self.rounds:
            return 0
        spent_s = sum(run["wall_s"] for runs in self.runs.values() for run in runs)
        left_s = max(0.0, self.budget_s - spent_s)
        return min(MOST, self.rounds + int(left_s / max(self.round_s(), 1e-3)))

    # ---- what is known ---------------------------------------------------------------------------

    def cost_line(self) -> str:
        """Return the cost of the question, by the scatter of the arms so far, and what the budget
        pays.
        """
        pays = (
            f"the budget, {clock(self.budget_s)}, pays {self.affordable():,} at "
            f"{clock(self.round_s())} a round"
        )
        if self.min_effect is None:
            return pays
        needed = cost(self.values("a"), self.values("b"), self.min_effect)
        number = f"{needed:,}" if needed else f"more than {MOST:,}"
        takes = f"a difference of {self.min_effect:g} nats takes {number} runs of each arm"
        return f"{takes} (in {POWER:.0%} of such questions); {pays}"

    def answer(self) -> dict[str, Any]:
        """Return the answer after the last round: a sentence, its figures and the exit status of
        the script.
        """
        if self.verdict == "same":
            sentence = f"a and b do not differ by {self.same_within:g} nats"
        elif self.verdict == "open":
            sentence = "Not enough yet"
        else:
            sentence = f"b ({self.b.name}) is {self.verdict}"
        return {
            "verdict": self.verdict,
            "status": STATUS[self.verdict],
            "sentence": f"{sentence}: {self.summary()}.",
            "arms": {"a": self.a.text, "b": self.b.text},
            "values": {label: self.values(label) for label in self.runs},
        }

    def summary(self) -> str:
        """Return the loss of b less that of a with the 95% interval over seeds, and both arms' mean
        losses.
        """
        e = self.estimate
        limits = (
            f"95% interval {nats(-e.high)} to {nats(-e.low)}"
            if e.known
            else "too few runs for an interval"
        )
        means = [f"{label} {statistics.fmean(self.values(label)):.4f}" for label in self.runs]
        found = [
            f"val loss of b less that of a {nats(-e.d)} nats ({limits}, n = {e.n})",
            f"means {', '.join(means)}",
        ]
        for label, runs in self.runs.items():
            diverged = sum(run["has_diverged"] for run in runs)
            if diverged:
                found.append(
                    f"{diverged} of {len(runs)} runs of {label} diverged and count as guessing"
                )
        return "; ".join(found)


def nats(value: float) -> str:
    """Return a difference with four decimals, zero without a minus."""
    return f"{round(value, 4) + 0.0:+.4f}"
