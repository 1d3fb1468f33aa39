"""Questions that are written down (bench/questions), and the page of answers."""

from __future__ import annotations

import math
import re

import pytest
from conftest import ROOT

from bench import ask, figures
from bench.asking.ledger import Ledger
from deskgpt.system.errors import ConfigError

ANSWERS = (ROOT / "docs" / "answers.md").read_text(encoding="utf-8")
FILES = sorted((ROOT / "bench" / "questions").glob("*.txt"))


def test_questions_can_be_asked_and_compare_equal_work(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for file in FILES:
        name = f"@bench/questions/{file.name}"
        assert f"`python bench/ask.py {name}`" in ANSWERS
        arms = ask.arms_of(*ask.read_arguments([name]), Ledger(tmp_path))
        sizes = ("batch_size", "gradient_accumulation_steps", "block_size", "max_iters")
        assert len({math.prod(arm.settings[size] for size in sizes) for arm in arms}) == 1


def test_what_follows_a_file_wins_over_it_and_a_missing_one_is_named(tmp_path):
    file = tmp_path / "question.txt"
    file.write_text(
        "# why\nconfig/x.py  # of both arms\n--min_effect=1e-2\n--b '--n_layer=2 --bias=True'\n--compile=False"
    )
    a, common = ask.read_arguments([f"@{file}", "--min_effect=3", "--b", "--n_layer=4", "--compile=True"])
    assert (a.b, a.min_effect) == ("--n_layer=4", 3)
    assert common == ["config/x.py", "--compile=False", "--compile=True"]
    assert ask.read_arguments([f"@{file}"])[0].b == "--n_layer=2 --bias=True"
    with pytest.raises(ConfigError, match="missing.txt"):
        ask.read_arguments([f"@{tmp_path / 'missing.txt'}"])


def test_pages_say_what_the_stored_runs_say():
    assert figures.with_tables("answers.md", ANSWERS) == ANSWERS
    cells = [line.split("|")[2:] for line in ANSWERS.splitlines() if line.startswith("| `--momentum=")]
    assert f"exclude 0 in {sum('**' in cell for row in cells for cell in row)} of 12 cells" in ANSWERS
    decisions = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8").replace("\n", " ")
    cited = re.findall(r"[+-]\d\.\d{3} \([^)]* to [^)]*\)", decisions)
    assert cited
    assert all(f"**{interval}**" in ANSWERS for interval in cited)
    cell = next(line for line in ANSWERS.splitlines() if line.startswith("| `--momentum=0.9` |"))
    stored = next(x for x in figures.ANSWERS["recipes"] if x["arm"] == "--momentum=0.9")
    mean = sum(stored["values"]) / len(stored["values"]) - sum(stored["base"]) / len(stored["base"])
    assert f"{mean:+.3f}" in cell.split("|")[2]
