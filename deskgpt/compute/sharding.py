"""One copy of weights, gradients and moments, shared among ranks: torch's fully_shard (FSDP2) on the GPT of model.py.

Each block is a unit that is gathered when it computes; embedding, head and final norm are in the root's unit, since
torch refuses tied weights in two units. Where a run computes in bfloat16, the weights of blocks are gathered in it, and
their gradients are summed in float32; the root's unit is always in float32. Each rank's own rows are float32.
"""

from __future__ import annotations

import functools
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import Tensor
from torch.utils._pytree import tree_map_only

from model import GPT, rotary_table

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# torch.distributed.fsdp takes most of a second to import: only where something is sharded.

# Of each sharded model. Its parameters may name another mesh of the same ranks, since DTensor keeps one for all.
_mesh_of: weakref.WeakKeyDictionary[GPT, DeviceMesh] = weakref.WeakKeyDictionary()


def shards_of(dp_shard: int, world: int) -> int:
    """How many ranks share one copy: dp_shard, or all for -1. Raises ValueError where it does not divide the world."""
    n = world if dp_shard == -1 else dp_shard
    if n < 1 or world % n:
        divisors = [d for d in range(1, world + 1) if world % d == 0]
        nearest = min(divisors, key=lambda d: abs(d - n))
        raise ValueError(f"dp_shard={dp_shard} does not divide the number of ranks, {world}; try --dp_shard={nearest}")
    return n


def check_sharding(dp_shard: int, world: int, dtype: str, sample_interval: int) -> None:
    """Raises ValueError where dp_shard does not divide the ranks, or a setting does not work with sharded weights."""
    if shards_of(dp_shard, world) == 1:
        return
    if dtype == "float16":
        raise ValueError(
            f"dtype=float16 with dp_shard={dp_shard}: its loss scale needs whole weights; try --dtype=bfloat16"
        )
    if sample_interval:
        raise ValueError(
            f"sample_interval={sample_interval} with dp_shard={dp_shard}: no rank has whole weights for samples; use "
            "--sample_interval=0, and run sample.py"
        )


def describe_shards(dp_shard: int, world: int) -> str:
    """How the weights are spread, after a semicolon; nothing where each rank has all of them."""
    n = shards_of(dp_shard, world)
    copies = "" if n == world else f", {world // n} copies"
    return f"; weights sharded among {n}{copies}" if n > 1 else ""


def make_mesh(device_type: str, dp_shard: int, world: int, timeout_s: float = 600.0) -> DeviceMesh:
    """The ranks as (replicas, shards), or as (shards) where there is one replica. Neighbours share a copy.

    timeout_s: the longest that ranks wait for each other.
    """
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    n = shards_of(dp_shard, world)
    if n == world:
        return init_device_mesh(device_type, (n,), mesh_dim_names=("dp_shard",))
    # Groups that init_device_mesh makes would wait for torch's own 10 or 30 minutes.
    ranks = torch.arange(world).view(-1, n)
    timeout = timedelta(seconds=timeout_s)
    replicas, _ = torch.distributed.new_subgroups_by_enumeration(ranks.T.tolist(), timeout)
    shards, _ = torch.distributed.new_subgroups_by_enumeration(ranks.tolist(), timeout)
    return DeviceMesh.from_group([replicas, shards], device_type, ranks, mesh_dim_names=("dp_replicate", "dp_shard"))


def shard(model: GPT, mesh: DeviceMesh, reshard_after_forward: bool, dtype: str = "float32") -> None:
    """Shards the model in place: its parameters become DTensors, with each rank's rows.

    dtype: in which the weights of blocks are gathered, float32, or bfloat16 under its autocast.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    refuse_shared(model)
    policy = MixedPrecisionPolicy()
    if dtype == "bfloat16":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        norms_of_cpu_in_float32()
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    fully_shard(model, mesh=mesh)
    _mesh_of[model] = mesh


@functools.cache
def norms_of_cpu_in_float32() -> torch.library.Library:
    """From now on autocast computes norms on a CPU in float32, as it does on CUDA; to be called once.

    Otherwise a CPU's layer norm refuses gains in bfloat16 where its input is float32, and its RMS norm is slow.
    """

    def with_gains_in_float32(norm: Any, x: Tensor, shape: Any, weight: Tensor | None = None, *more: Any) -> Tensor:
        if weight is not None:
            x, weight, *more = tree_map_only(Tensor, Tensor.float, (x, weight, *more))
        with torch.autocast("cpu", enabled=False):
            return norm(x, shape, weight, *more)

    library = torch.library.Library("aten", "IMPL")
    for name in ("layer_norm", "rms_norm"):
        norm = getattr(torch.ops.aten, name).default
        library.impl(name, functools.partial(with_gains_in_float32, norm), "AutocastCPU")
    return library


def refuse_shared(model: GPT) -> None:
    """Raises ValueError for a parameter that two units share, as a changed model may have it; torch says nothing."""
    for first, *others in names_of_shared(model):
        for other in others:
            if unit_of(first) != unit_of(other):
                raise ValueError(f"dp_shard: {first} is also {other}, but blocks are sharded apart; take --dp_shard=1")


def unit_of(name: str) -> str:
    """The unit of a parameter: its block's number, or "" for the root."""
    return name.split(".")[2] if name.startswith("transformer.h.") else ""


