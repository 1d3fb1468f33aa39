"""Checks a model on one short text, how a run computes it against eager float32, and a step: for
--dry_run and `make qualify`.

Nothing of this happens in a run. Exports and sampling with a cache compare logits by the same table
of tolerances.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deskgpt import cpu_kernels
from deskgpt.checkpoint import savable
from deskgpt.compiling import apply_compute
from deskgpt.compute import ComputeMode, Pass, named_losses, seed_all
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
    errors = (found - expected).norm(dim=dim) / expected.norm(dim=dim).clamp(min=least)
    error = errors.max().item()
    return error if math.isfinite(error) else math.inf


@contextmanager
def in_float32(model: GPT) -> Iterator[None]:
    """Within the block, nothing of the model is rounded to fewer bits: no TF32, and the residual
    stream of a model in training is float32.
    """
    precision = torch.get_float32_matmul_precision()
    residual_dtype = model.transformer.residual_dtype
    torch.set_float32_matmul_precision("highest")
    model.transformer.residual_dtype = None
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        model.transformer.residual_dtype = residual_dtype


SHORT = 256  # tokens of a text on which a model is checked
NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)  # it leaves a loss on any device as it is


def check_run(
    config: object,
    model: GPT,
    mode: ComputeMode,
    dist: DistContext,
    forward_backward: Pass,
    build_optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    """Check the model of a run, in eager float32 so far, how this run computes it, and its first
    step and save, on a short random text; print the result.

    config: train.py's. The last two are the loop's own. Raises ValueError if something is wrong.
    """
    shape = (2, min(model.config.block_size, SHORT) + 1)
    text = torch.randint(model.config.vocab_size, shape, device=dist.device)
    idx = text[:, :-1].contiguous()
    targets = text[:, 1:].contiguous()
    problems = check_model(model, mode, idx, targets, forward_backward)
    if problems:
        raise ValueError(f"model.py: {'; '.join(problems)}")

    optimizer = build_optimizer(config, model, mode.dtype)
    optimizer_state(optimizer, model)  # refuses an optimizer that needs a closure
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
    model: GPT, mode: ComputeMode, idx: Tensor, targets: Tensor, forward_backward: Pass
) -> list[str]:
    """Return the faults of a model on a text idx, targets (B, T), and in this mode: a sentence
    each.

    Each pass has a fresh copy, since a pass may leave things in a model that cannot be copied. The
    model itself stays as it is.
    """
    source = copy.deepcopy(model).eval()
    seed_all(0, idx.device)
    for p in source.parameters():
        if not p.any():  # zeros would hide the gradients of all parameters before them
            nn.init.normal_(p, std=0.02)
    cpu_kernels.unload()  # the reference is plain torch
    with in_float32(source):
        problems = check_logits(source, idx, targets)
        # This copy has dropout, and all that the model does in training only.
        trained = copy.deepcopy(source).train()
        seed_all(0, idx.device)
        _, gradients = loss_and_gradients(forward_backward, trained, ComputeMode(), idx, targets)
        unreached = [name for name, gradient in gradients.items() if not gradient.any()]
        if unreached:
            more = f" and {len(unreached) - 1} more" if len(unreached) > 1 else ""
            problems.append(f"no gradient reaches {unreached[0]}{more}")
        reference = copy.deepcopy(source)
        loss, gradients = loss_and_gradients(
            forward_backward, reference, ComputeMode(), idx, targets
        )

    if mode.cpu_kernels:
        cpu_kernels.load()
    # Take several chunks, as long texts do: their gradients are added.
    mode = replace(mode, loss_chunks=max(3, mode.loss_chunks))
    computed = copy.deepcopy(source)
    apply_compute(computed, mode)
    found_loss, found = loss_and_gradients(forward_backward, computed, mode, idx, targets)
    is_tf32 = mode.dtype == "float32" and idx.device.type == "cuda"
    limit = TOLERANCE["tf32" if is_tf32 else mode.dtype]
    error = distance(found_loss, loss)
    if error > limit.loss:
        problems.append(
            f"{mode}: the loss differs from eager float32's by {error:.2g}, at most {limit.loss:g}"
        )
    errors = gradient_errors(found, gradients)
    worst = max(errors, key=errors.__getitem__)
    if errors[worst] > limit.gradient:
        problems.append(
            f"{mode}: the gradient of {worst} differs from eager float32's by "
            f"{errors[worst]:.2g}, at most {limit.gradient:g}"
        )
    return problems


@torch.no_grad()
def check_logits(source: GPT, idx: Tensor, targets: Tensor) -> list[str]:
    """Return the faults of the logits of copies of a model, in evaluation and in training, and of
    its loss.
    """
    problems = []
    limit = TOLERANCE["float32"]
    half = math.ceil(idx.size(1) / 2)
    # No order of the same tokens, whose mean a model may see.
    other_end = torch.cat((idx[:, :half], idx[:, :1].expand_as(idx[:, half:])), 1)
    for is_training in (False, True):
        model = copy.deepcopy(source).train(is_training)
        early = []
        for text in (idx, other_end):
            seed_all(0, idx.device)  # the same dropout
            early.append(model(text)[0][:, :half])
        error = distance(early[1], early[0], dim=-1)
        if error > limit.logits:
            problems.append(
                f"{'in training ' * is_training}tokens see later ones: their logits change by "
                f"{error:.2g} with the text after them"
            )

    model = copy.deepcopy(source)
    logits = model(idx)[0]  # (B, T, V)
    loss = named_losses(model(idx, targets))["loss"]
    expected = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)
    if distance(loss, expected, least=1.0) > limit.loss:
        problems.append(
            f"the loss {loss:.6g} is not the cross-entropy of the logits, {expected:.6g}"
        )
    x = model.transformer(idx)  # (B, T, C)
    error = distance(model.logits(x[:, -1]), model.logits(x)[:, -1], dim=-1)
    if error > limit.logits:
        problems.append(
            f"GPT.logits of one token alone differs by {error:.2g} from that of a text: it may "
            "look at no other token, so that the loss can be computed in chunks"
        )
    return problems


def loss_and_gradients(
    forward_backward: Pass, model: GPT, mode: ComputeMode, idx: Tensor, targets: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sum of the losses of a pass, and the gradients of the trained parameters by name,
    zeros if there is none.
    """
    losses = forward_backward(model, NO_SCALER, mode, idx, targets, 1.0)
    found = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            found[name] = torch.zeros_like(p) if p.grad is None else p.grad
    return torch.stack([*losses.values()]).sum(), found


def gradient_errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return |found - expected| / |expected| of each gradient by name; infinite for NaN.

    One that nearly vanishes is compared relative to all gradients together: it is rounding.
    """
    total = nn.utils.get_total_norm(expected.values()).item()
    errors = {}
    for name, gradient in expected.items():
        is_rounding = gradient.norm().item() <= 1e-5 * total
        errors[name] = distance(found[name], gradient, total if is_rounding else 1e-30)
    return errors
