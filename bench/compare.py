"""Compare training runs: what changed, what they learned and how fast they were.

    python bench/compare.py out-a out-b --html compare.html
    python bench/compare.py log.txt out-b --card "RTX 4070"

A run is an out_dir with its log.jsonl, or a text file with what nanoGPT printed, on the card that
--card names. Runs are called A, B, C in the order given. Losses are compared on the same validation
windows, after equal tokens, equal time and equal FLOPs, where all runs were evaluated. --html FILE
writes a page with curves.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any

# The repository; Python adds only this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deskgpt.errors import OneLineParser, clock, one_line_errors, require_torch

require_torch()

from bench.logs import NANOGPT_PEAK, Run, read_runs
from bench.output import markdown_table
from deskgpt.files import write_atomically
from deskgpt.logger import STEP_FIELDS
from deskgpt.resume import NOT_LEARNING

WHAT_RAN = ["parameters", "tokens_per_step", "device", "world_size", "dtype", "residual_dtype"]
WHAT_RAN += ["cpu_kernels", "compiled", "versions", "git_commit", "code_digest"]
WHAT_RAN += ["tokenizer", "train_tokens", "val_sha256"]
# Settings that a resumed run does not compare, or compares by what follows from them, and that
# count for runs beside each other.
COUNT_TOO = {"init_from", "max_minutes", "dataset", "batch_size", "gradient_accumulation_steps"}
LEFT_OUT = NOT_LEARNING - COUNT_TOO
# The kinds of equal training, and how an amount of each is written. Evaluations fall on the same
# tokens, but hardly on the same second: two amounts whose ratio is at most CLOSE count as equal.
AMOUNTS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "tokens": ("equal tokens", "{:,.0f}".format),
    "train_s": ("equal time", clock),
    "flops": ("equal FLOPs", "{:.4g}".format),
}
CLOSE = 1.02
NOT_COMPARABLE = (
    "The losses are not comparable: the runs were not evaluated on the same validation windows. "
    "Evaluate each with --eval_only=True and the same --dataset, --block_size and --eval_tokens"
)
REFUSED = "Not compared"
NOISE = "Two seeds of one setting differ, too: bench/ask.py tells how sure a difference is"
# A label, the figure of a run (None if it is not known), and how a figure is written.
Figure = tuple[str, Callable[[Run], Any], Callable[[Any], str]]
Table = list[list[str]]  # a label, and a cell for each run

POINTS = 500  # of a curve; of more steps every nth is drawn
# Colours that the colour-blind can tell apart (Okabe and Ito 2008, made darker).
COLOURS = ("#0072B2", "#D55E00", "#00866A", "#B5508B", "#555555")
DASHES = {"loss": "dot", "train_loss": "dash"}  # the others are solid
# The numbers of a chart, by its title.
CHARTS = {
    "Loss (nats per token)": ["loss", "train_loss", "val_loss"],
    "Answers written exactly (share)": ["val_answers"],
    "Time of a step (ms)": ["time_ms"],
    "Learning rate": ["lr"],
    "Gradient norm, before clipping": ["grad_norm"],
}


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
    for name, (head, *rows) in found.tables.items():
        print(f"\n## {name}\n\n{markdown_table(head, rows, left_columns=1)}")


@dataclass
class Comparison:
    """One run, or several side by side."""

    runs: list[Run]
    headline: str
    lines: list[str]  # what a reader of the tables should know
    tables: dict[str, Table]  # by title, the headings first


def compare(runs: list[Run]) -> Comparison:
    """Compare runs; of a single one, describe what it learned."""
    changed: Table = []
    learning = rows_of(runs, LEARNING)
    lines = [summary(runs[0])]
    if len(runs) > 1:
        changed = change_rows(runs)
        lines = []
        for amount in AMOUNTS:
            line, rows = compare_after(runs, amount)
            lines.append(line)
            learning += rows
        lines.sort(key=lambda line: line.startswith(REFUSED))  # what is known is the headline
        lines = [*lines, NOISE] if are_comparable(runs) else [NOT_COMPARABLE]
        lines.append(f"Also differs: {', '.join(row[0] for row in changed) or 'nothing'}.")
    lines += [f"{run.name}: {note}." for run in runs for note in run.notes]
    rows_by_title = {"What changed": changed, "Learning": learning, "Speed": rows_of(runs, SPEED)}
    head = ["", *(run.name for run in runs)]
    tables = {title: [head, *rows] for title, rows in rows_by_title.items() if rows}
    return Comparison(runs, lines[0], lines[1:], tables)


def summary(run: Run) -> str:
    """Return the run in a sentence."""
    if not run.val:
        return "The log has no evaluation yet"
    return (
        f"The lowest val loss is {run.best['val_loss']:.4f}, at step "
        f"{run.best['iter']:,} of {run.last['iter']:,}"
    )


# ---- rows ----------------------------------------------------------------------------------------


def rows_of(runs: list[Run], figures: list[Figure]) -> Table:
    """Return a row for each figure that is known of some run."""
    rows = []
    for label, figure, text in figures:
        values = [figure(run) for run in runs]
        if {*values} != {None}:
            rows.append([label, *("n/a" if value is None else text(value) for value in values)])
    return rows


def change_rows(runs: list[Run]) -> Table:
    """Return a row for each setting of learning and metadata field that differs or that not all
    logs know.
    """
    of_runs = []
    for run in runs:
        found = {name: value for name, value in run.settings.items() if name not in LEFT_OUT}
        of_runs.append(found | {name: run.start.get(name) for name in WHAT_RAN})
    rows = []
    for name in dict.fromkeys(name for of_run in of_runs for name in of_run):
        cells = [as_text(of_run.get(name)) for of_run in of_runs]
        if len({*cells}) > 1:
            rows.append([name, *cells])
    return rows


def as_text(value: Any) -> str:
    """Return a setting or metadata field as a cell's text."""
    if value is None:
        return "n/a"
    return f"{value:,.10g}" if type(value) is float else str(value)


