"""The lines, the price and the page of a question, from made-up runs: nothing is trained."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import ask
from bench.asking import page, words
from bench.asking.arms import Arm
from bench.asking.ledger import Ledger
from bench.asking.question import Question
from bench.asking.running import Place
from deskgpt.system.errors import ConfigError

EVIL = "</script><script>document.title='x'</script><img src=//example.com/a.png onerror=alert(1)>%{y}"
CURVE = {0: 1.5, 10: 0.5, 50: 0.1, 100: 0.0}  # a val loss above the last one, by step


class MadeUp(Question):
    """A question whose runs end at the losses that it is given, and noise."""

    def __init__(self, folder: Path, losses: Sequence[float], **given: Any) -> None:
        texts = ["", "--n_layer=2", "x.patch", "commit:HEAD~3", EVIL]
        arms = [Arm("abcde"[i], texts[i], [], folder, f"code {i}", {"n_layer": 1}, 100) for i in range(len(losses))]
        given = {"min_effect": None, "budget_s": 3600.0, "first_seed": 1} | given
        super().__init__(arms, Place(Ledger(folder / "ledger"), folder, "cpu"), **given)
        self.losses = losses
        self.draw = random.Random(0)

    def do_round(self, n: int) -> None:
        for label in self.alive():
            self.runs[label].append(self.made_up_run(self.losses["abcde".index(label)]))

    def made_up_run(self, loss: float) -> dict[str, Any]:
        """loss: NaN for one that diverged."""
        ended = not math.isnan(loss)
        last = loss + self.draw.gauss(0, 0.03) if ended else 4.17
        curve = [[step, last + above] for step, above in CURVE.items()] if ended else [[0, last]]
        run = {"outcome": "ended" if ended else "diverged", "val_loss": last, "curve": curve, "wall_s": 10.0}
        return run | {"step_ms": 10 * last, "mfu": last / 10, "tokens_per_s": 1e5 * last}

    def after(self, rounds: int) -> MadeUp:
        """The question after so many rounds, or fewer where it is decided sooner."""
        for _, _ in zip(range(rounds), self.answered(), strict=False):
            pass
        return self


def test_price_is_renewed_in_a_line_after_each_round_that_decides_nothing(tmp_path, capsys):
    question = MadeUp(tmp_path, [1.9, 1.87], min_effect=0.02)
    ask.ask(question)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round")]
    assert len(lines) == sum(look.verdict == "open" for look in question.looks) > 4
    assert all("b leads a by" in line for line in lines[4:])
    assert all("0.02 nats costs" in line and "runs of each arm (80%)" in line for line in lines[1:])


def test_budget_is_refused_only_where_the_low_end_of_the_price_does_not_fit(tmp_path):
    with pytest.raises(ConfigError, match="does not fit"):
        ask.ask(MadeUp(tmp_path, [1.9, 1.8], min_effect=1e-6, budget_s=600.0))
    question = MadeUp(tmp_path, [1.9, 1.8], min_effect=0.05).after(2)
    question.budget_s = 100.0  # four more rounds
    assert "costs 5 to" in question.price_line()
    question.budget_s = 20.0
    with pytest.raises(ConfigError, match="does not fit"):
        question.price_line()


def test_arms_that_cannot_win_get_no_more_runs_and_the_answer_names_all(tmp_path):
    question = MadeUp(tmp_path, [2.5, 1.9, 2.1, 1.88], min_effect=0.001).after(8)
    assert question.looks[-1].alive == ["b", "d"]
    assert len(question.runs["a"]) < len(question.runs["d"])
    sentence, status, _ = words.answer(question)
    assert status == 3
    assert sentence.startswith("Not enough yet: d leads b by ")
    assert sentence.endswith("; out: a, c.")


def test_figures_other_than_losses_keep_their_digits_and_more_of_a_speed_is_better(tmp_path):
    for figure, best in (("mfu", "b"), ("tokens_per_s", "b"), ("step_ms", "a")):  # shares, by the logarithm
        question = MadeUp(tmp_path, [1.9, 2.9], figure=figure).after(6)
        a, b = (question.runs[label][0][figure] for label in "ab")
        assert f"{100 * abs(math.log(a / b)):.1f}"[:1] in words.so_far(question)
        assert words.answer(question)[2]["best"] == best
    assert words.number(MadeUp(tmp_path, [1, 1], figure="mfu"), 0.002646) == "0.002646"
    assert words.number(MadeUp(tmp_path, [1, 1], figure="tokens_per_s"), 123456.78) == "123,457"


def test_answer_says_where_gains_of_changes_are_open_and_where_arms_scatter_differently(tmp_path):
    question = MadeUp(tmp_path, [1.9, 1.7, 1.7, 1.5], together=True).after(5)
    assert "may gain more or less than the sum of each" in words.answer(question)[0]
    question = MadeUp(tmp_path, [1.9, 1.9]).after(5)
    for n, run in enumerate(question.runs["b"]):
        run["val_loss"] = 1.9 + n
    question.looks.append(question.look())
    assert "one scatters more than twice as much" in words.answer(question)[0]


def test_what_keeps_the_page_from_being_written_is_printed_before_the_first_run(tmp_path, monkeypatch):
    question = MadeUp(tmp_path, [1.9, 1.5])
    with pytest.raises(OSError, match="cannot write"):
        ask.ask(question, page=str(tmp_path))
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ValueError, match="pip install"):
        ask.ask(question, page=str(tmp_path / "page.html"))
    assert question.looks == []


def test_page_is_written_after_any_round_and_hostile_arms_are_text(tmp_path):
    for rounds in (0, 2, 30):
        question = MadeUp(tmp_path, [2.5, 1.9, 1.8, 1.89, math.nan], min_effect=0.01).after(rounds)
        page.write_page(question, words.answer(question)[0] if rounds else EVIL, tmp_path / "page.html", EVIL)
        html = (tmp_path / "page.html").read_text(encoding="utf-8")
        assert EVIL not in html
        assert html.count("<tr>") == 6
