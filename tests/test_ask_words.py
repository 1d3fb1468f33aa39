"""The lines, the price and the answer of a question, from made-up runs: nothing is trained."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import ask
from bench.asking import words
from bench.asking.arms import Arm
from bench.asking.ledger import Ledger
from bench.asking.question import Question
from bench.asking.running import Place
from bench.asking.statistics import PILOT
from deskgpt.system.errors import ConfigError


class MadeUp(Question):
    """A question whose runs end at the losses that it is given, and noise."""

    def __init__(self, folder: Path, losses: Sequence[float], **given: Any) -> None:
        texts = ["", "--n_layer=2", "x.patch", "commit:HEAD~3"]
        arms = [Arm("abcd"[i], texts[i], [], folder, f"code {i}", {"max_iters": 100}) for i in range(len(losses))]
        given = {"min_effect": None, "budget_s": 3600.0, "first_seed": 1} | given
        super().__init__(arms, Place(Ledger(folder / "ledger"), folder, "cpu"), **given)
        self.losses = losses
        self.draw = random.Random(0)

    def do_round(self, n: int) -> None:
        for label in self.alive:
            last = self.losses["abcd".index(label)] + self.draw.gauss(0, 0.03)
            batches = [last + math.sin(i) for i in range(10)]
            self.runs[label].append({"outcome": "ended", "val_loss": last, "val_batches": batches, "wall_s": 10.0})

    def after(self, rounds: int) -> MadeUp:
        """The question after so many rounds, or fewer where it is decided sooner."""
        for _, _ in zip(range(rounds), self.answered(), strict=False):
            pass
        return self


def test_budget_is_refused_only_where_the_low_end_of_the_price_does_not_fit(tmp_path):
    with pytest.raises(ConfigError, match="does not fit"):
        ask.ask(MadeUp(tmp_path, [1.9, 1.8], min_effect=1e-6, budget_s=600.0))
    question = MadeUp(tmp_path, [1.9, 1.8], min_effect=0.05).after(PILOT)
    assert question.price_line()
    low = int(question.price["low"])
    question.budget_s = 10.0 * (low - PILOT) - 5
    with pytest.raises(ConfigError, match="does not fit"):
        question.price_line()


def test_arms_that_cannot_win_get_no_more_runs_and_the_answer_names_all(tmp_path):
    question = MadeUp(tmp_path, [2.5, 1.9, 2.1, 1.88], min_effect=0.001).after(9)
    assert question.alive == ["b", "d"]
    assert len(question.runs["a"]) < len(question.runs["d"])
    sentence, status, _ = words.answer(question)
    assert status == 3
    assert sentence.startswith("Not enough yet: d is lower than b by ")
    assert sentence.endswith("; out: c, a.")


def test_runs_that_were_judged_on_different_windows_are_refused(tmp_path):
    question = MadeUp(tmp_path, [1.9, 1.9])
    question.runs = {"a": [{"eval_digest": "x"}, {}], "b": [{"eval_digest": None}]}
    question.check_judgement()  # older code does not say it
    question.runs["b"].append({"eval_digest": "y"})
    with pytest.raises(ConfigError, match="judged on different windows"):
        question.check_judgement()
