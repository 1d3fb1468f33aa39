"""Compares training runs: what changed, what that did to speed and learning, and how sure it is.

    python bench/compare.py out-a out-b
    python bench/compare.py log.txt out-b --set A.batch_size=16 A.n_layer=12 --device "A=RTX 4070"
    python bench/compare.py out-a-seed1 out-a-seed2 out-b-seed1 out-b-seed2 --html report.html

A run is an out_dir with its log.jsonl, or a text file with what nanoGPT printed. Runs are called A, B, C in
the order given; runs that differ only in their seed are repeats of one arm. --set adds what a log does not say: any
setting of train.py, or one of the facts parameters, tokens_per_step, tokenizer, val_tokens, bytes_per_token, world_size
and peak_flops (which the log's MFU refers to). Time includes training and, where the log has it, compiling, but not
evaluation. A figure after ± is half the width of a 95% interval; of two repeats, and where that would be wider than
the figure itself, the range is shown. Runs with different tokenizers are ranked in bits per byte where their
validation text is the same.

Prints three tables, one of repeats run by run where there are any, and a verdict. --html FILE and --json FILE write
them as a page and as data.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

from bench.analysis.arms import Arm, Row, arms_of, change_rows, letters, unknown
from bench.analysis.learning import Ranking, learning_rows, ranking
from bench.analysis.logs import read_run
from bench.analysis.page import Headline, Table, page
from bench.analysis.runs import Run, complete, give
from bench.analysis.speed import speed_rows
from bench.analysis.verdict import headline, verdict
from bench.output import markdown_table
from deskgpt.system.errors import OneLineParser, one_line_errors

OF_REPEATS = ("tokens/s", "training", "lowest val loss", "at step", "bits per byte there")  # run by run
LOSS_HELP = "val losses to be reached, in nats per token; in bits per byte where these are ranked"


def compare(runs: list[Run], levels: list[float]) -> tuple[list[Table], list[str], dict[str, Any]]:
    """(tables, verdict, the same figures for programs) of runs that are complete; levels: losses to be reached."""
    arms = arms_of(runs)
    ranked = ranking(runs)
    changes = change_rows(arms)
    speeds = speed_rows(arms)
    losses = learning_rows(arms, levels, ranked)
    lines = verdict(arms, speeds, losses, ranked)

    tables = [
        arms_table("What changed", arms, changes, "", known_note(arms, runs)),
        arms_table("Speed", arms, speeds, "leads", peaks_note(arms)),
        arms_table("Learning", arms, losses, "leads", ranking_note(ranked, runs)),
        repeats_table(arms, [*speeds, *losses]),
    ]
    data = {
        "arms": [{"label": a.label, "runs": [r.name for r in a.runs], "settings": a.runs[0].settings} for a in arms],
        "rows": {"What changed": as_data(changes), "Speed": as_data(speeds), "Learning": as_data(losses)},
        "not_ranked": ranked.reasons,
        "ranked_in": ranked.unit,
        "headline": headline(arms, speeds, losses, ranked),
        "verdict": lines,
    }
    return [table for table in tables if table.rows], lines, data


def arms_table(title: str, arms: list[Arm], rows: list[Row], last_column: str, note: str) -> Table:
    """A table with a column for each arm."""
    heads = [f"{arm.label}: {arm.name}" for arm in arms]
    return Table(title, ["", *heads, last_column], [row.cells() for row in rows], note)


def repeats_table(arms: list[Arm], rows: list[Row]) -> Table:
    """Each repeat by itself, and the repeats of an arm together; without rows where there are none."""
    shown = [row for row in rows if row.label in OF_REPEATS]
    lines = []
    for i, arm in enumerate(arms):
        if len(arm.runs) == 1:
            continue
        for j, (letter, run) in enumerate(zip(arm.label.split("+"), arm.runs, strict=True)):
            figures = [row.cell(row.of_runs[i][j]) for row in shown if row.of_runs]
            lines.append([f"{letter}: {run.name}", str(run.settings["seed"]), *figures])
        lines.append([f"{arm.label} together", "", *(row.cells()[1 + i] for row in shown)])
    return Table("Repeats", ["", "seed", *(row.label for row in shown)], lines, "They differ only in their seed.")


def known_note(arms: list[Arm], runs: list[Run]) -> str:
    """What is not known of each arm, and the notes on each run."""
    notes = [f"Not known of {label}: {', '.join(names)}." for label, names in unknown(arms).items()]
    for letter, run in zip(letters(len(runs)), runs, strict=True):
        notes += [f"{letter}: {note}." for note in run.notes]
    return " ".join(notes)


def peaks_note(arms: list[Arm]) -> str:
    """Where the peaks that MFU refers to are from."""
    sources = {arm.label: arm.runs[0].start.get("peak_source") for arm in arms}
    known = [f"{label}: {source}" for label, source in sources.items() if source]
    return f"Peaks: {'; '.join(known)}." if known else ""


def ranking_note(ranked: Ranking, runs: list[Run]) -> str:
    """What a reader of the ranking should know: its unit, if that is not nats, and whether the data is the same."""
    if ranked.in_bits:
        return (
            "Ranked in bits per byte of the same text: losses in nats do not compare between tokenizers. The text "
            "trained on is the tokens times the bytes of an evaluated token."
        )
    if not ranked.reasons and len(runs) > 1 and not all(run.start.get("val_sha256") for run in runs):
        return "The logs do not say whether all were evaluated on the same data."
    return ""


def as_data(rows: list[Row]) -> list[dict[str, Any]]:
    return [{"label": r.label, "values": r.values, "of_runs": r.of_runs, "lead": r.lead.text} for r in rows]


def as_markdown(table: Table) -> str:
    note = f"\n\n{table.note}" if table.note else ""
    return f"## {table.title}\n\n{markdown_table(table.columns, table.rows, left_columns=1)}{note}"


# ---- script --------------------------------------------------------------------------------------------------


def read_arguments() -> argparse.Namespace:
    """The command line. Raises ValueError for files that cannot be written and losses that are not finite."""
    parser = OneLineParser(str(__doc__))
    parser.add_argument("runs", nargs="+", metavar="RUN", help="an out_dir, a log.jsonl or what nanoGPT printed")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="[A.]NAME=VALUE")
    parser.add_argument("--device", action="append", default=[], metavar="[A=]NAME", help='such as "A=RTX 4070"')
    parser.add_argument("--loss", nargs="+", type=float, default=[], help=LOSS_HELP)
    parser.add_argument("--html", metavar="FILE")
    parser.add_argument("--json", metavar="FILE")
    a = parser.parse_args()
    for file in (a.html, a.json):
        if file and not Path(file).resolve().parent.is_dir():
            raise ValueError(f"{file}: its folder does not exist; make it, or choose another")
    if not all(map(math.isfinite, a.loss)):
        raise ValueError(f"--loss {' '.join(map(str, a.loss))}: losses are finite numbers")
    return a


def add_given(named: dict[str, Run], settings: list[str], devices: list[str]) -> None:
    """Adds what --set and --device say to the runs, which are named by their letters. Raises ValueError."""
    for word in settings:
        name, equals, value = word.partition("=")
        letter, dot, key = name.rpartition(".")
        if not equals or (dot and letter not in named):
            raise ValueError(f"--set {word}: write {'|'.join(named)}.NAME=VALUE, or NAME=VALUE for all")
        for run in [named[letter]] if dot else named.values():
            give(run, key, value)
    for word in devices:
        letter, equals, name = word.partition("=")
        if equals and letter not in named:
            raise ValueError(f"--device {word}: write {'|'.join(named)}=NAME, or NAME for all")
        for run in [named[letter]] if equals else named.values():
            run.start["gpu"] = name if equals else word


def main() -> None:
    a = read_arguments()
    runs = [read_run(path) for path in a.runs]
    named = dict(zip(letters(len(runs)), runs, strict=True))
    add_given(named, a.set, a.device)
    for run in runs:
        complete(run)
    tables, lines, data = compare(runs, a.loss)
    for table in tables:
        print(as_markdown(table) + "\n")
    first = data["headline"]
    print("\n".join(f"- {line}" for line in [first, *lines] if line))

    for letter, run in named.items():  # on the page as in the tables, so that no two have the same name
        run.name = f"{letter}: {run.name}"
    if a.json:
        Path(a.json).write_text(json.dumps(data, indent=1), encoding="utf-8")
    if a.html:
        title = " and ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs"
        top = Headline(first or title, [], title if first else "")
        content = page(title, runs, tables, lines, headlines=[top])
        Path(a.html).write_text(content, encoding="utf-8", errors="replace")


if __name__ == "__main__":
    with one_line_errors():
        main()
