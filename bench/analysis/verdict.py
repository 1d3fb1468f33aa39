"""The verdict in plain words: what changed between runs, what that did, and what may be called the cause."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.analysis.arms import NOT_RANKED, Arm, Row, factors, how, millions, unknown
from bench.analysis.learning import Ranking, overfit
from bench.analysis.page import Figure, Headline
from bench.analysis.runs import Run, contradicts, implied_parameters
from train import TrainConfig

MOST_LINES = 10
# Settings that do not change how long a step takes.
NO_SPEED = {"learning_rate", "max_iters", "weight_decay", "beta1", "beta2", "momentum", "decay_lr", "lr_schedule"}
NO_SPEED |= {"warmup_iters", "lr_decay_iters", "cooldown_iters", "min_lr", "zero_init"}
SAME_WORK = ("steps", "tokens", "text")  # spent by the same training, however fast


@dataclass(frozen=True)
class Effect:
    """Something that a change may have affected: the rows that show it, and what else could be the cause there."""

    name: str
    rows: list[Row]
    other_cause: str


def verdict(arms: list[Arm], speeds: list[Row], losses: list[Row], ranked: Ranking) -> list[str]:
    """At most ten lines: what changed, speed, learning, what may be called a cause, the run that would settle it.

    speeds and losses are the rows of the tables.
    """
    several = len(arms) > 1
    changes = factors(arms) if several else []
    missing = unknown(arms)
    speed = {row.label: row for row in speeds}
    equal_spending = [row for row in losses if "equal" in row.label]

    lines: list[str] = []
    if several:
        lines += change_lines(arms, changes, missing)
        lines += speed_lines(arms, speed)
    lines += parameter_lines(arms)
    if not several and len(arms[0].runs) > 1:
        at_end = next((row.cells()[1] for row in losses if row.label == "val loss there"), "n/a")
        lines.append(f"{arms[0].label} are repeats that differ only in their seed: val loss {at_end} at the end.")
    if ranked.reasons:
        lines.append(not_ranked_line(arms, ranked.reasons))
    elif several and equal_spending:
        lines += learning_lines(equal_spending)
        lines += bits_lines(arms) if ranked.in_bits else []
        lines += doubt_lines(arms)
    lines += overfit_lines(arms)

    last = cause_lines(arms, changes, bool(missing), speed.get("tokens/s"), equal_spending) if several else []
    return lines[: MOST_LINES - len(last)] + last


# ---- the headline --------------------------------------------------------------------------------------------


def headline(arms: list[Arm], speeds: list[Row], losses: list[Row]) -> Headline:
    """Who leads in loss, in speed and in time to a loss; of a single arm, its loss, speed and MFU."""
    if len(arms) == 1:
        rows = (row_of(losses, "lowest val loss"), row_of(speeds, "tokens/s"), row_of(speeds, "MFU"))
        labels = ("lowest val loss", "tokens/s", "MFU")
        return Headline("", [single_figure(label, row) for label, row in zip(labels, rows, strict=True)])
    equal = [f"val loss at equal {axis}" for axis in ("tokens", "steps", "time", "FLOPs")]
    loss = row_of(losses, *equal)
    speed = row_of(speeds, "tokens/s")
    time = row_of(losses[::-1], "time to val loss")  # the lowest that all reached
    figures = [
        lead_figure("val loss", arms, loss, lambda best, second: f"lower by {second - best:.4f}", min),
        lead_figure("speed", arms, speed, lambda best, second: f"{best / second:.2f} ×", max),
        lead_figure("time to a loss", arms, time, lambda best, second: f"{second / best:.2f} × sooner", min),
    ]
    return Headline(headline_text(arms, loss, speed), figures)


def row_of(rows: list[Row], *starts: str) -> Row | None:
    """The first row whose label begins like this, and whose figure is known of every arm."""
    for start in starts:
        for row in rows:
            if row.label.startswith(start) and None not in row.values:
                return row
    return None


def single_figure(label: str, row: Row | None) -> Figure:
    if row is None:
        return Figure(label, "n/a")
    return Figure(label, row.cells()[1], row.label if row.label != label else "")


def lead_figure(
    label: str,
    arms: list[Arm],
    row: Row | None,
    how_far: Callable[[float, float], str],
    best_of: Callable[[list[float]], float],
) -> Figure:
    """Who leads in a row, and by how much; what the row is, and its noise."""
    if row is None:
        return Figure(label, "n/a", "not known of all")
    values = " and ".join(map(row.text, row.values)) if len(arms) < 4 else ""
    note = f"{row.label}: {values}" if values else row.label
    best = best_of(row.values)
    leader = row.values.index(best)
    if row.lead == NOT_RANKED or not row.lead.text:
        return Figure(label, "not ranked", note)
    if row.lead.winner is None and not row.lead.noise_unknown:
        return Figure(label, "no difference shows", note)
    second = best_of([value for i, value in enumerate(row.values) if i != leader])
    noise = "noise not known" if row.lead.noise_unknown else row.lead.noise
    return Figure(label, f"{arms[leader].label}: {how_far(best, second)}", f"{note}; {noise}" if noise else note)


def headline_text(arms: list[Arm], loss: Row | None, speed: Row | None) -> str:
    """Who learns more and who is faster, as far as the noise lets one say so."""
    learner = arms[loss.lead.winner].label if loss and loss.lead.winner is not None else None
    runner = arms[speed.lead.winner].label if speed and speed.lead.winner is not None else None
    at = loss.label.removeprefix("val loss at ").partition(" (")[0] if loss else ""
    if learner and learner == runner:
        return f"{learner} has the lower val loss at {at}, and is faster"
    if learner:
        faster = f"; {runner} is faster" if runner else ""
        return f"{learner} has the lower val loss at {at}{faster}"
    if runner:
        return f"{runner} is faster; the losses do not tell who learns more"
    return "Neither speed nor loss tells the runs apart"


# ---- what changed --------------------------------------------------------------------------------------------


def change_lines(arms: list[Arm], changes: list[list[str]], missing: dict[str, list[str]]) -> list[str]:
    """What changed, and which settings and facts are not known."""
    out = ["Nothing that is known changed."]
    if changes:
        named = [how(change, arms) for change in changes[:5]]
        more = f" and {len(changes) - 5} more (table 1)" if len(changes) > 5 else ""
        things = "1 thing" if len(changes) == 1 else f"{len(changes)} things"
        out = [f"{things} changed: {', '.join(named)}{more}."]
    if missing:
        names = sorted({name for of_arm in missing.values() for name in of_arm})
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        out.append(
            f"Not known of {' and '.join(missing)}: {', '.join(names[:3])}{more}; "
            f"give what a log does not say with --set {next(iter(missing))}.NAME=VALUE."
        )
    return out


def parameter_lines(arms: list[Arm]) -> list[str]:
    """Where the stated number of parameters contradicts MFU, time and tokens."""
    out = []
    for arm in arms:
        run = arm.runs[0]
        implied = implied_parameters(run)
        if implied and contradicts(run):
            out.append(
                f"{arm.label}: {millions(run.start['parameters'])} parameters are stated, but its MFU, time and tokens "
                f"imply {millions(implied)} (without position embeddings): one of the two is wrong."
            )
    return out


# ---- speed ---------------------------------------------------------------------------------------------------


def speed_lines(arms: list[Arm], speed: dict[str, Row]) -> list[str]:
    """What the figures say about the slowest arm, compared with the fastest."""
    tokens = speed.get("tokens/s")
    if tokens is None or None in tokens.values:
        return []
    fast = tokens.lead.winner
    if fast is None:
        return [f"Speed: {tokens.lead.text}; {' and '.join(tokens.text(v) for v in tokens.values)} tokens/s."]
    slow = min(range(len(arms)), key=lambda i: tokens.values[i])
    ratio = tokens.values[fast] / tokens.values[slow]
    out = [
        f"{arms[fast].label} trains {ratio:.2f} x as many tokens per second as {arms[slow].label} "
        f"({tokens.text(tokens.values[fast])} and {tokens.text(tokens.values[slow])}; {tokens.lead.noise})."
    ]
    flops = speed.get("MFLOPs per token")
    rate = speed.get("TFLOP/s")
    if flops is None or rate is None or None in flops.values or None in rate.values:
        return out
    cost = flops.values[slow] / flops.values[fast]
    done = rate.values[slow] / rate.values[fast]
    if abs(cost - 1) > 0.01:
        out.append(
            f"A token of {arms[slow].label} costs {cost:.3g} x the FLOPs of one of {arms[fast].label}, and "
            f"{arms[slow].label} does {done:.3g} x its FLOP/s: {why_slower(cost, done)}."
        )
    return out


def why_slower(cost: float, done: float) -> str:
    """Why an arm trains fewer tokens per second. cost: its FLOPs per token over the other's; done: its FLOP/s."""
    if done > 1.01:
        return "it does more work per second and still trains fewer tokens"
    if done > 0.99:
        return "that is why it is slower"
    if cost > 1:
        return "both make it slower"
    return "it is slower although its tokens are cheaper"


