"""The ranks of a run, also on several hosts: they do what one rank does, agree, and end, are
stopped or start again together.
"""

import itertools
import os
import random
import re
import signal
import sys
import time
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from conftest import (
    CPU,
    CUDA,
    POSIX,
    ROOT,
    TINY,
    assert_equal,
    assert_one_line,
    events,
    flags,
    logged,
    nightly,
    raises_one_line,
    run_tiny,
    slow,
    tiny,
    until,
    vector,
    weights,
)
from gloo import forked, free_port, on_ranks, run

import train
from configurator import build
from data.batches import Split
from deskgpt.checkpoint import Checkpoint, load_checkpoint
from deskgpt.distributed import ALONE, DistContext
from deskgpt.errors import one_line_errors
from deskgpt.launch import dist_env, init_distributed, shutdown_distributed
from deskgpt.memory import larger_batch
from deskgpt.resume import (
    Start,
    check_same_on_all_hosts,
    choose_compute_and_batch,
    settings_of_start,
)
from deskgpt.stopping import StopConditions, signal_handler
from model import GPTConfig
from train import TrainConfig, main

pytestmark = POSIX

# ---- variables of a launcher ---------------------------------------------------------------------

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def test_rank_and_world_size_come_from_torchrun_and_are_0_of_1_without_it():
    assert dist_env(TORCHRUN) == DistContext(CPU, 1, 4, True, local_rank=1, local_world=2)
    assert dist_env({}) == dist_env({"RANK": ""}) == ALONE
    with raises_one_line("RANK=1", "MASTER_ADDR is not", "unset", "torchrun"):
        dist_env(TORCHRUN | {"MASTER_ADDR": ""})


# ---- ranks do what one does ----------------------------------------------------------------------


def train_on(ranks, c):
    """Return the best loss, and what an optimizer may draw in each step."""
    draws = []
    step_if_finite = train.step_if_finite

    def step(*args):
        draws.append((torch.rand(()).item(), random.random()))
        step_if_finite(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "init_distributed", lambda *_: ranks)
        patch.setattr(train, "step_if_finite", step)
        return main(c), draws


def test_two_ranks_train_and_evaluate_as_one_rank_does(chars, tmp_path, monkeypatch):
    """Another initial weight, another mask of dropout or another window would show in losses and
    weights. Tokens per second and MFU count the devices of both.
    """
    one, two = tmp_path / "one", tmp_path / "two"
    # 17 windows to evaluate: 9 batches, the last one not full, and one of padding on the second
    # rank.
    own = {"dropout": 0.3, "gradient_accumulation_steps": 4, "batch_size": 2, "max_iters": 4}
    c = tiny(chars, one, eval_tokens=17 * 16, **own)
    best, draws = train_on(DistContext(CPU), c)
    assert len({*draws}) == 4
    name = "deskgpt.device.device_name"
    monkeypatch.setattr(name, lambda device: f"device of rank {os.environ['RANK']}")
    found = on_ranks(lambda ranks: train_on(ranks, replace(c, out_dir=str(two))), 2, tmp_path)
    assert found == [(pytest.approx(best, rel=1e-5), draws)] * 2
    of_eval = ("train_loss", "val_loss", "val_se")
    for kind, names in (("eval", of_eval), ("iter", ("loss", "grad_norm"))):
        for name in names:
            expected = logged(one, kind, name)
            assert logged(two, kind, name) == pytest.approx(expected, rel=1e-5), name
    progress: Any = load_checkpoint(two).progress
    # A spike is one among these losses.
    assert progress["losses"] == pytest.approx(logged(one, "iter", "loss"), rel=1e-5)
    torch.testing.assert_close(vector(two), vector(one), rtol=1e-5, atol=1e-5)
    [start] = events(two, "start")
    assert (start["world_size"], start["tokens_per_step"]) == (2, 4 * 2 * 16)
    assert start["device"] == "device of rank 0 + device of rank 1"
    [peak] = logged(one, "start", "peak_flops")
    assert start["peak_flops"] == pytest.approx(2 * peak, rel=0.2)
    for e in events(two, "iter"):
        assert e["tokens_per_s"] * e["time_ms"] / 1e3 == pytest.approx(128)
        flops = e["tokens_per_s"] * start["flops_per_token"]
        assert e["mfu"] == pytest.approx(flops / start["peak_flops"])


# GiB, fastest dtype and whether there is Triton, of two ranks' cards.
CARDS = [(80, "bfloat16", True), (15, "float16", False)]


