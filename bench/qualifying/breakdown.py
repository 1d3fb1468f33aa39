"""Stage 6: where the time of a training step goes, by kind of kernel, and what moves data without computing.

One step of train.py itself is profiled, from one update to the next. On CUDA kernels count, elsewhere operators, each
without those that it calls. What the device does at the same time counts in full, and idle is the rest of the step.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from bench.output import markdown_table
from bench.qualifying import work
from bench.qualifying.session import Session
from deskgpt.machine import hardware
from model import GPT

MICRO_BATCHES = 4  # of the profiled step
WARM_UP = 2  # steps before it
TIMED = 3  # steps after it, whose median is the time of a step without a profiler
LONGEST = 15  # kernels that are listed

CATEGORIES = (
    "body matmuls",
    "head matmuls",
    "rest of head and loss",
    "attention",
    "norms and elementwise",
    "casts and copies",
    "gradient accumulation",
    "clipping and optimizer",
    "idle",
)

# Names of operators, and of kernels where the operator that started one is not known.
OPTIMIZER = re.compile(r"Optimizer\.|_foreach_|_fused_adam|FusedAdam|multi_tensor_apply|_amp_|aten::linalg_vector_norm")
LOSS = re.compile(r"chunked_?cross_?entropy|cross_entropy|nll_loss|log_softmax|logsumexp", re.I)
ATTENTION = re.compile(r"scaled_dot_product|flash|fmha|sdpa|efficient_attention|aten::bmm|aten::_softmax")
MATMUL = re.compile(
    r"gemm|nvjet|cutlass|xmma|splitk|gemv|triton_tem|triton_mm|cublas"
    r"|aten::(mm|addmm|linear|matmul|_int_mm|_scaled_mm)$|mkldnn|mkl_linear|_linear_pointwise",
    re.I,
)
EMBEDDING = re.compile(r"embedding", re.I)
COPY = re.compile(
    r"^aten::(copy_|_to_copy|to|clone|contiguous|cat|fill_|zero_)$|memcpy|memset|direct_copy|CatArray", re.I
)
# Kernels of inductor that compute nothing. Their names list the operations in them.
INDUCTOR_MOVES = re.compile(
    r"^triton_[a-z]+_fused_((_to_copy|copy|clone|cat|t|view|transpose|permute|slice|split|zeros)_)+\d+$"
)
INDUCTOR_CASTS = re.compile(r"^triton_[a-z]+_fused_((_to_copy|t|view|transpose|permute)_)+\d+$")
CONCATENATION = re.compile(r"aten::cat$|CatArray|triton_\w+?_fused_\w*cat")

# What moves data for each micro-batch and might be avoided.
TRAFFIC = ("weights cast", "gradients accumulated outside the graph", "gradients of q, k and v concatenated")


@dataclass(frozen=True)
class Kernel:
    """What took time: a kernel of the GPU, or an operator on a CPU."""

    name: str
    ms: float
    operators: tuple[str, ...] = ()  # that it belongs to, the innermost first
    shape: tuple[tuple[int, ...], ...] = ()  # of the innermost operator's tensors
    is_whole: bool = True  # False for what an operator takes itself around those that it calls: not counted


def measure(s: Session) -> dict[str, Any]:
    batch_size = work.best_batch(s)
    kernels: list[Kernel] = []
    syncs: list[float] = []
    profiler = torch.profiler.profile(record_shapes=True)

    def on_update(n: int) -> None:
        if n == WARM_UP:
            hardware.synchronize(s.device)
            profiler.start()
        if n == WARM_UP + 1:
            hardware.synchronize(s.device)
            profiler.stop()
            events = profiler.events()
            kernels.extend(kernels_of(events, s.device.type))
            syncs.extend(e.cpu_time_total / 1e3 for e in events if e.name == "aten::_local_scalar_dense")

    tokens = MICRO_BATCHES * batch_size * s.sizes.model.block_size
    steps = WARM_UP + 1 + TIMED
    events = work.run_steps(s, "breakdown", steps, batch_size, tokens, on_update, compile=work.compile_setting(s))
    step_ms = statistics.median(e["time_ms"] for e in events if e["event"] == "iter" and e["iter"] > WARM_UP + 1)
    with torch.device("meta"):
        shapes = {tuple(p.shape) for p in GPT(s.sizes.model).parameters() if p.dim() == 2}
    result = summed(kernels, step_ms, s.sizes.model.vocab_size, shapes, MICRO_BATCHES)
    start = events[0]
    return result | {
        "batch_size": batch_size,
        "dtype": start["dtype"],
        "compiled": start["compiled"],
        "syncs": len(syncs),
        "sync_ms": sum(syncs),
    }


# ---- from the profile ----------------------------------------------------------------------------------------


def kernels_of(events: Iterable[Any], device_type: str) -> list[Kernel]:
    """What took time in a profile of torch."""
    events = list(events)
    out = []
    if device_type != "cuda":
        for e in events:
            if e.self_cpu_time_total > 0 and not is_annotation(e):
                out.append(Kernel(e.name, e.self_cpu_time_total / 1e3, chain(e), shape_of(e), not e.cpu_children))
        return out
    annotations = {e.name for e in events if is_annotation(e)}  # which the profiler shows on the GPU too
    known_ms: defaultdict[str, float] = defaultdict(float)
    for e in events:
        for kernel in e.kernels:
            if kernel.name not in annotations:
                out.append(Kernel(kernel.name, kernel.duration / 1e3, chain(e), shape_of(e)))
                known_ms[kernel.name] += kernel.duration / 1e3
    # Kernels that no operator has started: copies of the loader, and what a graph starts outside torch's operators.
    for e in events:
        if e.device_type != torch.autograd.DeviceType.CUDA or e.name in annotations:
            continue
        ms = (e.time_range.end - e.time_range.start) / 1e3
        if known_ms[e.name] >= 0.999 * ms:
            known_ms[e.name] -= ms
        else:
            out.append(Kernel(e.name, ms))
    return out


def is_annotation(e: Any) -> bool:
    """Whether an event is a named range, such as the optimizer's step, and no operator."""
    return bool(getattr(e, "is_user_annotation", False))


