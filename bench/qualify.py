"""Check and measure a card within some minutes, in the order of value, and write a page about it.

    python bench/qualify.py  # or: make qualify; at most 27 minutes
    python bench/qualify.py --minutes=9 --peer=nanogpt:../nanoGPT  # beside an unmodified nanoGPT
    python bench/qualify.py --only right tests  # these stages, also if they have passed
    # where a micro-batch's time goes
    python bench/qualify.py --only 16x1024

Needs no data and no network. stages.txt has the stages and their commands. Each is a process of its
own, whose output is kept as it comes in out-qualify/NAME/STAGE.txt, also if it fails or runs out of
time. page.md has what was measured beside what had been predicted (predicted.txt), and the end of
each output; it is written anew after each stage. A later call for the same device, torch and commit
(DESKGPT_COMMIT, if there is no git) continues with the stages that have not passed. Settings of
train.py that are given here go to each stage: --n_layer=2 --n_head=2 --n_embd=64 --block_size=64
try all of it on a CPU. Exit status: 1 if a stage has failed or ran out of time.

Stages that are named by a size take micro-batches apart, without and with a CUDA graph, in turns. A
micro-batch is forward pass, loss and backward pass, and adds to the gradients; its tokens are
random and on the device already. There is a line for each of the two after each round, with medians
so far, and at the end with a profile, which needs CUDA:

    wall       ms of a micro-batch in a row, without a wait in between
    busy       ms in which the device runs kernels; torch's table of them comes before
    gaps       wall less busy: the card waits for the CPU, and a graph gains no more than that
"""

import contextlib
import functools
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# The repository; Python adds only this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deskgpt.errors import ROOT, OneLineParser, one_line_errors, require_torch

require_torch()

import psutil
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities

import train
from bench import output
from bench.pretend_card import rows_of
from bench.speed import vocab_size_of, write_data
from configurator import configure
from deskgpt.checkpoint import Checkpoint
from deskgpt.compute import ComputeMode, seed_all
from deskgpt.cuda_graph import CudaGraph
from deskgpt.device import device_name, git_commit, resolve_device, synchronize, versions
from deskgpt.distributed import DistContext
from deskgpt.files import write_atomically
from deskgpt.launch import init_distributed
from deskgpt.resume import Start, build_model, choose_compute_and_batch
from model import GPTConfig

MOST_SHARES = 2  # of its share of the time, which no stage may exceed
PASSED = "passed"  # the last line of a stage's output
GRACE_S = 10.0  # in which a stage that is cut may end by itself: pytest prints what has failed
LINES_OF_PAGE = 60  # of each stage's output
WARM_UP = 4  # micro-batches, of which a graph records the third
ROUNDS = 3
PASSES = 12  # micro-batches of a round, in a row
PROFILED = 3  # micro-batches
ROWS_OF_PROFILE = 12

# ---- micro-batches -------------------------------------------------------------------------------


@dataclass
class Contestant:
    """A way to compute a micro-batch, and its measurements so far."""

    name: str
    run: Callable[[], Tensor]  # computes one and returns its loss
    wall_ms: list[float] = field(default_factory=list)  # by round
    busy_ms: float | None = None  # of a profile

    def measure(self, device: torch.device) -> None:
        """Add the time of a round."""
        for _ in range(2):
            self.run()
        synchronize(device)
        t0 = time.perf_counter()
        for _ in range(PASSES):
            self.run()
        synchronize(device)
        self.wall_ms.append((time.perf_counter() - t0) * 1e3 / PASSES)

    def figures(self) -> str:
        """Return the line of this contestant."""
        wall_ms = statistics.median(self.wall_ms)
        line = f"{self.name}: wall {wall_ms:.4g}"
        if self.busy_ms is not None:
            line += f", busy {self.busy_ms:.4g}, gaps {wall_ms - self.busy_ms:.4g}"
        return line


def our_start(
    c: train.TrainConfig, config: GPTConfig, dist: DistContext
) -> tuple[Start, ComputeMode]:
    """Return a new run's start, and how it computes, as train.py does with these settings."""
    start = Start("scratch", config, Checkpoint({}, {}))
    compute, _ = choose_compute_and_batch(replace(c, auto_batch=False), start, dist)
    return start, compute


def micro_batch(
    c: train.TrainConfig, tokens: Tensor, graph: bool, model: Any, compute: ComputeMode
) -> Callable[[], Tensor]:
    """Return a function that computes a micro-batch of tokens (B, T + 1).

    Raises RuntimeError if it is to be a graph and cannot be recorded.
    """
    scaler = torch.amp.GradScaler(tokens.device.type, enabled=compute.dtype == "float16")
    forward_backward = functools.partial(train.forward_backward, model, scaler, compute)
    graphed = CudaGraph(forward_backward, model, enabled=graph, on_refusal=print)
    inputs = tokens[:, :-1].contiguous()
    targets = tokens[:, 1:].contiguous()

    def run() -> Tensor:
        seed_all(c.seed, tokens.device)  # the loop of train.py does so, too
        return graphed(inputs, targets, 1 / c.gradient_accumulation_steps)["loss"]

    for _ in range(WARM_UP):
        run()
    if graph and not graphed.recordings:
        raise RuntimeError(f"no graph was recorded in {WARM_UP} passes")
    return run


