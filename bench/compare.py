"""Compares training runs: what changed, what that did to speed and learning, and how sure it is.

    python bench/compare.py out-a out-b
    python bench/compare.py log.txt out-b --set A.batch_size=16 A.n_layer=12 --device "A=RTX 4070"
    python bench/compare.py out-a-seed1 out-a-seed2 out-b-seed1 out-b-seed2 --html report.html

A run is an out_dir with its log.jsonl, or a text file with what nanoGPT printed. Runs are called A, B, C in the order
given; runs that differ only in their seed are repeats of one arm. --set adds what a log does not say: a setting of
train.py, or parameters, tokens_per_step, tokenizer, val_tokens, bytes_per_token, world_size, peak_flops. Time includes
training and compiling, but not evaluation. ± is a 95% interval over n runs, of all differences in a row together; of
two runs the range is shown. Losses are compared on the same validation windows only, or, between tokenizers, in bits
per byte of the same whole text. --html FILE and --json FILE write the tables as a page and as data.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

from bench.analysis.logs import Run, read_run
from bench.analysis.page import Headline, Table, page
from bench.analysis.table import Lead, Row, arms_of, change_rows, comparable, learning_rows, letters, speed_rows
from bench.analysis.verdict import COMMAND, headline, verdict
from bench.output import markdown_table
from deskgpt.system.errors import OneLineParser, one_line_errors


def compare(runs: list[Run], levels: list[float]) -> tuple[list[Table], list[str], dict[str, Any]]:
    """(tables, verdict, the same figures for programs) of runs; levels: losses to be reached."""
    arms = arms_of(runs)
    bits, reasons = comparable(runs)
    found = {
        "What changed": change_rows(arms),
        "Speed": speed_rows(arms),
        "Learning": learning_rows(arms, levels, bits, reasons),
    }
    speed = next((row.lead for row in found["Speed"] if row.label == "tokens/s"), Lead())
    loss = next((row for row in found["Learning"] if " at equal " in row.label), None)
    lines = verdict(arms, speed, loss, reasons)
    if bits:
        lines.append("Bits per byte depend on the context too: a longer one lowers them by itself.")
    peaks = [f"{arm.label}: {arm.runs[0].start['peak_source']}" for arm in arms if "peak_source" in arm.runs[0].start]
    notes = {"Speed": f"Peaks: {'; '.join(peaks)}." if peaks else ""}
    if len(runs) > 1 and not all(run.start.get("val_sha256") for run in runs):
        notes["Learning"] = "The logs do not say whether all were evaluated on the same data."
    columns = ["", *(f"{arm.label}: {arm.name}" for arm in arms), "leads"]
    tables = [Table(name, columns, [row.cells() for row in rows], notes.get(name, "")) for name, rows in found.items()]
    data = {
        "arms": [{"label": a.label, "runs": [r.name for r in a.runs], "settings": a.runs[0].settings} for a in arms],
        "rows": {name: as_data(rows) for name, rows in found.items()},
        "not_comparable": reasons,
        "headline": headline(arms, speed, loss, reasons),
        "verdict": lines,
    }
    return [table for table in tables if table.rows], lines, data


def as_data(rows: list[Row]) -> list[dict[str, Any]]:
    return [{"label": r.label, "values": r.values, "of_runs": r.of_runs, "lead": r.lead.text} for r in rows]


def as_markdown(table: Table) -> str:
    note = f"\n\n{table.note}" if table.note else ""
    return f"## {table.title}\n\n{markdown_table(table.columns, table.rows, left_columns=1)}{note}\n"


def compare_html(runs: list[Run], levels: list[float], refresh_s: int = 0) -> str:
    """The page of several runs."""
    tables, lines, data = compare(runs, levels)
    title = " and ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs"
    return page(title, runs, tables, lines, headlines=[Headline(data["headline"], [], title)], refresh_s=refresh_s)


def given_by_hand(paths: list[str], settings: list[str], devices: list[str]) -> dict[str, dict[str, str]]:
    """By the letter of each run, what --set and --device say about it. Raises ValueError."""
    given: dict[str, dict[str, str]] = {letter: {} for letter in letters(len(paths))}
    words = [("--set", *word.partition("=")) for word in settings]
    for device in devices:
        letter, equals, gpu = device.partition("=")
        words.append(("--device", f"{letter}.gpu" if equals else "gpu", "=", gpu if equals else device))
    for option, name, equals, value in words:
        letter, dot, key = name.rpartition(".")
        if not equals or (dot and letter not in given):
            raise ValueError(
                f"{option} {name}{equals}{value}: write {'|'.join(given)}.NAME=VALUE, or NAME=VALUE for all"
            )
        for of_run in [given[letter]] if dot else given.values():
            of_run[key] = value
    return given


def read_arguments() -> argparse.Namespace:
    """The command line. Raises ValueError for files that cannot be written and losses that are not finite."""
    parser = OneLineParser(str(__doc__))
    parser.add_argument("runs", nargs="+", metavar="RUN", help="an out_dir, a log.jsonl or what nanoGPT printed")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="[A.]NAME=VALUE")
    parser.add_argument("--device", action="append", default=[], metavar="[A=]NAME", help='such as "A=RTX 4070"')
    parser.add_argument("--loss", nargs="+", type=float, default=[], help="val losses (or bits per byte) to be reached")
    parser.add_argument("--html", metavar="FILE")
    parser.add_argument("--json", metavar="FILE")
    a = parser.parse_args()
    for file in (a.html, a.json):
        if file and not Path(file).resolve().parent.is_dir():
            raise ValueError(f"{file}: its folder does not exist; make it, or choose another")
    if not all(map(math.isfinite, a.loss)):
        raise ValueError(f"--loss {' '.join(map(str, a.loss))}: losses are finite numbers")
    return a


def main() -> None:
    a = read_arguments()
    given = given_by_hand(a.runs, a.set, a.device)
    runs = [read_run(path, given=given[letter]) for path, letter in zip(a.runs, given, strict=True)]
    tables, lines, data = compare(runs, a.loss)
    for table in tables:
        print(as_markdown(table))
    for letter, run in zip(given, runs, strict=True):
        for note in run.notes:
            print(f"{letter}: {note}.")
        run.name = f"{letter}: {run.name}"  # on the page, so that no two have the same name
    for line in [data["headline"], *lines]:
        print(f"    {line.removeprefix(COMMAND)}" if line.startswith(COMMAND) else line)
    if a.json:
        Path(a.json).write_text(json.dumps(data, indent=1), encoding="utf-8")
    if a.html:
        Path(a.html).write_text(compare_html(runs, a.loss), encoding="utf-8", errors="replace")


if __name__ == "__main__":
    with one_line_errors():
        main()
