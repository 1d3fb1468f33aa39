"""A run's state: all that a checkpoint keeps of it, with one owner."""

from __future__ import annotations

import math
from typing import Any

import torch

from deskgpt.checkpoint.optimizer_state import OptimizerState
from deskgpt.checkpoint.store import Checkpoint, restore_weights
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.implementation import saved_variant
from deskgpt.compute.runner import Evaluation, Runner
from deskgpt.run.diagnosis import Evaluated, SpikeWatch
from deskgpt.system.untrusted import Fields, check_record, is_number

# Under "health" in a checkpoint.
COUNTS: Fields = dict.fromkeys(("skipped_batches", "rewound_to", "rewinds_there", "steps_since_spike"), is_number)


class Run:
    """How far a run is: its weights and optimizer, its step, its best loss, its evaluations, the batches it skips.

    `checkpoint` gives all of that, and `restore` takes it back, into the same weights: compiled forms and DDP hold
    these tensors.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        runner: Runner,
        optimizer: torch.optim.Optimizer,
        ranks: DistContext,
    ) -> None:
        self.settings = settings
        self.runner = runner
        self.optimizer = optimizer
        self.optimizer_state = OptimizerState(optimizer, runner.model)
        self.ranks = ranks
        self.facts: dict[str, Any] = {}  # as in Checkpoint, and so are the next two
        self.tokenizer: dict[str, Any] | None = None
        self.chat: str | None = None
        self.wandb_run_id: str | None = None
        self.parts: dict[str, Any] = {}  # what else it keeps, see keep
        self.saved_parts: dict[str, Any] = {}
        self.first_step = 0  # of this process
        self.step = 0  # done
        self.best_val_loss = math.inf
        self.evaluations: list[Evaluated] = []
        self.is_repeated = False  # whether the last one was taken before, too
        self.spikes = SpikeWatch()
        self.skipped_batches = 0  # by rewinds
        self.rewound_to = 0  # the step of the checkpoint that the last rewind went to
        self.rewinds_there = 0

    def set_metadata(self, facts: dict[str, Any], tokenizer: dict[str, Any], chat: str | None) -> None:
        """What a checkpoint says of data and code."""
        self.facts = facts
        self.tokenizer = tokenizer
        self.chat = chat

    @property
    def position(self) -> int:
        """The number of the next step's global batch in the order of batches."""
        return self.step + self.skipped_batches

    # ---- evaluations -------------------------------------------------------------------------------------

    def evaluated(self, train: Evaluation, val: Evaluation) -> bool:
        """Takes in an evaluation; returns whether its val loss is the best so far.

        One that is repeated, after a resume or a rewind, counts once.
        """
        self.best_val_loss = self.ranks.max(self.best_val_loss)  # a save that failed has changed it, on some ranks yet
        improved = val.loss < self.best_val_loss
        self.best_val_loss = min(self.best_val_loss, val.loss)
        before = [e for e in self.evaluations if e.step < self.step]
        self.is_repeated = before != self.evaluations
        self.evaluations = [*before, Evaluated(self.step, train.loss, val.loss, val.standard_error)]
        return improved

    # ---- checkpoints -------------------------------------------------------------------------------------

    def keep(self, name: str, part: Any) -> None:
        """From now on checkpoints keep this too: an object with state_dict and load_state_dict, such as an average of
        the weights. In a resumed run it gets its state back at once. Raises ValueError in a sharded run.
        """
        if self.runner.sharded:
            raise ValueError(f"{name}: checkpoints of sharded runs keep the model and the optimizer only")
        self.parts[name] = part
        self._restore_part(name)

    def checkpoint(self) -> Checkpoint:
        runner = self.runner
        return Checkpoint(
            model=runner.model.state_dict(),
            optimizer=self.optimizer_state.state(),
            model_args=runner.model.config.as_args(),
            iter_num=self.step,
            best_val_loss=self.best_val_loss,
            config=self.settings,
            scaler=runner.scaler.state_dict(),
            tokenizer=self.tokenizer,
            chat=self.chat,
            form=saved_variant(runner),
            wandb_run_id=self.wandb_run_id,
            health=self._progress(),
            facts=self.facts,
            parts={name: part.state_dict() for name, part in self.parts.items()} or None,
        )

    def resume(
        self,
        saved: Checkpoint,
        source: str,
        best_val_loss: float,
        progress: dict[str, Any] | None,
        trains: bool,
    ) -> None:
        """Goes on from a checkpoint, whose weights the model has. Raises ValueError, naming `source`, if it is damaged.

        best_val_loss and progress: of the checkpoint, as far as they still mean something. trains: whether the
        optimizer's state matters.
        """
        self.first_step = saved.iter_num
        self.best_val_loss = best_val_loss
        self._restore(saved, source, progress, trains)

    def go_back(self, saved: Checkpoint, source: str, past: int) -> None:
        """To a checkpoint of this run, to go on with the batch after the one at position `past`."""
        n = self.rewinds_to(saved.iter_num) + 1
        restore_weights(self.runner.model, saved)
        self._restore(saved, source, saved.health)
        self.rewound_to = self.step
        self.rewinds_there = n
        self.skipped_batches = past + 1 - self.step

    def rewinds_to(self, step: int) -> int:
        """How many times the run has gone back to the checkpoint of this step."""
        return self.rewinds_there if step == self.rewound_to else 0

    def _restore(self, saved: Checkpoint, source: str, progress: dict[str, Any] | None, trains: bool = True) -> None:
        if trains:
            self.optimizer_state.load(saved.optimizer, source, saved.folder)
        if trains and saved.scaler:
            self.runner.scaler.load_state_dict(saved.scaler)
        self.step = saved.iter_num
        self.saved_parts = saved.parts or {}
        for name in self.parts:
            self._restore_part(name)
        self._restore_progress(progress, source)

    def _restore_part(self, name: str) -> None:
        """Gives a part its state back, where the checkpoint that the run goes on from has it. Raises ValueError."""
        if name not in self.saved_parts:
            if self.step > 0:
                self.ranks.print0(f"{name}: the checkpoint of step {self.step} has none, it begins anew")
            return
        try:
            self.parts[name].load_state_dict(self.saved_parts[name])
        except Exception as e:  # whatever that class raises
            reason = " ".join(str(e).split())[:200]
            raise ValueError(
                f"{self.settings['out_dir']}: its {name} does not fit what the run keeps ({reason})"
            ) from None

    def _progress(self) -> dict[str, Any]:
        """Under "health" in a checkpoint, as plain values."""
        return {
            "skipped_batches": self.skipped_batches,
            "rewound_to": self.rewound_to,
            "rewinds_there": self.rewinds_there,
            "losses": list(self.spikes.losses),
            "steps_since_spike": self.spikes.steps_since_spike,
            "evaluations": [list(e) for e in self.evaluations],
        }

    def _restore_progress(self, state: dict[str, Any] | None, source: str) -> None:
        self.spikes = SpikeWatch()
        self.evaluations = []
        if state is None:
            return
        try:
            check_record(state, COUNTS, required=COUNTS)
            self.skipped_batches = state["skipped_batches"]
            self.rewound_to = state["rewound_to"]
            self.rewinds_there = state["rewinds_there"]
            self.spikes.losses.extend(float(loss) for loss in state["losses"])
            self.spikes.steps_since_spike = state["steps_since_spike"]
            for step, train_loss, val_loss, error in state["evaluations"]:
                if not is_number(step):
                    raise ValueError
                known = None if error is None else float(error)
                self.evaluations.append(Evaluated(step, float(train_loss), float(val_loss), known))
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{source}: what it says about skipped batches and past losses is damaged") from None
