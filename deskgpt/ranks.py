"""This process among those that torchrun started: its rank and device, and what all ranks agree on.

A run without torchrun is one rank of one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from deskgpt import hardware


@dataclass(frozen=True)
class Ranks:
    device: torch.device  # of this rank
    rank: int = 0
    world: int = 1  # number of ranks
    distributed: bool = False  # started by torchrun, with one rank or several

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def say(self, line: str) -> None:
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

    def all(self, yes: bool) -> bool:
        """Whether `yes` is true on all ranks."""
        return self.max(float(not yes)) == 0

    def close(self) -> None:
        """Ends the process group. No rank leaves while another works: torchrun would take that for a failure."""
        if self.distributed:
            dist.barrier()
            dist.destroy_process_group()


def start_ranks(device_name: str, backend: str) -> Ranks:
    """This process's Ranks on its device, connected to the others where torchrun started several.

    device_name: auto, cpu, cuda, cuda:N or mps; backend: auto, nccl or gloo. Raises ValueError where they do not fit
    this machine.
    """
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = hardware.resolve_device(device_name, local_rank, local_world)
    ranks = Ranks(device, rank, world, distributed="RANK" in os.environ)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32 for what remains float32, as in nanoGPT
    if ranks.distributed:
        if backend == "auto":
            backend = "nccl" if device.type == "cuda" else "gloo"
        if backend == "nccl" and device.type != "cuda":
            raise ValueError(f"backend=nccl is for CUDA, the device is {device}; try --backend=auto")
        dist.init_process_group(backend)
    if device_name == "auto" and device.type == "cpu" and ranks.is_first:
        reason = hardware.unseen_gpu()
        if reason:
            ranks.say(f"{reason}; training on the CPU")
    return ranks
