"""The progress bar of a question, from made-up runs: nothing is trained."""

from __future__ import annotations

import io
import math
import random
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import ask
from bench.asking import words
from bench.asking.arms import Arm
from bench.asking.ledger import Ledger
from bench.asking.question import Question
from bench.asking.running import Place

EVIL = "</script><script>document.title='x'</script><img src=//example.com/a.png onerror=alert(1)>%{y}"
CURVE = {0: 1.5, 10: 0.5, 50: 0.1, 100: 0.0}  # a val loss above the last one, by step


class MadeUp(Question):
    """A question whose runs end at the losses that it is given, and noise."""

    def __init__(self, folder: Path, losses: Sequence[float], **given: Any) -> None:
        texts = ["", "--learning_rate=3e-2", "docs/hacks/value_embeddings.patch", "commit:HEAD~3", EVIL]
        arms = [Arm("abcde"[i], texts[i], [], folder, f"code {i}", {"n_layer": 1}, 100) for i in range(len(losses))]
        given = {"resolve": None, "budget_s": 3600.0, "first_seed": 1} | given
        super().__init__(arms, Place(Ledger(folder / "ledger"), folder, "cpu"), **given)
        self.losses = losses
        self.draw = random.Random(0)

    def do_round(self, n: int, pool: ThreadPoolExecutor) -> None:
        for label in self.looks[-1].alive if self.looks else list(self.runs):
            self.runs[label].append(self.made_up_run(self.losses["abcde".index(label)]))

    def made_up_run(self, loss: float) -> dict[str, Any]:
        """loss: NaN for one that diverged."""
        ended = not math.isnan(loss)
        last = loss + self.draw.gauss(0, 0.03) if ended else 4.17
        curve = [[step, last + above] for step, above in CURVE.items()] if ended else [[0, last]]
        run = {"outcome": "ended" if ended else "diverged", "val_loss": last, "curve": curve, "reused": True}
        return run | {"wall_s": 10.0, "step_ms": 10 * last, "mfu": last / 10, "tokens_per_s": 1e5 * last}

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
    ask.ask(question, anyway=False)
    bars = re.findall(r"\r(b leads by [^:]*): +\d+%", terminal.getvalue())
    assert bars[0] == f"b leads by {question.looks[0].estimates['a', 'b'].d:.4f} nats"
    e = question.looks[-1].estimates["a", "b"]
    assert bars[-1] == f"b leads by {e.d:.4f} ± {e.half:.4f} nats"
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round")]
    assert len(lines) == len(question.looks) - 1  # none after the first round, which knows no noise
    assert lines[-1].startswith(f"round {e.n}: b leads by {e.d:.4f} ± {e.half:.4f} nats (a 1.")


def test_arms_that_cannot_win_are_named_after_the_two_best_ones(tmp_path):
    question = MadeUp(tmp_path, [2.5, 1.9, 2.1, 1.88], resolve=0.001).after(6)
    assert question.looks[-1].alive == ["b", "d"]
    assert re.fullmatch(r"d leads b by 0\.\d{4} ± 0\.\d{4} nats; out: a, c", words.so_far(question))
    sentence = words.answer(question)[0]
    assert sentence.startswith("Not enough yet, about ")
    assert words.so_far(question) in sentence


def test_figures_other_than_losses_keep_their_digits(tmp_path):
    assert "± 0.00" in words.so_far(MadeUp(tmp_path, [1.9, 1.92], figure="mfu").after(4))
    assert words.so_far(MadeUp(tmp_path, [1.9, 2.9], figure="tokens_per_s").after(1)).endswith(" tokens/s")
    assert words.number(MadeUp(tmp_path, [1, 1], figure="mfu"), 0.002646) == "0.002646"
    assert words.number(MadeUp(tmp_path, [1, 1], figure="tokens_per_s"), 123456.78) == "123,456.8"
