"""Compare runs, or describe a single one: a headline, and tables of what differs, what was learned
and how fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.analysis.logs import NANOGPT_PEAK, Run
from bench.asking.statistics import ALPHA, interval, welch
from deskgpt.errors import clock, in_gib, millions
from deskgpt.resume import NOT_LEARNING, SET_BY_MAX_MINUTES

WHAT_RAN = ["device", "world_size", "dtype", "residual_dtype", "cpu_kernels", "compiled"]
WHAT_RAN += ["versions", "git_commit", "code_digest", "tokenizer", "train_tokens", "val_sha256"]
# Settings that a resumed run does not compare, or compares by what follows from them, and that
# count for runs beside each other.
COUNT_TOO = {"init_from", "max_minutes", "batch_size", "gradient_accumulation_steps"}
# The kinds of equal training, and how an amount of each is written. Evaluations fall on the same
# tokens, but hardly on the same second: two amounts whose ratio is at most CLOSE count as equal.
AMOUNTS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "tokens": ("equal tokens", "{:,.0f}".format),
    "train_s": ("equal time", clock),
    "flops": ("equal FLOPs", "{:.4g}".format),
}
CLOSE = 1.02
ALIKE = (
    "To compare the models, evaluate each with --eval_only=True and the same "
    "--dataset, --block_size and --eval_tokens."
)
THEN = ", then "  # between the windows of a run whose evaluations read several

# A label, the figure of a run (None if it is not known), and how a figure is written.
Figure = tuple[str, Callable[[Run], Any], Callable[[Any], str]]
Table = list[list[str]]  # a label, and a cell for each group


Group = list[Run]  # which differ in nothing but their seed: one run, or repeats


def label_of(group: Group) -> str:
    """Return the letters of a group's runs."""
    return "+".join(run.name.partition(":")[0] for run in group)


def name_of(group: Group) -> str:
    """Return the name of a group's run, or of its repeats."""
    if len(group) == 1:
        return group[0].name
    seeds = ", ".join(str(run.settings.get("seed")) for run in group)
    return f"{label_of(group)}: repeats, seeds {seeds}"


@dataclass
class Comparison:
    """One run, or several side by side."""

    runs: list[Run]
    headline: str
    lines: list[str] = field(default_factory=list)  # what a reader of the tables should know
    groups: list[Group] = field(default_factory=list)
    rows: dict[str, Table] = field(default_factory=dict)  # by title

    def tables(self) -> dict[str, Table]:
        """Return the rows of each table by its title, the headings first."""
        head = ["", *map(name_of, self.groups)]
        return {name: [head, *rows] for name, rows in self.rows.items() if rows}


def compare(runs: list[Run]) -> Comparison:
    """Compare runs; of a single one, describe what it learned."""
    groups = groups_of(runs)
    rows = {
        "What changed": change_rows(groups) if len(groups) > 1 else [],
        "Learning": rows_of(groups, LEARNING),
        "Speed": rows_of(groups, SPEED),
    }
    lines = [f"{run.name}: {note}." for run in runs for note in run.notes]
    found = Comparison(runs, summary(runs[0]), lines, groups, rows)
    if len(runs) > 1:
        found.headline = f"The runs differ in nothing but their seed ({name_of(groups[0])})"
    if len(groups) == 1:
        return found
    sentences = []
    for amount in AMOUNTS:
        sentence, of_losses = compare_after(groups, amount)
        sentences.append(sentence)
        rows["Learning"] += of_losses
    differing = [name for name, *cells in rows["What changed"] if len({*cells}) > 1]
    reason = not_comparable(runs)
    if reason:
        sentences = [f"The losses are not comparable: {reason}", ALIKE]
    found.headline = sentences[0]
    found.lines = [*sentences[1:], f"Also differs: {', '.join(differing) or 'nothing'}.", *lines]
    return found


def summary(run: Run) -> str:
    """Return the run in a sentence."""
    if not run.val:
        return "The log has no evaluation yet"
    return (
        f"The lowest val loss is {run.best['val_loss']:.4f}, at step "
        f"{run.best['iter']:,} of {run.last['iter']:,}"
    )


# ---- repeats -------------------------------------------------------------------------------------


