"""Step speed of train.py with given settings, of other settings and of other programs, timed in turns.

    python bench/speed.py config/train_shakespeare_char_cpu.py --peer nanogpt:../nanoGPT
    python bench/speed.py config/train_gpt2.py --grid batch_size                 # which micro-batch is fastest here
    python bench/speed.py config/train_gpt2.py --grid batch_size=4,8,16 --grid compile=True,False

Settings are those of train.py. Each contestant is a real run on random tokens that is stopped after some steps; they
take turns for --rounds rounds, in another order each round. Figures are from train.py's own log. The peers:

    nanogpt:PATH          its unmodified train.py: on a CPU in float32 and not compiled, on CUDA in bfloat16 and
                          compiled, as its README has it
    ours:"--key=value"    train.py with other settings
    checkout:PATH         train.py of another checkout of deskGPT, such as the commit before a change

--grid NAME=A,B,... tries each of these values, several --grid every combination; --grid batch_size halves and doubles
it. Accumulation follows from the batch size, so that a step keeps the tokens that the config asks for. Prints a table
in Markdown, whose rows name the settings to take.
"""

from __future__ import annotations

import itertools
import os
import shlex
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

import train
from bench import output, timing
from bench.timing import ENDLESS, LEAST_STEPS, OURS, PYTHON, Contestant
from configurator import build, read_settings
from deskgpt.system import hardware
from deskgpt.system.errors import ConfigError, OneLineParser, one_line_errors
from model import MODERN_CHOICES

# Settings that make the work the same, and that nanoGPT's train.py knows too.
SIZES = ("n_layer", "n_head", "n_embd", "dropout", "bias", "batch_size", "block_size", "gradient_accumulation_steps")
SHARED = (*SIZES, "learning_rate", "weight_decay", "beta1", "beta2", "grad_clip")
# What a grid cannot vary, because each run gets it from here.
FIXED = {flag[2:].partition("=")[0] for flag in OURS} | {"dataset", "out_dir", "gradient_accumulation_steps"}


# ---- peers ---------------------------------------------------------------------------------------------------


def peer_of(text: str, c: train.TrainConfig, given: list[str], folder: Path) -> Contestant:
    """The contestant that --peer names. Raises ConfigError."""
    kind, _, what = text.partition(":")
    if kind == "ours" and what:
        return timing.ours(what, [*given, *shlex.split(what)], folder)
    if kind not in ("nanogpt", "checkout"):
        raise ConfigError(f"--peer {text}: not nanogpt:PATH, ours:'--key=value' or checkout:PATH")
    checkout = Path(what).expanduser().resolve()
    if not (checkout / "train.py").is_file():
        project = "nanoGPT" if kind == "nanogpt" else "deskGPT"
        raise ConfigError(f"--peer {text}: {checkout} holds no train.py; name a checkout of {project}")
    if kind == "checkout":
        return timing.ours(text, given, folder, checkout)
    default = train.TrainConfig()
    for name in (*MODERN_CHOICES, "optimizer"):
        value = getattr(c, name)
        if value not in (getattr(default, name), "gelu"):  # both GELUs pass as the same work
            raise ConfigError(
                f"--peer {text} has no {name}={value}: its work would not be the same; leave out the peer, or take "
                f"--{name}={getattr(default, name)}"
            )
    device = hardware.resolve_device(c.device)
    on_cpu = device.type == "cpu"
    known = {"compiled": not on_cpu, "dtype": "float32" if on_cpu else "bfloat16"}
    settings = {name: getattr(c, name) for name in SHARED}
    settings |= {"device": device, "compile": known["compiled"], "dtype": known["dtype"]}
    flags = [f"--{name}={value}" for name, value in settings.items()]
    flags += [*ENDLESS, f"--dataset={folder}", f"--out_dir={folder}/nanogpt"]
    return Contestant("nanoGPT", [*PYTHON, "train.py", *flags], checkout, start=known)


# ---- the grid ------------------------------------------------------------------------------------------------


