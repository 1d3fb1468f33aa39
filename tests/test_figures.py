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


def assert_line_with(page: str, *values: Any) -> None:
    """A line of a page has all of these."""
    wanted = [str(value) for value in values if value is not None]
    assert any(all(text in line for text in wanted) for line in PAGES[page].splitlines()), wanted


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
    for r in FIGURES["speed"]:
        assert_line_with("figures.md", *r.values())
    for r in FIGURES["loss"]:
        mean, half = interval(r["losses"])
        found = f"{mean:.4f} ± {half:.4f}" if half else f"{mean:.4f}"
        assert_line_with("figures.md", f"| {found} | {len(r['losses'])} |", *(r | {"losses": None}).values())
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for machine in ("with AMX", "Zen 4", "without fast bfloat16"):
        rows = [r for r in FIGURES["speed"] if r["machine"].endswith(machine) and r["ours"].endswith("not compiled")]
        ratios = sorted((r["ratio"] for r in rows), key=float)
        assert f"{ratios[0]} to {ratios[-1]}" in readme
        assert all(r["date"] in readme for r in rows)


def test_answers_are_those_of_the_stored_runs():
    answers = PAGES["answers.md"]
    for stored in ANSWERS["questions"]:
        is_percent = stored["figure"] != "val_loss"
        pairs = [*itertools.combinations(stored["arms"], 2)]
        for x, y in pairs:
            n = min(len(stored["arms"][x]), len(stored["arms"][y]))
            found = with_interval(stored["arms"][y][:n], stored["arms"][x][:n], ALPHA / len(pairs), is_percent)
            assert_line_with("answers.md", stored["belief"], f"`{y}` less `{x}`: {found}, n = {n}", stored["page"])
    for stored in ANSWERS["recipes"]:
        found = with_interval(stored["values"], stored["base"])
        cell = f"| {found}, {len(stored['values'])} {stored['machine']} |"
        assert_line_with("answers.md", f"| `{stored['arm']}` |", cell)
    n_bold = sum(line.count("**") // 2 for line in answers.splitlines() if line.startswith("| `--momentum="))
    assert f"exclude 0 in {n_bold} of 12 cells" in answers
    decisions = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8").replace("\n", " ")
    cited = re.findall(r"[+-]\d\.\d{3} \([^)]* to [^)]*\)", decisions)
    assert all(f"**{interval}**" in answers for interval in cited)


@pytest.mark.slow
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
