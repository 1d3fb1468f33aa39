"""Reads training runs: log.jsonl in an out_dir, or the text that nanoGPT or train.py printed.

Printed logs say less: what they leave open is None in the Run. nanoGPT times a step together with the evaluation before
it, and averages its MFU over such times: both are taken apart again here.
"""

from __future__ import annotations

import ast
import math
import re
import statistics
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from bench.analysis.runs import NANOGPT_PEAK, SETTINGS, SIZES, Run, checked_setting, figure, signed
from deskgpt.machine.errors import ConfigError
from deskgpt.run.log import read_events
from train import TrainConfig

# Defaults of nanoGPT's train.py that differ from ours, for settings that its log does not echo.
NANOGPT_DEFAULTS: dict[str, Any] = {"lr_decay_iters": 600000, "min_lr": 6e-5, "activation": "gelu", "compile": True}
# Settings that nanoGPT lacks or has other defaults for: where its log does not echo them, they are unknown.
NOT_NANOGPTS = ("device", "dtype", "backend", "seed", "auto_batch", "eval_tokens", "dry_run", "plan_for")

SPEED_FACTS = ("device", "dtype", "compiled", "world_size")  # where one differs, steps take another time

NUMBER = r"(-?\d+\.?\d*(?:e[+-]?\d+)?|-?inf|nan)"
COUNT = r"(\d[\d,]{0,19})"
STEP = re.compile(
    rf"\bstep (\d{{1,15}}): train loss {NUMBER}, val loss {NUMBER}(?!\d)"
    rf"(?:, eval time {NUMBER}s)?(?:, standard error {NUMBER})?"
    rf"(?:, bits per byte {NUMBER})?"
)
ITER = re.compile(rf"\biter (\d{{1,15}}): loss {NUMBER}, time {NUMBER}ms(?:, mfu {NUMBER}%)?(.*)")
DAMAGED = re.compile(r"\b(step|iter) \d+: (train )?loss")
# Only train.py goes on like this.
OURS = re.compile(rf"tok/s (\d[\d,]*)(?:, mfu_measured {NUMBER}%)?, lr {NUMBER}, grad_norm {NUMBER}")
ECHO = re.compile(r"(?:^|[\s|\]>])(?:Overriding: )?([a-z]\w*)(?:: \w+)? ?= ?([^=].*)$")
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

NO_END = "its log has no end: the run was stopped, failed or is still running"  # one of a run's notes
MOST_STEPS = 10**15
LONGEST_NAME = 100  # characters, of a number that a run logs under a name of its own
LONGEST_LINE = 2000  # characters of a printed line that are read
Events = dict[int, dict[str, Any]]  # by step

# ---- what a value of a log must be ---------------------------------------------------------------------------


def as_count(value: Any) -> int | None:
    """The whole number of at least 1; None for anything else."""
    return value if type(value) is int and value >= 1 and signed(value) else None


def of_type(kind: type) -> Callable[[Any], Any]:
    """Gives back values of this type, and None for any other."""
    return lambda value: value if isinstance(value, kind) else None


def as_texts(value: Any) -> list[str] | None:
    return value if isinstance(value, list) and all(isinstance(text, str) for text in value) else None


def as_results(value: Any) -> dict[str, dict[str, float]] | None:
    """Figures by task and metric, without those that are not numbers."""
    if not isinstance(value, dict) or not all(isinstance(of_task, dict) for of_task in value.values()):
        return None
    known = {}
    for task, of_task in value.items():
        known[task] = {metric: v for metric, v in of_task.items() if signed(v) is not None}
    return known


def as_versions(value: Any) -> dict[str, str] | None:
    return {name: str(version) for name, version in value.items()} if isinstance(value, dict) else None


