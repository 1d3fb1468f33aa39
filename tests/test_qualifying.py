"""The stages of bench/qualify.py that measure, on a CPU at small sizes, and what their figures are made of."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT

from bench.qualifying import batches, breakdown, peer, reference, sampling, steps, variants, work
from bench.qualifying.breakdown import Kernel, category
from bench.qualifying.eight_bit import EightBitLinear, use_eight_bits
from bench.qualifying.session import TOY, Session, Sizes
from deskgpt.compute.runner import Form, Runner
from deskgpt.faster import kernels
from deskgpt.machine import hardware, peak_flops
from deskgpt.predict.fit import USABLE
from deskgpt.predict.memory import Step, memory
from model import GPTConfig

SMALL = Sizes(
    model=GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=32, vocab_size=100),
    first_batch=2,
    last_batch=8,
    tokens_per_step=256,
    sampled_tokens=6,
    is_toy=True,
)
PLAIN = Form()
NANOGPT = os.environ.get("NANOGPT")  # an unmodified checkout of it


@pytest.fixture
def s(tmp_path, monkeypatch) -> Session:
    """A session on the CPU with time enough, which need not measure peaks first."""
    monkeypatch.setattr(work, "ROUNDS_S", 0.01)
    monkeypatch.setattr(peak_flops, "measured_matmul_flops", lambda device, dtype: 1e11)
    return Session(torch.device("cpu"), SMALL, tmp_path, deadline=time.perf_counter() + 600)


def result_of(stage: Any, s: Session) -> dict[str, Any]:
    """What a stage measures, after the way through JSON that it takes into the next call."""
    return json.loads(json.dumps(stage.measure(s)))


# ---- 4: micro-batches ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_larger_micro_batches_take_more_memory_and_the_fastest_is_the_best(s):
    result = result_of(batches, s)
    rows = result["rows"]
    assert [r["batch_size"] for r in rows] == [2, 4, 6, 8]
    predicted = [r["predicted_bytes"] for r in rows]
    assert predicted == sorted(set(predicted))
    assert all(r["fits"] and r["problem"] is None and r["step_ms"] > 0 and r["host_ms"] > 0 for r in rows)
    assert result["best"] == max(rows, key=lambda r: r["tokens_per_s"])["batch_size"]
    assert result["best_for_gb"].keys() == result["speed_for_gb"].keys() == {"8", "12", "16", "24", "80"}
    text = batches.describe(result)
    assert f"| {result['best']} (fastest) |" in text
    s.results[4] = result
    assert work.best_batch(s) == result["best"]
    assert work.best_batch(s, sequences=8) in (2, 4, 8)
    assert work.found_form(s) == Form(**result["form"])


def test_before_stage_4_the_micro_batch_is_the_largest_predicted_to_fit(s, monkeypatch):
    assert work.best_batch(s) == 8
    needed = sum(memory(Step(SMALL.model, 4, Form(compiled=True), "cpu")).values())
    monkeypatch.setattr(hardware, "memory_bytes", lambda device: needed / USABLE)
    assert work.best_batch(s) == 4
    monkeypatch.setattr(hardware, "memory_bytes", lambda device: 1)
    assert work.best_batch(s) == SMALL.first_batch


def test_out_of_memory_is_a_row_and_ends_the_search(s, monkeypatch):
    measured = batches.measured

    def up_to_two(s, model, form, batch_size):
        if batch_size > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return measured(s, model, form, batch_size)

    monkeypatch.setattr(batches, "measured", up_to_two)
    result = result_of(batches, s)
    assert {r["batch_size"]: r["problem"] for r in result["rows"]} == {2: None, 4: "out of memory"}
    assert result["best"] == 2
    assert "| 4 | out of memory |" in batches.describe(result)


def test_where_compiling_fails_the_plain_form_is_measured(s, monkeypatch):
    monkeypatch.setattr(work, "usual_form", lambda device: Form(compiled=True))

    def refuse(*args, **kwargs):
        raise RuntimeError("no working Triton")

    monkeypatch.setattr(torch, "compile", refuse)
    result = result_of(batches, s)
    assert not result["form"]["compiled"]
    assert result["not_compiled"] == "RuntimeError: no working Triton"
    assert all(r["fits"] for r in result["rows"])
    assert "Compiling failed: RuntimeError: no working Triton." in batches.describe(result)


def test_without_time_the_first_size_is_measured_and_the_others_are_named(s):
    s.deadline = 0.0
    result = result_of(batches, s)
    assert [r["batch_size"] for r in result["rows"]] == [2]
    assert result["left_out"] == [4, 8]
    assert "Not tried, for want of time: 4, 8." in batches.describe(result)


def test_a_card_takes_the_fastest_micro_batch_whose_reserved_memory_it_holds():
    rows: list[dict[str, Any]] = []
    for batch_size, gib, speed in ((8, 6.0, 90.0), (16, 9.0, 100.0), (32, 14.0, 99.0)):
        row = {"batch_size": batch_size, "fits": True, "reserved_bytes": gib * 2**30, "tokens_per_s": speed}
        rows.append(row | {"predicted_bytes": 0})
    for limit_gib, expected in ((5.9, None), (6.0, 8), (13.0, 16), (99.0, 16)):
        best = batches.fastest(batches.within(rows, limit_gib * 2**30))
        assert (best["batch_size"] if best else None) == expected
    # Where the allocator does not count, the prediction does.
    unknown = {"batch_size": 8, "fits": True, "reserved_bytes": None, "predicted_bytes": 100, "tokens_per_s": 1.0}
    assert batches.within([unknown], 99) == []
    assert batches.within([unknown], 100) == [unknown]


def test_sizes_are_doubled_and_then_halfway_between():
    assert batches.doubled(4, 512) == [4, 8, 16, 32, 64, 128, 256, 512]
    assert batches.between(4, 64, 512) == [12, 24, 48, 96]
    assert batches.between(4, 512, 512) == [12, 24, 48, 96, 192, 384]
    assert batches.between(4, 4, 512) == []


# ---- 5: variants ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_variants_take_turns_and_the_lowest_ratio_is_the_best(s, monkeypatch):
    """Those that are not compiled: a quick look at all of the stage but the compiler."""
    all_of = variants.variants
    monkeypatch.setattr(
        variants, "variants", lambda usual, logits: [v for v in all_of(usual, logits) if not v.form.compiled]
    )
    result = result_of(variants, s)
    rows = {r["name"]: r for r in result["rows"]}
    usual = rows["float32, not compiled"]
    assert result["rows"][0] == usual
    assert usual["ratio"] == 1
    # The CPU has no cuDNN: its row says so, and the others went on.
    assert "No viable backend" in rows["cudnn attention"]["problem"]
    measured = [r for r in result["rows"] if r["problem"] is None]
    assert {"loss whole", "flash attention", "math attention", "FP8 in the blocks", "INT8 in the blocks"} <= {
        r["name"] for r in measured
    }
    for r in measured:
        assert r["ratio_least"] <= r["ratio"] <= r["ratio_most"]
        assert r["loss"] == pytest.approx(usual["loss"], rel=1e-2)
    assert result["best"] == min(measured, key=lambda r: r["ratio"])["name"]
    assert f"The fastest: {result['best']}." in variants.describe(result)


@pytest.mark.slow
def test_compiled_variants_compute_the_same_loss(s, monkeypatch):
    wanted = ("float32, compiled", variants.AUTOTUNE, "inductor's auto-chunker")
    all_of = variants.variants
    monkeypatch.setattr(
        variants, "variants", lambda usual, logits: [v for v in all_of(usual, logits) if v.name in wanted]
    )
    result = result_of(variants, s)
    assert {r["name"] for r in result["rows"]} == {"float32, not compiled", *wanted}
    for r in result["rows"]:
        assert r["problem"] is None, r
        assert r["loss"] == pytest.approx(result["rows"][0]["loss"], rel=1e-4)


def test_chunk_sizes_lead_from_2_to_the_25_to_the_whole():
    assert variants.chunk_exponents(64 * 1024 * 50304) == [31, 29, 27, 25]
    assert variants.chunk_exponents(12 * 1024 * 50304) == [29, 27, 25]
    assert variants.chunk_exponents(2 * 64 * 500) == [25]


def test_models_that_are_separate_share_parameters_but_no_compiled_code(s):
    """Otherwise a variant would be timed with what was compiled for another."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = work.new_model(s)
    x, _ = work.random_batch(s, 1)
    with variants.compiled_apart():
        for twin in (model, model, work.separate(model), work.separate(model)):
            assert [p.data_ptr() for p in twin.parameters()] == [p.data_ptr() for p in model.parameters()]
            torch.compile(twin, backend=backend)(x)
    assert len(graphs) == 3


