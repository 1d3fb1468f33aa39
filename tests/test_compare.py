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
from plotly.offline import get_plotlyjs

import train
from bench.compare import Comparison, compare, page
from bench.logs import NANOGPT_PEAK, Run, read_run, read_runs
from deskgpt.logger import read_events

CURVE = {0: 4.0, 100: 3.0, 200: 2.5}
EVIL = "</script><script>document.title='x'</script><img src=//example.com/a.png onerror=alert(1)>"
EDIT = {"git_commit": "abc+changes"}
MINUTES: dict[str, Any] = {"settings": {"max_minutes": 3.0}}
OWN = {"weight_norm/0": 3.25, EVIL: -7.0}  # numbers under names of a run's own


def printed(path: Path, *lines: str) -> Run:
    """Return the run of which a program printed this."""
    path.write_text("\n".join(lines))
    return read_run(str(path))


def tokens_line(n: int = 1000) -> str:
    return f"tokens per iteration will be: {n:,}"


def test_settings_that_nanogpt_prints_are_read_and_the_others_are_its_defaults(tmp_path):
    lines = ["Overriding config with config/train_x.py:", "# a comment"]
    lines += ["learning_rate = 1e-3 # a reason", "gradient_accumulation_steps = 5 * 8", "mine = 3"]
    lines += ["Overriding: max_iters = 200", "using fused AdamW: True", nanogpt(TIMES, (0,))]
    # What is not a plain value is not known; what comes after the first step is no setting.
    known: dict[str, Any] = {"learning_rate": 1e-3, "gradient_accumulation_steps": None}
    known |= {"max_iters": 200, "n_layer": 12, "activation": "gelu_tanh", "batch_size": 12}
    run = printed(tmp_path / "log.txt", *lines, "n_layer = 3")
    assert known.items() <= run.settings.items()
    assert "mine" not in run.settings
    assert run.schedule_end == 600_000  # whatever max_iters is
    lines.insert(0, "Overriding: lr_decay_iters = 90")
    assert printed(tmp_path / "log.txt", *lines).schedule_end == 90
    lines.insert(0, "Overriding: decay_lr = False")
    assert printed(tmp_path / "log.txt", *lines).schedule_end is None
    # Added by hand: the rest is not known.
    lines = ["max_iters = 90", nanogpt(TIMES, (0,))]
    assert printed(tmp_path / "log.txt", *lines).schedule_end is None


@pytest.mark.parametrize("gpus", [1, 3, 6, 8])
def test_flops_of_nanogpt_are_those_of_its_model_on_any_number_of_gpus_or_not_known(tmp_path, gpus):
    flops = 6 * 123.59e6 + 12 * 12 * 768 * 1024  # of a token of GPT-2
    mfu = flops * 480 * 1024 / gpus / NANOGPT_PEAK * 100
    times = [f"iter {i}: loss 4.0, time 1000.00ms, mfu {mfu:.2f}%" for i in range(5, 9)]
    lines = [tokens_line(480 * 1024), "number of parameters: 123.59M", *times]
    run = printed(tmp_path / "a.txt", "Overriding: seed = 1", *lines)
    assert run.start["flops_per_token"] == pytest.approx(flops)
    assert run.start["world_size"] == gpus
    # Without the model's sizes they are those of one GPU, if these suffice for its parameters.
    alone = printed(tmp_path / "b.txt", *lines).per_step("flops")
    assert alone == (pytest.approx(flops * 480 * 1024, rel=1e-3) if gpus == 1 else None)


def test_log_that_powershell_has_written_and_that_is_cut_off_is_read_as_far_as_it_goes(tmp_path):
    text = f"{tokens_line()}\n{nanogpt(TIMES, (0, 40, 80))}"
    a = printed(tmp_path / "clean.txt", text)
    assert a.per_s("tokens") == 1000.0  # without steps that have an evaluation in their time
    assert [e["tokens"] for e in a.evals] == [0, 40_000, 80_000]
    assert [e["train_s"] for e in a.evals] == [0, 40.0, 80.0]
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


def compared(*paths: Path | str, card: str = "") -> Comparison:
    return compare(read_runs([str(path) for path in paths], card))


def rows_of(found: Comparison) -> dict[str, list[str]]:
    """Return {label: cells} of all tables."""
    return {row[0]: row[1:] for _, *of_table in found.tables.values() for row in of_table}


