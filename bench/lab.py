"""Take micro-batches apart on one device: ours without and with a CUDA graph, and an unmodified
nanoGPT's, in turns.

    python bench/lab.py config/train_fineweb_125m.py --batch_size=16 --peer=nanogpt:../nanoGPT

Settings are those of train.py. A micro-batch is forward pass, loss and backward pass, and adds to
the gradients; its tokens are random and on the device already. All contestants live in one process
and take turns for --rounds rounds, in another order each. Prints a line for each of them after each
round, with medians so far, and at the end with a profile:

    wall       ms of a micro-batch in a row, without a wait in between
    alone      ms of one with a wait before and after
    queueing   ms until the CPU has queued one
    busy       ms in which the device runs kernels; torch's table of them comes before
    gaps       wall less busy: it waits for the CPU, which faster queueing can gain

A profile needs CUDA. Exit status: 1 if a contestant has failed.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import statistics
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

# The repository; Python adds only this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities

import train
from bench.speed import bench_parser, nanogpt_checkout, nanogpts_model, vocab_size_of
from configurator import configure
from deskgpt.compute import (
    ComputeMode,
    CudaGraph,
    apply_compute,
    choose_compute,
    default_dtype,
    seed_all,
)
from deskgpt.device import memory_bytes, synchronize
from deskgpt.distributed import DistContext, init_distributed
from deskgpt.errors import one_line_errors, reason
from deskgpt.memory import USABLE_SHARE, StepShape, with_fewest_chunks
from model import GPT, GPTConfig

WARM_UP = 4  # passes, of which a graph records the third
PROFILED = 3  # passes
ROWS_OF_PROFILE = 12

# ---- contestants ---------------------------------------------------------------------------------

MicroBatch = Callable[[], Tensor]  # computes one and returns its loss


@dataclass
class Contestant:
    """A way to compute a micro-batch, and what was measured of it so far."""

    name: str
    run: MicroBatch
    # ms by round: "wall", "queueing", "alone"; of a profile "busy", and the number of "kernels"
    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def measure(self, device: torch.device, passes: int) -> None:
        """Add the times of a round."""
        for _ in range(2):
            self.run()
        synchronize(device)
        t0 = time.perf_counter()
        for _ in range(passes):
            self.run()
        synchronize(device)
        self.times["wall"].append((time.perf_counter() - t0) * 1e3 / passes)
        for _ in range(passes):
            t0 = time.perf_counter()
            self.run()
            self.times["queueing"].append((time.perf_counter() - t0) * 1e3)
            synchronize(device)
            self.times["alone"].append((time.perf_counter() - t0) * 1e3)

    def figures(self) -> str:
        """Return the line of this contestant."""
        found = {name: statistics.median(ms) for name, ms in self.times.items()}
        if "busy" in found:
            found["gaps"] = found["wall"] - found["busy"]
        return f"{self.name}: {', '.join(f'{name} {x:.4g}' for name, x in found.items())}"


def our_model(
    c: train.TrainConfig, config: GPTConfig, dist: DistContext
) -> tuple[GPT, ComputeMode]:
    """Return our model, and how it is computed, as train.py does with these settings."""
    step = StepShape(config, c.batch_size, choose_compute(c, dist, {}), dist.device.type)
    variant = with_fewest_chunks(step, USABLE_SHARE * memory_bytes(dist.device)).variant
    with dist.device:
        model = GPT(config)
    apply_compute(model, variant)
    return model, variant


def nanogpt(checkout: Path, config: GPTConfig, device: torch.device) -> tuple[Any, ComputeMode]:
    """Return nanoGPT's model, and how bench/speed.py runs it."""
    with device:
        model = nanogpts_model(checkout, config)
    if device.type == "cpu":
        return model, ComputeMode()
    model.compile()
    return model, ComputeMode(default_dtype(device), compiled=True)


def micro_batch(
    c: train.TrainConfig, tokens: Tensor, graph: bool, model: Any, variant: ComputeMode
) -> MicroBatch:
    """Return a function that computes a micro-batch of tokens (B, T + 1).

    Raises RuntimeError if it is to be a graph and cannot be recorded.
    """
    scaler = torch.amp.GradScaler(tokens.device.type, enabled=variant.dtype == "float16")
    forward_backward = functools.partial(train.forward_backward, model, scaler, variant)
    graphed = CudaGraph(forward_backward, model, enabled=graph, on_refusal=refuse)
    inputs = tokens[:, :-1].contiguous()
    targets = tokens[:, 1:].contiguous()

    def run() -> Tensor:
        seed_all(c.seed, tokens.device)  # the loop of train.py does so, too
        return graphed(inputs, targets, 1 / c.gradient_accumulation_steps)["loss"]

    for _ in range(WARM_UP):
        run()
    if graph and not graphed.recordings:
        refuse(f"none was recorded in {WARM_UP} passes")
    return run


def refuse(why: str) -> NoReturn:
    """Raise RuntimeError: what should be a graph is none."""
    raise RuntimeError(why)


def add_profile(x: Contestant, device: torch.device) -> None:
    """Print the kernels of some micro-batches. Add the ms in which they run, and their number, of
    one.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            x.run()
        synchronize(device)
    found = profiler.key_averages()
    print(found.table("self_cuda_time_total", ROWS_OF_PROFILE, max_name_column_width=80))
    kernels = [e for e in found if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    x.times["busy"].append(sum(e.self_device_time_total for e in kernels) / 1e3 / PROFILED)
    x.times["kernels"].append(sum(e.count for e in kernels) / PROFILED)


# ---- the command ---------------------------------------------------------------------------------


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument(
        "--passes", type=int, default=12, help="of a round, in a row (default: %(default)s)"
    )
    a, given = parser.parse_known_args()
    c = configure(train.TrainConfig, given)
    dist = init_distributed(c.device, c.backend, c.dist_timeout_s)
    device = dist.device
    config = GPTConfig.from_settings(c, a.vocab_size or vocab_size_of(c.dataset))
    seed_all(c.seed, device)
    tokens = torch.randint(config.vocab_size, (c.batch_size, c.block_size + 1)).to(device)
    ours = functools.cache(functools.partial(our_model, c, config, dist))
    wanted: dict[str, tuple[Callable[[], tuple[Any, ComputeMode]], bool]] = {"ours": (ours, False)}
    if device.type == "cuda":
        wanted["ours + graph"] = (ours, True)
    for peer in a.peer:
        theirs = functools.partial(nanogpt, nanogpt_checkout(peer, c), config, device)
        wanted["nanoGPT"] = (theirs, False)
    running = []
    failed: set[str] = set()
    for name, (make, graph) in wanted.items():
        with caught(name, failed):
            model, variant = make()
            run = micro_batch(c, tokens, graph, model, variant)
            print(f"{name}: {variant}, loss {run().item()!r}", flush=True)
            running.append(Contestant(name, run))
    print(f"ms of a micro-batch of {c.batch_size} x {c.block_size}:")
    for number in range(a.rounds):
        print(f"\nround {number + 1} of {a.rounds}")
        # In another order each round, so that no drift of the machine favours one of them.
        for x in random.Random(number).sample(running, len(running)):
            with caught(x.name, failed):
                x.measure(device, a.passes)
                print(x.figures(), flush=True)
        running = [x for x in running if x.name not in failed]
    # At the end: a profiler may leave the CPU slower.
    if ProfilerActivity.CUDA in supported_activities():
        for x in running:
            with caught(x.name, failed):
                add_profile(x, device)
                print(x.figures(), flush=True)
    sys.exit(bool(failed))


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
