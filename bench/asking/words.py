"""The answer to a question: an English sentence, its figures for programs, and its exit status."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

from bench.asking import statistics as sure
from bench.asking.arms import Arm
from bench.asking.question import Question
from bench.asking.statistics import Estimate


def answer(question: Question) -> tuple[str, int, dict[str, Any]]:
    """(sentence, exit status, figures) of a question after its last look."""
    if not question.looks:
        raise ValueError("no round of runs was finished")
    look = question.looks[-1]
    first = question.arms[0].label
    best = ranked(question)[0]
    verdict = look.verdict
    if verdict == "same":
        pairs = [pair_text(question, x, y) for x, y in look.estimates if x in look.alive and y in look.alive]
        losers = [f" {x} is worse than {y}: {pair_text(question, y, x)}." for x, y in look.dropped.items()]
        sentence = f"No difference beyond {question.same_within:g} nats between {' and '.join(look.alive)}: "
        sentence += f"{'; '.join(pairs)}.{''.join(losers)}"
        status = 1 if first in look.alive else 0
    elif verdict == "better":
        others = [label for label in question.runs if label != best and pair(best, label) in look.estimates]
        gaps = [f"than {x} by {pair_text(question, best, x)}" for x in others]
        what = next(arm.what for arm in question.arms if arm.label == best)
        sentence = f"{best} ({what}) is better {', '.join(gaps)}."
        verdict = "worse" if best == first else "better"
        status = 1 if best == first else 0
    else:
        sentence = f"Not enough yet: {so_far(question)}."
        verdict = "not enough yet"
        status = 3
    data = {"verdict": verdict, "status": status, "sentence": sentence, "min_effect": question.min_effect}
    data |= {"rounds": look.n, "best": best, "dropped": look.dropped, "price": question.price}
    data["pairs"] = [pair_data(question, x, y) for x, y in look.estimates]
    data["arms"] = [arm_data(question, arm) for arm in question.arms]
    return sentence, status, data


def pair_data(question: Question, x: str, y: str) -> dict[str, Any]:
    e = question.looks[-1].estimates[x, y]
    found = asdict(e) | {"first": x, "second": y, "text_error": question.text_error(x, y)}
    if not e.known:
        found |= {"low": None, "high": None}
    return found


def arm_data(question: Question, arm: Arm) -> dict[str, Any]:
    diverged = sum(run["outcome"] == "diverged" for run in question.runs[arm.label])
    values = question.values(arm.label)
    return {"label": arm.label, "what": arm.text, "steps": arm.steps, "values": values, "diverged": diverged}


def ranked(question: Question) -> list[str]:
    """The arms' labels, the best one first, and those that can no longer win last."""
    alive = question.looks[-1].alive
    return sorted(question.runs, key=lambda label: (label not in alive, statistics.fmean(question.values(label))))


def pair(x: str, y: str) -> tuple[str, str]:
    return min(x, y), max(x, y)


def so_far(question: Question) -> str:
    """Who leads after the last look, and who can no longer win."""
    best, second = ranked(question)[:2]
    out = ", ".join(sorted(question.looks[-1].dropped))
    return f"{best} leads {second} by {pair_text(question, best, second)}" + (f"; out: {out}" if out else "")


def pair_text(question: Question, x: str, y: str) -> str:
    """The difference of two arms, its errors and the runs that it stands on."""
    e = question.looks[-1].estimates[pair(x, y)]
    text = question.text_error(*pair(x, y))
    of_text = f"; the text judged by leaves ± {text:.4f}" if text is not None else ""
    scatter = [statistics.pstdev(question.values(label)) for label in (x, y)]
    is_uneven = e.n >= sure.LEAST and 0 < 2 * min(scatter) < max(scatter)
    uneven = "; one scatters more than twice as much, which takes more runs" if is_uneven else ""
    means = f"{mean_text(question, x)}, {mean_text(question, y)}"
    return f"{amount(e)} ({means}; {e.n} runs of each{of_text}{uneven})"


def mean_text(question: Question, label: str) -> str:
    runs = question.runs[label]
    lost = sum(run["outcome"] == "diverged" for run in runs)
    note = f", {lost} of {len(runs)} runs diverged and count as guessing" if lost else ""
    return f"{label} {statistics.fmean(question.values(label)):.4f}{note}"


def amount(e: Estimate) -> str:
    """The size of a difference, and its 95% interval over seeds where there is one."""
    if not e.known:
        return f"{abs(e.d):.4f} nats, too few runs for an interval"
    low, high = (e.low, e.high) if e.d >= 0 else (-e.high, -e.low)
    return f"{abs(e.d):.4f} nats, 95% interval {low:.4f} to {high:.4f}"
