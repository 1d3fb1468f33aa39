"""This process among those that torchrun started: its rank and device, what all ranks agree on,
their gradients, and weights that they share.

A run without torchrun is one rank of one.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
import torch.nn as nn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from deskgpt.device import resolve_device, unused_gpu
from deskgpt.limits import allow_open_files
from model import GPT


@dataclass(frozen=True)
class DistContext:
    device: torch.device  # of this rank
    rank: int = 0
    world: int = 1  # number of ranks
    distributed: bool = False  # started by torchrun, with one rank or several
    local_rank: int = 0  # among the local_world ranks of this host
    local_world: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def print0(self, line: str) -> None:
        """Print a line on the first rank only, at once: others may read it through a file, tee or
        tail.
        """
        if self.is_first:
            print(line, flush=True)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x over all ranks; x stays as it is."""
        if not torch.distributed.is_initialized():
            return x
        total = x.detach().to(self.device, copy=True)  # nccl reduces only what is on the GPU
        torch.distributed.all_reduce(total)
        return total

    def max(self, x: float) -> float:
        """Return the largest x of all ranks.

        They synchronise on the CPU, by gloo; queued work of GPUs goes on.
        """
        tensor = torch.tensor(x, dtype=torch.float64)
        if torch.distributed.is_initialized():
            # On the CPU, by gloo
            torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
        return tensor.item()

    def all(self, yes: bool) -> bool:
        """Return whether `yes` is true on all ranks."""
        return self.max(float(not yes)) == 0

    def gather(self, x: Any) -> list[Any]:
        """Return the x of all ranks, in their order. Any small object."""
        everyone = [x] * self.world
        if torch.distributed.is_initialized():
            torch.distributed.all_gather_object(everyone, x)
        return everyone


# A process without ranks, that reads a file.
ALONE = DistContext(torch.device("cpu"))


def agree(dist: DistContext, own: Any, otherwise: Any = None) -> Any:
    """Return what all ranks take for a value that each derives from its own device: the cards of a
    run can differ.

    It is `own` if all have the same; else `otherwise`, or without that the smallest, with False
    below True: what the weakest device can do.
    """
    everyone = dist.gather(own)
    if otherwise is None:
        return min(everyone)
    return own if len({*everyone}) == 1 else otherwise


# ---- the start ----------------------------------------------------------------------------------


def dist_env(environ: Mapping[str, str]) -> DistContext:
    """Return where torchrun has placed this process, its device not chosen yet.

    Raises ValueError if a variable is missing: the others are then left over from something else.
    """
    if not environ.get("RANK"):
        return ALONE
    for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            raise ValueError(
                f"RANK={environ['RANK']} is set, but {name} is not: unset RANK to train alone; for "
                "N ranks on this machine: torchrun --standalone --nproc_per_node=N train.py"
            )
    return replace(
        ALONE,
        rank=int(environ["RANK"]),
        world=int(environ["WORLD_SIZE"]),
        local_rank=int(environ["LOCAL_RANK"]),
        local_world=int(environ["LOCAL_WORLD_SIZE"]),
        distributed=True,
    )


def init_distributed(device_name: str, backend: str, timeout_s: float) -> DistContext:
    """Return this process on its device, connected to the other ranks if torchrun started several.

    timeout_s: the longest that ranks wait for each other. Raises ValueError if device or backend do
    not fit this machine, OSError if the ranks do not meet.
    """
    env = dist_env(os.environ)
    device = resolve_device(device_name, env.local_rank, env.local_world)
    dist = replace(env, device=device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # The default one cannot be recorded as a graph.
        torch.cuda.set_stream(torch.cuda.Stream(device))
        torch.set_float32_matmul_precision("high")  # TF32 for what remains float32, as in nanoGPT
    if "TORCHELASTIC_RUN_ID" in os.environ:  # Linux sends SIGTERM when torchrun is killed
        torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGTERM)  # type: ignore[attr-defined]
    if dist.distributed:
        allow_open_files()  # gloo connects every rank with every other one
        if backend == "nccl" and device.type != "cuda":
            raise ValueError(f"backend=nccl is for CUDA, not for {device}; try --backend=auto")
        is_gloo = backend == "gloo" or device.type != "cuda"
        # gloo for what the ranks agree on, such as when to stop
        backend = "gloo" if is_gloo else "cpu:gloo,cuda:nccl"
        host = os.environ["MASTER_ADDR"]
        try:
            socket.getaddrinfo(host, None)
        except OSError:  # torch waits in silence, since it may get an address
            if env.local_rank == 0:
                print(
                    f"waiting up to {timeout_s:g} s: MASTER_ADDR={host} has no address here; add "
                    "--local-addr=127.0.0.1 to torchrun if all ranks are on this host, or an "
                    "address that the others reach",
                    file=sys.stderr,
                )
        try:
            torch.distributed.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        except RuntimeError as e:
            # The port is taken, the host is unknown, or a rank has not come in time.
            why = str(e).splitlines()[0]
            raise OSError(
                f"cannot meet the other {env.world - 1} ranks at {host}:"
                f"{os.environ['MASTER_PORT']}: {why}; to train alone, unset RANK"
            ) from None
    reason = unused_gpu() if device_name == "auto" and device.type == "cpu" else None
    if reason:
        dist.print0(f"{reason}; training on the CPU")
    return dist


