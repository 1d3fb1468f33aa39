"""Pages about runs: what report.py writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from conftest import assert_one_line, tiny
from logs import log, rewrite

import train
from bench.analysis import page
from bench.analysis.logs import Run, read_run
from bench.analysis.table import Group
from bench.analysis.verdict import Comparison, compare

EVIL = "</script><script>document.title='x'</script><img src=//example.com/a.png onerror=alert(1)>"
OWN = {"weight_norm/0": 3.25, EVIL: -7.0}  # numbers under names of a run's own


def made_up(name: str, steps: int = 3000) -> Run:
    iters: list[dict[str, Any]] = [{"iter": i, "loss": 4 - i / steps, "lr": 1e-3} | OWN for i in range(steps)]
    evals: list[dict[str, Any]] = [{"iter": i * steps // 6, "train_loss": 4.0, "val_loss": 4 - i / 9} for i in range(7)]
    return Run(name, {"note": EVIL}, {}, iters, evals, notes=[f"odd {EVIL}"])


@pytest.fixture(scope="module")
def real(chars, tmp_path_factory) -> Path:
    out_dir = tmp_path_factory.mktemp("run") / "out"
    train.main(tiny(chars, out_dir, eval_iters=8))
    return out_dir


def test_page_refers_to_nothing_outside_of_it_and_names_are_text(real):
    runs = [read_run(str(real)), made_up(EVIL)]
    runs[1].samples = [{"iter": i, "texts": [f"text {i} {EVIL}"]} for i in (0, 100)]
    rows = {"Wide": [[EVIL] * 10]}
    html = page.page(Comparison(runs, EVIL, [EVIL], [Group([EVIL], runs)] * 9, rows))
    assert html.count(page.plotly_js()) == 1
    assert len(re.findall(r'<figure\b.*?class="plotly-graph-div"', html, re.S)) == 6
    rest = html.replace(page.plotly_js(), "")
    assert not re.search(r"<[a-z][^>]*\s(src|href|srcset|action|onerror)=", rest)
    assert "<img" not in rest
    assert "default-src 'none'" in html
    assert len(html) < 6e6
    assert html.index("step 100: text 100") < html.index("step 0: text 0")  # the last ones first


def test_charts_are_of_all_that_is_logged_from_the_start_on(real, tmp_path):
    steps, _, val = page.make_charts([made_up("long", 100_000)])[page.LOSS].data
    assert (steps.x[0], val.x[0], val.y[0]) == (0, 0, 4.0)
    assert (len(steps.y), val.x[-1]) == (page.POINTS, 100_000)
    path = log(tmp_path / "out", {0: 4.0, 6: 3.0})
    rewrite(path, lambda e: {k: v + e["iter"] for k, v in OWN.items()} if e["event"] == "iter" else {})
    charts = page.make_charts([read_run(path), read_run(str(real))])
    assert list(charts)[-3:] == ["Gradient norm, before clipping", *OWN]  # no number of train.py's besides
    for name, value in OWN.items():
        assert [*charts[name].data[0].y] == [value + i for i in range(6)]


def test_runs_with_little_in_their_logs_have_a_page():
    for runs in ([Run("empty")], [Run("empty"), made_up("once", 1)]):
        assert "<h1>" in page.page(compare(runs))


# ---- the script ----------------------------------------------------------------------------------------------


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


def test_report_errors_are_one_line(real, script):
    for name in ("nowhere", "log.jsonl"):
        done = script("bench/report.py", real / name)
        assert done.code != 0
        assert_one_line(done.err, "error: ", name)
