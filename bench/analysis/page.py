"""One HTML page about training runs: what bench/report.py, bench/compare.py and bench/ask.py write.

The page holds all that it needs, plotly's JavaScript included, and makes no request to any network.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from bench.analysis.logs import Run
from bench.analysis.table import band_of
from bench.analysis.verdict import COMMAND

POINTS = 500  # most points of a curve; of more steps each point is the mean of several
MOST_NUMBERS = 40  # of a run's own, which have a chart each
# Colours that the colour-blind can tell apart (Okabe and Ito 2008, made darker). With more runs they repeat with the
# next symbol.
COLOURS = ("#0072B2", "#D55E00", "#00866A", "#B5508B", "#555555")
SYMBOLS = ("circle", "square", "diamond", "triangle-up")
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


@dataclass
class Chart:
    title: str
    note: str
    figure: Any  # plotly's


# ---- charts --------------------------------------------------------------------------------------------------


def points(run: Run, events: list[dict[str, Any]], key: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(x by axis, y) of a field of run.iters or run.evals, each (n,): at most POINTS, means of equally many events."""
    known = [e for e in events if e.get(key) is not None]
    if not known:
        return dict.fromkeys(AXES, np.array([])), np.array([])
    n = min(POINTS, len(known))
    first = np.arange(n) * len(known) // n
    sizes = np.diff([*first, len(known)])
    y, steps, tokens, train_s = (  # float makes NaN of None
        np.add.reduceat(np.array([e.get(name) for e in known], float), first) / sizes
        for name in (key, "iter", "tokens", "train_s")
    )
    flops = tokens * (run.flops_per_token or np.nan)
    return {"steps": steps, "tokens": tokens, "minutes": train_s / 60, "FLOPs": flops}, y


def traces(
    number: int,
    name: str,
    x: np.ndarray,
    y: np.ndarray,
    low: np.ndarray | None = None,
    high: np.ndarray | None = None,
    **style: Any,
) -> list[dict[str, Any]]:
    """A curve in the colour of a run as plotly's traces, beneath it its band where low and high are given."""
    line = {
        "type": "scatter",
        "name": escape(name),
        "x": x,
        "y": y,
        "mode": "lines" if len(y) > 1 else "lines+markers",  # a line of one point is not seen
        "line": {"width": 2},
        "hovertemplate": f"%{{y:.5g}} at %{{x:,.6g}}<extra>{escape(name)}</extra>",
    } | style
    line["line"] = {"color": COLOURS[number % len(COLOURS)]} | line["line"]
    if low is None or high is None:
        return [line] if len(y) else []
    band = {"type": "scatter", "x": np.concatenate([x, x[::-1]]), "y": np.concatenate([high, low[::-1]])}
    band |= {"fill": "toself", "mode": "lines", "line": {"width": 0, "color": line["line"]["color"]}}
    return [band | {"opacity": 0.3, "hoverinfo": "skip", "showlegend": False}, line]


