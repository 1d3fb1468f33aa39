"""This process among those that torchrun started: its rank and device, and what all ranks agree on.

A run without torchrun is one rank of one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

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


def agree(dist: DistContext, own: Any, otherwise: Any = None) -> Any:
    """Return what all ranks take for a value that each derives from its own device: the cards of a
    run can differ.

    It is `own` if all have the same; else `otherwise`, or without that the smallest, with False
    below True: what the weakest device can do.
    """
    everyone = dist.gather(own)
    if otherwise is None:
        return min(everyone)
    return own if all(theirs == own for theirs in everyone) else otherwise


# ---- how the process was started -----------------------------------------------------------------

# Variables in which srun, and the mpirun of Open MPI, MPICH, Intel MPI and MVAPICH, tell a process
# how many there are.
OTHER_LAUNCHERS = (
    "SLURM_STEP_NUM_TASKS",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
)
FROM_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
USE_TORCHRUN = "for N ranks on this machine: torchrun --standalone --nproc_per_node=N train.py"


class DistEnv(NamedTuple):
    """Where among the ranks a process is."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    distributed: bool = False  # started by torchrun


def dist_env(environ: Mapping[str, str]) -> DistEnv:
    """Return where torchrun has placed this process.

    Raises ValueError if another launcher started several processes, each of which would train the
    whole run, or if variables are left over from something else.
    """
    found = {name: value for name, value in environ.items() if value}
    if "RANK" not in found and found.get("WORLD_SIZE", "1") == "1":
        for name in OTHER_LAUNCHERS:
            if found.get(name, "1") != "1":
                raise ValueError(
                    f"srun or mpirun started several processes ({name}={found[name]}), "
                    f"each of which would train all by itself: start one; {USE_TORCHRUN}"
                )
        return DistEnv()
    try:
        rank = int(found["RANK"])
        world = int(found["WORLD_SIZE"])
        local_rank = int(found.get("LOCAL_RANK", 0))
        local_world = int(found.get("LOCAL_WORLD_SIZE", 1))
        has_address = bool(found["MASTER_ADDR"]) and found["MASTER_PORT"].isdecimal()
        is_complete = has_address and min(rank, local_rank) >= 0 and rank < world
    except (KeyError, ValueError):
        is_complete = False
    if not is_complete:
        there = " ".join(f"{name}={found.get(name, '')}" for name in FROM_TORCHRUN)
        raise ValueError(
            f"{there} are not of torchrun: unset RANK and WORLD_SIZE to train alone; {USE_TORCHRUN}"
        )
    restarts = found.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and found.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise ValueError(
            f"--max_restarts={restarts}: torchrun would give restarted ranks the addresses "
            "of ended ones (PyTorch's issue 167288); set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where it starts, and --rdzv_backend=c10d"
        )
    return DistEnv(rank, world, local_rank, local_world, distributed=True)


def init_distributed(device_name: str, backend: str, timeout_s: float) -> DistContext:
    """Return this process on its device, connected to the other ranks if torchrun started several.

    timeout_s: the longest that ranks wait for each other. Raises ValueError if device or backend do
    not fit this machine, OSError if the ranks do not meet.
    """
    env = dist_env(os.environ)
    device = resolve_device(device_name, env.local_rank, env.local_world)
    dist = DistContext(device, env.rank, env.world, env.distributed)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # The default one cannot be recorded as a graph.
        torch.cuda.set_stream(torch.cuda.Stream(device))
        torch.set_float32_matmul_precision("high")  # TF32 for what remains float32, as in nanoGPT
    if "TORCHELASTIC_RUN_ID" in os.environ:  # Linux sends SIGTERM when torchrun is killed
        torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGTERM)  # type: ignore[attr-defined]
    if dist.distributed:
        allow_open_files()  # gloo connects every rank with every other one
        if backend == "auto":
            backend = "nccl" if device.type == "cuda" else "gloo"
        if backend == "nccl" and device.type != "cuda":
            raise ValueError(
                f"backend=nccl is for CUDA, the device is {device}; try --backend=auto"
            )
        if backend == "nccl":
            backend = "cpu:gloo,cuda:nccl"  # gloo for what the ranks agree on, such as when to stop
        address = (
            f"MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']}"
        )
        try:
            torch.distributed.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        except RuntimeError as e:
            # The port is taken, the host is unknown, or a rank has not come in time.
            why = str(e).splitlines()[0]
            raise OSError(
                f"cannot meet the other {env.world - 1} ranks at {address}: {why}; to "
                "train alone, unset RANK and WORLD_SIZE"
            ) from None
    if device_name == "auto" and device.type == "cpu" and dist.is_first:
        reason = unused_gpu()
        if reason:
            dist.print0(f"{reason}; training on the CPU")
    return dist


# ---- gradients -----------------------------------------------------------------------------------


def wrap_ddp(model: nn.Module, dist: DistContext) -> nn.Module:
    """Return the model in DDP, which averages gradients over the ranks; itself without ranks, or if
    it is sharded.
    """
    if not dist.distributed or is_sharded(model):
        return model
    # DDP broadcasts buffers before each forward pass. The rotary table never changes.
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["transformer.rotary"])
    device_ids = [dist.device.index] if dist.device.type == "cuda" else None
    # Which parameters get a gradient may depend on the text, as with experts. Without
    # find_unused_parameters, a run would end at the first step in which one of them has none.
    ddp_model = DDP(model, device_ids=device_ids, find_unused_parameters=True)
    mute_ddp_warning(ddp_model)
    return ddp_model


def shutdown_distributed(ddp_model: nn.Module, dist: DistContext) -> None:
    """End the averaging, then the process group.

    No rank leaves while another works: torchrun would take that for a failure.

    DDP must not be the last to hold the group: freed under Python's lock, it waits for a thread of
    gloo that may want that lock, and the process hangs (pytorch issue 56297).
    """
    if isinstance(ddp_model, DDP):
        del ddp_model.reducer, ddp_model.logger
    if dist.distributed:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def mute_ddp_warning(ddp_model: nn.Module) -> None:
    """Drop what the first forward pass writes to stderr: DDP warns there that all parameters have
    gradients.
    """
    kept = os.dup(2)

    def begin(*_: Any) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        os.close(null)

    def end(*_: Any) -> None:
        os.dup2(kept, 2)
        os.close(kept)
        for handle in handles:
            handle.remove()

    handles = [
        ddp_model.register_forward_pre_hook(begin),
        ddp_model.register_forward_hook(end, always_call=True),
    ]


def gradient_norms(parameters: Sequence[Tensor]) -> Tensor:
    """Return the norms (parameters,) of all gradients, 0 if there is none; sharded ones count as a
    whole.
    """
    with_gradient = [i for i, p in enumerate(parameters) if p.grad is not None]
    gradients = [local(parameters[i].grad) for i in with_gradient]
    norm_of = dict(zip(with_gradient, torch._foreach_norm(gradients), strict=True))
    nothing = torch.zeros((), device=parameters[0].device)
    norms = torch.stack([norm_of.get(i, nothing) for i in range(len(parameters))])
    first: Any = parameters[0]
    if is_dtensor(first):
        squares = norms.double().square()
        torch.distributed.all_reduce(squares, group=first.device_mesh.get_group("dp_shard"))
        norms = squares.sqrt().float()
    return norms


# ---- sharded weights, as far as a loop sees them -------------------------------------------------


# torch.distributed.fsdp takes most of a second to import, so only functions that shard import it.


def shards_of(dp_shard: int, world: int) -> int:
    """Return how many ranks share one copy: dp_shard, or all for -1.

    Raises ValueError if it is no divisor.
    """
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
