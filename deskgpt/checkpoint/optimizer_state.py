"""What a checkpoint keeps of any optimizer, and how a run takes it back.

AdamW and Muon of compute/optimizer.py are kept as torch's state_dict, as nanoGPT does. Of any other optimizer the dict
also has its class and what it changed in its groups by itself. An optimizer with a state_dict of its own is asked for
that alone. One that keeps state elsewhere than in `state` and in its groups must have its own state_dict.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from deskgpt.checkpoint import folders
from deskgpt.compute.optimizer import Muon
from deskgpt.compute.sharding import is_dtensor, local, rows_of
from deskgpt.system.terminal import reason
from model import GPT

OURS = (torch.optim.AdamW, Muon)
# In each group: what the run sets, and what suits the machine.
SET_BY_THE_RUN = ("params", "lr", "fused", "foreach", "capturable")
SET_BY_A_SCALER = {"grad_scale", "found_inf"}  # attributes, during a step


class OptimizerState:
    """An optimizer's state, as `state` and `load` give and take it. To be made before the optimizer's first step."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: GPT) -> None:
        """Raises ValueError where the optimizer keeps something that a checkpoint could not give back.

        Numbers that it counts in an attribute show in its first step, which then raises ValueError.
        """
        self.optimizer = optimizer
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        name_of: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self.names = [name_of.get(p, f"a parameter of its own, {i}") for i, p in enumerate(self.params)]
        self.is_ours = type(optimizer) in OURS
        torchs: Any = torch.optim.Optimizer
        own: Any = type(optimizer)
        self.has_own_methods = (own.state_dict, own.load_state_dict) != (torchs.state_dict, torchs.load_state_dict)
        self.first_groups = [copy.deepcopy(hyperparameters(group)) for group in optimizer.param_groups]
        self.first_attributes: dict[str, list[Any]] = {}
        self._has_stepped = False
        if not (self.is_ours or self.has_own_methods):
            self.first_attributes = plain_attributes(optimizer)
            optimizer.register_step_post_hook(self._check_first_step)
        self.state()

    def _check_first_step(self, *_: Any) -> None:
        if not self._has_stepped:
            self._has_stepped = True
            self.state()

    def state(self) -> dict[str, Any]:
        """For a checkpoint: plain values and tensors. Raises ValueError where that would lose something."""
        optimizer = self.optimizer
        name = type(optimizer).__name__
        is_sharded = any(is_dtensor(p) for p in self.params)
        found = optimizer.state_dict()
        if self.has_own_methods:
            if is_sharded:
                raise ValueError(
                    f"{name} has a state_dict of its own, which sharded runs do not keep: take --dp_shard=1"
                )
            return found
        found |= {"names": self.names}
        if self.is_ours:
            return found
        for attribute, numbers in plain_attributes(optimizer).items():
            if numbers != self.first_attributes.get(attribute, []):
                raise hidden(optimizer, attribute)
        changed = []
        for group, first in zip(optimizer.param_groups, self.first_groups, strict=True):
            now = hyperparameters(group).items()
            changed.append({k: v for k, v in now if k not in first or has_tensor(v) or v != first[k]})
        if is_sharded and has_tensor(changed):
            raise ValueError(f"{name} keeps tensors in its groups, which sharded runs do not keep: take --dp_shard=1")
        return found | {"class": name, "changed": changed}

    def load(self, state: dict[str, Any] | None, source: str, folder: Path | None = None) -> None:
        """Takes back what `state` has given; hyperparameters remain those of the settings, not the checkpoint's.

        folder: Checkpoint.folder. Where the model is sharded, each rank loads its rows. Raises ValueError, naming
        `source`, where the state does not belong to the model or the optimizer.
        """
        if not state:
            raise ValueError(f"{source} has no optimizer state: begin a new run with its weights: --init_from={source}")
        theirs = state.get("class")
        is_same = theirs == type(self.optimizer).__name__ or (theirs is None and self.is_ours)
        if not (self.has_own_methods or is_same):
            raise ValueError(
                f"{source} was trained with another optimizer, {theirs or 'AdamW or Muon'}: go on with that one, or "
                f"begin a new run with its weights: --init_from={source}"
            )
        try:
            if self.has_own_methods:
                load_by_itself(self.optimizer, state)
            else:
                self._load(state, folder)
        except Exception as e:  # an untrusted state can raise nearly anything
            raise ValueError(f"{source}: the optimizer state does not fit the model ({reason(e)})") from None

    def _load(self, state: dict[str, Any], folder: Path | None) -> None:
        own = self.optimizer.param_groups
        if self.is_ours and is_muons(own) != is_muons(state["param_groups"]):
            theirs = "muon" if is_muons(state["param_groups"]) else "adamw"
            raise ValueError(f"it was trained with another optimizer: take --optimizer={theirs}")
        if state.get("names", self.names) != self.names:
            raise ValueError("its parameters differ, or are in another order")
        if [len(group["params"]) for group in state["param_groups"]] != [len(group["params"]) for group in own]:
            raise ValueError("its groups of parameters differ")
        numbers = [i for group in state["param_groups"] for i in group["params"]]
        if self.is_ours:
            check_moments(own, state["state"], numbers)
        else:
            for group, first, changed in zip(own, self.first_groups, state["changed"], strict=True):
                group |= copied(first | hyperparameters(changed), self.params[0].device)
        self._set_state(state["state"], numbers, folder)

    def _set_state(self, state: dict[Any, Any], numbers: list[int], folder: Path | None) -> None:
        """Copies `state`, which may lie in a memory-mapped file. numbers: of the parameters in it."""
        param_of = dict(zip(numbers, zip(self.params, self.names, strict=True), strict=True))
        groups = [g for g in self.optimizer.param_groups if g.get("fused") or g.get("capturable")]
        counted_on_device = {p for group in groups for p in group["params"]}
        saved = {}
        tensors = {}
        self.optimizer.state.clear()
        for number, of_parameter in state.items():
            if number not in param_of:  # of all parameters
                self.optimizer.state[number] = copied(of_parameter, self.params[0].device)
                continue
            p, name = param_of[number]
            for kind, value in of_parameter.items():
                device = torch.device("cpu") if kind == "step" and p not in counted_on_device else p.device
                if isinstance(value, Tensor) and value.dim():
                    like = p if value.shape == p.shape else value
                    saved[f"{kind}.{name}"] = value
                    mine = torch.empty_like(like, dtype=value.dtype, device=device, requires_grad=False)
                    tensors[f"{kind}.{name}"] = mine
                elif self.is_ours:  # a number of steps, which older versions of torch kept as an int
                    mine = torch.tensor(float(value), device=device)
                else:
                    mine = copied(value, device)
                self.optimizer.state[p][kind] = mine
        fill(tensors, saved, folder)


