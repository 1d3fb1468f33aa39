"""The training state: all that a checkpoint keeps of a run, and the only place of each fact about
its progress. Also how an optimizer's state is saved and loaded.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from data.batches import BatchSplit
from data.dataset import Dataset
from deskgpt.checkpoint import EXTRA_STATE, Checkpoint, savable
from deskgpt.compute import ComputeMode
from deskgpt.device import code_versions
from deskgpt.distributed import DistContext, is_dtensor, is_sharded
from deskgpt.errors import reason, shortened
from deskgpt.evaluation import EvalRecord, Evaluation
from deskgpt.files import is_number
from deskgpt.optim import Muon
from deskgpt.stopping import Schedule
from model import GPT

# ---- loss spikes ---------------------------------------------------------------------------------

# Measured on characters: 18 runs of 64 to 8192 tokens a step (47,228 losses, warm-up included) gave
# no false alarm; the farthest loss was 5.8 deviations above its median. Two nats added to a loss
# were found in at least 97% of places where losses scatter by 0.04 to 0.17.
SPIKE_WINDOW = 100  # steps that a loss is compared with
MIN_LOSSES = 30  # losses with which comparing begins
SPIKE_DEVIATIONS = 8.0
MIN_SPIKE = 0.25  # nats: with large batches, other text changes a loss by more than 8 deviations


class SpikeDetector:
    """Finds the steps at which the loss spikes.

    After a spike the losses to compare with are gathered anew.
    """

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=SPIKE_WINDOW)

    def add(self, loss: float) -> float | None:
        """Add a step's loss.

        Return the median loss of the steps before if this one is a spike; otherwise None.

        A spike is above the median by MIN_SPIKE and by SPIKE_DEVIATIONS standard deviations: 1.4826
        median absolute ones, which outliers do not change.
        """
        # Only a new highest loss can be a spike, so the medians are rarely computed.
        if len(self.losses) >= MIN_LOSSES and loss > max(self.losses):
            median = statistics.median(self.losses)
            deviation = 1.4826 * statistics.median(abs(x - median) for x in self.losses)
            if loss > median + max(MIN_SPIKE, SPIKE_DEVIATIONS * deviation):
                self.losses.clear()
                return median
        if math.isfinite(loss):
            self.losses.append(loss)
        return None


# ---- the state -----------------------------------------------------------------------------------


# A checkpoint keeps each field that has a default, under its name, except these: it has another
# place for them, or does without.
KEPT_ELSEWHERE = {"wandb_run_id", "first_step", "step", "row0", "evaluations", "spikes"}
# A checkpoint's metadata has the learning rates of its steps: a resumed run is compared with them.
LR_HISTORY = "learning rates"
MOST_EVALUATIONS = 10_000  # the last ones: more would make a file's pickle larger than what is read
# Settings of the optimizer: if none has changed, its groups go on as they were saved.
OPTIMIZER_SETTINGS = ("weight_decay", "beta1", "beta2", "momentum")


@dataclass(eq=False)
class TrainState:
    """Weights, optimizer, step, schedule and evaluations.

    `checkpoint` returns all of it, and `resume` takes it back, also a plain field that you add.
    main's loop sets `step` and `schedule`. Raises ValueError if a checkpoint would lose something.
    """

    settings: dict[str, Any]  # of train.py, by name
    model: GPT
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    compute: ComputeMode
    batching: BatchSplit
    schedule: Schedule
    rate: Callable[[Schedule, int], float]  # the learning rate of a schedule at a step
    data: Dataset
    dist: DistContext
    wandb_run_id: str | None = None
    first_step: int = 0  # the step at which this process began
    step: int = 0  # optimizer steps done
    # The row of the training data at which step 0 would begin with today's global batch: not 0 if
    # earlier steps were larger or smaller.
    row0: int = 0
    evaluations: list[EvalRecord] = field(default_factory=list)
    spikes: SpikeDetector = field(default_factory=SpikeDetector)
    # The lr of each group at the last step / self.rate.
    rate_factors: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Facts about data and code, which a resumed run compares.
        self.metadata: dict[str, Any] = (
            self.data.metadata
            | self.data.eval_metadata(self.batching)
            | code_versions(self.compute, self.dist.device)
        )
        keep_rates_of_groups(self.optimizer, self.schedule.learning_rate)
        self._extra: dict[str, Any] = {}  # see register_state
        self._saved_extra: dict[str, Any] = {}
        self._frozen = {n: p for n, p in self.model.named_parameters() if not p.requires_grad}
        self._attributes = {
            name: attribute_state(value) for name, value in attributes_of(self.model).items()
        }
        if not self.settings["eval_only"]:
            self._check_saves()

    def settings_now(self) -> dict[str, Any]:
        """Return the settings with the micro-batch and the schedule that the run has found."""
        found = self.settings | asdict(self.schedule)
        if self.batching.batch_size != self.settings["batch_size"]:
            found |= self.batching.settings()
        return found

    def rows_before(self, step: int) -> int:
        """Return the rows of training data that the steps before this one read."""
        return step * self.batching.global_batch_size + self.row0

    def tokens_before(self, step: int) -> int:
        return self.rows_before(step) * self.batching.block_size

    def add_evaluation(self, train: Evaluation, val: Evaluation) -> None:
        """Add an evaluation of this step.

        One that is repeated after a resume replaces the first.
        """
        before = self.evaluations[1 - MOST_EVALUATIONS :]
        self.evaluations = [e for e in before if e.step < self.step]
        self.evaluations.append(EvalRecord(self.step, train.loss, val.loss, val.standard_error))

    def note_rates(self, step: int) -> None:
        """Note the share of `rate` that each group ran at in this step. Raise ValueError if a
        parameter that was frozen at the start is trained, but not by the optimizer.

        After the first step of a resumed run, print a share that differs from the one before. So a
        rate that is changed in main is noticed; `rate` itself is compared before a run resumes.
        """
        groups = self.optimizer.param_groups
        optimized = {p for group in groups for p in group["params"]}
        for name, p in self._frozen.items():
            if p.requires_grad and p not in optimized:
                raise ValueError(
                    f"{name} is trained now, but the optimizer was made without it: freeze it "
                    "after build_optimizer, which takes what is trained then"
                )
        rate = self.rate(self.schedule, step)
        if not rate:
            return
        factors = [float(group["lr"] / rate) for group in groups]
        if step == self.first_step:
            own = [group.get("lr_scale", 1.0) for group in groups]
            # A scheduler of torch's adds initial_lr to the groups.
            if "initial_lr" in groups[0] and np.allclose(factors, own):
                self.dist.print0(
                    "warning: a torch.optim.lr_scheduler has no effect, since the loop sets each "
                    "group's lr to learning_rate() at every step: write the schedule there"
                )
            for i, (old, new) in enumerate(zip(self.rate_factors, factors, strict=False)):
                if not math.isclose(old, new, rel_tol=1e-6):
                    text = f"{new:.6g} times learning_rate() in group {i}, {old:.6g} times before"
                    self.dist.print0(f"changed: learning rate at step {step:,}: {text}")
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
        savable(part.state_dict(), name)
        self._extra[name] = part
        if name in self._saved_extra:
            part.load_state_dict(self._saved_extra[name])

    def checkpoint(self, best_val_loss: float = math.inf) -> Checkpoint:
        """Return all of the state. best_val_loss: of the best checkpoint on the disk, once this one
        is written.
        """
        rates = sample_lrs(lambda step: self.rate(self.schedule, step), self.step)
        weights = self.model.state_dict()
        generators = {}
        changed = []
        for name, value in attributes_of(self.model).items():
            if isinstance(value, torch.Generator):
                generators[name] = value.get_state()
            elif attribute_state(value) != self._attributes.get(name):
                extra = f"{name.rpartition('.')[0]}.{EXTRA_STATE}".lstrip(".")
                if extra not in weights:  # the user's own get_extra_state keeps it
                    changed.append(name)
        return Checkpoint(
            model=weights,
            optimizer=optimizer_state(self.optimizer, self.model),
            model_args=self.model.config.as_args(),
            iter_num=self.step,
            best_val_loss=best_val_loss,
            config=self.settings_now(),
            scaler=self.scaler.state_dict(),
            tokenizer=self.data.tokenizer,
            chat=self.data.chat,
            # saved_compute reads it back.
            variant=asdict(self.compute) | {"device": self.dist.device.type},
            wandb_run_id=self.wandb_run_id,
            progress={
                **{name: getattr(self, name) for name in self._plain_fields()},
                "rows": self.rows_before(self.step),
                "losses": list(self.spikes.losses),
                "evaluations": self.evaluations,
                "generators": generators,
                "changed attributes": changed,
            },
            metadata=self.metadata | {LR_HISTORY: rates},
            extra_state={name: part.state_dict() for name, part in self._extra.items()} or None,
        )

    def _check_saves(self) -> None:
        """Raises ValueError, before the first step, if no run could resume from a checkpoint of
        this one.
        """
        saved = self.checkpoint()
        try:
            savable(vars(saved))
            shapes = {
                name: w.to("meta") if isinstance(w, Tensor) else w
                for name, w in saved.model.items()
            }
            GPT.without_storage(self.model.config).load_state_dict(shapes, assign=True)
        except Exception as e:  # whatever a user's set_extra_state raises
            raise ValueError(
                f"no run could resume from checkpoints of this one, so it ends: {reason(e)}"
            ) from None

    def resume(self, saved: Checkpoint, source: str, trains: bool) -> None:
        """Continue from a checkpoint, whose weights the model has. trains: the optimizer's state
        matters.

        Raises ValueError, naming `source`, if it is damaged.
        """
        if trains:
            now = self.settings
            is_same = all(saved.config.get(n, now[n]) == now[n] for n in OPTIMIZER_SETTINGS)
            load_optimizer(self.optimizer, self.model, saved.optimizer, source, is_same)
        self.first_step = self.step = saved.iter_num
        self.wandb_run_id = saved.wandb_run_id
        self._saved_extra = saved.extra_state or {}
        progress = saved.progress or {}
        for name, part in self._extra.items():
            self.register_state(name, part)
        try:
            if trains and saved.scaler:
                if not all(0 <= float(x) < math.inf for x in saved.scaler.values()):
                    raise ValueError
                self.scaler.load_state_dict(saved.scaler)
            for name in self._plain_fields() & progress.keys():
                default = getattr(self, name)
                if default is not None and type(progress[name]) is not type(default):
                    raise TypeError
                setattr(self, name, progress[name])
            self.rate_factors = [float(factor) for factor in self.rate_factors]
            # nanoGPT's, and those of the version before, have not counted their rows.
            sizes = ("batch_size", "gradient_accumulation_steps")
            rows_per_step = math.prod(saved.config.get(n, self.settings[n]) for n in sizes)
            rows = progress.get("rows", self.step * rows_per_step)
            if not is_number(rows):
                raise ValueError
            self.row0 += rows - self.rows_before(self.step)
            self.spikes.losses.extend(map(float, progress.get("losses", [])))
            self.evaluations += [EvalRecord(*row) for row in progress.get("evaluations", [])]
            own = attributes_of(self.model)
            for name, state in progress.get("generators", {}).items():
                if name in own:
                    own[name].set_state(state)
            lost = ", ".join(progress.get("changed attributes", []))
        except Exception:  # an untrusted state can raise nearly anything
            raise ValueError(
                f"{source}: its loss scale, or its record of past losses, is damaged"
            ) from None
        if lost:
            self.dist.print0(
                "changed: attributes of the model that are in no checkpoint begin anew: "
                f"{shortened(lost)}; keep them in buffers or get_extra_state"
            )

    def _plain_fields(self) -> set[str]:
        """Return the names of the fields that a checkpoint keeps as they are."""
        required = (MISSING, MISSING)
        found = {f.name for f in fields(self) if (f.default, f.default_factory) != required}
        return found - KEPT_ELSEWHERE


# ---- a model's attributes ------------------------------------------------------------------------


def attributes_of(model: nn.Module) -> dict[str, Any]:
    """Return the attributes of modules, without parameters, buffers and modules, by name."""
    from deskgpt.cuda_graph import is_own

    found: dict[str, Any] = {}
    for prefix, module in model.named_modules():
        found |= {f"{prefix}.{n}": x for n, x in vars(module).items() if is_own(n)}
    found.pop(".require_backward_grad_sync", None)  # main sets it, in sharded runs
    return found


def attribute_state(value: Any) -> Any:
    """Return something that differs once an attribute has changed, a tensor also in place."""
    from deskgpt.cuda_graph import snapshot

    is_counted = isinstance(value, Tensor) and not value.is_inference()
    return snapshot(value), value._version if is_counted else 0


# ---- the optimizer's state -----------------------------------------------------------------------


OUR_OPTIMIZERS = (torch.optim.AdamW, Muon)
OPTIONS = ("lr", "betas", "eps", "weight_decay")  # numbers in their groups, which are checked
SET_BY_SETTINGS = {"weight_decay", "betas", "momentum"}
SET_BY_THE_MACHINE = {"lr_scale", "fused", "foreach", "capturable"}


def optimizer_state(optimizer: torch.optim.Optimizer, model: GPT) -> dict[str, Any]:
    """Return an optimizer's state as plain values and tensors for a checkpoint.

    Raises ValueError if that would lose something, or if main's loop cannot take its steps.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS computes gradients in its step; the loop gives each step those of one "
            "batch: take an optimizer that needs no closure"
        )
    about = {"names": names_of(optimizer, model), "class": type(optimizer).__name__}
    if not has_own_state_dict(optimizer):
        return optimizer.state_dict() | about | {"attributes": own_numbers(optimizer)}
    if is_sharded(model):
        raise ValueError(f"dp_shard: {about['class']} has a state_dict of its own, and no shards")
    return about | {"own": optimizer.state_dict()}


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    model: GPT,
    state: dict[str, Any] | None,
    source: str,
    settings_are_same: bool = True,
) -> None:
    """Load the state that optimizer_state returned. If the model is sharded, rank 0 has the full
    tensors, and all ranks call this.

    settings_are_same: False keeps the groups' own weight decay, betas and momentum. Raises
    ValueError, naming `source`, if the state does not belong to the model or the optimizer.
    """
    anew = f"begin a new run with its weights: --init_from={source}"
    if not state:
        raise ValueError(f"{source} has no optimizer state: {anew}")
    theirs = str(state.get("class", "AdamW"))  # nanoGPT's has no class
    if theirs != type(optimizer).__name__:
        raise ValueError(
            f"{source} was trained with another optimizer, {theirs[:80]}: continue with that one "
            f"(--optimizer), or {anew}"
        )
    try:
        names = names_of(optimizer, model)
        if state.get("names", names) != names:
            raise ValueError("its parameters differ, or are in another order")
        if has_own_state_dict(optimizer):
            optimizer.load_state_dict(state["own"])
        else:
            _load(optimizer, state, settings_are_same)
    except Exception as e:  # an untrusted state can raise nearly anything
        raise ValueError(
            f"{source}: the optimizer state does not fit the model ({reason(e)})"
        ) from None


