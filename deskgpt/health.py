"""Numbers that go bad: gradients and losses that are not finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deskgpt.runner import Form
from model import GPT


class FiniteWatch:
    """Stops a run whose gradients or loss are not finite, and says what can be done about it.

    The first step with such gradients is remembered on the device: seeing a step does not wait for it.
    """

    def __init__(self, model: GPT, form: Form, first_step: int, kept: str) -> None:
        self.names = [name for name, _ in model.named_parameters()]
        self.form = form
        self.first_step = first_step
        self.kept = kept  # what can be said about the files
        device = model.lm_head.weight.device
        self.step = torch.full((), -1, device=device)
        self.bad = torch.zeros(len(self.names), dtype=torch.bool, device=device)

    def see(self, step: int, norms: Tensor) -> None:
        """norms: of each parameter's gradient, in the order of the model's parameters."""
        bad = ~norms.isfinite()
        is_first = bad.any() & (self.step < 0)
        self.step = torch.where(is_first, step, self.step)
        self.bad = torch.where(is_first, bad, self.bad)

    def check_gradients(self) -> None:
        """Raises ValueError if a step's gradients were not finite. Waits for the device."""
        step = int(self.step)
        if step < 0:
            return
        names = [name for name, bad in zip(self.names, self.bad.tolist(), strict=True) if bad]
        if len(names) == len(self.names):
            which = "all parameters"
        else:
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            which = f"{', '.join(names[:2])}{more} of {len(self.names)} parameters"
        raise ValueError(
            f"gradients are not finite at step {step} ({self.form}): those of {which}; {self.kept}; {self.advice(step)}"
        )

    def check_loss(self, name: str, loss: float, step: int) -> None:
        """Raises ValueError if a loss is not finite."""
        if not math.isfinite(loss):
            raise ValueError(f"{name} is {loss} at step {step}; {self.kept}; {self.advice(step)}")

    def advice(self, step: int) -> str:
        """What to try after something that is not finite at this step."""
        tries = []
        if self.form.compiled:
            tries.append("--compile=False")
        if self.form.dtype != "float32":
            tries.append("--dtype=float32")
        if step > self.first_step:
            return "try " + ", then ".join(["a lower --learning_rate", *tries])
        remedy = f"try {', then '.join(tries)}" if tries else "check the weights that it starts from, and the data"
        return f"no update of this run came before, so it is not the learning rate: {remedy}"