def test_chunks_of_the_loss_give_the_whole_loss(s):
    model, batch = work.new_model(s), work.random_batch(s, 3)
    assert kernels.tokens_per_chunk(3 * 32, 100, 700) == 7  # the last chunk is smaller
    losses, gradients = [], []
    for loss_logits in (0, 700):
        contestant = variants.Contestant(s, model, batch, variants.Variant("", PLAIN, loss_logits=loss_logits))
        contestant.warm_up()
        runner = contestant.runner
        assert ("GPT.loss" in runner.forms) == bool(loss_logits)
        with runner.evaluating():
            losses.append(runner.loss(*batch).item())
        runner.drop_gradients()
        contestant.once()
        gradients.append([g.clone() for g in runner.gradients()])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


# The largest errors of 20 seeds, |difference| / |gradient|, were 0.039 with FP8 and 0.0082 with INT8.
@pytest.mark.parametrize(("kind", "limit"), [("fp8", 0.06), ("int8", 0.015)])
def test_eight_bit_gradients_are_close_to_those_in_bfloat16(kind, limit):
    torch.manual_seed(0)
    x = torch.randn(4, 8, 64)
    grad = torch.randn(4, 8, 96)
    found = []
    linear = torch.nn.Linear(64, 96)
    for layer in (linear, EightBitLinear(linear, kind)):
        linear.zero_grad()
        h = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(h)
        y.backward(grad.to(y.dtype))
        assert y.dtype == torch.bfloat16
        tensors = [y.detach(), h.grad, linear.weight.grad, linear.bias.grad]
        found.append([t.float().clone() for t in tensors if t is not None])
    errors = [((b - a).norm() / a.norm()).item() for a, b in zip(*found, strict=True)]
    assert len(errors) == 4
    assert max(errors[:2]) < limit
    assert max(errors[:2]) > 1e-3  # it did round to 8 bits
    assert max(errors[2:]) < 1e-3  # gradients of weight and bias stay in bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_eight_bits_replace_all_linear_layers_of_the_blocks_and_can_be_traced(s, kind):
    model = work.new_model(s)
    twin = work.separate(model)
    use_eight_bits(twin, kind)
    assert {name for name, _ in twin.named_parameters()} == {name for name, _ in model.named_parameters()}
    layers = [m for m in twin.transformer.modules() if isinstance(m, torch.nn.Linear)]
    assert layers == []
    batch = work.random_batch(s, 2)
    plain = Runner(model, PLAIN)
    plain.forward_backward(*batch)
    expected = [g.clone() for g in plain.gradients()]
    # As on CUDA: forward and backward pass are two graphs.
    traced = torch.compile(twin, backend="aot_eager", fullgraph=True)
    plain.drop_gradients()
    with torch.autocast("cpu", torch.bfloat16):
        loss = traced(*batch)[1]
    loss.backward()
    for a, b in zip(expected, plain.gradients(), strict=True):
        assert (a - b).norm() < 0.15 * a.norm()


