"""Holds faster forms to the definition: each is compared with model.py once, on real input, and left out if it differs.

What is found is remembered under a digest of the code (machine/remembered.py), so that it is compared once for each
version of model.py on each machine. All that compares comes here: kernels, the forms of a training step, cached
sampling, exported folders.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from deskgpt.kernels import cpu_kernels, replacements
from deskgpt.kernels.overridable import replacing
from deskgpt.system import cache, hardware
from deskgpt.system.errors import is_out_of_memory
from deskgpt.system.provenance import digest_of_code

ROOT = Path(__file__).resolve().parents[2]
# The code that results depend on, with all that these files import of ours.
CODE = (ROOT / "model.py", *sorted((ROOT / "deskgpt" / "compute").glob("*.py")))

# How far results may be from plain float32's: |difference| / |expected|. The largest differences of gradients measured
# over the model's choices and one to twelve layers (docs/decisions.md) were 0.038 in bfloat16 and 2.3e-6 in float32.
# Fifteen real and emulated processors are below these limits (bench/results/2026-11-22-check-machines.md). A kernel
# that loses one of 64 elements is off by 0.12.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1, "tf32": 0.1}

# The same of logits where both are in full float32: the largest difference between transformers and model.py, over all
# 192 combinations of the model's choices, is 1e-5 (tests/test_export.py).
SAME_LOGITS = 1e-4

# Kernels are compared twice: on what they get in training, and on the same with a root mean square of this size. A new
# model's scores and logits are so small that a cap on them, for one, would change nothing yet.
LARGE = {"attention": 4.0, "GPT.loss": 32.0}
MOST_ALIKE = 2  # calls of a function with the same shapes that are compared: of the first two layers
ALMOST_NOTHING = 1e-3  # a gradient below this share of the largest may be nothing but rounding

Variant = Callable[..., Any]  # what stands in for a function of model.py, called as form(plain, *args)

Problems = dict[str, str]  # what is wrong with forms that were compared, by name; empty where all are right

FILE = "forms"  # of what is remembered


class Mismatch(ValueError):
    """A form that computes something else than the definition."""


# ---- what was found before -----------------------------------------------------------------------------------


def machine(device: torch.device) -> str:
    return f"{hardware.device_name(device)}, torch {torch.__version__}"


def digest(*what: Any) -> str:
    """A name for these values, whose repr must say all that matters, and for our code as it is."""
    of_code = digest_of_code(CODE) + cpu_kernels.SOURCE.read_bytes()
    return hashlib.sha256(repr((torch.__version__, *what)).encode() + of_code).hexdigest()[:16]


def found_before(key: str | None) -> Problems | None:
    """What is wrong with the forms of this key, in words that name the file; None if they were not compared."""
    found = cache.read(FILE).get(key or "")
    if not isinstance(found, dict):
        return None
    return {name: f"{problem} (found before, in {cache.path_of(FILE)})" for name, problem in found.items()}


def keep(key: str | None, problems: Problems) -> None:
    if key is not None:
        cache.keep(FILE, key, problems)


def problems_of(
    key: str | None, compare: Callable[[], Problems], on_all_ranks: Callable[[bool], bool] = bool
) -> Problems:
    """What is wrong with the forms of this key: as remembered, else as `compare` finds. Without a key, always compares.

    on_all_ranks: whether something holds on all ranks. They compare together if one of them does not remember.
    """
    found = found_before(key)
    if not on_all_ranks(found is not None):
        found = compare()
        keep(key, found)
    assert found is not None
    return found


# ---- comparing -----------------------------------------------------------------------------------------------


def distance(found: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """|found - expected| / |expected|, or by `least` where that is larger; infinite for NaN and another shape."""
    if found.shape != expected.shape:
        return math.inf
    error = (found.float() - expected.float()).norm().item() / max(expected.float().norm().item(), least, 1e-30)
    return error if math.isfinite(error) else math.inf


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
def keeping_buffers(model: nn.Module) -> Iterator[None]:
    """Within the block a pass may change buffers, as one with a running mean does; after it they are as before."""
    buffers = [(m, name, x, x.clone()) for m in model.modules() for name, x in m.named_buffers(recurse=False)]
    try:
        yield
    finally:
        for module, name, x, before in buffers:
            x.copy_(before)
            setattr(module, name, x)  # the pass may have put another tensor there


# ---- kernels -------------------------------------------------------------------------------------------------


def wrong_replacements(
    model: nn.Module, forms: Iterable[tuple[str, Variant]], idx: Tensor, targets: Tensor
) -> Problems:
    """Which of these forms compute something else than the definition in a pass of `model`, and how, by their names.

    forms: with the names of what they stand in for. idx, targets (1, T): real tokens. Results and gradients are
    compared in full float32, in training and in evaluation.
    """
    problems: Problems = {}
    of_name: dict[str, list[Variant]] = {}
    for name, form in forms:
        in_chunks = form in (replacements.chunked_loss, replacements.kernel_loss)
        of_name.setdefault(name, []).append(replacements.in_thirds(form) if in_chunks else form)
    if not of_name:
        return problems
    was_training = model.training
    try:
        with full_float32(), keeping_buffers(model), torch.no_grad():
            for training in (True, False):
                model.train(training)
                with replacing({name: comparing(name, some, problems, not training) for name, some in of_name.items()}):
                    model(idx, targets)
    finally:
        model.train(was_training)
    return problems


def comparing(name: str, forms: list[Variant], problems: Problems, large: bool) -> Variant:
    """What stands in for the function `name` and computes as it does; notes in problems where a form does not.

    large: on large numbers, see LARGE. Of calls that differ in these numbers only, as those of the layers do, the first
    ones are compared.
    """
    alike: Counter[str] = Counter()

    def compared(plain: Variant, *args: Any, **kwargs: Any) -> Any:
        if name == "GPT.loss":  # all logits of a long text, with their gradients, could take more memory than training
            few = max(1, replacements.LOGITS_ON_CPU // args[0].config.vocab_size)
            args = tuple(a[:, :few] if isinstance(a, Tensor) and a.dim() > 1 else a for a in args)
        kind = repr([in_words(a) for a in (*args, *kwargs.values())])
        alike[kind] += 1
        if alike[kind] <= MOST_ALIKE:
            inputs = [scaled(a, LARGE.get(name)) if large else a for a in args]
            problem = problem_with(name, forms, plain, inputs, kwargs)
            if problem is not None:
                problems[name] = problem
        return plain(*args, **kwargs)

    return compared


def problem_with(
    name: str, forms: list[Variant], plain: Variant, inputs: list[Any], kwargs: dict[str, Any]
) -> str | None:
    """What is wrong with one of these forms of the function `name`, called like this; None if all are right."""
    try:
        with DropoutAsFactor():
            expected, is_random = results(functools.partial(plain, **kwargs), inputs)
            if is_random:
                return f"{name} of model.py draws random numbers, and what stands in for it may draw others"
            for form in forms:
                found, _ = results(functools.partial(form, plain, **kwargs), inputs)
                error = distance_of_all(found, expected)
                if not error <= TOLERANCE["float32"]:
                    return f"what stands in for {name} differs from model.py by {error:.3g}"
    except Exception as e:
        if is_out_of_memory(e):
            raise
        return f"what stands in for {name} fails: {' '.join(str(e).split())[:120]}"
    return None


def in_words(x: Any) -> Any:
    """An argument by all but the numbers of a tensor that has gradients."""
    if isinstance(x, Tensor):
        return (x.shape, x.dtype, None if x.is_floating_point() else x.tolist())
    return id(x) if isinstance(x, nn.Module) else x


def scaled(x: Any, rms: float | None) -> Any:
    """A tensor of numbers with this root mean square; anything else as it is."""
    if rms is None or not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return x * (rms / x.square().mean().sqrt().clamp(min=1e-12))


class DropoutAsFactor(TorchFunctionMode):
    """Within the block, dropout of a rate p multiplies by 1 + p.

    Two forms would draw other masks. The factor tells whether they drop the same things at the same rate.
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


