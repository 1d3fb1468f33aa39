"""Ranks as forks of the test's process, which has imported torch, with gloo between them."""

import functools
import gc
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import CPU, flags, spare_what_is_imported

import train
from configurator import build
from deskgpt.distributed import DistContext
from deskgpt.errors import message_for_user
from deskgpt.resume import resumed_settings


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


def in_forks(*works: Callable[[], Any]) -> list[int | None]:
    """Call these at the same time, each in a fork of this process. Return the exit statuses."""

    def alone(work: Callable[[], Any]) -> None:
        # A collection of what this process has left would end the fork with a segmentation fault,
        # now and then: it lacks the other threads.
        gc.freeze()
        work()

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=alone, args=(work,)) for work in works]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        process.kill()  # one that hangs
        process.join()
    return [process.exitcode for process in processes]


def forked(world: int, work: Callable[[int], Any], failing: int = 0) -> list[int | None]:
    """Call work(rank) in ranks with torchrun's variables; up to `failing` of them may.

    Return their exit statuses.
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        pytest.skip(
            "a test before this one used the card, after which a process cannot fork; run "
            "this file by itself"
        )
    port = free_port()

    def start(rank: int) -> None:
        os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
        os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world))
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        work(rank)

    statuses = in_forks(*[functools.partial(start, rank) for rank in range(world)])
    assert sum(status != 0 for status in statuses) <= failing
    return statuses


def on_ranks(work: Callable[[DistContext], Any], world: int, folder: Path) -> list[Any]:
    """Return what `work` returns on each rank, or the message of the ValueError or RuntimeError
    that it raises.
    """
    # Import these once, not once in each rank.
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.testing._internal.distributed.fake_pg

    def on_rank(rank: int) -> None:
        dist.init_process_group("gloo", f"file://{folder / 'meet'}", rank=rank, world_size=world)
        try:
            found = work(DistContext(CPU, rank, world, distributed=True))
        except (ValueError, RuntimeError) as e:
            found = message_for_user(e, "")
        torch.save(found, folder / f"{rank}.pt")
        sys.stdout.flush()
        os._exit(0)

    spare_what_is_imported()
    forked(world, on_rank)
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


def run(world: int, c: train.TrainConfig) -> None:
    """Train on several ranks, or without torchrun if world = 1."""
    if world == 1:
        train.main(c)
    else:
        forked(world, lambda rank: train.main(c))


def resumed(out_dir: Path, **settings: Any) -> train.TrainConfig:
    """Return the settings of a resumed run."""
    return build(
        train.TrainConfig, resumed_settings(train.TrainConfig, flags(**settings), str(out_dir))
    )
