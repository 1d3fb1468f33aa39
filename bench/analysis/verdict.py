"""In plain words: what changed between runs, what it did, and what may be called the cause."""

from __future__ import annotations

import shlex
from typing import Any

from bench.analysis.arms import Arm, Row, factors, how, millions, unknown
from bench.analysis.learning import overfit
from bench.analysis.runs import contradicts, implied_parameters
from train import TrainConfig

# What no step takes longer for.
NO_SPEED = {"learning_rate", "max_iters", "weight_decay", "beta1", "beta2", "momentum", "decay_lr", "lr_schedule"}
NO_SPEED |= {"warmup_iters", "lr_decay_iters", "cooldown_iters", "min_lr", "zero_init"}


def verdict(arms: list[Arm], speeds: list[Row], losses: list[Row], reasons: list[str]) -> list[str]:
    """At most ten lines: what changed, speed, learning, what may be called a cause, the run that would settle it."""
    out: list[str] = []
    changed = factors(arms) if len(arms) > 1 else []
    missing = unknown(arms)
    row = {r.label: r for r in speeds}
    if len(arms) > 1:
        few = [how(parts, arms) for parts in changed[:5]]
        more = f" and {len(changed) - 5} more (table 1)" if len(changed) > 5 else ""
        count = f"{len(changed)} thing{'s' * (len(changed) != 1)} changed: {', '.join(few)}{more}."
        out.append(count if changed else "Nothing known changed.")
        if missing:
            of, names = " and ".join(missing), sorted({n for settings in missing.values() for n in settings})
            some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            out.append(
                f"Not known of {of}: {some}; give what a log does not say with --set {next(iter(missing))}.NAME=VALUE."
            )
        out += speed_lines(arms, row)
    for a in arms:
        if contradicts(a.runs[0]):
            stated, implied = a.runs[0].start["parameters"], implied_parameters(a.runs[0]) or 0.0
            out.append(
                f"{a.label}: {millions(stated)} parameters are stated, but its MFU, time and tokens mean "
                f"{millions(implied)} (without position embeddings): one of them is wrong."
            )
    if len(arms) == 1 and len(arms[0].runs) > 1:
        at_end = next((r.cells()[1] for r in losses if r.label == "val loss there"), "n/a")
        out.append(f"{arms[0].label} are repeats that differ in their seed alone: val loss {at_end} at the end.")
    winners = [r for r in losses if "equal" in r.label]
    if reasons:
        sizes = {a.runs[0].settings["block_size"] for a in arms if "block_size" in a.runs[0].settings}
        flags = f" --block_size={min(sizes)}" if len(sizes) > 1 else ""
        out.append(
            f"The losses are not ranked: {'; '.join(reasons)}. Where the models allow it, evaluate them alike: "
            f"python train.py --init_from=resume --eval_only=True{flags} --out_dir=..."
        )
    elif winners and len(arms) > 1:
        out += learning_lines(winners)
        if not all(r.start.get("val_sha256") for a in arms for r in a.runs):
            out.append("Whether all were evaluated on the same data, the logs do not say.")
        if all(len(a.runs) == 1 for a in arms):
            out.append("One run each: the noise of a loss is its evaluation's, without what another seed changes.")
    for a in arms:
        if up := overfit(a.runs[0]) if a.runs[0].val else None:
            out.append(
                f"{a.label} overfits: its val loss was lowest at step {up[0]:,} and has risen by {up[1]:.4f} since."
            )
    last: list[str] = []
    if len(arms) > 1:
        last = cause_lines(arms, changed, bool(missing), row.get("tokens/s"), winners)
    return out[: 10 - len(last)] + last


def speed_lines(arms: list[Arm], row: dict[str, Row]) -> list[str]:
    """What the speed's figures say of the arm with the fewest tokens per second beside the one with the most."""
    tokens, flops, rate = (row.get(k) for k in ("tokens/s", "MFLOPs per token", "TFLOP/s"))
    if tokens is None or None in tokens.values:
        return []
    if tokens.winner is None:
        return [f"Speed: {tokens.lead}; {' and '.join(tokens.text(v) for v in tokens.values)} tokens/s."]
    fast, slow = tokens.winner, min(range(len(arms)), key=lambda i: tokens.values[i])
    times = tokens.values[fast] / tokens.values[slow]
    noise = tokens.lead.partition("(")[2].rstrip(")")
    out = [
        f"{arms[fast].label} trains {times:.2f} x as many tokens per second as {arms[slow].label} "
        f"({tokens.text(tokens.values[fast])} and {tokens.text(tokens.values[slow])}; {noise})."
    ]
    if flops and rate and None not in (*flops.values, *rate.values):
        cost, done = flops.values[slow] / flops.values[fast], rate.values[slow] / rate.values[fast]
        if abs(cost - 1) > 0.01:
            why = "more work per second, and yet fewer tokens" if done > 1.01 else "that is why it is slower"
            why = why if done > 0.99 else "both slow it down" if cost > 1 else "slower although its tokens are cheaper"
            out.append(
                f"A token of {arms[slow].label} costs {cost:.3g} x the FLOPs of one of {arms[fast].label}, and "
                f"{arms[slow].label} does {done:.3g} x its FLOP/s: {why}."
            )
    return out


