"""One folder, one run."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading

import pytest
from conftest import ROOT, TINY, assert_one_line, contents, flags

from deskgpt.system.files import only_run_in


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
def test_of_many_processes_that_come_and_go_one_at_a_time_is_in_the_folder(tmp_path):
    """Each that gets in makes a file that must not exist yet, and removes it."""
    code = """
import os, sys, time
from pathlib import Path
from deskgpt.system.files import only_run_in
entered = 0
end = time.monotonic() + 1.0
while time.monotonic() < end:
    try:
        with only_run_in(Path(sys.argv[1])):
            os.close(os.open(sys.argv[1] + "/alone", os.O_CREAT | os.O_EXCL))
            entered += 1
            os.unlink(sys.argv[1] + "/alone")
    except ValueError:
        pass
print(entered)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    entered = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert sum(map(int, entered)) > 10
    assert not list((tmp_path / "out").iterdir())
