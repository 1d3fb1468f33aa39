"""Writes the tables of docs/answers.md from what is stored: bench/answers.json has the figure of each run.

python -m bench.asking.answers
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

from bench.asking import statistics as sure
from bench.asking.statistics import Estimate

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "answers.md"
STORED = json.loads((ROOT / "bench" / "answers.json").read_text(encoding="utf-8"))


def interval(e: Estimate, digits: int) -> str:
    """A difference and its 95% interval, in bold where it leaves out 0."""
    if not e.known:
        return f"{e.d:+.{digits}f} (too few runs for an interval)"
    found = f"{e.d:+.{digits}f} ({e.low:+.{digits}f} to {e.high:+.{digits}f})"
    return f"**{found}**" if e.low > 0 or e.high < 0 else found


def answer(stored: dict[str, Any]) -> str:
    """A question's answer: each pair of arms, computed from its runs; of speeds, by 100 times the logarithm."""
    if "arms" not in stored:
        return "no runs are stored: ask it"
    figure = stored["figure"]
    arms = stored["arms"]
    unit, digits = ("nats", 3) if figure == "val_loss" else ("%", 1)
    alpha = sure.alpha_of_each(math.comb(len(arms), 2))
    parts = []
    for x, y in itertools.combinations(arms, 2):
        n = min(len(arms[x]), len(arms[y]))
        a, b = arms[x][:n], arms[y][:n]
        if unit == "%":
            a, b = [100 * math.log(value) for value in a], [100 * math.log(value) for value in b]
        parts.append(f"`{y}` less `{x}`: {interval(sure.difference(b, a, alpha), digits)}, n = {n}")
    means = ", ".join(f"`{arm}` {statistics.fmean(found):,.4g}" for arm, found in arms.items())
    source = f"[{stored['machine']}](../bench/results/{stored['page']})"
    return f"{figure}: {means}. {'; '.join(parts)} ({unit}). {source}"


def beliefs() -> list[str]:
    """The table of questions."""
    lines = ["| | belief | answer | what to do instead | ask it |", "|--:|---|---|---|---|"]
    for number, stored in enumerate(STORED["questions"], 1):
        cells = [stored["belief"], answer(stored), stored["instead"], f"`{stored['command']}`"]
        lines.append(f"| {number} | {' | '.join(cells)} |")
    return lines


def recipes() -> list[str]:
    """The table of recipes: a row for each arm, by how much it raises the val loss in each column."""
    columns = list(dict.fromkeys(stored["column"] for stored in STORED["recipes"]))
    cells: dict[str, dict[str, str]] = {}
    for stored in STORED["recipes"]:
        e = sure.difference(stored["values"], stored["base"])
        cells.setdefault(stored["arm"], {})[stored["column"]] = f"{interval(e, 3)}, {e.n} {stored['machine']}"
    lines = [f"| with | {' | '.join(columns)} |", "|---|" + "--:|" * len(columns)]
    for arm, by_column in sorted(cells.items()):
        lines.append(f"| `{arm}` | {' | '.join(by_column.get(column, '') for column in columns)} |")
    return lines


def rendered(page: str) -> str:
    """The page with its tables made anew."""
    for name, lines in (("beliefs", beliefs()), ("recipes", recipes())):
        mark = f"<!-- {name}: python -m bench.asking.answers -->\n"
        before, _, after = page.partition(mark)
        page = before + mark + "\n".join(lines) + "\n" + re.sub(r"^(\|.*\n)*", "", after)
    return page


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
