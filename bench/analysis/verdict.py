"""The headline: who leads. The verdict: what may be called the cause, or the question that would settle it."""

from __future__ import annotations

import math
import re
import shlex
from typing import Any

from bench.analysis.arms import Arm, Row, factors, how, unknown
from bench.analysis.learning import Ranking
from train import TrainConfig

# Settings that do not change how long a step takes.
NO_SPEED = {"learning_rate", "max_iters", "weight_decay", "beta1", "beta2", "momentum", "decay_lr", "lr_schedule"}
NO_SPEED |= {"warmup_iters", "lr_decay_iters", "cooldown_iters", "min_lr", "zero_init"}
NOT_ASKED = ("out_dir", "init_from", "seed")  # bench/ask.py sets them for each run
ASKED_AT_ONCE = "bcd"
SAME_WORK = re.compile(r" at equal (steps|tokens|text) ")  # spent by the same training, however fast


def verdict(arms: list[Arm], speeds: list[Row], losses: list[Row], ranked: Ranking) -> list[str]:
    """What may be called the cause, and the question that would settle it; before it, why losses are not ranked.

    Empty for a single arm. speeds and losses are the rows of the tables, which have the rest.
    """
    if len(arms) == 1:
        return []
    not_ranked = [not_ranked_line(ranked.reasons)] if ranked.reasons else []
    caveat = [ranked.caveat] if ranked.caveat else []
    return [*not_ranked, *caveat, *cause_lines(arms, speeds, losses)]


# ---- the headline --------------------------------------------------------------------------------------------


def headline(arms: list[Arm], speeds: list[Row], losses: list[Row], ranked: Ranking) -> str:
    """Who learns more and who is faster, as far as the noise lets one say so; of repeats what they are.

    Empty for a single run.
    """
    if len(arms) == 1 and len(arms[0].runs) == 1:
        return ""
    if len(arms) == 1:
        found = (row_of(losses, "lowest val loss"), row_of(speeds, "tokens/s"))
        figures = [f"; {row.label} {row.cells()[1]}" for row in found if row]
        return f"{arms[0].label} are {arms[0].name}{''.join(figures)}"
    # Losses are in bits per byte where only these compare.
    loss = row_of(losses, r"(val loss|bits per byte) at equal (tokens|text)", r".* at equal")
    speed = row_of(speeds, "tokens/s")
    learner = arms[loss.lead.winner].label if loss and loss.lead.winner is not None else ""
    runner = arms[speed.lead.winner].label if speed and speed.lead.winner is not None else ""
    loss_at = loss.label.partition(" (")[0] if loss else ""
    loss_at += " (in other contexts, see below)" if ranked.caveat else ""
    if learner and learner == runner:
        return f"{learner} has the lower {loss_at}, and is faster"
    if learner:
        return f"{learner} has the lower {loss_at}" + (f"; {runner} is faster" if runner else "")
    if runner:
        return f"{runner} is faster; the losses do not tell who learns more"
    return "Neither speed nor loss tells the runs apart"


def row_of(rows: list[Row], *labels: str) -> Row | None:
    """The first row whose label begins like this, and whose figure is known of every arm."""
    for label in labels:
        for row in rows:
            if re.match(label, row.label) and None not in row.values:
                return row
    return None


def not_ranked_line(reasons: list[str]) -> str:
    """Why the losses are not ranked, and how to evaluate the models alike."""
    return (
        f"The losses are not ranked: {'; '.join(reasons)}. Where the models allow it, evaluate them alike: "
        "python train.py --init_from=resume --eval_only=True --dataset=... --out_dir=..."
    )


# ---- the cause -----------------------------------------------------------------------------------------------


