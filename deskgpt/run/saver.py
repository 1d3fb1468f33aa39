"""Checkpoints written while the training goes on: the loop waits for a copy in memory, a thread writes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.utils._pytree import tree_leaves, tree_map_only

from deskgpt.checkpoint import store
from deskgpt.checkpoint.folders import agreed
from deskgpt.checkpoint.store import Checkpoint
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.sharding import group_for_saves, is_dtensor, local
from deskgpt.run.report import Report
from deskgpt.run.train_state import TrainState
from deskgpt.system import hardware

if TYPE_CHECKING:
    from train import TrainConfig

MEMORY_FACTOR = 1.5  # how much of a copy's size must be free: the system needs some, too


@dataclass(eq=False)
class Saved:
    """A save that was begun."""

    step: int
    best: bool
    save_s: float = 0.0  # what it cost the training loop
    write_s: float | None = None  # until the files were durable; None while it goes on
    error: BaseException | None = None


class Kept(NamedTuple):
    """The latest checkpoint on the disk, to which a run can go back."""

    path: Path  # of the file or its folder
    step: int


@dataclass(eq=False)
class Saver:
    """Writes the checkpoints of a run into out_dir, one after the other, and knows the latest one.

    A save that fails is printed, and the run goes on. With a group, which is for saves alone, its ranks write their
    shards together, at the same step: their threads wait for each other, and a save succeeds or fails for all.
    """

    out_dir: Path
    print0: Callable[[str], None]
    best_val_loss: float  # of the best checkpoint on the disk
    in_background: bool = True
    group: distributed.ProcessGroup | None = None
    kept: Kept | None = None  # the latest checkpoint; at first the one that the run goes on from

    def __post_init__(self) -> None:
        self.latest_step = self.kept.step if self.kept else 0  # that was saved, or that the run began with
        self.last: Saved | None = None
        self._reported: Saved | None = None
        self._thread: threading.Thread | None = None
        self._has_taken_over = False

    @classmethod
    def of(cls, config: TrainConfig, state: TrainState) -> Saver:
        """For a run of these settings."""
        group = group_for_saves(config.dist_timeout_s) if state.runner.sharded else None
        kept = Kept(Path(config.out_dir), state.step) if state.first_step > 0 else None
        out_dir = store.folder_of(config.out_dir)
        print0 = state.dist.print0
        saver = cls(out_dir, print0, state.best_val_loss, config.save_async, group, kept)
        if config.init_from not in ("scratch", "resume"):
            saver.latest_step = -1  # weights that were trained elsewhere can stay the best: they are saved, too
        return saver

    # ---- in a run ----------------------------------------------------------------------------------------

    def save_if_new(self, state: TrainState, report: Report, best: bool) -> None:
        """Saves the run as it is now, unless its step was saved already. All ranks call this.

        best: whether its val loss is the best so far. That of random weights is not worth a file. While gradients are
        not finite nothing is saved: the weights may be the cause, and the last good checkpoint stays.
        """
        is_new_best = best and state.step > 0
        is_saved = state.step == self.latest_step and not is_new_best
        if is_saved or state.bad_in_a_row or state.config.eval_only:
            return
        if state.dist.is_first or self.group is not None:
            self.print0(f"saving checkpoint to {self.out_dir}")
            with report.timer.spent_on("saving"):
                self.wait()
                best_val_loss = state.best_val_loss
                self.report_ended(state, report)
                if best:  # whatever came of the save before, this one holds the best loss
                    state.best_val_loss = best_val_loss
                saving = self.save(state.checkpoint(), best)
            saving.save_s = report.timer.last_s["saving"]
        self.latest_step = state.step

    def report_ended(self, state: TrainState, report: Report) -> None:
        """Reports the last save, once, when it has ended. After one that failed, an earlier loss is the best."""
        saved = self.last
        if saved is None or saved.write_s is None or saved is self._reported:
            return
        self._reported = saved
        if saved.error is None:
            report.event("save", "", iter=saved.step, best=saved.best, save_s=saved.save_s, write_s=saved.write_s)
            return
        if not isinstance(saved.error, OSError | ValueError):  # no user's
            raise saved.error
        self.latest_step = -1  # so that the same step is tried again
        state.best_val_loss = self.best_val_loss

    def finish(self, state: TrainState, report: Report, stop: str | None) -> None:
        """At the end of a run: saves what was not saved yet if something stopped it, and waits for the last save."""
        if stop:
            self.save_if_new(state, report, best=False)
        self.wait()
        self.report_ended(state, report)

    def latest(self, dist: DistContext) -> Kept | None:
        """The latest checkpoint, once the save that goes on has ended. All ranks call this and get the same."""
        self.wait()
        return dist.gather(self.kept)[0]

    def kept_text(self) -> str:
        """What an error says about the checkpoints."""
        self.wait()
        if self.kept is None:
            return "no checkpoint was saved yet"
        return f"the last checkpoint is {self.kept.path} of step {self.kept.step}"

    # ---- writing -----------------------------------------------------------------------------------------

    def save(self, checkpoint: Checkpoint, best: bool) -> Saved:
        """Begins to write, after the save before has ended. What it holds may change afterwards."""
        self.wait()
        self.last = Saved(checkpoint.iter_num, best)
        if self.in_background and has_room_for(checkpoint):
            # Not a daemon: whatever ends the run, except a kill, the interpreter waits for the checkpoint.
            copy = snapshot(checkpoint)
            self._thread = threading.Thread(target=self._write, args=(copy, self.last), name="saver")
            self._thread.start()
            return self.last
        if self.in_background:
            self.print0("little memory is free: training waits while the checkpoint is written")
        self._write(checkpoint, self.last)
        return self.last

    def _write(self, checkpoint: Checkpoint, saved: Saved) -> None:
        t0 = time.perf_counter()
        try:
            if not self._has_taken_over:
                agreed(self.group, self._take_over)
                self._has_taken_over = True
            store.save(checkpoint, self.out_dir, saved.best, self.group)
            self.kept = Kept(self.out_dir / store.NAME, saved.step)
            if saved.best:
                self.best_val_loss = checkpoint.best_val_loss
        except BaseException as e:  # for the training loop, in its own thread
            saved.error = e
            if saved.best and store.step_of_best(self.out_dir) == saved.step:  # it is there although ckpt.pt is not
                self.best_val_loss = checkpoint.best_val_loss
        saved.write_s = time.perf_counter() - t0
        if isinstance(saved.error, OSError | ValueError):
            self.print0(f"{saved.error}; the run goes on and tries again at the next save")

    def _take_over(self) -> None:
        if self.group is None or distributed.get_rank(self.group) == 0:
            store.take_over(self.out_dir, self.print0)

    def wait(self) -> None:
        """Returns when the last save has ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def raise_if_last_failed(self) -> None:
        """Raises what the last save failed with."""
        if self.last is not None and self.last.error is not None:
            raise self.last.error


