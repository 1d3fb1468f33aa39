"""A training run as its log tells it: an out_dir with log.jsonl, or the text that nanoGPT or train.py printed.

Printed logs say less: what they leave open is None here, can be given by hand (`give`), or follows from what they do
say (`complete`). nanoGPT's timer holds evaluation, and its running MFU with it: both are taken apart again.
"""

from __future__ import annotations

import ast
import json
import math
import re
import statistics
from bisect import bisect_right
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from configurator import read_settings
from train import TrainConfig

NANOGPT_PEAK = 312e12  # FLOP/s that nanoGPT's MFU refers to, whatever the device: an A100 in bfloat16
# What nanoGPT's train.py has where its log echoes settings but not these; the other defaults are ours as well.
NANOGPT_DEFAULTS: dict[str, Any] = {"lr_decay_iters": 600000, "min_lr": 6e-5, "activation": "gelu", "compile": True}
UNSAID = (
    "device",
    "dtype",
    "backend",
    "seed",
    "auto_batch",
    "eval_tokens",
    "dry_run",
)  # it has others, or none of these
# Facts of a run that are not settings, and can be given by hand all the same.
FACTS = {"parameters": float, "tokens_per_step": int, "tokenizer": str, "val_tokens": int, "bytes_per_token": float}
FACTS |= {"world_size": int, "peak_flops": float, "gpu": str}

SIZES = ("batch_size", "gradient_accumulation_steps", "block_size")  # whose product is the tokens of a step
MODEL = ("n_layer", "n_embd", "block_size")  # what attention's FLOPs follow from

