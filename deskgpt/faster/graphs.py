"""CUDA graphs: a step whose many small kernels are launched at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

WARM_UP = 3  # calls before the capture, in which libraries prepare their kernels


def can_replay(device: torch.device) -> bool:
    """Whether steps on this device are replayed as graphs."""
    return device.type == "cuda"


def replayed(step: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """step, which after a few calls is replayed as a graph where the device can do so.

    Each call must run the same operations on the same memory. The next call may write over what a call returns.
    """
    return ReplayedStep(step, device) if can_replay(device) else step


class ReplayedStep:
    """A step on CUDA that is replayed as a graph from the call after WARM_UP on. A replay runs no Python."""

    def __init__(self, step: Callable[[], Tensor], device: torch.device) -> None:
        self.step = step
        self.stream = torch.cuda.Stream(device)  # of warm-up and capture, which may not be the default stream
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Tensor | None = None

    def __call__(self) -> Tensor:
        self.calls += 1
        if self.calls == WARM_UP + 1:
            self._capture()
        if self.graph is None or self.result is None:
            return self._run()
        self.graph.replay()
        return self.result

    def _run(self) -> Tensor:
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = self.step()
        current.wait_stream(self.stream)
        return result

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                self.result = self.step()
            self.graph = graph
        except RuntimeError as e:
            reason = " ".join(str(e).split())[:200]
            warnings.warn(f"no CUDA graph of this step, which is slower without: {reason}", stacklevel=2)
