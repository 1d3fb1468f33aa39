"""What differs on a GPU, at the shapes that runs have: heads of 64, and contexts of 64 tokens or
more.

pytest tests/test_gpu.py                              # on a card; without one they skip
python bench/pretend_card.py --card T4 -m pytest tests/test_gpu.py
DESKGPT_TEST_DEVICE=mps pytest tests/test_gpu.py      # but for those about CUDA itself
"""

import itertools
import os
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import TINY, events, flags, shell, tiny
from tiny_models import MODERN_SETTINGS, make, tokens

import train
from deskgpt.check_model import check_model
from deskgpt.checkpoint import load_checkpoint
from deskgpt.compute import ComputeMode
from deskgpt.device import DTYPES, memory_bytes
from deskgpt.engine import GenerationConfig, InferenceEngine, generate
from deskgpt.kv_cache import GraphedKVCache
from deskgpt.logger import RunLogger
from model import GPTConfig
from train import main_that_fits

DEVICE = torch.device(os.environ.get("DESKGPT_TEST_DEVICE", "cuda"))
ON_CUDA = DEVICE.type == "cuda"

pytestmark = pytest.mark.skipif(ON_CUDA and not torch.cuda.is_available(), reason="no card")
cuda_only = pytest.mark.skipif(not ON_CUDA, reason="about CUDA itself")
each_model = pytest.mark.parametrize("settings", [{}, MODERN_SETTINGS], ids=["gpt2", "modern"])

# Settings of a run, and the model alone.
RUN = TINY | {
    "n_embd": 128,
    "block_size": 64,
    "device": str(DEVICE),
    "learning_rate": 1e-3,
    "auto_batch": False,
}
GPT2: dict[str, Any] = {
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 128,
    "block_size": 64,
    "vocab_size": 512,
}


@pytest.fixture(autouse=True)
def _full_float32():
    """A run allows TF32 in its process. Here its tests must not depend on which ran before."""
    torch.set_float32_matmul_precision("highest")
    if ON_CUDA:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def limited_memory():
    """Return a function that limits the card's memory, until the test ends."""
    yield lambda size: torch.cuda.set_per_process_memory_fraction(size / memory_bytes(DEVICE))
    torch.cuda.set_per_process_memory_fraction(1.0)


def losses(out_dir):
    return {e["iter"]: e["loss"] for e in events(out_dir, "iter")}


def trained(data, out_dir, **settings):
    """Train, and return the losses by step."""
    main_that_fits(tiny(data, out_dir, **(RUN | settings)))
    return losses(out_dir)


def batch(config, rows=4):
    ids = tokens(rows, config.block_size + 1, vocab=config.vocab_size).to(DEVICE)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


@each_model
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_gpu_takes_the_steps_that_the_cpu_takes(optimizer, settings, chars, tmp_path):
    settings = {"optimizer": optimizer, **settings}
    expected = trained(chars, tmp_path / "cpu", device="cpu", dtype="float32", **settings)
    # float32 matmuls are TF32
    for dtype, tolerance in {"float32": 1e-3, "bfloat16": 2e-2, "float16": 5e-3}.items():
        found = trained(chars, tmp_path / dtype, dtype=dtype, **settings)
        assert found == pytest.approx(expected, rel=tolerance), dtype


@each_model
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_run_takes_the_steps_of_the_uncompiled_one(recompute, settings, chars, tmp_path):
    settings = settings | {"dtype": "auto", "activation_checkpoint": recompute}
    expected = trained(chars, tmp_path / "eager", **settings)
    assert trained(chars, tmp_path / "compiled", compile=True, **settings) == pytest.approx(
        expected, rel=1e-2
    )
    start = events(tmp_path / "compiled", "start")[0]
    in_bfloat16 = ON_CUDA and start["dtype"] == "bfloat16"
    assert (start["compiled"], start["residual_dtype"] == "bfloat16") == (True, in_bfloat16)


@each_model
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compiled", [False, True])
def test_every_variant_computes_what_eager_float32_does(compiled, dtype, settings):
    compute = ComputeMode(dtype, compiled)
    if compiled and compute.dtype == "bfloat16":
        compute = replace(compute, residual_dtype="bfloat16")
    config = GPTConfig(**GPT2, **settings)
    model = make(config).to(DEVICE)
    idx, targets = batch(config)
    assert check_model(model, compute, idx, targets, train.forward_backward) == []


