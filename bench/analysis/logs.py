"""Read training runs: the log.jsonl of an out_dir, or the text that nanoGPT printed.

A figure that a log does not have is missing from its event, or None.
"""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from deskgpt.files import read_small
from deskgpt.logger import MOST_BYTES, event_of
from train import TrainConfig

DEFAULTS = {f.name: f.default for f in fields(TrainConfig)}
# Fields of the first event that are numbers, or unknown.
COUNTS = {"parameters", "tokens_per_step", "flops_per_token", "peak_flops"}
MOST_STEPS = 10**15
LARGEST = 1e24  # a number that is larger, or nearer to 0 than 1 / LARGEST, is a mistake of the log

Event = dict[str, Any]


@dataclass
class Run:
    """A training run.

    Tokens and seconds of training count from its beginning; evaluation is in neither.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)  # of nanoGPT's only what it printed
    # metadata: parameters, tokens_per_step, peak_flops, device ...
    start: dict[str, Any] = field(default_factory=dict)
    iters: list[Event] = field(default_factory=list)  # numbers of steps, each step once
    evals: list[Event] = field(default_factory=list)  # numbers of evaluations, and eval_digest
    samples: list[Event] = field(default_factory=list)  # texts that the model wrote
    end: Event = field(default_factory=dict)  # empty if the run was killed or is still running
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
    def schedule_tokens(self) -> float | None:
        """Return the tokens after which the learning rate has decayed; None if they are not known
        or it is constant.
        """
        end = self.settings.get("lr_decay_iters")
        if end == 0:
            end = self.settings.get("max_iters")
        if self.settings.get("max_minutes"):  # the other settings are the first plan
            end = self.last.get("iter") if self.end else None
        per_step = self.start.get("tokens_per_step")
        return (
            end * per_step
            if type(end) is int and per_step and self.settings.get("decay_lr") is not False
            else None
        )

    @property
    def median_ms(self) -> float | None:
        """Return the median time of a step, without the run's first step, which still warms up."""
        known = [e["time_ms"] for e in self.iters if e.get("time_ms") and e["iter"] > 0]
        return statistics.median(known) if known else None

    @property
    def tokens_per_s(self) -> float | None:
        ms = self.median_ms
        per_step = self.start.get("tokens_per_step")
        return per_step / ms * 1e3 if ms and per_step else None

    @property
    def mfu(self) -> float | None:
        """Return the model's FLOP/s over the device's peak, without the time of evaluations."""
        rate = self.tokens_per_s
        flops = self.start.get("flops_per_token")
        peak = self.start.get("peak_flops")
        return rate * flops / peak if rate and flops and peak else None


# ---- reading -------------------------------------------------------------------------------------


def read_runs(paths: list[str]) -> list[Run]:
    """Read runs as `read_run`.

    Names of several runs begin with A, B, C ..., so that no two are the same.
    """
    runs = [read_run(path) for path in paths]
    for letter, run in zip(letters(len(runs)), runs, strict=True):
        run.name = f"{letter}: {run.name}" if len(runs) > 1 else run.name
    return runs


def letters(n: int) -> list[str]:
    """Return names of n runs: A, B, C ..."""
    return [chr(ord("A") + i) if i < 26 else f"A{i}" for i in range(n)]


def read_run(path: str) -> Run:
    """Read the run in an out_dir, a log.jsonl or a text file of nanoGPT's.

    Raise ValueError if there is none.
    """
    file = Path(path, "log.jsonl") if Path(path).is_dir() else Path(path)
    try:
        raw = read_small(file, MOST_BYTES)
    except OSError as e:
        raise ValueError(
            f"{file}: {e.strerror}; name an out_dir with a log.jsonl, or what nanoGPT printed"
        ) from None
    # PowerShell writes UTF-16
    encoding = "utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"
    text = raw.decode(encoding, errors="replace")
    name = file.resolve().parent.name if file.name == "log.jsonl" else file.stem
    run = Run(name.encode("utf-8", "replace").decode())  # Linux allows names that are not text
    if file.name == "log.jsonl" or text.lstrip("\ufeff \n").startswith("{"):
        add_logged(run, text)
    else:
        add_printed(run, text)
    if not run.iters and not run.evals:
        raise ValueError(
            f"{file} has no line of a training run (step N: train loss ..., iter N: loss ...)"
        )
    lost = [e["iter"] for e in run.iters if "loss" not in e] + [
        e["iter"] for e in run.evals if "val_loss" not in e
    ]
    if lost:
        run.notes.append(f"its loss is not a number at step {min(lost):,}")
    return run


