"""bench/ask.py: questions answered by real runs of a tiny model, and their prices and answers from made-up ones."""

from __future__ import annotations

import difflib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, Finished, flags

from bench import ask
from bench.asking import held_out, words
from bench.asking.arms import Arm, make_arm
from bench.asking.band import make_band
from bench.asking.ledger import Ledger, listing
from bench.asking.question import Question
from bench.asking.running import Place
from bench.asking.statistics import PILOT
from data.text.prepare import prepare
from data.token_files import read_tokens
from deskgpt.run import loss_band
from deskgpt.system.errors import ConfigError

MODEL = flags(n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=4, gradient_accumulation_steps=1)
MODEL += flags(
    max_iters=20, eval_tokens=512, warmup_iters=2, compile=False, device="cpu", dtype="float32", attention="flash"
)
PYTHON = sys.executable
BETTER = ["--b", "--learning_rate=3e-2"]  # than 6e-4, by far


def patch_of_loss(folder: Path, factor: str) -> Path:
    """A patch after which a step's loss is multiplied by factor."""
    old = (ROOT / "train.py").read_text()
    new = old.replace("runner.backward(loss)", f"runner.backward({factor} * loss)")
    lines = difflib.unified_diff(old.splitlines(True), new.splitlines(True), "a/train.py", "b/train.py")
    (folder / "loss.patch").write_text("".join(lines))
    return folder / "loss.patch"


class Asking:
    """Asks in this process; the runs are processes of a Python that has imported torch already."""

    def __init__(self, data: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
        self.common = [*MODEL, f"--dataset={data}", f"--ledger={folder}"]
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.capfd = capfd

    def __call__(self, *words: str) -> tuple[int, str]:
        """(exit status, what was printed)"""
        self.monkeypatch.setattr(sys, "argv", ["bench/ask.py", *self.common, *words])
        status = ask.main()
        return status, self.capfd.readouterr().out

    def found(self, *words: str) -> dict[str, Any]:
        return json.loads(self(*words, "--json")[1].splitlines()[-1])

    def runs(self) -> list[dict[str, Any]]:
        return [e for e in Ledger(self.folder).events if e["event"] == "run"]

    def with_ledger(self, folder: Path) -> Asking:
        """With one that knows no run."""
        self.common.append(f"--ledger={folder}")
        self.folder = folder
        return self


@pytest.fixture(scope="session")
def ledger(tmp_path_factory) -> Path:
    """Of all questions: each run takes a second, and most questions have the same arm a."""
    return tmp_path_factory.mktemp("ledger")


@pytest.fixture
def asking(python, chars, ledger, monkeypatch, capfd) -> Asking:
    monkeypatch.setattr(sys, "executable", str(python))
    return Asking(chars, ledger, monkeypatch, capfd)


@pytest.mark.nightly
def test_planted_effect_is_found_once_and_for_all(asking):
    found = asking.found(*BETTER)
    assert (found["status"], found["verdict"]) == (0, "better")
    assert 0 < found["pairs"][0]["low"] < found["pairs"][0]["d"] < found["pairs"][0]["high"]
    runs = asking.runs()
    assert len({run["key"] for run in runs}) == len(runs)
    assert asking.found(*BETTER) == found
    assert asking.runs() == runs
    with open(asking.folder / "ledger.jsonl", "a") as file:
        file.write('[]\n{"event": "torn')
    asking.common = [f"--ledger={asking.folder}"]
    listed = asking()[1]
    assert found["sentence"] in listed
    assert f"b ({BETTER[1]}) is better than a" in listed


@pytest.mark.nightly
def test_worse_arm_and_no_difference_are_answers(asking):
    found = asking.found("--a", "--learning_rate=3e-2", "--b", "--learning_rate=6e-4")
    assert (found["status"], found["verdict"]) == (1, "worse")
    found = asking.found("--b", "--learning_rate=6.0001e-4", "--min_effect=0.5")
    assert (found["status"], found["verdict"]) == (1, "same")


@pytest.mark.slow
def test_two_splits_of_one_step_are_judged_on_the_same_windows_and_are_the_same(asking, text, tmp_path):
    prepare(text[:20_000], tmp_path / "few", "char", "test text")
    asking.with_ledger(tmp_path / "ledger")
    words = [f"--dataset={tmp_path / 'few'}", "--eval_tokens=0", "--eval_iters=3"]
    found = asking.found(*words, "--b", "--batch_size=2 --gradient_accumulation_steps=2")
    (pair,) = found["pairs"]
    assert (found["status"], found["verdict"], found["rounds"]) == (1, "same", 4)
    assert max(abs(pair[name]) for name in ("d", "low", "high")) < 5e-5
    part = held_out.val_tokens(next((asking.folder / "data").iterdir()))
    assert {run["settings"]["eval_tokens"] for run in asking.runs()} == {part}  # all of what is set aside


@pytest.mark.nightly
def test_patch_runs_in_a_copy_and_a_run_that_diverges_counts_as_guessing(asking, tmp_path):
    before = (ROOT / "train.py").read_bytes()
    found = asking.found("--b", str(patch_of_loss(tmp_path, "float('nan')")))
    assert found["arms"][1]["diverged"] == len(found["arms"][1]["values"]) > 0
    assert "diverged and count as guessing" in found["sentence"]
    assert found["status"] in (1, 3)  # a barely beats guessing after 20 steps
    assert (ROOT / "train.py").read_bytes() == before


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="process groups")
def test_killed_question_goes_on_without_a_lost_run(asking, tmp_path):
    whole = asking.found(*BETTER)
    asking.with_ledger(tmp_path / "killed")
    command = [PYTHON, "bench/ask.py", *asking.common, *BETTER]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, process_group=0)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (asking.folder.exists() and asking.runs()):
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    found = asking.found(*BETTER)
    assert [arm["values"] for arm in found["arms"]] == [arm["values"] for arm in whole["arms"]]
    keys = [run["key"] for run in asking.runs()]
    assert len(keys) == len(set(keys))


