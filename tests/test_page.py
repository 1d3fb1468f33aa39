"""Pages about runs: what report.py writes and serves."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import assert_one_line, tiny
from logs import log, rewrite

import train
from bench import report
from bench.analysis import page
from bench.analysis.logs import Run, read_run
from bench.analysis.table import Arm, Row
from bench.analysis.verdict import COMMAND, Comparison, compare, judgement

EVIL = "</script><script>document.title='x'</script><img src=//example.com/a.png onerror=alert(1)>"
OWN = {"weight_norm/0": 3.25, EVIL: -7.0}  # numbers under names of a run's own


def made_up(name: str, steps: int = 3000) -> Run:
    """A run with a slow first step."""
    iters: list[dict[str, Any]] = [
        {"iter": i, "loss": 4 - i / steps, "time_ms": 10.0, "own": OWN} for i in range(steps)
    ]
    iters[0]["time_ms"] = 5000.0
    evals: list[dict[str, Any]] = [{"iter": i * steps // 6, "train_loss": 4.0, "val_loss": 4 - i / 9} for i in range(7)]
    for e in (*iters, *evals):
        e |= {"eval_s": None, "val_bpb": None, "lr": 1e-3, "grad_norm": 2.0, "val_se": 0.01}
        e |= {"tokens": 100 * e["iter"], "train_s": 3 * e["iter"]}
    return Run(name, {"note": EVIL}, {"flops_per_token": 6e6}, iters, evals, notes=[f"odd {EVIL}"])


@pytest.fixture(scope="module")
def real(chars, tmp_path_factory) -> Path:
    out_dir = tmp_path_factory.mktemp("run") / "out"
    train.main(tiny(chars, out_dir, eval_iters=8))
    return out_dir


def test_page_refers_to_nothing_outside_of_it_and_names_are_text(real):
    runs = [read_run(str(real)), made_up(EVIL)]
    runs[1].samples = [{"iter": i, "texts": [f"text {i} {EVIL}"]} for i in (0, 100)]
    wide = [Row(EVIL, [[10**6 * i for i in range(9)]] * 9, str)]
    lines = [EVIL, f"{COMMAND}python {EVIL}"]
    html = page.page(Comparison(runs, [Arm([EVIL], runs)] * 9, EVIL, lines, {"Wide": wide}))
    assert html.count(page.plotly_js()) == 1
    assert len(re.findall(r'<figure\b.*?class="plotly-graph-div"', html, re.S)) == 6
    rest = html.replace(page.plotly_js(), "")
    assert not re.search(r"<[a-z][^>]*\s(src|href|srcset|action|onerror)=", rest)
    assert "<img" not in rest
    assert "default-src 'none'" in html
    assert len(html) < 6e6
    assert "<pre>python &lt;/script&gt;" in html
    assert html.index("step 100: text 100") < html.index("step 0: text 0")  # the last ones first


def test_loss_curve_begins_at_the_start_and_has_each_axis():
    chart = page.make_charts([made_up("long", 100_000)])["loss"]
    steps, _, val = (trace for trace in chart.figure.data)
    assert (steps.x[0], val.x[0], val.y[0]) == (0, 0, 4.0)
    assert len(steps.y) == page.POINTS
    assert chart.figure.layout.yaxis.range is None
    axes = {button.label: button.args[0]["x"][2] for button in chart.figure.layout.updatemenus[0].buttons}
    assert {name: x[-1] for name, x in axes.items()} == pytest.approx(
        {"steps": 1e5, "tokens": 1e7, "minutes": 5000.0, "FLOPs": 6e13}
    )
    assert val.error_y.array[0] == pytest.approx(1.96 * 0.01)  # a 95% interval


def test_number_that_the_loop_hands_to_report_step_has_a_chart(real, tmp_path):
    path = log(tmp_path / "out", {0: 4.0, 6: 3.0})
    rewrite(path, lambda e: {k: v + e["iter"] for k, v in OWN.items()} if e["event"] == "iter" else {})
    charts = page.make_charts([read_run(path), read_run(str(real))])
    for i, (name, value) in enumerate(OWN.items()):
        chart = charts[f"own-{i}"]
        assert chart.title == name
        assert chart.note.startswith("Not in the log of ")
        assert [*chart.figure.data[0].y] == [value + i for i in range(6)]


def test_runs_with_little_in_their_logs_have_a_page():
    diverged = made_up("diverged", 3)
    diverged.iters[-1] |= {"loss": None, "grad_norm": None}
    for runs in ([Run("empty")], [Run("empty"), made_up("once", 1), diverged]):
        assert "<h1>" in page.page(compare(runs))


# ---- the scripts ---------------------------------------------------------------------------------------------


def test_report_of_a_run_has_its_figures_and_its_judgement(real, script):
    done = script("bench/report.py", real)
    assert (done.code, done.err, done.out.strip()) == (0, "", str(real / "report.html"))
    text = (real / "report.html").read_text()
    best = min(e["val_loss"] for e in read_run(str(real)).evals)
    assert re.search(r"<h1>.* fell from \d\.\d\d to \d\.\d\d in \d steps</h1>", text)
    assert re.search(rf"lowest val loss is {best:.4f} ± [\d.]+ \(95% of the text, n=32 windows\)", text)
    assert re.search(r"MFU</th><td>[\d.]+%</td>", text)
    assert f"perplexity there</th><td>{np.exp(best):,.2f}" in text
    assert re.search(r"At the end the val loss is -?[\d.]+ above the train loss", text)


def test_report_tells_where_the_validation_loss_turned_up_and_where_it_still_falls(tmp_path):
    def lines(last_train: float, last_val: float) -> str:
        path = log(tmp_path / f"{last_val}", {0: 4.0, 3: 3.0, 8: 2.0, 10: last_val})
        train_loss = {0: 4.0, 3: 3.0, 8: 2.0, 10: last_train}
        rewrite(path, lambda e: {"train_loss": train_loss[e["iter"]]} if e["event"] == "eval" else {})
        return " ".join(judgement(read_run(path)))

    assert "overfits: the val loss has risen by 0.0500 since step 8" in lines(1.9, 2.05)
    assert "overfits" not in lines(1.9, 2.03)  # within four standard errors of 0.01
    assert "overfits" not in lines(2.1, 2.06)  # the train loss has risen too
    assert "still falling at the end" in lines(1.9, 1.9)
    assert "still falling" not in lines(1.9, 1.99)


def test_report_errors_are_one_line(real, script, tmp_path):
    nowhere = tmp_path / "no" / "a.html"
    for arguments in ([nowhere], [real, real], [real, "--html", nowhere], [real, "--serve", "--port", "70000"]):
        done = script("bench/report.py", *arguments)
        assert done.code != 0
        assert_one_line(done.err, "error: ")


def test_page_of_a_run_is_served_before_it_begins_and_as_it_grows(tmp_path):
    testclient = pytest.importorskip("starlette.testclient")
    whole = Path(log(tmp_path / "whole", {0: 4.0, 30: 3.0, 60: 2.5}), "log.jsonl")
    out = tmp_path / "out"
    client = testclient.TestClient(report.app_of([str(out)]), base_url="http://127.0.0.1")
    answer = client.get("/")
    assert answer.status_code == 200
    assert f"{out}: No such file" in answer.text
    assert 'http-equiv="refresh"' in answer.text
    out.mkdir()
    lines = whole.read_bytes().splitlines(keepends=True)
    (out / "log.jsonl").write_bytes(b"".join(lines[:40]) + lines[40][:20])  # the last line is being written
    assert re.search(r"Step 37 of 400; [\d.]+s of training left, if it still runs", client.get("/").text)
    shutil.copy(whole, out)
    assert "of training left" not in client.get("/").text  # it has ended
    two = testclient.TestClient(report.app_of([str(out), str(whole)]), base_url="http://127.0.0.1")
    assert "A: out" in two.get("/").text
    assert client.get("/", headers={"host": "example.com"}).status_code == 400  # no other site reads it
