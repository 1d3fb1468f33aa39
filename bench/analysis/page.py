"""One HTML page about training runs: what bench/report.py and bench/compare.py write.

The page holds all that it needs, plotly's JavaScript included, and makes no request to any network.
"""

from __future__ import annotations

import functools
import json
import time
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from bench.analysis.logs import Event, Run
from bench.analysis.verdict import Comparison

POINTS = 500  # of a curve; of more steps every nth is drawn
MOST_NUMBERS = 40  # of a run's own, which have a chart each
MOST_TEXTS = 10  # evaluations of a run whose texts are shown, the last ones first
# Colours that the colour-blind can tell apart (Okabe and Ito 2008, made darker).
COLOURS = ("#0072B2", "#D55E00", "#00866A", "#B5508B", "#555555")
CHARTS = {"time_ms": "Time of a step (ms)", "lr": "Learning rate", "grad_norm": "Gradient norm, before clipping"}
# Numbers of train.py's steps without a chart of their own; all others get one.
NO_CHART = {"iter", "loss", "mfu", "mfu_measured", "clip_rate", "data_wait", "tokens_per_s", "tokens", "train_s"}
NO_CHART |= {"peak_memory_bytes"}

# ---- charts --------------------------------------------------------------------------------------------------


def points(events: list[Event], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, values) of a number of run.iters or run.evals, each (n,): the first of all, at most 2 POINTS."""
    known = [e for e in events if key in e]
    known = known[:: max(1, len(known) // POINTS)]
    return np.array([e["iter"] for e in known], float), np.array([e[key] for e in known], float)


def trace(number: int, name: str, x: np.ndarray, y: np.ndarray, **style: Any) -> dict[str, Any]:
    """Return a curve in the colour of a run as plotly's trace."""
    style["line"] = {"color": COLOURS[number % len(COLOURS)], "width": 2} | style.get("line", {})
    found = {"type": "scatter", "name": escape(name), "x": x, "y": y}
    found["mode"] = "lines" if len(y) > 1 else "lines+markers"  # a line of one point is not seen
    found["hovertemplate"] = f"%{{y:.5g}} at %{{x:,.6g}}<extra>{escape(name)}</extra>"
    return found | style


def figure(traces: list[dict[str, Any]], height: int, **layout: Any) -> Any:
    """Return plotly's figure of traces over steps."""
    from plotly import graph_objects

    shape = {
        "template": "plotly_white",
        "height": height,
        "margin": {"l": 12, "r": 12, "t": 36, "b": 44},
        "xaxis": {"title": {"text": "steps"}},
        "yaxis": {"automargin": True, "exponentformat": "power"},
        "legend": {"orientation": "h", "y": -0.25},
    }
    return graph_objects.Figure(traces, shape | layout)


def make_charts(runs: list[Run]) -> dict[str, Any]:
    """Return plotly's figures by their title, without those for which no log has values."""
    names = dict.fromkeys(name for run in runs for e in run.iters for name in e)
    own = [name for name in names if name not in NO_CHART | CHARTS.keys()]
    titles = CHARTS | {name: name for name in own[:MOST_NUMBERS]}
    charts = {"Loss (nats per token)": loss_chart(runs)}
    charts |= {title: step_chart(runs, key) for key, title in titles.items()}
    return {title: chart for title, chart in charts.items() if chart is not None}


def step_chart(runs: list[Run], key: str) -> Any:
    """Return the chart of a number of the steps; None if no run has it."""
    found = [points(run.iters, key) for run in runs]
    traces = [trace(i, runs[i].name, x, y, line={"width": 1.5}) for i, (x, y) in enumerate(found) if len(y)]
    if not traces:
        return None
    chart = figure(traces, height=280, showlegend=len(runs) > 1)
    every = np.concatenate([y for _, y in found])
    top = 1.25 * float(np.quantile(every, 0.98))
    if key in ("time_ms", "grad_norm") and every.max() > top:  # so that a few slow steps do not flatten all others
        chart.update_yaxes(range=[0, top])
    return chart


def loss_chart(runs: list[Run]) -> Any:
    """Return the chart of losses; None if no run has one."""
    traces: list[dict[str, Any]] = []
    for number, run in enumerate(runs):
        of_run = f"{run.name}, " if len(runs) > 1 else ""
        for name, events, key, style in (
            ("each step", run.iters, "loss", {"line": {"width": 1}, "opacity": 0.6}),
            ("train", run.evals, "train_loss", {"line": {"dash": "dash"}}),
            ("val", run.evals, "val_loss", {"mode": "lines+markers"}),
        ):
            x, y = points(events, key)
            if len(y):
                traces.append(trace(number, of_run + name, x, y, **style))
    return figure(traces, height=440) if traces else None


# ---- HTML ----------------------------------------------------------------------------------------------------


def page(found: Comparison) -> str:
    """Return the HTML."""
    from plotly.io import to_html

    runs = found.runs
    charts = ""
    for i, (title, chart) in enumerate(make_charts(runs).items()):
        config = {"displaylogo": False, "responsive": True}
        plot = to_html(chart, config=config, include_plotlyjs=False, full_html=False, div_id=f"chart-{i}")
        charts += f"<figure><h3>{escape(title)}</h3>{plot}</figure>\n"
    tables = "".join(f"<h2>{name}</h2>{table_html(*table)}" for name, table in found.tables().items())
    texts = ""
    settings = ""
    for run in runs:
        for e in run.samples[::-1][:MOST_TEXTS]:
            texts += "".join(f"<pre>step {e['iter']:,}: {escape(text)}</pre>" for text in e["texts"])
        rows = [[name, json.dumps(value, default=str)] for name, value in (run.settings | run.start).items()]
        settings += f"<details><summary>Settings of {escape(run.name)}</summary>{table_html([], *rows)}</details>"
    template = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(" and ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs"),
        plotly=plotly_js(),
        headline=escape(found.headline),
        lines="".join(f"<p>{escape(line)}</p>" for line in found.lines),
        charts=charts,
        tables=tables,
        samples=f"<h2>Samples</h2>{texts}" if texts else "",
        settings=settings,
        date=time.strftime("%Y-%m-%d %H:%M"),
    )


@functools.cache
def plotly_js() -> str:
    """Return plotly's JavaScript. Raise ImportError if the package is missing."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def table_html(head: list[str], *rows: list[str]) -> str:
    """Return a table. head: headings, of which there may be none; the first cell of a row is its label."""
    heads = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = ""
    for label, *cells in rows:
        values = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        body += f"<tr><th>{escape(label)}</th>{values}</tr>\n"
    return f"<div class=table><table><thead>{heads}</thead><tbody>\n{body}</tbody></table></div>\n"
