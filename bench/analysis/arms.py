"""Groups runs under comparison into arms: repeats with other seeds share one. And tells what differs between arms."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.analysis.noise import difference, interval
from bench.analysis.runs import Run
from train import TrainConfig

# Settings that affect neither the training nor its speed, and those that are reported as facts of the data.
SILENT = {"out_dir", "eval_interval", "eval_iters", "eval_tokens", "eval_only", "log_interval", "auto_batch"}
SILENT |= {"dry_run", "plan_for", "always_save_checkpoint", "wandb_log", "wandb_project", "wandb_run_name"}
SILENT |= {"seed", "dataset", "init_from", "sample_interval"}
SILENT |= {"attention"}  # what ran is a fact of the form
TOKENIZER = ("tokenizer", "vocab_size")
OF_FORM = ("dtype", "attention", "compiled", "compiler")
FACTS = ("device", "world_size", *OF_FORM, "versions", "git_commit", *TOKENIZER)
DATA_FACTS = ("train_tokens", "val_sha256")  # which on the same text follow from the tokenizer
# A cause can be named only where all of these are known.
NEEDED = {*TrainConfig.__dataclass_fields__} - SILENT - {"backend", "device", "compile", "min_lr", "lr_decay_iters"}
NEEDED |= {"device", "compiled"}


@dataclass
class Arm:
    """Runs of the same settings: one, or several with different seeds."""

    label: str
    runs: list[Run]
    values: dict[str, Any] = field(default_factory=dict)  # settings and facts that may be a cause

    @property
    def name(self) -> str:
        """The run's, or what its runs are."""
        if len(self.runs) == 1:
            return self.runs[0].name
        return f"repeats, seeds {', '.join(str(run.settings['seed']) for run in self.runs)}"


@dataclass(frozen=True)
class Lead:
    """Who leads in a figure, and how sure that is."""

    text: str = ""
    winner: int | None = None  # the arm that leads by more than the noise
    within_noise: bool = False  # whether an arm cannot be told from the leading one
    noise_unknown: bool = False


NOT_RANKED = Lead("not ranked")


@dataclass
class Row:
    """A figure of each arm, None if it is not known, and who leads in it."""

    label: str
    values: list[Any]
    text: Callable[[Any], str]
    lead: Lead = field(default_factory=Lead)
    of_runs: list[list[Any]] | None = None  # of each arm's runs, where a value is their mean

    def cells(self) -> list[str]:
        shown = [self.cell(value) for value in self.values]
        for i, values in enumerate(self.of_runs or []):
            if len(values) > 1 and None not in values:
                shown[i] = self.together(values)
        return [self.label, *shown, self.lead.text]

    def cell(self, value: Any) -> str:
        return "n/a" if value is None else self.text(value)

    def together(self, values: list[float]) -> str:
        """The mean of repeats ± half its 95% interval; their range, where that says no more than the range does."""
        lowest = self.text(min(values))
        highest = self.text(max(values))
        if lowest == highest:
            return lowest
        mean, half = interval(values)
        if half is None or len(values) < 3 or half >= abs(mean):
            return f"{lowest} to {highest}"
        return f"{self.text(mean)} ± {self.text(half)}"


def over_runs(label: str, arms: list[Arm], figure: Callable[[Run], Any], text: Callable[[Any], str]) -> Row:
    """The mean of a figure over each arm's runs; None for an arm where a run lacks it."""
    of_runs = [[figure(run) for run in arm.runs] for arm in arms]
    means = [None if None in values else statistics.fmean(values) for values in of_runs]
    return Row(label, means, text, of_runs=of_runs)


def lead_by_ratio(
    arms: list[Arm],
    values: list[list[float]],
    highest_leads: bool,
    words: str,
    single_noise: Callable[[list[Run]], float | None] = lambda runs: None,
) -> Lead:
    """Who leads by how many times, over the next arm. values: of each arm's runs, all above 0; words: after "2.00 x".

    The noise is that between runs, as a ratio. single_noise gives its logarithm where an arm has a single run.
    """
    means = [statistics.fmean(of_arm) for of_arm in values]
    best, second, *_ = sorted(range(len(arms)), key=lambda i: means[i], reverse=highest_leads)
    ratio = means[best] / means[second] if highest_leads else means[second] / means[best]
    _, log_noise = difference([math.log(v) for v in values[best]], [math.log(v) for v in values[second]])
    if log_noise is None:
        log_noise = single_noise(arms[best].runs + arms[second].runs)

    text = f"{arms[best].label}, {ratio:.2f} x {words}{arms[second].label}"
    if log_noise is None:
        return Lead(f"{text} (noise not known)", noise_unknown=True)
    noise = f"noise a factor of {math.exp(min(log_noise, 700)):.2f}"  # exp(710) overflows
    if math.log(ratio) <= log_noise:
        names = f"{arms[best].label} and {arms[second].label}"
        return Lead(f"{names}: not distinguishable ({ratio:.2f} x, {noise})", within_noise=True)
    return Lead(f"{text} ({noise})", best)


# ---- grouping ------------------------------------------------------------------------------------------------


def letters(n: int) -> list[str]:
    """Names of n runs: A, B, C ..."""
    return [chr(ord("A") + i) if i < 26 else f"A{i}" for i in range(n)]


def arms_of(runs: list[Run]) -> list[Arm]:
    """Groups the runs: those that differ only in their seed are one arm."""
    arms: list[Arm] = []
    for letter, run in zip(letters(len(runs)), runs, strict=True):
        values = causes(run)
        arm = next((arm for arm in arms if arm.values == values and repeats(run, arm)), None)
        if arm is None:
            arms.append(Arm(letter, [run], values))
        else:
            arm.runs.append(run)
            arm.label += f"+{letter}"
    return arms


