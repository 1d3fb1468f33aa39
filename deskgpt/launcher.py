"""Where among the ranks torchrun has started this process: the variables that it sets, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

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
        has_address = "MASTER_ADDR" in found and found["MASTER_PORT"].isdecimal()
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
