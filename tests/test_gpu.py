"""What differs on a GPU, at the shapes that runs have: heads of 64, and contexts of 64 tokens or more.

    pytest tests/test_gpu.py
    DESKGPT_TEST_DEVICE=cpu pytest tests/test_gpu.py

Without a GPU the tests are rehearsed on the CPU: it shows that they run, not what a GPU does. Those of CUDA itself
skip, and those that compile are rehearsed only if DESKGPT_TEST_DEVICE asks for it, as the second command does.
"""

from __future__ import annotations

import copy
import functools
import gc
import math
import os

import numpy as np
import pytest
import torch
from conftest import TINY, TORCHRUN, assert_equal, events, flags, shell
from tiny_models import MODERN_SETTINGS

import sample
from data.loader import Loader
from data.splits import Split
from deskgpt.checkpoint import store
from deskgpt.checkpoint.store import Checkpoint
from deskgpt.compute.batching import Batching
from deskgpt.compute.optimizer import make_optimizer, step_if_finite
from deskgpt.compute.runner import Runner, Variant
from deskgpt.estimate.memory import Step, memory
from deskgpt.kernels import replacements
from deskgpt.kernels.kv_cache import Decoder
from deskgpt.kernels.overridable import replacing
from deskgpt.kernels.verify import gradient_errors, nothing_is_zero
from deskgpt.run.saver import Saver
from deskgpt.system import hardware, peaks
from model import GPT, GPTConfig
from train import TrainConfig, main

ASKED_FOR = os.environ.get("DESKGPT_TEST_DEVICE")
DEVICE = torch.device(ASKED_FOR or ("cuda" if torch.cuda.is_available() else "cpu"))
ON_CUDA = DEVICE.type == "cuda"
COMPILED = (False, True) if ON_CUDA or ASKED_FOR else (False,)

pytestmark = [] if ON_CUDA else [pytest.mark.nightly]
cuda_only = pytest.mark.skipif(not ON_CUDA, reason="about CUDA itself")

# Settings of a run, and the model alone.
RUN = TINY | {"n_embd": 128, "block_size": 64, "device": str(DEVICE), "learning_rate": 1e-3, "auto_batch": False}
GPT2 = GPTConfig(n_layer=2, n_head=2, n_embd=128, block_size=64, vocab_size=512)
MODERN = GPTConfig(n_layer=2, n_head=2, n_embd=128, block_size=64, vocab_size=512, **MODERN_SETTINGS)


@pytest.fixture(autouse=True)
def _full_float32():
    """A run allows TF32 in its process. Here its tests must not depend on which ran before."""
    torch.set_float32_matmul_precision("highest")


def run_of(data, out_dir, **settings):
    return TrainConfig(**(RUN | {"dataset": str(data), "out_dir": str(out_dir)} | settings))


def make(config, seed=0):
    torch.manual_seed(seed)
    return GPT(config).to(DEVICE)


def batch(config, rows=4, seed=1):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, config.vocab_size, (rows, config.block_size + 1), generator=draw).to(DEVICE)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def pass_of(runner, x, y):
    """The loss and the gradients of a pass, the latter without float16's scale."""
    if runner.scaler.is_enabled():
        runner.scaler.load_state_dict(runner.scaler.state_dict() | {"scale": 1024.0})
    loss = runner.forward_backward(x, y).item()
    scale = runner.scaler.get_scale() if runner.scaler.is_enabled() else 1.0
    gradients = [g.float() / scale for g in runner.gradients()]
    runner.drop_gradients()
    return loss, gradients


# ---- the same numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, MODERN_SETTINGS], ids=["gpt2", "modern"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_gpu_takes_the_steps_that_the_cpu_takes(optimizer, settings, chars, tmp_path):
    settings = {"optimizer": optimizer, **settings}
    main(run_of(chars, tmp_path / "cpu", **(settings | {"device": "cpu", "dtype": "float32"})))
    for dtype, tolerance in {"float32": 1e-3, "bfloat16": 2e-2, "float16": 5e-3}.items():  # float32 matmuls are TF32
        main(run_of(chars, tmp_path / dtype, **(settings | {"dtype": dtype})))
        for a, b in zip(events(tmp_path / "cpu", "iter"), events(tmp_path / dtype, "iter"), strict=True):
            assert b["loss"] == pytest.approx(a["loss"], rel=tolerance), dtype