# ---- 6: breakdown --------------------------------------------------------------------------------------------


def test_shares_of_a_step_add_up_to_the_whole(s):
    result = result_of(breakdown, s)
    assert tuple(result["ms"]) == breakdown.CATEGORIES
    assert sum(result["share"].values()) == pytest.approx(1)
    assert sum(result["ms"].values()) == pytest.approx(result["whole_ms"])
    for kind in set(breakdown.CATEGORIES) - {"idle", "casts and copies"}:
        assert result["ms"][kind] > 0, kind
    assert result["micro_batches"] == breakdown.MICRO_BATCHES
    assert result["kernels_per_micro_batch"] > 50
    # Each parameter's gradient is added to that of the micro-batch before, in three of four micro-batches.
    n_parameters = len(list(work.new_model(s).parameters()))
    assert result["traffic"]["gradients accumulated outside the graph"]["count"] >= 0.75 * n_parameters
    text = breakdown.describe(result)
    assert "| whole |" in text
    assert "the host waits" in text


# Names as CUDA's libraries and inductor give them.
KERNELS = {
    Kernel("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", 1, ("aten::mm",), ((8, 768), (768, 3072))): "body matmuls",
    Kernel("sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", 1, ("aten::mm",), ((8, 768), (768, 50304))): "head matmuls",
    Kernel(
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_tn", 1, ("aten::mm", "deskgpt::chunked_cross_entropy")
    ): "head matmuls",
    Kernel("triton_red_fused__log_softmax_0", 1, ("triton_red_fused__log_softmax_0",)): "rest of head and loss",
    Kernel(
        "triton_poi_fused_exp_mul_1", 1, ("triton_poi_fused_exp_mul_1", "deskgpt::chunked_cross_entropy")
    ): "rest of head and loss",
    Kernel("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7", 1): "attention",
    Kernel("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>", 1): "attention",
    Kernel(
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
        1,
        ("aten::add_", "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"),
        ((768, 768), (768, 768)),
    ): "gradient accumulation",
    Kernel(
        "void at::native::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor>", 1, ("aten::_fused_adamw_",)
    ): "clipping and optimizer",
    Kernel(
        "void at::native::vectorized_elementwise_kernel<4, MulFunctor>", 1, ("aten::mul_", "Optimizer.step#AdamW.step")
    ): "clipping and optimizer",
    Kernel("triton_poi_fused__to_copy_t_3", 1): "casts and copies",
    Kernel("triton_poi_fused_cat_12", 1): "casts and copies",
    Kernel("Memcpy HtoD (Pinned -> Device)", 1): "casts and copies",
    Kernel(
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>",
        1,
        ("aten::copy_", "aten::_to_copy", "aten::to", "aten::linear"),
        ((50304, 768), (50304, 768)),
    ): "casts and copies",
    Kernel("triton_per_fused__to_copy_add_native_layer_norm_5", 1): "norms and elementwise",
    Kernel(
        "void at::native::vectorized_gather_kernel", 1, ("aten::embedding",), ((50304, 768), (8, 1024))
    ): "norms and elementwise",
}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name[:40])
def test_kernels_of_cuda_belong_to_these_categories(kernel):
    assert category(kernel, vocab_size=50304) == KERNELS[kernel]


