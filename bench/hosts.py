"""Breaks a run on several hosts, lets it recover, and compares it with a run that nobody disturbed. Linux only.

    python bench/hosts.py                                    # every fault, 3 hosts of 2 ranks
    python bench/hosts.py --hosts=2 --ranks=1 --fault=kill-worker
    python bench/hosts.py --dp_shard=-1                      # with settings of train.py
    python bench/hosts.py --save=hosts                       # writes bench/results/DATE-hosts.md and .json as well

The hosts are network namespaces on this machine, each with an address, a torchrun and its workers, which train a small
model with train.py --init_from=auto. They share the file system. All of it, processes too, is in namespaces of this
script's own: when it ends, however it ends, the system removes them. Ends with exit status 1 where a promise is broken;
where the system allows no namespaces, it says why and ends with 0.

The faults, at a random step, and the promises:

    kill-worker      SIGKILL to a worker: its torchrun starts all again
    kill-agent       SIGKILL to a torchrun: its workers end, the same command on its host starts all again
    kill-store-host  SIGKILL to all of the host with the rendezvous: all hosts end, the same command continues
    link-down        a host's cable is pulled until all workers have ended
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

from bench import output
from bench.output import markdown_table
from bench.soak import DIST_TIMEOUT_S, SMALL, differences, events, run_ranks, write_data
from bench.timing import ROOT
from deskgpt.machine.errors import ConfigError, one_line_errors
from deskgpt.run import log

MAX_ITERS = 120
SAVE_INTERVAL = 10  # steps
# Within these seconds the processes that a fault hits have ended, and within these the run trains again.
GONE_S = {"kill-worker": 30, "kill-agent": 60, "kill-store-host": 60, "link-down": DIST_TIMEOUT_S + 30}
AGAIN_S = {"kill-worker": 30, "kill-agent": 120, "kill-store-host": 120, "link-down": 120}
FAULTS = tuple(GONE_S)
END_S = 600.0  # a run that takes longer hangs

# A network of its own, and processes that end with the first one; root need not be mapped where the user is root.
NAMESPACES = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
INSIDE = "--inside"  # this script's first argument within them


class BrokenPromise(Exception):
    """What is not as promised."""


class Cluster:
    """Hosts as network namespaces h0, h1 ..., joined by a bridge; the rendezvous is on h0."""

    def __init__(self, hosts: int, ranks: int, more: list[str], folder: Path) -> None:
        self.hosts = range(hosts)
        self.ranks = ranks
        self.more = more  # settings of the run
        self.folder = folder
        self.data = write_data(folder)
        self.out_dir = folder
        self.agents: dict[int, subprocess.Popen[bytes]] = {}  # torchrun, by host
        ip("link add name bridge0 up type bridge")
        for host in self.hosts:
            ip(f"netns add h{host}")
            ip(f"link add name v{host} up master bridge0 type veth peer name eth0 netns h{host}")
            ip(f"-n h{host} address add 10.0.0.{host + 1}/24 dev eth0")
            ip(f"-n h{host} link set eth0 up")
            ip(f"-n h{host} link set lo up")

    def script(self, out_dir: Path) -> list[str]:
        """train.py and its settings."""
        settings = SMALL | {"max_iters": MAX_ITERS, "gradient_accumulation_steps": len(self.hosts) * self.ranks}
        settings |= {"eval_interval": MAX_ITERS // 2, "save_interval": SAVE_INTERVAL, "save_async": False}
        settings |= {"dataset": self.data, "out_dir": out_dir}
        return ["train.py", *(f"--{name}={value}" for name, value in settings.items()), *self.more]

    def train_undisturbed(self) -> Path:
        """The folder of a run on as many ranks, which are forks of this process. Raises RuntimeError where it fails."""
        out_dir = self.folder / "undisturbed"
        run_ranks(self.script(out_dir), len(self.hosts) * self.ranks, self.folder / "undisturbed.log")
        return out_dir

    def start(self, host: int) -> None:
        """The command that begins the run or goes on with it: the same at any time."""
        rdzv_conf = f"is_host={int(host == 0)},join_timeout=30,read_timeout=15"
        command = ["nsenter", f"--net=/run/netns/h{host}", sys.executable, "-m", "torch.distributed.run"]
        command += [f"--nnodes={len(self.hosts)}", f"--nproc_per_node={self.ranks}", "--max_restarts=3"]
        command += ["--rdzv_backend=c10d", "--rdzv_endpoint=10.0.0.1:29500", "--rdzv_id=1", f"--rdzv_conf={rdzv_conf}"]
        command += [f"--local_addr=10.0.0.{host + 1}", *self.script(self.out_dir), "--init_from=auto"]
        # A store that torchrun shares with its workers keeps the addresses of those it has started before.
        more = {"GLOO_SOCKET_IFNAME": "eth0", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        with open(self.log_of(host), "ab") as log:
            self.agents[host] = subprocess.Popen(command, cwd=ROOT, env=os.environ | more, stdout=log, stderr=log)

    def log_of(self, host: int) -> Path:
        return self.folder / f"{self.out_dir.name}.h{host}.log"

    def pids(self, host: int) -> set[int]:
        """The processes of a host."""
        namespace = os.stat(f"/run/netns/h{host}").st_ino
        found = set()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                if os.stat(process / "ns/net").st_ino == namespace:
                    found.add(int(process.name))
        return found

    def all_pids(self) -> set[int]:
        return set().union(*map(self.pids, self.hosts))

    def workers(self) -> set[int]:
        return self.all_pids() - {agent.pid for agent in self.agents.values()}

    def wait(self, condition: Callable[[], Any], limit_s: float, what: str, by_hand: bool = False) -> float:
        """Seconds until the condition is true. by_hand: someone types the command again on a host whose torchrun ended.

        Raises BrokenPromise after limit_s.
        """
        t0 = time.monotonic()
        while not condition():
            if time.monotonic() > t0 + limit_s:
                raise BrokenPromise(f"{what}: not within {limit_s:.0f} s")
            for host, agent in self.agents.items():
                if by_hand and agent.poll():
                    self.start(host)
            time.sleep(0.05)
        return time.monotonic() - t0

    def train(self, fault: str, draw: random.Random) -> dict[str, Any]:
        """What came of a run with this fault, in a new folder. Raises BrokenPromise."""
        self.out_dir = self.folder / fault
        t0 = time.monotonic()
        for host in self.hosts:
            self.start(host)
        step = draw.randrange(SAVE_INTERVAL, MAX_ITERS // 2)
        self.wait(lambda: len(events(self.out_dir, "iter")) > step, END_S, "the first steps")
        facts = self.disturb(fault, draw)
        self.wait(lambda: not self.agents_running(), END_S, "the end of all torchruns")
        run_s = time.monotonic() - t0
        failed = [f"h{host} with {agent.returncode}" for host, agent in self.agents.items() if agent.returncode]
        if failed:
            raise BrokenPromise(f"torchrun ended on {', '.join(failed)}")
        with suppress(BrokenPromise):
            self.wait(lambda: not self.all_pids(), 5, "the end of all processes")
        lost = steps_lost(log.read_events(self.out_dir / "log.jsonl"))
        return {"run_s": run_s, "steps_lost": lost, "orphans": len(self.all_pids()), **facts}

    def agents_running(self) -> bool:
        return any(agent.poll() is None for agent in self.agents.values())

    def disturb(self, fault: str, draw: random.Random) -> dict[str, Any]:
        """Does what the fault's name says, waits until the run trains again. Raises BrokenPromise."""
        starts = len(events(self.out_dir, "start"))
        host = draw.choice(self.hosts)
        workers = sorted(self.workers())
        hit = set(workers)
        if fault == "kill-worker":
            os.kill(draw.choice(workers), signal.SIGKILL)
        elif fault == "kill-agent":
            hit = self.pids(host)
            os.kill(self.agents[host].pid, signal.SIGKILL)
        elif fault == "kill-store-host":
            hit = self.all_pids()
            for pid in self.pids(0):
                os.kill(pid, signal.SIGKILL)
        else:
            ip(f"link set v{host} down")
        step = events(self.out_dir, "iter")[-1]["iter"]
        try:
            gone_s = self.wait(lambda: not hit & self.all_pids(), GONE_S[fault], f"the end of {len(hit)} processes")
        finally:
            if fault == "link-down":
                ip(f"link set v{host} up")
        limit_s = AGAIN_S[fault] - gone_s
        by_hand = fault != "kill-worker"
        again_s = gone_s + self.wait(lambda: self.trains_since(starts), limit_s, "training again", by_hand)
        return {"step": step, "gone_s": gone_s, "again_s": again_s}

    def trains_since(self, starts: int) -> bool:
        """Whether a step was made after more starts than these."""
        kinds = [event["event"] for event in log.read_events(self.out_dir / "log.jsonl")]
        return kinds.count("start") > starts and kinds[-1] != "start"

    def stop(self) -> None:
        """Ends all processes, without a trace of what they were about to do."""
        while self.all_pids():
            for pid in self.all_pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)