def share_of(run: Run, peak: float | None) -> float | None:
    """Return the FLOP/s of a GPU over a peak's; None if one of them is not known."""
    flops_per_s = run.per_s("gpu_flops")
    return flops_per_s / peak if flops_per_s and peak else None


LOSS = "{:.4f}".format
PERCENT = "{:.2%}".format
LEARNING: list[Figure] = [
    ("lowest val loss", lambda r: r.best.get("val_loss"), LOSS),
    ("train loss there", lambda r: r.best.get("train_loss"), LOSS),
    ("bits per byte there", lambda r: r.best.get("val_bpb"), LOSS),
]
SPEED: list[Figure] = [
    ("ms per step, median", lambda r: r.step_s and r.step_s * 1e3, "{:,.4g}".format),
    ("tokens/s", lambda r: r.per_s("tokens"), "{:,.0f}".format),
    ("MFU", lambda r: share_of(r, r.number("gpu_peak_flops")), PERCENT),
    ("MFU as nanoGPT prints it, of an A100", lambda r: share_of(r, NANOGPT_PEAK), PERCENT),
]

# ---- losses --------------------------------------------------------------------------------------


def compare_after(runs: list[Run], amount: str) -> tuple[str, Table]:
    """Compare the val losses after equal amounts of training, the largest after which all runs were
    evaluated.

    Return which run's loss is the lowest, and how much the others have more, in a sentence, and a
    row of the losses. A loss between two evaluations is not known: a line between them lies above
    a curve that flattens.
    """
    kind, text = AMOUNTS[amount]
    refused = f"{REFUSED} after {kind}"
    if any(not run.evals or "val_loss" not in run.evals[-1] for run in runs):
        return f"{refused}: a run has none at its end", []
    common, losses = common_losses(runs, amount)
    if not common:
        return f"{refused}: no common evaluation", []
    label = f"val loss after {kind} ({text(common)})"
    rows = [[label, *map(LOSS, losses)]]
    ends = [(run.schedule_end or 0) * (run.per_step(amount) or 0) for run in runs]
    known = [end for end in ends if end]
    # One rate would have decayed further after equal training, which lowers the loss at once,
    # whatever the settings.
    if known and max(known) > CLOSE * min(known):
        return f"{refused}: the learning rates do not decay until {kind}", rows
    low = min(losses)
    best = runs[losses.index(low)]
    gaps = ""
    for run, loss in zip(runs, losses, strict=True):
        if run is not best:
            gaps += f", {run.name[0]}'s is {loss - low:.4f} higher"
    return f"{best.name} learned more: its {label} is {low:.4f}{gaps}", rows


