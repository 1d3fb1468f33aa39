"""Runs a function on several ranks, which are forks of the test's process with gloo between them."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from conftest import spare_what_is_imported

from deskgpt.compute.ranks import Ranks
from deskgpt.machine.errors import message_for_user


def on_ranks(work: Callable[[Ranks], Any], world: int, folder: Path, timeout_s: float = 300.0) -> list[Any]:
    """What `work` returns on each rank, or what it tells a user of a ValueError or RuntimeError that it raises."""
    # Import these once, not once in each rank.
    import torch._dynamo
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.testing._internal.distributed.fake_pg

    def on_rank(rank: int) -> None:
        os.environ["RANK"] = str(rank)
        meet = f"file://{folder / 'meet'}"
        dist.init_process_group("gloo", meet, timedelta(seconds=timeout_s), rank=rank, world_size=world)
        try:
            found = work(Ranks(torch.device("cpu"), rank, world, distributed=True))
        except (ValueError, RuntimeError) as e:
            found = message_for_user(e, "")
        torch.save(found, folder / f"{rank}.pt")
        sys.stdout.flush()
        os._exit(0)

    spare_what_is_imported()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=on_rank, args=(rank,)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]
