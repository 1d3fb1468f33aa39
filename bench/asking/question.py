"""A question: two arms that take turns on shared seeds until the difference is decided or the
budget is spent.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.asking.arms import Arm
from bench.asking.running import Trainer
from bench.asking.statistics import LEAST, MOST, PILOT, POWER, Estimate, cost, decide, difference
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

    def values(self) -> tuple[list[float], list[float]]:
        """Return the val losses of a's and of b's runs."""
        a, b = ([run["val_loss"] for run in runs] for runs in self.runs.values())
        return a, b

    # ---- runs ------------------------------------------------------------------------------------

    def run_rounds(self) -> Iterator[str]:
        """Run rounds, one run of each arm, and give a line after each that decides nothing.

        Ends when the question is decided, or the next round does not fit into the budget. Raises as
        Trainer.run does.
        """
        while self.verdict == "open" and self.rounds < max(PILOT, self.affordable()):
            seed = self.first_seed + self.rounds
            for arm in (self.a, self.b):
                self.runs[arm.label].append(self.trainer.run(arm, seed))
            self.check_windows()
            self.estimate = difference(*self.values())
            self.verdict = decide(self.estimate, self.min_effect or UNSEEN)
            if self.verdict == "open":
                yield f"round {self.rounds}: {self.summary()}; {self.cost_line()}"

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
        """Return the seconds of a round, whenever its runs were made."""
        return sum(run["wall_s"] for runs in self.runs.values() for run in runs) / self.rounds

    def affordable(self) -> int:
        """Return the rounds that the budget pays, with those so far."""
        return min(MOST, int(self.budget_s / self.round_s())) if self.rounds else 0

    # ---- what is known ---------------------------------------------------------------------------

    def cost(self) -> int | None:
        """Return the runs of each arm that find a difference of min_effect; None if that is not
        known, or beyond MOST.
        """
        if self.min_effect is None or self.rounds < PILOT:
            return None
        return cost(*self.values(), self.min_effect)

    def cost_line(self) -> str:
        """Return the cost of the question, by the scatter of the arms so far, and what the budget
        pays.
        """
        round_s = self.round_s()
        line = (
            f"the budget, {clock(self.budget_s)}, pays {self.affordable():,} at "
            f"{clock(round_s)} a round"
        )
        if self.affordable() < LEAST:
            enough = math.ceil(LEAST * round_s)
            line += f", and no answer comes before {LEAST}: raise it to --budget={enough}s or more"
        if self.min_effect is None or self.rounds < PILOT:
            return line
        number = self.cost() or f"more than {MOST}"
        takes = f"a difference of {self.min_effect:g} nats takes {number} runs of each arm"
        return f"{takes} (in {POWER:.0%} of such questions); {line}"

    def answer(self) -> dict[str, Any]:
        """Return the answer after the last round: a sentence, its figures and the exit status of
        the script.
        """
        if self.verdict == "same":
            sentence = f"a and b do not differ by {self.min_effect or UNSEEN:g} nats"
        elif self.verdict == "open":
            sentence = "Not enough yet"
        else:
            sentence = f"b ({self.b.text}) is {self.verdict}"
        e = self.estimate
        return {
            "verdict": self.verdict,
            "status": STATUS[self.verdict],
            "sentence": f"{sentence}: {self.summary()}.",
            "difference": -e.d,  # val loss of b less that of a, in nats
            "interval": [-e.high, -e.low] if e.known else None,
            "n": e.n,
            "cost": self.cost(),
            "arms": {"a": self.a.text, "b": self.b.text},
            "values": dict(zip("ab", self.values(), strict=True)),
        }

    def summary(self) -> str:
        """Return the loss of b less that of a with the 95% interval over seeds, and both arms' mean
        losses.
        """
        e = self.estimate
        limits = "too few runs for an interval"
        if e.known:
            limits = f"95% interval {nats(-e.high)} to {nats(-e.low)}"
        a, b = map(statistics.fmean, self.values())
        line = f"val loss of b less that of a {nats(-e.d)} nats ({limits}, n = {e.n})"
        line += f"; means a {a:.4f}, b {b:.4f}"
        for label, runs in self.runs.items():
            if diverged := sum(run["has_diverged"] for run in runs):
                line += (
                    f"; {diverged} of {len(runs)} runs of {label} diverged and count as guessing"
                )
        return line


def nats(value: float) -> str:
    """Return a difference with four decimals, zero without a minus."""
    return f"{value:+z.4f}"
