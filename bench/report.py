"""One run as an HTML page: how fast it was, what it learned, its curves, text from its checkpoint.

    python bench/report.py out-shakespeare-char-cpu
    python bench/report.py out-shakespeare-char-cpu --samples 0 --html report.html --png curves.png

Reads log.jsonl in the out_dir and writes out_dir/report.html; of a file with the printed log it writes NAME-report.html
here. The page opens in any browser and needs no network.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script, Python looks beside this file only

from bench.analysis.learning import overfit
from bench.analysis.page import Table, page, picture
from bench.analysis.runs import Run, complete, read_run
from bench.compare import band, evaluation, median_ms
from deskgpt.errors import one_line_errors
from deskgpt.runlog import clock

ROOT = Path(__file__).resolve().parents[1]


def shown(value: float | None, form: str, unit: str = "") -> str:
    return "n/a" if value is None or not math.isfinite(value) else format(value, form) + unit


def median(run: Run, key: str) -> float | None:
    """Of a field over the logged steps, but the first; None where the log does not have it."""
    known = [e[key] for e in run.iters if e[key] is not None and (e["iter"] > 0 or len(run.iters) == 1)]
    return statistics.median(known) if known else None


def speed(run: Run) -> Table:
    """What the steps and all beside them took."""
    start, end = run.start, run.end
    p10, p90 = band([run]) or (None, None)
    rows = [["time of a step, median", shown(median_ms(run), ".2f", " ms")]]
    rows += [["10% to 90% of the steps", f"{shown(p10, '.2f')} to {shown(p90, '.2f', ' ms')}"]]
    rows += [["tokens/s, median", shown(median(run, "tokens_per_s"), ",.0f")]]
    mfu, peak = median(run, "mfu"), start.get("peak_flops")
    of_peak = f" of {peak / 1e12:.2f} TFLOP/s ({start.get('peak_source')})" if peak else ""
    rows += [["MFU, median", "n/a" if mfu is None else f"{mfu:.2%}{of_peak}"]]
    train_s = next((e["train_s"] for e in reversed(run.iters) if e.get("train_s") is not None), end.get("train_s"))
    evaluated = evaluation(run)
    spent = {"training": train_s, "of it waiting for data": end.get("data_wait_s")}
    spent |= {"evaluation": evaluated[0] if evaluated else None, "saving": end.get("save_s")}
    spent |= {"warm-up and compiling": start.get("warm_up_s")}
    rows += [[name, "n/a" if s is None else clock(s)] for name, s in spent.items()]
    memory = end.get("peak_memory_bytes")
    return Table("Speed", [], [*rows, ["peak memory", "n/a" if memory is None else f"{memory / 2**30:.2f} GiB"]])


def learning(run: Run) -> Table:
    """What the evaluations found."""
    if not run.val:
        return Table("Learning", [], [["evaluations", "none"]])
    best, last = run.best, run.val[-1]
    rows = []
    for name, e in (("best", best), ("last", last)) if last is not best else (("best", best),):
        se = "" if e.get("val_se") is None else f" ± {e['val_se']:.4f} (standard error)"
        rows += [[f"{name} val loss", f"{e['val_loss']:.4f}{se}, step {e['iter']:,}"]]
        rows += [[f"perplexity of the {name}", f"{math.exp(min(e['val_loss'], 700)):,.2f}"]]
        gap = None if e.get("train_loss") is None else e["val_loss"] - e["train_loss"]
        rows += [[f"val loss - train loss, {name}", shown(gap, "+.4f")]]
    return Table("Learning", [], [*rows, ["val loss turned up", turned(run)]], "Losses in nats per token.")


def turned(run: Run) -> str:
    """Whether and where the validation loss stopped falling."""
    if found := overfit(run):
        return f"after step {found[0]:,}, by {found[1]:.4f} since"
    rise = run.val[-1]["val_loss"] - run.best["val_loss"]
    return f"not beyond the noise (the last is {rise:.4f} above the lowest)" if rise else "no, the last is the lowest"


def verdict(run: Run) -> list[str]:
    said = ["no evaluation in the log"]
    if run.val:
        said = [f"best val loss {run.best['val_loss']:.4f} at step {run.best['iter']:,}"]
    if ms := median_ms(run):
        said += [f"{ms:.2f} ms a step, MFU {shown(median(run, 'mfu'), '.2%')}"]
    return said


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
    compiled = {True: "compiled", False: "not compiled", None: ""}[s.get("compiled")]
    compiled += f" by {s['compiler']}" if s.get("compiler") else ""
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
    parser.add_argument("--html", metavar="FILE", help="in place of out_dir/report.html, or NAME-report.html")
    parser.add_argument("--png", metavar="FILE", help="loss and time of a step as a picture")
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="texts from the checkpoint")
    parser.add_argument("--max_new_tokens", type=int, default=200, help="of each sample")
    a = parser.parse_args()
    if a.png and not a.png.endswith(".png"):
        raise ValueError(f"--png {a.png}: name a .png file")
    run, path = read_run(a.out_dir), Path(a.out_dir)
    complete(run)
    of_checkpoint = samples(path, a.samples, a.max_new_tokens) if a.samples > 0 and path.is_dir() else []
    text = page(run.name, [run], [speed(run), learning(run)], verdict(run), of_checkpoint, about(run))
    html = Path(a.html) if a.html else path / "report.html" if path.is_dir() else Path(f"{path.stem}-report.html")
    html.write_text(text, encoding="utf-8")
    print(html)
    if a.png:
        picture([run], a.png)
        print(a.png)


if __name__ == "__main__":
    with one_line_errors():
        main()
