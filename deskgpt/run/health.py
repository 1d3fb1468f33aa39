"""What a run's numbers say about it: gradients that are not finite, loss spikes, evaluations that no longer improve.

train.py asks `Health`, which collects the numbers of each step on the device and fetches them now and then. What it
concludes comes from the functions below, which need plain numbers only.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deskgpt.compute.ranks import Ranks
from deskgpt.compute.runner import Form, Runner
from deskgpt.compute.sharding import local

KEPT_STEPS = 256  # steps whose numbers wait on the device at most, however rare log lines are
REMEMBERED = 100  # good steps before a bad one that count as its evidence
MOSTLY_CLIPPED = 0.9  # share of steps from which on the learning rate, or too short a warm-up, is suspected

# ---- steps ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """The numbers of an optimizer step."""

    step: int
    position: int  # of its global batch in the order of batches
    loss: float  # mean over all micro-batches and ranks
    grad_norm: float  # before clipping
    norms: list[float]  # of each parameter's gradient, in the order of the model's parameters
    bad: bool = False  # its gradients were not finite, and nothing was changed


@dataclass(frozen=True)
class Spike:
    """A loss far above those of the steps before."""

    step: int
    position: int  # as of Step
    loss: float
    median: float  # of the steps before


@dataclass
class Findings:
    """What the steps showed that were fetched together."""

    bad: list[Step] = field(default_factory=list)
    spikes: list[Spike] = field(default_factory=list)


class Health:
    """Follows a run's steps and evaluations. Its state travels in checkpoints.

    `see` does not wait for the device, except for float16's loss scale. `catch_up` does, and for all ranks, which call
    it at the same steps.
    """

    def __init__(self, runner: Runner, ranks: Ranks, first_step: int, grad_clip: float, max_bad_steps: int) -> None:
        self.runner = runner
        self.ranks = ranks
        self.first_step = first_step
        self.grad_clip = grad_clip  # 0: no limit
        self.max_bad_steps = max_bad_steps  # in a row; 0: no limit
        self.names = [name for name, _ in runner.model.named_parameters()]  # in the order of the forward pass
        self.last: Step | None = None
        # since the run began or was resumed:
        self.n_bad = 0
        self.n_spikes = 0
        self.n_rewinds = 0
        # of the latest steps:
        self.bad_in_a_row: list[Step] = []
        self.spike: Spike | None = None  # not yet taken
        self.good_norms: deque[float] = deque(maxlen=REMEMBERED)
        self._since_log: list[float] = []  # gradient norms
        self._waiting: list[tuple[int, int, bool, Tensor]] = []
        # what a checkpoint keeps:
        self.skipped_batches = 0  # by rewinds: step N trains on batch N + skipped_batches
        self.rewound_to = 0  # the step of the checkpoint that the last rewind went to
        self.rewinds_there = 0
        self.spikes = SpikeWatch()
        self.evaluations: list[Evaluated] = []

    # what the loop tells

    def see(self, step: int, loss: Tensor, grad_norm: Tensor, grad_norms: Tensor) -> None:
        """A step's numbers, still on the device: loss (), grad_norm () and the norm of each gradient (parameters,)."""
        scaler = self.runner.scaler
        # Above a scale of 1, float16 gradients that overflow are the scaler's normal way of finding the right scale.
        may_overflow = scaler.is_enabled() and scaler.get_scale() >= 1
        row = torch.cat([torch.stack([loss, grad_norm]), grad_norms])
        self._waiting.append((step, step + self.skipped_batches, may_overflow, row))

    def evaluated(self, step: int, train_loss: float, val_loss: float, standard_error: float | None) -> bool:
        """An evaluation. One that is repeated, after a resume or a rewind, counts once. Returns whether it is new."""
        before = [e for e in self.evaluations if e.step < step]
        is_new = before == self.evaluations
        self.evaluations = [*before, Evaluated(step, train_loss, val_loss, standard_error)]
        return is_new

    # what the loop asks

    @property
    def must_catch_up(self) -> bool:
        return self.ranks.device.type == "cpu" or len(self._waiting) >= KEPT_STEPS

    def catch_up(self) -> Findings:
        """What the steps since the last call showed. Waits for the device and, with several ranks, for the others."""
        found = Findings()
        if not self._waiting:
            return found
        rows = torch.stack([row for *_, row in self._waiting])
        rows[:, 0] = self.ranks.sum(rows[:, 0].clone())
        for (step, position, may_overflow, _), row in zip(self._waiting, rows.tolist(), strict=True):
            loss, grad_norm, *norms = row
            bad = not math.isfinite(grad_norm) and not may_overflow
            self._learn(Step(step, position, loss / self.ranks.world, grad_norm, norms, bad), found)
        self._waiting.clear()
        return found

    def _learn(self, now: Step, found: Findings) -> None:
        self.last = now
        self._since_log.append(now.grad_norm)
        if now.bad:
            self.n_bad += 1
            self.bad_in_a_row.append(now)
            found.bad.append(now)
            return
        if math.isfinite(now.grad_norm):
            self.bad_in_a_row.clear()
            self.good_norms.append(now.grad_norm)
        median = self.spikes.see(now.loss)
        if median is not None:
            self.n_spikes += 1
            found.spikes.append(Spike(now.step, now.position, now.loss, median))
            self.spike = self.spike or found.spikes[-1]

    def take_clip_rate(self) -> float | None:
        """The share of steps since this was last asked whose gradients were clipped; None where nothing is clipped."""
        norms = self._since_log
        self._since_log = []
        return clip_rate(norms, self.grad_clip)

    def take_spike(self) -> Spike | None:
        """The first spike since this was last asked."""
        spike = self.spike
        self.spike = None
        return spike

    def check_gradients(self, kept: str) -> None:
        """Raises ValueError after max_bad_steps in a row. kept: what can be said about the checkpoints."""
        n = len(self.bad_in_a_row)
        if not self.max_bad_steps or n < self.max_bad_steps:
            return
        first = self.bad_in_a_row[0]
        steps = f"at step {first.step}" if n == 1 else f"in {n} steps in a row, {first.step} to {first.step + n - 1}"
        raise ValueError(
            f"gradients are not finite {steps} ({self.form_and_scale()}): {bad_parameters(first.norms, self.names)}; "
            f"{self.norms_before()}; {kept}; {advice(self.evidence(first.step, first.norms))}"
        )

    def check_val_loss(self, loss: float, step: int, kept: str) -> None:
        """Raises ValueError if a validation loss is not finite."""
        if math.isfinite(loss):
            return
        raise ValueError(
            f"val loss is {loss} at step {step} ({self.form_and_scale()}); {self.norms_before()}; {kept}; "
            f"{advice(self.evidence(step, []))}"
        )

    # evidence

    def form_and_scale(self) -> str:
        scaler = self.runner.scaler
        scale = f", loss scale {scaler.get_scale():g}" if scaler.is_enabled() else ""
        return f"{self.runner.form}{scale}"

    def norms_before(self) -> str:
        """The last good gradient norms."""
        if not self.good_norms:
            return "no step before was good"
        norms = list(self.good_norms)
        rate = clip_rate(norms, self.grad_clip)
        clipped = "" if rate is None else f", clipped in {rate * len(norms):.0f} of the last {len(norms)} good steps"
        return f"gradient norms before: {', '.join(f'{norm:.3g}' for norm in norms[-4:])}{clipped}"

    def evidence(self, step: int, norms: list[float]) -> Evidence:
        """What is known of a failure at this step. norms: of its gradients, empty where they are not known."""
        bad = torch.stack([~local(p).isfinite().all() for p in self.runner.parameters])
        broken = [name for name, n in zip(self.names, self.ranks.sum(bad.float()).tolist(), strict=True) if n]
        return Evidence(
            form=self.runner.form,
            no_update_before=step == self.first_step or not self.good_norms,
            broken_weight=broken[0] if broken else None,
            in_part=any(math.isfinite(norm) for norm in norms),
            clip_rate=clip_rate(list(self.good_norms), self.grad_clip),
        )

    # checkpoints

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain values."""
        return {
            "skipped_batches": self.skipped_batches,
            "rewound_to": self.rewound_to,
            "rewinds_there": self.rewinds_there,
            "losses": list(self.spikes.losses),
            "steps_since_spike": self.spikes.steps_since_spike,
            "evaluations": [list(e) for e in self.evaluations],
        }

    def restore(self, state: dict[str, Any] | None, source: str) -> None:
        """Goes on from the state in a checkpoint; None where it has none. Raises ValueError where it is damaged."""
        self._waiting.clear()
        self.bad_in_a_row.clear()
        self.spikes = SpikeWatch()
        self.evaluations = []
        if state is None:
            return
        try:
            self.skipped_batches = at_least_0(state["skipped_batches"])
            self.rewound_to = at_least_0(state["rewound_to"])
            self.rewinds_there = at_least_0(state["rewinds_there"])
            self.spikes.losses.extend(float(loss) for loss in state["losses"])
            self.spikes.steps_since_spike = at_least_0(state["steps_since_spike"])
            for step, train_loss, val_loss, error in state["evaluations"]:
                known = None if error is None else float(error)
                self.evaluations.append(Evaluated(at_least_0(step), float(train_loss), float(val_loss), known))
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{source}: what it says about skipped batches and past losses is damaged") from None

    def rewind(self, to_step: int, past: Spike, state: dict[str, Any] | None, source: str) -> None:
        """Goes on from a checkpoint's state, with the first batch after that of the spike."""
        n = self.rewinds_to(to_step) + 1
        self.restore(state, source)
        self.rewound_to = to_step
        self.rewinds_there = n
        self.n_rewinds += 1
        self.skipped_batches = past.position + 1 - to_step

    def rewinds_to(self, step: int) -> int:
        """How many times the run has gone back to the checkpoint of this step."""
        return self.rewinds_there if step == self.rewound_to else 0


