"""One HTML page about training runs: what bench/report.py and bench/compare.py write.

The page holds all that it needs, plotly's JavaScript included, and makes no request to any network.
"""

from __future__ import annotations

import functools
import json
import time
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from bench.analysis.logs import Run
from bench.analysis.table import band_of
from bench.analysis.verdict import COMMAND, Comparison

POINTS = 500  # of a curve; of more steps every nth is drawn
MOST_NUMBERS = 40  # of a run's own, which have a chart each
MOST_TEXTS = 10  # evaluations of a run whose texts are shown, the last ones first
# Colours that the colour-blind can tell apart (Okabe and Ito 2008, made darker).
COLOURS = ("#0072B2", "#D55E00", "#00866A", "#B5508B", "#555555")
AXES = {"steps": "steps", "tokens": "tokens trained on", "minutes": "minutes of training", "FLOPs": "FLOPs"}
CHARTS = {  # by a step's field: title and unit
    "time_ms": ("Time of a step", "ms"),
    "lr": ("Learning rate", ""),
    "grad_norm": ("Gradient norm, before clipping", ""),
}


@dataclass
class Chart:
    title: str
    note: str
    figure: Any  # plotly's


# ---- charts --------------------------------------------------------------------------------------------------


def points(run: Run, events: list[dict[str, Any]], key: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(x by axis, y) of a field of run.iters or run.evals, each (n,): the first of all, and at most 2 POINTS."""
    known = [e for e in events if e.get(key) is not None]
    known = known[:: max(1, len(known) // POINTS)]

    def column(name: str) -> np.ndarray:
        return np.array([e[name] for e in known], float)  # float makes NaN of None

    x = {"steps": column("iter"), "tokens": column("tokens"), "minutes": column("train_s") / 60}
    x["FLOPs"] = x["tokens"] * (run.flops_per_token or np.nan)
    return x, column(key)


def curve(number: int, name: str, x: np.ndarray, y: np.ndarray, **style: Any) -> dict[str, Any]:
    """A curve in the colour of a run as plotly's trace."""
    style["line"] = {"color": COLOURS[number % len(COLOURS)], "width": 2} | style.get("line", {})
    trace = {"type": "scatter", "name": escape(name), "x": x, "y": y}
    trace["mode"] = "lines" if len(y) > 1 else "lines+markers"  # a line of one point is not seen
    trace["hovertemplate"] = f"%{{y:.5g}} at %{{x:,.6g}}<extra>{escape(name)}</extra>"
    return trace | style


def layout(height: int, x_title: str, y_title: str) -> dict[str, Any]:
    return {
        "template": "plotly_white",
        "height": height,
        "margin": {"l": 12, "r": 12, "t": 36, "b": 44},
        "xaxis": {"title": {"text": x_title}},
        "yaxis": {"title": {"text": y_title}, "automargin": True, "exponentformat": "power"},
        "legend": {"orientation": "h", "y": -0.25},
    }


def make_charts(runs: list[Run]) -> dict[str, Chart]:
    """The charts by their id, without those for which no log has values."""
    charts = {"loss": loss_chart(runs)} | {key: step_chart(runs, key, *about) for key, about in CHARTS.items()}
    own = dict.fromkeys(name for run in runs for e in run.iters for name in e.get("own", {}))
    with_own = [replace(run, iters=[e | e.get("own", {}) for e in run.iters]) for run in runs]
    charts |= {f"own-{i}": step_chart(with_own, name, name, "") for i, name in enumerate([*own][:MOST_NUMBERS])}
    return {key: chart for key, chart in charts.items() if chart is not None}


def step_chart(runs: list[Run], key: str, title: str, unit: str) -> Chart | None:
    """A field of the steps against the step."""
    from plotly import graph_objects

    found = [points(run, run.iters, key) for run in runs]
    data = [curve(i, runs[i].name, x["steps"], y, line={"width": 1.5}) for i, (x, y) in enumerate(found) if len(y)]
    if not data:
        return None
    missing = ", ".join(run.name for run, (_, y) in zip(runs, found, strict=True) if not len(y))
    note = f"Not in the log of {missing}. " if missing else ""
    figure = graph_objects.Figure(data, layout(280, "steps", unit) | {"showlegend": len(runs) > 1})
    every = np.concatenate([y for _, y in found])
    top = 1.25 * float(np.quantile(every, 0.98))
    if key in ("time_ms", "grad_norm") and every.max() > top:  # so that a few slow steps do not flatten all others
        figure.update_yaxes(range=[0, top])
        note += f"The greatest is {every.max():,.4g}."
    return Chart(title, note, figure)


def loss_chart(runs: list[Run]) -> Chart | None:
    """Losses from the start of each run, against steps, tokens, time or FLOPs, beside the bands of their configs."""
    from plotly import graph_objects

    data: list[dict[str, Any]] = []
    x_of: list[dict[str, np.ndarray]] = []  # by axis, of each trace
    note = ""
    bands: list[Any] = []
    for number, run in enumerate(runs):
        of_run = f"{run.name}, " if len(runs) > 1 else ""
        errors = [e["val_se"] for e in run.val if e.get("val_se") is not None]
        val_style: dict[str, Any] = {"mode": "lines+markers", "marker": {"size": 6}}
        if len(errors) == len(run.val) <= POINTS:
            val_style["error_y"] = {"array": 1.96 * np.array(errors), "thickness": 1}
        for what, events, key, style in (
            ("each step", run.iters, "loss", {"line": {"width": 1}, "opacity": 0.6}),
            ("train", run.evals, "train_loss", {"line": {"dash": "dash"}}),
            ("val", run.evals, "val_loss", val_style),
        ):
            x, y = points(run, events, key)
            if len(y):
                data.append(curve(number, of_run + what, x["steps"], y, **style))
                x_of.append(x)
        band = band_of(run)
        if band and band not in bands:
            bands.append(band)
            steps = np.array(sorted(band.losses), float)
            low, high = np.array([band.limits(int(step)) for step in steps]).T
            around = np.concatenate([steps, steps[::-1]])
            style = {"fill": "toself", "line": {"width": 0}, "opacity": 0.3, "hoverinfo": "skip", "showlegend": False}
            data.append(curve(-1, "", around, np.concatenate([high, low[::-1]]), **style))
            tokens = around * (run.tokens_per_step or np.nan)
            x_of.append(dict.fromkeys(AXES, around * np.nan) | {"steps": around, "tokens": tokens})
            note += f"The grey band is where the val loss of one more run is expected, after {band.n_runs} others. "
    if not data:
        return None
    if any("error_y" in trace for trace in data):
        note += "Bars are 95% intervals, of the error that the evaluated text leaves."
    buttons = []
    for axis, title in AXES.items():
        if any(np.isfinite(x[axis]).any() for x in x_of):
            update = [{"x": [x[axis] for x in x_of]}, {"xaxis.title.text": title}]
            buttons.append({"method": "update", "label": axis, "args": update})
    shape = layout(440, "steps", "loss (nats per token)")
    shape["updatemenus"] = [{"x": 0, "y": 1.12, "xanchor": "left", "buttons": buttons}]
    return Chart("Loss", note, graph_objects.Figure(data, shape))


# ---- HTML ----------------------------------------------------------------------------------------------------


def page(found: Comparison, refresh_s: int = 0) -> str:
    """The whole HTML. refresh_s: after which the page loads itself again, 0 for never."""
    runs = found.runs
    title = " and ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs"
    charts = "".join(chart_html(key, chart) for key, chart in make_charts(runs).items())
    tables = ""
    for name, (head, *rows) in found.tables().items():
        tables += f"<h2>{name}</h2>{table_html(head, rows)}"
    settings = ""
    for run in runs:
        known = run.settings | run.start
        table = table_html([], [[name, json.dumps(value, default=str)] for name, value in known.items()])
        settings += f"<details><summary>Settings of {escape(run.name)}</summary>{table}</details>"
    texts = ""
    for run in runs:
        for e in run.samples[::-1][:MOST_TEXTS]:
            texts += "".join(f"<pre>step {e['iter']:,}: {escape(text)}</pre>" for text in e["texts"])
    template = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    return template.substitute(
        refresh=f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else "",
        title=escape(title),
        plotly=plotly_js(),
        headline=escape(found.headline),
        lines="".join(line_html(line) for line in [*found.lines, *found.notes()]),
        charts=charts or "<p>There are no steps and no evaluations yet.</p>",
        tables=tables,
        samples=f"<h2>Samples</h2>{texts}" if texts else "",
        settings=settings,
        date=time.strftime("%Y-%m-%d %H:%M"),
    )


@functools.cache
def plotly_js() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def chart_html(key: str, chart: Chart) -> str:
    from plotly.io import to_html

    config = {"displaylogo": False, "responsive": True}
    plot = to_html(chart.figure, config=config, include_plotlyjs=False, full_html=False, div_id=key)
    note = f'<p class="note">{escape(chart.note)}</p>'
    return f'<figure class="{key}"><h3>{escape(chart.title)}</h3>{plot}{note}</figure>\n'


def line_html(line: str) -> str:
    """A line of the verdict, or a command to copy."""
    is_command = line.startswith(COMMAND)
    return f"<pre>{escape(line.removeprefix(COMMAND))}</pre>" if is_command else f"<p>{escape(line)}</p>"


def table_html(head: list[str], rows: list[list[str]]) -> str:
    """head: headings, of which there may be none; the first cell of a row is its label."""
    heads = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = ""
    for label, *cells in rows:
        values = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        body += f"<tr><th>{escape(label)}</th>{values}</tr>\n"
    return f"<div class=table><table><thead>{heads}</thead><tbody>\n{body}</tbody></table></div>\n"
