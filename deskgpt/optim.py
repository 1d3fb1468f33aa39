"""The optimizers: AdamW, and Muon for hidden matrices with AdamW for the rest.

Each is one torch optimizer to the training loop and to checkpoints, with parameter groups,
state_dict and step().
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from deskgpt.distributed import is_dtensor, local
from model import GPT

# Coefficients of the odd quintic polynomial that brings singular values to between 0.7 and 1.2 in
# five iterations: Jordan et al. 2024, kellerjordan.github.io/posts/muon.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
# How the five iterations are grouped: within a group only the Gram matrix is iterated; the matrix
# itself is multiplied at the group's end. Square matrices gain nothing by it. For tall ones two
# groups are faster than five; a single one rounds too much in bfloat16 (docs/decisions.md).
APPLIED_AFTER = {"square": (1, 1, 1, 1, 1), "tall": (3, 2)}
MOST_GATHERED = 1 << 28  # elements of sharded matrices that are whole at once: 1 GiB


def make_optimizer(
    model: GPT,
    name: str,
    weight_decay: float,
    learning_rate: float,
    betas: tuple[float, float],
    momentum: float,
    muon_dtype: str = "float32",
) -> torch.optim.AdamW:
    """Return AdamW, or Muon for the blocks' matrices with AdamW for embeddings, head, norms and
    biases.

    Weight decay acts on matrices and embeddings; biases and the gains of norms have nothing to
    regularise. muon_dtype: of Muon's own matmuls, float32 or bfloat16.
    """
    if name not in ("adamw", "muon"):
        raise ValueError(
            f"optimizer={name} is not computed: make it in build_optimizer of train.py"
        )
    device = next(model.parameters()).device
    # One kernel for all tensors; these three have it in torch 2.11.
    fused = device.type in ("cuda", "cpu", "mps")
    options: dict[str, Any] = {"lr": learning_rate, "betas": betas, "fused": fused}
    for name_of, p in model.named_parameters():
        if p.is_complex():
            raise ValueError(
                f"{name_of} is complex, which no fused step and no checkpoint takes: make it real, "
                "(..., 2), and let the model compute with torch.view_as_complex of it"
            )
    hidden = set()  # matrices, for Muon
    if name == "muon":
        tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
        hidden = {p for p in model.transformer.h.parameters() if p.dim() == 2} - tables
    trained = [p for p in model.parameters() if p.requires_grad]
    muon = [p for p in trained if p in hidden]
    rest = [p for p in trained if p not in hidden]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    if not muon:
        return torch.optim.AdamW(groups, **options)
    groups.append({"params": muon, "weight_decay": weight_decay, "momentum": momentum})
    return Muon(groups, torch.bfloat16 if muon_dtype == "bfloat16" else torch.float32, **options)


def step_if_finite(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, grad_norm: Tensor
) -> None:
    """Take a step of any optimizer, unless the norm of the gradients is not finite: then nothing
    changes.

    On CUDA, an optimizer that skips by itself is told as GradScaler tells it, and nothing waits for
    the device. Raises ValueError if memory runs out, with half of the step done.
    """
    try:
        if scaler.is_enabled():  # it has looked at the gradients itself
            scaler.step(optimizer)
            scaler.update()
        elif grad_norm.device.type == "cuda" and skips_by_itself(optimizer):
            optimizer.found_inf = (~grad_norm.isfinite()).float()  # type: ignore[attr-defined]
            optimizer.step()
            del optimizer.found_inf  # type: ignore[attr-defined]
        elif grad_norm.isfinite():
            optimizer.step()
    except torch.OutOfMemoryError:
        raise ValueError(
            "out of memory in the optimizer's step; try --cuda_graph=False, half the --batch_size "
            "or a smaller model, and resume from the last checkpoint"
        ) from None


def skips_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its step changes nothing if its attribute found_inf is 1: torch's fused steps,
    and Muon's.

    A class that inherits from these and has a step of its own may not look at found_inf.
    """
    step = type(optimizer).step
    is_known = step.__module__ == __name__ or step.__module__.startswith("torch.optim.")
    return is_known and getattr(optimizer, "_step_supports_amp_scaling", False)


