"""bench/ask.py: questions answered by real runs of a tiny model, and from made-up ones."""

import json
import math
import os
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from conftest import ROOT, TINY, assert_refused, flags, nightly, raises_one_line, slow, until

from bench import ask
from bench.ask import Arm, check_out, folder_for_worktrees
from deskgpt.errors import ConfigError
from deskgpt.logger import RunLog

QUESTIONS = json.loads((ROOT / "bench/answers.json").read_text())["questions"]
ASKED = [q["command"] for q in QUESTIONS if "bench/ask.py" in q["command"]]
MODEL = flags(**TINY | {"n_layer": 1, "max_iters": 20, "eval_tokens": 512, "learning_rate": 6e-4})
BETTER = ["--b", "--learning_rate=3e-2"]  # than 6e-4, by far


def patch_of(path: str, folder: Path) -> str:
    """Return the path of a patch that adds a file to the repository."""
    patch = folder / f"{Path(path).stem}.patch"
    patch.write_text(f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+one line\n")
    return str(patch)


def command(data: Path, ledger: Path, *words: str) -> list[str]:
    return ["bench/ask.py", *MODEL, f"--dataset={data}", f"--ledger={ledger}", *words]


def runs_in(ledger: Path) -> dict[str, float]:
    """Return when each finished run ended, by its folder."""
    return {path.parent.name: path.stat().st_mtime for path in ledger.glob("runs/*/result.json")}


@pytest.fixture(scope="module")
def ledger(tmp_path_factory):
    """Of all questions: each run takes a second, and most questions have the same arm a."""
    return Path(tmp_path_factory.mktemp("ledger"))


@pytest.fixture
def asking(chars, script):
    """Return a function that asks and returns the answer of --json; runs start in a moment."""

    def answer(ledger, *words):
        done = script(*command(chars, ledger, "--json", *words))
        found = json.loads(done.out)
        assert found["status"] == done.code, done.err
        return found

    return answer


@nightly
@pytest.mark.parametrize(
    ("words", "verdicts"),
    [
        (BETTER, ["better"]),
        # Two splits of one step
        (["--b", "--batch_size=2 --gradient_accumulation_steps=2"], ["same"]),
        # After 20 steps a barely beats guessing.
        (["--b", "--learning_rate=1e30"], ["worse", "open"]),
    ],
)
def test_planted_effects_are_found_and_asked_again_nothing_runs(asking, ledger, words, verdicts):
    found = asking(ledger, *words)
    assert found["verdict"] in verdicts
    assert ("diverged and count as guessing" in found["sentence"]) == ("1e30" in str(words))
    runs = runs_in(ledger)
    assert asking(ledger, *words) == found
    assert runs_in(ledger) == runs
    assert [path.name for path in ledger.iterdir()] == ["runs"]  # no code


@pytest.mark.parametrize(
    ("last", "kind", "loss"),
    [(3.0, "end", 3.0), (3.0, "diverged", math.log(65)), (9.0, "diverged", 9)],
)
def test_result_is_the_last_loss_guessing_if_it_diverged_and_an_error_without_one(last, kind, loss):
    events = [{"event": "eval", "val_loss": x, "eval_digest": "x"} for x in (2.0, last)]
    start = {"event": "start", "model_args": {"vocab_size": 65}}
    arm = Arm("b", "a.patch", Path(), "", {})
    found = ask.result(arm, [start, *events, {"event": kind}])
    assert found == {"has_diverged": kind == "diverged", "val_loss": loss, "eval_digest": "x"}
    with raises_one_line("b (a.patch) is broken"):
        ask.result(arm, [start, {"event": kind}, {"event": "eval", "val_loss": None}])


def test_run_is_made_once_and_another_code_setting_seed_or_machine_makes_another(
    tmp_path, monkeypatch
):
    arm = Arm("a", "", Path(), "code", {"max_iters": 9})
    made = []
    monkeypatch.setattr(ask, "train_to_the_end", lambda arm, seed, out: made.append(seed))
    monkeypatch.setattr(ask, "result", lambda *_: {})
    for _ in range(2):
        for changed, seed, context in (
            (arm, 1, ["x"]),
            (replace(arm, code="other"), 1, ["x"]),
            (replace(arm, settings={}), 1, ["x"]),
            (arm, 2, ["x"]),
            (arm, 1, ["y"]),
        ):
            ask.run_once(changed, seed, tmp_path, context)
    assert len(made) == 5


@nightly
@pytest.mark.skipif(sys.platform != "linux", reason="process groups")
def test_killed_question_resumes_and_no_run_is_made_twice(asking, ledger, tmp_path, chars):
    words = [sys.executable, *command(chars, tmp_path, *BETTER)]
    process = subprocess.Popen(words, cwd=ROOT, process_group=0)
    until(lambda: bool(runs_in(tmp_path)))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kept = runs_in(tmp_path)
    found = asking(tmp_path, *BETTER)
    assert found["values"] == asking(ledger, *BETTER)["values"]
    assert kept.items() <= runs_in(tmp_path).items()
    assert len(runs_in(tmp_path)) == 2 * found["n"]


@slow
@pytest.mark.parametrize(
    "words",
    [
        ["--b", "--learning_rat=3"],
        ["--b", "nowhere.patch"],
        ["--b", "--seed=3"],
        ["--b", "--learning_rate=6e-4"],
        [],
    ],
)
def test_what_cannot_be_asked_is_one_line_before_anything_runs(script, chars, tmp_path, words):
    assert_refused(script(*command(chars, tmp_path, *words)))


@pytest.mark.parametrize("error", [ZeroDivisionError(), ValueError("a full disk"), SystemExit(1)])
def test_defect_has_status_2_since_1_is_an_answer(monkeypatch, error):
    def fails():
        raise error

    monkeypatch.setattr(ask, "main", fails)
    assert ask.exit_status() == 2


@slow
@pytest.mark.parametrize("command", ASKED)
def test_stored_questions_can_be_asked(command, tmp_path):
    with folder_for_worktrees(tmp_path) as below:
        ask.make_arms(*ask.read_arguments(shlex.split(command)[2:]), below)


def test_code_has_a_digest_of_all_that_a_run_uses(tmp_path):
    os.utime(ROOT / "README.md")  # a file that was only touched has not changed
    with folder_for_worktrees(tmp_path) as below:
        own = check_out(below / "own", [])
        assert check_out(below / "docs", [patch_of("docs/page.md", tmp_path)]) == own
        assert check_out(below / "changed", [patch_of("deskgpt/more.cpp", tmp_path)]) != own
    assert {path.suffix for path in tmp_path.iterdir()} == {".patch"}


def test_runs_are_known_by_the_content_of_their_data(tmp_path):
    settings = {"dataset": str(tmp_path), "device": "cpu"}
    found = []
    for name, content in (("bin", b"12"), ("mask", b"1"), ("mask", b"0"), ("bin", b"12")):
        (tmp_path / f"val.{name}").write_bytes(content)
        found.append(str(ask.context_of(settings)))
    assert len({*found}) == 3
    assert found[2] == found[3]


def test_run_diverged_by_an_event_and_not_by_words_of_a_message(tmp_path, monkeypatch):
    arm = Arm("b", "", tmp_path, "code", {"max_iters": 9})
    log = RunLog(tmp_path / "log.jsonl")
    message = "cannot write /nan/ckpt.pt: the disk is full"

    def fails(command, **_):
        log.write(kinds.pop(), iter=3, loss=math.nan)
        (tmp_path / "ckpt.pt").touch()
        resumes.append("--init_from=resume" in command)
        return Mock(communicate=lambda: ("", message))

    monkeypatch.setattr("subprocess.Popen", fails)
    kinds = ["diverged", "bad_step", "end"]  # of which the last comes first: it was stopped
    resumes: list[bool] = []
    for _ in range(2):
        with raises_one_line(message):
            ask.train_to_the_end(arm, 1, tmp_path)
    assert ask.has_diverged(ask.train_to_the_end(arm, 1, tmp_path))
    assert resumes == [False, True, True]


def made_up(of_b: float, budget_s: float, digests: str = "xx") -> list[tuple[dict[str, Any], str]]:
    """Return the rounds of a question whose runs end at 3.6 for a and at of_b for b, and noise."""
    draw = random.Random(0)
    asked = []

    def run(arm, seed):
        asked.append(seed)
        assert seed == 1 + (len(asked) - 1) // 2  # another one in each round, for both arms
        loss = (3.6 if arm.label == "a" else of_b) + draw.gauss(0, 0.03)
        found = {"has_diverged": False, "val_loss": loss, "wall_s": 10.0}
        return found | {"eval_digest": digests["ab".index(arm.label)]}

    arms = [Arm(label, "", Path(), f"code {label}", {"seed": 1}) for label in "ab"]
    return [*ask.run_rounds(arms, run, 0.01, budget_s)]


def test_budget_is_used_and_one_that_can_never_answer_is_named_before_it_is_spent():
    rounds = made_up(3.2, 240.0)
    answer, _ = rounds[-1]
    assert "pays 12 at 20.0s a round" in rounds[0][1]
    assert (answer["verdict"], answer["n"]) == ("better", len(rounds))
    low, high = answer["interval"]
    assert low < answer["difference"] < high < 0
    a, b = map(statistics.fmean, answer["values"].values())
    numbers = re.findall(r"[+-]?\d\.\d{4}", answer["sentence"])
    assert [*map(float, numbers)] == pytest.approx([b - a, low, high, a, b], abs=1e-4)
    assert "is better: val loss of b less that of a -" in answer["sentence"]
    for budget_s, n in ((100.0, 5), (60.0, 3), (1.0, 1)):
        rounds = made_up(3.6, budget_s)
        assert len(rounds) == n
        never = "no answer comes before 4: raise it to --minutes=2" in rounds[0][1]
        assert never == (n < 4)
        assert rounds[-1][0]["status"] == 3


def test_runs_that_were_judged_on_different_windows_are_refused():
    with raises_one_line("on different windows", kind=ConfigError):
        made_up(3.6, 100.0, digests="xy")
