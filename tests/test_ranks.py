from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest
from conftest import ROOT, assert_one_line, raises_one_line

from deskgpt.compute.distributed import DistEnv, dist_env

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def test_rank_and_world_size_come_from_torchrun_and_are_0_of_1_without_it():
    assert dist_env(TORCHRUN) == DistEnv(1, 4, 1, 2, distributed=True)
    assert dist_env({}) == DistEnv(0, 1, 0, 1, distributed=False)
    # torchrun within a step of SLURM, and one process in a batch script of it
    assert dist_env(TORCHRUN | {"SLURM_STEP_NUM_TASKS": "2"}).distributed
    assert dist_env({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}) == DistEnv()
    assert dist_env({"SLURM_STEP_NUM_TASKS": "1"}) == DistEnv()
    # Empty ones count as not set.
    assert dist_env({"PMI_SIZE": "", "RANK": "", "WORLD_SIZE": ""}) == DistEnv()
    assert dist_env({"RANK": "", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}) == DistEnv()


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4"}, ["srun", "SLURM_STEP_NUM_TASKS=4"]),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ["mpirun", "OMPI_COMM_WORLD_SIZE=2"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "RANK", "unset"]),
        (TORCHRUN | {"MASTER_ADDR": ""}, ["RANK=1", "MASTER_ADDR"]),
        (TORCHRUN | {"RANK": "4"}, ["RANK=4", "WORLD_SIZE=4"]),
        (TORCHRUN | {"RANK": "x"}, ["RANK=x", "unset"]),
        (TORCHRUN | {"LOCAL_RANK": "-1"}, ["LOCAL_RANK=-1", "unset"]),
    ],
)
def test_inconsistent_variables_of_a_launcher_are_named_with_the_remedy(environ, named):
    with raises_one_line(*named):
        dist_env(environ)


@pytest.mark.slow
def test_variables_left_over_from_another_tool_are_named_and_a_signal_ends_the_wait():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        rendezvous = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(free.getsockname()[1]),
        }
    code = "from deskgpt.run.stopping import signal_handler; signal_handler.install()\n"
    code += "from deskgpt.compute import distributed as d; d.WAIT_S = 0.1; d.init_distributed('cpu', 'auto', 300.0)"
    command = [sys.executable, "-u", "-c", code]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | rendezvous, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert_one_line(
            process.stdout.readline(), "rank 0 of 2", rendezvous["MASTER_PORT"], "unset RANK and WORLD_SIZE"
        )
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no such limit")
def test_limit_of_open_files_is_raised_as_far_as_allowed():
    code = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (100, 200)); "
    code += "from deskgpt.compute.distributed import allow_open_files; allow_open_files(); "
    code += "print(r.getrlimit(r.RLIMIT_NOFILE))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == "(200, 200)\n"


def test_restarts_of_torchrun_need_a_store_of_their_own():
    restarts = TORCHRUN | {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with raises_one_line("--max_restarts=3", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        dist_env(restarts)
    assert dist_env(restarts | {"TORCHELASTIC_MAX_RESTARTS": "0"}).distributed
    assert dist_env(restarts | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).distributed