def steps_lost(log: list[dict[str, Any]]) -> int:
    """The steps of a run that were made twice or more often, by its events."""
    lost = 0
    done = 0
    for event in log:
        if event["event"] == "start":
            lost += done - event["iter"]
            done = event["iter"]
        elif event["event"] == "iter":
            done = event["iter"] + 1
    return lost


def check(cluster: Cluster, fault: str, draw: random.Random, undisturbed: Path) -> dict[str, Any]:
    """What came of a fault, and "broken", the promises that were not kept."""
    try:
        facts = cluster.train(fault, draw)
    except BrokenPromise as e:
        return {"broken": [str(e)]}
    finally:
        cluster.stop()
    facts["differences"] = differences(undisturbed, cluster.out_dir)
    return facts | {"broken": broken_promises(facts)}


def broken_promises(facts: dict[str, Any]) -> list[str]:
    """Which of the promises for every fault a run did not keep, by what came of it."""
    broken = []
    if facts["differences"]:
        broken.append(f"it differs from the undisturbed run: {', '.join(facts['differences'])}")
    if facts["orphans"]:
        broken.append(f"{facts['orphans']} processes are left")
    if facts["steps_lost"] > SAVE_INTERVAL:
        broken.append(f"{facts['steps_lost']} steps are lost")
    return broken


