"""Seconds, steps and tokens that a run takes to reach a validation loss, over several seeds.

    python bench/time_to_loss.py config/train_shakespeare_char_fast.py --target 1.4697 --seeds 3
    python bench/time_to_loss.py config/train_shakespeare_char_cpu.py --target 1.886 --max_iters=2000

Settings are those of train.py; give it an evaluation worth its name (--eval_tokens). Each seed is a real run of
train.py, stopped once an evaluation reaches the target. The clock that counts begins when training does: it holds the
steps, the wait for data and, reported apart as well, compiling; evaluation and saving stand beside it, and so does the
whole process from its start, imports included.

Prints a table; --save NAME writes it to bench/results/DATE-NAME.md, with every evaluation in .json and curves in .png.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script, Python looks beside this file only

from bench import timing
from bench.timing import ROOT
from deskgpt.errors import one_line_errors


def events_of(out_dir: Path, kind: str) -> list[dict[str, Any]]:
    log = out_dir / "log.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [e for e in events if e["event"] == kind]


def reached(evaluation: dict[str, Any], target: float) -> bool:
    return evaluation["val_loss"] is not None and evaluation["val_loss"] <= target


def run(settings: list[str], seed: int, target: float, out_dir: Path) -> dict[str, Any]:
    """One run until it reaches the target or its end; what it took."""
    t0 = time.perf_counter()
    command = [
        sys.executable,
        "train.py",
        *settings,
        f"--seed={seed}",
        f"--out_dir={out_dir}",
        "--always_save_checkpoint=False",
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        last = line.rstrip()
        if line.startswith("step ") and reached(events_of(out_dir, "eval")[-1], target):  # the log is ahead of the line
            break
    process_s = time.perf_counter() - t0
    process.kill()
    process.wait()
    evals = [e for e in events_of(out_dir, "eval") if e["val_loss"] is not None]  # null: no number
    if not evals:
        raise SystemExit(f"error: the run ended before its first evaluation: {last}")
    [start], end = events_of(out_dir, "start"), evals[-1]
    del start["settings"]["dataset"], start["settings"]["out_dir"]  # folders of this machine
    return {
        "seed": seed,
        "reached": reached(end, target),
        "val_loss": end["val_loss"],
        "train_loss": end["train_loss"],
        "steps": end["iter"],
        "tokens": end["tokens"],
        "steps_s": end["train_s"],
        "compile_s": start["warm_up_s"],
        "seconds": end["train_s"] + start["warm_up_s"],
        "eval_s": sum(e["eval_s"] for e in evals),
        "process_s": process_s,
        "start": start,
        "curve": [(e["train_s"] + start["warm_up_s"], e["iter"], e["val_loss"]) for e in evals],
    }


def as_markdown(rows: list[dict[str, Any]], target: float) -> str:
    lines = [
        "| seed | val loss | train loss | seconds | of it compiling | steps | tokens | evaluation | whole process |"
    ]
    lines += ["|--:|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for r in rows:
        loss = f"{r['val_loss']:.4f}" + ("" if r["reached"] else f", above {target}")
        cells = [r["seed"], loss, f"{r['train_loss']:.4f}", f"{r['seconds']:.1f}", f"{r['compile_s']:.1f}"]
        cells += [f"{r['steps']:,}", f"{r['tokens']:,}", f"{r['eval_s']:.1f} s", f"{r['process_s']:.1f} s"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    if len(rows) > 1:
        means = {
            k: statistics.mean(r[k] for r in rows) for k in ("val_loss", "train_loss", "seconds", "compile_s", "steps")
        }
        deviation = statistics.stdev(r["val_loss"] for r in rows)
        lines.append(
            f"| mean | {means['val_loss']:.4f} (± {deviation:.4f}) | {means['train_loss']:.4f} | "
            f"{means['seconds']:.1f} | {means['compile_s']:.1f} | {means['steps']:,.0f} | | | |"
        )
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], target: float, path: Path, title: str) -> None:
    """Validation loss against seconds, a curve per seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for r in rows:
        seconds, _, losses = zip(*r["curve"], strict=True)
        axes.plot(seconds, losses, marker=".", label=f"seed {r['seed']}")
    axes.axhline(target, color="0.5", linestyle="--", label=f"target {target}")
    axes.set(xlabel="seconds: steps and compiling", ylabel="validation loss (nats per token)", title=title)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=float, required=True, help="validation loss, nats per token")
    parser.add_argument("--seeds", type=int, default=3, help="runs, with the seeds 1337, 1338, ...")
    parser.add_argument("--cold", action="store_true", help="each run compiles anew, with an empty cache")
    parser.add_argument("--save", metavar="NAME", help="write bench/results/DATE-NAME.md, .json and .png")
    a, settings = parser.parse_known_args()
    timing.check_name(a.save)
    if a.save:
        import matplotlib  # noqa: F401 (before the runs, not after them, if it is missing)
    if a.seeds < 1 or not math.isfinite(a.target):
        raise SystemExit(f"error: --seeds {a.seeds} --target {a.target}: at least one seed, and a finite loss")
    rows = []
    with tempfile.TemporaryDirectory() as tmp:
        for seed in range(1337, 1337 + a.seeds):
            if a.cold:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{tmp}/cache-{seed}"
            rows.append(run(settings, seed, a.target, Path(tmp) / str(seed)))
            r = rows[-1]
            print(
                f"seed {seed}: val loss {r['val_loss']:.4f} after {r['seconds']:.1f}s, {r['steps']:,} steps", flush=True
            )
    starts = [r["start"] for r in rows]
    start = starts[0]
    s = start["settings"]
    evaluated = s["eval_tokens"] or s["eval_iters"] * s["batch_size"] * s["block_size"]
    about = (
        f"{timing.about(*starts)}; "
        f"{start['dtype']}, {'compiled' if start['compiled'] else 'not compiled'}. {start['parameters']:,} parameters, "
        f"context of {s['block_size']} tokens, {start['tokens_per_step']:,} tokens per step, {s['max_iters']:,} steps; "
        f"evaluated on {min(evaluated, start['val_tokens']):,} of {start['val_tokens']:,} val tokens."
    )
    command = timing.command_line("time_to_loss.py")
    text = f"{about}\n\n```sh\n{command}\n```\n\n{as_markdown(rows, a.target)}\n"
    print("\n" + text)
    if a.save:
        result = {"command": command, "target": a.target, "rows": rows}
        heading = f"# Time to a loss of {a.target}: {a.save}"
        timing.save(a.save, f"{heading}\n\n{text}", result, lambda path: plot(rows, a.target, path, a.save))


if __name__ == "__main__":
    with one_line_errors():
        main()
