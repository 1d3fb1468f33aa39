"""The answer to a question: an English sentence, its figures for programs, and its exit status."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

from bench.asking import statistics as sure
from bench.asking.arms import Arm
from bench.asking.question import FIGURES, Question
from bench.asking.statistics import Estimate

SAID = {"better": "better than", "worse": "worse than", "same": "no different from", "open": "not told apart from"}
SUMS = {
    "better": "gain more than the sum of each, by",
    "worse": "gain less than the sum of each, by",
    "same": "gain the sum of each, within",
    "open": "may gain more or less than the sum of each, so far by",
}


def answer(question: Question) -> tuple[str, int, dict[str, Any]]:
    """(sentence, exit status, figures) of a question after its last look."""
    if not question.looks:
        raise ValueError("no round of runs was finished")
    look = question.looks[-1]
    first = question.arms[0].label
    best = ranked(question)[0]
    status = 0 if best != first else 1
    if look.interaction:
        sentence = together_text(question, look.interaction)
        status = 0 if look.verdict == "better" else 1
    elif look.verdict == "same":
        beyond = f"{question.same_within:g} {FIGURES[question.figure].unit}"
        pairs = "; ".join(pair_text(question, x, y) for x, y in look.estimates if {x, y} <= set(look.alive))
        sentence = f"No difference beyond {beyond} between {' and '.join(look.alive)}: {pairs}."
        sentence += "".join(f" {x} is worse than {y}: {pair_text(question, y, x)}." for x, y in look.dropped.items())
        status = 1 if first in look.alive else 0
    elif look.verdict == "better":
        others = [label for label in question.runs if label != best and pair(best, label) in look.estimates]
        what = next(arm.what for arm in question.arms if arm.label == best)
        gaps = ", ".join(f"than {x} by {pair_text(question, best, x)}" for x in others)
        sentence = f"{best} ({what}) is better {gaps}."
    verdict = look.verdict if look.verdict != "better" or status == 0 else "worse"
    if look.verdict == "open":
        known = together_text(question, look.interaction) if look.interaction else so_far(question) + "."
        sentence, status, verdict = f"Not enough yet: {known}", 3, "not enough yet"
    data = {"verdict": verdict, "status": status, "sentence": sentence, "figure": question.figure}
    data |= {"min_effect": question.min_effect, "rounds": look.n, "best": best, "dropped": look.dropped}
    data["pairs"] = [estimate_data(e) | {"first": x, "second": y} for (x, y), e in look.estimates.items()]
    if look.interaction:
        data["interaction"] = estimate_data(look.interaction)
    data["arms"] = [arm_data(question, arm) for arm in question.arms]
    return sentence, status, data


def estimate_data(e: Estimate) -> dict[str, Any]:
    return asdict(e) | {"low": e.low if e.known else None, "high": e.high if e.known else None}


def arm_data(question: Question, arm: Arm) -> dict[str, Any]:
    runs = question.runs[arm.label]
    values = [run[question.figure] for run in runs]
    diverged = sum(run["outcome"] == "diverged" for run in runs)
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
    """The difference of two arms, its interval and the runs that it stands on."""
    e = question.looks[-1].estimates[pair(x, y)]
    means = []
    for label in (x, y):
        runs = question.runs[label]
        mean = statistics.fmean(run[question.figure] for run in runs)
        lost = sum(run["outcome"] == "diverged" for run in runs)
        note = f", {lost} of {len(runs)} runs diverged and count as guessing" if lost else ""
        means.append(f"{label} {number(question, mean)}{note}")
    scatter = [statistics.pstdev(question.values(label)) for label in (x, y)]
    is_uneven = e.n >= sure.LEAST and 0 < 2 * min(scatter) < max(scatter)
    uneven = "; one scatters more than twice as much, which takes more runs" if is_uneven else ""
    return f"{amount(question, e)} ({', '.join(means)}; {e.n} runs of each{uneven})"


def amount(question: Question, e: Estimate) -> str:
    """The size of a difference, and its 95% interval where there is one."""
    size = number(question, abs(e.d))
    unit = FIGURES[question.figure].unit
    if not e.known:
        return f"{size} {unit}, too few runs for an interval"
    low, high = (e.low, e.high) if e.d >= 0 else (-e.high, -e.low)
    return f"{size} {unit}, 95% interval {number(question, low)} to {number(question, high)}"


def number(question: Question, value: float) -> str:
    """Losses with four decimals, other figures with at least four digits: MFU is below 1, tokens/s are thousands."""
    if question.figure == "val_loss":
        return f"{value:.4f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}"


def together_text(question: Question, extra: Estimate) -> str:
    """What each change gains alone and all together, and whether the gains add up."""
    first, *alone, last = question.runs
    parts = []
    for x in [*alone, last]:
        found = sure.verdict(question.looks[-1].estimates[first, x], question.same_within)
        who = f"{' and '.join(alone)} together are" if x == last else f"{x} is"
        parts.append(f"{who} {SAID[found]} {first} by {pair_text(question, first, x)}")
    adds = SUMS[sure.verdict(extra, question.same_within)]
    return f"{'; '.join(parts)}. Together they {adds} {amount(question, extra)}."
