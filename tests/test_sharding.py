from __future__ import annotations

import functools
import math
import os
import time
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import assert_equal, assert_one_line, tiny
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from gloo import on_ranks
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import model as model_file
import train
from data.loader import Loader, first_micro_batch
from data.splits import Split
from deskgpt.compute import sharding
from deskgpt.compute.batching import Batching
from deskgpt.compute.checks import plain_float32
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.implementation import EarlierVariant, Options, Tuner, choose_implementation
from deskgpt.compute.optimizer import make_optimizer, step_if_finite, step_unless
from deskgpt.compute.runner import Runner, Variant
from deskgpt.estimate import fit
from deskgpt.kernels.verify import Mismatch
from deskgpt.run import time_budget
from deskgpt.run.health import Health
from deskgpt.run.train_state import TrainState
from deskgpt.system import cache
from model import GPT, GPTConfig

CPU = torch.device("cpu")
CONFIG = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=129)  # odd: no number of ranks divides it
# Of eight ranks, two have no row of its c_proj, four own none of its four matrices.
NARROW = replace(CONFIG, n_layer=1, n_embd=6)
GLOBAL_BATCH = 8
ALONE = DistContext(CPU)

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs gloo as Linux and macOS have it")


def build(ranks: DistContext, dp_shard: int, config: GPTConfig = CONFIG, dtype: str = "float32") -> GPT:
    """The same model on any ranks: whole with dp_shard=1, else sharded and gathered in this dtype."""
    torch.manual_seed(0)
    if dp_shard == 1:
        return GPT(config)
    with CPU if ranks.is_first else torch.device("meta"):
        model = GPT(config)
    return sharding.sharded_copy(model, sharding.make_mesh("cpu", dp_shard, ranks.world), True, CPU, dtype)


def whole_weights(model: GPT) -> dict[str, torch.Tensor]:
    return {name: sharding.whole(p).detach().clone() for name, p in model.state_dict().items()}


