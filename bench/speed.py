"""Time steps of train.py with given settings, of other settings and of other programs, in turns;
and their start.

    python bench/speed.py config/train_shakespeare_char_cpu.py --peer nanogpt:../nanoGPT
    # their start
    python bench/speed.py config/train_gpt2.py --peer nanogpt:../nanoGPT --seconds=0 --rounds=5
    # which micro-batch is fastest here
    python bench/speed.py config/train_gpt2.py --grid batch_size=6,12,24
    python bench/speed.py config/train_gpt2.py --grid compile=True,False

Settings are those of train.py. Each contestant is a process of its own on random tokens, which is
stopped after some steps; they take turns for --rounds rounds, each second one backwards. A step is
timed from the arrival of the line before to the arrival of its own, whatever time a program prints:
nanoGPT stops its clock before it waits for the card. Ctrl+C prints what has been measured so far.
The first step is timed from the command on, with all imports, compiling and an evaluation of one
batch; --seconds=0 is for that: few steps in a round. The first round may build kernels, so
take the median of several. The tokens' vocabulary is 65 for a dataset named *_char, else 50304. The
peers:

    nanogpt:PATH          its unmodified train.py: on a CPU in float32 and not compiled, as its
                          README has it; on CUDA compiled and in bfloat16, or float16 on older cards
    ours:"--key=value"    train.py with other settings
    checkout:PATH         train.py of another checkout of deskGPT, such as the last commit

--grid NAME=A,B,... tries each of these values of a setting. Accumulation follows from the batch
size, so that a step keeps the tokens that the config asks for. Prints a table in Markdown, whose
rows name the settings to take.
"""

import itertools
import os
import pickle
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The repository; Python adds only this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deskgpt.errors import ROOT, ConfigError, OneLineParser, one_line_errors, require_torch

require_torch()

import numpy as np

import train
from bench import output
from configurator import configure
from deskgpt.compiling import default_dtype
from deskgpt.device import resolve_device
from deskgpt.logger import read_events
from model import MODERN_CHOICES, NANOGPT_ARGS

PYTHON = [sys.executable, "-u"]  # unbuffered, because nanoGPT does not flush its lines
LEAST_STEPS = 3  # in a round; the first step does not count
LINES_OF_FAILURE = 30  # of the output of a run that fails
ITER = re.compile(r"iter \d+: loss \S+, time [\d.]+ms")

# Settings of a run with more steps than anyone waits for: it is stopped. nanoGPT's train.py knows
# these too. compile=auto takes it for a long run.
ENDLESS = [
    "--max_iters=1000000",
    "--eval_interval=1000000",
    "--eval_iters=1",
    "--log_interval=1",
    "--wandb_log=False",
]
# Our train.py needs these in addition.
OURS = [*ENDLESS, "--eval_tokens=0", "--init_from=scratch", "--auto_batch=False"]
# Settings that make the work the same, and that nanoGPT's train.py knows too.
SHARED = [
    *(name for name in NANOGPT_ARGS if name != "vocab_size"),
    "batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "weight_decay",
    "beta1",
    "beta2",
    "grad_clip",
]


@dataclass
class BenchRun:
    """A program that is timed, and the measurements of its rounds so far."""

    name: str
    command: list[str]
    cwd: Path
    out_dir: Path | None = None  # with a log.jsonl; a peer has none
    status: str = ""  # why there are no figures
    # Our log's first event, or what is known of a peer.
    start: dict[str, Any] = field(default_factory=dict)
    # A list for each round, of all its steps but the first ones.
    rounds_ms: list[list[float]] = field(default_factory=list)
    # A number for each round: from the command to the end of the first step.
    first_s: list[float] = field(default_factory=list)

    def ms_per_token(self) -> list[float]:
        """Return the time of a step's tokens by round."""
        return [statistics.median(ms) / self.start["tokens_per_step"] for ms in self.rounds_ms]


def ours(
    name: str, given: Sequence[str], folder: Path, own: Sequence[str] = (), cwd: Path = ROOT
) -> BenchRun:
    """Return train.py of the checkout cwd on the tokens in folder.

    given: settings of all runs; own: of this one, which come last.
    """
    out_dir = folder / "runs" / re.sub(r"\W+", "-", name)
    folders = [f"--dataset={folder}", f"--out_dir={out_dir}"]
    return BenchRun(name, [*PYTHON, "train.py", *given, *OURS, *folders, *own], cwd, out_dir)


