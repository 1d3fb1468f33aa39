"""What runs learned: losses where as much was spent, what was spent until a loss, and how sure a difference is."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.analysis.arms import Arm, Row, letters, over_runs
from bench.analysis.noise import difference, t975
from bench.analysis.runs import Run
from deskgpt.runlog import clock

Point = tuple[float, float | None]  # a loss and half its 95% interval, None where that is not known
AXES: dict[str, Callable[[Run, dict[str, Any]], float | None]] = {
    "steps": lambda run, e: e["iter"],
    "tokens": lambda run, e: e["tokens"],
    "time": lambda run, e: e["train_s"] + (run.start.get("warm_up_s") or 0.0) if e["train_s"] else None,
    "FLOPs": lambda run, e: e["tokens"] * run.flops_per_token if e["tokens"] and run.flops_per_token else None,
}
AMOUNT: dict[str, Callable[[float], str]] = {
    "steps": lambda v: f"{v:,.0f}",
    "tokens": lambda v: f"{v:.4g}" if v >= 1e6 else f"{v:,.0f}",
    "time": clock,
    "FLOPs": lambda v: f"{v:.3g}",
}


def curve(run: Run, axis: str) -> list[tuple[float, float]]:
    """(amount, val loss) of the evaluations behind the first step."""
    points = [(AXES[axis](run, e), e["val_loss"]) for e in run.val]
    return [(x, y) for x, y in points if x]


def at(run: Run, axis: str, x: float) -> Point | None:
    """(val loss, half its interval) where so much was spent: between two evaluations linear in log x."""
    points = curve(run, axis)
    for (x0, y0), (x1, y1) in zip([points[0], *points], points, strict=False) if points else []:
        if x0 <= x * (1 + 1e-9) and x <= x1 * (1 + 1e-9):
            share = 0.0 if x1 == x0 else min(1.0, math.log(x / x0) / math.log(x1 / x0))
            return y0 + share * (y1 - y0), error(run)
    return None


def spent_until(run: Run, axis: str, loss: float) -> float | None:
    """How much it took until the val loss was first that low, linear in the loss between two evaluations.

    None where it never was, or where the first evaluation behind the start was lower already.
    """
    points = curve(run, axis)
    if not points or points[0][1] <= loss:
        return None
    for (x0, y0), (x1, y1) in pairwise(points):
        if y1 <= loss < y0:
            return x0 * (x1 / x0) ** ((y0 - loss) / (y0 - y1))
    return None


def standard_error(run: Run) -> float | None:
    """Of an evaluation late in the run: as logged, else from the scatter of the evaluations around their curve."""
    logged = [e["val_se"] for e in run.val if e["val_se"] is not None]
    return logged[-1] if logged else run.scatter()


def error(run: Run) -> float | None:
    """Half the 95% interval of an evaluation late in the run."""
    se = standard_error(run)
    logged = any(e["val_se"] is not None for e in run.val)
    # the second differences of n evaluations, which overlap, tell about as much as n / 3 independent ones
    return None if se is None else se * (1.96 if logged else t975(len(run.val) // 6))


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
    halves = [half for _, half in a + b]
    return None if None in halves else math.hypot(*(h for h in halves if h is not None))


def leader(arms: list[Arm], points: list[list[Point]]) -> tuple[str, int | None]:
    """(who has the lowest mean loss and how sure that is, the arm's number where it leads all others)."""
    means = [statistics.fmean(v for v, _ in p) for p in points]
    best, *others = sorted(range(len(arms)), key=lambda i: means[i])
    said, leads = [], True
    for i in others:
        gap, half = means[i] - means[best], margin(points[best], points[i])
        noise = "noise not known" if half is None else f"noise ±{half:.4f}"
        told = half is not None and gap > half
        leads = leads and told
        name = f"{arms[i].label} " if len(others) > 1 else ""
        if not gap:
            said.append(f"{name or 'both '}equal")
        elif told or half is None:
            said.append(f"{name}by {gap:.4f} ({noise})")
        else:
            said.append(f"{name}not distinguishable ({gap:.4f} apart, {noise})")
    if len(others) == 1:
        pair = f"{arms[best].label} {said[0]}"
        return (pair if "by" in said[0] else said[0]), best if leads else None
    more = f" and {len(said) - 3} more" if len(said) > 3 else ""
    return f"{arms[best].label}; behind it {', '.join(said[:3])}{more}", best if leads else None


OTHER_VOCABULARY = 0.7  # nats between the losses of untrained models: half as many tokens, or twice


def not_comparable(runs: list[Run]) -> list[str]:
    """Why the losses cannot be ranked: what is known of two runs, and differs."""
    facts: dict[str, Callable[[Run], Any]] = {
        "validation data": lambda r: r.start.get("val_sha256"),
        "numbers of validation tokens": lambda r: r.start.get("val_tokens"),
        "data sets": lambda r: Path(str(r.settings["dataset"])).name if r.settings.get("dataset") else None,
        "tokenizers": lambda r: r.start.get("tokenizer"),
        "vocabularies": lambda r: r.start.get("model_args", {}).get("vocab_size"),
        "context lengths": lambda r: r.settings.get("block_size"),
    }
    starts = [r.evals[0]["val_loss"] if r.evals and r.evals[0]["iter"] == 0 else None for r in runs]
    if None not in starts and max(starts) - min(starts) > OTHER_VOCABULARY:  # type: ignore[type-var, operator]
        facts["losses at step 0, and so vocabularies or data"] = lambda r: r.evals[0]["val_loss"]
    same_files = len({r.start.get("val_sha256") for r in runs}) == 1 and runs[0].start.get("val_sha256")
    out = []
    for what, f in facts.items():
        values = [f(r) for r in runs]
        if len(set(values) - {None}) > 1 and not (what == "data sets" and same_files):
            pairs = zip(letters(len(runs)), values, strict=True)
            said = ", ".join(f"{x} {v:.2f}" if isinstance(v, float) else f"{x} {v}" for x, v in pairs if v is not None)
            out.append(f"different {what} ({said})")
    return out[:1] if out and "data" in out[0] else out


def learning(arms: list[Arm], levels: list[float], reasons: list[str]) -> list[Row]:
    """Losses where as much was spent, and what was spent until a loss; ranked unless there are reasons not to."""
    if not any(r.val for a in arms for r in a.runs):
        return []

    def loss(v: float) -> str:
        return f"{v:.4f}"

    def of(figure: Callable[[Run], Any]) -> Callable[[Run], Any]:
        return lambda r: figure(r) if r.val else None

    def ranked(row: Row, points: list[list[Point]]) -> Row:
        """With who leads, where the losses may be ranked and are all known."""
        if len(arms) > 1 and None not in row.values:
            row.lead, row.winner = ("not ranked", None) if reasons else leader(arms, points)
        return row

    rows = [over_runs("last step evaluated", arms, of(lambda r: r.val[-1]["iter"]), AMOUNT["steps"])]
    rows += [over_runs("val loss there", arms, of(lambda r: r.val[-1]["val_loss"]), loss)]
    rows += [over_runs("standard error of an evaluation", arms, of(standard_error), loss)]
    lowest = over_runs("lowest val loss", arms, of(lambda r: r.best["val_loss"]), loss)
    rows += [ranked(lowest, [[(r.best["val_loss"], error(r)) for r in a.runs if r.val] for a in arms])]
    rows += [over_runs("at step", arms, of(lambda r: r.best["iter"]), AMOUNT["steps"])]
    rows += [
        over_runs("perplexity there", arms, of(lambda r: math.exp(min(r.best["val_loss"], 700))), lambda v: f"{v:.2f}")
    ]
    rows += [over_runs("bits per byte there", arms, of(lambda r: bits_per_byte(r.best["val_loss"], r)), loss)]
    rows += [over_runs("val - train loss at the end", arms, of(gap), loss)]
    turned = [overfit(a.runs[0]) if a.runs[0].val else None for a in arms]
    rows.append(Row("val turned up after step", turned, lambda v: f"{v[0]:,}, by {v[1]:.4f} since"))
    for axis in AXES if len(arms) > 1 else ():
        ends = [max((x for x, _ in curve(r, axis)), default=None) for a in arms for r in a.runs]
        if known := [e for e in ends if e is not None]:
            x = min(known)
            row = over_runs(
                f"val loss at equal {axis} ({AMOUNT[axis](x)})", arms, functools.partial(value_at, axis, x), loss
            )
            rows.append(ranked(row, [[p for r in a.runs if (p := at(r, axis, x))] for a in arms]))
    for level in levels or sensible_levels([v for v in lowest.values if v is not None]):
        for axis in ("tokens", "time"):
            row = over_runs(
                f"{axis} to val loss {level:g}",
                arms,
                functools.partial(spent_until, axis=axis, loss=level),
                AMOUNT[axis],
            )
            if len(arms) > 1 and None not in row.values:
                row.lead, row.winner = ("not ranked", None) if reasons else fewest(arms, axis, level)
            rows.append(row)
    return [r for r in rows if any(v is not None for v in r.values) or (levels and " to val loss " in r.label)]


def value_at(axis: str, x: float, run: Run) -> float | None:
    found = at(run, axis, x)
    return found[0] if found else None


def fewest(arms: list[Arm], axis: str, level: float) -> tuple[str, int | None]:
    """(which arm needs least, and how many times less than the next; its number where the seeds make that sure)."""
    spent = [[spent_until(r, axis, level) or math.nan for r in a.runs] for a in arms]
    means = [statistics.fmean(values) for values in spent]
    best, next_, *_ = sorted(range(len(arms)), key=lambda i: means[i])
    gap, half = difference([math.log(x) for x in spent[best]], [math.log(x) for x in spent[next_]])
    times = f"{arms[best].label}, {means[next_] / means[best]:.2f} x fewer than {arms[next_].label}"
    if half is None:
        return f"{times} (noise not known)", None
    factor = math.exp(half)
    if gap <= half:
        return f"{arms[best].label} and {arms[next_].label}: not distinguishable (noise a factor of {factor:.2f})", None
    return f"{times} (noise a factor of {factor:.2f})", best


def sensible_levels(lowest: list[float]) -> list[float]:
    """A loss that all arms reached, rounded up, and one a tenth above it."""
    reached = math.ceil(max(lowest) * 100) / 100
    return [round(reached + 0.1, 2), reached]


def gap(run: Run) -> float | None:
    last = run.val[-1]
    return None if last["train_loss"] is None else last["val_loss"] - last["train_loss"]


def bits_per_byte(loss: float, run: Run) -> float | None:
    """Nats per token as bits per byte of text; None where the bytes of a token are not known."""
    per_token = run.start.get("bytes_per_token") or (1.0 if run.start.get("tokenizer") == "bytes" else None)
    return loss / math.log(2) / per_token if per_token else None


def overfit(run: Run) -> tuple[int, float] | None:
    """(step of the lowest val loss, how much higher the last one is), where it rose while the train loss fell.

    By more than four standard errors: the lowest of many evaluations is low by chance as well. None too where the
    standard error is not known.
    """
    low, last, se = run.best, run.val[-1], standard_error(run)
    rise = last["val_loss"] - low["val_loss"]
    fell = None in (last["train_loss"], low["train_loss"]) or last["train_loss"] < low["train_loss"]
    return (low["iter"], rise) if fell and se is not None and rise > 4 * se else None