@slow
def test_ranks_with_other_cards_compute_alike(tmp_path, monkeypatch):
    c = TrainConfig(batch_size=4, gradient_accumulation_steps=32)
    model_config = GPTConfig.from_settings(c, 50304)

    def choose(ranks):
        gib, fastest, has_triton = CARDS[ranks.rank]
        monkeypatch.setattr("deskgpt.peaks.peak_flops", lambda *_: (1e14, ""))
        monkeypatch.setattr("deskgpt.compiling.default_dtype", lambda device: fastest)
        monkeypatch.setattr("deskgpt.compiling.has_triton", lambda device: has_triton)
        monkeypatch.setattr("deskgpt.device.memory_bytes", lambda device: gib << 30)
        ranks = replace(ranks, device=CUDA)
        start = Start("scratch", model_config, Checkpoint({}, {}))
        mode, batch = choose_compute_and_batch(c, start, ranks)
        fits = larger_batch(model_config, ranks.device, c.batch_split(ranks.rank, 2), mode)
        return asdict(mode), batch.batch_size, batch.global_batch_size, fits

    first, other = on_ranks(choose, 2, tmp_path)
    assert (first[0]["dtype"], first[0]["compiled"]) == ("float32", False)
    assert first[:3] == other[:3]
    assert first[1:3] == (other[3], 128)
    assert first[3] > other[3]


def test_ranks_end_an_evaluation_at_the_same_batch_after_a_signal(tmp_path):
    """Otherwise one rank would leave the others waiting for its part of the weights."""

    def batches_until_a_signal(ranks):
        found = []
        for batch in StopConditions(TrainConfig(), ranks).stop_on_signal(range(9)):
            found.append(batch)
            if ranks.rank == 1 and batch == 2:
                signal_handler.signal = signal.SIGTERM
        return found

    assert on_ranks(batches_until_a_signal, 2, tmp_path) == [[0, 1, 2]] * 2


def test_sum_leaves_its_terms_and_no_rank_leaves_while_another_works(tmp_path):
    def work(ranks):
        x = torch.tensor([1.0 + ranks.rank])
        total = ranks.sum(x)
        if ranks.rank:
            time.sleep(0.5)
            (tmp_path / "done").touch()
        shutdown_distributed(torch.nn.Identity(), ranks)
        return [total.item(), x.item(), (tmp_path / "done").exists()]

    assert on_ranks(work, 2, tmp_path) == [[3.0, 1.0, True], [3.0, 2.0, True]]


def test_ranks_wait_for_each_other_as_long_as_dist_timeout_s_says():
    def on_rank(rank):
        init_distributed("cpu", "auto", 8.0)
        world: Any = torch.distributed.group.WORLD
        assert world._get_backend(CPU).options._timeout.total_seconds() == 8

    forked(2, on_rank)


def test_rank_that_cannot_read_its_data_ends_the_others_too(chars, tmp_path, monkeypatch):
    c = tiny(chars, tmp_path / "out", gradient_accumulation_steps=2)

    def cut_short(*_):
        raise ValueError("train.bin became shorter")

    def work(ranks):
        if ranks.rank == 1:
            monkeypatch.setattr(Split, "eval_batch", cut_short)
        train_on(ranks, c)

    lost, own = on_ranks(work, 2, tmp_path)
    assert own == "train.bin became shorter"
    assert "rank" in lost


# ---- one command for every start -----------------------------------------------------------------


def test_init_from_auto_begins_as_the_config_file_says_then_resumes_and_never_over_damage(
    chars, tmp_path, capsys
):
    base, out, config = tmp_path / "base", tmp_path / "out", tmp_path / "finetune.py"
    run_tiny(chars, base, max_iters=1)
    config.write_text(f"init_from = {str(base)!r}\n")
    machine = {name: TINY[name] for name in ("device", "dtype", "compile", "cpu_kernels")}
    own = flags(**machine, dataset=chars, out_dir=out, init_from="auto", eval_iters=1)

    def start(*argv):
        """Return the settings of `python train.py ARGV`."""
        return build(TrainConfig, settings_of_start(TrainConfig, [*own, *argv]))

    assert start().init_from == "scratch"
    for steps in (2, 3, 3):  # the last one has nothing to do
        c = start(str(config), f"--max_iters={steps}", "--lr_decay_iters=9")
        assert c.n_embd == TINY["n_embd"]
        main(c)
    assert logged(out, "iter") == [0, 1, 2]
    assert re.findall(r"^resuming .* at step (\d+)$", capsys.readouterr().out, re.M) == ["2", "3"]
    assert not (out / "previous-1").exists()
    (out / "ckpt.pt").write_bytes(b"damaged")
    assert start().init_from == "resume"
    (out / "ckpt_best.pt").write_bytes(b"damaged")
    with raises_one_line("not a readable", out / "ckpt.pt", out / "ckpt_best.pt"):
        start()


# ---- what the ranks agree on ---------------------------------------------------------------------


