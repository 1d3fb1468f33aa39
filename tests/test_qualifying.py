"""The stages of bench/qualify.py, on a CPU at small sizes, and what their figures are made of."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import assert_one_line
from torch.autograd import DeviceType

from bench.qualifying import batches, breakdown, facts, parity, peer, roofs, sampling, steps, suite, variants, work
from bench.qualifying.session import Session, Sizes
from deskgpt.compute.runner import Runner, Variant
from deskgpt.system import peaks
from model import GPT, GPTConfig

SMALL = Sizes(
    model=GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=32, vocab_size=100),
    first_batch=2,
    last_batch=8,
    tokens_per_step=256,
    sampled_tokens=6,
    is_toy=True,
)
CPU = torch.device("cpu")
NANOGPT = os.environ.get("NANOGPT")  # an unmodified checkout of it


@pytest.fixture
def s(tmp_path, monkeypatch) -> Session:
    """A session on the CPU with time enough, after stage 4, which need not measure peaks first."""
    monkeypatch.setattr(work, "SAMPLES", 1)
    monkeypatch.setattr(work, "SAMPLE_S", 1e-4)
    monkeypatch.setattr(peaks, "measured_matmul_flops", lambda device, dtype: 1e11)
    results = {4: {"best": 4, "form": Variant().facts()}}
    return Session(CPU, SMALL, tmp_path, results=results, deadline=time.perf_counter() + 600)


def result_of(stage: Any, s: Session) -> dict[str, Any]:
    """What a stage measures, after the way through JSON that it takes into the next call."""
    return json.loads(json.dumps(stage.measure(s)))


# ---- 0: facts --------------------------------------------------------------------------------------------------


def test_facts_on_a_cpu_are_na_where_it_has_none(s):
    text = facts.describe(result_of(facts, s))
    assert "| compute capability | n/a |" in text
    assert "| power limit | n/a |" in text
    assert f"| torch | {torch.__version__} |" in text
    assert "| attention in float32 | " in text


@pytest.mark.skipif(os.name == "nt", reason="nvidia-smi is a shell script here")
def test_nvidia_smi_answers_for_the_card(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho \"$1\" > asked\necho '570.86.10, 345 MHz, [N/A], 700.00 W'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    found = facts.query_nvidia_smi("GPU-1b9e")
    assert Path("asked").read_text() == "--id=GPU-1b9e\n"
    assert list(found.values()) == ["570.86.10", "345 MHz", None, "700.00 W"]
    program.write_text("#!/bin/sh\nexit 6\n")
    assert set(facts.query_nvidia_smi("GPU-1b9e").values()) == {None}


# ---- 1: roofs ------------------------------------------------------------------------------------------------


def test_parts_of_a_step_are_the_models_own():
    config = GPTConfig(n_layer=3, n_head=2, n_embd=64, block_size=32, vocab_size=96)
    parts = roofs.parts_of(config, tokens=128)
    norms = 6 * config.n_embd * (2 * config.n_layer + 1)  # counted among the parameters, but no matmul
    assert sum(part.flops * part.count for part in parts) == (GPT(config).estimate_flops() - norms) * 128


def test_whole_step_is_weighted_by_its_flops():
    parts = [roofs.Part("a", 1, 1, 2, flops=2), roofs.Part("b", 1, 1, 1, flops=6)]
    assert roofs.together(parts, [2.0, 2.0]) == pytest.approx(2)
    assert roofs.together(parts, [4.0, 6.0]) == pytest.approx(10 / 2)  # each takes 1 s
    assert roofs.together(parts, [4.0, None]) is None


def test_roofs_on_a_cpu(s):
    result = result_of(roofs, s)
    assert list(result["rates"]) == ["float32", "bfloat16", "float16"]  # TF32 is NVIDIA's
    for way, rates in result["rates"].items():
        assert 0 < min(rates) < result["roofs"][way] < max(rates) < 1e14
    assert result["copy_bytes_per_s"] > 1e8
    assert "this device has no published peak" in roofs.describe(result)


def test_way_that_a_device_lacks_is_given_up_with_its_reason():
    why_not: dict[str, str] = {}
    part = roofs.Part("c_fc", inputs=1 << 30, outputs=1 << 30, count=1, flops=1)
    assert roofs.flops_per_s(part, SMALL.model, 4, "float16", CPU, why_not) is None  # more memory than there is
    assert_one_line(why_not["c_fc in float16"])


# ---- 2: parity -----------------------------------------------------------------------------------------------


@pytest.fixture
def plain_only(monkeypatch) -> None:
    """Compiling is left to test_compiling.py, and to the card."""
    precisions_of = parity.precisions_of
    monkeypatch.setattr(parity, "precisions_of", lambda s, compiled: [] if compiled else precisions_of(s, compiled))


def test_plain_forms_on_the_cpu_are_right(s, plain_only):
    result = result_of(parity, s)
    assert [row["case"] for row in result["gradients"]] == [
        f"{name}, {dtype}, plain" for dtype in ("float32", "bfloat16", "float16") for name in ("GPT-2", "modern")
    ]
    assert result["failed"] == []
    off = [row["gradient_off"] for row in result["gradients"]]
    assert off[0] == 0
    assert 0 < off[2] < 0.05
    s.deadline = 0  # a case without time left is not taken for right, nor for wrong
    result = result_of(parity, s)
    assert (len(result["gradients"]), result["failed"], len(result["unfinished"])) == (1, [], 5)


def test_wrong_form_is_named_with_its_worst_parameter_and_the_others_go_on(s, plain_only, monkeypatch):
    forward_backward = Runner.forward_backward

    def planted(self: Runner, *batch: Any) -> torch.Tensor:
        loss = forward_backward(self, *batch)
        if self.form.dtype == "bfloat16":
            gradient = self.model.get_parameter("transformer.h.0.mlp.c_fc.weight").grad
            assert gradient is not None
            gradient[::4] = 0
        if self.form.dtype == "float16":
            raise RuntimeError("no kernel\nfor it")
        return loss

    monkeypatch.setattr(Runner, "forward_backward", planted)
    result = result_of(parity, s)
    rows = {row["case"]: row for row in result["gradients"]}
    for name in ("GPT-2", "modern"):
        assert rows[f"{name}, float32, plain"]["wrong"] is None
        assert "transformer.h.0.mlp.c_fc.weight" in rows[f"{name}, bfloat16, plain"]["wrong"]
        assert rows[f"{name}, bfloat16, plain"]["gradient_off"] > 0.4
        assert rows[f"{name}, float16, plain"]["wrong"] == "RuntimeError: no kernel for it"
    assert len(result["failed"]) == 4
    assert "no kernel for it | n/a | n/a |" in parity.describe(result)


# ---- 3: tests ------------------------------------------------------------------------------------------------

QUIET = "[pytest]\naddopts = -q\n"  # as in pyproject.toml
SOME_TESTS = """
import pytest

