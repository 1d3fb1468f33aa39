"""bench/ask.py: questions answered by real runs of a tiny model."""

from __future__ import annotations

import difflib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, Finished, events, flags
from scipy import stats

from bench import ask, timing
from bench.asking import held_out, null, running
from bench.asking.arms import make_arm
from bench.asking.ledger import Ledger
from bench.asking.statistics import LEAST
from bench.asking.tune import SEEDS_AFTER, untuned
from data.token_files import read_tokens
from deskgpt.system.errors import ConfigError

MODEL = flags(n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=4, gradient_accumulation_steps=1)
MODEL += flags(max_iters=20, eval_tokens=512, warmup_iters=2, compile=False, device="cpu", dtype="float32")
PYTHON = sys.executable
BETTER = ["--b", "--learning_rate=3e-2"]  # than 6e-4, by far


def patch_of_loss(folder: Path, factor: str) -> Path:
    """A patch after which a step's loss is multiplied by factor."""
    old = (ROOT / "train.py").read_text()
    new = old.replace("runner.backward(loss)", f"runner.backward({factor} * loss)")
    lines = difflib.unified_diff(old.splitlines(True), new.splitlines(True), "a/train.py", "b/train.py")
    path = folder / "loss.patch"
    path.write_text("".join(lines))
    return path


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

    def runs(self) -> list[dict[str, Any]]:
        return [e for e in Ledger(self.folder).events if e["event"] == "run"]

    def with_ledger(self, folder: Path) -> Asking:
        """With one that knows no run."""
        common = [word for word in self.common if not word.startswith("--ledger=")]
        self.common = [*common, f"--ledger={folder}"]
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


@pytest.mark.slow
def test_planted_effect_is_found_once_and_for_all(asking):
    status, out = asking(*BETTER, "--json")
    found = json.loads(out.splitlines()[-1])
    assert status == 0
    assert found["verdict"] == "better"
    assert found["pairs"][0]["d"] > found["pairs"][0]["half"] > 0
    assert found["sentence"] in out
    runs = asking.runs()
    assert {run["settings"]["eval_tokens"] for run in runs} == {512}
    assert len({run["key"] for run in runs}) == len(runs)

    again = asking(*BETTER, "--json")
    assert json.loads(again[1].splitlines()[-1]) == found
    assert asking.runs() == runs
    with open(asking.folder / "ledger.jsonl", "a") as file:
        file.write('{"event": "answer", "torn')
    asking.common = [f"--ledger={asking.folder}"]
    assert found["sentence"] in asking()[1]

    mixed = json.loads(asking.folder.joinpath("ledger.jsonl").read_text().splitlines()[0])
    assert str(ROOT) not in json.dumps(mixed)
    assert str(asking.folder) not in json.dumps(mixed)


@pytest.mark.slow
def test_worse_arm_and_no_difference_are_answers(asking):
    status, out = asking("--a", "--learning_rate=3e-2", "--b", "--learning_rate=6e-4")
    assert status == 1
    assert "b is worse by" in out
    status, out = asking("--b", "--learning_rate=6.0001e-4", "--resolve=0.5")
    assert status == 1
    assert "No difference beyond 0.5 nats" in out


@pytest.mark.slow
def test_patch_runs_in_a_copy_and_a_run_that_diverges_counts_as_guessing(asking, tmp_path):
    before = (ROOT / "train.py").read_bytes()
    status, out = asking("--b", str(patch_of_loss(tmp_path, "float('nan')")), "--json")
    found = json.loads(out.splitlines()[-1])
    assert found["arms"][1]["diverged"] == found["arms"][1]["runs"] > 0
    assert "diverged and count as guessing" in out
    assert status in (1, 3)  # a barely beats guessing after 20 steps
    assert (ROOT / "train.py").read_bytes() == before


@pytest.mark.slow
def test_budget_that_cannot_answer_is_refused_with_the_figures(asking):
    with pytest.raises(ConfigError, match=r"--resolve|cannot resolve 1e-06"):
        asking("--b", "--learning_rate=7e-4", "--resolve=1e-6", "--budget=1min")
    n = len(asking.runs())
    with pytest.raises(ConfigError, match="goes on there"):
        asking("--b", "--learning_rate=8e-4", "--budget=0.1s", "--seed=7")
    assert len(asking.runs()) == n
    status, out = asking("--b", "--learning_rate=7e-4", "--resolve=1e-6", "--budget=1s", "--anyway")
    assert status == 3
    assert "Not enough yet" in out
    assert len(asking.runs()) == n  # the pilot's runs were there already


