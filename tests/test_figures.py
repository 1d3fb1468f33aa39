"""docs/figures.md, docs/answers.md and README.md say what the stored runs say, and the questions can be asked again."""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from typing import Any

import numpy as np
import pytest
from conftest import ROOT

from bench import ask
from bench.asking.arms import folder_for_worktrees
from bench.asking.statistics import ALPHA, difference, interval
from deskgpt.system.errors import ConfigError

FIGURES = json.loads((ROOT / "bench/results/figures.json").read_text(encoding="utf-8"))
ANSWERS = json.loads((ROOT / "bench/answers.json").read_text(encoding="utf-8"))
PAGES = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("figures.md", "answers.md")}


def rows_of(page: str, table: str) -> list[list[str]]:
    """Return the cells of a page's table below a comment with its name, the headings first."""
    lines = PAGES[page].partition(f"<!-- {table} -->\n")[2].partition("\n\n")[0].splitlines()
    del lines[1]
    return [line[2:-2].split(" | ") for line in lines]


def with_interval(new: list[float], old: list[float], alpha: float = ALPHA, is_percent: bool = False) -> str:
    """Return the difference and its interval, in bold if it leaves out 0; in percent from the runs' logarithms."""
    x, y = (np.log(values) if is_percent else values for values in (new, old))
    e = difference(x, y, alpha)
    d, low, high = 100 * np.expm1([e.d, e.low, e.high]) if is_percent else (e.d, e.low, e.high)
    digits = 1 if is_percent else 3
    if not e.known:
        return f"{d:+.{digits}f} (too few runs for an interval)"
    found = f"{d:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"
    return f"**{found}**" if low > 0 or high < 0 else found


def test_speeds_and_losses_are_those_of_the_stored_runs():
    speeds = []
    for r in FIGURES["speed"]:
        spread = f" ({r['low']} to {r['high']})" if r["low"] else ""
        times = [f"{r['ratio']}{spread}", str(r["rounds"] or "not given")]
        speeds.append([r["machine"], r["model"], r["ours"], r["nanogpt"], *times, source_of(r)])
    assert rows_of("figures.md", "speed")[1:] == speeds
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for machine in ("with AMX", "Zen 4", "without fast bfloat16"):
        found = [r for r in FIGURES["speed"] if r["machine"].endswith(machine) and r["ours"].endswith("not compiled")]
        ratios = sorted((r["ratio"] for r in found), key=float)
        assert f"{ratios[0]} to {ratios[-1]}" in readme
        assert all(r["date"] in readme for r in found)
    losses = []
    for r in FIGURES["loss"]:
        mean, half = interval(r["losses"])
        loss = f"{mean:.4f} ± {half:.4f}" if half else f"{mean:.4f}"
        seconds = str(r["seconds"] or "not timed")
        losses.append([r["machine"], r["recipe"], r["ours"], loss, str(len(r["losses"])), seconds, source_of(r)])
    assert rows_of("figures.md", "loss")[1:] == losses


def source_of(r: dict[str, Any]) -> str:
    assert (ROOT / "bench/results" / r["page"]).exists()
    return f"[{r['commit']}, {r['date']}](../bench/results/{r['page']})"


def test_answers_are_those_of_the_stored_runs():
    for stored, row in zip(ANSWERS["questions"], rows_of("answers.md", "beliefs")[1:], strict=True):
        is_percent = stored["figure"] != "val_loss"
        pairs = [*itertools.combinations(stored["arms"], 2)]
        for x, y in pairs:
            n = min(len(stored["arms"][x]), len(stored["arms"][y]))
            found = with_interval(stored["arms"][y][:n], stored["arms"][x][:n], ALPHA / len(pairs), is_percent)
            assert f"`{y}` less `{x}`: {found}, n = {n}" in row[1]
        unit = "%" if is_percent else "nats"
        assert row[1].endswith(f"({unit}). [{stored['machine']}](../bench/results/{stored['page']})")
    columns, *rows = rows_of("answers.md", "recipes")
    cells = {(row[0], column): cell for row in rows for column, cell in zip(columns, row, strict=True)}
    for stored in ANSWERS["recipes"]:
        found = with_interval(stored["values"], stored["base"])
        cell = cells[f"`{stored['arm']}`", stored["column"]]
        assert cell == f"{found}, {len(stored['values'])} {stored['machine']}"
    n_bold = sum("**" in cell for (arm, _), cell in cells.items() if arm.startswith("`--momentum="))
    assert f"exclude 0 in {n_bold} of 12 cells" in PAGES["answers.md"]
    decisions = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8").replace("\n", " ")
    cited = re.findall(r"[+-]\d\.\d{3} \([^)]* to [^)]*\)", decisions)
    assert all(f"**{interval}**" in PAGES["answers.md"] for interval in cited)


def test_questions_can_be_asked_and_compare_equal_work(python, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "executable", str(python))
    for file in (ROOT / "bench" / "questions").glob("*.txt"):
        name = f"@bench/questions/{file.name}"
        assert f"`python bench/ask.py {name}`" in PAGES["answers.md"]
        with folder_for_worktrees(tmp_path) as below:
            arms = ask.make_arms(*ask.read_arguments([name]), below)
        sizes = ("batch_size", "gradient_accumulation_steps", "block_size", "max_iters")
        assert len({math.prod(arm.settings[size] for size in sizes) for arm in arms}) == 1


def test_what_follows_a_file_wins_over_it_and_a_missing_one_is_named(tmp_path):
    file = tmp_path / "question.txt"
    file.write_text("# why\nconfig/x.py  # of both arms\n--min_effect=1e-2\n--b '--n_layer=2 --bias=True'\n--seed=1")
    a, common = ask.read_arguments([f"@{file}", "--min_effect=3", "--b", "--n_layer=4", "--seed=2"])
    assert (a.b, a.min_effect) == ("--n_layer=4", 3)
    assert common == ["config/x.py", "--seed=1", "--seed=2"]
    with pytest.raises(ConfigError, match="missing.txt"):
        ask.read_arguments([f"@{tmp_path / 'missing.txt'}"])