def test_wider_model_may_win_after_equal_tokens_and_lose_after_equal_time(tmp_path):
    a = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.0, 400: 1.6}, ms=100)
    split: dict[str, Any] = {"batch_size": 8, "gradient_accumulation_steps": 1, "n_embd": 32}
    curve = {0: 4.0, 100: 2.8, 133: 2.3, 200: 1.9, 400: 1.5}
    b = log(tmp_path / "b", curve, ms=200, flops_per_token=3000, peak_flops=8e6, **split)
    found = compared(a, b)
    expected = {
        "n_embd": ["16", "32"],
        "batch_size": ["4", "8"],
        "tokens per step": ["64", "64"],
        "tokens/s": ["640", "320"],
        "MFU": ["16.00%", "12.00%"],
        "val loss after equal tokens (25,600)": ["1.6000", "1.5000"],
        "val loss after equal time (40.0s)": ["1.6000", "1.9000"],
        # 399 steps of a third: within two percent
        "val loss after equal FLOPs (2.56e+07)": ["1.6000", "2.3000"],
    }
    assert rows_of(found).items() >= expected.items()
    headline = "The val loss after equal tokens (25,600), less that of A: B -0.1000 ± ?"
    assert found.headline == headline
    of_time, of_flops, others = found.lines
    # Its rate would have decayed further in a run of equal time.
    assert_one_line(of_time, "after equal time are not compared", "do not decay until equal time")
    assert_one_line(of_flops, "after equal FLOPs are not compared")
    assert others == "Also differs: n_embd, batch_size, gradient_accumulation_steps."


def test_logs_of_nanogpt_are_compared_on_their_card_and_what_one_does_not_know_differs(tmp_path):
    a = tmp_path / "a.txt"
    b = tmp_path / "b.txt"
    printed(a, nanogpt(dict.fromkeys(range(10, 90, 10), 1000.0), (10, 40, 80), mfu=10.0))
    settings = ["Overriding: n_embd = 1024", "Overriding: learning_rate = 3e-4"]
    # So many tokens of 6N + 12LCT FLOPs take 15% of an A100's for two seconds.
    settings += [tokens_line(68_170), "number of parameters: 203.67M"]
    printed(b, *settings, nanogpt(dict.fromkeys(range(5, 45, 5), 2000.0), (5, 20, 40), mfu=15.0))
    found = compared(a, b, card="RTX 4070")
    rows = rows_of(found)
    assert rows["n_embd"] == ["n/a", "1,024"]
    assert rows["MFU as nanoGPT prints it, of an A100"] == ["10.00%", "15.00%"]
    assert [float(cell.strip("%")) for cell in rows["MFU"]] == pytest.approx(
        [share * 312 / 58.3 for share in (10, 15)], rel=2e-3
    )
    assert_one_line(found.headline, "equal tokens are not compared: no common evaluation")
    assert_one_line(found.lines[0], "after equal time (1m20s), less that of A: B +0.4000 ± ?")
    (others,) = [line for line in found.lines if line.startswith("Also differs: ")]
    for name in ("parameters", "n_embd", "learning_rate", "batch_size"):
        assert name in others


def test_a_loss_that_is_not_a_number_has_a_note_and_such_a_run_is_not_compared_at_an_earlier_step(
    tmp_path,
):
    a = log(tmp_path / "a", CURVE)
    b = log(tmp_path / "b", CURVE)
    rewrite(a, lambda e: {"loss": None} if e["event"] == "iter" and e["iter"] > 150 else {})
    rewrite(b, lambda e: {"val_loss": None} if e["event"] == "eval" and e["iter"] == 200 else {})
    found = compared(a, b)
    assert_one_line(found.headline, "equal tokens are not compared: a run has none at its end")
    assert found.lines[3:] == [
        f"{run}: its loss is not a number at step {n}." for run, n in (("A: a", 151), ("B: b", 200))
    ]


def test_what_changed_names_initial_weights_and_no_setting_that_does_not_change_learning(tmp_path):
    a = log(tmp_path / "a", CURVE, settings={"init_from": "scratch"})
    b = log(tmp_path / "b", CURVE, settings={"init_from": "out-a"}, residual_dtype="bfloat16")
    resumed = {"init_from": "resume", "resume_changed": True}
    with open(Path(b, "log.jsonl"), "a") as file:
        file.write("\n" + json.dumps({"event": "start", "iter": 200, "settings": resumed}))
    rows = rows_of(compared(a, b))
    assert rows["init_from"] == ["scratch", "out-a"]  # of the beginning, not of the resumed part
    assert rows["n_layer"] == ["2", "n/a"]
    assert "resume_changed" not in rows