# By name, a function that gives back a value that can be used, and None for any other.
Kinds = dict[str, Callable[[Any], Any]]
ITER_FIELDS: Kinds = {"iter": figure, "loss": signed}
ITER_FIELDS |= dict.fromkeys(("time_ms", "mfu", "tokens_per_s", "lr", "grad_norm", "tokens", "train_s"), figure)
NOT_OWN = {*ITER_FIELDS, "event", "mfu_measured", "data_wait", "clip_rate", "peak_memory_bytes"}  # train.py's own
EVAL_FIELDS: Kinds = {"iter": figure, "train_loss": signed, "val_loss": signed}
EVAL_FIELDS |= dict.fromkeys(("val_se", "val_bpb", "tokens", "train_s", "eval_s"), figure)
SAMPLE_FIELDS: Kinds = {"iter": figure, "texts": as_texts}
TASKS_FIELDS: Kinds = {"iter": figure, "results": as_results}
START_FACTS: Kinds = {"compiled": of_type(bool), "versions": as_versions}
START_FACTS |= dict.fromkeys(("parameters", "flops_per_token", "peak_flops", "measured_flops"), figure)
START_FACTS |= dict.fromkeys(("bytes_per_token", "warm_up_s"), figure)
START_FACTS |= dict.fromkeys(("tokens_per_step", "train_tokens", "val_tokens", "world_size"), as_count)
START_FACTS |= dict.fromkeys(("val_bytes", "val_text_bytes", "vocab_size"), as_count)
START_FACTS |= dict.fromkeys(("tokenizer", "val_sha256", "device", "dtype", "compiler", "git_commit"), of_type(str))
START_FACTS |= dict.fromkeys(("peak_source", "val_text"), of_type(str))
END_FACTS: Kinds = dict.fromkeys(("iter", "train_s", "data_wait_s", "eval_s", "save_s", "peak_memory_bytes"), figure)


def read_run(path: str, name: str = "") -> Run:
    """The run in an out_dir, a log.jsonl or a printed log. Raises ValueError where that holds no run."""
    file = Path(path)
    if file.is_dir():
        file = file / "log.jsonl"
    try:
        text = read_text(file)
    except OSError as e:
        raise ValueError(f"{file}: {e.strerror}; name an out_dir with a log.jsonl, or a printed log") from None

    run = Run(name or file.stem)
    if file.name == "log.jsonl":
        run.name = name or file.resolve().parent.name
    run.name = run.name.encode("utf-8", "replace").decode()  # Linux allows names that are no text
    if file.name == "log.jsonl" or text.lstrip("\ufeff \n").startswith("{"):
        reading = Reading(run)
        for event in read_events(file):
            reading.add(event)
        run = reading.result(written=sum(1 for line in text.splitlines() if line.strip()))
    else:
        add_printed(run, text)
    if not run.iters and not run.evals:
        raise ValueError(f"{file} holds no line of a training run (step N: train loss ..., iter N: loss ...)")
    return run


def read_text(file: Path) -> str:
    """A log's text, without the colours of a terminal."""
    raw = file.read_bytes()
    encoding = "utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"  # PowerShell writes UTF-16
    return ANSI.sub("", raw.decode(encoding, errors="replace"))


def in_order(events: Events) -> list[dict[str, Any]]:
    return [events[step] for step in sorted(events)]


def before(events: Events, step: int) -> Events:
    """The events of earlier steps."""
    return {i: e for i, e in events.items() if i < step}


# ---- log.jsonl -----------------------------------------------------------------------------------------------


