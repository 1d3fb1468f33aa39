"""The answer to a question: an English sentence, its figures for programs, and its exit status."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

from bench.asking.question import Question
from bench.asking.statistics import LEAST


def answer(question: Question) -> tuple[str, int, dict[str, Any]]:
    """(sentence, exit status, figures) of a question after its last look."""
    first = question.arms[0].label
    best = ranked(question)[0]
    if question.verdict == "same":
        verdict = "same"
        status = 1 if first in question.alive else 0
        sentence = f"No difference beyond {question.same_within:g} nats between {' and '.join(question.alive)}"
    elif question.verdict == "better":
        verdict = "worse" if best == first else "better"
        status = 1 if best == first else 0
        what = next(arm.what for arm in question.arms if arm.label == best)
        sentence = f"{best} ({what}) is better"
    else:
        verdict = "not enough yet"
        status = 3
        sentence = "Not enough yet"
    sentence = f"{sentence}: {so_far(question)}."
    data: dict[str, Any] = {"verdict": verdict, "status": status, "sentence": sentence}
    data |= {"min_effect": question.min_effect, "rounds": question.rounds, "best": best, "price": question.price}
    data |= {"pairs": [pair_data(question, x, y) for x, y in question.estimates], "arms": []}
    for arm in question.arms:
        lost = sum(run["outcome"] == "diverged" for run in question.runs[arm.label])
        about = {"label": arm.label, "what": arm.text, "steps": arm.steps}
        data["arms"].append(about | {"values": question.values(arm.label), "diverged": lost})
    return sentence, status, data


def pair_data(question: Question, x: str, y: str) -> dict[str, Any]:
    e = question.estimates[x, y]
    found = asdict(e) | {"first": x, "second": y, "text_error": question.text_error(x, y)}
    return found if e.known else found | {"low": None, "high": None}


def ranked(question: Question) -> list[str]:
    """The arms' labels, the best one first, and those that can no longer win last."""
    return sorted(
        question.runs, key=lambda label: (label not in question.alive, statistics.fmean(question.values(label)))
    )


def so_far(question: Question) -> str:
    """How much lower the loss of the best arm is than each other one's, and which arms can no longer win."""
    best, *others = ranked(question)
    gaps = ", ".join(f"than {x} by {pair_text(question, best, x)}" for x in others)
    out = [label for label in others if label not in question.alive and len(question.alive) > 1]
    return f"{best} is lower {gaps}" + (f"; out: {', '.join(out)}" if out else "")


def pair_text(question: Question, x: str, y: str) -> str:
    """The difference of two arms, its 95% interval over seeds, the error of the text, and the runs it stands on."""
    first, second = sorted((x, y))
    e = question.estimates[first, second]
    size = f"{abs(e.d):.4f} nats"
    if e.known:
        low, high = (e.low, e.high) if e.d >= 0 else (-e.high, -e.low)
        size += f", 95% interval {low:.4f} to {high:.4f}"
    else:
        size += ", too few runs for an interval"
    parts = [f"{mean_text(question, x)}, {mean_text(question, y)}", f"{e.n} runs of each"]
    text = question.text_error(first, second)
    if text is not None:
        parts.append(f"the text judged by leaves ± {text:.4f}")
    scatter = [statistics.pstdev(question.values(label)) for label in (x, y)]
    if e.n >= LEAST and 0 < 2 * min(scatter) < max(scatter):
        parts.append("one scatters more than twice as much, which takes more runs")
    return f"{size} ({'; '.join(parts)})"


def mean_text(question: Question, label: str) -> str:
    runs = question.runs[label]
    lost = sum(run["outcome"] == "diverged" for run in runs)
    note = f", {lost} of {len(runs)} runs diverged and count as guessing" if lost else ""
    return f"{label} {statistics.fmean(question.values(label)):.4f}{note}"
