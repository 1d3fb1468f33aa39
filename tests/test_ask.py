"""bench/ask.py: questions answered by real runs of a tiny model, and from made-up ones."""

from __future__ import annotations

import difflib
import json
import math
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TINY, flags, raises_one_line, shell, until

from bench import ask
from bench.ask import Arm, check_out, folder_for_worktrees
from deskgpt.errors import ConfigError
from deskgpt.logger import RunLog

ASKED = [
    q["command"]
    for q in json.loads((ROOT / "bench/answers.json").read_text())["questions"]
    if "bench/ask.py" in q["command"]
]
MODEL = flags(**TINY | {"n_layer": 1, "max_iters": 20, "eval_tokens": 512, "learning_rate": 6e-4})
BETTER = ["--b", "--learning_rate=3e-2"]  # than 6e-4, by far
CANNOT_RUN = {
    "* float('nan')": "is broken",
    "* missing": "name 'missing' is not defined",
    "+": "SyntaxError",
}


def patch_of(path: str, old: str, new: str, folder: Path) -> str:
    """Return the path of a patch that replaces a text in a file of the repository."""
    before = (ROOT / path).read_text()
    assert old in before
    after = before.replace(old, new).splitlines(True)
    patch = folder / f"{Path(path).stem}.patch"
    lines = difflib.unified_diff(before.splitlines(True), after, f"a/{path}", f"b/{path}")
    patch.write_text("".join(lines))
    return str(patch)


def command(data: Path, ledger: Path, *words: str) -> list[str]:
    return ["bench/ask.py", *MODEL, f"--dataset={data}", f"--ledger={ledger}", *words]


def runs_in(ledger: Path) -> dict[str, float]:
    """Return when each finished run ended, by its folder."""
    return {path.parent.name: path.stat().st_mtime for path in ledger.glob("runs/*/result.json")}


@pytest.fixture(scope="module")
def ledger(tmp_path_factory) -> Path:
    """Of all questions: each run takes a second, and most questions have the same arm a."""
    return Path(tmp_path_factory.mktemp("ledger"))


@pytest.fixture
def asking(python, chars, script, monkeypatch) -> Callable[..., dict[str, Any]]:
    """Return a function that asks and returns the answer of --json; runs start in a moment."""
    monkeypatch.setattr(sys, "executable", str(python))

    def answer(ledger: Path, *words: str) -> dict[str, Any]:
        done = script(*command(chars, ledger, "--json", *words))
        found: dict[str, Any] = json.loads(done.out)
        assert found["status"] == done.code, done.err
        return found

    return answer


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "verdicts"),
    [
        (BETTER, ["better"]),
        # Two splits of one step
        (["--b", "--batch_size=2 --gradient_accumulation_steps=2"], ["same"]),
        (["--b", "COMMENT", "--min_effect=0.02"], ["same"]),
        # After 20 steps a barely beats guessing.
        (["--b", "--learning_rate=1e30"], ["worse", "open"]),
    ],
)
def test_planted_effects_are_found_and_asked_again_nothing_runs(
    asking, ledger, tmp_path, words, verdicts
):
    if "COMMENT" in words:
        line = (ROOT / "model.py").read_text().splitlines()[-1]
        words = ["--b", patch_of("model.py", line, f"{line}  # a comment", tmp_path), words[-1]]
    found = asking(ledger, *words)
    assert found["verdict"] in verdicts
    assert ("diverged and count as guessing" in found["sentence"]) == ("1e30" in str(words))
    assert ("interval +0.0000 to +0.0000" in found["sentence"]) == (verdicts == ["same"])
    runs = runs_in(ledger)
    assert asking(ledger, *words) == found
    assert runs_in(ledger) == runs
    assert [path.name for path in ledger.iterdir()] == ["runs"]  # no code


@pytest.mark.nightly
@pytest.mark.parametrize(("added", "why"), CANNOT_RUN.items())
def test_arm_that_cannot_run_is_an_error_and_no_answer(chars, script, tmp_path, added, why):
    before = (ROOT / "model.py").read_bytes()
    line = "return self.lm_head(x)"
    patch = patch_of("model.py", line, f"{line} {added}", tmp_path)
    done = script(*command(chars, tmp_path, "--b", patch))
    assert done.code == 2
    assert why in done.err.splitlines()[-1]
    assert "Traceback" not in done.err
    assert (ROOT / "model.py").read_bytes() == before
    assert str(tmp_path) not in shell("git", "worktree", "list").stdout


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="process groups")
def test_killed_question_resumes_beside_another_one_and_no_run_is_made_twice(
    asking, ledger, tmp_path, chars
):
    undisturbed = asking(ledger, *BETTER)
    words = [sys.executable, *command(chars, tmp_path, "--budget=1s")]
    process = subprocess.Popen([*words, *BETTER], cwd=ROOT, process_group=0)
    until(lambda: bool(runs_in(tmp_path)))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kept = runs_in(tmp_path)
    words += ["--b", "--learning_rate=2e-2"]
    other = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL)
    found = asking(tmp_path, *BETTER)
    assert found["values"] == undisturbed["values"]
    assert other.wait() == 3
    assert kept.items() <= runs_in(tmp_path).items()
    assert len(runs_in(tmp_path)) == 2 * found["n"] + 1


