"""The rows of the tables: what changed between runs, how fast they were, what they learned, and who leads."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.analysis import logs
from bench.analysis.logs import Run, curve, loss_at, spent_until, tokens_per_s
from bench.analysis.noise import difference, interval, t_quantile
from deskgpt.run import diagnosis, loss_band
from deskgpt.system.terminal import clock, in_gib, in_tera

# Settings that affect neither the training nor its speed, and those that are reported as facts of the data.
SILENT = {"out_dir", "eval_interval", "eval_iters", "eval_tokens", "eval_only", "log_interval", "auto_batch"}
SILENT |= {"dry_run", "plan_for", "always_save_checkpoint", "wandb_log", "wandb_project", "wandb_run_name"}
SILENT |= {"seed", "dataset", "init_from", "sample_interval", "attention"}  # which attention ran is a fact
TOKENIZER = ("tokenizer", "vocab_size")
FACTS = ("device", "world_size", "dtype", "attention", "compiled", "compiler", "versions", "git_commit", *TOKENIZER)
DATA_FACTS = ("train_tokens", "val_sha256")  # which on the same text follow from the tokenizer

SAME_SPEED = 1.05  # a ratio that two single runs cannot tell from 1: a machine's speed changes from run to run
WHOLE = 0.95  # the share of a text that an evaluation reads, from which on tokenizers are compared on it
OTHER_VOCABULARY = 0.7  # nats between the losses of untrained models: one has about twice the tokens of the other
AMOUNT: dict[str, Callable[[float], str]] = {
    "steps": lambda v: f"{v:,.0f}",
    "tokens": lambda v: f"{v:.4g}" if v >= 1e6 else f"{v:,.0f}",
    "text": lambda v: f"{v / 1e6:.4g} MB" if v >= 1e6 else f"{v:,.0f} bytes",
    "time": clock,
    "FLOPs": lambda v: f"{v:.3g}",
}


@dataclass
class Arm:
    """Runs of the same settings: one, or several with different seeds."""

    label: str
    runs: list[Run]
    causes: dict[str, Any] = field(default_factory=dict)  # settings and facts that may be a cause

    @property
    def name(self) -> str:
        if len(self.runs) == 1:
            return self.runs[0].name
        return f"repeats, seeds {', '.join(str(run.settings.get('seed')) for run in self.runs)}"


@dataclass(frozen=True)
class Lead:
    """Who is ahead in a figure, and how sure that is."""

    text: str = ""
    winner: int | None = None  # the arm that is ahead of all others by more than the noise
    is_open: bool = False  # whether a noise is not known
    is_same: bool = False  # whether all arms have the same figure, to its last place, or but for rounding


@dataclass
class Row:
    """A figure of each run of each arm, None where it is not known."""

    label: str
    of_runs: list[list[Any]]
    text: Callable[[Any], str]
    lead: Lead = field(default_factory=Lead)

    @property
    def values(self) -> list[Any]:
        """The mean of each arm; None where a run lacks the figure."""
        return [
            of_arm[0] if len(of_arm) == 1 else None if None in of_arm else statistics.fmean(of_arm)
            for of_arm in self.of_runs
        ]

    def cells(self) -> list[str]:
        return [self.label, *map(self.cell, self.of_runs), self.lead.text]

    def cell(self, of_arm: list[Any]) -> str:
        """The mean of repeats ± half its 95% interval; their range, where that says no more than the range does."""
        if None in of_arm:
            return "n/a"
        if len(of_arm) == 1:
            return self.text(of_arm[0])
        lowest = self.text(min(of_arm))
        highest = self.text(max(of_arm))
        if lowest == highest:
            return lowest
        mean, half = interval(of_arm)
        if half is None or len(of_arm) < 3 or half >= abs(mean):
            return f"{lowest} to {highest} (n={len(of_arm)})"
        return f"{self.text(mean)} ± {self.text(half)} (n={len(of_arm)})"


def over_runs(label: str, arms: list[Arm], figure: Callable[[Run], Any], text: Callable[[Any], str]) -> Row:
    return Row(label, [[figure(run) for run in arm.runs] for arm in arms], text)


# ---- arms, and what differs between them ---------------------------------------------------------------------


def letters(n: int) -> list[str]:
    """Names of n runs: A, B, C ..."""
    return [chr(ord("A") + i) if i < 26 else f"A{i}" for i in range(n)]


def arms_of(runs: list[Run]) -> list[Arm]:
    """Groups the runs: those that differ only in their seed are one arm."""
    arms: list[Arm] = []
    for letter, run in zip(letters(len(runs)), runs, strict=True):
        causes = causes_of(run)
        for arm in arms:
            seeds = [r.settings.get("seed") for r in (run, *arm.runs)]
            if arm.causes == causes and None not in seeds and seeds[0] not in seeds[1:]:
                arm.runs.append(run)
                arm.label += f"+{letter}"
                break
        else:
            arms.append(Arm(letter, [run], causes))
    return arms


def causes_of(run: Run) -> dict[str, Any]:
    """What the run's training and speed may depend on, without values that follow from others."""
    settings = run.settings
    known = {name: value for name, value in settings.items() if name not in SILENT and value != "auto"}
    if run.start.get("gpu"):
        known["device"] = run.start["gpu"]
    known |= {name: run.start.get(name) for name in (*FACTS, *DATA_FACTS) if run.start.get(name) is not None}
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

    Two settings are one change where something else stays the same: batch size and accumulation with their product,
    width and heads with the size of a head, what depends on the tokenizer with the text.
    """
    names = [name for name in differing([arm.causes for arm in arms]) if all(name in arm.causes for arm in arms)]
    changes = []
    for pair, same in (
        (["batch_size", "gradient_accumulation_steps"], {arm.runs[0].tokens_per_step for arm in arms}),
        (["n_embd", "n_head"], {arm.causes.get("n_embd", 0) / (arm.causes.get("n_head") or 1) for arm in arms}),
    ):
        if set(pair) <= set(names) and len(same) == 1:
            changes.append(pair)
    tokenizer = [name for name in TOKENIZER if name in names]
    if tokenizer and same_text([run for arm in arms for run in arm.runs]):
        changes.append(tokenizer)
        names = [name for name in names if name not in DATA_FACTS]
    paired = {name for change in changes for name in change}
    return changes + [[name] for name in names if name not in paired]


def is_same_training(arms: list[Arm]) -> bool:
    """Whether arms differ only in how they split a global batch, with the same seed: they train alike."""
    seeds = {run.settings.get("seed") for arm in arms for run in arm.runs}
    return len(seeds) == 1 and factors(arms) == [["batch_size", "gradient_accumulation_steps"]]


def change_rows(arms: list[Arm]) -> list[Row]:
    """A row for every setting and fact that differs, and one for the tokens of a step."""
    known = [arm.runs[0].settings | arm.causes for arm in arms]
    rows = [Row(name, [[of.get(name)] for of in known], short) for name in differing(known)]
    rows = [row for row in rows if row.label not in ("out_dir", "seed", "compile")]
    rows = [row for row in rows if len({short(value) for value in row.values if value is not None}) > 1]
    return [*rows, Row("tokens per step", [[arm.runs[0].tokens_per_step] for arm in arms], short)]


def short(value: Any) -> str:
    """A setting or fact in a table's cell."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {of_name}" for name, of_name in value.items() if name != "platform")
    return f"{value:g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


