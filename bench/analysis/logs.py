"""Reads training runs: log.jsonl in an out_dir, or the text that nanoGPT printed.

nanoGPT says less: what it leaves open is None in the Run. It times a step together with the evaluation before it, and
averages its MFU over such times: both are taken apart again here.
"""

from __future__ import annotations

import ast
import functools
import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from bench.analysis.runs import NANOGPT_PEAK, SETTINGS, SIZES, Run, checked_setting, figure, signed
from deskgpt.run.log import MOST_BYTES, read_events
from deskgpt.system.errors import ConfigError
from train import TrainConfig

# Defaults of nanoGPT's train.py that differ from ours, for settings that its log does not echo.
NANOGPT_DEFAULTS: dict[str, Any] = {"lr_decay_iters": 600000, "min_lr": 6e-5, "activation": "gelu", "compile": True}
# Settings that nanoGPT lacks or has other defaults for: where its log does not echo them, they are unknown.
NOT_NANOGPTS = ("device", "dtype", "backend", "seed", "auto_batch", "eval_tokens", "dry_run", "plan_for")

SPEED_FACTS = ("device", "dtype", "attention", "compiled", "world_size")  # where one differs, so does the time

NUMBER = r"(-?\d+\.?\d*(?:e[+-]?\d+)?|-?inf|nan)"
STEP = re.compile(rf"\bstep (\d{{1,15}}): train loss {NUMBER}, val loss {NUMBER}(?!\d)")
ITER = re.compile(rf"\biter (\d{{1,15}}): loss {NUMBER}, time {NUMBER}ms(?:, mfu {NUMBER}%)?")
DAMAGED = re.compile(r"\b(step|iter) \d+: (train )?loss")
OURS = re.compile(r"\b(step|iter) \d+: .*, (eval time|tok/s) ")  # only train.py goes on like this
ECHO = re.compile(r"(?:^|[\s|\]>])(?:Overriding: )?([a-z]\w*)(?:: \w+)? ?= ?([^=].*)$")
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

NO_END = "its log has no end: the run was stopped, failed or is still running"  # one of a run's notes
MOST_STEPS = 10**15
LONGEST_NAME = 100  # characters, of a number that a run logs under a name of its own
LONGEST_LINE = 2000  # characters of a printed line that are read
Events = dict[int, dict[str, Any]]  # by step

# ---- what a line of log.jsonl must be ------------------------------------------------------------------------


def is_count(value: Any) -> bool:
    return type(value) is int and value >= 1 and signed(value) is not None


def is_number(value: Any) -> bool:
    return signed(value) is not None


def is_figure(value: Any) -> bool:
    return figure(value) is not None


def is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def is_results(value: Any) -> bool:
    """Whether these are figures by task and metric, null where a metric has none."""
    if not isinstance(value, dict) or not all(isinstance(of_task, dict) for of_task in value.values()):
        return False
    return all(v is None or is_number(v) for of_task in value.values() for v in of_task.values())