@pytest.mark.nightly
def test_two_questions_at_once_on_a_new_ledger_share_their_runs(asking, chars, tmp_path):
    command = [PYTHON, "bench/ask.py", *MODEL, f"--dataset={chars}", f"--ledger={tmp_path / 'new'}", "--budget=1s"]
    words = (BETTER, ["--b", "--learning_rate=2e-2"])
    both = [subprocess.Popen([*command, *more], cwd=ROOT, stderr=subprocess.PIPE) for more in words]
    for process in both:
        assert "does not fit" in process.communicate()[1].decode()
        assert process.returncode == 2
    runs = asking.with_ledger(tmp_path / "new").runs()
    assert len({run["key"] for run in runs}) == len(runs) == 9  # three of each of three arms


def test_other_seeds_are_another_question_and_more_budget_is_not(asking):
    def digest(*words: str) -> str:
        return ask.question_of(*ask.read_arguments([*asking.common, *BETTER, *words]), print).digest

    assert digest() == digest("--budget=3h") != digest("--seed=5")


@pytest.mark.slow
def test_band_of_a_config_is_made_and_found_by_a_run_with_another_seed(asking, chars, tmp_path, monkeypatch):
    monkeypatch.setattr(loss_band, "FOLDER", tmp_path)
    arm = make_arm("a", "", [*MODEL, f"--dataset={chars}", "--max_iters=4"], tmp_path / "code")
    place = Place(Ledger(tmp_path / "ledger"), chars, "cpu", evaluates_once=False)
    path = make_band("config/tiny.py", arm, place)
    record = json.loads(path.read_text())
    assert record["seeds"] == [*range(1338, 1346)]
    own = record["experiment"]
    band = loss_band.band_of(arm.settings | {"seed": 5}, own["val_sha256"], own["train_tokens"])
    assert band is not None
    assert band.losses == {int(step): runs for step, runs in record["val_losses"].items()}
    assert {*band.losses} == {0, 4}
    assert band.verdict({4: band.losses[4][3]}).startswith("as usual")
    assert band.verdict({4: band.losses[4][3] + 1}).startswith("unusual")


def test_lines_of_a_ledger_that_lack_something_are_left_out(tmp_path):
    ledger = Ledger(tmp_path)
    whole: dict[str, Any] = {
        "question": "q",
        "date": "d",
        "config": "c",
        "sentence": "s",
        "rounds": 2,
        "verdict": "same",
    }
    whole |= {"arms": [{"label": "a", "what": ""}], "price": {"low": 2, "high": 3}}
    whole["pairs"] = [{"first": "a", "second": "b", "d": 0.1, "e": 1e9}]
    ledger.add("answer", **whole)
    parts: list[dict[str, Any]] = [
        {"pairs": [{}]},
        {"arms": [1]},
        {"price": 3},
        {"price": {"high": "x"}},
        {"rounds": "1"},
    ]
    for part in [*parts, {"sentence": None}]:
        ledger.add("answer", **whole | part | {"question": str(part)})
    for name in ("run", "answer"):
        ledger.add(name)
    ledger.file.write_text(ledger.file.read_text() + '5\n[]\n{"event": [1]}\n')
    ledger = Ledger(tmp_path)
    assert ledger.run("k") is None
    assert ledger.repeats({}, 1, "w", set()) == []
    assert listing(ledger).startswith("d  c  s\n1 of 1 questions kept the price")


def test_what_is_set_aside_is_not_trained_on(chars, tmp_path):
    folder = held_out.set_aside(chars, tmp_path)
    parts = [read_tokens(folder / "train.bin"), read_tokens(folder / "val.bin")]
    assert np.array_equal(np.concatenate(parts), read_tokens(chars / "train.bin"))


