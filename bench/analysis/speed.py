"""How fast runs were: the table of speed in bench/compare.py and bench/report.py, and who is the fastest."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.analysis.arms import Arm, Lead, Row, millions, over_runs
from bench.analysis.noise import difference
from bench.analysis.runs import Run, implied_parameters
from deskgpt.machine.gpu_peaks import published_peak
from deskgpt.machine.words import clock

SAME_SPEED = 1.05  # a ratio that two single runs cannot tell from 1: a machine's speed changes from run to run


# ---- figures of a run ----------------------------------------------------------------------------------------


def own_peak(run: Run) -> tuple[float, str] | None:
    """(FLOP/s, source) of the run's device, over all its ranks: from --device, or else from the log.

    Raises ValueError where --device names a GPU whose peak is not published here.
    """
    start = run.start
    name = start.get("gpu")
    if not name:
        if start.get("device") and start.get("peak_flops"):
            return start["peak_flops"], start.get("peak_source", "")
        return None
    # As train.py and nanoGPT compute: float32 in TF32 where the card has it, bfloat16 unless it is emulated.
    dtype = start.get("dtype") or run.settings.get("dtype")
    kinds = {"float32": ("tf32", "float32"), "float16": ("float16",)}.get(str(dtype), ("bfloat16", "float16"))
    for kind in kinds:
        found = published_peak(name, kind)
        if found:
            return found[0] * start.get("world_size", 1), f"{name}, {found[1]}"
    raise ValueError(f"--device {name}: no published peak is known of it for {' or '.join(kinds)}; leave it out")


def median_ms(run: Run) -> float | None:
    """The median time of a step."""
    return statistics.median(run.step_ms) if run.step_ms else None


def band(runs: list[Run]) -> tuple[float, float] | None:
    """(10th, 90th percentile) of the runs' step times in ms."""
    times = [ms for run in runs for ms in run.step_ms]
    return tuple(np.quantile(times, (0.1, 0.9))) if times else None


def tokens_per_s(run: Run) -> float | None:
    ms = median_ms(run)
    return run.tokens_per_step / ms * 1e3 if ms and run.tokens_per_step else None


def flops_per_s(run: Run) -> float | None:
    rate = tokens_per_s(run)
    return rate * run.flops_per_token if rate and run.flops_per_token else None


def mfu(run: Run) -> float | None:
    """MFU on the peak that the log names; the median of the logged ones where FLOPs or tokens are not known."""
    if run.flops_per_token and run.tokens_per_step:
        rate = flops_per_s(run)
        return rate / run.start["peak_flops"] if rate and run.start.get("peak_flops") else None
    logged = [e["mfu"] for e in run.iters if e["mfu"]]
    return statistics.median(logged) if logged else None


def own_mfu(run: Run) -> float | None:
    """MFU on the peak of the device itself."""
    rate = flops_per_s(run)
    peak = own_peak(run)
    return rate / peak[0] if rate and peak else None


def measured_mfu(run: Run) -> float | None:
    """MFU on the fastest matmul measured on the device, where the log's peak is another one."""
    rate = flops_per_s(run)
    measured = run.start.get("measured_flops")
    return rate / measured if rate and measured and measured != run.start.get("peak_flops") else None


def own_tflops(run: Run) -> float | None:
    """The peak of the device itself in TFLOP/s."""
    peak = own_peak(run)
    return peak[0] / 1e12 if peak else None


def micro_batch_ms(run: Run) -> float | None:
    ms = median_ms(run)
    accumulation = run.settings.get("gradient_accumulation_steps")
    return ms / (accumulation / run.start.get("world_size", 1)) if ms and accumulation else None


def evaluation(run: Run) -> tuple[float, float] | None:
    """(seconds of all evaluations, their share of training and evaluation); None where no time is known.

    Evaluations whose time is not known are taken to be as long as the others.
    """
    times = [e["eval_s"] for e in run.evals if e["eval_s"] is not None]
    ends = [e["train_s"] for e in run.evals + run.iters if e["train_s"]]
    if not times or not ends:
        return None
    eval_s = statistics.fmean(times) * len(run.evals)
    return eval_s, eval_s / (eval_s + max(ends))


def scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value / factor


# ---- the table -----------------------------------------------------------------------------------------------


