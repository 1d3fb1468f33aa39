"""Stage 1: what the card reaches at the model's own shapes of matmul, in each dtype, and copies.

Each linear layer y = x w^T has three matmuls in training: forward, the gradient by its input and that by its weight.
Their FLOP/s, weighted by the FLOPs of a step, are the roof over training on this card: only faster matmuls lift it.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from bench.output import markdown_table
from bench.qualifying.session import Session, float32_precision
from deskgpt.machine import hardware, peak_flops
from model import GPT, GPTConfig

TOKENS = 8192  # rows of x; the head's output in float32 is then 1.6 GB
TOY_TOKENS = 256
SAMPLES = 7  # of which the median counts, after one that does not
SAMPLE_S = 0.01  # a sample is as many calls as fill about this time, queued without waiting
MOST_CALLS = 200
COPIED_BYTES = 1 << 30
TOY_COPIED_BYTES = 1 << 24

FORWARD = "forward"
FORMS = (FORWARD, "input gradient", "weight gradient")
WAYS = ("float32", "tf32", "bfloat16", "float16")  # float32 is without TF32


@dataclass(frozen=True)
class Matmul:
    """(m, k) @ (k, n), as often as `count` layers have it."""

    layer: str
    form: str
    m: int
    k: int
    n: int
    count: int

    def flops(self) -> int:
        return 2 * self.m * self.k * self.n


def measure(s: Session) -> dict[str, Any]:
    tokens = TOY_TOKENS if s.sizes.is_toy else TOKENS
    matmuls = matmuls_of(s.sizes.model, tokens)
    rows: list[dict[str, Any]] = [vars(m) | {"flops_per_s": {}} for m in matmuls]
    attention: dict[str, float | None] = {}
    why_not: dict[str, str] = {}
    for way in WAYS:
        with float32_precision(tf32=way == "tf32"):
            for m, row in zip(matmuls, rows, strict=True):
                row["flops_per_s"][way] = None if way in why_not else flops_of(m, way, s.device, why_not)
            if way in hardware.DTYPES:
                attention[way] = attention_speed(s.sizes.model, tokens, way, s.device, why_not)
        hardware.release_memory(s.device)
    rates = {way: [row["flops_per_s"][way] for row in rows] for way in WAYS}
    whole = {way: together(matmuls, rates[way]) for way in WAYS}
    attention_work = attention_flops(s.sizes.model, tokens)
    with_attention = {way: together(matmuls, rates[way], attention_work, attention[way]) for way in attention}
    fast = peak_flops.fast_dtype(s.device)
    published = peak_flops.published_flops(s.device, fast)
    return {
        "tokens": tokens,
        "rows": rows,
        "attention": attention,
        "why_not": why_not,
        "matmuls": whole,
        "with_attention": with_attention,
        "fast_dtype": fast,
        "published": published,
        "copy_bytes_per_s": copy_speed(s),
    }


# ---- matmuls -------------------------------------------------------------------------------------------------


def matmuls_of(config: GPTConfig, tokens: int) -> list[Matmul]:
    """The matmuls of the model's linear layers in a pass over this number of tokens, forward and backward."""
    with torch.device("meta"):
        model = GPT(config)
    counts: Counter[tuple[str, int, int]] = Counter()
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            counts[name.split(".", 3)[-1], layer.in_features, layer.out_features] += 1
    matmuls = []
    for (name, inputs, outputs), count in counts.items():
        sizes = ((tokens, inputs, outputs), (tokens, outputs, inputs), (outputs, tokens, inputs))
        matmuls += [Matmul(name, form, m, k, n, count) for form, (m, k, n) in zip(FORMS, sizes, strict=True)]
    return matmuls


def flops_of(m: Matmul, way: str, device: torch.device, why_not: dict[str, str]) -> float | None:
    """FLOP/s of one matmul; None, with the reason in why_not, where the device cannot do it in this way."""
    if way == "tf32" and not has_tf32(device):
        why_not[way] = "only NVIDIA's cards since Ampere have it"
        return None
    try:
        return m.flops() / seconds_of(call_of(m, way, device), device)
    except RuntimeError as e:  # no such kernel, or too little memory
        why_not[way] = " ".join(str(e).split())[:200]
        return None


def has_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0)


def call_of(m: Matmul, way: str, device: torch.device) -> Callable[[], Tensor]:
    """The matmul with random operands, laid out as autograd has them.

    y = x w^T has the weight transposed, its gradient g^T x the first operand; g w has neither.
    """
    draw = torch.Generator(device).manual_seed(0)

    def operand(rows: int, columns: int, transposed: bool) -> Tensor:
        shape = (columns, rows) if transposed else (rows, columns)
        x = torch.randn(shape, device=device, generator=draw).to(hardware.DTYPES.get(way, torch.float32))
        return x.t() if transposed else x

    left = operand(m.m, m.k, transposed=m.form == "weight gradient")
    right = operand(m.k, m.n, transposed=m.form == FORWARD)
    return lambda: left @ right


