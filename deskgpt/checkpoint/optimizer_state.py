"""What a checkpoint keeps of an optimizer, whichever it is, and how a run takes it back.

AdamW and Muon of compute/optimizer.py are kept as torch's state_dict, as nanoGPT does. Of any other optimizer the dict
has further entries: its class, the names of its parameters, what it changed in its groups by itself, and what it keeps
in attributes of its own, other optimizers included. An optimizer with a state_dict of its own is asked for that alone.
One that keeps in an attribute what cannot be taken apart, such as a random generator, must have one.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

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
        inner = [x for x in tree_leaves(vars(optimizer)) if isinstance(x, torch.optim.Optimizer)]
        self.optimizers = [optimizer, *inner]
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self.number_of = {id(p): i for i, p in enumerate(self.params)}
        name_of = {p: name for name, p in model.named_parameters()}
        self.names = [name_of.get(p, f"a parameter of its own, {i}") for i, p in enumerate(self.params)]
        self.is_usual = type(optimizer) in OURS and self.names == usual_names(model, optimizer.param_groups)
        cls: Any = torch.optim.Optimizer
        self.has_own_methods = type(optimizer).state_dict is not cls.state_dict
        self.first_groups = [copy.deepcopy(hyperparameters(group)) for group in optimizer.param_groups]
        self.first_attributes = dict(vars(optimizer))
        self.torchs_attributes = vars(cls([torch.zeros(1)], {})).keys()
        if not self.has_own_methods:
            self._attributes()

    def state(self) -> dict[str, Any]:
        """For a checkpoint: plain values and tensors."""
        found = self.optimizer.state_dict()
        if self.has_own_methods:
            self._refuse_if_sharded("has a state_dict of its own")
            return found
        if self.is_usual:
            without = [i for i in range(len(self.params)) if found["state"] and i not in found["state"]]
            return found | ({"without": without} if without else {})  # parameters that got no gradient yet
        changed = []
        for group, first in zip(self.optimizer.param_groups, self.first_groups, strict=True):
            changed.append({k: v for k, v in hyperparameters(group).items() if k not in first or not same(v, first[k])})
        attributes = self._attributes()
        if any(isinstance(x, Tensor) for x in tree_leaves((changed, attributes))):
            self._refuse_if_sharded("keeps tensors outside its `state`")
        on_cpu = {
            name
            for p in self.params
            for name, value in self.optimizer.state.get(p, {}).items()
            if isinstance(value, Tensor) and value.dim() and value.device.type == "cpu" != p.device.type
        }
        more = {"class": type(self.optimizer).__name__, "names": self.names, "changed": changed}
        return found | more | {"on_cpu": sorted(on_cpu), "attributes": attributes}

    def _refuse_if_sharded(self, what: str) -> None:
        if any(is_dtensor(p) for p in self.params):
            name = type(self.optimizer).__name__
            raise ValueError(f"{name} {what}, which checkpoints of sharded runs do not keep: leave --dp_shard out")

    def snapshot(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state as it is now, for go_back."""
        return copy.deepcopy(self.optimizer.state_dict()), copy.deepcopy(self._attributes(with_settings=True))

    def go_back(self, snapshot: tuple[dict[str, Any], dict[str, Any]]) -> None:
        """To a snapshot, whatever the optimizer did since."""
        state, attributes = snapshot
        with self._in_place():
            self.optimizer.load_state_dict(state)
            self._set_attributes(attributes)

    def load(self, state: dict[str, Any], source: str, folder: Path | None = None) -> None:
        """Takes back what `state` has given; hyperparameters remain those of the settings, not the checkpoint's.

        folder: Checkpoint.folder. Where the model is sharded, each rank loads its rows. Raises ValueError, naming
        `source`, where the state does not belong to the model or the optimizer.
        """
        ours = None if self.is_usual else type(self.optimizer).__name__
        theirs = state.get("class")
        if not self.has_own_methods and theirs != ours:
            raise ValueError(
                f"{source} was trained with another optimizer, {theirs or 'AdamW or Muon'}: go on with that one, or "
                f"begin a new run with its weights: --init_from={source}"
            )
        try:
            with self._in_place():
                if self.has_own_methods:
                    self.optimizer.load_state_dict(state)
                else:
                    self._load(state, source, folder)
        except (ValueError, KeyError, IndexError, TypeError, RuntimeError, AttributeError) as e:
            if isinstance(e, ValueError) and str(e).startswith(source):
                raise
            raise ValueError(f"{source}: the optimizer state does not fit the model ({e})") from None

    def _load(self, state: dict[str, Any], source: str, folder: Path | None) -> None:
        optimizer = self.optimizer
        ours = optimizer.state_dict()["param_groups"]
        theirs = state.get("param_groups")
        if not isinstance(theirs, list) or not all(is_group(group) for group in theirs):
            raise ValueError("it has no groups of parameters")
        if state.get("names", self.names) != self.names:
            raise ValueError("its parameters are others, or in another order")
        if ["momentum" in g for g in ours[2:]] != ["momentum" in g for g in theirs[2:]]:  # Muon's groups
            raise ValueError(f"{source} was trained with another optimizer: leave --optimizer out")
        if type(optimizer) in OURS:
            check_moments(optimizer, state.get("state"), theirs, state.get("without", []))
        if self.is_usual:  # which has none of the further entries
            state = {name: state[name] for name in ("state", "names") if name in state}
        groups = [mine | {"params": saved["params"]} for mine, saved in zip(ours, theirs, strict=True)]
        for group, changed in zip(groups, state.get("changed", [{}] * len(groups)), strict=True):
            for name, value in hyperparameters(changed).items():
                if group.get(name) is not None and type(value) is not type(group[name]):
                    raise ValueError(f"its {name} is {str(value)[:80]}")
                group[name] = value
        saved = self._placed(state, theirs, folder)
        optimizer.load_state_dict({"state": saved, "param_groups": groups})
        on_cpu = state.get("on_cpu", [])
        for i, p in enumerate(self.params):
            for name, value in optimizer.state.get(p, {}).items():
                if not isinstance(value, Tensor):
                    continue
                # As it was saved: torch would give it the parameter's dtype and device. Cloned, since on a CPU it may
                # still be the memory-mapped file, which this run will replace.
                before = saved[i][name]
                dtype = before.dtype if isinstance(before, Tensor) and not self.is_usual else value.dtype
                if name in on_cpu:
                    optimizer.state[p][name] = before.to("cpu", copy=True)
                else:
                    optimizer.state[p][name] = value.to(dtype, copy=True) if dtype != value.dtype else value.clone()
        attributes = state.get("attributes", {})
        for name in attributes:
            if name in self.torchs_attributes or hasattr(type(optimizer), name):
                raise ValueError(f"{name} is not state")
        self._set_attributes(attributes)

    def _placed(self, state: dict[str, Any], groups: list[dict[str, Any]], folder: Path | None) -> dict[int, Any]:
        """The state by the parameters' numbers, whole or sharded as these are. Raises ValueError."""
        if folder is None and not any(is_dtensor(p) for p in self.params):
            return state["state"]
        numbers = [i for group in groups for i in group["params"]]
        param_of = dict(zip(numbers, self.params, strict=True))
        names = state.get("names", range(len(numbers)))
        placed = {i: dict(of_parameter) for i, of_parameter in state["state"].items()}
        saved = {}
        tensors = {}
        for i, of_parameter in placed.items():
            for kind, value in of_parameter.items():
                if isinstance(value, Tensor) and value.dim():
                    saved[f"{kind}.{names[i]}"] = value
                    like = param_of[i] if value.shape == param_of[i].shape else value
                    new = torch.empty_like(like, dtype=value.dtype, device=param_of[i].device, requires_grad=False)
                    of_parameter[kind] = tensors[f"{kind}.{names[i]}"] = new
        fill(tensors, saved, folder)
        return placed

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Within the block optimizers take back states. The dictionaries of their groups and states stay the same ones.

        An optimizer often shares them with one that it is made of, while torch's load_state_dict replaces them.
        """
        before = [(o, list(o.param_groups), getattr(o, "state", None)) for o in reversed(self.optimizers)]
        yield
        for optimizer, groups, state in before:
            for group, loaded in zip(groups, optimizer.param_groups, strict=True):
                refill(group, loaded)
            optimizer.param_groups[:] = groups
            if state is not None:
                refill(state, optimizer.state)
                optimizer.state = state

    # ---- attributes --------------------------------------------------------------------------------------

    def _attributes(self, with_settings: bool = False) -> dict[str, Any]:
        """What the optimizer keeps in attributes of its own, as plain values and tensors. Raises ValueError.

        with_settings: also the numbers and words that are still those of the beginning.
        """
        found = {}
        for name, value in vars(self.optimizer).items():
            is_setting = isinstance(value, int | float | str | None) and self.first_attributes.get(name) == value
            if name in self.torchs_attributes or (is_setting and not with_settings):
                continue
            try:
                found[name] = self._encoded(value)
            except TypeError:
                if value is self.model or not holds_state(value):  # a function, a dtype and the like
                    continue
                raise ValueError(
                    f"{type(self.optimizer).__name__} keeps a {type(value).__name__} in {name}, which checkpoints "
                    "would lose: give it a state_dict and a load_state_dict of its own"
                ) from None
        return found

    def _set_attributes(self, attributes: dict[str, Any]) -> None:
        for name, value in attributes.items():
            setattr(self.optimizer, name, self._decoded(value, getattr(self.optimizer, name, None)))

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
            return value.to(self.params[0].device, copy=True)
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
            saved = copy.deepcopy(value["state"])  # may be the memory-mapped file
            own.load_state_dict({"state": saved, "param_groups": own.state_dict()["param_groups"]})
            return own
        there = own if isinstance(own, dict) else {}
        keys = self._decoded(value["keys"])
        values = map(self._decoded, value["values"], map(there.get, keys))
        refill(there, dict(zip(keys, values, strict=True)))
        return there


# ---- helpers -------------------------------------------------------------------------------------------------


def holds_state(value: Any) -> bool:
    """Whether an object of an unknown class looks like one that changes as it is used."""
    return isinstance(value, Collection | torch.Generator) or hasattr(value, "state_dict")


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in SET_BY_THE_RUN}


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal, tensors within lists too."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def refill(old: dict[Any, Any], new: dict[Any, Any]) -> None:
    """Gives a dictionary the content of another, or of itself."""
    content = dict(new)
    old.clear()
    old.update(content)


def usual_names(model: GPT, groups: list[dict[str, Any]]) -> list[str]:
    """The names of the parameters of make_optimizer's optimizer with such groups, by their numbers."""
    kind = "muon" if any("momentum" in group for group in groups) else "adamw"
    optimizer = make_optimizer(model, kind, 0.0, 0.0, (0.9, 0.9), 0.9)
    names = {p: name for name, p in model.named_parameters()}
    return [names[p] for group in optimizer.param_groups for p in group["params"]]