def snapshot(state: Checkpoint) -> Checkpoint:
    """A copy in the machine's memory, made when this returns. Tensors that share their numbers share them in it too."""
    copies: dict[tuple[torch.device, int], torch.UntypedStorage] = {}

    def copied(tensor: Tensor) -> Tensor:
        if is_dtensor(tensor):
            # DTensor.from_local would move the copy back to the GPU.
            names, frame = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            inner = {name: getattr(tensor, name) for name in names} | {"_local_tensor": copied(local(tensor))}
            return type(tensor).__tensor_unflatten__(inner, frame, tensor.size(), tensor.stride())  # type: ignore[attr-defined]
        storage = tensor.untyped_storage()
        key = (tensor.device, storage.data_ptr())
        if key not in copies:
            copies[key] = storage.clone() if storage.device.type == "cpu" else storage.cpu()
        made = torch.empty(0, dtype=tensor.dtype)
        return made.set_(copies[key], tensor.storage_offset(), tensor.size(), tensor.stride())

    content: dict[str, Any] = tree_map_only(Tensor, copied, vars(state))
    return replace(state, **content)


def has_room_for(state: Checkpoint) -> bool:
    """Whether the memory for a snapshot is free, as far as the system tells."""
    tensors = [local(x) for x in tree_leaves(vars(state)) if isinstance(x, Tensor)]
    storages = {(t.device, t.untyped_storage().data_ptr()): t.untyped_storage().nbytes() for t in tensors}
    free_bytes = hardware.free_memory_bytes()
    return free_bytes is None or MEMORY_FACTOR * sum(storages.values()) < free_bytes
