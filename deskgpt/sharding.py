"""One copy of weights, gradients and moments, shared among ranks: torch's fully_shard (FSDP2) on
the GPT of model.py.

Each block is a unit that is gathered when it computes; embedding, head and final norm are in the
root's unit, since torch refuses tied weights in two units. A run in bfloat16 on CUDA gathers the
weights of blocks in bfloat16 and sums their gradients in float32; everything else is gathered in
float32. Each rank's own rows are float32.
"""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deskgpt.distributed import is_dtensor, local, shards_of
from model import GPT

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_sharding(dp_shard: int, world: int, dtype: str, sample_interval: int) -> None:
    """Raise ValueError if dp_shard does not divide the ranks, or a setting does not work with
    sharded weights.
    """
    if shards_of(dp_shard, world) == 1:
        return
    if dtype == "float16":
        raise ValueError(
            f"dtype=float16 with dp_shard={dp_shard} has no loss scale; try --dtype=bfloat16"
        )
    if sample_interval:
        raise ValueError(
            f"sample_interval={sample_interval} with dp_shard={dp_shard}: no rank has full "
            "weights for samples; use --sample_interval=0, and run sample.py"
        )


def make_mesh(device_type: str, dp_shard: int, world: int, timeout_s: float = 600.0) -> DeviceMesh:
    """Return the ranks as (replicas, shards), or as (shards) if there is one replica.

    Neighbours share a copy.

    timeout_s: the longest that ranks wait for each other.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.distributed_c10d import _set_pg_timeout

    n = shards_of(dp_shard, world)
    shape = (n,) if n == world else (world // n, n)
    names = ("dp_replicate", "dp_shard")[-len(shape) :]
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    for group in mesh.get_all_groups():  # as torchtitan does: they wait for 10 or 30 minutes
        _set_pg_timeout(timedelta(seconds=timeout_s), group)
    return mesh


def shard(model: GPT, mesh: DeviceMesh, dtype: str = "float32") -> None:
    """Shard the model in place: its parameters become DTensors, with each rank's rows.

    dtype: what the run computes in, float32 or bfloat16. A CPU gathers in float32: its norms take
    no bfloat16 gains.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    refuse_shared(model)
    policy = MixedPrecisionPolicy()
    if dtype == "bfloat16" and mesh.device_type != "cpu":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)


def refuse_shared(model: GPT) -> None:
    """Raise ValueError for a parameter that two units share, as in a changed model; torch would
    print nothing.
    """
    units: dict[Tensor, set[str]] = defaultdict(set)
    for name, p in model.named_parameters(remove_duplicate=False):
        units[p].add(name.split(".")[2] if name.startswith("transformer.h.") else "")
        if len(units[p]) > 1:
            raise ValueError(
                f"dp_shard: {name} is a parameter of another unit, too; take --dp_shard=1"
            )


def sharded_copy(model: GPT, mesh: DeviceMesh, device: torch.device, dtype: str = "float32") -> GPT:
    """Return the model sharded on the device, with rank 0's weights.

    Other ranks' model may be on the meta device.
    """
    copy = GPT.without_storage(model.config)
    shard(copy, mesh, dtype)
    swap = torch.__future__.set_swap_module_params_on_conversion
    swap(True)  # otherwise to_empty makes several of a tied weight
    copy.to_empty(device=device)
    swap(False)
    for tensors in (GPT.named_parameters, GPT.named_buffers):  # also what a state_dict leaves out
        copy_full(dict(tensors(model)), dict(tensors(copy)))
    return copy


def gathered(rows: Tensor, like: Any) -> Tensor:
    """Return the full tensor, which is sharded as `like` is and of which each rank has these
    rows.
    """
    from torch.distributed.tensor import DTensor

    found = DTensor.from_local(
        rows,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.size(),
        stride=like.stride(),
    )
    return found.full_tensor()


def rows_of(tensor: Tensor, like: Any) -> Tensor:
    """Return this rank's rows of a full tensor, as `like` is sharded; nothing is sent."""
    from torch.distributed.tensor import distribute_tensor

    return local(distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None))


def sharded_as(full: Tensor, like: Any) -> Tensor:
    """Return rank 0's full tensor, sharded as `like` is if it has the same shape.

    All ranks call this.

    On other ranks `full` may be without numbers.
    """
    from torch.distributed.tensor import distribute_tensor

    is_first = torch.distributed.get_rank() == 0
    source = full.to(like.device) if is_first else torch.empty_like(full, device=like.device)
    if is_dtensor(like) and full.shape == like.shape:
        return distribute_tensor(source, like.device_mesh, like.placements)
    torch.distributed.broadcast(source, 0)
    return source


@torch.no_grad()
def copy_full(full: dict[str, Tensor], to: dict[str, Tensor]) -> None:
    """Copy rank 0's full tensors into those of the same names of a sharded model.

    All ranks call this.
    """
    for name, tensor in to.items():
        local(tensor).copy_(local(sharded_as(full[name].detach(), tensor)))
