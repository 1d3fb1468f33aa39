"""Compares with model.py whatever computes it in another way: one table of tolerances, one kind of message.

A run compares at its start, and again as it goes on (compute/runner.py): what replaces functions of model.py, on the
inputs that they get in a pass over the run's own text; and the loss and gradients of a whole pass that is compiled or
in low precision, with float32. Sampling (compute/inference.py) and exports compare logits. Nothing is remembered from
one process to the next.
"""

from __future__ import annotations

import functools
import inspect
import math
import random
import textwrap
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from deskgpt.kernels import replacements
from deskgpt.kernels.overridable import replacing
from deskgpt.kernels.replacements import describe
from deskgpt.system import hardware
from deskgpt.system.errors import is_out_of_memory


@dataclass(frozen=True)
class Tolerance:
    """How far a result may be from float32's: |difference| / |expected|."""

    loss: float
    gradient: float  # of each parameter, or of each input of a function
    logits: float  # at each position
    cancelled: float  # a gradient below this share of those beside it may be nothing but rounding


# The largest differences of gradients measured over the model's choices and one to twelve layers (docs/decisions.md)
# were 0.038 in bfloat16 and 2.3e-6 in float32; of logits in float32, between transformers and model.py, 1e-5
# (tests/test_export.py). A kernel that loses one of 64 elements is off by 0.12.
TOLERANCE = {
    "float32": Tolerance(loss=1e-4, gradient=1e-3, logits=1e-4, cancelled=1e-5),
    "tf32": Tolerance(loss=1e-2, gradient=0.1, logits=0.02, cancelled=1e-3),
    "bfloat16": Tolerance(loss=1e-2, gradient=0.1, logits=0.1, cancelled=1e-3),
    "float16": Tolerance(loss=1e-2, gradient=0.1, logits=0.02, cancelled=1e-3),
}
SAME_LOGITS = TOLERANCE["float32"].logits  # of an exported model, or with a cache

# Of two passes that draw different random numbers, only losses and norms of gradients are compared, with these limits.
RANDOM_LOSS = 0.2
RANDOM_NORM = 3.0

MOST_ROUNDING = 0.5  # the largest limit, however much gradients change with slightly different weights

# Functions are also compared on their inputs scaled to this root mean square: a new model's scores, activations and
# logits are so small that a limit on them would change nothing yet.
LARGE = {"attention": 4.0, "activation": 4.0, "GPT.loss": 32.0}

Candidates = Mapping[str, Sequence[Callable[..., Any]]]  # what may replace functions of model.py, by their names


class Mismatch(ValueError):
    """Something computes another result than model.py."""


def mismatch(what: str, error: float, limit: float, instead: str = "") -> str:
    """The one message about it, such as "C++ attention disagrees with model.py (...): using flash attention"."""
    line = f"{what} disagrees with model.py (relative error {error:.2g}, at most {limit:g} is rounding)"
    return f"{line}: using {instead}" if instead else line


def precision_of(dtype: str, device: torch.device) -> str:
    """The row of TOLERANCE for matmuls in this dtype; on CUDA, float32 is TF32."""
    return "tf32" if dtype == "float32" and device.type == "cuda" else dtype


# ---- comparing -----------------------------------------------------------------------------------------------


def distance(found: Tensor, expected: Tensor, least: float = 1e-30, dim: int | None = None) -> float:
    """|found - expected| / |expected|, or by `least` where that is larger; infinite for NaN and another shape.

    dim: norms along it alone, as at each position of logits; then the largest distance counts.
    """
    if found.shape != expected.shape:
        return math.inf
    found = found.float()
    expected = expected.float()
    errors = (found - expected).norm(dim=dim) / expected.norm(dim=dim).clamp(min=max(least, 1e-30))
    error = errors.max().item()
    return error if math.isfinite(error) else math.inf