def table(results: dict[str, dict[str, Any]]) -> str:
    head = ("fault", "at step", "ended after s", "training again after s", "steps lost", "orphans", "weights", "run s")
    rows = []
    for fault, r in results.items():
        ended_s, again_s, run_s = [f"{r[name]:.1f}" if name in r else "n/a" for name in ("gone_s", "again_s", "run_s")]
        step, lost, orphans = [str(r.get(name, "n/a")) for name in ("step", "steps_lost", "orphans")]
        weights = "n/a" if "differences" not in r else "differ" if r["differences"] else "equal"
        promises = "; ".join(r["broken"]) or "kept"
        rows.append((fault, step, ended_s, again_s, lost, orphans, weights, run_s, promises))
    return markdown_table((*head, "promises"), rows, left_columns=1)


def within_namespaces(arguments: list[str]) -> int:
    """Runs this script once more, in namespaces of its own that end with it; returns its exit status."""
    if sys.platform != "linux":
        return skip("network namespaces are Linux's")
    missing = [name for name in ("setpriv", "unshare", "nsenter", "ip") if shutil.which(name) is None]
    if missing:
        return skip(f"there is no program {missing[0]} (packages util-linux and iproute2)")
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    script = "ip link add name v0 type veth && ip link add name bridge0 type bridge && mount -t tmpfs none /run"
    tried = subprocess.run([*NAMESPACES, *as_root, "sh", "-c", script], capture_output=True, text=True)
    if tried.returncode:
        return skip(" ".join(tried.stderr.split()))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    command = ["setpriv", "--pdeathsig=KILL", *NAMESPACES, *as_root, sys.executable, __file__, INSIDE, *arguments]
    return subprocess.run(command).returncode


def skip(reason: str) -> int:
    print(f"skipped, since there can be no hosts on this machine: {reason}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2, help="per host")
    parser.add_argument("--fault", choices=("all", *FAULTS), default="all")
    parser.add_argument("--seed", type=int, default=1, help="of the moments and of what is hit")
    parser.add_argument("--save", metavar="NAME", help="write bench/results/DATE-NAME.md and .json as well")
    inside = sys.argv[1:2] == [INSIDE]
    if inside:
        del sys.argv[1]
    a, more = parser.parse_known_args()
    output.check_name(a.save)
    if a.hosts < 2 or a.ranks < 1:
        raise ConfigError(f"--hosts={a.hosts} --ranks={a.ranks}: at least 2 hosts, of 1 rank")
    if not inside:
        return within_namespaces(sys.argv[1:])

    subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)  # for ip netns; no one else sees it
    ip("link set lo up")
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(dir="/run") as folder:
        cluster = Cluster(a.hosts, a.ranks, more, Path(folder))
        undisturbed = cluster.train_undisturbed()
        draw = random.Random(a.seed)
        results = {}
        for fault in FAULTS if a.fault == "all" else (a.fault,):
            results[fault] = check(cluster, fault, draw, undisturbed)
            print(f"{fault}: {'; '.join(results[fault]['broken']) or 'all promises kept'}", flush=True)
            for host in cluster.hosts:
                if results[fault]["broken"]:
                    print(f"--- h{host}\n{cluster.log_of(host).read_text()[-4000:]}", flush=True)
        start = events(undisturbed, "start")[0]
    print(table(results))
    if a.save:
        text = (
            f"# Faults on several hosts\n\n{output.about(start)}\n\n```sh\n{output.command_line('hosts.py')}\n```\n\n"
        )
        text += f"{a.hosts} hosts of {a.ranks} ranks, {MAX_ITERS} steps, a checkpoint every {SAVE_INTERVAL}, "
        text += f"dist_timeout_s={DIST_TIMEOUT_S}.\n\n{table(results)}\n"
        output.save(a.save, text, {"results": results, "start": start})
    return 1 if any(r["broken"] for r in results.values()) else 0


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main())
