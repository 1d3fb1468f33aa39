"""A win is asked again: on fresh seeds, on text that no question was judged by, and with a model twice as deep.

Who asks many questions keeps the luckiest answers, so a win that is repeated is smaller in the mean than it was.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.asking import words
from bench.asking.arms import Arm
from bench.asking.held_out import PART, set_aside
from bench.asking.ledger import Ledger
from bench.asking.question import Question
from bench.asking.statistics import MOST, Estimate, verdict
from deskgpt.system.errors import ConfigError

SEEDS_AFTER = MOST  # the first seed of the question
DEEPER = 2


def questions(question: Question, data: Path) -> tuple[dict[str, Any], list[Question]]:
    """(the answer that is confirmed, the questions that do so: the same model, and a deeper one).

    data: the dataset's folder. Raises ConfigError where the ledger has no win, or all of the text was judged by.
    """
    ledger = question.place.ledger
    answers = [e for e in ledger.answers() if e["question"] == question.digest and e["verdict"] == "better"]
    if not answers or question.together:
        raise ConfigError("--confirm: the ledger has no better arm for this question; ask it without --confirm first")
    won = answers[-1]
    arms = [arm for arm in question.arms if arm.label in (question.arms[0].label, won["best"])]
    if any(arm.known is not None for arm in arms):
        raise ConfigError("--confirm: an arm is a number; there is nothing to repeat")
    place = replace(question.place, data=set_aside(data, ledger.folder / "data", fresh_part(ledger, question.digest)))
    seed = question.first_seed + SEEDS_AFTER
    out = []
    # The budget is counted from the start; the deeper model has what the first question leaves.
    for of_these, share in ((arms, 1 / (1 + DEEPER)), ([deeper(arm) for arm in arms], 1.0)):
        budget_s = share * question.budget_s
        again = Question(of_these, place, question.resolve, budget_s, seed, question.figure, began=question.began)
        again.tuned = question.tuned
        again.anyway = question.anyway
        out.append(again)
    return won, out


def fresh_part(ledger: Ledger, question: str) -> int:
    """The part of the training text that is set aside to confirm this question. Raises ConfigError after the last."""
    parts = {e["question"]: e["part"] for e in ledger.events if e["event"] == "confirm"}
    if question not in parts:
        part = 1 + max(parts.values(), default=0)
        if part >= PART:
            raise ConfigError(f"--confirm: all {PART} parts of the text were judged by; take other data or --ledger")
        ledger.add("confirm", question=question, part=part)
        return part
    return int(parts[question])


def deeper(arm: Arm) -> Arm:
    n_layer = DEEPER * arm.settings["n_layer"]
    return replace(
        arm, arguments=[*arm.arguments, f"--n_layer={n_layer}"], settings=arm.settings | {"n_layer": n_layer}
    )


def answer(won: dict[str, Any], again: list[Question]) -> tuple[str, int, dict[str, Any]]:
    """(whether the win held and by how much it shrank, exit status, figures); 0 where it held in both questions."""
    best = won["best"]
    before = next(pair["d"] for pair in won["pairs"] if pair["arms"] == [again[0].arms[0].label, best])
    said = []
    statuses = []
    for question, on in zip(again, ("fresh seeds and text", f"these with {DEEPER} times the layers"), strict=True):
        if not question.looks:
            said.append(f"on {on} nothing was run within the budget")
            statuses.append(3)
            continue
        e = next(iter(question.looks[-1].estimates.values()))
        statuses.append({"better": 0, "open": 3}.get(verdict(e, question.resolve), 1))
        said.append(f"{held(statuses[-1], best)} on {on}: {left_of(question, e, before)}")
    status = 0 if statuses == [0, 0] else 3 if 3 in statuses else 1
    sentence = "; ".join(said) + "."
    said_as = {0: "confirmed", 1: "not confirmed", 3: "not enough yet"}[status]
    data = {"verdict": said_as, "status": status, "sentence": sentence, "confirms": won["question"]}
    return sentence, status, data | {"again": [words.answer(question)[2] for question in again if question.looks]}


def held(status: int, best: str) -> str:
    return {0: f"{best} is better again", 1: f"{best} is not better", 3: f"{best} is not told apart yet"}[status]


def left_of(question: Question, e: Estimate, before: float) -> str:
    """A repeated difference in per cent of the first one."""
    sign = "-" if e.d < 0 else ""
    share = e.d / before
    change = "it shrank" if share < 1 else "it did not shrink"
    error = abs(e.half / before)
    of = f"{share:.0%}" + (f" ± {error:.0%}" if math.isfinite(error) else "")
    return f"{sign}{words.amount(question, e)} after {e.n} runs of each, {of} of what it was: {change}"
