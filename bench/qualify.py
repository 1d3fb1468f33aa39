"""Check and measure a card within some minutes, in the order of value, and write a page about it.

    python bench/qualify.py  # or: make qualify; at most 27 minutes
    python bench/qualify.py --minutes=9 --peer=nanogpt:../nanoGPT  # beside an unmodified nanoGPT
    python bench/qualify.py --only check tests  # these stages, also if they have passed

Needs no data and no network. Each stage is a process of its own, whose output is kept as it comes
in out-qualify/NAME/STAGE.txt, also if it fails or runs out of time. page.md has what was measured
beside what had been predicted, what explains it, and the end of each output; it is written anew
after each stage. A later call for the same device, torch and commit (DESKGPT_COMMIT, if there is no
git) continues with the stages that have not passed. Without a GPU everything runs on the CPU at toy
sizes, and only shows that the code runs. Exit status: 1 if a stage has failed or ran out of time.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# The repository; Python adds only this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import train
from bench import output
from bench.speed import ROOT, write_data
from configurator import build, read_settings
from deskgpt import peaks
from deskgpt.check_model import TOLERANCE, gradient_errors, loss_and_gradients
from deskgpt.compute import ComputeMode, apply_compute, autocast, default_dtype
from deskgpt.device import DTYPES, device_name, git_commit, memory_bytes, resolve_device, versions
from deskgpt.errors import OneLineParser, in_gib, in_tera, one_line_errors
from deskgpt.files import write_atomically
from deskgpt.limits import usable_cores
from deskgpt.wheels import run_briefly
from model import GPT, GPTConfig

CONFIG = "config/train_fineweb_125m.py"
CHAR = "config/train_shakespeare_char.py"
TOY = {
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 64,
    "block_size": 64,
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
}
PASSED = "passed"  # the last line of a stage's output
LEAST_S = 10.0  # with less time left, no stage begins
GRACE_S = 10.0  # in which a stage that is cut may end by itself: pytest prints what has failed
LINES_OF_PAGE = 60  # of each stage's output


@dataclass
class Session:
    """What the stages share."""

    device: torch.device
    peer: list[str] = field(default_factory=list)  # such as --peer=nanogpt:PATH
    tokens: str = ""  # folder of random tokens

    @property
    def is_toy(self) -> bool:
        """Return whether a CPU computes: there is no card, or one that bench/pretend_card.py
        pretends.
        """
        return self.device.type != "cuda" or "DESKGPT_PRETEND_CARD" in os.environ

    @property
    def vocab_size(self) -> int:
        return 512 if self.is_toy else 50257

    def settings(self, config: str = CONFIG) -> list[str]:
        """Return settings of train.py, with micro-batches of 16 unless the config is for small
        models.
        """
        found: dict[str, Any] = {"device": self.device, "compile": not self.is_toy}
        if "125m" in config:
            found |= {"batch_size": 16, "gradient_accumulation_steps": 4}
        if self.is_toy:
            found |= TOY
        return [config, *(f"--{name}={value}" for name, value in found.items())]

    def lab(self, config: str, *more: str) -> list[str]:
        """Return a command of bench/lab.py."""
        toy = [f"--vocab_size={self.vocab_size}", "--passes=3"] if self.is_toy else []
        return ["bench/lab.py", *self.settings(config), *self.peer, *toy, *more]

    def speed(self, config: str, rounds: int, *more: str) -> list[str]:
        """Return a command of bench/speed.py."""
        n = 65 if config.endswith("_char.py") else self.vocab_size
        steps = ["--steps=3"] if self.is_toy else []
        return [
            "bench/speed.py",
            *self.settings(config),
            f"--vocab_size={n}",
            f"--rounds={rounds}",
            *steps,
            *more,
        ]


def stages(s: Session) -> dict[str, tuple[int, list[str]]]:
    """Return the stages by name, the most valuable first: each one's share of the time, and its
    command.

    The shares of those up to sampling are nine minutes.
    """
    first = [
        *s.settings(),
        f"--dataset={s.tokens}",
        "--max_iters=8",
        "--eval_interval=8",
        "--eval_tokens=65536",
    ]
    # Most of a test's time is compiling, on the host.
    processes = 0 if s.is_toy else min(8, usable_cores() // 2)
    files = ["tests/test_gpu.py", "tests/test_cuda_graph.py"]
    pytest = ["-m", "pytest", *files, "-vv", "-rfEs", "--tb=long", f"-n={processes}", "-k"]
    # True: a test's parameter `compiled`
    quick = " and not compiled and not True" if s.is_toy else ""
    others = [
        f"--peer=ours:{flag}"
        for flag in ("--compile=False", "--dtype=float32", "--activation_checkpoint=full")
    ]
    others.append("--peer=ours:--cuda_graph=False")
    function = ["bench/qualify.py", f"--device={s.device}", "--function"]
    sizes = (2, 4) if s.is_toy else (32, 64)
    return {
        "facts": (15, [*function, "facts"]),
        "right": (75, [*pytest, f"(every_variant or with_graphs){quick}"]),
        "gradients": (20, [*function, "gradients"]),
        "16x1024": (130, s.lab(CONFIG, "--more")),
        "64x256": (55, s.lab(CHAR)),
        "64x1024": (85, s.lab(CONFIG, f"--batch_size={sizes[1]}")),
        "typed": (90, s.speed(CONFIG, 1, *s.peer)),
        "typed-char": (40, s.speed(CHAR, 1, *s.peer)),
        "sampling": (30, [*function, "sampling"]),
        # What an owner of a card does first.
        "first": (190, ["train.py", *first, f"--out_dir={s.tokens}/first"]),
        "predicted": (40, ["train.py", *s.settings(), f"--dataset={s.tokens}", "--dry_run=True"]),
        "sizes": (120, s.speed(CONFIG, 1, f"--grid=batch_size={sizes[0]},{sizes[1]}")),
        "tests": (300, [*pytest, f"not every_variant and not with_graphs{quick}"]),
        "fast": (120, s.speed("config/train_fineweb_125m_fast.py", 1)),
        "settings": (220, s.speed(CONFIG, 1, *others)),
    }


# ---- stages that are functions -------------------------------------------------------------------


def facts(s: Session) -> None:
    """Print what the card is, and with which driver, libraries and kernels torch uses it."""
    print(f"{device_name(s.device)}, {in_gib(memory_bytes(s.device))} GiB")
    print(f"{versions()}, commit {git_commit()}")
    if s.device.type == "cuda":
        print(torch.cuda.get_device_properties(s.device), f"cuDNN {torch.backends.cudnn.version()}")
        print(
            run_briefly(
                "nvidia-smi",
                "--query-gpu=driver_version,clocks.max.sm,power.limit",
                "--format=csv,noheader",
            )[1]
        )
    for name, dtype in DTYPES.items():
        # (B, H, T, D)
        keys = torch.zeros(1, 2, 1024, 64, device=s.device, dtype=dtype).requires_grad_()
        kernels = []
        for n in (1024, 1):
            choice = torch._fused_sdp_choice(keys[:, :, :n], keys, keys, is_causal=n > 1)
            kernels.append(f"{SDPBackend(choice).name} for {n} queries")
        flops, source = peaks.peak_flops(s.device, name)
        print(f"{name}: {in_tera(flops)} TFLOP/s ({source}); attention: {', '.join(kernels)}")


def gradients(s: Session) -> None:
    """Compare the gradients of 64 x 1024 tokens with flash attention's.

    Raises ValueError if they differ.

    Others report NaN of cuDNN's attention from 65,536 tokens on, which auto_batch takes on cards of
    80 GB.
    """
    c = build(train.TrainConfig, read_settings(train.TrainConfig, s.settings()))
    model = GPT(GPTConfig.from_settings(c, s.vocab_size)).to(s.device)
    dtype = default_dtype(s.device)
    # As compiled, but faster
    variant = ComputeMode(dtype, residual_dtype="bfloat16" if dtype == "bfloat16" else "float32")
    apply_compute(model, variant)
    rows = 4 if s.is_toy else 64
    tokens = torch.randint(s.vocab_size, (rows, c.block_size + 1)).to(s.device)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    try:
        loss, found = loss_and_gradients(model, variant, *batch)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            expected_loss, expected = loss_and_gradients(model, variant, *batch)
    except torch.OutOfMemoryError:
        print(
            f"{rows} x {c.block_size} does not fit into the memory of this card, so no run takes it"
        )
        return
    errors = gradient_errors(found, expected)
    worst = max(errors, key=errors.__getitem__)
    line = (
        f"{rows} x {c.block_size}, {dtype}: loss {loss!r}, with flash attention "
        f"{expected_loss!r}; the gradient of "
    )
    line += f"{worst} differs most, by {errors[worst]:.2g}"
    if not errors[worst] <= TOLERANCE[dtype].gradient:
        raise ValueError(f"{line}, at most {TOLERANCE[dtype].gradient:g}")
    print(line)


def sampling(s: Session) -> None:
    """Print ms per token until its id is on the host: as sample.py writes, then without what makes
    that fast.
    """
    from deskgpt.engine import InferenceEngine
    from deskgpt.kv_cache import KVCache

    c = build(train.TrainConfig, read_settings(train.TrainConfig, s.settings()))
    model = GPT(GPTConfig.from_settings(c, s.vocab_size)).to(s.device).eval()
    n = 16 if s.is_toy else 128
    for texts, what in (
        (1, "as sample.py"),
        (10, "as sample.py"),
        (1, "no graph"),
        (1, "no graph, torch's attention"),
    ):
        prompts = torch.arange(8, device=s.device).expand(texts, -1)
        engine = InferenceEngine(model, prompts, default_dtype(s.device))
        kind = KVCache if "no graph" in what else engine.cache_type
        tokens = model.generate(prompts, n, top_k=200, cache=kind(c.block_size) if kind else None)
        mode = contextlib.nullcontext if "attention" in what else engine.mode
        times_ms = []
        for _ in range(n):
            t0 = time.perf_counter()
            with mode(), autocast(s.device, engine.dtype):
                next(tokens).tolist()
            times_ms.append((time.perf_counter() - t0) * 1e3)
        ms = (
            f"median {statistics.median(times_ms[4:]):.2f} ms per token, longest "
            f"{max(times_ms[4:]):.1f}"
        )
        print(f"{texts} texts, {engine.dtype}, {what}: {ms}", flush=True)


FUNCTIONS = {"facts": facts, "gradients": gradients, "sampling": sampling}

# ---- what had been predicted ---------------------------------------------------------------------

Range = tuple[float, float]


class Predicted(NamedTuple):
    """A figure that a stage prints in a line, and what had been predicted of it, by card."""

    stage: str
    line: str  # it begins so, up to a colon
    figure: str  # the word before it
    by_card: dict[str, Range | str]


# Predicted on 2026-11-28, before any card had run a graph: for an H200 by the bytes and launches
# that were counted and by what it had shown the day before; for an H100 from that, at 0.95 of its
# speed of matmuls and 0.7 of its bandwidth. ms; "16x1024" and "64x1024" are micro-batches of
# GPT-2's 124M, "64x256" of shakespeare_char.
PREDICTED = [
    Predicted(
        "facts", "bfloat16", "attention:", {"H200": "CUDNN_ATTENTION", "H100": "CUDNN_ATTENTION"}
    ),
    Predicted("16x1024", "nanoGPT", "wall", {"H200": (26.6, 26.6), "H100": (31.0, 31.0)}),
    Predicted("16x1024", "ours", "wall", {"H200": (25.0, 30.0), "H100": (29.0, 33.0)}),
    Predicted("16x1024", "ours", "alone", {"H200": (28.5, 28.5)}),
    Predicted("16x1024", "ours", "queueing", {"H200": (15.0, 18.0), "H100": (15.0, 18.0)}),
    Predicted("16x1024", "ours", "busy", {"H200": (24.5, 26.0), "H100": (28.0, 30.0)}),
    Predicted("16x1024", "ours", "kernels", {"H200": (560, 560), "H100": (560, 560)}),
    # Below 24 with the loss's logits at once and weights that are cast once a step.
    Predicted("16x1024", "ours + graph", "wall", {"H200": (24.0, 26.5), "H100": (28.0, 30.5)}),
    Predicted("16x1024", "ours + graph", "gaps", {"H200": (0.3, 0.6), "H100": (0.3, 0.6)}),
    Predicted("16x1024", "nanoGPT + graph", "wall", {"H200": (26.3, 26.3), "H100": (30.7, 30.7)}),
    Predicted("64x256", "nanoGPT", "wall", {"H200": (7.0, 9.0), "H100": (7.0, 9.0)}),
    Predicted("64x256", "ours", "wall", {"H200": (8.0, 8.8), "H100": (8.0, 8.8)}),
    Predicted("64x256", "ours + graph", "wall", {"H200": (3.0, 3.4), "H100": (3.4, 4.0)}),
    Predicted("64x256", "ours + graph", "busy", {"H200": (2.9, 3.2), "H100": (3.3, 3.7)}),
    Predicted("64x1024", "nanoGPT", "wall", {"H200": (102.0, 105.0), "H100": (118.0, 122.0)}),
    Predicted("64x1024", "ours", "wall", {"H200": (98.0, 103.0), "H100": (110.0, 116.0)}),
    Predicted("64x1024", "ours + graph", "wall", {"H200": (96.0, 100.0), "H100": (108.0, 113.0)}),
    Predicted(
        "typed", "round 1, nanoGPT", "then", {"H200": (109.0, 109.0), "H100": (126.0, 128.0)}
    ),
    Predicted(
        "typed", "round 1, deskGPT", "then", {"H200": (103.5, 106.0), "H100": (116.0, 122.0)}
    ),
    Predicted("typed", "round 1, deskGPT", "after", {"H200": (19.0, 19.0), "H100": (19.0, 19.0)}),
    Predicted("typed-char", "round 1, nanoGPT", "then", {"H200": (9.5, 11.0), "H100": (9.5, 11.0)}),
    Predicted("typed-char", "round 1, deskGPT", "then", {"H200": (3.6, 4.6), "H100": (4.0, 5.2)}),
    Predicted(
        "sampling",
        "1 texts, bfloat16, as sample.py",
        "median",
        {"H200": (1.7, 1.7), "H100": (1.7, 2.1)},
    ),
]
# What is to be reached: times as fast as nanoGPT, by stage, and the lines of both.
AIMS = {"16x1024": 1.15, "64x256": 2.0, "64x1024": 1.08}
MAX_BUSY_MS = {"H200": 27.0}  # of ours at 16x1024: above it, kernels are what is slow
MIN_IDLE_MS = 1.0  # a graph can gain no more than what the card idles without one


def figure(text: str, line: str, name: str) -> str | None:
    """Return the word after `name` in the last of the lines of a text that begin with `line` and a
    colon.
    """
    found = re.findall(
        rf"^{re.escape(line)}: (?:.*\W)?{re.escape(name)} ([\w.]+)(?=[,; )]|$)", text, re.M
    )
    return found[-1] if found else None


def number(text: str, line: str, name: str) -> float | None:
    found = figure(text, line, name)
    return None if found is None else float(found)


def comparison(texts: dict[str, str], card: str) -> str:
    """Return a table of what stages printed (texts, by stage) beside what had been predicted for a
    card.
    """
    rows = []
    for stage, line, name, by_card in PREDICTED:
        expected = by_card.get(card)
        if expected is None:
            continue
        found = figure(texts[stage], line, name)
        if isinstance(expected, str):
            wanted, outcome = expected, "as predicted" if found == expected else "not as predicted"
        else:
            low, high = expected
            wanted = f"{low:g}" if low == high else f"{low:g} to {high:g}"
            outcome = "" if found is None else deviation(float(found), low, high)
        rows.append([stage, line, name, found or "n/a", wanted, outcome if found else ""])
    head = ["stage", "line", "figure", "measured", f"predicted, {card}", ""]
    return output.markdown_table(head, rows, left_columns=3)


def deviation(found: float, low: float, high: float) -> str:
    """Return in words where a figure lies beside its range."""
    if found < low:
        return f"{1 - found / low:.0%} below"
    return f"{found / high - 1:.0%} above" if found > high else "within"


def explanations(texts: dict[str, str], card: str) -> list[str]:
    """Return sentences: which explanation of the speed holds, by what the stages printed."""
    said = []
    for stage, aim in AIMS.items():
        text = texts[stage]
        wall, busy = number(text, "ours", "wall"), number(text, "ours", "busy")
        graph, peer = number(text, "ours + graph", "wall"), number(text, "nanoGPT", "wall")
        peer_busy = number(text, "nanoGPT", "busy")
        losses = figure(text, "ours", "loss"), figure(text, "ours + graph", "loss")
        if None not in losses and losses[0] != losses[1]:
            said.append(
                f"{stage}: WRONG: the loss is {losses[0]} without and {losses[1]} with a graph."
            )
        if wall is None:
            said.append(f"{stage}: not measured.")
            continue
        if busy is None:
            said.append(f"{stage}: no profile, so nothing tells an idle card from slow kernels.")
        else:
            idle = wall - busy
            if stage == "16x1024" and busy > MAX_BUSY_MS.get(card, float("inf")):
                said.append(
                    f"{stage}: busy {busy:.1f} ms, above {MAX_BUSY_MS[card]:g}: kernels. "
                    "Matmuls above 16.5 ms mean layout or clocks, Triton's above 4.5 ms "
                    "those of the norms."
                )
            elif peer_busy is not None and busy > peer_busy:
                said.append(
                    f"{stage}: kernels: ours take {busy:.1f} ms, nanoGPT's {peer_busy:.1f}."
                )
            if idle < MIN_IDLE_MS:
                said.append(
                    f"{stage}: wall less busy is {idle:.1f} ms without a graph: a graph "
                    "gains nothing here."
                )
            else:
                said.append(
                    f"{stage}: without a graph the card waits for the CPU, {idle:.1f} of "
                    f"{wall:.1f} ms."
                )
        if graph is not None:
            said.append(f"{stage}: a graph takes {wall - graph:.2f} of {wall:.2f} ms away.")
        if peer is not None:
            ratios = f"{peer / wall:.2f} times as fast without a graph"
            if graph is not None:
                ratios += f", {peer / graph:.2f} with one"
            said.append(f"{stage}: beside nanoGPT {ratios}; the aim is {aim:g}.")
    for stage in ("typed", "typed-char"):
        ours, peer = (
            number(texts[stage], f"round 1, {name}", "then") for name in ("deskGPT", "nanoGPT")
        )
        if ours is not None and peer is not None:
            said.append(f"{stage}: a step is {peer / ours:.2f} times as fast as nanoGPT's.")
    return said


# ---- the command ---------------------------------------------------------------------------------


def run(command: list[str], path: Path, limit_s: float) -> str:
    """Run a command for at most limit_s, with its output in a file, whose last line is the outcome;
    return that.
    """
    with open(path, "w") as file:
        process = subprocess.Popen(
            [sys.executable, "-u", *command], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            status = process.wait(limit_s)
            outcome = f"failed with exit status {status}" if status else PASSED
        except subprocess.TimeoutExpired:
            outcome = f"cut after {limit_s:.0f} s"
            started = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM if os.name == "nt" else signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            process.kill()
            for child in started:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
    with open(path, "a") as file:
        file.write(f"\n{outcome}\n")
    return outcome


def page_of(files: dict[str, Path], about: dict[str, Any], is_toy: bool) -> str:
    """Return the page about a card. files: by stage."""
    texts = {
        name: path.read_text(errors="replace") if path.exists() else ""
        for name, path in files.items()
    }
    card = "H100" if "H100" in about["device"] else "H200"
    page = f"# {output.about(about)}\n\n## Measured and predicted\n\n"
    if is_toy:
        page += "A CPU computed toy sizes: nothing of this table says anything about a card.\n\n"
    elif card not in about["device"]:
        page += (
            f"Nothing was predicted for this card; the {card}'s figures stand beside its own.\n\n"
        )
    page += comparison(texts, card) + "\n\n## What explains it\n\n"
    page += "".join(f"- {sentence}\n" for sentence in explanations(texts, card))
    for name, path in files.items():
        *lines, outcome = lines_of(path)
        page += "\n".join([f"\n## {name}: {outcome}", "", "```", *lines, "```", ""])
    return page


def lines_of(path: Path) -> list[str]:
    """Return the last lines of a stage's output; the last one is its outcome."""
    return (
        path.read_text(errors="replace").splitlines()[-LINES_OF_PAGE:]
        if path.exists()
        else ["not run"]
    )