NUMBER = r"(-?\d+\.?\d*(?:e[+-]?\d+)?|-?inf|nan)"
STEP = re.compile(
    rf"\bstep (\d+): train loss {NUMBER}, val loss {NUMBER}(?!\d)"
    rf"(?:, eval time {NUMBER}s)?(?:, standard error {NUMBER})?"
)
ITER = re.compile(rf"\biter (\d+): loss {NUMBER}, time {NUMBER}ms(?:, mfu {NUMBER}%)?(.*)")
OURS = re.compile(rf"tok/s ([\d,]+), lr {NUMBER}, grad_norm {NUMBER}")
ECHO = re.compile(r"(?:^|[\s|\]>])(?:Overriding: )?([a-z]\w*)(?:: \w+)? ?= ?([^=].*)$")
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass
class Run:
    """iters hold iter, loss, time_ms, mfu (a share, of the step alone), tokens_per_s, lr, grad_norm, tokens, train_s;
    evals hold iter, train_loss, val_loss, val_se (standard error), tokens, train_s, eval_s. None is unknown.
    tokens and train_s count from the run's beginning up to that point, train_s without evaluation, in seconds."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    start: dict[str, Any] = field(default_factory=dict)  # facts: parameters, tokens_per_step, peak_flops, device ...
    iters: list[dict[str, Any]] = field(default_factory=list)  # in order, each step once
    evals: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)  # {} where the run was killed or still goes on
    flops_per_token: float | None = None
    notes: list[str] = field(default_factory=list)  # what was odd
    timed_from: int = 0  # the first step on the machine, and with the batch, that start and settings speak of

    @property
    def tokens_per_step(self) -> int | None:
        return self.start.get("tokens_per_step")

    @property
    def step_ms(self) -> list[float]:
        """Times of single steps, in order: those known, but for a run's first, which still warms up."""
        known = [(e["iter"], e["time_ms"]) for e in self.iters if e["time_ms"] and e["iter"] >= self.timed_from]
        return [ms for i, ms in known if i > 0] or [ms for _, ms in known]

    @property
    def val(self) -> list[dict[str, Any]]:
        """The evaluations with a finite validation loss."""
        return [e for e in self.evals if e["val_loss"] is not None]

    @property
    def best(self) -> dict[str, Any]:
        """The evaluation with the lowest validation loss; there must be one."""
        return min(self.val, key=lambda e: e["val_loss"])

    def scatter(self) -> float | None:
        """Standard deviation of an evaluation around the smooth curve, from second differences.

        For independent errors the second difference has 1 + 4 + 1 times their variance; the later half of the
        evaluations is taken, where the curve itself bends little. None for fewer than eight there, and where each
        evaluation read the same tokens: their errors are the same then, and scatter tells nothing of them.
        """
        late = [e["val_loss"] for e in self.val][len(self.val) // 2 :]
        if len(late) < 8 or not self.start.get("random_evaluation"):
            return None
        second = [a - 2 * b + c for a, b, c in zip(late, late[1:], late[2:], strict=False)]
        return math.sqrt(statistics.fmean(d * d for d in second) / 6)


def read_run(path: str, name: str = "") -> Run:
    """The run in an out_dir, a log.jsonl or a printed log. Raises ValueError where there is none."""
    at = Path(path)
    at = at / "log.jsonl" if at.is_dir() else at
    try:
        raw = at.read_bytes()
    except OSError as e:
        raise ValueError(f"{at}: {e.strerror}; name an out_dir with a log.jsonl, or a printed log") from None
    encoding = "utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"  # what PowerShell writes
    text = ANSI.sub("", raw.decode(encoding, errors="replace"))
    run = Run(name or (at.resolve().parent.name if at.name == "log.jsonl" else at.stem))
    read = read_events if text.lstrip("\ufeff \n").startswith("{") or at.name == "log.jsonl" else read_printed
    read(run, text)
    if not run.iters and not run.evals:
        raise ValueError(f"{at} holds no line of a training run (step N: train loss ..., iter N: loss ...)")
    return run


def read_events(run: Run, text: str) -> None:
    """log.jsonl; of a resumed run what it computed twice counts once, as it was the last time."""
    iters: dict[int, dict[str, Any]] = {}
    evals: dict[int, dict[str, Any]] = {}
    torn, at, before = 0, 0, 0.0
    for line in text.splitlines():
        try:
            e = json.loads(line)
            kind = e.pop("event")
            at = int(e.get("iter", at))
            e["settings"] = dict(e.get("settings") or {})
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            torn += bool(line.strip())
            continue
        if kind == "start":
            # a run from before a setting existed did what is its default now
            settings = {f.name: f.default for f in fields(TrainConfig)} | e.pop("settings", {})
            if moved(run, settings, e):
                run.timed_from = at
                run.notes.append(f"from step {at:,} on it had another machine or batch: speed is that of these steps")
            e["warm_up_s"] = (e.get("warm_up_s") or 0.0) + (run.start.get("warm_up_s") or 0.0)
            run.settings, run.start = settings, e
            before = max((x["train_s"] or 0.0 for x in iters.values() if x["iter"] < at), default=0.0)
            if at in evals:  # which counts the steps since the last line as well
                before = max(before, evals[at]["train_s"] or 0.0)
            iters = {i: x for i, x in iters.items() if i < at}
            evals = {i: x for i, x in evals.items() if i < at}  # it evaluates there again
            run.end = {}
        elif kind in ("iter", "eval"):
            names = ITER_FIELDS if kind == "iter" else EVAL_FIELDS
            e = {k: finite(e.get(k)) for k in names} | {"iter": at}
            if e["train_s"] is not None:
                e["train_s"] += before  # each start counts from zero
            (iters if kind == "iter" else evals)[at] = e
        elif kind == "end":
            run.end = e
    run.iters, run.evals = ([x[i] for i in sorted(x)] for x in (iters, evals))
    run.flops_per_token = run.start.get("flops_per_token")
    if not run.end:
        run.notes.append("its log has no end: the run was stopped, failed or still goes on")
    if torn:
        run.notes.append(f"{torn} unreadable lines of its log are left out")


def moved(run: Run, settings: dict[str, Any], start: dict[str, Any]) -> bool:
    """Whether what makes the speed differs from the start before."""
    facts = ("device", "dtype", "compiled", "world_size")
    same = all(settings.get(k) == run.settings.get(k) for k in SIZES)
    return bool(run.start) and not (same and all(start.get(k) == run.start.get(k) for k in facts))


ITER_FIELDS = ("iter", "loss", "time_ms", "mfu", "tokens_per_s", "lr", "grad_norm", "tokens", "train_s")
EVAL_FIELDS = ("iter", "train_loss", "val_loss", "val_se", "tokens", "train_s", "eval_s")


def read_printed(run: Run, text: str) -> None:
    """A printed log, with whatever stands before, between and behind its lines."""
    iters: dict[int, dict[str, Any]] = {}
    evals: dict[int, dict[str, Any]] = {}
    echoed: dict[str, Any] = {}
    again: dict[str, Any] = {}  # echoed behind the first steps, by a later start
    runs, torn, last, ours = 1, 0, -1, False
    for line in re.split(r"[\r\n]+", text):
        if found := STEP.search(line):
            i = int(found[1])
            e = dict.fromkeys(EVAL_FIELDS) | {"iter": i, "train_loss": number(found[2]), "val_loss": number(found[3])}
            evals[i] = e | {"eval_s": number(found[4]), "val_se": number(found[5])}
        elif found := ITER.search(line):
            i = int(found[1])
            e = dict.fromkeys(ITER_FIELDS) | {"iter": i, "loss": number(found[2]), "time_ms": number(found[3])}
            e["mfu"] = None if found[4] is None or number(found[4]) in (None, -100.0) else float(found[4]) / 100
            if more := OURS.search(found[5]):
                ours = True
                e |= {"tokens_per_s": float(more[1].replace(",", "")), "lr": number(more[2])}
                e["grad_norm"] = number(more[3])
            iters[i] = e
        else:
            torn += bool(re.search(r"\b(step|iter) \d+: (train )?loss", line))
            read_facts(run, line)
            if echo := ECHO.search(line):
                (echoed if last < 0 else again).update(setting(run, *echo.groups()))
            continue
        if i < last:  # resumed, or another run behind the first
            echoed, again = again or echoed, {}
            iters = {k: e for k, e in iters.items() if k <= i}
            evals = {k: e for k, e in evals.items() if k <= i}
            runs += 1
        last = i
    if runs > 1:
        run.notes.append(f"its log begins {runs} times; what was computed twice counts as it was the last time")
    if torn:
        run.notes.append(f"{torn} damaged lines of its log are left out")
    run.iters, run.evals = ([x[i] for i in sorted(x)] for x in (iters, evals))
    if echoed and not ours:
        defaults = {f.name: f.default for f in fields(TrainConfig) if f.default is not MISSING and f.name not in UNSAID}
        echoed = defaults | NANOGPT_DEFAULTS | echoed
    run.settings = {k: v for k, v in echoed.items() if v is not None}
    if not ours:
        undo_evaluation(run)


def read_facts(run: Run, line: str) -> None:
    """What else a printed log says, in nanoGPT's words or train.py's."""
    if found := re.search(r"tokens per iteration will be: ([\d,]+)", line):
        run.start["tokens_per_step"] = int(found[1].replace(",", ""))
    if found := re.search(r"number of parameters: ([\d.]+)M(?:, ([\d.]+) MFLOPs per token)?", line):
        run.start["parameters"] = float(found[1]) * 1e6
        run.flops_per_token = float(found[2]) * 1e6 if found[2] else None
    if found := re.search(r"\bmfu refers to ([\d.]+) TFLOP/s \((.*?)\);", line):
        run.start |= {"peak_flops": float(found[1]) * 1e12, "peak_source": found[2]}
    if found := re.search(r"\bdevice: (\d+) x (.*), (float32|bfloat16|float16), (not )?compiled", line):
        run.start |= {"world_size": int(found[1]), "device": found[2], "dtype": found[3], "compiled": not found[4]}
    if found := re.search(r"\bdata: (.*), [\d,]+ train and ([\d,]+) val tokens", line):
        run.start["val_tokens"] = int(found[2].replace(",", ""))


def finite(value: Any) -> float | None:
    """The number, None where it is none, or not finite."""
    return value if type(value) in (int, float) and math.isfinite(value) else None


def number(text: str | None) -> float | None:
    """The number, None where there is none, or none that is finite."""
    return float(text) if text and math.isfinite(float(text)) else None


def setting(run: Run, name: str, text: str) -> dict[str, Any]:
    """{name: value} of a setting as a config file has it, None where it cannot be read; {} where it is no setting."""
    if name not in TrainConfig.__dataclass_fields__:
        return {}
    text = text.partition("#")[0].strip()
    try:
        if "*" in text:
            return {name: math.prod(ast.literal_eval(factor.strip()) for factor in text.split("*"))}
        return {name: ast.literal_eval(text)}
    except (ValueError, SyntaxError, TypeError):
        if re.fullmatch(r"[\w./-]+", text):
            return {name: text}  # nanoGPT echoes strings without quotes
        run.notes.append(f"it has {name} = {text}, which is not read")
        return {name: None}


def undo_evaluation(run: Run) -> None:
    """Takes evaluation out of the times and the MFU that nanoGPT printed.

    A step with an evaluation before it counts that in, and saving; its running MFU is 0.9 of the last line's and 0.1
    of its own, so that all lines are one constant, MFU x time, times a sequence that follows from the times alone.
    """
    run.start |= {"peak_flops": NANOGPT_PEAK, "peak_source": "nanoGPT's, an A100", "random_evaluation": True}
    printed = [e["mfu"] for e in run.iters if e["mfu"] is not None]
    run.start |= {"printed_mfu": printed[-1]} if printed else {}
    evaluated = {e["iter"]: e for e in run.evals}
    plain = [e["time_ms"] for e in run.iters if e["iter"] not in evaluated and e["iter"] > 0 and e["time_ms"]]
    usual = statistics.median(plain) if plain else None
    running, constants = None, []
    for e in run.iters:
        if e["mfu"] is not None and e["time_ms"]:
            running = 1 / e["time_ms"] if running is None else 0.9 * running + 0.1 / e["time_ms"]
            constants.append(e["mfu"] / running)
    constant = statistics.median(constants) if constants else None
    for e in run.iters:
        if e["iter"] in evaluated or e["iter"] == 0:
            if usual and e["iter"] in evaluated and e["iter"] > 0 and e["time_ms"]:
                evaluated[e["iter"]]["eval_s"] = max(0.0, e["time_ms"] - usual) / 1e3
            e["time_ms"] = None
        e["mfu"] = constant / e["time_ms"] if constant and e["time_ms"] else None


def give(run: Run, name: str, text: str) -> None:
    """Sets what the log does not say: a setting of train.py or one of FACTS. Raises ValueError where it is neither."""
    if name in FACTS:
        try:
            value: Any = FACTS[name](float(text)) if FACTS[name] is not str else text
        except (ValueError, OverflowError):
            raise ValueError(f"--set {name}={text}: not a number") from None
        if FACTS[name] is not str and not (math.isfinite(value) and value > 0):
            raise ValueError(f"--set {name}={text}: must be above 0")
        run.start[name] = value
    elif name in TrainConfig.__dataclass_fields__:
        run.settings[name] = read_settings(TrainConfig, [f"--{name}={text}"])[name]
        if name in (*SIZES, *MODEL, "n_head") and run.settings[name] < 1:
            raise ValueError(f"--set {name}={text}: must be at least 1")
        if name in SIZES:
            run.start.pop("tokens_per_step", None)  # follows from these
    else:
        known = ", ".join(FACTS)
        raise ValueError(f"--set {name}={text}: neither a setting of train.py (--help) nor one of {known}")


def complete(run: Run) -> None:
    """Fills in what follows from the rest: tokens, seconds of training, FLOPs."""
    s, start = run.settings, run.start
    if all(s.get(k) for k in SIZES):
        product = math.prod(s[k] for k in SIZES)
        if start.setdefault("tokens_per_step", product) != product:
            said = f"{start['tokens_per_step']:,} tokens per step, and its settings make {product:,}"
            run.notes.append(f"its log says {said}: what it says counts")
    if lost := next((e["iter"] for e in run.iters + run.evals if e.get("loss", e.get("val_loss")) is None), None):
        run.notes.append(f"its loss is no number at step {lost:,}")
    per_step = run.tokens_per_step
    if start.get("peak_flops") == NANOGPT_PEAK and start.get("random_evaluation"):  # its MFU is that of one GPU
        start["peak_flops"] *= start.get("world_size", 1)
    mfu_seconds = [e["mfu"] * e["time_ms"] / 1e3 for e in run.iters if e["mfu"] and e["time_ms"]]
    if run.flops_per_token is None and mfu_seconds and per_step and start.get("peak_flops"):
        run.flops_per_token = statistics.median(mfu_seconds) * start["peak_flops"] / per_step
        start["flops_inferred"] = True
    elif run.flops_per_token is None and start.get("parameters") and all(s.get(k) for k in MODEL):
        run.flops_per_token = 6 * start["parameters"] + 12 * math.prod(s[k] for k in MODEL)
    seconds = elapsed(run)
    for kind, e in [("iter", e) for e in run.iters] + [("eval", e) for e in run.evals]:
        done = e["iter"] + (kind == "iter")  # steps behind this point
        if e["tokens"] is None and per_step:
            e["tokens"] = done * per_step
        if e["train_s"] is None:
            e["train_s"] = seconds(done)
        if kind == "iter" and e["tokens_per_s"] is None and per_step and e["time_ms"]:
            e["tokens_per_s"] = per_step / e["time_ms"] * 1e3


def elapsed(run: Run) -> Any:
    """Seconds of training after so many steps, from the times of the steps logged; None where there is none."""
    known = [(e["iter"], e["time_ms"] / 1e3) for e in run.iters if e["time_ms"]]
    if not known:
        return lambda steps: None
    ends, sums, total, at = [], [0.0], 0.0, 0
    for i, step_s in known:  # a logged step stands for those since the last one
        total, at = total + (i + 1 - at) * step_s, i + 1
        ends.append(at)
        sums.append(total)

    def seconds(steps: int) -> float:
        k = bisect_right(ends, steps)
        begun = ends[k - 1] if k else 0
        return sums[k] + (steps - begun) * known[min(k, len(known) - 1)][1]

    return seconds


def implied_parameters(run: Run) -> float | None:
    """Parameters without position embeddings that MFU, time and tokens stand for (PaLM, appendix B, turned round).

    None where the log states its FLOPs, where sizes are not known, and where they contradict the MFU.
    """
    if (
        run.flops_per_token is None
        or not run.start.get("flops_inferred")
        or not all(run.settings.get(k) for k in MODEL)
    ):
        return None
    found = (run.flops_per_token - 12 * math.prod(run.settings[k] for k in MODEL)) / 6
    return found if found > 0 else None


def contradicts(run: Run) -> bool:
    """Whether the stated number of parameters is not the implied one, beyond 5% and the rounding of a printed MFU."""
    stated, implied = run.start.get("parameters"), implied_parameters(run)
    if not stated or not implied:
        return False
    rounding = 0.00005 / statistics.median(e["mfu"] for e in run.iters if e["mfu"])
    return abs(stated / implied - 1) > 0.05 + 2 * rounding
