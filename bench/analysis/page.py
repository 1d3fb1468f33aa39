"""One HTML page about training runs: what bench/report.py, bench/compare.py and bench/ask.py write.

The page holds all that it needs, plotly's JavaScript included, and makes no request to any network. A live page asks
the server that it came from (bench/analysis/live.py) for the same parts again and again.
"""

from __future__ import annotations

import functools
import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from bench.analysis.expected import band_of, is_beside, published
from bench.analysis.runs import Run
from deskgpt.run.loss_band import Band

POINTS = 1000  # most points of a curve; of more steps each point is a bucket: their mean, within their range
MOST_EARLIER = 20  # texts of a run to show besides the last ones
LOSS_POINTS = 400  # fewer, which smooths the noise of single batches
# Colours of runs on light and on dark pages, which the colour-blind can tell apart (Okabe and Ito 2008, made darker or
# lighter for a contrast of at least 3). With more runs, the colours repeat with the next symbol.
LIGHT = ("#0072B2", "#D55E00", "#00866A", "#B5508B", "#555555")
DARK = ("#56B4E9", "#F08A3C", "#1FC79A", "#DB8BBA", "#DDDDDD")
SYMBOLS = {"circle": "●", "square": "■", "diamond": "◆", "triangle-up": "▲"}  # plotly's name, and as text
PARTS = ("head", "words", "tables", "samples", "settings", "about")  # of the page, besides the charts
AXES = ["steps", "tokens", "time", "FLOPs"]  # of the loss chart
KINDS = {"val": "val loss", "train": "train loss, evaluated", "step": "train loss of each step"}
CHARTS = {  # by a step's field: title, unit
    "time_ms": ("Time of a step", "ms"),
    "lr": ("Learning rate", ""),
    "grad_norm": ("Gradient norm, before clipping", ""),
}
MOST_NUMBERS = 40  # of a run's own, which have a chart each

GUESSING = math.log(1 << 16)  # nats per token of guessing blindly: token ids are uint16, so no vocabulary is larger

# The policy makes the browser refuse everything that is not in this file. A live page may also ask its own server.
HEAD = """<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline';
 style-src 'unsafe-inline'; img-src data: blob:CONNECT">"""


@dataclass
class Table:
    title: str
    columns: list[str]  # the first one is that of the rows' labels
    rows: list[list[str]]
    note: str = ""


@dataclass
class Figure:
    """One of the figures that people see first."""

    label: str
    value: str
    note: str = ""


@dataclass
class Headline:
    """What the page says first: the verdict in a sentence, and the figures that it stands on."""

    text: str
    figures: list[Figure]
    name: str = ""  # of the run
    number: int | None = None  # of the run, where its colour should stand beside the name
    status: str = ""  # of a run that is followed: where it is, and when it last said something
    done: float | None = None  # the share of its steps


@dataclass
class Chart:
    title: str
    note: str
    figure: Any  # plotly's


# ---- curves --------------------------------------------------------------------------------------------------


@dataclass
class Curve:
    """Points of one run, each the mean of a bucket of steps with their lowest and highest value."""

    x: dict[str, np.ndarray]  # by axis, each (n,); NaN where unknown
    y: np.ndarray  # (n,)
    low: np.ndarray
    high: np.ndarray
    thinned: bool  # whether buckets hold several steps


def values(events: list[dict[str, Any]], key: str) -> np.ndarray:
    """A field of each event, (len(events),), NaN where it is unknown."""
    return np.array([e.get(key) for e in events], float)  # float makes NaN of None


def curve(run: Run, events: list[dict[str, Any]], key: str, points: int) -> Curve:
    """The course of a field of run.iters or run.evals, in at most `points` points."""
    y = values(events, key)
    kept = np.isfinite(y)
    y = y[kept]
    tokens = values(events, "tokens")[kept]
    x = {"steps": values(events, "iter")[kept], "tokens": tokens, "time": values(events, "train_s")[kept]}
    x["FLOPs"] = tokens * (np.nan if run.flops_per_token is None else run.flops_per_token)
    if len(y) == 0:
        return Curve(x, y, y, y, False)

    n = min(points, len(y))
    first = np.arange(n) * len(y) // n  # of each bucket
    count = np.diff([*first, len(y)])
    mean_x = {axis: np.add.reduceat(of_axis, first) / count for axis, of_axis in x.items()}
    mean_y = np.add.reduceat(y, first) / count
    low = np.minimum.reduceat(y, first)
    high = np.maximum.reduceat(y, first)
    return Curve(mean_x, mean_y, low, high, n < len(y))


