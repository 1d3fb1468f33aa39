from __future__ import annotations

import errno
import itertools
import math
import os
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assert_one_line, files_of_at_most
from tiny_models import state_of

from deskgpt.checkpoint import store
from deskgpt.run.saver import Saver
from deskgpt.system.files import TEMPORARY


def silent(line: str) -> None:
    pass


def saver_of(folder: Path, lines: list[str] | None = None) -> Saver:
    return Saver(folder, silent if lines is None else lines.append, best_val_loss=9.0)


def test_full_disk_and_broken_weights_leave_the_checkpoint_before(tmp_path):
    lines: list[str] = []
    saver = saver_of(tmp_path, lines)
    saver.save(state_of(1, 3.0), best=True)
    huge = state_of(2, 2.0)
    bad = state_of(3, 2.0)
    huge.model["lm_head.weight"].fill_(1e27)  # finite, but what is computed with it is not
    bad.model["lm_head.weight"][0, 0] = torch.nan
    with files_of_at_most(kib=1):
        for state in (huge, bad, state_of(4, 2.0)):
            saver.save(state, best=True)
    assert saver.is_best(2.5, step=5)  # the files have 3.0
    assert saver.kept_step == 1
    assert store.load(tmp_path).iter_num == store.load(tmp_path / "ckpt_best.pt").iter_num == 1
    for line, named in zip(lines, ("weights", "NaN", "free some disk space"), strict=True):
        assert_one_line(line, tmp_path / "ckpt.pt", named, "the run continues")
    with pytest.raises(OSError, match="disk space"):
        saver.raise_if_last_failed()
    saver.save(state_of(5, 2.5), best=True)
    saver.raise_if_last_failed()
    assert store.load(tmp_path / "ckpt_best.pt").iter_num == 5
    assert not store.leftovers(tmp_path)


def test_best_model_is_better_than_the_checkpoint_on_the_disk_also_after_a_disk_was_full(tmp_path, monkeypatch):
    """It was full right after the best one was written."""

    def full(path: Path, to: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    saver = saver_of(tmp_path)
    assert not saver.is_best(8.0, step=0)  # random weights
    with monkeypatch.context() as m:
        m.setattr(store, "copy", full)
        saver.save(state_of(1, 0.5), best=True)
    assert saver.is_best(0.4, step=2)
    assert not saver.is_best(0.6, step=2)
    assert store.load(tmp_path / store.BEST).best_val_loss == 0.5
    assert store.resume(tmp_path).iter_num == 1


# ---- kills ---------------------------------------------------------------------------------------------------

# Python's audit events of calls that change files. Writes within a file are not among them, so a file must be written
# under a temporary name and renamed when it is complete.
CHANGES = ("open", "os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "os.truncate", "shutil.copyfile")

SAVES = [(1, True, 3.0), (2, False, 3.0), (3, True, 2.0)]  # (step, best, val loss so far)
STATES = [(state_of(step, loss), best) for step, best, loss in SAVES]


def prepare_folder(out_dir: Path, before: str) -> None:
    """Write the files that an earlier run has left in out_dir."""
    out_dir.mkdir()
    if before != "nothing":
        (out_dir / "ckpt.pt.1-a.tmp").write_text("torn")
        store.save(replace(STATES[0][0], iter_num=0, best_val_loss=4.0), out_dir, best=True)
    if before == "one file":  # nanoGPT's
        (out_dir / store.BEST).unlink()
    elif before == "damaged":
        os.truncate(out_dir / store.NAME, 1000)


def save_all(out_dir: Path, killed_before: int, report: int) -> None:
    """Save as a run does that is killed before this call in out_dir. report: a file descriptor for its progress."""
    calls = 0

    def write_report(word: str, what: object) -> None:
        os.write(report, f"{word} {what}\n".encode())

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal calls
        if event not in CHANGES or not str(arguments[0]).startswith(str(out_dir)):
            return
        is_write = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if is_write and not str(arguments[0]).endswith(TEMPORARY):
            write_report("in-place", arguments[0])
        calls += 1
        if calls == killed_before:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    saver = Saver(out_dir, silent, math.inf)
    for state, best in STATES:
        saver.save(state, best)
        write_report("begun", state.iter_num)
        saver.raise_if_last_failed()
        write_report("done", state.iter_num)


def assert_nothing_lost(out_dir: Path, before: str, begun: list[int], done: list[int]) -> None:
    """Check that what a kill leaves is what docs/reliability.md promises, and that a run resumes from there."""
    losses = {step: loss for step, best, loss in SAVES if best} | ({} if before == "nothing" else {0: 4.0})
    if before == "nothing" and not done and not store.candidates(out_dir):
        return
    last = store.resume(out_dir)
    assert last.iter_num >= max([0, *done, *(step - 1 for step in begun)])
    bests_done = [step for step in done if step in losses]
    if bests_done or before == "damaged" or (out_dir / store.BEST).exists():
        best = store.load(out_dir / store.BEST)
        assert best.iter_num in losses
        assert best.best_val_loss <= min([losses[step] for step in bests_done], default=4.0)
        assert last.best_val_loss == best.best_val_loss
    # The resumed run saves a worse model, which must leave the best one alone.
    store.take_over(out_dir, silent)
    store.save(state_of(9, last.best_val_loss), out_dir, best=False)
    assert store.load(out_dir).iter_num == 9
    assert store.load(out_dir / store.BEST).best_val_loss == last.best_val_loss
    assert not store.leftovers(out_dir)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs fork and SIGKILL")
@pytest.mark.parametrize("before", ["nothing", "one file", "damaged"])
def test_kill_at_any_call_of_a_save_loses_neither_the_last_nor_the_best_checkpoint(before):
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # where waiting for the disk takes no time
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        for call in itertools.count(1):
            out_dir = Path(folder, str(call))
            prepare_folder(out_dir, before)
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    save_all(out_dir, call, writer)
                    status = 0
                finally:
                    os._exit(status)
            os.close(writer)
            with os.fdopen(reader) as report:
                reported = [line.split() for line in report]
            _, status = os.waitpid(child, 0)
            assert status in (0, signal.SIGKILL)
            assert not [what for word, what in reported if word == "in-place"]
            begun, done = ([int(what) for word, what in reported if word == kind] for kind in ("begun", "done"))
            assert_nothing_lost(out_dir, before, begun, done)
            if status == 0:
                break
    assert call > 15
