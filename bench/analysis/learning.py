"""What runs learned: losses after equal spending, what it took to reach a loss, and how sure differences are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.analysis.arms import NOT_RANKED, Arm, Lead, Row, lead_by_ratio, letters, over_runs, same_text
from bench.analysis.noise import difference, t975
from bench.analysis.runs import Run
from deskgpt.run import diagnosis
from deskgpt.system.formatting import clock

Point = tuple[float, float | None]  # a loss, and half the width of its 95% interval, None if that is not known

OTHER_VOCABULARY = 0.7  # nats between the losses of untrained models: one has about twice the tokens of the other


# ---- what is spent -------------------------------------------------------------------------------------------


def text_at(run: Run, e: dict[str, Any]) -> float | None:
    """Bytes of text trained on, if its tokens are as long as those evaluated."""
    bytes_per_token = run.start.get("bytes_per_token")
    return e["tokens"] * bytes_per_token if e["tokens"] and bytes_per_token else None


def seconds_at(run: Run, e: dict[str, Any]) -> float | None:
    """Seconds of training and of compiling before it."""
    return e["train_s"] + (run.start.get("warm_up_s") or 0.0) if e["train_s"] else None


def flops_at(run: Run, e: dict[str, Any]) -> float | None:
    return e["tokens"] * run.flops_per_token if e["tokens"] and run.flops_per_token else None


# What an evaluation's model has cost until then, by what is counted.
AXES: dict[str, Callable[[Run, dict[str, Any]], float | None]] = {
    "steps": lambda run, e: e["iter"],
    "tokens": lambda run, e: e["tokens"],
    "text": text_at,
    "time": seconds_at,
    "FLOPs": flops_at,
}
AMOUNT: dict[str, Callable[[float], str]] = {
    "steps": lambda v: f"{v:,.0f}",
    "tokens": lambda v: f"{v:.4g}" if v >= 1e6 else f"{v:,.0f}",
    "text": lambda v: f"{v / 1e6:.4g} MB" if v >= 1e6 else f"{v:,.0f} bytes",
    "time": clock,
    "FLOPs": lambda v: f"{v:.3g}",
}


def curve(run: Run, axis: str) -> list[tuple[float, float]]:
    """(amount spent, val loss) of each evaluation after the first step.

    The one before it has cost time too, for compiling; but between it and the next one no line tells the loss.
    """
    points = [(AXES[axis](run, e), e["val_loss"]) for e in run.val if e["iter"]]
    return [(x, y) for x, y in points if x]


def at(run: Run, axis: str, amount: float) -> Point | None:
    """The val loss when this much was spent, and half the width of its interval.

    Between two evaluations it is linear in log(amount). None before the first and after the last one.
    """
    points = curve(run, axis)
    if not points:
        return None
    for (x0, y0), (x1, y1) in pairwise([points[0], *points]):
        if x0 <= amount * (1 + 1e-9) and amount <= x1 * (1 + 1e-9):
            share = 0.0 if x1 / x0 == 1 else min(1.0, math.log(amount / x0) / math.log(x1 / x0))
            return y0 + share * (y1 - y0), error(run)
    return None


def spent_until(run: Run, axis: str, loss: float) -> float | None:
    """What it took until the val loss first was this low; log(amount) is linear in the loss between evaluations.

    None if the loss never was, or already at the first evaluation after the start.
    """
    points = curve(run, axis)
    if not points or points[0][1] <= loss:
        return None
    for (x0, y0), (x1, y1) in pairwise(points):
        if y1 <= loss < y0:
            return x0 * (x1 / x0) ** ((y0 - loss) / (y0 - y1))
    return None


# ---- noise ---------------------------------------------------------------------------------------------------


def standard_error(run: Run) -> float | None:
    """Standard error of a late evaluation: the logged one, or else from the scatter of the evaluations."""
    logged = [e["val_se"] for e in run.val if e["val_se"] is not None]
    return logged[-1] if logged else run.scatter()


def error(run: Run) -> float | None:
    """Half the width of a late evaluation's 95% interval."""
    se = standard_error(run)
    if se is None:
        return None
    if any(e["val_se"] is not None for e in run.val):
        return se * 1.96
    # The second differences of n evaluations overlap: they are worth about n / 3 independent ones.
    return se * t975(len(run.val) // 6)


def margin(a: list[Point], b: list[Point]) -> float | None:
    """Half the width of the 95% interval of the difference between two arms' mean losses; None without any measure.

    From the seeds where both arms have several (Welch). Where only one has, its spread stands for the other's too. For
    single runs only the error of their evaluations is known.
    """
    losses_a = [loss for loss, _ in a]
    losses_b = [loss for loss, _ in b]
    if len(a) > 1 and len(b) > 1:
        return difference(losses_a, losses_b)[1]
    if len(a) > 1 or len(b) > 1:
        seeds = losses_a if len(a) > 1 else losses_b
        return t975(len(seeds) - 1) * statistics.stdev(seeds) * math.sqrt(1 / len(a) + 1 / len(b))
    half_a = a[0][1]
    half_b = b[0][1]
    return None if half_a is None or half_b is None else math.hypot(half_a, half_b)


# ---- who leads -----------------------------------------------------------------------------------------------


def leader(arms: list[Arm], points: list[list[Point]]) -> Lead:
    """Who has the lowest mean loss, and how sure that is of each other arm. points: of each arm's runs."""
    means = [statistics.fmean(loss for loss, _ in of_arm) for of_arm in points]
    best, *others = sorted(range(len(arms)), key=lambda i: means[i])
    gaps = [(means[i] - means[best], margin(points[best], points[i])) for i in others]

    if len(others) == 1:
        text = distance(*gaps[0], f"{arms[best].label} by")
    else:
        named = [f"{arms[i].label} {distance(*gap, 'higher by')}" for i, gap in zip(others, gaps, strict=True)]
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        text = f"{arms[best].label}; {', '.join(named[:3])}{more}"
    return Lead(
        text,
        best if all(half is not None and gap > half for gap, half in gaps) else None,
        within_noise=any(half is not None and 0 < gap <= half for gap, half in gaps),
        noise_unknown=any(half is None and gap > 0 for gap, half in gaps),
    )


def distance(gap: float, half: float | None, by: str) -> str:
    """How far a loss is from the lowest, and how sure that is."""
    if not gap:
        return "equal"
    if half is None:
        return f"{by} {gap:.4f} (noise not known)"
    if gap > half:
        return f"{by} {gap:.4f} (noise ±{half:.4f})"
    return f"not distinguishable ({gap:.4f} apart, noise ±{half:.4f})"


def fewest(arms: list[Arm], axis: str, level: float) -> Lead:
    """Which arm needs the least to reach a loss, and how many times less than the next one. All must reach it."""
    spent = [[spent_until(run, axis, level) or math.nan for run in arm.runs] for arm in arms]
    words = "sooner than " if axis == "time" else "fewer than "
    return lead_by_ratio(arms, spent, highest_leads=False, words=words)


# ---- which losses compare ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranking:
    """In which unit losses are ranked, and why they cannot be; reasons is [] where they can."""

    reasons: list[str]
    in_bits: bool = False  # bits per byte of text, not nats per token
    caveat: str = ""  # what differs between evaluations that are ranked all the same

    @property
    def unit(self) -> str:
        return "bits per byte" if self.in_bits else "val loss"

    @property
    def trained_on(self) -> str:
        """The axis of what was trained on: text where tokens are no common measure."""
        return "text" if self.in_bits else "tokens"


def ranking(runs: list[Run]) -> Ranking:
    """How the losses of runs can be ranked: in nats on the same tokens, in bits per byte on the same text.

    Different contexts bar neither: between tokenizers they are never quite equal. They are said beside the verdict.
    """
    reasons = not_comparable(runs)
    same_tokens = len({run.start.get("val_sha256") for run in runs}) == 1
    some_text_known = any(run.start.get("val_text") for run in runs)
    if not reasons or same_tokens or not some_text_known:
        return Ranking(reasons, caveat=of_contexts(runs, "tokens"))
    why_not = not_in_bits(runs)
    if why_not:
        return Ranking([*reasons, why_not])
    return Ranking([], in_bits=True, caveat=of_contexts(runs, "bytes"))


def of_contexts(runs: list[Run], unit: str) -> str:
    """How much longer the contexts of some evaluations are, and how to compare alike; empty where all are equal."""
    contexts = {}
    for letter, run in zip(letters(len(runs)), runs, strict=True):
        size = run.start.get("bytes_per_token") if unit == "bytes" else 1
        if size and run.settings.get("block_size"):
            contexts[letter] = (run.settings["block_size"] * size, size)
    if not contexts or max(contexts.values())[0] <= 1.01 * min(contexts.values())[0]:
        return ""
    shown = ", ".join(f"{letter} {length:,.0f}" for letter, (length, _) in contexts.items())
    longest = max(contexts, key=lambda letter: contexts[letter])
    block_size = max(1, round(min(contexts.values())[0] / contexts[longest][1]))
    return (
        f"The contexts differ ({shown} {unit}), and a longer one lowers the loss by itself. To evaluate {longest} with "
        f"the shortest: python train.py --init_from=resume --eval_only=True --block_size={block_size} --out_dir=..."
    )


def not_in_bits(runs: list[Run]) -> str:
    """Why bits per byte cannot be ranked; empty where they can."""
    named = dict(zip(letters(len(runs)), runs, strict=True))
    no_text = [letter for letter, run in named.items() if not run.start.get("val_text")]
    if no_text:
        return f"the validation text of {' and '.join(no_text)} is not known"
    no_bits = [letter for letter, run in named.items() if any(e.get("val_bpb") is None for e in run.val)]
    if no_bits:
        return f"bits per byte of {' and '.join(no_bits)} are not known"
    if not same_text(runs):
        facts = ((x, r.start["val_text"], r.start.get("val_text_bytes")) for x, r in named.items())
        shown = [f"{x} {begin}, {'n/a' if size is None else f'{size:,}'} bytes" for x, begin, size in facts]
        return f"nor is the text known to be the same ({'; '.join(shown)})"
    return ""


def in_bits(run: Run) -> Run:
    """The run with its losses and their standard errors in bits per byte; None if these are not known."""
    evals = []
    for e in run.evals:
        bits = e.get("val_bpb")
        se = e["val_se"]
        factor = bits / e["val_loss"] if bits and e["val_loss"] else None
        evals.append(e | {"val_loss": bits, "val_se": se * factor if se is not None and factor else None})
    return replace(run, evals=evals)


def not_comparable(runs: list[Run]) -> list[str]:
    """Why losses in nats per token cannot be ranked: known differences in the data or tokens of evaluations."""
    facts: dict[str, Callable[[Run], Any]] = {
        "validation data": lambda r: r.start.get("val_sha256"),
        "numbers of validation tokens": lambda r: r.start.get("val_tokens"),
        "data sets": lambda r: Path(str(r.settings["dataset"])).name if r.settings.get("dataset") else None,
        "tokenizers": lambda r: r.start.get("tokenizer"),
        "vocabularies": lambda r: r.start.get("vocab_size"),
    }
    untrained = [run.evals[0]["val_loss"] for run in runs if run.evals and run.evals[0]["iter"] == 0]
    losses = [loss for loss in untrained if loss is not None]
    if len(losses) == len(runs) and max(losses) - min(losses) > OTHER_VOCABULARY:
        facts["losses at step 0, and so vocabularies or data"] = lambda r: r.evals[0]["val_loss"]
    if facts["validation data"](runs[0]) and len({r.start.get("val_sha256") for r in runs}) == 1:
        del facts["data sets"]  # the same files under two names

    reasons = []
    for what, fact in facts.items():
        values = [fact(run) for run in runs]
        if len(set(values) - {None}) > 1:
            named = zip(letters(len(runs)), values, strict=True)
            known = [(x, f"{v:.2f}" if isinstance(v, float) else str(v)) for x, v in named if v is not None]
            shown = [f"{x} {text}" for x, text in known]
            reasons.append(f"different {what} ({', '.join(shown)})")
    # Other data explains other token counts and losses at step 0.
    return reasons[:1] if reasons and "data" in reasons[0] else reasons


# ---- the table -----------------------------------------------------------------------------------------------


def learning_rows(arms: list[Arm], levels: list[float], ranked: Ranking) -> list[Row]:
    """Rows of losses and of what it took to reach them; empty where no run was evaluated.

    levels: the losses to be reached, in the unit that is ranked; by default chosen from the arms' own.
    """
    if not any(run.val for arm in arms for run in arm.runs):
        return []
    in_unit = [replace(arm, runs=[in_bits(run) for run in arm.runs]) for arm in arms] if ranked.in_bits else arms
    rows = loss_rows(arms, in_unit, ranked)
    if len(arms) > 1:
        for axis in ("steps", ranked.trained_on, "time", "FLOPs"):
            rows += equal_spending_rows(in_unit, axis, ranked)
    lowest = over_runs("", in_unit, lowest_loss, four_places)
    chosen = levels or sensible_levels([loss for loss in lowest.values if loss is not None])
    reaching = [reaching_row(in_unit, axis, level, ranked) for level in chosen for axis in (ranked.trained_on, "time")]
    rows = [row for row in rows if any(value is not None for value in row.values)]
    # Losses that were asked for show as n/a where no arm reached them.
    return rows + [row for row in reaching if levels or any(value is not None for value in row.values)]


def loss_rows(arms: list[Arm], in_unit: list[Arm], ranked: Ranking) -> list[Row]:
    """The last and the lowest evaluation, in several units. in_unit: the arms with losses in the unit to rank."""

    def mean(label: str, figure: Callable[[Run], Any], text: Callable[[Any], str]) -> Row:
        return over_runs(label, arms, lambda run: figure(run) if run.val else None, text)

    lowest = mean("lowest val loss", lowest_loss, four_places)
    bits = mean("bits per byte there", lambda r: r.best.get("val_bpb"), four_places)
    points: list[list[Point]] = [[(r.best["val_loss"], error(r)) for r in arm.runs if r.val] for arm in in_unit]
    rank(bits if ranked.in_bits else lowest, in_unit, points, ranked.reasons)
    turned = [overfit(arm.runs[0]) for arm in arms]
    return [
        mean("last step evaluated", lambda r: r.val[-1]["iter"], AMOUNT["steps"]),
        mean("val loss there", lambda r: r.val[-1]["val_loss"], four_places),
        mean("standard error of an evaluation", standard_error, four_places),
        lowest,
        mean("at step", lambda r: r.best["iter"], AMOUNT["steps"]),
        mean("perplexity there", lambda r: perplexity(r.best["val_loss"]), lambda v: f"{v:.2f}"),
        bits,
        mean("val - train loss at the end", lambda r: gap_to_train(r.val[-1]), four_places),
        Row("val turned up after step", turned, lambda v: f"{v[0]:,}, by {v[1]:.4f} since"),
    ]


def equal_spending_rows(arms: list[Arm], axis: str, ranked: Ranking) -> list[Row]:
    """The val losses after equal spending: that of the run that spent the least. No row where no amount is known."""
    curves = [curve(run, axis) for arm in arms for run in arm.runs]
    ends = [max(x for x, _ in of_run) for of_run in curves if of_run]
    if not ends:
        return []
    amount = min(ends)

    def loss_at(run: Run) -> float | None:
        point = at(run, axis, amount)
        return point[0] if point else None

    row = over_runs(f"{ranked.unit} at equal {axis} ({AMOUNT[axis](amount)})", arms, loss_at, four_places)
    found = [[at(run, axis, amount) for run in arm.runs] for arm in arms]
    points = [[point for point in of_arm if point] for of_arm in found]
    rank(row, arms, points, ranked.reasons)
    return [row]


def reaching_row(arms: list[Arm], axis: str, level: float, ranked: Ranking) -> Row:
    """What it took to reach a loss."""
    goal = f"{level:g} bits per byte" if ranked.in_bits else f"val loss {level:g}"
    row = over_runs(f"{axis} to {goal}", arms, lambda run: spent_until(run, axis, level), AMOUNT[axis])
    if len(arms) > 1 and None not in row.values:
        row.lead = NOT_RANKED if ranked.reasons else fewest(arms, axis, level)
    return row


def rank(row: Row, arms: list[Arm], points: list[list[Point]], reasons: list[str]) -> None:
    """Sets who leads in a row of losses, where there are several arms and each loss is known."""
    if len(arms) > 1 and None not in row.values:
        row.lead = NOT_RANKED if reasons else leader(arms, points)


def sensible_levels(lowest: list[float]) -> list[float]:
    """A loss that all arms reached, rounded up, and one a tenth above it; none where no loss is known."""
    if not lowest:
        return []
    reached = math.ceil(max(lowest) * 100) / 100
    return [round(reached + 0.1, 2), reached]


# ---- figures of a run ----------------------------------------------------------------------------------------


def four_places(loss: float) -> str:
    return f"{loss:.4f}"


def lowest_loss(run: Run) -> float | None:
    return run.best["val_loss"] if run.val else None


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700))  # exp(710) overflows


def gap_to_train(evaluation: dict[str, Any]) -> float | None:
    """The val loss less the train loss; None if the log has no train loss."""
    train_loss = evaluation.get("train_loss")
    return None if train_loss is None else evaluation["val_loss"] - train_loss


def overfit(run: Run) -> tuple[int, float] | None:
    """What diagnosis.py calls overfitting, with the standard error that the log or its scatter gives."""
    se = standard_error(run)
    evaluations = []
    for e in run.val:
        train_loss = math.nan if e["train_loss"] is None else e["train_loss"]
        evaluations.append(diagnosis.EvalRecord(e["iter"], train_loss, e["val_loss"], se))
    return diagnosis.overfit(evaluations)
