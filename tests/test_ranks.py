from __future__ import annotations

import pytest

from deskgpt.compute.ranks import Place, place_of

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def test_torchrun_says_where_a_process_is_and_without_it_there_is_one():
    assert place_of(TORCHRUN) == Place(1, 4, 1, 2, distributed=True)
    assert place_of({}) == Place(0, 1, 0, 1, distributed=False)
    # torchrun within a step of SLURM, and one process in a batch script of it
    assert place_of(TORCHRUN | {"SLURM_STEP_NUM_TASKS": "2"}).distributed
    assert place_of({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}) == Place()
    assert place_of({"SLURM_STEP_NUM_TASKS": "1"}) == Place()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4"}, r"srun started several processes \(SLURM_STEP_NUM_TASKS=4\), each of which"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, r"srun started several processes \(SLURM_PROCID=1\), each of"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, r"Open MPI's mpirun started several processes"),
        ({"PMI_SIZE": "2"}, r"MPICH's or Intel's mpirun started several processes"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set, but RANK is not: unset it"),
        ({"RANK": "0"}, "RANK=0 is set, but WORLD_SIZE is not: unset RANK"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "RANK=1 is set, but MASTER_ADDR is not"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT='http' is not a whole number"),
        (TORCHRUN | {"RANK": "-1"}, "RANK='-1' is not a whole number"),
        (TORCHRUN | {"LOCAL_RANK": "x"}, "LOCAL_RANK='x' is not a whole number"),
        (TORCHRUN | {"RANK": "4"}, "RANK=4 must be below WORLD_SIZE=4"),
    ],
)
def test_processes_that_do_not_know_of_each_other_are_refused_with_torchruns_command(environ, message):
    with pytest.raises(ValueError, match=rf"^{message}.*torchrun --standalone --nproc_per_node=N train\.py"):
        place_of(environ)


def test_restarts_of_torchrun_need_a_store_of_their_own():
    restarts = TORCHRUN | {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with pytest.raises(ValueError, match=r"^--max_restarts=3: .*set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        place_of(restarts)
    assert place_of(restarts | {"TORCHELASTIC_MAX_RESTARTS": "0"}).distributed
    assert place_of(restarts | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).distributed
