"""One HTML page about training runs: what bench/report.py and bench/compare.py write.

The page holds all that it needs, plotly's JavaScript included, and makes no request to any network.
"""

from __future__ import annotations

import json
import time
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from bench.analysis.comparison import Comparison
from bench.analysis.logs import Run
from deskgpt.files import write_atomically
from deskgpt.logger import STEP_FIELDS

POINTS = 500  # of a curve; of more steps every nth is drawn
MOST_NUMBERS = 40  # of a run's own, which have a chart each
MOST_TEXTS = 10  # evaluations of a run whose texts are shown, the last ones first
# Colours that the colour-blind can tell apart (Okabe and Ito 2008, made darker).
COLOURS = ("#0072B2", "#D55E00", "#00866A", "#B5508B", "#555555")
# Its name, its events, its number in them, and plotly's style.
Curve = tuple[str, str, str, dict[str, Any]]
LOSS = "Loss (nats per token)"
CHARTS: dict[str, list[Curve]] = {
    LOSS: [
        ("each step", "iters", "loss", {"opacity": 0.6}),
        ("train", "evals", "train_loss", {"line_dash": "dash"}),
        ("val", "evals", "val_loss", {"mode": "lines+markers"}),
    ],
    "Time of a step (ms)": [("", "iters", "time_ms", {})],
    "Learning rate": [("", "iters", "lr", {})],
    "Gradient norm, before clipping": [("", "iters", "grad_norm", {})],
}
# ---- charts --------------------------------------------------------------------------------------


def make_charts(runs: list[Run]) -> dict[str, Any]:
    """Return plotly's figures by their title, without those for which no log has values.

    A number that is not one of train.py's is the run's own, and has a chart, too.
    """
    names = dict.fromkeys(name for run in runs for e in run.iters for name in e)
    own = [name for name in names if name not in STEP_FIELDS][:MOST_NUMBERS]
    curves = CHARTS | {name: [("", "iters", name, {})] for name in own}
    charts = {title: make_chart(runs, title, of_title) for title, of_title in curves.items()}
    return {title: chart for title, chart in charts.items() if chart.data}


def make_chart(runs: list[Run], title: str, curves: list[Curve]) -> Any:
    """Return plotly's figure of curves of each run over its steps."""
    from plotly import graph_objects

    chart = graph_objects.Figure()
    values: list[float] = []
    for number, run in enumerate(runs):
        for name, events, key, style in curves:
            known = [e for e in getattr(run, events) if key in e]
            known = known[:: max(1, len(known) // POINTS)]
            if not known:
                continue
            x = [e["iter"] for e in known]
            y = [float(e[key]) for e in known]
            values += y
            # A line of one point is not seen.
            mode = {"mode": "lines" if len(y) > 1 else "lines+markers"}
            label = escape(f"{run.name} {name}" if len(runs) > 1 else name)
            colour = COLOURS[number % len(COLOURS)]
            chart.add_scatter(x=x, y=y, name=label, line_color=colour, **mode | style)
    is_loss = title == LOSS
    chart.update_layout(
        template="plotly_white",
        height=440 if is_loss else 280,
        margin={"l": 12, "r": 12, "t": 36, "b": 44},
        xaxis_title_text="steps",
        yaxis={"automargin": True, "exponentformat": "power"},
        legend={"orientation": "h", "y": -0.25},
        showlegend=len(chart.data) > 1,
    )
    # A few slow steps, or the losses before a model has learned letters, would flatten all others.
    if title in CHARTS and values:
        top = 1.25 * float(np.quantile(values, 0.9 if is_loss else 0.98))
        if max(values) > top:
            chart.update_yaxes(range=[0.9 * min(values) if is_loss else 0.0, top])
    return chart


# ---- HTML ----------------------------------------------------------------------------------------


def write_page(path: Path, found: Comparison) -> None:
    """Write the page in one step, in place of a link of this name, too."""
    write_atomically(path, page(found).encode("utf-8", "replace"))


def page(found: Comparison) -> str:
    """Return the HTML."""
    from plotly.io import to_html

    options: dict[str, Any] = {"include_plotlyjs": False, "full_html": False}
    options["config"] = {"displaylogo": False, "responsive": True}
    charts = ""
    for i, (title, chart) in enumerate(make_charts(found.runs).items()):
        plot = to_html(chart, div_id=f"chart-{i}", **options)
        charts += f"<figure><h3>{escape(title)}</h3>{plot}</figure>\n"
    texts = ""
    settings = ""
    for run in found.runs:
        name = escape(run.name)
        for e in run.samples[::-1][:MOST_TEXTS]:
            for text in e["texts"]:
                texts += f"<pre>{name}, step {e['iter']:,}: {escape(text)}</pre>"
        rows = [[k, json.dumps(v, default=str)] for k, v in (run.settings | run.start).items()]
        table = table_html([], *rows)
        settings += f"<details><summary>Settings of {name}</summary>{table}</details>"
    tables = ""
    for title, of_cells in found.tables().items():
        tables += f"<h2>{title}</h2>{table_html(*of_cells)}"
    template = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(" and ".join(run.name for run in found.runs[:9])),
        plotly=plotly_js(),
        headline=escape(found.headline),
        lines="".join(f"<p>{escape(line)}</p>" for line in found.lines),
        charts=charts,
        tables=tables,
        samples=f"<h2>Samples</h2>{texts}" if texts else "",
        settings=settings,
        date=time.strftime("%Y-%m-%d %H:%M"),
    )


def plotly_js() -> str:
    """Return plotly's JavaScript. Raise ImportError if the package is missing."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def table_html(head: list[str], *rows: list[str]) -> str:
    """Return a table. head: headings, of which there may be none; the first cell of a row is its
    label.
    """
    heads = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = ""
    for label, *cells in rows:
        values = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        body += f"<tr><th>{escape(label)}</th>{values}</tr>\n"
    return f"<div class=table><table><thead>{heads}</thead><tbody>\n{body}</tbody></table></div>\n"
