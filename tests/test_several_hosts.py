"""Several hosts: one command that starts and resumes, ranks that must agree, a rank that hangs, a batch system."""

from __future__ import annotations

import itertools
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest
import torch
from conftest import ROOT, TINY, TORCHRUN, assert_equal, assert_one_line, flags, raises_one_line, tiny, until, weights
from gloo import forked, on_ranks, run

from configurator import build
from deskgpt.checkpoint import store
from deskgpt.compute.distributed import DistContext
from deskgpt.run import settings as settings_module
from deskgpt.run.settings import check_same_on_all_hosts, settings_of_start
from deskgpt.system.errors import one_line_errors
from train import TrainConfig, main

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs gloo and signals as Linux and macOS have them")

LONG = {"max_iters": 12, "eval_interval": 2, "lr_decay_iters": 12, "dropout": 0.1}


# ---- one command for every start -----------------------------------------------------------------------------


def start(argv: list[str]) -> TrainConfig:
    """Return the settings of `python train.py ARGV`."""
    return build(TrainConfig, settings_of_start(TrainConfig, argv))


@pytest.mark.slow
def test_init_from_auto_starts_resumes_bit_for_bit_and_then_has_nothing_to_do(chars, tmp_path, capsys):
    main(tiny(chars, tmp_path / "full", **LONG))
    argv = flags(**TINY | LONG, dataset=chars, out_dir=tmp_path / "parts", init_from="auto")
    main(start([*argv, "--max_iters=8"]))
    assert "resuming" not in capsys.readouterr().out
    for _ in range(2):
        main(start(argv))
        assert_equal(weights(tmp_path / "full"), weights(tmp_path / "parts"))
    assert re.findall(r"^resuming .* at step (\d+)$", capsys.readouterr().out, re.M) == ["8", "12"]
    assert not list(tmp_path.glob("*/previous-*"))


def test_init_from_auto_begins_as_the_config_file_says_but_not_over_a_damaged_checkpoint(chars, tmp_path):
    out, config = tmp_path / "out", tmp_path / "finetune.py"
    main(tiny(chars, out, **LONG))
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


# ---- what the ranks agree on ---------------------------------------------------------------------------------


DATA = {"train data": {"tokens": 10, "fingerprint": "x"}, "checkpoint": "step 0"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "data", "named"),
    [
        ({"out_dir": "b"}, {}, []),  # the same folder may have another path there
        ({"min_lr": 1e-3}, {}, ["min_lr", "None", "0.001"]),
        ({}, {"train data": {"tokens": 10, "fingerprint": "y"}}, ["train data", "x", "y"]),
    ],
)
def test_settings_and_data_must_agree_between_hosts(settings, data, named, tmp_path, monkeypatch):
    monkeypatch.setattr(settings_module, "git_commit", lambda: None)

    def work(ranks: DistContext) -> None:
        own_settings = {"out_dir": "a", "min_lr": None}
        own_data = dict(DATA)
        if ranks.rank == 2:
            own_settings |= settings
            own_data |= data
        check_same_on_all_hosts(own_settings, own_data, ranks)

    error, *others = on_ranks(work, 3, tmp_path)
    assert others == [error] * 2
    if named:
        assert_one_line(error, *named, "rank 0", "rank 2", platform.node())
    else:
        assert error is None


@pytest.mark.slow
def test_dist_timeout_s_ends_a_run_in_which_a_rank_hangs(chars, tmp_path, capfd):
    backward = torch.Tensor.backward
    steps = itertools.count()

    def asleep(*args: Any) -> None:
        if next(steps) == 7:
            time.sleep(14)
        backward(*args)

    c = tiny(chars, tmp_path, dist_timeout_s=8.0, dp_shard=2, **LONG | {"gradient_accumulation_steps": 4})

    def on_rank(rank: int) -> None:
        if rank == 1:
            setattr(torch.Tensor, "backward", asleep)  # noqa: B010
        with one_line_errors():
            main(c)

    assert forked(4, on_rank, failing=4) == [1] * 4
    assert re.search(r"^error: rank 0 on \S+: lost the other ranks .*hangs", capfd.readouterr().err, re.M)
    assert store.load(tmp_path).iter_num >= 2


# ---- torchrun on two hosts, which are one here ---------------------------------------------------------------

STEPS = 60
ENDLESS = TINY | {"gradient_accumulation_steps": 2, "eval_interval": 5, "dropout": 0.1}
ENDLESS |= {"lr_decay_iters": STEPS, "max_iters": STEPS}


