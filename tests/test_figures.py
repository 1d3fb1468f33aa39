"""docs/figures.md, docs/answers.md and README.md say what the stored runs say, and the questions can be asked again."""

from __future__ import annotations

import math
import re
import statistics
import sys

import pytest
from conftest import ROOT

from bench import ask, figures
from bench.asking.arms import folder_for_worktrees
from deskgpt.system.errors import ConfigError

PAGES = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in figures.TABLES}


@pytest.mark.parametrize(("name", "figure"), [("figures.md", "0.0047"), ("answers.md", "+0.085")])
def test_tables_are_made_from_the_stored_figures_and_an_edit_by_hand_is_undone(name, figure):
    page = PAGES[name]
    assert figure in page
    assert figures.with_tables(name, page) == page, "run python bench/figures.py"
    assert figures.with_tables(name, page.replace(figure, "9.9999")) == page
    for row in figures.FIGURES["speed"] + figures.FIGURES["loss"]:
        assert (ROOT / "bench" / "results" / row["page"]).exists()


@pytest.mark.parametrize("machine", ["with AMX", "Zen 4", "without fast bfloat16"])
def test_speed_in_the_readme_is_the_range_of_uncompiled_runs(machine):
    rows = figures.FIGURES["speed"]
    found = [r for r in rows if r["machine"].endswith(machine) and r["ours"].endswith("not compiled")]
    ratios = sorted((r["ratio"] for r in found), key=float)
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"{ratios[0]} to {ratios[-1]}" in text
    assert {r["date"] for r in found} <= set(text.replace(";", " ").replace(")", " ").split())


def test_intervals_that_pages_cite_are_those_of_the_stored_runs():
    answers = PAGES["answers.md"]
    rows = [line.split("|")[2:] for line in answers.splitlines() if line.startswith("| `--momentum=")]
    assert f"exclude 0 in {sum('**' in cell for row in rows for cell in row)} of 12 cells" in answers
    decisions = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8").replace("\n", " ")
    cited = re.findall(r"[+-]\d\.\d{3} \([^)]* to [^)]*\)", decisions)
    assert cited
    assert all(f"**{interval}**" in answers for interval in cited)


def test_changes_are_percentages_of_a_ratio_and_so_are_their_intervals():
    old = [1.0, 1.1, 0.9, 1.05, 0.98]
    e = figures.change_in_percent([2 * value for value in old], old, 0.05)
    assert [e.d, e.low, e.high] == pytest.approx([100.0] * 3)
    e = figures.change_in_percent([value / 4 for value in old], old, 0.05)
    assert e.d == pytest.approx(-75)
    for stored in figures.ANSWERS["questions"]:
        if stored["figure"] != "val_loss":
            first, *_, last = stored["arms"].values()
            n = min(len(first), len(last))
            ratio = statistics.geometric_mean(last[:n]) / statistics.geometric_mean(first[:n])
            assert f"{100 * (ratio - 1):+.1f}" in figures.answer(stored)


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
    assert ask.read_arguments([f"@{file}"])[0].b == "--n_layer=2 --bias=True"
    with pytest.raises(ConfigError, match="missing.txt"):
        ask.read_arguments([f"@{tmp_path / 'missing.txt'}"])
