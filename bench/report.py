"""Make a page about one run: what it learned, how fast it was, its curves, and the texts that it wrote as it trained.

    python bench/report.py out-shakespeare-char-cpu
    python bench/report.py out-shakespeare-char-cpu --html report.html

Reads log.jsonl in the out_dir and writes out_dir/report.html, also while the run trains. For nanoGPT's printed log it
writes NAME-report.html in the current folder. The page opens in any browser and needs no network; drawing it needs the
package plotly.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

from bench.analysis.logs import read_runs
from bench.analysis.page import page, plotly_js
from bench.analysis.verdict import compare
from deskgpt.system.errors import OneLineParser, one_line_errors
from deskgpt.system.files import write_atomically


def main() -> None:
    parser = OneLineParser(str(__doc__))
    parser.add_argument("out_dir", help="of a run; or what nanoGPT printed, in a file")
    parser.add_argument("--html", metavar="FILE", help="instead of out_dir/report.html, or NAME-report.html")
    a = parser.parse_args()
    plotly_js()  # at once, if the package is missing
    path = Path(a.out_dir)
    html = path / "report.html" if path.is_dir() else Path(f"{path.stem}-report.html")
    html = Path(a.html) if a.html else html
    found = compare(read_runs([a.out_dir]))
    write_atomically(html, page(found).encode("utf-8", "replace"))  # in place of a link of this name, too
    print(html)


if __name__ == "__main__":
    with one_line_errors():
        main()