@torch.enable_grad()
def results(function: Callable[..., Any], args: list[Any]) -> tuple[list[Tensor], bool]:
    """What the function computes, and its gradients by the tensors and by the parameters of the modules among args.

    Also whether it draws random numbers; if so, it draws the same ones each time.
    """
    args = [a.detach().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    sources = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    for module in args:
        if isinstance(module, nn.Module):
            sources += [p for p in module.parameters() if p.requires_grad]
    devices = {a.device for a in args if isinstance(a, Tensor)}
    with torch.random.fork_rng(devices=[device for device in devices if device.type == "cuda"]):
        torch.manual_seed(0)
        before = [random_state(device) for device in devices]
        outputs = [x for x in tree_leaves(function(*args)) if isinstance(x, Tensor)]
        is_random = [random_state(device) for device in devices] != before
    draw = torch.Generator().manual_seed(0)
    upstream = [torch.randn(x.shape, generator=draw).to(x) for x in outputs]
    gradients = torch.autograd.grad(outputs, sources, upstream, allow_unused=True)
    return [x.detach() for x in outputs] + [g for g in gradients if g is not None], is_random


def distance_of_all(found: list[Tensor], expected: list[Tensor]) -> float:
    if len(found) != len(expected):
        return math.inf
    largest = max((x.norm().item() for x in expected), default=0.0)
    least = ALMOST_NOTHING * largest
    return max((distance(a, b, least) for a, b in zip(found, expected, strict=True)), default=0.0)
