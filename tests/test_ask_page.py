"""The page of a question and its progress bar, from made-up runs: nothing is trained."""

from __future__ import annotations

import io
import math
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Browser, needs_browser

from bench import ask
from bench.analysis.page import COLOURS, plotly_js
from bench.asking import page, words
from bench.asking.arms import Arm
from bench.asking.ledger import Ledger
from bench.asking.question import Question
from bench.asking.running import DistEnv
from bench.asking.statistics import LEAST
from deskgpt.system.errors import ConfigError

EVIL = "</script><script>document.title='x'</script><img src=//example.com/a.png onerror=alert(1)>%{y}"
CURVE = {0: 1.5, 10: 0.5, 50: 0.1, 100: 0.0}  # a val loss above the last one, by step


class MadeUp(Question):
    """A question whose runs end at the losses that it is given, and noise."""

    def __init__(self, folder: Path, losses: Sequence[float], **given: Any) -> None:
        texts = ["", "--learning_rate=3e-2", "docs/hacks/value_embeddings.patch", "commit:HEAD~3", EVIL]
        arms = [Arm("abcde"[i], texts[i], [], folder, f"code {i}", {"n_layer": 1}, 100) for i in range(len(losses))]
        given = {"resolve": None, "budget_s": 3600.0, "first_seed": 1} | given
        super().__init__(arms, DistEnv(Ledger(folder / "ledger"), folder, "cpu"), **given)
        self.losses = losses
        self.draw = random.Random(0)

    def do_round(self, n: int) -> None:
        for label in self.looks[-1].alive if self.looks else list(self.runs):
            self.runs[label].append(self.made_up_run(self.losses["abcde".index(label)]))

    def made_up_run(self, loss: float) -> dict[str, Any]:
        """loss: NaN for one that diverged."""
        ended = not math.isnan(loss)
        last = loss + self.draw.gauss(0, 0.03) if ended else 4.17
        curve = [[step, last + above] for step, above in CURVE.items()] if ended else [[0, last]]
        run = {"outcome": "ended" if ended else "diverged", "val_loss": last, "curve": curve, "reused": True}
        run |= {"wall_s": 10.0, "ended": 0}
        return run | {"step_ms": 10 * last, "mfu": last / 10, "tokens_per_s": 1e5 * last}

    def after(self, rounds: int) -> MadeUp:
        """The question after so many rounds, or fewer where it is decided sooner."""
        for _, _ in zip(range(rounds), self.answered(), strict=False):
            pass
        return self


# ---- the progress bar ----------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bar_says_who_leads_and_each_round_has_a_line_for_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    question = MadeUp(tmp_path, [1.9, 1.8])
    ask.ask(question)
    bars = re.findall(r"\r(b leads by [^:]*): +\d+%", terminal.getvalue())
    assert bars[0] == f"b leads by {question.looks[0].estimates['a', 'b'].d:.4f} nats"
    e = question.looks[-1].estimates["a", "b"]
    assert bars[-1] == f"b leads by {e.d:.4f} ± {e.half:.4f} nats"
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round")]
    assert len(lines) == len(question.looks) - 1  # none after the first round, which knows no noise
    assert lines[-1].startswith(f"round {e.n}: b leads by {e.d:.4f} ± {e.half:.4f} nats (a 1.")


def test_refusal_after_the_pilot_has_a_line_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with pytest.raises(ConfigError, match="cannot resolve") as refused:
        ask.ask(MadeUp(tmp_path, [1.9, 1.8], resolve=1e-6))
    assert refused.tb  # while it is held, as by one_line_errors, nothing else closes the bar
    assert terminal.getvalue().endswith("\n")


def test_time_is_compared_only_between_runs_that_took_turns(tmp_path):
    question = MadeUp(tmp_path, [1.9, 1.5]).after(4)
    assert "of the time" in words.answer(question)[0]
    for run in question.runs["b"]:
        run["ended"] = 86400  # a day later
    assert "more steps" in words.answer(question)[0]
    assert "of the time" not in words.answer(question)[0]
    question.arms[0].steps = 10  # the worse arm took fewer, as it may with --at=time
    assert "steps" not in words.answer(question)[0]


