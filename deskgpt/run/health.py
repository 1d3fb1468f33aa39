"""Follows the numbers of a run's steps: reports bad ones, and ends or rewinds the run where it must."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deskgpt.checkpoint import store
from deskgpt.compute.sharding import local
from deskgpt.run.report import Report
from deskgpt.run.saver import Saver
from deskgpt.run.train_state import TrainState

if TYPE_CHECKING:
    from train import TrainConfig

KEPT_STEPS = 256  # steps whose numbers wait on the device at most, however rare log lines are
MAX_REWINDS = 5  # to the same checkpoint. If skipping batches does not stop the spikes, the batches are not the cause.


@dataclass(frozen=True)
class Step:
    """The numbers of an optimizer step."""

    step: int
    position: int  # of its global batch in the order of batches
    loss: float  # mean over all micro-batches and ranks
    grad_norm: float  # before clipping
    norms: list[float]  # of each parameter's gradient, in the order of the model's parameters


class Health:
    """Keeps per-step metrics on the device and fetches them at log steps.

    `record` does not wait for the device, except for float16's loss scale. `flush` does, and for all ranks, which call
    it at the same steps.
    """

    def __init__(self, config: TrainConfig, state: TrainState, report: Report, saver: Saver) -> None:
        self.config = config
        self.state = state
        self.report = report
        self.saver = saver
        self.dist = state.dist
        self.names = state.runner.names
        self.good_norms: deque[float] = deque(maxlen=4)  # the last ones
        self._spike: Step | None = None  # that nothing was done about yet
        # On the device: (step, position, may overflow, (2 + parameters,): loss, norm of all gradients, norm of each)
        self._pending: list[tuple[int, int, bool, Tensor]] = []

    # ---- steps -------------------------------------------------------------------------------------------

    def record(self, loss: Tensor, grad_norms: Tensor, grad_norm: Tensor) -> None:
        """A step's numbers, still on the device: loss (), the norm of each gradient (parameters,) and of all ()."""
        scaler = self.state.runner.scaler
        # Above a scale of 1, float16 gradients that overflow are the scaler's normal way of finding the right scale.
        may_overflow = scaler.is_enabled() and scaler.get_scale() >= 1
        numbers = torch.cat([torch.stack([loss, grad_norm]), grad_norms])
        self._pending.append((self.state.step, self.state.position, may_overflow, numbers))
        # On a CPU nothing is waited for, so that a bad step is known at once.
        if self.dist.device.type == "cpu" or len(self._pending) >= KEPT_STEPS or self.report.is_due():
            self.flush()

    def flush(self) -> None:
        """Reports the steps since the last call. Raises ValueError after too many bad ones in a row."""
        pending, self._pending = self._pending, []
        if pending:
            rows = torch.stack([numbers for *_, numbers in pending])
            rows[:, 0] = self.dist.sum(rows[:, 0].clone())
            for (step, position, may_overflow, _), row in zip(pending, rows.tolist(), strict=True):
                loss, grad_norm, *norms = row
                self._add(Step(step, position, loss / self.dist.world, grad_norm, norms), may_overflow)
        bad = self.state.bad_in_a_row
        if 0 < self.config.max_bad_steps <= len(bad):
            first = bad[0].step
            steps = f"in {len(bad)} steps in a row, {first} to {first + len(bad) - 1}" if len(bad) > 1 else ""
            raise ValueError(
                f"gradients are not finite {steps or f'at step {first}'}: {self._bad_parameters(bad[0])}; "
                f"{self.evidence(first)}"
            )

    def _add(self, step: Step, may_overflow: bool) -> None:
        self.report.grad_norms.append(step.grad_norm)
        if not math.isfinite(step.grad_norm) and not may_overflow:
            self.state.bad_in_a_row.append(step)
            scaler = self.state.runner.scaler
            which = self._bad_parameters(step)
            scale = scaler.get_scale() if scaler.is_enabled() else None
            text = f"gradients are not finite ({which}): no update"
            self._report("bad_step", step, text, which=which, loss_scale=scale)
            return
        if math.isfinite(step.grad_norm):
            self.state.bad_in_a_row.clear()
            self.good_norms.append(step.grad_norm)
        median = self.state.spikes.add(step.loss)
        if median is not None:
            self._report("spike", step, f"loss spike, {step.loss:.4f} after a median of {median:.4f}", median=median)
            self._spike = self._spike or step

    def _report(self, kind: str, step: Step, text: str, **fields: Any) -> None:
        """Reports a step with the rows of all batches that its batch has, and where in which file they are."""
        n = self.report.batching.sequences
        first = step.position * n
        line = f"step {step.step}: {text}; its batch has rows {first:,} to {first + n - 1:,}, see log.jsonl"
        place = {"rows": [first, first + n - 1], "windows": self.report.data.windows(n, step.position)}
        self.report.event(kind, line, iter=step.step, loss=step.loss, **fields, **place)

    def _bad_parameters(self, step: Step) -> str:
        """How many gradients are not finite, and the first of them in the order of the forward pass."""
        bad = [name for name, norm in zip(self.names, step.norms, strict=True) if not math.isfinite(norm)]
        first = f", {bad[0]} first" if bad else ""  # each can be finite where their norm is not
        return f"{len(bad)} of {len(self.names)} parameters{first}"

    def check_val_loss(self, loss: float) -> None:
        """Raises ValueError if a validation loss is not finite."""
        step = self.state.step
        if not math.isfinite(loss):
            raise ValueError(f"val loss is {loss} at step {step}; {self.evidence(step)}")

    # ---- spikes ------------------------------------------------------------------------------------------

    def rewind_if_spiked(self) -> bool:
        """After a loss spike, what on_spike says. Returns whether the run is now at an earlier step.

        Raises ValueError to end the run.
        """
        spike, self._spike = self._spike, None
        if spike is None or self.config.on_spike == "go":
            return False
        state = self.state
        if self.config.on_spike == "stop":
            raise ValueError(
                f"on_spike=stop: the loss leapt to {spike.loss:.4f} at step {spike.step}; {self.saver.kept_text()}"
            )
        kept = self.saver.latest(self.dist)
        if kept is None:
            self.dist.print0("on_spike=rewind: no checkpoint was saved yet, so the run goes on")
            return False
        with self.report.timer.spent_on("saving"):
            if state.rewound_to == kept.step and state.rewinds_there >= MAX_REWINDS:
                raise ValueError(
                    f"on_spike=rewind: {MAX_REWINDS} times back to step {kept.step}, and the loss leapt again: it is "
                    f"not the data; try a lower --learning_rate; {self.saver.kept_text()}"
                )
            state.rewind(store.load(kept.path, dist=self.dist), kept.path, spike.position)
            self._pending.clear()
            self.dist.all(True)  # no rank replaces the file while another reads it
        text = f"back to step {state.step}; the batches of steps {state.step} to {spike.step} are skipped"
        self.report.event("rewind", text, iter=state.step, spike=spike.step, skipped_batches=state.skipped_batches)
        self.saver.latest_step = -1  # what is skipped must be saved
        self.saver.save_if_new(state, self.report, best=False)
        return True

    # ---- evidence ----------------------------------------------------------------------------------------

    def evidence(self, step: int) -> str:
        """What is known of a failure at this step, and what to try."""
        runner = self.state.runner
        scale = f", loss scale {runner.scaler.get_scale():g}" if runner.scaler.is_enabled() else ""
        norms = ", ".join(f"{norm:.3g}" for norm in self.good_norms) or "none that is finite"
        tries = ["--compile=False"] if runner.variant.compiled else []
        if runner.variant.dtype != "float32":
            tries.append("--dtype=float32")
        bad = torch.stack([~local(p).isfinite().all() for p in runner.parameters])  # on whichever rank
        broken = [name for name, n in zip(self.names, self.dist.sum(bad.float()).tolist(), strict=True) if n]
        if broken:
            advice = f"the weights themselves are not finite ({broken[0]}): go on from another checkpoint"
        elif self.good_norms and step != self.state.first_step:
            advice = f"try {', then '.join(['a lower --learning_rate', *tries])}"
        else:
            remedy = f"try {', then '.join(tries)}" if tries else "check the weights that it starts from, and the data"
            advice = f"no update of this run came before, so it is not the learning rate: {remedy}"
        return (
            f"computed in {runner.variant}{scale}; gradient norms before: {norms}; {self.saver.kept_text()}; {advice}"
        )
