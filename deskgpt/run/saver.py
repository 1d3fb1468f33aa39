"""Checkpoints written while the training goes on: the loop waits for a copy in memory, a thread writes it."""

from __future__ import annotations

import threading
import time
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
MAX_REWINDS = 5  # to the same checkpoint. If skipping batches does not stop the spikes, the batches are not the cause.


@dataclass(eq=False)
class Saved:
    """A save that was begun."""

    step: int
    best: bool
    save_s: float = 0.0  # what it cost the training loop
    write_s: float | None = None  # until the files were durable; None while it is written
    error: BaseException | None = None


class Kept(NamedTuple):
    """The latest checkpoint on the disk, to which a run can return."""

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
        self.last: Saved | None = None
        self._reported: Saved | None = None
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
        is_saved = state.step == self.latest_step and best_val_loss is None
        if self.sharing:
            is_saved = self.sharing.gather(is_saved)[0]  # rank 0 alone knows of a save that failed
        if is_saved:
            return
        if state.dist.is_first or self.sharing:
            self.print0(f"saving checkpoint to {self.out_dir}")
            with report.timer.spent_on("saving"):
                self.wait()
                self.report_ended(report)
                on_disk = self.best_val_loss if best_val_loss is None else best_val_loss
                saving = self.save(state.checkpoint(on_disk, report.wandb_run_id), best_val_loss is not None)
            saving.save_s = report.timer.last_s["saving"]
        self.latest_step = state.step

    def report_ended(self, report: Report) -> None:
        """Report the last save, once, when it has ended."""
        saved = self.last
        if saved is None or saved.write_s is None or saved is self._reported:
            return
        self._reported = saved
        if saved.error is None:
            times = {"save_s": saved.save_s, "write_s": saved.write_s}
            report.event("save", "", iter=saved.step, best=saved.best, **times)
            return
        if not isinstance(saved.error, OSError | ValueError):  # a defect, not the user's
            raise saved.error
        self.latest_step = -1  # so that the same step is tried again

    def finish(self, state: TrainState, report: Report, saves: bool) -> None:
        """End: save what was not saved yet, if the run is to be resumed, and wait for the last save."""
        if saves:
            self.save_if_new(state, report)
        self.wait()
        self.report_ended(report)

    def rewind(self, state: TrainState, report: Report, step: int, position: int) -> bool:
        """Return the state to the latest checkpoint, to continue after the batch of a step, which is at `position`.

        All ranks call this. Returns False, with a line, if there is none. Raises ValueError after MAX_REWINDS.
        """
        self.wait()
        kept = state.dist.gather(self.kept)[0]
        if kept is None:
            self.print0("on_spike=rewind: no checkpoint was saved yet, so the run continues")
            return False
        with report.timer.spent_on("saving"):
            if state.rewound_to == kept.step and state.rewinds_there >= MAX_REWINDS:
                raise ValueError(
                    f"on_spike=rewind: {MAX_REWINDS} times back to step {kept.step}, and the loss spiked again; the "
                    f"batches are not the cause; try a lower --learning_rate; {self.kept_text()}"
                )
            reads = self.sharing is None or self.sharing.is_first
            state.rewind(store.load(kept.path, dist=state.dist, checksums=reads), kept.path, position)
            state.dist.all(True)  # no rank replaces the file while another reads it
        text = f"back to step {state.step}; the batches of steps {state.step} to {step} are skipped"
        report.event("rewind", text, iter=state.step, spike=step, skipped_batches=state.skipped_batches)
        self.latest_step = -1  # what is skipped must be saved
        self.save_if_new(state, report)
        return True

    def kept_text(self) -> str:
        """Return what an error says about the checkpoints."""
        self.wait()
        if self.kept is None:
            return "no checkpoint was saved yet"
        return f"the last checkpoint is {self.kept.path} of step {self.kept.step}"

    # ---- writing -----------------------------------------------------------------------------------------

    def save(self, checkpoint: Checkpoint, best: bool) -> Saved:
        """Begin to write, after the save before has ended. What it holds may change afterwards."""
        self.wait()
        self.last = Saved(checkpoint.iter_num, best)
        if self.sharing or has_room_for(checkpoint):
            copy = snapshot(checkpoint)
            if self.sharing and not self.sharing.is_first:
                return self.last
            # Not a daemon: whatever ends the run, except a kill, the interpreter waits for the checkpoint.
            self._thread = threading.Thread(target=self._write, args=(copy, self.last), name="saver")
            self._thread.start()
            return self.last
        self.print0("little memory is free: training waits while the checkpoint is written")
        self._write(checkpoint, self.last)
        return self.last

    def _write(self, checkpoint: Checkpoint, saved: Saved) -> None:
        t0 = time.perf_counter()
        try:
            if not self._has_taken_over:
                store.take_over(self.out_dir, self.print0)
                self._has_taken_over = True
            store.save(checkpoint, self.out_dir, saved.best)
            self.kept = Kept(self.out_dir / store.NAME, saved.step)
            if saved.best:
                self.best_val_loss = checkpoint.best_val_loss
        except BaseException as e:  # for the training loop, in its own thread
            saved.error = e
            if saved.best and store.step_of_best(self.out_dir) == saved.step:  # it failed after the best was durable
                self.best_val_loss = checkpoint.best_val_loss
        saved.write_s = time.perf_counter() - t0
        if isinstance(saved.error, OSError | ValueError):
            self.print0(f"{saved.error}; the run continues and tries again at the next save")

    def wait(self) -> None:
        """Return when the last save has ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def raise_if_last_failed(self) -> None:
        """Raise what the last save failed with."""
        if self.last is not None and self.last.error is not None:
            raise self.last.error


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
    storages = {(t.device, t.untyped_storage().data_ptr()): t.untyped_storage().nbytes() for t in tensors}
    free_bytes = hardware.free_memory_bytes()
    return free_bytes is None or MEMORY_FACTOR * sum(storages.values()) < free_bytes
