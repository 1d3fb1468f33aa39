"""Read training runs: the log.jsonl of an out_dir, or the text that nanoGPT printed.

A figure that a log does not have is missing from its event, or None. nanoGPT times a step together
with the evaluation before it, and its MFU is a mean over such times; both are taken apart again
here.
"""

from __future__ import annotations

import ast
import functools
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from deskgpt.files import read_small
from deskgpt.logger import MOST_BYTES, event_of
from deskgpt.resume import WITHOUT_CHOICE
from train import TrainConfig

# FLOP/s that nanoGPT's MFU refers to, whatever the device: an A100 in bfloat16.
NANOGPT_PEAK = 312e12
DEFAULTS = {f.name: f.default for f in fields(TrainConfig)}
# Fields of a log's first event that describe the run: numbers, and texts or booleans.
COUNTS = {
    "parameters",
    "flops_per_token",
    "tokens_per_step",
    "world_size",
    "peak_flops",
    "warm_up_s",
    "train_tokens",
}
DESCRIPTIONS = {
    "tokenizer",
    "val_sha256",
    "device",
    "dtype",
    "residual_dtype",
    "cpu_kernels",
    "compiled",
}
DESCRIPTIONS |= {"git_commit", "peak_source"}
NOT_NEGATIVE = COUNTS | {
    "time_ms",
    "mfu",
    "tokens",
    "train_s",
    "eval_s",
    "val_se",
    "peak_memory_bytes",
}
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
    def tokens_per_step(self) -> int | None:
        return self.start.get("tokens_per_step")

    @property
    def flops_per_token(self) -> float | None:
        return self.start.get("flops_per_token")

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
        """Return the step at which the learning rate has decayed; None if that is not known or it
        is constant.
        """
        if self.settings.get("max_minutes"):  # the other settings are the first plan
            return self.last.get("iter") if self.end else None
        end = self.settings.get("lr_decay_iters") or self.settings.get("max_iters")
        return (
            end
            if type(end) is int and end > 0 and self.settings.get("decay_lr") is not False
            else None
        )

    @property
    def step_ms(self) -> list[float]:
        """Return the known times of single steps, in order, without the run's first step, which
        still warms up.
        """
        known = [(e["iter"], e["time_ms"]) for e in self.iters if e.get("time_ms")]
        return [ms for step, ms in known if step > 0] or [ms for _, ms in known]

    @functools.cached_property
    def median_ms(self) -> float | None:
        return statistics.median(self.step_ms) if self.step_ms else None

    @property
    def tokens_per_s(self) -> float | None:
        ms = self.median_ms
        return self.tokens_per_step / ms * 1e3 if ms and self.tokens_per_step else None

    def mfu(self, peak: float | None) -> float | None:
        """Return the model's FLOP/s over this peak, without the time of evaluations."""
        rate = self.tokens_per_s
        return (
            rate * self.flops_per_token / peak if rate and self.flops_per_token and peak else None
        )


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
    elif OURS.search(text):
        raise ValueError(
            f"{file}: train.py printed this; name the out_dir of the run, whose log.jsonl says more"
        )
    else:
        add_printed(run, text)
    if not run.iters and not run.evals:
        raise ValueError(
            f"{file} has no line of a training run (step N: train loss ..., iter N: loss ...)"
        )
    complete(run)
    return run


