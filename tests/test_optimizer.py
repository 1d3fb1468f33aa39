import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from conftest import assert_equal, raises_one_line

from deskgpt.checkpoint import read_ckpt_file, savable, write_ckpt_file
from deskgpt.optim import NEWTON_SCHULZ, make_optimizer, orthogonalized, step_if_finite
from deskgpt.train_state import load_optimizer, optimizer_state
from model import GPT, GPTConfig
from train import TrainConfig, build_optimizer

CONFIG = GPTConfig(
    block_size=16, vocab_size=50, n_layer=2, n_head=2, n_embd=32, bias=True, tie_weights=False
)


def model_with_gradients() -> GPT:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return model


def make(model: GPT, name: str) -> torch.optim.AdamW:
    return make_optimizer(model, name, 0.1, 1e-2, (0.9, 0.95), 0.9, muon_dtype="bfloat16")


def test_muon_computes_in_the_dtype_of_the_run_not_in_what_a_ranks_own_device_does_fastest():
    config = TrainConfig(optimizer="muon")
    for dtype in ("float32", "bfloat16"):
        optimizer: Any = build_optimizer(config, GPT.without_storage(CONFIG), dtype)
        assert optimizer.dtype == getattr(torch, dtype)


def test_muon_takes_the_steps_of_torchs_muon_and_adamw_the_rest():
    """torch.optim.Muon gets q, k and v as the three matrices that they are, and no table."""
    model = model_with_gradients()
    model.transformer.h[0].table = torch.nn.Embedding(3, 32)
    optimizer = make(model, "muon")
    other = copy.deepcopy(model)
    adamw = make(other, "adamw")
    apart = {}
    for p in optimizer.param_groups[-1]["params"]:
        n = 3 if p.size(0) == 3 * p.size(1) else 1
        apart[p] = [part.clone().requires_grad_() for part in p.detach().chunk(n)]
    assert {*apart} == {
        p
        for name, p in model.named_parameters()
        if p.dim() > 1 and name.startswith("transformer.h.") and "table" not in name
    }
    matrices = [part for parts in apart.values() for part in parts]
    reference = torch.optim.Muon(
        matrices, lr=1e-2, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(3):
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for p, parts in apart.items():
            for part, grad in zip(parts, p.grad.chunk(len(parts)), strict=True):
                part.grad = grad.contiguous()
        for each in (optimizer, reference, adamw):
            each.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        if p in apart:  # both iterate in bfloat16 and round at other places
            torch.testing.assert_close(p.detach(), torch.cat(apart[p]).detach(), rtol=0, atol=5e-4)
        else:
            assert torch.equal(p, q)


@pytest.mark.parametrize("rows", [64, 256])
def test_orthogonalized_matrix_is_that_of_newton_schulz_in_double_precision(rows):
    torch.manual_seed(1)
    falling = torch.linspace(0, 1, 64)
    first = (torch.arange(64) < 1).float()
    for singular in (torch.ones(64), 10 ** (-8 * falling), 1 + 99 * first):
        u = torch.linalg.qr(torch.randn(rows, 64, dtype=torch.float64))[0]
        v = torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64))[0]
        x = (u * singular) @ v.mT
        expected = x / x.norm()
        a, b, c = NEWTON_SCHULZ
        for _ in range(5):
            gram = expected.mT @ expected
            expected = a * expected + expected @ (b * gram + c * gram @ gram)
        found = orthogonalized(x.float()[None])[0]
        assert (found - expected).norm() <= 1e-3 * expected.norm()
        rough = orthogonalized(x.bfloat16()[None])[0].float()
        assert torch.linalg.matrix_norm(rough, 2) < 1.3


@pytest.mark.parametrize("how", ["as a CPU does", "as CUDA does", "with a loss scale"])
@pytest.mark.parametrize(("name", "bad"), [("adamw", -torch.inf), ("muon", torch.nan)])
def test_step_with_a_bad_gradient_leaves_weights_moments_and_counters_as_they_are(name, bad, how):
    model = model_with_gradients()
    optimizer = make(model, name)
    params: list[Any] = list(model.parameters())
    for is_bad in (True, False, True, False):  # the first one finds no state yet
        for p in params:
            p.grad = torch.randn_like(p)
        before = copy.deepcopy([(p.detach(), optimizer.state[p]) for p in params])
        if is_bad:
            params[3].grad.view(-1)[1] = bad
        norm = torch.nn.utils.clip_grad_norm_(params, 1.0)  # which spreads NaN to all gradients
        if how == "as CUDA does":
            optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
            optimizer.step()
        else:
            scaler = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=how == "with a loss scale")
            scaler.scale(torch.zeros(()))
            scaler.unscale_(optimizer)
            step_if_finite(optimizer, scaler, norm)
        for p, (was, state) in zip(params, before, strict=True):
            assert torch.equal(p, was) == is_bad
            for key, value in optimizer.state[p].items():
                assert torch.equal(value, state.get(key, torch.zeros_like(value))) == is_bad, key