def test_data_and_kinds_of_devices_must_agree_between_hosts(tmp_path):
    def work(ranks):
        check_same_on_all_hosts({"out_dir": ranks.rank}, ranks)  # another path to the same folder
        with raises_one_line("train data is 0 on rank 0, but 1 on rank 1", "--device=cpu"):
            check_same_on_all_hosts({"train data": ranks.rank}, ranks)
        check_same_on_all_hosts({}, replace(ranks, device=(CPU, CUDA)[ranks.rank]))

    for message in on_ranks(work, 2, tmp_path):
        assert_one_line(message, "'cpu' on rank 0, but 'cuda' on rank 1", "--device=cpu")


@slow
def test_dist_timeout_s_ends_a_run_in_which_a_rank_hangs(chars, tmp_path, capfd):
    backward = torch.Tensor.backward
    steps = itertools.count()
    settings = {"gradient_accumulation_steps": 4, "max_iters": 12, "eval_interval": 2}
    c = tiny(chars, tmp_path, dist_timeout_s=8.0, dp_shard=2, **settings)

    def asleep(*args):
        if next(steps) == 7:
            time.sleep(14)
        backward(*args)

    def on_rank(rank):
        if rank == 1:
            setattr(torch.Tensor, "backward", asleep)  # noqa: B010
        with one_line_errors():
            main(c)

    assert forked(4, on_rank, failing=4) == [1] * 4
    assert re.search(r"^error: lost the other ranks .*hangs", capfd.readouterr().err, re.M)
    assert load_checkpoint(tmp_path).iter_num >= 2


ENDLESS = TINY | {"gradient_accumulation_steps": 2, "eval_interval": 5, "max_iters": 60}
ENDLESS |= {"dropout": 0.1}


@nightly
@pytest.mark.parametrize("dp_shard", [1, -1])
def test_killed_torchrun_and_its_rank_cost_no_more_than_a_restart(dp_shard, chars, begin, tmp_path):
    out, full = tmp_path / "out", tmp_path / "full"
    settings = flags(**ENDLESS, dataset=chars, init_from="auto", out_dir=out, dp_shard=dp_shard)
    environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    options = "--nnodes=2 --nproc_per_node=1 --max_restarts=1 --rdzv_backend=c10d "
    options += f"--rdzv_endpoint=localhost:{free_port()} --rdzv_conf="
    # How soon it is noticed that the other one is lost.
    options += "keep_alive_interval=1,keep_alive_max_attempt=3,is_host="
    torchrun = (sys.executable, "-m", "torch.distributed.run")

    def begin_host(host):
        of_host = f"{options}{1 - host} train.py".split()  # the first one has the store
        return begin(tmp_path / f"terminal-{host}", *torchrun, *of_host, *settings, **environ)

    def printed():
        return "".join(path.read_text() for path in tmp_path.glob("terminal-*"))

    first = begin_host(0)
    second = begin_host(1)
    until(lambda: "iter 20:" in printed())
    second.kill()
    until(lambda: "stopped by SIGTERM at step" in printed())  # and saved
    again = begin_host(1)  # the same command, while the other torchrun waits for it
    assert [first.wait(120), again.wait(120)] == [0, 0]
    run(2, tiny(chars, full, dp_shard=dp_shard, **ENDLESS))
    assert_equal(weights(out), weights(full))
    assert printed().count("resuming ") == 1
    assert "resume, torchrun with its options as before: torchrun ... train.py --init" in printed()


SLURM = {"SLURM_JOB_ID": "123", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2"}
SLURM |= {"SLURM_GPUS_ON_NODE": "1", "OMP_NUM_THREADS": "1"}
# srun starts its command on each node, and ends with the worst of their exit statuses.
COMMANDS = {
    "scontrol": 'if [ "$1" = show ]; then echo localhost; echo node2; else echo "$@" >> asked; fi',
    "srun": 'shift; for node in 1 2; do "$@" & pids="$pids $!"; done; echo $pids > running\n'
    "for pid in $pids; do wait $pid || worst=$?; done; exit ${worst:-0}",
    "scancel": 'echo "$@" >> asked; for p in $(cat running); do kill -TERM $p $(pgrep -P $p); done',
    "torchrun": f'cd "{ROOT}"; exec "{sys.executable}" -m torch.distributed.run "$@"',
}


@nightly
def test_slurm_script_saves_and_requeues_before_its_time_is_up(chars, begin, tmp_path):
    for name, lines in COMMANDS.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/bash\ncd {tmp_path}\n{lines}\n")
        program.chmod(0o755)
    out, terminal = tmp_path / "out", tmp_path / "terminal"
    environ = SLURM | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "slurm.sbatch", *flags(**ENDLESS, dataset=chars, out_dir=out)]
    job = begin(terminal, *command, **environ)
    until(lambda: "iter 20:" in terminal.read_text() or job.poll() is not None)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(60) != 0
    assert (tmp_path / "asked").read_text() == "--signal=TERM 123\nrequeue 123\n"
    step = load_checkpoint(out).iter_num
    assert f"stopped by SIGTERM at step {step}\n" in terminal.read_text()
