"""Check and measure a card within some minutes, in the order of value, and write a page about it.

    python bench/qualify.py                                            # or: make qualify; at most 27 minutes
    python bench/qualify.py --minutes=9 --peer=nanogpt:../nanoGPT      # beside an unmodified nanoGPT
    python bench/qualify.py --only check tests                         # these stages, also if they have passed

Needs no data and no network. Each stage is a process of its own, whose output is kept as it comes in
out-qualify/NAME/STAGE.txt, also if it fails or runs out of time; page.md has the end of each. A later call for the same
device, torch and commit (DESKGPT_COMMIT, if there is no git) continues with the stages that have not passed. Without a
GPU everything runs on the CPU at toy sizes, and only shows that the code runs. Exit status: 1 if a stage has failed or
ran out of time.
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
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

import psutil
import torch
from torch.nn.attention import SDPBackend

import train
from bench import output
from bench.speed import ROOT, write_data
from configurator import build, read_settings
from deskgpt.run.log import git_commit, versions
from deskgpt.system import hardware, peaks
from deskgpt.system.errors import OneLineParser, one_line_errors
from deskgpt.system.files import write_atomically
from deskgpt.system.limits import usable_cores
from deskgpt.system.terminal import in_gib, in_tera
from deskgpt.system.wheels import answer
from model import GPT, GPTConfig

CONFIG = "config/train_fineweb_125m.py"
TOY = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64, "batch_size": 2, "gradient_accumulation_steps": 2}
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
        """Return whether a CPU computes: there is no card, or one that bench/pretend_card.py pretends."""
        return self.device.type != "cuda" or "DESKGPT_PRETEND_CARD" in os.environ

    @property
    def vocab_size(self) -> int:
        return 512 if self.is_toy else 50257

    def settings(self, config: str = CONFIG) -> list[str]:
        """Return settings of train.py, with micro-batches of 16 unless the config is for small models."""
        found: dict[str, Any] = {"device": self.device, "compile": not self.is_toy}
        if "125m" in config:
            found |= {"batch_size": 16, "gradient_accumulation_steps": 4}
        if self.is_toy:
            found |= TOY
        return [config, *(f"--{name}={value}" for name, value in found.items())]

    def speed(self, config: str, rounds: int, *more: str) -> list[str]:
        """Return a command of bench/speed.py."""
        n = 65 if config.endswith("_char.py") else self.vocab_size
        steps = ["--steps=3"] if self.is_toy else []
        return ["bench/speed.py", *self.settings(config), f"--vocab_size={n}", f"--rounds={rounds}", *steps, *more]


def stages(s: Session) -> dict[str, tuple[int, list[str]]]:
    """Return the stages by name, the most valuable first: each one's share of the time, and its command."""
    first = [*s.settings(), f"--dataset={s.tokens}", "--max_iters=8", "--eval_interval=8", "--eval_tokens=65536"]
    processes = 0 if s.is_toy else min(8, usable_cores() // 2)  # most of a test's time is compiling, on the host
    pytest = ["-m", "pytest", "tests/test_gpu.py", "-vv", "-rfEs", "--tb=long", f"-n={processes}", "-k"]
    quick = " and not compiled and not True" if s.is_toy else ""  # True: a test's parameter `compiled`
    others = [f"--peer=ours:{flag}" for flag in ("--compile=False", "--dtype=float32", "--activation_checkpoint=full")]
    grid = f"--grid=batch_size={2 if s.is_toy else '16,32,64'}"
    function = ["bench/qualify.py", f"--device={s.device}", "--function"]
    return {
        "facts": (60, [*function, "facts"]),
        "first": (190, ["train.py", *first, f"--out_dir={s.tokens}/first"]),  # what an owner of a card does first
        "check": (150, [*pytest, f"every_variant{quick}"]),
        "speed": (240, s.speed(CONFIG, 1, grid, *s.peer)),
        "predicted": (40, ["train.py", *s.settings(), f"--dataset={s.tokens}", "--dry_run=True"]),
        "sampling": (60, [*function, "sampling"]),
        "tests": (300, [*pytest, f"not every_variant{quick}"]),
        "fast": (120, s.speed("config/train_fineweb_125m_fast.py", 1)),
        "variants": (180, s.speed(CONFIG, 1, *others)),
        "char": (100, s.speed("config/train_shakespeare_char.py", 1, *s.peer)),
    }


# ---- stages that are functions -------------------------------------------------------------------------------


def facts(s: Session) -> None:
    """Print what the card is, and with which driver, libraries and kernels torch uses it."""
    print(f"{hardware.device_name(s.device)}, {in_gib(hardware.memory_bytes(s.device))} GiB")
    print(f"{versions()}, commit {git_commit()}")
    if s.device.type == "cuda":
        print(torch.cuda.get_device_properties(s.device), f"cuDNN {torch.backends.cudnn.version()}")
        print(answer("nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"))
    for name, dtype in hardware.DTYPES.items():
        keys = torch.zeros(1, 2, 64, 64, device=s.device, dtype=dtype).requires_grad_()  # (B, H, T, D)
        kernels = []
        for n in (64, 1):
            choice = torch._fused_sdp_choice(keys[:, :, :n], keys, keys, is_causal=n > 1)
            kernels.append(f"{SDPBackend(choice).name} for {n} queries")
        flops, source = peaks.peak_flops(s.device, name)
        print(f"{name}: {in_tera(flops)} TFLOP/s ({source}); attention: {', '.join(kernels)}")


def sampling(s: Session) -> None:
    """Print ms per token until its id is on the host: as sample.py writes, then without what makes that fast."""
    from deskgpt.generate.engine import InferenceEngine
    from deskgpt.kernels.kv_cache import KVCache

    c = build(train.TrainConfig, read_settings(train.TrainConfig, s.settings()))
    model = GPT(GPTConfig.from_settings(c, s.vocab_size)).to(s.device).eval()
    n = 16 if s.is_toy else 128
    for texts, what in ((1, "as sample.py"), (10, "as sample.py"), (1, "no graph"), (1, "no graph, torch's attention")):
        prompts = torch.arange(8, device=s.device).expand(texts, -1)
        engine = InferenceEngine(model, prompts, peaks.fast_dtype(s.device))
        kind = KVCache if "no graph" in what else engine.cache_type
        tokens = model.generate(prompts, n, top_k=200, cache=kind(c.block_size) if kind else None)
        mode = contextlib.nullcontext if "attention" in what else engine.mode
        times_ms = []
        for _ in range(n):
            t0 = time.perf_counter()
            with mode(), hardware.autocast(s.device, engine.dtype):
                next(tokens).tolist()
            times_ms.append((time.perf_counter() - t0) * 1e3)
        ms = f"{statistics.median(times_ms[4:]):.2f} ms per token, longest {max(times_ms[4:]):.1f}"
        print(f"{texts} texts, {engine.dtype}, {what}: {ms}", flush=True)


FUNCTIONS = {"facts": facts, "sampling": sampling}

# ---- the command ---------------------------------------------------------------------------------------------


def run(command: list[str], path: Path, limit_s: float) -> str:
    """Run a command for at most limit_s, with its output in a file, whose last line is the outcome; return that."""
    with open(path, "w") as file:
        process = subprocess.Popen([sys.executable, "-u", *command], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
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


def lines_of(path: Path) -> list[str]:
    """Return the last lines of a stage's output; the last one is its outcome."""
    return path.read_text(errors="replace").splitlines()[-LINES_OF_PAGE:] if path.exists() else ["not run"]


def main() -> None:
    parser = OneLineParser(__doc__)
    names = list(stages(Session(torch.device("cpu"))))
    parser.add_argument("--minutes", type=float, default=27.0, help="for all stages together (default: %(default)s)")
    parser.add_argument("--peer", action="append", default=[], help="as of bench/speed.py: nanogpt:PATH")
    parser.add_argument("--only", nargs="+", choices=names, help="stages to run, also if they have passed")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    parser.add_argument("--out_dir", default="out-qualify", help="folder of the results (default: %(default)s)")
    parser.add_argument("--function", choices=FUNCTIONS, help="a stage, in this process")
    a = parser.parse_args()
    ends_at = time.monotonic() + 60 * a.minutes
    s = Session(hardware.resolve_device(a.device), [f"--peer={peer}" for peer in a.peer])
    if a.function:
        torch.set_float32_matmul_precision("high")  # TF32, as train.py has it
        FUNCTIONS[a.function](s)
        return
    about = {"device": hardware.device_name(s.device), "versions": versions(), "git_commit": git_commit()}
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
        while todo and ends_at - time.monotonic() > LEAST_S:
            name = next(iter(todo))
            left_s = ends_at - time.monotonic()
            # Its share of the time, or what it takes on a fast card if that is more.
            share_s = todo[name][0]
            limit_s = min(left_s, max(share_s, left_s * share_s / sum(share for share, _ in todo.values())))
            _, command = todo.pop(name)
            print(f"{name}: {run(command, files[name], limit_s)}", flush=True)
    page = f"# {output.about(about)}\n"
    for name, path in files.items():
        *lines, outcome = lines_of(path)
        page += "\n".join([f"\n## {name}: {outcome}", "", "```", *lines, "```", ""])
    write_atomically(folder / "page.md", page.encode())
    print(f"the page: {folder / 'page.md'}" + (f"; no time was left for {', '.join(todo)}" if todo else ""))
    sys.exit(any(lines_of(files[name])[-1] != PASSED for name in due))


if __name__ == "__main__":
    with one_line_errors():
        main()
