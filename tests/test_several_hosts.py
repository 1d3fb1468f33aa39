"""Several hosts: one command that starts and goes on, ranks that must agree, a rank that hangs, a batch system."""

from __future__ import annotations

import multiprocessing
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, TINY, assert_equal, flags, tiny, trajectory, weights
from gloo import on_ranks

import train
from configurator import read_settings
from deskgpt.checkpoint import store
from deskgpt.compute.ranks import Ranks
from deskgpt.machine.errors import message_for_user
from deskgpt.run import lock, resuming, saver
from deskgpt.run.report import Report
from deskgpt.run.resuming import refuse_differences
from deskgpt.run.start import StartingPoint
from deskgpt.run.stops import SIGNALS, listener
from train import TrainConfig, main, settings_of_start

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs gloo and signals as Linux and macOS have them")

LONG = {"max_iters": 12, "eval_interval": 6, "save_interval": 2, "lr_decay_iters": 12, "dropout": 0.1}


# ---- one command for every start -----------------------------------------------------------------------------


def start(argv: list[str]) -> TrainConfig:
    """The settings of `python train.py ARGV`."""
    return TrainConfig(**settings_of_start(argv, read_settings(TrainConfig, argv)))


def test_init_from_auto_starts_and_after_a_crash_goes_on_bit_for_bit(chars, tmp_path, monkeypatch, capsys):
    main(tiny(chars, tmp_path / "whole", **LONG))
    argv = flags(**TINY | LONG, dataset=chars, out_dir=tmp_path / "crashed", init_from="auto")
    log_step = Report.step

    def crash(self, **numbers):
        log_step(self, **numbers)
        if self.run.step == 8:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Report, "step", crash)
        with pytest.raises(KeyboardInterrupt):
            main(start(argv))
    for thread in threading.enumerate():
        if thread.name == "saver":  # for which a process that ends waits
            thread.join()
    assert "going on" not in capsys.readouterr().out
    main(start(argv))
    assert f"going on from {tmp_path / 'crashed'}, step 8\n" in capsys.readouterr().out
    assert trajectory(tmp_path / "whole") == trajectory(tmp_path / "crashed")
    assert_equal(weights(tmp_path / "whole"), weights(tmp_path / "crashed"))
    main(start(argv))  # a finished run has nothing to do
    assert_equal(weights(tmp_path / "whole"), weights(tmp_path / "crashed"))
    assert not list(tmp_path.glob("*/previous-*"))


def test_init_from_auto_without_a_checkpoint_starts_as_the_config_file_says(chars, tmp_path):
    main(tiny(chars, tmp_path / "base", max_iters=2))
    config = tmp_path / "finetune.py"
    config.write_text(f"init_from = {str(tmp_path / 'base')!r}\nmax_iters = 2\ncompile = False\ndevice = 'cpu'\n")
    argv = [str(config), f"--dataset={chars}", f"--out_dir={tmp_path / 'out'}", "--init_from=auto", "--eval_iters=2"]
    first = start(argv)
    assert (first.init_from, first.n_embd) == (str(tmp_path / "base"), TINY["n_embd"])
    main(first)
    assert start(argv).init_from == "resume"
    assert start([*argv, f"--out_dir={tmp_path / 'other'}"]).init_from == str(tmp_path / "base")
    assert start([*argv[1:], f"--out_dir={tmp_path / 'other'}"]).init_from == "scratch"


def test_init_from_auto_never_starts_anew_over_a_damaged_checkpoint(chars, tmp_path, capsys):
    main(tiny(chars, tmp_path, **LONG))
    argv = flags(out_dir=tmp_path, init_from="auto")
    (tmp_path / "ckpt.pt").write_bytes(b"damaged")
    assert start(argv).init_from == "resume"
    (tmp_path / "ckpt_best.pt").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"ckpt\.pt is not a readable .*, and .*ckpt_best\.pt is not a readable"):
        start(argv)


def test_init_from_auto_keeps_the_plan_that_max_minutes_made(chars, tmp_path):
    argv = flags(**TINY | LONG, dataset=chars, out_dir=tmp_path, init_from="auto", max_minutes=5.0)
    assert start(argv).max_minutes == 5.0
    main(tiny(chars, tmp_path, **LONG | {"max_iters": 9, "lr_decay_iters": 9}))  # as if 9 steps had fitted
    again = start(argv)
    assert (again.max_minutes, again.max_iters, again.lr_decay_iters) == (0.0, 9, 9)
    main(again)  # is of the same experiment


