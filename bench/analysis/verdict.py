"""The headline: who leads. The verdict: what may be called the cause, or the run that would settle it."""

from __future__ import annotations

import re
import shlex
from typing import Any

from bench.analysis.arms import Arm, Row, factors, how, unknown
from bench.analysis.learning import Ranking
from train import TrainConfig

# Settings that do not change how long a step takes.
NO_SPEED = {"learning_rate", "max_iters", "weight_decay", "beta1", "beta2", "momentum", "decay_lr", "lr_schedule"}
NO_SPEED |= {"warmup_iters", "lr_decay_iters", "cooldown_iters", "min_lr", "zero_init"}
SAME_WORK = re.compile(r" at equal (steps|tokens|text) ")  # spent by the same training, however fast


def verdict(arms: list[Arm], speeds: list[Row], losses: list[Row], ranked: Ranking) -> list[str]:
    """What may be called the cause, or the run that would settle it; before it, why losses are not ranked, or a caveat.

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
    """What may be called the cause; where several things changed, the run that would settle it."""
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
    return [line for line in (on_speed, on_loss) if line]


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
    """The command of a run that changes one thing alone, the first that can be changed by itself."""
    for change in factors(arms[:2]):
        values = {"compile" if name == "compiled" else name: arms[1].values[name] for name in change}
        if "device" in values or not TrainConfig.__dataclass_fields__.keys() >= values.keys():
            continue
        settings = following(arms[0].runs[0].settings, values)
        try:
            TrainConfig(**settings)
        except (ValueError, TypeError):  # not possible together
            continue
        alone = f"{arms[0].label} with {how(change, arms[:2])} alone"
        return [f"To settle it, change one at a time. {alone}: {command(settings)}"]
    return []


def following(settings: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """train.py's settings among these, some of them changed; what followed from the old values follows the new ones."""
    out = {name: value for name, value in settings.items() if name in TrainConfig.__dataclass_fields__} | changed
    min_lr = out.get("min_lr")
    if "learning_rate" in changed and min_lr and min_lr * 10 == settings["learning_rate"]:
        del out["min_lr"]
    if "max_iters" in changed and out.get("lr_decay_iters") == settings["max_iters"]:
        del out["lr_decay_iters"]
    return out


def command(settings: dict[str, Any]) -> str:
    """train.py's command line with those of these settings that are not the defaults."""
    given = []
    for name, f in TrainConfig.__dataclass_fields__.items():
        if name in settings and settings[name] != f.default and name not in ("out_dir", "init_from"):
            given.append(f"--{name}={settings[name]}")
    return shlex.join(["python", "train.py", *given])
