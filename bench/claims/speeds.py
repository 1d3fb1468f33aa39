"""The claims about step times: train.py itself in child processes that take turns, on random tokens."""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from bench import speed
from bench.analysis.noise import interval
from bench.claims.sizes import Found, Options, Settings, Sizes, heads


def timed(o: Options, cells: dict[str, Settings], vocab_size: int) -> list[speed.Contestant]:
    """Every cell as runs of train.py on random tokens, --rounds of each, taking turns."""
    data = o.tmp / f"random-{vocab_size}"
    if not data.exists():
        speed.write_data(data, vocab_size)
    endless: Settings = {
        "max_iters": 10**6,
        "eval_interval": 10**6,
        "eval_iters": 1,
        "dataset": data,
        "device": o.device,
    }
    runs: list[speed.Contestant] = []
    for name, cell in cells.items():
        settings = endless | {"compile": o.sizes.compile} | cell | {"out_dir": o.tmp / str(len(runs))}
        command = [sys.executable, "-u", "train.py", *(f"--{k}={v}" for k, v in settings.items())]
        runs.append(speed.Contestant(name, command, speed.ROOT))
    for number, x in itertools.product(range(o.rounds), runs):
        speed.run(x, min(o.sizes.steps, o.steps or o.sizes.steps))
        print(f"round {number + 1}, {x.name}: {statistics.median(x.rounds[-1]):.4g} ms per step", flush=True)
    o.compilers |= {x.start["compiler"] for x in runs if x.start["compiler"]}
    return runs


def step_rows(runs: list[speed.Contestant]) -> list[dict[str, Any]]:
    """Medians over all rounds; MFU refers to the highest peak that the runs in this dtype measured or looked up."""
    rows = []
    for x in runs:
        ms, start = statistics.median(t for times in x.rounds for t in times), x.start
        peak = max(y.start["peak_flops"] for y in runs if y.start["dtype"] == start["dtype"])
        tokens_per_s = start["tokens_per_step"] / ms * 1e3
        mfu = tokens_per_s * start["flops_per_token"] / peak
        row = {"run": x.name, "dtype": start["dtype"], "ms per step": ms, "tokens/s": tokens_per_s, "MFU %": mfu * 100}
        rows.append(row | {"first step s": statistics.median(x.first_s)})
    return rows


def log_ratios(a: speed.Contestant, b: speed.Contestant) -> list[float]:
    """log(step time of b / that of a), by round: a slow spell of the machine hits both."""
    return [math.log(statistics.median(y) / statistics.median(x)) for x, y in zip(a.rounds, b.rounds, strict=True)]


def factor(logs: Sequence[float]) -> str:
    """The geometric mean of exp(logs), with its 95% interval."""
    mean, half = interval(logs)
    spread = "one round" if half is None else f"{math.exp(mean - half):.2f} to {math.exp(mean + half):.2f}"
    return f"{math.exp(mean):.2f} ({spread})"


def of_times(runs: list[speed.Contestant], says: list[str]) -> Found:
    raw = [{"run": x.name, "rounds_ms": x.rounds, "first_s": x.first_s, "start": x.start} for x in runs]
    return Found(step_rows(runs), says, raw, {x.start["dtype"] for x in runs})


# ---- the experiments -----------------------------------------------------------------------------------------


def micro_batch(o: Options) -> Found:
    s = o.sizes
    cells = {
        f"{w} wide, {b} x {s.sequences // b}": s.timed | heads(w) | split_of(s, b)
        for w in s.widths
        for b in s.micro_batches
    }
    runs = timed(o, cells, s.vocab_size)
    says = []
    for i, w in enumerate(s.widths):
        *smaller, largest = runs[i * len(s.micro_batches) : (i + 1) * len(s.micro_batches)]
        for b, x in zip(s.micro_batches, smaller, strict=False):
            times = factor(log_ratios(largest, x))
            says.append(f"{w} wide: micro-batches of {b} take {times} times as long as of {s.micro_batches[-1]}.")
    return of_times(runs, says)


def compile_and_micro_batch(o: Options) -> Found:
    s, ends = o.sizes, (o.sizes.micro_batches[0], o.sizes.micro_batches[-1])
    model = s.timed | heads(s.widths[-1])
    cells = {
        f"{b} x {s.sequences // b}, {'compiled' if on else 'plain'}": model | split_of(s, b) | {"compile": on}
        for b in ends
        for on in (False, True)
    }
    runs = timed(o, cells, s.vocab_size)
    small, large = log_ratios(runs[0], runs[1]), log_ratios(runs[2], runs[3])
    says = [
        f"Micro-batches of {b}: compiled takes {factor(x)} of the time."
        for b, x in zip(ends, (small, large), strict=True)
    ]
    of_ratios = factor([a - b for a, b in zip(small, large, strict=True)])
    return of_times(
        runs, [*says, f"The share with {ends[0]} over that with {ends[1]}: {of_ratios}; 1 = no difference."]
    )


def compile_gain(o: Options) -> Found:
    cells = {
        f"{m['n_layer']} x {m['n_embd']}, T {m['block_size']}, B {m['batch_size']}, {'compiled' if on else 'plain'}": m
        | {"gradient_accumulation_steps": 1, "compile": on}
        for m in o.sizes.compiled
        for on in (False, True)
    }
    runs = timed(o, cells, o.sizes.vocab_size)
    says = []
    for plain, compiled in zip(runs[::2], runs[1::2], strict=True):
        logs, name = log_ratios(plain, compiled), plain.name.removesuffix(", plain")
        cold_s, warm_s = (x - statistics.median(plain.first_s) for x in (compiled.first_s[0], min(compiled.first_s)))
        text = (
            f"{name}: compiled takes {factor(logs)} of the time; its start takes {cold_s:.0f} s more, from the cache "
        )
        text += f"{warm_s:.0f} s"
        mean, half = interval(logs)
        if half is not None and mean + half < 0:  # else there may be nothing to win it back with
            saved_s = statistics.median(t for r in plain.rounds for t in r) / 1e3 * (1 - math.exp(mean))
            text += f", won back after {cold_s / saved_s:,.0f} and {max(0, warm_s) / saved_s:,.0f} steps"
        says.append(text + ".")
    return of_times(runs, says)


def widening(o: Options) -> Found:
    model = o.sizes.widened | {"gradient_accumulation_steps": 1}
    runs = timed(o, {f"{w} wide": model | heads(w) for w in (384, 768)}, 50257)
    flops = math.log(runs[1].start["flops_per_token"] / runs[0].start["flops_per_token"])
    times = log_ratios(*runs)
    mfu = factor([flops - t for t in times])
    return of_times(
        runs, [f"768 wide: {math.exp(flops):.2f} times the FLOPs, {factor(times)} times the time: MFU x {mfu}."]
    )


def split_of(s: Sizes, micro_batch: int) -> Settings:
    return {"batch_size": micro_batch, "gradient_accumulation_steps": s.sequences // micro_batch}
