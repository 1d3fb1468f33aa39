"""Logs of runs as they are found, compare.py's figures worked out by hand, and report.py's
pages.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import assert_one_line, tiny
from logs import TIMES, log, nanogpt, rewrite

import train
from bench.analysis import page
from bench.analysis.comparison import Comparison, compare
from bench.analysis.logs import Run, read_run, read_runs
from bench.analysis.table import Group
from deskgpt.logger import read_events

CURVE = {0: 4.0, 100: 3.0, 200: 2.5}
EVIL = "</script><script>document.title='x'</script><img src=//example.com/a.png onerror=alert(1)>"
OWN = {"weight_norm/0": 3.25, EVIL: -7.0}  # numbers under names of a run's own


def printed(path: Path, *lines: str) -> Run:
    """Return the run of which a program printed this."""
    path.write_text("\n".join(lines))
    return read_run(str(path))


def test_evaluation_is_taken_out_of_nanogpts_times_and_mfu(tmp_path):
    about = ("number of parameters: 1.50M", "tokens per iteration will be: 1,000")
    run = printed(tmp_path / "log.txt", *about, nanogpt(TIMES, (0, 40, 80), peak_share_ms=200.0))
    assert run.tokens_per_step == 1000
    assert run.step_ms == [1000, 1010, 990, 1000, 1000, 1000, 1000]
    assert run.start["nanogpt_mfu"] == pytest.approx(0.2, rel=1e-3)  # printed last: 15.9%
    # 0.2 of 312 TFLOP/s for a second, and 1000 tokens
    assert run.flops_per_token == pytest.approx(0.2 * 312e12 / 1000, rel=1e-3)
    assert run.start["parameters"] == 1.5e6
    assert run.evals[1]["train_s"] == 40.0


def test_flops_of_a_nanogpt_run_on_several_gpus_are_those_of_all(tmp_path):
    of_8 = 854.8e6 * 491520 / 8 / 0.25 / 312e12  # the MFU of GPT-2 in steps of 250 ms
    about = ("tokens per iteration will be: 491,520", "number of parameters: 123.59M")
    steps = [
        f"iter {i}: loss 3.0, time 250.00ms, mfu {100 * of_8:.2f}%" for i in range(10, 200, 10)
    ]
    run = printed(tmp_path / "log.txt", *about, *steps)
    assert run.flops_per_token == pytest.approx(854.8e6, rel=1e-3)
    assert_one_line(*run.notes, "8 GPUs")


def test_settings_that_nanogpt_prints_are_read(tmp_path):
    lines = [
        "Overriding config with config/train_x.py:",
        "# a comment",
        "learning_rate = 1e-3 # a reason",
    ]
    lines += [
        "wandb_project='x'",
        "gradient_accumulation_steps = 5 * 8",
        "mine = 3",
        "Overriding: max_iters = 200",
    ]
    lines += [
        "Overriding: compile = False",
        "using fused AdamW: True",
        "step 0: train loss 4.0, val loss 4.0",
    ]
    known = {"learning_rate": 1e-3, "wandb_project": "x", "max_iters": 200, "compile": False}
    # What is not a plain value, a setting or before the first step is not known.
    assert printed(tmp_path / "log.txt", *lines, "n_layer = 3").settings == known


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])  # PowerShell writes the latter
def test_damaged_printed_logs_are_read_as_far_as_they_go(tmp_path, encoding):
    text = nanogpt(TIMES, (0, 40, 80), peak_share_ms=200.0)
    lines = [f"| 12:00 {line}" for line in text.splitlines()]
    lines.insert(5, "UserWarning: iter is deprecated\n  warnings.warn(")
    lines.insert(9, "\ufffd\x00%%% step 7")
    lines.append("iter 95: loss 3.1, ti")  # cut off
    (tmp_path / "damaged.txt").write_bytes("\r\n".join(lines).encode(encoding) + b"\xff\xfe")
    a = printed(tmp_path / "clean.txt", text)
    b = read_run(str(tmp_path / "damaged.txt"))
    assert (a.iters, a.evals, a.notes) == (b.iters, b.evals, b.notes)


def test_a_printed_log_that_continues_after_a_restart_counts_each_step_once(tmp_path):
    first, second = dict(list(TIMES.items())[:7]), dict(list(TIMES.items())[4:])
    run = printed(
        tmp_path / "log.txt", nanogpt(first, (0, 40), 200.0), nanogpt(second, (40, 80), 200.0)
    )
    assert [e["iter"] for e in run.iters] == list(TIMES)
    assert [e["iter"] for e in run.evals] == [0, 40, 80]
    assert_one_line(*run.notes, "begins 2 times")


@pytest.mark.parametrize("kind", ["start", "rewind"])
def test_a_resumed_or_rewound_run_counts_each_step_once_and_the_time_of_all_parts(tmp_path, kind):
    file = Path(log(tmp_path / "a", {0: 4.0, 10: 3.0, 20: 2.5}), "log.jsonl")
    lines = file.read_text().splitlines()
    start, *later = [e for e in read_events(file) if e["event"] == "start" or e["iter"] >= 10]
    before_s = 1.0 if kind == "start" else 0.0  # a resumed run counts its seconds from 0
    again = [start | {"event": kind, "iter": 10}]
    again += [e | {"train_s": e.get("train_s", 1) - before_s} for e in later]
    run = printed(file, *lines[:16], '{"event": "iter", "it', *map(json.dumps, again))
    assert [e["iter"] for e in run.iters] == list(range(20))
    assert [e["iter"] for e in run.evals] == [0, 10, 20]
    assert run.iters[-1]["train_s"] == pytest.approx(2.0)
    assert sum(e["eval_s"] for e in run.evals) == 6.0  # of both parts
    assert_one_line(*run.notes, "1 unreadable")


# ---- comparisons ---------------------------------------------------------------------------------


def rows_of(found: Comparison) -> dict[str, list[str]]:
    """Return {label: cells} of all tables."""
    return {row[0]: row[1:] for _, *of_table in found.tables().values() for row in of_table}


def test_every_column_is_what_it_is_by_hand(tmp_path):
    a = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.0}, ms=100)
    split: dict[str, Any] = {"batch_size": 8, "gradient_accumulation_steps": 1}
    b = log(tmp_path / "b", {0: 4.0, 100: 2.8, 400: 1.0}, ms=200, flops_per_token=3000, **split)
    found = compare(read_runs([a, b]))
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
    assert rows_of(found).items() >= expected.items()
    assert found.headline == "The val loss after 12,800 tokens, less that of A: B -0.1000 ± ?"


def test_a_loss_that_is_not_a_number_has_a_note_and_such_a_run_is_not_compared_at_an_earlier_step(
    tmp_path,
):
    a = log(tmp_path / "a", CURVE, peak_flops=1e5)
    b = log(tmp_path / "b", CURVE)
    rewrite(a, lambda e: {"loss": None} if e["event"] == "iter" and e["iter"] > 150 else {})
    rewrite(b, lambda e: {"val_loss": None} if e["event"] == "eval" and e["iter"] == 200 else {})
    found = compare(read_runs([a, b]))
    assert rows_of(found)["MFU"] == ["640.00% (above the peak: wrong)", "16.00%"]
    assert found.headline == "The losses after equal training are not known"
    assert found.lines == [
        f"{run}: its loss is not a number at step {n}." for run, n in (("A: a", 151), ("B: b", 200))
    ]


def test_what_changed_names_initial_weights_and_no_setting_that_does_not_change_learning(tmp_path):
    a = log(tmp_path / "a", CURVE, settings={"init_from": "scratch"})
    b = log(tmp_path / "b", CURVE, settings={"init_from": "out-a"}, residual_dtype="bfloat16")
    resumed = {"init_from": "resume", "resume_changed": True}
    with open(Path(b, "log.jsonl"), "a") as file:
        file.write("\n" + json.dumps({"event": "start", "iter": 200, "settings": resumed}))
    changed = compare(read_runs([a, b])).rows["What changed"]
    assert ["init_from", "scratch", "out-a"] in changed  # of the beginning, not of the resumed part
    assert "resume_changed" not in [row[0] for row in changed]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({}, []),
        (
            {"digest": "abd"},
            ["windows", "A 10 windows with digest abc", "B 10 windows with digest abd"],
        ),
        ({"digest": None}, ["windows", "A 10 windows", "B not known"]),
        (
            {"first_digest": "abd"},
            ["windows", "B 10 windows with digest abd, then 10 windows with digest abc"],
        ),
        ({"val_sha256": "bad"}, ["data", "A f00", "B bad"]),
        ({"tokenizer": "bpe"}, ["tokenizers", "A char", "B bpe"]),
    ],
)
def test_losses_are_compared_only_if_all_evaluations_read_the_same_windows(
    tmp_path, changed, named
):
    a = log(tmp_path / "a", CURVE)
    b = log(tmp_path / "b", {0: 1.0, 100: 0.9, 200: 0.8}, **changed)  # a finetuned model
    found = compare(read_runs([a, b]))
    assert found.headline.startswith("The losses are not comparable") == bool(named)
    assert ("less that of A: B" in found.headline) == (not named)
    assert [line for line in found.lines if "--eval_only=True" in line] == found.lines[
        : bool(named)
    ]
    for part in named:
        assert part in found.headline


def test_runs_of_unknown_data_do_not_compare_if_untrained_models_differ(tmp_path):
    a = log(tmp_path / "a", CURVE, val_sha256=None)
    b = log(tmp_path / "b", {0: 10.8, 100: 3.0, 200: 1.5}, val_sha256=None)
    assert_one_line(
        compare(read_runs([a, b])).headline, "not comparable", "step 0", "A 4.00", "B 10.80"
    )


def seeds(folder: Path, n: int, last: float, **changed: Any) -> list[str]:
    """Write logs of runs that differ in their seed and by 0.01 in their losses."""
    curves = [{0: 4.0, 100: 3.0, 200: last + i / 100} for i in range(n)]
    return [log(folder / f"{i}", val, seed=i, **changed) for i, val in enumerate(curves)]


def test_repeats_are_compared_with_their_interval(tmp_path):
    a = seeds(tmp_path / "a", 3, 2.5)
    b = seeds(tmp_path / "b", 3, 2.3, n_layer=3)
    alone = "The runs differ in nothing but their seed (A+B+C: repeats, seeds 0, 1, 2)"
    assert compare(read_runs(a)).headline == alone
    found = compare(read_runs(a + b))
    assert rows_of(found)["lowest val loss"][0] == f"2.5100 ± {4.303 * 0.01 / 3**0.5:.4f} (n=3)"
    # 2.776 x sqrt(2/3) x 0.01
    assert (
        found.headline
        == "The val loss after 12,800 tokens, less that of A+B+C: D+E+F -0.2000 ± 0.0227"
    )


def test_steps_of_unequal_tokens_are_compared_at_equal_tokens(tmp_path):
    a = seeds(tmp_path / "a", 2, 2.5, max_iters=800)
    b = [
        log(tmp_path / f"b{i}", {0: 4.0, 100: 2.9, 200: 2.4}, batch_size=8, seed=i)
        for i in range(2)
    ]
    # B has read as much as A after 100 steps. It is better after 200 steps of twice the tokens,
    # which do not count.
    assert_one_line(
        compare(read_runs(a + b)).headline, "after 12,800 tokens, less that of A+B: C+D +0.3950 ± "
    )


def test_schedules_of_unequal_length_are_not_compared_and_those_of_equal_minutes_are_repeats(
    tmp_path,
):
    runs = [path for n in (200, 400) for path in seeds(tmp_path / f"{n}", 2, 2.5, max_iters=n)]
    found = compare(read_runs(runs))
    assert rows_of(found)["max_iters"] == ["200", "400"]
    assert_one_line(found.headline, "not compared", "unequal tokens")
    minutes = [
        log(tmp_path / f"{i}", CURVE, seed=i, max_iters=300 + i, settings={"max_minutes": 3.0})
        for i in (1, 2)
    ]
    assert "differ in nothing but their seed" in compare(read_runs(minutes)).headline


# ---- pages ---------------------------------------------------------------------------------------


def made_up(name: str) -> Run:
    iters: list[dict[str, Any]] = [
        {"iter": i, "loss": 4 - i / 3000, "lr": 1e-3} | OWN for i in range(3000)
    ]
    evals: list[dict[str, Any]] = [
        {"iter": i * 500, "train_loss": 4.0, "val_loss": 4 - i / 9} for i in range(7)
    ]
    return Run(name, {"note": EVIL}, {}, iters, evals, notes=[f"odd {EVIL}"])


@pytest.fixture(scope="module")
def real(chars, tmp_path_factory) -> Path:
    out_dir = tmp_path_factory.mktemp("run") / "out"
    train.main(tiny(chars, out_dir, eval_iters=8))
    return out_dir


def test_page_refers_to_nothing_outside_of_it_and_names_are_text(real):
    runs = [read_run(str(real)), made_up(EVIL)]
    runs[1].samples = [{"iter": i, "texts": [f"text {i} {EVIL}"]} for i in (0, 100)]
    html = page.page(
        Comparison(runs, EVIL, [EVIL], [Group([EVIL], runs)] * 9, {"Wide": [[EVIL] * 10]})
    )
    assert html.count(page.plotly_js()) == 1
    assert len(re.findall(r'<figure\b.*?class="plotly-graph-div"', html, re.S)) == 6
    rest = html.replace(page.plotly_js(), "")
    assert not re.search(r"<[a-z][^>]*\s(src|href|srcset|action|onerror)=", rest)
    assert "<img" not in rest
    assert "default-src 'none'" in html
    assert len(html) < 6e6
    assert html.index("step 100: text 100") < html.index("step 0: text 0")  # the last ones first


def test_report_of_a_run_has_its_figures_and_replaces_a_link_of_its_name(real, script):
    precious = real.parent / "precious"
    precious.write_text("mine")
    (real / "report.html").symlink_to(precious)  # as a folder from elsewhere may have
    done = script("bench/report.py", real)
    assert (done.code, done.err, done.out.strip()) == (0, "", str(real / "report.html"))
    assert precious.read_text() == "mine"
    text = (real / "report.html").read_text()
    best = min(e["val_loss"] for e in read_run(str(real)).evals)
    assert f"<h1>The lowest val loss is {best:.4f}, at step 6 of 6</h1>" in text
    assert re.search(r"MFU</th><td>[\d.]+%</td>", text)


def test_what_is_wrong_is_one_line(script, tmp_path):
    run = log(tmp_path / "a", CURVE)
    with open(tmp_path / "large.txt", "wb") as file:
        file.truncate(1 << 40)  # without taking room on the disk
    compared = (
        ["/nowhere"],
        ["pyproject.toml"],
        [tmp_path / "large.txt"],
        [run, "--html", "pyproject.toml/a.html"],
    )
    wrong = [("bench/compare.py", *words) for words in compared]
    wrong += [("bench/report.py", f"{run}/{name}") for name in ("nowhere", "log.jsonl")]
    for words in wrong:
        done = script(*words)
        assert done.code != 0
        assert_one_line(done.err, "error: ", Path(words[-1]).name)
