from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from conftest import TINY, assert_one_line, events, flags, tiny, trajectory
from gloo import on_ranks
from tiny_models import MODERN_SETTINGS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from deskgpt.compute import sharding
from deskgpt.compute.batching import Batching
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.optimizer import make_optimizer
from deskgpt.compute.runner import Runner, Variant
from deskgpt.compute.sharding import local
from deskgpt.estimate import fit
from deskgpt.estimate.memory import MakeOptimizer, Step, fake_tensors, memory
from deskgpt.kernels import replacements
from deskgpt.kernels.overridable import replacing
from deskgpt.run.settings import earlier_settings, resumed_settings
from deskgpt.system import hardware
from model import GPT, GPTConfig
from train import TrainConfig, main

CPU = torch.device("cpu")
SMALL = GPTConfig(block_size=64, vocab_size=512, n_layer=2, n_head=4, n_embd=64, bias=False)


def adamw(model: GPT) -> torch.optim.Optimizer:
    return make_optimizer(model, "adamw", 0.1, 1e-3, (0.9, 0.95), 0.95)


def muon(model: GPT) -> torch.optim.Optimizer:
    return make_optimizer(model, "muon", 0.1, 1e-3, (0.9, 0.95), 0.95)


class Real:
    """A model on the CPU that takes steps, and the bytes that torch's allocator then holds, by its profiler."""

    def __init__(self, config: GPTConfig, batch_size: int, form: Variant) -> None:
        self.model = GPT(config)
        self.optimizer = adamw(self.model)
        self.x, self.y = (torch.randint(0, config.vocab_size, (batch_size, config.block_size)) for _ in "xy")
        self.runner = Runner(self.model, form)

    def loss(self) -> torch.Tensor:
        with self.runner.amp:
            return self.model(self.x, self.y)[1]

    def step(self, micro_steps: int) -> None:
        for _ in range(micro_steps):
            with replacing(self.runner.forms):
                self.loss().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def peaks_of_steps(self, micro_steps: int, n: int = 1) -> list[int]:
        self.step(micro_steps)  # makes what the optimizer keeps
        weights = sum(local(p).nbytes for p in self.model.parameters())
        there = weights + kept_by_optimizer(self.optimizer) + self.x.nbytes + self.y.nbytes
        return [there + peak_of(lambda: self.step(micro_steps)) for _ in range(n)]


