from __future__ import annotations

import collections
import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import assert_equal

from deskgpt.checkpoint import archive
from deskgpt.checkpoint.optimizer_state import OptimizerState
from deskgpt.compute.optimizer import Muon, make_optimizer, orthogonalized, step_if_finite, step_unless
from model import GPT, GPTConfig

CONFIG = GPTConfig(block_size=16, vocab_size=50, n_layer=2, n_head=2, n_embd=32, bias=True, tie_weights=False)


def model_with_gradients() -> GPT:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return model


def make(model: GPT, name: str) -> torch.optim.AdamW:
    return make_optimizer(model, name, 0.1, 1e-2, (0.9, 0.95), 0.9, muon_dtype="bfloat16")


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_parameter_has_one_group_and_only_matrices_decay(name):
    model = model_with_gradients()
    groups = make(model, name).param_groups
    owned = [p for group in groups for p in group["params"]]
    assert len(owned) == len(set(owned)) == len(list(model.parameters()))
    for group in groups:
        assert {p.dim() > 1 for p in group["params"]} == {group["weight_decay"] > 0}


def test_muon_has_the_matrices_of_the_blocks_and_nothing_else():
    model = model_with_gradients()
    [group] = [g for g in make(model, "muon").param_groups if "momentum" in g]
    names = {n for n, p in model.named_parameters() if any(p is q for q in group["params"])}
    kinds = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert names == {f"transformer.h.{i}.{kind}.weight" for i in range(2) for kind in kinds}


