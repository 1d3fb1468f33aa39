"""bench/qualify.py: which stages it measures, what it does when one fails, and its first stages at toy sizes."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, shell

from bench.qualifying import facts, page, parity, roofs, suite
from bench.qualifying.session import CARD, TOY, Session
from bench.qualifying.stages import STAGES, numbers_of
from configurator import build, read_settings
from deskgpt.compute.runner import Runner
from deskgpt.faster import kernels
from deskgpt.machine import hardware, provenance
from model import GPT, GPTConfig
from train import TrainConfig

CPU = torch.device("cpu")


@pytest.fixture
def session(tmp_path) -> Session:
    return Session(CPU, TOY, tmp_path, deadline=time.perf_counter() + 600)


# ---- the command ---------------------------------------------------------------------------------------------


@dataclass
class Fake:
    """A stage that returns its result, or raises it."""

    number: int
    result: Any
    calls: int = 0
    heading: str = "A heading"
    limit_s: float = 10

    def measure(self, s: Session) -> dict[str, Any]:
        self.calls += 1
        self.seconds_left = s.seconds_left()
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result

    def describe(self, result: dict[str, Any]) -> str:
        return f"found {result}"


@pytest.fixture
def fake(monkeypatch):
    """Puts a stage of our own in the place of one of the stages."""

    def put(number: int, result: Any) -> Fake:
        stage = Fake(number, result)
        monkeypatch.setitem(STAGES, number, stage)
        return stage

    monkeypatch.setattr(provenance, "git_commit", lambda: "abc")
    return put


@pytest.fixture
def qualify(script, tmp_path):
    """Runs the command; returns what it printed and its page."""

    def run(*arguments: str) -> tuple[Any, str, dict[str, Any]]:
        done = script("bench/qualify.py", "--device=cpu", f"--out_dir={tmp_path / 'out'}", *arguments)
        [written] = sorted((tmp_path / "out").glob("*.md"), key=lambda path: path.stat().st_mtime)[-1:]
        return done, written.read_text(), json.loads(written.with_suffix(".json").read_text())

    return run


def test_stages_are_named_as_numbers_and_ranges():
    assert numbers_of("0-3,7") == ([0, 1, 2, 3, 7], {7})
    assert numbers_of("10,2-2") == ([2, 10], {10})
    for wrong in ("11", "3-2", "8-11", "", "a", "1-", "-1", "1,,2"):
        with pytest.raises(ValueError, match=f"--stages={wrong}: "):
            numbers_of(wrong)


@pytest.mark.parametrize("number", STAGES)
def test_each_stage_measures_and_describes(number):
    module = importlib.import_module(f"bench.qualifying.{STAGES[number].module}")
    assert callable(module.measure)
    assert callable(module.describe)


def test_whole_takes_at_most_25_minutes_and_stages_0_to_3_a_call_of_ten():
    assert sum(stage.limit_s for stage in STAGES.values()) <= 25 * 60
    assert sum(STAGES[number].limit_s for number in range(4)) < 600


def test_failed_stage_is_a_result_and_the_others_go_on(qualify, fake):
    fake(4, {"best": 8})
    fake(5, RuntimeError("two\nlines | of reasons"))
    fake(6, torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    fake(7, {"failed": ["the loss is wrong"], "ratio": math.nan, 3: "three"})
    done, text, written = qualify("--stages=4-7")
    assert done.code == 1
    assert "**Failed**: RuntimeError: two lines | of reasons" in text
    assert "**Failed**: out of memory: CUDA out of memory. Tried to allocate 2 GiB" in text
    assert "found {'best': 8}" in text
    assert "- **Failed**: the loss is wrong" in text
    assert "Not measured: stages 0, 1, 2, 3, 8, 9, 10." in text
    assert written["stages"]["7"]["result"] == {"failed": ["the loss is wrong"], "ratio": None, "3": "three"}


def test_later_call_continues_and_measures_again_only_what_it_is_told_to(qualify, fake):
    stages = [fake(number, {}) for number in (4, 5, 6)]
    assert qualify("--stages=4-5")[0].code == 0
    done, text, written = qualify("--stages=4-6")
    assert [stage.calls for stage in stages] == [1, 1, 1]
    assert "there already: stages 4, 5; --again measures them again" in done.out
    assert [line.split(" --stages")[1] for line in written["commands"]] == ["=4-5", "=4-6"]
    assert text.count("\npython bench/qualify.py ") == 2
    qualify("--stages=4,5-6")
    assert [stage.calls for stage in stages] == [2, 1, 1]
    qualify("--stages=5-6", "--again")
    assert [stage.calls for stage in stages] == [2, 2, 2]


def test_earlier_failure_counts_for_the_exit_status(qualify, fake):
    fake(4, ValueError("no"))
    assert qualify("--stages=4-4")[0].code == 1
    done, _, _ = qualify("--stages=4-4")
    assert done.code == 1
    assert "there already: stages 4 (4 failed)" in done.out


def test_results_of_another_commit_are_left_alone(qualify, fake, monkeypatch, tmp_path):
    stage = fake(4, {})
    qualify("--stages=4-4")
    monkeypatch.setattr(provenance, "git_commit", lambda: "def")
    qualify("--stages=4-4")
    assert stage.calls == 2
    assert len(list((tmp_path / "out").glob("*.json"))) == 2


def test_killed_call_loses_only_the_stage_that_ran(qualify, fake):
    first = fake(4, {"best": 8})
    fake(5, KeyboardInterrupt())
    done, text, _ = qualify("--stages=4-6")
    assert done.code == 130
    assert "**Failed**: did not end: its process was killed" in text
    second = fake(5, {})
    fake(6, {})
    assert qualify("--stages=4-6")[0].code == 0
    assert (first.calls, second.calls) == (1, 1)


def test_device_that_no_longer_computes_gets_a_fresh_process_for_the_rest(qualify, fake, monkeypatch):
    fake(4, {})
    fake(5, RuntimeError("CUDA error: an illegal memory access was encountered"))
    rest = [fake(number, {}) for number in (6, 7)]
    started: list[list[str]] = []
    answers = iter([None, RuntimeError("CUDA error: an illegal memory access was encountered")])

    def release_memory(device: torch.device) -> None:
        error = next(answers)
        if error is not None:
            raise error

    def execv(path: str, command: list[str]) -> None:
        started.append(command)
        raise SystemExit(77)  # the process would be replaced here

    monkeypatch.setattr(hardware, "release_memory", release_memory)
    monkeypatch.setattr(os, "execv", execv)
    done, text, _ = qualify("--stages=4-7")
    assert done.code == 77
    assert [stage.calls for stage in rest] == [0, 0]
    assert "**Failed**: RuntimeError: CUDA error" in text
    assert started[0][:2] == [sys.executable, str(ROOT / "bench" / "qualify.py")]
    assert started[0][-2:] == ["--stages=6,7", "--after_failure"]

    monkeypatch.undo()  # what the fresh process does
    monkeypatch.setattr(provenance, "git_commit", lambda: "abc")
    rest = [fake(number, {}) for number in (6, 7)]
    done, text, written = qualify(*started[0][3:])
    assert done.code == 1
    assert [stage.calls for stage in rest] == [1, 1]
    assert sorted(written["stages"]) == ["4", "5", "6", "7"]
    assert len(written["commands"]) == 1


def test_stages_know_their_time_limit(qualify, fake):
    stage = fake(4, {})
    qualify("--stages=4")
    assert 9 < stage.seconds_left <= 10


def test_saved_page_is_named_after_the_card(qualify, fake, monkeypatch, tmp_path):
    monkeypatch.setattr("bench.output.RESULTS", tmp_path / "results")
    monkeypatch.setattr(hardware, "device_name", lambda device: "A CPU (AVX2), 2 cores")
    fake(4, {})
    _, text, _ = qualify("--stages=4", "--save")
    [saved] = (tmp_path / "results").glob("*-qualify-a-cpu.md")
    assert saved.read_text() == text
    assert saved.with_suffix(".json").exists()


def test_wrong_arguments_are_one_line(script, tmp_path):
    for arguments, reason in (
        (["--stages=4-99"], "--stages=4-99: 4-99 is not in 0-10"),
        ([f"--nanogpt={tmp_path}"], "holds no train.py; name a checkout of nanoGPT"),
        (["--save", "a/b"], "a name of letters, digits, dots and dashes"),
    ):
        done = script("bench/qualify.py", "--device=cpu", f"--out_dir={tmp_path / 'out'}", *arguments)
        assert done.code in (1, 2)
        assert done.err.count("\n") == 1
        assert reason in done.err
    assert not (tmp_path / "out").exists()


def test_page_ends_with_what_to_use():
    adamw = {"tokens_per_s": 700_000.4, "mfu": 0.612, "peak_bytes": 3 * 2**30}
    batches = {"best": 48, "best_for_gb": {"8": 8, "12": 24, "16": None}}
    text = page.what_follows("NVIDIA H200", {4: batches, 7: {"adamw": adamw, "batch_size": 64}}, CARD)
    assert "| NVIDIA H200 | 700,000 | 61.2% | 64 | 3.0 GiB |" in text
    assert "- `config/gpu_8gb.py`: `largest=8` (now largest=" in text
    assert "- `config/gpu_12gb.py`: `largest=16` (now largest=" in text  # 512 sequences per step are no multiple of 24
    assert "- `config/gpu_16gb.py`: n/a (now largest=" in text
    assert "python train.py config/train_fineweb_125m.py --batch_size=64 --gradient_accumulation_steps=8" in text


def test_page_leaves_out_what_no_stage_has_measured():
    assert page.what_follows("NVIDIA H200", {}, CARD) == "Nothing yet: stages 4 and 7 say it."
    text = page.what_follows("NVIDIA H200", {4: {"best": 48, "best_for_gb": {}}}, CARD)
    assert text.endswith("config/train_fineweb_125m.py --batch_size=32 --gradient_accumulation_steps=16\n```")
    assert "README" not in text
    assert "gpu_" not in text
    failed = {"adamw": {"problem": "out of memory"}, "batch_size": None}
    assert "README" not in page.what_follows("NVIDIA H200", {7: failed}, CARD)


def test_recipe_of_the_page_has_the_model_and_the_batch_of_the_stages():
    recipe = build(TrainConfig, read_settings(TrainConfig, [str(ROOT / page.RECIPE)]))
    assert GPTConfig.from_settings(recipe, CARD.model.vocab_size) == CARD.model
    assert recipe.batch_size * recipe.gradient_accumulation_steps * recipe.block_size == CARD.tokens_per_step


# ---- stage 0 -------------------------------------------------------------------------------------------------


def test_facts_on_a_cpu_are_na_where_it_has_none(session):
    result = json.loads(json.dumps(facts.measure(session)))
    text = facts.describe(result)
    assert "| compute capability | n/a |" in text
    assert "| power limit | n/a |" in text
    assert f"| torch | {torch.__version__} |" in text
    assert "| one token, 64 keys |" in text
    assert {row["attention"] for row in result["sdpa_chosen"]} >= {"training", "one token, 64 keys"}


@pytest.mark.skipif(os.name == "nt", reason="nvidia-smi is a shell script here")
def test_nvidia_smi_answers_for_the_card(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho \"$1\" > asked\necho '570.86.10, 345, 1980, 1593, 3201, [N/A], 700.00, 31'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    found = facts.query_nvidia_smi("GPU-1b9e")
    assert Path("asked").read_text() == "--id=GPU-1b9e\n"
    assert found["driver"] == "570.86.10"
    assert (found["clock_mhz"], found["max_clock_mhz"]) == (345, 1980)
    assert (found["power_w"], found["power_limit_w"], found["temperature_c"]) == (None, 700, 31)
    program.write_text("#!/bin/sh\nexit 6\n")
    assert set(facts.query_nvidia_smi("GPU-1b9e").values()) == {None}


# ---- stage 1 -------------------------------------------------------------------------------------------------


def test_matmuls_are_the_models_own():
    config = GPTConfig(n_layer=3, n_head=2, n_embd=64, block_size=32, vocab_size=96)
    matmuls = roofs.matmuls_of(config, tokens=128, head_tokens=128)
    attention = 12 * config.n_layer * config.n_embd * config.block_size
    norms = 6 * config.n_embd * (2 * config.n_layer + 1)  # counted among the parameters, but no matmul
    flops = sum(m.flops() * m.count for m in matmuls)
    assert flops == (GPT(config).estimate_flops() - attention - norms) * 128
    assert {m.layer for m in matmuls} == {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "lm_head"}


@pytest.mark.parametrize("form", roofs.FORMS)
def test_timed_matmul_has_its_shape(form):
    m = roofs.Matmul("c_fc", form, m=32, k=16, n=48, count=1)
    for way in ("float32", "bfloat16", "int8"):
        assert roofs.call_of(m, way, CPU)().shape == (32, 48)


def test_whole_is_weighted_by_the_flops_of_a_step():
    matmuls = roofs.matmuls_of(TOY.model, tokens=256, head_tokens=64)
    rows: list[dict[str, Any]] = [vars(m) | {"flops_per_s": {"float32": 2.0}} for m in matmuls]
    assert roofs.weighted(rows, "float32", TOY.model, 256, None) == pytest.approx(2)
    # The head has a quarter of the rows that it has in a step, and there takes half of the time.
    body = sum(m.flops() * m.count for m in matmuls if m.layer != "lm_head")
    head = 4 * sum(m.flops() for m in matmuls if m.layer == "lm_head")
    for row in rows:
        row["flops_per_s"]["float32"] = head if row["layer"] == "lm_head" else body
    assert roofs.weighted(rows, "float32", TOY.model, 256, None) == pytest.approx((body + head) / 2)
    rows[3]["flops_per_s"]["float32"] = None
    assert roofs.weighted(rows, "float32", TOY.model, 256, None) is None


def test_roofs_on_a_cpu(session, monkeypatch):
    monkeypatch.setattr(roofs, "SAMPLES", 2)
    monkeypatch.setattr(roofs, "SAMPLE_S", 1e-4)
    result = json.loads(json.dumps(roofs.measure(session)))
    assert result["matmuls"]["tf32"] is None
    assert 0 < result["with_attention"]["float32"] < 1e14
    assert result["matmuls"]["float32"] < max(row["flops_per_s"]["float32"] for row in result["rows"])
    assert result["copy_bytes_per_s"] > 1e8
    text = roofs.describe(result)
    assert "- tf32: n/a (only NVIDIA's cards since Ampere have it)" in text
    assert "this device has no published peak" in text


def test_way_that_a_device_lacks_is_given_up_with_its_reason(session, monkeypatch):
    def no_kernel(*args: Any, **options: Any) -> None:
        raise RuntimeError("torch._scaled_mm is only\nsupported on newer cards")

    monkeypatch.setattr(torch, "_scaled_mm", no_kernel)
    why_not: dict[str, str] = {}
    m = roofs.Matmul("c_fc", "forward", m=32, k=16, n=48, count=1)
    assert roofs.flops_of(m, "fp8", CPU, why_not) is None
    assert why_not == {"fp8": "torch._scaled_mm is only supported on newer cards"}


# ---- stage 2 -------------------------------------------------------------------------------------------------


@pytest.fixture
def expected(session) -> dict[str, parity.Expected]:
    return {name: parity.Expected(config) for name, config in parity.models_of(session).items()}


def test_models_are_gpt2_and_all_modern_choices_with_heads_that_users_have(session):
    plain, modern = parity.models_of(session).values()
    assert plain == GPTConfig(n_layer=1, n_head=2, n_embd=128, block_size=64, vocab_size=TOY.model.vocab_size)
    assert (modern.position, modern.norm, modern.activation) == ("rope", "rms", "relu2")
    assert all((modern.qk_norm, modern.zero_init, modern.token_shift, not modern.tie_weights))
    for config in parity.models_of(Session(CPU, CARD, session.folder)).values():
        assert config.n_embd // config.n_head == 64


def test_plain_forms_on_the_cpu_are_right(session, expected):
    rows = parity.gradient_rows(session, expected, compiled=False)
    assert [row["case"] for row in rows] == [
        f"{name}, {dtype}, plain" for dtype in ("float32", "bfloat16", "float16") for name in ("GPT-2", "modern")
    ]
    assert {row["case"]: row["wrong"] for row in rows if row["wrong"]} == {}
    assert rows[0]["gradient_off"] == 0
    assert 0 < rows[2]["gradient_off"] < 0.05
    assert all(value.abs().max() > 0 for value in expected["modern"].gradients)


def test_wrong_form_is_named_with_its_worst_parameter_and_the_others_go_on(session, expected, monkeypatch):
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
    rows = {row["case"]: row for row in parity.gradient_rows(session, expected, compiled=False)}
    for name in ("GPT-2", "modern"):
        assert rows[f"{name}, float32, plain"]["wrong"] is None
        assert "those of transformer.h.0.mlp.c_fc.weight differ by" in rows[f"{name}, bfloat16, plain"]["wrong"]
        assert rows[f"{name}, bfloat16, plain"]["gradient_off"] > 0.4
        assert rows[f"{name}, float16, plain"]["wrong"] == "RuntimeError: no kernel for it"
    result: dict[str, Any] = {"gradients": list(rows.values()), "chunks": [], "steps": []}
    assert "| GPT-2, float16, plain | RuntimeError: no kernel for it | n/a | n/a |" in parity.describe(result)


def test_loss_whose_last_chunk_is_not_full_is_right(session, monkeypatch):
    assert parity.CHUNKED_TOKENS % parity.CHUNK
    rows = parity.chunk_rows(session, compiled=False)
    assert [row["wrong"] for row in rows] == [None] * 3

    in_chunks = kernels.chunked_cross_entropy

    def last_chunk_is_lost(h, weight, targets, dtype, chunk, *rest):  # its gradient by the hidden states
        loss, grad_h, grad_w = in_chunks(h, weight, targets, dtype, chunk, *rest)
        grad_h[len(h) // chunk * chunk :] = 0
        return loss, grad_h, grad_w

    monkeypatch.setattr(kernels, "chunked_cross_entropy", last_chunk_is_lost)
    for row in parity.chunk_rows(session, compiled=False):
        assert row["wrong"] == "loss or gradients are further off than rounding explains"
        assert row["worst"] == "hidden states"


def test_case_without_time_left_is_not_taken_for_right(session):
    session.deadline = 0
    row = parity.row_of(session, "a case", lambda: pytest.fail("it should not run"))
    assert row == {"case": "a case", "wrong": parity.OUT_OF_TIME}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_steps_learn_and_differ_by_rounding_only(optimizer, session):
    config = parity.models_of(session)["GPT-2"]
    expected = parity.losses_of(config, optimizer, "float32", CPU)
    assert len(expected) == 20
    assert expected[-1] < expected[0] - 0.5
    for precision in ("bfloat16", "float16"):
        row = parity.compare_losses(parity.losses_of(config, optimizer, precision, CPU), expected, 5e-3)
        assert row["wrong"] is None
        assert row["loss_off"] > 0


def test_steps_that_go_elsewhere_are_wrong():
    expected = [4.0, 3.0, 2.0]
    assert parity.compare_losses([4.0, 3.0, 2.001], expected, 1e-3)["wrong"] is None
    wrong = parity.compare_losses([4.0, 3.01, 2.0], expected, 1e-3)
    assert wrong["wrong"] == "the loss of step 1 is 3.01, on the CPU 3"
    assert parity.compare_losses([4.0, 3.0, math.nan], expected, 1e-3)["wrong"] == (
        "the loss of step 2 is nan, on the CPU 2"
    )


# ---- stage 3 -------------------------------------------------------------------------------------------------

SOME_TESTS = """
import pytest