def sharded_copy(
    model: GPT, mesh: DeviceMesh, reshard_after_forward: bool, device: torch.device, dtype: str = "float32"
) -> GPT:
    """The model, sharded on the device; its weights are those of rank 0. Other ranks' may be on the meta device."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    copy = empty_copy(model, mesh, reshard_after_forward, device, dtype)
    weights = model.state_dict() if torch.distributed.get_rank() == 0 else {}
    set_model_state_dict(copy, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    here = dict(model.named_buffers())
    for name, buffer in copy.named_buffers():  # also those that a state_dict leaves out
        if torch.distributed.get_rank() == 0:
            buffer.copy_(here[name])
        torch.distributed.broadcast(buffer, 0)
    return copy


def empty_copy(
    model: GPT, mesh: DeviceMesh, reshard_after_forward: bool, device: torch.device, dtype: str = "float32"
) -> GPT:
    """As sharded_copy, but the weights are zeros, and of buffers only the rotary table is filled."""
    copy = GPT.without_storage(model.config)
    shard(copy, mesh, reshard_after_forward, dtype)
    shared = names_of_shared(copy)
    copy.to_empty(device=device)
    for p in copy.parameters():
        local(p).zero_()
    for first, *others in shared:  # to_empty has made several of it
        for name in others:
            module, _, attribute = name.rpartition(".")
            setattr(copy.get_submodule(module), attribute, copy.get_parameter(first))
    if copy.transformer.rotary is not None:
        c = copy.config
        copy.transformer.rotary = rotary_table(c.block_size, c.n_embd // c.n_head).to(device)
    return copy


def float32_copy(model: GPT) -> GPT:
    """A copy of a sharded model whose weights are gathered in float32, to check variants against; else itself."""
    if not is_sharded(model):
        return model
    copy = empty_copy(model, _mesh_of[model], True, local(next(model.parameters())).device)
    copy.train(model.training)
    of_copy = (*copy.parameters(), *copy.buffers())
    for its, own in zip(of_copy, (*model.parameters(), *model.buffers()), strict=True):
        local(its).copy_(local(own))
    return copy


def names_of_shared(model: GPT) -> list[list[str]]:
    """The names of each parameter that has several, as a tied embedding has."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return [found for found in names.values() if len(found) > 1]


def is_sharded(model: GPT) -> bool:
    return is_dtensor(next(model.parameters()))


def group_for_saves(timeout_s: float) -> torch.distributed.ProcessGroup:
    """All ranks, connected once more: what they write while they train does not mix with what training sends."""
    return torch.distributed.new_group(timeout=timedelta(seconds=timeout_s), backend="gloo")


def free_gathered(model: GPT) -> None:
    """Free the weights that an evaluation has gathered; without shards this does nothing."""
    if is_sharded(model):
        for module in (model, *model.transformer.h):
            module.reshard()  # type: ignore[operator]


def is_dtensor(x: Any) -> bool:
    return hasattr(x, "full_tensor")


def unsharded(x: Any) -> Tensor:
    """Return a sharded tensor, gathered from its ranks, all of which must call this; any other tensor itself."""
    return x.full_tensor() if is_dtensor(x) else x


def local(x: Any) -> Tensor:
    """This rank's rows of a sharded tensor, in the same memory; any other tensor itself."""
    with torch.no_grad():
        return x.to_local() if is_dtensor(x) else x


def gathered(rows: Tensor, like: Any) -> Tensor:
    """The whole of a tensor that is sharded as `like` is, of which each rank has these rows."""
    from torch.distributed.tensor import DTensor

    shape = {"shape": like.size(), "stride": like.stride()}
    return DTensor.from_local(rows, like.device_mesh, like.placements, run_check=False, **shape).full_tensor()


def rows_of(tensor: Tensor, like: Any) -> Tensor:
    """This rank's rows of a whole tensor, as `like` is sharded; nothing is sent."""
    from torch.distributed.tensor import distribute_tensor

    return local(distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None))
