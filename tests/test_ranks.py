"""The ranks of a run, also on several hosts: they do what one rank does, agree, and end, are
stopped or start again together.
"""

from __future__ import annotations

import itertools
import os
import platform
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

import psutil
import pytest
import torch
from conftest import (
    CPU,
    ROOT,
    TINY,
    assert_equal,
    assert_one_line,
    events,
    flags,
    raises_one_line,
    tiny,
    until,
    vector,
    weights,
)
from gloo import forked, free_port, on_ranks, run

import train
from configurator import build
from data.batches import BatchSplit, Split, eval_batches
from deskgpt import peaks
from deskgpt.checkpoint import Checkpoint, load_checkpoint
from deskgpt.compute import ComputeMode, choose_compute
from deskgpt.distributed import DistContext, DistEnv, dist_env
from deskgpt.errors import one_line_errors
from deskgpt.evaluation import evaluate
from deskgpt.memory import larger_batch
from deskgpt.resume import (
    Start,
    check_same_on_all_hosts,
    choose_compute_and_batch,
    settings_of_start,
)
from deskgpt.stopping import StopConditions, signal_handler
from model import GPT, GPTConfig
from train import TrainConfig, main

pytestmark = pytest.mark.skipif(
    os.name == "nt", reason="needs gloo and signals as Linux and macOS have them"
)

LONG = {"max_iters": 12, "eval_interval": 2, "lr_decay_iters": 12, "dropout": 0.1}


# ---- variables of a launcher ---------------------------------------------------------------------

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
    # Empty ones count as not set
    assert dist_env({"PMI_SIZE": "", "RANK": "", "WORLD_SIZE": ""}) == DistEnv()


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
def test_signal_ends_the_wait_for_ranks_that_never_come(begin, tmp_path):
    code = "from deskgpt.stopping import signal_handler; signal_handler.install()\n"
    code += "from deskgpt.distributed import init_distributed; print('waiting')\n"
    code += "init_distributed('cpu', 'auto', 300.0)"
    rendezvous = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": free_port(),
    }
    process = begin(tmp_path / "terminal", sys.executable, "-u", "-c", code, **rendezvous)
    until(lambda: "waiting" in (tmp_path / "terminal").read_text())
    time.sleep(1)
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM


# ---- ranks do what one does ----------------------------------------------------------------------


def train_on(ranks: DistContext, c: TrainConfig) -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "init_distributed", lambda *_: ranks)
        return main(c)


def test_two_ranks_train_and_evaluate_as_one_rank_does(chars, tmp_path):
    """Another initial weight, another mask of dropout or another window would show in losses and
    weights.
    """
    # 17 windows to evaluate: 9 batches, the last one not full, and one of padding on the second
    # rank.
    own: dict[str, Any] = {
        "dropout": 0.3,
        "gradient_accumulation_steps": 4,
        "batch_size": 2,
        "eval_tokens": 17 * 16,
    }
    best = train_on(DistContext(CPU), tiny(chars, tmp_path / "one", max_iters=4, **own))
    c = tiny(chars, tmp_path / "two", max_iters=4, **own)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "deskgpt.device.device_name", lambda device: f"device of rank {os.environ['RANK']}"
        )
        assert on_ranks(lambda ranks: train_on(ranks, c), 2, tmp_path) == pytest.approx(
            [best, best], rel=1e-5
        )
    assert events(tmp_path / "two", "start")[0]["device"] == "device of rank 0 + device of rank 1"
    for kind, names in (
        ("eval", ("train_loss", "val_loss", "val_se")),
        ("iter", ("loss", "grad_norm")),
    ):
        for a, b in zip(
            events(tmp_path / "one", kind), events(tmp_path / "two", kind), strict=True
        ):
            assert [b[name] for name in names] == pytest.approx(
                [a[name] for name in names], rel=1e-5
            )
    torch.testing.assert_close(
        vector(tmp_path / "two"), vector(tmp_path / "one"), rtol=1e-5, atol=1e-5
    )
    peaks = [events(tmp_path / name, "start")[0]["peak_flops"] for name in ("one", "two")]
    # MFU refers to the devices of all ranks.
    assert peaks[1] == pytest.approx(2 * peaks[0], rel=0.2)