def time_unit(runs: list[Run]) -> tuple[str, float]:
    """(name, seconds) of a unit of time that suits the longest run."""
    times = [e.get("train_s") or 0 for run in runs for e in run.iters + run.evals]
    longest = max(times, default=0)
    if longest >= 7200:
        return "hours", 3600
    if longest >= 300:
        return "minutes", 60
    return "seconds", 1


def symbol_of(number: int) -> str:
    """plotly's name of the symbol of a run, which changes when all colours are used."""
    return list(SYMBOLS)[number // len(LIGHT) % len(SYMBOLS)]


def clipped(all_values: np.ndarray) -> tuple[list[float] | None, str]:
    """(range of the axis, what lies outside it), so that a few slow steps do not flatten all others."""
    top = 1.25 * float(np.quantile(all_values, 0.98))
    beyond = int((all_values > top).sum())
    if not beyond:
        return None, ""
    return [0, top], f"{beyond:,} of {len(all_values):,} values lie above; the greatest is {all_values.max():,.4g}."


def loss_range(runs: list[Run]) -> tuple[float, float] | None:
    """(lowest, highest) loss of an axis that shows what the runs did after their first fall; None if all losses fit.

    The top is the highest evaluation after the first tenth of a run's steps, or the highest loss of a step there but
    for a hundredth of them. A run that diverged counts up to GUESSING, or its start.
    """
    every: list[float] = []
    tops: list[float] = []
    for run in runs:
        steps = curve(run, run.iters, "loss", LOSS_POINTS)
        evaluated = [curve(run, run.evals, key, POINTS) for key in ("val_loss", "train_loss")]
        at = np.concatenate([c.x["steps"] for c in (*evaluated, steps)])
        y = np.concatenate([c.y for c in (*evaluated, steps)])
        if not len(y):
            continue
        every += [y.min(), y.max()]
        is_later = at >= at.max() / 10
        if is_later.sum() < 4:
            is_later[:] = True
        of_steps = np.arange(len(y)) >= len(y) - len(steps.y)
        highest = [y[is_later & ~of_steps].max(initial=-np.inf)]
        if (is_later & of_steps).any():
            highest.append(np.quantile(y[is_later & of_steps], 0.99))
        tops.append(min(max(highest), max(GUESSING, y[at.argmin()])))
    if not every:
        return None
    low = float(min(every))
    top = float(max(tops))
    margin = 0.05 * (top - low)
    if max(every) <= top + 4 * margin:
        return None
    return low - margin, top + margin


# ---- charts --------------------------------------------------------------------------------------------------


def traces(number: int, name: str, c: Curve, kind: str, form: str, **style: Any) -> list[dict[str, Any]]:
    """One curve as plotly's traces, with the range of its buckets as a band.

    page.js sets x and the colours in the browser, which knows the chosen axis and the theme.
    """
    if not len(c.y):
        return []
    # float32 is exact enough and half the size.
    x = {axis: of_axis.astype(np.float32) for axis, of_axis in c.x.items() if kind or axis == "steps"}
    meta = {"run": number, "colour": f"--run{number % len(LIGHT)}", "kind": kind, "x": x}
    line = {
        "type": "scatter",
        "name": escape(name),
        "y": c.y.astype(np.float32),
        "customdata": x["steps"],
        "hovertemplate": f"%{{y:{form}}}<br>step %{{customdata:,.0f}}<extra>{escape(name)}</extra>",
        "mode": "lines" if len(c.y) > 1 else "lines+markers",  # a line of one point is not seen
        "meta": meta,
    } | style
    if not c.thinned:
        return [line]
    there_and_back = {axis: np.concatenate([of_axis, of_axis[::-1]]) for axis, of_axis in x.items()}
    band = {
        "type": "scatter",
        "y": np.concatenate([c.high.astype(np.float32), c.low.astype(np.float32)[::-1]]),
        "meta": meta | {"x": there_and_back},
        "mode": "lines",
        "line": {"width": 0},
        "fill": "toself",
        "hoverinfo": "skip",
    }
    return [band, line]


def loss_traces(number: int, run: Run) -> list[dict[str, Any]]:
    """The loss of each step and of each evaluation, with its standard error; a star marks the lowest val loss."""
    step = curve(run, run.iters, "loss", LOSS_POINTS)
    train = curve(run, run.evals, "train_loss", POINTS)
    val = curve(run, run.evals, "val_loss", POINTS)
    best = curve(run, [run.best] if run.val else [], "val_loss", 1)

    val_style: dict[str, Any] = {"mode": "lines+markers", "line": {"width": 2}}
    val_style["marker"] = {"size": 6, "symbol": symbol_of(number)}
    se = values([e for e in run.evals if e.get("val_loss") is not None], "val_se")
    if len(se) == len(val.y) and np.isfinite(se).any():
        val_style["error_y"] = {"type": "data", "array": np.nan_to_num(se), "thickness": 1, "width": 3}
    star = {"mode": "markers", "marker": {"size": 15, "symbol": "star"}}
    return [
        *traces(number, f"{run.name}, step", step, "step", ".4f", line={"width": 1}, opacity=0.6),
        *traces(number, f"{run.name}, train", train, "train", ".4f", line={"width": 2, "dash": "dash"}),
        *traces(number, f"{run.name}, val", val, "val", ".4f", **val_style),
        *traces(number, f"{run.name}, best val", best, "val", ".4f", **star),
    ]


def band_traces(runs: list[Run]) -> tuple[list[dict[str, Any]], str]:
    """(the bands of usual val losses that runs belong to, each once, what the note says about them)"""
    out = []
    bands: list[Band] = []
    for run in runs:
        band = band_of(run)
        if band is None or band in bands:
            continue
        bands.append(band)
        steps = np.array(sorted(band.losses))
        low, high = np.array([band.limits(step) for step in steps]).T
        x = at_steps(run, steps)
        if len(runs) > 1:
            x["time"] = np.full(len(steps), np.nan)  # each run has its own
        out += traces(0, "", Curve(x, low, low, high, True), "val", "")[:1]  # without the line
    n = " or ".join(str(band.n_runs) for band in bands)
    return out, f"The grey band is where the val loss of one more run is expected, after {n} others. " if bands else ""


def published_traces(runs: list[Run]) -> tuple[list[dict[str, Any]], str]:
    """(losses that others have published about runs like these, what the note says about them)"""
    out = []
    note = ""
    for entry in published():
        run = next((run for run in runs if is_beside(entry, run)), None)
        if run is None:
            continue
        if "val_losses" in entry:
            steps = np.array([*entry["val_losses"]], float)
            x = dict.fromkeys(AXES, np.full(len(steps), np.nan))
            x |= {"steps": steps, "tokens": steps * entry["tokens_per_step"]}
            y = np.array([*entry["val_losses"].values()])
        else:  # at a step that is not known: a line, in points that a mouse finds
            x = at_steps(run, np.linspace(run.val[0]["iter"], run.val[-1]["iter"], 50))
            y = np.full(50, entry["val_loss"])
        about = f"{entry['what']} ({entry['source']})"
        lines = textwrap.wrap(f"%{{y:.4f}}, {about}", 40)  # plotly breaks none, and phones are narrow
        hover = "<br>".join(map(escape, lines))
        style = {"line": {"width": 1.5, "dash": "dot"}, "hovertemplate": f"{hover}<extra></extra>"}
        out += traces(0, "", Curve(x, y, y, y, False), "val", "", **style)
        note += f"Dotted: {y[-1]:.4g}, {about}. "
    return out, note


def at_steps(run: Run, steps: np.ndarray) -> dict[str, np.ndarray]:
    """By axis, where the run was at these steps (n,), each (n,). After its last one, it stays where it was then."""
    own = curve(run, run.evals, "val_loss", POINTS).x
    return {axis: np.interp(steps, own["steps"], own[axis]) for axis in own} | {"steps": steps}


def layout(height: int, x_title: str, y_title: str) -> dict[str, Any]:
    return {
        "template": "none",
        "height": height,
        "margin": {"l": 12, "r": 20, "t": 28, "b": 44},
        "xaxis": {"title": {"text": x_title}, "zeroline": False},
        "yaxis": {"title": {"text": y_title}, "automargin": True, "zeroline": False},
        "showlegend": False,  # the page has its own legend of checkboxes, which covers all charts
        "hovermode": "closest",
    }


def make_charts(runs: list[Run]) -> dict[str, Chart]:
    """The charts by their id, without those for which no log has values."""
    charts = {"loss": loss_chart(runs)} | {key: step_chart(runs, key, *about) for key, about in CHARTS.items()}
    own = dict.fromkeys(name for run in runs for e in run.iters for name in e.get("own", {}))
    for name in list(own)[:MOST_NUMBERS]:
        with_own = [replace(run, iters=[e | e.get("own", {}) for e in run.iters]) for run in runs]
        charts[f"own-{name}"] = step_chart(with_own, name, name, "")
    return {key: chart for key, chart in charts.items() if chart is not None}


def loss_chart(runs: list[Run]) -> Chart | None:
    """Losses against steps, tokens, time and FLOPs, as far as they are known."""
    from plotly import graph_objects

    data = [trace for number, run in enumerate(runs) for trace in loss_traces(number, run)]
    if not data:
        return None
    longest = sorted((run for run in runs if run.val), key=lambda run: -run.val[-1]["iter"])
    bands, about_bands = band_traces(longest)
    others, about_others = published_traces(longest)
    beside = [*bands, *others]
    for trace in beside:
        trace["meta"] |= {"run": None, "colour": "--soft"}
    limits = loss_range(runs)
    if limits:
        limits = (min([limits[0], *(float(trace["y"].min()) for trace in beside)]), limits[1])
    legend = "A star is the lowest val loss. " if any(run.evals for run in runs) else ""
    if any("error_y" in trace for trace in data):
        legend += "Bars are one standard error up and down. "
    if any("fill" in trace for trace in data):
        legend += "A band spans the steps that its line is the mean of. "
    if limits:
        legend += f"Losses above {limits[1]:.2f} lie outside: tick “log y”. "
    legend += about_bands + about_others

    unit, seconds = time_unit(runs)
    axes = {"steps": "steps", "tokens": "tokens trained on", "time": f"{unit} of training", "FLOPs": "FLOPs"}
    notes = {}  # for the axes that are known of at least one run
    for axis in axes:
        known = {trace["meta"]["run"] for trace in data if np.isfinite(trace["meta"]["x"][axis]).any()}
        unknown = ", ".join(run.name for number, run in enumerate(runs) if number not in known)
        if known:
            notes[axis] = legend + (f"Left out, {axis} unknown: {unknown}." if unknown else "")
    data = [*beside, *data]  # beneath the runs
    for trace in data:
        trace["meta"]["x"]["time"] /= seconds
    meta = {"axes": axes, "notes": notes, "limits": limits}
    of_loss = layout(440, axes["steps"], "loss (nats per token)") | {"meta": meta}
    return Chart("Loss", "", graph_objects.Figure(data, of_loss))


def step_chart(runs: list[Run], key: str, title: str, y_title: str) -> Chart | None:
    """A field of the steps against the step."""
    from plotly import graph_objects

    curves = [curve(run, run.iters, key, POINTS) for run in runs]
    data = []
    for number, (run, c) in enumerate(zip(runs, curves, strict=True)):
        data += traces(number, run.name, c, "", ".4g", line={"width": 1.5})
    if not data:
        return None
    missing = ", ".join(run.name for run, c in zip(runs, curves, strict=True) if not len(c.y))
    note = f"Not in the log of {missing}. " if missing else ""
    figure = graph_objects.Figure(data, layout(280, "steps", y_title))
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(exponentformat="power")
    if key in ("time_ms", "grad_norm"):
        every = np.concatenate([values(run.iters, key) for run in runs])
        limits, outside = clipped(every[np.isfinite(every)])
        figure.update_yaxes(range=limits)
        note += outside
    return Chart(title, note, figure)


# ---- HTML ----------------------------------------------------------------------------------------------------


def legend_html(runs: list[Run]) -> str:
    """Checkboxes that show and hide runs; empty for a single run."""
    if len(runs) < 2:
        return ""
    legend = ""
    for number, run in enumerate(runs):
        box = f'<input type="checkbox" checked data-run="{number}">'
        colour = f"--colour: var(--run{number % len(LIGHT)})"
        mark = f'<span class="mark">{SYMBOLS[symbol_of(number)]}</span>'
        legend += f'<label style="{colour}">{box} {mark} {escape(run.name)}</label>\n'
    return f'<div class="legend">{legend}</div>'


def loss_switches() -> str:
    """The switches of the loss chart: its axes, and the kinds of loss to show."""
    against = ""
    for axis in AXES:
        checked = " checked" if axis == "steps" else ""
        against += f'<label><input type="radio" name="axis" value="{axis}"{checked}> {axis}</label>'
    for axis in "xy":
        against += f'<label><input type="checkbox" id="log-{axis}"> log {axis}</label>'
    kinds = ""
    for kind, text in KINDS.items():
        box = f'<input type="checkbox" checked data-kind="{kind}">'
        kinds += f'<label>{box} <span class="line {kind}"></span> {text}</label>'
    return f"<fieldset><legend>against</legend>{against}</fieldset><fieldset><legend>show</legend>{kinds}</fieldset>"


def headline_html(headline: Headline, level: int) -> str:
    """level: of its heading."""
    parts = []
    number = headline.number
    mark = "" if number is None else f'<span class="mark">{SYMBOLS[symbol_of(number)]}</span> '
    colour = "" if number is None else f' style="--colour: var(--run{number % len(LIGHT)})"'
    if headline.name:
        parts.append(f'<p class="name">{mark}{escape(headline.name)}</p>')
    parts.append(f"<h{level}>{escape(headline.text)}</h{level}>")
    if headline.status:
        parts.append(f'<p class="status">{escape(headline.status)}</p>')
    if headline.done is not None:
        parts.append(f'<progress max="1" value="{headline.done:.4f}" aria-label="steps done"></progress>')
    figures = ""
    for figure in headline.figures:
        note = f'<dd class="note">{escape(figure.note)}</dd>' if figure.note else ""
        figures += f"<div><dt>{escape(figure.label)}</dt><dd>{escape(figure.value)}</dd>{note}</div>\n"
    if figures:
        parts.append(f'<dl class="figures">{figures}</dl>')
    return f"<header{colour}>{''.join(parts)}</header>"


def head_html(title: str, headlines: Sequence[Headline]) -> str:
    """The title and what is known first; of several runs side by side."""
    if len(headlines) == 1:
        return headline_html(headlines[0], 1)
    return f'<h1>{escape(title)}</h1><div class="runs">{"".join(headline_html(h, 2) for h in headlines)}</div>'


def table_html(table: Table) -> str:
    """On a phone a table with several columns shows each row as a list, in which every cell names its column."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    head = f"<thead><tr>{head}</tr></thead>" if any(table.columns) else ""
    rows = ""
    for label, *cells in table.rows:
        cells_html = ""
        for number, cell in enumerate(cells, 1):
            column = f' data-column="{escape(table.columns[number])}"' if number < len(table.columns) else ""
            cells_html += f"<td{column}>{escape(cell)}</td>"
        rows += f'<tr><th scope="row">{escape(label)}</th>{cells_html}</tr>\n'
    note = f"<p class=note>{escape(table.note)}</p>" if table.note else ""
    title = escape(table.title)
    several = ' class="several"' if head else ""
    return f"<div>\n<h2>{title}</h2>\n<table{several}>{head}<tbody>\n{rows}</tbody></table>\n{note}</div>"


def side_by_side(names: list[str], tables: list[Table], missing: list[str]) -> Table:
    """Tables of several runs, each with a column of figures, as one with a column for each run.

    missing: for each run, what stands for a figure that it lacks.
    """
    if len(tables) == 1:
        return tables[0]
    fullest = max(tables, key=lambda table: len(table.rows))
    labels = dict.fromkeys(label for table in (fullest, *tables) for label, *_ in table.rows)
    known = [{label: value for label, value, *_ in table.rows} for table in tables]
    rows = [[label, *(k.get(label, m) for k, m in zip(known, missing, strict=True))] for label in labels]
    return Table(fullest.title, ["", *names], rows, fullest.note)


def charts_html(runs: list[Run]) -> str:
    """Where page.js puts the charts, with a place for each that there is."""
    colour = ' style="--colour: var(--run0)"' if len(runs) == 1 else ""  # of the switches, as of the only run's curves
    return f'<section{colour}>{legend_html(runs)}<template id="switches">{loss_switches()}</template></section>'


def charts_json(charts: dict[str, Chart]) -> str:
    """What page.js draws: by chart plotly's figure and a note."""
    parts = []
    for key, chart in charts.items():
        about = f'"title":{json.dumps(chart.title)},"note":{json.dumps(chart.note)}'
        parts.append(f'{json.dumps(key)}:{{{about},"figure":{chart.figure.to_json()}}}')
    return f"{{{','.join(parts)}}}"


def sampled_html(runs: list[Run], samples: Sequence[str]) -> str:
    """The texts that runs wrote as they trained: the last ones, and the first one of the times before.

    Each text once: none that one of the samples, or a later text of its run, begins with.
    """
    parts = []
    for run in runs:
        if run.samples:
            *earlier, last = run.samples
            shown = [*samples]
            texts = "".join(f"<pre>{escape(text)}</pre>" for text in last["texts"] if is_new(text, shown))
            heading = f"<h3>{escape(run.name)}, step {last['iter']:,}</h3>" if texts else ""
            some = earlier[:: math.ceil(len(earlier) / MOST_EARLIER) or 1][::-1]
            new = [(e["iter"], e["texts"][0]) for e in some if is_new(e["texts"][0], shown)]
            before = "".join(f"<h4>step {step:,}</h4><pre>{escape(text)}</pre>" for step, text in new)
            before = f"<details><summary>earlier</summary>{before}</details>" if before else ""
            parts.append(f"<div>{heading}{texts}{before}</div>" if texts or before else "")
    parts = [part for part in parts if part]
    return f'<h2>Samples in training</h2><div class="runs">{"".join(parts)}</div>' if parts else ""


def is_new(text: str, shown: list[str]) -> bool:
    """Whether no text in `shown` begins with this one, which is added to them."""
    is_known = any(other.strip().startswith(text.strip()) for other in shown)
    shown.append(text)
    return not is_known


def tasks_tables(runs: list[Run]) -> list[Table]:
    """The last benchmark results of each run."""
    out = []
    for run in runs:
        if not run.tasks:
            continue
        last = run.tasks[-1]
        rows = []
        for task, figures in last["results"].items():
            for metric, value in figures.items():
                if value is not None and not metric.endswith("_stderr"):
                    error = figures.get(f"{metric}_stderr")
                    rows.append([f"{task}, {metric}", f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}")])
        name = f" of {run.name}" if len(runs) > 1 else ""
        out.append(Table(f"Benchmarks{name}", [], rows, f"At step {last['iter']:,}; ± one standard error."))
    return out


def settings_html(runs: list[Run]) -> str:
    parts = ["<h2>Settings</h2>"]
    for run in runs:
        rows = [[name, json.dumps(value, ensure_ascii=False, default=str)] for name, value in run.settings.items()]
        inside = table_html(Table(f"Settings of {run.name}", [], rows)) if rows else "<p>Unknown.</p>"
        parts.append(f"<details><summary>{escape(run.name)}</summary>{inside}</details>")
    return "".join(parts)


def colours_css() -> str:
    """The runs' colours as variables, for a light and a dark page."""
    light = ";".join(f"--run{i}:{colour}" for i, colour in enumerate(LIGHT))
    dark = ";".join(f"--run{i}:{colour}" for i, colour in enumerate(DARK))
    return f":root {{{light}}}\n@media (prefers-color-scheme: dark) {{:root {{{dark}}}}}"


def page(
    title: str,
    runs: list[Run],
    tables: list[Table],
    verdict: list[str],
    samples: Sequence[str] = (),
    about: str = "",
    headlines: Sequence[Headline] = (),
    charts: dict[str, Chart] | None = None,
) -> str:
    """The whole HTML: headlines, curves, verdict in words, tables, samples, settings of each run, what it was made on.

    charts: in place of those of the runs. Raises ValueError where plotly is missing.
    """
    plotly_js()
    charts = make_charts(runs) if charts is None else charts
    nothing = "" if charts else "<p>There are no steps and no evaluations yet.</p>"
    parts = parts_html(title, runs, tables, verdict, samples, about, headlines)
    return document(title, parts, charts_html(runs) + nothing, charts_json(charts))


def live_page(title: str, runs: list[Run]) -> str:
    """The page that asks its server for all that it shows. runs: their names are enough."""
    loading = f'<h1>{escape(title)}</h1><p class="status">loading</p>'  # seen while plotly's 4.8 MB are on their way
    parts = dict.fromkeys(PARTS, "") | {"head": loading}
    return document(title, parts, charts_html(runs), '"live"', "; connect-src 'self'")


def parts_html(
    title: str,
    runs: list[Run],
    tables: list[Table],
    verdict: list[str],
    samples: Sequence[str],
    about: str,
    headlines: Sequence[Headline],
) -> dict[str, str]:
    """The parts of the page by PARTS, without the charts."""
    lines = verdict + [f"{run.name}: {note}" for run in runs for note in run.notes]
    words = f"<h2>In words</h2><ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""
    tables_html = "\n".join(map(table_html, [*tables, *tasks_tables(runs)]))
    texts = [f"<pre>{escape(text)}</pre>" for text in samples]
    return {
        "head": head_html(title, headlines),
        "words": words,
        "tables": f'<div class="tables">{tables_html}</div>',
        "samples": sampled_html(runs, samples) + ("".join(["<h2>Samples</h2>", *texts]) if texts else ""),
        "settings": settings_html(runs),
        "about": f'<h2>About</h2><p class="about">{escape(about)}</p>' if about else "",
    }


@functools.cache
def plotly_js() -> str:
    """Raises ValueError where plotly is missing."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ValueError("the page needs plotly: pip install -r requirements-dev.txt") from None
    return get_plotlyjs()


def document(title: str, parts: dict[str, str], charts: str, data: str, connect: str = "") -> str:
    """The HTML file. charts: the places for them; data: what charts_json made; connect: added to the policy."""
    here = Path(__file__)
    css = here.with_suffix(".css").read_text(encoding="utf-8")
    js = here.with_suffix(".js").read_text(encoding="utf-8")
    data = data.replace("<", "\\u003c")  # "<" could end the script or open a comment in it
    placed = {name: f'<div id="part-{name}">{part}</div>' for name, part in parts.items()}
    content = "\n".join([placed.pop("head"), charts, *placed.values()])
    return (
        f"<!doctype html>\n<html lang=en>\n<head>\n{HEAD.replace('CONNECT', connect)}\n"
        f"<title>{escape(title)}</title>\n<style>\n{colours_css()}\n{css}</style>\n</head>\n"
        f"<body>\n<main>\n{content}\n</main>\n<script>{plotly_js()}</script>\n"
        f'<script type="application/json" id="charts">{data}</script>\n<script>{js}</script>\n</body>\n</html>\n'
    )