# ---- who leads -----------------------------------------------------------------------------------------------


def leader(
    arms: list[Arm],
    values: list[list[float]],
    single_half: Callable[[int, int, float], float | None],
    words: Callable[[str, str, float, float | None], str],
    of_text: Callable[[Arm, Arm], str] = lambda best, other: "",
) -> Lead:
    """Which arm has the lowest mean, and how sure that is of each other arm; the intervals hold together (Bonferroni).

    single_half: half the width of a difference's interval where an arm has a single run, from the numbers of runs and
    the error. words: of labels, a difference and half its interval. of_text: what is known beside the seeds.
    """
    means = [statistics.fmean(of_arm) for of_arm in values]
    best, *others = sorted(range(len(arms)), key=lambda i: means[i])
    error = 0.05 / math.comb(len(arms), 2)
    parts = []
    halves = []
    for i in others:
        gap, half = difference(values[best], values[i], error)
        half = single_half(len(values[best]), len(values[i]), error) if half is None else half
        halves.append((gap, half))
        parts.append(words(arms[best].label, arms[i].label, gap, half) + of_text(arms[best], arms[i]))
    return Lead(
        "; ".join(parts[:3]) + (f"; and {len(parts) - 3} more" if len(parts) > 3 else ""),
        best if all(half is not None and gap > half for gap, half in halves) else None,
        is_open=any(half is None for _, half in halves),
        is_same=all(round(gap, 4) == 0 for gap, _ in halves),
    )


