"""Stage 4: memory and speed by micro-batch, up to out of memory, and the fastest for cards of some sizes."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from typing import Any

import torch

from bench.output import markdown_table
from bench.qualifying import work
from bench.qualifying.session import Session
from bench.timing import gpu_memory
from deskgpt.compute.forms import clearly_fastest
from deskgpt.compute.runner import Form, Runner
from deskgpt.machine import hardware
from deskgpt.predict.fit import USABLE
from deskgpt.predict.memory import memory
from model import GPT

CAPS_GB = (8, 12, 16, 24, 80)  # memory of usual cards, in 2^30 bytes
NOMINAL = 1.1  # a card's memory in words is at most this factor above what its driver says
MARGIN = 1.3  # of the longest case so far: with less time left, no other begins

Row = dict[str, Any]


def measure(s: Session) -> dict[str, Any]:
    form = work.usual_form(s.device)
    model = work.new_model(s)
    not_compiled = None
    rows: list[Row] = []
    longest_s = 0.0
    batch_size = s.sizes.first_batch
    while batch_size <= s.sizes.last_batch and (not rows or s.seconds_left() >= MARGIN * longest_s):
        t0 = time.perf_counter()
        row = case(s, model, form, batch_size)
        if not rows and form.compiled and row["problem"] not in (None, "out of memory"):
            not_compiled = row["problem"]
            form = replace(form, compiled=False)
            row = case(s, model, form, batch_size)
        longest_s = max(longest_s, time.perf_counter() - t0)
        rows.append(row)
        if not row["fits"]:
            break
        batch_size *= 2
    hardware.release_memory(s.device)

    total = hardware.memory_bytes(s.device)
    outside = outside_bytes(s.device)
    best_for_gb: dict[str, int | None] = {}
    for gb in CAPS_GB:
        cap = gb * 2**30
        # What a card with more memory than this one could hold was not tried.
        is_known = total is None or cap <= NOMINAL * total
        best_for_gb[str(gb)] = fastest(rows, USABLE * cap - outside) if is_known else None
    return {
        "form": form.facts(),
        "not_compiled": not_compiled,
        "rows": rows,
        "best": fastest(rows),
        "best_for_gb": best_for_gb,
        "outside_bytes": outside,
        "out_of_time": rows[-1]["fits"] and batch_size <= s.sizes.last_batch,
    }


def case(s: Session, model: GPT, form: Form, batch_size: int) -> Row:
    """A row: memory and time of a micro-batch of this size, next to AdamW's state and gradients."""
    predicted = memory(work.predicted_step(s, form, batch_size))
    row: Row = {
        "batch_size": batch_size,
        "fits": False,
        "allocated_bytes": None,
        "reserved_bytes": None,
        "predicted_bytes": sum(predicted.values()),
        "step_ms": None,
        "host_ms": None,
        "tokens_per_s": None,
        "problem": None,
    }
    hardware.release_memory(s.device)  # with the graphs of the case before, whose shapes would become variable
    try:
        row |= measured(s, model, form, batch_size)
    except Exception as e:
        row["problem"] = work.problem_of(e)
    for p in model.parameters():
        p.grad = None
    speed = f"{row['tokens_per_s']:,.0f} tokens/s" if row["fits"] else row["problem"]
    s.say(f"micro-batch {batch_size}, {form}: {speed}")
    return row


def measured(s: Session, model: GPT, form: Form, batch_size: int) -> Row:
    """What was measured of a row. Raises what torch raises where memory runs out or compiling fails."""
    runner = Runner(model, form)
    optimizer = work.adamw(runner)
    batch = work.random_batch(s, batch_size)

    def micro_batch() -> None:
        runner.forward_backward(*batch, work.MICRO_STEPS)

    micro_batch()
    work.update(runner, optimizer)  # makes AdamW's state
    micro_batch()
    work.forget_peak(s.device)
    time_of = work.median_time(s.device, micro_batch)
    work.update(runner, optimizer)
    hardware.synchronize(s.device)
    allocated, reserved = work.peak_bytes(s.device)
    return {
        "fits": True,
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "step_ms": time_of.ms,
        "host_ms": time_of.host_ms,
        "tokens_per_s": batch_size * s.sizes.model.block_size / time_of.ms * 1e3,
    }


# ---- which is best -------------------------------------------------------------------------------------------


def fastest(rows: list[Row], limit_bytes: float = math.inf) -> int | None:
    """The micro-batch that train.py's auto_batch would take among those within this memory; None: none fits.

    Memory is what torch has reserved, or where it is not known, what was predicted.
    """
    fitting = [r for r in rows if r["fits"] and (r["reserved_bytes"] or r["predicted_bytes"]) <= limit_bytes]
    times = {r["batch_size"]: 1 / r["tokens_per_s"] for r in fitting}
    return clearly_fastest(times) if times else None


def outside_bytes(device: torch.device) -> int:
    """What the GPU holds for this process outside torch's allocator: CUDA's context and libraries.

    Where the driver does not say it by process, all that is in use counts, other programs' share too.
    """
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    in_use = gpu_memory(os.getpid()) or total - free
    return max(0, in_use - torch.cuda.memory_reserved(device))


# ---- in words ------------------------------------------------------------------------------------------------


def describe(result: dict[str, Any]) -> str:
    best = result["best"]
    lines = [
        f"Forward and backward pass in {Form(**result['form'])}; memory with gradients and AdamW's state. Host ms: "
        "until the call returns, with nothing queued before it."
    ]
    if result["not_compiled"]:
        lines.append(f"Compiling failed: {result['not_compiled']}.")
    head = ["micro-batch", "tokens/s", "ms", "host ms", "allocated GiB", "reserved GiB", "predicted GiB"]
    head.append("predicted / allocated")
    body = []
    for r in result["rows"]:
        cells = [f"{r['batch_size']}{' (fastest)' if r['batch_size'] == best else ''}"]
        if r["fits"]:
            cells += [f"{r['tokens_per_s']:,.0f}", f"{r['step_ms']:.2f}", f"{r['host_ms']:.2f}"]
        else:
            cells += [r["problem"], "", ""]
        cells += [work.gib(r[k]) for k in ("allocated_bytes", "reserved_bytes", "predicted_bytes")]
        allocated = r["allocated_bytes"]
        body.append([*cells, f"{r['predicted_bytes'] / allocated:.3f}" if allocated else "n/a"])
    lines += ["", markdown_table(head, body), ""]

    caps = [[f"{gb} GB", str(size or "n/a")] for gb, size in result["best_for_gb"].items()]
    lines.append(
        f"The fastest micro-batch whose reserved memory, with {work.gib(result['outside_bytes'])} GiB outside torch, "
        f"stays within {USABLE:.0%} of a card; n/a: none does, or this card has less:"
    )
    lines += ["", markdown_table(["card", "micro-batch"], caps)]
    if result["out_of_time"]:
        lines += ["", "Larger ones were not tried, for want of time."]
    return "\n".join(lines)
