"""Stage 1: what the card reaches at the model's own shapes, in each dtype; and how fast it copies.

Linear layers and attention are timed forward and backward, as in training. Together, weighted by the FLOPs of a step,
they are the roof over training on this card: only faster matmuls lift it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from bench.output import markdown_table
from bench.qualifying import work
from bench.qualifying.session import Session
from deskgpt.kernels.verify import full_float32
from deskgpt.system import hardware, peaks
from deskgpt.system.formatting import in_tera
from model import GPT, GPTConfig

SEQUENCES = 8  # of 1024 tokens; the head's output in float32 is then 1.6 GB
TOY_SEQUENCES = 4
COPIED_BYTES = 1 << 30
TOY_COPIED_BYTES = 1 << 24

ATTENTION = "attention"
WAYS = ("float32", "tf32", "bfloat16", "float16")  # float32 is without TF32


@dataclass(frozen=True)
class Part:
    """Work of a training step: linear layers of one shape, or attention."""

    name: str
    inputs: int  # features of a token
    outputs: int
    count: int  # layers that have it
    flops: int  # of one of them, forward and backward


def measure(s: Session) -> dict[str, Any]:
    c = s.sizes.model
    sequences = TOY_SEQUENCES if s.sizes.is_toy else SEQUENCES
    parts = parts_of(c, sequences * c.block_size)
    ways = [way for way in WAYS if way != "tf32" or has_tf32(s.device)]
    rates: dict[str, list[float | None]] = {}
    why_not: dict[str, str] = {}
    for way in ways:
        with nullcontext() if way == "tf32" else full_float32():
            rates[way] = [flops_per_s(part, c, sequences, way, s.device, why_not) for part in parts]
        hardware.release_memory(s.device)
    fast = peaks.fast_dtype(s.device)
    return {
        "tokens": sequences * c.block_size,
        "parts": [vars(part) for part in parts],
        "rates": rates,
        "roofs": {way: together(parts, rates[way]) for way in ways},
        "why_not": why_not,
        "fast_dtype": fast,
        "published": peaks.published_flops(s.device, fast),
        "copy_bytes_per_s": copy_speed(s),
    }


# ---- the work of a step --------------------------------------------------------------------------------------


def parts_of(c: GPTConfig, tokens: int) -> list[Part]:
    """The model's linear layers, and its attention, whose FLOPs count as in MFU: as if it were not causal."""
    with torch.device("meta"):
        model = GPT(c)
    counts: Counter[tuple[str, int, int]] = Counter()
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            counts[name.split(".", 3)[-1], layer.in_features, layer.out_features] += 1
    linear = [Part(*shape, count, 6 * tokens * shape[1] * shape[2]) for shape, count in counts.items()]
    return [*linear, Part(ATTENTION, c.n_embd, c.n_embd, c.n_layer, 12 * c.n_embd * c.block_size * tokens)]


def flops_per_s(
    part: Part, c: GPTConfig, sequences: int, way: str, device: torch.device, why_not: dict[str, str]
) -> float | None:
    """None, with the reason in why_not, where the device cannot do it in this way."""
    try:
        return part.flops / work.seconds_of(call_of(part, c, sequences, way, device), device)
    except RuntimeError as e:  # no such kernel, or too little memory
        why_not[f"{part.name} in {way}"] = work.problem_of(e)
        return None


def call_of(part: Part, c: GPTConfig, sequences: int, way: str, device: torch.device) -> Callable[[], Any]:
    """The part, forward and backward, on random tensors."""
    draw = torch.Generator(device).manual_seed(0)

    def operand(*shape: int) -> Tensor:
        x = torch.randn(shape, device=device, generator=draw)
        return x.to(hardware.DTYPES.get(way, torch.float32)).requires_grad_()

    if part.name == ATTENTION:
        shape = (sequences, c.n_head, c.block_size, c.n_embd // c.n_head)  # (B, H, T, D)
        q = operand(*shape)
        k = operand(*shape)
        v = operand(*shape)
        return both_passes(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), [q, k, v])
    x = operand(sequences * c.block_size, part.inputs)
    weight = operand(part.outputs, part.inputs)
    return both_passes(lambda: F.linear(x, weight), [x, weight])


def both_passes(forward: Callable[[], Tensor], operands: list[Tensor]) -> Callable[[], Any]:
    gradient = torch.ones_like(forward())
    return lambda: torch.autograd.grad(forward(), operands, gradient)


def has_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0)


def together(parts: list[Part], rates: list[float | None]) -> float | None:
    """FLOP/s of a step of these parts; None if one was not measured."""
    if None in rates:
        return None
    flops = [part.flops * part.count for part in parts]
    return sum(flops) / sum(of_part / rate for of_part, rate in zip(flops, rates, strict=True) if rate)


def copy_speed(s: Session) -> float:
    """Bytes per second that a copy within the device's memory reads and writes."""
    n = TOY_COPIED_BYTES
    if s.device.type == "cuda":
        n = min(COPIED_BYTES, torch.cuda.mem_get_info(s.device)[0] // 4)
    source = torch.zeros(n, dtype=torch.uint8, device=s.device)
    target = torch.empty_like(source)
    return 2 * n / work.seconds_of(lambda: target.copy_(source), s.device)


# ---- as Markdown ---------------------------------------------------------------------------------------------


def describe(result: dict[str, Any]) -> str:
    ways = list(result["rates"])
    body = []
    for number, part in enumerate(result["parts"]):
        cells = [in_tera(result["rates"][way][number]) for way in ways]
        body.append([part["name"], f"{part['inputs']} to {part['outputs']}", *cells])
    body.append(["a whole step", "", *(in_tera(result["roofs"][way]) for way in ways)])
    lines = [
        f"TFLOP/s at {result['tokens']} tokens, forward and backward; medians. float32 is without TF32.",
        markdown_table(["layer", "features", *ways], body, left_columns=2),
        roof_line(result),
        f"Copies within memory: {result['copy_bytes_per_s'] / 1e9:.4g} GB/s, read and written.",
    ]
    lines += [f"- {what}: n/a ({reason})" for what, reason in result["why_not"].items()]
    return "\n\n".join(lines)


def roof_line(result: dict[str, Any]) -> str:
    """What the figures mean for MFU."""
    dtype = result["fast_dtype"]
    roof = result["roofs"][dtype]
    line = f"The roof over training in {dtype}: {in_tera(roof)} TFLOP/s"
    if result["published"] is None:
        return f"{line}; this device has no published peak."
    peak, source = result["published"]
    share = "n/a" if roof is None else f"{roof / peak:.1%}"
    return f"{line}, {share} of the published peak ({in_tera(peak)}, {source})."