def groups_of(runs: list[Run]) -> list[Group]:
    """Group the runs: those that differ in nothing but their seed are repeats."""
    groups: list[Group] = []
    for run in runs:
        for group in groups:
            if are_repeats([*group, run]):
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def are_repeats(runs: list[Run]) -> bool:
    """Return True if the runs are known to differ in their seeds and in nothing else."""
    seeds = {run.settings.get("seed") for run in runs}
    # The commit does not tell two edits apart that are not committed; a digest of the code does.
    is_known = all(
        "code_digest" in run.start or "+changes" not in str(run.start.get("git_commit"))
        for run in runs
    )
    is_same = repeat_key(runs[-1]) == repeat_key(runs[0])
    return None not in seeds and len(seeds) == len(runs) and is_known and is_same


def repeat_key(run: Run) -> dict[str, Any]:
    """Return the settings that change what is learned, and what ran: repeats have them in
    common.
    """
    left_out = (NOT_LEARNING | {"seed"}) - COUNT_TOO
    if run.settings.get("max_minutes"):
        left_out |= {*SET_BY_MAX_MINUTES}  # they follow from the machine
    if "val_sha256" not in run.start:
        left_out -= {"dataset"}  # which else counts by what is in it
    found = {
        name: value
        for name, value in run.settings.items()
        if name not in left_out and value != "auto"
    }
    found |= {name: run.start.get(name) for name in WHAT_RAN}
    return {name: value for name, value in found.items() if value is not None}


# ---- rows ----------------------------------------------------------------------------------------


def rows_of(groups: list[Group], figures: list[Figure]) -> Table:
    """Return a row for each figure that is known of some group."""
    rows = []
    for label, figure, text in figures:
        cells = [cell([figure(run) for run in group], text) for group in groups]
        if set(cells) != {"n/a"}:
            rows.append([label, *cells])
    return rows


def cell(values: list[Any], text: Callable[[Any], str]) -> str:
    """Return the mean of repeats ± half its 95% interval; their range, if that says no more than
    the range does.
    """
    if None in values:
        return "n/a"
    texts = list(dict.fromkeys(map(text, values)))
    if len(texts) == 1:
        return texts[0]
    mean, half = interval(values)
    if half is None or len(values) < 3 or half >= abs(mean):
        return f"{text(min(values))} to {text(max(values))} (n={len(values)})"
    return f"{text(mean)} ± {text(half)} (n={len(values)})"


def change_rows(groups: list[Group]) -> Table:
    """Return a row for each setting of learning and metadata field that differs or that not all
    logs know, and one for the tokens of a step.
    """
    of_runs = []
    for group in groups:
        start = group[0].start
        found = {"parameters": start.get("parameters")} | repeat_key(group[0])
        of_runs.append(found | {"tokens per step": start.get("tokens_per_step")})
    rows = []
    for name in dict.fromkeys(name for of_run in of_runs for name in of_run):
        cells = [as_text(of_run.get(name)) for of_run in of_runs]
        if len({*cells}) > 1 or name == "tokens per step":
            rows.append([name, *cells])
    return rows


def as_text(value: Any) -> str:
    """Return a setting or metadata field as a cell's text."""
    if value is None:
        return "n/a"
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if type(value) is int else str(value)


def share_of(run: Run, peak: float | None) -> float | None:
    """Return the model's FLOP/s over a peak's; None if one of them is not known."""
    flops_per_s = run.per_s("flops")
    return flops_per_s / peak if flops_per_s and peak else None


def percent(share: float) -> str:
    """Return a share of a peak as a cell's text."""
    return f"{share:.2%}" if share <= 1 else f"{share:.2%} (above the peak: wrong)"


LOSS = "{:.4f}".format
LEARNING: list[Figure] = [
    ("last step evaluated", lambda r: r.last.get("iter"), "{:,.0f}".format),
    ("val loss at the last evaluation", lambda r: r.last.get("val_loss"), LOSS),
    ("train loss there", lambda r: r.last.get("train_loss"), LOSS),
    ("lowest val loss", lambda r: r.best.get("val_loss"), LOSS),
    ("bits per byte there", lambda r: r.best.get("val_bpb"), LOSS),
]
SPEED: list[Figure] = [
    ("ms per step, median", lambda r: r.step_s and r.step_s * 1e3, "{:,.4g}".format),
    ("tokens/s", lambda r: r.per_s("tokens"), "{:,.0f}".format),
    ("parameters", lambda r: r.start.get("parameters"), millions),
    ("MFU", lambda r: share_of(r, r.start.get("peak_flops")), percent),
    (
        "MFU as nanoGPT prints it, of an A100",
        lambda r: share_of(r, NANOGPT_PEAK * r.start.get("world_size", 1)),
        "{:.2%}".format,
    ),
    ("training until the last evaluation", lambda r: r.last.get("train_s"), clock),
    ("peak memory", lambda r: r.end.get("peak_memory_bytes"), lambda v: f"{in_gib(v)} GiB"),
]

