"""The rows of the tables: what changed between runs, how fast they were, what they learned, and who leads."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from bench.analysis import logs
from bench.analysis.logs import Run, curve, letters, loss_at
from bench.asking.statistics import alpha_of_each, error_of_text, interval, welch
from deskgpt.run import diagnosis, loss_band
from deskgpt.run.diagnosis import EvalRecord
from deskgpt.system.terminal import clock, in_gib

# Settings that affect neither the training nor its speed, and those that are reported as metadata of the data.
SILENT = {"out_dir", "eval_interval", "eval_iters", "eval_tokens", "eval_only", "log_interval", "auto_batch"}
SILENT |= {"dry_run", "plan_for", "always_save_checkpoint", "wandb_log", "wandb_project", "wandb_run_name"}
SILENT |= {"seed", "dataset", "init_from", "sample_interval", "attention"}  # which attention ran is in the metadata
METADATA = ["device", "world_size", "dtype", "attention", "compiled", "compiler", "versions", "git_commit", "tokenizer"]
METADATA += ["vocab_size", "train_tokens", "val_sha256"]  # which follow from the tokenizer where the text is the same

SAME_SPEED = 1.05  # below this ratio no run is called faster: a machine's speed changes from run to run
WHOLE = 0.95  # the share of a text that an evaluation reads, from which on tokenizers are compared on it
OTHER_VOCABULARY = 0.7  # nats between the losses of untrained models: one has about twice the tokens of the other
Text = Callable[[Any], str]  # how a figure is written
AMOUNT: dict[str, Text] = {
    "steps": "{:,.0f}".format,
    "tokens": "{:,.0f}".format,
    "text": "{:,.0f} bytes".format,
    "time": clock,
    "FLOPs": "{:.3g}".format,
}


@dataclass
class Arm:
    """Runs of the same settings: one, or several with different seeds."""

    letters: list[str]
    runs: list[Run]
    causes: dict[str, Any] = field(default_factory=dict)  # settings and metadata that may be a cause

    @property
    def label(self) -> str:
        few = len(self.letters) <= 4
        return "+".join(self.letters) if few else f"{self.letters[0]}+{len(self.letters) - 1} more"

    @property
    def name(self) -> str:
        if len(self.runs) == 1:
            return self.runs[0].name
        return f"{self.label}: repeats, seeds {', '.join(str(run.settings.get('seed')) for run in self.runs)}"


@dataclass(frozen=True)
class Lead:
    """Who is ahead in a figure, and how sure that is."""

    text: str = ""
    winner: int | None = None  # the arm that is ahead of all others by more than the noise
    is_open: bool = False  # whether the noise is not known
    is_same: bool = False  # whether all arms have the same figure, to its last place


@dataclass
class Row:
    """A figure of each run of each arm, None where it is not known."""

    label: str
    of_runs: list[list[Any]]
    text: Text
    lead: Lead = field(default_factory=Lead)

    @property
    def is_whole(self) -> bool:
        """Whether the figure is known of every run."""
        return all(None not in of_arm for of_arm in self.of_runs)

    def cells(self) -> list[str]:
        return [self.label, *map(self.cell, self.of_runs), self.lead.text]

    def cell(self, of_arm: list[Any]) -> str:
        """The mean of repeats ± half its 95% interval; their range, where that says no more than the range does."""
        if None in of_arm:
            return "n/a"
        if len({self.text(value) for value in of_arm}) == 1:
            return self.text(of_arm[0])
        mean, half = interval(of_arm)
        if half is None or len(of_arm) < 3 or half >= abs(mean):
            return f"{self.text(min(of_arm))} to {self.text(max(of_arm))} (n={len(of_arm)})"
        return f"{self.text(mean)} ± {self.text(half)} (n={len(of_arm)})"


def row_of(label: str, arms: list[Arm], figure: Callable[[Run], Any], text: Text) -> Row:
    return Row(label, [[figure(run) for run in arm.runs] for arm in arms], text)


def known(rows: list[Row]) -> list[Row]:
    """The rows of which a figure is known."""
    return [row for row in rows if any(value is not None for of_arm in row.of_runs for value in of_arm)]


# ---- arms, and what differs between them ---------------------------------------------------------------------


def arms_of(runs: list[Run]) -> list[Arm]:
    """Groups the runs: those that differ only in their seed are one arm."""
    arms: list[Arm] = []
    for letter, run in zip(letters(len(runs)), runs, strict=True):
        causes = causes_of(run)
        for arm in arms:
            seeds = [r.settings.get("seed") for r in (run, *arm.runs)]
            if arm.causes == causes and None not in seeds and seeds[0] not in seeds[1:]:
                arm.runs.append(run)
                arm.letters.append(letter)
                break
        else:
            arms.append(Arm([letter], [run], causes))
    return arms


def causes_of(run: Run) -> dict[str, Any]:
    """What the run's training and speed may depend on, without values that follow from others."""
    settings = run.settings
    known = {name: value for name, value in settings.items() if name not in SILENT and value != "auto"}
    known |= {name: run.start.get(name) for name in METADATA if run.start.get(name) is not None}
    if settings.get("init_from") not in (None, "scratch", "resume"):
        known["init_from"] = settings["init_from"]
    # What ran counts; the setting stands in for it where the log does not say.
    compile_setting = known.pop("compile", None)
    known.setdefault("compiled", compile_setting)
    if known.get("min_lr") and math.isclose(known["min_lr"] * 10, known.get("learning_rate", math.nan)):
        del known["min_lr"]
    if known.get("lr_decay_iters") in (0, known.get("max_iters")):
        known.pop("lr_decay_iters", None)
    return {name: value for name, value in known.items() if value is not None}


