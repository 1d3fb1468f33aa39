"""Check and measure a card within some minutes, in the order of value, and write a page about it.

    python bench/qualify.py  # or: make qualify; at most 27 minutes
    python bench/qualify.py --minutes=9 --peer=nanogpt:../nanoGPT  # beside an unmodified nanoGPT
    python bench/qualify.py --only right tests  # these stages, also if they have passed

Needs no data and no network. Each stage is a process of its own, whose output is kept as it comes
in out-qualify/NAME/STAGE.txt, also if it fails or runs out of time. page.md has what was measured
beside what had been predicted (predicted.txt), what explains it, and the end of each output; it is
written anew after each stage. A later call for the same device, torch and commit (DESKGPT_COMMIT,
if there is no git) continues with the stages that have not passed. Without a GPU everything runs on
the CPU at toy sizes, and only shows that the code runs. Exit status: 1 if a stage has failed or ran
out of time.
"""

from __future__ import annotations

import contextlib
import math
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

# The repository; Python adds only this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import torch

import train
from bench import output
from bench.speed import ROOT, vocab_size_of, write_data
from configurator import configure
from deskgpt.compute import default_dtype
from deskgpt.device import device_name, git_commit, resolve_device, versions
from deskgpt.errors import OneLineParser, one_line_errors
from deskgpt.files import write_atomically
from deskgpt.limits import usable_cores
from model import GPT, GPTConfig

CONFIG = "config/train_fineweb_125m.py"
CHAR = "config/train_shakespeare_char.py"
# Settings of GPT-2's 124M on a card, and of a model for a CPU that stands in for one.
SIXTEEN = ["--batch_size=16", "--gradient_accumulation_steps=4"]
TOY = [
    "--n_layer=2",
    "--n_head=2",
    "--n_embd=64",
    "--block_size=64",
    "--batch_size=2",
    "--gradient_accumulation_steps=2",
]
PREDICTED = ROOT / "bench" / "predicted.txt"
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

    def vocab_size(self, config: str = CONFIG) -> int:
        return 512 if self.is_toy else vocab_size_of(config.removesuffix(".py"))

    def settings(self, config: str = CONFIG) -> list[str]:
        """Return settings of train.py."""
        sizes = TOY if self.is_toy else SIXTEEN if "125m" in config else []
        return [config, f"--device={self.device}", f"--compile={not self.is_toy}", *sizes]

    def command(self, script: str, config: str, *more: str) -> list[str]:
        """Return a command of bench/lab.py or bench/speed.py."""
        few = {"lab": ["--passes=3"], "speed": ["--steps=3"]}[script] if self.is_toy else []
        vocab_size = f"--vocab_size={self.vocab_size(config)}"
        return [f"bench/{script}.py", *self.settings(config), vocab_size, *few, *more]