# ---- what the ranks agree on ---------------------------------------------------------------------------------


def test_out_dir_or_settings_or_data_that_differ_between_hosts_are_refused_on_all_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    monkeypatch.setattr(lock, "SEEN_WITHIN_S", 0.2)
    monkeypatch.setattr(resuming, "git_commit", lambda: None)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    settings = {"out_dir": "a", "learning_rate": 6e-4, "min_lr": None}
    data = {"train data": {"tokens": 10, "fingerprint": "x"}, "checkpoint": "step 0"}

    def refusal(check: Callable[..., None], *args: Any) -> str:
        try:
            check(*args)
        except ValueError as e:
            return str(e)
        return ""

    def work(ranks: Ranks) -> list[str]:
        is_odd = ranks.rank == 2
        (tmp_path / "a" / "b").mkdir(exist_ok=True)
        seen = tmp_path / "a" if not is_odd else tmp_path / "a" / ".." / "a"  # the same by another path
        odd = {"train data": {"tokens": 10, "fingerprint": "y"}, "checkpoint": "step 0"}
        return [
            refusal(lock.check_shared, seen, ranks),
            refusal(lock.check_shared, tmp_path / ("b" if is_odd else "a"), ranks),
            refusal(refuse_differences, settings | ({"out_dir": "b"} if is_odd else {}), data, ranks),
            refusal(refuse_differences, settings | ({"min_lr": 1e-3} if is_odd else {}), data, ranks),
            refusal(refuse_differences, settings, odd if is_odd else data, ranks),
            refusal(refuse_differences, settings, data | ({"checkpoint": "step 4"} if is_odd else {}), ranks),
        ]

    found = on_ranks(work, 3, tmp_path)
    assert found[0] == found[1]
    host = platform.node()
    same, elsewhere, equal, other_settings, odd_data, checkpoints = found[0]
    assert same == equal == ""
    assert elsewhere.startswith(f"out_dir={tmp_path / 'a'} on host {host} (rank 2) is not the folder that rank 0")
    assert re.match(rf"min_lr is None on rank 0 \(host {host}\), but 0\.001 on rank 2 \(host", other_settings)
    assert odd_data.startswith("train data is fingerprint x on rank 0")
    assert checkpoints.startswith("checkpoint is step 0 on rank 0")
    assert found[2][2:] == found[0][2:]  # out_dir's own path is in the other one
    assert not [path for path in tmp_path.rglob(".*") if path.name.startswith(".shared")]


def test_rank_that_hangs_ends_the_others_within_the_timeout_with_one_line(tmp_path):
    def work(ranks: Ranks) -> str:
        if ranks.rank == 1:
            time.sleep(1)
            return "hangs"
        ranks.agree(0)
        return "never"

    t0 = time.monotonic()
    first, hung, third = on_ranks(work, 3, tmp_path, timeout_s=0.3)
    assert time.monotonic() - t0 < 10
    assert hung == "hangs"
    lost = r"rank {} lost the others \((Timed out waiting 300ms for .*|Connection closed .*)\); one that ended says why"
    assert re.match(lost.format(0), first)
    assert re.match(lost.format(2), third)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return int(s.getsockname()[1])


class Two:
    """Two ranks that train, without torchrun: forks of this process, which has imported everything."""

    def __init__(self, chars: Path, out_dir: Path, places: tuple[Path, Path] = (ROOT, ROOT), **settings: Any) -> None:
        self.places = places
        self.settings = LONG | {
            "gradient_accumulation_steps": 2,
            "eval_interval": 3,
            "save_interval": 0,
            "dropout": 0.0,
        }
        self.settings |= settings
        self.chars = chars
        self.out_dir = out_dir
        self.port = free_port()

    def start(self, function: Any, number: int, disturb: Callable[[], None]) -> list[ForkProcess]:
        """disturb is called on the second rank, before that call of the function, which is given as (owner, name)."""
        owner, name = function
        calls = 0

        def disturbed(*args: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                disturb()
            return original(*args, **named)

        def on_rank(rank: int) -> None:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(self.port)}
            os.chdir(self.places[rank])
            for signal_number in SIGNALS:
                signal.signal(signal_number, signal.SIG_DFL)
            listener._ends = None  # that of the process which forked this one; its thread is not here
            listener.listen()
            if rank == 1:
                setattr(owner, name, disturbed)
            try:
                main(tiny(self.chars, self.out_dir, **self.settings))
            except SystemExit as e:
                os._exit(int(e.code or 0))
            except (RuntimeError, ValueError) as e:
                print(message_for_user(e, ""), file=sys.stderr)
                os._exit(1)
            os._exit(0)

        original = getattr(owner, name)
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=on_rank, args=(rank,)) for rank in range(2)]
        for process in processes:
            process.start()
        return processes