WRONG = ["--learning_rat=3", "--learning_rate=6e-4", "commit:nonsense", "--seed=3", "--block_size=32", "1.88", "--x='1"]


def test_what_cannot_be_asked_is_one_line_before_anything_runs(asking, tmp_path):
    asking.with_ledger(tmp_path)
    wrong = [[], ["--vary", "learning_rate=1e-3"], ["--band"], [*BETTER, "--budget=abc"], [*BETTER, "--min_effect=-1"]]
    for asked in [*wrong, *(["--b", text] for text in WRONG)]:
        with pytest.raises(ConfigError) as refused:
            asking(*asked)
        assert "\n" not in str(refused.value)
    assert asking.runs() == []


@pytest.mark.nightly
def test_arm_that_cannot_run_is_no_answer(asking, script, tmp_path):
    done: Finished = script("bench/ask.py", *asking.common, "--b", patch_of_loss(tmp_path, "missing"))
    assert done.code == 2
    assert done.err.splitlines()[-1].startswith("error: b (")
    assert "name 'missing' is not defined" in done.err


def test_patches_and_commits_are_taken_or_refused_and_code_has_a_digest_of_its_own(tmp_path):
    path = patch_of_loss(tmp_path, "2")
    as_it_is, patched = (make_arm("a", text, MODEL, tmp_path / "code") for text in ("", str(path)))
    assert as_it_is.code != patched.code
    assert as_it_is.code == make_arm("c", "--beta1=0.8", MODEL, tmp_path / "code").code
    wrong = tmp_path / "wrong.patch"
    wrong.write_text(path.read_text().replace("runner.backward(loss)", "runner.forward(loss)"))
    with pytest.raises(ConfigError, match="does not apply"):
        make_arm("b", str(wrong), MODEL, tmp_path / "code")
    assert make_arm("b", "commit:HEAD", [], tmp_path / "code").folder.joinpath("train.py").exists()
    with pytest.raises(ConfigError, match="not a commit"):
        make_arm("b", f"commit:--output={wrong}", MODEL, tmp_path / "code")
    assert wrong.read_text()  # as an option of git archive it would have emptied the file


# ---- made-up runs: nothing is trained -------------------------------------------------------------------------


class MadeUp(Question):
    """A question whose runs end at the losses that it is given, and noise."""

    def __init__(self, folder: Path, losses: Sequence[float], **given: Any) -> None:
        texts = ["", "--n_layer=2", "x.patch", "commit:HEAD~3"]
        arms = [Arm("abcd"[i], texts[i], [], folder, f"code {i}", {"max_iters": 100}) for i in range(len(losses))]
        given = {"min_effect": None, "budget_s": 3600.0, "first_seed": 1} | given
        super().__init__(arms, Place(Ledger(folder / "ledger"), folder, "cpu"), **given)
        self.losses = losses
        self.draw = random.Random(0)

    def do_round(self, n: int) -> None:
        for label in self.alive:
            last = self.losses["abcd".index(label)] + self.draw.gauss(0, 0.03)
            batches = [last + math.sin(i) for i in range(10)]
            self.runs[label].append({"outcome": "ended", "val_loss": last, "val_batches": batches, "wall_s": 10.0})

    def after(self, rounds: int) -> MadeUp:
        """The question after so many rounds, or fewer where it is decided sooner."""
        for _, _ in zip(range(rounds), self.answered(), strict=False):
            pass
        return self


def test_budget_is_refused_only_where_the_low_end_of_the_price_does_not_fit(tmp_path):
    with pytest.raises(ConfigError, match="does not fit"):
        ask.ask(MadeUp(tmp_path, [1.9, 1.8], min_effect=1e-6, budget_s=600.0))
    question = MadeUp(tmp_path, [1.9, 1.8], min_effect=0.05).after(PILOT)
    assert question.price_line()
    low = int(question.price["low"])
    question.budget_s = 10.0 * (low - PILOT) - 5
    with pytest.raises(ConfigError, match="does not fit"):
        question.price_line()


def test_arms_that_cannot_win_get_no_more_runs_and_the_answer_names_all(tmp_path):
    question = MadeUp(tmp_path, [2.5, 1.9, 2.1, 1.88], min_effect=0.001).after(9)
    assert question.alive == ["b", "d"]
    assert len(question.runs["a"]) < len(question.runs["d"])
    sentence, status, _ = words.answer(question)
    assert status == 3
    assert sentence.startswith("Not enough yet: d is lower than b by ")
    assert sentence.endswith("; out: c, a.")


def test_runs_that_were_judged_on_different_windows_are_refused(tmp_path):
    question = MadeUp(tmp_path, [1.9, 1.9])
    question.runs = {"a": [{"eval_digest": "x"}, {}], "b": [{"eval_digest": None}]}
    question.check_judgement()  # older code does not say it
    question.runs["b"].append({"eval_digest": "y"})
    with pytest.raises(ConfigError, match="judged on different windows"):
        question.check_judgement()