# ---- learning ------------------------------------------------------------------------------------------------


def not_ranked_line(arms: list[Arm], reasons: list[str]) -> str:
    """Why the losses are not ranked, and how to evaluate the models alike."""
    contexts = [arm.runs[0].settings.get("block_size") for arm in arms]
    known = {T for T in contexts if T is not None}
    shortest = f" --block_size={min(known)}" if len(known) > 1 else ""
    return (
        f"The losses are not ranked: {'; '.join(reasons)}. Where the models allow it, evaluate them alike: "
        f"python train.py --init_from=resume --eval_only=True{shortest} --out_dir=..."
    )


def learning_lines(rows: list[Row]) -> list[str]:
    """One line for each outcome, with everything that was equal where it held."""
    by_outcome: dict[str, list[Row]] = {}
    for row in rows:
        if row.lead.text:
            by_outcome.setdefault(row.lead.text, []).append(row)
    out = []
    for outcome, same in by_outcome.items():
        unit = same[0].label.partition(" at equal ")[0]
        where = ", ".join(row.label.partition(" at equal ")[2] for row in same)
        losses = " and ".join("n/a" if v is None else f"{v:.4f}" for v in same[0].values)
        out.append(f"{unit.capitalize()} at equal {where}: {outcome}; {losses}.")
    return out