def is_group(group: Any) -> bool:
    """Whether this is a group of parameters, by their numbers."""
    params = group.get("params") if isinstance(group, dict) else None
    return isinstance(params, list) and all(isinstance(i, int) for i in params)


def check_moments(
    optimizer: torch.optim.Optimizer, state: Any, groups: list[dict[str, Any]], without: list[int]
) -> None:
    """Raises ValueError where AdamW's or Muon's moments are missing or of another shape: fused kernels do not look.

    A state without any moments is that of a run which has made no step. without: the parameters that had none.
    """
    if not isinstance(state, dict):
        raise ValueError("it has no moments")
    if state.keys() - {i for group in groups for i in group["params"]}:
        raise ValueError("it has moments of parameters that the model lacks")
    for ours, theirs in zip(optimizer.param_groups, groups, strict=True):
        names = ["momentum_buffer"] if "momentum" in ours else ["exp_avg", "exp_avg_sq"]
        for p, i in zip(ours["params"], theirs["params"], strict=True):
            if not state or i in without:
                continue
            moments = state[i]
            if not isinstance(moments, dict) or moments.keys() != {"step", *names}:
                raise ValueError(f"parameter {i} has not the moments step, {', '.join(names)}")
            for name in names:
                m = moments[name]
                if not isinstance(m, Tensor) or m.shape != p.shape or not m.is_floating_point():
                    raise ValueError(f"{name} of parameter {i} has not the shape {tuple(p.shape)}")
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
        if is_dtensor(tensor):
            from torch.distributed.tensor import distribute_tensor

            mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
            source = distribute_tensor(source, mesh, placements, src_data_rank=None)  # None: each takes its own rows
        local(tensor).copy_(local(source))
