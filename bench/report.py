"""One run as an HTML page: what it learned, how fast it was, its curves, and text from its checkpoint.

    python bench/report.py out-shakespeare-char-cpu
    python bench/report.py out-shakespeare-char-cpu --samples 0 --html report.html --png curves.png
    python bench/report.py out-shakespeare-char-cpu out-first --serve

Reads log.jsonl in the out_dir and writes out_dir/report.html. For a file with a printed log it writes NAME-report.html
in the current folder. The page opens in any browser and needs no network.

--serve writes nothing: it serves a page on this machine that follows the runs as they train, one or several.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

from bench.analysis.learning import gap_to_train, overfit, perplexity
from bench.analysis.live import Described, serve
from bench.analysis.logs import read_run
from bench.analysis.page import Figure, Headline, Table, page, picture
from bench.analysis.runs import Run, complete
from bench.analysis.speed import band, evaluation, median_ms, percent
from deskgpt.machine.errors import one_line_errors
from deskgpt.machine.words import clock

ROOT = Path(__file__).resolve().parents[1]


def or_na(value: float | None, form: str, unit: str = "") -> str:
    return "n/a" if value is None or not math.isfinite(value) else format(value, form) + unit


def median(run: Run, key: str) -> float | None:
    """The median of a field of the logged steps, without step 0 unless it is the only one; None where none has it."""
    known = [e[key] for e in run.iters if e[key] is not None and (e["iter"] > 0 or len(run.iters) == 1)]
    return statistics.median(known) if known else None


# ---- tables --------------------------------------------------------------------------------------------------


def speed_table(run: Run) -> Table:
    """How long a step took, and everything else."""
    start, end = run.start, run.end
    p10, p90 = band([run]) or (None, None)
    mfu = median(run, "mfu")
    of_peak = peak_text(run)
    evaluated = evaluation(run)
    seconds = {
        "training": trained_s(run),
        "of it waiting for data": end.get("data_wait_s"),
        "evaluation": evaluated[0] if evaluated else None,
        "saving": end.get("save_s"),
        "warm-up and compiling": start.get("warm_up_s"),
    }
    memory = end.get("peak_memory_bytes")
    rows = [
        ["time of a step, median", or_na(median_ms(run), ".2f", " ms")],
        ["10% to 90% of the steps", f"{or_na(p10, '.2f')} to {or_na(p90, '.2f', ' ms')}"],
        ["tokens/s, median", or_na(median(run, "tokens_per_s"), ",.0f")],
        ["MFU, median", "n/a" if mfu is None else f"{percent(mfu)} {of_peak}".strip()],
        *([name, "n/a" if spent_s is None else clock(spent_s)] for name, spent_s in seconds.items()),
        ["peak memory", "n/a" if memory is None else f"{memory / 2**30:.2f} GiB"],
    ]
    return Table("Speed", [], rows)


def peak_text(run: Run) -> str:
    """What the MFU refers to; empty where the log does not say."""
    peak = run.start.get("peak_flops")
    return f"of {peak / 1e12:.2f} TFLOP/s ({run.start.get('peak_source')})" if peak else ""


def trained_s(run: Run) -> float | None:
    """Seconds of training until the last step for which they are known."""
    known = [e["train_s"] for e in run.iters if e.get("train_s") is not None]
    return known[-1] if known else run.end.get("train_s")


def learning_table(run: Run) -> Table:
    """What the evaluations found."""
    if not run.val:
        return Table("Learning", [], [["evaluations", "none"]])
    evaluations = {"best": run.best, "last": run.val[-1]}
    if run.best is run.val[-1]:
        del evaluations["last"]
    rows = []
    for name, e in evaluations.items():
        se = "" if e.get("val_se") is None else f" ± {e['val_se']:.4f} (standard error)"
        rows += [
            [f"{name} val loss", f"{e['val_loss']:.4f}{se}, step {e['iter']:,}"],
            [f"perplexity of the {name}", f"{perplexity(e['val_loss']):,.2f}"],
            [f"bits per byte of the {name}", or_na(e.get("val_bpb"), ".4f")],
            [f"val loss - train loss, {name}", or_na(gap_to_train(e), "+.4f")],
        ]
    rows.append(["val loss turned up", turned(run)])
    return Table("Learning", [], rows, "Losses in nats per token; bits per byte of text compare between tokenizers.")


def turned(run: Run) -> str:
    """Whether and where the validation loss stopped falling."""
    found = overfit(run)
    if found:
        step, rise = found
        return f"after step {step:,}, by {rise:.4f} since"
    rise = run.val[-1]["val_loss"] - run.best["val_loss"]
    return f"not beyond the noise (the last is {rise:.4f} above the lowest)" if rise else "no, the last is the lowest"


# ---- the rest of the page ------------------------------------------------------------------------------------


def headline(run: Run) -> Headline:
    """The run in a sentence and three figures."""
    ms = median_ms(run)
    mfu = median(run, "mfu")
    figures = [
        best_figure(run),
        Figure("speed", or_na(median(run, "tokens_per_s"), ",.0f", " tokens/s"), f"{ms:,.4g} ms a step" if ms else ""),
        Figure("MFU", "n/a" if mfu is None else f"{mfu:.1%}", peak_text(run)),
    ]
    return Headline(verdict(run), figures, run.name)


def best_figure(run: Run) -> Figure:
    if not run.val:
        return Figure("best val loss", "n/a", "no evaluation in the log")
    best = run.best
    where = "the last evaluation" if best is run.val[-1] else f"of {len(run.val)} evaluations"
    error = "" if best.get("val_se") is None else f" ± {best['val_se']:.4f}"
    of = ", ± one standard error" if error else ""
    return Figure("best val loss", f"{best['val_loss']:.4f}{error}", f"at step {best['iter']:,}, {where}{of}")


def verdict(run: Run) -> str:
    """What the run learned, in one sentence."""
    losses = [e for e in run.iters if e["loss"] is not None]
    if not run.val:
        if not losses:
            return "The log holds no loss so far"
        return f"No evaluation in the log; the train loss was {losses[-1]['loss']:.2f} at step {losses[-1]['iter']:,}"
    first = run.val[0]
    best = run.best
    if len(run.val) == 1:
        return f"The val loss is {best['val_loss']:.2f} at step {best['iter']:,}"
    if best is first:
        return f"The val loss has not fallen below that of step {first['iter']:,}, {first['val_loss']:.2f}"
    fell = f"The val loss fell from {first['val_loss']:.2f} to {best['val_loss']:.2f} in {best['iter']:,} steps"
    found = overfit(run)
    return f"{fell}, and has risen by {found[1]:.2f} since" if found else fell


def samples(out_dir: Path, n: int, tokens: int) -> list[str]:
    """n texts that sample.py writes with the checkpoint in out_dir, or one line that says why there are none."""
    command = [sys.executable, "sample.py", f"--out_dir={out_dir.resolve()}"]
    command += [f"--num_samples={n}", f"--max_new_tokens={tokens}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", errors="replace")
    if done.returncode:
        errors = done.stderr.strip().splitlines() or ["sample.py failed"]
        return [f"no samples: {errors[-1]}"]
    return done.stdout.split("\n---------------\n")[:n]


def about(run: Run) -> str:
    """The machine, versions and commit of the run, and its size."""
    start = run.start
    facts = []
    if "device" in start:
        parts = [f"{start.get('world_size', 1)} x {start['device']}", start.get("dtype"), how_compiled(run)]
        facts.append(", ".join(part for part in parts if part))
    if start.get("versions"):
        facts.append(", ".join(f"{name} {version}" for name, version in start["versions"].items()))
    if start.get("git_commit"):
        facts.append(f"commit {start['git_commit']}")
    if "parameters" in start:
        facts.append(f"{start['parameters']:,} parameters")
    if run.tokens_per_step:
        facts.append(f"{run.tokens_per_step:,} tokens per step")
    if run.flops_per_token:
        facts.append(f"{run.flops_per_token / 1e6:.2f} MFLOPs per token")
    return "; ".join(facts)


def how_compiled(run: Run) -> str:
    compiled = {True: "compiled", False: "not compiled", None: ""}[run.start.get("compiled")]
    compiler = run.start.get("compiler")
    return f"{compiled} by {compiler}" if compiler else compiled


def describe(run: Run) -> Described:
    """What the page says about a run, besides its curves, samples and settings."""
    return Described(headline(run), [speed_table(run), learning_table(run)], about(run))


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out_dir", nargs="+", help="of a run; or a file with its printed log")
    parser.add_argument("--html", metavar="FILE", help="instead of out_dir/report.html, or NAME-report.html")
    parser.add_argument("--png", metavar="FILE", help="loss and time of a step as a picture")
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="texts from the checkpoint")
    parser.add_argument("--max_new_tokens", type=int, default=200, help="of each sample")
    parser.add_argument("--serve", action="store_true", help="a page that follows the runs, until Ctrl+C")
    parser.add_argument("--port", type=int, help="of --serve; default: a free one from 8000 on")
    a = parser.parse_args()
    if a.serve:
        for path in a.out_dir:
            if Path(path).is_file() and not path.endswith(".jsonl"):
                raise ValueError(f"--serve {path}: name the run's out_dir; only its log.jsonl can be followed")
        if a.port is not None and not 0 < a.port < 65536:
            raise ValueError(f"--port {a.port}: ports are from 1 to 65535")
        serve(a.out_dir, a.port, describe)
        return
    if len(a.out_dir) > 1:
        raise ValueError("name one run; bench/compare.py compares several, and --serve follows several")
    if a.png and not a.png.endswith(".png"):
        raise ValueError(f"--png {a.png}: name a .png file")

    run = read_run(a.out_dir[0])
    complete(run)
    path = Path(a.out_dir[0])
    html = path / "report.html" if path.is_dir() else Path(f"{path.stem}-report.html")
    if a.html:
        html = Path(a.html)
    texts = samples(path, a.samples, a.max_new_tokens) if a.samples > 0 and path.is_dir() else []
    d = describe(run)
    about = f"{d.about}; page of {time.strftime('%Y-%m-%d')}"
    content = page(run.name, [run], d.tables, [], texts, about, [d.headline])
    html.write_text(content, encoding="utf-8", errors="replace")
    print(html)
    if a.png:
        picture([run], a.png)
        print(a.png)


if __name__ == "__main__":
    with one_line_errors():
        main()
