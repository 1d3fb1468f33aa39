"""Pages about runs as a browser shows them: headless Chromium, pages of real and of made-up runs."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Browser, needs_browser
from conftest import assert_one_line, tiny
from logs import log, rewrite

import train
from bench import report
from bench.analysis import page
from bench.analysis.logs import read_run
from bench.analysis.runs import Run, complete

EVIL = "</script><script>document.title='x'</script><img src=//example.com/a.png onerror=alert(1)>"
OWN = {"weight_norm/0": 3.25, EVIL: -7.0}  # numbers under names of a run's own
CHARTS = ["loss", "time_ms", "lr", "grad_norm", *(f"own-{name}" for name in OWN)]

# Works the switches of a page and tells what it saw.
DRIVER = """(async () => {
const loss = () => document.getElementById("loss");
const click = async selector => {
  document.querySelector(selector).click();
  await new Promise(done => setTimeout(done, 20));
};
const x = () => loss()._fullData.map(t => [...(t.x || [])]);
const visible = id => document.getElementById(id).data.map(t => [t.meta.run, t.meta.kind, t.visible]);
const seen = {title: document.title, width: document.documentElement.scrollWidth, x: {}, axis: {}, note: {}};
seen.svg = [...document.querySelectorAll(".plot")].filter(p => p.querySelector("svg.main-svg .trace")).map(p => p.id);
seen.right = Math.max(...[...document.querySelectorAll("main *")].map(e => e.getBoundingClientRect().right));
const cut = e => e instanceof HTMLElement && e.clientWidth && e.scrollWidth > e.clientWidth + 1;
seen.cut = [...document.querySelectorAll("main *")].filter(cut).map(e => e.outerHTML.slice(0, 200));
seen.headings = [...document.querySelectorAll("figure h3")].map(h => h.textContent);
seen.background = getComputedStyle(document.body).backgroundColor;
seen.paper = loss()?.layout?.paper_bgcolor;
seen.colours = CHARTS.map(id => document.getElementById(id)?.data?.map(t => [t.meta.run, t.line.color]));
for (const radio of document.querySelectorAll("input[name=axis]")) {
  if (radio.parentElement.hidden) continue;
  await click(`input[value="${radio.value}"]`);
  seen.x[radio.value] = x();
  seen.axis[radio.value] = loss().layout.xaxis.title.text;
  seen.note[radio.value] = document.getElementById("loss-note").textContent;
}
seen.range = loss()?._fullLayout?.yaxis.range;
if (document.querySelector("[data-run]")) {
  await click("#log-y");
  seen.type = loss().layout.yaxis.type;
  await click("#log-y");
  await click("[data-run='1']");
  await click("[data-kind=train]");
  seen.visible = [...visible("loss"), ...visible("time_ms")];
}
return seen;
})()""".replace("CHARTS", json.dumps(CHARTS))


def browse(
    browser: Browser, folder: Path, html: str, width: int, dark: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """(what DRIVER saw on the page in a window this wide, what stood on the console)"""
    file = folder / "page.html"
    file.write_text(html, encoding="utf-8")
    tab = browser.open(file.as_uri(), width, dark)
    seen = tab.run(DRIVER)
    console = tab.console()
    tab.close()
    return seen, console


def made_up(name: str, steps: int = 3000, known: bool = True, evals: int = 7) -> Run:
    """A run with a slow step; known=False: with no more than nanoGPT prints."""
    draw = np.random.default_rng(0)
    iters: list[dict[str, Any]] = [
        {"iter": i, "loss": 4 - i / steps + draw.normal() / 9, "time_ms": 10.0 if i else 5000.0} for i in range(steps)
    ]
    evaluations: list[dict[str, Any]] = [
        {"iter": i * steps // 6, "train_loss": 4 - i / 6, "val_loss": 4 - i / 9, "val_se": 0.01} for i in range(evals)
    ]
    for e in (*iters, *evaluations) if known else ():
        e |= {"mfu": 0.4, "lr": 1e-3, "grad_norm": 2.0, "tokens": 100 * e["iter"], "train_s": 3 * e["iter"]}
        e["own"] = OWN
    return Run(name, {"note": EVIL, "n_layer": 2}, {}, iters, evaluations, {}, 6e6 if known else None, [f"odd {EVIL}"])


@pytest.fixture(scope="module")
def real(chars, tmp_path_factory) -> Path:
    out_dir = tmp_path_factory.mktemp("run") / "out"
    train.main(tiny(chars, out_dir))
    return out_dir


@pytest.fixture(scope="module")
def html(real) -> str:
    runs = [read_run(str(real)), made_up(EVIL), made_up("printed", known=False)]
    wide = page.Table("Wide", ["run", *("a long heading",) * 9], [[EVIL, *("1,234,567",) * 9]], EVIL)
    return page.page(f"Runs & {EVIL}", runs, [wide], [EVIL], [f"ROMEO:\n\n{EVIL}"], EVIL)


@pytest.fixture(scope="module")
def look(html, browser, tmp_path_factory) -> Callable[..., tuple[dict[str, Any], list[str]]]:
    """What DRIVER saw on the page, and the console, by width and theme."""
    folder = tmp_path_factory.mktemp("look")
    return functools.cache(lambda width, dark=False: browse(browser, folder, html, width, dark))


@needs_browser
@pytest.mark.parametrize("width", [360, 1200])
def test_every_chart_is_drawn_and_nothing_is_wider_than_the_window(look, width):
    seen, console = look(width)
    assert console == []  # where the browser says what it refused to load, too
    assert seen["svg"] == CHARTS
    assert seen["headings"][-len(OWN) :] == [*OWN]
    assert seen["width"] <= width
    assert seen["right"] <= width
    assert seen["cut"] == []


@needs_browser
def test_switches_change_the_axis_and_hide_runs_in_all_charts(look):
    seen, _ = look(1200)
    assert seen["axis"] == {"steps": "steps", "tokens": "tokens trained on", "time": "hours of training"} | {
        "FLOPs": "FLOPs"
    }
    last = {axis: max(v for t in xs for v in t if v is not None) for axis, xs in seen["x"].items()}
    assert last["steps"] == 3000
    assert last["tokens"] == pytest.approx(300_000)
    assert last["time"] == pytest.approx(2.5)
    assert last["FLOPs"] == pytest.approx(1.8e12)
    assert "unknown" not in seen["note"]["steps"]
    assert seen["note"]["FLOPs"].endswith("Left out, FLOPs unknown: printed.")
    assert seen["type"] == "log"
    for run, kind, visible in seen["visible"]:
        assert visible == (run != 1 and kind != "train")
    of_run = {run: {c for chart in seen["colours"] for r, c in chart if r == run} for run in range(3)}
    assert [len(colours) for colours in of_run.values()] == [1, 1, 1]
    assert len(set.union(*of_run.values())) == 3


@needs_browser
def test_names_are_shown_and_not_run_and_page_and_charts_follow_the_theme(look):
    light, dark = look(360)[0], look(360, dark=True)[0]
    assert light["title"] == f"Runs & {EVIL}"
    assert (light["background"], light["paper"]) == ("rgb(255, 255, 255)", "#ffffff")
    assert (dark["background"], dark["paper"]) == ("rgb(20, 20, 20)", "#141414")
    assert light["colours"] != dark["colours"]


@needs_browser
def test_runs_with_little_in_their_logs(browser, tmp_path):
    empty = Run("empty", {}, {}, [], [], {}, None, [])
    seen, console = browse(browser, tmp_path, page.page("empty", [empty], [], []), 360)
    assert (seen["svg"], console) == ([], [])
    once = made_up("once", 0, evals=1)
    diverged = made_up("diverged", 3, evals=0)
    diverged.iters[-1] |= {"loss": None, "grad_norm": None}
    seen, console = browse(browser, tmp_path, page.page("few", [empty, once, diverged], [], []), 360)
    assert (seen["svg"], console) == (CHARTS, [])


@needs_browser
def test_only_step_of_a_run_is_a_point(browser, tmp_path):
    (tmp_path / "page.html").write_text(page.page("x", [made_up("one", 1, evals=0)], [], []), encoding="utf-8")
    tab = browser.open((tmp_path / "page.html").as_uri())
    for chart in ("loss", "time_ms", "lr"):
        assert tab.run(f"document.querySelectorAll('#{chart} .points path').length") == 1
    tab.close()


def test_number_that_the_loop_hands_to_report_step_has_a_chart(real, tmp_path):
    path = log(tmp_path / "out", {0: 4.0, 6: 3.0})
    rewrite(path, lambda e: {k: v + e["iter"] for k, v in OWN.items()} if e["event"] == "iter" else {})
    charts = page.make_charts([read_run(path), read_run(str(real))])
    for name, value in OWN.items():
        chart = charts[f"own-{name}"]
        assert chart.title == name
        assert chart.note.startswith("Not in the log of ")
        assert [*chart.figure.data[0].y] == [value + i for i in range(6)]


@needs_browser
def test_console_is_seen(browser, tmp_path):
    (tmp_path / "a.html").write_text("<body><img src='https://example.com/a.png'><script>nonsense()</script></body>")
    tab = browser.open((tmp_path / "a.html").as_uri())
    assert len(tab.console()) >= 2
    assert tab.requests()[1:] == ["https://example.com/a.png"]
    tab.close()


def test_page_refers_to_nothing_outside_of_it(html):
    from plotly.offline import get_plotlyjs

    assert html.count(get_plotlyjs()) == 1
    rest = html.replace(get_plotlyjs(), "")
    assert not re.search(r"<[a-z][^>]*\s(src|href|srcset|action|onerror)=", rest)
    assert "default-src 'none'" in html
    assert len(html) < 6e6
    assert "<img" not in rest


def test_long_logs_are_drawn_with_few_points_that_keep_the_extremes():
    run = made_up("long", 100_000)
    run.iters[7] |= {"loss": None}
    c = page.curve(run, run.iters, "time_ms", 1000)
    assert len(c.y) == 1000
    assert c.thinned
    assert (c.high.max(), c.low.min()) == (5000, 10)
    assert c.y[0] == pytest.approx((5000 + 99 * 10) / 100)
    assert (np.diff(c.x["steps"]) == 100).all()
    assert (c.x["FLOPs"] == c.x["tokens"] * 6e6).all()
    short = page.curve(run, run.iters[:5], "loss", 1000)
    assert len(short.y) == 5
    assert not short.thinned


def axis(*runs: Run) -> tuple[float, float]:
    found = page.loss_range([*runs])
    assert found is not None
    return found


def losses(val: dict[int, float], steps: dict[int, float] | None = None) -> Run:
    evals = [{"iter": i, "train_loss": y, "val_loss": y, "val_se": None} for i, y in val.items()]
    iters = [{"iter": i, "loss": y, "time_ms": 1.0} for i, y in (steps or {}).items()]
    return Run("x", iters=iters, evals=evals)


FALL = {i: 3 + 8 * 0.99**i for i in range(1000)}  # from 11 to 3


def test_loss_axis_shows_what_follows_the_first_fall_and_every_evaluation_that_matters():
    run = losses({i: FALL[i] for i in range(0, 1000, 50)}, FALL)
    low, top = axis(run)
    assert low < 3
    assert FALL[100] <= top < 7
    spike = losses({i: FALL[i] for i in range(0, 1000, 50)}, FALL | {500: 11.0})
    assert axis(spike)[1] == pytest.approx(top, rel=0.1)
    assert page.loss_range([run, losses({})]) == (low, top)
    rising = losses({0: 11.0} | {i: 2 + i / 500 for i in range(100, 1001, 50)}, FALL)  # overfits
    low, top = axis(rising)
    assert low < 2.2
    assert top > 4
    diverged = losses({0: 11.0, 100: 3.0, 200: 3.0, 300: 1e5, 400: None}, FALL)  # type: ignore[dict-item]
    low, top = axis(diverged)
    assert low < 3
    assert 11 <= top < 12


@pytest.mark.parametrize("val", [{}, {0: 4.0}, {0: 4.0, 5: 3.0}, dict.fromkeys(range(9), 4.0), {0: 4.0, 1: None}])
def test_loss_axis_of_little_is_the_browsers_own(val):
    assert page.loss_range([losses(val)]) is None
    assert page.loss_range([losses(val, {0: 4.0, 1: 3.0})]) is None


@needs_browser
def test_loss_axis_is_the_pages_own(browser, tmp_path):
    runs = [losses({i: FALL[i] for i in range(0, 1000, 50)}, FALL), made_up("b", 900)]
    seen, _ = browse(browser, tmp_path, page.page("x", runs, [], []), 800)
    assert seen["range"] == pytest.approx(page.loss_range(runs))


COLOURS = """(() => {
const colours = (selector, property) =>
  [...new Set([...document.querySelectorAll(selector)].map(e => getComputedStyle(e)[property]))].sort();
return {curves: colours("#loss .js-line", "stroke"), lines: colours(".loss .line", "borderTopColor"),
  marks: colours(".legend .mark", "color")};
})()"""


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_legend_and_curves_have_the_same_colours(browser, tmp_path, dark):
    one, other = (losses({i: FALL[i] for i in range(0, 100, 20)}, {i: FALL[i] for i in range(100)}) for _ in "ab")
    seen = []
    for runs in ([one], [one, other]):
        (tmp_path / "page.html").write_text(page.page("x", runs, [], []), encoding="utf-8")
        tab = browser.open((tmp_path / "page.html").as_uri(), dark=dark)
        seen.append(tab.run(COLOURS))
        tab.close()
    assert len(seen[0]["curves"]) == 1
    assert seen[0]["lines"] == seen[0]["curves"]
    assert len(seen[1]["curves"]) == 2
    assert seen[1]["marks"] == seen[1]["curves"]


@needs_browser
def test_tables_are_equally_wide_and_so_are_their_columns(browser, tmp_path):
    short = page.Table("Learning", ["", "a", "b"], [["loss", "2", "3"]])
    long = page.Table("Speed", ["", "a", "b"], [["milliseconds per step, the median", "1,234,567 to 2,345,678", "3"]])
    (tmp_path / "page.html").write_text(page.page("x", [losses({0: 4.0})], [short, long], []), encoding="utf-8")
    tab = browser.open((tmp_path / "page.html").as_uri(), width=1280)
    widths = "[...document.querySelectorAll('.tables table')].map(t => [...t.rows[0].cells].map(c => c.offsetWidth))"
    first, second = tab.run(widths)
    tab.close()
    assert sum(first) > 1000
    assert first == second


def test_rows_of_runs_side_by_side_are_in_the_order_of_the_fullest():
    running, ended = (page.Table("Speed", [], [[label, "1"] for label in labels]) for labels in ("ac", "abc"))
    table = page.side_by_side(["x", "y"], [running, ended], ["not yet", "n/a"])
    assert table.rows == [["a", "1", "1"], ["b", "not yet", "1"], ["c", "1", "1"]]


def test_each_sample_is_shown_once():
    run = losses({0: 4.0})
    run.samples = [{"iter": i, "texts": texts} for i, texts in enumerate([["old", "x"], ["same"], ["same", "begun"]])]
    alone = page.sampled_html([run], [])
    assert (alone.count("<pre>same"), alone.count("<pre>begun"), alone.count("<pre>old")) == (1, 1, 1)
    beside = page.sampled_html([run], ["\nbegun and ended", "\nsame"])
    assert (beside.count("same"), beside.count("begun"), beside.count("<pre>old")) == (0, 0, 1)
    run.samples = run.samples[-1:]
    assert page.sampled_html([run], ["\nbegun and ended", "same"]) == ""


def test_one_slow_step_does_not_set_the_axis():
    limits, note = page.clipped(np.array([10.0] * 99 + [5000.0]))
    assert limits == [0, 12.5]
    assert note == "1 of 100 values lie above; the greatest is 5,000."
    assert page.clipped(np.linspace(1, 2, 100)) == (None, "")


def test_report_of_a_run_has_its_figures_and_samples(real, script, tmp_path):
    done = script("bench/report.py", real, "--samples", "1", "--max_new_tokens", "5")
    assert (done.code, done.err, done.out.strip()) == (0, "", str(real / "report.html"))
    text = (real / "report.html").read_text()
    assert len(re.findall("<pre>", text)) == 1
    assert "no samples" not in text
    run = read_run(str(real))
    best = min(e["val_loss"] for e in run.evals)
    assert f"<dt>best val loss</dt><dd>{best:.4f}" in text
    assert re.search(r"<h1>.* fell from \d\.\d\d to \d\.\d\d in \d steps</h1>", text)
    assert re.search(r"<dt>MFU</dt><dd>[\d.]+%</dd>", text)
    assert f"perplexity there</th><td>{np.exp(best):,.2f}" in text
    assert re.search(r"<td>&quot;learned&quot;</td>", text)


def test_report_shows_what_the_run_wrote_and_scored_as_it_trained(tmp_path, script):
    events: list[dict[str, Any]] = [
        {"event": "sample", "iter": i, "texts": [f"text {i} {EVIL}", "second"]} for i in (0, 100)
    ]
    events += [
        {"event": "sample", "iter": 50, "texts": "no list"},
        {"event": "tasks", "iter": 100, "results": {"x": 1}},
    ]
    figures = {"acc": 0.25, "acc_stderr": 0.01, "unknown": None}
    events += [{"event": "tasks", "iter": 100, "results": {"lambada": figures}}]
    path = Path(log(tmp_path / "a", {0: 4.0, 100: 3.0}))
    lines = (path / "log.jsonl").read_text().splitlines()
    lines[-1:-1] = map(json.dumps, events)  # before its end
    (path / "log.jsonl").write_text("\n".join(lines))
    assert script("bench/report.py", path).code == 0
    text = (path / "report.html").read_text()
    assert text.index("text 100") < text.index("text 0")  # the last ones first
    assert "text 50" not in text
    assert '<th scope="row">lambada, acc</th><td>0.2500 ± 0.0100</td>' in text
    assert "lambada, unknown" not in text
    assert re.search("<pre>no samples: .*ckpt.pt", text)
    assert EVIL not in text


def test_report_errors_are_one_line(real, script, tmp_path):
    (tmp_path / "printed.txt").write_text("step 0: train loss 4.0, val loss 4.0")
    wrong: list[list[str | Path]] = [[tmp_path / "nothing"], [real, real], [real, "--serve", "--port", "70000"]]
    wrong += [[real, "--samples", "0", "--html", tmp_path / "no" / "a.html"], [tmp_path / "printed.txt", "--serve"]]
    for arguments in wrong:
        done = script("bench/report.py", *arguments)
        assert done.code != 0
        assert_one_line(done.err, "error: ")


def test_report_tells_where_the_validation_loss_turned_up(tmp_path):
    def turned(last_train: float, last_val: float) -> bool:
        path = log(tmp_path / f"{last_val}", {0: 4.0, 3: 2.0, 6: last_val})
        train_loss = {0: 4.0, 3: 2.0, 6: last_train}
        rewrite(path, lambda e: {"train_loss": train_loss[e["iter"]]} if e["event"] == "eval" else {})
        run = read_run(path)
        complete(run)
        said = report.describe(run)
        rows = {label: cells[0] for table in said.tables for label, *cells in table.rows}
        assert ("val turned up after step" in rows) == (" has risen by 0.05 since" in said.headline.text)
        return "val turned up after step" in rows

    assert not turned(1.9, 1.9)
    assert not turned(1.9, 2.03)  # within four standard errors of 0.01
    assert not turned(2.1, 2.06)  # the train loss has risen too
    assert turned(1.9, 2.05)