@pytest.mark.parametrize(
    ("compiled", "dtype"),
    [(False, "float32"), *((compiled, x) for compiled in COMPILED for x in ("bfloat16", "float16"))],
)
def test_every_form_passes_the_check_against_float32(compiled, dtype, chars, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing is remembered
    main(run_of(chars, tmp_path / "out", compile=compiled, dtype=dtype))
    if ON_CUDA or compiled or dtype != "float32":
        assert "checking " in capsys.readouterr().out
    assert events(tmp_path / "out", "start")[0]["compiled"] == compiled


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_step_whose_gradients_are_not_finite_changes_nothing(name):
    model = make(GPT2)
    runner = Runner(model, Variant())
    optimizer = make_optimizer(model, name, 0.1, 1e-3, (0.9, 0.95), 0.95)
    for bad in (False, True, False):
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
        runner.forward_backward(*batch(GPT2))
        if bad:
            runner.gradients()[3].view(-1)[5] = math.nan
        norms = torch.stack(torch._foreach_norm(runner.gradients()))
        step_if_finite(optimizer, runner.scaler, torch.linalg.vector_norm(norms))
        optimizer.zero_grad(set_to_none=True)
        after = (model.state_dict(), optimizer.state_dict()["state"])
        if bad:
            assert_equal(before, after)
        else:
            assert not torch.equal(before[0]["lm_head.weight"], after[0]["lm_head.weight"])


def test_checkpoint_holds_what_the_weights_were_although_training_goes_on(tmp_path):
    model = make(GPT2)
    runner = Runner(model, Variant())
    optimizer = make_optimizer(model, "adamw", 0.1, 1e-3, (0.9, 0.95), 0.95)
    saver = Saver(tmp_path, print, math.inf)
    for step in (1, 2):  # the second one takes the buffers of the first
        runner.forward_backward(*batch(GPT2))
        optimizer.step()
        expected = {key: w.clone() for key, w in model.state_dict().items()}
        args = GPT2.as_args()
        saver.save(Checkpoint(model.state_dict(), optimizer.state_dict(), args, step, 1.0, {}), best=False)
        with torch.no_grad():
            for p in runner.parameters:
                p.mul_(2.0)
        saver.wait()
        assert [saved.error for saved in saver.finished()] == [None]
        loaded = store.load(tmp_path)
        assert loaded.iter_num == step
        assert_equal(loaded.model, {key: w.cpu() for key, w in expected.items()})


def test_resumed_run_goes_on_closely(chars, tmp_path):
    main(run_of(chars, tmp_path / "whole", lr_decay_iters=6, dtype="float16"))
    main(run_of(chars, tmp_path / "halves", max_iters=3, lr_decay_iters=6, dtype="float16"))
    main(run_of(chars, tmp_path / "halves", init_from="resume", lr_decay_iters=6, dtype="float16"))
    for a, b in zip(events(tmp_path / "whole", "iter"), events(tmp_path / "halves", "iter"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
    assert store.load(tmp_path / "halves").scaler


# ---- loss in chunks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", COMPILED)
def test_loss_in_chunks_equals_the_plain_loss_and_holds_less(compiled):
    tokens, vocab_size = (8192, 50304) if ON_CUDA else (512, 5000)
    config = GPTConfig(block_size=tokens // 8, vocab_size=vocab_size, n_layer=1, n_head=4, n_embd=256)
    model = make(config)
    names = [name for name, _ in model.named_parameters()]
    x, y = batch(config, rows=8)
    y[0, :10] = -1
    passes = []
    peaks = []
    whole_at_once = Runner(model, Variant("bfloat16", compiled, refused=("chunked_loss",)))
    in_chunks = Runner(model, Variant("bfloat16", compiled))
    loss_logits = 100 * vocab_size  # 100 tokens: the last chunk is not full
    in_chunks.replacements["GPT.loss"] = functools.partial(replacements.chunked_loss, loss_logits=loss_logits)
    for runner in (whole_at_once, in_chunks):
        pass_of(runner, x, y)
        if ON_CUDA:
            torch.cuda.reset_peak_memory_stats()
        passes.append(pass_of(runner, x, y))
        peaks.append(hardware.peak_memory_bytes(DEVICE) or 0)
        torch.compiler.reset()
    (whole_loss, whole), (loss, chunks) = passes
    assert loss == pytest.approx(whole_loss, rel=1e-3)
    assert max(gradient_errors(names, chunks, whole, "bfloat16").values()) < 0.05
    if ON_CUDA:
        assert peaks[1] < peaks[0] - tokens * vocab_size * 2


@cuda_only
def test_head_gradient_of_many_chunks_is_as_exact_as_that_of_one():
    h = torch.randn(8192, 256, device=DEVICE)
    w = torch.randn(4096, 256, device=DEVICE) * 0.02
    t = torch.randint(0, 4096, (8192,), device=DEVICE)
    _, _, exact = replacements.chunked_cross_entropy(
        h.double(), w.double(), t, torch.float64, 8192, True, replacements.softmax_
    )
    errors = []
    for chunk in (8192, 128):
        _, _, grad = replacements.chunked_cross_entropy(h, w, t, torch.bfloat16, chunk, True, replacements.softmax_)
        errors.append(((grad - exact).norm() / exact.norm()).item())
    assert errors[1] < 1.2 * errors[0]


# ---- generation ----------------------------------------------------------------------------------------------


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("config", [GPT2, MODERN], ids=["gpt2", "modern"])
def test_cache_gives_the_logits_of_the_whole_model(config, dtype):
    model = make(config).eval()
    text = batch(config, rows=3)[0]
    forms = {"GPT.next_logits": Decoder(model)}
    with (
        nothing_is_zero(model),
        hardware.autocast(DEVICE, dtype),
        replacing(forms),
    ):  # all logits of a new one are zeros
        for end in range(7, 65):
            found = model.next_logits(text[:, :end]).float()
            expected = model(text[:, :end])[0][:, -1].float()
            assert (found - expected).norm() < (1e-2 if dtype == "float32" else 5e-2) * expected.norm()


@pytest.mark.parametrize("compiled", COMPILED)
def test_sampling_in_bfloat16(compiled, chars, tmp_path):
    main(run_of(chars, tmp_path, dtype="bfloat16"))
    c = sample.SampleConfig(
        out_dir=str(tmp_path),
        device=str(DEVICE),
        dtype="bfloat16",
        compile=compiled,
        start="A",
        max_new_tokens=70,
        num_samples=2,
    )
    texts = sample.main(c)
    assert [len(text) for text in texts] == [71, 71]
    assert sample.main(c) == texts


# ---- several ranks -------------------------------------------------------------------------------------------


@cuda_only
def test_two_gpus_share_a_run(chars, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    settings = RUN | {"gradient_accumulation_steps": 2, "dataset": chars, "out_dir": tmp_path}
    done = shell(*TORCHRUN, *flags(**settings))
    assert done.returncode == 0, done.stderr
    assert events(tmp_path, "start")[0]["world_size"] == 2
    main(run_of(chars, tmp_path / "one", gradient_accumulation_steps=2))
    for a, b in zip(events(tmp_path / "one", "iter"), events(tmp_path, "iter"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)


@pytest.mark.parametrize("compiled", COMPILED)
def test_one_rank_under_torchrun_computes_what_no_torchrun_does(compiled, chars, tmp_path):
    settings = RUN | {"dataset": chars, "compile": compiled, "gradient_accumulation_steps": 2}
    words = [w.replace("=2", "=1") for w in TORCHRUN]
    done = shell(*words, *flags(**settings, out_dir=tmp_path / "ddp"))
    assert done.returncode == 0, done.stderr
    assert store.load(tmp_path / "ddp").iter_num == 6
    assert events(tmp_path / "ddp", "start")[0]["compiled"] == compiled
    main(run_of(chars, tmp_path / "alone", gradient_accumulation_steps=2))
    for a, b in zip(events(tmp_path / "alone", "iter"), events(tmp_path / "ddp", "iter"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)


# ---- memory --------------------------------------------------------------------------------------------------


@cuda_only
@pytest.mark.parametrize("settings", [{}, MODERN_SETTINGS], ids=["gpt2", "modern"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_predicted_total_is_what_cuda_allocates(dtype, settings):
    config = GPTConfig(block_size=1024, vocab_size=50304, n_layer=12, n_head=12, n_embd=768, **settings)
    predicted = sum(memory(Step(config, 8, Variant(dtype), "cuda")).values())
    usable = hardware.usable_memory_bytes(DEVICE) or 0
    if predicted > 0.9 * usable:
        pytest.skip(f"needs {predicted / 2**30:.1f} GiB of the card's memory, {usable / 2**30:.1f} are usable")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = make(config)
    optimizer = make_optimizer(model, "adamw", 0.1, 1e-3, (0.9, 0.95), 0.95)
    runner = Runner(model, Variant(dtype))
    x, y = batch(config, rows=8)
    for _ in range(2):  # the second step has AdamW's moments
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            runner.forward_backward(x, y)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    allocated = torch.cuda.max_memory_allocated() - before
    assert 0.9 * allocated < predicted < 1.05 * allocated


@cuda_only
def test_batch_that_does_not_fit_is_halved_until_it_does(chars, tmp_path):
    """With most of the memory forbidden; the losses are those of a run that began with the smaller micro-batch."""
    settings = {"n_embd": 256, "block_size": 256, "dtype": "float32", "gradient_accumulation_steps": 1, "max_iters": 3}
    model = GPTConfig(block_size=256, vocab_size=65, n_layer=2, n_head=2, n_embd=256, bias=False)
    limit = sum(memory(Step(model, 64, Variant(), "cuda")).values()) + 200 * 2**20
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        with pytest.raises(ValueError, match="--batch_size=.* --gradient_accumulation_steps=.* the same training"):
            main(run_of(chars, tmp_path / "a", batch_size=1024, **settings))
        main(run_of(chars, tmp_path / "a", batch_size=1024, auto_batch="auto", **settings))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    taken = events(tmp_path / "a", "start")[0]["settings"]
    assert taken["batch_size"] * taken["gradient_accumulation_steps"] == 1024
    assert taken["batch_size"] <= 128
    names = ("batch_size", "gradient_accumulation_steps", "eval_iters", "eval_tokens")
    main(run_of(chars, tmp_path / "b", **(settings | {k: taken[k] for k in names})))
    for a, b in zip(events(tmp_path / "a", "iter"), events(tmp_path / "b", "iter"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)


@cuda_only
def test_run_takes_a_larger_micro_batch_by_itself_and_learns_the_same(chars, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing is remembered
    for choice in ("auto", False):
        main(run_of(chars, tmp_path / str(choice), batch_size=1, gradient_accumulation_steps=64, auto_batch=choice))
    taken = events(tmp_path / "auto", "start")[0]["settings"]
    assert taken["batch_size"] > 1
    assert taken["batch_size"] * taken["gradient_accumulation_steps"] == 64
    for a, b in zip(events(tmp_path / "auto", "iter"), events(tmp_path / "False", "iter"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)


@cuda_only
def test_what_the_check_takes_is_no_part_of_the_peak(chars, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    peaks = []
    for name in ("checked", "remembered"):
        gc.collect()  # what the run before has left
        main(run_of(chars, tmp_path / name, dtype="bfloat16", batch_size=256))
        peaks.append(events(tmp_path / name, "iter")[-1]["peak_memory_bytes"])
    assert peaks[0] == pytest.approx(peaks[1], rel=0.1)


# ---- data and peaks ------------------------------------------------------------------------------------------


def test_batches_made_ahead_are_those_made_on_the_spot(chars):
    split = Split(chars, "train", 64, 256)
    loader = Loader(split, Batching(8, 2), DEVICE)
    for step in range(50):
        whole = split.train_batch(step, np.arange(16), 16)
        for micro, made in zip(range(2), loader.step(), strict=True):
            for ours, rows in zip((made.x, made.y), whole, strict=True):
                assert ours.device.type == DEVICE.type
                assert torch.equal(ours.cpu(), torch.from_numpy(rows[micro * 8 : micro * 8 + 8]))
    loader.close()


@cuda_only
def test_card_that_computes_is_one_that_torch_has_kernels_for():
    assert torch.ones(2, device=DEVICE).sum().item() == 2
    assert hardware.unserved_gpu(torch.device("cuda", 0)) is None


@cuda_only
def test_sweep_of_matmuls_leaves_no_trace_and_is_near_the_published_peak(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    peaks.measured_matmul_flops.cache_clear()
    device = torch.device("cuda", 0)
    held, peak = torch.cuda.memory_allocated(device), hardware.peak_memory_bytes(device) or 0
    for dtype in ("float32", "bfloat16", "float16"):
        flops, _ = peaks.peak_flops(device, dtype)
        assert flops > 1e11
        measured = peaks.measured_matmul_flops(device, dtype)
        assert 0.3 * flops < measured < 1.5 * flops  # many cards run above the clock that is published
    workspace = 64 * 2**20  # cuBLAS', more than it takes
    assert torch.cuda.memory_allocated(device) <= held + workspace
    assert (hardware.peak_memory_bytes(device) or 0) <= max(peak, held + workspace)
    x = torch.empty(2**30, dtype=torch.uint8, device=device)
    assert (hardware.peak_memory_bytes(device) or 0) >= x.numel()
