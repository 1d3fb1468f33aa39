"""The claims about step times: train.py itself in child processes that take turns, on random tokens."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from bench.analysis.noise import interval
from bench.claims.sizes import Found, Options, Settings, Sizes, heads
from bench.timing import PYTHON, ROOT, Contestant, run, write_data


def timed(o: Options, cells: dict[str, Settings], vocab_size: int) -> list[Contestant]:
    """Runs train.py with the settings of every cell, --rounds times in turns."""
    data = o.tmp / f"random-{vocab_size}"
    if not data.exists():
        write_data(data, vocab_size)
    endless: Settings = {
        "max_iters": 10**6,
        "eval_interval": 10**6,
        "eval_iters": 1,
        "dataset": data,
        "device": o.device,
    }
    runs: list[Contestant] = []
    for name, cell in cells.items():
        settings = endless | {"compile": o.sizes.compile} | cell | {"out_dir": o.tmp / str(len(runs))}
        flags = [f"--{key}={value}" for key, value in settings.items()]
        runs.append(Contestant(name, [*PYTHON, "train.py", *flags], ROOT))
    for number in range(o.rounds):
        for x in runs:
            run(x, min(o.sizes.steps, o.steps or o.sizes.steps))
            print(f"round {number + 1}, {x.name}: {statistics.median(x.rounds_ms[-1]):.4g} ms per step", flush=True)
    o.compilers |= {x.start["compiler"] for x in runs if x.start["compiler"]}
    return runs


def step_rows(runs: list[Contestant]) -> list[dict[str, Any]]:
    """Medians over all rounds; MFU refers to the highest peak that a run with this dtype measured or looked up."""
    rows = []
    for x in runs:
        start = x.start
        ms = x.step_ms()["ms"]
        peak = max(y.start["peak_flops"] for y in runs if y.start["dtype"] == start["dtype"])
        tokens_per_s = start["tokens_per_step"] / ms * 1e3
        rows.append(
            {
                "run": x.name,
                "dtype": start["dtype"],
                "ms per step": ms,
                "tokens/s": tokens_per_s,
                "MFU %": tokens_per_s * start["flops_per_token"] / peak * 100,
                "first step s": statistics.median(x.first_s),
            }
        )
    return rows


def log_ratios(a: Contestant, b: Contestant) -> list[float]:
    """log(step time of b / that of a) of each round: a slow spell of the machine hits both."""
    medians_a = [statistics.median(times) for times in a.rounds_ms]
    medians_b = [statistics.median(times) for times in b.rounds_ms]
    return [math.log(ms_b / ms_a) for ms_a, ms_b in zip(medians_a, medians_b, strict=True)]


def factor(logs: Sequence[float]) -> str:
    """The geometric mean of exp(logs), with its 95% interval."""
    mean, half = interval(logs)
    spread = "one round" if half is None else f"{math.exp(mean - half):.2f} to {math.exp(mean + half):.2f}"
    return f"{math.exp(mean):.2f} ({spread})"


def of_times(runs: list[Contestant], says: list[str]) -> Found:
    raw = [{"run": x.name, "rounds_ms": x.rounds_ms, "first_s": x.first_s, "start": x.start} for x in runs]
    return Found(step_rows(runs), says, raw, {x.start["dtype"] for x in runs})


def split_of(s: Sizes, micro_batch: int) -> Settings:
    """The settings that split a step's sequences into micro-batches of this size."""
    return {"batch_size": micro_batch, "gradient_accumulation_steps": s.sequences // micro_batch}


# ---- the experiments -----------------------------------------------------------------------------------------


def micro_batch(o: Options) -> Found:
    s = o.sizes
    cells = {
        f"{w} wide, {b} x {s.sequences // b}": s.timed | heads(w) | split_of(s, b)
        for w in s.widths
        for b in s.micro_batches
    }
    runs = timed(o, cells, s.vocab_size)
    n = len(s.micro_batches)
    says = []
    for i, w in enumerate(s.widths):
        *smaller, largest = runs[i * n : (i + 1) * n]
        for b, x in zip(s.micro_batches[:-1], smaller, strict=True):
            times = factor(log_ratios(largest, x))
            says.append(f"{w} wide: micro-batches of {b} take {times} times as long as of {s.micro_batches[-1]}.")
    return of_times(runs, says)


def compile_and_micro_batch(o: Options) -> Found:
    s = o.sizes
    least = s.micro_batches[0]
    most = s.micro_batches[-1]
    cells = {}
    for b in (least, most):
        model = s.timed | heads(s.widths[-1]) | split_of(s, b)
        cells[f"{b} x {s.sequences // b}, plain"] = model | {"compile": False}
        cells[f"{b} x {s.sequences // b}, compiled"] = model | {"compile": True}
    runs = timed(o, cells, s.vocab_size)
    small = log_ratios(runs[0], runs[1])
    large = log_ratios(runs[2], runs[3])
    of_ratios = factor([a - b for a, b in zip(small, large, strict=True)])
    says = [
        f"Micro-batches of {least}: compiled takes {factor(small)} of the time.",
        f"Micro-batches of {most}: compiled takes {factor(large)} of the time.",
        f"The share with {least} over that with {most}: {of_ratios}; 1 = no difference.",
    ]
    return of_times(runs, says)


def compile_gain(o: Options) -> Found:
    cells = {}
    for sizes in o.sizes.compiled:
        name = f"{sizes['n_layer']} x {sizes['n_embd']}, T {sizes['block_size']}, B {sizes['batch_size']}"
        model = sizes | {"gradient_accumulation_steps": 1}
        cells[f"{name}, plain"] = model | {"compile": False}
        cells[f"{name}, compiled"] = model | {"compile": True}
    runs = timed(o, cells, o.sizes.vocab_size)
    says = [gain_line(plain, compiled) for plain, compiled in zip(runs[::2], runs[1::2], strict=True)]
    return of_times(runs, says)


def gain_line(plain: Contestant, compiled: Contestant) -> str:
    """What compiling saves per step and costs at the start, and after how many steps it has paid for itself."""
    logs = log_ratios(plain, compiled)
    plain_start_s = statistics.median(plain.first_s)
    cold_s = compiled.first_s[0] - plain_start_s
    warm_s = min(compiled.first_s) - plain_start_s
    text = (
        f"{plain.name.removesuffix(', plain')}: compiled takes {factor(logs)} of the time; "
        f"its start takes {cold_s:.0f} s more, from the cache {warm_s:.0f} s"
    )
    mean, half = interval(logs)
    if half is not None and mean + half < 0:  # otherwise it may save nothing
        saved_s = plain.step_ms()["ms"] / 1e3 * (1 - math.exp(mean))
        text += f", won back after {cold_s / saved_s:,.0f} and {max(0, warm_s) / saved_s:,.0f} steps"
    return f"{text}."


def widening(o: Options) -> Found:
    model = o.sizes.widened | {"gradient_accumulation_steps": 1}
    runs = timed(o, {f"{w} wide": model | heads(w) for w in (384, 768)}, 50257)
    narrow, wide = runs
    log_flops = math.log(wide.start["flops_per_token"] / narrow.start["flops_per_token"])
    log_times = log_ratios(narrow, wide)
    mfu = factor([log_flops - log_time for log_time in log_times])
    line = f"768 wide: {math.exp(log_flops):.2f} times the FLOPs, {factor(log_times)} times the time: MFU x {mfu}."
    return of_times(runs, [line])
