"""The headline: who leads. The verdict: what may be called the cause, or the runs that would settle it.

A line that begins with COMMAND is a command to copy.
"""

from __future__ import annotations

import shlex

from bench.analysis.logs import DEFAULTS
from bench.analysis.table import SILENT, Arm, Lead, Row, factors, short

COMMAND = "$ "
# A cause can be named only where all of these are known. They follow from others: what ran, or the default.
FOLLOW = {"backend", "compile", "min_lr", "lr_decay_iters"}
NEEDED = {*DEFAULTS, "compiled"} - SILENT - FOLLOW
# Settings that do not change how long a step takes.
NO_SPEED = {"learning_rate", "max_iters", "weight_decay", "beta1", "beta2", "momentum", "decay_lr", "lr_schedule"}
NO_SPEED |= {"warmup_iters", "lr_decay_iters", "cooldown_iters", "min_lr", "zero_init"}
EVALUATE = f"{COMMAND}python train.py --init_from=resume --eval_only=True --eval_tokens=... --dataset=... --out_dir=..."


def headline(arms: list[Arm], speed: Lead, loss: Row | None, reasons: list[str]) -> str:
    """Who learns more and who is faster, as far as the noise allows to tell. speed, loss: as `verdict` takes them."""
    if len(arms) == 1:
        return f"{arms[0].label} are {arms[0].name}" if len(arms[0].runs) > 1 else ""
    if reasons:
        learned = f"The losses are not comparable: {reasons[0]}."
    elif loss is None or not loss.lead.text:
        learned = "The losses at equal training are not known."
    elif loss.lead.is_same:
        learned = "The losses are the same."
    elif loss.lead.winner is not None:
        learned = f"{arms[loss.lead.winner].label} has the lower {loss.label.partition(' (')[0]}."
    elif loss.lead.is_open:
        learned = "Which run learns more is not known: two seeds of each settle it."
    else:
        learned = "The losses do not differ by more than the noise of the seeds."
    if not speed.text:
        return learned
    if speed.winner is None:
        return f"{learned} The speeds do not differ by more than the noise."
    return f"{learned} {arms[speed.winner].label} is faster."


def verdict(arms: list[Arm], speed: Lead, loss: Row | None, reasons: list[str]) -> list[str]:
    """Why losses are not comparable, what may be called the cause, and the runs that would settle what is open.

    speed: who leads in tokens/s; loss: the row of val losses after equal training, None where there is none. Empty for
    a single arm.
    """
    if len(arms) == 1:
        return []
    lines = []
    if reasons:
        lines = [f"To compare losses, evaluate the models alike: {'; '.join(reasons)}.", EVALUATE]
    missing = [(arm.label.partition("+")[0], sorted(NEEDED - arm.causes.keys())) for arm in arms]
    missing = [(letter, names) for letter, names in missing if names]
    changes = factors(arms)
    if missing:
        known = [f"{len(names)} settings of {x} ({', '.join(names[:3])}, ...)" for x, names in missing]
        example = f"--set {missing[0][0]}.{missing[0][1][0]}=..."
        return [*lines, f"No cause can be named: {' and '.join(known)} are not known. Give them with {example}"]
    if not changes:
        return [*lines, "Nothing that is known changed."]
    if len(changes) > 1:
        named = ", ".join(how(change, arms) for change in changes[:5]) + (", ..." if len(changes) > 5 else "")
        return [*lines, f"No cause can be named: {len(changes)} things changed at once ({named}).", *settling(arms)]
    only = f"Only {how(changes[0], arms)} differs"
    repeated = all(len(arm.runs) > 1 for arm in arms)
    speed_changes = not {*changes[0]} <= NO_SPEED
    lines += effect(f"{only}: ", "speed", speed, repeated and speed_changes)
    if speed.winner is not None and not speed_changes:
        lines.append("That cannot change the speed: the machines differed.")
    lines += effect(f"{only}: ", "loss", loss.lead if loss and not reasons else Lead(), repeated)
    open_loss = loss is not None and not loss.lead.is_same
    return lines if repeated or not open_loss else [*lines, *settling(arms)]


def effect(only: str, name: str, lead: Lead, repeated: bool) -> list[str]:
    """What the only change did to speed or loss. It is called the cause only where every arm has repeats."""
    if not lead.text or lead.text == "not comparable":
        return []
    if lead.is_same:
        return [f"{only}{lead.text}."]
    if lead.winner is not None and repeated:
        return [f"{only}it is the cause of the difference in {name} ({lead.text})."]
    if lead.winner is not None:
        return [f"{only}it may be the cause of the difference in {name} ({lead.text}). Two seeds of each settle it."]
    if lead.is_open:
        return [f"{only}whether it changes the {name} is not known ({lead.text}). Two seeds of each settle it."]
    return [f"{only}no effect on the {name} shows beyond the noise ({lead.text})."]


def how(change: list[str], arms: list[Arm]) -> str:
    """A change in words: between two arms, from which value to which."""
    if len(arms) != 2:
        return " with ".join(change)
    old, new = (arm.causes for arm in arms)
    return " with ".join(f"{name} {short(old.get(name))} -> {short(new.get(name))}" for name in change)


def settling(arms: list[Arm]) -> list[str]:
    """The command of bench/ask.py that asks about the changes, three at most, each alone and all together."""
    changes = factors(arms[:2])
    settings = {k: v for k, v in arms[0].runs[0].settings.items() if k in DEFAULTS}
    for name in FOLLOW - arms[0].causes.keys():
        settings.pop(name, None)
    alone = []
    for change in changes:
        values = {"compile" if name == "compiled" else name: arms[1].causes[name] for name in change}
        if values.keys() <= DEFAULTS.keys() - {"device", "max_iters"}:
            alone.append(" ".join(f"--{name}={value}" for name, value in values.items()))
    if not alone:
        return []
    words = ["python", "bench/ask.py"]
    for name, default in DEFAULTS.items():
        if name in settings and settings[name] != default and name not in ("out_dir", "init_from", "seed"):
            words.append(f"--{name}={settings[name]}")
    for letter, text in zip("bcd", alone, strict=False):
        words += [f"--{letter}", text]
    words += ["--together"] * (len(alone) > 1)
    return ["To settle it:", COMMAND + shlex.join(words)]
