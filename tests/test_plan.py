from __future__ import annotations

import inspect
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import assert_one_line, assert_refused, flags

import model
from deskgpt.compute.runner import Variant
from deskgpt.estimate import plan
from deskgpt.estimate.memory import Step, memory
from deskgpt.kernels import verify
from deskgpt.kernels.overridable import overridable
from deskgpt.system import cache
from model import GPTConfig
from train import TrainConfig, main

SIZES: dict[str, Any] = {"n_layer": 1, "n_head": 1, "n_embd": 16, "block_size": 32}
TINY_CONFIG = GPTConfig(vocab_size=64, **SIZES)


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def said(capsys: pytest.CaptureFixture[str], **settings: Any) -> str:
    """What the plan of a tiny model's run says."""
    usual: dict[str, Any] = {"plan_for": "H100", "gradient_accumulation_steps": 1}
    main(TrainConfig(**usual | SIZES | settings))
    assert not dist.is_initialized()
    return capsys.readouterr().out


def total_gib(out: str) -> float:
    found = re.search(r"^predicted peak memory of .*: (\S+) of \S+ GiB$", out, re.M)
    assert found
    return float(found[1])


def step_s(out: str) -> float:
    return float(re.findall(r": (\S+)s per step", out)[0])


# ---- one rank ------------------------------------------------------------------------------------------------


FOR_A_CARD = {"plan_for": "rtx 4070", "device": "cuda"}


@pytest.mark.parametrize(
    ("where", "gib"), [({}, r"\S+"), pytest.param(FOR_A_CARD, "12.0", marks=pytest.mark.slow)], ids=["here", "card"]
)
def test_plan_says_what_is_needed_and_does_nothing(where, gib, tmp_path, script):
    """For a card and without a GPU; on this machine."""
    out = tmp_path / "out"
    options = {"dry_run": True, "device": "cpu", "dtype": "bfloat16", "out_dir": out, "dataset": tmp_path / "none"}
    done = script("train.py", "config/train_fineweb_125m.py", *flags(**options | where))
    assert (done.code, done.err) == (0, "")
    assert "number of parameters: 123.59M" in done.out
    assert "tokens per step: 524,288 = 8 x 64 x 1024" in done.out
    assert "FLOPs per step, forward and backward: 4.481e+14" in done.out  # 524288 * 6 * 123.6M + 12 * 12 * 768 * 1024
    assert re.search(rf"predicted peak memory of .*: \S+ of {gib} GiB", done.out)
    parts = re.search(r"weights (\S+), gradients (\S+), optimizer (\S+), activations (\S+), logits (\S+) GiB", done.out)
    assert parts
    assert sum(map(float, parts.groups())) == pytest.approx(total_gib(done.out), abs=0.03)
    assert re.search(r"at 40% \(assumed\) of 1 x .*: [^,]+ per step, .* for 18,750 steps", done.out)
    if where:
        assert 4 < total_gib(done.out) < 8
        fits = re.search(r"--batch_size=(\d+) --gradient_accumulation_steps=(\d+)$", done.out, re.M)
        assert fits
        assert int(fits[1]) * int(fits[2]) == 8 * 64
    assert not out.exists()


def test_plan_follows_activation_checkpoints_in_memory_and_time(capsys):
    sizes = {"batch_size": 8, "block_size": 512, "n_embd": 64, "n_layer": 3, "compile": False}
    plans = [said(capsys, activation_checkpoint=which, **sizes) for which in ("none", "selective", "full")]
    peaks = [total_gib(out) for out in plans]
    assert peaks == sorted(set(peaks), reverse=True)
    times = [step_s(out) for out in plans]
    assert times == [pytest.approx(factor * times[0], rel=0.01) for factor in (1, 1.14, 1.26)]


def test_plan_that_does_not_fit_has_no_time(capsys):
    out = said(capsys, plan_for="RTX 2060", n_embd=8192, n_layer=2)
    assert "at the same tokens per step: none" in out
    assert "time: n/a" in out
    assert "TFLOP/s" not in out
    out = said(capsys, plan_for="RTX 2060", batch_size=2**19)
    assert "time: n/a" in out
    assert re.search(r"--batch_size=\d+ --grad", out)


