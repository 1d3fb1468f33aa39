"""bench/qualify.py: which stages it measures, what it does when one fails, and what its page says."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import ROOT, assert_refused

from bench.qualifying import page
from bench.qualifying.session import CARD, Session
from bench.qualifying.stages import STAGES, numbers_of
from configurator import build, read_settings
from deskgpt.machine import hardware, provenance
from model import GPTConfig
from train import TrainConfig


@dataclass
class Fake:
    """A stage that returns its result, or raises it."""

    number: int
    result: Any
    calls: int = 0
    heading: str = "A heading"
    limit_s: float = 10

    def measure(self, s: Session) -> dict[str, Any]:
        self.calls += 1
        self.seconds_left = s.seconds_left()
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result

    def describe(self, result: dict[str, Any]) -> str:
        return f"found {result}"


@pytest.fixture
def fake(monkeypatch):
    """Puts a stage of our own in the place of one of the stages."""

    def put(number: int, result: Any) -> Fake:
        stage = Fake(number, result)
        monkeypatch.setitem(STAGES, number, stage)
        return stage

    monkeypatch.setattr(provenance, "git_commit", lambda: "abc")
    return put


@pytest.fixture
def qualify(script, tmp_path):
    """Runs the command; returns what it printed and its page."""

    def run(*arguments: str) -> tuple[Any, str, dict[str, Any]]:
        done = script("bench/qualify.py", "--device=cpu", f"--out_dir={tmp_path / 'out'}", *arguments)
        [written] = sorted((tmp_path / "out").glob("*.md"), key=lambda path: path.stat().st_mtime)[-1:]
        return done, written.read_text(), json.loads(written.with_suffix(".json").read_text())

    return run


def test_stages_are_named_as_numbers_and_ranges():
    assert numbers_of("0-3,7") == ([0, 1, 2, 3, 7], {7})
    assert numbers_of("10,2-2") == ([2, 10], {10})
    assert numbers_of("6-10") == ([6, 7, 8, 10], set())  # there is no stage 9
    for wrong in ("11", "9", "3-2", "8-11", "", "a", "1-", "-1", "1,,2"):
        with pytest.raises(ValueError, match=f"--stages={wrong}: "):
            numbers_of(wrong)


def test_each_stage_measures_and_describes():
    for stage in STAGES.values():
        module = importlib.import_module(f"bench.qualifying.{stage.module}")
        assert callable(module.measure)
        assert callable(module.describe)


def test_stages_end_within_25_minutes_and_each_documented_call_within_ten():
    assert sum(stage.limit_s for stage in STAGES.values()) <= 25 * 60
    for call in ("0-3", "4", "5", "6-10"):
        assert sum(STAGES[number].limit_s for number in numbers_of(call)[0]) < 600


def test_failed_stage_is_a_result_and_the_others_go_on(qualify, fake):
    fake(4, {"best": 8})
    fake(5, RuntimeError("two\nlines | of reasons"))
    fake(6, torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    fake(7, {"failed": ["the loss is wrong"], "ratio": math.nan, 3: "three"})
    done, text, written = qualify("--stages=4-7")
    assert done.code == 1
    assert "**Failed**: RuntimeError: two lines | of reasons" in text
    assert "**Failed**: out of memory: CUDA out of memory. Tried to allocate 2 GiB" in text
    assert "found {'best': 8}" in text
    assert "- **Failed**: the loss is wrong" in text
    assert "Not measured: stages 0, 1, 2, 3, 8, 10." in text
    assert written["stages"]["7"]["result"] == {"failed": ["the loss is wrong"], "ratio": None, "3": "three"}


def test_later_call_continues_and_measures_again_only_what_it_is_told_to(qualify, fake):
    stages = [fake(number, {}) for number in (4, 5, 6)]
    assert qualify("--stages=4-5")[0].code == 0
    done, text, written = qualify("--stages=4-6")
    assert [stage.calls for stage in stages] == [1, 1, 1]
    assert "there already: stages 4, 5; --again measures them again" in done.out
    assert [line.split(" --stages")[1] for line in written["commands"]] == ["=4-5", "=4-6"]
    assert text.count("\npython bench/qualify.py ") == 2
    qualify("--stages=4,5-6")
    assert [stage.calls for stage in stages] == [2, 1, 1]
    qualify("--stages=5-6", "--again")
    assert [stage.calls for stage in stages] == [2, 2, 2]


def test_earlier_failure_counts_for_the_exit_status(qualify, fake):
    fake(4, ValueError("no"))
    assert qualify("--stages=4-4")[0].code == 1
    done, _, _ = qualify("--stages=4-4")
    assert done.code == 1
    assert "there already: stages 4 (4 failed)" in done.out


def test_results_of_another_commit_are_left_alone(qualify, fake, monkeypatch, tmp_path):
    stage = fake(4, {})
    qualify("--stages=4-4")
    monkeypatch.setattr(provenance, "git_commit", lambda: "def")
    qualify("--stages=4-4")
    assert stage.calls == 2
    assert len(list((tmp_path / "out").glob("*.json"))) == 2


def test_killed_call_loses_only_the_stage_that_ran(qualify, fake):
    first = fake(4, {"best": 8})
    fake(5, KeyboardInterrupt())
    done, text, _ = qualify("--stages=4-6")
    assert done.code == 130
    assert "**Failed**: did not end: its process was killed" in text
    second = fake(5, {})
    fake(6, {})
    assert qualify("--stages=4-6")[0].code == 0
    assert (first.calls, second.calls) == (1, 1)


def test_device_that_no_longer_computes_gets_a_fresh_process_for_the_rest(qualify, fake, monkeypatch):
    fake(4, {})
    fake(5, RuntimeError("CUDA error: an illegal memory access was encountered"))
    rest = [fake(number, {}) for number in (6, 7)]
    started: list[list[str]] = []
    answers = iter([None, RuntimeError("CUDA error: an illegal memory access was encountered")])

    def release_memory(device: torch.device) -> None:
        error = next(answers)
        if error is not None:
            raise error

    def execv(path: str, command: list[str]) -> None:
        started.append(command)
        raise SystemExit(77)  # the process would be replaced here

    monkeypatch.setattr(hardware, "release_memory", release_memory)
    monkeypatch.setattr(os, "execv", execv)
    done, text, _ = qualify("--stages=4-7")
    assert done.code == 77
    assert [stage.calls for stage in rest] == [0, 0]
    assert "**Failed**: RuntimeError: CUDA error" in text
    assert started[0][:2] == [sys.executable, str(ROOT / "bench" / "qualify.py")]
    assert started[0][-2:] == ["--stages=6,7", "--after_failure"]

    monkeypatch.undo()  # what the fresh process does
    monkeypatch.setattr(provenance, "git_commit", lambda: "abc")
    rest = [fake(number, {}) for number in (6, 7)]
    done, text, written = qualify(*started[0][3:])
    assert done.code == 1
    assert [stage.calls for stage in rest] == [1, 1]
    assert sorted(written["stages"]) == ["4", "5", "6", "7"]
    assert len(written["commands"]) == 1


def test_stages_know_their_time_limit(qualify, fake):
    stage = fake(4, {})
    qualify("--stages=4")
    assert 9 < stage.seconds_left <= 10


def test_saved_page_is_named_after_the_card(qualify, fake, monkeypatch, tmp_path):
    monkeypatch.setattr("bench.output.RESULTS", tmp_path / "results")
    monkeypatch.setattr(hardware, "device_name", lambda device: "A CPU (AVX2), 2 cores")
    fake(4, {})
    _, text, _ = qualify("--stages=4", "--save")
    [saved] = (tmp_path / "results").glob("*-qualify-a-cpu.md")
    assert saved.read_text() == text
    assert saved.with_suffix(".json").exists()


def test_wrong_arguments_are_one_line(script, tmp_path):
    for arguments, named in (
        (["--stages=4-99"], ["--stages=4-99", "0, 1, 2"]),
        ([f"--nanogpt={tmp_path}"], [tmp_path, "train.py", "name a checkout"]),
        (["--save", "a/b"], ["a/b", "such as"]),
    ):
        done = script("bench/qualify.py", "--device=cpu", f"--out_dir={tmp_path / 'out'}", *arguments)
        assert_refused(done, *named)
    assert not (tmp_path / "out").exists()


def test_page_ends_with_what_to_use():
    adamw = {"tokens_per_s": 700_000.4, "mfu": 0.612, "memory_gb": 3.01}
    steps = {"rows": [adamw], "batch_size": 64, "is_published": True}
    text = page.what_follows("NVIDIA H200", {4: {"best": 48}, 7: steps}, CARD)
    assert "| NVIDIA H200 | 700,000 | 61.2% | 64 | 3.0 GB |" in text
    assert "python train.py config/train_fineweb_125m.py --batch_size=64 --gradient_accumulation_steps=8" in text
    assert "| 700,000 | n/a |" in page.what_follows("A card", {7: steps | {"is_published": False}}, CARD)


def test_page_leaves_out_what_no_stage_has_measured():
    assert page.what_follows("NVIDIA H200", {}, CARD) == "Nothing yet: stages 4 and 7 say it."
    text = page.what_follows("NVIDIA H200", {4: {"best": 48}}, CARD)
    assert text.endswith("config/train_fineweb_125m.py --batch_size=32 --gradient_accumulation_steps=16\n```")
    assert "README" not in text
    assert "gpu_" not in text


def test_recipe_of_the_page_has_the_model_and_the_batch_of_the_stages():
    recipe = build(TrainConfig, read_settings(TrainConfig, [str(ROOT / page.RECIPE)]))
    assert GPTConfig.from_settings(recipe, CARD.model.vocab_size) == CARD.model
    assert recipe.batch_size * recipe.gradient_accumulation_steps * recipe.block_size == CARD.tokens_per_step
