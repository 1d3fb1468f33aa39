"""Make a page about one run: what it learned, how fast it was, its curves, and the texts that it wrote as it trained.

    python bench/report.py out-shakespeare-char-cpu
    python bench/report.py out-shakespeare-char-cpu --html report.html
    python bench/report.py out-shakespeare-char-cpu out-first --serve

Reads log.jsonl in the out_dir and writes out_dir/report.html. For nanoGPT's printed log it writes NAME-report.html in
the current folder. The page opens in any browser and needs no network; drawing it needs the package plotly.

--serve writes nothing: it serves a page on this machine that follows one or several runs as they train.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

from bench.analysis.logs import read_runs
from bench.analysis.page import page, plotly_js
from bench.analysis.verdict import Comparison, compare
from deskgpt.system.errors import OneLineParser, one_line_errors
from deskgpt.system.files import write_atomically

if TYPE_CHECKING:
    from starlette.applications import Starlette

REFRESH_S = 10  # of a page that is served


def app_of(paths: list[str]) -> Starlette:
    """Return a web application of one page, made anew at each request."""
    from starlette.requests import Request
    from starlette.responses import HTMLResponse
    from starlette.routing import Route

    from deskgpt.serve.server import make_app

    def show(request: Request) -> HTMLResponse:
        try:
            found = compare(read_runs(paths))
        except ValueError as e:
            found = Comparison([], "Waiting for the run", [str(e)])
        return HTMLResponse(page(found, REFRESH_S).encode("utf-8", "replace"))

    return make_app([Route("/", show)])


def main() -> None:
    parser = OneLineParser(str(__doc__))
    parser.add_argument("out_dir", nargs="+", help="of a run; or what nanoGPT printed, in a file")
    parser.add_argument("--html", metavar="FILE", help="instead of out_dir/report.html, or NAME-report.html")
    parser.add_argument("--serve", action="store_true", help="a page that follows the runs, until Ctrl+C")
    parser.add_argument("--port", type=int, default=0, help="of --serve; default: a free one")
    a = parser.parse_args()
    plotly_js()  # at once, if the package is missing
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
    found = compare(read_runs(a.out_dir))
    write_atomically(html, page(found).encode("utf-8", "replace"))  # in place of a link of this name, too
    print(html)


if __name__ == "__main__":
    with one_line_errors():
        main()
