"""Which micro-batch is fastest, at the same tokens per step, and what it takes; of other settings as well.

    python bench/sweep.py config/train_shakespeare_char_cpu.py
    python bench/sweep.py config/train_gpt2.py --grid batch_size=4,8,16 --grid compile=True,False --memory_gb 12
    python bench/sweep.py config/train_shakespeare_char.py --grid n_embd=384,768 --grid dtype=float32,bfloat16

Settings are those of train.py. --grid NAME=A,B,... takes each of these values, of several --grid every combination;
without one, batch_size is halved and doubled. Accumulation follows from the batch size, so that a step has the tokens
that the config says. Each cell is train.py on random tokens in a process of its own, stopped after some steps; the
cells take turns, in another order each round. Every figure is from train.py's own log: step time, tokens/s, MFU, data
wait and peak memory, which is that of torch's allocator on CUDA and of the whole process elsewhere. A cell for which
memory runs out says so; on a CPU one that is predicted to need more than is there is not started.

Compiled cells begin with an empty cache of their own: "compiling, cold" is what the first start took beyond a step,
"warm" what later ones did; compiling pays after so many steps. --memory_gb 12 makes a larger CUDA card act as one of
12 GB, less the half GB or so that CUDA itself would take there.

Prints a table and the command with the fastest setting; writes sweep.md, .json and .png (a heat map, where matplotlib
is installed) to --out; --save NAME writes them to bench/results/DATE-NAME.* too.
"""

from __future__ import annotations

import argparse
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script, Python looks beside this file only

import train
from bench import timing
from bench.analysis.heatmap import plot
from bench.analysis.noise import interval
from bench.timing import OURS, PYTHON, ROOT, Contestant, Failed, memory_cap, start_with, write_data
from configurator import build, read_settings
from data.token_files import read_meta
from data.tokenizer import padded_vocab_size
from deskgpt import estimate, hardware, peak_flops
from deskgpt.errors import ConfigError, one_line_errors
from deskgpt.runlog import clock
from model import GPTConfig

SPLIT = ("batch_size", "gradient_accumulation_steps")
# What the sweep itself says about each run.
FIXED = {a[2:].partition("=")[0] for a in OURS} | {"dataset", "out_dir"}
# Cells that differ in nothing else train the same model on the same tokens: only they compete.
SAME_TRAINING = {*SPLIT, "compile", "dtype", "device"}
LARGEST_SHARE = 0.9  # of a machine's memory, for a cell on a CPU
DEFAULT_CELLS = 8
CLOSE = 0.05  # what is slower by more is slower, even where the noise is too much to prove it


@dataclass
class Cell:
    settings: dict[str, Any]  # micro-batch and accumulation, then what else the grid sets
    c: train.TrainConfig
    x: Contestant
    status: str = ""  # why there are no figures

    def name(self, without: tuple[str, ...] = ("gradient_accumulation_steps",)) -> str:
        return ", ".join(f"{k}={v}" for k, v in self.settings.items() if k not in without)


# ---- the grid ------------------------------------------------------------------------------------------------


def read_grid(entries: list[str], c: train.TrainConfig) -> dict[str, list[Any]]:
    """The values of each setting in --grid, in its order. Raises ValueError."""
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
    """batch_size halved and doubled as long as that divides a step's sequences, 1 and all; at most 8, the nearest."""
    whole = batch_size * accumulation
    powers = (batch_size * 2.0**k for k in range(-batch_size.bit_length(), whole.bit_length()))
    sizes = {1, whole} | {int(b) for b in powers if b.is_integer() and whole % b == 0}
    nearest = sorted(sizes, key=lambda b: (round(abs(math.log(b / batch_size)), 6), b))[:DEFAULT_CELLS]
    return sorted(nearest)