def _load(optimizer: torch.optim.Optimizer, state: dict[str, Any], settings_are_same: bool) -> None:
    from deskgpt.sharding import sharded_as

    is_ours = type(optimizer) in OUR_OPTIMIZERS
    groups = []
    for mine, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        kept = saved.keys() - SET_BY_THE_MACHINE
        if is_ours:
            torch.optim.AdamW([torch.zeros(1)], **{name: saved[name] for name in OPTIONS})
            kept = {"params", "momentum", *OPTIONS} & mine.keys()
        if not settings_are_same:
            kept -= SET_BY_SETTINGS
        groups.append(mine | {name: saved[name] for name in kept})
        for p, number in zip(mine["params"], saved["params"], strict=True):
            moments = state["state"].get(number, {})  # none before its first gradient
            if moments and is_ours:
                check_moments(moments, p, "momentum" in mine)
            for kind, value in moments.items():
                if is_dtensor(p) and isinstance(value, Tensor):
                    # Replace each in the dictionary, so that full ones are freed one by one.
                    moments[kind] = sharded_as(value, p) if value.dim() else value.clone()
    device = optimizer.param_groups[0]["params"][0].device
    groups = tree_map_only(Tensor, lambda x: x.to(device), groups)
    optimizer.load_state_dict({"state": state["state"], "param_groups": groups})
    for name, value in state.get("attributes", {}).items():
        # An attribute may be one that its first step makes, but no method.
        if isinstance(value, PLAIN) and not hasattr(type(optimizer), name):
            setattr(optimizer, name, value)