def at_least_0(value: Any) -> int:
    """value, which is a whole number from 0 on; raises ValueError otherwise."""
    if type(value) is not int or value < 0:
        raise ValueError
    return value


# ---- bad gradients -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evidence:
    """What is known of a run that failed."""

    form: Form
    no_update_before: bool  # in this run
    broken_weight: str | None = None  # the first parameter that is not finite itself
    in_part: bool = False  # some gradients were finite, others not
    clip_rate: float | None = None  # of the steps before; None where not known


def advice(e: Evidence) -> str:
    """What to try after gradients or a loss that are not finite: first what the evidence speaks for."""
    if e.broken_weight:
        return f"the weights themselves are not finite ({e.broken_weight}): go on from another checkpoint"
    dtype = ["--dtype=float32"] if e.form.dtype != "float32" else []
    plain = ["--compile=False"] if e.form.compiled else []
    if e.no_update_before:
        tries = [*plain, *dtype]
        remedy = f"try {', then '.join(tries)}" if tries else "check the weights that it starts from, and the data"
        return f"no update of this run came before, so it is not the learning rate: {remedy}"
    if e.clip_rate is not None and e.clip_rate > MOSTLY_CLIPPED:
        tries = ["a lower --learning_rate or a longer --warmup_iters", *plain, *dtype]
    elif e.in_part and (dtype or plain):  # a loss that diverges spoils all gradients; one kernel those below it
        tries = [*dtype, *plain, "a lower --learning_rate"]
    else:
        tries = ["a lower --learning_rate", *plain, *dtype]
    return f"try {', then '.join(tries)}"


