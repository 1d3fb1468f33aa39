"""The answer to a question: an English sentence, its figures for programs, and its exit status."""

from __future__ import annotations

import math
import statistics
from typing import Any

from bench.analysis.logs import Run, spent_until
from bench.asking import statistics as sure
from bench.asking.arms import Arm
from bench.asking.question import FIGURES, Question
from bench.asking.statistics import Estimate
from bench.asking.tune import untuned
from deskgpt.system.formatting import clock

BETWEEN_S = 60.0  # runs that take turns, at most


def answer(question: Question) -> tuple[str, int, dict[str, Any]]:
    """(sentence, exit status, figures) of a question after its last look."""
    if not question.looks:
        raise ValueError("no round of runs was finished")
    look = question.looks[-1]
    first = question.arms[0].label
    best = ranked(question)[0]
    named = {arm.label: arm for arm in question.arms}
    if look.verdict == "open":
        sentence, status = open_sentence(question), 3
        verdict = "not enough yet"
    elif look.interaction:
        sentence = together_text(question, look.interaction)
        status = 0 if look.verdict == "better" else 1
        verdict = {"same": "no difference"}.get(look.verdict, look.verdict)
    elif look.verdict == "same":
        among = " and ".join(look.alive)
        beyond = f"{question.resolve:g} {FIGURES[question.figure].unit}"
        sentence = f"No difference beyond {beyond} between {among}: {pairs_text(question, look.alive)}."
        sentence += "".join(f" {x} is worse than {y}: {pair_text(question, y, x)}." for x, y in look.dropped.items())
        status = 1 if first in look.alive else 0
        verdict = "no difference"
    else:
        others = [label for label in question.runs if label != best]
        status = 0 if best != first else 1
        verdict = "better" if status == 0 else "worse"
        if len(others) == 1:
            subject = best if status == 0 else others[0]
            said = pair_text(question, *sorted((best, others[0])))
            numbers = [arm for arm in question.arms if arm.known is not None]
            if numbers:
                sentence = beside_number(question, numbers[0], said)
            else:
                sentence = f"{subject} is {verdict} by {said}."
                sentence += price_of_worse(question, named[best], named[others[0]])
        else:
            gaps = [f"than {x} by {pair_text(question, best, x)}" for x in others if (best, x) in both_ways(question)]
            sentence = f"{best} ({named[best].what}) is the best: better {', '.join(gaps)}."
    if question.figure == "val_loss" and not question.tuned:
        sentence = f"{sentence} {untuned(question.arms, question.runs)}".strip()
    data = {"verdict": verdict, "status": status, "sentence": sentence, "figure": question.figure}
    data |= {"resolve": question.resolve, "rounds": look.n, "best": best, "dropped": look.dropped}
    data["pairs"] = [
        {"arms": [x, y], "d": e.d, "half": e.half, "n": e.n, "paired": e.paired, "sd": e.sd}
        for (x, y), e in look.estimates.items()
    ]
    if look.interaction:
        data["interaction"] = {"gain": look.interaction.d, "half": look.interaction.half}
    data["arms"] = [arm_data(question, arm) for arm in question.arms]
    return sentence, status, data


def beside_number(question: Question, arm: Arm, said: str) -> str:
    """Where the other arm lies, of a question with an arm that is a number. said: the difference."""
    label = next(label for label in question.runs if label != arm.label)
    mean = statistics.fmean(run[question.figure] for run in question.runs[label])
    return f"{label} is {'above' if mean > (arm.known or 0.0) else 'below'} {arm.text} by {said}."


def so_far(question: Question) -> str:
    """What is known after the last look, short enough for a progress bar: who leads, and who can no longer win."""
    best, second = ranked(question)[:2]
    lead = amount(question, estimate(question, best, second))
    if len(question.runs) == 2:
        return f"{best} leads by {lead}"
    out = ", ".join(sorted(question.looks[-1].dropped))
    return f"{best} leads {second} by {lead}" + (f"; out: {out}" if out else "")


def so_far_with_means(question: Question) -> str:
    """The same with what it stands on."""
    labels = list(question.runs)
    runs = runs_text(estimate(question, *ranked(question)[:2]))
    return f"{so_far(question)} ({means_text(question, labels)}; {runs}{diverged(question, *labels)})"


def ranked(question: Question) -> list[str]:
    """The arms' labels, the best one first, and those that can no longer win last."""
    alive = question.looks[-1].alive
    return sorted(question.runs, key=lambda label: (label not in alive, statistics.fmean(question.values(label))))


def both_ways(question: Question) -> set[tuple[str, str]]:
    return {pair for x, y in question.looks[-1].estimates for pair in ((x, y), (y, x))}


def arm_data(question: Question, arm: Arm) -> dict[str, Any]:
    runs = question.runs[arm.label]
    found = [run[question.figure] for run in runs]
    return {
        "label": arm.label,
        "what": arm.text,
        "steps": arm.steps,
        "runs": len(runs),
        "mean": statistics.fmean(found),
        "values": found,
        "diverged": sum(run["outcome"] == "diverged" for run in runs),
        "step_ms": mean_of(runs, "step_ms"),
    }


def mean_of(runs: list[dict[str, Any]], name: str) -> float | None:
    values = [run[name] for run in runs if run[name] is not None]
    return statistics.fmean(values) if values else None


def estimate(question: Question, x: str, y: str) -> Estimate:
    """Of the difference of two arms, after the last look at both."""
    return question.looks[-1].estimates[min(x, y), max(x, y)]


