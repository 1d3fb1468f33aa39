"""Reads training runs: log.jsonl in an out_dir, or the text that nanoGPT printed.

What a log does not say is None. nanoGPT times a step together with the evaluation before it and averages its MFU over
such times; both are taken apart again here.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from deskgpt.run.log import MOST_BYTES, event_of
from deskgpt.system.files import read_small
from train import TrainConfig

NANOGPT_PEAK = 312e12  # FLOP/s that nanoGPT's MFU refers to, whatever the device: an A100 in bfloat16
DEFAULTS = {f.name: f.default for f in fields(TrainConfig)}
# Numbers of a log's events, and texts of its first one.
ITER = ("loss", "time_ms", "mfu", "lr", "grad_norm", "tokens", "train_s", "peak_memory_bytes")
# train.py's numbers; others get charts.
NOT_OWN = {*ITER, "iter", "tokens_per_s", "mfu_measured", "clip_rate", "data_wait"}
EVAL = ("train_loss", "val_loss", "val_se", "val_bpb", "tokens", "train_s", "eval_s", "eval_windows")
START = ("parameters", "flops_per_token", "tokens_per_step", "world_size", "peak_flops", "warm_up_s")
OF_DATA = ("train_tokens", "val_bytes", "val_text_bytes", "bytes_per_token", "vocab_size")
TEXTS = ("tokenizer", "val_sha256", "val_text", "device", "dtype", "attention", "compiler", "git_commit", "peak_source")
MOST_STEPS = 10**15
LARGEST = 1e24  # a number that is larger, or nearer to 0 than 1 / LARGEST, is a mistake of the log

Events = dict[int, dict[str, Any]]  # by step


@dataclass
class Run:
    """A training run. Tokens and seconds of training count from its beginning; evaluation is in neither."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    start: dict[str, Any] = field(default_factory=dict)  # metadata: parameters, tokens_per_step, peak_flops, device ...
    iters: list[dict[str, Any]] = field(default_factory=list)  # ITER by step, each step once; own: further numbers
    evals: list[dict[str, Any]] = field(default_factory=list)  # EVAL by step, eval_digest and val_batches
    end: dict[str, Any] = field(default_factory=dict)  # empty where the run was killed or is still running
    notes: list[str] = field(default_factory=list)  # what a reader of its figures should know
    samples: list[dict[str, Any]] = field(default_factory=list)  # in order: iter, texts

    @property
    def tokens_per_step(self) -> int | None:
        return self.start.get("tokens_per_step")

    @property
    def flops_per_token(self) -> float | None:
        return self.start.get("flops_per_token")

    @property
    def step_ms(self) -> list[float]:
        """Known times of single steps, in order, without the run's first step, which still warms up."""
        known = [(e["iter"], e["time_ms"]) for e in self.iters if e["time_ms"]]
        return [ms for step, ms in known if step > 0] or [ms for _, ms in known]

    @property
    def val(self) -> list[dict[str, Any]]:
        """The evaluations with a finite validation loss."""
        return [e for e in self.evals if e["val_loss"] is not None]

    @property
    def best(self) -> dict[str, Any]:
        """The evaluation with the lowest validation loss; there must be one."""
        return min(self.val, key=lambda e: e["val_loss"])


def number(value: Any) -> float | None:
    """The number; None for what is not a number or what no run can have: NaN, infinity, 1e300."""
    if type(value) not in (int, float):
        return None
    return value if value == 0 or 1 / LARGEST <= abs(value) <= LARGEST else None


