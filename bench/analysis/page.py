"""One HTML page about training runs, and a picture of their curves: what bench/report.py and bench/compare.py write.

The page holds all it needs, plotly's JavaScript as well, and asks no network for anything.
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

POINTS = 1000  # of a curve at most: more steps are drawn as buckets, their mean within the range of their values
LOSS_POINTS = 400  # fewer, which smooths the noise of single batches
# By run, for light and for dark pages: told apart by the colour-blind (Okabe and Ito 2008, made darker or lighter for
# a contrast of 3 at least). Where there are more runs, the colours come again with the next symbol.
LIGHT = ("#0072B2", "#D55E00", "#00866A", "#B5508B", "#555555")
DARK = ("#56B4E9", "#F08A3C", "#1FC79A", "#DB8BBA", "#DDDDDD")
SYMBOLS = {"circle": "●", "square": "■", "diamond": "◆", "triangle-up": "▲"}  # plotly's name, as text
MATPLOTLIB = {"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^"}
KINDS = {"val": "val loss", "train": "train loss, evaluated", "step": "train loss of each step"}
CHARTS = {  # by key of an iteration: title, unit, factor
    "time_ms": ("Time of a step", "ms", 1),
    "mfu": ("MFU", "% of the peak that the log names", 100),
    "lr": ("Learning rate", "", 1),
    "grad_norm": ("Gradient norm, before clipping", "", 1),
}

# The policy has the browser refuse whatever is not in this file.
HEAD = """<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline';
 style-src 'unsafe-inline'; img-src data: blob:">"""


@dataclass
class Table:
    title: str
    columns: list[str]  # the first is the row's label
    rows: list[list[str]]
    note: str = ""


@dataclass
class Curve:
    """Points of one run: n at most, each the mean of a bucket of steps, with the least and the greatest value."""

    x: dict[str, np.ndarray]  # by axis, each (n,); NaN where unknown
    y: np.ndarray  # (n,)
    low: np.ndarray
    high: np.ndarray
    thinned: bool


def values(events: list[dict[str, Any]], key: str) -> np.ndarray:
    """The field of each event, (len(events),), NaN where it is unknown."""
    return np.array([e.get(key) for e in events], float)  # which makes NaN of None


def curve(run: Run, events: list[dict[str, Any]], key: str, points: int, factor: float = 1) -> Curve:
    """How a field of run.iters or run.evals goes on, in so many points at most."""
    if (np.diff(values(events, "iter")) <= 0).any():
        events = [e for _, e in sorted({e["iter"]: e for e in events}.items())]
    y = values(events, key) * factor
    kept = np.isfinite(y)
    y, tokens = y[kept], values(events, "tokens")[kept]
    x = {"steps": values(events, "iter")[kept], "tokens": tokens, "time": values(events, "train_s")[kept]}
    x["FLOPs"] = tokens * (np.nan if run.flops_per_token is None else run.flops_per_token)
    if len(y) == 0:
        return Curve(x, y, y, y, False)
    n = min(points, len(y))
    first = np.arange(n) * len(y) // n  # of each bucket
    count = np.diff([*first, len(y)])
    means = {axis: np.add.reduceat(of_axis, first) / count for axis, of_axis in x.items()}
    mean, low, high = np.add.reduceat(y, first) / count, np.minimum.reduceat(y, first), np.maximum.reduceat(y, first)
    return Curve(means, mean, low, high, n < len(y))


def time_unit(runs: list[Run]) -> tuple[str, float]:
    """(name, seconds) of the unit that the longest run is told in."""
    longest = max((e.get("train_s") or 0 for run in runs for e in (*run.iters, *run.evals)), default=0)
    return ("hours", 3600) if longest >= 7200 else ("minutes", 60) if longest >= 300 else ("seconds", 1)