def test_traffic_is_told_from_names_and_shapes():
    weights: set[tuple[int, ...]] = {(2304, 768), (768, 768)}
    chain = ("aten::copy_", "aten::_to_copy", "aten::to", "aten::linear")
    casts = [Kernel("copy", 1, chain, ((2304, 768), (2304, 768))), Kernel("triton_poi_fused__to_copy_0", 1)]
    others = [Kernel("copy", 1, chain, ((8, 768), (8, 768))), Kernel("triton_poi_fused__to_copy_gelu_0", 1)]
    joined = [Kernel("CatArrayBatchedCopy", 1, ("aten::cat",)), Kernel("triton_poi_fused_cat_view_2", 1)]
    result = breakdown.summed([*casts, *others, *joined], 10.0, 50304, weights, micro_batches=2)
    assert result["traffic"]["weights cast"] == {"count": 1.0, "ms": 1.0}
    assert result["traffic"]["gradients of q, k and v concatenated"] == {"count": 1.0, "ms": 1.0}
    assert result["ms"]["idle"] == 4
    assert result["kernels_per_micro_batch"] == 3


def test_kernels_of_a_profile_are_counted_once_whether_or_not_an_operator_started_them():
    """Stands for a profile on CUDA: a matmul, its kernel, a copy that no operator started, and a named range."""
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU

    def event(name: str, device_type: Any, us: float, **more: Any) -> SimpleNamespace:
        time_range = SimpleNamespace(start=0.0, end=us)
        given: dict[str, Any] = {"kernels": [], "cpu_parent": None, "input_shapes": [], "is_user_annotation": False}
        return SimpleNamespace(name=name, device_type=device_type, time_range=time_range, **(given | more))

    started = SimpleNamespace(name="gemm", duration=2000.0)
    step = event("Optimizer.step#AdamW.step", cpu, 9e9, is_user_annotation=True)
    events = [
        step,
        event("aten::mm", cpu, 5.0, kernels=[started], cpu_parent=step, input_shapes=[[2, 3], []]),
        event("gemm", cuda, 2000.0),
        event("Memcpy HtoD", cuda, 500.0),
        event("Optimizer.step#AdamW.step", cuda, 2500.0, is_user_annotation=True),
    ]
    assert breakdown.kernels_of(events, "cuda") == [
        Kernel("gemm", 2.0, ("aten::mm", "Optimizer.step#AdamW.step"), ((2, 3),)),
        Kernel("Memcpy HtoD", 0.5),
    ]


