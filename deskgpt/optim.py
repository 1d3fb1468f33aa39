"""The optimizers: AdamW, and Muon for hidden matrices with AdamW for the rest.

Each is one torch optimizer to the training loop and to checkpoints, with parameter groups,
state_dict and step().
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_map_only

from deskgpt.distributed import is_dtensor, local
from deskgpt.errors import reason
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
    muon: list[Tensor] = []
    rest: list[Tensor] = []
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    for name_of, p in model.named_parameters():
        is_hidden_matrix = name_of.startswith("transformer.h.") and p.dim() == 2 and p not in tables
        if p.requires_grad and name == "muon" and is_hidden_matrix:
            muon.append(p)
        elif p.requires_grad:
            rest.append(p)
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    if not muon:
        return torch.optim.AdamW(groups, **options)
    groups.append({"params": muon, "weight_decay": weight_decay, "momentum": momentum})
    return Muon(groups, torch.bfloat16 if muon_dtype == "bfloat16" else torch.float32, **options)


def keep_rates_of_groups(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set `lr_scale` of each group that has a learning rate of its own: its share of learning_rate,
    for the whole run.

    The loop sets each group's `lr` anew at every step. A group that has an `lr_scale` keeps that.
    Raises ValueError if learning_rate is 0, of which nothing has a share.
    """
    for group in optimizer.param_groups:
        own = group.get("lr")
        if own in (None, learning_rate, optimizer.defaults.get("lr")) or "lr_scale" in group:
            continue
        if not learning_rate:
            raise ValueError(
                f"a group of parameters has lr={own:g}, which is no share of learning_rate=0"
            )
        group["lr_scale"] = own / learning_rate


def step_if_finite(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, grad_norm: Tensor
) -> None:
    """Take a step of any optimizer, unless the norm of the gradients is not finite: then nothing
    changes.

    On CUDA, an optimizer that skips by itself is told as GradScaler tells it, and nothing waits for
    the device. Raises ValueError if memory runs out, with half of the step done.
    """
    try:
        _step_if_finite(optimizer, scaler, grad_norm)
    except torch.OutOfMemoryError:
        raise ValueError(
            "out of memory in the optimizer's step; try --cuda_graph=False, half the --batch_size "
            "or a smaller model, and resume from the last checkpoint"
        ) from None


