"""Follows the numbers of a run's steps: reports bad ones, and ends or rewinds the run where it must."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from deskgpt.checkpoint import store
from deskgpt.compute.sharding import local
from deskgpt.run.diagnosis import advice, bad_parameters
from deskgpt.run.report import Report, Step
from deskgpt.run.saver import Saver
from deskgpt.run.settings import RunSettings
from deskgpt.run.train_state import TrainState

WAITS_FOR_NOTHING = ("cpu",)  # devices on which fetching a number is free
KEPT_STEPS = 256  # steps whose numbers wait on the device at most, however rare log lines are
MAX_REWINDS = 5  # to the same checkpoint. If skipping batches does not stop the spikes, the batches are not the cause.


@dataclass(frozen=True)
class Pending:
    """A step whose numbers are still on the device."""

    step: int
    position: int  # of its global batch in the order of batches
    may_overflow: bool
    numbers: Tensor  # (2 + parameters,): loss, norm of all gradients, norm of each


class Health:
    """Keeps per-step metrics on the device and fetches them at log steps.

    `record` does not wait for the device, except for float16's loss scale. `flush` does, and for all ranks, which call
    it at the same steps.
    """

    def __init__(self, config: RunSettings, state: TrainState, report: Report, saver: Saver) -> None:
        self.config = config
        self.state = state
        self.report = report
        self.saver = saver
        self.dist = state.dist
        self.names = state.runner.names
        self.good_norms: deque[float] = deque(maxlen=4)  # the last ones
        self._spike: Step | None = None  # that nothing was done about yet
        self._pending: list[Pending] = []

    # ---- steps -------------------------------------------------------------------------------------------

    def record(self, loss: Tensor, grad_norms: Tensor, grad_norm: Tensor) -> None:
        """A step's numbers, still on the device: loss (), the norm of each gradient (parameters,) and of all ()."""
        scaler = self.state.runner.scaler
        # Above a scale of 1, float16 gradients that overflow are the scaler's normal way of finding the right scale.
        may_overflow = scaler.is_enabled() and scaler.get_scale() >= 1
        numbers = torch.cat([torch.stack([loss, grad_norm]), grad_norms])
        self._pending.append(Pending(self.state.step, self.state.position, may_overflow, numbers))
        # On a CPU nothing is waited for, so that a bad step is known at once.
        if self.dist.device.type in WAITS_FOR_NOTHING or len(self._pending) >= KEPT_STEPS or self.report.is_due():
            self.flush()

    def flush(self) -> None:
        """Reports the steps since the last call. Raises ValueError after too many bad ones in a row."""
        if self._pending:
            rows = torch.stack([pending.numbers for pending in self._pending])
            rows[:, 0] = self.dist.sum(rows[:, 0].clone())
            pending_steps = self._pending
            self._pending = []
            for pending, row in zip(pending_steps, rows.tolist(), strict=True):
                loss, grad_norm, *norms = row
                is_bad = not math.isfinite(grad_norm) and not pending.may_overflow
                mean_loss = loss / self.dist.world
                self._add(Step(pending.step, pending.position, mean_loss, grad_norm, norms, is_bad))
        self._check_gradients()

    def _add(self, step: Step) -> None:
        self.report.add_step(step)
        if step.bad:
            self.state.bad_in_a_row.append(step)
            scaler = self.state.runner.scaler
            which = bad_parameters(step.norms, self.names)
            scale = scaler.get_scale() if scaler.is_enabled() else None
            text = f"gradients are not finite ({which}): no update"
            self.report.step_event("bad_step", step, text, which=which, loss_scale=scale)
            return
        if math.isfinite(step.grad_norm):
            self.state.bad_in_a_row.clear()
            self.good_norms.append(step.grad_norm)
        median = self.state.spikes.add(step.loss)
        if median is not None:
            text = f"loss spike, {step.loss:.4f} after a median of {median:.4f}"
            self.report.step_event("spike", step, text, median=median)
            self._spike = self._spike or step

    def _check_gradients(self) -> None:
        n = len(self.state.bad_in_a_row)
        if not self.config.max_bad_steps or n < self.config.max_bad_steps:
            return
        first = self.state.bad_in_a_row[0]
        steps = f"at step {first.step}" if n == 1 else f"in {n} steps in a row, {first.step} to {first.step + n - 1}"
        raise ValueError(
            f"gradients are not finite {steps}: {bad_parameters(first.norms, self.names)}; {self.evidence(first.step)}"
        )

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
        spike = self._spike
        self._spike = None
        if spike is None or self.config.on_spike == "go":
            return False
        if self.config.on_spike == "stop":
            raise ValueError(
                f"on_spike=stop: the loss leapt to {spike.loss:.4f} at step {spike.step}; {self.saver.kept_text()}"
            )
        kept = self.saver.latest(self.dist)
        if kept is None:
            self.dist.print0("on_spike=rewind: no checkpoint was saved yet, so the run goes on")
            return False
        with self.report.timer.spent_on("saving"):
            saved = store.load(kept.path, ranks=self.dist)
            step = saved.iter_num
            if self.state.rewinds_to(step) >= MAX_REWINDS:
                raise ValueError(
                    f"on_spike=rewind: {MAX_REWINDS} times back to step {step}, and the loss leapt again: it is not "
                    f"the data; try a lower --learning_rate; {self.saver.kept_text()}"
                )
            self.state.rewind(saved, kept.path, spike.position)
            self._pending.clear()
            self.state.bad_in_a_row.clear()
            self.saver.is_stale = True
            self.dist.all(True)  # no rank replaces the file while another reads it
        text = f"back to step {step}; the batches of steps {step} to {spike.step} are skipped"
        self.report.event("rewind", text, iter=step, spike=spike.step, skipped_batches=self.state.skipped_batches)
        return True

    # ---- evidence ----------------------------------------------------------------------------------------

    def evidence(self, step: int) -> str:
        """What is known of a failure at this step, and what to try."""
        runner = self.state.runner
        scale = f", loss scale {runner.scaler.get_scale():g}" if runner.scaler.is_enabled() else ""
        norms = ", ".join(f"{norm:.3g}" for norm in self.good_norms) or "none that is finite"
        is_first = step == self.state.first_step or not self.good_norms
        return (
            f"computed in {runner.variant}{scale}; gradient norms before: {norms}; {self.saver.kept_text()}; "
            f"{advice(runner.variant, is_first, self._broken_weight())}"
        )

    def _broken_weight(self) -> str | None:
        """The first parameter that is not finite, on whichever rank."""
        bad = torch.stack([~local(p).isfinite().all() for p in self.state.runner.parameters])
        broken = [name for name, n in zip(self.names, self.dist.sum(bad.float()).tolist(), strict=True) if n]
        return broken[0] if broken else None
