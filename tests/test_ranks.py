"""The ranks of a run: how a process learns its rank, and that several ranks do what one does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from conftest import ROOT, events, raises_one_line, tiny, vector
from gloo import on_ranks

import train
from data.batching import Batching
from data.loader import eval_batches
from data.splits import Split
from deskgpt.compute.distributed import DistContext, DistEnv, dist_env
from deskgpt.compute.evaluation import evaluate
from deskgpt.compute.variant import Variant
from deskgpt.run.stopping import StopController, signal_handler
from model import GPT, GPTConfig

CPU = torch.device("cpu")
NEEDS_GLOO = pytest.mark.skipif(os.name == "nt", reason="needs gloo as Linux and macOS have it")
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
RESTARTS = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}


def test_rank_and_world_size_come_from_torchrun_and_are_0_of_1_without_it():
    assert dist_env(TORCHRUN) == DistEnv(1, 4, 1, 2, distributed=True)
    assert dist_env({}) == DistEnv(0, 1, 0, 1, distributed=False)
    # torchrun within a step of SLURM, and one process in a batch script of it
    assert dist_env(TORCHRUN | {"SLURM_STEP_NUM_TASKS": "2"}).distributed
    assert dist_env({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"}) == DistEnv()
    # restarts with a store of their own
    assert dist_env(TORCHRUN | RESTARTS | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).distributed
    assert dist_env({"PMI_SIZE": "", "RANK": "", "WORLD_SIZE": ""}) == DistEnv()  # empty ones count as not set


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4"}, ["srun", "SLURM_STEP_NUM_TASKS=4"]),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ["mpirun", "OMPI_COMM_WORLD_SIZE=2"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "RANK", "unset"]),
        (TORCHRUN | {"MASTER_ADDR": ""}, ["RANK=1", "MASTER_ADDR= "]),
        (TORCHRUN | {"RANK": "4"}, ["RANK=4", "WORLD_SIZE=4"]),
        (TORCHRUN | {"LOCAL_RANK": "x"}, ["LOCAL_RANK=x", "unset"]),
        (TORCHRUN | RESTARTS, ["--max_restarts=3", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]),
    ],
)
def test_inconsistent_variables_of_a_launcher_are_named_with_the_remedy(environ, named):
    with raises_one_line(*named):
        dist_env(environ)


@pytest.mark.slow
def test_signal_ends_the_wait_for_ranks_that_never_come():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    rendezvous = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    code = "from deskgpt.run.stopping import signal_handler; signal_handler.install()\n"
    code += "from deskgpt.compute.distributed import init_distributed; print('waiting')\n"
    code += "init_distributed('cpu', 'auto', 300.0)"
    command = [sys.executable, "-u", "-c", code]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | rendezvous, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "waiting\n"
        time.sleep(1)
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM


def train_on(ranks: DistContext, c: train.TrainConfig) -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "init_distributed", lambda *_: ranks)
        return train.main(c)


@NEEDS_GLOO
def test_two_ranks_train_and_evaluate_as_one_rank_does(chars, tmp_path):
    """Another initial weight, another mask of dropout or another window would show in losses and weights."""
    # 17 windows to evaluate: 9 batches, the last one not full, and one of padding on the second rank.
    own: dict[str, Any] = {"dropout": 0.3, "gradient_accumulation_steps": 4, "batch_size": 2, "eval_tokens": 17 * 16}
    best = train_on(DistContext(CPU), tiny(chars, tmp_path / "one", max_iters=4, **own))
    c = tiny(chars, tmp_path / "two", max_iters=4, **own)
    assert on_ranks(lambda ranks: train_on(ranks, c), 2, tmp_path) == pytest.approx([best, best], rel=1e-5)
    for kind, names in (("eval", ("train_loss", "val_loss", "val_se")), ("iter", ("loss", "grad_norm"))):
        for a, b in zip(events(tmp_path / "one", kind), events(tmp_path / "two", kind), strict=True):
            assert [b[name] for name in names] == pytest.approx([a[name] for name in names], rel=1e-5)
    torch.testing.assert_close(vector(tmp_path / "two"), vector(tmp_path / "one"), rtol=1e-5, atol=1e-5)


@NEEDS_GLOO
def test_ranks_end_an_evaluation_at_the_same_batch_after_a_signal(chars, tmp_path):
    """Otherwise one rank would leave the others waiting for its part of the weights."""
    split = Split(chars, "val", 16, 256)

    def batches_until_a_signal(ranks: DistContext) -> int:
        n_calls = 0

        def count(*_: Any) -> None:
            nonlocal n_calls
            n_calls += 1
            if ranks.rank == 1 and n_calls == 3:
                signal_handler.signal = signal.SIGTERM

        model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=16, vocab_size=256))
        model.register_forward_hook(count)
        batching = Batching(1, accumulation=2, eval_tokens=20, rank=ranks.rank, world=2)
        stops = StopController(ranks, 0.0, 0.0, 0.0, 0)
        evaluate(model, Variant(), stops.until_signal(eval_batches(split, batching, CPU)), ranks)
        return n_calls

    assert on_ranks(batches_until_a_signal, 2, tmp_path) == [3, 3]


@NEEDS_GLOO
def test_rank_that_cannot_read_its_data_ends_the_others_too(chars, tmp_path):
    c = tiny(chars, tmp_path / "out", gradient_accumulation_steps=2, eval_iters=8)
    eval_batch = Split.eval_batch

    def work(ranks: DistContext) -> None:
        def cut_short(split: Split, rows: Any, n: int) -> Any:
            if ranks.rank == 1 and rows[0] > 8:
                raise ValueError("train.bin became shorter")
            return eval_batch(split, rows, n)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Split, "eval_batch", cut_short)
            train_on(ranks, c)

    lost, own = on_ranks(work, 2, tmp_path)
    assert own == "train.bin became shorter"
    assert "rank" in lost