def differing(dicts: list[dict[str, Any]]) -> list[str]:
    """Keys that have different values, or that some of the dicts lack."""
    names = list(dict.fromkeys(name for d in dicts for name in d))
    return [name for name in names if any(d.get(name) != dicts[0].get(name) for d in dicts)]


def factors(arms: list[Arm]) -> list[list[str]]:
    """The changes between arms, each as the names of its settings.

    Several settings are one change where something else stays the same: batch size and accumulation with their product,
    width and heads with the size of a head, what depends on the tokenizer with the text.
    """
    names = [name for name in differing([arm.causes for arm in arms]) if all(name in arm.causes for arm in arms)]
    heads = {arm.causes.get("n_embd", 0) / (arm.causes.get("n_head") or 1) for arm in arms}
    if "tokenizer" in names and same_whole_text([run for arm in arms for run in arm.runs]):
        names = [name for name in names if name not in ("vocab_size", "train_tokens", "val_sha256")]
    changes = []
    for pair, is_one in (
        (["batch_size", "gradient_accumulation_steps"], len({arm.runs[0].tokens_per_step for arm in arms}) == 1),
        (["n_embd", "n_head"], len(heads) == 1),
    ):
        if is_one and set(pair) <= set(names):
            changes.append(pair)
            names = [name for name in names if name not in pair]
    return changes + [[name] for name in names]


def change_rows(arms: list[Arm]) -> list[Row]:
    """A row for every setting and metadata field that differs, and one for the tokens of a step."""
    known = [arm.runs[0].settings | arm.causes for arm in arms]
    names = [name for name in differing(known) if name not in ("out_dir", "seed", "compile")]
    rows = [Row(name, [[of.get(name)] for of in known], short) for name in names]
    rows = [row for row in rows if len({short(value) for [value] in row.of_runs if value is not None}) > 1]
    return [*rows, Row("tokens per step", [[arm.runs[0].tokens_per_step] for arm in arms], short)]


def short(value: Any) -> str:
    """A setting or metadata field in a table's cell."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {of_name}" for name, of_name in value.items() if name != "platform")
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if type(value) is int else str(value)


# ---- who leads -----------------------------------------------------------------------------------------------


def speed_lead(arms: list[Arm], rates: list[list[float]]) -> Lead:
    """How many times as fast the fastest arm was. That says nothing about the cause: a machine's speed drifts."""
    means = [statistics.fmean(of_arm) for of_arm in rates]
    best, *others = sorted(range(len(arms)), key=lambda i: -means[i])
    parts = [f"{arms[best].label}, {means[best] / means[i]:.2f} x {arms[i].label}" for i in others]
    return Lead("; ".join(parts), best if means[best] > SAME_SPEED * means[others[0]] else None)


def loss_lead(arms: list[Arm], values: list[list[float]], noise: tuple[float, int] | None, step: float | None) -> Lead:
    """Which arm has the lowest mean, and how sure that is of each other arm; the intervals hold together (Bonferroni).

    noise: the variance between runs and its degrees of freedom, for arms of a single run; None where it is not known.
    step: at which all were evaluated, None where they are compared at another amount.
    """
    best, *others = sorted(range(len(arms)), key=lambda i: statistics.fmean(values[i]))
    error = alpha_of_each(math.comb(len(arms), 2))
    parts = []
    halves = []
    for i in others:
        gap, half = welch(values[best], values[i], error, noise)
        halves.append((gap, half))
        parts.append(loss_words(arms[best], arms[i], gap, half, step))
    return Lead(
        "; ".join(parts),
        best if all(half is not None and gap > half for gap, half in halves) else None,
        is_open=any(half is None for _, half in halves),
        is_same=all(round(gap, 4) == 0 for gap, _ in halves),
    )


