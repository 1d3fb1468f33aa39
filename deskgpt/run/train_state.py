"""The training state: all that a checkpoint keeps of a run, and the only place of each fact about its progress."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deskgpt.checkpoint.ckpt_file import refuse_unreadable
from deskgpt.checkpoint.optimizer_state import OptimizerState
from deskgpt.checkpoint.store import Checkpoint, content_of, restore_weights
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.implementation import saved_variant
from deskgpt.compute.runner import Evaluation, Runner
from deskgpt.run.diagnosis import EvalRecord, SpikeDetector
from deskgpt.system.files import is_number
from deskgpt.system.terminal import reason
from model import GPT

if TYPE_CHECKING:
    from data.dataset import Dataset
    from deskgpt.run.health import Step
    from train import TrainConfig

REWINDS = ("skipped_batches", "rewound_to", "rewinds_there")  # attributes, and names under "progress" in a checkpoint


class TrainState:
    """Weights, optimizer, step, best loss, evaluations, and the batches that were skipped.

    `checkpoint` gives all of it. `resume` and `rewind` take it back into the same tensors, which compiled code and DDP
    hold.
    """

    def __init__(
        self, config: TrainConfig, runner: Runner, optimizer: torch.optim.Optimizer, data: Dataset, dist: DistContext
    ) -> None:
        """config: a checkpoint has the settings as they are when it is taken.

        Raises ValueError where a checkpoint would lose something.
        """
        self.config = config
        self.runner = runner
        self.optimizer = optimizer
        self.optimizer_state = OptimizerState(optimizer, runner.model)
        self.data = data
        self.dist = dist
        self.metadata: dict[str, Any] = {}  # of data and code: what a resumed run compares
        self.wandb_run_id: str | None = None
        self.first_step = 0  # of this process
        self.step = 0  # optimizer steps done
        self.best_val_loss = math.inf
        self.evaluations: list[EvalRecord] = []
        self.spikes = SpikeDetector()
        self.bad_in_a_row: list[Step] = []  # the last steps, while their gradients were not finite
        self.skipped_batches = 0  # by rewinds
        self.rewound_to = 0  # the step of the checkpoint that the last rewind went to
        self.rewinds_there = 0
        self._extra: dict[str, Any] = {}  # see register_state
        self._saved_extra: dict[str, Any] = {}
        if not config.eval_only:
            self._check_saves()

    @property
    def position(self) -> int:
        """The number of the next step's global batch in the order of batches."""
        return self.step + self.skipped_batches

    # ---- evaluations -------------------------------------------------------------------------------------

    def add_evaluation(self, train: Evaluation, val: Evaluation) -> bool:
        """Adds an evaluation of this step; returns whether its val loss is the best so far.

        One that is repeated, after a resume or a rewind, replaces the first.
        """
        self.best_val_loss = self.dist.max(self.best_val_loss)  # ranks hear of a failed save at different moments
        improved = val.loss < self.best_val_loss
        self.best_val_loss = min(self.best_val_loss, val.loss)
        self.evaluations = [e for e in self.evaluations if e.step < self.step]
        self.evaluations.append(EvalRecord(self.step, train.loss, val.loss, val.standard_error))
        return improved

    # ---- checkpoints -------------------------------------------------------------------------------------

    def register_state(self, name: str, part: Any) -> None:
        """From now on checkpoints keep this too: an object with state_dict and load_state_dict, such as an average of
        the weights. In a resumed run it gets its state back at once. Raises ValueError in a sharded run, and where a
        file could not keep the state.
        """
        if self.runner.sharded:
            raise ValueError(f"{name}: checkpoints of sharded runs keep the model and the optimizer only")
        refuse_unreadable(part.state_dict())
        self._extra[name] = part
        self._restore_extra(name)

    def checkpoint(self) -> Checkpoint:
        runner = self.runner
        return Checkpoint(
            model=runner.model.state_dict(),
            optimizer=self.optimizer_state.state(),
            model_args=runner.model.config.as_args(),
            iter_num=self.step,
            best_val_loss=self.best_val_loss,
            config=asdict(self.config),
            scaler=runner.scaler.state_dict(),
            tokenizer=self.data.tokenizer,
            chat=self.data.chat,
            variant=saved_variant(runner),
            wandb_run_id=self.wandb_run_id,
            progress=self._progress(),
            metadata=self.metadata,
            extra_state={name: part.state_dict() for name, part in self._extra.items()} or None,
        )

    def _check_saves(self) -> None:
        """Raises ValueError, before the first step, where no run could go on from a checkpoint of this one."""
        saved = self.checkpoint()
        shapes = {name: torch.empty(w.shape, dtype=w.dtype, device="meta") for name, w in saved.model.items()}
        try:
            refuse_unreadable(content_of(saved))
            GPT.without_storage(self.runner.model.config).load_state_dict(shapes, assign=True)
        except (RuntimeError, ValueError) as e:
            raise ValueError(f"no run could go on from checkpoints of this one, so it ends: {reason(e)}") from None

    def resume(self, saved: Checkpoint, source: str, trains: bool) -> None:
        """Goes on from a checkpoint, whose weights the model has. trains: whether the optimizer's state matters.

        Raises ValueError, naming `source`, if it is damaged.
        """
        self.first_step = saved.iter_num
        self.best_val_loss = saved.best_val_loss
        self.wandb_run_id = saved.wandb_run_id
        self.runner.right_until = saved.iter_num
        self._restore(saved, source, trains)

    def rewind(self, saved: Checkpoint, source: Path, position: int) -> None:
        """Back to a checkpoint of this run, to go on with the batch after the one at `position`."""
        rewinds = self.rewinds_there if saved.iter_num == self.rewound_to else 0
        restore_weights(self.runner.model, saved)
        self._restore(saved, str(source), trains=True)
        self.bad_in_a_row.clear()
        self.rewound_to = self.step
        self.rewinds_there = rewinds + 1
        self.skipped_batches = position + 1 - self.step

    def _restore(self, saved: Checkpoint, source: str, trains: bool) -> None:
        if trains:
            self.optimizer_state.load(saved.optimizer, source, saved.folder)
        self.step = saved.iter_num
        self._saved_extra = saved.extra_state or {}
        for name in self._extra:
            self._restore_extra(name)
        self.spikes = SpikeDetector()
        self.evaluations = []
        try:
            if trains and saved.scaler:
                if not all(0 <= float(x) < math.inf for x in saved.scaler.values()):
                    raise ValueError
                self.runner.scaler.load_state_dict(saved.scaler)
            self._restore_progress(saved.progress or {})
        except Exception:  # an untrusted state can raise nearly anything
            raise ValueError(f"{source}: its loss scale, or its record of past losses, is damaged") from None

    def _restore_extra(self, name: str) -> None:
        """Gives a registered object its state back, if the checkpoint has it. Raises ValueError if it does not fit."""
        if name not in self._saved_extra:
            if self.step > 0:
                self.dist.print0(f"{name}: the checkpoint of step {self.step} has none, so it starts anew")
            return
        try:
            self._extra[name].load_state_dict(self._saved_extra[name])
        except Exception as e:  # whatever that class raises
            raise ValueError(f"{self.config.out_dir}: its {name} does not fit this run ({reason(e)})") from None

    def _progress(self) -> dict[str, Any]:
        """Under "progress" in a checkpoint, as plain values."""
        return {name: getattr(self, name) for name in REWINDS} | {
            "losses": list(self.spikes.losses),
            "steps_since_spike": self.spikes.steps_since_spike,
            "evaluations": [list(e) for e in self.evaluations],
        }

    def _restore_progress(self, saved: dict[str, Any]) -> None:
        if not saved:  # nanoGPT's
            return
        for name in REWINDS:
            setattr(self, name, count(saved[name]))
        self.spikes.losses.extend(map(float, saved["losses"]))
        self.spikes.steps_since_spike = count(saved["steps_since_spike"])
        for step, train_loss, val_loss, error in saved["evaluations"]:
            error = None if error is None else float(error)
            self.evaluations.append(EvalRecord(count(step), float(train_loss), float(val_loss), error))


def count(value: Any) -> int:
    """A whole number. Raises ValueError for anything else in its place."""
    if not is_number(value):
        raise ValueError
    return int(value)
