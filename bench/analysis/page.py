"""One HTML page about training runs: what bench/report.py and bench/compare.py write.

The page holds all that it needs, plotly's JavaScript included, and makes no request to any network.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from bench.analysis.logs import Run
from bench.analysis.table import band_of
from bench.analysis.verdict import COMMAND, Comparison

POINTS = 500  # of a curve; of more steps every nth is drawn
MOST_NUMBERS = 40  # of a run's own, which have a chart each
# Colours that the colour-blind can tell apart (Okabe and Ito 2008, made darker).
COLOURS = ("#0072B2", "#D55E00", "#00866A", "#B5508B", "#555555")
AXES = {"steps": "steps", "tokens": "tokens trained on", "minutes": "minutes of training", "FLOPs": "FLOPs"}
CHARTS = {  # by a step's field: title and unit
    "time_ms": ("Time of a step", "ms"),
    "lr": ("Learning rate", ""),
    "grad_norm": ("Gradient norm, before clipping", ""),
}
# The policy makes the browser refuse everything that is not in this file.
HEAD = """<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline';
 style-src 'unsafe-inline'; img-src data: blob:">"""


@dataclass
class Chart:
    title: str
    note: str
    figure: Any  # plotly's


# ---- charts --------------------------------------------------------------------------------------------------


def points(run: Run, events: list[dict[str, Any]], key: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(x by axis, y) of a field of run.iters or run.evals, each (n,): the first of all, and at most 2 POINTS."""
    known = [e for e in events if e.get(key) is not None]
    names = (key, "iter", "tokens", "train_s")
    rows = [[e.get(name) for name in names] for e in known[:: max(1, len(known) // POINTS)]]
    y, steps, tokens, train_s = np.array(rows, float).reshape(-1, len(names)).T  # float makes NaN of None
    flops = tokens * (run.flops_per_token or np.nan)
    return {"steps": steps, "tokens": tokens, "minutes": train_s / 60, "FLOPs": flops}, y


def curve(number: int, name: str, x: np.ndarray, y: np.ndarray, **style: Any) -> dict[str, Any]:
    """A curve in the colour of a run as plotly's trace."""
    style["line"] = {"color": COLOURS[number % len(COLOURS)], "width": 2} | style.get("line", {})
    return {
        "type": "scatter",
        "name": escape(name),
        "x": x,
        "y": y,
        "mode": "lines" if len(y) > 1 else "lines+markers",  # a line of one point is not seen
        "hovertemplate": f"%{{y:.5g}} at %{{x:,.6g}}<extra>{escape(name)}</extra>",
    } | style


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
    known = [axis for axis in AXES if any(np.isfinite(x[axis]).any() for x in x_of)]
    axes = [("update", axis, [{"x": [x[axis] for x in x_of]}, {"xaxis.title.text": AXES[axis]}]) for axis in known]
    kinds = [("linear", "linear"), ("linear", "log"), ("log", "linear"), ("log", "log")]
    scales = [("relayout", f"{x} x, {y} y", [{"xaxis.type": x, "yaxis.type": y}]) for x, y in kinds]
    shape = layout(440, "steps", "loss (nats per token)")
    shape["updatemenus"] = [
        {"x": left, "y": 1.12, "xanchor": "left", "buttons": [{"method": m, "label": n, "args": a} for m, n, a in menu]}
        for left, menu in ((0, axes), (0.4, scales))
    ]
    return Chart("Loss", note, graph_objects.Figure(data, shape))


# ---- HTML ----------------------------------------------------------------------------------------------------


def page(found: Comparison, samples: Sequence[str] = (), refresh_s: int = 0) -> str:
    """The whole HTML. samples: texts; refresh_s: after which the page loads itself again, 0 for never.

    Raises ValueError where plotly is missing.
    """
    js = plotly_js()
    from plotly.io import to_html

    title = " and ".join(run.name for run in found.runs) if len(found.runs) < 4 else f"{len(found.runs)} runs"
    config = {"displaylogo": False, "responsive": True}
    drawn = ""
    for key, chart in make_charts(found.runs).items():
        plot = to_html(chart.figure, config=config, include_plotlyjs=False, full_html=False, div_id=key)
        note = f'<p class="note">{escape(chart.note)}</p>'
        drawn += f'<figure class="{key}"><h3>{escape(chart.title)}</h3>{plot}{note}</figure>\n'
    figures = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd><dd class=note>{escape(note)}</dd></div>\n"
        for label, value, note in found.figures
    )
    lines = "".join(
        f"<pre>{escape(line.removeprefix(COMMAND))}</pre>" if line.startswith(COMMAND) else f"<p>{escape(line)}</p>"
        for line in [*found.lines, *found.notes()]
    )
    tables = "".join(f"<h2>{name}</h2>{table_html(*rows)}" for name, rows in found.tables().items())
    texts = "".join(f"<pre>{escape(text)}</pre>" for text in samples)
    settings = "".join(
        f"<details><summary>Settings of {escape(run.name)}</summary>"
        f"{table_html([], *([name, json.dumps(value, default=str)] for name, value in run.settings.items()))}</details>"
        for run in found.runs
    )
    refresh = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    css = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
    return (
        f"<!doctype html>\n<html lang=en>\n<head>\n{HEAD}{refresh}\n<title>{escape(title)}</title>\n"
        f"<style>\n{css}</style>\n<script>{js}</script>\n</head>\n<body>\n<main>\n"
        f"<p class=note>{escape(title)}</p><h1>{escape(found.headline)}</h1><dl>{figures}</dl>\n{lines}\n"
        f"<section>{drawn or '<p>There are no steps and no evaluations yet.</p>'}</section>\n"
        f"{tables}\n{'<h2>Samples</h2>' if texts else ''}{texts}\n{settings}\n"
        f"<p class=note>{escape(about(found.runs))}</p>\n</main>\n</body>\n</html>\n"
    )


@functools.cache
def plotly_js() -> str:
    """plotly's JavaScript. Raises ValueError where plotly is missing."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ValueError("the page needs plotly: pip install plotly") from None
    return get_plotlyjs()


def about(runs: list[Run]) -> str:
    """The machine, versions and commit of a run, and the date of the page."""
    facts = [f"page of {time.strftime('%Y-%m-%d %H:%M')}"]
    for start in [run.start for run in runs][:1]:
        facts += (
            [f"{start.get('world_size', 1)} x {start['device']}, {start.get('dtype')}"] if "device" in start else []
        )
        facts += [f"compiled by {start.get('compiler')}"] if start.get("compiled") else []
        facts += [f"{name} {version}" for name, version in start.get("versions", {}).items()]
        facts += [f"commit {start['git_commit']}"] if "git_commit" in start else []
    return "; ".join(facts)


def table_html(head: list[str], *rows: list[str]) -> str:
    """head: headings, of which there may be none; the first cell of a row is its label."""
    heads = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "".join(
        f"<tr><th>{escape(label)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>\n"
        for label, *cells in rows
    )
    return f"<div class=table><table><thead>{heads}</thead><tbody>\n{body}</tbody></table></div>\n"