# ---- gradients -----------------------------------------------------------------------------------


def wrap_ddp(model: nn.Module, dist: DistContext) -> nn.Module:
    """Return the model in DDP, which averages gradients; itself without ranks, or if sharded."""
    if not dist.distributed or is_sharded(model):
        return model
    # DDP broadcasts buffers before each forward pass. The rotary table never changes.
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["transformer.rotary"])
    device_ids = [dist.device.index] if dist.device.type == "cuda" else None
    # Which parameters get a gradient may depend on the text, as with experts. Without
    # find_unused_parameters, a run would end at the first step in which one of them has none.
    use_up_ddp_warning()
    return DDP(model, device_ids=device_ids, find_unused_parameters=True)


def shutdown_distributed(ddp_model: nn.Module, dist: DistContext) -> None:
    """End the averaging, then the process group. No rank leaves while another works: torchrun would
    take that for a failure.

    DDP must not be the last to hold the group: freed under Python's lock, it waits for a thread of
    gloo that may want that lock, and the process hangs (pytorch issue 56297).
    """
    if isinstance(ddp_model, DDP):
        del ddp_model.reducer, ddp_model.logger
    if dist.distributed:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def use_up_ddp_warning() -> None:
    """Make DDP say here, unseen, that all parameters have gradients: it does once in a process.

    It writes to stderr from C++, and what a user's model prints beside it must be seen.
    """
    some = DDP(nn.LayerNorm(1), find_unused_parameters=True)  # which draws no random numbers
    kept = os.dup(2)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)
    some(torch.ones(1, 1))
    os.dup2(kept, 2)
    os.close(kept)


def gradient_norms(parameters: Sequence[Tensor]) -> Tensor:
    """Return the norms (parameters,) of all gradients, 0 without one; sharded ones as a whole."""
    nothing = torch.zeros((), device=parameters[0].device)
    gradients = [nothing if p.grad is None else local(p.grad) for p in parameters]
    found = torch.stack(list(torch._foreach_norm(gradients)))
    first: Any = parameters[0]
    if is_dtensor(first):
        squares = found.double().square()
        torch.distributed.all_reduce(squares, group=first.device_mesh.get_group("dp_shard"))
        found = squares.sqrt().float()
    return found


# ---- sharded weights, as far as a loop sees them -------------------------------------------------

# torch.distributed.fsdp takes most of a second to import, so only functions that shard import it.


def shards_of(dp_shard: int, world: int) -> int:
    """Return how many ranks share one copy: dp_shard, or all for -1. Raises ValueError."""
    n = world if dp_shard == -1 else dp_shard
    if n < 1 or world % n:
        raise ValueError(
            f"dp_shard={dp_shard} does not divide the number of ranks, {world}; try --dp_shard=-1"
        )
    return n


def is_sharded(model: torch.nn.Module) -> bool:
    # After a forward pass, parameters of the root's unit are no DTensors for a while.
    return hasattr(model, "reshard")


def free_gathered(model: GPT) -> None:
    """Free the weights that an evaluation has gathered; without shards this does nothing."""
    if is_sharded(model):
        for module in (model, *model.transformer.h):
            module.reshard()


def is_dtensor(x: Any) -> bool:
    return hasattr(x, "full_tensor")


def unsharded(x: Any) -> Tensor:
    """Return a sharded tensor, gathered from its ranks, all of which must call this; any other
    tensor itself.
    """
    return x.full_tensor() if is_dtensor(x) else x


def local(x: Any) -> Tensor:
    """Return this rank's rows of a sharded tensor, in the same memory; any other tensor itself."""
    with torch.no_grad():
        return x.to_local() if is_dtensor(x) else x
