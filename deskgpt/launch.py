"""The start of a run: its lock and seed; how the ranks that torchrun started meet, average their
gradients and leave.
"""

import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from deskgpt.checkpoint import run_folder
from deskgpt.compute import seed_all
from deskgpt.device import resolve_device, unused_gpu
from deskgpt.distributed import ALONE, DistContext, is_sharded
from deskgpt.files import RESTART_S, locked_folder
from deskgpt.limits import allow_open_files


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


def lock_of(settings: dict[str, Any]) -> AbstractContextManager[None]:
    """Keep other runs out of out_dir, if this process is one that writes there."""
    env = dist_env(os.environ)
    if env.rank > 0 or settings["eval_only"] or settings["dry_run"] or settings["plan_for"]:
        return nullcontext()
    # torchrun starts a run again while a file server still keeps the lock of a host that is gone.
    restarts = env.distributed and settings["init_from"] == "auto"
    wait_s = RESTART_S if restarts else 0.0
    return locked_folder(run_folder(settings["out_dir"]), wait_s=wait_s)


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
        # The default stream cannot be recorded as a graph.
        torch.cuda.set_stream(torch.cuda.Stream(device))
        torch.set_float32_matmul_precision("high")  # TF32 for what remains float32, as in nanoGPT
    if "TORCHELASTIC_RUN_ID" in os.environ:  # Linux sends SIGTERM when torchrun is killed
        torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGTERM)  # type: ignore[attr-defined]
    if dist.distributed:
        allow_open_files()  # gloo connects every rank with every other one
        if backend == "nccl" and device.type != "cuda":
            raise ValueError(f"backend=nccl is for CUDA, not for {device}; try --backend=auto")
        is_gloo = backend == "gloo" or device.type != "cuda"
        # Ranks agree by gloo, such as on when to stop.
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


def set_seed(seed: int, deterministic: bool, device: torch.device) -> None:
    """Seed torch's and Python's generators; deterministic: and make CUDA compute the same bits each
    time.

    Attention is then flash, whose backward pass can add in a fixed order, and not cuDNN's, which
    cannot.
    """
    if deterministic:
        # cuBLAS reads this at its first matmul.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(deterministic)
    seed_all(seed, device)


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
    """Wait for all ranks, and end DDP and the process group. A rank that left early would be a
    failure to torchrun.

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

    It writes to stderr from C++, where the prints of a user's model must still be seen.
    """
    some = DDP(nn.LayerNorm(1), find_unused_parameters=True)  # it draws no random numbers
    kept = os.dup(2)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)
    some(torch.ones(1, 1))
    os.dup2(kept, 2)
    os.close(kept)
