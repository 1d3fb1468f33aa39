"""The page of a question: the answer so far, the arms' curves, and the interval of the difference as it narrowed.

The page holds all that it needs, plotly's JavaScript included, and makes no request to any network.
"""

from __future__ import annotations

import time
from html import escape
from pathlib import Path

import numpy as np

from bench.analysis.page import COLOURS, HEAD
from bench.asking import words
from bench.asking.question import FIGURES, Question
from deskgpt.system.files import write_atomically

STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}td,th{padding:.2em 1em;text-align:left}"
)


def write_page(question: Question, sentence: str, path: Path, about: str = "") -> None:
    """Writes the page of a question, which may have no run yet, in place of the one that is there.

    sentence: the headline; about: how it was asked. Raises ValueError where plotly is missing, OSError where the file
    cannot be written.
    """
    try:
        from plotly import graph_objects, subplots
    except ImportError:
        raise ValueError("--page needs the package plotly: pip install plotly") from None
    unit = FIGURES[question.figure].unit
    titles = ("Val loss: mean of an arm's runs", f"Difference from {question.arms[0].label} ({unit}), 95% interval")
    figure = subplots.make_subplots(rows=2, cols=1, subplot_titles=titles)
    for i, arm in enumerate(question.arms):
        style = {"name": escape(arm.label), "marker": {"color": COLOURS[i % len(COLOURS)]}, "mode": "lines+markers"}
        curves = [run["curve"] for run in question.runs[arm.label] if run["outcome"] == "ended"]
        if curves:
            steps = [step for step, _ in curves[0]]
            mean = np.mean([[loss for _, loss in curve] for curve in curves], axis=0)
            figure.add_trace(graph_objects.Scatter(x=steps, y=mean, **style), 1, 1)
        seen = [look for look in question.looks if (question.arms[0].label, arm.label) in look.estimates]
        if seen:
            found = [look.estimates[question.arms[0].label, arm.label] for look in seen]
            d = np.array([e.d for e in found])
            up = np.array([e.high - e.d if e.known else np.nan for e in found])
            down = np.array([e.d - e.low if e.known else np.nan for e in found])
            bars = {"type": "data", "array": up, "arrayminus": down, "symmetric": False}
            n = [e.n for e in found]
            figure.add_trace(graph_objects.Scatter(x=n, y=d, error_y=bars, showlegend=False, **style), 2, 1)
    figure.update_layout(template="simple_white", height=760)
    rows = ""
    for arm in question.arms:
        figures = ", ".join(words.number(question, run[question.figure]) for run in question.runs[arm.label])
        rows += f"<tr><td>{escape(arm.label)}: {escape(arm.what)}<td>{arm.steps:,}<td>{figures}"
    html = (
        f"<!doctype html>{HEAD}<title>{escape(sentence)}</title><style>{STYLE}</style>"
        f"<h1>{escape(sentence)}</h1>{figure.to_html(full_html=False, include_plotlyjs=True)}"
        f"<table><tr><th>arm<th>steps<th>{escape(question.figure)} of each run{rows}</table>"
        f"<p>{escape(about)}; {escape(question.place.machine)}; {time.strftime('%Y-%m-%d %H:%M')}"
    )
    write_atomically(path, html.encode(errors="replace"))