# Name, GiB, fastest dtype and whether there is Triton, of two ranks' cards; the dtype that both
# take, and whether they compile.
@pytest.mark.parametrize(
    ("cards", "dtype", "compiled"),
    [
        (
            [("RTX 4090", 24, "bfloat16", True), ("RTX 4070", 12, "bfloat16", True)],
            "bfloat16",
            True,
        ),
        (
            [("RTX 4060", 8, "bfloat16", True), ("RTX 4090", 24, "bfloat16", False)],
            "bfloat16",
            False,
        ),
        ([("H100", 80, "bfloat16", True), ("T4", 15, "float16", True)], "float32", True),
    ],
)
def test_ranks_with_other_cards_compute_alike_and_share_the_rows(cards, dtype, compiled, tmp_path):
    c = TrainConfig(
        batch_size=4, gradient_accumulation_steps=32, block_size=1024, eval_iters=8, compile="auto"
    )
    model_config = GPTConfig.from_settings(c, 50304)

    def choose(ranks: DistContext) -> Any:
        name, gib, fastest, has_triton = cards[ranks.rank]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("deskgpt.compute.default_dtype", lambda device: fastest)
            patch.setattr(
                peaks, "peak_flops", lambda device, dtype: peaks.find_card(name).peak(dtype)
            )
            patch.setattr("deskgpt.compute.has_triton", lambda device: has_triton)
            patch.setattr("deskgpt.device.memory_bytes", lambda device: gib << 30)
            on_card = replace(ranks, device=torch.device("cuda"))
            init = Start("scratch", model_config, Checkpoint({}, {}))
            variant, batching = choose_compute_and_batch(c, init, on_card)
            own = larger_batch(model_config, on_card.device, c.batch_split(ranks.rank, 2), variant)
        rows = [
            int(row)
            for micro_step in range(batching.micro_steps_per_rank)
            for row in batching.rows(micro_step)
        ]
        windows = [int(row) for rows in batching.eval_rows(32) for row in rows if row < 32]
        return asdict(variant), batching.batch_size, own, rows, windows

    (variant, batch_size, own, rows, windows), other = on_ranks(choose, 2, tmp_path)
    assert (variant["dtype"], variant["compiled"]) == (dtype, compiled)
    assert (variant, batch_size) == other[:2]
    assert own != other[2]
    assert batch_size == min(own, other[2])
    assert sorted(rows + other[3]) == list(range(128))
    assert sorted(windows + other[4]) == list(range(32))


def test_ranks_without_a_card_are_refused_beside_those_with_one(tmp_path):
    def choose(ranks: DistContext) -> None:
        ranks = replace(ranks, device=torch.device("cuda" if ranks.rank else "cpu"))
        choose_compute(TrainConfig(), ranks, {})

    for message in on_ranks(choose, 2, tmp_path):
        assert_one_line(message, "rank 0 cpu", "rank 1 cuda", "--device=cpu")


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
        batching = BatchSplit(1, grad_accum_steps=2, eval_tokens=20, rank=ranks.rank, world=2)
        stops = StopConditions(TrainConfig(), ranks)
        evaluate(
            model, ComputeMode(), stops.stop_on_signal(eval_batches(split, batching, CPU)), ranks
        )
        return n_calls

    assert on_ranks(batches_until_a_signal, 2, tmp_path) == [3, 3]


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


# ---- one command for every start -----------------------------------------------------------------


def start(argv: list[str]) -> TrainConfig:
    """Return the settings of `python train.py ARGV`."""
    return build(TrainConfig, settings_of_start(TrainConfig, argv))