def traces(number: int, name: str, c: Curve, kind: str, form: str, **style: Any) -> list[dict[str, Any]]:
    """One curve as plotly's traces; x and the colours are set in the browser, which knows the axis and the theme."""
    if not len(c.y):
        return []
    x = {axis: of_axis.astype(np.float32) for axis, of_axis in c.x.items() if kind or axis == "steps"}
    y, low, high = (part.astype(np.float32) for part in (c.y, c.low, c.high))  # half the size is exact enough
    meta = {"run": number, "colour": f"--run{number % len(LIGHT)}", "kind": kind, "x": x}
    hover = f"%{{y:{form}}}<br>step %{{customdata:,.0f}}<extra>{escape(name)}</extra>"
    line = {"type": "scatter", "name": escape(name), "y": y, "customdata": x["steps"], "hovertemplate": hover}
    out = [line | {"mode": "lines", "meta": meta} | style]
    if c.thinned:
        there_and_back = {axis: np.concatenate([of_axis, of_axis[::-1]]) for axis, of_axis in x.items()}
        band = {"type": "scatter", "y": np.concatenate([high, low[::-1]]), "meta": meta | {"x": there_and_back}}
        out.insert(0, band | {"mode": "lines", "line": {"width": 0}, "fill": "toself", "hoverinfo": "skip"})
    return out


