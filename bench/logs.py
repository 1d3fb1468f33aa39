"""Read training runs: the log.jsonl of an out_dir, or the text that nanoGPT printed.

A figure that a log does not have is missing from its event, or None.
"""

import ast
import math
import re
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deskgpt.files import read_small
from deskgpt.logger import MOST_BYTES, event_of
from deskgpt.peaks import find_card
from deskgpt.resume import WITHOUT_CHOICE
from train import TrainConfig

DEFAULTS = asdict(TrainConfig())
LARGEST = 1e24  # a number that is larger, or nearer to 0 than 1 / LARGEST, is a mistake of the log

Event = dict[str, Any]


@dataclass
class Run:
    """A training run.

    Its evaluations have tokens, train_s (seconds of training) and flops, counted from the run's
    beginning, as far as its log says; evaluation is in none of them.
    """

    name: str
    settings: Event = field(default_factory=dict)  # as its log has them
    start: Event = field(default_factory=dict)  # the first event: parameters, device ...
    iters: list[Event] = field(default_factory=list)  # numbers of steps, each step once
    evals: list[Event] = field(default_factory=list)  # numbers of evaluations, and eval_digest
    samples: list[Event] = field(default_factory=list)  # texts that the model wrote
    has_ended: bool = False  # or it was killed, or is still running
    notes: list[str] = field(default_factory=list)  # what a reader of its figures should know

    @property
    def val(self) -> list[Event]:
        """Return the evaluations with a finite validation loss."""
        return [e for e in self.evals if "val_loss" in e]

    @property
    def last(self) -> Event:
        """Return the last one of `val`; {} if there is none."""
        return self.val[-1] if self.val else {}

    @property
    def best(self) -> Event:
        """Return the one of `val` with the lowest loss; {} if there is none."""
        return min(self.val, key=lambda e: e["val_loss"], default={})

    @property
    def schedule_end(self) -> int | None:
        """Return the step at which the learning rate has decayed; None if it is not known or the
        rate is constant.
        """
        end = self.settings.get("lr_decay_iters")
        if end == 0:
            end = self.settings.get("max_iters")
        if self.settings.get("max_minutes"):  # the other settings are the first plan
            end = self.last.get("iter") if self.has_ended else None
        is_constant = self.settings.get("decay_lr") is False
        return end if type(end) is int and not is_constant else None

    @property
    def step_s(self) -> float | None:
        """Return the median time of a step, without the run's first step, which still warms up."""
        known = [e["time_ms"] for e in self.iters if e.get("time_ms") and e["iter"] > 0]
        return statistics.median(known) / 1e3 if known else None

    def number(self, name: str) -> float | None:
        """Return a number of the first event; None if it is not known."""
        return numbers(self.start).get(name)

    def per_step(self, amount: str) -> float | None:
        """Return the tokens, train_s, flops or gpu_flops of a step; None if they are not known."""
        return self.step_s if amount == "train_s" else self.number(f"{amount}_per_step")

    def per_s(self, amount: str) -> float | None:
        """Return an amount per second, without the time of evaluations."""
        of_a_step = self.per_step(amount)
        return of_a_step / self.step_s if of_a_step and self.step_s else None


# ---- reading -------------------------------------------------------------------------------------


def read_runs(paths: list[str], card: str = "") -> list[Run]:
    """Read runs as `read_run`.

    Names of several runs begin with A, B, C ..., so that no two are the same.
    """
    runs = [read_run(path, card) for path in paths]
    if len(runs) > 1:
        for i, run in enumerate(runs):
            run.name = f"{chr(ord('A') + i)}: {run.name}"
    return runs


def read_run(path: str, card: str = "") -> Run:
    """Read the run in an out_dir, a log.jsonl or a text file of nanoGPT's.

    card: the one that nanoGPT ran on, since its log does not say. Raise ValueError if there is no
    run, or no such card.
    """
    file = Path(path, "log.jsonl") if Path(path).is_dir() else Path(path)
    text = read_small(file, MOST_BYTES).decode("utf-8", errors="replace")
    run = Run(file.resolve().parent.name if file.name == "log.jsonl" else file.stem)
    if text.startswith("{"):
        add_logged(run, text)
    else:
        add_printed(run, text, card)
    if not run.iters and not run.evals:
        raise ValueError(
            f"{file} has no line of a training run (step N: train loss ..., iter N: loss ...)"
        )
    add_amounts(run)
    return run


def add_amounts(run: Run) -> None:
    """Add the tokens, seconds and FLOPs of training that the log leaves out of steps and
    evaluations.
    """
    flops_per_token = run.number("flops_per_token")
    tokens_per_step = run.number("tokens_per_step")
    if flops_per_token and tokens_per_step:
        flops = flops_per_token * tokens_per_step
        run.start["flops_per_step"] = flops
        if gpus := run.number("world_size"):
            run.start["gpu_flops_per_step"] = flops / gpus
            run.start["gpu_peak_flops"] = (run.number("peak_flops") or 0) / gpus
    for e in run.evals + run.iters:
        for amount in ("tokens", "train_s"):
            if of_a_step := run.per_step(amount):
                e.setdefault(amount, e["iter"] * of_a_step)
        if flops_per_token and "tokens" in e:
            e["flops"] = e["tokens"] * flops_per_token


def numbers(record: Event) -> Event:
    """Return the fields of a record that are numbers and can be right: no NaN, no infinity, no
    1e300.
    """
    found = {name: value for name, value in record.items() if type(value) in (int, float)}
    return {k: v for k, v in found.items() if v == 0 or 1 / LARGEST <= abs(v) <= LARGEST}


