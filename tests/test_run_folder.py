"""What a run keeps in its folder: checkpoints that no kill and no full disk loses, and its log; one
run at a time.
"""

import errno
import itertools
import math
import os
import re
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO
from unittest import mock

import pytest
import torch
from conftest import (
    POSIX,
    TINY,
    assert_one_line,
    contents,
    events,
    fails,
    files_of_at_most,
    flags,
    raises_one_line,
    run_tiny,
    shell,
    slow,
)
from gloo import forked, in_forks
from tiny_models import state_of

from deskgpt.checkpoint import (
    CKPT,
    CKPT_BEST,
    clean_out_dir,
    is_checkpoint,
    list_checkpoints,
    load_checkpoint,
    load_to_resume,
    save_checkpoint,
    write_ckpt_file,
)
from deskgpt.files import TEMPORARY, locked_folder
from deskgpt.logger import RunLog, read_events
from deskgpt.saving import Checkpointer


def test_full_disk_and_broken_weights_leave_the_checkpoint_before(tmp_path, monkeypatch, capsys):
    saver = Checkpointer(tmp_path, print, best_val_loss=9.0)
    assert not saver.is_best(8.0, step=0)  # random weights
    saver.save(state_of(1, 3.0), best=True)
    # 1e27 is finite, but what is computed with it is not.
    for weight, named in ((1e27, "above"), (-1e27, "above 1e+18"), (torch.nan, "NaN")):
        state = state_of(2, 2.0)
        state.model["lm_head.weight"][0, 0] = weight
        with raises_one_line(tmp_path / "ckpt.pt", "transformer.wte.weight", named, "is intact"):
            saver.save(state, best=True)
    with files_of_at_most(kib=1):
        saver.save(state_of(4, 2.0), best=True)
    assert saver.is_best(2.5, step=5)  # the files have 3.0
    assert saver.saved_step == 1
    for path in (tmp_path, tmp_path / CKPT_BEST):
        assert load_checkpoint(path).iter_num == 1
    assert_one_line(capsys.readouterr().out, tmp_path / CKPT, "free some disk space", "continues")
    with pytest.raises(OSError, match="disk space"):
        saver.raise_if_last_failed()
    saver.save(state_of(5, 2.5), best=True)
    saver.raise_if_last_failed()
    assert load_checkpoint(tmp_path / CKPT_BEST).iter_num == 5
    assert not list(tmp_path.glob("*.tmp"))
    # The disk fills after the best one is written and before the last one is.
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr("deskgpt.checkpoint.copy_file", full)
    saver.save(state_of(5, 0.5), best=True)
    assert not saver.is_best(0.6, step=7)
    assert load_checkpoint(tmp_path / CKPT_BEST).best_val_loss == 0.5
    assert load_checkpoint(tmp_path).best_val_loss == 2.5
    # It is tried again, though its step was saved before
    monkeypatch.undo()
    state = mock.Mock(step=5, checkpoint=partial(state_of, 5))
    saver.save_if_due(state, mock.MagicMock())
    saver.raise_if_last_failed()
    assert load_checkpoint(tmp_path).best_val_loss == 0.5


def test_nan_and_a_later_checkpoint_are_moved_aside_before_they_are_overwritten(tmp_path, capsys):
    """Damage of a file that one resumes, and a run that goes back to its best model."""
    for aside, step, number, named, loaded in (
        ("previous-1", 7, torch.nan, "NaN", 5),
        ("previous-2", 8, 0.0, "step 8", 8),
    ):
        save_checkpoint(state_of(5, 3.0), tmp_path, best=True)
        state = state_of(step)
        state.model["lm_head.weight"][0, 0] = number
        write_ckpt_file(vars(state), tmp_path / CKPT)
        before = (tmp_path / CKPT).read_bytes()
        assert load_checkpoint(tmp_path).iter_num == loaded
        Checkpointer(tmp_path, print, 3.0, saved_step=5).save(state_of(6), best=False)
        assert_one_line(capsys.readouterr().out, tmp_path / CKPT, named, aside)
        assert contents(tmp_path / aside) == {CKPT: before}
        assert load_checkpoint(tmp_path).iter_num == 6


# ---- kills ---------------------------------------------------------------------------------------