def symbol_of(number: int) -> str:
    """plotly's name of the symbol of a run, which changes when all colours are used."""
    return SYMBOLS[number // len(COLOURS) % len(SYMBOLS)]


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
    data = [t for i, (x, y) in enumerate(found) for t in traces(i, runs[i].name, x["steps"], y, line={"width": 1.5})]
    if not data:
        return None
    missing = ", ".join(run.name for run, (_, y) in zip(runs, found, strict=True) if not len(y))
    note = f"Not in the log of {missing}. " if missing else ""
    figure = graph_objects.Figure(data, layout(280, "steps", unit) | {"showlegend": len(runs) > 1})
    every = np.concatenate([y for _, y in found])
    top = 1.25 * float(np.quantile(every, 0.98))
    if key in ("time_ms", "grad_norm") and every.max() > top:  # so that a few slow steps do not flatten all others
        figure.update_yaxes(range=[0, top])
        note += f"{(every > top).sum():,} of {len(every):,} points lie above; the greatest is {every.max():,.4g}."
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
        bars = {"error_y": {"array": 1.96 * np.array(errors), "thickness": 1}} if len(errors) == len(run.val) else {}
        marked = {"mode": "lines+markers", "marker": {"size": 6, "symbol": symbol_of(number)}}
        for what, events, key, style in (
            ("each step", run.iters, "loss", {"line": {"width": 1}, "opacity": 0.6}),
            ("train", run.evals, "train_loss", {"line": {"dash": "dash"}}),
            ("val", run.evals, "val_loss", marked | (bars if len(run.val) <= POINTS else {})),
        ):
            x, y = points(run, events, key)
            new = traces(number, of_run + what, x["steps"], y, **style)
            data += new
            x_of += [x] * len(new)
        band = band_of(run)
        if band and band not in bands:
            bands.append(band)
            steps = np.array(sorted(band.losses), float)
            low, high = np.array([band.limits(int(step)) for step in steps]).T
            data.append(traces(-1, "", steps, low, low, high)[0])
            steps = data[-1]["x"]
            tokens = steps * (run.tokens_per_step or np.nan)
            x_of.append(dict.fromkeys(AXES, steps * np.nan) | {"steps": steps, "tokens": tokens})
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


def page(
    title: str,
    runs: list[Run],
    tables: list[Table],
    verdict: list[str],
    samples: Sequence[str] = (),
    about: str = "",
    headlines: Sequence[Headline] = (),
    charts: dict[str, Chart] | None = None,
    refresh_s: int = 0,
) -> str:
    """The whole HTML. verdict: sentences, and commands that begin with COMMAND; charts: in place of those of the runs;
    refresh_s: after which the page loads itself again, 0 for never. Raises ValueError where plotly is missing.
    """
    js = plotly_js()
    from plotly.io import to_html

    config = {"displaylogo": False, "responsive": True}
    drawn = ""
    for key, chart in (make_charts(runs) if charts is None else charts).items():
        plot = to_html(chart.figure, config=config, include_plotlyjs=False, full_html=False, div_id=key)
        note = f'<p class="note">{escape(chart.note)}</p>'
        drawn += f'<figure class="{key}"><h3>{escape(chart.title)}</h3>{plot}{note}</figure>\n'
    lines = [*verdict, *(f"{run.name}: {note}." for run in runs for note in run.notes)]
    words = "".join(
        f"<pre>{escape(line.removeprefix(COMMAND))}</pre>" if line.startswith(COMMAND) else f"<p>{escape(line)}</p>"
        for line in lines
    )
    texts = "".join(f"<pre>{escape(text)}</pre>" for text in samples)
    settings = "".join(
        f"<details><summary>Settings of {escape(run.name)}</summary>"
        f"{table_html(Table('', [], [[k, json.dumps(v, default=str)] for k, v in run.settings.items()]))}</details>"
        for run in runs
    )
    refresh = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    css = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
    head = "".join(map(headline_html, headlines)) or f"<h1>{escape(title)}</h1>"
    return (
        f"<!doctype html>\n<html lang=en>\n<head>\n{HEAD}{refresh}\n<title>{escape(title)}</title>\n"
        f"<style>\n{css}</style>\n<script>{js}</script>\n</head>\n<body>\n<main>\n{head}\n{words}\n"
        f"<section>{drawn or '<p>There are no steps and no evaluations yet.</p>'}</section>\n"
        f"{''.join(map(table_html, tables))}\n"
        f"{'<h2>Samples</h2>' if texts else ''}{texts}\n{settings}\n"
        f"<p class=note>{escape(about)}</p>\n</main>\n</body>\n</html>\n"
    )


@functools.cache
def plotly_js() -> str:
    """plotly's JavaScript. Raises ValueError where plotly is missing."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ValueError("the page needs plotly: pip install plotly") from None
    return get_plotlyjs()


def headline_html(headline: Headline) -> str:
    name = f'<p class="note">{escape(headline.name)}</p>' if headline.name else ""
    figures = "".join(
        f"<div><dt>{escape(f.label)}</dt><dd>{escape(f.value)}</dd><dd class=note>{escape(f.note)}</dd></div>\n"
        for f in headline.figures
    )
    return f"<header>{name}<h1>{escape(headline.text)}</h1><dl>{figures}</dl></header>"


def table_html(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "".join(
        f"<tr><th>{escape(label)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>\n"
        for label, *cells in table.rows
    )
    title = f"<h2>{escape(table.title)}</h2>" if table.title else ""
    note = f"<p class=note>{escape(table.note)}</p>" if table.note else ""
    return f"{title}<div class=table><table><thead>{head}</thead><tbody>\n{rows}</tbody></table></div>{note}\n"