@pytest.mark.slow
def test_config_against_itself_has_seeds_of_its_own_for_all_runs(asking, tmp_path, monkeypatch):
    monkeypatch.setattr(null, "SIMULATED", 200)
    monkeypatch.setattr(null, "ROUNDS", LEAST)
    status, out = asking.with_ledger(tmp_path)("--null=1")
    assert status == 0
    assert "0 of 1 answers were false" in out
    seeds = [run["seed"] for run in asking.runs()]
    assert len(set(seeds)) == len(seeds) == 2 * LEAST


def test_simulated_questions_rarely_find_a_difference_in_noise() -> None:
    losses = [3.2 + 0.04 * stats.norm.ppf((i + 0.5) / 100) for i in range(100)]
    assert null.simulated(losses, 300).false <= stats.binom.ppf(0.999, 300, 0.05)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="process groups")
def test_killed_question_goes_on_without_a_lost_run(asking, tmp_path):
    whole = json.loads(asking(*BETTER, "--json")[1].splitlines()[-1])
    asking.with_ledger(tmp_path / "killed")
    command = [PYTHON, "bench/ask.py", *asking.common, *BETTER]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, process_group=0)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (asking.folder.exists() and asking.runs()):
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    found = json.loads(asking(*BETTER, "--json")[1].splitlines()[-1])
    assert [arm["values"] for arm in found["arms"]] == [arm["values"] for arm in whole["arms"]]
    keys = [run["key"] for run in asking.runs()]
    assert len(keys) == len(set(keys))


@pytest.mark.slow
def test_belief_is_said_first_and_what_to_do_instead_with_the_answer(asking, tmp_path):
    file = tmp_path / "question.toml"
    file.write_text('belief = "Slow is good."\ninstead = "Hurry."\nb = "--learning_rate=3e-2"\nresolve = 3')
    status, out = asking(str(file))
    lines = out.splitlines()
    assert status == 1
    assert lines[0] == "belief: Slow is good."
    assert lines[lines.index("instead: Hurry.") - 1].startswith("No difference beyond 3 nats")


@pytest.mark.slow
def test_run_that_was_stopped_before_its_last_step_is_resumed(asking, monkeypatch):
    question = ask.question_of(*ask.read_arguments([*asking.common, *BETTER]))
    arm = question.arms[0]
    seed = 98  # which no question has
    out_dir = asking.folder / "runs" / question.place.key(arm, seed)
    with monkeypatch.context() as stopped:
        stopped.setitem(running.TO_THE_END, "max_hours", 1e-9)
        assert running.train(question.place, arm, seed, out_dir)[0] == 0
    assert events(out_dir, "end")[-1]["iter"] < arm.steps
    assert running.run(question.place, arm, seed)["curve"][-1][0] == arm.steps


@pytest.mark.slow
def test_win_is_confirmed_on_fresh_seeds_and_text_and_deeper(asking):
    words = ("--b", "--learning_rate=2e-2")  # which no other test asks
    before = asking.runs()
    with pytest.raises(ConfigError, match="no better arm"):
        asking(*words, "--confirm")
    assert asking.runs() == before
    asking(*words)
    first = asking.runs()
    status, out = asking(*words, "--confirm", "--json")
    found = json.loads(out.splitlines()[-1])
    again = asking.runs()[len(first) :]
    assert status == 0
    assert found["verdict"] == "confirmed"
    assert {run["settings"]["n_layer"] for run in again} == {1, 2}
    assert not {run["seed"] for run in first} & {run["seed"] for run in again}
    assert len({run["windows"] for run in again}) == 1
    assert {run["windows"] for run in first} != {run["windows"] for run in again}
    assert found["sentence"].count("% of what it was") == 2


