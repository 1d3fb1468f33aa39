"""Compare runs, or describe a single one: a headline, and tables of what differs, what was learned
and how fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.analysis.logs import Run, letters
from bench.asking.statistics import ALPHA, interval, welch
from deskgpt.errors import clock, in_gib
from deskgpt.resume import NOT_LEARNING, SET_BY_MAX_MINUTES

WHAT_RAN = ["device", "world_size", "dtype", "residual_dtype", "cpu_kernels", "compiled"]
WHAT_RAN += ["versions", "git_commit", "tokenizer", "train_tokens", "val_sha256"]
# Settings that a resumed run does not compare, or compares by what follows from them, and that
# count for runs beside each other.
COUNT_TOO = {"init_from", "max_minutes", "batch_size", "gradient_accumulation_steps"}
SAME_SCHEDULE = 1.01  # the ratio up to which two schedules count as equally long
ALIKE = (
    "To compare the models, evaluate each with --eval_only=True and the same "
    "--dataset, --block_size and --eval_tokens."
)
THEN = ", then "  # between the windows of a run whose evaluations read several

# A label, the figure of a run (None if it is not known), and how a figure is written.
Figure = tuple[str, Callable[[Run], Any], Callable[[Any], str]]
Table = list[list[str]]  # a label, and a cell for each group


@dataclass
class Group:
    """Runs that differ in nothing but their seed: one run, or repeats."""

    letters: list[str]
    runs: list[Run]

    @property
    def label(self) -> str:
        return "+".join(self.letters)

    @property
    def name(self) -> str:
        if len(self.runs) == 1:
            return self.runs[0].name
        return (
            f"{self.label}: repeats, seeds "
            f"{', '.join(str(run.settings.get('seed')) for run in self.runs)}"
        )


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
        head = ["", *(group.name for group in self.groups)]
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
    if len(runs) == 1:
        return Comparison(runs, summary(runs[0]), lines, groups, rows)
    if len(groups) == 1:
        return Comparison(
            runs,
            f"The runs differ in nothing but their seed ({groups[0].name})",
            lines,
            groups,
            rows,
        )
    tokens = equal_tokens(runs)
    if tokens:
        rows["Learning"] += rows_of(
            groups, [(f"val loss after {tokens:,.0f} tokens", lambda r: loss_at(r, tokens), LOSS)]
        )
    reason = not_comparable(runs)
    if reason:
        lines.insert(0, ALIKE)
    text = f"The losses are not comparable: {reason}" if reason else headline(groups, tokens)
    return Comparison(runs, text, lines, groups, rows)


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
    for letter, run in zip(letters(len(runs)), runs, strict=True):
        seed = run.settings.get("seed")
        for group in groups:
            seeds = [other.settings.get("seed") for other in group.runs]
            if (
                seed is not None
                and seed not in seeds
                and repeat_key(run) == repeat_key(group.runs[0])
            ):
                group.runs.append(run)
                group.letters.append(letter)
                break
        else:
            groups.append(Group([letter], [run]))
    return groups


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
        cells = [cell([figure(run) for run in group.runs], text) for group in groups]
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
    """Return a row for each setting of learning and metadata field that differs, and one for the
    tokens of a step.
    """
    runs = [group.runs[0] for group in groups]
    of_runs = [
        repeat_key(run) | {"tokens per step": run.start.get("tokens_per_step")} for run in runs
    ]
    rows = []
    for name in dict.fromkeys(name for of_run in of_runs for name in of_run):
        cells = [as_text(of_run.get(name)) for of_run in of_runs]
        if len({*cells} - {"n/a"}) > 1 or name == "tokens per step":
            rows.append([name, *cells])
    return rows


def as_text(value: Any) -> str:
    """Return a setting or metadata field as a cell's text."""
    if value is None:
        return "n/a"
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if type(value) is int else str(value)


def largest(run: Run, name: str) -> float | None:
    """Return the largest number of this name in the run's steps."""
    return max((e[name] for e in run.iters if name in e), default=None)


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
    ("ms per step, median", lambda r: r.median_ms, "{:,.4g}".format),
    ("tokens/s", lambda r: r.tokens_per_s, "{:,.0f}".format),
    ("parameters", lambda r: r.start.get("parameters"), lambda v: f"{v / 1e6:,.2f}M"),
    ("MFU", lambda r: r.mfu, percent),
    ("training", lambda r: largest(r, "train_s"), clock),
    ("peak memory", lambda r: largest(r, "peak_memory_bytes"), lambda v: f"{in_gib(v)} GiB"),
]

# ---- losses --------------------------------------------------------------------------------------


def equal_tokens(runs: list[Run]) -> float | None:
    """Return the largest number of tokens after which all runs were evaluated; None without one, or
    if one diverged.

    A loss between two evaluations is not known: a line between them lies above a curve that
    flattens.
    """
    evaluated = [{e["tokens"] for e in run.val if e.get("tokens")} for run in runs]
    if any(not run.evals or "val_loss" not in run.evals[-1] for run in runs):
        return None
    return max(set.intersection(*evaluated), default=None)


def loss_at(run: Run, tokens: float) -> float:
    """Return the val loss after so many tokens, after which the run was evaluated."""
    return next(float(e["val_loss"]) for e in run.val if e.get("tokens") == tokens)


def headline(groups: list[Group], tokens: float | None) -> str:
    """Return how much each group's loss is above the first one's, in a sentence; the 95% intervals
    hold together.
    """
    ends = [run.schedule_tokens for group in groups for run in group.runs if run.schedule_tokens]
    # One rate would have decayed further after equal training, which lowers the loss at once,
    # whatever the settings.
    if ends and max(ends) > SAME_SCHEDULE * min(ends):
        return (
            "The losses after equal training are not compared: the learning rates decay "
            "until unequal tokens"
        )
    if tokens is None:
        return (
            "The losses after equal training are not known: the runs were not evaluated "
            "after equal tokens"
        )
    first, *others = [[loss_at(run, tokens) for run in group.runs] for group in groups]
    texts = []
    for group, losses in zip(groups[1:], others, strict=True):
        gap, half = welch(first, losses, ALPHA / len(others))  # Bonferroni
        texts.append(
            f"{group.label} {round(gap, 4) + 0.0:+.4f} ± {'?' if half is None else LOSS(half)}"
        )
    return (
        f"The val loss after {tokens:,.0f} tokens, less that of {groups[0].label}: "
        f"{'; '.join(texts)}"
    )


def not_comparable(runs: list[Run]) -> str:
    """Return why the losses of runs cannot be compared, "" if they can: all must be of the same
    windows of text.
    """
    has_digests = all("val_sha256" in run.start for run in runs)
    of_runs: dict[str, list[Any]] = {
        "tokenizers": [run.start.get("tokenizer") for run in runs],
        "validation data": [
            run.start["val_sha256"] if has_digests else Path(str(run.settings.get("dataset"))).name
            for run in runs
        ],
        "validation windows": [windows(run) for run in runs],
    }
    for what, values in of_runs.items():
        if len(set(values) - {None}) > 1 or any(THEN in str(value) for value in values):
            shown = [
                f"{x} {value or 'not known'}"
                for x, value in zip(letters(len(runs)), values, strict=True)
            ]
            return f"different {what}: {'; '.join(shown)}"
    return ""


def windows(run: Run) -> str:
    """Return the windows that all evaluations of a run have read, by their digest."""
    if not run.val or any("eval_digest" not in e for e in run.val):
        return "not known"
    texts = [f"{e.get('eval_windows')} windows with digest {e['eval_digest'][:8]}" for e in run.val]
    return THEN.join(dict.fromkeys(texts))
