"""Runs under comparison: which are repeats of one another, and in what the others differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.analysis.noise import interval
from bench.analysis.runs import Run
from train import TrainConfig

# Settings that neither the training nor its speed depend on.
SILENT = {"out_dir", "eval_interval", "eval_iters", "eval_tokens", "eval_only", "dry_run", "log_interval", "auto_batch"}
SILENT |= {"always_save_checkpoint", "wandb_log", "wandb_project", "wandb_run_name", "seed", "dataset", "init_from"}
FACTS = ("device", "world_size", "dtype", "compiled", "compiler", "versions", "git_commit")
NEEDED = {*TrainConfig.__dataclass_fields__} - SILENT - {"backend", "device", "compile", "min_lr", "lr_decay_iters"}


@dataclass
class Arm:
    """Runs of the same settings: one, or several seeds."""

    label: str
    runs: list[Run]
    values: dict[str, Any] = field(default_factory=dict)  # settings and facts that may be a cause


@dataclass
class Row:
    """A figure of each arm, None where it is not known, and who leads in it."""

    label: str
    values: list[Any]
    text: Callable[[Any], str]
    lead: str = ""
    winner: int | None = None  # the arm that leads beyond the noise
    half: list[float | None] | None = None  # of the 95% interval over each arm's runs, where it has several

    def cells(self) -> list[str]:
        shown = ["n/a" if v is None else self.text(v) for v in self.values]
        for i, half in enumerate(self.half or []):
            shown[i] += "" if half is None else f" ± {self.text(half)}"
        return [self.label, *shown, self.lead]


def over_runs(label: str, arms: list[Arm], figure: Callable[[Run], Any], text: Callable[[Any], str]) -> Row:
    """The mean of a figure over each arm's runs, with its interval; None where a run does not have it."""
    found = [[figure(r) for r in a.runs] for a in arms]
    both = [(None, None) if None in values else interval(values) for values in found]
    halves = [half for _, half in both]
    return Row(label, [mean for mean, _ in both], text, half=halves if any(halves) else None)


def arms_of(runs: list[Run]) -> list[Arm]:
    """Runs by what they did; those that differ only in their seed are one arm."""
    arms: list[Arm] = []
    for letter, run in zip(letters(len(runs)), runs, strict=True):
        values, seed = causes(run), run.settings.get("seed")
        for arm in arms:
            seeds = [r.settings.get("seed") for r in arm.runs]
            if arm.values == values and seed is not None and None not in seeds and seed not in seeds:
                arm.runs.append(run)
                arm.label += f"+{letter}"
                break
        else:
            arms.append(Arm(letter, [run], values))
    return arms


def letters(n: int) -> list[str]:
    return [chr(ord("A") + i) if i < 26 else f"A{i}" for i in range(n)]


def causes(run: Run) -> dict[str, Any]:
    """What the run's training and speed may depend on; values that follow from others are left out."""
    known = {k: v for k, v in run.settings.items() if k not in SILENT and (k, v) != ("dtype", "auto")}
    if run.start.get("gpu"):
        known["device"] = run.start["gpu"]
    known |= {k: run.start[k] for k in FACTS if run.start.get(k) is not None}
    if run.settings.get("init_from") not in (None, "scratch", "resume"):
        known["init_from"] = run.settings["init_from"]
    if known.get("device") == "auto":
        del known["device"]
    if "compiled" in known or known.get("compile") == "auto":
        known.pop("compile", None)
    elif "compile" in known:
        known["compiled"] = known.pop("compile")
    if known.get("min_lr") is None or math.isclose(known["min_lr"] * 10, known.get("learning_rate", math.nan)):
        known.pop("min_lr", None)
    if known.get("lr_decay_iters") in (0, known.get("max_iters")):
        known.pop("lr_decay_iters", None)
    known |= {k: run.start.get(k) for k in ("train_tokens", "val_sha256")}
    return {k: v for k, v in known.items() if v is not None}


def differing(dicts: list[dict[str, Any]]) -> list[str]:
    """Keys whose values differ, or that some lack."""
    names = list(dict.fromkeys(k for d in dicts for k in d))
    return [k for k in names if any(d.get(k) != dicts[0].get(k) for d in dicts)]


def factors(arms: list[Arm]) -> list[list[str]]:
    """What changed, as the settings it consists of: some change together, and are one."""
    names = [n for n in differing([a.values for a in arms]) if all(n in a.values for a in arms)]
    out: list[list[str]] = []

    def all_equal(f: Callable[[dict[str, Any]], Any]) -> bool:
        try:
            return len({f(a.values) for a in arms}) == 1
        except (KeyError, TypeError, ZeroDivisionError):
            return False

    split = ["batch_size", "gradient_accumulation_steps"]
    if set(split) <= set(names) and all_equal(lambda v: v[split[0]] * v[split[1]]):
        out.append(split)
    width = ["n_embd", "n_head"]
    if set(width) <= set(names) and all_equal(lambda v: v[width[0]] / v[width[1]]):
        out.append(width)
    return out + [[n] for n in names if not any(n in parts for parts in out)]


def how(parts: list[str], arms: list[Arm]) -> str:
    """What changed, and between two arms from what to what."""
    if len(arms) != 2:
        return " with ".join(parts)
    old, new = (a.values for a in arms)
    return " with ".join(f"{p} {short(old.get(p))} -> {short(new.get(p))}" for p in parts)


def short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items() if k != "platform")
    return f"{value:g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def changes(arms: list[Arm], runs: list[Run]) -> list[Row]:
    """Every setting and fact that differs, and the tokens of a step."""
    first = [a.runs[0] for a in arms]
    settings = [r.settings for r in first]
    names = [n for n in differing(settings) if n not in ("out_dir", "seed")]
    facts = [{k: r.start.get(k) for k in FACTS} for r in first]
    rows = [Row(n, [s.get(n) for s in settings], short) for n in names]
    rows += [Row(n + " in use" * (n in names), [f[n] for f in facts], short) for n in differing(facts)]
    rows = [r for r in rows if len({short(v) for v in r.values if v is not None}) > 1]
    tokens = [r.tokens_per_step for r in first]
    rows.append(Row("tokens per step", tokens, short, "" if None in tokens or len(arms) < 2 else equal(tokens)))
    return rows


def unknown(arms: list[Arm]) -> dict[str, list[str]]:
    """What may be a cause and is not known of an arm, by the arm's first letter."""
    out = {a.label.partition("+")[0]: sorted((NEEDED | {"device", "compiled"}) - a.values.keys()) for a in arms}
    return {label: names for label, names in out.items() if names}


def equal(values: list[Any]) -> str:
    return "equal" if len(set(values)) == 1 else "not equal"


def millions(v: float) -> str:
    return f"{v / 1e6:,.2f}M" if v >= 1e5 else f"{v:,.0f}"
