"""One HTML page about training runs, and a picture of their curves: what bench/report.py and bench/compare.py write.

The page holds all that it needs, plotly's JavaScript included, and makes no request to any network.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from bench.analysis.runs import Run

POINTS = 1000  # most points of a curve; of more steps each point is a bucket: their mean, within their range
LOSS_POINTS = 400  # fewer, which smooths the noise of single batches
# Colours of runs on light and on dark pages, which the colour-blind can tell apart (Okabe and Ito 2008, made darker or
# lighter for a contrast of at least 3). With more runs, the colours repeat with the next symbol.
LIGHT = ("#0072B2", "#D55E00", "#00866A", "#B5508B", "#555555")
DARK = ("#56B4E9", "#F08A3C", "#1FC79A", "#DB8BBA", "#DDDDDD")
SYMBOLS = {"circle": "●", "square": "■", "diamond": "◆", "triangle-up": "▲"}  # plotly's name, and as text
MATPLOTLIB = {"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^"}
KINDS = {"val": "val loss", "train": "train loss, evaluated", "step": "train loss of each step"}
CHARTS = {  # by a step's field: title, unit, factor
    "time_ms": ("Time of a step", "ms", 1),
    "mfu": ("MFU", "% of the peak that the log names", 100),
    "lr": ("Learning rate", "", 1),
    "grad_norm": ("Gradient norm, before clipping", "", 1),
}

# The policy makes the browser refuse everything that is not in this file.
HEAD = """<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline';
 style-src 'unsafe-inline'; img-src data: blob:">"""


@dataclass
class Table:
    title: str
    columns: list[str]  # the first one is that of the rows' labels
    rows: list[list[str]]
    note: str = ""


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


def curve(run: Run, events: list[dict[str, Any]], key: str, points: int, factor: float = 1) -> Curve:
    """The course of a field of run.iters or run.evals, times `factor`, in at most `points` points."""
    if (np.diff(values(events, "iter")) <= 0).any():
        once = {e["iter"]: e for e in events}
        events = [once[step] for step in sorted(once)]
    y = values(events, key) * factor
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
        "mode": "lines",
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
    charts = {"loss": loss_chart(runs)} | {key: step_chart(runs, key) for key in CHARTS}
    return {key: chart for key, chart in charts.items() if chart is not None}


def loss_chart(runs: list[Run]) -> Chart | None:
    """Losses against steps, tokens, time and FLOPs, as far as they are known."""
    from plotly import graph_objects

    data = [trace for number, run in enumerate(runs) for trace in loss_traces(number, run)]
    if not data:
        return None
    legend = "A star is the lowest val loss. " if any(run.evals for run in runs) else ""
    if any("error_y" in trace for trace in data):
        legend += "Bars are one standard error up and down. "
    if any("fill" in trace for trace in data):
        legend += "A band spans the steps that its line is the mean of. "

    unit, seconds = time_unit(runs)
    axes = {"steps": "steps", "tokens": "tokens trained on", "time": f"{unit} of training", "FLOPs": "FLOPs"}
    notes = {}  # for the axes that are known of at least one run
    for axis in axes:
        known = {trace["meta"]["run"] for trace in data if np.isfinite(trace["meta"]["x"][axis]).any()}
        unknown = ", ".join(run.name for number, run in enumerate(runs) if number not in known)
        if known:
            notes[axis] = legend + (f"Left out, {axis} unknown: {unknown}." if unknown else "")
    for trace in data:
        trace["meta"]["x"]["time"] /= seconds
    of_loss = layout(440, axes["steps"], "loss (nats per token)") | {"meta": {"axes": axes, "notes": notes}}
    return Chart("Loss", "", graph_objects.Figure(data, of_loss))


def step_chart(runs: list[Run], key: str) -> Chart | None:
    """One of CHARTS: a field of the steps, against the step."""
    from plotly import graph_objects

    title, y_title, factor = CHARTS[key]
    curves = [curve(run, run.iters, key, POINTS, factor) for run in runs]
    data = []
    for number, (run, c) in enumerate(zip(runs, curves, strict=True)):
        data += traces(number, run.name, c, "", ".4g", line={"width": 1.5})
    if not data:
        return None
    missing = ", ".join(run.name for run, c in zip(runs, curves, strict=True) if not len(c.y))
    note = f"Not in the log of {missing}. " if missing else ""
    figure = graph_objects.Figure(data, layout(280, "steps", y_title))
    figure.update_yaxes(rangemode="tozero")
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


def loss_switches(axes: list[str]) -> str:
    """The switches of the loss chart: its axes, and the kinds of loss to show."""
    against = ""
    for axis in axes:
        checked = " checked" if axis == "steps" else ""
        against += f'<label><input type="radio" name="axis" value="{axis}"{checked}> {axis}</label>'
    for axis in "xy":
        against += f'<label><input type="checkbox" id="log-{axis}"> log {axis}</label>'
    kinds = ""
    for kind, text in KINDS.items():
        box = f'<input type="checkbox" checked data-kind="{kind}">'
        kinds += f'<label>{box} <span class="line {kind}"></span> {text}</label>'
    return f"<fieldset><legend>against</legend>{against}</fieldset><fieldset><legend>show</legend>{kinds}</fieldset>"


