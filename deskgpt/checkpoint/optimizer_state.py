"""What a checkpoint keeps of an optimizer, and how a run takes it back.

It is torch's state_dict, as in nanoGPT, with the optimizer's class and the names of its parameters. A class of a user's
own resumes exactly if it keeps tensors in `state` or in its groups, and numbers there or in attributes; any other one
is refused. AdamW and Muon take hyperparameters from the settings, others from the checkpoint, except the learning rate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from deskgpt.compute.optimizer import Muon
from deskgpt.compute.sharding import is_dtensor, sharded_as
from deskgpt.system.terminal import reason
from model import GPT

OURS = (torch.optim.AdamW, Muon)
# In each group: what the run sets, and what suits the machine.
SET_BY_THE_RUN = ("params", "lr", "lr_scale", "fused", "foreach", "capturable")
SET_BY_A_SCALER = {"grad_scale", "found_inf"}  # attributes, during a step


class OptimizerState:
    """An optimizer's state, as `state` and `load` give and take it. To be made before the optimizer's first step."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: GPT) -> None:
        """Raises ValueError if the optimizer keeps something that a checkpoint could not give back.

        If that appears later, the step in which it does raises ValueError.
        """
        self.optimizer = optimizer
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        name_of: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self.names = [name_of.get(p, f"a parameter of its own, {i}") for i, p in enumerate(self.params)]
        attributes(optimizer)
        optimizer.register_step_post_hook(attributes)  # type: ignore[arg-type]

    def state(self) -> dict[str, Any]:
        """Return plain values and tensors for a checkpoint. Raises ValueError if that would lose something."""
        return self.optimizer.state_dict() | {
            "names": self.names,
            "class": type(self.optimizer).__name__,
            "attributes": attributes(self.optimizer),
        }

    def load(self, state: dict[str, Any] | None, source: str) -> None:
        """Take back what `state` has given; full tensors of rank 0 if the model is sharded, on all ranks at once.

        Raises ValueError, naming `source`, if the state does not belong to the model or the optimizer.
        """
        if not state:
            raise ValueError(f"{source} has no optimizer state: begin a new run with its weights: --init_from={source}")
        try:
            theirs = state.get("class") or ("Muon" if "momentum" in state["param_groups"][-1] else "AdamW")
            if theirs == type(self.optimizer).__name__:
                self._load(state)
                return
        except Exception as e:  # an untrusted state can raise nearly anything
            raise ValueError(f"{source}: the optimizer state does not fit the model ({reason(e)})") from None
        remedy = f"take --optimizer={theirs.lower()}" if theirs in ("AdamW", "Muon") else "continue with that one"
        raise ValueError(
            f"{source} was trained with another optimizer, {str(theirs)[:80]}: {remedy}, or begin a new run with its "
            f"weights: --init_from={source}"
        )

    def _load(self, state: dict[str, Any]) -> None:
        own = self.optimizer.param_groups
        theirs = state["param_groups"]
        if state.get("names", self.names) != self.names:
            raise ValueError("its parameters differ, or are in another order")
        if [len(group["params"]) for group in theirs] != [len(group["params"]) for group in own]:
            raise ValueError("its groups of parameters differ")
        numbers = [i for group in theirs for i in group["params"]]
        if type(self.optimizer) in OURS:
            check_moments(own, state["state"], numbers)
        groups = []
        for mine, saved in zip(own, theirs, strict=True):
            saved.pop("lr_scale", None)
            set_now = mine if type(self.optimizer) in OURS else SET_BY_THE_RUN
            kept = {name: mine[name] for name in set_now if name in mine and name != "params"}
            groups.append(tree_map_only(Tensor, lambda x: x.to(self.params[0].device), saved | kept))
        known = attributes(self.optimizer)
        vars(self.optimizer).update({k: v for k, v in state.get("attributes", {}).items() if k in known})
        for number, p in zip(numbers, self.params, strict=True):
            values = state["state"].get(number, {}) if is_dtensor(p) else {}
            for kind, value in values.items():
                if isinstance(value, Tensor) and value.dim():
                    values[kind] = sharded_as(value, p)  # in place, so that full ones are freed one by one
        self.optimizer.load_state_dict({"state": state["state"], "param_groups": groups})


def attributes(optimizer: torch.optim.Optimizer, *_: Any) -> dict[str, Any]:
    """Return the numbers and texts that a user's class has as attributes; {} for torch's classes and ours.

    Raises ValueError if it has anything else there, such as tensors, arrays or objects, or a state_dict of its own.
    """
    torchs: Any = torch.optim.Optimizer
    own: Any = type(optimizer)
    if own is Muon or own.__module__.startswith("torch.optim."):
        return {}
    known = vars(torchs([torch.zeros(1)], {})).keys() | SET_BY_A_SCALER
    found = {name: value for name, value in vars(optimizer).items() if name not in known}
    odd = [name for name, value in found.items() if not isinstance(value, bool | int | float | str | None)]
    if (own.state_dict, own.load_state_dict) != (torchs.state_dict, torchs.load_state_dict):
        odd = ["a state_dict of its own"]
    if odd:
        raise ValueError(
            f"{own.__name__} keeps state in {odd[0]}, which checkpoints would lose: keep tensors in `state`, numbers "
            "in attributes"
        )
    return found


def check_moments(groups: list[dict[str, Any]], state: dict[int, Any], numbers: list[int]) -> None:
    """Raise ValueError if AdamW's or Muon's moments have another kind or shape, which fused kernels do not check.

    Parameters that got no gradient yet have none.
    """
    params = [(p, group) for group in groups for p in group["params"]]
    group_of = dict(zip(numbers, params, strict=True))
    for i, moments in state.items():
        p, group = group_of[i]
        kinds = ["momentum_buffer"] if "momentum" in group else ["exp_avg", "exp_avg_sq"]
        if not (float(moments["step"]) >= 0 and moments.keys() >= set(kinds)):
            raise ValueError(f"parameter {i} has not a step and the moments {', '.join(kinds)}")
        for kind, m in moments.items():
            if kind != "step" and (m.shape != p.shape or m.dtype != p.dtype):
                raise ValueError(f"{kind} of parameter {i} has not the shape {tuple(p.shape)}")
