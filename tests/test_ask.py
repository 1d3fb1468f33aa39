"""bench/ask.py: questions answered by real runs of a tiny model, and their costs and answers from made-up ones."""

from __future__ import annotations

import difflib
import json
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
from conftest import ROOT, TINY, flags, shell

from bench import ask
from bench.asking import held_out
from bench.asking.arms import Arm, folder_for_worktrees, make_arm
from bench.asking.ledger import Ledger
from bench.asking.question import Question
from bench.asking.running import result
from bench.asking.statistics import PILOT
from data.token_files import read_tokens
from deskgpt.run import loss_band
from deskgpt.system.errors import ConfigError

MODEL = flags(**TINY | {"n_layer": 1, "max_iters": 20, "eval_tokens": 512, "learning_rate": 6e-4})
PYTHON = sys.executable
BETTER = ["--b", "--learning_rate=3e-2"]  # than 6e-4, by far
LOGITS = "return self.lm_head(x)"


def patch_of(path: str, old: str, new: str, folder: Path) -> Path:
    """Return a patch that replaces a text in a file of the repository."""
    before = (ROOT / path).read_text()
    assert old in before
    after = before.replace(old, new)
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), f"a/{path}", f"b/{path}")
    patch = folder / f"{Path(path).stem}.patch"
    patch.write_text("".join(lines))
    return patch


class Asking:
    """Asks in this process; the runs are processes of a Python that has imported torch already."""

    def __init__(self, data: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
        self.common = [*MODEL, f"--dataset={data}", f"--ledger={folder}"]
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.capfd = capfd

    def __call__(self, *words: str) -> tuple[int, str]:
        """Return (exit status, what was printed)."""
        self.monkeypatch.setattr(sys, "argv", ["bench/ask.py", *self.common, *words])
        status = ask.main()
        return status, self.capfd.readouterr().out

    def found(self, *words: str) -> dict[str, Any]:
        return json.loads(self(*words, "--json")[1].splitlines()[-1])

    def runs(self) -> list[dict[str, Any]]:
        return [e for e in Ledger(self.folder).events if e["event"] == "run"]

    def with_ledger(self, folder: Path) -> Asking:
        """Use a ledger that knows no run."""
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


# ---- real runs -----------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "status", "verdicts"),
    [
        (BETTER, 0, ["better"]),
        (["--a", "--learning_rate=3e-2", "--b", "--learning_rate=6e-4"], 1, ["worse"]),
        (["--b", "--batch_size=2 --gradient_accumulation_steps=2"], 1, ["same"]),  # two splits of one step
        (["--b", "--learning_rate=1e30"], None, ["worse", "not enough yet"]),  # after 20 steps a barely beats guessing
    ],
)
def test_planted_effects_are_found_and_asked_again_nothing_runs(asking, words, status, verdicts):
    found = asking.found(*words)
    assert found["verdict"] in verdicts
    assert status in (found["status"], None)
    diverged = "1e30" in str(words)
    assert ("diverged and count as guessing" in found["sentence"]) == diverged == bool(found["diverged"]["b"])
    runs = asking.runs()
    assert len({run["key"] for run in runs}) == len(runs)
    assert asking.found(*words) == found
    assert asking.runs() == runs
    assert ("interval 0.0000 to 0.0000" in found["sentence"]) == ("batch_size" in str(words))
    assert {path.name for path in asking.folder.iterdir()} == {".lock", "ledger.jsonl", "runs"}  # no code, no data
    asking.common = [f"--ledger={asking.folder}"]
    assert asking()[1].count(found["sentence"]) == 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("new", "why"),
    [
        (f"{LOGITS} * float('nan')", "is broken"),
        (f"{LOGITS} * missing", "name 'missing' is not defined"),
        (f"{LOGITS} +", "SyntaxError"),
    ],
)
def test_arm_that_cannot_run_is_an_error_and_no_answer(asking, script, tmp_path, new, why):
    patch = patch_of("model.py", LOGITS, new, tmp_path)
    before = (ROOT / "model.py").read_bytes()
    done = script("bench/ask.py", *asking.common, "--b", patch)
    assert done.code == 2
    assert why in done.err.splitlines()[-1]
    assert "Traceback" not in done.err
    assert (ROOT / "model.py").read_bytes() == before
    assert "question-" not in shell("git", "worktree", "list").stdout


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="process groups")
def test_killed_question_resumes_beside_another_one_and_no_run_is_lost_or_made_twice(asking, tmp_path):
    undisturbed = asking.found(*BETTER)
    asking.with_ledger(tmp_path / "killed")
    command = [PYTHON, "bench/ask.py", *asking.common, "--budget=1s"]
    process = subprocess.Popen([*command, *BETTER], cwd=ROOT, process_group=0)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (asking.folder.exists() and asking.runs()):
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    other = subprocess.Popen([*command, "--b", "--learning_rate=2e-2"], cwd=ROOT)
    found = asking.found(*BETTER)
    assert found["values"] == undisturbed["values"]
    assert other.wait() == 3
    keys = [run["key"] for run in asking.runs()]
    assert len(keys) == len(set(keys)) == 2 * found["rounds"] + PILOT