def check_moments(moments: dict[str, Any], p: Tensor, is_momentum: bool) -> None:
    """Raise ValueError or KeyError if AdamW's or Muon's moments of a parameter have another kind or
    shape, which fused kernels do not check.
    """
    kinds = ["momentum_buffer"] if is_momentum else ["exp_avg", "exp_avg_sq"]
    shapes = [(moments[kind].shape, moments[kind].dtype) for kind in kinds]
    if shapes != [(p.shape, p.dtype)] * len(kinds) or not moments["step"] >= 0:
        raise ValueError(f"its moments have not the shape {tuple(p.shape)}")


def names_of(optimizer: torch.optim.Optimizer, model: GPT) -> list[str]:
    """Return the names of an optimizer's parameters, in its order."""
    name_of: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [name_of.get(p, "a parameter of its own") for p in params]


def has_own_state_dict(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a user's class saves and loads its state by itself."""
    return type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict


PLAIN = (bool, int, float, str, np.generic, type(None))


def own_numbers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the numbers and texts that a user's class has as attributes.

    Raises ValueError if it has anything else there, such as tensors, arrays or objects.
    """
    if type(optimizer) in OUR_OPTIMIZERS:
        return {}
    # A GradScaler sets the last two in a step.
    known = {*vars(torch.optim.Optimizer([torch.zeros(1)], {})), "grad_scale", "found_inf"}
    own = {name: value for name, value in vars(optimizer).items() if name not in known}
    for name, value in own.items():
        if not isinstance(value, PLAIN):
            raise ValueError(
                f"{type(optimizer).__name__} keeps state in {name}, which checkpoints would lose: "
                "keep tensors in `state`, numbers in attributes"
            )
    return own


# ---- learning rates ------------------------------------------------------------------------------

LRS_KEPT = 64  # steps, evenly spread


def keep_rates_of_groups(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set `lr_scale` of each group that has a learning rate of its own: its share of learning_rate,
    for the whole run.

    The loop sets each group's `lr` anew at every step. A group that has an `lr_scale` keeps that.
    Raises ValueError if learning_rate is 0, of which nothing has a share.
    """
    for group in optimizer.param_groups:
        own = group.get("lr")
        if own in (None, learning_rate, optimizer.defaults.get("lr")) or "lr_scale" in group:
            continue
        if not learning_rate:
            raise ValueError(
                f"a group of parameters has lr={own:g}, which is no share of learning_rate=0"
            )
        group["lr_scale"] = own / learning_rate


def sample_lrs(rate: Callable[[int], float], done: int) -> dict[str, float]:
    """Return the learning rates at up to LRS_KEPT of the steps done, evenly spread, by step."""
    steps = np.linspace(0, done - 1, min(done, LRS_KEPT)).astype(int).tolist()
    return {str(step): rate(step) for step in steps}