def speed_rows(arms: list[Arm]) -> list[Row]:
    """A row for each figure of speed that is known of one arm at least."""
    first = [arm.runs[0] for arm in arms]

    def mean(label: str, figure: Callable[[Run], Any], text: Callable[[Any], str]) -> Row:
        return over_runs(label, arms, figure, text)

    def of_first(label: str, figure: Callable[[Run], Any], text: Callable[[Any], str]) -> Row:
        return Row(label, [figure(run) for run in first], text)

    tokens = mean("tokens/s", tokens_per_s, lambda v: f"{v:,.0f}")
    if None not in tokens.values and len(arms) > 1:
        tokens.lead = fastest(arms)
    rows = [
        mean("ms per step, median", median_ms, four_digits),
        Row("10% to 90% of the steps", [band(arm.runs) for arm in arms], lambda b: f"{b[0]:,.4g} to {b[1]:,.4g}"),
        mean("ms per micro-batch", micro_batch_ms, four_digits),
        tokens,
        of_first("parameters, as stated", lambda r: r.start.get("parameters"), millions),
        of_first("parameters, from MFU, time and tokens", implied_parameters, millions),
        of_first("MFLOPs per token", lambda r: r.flops_per_token, lambda v: f"{v / 1e6:,.4g}"),
        mean("TFLOP/s", flops_per_s, lambda v: f"{v / 1e12:.4g}"),
        of_first("MFU as printed at the end", lambda r: r.start.get("printed_mfu"), percent),
        mean("MFU on the log's peak", mfu, percent),
        mean("the log's peak, TFLOP/s", lambda r: scaled(r.start.get("peak_flops"), 1e12), four_digits),
        mean("MFU on the measured peak", measured_mfu, percent),
        mean("MFU on the device's own peak", own_mfu, percent),
        mean("its own peak, TFLOP/s", own_tflops, four_digits),
        of_first("evaluation: time, and share of all", evaluation, lambda v: f"{clock(v[0])}, {v[1]:.1%}"),
        mean("warm-up and compiling", lambda r: r.start.get("warm_up_s"), clock),
        mean("peak memory, GiB", lambda r: scaled(r.end.get("peak_memory_bytes"), 2**30), lambda v: f"{v:.2f}"),
    ]
    return [row for row in rows if any(value is not None for value in row.values)]


def four_digits(value: float) -> str:
    return f"{value:,.4g}"


def percent(share: float) -> str:
    return f"{share:.2%}"


# ---- who is the fastest --------------------------------------------------------------------------------------


def fastest(arms: list[Arm]) -> Lead:
    """Who trains the most tokens per second. The speed of every run must be known.

    The noise is that between runs, as a ratio, where both arms have several. For single runs it is the drift within
    each, and 5% at least: a machine is not equally fast from one run to the next.
    """
    rates = [[tokens_per_s(run) or math.nan for run in arm.runs] for arm in arms]
    means = [statistics.fmean(of_arm) for of_arm in rates]
    best, second, *_ = sorted(range(len(arms)), key=lambda i: -means[i])
    ratio = means[best] / means[second]
    _, log_noise = difference([math.log(v) for v in rates[second]], [math.log(v) for v in rates[best]])
    if log_noise is None:
        log_noise = drift_between(arms[best].runs + arms[second].runs)

    if log_noise is None:
        text = f"{arms[best].label}, {ratio:.2f} x {arms[second].label} (noise not known)"
        return Lead(text, noise="noise not known", noise_unknown=True)
    noise = f"noise a factor of {math.exp(min(log_noise, 700)):.2f}"  # exp(710) overflows
    if math.log(ratio) <= log_noise:
        names = f"{arms[best].label} and {arms[second].label}"
        return Lead(f"{names}: not distinguishable ({ratio:.2f} x, {noise})", noise=noise, within_noise=True)
    return Lead(f"{arms[best].label}, {ratio:.2f} x {arms[second].label} ({noise})", best, noise)


def drift_between(runs: list[Run]) -> float | None:
    """The noise of a ratio of single runs, as a logarithm; None where a run's drift is not known."""
    drifts = [drift(run) for run in runs]
    known = [d for d in drifts if d is not None]
    if len(known) < len(drifts):
        return None
    return max(math.log(SAME_SPEED), 1.96 * math.hypot(*known))


def drift(run: Run) -> float | None:
    """Standard deviation of the logarithm of the median step between tenths of a run; None below 20 steps."""
    times = run.step_ms
    if len(times) < 20:
        return None
    tenths = np.array_split(np.array(times), 10)
    return statistics.stdev(math.log(np.median(tenth)) for tenth in tenths)
