"""The folder of a run: its log, and that one run at a time is in it."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import TINY, assert_one_line, contents, events, files_of_at_most, flags, raises_one_line, tiny
from gloo import forked

from deskgpt.checkpoint import store
from deskgpt.run.log import RunLog, git_commit, read_events
from deskgpt.system.files import only_run_in
from train import main

POSIX = pytest.mark.skipif(os.name == "nt", reason="needs open files that move, limits, O_NOFOLLOW and fork")


def written(path: Path) -> list[tuple[str, int]]:
    return [(e["event"], e["iter"]) for e in read_events(path)]


@POSIX
def test_log_continues_after_a_torn_line_and_restarts_if_it_was_moved_away(tmp_path):
    path = tmp_path / "out" / "log.jsonl"
    path.parent.mkdir()
    path.write_text('{"event": "iter", "iter": 2, "crc": "ba2aa0ec"}\n{"event": "it')  # with a crc until 2026-11-26
    log = RunLog(path)
    log.write("start", iter=3)
    assert path.read_text().splitlines()[1] == '{"event": "it'
    assert written(path) == [("iter", 2), ("start", 3)]
    os.rename(tmp_path / "out", tmp_path / "moved")
    log.write("iter", iter=3)
    assert written(path) == [("start", 3), ("iter", 3)]


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


# ---- one run at a time ---------------------------------------------------------------------------------------


def test_second_run_is_refused_and_leaves_no_trace(chars, tmp_path, script):
    out_dir = tmp_path / "a" / "out"
    with only_run_in(out_dir):
        before = contents(out_dir)
        done = script("train.py", *flags(**TINY, dataset=chars, out_dir=out_dir))
        assert contents(out_dir) == before
    assert done.code == 1
    assert_one_line(done.err, f"{out_dir} is in use", "--out_dir")
    assert contents(out_dir) == {}


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EINVAL, errno.EPERM, errno.EACCES, 524])
def test_file_system_without_locks_gets_a_note(error, tmp_path, monkeypatch, capsys):
    def refuse(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr("fcntl.flock", refuse)
    with only_run_in(tmp_path):
        pass
    assert_one_line(capsys.readouterr().err, tmp_path, "no locks")


def test_a_run_that_may_wait_takes_the_folder_when_the_other_one_has_left(tmp_path):
    first = only_run_in(tmp_path)
    first.__enter__()
    leaves = threading.Timer(0.1, first.__exit__, (None, None, None))
    leaves.start()
    with only_run_in(tmp_path, wait_s=20):
        assert leaves.finished.is_set()


@pytest.mark.slow
@POSIX
def test_of_many_processes_that_come_and_go_one_at_a_time_is_in_the_folder(tmp_path):
    """Each that gets in makes a file that must not exist yet, and removes it."""
    folder = tmp_path / "out"

    def come_and_go(number: int) -> None:
        times = 0
        while times < 50:
            with suppress(ValueError), only_run_in(folder):
                (folder / "alone").touch(exist_ok=False)
                times += 1
                (folder / "alone").unlink()

    forked(4, come_and_go)
    assert not list(folder.iterdir())
