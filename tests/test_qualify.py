"""bench/qualify.py: its stages at toy sizes on a CPU, and what it does when one fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import assert_one_line

from bench import stages


def results(out_dir: Path) -> tuple[dict[str, Any], str]:
    [written] = out_dir.glob("*.json")
    return json.loads(written.read_text())["stages"], written.with_suffix(".md").read_text()


def test_stage_that_fails_is_a_result_and_is_not_measured_again(tmp_path, monkeypatch, script):
    calls = []

    def facts(s: stages.Session) -> tuple[str, dict[str, Any]]:
        calls.append(s.best_batch())  # which only stage 4 finds
        return "", {}

    monkeypatch.setattr(stages, "facts", facts)
    ours = ["bench/qualify.py", "--device=cpu", f"--out_dir={tmp_path}", "--stages=0"]
    done = script(*ours)
    assert done.code == 1
    found, page = results(tmp_path)
    assert_one_line(found["0"]["error"], "--stages=4")
    assert found["0"]["error"] in page
    again = script(*ours)
    assert again.code == 1
    assert "measured already: stages 0 failed" in again.out
    assert not calls


@pytest.mark.slow
def test_quick_stages_at_toy_sizes_are_right_and_a_later_call_continues(tmp_path, script):
    ours = ["bench/qualify.py", "--device=cpu", f"--out_dir={tmp_path}"]
    for asked in ("0-2", "0-2,8"):
        done = script(*ours, f"--stages={asked}")
        assert done.code == 0, done.out
    found, page = results(tmp_path)
    assert list(found) == ["0", "1", "2", "8"]
    assert list(found["2"]["figures"]["verdicts"].values()) == ["right"] * 6
    assert "Toy sizes" in page
    assert "Not measured: stages 3, 4, 5, 7." in page


@pytest.mark.nightly
def test_all_stages_at_toy_sizes(tmp_path, script):
    done = script("bench/qualify.py", "--device=cpu", f"--out_dir={tmp_path}")
    assert done.code == 0, done.out + done.err
    found, page = results(tmp_path)
    assert [row["name"] for row in found["7"]["figures"]["rows"]] == list(stages.CONFIGS)
    assert " passed" in found["3"]["text"]
    assert "Failed" not in page
