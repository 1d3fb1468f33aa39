"""One run as an HTML page: how fast it was, what it learned, its curves, text from its checkpoint.

    python bench/report.py out-shakespeare-char-cpu
    python bench/report.py out-shakespeare-char-cpu --samples 0 --html report.html --png curves.png

Reads log.jsonl in the out_dir, or a file with the printed log. Writes out_dir/report.html, which opens in any browser
and needs no network.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script, Python looks beside this file only

from bench.page import Table, best_evaluation, page, picture, values
from bench.runs import Run, read_run
from configurator import one_line_errors
from runlog import clock

ROOT = Path(__file__).resolve().parents[1]


def shown(value: float | None, form: str, unit: str = "") -> str:
    return "n/a" if value is None or not math.isfinite(value) else format(value, form) + unit


def quantile(run: Run, key: str, q: float) -> float | None:
    """Of a field over the logged steps; None where the log does not have it."""
    known = values(run.iters, key)
    known = known[np.isfinite(known)]
    return float(np.quantile(known, q)) if len(known) else None


def speed(run: Run) -> Table:
    """What the steps and all beside them took."""
    start, end = run.start, run.end
    ms, p10, p90 = (quantile(run, "time_ms", q) for q in (0.5, 0.1, 0.9))
    rows = [["time of a step, median", shown(ms, ".2f", " ms")]]
    rows += [["p10 to p90", f"{shown(p10, '.2f')} to {shown(p90, '.2f', ' ms')}"]]
    rows += [["tokens/s, median", shown(quantile(run, "tokens_per_s", 0.5), ",.0f")]]
    mfu, peak = quantile(run, "mfu", 0.5), start.get("peak_flops")
    of_peak = f" of {peak / 1e12:.2f} TFLOP/s ({start.get('peak_source')})" if peak else ""
    rows += [["MFU, median", "n/a" if mfu is None else f"{mfu:.2%}{of_peak}"]]
    train_s = next((e["train_s"] for e in reversed(run.iters) if e.get("train_s") is not None), end.get("train_s"))
    evals_s = [e["eval_s"] for e in run.evals if e.get("eval_s") is not None]
    spent = {"training": train_s, "of it waiting for data": end.get("data_wait_s")}
    spent |= {"evaluation": sum(evals_s) if evals_s else None, "saving": end.get("save_s")}
    spent |= {"warm-up and compiling": start.get("warm_up_s")}
    rows += [[name, "n/a" if s is None else clock(s)] for name, s in spent.items()]
    memory = end.get("peak_memory_bytes")
    return Table("Speed", [], [*rows, ["peak memory", "n/a" if memory is None else f"{memory / 2**30:.2f} GiB"]])


def learning(run: Run) -> Table:
    """What the evaluations found."""
    best = best_evaluation(run)
    if best is None:
        return Table("Learning", [], [["evaluations", "none"]])
    last = [e for e in run.evals if e.get("val_loss") is not None][-1]
    rows = []
    for name, e in (("best", best), ("last", last)) if last is not best else (("best", best),):
        se = "" if e.get("val_se") is None else f" ± {e['val_se']:.4f} (standard error)"
        rows += [[f"{name} val loss", f"{e['val_loss']:.4f}{se}, step {e['iter']:,}"]]
        rows += [[f"perplexity of the {name}", f"{math.exp(min(e['val_loss'], 700)):,.2f}"]]
        gap = None if e.get("train_loss") is None else e["val_loss"] - e["train_loss"]
        rows += [[f"val loss - train loss, {name}", shown(gap, "+.4f")]]
    return Table("Learning", [], [*rows, ["val loss turned up", turn(best, last)]], "Losses in nats per token.")


def turn(best: dict[str, Any], last: dict[str, Any]) -> str:
    """Whether and where the validation loss stopped falling."""
    rise = last["val_loss"] - best["val_loss"]
    if not rise:
        return "no, the last is the lowest"
    at = f"after step {best['iter']:,}, by {rise:.4f} until step {last['iter']:,}"
    errors = [e["val_se"] for e in (best, last) if e.get("val_se") is not None]
    return at + (", within two standard errors" if len(errors) == 2 and rise < 2 * math.hypot(*errors) else "")


def verdict(run: Run) -> list[str]:
    best, ms = best_evaluation(run), quantile(run, "time_ms", 0.5)
    said = [f"best val loss {best['val_loss']:.4f} at step {best['iter']:,}" if best else "no evaluation in the log"]
    if ms is not None:
        said += [f"{ms:.2f} ms a step, MFU {shown(quantile(run, 'mfu', 0.5), '.2%')}"]
    return (
        said
        if run.end or not run.start
        else [*said, "the log has no end: the run was stopped, failed or still goes on"]
    )


def samples(out_dir: Path, n: int, tokens: int) -> list[str]:
    """n texts that sample.py writes with the checkpoint in out_dir, or why there are none."""
    command = [sys.executable, "sample.py", f"--out_dir={out_dir.resolve()}"]
    command += [f"--num_samples={n}", f"--max_new_tokens={tokens}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", errors="replace")
    if done.returncode:
        return [f"no samples: {(done.stderr.strip().splitlines() or ['sample.py failed'])[-1]}"]
    return done.stdout.split("\n---------------\n")[:n]


def about(run: Run) -> str:
    """The machine, the model, versions and commit of the run, and when the page was made."""
    s = run.start
    versions = ", ".join(f"{name} {version}" for name, version in s.get("versions", {}).items())
    compiled = "compiled" if s.get("compiled") else "not compiled"
    said = [f"{s['world_size']} x {s['device']}, {s['dtype']}, {compiled}" if "device" in s else "", versions]
    said += [f"commit {s['git_commit']}" if s.get("git_commit") else ""]
    said += [f"{s['parameters']:,} parameters, {s['tokens_per_step']:,} tokens per step" if "parameters" in s else ""]
    said += [f"{run.flops_per_token / 1e6:.2f} MFLOPs per token" if run.flops_per_token else ""]
    return "; ".join([*filter(None, said), f"page of {time.strftime('%Y-%m-%d')}"])


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out_dir", help="of a run; or a file with its printed log")
    parser.add_argument("--html", metavar="FILE", help="in place of out_dir/report.html")
    parser.add_argument("--png", metavar="FILE", help="loss and time of a step as a picture")
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="texts from the checkpoint")
    parser.add_argument("--max_new_tokens", type=int, default=200, help="of each sample")
    a = parser.parse_args()
    run, path = read_run(a.out_dir), Path(a.out_dir)
    of_checkpoint = samples(path, a.samples, a.max_new_tokens) if a.samples > 0 and path.is_dir() else []
    text = page(run.name, [run], [speed(run), learning(run)], verdict(run), of_checkpoint, about(run))
    html = Path(a.html) if a.html else path / "report.html" if path.is_dir() else path.with_suffix(".html")
    html.write_text(text, encoding="utf-8")
    print(html)
    if a.png:
        picture([run], a.png)
        print(a.png)


if __name__ == "__main__":
    with one_line_errors():
        main()