def compare_passes(
    what: str,
    precision: str,
    names: list[str],
    found: tuple[float, list[Tensor]],
    expected: tuple[float, list[Tensor]],
    is_random: bool = False,
    rounding: float = 0.0,
) -> None:
    """Compares the loss and the gradients of two training passes. Raises Mismatch where `what` has gone wrong.

    rounding: how far a gradient goes with weights that are off by the precision; twice that is right, up to
    MOST_ROUNDING.
    """
    loss, gradients = found
    expected_loss, expected_gradients = expected
    error = abs(loss - expected_loss) / max(abs(expected_loss), 1e-30)
    limit = RANDOM_LOSS if is_random else TOLERANCE[precision].loss
    if not error <= limit:  # NaN is not
        raise Mismatch(mismatch(f"{what}: the loss {loss:.6g}", error, limit))
    if is_random:
        errors = norm_ratios(names, gradients, expected_gradients)
        limit = RANDOM_NORM
    else:
        errors = gradient_errors(names, gradients, expected_gradients, precision)
        limit = max(TOLERANCE[precision].gradient, min(2 * rounding, MOST_ROUNDING))
    worst = max(errors, key=lambda name: errors[name])
    if not errors[worst] <= limit:
        raise Mismatch(mismatch(f"{what}: the gradient of {worst}", errors[worst], limit))


def gradient_errors(names: list[str], found: list[Tensor], expected: list[Tensor], precision: str) -> dict[str, float]:
    """|found - expected| / |expected| of each parameter's gradient, by name; infinite for NaN.

    Queries, keys and values are compared one by one: at the start the gradients of the first two are far smaller. A
    gradient that may be only rounding is measured by the whole that it is part of: the softmax cancels that of a key's
    bias, and where attention has nothing to learn, as on random tokens, that of queries falls to 7e-5 of the three.
    """
    found = [whole(g) for g in found]
    expected = [whole(g) for g in expected]
    cancelled = TOLERANCE[precision].cancelled
    total = math.sqrt(sum(g.float().square().sum().item() for g in expected))
    errors = {}
    for name, a, b in zip(names, found, expected, strict=True):
        if ".c_attn." in name and b.size(0) % 3 == 0:
            of_all = b.norm().item()
            for part, a_part, b_part in zip("qkv", a.chunk(3), b.chunk(3), strict=True):
                is_rounding = b_part.norm().item() <= cancelled * of_all
                errors[f"{name} ({part})"] = distance(a_part, b_part, of_all if is_rounding else 0.0)
        else:
            errors[name] = distance(a, b, total if b.norm().item() <= 1e-5 * total else 0.0)
    return errors