class Reading:
    """A run as the events of its log.jsonl fill it, one after the other.

    A resumed run computes some steps again: each counts once, with the figures of the last time. most_steps: of more
    logged steps, every second, fourth ... is kept, and the last.
    """

    def __init__(self, run: Run, most_steps: int | None = None) -> None:
        self.run = run
        self.most_steps = most_steps
        self.kept_every = 1  # 1: all logged steps
        self.seen_steps = 0
        self.iters: Events = {}
        self.evals: Events = {}
        self.samples: Events = {}
        self.tasks: Events = {}
        self.last: Events = {}  # the last logged step
        self.read = 0
        self.unverified = 0  # of these, without a checksum
        self.step = 0
        self.trained_s = 0.0  # before the latest start, whose own count begins at 0

    def add(self, e: dict[str, Any]) -> None:
        """Takes in the next event; one that no run has is left out."""
        at = e.get("iter", self.step)
        settings = e.get("settings") or {}
        if type(at) is not int or not 0 <= at < MOST_STEPS or not isinstance(settings, dict):
            return
        self.step = at
        self.read += 1
        self.unverified += "crc" not in e
        kind = e["event"]
        if kind == "start":
            begin_again(self.run, at, e, settings)
            self.trained_s = seconds_before(at, self.iters, self.evals)
            self.back_to(at)
        elif kind == "rewind":
            self.back_to(at)
        elif kind == "iter":
            self.add_step(e)
        elif kind == "eval":
            self.evals[at] = self.fields(e, EVAL_FIELDS)
        elif kind == "sample":
            self.samples[at] = usable(e, SAMPLE_FIELDS)
        elif kind == "tasks":
            self.tasks[at] = usable(e, TASKS_FIELDS)
        elif kind == "end":
            self.run.end = usable(e, END_FACTS)

    def back_to(self, step: int) -> None:
        """Forgets what was computed from a step on: the run computes it again, an evaluation there too."""
        self.iters = before(self.iters, step)
        self.evals = before(self.evals, step)
        self.samples = before(self.samples, step)
        self.tasks = before(self.tasks, step)
        self.last = before(self.last, step)

    def add_step(self, e: dict[str, Any]) -> None:
        fields = self.fields(e, ITER_FIELDS)
        own = {name: signed(value) for name, value in e.items() if name not in NOT_OWN and len(name) <= LONGEST_NAME}
        fields["own"] = {name: value for name, value in own.items() if value is not None}
        self.last = {self.step: fields}
        if self.seen_steps % self.kept_every == 0:
            self.iters[self.step] = fields
        self.seen_steps += 1
        if self.most_steps and len(self.iters) > self.most_steps:
            self.kept_every *= 2
            self.iters = dict(list(self.iters.items())[::2])

    def fields(self, e: dict[str, Any], kinds: Kinds) -> dict[str, Any]:
        """The usable fields of an event, with the seconds of training before the latest start added."""
        out = usable(e | {"iter": self.step}, kinds)
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
        if self.kept_every > 1:
            notes.append(f"one of {self.kept_every} logged steps is shown, so that the page stays quick")
        return replace(
            self.run,
            start=dict(self.run.start),
            iters=in_order(self.iters | self.last),
            evals=in_order(self.evals),
            samples=[e for e in in_order(self.samples) if e["texts"]],
            tasks=[e for e in in_order(self.tasks) if e["results"]],
            flops_per_token=self.run.start.get("flops_per_token"),
            notes=notes,
        )


def usable(values: dict[str, Any], kinds: Kinds) -> dict[str, Any]:
    """The named values, None where they are missing or not what they must be."""
    return {name: kind(values.get(name)) for name, kind in kinds.items()}


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


def begin_again(run: Run, step: int, event: dict[str, Any], given: dict[str, Any]) -> None:
    """Takes over the given settings and the facts of a start event, of which a resumed run has several."""
    # In a run from before a setting existed, what is its default now was the only way.
    settings = {f.name: f.default for f in fields(TrainConfig) if f.name not in given} | usable_settings(given)
    model_args = event.get("model_args")
    sizes = {"vocab_size": model_args.get("vocab_size")} if isinstance(model_args, dict) else {}
    facts = usable(event | sizes, START_FACTS)
    start = {name: value for name, value in facts.items() if value is not None}
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
    settings: dict[str, Any] = field(default_factory=dict)  # echoed before the first steps
    next_settings: dict[str, Any] = field(default_factory=dict)  # echoed after them, by a later start
    step: int = -1  # the last one; -1 before the first
    starts: int = 1
    damaged: int = 0  # lines
    is_ours: bool = False  # train.py printed it

    def advance(self, step: int) -> None:
        """Goes to a step. A smaller number than the last one means that the run, or another one, started again."""
        if step < self.step:
            self.starts += 1
            self.settings = self.next_settings or self.settings
            self.next_settings = {}
            self.iters = before(self.iters, step + 1)
            self.evals = before(self.evals, step + 1)
        self.step = step


