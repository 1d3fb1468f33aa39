"""Stage 4: memory and speed by micro-batch, from the largest that is predicted to fit downwards."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from bench.output import markdown_table
from bench.qualifying import work
from bench.qualifying.session import Session
from deskgpt.compute.implementation import clearly_fastest
from deskgpt.compute.runner import Runner, Variant
from deskgpt.estimate.fit import USABLE, largest_batch
from deskgpt.estimate.memory import Step, memory
from deskgpt.system import hardware
from deskgpt.system.formatting import in_gib
from model import GPT

Row = dict[str, Any]


def measure(s: Session) -> dict[str, Any]:
    form = work.usual_form(s.device)
    model = work.new_model(s)
    sizes = sizes_of(s, form)
    not_compiled = None
    rows: list[Row] = []
    times: dict[int, float] = {}  # of a token
    for batch_size in s.while_there_is_time(sizes):
        row = case(s, model, form, batch_size)
        if form.compiled and not times and row["problem"] not in (None, work.OUT_OF_MEMORY):
            not_compiled = row["problem"]
            form = replace(form, compiled=False)
            row = case(s, model, form, batch_size)
        rows.append(row)
        if row["problem"] == work.OUT_OF_MEMORY:
            continue
        if not row["problem"]:
            times = {batch_size: 1 / row["tokens_per_s"]} | times
        if row["problem"] or clearly_fastest(times) != batch_size:
            sizes = sizes[: len(rows)]  # smaller ones fail alike, or are slower still
            break
    hardware.release_memory(s.device)
    return {
        "form": form.facts(),
        "not_compiled": not_compiled,
        "rows": rows,
        "best": clearly_fastest(times) if times else None,  # as train.py's auto_batch chooses
        "unfinished": [f"micro-batch {size}" for size in sizes[len(rows) :]],
    }


def sizes_of(s: Session, form: Variant) -> list[int]:
    """The largest micro-batch that is predicted to fit, and then one half of it after the other."""
    usable = hardware.usable_memory_bytes(s.device) or math.inf
    step = Step(s.sizes.model, s.sizes.last_batch, form, s.device.type)
    size = largest_batch(step, s.sizes.last_batch, USABLE * usable)
    sizes = [max(size, s.sizes.first_batch)]
    while sizes[-1] // 2 >= s.sizes.first_batch:
        sizes.append(sizes[-1] // 2)
    return sizes


def case(s: Session, model: GPT, form: Variant, batch_size: int) -> Row:
    """A row: memory and time of a micro-batch of this size, next to AdamW's state and gradients; or its problem."""
    predicted = memory(Step(s.sizes.model, batch_size, form, s.device.type))
    row: Row = {"batch_size": batch_size, "predicted_bytes": sum(predicted.values())}
    hardware.release_memory(s.device)  # with the graphs of the case before, whose shapes would become variable
    try:
        row |= measured(s, model, form, batch_size) | {"problem": None}
    except Exception as e:
        row["problem"] = work.problem_of(e)
    for p in model.parameters():
        p.grad = None
    s.print0(f"micro-batch {batch_size}, {form}: {row['problem'] or format(row['tokens_per_s'], ',.0f') + ' tokens/s'}")
    return row


def measured(s: Session, model: GPT, form: Variant, batch_size: int) -> Row:
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
    seconds = work.seconds_of(micro_batch, s.device)
    work.update(runner, optimizer)
    hardware.synchronize(s.device)
    allocated, reserved = work.peak_bytes(s.device)
    tokens_per_s = batch_size * s.sizes.model.block_size / seconds
    return {"allocated_bytes": allocated, "reserved_bytes": reserved, "ms": 1e3 * seconds, "tokens_per_s": tokens_per_s}


def describe(result: dict[str, Any]) -> str:
    head = ["micro-batch", "tokens/s", "ms", "allocated GiB", "reserved GiB", "predicted GiB"]
    body = []
    for r in result["rows"]:
        mark = " (fastest)" if r["batch_size"] == result["best"] else ""
        speed = [r["problem"], ""] if r["problem"] else [f"{r['tokens_per_s']:,.0f}", f"{r['ms']:.2f}"]
        sizes = [in_gib(r.get(name)) for name in ("allocated_bytes", "reserved_bytes", "predicted_bytes")]
        body.append([f"{r['batch_size']}{mark}", *speed, *sizes])
    lines = [
        f"Forward and backward pass in {Variant(**result['form'])}; memory with gradients and AdamW's state.",
        markdown_table(head, body),
    ]
    if result["not_compiled"]:
        lines.append(f"Compiling failed: {result['not_compiled']}.")
    return "\n\n".join(lines)
