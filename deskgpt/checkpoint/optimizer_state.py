"""What a checkpoint keeps of any optimizer, and how a run takes it back.

AdamW and Muon of compute/optimizer.py are kept as torch's state_dict, as nanoGPT does. Of any other optimizer the dict
also has its class and what it changed in its groups by itself. An optimizer with a state_dict of its own is asked for
that alone. One that keeps something elsewhere than in `state` and in its groups must have one.
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
from deskgpt.compute.sharding import is_dtensor, local
from model import GPT

OURS = (torch.optim.AdamW, Muon)
# In each group: what the run sets, and what suits the machine.
SET_BY_THE_RUN = ("params", "lr", "fused", "foreach", "capturable")


class OptimizerState:
    """An optimizer's state, as `state` and `load` give and take it. To be made before the optimizer's first step."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: GPT) -> None:
        """Raises ValueError where the optimizer keeps something that a checkpoint could not give back."""
        self.optimizer = optimizer
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        name_of: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self.names = [name_of.get(p, f"a parameter of its own, {i}") for i, p in enumerate(self.params)]
        self.is_ours = type(optimizer) in OURS
        torchs: Any = torch.optim.Optimizer
        own: Any = type(optimizer)
        self.has_own_methods = (own.state_dict, own.load_state_dict) != (torchs.state_dict, torchs.load_state_dict)
        self.first_groups = [copy.deepcopy(hyperparameters(group)) for group in optimizer.param_groups]
        self.first_attributes = dict(vars(optimizer))
        self.torchs_attributes = vars(torchs([torch.zeros(1)], {})).keys()
        self.state()

    def state(self) -> dict[str, Any]:
        """For a checkpoint: plain values and tensors."""
        found = self.optimizer.state_dict()
        if self.has_own_methods:
            self._refuse_if_sharded("has a state_dict of its own")
            return found
        found |= {"names": self.names}
        if self.is_ours:
            return found
        self._refuse_what_would_be_lost()
        changed = []
        for group, first in zip(self.optimizer.param_groups, self.first_groups, strict=True):
            now = hyperparameters(group).items()
            changed.append({k: v for k, v in now if k not in first or has_tensor(v) or v != first[k]})
        if has_tensor(changed):
            self._refuse_if_sharded("keeps tensors in its groups")
        return found | {"class": type(self.optimizer).__name__, "changed": changed}

    def _refuse_if_sharded(self, what: str) -> None:
        if any(is_dtensor(p) for p in self.params):
            name = type(self.optimizer).__name__
            raise ValueError(f"{name} {what}, which checkpoints of sharded runs do not keep: take --dp_shard=1")

    def _refuse_what_would_be_lost(self) -> None:
        """Raises ValueError for an attribute with a tensor, another optimizer or the like, or a counter."""
        for name, value in vars(self.optimizer).items():
            if name in self.torchs_attributes:
                continue
            others = [x for x in tree_leaves(value) if all(x is not p for p in self.params)]
            holds_state = any(isinstance(x, Tensor | torch.Generator | torch.optim.Optimizer) for x in others)
            has_counted = type(value) in (int, float) and value != self.first_attributes.get(name)
            if holds_state or has_counted:
                raise ValueError(
                    f"{type(self.optimizer).__name__} keeps state in {name}, which checkpoints would lose: keep it in "
                    "`state`, or give the class a state_dict and a load_state_dict of its own"
                )

    def load(self, state: dict[str, Any], source: str, folder: Path | None = None) -> None:
        """Takes back what `state` has given; hyperparameters remain those of the settings, not the checkpoint's.

        folder: Checkpoint.folder. Where the model is sharded, each rank loads its rows. Raises ValueError, naming
        `source`, where the state does not belong to the model or the optimizer.
        """
        theirs = state.get("class")
        is_same = theirs == type(self.optimizer).__name__ or (theirs is None and self.is_ours)
        if not (self.has_own_methods or is_same):
            raise ValueError(
                f"{source} was trained with another optimizer, {theirs or 'AdamW or Muon'}: go on with that one, or "
                f"begin a new run with its weights: --init_from={source}"
            )
        try:
            if self.has_own_methods:
                self._load_by_itself(state)
            else:
                self._load(state, folder)
        except Exception as e:  # a stranger's state can raise nearly anything
            reason = " ".join(str(e).split())[:200]
            raise ValueError(f"{source}: the optimizer state does not fit the model ({reason})") from None

    def _load(self, state: dict[str, Any], folder: Path | None) -> None:
        own = self.optimizer.param_groups
        if self.is_ours and is_muons(own) != is_muons(state["param_groups"]):
            theirs = "muon" if is_muons(state["param_groups"]) else "adamw"
            raise ValueError(f"it was trained with another optimizer: take --optimizer={theirs}")
        if state.get("names", self.names) != self.names:
            raise ValueError("its parameters are others, or in another order")
        if [len(group["params"]) for group in state["param_groups"]] != [len(group["params"]) for group in own]:
            raise ValueError("its groups of parameters are others")
        numbers = [i for group in state["param_groups"] for i in group["params"]]
        if self.is_ours:
            check_moments(own, state["state"], numbers)
        else:
            for group, first, changed in zip(own, self.first_groups, state["changed"], strict=True):
                group |= copied(first | hyperparameters(changed), self.params[0].device)
        self._set_state(state["state"], numbers, folder)

    def _set_state(self, state: dict[Any, Any], numbers: list[int], folder: Path | None) -> None:
        """numbers: of the parameters in `state`, which is copied: it may be a memory-mapped file, soon replaced."""
        order = {number: i for i, number in enumerate(numbers)}
        groups = [g for g in self.optimizer.param_groups if g.get("fused") or g.get("capturable")]
        counted_on_device = {p for group in groups for p in group["params"]}
        saved = {}
        tensors = {}
        self.optimizer.state.clear()
        for number, of_parameter in state.items():
            if number not in order:  # of all parameters
                self.optimizer.state[number] = copied(of_parameter, self.params[0].device)
                continue
            p = self.params[order[number]]
            name = self.names[order[number]]
            for kind, value in of_parameter.items():
                device = torch.device("cpu") if kind == "step" and p not in counted_on_device else p.device
                if isinstance(value, Tensor) and value.dim():
                    like = p if value.shape == p.shape else value
                    dtype = p.dtype if self.is_ours else value.dtype
                    kept = torch.empty_like(like, dtype=dtype, device=device, requires_grad=False)
                    saved[f"{kind}.{name}"] = value
                    tensors[f"{kind}.{name}"] = kept
                elif self.is_ours:  # a number of steps, which older versions of torch kept as an int
                    kept = torch.tensor(float(value), device=device)
                else:
                    kept = copied(value, device)
                self.optimizer.state[p][kind] = kept
        fill(tensors, saved, folder)

    def _load_by_itself(self, state: dict[str, Any]) -> None:
        """torch's load_state_dict makes new groups. Those that an optimizer shares with its parts remain the same."""
        parts = [x for x in tree_leaves(vars(self.optimizer)) if isinstance(x, torch.optim.Optimizer)]
        before = [(part, list(part.param_groups)) for part in (self.optimizer, *parts)]
        self.optimizer.load_state_dict(copy.deepcopy(state))
        for part, groups in before:
            for group, loaded in zip(groups, part.param_groups, strict=True):
                group.update(loaded)
            part.param_groups[:] = groups


# ---- helpers -------------------------------------------------------------------------------------------------


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
    if state.keys() - set(numbers):
        raise ValueError("it has moments of parameters that the model lacks")
    number = iter(numbers)
    for group in groups:
        kinds = {"momentum_buffer"} if "momentum" in group else {"exp_avg", "exp_avg_sq"}
        for p in group["params"]:
            i = next(number)
            if i not in state:
                continue
            moments = dict(state[i])
            step = moments.pop("step")
            if not isinstance(step, Tensor | int | float) or torch.as_tensor(step).shape != () or not step >= 0:
                raise ValueError(f"step of parameter {i} is not a number of steps")
            if not moments.keys() >= kinds:
                raise ValueError(f"parameter {i} has not the moments {', '.join(sorted(kinds))}")
            for kind, m in moments.items():
                if not isinstance(m, Tensor) or m.shape != p.shape or not m.is_floating_point():
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
            from torch.distributed.tensor import distribute_tensor

            mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
            source = distribute_tensor(source, mesh, placements, src_data_rank=None)  # None: each takes its own rows
        local(tensor).copy_(local(source))