def bits_lines(arms: list[Arm]) -> list[str]:
    """Why bits per byte are compared, and what differs where equal numbers of tokens are not equal text."""
    line = "The validation text is the same, its tokens are not: so the losses are compared in bits per byte."
    evaluated = unequal(arms, lambda run: run.start.get("val_bytes"))
    if evaluated:
        line += f" Evaluated were, in bytes spread over that text, {evaluated}."
    contexts = unequal(arms, context_bytes)
    if contexts:
        line += f" A longer context lowers them by itself: in bytes of text it is {contexts}."
    return [line]


def unequal(arms: list[Arm], figure: Callable[[Run], float | None]) -> str:
    """A figure of each arm, where it differs by more than a tenth; else empty."""
    values = [figure(arm.runs[0]) for arm in arms]
    known = [value for value in values if value]
    if len(known) < len(arms) or max(known) <= 1.1 * min(known):
        return ""
    return ", ".join(f"{arm.label} {value:,.0f}" for arm, value in zip(arms, known, strict=True))


def context_bytes(run: Run) -> float | None:
    """Bytes of text that a context holds; None where that is not known."""
    block_size = run.settings.get("block_size")
    bytes_per_token = run.start.get("bytes_per_token")
    return block_size * bytes_per_token if block_size and bytes_per_token else None


def doubt_lines(arms: list[Arm]) -> list[str]:
    """What the ranking of the losses leaves open."""
    out = []
    if not all(run.start.get("val_sha256") for arm in arms for run in arm.runs):
        out.append("The logs do not say whether all were evaluated on the same data.")
    if all(len(arm.runs) == 1 for arm in arms):
        out.append("One run each: the noise of a loss is that of its evaluation; another seed would add to it.")
    return out