def norm_ratios(names: list[str], found: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """How far the norms of two gradients are apart, as a factor of at least 1, by name; infinite for NaN."""
    found_norms = [whole(g).float().norm().item() for g in found]
    norms = [whole(g).float().norm().item() for g in expected]
    least = max(1e-5 * math.hypot(*norms), 1e-30)
    ratios = {}
    for name, a, b in zip(names, found_norms, norms, strict=True):
        ratio = max(a, least) / max(b, least)
        ratios[name] = max(ratio, 1 / ratio) if math.isfinite(a) else math.inf
    return ratios


def whole(x: Any) -> Tensor:
    """A sharded tensor, gathered from its ranks, all of which must call this; any other tensor itself."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


# ---- conditions of a comparison --------------------------------------------------------------------------------


@contextmanager
def full_float32() -> Iterator[None]:
    """Within the block, float32 is float32: no TF32, no autocast."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """After the block, buffers, training mode and random generators are as before it, whatever a pass has changed."""
    buffers = [(m, name, x, x.clone()) for m in model.modules() for name, x in m.named_buffers(recurse=False)]
    device = next(model.parameters()).device
    modes = [(module, module.training) for module in model.modules()]
    python_state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python_state)
        for module, name, x, before in buffers:
            x.copy_(before)
            setattr(module, name, x)  # the pass may have put another tensor there
        for module, mode in modes:
            module.training = mode


def weights_are_finite(model: nn.Module) -> bool:
    """Whether they are, and their squares, on this rank. With others nothing can be compared."""
    local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return all(bool(p.square().isfinite().all()) for p in local)


@contextmanager
def nothing_is_zero(model: nn.Module) -> Iterator[None]:
    """Within the block, parameters that are all zeros hold small random numbers.

    A matrix of zeros would hide the gradients of everything before it.
    """
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        own = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
        zeros = [p for p in own if not p.any()]
        for p in zeros:
            p.copy_(torch.randn(p.shape, generator=draw) * 0.02)
    try:
        yield
    finally:
        with torch.no_grad():
            for p in zeros:
                p.zero_()


@contextmanager
def disturbed_weights(model: nn.Module, dtype: str) -> Iterator[None]:
    """Within the block, all parameters are off by about the dtype's precision."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        before = [p.clone() for p in model.parameters()]
        for p in model.parameters():
            p.mul_(1 + torch.finfo(hardware.DTYPES[dtype]).eps * torch.randn(p.shape, generator=draw).to(p))
        try:
            with torch.enable_grad():
                yield
        finally:
            for p, value in zip(model.parameters(), before, strict=True):
                p.copy_(value)


class DropoutAsFactor(TorchFunctionMode):
    """Within the block, dropout of a rate p multiplies by 1 + p.

    Two variants would draw other masks. The factor shows whether they drop the same things at the same rate.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.dropout:
            return args[0] * (1 + kwargs["p"] * kwargs["training"])
        rate = kwargs.get("dropout_p", 0.0)
        if not rate:
            return func(*args, **kwargs)
        return func(*args, **kwargs | {"dropout_p": 0.0}) * (1 + rate)  # torch's fused attention


def random_state(device: torch.device) -> tuple[Any, ...]:
    """Of the generators that a model may draw from."""
    of_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state().tolist()
    return torch.get_rng_state().tolist(), of_device, random.getstate()


# ---- functions of model.py -------------------------------------------------------------------------------------


def wrong_replacements(
    model: nn.Module, candidates: Candidates, idx: Tensor, targets: Tensor, dtype: str = "float32"
) -> dict[str, str]:
    """Which candidates differ from the functions of model.py that they may replace, by the candidates' names, and how.

    idx, targets (B, T): real tokens. Each call in a pass of `model`, of any layer, is computed by the function and by
    its candidates: results and gradients are compared, in float32 also on large inputs. dtype: of the candidates'
    matmuls; the function itself computes in float32. The model, its buffers and random generators stay as they are.
    """
    problems: dict[str, str] = {}
    passes = ((True, False), (False, True)) if dtype == "float32" else ((True, False),)
    with undisturbed(model), torch.no_grad():
        for training, large in passes:
            model.train(training)
            compared = {
                name: functools.partial(compare_call, name, some, problems, dtype, large)
                for name, some in candidates.items()
            }
            context = full_float32() if dtype == "float32" else hardware.autocast(idx.device, dtype)
            with context, replacing(compared):
                model(idx, targets)
    return problems


def compare_call(
    name: str,
    candidates: Sequence[Callable[..., Any]],
    problems: dict[str, str],
    dtype: str,
    large: bool,
    reference: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replaces the function `name` and computes as it does; notes in problems where a candidate does not."""
    left = [c for c in candidates if c.__name__ not in problems]
    if not left:
        return reference(*args, **kwargs)
    rms = LARGE.get(name) if large else None
    inputs = [scaled(a, rms) for a in args]
    function = functools.partial(reference, **kwargs)
    with DropoutAsFactor():
        with full_float32():
            before = state_of(reference, args)
            in_16_bits = (torch.bfloat16, torch.float16)
            wide = [a.float() if isinstance(a, Tensor) and a.dtype in in_16_bits else a for a in inputs]
            expected, is_random, reads_more = results(function, wide)
            keeps_more = state_of(reference, args) != before
        for candidate in left:
            problem = problem_with(candidate, function, inputs, expected, dtype)
            if is_random:
                problem = f"{name} of model.py draws random numbers, and {describe(candidate)} may draw others"
            elif reads_more:
                problem = f"{name} of model.py has a parameter that {describe(candidate)} would not train"
            elif keeps_more:
                problem = f"{name} of model.py changes more than its result, which {describe(candidate)} would not"
            if problem is not None:
                problems[candidate.__name__] = problem
    return reference(*args, **kwargs)


def problem_with(
    candidate: Callable[..., Any], reference: Callable[..., Any], inputs: list[Any], expected: list[Tensor], dtype: str
) -> str | None:
    """What is wrong with a candidate that is called like this; None if its results are the expected ones."""
    what = f"{describe(candidate)} in {dtype}"
    limit = TOLERANCE[dtype].gradient
    try:
        found, _, _ = results(functools.partial(replacements.as_compared(candidate), reference), inputs)
    except Exception as e:
        if is_out_of_memory(e):
            raise
        return f"{what} fails ({textwrap.shorten(str(e), 150, placeholder=' ...')})"
    if len(found) != len(expected):
        return mismatch(what, math.inf, limit)
    # A gradient far below the largest may be nothing but rounding.
    least = (1e-3 if dtype == "float32" else 0.1) * max((x.norm().item() for x in expected), default=0.0)
    error = max((distance(a, b, least) for a, b in zip(found, expected, strict=True)), default=0.0)
    return None if error <= limit else mismatch(what, error, limit)


def state_of(function: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """What a function may change beside its result: global names, what they hold, and attributes of its modules."""
    places = [vars(inspect.getmodule(function) or function)]
    places += [vars(a) for a in args if isinstance(a, nn.Module)]
    held = [value for place in places for value in place.values()]
    containers = [value for value in held if isinstance(value, dict | list | set | deque)]
    containers += [vars(value) for value in held if isinstance(value, FunctionType | SimpleNamespace)]
    inner = [list(map(id, c.values() if isinstance(c, dict) else c)) for c in containers]
    versions = [value._version for value in held if isinstance(value, Tensor) and not value.is_inference()]
    return [list(map(id, held)), inner, versions]


def scaled(x: Any, rms: float | None) -> Any:
    """A tensor of numbers with this root mean square; anything else as it is."""
    if rms is None or not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return x * (rms / x.square().mean().sqrt().clamp(min=1e-12))


@torch.enable_grad()
def results(function: Callable[..., Any], args: list[Any]) -> tuple[list[Tensor], bool, bool]:
    """What the function returns, and its gradients by the tensors and by the parameters of the modules among args.

    Also whether it draws random numbers, the same ones each time, and whether it has parameters that are not in args.
    """
    args = [a.detach().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    sources = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    device = sources[0].device
    for module in args:
        if isinstance(module, nn.Module):
            sources += [p for p in module.parameters() if p.requires_grad]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        before = random_state(device)
        outputs = [x for x in tree_leaves(function(*args)) if isinstance(x, Tensor)]
        is_random = random_state(device) != before
    draw = torch.Generator().manual_seed(0)
    upstream = [torch.randn(x.shape, generator=draw).to(x) for x in outputs]
    gradients = torch.autograd.grad(outputs, sources, upstream, allow_unused=True)
    found = [x.detach() for x in outputs] + [g for g in gradients if g is not None]
    return found, is_random, bool(leaves_of(outputs) - set(sources))


def leaves_of(outputs: list[Tensor]) -> set[Tensor]:
    """The tensors that a backward pass from the outputs gives gradients."""
    nodes = {x.grad_fn for x in outputs}
    todo = list(nodes)
    leaves = set()
    while todo:
        node: Any = todo.pop()
        if hasattr(node, "variable"):
            leaves.add(node.variable)
        new = {following for following, _ in getattr(node, "next_functions", ())} - nodes
        nodes |= new
        todo += new
    return leaves
