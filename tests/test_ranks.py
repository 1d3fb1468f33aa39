from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assert_one_line
from gloo import on_ranks

from deskgpt.compute import sharding
from deskgpt.compute.distributed import OTHER_FILES, DistContext, DistEnv, allow_open_files, dist_env, open_files

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def test_torchrun_says_where_a_process_is_and_without_it_there_is_one():
    assert dist_env(TORCHRUN) == DistEnv(1, 4, 1, 2, distributed=True)
    assert dist_env({}) == DistEnv(0, 1, 0, 1, distributed=False)
    # torchrun within a step of SLURM, and one process in a batch script of it
    assert dist_env(TORCHRUN | {"SLURM_STEP_NUM_TASKS": "2"}).distributed
    assert dist_env({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}) == DistEnv()
    assert dist_env({"SLURM_STEP_NUM_TASKS": "1"}) == DistEnv()


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4"}, ["srun", "SLURM_STEP_NUM_TASKS=4"]),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, ["srun", "SLURM_PROCID=1"]),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ["Open MPI's mpirun"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "RANK", "unset"]),
        ({"RANK": "0"}, ["RANK=0", "WORLD_SIZE", "unset"]),
        (TORCHRUN | {"MASTER_ADDR": ""}, ["RANK=1", "MASTER_ADDR"]),
        (TORCHRUN | {"RANK": "4"}, ["RANK=4", "WORLD_SIZE=4"]),
    ],
)
def test_processes_that_do_not_know_of_each_other_are_refused_with_torchruns_command(environ, named):
    with pytest.raises(ValueError, match="torchrun") as refused:
        dist_env(environ)
    assert_one_line(str(refused.value), *named, "torchrun --standalone --nproc_per_node=N train.py")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such limit")
@pytest.mark.parametrize("hard", [50, 200])
def test_limit_of_open_files_rises_as_far_as_allowed_and_what_is_too_little_is_said(hard, monkeypatch, capsys):
    resource: Any = pytest.importorskip("resource")
    limits = [(40, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: limits.append(both))
    allow_open_files(DistContext(torch.device("cpu"), 0, 16, distributed=True))
    needed = open_files(16, shards=2)
    assert limits[-1] == (min(hard, 40 + needed), hard)
    said = capsys.readouterr().out
    if hard < needed:
        assert_one_line(said, "16 ranks", str(needed), str(hard), "ulimit -Hn")
    else:
        assert said == ""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("world", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_real_ranks_have_as_many_connections_as_the_plan_says(world, tmp_path):
    """But for those to the store, of which there is none here."""

    def sockets() -> int:
        links = list(Path("/proc/self/fd").iterdir())
        return sum("socket:" in os.readlink(link) for link in links if link.is_symlink())

    def counted(ranks: DistContext) -> list[int]:
        found = [sockets()]
        sharding.group_for_saves(60)
        found.append(sockets())
        sharding.make_mesh("cpu", 2, world)
        return [*found, sockets()]

    of_plan = [open_files(world, shards) - OTHER_FILES - world for shards in (1, world, 2)]
    before = sockets()
    found = on_ranks(counted, world, tmp_path)
    assert [[n - before for n in of_rank] for of_rank in found] == [of_plan] * world


def test_restarts_of_torchrun_need_a_store_of_their_own():
    restarts = TORCHRUN | {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with pytest.raises(ValueError, match="--max_restarts=3") as refused:
        dist_env(restarts)
    assert_one_line(refused.value, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
    assert dist_env(restarts | {"TORCHELASTIC_MAX_RESTARTS": "0"}).distributed
    assert dist_env(restarts | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).distributed