def is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.nightly
def test_ranks_whose_torchrun_is_killed_save_and_end(chars, begin, tmp_path):
    settings = flags(**ENDLESS | {"max_iters": 100_000}, dataset=chars, out_dir=tmp_path / "out")
    terminal = tmp_path / "terminal"
    torchrun = begin(terminal, sys.executable, *TORCHRUN[1:], *settings)
    until(lambda: "iter 20:" in terminal.read_text())
    ranks = psutil.Process(torchrun.pid).children()
    torchrun.kill()
    until(lambda: not any(is_running(rank) for rank in ranks))
    step = store.load(tmp_path / "out").iter_num
    assert f"stopped by SIGTERM at step {step}\n" in terminal.read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("dp_shard", [1, -1])
def test_killed_torchrun_and_its_rank_cost_no_more_than_a_restart(dp_shard, chars, begin, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--max_restarts=1"]
    torchrun += ["--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{port}"]
    settings = flags(**ENDLESS, dataset=chars, init_from="auto", out_dir=tmp_path / "out", dp_shard=dp_shard)
    terminals = [tmp_path / "terminal-0", tmp_path / "terminal-1"]

    def begin_host(host: int) -> subprocess.Popen[bytes]:
        # Which of the two has the store; and how soon it notices that the other one is lost.
        rendezvous = f"--rdzv_conf=is_host={1 - host},keep_alive_interval=1,keep_alive_max_attempt=3"
        environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        return begin(terminals[host], *torchrun, rendezvous, "train.py", *settings, **environ)

    first = begin_host(0)
    second = begin_host(1)
    until(lambda: any("iter 20:" in terminal.read_text() for terminal in terminals))
    [rank] = psutil.Process(second.pid).children()
    second.kill()
    until(lambda: not is_running(rank))
    again = begin_host(1)  # the same command, while the other torchrun waits for it
    assert [first.wait(120), again.wait(120)] == [0, 0]
    run(2, tiny(chars, tmp_path / "full", dp_shard=dp_shard, **ENDLESS))
    assert_equal(weights(tmp_path / "out"), weights(tmp_path / "full"))
    assert sum(terminal.read_text().count("resuming ") for terminal in terminals) == 1


# ---- SLURM, with made-up commands --------------------------------------------------------------------------------

SLURM = {
    "SLURM_JOB_ID": "123",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_GPUS_ON_NODE": "1",
    "OMP_NUM_THREADS": "1",
}
# srun starts its command on each node, and ends with the worst of their exit statuses.
COMMANDS = {
    "scontrol": 'if [ "$1" = show ]; then echo localhost; echo node2; else echo "$@" >> asked; fi',
    "srun": 'shift; for node in 1 2; do "$@" & pids="$pids $!"; done; echo $pids > running\n'
    "for pid in $pids; do wait $pid || worst=$?; done; exit ${worst:-0}",
    "scancel": 'echo "$@" >> asked; for pid in $(cat running); do kill -TERM $pid $(pgrep -P $pid); done',
    "torchrun": f'cd "{ROOT}"; exec "{sys.executable}" -m torch.distributed.run "$@"',
}


@pytest.mark.nightly
def test_slurm_script_saves_and_requeues_before_its_time_is_up_and_then_resumes(chars, begin, tmp_path):
    for name, lines in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\ncd {tmp_path}\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    settings = flags(**ENDLESS, dataset=chars, out_dir=tmp_path / "out")
    terminal = tmp_path / "terminal"
    environ = SLURM | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "slurm.sbatch", *settings]

    job = begin(terminal, *command, **environ)
    until(lambda: "iter 20:" in terminal.read_text() or job.poll() is not None)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(60) != 0
    assert (tmp_path / "asked").read_text() == "--signal=TERM 123\nrequeue 123\n"
    step = store.load(tmp_path / "out").iter_num
    assert f"stopped by SIGTERM at step {step}\n" in terminal.read_text()
    assert begin(terminal, *command, **environ).wait(120) == 0
    assert f"resuming {tmp_path / 'out'} at step {step}\n" in terminal.read_text()
    assert (tmp_path / "asked").read_text().count("requeue") == 1
    run(2, tiny(chars, tmp_path / "full", **ENDLESS))
    assert_equal(weights(tmp_path / "out"), weights(tmp_path / "full"))
