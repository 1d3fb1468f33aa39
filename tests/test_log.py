from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from conftest import assert_one_line, events, files_of_at_most, raises_one_line, tiny

from deskgpt.checkpoint import store
from deskgpt.run.log import RunLog, git_commit, read_events
from train import main

POSIX = pytest.mark.skipif(os.name == "nt", reason="needs open files that move, limits and O_NOFOLLOW")


def written(path: Path) -> list[tuple[str, int]]:
    return [(e["event"], e["iter"]) for e in read_events(path)]


@POSIX
def test_log_continues_after_a_torn_line_and_if_it_was_moved_away(tmp_path):
    path = tmp_path / "out" / "log.jsonl"
    path.parent.mkdir()
    path.write_text('{"event": "iter", "iter": 2, "crc": "ba2aa0ec"}\n{"event": "it')  # with a crc until 2026-11-26
    log = RunLog(path)
    log.write("start", iter=3)
    assert path.read_text().splitlines()[1] == '{"event": "it'
    assert written(path) == [("iter", 2), ("start", 3)]
    os.rename(tmp_path / "out", tmp_path / "moved")
    log.write("iter", iter=3)
    assert written(path) == [("iter", 3)]


@POSIX
def test_log_continues_after_a_full_disk_and_has_complete_lines_only(tmp_path, capsys):
    path = tmp_path / "log.jsonl"
    log = RunLog(path)
    log.write("start", iter=0, note="x" * 970)
    with files_of_at_most(kib=1):  # room for a part of a line
        for step in range(3):
            log.write("iter", iter=step)
    log.write("iter", iter=3)
    assert path.read_text().count("\n") == 2
    assert written(path) == [("start", 0), ("iter", 3)]
    assert_one_line(capsys.readouterr().err, path, "File too large", "the run continues")


@POSIX
def test_untrusted_log_that_is_a_link_writes_nowhere_else(tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "log.jsonl").symlink_to(tmp_path / "mine")
    with raises_one_line(tmp_path / "log.jsonl", "link", "--out_dir", kind=OSError):
        RunLog(tmp_path / "log.jsonl")
    assert (tmp_path / "mine").read_text() == "precious"


@pytest.mark.slow
def test_wandb_offline_logs_and_a_resumed_run_keeps_its_id(chars, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    for settings in ({"max_iters": 3}, {"init_from": "resume"}):
        main(tiny(chars, tmp_path / "out", wandb_log=True, **settings))
        ids.append(store.load(tmp_path / "out").wandb_run_id)
    assert ids[0]
    assert ids[0] == ids[1]
    # A folder is named run-TIME-ID, and -1 follows if both began in the same second.
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{ids[0]}*/*.wandb"))) == 2


def test_wandb_gets_the_numbers_and_a_run_continues_if_it_fails(tmp_path, capsys):
    logged = []

    class Full:
        def log(self, figures: dict[str, float], step: int) -> None:
            if step > 7:
                raise OSError("no space left")
            logged.append((step, figures))

    log = RunLog(tmp_path / "log.jsonl", Full())
    for step in (7, 8, 9):
        log.write("iter", iter=step, loss=2.0, mfu=0.5)
    log.close()
    assert logged == [(7, {"iter": 7, "loss": 2.0, "mfu": 50.0})]
    assert [e["iter"] for e in events(tmp_path, "iter")] == [7, 8, 9]
    assert_one_line(capsys.readouterr().err, "wandb", "no space left", "the run continues")


def test_commit_is_that_of_the_code_also_in_a_hook_of_another_repository(tmp_path, monkeypatch):
    expected = git_commit()
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    assert git_commit() == expected
