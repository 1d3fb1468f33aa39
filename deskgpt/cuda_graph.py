"""A CUDA graph: a pass is recorded once, and from then on replayed by one call.

Imported by runs that record (deskgpt/compiling.py decides); train_state.py takes `snapshot` of it.
"""

from __future__ import annotations

import functools
import operator
import pickle
import random
import sys
import sysconfig
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deskgpt.compute import Pass
from deskgpt.errors import reason

MAX_RECORDINGS = 4  # a pass that changes more often is faster without a graph
GENERATOR = "a generator on the CPU: Python's, NumPy's or torch's"


@dataclass(frozen=True)
class Recording:
    """A graph, and the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Any]  # in the order of the arguments
    kinds: list[Any]  # of the arguments
    outputs: dict[str, Tensor]
    gradients: list[tuple[nn.Parameter, Tensor]]  # with the memory to which the graph adds
    facts: Facts  # that the pass may have read


class CudaGraph:
    """A pass that is recorded once and then replayed: its kernels are queued by one call.

    Call it as the pass itself. On a fast card the CPU needs longer to queue the kernels of a small
    model than the card needs to run them. A graph replays the same kernels on the same memory, so
    it is for a pass whose Python code changes nothing and reads nothing that changes:

    - The first passes run without a graph, and are observed. If one changes an attribute of a
      module or a global of model.py, draws from a generator on the CPU, waits for the card or
      calls hooks, no graph is recorded, and one line says why.
    - The pass that is recorded is one of the run: its Python code runs once, and so do its
      kernels, in a first replay.
    - Before each replay, what the recorded pass may have read is compared: attributes, globals,
      training mode, which parameters are trained, shapes. After a change one pass runs without a
      graph, and the next one is recorded anew.

    Random numbers go on: torch hands the seed of its CUDA generator to each replay. All of it is
    on the run's own stream, since CUDA's default stream cannot be recorded.
    """

    def __init__(
        self,
        run: Pass,
        model: nn.Module,
        *,
        enabled: bool = True,
        eager_calls: int = 2,
        shares_memory_with: CudaGraph | None = None,
        on_refusal: Callable[[str], object] = print,
    ) -> None:
        """run takes tensors, and numbers, which a replay hands over as tensors; it returns tensors
        by name, without a graph of autograd, which are overwritten by the next call. It may add to
        the gradients of the model.

        eager_calls: before the recording, for what torch sets up at first. shares_memory_with:
        another pass, whose results are no longer needed when this one runs; the memory of both is
        freed together. on_refusal is told why there is no graph any more.
        """
        self.run = run
        self.model = model
        self.enabled = enabled
        self.on_refusal = on_refusal
        # The passes that share this one's memory.
        self.memory_group: list[CudaGraph] = (
            shares_memory_with.memory_group if shares_memory_with else []
        )
        self.memory_group.append(self)
        self.recordings = 0
        self.drops = 0  # recordings that this pass has made worthless
        self._eager_calls = eager_calls  # to come before the next recording
        self._recording: Recording | None = None

    def __call__(self, *args: Any) -> dict[str, Tensor]:
        if not self.enabled or exchanges_gradients(self.run):
            return self.run(*args)
        recording = self._recording
        if recording is not None:
            change = "the shape or value of an argument"
            if recording.kinds == [kind_of(value) for value in args]:
                change = recording.facts.first_change()
            if not change:
                return self._replay(recording, args)
            self.drop(f"{change} changes")
        if not self.enabled:
            return self.run(*args)
        return self._observed(args) if self._eager_calls else self._record(args)

    def drop(self, why: str) -> None:
        """Free the graph and its memory, to be recorded anew a few times."""
        if not any(other._recording for other in self.memory_group):
            return
        for other in self.memory_group:
            other._recording = None
            # What has changed may be compiled anew, and cannot be recorded.
            other._eager_calls = max(other._eager_calls, 1)
        torch.cuda.empty_cache()
        self.drops += 1
        if self.drops == MAX_RECORDINGS:
            self.refuse(f"{why} again and again")

    def refuse(self, why: str) -> None:
        """Go on without a graph, and say why."""
        if not self.enabled:
            return
        self.enabled = False
        self.drop(why)
        self.on_refusal(why)

    # ---- without a graph -------------------------------------------------------------------------

    def _observed(self, args: tuple[Any, ...]) -> dict[str, Tensor]:
        """Run the pass, and refuse a graph if its Python code changes what a replay would not
        change.
        """
        self._eager_calls -= 1
        facts = Facts(self.run, self.model)
        waits: list[str] = []
        # Only the last one before a recording is watched: earlier ones compile, which waits.
        with nullcontext() if self._eager_calls else noticed_waits(waits):
            outputs = self.run(*args)
        changed = facts.first_change()
        if changed:
            self.refuse(f"each pass changes {changed}")
        elif hooks := hooks_of(self.model):
            self.refuse(f"{hooks[0]} has a hook, whose Python code runs in each pass")
        elif waits:
            self.refuse(f"the pass waits for the card, in {waits[0]}")
        return outputs

    # ---- with a graph ----------------------------------------------------------------------------

    def _record(self, args: tuple[Any, ...]) -> dict[str, Tensor]:
        """Record the pass, and replay it once: so it has run.

        If it cannot be recorded, run it without a graph.
        """
        device = next(self.model.parameters()).device
        facts = Facts(self.run, self.model)
        inputs = [static_input(value, device) for value in args]
        gradients = []
        without_gradient = [p for p in self.model.parameters() if p.grad is None]
        if torch.is_grad_enabled():
            for p in self.model.parameters():
                if p.requires_grad:
                    gradient = torch.zeros_like(p) if p.grad is None else p.grad
                    p.grad = gradient
                    gradients.append((p, gradient))
        versions = [gradient._version for _, gradient in gradients]
        drawn = generator_states()
        state = torch.cuda.get_rng_state(device)

        graph = torch.cuda.CUDAGraph()
        why = ""
        try:
            # The threads of the loader go on meanwhile: the mode says that their calls are none of
            # the recording's.
            stream = torch.cuda.current_stream(device)
            recordings = [r for r in (other._recording for other in self.memory_group) if r]
            pool = recordings[0].graph.pool() if recordings else None
            with torch.cuda.graph(
                graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                outputs = self.run(*inputs)
            if any(p.grad is not gradient for p, gradient in gradients):
                why = "each pass replaces gradients"
        except RuntimeError as e:  # it does not fit, waits for the card, or copies from the CPU
            why = f"the pass cannot be recorded ({reason(e)})"
        if why:
            del graph
            for p, gradient in gradients:
                p.grad = gradient
            for p in without_gradient:
                p.grad = None
            torch.cuda.set_rng_state(state, device)
            self.refuse(why)
            return self.run(*args)

        added = []
        for (p, gradient), version in zip(gradients, versions, strict=True):
            if gradient._version != version:
                added.append((p, gradient))
            elif any(p is other for other in without_gradient):  # the loss does not depend on it
                p.grad = None
        kinds = [kind_of(value) for value in args]
        self._recording = Recording(graph, inputs, kinds, outputs, added, facts)
        self.recordings += 1
        graph.replay()
        if changed := facts.first_change() or (generator_states() != drawn and GENERATOR):
            # This replay was right: its numbers are those of the pass that has just been recorded.
            outputs = {name: value.clone() for name, value in outputs.items()}
            self.refuse(f"each pass changes {changed}")
        return outputs

    def _replay(self, recording: Recording, args: tuple[Any, ...]) -> dict[str, Tensor]:
        fresh = []
        for p, gradient in recording.gradients:
            if p.grad is gradient:
                continue
            if p.grad is None:  # as after optimizer.zero_grad()
                fresh.append(gradient)
            else:
                gradient.copy_(p.grad)
            p.grad = gradient
        if fresh:
            torch._foreach_zero_(fresh)
        for static, value in zip(recording.inputs, args, strict=True):
            if isinstance(value, Tensor):
                static.copy_(value)
            elif isinstance(static, Tensor):
                static.fill_(value)
        recording.graph.replay()
        return recording.outputs


def kind_of(value: Any) -> Any:
    """Return the facts of an argument that must stay. A float may change: a graph reads it."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    return float if isinstance(value, float) else value


def static_input(value: Any, device: torch.device) -> Any:
    """Return the memory from which a graph reads an argument: of a tensor, or of a float; anything
    else as it is.
    """
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float32, device=device)
    return value.clone() if isinstance(value, Tensor) else value


def exchanges_gradients(run: Pass) -> bool:
    """Return whether DDP would exchange gradients among ranks in this pass, which no graph
    records.
    """
    args = run.args if isinstance(run, functools.partial) else ()
    return any(getattr(arg, "require_backward_grad_sync", False) for arg in args)


# ---- what the Python code of a pass may read and change ------------------------------------------
# It is compared to know whether a replay would still do the same.

MAX_ITEMS = 1000  # compared at most in a container
MAX_DEPTH = 4  # how far to look into containers and objects in each other
# Values that stay the same as long as they are the same object. The attributes of a class are facts
# of their own.
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
    """Return the names that a user's code may change, each with its prefix in messages."""
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
    """Return something that differs once a value, or its content, has changed.

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
