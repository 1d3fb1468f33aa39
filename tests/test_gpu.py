"""What differs on a GPU. Every test here needs one."""

from __future__ import annotations

import pytest
import torch
from conftest import TINY, TORCHRUN, events, flags, shell

import checkpoint
import hardware
import model as model_module
from model import GPT, GPTConfig
from train import TrainConfig, main

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def tiny(data, out_dir, **settings):
    return TrainConfig(**(TINY | {"dataset": str(data), "out_dir": str(out_dir), "device": "cuda"} | settings))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gpu_takes_the_steps_that_the_cpu_takes(chars, tmp_path, dtype):
    main(tiny(chars, tmp_path / "cpu", device="cpu"))
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
    for chunk in (1 << 40, model_module.LOGITS_CHUNK):
        monkeypatch.setattr(model_module, "LOGITS_CHUNK", chunk)
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
    assert checkpoint.load(tmp_path / "halves")["scaler"]


def test_samples_with_the_cache_are_those_without():
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=32, vocab_size=100, n_layer=2, n_head=4, n_embd=32)).to("cuda").eval()
    idx = torch.randint(0, 100, (3, 9), device="cuda")
    a, b = (torch.stack(list(model.generate(idx, 45, seed=1, use_cache=c))) for c in (True, False))
    assert torch.equal(a, b)


def test_two_gpus_share_a_run(chars, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    settings = TINY | {"device": "cuda", "gradient_accumulation_steps": 2, "dataset": chars, "out_dir": tmp_path}
    done = shell(*TORCHRUN, *flags(**settings))
    assert done.returncode == 0, done.stderr
    assert events(tmp_path, "start")[0]["world_size"] == 2
    main(tiny(chars, tmp_path / "one", gradient_accumulation_steps=2))
    for a, b in zip(events(tmp_path / "one", "iter"), events(tmp_path, "iter"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)


def test_one_rank_under_torchrun_uses_nccl(chars, tmp_path):
    settings = TINY | {"device": "cuda", "dataset": chars, "out_dir": tmp_path}
    words = [w.replace("=2", "=1") for w in TORCHRUN]
    done = shell(*words, *flags(**settings))
    assert done.returncode == 0, done.stderr
    assert checkpoint.load(tmp_path)["iter_num"] == 6


def test_backend_of_gpus_is_nccl(chars, tmp_path, monkeypatch):
    asked = []

    def init_process_group(name):
        asked.append(name)
        raise RuntimeError("far enough")

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("train.dist.init_process_group", init_process_group)
    with pytest.raises(RuntimeError, match="far enough"):
        main(tiny(chars, tmp_path))
    assert asked == ["nccl"]
