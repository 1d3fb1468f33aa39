"""This process among those that torchrun started: its rank and device, what all ranks agree on,
their gradients, and weights that they share.

A run without torchrun is one rank of one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
            # A tensor on the CPU goes by gloo.
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
    """Return one value for all ranks, each of which has found `own` on its device: the cards of a
    run can differ.

    If they do, the value is `otherwise` or, without that, the smallest, with False below True: it
    is what the weakest device can do.
    """
    everyone = dist.gather(own)
    if otherwise is None:
        return min(everyone)
    return own if len({*everyone}) == 1 else otherwise


# ---- gradients -----------------------------------------------------------------------------------


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
