"""What the Python code of a pass may read and change: compared to know whether a recorded or a
repeated pass would still do the same.
"""

from __future__ import annotations

import operator
import pickle
import random
import sys
import sysconfig
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

Pass = Callable[..., dict[str, Tensor]]  # of tensors and numbers, to tensors by name

MAX_ITEMS = 1000  # of a container that are compared
MAX_DEPTH = 4  # of containers and objects in each other
# What stays the same as long as it is the same object. The attributes of a class are facts of their
# own.
STABLE: tuple[type, ...] = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
STABLE += (
    type,
    ModuleType,
    nn.Module,
    FunctionType,
    BuiltinFunctionType,
    property,
    classmethod,
    staticmethod,
)
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
HOOKS = (  # of modules and of tensors
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_post_accumulate_grad_hooks",
)
INTERNAL = vars(nn.Module()).keys() - {"training"}  # attributes that torch keeps for itself
STDLIB = sysconfig.get_path("stdlib")


class Facts:
    """What the Python code of a pass may read and write, as it was when this was made.

    These are attributes of modules, globals of the files and attributes of the classes that a user
    writes, parameters and buffers, and how many there are of each. To compare 2,000 of them takes a
    fraction of a millisecond.
    """

    def __init__(self, run: Pass, model: nn.Module) -> None:
        self.spaces = namespaces(run, model)
        self.sizes = [len(space) for _, space in self.spaces]
        self.places = self._own()
        self.values = self._now()
        self.mutable = {
            i: snapshot(value) for i, value in enumerate(self.values) if not is_stable(value)
        }

    def _own(self) -> list[tuple[str, Mapping[Any, Any], Any]]:
        """Return the user's names: as messages have them, where they are, and their keys there."""
        return [
            (f"{where}{key}", space, key)
            for where, space in self.spaces
            for key in space
            if is_own(key)
        ]

    def _now(self) -> list[Any]:
        return [space.get(key) for _, space, key in self.places]

    def first_change(self) -> str:
        """Return the name of something that differs now, or ""."""
        values = self._now()
        for i, before in self.mutable.items():
            if snapshot(values[i]) != before:
                return self.places[i][0]
        if not all(map(operator.is_, values, self.values)):
            for (name, _, _), now, before in zip(self.places, values, self.values, strict=True):
                if now is not before and snapshot(now) != snapshot(before):
                    return name
        sizes = [len(space) for _, space in self.spaces]
        # Python adds names of its own, such as __warningregistry__.
        if sizes != self.sizes and len(self._own()) != len(self.places):
            return "which attributes modules have, or which names model.py has"
        self.sizes = sizes
        return ""


def namespaces(run: Pass, model: nn.Module) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the names that a user's code may change, each with what messages put before them."""
    function = getattr(run, "func", run)  # of a functools.partial
    sources = {function.__module__: None}
    spaces: list[tuple[str, Mapping[str, Any]]] = []
    for path, module in model.named_modules():
        own = vars(module)
        kept_by_torch = [own.get(k, {}) for k in ("_parameters", "_buffers", "_modules", *HOOKS)]
        spaces += [(f"{path}." if path else "", space) for space in (own, *kept_by_torch)]
        sources |= dict.fromkeys(cls.__module__ for cls in type(module).__mro__)
    for name in sources:
        source = sys.modules[name]
        if not is_library(source):
            classes = [
                c for c in vars(source).values() if isinstance(c, type) and c.__module__ == name
            ]
            spaces.append((f"{name}.", vars(source)))
            spaces += [(f"{name}.{cls.__qualname__}.", vars(cls)) for cls in classes]
    return spaces


def is_own(key: Any) -> bool:
    """Return whether a name, or the number of a hook, is not torch's or Python's own."""
    return key not in INTERNAL and not str(key).startswith("__")


def is_library(module: ModuleType | None) -> bool:
    """Return whether a module is no file that a user of a model writes."""
    path = getattr(module, "__file__", None)
    if module is None or path is None or "site-packages" in path or path.startswith(STDLIB):
        return True
    return module.__name__.partition(".")[0] in ("deskgpt", "data")


def is_stable(value: Any) -> bool:
    """Return whether a value can change only by another one under its name."""
    holds_more = (Tensor, Mapping, list, tuple, set, deque, Iterator, np.ndarray, *GENERATORS)
    return isinstance(value, STABLE) or (
        not isinstance(value, holds_more) and is_library(sys.modules.get(type(value).__module__))
    )


def snapshot(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Return something that differs once a value, or what it holds, has changed.

    A tensor may change in place.
    """
    if isinstance(value, Tensor):
        # Where it is, whether it is trained, whether it has hooks.
        return id(value), value.data_ptr(), value.requires_grad, has_hook(value)
    if isinstance(value, STABLE):
        return value
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, (np.ndarray, *GENERATORS)):
        return pickle.dumps(value)
    if isinstance(value, Iterator):
        return object()  # it cannot be looked at, and equals nothing
    if depth == 0:
        return id(value)
    if isinstance(value, Mapping):
        return id(value), [
            (key, snapshot(item, depth - 1)) for key, item in islice(value.items(), MAX_ITEMS)
        ]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return (
            type(value),
            len(value),
            [snapshot(item, depth - 1) for item in islice(value, MAX_ITEMS)],
        )
    return id(value), snapshot(getattr(value, "__dict__", None), depth - 1)


def generator_states() -> tuple[Any, ...]:
    """Return the states of the generators on the CPU: Python's, NumPy's and torch's."""
    of_torch = torch.default_generator.get_state().numpy().tobytes()
    return random.getstate(), pickle.dumps(np.random.get_state()), of_torch


@contextmanager
def noticed_waits(places: list[str]) -> Iterator[None]:
    """Append to places the file and line of each call in the block that waits for the card, as far
    as torch says so.
    """
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in caught if "synchronizing CUDA operation" in str(w.message)]
    places += [f"{wait.filename}:{wait.lineno}" for wait in waits]


def hooks_of(model: nn.Module) -> list[str]:
    """Return the names of modules and parameters that have hooks."""
    owners = [*model.named_modules(), *model.named_parameters()]
    return [name or "the model" for name, owner in owners if has_hook(owner)]


def has_hook(owner: nn.Module | Tensor) -> bool:
    """Return whether torch calls Python code in a pass of this module, or for a gradient of this
    tensor.
    """
    return any(getattr(owner, name, None) for name in HOOKS)