def numbers(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an event that are numbers and can be right: no NaN, no infinity, no
    1e300.
    """
    found = {}
    for name, value in event.items():
        if type(value) not in (int, float) or len(name) > 100:
            continue
        can_be_right = value == 0 or 1 / LARGEST <= abs(value) <= LARGEST
        if can_be_right and (value >= 0 or name not in NOT_NEGATIVE):
            found[name] = value
    return found


def add_logged(run: Run, text: str) -> None:
    """Fill a run from its log.jsonl."""
    lines = [line for line in text.splitlines() if line.strip()]
    events = [
        e for e in map(event_of, lines) if e is not None and type(e.setdefault("iter", 0)) is int
    ]
    events = [e for e in events if 0 <= e["iter"] < MOST_STEPS]
    for event in events:
        if event["event"] == "start":
            # In a run from before a setting existed, what is its default now was the only way, or
            # what was then.
            settings = event["settings"] if isinstance(event.get("settings"), dict) else {}
            event["settings"] = DEFAULTS | WITHOUT_CHOICE | settings
    add_events(run, events)
    if not run.end:
        run.notes.append("its log has no end: the run was stopped, failed or is still running")
    if len(lines) > len(events):
        run.notes.append(f"{len(lines) - len(events)} unreadable lines of its log are left out")


def add_events(run: Run, events: list[Event]) -> None:
    """Fill a run from its events.

    Each step counts once, with its last figures: a resumed run repeats some.
    """
    seen: dict[str, dict[int, Event]] = {"iter": {}, "eval": {}, "sample": {}}  # by kind and step
    earlier_s = 0.0  # seconds of training before the latest start, whose own count begins at 0
    for event in events:
        kind, step = event["event"], event["iter"]
        if kind in ("start", "rewind"):
            at_start = seen["eval"].get(step, {})
            seen = {
                name: {i: e for i, e in of_kind.items() if i < step}
                for name, of_kind in seen.items()
            }
        if kind == "start":
            add_start(run, event)
            passed = [*seen["iter"].values(), at_start]
            earlier_s = max((e["train_s"] for e in passed if "train_s" in e), default=0.0)
        elif kind in ("iter", "eval"):
            seen[kind][step] = numbers(event)
            if "train_s" in seen[kind][step]:
                seen[kind][step]["train_s"] += earlier_s
            if event.get("eval_digest"):
                seen[kind][step]["eval_digest"] = str(event["eval_digest"])
        elif kind == "sample" and isinstance(event.get("texts"), list) and event["texts"]:
            seen[kind][step] = {"iter": step, "texts": [str(text) for text in event["texts"]]}
        elif kind == "end":
            run.end = event
    run.iters, run.evals, run.samples = (
        [of_kind[i] for i in sorted(of_kind)] for of_kind in seen.values()
    )


def add_start(run: Run, event: Event) -> None:
    """Take over the settings and the metadata of a start event, of which a resumed run has
    several.
    """
    plain = {name: v for name, v in event["settings"].items() if isinstance(v, str | bool | None)}
    settings = plain | numbers(event["settings"])
    if settings.get("init_from") in ("resume", "auto"):  # the run began earlier
        settings["init_from"] = run.settings.get("init_from")
    start: dict[str, Any] = {
        name: value for name, value in numbers(event).items() if name in COUNTS
    }
    start |= {
        name: event[name]
        for name in sorted(DESCRIPTIONS)
        if isinstance(event.get(name), str | bool)
    }
    if isinstance(event.get("versions"), dict):
        start["versions"] = ", ".join(
            f"{name} {value}" for name, value in event["versions"].items()
        )
    if "warm_up_s" in start:
        start["warm_up_s"] += run.start.get("warm_up_s", 0.0)
    run.settings, run.start, run.end = settings, start, {}


# ---- printed logs --------------------------------------------------------------------------------

NUMBER = r"(-?\d+\.?\d*(?:e[+-]?\d+)?|-?inf|nan)"
STEP = re.compile(rf"\bstep (\d{{1,15}}): train loss {NUMBER}, val loss {NUMBER}(?!\d)")
ITERATION = re.compile(rf"\biter (\d{{1,15}}): loss {NUMBER}, time {NUMBER}ms(?:, mfu {NUMBER}%)?")
# Only train.py's lines go on like this.
OURS = re.compile(r"\b(step|iter) \d+: .*, (eval time|bits per byte|tok/s) ")
PARAMETERS = re.compile(rf"number of parameters: {NUMBER}M")
TOKENS = re.compile(r"tokens per iteration will be: ([\d,]{1,20})")
# Of the command line, or of a config file.
SETTING = re.compile(r"^(?:Overriding: )?(\w+)\s*=\s*([^#]+)")


def add_printed(run: Run, text: str) -> None:
    """Fill a run from what nanoGPT printed, whatever other lines there are before, between and
    after its own.
    """
    start: Event = {"event": "start", "iter": 0, "settings": {}}
    events = [start]
    for line in re.split(r"[\r\n]+", text):
        line = line[:2000]
        if found := STEP.search(line):
            event = {
                "event": "eval",
                "iter": int(found[1]),
                "train_loss": float(found[2]),
                "val_loss": float(found[3]),
            }
        elif found := ITERATION.search(line):
            event = {
                "event": "iter",
                "iter": int(found[1]),
                "loss": float(found[2]),
                "time_ms": float(found[3]),
            }
            # -1 for its first steps, which is not a figure
            event["mfu"] = float(found[4] or "nan") / 100
        else:
            if len(events) == 1:  # nanoGPT prints its settings before its first step
                add_metadata(start, line)
            continue
        if event["iter"] < events[-1]["iter"]:  # this run, or another one, started again
            events.append({"event": "rewind", "iter": event["iter"]})
        events.append(event)
    n_rewinds = sum(event["event"] == "rewind" for event in events)
    if n_rewinds:
        run.notes.append(
            f"its log begins {n_rewinds + 1} times; a step computed twice counts with its "
            "last figures"
        )
    add_events(run, [*events, {"event": "end", "iter": events[-1]["iter"]}])
    undo_evaluation(run)


def add_metadata(start: Event, line: str) -> None:
    """Add to a start event what a line says about the run, if it says something."""
    if found := PARAMETERS.search(line):
        start["parameters"] = float(found[1]) * 1e6
    elif found := TOKENS.search(line):
        start["tokens_per_step"] = int(found[1].replace(",", "") or 0)
    elif (found := SETTING.search(line)) and found[1] in DEFAULTS:
        try:
            start["settings"][found[1]] = ast.literal_eval(found[2].strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return  # an expression such as 5 * 8, or another program's line


def undo_evaluation(run: Run) -> None:
    """Take evaluation out of the times and the MFU that nanoGPT printed.

    Its time of a step with an evaluation before it includes the evaluation and the saving. It
    prints 0.9 of the last line's MFU and 0.1 of the step's own, so a printed MFU is a constant
    times a running mean of 1 / ms.
    """
    running = None
    constants = []  # MFU x ms, the same for every step of a run
    evaluated = {0, *(e["iter"] for e in run.evals)}
    for e in run.iters:
        if "mfu" in e and e.get("time_ms"):
            running = 1 / e["time_ms"] if running is None else 0.9 * running + 0.1 / e["time_ms"]
            constants.append(e["mfu"] / running)
        if e["iter"] in evaluated:
            e.pop("time_ms", None)
    if constants and run.median_ms:
        run.start["nanogpt_mfu"] = statistics.median(constants) / run.median_ms


# ---- what a log leaves open ----------------------------------------------------------------------


def complete(run: Run) -> None:
    """Fill in what follows from the rest: tokens, seconds of training, FLOPs."""
    lost = [e["iter"] for e in run.iters if "loss" not in e] + [
        e["iter"] for e in run.evals if "val_loss" not in e
    ]
    if lost:
        run.notes.append(f"its loss is not a number at step {min(lost):,}")
    add_flops(run)
    ms = run.median_ms
    for e, steps in [(e, e["iter"] + 1) for e in run.iters] + [(e, e["iter"]) for e in run.evals]:
        if run.tokens_per_step:
            e.setdefault("tokens", steps * run.tokens_per_step)
        if ms:
            e.setdefault("train_s", steps * ms / 1e3)


def add_flops(run: Run) -> None:
    """Add the FLOPs per token of a nanoGPT run and, if it is above one, its number of GPUs.

    MFU x seconds x peak are the FLOPs of one GPU, tokens_per_step the tokens of all, and the log
    does not say how many there are. A token takes at least 6 FLOPs per parameter, and hardly twice
    as many, so it is the lowest power of two that gives as many.
    """
    mfu = run.start.get("nanogpt_mfu")
    if not mfu or not run.median_ms or not run.tokens_per_step:
        return
    of_one_gpu = mfu * run.median_ms / 1e3 * NANOGPT_PEAK / run.tokens_per_step
    at_least = 6 * (run.start.get("parameters", 0.0) - 5e3)  # it is printed in M, to two places
    gpus = next((2**i for i in range(13) if 2**i * of_one_gpu >= at_least), 0)
    if gpus:
        run.start["flops_per_token"] = gpus * of_one_gpu
    if gpus > 1:
        run.start["world_size"] = gpus
        run.notes.append(
            f"taken for a run on {gpus} GPUs, because its MFU is of one and its tokens are of all"
        )