# Fields by name: their type, or what tells whether a value is one.
Kinds = dict[str, type | Callable[[Any], bool]]
ITER_FIELDS: Kinds = {"iter": is_figure, "loss": is_number}
ITER_FIELDS |= dict.fromkeys(("time_ms", "mfu", "tokens_per_s", "lr", "grad_norm", "tokens", "train_s"), is_figure)
NOT_OWN = {*ITER_FIELDS, "event", "mfu_measured", "data_wait", "clip_rate", "peak_memory_bytes"}  # train.py's own
EVAL_FIELDS: Kinds = {"iter": is_figure, "train_loss": is_number, "val_loss": is_number}
EVAL_FIELDS |= dict.fromkeys(("val_se", "val_bpb", "tokens", "train_s", "eval_s"), is_figure)
START_FACTS: Kinds = {"compiled": bool, "explicit_attention": bool, "versions": dict}
START_FACTS |= dict.fromkeys(("parameters", "flops_per_token", "peak_flops", "measured_flops"), is_figure)
START_FACTS |= dict.fromkeys(("bytes_per_token", "warm_up_s"), is_figure)
START_FACTS |= dict.fromkeys(("tokens_per_step", "train_tokens", "val_tokens", "world_size"), is_count)
START_FACTS |= dict.fromkeys(("val_bytes", "val_text_bytes", "vocab_size"), is_count)
START_FACTS |= dict.fromkeys(("tokenizer", "val_sha256", "device", "dtype", "compiler", "git_commit"), str)
START_FACTS |= dict.fromkeys(("peak_source", "val_text", "attention"), str)
END_FACTS: Kinds = dict.fromkeys(("iter", "train_s", "data_wait_s", "eval_s", "save_s", "peak_memory_bytes"), is_figure)
RECORDS: dict[str, Kinds] = {
    "start": START_FACTS | {"settings": dict},
    "iter": ITER_FIELDS,
    "eval": EVAL_FIELDS,
    "sample": {"iter": is_figure, "texts": is_list_of_texts},
    "tasks": {"iter": is_figure, "results": is_results},
    "end": END_FACTS,
}


def is_record(event: dict[str, Any]) -> bool:
    """Whether each field is what a run writes there, or null. Checksums cannot say it of a log that has none."""
    step = event.get("iter", 0)
    if type(step) is not int or not 0 <= step < MOST_STEPS:
        return False
    for name, kind in RECORDS.get(str(event["event"]), {}).items():
        value = event.get(name)
        if value is not None and not (type(value) is kind if isinstance(kind, type) else kind(value)):
            return False
    return True


def read_run(path: str, name: str = "") -> Run:
    """The run in an out_dir, a log.jsonl or what nanoGPT printed. Raises ValueError where that holds no run."""
    file = Path(path)
    if file.is_dir():
        file = file / "log.jsonl"
    try:
        text = read_text(file)
    except OSError as e:
        raise ValueError(f"{file}: {e.strerror}; name an out_dir with a log.jsonl, or what nanoGPT printed") from None

    run = Run(name or file.stem)
    if file.name == "log.jsonl":
        run.name = name or file.resolve().parent.name
    run.name = run.name.encode("utf-8", "replace").decode()  # Linux allows names that are no text
    if file.name == "log.jsonl" or text.lstrip("\ufeff \n").startswith("{"):
        reading = InferenceEngine(run)
        for event in read_events(file):
            reading.add(event)
        run = reading.result(written=sum(1 for line in text.splitlines() if line.strip()))
    elif OURS.search(text):
        raise ValueError(f"{file}: train.py printed this; name the out_dir of the run, whose log.jsonl says more")
    else:
        add_printed(run, text)
    if not run.iters and not run.evals:
        raise ValueError(f"{file} holds no line of a training run (step N: train loss ..., iter N: loss ...)")
    return run


PIECE = 1 << 16  # bytes that are read at once: Python takes the memory for all that it is asked for


