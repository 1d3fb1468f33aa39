"""docs/figures.md and README.md: their figures are those of bench/results/figures.json."""

from __future__ import annotations

import pytest
from conftest import ROOT

from bench import figures

FIGURES = figures.FIGURES


def test_tables_of_the_page_are_made_from_the_stored_figures():
    text = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
    assert figures.with_tables("figures.md", text) == text, "run python bench/figures.py"
    edited = text.replace("0.0047", "0.0048")
    assert figures.with_tables("figures.md", edited) == text  # an edit by hand is undone
    for row in FIGURES["speed"] + FIGURES["loss"]:
        assert (ROOT / "bench" / "results" / row["page"]).exists()


@pytest.mark.parametrize("machine", ["with AMX", "Zen 4", "without fast bfloat16"])
def test_speed_in_the_readme_is_the_range_of_uncompiled_runs(machine):
    found = [r for r in FIGURES["speed"] if r["machine"].endswith(machine) and r["ours"].endswith("not compiled")]
    ratios = sorted((r["ratio"] for r in found), key=float)
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"{ratios[0]} to {ratios[-1]}" in text
    assert {r["date"] for r in found} <= set(text.replace(";", " ").replace(")", " ").split())