def kept_by_optimizer(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of moments, and of the number of steps for each parameter; of sharded ones this rank's."""
    return sum(local(x).nbytes for state in optimizer.state.values() for x in state.values())


def peak_of(f: Callable[[], Any]) -> int:
    """Most bytes that f has allocated and not freed at any time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        f()
    assert profiler.profiler is not None
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def kept_by(real: Real) -> int:
    """Bytes that autograd really keeps for the transformer's backward pass, with the token ids and the result."""
    kept = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    runner = real.runner
    with replacing(runner.forms), runner.amp, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        h = real.model.transformer(real.x)
    for t in (real.x, real.y, h):
        keep(t)
    weights = {p.data_ptr() for p in (*real.model.parameters(), *real.model.buffers())}
    return sum(size for address, size in kept.items() if address not in weights)


@pytest.fixture
def no_onednn(monkeypatch):
    """Without oneDNN, whose workspaces memory.py does not count and the processor decides.

    With AVX512-FP16, for one, some of its float16 matmuls take float32 copies of their operands and their result.
    """
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


# Not compiled, a block of GPT-2's keeps 16 tensors of its input's size and full checkpointing one; selective keeps 6.
CASES = [  # model, batch, form, tokens in a chunk of the loss (some make it in one piece), micro-batches
    (SMALL, 16, Variant("float16"), 256, 1),
    (replace(SMALL, vocab_size=64, n_head=1), 4, Variant("bfloat16"), 256, 2),
    (replace(SMALL, dropout=0.1, block_size=48), 8, Variant("float32"), 128, 2),
    (replace(SMALL, dropout=0.1, block_size=48), 8, Variant("float32", checkpoint="full"), 128, 2),
    (replace(SMALL, **MODERN_SETTINGS), 4, Variant("bfloat16", checkpoint="selective"), 64, 2),
]


@pytest.mark.parametrize(("config", "batch_size", "form", "chunk", "micro_steps"), CASES)
@pytest.mark.usefixtures("no_onednn")
def test_prediction_is_what_autograd_keeps_and_the_peak_of_a_real_step(
    config, batch_size, form, chunk, micro_steps, monkeypatch
):
    monkeypatch.setattr(replacements, "LOGITS_ON_CPU", chunk * config.vocab_size)
    predicted = memory(Step(config, batch_size, form, "cpu", accumulates=micro_steps > 1))
    real = Real(config, batch_size, form)
    if form.checkpoint == "none":
        assert predicted["activations"] == pytest.approx(kept_by(real), rel=0.005)
    assert [sum(predicted.values())] == pytest.approx(real.peaks_of_steps(micro_steps), rel=0.01)
    assert predicted["weights"] == sum(p.nbytes for p in real.model.parameters())
    if micro_steps > 1:  # else they may come after the peak
        assert predicted["gradients"] == predicted["weights"]
    assert predicted["optimizer"] == kept_by_optimizer(real.optimizer) > 2 * predicted["weights"]


@pytest.mark.usefixtures("no_onednn")
def test_muon_needs_no_more_than_is_predicted():
    real = Real(SMALL, 4, Variant())
    real.optimizer = muon(real.model)
    (peak,) = real.peaks_of_steps(2)
    assert peak < 1.02 * sum(memory(Step(SMALL, 4, Variant(), "cpu", make_optimizer=muon)).values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "which", "at_most"),
    [({}, "none", 1.03), ({}, "full", 1.35), (MODERN_SETTINGS, "none", 1.35)],
)
def test_predicted_activations_are_what_a_compiled_model_keeps_or_more(settings, which, at_most):
    config = replace(SMALL, n_layer=3, block_size=256, **settings)
    real = Real(config, 5, Variant("bfloat16", checkpoint=which))
    # Dynamo, AOTAutograd and the partitioner, as for inductor, and its kernels left out: they need a compiler.
    real.model.transformer.compile(backend="aot_eager_decomp_partition")
    predicted = memory(Step(config, 5, Variant("bfloat16", compiled=True, checkpoint=which), "cuda"))["activations"]
    assert 0.97 < predicted / kept_by(real) < at_most


class Dtypes(TorchFunctionMode):
    """Takes down the dtypes of the floating-point results of torch's functions, with their names."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            self.seen.append((func.__name__, out.dtype))
        return out


def dtypes_of_forward(config: GPTConfig, fakes: AbstractContextManager, device_type: str) -> list[Any]:
    """Of a forward pass of fake tensors under the device's autocast for bfloat16, without gradients."""
    transformer = GPT(config).transformer
    with fakes, torch.no_grad(), replacing(replacements.replacements_for(device_type)), Dtypes() as dtypes:
        tensors = (*transformer.named_parameters(), *transformer.named_buffers())
        state = {name: torch.empty(t.shape, dtype=t.dtype, device=device_type) for name, t in tensors}
        idx = torch.zeros(2, config.block_size, dtype=torch.int64, device=device_type)
        dtype_before = torch.get_autocast_dtype(device_type)
        torch.set_autocast_enabled(device_type, True)  # torch.autocast refuses CUDA on a machine without it
        torch.set_autocast_dtype(device_type, torch.bfloat16)
        try:
            torch.func.functional_call(transformer, state, (idx,))
        finally:
            torch.set_autocast_enabled(device_type, False)
            torch.set_autocast_dtype(device_type, dtype_before)
    return dtypes.seen


@pytest.mark.parametrize("settings", [{}, {"norm": "rms", "qk_norm": True, "activation": "relu2"}])
def test_rehearsal_computes_in_the_dtypes_of_cudas_autocast(settings):
    """Torch dispatches fake tensors of CUDA as it does real ones. Without a GPU it cannot slice them, as rope does."""
    config = replace(SMALL, **settings)
    cuda = dtypes_of_forward(config, FakeTensorMode(), "cuda")
    rehearsed = dtypes_of_forward(config, fake_tensors("cuda"), "cpu")
    assert rehearsed == cuda
    assert {dtype for _, dtype in cuda} == {torch.float32, torch.bfloat16}


