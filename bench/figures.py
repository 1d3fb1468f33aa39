"""Writes the tables of docs/figures.md and docs/answers.md from the stored figure of each run.

    python bench/figures.py

Speeds and losses are in bench/results/figures.json: ± is half a 95% interval over n runs with other seeds (Student's
t); one run has none. Answers and recipes are in bench/answers.json: their intervals are those of bench/ask.py.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

from bench.asking.statistics import Estimate, alpha_of_each, difference, interval
from bench.output import RESULTS, markdown_table

ROOT = Path(__file__).resolve().parents[1]
FIGURES = json.loads((RESULTS / "figures.json").read_text(encoding="utf-8"))
ANSWERS = json.loads((ROOT / "bench" / "answers.json").read_text(encoding="utf-8"))


# ---- docs/figures.md -----------------------------------------------------------------------------------------


def speed_table() -> str:
    """How many times as fast as nanoGPT, by machine and model."""
    head = ["machine", "model", "deskGPT", "nanoGPT", "times as fast (range of rounds)", "rounds", "commit, date"]
    cells = []
    for r in FIGURES["speed"]:
        spread = f" ({r['low']} to {r['high']})" if r["low"] else ""
        rounds = str(r["rounds"] or "not given")
        cells.append([r["machine"], r["model"], r["ours"], r["nanogpt"], f"{r['ratio']}{spread}", rounds, source_of(r)])
    return markdown_table(head, cells, left_columns=4)


def loss_table() -> str:
    """Val losses of recipes and the time of their steps."""
    head = ["machine", "recipe", "deskGPT", "val loss", "n", "seconds of steps", "commit, date"]
    cells = []
    for r in FIGURES["loss"]:
        mean, half = interval(r["losses"])
        loss = f"{mean:.4f}" + (f" ± {half:.4f}" if half else "")
        seconds = str(r["seconds"] or "not timed")
        cells.append([r["machine"], r["recipe"], r["ours"], loss, str(len(r["losses"])), seconds, source_of(r)])
    return markdown_table(head, cells, left_columns=3)


def source_of(r: dict[str, Any]) -> str:
    return f"[{r['commit']}, {r['date']}](../bench/results/{r['page']})"


# ---- docs/answers.md -----------------------------------------------------------------------------------------


def with_interval(e: Estimate, digits: int) -> str:
    """A difference and its 95% interval, in bold where it leaves out 0."""
    if not e.known:
        return f"{e.d:+.{digits}f} (too few runs for an interval)"
    found = f"{e.d:+.{digits}f} ({e.low:+.{digits}f} to {e.high:+.{digits}f})"
    return f"**{found}**" if e.low > 0 or e.high < 0 else found


def answer(stored: dict[str, Any]) -> str:
    """Return each pair's difference, computed from its runs: of losses in nats, of other figures in percent."""
    figure = stored["figure"]
    arms = stored["arms"]
    unit, digits = ("nats", 3) if figure == "val_loss" else ("%", 1)
    find = difference if unit == "nats" else change_in_percent
    parts = []
    for x, y in itertools.combinations(arms, 2):
        n = min(len(arms[x]), len(arms[y]))
        e = find(arms[y][:n], arms[x][:n], alpha_of_each(math.comb(len(arms), 2)))
        parts.append(f"`{y}` less `{x}`: {with_interval(e, digits)}, n = {n}")
    means = ", ".join(f"`{arm}` {statistics.fmean(found):,.4g}" for arm, found in arms.items())
    source = f"[{stored['machine']}](../bench/results/{stored['page']})"
    return f"{figure}: {means}. {'; '.join(parts)} ({unit}). {source}"


def change_in_percent(new: list[float], old: list[float], alpha: float) -> Estimate:
    """Return by how many percent `new` is larger than `old`, 100 (ratio - 1), from the logarithms of paired runs."""
    e = difference([math.log(value) for value in new], [math.log(value) for value in old], alpha)
    return Estimate(100 * math.expm1(e.d), 100 * math.expm1(e.low), 100 * math.expm1(e.high), e.n)


def belief_table() -> str:
    cells = [[r["belief"], answer(r), r["instead"], f"`{r['command']}`"] for r in ANSWERS["questions"]]
    return markdown_table(["belief", "answer", "what to do instead", "ask it"], cells, left_columns=4)


def recipe_table() -> str:
    """A row for each arm: by how much it raises the val loss in each column."""
    columns = list(dict.fromkeys(stored["column"] for stored in ANSWERS["recipes"]))
    by_arm: dict[str, dict[str, str]] = {}
    for stored in ANSWERS["recipes"]:
        e = difference(stored["values"], stored["base"])
        by_arm.setdefault(stored["arm"], {})[stored["column"]] = f"{with_interval(e, 3)}, {e.n} {stored['machine']}"
    rows = [[f"`{arm}`", *(of.get(column, "") for column in columns)] for arm, of in sorted(by_arm.items())]
    return markdown_table(["with", *columns], rows, left_columns=1)


# ---- pages ---------------------------------------------------------------------------------------------------

TABLES = {
    "figures.md": {"speed": speed_table, "loss": loss_table},
    "answers.md": {"beliefs": belief_table, "recipes": recipe_table},
}


def with_tables(page: str, text: str) -> str:
    """The page with its tables made anew, each between a comment with its name and the next empty line."""
    for name, table in TABLES[page].items():
        before, mark, after = text.partition(f"<!-- {name} -->\n")
        _, gap, rest = after.partition("\n\n")
        text = before + mark + table() + gap + rest
    return text


if __name__ == "__main__":
    for page in TABLES:
        path = ROOT / "docs" / page
        path.write_text(with_tables(page, path.read_text(encoding="utf-8")), encoding="utf-8")
