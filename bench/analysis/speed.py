"""How fast runs were: the table of speed in bench/compare.py and bench/report.py, and who is the fastest."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.analysis.arms import Arm, Lead, Row, lead_by_ratio, millions, over_runs
from bench.analysis.runs import Run, implied_parameters
from deskgpt.system.formatting import clock, in_gib, in_tera

SAME_SPEED = 1.05  # a ratio that two single runs cannot tell from 1: a machine's speed changes from run to run


# ---- figures of a run ----------------------------------------------------------------------------------------


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
    """MFU on the run's peak; the median of the logged ones where FLOPs or tokens are not known."""
    if run.flops_per_token and run.tokens_per_step:
        rate = flops_per_s(run)
        return rate / run.start["peak_flops"] if rate and run.start.get("peak_flops") else None
    logged = [e["mfu"] for e in run.iters if e["mfu"]]
    return statistics.median(logged) if logged else None


def measured_mfu(run: Run) -> float | None:
    """MFU on the fastest matmul measured on the device, where the run's peak is another one."""
    rate = flops_per_s(run)
    measured = run.start.get("measured_flops")
    return rate / measured if rate and measured and measured != run.start.get("peak_flops") else None


def evaluation(run: Run) -> tuple[float, float] | None:
    """(seconds of all evaluations, their share of training and evaluation); None if no time is known.

    Evaluations whose time is not known are taken to be as long as the others.
    """
    times = [e["eval_s"] for e in run.evals if e["eval_s"] is not None]
    ends = [e["train_s"] for e in run.evals + run.iters if e["train_s"]]
    if not times or not ends:
        return None
    eval_s = statistics.fmean(times) * len(run.evals)
    return eval_s, eval_s / (eval_s + max(ends))


def trained_s(run: Run) -> float | None:
    """Seconds of training until the last step for which they are known."""
    known = [e["train_s"] for e in run.iters if e["train_s"] is not None]
    return known[-1] if known else run.end.get("train_s")


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
        tokens,
        of_first("parameters, as stated", lambda r: r.start.get("parameters"), millions),
        of_first("parameters, from MFU, time and tokens", implied_parameters, millions),
        of_first("MFLOPs per token", lambda r: r.flops_per_token, lambda v: f"{v / 1e6:,.4g}"),
        mean("FLOP/s", flops_per_s, teraflops),
        mean("MFU", mfu, percent),
        mean("peak that MFU refers to", lambda r: r.start.get("peak_flops"), teraflops),
        mean("MFU on the measured peak", measured_mfu, percent),
        mean("training", trained_s, clock),
        mean("waiting for data, in training", lambda r: r.end.get("data_wait_s"), clock),
        of_first("evaluation: time, and share of all", evaluation, lambda v: f"{clock(v[0])}, {v[1]:.1%}"),
        mean("saving", lambda r: r.end.get("save_s"), clock),
        mean("warm-up and compiling", lambda r: r.start.get("warm_up_s"), clock),
        mean("peak memory", lambda r: r.end.get("peak_memory_bytes"), lambda v: f"{in_gib(v)} GiB"),
    ]
    return [row for row in rows if any(value is not None for value in row.values)]


def four_digits(value: float) -> str:
    return f"{value:,.4g}"


def teraflops(per_s: float) -> str:
    return f"{in_tera(per_s)} TFLOP/s"


def percent(share: float) -> str:
    return f"{share:.2%}"


# ---- who is the fastest --------------------------------------------------------------------------------------


def fastest(arms: list[Arm]) -> Lead:
    """Who trains the most tokens per second. The speed of every run must be known.

    For single runs the noise is the drift within each, and 5% at least: a machine is not equally fast from one run to
    the next.
    """
    rates = [[tokens_per_s(run) or math.nan for run in arm.runs] for arm in arms]
    return lead_by_ratio(arms, rates, highest_leads=True, words="", single_noise=drift_between)


def drift_between(runs: list[Run]) -> float | None:
    """The noise of a ratio of single runs, as a logarithm; None if a run's drift is not known."""
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