# ---- optimizers of a user's own ------------------------------------------------------------------


class Own(torch.optim.Optimizer):
    """SGD with momentum, which it keeps in its groups, and a count in an attribute that its first
    step makes, a number of NumPy.
    """

    hidden: Any

    def __init__(self, model):
        super().__init__(model.parameters(), {"lr": 0.1, "slow": None})

    @torch.no_grad()
    def step(self, closure=None):
        self.steps = getattr(self, "steps", np.int64(0)) + 1
        for group in self.param_groups:
            group["slow"] = group["slow"] or [torch.zeros_like(p) for p in group["params"]]
            for p, slow in zip(group["params"], group["slow"], strict=True):
                p.sub_(slow.lerp_(p.grad, 0.1), alpha=group["lr"] / self.steps)


def take_steps(optimizer: torch.optim.Optimizer, model: GPT, first: int, last: int) -> None:
    for step in range(first, last):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step)
        for i, p in enumerate(model.parameters()):
            p.grad = torch.full_like(p, math.sin(step + i))
        optimizer.step()


class WithStateDict(torch.optim.SGD):
    """SGD whose steps grow, with a state_dict of its own."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.1, momentum=0.9)
        self.counts = np.zeros(1)

    def step(self, closure=None):
        self.counts += 1
        self.param_groups[0]["lr"] *= float(self.counts[0])
        super().step()

    def state_dict(self):
        return {"sgd": super().state_dict(), "count": float(self.counts[0])}

    def load_state_dict(self, state):
        self.counts[0] = state["count"]
        super().load_state_dict(state["sgd"])


@pytest.mark.parametrize(
    "kind", [Own, lambda model: torch.optim.NAdam(model.parameters()), WithStateDict]
)
def test_optimizer_of_a_users_own_resumes_exactly(kind, tmp_path):
    full, half, resumed = (model_with_gradients() for _ in range(3))
    take_steps(kind(full), full, 0, 8)
    optimizer = kind(half)
    take_steps(optimizer, half, 0, 4)
    rate = optimizer.param_groups[0]["lr"]
    state = {"model": half.state_dict(), "optimizer": optimizer_state(optimizer, half)}
    write_ckpt_file(savable(state), tmp_path / "state")
    saved = read_ckpt_file(tmp_path / "state")
    resumed.load_state_dict(saved["model"])
    optimizer = kind(resumed)
    load_optimizer(optimizer, resumed, saved["optimizer"], "out")
    assert optimizer.param_groups[0]["lr"] == rate  # also of a run that takes no further step
    take_steps(optimizer, resumed, 4, 8)
    assert_equal(dict(resumed.state_dict()), dict(full.state_dict()))


@pytest.mark.parametrize("held", [torch.ones(2), np.ones(1), object()])
def test_optimizer_that_hides_state_is_refused_by_name(held):
    model = model_with_gradients()
    optimizer = Own(model)
    optimizer.hidden = held
    with raises_one_line("Own", "hidden", "`state`"):
        optimizer_state(optimizer, model)


def test_states_of_other_parameters_or_another_optimizer_are_refused():
    model = model_with_gradients()
    optimizer = make(model, "muon")
    optimizer.step()
    saved = copy.deepcopy(optimizer_state(optimizer, model))

    def load(**wrong):
        load_optimizer(optimizer, model, copy.deepcopy(saved | wrong), "out")

    load(state={})  # of a run without a step
    moments = saved["state"]
    first, *others = saved["param_groups"]
    for wrong in (
        {"state": None},
        {"state": moments | {0: moments[0] | {"exp_avg": torch.zeros(3)}}},
        {"param_groups": [3, 3]},
        {"param_groups": [first | {"params": [0]}, *others]},
        {"param_groups": [first | {"weight_decay": math.nan}, *others]},
        {"param_groups": [first | {"betas": (0.9, 1.0)}, *others]},
    ):
        with raises_one_line("out", "does not fit the model"):
            load(**wrong)
    with raises_one_line("another order"):
        load(names=saved["names"][::-1])
    with raises_one_line("another optimizer", "SGD", "--init_from=out"):
        load(**{"class": "SGD"})


def test_setting_that_is_changed_counts_and_otherwise_what_main_has_made_of_it():
    model = model_with_gradients()
    saved = optimizer_state(make(model, "adamw"), model)
    saved["param_groups"][0] |= {"weight_decay": 0.3, "betas": (0.5, 0.6), "eps": 1e-3}
    for is_same, expected in ((True, (0.3, (0.5, 0.6), 1e-3)), (False, (0.1, (0.9, 0.95), 1e-3))):
        optimizer = make(model, "adamw")
        load_optimizer(optimizer, model, copy.deepcopy(saved), "out", is_same)
        group = optimizer.param_groups[0]
        assert (group["weight_decay"], group["betas"], group["eps"]) == expected