# ---- losses --------------------------------------------------------------------------------------


def compare_after(groups: list[Group], amount: str) -> tuple[str, Table]:
    """Compare the val losses after equal amounts of training, the largest after which all runs were
    evaluated.

    Return how much each group's loss is above the first one's, in a sentence, whose 95% intervals
    hold together, and a row of the losses. A loss between two evaluations is not known: a line
    between them lies above a curve that flattens.
    """
    kind, text = AMOUNTS[amount]
    runs = [run for group in groups for run in group]
    refused = f"The losses after {kind} are not compared"
    if any(not run.evals or "val_loss" not in run.evals[-1] for run in runs):
        return f"{refused}: a run has none at its end", []
    value = common_amount(runs, amount)
    if value is None:
        return f"{refused}: no common evaluation", []
    label = f"val loss after {kind} ({text(value)})"
    rows = rows_of(groups, [(label, lambda run: loss_after(run, amount, value), LOSS)])
    ends = [(run.schedule_end or 0) * (run.per_step(amount) or 0) for run in runs]
    known = [end for end in ends if end]
    # One rate would have decayed further after equal training, which lowers the loss at once,
    # whatever the settings.
    if known and max(known) > CLOSE * min(known):
        return f"{refused}: the learning rates do not decay until {kind}", rows
    first, *others = groups
    of_first = [loss_after(run, amount, value) for run in first]
    texts = []
    for group in others:
        losses = [loss_after(run, amount, value) for run in group]
        gap, half = welch(of_first, losses, ALPHA / len(others))  # Bonferroni
        texts.append(f"{label_of(group)} {gap:+z.4f} ± {'?' if half is None else LOSS(half)}")
    return f"The {label}, less that of {label_of(first)}: {'; '.join(texts)}", rows


def common_amount(runs: list[Run], amount: str) -> float | None:
    """Return the largest amount of training after which all runs were evaluated."""
    amounts = [e[amount] for e in reversed(runs[0].val) if e.get(amount)]
    for value in amounts:
        if None not in [loss_after(run, amount, value) for run in runs]:
            return float(value)
    return None


def loss_after(run: Run, amount: str, value: float) -> Any:
    """Return the run's val loss after this much training; None if it was not evaluated there."""
    close = 1.0 if amount == "tokens" else CLOSE
    known = [e for e in run.val if value / close <= e.get(amount, 0) <= value * close]
    return min(known, key=lambda e: abs(e[amount] - value))["val_loss"] if known else None


def not_comparable(runs: list[Run]) -> str:
    """Return why the losses of runs cannot be compared, "" if they can: all must be of the same
    windows of text.

    What nanoGPT evaluated is known by the name of its dataset, if it is known.
    """
    data = "val_sha256" if all("val_sha256" in run.start for run in runs) else "dataset"
    of_runs = [
        {
            "tokenizers": run.start.get("tokenizer"),
            "validation data": Path(str((run.settings | run.start).get(data) or "")).name,
            "validation windows": windows(run),
        }
        for run in runs
    ]
    for what in of_runs[0]:
        values = [str(of_run[what] or "") for of_run in of_runs]
        if len({*values} - {""}) > 1 or any(THEN in value for value in values):
            pairs = zip(runs, values, strict=True)
            shown = [f"{label_of([run])} {value or 'not known'}" for run, value in pairs]
            return f"different {what}: {'; '.join(shown)}"
    return ""


def windows(run: Run) -> str:
    """Return the windows that all evaluations of a run have read, by their digest."""
    if not run.val or any("eval_digest" not in e for e in run.val):
        return "not known"
    texts = [f"{e.get('eval_windows')} windows with digest {e['eval_digest'][:8]}" for e in run.val]
    return THEN.join(dict.fromkeys(texts))