def loss_words(best: str, other: str, gap: float, half: float | None) -> str:
    if round(gap, 4) == 0:
        return f"{best} and {other} the same, 0.0000 apart"
    if half is None:
        return f"{best} lower than {other} by {gap:.4f}, noise of the seeds not known"
    if gap > half:
        return f"{best} lower than {other} by {gap:.4f} ± {half:.4f}"
    return f"{best} and {other} not distinguishable, {gap:.4f} ± {half:.4f} apart"


def speed_words(best: str, other: str, gap: float, half: float | None) -> str:
    """gap, half: logarithms of a ratio."""
    ratio, noise = (math.exp(min(log or 0.0, 700)) for log in (gap, half))  # exp(710) overflows
    if ratio > noise:
        return f"{best}, {ratio:.2f} x {other} (noise a factor of {noise:.2f})"
    return f"{best} and {other} not distinguishable ({ratio:.2f} x, noise a factor of {noise:.2f})"


def seed_half(arms: list[Arm], values: list[list[float]], in_bits: bool) -> Callable[[int, int, float], float | None]:
    """leader's single_half of losses: from the repeats among these runs and the bands of their configs, pooled."""
    groups = [of_arm for of_arm in values if len(of_arm) > 1]
    last = max(e["iter"] for arm in arms for e in arm.runs[0].val)
    for arm in arms if not in_bits else []:
        band = band_of(arm.runs[0])
        group = band.losses[min(band.losses, key=lambda step: abs(step - last))] if band else None
        if group and group not in groups:
            groups.append(group)
    freedom = sum(len(group) - 1 for group in groups)
    squares = sum((len(group) - 1) * statistics.variance(group) for group in groups)

    def half(n_a: int, n_b: int, error: float) -> float | None:
        return t_quantile(freedom, error) * math.sqrt(squares / freedom * (1 / n_a + 1 / n_b)) if freedom else None

    return half


def band_of(run: Run) -> Any:
    """The band of val losses (config/loss_bands) that the run belongs to, None if there is none."""
    return loss_band.band_of(run.settings, run.start.get("val_sha256"), run.start.get("train_tokens"))


def text_error(a: Run, b: Run, step: float) -> str:
    """The interval that the text leaves to the difference of two runs at a step, from the batches that both read."""
    found = [next((e for e in run.val if e["iter"] == step), {}) for run in (a, b)]
    means = [e.get("val_batches") or [] for e in found]
    same = found[0].get("eval_digest") and found[0]["eval_digest"] == found[1].get("eval_digest")
    if not same or not means[0] or len(means[0]) != len(means[1]):
        return ""
    half = interval([y - x for x, y in zip(*means, strict=True)])[1]
    return "" if half is None else f" (±{half:.4f} of the text alone, n={len(means[0])} batches)"


# ---- which losses compare ------------------------------------------------------------------------------------


def same_text(runs: list[Run]) -> bool:
    """Whether the validation data is the same text, in whatever tokens: it begins alike, and is as long within 1%."""
    begins = {run.start.get("val_text") for run in runs}
    lengths = [run.start.get("val_text_bytes", 0) for run in runs]
    return None not in begins and len(begins) == 1 and 0 < max(lengths) <= 1.01 * min(lengths)


def windows(run: Run) -> str | None:
    """What a val loss was measured on, None where the log does not say."""
    last = run.val[-1] if run.val else {}
    if last.get("eval_digest") and last["eval_windows"]:
        return f"{last['eval_windows']:,} windows with digest {str(last['eval_digest'])[:8]}"
    block_size = logs.product(run, ["block_size"])
    tokens = run.settings.get("eval_tokens") or logs.product(run, ["eval_iters", "batch_size", "block_size"])
    if not run.start.get("val_sha256") or not block_size or not tokens:
        return None
    return f"{math.ceil(tokens / block_size):,} windows of {block_size:,} tokens"