def cells_of(entries: list[str], c: train.TrainConfig, given: list[str], folder: Path) -> list[Contestant]:
    """A run for each combination of the values in --grid. Raises ConfigError."""
    axes: dict[str, list[Any]] = {}
    for entry in entries:
        name, _, text = entry.partition("=")
        if not text and name != "batch_size":
            raise ConfigError(f"--grid {entry}: write it like --grid batch_size=4,8,16")
        if name in FIXED or name in axes:
            raise ConfigError(f"--grid {entry}: each run or another --grid sets {name}; leave it out")
        texts = text.split(",") if text else map(str, micro_batches(c.batch_size, c.gradient_accumulation_steps))
        values = [read_settings(train.TrainConfig, [f"--{name}={value}"])[name] for value in texts]
        axes[name] = list(dict.fromkeys(values))
    runs = []
    for chosen in itertools.product(*axes.values()):
        settings = dict(zip(axes, chosen, strict=True))
        settings["gradient_accumulation_steps"] = accumulation(c, settings)
        build(train.TrainConfig, asdict(c) | settings)  # raises ConfigError where they do not go together
        flags = [f"--{name}={value}" for name, value in settings.items()]
        runs.append(timing.ours(" ".join(flags), [*given, *flags], folder))
    return runs


def micro_batches(batch_size: int, accumulation: int) -> list[int]:
    """batch_size, halved and doubled up to four times, where it divides a step's sequences."""
    sequences = batch_size * accumulation
    sizes = [batch_size * 2.0**k for k in range(-4, 5)]
    return [int(size) for size in sizes if size.is_integer() and sequences % size == 0]


def accumulation(c: train.TrainConfig, settings: dict[str, Any]) -> int:
    """Micro-batches of a step with the tokens of c. Raises ConfigError where its micro-batch does not divide them."""
    tokens = c.batch_size * c.gradient_accumulation_steps * c.block_size
    batch_size = settings.get("batch_size", c.batch_size)
    block_size = settings.get("block_size", c.block_size)
    if min(batch_size, block_size) < 1 or tokens % (batch_size * block_size):
        raise ConfigError(
            f"--grid: batch_size={batch_size} times block_size={block_size} does not divide the {tokens:,} tokens of "
            "a step; take values that do"
        )
    return tokens // (batch_size * block_size)


# ---- script --------------------------------------------------------------------------------------------------


def main() -> None:
    parser = OneLineParser(str(__doc__))
    parser.add_argument("--peer", action="append", default=[], help="see above; may be given several times")
    parser.add_argument("--grid", action="append", default=[], metavar="NAME=A,B", help="values of a setting")
    parser.add_argument("--steps", type=int, default=0, help="of each run; 0 = as many as take 10 seconds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocab_size", type=int, default=0, help="0 = 65 for a dataset named *_char, else 50257")
    a, given = parser.parse_known_args()
    if a.rounds < 1 or a.steps < 0 or 0 < a.steps < LEAST_STEPS:
        raise ConfigError(f"--rounds {a.rounds} --steps {a.steps}: at least one round and {LEAST_STEPS} steps")
    c = build(train.TrainConfig, read_settings(train.TrainConfig, given))
    with timing.random_tokens(a.vocab_size or (65 if c.dataset.endswith("_char") else 50257)) as folder:
        runs = cells_of(a.grid, c, given, folder) if a.grid else [timing.ours("deskGPT", given, folder)]
        runs += [peer_of(text, c, given, folder) for text in a.peer]
        timing.in_turns(runs, a.rounds, a.steps)
    rows = timing.table(runs)
    starts = [x.start for x in runs if "device" in x.start]
    sizes = {name: getattr(c, name) for name in SIZES}
    print(f"\n{output.about(*starts)}. {timing.peaks_in_words(rows)}. {a.rounds} rounds.\n\n{sizes}\n")
    print(f"    {output.command_line('speed.py')}\n\n{timing.as_markdown(rows)}")


if __name__ == "__main__":
    os.environ.setdefault("WANDB_MODE", "offline")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl+C; else the run that is timed would train on
    with one_line_errors():
        main()
