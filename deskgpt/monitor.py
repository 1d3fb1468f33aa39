"""Watches the loss and the gradients of a run's steps: reports bad ones, and ends the run after too
many.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deskgpt.device import copy_to_host
from deskgpt.logger import RunLogger
from deskgpt.saving import Checkpointer
from deskgpt.train_state import TrainState

MAX_BAD_STEPS = 10  # steps in a row with NaN or infinite gradients, all skipped, that end the run


class LossMonitor:
    """Keeps the numbers of steps on the device and copies them to the host at log steps, on a CPU
    at each step.

    It looks at them as logger.deferred does: at once, on CUDA when the next step is queued. All
    ranks call `add` and `flush` at the same steps.
    """

    def __init__(
        self, state: TrainState, logger: RunLogger, checkpointer: Checkpointer, on_spike: str
    ) -> None:
        """on_spike: go or stop."""
        self.state = state
        self.logger = logger
        self.checkpointer = checkpointer
        if on_spike not in ("go", "stop"):
            raise ValueError(f"on_spike={on_spike} does nothing: write it in {__name__}")
        self.on_spike = on_spike
        self.dist = state.dist
        self.has_scale = state.scaler.is_enabled()  # in float16
        self.parameters = {name: p for name, p in state.model.named_parameters() if p.requires_grad}
        # The last steps in a row whose gradients were not finite, and the parameters' names.
        self.consecutive_bad_steps: list[tuple[int, str]] = []
        # (step, numbers on the device (3 + parameters,)): the loss, the norm of all gradients, the
        # loss scale if there is one, the norm of each gradient.
        self._pending: list[tuple[int, Tensor]] = []

    # ---- steps -----------------------------------------------------------------------------------

    def add(self, step: int, loss: Tensor, grad_norms: Tensor, grad_norm: Tensor) -> None:
        """Take a step's numbers, still on the device: loss (), the norm of each gradient
        (parameters,) and of all ().

        Raises ValueError after MAX_BAD_STEPS bad ones in a row, and after a spike, if on_spike is
        stop.
        """
        numbers: list[Any] = [loss, grad_norm]
        if self.has_scale:
            # A tensor: get_scale() would wait for the device.
            numbers.append(self.state.scaler._scale)
        self._pending.append((step, torch.cat([torch.stack(numbers), grad_norms])))
        if self.dist.device.type == "cpu" or self.logger.should_log(step):
            self._fetch()

    def check_last_step(self) -> bool:
        """Report all steps so far; return whether the last one had finite gradients.

        Raises ValueError if they end the run.
        """
        self.flush()
        return not self.consecutive_bad_steps

    def flush(self) -> None:
        """Report all steps so far, and print their lines. Raises ValueError if they end the run."""
        self._fetch()
        self.logger.deferred.run()

    def _fetch(self) -> None:
        """Copy the numbers of the pending steps to the host, to look at them there."""
        if self._pending:
            steps, numbers = zip(*self._pending, strict=True)
            self._pending.clear()
            rows = torch.stack(numbers)
            rows[:, 0] = self.dist.sum(rows[:, 0]) / self.dist.world
            self.logger.deferred.add(partial(self._look_at, steps, copy_to_host(rows)))

    def _look_at(self, steps: tuple[int, ...], rows: Tensor) -> None:
        """Report bad steps and spikes. Raises ValueError if they end the run."""
        for step, (loss, grad_norm, *norms) in zip(steps, rows.tolist(), strict=True):
            scale = norms.pop(0) if self.has_scale else None
            if math.isfinite(grad_norm):
                self.consecutive_bad_steps.clear()
            # Above a scale of 1, float16 gradients that overflow are the scaler's normal way of
            # finding the right scale. It has then halved the scale of such a step.
            elif not scale or scale < 0.5:
                self._add_bad_step(step, loss, norms, scale)
                continue
            self._add_loss(step, loss)
        n = len(self.consecutive_bad_steps)
        if n >= MAX_BAD_STEPS:
            first, which = self.consecutive_bad_steps[0]
            self.logger.log.write("diverged", iter=step)  # bench/ask.py reads it
            raise ValueError(
                f"gradients are not finite in {n} steps in a row, {first} to "
                f"{first + n - 1}: {which}; {self.diagnose(first)}"
            )

    def _add_bad_step(
        self, step: int, loss: float, norms: list[float], scale: float | None
    ) -> None:
        """Report how many gradients are not finite, and the first of them in the order of the
        forward pass.
        """
        bad = [
            name
            for name, norm in zip(self.parameters, norms, strict=True)
            if not math.isfinite(norm)
        ]
        first = f", {bad[0]} first" if bad else ""  # each can be finite where their norm is not
        which = f"{len(bad)} of {len(norms)} parameters{first}"
        self.consecutive_bad_steps.append((step, which))
        text = f"gradients are not finite ({which}): this step changes nothing, the run goes on"
        self._report("bad_step", step, loss, text, which=which, loss_scale=scale)

    def _add_loss(self, step: int, loss: float) -> None:
        """Report a spike. Raises ValueError if it ends the run."""
        median = self.state.spikes.add(loss)
        if median is not None:
            self._report(
                "spike",
                step,
                loss,
                f"loss spike, {loss:.4f} after a median of {median:.4f}",
                median=median,
            )
            if self.on_spike == "stop":
                kept = self.checkpointer.kept_text()
                raise ValueError(f"on_spike=stop: a loss of {loss:.4f} at step {step}; {kept}")

    def _report(self, kind: str, step: int, loss: float, text: str, **fields: Any) -> None:
        """Log the step, its data rows, and their files and offsets."""
        n = self.state.batching.global_batch_size
        first = self.state.rows_before(step)
        rows = [first, first + n - 1]
        line = f"step {step}: {text}; its batch has rows {rows[0]:,} to {rows[1]:,}, see log.jsonl"
        windows = self.state.data.windows(n, first)
        self.logger.event(kind, line, iter=step, loss=loss, **fields, rows=rows, windows=windows)

    def check_val_loss(self, loss: float) -> None:
        """Raises ValueError if a validation loss is not finite."""
        step = self.state.step
        if not math.isfinite(loss):
            self.logger.log.write("diverged", iter=step)
            raise ValueError(f"val loss is {loss} at step {step}; {self.diagnose(step)}")

    # ---- evidence --------------------------------------------------------------------------------

    def diagnose(self, step: int) -> str:
        """Return the facts about a failure at this step, and a remedy to try."""
        remedy = "try a lower --learning_rate, then --compile=False and --dtype=float32"
        if step == self.state.first_step:
            remedy = (
                "no update of this run came before, so it is not the learning rate: try "
                "--compile=False and --dtype=float32, then other data or weights to start from"
            )
        return (
            f"computed in {self.state.compute}, loss scale {self.state.scaler.get_scale():g}; "
            f"{self.checkpointer.kept_text()}; {remedy}"
        )
