"""Ends saves at each call that changes a file, and checks what is left. Run with kill_points.c preloaded:

    LD_PRELOAD=kill_points.so python tests/kill_points.py kill_points.so FOLDER

One process imports torch and forks for each call. Prints, as JSON, the number of calls by scenario and what went wrong.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deskgpt.checkpoint import store
from deskgpt.checkpoint.store import Checkpoint
from deskgpt.compute.optimizer import make_optimizer
from deskgpt.run.saver import Saver
from model import GPT, GPTConfig

# (step, best, val loss so far): what a run saves, and then the run that is resumed after the kill.
SAVES = [(1, True, 3.0), (2, False, 3.0), (3, True, 2.0)]
RESUMED_STEP = 9


def state_of(step: int, best_val_loss: float) -> Checkpoint:
    torch.manual_seed(step)
    config = GPTConfig(block_size=8, vocab_size=20, n_layer=1, n_head=1, n_embd=8, bias=True)
    model = GPT(config)
    return Checkpoint(
        model=model.state_dict(),
        optimizer=make_optimizer(model, "adamw", 0.1, 1e-3, (0.9, 0.95), 0.95).state_dict(),
        model_args=config.as_args(),
        iter_num=step,
        best_val_loss=best_val_loss,
        config={"dataset": "x"},
        tokenizer={"name": "bytes"},
    )


STATES = [(state_of(step, loss), best) for step, best, loss in SAVES]


def silent(line: str) -> None:
    pass


def save_all(out_dir: Path, in_background: bool, report: int) -> None:
    """The saves of a run; writes "begun N" and "done N" lines to the file descriptor `report`."""
    saver = Saver(out_dir, silent, math.inf)
    if not in_background:
        saver.in_background = False
    for state, best in STATES:
        saver.save(state, best)
        os.write(report, f"begun {state.iter_num}\n".encode())
        for saved in saver.finished():
            os.write(report, f"done {saved.step}\n".encode())
    saver.wait()
    for saved in saver.finished():
        os.write(report, f"done {saved.step}\n".encode())
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


def kill_at_each_call(shim: ctypes.CDLL, folder: Path, before: str, in_background: bool) -> tuple[int, list[str]]:
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
                shim.count_calls_in(os.fsencode(out_dir), call)
                save_all(out_dir, in_background, writer)
                status = 0
            finally:
                os._exit(status)
        os.close(writer)
        with os.fdopen(reader) as report:
            lines = [line.split() for line in report]
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status):
            raise RuntimeError(f"{out_dir}: the saves failed")
        begun = [int(step) for word, step in lines if word == "begun"]
        done = [int(step) for word, step in lines if word == "done"]
        error = what_is_wrong(out_dir, before, begun, done)
        if error:
            wrong.append(f"{out_dir.name}, begun {begun}, done {done}: {error}")
        if os.WIFEXITED(status):
            return call - 1, wrong
    raise RuntimeError("the calls do not end")


def main(shim_path: str, folder: str) -> None:
    torch.set_num_threads(1)
    shim = ctypes.CDLL(shim_path)
    shim.count_calls_in.argtypes = (ctypes.c_char_p, ctypes.c_long)
    calls = {}
    wrong: list[str] = []
    for before, in_background in (("nothing", False), ("one file", True), ("damaged", True)):
        n, errors = kill_at_each_call(shim, Path(folder), before, in_background)
        calls[f"{before}, {'in the background' if in_background else 'at once'}"] = n
        wrong += errors
    print(json.dumps({"calls": calls, "wrong": wrong}))


if __name__ == "__main__":
    main(*sys.argv[1:])
