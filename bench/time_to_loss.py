"""Measures the seconds, steps and tokens that train.py takes to reach a validation loss, over several seeds.

    python bench/time_to_loss.py config/train_shakespeare_char_fast.py --target 1.4697 --seeds 3
    python bench/time_to_loss.py config/train_shakespeare_char_cpu.py --target 1.886 --max_iters=2000

Settings are those of train.py; evaluate on enough tokens for a loss to be trusted (--eval_tokens). Each seed is a real
run, stopped once an evaluation reaches the target. Its seconds count from the beginning of training: steps, waiting for
data and compiling, which is shown by itself too. Evaluation, and the whole process from its start with its imports,
have columns of their own.

Prints a table; --save NAME writes it to bench/results/DATE-NAME.md, with every evaluation in .json.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

from bench import output
from bench.output import markdown_table
from bench.timing import ROOT
from deskgpt.machine.errors import one_line_errors
from deskgpt.run.log import read_events

FIRST_SEED = 1337


# ---- runs ----------------------------------------------------------------------------------------------------


def events_of(out_dir: Path, kind: str) -> list[dict[str, Any]]:
    log = out_dir / "log.jsonl"
    events = read_events(log) if log.exists() else []
    return [e for e in events if e["event"] == kind]


def reached(evaluation: dict[str, Any], target: float) -> bool:
    return evaluation["val_loss"] is not None and evaluation["val_loss"] <= target


def run(settings: list[str], seed: int, target: float, out_dir: Path) -> dict[str, Any]:
    """Runs train.py until it reaches the target or ends; returns what that took.

    Raises ValueError where it ends before its first evaluation.
    """
    t0 = time.perf_counter()
    own = [f"--seed={seed}", f"--out_dir={out_dir}", "--always_save_checkpoint=False"]
    command = [sys.executable, "train.py", *settings, *own]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    last_line = ""
    for line in process.stdout:
        last_line = line.rstrip()
        # train.py writes an evaluation into its log before it prints it.
        if line.startswith("step ") and reached(events_of(out_dir, "eval")[-1], target):
            break
    process_s = time.perf_counter() - t0
    process.kill()
    process.wait()

    evals = [e for e in events_of(out_dir, "eval") if e["val_loss"] is not None]  # None: infinite or not a number
    if not evals:
        raise ValueError(f"the run ended before its first evaluation: {last_line}")
    [start] = events_of(out_dir, "start")
    del start["settings"]["dataset"], start["settings"]["out_dir"]  # folders of this machine
    end = evals[-1]
    compile_s = start["warm_up_s"]
    return {
        "seed": seed,
        "reached": reached(end, target),
        "val_loss": end["val_loss"],
        "train_loss": end["train_loss"],
        "steps": end["iter"],
        "tokens": end["tokens"],
        "steps_s": end["train_s"],
        "compile_s": compile_s,
        "seconds": end["train_s"] + compile_s,
        "eval_s": sum(e["eval_s"] for e in evals),
        "process_s": process_s,
        "start": start,
        "curve": [(e["train_s"] + compile_s, e["iter"], e["val_loss"]) for e in evals],
    }


# ---- what they took ------------------------------------------------------------------------------------------


def as_markdown(rows: list[dict[str, Any]], target: float) -> str:
    head = ["seed", "val loss", "train loss", "seconds", "of it compiling", "steps", "tokens", "evaluation"]
    head.append("whole process")
    body = []
    for r in rows:
        loss = f"{r['val_loss']:.4f}"
        if not r["reached"]:
            loss += f", above {target}"
        cells = [str(r["seed"]), loss, f"{r['train_loss']:.4f}", f"{r['seconds']:.1f}", f"{r['compile_s']:.1f}"]
        cells += [f"{r['steps']:,}", f"{r['tokens']:,}", f"{r['eval_s']:.1f} s", f"{r['process_s']:.1f} s"]
        body.append(cells)
    if len(rows) > 1:
        body.append(mean_cells(rows))
    return markdown_table(head, body)


def mean_cells(rows: list[dict[str, Any]]) -> list[str]:
    """The table's last row: means over the seeds, and the standard deviation of the val loss."""

    def mean(name: str) -> float:
        return statistics.mean(r[name] for r in rows)

    deviation = statistics.stdev(r["val_loss"] for r in rows)
    cells = ["mean", f"{mean('val_loss'):.4f} (± {deviation:.4f})", f"{mean('train_loss'):.4f}"]
    cells += [f"{mean('seconds'):.1f}", f"{mean('compile_s'):.1f}", f"{mean('steps'):,.0f}"]
    return [*cells, "", "", ""]


def about(starts: list[dict[str, Any]]) -> str:
    """The machine, the model and what was evaluated, from the runs' start events."""
    start = starts[0]
    settings = start["settings"]
    compiled = "compiled" if start["compiled"] else "not compiled"
    evaluated = settings["eval_tokens"] or settings["eval_iters"] * settings["batch_size"] * settings["block_size"]
    return (
        f"{output.about(*starts)}; {start['dtype']}, {compiled}. {start['parameters']:,} parameters, "
        f"context of {settings['block_size']} tokens, {start['tokens_per_step']:,} tokens per step, "
        f"{settings['max_iters']:,} steps; "
        f"evaluated on {min(evaluated, start['val_tokens']):,} of {start['val_tokens']:,} val tokens."
    )


# ---- script --------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=float, required=True, help="validation loss, nats per token")
    parser.add_argument("--seeds", type=int, default=3, help="runs, with the seeds 1337, 1338, ...")
    parser.add_argument("--cold", action="store_true", help="each run compiles anew, with an empty cache")
    parser.add_argument("--save", metavar="NAME", help="write bench/results/DATE-NAME.md and .json")
    a, settings = parser.parse_known_args()
    output.check_name(a.save)
    if a.seeds < 1 or not math.isfinite(a.target):
        raise ValueError(f"--seeds {a.seeds} --target {a.target}: at least one seed, and a finite loss")

    rows = []
    with tempfile.TemporaryDirectory() as tmp:
        for seed in range(FIRST_SEED, FIRST_SEED + a.seeds):
            if a.cold:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{tmp}/cache-{seed}"
            r = run(settings, seed, a.target, Path(tmp) / str(seed))
            rows.append(r)
            took = f"after {r['seconds']:.1f}s, {r['steps']:,} steps"
            print(f"seed {seed}: val loss {r['val_loss']:.4f} {took}", flush=True)

    command = output.command_line("time_to_loss.py")
    text = f"{about([r['start'] for r in rows])}\n\n```sh\n{command}\n```\n\n{as_markdown(rows, a.target)}\n"
    print("\n" + text)
    if a.save:
        result = {"command": command, "target": a.target, "rows": rows}
        heading = f"# Time to a loss of {a.target}: {a.save}"
        output.save(a.save, f"{heading}\n\n{text}", result)


if __name__ == "__main__":
    with one_line_errors():
        main()
