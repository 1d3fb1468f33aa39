"""Writes the tables of docs/answers.md from what is stored: bench/answers.json has the figure of each run.

python -m bench.asking.answers
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import tomllib
from pathlib import Path
from typing import Any

from bench.asking import statistics as sure
from bench.asking.question import FIGURES
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
    """A question's answer: each pair of arms, computed from its runs."""
    figure = FIGURES[stored["figure"]]
    values = {arm: [figure.sign * figure.value(x) for x in found] for arm, found in stored["arms"].items()}
    alpha = sure.alpha_of_each(len(values) * (len(values) - 1) // 2)
    parts = []
    for x, y in itertools.combinations(values, 2):
        n = min(len(values[x]), len(values[y]))
        e = sure.difference(values[y][:n], values[x][:n], alpha)
        digits = 1 if figure.is_rate else 3
        parts.append(f"`{y}` less `{x}`: {interval(e, digits)}, n = {n}")
    means = ", ".join(f"`{arm}` {statistics.fmean(found):,.4g}" for arm, found in stored["arms"].items())
    source = f"[{stored['machine']}](../bench/results/{stored['page']})"
    return f"{stored['figure']}: {means}. {'; '.join(parts)} ({figure.unit}). {source}"


def beliefs() -> list[str]:
    """The table of questions."""
    lines = ["| | belief | answer | what to do instead |", "|--:|---|---|---|"]
    known = {stored["question"]: answer(stored) for stored in STORED["questions"]}
    for file in sorted((ROOT / "bench" / "questions").glob("*.toml")):
        asked = tomllib.loads(file.read_text(encoding="utf-8"))
        link = f"[{int(file.stem[:2])}](../bench/questions/{file.name})"
        found = known.get(file.stem, "no runs are stored: ask it")
        lines.append(f"| {link} | {asked['belief']} | {found} | {asked['instead']} |")
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