def bad_parameters(norms: list[float], names: list[str]) -> str:
    """Which gradients are not finite: the first one in the order of the forward pass, the last one, and how many."""
    bad = [name for name, norm in zip(names, norms, strict=True) if not math.isfinite(norm)]
    if len(bad) == len(names):
        return "those of all parameters"
    if not bad:  # each is finite, their sum is not
        return "their norm is too large for a number"
    last = f" to {bad[-1]}" if len(bad) > 1 else ""
    return f"those of {bad[0]}{last}, {len(bad)} of {len(names)} parameters"


def clip_rate(norms: Sequence[float], grad_clip: float) -> float | None:
    """The share of gradient norms above grad_clip, those that are not finite left out; None without any."""
    finite = [norm for norm in norms if math.isfinite(norm)]
    if not grad_clip or not finite:
        return None
    return sum(norm > grad_clip for norm in finite) / len(finite)


# ---- loss spikes ---------------------------------------------------------------------------------------------

# Measured on characters: 18 runs of 64 to 8192 tokens a step, 47,228 losses, warm-up included, gave no alarm. The
# farthest loss was 5.8 deviations above its median, 6.0 at a learning rate of 0.1. At 0.3, where training does leap,
# 1500 steps had 4 spikes, from 3.4 to 4.8 and more. Two nats added to a loss were seen in 97% of places and more where
# losses scatter by 0.04 to 0.17, in 82% where half of the run is the first steep fall. With a scatter of 0.44, even
# four nats were seen in 70% only.
WINDOW = 100  # steps that a loss is compared with
FEWEST = 30  # losses with which comparing begins
DEVIATIONS = 8.0
LEAST_RISE = 0.25  # nats: with large batches 8 deviations are less than what other text changes