# Python's audit events of calls that change files. Writes within a file are not among them, so a
# file must be written under a temporary name and renamed when it is complete.
CHANGES = re.compile("open|shutil.copyfile|os.(rename|remove|link|mkdir|rmdir|truncate)")

STATES = [(state_of(1, 3.0), True), (state_of(2, 3.0), False), (state_of(3, 2.0), True)]  # best?


def save_all(out_dir: Path, killed_before: int, report: BinaryIO) -> None:
    """Save as a run does that is killed before this call in out_dir, and report the progress."""
    calls = 0

    def hook(event, arguments):
        nonlocal calls
        if not CHANGES.fullmatch(event) or not str(arguments[0]).startswith(str(out_dir)):
            return
        is_write = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if is_write and not str(arguments[0]).endswith(TEMPORARY):
            report.write(f"in-place {arguments[0]}\n".encode())
        calls += 1
        if calls == killed_before:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    best_val_loss = load_to_resume(out_dir).best_val_loss if is_checkpoint(out_dir) else math.inf
    saver = Checkpointer(out_dir, print, best_val_loss)
    for state, best in STATES:
        saver.save(state, best)
        saver.raise_if_last_failed()
        report.write(f"done {state.iter_num}\n".encode())


def assert_nothing_lost(out_dir: Path, before: str, done: list[int]) -> None:
    """Check that what a kill leaves is what docs/reliability.md promises, and that a run resumes
    from there.
    """
    losses = {state.iter_num: state.best_val_loss for state, best in STATES if best}
    if before != "nothing":
        losses[0] = 4.0
    elif not done and not list_checkpoints(out_dir):
        return
    last = load_to_resume(out_dir)
    assert last.iter_num >= max([0, *done])
    bests_done = [losses[step] for step in done if step in losses]
    if bests_done or before == "damaged" or (out_dir / CKPT_BEST).exists():
        best = load_checkpoint(out_dir / CKPT_BEST)
        assert best.iter_num in losses
        assert best.best_val_loss == last.best_val_loss <= min(bests_done, default=4.0)
    # The resumed run saves a worse model, which must leave the best one alone.
    clean_out_dir(out_dir, print)
    save_checkpoint(state_of(9, last.best_val_loss), out_dir, best=False)
    assert load_checkpoint(out_dir).iter_num == 9
    assert load_checkpoint(out_dir / CKPT_BEST).best_val_loss == last.best_val_loss
    assert not list(out_dir.glob("*.tmp"))


@slow
@POSIX
@pytest.mark.parametrize("before", ["nothing", "one file", "damaged"])
def test_kill_at_any_call_of_a_save_loses_neither_the_last_nor_the_best_checkpoint(before):
    # Where waiting for the disk takes no time.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        for call in itertools.count(1):
            out_dir = Path(folder, str(call))
            out_dir.mkdir()
            if before != "nothing":  # what an earlier run has left
                (out_dir / "ckpt.pt.1-a.tmp").write_text("torn")
                save_checkpoint(state_of(0, 4.0), out_dir, best=True)
            if before == "one file":  # nanoGPT's
                (out_dir / CKPT_BEST).unlink()
            elif before == "damaged":
                os.truncate(out_dir / CKPT, 1000)
            reported = Path(folder, f"{call}.report")
            with open(reported, "wb", buffering=0) as report:
                (status,) = in_forks(partial(save_all, out_dir, call, report))
            assert status in (0, -signal.SIGKILL)
            lines = reported.read_text().splitlines()
            assert all(line.startswith("done ") for line in lines)  # nothing was written in place
            assert_nothing_lost(out_dir, before, [int(line.split()[1]) for line in lines])
            if status == 0:
                break
    assert call > 15


# ---- the log -------------------------------------------------------------------------------------


@POSIX
def test_log_continues_after_a_torn_line_and_a_full_disk_and_if_it_was_moved_away(tmp_path, capsys):
    path = tmp_path / "log.jsonl"
    path.write_text('{"event": "it')
    log = RunLog(path)
    log.write("start", iter=0, note="x" * 970)
    with files_of_at_most(kib=1):  # room for a part of a line
        for step in range(3):
            log.write("iter", iter=step)
    log.write("iter", iter=3)
    assert [e["iter"] for e in read_events(path)] == [0, 3]
    assert_one_line(capsys.readouterr().err, path, "File too large", "the run continues")
    path.rename(tmp_path / "moved")
    log.write("iter", iter=4)
    assert [e["iter"] for e in read_events(path)] == [4]


