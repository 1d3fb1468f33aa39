"""Make a page about one run: what it learned, how fast it was, its curves, and the texts that it
wrote as it trained.

    python bench/report.py out-shakespeare-char-cpu

Reads log.jsonl in the out_dir and writes out_dir/report.html, also while the run trains. The page
opens in any browser and needs no network; drawing it needs the package plotly. bench/compare.py RUN
--html FILE makes the page of several runs, and of what nanoGPT printed.
"""

from __future__ import annotations

import sys
from pathlib import Path

# The repository; Python adds only this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.compare import compare, write_page
from bench.logs import read_runs
from deskgpt.errors import OneLineParser, one_line_errors


def main() -> None:
    parser = OneLineParser(__doc__)
    parser.add_argument("out_dir")
    a = parser.parse_args()
    html = Path(a.out_dir, "report.html")
    write_page(html, compare(read_runs([a.out_dir])))
    print(html)


if __name__ == "__main__":
    with one_line_errors():
        main()