def test_right(): pass
def test_wrong(): assert 1 == 2, "one is not two"
@pytest.mark.parametrize("n", [1, 2])
def test_elsewhere(n): pytest.skip("needs two CUDA devices")
"""


@pytest.mark.slow
def test_tests_in_a_child_process_are_counted(session, tmp_path, monkeypatch):
    (tmp_path / "test_some.py").write_text(SOME_TESTS)
    monkeypatch.setattr(suite, "TESTS", str(tmp_path / "test_some.py"))
    result = suite.measure(session)
    assert [test["outcome"] for test in result["tests"]] == ["passed", "failed", "skipped", "skipped"]
    assert result["failed"] == ["test_wrong: AssertionError: one is not two assert 1 == 2"]
    text = suite.describe(result)
    assert "1 of 4 tests passed" in text
    assert "- 2 skipped: needs two CUDA devices" in text


@pytest.mark.slow
def test_tests_that_cannot_run_are_an_error(session, tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "TESTS", str(tmp_path / "none.py"))
    with pytest.raises(ValueError, match="ended with status 4: .*none.py"):
        suite.measure(session)
    (tmp_path / "test_long.py").write_text("import time\ndef test_long(): time.sleep(60)\n")
    monkeypatch.setattr(suite, "TESTS", str(tmp_path / "test_long.py"))
    session.deadline = time.perf_counter() + 5
    with pytest.raises(ValueError, match=r"did not end within 5 s; .* the last was: .*test_long"):
        suite.measure(session)
    monkeypatch.setattr(suite, "NEEDED", ("pytest", "no_such_package"))
    with pytest.raises(ValueError, match="need no_such_package: pip install -r requirements-dev.txt"):
        suite.measure(session)


# ---- the whole -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_whole_at_toy_sizes(tmp_path):
    done = shell("python", "bench/qualify.py", "--device=cpu", f"--out_dir={tmp_path}", timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    [written] = tmp_path.glob("*.md")
    text = written.read_text()
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        *(f"## {number}. {stage.heading}" for number, stage in STAGES.items()),
        "## What follows",
    ]
    assert page.TOY_REMARK in text
    assert "python train.py config/train_fineweb_125m.py --batch_size=" in text
