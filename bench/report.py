"""One run as an HTML page: what it learned, how fast it was, its curves, and text from its checkpoint.

    python bench/report.py out-shakespeare-char-cpu
    python bench/report.py out-shakespeare-char-cpu --samples 0 --html report.html
    python bench/report.py out-shakespeare-char-cpu out-first --serve

Reads log.jsonl in the out_dir and writes out_dir/report.html. For nanoGPT's printed log it writes NAME-report.html in
the current folder. The page opens in any browser and needs no network; drawing it needs the package plotly.

--serve writes nothing: it serves a page on this machine that follows one or several runs as they train.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

from bench.analysis.logs import Run, median_ms, mfu, read_run, tokens_per_s
from bench.analysis.page import Figure, Headline, page, plotly_js
from bench.analysis.table import band_of, overfit
from bench.compare import compare, compare_html
from deskgpt.system.errors import OneLineParser, one_line_errors
from deskgpt.system.terminal import clock

if TYPE_CHECKING:
    from starlette.applications import Starlette

ROOT = Path(__file__).resolve().parents[1]
REFRESH_S = 10  # of a page that is served
MOST_TEXTS = 20  # on a page


def report_html(paths: list[str], texts: list[str] | None = None, refresh_s: int = 0) -> str:
    """The page of one run, or of several side by side. texts: samples. Raises ValueError where there is no run."""
    runs = [read_run(path) for path in paths]
    if len(runs) > 1:
        return compare_html(runs, [], refresh_s)
    (run,) = runs
    tables = [table for table in compare(runs, [])[0] if table.title != "What changed"]
    for table in tables:
        table.columns = []
        table.rows = [row[:2] for row in table.rows]
    written = [f"step {e['iter']:,}: {text}" for e in run.samples[::-1] for text in e["texts"]]
    texts = [*(texts or []), *written[:MOST_TEXTS]]
    return page(run.name, runs, tables, judgement(run), texts, about(run), [headline(run)], refresh_s=refresh_s)


def headline(run: Run) -> Headline:
    """The run in a sentence and three figures."""
    rate = tokens_per_s(run)
    share = mfu(run)
    best = run.best if run.val else None
    se = best and best["val_se"]
    n = f" (95% of the text, n={best['eval_windows']:,.0f} windows)" if best and se and best["eval_windows"] else ""
    loss = f"{best['val_loss']:.4f}" + (f" ± {1.96 * se:.4f}" if se else "") if best else "n/a"
    figures = [
        Figure("lowest val loss", loss, f"at step {best['iter']:,}{n}" if best else "no evaluation in the log"),
        Figure("speed", f"{rate:,.0f} tokens/s" if rate else "n/a"),
        Figure("MFU", f"{share:.1%}" if share else "n/a", f"of the peak, {run.start.get('peak_source')}"),
    ]
    first = run.evals[0] if run.val else {}
    text = "The log has no evaluation yet"
    if best and first["val_loss"] is not None:
        text = f"The val loss fell from {first['val_loss']:.2f} to {best['val_loss']:.2f} in {best['iter']:,} steps"
        if best is first:
            text = f"The val loss is {best['val_loss']:.2f} at step {best['iter']:,}, and was never lower"
    return Headline(text, figures, run.name)


def judgement(run: Run) -> list[str]:
    """Where it is, if it has not ended, and what its val losses say, whatever its data: as usual, overfit, falling."""
    lines = []
    goal = run.settings.get("max_iters")
    if not run.end and run.iters and type(goal) is int:
        done = int(run.iters[-1]["iter"]) + 1
        left_s = max(0, goal - done) * (median_ms(run) or 0.0) / 1e3
        lines.append(f"Step {done:,} of {goal:,}; {clock(left_s)} of training left, if it still runs.")
    if not run.val:
        return lines
    band = band_of(run)
    said = band.verdict({e["iter"]: e["val_loss"] for e in run.val}) if band else ""
    if said:
        lines.append(f"Beside other runs with these settings: {said}.")
    if not band:
        lines.append("No band of usual losses is known for these settings; bench/ask.py --band makes one of a config.")
    turned = overfit(run)
    if turned:
        lines.append(
            f"The model overfits: the val loss has risen by {turned[1]:.4f} since step {turned[0]:,} while the train "
            "loss fell. More data, --dropout or a smaller model may help."
        )
    last = run.val[-1]
    earlier = [e["val_loss"] for e in run.val if last["iter"] * 0.7 <= e["iter"] <= last["iter"] * 0.9]
    if earlier and last["val_se"] and earlier[-1] - last["val_loss"] > 1.96 * last["val_se"]:
        fell = earlier[-1] - last["val_loss"]
        lines.append(f"The val loss was still falling at the end, by {fell:.4f} in the last steps: train longer.")
    if last["train_loss"] is not None:
        lines.append(f"At the end the val loss is {last['val_loss'] - last['train_loss']:.4f} above the train loss.")
    return lines


def samples(out_dir: Path, n: int, tokens: int) -> list[str]:
    """n texts that sample.py writes with the checkpoint in out_dir, or one line that says why there are none."""
    command = [sys.executable, "sample.py", f"--out_dir={out_dir.resolve()}"]
    command += [f"--num_samples={n}", f"--max_new_tokens={tokens}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", errors="replace")
    if done.returncode:
        return [f"no samples: {(done.stderr.strip().splitlines() or ['sample.py failed'])[-1]}"]
    return done.stdout.split("\n---------------\n")[:n]


def about(run: Run) -> str:
    """The machine, versions and commit of the run, and its size."""
    start = run.start
    facts = [f"{start.get('world_size', 1)} x {start['device']}, {start.get('dtype')}"] if "device" in start else []
    facts += [f"compiled by {start.get('compiler')}"] if start.get("compiled") else []
    facts += [f"{name} {version}" for name, version in start.get("versions", {}).items()]
    facts += [f"commit {start['git_commit']}"] if "git_commit" in start else []
    return "; ".join([*facts, f"page of {time.strftime('%Y-%m-%d %H:%M')}"])


def app_of(paths: list[str]) -> Starlette:
    """A web application of one page, made anew at each request."""
    from starlette.requests import Request
    from starlette.responses import HTMLResponse
    from starlette.routing import Route

    from deskgpt.serve.server import make_app

    def show(request: Request) -> HTMLResponse:
        try:
            html = report_html(paths, refresh_s=REFRESH_S)
        except ValueError as e:
            html = page("Waiting for the run", [], [], [str(e)], refresh_s=REFRESH_S)
        return HTMLResponse(html.encode("utf-8", "replace"))

    return make_app([Route("/", show)])


def main() -> None:
    parser = OneLineParser(str(__doc__))
    parser.add_argument("out_dir", nargs="+", help="of a run; or what nanoGPT printed, in a file")
    parser.add_argument("--html", metavar="FILE", help="instead of out_dir/report.html, or NAME-report.html")
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="texts from the checkpoint")
    parser.add_argument("--max_new_tokens", type=int, default=200, help="of each sample")
    parser.add_argument("--serve", action="store_true", help="a page that follows the runs, until Ctrl+C")
    parser.add_argument("--port", type=int, default=0, help="of --serve; default: a free one")
    a = parser.parse_args()
    plotly_js()  # says what to install
    if a.serve:
        if not 0 <= a.port < 65536:
            raise ValueError(f"--port {a.port}: ports are from 0 to 65535")
        from deskgpt.serve.server import run_app

        run_app(app_of(a.out_dir), a.port)
        return
    if len(a.out_dir) > 1:
        raise ValueError("name one run; bench/compare.py compares several, and --serve follows several")
    path = Path(a.out_dir[0])
    html = path / "report.html" if path.is_dir() else Path(f"{path.stem}-report.html")
    html = Path(a.html) if a.html else html
    texts = samples(path, a.samples, a.max_new_tokens) if a.samples > 0 and path.is_dir() else []
    html.write_text(report_html(a.out_dir, texts), encoding="utf-8", errors="replace")
    print(html)


if __name__ == "__main__":
    with one_line_errors():
        main()
