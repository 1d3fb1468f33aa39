"""What a checkpoint keeps of an optimizer, whichever it is, and how a run takes it back.

AdamW and Muon of compute/optimizer.py are kept as torch's state_dict, as nanoGPT does. Of any other optimizer the dict
has further entries: its class, what it changed in its groups by itself, and what it keeps in attributes of its own,
other optimizers included. An optimizer with a state_dict of its own is asked for that alone. One that keeps in an
attribute what cannot be taken apart, such as a random generator, must have one.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from deskgpt.checkpoint import folders
from deskgpt.compute.optimizer import Muon, make_optimizer
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
        self.model = model
        self.params = params_of(optimizer)
        self.number_of = {id(p): i for i, p in enumerate(self.params)}
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
            without = [i for i in range(len(self.params)) if found["state"] and i not in found["state"]]
            return found | ({"without": without} if without else {})  # parameters that got no gradient yet
        changed = []
        for group, first in zip(self.optimizer.param_groups, self.first_groups, strict=True):
            now = hyperparameters(group).items()
            changed.append({k: v for k, v in now if k not in first or has_tensor(v) or v != first[k]})
        attributes = self._attributes()
        if has_tensor((changed, attributes)):
            self._refuse_if_sharded("keeps tensors outside its `state`")
        on_cpu = {
            name
            for p in self.params
            for name, value in self.optimizer.state.get(p, {}).items()
            if isinstance(value, Tensor) and value.dim() and value.device.type == "cpu" != p.device.type
        }
        more = {"class": type(self.optimizer).__name__, "changed": changed}
        return found | more | {"on_cpu": sorted(on_cpu), "attributes": attributes}

    def _refuse_if_sharded(self, what: str) -> None:
        if any(is_dtensor(p) for p in self.params):
            name = type(self.optimizer).__name__
            raise ValueError(f"{name} {what}, which checkpoints of sharded runs do not keep: leave --dp_shard out")

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
                return
            if self.is_ours and is_muons(self.optimizer.param_groups) != is_muons(state["param_groups"]):
                raise ValueError("it was trained with another optimizer: leave --optimizer out")
            self._load(state, folder)
        except Exception as e:  # a stranger's state can raise nearly anything
            reason = " ".join(str(e).split())[:200]
            raise ValueError(f"{source}: the optimizer state does not fit the model ({reason})") from None

    def _load(self, state: dict[str, Any], folder: Path | None) -> None:
        """In place: an optimizer often shares its dictionaries of groups and states with one that it is made of."""
        optimizer = self.optimizer
        if state.get("names", self.names) != self.names:
            raise ValueError("its parameters are others, or in another order")
        ours = [len(group["params"]) for group in optimizer.param_groups]
        if [len(group["params"]) for group in state["param_groups"]] != ours:
            raise ValueError("its groups of parameters are others")
        numbers = [i for group in state["param_groups"] for i in group["params"]]
        moments = state["state"]
        attributes = {}
        if self.is_ours:
            check_moments(optimizer, moments, numbers, state.get("without", []))
        else:
            attributes = state["attributes"]
            groups = zip(optimizer.param_groups, self.first_groups, state["changed"], strict=True)
            for group, first, changed in groups:
                group |= copied(first, self.params[0].device)
                for name, value in hyperparameters(changed).items():
                    if group.get(name) is not None and type(value) is not type(group[name]):
                        raise ValueError(f"its {name} is {str(value)[:80]}")
                    group[name] = copied(value, self.params[0].device)
        names = dict(zip(numbers, self.names, strict=True))
        self._set_state(optimizer, moments, names, state.get("on_cpu", []), folder)
        for name in attributes:
            if name in self.torchs_attributes or hasattr(type(optimizer), name):
                raise ValueError(f"{name} is not state")
        settings = {name: value for name, value in self.first_attributes.items() if is_setting(value)}
        for name in settings.keys() - attributes.keys() - self.torchs_attributes:
            setattr(optimizer, name, settings[name])
        for name, value in attributes.items():
            setattr(optimizer, name, self._decoded(value, getattr(optimizer, name, None)))

    def _set_state(
        self,
        optimizer: torch.optim.Optimizer,
        state: dict[Any, Any],
        names: dict[int, str],
        on_cpu: Collection[str] = (),
        folder: Path | None = None,
    ) -> None:
        """Gives an optimizer its state, by the numbers of its parameters, each value where the optimizer keeps it.

        names: of the parameters by number, in the order of its groups. on_cpu: the tensors that stay there. What is in
        `state` is copied: it may be the memory-mapped file, which this run will replace.
        """
        param_of = dict(zip(names, params_of(optimizer), strict=True))
        groups = [g for g in optimizer.param_groups if g.get("fused") or g.get("capturable")]
        counted_on_device = {p for group in groups for p in group["params"]}
        saved = {}
        tensors = {}
        optimizer.state.clear()
        for number, of_parameter in state.items():
            if number not in param_of:  # of all parameters
                optimizer.state[number] = copied(of_parameter, self.params[0].device)
                continue
            p = param_of[number]
            for kind, value in of_parameter.items():
                stays = kind in on_cpu or (kind == "step" and p not in counted_on_device)
                device = torch.device("cpu") if stays else p.device
                if isinstance(value, Tensor) and value.dim():
                    like = p if value.shape == p.shape else value
                    dtype = p.dtype if self.is_ours else value.dtype
                    kept = torch.empty_like(like, dtype=dtype, device=device, requires_grad=False)
                    saved[f"{kind}.{names[number]}"] = value
                    tensors[f"{kind}.{names[number]}"] = kept
                elif self.is_ours:  # a number of steps, which older versions of torch kept as an int
                    kept = torch.tensor(float(value), device=device)
                else:
                    kept = copied(value, device)
                optimizer.state[p][kind] = kept
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

    # ---- attributes --------------------------------------------------------------------------------------

    def _attributes(self) -> dict[str, Any]:
        """What the optimizer keeps in attributes of its own, as plain values and tensors. Raises ValueError.

        Numbers and words that are still those of the beginning are settings, and are left out.
        """
        found = {}
        for name, value in vars(self.optimizer).items():
            is_first = is_setting(value) and self.first_attributes.get(name) == value
            if name in self.torchs_attributes or is_first:
                continue
            try:
                found[name] = self._encoded(value)
            except TypeError:
                holds_state = isinstance(value, Collection | torch.Generator) or hasattr(value, "state_dict")
                if value is self.model or not holds_state:  # a function, a dtype and the like
                    continue
                raise ValueError(
                    f"{type(self.optimizer).__name__} keeps a {type(value).__name__} in {name}, which checkpoints "
                    "would lose: give it a state_dict and a load_state_dict of its own"
                ) from None
        return found

    def _encoded(self, value: Any) -> Any:
        """value as plain values and tensors; parameters by their numbers. Raises TypeError for anything else."""
        if id(value) in self.number_of:
            return {"parameter": self.number_of[id(value)]}
        if type(value) is int and value in self.number_of:
            return {"id of parameter": self.number_of[value]}
        if isinstance(value, Tensor | int | float | str | None):
            return value
        if type(value) in (list, tuple):
            return type(value)(self._encoded(entry) for entry in value)
        if type(value) is set:
            return {"set": [self._encoded(entry) for entry in value]}
        if isinstance(value, dict):
            return {"keys": self._encoded(list(value)), "values": self._encoded(list(value.values()))}
        if isinstance(value, torch.optim.Optimizer):  # whose groups are those of the outer one
            return {"state": value.state_dict()["state"]}
        raise TypeError

    def _decoded(self, value: Any, own: Any = None) -> Any:
        """What _encoded was given. own: what is there now; dictionaries and optimizers stay the same ones."""
        if isinstance(value, Tensor):
            return copied(value, self.params[0].device)
        if isinstance(value, list | tuple):
            owns = own if isinstance(own, list | tuple) and len(own) == len(value) else [None] * len(value)
            return type(value)(map(self._decoded, value, owns))
        if not isinstance(value, dict):
            return value
        if "parameter" in value:
            return self.params[value["parameter"]]
        if "id of parameter" in value:
            return id(self.params[value["id of parameter"]])
        if "set" in value:
            return set(self._decoded(value["set"]))
        if "state" in value:
            self._set_state(own, value["state"], {i: str(i) for i in range(len(params_of(own)))})
            return own
        there = own if isinstance(own, dict) else {}
        keys = self._decoded(value["keys"])
        values = map(self._decoded, value["values"], map(there.get, keys))
        content = dict(zip(keys, values, strict=True))
        there.clear()
        there.update(content)
        return there


# ---- helpers -------------------------------------------------------------------------------------------------


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """An optimizer's parameters in the order of their numbers."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in SET_BY_THE_RUN}