def table_html(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    head = f"<thead><tr>{head}</tr></thead>" if any(table.columns) else ""
    rows = ""
    for label, *cells in table.rows:
        cells_html = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows += f'<tr><th scope="row">{escape(label)}</th>{cells_html}</tr>\n'
    note = f"<p class=note>{escape(table.note)}</p>" if table.note else ""
    title = escape(table.title)
    box = f'<div class="box" tabindex="0" role="region" aria-label="{title}">'
    return f"<div>\n<h2>{title}</h2>\n{box}<table>{head}<tbody>\n{rows}</tbody></table></div>\n{note}</div>"


def charts_html(runs: list[Run], charts: dict[str, Chart]) -> list[str]:
    """Empty places for the charts, which page.js draws, with their headings, switches and notes."""
    parts = ["<h2>Curves</h2>", f"<section>{legend_html(runs)}"]
    for key, chart in charts.items():
        switches = loss_switches(list(chart.figure.layout.meta["notes"])) if key == "loss" else ""
        plot = f'<div id="{key}" class="plot" role="img" aria-label="{chart.title}"></div>'
        note = f'<p class="note" id="{key}-note" role="status">{escape(chart.note)}</p>'
        parts.append(f'<figure class="{key}"><h3>{chart.title}</h3>{switches}{plot}{note}</figure>')
    if not charts:
        parts.append("<p>The log holds no steps and no evaluations.</p>")
    return [*parts, "</section>"]


def settings_html(runs: list[Run]) -> list[str]:
    parts = ["<h2>Settings</h2>"]
    for run in runs:
        rows = [[name, json.dumps(value, ensure_ascii=False, default=str)] for name, value in run.settings.items()]
        inside = table_html(Table(f"Settings of {run.name}", [], rows)) if rows else "<p>Unknown.</p>"
        parts.append(f"<details><summary>{escape(run.name)}</summary>{inside}</details>")
    return parts


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
) -> str:
    """The whole HTML: verdict, tables, curves, samples, settings of each run, what it was made on.

    Raises ValueError where plotly is missing.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ValueError("the page needs plotly: pip install -r requirements-dev.txt") from None
    charts = make_charts(runs)
    body = [f"<h1>{escape(title)}</h1>"]
    lines = verdict + [f"{run.name}: {note}" for run in runs for note in run.notes]
    if lines:
        body.append(f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>")
    body += ['<div class="tables">', *map(table_html, tables), "</div>"]
    body += charts_html(runs, charts)
    if samples:
        body += ["<h2>Samples</h2>", *(f"<pre>{escape(text)}</pre>" for text in samples)]
    body += settings_html(runs)
    if about:
        body += ["<h2>About</h2>", f'<p class="about">{escape(about)}</p>']

    here = Path(__file__)
    css = here.with_suffix(".css").read_text(encoding="utf-8")
    js = here.with_suffix(".js").read_text(encoding="utf-8")
    data = ",".join(f'"{key}":{chart.figure.to_json()}' for key, chart in charts.items())
    data = data.replace("<", "\\u003c")  # "<" could end the script or open a comment in it
    content = "\n".join(body)
    return (
        f"<!doctype html>\n<html lang=en>\n<head>\n{HEAD}\n<title>{escape(title)}</title>\n"
        f"<style>\n{colours_css()}\n{css}</style>\n</head>\n<body>\n<main>\n{content}\n</main>\n"
        f"<script>{get_plotlyjs()}</script>\n"
        f'<script type="application/json" id="charts">{{{data}}}</script>\n<script>{js}</script>\n</body>\n</html>\n'
    )


# ---- picture -------------------------------------------------------------------------------------------------


def picture(runs: list[Run], path: str) -> None:
    """Writes loss and time of a step against steps as an image. Raises ValueError where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("the picture needs matplotlib: pip install -r requirements-dev.txt") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (loss, time_ms) = pyplot.subplots(
        2, figsize=(8, 7), height_ratios=(2, 1), layout="constrained", sharex=True
    )
    for number, run in enumerate(runs):
        colour = LIGHT[number % len(LIGHT)]
        marker = MATPLOTLIB[symbol_of(number)]
        step = curve(run, run.iters, "loss", LOSS_POINTS)
        train = curve(run, run.evals, "train_loss", POINTS)
        val = curve(run, run.evals, "val_loss", POINTS)
        ms = curve(run, run.iters, "time_ms", POINTS)
        loss.plot(step.x["steps"], step.y, color=colour, linewidth=0.7, alpha=0.6)
        loss.plot(train.x["steps"], train.y, color=colour, linestyle="--")
        loss.plot(val.x["steps"], val.y, color=colour, marker=marker, markersize=4, label=f"{run.name}, val")
        time_ms.plot(ms.x["steps"], ms.y, color=colour, linewidth=1)
    every = np.concatenate([values(run.iters, "time_ms") for run in runs])
    every = every[np.isfinite(every)]
    limits = clipped(every)[0] if len(every) else None
    loss.set(ylabel="loss (nats per token)", title="solid: val; dashed: train, evaluated; thin: train, each step")
    time_ms.set(xlabel="steps", ylabel="ms per step", ylim=limits or (0, None))
    for name in loss.legend().get_texts():
        name.set_parse_math(False)  # a folder's name may hold "$"
    try:
        figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)
