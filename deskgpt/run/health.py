"""Follows the numbers of a run's steps: says which were bad, and ends the run, or takes it back, where it must."""

from __future__ import annotations

import math
from collections import deque

import torch
from torch import Tensor

from deskgpt.checkpoint import store
from deskgpt.compute.sharding import local
from deskgpt.run.diagnosis import advice, bad_parameters
from deskgpt.run.report import Report, Step
from deskgpt.run.saver import Saver
from deskgpt.run.train_state import Run

KEPT_STEPS = 256  # steps whose numbers wait on the device at most, however rare log lines are
MAX_REWINDS = 5  # to the same checkpoint. If skipping batches does not stop the spikes, the batches are not the cause.


class Health:
    """Collects the numbers of each step on the device and looks at them now and then.

    `see` does not wait for the device, except for float16's loss scale. `look_back` does, and for all ranks, which call
    it at the same steps.
    """

    def __init__(self, run: Run, report: Report, saver: Saver) -> None:
        self.run = run
        self.report = report
        self.saver = saver
        self.ranks = run.ranks
        self.max_bad_steps = run.settings["max_bad_steps"]  # in a row; 0 is no limit
        self.on_spike = run.settings["on_spike"]
        self.names = run.runner.names
        self.bad_in_a_row: list[Step] = []
        self.good_norms: deque[float] = deque(maxlen=4)  # the last ones
        self.spike: Step | None = None  # that nothing was done about yet
        self._waiting: list[tuple[int, int, bool, Tensor]] = []

    # ---- steps -------------------------------------------------------------------------------------------

    def see(self, loss: Tensor, grad_norms: Tensor, grad_norm: Tensor) -> None:
        """A step's numbers, still on the device: loss (), the norm of each gradient (parameters,) and of all ()."""
        scaler = self.run.runner.scaler
        # Above a scale of 1, float16 gradients that overflow are the scaler's normal way of finding the right scale.
        may_overflow = scaler.is_enabled() and scaler.get_scale() >= 1
        row = torch.cat([torch.stack([loss, grad_norm]), grad_norms])
        self._waiting.append((self.run.step, self.run.position, may_overflow, row))

    @property
    def is_full(self) -> bool:
        """Whether look_back is due, however rare log lines are. On a CPU it waits for nothing."""
        return self.ranks.device.type == "cpu" or len(self._waiting) >= KEPT_STEPS

    def flush(self) -> None:
        """Reports what the steps since the last look showed. Raises ValueError after too many bad ones in a row."""
        if self._waiting:
            rows = torch.stack([row for *_, row in self._waiting])
            rows[:, 0] = self.ranks.sum(rows[:, 0].clone())
            waiting = self._waiting
            self._waiting = []
            for (step, position, may_overflow, _), row in zip(waiting, rows.tolist(), strict=True):
                loss, grad_norm, *norms = row
                bad = not math.isfinite(grad_norm) and not may_overflow
                self._learn(Step(step, position, loss / self.ranks.world, grad_norm, norms, bad))
        self._check_gradients()

    def _learn(self, now: Step) -> None:
        self.report.saw(now)
        if now.bad:
            self.bad_in_a_row.append(now)
            self.report.bad_step(now)
            return
        if math.isfinite(now.grad_norm):
            self.bad_in_a_row.clear()
            self.good_norms.append(now.grad_norm)
        median = self.run.spikes.see(now.loss)
        if median is not None:
            self.report.spike(now, median)
            self.spike = self.spike or now

    def _check_gradients(self) -> None:
        n = len(self.bad_in_a_row)
        if not self.max_bad_steps or n < self.max_bad_steps:
            return
        first = self.bad_in_a_row[0]
        steps = f"at step {first.step}" if n == 1 else f"in {n} steps in a row, {first.step} to {first.step + n - 1}"
        raise ValueError(
            f"gradients are not finite {steps}: {bad_parameters(first.norms, self.names)}; {self.evidence(first.step)}"
        )

    def check_val_loss(self, loss: float) -> None:
        """Raises ValueError if a validation loss is not finite."""
        step = self.run.step
        if not math.isfinite(loss):
            raise ValueError(f"val loss is {loss} at step {step}; {self.evidence(step)}")

    # ---- spikes ------------------------------------------------------------------------------------------

    def rewind_if_spiked(self) -> bool:
        """Does what on_spike says after a loss spike: whether the run is now at an earlier step.

        Raises ValueError to end the run.
        """
        spike = self.spike
        self.spike = None
        if spike is None or self.on_spike == "go":
            return False
        kept = self.saver.latest(self.ranks)
        if self.on_spike == "stop":
            raise ValueError(
                f"on_spike=stop: the loss leapt to {spike.loss:.4f} at step {spike.step}; {self.saver.kept_text()}"
            )
        if kept is None:
            self.ranks.print0("on_spike=rewind: no checkpoint was saved yet, so the run goes on")
            return False
        with self.report.timer.saving():
            saved = store.load(kept.path, ranks=self.ranks)
            step = saved.iter_num
            if self.run.rewinds_to(step) >= MAX_REWINDS:
                raise ValueError(
                    f"on_spike=rewind: {MAX_REWINDS} times back to step {step}, and the loss leapt again: it is not "
                    f"the data; try a lower --learning_rate; {self.saver.kept_text()}"
                )
            self.run.go_back(saved, str(kept.path), spike.position)
            self._waiting.clear()
            self.bad_in_a_row.clear()
            self.saver.is_stale = True
            self.ranks.all(True)  # no rank replaces the file while another reads it
        self.report.rewind(spike)
        return True

    # ---- evidence ----------------------------------------------------------------------------------------

    def evidence(self, step: int) -> str:
        """What is known of a failure at this step, and what to try."""
        runner = self.run.runner
        scale = f", loss scale {runner.scaler.get_scale():g}" if runner.scaler.is_enabled() else ""
        norms = ", ".join(f"{norm:.3g}" for norm in self.good_norms) or "none that is finite"
        is_first = step == self.run.first_step or not self.good_norms
        return (
            f"computed in {runner.form}{scale}; gradient norms before: {norms}; {self.saver.kept_text()}; "
            f"{advice(runner.form, is_first, self.broken_weight())}"
        )

    def broken_weight(self) -> str | None:
        """The first parameter that is not finite, on whichever rank."""
        bad = torch.stack([~local(p).isfinite().all() for p in self.run.runner.parameters])
        broken = [name for name, n in zip(self.names, self.ranks.sum(bad.float()).tolist(), strict=True) if n]
        return broken[0] if broken else None
