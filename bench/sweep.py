"""Finds the fastest micro-batch at the same tokens per step, and what each costs; other settings can vary as well.

    python bench/sweep.py config/train_shakespeare_char_cpu.py
    python bench/sweep.py config/train_gpt2.py --grid batch_size=4,8,16 --grid compile=True,False
    python bench/sweep.py config/train_shakespeare_char.py --grid n_embd=384,768 --grid dtype=float32,bfloat16

Settings are those of train.py. --grid NAME=A,B,... tries each of these values; several --grid try every combination.
Without --grid, batch_size is halved and doubled. Accumulation follows from the batch size, so that a step keeps the
tokens that the config asks for. Each cell of the grid is train.py on random tokens in a process of its own, stopped
after some steps. The cells take turns, in another order each round. Every figure is from train.py's own log: step time,
tokens/s, MFU, data wait and peak memory, which is that of torch's allocator on CUDA and of the whole process elsewhere.
A cell that runs out of memory says so. A compiled cell's first step, which compiles, does not count.

Prints a table and the command with the fastest setting; --save NAME writes them, with every step's time, to
bench/results/DATE-NAME.md and .json.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import shlex
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

import train
from bench import output, timing
from bench.output import markdown_table
from bench.timing import OURS, PYTHON, ROOT, Contestant, Failed, vocab_size_for, write_data
from configurator import build, read_settings
from deskgpt.compute.implementation import clearly_fastest
from deskgpt.system.errors import ConfigError, one_line_errors
from deskgpt.system.formatting import clock

SPLIT = ("batch_size", "gradient_accumulation_steps")
# What the sweep gives to each run itself.
FIXED = {flag[2:].partition("=")[0] for flag in OURS} | {"dataset", "out_dir", "gradient_accumulation_steps"}
# Cells that differ only in these train the same model on the same tokens: only such cells compete.
SAME_TRAINING = {*SPLIT, "compile", "dtype", "device"}
DEFAULT_CELLS = 8


@dataclass
class Cell:
    """One combination of settings, with its run."""

    settings: dict[str, Any]  # micro-batch and accumulation, then what else the grid sets
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
        if name in FIXED or name in axes:
            raise ConfigError(f"--grid {entry}: the sweep or another --grid sets {name}; leave it out")
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


def split(c: train.TrainConfig, varied: dict[str, Any]) -> dict[str, int]:
    """Micro-batch and accumulation of a cell, with the tokens per step of c. Raises ConfigError where none fit."""
    tokens = c.batch_size * c.gradient_accumulation_steps * c.block_size
    batch_size = varied.get("batch_size", c.batch_size)
    block_size = varied.get("block_size", c.block_size)
    micro_batch = batch_size * block_size
    if min(batch_size, block_size) < 1 or tokens % micro_batch:
        raise ConfigError(
            f"--grid: batch_size={batch_size} times block_size={block_size} does not divide the {tokens:,} tokens of "
            "a step; take values that do"
        )
    return {"batch_size": batch_size, "gradient_accumulation_steps": tokens // micro_batch}


def make_cells(c: train.TrainConfig, given: list[str], axes: dict[str, list[Any]], folder: Path) -> list[Cell]:
    """A cell for each combination, with its run's command. Raises ValueError."""
    base = {name: getattr(c, name) for name in c.__dataclass_fields__}
    cells = []
    for number, values in enumerate(itertools.product(*axes.values())):
        varied = dict(zip(axes, values, strict=True))
        settings = split(c, varied)
        settings |= {name: value for name, value in varied.items() if name not in SPLIT}
        build(train.TrainConfig, base | settings)  # raises ValueError where they do not go together
        command = [*PYTHON, "train.py", *given, *OURS, *(f"--{name}={value}" for name, value in settings.items())]
        command += [f"--dataset={folder}", f"--out_dir={folder}/{number}"]
        x = Contestant(cell_name(settings), command, ROOT)
        x.env["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/cache-{number}"
        cells.append(Cell(settings, x))
    return cells


def cell_name(settings: dict[str, Any]) -> str:
    """The settings but for the accumulation, which follows from the others."""
    return ", ".join(f"{name}={value}" for name, value in settings.items() if name != "gradient_accumulation_steps")


# ---- the runs ------------------------------------------------------------------------------------------------


def measure(cells: list[Cell], rounds: int, seconds: float) -> None:
    """Runs the cells in turns. A cell that fails gets its reason as status and is left out of later rounds.

    Ctrl-C ends with what is measured by then.
    """
    t0 = time.perf_counter()
    for number in range(rounds):
        alive = [cell for cell in cells if not cell.status]
        order = random.Random(number).sample(alive, len(alive))  # so that no drift of the machine favours a cell
        for cell in order:
            try:
                timing.run(cell.x, 0, seconds)
            except Failed as e:
                cell.status = e.reason
                print(f"round {number + 1}, {cell.x.name}: {e.reason}", flush=True)
            except KeyboardInterrupt:
                print(f"interrupted in round {number + 1}", flush=True)
                for other in cells:
                    if not other.status and not other.x.rounds_ms:
                        other.status = "interrupted"
                return
            else:
                median = statistics.median(cell.x.rounds_ms[-1])
                print(f"round {number + 1}, {cell.x.name}: {median:.4g} ms/step", flush=True)
        if number == 0 and rounds > 1:
            print(f"about {clock((rounds - 1) * (time.perf_counter() - t0))} more", flush=True)


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
    head = [*rows[0]["settings"], "ran in", "compiled", "tokens/step", "ms/step (p10, p90)", "tokens/s (rounds)", "MFU"]
    head += ["peak memory", "data wait"]
    body = []
    for r in rows:
        cells = [str(value) for value in r["settings"].values()]
        cells += [r["status"]] if r["status"] else figure_cells(r)
        cells += [""] * (len(head) - len(cells))
        body.append(cells)
    return markdown_table(head, body)


def figure_cells(r: dict[str, Any]) -> list[str]:
    """From "ran in" to "data wait"."""
    return [
        r["dtype"],
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
    parser.add_argument("--seconds", type=float, default=10.0, help="of the steps of each run, at least 3")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocab_size", type=int, default=0, help="0 = 65 for a dataset named *_char, else 50257")
    parser.add_argument("--save", metavar="NAME", help="write bench/results/DATE-NAME.md and .json")
    a, given = parser.parse_known_args()
    output.check_name(a.save)
    if a.rounds < 1 or not 0 <= a.seconds < math.inf:
        raise ConfigError(f"--rounds {a.rounds} --seconds {a.seconds:g}: at least one round, and 0 seconds")
    return a, given


def run_cells(a: argparse.Namespace, given: list[str], c: train.TrainConfig) -> list[Cell]:
    """Runs all cells. Raises ValueError where none has figures."""
    # inductor's processes may still be ending when the folder is removed
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmp:
        folder = Path(tmp) / "data"
        write_data(folder, a.vocab_size or vocab_size_for(c.dataset))
        cells = make_cells(c, given, read_grid(a.grid, c), folder)
        tokens = c.batch_size * c.gradient_accumulation_steps * c.block_size
        print(f"{len(cells)} cells x {a.rounds} rounds, each with about {a.seconds:g} s of steps of {tokens:,} tokens")
        measure(cells, a.rounds, a.seconds)
    if all(cell.status for cell in cells):
        raise ValueError(f"no cell has figures; {cells[0].x.name}: {cells[0].status}")
    return cells


def as_text(rows: list[dict[str, Any]], starts: list[dict[str, Any]], advice: list[tuple[str, str]]) -> str:
    """The page without its heading. starts: the first log events of the cells that have figures."""
    measured = [r for r in rows if not r["status"]]
    peaks = dict.fromkeys(f"{r['peak_flops'] / 1e12:.2f} TFLOP/s ({r['peak_source']})" for r in measured)
    rounds = max(len(r["rounds_ms"]) for r in measured)
    about = f"{output.about(*starts)}. MFU refers to {' and '.join(peaks)}. {len(rows)} cells, {rounds} rounds."
    text = f"{about}\n\n```sh\n{output.command_line('sweep.py')}\n```\n\n{as_markdown(rows)}\n"
    for line, why in advice:
        text += f"\nRecommended ({why}):\n\n```sh\n{line}\n```\n"
    return text


def main() -> None:
    a, given = read_arguments()
    c = build(train.TrainConfig, read_settings(train.TrainConfig, given))
    cells = run_cells(a, given, c)
    rows = [figures(cell) for cell in cells]
    starts = [cell.x.start for cell in cells if not cell.status]
    advice = recommendations(rows, given, c)
    text = as_text(rows, starts, advice)
    print("\n" + text.replace("```sh\n", "").replace("```\n", ""), end="")
    if a.save:
        commands = [{"command": line, "why": why} for line, why in advice]
        result = {"command": output.command_line("sweep.py"), "start": starts[0], "rows": rows, "recommended": commands}
        output.save(a.save, f"# Sweep: {a.save}\n\n{text}", result)


if __name__ == "__main__":
    os.environ.setdefault("WANDB_MODE", "offline")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl+C; else the run that is timed would train on
    with one_line_errors():
        main()
