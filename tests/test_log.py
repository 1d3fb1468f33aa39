from __future__ import annotations

import json
import subprocess
from typing import Any

import numpy as np
import pytest
import torch
from conftest import assert_one_line, events, tiny

from deskgpt.checkpoint import store
from deskgpt.machine import provenance
from deskgpt.machine.words import clock
from deskgpt.run.log import RunLog, event_of
from deskgpt.run.report import Report
from train import main


def test_log_continues_after_a_torn_line(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"event": "iter"}\n{"event": "it')
    log = RunLog(path)
    log.write("start", iter=3)
    log.close()
    lines = path.read_text().splitlines()
    assert lines[:2] == ['{"event": "iter"}', '{"event": "it']
    assert json.loads(lines[2]) == {"event": "start", "iter": 3, "crc": "ba2aa0ec"}
    assert event_of(lines[2] + "\n") == json.loads(lines[2])
    assert event_of(lines[2].replace("3", "4")) is None


def log_also(monkeypatch, **more: Any) -> None:
    step = Report.step
    monkeypatch.setattr(Report, "step", lambda self, **numbers: step(self, **numbers, **more))


def test_numbers_of_a_step_may_be_torchs_and_numpys(chars, tmp_path, monkeypatch):
    log_also(monkeypatch, a=torch.full((1,), 1.5), b=np.float32(2.5), c=np.int64(3), d=True)
    main(tiny(chars, tmp_path, max_iters=2))
    (first, _) = events(tmp_path, "iter")
    assert [repr(first[name]) for name in "abcd"] == ["1.5", "2.5", "3.0", "1.0"]  # the page has no curve of True


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("time_ms", 1.0), ("event", 1.0), ("val_loss", 1.0)),  # fields of the log, or of Weights & Biases
        *(("x", None), ("x", "no number"), ("x", torch.ones(2)), ("x", torch.ones((), device="meta"))),
    ],
)
def test_what_a_step_cannot_log_is_named(chars, tmp_path, monkeypatch, name, value):
    log_also(monkeypatch, **{name: value})
    with pytest.raises(ValueError, match=rf"report\.step was given {name}\b"):
        main(tiny(chars, tmp_path))


@pytest.mark.slow
def test_wandb_offline_logs_and_a_resumed_run_keeps_its_id(chars, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    main(tiny(chars, tmp_path / "out", wandb_log=True, max_iters=3))
    run_id = store.load(tmp_path / "out").wandb_run_id
    assert run_id
    main(tiny(chars, tmp_path / "out", wandb_log=True, init_from="resume"))
    assert store.load(tmp_path / "out").wandb_run_id == run_id
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(runs) == 2
    # A folder is named run-TIME-ID, and -1 follows if both began in the same second.
    assert all(f"-{run_id}" in run.name and list(run.glob("*.wandb")) for run in runs)


def test_wandb_gets_benchmarks_under_their_tasks():
    logged = []

    class Run:
        id = "x"

        def log(self, figures: dict[str, float], step: int) -> None:
            logged.append((step, figures))

    RunLog(None, Run()).write("tasks", iter=7, results={"lambada_openai": {"acc": 0.3, "acc_stderr": 0.1}})
    assert logged == [(7, {"tasks/lambada_openai/acc": 0.3, "tasks/lambada_openai/acc_stderr": 0.1})]


def test_run_goes_on_where_wandb_fails(tmp_path, capsys):
    class Broken:
        id = "abc"

        def log(self, *_, **__):
            raise OSError("no space left")

        def finish(self):
            raise AssertionError("called after it failed")

    log = RunLog(tmp_path / "log.jsonl", Broken())
    for step in range(2):
        log.write("iter", iter=step, loss=1.0)
    log.close()
    assert [e["iter"] for e in events(tmp_path, "iter")] == [0, 1]
    assert_one_line(capsys.readouterr().err, "wandb", "no space left", "the run goes on")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(9.34, "9.3s"), (187, "3m07s"), (47 * 3600, "47h00m"), (48 * 3600, "2.0 days"), (1460.2 * 86400, "1,460.2 days")],
)
def test_times_from_two_days_on_are_said_in_days(seconds, text):
    assert clock(seconds) == text


def test_git_commit_marks_changes(tmp_path, monkeypatch):
    def git(*words: str) -> None:
        identity = ["-c", "user.name=x", "-c", "user.email=x@x"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    assert provenance.git_commit() is None
    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "x")
    commit = provenance.git_commit()
    assert commit
    assert len(commit) == 12
    (tmp_path / "a").write_text("2")
    assert provenance.git_commit() == commit + "+changes"