def add_logged(run: Run, text: str) -> None:
    """Fill a run from its log.jsonl."""
    lines = [line for line in text.splitlines() if line.strip()]
    events = [{"iter": 0} | event for event in map(event_of, lines) if event]
    events = [e for e in events if numbers(e).get("iter", -1) >= 0]
    add_events(run, events)
    if not run.has_ended:
        run.notes.append("its log has no end: the run was stopped, failed or is still running")
    if len(lines) > len(events):
        run.notes.append(f"{len(lines) - len(events)} unreadable lines of its log are left out")


def add_events(run: Run, events: list[Event]) -> None:
    """Fill a run from its events.

    Each step counts once, with its last figures: a resumed run repeats some.
    """
    kept: dict[tuple[int, str], Event] = {}
    earlier_s = 0.0  # seconds of training before the latest start, whose own count begins at 0
    for event in events:
        kind = str(event["event"])
        step = event["iter"]
        found = numbers(event)
        if kind == "start":
            # A step is done again by the run that resumes there; the evaluation before it is not.
            kept = {key: e for key, e in kept.items() if key[0] < step + (key[1] != "iter")}
            earlier_s = max((e.get("train_s", 0.0) for e in kept.values()), default=0.0)
            add_start(run, event)
        run.has_ended = kind == "end"
        if "train_s" in found:
            found["train_s"] += earlier_s
        if kind == "eval":
            found["eval_digest"] = event.get("eval_digest")
        if kind == "sample" and isinstance(event.get("texts"), list):
            found["texts"] = event["texts"]
        kept[step, kind] = found
    of_kind = {"iter": run.iters, "eval": run.evals, "sample": run.samples}
    for (_, kind), found in sorted(kept.items(), key=lambda item: item[0]):
        if kind in of_kind:
            of_kind[kind].append(found)


def add_start(run: Run, event: Event) -> None:
    """Take over the settings and the metadata of a start event, of which a resumed run has
    several.
    """
    settings = event.get("settings")
    settings = dict(settings) if isinstance(settings, dict) else {}
    if settings.get("init_from") in ("resume", "auto"):  # the run began earlier
        settings["init_from"] = run.settings.get("init_from")
    run.settings = settings
    run.start = event


# ---- printed logs --------------------------------------------------------------------------------

# The words that nanoGPT prints before a number, and our name for it.
LABELS = {"iter": "iter", "step": "iter", "time": "time_ms", "mfu": "mfu"}
LABELS |= {"loss": "loss", "train loss": "train_loss", "val loss": "val_loss"}
LABELS |= {"tokens per iteration will be": "tokens_per_step", "number of parameters": "parameters"}
FIGURE = re.compile(rf"\b({'|'.join(LABELS)}):? (-?\d[\d,]*\.?\d*(?:e[+-]?\d+)?|-?inf|nan)")
# It comes from the command line, or from a config file.
SETTING = re.compile(r"^(?:Overriding: )?(\w+)\s*=\s*([^#]+)")
# nanoGPT's value of each setting that it does not print: as ours, but for these.
NANOGPT_DEFAULTS = DEFAULTS | WITHOUT_CHOICE | {"lr_decay_iters": 600_000, "min_lr": 6e-5}
NANOGPT_PEAK = 312e12  # FLOP/s of its MFU, whatever the card: an A100 in bfloat16


def add_printed(run: Run, text: str, card: str) -> None:
    """Fill a run from what nanoGPT printed, whatever other lines there are before, between and
    after its own.
    """
    settings: Event = {}
    if "Overriding" in text:  # the configurator prints all that it sets
        settings |= NANOGPT_DEFAULTS
    start: Event = {"event": "start", "iter": 0, "settings": settings}
    events = [start]
    evaluated = {0}  # steps whose time includes an evaluation and the saving, or warming up
    for line in text.splitlines():
        line = line[:2000].rstrip()
        found: Event = {}
        for label, number in FIGURE.findall(line):
            found[LABELS[label]] = float(number.replace(",", ""))
        setting = SETTING.search(line)
        if 0 <= found.get("iter", -1) < LARGEST and found.keys() & {"time_ms", "val_loss"}:
            step = found["iter"] = int(found["iter"])
            # The first MFU that is one is the step's own, later ones are running means. Our own
            # lines go on after the MFU, which is of another peak.
            if found.get("mfu", 0) > 0 and line.endswith("%"):
                flops = found["mfu"] / 100 * NANOGPT_PEAK * found.get("time_ms", 0) / 1e3
                start.setdefault("gpu_flops_per_step", flops)
            if "val_loss" in found:
                evaluated.add(step)
            if step in evaluated:
                found["time_ms"] = 0
            events.append({"event": "eval" if "val_loss" in found else "iter"} | found)
        elif setting and setting[1] in DEFAULTS and len(events) == 1:
            # nanoGPT prints its settings before its first step.
            try:
                settings[setting[1]] = ast.literal_eval(setting[2].strip())
            except Exception:  # an expression such as 5 * 8, or another program's line
                settings[setting[1]] = None
        else:
            for name, value in numbers(found).items():
                start.setdefault(name, value)
    add_flops(start, card)
    add_events(run, events)
    run.has_ended = True


def add_flops(start: Event, card: str) -> None:
    """Add to the first event the FLOPs of a token, by nanoGPT's formula, and the card's peak."""
    settings = numbers(start["settings"])
    sizes = [settings[name] for name in ("n_layer", "n_embd", "block_size") if name in settings]
    if "parameters" in start:
        start["parameters"] = round(start["parameters"] * 1e6)
        if len(sizes) == 3:
            start["flops_per_token"] = 6 * start["parameters"] + 12 * math.prod(sizes)
    if card:
        of_card = find_card(card)
        peak = of_card.peak(of_card.default_dtype())  # the dtype that nanoGPT takes there, too
        start["gpu_peak_flops"] = peak and peak[0]
