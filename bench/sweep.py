"""Finds the fastest micro-batch at the same tokens per step, and what each costs; other settings can vary as well.

    python bench/sweep.py config/train_shakespeare_char_cpu.py
    python bench/sweep.py config/train_gpt2.py --grid batch_size=4,8,16 --grid compile=True,False --memory_gb 12
    python bench/sweep.py config/train_shakespeare_char.py --grid n_embd=384,768 --grid dtype=float32,bfloat16

Settings are those of train.py. --grid NAME=A,B,... tries each of these values; several --grid try every combination.
Without --grid, batch_size is halved and doubled. Accumulation follows from the batch size, so that a step keeps the
tokens that the config asks for. Each cell of the grid is train.py on random tokens in a process of its own, stopped
after some steps. The cells take turns, in another order each round. Every figure is from train.py's own log: step time,
tokens/s, MFU, data wait and peak memory, which is that of torch's allocator on CUDA and of the whole process elsewhere.
A cell that runs out of memory says so; on a CPU, a cell predicted to need more memory than there is does not start.

A compiled cell's first step, which compiles, does not count. --memory_gb 12 makes a larger CUDA card act as one of 12
GB, less the half GB or so that CUDA itself would take there.

Prints a table and the command with the fastest setting. Writes sweep.md, .json and, where matplotlib is installed, .png
(a heat map) to --out; --save NAME writes them to bench/results/DATE-NAME.* as well.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

import train
from bench import output, timing
from bench.heatmap import plot
from bench.output import markdown_table
from bench.timing import OURS, PYTHON, ROOT, Contestant, Failed, memory_cap, start_with, vocab_size_for, write_data
from configurator import build, read_settings
from data.token_files import read_meta
from data.tokenizer import padded_vocab_size
from deskgpt.compute.forms import clearly_fastest
from deskgpt.compute.runner import Form
from deskgpt.machine import hardware, peak_flops
from deskgpt.machine.errors import ConfigError, one_line_errors
from deskgpt.machine.words import clock
from deskgpt.predict.memory import Step, memory
from model import GPTConfig

SPLIT = ("batch_size", "gradient_accumulation_steps")
# Settings that the sweep gives to each run itself.
FIXED = {flag[2:].partition("=")[0] for flag in OURS} | {"dataset", "out_dir"}
# Cells that differ only in these train the same model on the same tokens: only such cells compete.
SAME_TRAINING = {*SPLIT, "compile", "dtype", "device"}
LARGEST_SHARE = 0.9  # of a machine's memory, for a cell on a CPU
DEFAULT_CELLS = 8


@dataclass
class Cell:
    """One combination of settings, with its run."""

    settings: dict[str, Any]  # micro-batch and accumulation, then what else the grid sets
    c: train.TrainConfig
    x: Contestant
    status: str = ""  # why there are no figures


# ---- the grid ------------------------------------------------------------------------------------------------


def read_grid(entries: list[str], c: train.TrainConfig) -> dict[str, list[Any]]:
    """The values of each setting in --grid, in its order. Raises ConfigError."""
    axes: dict[str, list[Any]] = {}
    for entry in entries:
        name, _, text = entry.partition("=")
        if not text:
            raise ConfigError(f"--grid {entry}: write it like --grid batch_size=4,8,16")
        values = [read_settings(train.TrainConfig, [f"--{name}={v}"])[name] for v in text.split(",")]
        if name in FIXED:
            raise ConfigError(f"--grid {entry}: the sweep sets {name} itself; leave it out")
        if name in axes or (name in SPLIT and axes.keys() & set(SPLIT)):
            raise ConfigError(f"--grid {entry}: give one --grid for {name} or what follows from it")
        axes[name] = list(dict.fromkeys(values))
    return axes or {"batch_size": default_batches(c.batch_size, c.gradient_accumulation_steps)}


def default_batches(batch_size: int, accumulation: int) -> list[int]:
    """Micro-batches that divide a step's sequences: batch_size halved and doubled, 1, and all of them.

    At most 8, those nearest to batch_size.
    """
    sequences = batch_size * accumulation
    exponents = range(-batch_size.bit_length(), sequences.bit_length())
    powers = [batch_size * 2.0**k for k in exponents]
    sizes = {1, sequences} | {int(b) for b in powers if b.is_integer() and sequences % b == 0}

    def distance(size: int) -> tuple[float, int]:
        return round(abs(math.log(size / batch_size)), 6), size

    return sorted(sorted(sizes, key=distance)[:DEFAULT_CELLS])


def split(c: train.TrainConfig, settings: dict[str, Any]) -> dict[str, int]:
    """Micro-batch and accumulation of a cell, with the tokens per step of c. Raises ConfigError where none fit."""
    tokens = c.batch_size * c.gradient_accumulation_steps * c.block_size
    if not settings.keys() & {*SPLIT, "block_size"}:
        return {name: getattr(c, name) for name in SPLIT}
    T = settings.get("block_size", c.block_size)
    if T < 1 or tokens % T:
        raise ConfigError(f"--grid block_size={T} does not divide the {tokens:,} tokens of a step; take one that does")
    sequences = tokens // T

    given, follows = SPLIT
    if "gradient_accumulation_steps" in settings:
        follows, given = SPLIT
    n = settings.get(given, getattr(c, given))
    if n < 1 or sequences % n:
        divisors = [d for d in range(1, sequences + 1) if sequences % d == 0]
        near = min(divisors, key=lambda d: abs(d - n))
        raise ConfigError(
            f"--grid: {given}={n} does not divide the {sequences} sequences of a step, {tokens:,} tokens; try {near}"
        )
    return {given: n, follows: sequences // n}


def make_cells(
    c: train.TrainConfig, given: list[str], axes: dict[str, list[Any]], folder: Path, memory_gb: float | None
) -> list[Cell]:
    """A cell for each combination, with its run's command. Raises ValueError."""
    base = {name: getattr(c, name) for name in c.__dataclass_fields__}
    cells = []
    for number, values in enumerate(itertools.product(*axes.values())):
        varied = dict(zip(axes, values, strict=True))
        sizes = split(c, varied)
        settings = {name: sizes[name] for name in SPLIT}
        settings |= {name: value for name, value in varied.items() if name not in SPLIT}
        config = build(train.TrainConfig, base | settings)
        cap = memory_cap(memory_gb, str(hardware.resolve_device(config.device)))
        command = [*PYTHON, *start_with(cap, "train.py"), *given, *OURS]
        command += [f"--{name}={value}" for name, value in settings.items()]
        command += [f"--dataset={folder}", f"--out_dir={folder}/{number}"]
        x = Contestant(cell_name(settings), command, ROOT)
        x.env["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/cache-{number}"
        cells.append(Cell(settings, config, x))
    return cells


def cell_name(settings: dict[str, Any]) -> str:
    """The settings but for the accumulation, which follows from the others."""
    return ", ".join(f"{name}={value}" for name, value in settings.items() if name != "gradient_accumulation_steps")


def predicted_bytes(c: train.TrainConfig, vocab_size: int) -> int:
    """Peak memory of a step of c, as predict/memory.py predicts it."""
    config = GPTConfig.from_settings(c, vocab_size)
    device = hardware.resolve_device(c.device)
    dtype = peak_flops.fast_dtype(device) if c.dtype == "auto" else c.dtype
    form = Form(dtype, c.compile is not False, checkpoint=c.activation_checkpoint)
    several = c.gradient_accumulation_steps > 1
    make = functools.partial(train.make_optimizer, c)
    parts = memory(Step(config, c.batch_size, form, device.type, several, make))
    return sum(parts.values())


def leave_out_too_large(cells: list[Cell], vocab_size: int) -> None:
    """Marks cells for which a CPU's memory is too small: there the whole machine would suffer, not just the run."""
    for cell in cells:
        device = hardware.resolve_device(cell.c.device)
        limit = hardware.memory_bytes(device) if device.type == "cpu" else None
        if limit:
            needed = predicted_bytes(cell.c, vocab_size)
            if needed > LARGEST_SHARE * limit:
                cell.status = f"predicted {needed / 2**30:.1f} GiB of {limit / 2**30:.1f}: not run"
                print(f"{cell.x.name}: {cell.status}", flush=True)


# ---- the runs ------------------------------------------------------------------------------------------------


def measure(cells: list[Cell], rounds: int, steps: int, seconds: float) -> None:
    """Runs the cells in turns. A cell that fails gets its reason as status and is left out of later rounds.

    Ctrl-C ends with what is measured by then.
    """
    taken = {cell.x.name: steps for cell in cells}
    announced = False
    for number in range(rounds):
        alive = [cell for cell in cells if not cell.status]
        order = random.Random(number).sample(alive, len(alive))  # so that no drift of the machine favours a cell
        for place, cell in enumerate(order):
            x = cell.x
            t0 = time.perf_counter()
            try:
                taken[x.name] = timing.run(x, taken[x.name], seconds)  # later rounds take as many steps
            except Failed as e:
                cell.status = e.reason
                print(f"round {number + 1}, {x.name}: {e.reason}", flush=True)
                continue
            except KeyboardInterrupt:
                print(f"interrupted in round {number + 1}", flush=True)
                for other in cells:
                    if not other.status and not other.x.rounds_ms:
                        other.status = "interrupted"
                return
            print(f"round {number + 1}, {x.name}: {statistics.median(x.rounds_ms[-1]):.4g} ms/step", flush=True)
            if not announced:
                left_s = (time.perf_counter() - t0) * (len(order) * rounds - place - 1)
                print(f"about {clock(left_s)} more, if the others take as long as this one", flush=True)
                announced = True


# ---- figures -------------------------------------------------------------------------------------------------


def figures(cell: Cell) -> dict[str, Any]:
    """A row: the settings of a cell and, where it has any, its figures."""
    x = cell.x
    row: dict[str, Any] = {"settings": cell.settings, "status": cell.status}
    if cell.status:
        return row
    start = x.start
    times = x.step_ms()
    by_round = [start["tokens_per_step"] / statistics.median(of_round) * 1e3 for of_round in x.rounds_ms]
    tokens_per_s = start["tokens_per_step"] / times["ms"] * 1e3
    copied = ("dtype", "compiled", "tokens_per_step", "flops_per_token", "peak_flops", "peak_source")
    return (
        row
        | {name: start[name] for name in copied}
        | {
            **times,
            "tokens_per_s": tokens_per_s,
            "least": min(by_round),
            "most": max(by_round),
            "mfu": tokens_per_s * start["flops_per_token"] / start["peak_flops"],
            "memory_gb": max(x.logged_bytes) / 1e9 if x.logged_bytes else None,
            "data_wait": statistics.mean(x.data_waits),
            "rounds_ms": x.rounds_ms,
        }
    )


def as_markdown(rows: list[dict[str, Any]]) -> str:
    names = list(rows[0]["settings"])
    # A dtype of the grid has its column among the settings.
    facts = ["compiled"] if "dtype" in names else ["dtype", "compiled"]
    head = [*names, *facts, "tokens/step", "ms/step (p10, p90)", "tokens/s (rounds)", "MFU", "peak memory", "data wait"]
    body = []
    for r in rows:
        cells = [str(value) for value in r["settings"].values()]
        if r["status"]:
            cells += [""] * (len(facts) + 1)
            cells.append(r["status"])
            cells += [""] * (len(head) - len(cells))
        else:
            if "dtype" in facts:
                cells.append(r["dtype"])
            cells += figure_cells(r)
        body.append(cells)
    return markdown_table(head, body)


def figure_cells(r: dict[str, Any]) -> list[str]:
    """From "compiled" to "data wait"."""
    return [
        "yes" if r["compiled"] else "no",
        f"{r['tokens_per_step']:,}",
        f"{r['ms']:.4g} ({r['p10']:.4g}, {r['p90']:.4g})",
        f"{r['tokens_per_s']:,.0f} ({r['least']:,.0f} to {r['most']:,.0f})",
        f"{r['mfu']:.1%}",
        "n/a" if r["memory_gb"] is None else f"{r['memory_gb']:.2f} GB",
        f"{r['data_wait']:.1%}",
    ]


# ---- recommendations -----------------------------------------------------------------------------------------


def recommend(rows: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """(the row to take, why): of the cells that no other clearly beats, the one with the least memory."""
    by_memory = sorted(rows, key=lambda row: (row["memory_gb"] or 0.0, -row["tokens_per_s"]))
    chosen = by_memory[clearly_fastest({i: 1 / row["tokens_per_s"] for i, row in enumerate(by_memory)})]
    fastest = max(rows, key=lambda row: row["tokens_per_s"])
    if chosen is fastest:
        return chosen, "the fastest"
    behind = 1 - chosen["tokens_per_s"] / fastest["tokens_per_s"]
    less = (fastest["memory_gb"] or 0.0) - (chosen["memory_gb"] or 0.0)
    return chosen, f"{behind:.1%} slower than the fastest, with {less:.2f} GB less memory"


def as_command(given: list[str], c: train.TrainConfig, settings: dict[str, Any]) -> str:
    """train.py's command line with these settings instead of the given ones, and as many tokens in an evaluation."""
    if not c.eval_tokens and settings["batch_size"] != c.batch_size:
        settings = settings | {"eval_iters": max(1, round(c.eval_iters * c.batch_size / settings["batch_size"]))}
    kept = [word for word in given if word.removeprefix("--").partition("=")[0] not in settings]
    flags = [f"--{name}={value}" for name, value in settings.items()]
    return shlex.join(["python", "train.py", *kept, *flags])


def recommendations(rows: list[dict[str, Any]], given: list[str], c: train.TrainConfig) -> list[tuple[str, str]]:
    """(command, why) for each model and kind of training among the rows that have figures."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for r in rows:
        if not r["status"]:
            kind = ", ".join(f"{name}={value}" for name, value in r["settings"].items() if name not in SAME_TRAINING)
            groups.setdefault(kind, []).append(r)
    out = []
    for kind, group in groups.items():
        row, why = recommend(group)
        if c.compile == "auto" and row["compiled"] and "compile" not in row["settings"]:
            why += "; measured compiled, as compile=auto compiles a long run"
        out.append((as_command(given, c, row["settings"]), f"{kind}: {why}" if kind else why))
    return out


# ---- script --------------------------------------------------------------------------------------------------


def read_arguments() -> tuple[argparse.Namespace, list[str]]:
    """(our own arguments, those of train.py). Raises ValueError."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grid", action="append", default=[], metavar="NAME=A,B", help="values of a setting")
    parser.add_argument("--steps", type=int, default=0, help="of each run; 0 = as many as --seconds take, at least 3")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run's steps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory_gb", type=float, help="let a CUDA card act as one with this many GB (2^30 bytes)")
    parser.add_argument("--vocab_size", type=int, default=0, help="0 = 65 for a dataset named *_char, else 50257")
    parser.add_argument("--out", type=Path, default=ROOT / "out-sweep", metavar="FOLDER")
    parser.add_argument("--save", metavar="NAME", help="write bench/results/DATE-NAME.md, .json and .png as well")
    a, given = parser.parse_known_args()
    output.check_name(a.save)
    if a.rounds < 1 or not 0 < a.seconds < math.inf or (a.steps and a.steps < timing.LEAST_STEPS) or a.steps < 0:
        least = f"at least one round and {timing.LEAST_STEPS} steps, and more than 0 seconds"
        raise ConfigError(f"--rounds {a.rounds} --steps {a.steps} --seconds {a.seconds:g}: {least}")
    return a, given


def run_cells(a: argparse.Namespace, given: list[str], c: train.TrainConfig, axes: dict[str, list[Any]]) -> list[Cell]:
    """Runs all cells. Raises ValueError where none has figures."""
    # inductor's processes may still be ending when the folder is removed
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmp:
        folder = Path(tmp) / "data"
        write_data(folder, a.vocab_size or vocab_size_for(c.dataset))
        cells = make_cells(c, given, axes, folder, a.memory_gb)
        meta = read_meta(folder)
        leave_out_too_large(cells, padded_vocab_size(meta["tokenizer"], meta["vocab_size"]))
        each = f"{a.steps} steps" if a.steps else f"about {a.seconds:g} s of steps, {timing.LEAST_STEPS} at least,"
        tokens = c.batch_size * c.gradient_accumulation_steps * c.block_size
        print(f"{len(cells)} cells x {a.rounds} rounds, each with {each} of {tokens:,} tokens", flush=True)
        measure(cells, a.rounds, a.steps, a.seconds)
    if all(cell.status for cell in cells):
        raise ValueError(f"no cell has figures; {cells[0].x.name}: {cells[0].status}")
    return cells


def as_text(
    rows: list[dict[str, Any]], starts: list[dict[str, Any]], advice: list[tuple[str, str]], memory_gb: float | None
) -> str:
    """The page without its heading. starts: the first log events of the cells that have figures."""
    measured = [r for r in rows if not r["status"]]
    peaks = dict.fromkeys(f"{r['peak_flops'] / 1e12:.2f} TFLOP/s ({r['peak_source']})" for r in measured)
    rounds = max(len(r["rounds_ms"]) for r in measured)
    about = f"{output.about(*starts)}. MFU refers to {' and '.join(peaks)}. {len(rows)} cells, {rounds} rounds."
    if memory_gb:
        about += f" The card acts as one of {memory_gb:g} GB."
    text = f"{about}\n\n```sh\n{output.command_line('sweep.py')}\n```\n\n{as_markdown(rows)}\n"
    for line, why in advice:
        text += f"\nRecommended ({why}):\n\n```sh\n{line}\n```\n"
    return text


def main() -> None:
    a, given = read_arguments()
    c = build(train.TrainConfig, read_settings(train.TrainConfig, given))
    axes = read_grid(a.grid, c)
    a.out.mkdir(parents=True, exist_ok=True)  # if that is impossible, fail before the runs, not after them
    drawn = find_spec("matplotlib") is not None
    if not drawn:
        print("no heat map: pip install matplotlib")

    cells = run_cells(a, given, c, axes)
    rows = [figures(cell) for cell in cells]
    starts = [cell.x.start for cell in cells if not cell.status]
    advice = recommendations(rows, given, c)
    text = as_text(rows, starts, advice, a.memory_gb)
    result = {
        "command": output.command_line("sweep.py"),
        "date": time.strftime("%Y-%m-%d"),
        "machine": starts[0]["device"],
        "versions": starts[0]["versions"],
        "commit": starts[0]["git_commit"],
        "memory_gb": a.memory_gb,
        "rows": rows,
        "recommended": [{"command": line, "why": why} for line, why in advice],
    }
    print("\n" + text.replace("```sh\n", "").replace("```\n", ""), end="")

    model = f"{c.n_layer} layers" if "n_embd" in axes else f"{c.n_layer} layers, {c.n_embd} wide"
    tokens = c.batch_size * c.gradient_accumulation_steps * c.block_size
    title = f"{model}, {tokens:,} tokens per step\n{starts[0]['device']}"

    def draw(path: Path) -> None:
        plot(rows, path, title)

    output.write_results(a.out, "sweep", f"# Sweep\n\n{text}", result, draw if drawn else None)
    print(f"\nwritten to {a.out}: sweep.md, sweep.json{', sweep.png' if drawn else ''}")
    if a.save:
        output.save(a.save, f"# Sweep: {a.save}\n\n{text}", result, draw if drawn else None)


if __name__ == "__main__":
    os.environ.setdefault("WANDB_MODE", "offline")
    with one_line_errors():
        main()
