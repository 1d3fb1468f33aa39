"""Make a page about one run: what it learned, how fast it was, its curves, and the texts that it
wrote as it trained.

    python bench/report.py out-shakespeare-char-cpu
    python bench/report.py out-shakespeare-char-cpu --follow

Reads log.jsonl in the out_dir and writes out_dir/report.html, also while the run trains; with
--follow again and again until the run ends, and the open page shows the latest. The page
opens in any browser and needs no network; drawing it needs the package plotly. bench/compare.py RUN
--html FILE makes the page of several runs, and of what nanoGPT printed.
"""

import sys
import time
from pathlib import Path

# The repository; Python adds only this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.compare import compare, write_page
from bench.logs import read_runs
from deskgpt.errors import OneLineParser, one_line_errors

RELOAD_S = 10  # between two pages of a run that trains


def main() -> None:
    parser = OneLineParser(__doc__)
    parser.add_argument("out_dir")
    parser.add_argument("--follow", action="store_true", help="until the run ends")
    a = parser.parse_args()
    html = Path(a.out_dir, "report.html")
    print(html.absolute().as_uri(), flush=True)
    while True:
        found = compare(read_runs([a.out_dir]))
        follows = a.follow and not found.runs[0].has_ended
        write_page(html, found, RELOAD_S if follows else 0)
        if not follows:
            return
        time.sleep(RELOAD_S)


if __name__ == "__main__":
    with one_line_errors():
        main()
