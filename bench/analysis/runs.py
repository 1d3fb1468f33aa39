"""A training run as its log describes it, and what follows from that: tokens, seconds of training, FLOPs.

bench/analysis/logs.py reads runs. A log may leave facts open: they are None, and can be given by hand (`give`).
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from configurator import read_settings
from deskgpt.system.errors import ConfigError
from deskgpt.system.peaks import card_named
from deskgpt.system.settings import check, settings_of
from train import TrainConfig

# FLOP/s that nanoGPT's MFU refers to, whatever the device: an A100 in bfloat16.
NANOGPT_PEAK = 312e12

# Facts of a run that are not settings of train.py and can be given by hand like them.
FACTS: dict[str, type] = {
    "parameters": float,
    "tokens_per_step": int,
    "tokenizer": str,
    "val_tokens": int,
    "bytes_per_token": float,
    "world_size": int,
    "peak_flops": float,
    "gpu": str,
}

SIZES = ("batch_size", "gradient_accumulation_steps", "block_size")  # their product is the tokens of a step
MODEL = ("n_layer", "n_embd", "block_size")  # attention's FLOPs per token are 12 times their product
AT_LEAST_1 = {*SIZES, *MODEL, "n_head"}
SETTINGS = settings_of(TrainConfig)
LARGEST = 1e24  # a figure that is larger, or smaller than 1 / LARGEST and not 0, is a mistake of the log


@dataclass
class Run:
    """A training run; None stands for what its log does not say.

    Each of `iters` holds iter, loss, time_ms, mfu (a share, of the step alone), tokens_per_s, lr, grad_norm, tokens and
    train_s, and `own`, further numbers by name. Each of `evals` holds iter, train_loss, val_loss, val_se (standard
    error), val_bpb (bits per byte of text), tokens, train_s and eval_s.
    tokens and train_s count from the beginning of the run; train_s are seconds of training without evaluation.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    start: dict[str, Any] = field(default_factory=dict)  # facts: parameters, tokens_per_step, peak_flops, device ...
    iters: list[dict[str, Any]] = field(default_factory=list)  # in order, each step once
    evals: list[dict[str, Any]] = field(default_factory=list)  # likewise
    end: dict[str, Any] = field(default_factory=dict)  # empty where the run was killed or is still running
    flops_per_token: float | None = None
    notes: list[str] = field(default_factory=list)  # what a reader of its figures should know
    samples: list[dict[str, Any]] = field(default_factory=list)  # in order: iter, texts
    tasks: list[dict[str, Any]] = field(default_factory=list)  # in order: iter, results by task and metric
    timed_from: int = 0  # the first step on the machine, and with the batch, that start and settings describe

    @property
    def tokens_per_step(self) -> int | None:
        return self.start.get("tokens_per_step")

    @property
    def step_ms(self) -> list[float]:
        """Known times of single steps, in order, without the run's first step, which still warms up."""
        known = [e for e in self.iters if e["time_ms"] and e["iter"] >= self.timed_from]
        warm = [e for e in known if e["iter"] > 0]
        return [e["time_ms"] for e in warm or known]

    @property
    def val(self) -> list[dict[str, Any]]:
        """The evaluations with a finite validation loss."""
        return [e for e in self.evals if e["val_loss"] is not None]

    @property
    def best(self) -> dict[str, Any]:
        """The evaluation with the lowest validation loss; there must be one."""
        return min(self.val, key=lambda e: e["val_loss"])

    def scatter(self) -> float | None:
        """Standard deviation of the evaluations around their smooth curve, from second differences.

        The second difference of independent errors has 1 + 4 + 1 times their variance. Only the later half of the
        evaluations counts, where the curve itself hardly bends. None if that half has fewer than eight, and if
        every evaluation read the same tokens: then all have the same error, and their scatter does not show it.
        """
        losses = [e["val_loss"] for e in self.val]
        late = losses[len(losses) // 2 :]
        if len(late) < 8 or not self.start.get("random_evaluation"):
            return None
        second = [a - 2 * b + c for a, b, c in zip(late, late[1:], late[2:], strict=False)]
        return math.sqrt(statistics.fmean(d * d for d in second) / 6)


# ---- values of a log -----------------------------------------------------------------------------------------


def signed(value: Any) -> float | None:
    """The number; None for anything that is not a number or that no run can have: NaN, infinity, 1e300."""
    if type(value) not in (int, float):
        return None
    return value if value == 0 or 1 / LARGEST <= abs(value) <= LARGEST else None


def figure(value: Any) -> float | None:
    """As signed, of at least 0: a time, a rate, a norm."""
    number = signed(value)
    return None if number is None or number < 0 else number


def checked_setting(name: str, value: Any) -> Any:
    """The value of a setting of train.py. Raises ConfigError for another type, and for sizes below 1."""
    value = check(value, SETTINGS[name], name)
    if name in AT_LEAST_1 and value < 1:
        raise ConfigError(f"{name}={value} must be at least 1")
    return value


# ---- what a log leaves open ----------------------------------------------------------------------------------


def give(run: Run, name: str, text: str) -> None:
    """Sets a setting of train.py or one of FACTS that the log does not say. Raises ValueError for any other name."""
    if name in FACTS:
        run.start[name] = fact(name, text)
        if name == "bytes_per_token":
            run.evals = [e | {"val_bpb": None} for e in run.evals]  # they follow from it
    elif name in TrainConfig.__dataclass_fields__:
        run.settings[name] = checked_setting(name, read_settings(TrainConfig, [f"--{name}={text}"])[name])
        if name in SIZES:
            run.start.pop("tokens_per_step", None)  # it follows from these
    else:
        known = ", ".join(FACTS)
        raise ValueError(f"--set {name}={text}: neither a setting of train.py (--help) nor one of {known}")


def fact(name: str, text: str) -> Any:
    """The value of one of FACTS. Raises ValueError for what is not a number above 0, where it should be one."""
    kind = FACTS[name]
    if kind is str:
        return text
    try:
        value = kind(float(text))
    except (ValueError, OverflowError):
        raise ValueError(f"--set {name}={text}: not a number") from None
    if not figure(value):
        raise ValueError(f"--set {name}={text}: must be above 0, and a size that a run can have")
    return value


def complete(run: Run) -> None:
    """Fills in what follows from the rest: tokens, seconds of training, FLOPs, bits per byte."""
    complete_tokens_per_step(run)
    lost = [e["iter"] for e in run.iters + run.evals if e.get("loss", e.get("val_loss")) is None]
    if lost:
        run.notes.append(f"its loss is not a number at step {lost[0]:,}")
    complete_flops(run)
    if run.start.get("gpu"):
        refer_to_published_peak(run)
    complete_events(run)
    complete_bits(run)


def complete_tokens_per_step(run: Run) -> None:
    settings = run.settings
    if not all(settings.get(name) for name in SIZES):
        return
    product = math.prod(settings[name] for name in SIZES)
    logged = run.start.setdefault("tokens_per_step", product)
    if logged != product:
        run.notes.append(f"its log says {logged:,} tokens per step, its settings make {product:,}: the log counts")


def complete_flops(run: Run) -> None:
    """Infers FLOPs per token from MFU and step time, or else from parameters and sizes, where the log has none."""
    start = run.start
    if start.get("peak_flops") == NANOGPT_PEAK and start.get("random_evaluation"):
        start["peak_flops"] *= start.get("world_size", 1)  # nanoGPT's MFU is that of one GPU
    if run.flops_per_token is not None:
        return
    # MFU x seconds x peak are the FLOPs of a step.
    mfu_seconds = [e["mfu"] * e["time_ms"] / 1e3 for e in run.iters if e["mfu"] and e["time_ms"]]
    if mfu_seconds and run.tokens_per_step and start.get("peak_flops"):
        run.flops_per_token = statistics.median(mfu_seconds) * start["peak_flops"] / run.tokens_per_step
        start["flops_inferred"] = True
    elif start.get("parameters") and all(run.settings.get(name) for name in MODEL):
        run.flops_per_token = 6 * start["parameters"] + attention_flops(run)


def refer_to_published_peak(run: Run) -> None:
    """Makes the MFU refer to the published peak of the GPU that was given by hand, over all ranks.

    Raises ValueError where none is known.
    """
    start = run.start
    name = start["gpu"]
    # As train.py and nanoGPT compute: float32 in TF32 where the card has it, bfloat16 unless it is emulated.
    dtype = start.get("dtype") or run.settings.get("dtype")
    card = card_named(name)
    found = None
    if card is not None:
        found = card.peak(dtype if dtype in ("float32", "float16") else card.fast_dtype())
    if found is None:
        raise ValueError(f"--device {name}: no published peak is known of it; leave it out")
    flops_per_s, source = found
    peak = flops_per_s * start.get("world_size", 1)
    for e in run.iters:
        if e["mfu"] and start.get("peak_flops"):
            e["mfu"] *= start["peak_flops"] / peak
    start["peak_flops"] = peak
    start["peak_source"] = f"{name}, {source}"


def attention_flops(run: Run) -> int:
    """FLOPs per token of attention's two matmuls, forward and backward (PaLM, appendix B)."""
    return 12 * math.prod(run.settings[name] for name in MODEL)


def complete_events(run: Run) -> None:
    """Fills in the tokens and seconds of training at each step and evaluation, and the speed of each step."""
    seconds = elapsed(run)
    per_step = run.tokens_per_step
    for e in run.iters:
        fill(e, "tokens", (e["iter"] + 1) * per_step if per_step else None)
        fill(e, "train_s", seconds(e["iter"] + 1))
        if per_step and e["time_ms"]:
            fill(e, "tokens_per_s", per_step / e["time_ms"] * 1e3)
    for e in run.evals:
        fill(e, "tokens", e["iter"] * per_step if per_step else None)
        fill(e, "train_s", seconds(e["iter"]))


def complete_bits(run: Run) -> None:
    """Fills in bits per byte where the log has none but the bytes of a token are known."""
    bytes_per_token = run.start.get("bytes_per_token")
    if run.start.get("tokenizer") == "bytes":
        bytes_per_token = bytes_per_token or 1.0
    if bytes_per_token:
        for e in run.val:
            fill(e, "val_bpb", e["val_loss"] / math.log(2) / bytes_per_token)


def fill(event: dict[str, Any], name: str, value: float | None) -> None:
    if event[name] is None:
        event[name] = value


def elapsed(run: Run) -> Callable[[int], float | None]:
    """A function that gives the seconds of training after n steps, from the times of the logged steps.

    It gives None for every n where the log has no times.
    """
    timed = [(e["iter"] + 1, e["time_ms"] / 1e3) for e in run.iters if e["time_ms"]]
    if not timed:
        return lambda steps: None
    # A logged step stands for all steps since the one logged before it.
    ends = [end for end, _ in timed]
    totals = [0.0]
    begin = 0
    for end, step_s in timed:
        totals.append(totals[-1] + (end - begin) * step_s)
        begin = end

    def seconds(steps: int) -> float:
        k = bisect_right(ends, steps)  # logged steps that are over by then
        begin = ends[k - 1] if k else 0
        step_s = timed[min(k, len(timed) - 1)][1]
        return totals[k] + (steps - begin) * step_s

    return seconds


# ---- the size that MFU implies -------------------------------------------------------------------------------


def implied_parameters(run: Run) -> float | None:
    """Parameters without position embeddings that MFU, time and tokens imply (PaLM, appendix B, solved for N).

    None if the log states its FLOPs, if sizes are not known, and if they contradict the MFU.
    """
    if run.flops_per_token is None or not run.start.get("flops_inferred"):
        return None
    if not all(run.settings.get(name) for name in MODEL):
        return None
    parameters = (run.flops_per_token - attention_flops(run)) / 6
    return parameters if parameters > 0 else None