# ---- what would be lost --------------------------------------------------------------------------------------


def plain_attributes(optimizer: torch.optim.Optimizer) -> dict[str, list[Any]]:
    """The numbers and texts in each attribute that torch's optimizers do not have.

    Raises ValueError where one holds a tensor, a random generator or another optimizer.
    """
    torchs: Any = torch.optim.Optimizer
    known = vars(torchs([torch.zeros(1)], {})).keys() | SET_BY_A_SCALER
    params = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = {}
    for name in vars(optimizer).keys() - known:
        leaves = [x for x in tree_leaves(getattr(optimizer, name)) if id(x) not in params]
        if any(isinstance(x, Tensor | torch.Generator | torch.optim.Optimizer) for x in leaves):
            raise hidden(optimizer, name)
        found[name] = [x for x in leaves if isinstance(x, bool | int | float | str)]
    return found


def hidden(optimizer: torch.optim.Optimizer, attribute: str) -> ValueError:
    return ValueError(
        f"{type(optimizer).__name__} keeps state in {attribute}, which checkpoints would lose: keep it in `state`, or "
        "give the class a state_dict and a load_state_dict of its own"
    )


# ---- helpers -------------------------------------------------------------------------------------------------


def load_by_itself(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """torch's load_state_dict makes new groups. Those that an optimizer shares with its parts remain the same."""
    parts = [x for x in tree_leaves(vars(optimizer)) if isinstance(x, torch.optim.Optimizer)]
    before = [(part, list(part.param_groups)) for part in (optimizer, *parts)]
    optimizer.load_state_dict(copy.deepcopy(state))
    for part, groups in before:
        for group, loaded in zip(groups, part.param_groups, strict=True):
            group.update(loaded)
        part.param_groups[:] = groups


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in SET_BY_THE_RUN}


def copied(value: Any, device: torch.device) -> Any:
    """value with copies of its tensors on the device."""
    return tree_map_only(Tensor, lambda x: x.to(device, copy=True), value)


def has_tensor(value: Any) -> bool:
    return any(isinstance(x, Tensor) for x in tree_leaves(value))


def is_muons(groups: list[dict[str, Any]]) -> bool:
    """Whether these groups of one of OURS are Muon's."""
    return any("momentum" in group for group in groups)


def check_moments(groups: list[dict[str, Any]], state: dict[int, Any], numbers: list[int]) -> None:
    """Raises ValueError where AdamW's or Muon's moments are of another kind or shape: fused kernels do not look.

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


@torch.no_grad()
def fill(tensors: dict[str, Tensor], saved: dict[str, Tensor], folder: Path | None) -> None:
    """Copies saved tensors into those of the same names, whole or sharded, from the folder unless it is None.

    Each rank reads its own rows, and no rank waits for another. Raises ValueError where they cannot be read.
    """
    if folder is not None:
        folders.read(tensors, folder)
        return
    for name, tensor in tensors.items():
        source = saved[name]
        if is_dtensor(tensor) and not is_dtensor(source):
            source = rows_of(source, tensor)
        local(tensor).copy_(local(source))