def read_text(file: Path) -> str:
    """A log's text, without the colours of a terminal. Raises ValueError where it has more than MOST_BYTES."""
    with open(file, "rb") as log:  # which may be a pipe
        pieces = iter(functools.partial(log.read, PIECE), b"")
        raw = b"".join(itertools.islice(pieces, MOST_BYTES // PIECE + 1))
    if len(raw) > MOST_BYTES:
        raise ValueError(f"{file} has more than {MOST_BYTES:,} bytes, an absurd size for a log")
    encoding = "utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"  # PowerShell writes UTF-16
    return ANSI.sub("", raw.decode(encoding, errors="replace"))


def in_order(events: Events) -> list[dict[str, Any]]:
    return [events[step] for step in sorted(events)]


def before(events: Events, step: int) -> Events:
    """The events of earlier steps."""
    return {i: e for i, e in events.items() if i < step}


# ---- log.jsonl -----------------------------------------------------------------------------------------------


class InferenceEngine:
    """A run as the events of its log.jsonl fill it, one after the other.

    A resumed run computes some steps again: each counts once, with the figures of the last time.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.iters: Events = {}
        self.evals: Events = {}
        self.samples: Events = {}
        self.tasks: Events = {}
        self.read = 0
        self.unverified = 0  # of these, without a checksum
        self.step = 0
        self.trained_s = 0.0  # before the latest start, whose own count begins at 0

    def add(self, e: dict[str, Any]) -> None:
        """Takes in the next event; one that no run writes is left out."""
        if not is_record(e):
            return
        at = e.get("iter", self.step)
        self.step = at
        self.read += 1
        self.unverified += "crc" not in e
        kind = e["event"]
        if kind == "start":
            begin_again(self.run, at, e)
            self.trained_s = seconds_before(at, self.iters, self.evals)
            self.back_to(at)
        elif kind == "rewind":
            self.back_to(at)
        elif kind == "iter":
            self.add_step(e)
        elif kind == "eval":
            self.evals[at] = self.fields(e, EVAL_FIELDS)
        elif kind == "sample":
            self.samples[at] = e
        elif kind == "tasks":
            self.tasks[at] = e
        elif kind == "end":
            self.run.end = named(e, END_FACTS)

    def back_to(self, step: int) -> None:
        """Forgets what was computed from a step on: the run computes it again, an evaluation there too."""
        self.iters = before(self.iters, step)
        self.evals = before(self.evals, step)
        self.samples = before(self.samples, step)
        self.tasks = before(self.tasks, step)

    def add_step(self, e: dict[str, Any]) -> None:
        fields = self.fields(e, ITER_FIELDS)
        own = {name: signed(value) for name, value in e.items() if name not in NOT_OWN and len(name) <= LONGEST_NAME}
        fields["own"] = {name: value for name, value in own.items() if value is not None}
        self.iters[self.step] = fields

    def fields(self, e: dict[str, Any], kinds: Kinds) -> dict[str, Any]:
        """The named fields of an event, with the seconds of training before the latest start added."""
        out = named(e | {"iter": self.step}, kinds)
        if out["train_s"] is not None:
            out["train_s"] += self.trained_s
        return out

    def result(self, written: int) -> Run:
        """The run as the `written` lines so far describe it; further events leave it alone."""
        notes = [*self.run.notes]
        if not self.run.end:
            notes.append(NO_END)
        if written > self.read:
            notes.append(f"{written - self.read} unreadable lines of its log are left out")
        if self.unverified:
            notes.append(f"{self.unverified} lines of its log have no checksum: their figures are unverified")
        return replace(
            self.run,
            start=dict(self.run.start),
            iters=in_order(self.iters),
            evals=in_order(self.evals),
            samples=[e for e in in_order(self.samples) if e.get("texts")],
            tasks=[e for e in in_order(self.tasks) if e.get("results")],
            flops_per_token=self.run.start.get("flops_per_token"),
            notes=notes,
        )


def named(values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The named values, None if they are missing."""
    return {name: values.get(name) for name in names}


def usable_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of train.py among these, and plain values under other names, which another version may have."""
    out: dict[str, Any] = {}
    for name, value in settings.items():
        try:
            if name in SETTINGS:
                out[name] = checked_setting(name, value)
            elif isinstance(value, str | bool) or value is None or signed(value) is not None:
                out[name] = value
        except ConfigError:
            pass  # unknown
    return out


def begin_again(run: Run, step: int, event: dict[str, Any]) -> None:
    """Takes over the settings and the facts of a start event, of which a resumed run has several."""
    given = event.get("settings") or {}
    # In a run from before a setting existed, what is its default now was the only way.
    settings = {f.name: f.default for f in fields(TrainConfig) if f.name not in given} | usable_settings(given)
    start = {name: value for name, value in named(event, START_FACTS).items() if value is not None}
    if "explicit_attention" in start:  # as written until 2026-11-24
        start.setdefault("attention", "explicit" if start.pop("explicit_attention") else "flash")
    model_args = event.get("model_args")
    if isinstance(model_args, dict) and is_count(model_args.get("vocab_size")):
        start["vocab_size"] = model_args["vocab_size"]
    if run.start and has_moved(run, settings, start):
        run.timed_from = step
        run.notes.append(f"from step {step:,} on it had another machine or batch: its speed is that of these steps")
    start["warm_up_s"] = start.get("warm_up_s", 0.0) + run.start.get("warm_up_s", 0.0)
    run.settings = settings
    run.start = start
    run.end = {}


def has_moved(run: Run, settings: dict[str, Any], start: dict[str, Any]) -> bool:
    """Whether batch or machine, and with them the speed, differ from those of the start before."""
    same_batch = all(settings.get(name) == run.settings.get(name) for name in SIZES)
    same_machine = all(start.get(name) == run.start.get(name) for name in SPEED_FACTS)
    return not (same_batch and same_machine)


def seconds_before(step: int, iters: Events, evals: Events) -> float:
    """Seconds of training up to a step; an evaluation there also counts the steps since the last logged one."""
    times = [e["train_s"] for i, e in iters.items() if i < step]
    if step in evals:
        times.append(evals[step]["train_s"])
    return max((seconds for seconds in times if seconds), default=0.0)


# ---- printed logs --------------------------------------------------------------------------------------------


@dataclass
class Printed:
    """What a printed log has shown so far."""

    iters: Events = field(default_factory=dict)
    evals: Events = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # that it echoes; those of the latest start count
    step: int = -1  # the last one; -1 before the first
    starts: int = 1
    damaged: int = 0  # lines

    def advance(self, step: int) -> None:
        """Goes to a step. A smaller number than the last one means that the run, or another one, started again."""
        if step < self.step:
            self.starts += 1
            self.iters = before(self.iters, step + 1)
            self.evals = before(self.evals, step + 1)
        self.step = step


def add_printed(run: Run, text: str) -> None:
    """Fills a run from what nanoGPT printed, with whatever other lines there are before, between and after its own."""
    seen = Printed()
    for whole_line in re.split(r"[\r\n]+", text):
        line = whole_line[:LONGEST_LINE]
        if found := STEP.search(line):
            step = int(found[1])
            seen.evals[step] = printed_eval(found)
            seen.advance(step)
        elif found := ITER.search(line):
            step = int(found[1])
            seen.iters[step] = printed_iter(found)
            seen.advance(step)
        else:
            if DAMAGED.search(line):
                seen.damaged += 1
            read_facts(run, line)
            if echo := ECHO.search(line):
                seen.settings.update(setting(run, echo[1], echo[2]))

    if seen.starts > 1:
        run.notes.append(f"its log begins {seen.starts} times; a step computed twice counts with its last figures")
    if seen.damaged:
        run.notes.append(f"{seen.damaged} damaged lines of its log are left out")
    run.iters = in_order(seen.iters)
    run.evals = in_order(seen.evals)
    settings = nanogpt_defaults() | seen.settings if seen.settings else {}
    run.settings = {name: value for name, value in settings.items() if value is not None}
    undo_evaluation(run)


def printed_eval(found: re.Match[str]) -> dict[str, Any]:
    """The event of a line that STEP found."""
    out: dict[str, Any] = dict.fromkeys(EVAL_FIELDS)
    out["iter"] = int(found[1])
    out["train_loss"] = number(found[2], signed)
    out["val_loss"] = number(found[3], signed)
    return out


def printed_iter(found: re.Match[str]) -> dict[str, Any]:
    """The event of a line that ITER found."""
    out: dict[str, Any] = dict.fromkeys(ITER_FIELDS)
    out["iter"] = int(found[1])
    out["loss"] = number(found[2], signed)
    out["time_ms"] = number(found[3])
    percent = number(found[4])  # for its first steps nanoGPT prints -100, which is no figure
    out["mfu"] = None if percent is None else percent / 100
    return out


def number(text: str | None, kind: Callable[[Any], float | None] = figure) -> float | None:
    """The number, where it is one that a run can have; None if there is no text."""
    return kind(float(text)) if text else None


def read_facts(run: Run, line: str) -> None:
    """Adds what another line of a printed log says about the run."""
    if found := re.search(r"tokens per iteration will be: (\d[\d,]{0,19})", line):
        count = int(found[1].replace(",", ""))
        if is_count(count):
            run.start["tokens_per_step"] = count
    if found := re.search(rf"number of parameters: {NUMBER}M", line):
        millions = number(found[1])
        if millions is not None:
            run.start["parameters"] = millions * 1e6


def setting(run: Run, name: str, text: str) -> dict[str, Any]:
    """{name: value} of a setting as a config file writes it; the value is None if it cannot be read.

    Empty where `name` is not a setting.
    """
    if name not in TrainConfig.__dataclass_fields__:
        return {}
    text = text.partition("#")[0].strip()
    value: Any
    try:
        if "*" in text:
            value = math.prod(float(factor) for factor in text.split("*"))
        else:
            value = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        value = text if re.fullmatch(r"[\w./-]+", text) else None  # nanoGPT echoes strings without quotes
    if SETTINGS[name] is str and value is not None:
        value = str(value)
    try:
        return {name: checked_setting(name, value)}
    except ConfigError:
        run.notes.append(f"it has {name} = {text}, which cannot be read")
        return {name: None}


def nanogpt_defaults() -> dict[str, Any]:
    """The settings of nanoGPT's train.py where its log echoes no other values."""
    ours = {f.name: f.default for f in fields(TrainConfig) if f.default is not MISSING}
    return {name: value for name, value in ours.items() if name not in NOT_NANOGPTS} | NANOGPT_DEFAULTS


# ---- nanoGPT's times and MFU ---------------------------------------------------------------------------------


def undo_evaluation(run: Run) -> None:
    """Takes evaluation out of the times and the MFU that nanoGPT printed.

    Its time of a step with an evaluation before it includes the evaluation and the saving.
    """
    run.start |= {"peak_flops": NANOGPT_PEAK, "peak_source": "nanoGPT's, an A100", "random_evaluation": True}
    mfu_ms = mfu_times_time(run)
    evals = {e["iter"]: e for e in run.evals}
    plain = [e["time_ms"] for e in run.iters if e["iter"] > 0 and e["iter"] not in evals and e["time_ms"]]
    usual = statistics.median(plain) if plain else None
    for e in run.iters:
        evaluation = evals.get(e["iter"])
        if evaluation and e["iter"] > 0 and e["time_ms"] and usual:
            evaluation["eval_s"] = max(0.0, e["time_ms"] - usual) / 1e3
        if evaluation or e["iter"] == 0:
            e["time_ms"] = None
        e["mfu"] = mfu_ms / e["time_ms"] if mfu_ms and e["time_ms"] else None


def mfu_times_time(run: Run) -> float | None:
    """MFU x ms, the same for every step of a run, from the running MFU that nanoGPT prints; None without any.

    It prints 0.9 of the last line's MFU and 0.1 of the step's own. So a printed MFU is this constant times a running
    mean of 1 / ms, which the printed times give.
    """
    running = None
    constants = []
    for e in run.iters:
        if e["mfu"] is not None and e["time_ms"]:
            if running is None:
                running = 1 / e["time_ms"]
            else:
                running = 0.9 * running + 0.1 / e["time_ms"]
            constants.append(e["mfu"] / running)
    return statistics.median(constants) if constants else None
