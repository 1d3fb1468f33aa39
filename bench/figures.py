"""Writes the tables of docs/figures.md from bench/results/figures.json.

    python bench/figures.py

± is half a 95% interval over n runs with other seeds (Student's t); one run has none.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

from bench.analysis.noise import interval
from bench.output import RESULTS, markdown_table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "figures.md"


def speed_table(rows: list[dict[str, Any]]) -> str:
    """How many times as fast as nanoGPT, by machine and model; r: a row of figures.json."""
    head = ["machine", "model", "deskGPT", "nanoGPT", "times as fast (range of rounds)", "rounds", "commit, date"]
    cells = []
    for r in rows:
        spread = f" ({r['low']} to {r['high']})" if r["low"] else ""
        rounds = str(r["rounds"] or "not given")
        cells.append([r["machine"], r["model"], r["ours"], r["nanogpt"], f"{r['ratio']}{spread}", rounds, source_of(r)])
    return markdown_table(head, cells, left_columns=4)


def loss_table(rows: list[dict[str, Any]]) -> str:
    """Val losses of recipes and the time of their steps."""
    head = ["machine", "recipe", "deskGPT", "val loss", "n", "seconds of steps", "commit, date"]
    cells = []
    for r in rows:
        mean, half = interval(r["losses"])
        loss = f"{mean:.4f}" + (f" ± {half:.4f}" if half else "")
        seconds = str(r["seconds"] or "not timed")
        cells.append([r["machine"], r["recipe"], r["ours"], loss, str(len(r["losses"])), seconds, source_of(r)])
    return markdown_table(head, cells, left_columns=3)


def source_of(r: dict[str, Any]) -> str:
    return f"[{r['commit']}, {r['date']}](../bench/results/{r['page']})"


def with_tables(text: str) -> str:
    """The page with its tables made anew, each between a comment with its name and the next empty line."""
    figures = json.loads((RESULTS / "figures.json").read_text(encoding="utf-8"))
    for name, table in (("speed", speed_table(figures["speed"])), ("loss", loss_table(figures["loss"]))):
        before, mark, after = text.partition(f"<!-- {name} -->\n")
        _, gap, rest = after.partition("\n\n")
        text = before + mark + table + gap + rest
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
