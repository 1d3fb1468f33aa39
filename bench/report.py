"""One run as an HTML page: what it learned, how fast it was, its curves, and text from its checkpoint.

    python bench/report.py out-shakespeare-char-cpu
    python bench/report.py out-shakespeare-char-cpu --samples 0 --html report.html
    python bench/report.py out-shakespeare-char-cpu out-first --serve

Reads log.jsonl in the out_dir and writes out_dir/report.html. For nanoGPT's printed log it writes
NAME-report.html in the current folder. The page opens in any browser and needs no network.

--serve writes nothing: it serves a page on this machine that follows the runs as they train, one or several.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

from bench.analysis import expected
from bench.analysis.arms import arms_of
from bench.analysis.learning import learning_rows, overfit, ranking
from bench.analysis.live import Described, serve
from bench.analysis.logs import read_run
from bench.analysis.page import Figure, Headline, Table, page
from bench.analysis.runs import Run, complete
from bench.analysis.speed import median_ms, mfu, speed_rows, tokens_per_s
from deskgpt.system.errors import OneLineParser, one_line_errors
from deskgpt.system.formatting import in_tera

ROOT = Path(__file__).resolve().parents[1]


# ---- tables --------------------------------------------------------------------------------------------------


def tables(run: Run) -> list[Table]:
    """Speed and learning, the rows that bench/compare.py has too."""
    arms = arms_of([run])
    speeds = [row.cells()[:2] for row in speed_rows(arms)]
    losses = [row.cells()[:2] for row in learning_rows(arms, [], ranking([run]))]
    note = "Losses in nats per token." if losses else "No evaluation in the log."
    return [Table("Speed", [], speeds), Table("Learning", [], losses, note)]


# ---- the rest of the page ------------------------------------------------------------------------------------


def headline(run: Run, missing: str) -> Headline:
    """The run in a sentence and three figures. missing: what stands for a figure that is not known."""
    ms = median_ms(run)
    rate = tokens_per_s(run)
    share = mfu(run)
    peak = run.start.get("peak_flops")
    of_peak = f"of the peak, {in_tera(peak)} TFLOP/s ({run.start.get('peak_source')})" if peak else ""
    figures = [
        best_figure(run, missing),
        Figure("speed", f"{rate:,.0f} tokens/s" if rate else missing, f"{ms:,.4g} ms a step" if ms else ""),
        Figure("MFU", f"{share:.1%}" if share else missing, of_peak),
    ]
    return Headline(verdict(run), figures, run.name)


def best_figure(run: Run, missing: str) -> Figure:
    if not run.val:
        return Figure("best val loss", missing, "no evaluation in the log")
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
        compiler = f" by {start['compiler']}" if "compiler" in start else ""
        compiled = {True: f"compiled{compiler}", False: "not compiled", None: None}[start.get("compiled")]
        parts = [f"{start.get('world_size', 1)} x {start['device']}", start.get("dtype"), compiled]
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


def describe(run: Run, missing: str = "n/a") -> Described:
    """What the page says about a run, besides its curves, samples and settings. missing: as for headline."""
    return Described(headline(run, missing), tables(run), about(run))


def main() -> None:
    parser = OneLineParser(str(__doc__))
    parser.add_argument("out_dir", nargs="+", help="of a run; or what nanoGPT printed, in a file")
    parser.add_argument("--html", metavar="FILE", help="instead of out_dir/report.html, or NAME-report.html")
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="texts from the checkpoint")
    parser.add_argument("--max_new_tokens", type=int, default=200, help="of each sample")
    parser.add_argument("--serve", action="store_true", help="a page that follows the runs, until Ctrl+C")
    parser.add_argument("--port", type=int, default=0, help="of --serve; default: a free one")
    a = parser.parse_args()
    if a.serve:
        for path in a.out_dir:
            if Path(path).is_file() and not path.endswith(".jsonl"):
                raise ValueError(f"--serve {path}: name the run's out_dir; only its log.jsonl can be followed")
        if not 0 <= a.port < 65536:
            raise ValueError(f"--port {a.port}: ports are from 0 to 65535")
        serve(a.out_dir, a.port, describe)
        return
    if len(a.out_dir) > 1:
        raise ValueError("name one run; bench/compare.py compares several, and --serve follows several")

    run = read_run(a.out_dir[0])
    complete(run)
    path = Path(a.out_dir[0])
    html = path / "report.html" if path.is_dir() else Path(f"{path.stem}-report.html")
    if a.html:
        html = Path(a.html)
    texts = samples(path, a.samples, a.max_new_tokens) if a.samples > 0 and path.is_dir() else []
    d = describe(run)
    about = f"{d.about}; page of {time.strftime('%Y-%m-%d')}"
    content = page(run.name, [run], d.tables, expected.verdict(run), texts, about, [d.headline])
    html.write_text(content, encoding="utf-8", errors="replace")
    print(html)


if __name__ == "__main__":
    with one_line_errors():
        main()