class Muon(torch.optim.AdamW):
    """AdamW, except that the matrices of groups with a `momentum` take orthogonalised momentum
    steps.

    Muon (Jordan et al. 2024) with Nesterov momentum. Steps are scaled by 0.2 * sqrt(larger side):
    they are then as long as AdamW's, and one learning rate and weight decay serve both (Moonlight,
    arXiv:2502.16982, section 2.2). torch.optim.Muon computes the same, but one matrix after the
    other, and a fused (3C, C) matrix as one. Here matrices of equal shape go through the iteration
    as one batch, wide ones transposed, q, k and v apart, and tall ones by their small Gram
    matrices. Every rank computes all of it; sharded matrices are gathered. The iteration runs in
    `dtype`.
    """

    def __init__(self, groups: Any, dtype: torch.dtype, **options: Any) -> None:
        super().__init__(groups, **options)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if "momentum" not in group:
                continue
            by_shape = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    part = as_tall_matrices(torch.empty(p.shape, device="meta"))[0]
                    by_shape[part.shape].append(p)
            for params in by_shape.values():
                n = len(params)
                if is_dtensor(params[0]):
                    n = max(1, MOST_GATHERED // params[0].numel())
                for first in range(0, len(params), n):
                    self._muon(params[first : first + n], group)
        super().step()

    def _muon(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Take the step of matrices whose parts are of one shape, as one batch."""
        from deskgpt.sharding import gathered, rows_of

        is_sharded = is_dtensor(params[0])
        for p in params:
            if not self.state[p]:
                self.state[p] = {
                    "step": torch.zeros((), device=p.device),
                    "momentum_buffer": torch.zeros_like(p),
                }
        weights = [local(p) for p in params]
        grads = [local(p.grad) for p in params]
        momenta = [local(self.state[p]["momentum_buffer"]) for p in params]
        do_step = torch.ones((), device=params[0].device)  # 1 for a step, 0 for one to skip
        decay_factor: float | Tensor = 1 - group["lr"] * group["weight_decay"]  # for weights
        # found_inf = 1 asks a fused optimizer to skip this step (GradScaler's protocol). Without
        # waiting for the device the step becomes a no-op: it adds 0 and decays by 1.
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None:
            do_step = 1 - found_inf
            decay_factor = torch.where(found_inf > 0, 1.0, decay_factor)
            for grad, momentum in zip(grads, momenta, strict=True):
                torch.where(found_inf > 0, momentum, grad, out=grad)
        # AdamW expects a step count in each parameter's state.
        torch._foreach_add_([self.state[p]["step"] for p in params], [do_step] * len(params))

        # Nesterov momentum, then the nearest matrices whose singular values are all near 1.
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        steps = list(torch._foreach_lerp(grads, momenta, group["momentum"]))
        if is_sharded:
            steps = [gathered(step, p) for step, p in zip(steps, params, strict=True)]
        parts = [part for step in steps for part in as_tall_matrices(step)]
        # Each element is cast once on its way in, and once on its way back.
        batch = parts[0].new_empty((len(parts), *parts[0].shape), dtype=self.dtype)
        torch._foreach_copy_(list(batch.unbind()), parts)
        u = orthogonalized(batch)
        if found_inf is not None:
            u = u * do_step
        torch._foreach_copy_(parts, list(u.unbind()))
        if is_sharded:
            steps = [rows_of(step, p) for step, p in zip(steps, params, strict=True)]

        torch._foreach_mul_(weights, decay_factor)
        torch._foreach_add_(weights, steps, alpha=-group["lr"] * 0.2 * parts[0].size(0) ** 0.5)
        for p in params:
            p.grad = None  # AdamW, which comes next, skips parameters without a gradient


def as_tall_matrices(x: Tensor) -> list[Tensor]:
    """Return x as matrices no wider than high, in the same memory; q, k and v apart if x is a fused
    (3C, C).
    """
    n = 3 if x.size(0) == 3 * x.size(1) else 1
    return [part.mT if part.size(0) < part.size(1) else part for part in x.chunk(n)]


def orthogonalized(x: Tensor) -> Tensor:
    """Matrices x (n, rows, columns), no wider than high, with singular values brought near 1, by
    Newton-Schulz in their dtype.

    Its five iterations leave singular values between 0.7 and 1.2. Compared with that, bfloat16's
    rounding is small. Each takes y to y @ p, where p is a polynomial of gram = y.mT @ y, and so
    gram to p @ gram @ p: several iterations of a tall y can multiply small matrices alone (Zhang et
    al. 2026, dao-lab.ai/blog/2026/gram-newton-schulz).
    """
    a, b, c = NEWTON_SCHULZ
    y = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    identity = torch.eye(y.size(2), dtype=y.dtype, device=y.device)
    is_tall = y.size(1) >= 2 * y.size(2)
    for iterations in APPLIED_AFTER["tall" if is_tall else "square"]:
        gram = y.mT @ y
        product = None if is_tall else y  # None: the identity
        for i in range(iterations):
            # a comes later: bfloat16 would round the sum.
            p = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            if product is None:
                product = torch.add(p, identity, alpha=a)
            else:
                product = torch.baddbmm(product, product, p, beta=a)
            if i + 1 < iterations:
                half = torch.baddbmm(gram, gram, p, beta=a)
                gram = torch.baddbmm(half, p, half, beta=a)
        y = y @ product if is_tall else product
    return y
