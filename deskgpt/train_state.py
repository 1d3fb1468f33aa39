"""The training state: all that a checkpoint keeps of a run, and the only place of each fact about
its progress.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

import torch

from data.batches import BatchSplit
from data.dataset import Dataset
from deskgpt.checkpoint import Checkpoint, check_loadable
from deskgpt.compute import ComputeMode
from deskgpt.device import code_versions
from deskgpt.distributed import DistContext, is_sharded
from deskgpt.errors import reason
from deskgpt.evaluation import Evaluation
from deskgpt.optim import OptimizerState, keep_rates_of_groups
from deskgpt.stopping import EvalRecord, Schedule
from model import GPT

# ---- loss spikes ---------------------------------------------------------------------------------

# Measured on characters: 18 runs of 64 to 8192 tokens a step (47,228 losses, warm-up included) gave
# no false alarm; the farthest loss was 5.8 deviations above its median. Two nats added to a loss
# were found in at least 97% of places where losses scatter by 0.04 to 0.17.
WINDOW = 100  # steps that a loss is compared with
FEWEST = 30  # losses with which comparing begins
DEVIATIONS = 8.0
LEAST_RISE = 0.25  # nats: with large batches 8 deviations are less than what other text changes


class SpikeDetector:
    """Finds the steps at which the loss spikes.

    After a spike the losses to compare with are gathered anew.
    """

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=WINDOW)

    def add(self, loss: float) -> float | None:
        """Add a step's loss.

        Return the median loss of the steps before if this one is a spike; otherwise None.

        A spike is above the median by LEAST_RISE and by DEVIATIONS standard deviations: 1.4826
        median absolute ones, which outliers do not change.
        """
        # Hardly ever: saves the two medians
        if len(self.losses) >= FEWEST and loss > max(self.losses):
            median = statistics.median(self.losses)
            deviation = 1.4826 * statistics.median(abs(x - median) for x in self.losses)
            if loss > median + max(LEAST_RISE, DEVIATIONS * deviation):
                self.losses.clear()
                return median
        if math.isfinite(loss):
            self.losses.append(loss)
        return None


# ---- the state -----------------------------------------------------------------------------------


# Fields that a checkpoint keeps in a form or a place of their own.
KEPT_ELSEWHERE = {"metadata", "wandb_run_id", "first_step", "step", "evaluations", "spikes"}
# In the metadata of a checkpoint: those of its steps, by which a resumed run is compared.
LR_HISTORY = "learning rates"


@dataclass(eq=False)
class TrainState:
    """Weights, optimizer, step, schedule and evaluations.

    `checkpoint` returns all of it, and `resume` takes it back, a plain field that you add, too.
    main raises `step` and sets `schedule` and `batching`. Raises ValueError if a checkpoint would
    lose something.
    """

    settings: dict[str, Any]  # of train.py, by name
    model: GPT
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    variant: ComputeMode
    batching: BatchSplit
    schedule: Schedule
    rate: Callable[[Schedule, int], float]  # the learning rate of a schedule at a step
    data: Dataset
    dist: DistContext
    # Of data and code: what a resumed run compares.
    metadata: dict[str, Any] = field(default_factory=dict)
    wandb_run_id: str | None = None
    first_step: int = 0  # of this process
    step: int = 0  # optimizer steps done
    evaluations: list[EvalRecord] = field(default_factory=list)
    spikes: SpikeDetector = field(default_factory=SpikeDetector)
    # Of each group: its lr at the last step / self.rate.
    rate_factors: list[float] = field(default_factory=list)
    _extra: dict[str, Any] = field(default_factory=dict)  # see register_state
    _saved_extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.metadata = (
            self.data.metadata
            | self.data.eval_metadata(self.batching)
            | code_versions(self.variant, self.dist.device)
        )
        keep_rates_of_groups(self.optimizer, self.schedule.learning_rate)
        self.optimizer_state = OptimizerState(self.optimizer, self.model)
        self.optimizer.register_step_pre_hook(self._note_rates)
        if not self.settings["eval_only"]:
            self._check_saves()

    def settings_now(self) -> dict[str, Any]:
        """Return the settings with the micro-batch and the schedule that the run has found."""
        is_as_asked = self.settings["batch_size"] == self.batching.batch_size
        return (
            self.settings
            | ({} if is_as_asked else self.batching.settings())
            | asdict(self.schedule)
        )

    def add_evaluation(self, train: Evaluation, val: Evaluation) -> None:
        """Add an evaluation of this step.

        One that is repeated after a resume replaces the first.
        """
        self.evaluations = [e for e in self.evaluations if e.step < self.step]
        self.evaluations.append(EvalRecord(self.step, train.loss, val.loss, val.standard_error))

    def _note_rates(self, *_: Any) -> None:
        """Note the share of `rate` that each group runs at.

        Print a share that differs from the resumed run's last.

        So a rate that is changed in main is noticed. check_same_experiment compares `rate`
        itself.
        """
        rate = self.rate(self.schedule, self.step)
        if not rate:
            return
        factors = [float(group["lr"]) / rate for group in self.optimizer.param_groups]
        before = self.rate_factors if self.step == self.first_step else []
        for i, (old, new) in enumerate(zip(before, factors, strict=False)):
            if not math.isclose(old, new, rel_tol=1e-6):
                text = f"{new:.6g} times learning_rate() in group {i} now, {old:.6g} times before"
                self.dist.print0(f"changed: learning rate at step {self.step:,}: {text}")
        self.rate_factors = factors

    # ---- checkpoints -----------------------------------------------------------------------------

    def register_state(self, name: str, part: Any) -> None:
        """Keep this in checkpoints, too: an object with state_dict and load_state_dict, such as an
        average of the weights. In a resumed run it gets its state back at once. Raises ValueError
        in a sharded run, and if a file could not keep the state.
        """
        if is_sharded(self.model):
            raise ValueError(
                f"{name}: checkpoints of sharded runs keep the model and the optimizer only"
            )
        check_loadable(part.state_dict())
        self._extra[name] = part
        self._restore_extra(name)

    def checkpoint(
        self, best_val_loss: float = math.inf, wandb_run_id: str | None = None
    ) -> Checkpoint:
        """Return all of the state. best_val_loss: of the best checkpoint on the disk, once this one
        is written.
        """
        rates = sample_lrs(lambda step: self.rate(self.schedule, step), self.step)
        return Checkpoint(
            model=self.model.state_dict(),
            optimizer=self.optimizer_state.state(),
            model_args=self.model.config.as_args(),
            iter_num=self.step,
            best_val_loss=best_val_loss,
            config=self.settings_now(),
            scaler=self.scaler.state_dict(),
            tokenizer=self.data.tokenizer,
            chat=self.data.chat,
            # As saved_compute reads it
            variant=asdict(self.variant) | {"device": self.dist.device.type},
            wandb_run_id=wandb_run_id,
            progress={
                **{name: getattr(self, name) for name in self._plain_fields()},
                "losses": list(self.spikes.losses),
                "evaluations": [list(e) for e in self.evaluations],
            },
            metadata=self.metadata | {LR_HISTORY: rates},
            extra_state={name: part.state_dict() for name, part in self._extra.items()} or None,
        )

    def _check_saves(self) -> None:
        """Raises ValueError, before the first step, if no run could resume from a checkpoint of
        this one.
        """
        saved = self.checkpoint()
        shapes = {
            name: torch.empty(w.shape, dtype=w.dtype, device="meta")
            for name, w in saved.model.items()
        }
        try:
            check_loadable(vars(saved))
            GPT.without_storage(self.model.config).load_state_dict(shapes, assign=True)
        except (RuntimeError, ValueError) as e:
            raise ValueError(
                f"no run could resume from checkpoints of this one, so it ends: {reason(e)}"
            ) from None

    def resume(self, saved: Checkpoint, source: str, trains: bool) -> None:
        """Continue from a checkpoint, whose weights the model has. trains: the optimizer's state
        matters.

        Raises ValueError, naming `source`, if it is damaged.
        """
        if trains:
            self.optimizer_state.load(saved.optimizer, source)
        self.first_step = self.step = saved.iter_num
        self.wandb_run_id = saved.wandb_run_id
        self._saved_extra = saved.extra_state or {}
        for name in self._extra:
            self._restore_extra(name)
        try:
            if trains and saved.scaler:
                if not all(0 <= float(x) < math.inf for x in saved.scaler.values()):
                    raise ValueError
                self.scaler.load_state_dict(saved.scaler)
            if saved.progress:  # nanoGPT's has none
                for name in self._plain_fields() & saved.progress.keys():
                    self._restore_field(name, saved.progress[name])
                self.rate_factors = [float(factor) for factor in self.rate_factors]
                self.spikes.losses.extend(map(float, saved.progress["losses"]))
                for step, train_loss, val_loss, error in saved.progress["evaluations"]:
                    error = None if error is None else float(error)
                    self.evaluations.append(
                        EvalRecord(int(step), float(train_loss), float(val_loss), error)
                    )
        except Exception:  # an untrusted state can raise nearly anything
            raise ValueError(
                f"{source}: its loss scale, or its record of past losses, is damaged"
            ) from None

    def _plain_fields(self) -> set[str]:
        """Return the names of the fields that a checkpoint keeps as they are: the others that have
        a default.
        """
        has_default = {
            f.name for f in fields(self) if (f.default, f.default_factory) != (MISSING, MISSING)
        }
        return {name for name in has_default - KEPT_ELSEWHERE if not name.startswith("_")}

    def _restore_field(self, name: str, value: Any) -> None:
        """Raises ValueError if the value has another type than the field."""
        own = getattr(self, name)
        if own is not None and type(value) is not type(own):
            raise ValueError
        setattr(self, name, value)

    def _restore_extra(self, name: str) -> None:
        """Give a registered object its state back, if the checkpoint has it.

        Raises ValueError if it does not fit.
        """
        if name not in self._saved_extra:
            return
        try:
            self._extra[name].load_state_dict(self._saved_extra[name])
        except Exception as e:  # whatever that class raises
            raise ValueError(
                f"{self.settings['out_dir']}: its {name} does not fit this run ({reason(e)})"
            ) from None


# ---- learning rates of the steps so far ----------------------------------------------------------

LRS_KEPT = 64  # steps, evenly spread


def sample_lrs(rate: Callable[[int], float], done: int) -> dict[str, float]:
    """Return the learning rates at up to RATES_COMPARED of the steps done, evenly spread, by
    step.
    """
    n = min(done, LRS_KEPT)
    steps = [round(i * (done - 1) / max(1, n - 1)) for i in range(n)]
    return {str(step): rate(step) for step in steps}
