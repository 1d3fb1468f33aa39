"""This process among those that torchrun started: its rank and device, and what all ranks agree on.

A run without torchrun is one rank of one.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deskgpt.system import hardware


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
        """Prints a line on the first rank only, at once: others may read it through a file, tee or tail."""
        if self.is_first:
            print(line, flush=True)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over all ranks."""
        if dist.is_initialized():
            x = x.to(self.device)  # nccl reduces only what is on the GPU
            dist.all_reduce(x)
        return x

    def max(self, x: float) -> float:
        """The largest x of all ranks."""
        tensor = torch.tensor(x, dtype=torch.float64)
        if dist.is_initialized():
            tensor = tensor.to(self.device)
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.item()

    def agree(self, wish: int) -> int:
        """The largest wish of all ranks, which wait for each other, but not for their GPUs."""
        if not dist.is_initialized():
            return wish
        tensor = torch.tensor(wish)  # on the CPU, so that gloo reduces it
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def all(self, yes: bool) -> bool:
        """Whether `yes` is true on all ranks."""
        return self.max(float(not yes)) == 0

    def gather(self, x: Any) -> list[Any]:
        """The x of all ranks, in their order. Any small object."""
        everyone = [x] * self.world
        if dist.is_initialized():
            dist.all_gather_object(everyone, x)
        return everyone

    def close(self) -> None:
        """Ends the process group. No rank leaves while another works: torchrun would take that for a failure."""
        if self.distributed:
            dist.barrier()
            dist.destroy_process_group()


# ---- how the process was started -----------------------------------------------------------------------------

# What other launchers tell each of their processes: how many there are, and SLURM also which one it is. In a batch
# script or a shell of SLURM, where one process is right, SLURM_NTASKS can be several, but SLURM_PROCID is 0.
LAUNCHERS = {
    "SLURM_STEP_NUM_TASKS": "srun",
    "SLURM_PROCID": "srun",
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "MPICH's or Intel's mpirun",
    "MV2_COMM_WORLD_SIZE": "MVAPICH's mpirun",
}
NEEDED = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # besides RANK
USE_TORCHRUN = "for N ranks on this machine: torchrun --standalone --nproc_per_node=N train.py"


@dataclass(frozen=True)
class DistEnv:
    """Where among the ranks a process is."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    distributed: bool = False  # started by torchrun


def dist_env(environ: Mapping[str, str]) -> DistEnv:
    """Where torchrun has placed this process. Raises ValueError where another launcher started several, or it is torn.

    Processes that do not know of each other would each train the whole run, all into one folder.
    """
    if "RANK" not in environ:
        if environ.get("WORLD_SIZE", "1") != "1":
            raise ValueError(
                f"WORLD_SIZE={environ['WORLD_SIZE']} is set, but RANK is not: unset it to train in one process; "
                f"{USE_TORCHRUN}"
            )
        for name, launcher in LAUNCHERS.items():
            alone = "0" if name == "SLURM_PROCID" else "1"
            value = environ.get(name, alone)
            if value != alone:
                raise ValueError(
                    f"{launcher} started several processes ({name}={value}), each of which would train all by itself: "
                    f"start one; {USE_TORCHRUN}"
                )
        return DistEnv()
    missing = [name for name in NEEDED if not environ.get(name)]
    if missing:
        raise ValueError(
            f"RANK={environ['RANK']} is set, but {missing[0]} is not: unset RANK to train in one process; "
            f"{USE_TORCHRUN}"
        )
    rank = int(environ["RANK"])
    world = int(environ["WORLD_SIZE"])
    local_rank = int(environ.get("LOCAL_RANK", 0))
    local_world = int(environ.get("LOCAL_WORLD_SIZE", 1))
    if rank >= world:
        raise ValueError(f"RANK={rank} must be below WORLD_SIZE={world}; {USE_TORCHRUN}")
    restarts = environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise ValueError(
            f"--max_restarts={restarts}: torchrun would give restarted ranks the addresses of ended ones (PyTorch's "
            "issue 167288); set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where it starts, and --rdzv_backend=c10d"
        )
    return DistEnv(rank, world, local_rank, local_world, distributed=True)


OTHER_FILES = 64  # that a rank has open besides its connections: data, log, checkpoints, libraries


def open_files(world: int, shards: int = 1) -> int:
    """How many files a rank has open at most. shards: how many ranks share a copy of the weights.

    In each group of ranks, gloo connects every rank with every other one: in that of all ranks, in the one that saves
    sharded weights, and where there are several copies in those of a copy and of a shard. The first rank may also hold
    the store, to which all connect.
    """
    connections = 2 * world
    if shards > 1:
        connections += world
    if 1 < shards < world:
        connections += shards + world // shards
    return connections + OTHER_FILES


def allow_open_files(ranks: DistContext) -> None:
    """Raises this process's limit by what the ranks need, as far as the system lets it; says where that is too little.

    Linux gives a process 1,024, macOS 256.
    """
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = open_files(ranks.world, shards=2)  # the most of all ways to share
    if soft == resource.RLIM_INFINITY:
        return
    allowed = soft + needed if hard == resource.RLIM_INFINITY else min(soft + needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        ranks.print0(
            f"{ranks.world:,} ranks may need {needed:,} open files each, and the system allows {allowed:,} (ulimit "
            "-Hn): if they do not meet, raise that limit on all hosts"
        )


def init_distributed(device_name: str, backend: str, timeout_s: float) -> DistContext:
    """This process's Ranks on its device, connected to the others where torchrun started several.

    device_name: auto, cpu, cuda, cuda:N or mps; backend: auto, nccl or gloo; timeout_s: the longest that ranks wait for
    each other. Raises ValueError where these do not fit this machine, OSError where the ranks do not meet.
    """
    place = dist_env(os.environ)
    device = hardware.resolve_device(device_name, place.local_rank, place.local_world)
    ranks = DistContext(device, place.rank, place.world, place.distributed)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32 for what remains float32, as in nanoGPT
    if "TORCHELASTIC_RUN_ID" in os.environ:  # Linux tells when torchrun is killed; run/stops.py looks, too
        torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGTERM)  # type: ignore[attr-defined]
    if ranks.distributed:
        allow_open_files(ranks)
        if backend == "auto":
            backend = "nccl" if device.type == "cuda" else "gloo"
        if backend == "nccl" and device.type != "cuda":
            raise ValueError(f"backend=nccl is for CUDA, the device is {device}; try --backend=auto")
        if backend == "nccl":
            backend = "cpu:gloo,cuda:nccl"  # gloo for what the ranks agree on, such as when to stop
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        except RuntimeError as e:  # the port is taken, the host is unknown, or a rank has not come in time
            why = str(e).splitlines()[0]
            raise OSError(
                f"cannot meet the other {place.world - 1} ranks at MASTER_ADDR="
                f"{os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']}: {why}"
            ) from None
    if device_name == "auto" and device.type == "cpu" and ranks.is_first:
        reason = hardware.unused_gpu()
        if reason:
            ranks.print0(f"{reason}; training on the CPU")
    return ranks