# ---- 7: steps ------------------------------------------------------------------------------------------------


def test_whole_steps_of_both_optimizers_are_timed(s):
    result = result_of(steps, s)
    for name in ("adamw", "muon"):
        r = result[name]
        assert r["problem"] is None
        assert r["tokens_per_step"] == SMALL.tokens_per_step
        assert len(r["steps_s"]) == 2
        assert r["tokens_per_s"] == pytest.approx(SMALL.tokens_per_step / r["step_s"])
        assert r["mfu"] is None  # no CPU has a published peak
        assert 0 < r["mfu_measured"] < 1
        assert 0 <= r["data_wait"] <= 1
    assert "2 steps of 256 tokens" in steps.describe(result)
    assert not list(s.folder.rglob("ckpt*.pt"))


def test_steps_of_one_optimizer_that_fail_leave_the_other(s, monkeypatch):
    run_steps = work.run_steps

    def no_muon(s, name, *args, **kwargs):
        if "muon" in name:
            raise RuntimeError("CUDA error: an illegal memory access")
        return run_steps(s, name, *args, **kwargs)

    monkeypatch.setattr(work, "run_steps", no_muon)
    result = result_of(steps, s)
    assert result["adamw"]["problem"] is None
    assert result["muon"] == {"problem": "RuntimeError: CUDA error: an illegal memory access"}
    assert "| muon | RuntimeError: CUDA error" in steps.describe(result)
    s.deadline = 0.0
    monkeypatch.setattr(work, "run_steps", run_steps)
    assert result_of(steps, Session(s.device, SMALL, s.folder / "later"))["muon"]["problem"].startswith("left out")


# ---- 8: sampling ---------------------------------------------------------------------------------------------


def test_sampling_is_timed_by_number_of_samples_and_choice(s):
    result = result_of(sampling, s)
    assert [r["samples"] for r in result["rows"]] == [1, 10]
    for r in result["rows"]:
        assert r["choices_ms"].keys() == sampling.CHOICES.keys()
        assert 0 < r["first_ms"] <= r["first_most_ms"]
    assert result["left_out"] == []
    assert result["dtype"] == "float32"
    assert sampling.describe(result).count("\n| 1") == 2
    s.deadline = 0.0
    short = result_of(sampling, s)
    assert [r["choices_ms"] for r in short["rows"]] == [{}, {}]
    assert "Not timed, for want of time: top_k=200 of 1" in sampling.describe(short)


# ---- 9: reference --------------------------------------------------------------------------------------------


def test_characters_are_the_same_everywhere_and_follow_their_chain():
    ids = reference.characters(1 << 18, seed=1)
    assert reference.sha256(ids.astype("<u2")) == "9d39c5b3ee49f1a2594233e39f3f0dc92d13e9716ba726dfc5622ed868dc02f3"
    assert ids.max() < reference.CHARS
    triples = np.unique(np.stack([ids[:-2], ids[1:-1], ids[2:]]), axis=1, return_counts=True)
    after: dict[tuple[int, int], list[int]] = {}
    for (a, b, _), n in zip(triples[0].T.tolist(), triples[1].tolist(), strict=True):
        after.setdefault((a, b), []).append(n)
    # The seams between lanes are the only exceptions to four successors.
    total = sum(map(sum, after.values()))
    assert sum(sum(sorted(counts)[-4:]) for counts in after.values()) > 0.99 * total
    entropy = 0.0
    for counts in after.values():
        kept = sorted(counts)[-4:]
        entropy -= sum(n * math.log(n / sum(kept)) for n in kept) / total
    assert entropy == pytest.approx(reference.ENTROPY, rel=0.03)