def add_printed(run: Run, text: str) -> None:
    """Fills a run from a printed log, with whatever other lines there are before, between and after its own."""
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
            seen.is_ours = seen.is_ours or OURS.search(found[5]) is not None
            seen.advance(step)
        else:
            if DAMAGED.search(line):
                seen.damaged += 1
            read_facts(run, line)
            if echo := ECHO.search(line):
                echoed = seen.settings if seen.step < 0 else seen.next_settings
                echoed.update(setting(run, echo[1], echo[2]))

    if seen.starts > 1:
        run.notes.append(f"its log begins {seen.starts} times; a step computed twice counts with its last figures")
    if seen.damaged:
        run.notes.append(f"{seen.damaged} damaged lines of its log are left out")
    run.iters = in_order(seen.iters)
    run.evals = in_order(seen.evals)
    settings = seen.settings
    if settings and not seen.is_ours:
        settings = nanogpt_defaults() | settings
    run.settings = {name: value for name, value in settings.items() if value is not None}
    if not seen.is_ours:
        undo_evaluation(run)


def printed_eval(found: re.Match[str]) -> dict[str, Any]:
    """The event of a line that STEP found."""
    out: dict[str, Any] = dict.fromkeys(EVAL_FIELDS)
    out["iter"] = int(found[1])
    out["train_loss"] = number(found[2], signed)
    out["val_loss"] = number(found[3], signed)
    out["eval_s"] = number(found[4])
    out["val_se"] = number(found[5])
    out["val_bpb"] = number(found[6])
    return out


def printed_iter(found: re.Match[str]) -> dict[str, Any]:
    """The event of a line that ITER found."""
    out: dict[str, Any] = dict.fromkeys(ITER_FIELDS)
    out["iter"] = int(found[1])
    out["loss"] = number(found[2], signed)
    out["time_ms"] = number(found[3])
    percent = number(found[4])  # for its first steps nanoGPT prints -100, which is no figure
    out["mfu"] = None if percent is None else percent / 100
    if more := OURS.search(found[5]):
        out["tokens_per_s"] = number(more[1])
        out["lr"] = number(more[3])
        out["grad_norm"] = number(more[4])
    return out


def number(text: str | None, kind: Callable[[Any], float | None] = figure) -> float | None:
    """The number, where it is one that a run can have; None where there is no text."""
    return kind(float(text.replace(",", ""))) if text else None


def read_facts(run: Run, line: str) -> None:
    """Adds what another line of a printed log says about the run, in nanoGPT's words or train.py's."""
    facts: dict[str, Any] = {}
    if found := re.search(rf"tokens per iteration will be: {COUNT}", line):
        facts["tokens_per_step"] = counted(found[1])
    if found := re.search(rf"number of parameters: {NUMBER}M(?:, {NUMBER} MFLOPs per token)?", line):
        facts["parameters"] = in_units(found[1], 1e6)
        run.flops_per_token = in_units(found[2], 1e6)
    if found := re.search(rf"\bmfu refers to {NUMBER} TFLOP/s \((.*?)\);", line):
        facts["peak_flops"] = in_units(found[1], 1e12)
        facts["peak_source"] = found[2]
    if found := re.search(rf"\bdevice: {COUNT} x (.*), (float32|bfloat16|float16), (not )?compiled", line):
        facts["world_size"] = counted(found[1])
        facts["device"] = found[2]
        facts["dtype"] = found[3]
        facts["compiled"] = not found[4]
    if found := re.search(rf"\bdata: .*, {COUNT} train and {COUNT} val tokens", line):
        facts["val_tokens"] = counted(found[2])
    run.start |= {name: value for name, value in facts.items() if value is not None}


def counted(text: str) -> int | None:
    return as_count(int(text.replace(",", "")))


def in_units(text: str | None, unit: float) -> float | None:
    value = number(text)
    return None if value is None else value * unit


def setting(run: Run, name: str, text: str) -> dict[str, Any]:
    """{name: value} of a setting as a config file writes it; the value is None where it cannot be read.

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
    printed = [e["mfu"] for e in run.iters if e["mfu"] is not None]
    if printed:
        run.start["printed_mfu"] = printed[-1]

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
