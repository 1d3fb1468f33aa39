"""How a run computes is chosen by rule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import events, raises_one_line, tiny

from deskgpt.compute.distributed import DistContext
from deskgpt.compute.variant import COMPILE_FROM_S, Variant, apply_variant, choose_variant, saved_variant
from deskgpt.kernels import cpu_kernels
from deskgpt.run.schedule import Schedule, TimeBudget
from model import GPT, GPTConfig
from train import TrainConfig, main

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def chosen(device: torch.device = CUDA, seconds: float = 1e4, earlier: Any = None, **settings: Any) -> Variant:
    dist = DistContext(device, world=settings.get("dp_shard", 1))
    return choose_variant(TrainConfig(**settings), dist, lambda dtype: seconds, earlier or {})


@pytest.fixture(autouse=True)
def card(monkeypatch):
    """A card with Triton, and a machine without a compiler for our kernels."""
    monkeypatch.setattr("deskgpt.system.hardware.has_triton", lambda device: True)
    monkeypatch.setattr("deskgpt.system.peaks.fast_dtype", lambda device: "bfloat16")
    monkeypatch.setattr(cpu_kernels, "may_exist", lambda: False)


def test_card_computes_in_bfloat16_compiled_unless_the_run_is_short():
    assert chosen() == Variant("bfloat16", True, False, "none", "bfloat16")
    assert str(chosen()) == "bfloat16, residual stream in bfloat16, compiled"
    assert chosen(seconds=COMPILE_FROM_S - 1) == Variant("bfloat16")
    assert chosen(dtype="float32", activation_checkpoint="full") == Variant("float32", True, recompute="full")
    assert chosen(dp_shard=2, dtype="float16").dtype == "float32"


def test_cpu_compiles_only_if_asked():
    assert chosen(CPU) == Variant("bfloat16")
    assert chosen(CPU, compile=True).compiled


def test_what_cannot_be_had_is_named_with_the_remedy(capsys):
    with raises_one_line("cpu_kernels=True", "--cpu_kernels=auto"):
        chosen(CPU, cpu_kernels=True)


def test_resumed_run_computes_as_before_on_the_same_kind_of_device():
    earlier = Variant("float32", True, False).saved(CUDA)
    assert chosen(seconds=0.0, earlier=saved_variant(earlier, CUDA)) == Variant("float32", True)
    assert saved_variant(earlier, CPU) == {}
    old = {"dtype": "bfloat16", "compiled": False, "attention": "kernels", "device": "cpu"}  # as b3fc854 wrote it
    assert saved_variant(old, CPU) == {"dtype": "bfloat16", "compiled": False, "cpu_kernels": True}
    assert saved_variant(None, CPU) == saved_variant({"dtype": "int4", "compiled": 1}, CPU) == {}


def test_variant_is_what_the_model_computes_in():
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=16))
    seen = []
    model.transformer.h[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    idx = torch.zeros(1, 8, dtype=torch.long)
    for residual_dtype in ("float32", "bfloat16"):
        apply_variant(model, Variant("bfloat16", residual_dtype=residual_dtype))
        with torch.autocast("cpu", torch.bfloat16):
            model(idx, idx)
    assert seen == [torch.float32, torch.bfloat16]


def test_steps_of_max_minutes_are_planned_from_the_first_one(chars, tmp_path, monkeypatch):
    c = tiny(chars, tmp_path, max_minutes=1.0, max_iters=10**6, warmup_iters=10**5, eval_interval=100)
    monkeypatch.setattr("time.perf_counter", lambda: 0.0)
    timer: Any = SimpleNamespace(train_s=lambda: 0.1, last_s={"evaluation": 1.3})
    schedule = TimeBudget(c, 0.0, DistContext(CPU)).replan(Schedule.of(c), 1, timer)
    assert schedule.max_iters == 1 + int((60 - 1.3) / 0.113)
    assert schedule.warmup_iters == -(-schedule.max_iters // 10)


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