@pytest.mark.slow
def test_band_of_a_config_is_made_and_found_by_a_run_with_another_seed(asking, chars, tmp_path, monkeypatch):
    monkeypatch.setattr(loss_band, "FOLDER", tmp_path)
    config = tmp_path / "tiny.py"
    config.write_text("\n".join(f"{name} = {value!r}" for name, value in (TINY | {"max_iters": 4}).items()))
    config.write_text(f"{config.read_text()}\ndataset = {str(chars)!r}\neval_interval = 4\n")
    asking.common = [f"--ledger={tmp_path / 'ledger'}"]
    assert asking(str(config), "--band")[0] == 0
    record = json.loads((tmp_path / "tiny.json").read_text())
    assert record["seeds"] == [*range(1338, 1346)]
    own = record["experiment"]
    settings = make_arm("a", str(config), [], tmp_path).settings
    band = loss_band.band_of(settings | {"seed": 5}, own["val_sha256"], own["train_tokens"])
    assert band is not None
    assert band.losses == {int(step): runs for step, runs in record["val_losses"].items()}
    assert {*band.losses} == {0, 4}
    assert band.verdict({4: band.losses[4][3]}).startswith("as usual")
    assert band.verdict({4: band.losses[4][3] + 1}).startswith("unusual")


# ---- arms, data and ledgers ----------------------------------------------------------------------------------


def test_what_cannot_be_asked_is_one_line_before_anything_runs(asking, tmp_path):
    asking.with_ledger(tmp_path)
    wrong = ["--learning_rat=3", "--learning_rate=6e-4", "commit:nonsense", "--seed=3", "--block_size=32", "1.88"]
    wrong += ["--x='1", f"commit:--output={tmp_path / 'x'}"]
    common = [[], ["--vary", "learning_rate=1e-3"], ["--band"], [*BETTER, "--budget=abc"], [*BETTER, "--min_effect=-1"]]
    for asked in [*common, *(["--b", text] for text in wrong)]:
        with pytest.raises(ConfigError) as refused:
            asking(*asked)
        assert "\n" not in str(refused.value)
    assert asking.runs() == []