def chain(e: Any) -> tuple[str, ...]:
    """The names of an operator and of those that it is part of, the innermost first."""
    names = []
    while e is not None:
        names.append(e.name)
        e = e.cpu_parent
    return tuple(names)


def shape_of(e: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(shape) for shape in e.input_shapes or [] if shape and not isinstance(shape[0], list))


# ---- by kind -------------------------------------------------------------------------------------------------


def category(k: Kernel, vocab_size: int) -> str:
    """The one of CATEGORIES to which a kernel belongs."""
    names = (k.name, *k.operators)
    innermost = (k.name, *k.operators[:1])
    in_loss = any_match(LOSS, names)
    of_vocabulary = any(vocab_size in shape for shape in k.shape)
    if any_match(OPTIMIZER, names):
        return "clipping and optimizer"
    if is_accumulation(k):
        return "gradient accumulation"
    if any_match(ATTENTION, names):
        return "attention"
    if in_loss and not any_match(MATMUL, innermost):
        return "rest of head and loss"
    if moves_only(k):
        return "casts and copies"
    if any_match(MATMUL, innermost):
        return "head matmuls" if in_loss or of_vocabulary else "body matmuls"
    if of_vocabulary and not any_match(EMBEDDING, names):
        return "rest of head and loss"
    return "norms and elementwise"


def any_match(pattern: re.Pattern[str], names: Iterable[str]) -> bool:
    return any(pattern.search(name) for name in names)


def is_accumulation(k: Kernel) -> bool:
    """Whether a kernel adds a gradient to the one of earlier micro-batches, outside the graph."""
    if any("AccumulateGrad" in name for name in k.operators):
        return True
    return k.operators == ("aten::add_",) and any(len(shape) >= 1 for shape in k.shape)  # Runner's own, on a CPU