def trained(
    ranks: DistContext,
    data: Path,
    optimizer: str,
    dp_shard: int,
    steps: int,
    split: int,
    dtype: str = "float32",
    config: GPTConfig = CONFIG,
    gathered: str = "float32",
    sync_each_batch: bool = True,
) -> dict[str, torch.Tensor]:
    """The weights after `steps` steps on the same batches in `split` micro-batches, at any number of ranks.

    There is an evaluation before the second one. gathered: the dtype in which sharded blocks are.
    """
    model = build(ranks, dp_shard, config, gathered)
    runner = Runner(model, Variant(dtype), ranks.distributed, sync_each_batch)
    stepper = make_optimizer(model, optimizer, 0.1, 1e-3, (0.9, 0.95), 0.95, muon_dtype=dtype)
    batching = Batching(GLOBAL_BATCH // split, split, rank=ranks.rank, world=ranks.world)
    rows = Split(data, "train", CONFIG.block_size, CONFIG.vocab_size, 1)
    if ranks.distributed:
        runner.distribute(*first_micro_batch(rows, batching, CPU, batching.batch_size))
    loader = Loader(rows, batching, CPU)
    for step in range(steps):
        for micro_step, batch in enumerate(loader.step()):
            if step == 1 and micro_step == 0:
                runner.evaluate([(batch.x, batch.y, float(len(batch.x)))], ranks)
            with runner.micro_batch(batch.is_last):
                loss, _ = runner.forward(batch.x, batch.y, batching.micro_steps, batch.weight)
                runner.backward(loss)
        step_if_finite(stepper, runner.scaler, torch.linalg.vector_norm(runner.gradient_norms()))
        stepper.zero_grad(set_to_none=True)
    loader.close()
    return whole_weights(model)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference of two weights."""
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def test_sharded_weights_of_two_ranks_are_those_of_ddp_to_the_last_bit(chars, tmp_path):
    config = replace(CONFIG, n_layer=1)

    def work(ranks: DistContext) -> list[float]:
        found = []
        for optimizer in ("adamw", "muon"):
            sharded, ddp = (trained(ranks, chars, optimizer, n, 50, 2, config=config) for n in (-1, 1))
            found.append(distance(sharded, ddp))
        return found

    assert on_ranks(work, 2, tmp_path) == [[0.0, 0.0]] * 2


def test_weights_gathered_in_bfloat16_train_as_ddp_does_under_autocast(chars, tmp_path):
    def work(ranks: DistContext) -> list[float]:
        found = []
        for gathered in ("float32", "bfloat16"):
            sharded = trained(ranks, chars, "muon", -1, 10, 2, "bfloat16", gathered=gathered)
            found.append(distance(sharded, trained(ranks, chars, "muon", 1, 10, 2, "bfloat16")))
        return found

    found = on_ranks(work, 2, tmp_path)
    assert found[0] == found[1]
    assert found[0][0] == 0.0
    assert 0.0 < found[0][1] < 1e-3  # gains of norms are rounded, too


def test_gradients_that_are_reduced_once_per_step_are_those_of_ddp(chars, tmp_path):
    def work(ranks: DistContext) -> list[float]:
        ddp = trained(ranks, chars, "adamw", 1, 10, 8)
        return [
            distance(trained(ranks, chars, "adamw", -1, 10, 8, sync_each_batch=each), ddp) for each in (False, True)
        ]

    (once, each), other = on_ranks(work, 2, tmp_path)
    assert [once, each] == other
    assert once == 0.0
    assert 0.0 < each < 1e-5


def test_form_in_bfloat16_is_compared_with_weights_in_float32_and_gives_way_to_them(chars, tmp_path, monkeypatch):
    c = tiny(chars, tmp_path, dp_shard=-1, batch_size=4, gradient_accumulation_steps=2, dtype="auto")

    def wrong(runner: Runner, batch: Any, loss: Any, micro_steps: int, rehearsed: bool = False) -> None:
        if not rehearsed and runner.form.dtype == "bfloat16":
            raise Mismatch("gradients disagree")

    def work(ranks: DistContext) -> list[Any]:
        model = build(ranks, -1, dtype="bfloat16")
        loss, gradients = plain_float32(model, batch_of(4), Variant("bfloat16")) or (math.nan, [])
        alone = plain_float32(build(ranks, 1), batch_of(4), Variant()) or (math.nan, [])
        assert loss == alone[0]
        for found, expected in zip(gradients, alone[1], strict=True):
            torch.testing.assert_close(sharding.whole(found), expected, rtol=1e-5, atol=1e-7)
        before = whole_weights(model)
        monkeypatch.setattr("deskgpt.compute.implementation.check", wrong)
        runner, _ = found_form(model, c, ranks, EarlierVariant("bfloat16"))
        assert_equal(whole_weights(runner.model), before)
        return [runner.form.dtype, runner.forward_backward(*batch_of(4)).item() == loss]

    assert on_ranks(work, 2, tmp_path) == [["float32", True]] * 2


def batch_of(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(0, CONFIG.vocab_size, (n, CONFIG.block_size + 1), generator=torch.Generator().manual_seed(n))
    return x[:, :-1], x[:, 1:]


def found_form(
    model: GPT, c: train.TrainConfig, ranks: DistContext, earlier: EarlierVariant | None = None
) -> tuple[Runner, Batching]:
    """The Runner of a run of c, and its micro-batches."""
    settings = asdict(c)
    make = functools.partial(train.build_optimizer, c)
    wanted = Options.of(settings, earlier or EarlierVariant(), 5, None)
    smaller = functools.partial(fit.smaller_batch, model.config, make, CPU, wanted.may_split_anew(CPU))
    batching = Batching.of(settings, ranks.rank, ranks.world)
    return choose_implementation(Tuner(model, batching, wanted, ranks, batch_of, smaller))


@pytest.mark.slow
def test_what_one_rank_finds_decides_for_all(chars, tmp_path, monkeypatch):
    def no_room_above_four(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if q.size(0) > 4:
            raise torch.OutOfMemoryError("out of memory")
        return real_attention(q, *args, **kwargs)

    real_attention = model_file.attention
    c = tiny(chars, tmp_path, dp_shard=-1, batch_size=8, gradient_accumulation_steps=4, dtype="bfloat16")

    def work(ranks: DistContext) -> list[Any]:
        found: list[Any] = []
        model = build(ranks, -1, dtype="bfloat16")
        before = whole_weights(model)
        if ranks.rank == 1:
            monkeypatch.setattr(model_file, "attention", no_room_above_four)
            monkeypatch.setattr(cache, "read", lambda name: {})  # its file has nothing of the form that it gives up
        with pytest.raises(ValueError, match="out of memory: batch_size=8 does not fit .* --batch_size=4"):
            found_form(model, c, ranks)
        runner, batching = found_form(model, replace(c, auto_batch=True), ranks)
        assert_equal(whole_weights(model), before)
        found += [batching.batch_size, batching.accumulation, runner.form.dtype]

        # the time that steps take: this rank's clock runs, and the other one has more time left
        began = time.perf_counter()
        if ranks.is_first:
            monkeypatch.setattr(time_budget, "time", SimpleNamespace(perf_counter=map(float, count(0, 10)).__next__))
            began = -100.0
        runner.forward_backward(*batch_of(4))
        optimizer = make_optimizer(model, "muon", 0.1, 1e-3, (0.9, 0.95), 0.95)
        planned = replace(c, max_minutes=5.0, **batching.changed(asdict(c)))
        state = TrainState(planned, runner, optimizer, ranks)
        val = Split(chars, "val", CONFIG.block_size, CONFIG.vocab_size, 1)
        windows = [val.n_eval_windows(batching.eval_windows)]
        time_budget.TimeBudget(planned, began, state).plan(batching, windows, batch_of(4))
        found.append(asdict(planned))
        assert_equal(whole_weights(model), before)

        # gradients and weights that are not finite
        runner.forward_backward(*batch_of(4))
        norms = runner.gradient_norms()
        whole = torch.stack([sharding.whole(p.grad).norm() for p in runner.parameters])
        torch.testing.assert_close(norms, whole, rtol=1e-6, atol=0)
        step_unless(optimizer, torch.tensor(True))
        assert_equal(whole_weights(model), before)
        unused: Any = None
        health = Health(planned, state, unused, unused)
        found.append(health._broken_weight())
        if ranks.rank == 1:
            sharding.local(runner.parameters[3])[-1] = torch.nan
        found.append(health._broken_weight())
        return found

    first, second = on_ranks(work, 2, tmp_path)
    assert first == second
    assert first[:3] == [4, 8, "bfloat16"]
    assert first[3]["max_iters"] == 4
    assert first[4:] == [None, "transformer.h.0.attn.c_attn.weight"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"dp_shard": 3}, ["dp_shard=3", "8", "--dp_shard=2"]),
        ({"dp_shard": 0}, ["dp_shard=0", "8", "--dp_shard=1"]),
        ({"dp_shard": 8, "dtype": "float16"}, ["dtype=float16", "dp_shard=8", "--dtype=bfloat16"]),
        ({"dp_shard": 2, "sample_interval": 1}, ["sample_interval=1", "dp_shard=2", "sample.py"]),
    ],
)
def test_what_sharded_weights_cannot_do_is_refused_with_the_remedy(tmp_path, settings, named):
    c = tiny(tmp_path, tmp_path, **settings)
    with pytest.raises(ValueError, match="dp_shard") as refused:
        sharding.check_sharding(c.dp_shard, 8, c.dtype, c.sample_interval)
    assert_one_line(str(refused.value), *named)
    sharding.check_sharding(1, 8, c.dtype, c.sample_interval)
    sharding.shards_for(asdict(tiny(tmp_path, tmp_path, **(settings | {"dp_shard": -1}))), 1)


def test_parameter_that_two_blocks_share_is_refused_in_one_line():
    sharding.refuse_shared(GPT(CONFIG))
    tied = GPT(CONFIG)
    tied.transformer.h[1] = tied.transformer.h[0]
    with pytest.raises(ValueError, match="dp_shard") as refused:
        sharding.refuse_shared(tied)
    assert_one_line(refused.value, "transformer.h.0.", "transformer.h.1.")


def test_parameter_that_is_unused_on_one_rank_only_ends_no_run(tmp_path):
    def gradient(ranks: DistContext) -> torch.Tensor | None:
        model = build(ranks, 1)
        if not ranks.is_first:  # as an expert that no token of this rank's micro-batch is for
            model.transformer.h[1].forward = lambda x, span: x
        runner = Runner(model, Variant(), distributed=True)
        idx = torch.arange(16)[None]
        runner.distribute(idx, idx)
        runner.forward_backward(idx, idx)
        return next(model.transformer.h[1].parameters()).grad

    found = on_ranks(gradient, 2, tmp_path)
    assert found[0].any()
    assert torch.equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "config"), [(4, CONFIG), (8, NARROW)])
def test_any_layout_trains_as_one_process_does(chars, tmp_path, world, config):
    forms = {"adamw": "float32", "muon": "bfloat16"}
    one = {name: trained(ALONE, chars, name, 1, 20, 8, dtype, config) for name, dtype in forms.items()}

    def work(ranks: DistContext) -> dict[Any, float]:
        return {
            (name, dp_shard): distance(trained(ranks, chars, name, dp_shard, 20, 8, dtype, config), one[name])
            for name, dtype in forms.items()
            for dp_shard in (2, -1)
        }

    found = on_ranks(work, world, tmp_path)
    for (name, _), difference in found[0].items():
        assert difference < (1e-5 if name == "adamw" else 1e-3)
    assert all(of_rank == found[0] for of_rank in found)


@pytest.mark.slow
def test_ranks_go_on_uncompiled_together_where_one_cannot_compile(chars, tmp_path, monkeypatch, capfd):
    c = tiny(chars, tmp_path, dp_shard=-1, gradient_accumulation_steps=2, compile="auto")
    compile = torch.compile

    def work(ranks: DistContext) -> str:
        from torch._inductor import config as inductor
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.pool.cache_clear()  # its threads, if an earlier test has made some, are not in a fork
        if ranks.is_first:
            monkeypatch.setattr(torch, "compile", lambda f: compile(f, backend="eager"))
        else:
            missing = str(tmp_path / "no-compiler")
            monkeypatch.setenv("CXX", missing)
            monkeypatch.setattr(inductor.cpp, "cxx", (None, missing))  # it has read CXX before the fork
        model = build(ranks, -1)
        runner, _ = found_form(model, c, ranks, EarlierVariant("float32", compiled=True, attention="flash"))
        return str(runner.form)

    assert on_ranks(work, 2, tmp_path) == ["float32, not compiled"] * 2
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "NOT compiled" in line]
    assert_one_line(line, "compile=auto", "another rank")


def test_ddp_sends_gradients_while_earlier_blocks_of_a_compiled_model_still_go_backward(tmp_path, monkeypatch):
    compile = torch.compile
    config = replace(CONFIG, n_layer=4, n_embd=128)  # more than the megabyte of DDP's first bucket
    order: list[str] = []

    def backward_graph(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def noted(*args: Any) -> Any:
            order.append("backward")
            return graph(*args)

        return make_boxed_func(noted)

    def noted_hook(state, bucket):  # DDP refuses annotations that are strings
        order.append("sends")
        return allreduce_hook(state, bucket)

    backend = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph), bw_compiler=backward_graph)

    def work(ranks: DistContext) -> list[str]:
        monkeypatch.setattr(torch, "compile", lambda f: compile(f, backend=backend))
        runner = Runner(build(ranks, 1, config), Variant(compiled=True), ranks.distributed)
        x, y = batch_of(2)
        runner.forward_backward(x, y)  # compiles, as in a run: before there is a DDP
        runner.distribute(x, y)
        assert runner.trained is not None
        runner.trained.register_comm_hook(None, noted_hook)  # type: ignore[operator]
        order.clear()
        runner.forward_backward(x, y)
        return order

    for found in on_ranks(work, 2, tmp_path):
        assert "backward" in found[found.index("sends") :]


def test_run_ends_though_a_thread_of_gloo_still_holds_a_tensor(tmp_path):
    def short_run(ranks: DistContext) -> None:
        runner = Runner(GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=8)), Variant(), True)
        idx = torch.zeros(1, 8, dtype=torch.long)
        runner.distribute(idx, idx)
        ranks.gather("a tensor")
        runner.leave_ranks()
        ranks.close()

    def work(ranks: DistContext) -> str:
        short_run(ranks)
        for i in range(20):
            dist.init_process_group("gloo", f"file://{tmp_path / str(i)}", rank=ranks.rank, world_size=2)
            short_run(ranks)
        return "ended"

    assert on_ranks(work, 2, tmp_path) == ["ended"] * 2


@pytest.mark.slow
def test_no_group_of_ranks_waits_longer_than_the_runs_timeout(tmp_path):
    """With torch's own groups of a mesh, the first rank would wait until the one that hangs has ended."""

    def work(ranks: DistContext) -> float:
        shards = sharding.make_mesh("cpu", 2, 4, timeout_s=1.0).get_group("dp_shard")
        dist.barrier()
        t0 = time.monotonic()
        if ranks.rank == 1:
            time.sleep(6)
        with suppress(RuntimeError):
            dist.all_reduce(torch.ones(1), group=shards)
        return time.monotonic() - t0

    waited = on_ranks(work, 4, tmp_path)
    assert 0.9 < waited[0] < 4