def repeats(run: Run, arm: Arm) -> bool:
    """Whether the run has another seed than each of the arm's runs, all seeds being known."""
    seed = run.settings.get("seed")
    seeds = [r.settings.get("seed") for r in arm.runs]
    return seed is not None and None not in seeds and seed not in seeds


def causes(run: Run) -> dict[str, Any]:
    """What the run's training and speed may depend on, without values that follow from others."""
    settings = run.settings
    known = {name: value for name, value in settings.items() if name not in SILENT}
    if known.get("dtype") == "auto":
        del known["dtype"]
    if run.start.get("gpu"):
        known["device"] = run.start["gpu"]
    for name in FACTS:
        if run.start.get(name) is not None:
            known[name] = run.start[name]
    if settings.get("init_from") not in (None, "scratch", "resume"):
        known["init_from"] = settings["init_from"]
    if known.get("device") == "auto":
        del known["device"]

    # What ran counts; the setting stands in for it where the log does not say, unless it is "auto".
    compile_setting = known.pop("compile", None)
    if "compiled" not in known and compile_setting != "auto":
        known["compiled"] = compile_setting
    min_lr = known.get("min_lr")
    if min_lr is None or math.isclose(min_lr * 10, known.get("learning_rate", math.nan)):
        known.pop("min_lr", None)
    if known.get("lr_decay_iters") in (0, known.get("max_iters")):
        known.pop("lr_decay_iters", None)
    for name in DATA_FACTS:
        known[name] = run.start.get(name)
    return {name: value for name, value in known.items() if value is not None}


# ---- what differs --------------------------------------------------------------------------------------------


def differing(dicts: list[dict[str, Any]]) -> list[str]:
    """Keys that have different values, or that some of the dicts lack."""
    names = list(dict.fromkeys(name for d in dicts for name in d))
    return [name for name in names if any(d.get(name) != dicts[0].get(name) for d in dicts)]


def factors(arms: list[Arm]) -> list[list[str]]:
    """The changes between arms, each as the names of its settings.

    Two settings are one change where something else stays the same: batch size and accumulation with their product,
    width and heads with the size of a head, what depends on the tokenizer with the text.
    """
    names = [name for name in differing([arm.values for arm in arms]) if all(name in arm.values for arm in arms)]
    changes = []
    batch = ["batch_size", "gradient_accumulation_steps"]
    if set(batch) <= set(names) and len({a.values[batch[0]] * a.values[batch[1]] for a in arms}) == 1:
        changes.append(batch)
    width = ["n_embd", "n_head"]
    if set(width) <= set(names) and len({a.values[width[0]] / a.values[width[1]] for a in arms}) == 1:
        changes.append(width)
    tokenizer = [name for name in TOKENIZER if name in names]
    if tokenizer and same_text([run for arm in arms for run in arm.runs]):
        changes.append(tokenizer)
        names = [name for name in names if name not in DATA_FACTS]
    paired = {name for change in changes for name in change}
    return changes + [[name] for name in names if name not in paired]


def same_text(runs: list[Run]) -> bool:
    """Whether the validation data is known to be the same text, in whatever tokens.

    That is: it begins alike, and the lengths are within 1%, as shards of whole tokens cannot be equally long.
    """
    begins = {run.start.get("val_text") for run in runs}
    lengths = [run.start.get("val_text_bytes") or 0 for run in runs]  # 0: not known
    return None not in begins and len(begins) == 1 and 0 < max(lengths) <= 1.01 * min(lengths)


def how(change: list[str], arms: list[Arm]) -> str:
    """A change in words: between two arms, from which value to which."""
    if len(arms) != 2:
        return " with ".join(change)
    old = arms[0].values
    new = arms[1].values
    return " with ".join(f"{name} {short(old.get(name))} -> {short(new.get(name))}" for name in change)


def change_rows(arms: list[Arm]) -> list[Row]:
    """A row for every setting and fact that differs, and one for the tokens of a step."""
    first = [arm.runs[0] for arm in arms]
    settings = [run.settings for run in first]
    names = [name for name in differing(settings) if name not in ("out_dir", "seed")]
    rows = [Row(name, [s.get(name) for s in settings], short) for name in names]

    facts = [{name: run.start.get(name) for name in FACTS} for run in first]
    for name in differing(facts):
        label = f"{name} in use" if name in names else name
        rows.append(Row(label, [f[name] for f in facts], short))
    rows = [row for row in rows if len({short(value) for value in row.values if value is not None}) > 1]

    tokens = [run.tokens_per_step for run in first]
    lead = Lead()
    if len(arms) > 1 and None not in tokens:
        lead = Lead("equal" if len(set(tokens)) == 1 else "not equal")
    return [*rows, Row("tokens per step", tokens, short, lead)]


def unknown(arms: list[Arm]) -> dict[str, list[str]]:
    """What may be a cause and is not known of an arm, by the arm's first letter."""
    missing = {arm.label.partition("+")[0]: sorted(NEEDED - arm.values.keys()) for arm in arms}
    return {letter: names for letter, names in missing.items() if names}


def short(value: Any) -> str:
    """A setting or fact in a table's cell."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {of_name}" for name, of_name in value.items() if name != "platform")
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if type(value) is int else str(value)


def millions(value: float) -> str:
    return f"{value / 1e6:,.2f}M" if value >= 1e5 else f"{value:,.0f}"
