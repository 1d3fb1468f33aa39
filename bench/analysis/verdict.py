"""What runs say: their tables, the headline, the cause of a difference or its absence, and the run that settles it.

A line that begins with COMMAND is a command to copy.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field

from bench.analysis import logs, table
from bench.analysis.logs import DEFAULTS, Run
from bench.analysis.table import Arm, Lead, Row, factors, short
from deskgpt.system.terminal import clock

COMMAND = "$ "
FOLLOW = {"backend", "compile", "min_lr", "lr_decay_iters"}  # settings that what ran or another one tells
DRIFT = "What made a run faster is not known, as a machine's speed drifts: bench/speed.py times settings in turns."
EVALUATE = f"{COMMAND}python train.py --init_from=resume --eval_only=True --eval_tokens=... --dataset=... --out_dir=..."


@dataclass
class Comparison:
    """What there is to say about one run, or several side by side."""

    runs: list[Run]
    arms: list[Arm]
    headline: str
    lines: list[str]  # the verdict
    rows: dict[str, list[Row]] = field(default_factory=dict)  # by table
    reason: str = ""  # why losses cannot be compared

    def notes(self) -> list[str]:
        """What a reader of the tables should know."""
        sources = {run.start["peak_source"]: run.name for run in self.runs[::-1] if "peak_source" in run.start}
        peaks = [f"The peak of {name} is {source}." for source, name in sources.items()]
        return peaks + [f"{run.name}: {note}." for run in self.runs for note in run.notes]

    def tables(self) -> dict[str, list[list[str]]]:
        """By title the cells of each row, the headings first; of one run there are labels and values only."""
        head = ["", *(arm.name for arm in self.arms), "leads"]
        n = 2 if len(self.runs) == 1 else len(head)
        return {name: [head[:n], *(row.cells()[:n] for row in rows)] for name, rows in self.rows.items() if rows}


def compare(runs: list[Run]) -> Comparison:
    """Compares runs; of a single one it says what it learned."""
    arms = table.arms_of(runs)
    if len(runs) == 1:
        rows = {"Speed": table.speed_rows(arms), "Learning": table.learning_rows(arms)}
        return Comparison(runs, arms, summary(runs[0]), judgement(runs[0]), rows)
    unit, reason = table.comparable(runs)
    rows = {"What changed": table.change_rows(arms), "Speed": table.speed_rows(arms)}
    rows["Learning"] = table.learning_rows(arms, unit, reason)
    speed = next((row.lead for row in rows["Speed"] if row.label == "tokens/s"), Lead())
    loss = next((row for row in rows["Learning"] if " at equal " in row.label), None)
    lines = verdict(arms, speed, loss, reason)
    if unit == "bits per byte":
        lines.append("Bits per byte depend on the context too: a longer one lowers them by itself.")
    return Comparison(runs, arms, headline(arms, speed, loss, reason), lines, rows, reason)


# ---- one run -------------------------------------------------------------------------------------------------


def summary(run: Run) -> str:
    """The run in a sentence."""
    if not run.val:
        return "The log has no evaluation yet"
    first, best = run.evals[0], run.best
    if best is first or first["val_loss"] is None:
        return f"The val loss is {best['val_loss']:.2f} at step {best['iter']:,}, and was never lower"
    return f"The val loss fell from {first['val_loss']:.2f} to {best['val_loss']:.2f} in {best['iter']:,} steps"


def judgement(run: Run) -> list[str]:
    """Where it is, if it has not ended, and what its val losses say, whatever its data: as usual, overfit, falling."""
    lines = []
    goal = run.settings.get("max_iters")
    if not run.end and run.iters and type(goal) is int:
        done = int(run.iters[-1]["iter"]) + 1
        left_s = max(0, goal - done) * (logs.median_ms(run) or 0.0) / 1e3
        lines.append(f"Step {done:,} of {goal:,}; {clock(left_s)} of training left, if it still runs.")
    if not run.val:
        return lines
    band = table.band_of(run)
    if band and (words := band.verdict({e["iter"]: e["val_loss"] for e in run.val})):
        lines.append(f"Beside other runs with these settings: {words}.")
    turned = table.overfit(run)
    if turned:
        lines.append(
            f"The model overfits: the val loss has risen by {turned[1]:.4f} since step {turned[0]:,} while the train "
            "loss fell. More data, --dropout or a smaller model may help."
        )
    last = run.val[-1]
    earlier = [e["val_loss"] for e in run.val if last["iter"] * 0.7 <= e["iter"] <= last["iter"] * 0.9]
    if earlier and last["val_se"] and earlier[-1] - last["val_loss"] > 1.96 * last["val_se"]:
        fell = earlier[-1] - last["val_loss"]
        lines.append(f"The val loss was still falling at the end, by {fell:.4f} in the last steps: train longer.")
    best = run.best
    if best["val_se"] and best["eval_windows"]:
        error = f"± {1.96 * best['val_se']:.4f} (95% of the text, n={best['eval_windows']:,.0f} windows)"
        lines.append(f"The lowest val loss is {best['val_loss']:.4f} {error}, at step {best['iter']:,}.")
    if last["train_loss"] is not None:
        lines.append(f"At the end the val loss is {last['val_loss'] - last['train_loss']:.4f} above the train loss.")
    return lines


# ---- several runs --------------------------------------------------------------------------------------------


def headline(arms: list[Arm], speed: Lead, loss: Row | None, reason: str) -> str:
    """Who learns more and who is faster, as far as the noise allows to tell. The arguments are those of `verdict`."""
    if len(arms) == 1:
        return f"All runs have the same settings ({arms[0].name})."
    if reason:
        learned = f"The losses are not comparable: {reason}."
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
        return f"{learned} The speeds were the same within 5%."
    return f"{learned} {arms[speed.winner].label} was faster."


def verdict(arms: list[Arm], speed: Lead, loss: Row | None, reason: str) -> list[str]:
    """Why losses are not comparable, what may be called the cause, and the runs that would settle what is open.

    speed: who leads in tokens/s; loss: the row of val losses after equal training, None where there is none. Empty for
    a single arm.
    """
    if len(arms) == 1:
        return []
    lines = ["To compare losses, evaluate the models alike:", EVALUATE] if reason else []
    if speed.winner is not None:
        lines.append(DRIFT)
    unknown = [arm.label for arm in arms if not arm.runs[0].settings]
    if unknown:
        return [*lines, f"No cause can be named: the log of {' and '.join(unknown)} does not say its settings."]
    changes = factors(arms)
    named = ", ".join(how(change, arms) for change in changes[:5])
    repeated = all(len(arm.runs) > 1 for arm in arms)
    if not changes:
        return [*lines, "Nothing that is known changed."]
    if len(changes) > 1:
        lines.append(f"No cause can be named: {len(changes)} things changed at once ({named}).")
    elif loss is None or reason or loss.lead.is_same:
        lines.append(f"Only {named} differs.")
    elif not repeated:
        lines.append(f"Only {named} differs. Two seeds of each settle whether it changes the loss ({loss.lead.text}).")
    elif loss.lead.winner is not None:
        lines.append(f"Only {named} differs: it is the cause of the difference in loss ({loss.lead.text}).")
    else:
        lines.append(f"Only {named} differs: no effect on the loss shows beyond the noise ({loss.lead.text}).")
    if loss and not loss.lead.is_same and not (repeated and len(changes) == 1):
        lines += settling(arms)
    return lines


def how(change: list[str], arms: list[Arm]) -> str:
    """A change in words: between two arms, from which value to which."""
    if len(arms) != 2:
        return " with ".join(change)
    old = arms[0].causes
    new = arms[1].causes
    return " with ".join(f"{name} {short(old.get(name))} -> {short(new.get(name))}" for name in change)


def settling(arms: list[Arm]) -> list[str]:
    """The command of bench/ask.py that asks about the first three changes between the first two arms, each alone."""
    texts = []
    for change in factors(arms[:2]):
        values = {"compile" if name == "compiled" else name: arms[1].causes[name] for name in change}
        if values.keys() <= DEFAULTS.keys() - {"device", "max_iters"}:
            texts.append(" ".join(f"--{name}={value}" for name, value in values.items()))
    if not texts:
        return []
    words = ["python", "bench/ask.py"]
    settings = arms[0].runs[0].settings
    left_out = {"out_dir", "init_from", "seed", *(FOLLOW - arms[0].causes.keys())}
    for name, default in DEFAULTS.items():
        if name not in left_out and settings.get(name, default) != default:
            words.append(f"--{name}={settings[name]}")
    for letter, text in zip("bcd", texts, strict=False):
        words += [f"--{letter}", text]
    return ["To settle it:", COMMAND + shlex.join(words)]