def learning_lines(rows: list[Row]) -> list[str]:
    """One line for each outcome, naming the budgets at which it holds."""
    by_lead: dict[str, list[Row]] = {}
    for r in rows:
        if r.lead:
            by_lead.setdefault(r.lead, []).append(r)
    out = []
    for lead, same in by_lead.items():
        where = ", ".join(r.label.removeprefix("val loss at equal ") for r in same)
        values = " and ".join("n/a" if v is None else f"{v:.4f}" for v in same[0].values)
        out.append(f"Val loss at equal {where}: {lead}; {values}.")
    return out


def cause_lines(
    arms: list[Arm], changed: list[list[str]], blind: bool, speed: Row | None, losses: list[Row]
) -> list[str]:
    """What may be called the cause: nothing where several things changed; then the run that would settle it."""
    if len(changed) == 1 and not blind:
        only, repeated = f"Only {how(changed[0], arms)} differs", all(len(a.runs) > 1 for a in arms)
        same_work = [r for r in losses if "equal steps" in r.label or "equal tokens" in r.label]
        effects = {"speed": [speed] if speed else [], "loss at equal steps or tokens": same_work}
        chance = {"speed": "unless the machine was another", "loss at equal steps or tokens": "unless the seed is"}
        out = []
        for effect, rows in effects.items():
            rests_on = next((r.lead for r in rows if r.winner is not None), "")
            if rests_on and effect == "speed" and set(changed[0]) <= NO_SPEED:
                out.append(f"{only}, which does not touch the speed ({rests_on}): the machine was another.")
            elif rests_on:
                doubt = "" if repeated else f", {chance[effect]}: one run each, so repeat both"
                out.append(f"{only}: it is the cause of the difference in {effect} ({rests_on}){doubt}.")
            elif any("not distinguishable" in r.lead for r in rows):
                out.append(f"{only}: no effect on {effect} shows beyond the noise.")
            elif any("not known" in r.lead for r in rows):
                out.append(f"{only}: an effect on {effect} is open, as the noise is not known; repeat both.")
        return out
    if not changed and not blind:
        return []
    reason = "not all settings are known" if blind else f"{len(changed)} things changed at once"
    known, values = TrainConfig.__dataclass_fields__, arms[1].values
    out = [f"No cause can be named: {reason}."]
    for parts in factors(arms[:2]) if not blind else ():
        flags = {"compile" if n == "compiled" else n: values[n] for n in parts}
        settings = following(arms[0].runs[0].settings, flags)
        if "device" not in flags and known.keys() >= flags.keys() and possible(settings):
            alone = f"{arms[0].label} with {how(parts, arms[:2])} alone"
            out.append(f"To settle it, change one at a time. {alone}: {command(settings)}")
            break
    return out


def possible(settings: dict[str, Any]) -> bool:
    """Whether train.py takes them."""
    try:
        TrainConfig(**{k: v for k, v in settings.items() if k in TrainConfig.__dataclass_fields__})
    except (ValueError, TypeError):
        return False
    return True


def following(settings: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """settings with these changed, and with them what was derived from them: the last learning rate, the schedule."""
    out = settings | changed
    if "learning_rate" in changed and out.get("min_lr") and out["min_lr"] * 10 == settings["learning_rate"]:
        out["min_lr"] = changed["learning_rate"] / 10
    if "max_iters" in changed and out.get("lr_decay_iters") == settings["max_iters"]:
        out["lr_decay_iters"] = changed["max_iters"]
    return out


def command(settings: dict[str, Any]) -> str:
    """train.py with these settings, as far as they are not the defaults."""
    given = []
    for name, f in TrainConfig.__dataclass_fields__.items():
        if name in settings and settings[name] != f.default and name not in ("out_dir", "init_from"):
            given.append(f"--{name}={settings[name]}")
    return shlex.join(["python", "train.py", *given])
