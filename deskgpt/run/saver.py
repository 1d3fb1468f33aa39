"""Checkpoints written while the training goes on: the loop waits for a copy in memory, a thread writes it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from deskgpt.checkpoint import store
from deskgpt.checkpoint.store import Checkpoint
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.sharding import is_dtensor, is_sharded, local, unsharded
from deskgpt.run.report import Report
from deskgpt.run.schedule import Config
from deskgpt.run.train_state import TrainState
from deskgpt.system import hardware

MEMORY_FACTOR = 1.5  # how much of a copy's size must be free: the system needs some, too


class Kept(NamedTuple):
    """The latest checkpoint on the disk."""

    path: Path  # of the file or its folder
    step: int


@dataclass(eq=False)
class Saver:
    """Writes the checkpoints of a run into out_dir, one after the other, and knows the latest and the best one there.

    A save that fails is printed, and the run continues. Of a sharded run all ranks give their rows to rank 0, which
    writes: what is saved and what is the best is decided there.
    """

    out_dir: Path
    print0: Callable[[str], None]
    best_val_loss: float  # of the best checkpoint on the disk; the thread that writes sets it, once the file is durable
    sharing: DistContext | None = None  # the ranks of a sharded run
    kept: Kept | None = None  # the latest checkpoint; at first the one from which the run resumes
    is_trained_elsewhere: bool = False  # weights that can stay the best: they are saved at step 0, too

    def __post_init__(self) -> None:
        first_step = self.kept.step if self.kept else 0
        self.latest_step = -1 if self.is_trained_elsewhere else first_step  # saved, or that the run began with
        self.error: BaseException | None = None  # of the last save
        self._thread: threading.Thread | None = None
        self._has_taken_over = False

    @classmethod
    def of(cls, config: Config, best_val_loss: float, state: TrainState) -> Saver:
        """Return the saver of a run. best_val_loss: of the best checkpoint in its folder."""
        sharing = state.dist if is_sharded(state.model) else None
        kept = Kept(Path(config.out_dir), state.step) if state.first_step > 0 else None
        is_trained_elsewhere = config.init_from not in ("scratch", "resume")
        out_dir = store.folder_of(config.out_dir)
        return cls(out_dir, state.dist.print0, best_val_loss, sharing, kept, is_trained_elsewhere)

    # ---- in a run ----------------------------------------------------------------------------------------

    def is_best(self, val_loss: float, step: int) -> bool:
        """Return whether a model with this val loss, evaluated now, is better than the best checkpoint on the disk.

        Random weights are never the best: they are not worth a file.
        """
        self.wait()
        is_best = val_loss < self.best_val_loss and (step > 0 or self.is_trained_elsewhere)
        return self.sharing.gather(is_best)[0] if self.sharing else is_best

    def save_if_new(self, state: TrainState, report: Report, best_val_loss: float | None = None) -> None:
        """Save the run as it is now, unless its step was saved already. All ranks call this.

        best_val_loss: the model's, if it is_best.
        """
        is_best = best_val_loss is not None
        with report.timer.spent_on("saving"):
            self.wait()
            is_saved = state.step == self.latest_step and not is_best
            if self.sharing:
                is_saved = self.sharing.gather(is_saved)[0]  # rank 0 alone knows of a save that failed
            if is_saved:
                return
            if state.dist.is_first or self.sharing:
                report.event("save", f"saving checkpoint to {self.out_dir}", iter=state.step, best=is_best)
                on_disk = best_val_loss if best_val_loss is not None else self.best_val_loss
                self.save(state.checkpoint(on_disk, report.wandb_run_id), is_best)
        self.latest_step = state.step

    def finish(self, state: TrainState, report: Report, saves: bool) -> None:
        """End: save what was not saved yet, if the run is to be resumed, and wait for the last save."""
        if saves:
            self.save_if_new(state, report)
        self.wait()

    def kept_text(self) -> str:
        """Return what an error says about the checkpoints."""
        self.wait()
        if self.kept is None:
            return "no checkpoint was saved yet"
        return f"the last checkpoint is {self.kept.path} of step {self.kept.step}"

    # ---- writing -----------------------------------------------------------------------------------------

    def save(self, checkpoint: Checkpoint, best: bool) -> None:
        """Begin to write, after the save before has ended. What it holds may change afterwards."""
        self.wait()
        self.error = None
        if self.sharing or has_room_for(checkpoint):
            copy = snapshot(checkpoint)
            if self.sharing and not self.sharing.is_first:
                return
            # Not a daemon: whatever ends the run, except a kill, the interpreter waits for the checkpoint.
            self._thread = threading.Thread(target=self._write, args=(copy, best), name="saver")
            self._thread.start()
        else:
            self.print0("little memory is free: training waits while the checkpoint is written")
            self._write(checkpoint, best)

    def _write(self, checkpoint: Checkpoint, best: bool) -> None:
        try:
            if not self._has_taken_over:
                store.take_over(self.out_dir, self.print0)
                self._has_taken_over = True
            store.save(checkpoint, self.out_dir, best)
            self.kept = Kept(self.out_dir / store.NAME, checkpoint.iter_num)
            if best:
                self.best_val_loss = checkpoint.best_val_loss
        except BaseException as e:  # for `wait`, in the loop's thread
            self.error = e
            if best and store.step_of_best(self.out_dir) == checkpoint.iter_num:  # it failed after that was durable
                self.best_val_loss = checkpoint.best_val_loss
            if isinstance(e, OSError | ValueError):
                self.print0(f"{e}; the run continues and tries again at the next save")

    def wait(self) -> None:
        """Return when the last save has ended. Raises what it failed with if that is a defect, not the user's."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self.error is not None:
            self.latest_step = -1  # so that the same step is tried again
            if not isinstance(self.error, OSError | ValueError):
                raise self.error

    def raise_if_last_failed(self) -> None:
        """Raise what the last save failed with."""
        if self.error is not None:
            raise self.error


def snapshot(state: Checkpoint) -> Checkpoint:
    """Return a copy in the machine's memory. Tensors that share their numbers share them in it too.

    Of sharded tensors rank 0 gets full ones. All ranks that share them call this.
    """
    copies: dict[int, torch.UntypedStorage] = {}
    gathered: dict[int, Tensor] = {}
    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0

    def copied(tensor: Tensor) -> Tensor:
        storage = local(tensor).untyped_storage()
        key = storage._cdata  # of rows also where there are none, so that all ranks gather the same
        if is_dtensor(tensor):
            if key not in gathered:
                full = unsharded(tensor)
                gathered[key] = full.cpu() if is_first else torch.empty(0)
            return gathered[key]
        if key not in copies:
            copies[key] = storage.clone() if storage.device.type == "cpu" else storage.cpu()
        made = torch.empty(0, dtype=tensor.dtype)
        return made.set_(copies[key], tensor.storage_offset(), tensor.size(), tensor.stride())

    content: dict[str, Any] = tree_map_only(Tensor, copied, vars(state))
    return replace(state, **content)


def has_room_for(state: Checkpoint) -> bool:
    """Return whether the memory for a snapshot is free, as far as the system tells."""
    tensors = [x for x in tree_leaves(vars(state)) if isinstance(x, Tensor)]
    copy_bytes = sum(x.nbytes for x in tensors)
    free_bytes = hardware.free_memory_bytes()
    return free_bytes is None or MEMORY_FACTOR * copy_bytes < free_bytes
