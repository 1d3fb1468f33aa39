"""Logs of runs as they are found, compare.py's figures worked out by hand, and report.py's
pages.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import assert_one_line, fails, run_tiny
from logs import TIMES, log, nanogpt
from plotly.offline import get_plotlyjs

from bench.compare import Comparison, compare, page
from bench.logs import Run, read_run, read_runs
from deskgpt.logger import read_events

CURVE = {0: 4.0, 100: 3.0, 200: 2.5}
EVIL = "</script><script>document.title='x'</script><img src=//example.com/a.png onerror=alert(1)>"
OWN = {"weight_norm/0": 3.25, EVIL: -7.0}  # numbers under names of a run's own


def printed(path: Path, *lines: str) -> Run:
    """Return the run of which a program printed this."""
    path.write_text("\n".join(lines))
    return read_run(str(path))


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
    run = printed(tmp_path / "log.txt", "Overriding: decay_lr = False", *lines)
    assert run.schedule_end is None


def test_log_that_is_cut_off_is_read_as_far_as_it_goes(tmp_path):
    text = nanogpt({0: 9000.0, 40: 6000.0, 80: 6000.0, 90: 1000.0}, (0, 40, 80))
    run = printed(tmp_path / "log.txt", "tokens per iteration will be: 1,000", text, "iter 95: lo")
    assert run.per_s("tokens") == 1000.0  # without steps that have an evaluation in their time
    assert [e["tokens"] for e in run.evals] == [0, 40_000, 80_000]
    assert [e["train_s"] for e in run.evals] == [0, 40.0, 80.0]


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


def test_time_of_a_step_is_the_median_of_all_but_the_first(tmp_path):
    run = read_run(log(tmp_path, {4: 1.0}))
    run.iters[0]["time_ms"] = run.iters[3]["time_ms"] = 9e9
    assert run.step_s == 0.1


def compared(*paths: Path | str, card: str = "") -> Comparison:
    return compare(read_runs([str(path) for path in paths], card))


def rows_of(found: Comparison) -> dict[str, list[str]]:
    """Return {label: cells} of all tables."""
    return {row[0]: row[1:] for _, *of_table in found.tables.values() for row in of_table}


def test_wider_model_may_win_after_equal_tokens_and_lose_after_equal_time(tmp_path):
    a = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.0, 400: 1.6}, ms=100)
    split = {"batch_size": 8, "gradient_accumulation_steps": 1, "n_embd": 32}
    curve = {0: 4.0, 100: 2.8, 133: 2.3, 200: 1.9, 400: 1.5}
    b = log(
        tmp_path / "b", curve, ms=200, flops_per_token=3000, peak_flops=8e6, world_size=2, **split
    )
    found = compared(a, b)
    expected = {
        "n_embd": ["16", "32"],
        "batch_size": ["4", "8"],
        "tokens/s": ["640", "320"],
        "MFU": ["16.00%", "12.00%"],
        "val loss after equal tokens (25,600)": ["1.6000", "1.5000"],
        "val loss after equal time (40.0s)": ["1.6000", "1.9000"],
        # 399 steps of a third: within two percent
        "val loss after equal FLOPs (2.56e+07)": ["1.6000", "2.3000"],
    }
    assert rows_of(found).items() >= expected.items()
    assert_one_line(found.headline, "B: b learned more", "(25,600) is 1.5000, A's is 0.1000 higher")
    of_time, of_flops, _, others = found.lines
    # Its rate would have decayed further in a run of equal time.
    assert_one_line(of_time, "Not compared after equal time", "do not decay until equal time")
    assert_one_line(of_flops, "Not compared after equal FLOPs")
    assert others == "Also differs: n_embd, batch_size, gradient_accumulation_steps, world_size."


def test_logs_of_nanogpt_are_compared_on_their_card_and_what_one_does_not_know_differs(tmp_path):
    a = tmp_path / "a.txt"
    b = tmp_path / "b.txt"
    printed(a, nanogpt(dict.fromkeys(range(10, 90, 10), 1000.0), (10, 40, 80), mfu=10.0))
    lines = ["Overriding: n_embd = 1024", "number of parameters: 203.67M"]
    lines.append(nanogpt(dict.fromkeys(range(5, 45, 5), 2000.0), (5, 20, 40), mfu=15.0))
    flops_per_token = printed(b, *lines).number("flops_per_token")
    assert flops_per_token == 6 * 203.67e6 + 12 * 12 * 1024 * 1024  # on any number of GPUs
    found = compared(a, b, card="RTX 4070")
    rows = rows_of(found)
    assert rows["n_embd"] == ["n/a", "1024"]
    assert rows["MFU as nanoGPT prints it, of an A100"] == ["10.00%", "15.00%"]
    assert [float(cell.strip("%")) for cell in rows["MFU"]] == pytest.approx(
        [share * 312 / 58.3 for share in (10, 15)], rel=2e-3
    )
    assert_one_line(
        found.headline, "A: a learned more", "equal time (1m20s)", "B's is 0.4000 higher"
    )
    assert_one_line(found.lines[0], "equal tokens: no common evaluation")
    (others,) = [line for line in found.lines if line.startswith("Also differs: ")]
    for name in ("parameters", "n_embd", "learning_rate", "batch_size"):
        assert name in others


def test_a_run_that_ends_without_a_loss_is_not_compared_at_an_earlier_step(tmp_path):
    found = compared(log(tmp_path / "a", CURVE), log(tmp_path / "b", CURVE | {200: math.nan}))
    assert_one_line(found.headline, "equal tokens: a run has none at its end")


def test_what_changed_names_initial_weights_and_no_setting_that_does_not_change_learning(tmp_path):
    a = log(tmp_path / "a", CURVE)
    b = log(tmp_path / "b", CURVE, init_from="out-a", seed=2)
    resumed = {"init_from": "resume", "resume_changed": True}
    with open(Path(b, "log.jsonl"), "a") as file:
        file.write(json.dumps({"event": "start", "iter": 200, "settings": resumed}))
    rows = rows_of(compared(a, b))
    assert rows["init_from"] == ["scratch", "out-a"]  # of the beginning, not of the resumed part
    assert rows["n_layer"] == ["2", "n/a"]
    assert "resume_changed" not in rows


@pytest.mark.parametrize("changed", [{}, {"eval_digest": "abd"}, {"eval_digest": None}])
def test_losses_are_compared_only_if_all_evaluations_read_the_same_windows(tmp_path, changed):
    a = log(tmp_path / "a", CURVE)
    b = log(tmp_path / "b", CURVE | {200: 0.8}, n_layer=3, **changed)
    found = compared(a, b)
    assert ("not comparable" in found.headline) == bool(changed)
    assert ("B: b learned more" in found.headline) == (not changed)


def test_printed_logs_of_other_data_do_not_compare_and_the_data_are_what_changed(tmp_path):
    names = ("openwebtext", "fineweb")
    for name in names:
        printed(tmp_path / f"{name}.txt", f"dataset = '{name}'", nanogpt(TIMES, (0, 40)))
    found = compared(*(tmp_path / f"{name}.txt" for name in names))
    assert_one_line(found.headline, "not comparable")
    assert rows_of(found)["dataset"] == [*names]


def test_a_loss_between_two_evaluations_is_not_made_up(tmp_path):
    a = log(tmp_path / "a", CURVE)
    b = log(tmp_path / "b", {0: 4.0, 100: 2.9, 150: 2.1}, n_layer=3)
    assert_one_line(compared(a, b).headline, "after equal tokens (6,400)", "A's is 0.1000 higher")


# ---- pages ---------------------------------------------------------------------------------------


def made_up(name: str) -> Run:
    iters = [{"iter": i, "loss": 4.0, "lr": 1e-3} | OWN for i in range(3000)]
    evals = [{"iter": i, "val_loss": 4.0} for i in range(7)]
    return Run(name, {"note": EVIL}, {"note": EVIL}, iters, evals, notes=[f"odd {EVIL}"])


@pytest.fixture(scope="module")
def real(chars, tmp_path_factory):
    out_dir = tmp_path_factory.mktemp("run") / "out"
    run_tiny(chars, out_dir, eval_iters=8)
    return out_dir


def test_page_refers_to_nothing_outside_of_it_and_names_are_text(real):
    runs = [read_run(str(real)), made_up(EVIL)]
    for run in runs:
        run.samples = [{"iter": i, "texts": [f"text {i} {EVIL}"]} for i in (0, 100)]
    html = page(Comparison(runs, EVIL, [EVIL], {"Wide": [[EVIL] * 10] * 2}))
    assert html.count(get_plotlyjs()) == 1
    assert len(re.findall(r'<figure\b.*?class="plotly-graph-div"', html, re.S)) == 6
    rest = html.replace(get_plotlyjs(), "")
    assert not re.search(r"<[a-z][^>]*\s(src|href|srcset|action|onerror)=", rest)
    assert "<img" not in rest
    assert "default-src 'none'" in html
    assert len(html) < 6e6
    assert html.index("text 100 ") < html.index("text 0 ")  # the last ones first
    assert f"<h3>{runs[0].name}, step 0</h3><pre>text 0" in html  # a text says whose it is


def test_report_of_a_run_has_its_figures_and_replaces_a_link_of_its_name(real, script):
    precious = real.parent / "precious"
    precious.write_text("mine")
    (real / "report.html").symlink_to(precious)  # as a folder from elsewhere may have
    done = script("bench/report.py", real)
    assert (done.code, done.err, done.out.strip()) == (0, "", (real / "report.html").as_uri())
    assert precious.read_text() == "mine"
    text = (real / "report.html").read_text()
    best = min(e["val_loss"] for e in read_run(str(real)).evals)
    assert f"<h1>The lowest val loss is {best:.4f}, at step 6 of 6</h1>" in text
    assert re.search(r"MFU</th><td>[\d.]+%</td>", text)


def test_what_is_wrong_is_one_line(script, tmp_path):
    with open(tmp_path / "large.txt", "wb") as file:
        file.truncate(1 << 40)  # without taking room on the disk
    for path in (tmp_path / "nowhere", Path("pyproject.toml"), tmp_path / "large.txt"):
        fails(script("bench/compare.py", path), path.name)
