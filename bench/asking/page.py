"""The page of a question: the answer so far, the arms' curves, and the interval of the difference as it narrowed."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.analysis import page
from bench.analysis.logs import Run
from bench.analysis.page import Chart, Figure, Headline, Table
from bench.asking import words
from bench.asking.arms import Arm
from bench.asking.question import FIGURES, PILOT, Question
from bench.asking.statistics import LEAST, verdict
from deskgpt.system.files import write_atomically
from deskgpt.system.formatting import clock

HEIGHT = 360  # of a chart, in pixels
FEW = 12  # rounds, each of which has a tick on the axis


def write_page(question: Question, sentence: str, path: Path, about: str = "") -> None:
    """Writes the page of a question, which may have no run yet, in place of the one that is there.

    sentence: what is said first; about: how it was asked. Raises ValueError where plotly is missing, OSError where the
    file cannot be written.
    """
    page.plotly_js()  # says what to install
    runs = [as_run(question, arm) for arm in question.arms]
    title = " or ".join(arm.what for arm in question.arms) + "?"
    tables = [arms_table(question)]
    charts: dict[str, Chart] = {}
    price: list[str] = []
    if question.looks:
        tables.append(pairs_table(question))
        charts = {"val_loss": curves_chart(question, runs), "difference": difference_chart(question)}
        if question.looks[-1].n >= PILOT and question.looks[-1].verdict == "open":
            price = question.price().lines(question)
    facts = [about, question.place.machine, f"page of {time.strftime('%Y-%m-%d %H:%M')}"]
    about = "; ".join(fact for fact in facts if fact)
    content = page.page(title, runs, tables, price, (), about, [Headline(sentence, figures(question), title)], charts)
    write_atomically(path, content.encode(errors="replace"))


def as_run(question: Question, arm: Arm) -> Run:
    """An arm as a run of the page: its name, its settings, and the mean of its curves."""
    run = words.mean_curve(f"{arm.label}: {arm.what}", not_diverged(question, arm))
    return replace(run, settings=arm.settings)


def not_diverged(question: Question, arm: Arm) -> list[dict[str, Any]]:
    return [run for run in question.runs[arm.label] if run["outcome"] != "diverged"]


def figures(question: Question) -> list[Figure]:
    """The lead of the best arm, the runs, and the time that they took."""
    runs = [run for of_arm in question.runs.values() for run in of_arm]
    reused = sum(run["reused"] for run in runs)
    note = ", ".join(f"{label} {len(of_arm)}" for label, of_arm in question.runs.items())
    note += f"; {reused} were in the ledger" if reused else ""
    took = f"of {clock(question.budget_s)}; all these runs took {clock(sum(run['wall_s'] for run in runs))}"
    out = [Figure("runs", f"{len(runs)}", note), Figure("time spent", clock(question.spent_s()), took)]
    if not question.looks:
        return out
    best, second = words.ranked(question)[:2]
    e = words.estimate(question, best, second)
    return [Figure(f"{best} leads {second} by", words.amount(question, e), words.runs_text(e)), *out]


# ---- charts --------------------------------------------------------------------------------------------------


def line_style(number: int) -> dict[str, Any]:
    marker = {"size": 6, "symbol": page.symbol_of(number)}
    return {"mode": "lines+markers", "line": {"width": 2}, "marker": marker}


def curves_chart(question: Question, runs: list[Run]) -> Chart:
    """The val loss of each arm: the mean of its runs, and their range. runs: the arms, as as_run gives them.

    Against steps. Where arms end at different ones, so that time, tokens or FLOPs are equal, against the share of each
    arm's steps: all of them grow in proportion to it.
    """
    from plotly import graph_objects

    data = []
    note = "A line is the mean of an arm's runs, its band the range from the lowest to the highest of them."
    by_share = len({arm.steps for arm in question.arms if arm.known is None}) > 1
    if by_share:
        note += " Arms take different numbers of steps, so the axis is the share of each arm's own."
    for number, (arm, run) in enumerate(zip(question.arms, runs, strict=True)):
        ended = not_diverged(question, arm)
        steps = np.array([e["iter"] for e in run.evals], float)
        if len(steps):
            losses = np.array([[dict(of_run["curve"])[step] for step in steps] for of_run in ended])  # (runs, steps)
            x = {"steps": 100 * steps / arm.steps if by_share else steps}
            band = (losses.min(0), losses.max(0)) if len(ended) > 1 else ()
            style = {"customdata": steps} | line_style(number)
            data += page.traces(number, arm.label, x["steps"], losses.mean(0), *band, **style)
        every = len(question.runs[arm.label])
        left_out = every - len(ended)
        note += f" {left_out} of {every} runs of {arm.label} diverged and are left out." if left_out else ""
    x_title = "% of the arm's steps" if by_share else "steps"
    figure = graph_objects.Figure(data, page.layout(HEIGHT, x_title, "val loss (nats per token)"))
    return Chart("Val loss", note, figure)


def difference_chart(question: Question) -> Chart:
    """By how much arms are better than a, or, where there are several, than the best one; after each round."""
    from plotly import graph_objects

    two = len(question.arms) == 2
    than = question.arms[0].label if two else words.ranked(question)[0]
    ends = np.array([0.5, question.looks[-1].n + 0.5])
    data = []
    resolve = [] if question.resolve is None else [-question.resolve, question.resolve]
    for height in [0.0, *resolve]:
        at = np.full(2, height)
        style = {"width": 1.5, "dash": "dot" if height else "solid"}
        data += page.traces(-1, "", ends, at, line=style, hoverinfo="skip")
    for number, arm in enumerate(question.arms):
        if arm.label != than:
            data += difference_traces(question, number, than)
    unit = FIGURES[question.figure].unit
    y_title = f"difference in {question.figure}" + (f" ({unit})" if unit else "")
    figure = graph_objects.Figure(data, page.layout(HEIGHT, "runs of each arm", y_title))
    figure.update_xaxes(range=ends, dtick=1 if question.looks[-1].n <= FEW else None)
    note = f"Above 0, {question.arms[1].label if two else 'an arm'} is better than {than}. The band and the bar at its "
    note += f"end are the 95% interval, which holds at all rounds together; it takes {LEAST} runs of each arm."
    note += f" Dotted: ±{question.resolve:g}, the smallest difference that matters." if resolve else ""
    return Chart("Difference, and its interval", note, figure)


def difference_traces(question: Question, number: int, than: str) -> list[dict[str, Any]]:
    """By how much arm `number` is better than the arm `than`, with the interval, as plotly's traces."""
    label = question.arms[number].label
    x, y = sorted((label, than))
    sign = 1 if x == than else -1  # an estimate is above 0 where the second arm is better
    seen = [look.estimates[x, y] for look in question.looks if look.estimates[x, y].n == look.n]
    n = np.array([e.n for e in seen], float)
    d = np.array([sign * e.d for e in seen])
    half = np.array([e.half for e in seen])
    known = np.isfinite(half)
    last = np.where(known & (n == n[-1]), half, np.nan)
    style = line_style(number) | {"error_y": {"type": "data", "array": last, "thickness": 1.5, "width": 5}}
    style["text"] = [words.amount(question, e) for e in seen]
    style["hovertemplate"] = f"%{{text}}<br>%{{customdata}} runs<extra>{label}</extra>"
    line = page.traces(number, label, n, d, **style)
    if known.sum() < 2:
        return line
    return [*page.traces(number, label, n[known], d[known], (d - half)[known], (d + half)[known])[:-1], *line]


