"""Watches the loss and the gradients of a run's steps: reports bad ones, and says when the run must end or rewind."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deskgpt.compute.sharding import local
from deskgpt.run.report import Report
from deskgpt.run.saver import Saver
from deskgpt.run.train_state import TrainState

KEPT_STEPS = 256  # steps whose numbers wait on the device at most, however rare log lines are
MAX_BAD_STEPS = 10  # steps in a row with NaN or infinite gradients, all skipped, that end the run


@dataclass(frozen=True)
class Step:
    """The numbers of an optimizer step."""

    step: int
    position: int  # of its global batch in the order of batches
    loss: float  # mean over all micro-batches and ranks
    grad_norm: float  # before clipping
    norms: list[float]  # of each parameter's gradient, in the order of the model's parameters


class Health:
    """Keeps the numbers of steps on the device and fetches them at log steps.

    All ranks call `record` and `flush` at the same steps. Both wait for the device at log steps, and on a CPU always.
    """

    def __init__(self, state: TrainState, report: Report, saver: Saver, on_spike: str) -> None:
        """on_spike: go, stop or rewind."""
        self.state = state
        self.report = report
        self.saver = saver
        self.on_spike = on_spike
        self.dist = state.dist
        self.names = [name for name, p in state.model.named_parameters() if p.requires_grad]
        self.good_norms: deque[float] = deque(maxlen=4)  # the last ones
        self.bad_in_a_row: list[Step] = []  # the last steps, while their gradients were not finite
        self._spike: Step | None = None  # that nothing was done about yet
        # On the device: (step, position, may overflow, (2 + parameters,): loss, norm of all gradients, norm of each)
        self._pending: list[tuple[int, int, bool, Tensor]] = []

    # ---- steps -------------------------------------------------------------------------------------------

    def record(self, step: int, loss: Tensor, grad_norms: Tensor, grad_norm: Tensor) -> None:
        """Take a step's numbers, still on the device: loss (), the norm of each gradient (parameters,) and of all ().

        Raises ValueError after MAX_BAD_STEPS bad ones in a row.
        """
        scaler = self.state.scaler
        # Above a scale of 1, float16 gradients that overflow are the scaler's normal way of finding the right scale. By
        # now it has halved the scale of such a step.
        may_overflow = scaler.is_enabled() and scaler.get_scale() >= 0.5
        numbers = torch.cat([torch.stack([loss, grad_norm]), grad_norms])
        position = step + self.state.skipped_batches
        self._pending.append((step, position, may_overflow, numbers))
        if self.dist.device.type == "cpu" or len(self._pending) >= KEPT_STEPS or self.report.is_due(step):
            self.flush()

    def flush(self) -> None:
        """Report the steps since the last call. Raises ValueError after too many bad ones in a row."""
        pending, self._pending = self._pending, []
        if pending:
            rows = torch.stack([numbers for *_, numbers in pending])
            rows[:, 0] = self.dist.sum(rows[:, 0])
            for (step, position, may_overflow, _), row in zip(pending, rows.tolist(), strict=True):
                loss, grad_norm, *norms = row
                self._add(Step(step, position, loss / self.dist.world, grad_norm, norms), may_overflow)
        bad = self.bad_in_a_row
        if len(bad) >= MAX_BAD_STEPS:
            first = bad[0].step
            raise ValueError(
                f"gradients are not finite in {len(bad)} steps in a row, {first} to {first + len(bad) - 1}: "
                f"{self._bad_parameters(bad[0])}; {self.evidence(first)}"
            )

    def _add(self, step: Step, may_overflow: bool) -> None:
        if not math.isfinite(step.grad_norm) and not may_overflow:
            self.bad_in_a_row.append(step)
            scaler = self.state.scaler
            which = self._bad_parameters(step)
            scale = scaler.get_scale() if scaler.is_enabled() else None
            text = f"gradients are not finite ({which}): no update"
            self._report("bad_step", step, text, which=which, loss_scale=scale)
            return
        if math.isfinite(step.grad_norm):
            self.bad_in_a_row.clear()
            self.good_norms.append(step.grad_norm)
        median = self.state.spikes.add(step.loss)
        if median is not None:
            self._report("spike", step, f"loss spike, {step.loss:.4f} after a median of {median:.4f}", median=median)
            self._spike = self._spike or step

    def _report(self, kind: str, step: Step, text: str, **fields: Any) -> None:
        """Log the step, its data rows, and their files and offsets."""
        n = self.state.batching.sequences
        first = step.position * n
        line = f"step {step.step}: {text}; its batch has rows {first:,} to {first + n - 1:,}, see log.jsonl"
        place = {"rows": [first, first + n - 1], "windows": self.state.data.windows(n, step.position)}
        self.report.event(kind, line, iter=step.step, loss=step.loss, **fields, **place)

    def _bad_parameters(self, step: Step) -> str:
        """Return how many gradients are not finite, and the first of them in the order of the forward pass."""
        bad = [name for name, norm in zip(self.names, step.norms, strict=True) if not math.isfinite(norm)]
        first = f", {bad[0]} first" if bad else ""  # each can be finite where their norm is not
        return f"{len(bad)} of {len(self.names)} parameters{first}"

    def check_val_loss(self, loss: float) -> None:
        """Raises ValueError if a validation loss is not finite."""
        step = self.state.step
        if not math.isfinite(loss):
            raise ValueError(f"val loss is {loss} at step {step}; {self.evidence(step)}")

    # ---- spikes ------------------------------------------------------------------------------------------

    def must_rewind(self) -> Step | None:
        """Return the loss spike before whose batch the run must rewind, once. Raises ValueError if it must end."""
        spike, self._spike = self._spike, None
        if spike is None or self.on_spike == "go":
            return None
        if self.on_spike == "stop":
            raise ValueError(
                f"on_spike=stop: the loss leapt to {spike.loss:.4f} at step {spike.step}; {self.saver.kept_text()}"
            )
        return spike

    def forget(self) -> None:
        """Drop what is known of steps that were rewound."""
        self._pending.clear()
        self.bad_in_a_row.clear()

    # ---- evidence ----------------------------------------------------------------------------------------

    def evidence(self, step: int) -> str:
        """Return what is known of a failure at this step, and what to try."""
        state = self.state
        scale = f", loss scale {state.scaler.get_scale():g}" if state.scaler.is_enabled() else ""
        norms = ", ".join(f"{norm:.3g}" for norm in self.good_norms) or "none that is finite"
        tries = ["--compile=False"] if state.variant.compiled else []
        if state.variant.dtype != "float32":
            tries.append("--dtype=float32")
        parameters = [p for p in state.model.parameters() if p.requires_grad]
        bad = torch.stack([~local(p).isfinite().all() for p in parameters])  # on whichever rank
        broken = [name for name, n in zip(self.names, self.dist.sum(bad.float()).tolist(), strict=True) if n]
        if broken:
            advice = f"the weights themselves are not finite ({broken[0]}): resume another checkpoint"
        elif self.good_norms and step != state.first_step:
            advice = f"try {', then '.join(['a lower --learning_rate', *tries])}"
        else:
            remedy = f"try {', then '.join(tries)}" if tries else "check the weights that it starts from, and the data"
            advice = f"no update of this run came before, so it is not the learning rate: {remedy}"
        return f"computed in {state.variant}{scale}; gradient norms before: {norms}; {self.saver.kept_text()}; {advice}"
