"""Decides when a run writes its checkpoints, and keeps account of those on the disk."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from deskgpt.checkpoint import (
    CKPT_BEST,
    Checkpoint,
    best_on_disk,
    clean_out_dir,
    run_folder,
    save_checkpoint,
)
from deskgpt.distributed import ALONE, DistContext, is_dtensor, is_sharded, local, unsharded
from deskgpt.evaluation import Evaluation
from deskgpt.files import check_not_replaced
from deskgpt.logger import RunLogger
from deskgpt.resume import Start, StartSettings
from deskgpt.train_state import TrainState


@dataclass(eq=False)
class Checkpointer:
    """Writes the checkpoints of a run into out_dir, and knows the last and the best one there.

    If the disk fails, that is printed, and the run continues. What can never be saved, such as a
    weight that is NaN, ends it with a ValueError: it would train on for nothing. Rank 0 writes, and
    decides what is saved and what is the best. In a sharded run all ranks give it their rows.
    """

    out_dir: Path
    print0: Callable[[str], None]
    # The val loss of the best checkpoint on the disk; infinite if none can be compared.
    best_val_loss: float
    dist: DistContext = ALONE
    # The step of the last checkpoint that was written; at first of the one that is resumed.
    saved_step: int | None = None
    is_finetuning: bool = False  # starts from trained weights: step 0 may be the best, and is saved
    error: OSError | None = None  # of the last save
    is_out_dir_clean: bool = False  # files that earlier runs left there are tidied
    saves_each_evaluation: bool = True  # False: only the best so far
    writes: bool = True  # False: no checkpoint at all
    saved_at: float = field(default_factory=time.perf_counter)  # the instant of the last save

    @classmethod
    def of(cls, config: StartSettings, start: Start, state: TrainState) -> Checkpointer:
        """Return the checkpointer of a run that goes on from `start`."""
        return cls(
            run_folder(config.out_dir),
            state.dist.print0,
            start.checkpoint.best_val_loss,
            state.dist,
            state.first_step or None,
            start.earlier is None and start.source != "scratch",
            saves_each_evaluation=config.always_save_checkpoint,
            writes=not config.eval_only,
        )

    # ---- in a run --------------------------------------------------------------------------------

    def is_best(self, val_loss: float, step: int) -> bool:
        """Return whether a model with this val loss, evaluated now, is better than the best
        checkpoint on the disk.

        Random weights are never the best: they are not worth a file.
        """
        is_best = val_loss < self.best_val_loss and (step > 0 or self.is_finetuning)
        return self.dist.gather(is_best)[0]  # rank 0 alone knows of a save that failed

    def save_if_due(
        self,
        state: TrainState,
        logger: RunLogger,
        val: Evaluation | None = None,
        save_is_due: bool = True,
        is_restarting: bool = False,
    ) -> None:
        """Save the run as it is now, unless its step was saved already. All ranks call this.

        val: an evaluation of this model, which may be the best. save_is_due: save even if the
        evaluation does not ask for it. is_restarting: save untrained weights, too.
        """
        with logger.timer.timed("saving"):
            is_best = val is not None and self.is_best(val.loss, state.step)
            is_untrained = state.step == 0 and not (self.is_finetuning or is_restarting)
            is_saved = is_untrained or (state.step == self.saved_step and self.error is None)
            is_due = save_is_due or self.saves_each_evaluation
            if not self.writes or not self.dist.gather(is_best or (is_due and not is_saved))[0]:
                return
            self.saved_at = time.perf_counter()
            if self.dist.is_first or is_sharded(state.model):
                logger.event(
                    "save", f"saving checkpoint to {self.out_dir}", iter=state.step, best=is_best
                )
                best_val_loss = val.loss if val is not None and is_best else self.best_val_loss
                self.save(state.checkpoint(best_val_loss), is_best)

    def kept_text(self) -> str:
        """Return the part of an error's message that is about the checkpoints."""
        if self.saved_step is None:
            return "no checkpoint was saved yet"
        return f"the last checkpoint in {self.out_dir} is of step {self.saved_step}"

    def save(self, checkpoint: Checkpoint, best: bool) -> None:
        """Write a checkpoint.

        If the disk fails, that is printed, and its step is tried again. Raises ValueError if it can
        never be written, or out_dir is another folder now.
        """
        self.error = None
        checkpoint = gathered_on_first(checkpoint)
        if not self.dist.is_first:
            return
        check_not_replaced(self.out_dir)
        try:
            if not self.is_out_dir_clean:
                has_best = math.isfinite(self.best_val_loss)
                clean_out_dir(self.out_dir, self.print0, has_best, self.saved_step or 0)
                self.is_out_dir_clean = True
            save_checkpoint(checkpoint, self.out_dir, best)
            self.saved_step = checkpoint.iter_num
        except OSError as e:
            self.error = e
            self.print0(f"{e}; the run continues and tries again at the next save")
        # If it failed after the best one was durable, that one is the best all the same.
        written = (self.out_dir / CKPT_BEST, checkpoint.iter_num)
        if best and (self.error is None or best_on_disk(self.out_dir) == written):
            self.best_val_loss = checkpoint.best_val_loss

    def raise_if_last_failed(self) -> None:
        """Raise the error of the last save, if it failed."""
        if self.error is not None:
            raise self.error


def gathered_on_first(state: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose sharded tensors are full, in rank 0's memory.

    All ranks that share them call this.
    """
    gathered = {}

    def full(tensor: Tensor) -> Tensor:
        if not is_dtensor(tensor):
            return tensor
        # A rank without rows has a key, too, so that all ranks gather the same tensors.
        key = local(tensor).untyped_storage()._cdata
        if key not in gathered:
            whole = unsharded(tensor)
            gathered[key] = whole.cpu() if torch.distributed.get_rank() == 0 else torch.empty(0)
        return gathered[key]

    return Checkpoint(**tree_map_only(Tensor, full, vars(state)))
