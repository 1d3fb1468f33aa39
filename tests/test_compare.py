"""compare.py: figures worked out by hand, which losses compare, what its verdict may say, and how often it is wrong."""

from __future__ import annotations

import itertools
import math
import random
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from conftest import assert_one_line, tiny
from logs import log, rewrite

import train
from bench.analysis.logs import DEFAULTS, Run, read_runs
from bench.analysis.verdict import compare

NO_CAUSE = "No cause can be named"
CAUSE = "it is the cause of"
OPEN = "Two seeds of each settle whether it changes the loss"
REAL = Path(__file__).resolve().parents[2] / "shared" / "data" / "nanogpt_logs" / "fineweb_33m_rtx4070.txt"


def compared(*paths: str) -> tuple[dict[str, list[str]], str, str]:
    """({row: cells} of all tables, the verdict, the headline)"""
    found = compare(read_runs([*paths]))
    assert len(found.lines) <= 8
    rows = {row[0]: row[1:] for _, *of_table in found.tables().values() for row in of_table}
    return rows, "\n".join(found.lines), found.headline


# ---- figures -------------------------------------------------------------------------------------------------


def test_every_column_is_what_it_is_by_hand(tmp_path):
    a = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.0}, ms=100)
    split = {"batch_size": 8, "gradient_accumulation_steps": 1}
    b = log(tmp_path / "b", {0: 4.0, 100: 2.8, 400: 1.0}, ms=200, flops_per_token=3000, **split)
    rows = compared(a, b)[0]
    expected = {
        "batch_size": ["4", "8"],
        "gradient_accumulation_steps": ["2", "1"],
        "tokens per step": ["64", "64"],
        "ms per step, median": ["100", "200"],
        "MFU": ["16.00%", "24.00%"],
        "MFU as nanoGPT prints it (of 312 TFLOP/s)": ["0.00%", "0.00%"],
        "evaluation": ["6.0s", "6.0s"],
        "lowest val loss": ["2.0000", "1.0000"],
        "perplexity there": [f"{math.e**2:.2f}", f"{math.e:.2f}"],
        # B between 100 and 400 steps is linear in the logarithm: halfway at 200
        "val loss at equal steps (200)": ["2.0000", "1.9000"],
        "val loss at equal tokens (12,800)": ["2.0000", "1.9000"],
        "val loss at equal time (20.0s)": ["2.0000", "2.8000"],  # B's 100th step
        # 1.28e7 FLOPs are 200 steps of A and 66.7 of B, before its first evaluation
        "val loss at equal FLOPs (1.28e+07)": ["2.0000", "n/a"],
    }
    assert {name: rows[name][:2] for name in expected} == expected
    assert rows["tokens/s"] == ["640", "320", "A, 2.00 x B"]


# ---- which losses compare ------------------------------------------------------------------------------------


def with_windows(path: str, **fields: Any) -> None:
    rewrite(path, lambda e: fields if e["event"] == "eval" else {})


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"eval_digest": "abc"}, []),
        ({"eval_digest": "abd"}, ["windows", "A 10 windows with digest abc", "B 10 windows with digest abd"]),
        ({"eval_digest": None}, ["windows", "A 10 windows", "B eval_tokens=80"]),  # not known of one side
        ({"val_sha256": "bad"}, ["data", "A f00", "B bad"]),
        ({"eval_tokens": 800}, ["windows", "A eval_tokens=80, block_size=8", "B eval_tokens=800"]),
        ({"start": 10.8}, ["step 0", "A 4.00", "B 10.80"]),
    ],
)
def test_losses_are_ranked_only_where_the_evaluations_are_the_same(tmp_path, changed, named):
    unknown: dict[str, Any] = {"val_sha256": None} if "start" in changed else {}
    a = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.5}, **unknown)
    b = log(tmp_path / "b", {0: changed.pop("start", 4.0), 100: 3.0, 200: 1.5}, **changed | unknown)
    if "eval_digest" in changed:
        with_windows(a, eval_windows=10, eval_digest="abc")
        with_windows(b, eval_windows=10, eval_digest=changed["eval_digest"])
    rows, text, headline = compared(a, b)
    leads = [cells[2] for label, cells in rows.items() if label.startswith("val loss at equal")]
    assert [lead == "not comparable" for lead in leads] == [bool(named)] * 4
    assert headline.startswith("The losses are not comparable") == ("--eval_only=True" in text) == bool(named)
    for part in named:
        assert part in headline
    assert CAUSE not in text


