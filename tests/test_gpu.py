"""What differs on a GPU. Every test here needs one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import TINY, TORCHRUN, events, flags, shell

from data.loader import BatchPlan, Loader
from data.splits import Split
from deskgpt import checkpoint, hardware, kernels, peak_flops
from deskgpt.estimate import memory
from deskgpt.optimizer import make_optimizer
from deskgpt.runner import Form, Runner
from model import GPT, GPTConfig
from train import TrainConfig, main

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


CARD = {"device": "cuda", "dtype": "auto"}


def tiny(data, out_dir, **settings):
    return TrainConfig(**(TINY | {"dataset": str(data), "out_dir": str(out_dir)} | CARD | settings))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gpu_takes_the_steps_that_the_cpu_takes(chars, tmp_path, dtype):
    main(tiny(chars, tmp_path / "cpu", device="cpu", dtype="float32"))
    main(tiny(chars, tmp_path / "gpu", dtype=dtype))
    tolerance = {"float32": 1e-3, "bfloat16": 2e-2, "float16": 5e-3}[dtype]  # float32 matmuls are TF32
    for a, b in zip(events(tmp_path / "cpu", "iter"), events(tmp_path / "gpu", "iter"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=tolerance)


def test_compiled_steps_are_the_plain_ones(chars, tmp_path):
    for compiled in (False, True):
        main(tiny(chars, tmp_path / str(compiled), compile=compiled, dtype="float32"))
    assert events(tmp_path / "True", "start")[0]["compiled"]
    for a, b in zip(events(tmp_path / "False", "iter"), events(tmp_path / "True", "iter"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)


def test_loss_in_chunks_equals_the_plain_loss_and_holds_less(monkeypatch):
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=1024, vocab_size=50304, n_layer=1, n_head=4, n_embd=256)).to("cuda")
    x = torch.randint(0, 50304, (8, 1024), device="cuda")
    losses, gradients, peaks = [], [], []
    for chunk in (1 << 40, kernels.LOGITS_PER_CHUNK):
        monkeypatch.setattr(kernels, "LOGITS_PER_CHUNK", chunk)
        model.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        with hardware.autocast(torch.device("cuda"), "bfloat16"):
            loss = model(x, x)[1]
        loss.backward()
        losses.append(loss.item())
        gradients += [p.grad.clone() for p in [model.lm_head.weight] if p.grad is not None]
        peaks.append(torch.cuda.max_memory_allocated())
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert (gradients[1] - gradients[0]).norm() < 0.02 * gradients[0].norm()
    assert peaks[1] < peaks[0] - 8 * 1024 * 50304 * 4


def test_resumed_run_goes_on_closely(chars, tmp_path):
    main(tiny(chars, tmp_path / "whole", lr_decay_iters=6, dtype="float16"))
    main(tiny(chars, tmp_path / "halves", max_iters=3, lr_decay_iters=6, dtype="float16"))
    main(tiny(chars, tmp_path / "halves", init_from="resume", lr_decay_iters=6, dtype="float16"))
    for a, b in zip(events(tmp_path / "whole", "iter"), events(tmp_path / "halves", "iter"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
    assert checkpoint.load(tmp_path / "halves").scaler


def test_samples_with_the_cache_are_those_without():
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=32, vocab_size=100, n_layer=2, n_head=4, n_embd=32)).to("cuda").eval()
    idx = torch.randint(0, 100, (3, 9), device="cuda")
    a, b = (torch.stack(list(model.generate(idx, 45, seed=1, use_cache=c))) for c in (True, False))
    assert torch.equal(a, b)


def test_two_gpus_share_a_run(chars, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    settings = TINY | CARD | {"gradient_accumulation_steps": 2, "dataset": chars, "out_dir": tmp_path}
    done = shell(*TORCHRUN, *flags(**settings))
    assert done.returncode == 0, done.stderr
    assert events(tmp_path, "start")[0]["world_size"] == 2
    main(tiny(chars, tmp_path / "one", gradient_accumulation_steps=2))
    for a, b in zip(events(tmp_path / "one", "iter"), events(tmp_path, "iter"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)


def test_one_rank_under_torchrun_uses_nccl(chars, tmp_path):
    settings = TINY | CARD | {"dataset": chars, "out_dir": tmp_path}
    words = [w.replace("=2", "=1") for w in TORCHRUN]
    done = shell(*words, *flags(**settings))
    assert done.returncode == 0, done.stderr
    assert checkpoint.load(tmp_path).iter_num == 6


def test_backend_of_gpus_is_nccl(chars, tmp_path, monkeypatch):
    asked = []

    def init_process_group(name):
        asked.append(name)
        raise RuntimeError("far enough")

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("torch.distributed.init_process_group", init_process_group)
    with pytest.raises(RuntimeError, match="far enough"):
        main(tiny(chars, tmp_path))
    assert asked == ["nccl"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("compiled", [False, True])
def test_predicted_total_is_within_15_percent_of_what_cuda_allocates(compiled, dtype):
    config = GPTConfig(block_size=1024, vocab_size=50304, n_layer=12, n_head=12, n_embd=768, bias=False)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = GPT(config).to("cuda")
    optimizer = make_optimizer(model, "adamw", 0.1, 1e-3, (0.9, 0.95), 0.95, "cuda")
    runner = Runner(model, Form(dtype, compiled))
    x, y = (torch.randint(0, config.vocab_size, (4, config.block_size), device="cuda") for _ in "xy")
    for _ in range(2):  # the second step has AdamW's moments, and nothing of the compiling
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            runner.backward(x, y)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    predicted = sum(memory(config, 4, dtype, "cuda", compiled).values())
    assert predicted == pytest.approx(torch.cuda.max_memory_allocated() - before, rel=0.15)


def test_batch_that_does_not_fit_is_halved_until_it_does(chars, tmp_path):
    """With most of the memory forbidden; the losses are those of a run that began with the smaller micro-batch."""
    settings = {"n_embd": 256, "block_size": 256, "dtype": "float32", "gradient_accumulation_steps": 1, "max_iters": 3}
    model = GPTConfig(block_size=256, vocab_size=65, n_layer=2, n_head=2, n_embd=256, bias=False)
    limit = sum(memory(model, 64, "float32", "cuda", compiled=False).values()) + 200 * 2**20
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        with pytest.raises(ValueError, match="--batch_size=.* --gradient_accumulation_steps=.* the same training"):
            main(tiny(chars, tmp_path / "a", batch_size=1024, **settings))
        main(tiny(chars, tmp_path / "a", batch_size=1024, auto_batch=True, **settings))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    taken = events(tmp_path / "a", "start")[0]["settings"]
    assert taken["batch_size"] * taken["gradient_accumulation_steps"] == 1024
    assert taken["batch_size"] <= 128
    again = settings | {k: taken[k] for k in ("batch_size", "gradient_accumulation_steps", "eval_tokens")}
    main(tiny(chars, tmp_path / "b", **again))
    for a, b in zip(events(tmp_path / "a", "iter"), events(tmp_path / "b", "iter"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)


def test_batches_made_ahead_are_those_made_on_the_spot(chars):
    split = Split(chars, "train", 64, 256)
    device = torch.device("cuda")
    loader = Loader(split, BatchPlan(8, 2), device)
    for step in range(50):
        whole = split.train_batch(step, np.arange(16), 16)
        for micro in range(2):
            for ours, rows in zip(loader.next(), whole, strict=True):
                assert ours.device.type == "cuda"
                assert torch.equal(ours.cpu(), torch.from_numpy(rows[micro * 8 : micro * 8 + 8]))
    loader.close()


def test_sweep_of_matmuls_leaves_no_trace_and_is_below_the_published_peak(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    peak_flops.measured_matmul_flops.cache_clear()
    device = torch.device("cuda", 0)
    held, peak = torch.cuda.memory_allocated(device), hardware.peak_memory_bytes(device) or 0
    for dtype in ("float32", "bfloat16", "float16"):
        flops, _ = peak_flops.peak_flops(device, dtype)
        assert flops > 1e11
        measured = peak_flops.measured_matmul_flops(device, dtype)
        assert 0.3 * flops < measured <= 1.02 * flops
    workspace = 64 * 2**20  # cuBLAS', more than it takes
    assert torch.cuda.memory_allocated(device) <= held + workspace
    assert (hardware.peak_memory_bytes(device) or 0) <= max(peak, held + workspace)
    x = torch.empty(2**30, dtype=torch.uint8, device=device)
    assert (hardware.peak_memory_bytes(device) or 0) >= x.numel()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("compiled", [False, True])
def test_every_form_passes_the_check_against_float32(compiled, dtype, chars, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing is remembered
    main(tiny(chars, tmp_path / "out", compile=compiled, dtype=dtype, n_embd=128))
    assert "comparing loss and gradients in " in capsys.readouterr().out
    assert events(tmp_path / "out", "start")[0]["compiled"] == compiled