def test_pairs_that_scatter_far_less_than_seeds_lower_the_price(tmp_path, monkeypatch):
    needed = MadeUp(tmp_path, [1.9, 1.9004], resolve=1e-3).after(2).price().needed
    assert needed is not None
    assert needed > 100
    of_seeds = [0.03, 0.03, -0.02, -0.02]  # order: a, b, a, b
    question = MadeUp(tmp_path, [1.9, 1.9004], resolve=1e-3)
    monkeypatch.setattr(question.draw, "gauss", lambda *_: of_seeds.pop())
    price = question.after(2).price()
    assert price.paired
    assert price.needed == LEAST


def test_figure_that_is_known_takes_no_job(tmp_path):
    question = MadeUp(tmp_path, [1.9, 1.8]).after(2)
    question.arms[1] = replace(question.arms[1], known=1.8)
    for run in question.runs["b"]:
        run["wall_s"] = 0.0
    question.place = replace(question.place, jobs=2)
    assert question.round_s() == 10.0  # of a, which runs beside nothing


def test_arms_that_cannot_win_are_named_after_the_two_best_ones(tmp_path):
    question = MadeUp(tmp_path, [2.5, 1.9, 2.1, 1.88], resolve=0.001).after(6)
    assert question.looks[-1].alive == ["b", "d"]
    assert re.fullmatch(r"d leads b by 0\.\d{4} ± 0\.\d{4} nats; out: a, c", words.so_far(question))
    sentence = words.answer(question)[0]
    assert sentence.startswith("Not enough yet, about ")
    assert words.so_far(question) in sentence


def test_figures_other_than_losses_keep_their_digits(tmp_path):
    for figure in ("mfu", "tokens_per_s", "step_ms"):  # shares, by the logarithm
        question = MadeUp(tmp_path, [1.9, 2.9], figure=figure).after(1)
        a, b = (question.runs[label][0][figure] for label in "ab")
        assert words.so_far(question).endswith(f" leads by {abs(100 * math.log(a / b)):#.4g} %")
    assert words.number(MadeUp(tmp_path, [1, 1], figure="mfu"), 0.002646) == "0.002646"
    assert words.number(MadeUp(tmp_path, [1, 1], figure="tokens_per_s"), 123456.78) == "123,457"


# ---- the page ------------------------------------------------------------------------------------------------


def traces(chart: Any, run: int | None) -> list[Any]:
    colour = COLOURS[-1 if run is None else run]
    return [trace for trace in chart.figure.data if trace.line.color == colour]


def test_curve_is_the_mean_of_runs_within_their_range_without_those_that_diverged(tmp_path):
    question = MadeUp(tmp_path, [1.9, 1.8, math.nan]).after(2)
    question.runs["b"][0] = question.made_up_run(math.nan)
    runs = [page.as_run(question, arm) for arm in question.arms]
    chart = page.curves_chart(question, runs)
    band, line = traces(chart, 0)
    losses = np.array([[loss for _, loss in run["curve"]] for run in question.runs["a"]])
    assert [*line.customdata] == [*CURVE]
    np.testing.assert_allclose(line.y, losses.mean(0), rtol=1e-6)
    np.testing.assert_allclose(band.y, [*losses.max(0), *losses.min(0)[::-1]], rtol=1e-6)
    (of_one_run,) = traces(chart, 1)
    assert of_one_run.y[-1] == pytest.approx(question.runs["b"][1]["val_loss"])
    assert traces(chart, 2) == []
    assert "1 of 2 runs of b diverged and are left out" in chart.note
    assert "2 of 2 runs of c diverged and are left out" in chart.note


def test_arms_that_take_different_numbers_of_steps_are_drawn_by_their_shares(tmp_path):
    question = MadeUp(tmp_path, [1.9, 1.8]).after(2)
    runs = [page.as_run(question, arm) for arm in question.arms]
    for steps, places in ((100, [0, 10, 50, 100]), (200, [0, 5, 25, 50])):
        question.arms[1].steps = steps
        chart = page.curves_chart(question, runs)
        line = traces(chart, 1)[-1]
        assert [*line.x] == places
        assert [*line.customdata] == [*CURVE]
        assert [*traces(chart, 0)[-1].x] == [*CURVE]
    assert chart.figure.layout.xaxis.title.text == "% of the arm's steps"