@pytest.mark.parametrize("changed", [{}, {"val_text": "abd"}, {"bytes_per_token": None}, {"val_bytes": 2500}])
def test_other_tokens_are_compared_in_bits_per_byte_at_equal_text_where_it_is_whole(tmp_path, changed):
    text_facts: dict[str, Any] = {"val_text": "abc", "val_text_bytes": 5000, "val_bytes": 4900}
    of_b = text_facts | {"tokenizer": "bpe", "train_tokens": 4500, "val_sha256": "bad", "bytes_per_token": 2.0}
    a = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.0}, bytes_per_token=1.0, **text_facts)
    rows, text, headline = compared(a, log(tmp_path / "b", {0: 3.5, 100: 3.2, 200: 3.0}, **of_b | changed))
    assert headline.startswith("The losses are not comparable") == bool(changed)
    if changed:
        assert rows["val loss at equal steps (200)"][2] == "not comparable"
        return
    # 64 tokens a step: A's 200 steps are 12,800 bytes, which B has read after 100 of its own
    found = rows["bits per byte at equal text (12,800 bytes)"]
    assert found[:2] == [f"{2 / math.log(2):.4f}", f"{1.6 / math.log(2):.4f}"]
    assert "noise of the seeds not known" in found[2]
    assert "Only tokenizer char -> bpe differs" in text
    assert not any(label.startswith(("val loss at equal", "bits per byte at equal steps")) for label in rows)


# ---- noise and causes ----------------------------------------------------------------------------------------


def test_losses_of_single_runs_are_not_ranked_without_a_measure_of_the_seeds(tmp_path):
    a = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.5}, se=1e-6)
    b = log(tmp_path / "b", {0: 4.0, 100: 3.0, 200: 2.0}, se=1e-6, n_layer=3)
    for path, offset in ((a, 0.5), (b, 0.0)):
        means = [2.0 + offset + wave + offset * wave / 10 for wave in (-0.1, 0.0, 0.1) * 3]
        with_windows(path, eval_windows=9, eval_digest="x", val_batches=means)
    rows, text, headline = compared(a, b)
    found = rows["val loss at equal steps (200)"][2]
    # differences of the batches are 0.495, 0.5 and 0.505, three times: 2.306 x sqrt(6 x 0.005^2 / 8) / 3
    assert found == "B lower than A by 0.5000, noise of the seeds not known (±0.0033 of the text alone, n=9 batches)"
    assert headline.startswith("Which run learns more is not known: two seeds of each settle it.")
    assert CAUSE not in text
    assert OPEN in text


def test_cause_of_repeated_runs_is_named_with_its_interval_and_n(tmp_path):
    a = [log(tmp_path / f"a{i}", {0: 4.0, 100: 3.0, 200: 2.5 + i / 100}, seed=i) for i in range(3)]
    b = [log(tmp_path / f"b{i}", {0: 4.0, 100: 3.0, 200: 2.3 + i / 100}, 200, seed=i, n_layer=3) for i in range(3)]
    assert compared(*a)[2] == "All runs have the same settings (A+B+C: repeats, seeds 0, 1, 2)."
    rows, text, headline = compared(*a, *b)
    lead = "D+E+F lower than A+B+C by 0.2000 ± 0.0227 (n=3 and 3)"  # 2.776 x sqrt(2/3) x 0.01
    assert rows["val loss at equal steps (200)"][2] == lead
    assert rows["val loss there"][0] == f"2.5100 ± {4.303 * 0.01 / math.sqrt(3):.4f} (n=3)"
    assert f"Only n_layer 2 -> 3 differs: {CAUSE} the difference in loss ({lead})" in text
    assert text.count(CAUSE) == 1  # not of the speed, which drifts with other work
    assert "What made a run faster is not known" in text
    assert headline.startswith("D+E+F has the lower val loss at equal steps.")
    assert OPEN not in text


def named_cause(losses: dict[float, list[float]]) -> bool:
    """Whether a cause is named of runs with these last val losses by their weight decay, each with its own seed."""
    settings = DEFAULTS | {"device": "cpu", "dtype": "float32"}
    start = {"compiled": False, "val_sha256": "x", "device": "cpu"}
    unknown: dict[str, Any] = dict.fromkeys(("train_loss", "val_se", "val_bpb", "eval_s"))
    runs: list[Run] = []
    for decay, of_arm in losses.items():
        for loss in of_arm:
            evals = [
                unknown | {"iter": i, "val_loss": y, "tokens": i, "train_s": i} for i, y in ((0, 4.0), (100, loss))
            ]
            runs.append(Run(f"{len(runs)}", settings | {"weight_decay": decay, "seed": len(runs)}, start, [], evals))
    return CAUSE in str(compare(runs).lines)


