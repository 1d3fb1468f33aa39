from __future__ import annotations

import functools
import os
import re
import sys
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import assert_one_line, flags, shell
from gloo import on_ranks
from test_memory import kept_by_optimizer, peak_of
from torch.distributed._tools.fake_collectives import CollectiveOp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deskgpt.compute import sharding
from deskgpt.compute.batching import Batching
from deskgpt.compute.ranks import Ranks
from deskgpt.compute.runner import Form, Runner
from deskgpt.predict import traffic
from deskgpt.predict.memory import Step
from deskgpt.predict.memory import memory as memory_of
from model import GPT, GPTConfig
from train import TrainConfig, main, make_optimizer


def count(config: GPTConfig) -> int:
    return sum(p.numel() for p in GPT.without_storage(config).parameters())


SMALL: dict[str, Any] = {"n_layer": 1, "n_head": 2, "n_embd": 64, "block_size": 64}
ODD = GPTConfig(n_layer=2, n_head=1, n_embd=33, block_size=16, vocab_size=50)  # rows do not divide among 2, 4 or 8


def settings(world: int, dp_shard: int, micro_steps: int = 1, **more: Any) -> TrainConfig:
    return TrainConfig(dp_shard=dp_shard, gradient_accumulation_steps=micro_steps * world, **more)


def step_of(c: TrainConfig, config: GPTConfig, world: int, device_type: str = "cuda") -> Step:
    """Not compiled. To be called within fake_ranks."""
    shard = None
    shards = sharding.shards_of(c.dp_shard, world)
    if shards > 1:
        mesh = sharding.make_mesh("cpu", shards, world)
        shard = functools.partial(sharding.shard, mesh=mesh, reshard_after_forward=c.reshard_after_forward)
    form = Form("float32" if device_type == "cpu" else "bfloat16", checkpoint=c.activation_checkpoint)
    make = functools.partial(make_optimizer, c)
    return Step(config, c.batch_size, form, device_type, make_optimizer=make, shard=shard)


def expected(c: TrainConfig, config: GPTConfig, world: int) -> dict[str, float]:
    """What the plan says that a rank sends in a step, by kind."""
    batching = Batching(c.batch_size, c.gradient_accumulation_steps, config.block_size, world=world)
    shards = sharding.shards_of(c.dp_shard, world)
    make = functools.partial(make_optimizer, c)
    return traffic.sent_in_step(config, batching, shards, c.reshard_after_forward, make)


# ---- real ranks ----------------------------------------------------------------------------------------------

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast")
NORMS = 1000  # bytes: smaller collectives are of the gradients' norms, which no plan counts


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank sends, as in rings, in collectives of DDP, FSDP and DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t.__name__ == "DTensor" for t in types):
            return NotImplemented  # it comes here again, as operations on this rank's rows
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.name().replace("_", "")
            for kind in KINDS:
                if kind.replace("-", "") in name:
                    self._count(kind, func, args)
        return func(*args, **(kwargs or {}))

    def _count(self, kind: str, func: Any, args: Any) -> None:
        members = dist.get_process_group_ranks(CollectiveOp.get_process_group(func, args))
        sizes = []  # of the result, where it is an argument, and of what goes in
        for arg in args:
            tensors = [t for t in tree_leaves(arg) if isinstance(t, torch.Tensor)]
            if tensors:
                sizes.append(sum(t.nbytes for t in tensors))
        size = min(sizes) * len(members) if kind == "all-gather" else sizes[-1]
        if len(members) == 1 or size < NORMS:
            return
        splits = args[4] if "alltoall_base" in func.name() else []  # rows for each of the members, if they differ
        if splits:
            self.bytes[kind] += size - size * splits[members.index(dist.get_rank())] / sum(splits)
        else:
            self.bytes[kind] += size * (len(members) - 1) / len(members) * (2 if kind == "all-reduce" else 1)