def split(c: train.TrainConfig, settings: dict[str, Any]) -> dict[str, int]:
    """Micro-batch and accumulation of a cell with the tokens per step of c. Raises ConfigError where there are none."""
    tokens = c.batch_size * c.gradient_accumulation_steps * c.block_size
    if not settings.keys() & {*SPLIT, "block_size"}:
        return {name: getattr(c, name) for name in SPLIT}
    T = settings.get("block_size", c.block_size)
    if T < 1 or tokens % T:
        raise ConfigError(f"--grid block_size={T} does not divide the {tokens:,} tokens of a step; take one that does")
    whole = tokens // T
    given, follows = SPLIT[::-1] if SPLIT[1] in settings else SPLIT
    n = settings.get(given, getattr(c, given))
    if n < 1 or whole % n:
        near = min((d for d in range(1, whole + 1) if whole % d == 0), key=lambda d: abs(d - n))
        raise ConfigError(
            f"--grid: {given}={n} does not divide the {whole} sequences of a step, {tokens:,} tokens; try {near}"
        )
    return {given: n, follows: whole // n}


def make_cells(
    c: train.TrainConfig, given: list[str], axes: dict[str, list[Any]], folder: Path, memory_gb: float | None
) -> list[Cell]:
    """A cell for each combination, with its run's command. Raises ValueError."""
    base, out = {name: getattr(c, name) for name in c.__dataclass_fields__}, []
    for number, values in enumerate(itertools.product(*axes.values())):
        settings = dict(zip(axes, values, strict=True))
        sizes = split(c, settings)
        settings = {name: sizes[name] for name in SPLIT} | {k: v for k, v in settings.items() if k not in SPLIT}
        cell = build(train.TrainConfig, base | settings)
        cap = memory_cap(memory_gb, str(hardware.resolve_device(cell.device)))
        flags = [f"--{k}={v}" for k, v in settings.items()]
        where = [f"--dataset={folder}", f"--out_dir={folder}/{number}"]
        x = Contestant("", [*PYTHON, *start_with(cap, "train.py"), *given, *OURS, *flags, *where], ROOT)
        x.env["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/cache-{number}"
        out.append(Cell(settings, cell, x))
        x.name = out[-1].name()
    return out


def predicted_bytes(c: train.TrainConfig, vocab_size: int) -> int:
    """Peak of a step of c, as estimate.py has it."""
    args = GPTConfig(vocab_size=vocab_size, dropout=c.dropout, **{k: getattr(c, k) for k in train.MODEL_SETTINGS})
    device = hardware.resolve_device(c.device)
    dtype = peak_flops.fast_dtype(device) if c.dtype == "auto" else c.dtype
    accumulates = c.gradient_accumulation_steps > 1
    return sum(estimate.memory(args, c.batch_size, dtype, device.type, c.compile is not False, accumulates).values())


def leave_out_too_large(cells: list[Cell], vocab_size: int) -> None:
    """Marks the cells that a CPU has not the memory for: there the whole machine would suffer, not the run alone."""
    for cell in cells:
        device = hardware.resolve_device(cell.c.device)
        limit = hardware.memory_bytes(device) if device.type == "cpu" else None
        if limit:
            needed = predicted_bytes(cell.c, vocab_size)
            if needed > LARGEST_SHARE * limit:
                cell.status = f"predicted {needed / 2**30:.1f} GiB of {limit / 2**30:.1f}: not run"
                print(f"{cell.x.name}: {cell.status}", flush=True)


# ---- the runs ------------------------------------------------------------------------------------------------


def measure(cells: list[Cell], rounds: int, steps: int, seconds: float) -> int:
    """Runs the cells in turns; what fails is left out of later rounds, with the reason as its status.

    Returns the number of rounds: Ctrl-C ends with those that are whole, in the first with the cells that have figures.
    """
    taken = {cell.x.name: steps for cell in cells}
    said = False
    for number in range(rounds):
        alive = [cell for cell in cells if not cell.status]
        order = random.Random(number).sample(alive, len(alive))  # a drift of the machine favours none
        for place, cell in enumerate(order):
            x, t0 = cell.x, time.perf_counter()
            try:
                taken[x.name] = timing.run(x, taken[x.name], seconds)  # as many in later rounds
            except Failed as e:
                cell.status = e.reason
                print(f"round {number + 1}, {x.name}: {e.reason}", flush=True)
                continue
            except KeyboardInterrupt:
                print(f"interrupted in round {number + 1}", flush=True)
                for c in alive:
                    c.status = c.status or ("" if c.x.rounds else "interrupted")
                    del c.x.rounds[max(1, number) :]
                return max(1, number)
            print(f"round {number + 1}, {x.name}: {statistics.median(x.rounds[-1]):.4g} ms/step", flush=True)
            if not said:
                left = (time.perf_counter() - t0) * (len(order) * rounds - place - 1)
                print(f"about {clock(left)} more, if the others take as long as this one", flush=True)
                said = True
    return rounds


# ---- figures -------------------------------------------------------------------------------------------------


def pays_after(compile_s: float, plain_ms: float, compiled_ms: float) -> int | None:
    """Steps after which compiling has won back its time; None where the steps become no faster."""
    return math.ceil(compile_s * 1e3 / (plain_ms - compiled_ms)) if compiled_ms < plain_ms else None


def figures(cells: list[Cell]) -> list[dict[str, Any]]:
    """A row for each cell: its settings and, where it has any, its figures.

    MFU refers to the highest peak that a cell of the same dtype and device found, where the peak is a measured one.
    """
    peaks: dict[Any, tuple[float, str]] = {}
    measured = [cell for cell in cells if not cell.status]
    for start in (cell.x.start for cell in measured):
        kind = (start["device"], start["dtype"])
        peaks[kind] = max(peaks.get(kind, (0.0, "")), (start["peak_flops"], start["peak_source"]))
    assert len({cell.x.start["tokens_per_step"] for cell in measured}) <= 1
    rows: list[dict[str, Any]] = []
    for cell in cells:
        rows.append({"settings": cell.settings, "status": cell.status})
        if cell.status:
            continue
        x, start = cell.x, cell.x.start
        ms = sorted(t for times in x.rounds for t in times)
        median, tokens = statistics.median(ms), start["tokens_per_step"]
        by_round = [tokens / statistics.median(times) * 1e3 for times in x.rounds]
        row = {"dtype": start["dtype"], "compiled": start["compiled"], "tokens_per_step": tokens}
        row |= {"ms": median, "p10": ms[len(ms) // 10], "p90": ms[len(ms) * 9 // 10]}
        row |= {"tokens_per_s": tokens / median * 1e3, "least": min(by_round), "most": max(by_round)}
        row |= {"by_round": by_round, "flops_per_token": start["flops_per_token"]}
        row["peak_flops"], row["peak_source"] = peaks[start["device"], start["dtype"]]
        row["mfu"] = row["tokens_per_s"] * start["flops_per_token"] / row["peak_flops"]
        row["memory_gb"] = max(x.logged_memory) / 1e9 if x.logged_memory else None
        row["data_wait"] = statistics.mean(x.waits)
        starts = [first_s - median / 1e3 for first_s in x.first_s]
        row["start_s"] = min(starts)
        if start["compiled"]:
            row |= {"cold_s": starts[0], "warm_s": statistics.median(starts[1:]) if starts[1:] else None}
        rows[-1] |= row
    for row in rows:
        if row.get("compiled"):
            rest = {k: v for k, v in row["settings"].items() if k != "compile"}
            for other in rows:
                same = rest == {k: v for k, v in other["settings"].items() if k != "compile"}
                if same and other.get("compiled") is False:
                    # what starting takes without compiling is no price of it
                    row["pays_after"] = pays_after(row["cold_s"] - other["start_s"], other["ms"], row["ms"])
    return rows


def as_markdown(rows: list[dict[str, Any]]) -> str:
    names = list(rows[0]["settings"])
    compiled = any(r.get("compiled") for r in rows)
    own_dtype = "dtype" not in names  # as a setting it has a column already
    head = [*names, *(["dtype"] if own_dtype else []), "compiled", "tokens/step", "ms/step (p10, p90)"]
    head += ["tokens/s (rounds)", "MFU", "peak memory"]
    head += ["data wait"] + (["compiling, cold", "warm", "pays after"] if compiled else [])
    lines = [f"| {' | '.join(head)} |", "|" + "--:|" * len(head)]
    for r in rows:
        cells = [str(v) for v in r["settings"].values()]
        if r["status"]:
            cells += [""] * (head.index("tokens/step") + 1 - len(names)) + [r["status"]]
            cells += [""] * (len(head) - len(cells))
        else:
            memory = "n/a" if r["memory_gb"] is None else f"{r['memory_gb']:.2f} GB"
            cells += [r["dtype"]] if own_dtype else []
            cells += ["yes" if r["compiled"] else "no", f"{r['tokens_per_step']:,}"]
            cells += [f"{r['ms']:.4g} ({r['p10']:.4g}, {r['p90']:.4g})"]
            cells += [f"{r['tokens_per_s']:,.0f} ({r['least']:,.0f} to {r['most']:,.0f})", f"{r['mfu']:.1%}", memory]
            cells += [f"{r['data_wait']:.1%}"]
            if compiled:
                steps = r.get("pays_after")
                pays = f"{steps:,} steps" if steps is not None else "never" if "pays_after" in r else "n/a"
                took = [f"{r[k]:.1f} s" if r.get(k) is not None else "n/a" for k in ("cold_s", "warm_s")]
                cells += [*took, pays] if r["compiled"] else ["", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def recommend(rows: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """(the row to take, why): the fastest or, of those that cannot be told from it, the one with the least memory.

    Two cells are compared round by round, as ratios; a lead is one where the 95% interval of their mean leaves out 1.
    """
    varied = [k for k in rows[0]["settings"] if k != SPLIT[1] and len({str(r["settings"][k]) for r in rows}) > 1]

    def name(row: dict[str, Any]) -> str:
        return " ".join(f"{k}={row['settings'][k]}" for k in varied)

    best, *others = sorted(rows, key=lambda r: -r["tokens_per_s"])
    if not others:
        return best, "it is the only one with figures"
    near, unproven = [], False
    for r in others:
        lead, width = interval([math.log(a / b) for a, b in zip(best["by_round"], r["by_round"], strict=True)])
        within = width is not None and lead <= width
        if within and best["tokens_per_s"] <= (1 + CLOSE) * r["tokens_per_s"]:
            near.append(r)
        elif r is others[0]:
            unproven = within
    ahead = f"{best['tokens_per_s'] / others[0]['tokens_per_s'] - 1:.1%} ahead of {name(others[0])}"
    if len(best["by_round"]) == 1:
        return best, f"{name(best)} is the fastest, {ahead}; one round does not tell that from noise"
    if not near:
        doubt = "; these rounds vary too much to be sure" if unproven else ", beyond the noise"
        return best, f"{name(best)} is the fastest, {ahead}{doubt}"
    tied = [best, *near]
    chosen = min(tied, key=lambda r: r["memory_gb"] or 0.0)
    other = best if chosen is not best else min(near, key=lambda r: r["memory_gb"] or 0.0)
    less = (other["memory_gb"] or 0.0) - (chosen["memory_gb"] or 0.0)
    saves = f"takes {less:.2f} GB less" if less >= 0.005 else "takes no more memory"
    names = f"{', '.join(map(name, tied[:-1]))} and {name(tied[-1])}"
    than = f" than {name(other)}" if near[1:] else ""
    return chosen, f"{names} cannot be told apart; {name(chosen)} {saves}{than}"


def as_command(given: list[str], c: train.TrainConfig, settings: dict[str, Any]) -> str:
    """train.py's command line with these settings in place of what was given, and as many tokens in an evaluation."""
    if not c.eval_tokens and settings["batch_size"] != c.batch_size:
        settings = settings | {"eval_iters": max(1, round(c.eval_iters * c.batch_size / settings["batch_size"]))}
    kept = [a for a in given if a.removeprefix("--").partition("=")[0] not in settings]
    return shlex.join(["python", "train.py", *kept, *(f"--{k}={v}" for k, v in settings.items())])


def recommendations(rows: list[dict[str, Any]], given: list[str], c: train.TrainConfig) -> list[tuple[str, str]]:
    """(command, why) for each model and kind of training among the rows that have figures."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for r in rows:
        if not r["status"]:
            kind = ", ".join(f"{k}={v}" for k, v in r["settings"].items() if k not in SAME_TRAINING)
            groups.setdefault(kind, []).append(r)
    out = []
    for kind, group in groups.items():
        row, why = recommend(group)
        if c.compile == "auto" and row["compiled"] and "compile" not in row["settings"]:
            why += "; measured compiled, as a long run is by compile=auto"
        if row.get("pays_after") is not None:
            why += f"; compiling pays after {row['pays_after']:,} steps"
        out.append((as_command(given, c, row["settings"]), f"{kind}: {why}" if kind else why))
    return out


# ---- script --------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grid", action="append", default=[], metavar="NAME=A,B", help="values of a setting")
    parser.add_argument("--steps", type=int, default=0, help="of each run; 0 = as many as --seconds take, at least 3")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run's steps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max_cells", type=int, default=64)
    parser.add_argument("--memory_gb", type=float, help="let a CUDA card act as one of so many GB (2^30 bytes)")
    parser.add_argument("--vocab_size", type=int, default=0, help="0 = 65 for a dataset named *_char, else 50257")
    parser.add_argument("--out", type=Path, default=ROOT / "out-sweep", metavar="FOLDER")
    parser.add_argument("--save", metavar="NAME", help="write bench/results/DATE-NAME.md, .json and .png as well")
    a, given = parser.parse_known_args()
    timing.check_name(a.save)
    if a.rounds < 1 or not 0 < a.seconds < math.inf or (a.steps and a.steps < timing.LEAST_STEPS) or a.steps < 0:
        least = f"at least one round and {timing.LEAST_STEPS} steps, and more than 0 seconds"
        raise ConfigError(f"--rounds {a.rounds} --steps {a.steps} --seconds {a.seconds:g}: {least}")
    c = build(train.TrainConfig, read_settings(train.TrainConfig, given))
    axes = read_grid(a.grid, c)
    n = math.prod(map(len, axes.values()))
    if n > a.max_cells:
        raise ConfigError(f"--grid makes {n} cells; give fewer values, or --max_cells={n}")
    a.out.mkdir(parents=True, exist_ok=True)  # sooner than after the runs, if that is not possible
    drawn = find_spec("matplotlib") is not None
    if not drawn:
        print("no heat map: pip install matplotlib")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmp:  # inductor's processes may still be ending
        folder = Path(tmp) / "data"
        write_data(folder, a.vocab_size or (65 if c.dataset.endswith("_char") else 50257))
        cells = make_cells(c, given, axes, folder, a.memory_gb)
        meta = read_meta(folder)
        leave_out_too_large(cells, padded_vocab_size(meta["tokenizer"], meta["vocab_size"]))
        tokens = c.batch_size * c.gradient_accumulation_steps * c.block_size
        each = f"{a.steps} steps" if a.steps else f"about {a.seconds:g} s of steps, {timing.LEAST_STEPS} at least,"
        print(f"{n} cells x {a.rounds} rounds, each with {each} of {tokens:,} tokens", flush=True)
        rounds = measure(cells, a.rounds, a.steps, a.seconds)
    if all(cell.status for cell in cells):
        raise ValueError(f"no cell has figures; {cells[0].x.name}: {cells[0].status}")
    rows = figures(cells)
    starts = [cell.x.start for cell in cells if not cell.status]
    start = starts[0]
    advice = recommendations(rows, given, c)
    peaks = dict.fromkeys(f"{r['peak_flops'] / 1e12:.2f} TFLOP/s ({r['peak_source']})" for r in rows if not r["status"])
    about = f"{timing.about(*starts)}. MFU refers to {' and '.join(peaks)}. {len(rows)} cells, {rounds} rounds."
    about += f" The card acts as one of {a.memory_gb:g} GB." if a.memory_gb else ""
    command = timing.command_line("sweep.py")
    text = f"{about}\n\n```sh\n{command}\n```\n\n{as_markdown(rows)}\n"
    for line, why in advice:
        text += f"\nRecommended ({why}):\n\n```sh\n{line}\n```\n"
    print("\n" + text.replace("```sh\n", "").replace("```\n", ""), end="")
    raw = [
        {"settings": x.settings, "status": x.status, "rounds_ms": x.x.rounds, "first_s": x.x.first_s}
        | {"memory_bytes": x.x.logged_memory, "process_bytes": x.x.memory, "start": x.x.start}
        for x in cells
    ]
    result = {"command": command, "date": time.strftime("%Y-%m-%d"), "machine": start["device"]}
    result |= {"versions": start["versions"], "commit": start["git_commit"], "memory_gb": a.memory_gb, "rows": rows}
    result |= {"cells": raw, "recommended": [{"command": line, "why": why} for line, why in advice]}
    model = f"{c.n_layer} layers" + (f", {c.n_embd} wide" if "n_embd" not in axes else "")
    title = f"{model}, {tokens:,} tokens per step\n{start['device']}"

    def draw(path: Path) -> None:
        plot(rows, path, title)

    timing.write_results(a.out, "sweep", f"# Sweep\n\n{text}", result, draw if drawn else None)
    print(f"\nwritten to {a.out}: sweep.md, sweep.json{', sweep.png' if drawn else ''}")
    if a.save:
        timing.save(a.save, f"# Sweep: {a.save}\n\n{text}", result, draw if drawn else None)


if __name__ == "__main__":
    os.environ.setdefault("WANDB_MODE", "offline")
    with one_line_errors():
        main()