def loss_traces(number: int, run: Run) -> list[dict[str, Any]]:
    """The loss of each step, and of each evaluation with its standard error; the best evaluation has a star."""
    step = curve(run, run.iters, "loss", LOSS_POINTS)
    out = traces(number, f"{run.name}, step", step, "step", ".4f", line={"width": 1}, opacity=0.6)
    train, val = (curve(run, run.evals, key, POINTS) for key in ("train_loss", "val_loss"))
    out += traces(number, f"{run.name}, train", train, "train", ".4f", line={"width": 2, "dash": "dash"})
    style: dict[str, Any] = {"mode": "lines+markers", "line": {"width": 2}}
    style["marker"] = {"size": 6, "symbol": list(SYMBOLS)[number // len(LIGHT) % len(SYMBOLS)]}
    se = values([e for e in run.evals if e.get("val_loss") is not None], "val_se")
    if len(se) == len(val.y) and np.isfinite(se).any():
        style["error_y"] = {"type": "data", "array": np.nan_to_num(se), "thickness": 1, "width": 3}
    out += traces(number, f"{run.name}, val", val, "val", ".4f", **style)
    star = {"mode": "markers", "marker": {"size": 15, "symbol": "star"}}
    only = curve(run, [run.best] if run.val else [], "val_loss", 1)
    return out + traces(number, f"{run.name}, best val", only, "val", ".4f", **star)


def layout(height: int, x_title: str, y_title: str) -> dict[str, Any]:
    return {
        "template": "none",
        "height": height,
        "margin": {"l": 12, "r": 20, "t": 28, "b": 44},
        "xaxis": {"title": {"text": x_title}, "zeroline": False},
        "yaxis": {"title": {"text": y_title}, "automargin": True, "zeroline": False},
        "showlegend": False,  # the page's own, of checkboxes, rules all charts and needs no room in them
        "hovermode": "closest",
    }


def clipped(all_values: np.ndarray) -> tuple[list[float] | None, str]:
    """(range of the axis, what it leaves out), so that a few slow steps do not flatten all others."""
    top = 1.25 * float(np.quantile(all_values, 0.98))
    beyond = int((all_values > top).sum())
    if not beyond:
        return None, ""
    return [0, top], f"{beyond:,} of {len(all_values):,} values lie above; the greatest is {all_values.max():,.4g}."


def figures(runs: list[Run]) -> dict[str, tuple[str, str, Any]]:
    """(title, note, plotly's figure) of each chart by its id; charts of which nothing is known are left out."""
    from plotly import graph_objects

    unit, seconds = time_unit(runs)
    axes = {"steps": "steps", "tokens": "tokens trained on", "time": f"{unit} of training", "FLOPs": "FLOPs"}
    out: dict[str, tuple[str, str, Any]] = {}
    data = [t for number, run in enumerate(runs) for t in loss_traces(number, run)]
    legend = "A star is the lowest val loss. " if any(run.evals for run in runs) else ""
    legend += "Bars are one standard error up and down. " if any("error_y" in t for t in data) else ""
    legend += "A band holds all steps of which its line is the mean. " if any("fill" in t for t in data) else ""
    notes = {}  # by axis that is known of one run at least
    for axis in axes:
        there = {t["meta"]["run"] for t in data if np.isfinite(t["meta"]["x"][axis]).any()}
        unknown = ", ".join(run.name for number, run in enumerate(runs) if number not in there)
        if there:
            notes[axis] = legend + (f"Left out, {axis} unknown: {unknown}." if unknown else "")
    for t in data:
        t["meta"]["x"]["time"] /= seconds
    if data:
        of_loss = layout(440, axes["steps"], "loss (nats per token)") | {"meta": {"axes": axes, "notes": notes}}
        out["loss"] = ("Loss", "", graph_objects.Figure(data, of_loss))
    for key, (title, y_title, factor) in CHARTS.items():
        curves = [curve(run, run.iters, key, POINTS, factor) for run in runs]
        data = [
            t
            for number, (run, c) in enumerate(zip(runs, curves, strict=True))
            for t in traces(number, run.name, c, "", ".4g", line={"width": 1.5})
        ]
        if not data:
            continue
        figure = graph_objects.Figure(data, layout(280, "steps", y_title))
        note = ", ".join(run.name for run, c in zip(runs, curves, strict=True) if not len(c.y))
        note = f"Not in the log of {note}. " if note else ""
        figure.update_yaxes(rangemode="tozero")
        if key in ("time_ms", "grad_norm"):
            every = np.concatenate([values(run.iters, key) for run in runs])
            limits, left_out = clipped(every[np.isfinite(every)])
            figure.update_yaxes(range=limits)
            note += left_out
        out[key] = (title, note, figure)
    return out


def switches(runs: list[Run], axes: list[str]) -> tuple[str, str]:
    """(legend that shows and hides runs, the loss chart's switches)"""
    legend = ""
    for number, run in enumerate(runs if len(runs) > 1 else ()):
        symbol = list(SYMBOLS.values())[number // len(LIGHT) % len(SYMBOLS)]
        box = f'<input type="checkbox" checked data-run="{number}">'
        colour = f"--colour: var(--run{number % len(LIGHT)})"
        legend += f'<label style="{colour}">{box} <span class="mark">{symbol}</span> {escape(run.name)}</label>\n'
    against = "".join(
        f'<label><input type="radio" name="axis" value="{axis}"{" checked" if axis == "steps" else ""}> {axis}</label>'
        for axis in axes
    )
    kinds = "".join(
        f'<label><input type="checkbox" checked data-kind="{kind}"> <span class="line {kind}"></span> {text}</label>'
        for kind, text in KINDS.items()
    )
    logs = "".join(f'<label><input type="checkbox" id="log-{a}"> log {a}</label>' for a in "xy")
    loss = (
        f"<fieldset><legend>against</legend>{against}{logs}</fieldset><fieldset><legend>show</legend>{kinds}</fieldset>"
    )
    return f'<div class="legend">{legend}</div>' if legend else "", loss


def as_html(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(c)}</th>' for c in table.columns)
    head = f"<thead><tr>{head}</tr></thead>" if any(table.columns) else ""
    rows = ""
    for label, *cells in table.rows:
        cells_html = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows += f'<tr><th scope="row">{escape(label)}</th>{cells_html}</tr>\n'
    note = f"<p class=note>{escape(table.note)}</p>" if table.note else ""
    title = escape(table.title)
    box = f'<div class="box" tabindex="0" role="region" aria-label="{title}">'
    return f"<div>\n<h2>{title}</h2>\n{box}<table>{head}<tbody>\n{rows}</tbody></table></div>\n{note}</div>"


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
    charts = figures(runs)
    legend, loss_switches = switches(runs, list(charts["loss"][2].layout.meta["notes"]) if "loss" in charts else [])
    css, js = (Path(__file__).with_suffix(suffix).read_text(encoding="utf-8") for suffix in (".css", ".js"))
    variables = [";".join(f"--run{i}:{c}" for i, c in enumerate(colours)) for colours in (LIGHT, DARK)]
    body = [f"<h1>{escape(title)}</h1>"]
    said = verdict + [f"{run.name}: {note}" for run in runs for note in run.notes]
    body += [f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in said)}</ul>"] if said else []
    body += ['<div class="tables">', *(as_html(table) for table in tables), "</div>"]
    body += ["<h2>Curves</h2>", f"<section>{legend}"]
    for key, (heading, note, _) in charts.items():
        above = loss_switches if key == "loss" else ""
        plot = f'<div id="{key}" class="plot" role="img" aria-label="{heading}"></div>'
        note_html = f'<p class="note" id="{key}-note" role="status">{escape(note)}</p>'
        body += [f'<figure class="{key}"><h3>{heading}</h3>{above}{plot}{note_html}</figure>']
    body += ["</section>"] if charts else ["<p>The log holds no steps and no evaluations.</p></section>"]
    body += ["<h2>Samples</h2>"] * bool(samples) + [f"<pre>{escape(text)}</pre>" for text in samples]
    body += ["<h2>Settings</h2>"]
    for run in runs:
        rows = [[name, json.dumps(value, ensure_ascii=False, default=str)] for name, value in run.settings.items()]
        inside = as_html(Table(f"Settings of {run.name}", [], rows)) if rows else "<p>Unknown.</p>"
        body += [f"<details><summary>{escape(run.name)}</summary>{inside}</details>"]
    body += ["<h2>About</h2>", f'<p class="about">{escape(about)}</p>'] if about else []
    # "<" could end the script or open a comment in it
    data = ",".join(f'"{key}":{figure.to_json()}' for key, (*_, figure) in charts.items()).replace("<", "\\u003c")
    return (
        f"<!doctype html>\n<html lang=en>\n<head>\n{HEAD}\n<title>{escape(title)}</title>\n"
        f"<style>\n:root {{{variables[0]}}}\n@media (prefers-color-scheme: dark) {{:root {{{variables[1]}}}}}\n{css}"
        f"</style>\n</head>\n<body>\n<main>\n{chr(10).join(body)}\n</main>\n"
        f"<script>{get_plotlyjs()}</script>\n"
        f'<script type="application/json" id="charts">{{{data}}}</script>\n<script>{js}</script>\n</body>\n</html>\n'
    )


def picture(runs: list[Run], path: str) -> None:
    """Loss and time of a step against steps, as an image file. Raises ValueError where matplotlib is missing."""
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
        marker = list(MATPLOTLIB.values())[number // len(LIGHT) % len(MATPLOTLIB)]
        step, ms = curve(run, run.iters, "loss", LOSS_POINTS), curve(run, run.iters, "time_ms", POINTS)
        train, val = (curve(run, run.evals, key, POINTS) for key in ("train_loss", "val_loss"))
        loss.plot(step.x["steps"], step.y, color=colour, linewidth=0.7, alpha=0.6)
        loss.plot(train.x["steps"], train.y, color=colour, linestyle="--")
        loss.plot(val.x["steps"], val.y, color=colour, marker=marker, markersize=4, label=f"{run.name}, val")
        time_ms.plot(ms.x["steps"], ms.y, color=colour, linewidth=1)
    every = np.concatenate([values(run.iters, "time_ms") for run in runs])
    every = every[np.isfinite(every)]
    limits = clipped(every)[0] if len(every) else None
    loss.set(ylabel="loss (nats per token)", title="solid: val; dashed: train, evaluated; thin: train, each step")
    time_ms.set(xlabel="steps", ylabel="ms per step", ylim=limits or (0, None))
    loss.legend()
    try:
        figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)