@cuda_only
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_run_waits_for_no_step_but_that_of_a_log_line_and_then_has_queued_the_next(
    dtype, chars, tmp_path, monkeypatch
):
    happened = []

    def noted(module, name, what, reads="error"):
        function = getattr(module, name)

        def call(*args, **kwargs):
            # What a copy from the card does that waits for it, from here on.
            torch.cuda.set_sync_debug_mode(reads)
            happened.append(what)
            time.sleep(0.02 * (what == "step"))
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    noted(train, "step_if_finite", "step")
    noted(torch.cuda.Event, "query", "event")
    noted(torch.cuda, "synchronize", "wait", "default")  # before an evaluation
    noted(RunLogger, "_line", "iter")
    trained(chars, tmp_path, dtype=dtype, log_interval=3, max_iters=8, eval_interval=8)
    # Of several in a row, one
    found = [what for what, _ in itertools.groupby(happened[happened.index("step") :])]
    assert found[:11] == [*["step", "event", "iter"] * 3, "event", "iter"]
    queued = [happened[:at].count("step") for at, what in enumerate(happened) if what == "iter"]
    assert queued == [2, 5, 8, 8]  # when the lines of steps 0, 3, 6 and 7 are printed
    # Although the last two come at once.
    assert min(e["time_ms"] for e in events(tmp_path, "iter")) > 19


@each_model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "auto"])
def test_sampling_uses_its_cache_and_writes_the_same_again(
    settings, dtype, chars, tmp_path, capsys
):
    """sample.py compares logits with and without its cache, and says if they differ."""
    import sample

    trained(chars, tmp_path, dtype=dtype, **settings)
    wanted = {"out_dir": str(tmp_path), "device": str(DEVICE), "dtype": dtype, "start": "A"}
    c = sample.SampleConfig(**wanted, max_new_tokens=70, num_samples=2)
    texts = sample.main(c)
    assert [len(text) for text in texts] == [71, 71]
    assert sample.main(c) == texts
    assert "without" not in capsys.readouterr().err


@cuda_only
@each_model
def test_tokens_are_replays_of_one_graph_and_those_of_whole_passes(settings):
    model = make(GPTConfig(**GPT2, **settings)).eval().to(DEVICE)
    prompts = tokens(2, 9, vocab=512).to(DEVICE)
    assert InferenceEngine(model, prompts, "float32").has_cache
    passes: list[int] = []
    model.transformer.register_forward_pre_hook(lambda module, args: passes.append(args[0].size(1)))
    # Past the end of the context
    config = GenerationConfig(max_new_tokens=70, temperature=2.0)
    found = [new for new, _ in generate(model, prompts, config, cache=GraphedKVCache(64))]
    assert passes[:4] == [9, 1, 1, 64]
    expected = [new for new, _ in generate(model, prompts, config)]
    assert torch.equal(torch.stack(found), torch.stack(expected))


@pytest.mark.skipif(
    ON_CUDA and not torch.distributed.is_nccl_available(), reason="torch has no NCCL"
)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_ranks_under_torchrun_compute_what_no_torchrun_does(world, compiled, chars, tmp_path):
    if ON_CUDA and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices")
    settings = RUN | {"dataset": chars, "out_dir": tmp_path / "ranks"}
    settings |= {"compile": compiled, "gradient_accumulation_steps": 2}
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}")
    shell("python", *torchrun, "train.py", *flags(**settings))
    assert events(tmp_path / "ranks", "start")[0]["world_size"] == world
    alone = trained(chars, tmp_path / "alone", gradient_accumulation_steps=2)
    assert losses(tmp_path / "ranks") == pytest.approx(alone, rel=1e-3)


@cuda_only
def test_run_takes_a_larger_micro_batch_and_halves_it_until_it_fits(
    chars, tmp_path, monkeypatch, limited_memory
):
    """The losses are those of a run that began with the smaller micro-batch."""
    # A graph on a pretended card keeps all tensors of a pass: a real one uses their memory again.
    settings = {"dtype": "float32", "max_iters": 3, "cuda_graph": False}
    backward, calls = torch.Tensor.backward, itertools.count()

    def starved(x, *args, **kwargs):
        if next(calls) == 0:
            limited_memory(torch.cuda.memory_allocated() + 1e5)
        backward(x, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "backward", starved)
    found = trained(
        chars,
        tmp_path / "a",
        **settings,
        auto_batch="auto",
        batch_size=2,
        gradient_accumulation_steps=128,
    )
    assert events(tmp_path / "a", "start")[0]["settings"]["batch_size"] == 256
    taken = load_checkpoint(tmp_path / "a").config
    assert taken["batch_size"] * taken["gradient_accumulation_steps"] == 256
    assert 32 < taken["batch_size"] < 256
    names = ("batch_size", "gradient_accumulation_steps", "eval_iters", "eval_tokens")
    expected = trained(chars, tmp_path / "b", **settings, **{name: taken[name] for name in names})
    assert found == pytest.approx(expected, rel=1e-4)