@pytest.mark.slow
def test_what_cannot_be_asked_is_one_line_before_anything_runs(tmp_path, python, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(python))
    arms = ["--learning_rat=3", "commit:nonsense", "--seed=3", "1.88"]
    arms += ["commit:--output=/tmp/x", "--learning_rate=6e-4"]
    wrong = [["--b", arm] for arm in arms]
    wrong += [[], [*BETTER, "--budget=abc"]]
    with folder_for_worktrees(tmp_path) as below:
        for i, words in enumerate(wrong):
            with raises_one_line(kind=ConfigError):
                ask.make_arms(*ask.read_arguments([*MODEL, *words]), below / f"{i}")


@pytest.mark.slow
def test_defect_has_status_2_since_1_is_an_answer(script, monkeypatch):
    assert script("bench/ask.py", *BETTER, "--ledger=pyproject.toml").code == 2
    monkeypatch.setattr("bench.ask.make_arm", lambda *_: 1 // 0)
    assert script("bench/ask.py", *BETTER).code == 2


@pytest.mark.slow
@pytest.mark.parametrize("command", ASKED)
def test_stored_questions_can_be_asked_and_compare_equal_work(
    command, python, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "executable", str(python))
    with folder_for_worktrees(tmp_path) as below:
        arms = ask.make_arms(*ask.read_arguments(shlex.split(command)[2:]), below)
    sizes = ("batch_size", "gradient_accumulation_steps", "block_size", "max_iters")
    assert len({math.prod(arm.settings[size] for size in sizes) for arm in arms}) == 1


def test_code_has_a_digest_of_all_that_a_run_uses(tmp_path):
    kernels = "deskgpt/cpu_kernels.cpp"
    line = (ROOT / kernels).read_text().splitlines()[0]
    changed = patch_of(kernels, line, f"// changed\n{line}", tmp_path)
    docs = patch_of("docs/asking.md", "# Asking", "# Changed\n# Asking", tmp_path)
    wrong = tmp_path / "wrong.patch"
    wrong.write_text(Path(changed).read_text().replace(line, "int other;"))
    os.utime(ROOT / "README.md")  # a file that was only touched has not changed
    with folder_for_worktrees(tmp_path) as below:
        own = check_out(below / "own", "", [])
        assert check_out(below / "docs", "", [docs]) == own
        assert check_out(below / "changed", "", [changed]) != own
        check_out(below / "commit", "HEAD", [])
        assert (below / "commit" / "train.py").exists()
        with pytest.raises(ConfigError, match="does not apply"):
            check_out(below / "wrong", "", [str(wrong)])
    assert [*tmp_path.glob("question-*")] == []


def test_data_have_a_digest_of_their_content(chars, tmp_path):
    folder = shutil.copytree(chars, tmp_path / "copy")
    before = ask.data_digest(folder)
    assert before == ask.data_digest(chars)
    content = (folder / "val.bin").read_bytes()
    (folder / "val.bin").write_bytes(content[:-1] + b"\1")
    assert ask.data_digest(folder) != before


def test_run_diverged_by_an_event_and_not_by_words_of_a_message(tmp_path, monkeypatch):
    arm = Arm("b", "", tmp_path, "code", {"max_iters": 9})
    log = RunLog(tmp_path / "log.jsonl")
    message = "cannot write /nan/ckpt.pt: the disk is full"

    def fails(*_):
        log.write(kinds.pop(), iter=3, loss=math.nan)
        return 1, message

    monkeypatch.setattr(ask, "train", fails)
    kinds = ["diverged", "bad_step"]
    with raises_one_line(message):
        ask.train_to_the_end(arm, 1, tmp_path)
    assert ask.has_diverged(ask.train_to_the_end(arm, 1, tmp_path))


def made_up(of_b: float, budget_s: float, digests: str = "xx") -> list[tuple[dict[str, Any], str]]:
    """Return the rounds of a question whose runs end at 3.6 for a and at of_b for b, and noise."""
    draw = random.Random(0)

    def run(arm: Arm, seed: int) -> dict[str, Any]:
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
    for budget_s, n in ((100.0, 5), (60.0, 3), (1.0, 1)):
        rounds = made_up(3.6, budget_s)
        assert len(rounds) == n
        never = "no answer comes before 4: raise it to --budget=80s" in rounds[0][1]
        assert never == (n < 4)
        assert rounds[-1][0]["status"] == 3


def test_runs_that_were_judged_on_different_windows_are_refused():
    with raises_one_line("on different windows", kind=ConfigError):
        made_up(3.6, 100.0, digests="xy")