def comparable(runs: list[Run]) -> tuple[bool, list[str]]:
    """(whether losses are compared in bits per byte of text, why they cannot be compared at all)

    Losses in nats per token are compared on the same windows only. Those of different tokenizers are compared in bits
    per byte where each run was evaluated on the whole of the same text.
    """
    untrained = [e["val_loss"] for run in runs for e in run.val if e["iter"] == 0]
    facts: dict[str, list[Any]] = {
        "validation data": [run.start.get("val_sha256") for run in runs],
        "numbers of validation tokens": [run.start.get("val_tokens") for run in runs],
        "tokenizers": [run.start.get("tokenizer") for run in runs],
        "validation windows": [windows(run) for run in runs],
    }
    if None in facts["validation data"]:
        facts["data sets"] = [Path(str(run.settings.get("dataset"))).name for run in runs]
        if len(untrained) == len(runs) and max(untrained) - min(untrained) > OTHER_VOCABULARY:
            facts["losses at step 0, so other vocabularies or data"] = [f"{loss:.2f}" for loss in untrained]
    reasons = []
    for what, values in facts.items():
        if len(set(values) - {None}) > 1 or (what == "validation windows" and 0 < values.count(None) < len(runs)):
            shown = [f"{x} {value or 'not known'}" for x, value in zip(letters(len(runs)), values, strict=True)]
            reasons.append(f"different {what} ({', '.join(shown)})")
    if len(set(facts["tokenizers"])) == 1 or None in facts["tokenizers"]:
        return False, reasons[:1]
    parts = [(run.start.get("val_bytes", 0), run.start.get("val_text_bytes", 0)) for run in runs]
    if any(e["val_bpb"] is None for run in runs for e in run.val):
        return False, [*reasons[:1], "not of all runs are bits per byte known"]
    if not same_text(runs):
        return False, [*reasons[:1], "the validation texts are not known to be the same"]
    if any(read < WHOLE * whole for read, whole in parts):
        shares = [f"{x} {read / whole:.0%}" for x, (read, whole) in zip(letters(len(runs)), parts, strict=True)]
        return False, [*reasons[:1], f"not all were evaluated on the whole text ({', '.join(shares)})"]
    return True, []


def in_bits(run: Run) -> Run:
    """The run with its val losses in bits per byte."""
    return replace(run, evals=[e | {"val_loss": e["val_bpb"], "val_batches": None} for e in run.evals])


# ---- the tables ----------------------------------------------------------------------------------------------


def speed_rows(arms: list[Arm]) -> list[Row]:
    """A row for each figure of speed that is known of one arm at least. Times are those of all parts of a run."""
    tera = "{} TFLOP/s".format
    figures: list[tuple[str, Callable[[Run], Any], Callable[[Any], str]]] = [
        ("ms per step, median", logs.median_ms, lambda v: f"{v:,.4g}"),
        ("tokens/s", tokens_per_s, lambda v: f"{v:,.0f}"),
        ("parameters, as stated", lambda r: r.start.get("parameters"), lambda v: f"{v / 1e6:,.2f}M"),
        ("parameters, from MFU, time and tokens", logs.implied_parameters, lambda v: f"{v / 1e6:,.2f}M"),
        ("MFLOPs per token", lambda r: r.flops_per_token, lambda v: f"{v / 1e6:,.4g}"),
        ("FLOP/s", logs.flops_per_s, lambda v: tera(in_tera(v))),
        ("MFU", logs.mfu, "{:.2%}".format),
        ("peak that MFU refers to", lambda r: r.start.get("peak_flops"), lambda v: tera(in_tera(v))),
        ("MFU as nanoGPT prints it (of 312 TFLOP/s)", logs.nanogpt_mfu, "{:.2%}".format),
        ("training", lambda r: over_steps(max, r, "train_s"), clock),
        ("of it waiting for data", lambda r: over_steps(statistics.fmean, r, "data_wait"), "{:.1%}".format),
        ("evaluation", lambda r: sum(e["eval_s"] or 0.0 for e in r.evals) or None, clock),
        ("saving", lambda r: r.save_s, clock),
        ("warm-up and compiling", lambda r: r.start.get("warm_up_s"), clock),
        ("peak memory", lambda r: over_steps(max, r, "peak_memory_bytes"), lambda v: f"{in_gib(v)} GiB"),
    ]
    rows = [over_runs(label, arms, figure, text) for label, figure, text in figures]
    speed = rows[1]
    if len(arms) > 1 and None not in speed.values:
        slowness = [[-math.log(rate) for rate in of_arm] for of_arm in speed.of_runs]
        speed.lead = leader(arms, slowness, lambda *_: math.log(SAME_SPEED), speed_words)
    return [row for row in rows if any(value is not None for value in row.values)]