def main() -> None:
    parser = OneLineParser(__doc__)
    names = list(stages(Session(torch.device("cpu"))))
    parser.add_argument(
        "--minutes", type=float, default=27.0, help="for all stages together (default: %(default)s)"
    )
    parser.add_argument(
        "--peer", action="append", default=[], help="as of bench/speed.py: nanogpt:PATH"
    )
    parser.add_argument(
        "--only", nargs="+", choices=names, help="stages to run, also if they have passed"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    parser.add_argument(
        "--out_dir", default="out-qualify", help="folder of the results (default: %(default)s)"
    )
    parser.add_argument("--function", choices=FUNCTIONS, help="a stage, in this process")
    a = parser.parse_args()
    ends_at = time.monotonic() + 60 * a.minutes
    s = Session(resolve_device(a.device), [f"--peer={peer}" for peer in a.peer])
    if a.function:
        torch.set_float32_matmul_precision("high")  # TF32, as train.py has it
        FUNCTIONS[a.function](s)
        return
    about = {"device": device_name(s.device), "versions": versions(), "git_commit": git_commit()}
    name = f"{about['device']}-torch-{torch.__version__}-{about['git_commit']}"
    folder = Path(a.out_dir) / re.sub(r"[^\w.+]+", "-", name.lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: folder / f"{name}.txt" for name in names}
    due = a.only or [name for name in names if lines_of(files[name])[-1] != PASSED]
    os.environ |= {"DESKGPT_TEST_DEVICE": str(s.device), "WANDB_MODE": "offline"}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmp:
        s.tokens = f"{tmp}/tokens"
        write_data(Path(s.tokens), s.vocab_size)
        todo = {name: stage for name, stage in stages(s).items() if name in due}
        while True:
            write_atomically(folder / "page.md", page_of(files, about, s.is_toy).encode())
            left_s = ends_at - time.monotonic()
            if not todo or left_s <= LEAST_S:
                break
            name = next(iter(todo))
            # Its share of the time, or what it takes on a fast card if that is more.
            share_s = todo[name][0]
            limit_s = min(
                left_s, max(share_s, left_s * share_s / sum(share for share, _ in todo.values()))
            )
            _, command = todo.pop(name)
            print(f"{name}: {run(command, files[name], limit_s)}", flush=True)
    print(
        f"the page: {folder / 'page.md'}"
        + (f"; no time was left for {', '.join(todo)}" if todo else "")
    )
    sys.exit(any(lines_of(files[name])[-1] != PASSED for name in due))


if __name__ == "__main__":
    with one_line_errors():
        main()
