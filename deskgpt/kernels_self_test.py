"""Compares the C++ kernels with torch in float64, when the library is built (cpu_kernels.py) and in
the tests.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor

from deskgpt import cpu_kernels, kernels
from deskgpt.check_model import distance

LIMIT = {torch.float32: 1e-4, torch.bfloat16: 0.02}  # |result - expected| / |expected|
# (B, H, T, D): tiles, and what is left over
SHAPES = ((2, 3, 64, 32), (1, 2, 129, 64), (1, 1, 1, 16), (1, 2, 37, 20))
ROWS = ((7, 65), (33, 1000))  # of logits (N, V)


def main(library: Path) -> None:
    """Raise SystemExit, naming the kernel and how far it is off, unless all of this library agree
    with torch.
    """
    cpu_kernels.open_library(library)
    for what, error, limit in errors():
        if not error <= limit:
            raise SystemExit(f"{what} is off by {error:.2g}, allowed {limit:g}")


def errors() -> list[tuple[str, float, float]]:
    """Return (kernel and input, its error, its limit) of results and gradients, in each dtype of
    the library.
    """
    found = []
    draw = torch.Generator().manual_seed(0)
    for dtype in cpu_kernels.dtypes():
        for shape in SHAPES:
            qkv = [torch.randn(shape, generator=draw).to(dtype) for _ in range(3)]
            x = 3 * torch.randn(shape, generator=draw).to(dtype)
            cases: dict[str, tuple[Callable[..., Tensor], Sequence[Tensor]]] = {
                "attention": (kernels.causal_attention, qkv),
                "gelu_tanh": (kernels.gelu_tanh, [x]),
                "relu2": (kernels.relu2, [x]),
                "norm": (functools.partial(add_norm, kernels.RMSNorm), [x, qkv[0]]),
                "layer norm": (functools.partial(add_norm, kernels.LayerNorm), [x, qkv[0]]),
                "token shift": (shift, [x[0]]),
                "heads": (heads, [x]),
            }
            for name, (function, inputs) in cases.items():
                error = error_of(function, inputs)
                found.append((f"{name} of {shape} in {dtype}", error, LIMIT[dtype]))
        for N, V in ROWS:
            logits = 5 * torch.randn(N, V, generator=draw).to(dtype)
            targets = torch.randint(V, (N,), generator=draw)
            results = kernels.loss_and_gradient(logits, targets, compiled=False)
            expected = kernels.loss_and_gradient(logits.double(), targets, compiled=False)
            error = max(map(distance, results, expected))
            found.append((f"softmax of {(N, V)} in {dtype}", error, LIMIT[dtype]))
    return found


def add_norm(kind: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
    """Return x + y and its norm, side by side; x and y (.., C)."""
    norm = kind(x.size(-1), eps=1e-5).to(torch.promote_types(x.dtype, torch.float32))
    torch.linspace(0.5, 1.5, x.size(-1), out=norm.weight.data)
    return torch.cat(kernels.add_norm(x, y, norm))


def shift(x: Tensor) -> Tensor:
    return kernels.token_shift(x, x.size(-1) // 4)


def heads(x: Tensor) -> Tensor:
    """Return q, k and v of x (B, H, T, D), as one tensor, after norm and rotation."""
    _, H, T, D = x.shape
    qkv = x.transpose(1, 2).flatten(2).repeat(1, 1, 3)
    rotary = torch.linspace(-1, 1, T * D).view(2, T, D // 2)
    return torch.stack(tuple(kernels.split_heads(qkv, H, True, rotary)))


def error_of(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> float:
    """Return the largest distance of the result and its gradients by the inputs from those in
    float64, which no kernel of ours computes.
    """
    computed = []
    for dtype in (inputs[0].dtype, torch.float64):
        own = [x.to(dtype).requires_grad_() for x in inputs]
        y = function(*own)
        upstream = torch.linspace(-1, 1, y.numel()).view(y.shape).to(inputs[0].dtype)
        computed.append([y, *torch.autograd.grad(y, own, upstream.to(dtype))])
    # A gradient far below the others is rounding only.
    scale = max(x.norm().item() for x in computed[1])
    return max(distance(a, b, 1e-2 * scale) for a, b in zip(*computed, strict=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
