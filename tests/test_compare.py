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
from bench.analysis.comparison import Comparison, Group, compare
from bench.analysis.logs import Run, read_run, read_runs
from deskgpt.logger import read_events

CURVE = {0: 4.0, 100: 3.0, 200: 2.5}
EVIL = "</script><script>document.title='x'</script><img src=//example.com/a.png onerror=alert(1)>"
OWN = {"weight_norm/0": 3.25, EVIL: -7.0}  # numbers under names of a run's own


def printed(path: Path, *lines: str) -> Run:
    """Return the run of which a program printed this."""
    path.write_text("\n".join(lines))
    return read_run(str(path))


def test_steps_of_nanogpt_with_an_evaluation_in_their_time_do_not_count_and_no_decay_is_made_up(
    tmp_path,
):
    about = ("max_iters = 90", "tokens per iteration will be: 1,000")
    run = printed(tmp_path / "log.txt", *about, nanogpt(TIMES, (0, 40, 80)))
    assert run.tokens_per_s == 1000.0
    assert [e["tokens"] for e in run.evals] == [0, 40_000, 80_000]
    assert run.schedule_tokens is None  # nanoGPT's lr_decay_iters is 600,000, whatever max_iters is


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


def test_log_that_powershell_has_written_and_that_is_cut_off_is_read_as_far_as_it_goes(tmp_path):
    text = nanogpt(TIMES, (0, 40, 80))
    a = printed(tmp_path / "clean.txt", text)
    (tmp_path / "utf-16.txt").write_bytes(f"{text}iter 95: loss 3.1, ti".encode("utf-16") + b"\xff")
    b = read_run(str(tmp_path / "utf-16.txt"))
    assert (a.iters, a.evals, a.notes) == (b.iters, b.evals, b.notes)


def test_a_resumed_run_counts_each_step_once_and_the_time_of_all_parts(tmp_path):
    file = Path(log(tmp_path / "a", {0: 4.0, 10: 3.0, 20: 2.5}), "log.jsonl")
    lines = file.read_text().splitlines()
    start, *later = [e for e in read_events(file) if e["event"] == "start" or e["iter"] >= 10]
    again = [start | {"iter": 10}]
    again += [e | {"train_s": e.get("train_s", 1) - 1.0} for e in later]  # its seconds begin at 0
    run = printed(file, *lines[:16], '{"event": "iter", "it', *map(json.dumps, again))
    assert [e["iter"] for e in run.iters] == list(range(20))
    assert [e["iter"] for e in run.evals] == [0, 10, 20]
    assert run.iters[-1]["train_s"] == pytest.approx(2.0)
    assert_one_line(*run.notes, "1 unreadable")


# ---- comparisons ---------------------------------------------------------------------------------


def rows_of(found: Comparison) -> dict[str, list[str]]:
    """Return {label: cells} of all tables."""
    return {row[0]: row[1:] for _, *of_table in found.tables().values() for row in of_table}


def test_every_column_is_what_it_is_by_hand(tmp_path):
    a = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.0}, ms=100)
    split: dict[str, Any] = {"batch_size": 8, "gradient_accumulation_steps": 1}
    b = log(
        tmp_path / "b",
        {0: 4.0, 100: 2.8, 200: 1.9, 400: 1.0},
        ms=200,
        flops_per_token=3000,
        **split,
    )
    found = compare(read_runs([a, b]))
    expected = {
        "batch_size": ["4", "8"],
        "gradient_accumulation_steps": ["2", "1"],
        "tokens per step": ["64", "64"],
        "ms per step, median": ["100", "200"],
        "tokens/s": ["640", "320"],
        "MFU": ["16.00%", "24.00%"],
        "lowest val loss": ["2.0000", "1.0000"],
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
    assert_one_line(found.headline, "The losses after equal training are not known")
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


def test_printed_logs_of_other_data_do_not_compare_and_the_data_are_what_changed(tmp_path):
    paths = []
    for name in ("openwebtext", "fineweb"):
        paths.append(str(tmp_path / f"{name}.txt"))
        printed(
            Path(paths[-1]),
            f"dataset = '{name}'",
            "tokens per iteration will be: 10",
            nanogpt(TIMES, (0, 40)),
        )
    found = compare(read_runs(paths))
    assert_one_line(
        found.headline, "not comparable", "validation data", "A openwebtext", "B fineweb"
    )
    assert ["dataset", "openwebtext", "fineweb"] in found.rows["What changed"]


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
    a = seeds(tmp_path / "a", 2, 2.5, max_iters=800)  # evaluated after 12,800 tokens, and before
    b = [
        log(tmp_path / f"b{i}", {0: 4.0, 100: 2.9, 200: 2.4}, batch_size=8, seed=i)
        for i in range(2)
    ]
    # B has read as much as A after 100 steps. It is better after 200 steps of twice the tokens,
    # which do not count.
    assert_one_line(
        compare(read_runs(a + b)).headline, "after 12,800 tokens, less that of A+B: C+D +0.3950 ± "
    )


def test_a_loss_between_two_evaluations_is_not_made_up(tmp_path):
    a = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.0})
    b = log(tmp_path / "b", {0: 4.0, 100: 2.9, 150: 2.1}, n_layer=3)
    c = log(tmp_path / "c", {0: 4.0, 150: 2.1}, n_layer=3)
    assert_one_line(compare(read_runs([a, b])).headline, "after 6,400 tokens", "B -0.1000")
    assert_one_line(
        compare(read_runs([a, c])).headline, "not known", "not evaluated after equal tokens"
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
    runs[0].samples = runs[1].samples = [
        {"iter": i, "texts": [f"text {i} {EVIL}"]} for i in (0, 100)
    ]
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
    assert f"<pre>{runs[0].name}, step 0: text 0" in html  # a text says whose it is


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
