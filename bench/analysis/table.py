"""Align runs and put their figures into rows: what differs, what they learned, and how fast they
were.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.analysis.logs import NANOGPT_PEAK, Run, letters
from bench.asking.statistics import interval
from deskgpt.errors import clock, in_gib
from deskgpt.resume import NOT_LEARNING, SET_BY_MAX_MINUTES

WHAT_RAN = ["device", "world_size", "dtype", "residual_dtype", "cpu_kernels", "compiled"]
WHAT_RAN += ["versions", "git_commit", "tokenizer", "train_tokens", "val_sha256"]
# Settings that a resumed run does not compare, or compares by what follows from them, and that
# count for runs beside each other. The data count by train_tokens and val_sha256.
COUNT_TOO = {"init_from", "max_minutes", "batch_size", "gradient_accumulation_steps"}
SAME_SCHEDULE = 1.01  # the ratio up to which two schedules count as equally long

# A label, the figure of a run (None if it is not known), and how a figure is written.
Figure = tuple[str, Callable[[Run], Any], Callable[[Any], str]]


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
    """Return what repeats have in common: settings that change what is learned, and what ran."""
    left_out = (NOT_LEARNING | {"seed"}) - COUNT_TOO
    if run.settings.get("max_minutes"):
        left_out |= {*SET_BY_MAX_MINUTES}  # they follow from the machine
    found = {
        name: value
        for name, value in run.settings.items()
        if name not in left_out and value != "auto"
    }
    found |= {name: run.start.get(name) for name in WHAT_RAN}
    return {name: value for name, value in found.items() if value is not None}


# ---- rows ----------------------------------------------------------------------------------------


def rows_of(groups: list[Group], figures: list[Figure]) -> list[list[str]]:
    """Return a row for each figure that is known of some group: its label, and a cell for each
    group.
    """
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
    if len(texts) == 1 or isinstance(values[0], str):
        return " and ".join(texts)
    mean, half = interval(values)
    if half is None or len(values) < 3 or half >= abs(mean):
        return f"{text(min(values))} to {text(max(values))} (n={len(values)})"
    return f"{text(mean)} ± {text(half)} (n={len(values)})"


def change_rows(groups: list[Group]) -> list[list[str]]:
    """Return a row for each setting of learning and metadata field that differs, and one for the
    tokens of a step.
    """
    runs = [group.runs[0] for group in groups]
    of_runs = [repeat_key(run) | {"tokens per step": run.tokens_per_step} for run in runs]
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


# ---- losses --------------------------------------------------------------------------------------

LOSS = "{:.4f}".format
LEARNING: list[Figure] = [
    ("last step evaluated", lambda r: r.last.get("iter"), "{:,.0f}".format),
    ("val loss at the last evaluation", lambda r: r.last.get("val_loss"), LOSS),
    ("train loss there", lambda r: r.last.get("train_loss"), LOSS),
    ("lowest val loss", lambda r: r.best.get("val_loss"), LOSS),
    ("its standard error, by the text alone", lambda r: r.best.get("val_se"), LOSS),
    (
        "perplexity there",
        lambda r: math.exp(min(r.best["val_loss"], 700)) if r.val else None,
        "{:.2f}".format,
    ),
    ("bits per byte there", lambda r: r.best.get("val_bpb"), LOSS),
]


def loss_after_equal_training(runs: list[Run]) -> Figure | None:
    """Return the val loss after as many tokens as the run with the fewest has read.

    None if that is not known of some run or if one has diverged.
    """
    read = [max((e["tokens"] for e in run.val if "tokens" in e), default=0) for run in runs]
    if not min(read) or any("val_loss" not in run.evals[-1] for run in runs):
        return None
    return (
        f"val loss after {min(read):,.0f} tokens",
        functools.partial(loss_at, tokens=min(read)),
        LOSS,
    )


def loss_at(run: Run, tokens: float) -> float | None:
    """Return the val loss after so many tokens, linear in their logarithm between evaluations; None
    outside of them.
    """
    # After the first step
    points = [(e["tokens"], e["val_loss"]) for e in run.val if e.get("tokens")]
    if not points[0][0] <= tokens <= points[-1][0]:
        return None
    x, loss = np.array(points).T
    return float(np.interp(math.log(tokens), np.log(x), loss))


def has_equal_schedules(runs: list[Run]) -> bool:
    """Return whether the learning rates of all runs decay until the same token; unknown ones are
    left out.

    If not, one has decayed further after equal training, which lowers the loss at once, whatever
    the settings.
    """
    ends = [
        run.schedule_end * run.tokens_per_step
        for run in runs
        if run.schedule_end and run.tokens_per_step
    ]
    return not ends or max(ends) <= SAME_SCHEDULE * min(ends)


# ---- speed ---------------------------------------------------------------------------------------


def largest(run: Run, name: str) -> float | None:
    """Return the largest number of this name in the run's steps."""
    return max((e[name] for e in run.iters if name in e), default=None)


def nanogpt_mfu(run: Run) -> float | None:
    """Return the MFU as nanoGPT prints it, on an A100's peak whatever the device."""
    return run.start.get("nanogpt_mfu", run.mfu(NANOGPT_PEAK * (run.start.get("world_size") or 1)))


def percent(share: float) -> str:
    """Return a share of a peak as a cell's text."""
    return f"{share:.2%}" if share <= 1 else f"{share:.2%} (above the peak: wrong)"


# Times are of all parts of a run that was resumed.
SPEED: list[Figure] = [
    ("ms per step, median", lambda r: r.median_ms, "{:,.4g}".format),
    ("tokens/s", lambda r: r.tokens_per_s, "{:,.0f}".format),
    ("parameters", lambda r: r.start.get("parameters"), lambda v: f"{v / 1e6:,.2f}M"),
    ("MFLOPs per token", lambda r: r.flops_per_token, lambda v: f"{v / 1e6:,.4g}"),
    ("MFU", lambda r: r.mfu(r.start.get("peak_flops")), percent),
    ("MFU as nanoGPT prints it (of 312 TFLOP/s)", nanogpt_mfu, "{:.2%}".format),
    ("peak TFLOP/s", lambda r: r.start.get("peak_flops"), lambda v: f"{v / 1e12:,.4g}"),
    ("source of the peak", lambda r: r.start.get("peak_source"), str),
    ("training", lambda r: largest(r, "train_s"), clock),
    ("start and compiling", lambda r: r.start.get("warm_up_s"), clock),
    ("peak memory", lambda r: largest(r, "peak_memory_bytes"), lambda v: f"{in_gib(v)} GiB"),
]