class SpikeWatch:
    """Finds the steps at which the loss leaps up. For WINDOW steps after a spike no other one is reported."""

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.steps_since_spike = WINDOW

    def see(self, loss: float) -> float | None:
        """The median loss of the steps before, if this one is a spike; otherwise None."""
        quiet = self.steps_since_spike >= WINDOW
        spike = quiet and len(self.losses) >= FEWEST and is_spike(loss, self.losses)
        median = statistics.median(self.losses) if spike else None
        self.steps_since_spike = 0 if spike else self.steps_since_spike + 1
        if math.isfinite(loss):
            self.losses.append(loss)
        return median


def is_spike(loss: float, before: Sequence[float]) -> bool:
    """Whether a loss is far above those before: by LEAST_RISE and by DEVIATIONS standard deviations.

    The deviation comes from the median absolute one, which outliers do not change; 1.4826 of it is the standard
    deviation of normal noise.
    """
    if loss <= max(before):  # almost always: saves the two medians
        return False
    median = statistics.median(before)
    deviation = 1.4826 * statistics.median(abs(x - median) for x in before)
    return loss > median + max(LEAST_RISE, DEVIATIONS * deviation)


# ---- evaluations ---------------------------------------------------------------------------------------------


class Evaluated(NamedTuple):
    """An evaluation."""

    step: int
    train_loss: float
    val_loss: float
    standard_error: float | None  # of val_loss


def lowest(evaluations: Sequence[Evaluated]) -> Evaluated:
    """The evaluation with the lowest val loss; there must be one."""
    return min(evaluations, key=lambda e: e.val_loss)


def without_improvement(evaluations: Sequence[Evaluated]) -> int:
    """How many evaluations in a row, up to the last one, are not below the best before them by a standard error.

    Small steps down add up: the best is the last one that counted as an improvement. Where the standard error is not
    known, any lower loss counts.
    """
    best = math.inf
    n = 0
    for e in evaluations:
        if e.val_loss < best - (e.standard_error or 0.0):
            best = e.val_loss
            n = 0
        else:
            n += 1
    return n


def overfit(evaluations: Sequence[Evaluated]) -> tuple[int, float] | None:
    """(step of the lowest val loss, how much higher the last one is), where it rose while the train loss fell.

    As in bench/analysis/learning.py, it counts as a rise above four standard errors: the lowest of many evaluations is
    partly low by chance. None also where the standard error is not known.
    """
    if not evaluations:
        return None
    best = lowest(evaluations)
    last = evaluations[-1]
    rise = last.val_loss - best.val_loss
    if last.standard_error is None or rise <= 4 * last.standard_error or last.train_loss >= best.train_loss:
        return None
    return best.step, rise
