"""Stage 6: where the time of a training step goes, by kind of kernel.

One step of train.py itself is profiled, from one update to the next. On CUDA kernels count, elsewhere operators, each
without those that it calls. What the device does at the same time counts in full, and idle is the rest of the step.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

import train
from bench import speed
from bench.output import markdown_table
from bench.qualifying import work
from bench.qualifying.session import Session
from deskgpt.machine import hardware
from deskgpt.run.log import read_events

MICRO_BATCHES = 4  # of the profiled step
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
    r"|aten::(mm|addmm|linear|matmul)$|mkldnn|mkl_linear|_linear_pointwise",
    re.I,
)
EMBEDDING = re.compile(r"embedding", re.I)
# The last pattern is of inductor's kernels, whose names list the operations in them: these compute nothing.
COPY = re.compile(
    r"^aten::(copy_|_to_copy|to|clone|contiguous|cat|fill_|zero_)$|memcpy|memset|direct_copy|CatArray"
    r"|^triton_[a-z]+_fused_((_to_copy|copy|clone|cat|t|view|transpose|permute|slice|split|zeros)_)+\d+$",
    re.I,
)


@dataclass(frozen=True)
class Kernel:
    """What took time: a kernel of the GPU, or an operator on a CPU."""

    name: str
    ms: float
    operators: tuple[str, ...] = ()  # that it belongs to, the innermost first
    shape: tuple[tuple[int, ...], ...] = ()  # of the innermost operator's tensors


def measure(s: Session) -> dict[str, Any]:
    batch_size = work.best_batch(s)
    settings: dict[str, Any] = work.settings_of(s.sizes.model) | {"compile": work.compile_setting(s)}
    settings |= {"batch_size": batch_size, "gradient_accumulation_steps": MICRO_BATCHES, "device": str(s.device)}
    folder = work.tokens_for(s)
    profiler = speed.profiled(replace(train.TrainConfig(), **settings), folder, 1)
    kernels = kernels_of(profiler.events(), s.device.type)
    hardware.release_memory(s.device)

    log = read_events(folder / "ours" / "log.jsonl")
    start = log[0]
    before = [e["time_ms"] for e in log if e["event"] == "iter"][1 : speed.NOT_PROFILED]
    about = {"batch_size": batch_size, "dtype": start["dtype"], "compiled": start["compiled"]}
    return about | summed(kernels, statistics.median(before), s.sizes.model.vocab_size)


# ---- from the profile ----------------------------------------------------------------------------------------


def kernels_of(events: Iterable[Any], device_type: str) -> list[Kernel]:
    """What took time in a profile of torch."""
    events = list(events)
    if device_type != "cuda":
        timed = [e for e in events if e.self_cpu_time_total > 0 and not is_annotation(e)]
        return [Kernel(e.name, e.self_cpu_time_total / 1e3, chain(e), shape_of(e)) for e in timed]

    out = []
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
    innermost = names[:2]
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
    if any_match(COPY, innermost):
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


def summed(kernels: list[Kernel], step_ms: float, vocab_size: int) -> dict[str, Any]:
    """The step's ms by category, which add up to the whole, and the kernels that took longest."""
    ms: dict[str, float] = dict.fromkeys(CATEGORIES, 0.0)
    by_name: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for k in kernels:
        kind = category(k, vocab_size)
        ms[kind] += k.ms
        by_name[kind, k.name].append(k.ms)
    ms["idle"] = max(0.0, step_ms - sum(ms.values()))
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:LONGEST]
    return {
        "step_ms": step_ms,
        "ms": ms,
        "longest": [
            {"name": name, "category": kind, "count": len(times), "ms": sum(times)} for (kind, name), times in longest
        ],
    }


# ---- in words ------------------------------------------------------------------------------------------------


def describe(result: dict[str, Any]) -> str:
    whole = sum(result["ms"].values())
    rows = [[kind, f"{ms:.2f}", f"{ms / whole:.1%}"] for kind, ms in result["ms"].items()]
    rows.append(["whole", f"{whole:.2f}", "100.0%"])
    longest = [[k["name"][:80], k["category"], str(k["count"]), f"{k['ms']:.2f}"] for k in result["longest"]]
    compiled = "compiled" if result["compiled"] else "not compiled"
    return "\n\n".join(
        [
            f"One step of {MICRO_BATCHES} micro-batches of {result['batch_size']} in {result['dtype']}, {compiled}: "
            f"{result['step_ms']:.2f} ms without the profiler.",
            markdown_table(["", "ms", "share"], rows, left_columns=1),
            "The longest:",
            markdown_table(["kernel", "", "times", "ms"], longest, left_columns=2),
        ]
    )
