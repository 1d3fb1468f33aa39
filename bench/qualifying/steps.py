"""Stage 7: whole steps of train.py, with its loader, accumulation, clipping and update, for AdamW and Muon."""

from __future__ import annotations

import statistics
import time
from typing import Any

from bench.output import markdown_table
from bench.qualifying import work
from bench.qualifying.session import Session
from deskgpt.machine import hardware

STEPS = 2  # after the one that warms up
MARGIN = 1.2  # of the time that AdamW's run took: with less left, Muon's does not begin


def measure(s: Session) -> dict[str, Any]:
    sequences = s.sizes.tokens_per_step // s.sizes.model.block_size
    batch_size = work.best_batch(s, sequences)
    result: dict[str, Any] = {"batch_size": batch_size, "steps": STEPS, "dtype": None, "compiled": None}
    result["failed"] = []
    t0 = time.perf_counter()
    for name in ("adamw", "muon"):
        took_s = time.perf_counter() - t0
        if name == "muon" and s.seconds_left() < MARGIN * took_s:
            result[name] = {"problem": "left out, for want of time"}
            continue
        try:
            result[name], start = steps_with(s, name, batch_size)
            result |= {"dtype": start["dtype"], "compiled": start["compiled"]}
        except Exception as e:
            result[name] = {"problem": work.problem_of(e)}
            result["failed"].append(f"{name}: {result[name]['problem']}")
    return result


def steps_with(s: Session, name: str, batch_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was measured with an optimizer, and the first event of the run's log."""
    peak: int | None = None

    def on_update(n: int) -> None:
        nonlocal peak
        if n == 1:
            hardware.synchronize(s.device)
            work.forget_peak(s.device)  # train.py's own check of the form took more
        else:
            peak = work.peak_bytes(s.device)[0]

    settings = {"optimizer": name, "compile": work.compile_setting(s)}
    events = work.run_steps(s, f"steps-{name}", 1 + STEPS, batch_size, s.sizes.tokens_per_step, on_update, **settings)
    start = events[0]
    steps = [e for e in events if e["event"] == "iter"][1:]
    step_s = statistics.mean(e["time_ms"] for e in steps) / 1e3
    tokens_per_s = start["tokens_per_step"] / step_s
    return {
        "tokens_per_step": start["tokens_per_step"],
        "tokens_per_s": tokens_per_s,
        "step_s": step_s,
        "steps_s": [e["time_ms"] / 1e3 for e in steps],
        **work.mfu(s, tokens_per_s, start["flops_per_token"], start["dtype"]),
        "data_wait": statistics.mean(e["data_wait"] for e in steps),
        "peak_bytes": peak,
        "warm_up_s": start["warm_up_s"],
        "problem": None,
    }, start


def describe(result: dict[str, Any]) -> str:
    head = ["optimizer", "tokens/s", "step s", "MFU (published peak)", "MFU (measured peak)", "data wait"]
    head += ["peak GiB", "start s"]
    rows = []
    tokens = None
    for name in ("adamw", "muon"):
        r = result[name]
        if r["problem"]:
            rows.append([name, r["problem"], "", "", "", "", "", ""])
            continue
        tokens = r["tokens_per_step"]
        cells = [name, f"{r['tokens_per_s']:,.0f}", f"{r['step_s']:.4g}"]
        cells += [work.percent(r[k]) for k in ("mfu", "mfu_measured", "data_wait")]
        rows.append([*cells, work.gib(r["peak_bytes"]), f"{r['warm_up_s']:.1f}"])
    compiled = {None: "", True: ", compiled", False: ", not compiled"}[result["compiled"]]
    what = f"{result['steps']} steps of {tokens:,} tokens" if tokens else "No step"
    about = f"{what} after one that warms up, micro-batches of {result['batch_size']} in {result['dtype']}{compiled}."
    return f"{about}\n\n{markdown_table(head, rows, left_columns=1)}"