@pytest.mark.slow
def test_each_arm_gets_the_best_of_three_rates_found_on_other_seeds(asking):
    status, out = asking("--b", "--n_embd=32", "--tune", "learning_rate", "--json", "--resolve=5")
    assert status == 1
    assert "untuned" not in out
    assert out.count("gets learning_rate=0.0012 ") == 2  # 6e-4 is far too low for 20 steps
    tuning = [run for run in asking.runs() if run["seed"] >= 1337 + SEEDS_AFTER]
    assert len(tuning) == 2 * 5
    found = json.loads(out.splitlines()[-1])
    assert [arm["what"] for arm in found["arms"]] == ["--learning_rate=0.0012", "--n_embd=32 --learning_rate=0.0012"]


@pytest.mark.parametrize(("text", "said"), [("--n_embd=32", "n_embd"), ("--batch_size=8", "tokens of a step")])
def test_answer_says_where_the_learning_rate_may_not_suit(text, said, tmp_path):
    arms = [make_arm(label, of_it, MODEL, tmp_path) for label, of_it in (("a", ""), ("b", text))]
    assert said in untuned(arms, {"a": [{}], "b": [{}]})
    assert untuned([arms[0], arms[0]], {"a": [{}], "b": [{}]}) == ""
    same = make_arm("b", "--batch_size=2 --gradient_accumulation_steps=2", MODEL, tmp_path)
    assert untuned([arms[0], same], {"a": [{}], "b": [{}]}) == ""


@pytest.mark.slow
def test_changes_are_asked_alone_and_together_and_a_number_is_an_arm(asking):
    status, out = asking(*BETTER, "--c", "--beta2=0.9", "--together", "--resolve=0.3", "--json")
    found = json.loads(out.splitlines()[-1])
    assert status == 0
    assert [arm["what"] for arm in found["arms"]][1:] == [BETTER[1], "--beta2=0.9", f"{BETTER[1]} --beta2=0.9"]
    means = [arm["mean"] for arm in found["arms"]]
    gain = means[1] + means[2] - means[0] - means[3]
    assert found["interaction"]["gain"] == pytest.approx(gain)
    assert found["interaction"]["half"] > 0
    n = len(asking.runs())
    status, out = asking("--b", "3", "--json")
    found = json.loads(out.splitlines()[-1])
    mean = found["arms"][0]["mean"]
    assert status == 0
    assert "a is above 3 by" in out
    assert found["pairs"][0]["d"] == pytest.approx(mean - 3)
    assert found["pairs"][0]["paired"]
    assert found["arms"][1]["values"] == [3.0] * found["rounds"]
    assert len(asking.runs()) <= n + found["rounds"]


@pytest.mark.slow
def test_equal_flops_give_the_wider_arm_fewer_steps(asking):
    _, out = asking("--b", "--n_embd=32", "--at=flops", "--resolve=5", "--json")
    a, b = json.loads(out.splitlines()[-1])["arms"]
    runs = [run for run in asking.runs() if run["settings"]["n_layer"] == 1]
    costs = {run["settings"]["n_embd"]: run["flops_per_token"] for run in runs}
    assert a["steps"] == 20
    assert b["steps"] == round(20 * costs[16] / costs[32])


@pytest.mark.slow
def test_equal_time_gives_the_slower_arm_fewer_steps_which_are_remembered(asking, monkeypatch):
    monkeypatch.setattr(ask, "TIMED_S", 0.3)
    monkeypatch.setattr(ask, "TIMED_ROUNDS", 1)
    slower = ["--b", "--n_layer=6 --n_embd=128", "--at=time", "--resolve=5", "--json"]
    found = json.loads(asking(*slower)[1].splitlines()[-1])
    a, b = (arm["steps"] for arm in found["arms"])
    assert a == 20
    assert 0 < b < 10
    monkeypatch.setattr(timing, "run", None)
    assert [arm["steps"] for arm in json.loads(asking(*slower)[1].splitlines()[-1])["arms"]] == [a, b]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "other_ends", "starts"), [(96, True, 1), (97, False, 2)])
def test_run_that_another_question_is_at_work_on_is_waited_for(seed, other_ends, starts, asking, monkeypatch):
    """The folder was free when it was looked at, and is another one's when train.py starts there."""
    question = ask.question_of(*ask.read_arguments([*asking.common, *BETTER]))
    arm = question.arms[0]
    train = running.train
    tries = []

    def in_use_at_first(*words: Any) -> tuple[int, str]:
        tries.append(words)
        if other_ends or len(tries) > 1:
            assert train(*words) == (0, "")
        return (1, f"out_dir=x {running.IN_USE} a run") if len(tries) == 1 else (0, "")

    monkeypatch.setattr(running, "train", in_use_at_first)
    found = running.run(question.place, arm, seed)
    assert (found["outcome"], found["curve"][-1][0]) == ("ended", arm.steps)
    assert len(tries) == starts