@pytest.mark.slow
def test_init_from_auto_starts_resumes_bit_for_bit_and_then_has_nothing_to_do(
    chars, tmp_path, capsys
):
    main(tiny(chars, tmp_path / "full", **LONG))
    argv = flags(**TINY | LONG, dataset=chars, out_dir=tmp_path / "parts", init_from="auto")
    main(start([*argv, "--max_iters=8"]))
    for _ in range(2):
        main(start(argv))
        assert_equal(weights(tmp_path / "full"), weights(tmp_path / "parts"))
    assert re.findall(r"^resuming .* at step (\d+)$", capsys.readouterr().out, re.M) == ["8", "12"]
    assert not list(tmp_path.glob("*/previous-*"))


def test_init_from_auto_begins_as_the_config_file_says_but_not_over_a_damaged_checkpoint(
    chars, tmp_path
):
    out, config = tmp_path / "out", tmp_path / "finetune.py"
    main(tiny(chars, out, max_iters=1))
    config.write_text(f"init_from = {str(out)!r}\n")
    elsewhere = flags(out_dir=tmp_path / "other", init_from="auto")
    first = start([str(config), *elsewhere])
    assert (first.init_from, first.n_embd) == (str(out), TINY["n_embd"])
    assert start(elsewhere).init_from == "scratch"
    argv = flags(out_dir=out, init_from="auto")
    (out / "ckpt.pt").write_bytes(b"damaged")
    assert start(argv).init_from == "resume"
    (out / "ckpt_best.pt").write_bytes(b"damaged")
    with raises_one_line("not a readable", out / "ckpt.pt", out / "ckpt_best.pt"):
        start(argv)


# ---- what the ranks agree on ---------------------------------------------------------------------


@pytest.mark.slow
def test_settings_and_data_must_agree_between_hosts(tmp_path, monkeypatch):
    monkeypatch.setattr("deskgpt.resume.git_commit", lambda: None)
    settings = {"out_dir": "a", "min_lr": None}
    data = {"train data": {"tokens": 10, "fingerprint": "x"}, "checkpoint": "step 0"}
    # What rank 2 has, and the words of the error. The same folder may have another path there.
    cases: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
        ({"out_dir": "b"}, {}, []),
        ({"min_lr": 1e-3}, {}, ["min_lr", "None", "0.001"]),
        ({}, {"train data": {"tokens": 10, "fingerprint": "y"}}, ["train data", "x", "y"]),
    ]

    def work(ranks: DistContext) -> None:
        for own_settings, own_data, named in cases:
            if ranks.rank < 2:
                own_settings, own_data = {}, {}
            with (
                raises_one_line(*named, "rank 0", "rank 2", platform.node())
                if named
                else nullcontext()
            ):
                check_same_on_all_hosts(settings | own_settings, data | own_data, ranks)

    assert on_ranks(work, 3, tmp_path) == [None] * 3


@pytest.mark.slow
def test_dist_timeout_s_ends_a_run_in_which_a_rank_hangs(chars, tmp_path, capfd):
    backward = torch.Tensor.backward
    steps = itertools.count()

    def asleep(*args: Any) -> None:
        if next(steps) == 7:
            time.sleep(14)
        backward(*args)

    c = tiny(
        chars, tmp_path, dist_timeout_s=8.0, dp_shard=2, **LONG | {"gradient_accumulation_steps": 4}
    )

    def on_rank(rank: int) -> None:
        if rank == 1:
            setattr(torch.Tensor, "backward", asleep)  # noqa: B010
        with one_line_errors():
            main(c)

    assert forked(4, on_rank, failing=4) == [1] * 4
    assert re.search(r"^error: lost the other ranks .*hangs", capfd.readouterr().err, re.M)
    assert load_checkpoint(tmp_path).iter_num >= 2