def test_interval_is_drawn_from_the_round_that_has_one(tmp_path):
    question = MadeUp(tmp_path, [1.9, 1.89], resolve=0.001).after(6)
    chart = page.difference_chart(question)
    estimates = [look.estimates["a", "b"] for look in question.looks]
    band, line = traces(chart, 1)
    np.testing.assert_allclose(line.y, [e.d for e in estimates], rtol=1e-5)
    assert [*band.x] == [4, 5, 6, 6, 5, 4]
    np.testing.assert_allclose(band.y[:3], [e.high for e in estimates[3:]], rtol=1e-5)
    np.testing.assert_allclose(band.y[3:], [e.low for e in estimates[:2:-1]], rtol=1e-5)
    assert [trace.y[0] for trace in traces(chart, None)] == pytest.approx([0, -0.001, 0.001])
    early = page.difference_chart(MadeUp(tmp_path, [1.9, 1.89]).after(2))
    (points,) = traces(early, 1)
    assert len(points.y) == 2
    assert not np.isfinite(points.error_y.array).any()


def test_several_arms_are_shown_against_the_best_one_as_long_as_they_had_runs(tmp_path):
    question = MadeUp(tmp_path, [2.5, 1.9, 1.8, 1.89, 2.3]).after(30)
    chart = page.difference_chart(question)
    assert words.ranked(question)[0] == "c"
    assert traces(chart, 2) == []
    for number, label in ((0, "a"), (1, "b"), (3, "d"), (4, "e")):
        line = traces(chart, number)[-1]
        assert len(line.y) == len(question.runs[label])
        assert line.y[-1] < 0  # below 0 an arm is worse
        assert line.error_y.array[-1] > 0
    assert "an arm is better than c" in chart.note
    table = page.arms_table(question)
    assert [row[1] for row in table.rows] == [f"{len(runs)}" for runs in question.runs.values()]
    assert f"a is worse than {question.looks[-1].dropped['a']} and gets no more runs." in table.note


def test_more_of_a_speed_is_better_and_the_axis_has_its_unit(tmp_path):
    question = MadeUp(tmp_path, [1.9, 2.5], figure="tokens_per_s").after(4)
    chart = page.difference_chart(question)
    assert traces(chart, 1)[-1].y[-1] > 0
    assert chart.figure.layout.yaxis.title.text == "difference in tokens_per_s (%)"
    assert page.pairs_table(question).rows[0][-1] == "b is better"


def test_page_is_written_before_and_after_each_round(tmp_path, monkeypatch):
    asked: list[str] = []

    def write(question: Question, sentence: str, *rest: Any) -> None:
        asked.append(sentence)
        page.write_page(question, sentence, *rest)

    monkeypatch.setattr(ask, "write_page", write)
    question = MadeUp(tmp_path, [1.9, 1.5])
    ask.ask(question, page=str(tmp_path / "new" / "page.html"))
    assert len(asked) == 1 + len(question.looks)
    html = (tmp_path / "new" / "page.html").read_text(encoding="utf-8")
    assert f"<h1>{asked[-1]}</h1>" in html
    assert asked[-1].startswith("b is better by ")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["page.html"]


def test_what_keeps_the_page_from_being_written_is_said_before_the_first_run(tmp_path, monkeypatch):
    question = MadeUp(tmp_path, [1.9, 1.5])
    with pytest.raises(OSError, match="cannot write") as refused:
        ask.ask(question, page=str(tmp_path))
    assert "\n" not in str(refused.value)
    plotly_js.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ValueError, match="pip install"):
        ask.ask(question, page=str(tmp_path / "page.html"))
    assert question.looks == []


SEEN = """({title: document.title, width: document.documentElement.scrollWidth,
  svg: [...document.querySelectorAll(".plotly-graph-div")].filter(p => p.querySelector(".trace")).map(p => p.id),
  rows: document.querySelectorAll("main > .table tbody tr").length})"""


@needs_browser
@pytest.mark.parametrize("rounds", [0, 1, 2, 30])
def test_page_is_drawn_after_any_round_and_hostile_arms_are_text(rounds, browser: Browser, tmp_path):
    question = MadeUp(tmp_path, [2.5, 1.9, 1.8, 1.89, math.nan], resolve=0.01).after(rounds)
    sentence = words.answer(question)[0] if rounds else EVIL
    page.write_page(question, sentence, tmp_path / "page.html", EVIL)
    tab = browser.open((tmp_path / "page.html").as_uri(), 390)
    seen = tab.run(SEEN)
    assert tab.console() == []
    assert seen["svg"] == (["val_loss", "difference"] if rounds else [])
    assert seen["rows"] == (15 if rounds else 5)
    assert seen["width"] == 390
    assert seen["title"] == " or ".join(arm.what for arm in question.arms) + "?"
    tab.close()