@POSIX
def test_untrusted_log_that_is_a_link_writes_nowhere_else(tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "log.jsonl").symlink_to(tmp_path / "mine")
    with raises_one_line(tmp_path / "log.jsonl", "link", kind=OSError):
        RunLog(tmp_path / "log.jsonl")
    assert (tmp_path / "mine").read_text() == "precious"


def test_log_has_the_commit_of_the_code_though_a_hook_of_another_repository_starts_the_run(
    chars, tmp_path, monkeypatch
):
    head = shell("git", "rev-parse", "--short=12", "HEAD").stdout.strip()
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    run_tiny(chars, tmp_path / "out", max_iters=0)
    [start] = events(tmp_path / "out", "start")
    assert (start["git_commit"] or "").removesuffix("+changes") == head


@slow
def test_wandb_offline_logs_and_a_resumed_run_keeps_its_id(chars, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    for settings in ({"max_iters": 3}, {"init_from": "resume"}):
        run_tiny(chars, tmp_path / "out", wandb_log=True, **settings)
    run_id = load_checkpoint(tmp_path / "out").wandb_run_id
    assert run_id
    # A folder is named run-TIME-ID, and -1 follows if both began in the same second.
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{run_id}*/*.wandb"))) == 2


def test_wandb_gets_the_numbers_and_a_run_continues_if_it_fails(tmp_path, capsys):
    wandb_run = mock.Mock()
    wandb_run.log.side_effect = [None, OSError("no space left")]
    log = RunLog(tmp_path / "log.jsonl", wandb_run)
    for step in (7, 8, 9):
        log.write("iter", iter=step, mfu=0.5)
    assert wandb_run.log.call_count == 2  # it is not called again
    assert wandb_run.log.call_args_list[0] == mock.call({"iter": 7, "mfu": 50.0}, step=7)
    assert len(events(tmp_path, "iter")) == 3
    assert_one_line(capsys.readouterr().err, "wandb", "no space left", "the run continues")


# ---- one run at a time ---------------------------------------------------------------------------


def test_second_run_is_refused_and_leaves_no_trace(chars, tmp_path, script):
    out_dir = tmp_path / "a" / "out"
    with locked_folder(out_dir):
        before = contents(out_dir)
        done = script("train.py", *flags(**TINY, dataset=chars, out_dir=out_dir))
        assert contents(out_dir) == before
    fails(done, f"{out_dir} is in use", "another folder")
    assert contents(out_dir) == {}


@POSIX
def test_run_whose_folder_went_ends_and_writes_nothing_into_the_next_ones(tmp_path):
    out_dir = tmp_path / "out"
    for remove in (shutil.rmtree, lambda path: path.rename(f"{path}-old")):
        with locked_folder(out_dir):
            log = RunLog(out_dir / "log.jsonl")
            saver = Checkpointer(out_dir, print, best_val_loss=9.0)
            remove(out_dir)
            with raises_one_line(out_dir, "removed or renamed"):
                log.write("iter", iter=1)
            out_dir.mkdir()  # it may get the number of the one that was removed
            with raises_one_line(out_dir, "removed or renamed"):
                saver.save(state_of(), best=True)
        assert contents(out_dir) == {}


def test_file_system_without_locks_gets_a_note(tmp_path, monkeypatch, capsys):
    # Others refuse with other errors, and this one looks like a lock of another process.
    monkeypatch.setattr("fcntl.flock", mock.Mock(side_effect=OSError(errno.EACCES, "no")))
    with locked_folder(tmp_path):
        pass
    assert_one_line(capsys.readouterr().err, tmp_path, "no locks")


@slow
@POSIX
def test_of_many_processes_that_come_and_go_one_at_a_time_is_in_the_folder(tmp_path):
    """Each that gets in makes a file that must not exist yet, and removes it."""
    folder = tmp_path / "out"

    def come_and_go(number):
        times = 0
        while times < 50:
            with suppress(ValueError), locked_folder(folder):
                (folder / "alone").touch(exist_ok=False)
                times += 1
                (folder / "alone").unlink()

    forked(4, come_and_go)
    assert not list(folder.iterdir())