def overfit_lines(arms: list[Arm]) -> list[str]:
    out = []
    for arm in arms:
        turned = overfit(arm.runs[0]) if arm.runs[0].val else None
        if turned:
            step, rise = turned
            out.append(
                f"{arm.label} overfits: its val loss was lowest at step {step:,} and has risen by {rise:.4f} since."
            )
    return out


# ---- the cause -----------------------------------------------------------------------------------------------


def cause_lines(
    arms: list[Arm], changes: list[list[str]], incomplete: bool, tokens: Row | None, losses: list[Row]
) -> list[str]:
    """What may be called the cause, or the run that would settle it where several things changed.

    incomplete: whether a setting is not known, so that nothing can be called the cause. tokens: the row of tokens/s.
    """
    if incomplete:
        return ["No cause can be named: not all settings are known."]
    if len(changes) == 1:
        same_work = [row for row in losses if row.label.partition(" at equal ")[2].startswith(SAME_WORK)]
        speed = Effect("speed", [tokens] if tokens else [], "the machines differed")
        in_text = any(" at equal text" in row.label for row in losses)
        same = f"loss at equal steps or {'text' if in_text else 'tokens'}"
        learned = Effect(same, same_work, "the seed explains it")
        lines = [only_cause_line(arms, changes[0], effect) for effect in (speed, learned)]
        return [line for line in lines if line]
    if len(changes) > 1:
        return [f"No cause can be named: {len(changes)} things changed at once.", *settling_lines(arms)]
    return []


def only_cause_line(arms: list[Arm], change: list[str], effect: Effect) -> str:
    """What the only change did to speed or loss; empty where the figures say nothing about it."""
    only = f"Only {how(change, arms)} differs"
    shown = next((row.lead.text for row in effect.rows if row.lead.winner is not None), "")
    if shown and effect.name == "speed" and set(change) <= NO_SPEED:
        return f"{only}, which cannot change the speed ({shown}): the machines differed."
    if shown:
        repeated = all(len(arm.runs) > 1 for arm in arms)
        doubt = "" if repeated else f", unless {effect.other_cause}: one run each, so repeat both"
        return f"{only}: it is the cause of the difference in {effect.name} ({shown}){doubt}."
    if any(row.lead.within_noise for row in effect.rows):
        return f"{only}: no effect on {effect.name} shows beyond the noise."
    if any(row.lead.noise_unknown for row in effect.rows):
        return f"{only}: an effect on {effect.name} is open, as the noise is not known; repeat both."
    return ""


def settling_lines(arms: list[Arm]) -> list[str]:
    """The command of a run that changes one thing alone, the first that can be changed by itself."""
    settings = arms[0].runs[0].settings
    for change in factors(arms[:2]):
        values = {"compile" if name == "compiled" else name: arms[1].values[name] for name in change}
        run = following(settings, values)
        if "device" not in values and TrainConfig.__dataclass_fields__.keys() >= values.keys() and is_possible(run):
            alone = f"{arms[0].label} with {how(change, arms[:2])} alone"
            return [f"To settle it, change one at a time. {alone}: {command(run)}"]
    return []


def is_possible(settings: dict[str, Any]) -> bool:
    """Whether train.py accepts these settings together."""
    known = {name: value for name, value in settings.items() if name in TrainConfig.__dataclass_fields__}
    try:
        TrainConfig(**known)
    except (ValueError, TypeError):
        return False
    return True


def following(settings: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """settings with some of them changed, and with those the last learning rate and the schedule's length."""
    out = settings | changed
    if "learning_rate" in changed and out.get("min_lr") and out["min_lr"] * 10 == settings["learning_rate"]:
        out["min_lr"] = changed["learning_rate"] / 10
    if "max_iters" in changed and out.get("lr_decay_iters") == settings["max_iters"]:
        out["lr_decay_iters"] = changed["max_iters"]
    return out


def command(settings: dict[str, Any]) -> str:
    """train.py's command line with those of these settings that are not the defaults."""
    given = []
    for name, f in TrainConfig.__dataclass_fields__.items():
        if name in settings and settings[name] != f.default and name not in ("out_dir", "init_from"):
            given.append(f"--{name}={settings[name]}")
    return shlex.join(["python", "train.py", *given])