def test_speeds_are_those_of_runs_that_took_turns(asking):
    """The ledger's runs of another question may have had a busier machine."""

    def keys(*words: str) -> list[str]:
        question = ask.question_of(*ask.read_arguments([*asking.common, *words]))
        return [question.place.key(arm, 1) for arm in question.arms]

    other = ["--b", "--beta1=0.8"]
    assert keys(*BETTER)[0] == keys(*other)[0]
    assert keys(*BETTER, "--figure=step_ms")[0] != keys(*other, "--figure=step_ms")[0]
    assert keys(*BETTER, "--figure=step_ms") == keys(*BETTER, "--figure=step_ms", "--resolve=3")


def test_parts_that_are_set_aside_do_not_overlap(chars, tmp_path):
    text = read_tokens(chars / "train.bin")
    seen = []
    for part in range(held_out.PART):
        folder = held_out.set_aside(chars, tmp_path, part)
        own = read_tokens(folder / "val.bin")
        end = len(text) - part * len(own)
        assert np.array_equal(own, text[end - len(own) : end])
        rest = np.concatenate([text[: end - len(own)], text[end:]])
        assert np.array_equal(read_tokens(folder / "train.bin"), rest)
        seen.append(end)
    assert len(set(seen)) == held_out.PART


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--b", "--learning_rat=3"],
        ["--b", "--learning_rate=x"],
        ["--b", "--learning_rate=6e-4"],
        ["--b", "missing.patch"],
        ["--b", "commit:nonsense"],
        ["--b", "--max_iters=7"],
        ["--b", "--seed=3"],
        ["--b", "--n_head=7"],
        ["--b", "--dataset=other"],
        ["--b", "--learning_rate='1e-3"],
        ["--vary", "learning_rate=1e-3"],
        ["--vary", f"seed={','.join('1' * 27)}"],
        ["--null=0"],
        ["--band"],
        ["--confirm"],
        ["--together", *BETTER],
        ["--together", *BETTER, "--c", "--learning_rate=1"],
        ["--b", "--n_embd=32", "--tune", "dropout"],
        [*BETTER, "--tune", "learning_rate"],
        [*BETTER, "--null=2"],
        [*BETTER, "--budget=abc"],
        [*BETTER, "--budget=0s"],
        [*BETTER, "--resolve=-1"],
        [*BETTER, "--jobs=0"],
        [*BETTER, "--jobs=2", "--at=time"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_asked_is_one_line_before_anything_runs(words, chars, tmp_path, monkeypatch):
    command = ["bench/ask.py", *MODEL, f"--dataset={chars}", f"--ledger={tmp_path / 'ledger'}", *words]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(ConfigError) as refused:
        ask.main()
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "ledger" / "runs").exists()


@pytest.mark.slow
def test_arm_that_cannot_run_is_no_answer(asking, script, tmp_path):
    done: Finished = script("bench/ask.py", *asking.common, "--b", patch_of_loss(tmp_path, "missing"))
    assert done.code == 2
    assert done.err.splitlines()[-1].startswith("error: b (")
    assert "name 'missing' is not defined" in done.err


def test_patch_that_does_not_apply_is_refused(tmp_path):
    path = patch_of_loss(tmp_path, "2")
    path.write_text(path.read_text().replace("-                runner.backward", "-                runner.forward"))
    with pytest.raises(ConfigError, match="does not apply"):
        make_arm("b", str(path), MODEL, tmp_path / "code")


def test_arm_has_the_digest_of_its_code(tmp_path):
    as_it_is = make_arm("a", "", MODEL, tmp_path / "code")
    patched = make_arm("b", str(patch_of_loss(tmp_path, "2")), MODEL, tmp_path / "code")
    assert as_it_is.code != patched.code
    assert as_it_is.learning_settings() == patched.learning_settings()
    os.utime(patched.folder, (0, 0))
    assert as_it_is.code == make_arm("c", "--beta1=0.8", MODEL, tmp_path / "code").code
    assert not patched.folder.exists()
    assert as_it_is.folder.exists()
