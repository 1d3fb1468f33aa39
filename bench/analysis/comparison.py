"""Compare runs, or describe a single one: its tables and a headline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bench.analysis import table
from bench.analysis.logs import Run, letters
from bench.analysis.table import LOSS, Figure, Group
from bench.asking.statistics import ALPHA, welch

# Nats between the losses of untrained models: one has about twice the tokens of the other.
OTHER_VOCABULARY = 0.7
ALIKE = (
    "To compare the models, evaluate each with --eval_only=True and the same "
    "--dataset, --block_size and --eval_tokens."
)
THEN = ", then "  # between the windows of a run whose evaluations read several


@dataclass
class Comparison:
    """One run, or several side by side."""

    runs: list[Run]
    headline: str
    lines: list[str] = field(default_factory=list)  # what a reader of the tables should know
    groups: list[Group] = field(default_factory=list)
    # By table: a label, and a cell for each group.
    rows: dict[str, list[list[str]]] = field(default_factory=dict)

    def tables(self) -> dict[str, list[list[str]]]:
        """Return by title the rows of each table, the headings first."""
        head = ["", *(group.name for group in self.groups)]
        return {name: [head, *rows] for name, rows in self.rows.items() if rows}


def compare(runs: list[Run]) -> Comparison:
    """Compare runs; of a single one, describe what it learned."""
    groups = table.groups_of(runs)
    lines = [f"{run.name}: {note}." for run in runs for note in run.notes]
    rows = {
        "What changed": table.change_rows(groups) if len(groups) > 1 else [],
        "Learning": table.rows_of(groups, table.LEARNING),
        "Speed": table.rows_of(groups, table.SPEED),
    }
    if len(runs) == 1:
        headline = summary(runs[0])
    elif len(groups) == 1:
        headline = f"The runs differ in nothing but their seed ({groups[0].name})"
    else:
        figure = table.loss_after_equal_training(runs)
        rows["Learning"] += table.rows_of(groups, [figure] if figure else [])
        headline = compare_losses(groups, figure)
        reason = not_comparable(runs)
        if reason:
            headline = f"The losses are not comparable: {reason}"
            lines.insert(0, ALIKE)
    return Comparison(runs, headline, lines, groups, rows)


def summary(run: Run) -> str:
    """Return the run in a sentence."""
    if not run.val:
        return "The log has no evaluation yet"
    return (
        f"The lowest val loss is {run.best['val_loss']:.4f}, at step "
        f"{run.best['iter']:,} of {run.last['iter']:,}"
    )


def compare_losses(groups: list[Group], figure: Figure | None) -> str:
    """Return how much each group's loss is above the first one's, in a sentence; the 95% intervals
    hold together.
    """
    if not table.has_equal_schedules([run for group in groups for run in group.runs]):
        return (
            "The losses after equal training are not compared: the learning rates decay "
            "until unequal tokens"
        )
    values = [[figure[1](run) for run in group.runs] for group in groups] if figure else []
    if figure is None or any(None in of_group for of_group in values):
        return "The losses after equal training are not known"
    texts = []
    for group, of_group in zip(groups[1:], values[1:], strict=True):
        gap, half = welch(values[0], of_group, ALPHA / (len(groups) - 1))  # Bonferroni
        texts.append(
            f"{group.label} {round(gap, 4) + 0.0:+.4f} ± {'?' if half is None else LOSS(half)}"
        )
    return f"The {figure[0]}, less that of {groups[0].label}: {'; '.join(texts)}"


# ---- which losses compare ------------------------------------------------------------------------


def not_comparable(runs: list[Run]) -> str:
    """Return why the losses of runs cannot be compared, "" if they can: all must be of the same
    windows of text.
    """
    of_runs: dict[str, list[Any]] = {
        "tokenizers": [run.start.get("tokenizer") for run in runs],
        "validation data": [run.start.get("val_sha256") for run in runs],
        "validation windows": [windows(run) for run in runs],
    }
    untrained = [e["val_loss"] for run in runs for e in run.val if e["iter"] == 0]
    differ = len(untrained) == len(runs) and max(untrained) - min(untrained) > OTHER_VOCABULARY
    if None in of_runs["validation data"] and differ:
        of_runs["losses at step 0, so other vocabularies or data"] = [
            f"{loss:.2f}" for loss in untrained
        ]
    for what, values in of_runs.items():
        if len(set(values) - {None}) > 1 or any(THEN in str(value) for value in values):
            shown = [
                f"{x} {value or 'not known'}"
                for x, value in zip(letters(len(runs)), values, strict=True)
            ]
            return f"different {what}: {'; '.join(shown)}"
    return ""


def windows(run: Run) -> str:
    """Return what the val losses were measured on, at all evaluations."""
    if not run.val or any("eval_digest" not in e for e in run.val):
        return "not known"
    texts = [f"{e.get('eval_windows')} windows with digest {e['eval_digest'][:8]}" for e in run.val]
    return THEN.join(dict.fromkeys(texts))
