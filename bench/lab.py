"""Take micro-batches apart on one device: ours without and with a CUDA graph, and an unmodified
nanoGPT's, in turns.

    python bench/lab.py config/train_fineweb_125m.py --batch_size=16 --peer=nanogpt:../nanoGPT
    python bench/lab.py config/train_fineweb_125m.py --peer=nanogpt:../nanoGPT --more

Settings are those of train.py. A micro-batch is forward pass, loss and backward pass, and adds to
the gradients; its tokens are random and on the device already. All contestants live in one process
and take turns for --rounds rounds, in another order each. Prints a line for each of them after each
round, with medians so far, and at the end with a profile:

    wall       ms of a micro-batch in a row, without a wait in between
    alone      ms of one with a wait before and after
    queueing   ms until the CPU has queued one
    busy       ms in which the device runs kernels, in all and by class
    gaps       ms between kernels, in which it waits for the CPU: at most 5 us, 50 us, longer

Wall less busy is what faster queueing can gain. A profile needs CUDA: n/a elsewhere. Exit status: 1
if one has failed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import random
import re
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

# The repository; Python adds only this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities

import train
from bench.speed import nanogpts_model, peer_of
from configurator import build, read_settings
from deskgpt.compute import ComputeMode, CudaGraph, apply_compute, choose_compute, seed_all
from deskgpt.device import memory_bytes, synchronize
from deskgpt.distributed import DistContext, init_distributed
from deskgpt.errors import ConfigError, OneLineParser, one_line_errors, reason
from deskgpt.memory import USABLE_SHARE, StepShape, with_fewest_chunks
from model import GPT, GPTConfig

WARM_UP = 4  # passes, of which a graph records the third
PROFILED = 3  # passes, of which the first does not count
GAPS_US = (5.0, 50.0, math.inf)  # the longest of each class
# Classes of kernels, by a pattern of their names; the first that matches counts.
CLASSES = {
    "attention": "fmha|flash|sdpa|attention",
    "matmul": "gemm|nvjet|cutlass|xmma|splitk",
    "triton": "^triton",
}
LOSS_CHUNKS = 4  # of a model that is there to be compared
Kernel = tuple[float, float, str]  # when it begins and ends in us, and its name


@dataclass
class Profile:
    """What the device does for one micro-batch."""

    kernels: int
    busy_ms: float
    gaps_ms: list[float]  # by GAPS_US
    by_class_ms: dict[str, float]


@dataclass
class Contestant:
    """A way to compute a micro-batch, and what was measured of it so far."""

    name: str
    run: Callable[[], Tensor]  # returns the loss
    wall_ms: list[float] = field(default_factory=list)  # by round
    alone_ms: list[float] = field(default_factory=list)
    queueing_ms: list[float] = field(default_factory=list)
    profile: Profile | None = None

    def measure(self, device: torch.device, passes: int) -> None:
        """Add the times of a round."""
        for _ in range(2):
            self.run()
        synchronize(device)
        t0 = time.perf_counter()
        for _ in range(passes):
            self.run()
        synchronize(device)
        self.wall_ms.append((time.perf_counter() - t0) * 1e3 / passes)
        for _ in range(passes):
            t0 = time.perf_counter()
            self.run()
            self.queueing_ms.append((time.perf_counter() - t0) * 1e3)
            synchronize(device)
            self.alone_ms.append((time.perf_counter() - t0) * 1e3)

    def figures(self) -> str:
        """Return the line of this contestant."""
        times = {"wall": self.wall_ms, "alone": self.alone_ms, "queueing": self.queueing_ms}
        words = [f"{name} {statistics.median(ms):.2f}" for name, ms in times.items()]
        p = self.profile
        if p is None:
            words.append("busy n/a, gaps n/a")
        else:
            gaps = " + ".join(f"{ms:.2f}" for ms in p.gaps_ms)
            words += [f"busy {p.busy_ms:.2f}", f"gaps {sum(p.gaps_ms):.2f} ({gaps})"]
            words += [f"{name} {ms:.2f}" for name, ms in p.by_class_ms.items()]
            words.append(f"kernels {p.kernels}")
        return f"{self.name}: {', '.join(words)}"


# ---- contestants ---------------------------------------------------------------------------------

Run = Callable[[], Tensor]  # a micro-batch; returns its loss
Computed = tuple[nn.Module, ComputeMode]  # a model, and how it is computed


def contestants(
    c: train.TrainConfig, vocab_size: int, device: torch.device, nanogpt: Path | None, more: bool
) -> dict[str, Callable[[], Run]]:
    """Return functions by the contestants' names, each of which makes a micro-batch of the settings
    c to be run.

    Those of a program share its model. more: also those that are worth their time at one size only.
    """
    config = GPTConfig.from_settings(c, vocab_size)
    seed_all(c.seed, device)
    tokens = torch.randint(vocab_size, (c.batch_size, c.block_size + 1)).to(device)
    batch = (
        tokens[:, :-1].contiguous(),
        tokens[:, 1:].contiguous(),
        1 / c.gradient_accumulation_steps,
    )
    chosen = dataclasses.replace(choose_compute(c, DistContext(device), {}), cuda_graph=False)
    step = StepShape(config, c.batch_size, chosen, device.type)
    fewest = with_fewest_chunks(step, USABLE_SHARE * memory_bytes(device)).variant.loss_chunks
    print(f"ours: {dataclasses.replace(chosen, loss_chunks=fewest)}")

    @functools.cache
    def ours(chunks: int) -> Computed:
        variant = dataclasses.replace(chosen, loss_chunks=chunks)
        model = GPT(config).to(device)
        apply_compute(model, variant)
        return model, variant

    @functools.cache
    def nanogpts() -> Computed:
        assert nanogpt is not None
        model = nanogpts_model(nanogpt, config).to(device)
        if device.type == "cpu":  # as bench/speed.py runs it
            return model, ComputeMode()
        model.compile()
        return model, ComputeMode("bfloat16", compiled=True)

    def micro_batch(make: Callable[[], Computed], graph: bool) -> Run:
        model, variant = make()
        scaler = torch.amp.GradScaler(device.type, enabled=variant.dtype == "float16")
        forward_backward = functools.partial(train.forward_backward, model, scaler, variant)
        graphed = CudaGraph(forward_backward, model, enabled=graph, on_refusal=refuse)

        def run() -> Tensor:
            seed_all(c.seed, device)  # the loop of train.py does so, too
            return graphed(*batch)["loss"]

        for _ in range(WARM_UP):
            run()
        if graph and not graphed.recordings:
            refuse(f"none was recorded in {WARM_UP} passes")
        return run

    found = {"nanoGPT": lambda: micro_batch(nanogpts, False)} if nanogpt else {}
    as_trained = functools.partial(ours, fewest)
    found["ours"] = lambda: micro_batch(as_trained, False)
    if device.type == "cuda":
        found["ours + graph"] = lambda: micro_batch(as_trained, True)
        if more:
            in_chunks = functools.partial(ours, LOSS_CHUNKS)
            found[f"ours + graph, loss in {LOSS_CHUNKS} chunks"] = lambda: micro_batch(
                in_chunks, True
            )
        if more and nanogpt:
            found["nanoGPT + graph"] = lambda: micro_batch(nanogpts, True)
    return found


def refuse(why: str) -> NoReturn:
    """Raise RuntimeError: what should be a graph is none."""
    raise RuntimeError(why)


# ---- profiles ------------------------------------------------------------------------------------


def profiled(run: Run, device: torch.device) -> Profile:
    """Return what the card does for a micro-batch, by torch's profiler."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(PROFILED):
            run()
        synchronize(device)
    kernels = []
    for e in found.events() or ():
        if e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False):
            kernels.append((e.time_range.start, e.time_range.end, e.name))
    return profile_of(kernels, PROFILED)


