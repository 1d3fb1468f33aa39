"""Times ways to compute the head's loss and its gradients: the measurement that kernels.py's choice rests on.

    python bench/loss.py --dtype=bfloat16
    python bench/loss.py --device=cuda --dtype=bfloat16 --tokens=12288

Prints for each way the median time of a forward and backward pass (the ways take turns), the peak memory in addition to
inputs and weights, and how far loss and gradient are from float32's. Writes no files.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

from configurator import configure
from deskgpt.compute import compiling
from deskgpt.faster.kernels import ChunkedCrossEntropy, register_operators
from deskgpt.machine import hardware, provenance
from deskgpt.machine.errors import one_line_errors

# Tokens of a chunk that are tried, and of the one that is compiled.
CHUNKS_ON_CPU = (128, 256, 512, 1024)
CHUNKS_ON_GPU = (512, 1024, 2048, 4096, 8192, 16384)
COMPILED_ON_CPU = 512
COMPILED_ON_GPU = 4096

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"  # of the matmuls
    tokens: int = 2048  # N = B * T
    n_embd: int = 768  # C
    vocab_size: int = 50304  # V
    rounds: int = 5  # timed passes of each way, after one that is not timed
    only: str = ""  # the name of one way: run it once and print its memory


def ways(dtype: torch.dtype, on_gpu: bool) -> dict[str, Loss]:
    """Functions of h (N, C), weight (V, C) and targets (N,) that return the mean loss."""

    def plain(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w).float(), t)

    def recomputed(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        pieces = zip(h.split(512), t.split(512), strict=True)
        losses = [checkpoint(plain, h_i, w, t_i, use_reentrant=False) * len(t_i) for h_i, t_i in pieces]
        return torch.stack(losses).sum() / len(t)

    def in_forward(chunk: int) -> Loss:
        return lambda h, w, t: ChunkedCrossEntropy.apply(h, w, t, dtype, chunk, True) / len(t)

    out: dict[str, Loss] = {"plain": plain, "recomputed, chunks of 512": recomputed}
    for chunk in CHUNKS_ON_GPU if on_gpu else CHUNKS_ON_CPU:
        out[f"ChunkedCrossEntropy, chunks of {chunk}"] = in_forward(chunk)
    register_operators()
    operator = torch.ops.deskgpt.chunked_cross_entropy
    compiled = COMPILED_ON_GPU if on_gpu else COMPILED_ON_CPU
    out[f"its chunks of {compiled} compiled"] = lambda h, w, t: operator(h, w, t, dtype, compiled, True)[0] / len(t)
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):  # since torch 2.13
        Options = torch.nn.LinearCrossEntropyOptions

        def native(**options: Any) -> Loss:
            return lambda h, w, t: F.linear_cross_entropy(h.to(dtype), w.to(dtype), t, options=Options(**options))

        out["F.linear_cross_entropy, defaults"] = native()
        out["F.linear_cross_entropy, chunks of 512"] = native(batch_chunk_size=512)
        accurate = native(batch_chunk_size=512, acc_policy="accurate")
        out["F.linear_cross_entropy, chunks of 512, accurate"] = accurate
    return out


class Passes:
    """Inputs, weights and targets on a device, and passes over them."""

    def __init__(self, c: LossConfig) -> None:
        self.device = hardware.resolve_device(c.device)
        torch.manual_seed(0)
        self.h = torch.randn(c.tokens, c.n_embd, device=self.device).requires_grad_()
        self.w = torch.randn(c.vocab_size, c.n_embd, device=self.device).mul_(0.02).requires_grad_()
        self.t = torch.randint(0, c.vocab_size, (c.tokens,), device=self.device)

    def once(self, way: Loss, dtype: str) -> Tensor:
        """A forward and backward pass; returns the loss and leaves the gradients."""
        self.h.grad = None
        self.w.grad = None
        with hardware.autocast(self.device, dtype):
            loss = way(self.h, self.w, self.t)
        loss.backward()
        hardware.synchronize(self.device)
        return loss.detach()

    def weight_gradient(self) -> Tensor:
        assert self.w.grad is not None
        return self.w.grad


def print_memory(passes: Passes, way: Loss, dtype: str) -> None:
    """Prints by how many bytes one pass raises the peak; gradients count with the weights, not with the way."""
    passes.h.grad = torch.zeros_like(passes.h)
    passes.w.grad = torch.zeros_like(passes.w)
    before = hardware.peak_memory_bytes(passes.device) or 0
    passes.once(way, dtype)
    after = hardware.peak_memory_bytes(passes.device) or 0
    print(after - before)


def memory_bytes(c: LossConfig, way: str) -> int:
    """What print_memory prints in a process of its own: on a CPU only the peak of a whole process is known."""
    flags = [f"--{name}={value}" for name, value in (asdict(c) | {"only": way}).items()]
    child = subprocess.run([sys.executable, __file__, *flags], capture_output=True, text=True, check=True)
    return int(child.stdout)


def main(c: LossConfig) -> None:
    hardware.keep_freed_memory()  # as a training run does
    passes = Passes(c)
    functions = ways(hardware.DTYPES[c.dtype], passes.device.type == "cuda")
    if c.only:
        return print_memory(passes, functions[c.only], c.dtype)

    exact = passes.once(functions["plain"], "float32")
    exact_grad = passes.weight_gradient().clone()
    print(f"{hardware.device_name(passes.device)}, {c.dtype}, N={c.tokens} C={c.n_embd} V={c.vocab_size}")
    compiler = compiling.compiler_name(passes.device) or "compiler n/a"
    print(f"{provenance.versions()}, {compiler}, commit {provenance.git_commit()}")

    seconds: dict[str, list[float]] = {name: [] for name in functions}
    loss_errors = {}
    grad_errors = {}
    for _ in range(1 + c.rounds):
        for name, way in functions.items():
            t0 = time.perf_counter()
            loss = passes.once(way, c.dtype)
            seconds[name].append(time.perf_counter() - t0)
            grad = passes.weight_gradient()
            loss_errors[name] = abs(loss.float() - exact).item()
            grad_errors[name] = ((grad - exact_grad).norm() / exact_grad.norm()).item()

    print(f"{'way':<48} {'ms':>6} {'MB':>6} {'loss error':>11} {'grad error':>11}")
    for name in functions:
        ms = statistics.median(seconds[name][1:]) * 1e3
        mb = memory_bytes(c, name) / 1e6
        print(f"{name:<48} {ms:6.0f} {mb:6.0f} {loss_errors[name]:11.1e} {grad_errors[name]:11.1e}", flush=True)


if __name__ == "__main__":
    with one_line_errors():
        main(configure(LossConfig, sys.argv[1:]))