def attention_flops(c: GPTConfig, tokens: int) -> int:
    """FLOPs of attention in a step, counted as MFU counts them: as if it were not causal."""
    return 12 * c.n_layer * c.n_embd * c.block_size * tokens


def attention_speed(
    c: GPTConfig, tokens: int, dtype: str, device: torch.device, why_not: dict[str, str]
) -> float | None:
    """FLOP/s of causal attention, forward and backward."""
    T = c.block_size
    B = max(1, tokens // T)
    qkv = torch.randn(3, B, c.n_head, T, c.n_embd // c.n_head, device=device).to(hardware.DTYPES[dtype])
    q, k, v = (x.detach().requires_grad_() for x in qkv)
    grad = torch.ones_like(q)

    def once() -> Any:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(y, (q, k, v), grad)

    try:
        return attention_flops(c, B * T) / c.n_layer / seconds_of(once, device)
    except RuntimeError as e:
        why_not[f"attention in {dtype}"] = " ".join(str(e).split())[:200]
        return None


def together(
    matmuls: list[Matmul], rates: list[float | None], attention_work: int = 0, attention: float | None = None
) -> float | None:
    """FLOP/s of all matmuls of a step, with attention where its speed is given; None if one was not measured."""
    flops = 0.0
    seconds = 0.0
    for m, rate in zip(matmuls, rates, strict=True):
        if rate is None:
            return None
        flops += m.flops() * m.count
        seconds += m.flops() * m.count / rate
    if attention is not None:
        flops += attention_work
        seconds += attention_work / attention
    return flops / seconds


# ---- copies, and the time of a call ---------------------------------------------------------------------------


def copy_speed(s: Session) -> float:
    """Bytes per second that a copy within the device's memory reads and writes."""
    n = TOY_COPIED_BYTES
    if s.device.type == "cuda":
        n = min(COPIED_BYTES, torch.cuda.mem_get_info(s.device)[0] // 4)
    source = torch.zeros(n, dtype=torch.uint8, device=s.device)
    target = torch.empty_like(source)
    return 2 * n / seconds_of(lambda: target.copy_(source), s.device)


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """The median seconds of a call, of several that are queued one after the other."""
    call()  # chooses a kernel, and loads it
    times = []
    calls = 1
    for _ in range(SAMPLES + 1):
        hardware.synchronize(device)
        t0 = time.perf_counter()
        for _ in range(calls):
            call()
        hardware.synchronize(device)
        times.append((time.perf_counter() - t0) / calls)
        if len(times) == 1:
            calls = max(1, min(MOST_CALLS, round(SAMPLE_S / times[0])))
    return statistics.median(times[1:])


# ---- as Markdown ---------------------------------------------------------------------------------------------


def describe(result: dict[str, Any]) -> str:
    head = ["layer", "matmul", "m", "k", "n", *WAYS]
    body = []
    for row in result["rows"]:
        sizes = [str(row[x]) for x in "mkn"]
        body.append([row["layer"], row["form"], *sizes, *(tera(row["flops_per_s"][way]) for way in WAYS)])
    body.append(["attention", "both passes", "", "", "", *(tera(result["attention"].get(way)) for way in WAYS)])
    body.append(["all matmuls", "", "", "", "", *(tera(result["matmuls"][way]) for way in WAYS)])
    body.append(["with attention", "", "", "", "", *(tera(result["with_attention"].get(way)) for way in WAYS)])
    lines = [
        f"TFLOP/s at {result['tokens']} tokens; medians. float32 is without TF32. "
        "The whole is weighted by the FLOPs of a training step.",
        markdown_table(head, body, left_columns=2),
        roof_line(result),
        f"Copies within memory: {result['copy_bytes_per_s'] / 1e9:.4g} GB/s, read and written.",
    ]
    lines += [f"- {way}: n/a ({reason})" for way, reason in result["why_not"].items()]
    return "\n\n".join(lines)


def roof_line(result: dict[str, Any]) -> str:
    """What the figures mean for MFU."""
    dtype = result["fast_dtype"]
    roof = result["with_attention"][dtype]
    if roof is None:
        return f"The roof over training in {dtype}: n/a."
    line = f"The roof over training in {dtype}: {tera(roof)} TFLOP/s"
    if result["published"] is None:
        return f"{line}; this device has no published peak."
    peak, source = result["published"]
    return f"{line}, {roof / peak:.1%} of the published peak ({peak / 1e12:.4g}, {source})."


def tera(flops_per_s: float | None) -> str:
    return "n/a" if flops_per_s is None else f"{flops_per_s / 1e12:.3g}"
