"""One folder, one run."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import ROOT, TINY, events, flags

from deskgpt.checkpoint import store
from deskgpt.run import lock
from deskgpt.run.lock import only_run_in

REFUSAL = r"^out_dir=.* is in use by a run that started 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d \(pid \d+ on host .+\): "


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_second_run_is_told_whose_the_folder_is_and_leaves_no_trace(tmp_path):
    out_dir = tmp_path / "a" / "out"
    with only_run_in(out_dir):
        (out_dir / "ckpt.pt").write_bytes(b"1")
        before = content(out_dir)
        message = REFUSAL + "wait for it, stop it, or choose another --out_dir"
        with pytest.raises(ValueError, match=message), only_run_in(out_dir):
            raise AssertionError("two at once")
        assert content(out_dir) == before
    assert content(out_dir) == {"ckpt.pt": b"1"}
    with only_run_in(out_dir):
        pass
    assert content(out_dir) == {"ckpt.pt": b"1"}


def test_run_that_fails_at_its_start_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match="no data"), only_run_in(tmp_path / "out"):
        raise ValueError("no data")
    assert not list(tmp_path.iterdir())


def test_dead_runs_lock_does_not_hold(tmp_path):
    code = "import os, sys, pathlib; from deskgpt.run.lock import only_run_in; "
    code += "lock = only_run_in(pathlib.Path(sys.argv[1])); lock.__enter__(); os._exit(0)"
    subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, check=True)
    assert (tmp_path / lock.LOCK).exists()
    with only_run_in(tmp_path):
        assert json.loads((tmp_path / lock.HOLDER).read_bytes())["pid"] == os.getpid()


def test_a_run_that_may_wait_takes_the_folder_when_the_other_one_has_left(tmp_path):
    first = only_run_in(tmp_path)
    first.__enter__()
    leaves = threading.Timer(0.2, first.__exit__, (None, None, None))
    leaves.start()
    with only_run_in(tmp_path, wait_s=20):
        assert leaves.finished.is_set()
    assert not list(tmp_path.iterdir())


def test_of_many_processes_that_come_and_go_one_at_a_time_is_in_the_folder(tmp_path):
    """Each that gets in makes a file that must not exist yet, and removes it."""
    code = """
import os, sys, time
from pathlib import Path
from deskgpt.run.lock import only_run_in
entered = 0
end = time.monotonic() + 1.5
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
    assert not list(tmp_path.rglob("*.*"))  # the folder itself stays where another has found it made


def test_folder_that_cannot_be_made_is_an_error_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    message = "out_dir=.*file/out cannot be written: .*; choose another --out_dir"
    with pytest.raises(OSError, match=message), only_run_in(tmp_path / "file" / "out"):
        raise AssertionError("in a file")


# ---- without the system's locks ------------------------------------------------------------------------------


@pytest.fixture
def no_locks(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock.FileLock, "_acquire", refuse)
    monkeypatch.setattr(lock, "LEASE_S", 0.4)


def test_lease_is_held_kept_fresh_and_given_back(tmp_path, no_locks):
    with only_run_in(tmp_path):
        time.sleep(1.0)  # it would be stale by now
        with pytest.raises(ValueError, match=REFUSAL), only_run_in(tmp_path):
            raise AssertionError("two at once")
    assert content(tmp_path) == {}


@pytest.mark.skipif(os.name == "nt", reason="there a dead holder's lease ends when its handle is closed")
def test_lease_of_a_dead_run_is_taken_over(tmp_path, no_locks):
    code = "import os, pathlib, sys; from deskgpt.run import lock; lock.LEASE_S = 0.4; "
    code += "lease = lock.leased(pathlib.Path(sys.argv[1])); os._exit(0)"
    subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, check=True)
    assert (tmp_path / lock.LEASE).exists()
    with only_run_in(tmp_path):
        assert json.loads((tmp_path / lock.HOLDER).read_bytes())["pid"] == os.getpid()


# ---- as a user meets them ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_of_two_runs_started_at_the_same_instant_exactly_one_trains(chars, tmp_path):
    out_dir = tmp_path / "out"
    settings = TINY | {"dataset": chars, "out_dir": out_dir, "max_iters": 1500, "eval_interval": 1500}
    command = [sys.executable, "train.py", *flags(**settings)]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    errors = {process.returncode: error for process in processes for error in [process.communicate()[1]]}
    assert errors.keys() == {0, 1}
    assert errors[0] == ""
    assert errors[1].startswith(f"error: out_dir={out_dir} is in use by a run that started ")
    assert errors[1].count("\n") == 1
    assert store.load(out_dir).iter_num == 1500
    assert [e["iter"] for e in events(out_dir, "iter")] == list(range(1500))
    assert sorted(content(out_dir)) == ["ckpt.pt", "ckpt_best.pt", "log.jsonl"]
