"""Checks a model on one short text, how a run computes it against eager float32, and a step: for
--dry_run and `make qualify`.

Nothing of this happens in a run. Exports and sampling with a cache compare logits by the same table
of tolerances.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from data.dataset import Dataset
from deskgpt import cpu_kernels
from deskgpt.checkpoint import savable
from deskgpt.compute import ComputeMode, apply_compute, named_losses, seed_all
from deskgpt.distributed import DistContext
from deskgpt.optim import step_if_finite
from deskgpt.train_state import optimizer_state
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


ForwardBackward = Callable[..., dict[str, Tensor]]  # train.py's
NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)  # it leaves a loss on any device as it is


def check_run(
    config: object,
    model: GPT,
    mode: ComputeMode,
    data: Dataset,
    dist: DistContext,
    forward_backward: ForwardBackward,
    build_optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    """Check the model of a run, in eager float32 so far, how this run computes it, and its first
    step and save, on a short text; print the result.

    config: train.py's. The last two are the loop's own. Raises ValueError if something is wrong.
    """
    text = data.short_text(model.config.block_size, model.config.vocab_size)
    idx, targets = (tokens.to(dist.device) for tokens in text)
    problems = check_model(model, mode, idx, targets, forward_backward)
    if problems:
        raise ValueError(f"model.py: {'; '.join(problems)}")

    optimizer = build_optimizer(config, model, mode.dtype)
    forward_backward(model, NO_SCALER, mode, idx, targets, 1.0)
    step_if_finite(optimizer, NO_SCALER, torch.zeros((), device=idx.device))
    savable({"model": model.state_dict(), "optimizer": optimizer_state(optimizer, model)})
    GPT.from_state(model.config, model.state_dict(), "a checkpoint of this run")
    dist.print0(
        f"checked on {idx.numel()} tokens: no token sees later ones, the loss is the "
        f"cross-entropy of the logits, gradients reach all parameters; {mode} "
        "agrees with eager float32; a step can be taken, and saved"
    )


def check_model(
    model: GPT, mode: ComputeMode, idx: Tensor, targets: Tensor, forward_backward: ForwardBackward
) -> list[str]:
    """Return what is wrong with a model on a text idx, targets (B, T), and computed in this mode: a
    sentence each.

    Each pass is one of a fresh copy, since a pass may leave in a model what cannot be copied. The
    model itself stays as it is.
    """
    source = copy.deepcopy(model).eval()
    fill_zeros(source)
    cpu_kernels.unload()  # the reference is plain torch
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # no TF32
    problems = check_logits(source, idx, targets)
    # With dropout, and with what the model does in training only.
    trained = copy.deepcopy(source).train()
    seed_all(0, idx.device)
    _, gradients = loss_and_gradients(forward_backward, trained, ComputeMode(), idx, targets)
    unreached = [name for name, gradient in gradients.items() if not gradient.any()]
    if unreached:
        more = f" and {len(unreached) - 1} more" if len(unreached) > 1 else ""
        problems.append(f"no gradient reaches {unreached[0]}{more}")
    reference = copy.deepcopy(source)
    loss, gradients = loss_and_gradients(forward_backward, reference, ComputeMode(), idx, targets)
    torch.set_float32_matmul_precision(precision)

    if mode.cpu_kernels:
        cpu_kernels.load()
    # In chunks, as long texts are computed, whose gradients are added.
    mode = replace(mode, loss_chunks=max(3, mode.loss_chunks))
    computed = copy.deepcopy(source)
    apply_compute(computed, mode)
    found_loss, found = loss_and_gradients(forward_backward, computed, mode, idx, targets)
    limit = TOLERANCE[precision_of(mode.dtype, idx.device)]
    error = abs(found_loss - loss) / max(abs(loss), 1e-30)
    if not error <= limit.loss:
        problems.append(
            f"{mode}: the loss differs from eager float32's by {error:.2g}, at most {limit.loss:g}"
        )
    errors = gradient_errors(found, gradients)
    worst = max(errors, key=errors.__getitem__)
    if not errors[worst] <= limit.gradient:
        problems.append(
            f"{mode}: the gradient of {worst} differs from eager float32's by "
            f"{errors[worst]:.2g}, at most {limit.gradient:g}"
        )
    return problems


@torch.no_grad()
def check_logits(source: GPT, idx: Tensor, targets: Tensor) -> list[str]:
    """Return what is wrong with the logits of copies of a model, in evaluation and in training, and
    with its loss.
    """
    problems = []
    limit = TOLERANCE["float32"]
    half = idx.size(1) // 2
    # No order of the same tokens, whose mean a model may see.
    other_end = torch.cat((idx[:, :half], idx[:, :1].expand_as(idx[:, half:])), 1)
    for is_training in (False, True) if half else ():
        model = copy.deepcopy(source).train(is_training)
        early = []
        for text in (idx, idx, other_end):
            seed_all(0, idx.device)  # the same dropout
            early.append(model(text)[0][:, :half])
        repeated = distance(early[1], early[0], dim=-1)  # by random numbers that are not torch's
        error = distance(early[2], early[0], dim=-1)
        if not error <= max(limit.logits, 10 * repeated):
            problems.append(
                f"{'in training ' * is_training}tokens see later ones: their logits change by "
                f"{error:.2g} with the text after them"
            )

    model = copy.deepcopy(source)
    logits = model(idx)[0]  # (B, T, V)
    loss = named_losses(model(idx, targets))["loss"].item()
    expected = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)
    if not abs(loss - expected.item()) <= limit.loss * max(1.0, abs(expected.item())):
        problems.append(
            f"the loss {loss:.6g} is not the cross-entropy of the logits, {expected:.6g}"
        )
    x = model.transformer(idx)  # (B, T, C)
    error = distance(model.logits(x[:, half]), model.logits(x)[:, half], dim=-1)
    if not error <= limit.logits:
        problems.append(
            f"GPT.logits of one token alone differs by {error:.2g} from that of a text: it may "
            "look at no other token, so that the loss can be computed in chunks"
        )
    return problems


def loss_and_gradients(
    forward_backward: ForwardBackward, model: GPT, mode: ComputeMode, idx: Tensor, targets: Tensor
) -> tuple[float, dict[str, Tensor]]:
    """Return the sum of the losses of a pass, and the gradients of the trained parameters by name,
    zeros if there is none.
    """
    losses = forward_backward(model, NO_SCALER, mode, idx, targets, 1.0)
    found = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            found[name] = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad = None
    return sum(loss.item() for loss in losses.values()), found


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