def common_losses(runs: list[Run], amount: str) -> tuple[float, list[float]]:
    """Return the largest amount of training after which all runs were evaluated, 0 without one, and
    their val losses there.
    """
    close = 1.0 if amount == "tokens" else CLOSE
    for value in [e[amount] for e in reversed(runs[0].val) if e.get(amount)]:
        losses = []
        for run in runs:
            near = [e for e in run.val if value / close <= e.get(amount, 0) <= value * close]
            if near:
                losses.append(min(near, key=lambda e: abs(e[amount] - value))["val_loss"])
        if len(losses) == len(runs):
            return value, losses
    return 0.0, []


def are_comparable(runs: list[Run]) -> bool:
    """Return True if all evaluations read the same windows of text, as far as the logs say: what
    nanoGPT evaluated is known by the name of its dataset.
    """
    windows = {str(e.get("eval_digest")) for run in runs for e in run.val}
    datasets = {str(run.settings.get("dataset")) for run in runs} - {"None"}
    return len(windows) < 2 and ("None" not in windows or len(datasets) < 2)


# ---- the page ------------------------------------------------------------------------------------


def write_page(path: Path, found: Comparison, reload_s: int = 0) -> None:
    """Write the page in one step, in place of a link of this name, too."""
    write_atomically(path, page(found, reload_s).encode(errors="replace"))


def page(found: Comparison, reload_s: int = 0) -> str:
    """Return the HTML. reload_s: the page loads itself again after so many seconds; 0 = never."""
    from plotly.offline import get_plotlyjs

    texts = ""
    settings = ""
    for run in found.runs:
        name = escape(run.name)
        for e in run.samples[::-1]:
            for text in e.get("texts", []):
                texts += f"<h3>{name}, step {e['iter']:,}</h3><pre>{escape(str(text))}</pre>"
        start = escape(json.dumps(run.start, indent=1))
        summary = f"<summary>Settings of {name}</summary>"
        settings += f"<details class=settings>{summary}<pre>{start}</pre></details>"
    tables = ""
    for title, of_cells in found.tables.items():
        tables += f"<h2>{title}</h2>{table_html(*of_cells)}"
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(" and ".join(run.name for run in found.runs)),
        plotly=get_plotlyjs(),
        headline=escape(found.headline),
        lines="".join(f"<p>{escape(line)}</p>" for line in found.lines),
        charts=charts_html(found.runs),
        tables=tables,
        samples=texts,
        reload_s=reload_s,
        settings=settings,
        date=time.strftime("%Y-%m-%d %H:%M"),
    )


def charts_html(runs: list[Run]) -> str:
    """Return a chart for each title of CHARTS, and for each number of the runs' own, that is not
    one of train.py's. A chart has the curves of all runs.
    """
    from plotly.graph_objects import Figure

    names = dict.fromkeys(name for run in runs for e in run.iters for name in e)
    own = [name for name in names if name not in {"flops", *STEP_FIELDS}]
    html = ""
    for title, numbers in (CHARTS | {name: [name] for name in own}).items():
        chart = Figure(layout_template="plotly_white")
        for i, run in enumerate(runs):
            events = sorted(run.evals + run.iters, key=lambda e: e["iter"])
            for name in numbers:
                known = [e for e in events if name in e]
                known = known[:: len(known) // POINTS + 1]
                if known:
                    amounts = [[e.get("tokens"), e.get("train_s")] for e in known]
                    chart.add_scatter(
                        x=[e["iter"] for e in known],
                        y=[e[name] for e in known],
                        customdata=amounts,
                        name=escape(f"{run.name} {name}"),
                        line={"color": COLOURS[i % len(COLOURS)], "dash": DASHES.get(name)},
                    )
        if chart.data:
            plot = chart.to_html(
                include_plotlyjs=False, full_html=False, config={"responsive": True}
            )
            html += f"<figure><h3>{escape(title)}</h3>{plot}</figure>\n"
    return html


def table_html(head: list[str], *rows: list[str]) -> str:
    """Return a table. head: headings; the first cell of a row is its label."""
    heads = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = ""
    for label, *cells in rows:
        values = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        body += f"<tr><th>{escape(label)}</th>{values}</tr>\n"
    return f"<div class=table><table><thead>{heads}</thead><tbody>\n{body}</tbody></table></div>\n"


if __name__ == "__main__":
    with one_line_errors():
        main()