def profile_of(kernels: Sequence[Kernel], passes: int) -> Profile:
    """Return the mean micro-batch of several that ran the same kernels, without the first one.

    A kernel may run while another does, so busy time is what any of them covers.
    """
    ordered = sorted(kernels)[len(kernels) // passes :]
    n = (passes - 1) * 1e3  # micro-batches, and us in a ms
    busy_us = 0.0
    gaps_ms = [0.0] * len(GAPS_US)
    by_class_ms = dict.fromkeys((*CLASSES, "other"), 0.0)
    covered_until = ordered[0][0] if ordered else 0.0
    for begin, end, name in ordered:
        gap = begin - covered_until
        if gap > 0:
            gaps_ms[next(i for i, longest in enumerate(GAPS_US) if gap <= longest)] += gap / n
        busy_us += max(0.0, end - max(begin, covered_until))
        covered_until = max(covered_until, end)
        kind = next(
            (kind for kind, pattern in CLASSES.items() if re.search(pattern, name, re.I)), "other"
        )
        by_class_ms[kind] += (end - begin) / n
    return Profile(len(ordered) // (passes - 1), busy_us / n, gaps_ms, by_class_ms)


# ---- the command ---------------------------------------------------------------------------------


def main() -> None:
    parser = OneLineParser(__doc__)
    parser.add_argument("--peer", help="nanogpt:PATH, an unmodified checkout")
    parser.add_argument(
        "--more",
        action="store_true",
        help="our loss in other chunks, and a graph of nanoGPT's passes",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--passes", type=int, default=12, help="of a round, in a row (default: %(default)s)"
    )
    parser.add_argument(
        "--vocab_size", type=int, default=0, help="0 = 65 for a dataset named *_char, else 50304"
    )
    a, given = parser.parse_known_args()
    c = build(train.TrainConfig, read_settings(train.TrainConfig, given))
    device = init_distributed(c.device, c.backend, c.dist_timeout_s).device
    nanogpt = nanogpt_checkout(a.peer, c) if a.peer else None
    vocab_size = a.vocab_size or (65 if c.dataset.endswith("_char") else 50304)
    running = []
    failed: set[str] = set()
    for name, make in contestants(c, vocab_size, device, nanogpt, a.more).items():
        with caught(name, failed):
            t0 = time.perf_counter()
            run = make()
            loss = run().item()
            running.append(Contestant(name, run))
            print(
                f"{name}: loss {loss!r}, ready after {time.perf_counter() - t0:.1f} s", flush=True
            )
    print(f"ms of a micro-batch of {c.batch_size} x {c.block_size}:")
    for number in range(a.rounds):
        # In another order each round, so that no drift of the machine favours one of them.
        for x in random.Random(number).sample(running, len(running)):
            with caught(x.name, failed):
                x.measure(device, a.passes)
        running = [x for x in running if x.name not in failed]
        print(
            f"\nround {number + 1} of {a.rounds}",
            *[x.figures() for x in running],
            sep="\n",
            flush=True,
        )
    # At the end: a profiler may leave the CPU slower.
    if ProfilerActivity.CUDA in supported_activities():
        print("\nwith profiles")
        for x in running:
            with caught(x.name, failed):
                x.profile = profiled(x.run, device)
                print(x.figures(), flush=True)
    sys.exit(bool(failed))


def nanogpt_checkout(text: str, c: train.TrainConfig) -> Path:
    """Return the folder that --peer names. Raises ConfigError, also if c has what nanoGPT lacks."""
    if not text.startswith("nanogpt:"):
        raise ConfigError(f"--peer {text}: not nanogpt:PATH")
    return peer_of(text, c, [], Path()).cwd


@contextmanager
def caught(name: str, failed: set[str]) -> Iterator[None]:
    """Print the error of a contestant and add its name to the failed ones: the others go on."""
    try:
        yield
    except Exception as e:
        traceback.print_exc()
        print(f"{name}: failed: {reason(e)}", flush=True)
        failed.add(name)


if __name__ == "__main__":
    os.environ.setdefault("WANDB_MODE", "offline")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with one_line_errors():
        main()