ENDLESS = TINY | {
    "gradient_accumulation_steps": 2,
    "eval_interval": 5,
    "dropout": 0.1,
    "max_iters": 60,
}


def is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.nightly
@pytest.mark.parametrize("dp_shard", [1, -1])
def test_killed_torchrun_and_its_rank_cost_no_more_than_a_restart(dp_shard, chars, begin, tmp_path):
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc_per_node=1",
        "--max_restarts=1",
    ]
    torchrun += ["--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{free_port()}"]
    settings = flags(
        **ENDLESS, dataset=chars, init_from="auto", out_dir=tmp_path / "out", dp_shard=dp_shard
    )
    terminals = [tmp_path / "terminal-0", tmp_path / "terminal-1"]

    def begin_host(host: int) -> subprocess.Popen[bytes]:
        # Which of the two has the store; and how soon it notices that the other one is lost.
        rendezvous = (
            f"--rdzv_conf=is_host={1 - host},keep_alive_interval=1,keep_alive_max_attempt=3"
        )
        environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        return begin(terminals[host], *torchrun, rendezvous, "train.py", *settings, **environ)

    first = begin_host(0)
    second = begin_host(1)
    until(lambda: any("iter 20:" in terminal.read_text() for terminal in terminals))
    [rank] = psutil.Process(second.pid).children()
    second.kill()
    until(lambda: not is_running(rank))
    # And saved
    until(
        lambda: any("stopped by SIGTERM at step" in terminal.read_text() for terminal in terminals)
    )
    again = begin_host(1)  # the same command, while the other torchrun waits for it
    assert [first.wait(120), again.wait(120)] == [0, 0]
    run(2, tiny(chars, tmp_path / "full", dp_shard=dp_shard, **ENDLESS))
    assert_equal(weights(tmp_path / "out"), weights(tmp_path / "full"))
    assert sum(terminal.read_text().count("resuming ") for terminal in terminals) == 1


SLURM = {
    "SLURM_JOB_ID": "123",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_GPUS_ON_NODE": "1",
}
# srun starts its command on each node, and ends with the worst of their exit statuses.
COMMANDS = {
    "scontrol": 'if [ "$1" = show ]; then echo localhost; echo node2; else echo "$@" >> asked; fi',
    "srun": 'shift; for node in 1 2; do "$@" & pids="$pids $!"; done; echo $pids > running\n'
    "for pid in $pids; do wait $pid || worst=$?; done; exit ${worst:-0}",
    "scancel": 'echo "$@" >> asked; for p in $(cat running); do kill -TERM $p $(pgrep -P $p); done',
    "torchrun": f'cd "{ROOT}"; exec "{sys.executable}" -m torch.distributed.run "$@"',
}


@pytest.mark.nightly
def test_slurm_script_saves_and_requeues_before_its_time_is_up_and_then_resumes(
    chars, begin, tmp_path
):
    for name, lines in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\ncd {tmp_path}\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    settings = flags(**ENDLESS, dataset=chars, out_dir=tmp_path / "out")
    terminal = tmp_path / "terminal"
    environ = SLURM | {"OMP_NUM_THREADS": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "slurm.sbatch", *settings]

    job = begin(terminal, *command, **environ)
    until(lambda: "iter 20:" in terminal.read_text() or job.poll() is not None)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(60) != 0
    assert (tmp_path / "asked").read_text() == "--signal=TERM 123\nrequeue 123\n"
    step = load_checkpoint(tmp_path / "out").iter_num
    assert f"stopped by SIGTERM at step {step}\n" in terminal.read_text()
    assert begin(terminal, *command, **environ).wait(120) == 0
    assert f"resuming {tmp_path / 'out'} at step {step}\n" in terminal.read_text()
    assert (tmp_path / "asked").read_text().count("requeue") == 1
    run(2, tiny(chars, tmp_path / "full", **ENDLESS))
    assert_equal(weights(tmp_path / "out"), weights(tmp_path / "full"))
