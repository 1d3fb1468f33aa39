"""How a run computes is chosen by rule and compiled; and what --dry_run finds wrong with a model, in one sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from conftest import assert_equal, assert_one_line, events, raises_one_line, tiny
from tiny_models import MODERN, SMALL, make, tokens
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import model as definition
from deskgpt.compute import compiling
from deskgpt.compute.check import check_model
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.variant import COMPILE_FROM_S, Variant, apply_variant, choose_variant, saved_variant
from deskgpt.kernels import causal_attention, cpu_kernels
from deskgpt.run.init_state import batching_of
from deskgpt.run.schedule import Schedule, TimeBudget
from model import GPT
from train import main

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


# ---- chosen by rule ------------------------------------------------------------------------------------------


@pytest.fixture
def card(monkeypatch):
    """Set up a card with Triton, and a machine without a compiler for our kernels."""
    monkeypatch.setattr("deskgpt.system.hardware.has_triton", lambda device: True)
    monkeypatch.setattr("deskgpt.system.peaks.fast_dtype", lambda device: "bfloat16")
    monkeypatch.setattr(cpu_kernels, "may_exist", lambda: False)


def chosen(device: torch.device = CUDA, seconds: float = 1e4, **settings: Any) -> Variant:
    usual: dict[str, Any] = {"dtype": "auto", "kernels": "auto", "compile": "auto", "recompute": "none"}
    usual |= {"is_sharded": False, "predicted_s": lambda dtype: seconds, "earlier": {}}
    return choose_variant(DistContext(device), **usual | settings)


def test_card_computes_in_bfloat16_compiled_unless_the_run_is_short_and_a_cpu_compiles_only_if_asked(card):
    assert chosen() == Variant("bfloat16", True, False, "none", "bfloat16")
    assert str(chosen()) == "bfloat16, residual stream in bfloat16, compiled"
    assert chosen(seconds=COMPILE_FROM_S - 1) == Variant("bfloat16")
    assert chosen(recompute="selective") == Variant("bfloat16", recompute="selective")
    assert chosen(dtype="float32", recompute="full") == Variant("float32", True, recompute="full")
    assert chosen(is_sharded=True, dtype="float16").dtype == "float32"
    assert chosen(CPU) == Variant("bfloat16")
    assert chosen(CPU, compile=True).compiled
    with raises_one_line("cpu_kernels=True", "--cpu_kernels=auto"):
        chosen(CPU, kernels=True)
    with raises_one_line("selective", "--compile=False", "full"):
        chosen(compile=True, recompute="selective")


def test_resumed_run_computes_as_before_on_the_same_kind_of_device(card):
    earlier = Variant("float32", True, False).saved(CUDA)
    assert chosen(seconds=0.0, earlier=saved_variant(earlier, CUDA)) == Variant("float32", True)
    assert saved_variant(earlier, CPU) == {}
    old = {"dtype": "bfloat16", "compiled": False, "attention": "kernels", "device": "cpu"}  # as b3fc854 wrote it
    assert saved_variant(old, CPU) == {"dtype": "bfloat16", "compiled": False, "cpu_kernels": True}
    assert saved_variant(None, CPU) == saved_variant({"dtype": "int4", "compiled": 1}, CPU) == {}


def test_variant_is_what_the_model_computes_in():
    model = make(replace(SMALL, n_layer=1))
    seen = []
    model.transformer.h[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    idx = tokens(1, 8)
    for residual_dtype in ("float32", "bfloat16"):
        apply_variant(model, Variant("bfloat16", residual_dtype=residual_dtype))
        with torch.autocast("cpu", torch.bfloat16):
            model(idx, idx)
    assert seen == [torch.float32, torch.bfloat16]


def test_first_plan_of_max_minutes_follows_the_prediction_and_later_ones_the_clock(chars, tmp_path, monkeypatch):
    c = tiny(chars, tmp_path, max_minutes=1.0, max_iters=10**6, warmup_iters=10**5, eval_interval=100)
    monkeypatch.setattr("time.perf_counter", lambda: 0.0)
    budget = TimeBudget(c, 0.0, DistContext(CPU))
    schedule, batching = budget.first_plan(batching_of(c, DistContext(CPU)), [800, 800], 0.1)
    assert 400 < schedule.max_iters <= 600
    assert schedule.warmup_iters == -(-schedule.max_iters // 10)
    n_evaluations = 2 + schedule.max_iters // 100
    window_s = 0.1 / batching.sequences / 3
    assert 2 * batching.eval_windows * window_s * n_evaluations <= 0.25 * 60
    assert batching.eval_windows >= 8 * 4


@pytest.mark.slow
def test_run_of_minutes_ends_in_time_and_keeps_to_max_iters(chars, tmp_path):
    main(tiny(chars, tmp_path / "long", max_minutes=0.15, max_iters=10**6, eval_interval=10**5))
    [end] = events(tmp_path / "long", "end")
    assert 10 < end["iter"] < 10**6
    assert end["train_s"] + end["eval_s"] < 0.15 * 60 + 2
    last = events(tmp_path / "long", "iter")[-1]
    assert last["lr"] == pytest.approx(1e-3, rel=0.5)  # the schedule ends with the run
    main(tiny(chars, tmp_path / "short", max_minutes=10.0, max_iters=5))
    assert events(tmp_path / "short", "end")[0]["iter"] == 5
    assert Schedule.of(tiny(chars, tmp_path)).end == 6


# ---- compiled ------------------------------------------------------------------------------------------------


def test_gcc_before_14_is_called_without_the_copies_that_it_gets_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("sys.platform", "linux")
    compiler = tmp_path / "g++"
    for version, needed in (("13.3.0", True), ("14.2.0", False), ("", False)):
        compiler.write_text(f"#!/bin/sh\n[ -n '{version}' ] && echo {version}\n")
        compiler.chmod(0o755)
        with inductor_config.patch(
            {"cpp.cxx": (None, str(compiler)), "cpp.enable_floating_point_contract_flag": "off"}
        ):
            for _ in range(2):  # a second time changes nothing
                assert compiling.work_around_gcc() == needed
            flags = inductor_config.cpp.enable_floating_point_contract_flag
            assert flags == ("off -mno-align-stringops" if needed else "off")


class Scaled(torch.nn.Module):
    n = 0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.n


@pytest.mark.slow
def test_blocks_with_a_constant_for_each_layer_have_a_graph_each():
    """More than torch's limit of eight, after which it would continue uncompiled."""
    counter = CompileCounter()
    compiling.prepare(torch.device("meta"))
    for n in range(12):
        block = Scaled()
        block.n = n
        block.compile(backend=counter, dynamic=False)
        assert block(torch.ones(3))[0] == 1 + n
    assert counter.frame_count == 12


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("No working C++ compiler found in torch._inductor.config.cpp.cxx: (None, 'g++')", "xcode-select"),
        ("Command '['/usr/bin/gcc', '/tmp/x/cuda_utils.c']' returned non-zero exit status 1.", "Python.h"),
        ("Cannot find a working triton installation. Either the package", "pip install triton"),
        ("something\n  else", "something else"),
    ],
)
def test_missing_compiler_is_named_with_its_package(error, remedy):
    assert_one_line(compiling.why_not_compiled(RuntimeError(error)), remedy)