def numbers(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an event that are numbers and can be right: no NaN, no infinity, no
    1e300.
    """
    found = {name: value for name, value in event.items() if type(value) in (int, float)}
    return {
        name: value
        for name, value in found.items()
        if value == 0 or 1 / LARGEST <= abs(value) <= LARGEST
    }


def add_logged(run: Run, text: str) -> None:
    """Fill a run from its log.jsonl."""
    lines = [line for line in text.splitlines() if line.strip()]
    events = [
        e for e in map(event_of, lines) if e is not None and type(e.setdefault("iter", 0)) is int
    ]
    events = [e for e in events if 0 <= e["iter"] < MOST_STEPS]
    add_events(run, events)
    if not run.end:
        run.notes.append("its log has no end: the run was stopped, failed or is still running")
    if len(lines) > len(events):
        run.notes.append(f"{len(lines) - len(events)} unreadable lines of its log are left out")


def add_events(run: Run, events: list[Event]) -> None:
    """Fill a run from its events.

    Each step counts once, with its last figures: a resumed run repeats some.
    """
    iters: dict[int, Event] = {}
    evals: dict[int, Event] = {}
    samples: dict[int, Event] = {}
    earlier_s = 0.0  # seconds of training before the latest start, whose own count begins at 0
    for event in events:
        step = event["iter"]
        if event["event"] == "start":
            iters = {i: e for i, e in iters.items() if i < step}
            evals = {i: e for i, e in evals.items() if i <= step}
            samples = {i: e for i, e in samples.items() if i <= step}
            earlier_s = max(
                (e.get("train_s", 0.0) for e in [*iters.values(), *evals.values()]), default=0.0
            )
            add_start(run, event)
        elif event["event"] in ("iter", "eval"):
            found = numbers(event)
            if "train_s" in found:
                found["train_s"] += earlier_s
            if event.get("eval_digest"):
                found["eval_digest"] = str(event["eval_digest"])
            (iters if event["event"] == "iter" else evals)[step] = found
        elif event["event"] == "sample" and isinstance(event.get("texts"), list):
            samples[step] = {"iter": step, "texts": [str(text) for text in event["texts"]]}
        elif event["event"] == "end":
            run.end = event
    run.iters, run.evals, run.samples = ([e[i] for i in sorted(e)] for e in (iters, evals, samples))


def add_start(run: Run, event: Event) -> None:
    """Take over the settings and the metadata of a start event, of which a resumed run has
    several.
    """
    settings = event.get("settings")
    settings = settings if isinstance(settings, dict) else {}
    settings = {
        name: v for name, v in settings.items() if isinstance(v, str | bool | None)
    } | numbers(settings)
    if settings.get("init_from") in ("resume", "auto"):  # the run began earlier
        settings["init_from"] = run.settings.get("init_from")
    left_out = COUNTS | {"event", "iter"}
    start: dict[str, Any] = {
        name: v for name, v in event.items() if isinstance(v, str | bool) and name not in left_out
    }
    start |= {name: v for name, v in numbers(event).items() if name != "iter"}
    if isinstance(event.get("versions"), dict):
        start["versions"] = ", ".join(
            f"{name} {value}" for name, value in event["versions"].items()
        )
    run.settings, run.start, run.end = settings, start, {}


# ---- printed logs --------------------------------------------------------------------------------

NUMBER = r"(-?\d+\.?\d*(?:e[+-]?\d+)?|-?inf|nan)"
STEP = re.compile(rf"\bstep (\d{{1,15}}): train loss {NUMBER}, val loss {NUMBER}(?!\d)")
ITERATION = re.compile(rf"\biter (\d{{1,15}}): loss {NUMBER}, time {NUMBER}ms")
TOKENS = re.compile(r"tokens per iteration will be: ([\d,]{1,20})")
# Of the command line, or of a config file.
SETTING = re.compile(r"^(?:Overriding: )?(\w+)\s*=\s*([^#]+)")


def add_printed(run: Run, text: str) -> None:
    """Fill a run from what nanoGPT printed, whatever other lines there are before, between and
    after its own.
    """
    start: Event = {"event": "start", "iter": 0, "settings": {}}
    events = [start]
    evaluated = {0}  # whose times include an evaluation and the saving, or warming up
    for line in re.split(r"[\r\n]+", text):
        line = line[:2000]
        if found := STEP.search(line):
            evaluated.add(int(found[1]))
            losses = {"train_loss": float(found[2]), "val_loss": float(found[3])}
            events.append({"event": "eval", "iter": int(found[1])} | losses)
        elif found := ITERATION.search(line):
            time_ms = {} if int(found[1]) in evaluated else {"time_ms": float(found[3])}
            events.append(
                {"event": "iter", "iter": int(found[1]), "loss": float(found[2])} | time_ms
            )
        elif found := TOKENS.search(line):
            start["tokens_per_step"] = int(found[1].replace(",", "") or 0)
        elif (found := SETTING.search(line)) and found[1] in DEFAULTS and len(events) == 1:
            # nanoGPT prints its settings before its first step
            try:
                start["settings"][found[1]] = ast.literal_eval(found[2].strip())
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                continue  # an expression such as 5 * 8, or another program's line
    add_events(run, [*events, {"event": "end", "iter": 0}])
    if tokens_per_step := run.start.get("tokens_per_step"):
        for e in run.evals:
            e["tokens"] = e["iter"] * tokens_per_step