def _step_if_finite(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, grad_norm: Tensor
) -> None:
    if scaler.is_enabled():  # it has looked at the gradients itself
        scaler.step(optimizer)
        scaler.update()
    elif grad_norm.device.type == "cuda" and skips_by_itself(optimizer):
        optimizer.found_inf = (~grad_norm.isfinite()).float()  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.found_inf  # type: ignore[attr-defined]
    elif grad_norm.isfinite():
        optimizer.step()


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
            if "momentum" in group:
                self._muon(group)
                for p in group["params"]:
                    p.grad = None  # AdamW skips parameters without a gradient
        super().step()

    def _muon(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
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
        decay_factor: float | Tensor = 1 - group["lr"] * group["weight_decay"]  # of the weights
        # found_inf = 1 asks a fused optimizer to skip this step (GradScaler's protocol). Without
        # waiting for the device the step becomes a no-op: it adds 0 and decays by 1.
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None:
            do_step = 1 - found_inf
            decay_factor = torch.where(found_inf > 0, 1.0, decay_factor)
            for grad, momentum in zip(grads, momenta, strict=True):
                torch.where(found_inf > 0, momentum, grad, out=grad)
        # Which AdamW expects
        torch._foreach_add_([self.state[p]["step"] for p in params], [do_step] * len(params))
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        steps = list(torch._foreach_lerp(grads, momenta, group["momentum"]))
        torch._foreach_mul_(weights, decay_factor)
        by_shape = defaultdict(list)
        for i, p in enumerate(params):
            # Ranks would gather a DTensor
            by_shape[as_tall_matrices(torch.empty(p.shape, device="meta"))[0].shape].append(i)
        for shape, indices in by_shape.items():
            n = len(indices)
            if is_dtensor(params[0]):
                n = max(1, MOST_GATHERED // params[indices[0]].numel())
            for first in range(0, len(indices), n):
                self._orthogonalize(steps, params, indices[first : first + n], do_step)
            alpha = -group["lr"] * 0.2 * max(shape) ** 0.5
            torch._foreach_add_(
                [weights[i] for i in indices], [steps[i] for i in indices], alpha=alpha
            )

    def _orthogonalize(
        self, steps: list[Tensor], params: list[Tensor], indices: list[int], do_step: Tensor
    ) -> None:
        """Orthogonalize the chosen steps, whose parts are of one shape, as one batch."""
        from deskgpt.sharding import gathered, rows_of

        is_sharded = is_dtensor(params[0])
        matrices = [gathered(steps[i], params[i]) if is_sharded else steps[i] for i in indices]
        views = [part for matrix in matrices for part in as_tall_matrices(matrix)]
        u = orthogonalized(torch.stack(views), self.dtype) * do_step
        torch._foreach_copy_(views, list(u.unbind()))
        if is_sharded:
            for i, matrix in zip(indices, matrices, strict=True):
                steps[i] = rows_of(matrix, params[i])


def as_tall_matrices(x: Tensor) -> list[Tensor]:
    """Return x as matrices no wider than high, in the same memory; q, k and v apart if x is a fused
    (3C, C).
    """
    n = 3 if x.size(0) == 3 * x.size(1) else 1
    return [part.mT if part.size(0) < part.size(1) else part for part in x.chunk(n)]


def orthogonalized(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Matrices x (n, rows, columns), no wider than high, with singular values brought near 1, by
    Newton-Schulz in dtype.

    Its five iterations leave singular values between 0.7 and 1.2. Compared with that, bfloat16's
    rounding is small. Each takes y to y @ p, where p is a polynomial of gram = y.mT @ y, and so
    gram to p @ gram @ p: several iterations of a tall y can multiply small matrices alone (Zhang et
    al. 2026, dao-lab.ai/blog/2026/gram-newton-schulz).
    """
    a, b, c = NEWTON_SCHULZ
    y = x.to(dtype)
    y = y / (y.norm(dim=(1, 2), keepdim=True) + 1e-7)
    identity = torch.eye(y.size(2), dtype=dtype, device=y.device)
    is_tall = y.size(1) >= 2 * y.size(2)
    for iterations in APPLIED_AFTER["tall" if is_tall else "square"]:
        gram = y.mT @ y
        product = identity.expand_as(gram) if is_tall else y
        for i in range(iterations):
            # + a, which bfloat16 would round with it
            p = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            product = torch.baddbmm(product, product, p, beta=a)
            if i + 1 < iterations:
                half = torch.baddbmm(gram, gram, p, beta=a)
                gram = torch.baddbmm(half, p, half, beta=a)
        y = y @ product if is_tall else product
    return y.type_as(x)


# ---- the optimizer's state -----------------------------------------------------------------------


OUR_OPTIMIZERS = (torch.optim.AdamW, Muon)
# In each group: what the run sets, and what suits the machine.
SET_BY_THE_RUN = ("params", "lr", "lr_scale", "fused", "foreach", "capturable")
SET_BY_A_SCALER = {"grad_scale", "found_inf"}  # attributes, during a step


class OptimizerState:
    """An optimizer's state, as `state` and `load` give and take it.

    To be made before the optimizer's first step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: GPT) -> None:
        """Raises ValueError if the optimizer keeps something that a checkpoint could not give back.

        If that appears later, the step in which it does raises ValueError.
        """
        self.optimizer = optimizer
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        name_of: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self.names = [
            name_of.get(p, f"a parameter of its own, {i}") for i, p in enumerate(self.params)
        ]
        attributes(optimizer)
        optimizer.register_step_post_hook(attributes)  # type: ignore[arg-type]

    def state(self) -> dict[str, Any]:
        """Return plain values and tensors for a checkpoint.

        Raises ValueError if that would lose something.
        """
        return self.optimizer.state_dict() | {
            "names": self.names,
            "class": type(self.optimizer).__name__,
            "attributes": attributes(self.optimizer),
        }

    def load(self, state: dict[str, Any] | None, source: str) -> None:
        """Take back what `state` has given; full tensors of rank 0 if the model is sharded, on all
        ranks at once.

        Raises ValueError, naming `source`, if the state does not belong to the model or the
        optimizer.
        """
        if not state:
            raise ValueError(
                f"{source} has no optimizer state: begin a new run with its weights: "
                f"--init_from={source}"
            )
        try:
            theirs = state.get("class", "AdamW")  # nanoGPT's has no class
            if theirs == type(self.optimizer).__name__:
                self._load(state)
                return
        except Exception as e:  # an untrusted state can raise nearly anything
            raise ValueError(
                f"{source}: the optimizer state does not fit the model ({reason(e)})"
            ) from None
        remedy = (
            f"take --optimizer={theirs.lower()}"
            if theirs in ("AdamW", "Muon")
            else "continue with that one"
        )
        raise ValueError(
            f"{source} was trained with another optimizer, {str(theirs)[:80]}: {remedy}, "
            f"or begin a new run with its weights: --init_from={source}"
        )

    def _load(self, state: dict[str, Any]) -> None:
        from deskgpt.sharding import sharded_as

        own = self.optimizer.param_groups
        theirs = state["param_groups"]
        if state.get("names", self.names) != self.names:
            raise ValueError("its parameters differ, or are in another order")
        if [len(group["params"]) for group in theirs] != [len(group["params"]) for group in own]:
            raise ValueError("its groups of parameters differ")
        numbers = [i for group in theirs for i in group["params"]]
        if type(self.optimizer) in OUR_OPTIMIZERS:
            check_moments(own, state["state"], numbers)
        groups = []
        for mine, saved in zip(own, theirs, strict=True):
            saved.pop("lr_scale", None)
            set_now = mine if type(self.optimizer) in OUR_OPTIMIZERS else SET_BY_THE_RUN
            kept = {name: mine[name] for name in set_now if name in mine and name != "params"}
            groups.append(
                tree_map_only(Tensor, lambda x: x.to(self.params[0].device), saved | kept)
            )
        known = attributes(self.optimizer)
        vars(self.optimizer).update(
            {k: v for k, v in state.get("attributes", {}).items() if k in known}
        )
        for number, p in zip(numbers, self.params, strict=True):
            values = state["state"].get(number, {}) if is_dtensor(p) else {}
            for kind, value in values.items():
                if isinstance(value, Tensor) and value.dim():
                    # In place, so that full ones are freed one by one.
                    values[kind] = sharded_as(value, p)
        self.optimizer.load_state_dict({"state": state["state"], "param_groups": groups})


def attributes(optimizer: torch.optim.Optimizer, *_: Any) -> dict[str, Any]:
    """Return the numbers and texts that a user's class has as attributes; {} for torch's classes
    and ours.

    Raises ValueError if it has anything else there, such as tensors, arrays or objects, or a
    state_dict of its own.
    """
    torchs: Any = torch.optim.Optimizer
    own: Any = type(optimizer)
    if own is Muon or own.__module__.startswith("torch.optim."):
        return {}
    known = vars(torchs([torch.zeros(1)], {})).keys() | SET_BY_A_SCALER
    found = {name: value for name, value in vars(optimizer).items() if name not in known}
    odd = [
        name
        for name, value in found.items()
        if not isinstance(value, bool | int | float | str | None)
    ]
    if (own.state_dict, own.load_state_dict) != (torchs.state_dict, torchs.load_state_dict):
        odd = ["a state_dict of its own"]
    if odd:
        raise ValueError(
            f"{own.__name__} keeps state in {odd[0]}, which checkpoints would lose: keep "
            "tensors in `state`, numbers in attributes"
        )
    return found


def check_moments(groups: list[dict[str, Any]], state: dict[int, Any], numbers: list[int]) -> None:
    """Raise ValueError if AdamW's or Muon's moments have another kind or shape, which fused kernels
    do not check.

    Parameters that got no gradient yet have none.
    """
    params = [(p, group) for group in groups for p in group["params"]]
    group_of = dict(zip(numbers, params, strict=True))
    for i, moments in state.items():
        p, group = group_of[i]
        kinds = ["momentum_buffer"] if "momentum" in group else ["exp_avg", "exp_avg_sq"]
        if not (float(moments["step"]) >= 0 and moments.keys() >= set(kinds)):
            raise ValueError(f"parameter {i} has not a step and the moments {', '.join(kinds)}")
        for kind, m in moments.items():
            if kind != "step" and (m.shape != p.shape or m.dtype != p.dtype):
                raise ValueError(f"{kind} of parameter {i} has not the shape {tuple(p.shape)}")