@pytest.mark.slow
def test_toy_reference_reaches_the_known_loss_and_another_run_does_not(s):
    result = result_of(reference, s)
    assert result["agrees"], result
    assert result["entropy"] < result["val_loss"] < result["first_val_loss"]
    assert "within 0.0300" in reference.describe(result)
    data = s.folder / "characters"
    for number, wrong in enumerate(("--learning_rate=5e-4", "--dropout=0.0")):
        size = reference.SIZES["toy"]
        off = reference.trained(data, s.folder / str(number), size, s.device, "--compile=False", wrong)
        assert not reference.compared(off["val_loss"], size.known)["agrees"]


def test_a_loss_agrees_within_the_tolerance():
    known = reference.Known(3.0, 0.1, "2026-11-22", "a command", "a reason")
    assert reference.compared(3.09, known)["agrees"]
    assert reference.compared(2.91, known)["agrees"]
    assert not reference.compared(3.11, known)["agrees"]
    assert not reference.compared(math.nan, known)["agrees"]


# ---- 10: nanoGPT ---------------------------------------------------------------------------------------------


def test_without_nanogpt_the_stage_says_why_it_is_skipped(s, tmp_path):
    assert peer.describe(result_of(peer, s)) == "Skipped: no checkout of nanoGPT was named."
    s.nanogpt = tmp_path
    assert peer.describe(result_of(peer, s)) == f"Skipped: {tmp_path} holds no train.py."


def test_where_nanogpt_does_not_fit_both_take_half_the_micro_batch(s, tmp_path, monkeypatch):
    (tmp_path / "train.py").touch()
    s.nanogpt = tmp_path
    s.results[4] = {"rows": [{"batch_size": 4, "fits": True, "tokens_per_s": 1.0}], "form": {}}
    tried = []

    def one_round(x, steps, seconds):
        batch_size = next(a for a in x.command if a.startswith("--batch_size"))
        tried.append((x.name, batch_size, next(a for a in x.command if a.startswith("--gradient_acc"))))
        if x.name == "nanoGPT" and batch_size == "--batch_size=4":
            raise peer.Failed("nanoGPT ended after 0 steps: CUDA out of memory", "out of memory")
        x.rounds_ms.append([10.0 if x.name == "deskGPT" else 20.0] * 3)
        x.first_s.append(1.0)
        if x.name == "deskGPT":
            x.start = {"tokens_per_step": 256, "flops_per_token": 1.0, "peak_flops": 1e9}

    monkeypatch.setattr(peer.timing, "run", one_round)
    result = result_of(peer, s)
    assert result["batch_size"] == 2
    assert result["ratio"] == 2
    assert tried[1] == ("nanoGPT", "--batch_size=4", "--gradient_accumulation_steps=2")
    assert tried[3] == ("nanoGPT", "--batch_size=2", "--gradient_accumulation_steps=4")
    assert "deskGPT is 2.00 times as fast" in peer.describe(result)
    assert "did not fit both: micro-batch 4: nanoGPT ended" in peer.describe(result)


@pytest.mark.slow
@pytest.mark.skipif(NANOGPT is None, reason="NANOGPT names no checkout of nanoGPT")
def test_nanogpt_itself_runs_beside_ours(s):
    s.nanogpt = Path(NANOGPT or "")
    result = result_of(peer, s)
    assert [r["name"] for r in result["rows"]] == ["deskGPT", "nanoGPT"]
    assert result["ratio"] > 0


# ---- all -----------------------------------------------------------------------------------------------------


def test_sizes_of_a_toy_have_a_vocabulary_unlike_its_widths():
    """The breakdown tells the head's matmuls by it."""
    for sizes in (TOY, SMALL):
        c = sizes.model
        assert c.vocab_size not in (c.n_embd, 3 * c.n_embd, 4 * c.n_embd, c.block_size)
    assert (ROOT / reference.CONFIG).is_file()