def test_rms_norm_on_cuda_keeps_its_input_and_a_number_for_each_row():
    plain, normed = (
        memory(Step(replace(SMALL, qk_norm=on), 4, Variant(), "cuda"))["activations"] for on in (False, True)
    )
    # Queries and keys before and after; without the norm attention keeps views of one tensor.
    rows = 4 * SMALL.block_size
    assert normed - plain == SMALL.n_layer * 2 * 4 * rows * (SMALL.n_embd + SMALL.n_head)


def test_large_batches_are_extrapolated_to_what_a_rehearsal_gives(monkeypatch):
    monkeypatch.setattr(replacements, "LOGITS_ON_CPU", 64 * SMALL.vocab_size)
    step = Step(SMALL, 40, Variant("bfloat16", compiled=True), "cuda")
    whole = memory(step)
    monkeypatch.setattr("deskgpt.estimate.memory.REHEARSED", 8 * SMALL.block_size)
    assert memory(step) == whole
    assert sum(memory(replace(step, batch_size=10**12)).values()) > 10**16


def test_dropout_on_cuda_keeps_masks_of_one_byte_and_no_matrix_of_attention_weights():
    plain, dropped = (
        memory(Step(replace(SMALL, dropout=p), 4, Variant("bfloat16"), "cuda"))["activations"] for p in (0.0, 0.1)
    )
    masks = (1 + 2 * SMALL.n_layer) * 4 * SMALL.block_size * SMALL.n_embd  # of the embeddings, two in each layer
    assert masks <= dropped - plain < 2.5 * masks


@pytest.mark.parametrize(("compiled", "bytes_per_logit"), [(False, 10), (True, 2)])
def test_loss_in_chunks_holds_a_chunk_of_logits_not_all(compiled, bytes_per_logit):
    """Compiled, the softmax is computed in place: only the logits in 16 bits."""
    config = replace(SMALL, block_size=1024, vocab_size=50304)
    head = 12 * config.vocab_size * config.n_embd  # its gradient in float32, the weight and a product in 16 bits
    parts = memory(Step(config, 16, Variant("bfloat16", compiled), "cuda"))
    held = replacements.LOGITS_ON_GPU  # a quarter of all
    assert bytes_per_logit * held < parts["logits"] < (bytes_per_logit + 1) * held + head


def test_largest_batch_divides_the_sequences_and_is_the_largest_that_fits():
    step = Step(replace(SMALL, n_layer=1, block_size=16), 12, Variant("bfloat16"), "cuda")
    totals = {b: sum(memory(replace(step, batch_size=b)).values()) for b in (1, 2, 3, 6)}
    fitting = 0
    for batch_size, total in totals.items():
        assert fit.largest_batch(step, 18, total - 1) == fitting
        assert fit.largest_batch(step, 18, total) == batch_size
        fitting = batch_size
    assert fit.largest_batch(step, 18, 1e12) == 9
    assert fit.largest_batch(step, 12, 1e12) == 12


def test_rehearsal_leaves_no_fakes_behind_and_the_random_stream_alone():
    state = torch.get_rng_state()
    memory(Step(replace(SMALL, dropout=0.1), 2, Variant("bfloat16", compiled=True), "cuda"))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.isfinite(Real(replace(SMALL, dropout=0.1), 2, Variant()).loss())
    assert not torch.is_autocast_enabled("cpu")


def smaller(batch_size: int, accumulation: int, auto_batch: bool = False, **evaluation: int) -> dict[str, int]:
    """The settings that change after a micro-batch did not fit."""
    step = {"batch_size": batch_size, "gradient_accumulation_steps": accumulation, "block_size": SMALL.block_size}
    settings = asdict(TrainConfig(**step, **evaluation))  # type: ignore[arg-type]
    batching = fit.smaller_batch(SMALL, adamw, CPU, auto_batch, Batching.of(settings), Variant())
    return batching.changed(settings)