@pytest.mark.parametrize(
    ("changed", "first_step", "named"),
    [
        ({}, 0, ""),
        ({"eval_digest": "abd"}, 0, "validation windows: A abc; B abd"),
        ({"eval_digest": None}, 0, "validation windows: A abc; B not known"),
        ({"eval_digest": "abd"}, 100, "validation windows: A abc; B abc, then abd"),
        ({"val_sha256": "bad"}, 0, "validation data: A f00; B bad"),
        ({"tokenizer": "bpe"}, 0, "tokenizers: A char; B bpe"),
    ],
)
def test_losses_are_compared_only_if_all_evaluations_read_the_same_windows(
    tmp_path, changed, first_step, named
):
    a = log(tmp_path / "a", CURVE)
    b = log(tmp_path / "b", {0: 1.0, 100: 0.9, 200: 0.8})  # a finetuned model
    rewrite(b, lambda e: changed if e["iter"] >= first_step else {})
    found = compared(a, b)
    assert (f"not comparable: different {named}" in found.headline) == bool(named)
    assert ("less that of A: B" in found.headline) == (not named)
    assert ("--eval_only=True" in found.lines[0]) == bool(named)


def test_printed_logs_of_other_data_do_not_compare_and_the_data_are_what_changed(tmp_path):
    names = ("openwebtext", "fineweb")
    for name in names:
        text = nanogpt(TIMES, (0, 40))
        printed(tmp_path / f"{name}.txt", f"dataset = '{name}'", tokens_line(), text)
    found = compared(*(tmp_path / f"{name}.txt" for name in names))
    wrong = ("not comparable", "validation data", "A openwebtext", "B fineweb")
    assert_one_line(found.headline, *wrong)
    assert rows_of(found)["dataset"] == [*names]


def seeds(folder: Path, n: int, last: float, **changed: Any) -> list[str]:
    """Write logs of runs that differ in their seed and by 0.01 in their losses."""
    curves = [{0: 4.0, 100: 3.0, 200: last + i / 100} for i in range(n)]
    return [log(folder / f"{i}", val, seed=i, **changed) for i, val in enumerate(curves)]


def test_repeats_are_compared_with_their_interval(tmp_path):
    a = seeds(tmp_path / "a", 3, 2.5)
    b = seeds(tmp_path / "b", 3, 2.3, n_layer=3)
    assert compared(*a).headline == "The runs differ in nothing but their seed"
    found = compared(*a, *b)
    assert rows_of(found)["lowest val loss"][:3] == ["2.5000", "2.5100", "2.5200"]
    text = "The val loss after equal tokens (12,800), less that of A+B+C: D+E+F -0.2000 ± 0.0227"
    assert found.headline == text  # 2.776 x sqrt(2/3) x 0.01


@pytest.mark.parametrize(
    ("a", "b", "are_repeats"),
    [
        ({}, {}, True),
        ({"git_commit": "abc"}, {"git_commit": "abd"}, False),
        (EDIT, EDIT, False),  # of which edit?
        (EDIT | {"code_digest": "1"}, EDIT | {"code_digest": "1"}, True),
        (EDIT | {"code_digest": "1"}, EDIT | {"code_digest": "2"}, False),
        (EDIT | {"code_digest": "1"}, EDIT, False),
        (MINUTES | {"max_iters": 301}, MINUTES | {"max_iters": 302}, True),  # of the machine
    ],
)
def test_runs_of_two_edits_are_no_repeats_and_runs_of_equal_minutes_are(
    tmp_path, a, b, are_repeats
):
    paths = [log(tmp_path / f"{i}", CURVE, seed=i, **start) for i, start in enumerate((a, b))]
    assert ("in nothing but their seed" in compared(*paths).headline) == are_repeats


def test_a_loss_between_two_evaluations_is_not_made_up(tmp_path):
    a = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.0})
    b = log(tmp_path / "b", {0: 4.0, 100: 2.9, 150: 2.1}, n_layer=3)
    c = log(tmp_path / "c", {0: 4.0, 150: 2.1}, n_layer=3)
    assert_one_line(compared(a, b).headline, "after equal tokens (6,400)", "B -0.1000")
    found = compared(a, c)
    for line in (found.headline, *found.lines[:2]):
        assert_one_line(line, "are not compared: no common evaluation")


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
    html = page(Comparison(runs, EVIL, [EVIL], {"Wide": [[EVIL] * 10] * 2}))
    assert html.count(get_plotlyjs()) == 1
    assert len(re.findall(r'<figure\b.*?class="plotly-graph-div"', html, re.S)) == 6
    rest = html.replace(get_plotlyjs(), "")
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