def moves_only(k: Kernel) -> bool:
    """Whether a kernel only copies, perhaps into another dtype."""
    return any_match(COPY, (k.name, *k.operators[:1])) or bool(INDUCTOR_MOVES.match(k.name))


def summed(
    kernels: list[Kernel], step_ms: float, vocab_size: int, weight_shapes: set[tuple[int, ...]], micro_batches: int
) -> dict[str, Any]:
    """The step's ms by category, which add up to the whole, and what only moves data."""
    ms: dict[str, float] = dict.fromkeys(CATEGORIES, 0.0)
    n_kernels = 0
    by_name: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    traffic = {name: {"count": 0.0, "ms": 0.0} for name in TRAFFIC}
    for k in kernels:
        kind = category(k, vocab_size)
        ms[kind] += k.ms
        by_name[kind, k.name].append(k.ms)
        if kind == "clipping and optimizer":
            continue
        n_kernels += k.is_whole
        item = traffic_item(k, kind, weight_shapes)
        if item:
            traffic[item]["count"] += k.is_whole / micro_batches
            traffic[item]["ms"] += k.ms / micro_batches
    busy_ms = sum(ms.values())
    ms["idle"] = max(0.0, step_ms - busy_ms)
    whole_ms = busy_ms + ms["idle"]
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:LONGEST]
    return {
        "step_ms": step_ms,
        "whole_ms": whole_ms,
        "ms": ms,
        "share": {kind: value / whole_ms for kind, value in ms.items()},
        "micro_batches": micro_batches,
        "kernels_per_micro_batch": n_kernels / micro_batches,
        "traffic": traffic,
        "longest": [
            {"name": name, "category": kind, "count": len(times), "ms": sum(times)} for (kind, name), times in longest
        ],
    }


def traffic_item(k: Kernel, kind: str, weight_shapes: set[tuple[int, ...]]) -> str | None:
    """The one of TRAFFIC to which a kernel of this category belongs."""
    if kind == "gradient accumulation":
        return TRAFFIC[1]
    if any_match(CONCATENATION, (k.name, *k.operators[:1])):
        return TRAFFIC[2]
    casts = k.operators[:1] == ("aten::copy_",) and "aten::_to_copy" in k.operators
    if casts and any(shape in weight_shapes for shape in k.shape):
        return TRAFFIC[0]
    return TRAFFIC[0] if INDUCTOR_CASTS.match(k.name) else None  # the shapes of inductor's kernels are not known


# ---- in words ------------------------------------------------------------------------------------------------


def describe(result: dict[str, Any]) -> str:
    whole = result["whole_ms"]
    rows = [[kind, f"{ms:.2f}", f"{result['share'][kind]:.1%}"] for kind, ms in result["ms"].items()]
    rows.append(["whole", f"{whole:.2f}", "100.0%"])
    compiled = "compiled" if result["compiled"] else "not compiled"
    lines = [
        f"One step of {result['micro_batches']} micro-batches of {result['batch_size']} in {result['dtype']}, "
        f"{compiled}: {result['step_ms']:.2f} ms without the profiler, {result['kernels_per_micro_batch']:.0f} kernels "
        "per micro-batch.",
        "",
        markdown_table(["", "ms", "share"], rows, left_columns=1),
        "",
    ]
    rows = [[name, f"{x['count']:.4g}", f"{x['ms']:.3f}"] for name, x in result["traffic"].items()]
    lines += [
        "Per micro-batch:",
        "",
        markdown_table(["", "times", "ms"], rows, left_columns=1),
        "",
        f"In the whole step the host waits {result['syncs']} times for a value (.item()), {result['sync_ms']:.3f} ms.",
        "",
    ]
    rows = [[k["name"][:80], k["category"], str(k["count"]), f"{k['ms']:.2f}"] for k in result["longest"]]
    lines += ["The longest:", "", markdown_table(["kernel", "", "times", "ms"], rows, left_columns=2)]
    return "\n".join(lines)