def test_muon_takes_the_steps_of_torchs_own_and_adamw_the_rest():
    """torch.optim.Muon gets q, k and v as the three matrices that they are."""
    model = model_with_gradients()
    optimizer = make(model, "muon")
    [group] = [g for g in optimizer.param_groups if "momentum" in g]
    expected, apart, grads = {}, [], {}
    for p in group["params"]:
        parts = [t.clone().requires_grad_() for t in p.detach().chunk(3 if p.size(0) == 3 * p.size(1) else 1)]
        expected[p] = parts
        apart += parts
    theirs = torch.optim.Muon(apart, lr=1e-2, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    rest = [p for p in model.parameters() if all(p is not q for q in group["params"])]
    others = copy.deepcopy(rest)
    decayed = [{"params": [q for q in others if q.dim() > 1], "weight_decay": 0.1}]
    decayed += [{"params": [q for q in others if q.dim() < 2], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(decayed, lr=1e-2, betas=(0.9, 0.95), fused=True)
    for step in range(3):
        torch.manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
            grads[p] = p.grad.clone()
        for p, parts in expected.items():
            for part, grad in zip(parts, grads[p].chunk(len(parts)), strict=True):
                part.grad = grad.contiguous()
        for p, q in zip(rest, others, strict=True):
            q.grad = grads[p]
        optimizer.step()
        theirs.step()
        adamw.step()
    for p, parts in expected.items():
        torch.testing.assert_close(p.detach(), torch.cat(parts).detach(), rtol=0, atol=3e-4)  # bfloat16 inside
    for p, q in zip(rest, others, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 32, 32), (2, 16, 64), (1, 8, 256)])
def test_orthogonalized_matrices_have_singular_values_near_one_and_the_directions_they_had(shape, dtype):
    torch.manual_seed(1)
    x = torch.randn(shape) * 100 + torch.randn(shape[0], 1, 1)
    y = orthogonalized(x, dtype)
    singular = torch.linalg.svdvals(y)
    large = torch.linalg.svdvals(x) > 0.05 * torch.linalg.svdvals(x).amax(1, keepdim=True)
    assert singular[large].min() > 0.6
    assert singular.max() < 1.3
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    rotated = u.mT @ y @ vh.mT  # near a diagonal of ones
    assert (rotated - torch.diag_embed(rotated.diagonal(dim1=1, dim2=2))).abs().max() < 0.1


def test_step_whose_float16_gradients_overflowed_changes_nothing():
    model = model_with_gradients()
    optimizer = make(model, "muon")
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    for broken in (False, True, False):
        before = [p.clone() for p in model.parameters()]
        scaler.scale(torch.stack([(p**2).sum() for p in model.parameters()]).sum()).backward()
        if broken:
            grads: list[Any] = [p.grad for p in model.parameters()]
            grads[5].view(-1)[0] = torch.inf
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        same = [torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
        assert all(same) if broken else not any(same)
        assert all(p.isfinite().all() for p in model.parameters())


def step_on_device(optimizer: torch.optim.AdamW, norm: torch.Tensor) -> None:
    """As CUDA does it."""
    step_unless(optimizer, ~norm.isfinite())


def step_on_cpu(optimizer: torch.optim.AdamW, norm: torch.Tensor) -> None:
    step_if_finite(optimizer, torch.amp.GradScaler("cpu", enabled=False), norm)


@pytest.mark.parametrize("take_step", [step_on_device, step_on_cpu])
@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_step_with_a_bad_gradient_leaves_weights_moments_and_counters_as_they_are(name, bad, take_step):
    model = model_with_gradients()
    optimizer = make(model, name)
    params = list(model.parameters())
    for is_bad in (True, False, True, False):  # the first one finds no state yet
        for p in params:
            p.grad = torch.randn_like(p)
        before = copy.deepcopy([p.detach() for p in params])
        states = copy.deepcopy([optimizer.state[p] for p in params])
        if is_bad:
            first: Any = params[3].grad
            first.view(-1)[1] = bad
        norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        torch.nn.utils.clip_grads_with_norm_(params, 1.0, norm)  # which spreads NaN to all gradients
        take_step(optimizer, norm)
        for p, was, state in zip(params, before, states, strict=True):
            assert torch.equal(p, was) == is_bad
            for key, value in optimizer.state[p].items():
                if is_bad:
                    assert torch.equal(value, state.get(key, torch.zeros_like(value))), key
                else:
                    assert not torch.equal(value, state.get(key, torch.zeros_like(value))), key


def test_skipped_steps_do_not_change_the_steps_after_them():
    for name in ("adamw", "muon"):
        weights = []
        for skips in (0, 2):
            model = model_with_gradients()
            optimizer = make(model, name)
            for step in range(3):
                for is_bad in (True,) * skips + (False,):
                    torch.manual_seed(step)
                    for p in model.parameters():
                        p.grad = torch.randn_like(p)
                    norm = torch.tensor(torch.nan if is_bad else 1.0)
                    step_on_device(optimizer, norm)
            weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        assert torch.equal(*weights)


def test_muon_leaves_matrices_without_gradients_alone_and_its_state_travels():
    model = model_with_gradients()
    optimizer = make(model, "muon")
    assert isinstance(optimizer, Muon)
    block: Any = model.transformer.h[0]
    frozen = block.mlp.c_fc.weight
    frozen.grad = None
    before = frozen.clone()
    optimizer.step()
    assert torch.equal(frozen, before)
    again = make(model, "muon")
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, state in optimizer.state.items():
        assert state.keys() == again.state[p].keys()
        for key in state:
            assert torch.equal(state[key], again.state[p][key])


# ---- optimizers of a user's own ------------------------------------------------------------------------------


class Momentum(torch.optim.Optimizer):
    """SGD with momentum, which is kept somewhere else than in `state`."""

    def __init__(self, params: Any, lr: float, keys: str) -> None:
        super().__init__(params, {"lr": lr, "slow": None})
        self.keys = keys
        self.momentum: dict[Any, Any] = collections.defaultdict(lambda: None)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if self.keys == "group":
                group["slow"] = group["slow"] or [torch.zeros_like(p) for p in group["params"]]
            for i, p in enumerate(group["params"]):
                key = {"parameter": p, "id": id(p), "tuple": (0, i), "group": i}[self.keys]
                kept = group["slow"] if self.keys == "group" else self.momentum
                kept[key] = p.grad.clone() if kept[key] is None else kept[key].lerp(p.grad, 0.1)
                p.sub_(kept[key], alpha=group["lr"])


class Both(torch.optim.Optimizer):
    """Two optimizers as one."""

    def __init__(self, model: GPT, lr: float) -> None:
        matrices = [p for p in model.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if p.dim() != 2]
        self.parts = [torch.optim.AdamW(matrices, lr=lr), torch.optim.SGD(rest, lr=lr, momentum=0.9)]
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


class BothByThemselves(Both):
    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, saved in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(saved)


class Lookahead(torch.optim.Optimizer):
    """Every third step goes half the way from the weights three steps ago (arXiv:1907.08610)."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.state = inner.state
        for group in self.param_groups:
            group["count"] = 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            group["count"] += 1
            for p, s in zip(group["params"], slow, strict=True):
                if group["count"] % 3 == 0:
                    p.copy_(s.lerp_(p, 0.5))


OWN: dict[str, Callable[[GPT], Any]] = {
    "by parameter": lambda model: Momentum(model.parameters(), 0.1, "parameter"),
    "by id": lambda model: Momentum(model.parameters(), 0.1, "id"),
    "by a tuple": lambda model: Momentum(model.parameters(), 0.1, "tuple"),
    "in groups": lambda model: Momentum(model.parameters(), 0.1, "group"),
    "two": lambda model: Both(model, 0.1),
    "two with a state_dict": lambda model: BothByThemselves(model, 0.1),
    "one in another": lambda model: Lookahead(torch.optim.AdamW(model.parameters(), lr=0.1)),
}


@pytest.mark.parametrize("name", OWN)
def test_optimizer_of_ones_own_goes_on_exactly_wherever_it_keeps_its_state(name, tmp_path):
    def start() -> tuple[GPT, Any, OptimizerState]:
        model = model_with_gradients()
        optimizer = OWN[name](model)
        return model, optimizer, OptimizerState(optimizer, model)

    def steps(model: GPT, optimizer: Any, first: int, last: int) -> None:
        for step in range(first, last):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (1 + step)
            for i, p in enumerate(model.parameters()):
                p.grad = torch.full_like(p, math.sin(step + i))
            optimizer.step()

    model, optimizer, kept = start()
    before = kept.snapshot()
    weights = copy.deepcopy(model.state_dict())
    steps(model, optimizer, 0, 2)
    kept.go_back(before)
    model.load_state_dict(weights)
    steps(model, optimizer, 0, 4)
    with open(tmp_path / "state", "w+b") as file:
        archive.write({"model": model.state_dict(), "optimizer": kept.state()}, file)
    steps(model, optimizer, 4, 8)

    resumed, its_optimizer, its_kept = start()
    saved = archive.load(tmp_path / "state")
    resumed.load_state_dict(saved["model"])
    its_kept.load(saved["optimizer"], "out")
    steps(resumed, its_optimizer, 4, 8)
    undisturbed, other_optimizer, _ = start()
    steps(undisturbed, other_optimizer, 0, 8)
    assert_equal(dict(model.state_dict()), dict(undisturbed.state_dict()))
    assert_equal(dict(resumed.state_dict()), dict(undisturbed.state_dict()))
