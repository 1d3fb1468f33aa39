"""Ends saves before each call that changes a file, and checks what is left: a fork for each call."""

from __future__ import annotations

import math
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiny_models import state_of

from deskgpt.checkpoint import store
from deskgpt.run.saver import Saver
from deskgpt.system.files import TEMPORARY

# Python's audit events of calls that change files. What is written within a file is not among them: a file gets its
# name when it is whole, so that none may be opened for writing under another one than a temporary name.
CHANGES = ("open", "os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "os.truncate", "shutil.copyfile")

# (step, best, val loss so far): what a run saves, and then the run that is resumed after the kill.
SAVES = [(1, True, 3.0), (2, False, 3.0), (3, True, 2.0)]
RESUMED_STEP = 9


STATES = [(state_of(step, loss), best) for step, best, loss in SAVES]


def silent(line: str) -> None:
    pass


def save_all(out_dir: Path, in_background: bool, report: int) -> None:
    """The saves of a run; writes "begun N" and "done N" lines to the file descriptor `report`."""
    saver = Saver(out_dir, silent, math.inf)
    if not in_background:
        saver.in_background = False
    for state, best in STATES:
        saver.wait()
        if saver.last:
            os.write(report, f"done {saver.last.step}\n".encode())
        saver.save(state, best)
        os.write(report, f"begun {state.iter_num}\n".encode())
    saver.wait()
    assert saver.last
    os.write(report, f"done {saver.last.step}\n".encode())
    saver.raise_if_last_failed()


def prepare_folder(out_dir: Path, before: str) -> None:
    """What an earlier run has left in out_dir."""
    out_dir.mkdir()
    if before == "nothing":
        return
    (out_dir / "ckpt.pt.1-a.tmp").write_text("torn")
    store.save(replace(STATES[0][0], iter_num=0, best_val_loss=4.0), out_dir, best=True)
    if before == "one file":  # nanoGPT's
        (out_dir / store.BEST).unlink()
    elif before == "damaged":
        os.truncate(out_dir / store.NAME, 1000)


def what_is_wrong(out_dir: Path, before: str, begun: list[int], done: list[int]) -> str | None:
    """What a kill has broken of the promises."""
    had_files = before != "nothing"
    losses = {step: loss for step, best, loss in SAVES if best} | ({0: 4.0} if had_files else {})
    bests_done = [step for step in done if step in losses]
    try:
        last = store.resume(out_dir)
    except ValueError as e:
        return str(e) if had_files or done else None
    if last.iter_num < max([0, *done, *(step - 1 for step in begun)]):
        return f"the last one is of step {last.iter_num}"
    if bests_done or before == "damaged" or (out_dir / store.BEST).exists():
        best = store.load(out_dir / store.BEST)
        if best.iter_num not in losses:
            return f"the best one is of step {best.iter_num}"
        if best.best_val_loss > min([losses[step] for step in bests_done], default=4.0):
            return f"the best one has loss {best.best_val_loss}"
        if last.best_val_loss != best.best_val_loss:
            return f"the resumed run takes {last.best_val_loss} for the best loss, not {best.best_val_loss}"
    # The resumed run saves one that is no improvement, which must leave the best alone.
    expected = last.best_val_loss
    store.take_over(out_dir, silent)
    store.save(state_of(RESUMED_STEP, expected), out_dir, best=False)
    if store.load(out_dir).iter_num != RESUMED_STEP:
        return "the resumed run's checkpoint is not there"
    if store.load(out_dir / store.BEST).best_val_loss != expected:
        return "the resumed run has lost the best one"
    if store.leftovers(out_dir):
        return "temporary files are left"
    return None


def kill_before(call: int, out_dir: Path, report: int) -> None:
    """From now on this process is killed before that call in out_dir; writes "in place NAME" lines to `report`."""
    calls = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal calls
        if event not in CHANGES or not str(arguments[0]).startswith(str(out_dir)):
            return
        is_write = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if is_write and not str(arguments[0]).endswith(TEMPORARY):
            os.write(report, f"in-place {Path(arguments[0]).name}\n".encode())
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def kill_at_each_call(folder: Path, before: str, in_background: bool) -> tuple[int, list[str]]:
    """How many calls there are, and what went wrong."""
    wrong = []
    for call in range(1, 10_000):
        out_dir = folder / f"{before}-{in_background}-{call}"
        prepare_folder(out_dir, before)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                kill_before(call, out_dir, writer)
                save_all(out_dir, in_background, writer)
                status = 0
            finally:
                os._exit(status)
        os.close(writer)
        with os.fdopen(reader) as report:
            lines = [line.split() for line in report]
        _, status = os.waitpid(child, 0)
        assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0, f"{out_dir}: the saves failed"
        begun = [int(step) for word, step in lines if word == "begun"]
        done = [int(step) for word, step in lines if word == "done"]
        in_place = [f"{name} is written in place" for word, name in lines if word == "in-place"]
        error = what_is_wrong(out_dir, before, begun, done)
        wrong += [f"{out_dir.name}, begun {begun}, done {done}: {e}" for e in [*in_place, error] if e]
        if os.WIFEXITED(status):
            return call - 1, wrong
    raise AssertionError("the calls do not end")