# ---- tables --------------------------------------------------------------------------------------------------


def arms_table(question: Question) -> Table:
    """What each arm is, and how its runs ended."""
    columns = ["arm", "runs", "steps", "mean", "lowest", "highest", "diverged", "ms a step"]
    rows = []
    for arm in question.arms:
        runs = question.runs[arm.label]
        found = [run[question.figure] for run in runs]
        of_figure = [statistics.fmean(found), min(found), max(found)] if found else []
        ms = words.mean_of(runs, "step_ms")
        row = [f"{arm.label}: {arm.what}", f"{len(runs)}", f"{arm.steps:,}"]
        row += [words.number(question, value) for value in of_figure] or ["n/a"] * 3
        rows.append([*row, f"{len(runs) - len(not_diverged(question, arm))}", "n/a" if ms is None else f"{ms:,.4g}"])
    unit = FIGURES[question.figure].unit
    note = f"Mean, lowest and highest {question.figure}{f' in {unit}' if unit else ''} of an arm's runs."
    dropped = question.looks[-1].dropped if question.looks else {}
    note += "".join(f" {x} is worse than {y} and gets no more runs." for x, y in sorted(dropped.items()))
    return Table("Arms", columns, rows, note)


def pairs_table(question: Question) -> Table:
    """The difference of each two arms."""
    columns = ["pair", "difference", "95% interval", "runs of each", "in pairs by seed", "verdict"]
    rows = []
    for x, y in itertools.combinations(question.runs, 2):
        e = words.estimate(question, x, y)
        limits = [words.number(question, limit) for limit in (e.low, e.high)] if math.isfinite(e.half) else ["none yet"]
        said = {"better": f"{y} is better", "worse": f"{y} is worse", "same": "no difference", "open": "open"}
        row = [f"{x} and {y}", words.number(question, e.d), " to ".join(limits), f"{e.n}"]
        rows.append([*row, "yes" if e.paired else "no", said[verdict(e, question.resolve)]])
    note = "Above 0, the second arm is better. The intervals of all pairs hold together, at all rounds."
    return Table("Pairs", columns, rows, note)