def numbers(event: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The named numbers of an event, each None where it is missing or cannot be. Only losses may be below 0."""
    found = {name: number(event.get(name)) for name in names}
    return {name: v if v is None or v >= 0 or name.endswith("loss") else None for name, v in found.items()}


def can_be(name: str, value: Any) -> bool:
    """Whether a setting can have a value: a number where its default is one, otherwise any plain value."""
    is_number = type(DEFAULTS.get(name)) in (int, float)
    return number(value) is not None or (not is_number and isinstance(value, str | bool | None))


# ---- reading -------------------------------------------------------------------------------------------------


def read_run(path: str) -> Run:
    """The run in an out_dir, a log.jsonl or a text file of nanoGPT's, with what follows from its log filled in.

    Raises ValueError where there is no run.
    """
    file = Path(path, "log.jsonl") if Path(path).is_dir() else Path(path)
    try:
        raw = read_small(file, MOST_BYTES)
    except OSError as e:
        raise ValueError(f"{file}: {e.strerror}; name an out_dir with a log.jsonl, or what nanoGPT printed") from None
    encoding = "utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"  # PowerShell writes UTF-16
    text = raw.decode(encoding, errors="replace")
    name = file.resolve().parent.name if file.name == "log.jsonl" else file.stem
    run = Run(name.encode("utf-8", "replace").decode())  # Linux allows names that are not text
    if file.name == "log.jsonl" or text.lstrip("\ufeff \n").startswith("{"):
        add_events(run, [line for line in text.splitlines() if line.strip()])
    elif OURS.search(text):
        raise ValueError(f"{file}: train.py printed this; name the out_dir of the run, whose log.jsonl says more")
    else:
        add_printed(run, text)
    if not run.iters and not run.evals:
        raise ValueError(f"{file} has no line of a training run (step N: train loss ..., iter N: loss ...)")
    complete(run)
    return run


def read_runs(paths: list[str]) -> list[Run]:
    """As `read_run`; of several runs the names begin with A, B, C ..., so that no two are the same."""
    runs = [read_run(path) for path in paths]
    for letter, run in zip(letters(len(runs)), runs, strict=True):
        run.name = f"{letter}: {run.name}" if len(runs) > 1 else run.name
    return runs


def letters(n: int) -> list[str]:
    """Names of n runs: A, B, C ..."""
    return [chr(ord("A") + i) if i < 26 else f"A{i}" for i in range(n)]


def before(events: Events, step: int) -> Events:
    return {i: e for i, e in events.items() if i < step}


def in_order(events: Events) -> list[dict[str, Any]]:
    return [e | {"iter": i} for i, e in sorted(events.items())]


def add_events(run: Run, lines: list[str]) -> None:
    """Fills a run from its log.jsonl. Each step counts once, with its last figures: a resumed run repeats some."""
    seen: dict[str, Events] = {"iter": {}, "eval": {}, "sample": {}}
    n_read = step = 0
    earlier_s = 0.0  # seconds of training before the latest start, whose own count begins at 0
    for line in lines:
        event = event_of(line)
        if event is None or type(event.get("iter", 0)) is not int or not 0 <= event.get("iter", 0) < MOST_STEPS:
            continue
        n_read += 1
        step = event.get("iter", step)
        kind = event["event"]
        if kind == "start":
            begin_again(run, event)
            passed = [*before(seen["iter"], step).values(), seen["eval"].get(step, {})]
            earlier_s = max((e["train_s"] for e in passed if e.get("train_s")), default=0.0)
        if kind in ("start", "rewind"):
            seen = {name: before(events, step) for name, events in seen.items()}
        elif kind == "iter":
            own = {name: number(value) for name, value in event.items() if name not in NOT_OWN and len(name) <= 100}
            seen[kind][step] = numbers(event, ITER) | {"own": {k: v for k, v in own.items() if v is not None}}
        elif kind == "eval":
            means = event.get("val_batches")
            means = means if isinstance(means, list) and None not in map(number, means) else None
            seen[kind][step] = numbers(event, EVAL) | {"eval_digest": event.get("eval_digest"), "val_batches": means}
        elif kind == "sample" and isinstance(event.get("texts"), list) and event["texts"]:
            seen[kind][step] = {"texts": [str(text) for text in event["texts"]]}
        elif kind == "end":
            run.end = event
        if kind in ("iter", "eval") and seen[kind][step]["train_s"] is not None:
            seen[kind][step]["train_s"] += earlier_s
    run.iters = in_order(seen["iter"])
    run.evals = in_order(seen["eval"])
    run.samples = in_order(seen["sample"])
    if not run.end:
        run.notes.append("its log has no end: the run was stopped, failed or is still running")
    if len(lines) > n_read:
        run.notes.append(f"{len(lines) - n_read} unreadable lines of its log are left out")


def begin_again(run: Run, event: dict[str, Any]) -> None:
    """Takes over the settings and the metadata of a start event, of which a resumed run has several."""
    given = event.get("settings")
    settings: dict[str, Any] = DEFAULTS | (given if isinstance(given, dict) else {})
    # In a run from before a setting existed, what is its default now was the only way.
    run.settings = {name: value for name, value in settings.items() if can_be(name, value)}
    start = numbers(event, START + OF_DATA) | {name: event[name] for name in TEXTS if isinstance(event.get(name), str)}
    start |= {name: event[name] for name in ("compiled", "versions") if isinstance(event.get(name), bool | dict)}
    start["warm_up_s"] = (start["warm_up_s"] or 0.0) + run.start.get("warm_up_s", 0.0)
    run.start = {name: value for name, value in start.items() if value is not None}
    run.end = {}


# ---- printed logs --------------------------------------------------------------------------------------------

NUMBER = r"(-?\d+\.?\d*(?:e[+-]?\d+)?|-?inf|nan)"
STEP = re.compile(rf"\bstep (\d{{1,15}}): train loss {NUMBER}, val loss {NUMBER}(?!\d)")
ITERATION = re.compile(rf"\biter (\d{{1,15}}): loss {NUMBER}, time {NUMBER}ms(?:, mfu {NUMBER}%)?")
OURS = re.compile(r"\b(step|iter) \d+: .*, (eval time|tok/s) ")  # only train.py goes on like this
PARAMETERS = re.compile(rf"number of parameters: {NUMBER}M")
TOKENS = re.compile(r"tokens per iteration will be: ([\d,]{1,20})")


def add_printed(run: Run, text: str) -> None:
    """Fills a run from what nanoGPT printed, whatever other lines there are before, between and after its own."""
    seen: dict[re.Pattern[str], Events] = {STEP: {}, ITERATION: {}}
    last = -1
    n_starts = 1
    for whole_line in re.split(r"[\r\n]+", text):
        line = whole_line[:2000]
        if found := STEP.search(line) or ITERATION.search(line):
            step = int(found[1])
            if step < last:  # this run, or another one, started again
                n_starts += 1
                seen = {kind: before(events, step) for kind, events in seen.items()}
            last = step
            if found.re is STEP:
                losses = {"train_loss": float(found[2]), "val_loss": float(found[3])}
                seen[STEP][step] = numbers(losses, EVAL)
            else:  # for its first steps nanoGPT prints an MFU of -100, which is not a figure
                figures = {"loss": float(found[2]), "time_ms": float(found[3]), "mfu": float(found[4] or "nan") / 100}
                seen[ITERATION][step] = numbers(figures, ITER)
        elif found := PARAMETERS.search(line):
            run.start["parameters"] = number(float(found[1]) * 1e6)
        elif found := TOKENS.search(line):
            run.start["tokens_per_step"] = int(found[1].replace(",", "") or 0)
    if n_starts > 1:
        run.notes.append(f"its log begins {n_starts} times; a step computed twice counts with its last figures")
    run.evals = in_order(seen[STEP])
    run.iters = in_order(seen[ITERATION])
    undo_evaluation(run)


def undo_evaluation(run: Run) -> None:
    """Takes evaluation out of the times and the MFU that nanoGPT printed.

    Its time of a step with an evaluation before it includes the evaluation and the saving. It prints 0.9 of the last
    line's MFU and 0.1 of the step's own, so a printed MFU is a constant times a running mean of 1 / ms.
    """
    running = None
    constants = []  # MFU x ms, the same for every step of a run
    for e in run.iters:
        if e["mfu"] is not None and e["time_ms"]:
            running = 1 / e["time_ms"] if running is None else 0.9 * running + 0.1 / e["time_ms"]
            constants.append(e["mfu"] / running)
    evals = {e["iter"]: e for e in run.evals}
    plain = [e["time_ms"] for e in run.iters if e["iter"] > 0 and e["iter"] not in evals and e["time_ms"]]
    for e in run.iters:
        evaluation = evals.get(e["iter"])
        if evaluation and e["iter"] > 0 and e["time_ms"] and plain:
            evaluation["eval_s"] = max(0.0, e["time_ms"] - statistics.median(plain)) / 1e3
        if evaluation or e["iter"] == 0:
            e["time_ms"] = None
    if constants and plain:
        run.start["nanogpt_mfu"] = statistics.median(constants) / statistics.median(plain)


# ---- what a log leaves open ----------------------------------------------------------------------------------


def complete(run: Run) -> None:
    """Fills in what follows from the rest: tokens, seconds of training, FLOPs, bits per byte."""
    start = run.start
    lost = [e["iter"] for e in run.iters + run.evals if e.get("loss", e.get("val_loss")) is None]
    if lost:
        run.notes.append(f"its loss is not a number at step {lost[0]:,}")
    ms = median_ms(run)
    if run.flops_per_token is None and start.get("nanogpt_mfu") and ms and run.tokens_per_step:
        # MFU x seconds x peak are the FLOPs of a step of one GPU.
        start["flops_per_token"] = start["nanogpt_mfu"] * ms / 1e3 * NANOGPT_PEAK / run.tokens_per_step
    bytes_per_token = start.get("bytes_per_token") or (1.0 if start.get("tokenizer") == "bytes" else None)
    for e in run.iters + run.evals:
        steps = e["iter"] + ("val_loss" not in e)  # an evaluation is before its step
        if e["tokens"] is None and run.tokens_per_step:
            e["tokens"] = steps * run.tokens_per_step
        if e["train_s"] is None and ms:
            e["train_s"] = steps * ms / 1e3
        if bytes_per_token and e.get("val_loss") is not None and e["val_bpb"] is None:
            e["val_bpb"] = e["val_loss"] / math.log(2) / bytes_per_token


# ---- figures of a run ----------------------------------------------------------------------------------------


def median_ms(run: Run) -> float | None:
    """The median time of a step."""
    return statistics.median(run.step_ms) if run.step_ms else None


def tokens_per_s(run: Run) -> float | None:
    ms = median_ms(run)
    return run.tokens_per_step / ms * 1e3 if ms and run.tokens_per_step else None


def flops_per_s(run: Run) -> float | None:
    rate = tokens_per_s(run)
    return rate * run.flops_per_token if rate and run.flops_per_token else None


def mfu(run: Run) -> float | None:
    """MFU on the peak of the run's own devices."""
    rate = flops_per_s(run)
    return rate / run.start["peak_flops"] if rate and run.start.get("peak_flops") else None


def nanogpt_mfu(run: Run) -> float | None:
    """MFU as nanoGPT prints it, of an A100's peak whatever the device, without the time of evaluations."""
    rate = flops_per_s(run)
    ours = rate / NANOGPT_PEAK / run.start.get("world_size", 1) if rate else None
    return run.start.get("nanogpt_mfu", ours)


def spent(run: Run, e: dict[str, Any], axis: str) -> float | None:
    """What an evaluation's model has cost until then: steps, tokens, text (bytes), time (s, compiling too), FLOPs."""
    if axis == "steps":
        return e["iter"]
    if axis == "time":
        return e["train_s"] + run.start.get("warm_up_s", 0.0) if e["train_s"] else None
    factor = {"tokens": 1, "text": run.start.get("bytes_per_token"), "FLOPs": run.flops_per_token}[axis]
    return e["tokens"] * factor if e["tokens"] and factor else None


def curve(run: Run, axis: str) -> list[tuple[float, float]]:
    """(amount spent, val loss) of each evaluation after the first step."""
    points = [(spent(run, e, axis), e["val_loss"]) for e in run.val if e["iter"]]
    return [(x, y) for x, y in points if x]


def loss_at(run: Run, axis: str, amount: float) -> float | None:
    """The val loss when this much was spent, linear in log(amount) between evaluations; None outside of them."""
    points = curve(run, axis)
    if not points or not points[0][0] * (1 - 1e-9) <= amount <= points[-1][0] * (1 + 1e-9):
        return None
    x, y = np.array(points).T
    return float(np.interp(math.log(amount), np.log(x), y))
