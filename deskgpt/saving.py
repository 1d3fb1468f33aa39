"""When a run writes its checkpoints, and what it knows of those on the disk."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from deskgpt.checkpoint import Checkpoint, clean_out_dir, run_folder, save_checkpoint, step_of_best
from deskgpt.distributed import DistContext, is_dtensor, is_sharded, local, unsharded
from deskgpt.logger import RunLogger
from deskgpt.stopping import Config
from deskgpt.train_state import TrainState


@dataclass(eq=False)
class Checkpointer:
    """Writes the checkpoints of a run into out_dir, and knows the last and the best one there.

    A save that fails is printed, and the run continues. Of a sharded run all ranks give their rows
    to rank 0, which writes: what is saved and what is the best is decided there.
    """

    out_dir: Path
    print0: Callable[[str], None]
    # Of the best checkpoint on the disk; infinite if it has none that can be compared.
    best_val_loss: float
    shard_ranks: DistContext | None = None  # the ranks of a sharded run
    # Of the last checkpoint that was written; at first of the one that is resumed.
    saved_step: int | None = None
    is_finetuning: bool = False  # starts from trained weights: step 0 may be the best, and is saved
    error: OSError | ValueError | None = None  # of the last save
    is_out_dir_clean: bool = False  # what earlier runs left in out_dir is tidied

    @classmethod
    def of(cls, config: Config, best_val_loss: float, state: TrainState) -> Checkpointer:
        """Return the saver of a run. best_val_loss: of the best checkpoint in its folder."""
        shard_ranks = state.dist if is_sharded(state.model) else None
        saved_step = state.first_step or None
        is_finetuning = config.init_from not in ("scratch", "resume")
        out_dir = run_folder(config.out_dir)
        return cls(
            out_dir, state.dist.print0, best_val_loss, shard_ranks, saved_step, is_finetuning
        )

    # ---- in a run --------------------------------------------------------------------------------

    def is_best(self, val_loss: float, step: int) -> bool:
        """Return whether a model with this val loss, evaluated now, is better than the best
        checkpoint on the disk.

        Random weights are never the best: they are not worth a file.
        """
        is_best = val_loss < self.best_val_loss and (step > 0 or self.is_finetuning)
        return self.shard_ranks.gather(is_best)[0] if self.shard_ranks else is_best

    def save_if_new(
        self, state: TrainState, logger: RunLogger, best_val_loss: float | None = None
    ) -> None:
        """Save the run as it is now, unless its step was saved already. All ranks call this.

        best_val_loss: the model's, if it is_best.
        """
        is_best = best_val_loss is not None
        with logger.timer.timed("saving"):
            is_untrained = state.step == 0 and not self.is_finetuning
            is_saved = not is_best and (
                is_untrained or (state.step == self.saved_step and self.error is None)
            )
            if self.shard_ranks:
                # Rank 0 alone knows of a save that failed.
                is_saved = self.shard_ranks.gather(is_saved)[0]
            if is_saved:
                return
            if state.dist.is_first or self.shard_ranks:
                logger.event(
                    "save", f"saving checkpoint to {self.out_dir}", iter=state.step, best=is_best
                )
                on_disk = best_val_loss if best_val_loss is not None else self.best_val_loss
                self.save(state.checkpoint(on_disk, logger.wandb_run_id), is_best)

    def kept_text(self) -> str:
        """Return what an error says about the checkpoints."""
        if self.saved_step is None:
            return "no checkpoint was saved yet"
        return f"the last checkpoint in {self.out_dir} is of step {self.saved_step}"

    def save(self, checkpoint: Checkpoint, best: bool) -> None:
        """Write a checkpoint.

        One that cannot be written is printed, and its step is tried again.
        """
        self.error = None
        if self.shard_ranks:
            checkpoint = gathered_on_first(checkpoint)
            if not self.shard_ranks.is_first:
                return
        try:
            if not self.is_out_dir_clean:
                clean_out_dir(self.out_dir, self.print0, has_best=math.isfinite(self.best_val_loss))
                self.is_out_dir_clean = True
            save_checkpoint(checkpoint, self.out_dir, best)
            self.saved_step = checkpoint.iter_num
        except (OSError, ValueError) as e:
            self.error = e
            self.print0(f"{e}; the run continues and tries again at the next save")
        # If it failed after the best one was durable, that one is the best all the same.
        if best and (self.error is None or step_of_best(self.out_dir) == checkpoint.iter_num):
            self.best_val_loss = checkpoint.best_val_loss

    def raise_if_last_failed(self) -> None:
        """Raise what the last save failed with."""
        if self.error is not None:
            raise self.error


def gathered_on_first(state: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose sharded tensors are full, in rank 0's memory.

    All ranks that share them call this.
    """
    gathered: dict[int, Tensor] = {}

    def full(tensor: Tensor) -> Tensor:
        if not is_dtensor(tensor):
            return tensor
        # Also where a rank has no rows, so that all gather the same.
        key = local(tensor).untyped_storage()._cdata
        if key not in gathered:
            whole = unsharded(tensor)
            gathered[key] = whole.cpu() if torch.distributed.get_rank() == 0 else torch.empty(0)
        return gathered[key]

    return Checkpoint(**tree_map_only(Tensor, full, vars(state)))
