"""What the ranks of a run send each other in a step: counted in a rehearsal with torch's fake process group.

The GPT of model.py is sharded as in training and takes a step on fake tensors, as the first of the ranks, which need
not exist. What a rank sends is that of a ring: of w ranks that gather or reduce-scatter b bytes each sends b(w - 1)/w,
and an all-reduce is both. DDP's reducer is C++ that runs on no fake tensors. It all-reduces the gradients once per
step, which the tests count in real runs, as they do the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deskgpt.compute import sharding
from deskgpt.compute.optimizer import Muon
from deskgpt.compute.runner import Runner
from deskgpt.predict.memory import Step
from model import GPT

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast")

# ---- counting ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Ranks that take part in a kind of collective."""

    kind: str  # one of KINDS
    ranks: int
    stride: int = 1  # from one of them to the next: dp_shard among those that hold the same rows

    def sent(self, size: int) -> float:
        """Bytes that each of them sends of whole tensors of `size` bytes; all-to-all: of what each of them has."""
        if self.kind == "broadcast":
            return size
        times = 2 if self.kind == "all-reduce" else 1
        return times * size * (self.ranks - 1) / self.ranks


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank sends in collectives of torch.distributed: DDP's, FSDP's and DTensor's too."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[Group, float] = defaultdict(float)

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
        from torch.distributed._tools.fake_collectives import CollectiveOp

        members = dist.get_process_group_ranks(CollectiveOp.get_process_group(func, args))
        if len(members) == 1:
            return
        sizes = []  # of the result, where it is an argument, and of what goes in
        for arg in args:
            tensors = [t for t in tree_leaves(arg) if isinstance(t, Tensor)]
            if tensors:
                sizes.append(sum(t.nbytes for t in tensors))
        size = min(sizes) * len(members) if kind == "all-gather" else sizes[-1]
        group = Group(kind, len(members), members[1] - members[0])
        splits = args[4] if "alltoall_base" in func.name() else []  # rows for each of the members, if they differ
        if splits:
            size -= size * splits[members.index(dist.get_rank())] / sum(splits)
        self.bytes[group] += size if splits else group.sent(size)


# ---- the rehearsal -------------------------------------------------------------------------------------------


@contextmanager
def fake_ranks(world: int) -> Iterator[None]:
    """This process as the first of `world` ranks that are not there. Their collectives end at once and move nothing.

    Ends a process group that it finds.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # which registers the group

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def of_step(step: Step, micro_steps: int, world: int) -> dict[Group, float]:
    """Bytes that a rank sends in an optimizer step of `micro_steps` micro-batches: under DDP, or sharded as step.shard.

    To be called within fake_ranks where it is sharded.
    """
    if step.shard is None:
        group = Group("all-reduce", world)
        trained = [p for p in GPT.without_storage(step.config).parameters() if p.requires_grad]
        return {group: group.sent(sum(p.nbytes for p in trained))}
    with FakeTensorMode():
        model = GPT(step.config)
        step.shard(model)
        runner = Runner(model, replace(step.form, dtype="float32", compiled=False))
        optimizer = step.make_optimizer(model) if step.make_optimizer else None
        token = torch.zeros(1, 1, dtype=torch.int64)  # what is sent does not depend on how many there are
        with Sent() as of_micro_batch:
            runner.forward_backward(token, token)
        with Sent() as of_update:
            runner.gradient_norms()
            if isinstance(optimizer, Muon):  # whose own matmuls are not rehearsed
                for params in [g["params"] for g in optimizer.param_groups if "momentum" in g]:
                    owners = sharding.Owners(params)
                    owners.scatter(owners.gather([sharding.local(p) for p in params]))
    for group, n in of_micro_batch.bytes.items():
        of_update.bytes[group] += n * micro_steps
    return of_update.bytes