def over_steps(function: Callable[[list[float]], float], run: Run, name: str) -> float | None:
    known = [e[name] for e in run.iters if e.get(name) is not None]
    return function(known) if known else None


def learning_rows(arms: list[Arm], levels: list[float], bits: bool, reasons: list[str]) -> list[Row]:
    """Rows of losses and of what it took to reach them; empty where no run was evaluated.

    levels: the losses to be reached; by default chosen from the arms' own. bits, reasons: as `comparable` gives them.
    """
    if not any(run.val for arm in arms for run in arm.runs):
        return []
    figures: list[tuple[str, Callable[[Run], Any], Callable[[Any], str]]] = [
        ("last step evaluated", lambda r: r.val[-1]["iter"], AMOUNT["steps"]),
        ("val loss there", lambda r: r.val[-1]["val_loss"], "{:.4f}".format),
        ("lowest val loss", lambda r: r.best["val_loss"], "{:.4f}".format),
        ("at step", lambda r: r.best["iter"], AMOUNT["steps"]),
        ("perplexity there", lambda r: math.exp(min(r.best["val_loss"], 700)), "{:.2f}".format),
        ("bits per byte there", lambda r: r.best["val_bpb"], "{:.4f}".format),
        ("train loss at the end", lambda r: r.val[-1]["train_loss"], "{:.4f}".format),
    ]
    rows = []
    for name, figure, text in figures:
        rows.append(Row(name, [[figure(run) if run.val else None for run in arm.runs] for arm in arms], text))
    turned = [[overfit(arm.runs[0])] for arm in arms]
    rows.append(Row("val loss turned up after step", turned, lambda v: f"{v[0]:,}, by {v[1]:.4f} since"))
    unit = "bits per byte" if bits else "val loss"
    if bits:
        arms = [replace(arm, runs=[in_bits(run) for run in arm.runs]) for arm in arms]
    amounts = ["text", "time", "FLOPs"] if bits else ["steps", "tokens", "time", "FLOPs"]
    for axis in amounts if len(arms) > 1 else []:
        ends = [points[-1][0] for arm in arms for run in arm.runs if (points := curve(run, axis))]
        if ends:
            rows.append(equal_row(arms, axis, min(ends), unit, reasons))
    lowest = [run.best["val_loss"] for arm in arms for run in arm.runs if run.val]
    for level in levels or [math.ceil(max(lowest) * 100) / 100]:
        for axis in (amounts[0] if bits else "tokens", "time"):
            reached = [[spent_until(run, axis, level) for run in arm.runs] for arm in arms]
            rows.append(Row(f"{axis} to {unit} {level:g}", reached, AMOUNT[axis]))
    return [row for row in rows if any(value is not None for value in row.values)]


def equal_row(arms: list[Arm], axis: str, amount: float, unit: str, reasons: list[str]) -> Row:
    """The val losses after equal spending: that of the run that spent the least."""
    label = f"{unit} at equal {axis} ({AMOUNT[axis](amount)})"
    row = over_runs(label, arms, lambda run: loss_at(run, axis, amount), "{:.4f}".format)
    if reasons:
        row.lead = Lead("not comparable")
    elif all(None not in of_arm for of_arm in row.of_runs):

        def of_text(best: Arm, other: Arm) -> str:
            n = f" (n={len(best.runs)} and {len(other.runs)})" if len(best.runs) + len(other.runs) > 2 else ""
            return n or (text_error(best.runs[0], other.runs[0], amount) if axis == "steps" else "")

        row.lead = leader(arms, row.of_runs, seed_half(arms, row.of_runs, unit != "val loss"), loss_words, of_text)
        if axis in ("steps", "tokens") and is_same_training(arms):
            gap = max(row.values) - min(row.values)
            row.lead = Lead(f"the same training, {gap:.4f} apart by rounding", is_same=True)
    return row


def overfit(run: Run) -> tuple[int, float] | None:
    """(step of the lowest val loss, how much the last one is above it), where the model has begun to overfit."""
    known = [e for e in run.val if e["train_loss"] is not None]
    seen = [diagnosis.EvalRecord(e["iter"], e["train_loss"], e["val_loss"], e["val_se"]) for e in known]
    return diagnosis.overfit(seen)