def copied(value: Any, device: torch.device) -> Any:
    """value with copies of its tensors on the device."""
    return tree_map_only(Tensor, lambda x: x.to(device, copy=True), value)


def is_setting(value: Any) -> bool:
    """Whether a value can be a setting: a number, a word, or a tuple of these."""
    return isinstance(value, int | float | str | None) or (type(value) is tuple and all(map(is_setting, value)))


def has_tensor(value: Any) -> bool:
    return any(isinstance(x, Tensor) for x in tree_leaves(value))


def is_muons(groups: list[dict[str, Any]]) -> bool:
    """Whether these groups of one of OURS are Muon's."""
    return any("momentum" in group for group in groups)


def usual_names(model: GPT, groups: list[dict[str, Any]]) -> list[str]:
    """The names of the parameters of make_optimizer's optimizer with such groups, by their numbers."""
    kind = "muon" if is_muons(groups) else "adamw"
    optimizer = make_optimizer(model, kind, 0.0, 0.0, (0.9, 0.9), 0.9)
    names = {p: name for name, p in model.named_parameters()}
    return [names[p] for group in optimizer.param_groups for p in group["params"]]


def check_moments(
    optimizer: torch.optim.Optimizer, state: dict[int, Any], numbers: list[int], without: list[int]
) -> None:
    """Raises ValueError where AdamW's or Muon's moments are missing or of another shape: fused kernels do not look.

    A state without any moments is that of a run which has made no step. without: the parameters that had none.
    """
    if state.keys() - set(numbers):
        raise ValueError("it has moments of parameters that the model lacks")
    number = iter(numbers)
    for group in optimizer.param_groups:
        kinds = ["momentum_buffer"] if "momentum" in group else ["exp_avg", "exp_avg_sq"]
        kinds += ["max_exp_avg_sq"] if group["amsgrad"] and "momentum" not in group else []
        for p in group["params"]:
            i = next(number)
            if not state or i in without:
                continue
            moments = state[i]
            if moments.keys() != {"step", *kinds}:
                raise ValueError(f"parameter {i} has not the moments step, {', '.join(kinds)}")
            for kind in kinds:
                m = moments[kind]
                if not isinstance(m, Tensor) or m.shape != p.shape or not m.is_floating_point():
                    raise ValueError(f"{kind} of parameter {i} has not the shape {tuple(p.shape)}")
            step = moments["step"]
            if not isinstance(step, Tensor | int | float) or torch.as_tensor(step).shape != () or not step >= 0:
                raise ValueError(f"step of parameter {i} is not a number of steps")


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