def test_of_31_seeds_of_one_config_fewer_than_5_percent_have_a_cause_and_a_planted_difference_has():
    draw = random.Random(1)
    losses = [draw.gauss(1.47, 0.007) for _ in range(31)]
    pairs = draw.sample([*itertools.combinations(losses, 2)], 100)
    assert not any(named_cause({0.1: [a], 0.1001: [b]}) for a, b in pairs)
    for n in (2, 4):
        drawn = [draw.sample(losses, 2 * n) for _ in range(100)]
        assert sum(named_cause({0.1: x[:n], 0.1001: x[n:]}) for x in drawn) < 5
    assert named_cause({0.1: losses[:8], 0.2: [loss - 0.03 for loss in losses[8:16]]})


def test_two_splits_of_one_step_are_the_same(tmp_path, chars):
    for name, batch_size in (("a", 4), ("b", 2)):
        settings = {"batch_size": batch_size, "gradient_accumulation_steps": 4 // batch_size, "eval_tokens": 256}
        train.main(tiny(chars, tmp_path / name, max_iters=3, **settings))
    rows, text, headline = compared(str(tmp_path / "a"), str(tmp_path / "b"))
    assert "same" in rows["val loss at equal steps (3)"][2]
    assert "0.0000" in rows["val loss at equal steps (3)"][2]
    assert headline.startswith("The losses are the same.")
    assert CAUSE not in text


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"git_commit": "def", "device": "another"}, [f"{NO_CAUSE}: 2 things", "git_commit abc -> def"]),
        (
            {"batch_size": 8, "gradient_accumulation_steps": 1, "learning_rate": 3e-3},
            [f"{NO_CAUSE}: 2 things", "batch_size 4 -> 8 with gradient_accumulation_steps 2 -> 1", "learning_rate"],
        ),
        ({"n_embd": 32, "n_head": 4}, ["Only n_embd 16 -> 32 with n_head 2 -> 4 differs", OPEN]),
        ({}, ["Nothing that is known changed"]),
    ],
)
def test_cause_is_named_only_of_one_change(tmp_path, changed, named):
    a = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.5})
    b = log(tmp_path / "b", {0: 4.0, 100: 3.0, 200: 2.3}, 200, **changed)
    text = compared(a, b)[1]
    for words in named:
        assert words in text
    assert CAUSE not in text


def test_the_question_that_would_settle_it_changes_one_thing_and_what_follows_from_it(tmp_path):
    ends = {"min_lr": 1e-4, "lr_decay_iters": 400}
    a = log(tmp_path / "a", {0: 4.0, 200: 2.5}, settings=ends)
    b = log(tmp_path / "b", {0: 4.0, 200: 2.4}, learning_rate=3e-4, n_layer=3, settings=ends | {"min_lr": 3e-5})
    (line,) = [line for line in compared(a, b)[1].splitlines() if "bench/ask.py" in line]
    words = shlex.split(line.removeprefix("$ "))
    assert words[:2] == ["python", "bench/ask.py"]
    assert {words[words.index(f"--{arm}") + 1] for arm in "bc"} == {"--n_layer=3", "--learning_rate=0.0003"}
    assert not [word for word in words if word.startswith(("--min_lr", "--lr_decay_iters", "--seed"))]


# ---- the script ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not REAL.exists(), reason="the log of a real nanoGPT run is not at hand")
def test_script_compares_a_real_log_of_nanogpt_and_writes_a_page(tmp_path, script):
    a = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.5})
    file = tmp_path / "r.html"
    done = script("bench/compare.py", a, REAL, "--html", file)
    assert done.code == 0, done.err
    assert re.search(r"MFU as nanoGPT prints it \(of 312 TFLOP/s\) \|[^|]*\| 12.9\d% \|", done.out)
    assert "The peak of A: a is measured." in done.out
    assert "\n    python train.py --init_from=resume --eval_only=True" in done.out  # a line to copy
    html = file.read_text()
    assert "B: fineweb_33m_rtx4070" in html
    assert "<pre>python train.py --init_from=resume" in html


def test_what_is_wrong_is_one_line(script, tmp_path):
    run = log(tmp_path / "a", {0: 4.0, 100: 3.0})
    for arguments in (["/nowhere/at-all"], ["pyproject.toml"], [run, "--html", "/nowhere/a.html"]):
        done = script("bench/compare.py", *arguments)
        assert done.code != 0
        assert_one_line(done.err, arguments[-1])
