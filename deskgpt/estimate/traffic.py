"""What each rank of a run sends in a step, by closed forms. The tests count the same on real ranks.

N parameters, of which B in the blocks, R = N - B in the root's unit and H in Muon's matrices; w ranks, of which s share
a copy in r copies. Numbers take 4 bytes, those of gathered blocks g: 2 in a run in bfloat16, else 4. What a rank sends
is that of a ring: of w ranks that gather or reduce-scatter b bytes each sends b(w - 1)/w, and an all-reduce is both.

    DDP, once per step                       all-reduce      8 N (w - 1) / w
    sharded, per micro-batch                 all-gather      (4 R + 2 g B) (s - 1) / s; without resharding g B once
                                             reduce-scatter  4 N (s - 1) / s
    copies of a sharded model, too           all-reduce      8 (N / s) (r - 1) / r
    both without sync_each_batch             once per step
    Muon on sharded weights, once per step   all-to-all      8 (H / s) (s - 1) / s, the mean of all ranks

About once a second the ranks also agree whether to stop, by two numbers of 8 bytes each, which no plan counts.
Where s does not divide the rows of a parameter, the ranks send it with its rows rounded up to a multiple of s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor

from deskgpt.compute.batching import Batching
from deskgpt.compute.optimizer import Muon
from deskgpt.estimate.memory import MakeOptimizer
from model import GPT, GPTConfig


def sent_in_step(
    config: GPTConfig,
    batching: Batching,
    shards: int,
    reshard_after_forward: bool,
    make_optimizer: MakeOptimizer,
    dtype: str = "float32",
    sync_each_batch: bool = True,
) -> dict[str, float]:
    """Bytes that a rank sends in an optimizer step, by kind of collective.

    shards: how many ranks share a copy. dtype: of the run's matmuls.
    """
    model = GPT.without_storage(config)
    world = batching.world
    if shards == 1:
        gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        return {"all-reduce": 2 * gradients * share(world)}
    copies = world // shards
    whole = padded_bytes(model.parameters(), shards)
    of_blocks = padded_bytes(model.transformer.h.parameters(), shards)
    gathered_blocks = of_blocks / 2 if dtype == "bfloat16" else of_blocks
    gathered = whole - of_blocks + gathered_blocks * (1 + reshard_after_forward)
    optimizer = make_optimizer(model)
    groups = optimizer.param_groups if isinstance(optimizer, Muon) else []
    muon = sum(p.nbytes for group in groups if "momentum" in group for p in group["params"])
    reductions = batching.micro_steps if sync_each_batch else 1
    sent = {
        "all-gather": batching.micro_steps * gathered * share(shards),
        "reduce-scatter": reductions * whole * share(shards),
        "all-reduce": reductions * 2 * whole / shards * share(copies),
        "all-to-all": 2 * muon / shards * share(shards),
    }
    return {kind: n for kind, n in sent.items() if n}


def share(ranks: int) -> float:
    """What each of these ranks sends of what all of them gather or reduce-scatter."""
    return (ranks - 1) / ranks


def padded_bytes(params: Iterable[Tensor], shards: int) -> int:
    """Bytes of the parameters with their rows rounded up to a multiple of shards."""
    return sum(math.ceil(len(p) / shards) * shards * p[0].nbytes for p in params)