def add_profile(x: Contestant, device: torch.device) -> None:
    """Print the kernels of some micro-batches. Add the ms in which those of one run."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            x.run()
        synchronize(device)
    found = profiler.key_averages()
    print(found.table("self_cuda_time_total", ROWS_OF_PROFILE, max_name_column_width=80))
    kernels = [e for e in found if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    x.busy_ms = sum(e.self_device_time_total for e in kernels) / 1e3 / PROFILED


def lab(given: list[str]) -> None:
    """Take micro-batches apart. given: settings of train.py.

    Without a graph if none can be recorded: then the exit status is 1.
    """
    c = configure(train.TrainConfig, given)
    dist = init_distributed(c.device, c.backend, c.dist_timeout_s)  # sets a stream for graphs
    device = dist.device
    config = c.model_config(vocab_size_of(c.dataset))
    seed_all(c.seed, device)
    tokens = torch.randint(config.vocab_size, (c.batch_size, c.block_size + 1)).to(device)
    start, compute = our_start(c, config, dist)
    model = build_model(c, start, compute, dist)
    running = [Contestant("ours", micro_batch(c, tokens, False, model, compute))]
    status = 0
    if device.type == "cuda":
        try:
            run = micro_batch(c, tokens, True, model, compute)
            running.append(Contestant("ours + graph", run))
        except Exception:  # ours goes on
            traceback.print_exc()
            status = 1
    for x in running:
        print(f"{x.name}: {compute}, loss {x.run().item()!r}")
    for _ in range(ROUNDS):
        for x in running:
            x.measure(device)
            print(x.figures())
    # At the end: a profiler may leave the CPU slower.
    if ProfilerActivity.CUDA in supported_activities():
        for x in running:
            add_profile(x, device)
            print(x.figures())
    sys.exit(status)


# ---- the page ------------------------------------------------------------------------------------


def number(text: str, line: str, name: str) -> str:
    """Return the number after `name` in the last of the lines of a text that begin with `line` and
    a colon; "n/a" if there is none.
    """
    found = re.findall(
        rf"^{re.escape(line)}: (?:.*\W)?{re.escape(name)} ([\d.]+)(?=[,; )]|$)", text, re.M
    )
    return found[-1] if found else "n/a"


def page_of(files: dict[str, Path], about: str) -> str:
    """Return the page about a card. files: by stage.

    The figures of the stages stand beside the predicted ones. Then comes the end of each output.
    """
    texts = {name: text_of(path) for name, path in files.items()}
    head, *rows = rows_of("predicted.txt")
    for row in rows:
        stage, line, name = row[:3]
        row.insert(3, number(texts[stage], line, name))
    table = output.markdown_table([*head[:3], "measured", *head[3:]], rows, left_columns=3)
    parts = [f"# {about}", "## Measured and predicted", table]
    for name, text in texts.items():
        *lines, outcome = text.splitlines()[-LINES_OF_PAGE:]
        parts += [f"## {name}: {outcome}", "\n".join(["```", *lines, "```"])]
    return "\n\n".join(parts) + "\n"


def text_of(path: Path) -> str:
    """Return a stage's output; its last line is the outcome."""
    return path.read_text(errors="replace") if path.exists() else "not run"


# ---- the command ---------------------------------------------------------------------------------


def run(command: list[str], path: Path, limit_s: float) -> str:
    """Run a command for at most limit_s, with its output in a file, whose last line is the outcome;
    return that.
    """
    with open(path, "w") as file:
        process = psutil.Popen(
            [sys.executable, "-u", *command], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            status = process.wait(limit_s)
            outcome = f"failed with exit status {status}" if status else PASSED
        except psutil.TimeoutExpired:
            outcome = f"cut after {limit_s:.0f} s"
            started = [process, *process.children(recursive=True)]
            process.send_signal(signal.SIGTERM if os.name == "nt" else signal.SIGINT)
            psutil.wait_procs([process], GRACE_S)
            for each in started:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        file.write(f"\n{outcome}\n")
    return outcome


def main() -> None:
    stages = {name: stage for name, *stage in rows_of("stages.txt")}
    parser = OneLineParser(__doc__)
    parser.add_argument(
        "--minutes", type=float, default=27.0, help="for all stages together (default: %(default)s)"
    )
    parser.add_argument("--peer", default="", help="as of bench/speed.py: nanogpt:PATH")
    parser.add_argument(
        "--only", nargs="+", choices=stages, help="stages to run, also if they have passed"
    )
    a, given = parser.parse_known_args()
    ends_at = time.monotonic() + 60 * a.minutes
    device = resolve_device(configure(train.TrainConfig, given).device)
    about = {"device": device_name(device), "versions": versions(), "git_commit": git_commit()}
    title = f"{about['device']}-torch-{torch.__version__}-{about['git_commit']}"
    folder = Path("out-qualify", re.sub(r"[^\w.+]+", "-", title.lower()).strip("-"))
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: folder / f"{name}.txt" for name in stages}
    passed = [name for name in stages if text_of(files[name]).endswith(f"\n{PASSED}\n")]
    todo = a.only or [name for name in stages if name not in passed]
    os.environ |= {"DESKGPT_TEST_DEVICE": str(device), "WANDB_MODE": "offline"}
    outcomes = dict.fromkeys(todo, "no time was left")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmp:
        tokens = Path(tmp, "tokens")
        write_data(tokens, vocab_size_of(""))
        values = {
            "given": shlex.join(given),
            "peer": shlex.quote(a.peer),
            "tokens": shlex.quote(str(tokens)),
        }
        for name in outcomes:
            share_s, command = stages[name]
            left_s = ends_at - time.monotonic()
            if left_s > 0:
                words = shlex.split(command.format(**values))
                outcomes[name] = run(words, files[name], min(left_s, MOST_SHARES * int(share_s)))
            print(f"{name}: {outcomes[name]}", flush=True)
            page = page_of(files, output.about(about))
            write_atomically(folder / "page.md", page.encode())
    print(f"the page: {folder / 'page.md'}")
    sys.exit(any(outcome != PASSED for outcome in outcomes.values()))


if __name__ == "__main__":
    with one_line_errors():
        main()