def pair_text(question: Question, x: str, y: str) -> str:
    """The difference of two arms, its error and the runs that it stands on."""
    e = estimate(question, x, y)
    means = means_text(question, [x, y])
    return f"{amount(question, e)} ({means}; {runs_text(e)}{diverged(question, x, y)})"


def amount(question: Question, e: Estimate) -> str:
    """The size of a difference, and its error where that is known."""
    error = f" ± {number(question, e.half)}" if math.isfinite(e.half) else ""
    return f"{number(question, abs(e.d))}{error} {FIGURES[question.figure].unit}".strip()


def means_text(question: Question, labels: list[str]) -> str:
    means = {label: statistics.fmean(run[question.figure] for run in question.runs[label]) for label in labels}
    return ", ".join(f"{label} {number(question, mean)}" for label, mean in means.items())


def number(question: Question, value: float) -> str:
    """Losses with four decimals, other figures with at least four digits: MFU is below 1, tokens/s are thousands."""
    if question.figure == "val_loss":
        return f"{value:.4f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}"


def runs_text(e: Estimate) -> str:
    """What a difference stands on."""
    if math.isinf(e.half):
        return f"{e.n} runs of each, too few for an interval"
    return f"{e.n} runs of each, {'in pairs by seed' if e.paired else 'not paired'}"


def pairs_text(question: Question, labels: list[str]) -> str:
    pairs = [(x, y) for x, y in question.looks[-1].estimates if x in labels and y in labels]
    return "; ".join(pair_text(question, x, y) for x, y in pairs)


def together_text(question: Question, extra: Estimate) -> str:
    """What each change gains alone and all together, and whether the gains add up."""
    first, *alone, last = question.runs
    said_as = {"better": "better than", "worse": "worse than", "same": "no different from", "open": "not told from"}
    estimates = question.looks[-1].estimates
    said = []
    for x in [*alone, last]:
        is_ = said_as[sure.verdict(estimates[first, x], question.resolve)]
        who = f"{' and '.join(alone)} together are" if x == last else f"{x} is"
        said.append(f"{who} {is_} {first} by {pair_text(question, first, x)}")
    gain = sure.verdict(extra, question.resolve)
    sums = {"better": "more than", "worse": "less than"}.get(gain)
    adds = f"gain {amount(question, extra)} {sums} the sum of each" if sums else ""
    adds = adds or f"gain the sum of each: it differs by {amount(question, extra)}"
    return f"{'; '.join(said)}. Together they {adds}."


def diverged(question: Question, *labels: str) -> str:
    """Runs that diverged, which count as guessing."""
    said = ""
    for label in labels:
        n = sum(run["outcome"] == "diverged" for run in question.runs[label])
        if n:
            said += f"; {n} of {len(question.runs[label])} runs of {label} diverged and count as guessing"
    return said


def open_sentence(question: Question) -> str:
    left = question.left_s()
    more = "longer than anyone waits" if left is None else f"about {clock(left)} more"
    look = question.looks[-1]
    if look.interaction:
        return f"Not enough yet, {more}: {together_text(question, look.interaction)}"
    return f"Not enough yet, {more}: {so_far_with_means(question)}."


# ---- what a difference in loss is worth ----------------------------------------------------------------------


def price_of_worse(question: Question, best: Arm, worse: Arm) -> str:
    """How many more steps, and how much more time, the worse arm's loss costs; empty where that is not known or none.

    The better arm reaches the worse one's last loss at some step of its own, so the worse one spends that much more. In
    the middle of a schedule the learning rate is still high, so the figure is a lower limit.
    """
    if question.figure != "val_loss":
        return ""
    goal = statistics.fmean(question.values(worse.label))
    step = spent_until(mean_curve(best.what, question.runs[best.label]), "steps", goal)
    if step is None or step >= worse.steps:
        return ""
    more_steps = worse.steps / step - 1
    text = f" {worse.label} takes at least {more_steps:.0%} more steps for the same loss"
    slower = step_ratio(question, best, worse)
    if slower:
        text += f", {worse.steps * slower / step - 1:+.0%} of the time"
    return text + "."


def step_ratio(question: Question, x: Arm, y: Arm) -> float | None:
    """How many times as long as x's y's steps took, of runs that took turns; None where none did.

    The ledger's runs of another day do not count: the machine may have been busier.
    """
    ratios = []
    for a, b in zip(question.runs[x.label], question.runs[y.label], strict=False):
        turns_s = len(question.arms) * max(a["wall_s"], b["wall_s"]) + BETWEEN_S
        apart_s = abs(a.get("ended", 0) - b.get("ended", math.inf))
        if a["step_ms"] and b["step_ms"] and apart_s < turns_s:
            ratios.append(b["step_ms"] / a["step_ms"])
    return statistics.median(ratios) if ratios else None


def mean_curve(name: str, runs: list[dict[str, Any]]) -> Run:
    """Runs of one arm as one: the mean of their val losses at each step where all of them were evaluated."""
    by_step: dict[int, list[float]] = {}
    for run in runs:
        for step, loss in run["curve"]:
            by_step.setdefault(step, []).append(loss)
    known = {step: statistics.fmean(of_step) for step, of_step in sorted(by_step.items()) if len(of_step) == len(runs)}
    return Run(name, evals=[{"iter": step, "val_loss": loss} for step, loss in known.items()])
