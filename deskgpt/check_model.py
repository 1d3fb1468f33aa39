"""Checks a model on one short text, and how a run computes it against eager float32: for --dry_run
and `make qualify`.

Nothing of this happens in a run. Exports and sampling with a cache compare logits by the same table
of tolerances.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deskgpt import cpu_kernels
from deskgpt.compute import ComputeMode, apply_compute, autocast
from model import GPT


@dataclass(frozen=True)
class Tolerance:
    """How far a result may be from float32's: |difference| / |expected|."""

    loss: float
    gradient: float  # of each parameter
    logits: float  # at each position


# The largest differences of gradients measured over the model's choices and one to twelve layers
# (docs/decisions.md) were 0.038 in bfloat16 and 2.3e-6 in float32; of logits in float32, between
# transformers and model.py, 1e-5. A kernel that loses one of 64 elements is off by 0.12.
TOLERANCE = {
    "float32": Tolerance(loss=1e-4, gradient=1e-3, logits=1e-4),
    "tf32": Tolerance(loss=1e-2, gradient=0.1, logits=0.02),
    "bfloat16": Tolerance(loss=1e-2, gradient=0.1, logits=0.1),
    "float16": Tolerance(loss=1e-2, gradient=0.1, logits=0.02),
}


def precision_of(dtype: str, device: torch.device) -> str:
    """Return the row of TOLERANCE for matmuls in this dtype; on CUDA, float32 is TF32."""
    return "tf32" if dtype == "float32" and device.type == "cuda" else dtype


def distance(
    found: Tensor, expected: Tensor, least: float = 1e-30, dim: int | None = None
) -> float:
    """Return |found - expected| / |expected|, or by `least` if that is larger; infinite for NaN and
    another shape.

    dim: norms along it alone, as at each position of logits; then the largest distance counts.
    """
    if found.shape != expected.shape:
        return math.inf
    found = found.float()
    expected = expected.float()
    errors = (found - expected).norm(dim=dim) / expected.norm(dim=dim).clamp(min=max(least, 1e-30))
    error = errors.max().item()
    return error if math.isfinite(error) else math.inf


def check_model(model: GPT, variant: ComputeMode, idx: Tensor, targets: Tensor) -> list[str]:
    """Return what is wrong with a model on a text idx, targets (B, T), and in this variant: a
    sentence each.

    The model stays as it is: copies of it are checked, without dropout.
    """
    reference = copy.deepcopy(model).eval()
    fill_zeros(reference)
    problems = []
    cpu_kernels.unload()  # the reference is plain torch
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # no TF32
    with torch.no_grad():
        logits = reference(idx)[0]  # (B, T, V)
        half = idx.size(1) // 2
        later = torch.cat((idx[:, :half], idx[:, half:].flip(1).roll(1, 0)), 1)
        early = distance(reference(later)[0][:, :half], logits[:, :half], dim=-1) if half else 0.0
        expected_loss = F.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1
        ).item()
    loss, gradients = loss_and_gradients(reference, ComputeMode(), idx, targets)
    torch.set_float32_matmul_precision(precision)
    limit = TOLERANCE["float32"]
    if not early <= limit.logits:
        problems.append(
            f"tokens see later ones: their logits change by {early:.2g} with the text after them"
        )
    if not abs(loss - expected_loss) <= limit.loss * max(1.0, abs(expected_loss)):
        problems.append(
            f"the loss {loss:.6g} is not the cross-entropy of the logits, {expected_loss:.6g}"
        )
    unreached = [name for name, gradient in gradients.items() if not gradient.any()]
    if unreached:
        more = f" and {len(unreached) - 1} more" if len(unreached) > 1 else ""
        problems.append(f"no gradient reaches {unreached[0]}{more}")

    if variant.cpu_kernels:
        cpu_kernels.load()
    computed = copy.deepcopy(reference)
    apply_compute(computed, variant)
    found_loss, found = loss_and_gradients(computed, variant, idx, targets)
    limit = TOLERANCE[precision_of(variant.dtype, idx.device)]
    error = abs(found_loss - loss) / max(abs(loss), 1e-30)
    if not error <= limit.loss:
        problems.append(
            f"{variant}: the loss differs from eager float32's by {error:.2g}, at most "
            f"{limit.loss:g}"
        )
    errors = gradient_errors(found, gradients)
    worst = max(errors, key=errors.__getitem__)
    if not errors[worst] <= limit.gradient:
        problems.append(
            f"{variant}: the gradient of {worst} differs from eager float32's by "
            f"{errors[worst]:.2g}, at most {limit.gradient:g}"
        )
    return problems


def loss_and_gradients(
    model: GPT, variant: ComputeMode, idx: Tensor, targets: Tensor
) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of a pass, and the gradients of the trained parameters by name, zeros if
    there is none.
    """
    with autocast(idx.device, variant.dtype):
        loss = model(idx, targets)[1]
    loss.backward()
    found = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            found[name] = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad = None
    return loss.item(), found


def gradient_errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return |found - expected| / |expected| of each gradient by name; infinite for NaN.

    One that nearly vanishes is compared relative to all gradients together: it is rounding.
    """
    total = math.sqrt(sum(g.float().square().sum().item() for g in expected.values()))
    errors = {}
    for name, gradient in expected.items():
        is_rounding = gradient.norm().item() <= 1e-5 * total
        errors[name] = distance(found[name], gradient, total if is_rounding else 0.0)
    return errors


def fill_zeros(model: GPT) -> None:
    """Give parameters that are all zeros small random numbers: zeros would hide the gradients of
    all before them.
    """
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if not p.any():
                p.copy_(torch.randn(p.shape, generator=draw) * 0.02)
