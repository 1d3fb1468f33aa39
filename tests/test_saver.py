from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from conftest import assert_equal, assert_one_line, files_of_at_most
from kill_points import kill_at_each_call, silent
from tiny_models import state_of

from deskgpt.checkpoint import store
from deskgpt.run.saver import Kept, Saver


def saver_of(folder: Path, said: list[str] | None = None) -> Saver:
    return Saver(folder, silent if said is None else said.append, best_val_loss=9.0)


def test_snapshot_is_written_while_the_state_changes_and_tied_weights_stay_one(tmp_path, monkeypatch):
    go = threading.Event()
    write = store.save
    monkeypatch.setattr(store, "save", lambda *args: go.wait() and write(*args))
    saver = saver_of(tmp_path)
    state = state_of(1, 2.0)
    expected = state_of(1, 2.0)
    saver.save(state, best=False)
    state.model["lm_head.weight"].add_(1)
    state.optimizer["param_groups"][0]["lr"] = 7.0
    assert saver.kept is None  # it is not on the disk yet
    go.set()
    saver.wait()
    assert saver.kept == Kept(tmp_path / "ckpt.pt", 1)
    loaded = store.load(tmp_path)
    assert_equal(loaded.model, dict(expected.model))
    assert_equal(loaded.optimizer, expected.optimizer)
    assert loaded.model["lm_head.weight"].data_ptr() == loaded.model["transformer.wte.weight"].data_ptr()
    torch.save(vars(expected), tmp_path / "plain.pt")
    assert (tmp_path / "ckpt.pt").stat().st_size < (tmp_path / "plain.pt").stat().st_size + 1000


def test_full_disk_and_broken_weights_leave_the_checkpoint_before_which_the_run_then_names(tmp_path):
    said: list[str] = []
    saver = saver_of(tmp_path, said)
    with files_of_at_most(kib=1):
        saver.save(state_of(0, 3.0), best=True)
        assert saver.kept_text() == "no checkpoint was saved yet"
    saver.save(state_of(1, 3.0), best=True)
    saver.wait()
    huge, bad, lost = (state_of(step, 2.0) for step in (2, 3, 4))
    huge.model["lm_head.weight"].fill_(1e27)  # finite, but what is computed with it is not
    bad.model["lm_head.weight"][0, 0] = torch.nan
    with files_of_at_most(kib=1):
        for state in (huge, bad, lost):
            saver.save(state, best=True)
            saver.wait()
    assert saver.best_val_loss == 3.0  # that of the files
    assert saver.kept == Kept(tmp_path / "ckpt.pt", 1)
    assert store.load(tmp_path).iter_num == store.load(tmp_path / "ckpt_best.pt").iter_num == 1
    for line, named in zip(said, ("free some disk space", "weights", "NaN", "free some disk space"), strict=True):
        assert_one_line(line, tmp_path / "ckpt.pt", named, "the run goes on")
    with pytest.raises(OSError, match="disk space"):
        saver.raise_if_last_failed()
    saver.save(state_of(5, 2.5), best=True)
    saver.wait()
    saver.raise_if_last_failed()
    assert store.load(tmp_path / "ckpt_best.pt").iter_num == 5
    assert not store.leftovers(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs fork and SIGKILL")
@pytest.mark.parametrize(("before", "in_background"), [("nothing", False), ("one file", True), ("damaged", True)])
def test_kill_at_any_call_of_a_save_loses_neither_the_last_nor_the_best_checkpoint(before, in_background):
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # where waiting for the disk takes no time
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        calls, wrong = kill_at_each_call(Path(folder), before, in_background)
    assert wrong == []
    assert calls > 15