def loss_words(best: Arm, other: Arm, gap: float, half: float | None, step: float | None) -> str:
    words = f"{best.label} lower than {other.label} by {gap:.4f}"
    if round(gap, 4) == 0:
        words = f"{best.label} and {other.label} the same, 0.0000 apart"
    elif half is None:
        words += ", noise of the seeds not known"
    elif gap > half:
        words += f" ± {half:.4f}"
    else:
        words = f"{best.label} and {other.label} not distinguishable, {gap:.4f} ± {half:.4f} apart"
    if len(best.runs) + len(other.runs) > 2:
        return f"{words} (n={len(best.runs)} and {len(other.runs)})"
    return words + text_error(best.runs[0], other.runs[0], step)


def text_error(a: Run, b: Run, step: float | None) -> str:
    """The interval that the text leaves to the difference of two runs at a step, from the batches that both read."""
    of_a = next((e for e in a.val if e["iter"] == step), {})
    of_b = next((e for e in b.val if e["iter"] == step), {})
    if not of_a.get("eval_digest") or of_a["eval_digest"] != of_b.get("eval_digest"):
        return ""
    batches = of_a["val_batches"] or []
    half = error_of_text([batches], [of_b["val_batches"] or []])
    return "" if half is None else f" (±{half:.4f} of the text alone, n={len(batches)} batches)"


def seed_noise(arms: list[Arm], values: list[list[float]], unit: str) -> tuple[float, int] | None:
    """(variance, degrees of freedom) of losses over seeds: from arms with repeats and bands of their configs."""
    groups = [of_arm for of_arm in values if len(of_arm) > 1]
    last = max(e["iter"] for arm in arms for e in arm.runs[0].val)
    for arm in arms if unit == "val loss" else []:
        band = band_of(arm.runs[0])
        if band:
            nearest = min(band.losses, key=lambda step: abs(step - last))
            if band.losses[nearest] not in groups:
                groups.append(band.losses[nearest])
    freedom = sum(len(group) - 1 for group in groups)
    squares = sum((len(group) - 1) * statistics.variance(group) for group in groups)
    return (squares / freedom, freedom) if freedom else None


def band_of(run: Run) -> loss_band.Band | None:
    """The band of val losses (config/loss_bands) that the run belongs to, if there is one."""
    return loss_band.band_of(run.settings, run.start.get("val_sha256"), run.start.get("train_tokens"))


# ---- which losses compare ------------------------------------------------------------------------------------


def comparable(runs: list[Run]) -> tuple[str, str]:
    """(the unit in which losses are compared, why they cannot be compared, "" where they can)

    Losses in nats per token are compared on the same windows only. Those of different tokenizers are compared in bits
    per byte where each run was evaluated on the whole of the same text.
    """
    tokenizers = [run.start.get("tokenizer") for run in runs]
    if len(set(tokenizers)) > 1 and None not in tokenizers and same_whole_text(runs):
        return "bits per byte", ""
    of_runs: dict[str, list[Any]] = {
        "tokenizers (bits per byte need the whole of one text)": tokenizers,
        "validation data": [run.start.get("val_sha256") for run in runs],
        "validation windows": [windows(run) for run in runs],
    }
    untrained = [e["val_loss"] for run in runs for e in run.val if e["iter"] == 0]
    if len(untrained) == len(runs) and max(untrained) - min(untrained) > OTHER_VOCABULARY:
        of_runs["losses at step 0, so other vocabularies or data"] = [f"{loss:.2f}" for loss in untrained]
    for what, values in of_runs.items():
        is_half_known = what == "validation windows" and 0 < values.count(None) < len(runs)
        if len(set(values) - {None}) > 1 or is_half_known:
            shown = [f"{x} {value or 'not known'}" for x, value in zip(letters(len(runs)), values, strict=True)]
            return "val loss", f"different {what}: {', '.join(shown)}"
    return "val loss", ""


def same_whole_text(runs: list[Run]) -> bool:
    """Whether all were evaluated on the whole of one text: it begins alike, and is as long within 1%."""
    if any(e["val_bpb"] is None for run in runs for e in run.val):
        return False
    begins = {run.start.get("val_text") for run in runs}
    lengths = [run.start.get("val_text_bytes", 0) for run in runs]
    shares = [run.start.get("val_bytes", 0) / (run.start.get("val_text_bytes") or math.inf) for run in runs]
    return len(begins) == 1 and None not in begins and max(lengths) <= 1.01 * min(lengths) and min(shares) >= WHOLE


def windows(run: Run) -> str | None:
    """What a val loss was measured on, None where the log does not say."""
    last = run.val[-1] if run.val else {}
    if last.get("eval_digest") and last["eval_windows"]:
        return f"{last['eval_windows']:,} windows with digest {str(last['eval_digest'])[:8]}"
    names = ["eval_tokens"] if run.settings.get("eval_tokens") else ["eval_iters", "batch_size"]
    if not run.start.get("val_sha256") or "block_size" not in run.settings:
        return None
    return ", ".join(f"{name}={run.settings.get(name)}" for name in [*names, "block_size"])