def test_smaller_batch_keeps_the_tokens_of_a_step_and_of_an_evaluation():
    same = smaller(12, 40, eval_iters=200, auto_batch=True)
    assert same == {"batch_size": 6, "gradient_accumulation_steps": 80, "eval_tokens": 200 * 12 * 64}
    same = smaller(3, 40, eval_tokens=1000, auto_batch=True)
    assert same == {"batch_size": 1, "gradient_accumulation_steps": 120, "eval_tokens": 1000}
    with pytest.raises(ValueError, match="out of memory") as refused:
        smaller(8, 64, eval_tokens=1000)
    assert_one_line(refused.value, "--batch_size=4 --gradient_accumulation_steps=128,")  # eval_tokens are as given
    with pytest.raises(ValueError, match="out of memory") as refused:
        smaller(1, 64, auto_batch=True)
    assert_one_line(refused.value, "batch_size=1", "--block_size=32")


def test_micro_batch_is_refused_untried_only_where_it_surely_takes_more_than_there_is(monkeypatch):
    batching = Batching(32, 16, SMALL.block_size)
    needed = sum(memory(Step(SMALL, 32, Variant(), "cpu", make_optimizer=adamw)).values())

    def times(share: float, make: MakeOptimizer | None = adamw, device: str = "cpu") -> float:
        monkeypatch.setattr(hardware, "usable_memory_bytes", lambda device: share * needed)
        return fit.times_memory(SMALL, make, torch.device(device), 1, batching, Variant())

    assert times(0.9) == pytest.approx(fit.SURELY / 0.9)  # it is tried, as is what the prediction is too high for
    assert times(0.1) == pytest.approx(fit.SURELY / 0.1)
    assert 0 < times(0.1, None) < times(0.1)  # evaluation alone
    assert times(10.0) == times(0.1, device="cuda") == 0
    batching = fit.smaller_batch(SMALL, adamw, CPU, True, batching, Variant(), times(0.1))
    assert (batching.batch_size, batching.accumulation) == (4, 128)


def test_advice_follows_the_memory_that_is_free_and_names_it(monkeypatch):
    """On a card of 12 GiB that a desktop shares."""
    form = Variant("bfloat16")
    needed = sum(memory(Step(SMALL, 8, replace(form, compiled=True), "cuda")).values())
    monkeypatch.setattr(hardware, "device_name", lambda device: "a card")
    monkeypatch.setattr(hardware, "memory_bytes", lambda device: 12 * 2**30)
    for fits, usable in ((8, needed), (4, needed - 1)):
        usable_bytes = math.ceil(usable / fit.USABLE)
        monkeypatch.setattr(hardware, "usable_memory_bytes", lambda device, usable_bytes=usable_bytes: usable_bytes)
        with pytest.raises(ValueError, match="out of memory") as refused:
            fit.smaller_batch(SMALL, adamw, torch.device("cuda"), False, Batching(32, 16, SMALL.block_size), form)
        assert_one_line(refused.value, "a card", "free", "batch_size=32", f"--batch_size={fits} ")


# ---- a sharded rank ------------------------------------------------------------------------------------------


def sharded(
    config: GPTConfig, form: Variant, reshard: bool, world: int, device_type: str = "cuda", sync_each_batch: bool = True
) -> dict[str, int]:
    """The memory of a rank of `world` that share one copy, with 4 sequences; as the plan rehearses it."""
    with sharding.fake_ranks(world):
        shard = functools.partial(
            sharding.shard,
            mesh=sharding.make_mesh("cpu", world, world),
            reshard_after_forward=reshard,
            dtype=form.dtype,
        )
        step = Step(config, 4, form, device_type, make_optimizer=adamw, shard=shard, sync_each_batch=sync_each_batch)
        return memory(step)