def peer_of(text: str, c: train.TrainConfig, given: list[str], folder: Path) -> BenchRun:
    """Return the contestant that --peer names. Raises ConfigError."""
    kind, _, what = text.partition(":")
    if kind == "ours":
        return ours(what, given, folder, shlex.split(what))
    checkout = Path(what).expanduser().resolve()
    if kind not in ("nanogpt", "checkout") or not (checkout / "train.py").is_file():
        raise ConfigError(
            f"--peer {text}: not ours:'--key=value', nor nanogpt:PATH or checkout:PATH of a folder "
            "with a train.py"
        )
    if kind == "checkout":
        return ours(text, given, folder, cwd=checkout)
    return nanogpt(c, folder, checkout)


def nanogpt(c: train.TrainConfig, folder: Path, checkout: Path) -> BenchRun:
    """Return nanoGPT's train.py with the same work as ours with c. Raises ConfigError if c has what
    nanoGPT lacks.
    """
    default = train.TrainConfig()
    for name in (*MODERN_CHOICES, "optimizer"):
        value = getattr(c, name)
        if value not in (getattr(default, name), "gelu"):  # both GELUs pass as the same work
            raise ConfigError(f"nanoGPT has no {name}={value}; leave out the peer, or this setting")
    device = resolve_device(c.device)
    on_cpu = device.type == "cpu"
    known = {"compiled": not on_cpu, "dtype": "float32" if on_cpu else default_dtype(device)}
    flags = [f"--{name}={getattr(c, name)}" for name in SHARED]
    flags += [f"--device={device}", f"--compile={known['compiled']}", f"--dtype={known['dtype']}"]
    flags += [*ENDLESS, f"--dataset={folder}", f"--out_dir={folder}/nanogpt"]
    return BenchRun("nanoGPT", [*PYTHON, "train.py", *flags], checkout, start=known)


def grid_of(text: str, c: train.TrainConfig, given: list[str], folder: Path) -> list[BenchRun]:
    """Return a run for each value of --grid NAME=A,B,..., with c's sequences per step, as far as a
    micro-batch divides them.
    """
    name, _, values = text.partition("=")
    sequences = c.batch_size * c.gradient_accumulation_steps
    runs = []
    for value in values.split(","):
        own = [f"--{name}={value}"]
        if name == "batch_size":
            own.append(f"--gradient_accumulation_steps={sequences // int(value)}")
        runs.append(ours(" ".join(own), given, folder, own))
    return runs


# ---- runs ----------------------------------------------------------------------------------------


def vocab_size_of(dataset: str) -> int:
    """Return the usual vocabulary of a data set with this name."""
    return 65 if dataset.endswith("_char") else 50304


def write_data(folder: Path, vocab_size: int) -> None:
    """Write random tokens, which make the same work as real ones, in files that both nanoGPT and
    deskGPT read.
    """
    folder.mkdir()
    draw = np.random.default_rng(0)
    for split, n in (("train", 1 << 20), ("val", 1 << 16)):
        draw.integers(0, min(vocab_size, 50257), n, np.uint16).tofile(folder / f"{split}.bin")
    if vocab_size < 50000:  # without this file both take GPT-2's vocabulary, of 50304 rows
        (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab_size}))


def in_turns(runs: Sequence[BenchRun], rounds: int, seconds: float) -> None:
    """Run the contestants in turns.

    One that fails gets its reason as status and is left out of later rounds.
    """
    for number in range(rounds):
        running = [x for x in runs if not x.status]
        # Each second round backwards, so that no drift of the machine favours one of them.
        for x in running[::-1] if number % 2 else running:
            run(x, seconds)
            outcome = x.status
            if not outcome:
                ms = statistics.median(x.rounds_ms[-1])
                outcome = f"first step after {x.first_s[-1]:.2f} s, then {ms:.4g} ms/step"
            print(f"round {number + 1}, {x.name}: {outcome}", flush=True)


