"""What differs on a GPU, at the shapes that runs have: heads of 64, and contexts of 64 tokens or more.

pytest tests/test_gpu.py                              # on a card; without one they skip
python bench/pretend_card.py --card T4 -m pytest tests/test_gpu.py
DESKGPT_TEST_DEVICE=mps pytest tests/test_gpu.py      # but for those about CUDA itself
"""

from __future__ import annotations

import copy
import itertools
import math
import os
from typing import Any

import pytest
import torch
from conftest import TINY, TORCHRUN, assert_equal, assert_one_line, events, flags, shell
from tiny_models import MODERN_SETTINGS

import sample
from data.loader import Loader
from deskgpt.checkpoint import store
from deskgpt.checkpoint.store import Checkpoint
from deskgpt.compute.optimizer import make_optimizer, step_if_finite
from deskgpt.compute.variant import Variant
from deskgpt.estimate.memory import Step, memory
from deskgpt.kernels import replacements
from deskgpt.run.saver import Saver
from deskgpt.system import hardware
from model import GPT, GPTConfig
from train import TrainConfig, main

DEVICE = torch.device(os.environ.get("DESKGPT_TEST_DEVICE", "cuda"))
ON_CUDA = DEVICE.type == "cuda"
PRETENDED = "DESKGPT_PRETEND_CARD" in os.environ  # bench/pretend_card.py: a CPU computes, so sizes are small

pytestmark = pytest.mark.skipif(ON_CUDA and not torch.cuda.is_available(), reason="no card")
cuda_only = pytest.mark.skipif(not ON_CUDA, reason="about CUDA itself")

# Settings of a run, and the model alone.
RUN = TINY | {"n_embd": 128, "block_size": 64, "device": str(DEVICE), "learning_rate": 1e-3, "auto_batch": False}
GPT2_124M: dict[str, Any] = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024}
GPT2 = GPTConfig(n_layer=2, n_head=2, n_embd=128, block_size=64, vocab_size=512)


@pytest.fixture(autouse=True)
def _full_float32():
    """A run allows TF32 in its process. Here its tests must not depend on which ran before."""
    torch.set_float32_matmul_precision("highest")


def run_of(data, out_dir, **settings):
    return TrainConfig(**(RUN | {"dataset": str(data), "out_dir": str(out_dir)} | settings))


def make(config):
    torch.manual_seed(0)
    return GPT(config).to(DEVICE)


def batch(config, rows=4):
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, config.vocab_size, (rows, config.block_size + 1), generator=draw).to(DEVICE)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


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
    [(False, "float32"), *((compiled, x) for compiled in (False, True) for x in ("bfloat16", "float16"))],
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
        saver.save(Checkpoint(model.state_dict(), GPT2.as_args(), optimizer.state_dict(), step, 1.0), best=False)
        with torch.no_grad():
            for p in runner.parameters:
                p.mul_(2.0)
        saver.wait()
        saver.raise_if_last_failed()
        loaded = store.load(tmp_path)
        assert loaded.iter_num == step
        assert_equal(loaded.model, {key: w.cpu() for key, w in expected.items()})


@cuda_only
def test_run_that_runs_out_of_memory_says_so_in_one_line_and_resumes_closely(chars, tmp_path, monkeypatch, script):
    steps, step = itertools.count(), Loader.step

    def starved(loader):
        if next(steps) == 4:  # as if another program had taken the card's memory
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(1e-6)
        yield from step(loader)

    main(run_of(chars, tmp_path / "whole", dtype="float16"))
    monkeypatch.setattr(Loader, "step", starved)
    settings = flags(**RUN | {"dataset": chars, "out_dir": tmp_path / "halves", "dtype": "float16"}, save_async=False)
    try:
        done = script("train.py", *settings)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert done.code == 1
    assert_one_line(done.err, "out of memory", "--batch_size")
    assert store.load(tmp_path / "halves").iter_num == 3
    assert script("train.py", *settings, "--init_from=resume").code == 0
    whole = {e["iter"]: e["loss"] for e in events(tmp_path / "whole", "iter")}
    halves = {e["iter"]: e["loss"] for e in events(tmp_path / "halves", "iter")}
    assert halves == pytest.approx(whole, rel=1e-4)
    assert store.load(tmp_path / "halves").scaler


# ---- loss in chunks ------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "auto"])
@pytest.mark.parametrize("settings", [{}, MODERN_SETTINGS], ids=["gpt2", "modern"])
def test_sampling_passes_its_checks_and_writes_the_same_again(settings, dtype, chars, tmp_path, capsys):
    """sample.py compares the cache with the forward pass, and says if they differ."""
    main(run_of(chars, tmp_path, dtype=dtype, **settings))
    wanted = {"out_dir": str(tmp_path), "device": str(DEVICE), "dtype": dtype, "start": "A"}
    c = sample.SampleConfig(**wanted, max_new_tokens=70, num_samples=2)
    texts = sample.main(c)
    assert [len(text) for text in texts] == [71, 71]
    assert sample.main(c) == texts
    assert "differ" not in capsys.readouterr().err


# ---- several ranks -------------------------------------------------------------------------------------------


@pytest.mark.skipif(ON_CUDA and not torch.distributed.is_nccl_available(), reason="torch has no NCCL")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_ranks_under_torchrun_compute_what_no_torchrun_does(world, compiled, chars, tmp_path):
    if ON_CUDA and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices")
    settings = RUN | {"dataset": chars, "compile": compiled, "gradient_accumulation_steps": 2}
    words = [w.replace("=2", f"={world}") for w in TORCHRUN]
    done = shell(*words, *flags(**settings, out_dir=tmp_path / "ranks"))
    assert done.returncode == 0, done.stderr
    assert events(tmp_path / "ranks", "start")[0]["world_size"] == world
    main(run_of(chars, tmp_path / "alone", gradient_accumulation_steps=2))
    for a, b in zip(events(tmp_path / "alone", "iter"), events(tmp_path / "ranks", "iter"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)


# ---- memory --------------------------------------------------------------------------------------------------


@cuda_only
@pytest.mark.parametrize("settings", [{}, MODERN_SETTINGS], ids=["gpt2", "modern"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_predicted_total_is_what_cuda_allocates(dtype, settings):
    size: dict[str, Any] = {"n_layer": 2, "n_head": 1, "n_embd": 64, "block_size": 128} if PRETENDED else GPT2_124M
    config = GPTConfig(vocab_size=50304, **size, **settings)
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
    settings = {"dtype": "float32", "max_iters": 3}
    model = GPTConfig(block_size=64, vocab_size=65, n_layer=2, n_head=2, n_embd=128, bias=False)
    limit = sum(memory(Step(model, 64, Variant(), "cuda")).values()) + 100 * 2**20
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        with pytest.raises(ValueError, match="--batch_size=.* --gradient_accumulation_steps=.* the same training"):
            main(run_of(chars, tmp_path / "a", batch_size=512, **settings))
        main(run_of(chars, tmp_path / "a", batch_size=512, auto_batch="auto", **settings))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    taken = events(tmp_path / "a", "start")[0]["settings"]
    assert taken["batch_size"] * taken["gradient_accumulation_steps"] == 512
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