class RealRank(Real):
    """A rank's part of a real step of two sharded micro-batches."""

    def __init__(
        self, config: GPTConfig, form: Variant, reshard: bool, world: int, sync_each_batch: bool = True
    ) -> None:
        super().__init__(config, 4, form)
        sharding.shard(self.model, sharding.make_mesh("cpu", world, world), reshard, form.dtype)
        self.runner = Runner(self.model, form, True, sync_each_batch)
        self.optimizer = adamw(self.model)
        self.runner.distribute(self.x, self.y)

    def step(self, micro_steps: int) -> None:
        for number in range(micro_steps):
            with self.runner.micro_batch(number == micro_steps - 1):
                loss, _ = self.runner.forward(self.x, self.y, micro_steps)
                self.runner.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs gloo as Linux and macOS have it")
@pytest.mark.usefixtures("no_onednn")
def test_prediction_of_a_sharded_rank_is_the_peak_of_a_real_step(tmp_path):
    config = GPTConfig(n_layer=4, n_head=4, n_embd=64, block_size=64, vocab_size=512)
    cases = [
        (Variant(), True, True),
        (Variant(checkpoint="full"), False, True),
        (Variant("bfloat16"), True, True),
        (Variant("bfloat16"), True, False),
    ]
    predicted = [
        sum(sharded(config, form, reshard, 2, "cpu", sync_each_batch=sync).values()) for form, reshard, sync in cases
    ]

    def peaks(ranks: DistContext) -> list[int]:  # gloo frees tensors late
        return [min(RealRank(config, form, reshard, 2, sync).peaks_of_steps(2, 12)) for form, reshard, sync in cases]

    assert on_ranks(peaks, 2, tmp_path)[0] == [pytest.approx(peak, rel=0.02) for peak in predicted]


def test_sharded_rank_has_its_part_of_the_state_and_gathers_a_few_blocks_or_all(monkeypatch):
    config = GPTConfig(n_layer=7, n_head=8, n_embd=1024, block_size=256, vocab_size=50304)
    block = 2 * 12 * 1024**2  # bytes, gathered in bfloat16
    root = 4 * (50304 + 256) * 1024
    form = Variant("bfloat16")
    few = sharded(config, form, True, 8)
    state = few["weights"] + few["gradients"] + few["optimizer"]
    assert state == pytest.approx(2 * (root + 7 * 2 * block) / 4, rel=0.01)
    assert root <= few["gathered"] < root + 4 * block
    all_ = sharded(config, form, False, 8)
    assert root + 7 * block <= all_["gathered"] < root + 10 * block
    once = sharded(config, form, True, 8, sync_each_batch=False)
    assert once["gradients"] == pytest.approx(root + 7 * 2 * block, rel=0.01)
    alone = memory(Step(config, 4, form, "cuda"))
    for parts in (few, all_):  # without autocast's copies
        assert parts["activations"] == pytest.approx(alone["activations"] - 7 * block, rel=0.01)
    monkeypatch.setattr("deskgpt.estimate.memory.LAYERS_REHEARSED", 100)  # nothing is extrapolated
    assert sharded(config, form, True, 8) == few


# ---- in a run ------------------------------------------------------------------------------------------------


@pytest.fixture
def memory_for_five_sequences(monkeypatch):
    """A machine on which a pass of more than 5 sequences runs out of memory, as CUDA says it."""
    forward = GPT.forward

    def limited(self, idx, targets=None):
        if idx.size(0) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(self, idx, targets)

    monkeypatch.setattr(GPT, "forward", limited)


def test_batch_that_does_not_fit_is_halved_also_when_it_resumes_and_the_training_is_the_same(
    chars, tmp_path, capsys, memory_for_five_sequences
):
    main(tiny(chars, tmp_path / "auto", batch_size=16, auto_batch=True, lr_decay_iters=6, max_iters=3))
    assert "out of memory: going on with" in capsys.readouterr().out
    argv = [f"--out_dir={tmp_path / 'auto'}", "--init_from=resume", "--max_iters=6"]
    main(TrainConfig(**resumed_settings(TrainConfig, argv, str(tmp_path / "auto"))))
    assert "out of memory" not in capsys.readouterr().out
    main(tiny(chars, tmp_path / "by_hand", batch_size=4, gradient_accumulation_steps=4, eval_iters=8))
    taken = events(tmp_path / "auto", "start")[0]["settings"]
    assert (taken["batch_size"], taken["gradient_accumulation_steps"], taken["eval_tokens"]) == (4, 4, 8 * 4 * 16)
    assert trajectory(tmp_path / "auto") == trajectory(tmp_path / "by_hand")


