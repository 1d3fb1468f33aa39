"""Compares training runs: what changed, what that did to speed and learning, and how sure it is.

    python bench/compare.py out-a out-b
    python bench/compare.py out-a-seed1 out-a-seed2 out-b-seed1 out-b-seed2 --html compare.html
    python bench/compare.py log.txt out-b

A run is an out_dir with its log.jsonl, or a text file with what nanoGPT printed. Runs are called A, B, C in the order
given; runs that differ only in their seed are repeats of one arm. Time includes training and compiling, but not
evaluation. ± is a 95% interval over n runs, of all differences in a row together; of two runs the range is shown.
Losses are compared on the same validation windows only, or, between tokenizers, in bits per byte of the same whole
text. --html FILE writes a page with curves.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

from bench.analysis.logs import read_runs
from bench.analysis.page import page
from bench.analysis.verdict import COMMAND, compare
from bench.output import markdown_table
from deskgpt.system.errors import OneLineParser, one_line_errors


def main() -> None:
    parser = OneLineParser(str(__doc__))
    parser.add_argument("runs", nargs="+", metavar="RUN", help="an out_dir, a log.jsonl or what nanoGPT printed")
    parser.add_argument("--html", metavar="FILE")
    a = parser.parse_args()
    if a.html and not Path(a.html).resolve().parent.is_dir():
        raise ValueError(f"{a.html}: its folder does not exist; make it, or choose another")
    found = compare(read_runs(a.runs))
    for name, (head, *rows) in found.tables().items():
        print(f"## {name}\n\n{markdown_table(head, rows, left_columns=1)}\n")
    for line in [*found.notes(), found.headline, *found.lines]:
        print(f"    {line.removeprefix(COMMAND)}" if line.startswith(COMMAND) else line)
    if a.html:
        Path(a.html).write_text(page(found), encoding="utf-8", errors="replace")


if __name__ == "__main__":
    with one_line_errors():
        main()
