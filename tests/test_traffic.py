"""What the closed forms of traffic.py say, counted on real ranks."""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import on_ranks
from torch.distributed._tools.fake_collectives import CollectiveOp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deskgpt.compute import sharding
from deskgpt.compute.batching import Batching
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.runner import Runner, Variant
from deskgpt.estimate import traffic
from model import GPT, GPTConfig
from train import TrainConfig
from train import build_optimizer as make_optimizer

ODD = GPTConfig(n_layer=2, n_head=1, n_embd=33, block_size=16, vocab_size=50)  # rows do not divide among 2, 4 or 8
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


def settings(world: int, dp_shard: int, **more: Any) -> TrainConfig:
    own: dict[str, Any] = {
        "dp_shard": dp_shard,
        "gradient_accumulation_steps": 2 * world,
        "batch_size": 2,
        "dtype": "float32",
    }
    return TrainConfig(**own | more)


def expected(c: TrainConfig, world: int) -> dict[str, float]:
    """What the plan says that a rank sends in a step, by kind."""
    batching = Batching(c.batch_size, c.gradient_accumulation_steps, ODD.block_size, world=world)
    make = functools.partial(make_optimizer, c)
    return traffic.sent_in_step(ODD, batching, c.dp_shard, c.reshard_after_forward, make, c.dtype, c.sync_each_batch)


def sent_by(c: TrainConfig, ranks: DistContext) -> dict[str, float]:
    """What this rank sends in a real step of two micro-batches."""
    torch.manual_seed(0)
    model = GPT(ODD)
    if c.dp_shard > 1:
        sharding.shard(model, sharding.make_mesh("cpu", c.dp_shard, ranks.world), c.reshard_after_forward, c.dtype)
    runner = Runner(model, Variant(c.dtype, checkpoint=c.activation_checkpoint), True, c.sync_each_batch)
    optimizer = make_optimizer(c, model)
    x = torch.zeros(c.batch_size, ODD.block_size, dtype=torch.int64)
    runner.distribute(x, x)

    def step() -> None:
        for last in (False, True):
            with runner.micro_batch(last):
                loss, _ = runner.forward(x, x, 2)
                runner.backward(loss)
        runner.gradient_norms()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()  # at the beginning of the next one DDP tells all ranks how it has arranged the gradients
    runner.forward_backward(x, x)
    optimizer.zero_grad(set_to_none=True)
    with Sent() as sent:
        step()
    return dict(sent.bytes)


@pytest.mark.skipif(os.name == "nt", reason="needs gloo as Linux and macOS have it")
@pytest.mark.parametrize("world", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_real_ranks_send_what_the_plan_says(world, tmp_path):
    runs = [settings(world, shards) for shards in (1, 2, 4, 8) if shards <= world]
    runs += [settings(world, 2, reshard_after_forward=False), settings(world, world, optimizer="muon")]
    runs += [settings(world, 2, activation_checkpoint="full"), settings(world, 1, dtype="bfloat16")]
    runs += [settings(world, world, dtype="bfloat16", reshard_after_forward=reshard) for reshard in (True, False)]
    runs += [settings(world, shards, sync_each_batch=False) for shards in {2, world}]
    found = on_ranks(lambda ranks: [sent_by(c, ranks) for c in runs], world, tmp_path)
    for c, *of_ranks in zip(runs, *found, strict=True):
        planned = expected(c, world)
        to_owners = [sent.pop("all-to-all", 0.0) for sent in of_ranks]  # by how many of Muon's matrices a rank owns
        assert sum(to_owners) / world == pytest.approx(planned.pop("all-to-all", 0.0), rel=0.05)
        assert of_ranks == [pytest.approx(planned)] * world