def test_on_cuda_a_run_takes_the_micro_batch_that_fits_and_so_does_the_same_command_later(
    chars, tmp_path, script, monkeypatch, memory_for_five_sequences
):
    """On this CPU as on CUDA, where a sequence costs the less, the more go through together."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "remembered"))
    monkeypatch.setattr("deskgpt.compute.implementation.BATCH_IS_SEARCHED_ON", ("cpu",))
    monkeypatch.setattr("deskgpt.compute.implementation.seconds", lambda *_: 1.0)
    own = {"gradient_accumulation_steps": 8, "batch_size": 1, "lr_decay_iters": 6, "init_from": "auto"}
    command = flags(**TINY | own, dataset=chars, out_dir=tmp_path / "out")
    for steps in (3, 6):  # the second one resumes, and names the batch of its first start
        done = script("train.py", *command, f"--max_iters={steps}")
        assert "auto_batch: batch_size=4 and gradient_accumulation_steps=2" in done.out
    for start in events(tmp_path / "out", "start"):
        taken = start["settings"]
        assert (taken["batch_size"], taken["gradient_accumulation_steps"], taken["eval_tokens"]) == (4, 2, 2 * 16)
    done = script("train.py", *flags(**TINY | own | {"batch_size": 8}, dataset=chars, out_dir=tmp_path / "large"))
    assert "out of memory: going on with --batch_size=4 --gradient_accumulation_steps=16" in done.out


def test_checkpoints_of_runs_before_auto_keep_their_choice(chars, tmp_path):
    main(tiny(chars, tmp_path, auto_batch=False))
    assert resumed_settings(TrainConfig, [], str(tmp_path))["auto_batch"] is False
    before = earlier_settings(TrainConfig, TINY | {"learning_rate": 1e-3, "auto_batch": True})
    assert before is not None
    assert before["auto_batch"] is True


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs gloo as Linux and macOS have it")
def test_ranks_find_the_same_micro_batch_though_memory_runs_out_on_one(chars, tmp_path, monkeypatch):
    """Searching upwards from 1, as on CUDA."""
    forward = GPT.forward
    own = {"batch_size": 1, "gradient_accumulation_steps": 8, "eval_iters": 8, "auto_batch": True}

    def work(ranks: DistContext) -> None:
        def limited(self, idx, targets=None):
            if ranks.rank == 1 and idx.size(0) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return forward(self, idx, targets)

        monkeypatch.setattr(GPT, "forward", limited)
        monkeypatch.setattr("deskgpt.compute.implementation.BATCH_IS_SEARCHED_ON", ("cpu",))
        monkeypatch.setattr("deskgpt.compute.implementation.seconds", lambda *_: 1.0)
        monkeypatch.setattr("train.start_ranks", lambda *_: ranks)
        main(tiny(chars, tmp_path / "out", **own))

    assert on_ranks(work, 2, tmp_path) == [None, None]
    taken = events(tmp_path / "out", "start")[0]["settings"]
    assert (taken["batch_size"], taken["gradient_accumulation_steps"]) == (2, 4)
    main(tiny(chars, tmp_path / "one", batch_size=2, gradient_accumulation_steps=4, eval_iters=4))
    for a, b in zip(events(tmp_path / "out", "iter"), events(tmp_path / "one", "iter"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


def test_batch_that_does_not_fit_names_the_settings_that_keep_the_training(
    chars, tmp_path, script, memory_for_five_sequences
):
    done = script("train.py", *flags(**TINY | {"batch_size": 8}, dataset=chars, out_dir=tmp_path))
    assert done.code == 1
    flags_of_same = "--batch_size=4 --gradient_accumulation_steps=2 --eval_tokens=256"
    assert_one_line(done.err, "batch_size=8", flags_of_same, "--auto_batch=True")
    assert not (tmp_path / "log.jsonl").exists()