# ---- checked -------------------------------------------------------------------------------------------------


def problems_of(model: GPT, variant: Variant | None = None) -> list[str]:
    idx = tokens(2, 33)
    return check_model(model, variant or Variant(), idx[:, :-1], idx[:, 1:])


def seeing_the_future(q: Tensor, k: Tensor, v: Tensor, context: Any, dropout: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def loss_with_smoothing(self: GPT, x: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(self.logits(x).flatten(0, 1), targets.flatten(), label_smoothing=0.1)


def loss_of_the_head(self: GPT, x: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(self.logits(x.detach()).flatten(0, 1), targets.flatten())


def rounding(x: Tensor) -> Tensor:
    """An activation that is wrong in bfloat16 only."""
    y = F.gelu(x, approximate="tanh")
    return y * 1.5 if y.dtype == torch.bfloat16 else y


@pytest.mark.parametrize("config", [SMALL, MODERN])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nothing_is_wrong_with_the_model_as_it_is(config, dtype):
    model = make(config)
    before = {name: w.clone() for name, w in model.state_dict().items()}
    kernels = cpu_kernels.may_exist() and dtype != "float16"
    residual_dtype = "bfloat16" if dtype == "bfloat16" else "float32"
    assert problems_of(model, Variant(dtype, cpu_kernels=kernels, residual_dtype=residual_dtype)) == []
    assert_equal(dict(model.state_dict()), before)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    cpu_kernels.unload()


@pytest.mark.slow
def test_compiled_blocks_compute_what_the_model_says(monkeypatch):
    monkeypatch.setattr("deskgpt.kernels.loss.LOGITS_ON_CPU", 1000)  # so that the loss is computed in chunks
    config = replace(MODERN, n_layer=1)
    try:
        assert problems_of(make(config), Variant("bfloat16", compiled=True)) == []
    except Exception as e:
        if "compiler" in str(e).lower():
            pytest.skip("no working C++ compiler here")
        raise


@pytest.mark.parametrize(
    ("changed", "change", "named"),
    [
        ("model.attention", seeing_the_future, ["tokens see later ones"]),  # of layers that begin as zeros, too
        ("model.GPT.loss", loss_with_smoothing, ["is not the cross-entropy of the logits"]),
        ("model.GPT.loss", loss_of_the_head, ["no gradient reaches transformer.", "more"]),
        ("model.gelu_tanh", rounding, ["bfloat16", "the gradient of", "differs from eager float32's"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_change_that_breaks_the_model_is_named(changed, change, named, monkeypatch):
    monkeypatch.setattr(changed, change)
    problems = problems_of(GPT(MODERN) if changed == "model.attention" else make(), Variant("bfloat16"))
    assert problems
    for part in named:
        assert part in problems[-1]
        assert "\n" not in problems[-1]


def test_parameter_that_nothing_uses_is_named_and_one_that_is_not_trained_is_not():
    model = make()
    model.register_parameter("scale", torch.nn.Parameter(torch.ones(3)))
    assert problems_of(model) == ["no gradient reaches scale"]
    model.get_parameter("scale").requires_grad_(False)
    assert problems_of(model) == []


@pytest.mark.skipif(not cpu_kernels.may_exist(), reason="for Linux on a processor with AVX2 or AVX-512")
@pytest.mark.parametrize("factor", [0.0, torch.nan])
def test_kernel_that_is_wrong_is_named_with_its_variant(factor, monkeypatch):
    """One of 32 positions is lost, or is not a number, if our kernels are in use."""

    def wrong(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        y = causal_attention(q, k, v, dropout)
        is_last = torch.arange(q.size(2))[:, None] == q.size(2) - 1
        return torch.where(is_last, y * factor, y) if cpu_kernels.dtypes() else y

    monkeypatch.setattr(definition, "causal_attention", wrong)
    [loss, gradient] = problems_of(make(), Variant(cpu_kernels=True))
    cpu_kernels.unload()
    assert "C++ kernels, not compiled: the loss differs" in loss
    assert "C++ kernels, not compiled: the gradient of" in gradient