def stop_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    while listener.signal is None:
        time.sleep(0.001)


MOMENTS = {  # what the second rank is about to do when it gets the signal, and the step that is saved then
    "warm-up": ((StartingPoint, "fastest_form"), 1, 0),
    "evaluation": ((train, "eval_batches"), 6, 6),  # of the val split at step 6
    "save": ((saver, "Kept"), 2, 7),  # after step 5, while the first rank's thread writes
    "step": ((Report, "step"), 7, 7),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_signal_to_one_rank_at_any_moment_saves_on_all_and_ends(moment, chars, tmp_path):
    """Where there is nothing to save, the first rank ends when it misses the second one."""
    function, number, step = MOMENTS[moment]
    two = Two(chars, tmp_path / "out", dist_timeout_s=20.0)
    processes = two.start(function, number, stop_this_process)
    for process in processes:
        process.join(60)
    stopped = 128 + signal.SIGTERM
    assert [process.exitcode for process in processes] == [stopped if step else 1, stopped]
    if step:
        assert store.load(tmp_path / "out").iter_num == step
        main(tiny(chars, tmp_path / "out", init_from="resume", **two.settings))
        main(tiny(chars, tmp_path / "whole", **two.settings))
        torch.testing.assert_close(weights(tmp_path / "out"), weights(tmp_path / "whole"))


def test_hosts_with_folders_of_their_own_are_refused_and_leave_nothing(chars, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setattr(lock, "SEEN_WITHIN_S", 0.5)
    places = (tmp_path / "a", tmp_path / "b")
    for place in places:
        (place / "out").mkdir(parents=True)
    processes = Two(chars, Path("out"), places).start((Report, "step"), 0, lambda: None)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [1, 1]
    # The two processes share a terminal, so their lines may run into each other.
    assert capfd.readouterr().err.count("(rank 1) is not the folder that rank 0 writes to") == 2
    assert [path for place in places for path in (place / "out").iterdir()] == []


@pytest.mark.slow
def test_dist_timeout_s_ends_a_run_in_which_a_rank_hangs(chars, tmp_path, capfd):
    two = Two(chars, tmp_path, dist_timeout_s=4.0)
    first, hung = two.start((Report, "step"), 7, lambda: time.sleep(1000))
    first.join(60)
    hung.kill()
    assert first.exitcode == 1
    assert re.search(r"^rank 0 lost the others \(Timed out waiting 4000ms", capfd.readouterr().err, re.M)
    assert store.load(tmp_path).iter_num == 6


# ---- torchrun on two hosts, which are one here ---------------------------------------------------------------

STEPS = 100
ENDLESS = TINY | {"gradient_accumulation_steps": 2, "eval_interval": STEPS, "save_interval": 5, "dropout": 0.1}
ENDLESS["lr_decay_iters"] = STEPS


class Hosts:
    """Two torchruns that meet, each with one rank, and what they print."""

    def __init__(self, folder: Path, chars: Path, restarts: int = 0) -> None:
        self.folder = folder
        meet = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{free_port()}"]
        settings = ENDLESS | {"max_iters": STEPS, "dataset": chars, "init_from": "auto"}
        self.command = [sys.executable, "-m", "torch.distributed.run", *meet, f"--max_restarts={restarts}"]
        self.command += [str(ROOT / "train.py"), *flags(**settings)]
        self.processes: list[subprocess.Popen[bytes]] = []

    def begin(self, host: int, *more: str) -> None:
        environ = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        # Which of the two has the store; and how soon it notices that the other one is lost.
        rdzv_conf = f"--rdzv_conf=is_host={1 - host},keep_alive_interval=1,keep_alive_max_attempt=3"
        command = [*self.command[:3], rdzv_conf, *self.command[3:], *more]
        with open(self.folder / f"terminal-{host}", "a") as file:
            options: dict[str, Any] = {"cwd": ROOT, "stdout": file, "stderr": subprocess.STDOUT}
            self.processes.append(subprocess.Popen(command, env=environ, **options))

    def printed(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("terminal-*")))

    def until(self, words: str, times: int = 1) -> None:
        latest = time.monotonic() + 120
        while self.printed().count(words) < times:
            assert time.monotonic() < latest, self.printed()
            time.sleep(0.02)

    def workers(self, host: int) -> list[int]:
        found = subprocess.run(["pgrep", "-P", str(self.processes[host].pid)], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def ends(self) -> list[int]:
        """The exit statuses, once all have ended."""
        statuses = [process.wait(120) for process in self.processes]
        self.processes = []
        return statuses


@pytest.fixture
def hosts(chars, tmp_path) -> Iterator[Callable[..., Hosts]]:
    made = []

    def make(*args: Any) -> Hosts:
        made.append(Hosts(tmp_path, chars, *args))
        return made[-1]

    yield make
    for process in [process for some in made for process in some.processes]:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def undisturbed(chars, tmp_path_factory) -> dict[str, torch.Tensor]:
    """The weights at the end of the run."""
    out_dir = tmp_path_factory.mktemp("undisturbed")
    processes = Two(chars, out_dir, **ENDLESS | {"max_iters": STEPS}).start((Report, "step"), 0, lambda: None)
    for process in processes:
        process.join(100)
    assert [process.exitcode for process in processes] == [0, 0]
    return weights(out_dir)


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1][:3]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing tells a process that its parent was killed")
def test_killed_rank_and_killed_torchrun_cost_no_more_than_a_restart(hosts, undisturbed, tmp_path):
    two = hosts(2)
    out_dir = f"--out_dir={tmp_path / 'out'}"
    two.begin(0, out_dir)
    two.begin(1, out_dir)
    two.until("iter 20:")
    os.kill(two.workers(1)[0], signal.SIGKILL)
    two.until("going on from")
    two.until("iter 50:")
    (worker,) = two.workers(1)
    two.processes[1].kill()
    latest = time.monotonic() + 20
    while is_alive(worker):
        assert time.monotonic() < latest
        time.sleep(0.1)
    two.processes[1].wait()
    del two.processes[1]
    two.begin(1, out_dir)  # the same command, while the other torchrun waits for it
    assert two.ends() == [0, 0]
    assert_equal(weights(tmp_path / "out"), undisturbed)
    assert two.printed().count("going on from") == 2


@pytest.mark.slow
def test_stop_of_one_host_stops_both_at_the_same_step(hosts, tmp_path):
    two = hosts()
    for host in range(2):
        two.begin(host, f"--out_dir={tmp_path / 'out'}")
    two.until("iter 20:")
    two.processes[1].terminate()
    assert two.ends() == [1, 1]
    assert 'Traceback (most recent call last):\n  File "train.py' not in two.printed()
    stopped = re.search(r"stopped by SIGTERM at step (\d+)", two.printed())
    assert stopped
    assert store.load(tmp_path / "out").iter_num == int(stopped[1])


# ---- SLURM, of which only the commands are made up -----------------------------------------------------------

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


@pytest.mark.slow
def test_slurm_script_saves_and_requeues_before_its_time_is_up_and_then_goes_on(chars, undisturbed, tmp_path):
    for name, lines in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    settings = flags(**ENDLESS | {"max_iters": STEPS}, dataset=chars, out_dir=tmp_path / "out")
    environ = os.environ | SLURM | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    terminal = tmp_path / "terminal"

    def submit() -> subprocess.Popen[bytes]:
        with open(terminal, "a") as file:
            command = ["bash", str(ROOT / "slurm.sbatch"), *settings]
            return subprocess.Popen(command, env=environ, cwd=tmp_path, stdout=file, stderr=subprocess.STDOUT)

    job = submit()
    while "iter 20:" not in terminal.read_text():
        assert job.poll() is None, terminal.read_text()
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(60) != 0
    assert (tmp_path / "asked").read_text() == "--signal=TERM 123\nrequeue 123\n"
    step = store.load(tmp_path / "out").iter_num
    assert f"stopped by SIGTERM at step {step}\n" in terminal.read_text()
    assert submit().wait(120) == 0
    assert f"going on from {tmp_path / 'out'}, step {step}\n" in terminal.read_text()
    assert (tmp_path / "asked").read_text().count("requeue") == 1
    assert_equal(weights(tmp_path / "out"), undisturbed)
