"""bench/qualify.py: which stages it measures, what it does when one fails, and what its page says."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import ROOT, assert_one_line, assert_refused

from bench.qualifying import page
from bench.qualifying.session import CARD, Session
from bench.qualifying.stages import STAGES, numbers_of
from configurator import build, read_settings
from deskgpt.system import hardware, provenance
from deskgpt.system.errors import ConfigError
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
    assert numbers_of("0-3,7") == [0, 1, 2, 3, 7]
    assert numbers_of("10,2-2,6-8") == [2, 6, 7, 8, 10]
    for wrong in ("11", "9", "3-2", "8-11", "", "a", "1-", "-1", "1,,2"):
        with pytest.raises(ConfigError) as refused:
            numbers_of(wrong)
        assert_one_line(refused.value, f"--stages={wrong}")


def test_stages_end_within_25_minutes_and_each_documented_call_within_ten():
    assert sum(stage.limit_s for stage in STAGES.values()) <= 25 * 60
    for call in ("0-3", "4", "5", "6-10"):
        assert sum(STAGES[number].limit_s for number in numbers_of(call)) < 600


def test_failed_stage_is_a_result_and_the_others_go_on(qualify, fake):
    stages = [
        fake(4, {"best": 8}),
        fake(5, RuntimeError("two\nlines | of reasons")),
        fake(6, torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")),
        fake(7, {"failed": ["the loss is wrong"], "ratio": math.nan, 3: "three"}),
    ]
    done, text, written = qualify("--stages=4-7")
    assert done.code == 1
    for found in ("RuntimeError: two lines | of reasons", "out of memory", "{'best': 8}", "the loss is wrong"):
        assert found in text
    assert "Not measured: stages 0, 1, 2, 3, 8, 10." in text
    assert written["stages"]["7"]["result"] == {"failed": ["the loss is wrong"], "ratio": None, "3": "three"}
    assert qualify("--stages=4-7")[0].code == 1  # an earlier failure counts
    assert [stage.calls for stage in stages] == [1, 1, 1, 1]


def test_stage_that_runs_out_of_time_has_not_failed(qualify, fake):
    fake(4, {"best": 8})
    fake(5, {"unfinished": ["flash attention", "math attention"]})
    done, text, _ = qualify("--stages=4-5")
    assert done.code == 3
    assert "**Not finished**, for want of time: flash attention; math attention" in text
    assert "**Failed**" not in text
    done, _, _ = qualify("--stages=4-5")
    assert done.code == 3
    assert "5 not finished" in done.out
    assert qualify("--stages=4")[0].code == 0
    fake(5, {"unfinished": ["the rest"], "failed": ["the loss is wrong"]})
    done, text, _ = qualify("--stages=4-5", "--again")
    assert done.code == 1
    assert "**Failed**: the loss is wrong\n- **Not finished**" in text


def test_later_call_of_the_same_commit_measures_only_what_is_missing(qualify, fake, monkeypatch, tmp_path):
    stages = [fake(number, {}) for number in (4, 5, 6)]
    assert qualify("--stages=4-5")[0].code == 0
    _, text, written = qualify("--stages=4-6")
    assert [stage.calls for stage in stages] == [1, 1, 1]
    assert [line.split(" --stages")[1] for line in written["commands"]] == ["=4-5", "=4-6"]
    assert text.count("\npython bench/qualify.py ") == 2
    qualify("--stages=5,6", "--again")
    assert [stage.calls for stage in stages] == [1, 2, 2]
    monkeypatch.setattr(provenance, "git_commit", lambda: "def")
    qualify("--stages=4")
    assert stages[0].calls == 2
    assert len(list((tmp_path / "out").glob("*.json"))) == 2


def test_killed_call_loses_only_the_stage_that_ran(qualify, fake):
    first = fake(4, {"best": 8})
    fake(5, KeyboardInterrupt())
    done, text, _ = qualify("--stages=4-6")
    assert done.code == 130
    assert "**Failed**: did not end" in text
    second = fake(5, {})
    fake(6, {})
    assert qualify("--stages=4-6")[0].code == 0
    assert (first.calls, second.calls) == (1, 1)


def test_device_that_no_longer_computes_ends_the_call_and_the_next_one_goes_on(qualify, fake, monkeypatch):
    def fault(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    fake(4, RuntimeError("CUDA error"))
    rest = fake(5, {})
    with monkeypatch.context() as patch:
        patch.setattr(hardware, "release_memory", fault)
        done, text, _ = qualify("--stages=4-5")
    assert (done.code, rest.calls) == (1, 0)
    assert "**Failed**: RuntimeError: CUDA error" in text
    done, _, written = qualify("--stages=4-5")
    assert (done.code, rest.calls) == (1, 1)
    assert sorted(written["stages"]) == ["4", "5"]


def test_saved_page_is_named_after_the_card(qualify, fake, monkeypatch, tmp_path):
    monkeypatch.setattr("bench.output.RESULTS", tmp_path / "results")
    monkeypatch.setattr(hardware, "device_name", lambda device: "A CPU (AVX2), 2 cores")
    stage = fake(4, {})
    _, text, _ = qualify("--stages=4", "--save")
    [saved] = (tmp_path / "results").glob("*-qualify-a-cpu.md")
    assert saved.read_text() == text
    assert saved.with_suffix(".json").exists()
    assert 9 < stage.seconds_left <= 10


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
    steps = {"rows": [adamw], "is_published": True}
    text = page.what_follows("NVIDIA H200", {4: {"best": 64}, 7: steps}, CARD)
    assert "| NVIDIA H200 | 700,000 | 61.2% | 64 | 3.0 GB |" in text
    assert "python train.py config/train_fineweb_125m.py --batch_size=64 --gradient_accumulation_steps=8" in text
    assert "| 700,000 | n/a |" in page.what_follows("A card", {7: steps | {"is_published": False}}, CARD)


def test_page_leaves_out_what_no_stage_has_measured():
    assert "```" not in page.what_follows("NVIDIA H200", {}, CARD)
    text = page.what_follows("NVIDIA H200", {4: {"best": 32}}, CARD)
    assert "config/train_fineweb_125m.py --batch_size=32 --gradient_accumulation_steps=16\n" in text
    assert "README" not in text


def test_recipe_of_the_page_has_the_model_and_the_batch_of_the_stages():
    recipe = build(TrainConfig, read_settings(TrainConfig, [str(ROOT / page.RECIPE)]))
    assert GPTConfig.from_settings(recipe, CARD.model.vocab_size) == CARD.model
    assert recipe.batch_size * recipe.gradient_accumulation_steps * recipe.block_size == CARD.tokens_per_step
