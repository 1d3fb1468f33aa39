"""What runs learned: losses where as much was spent, what was spent until a loss, and how sure a difference is."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.arms import Arm, Row, letters
from bench.noise import difference, t975
from bench.runs import Run
from runlog import clock

Point = tuple[float, float | None]  # a loss and its standard error, None where that is not known
AXES: dict[str, Callable[[Run, dict[str, Any]], float | None]] = {
    "steps": lambda run, e: e["iter"],
    "tokens": lambda run, e: e["tokens"],
    "training time": lambda run, e: e["train_s"],
    "FLOPs": lambda run, e: e["tokens"] * run.flops_per_token if e["tokens"] and run.flops_per_token else None,
}
AMOUNT: dict[str, Callable[[float], str]] = {
    "steps": lambda v: f"{v:,.0f}",
    "tokens": lambda v: f"{v:.4g}" if v >= 1e6 else f"{v:,.0f}",
    "training time": clock,
    "FLOPs": lambda v: f"{v:.3g}",
}


def curve(run: Run, axis: str) -> list[tuple[float, float]]:
    """(amount, val loss) of the evaluations behind the first step."""
    points = [(AXES[axis](run, e), e["val_loss"]) for e in run.val]
    return [(x, y) for x, y in points if x]


def at(run: Run, axis: str, x: float) -> Point | None:
    """(val loss, its standard error) where so much was spent: between two evaluations linear in log x."""
    points = curve(run, axis)
    for (x0, y0), (x1, y1) in zip([points[0], *points], points, strict=False) if points else []:
        if x0 <= x * (1 + 1e-9) and x <= x1 * (1 + 1e-9):
            share = 0.0 if x1 == x0 else min(1.0, math.log(x / x0) / math.log(x1 / x0))
            return y0 + share * (y1 - y0), standard_error(run)
    return None


def spent_until(run: Run, axis: str, loss: float) -> float | None:
    """How much it took until the val loss was first that low, linear in the loss between two evaluations.

    None where it never was, or where the first evaluation behind the start was lower already.
    """
    points = curve(run, axis)
    for (x0, y0), (x1, y1) in pairwise(points):
        if y1 <= loss < y0:
            return x0 * (x1 / x0) ** ((y0 - loss) / (y0 - y1))
    return None


def standard_error(run: Run) -> float | None:
    """Of an evaluation late in the run: as logged, else from the scatter of the evaluations around their curve."""
    logged = [e["val_se"] for e in run.val if e["val_se"] is not None]
    return logged[-1] if logged else run.scatter()


def margin(a: list[Point], b: list[Point]) -> float | None:
    """Half the 95% interval of the difference of two arms' mean losses; None where nothing tells the noise.

    From seeds where there are several of both (Welch) or of one, whose spread then stands for the other's too; of
    single runs only that of the evaluation is known.
    """
    va, vb = [v for v, _ in a], [v for v, _ in b]
    if len(a) > 1 and len(b) > 1:
        return difference(va, vb)[1]
    if len(a) > 1 or len(b) > 1:
        many = va if len(a) > 1 else vb
        return t975(len(many) - 1) * statistics.stdev(many) * math.sqrt(1 / len(a) + 1 / len(b))
    errors = [se for _, se in a + b]
    return None if None in errors else 1.96 * math.hypot(*(e for e in errors if e is not None))


def leader(arms: list[Arm], points: list[list[Point]]) -> tuple[str, int | None]:
    """(who has the lowest mean loss and how sure that is, the arm's number where it leads beyond the noise)."""
    means = [statistics.fmean(v for v, _ in p) for p in points]
    best = min(range(len(arms)), key=lambda i: means[i])
    open_, unsure = [], False
    others = [i for i in range(len(arms)) if i != best]
    halves = {i: margin(points[best], points[i]) for i in others}
    for i in others:
        half = halves[i]
        unsure = unsure or half is None
        if half is not None and means[i] - means[best] <= half:
            open_.append(i)
    next_ = min(others, key=lambda i: means[i])
    gap, half = means[next_] - means[best], halves[next_]
    noise = "noise not known" if half is None else f"noise ±{half:.4f}"
    if open_:
        names = " and ".join(arms[i].label for i in sorted([best, *open_]))
        return f"{names}: not distinguishable ({gap:.4f} apart, {noise})", None
    return f"{arms[best].label} by {gap:.4f} ({noise})", None if unsure else best


def not_comparable(runs: list[Run]) -> list[str]:
    """Why the losses cannot be ranked."""
    out = []
    facts: dict[str, Callable[[Run], Any]] = {
        "validation data": lambda r: r.start.get("val_sha256") or r.start.get("val_tokens"),
        "validation data sets": lambda r: Path(r.settings["dataset"]).name if r.settings.get("dataset") else None,
        "tokenizers": lambda r: r.start.get("tokenizer"),
        "vocabularies": lambda r: r.start.get("model_args", {}).get("vocab_size"),
        "context lengths": lambda r: r.settings.get("block_size"),
    }
    for what, f in facts.items():
        values = [f(r) for r in runs]
        known = {v for v in values if v is not None}
        same_files = what == "validation data sets" and len({r.start.get("val_sha256") for r in runs} - {None}) == 1
        if len(known) > 1 and not (same_files and all(r.start.get("val_sha256") for r in runs)):
            said = ", ".join(f"{x} {v}" for x, v in zip(letters(len(runs)), values, strict=True))
            out.append(f"different {what} ({said})")
    return out


def learning(arms: list[Arm], levels: list[float], reasons: list[str]) -> list[Row]:
    """Losses where as much was spent, and what was spent until a loss; ranked unless there are reasons not to."""
    runs = [r for a in arms for r in a.runs]
    if not all(r.val for r in runs):
        return []

    def mean(f: Callable[[Run], Any]) -> list[Any]:
        found = [[f(r) for r in a.runs] for a in arms]
        return [None if None in values else statistics.fmean(values) for values in found]

    def loss(v: float) -> str:
        return f"{v:.4f}"

    best = {id(r): min(r.val, key=lambda e: e["val_loss"]) for r in runs}
    last = mean(lambda r: r.val[-1]["val_loss"])
    errors = mean(standard_error)
    rows = [Row("last step evaluated", mean(lambda r: r.val[-1]["iter"]), AMOUNT["steps"])]
    rows += [Row("val loss there", last, loss), Row("standard error of an evaluation", errors, loss)]
    if any(len(a.runs) > 1 for a in arms):
        spreads = [statistics.stdev(r.val[-1]["val_loss"] for r in a.runs) if len(a.runs) > 1 else None for a in arms]
        rows.append(Row("standard deviation over seeds", spreads, loss))
    lowest = mean(lambda r: best[id(r)]["val_loss"])
    rows += [Row("lowest val loss", lowest, loss), Row("at step", mean(lambda r: best[id(r)]["iter"]), AMOUNT["steps"])]
    rows.append(Row("perplexity there", [math.exp(v) for v in lowest], lambda v: f"{v:.2f}"))
    bits = [bits_per_byte(v, a.runs[0]) for v, a in zip(lowest, arms, strict=True)]
    rows.append(Row("bits per byte there", bits, loss))
    gap = mean(lambda r: r.val[-1]["val_loss"] - r.val[-1]["train_loss"] if r.val[-1]["train_loss"] else None)
    rows.append(Row("val - train loss at the end", gap, loss))
    turned = [overfit(a.runs[0]) for a in arms]
    rows.append(Row("val turned up after step", turned, lambda v: f"{v[0]:,}, by {v[1]:.4f} since"))
    for axis in AXES:
        ends = [max((x for x, _ in curve(r, axis)), default=None) for r in runs]
        if len(arms) < 2 or None in ends:
            continue
        x = min(e for e in ends if e is not None)
        points = [[at(r, axis, x) for r in a.runs] for a in arms]
        found = [[p for p in arm if p] for arm in points]
        values = [
            statistics.fmean(v for v, _ in f) if len(f) == len(p) else None for f, p in zip(found, points, strict=True)
        ]
        lead, winner = ("", None) if None in values else leader(arms, found)
        lead, winner = ("not ranked", None) if reasons else (lead, winner)
        rows.append(Row(f"val loss at equal {axis} ({AMOUNT[axis](x)})", values, loss, lead, winner))
    for level in levels or sensible_levels(lowest):
        for axis in ("tokens", "training time"):
            needed = mean(functools.partial(spent_until, axis=axis, loss=level))
            rows.append(Row(f"{axis} to val loss {level:g}", needed, AMOUNT[axis]))
    return [r for r in rows if any(v is not None for v in r.values)]


def sensible_levels(lowest: list[float]) -> list[float]:
    """A loss that all arms reached, rounded up, and one a tenth above it."""
    reached = math.ceil(max(lowest) * 100) / 100
    return [round(reached + 0.1, 2), reached]


def bits_per_byte(loss: float, run: Run) -> float | None:
    """Nats per token as bits per byte of text; None where the bytes of a token are not known."""
    per_token = run.start.get("bytes_per_token") or (1.0 if run.start.get("tokenizer") == "bytes" else None)
    return loss / math.log(2) / per_token if per_token else None


def overfit(run: Run) -> tuple[int, float] | None:
    """(step of the lowest val loss, how much higher the last one is), where it rose while the train loss fell.

    By more than four standard errors: the lowest of many evaluations is low by chance as well.
    """
    low, last = min(run.val, key=lambda e: e["val_loss"]), run.val[-1]
    rise = last["val_loss"] - low["val_loss"]
    fell = None in (last["train_loss"], low["train_loss"]) or last["train_loss"] < low["train_loss"]
    return (low["iter"], rise) if fell and rise > max(4 * (standard_error(run) or 0.0), 0.01) else None
