"""Checkpoints written while the training goes on: the loop waits for a copy in memory, a thread writes it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.utils._pytree import tree_leaves, tree_map_only

from deskgpt.checkpoint import store
from deskgpt.checkpoint.folders import agreed
from deskgpt.checkpoint.store import Checkpoint
from deskgpt.compute.sharding import group_for_saves, is_dtensor, is_sharded, local
from deskgpt.run.report import Report
from deskgpt.run.schedule import Config
from deskgpt.run.train_state import TrainState
from deskgpt.system import hardware

MEMORY_FACTOR = 1.5  # how much of a copy's size must be free: the system needs some, too
MAX_REWINDS = 5  # to the same checkpoint. If skipping batches does not stop the spikes, the batches are not the cause.


class Kept(NamedTuple):
    """The latest checkpoint on the disk, to which a run can return."""

    path: Path  # of the file or its folder
    step: int


@dataclass(eq=False)
class Saver:
    """Writes the checkpoints of a run into out_dir, one after the other, and knows the latest and the best one there.

    A save that fails is printed, and the run continues. With a group, which is for saves alone, its ranks write their
    shards together, at the same step: a save succeeds or fails for all.
    """

    out_dir: Path
    print0: Callable[[str], None]
    best_val_loss: float  # of the best checkpoint on the disk; the thread that writes sets it, once the file is durable
    group: distributed.ProcessGroup | None = None
    kept: Kept | None = None  # the latest checkpoint; at first the one from which the run resumes
    is_trained_elsewhere: bool = False  # weights that can stay the best: they are saved at step 0, too

    def __post_init__(self) -> None:
        first_step = self.kept.step if self.kept else 0
        self.latest_step = -1 if self.is_trained_elsewhere else first_step  # saved, or that the run began with
        self.error: BaseException | None = None  # of the last save
        self._thread: threading.Thread | None = None
        self._has_taken_over = False
        self._rewinds: Counter[int] = Counter()  # of this process, by the step of the checkpoint

    @classmethod
    def of(cls, config: Config, best_val_loss: float, state: TrainState) -> Saver:
        """Return the saver of a run. best_val_loss: of the best checkpoint in its folder."""
        group = group_for_saves(config.dist_timeout_s) if is_sharded(state.model) else None
        kept = Kept(Path(config.out_dir), state.step) if state.first_step > 0 else None
        is_trained_elsewhere = config.init_from not in ("scratch", "resume")
        out_dir = store.folder_of(config.out_dir)
        return cls(out_dir, state.dist.print0, best_val_loss, group, kept, is_trained_elsewhere)

    # ---- in a run ----------------------------------------------------------------------------------------

    def is_best(self, val_loss: float, step: int) -> bool:
        """Return whether a model with this val loss, evaluated now, is better than the best checkpoint on the disk.

        Random weights are never the best: they are not worth a file.
        """
        self.wait()
        return val_loss < self.best_val_loss and (step > 0 or self.is_trained_elsewhere)

    def save_if_new(self, state: TrainState, report: Report, best_val_loss: float | None = None) -> None:
        """Save the run as it is now, unless its step was saved already. All ranks call this.

        best_val_loss: the model's, if it is_best.
        """
        is_best = best_val_loss is not None
        with report.timer.spent_on("saving"):
            self.wait()
            if state.step == self.latest_step and not is_best:
                return
            if state.dist.is_first or self.group is not None:
                report.event("save", f"saving checkpoint to {self.out_dir}", iter=state.step, best=is_best)
                on_disk = best_val_loss if best_val_loss is not None else self.best_val_loss
                self.save(state.checkpoint(on_disk, report.wandb_run_id), is_best)
        self.latest_step = state.step

    def finish(self, state: TrainState, report: Report, saves: bool) -> None:
        """End: save what was not saved yet, if the run is to be resumed, and wait for the last save."""
        if saves:
            self.save_if_new(state, report)
        self.wait()

    def rewind(self, state: TrainState, report: Report, step: int) -> bool:
        """Return the state to the latest checkpoint, to continue with the batch after that of a step.

        All ranks call this. Returns False, with a line, if there is none. Raises ValueError after MAX_REWINDS.
        """
        self.wait()
        kept = state.dist.gather(self.kept)[0]
        if kept is None:
            self.print0("on_spike=rewind: no checkpoint was saved yet, so the run continues")
            return False
        with report.timer.spent_on("saving"):
            self._rewinds[kept.step] += 1
            if self._rewinds[kept.step] > MAX_REWINDS:
                raise ValueError(
                    f"on_spike=rewind: {MAX_REWINDS} times back to step {kept.step}, and the loss spiked again; the "
                    f"batches are not the cause; try a lower --learning_rate; {self.kept_text()}"
                )
            state.rewind(store.load(kept.path, dist=state.dist), kept.path, step)
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

    def save(self, checkpoint: Checkpoint, best: bool) -> None:
        """Begin to write, after the save before has ended. What it holds may change afterwards."""
        self.wait()
        self.error = None
        if has_room_for(checkpoint):
            # Not a daemon: whatever ends the run, except a kill, the interpreter waits for the checkpoint.
            self._thread = threading.Thread(target=self._write, args=(snapshot(checkpoint), best), name="saver")
            self._thread.start()
        else:
            self.print0("little memory is free: training waits while the checkpoint is written")
            self._write(checkpoint, best)

    def _write(self, checkpoint: Checkpoint, best: bool) -> None:
        try:
            if not self._has_taken_over:
                agreed(self.group, self._take_over)
                self._has_taken_over = True
            store.save(checkpoint, self.out_dir, best, self.group)
            self.kept = Kept(self.out_dir / store.NAME, checkpoint.iter_num)
            if best:
                self.best_val_loss = checkpoint.best_val_loss
        except BaseException as e:  # for `wait`, in the loop's thread
            self.error = e
            if best and store.step_of_best(self.out_dir) == checkpoint.iter_num:  # it failed after that was durable
                self.best_val_loss = checkpoint.best_val_loss
            if isinstance(e, OSError | ValueError):
                self.print0(f"{e}; the run continues and tries again at the next save")

    def _take_over(self) -> None:
        if self.group is None or distributed.get_rank(self.group) == 0:
            store.take_over(self.out_dir, self.print0)

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
    """Return a copy in the machine's memory. Tensors that share their numbers share them in it too."""
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
    """Return whether the memory for a snapshot is free, as far as the system tells."""
    copy_bytes = sum(local(x).nbytes for x in tree_leaves(vars(state)) if isinstance(x, Tensor))
    free_bytes = hardware.free_memory_bytes()
    return free_bytes is None or MEMORY_FACTOR * copy_bytes < free_bytes