class Real:
    """This rank's part of a real step of two micro-batches."""

    def __init__(self, c: TrainConfig, config: GPTConfig, ranks: Ranks) -> None:
        torch.manual_seed(0)
        self.model = GPT(config)
        if c.dp_shard > 1:
            sharding.shard(self.model, sharding.make_mesh("cpu", c.dp_shard, ranks.world), c.reshard_after_forward)
        self.runner = Runner(self.model, Form(checkpoint=c.activation_checkpoint), distributed=True)
        self.optimizer = make_optimizer(c, self.model)
        self.x = torch.zeros(c.batch_size, config.block_size, dtype=torch.int64)
        self.runner.distribute(self.x, self.x)

    def step(self) -> None:
        for last in (False, True):
            with self.runner.micro_batch(last):
                loss, _ = self.runner.forward(self.x, self.x, 2)
                self.runner.backward(loss)
        self.runner.gradient_norms()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def sent(self) -> dict[str, float]:
        self.step()  # at the beginning of the next one DDP tells all ranks how it has arranged the gradients
        self.runner.forward_backward(self.x, self.x)
        self.optimizer.zero_grad(set_to_none=True)
        with Sent() as sent:
            self.step()
        return dict(sent.bytes)

    def peak_bytes(self) -> int:
        """The least peak of some steps: gloo's threads let go of tensors a little later, or much."""
        self.step()  # makes AdamW's moments
        weights = sum(sharding.local(p).nbytes for p in self.model.parameters())
        there = weights + kept_by_optimizer(self.optimizer) + 2 * self.x.nbytes
        return there + min(peak_of(self.step) for _ in range(12))


needs_gloo = pytest.mark.skipif(os.name == "nt", reason="needs gloo as Linux and macOS have it")


@needs_gloo
@pytest.mark.parametrize("world", [2, *(pytest.param(w, marks=pytest.mark.slow) for w in (4, 8))])
def test_real_ranks_send_what_the_plan_says(world, tmp_path):
    runs = [settings(world, shards, 2) for shards in (1, 2, 4, 8) if shards <= world]
    runs += [settings(world, 2, 2, reshard_after_forward=False), settings(world, world, 2, optimizer="muon")]
    runs += [settings(world, 2, 2, activation_checkpoint="full")]
    found = on_ranks(lambda ranks: [Real(c, ODD, ranks).sent() for c in runs], world, tmp_path)
    for c, *of_ranks in zip(runs, *found, strict=True):
        planned = expected(c, ODD, world)
        to_owners = [sent.pop("all-to-all", 0.0) for sent in of_ranks]  # by how many of Muon's matrices a rank owns
        assert sum(to_owners) / world == pytest.approx(planned.pop("all-to-all", 0.0), rel=0.05)
        assert of_ranks == [pytest.approx(planned)] * world


# Each value of both settings, in half of their combinations.
RESHARD_AND_CHECKPOINTS = [(True, "none"), (True, "full"), (False, "selective")]


@pytest.mark.slow
@needs_gloo
def test_predicted_memory_of_a_sharded_rank_is_the_peak_of_a_real_step(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # whose workspaces are not counted
    config = GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=64, vocab_size=512)
    runs = []
    for reshard, which in RESHARD_AND_CHECKPOINTS:
        more: dict[str, Any] = {"reshard_after_forward": reshard, "activation_checkpoint": which}
        runs.append(settings(2, 2, 2, batch_size=4, **more))
    predicted = [sum(memory(c, config, 2, "cpu").values()) for c in runs]
    found = on_ranks(lambda ranks: [Real(c, config, ranks).peak_bytes() for c in runs], 2, tmp_path)
    assert found[0] == [pytest.approx(peak, rel=0.02) for peak in predicted]


# ---- memory --------------------------------------------------------------------------------------------------


def memory(c: TrainConfig, config: GPTConfig, world: int, device_type: str = "cuda") -> dict[str, int]:
    """Of a rank, not compiled."""
    with sharding.fake_ranks(world):
        return memory_of(step_of(c, config, world, device_type))


LARGE = GPTConfig(n_layer=2, n_head=8, n_embd=1024, block_size=256, vocab_size=50304)
BLOCK = 4 * 12 * 1024**2  # bytes
ROOT = 4 * (50304 + 256) * 1024


def test_sharded_state_is_16_bytes_per_parameter_over_the_shards():
    parts = memory(settings(16, 8, batch_size=2), LARGE, 16)
    state = parts["weights"] + parts["gradients"] + parts["optimizer"]
    assert state == pytest.approx(16 * count(LARGE) / 8, rel=0.01)


@pytest.mark.slow
def test_sharded_rank_gathers_a_few_blocks_or_all_and_keeps_the_activations_of_one_that_is_not():
    config = replace(LARGE, n_layer=9)
    few = memory(settings(16, 8, batch_size=2), config, 16)
    assert ROOT <= few["gathered"] < ROOT + 4 * BLOCK
    all_ = memory(settings(16, 8, batch_size=2, reshard_after_forward=False), config, 16)
    assert ROOT + 9 * BLOCK <= all_["gathered"] < ROOT + 12 * BLOCK
    alone = memory_of(Step(config, 2, Form("bfloat16"), "cuda"))
    for parts in (few, all_):
        assert parts["activations"] == pytest.approx(alone["activations"], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("reshard", "which"), RESHARD_AND_CHECKPOINTS)