def test_card_without_a_peak_in_the_dtype_has_no_time(capsys):
    assert "time: n/a" in said(capsys, plan_for="T4", dtype="bfloat16")


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("RTX 4700", ["plan_for='RTX 4700'", "GeForce RTX 4070"]),
        ("RTX 4070 24GB", ["GeForce RTX 4070", "12 GB"]),
        ("A100 60GB", ["40 or 80 GB"]),
        ("???", ["plan_for='???'", "deskgpt/system/peaks.py"]),
    ],
)
def test_unknown_card_is_an_error_of_one_line(name, named, script):
    assert_refused(script("train.py", f"--plan_for={name}"), *named)


# ---- a model that was changed --------------------------------------------------------------------------------


def test_attention_that_was_changed_is_planned_as_it_is_written(monkeypatch):
    plain = inspect.unwrap(model.attention)

    def attention(q, *rest):
        return plain(5.0 * (q / 5.0).tanh(), *rest)

    def peak_bytes() -> int:
        form = Variant("bfloat16", reference_only=plan.functions_as_written(config))
        return sum(memory(Step(config, 4, form, "cuda")).values())

    config = replace(TINY_CONFIG, block_size=256)
    unchanged = peak_bytes()
    assert plan.functions_as_written(config) == ()
    attention.__qualname__ = "attention"
    monkeypatch.setattr(model, "attention", overridable(attention))
    cache.path_of(verify.FILE).unlink()  # a digest of files does not see this change
    assert plan.functions_as_written(config) == ("attention",)
    assert peak_bytes() > 1.2 * unchanged


def test_model_whose_passes_depend_on_numbers_is_refused_in_one_line(monkeypatch):
    plain = model.Block.forward
    monkeypatch.setattr(model.Block, "forward", lambda block, x, span: plain(block, x, span) if x.any() else x)
    with pytest.raises(ValueError, match="cannot be rehearsed"):
        memory(Step(TINY_CONFIG, 4, Variant(), "cpu"))


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adafactor, torch.optim.LBFGS])
def test_optimizer_that_cannot_be_rehearsed_counts_as_adamw(make):
    """Those that need a closure, or a number of a tensor."""
    of_adamw, of_this = (
        memory(Step(TINY_CONFIG, 4, Variant(), "cpu", make_optimizer=m))["optimizer"]
        for m in (None, lambda model: make(model.parameters(), lr=1e-3))
    )
    assert (of_this == of_adamw) is (make is not torch.optim.SGD)


# ---- several ranks -------------------------------------------------------------------------------------------


def test_plan_of_sharded_ranks_that_are_not_here_says_what_each_has(capsys, tmp_path):
    settings = {"dp_shard": 64, "gradient_accumulation_steps": 2048, "out_dir": str(tmp_path / "out")}
    out = said(capsys, world=1024, n_embd=128, **settings)
    assert re.search(r"^1,024 ranks.* 64, 16 copies; micro-batches of each rank and step: 2$", out, re.M)
    assert re.search(r"weights \S+, gradients \S+, optimizer \S+, activations \S+, logits \S+, gathered \S+ GiB", out)
    assert re.search(r"\) of 1024 x 989.00 TFLOP/s .*, and without what ranks send each other$", out, re.M)
    assert re.search(r"^each rank has at most 3,216 files open", out, re.M)  # 3 x 1024 + 64 + 16 + 64
    assert not (tmp_path / "out").exists()


def test_plan_of_ddp_counts_the_buckets(capsys):
    out = said(capsys, world=16, gradient_accumulation_steps=48, n_embd=768)
    found = re.search(r"weights (\S+), .* buckets (\S+) GiB", out)
    assert found
    assert float(found[1]) == float(found[2]) > 0.1
    assert "micro-batches of each rank and step: 3" in out


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"world": 1024, "dp_shard": 60}, ["dp_shard=60", "1024", "--dp_shard=64"]),
        ({"world": 10**9}, ["world=1000000000", "1,048,576"]),
        ({"world": -1}, ["world=-1", "0"]),
        ({"world": 16}, ["gradient_accumulation_steps=40", "--gradient_accumulation_steps=48"]),
    ],
)
def test_ranks_that_cannot_be_are_refused_in_one_line(options, named, script):
    done = script("train.py", *flags(plan_for="H100", **options))
    assert done.code != 0
    assert_one_line(done.err, *named)


def test_ranks_that_are_connected_can_plan_for_others(capsys, tmp_path):
    if not dist.is_gloo_available():
        pytest.skip("needs gloo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    assert "8 ranks" in said(capsys, world=8, dp_shard=4, gradient_accumulation_steps=8)
