"""Stage 6: where the time of a training step goes: its longest kernels, and how long the device is idle.

One step of train.py itself is profiled, from one update to the next. On CUDA kernels count, elsewhere operators, each
without those that it calls. What the device does at the same time counts in full, and idle is the rest of the step.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch.autograd import DeviceType

import train
from bench import speed
from bench.output import markdown_table
from bench.qualifying import work
from bench.qualifying.session import Session
from deskgpt.run.log import read_events
from deskgpt.system import hardware

MICRO_BATCHES = 4  # of the profiled step
LONGEST = 30  # kernels that are listed


def measure(s: Session) -> dict[str, Any]:
    batch_size = work.best_batch(s)
    settings: dict[str, Any] = work.settings_of(s.sizes.model) | {"compile": work.compile_setting(s)}
    settings |= {"batch_size": batch_size, "gradient_accumulation_steps": MICRO_BATCHES, "device": str(s.device)}
    folder = work.tokens_for(s)
    profiler = speed.profiled(replace(train.TrainConfig(), **settings), folder, 1)
    rows = kernels(profiler.key_averages(), s.device.type == "cuda")
    hardware.release_memory(s.device)

    log = read_events(folder / "ours" / "log.jsonl")
    start = log[0]
    before = [e["time_ms"] for e in log if e["event"] == "iter"][1 : speed.NOT_PROFILED]
    step_ms = statistics.median(before)
    busy_ms = sum(row["ms"] for row in rows)
    about = {"batch_size": batch_size, "dtype": start["dtype"], "compiled": start["compiled"], "step_ms": step_ms}
    about |= {"others_ms": sum(row["ms"] for row in rows[LONGEST:]), "idle_ms": max(0.0, step_ms - busy_ms)}
    return about | {"longest": rows[:LONGEST]}


def kernels(averages: Iterable[Any], on_cuda: bool) -> list[dict[str, Any]]:
    """What took time in a profile of torch, the longest first.

    On CUDA the profile also has the operators that started the kernels, and named ranges such as the optimizer's step.
    """
    kind = DeviceType.CUDA if on_cuda else DeviceType.CPU
    rows = []
    for e in averages:
        if e.device_type == kind and not e.is_user_annotation:
            us = e.self_device_time_total if on_cuda else e.self_cpu_time_total
            rows.append({"name": e.key, "count": e.count, "ms": us / 1e3})
    return sorted(rows, key=lambda row: -row["ms"])


def describe(result: dict[str, Any]) -> str:
    whole = sum(row["ms"] for row in result["longest"]) + result["others_ms"] + result["idle_ms"]
    named = [(row["name"][:80], str(row["count"]), row["ms"]) for row in result["longest"]]
    named += [("all others", "", result["others_ms"]), ("idle", "", result["idle_ms"]), ("whole", "", whole)]
    cells = [[name, count, f"{ms:.2f}", f"{ms / whole:.1%}"] for name, count, ms in named]
    compiled = "compiled" if result["compiled"] else "not compiled"
    return (
        f"One step of {MICRO_BATCHES} micro-batches of {result['batch_size']} in {result['dtype']}, {compiled}: "
        f"{result['step_ms']:.2f} ms without the profiler.\n\n"
        f"{markdown_table(['kernel', 'times', 'ms', 'share'], cells, left_columns=1)}"
    )