def test_layers_of_a_sharded_model_are_extrapolated_to_what_a_rehearsal_gives(reshard, which, monkeypatch):
    c = settings(16, 8, batch_size=2, activation_checkpoint=which, reshard_after_forward=reshard)
    config = replace(LARGE, n_layer=9)
    few = memory(c, config, 16)
    monkeypatch.setattr("deskgpt.predict.memory.LAYERS_REHEARSED", 100)
    assert few == memory(c, config, 16)


# ---- the plan ------------------------------------------------------------------------------------------------


def said(capsys: pytest.CaptureFixture[str], **options: Any) -> str:
    main(TrainConfig(**SMALL | {"plan_for": "H100", "batch_size": 2, "compile": False} | options))
    assert not dist.is_initialized()
    return capsys.readouterr().out


def test_plan_says_memory_traffic_and_time_of_ranks_that_are_not_here(capsys, tmp_path):
    out = said(capsys, world=1024, dp_shard=64, gradient_accumulation_steps=2048, out_dir=str(tmp_path / "out"))
    assert "1,024 ranks, 16 x 64 that share weights; micro-batches of each rank and step: 2" in out
    assert re.search(r"weights \S+, gradients \S+, optimizer \S+, activations \S+, logits \S+, gathered \S+ GiB", out)
    assert re.search(r"each rank sends per step: all-gather \S+ MB, reduce-scatter \S+ MB, all-reduce \S+ MB", out)
    assert re.search(r"\) of 1024 x 989.00 TFLOP/s .*, and without what ranks send each other$", out, re.M)
    assert not (tmp_path / "out").exists()


def test_plan_of_ddp_counts_the_buckets_and_8_bytes_per_parameter_and_says_which_batch_divides(capsys):
    out = said(capsys, world=16, gradient_accumulation_steps=40, n_embd=768)
    n = count(GPTConfig(**SMALL | {"n_embd": 768}))
    assert f"buckets {4 * n / 2**30:.2f} GiB" in out
    assert f"each rank sends per step: all-reduce {8 * n * 15 / 16 / 1e6:.1f} MB" in out
    assert "16 ranks, each with all weights; micro-batches of each rank and step: 3" in out
    assert "gradient_accumulation_steps=40 does not divide among 16 ranks" in out
    assert "--gradient_accumulation_steps=48" in out
    assert "tokens per step: 6,144 = 2 x 48 x 64" in out


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"world": 1024, "dp_shard": 60}, ["dp_shard=60", "1024", "--dp_shard=64"]),
        ({"world": 6, "dp_shard": 4}, ["--dp_shard=3"]),
        ({"world": 10**9}, ["world=1,000,000,000", "1,048,576"]),
        ({"world": -1}, ["world=-1", "0"]),
        ({"world": 10**6, "batch_size": 12}, ["12,000,000 sequences"]),
    ],
)
def test_ranks_that_cannot_be_are_refused_in_one_line(options, named, script):
    done = script("train.py", *flags(plan_for="H100", **options))
    assert done.code != 0
    assert_one_line(done.err, *named)


@needs_gloo
def test_ranks_that_are_connected_can_plan_for_others(capsys, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    assert "8 ranks, 2 x 4 that share" in said(capsys, world=8, dp_shard=4, gradient_accumulation_steps=8)


@pytest.mark.slow
def test_plan_of_70_billion_parameters_takes_less_than_a_minute_and_8_gb():
    size = {"n_layer": 86, "n_head": 64, "n_embd": 8192, "block_size": 4096}
    options = flags(plan_for="H100", world=1024, dp_shard=64, batch_size=1, **size)
    code = (
        "import resource, runpy, sys; sys.argv[:] = sys.argv[1:]; runpy.run_path('train.py', run_name='__main__'); "
        "used = resource.getrusage(resource.RUSAGE_SELF); print(used.ru_utime + used.ru_stime, used.ru_maxrss)"
    )
    done = shell("python", "-c", code, "train.py", *options)
    assert done.returncode == 0, done.stderr
    cpu_s, peak = map(float, done.stdout.split()[-2:])
    assert cpu_s < 60
    assert peak * (1 if sys.platform == "darwin" else 1024) < 8e9
    n = float(re.findall(r"number of parameters: (\S+)M", done.stdout)[0]) / 1e3
    assert n == pytest.approx(70, rel=0.01)
    assert "time: n/a" in done.stdout  # it needs three times the 80 GB
