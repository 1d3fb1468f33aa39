"""A page about one run: what it learned, how fast it was, its curves, and text from its checkpoint.

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
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

from bench.analysis.logs import read_runs
from bench.analysis.page import page, plotly_js
from bench.analysis.verdict import Comparison, compare
from deskgpt.system.errors import OneLineParser, one_line_errors

if TYPE_CHECKING:
    from starlette.applications import Starlette

ROOT = Path(__file__).resolve().parents[1]
REFRESH_S = 10  # of a page that is served
MOST_TEXTS = 20  # on a page


def report_html(paths: list[str], texts: list[str] | None = None, refresh_s: int = 0) -> str:
    """The page of one run, or of several side by side. texts: samples. Raises ValueError where there is no run."""
    runs = read_runs(paths)
    written = [f"step {e['iter']:,}: {text}" for run in runs for e in run.samples[::-1] for text in e["texts"]]
    return page(compare(runs), [*(texts or []), *written[:MOST_TEXTS]], refresh_s)


def samples(out_dir: Path, n: int, tokens: int) -> list[str]:
    """n texts that sample.py writes with the checkpoint in out_dir, or one line that says why there are none."""
    command = [sys.executable, "sample.py", f"--out_dir={out_dir.resolve()}"]
    command += [f"--num_samples={n}", f"--max_new_tokens={tokens}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", errors="replace")
    if done.returncode:
        return [f"no samples: {(done.stderr.strip().splitlines() or ['sample.py failed'])[-1]}"]
    return done.stdout.split("\n---------------\n")[:n]


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
            html = page(Comparison([], [], "Waiting for the run", [str(e)]), refresh_s=REFRESH_S)
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
