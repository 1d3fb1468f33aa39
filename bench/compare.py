"""Compare training runs: what changed, what they learned and how fast they were.

    python bench/compare.py out-a out-b
    python bench/compare.py out-a-seed1 out-a-seed2 out-b-seed1 out-b-seed2 --html compare.html
    python bench/compare.py log.txt out-b --card "RTX 4070"

A run is an out_dir with its log.jsonl, or a text file with what nanoGPT printed, on the card that
--card names. Runs are called A, B, C in the order given; runs that differ in nothing but their seed
are repeats. ± is a 95% interval over n repeats, and "± ?" means that the noise between seeds is not
known. Losses are compared on the same validation windows, after equal tokens, equal time and equal
FLOPs, where all runs were evaluated. --html FILE writes a page with curves.
"""

from __future__ import annotations

import sys
from pathlib import Path

# The repository; Python adds only this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.analysis.comparison import compare
from bench.analysis.logs import read_runs
from bench.analysis.page import write_page
from bench.output import markdown_table
from deskgpt.errors import OneLineParser, one_line_errors


def main() -> None:
    parser = OneLineParser(__doc__)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="an out_dir, a log.jsonl or what nanoGPT printed"
    )
    parser.add_argument("--card", default="", help="of nanoGPT's runs, for their MFU: RTX 4070")
    parser.add_argument("--html", metavar="FILE")
    a = parser.parse_args()
    found = compare(read_runs(a.runs, a.card))
    if a.html:
        write_page(Path(a.html), found)
    print(found.headline, *found.lines, sep="\n")
    for name, (head, *rows) in found.tables().items():
        print(f"\n## {name}\n\n{markdown_table(head, rows, left_columns=1)}")


if __name__ == "__main__":
    with one_line_errors():
        main()
