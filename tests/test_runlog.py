from __future__ import annotations

import subprocess

import pytest
from conftest import events, tiny

from deskgpt.checkpoint import store as checkpoint
from deskgpt.run import log as runlog
from deskgpt.run.log import RunLog, clock
from train import main


def test_log_continues_after_a_torn_line(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"event": "iter"}\n{"event": "it')
    log = RunLog(path)
    log.write("start", iter=3)
    log.close()
    assert path.read_text().splitlines() == ['{"event": "iter"}', '{"event": "it', '{"event": "start", "iter": 3}']


@pytest.mark.slow
def test_wandb_offline_logs_and_a_resumed_run_keeps_its_id(chars, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    main(tiny(chars, tmp_path / "out", wandb_log=True, max_iters=3))
    run_id = checkpoint.load(tmp_path / "out").wandb_run_id
    assert run_id
    main(tiny(chars, tmp_path / "out", wandb_log=True, init_from="resume"))
    assert checkpoint.load(tmp_path / "out").wandb_run_id == run_id
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
    assert capsys.readouterr().err == "wandb failed (no space left); the run goes on without it\n"


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

    monkeypatch.setattr(runlog, "__file__", str(tmp_path / "runlog.py"))
    assert runlog.git_commit() is None
    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "x")
    commit = runlog.git_commit()
    assert commit
    assert len(commit) == 12
    (tmp_path / "a").write_text("2")
    assert runlog.git_commit() == commit + "+changes"