def cause_lines(arms: list[Arm], speeds: list[Row], losses: list[Row]) -> list[str]:
    """What may be called the cause; where that is open, the question that would settle it."""
    missing = unknown(arms)
    if missing:
        return [
            f"No cause can be named: settings of {' and '.join(missing)} are not known; "
            f"give them with --set {next(iter(missing))}.NAME=VALUE."
        ]
    changes = factors(arms)
    if not changes:
        return ["Nothing that is known changed."]
    if len(changes) > 1:
        named = ", ".join(how(change, arms) for change in changes[:5]) + (", ..." if len(changes) > 5 else "")
        return [f"No cause can be named: {len(changes)} things changed at once ({named}).", *settling_lines(arms)]

    same_work = [row for row in losses if SAME_WORK.search(row.label)]
    on_speed = effect_line(arms, changes[0], "speed", [row for row in speeds if row.label == "tokens/s"])
    on_loss = effect_line(arms, changes[0], "loss after the same training", same_work)
    lines = [line for line in (on_speed, on_loss) if line]
    is_repeated = all(len(arm.runs) > 1 for arm in arms)
    return lines if is_repeated else [*lines, *settling_lines(arms)]


def effect_line(arms: list[Arm], change: list[str], name: str, rows: list[Row]) -> str:
    """What the only change did to speed or loss, which these rows show; empty where they say nothing about it."""
    only = f"Only {how(change, arms)} differs"
    shown = next((row.lead.text for row in rows if row.lead.winner is not None), "")
    if shown and name == "speed" and set(change) <= NO_SPEED:
        return f"{only}, which cannot change the speed ({shown}): the machines differed."
    if shown:
        other = "the machines differed" if name == "speed" else "the seed explains it"
        is_repeated = all(len(arm.runs) > 1 for arm in arms)
        doubt = "" if is_repeated else f", unless {other}: not every run has a repeat"
        return f"{only}: it is the cause of the difference in {name} ({shown}){doubt}."
    if any(row.lead.within_noise for row in rows):
        return f"{only}: no effect on {name} shows beyond the noise."
    if any(row.lead.noise_unknown for row in rows):
        return f"{only}: an effect on {name} is open, as the noise is not known; repeat both."
    return ""


def settling_lines(arms: list[Arm]) -> list[str]:
    """The question that asks each change alone and with the others, as bench/ask.py takes it; up to three of them."""
    changes = factors(arms[:2])
    settings = without_followers(arms[0].runs[0].settings, changes)
    alone = []
    for change in changes:
        values = {"compile" if name == "compiled" else name: arms[1].values[name] for name in change}
        if {"device", "max_iters"} & values.keys() or not TrainConfig.__dataclass_fields__.keys() >= values.keys():
            continue
        try:
            TrainConfig(**settings | values)
        except (ValueError, TypeError):  # not possible together
            continue
        alone.append(" ".join(f"--{name}={value}" for name, value in values.items()))
    if not alone:
        return []
    words = ["python", "bench/ask.py", *given(settings)]
    for letter, text in zip(ASKED_AT_ONCE, alone, strict=False):
        words += [f"--{letter}", text]
    if len(alone) > 1:
        words.append("--together")
    return [f"To settle it: {shlex.join(words)}"]


def without_followers(settings: dict[str, Any], changes: list[list[str]]) -> dict[str, Any]:
    """train.py's settings among these, without values that follow from a setting that changes."""
    out = {name: value for name, value in settings.items() if name in TrainConfig.__dataclass_fields__}
    changed = {name for change in changes for name in change}
    min_lr = out.get("min_lr")
    if "learning_rate" in changed and min_lr and math.isclose(min_lr * 10, settings["learning_rate"]):
        del out["min_lr"]
    if out.get("lr_decay_iters") == out.get("max_iters"):
        del out["lr_decay_iters"]
    return out


def given(settings: dict[str, Any]) -> list[str]:
    """The words of a command line with those of these settings that are not the defaults."""
    return [
        f"--{name}={settings[name]}"
        for name, f in TrainConfig.__dataclass_fields__.items()
        if name in settings and settings[name] != f.default and name not in NOT_ASKED
    ]
