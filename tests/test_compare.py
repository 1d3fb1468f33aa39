"""compare.py: figures worked out by hand, which losses compare, at which amount, and how often a winner is wrong."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import assert_one_line
from logs import log, rewrite

from bench.analysis.logs import Run, read_runs
from bench.analysis.verdict import Comparison, compare

REAL = Path(__file__).resolve().parents[2] / "shared" / "data" / "nanogpt_logs" / "fineweb_33m_rtx4070.txt"
CURVE = {0: 4.0, 100: 3.0, 200: 2.5}


def compared(*paths: str) -> tuple[dict[str, list[str]], str]:
    """Return ({label: cells} of all tables, the headline)."""
    found = compare(read_runs([*paths]))
    return rows_of(found), found.headline


def rows_of(found: Comparison) -> dict[str, list[str]]:
    return {row[0]: row[1:] for _, *of_table in found.tables().values() for row in of_table}


# ---- figures -------------------------------------------------------------------------------------------------


def test_every_column_is_what_it_is_by_hand(tmp_path):
    a = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.0}, ms=100)
    split: dict[str, Any] = {"batch_size": 8, "gradient_accumulation_steps": 1}
    b = log(tmp_path / "b", {0: 4.0, 100: 2.8, 400: 1.0}, ms=200, flops_per_token=3000, **split)
    rows, headline = compared(a, b)
    expected = {
        "batch_size": ["4", "8"],
        "gradient_accumulation_steps": ["2", "1"],
        "tokens per step": ["64", "64"],
        "ms per step, median": ["100", "200"],
        "tokens/s": ["640", "320"],
        "MFU": ["16.00%", "24.00%"],
        "MFU as nanoGPT prints it (of 312 TFLOP/s)": ["0.00%", "0.00%"],
        "lowest val loss": ["2.0000", "1.0000"],
        "perplexity there": ["7.39", "2.72"],
        # B between 100 and 400 steps of 64 tokens is linear in the logarithm: halfway at 200
        "val loss after 12,800 tokens": ["2.0000", "1.9000"],
    }
    assert {name: rows[name] for name in expected} == expected
    assert headline == "The val loss after 12,800 tokens, less that of A: B -0.1000 ± ?"


def test_a_loss_that_is_not_a_number_has_a_note_and_such_a_run_is_not_compared_at_an_earlier_step(tmp_path):
    a = log(tmp_path / "a", CURVE, peak_flops=1e5)
    b = log(tmp_path / "b", CURVE)
    rewrite(a, lambda e: {"loss": None} if e["event"] == "iter" and e["iter"] > 150 else {})
    rewrite(b, lambda e: {"val_loss": None} if e["event"] == "eval" and e["iter"] == 200 else {})
    found = compare(read_runs([a, b]))
    assert rows_of(found)["MFU"] == ["640.00% (above the peak: wrong)", "16.00%"]
    assert found.headline == "The losses after equal training are not known"
    assert found.lines == [f"{run}: its loss is not a number at step {n}." for run, n in (("A: a", 151), ("B: b", 200))]


def test_what_changed_names_initial_weights_and_no_setting_that_does_not_change_learning(tmp_path):
    a = log(tmp_path / "a", CURVE, settings={"init_from": "scratch"})
    b = log(tmp_path / "b", CURVE, settings={"init_from": "out-a"}, residual_dtype="bfloat16")
    resumed = {"init_from": "resume", "resume_changed": True}
    with open(Path(b, "log.jsonl"), "a") as file:
        file.write("\n" + json.dumps({"event": "start", "iter": 200, "settings": resumed}))
    changed = compare(read_runs([a, b])).rows["What changed"]
    assert ["init_from", "scratch", "out-a"] in changed  # of the beginning, not of the resumed part
    assert "resume_changed" not in [row[0] for row in changed]


# ---- which losses compare ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({}, []),
        ({"digest": "abd"}, ["windows", "A 10 windows with digest abc", "B 10 windows with digest abd"]),
        ({"digest": None}, ["windows", "A 10 windows", "B not known"]),
        ({"first_digest": "abd"}, ["windows", "B 10 windows with digest abd, then 10 windows with digest abc"]),
        ({"val_sha256": "bad"}, ["data", "A f00", "B bad"]),
        ({"tokenizer": "bpe"}, ["tokenizers", "A char", "B bpe"]),
    ],
)
def test_losses_are_compared_only_if_all_evaluations_read_the_same_windows(tmp_path, changed, named):
    a = log(tmp_path / "a", CURVE)
    b = log(tmp_path / "b", {0: 1.0, 100: 0.9, 200: 0.8}, **changed)  # a finetuned model
    found = compare(read_runs([a, b]))
    assert found.headline.startswith("The losses are not comparable") == bool(named)
    assert ("less that of A: B" in found.headline) == (not named)
    assert [line for line in found.lines if "--eval_only=True" in line] == found.lines[: bool(named)]
    for part in named:
        assert part in found.headline


def test_runs_of_unknown_data_do_not_compare_if_untrained_models_differ(tmp_path):
    a = log(tmp_path / "a", CURVE, val_sha256=None)
    b = log(tmp_path / "b", {0: 10.8, 100: 3.0, 200: 1.5}, val_sha256=None)
    assert_one_line(compared(a, b)[1], "not comparable", "step 0", "A 4.00", "B 10.80")


# ---- repeats, and the amount at which losses are compared ----------------------------------------------------


def seeds(folder: Path, n: int, last: float, **changed: Any) -> list[str]:
    """Write logs of runs that differ in their seed and by 0.01 in their losses."""
    curves = [{0: 4.0, 100: 3.0, 200: last + i / 100} for i in range(n)]
    return [log(folder / f"{i}", val, seed=i, **changed) for i, val in enumerate(curves)]


def test_repeats_are_compared_with_their_interval(tmp_path):
    a = seeds(tmp_path / "a", 3, 2.5)
    b = seeds(tmp_path / "b", 3, 2.3, n_layer=3)
    assert compared(*a)[1] == "The runs differ in nothing but their seed (A+B+C: repeats, seeds 0, 1, 2)"
    rows, headline = compared(*a, *b)
    assert rows["lowest val loss"][0] == f"2.5100 ± {4.303 * 0.01 / 3**0.5:.4f} (n=3)"
    # 2.776 x sqrt(2/3) x 0.01
    assert headline == "The val loss after 12,800 tokens, less that of A+B+C: D+E+F -0.2000 ± 0.0227"


def test_steps_of_unequal_tokens_are_compared_at_equal_tokens(tmp_path):
    a = seeds(tmp_path / "a", 2, 2.5, max_iters=800)
    b = [log(tmp_path / f"b{i}", {0: 4.0, 100: 2.9, 200: 2.4}, batch_size=8, seed=i) for i in range(2)]
    # B has read as much as A after 100 steps. It is better after 200 steps of twice the tokens, which do not count.
    assert_one_line(compared(*a, *b)[1], "after 12,800 tokens, less that of A+B: C+D +0.3950 ± ")


def test_schedules_of_unequal_length_are_not_compared_and_those_of_equal_minutes_are_repeats(tmp_path):
    a = seeds(tmp_path / "a", 2, 2.5, max_iters=200)
    b = seeds(tmp_path / "b", 2, 2.5, max_iters=400)
    rows, headline = compared(*a, *b)
    assert rows["max_iters"] == ["200", "400"]
    assert_one_line(headline, "not compared", "unequal tokens")
    minutes = [log(tmp_path / f"{i}", CURVE, seed=i, max_iters=300 + i, settings={"max_minutes": 3.0}) for i in (1, 2)]
    assert "differ in nothing but their seed" in compared(*minutes)[1]


# ---- how often a winner is wrong -----------------------------------------------------------------------------


def has_winner(a: list[float], b: list[float]) -> bool:
    """Return whether the interval of runs with these last losses, of two settings, leaves out zero."""
    runs: list[Run] = []
    for decay, of_group in ((0.1, a), (0.2, b)):
        for loss in of_group:
            evals = [{"iter": i, "val_loss": y, "tokens": i} for i, y in ((0, 4.0), (100, loss))]
            runs.append(Run(f"{len(runs)}", {"weight_decay": decay, "seed": len(runs)}, {"device": "cpu"}, [], evals))
    gap, half = re.findall(r"[-+](\d\.\d+) ± (\S+)", compare(runs).headline)[0]
    return half != "?" and float(gap) > float(half)


def test_fewer_than_5_percent_of_groups_of_equal_settings_have_a_winner_and_a_planted_difference_has():
    draw = random.Random(1)
    losses = [draw.gauss(1.47, 0.007) for _ in range(31)]
    for n in (1, 2, 4):
        drawn = [draw.sample(losses, 2 * n) for _ in range(100)]
        assert sum(has_winner(x[:n], x[n:]) for x in drawn) < 5
    assert has_winner(losses[:8], [loss - 0.03 for loss in losses[8:16]])


# ---- the script ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not REAL.exists(), reason="the log of a real nanoGPT run is not at hand")
def test_script_compares_a_real_log_of_nanogpt_and_writes_a_page(tmp_path, script):
    a = log(tmp_path / "a", CURVE)
    file = tmp_path / "r.html"
    done = script("bench/compare.py", a, REAL, "--html", file)
    assert done.code == 0, done.err
    assert re.search(r"MFU as nanoGPT prints it \(of 312 TFLOP/s\) \|[^|]*\| 12.9\d% \|", done.out)
    assert done.out.startswith("The losses are not comparable")
    assert "B: fineweb_33m_rtx4070" in file.read_text()


def test_what_is_wrong_is_one_line(script, tmp_path):
    run = log(tmp_path / "a", CURVE)
    for arguments in (["/nowhere/at-all"], ["pyproject.toml"], [run, "--html", "pyproject.toml/a.html"]):
        done = script("bench/compare.py", *arguments)
        assert done.code != 0
        assert_one_line(done.err, arguments[-1])