def test_defect_has_status_2_since_1_is_an_answer(script, monkeypatch, tmp_path):
    monkeypatch.setattr(Ledger, "listing", lambda ledger: 1 // 0)
    assert script("bench/ask.py", f"--ledger={tmp_path}").code == 2
    assert script("bench/ask.py", "--budget=abc").code == 2


def test_code_has_a_digest_of_all_that_a_run_uses_and_other_seeds_are_another_question(asking, tmp_path):
    kernels = "deskgpt/kernels/cpu_kernels.cpp"
    line = (ROOT / kernels).read_text().splitlines()[0]
    changed = patch_of(kernels, line, f"// changed\n{line}", tmp_path)
    docs = patch_of("docs/asking.md", "# Asking", "# Changed\n# Asking", tmp_path)
    wrong = tmp_path / "wrong.patch"
    wrong.write_text(changed.read_text().replace(line, "int other;"))
    with folder_for_worktrees(tmp_path) as below:
        texts = {"a": "", "b": "--beta1=0.8", "c": str(docs), "d": str(changed), "e": "commit:HEAD"}
        arms = {label: make_arm(label, text, MODEL, below) for label, text in texts.items()}
        assert arms["a"].code == arms["b"].code == arms["c"].code != arms["d"].code
        assert arms["a"].identity() == arms["c"].identity() != arms["b"].identity()
        assert arms["e"].folder.joinpath("train.py").exists()
        with pytest.raises(ConfigError, match="does not apply"):
            make_arm("f", str(wrong), MODEL, below)
        asked = [ask.read_arguments([*asking.common, *BETTER, *more]) for more in ([], ["--budget=3h"], ["--seed=5"])]
        digests = [ask.make_question(*words, Ledger(tmp_path), below / str(i)).digest for i, words in enumerate(asked)]
    assert digests[0] == digests[1] != digests[2]
    assert [*tmp_path.glob("question-*")] == []


def test_data_is_cut_so_that_nothing_that_is_judged_is_trained_on_and_has_a_digest(chars, tmp_path):
    folder = held_out.set_aside(chars, tmp_path / "cut")
    both = [read_tokens(folder / "train.bin"), read_tokens(folder / "val.bin")]
    assert np.array_equal(np.concatenate(both), read_tokens(chars / "train.bin"))
    assert held_out.data_digest(folder) == held_out.data_digest(held_out.set_aside(chars, tmp_path / "again"))
    assert held_out.data_digest(folder) != held_out.data_digest(chars)


def test_lines_of_a_ledger_that_cannot_be_used_are_left_out(tmp_path):
    ledger = Ledger(tmp_path)
    answer: dict[str, Any] = {"question": "q", "date": "d", "config": "c", "sentence": "s"}
    run: dict[str, Any] = {"key": "k", "outcome": "ended", "val_loss": 1.5, "wall_s": 2}
    ledger.add("answer", **answer)
    ledger.add("run", **run)
    usable = list(ledger.events)
    wrong: list[Any] = [None, "1", True, float("nan"), []]
    lines = [json.dumps({"event": "run"} | run | {"val_loss": value}) for value in wrong]
    lines += [lines[0].replace("null", number) for number in ("1" + "0" * 400, "-Infinity", "1e999")]
    lines += [
        json.dumps({"event": "answer"} | answer | {"sentence": None}),
        "5",
        "[]",
        '{"event": [1]}',
        '{"event": "torn',
    ]
    ledger.file.write_text(ledger.file.read_text() + "\n".join(lines))
    ledger = Ledger(tmp_path)
    assert ledger.events == usable
    assert ledger.run("k") == usable[1]
    assert ledger.listing() == "d  c  s"


def test_model_that_is_broken_from_the_start_has_no_loss(tmp_path):
    arm = Arm("b", "x.patch", tmp_path, "code", {})
    start = {"event": "start", "model_args": {"vocab_size": 65}}
    evaluation = {"event": "eval", "val_loss": 4.2}
    for events in ([], [{"event": "eval", "val_loss": None}], [evaluation, {"event": "iter", "grad_norm": None}]):
        with pytest.raises(ValueError, match="is broken"):
            result(arm, [start, *events], has_diverged=True)
    steps = [{"event": "iter", "grad_norm": norm} for norm in (1.5, None)]
    assert result(arm, [start, evaluation, *steps], has_diverged=True)["val_loss"] == 4.2


# ---- made-up runs: nothing is trained ------------------------------------------------------------------------


class MadeUp(Question):
    """A question whose runs end at the losses that it is given, and noise."""

    def __init__(self, folder: Path, losses: Sequence[float], min_effect: float | None = None, **given: Any) -> None:
        texts = ["", "--n_layer=2", "x.patch", "commit:HEAD~3"]
        arms = [Arm("abcd"[i], texts[i], folder, f"code {i}", {"max_iters": 100}) for i in range(len(losses))]
        trainer: Any = self
        super().__init__(arms, trainer, min_effect, **{"budget_s": 3600.0, "first_seed": 1} | given)
        self.losses = losses
        self.draw = random.Random(0)

    def run(self, arm: Arm, seed: int) -> dict[str, Any]:
        """Stand for Trainer.run."""
        loss = self.losses["abcd".index(arm.label)] + self.draw.gauss(0, 0.03)
        return {"outcome": "ended", "val_loss": loss, "wall_s": 10.0}

    def after(self, rounds: int) -> MadeUp:
        """Return the question after so many rounds, or fewer if it is decided sooner."""
        for _, _ in zip(range(rounds), self.run_rounds(), strict=False):
            pass
        return self


def test_small_budget_is_used_and_the_cost_says_what_it_can_tell(tmp_path, capsys):
    question = MadeUp(tmp_path, [3.6, 3.2], min_effect=0.01, budget_s=240.0)  # 12 runs of each find 0.4, but not 0.01
    ask.ask(question)
    assert question.answer()["verdict"] == "better"
    line = capsys.readouterr().out.splitlines()[PILOT - 1]
    assert "a difference of 0.01 nats takes" in line
    assert "pays 12 at" in line
    smallest = float(line.partition("enough for ")[2].split()[0])
    assert 0.03 < smallest < 0.4
    question = MadeUp(tmp_path, [1.9, 1.9], min_effect=1e-6, budget_s=100.0)
    ask.ask(question)
    assert (question.answer()["status"], question.rounds) == (3, 5)
    question = MadeUp(tmp_path, [1.9, 1.9], budget_s=1.0).after(PILOT)
    assert "pays 3 at 20.0s a round, too few for any" in question.cost_line()
    assert "takes" not in question.cost_line()  # without --min_effect


def test_arms_that_cannot_win_get_no_more_runs_and_the_answer_names_all(tmp_path):
    question = MadeUp(tmp_path, [2.5, 1.9, 2.1, 1.88], min_effect=0.001).after(9)
    assert question.remaining == ["b", "d"]
    assert len(question.runs["a"]) < len(question.runs["d"])
    answer = question.answer()
    assert answer["status"] == 3
    assert answer["sentence"].startswith("Not enough yet: d is lower than b by ")
    assert all(f"than {label} by" in answer["sentence"] for label in "abc")


def test_runs_that_were_judged_on_different_windows_are_refused(tmp_path):
    question = MadeUp(tmp_path, [1.9, 1.9])
    question.runs = {"a": [{"eval_digest": "x"}, {}], "b": [{"eval_digest": None}]}
    question.check_windows()  # older code does not say it
    question.runs["b"].append({"eval_digest": "y"})
    with pytest.raises(ConfigError, match="on different windows"):
        question.check_windows()
