"""The proof that a form of a model trains as the plain form does: float32, not compiled.

What is compiled or in low precision is compared on the run's own first sequences: their loss, and each parameter's
gradient. The kernels of the plain form are compared with model.py itself (faster/held.py).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from deskgpt.compute.runner import Runner, Variant
from deskgpt.compute.sharding import in_float32, local, means, whole
from deskgpt.kernels.verify import TOLERANCE, Mismatch, distance, full_float32, keeping_buffers, random_state
from model import GPT

Batch = tuple[Tensor, Tensor]  # inputs and targets (B, T) int64

LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-2, "tf32": 1e-2}

# The kinds of devices whose full float32 their other forms are compared with. Others, such as MPS, with that of a CPU.
REFERENCES = ("cpu", "cuda")

FEW = 128  # tokens that show whether a pass draws random numbers

# What is compared: about this number of tokens, fewer of which round worse, in at least two sequences, which a kernel
# could mistake for each other. More would show no more, and take memory that the run itself does not need.
COMPARED_TOKENS = 1024
COMPARED_SEQUENCES = 2

# A gradient below this share of all gradients may be nothing but rounding.
CANCELLED = 1e-5
# The same for queries, keys and values as shares of the three. The softmax cancels the gradient of a key's bias: in
# float32, 1e-8 is left. Where attention has nothing to learn, as on random tokens, the share of queries falls from
# 1.5e-2 to 7e-5 within 25 steps, and in bfloat16 with flash attention it is then off by 0.27 of itself. The smallest
# real share, of queries at the start, is 5e-3.
CANCELLED_PART = {"float32": 1e-5, "bfloat16": 1e-3, "float16": 1e-3, "tf32": 1e-3}

# A compiled form draws other random numbers, dropout's masks for one. Then only losses and norms compare, by these
# factors.
RANDOM_LOSS = 1.2
RANDOM_NORM = 3.0


def plain(form: Variant) -> Variant:
    """The form that this one is compared with: with the same kernels, but float32 and not compiled."""
    return Variant(checkpoint=form.checkpoint, reference_only=form.reference_only)


def is_right_by_definition(form: Variant, device: torch.device) -> bool:
    """Whether nothing is to be compared. On CUDA float32 is TF32, which is."""
    return form == plain(form) and device.type in REFERENCES and device.type != "cuda"


def compared_rows(B: int, T: int) -> int:
    """How many of B sequences of T tokens are compared; a divisor of B, so that all count alike where they repeat."""
    wanted = max(COMPARED_SEQUENCES, math.ceil(COMPARED_TOKENS / T))
    divisors = [n for n in range(1, B + 1) if B % n == 0]
    return min(divisors, key=lambda n: (abs(n - wanted), -n))


def repeating(batch: Batch) -> Batch:
    """A batch of this shape in which the sequences to compare repeat: its loss and gradients are theirs alone."""
    x, y = batch
    B, T = x.shape
    n = compared_rows(B, T)
    return x[:n].repeat(B // n, 1), y[:n].repeat(B // n, 1)


def check(runner: Runner, batch: Batch, loss: Tensor, micro_steps: int, rehearsed: bool = False) -> None:
    """Compares the loss, and the gradients that a pass of runner over batch has left, with plain float32.

    batch: as `repeating` makes it, so that plain float32 takes a pass over few sequences, while the form is tried in
    the shape that it is for. Raises Wrong where they differ, and ValueError where plain float32 itself is not finite.
    Leaves no gradients. rehearsed: only that it fits is looked at.
    """
    model = runner.model
    form = runner.form
    is_random = draws_random_numbers(model, batch, form)
    by_norms = is_random and form.compiled  # another graph, of evaluation, would have to be compiled, too
    with as_evaluated(model) if is_random and not by_norms else nullcontext():
        if is_random and not by_norms:
            runner.drop_gradients()
            loss = runner.forward_backward(*batch, micro_steps) * micro_steps
        found_loss = loss.item()
        found = taken_gradients(runner, micro_steps)
        x, y = batch
        n = compared_rows(*x.shape)
        expected_loss, gradients = plain_float32(model, (x[:n], y[:n]), form)
    if rehearsed:
        return

    if runner.sharded:
        found_loss, expected_loss = means(found_loss, expected_loss, device=runner.device)
    if not math.isfinite(expected_loss) or not all(whole(g).isfinite().all() for g in gradients):
        raise ValueError(
            f"plain float32 gives a loss of {expected_loss} or gradients that are not finite on the first micro-batch: "
            "not the form but the weights that the run starts from, or the data, are at fault; take another checkpoint"
        )
    precision = "tf32" if form.dtype == "float32" and runner.device.type == "cuda" else form.dtype
    found = [a.to(b.device) for a, b in zip(found, gradients, strict=True)]
    compare(form, precision, runner.names, found_loss, found, expected_loss, gradients, by_norms)


def compare(
    form: Variant,
    precision: str,
    names: list[str],
    found_loss: float,
    found: list[Tensor],
    expected_loss: float,
    expected: list[Tensor],
    by_norms: bool,
) -> None:
    """Raises Wrong where a loss or a gradient is further from the expected one than its precision explains."""
    off = abs(found_loss - expected_loss) / max(abs(expected_loss), 1e-30)
    limit = RANDOM_LOSS - 1 if by_norms else LOSS_TOLERANCE[precision]
    if not off <= limit:  # nan is not
        raise Mismatch(f"the loss in {form} is {found_loss:.6g}, in plain float32 {expected_loss:.6g}")

    if by_norms:
        errors = norm_ratios(names, found, expected)
        limit = RANDOM_NORM
        how = "norms differ by a factor of"
    else:
        errors = gradient_errors(names, found, expected, precision)
        limit = TOLERANCE[precision]
        how = "differ by"
    worst = max(errors, key=lambda name: errors[name])
    if not errors[worst] <= limit:
        raise Mismatch(
            f"gradients in {form} disagree with plain float32: {worst}'s {how} "
            f"{errors[worst]:.3g}, at most {limit:g} is rounding"
        )


def gradient_errors(names: list[str], found: list[Tensor], expected: list[Tensor], precision: str) -> dict[str, float]:
    """|found - expected| / |expected| of each gradient, by name; infinite for NaN.

    Queries, keys and values are compared one by one, because at the start the gradients of the first two are far
    smaller than those of values. A gradient that may be only rounding in this precision is measured by the whole that
    it is part of.
    """
    total = math.sqrt(sum(whole(g).square().sum().item() for g in expected))
    errors = {}
    for name, found_grad, expected_grad in zip(names, map(whole, found), map(whole, expected), strict=True):
        is_qkv = ".c_attn." in name and expected_grad.size(0) % 3 == 0
        parts = ("q", "k", "v") if is_qkv else ("",)
        found_parts = found_grad.chunk(3) if is_qkv else (found_grad,)
        expected_parts = expected_grad.chunk(3) if is_qkv else (expected_grad,)
        for part, a, b in zip(parts, found_parts, expected_parts, strict=True):
            of_all = expected_grad.norm().item() if part else total
            least = (CANCELLED_PART[precision] if part else CANCELLED) * of_all
            is_rounding = b.norm().item() <= least
            errors[f"{name} ({part})" if part else name] = distance(a, b, of_all if is_rounding else 0.0)
    return errors


def norm_ratios(names: list[str], found: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """The larger by the smaller norm of each gradient, by name; infinite where one is not finite."""
    least = CANCELLED * math.sqrt(sum(whole(g).square().sum().item() for g in expected))
    ratios = {}
    for name, found_grad, expected_grad in zip(names, map(whole, found), map(whole, expected), strict=True):
        a = max(found_grad.norm().item(), least)
        b = max(expected_grad.norm().item(), least)
        ratios[name] = max(a / b, b / a) if found_grad.isfinite().all() else math.inf
    return ratios


def plain_float32(model: GPT, batch: Batch, form: Variant) -> tuple[float, list[Tensor]]:
    """Loss and gradients of the model in full float32, on the CPU where its device is no reference.

    form: that of the run, whose kernels and activation checkpoints it has. Leaves no gradients.
    """
    with in_float32(model) as reference:
        runner = Runner(reference, plain(form))
        if runner.device.type not in REFERENCES:
            runner = Runner(copy.deepcopy(model).cpu(), plain(form))
            runner.forms = {}  # as model.py says: the forms were compared on the other device only
        x, y = (t.to(runner.device) for t in batch)
        with full_float32():
            loss = runner.forward_backward(x, y)
        return loss.item(), taken_gradients(runner, 1)


def taken_gradients(runner: Runner, micro_steps: int) -> list[Tensor]:
    """The gradients of a whole loss that a pass has left, without the scale of float16. They are gone afterwards."""
    factor = micro_steps / (runner.scaler.get_scale() if runner.scaler.is_enabled() else 1.0)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.float() * factor for p in runner.parameters]
    runner.drop_gradients()
    return grads


def draws_random_numbers(model: GPT, batch: Batch, form: Variant) -> bool:
    """Whether a training pass does, as dropout does: two forms would draw other ones."""
    x, y = batch
    before = random_state(x.device)
    with in_float32(model) as reference, keeping_buffers(reference):
        # With gradients: functions that are not told may ask torch whether they train.
        Runner(reference, plain(form)).forward(x[:1, :FEW], y[:1, :FEW])
    return random_state(x.device) != before


@contextmanager
def as_evaluated(model: GPT) -> Iterator[None]:
    """Within the block the model computes as in evaluation, gradients included."""
    model.eval()
    try:
        yield
    finally:
        model.train()


def weights_are_finite(model: GPT) -> bool:
    """Whether they are, on this rank. With others nothing can be compared."""
    return all(bool(local(p).isfinite().all()) for p in model.parameters())


@contextmanager
def nothing_is_zero(model: GPT) -> Iterator[None]:
    """Within the block, parameters that are all zeros hold small random numbers.

    A matrix of zeros would hide the gradients of everything before it.
    """
    draw = torch.Generator().manual_seed(0)
    zeros = [local(p) for p in model.parameters() if not local(p).any()]
    with torch.no_grad():
        for p in zeros:
            p.copy_(torch.randn(p.shape, generator=draw) * 0.02)
    try:
        yield
    finally:
        with torch.no_grad():
            for p in zeros:
                p.zero_()