def test_right(): pass
def test_wrong(): assert 1 == 2, "one is not two"
@pytest.mark.parametrize("n", [1, 2])
def test_elsewhere(n): pytest.skip("needs two CUDA devices")
"""


@pytest.mark.slow
def test_tests_in_a_child_process_are_counted_and_those_that_cannot_run_are_an_error(s, tmp_path, monkeypatch):
    (tmp_path / "pytest.ini").write_text(QUIET)
    (tmp_path / "test_some.py").write_text(SOME_TESTS)
    monkeypatch.setattr(suite, "TESTS", str(tmp_path / "test_some.py"))
    result = result_of(suite, s)
    assert result["summary"] == "1 failed, 1 passed, 2 skipped"
    assert sorted(result["outcomes"].values()) == ["FAILED", "PASSED", "SKIPPED", "SKIPPED"]
    assert result["unfinished"] == []
    assert "one is not two" in result["failed"][0]
    assert "needs two CUDA devices" in suite.describe(result)
    monkeypatch.setattr(suite, "TESTS", str(tmp_path / "none.py"))
    with pytest.raises(ValueError, match="none.py") as ended:
        suite.measure(s)
    assert_one_line(ended.value, "status 4", "requirements-dev.txt")


@pytest.mark.slow
def test_tests_that_run_out_of_time_still_tell_what_passed_and_what_failed(s, tmp_path, monkeypatch):
    class Limit:
        def __init__(self, seconds: float, kill: Any) -> None:
            self.start = self.cancel = lambda: None
            kills.append(kill)

    def print0(self: Session, line: str) -> None:
        if "test_elsewhere[2] SKIPPED" in line:  # said as it ends, long before the last test does
            self.deadline = 0
            kills[0]()

    kills: list[Any] = []
    (tmp_path / "pytest.ini").write_text(QUIET)
    (tmp_path / "test_some.py").write_text(f"{SOME_TESTS}\ndef test_long(): __import__('time').sleep(999)\n")
    monkeypatch.setattr(suite, "TESTS", str(tmp_path / "test_some.py"))
    monkeypatch.setattr(suite.threading, "Timer", Limit)
    monkeypatch.setattr(Session, "say", print0)
    result = result_of(suite, s)
    assert result["summary"] == "1 failed, 1 passed, 2 skipped"
    [failed] = result["failed"]
    assert failed.endswith("test_some.py::test_wrong")
    assert "test_elsewhere[2]" in result["unfinished"][0]


# ---- 4: micro-batches ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_larger_micro_batches_take_more_memory_and_the_fastest_is_the_best(s):
    result = result_of(batches, s)
    rows = result["rows"]
    assert [r["batch_size"] for r in rows] == [8, 4, 2][: len(rows)]
    predicted = [r["predicted_bytes"] for r in rows]
    assert predicted == sorted(set(predicted), reverse=True)
    assert all(r["problem"] is None and r["ms"] > 0 for r in rows)
    assert result["best"] in (2, 4, 8)
    assert result["unfinished"] == []
    assert f"| {result['best']} (fastest) |" in batches.describe(result)


def test_sizes_that_fail_are_rows_and_a_form_that_does_not_compile_is_measured_plain(s, monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("no working Triton")

    def up_to_two(s, model, form, batch_size):
        if batch_size > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return measured(s, model, form, batch_size)

    measured = batches.measured
    monkeypatch.setattr(work, "usual_form", lambda device: Variant(compiled=True))
    monkeypatch.setattr(torch, "compile", refuse)
    monkeypatch.setattr(batches, "measured", up_to_two)
    result = result_of(batches, s)
    assert (result["form"]["compiled"], result["best"]) == (False, 2)
    sizes = {8: "out of memory", 4: "out of memory", 2: None}
    assert {r["batch_size"]: r["problem"] for r in result["rows"]} == sizes
    text = batches.describe(result)
    assert "no working Triton" in text
    assert "| 4 | out of memory |" in text
    s.deadline = 0.0
    result = result_of(batches, s)
    assert [r["batch_size"] for r in result["rows"]] == [8]
    assert result["unfinished"] == ["micro-batch 4", "micro-batch 2"]


@pytest.mark.parametrize(
    ("tokens_per_s", "tried", "best"),
    [
        ({8: 100, 4: 99, 2: 98}, [8, 4, 2], 2),  # none is clearly faster than a smaller one
        ({8: 100, 4: 99, 2: 90}, [8, 4, 2], 4),
        ({8: 100, 4: 90, 2: 200}, [8, 4], 8),  # half the size is clearly slower: still smaller ones are not tried
        ({8: 0, 4: 100, 2: 99}, [8], None),  # fails, though not for memory: so would the others
    ],
)
def test_micro_batches_go_down_from_the_largest_until_smaller_is_slower(tokens_per_s, tried, best, s, monkeypatch):
    def measured(s, model, form, batch_size):
        rate = tokens_per_s[batch_size]
        return {"tokens_per_s": rate, "ms": 1 / rate}

    monkeypatch.setattr(batches, "measured", measured)
    result = result_of(batches, s)
    assert ([r["batch_size"] for r in result["rows"]], result["best"]) == (tried, best)
    assert result["unfinished"] == []


def test_the_first_micro_batch_is_the_largest_that_is_predicted_to_fit(s, monkeypatch):
    form = Variant("bfloat16")
    needed = sum(batches.memory(batches.Step(SMALL.model, 4, form, "cpu")).values())
    monkeypatch.setattr(batches.hardware, "usable_memory_bytes", lambda device: needed / batches.USABLE + 1)
    assert batches.sizes_of(s, form) == [4, 2]
    monkeypatch.setattr(batches.hardware, "usable_memory_bytes", lambda device: 1)
    assert batches.sizes_of(s, form) == [2]  # the prediction may be wrong: the smallest is tried
    monkeypatch.setattr(batches.hardware, "usable_memory_bytes", lambda device: None)
    assert batches.sizes_of(s, form) == [8, 4, 2]


def test_later_stages_need_what_stage_4_has_found(s):
    s.results[4] = {"best": None, "form": Variant().facts()}
    for stage in (variants, breakdown, steps):
        with pytest.raises(ValueError, match="stages=4"):
            stage.measure(s)


# ---- 5: variants ---------------------------------------------------------------------------------------------


def test_variants_are_compiled_anew_with_the_same_loss_and_one_that_fails_leaves_the_others(s, monkeypatch):
    """Otherwise a variant would be timed with what was compiled for another."""
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    torch_compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: torch_compile(function, backend=backend))
    s.results[4]["form"] = Variant("float16", compiled=True).facts()  # two graphs, as on CUDA
    result = result_of(variants, s)
    assert result["unfinished"] == []
    usual, *others = result["rows"]
    # The CPU has no cuDNN: its row says so, and the others went on.
    assert "cudnn attention" in [r["name"] for r in others if r["problem"]]
    assert "| cudnn attention | " in variants.describe(result)
    measured = [r for r in others if r["problem"] is None]
    names = {"float16, not compiled", "loss whole", "loss in chunks of 2^25 logits", "flash attention"}
    assert names <= {r["name"] for r in measured}
    for r in measured:
        assert r["loss"] == pytest.approx(usual["loss"], rel=1e-3)
        assert r["ms"] > 0
    assert len(compiled) >= len(measured)  # all but one, and the usual form
    s.deadline = 0.0
    short = result_of(variants, s)
    assert [r["name"] for r in short["rows"]] == ["float16, compiled"]
    assert short["unfinished"][:2] == ["float16, not compiled", "loss whole"]


# ---- 6: breakdown --------------------------------------------------------------------------------------------


def test_kernels_and_idle_time_of_a_step_make_up_the_whole(s):
    result = result_of(breakdown, s)
    assert [r["ms"] for r in result["longest"]] == sorted((r["ms"] for r in result["longest"]), reverse=True)
    assert "aten::mm" in {r["name"] for r in result["longest"]}
    assert not any("Optimizer.step" in r["name"] for r in result["longest"])  # a range, whose kernels count already
    busy_ms = sum(r["ms"] for r in result["longest"]) + result["others_ms"]
    assert result["idle_ms"] == pytest.approx(max(0.0, result["step_ms"] - busy_ms))
    assert "| whole |" in breakdown.describe(result)


def test_kernels_of_cuda_count_and_not_the_operators_that_started_them():
    def average(name: str, kind: DeviceType, us: float, is_range: bool = False) -> SimpleNamespace:
        times = {"self_device_time_total": us, "self_cpu_time_total": 9.0, "count": 2}
        return SimpleNamespace(key=name, device_type=kind, is_user_annotation=is_range, **times)

    profile = [
        average("aten::mm", DeviceType.CPU, 2000.0),
        average("Memcpy HtoD", DeviceType.CUDA, 500.0),
        average("gemm", DeviceType.CUDA, 2000.0),
        average("Optimizer.step#AdamW.step", DeviceType.CUDA, 2500.0, is_range=True),
    ]
    rows = breakdown.kernels(profile, on_cuda=True)
    assert [(r["name"], r["ms"]) for r in rows] == [("gemm", 2.0), ("Memcpy HtoD", 0.5)]


# ---- 7 and 10: steps of train.py, and nanoGPT ----------------------------------------------------------------


@pytest.mark.slow
def test_whole_steps_of_both_optimizers_are_timed(s):
    result = result_of(steps, s)
    assert result["tokens_per_step"] == SMALL.tokens_per_step
    assert [r["name"] for r in result["rows"]] == ["deskGPT", "--optimizer=muon"]
    for r in result["rows"]:
        assert r["tokens_per_s"] == pytest.approx(SMALL.tokens_per_step / r["ms"] * 1e3)
    assert not result["is_published"]  # no CPU has a published peak
    assert result["failed"] == []
    assert "Steps of 256 tokens" in steps.describe(result)


def one_round(fails: str, tried: list[list[str]]) -> Any:
    """Stands for timing.run: the run whose command has all words of `fails` runs out of memory."""

    def run(x: Any, count: int, seconds: float = 0.0) -> None:
        tried.append(x.command)
        if all(word in [x.name, *x.command] for word in fails.split()):
            raise peer.Failed(f"{x.name} ended after 0 steps: CUDA out of memory", "out of memory")
        x.rounds_ms.append([20.0 if x.name == "nanoGPT" else 10.0] * 3)
        x.first_s.append(1.0)
        if x.name != "nanoGPT":
            x.start = {"tokens_per_step": 256, "flops_per_token": 1.0, "peak_flops": 1e9, "dtype": "float32"}

    return run


def test_where_nanogpt_does_not_fit_both_take_half_the_micro_batch(s, tmp_path, monkeypatch):
    assert peer.describe(result_of(peer, s)) == "Skipped: no checkout of nanoGPT was named."
    (tmp_path / "train.py").touch()
    s.nanogpt = tmp_path
    tried: list[list[str]] = []
    monkeypatch.setattr(peer.timing, "run", one_round("nanoGPT --batch_size=4", tried))
    result = result_of(peer, s)
    assert (result["batch_size"], result["rows"][1]["ours_faster"]) == (2, 2)
    for batch_size, command in zip((4, 4, 2, 2), tried, strict=False):  # ours, nanoGPT, and both again
        assert {f"--batch_size={batch_size}", f"--gradient_accumulation_steps={8 // batch_size}"} <= set(command)
    assert "micro-batch 4: nanoGPT ended" in peer.describe(result)
    monkeypatch.setattr(peer.timing, "run", one_round("nanoGPT", tried))  # never fits
    assert len(result_of(peer, s)["failed"]) == 3  # of 4, 2 and 1 sequences


@pytest.mark.slow
@pytest.mark.skipif(NANOGPT is None, reason="NANOGPT names no checkout of nanoGPT")
def test_nanogpt_itself_runs_beside_ours(s):
    s.nanogpt = Path(NANOGPT or "")
    result = result_of(peer, s)
    assert [r["name"] for r in result["rows"]] == ["deskGPT", "nanoGPT"]
    assert result["rows"][1]["ours_faster"] > 0


# ---- 8: sampling ---------------------------------------------------------------------------------------------


def test_sampling_is_timed_by_number_of_samples(s):
    result = result_of(sampling, s)
    assert [r["samples"] for r in result["rows"]] == [1, 10]
    assert all(0 < r["ms"] <= r["most_ms"] for r in result["rows"])
    assert result["dtype"] == "float32"
    assert sampling.describe(result).count("\n| 1") == 2