# ---- the tables ----------------------------------------------------------------------------------------------


def largest(run: Run, name: str) -> float | None:
    """The largest number of this name in the run's steps."""
    return max((e[name] for e in run.iters if e.get(name) is not None), default=None)


# Times are those of all parts of a run that was resumed.
SPEED: list[tuple[str, Callable[[Run], Any], Text]] = [
    ("ms per step, median", logs.median_ms, "{:,.4g}".format),
    ("tokens/s", logs.tokens_per_s, "{:,.0f}".format),
    ("parameters", lambda r: r.start.get("parameters"), lambda v: f"{v / 1e6:,.2f}M"),
    ("MFLOPs per token", lambda r: r.flops_per_token, lambda v: f"{v / 1e6:,.4g}"),
    ("MFU", logs.mfu, "{:.2%}".format),
    ("MFU as nanoGPT prints it (of 312 TFLOP/s)", logs.nanogpt_mfu, "{:.2%}".format),
    ("training", lambda r: largest(r, "train_s"), clock),
    ("evaluation", lambda r: sum(e["eval_s"] or 0.0 for e in r.evals) or None, clock),
    ("warm-up and compiling", lambda r: r.start.get("warm_up_s"), clock),
    ("peak memory", lambda r: largest(r, "peak_memory_bytes"), lambda v: f"{in_gib(v)} GiB"),
]
LEARNING: list[tuple[str, Callable[[Run], Any], Text]] = [
    ("last step evaluated", lambda r: r.val[-1]["iter"], AMOUNT["steps"]),
    ("val loss there", lambda r: r.val[-1]["val_loss"], "{:.4f}".format),
    ("lowest val loss", lambda r: r.best["val_loss"], "{:.4f}".format),
    ("perplexity there", lambda r: math.exp(min(r.best["val_loss"], 700)), "{:.2f}".format),
    ("bits per byte there", lambda r: r.best["val_bpb"], "{:.4f}".format),
    ("train loss at the end", lambda r: r.val[-1]["train_loss"], "{:.4f}".format),
]


def speed_rows(arms: list[Arm]) -> list[Row]:
    """A row for each figure of speed that is known of one arm at least."""
    rows = [row_of(label, arms, figure, text) for label, figure, text in SPEED]
    speed = rows[1]
    if len(arms) > 1 and speed.is_whole:
        speed.lead = speed_lead(arms, speed.of_runs)
    return known(rows)


def learning_rows(arms: list[Arm], unit: str = "val loss", reason: str = "") -> list[Row]:
    """Rows of losses, and of losses after equal spending: that of the run that spent the least.

    unit, reason: as `comparable` gives them. Empty where no run was evaluated.
    """
    runs = [run for arm in arms for run in arm.runs if run.val]
    if not runs:
        return []
    rows = []
    for label, figure, text in LEARNING:
        rows.append(Row(label, [[figure(run) if run.val else None for run in arm.runs] for arm in arms], text))
    axes = ["steps", "tokens", "time", "FLOPs"] if len(arms) > 1 else []
    if unit == "bits per byte":  # equal steps read unequal text
        axes = ["text", "time", "FLOPs"]
        arms = [replace(arm, runs=[in_bits(run) for run in arm.runs]) for arm in arms]
    for axis in axes:
        ends = [points[-1][0] for run in runs if (points := curve(run, axis))]
        if ends:
            rows.append(equal_row(arms, axis, min(ends), unit, reason))
    return known(rows)


def equal_row(arms: list[Arm], axis: str, amount: float, unit: str, reason: str) -> Row:
    """The val losses after an equal amount of steps, tokens, text, time or FLOPs."""
    figure = functools.partial(loss_at, axis=axis, amount=amount)
    row = row_of(f"{unit} at equal {axis} ({AMOUNT[axis](amount)})", arms, figure, "{:.4f}".format)
    if reason:
        row.lead = Lead("not comparable")
    elif row.is_whole:
        noise = seed_noise(arms, row.of_runs, unit)
        row.lead = loss_lead(arms, row.of_runs, noise, amount if axis == "steps" else None)
    return row


def in_bits(run: Run) -> Run:
    """The run with its val losses in bits per byte."""
    return replace(run, evals=[e | {"val_loss": e["val_bpb"], "val_batches": None} for e in run.evals])


def overfit(run: Run) -> tuple[int, float] | None:
    """(step of the lowest val loss, how much the last one is above it), where the model has begun to overfit."""
    evals = [e for e in run.val if e["train_loss"] is not None]
    return diagnosis.overfit([EvalRecord(e["iter"], e["train_loss"], e["val_loss"], e["val_se"]) for e in evals])