def run(x: BenchRun, seconds: float) -> None:
    """Run one round: start x, add its first step and the times of the others to x, and stop it
    after so many seconds of steps, at least LEAST_STEPS. If x ends earlier, its status says why.
    """
    lines: deque[str] = deque([""], maxlen=LINES_OF_FAILURE)
    instants = [time.perf_counter()]  # of the command, then of each step's line
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(x.command, cwd=x.cwd, text=True, errors="replace", **pipes) as process:
        try:
            for line in process.stdout or ():
                lines.append(line.strip() or lines[-1])
                if ITER.search(line):
                    instants.append(time.perf_counter())
                if len(instants) > LEAST_STEPS and instants[-1] - instants[1] >= seconds:
                    break
            else:
                x.status = f"failed with exit status {process.wait()}: {lines[-1]}"
                print(*lines, sep="\n    ", flush=True)
                return
        finally:
            process.kill()
    x.first_s.append(instants[1] - instants[0])
    times_ms = [(after - before) * 1e3 for before, after in itertools.pairwise(instants[1:])]
    still_allocate = min(10, len(times_ms) // 5)  # the first steps
    x.rounds_ms.append(times_ms[still_allocate:])
    if x.out_dir:
        x.start = read_events(x.out_dir / "log.jsonl")[0]


# ---- figures -------------------------------------------------------------------------------------

HEAD = [
    "",
    "dtype",
    "compiled",
    "tokens/step",
    "ms/step",
    "tokens/s",
    "MFU",
    "first step after (rounds)",
    "time per token / first",
]


def table(runs: Sequence[BenchRun]) -> str:
    """Return a row for each contestant. Raises ValueError if none of ours has figures."""
    measured = [x for x in runs if x.rounds_ms and not x.status]
    first = next((x for x in measured if "peak_flops" in x.start), None)  # a peer does not log it
    if first is None:
        raise ValueError(f"no run has figures; {runs[0].name}: {runs[0].status}")
    rows = []
    for x in runs:
        x.start = first.start | x.start  # what a peer does not log is as in the first one
        cells = [x.status or "not measured", *[""] * (len(HEAD) - 2)]
        rows.append([x.name, *(figures_of(x, first) if x in measured else cells)])
    return output.markdown_table(HEAD, rows, left_columns=3)


def figures_of(x: BenchRun, first: BenchRun) -> list[str]:
    """Return the cells of a contestant, beside the first one, from rounds taken in turns."""
    tokens = x.start["tokens_per_step"]
    ms = statistics.median(itertools.chain(*x.rounds_ms))
    pairs = zip(x.ms_per_token(), first.ms_per_token(), strict=False)
    ratios = [own / of_first for own, of_first in pairs]
    mfu = x.start["flops_per_token"] * tokens / ms * 1e3 / x.start["peak_flops"]
    return [
        x.start["dtype"],
        str(x.start["compiled"]),
        f"{tokens:,}",
        f"{ms:.4g}",
        f"{tokens / ms * 1e3:,.0f}",
        f"{mfu:.1%}",
        f"{statistics.median(x.first_s):.2f} s ({min(x.first_s):.2f} to {max(x.first_s):.2f})",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
    ]


def main() -> None:
    parser = OneLineParser(__doc__)
    parser.add_argument(
        "--peer", action="append", default=[], help="see above; may be given several times"
    )
    parser.add_argument("--grid", default="", metavar="NAME=A,B", help="values of a setting")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of a round's steps (default: %(default)s)"
    )
    a, given = parser.parse_known_args()
    c = configure(train.TrainConfig, given)
    # inductor's processes may still be ending when the folder is removed
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmp:
        folder = Path(tmp) / "data"
        write_data(folder, vocab_size_of(c.dataset))
        runs = grid_of(a.grid, c, given, folder) if a.grid else [ours("deskGPT", given, folder)]
        runs += [peer_of(text, c, given, folder) for text in a.peer if text]
        try:
            in_turns(runs, a.rounds, a.seconds)
        finally:  # Ctrl+C, too
            text = table(runs)
            print(f"\n{output.about(runs[0].start)}. {a.rounds} rounds.\n")
            print(f"    {shlex.join(['python', *sys.argv])}\n\n{text}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("WANDB_MODE", "offline")
    # SIGTERM ends it as Ctrl+C does; else the run that is timed would train on.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with one_line_errors():
        main()