def stages(s: Session) -> dict[str, tuple[int, list[str]]]:
    """Return the stages by name, the most valuable first: each one's share of the time, and its
    command.

    The shares of those up to sampling are nine minutes.
    """
    # Most of a test's time is compiling, on the host.
    processes = 0 if s.is_toy else min(8, usable_cores() // 2)
    files = ["tests/test_gpu.py", "tests/test_cuda_graph.py"]
    pytest = ["-m", "pytest", *files, "-vv", "-rfEs", "--tb=long", f"-n={processes}", "-k"]
    # True: a test's parameter `compiled`
    quick = " and not compiled and not True" if s.is_toy else ""
    right = "every_variant or with_graphs or many_tokens"
    sampling = f"from bench import qualify; qualify.sampling({str(s.device)!r})"
    run = ["train.py", *s.settings(), f"--dataset={s.tokens}", f"--out_dir={s.tokens}/first"]
    eight = ["--max_iters=8", "--eval_interval=8", "--eval_tokens=65536"]
    small, large = (2, 4) if s.is_toy else (32, 64)
    others = [
        "--peer=ours:--compile=False",
        "--peer=ours:--dtype=float32",
        "--peer=ours:--activation_checkpoint=full",
        "--peer=ours:--cuda_graph=False",
    ]
    return {
        "facts": (15, ["-m", "torch.utils.collect_env"]),
        "right": (95, [*pytest, f"({right}){quick}"]),
        "16x1024": (130, s.command("lab", CONFIG, *s.peer)),
        "64x256": (55, s.command("lab", CHAR, *s.peer)),
        "64x1024": (85, s.command("lab", CONFIG, *s.peer, f"--batch_size={large}")),
        "typed": (90, s.command("speed", CONFIG, "--rounds=1", *s.peer)),
        "typed-char": (40, s.command("speed", CHAR, "--rounds=1", *s.peer)),
        "sampling": (30, ["-c", sampling]),
        # What an owner of a card does first.
        "first": (190, [*run, *eight]),
        "predicted": (40, [*run, "--dry_run=True"]),
        "sizes": (
            120,
            s.command("speed", CONFIG, "--rounds=1", f"--grid=batch_size={small},{large}"),
        ),
        "tests": (300, [*pytest, f"not ({right}){quick}"]),
        "fast": (120, s.command("speed", "config/train_fineweb_125m_fast.py", "--rounds=1")),
        "settings": (220, s.command("speed", CONFIG, "--rounds=1", *others)),
    }


def sampling(device_name: str) -> None:
    """Print ms per token until its id is on the host, of one text and of ten, as sample.py writes
    them.
    """
    from deskgpt.engine import GenerationConfig, InferenceEngine, generate

    torch.set_float32_matmul_precision("high")  # TF32, as sample.py has it
    device = torch.device(device_name)
    s = Session(device)
    c = configure(train.TrainConfig, s.settings())
    model = GPT(GPTConfig.from_settings(c, s.vocab_size())).to(device).eval()
    n = 16 if s.is_toy else 128
    for texts in (1, 10):
        prompts = torch.arange(8, device=device).expand(texts, -1)
        engine = InferenceEngine(model, prompts, default_dtype(device))
        assert engine.cache_type is not None
        cache = engine.cache_type(c.block_size)
        tokens = generate(model, prompts, GenerationConfig(max_new_tokens=n), cache=cache)
        times_ms = []
        for _ in range(n):
            t0 = time.perf_counter()
            with engine.mode():
                next(tokens).tolist()
            times_ms.append((time.perf_counter() - t0) * 1e3)
        ms = f"median {statistics.median(times_ms[4:]):.2f} ms per token"
        print(f"{texts} texts, {engine.dtype}: {ms}, longest {max(times_ms[4:]):.1f}", flush=True)


# ---- the page ------------------------------------------------------------------------------------

# Times as fast as nanoGPT is to be reached, by stage.
AIMS = {"16x1024": 1.15, "64x256": 2.0, "64x1024": 1.08}
EXPLAINED = [
    "stage",
    "idle without a graph, ms",
    "a graph takes away, ms",
    "kernels beside nanoGPT's, ms",
    "times as fast as nanoGPT",
    "with a graph",
    "aim",
    "loss with a graph less without",
]
LEGEND = """Idle is wall less busy: the card waits for the CPU, and a graph gains no more than that.
Where our kernels take longer than nanoGPT's, they are what is slow. A loss that a graph changes is
WRONG."""


def number(text: str, line: str, name: str) -> float:
    """Return the number after `name` in the last of the lines of a text that begin with `line` and
    a colon; NaN if there is none.
    """
    found = re.findall(
        rf"^{re.escape(line)}: (?:.*\W)?{re.escape(name)} ([\d.]+)(?=[,; )]|$)", text, re.M
    )
    return float(found[-1]) if found else math.nan


def shown(x: float) -> str:
    return "n/a" if math.isnan(x) else f"{x:.4g}"


def comparison(texts: dict[str, str]) -> str:
    """Return a table of what stages printed (texts, by stage) beside what had been predicted."""
    head, *rows = output.text_table(PREDICTED)
    for row in rows:
        stage, line, name = row[:3]
        row.insert(3, shown(number(texts[stage], line, name)))
    return output.markdown_table([*head[:3], "measured", *head[3:]], rows, left_columns=3)


def explanation(texts: dict[str, str]) -> str:
    """Return a table of what explains the speed of micro-batches, by what the stages printed."""
    rows = []
    for stage, aim in AIMS.items():
        text = texts[stage]
        wall = number(text, "ours", "wall")
        busy = number(text, "ours", "busy")
        with_graph = number(text, "ours + graph", "wall")
        nanogpt = number(text, "nanoGPT", "wall")
        figures = [
            wall - busy,
            wall - with_graph,
            busy - number(text, "nanoGPT", "busy"),
            nanogpt / wall,
            nanogpt / with_graph,
            aim,
            number(text, "ours + graph", "loss") - number(text, "ours", "loss"),
        ]
        rows.append([stage, *map(shown, figures)])
    return output.markdown_table(EXPLAINED, rows, left_columns=1)


def page_of(files: dict[str, Path], about: str, is_toy: bool) -> str:
    """Return the page about a card. files: by stage."""
    texts = {name: text_of(path) for name, path in files.items()}
    parts = [f"# {about}", "## Measured and predicted"]
    if is_toy:
        parts.append("A CPU computed toy sizes: this table says nothing about a card.")
    parts += [comparison(texts), "## What explains it", explanation(texts), LEGEND]
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
    a = parser.parse_args()
    ends_at = time.monotonic() + 60 * a.minutes
    s = Session(resolve_device(a.device), [f"--peer={peer}" for peer in a.peer])
    about = {"device": device_name(s.device), "versions": versions(), "git_commit": git_commit()}
    title = f"{about['device']}-torch-{torch.__version__}-{about['git_commit']}"
    folder = Path(a.out_dir) / re.sub(r"[^\w.+]+", "-", title.lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: folder / f"{name}.txt" for name in names}
    passed = [name for name in names if text_of(files[name]).endswith(f"\n{PASSED}\n")]
    todo = a.only or [name for name in names if name not in passed]
    os.environ |= {"DESKGPT_TEST_DEVICE": str(s.device), "WANDB_MODE": "offline"}
    outcomes = dict.fromkeys(todo, "no time was left")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmp:
        s.tokens = f"{tmp}/tokens"
        write_data(Path(s.tokens), s.vocab_size())
        due = {name: stage for name, stage in stages(s).items() if name in todo}
        rest_s = sum(share_s for share_s, _ in due.values())
        for name, (share_s, command) in due.items():
            left_s = ends_at - time.monotonic()
            if left_s > LEAST_S:
                # Its share of the time, or what it takes on a fast card if that is more.
                limit_s = min(left_s, max(share_s, left_s * share_s / rest_s))
                outcomes[name] = run(command, files[name], limit_s)
            rest_s -= share_s
            print(f"{name}: {outcomes[name]}", flush=True)
            page = page_of(files, output.about(about), s.is_toy)
            write_atomically(folder / "page.md", page.encode())
    print(f"the page: {folder / 'page.md'}")
    sys.exit(any(outcome != PASSED for outcome in outcomes.values()))


if __name__ == "__main__":
    with one_line_errors():
        main()
