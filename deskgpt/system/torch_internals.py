"""What deskGPT takes from torch's private parts, which may vanish: each in one place, with what happens without it.

torch 2.11 to 2.13 have all of it. Private names that are not here are those of torch's own extension points, which
libraries rely on: FakeTensorMode and TorchDispatchMode (estimate/), pytrees, and the settings of inductor by which
compiling.py avoids a bug of GCC.
"""

from __future__ import annotations

from typing import Any

import torch


def attention_operators() -> tuple[Any, ...]:
    """Torch's fused attention, by device. Without one of them, selective checkpoints compute its result again."""
    names = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    packets = [getattr(torch.ops.aten, f"_scaled_dot_product_{name}", None) for name in names]
    return tuple(packet.default for packet in packets if packet is not None)


def cpp_compiler() -> str | None:
    """The C++ compiler that inductor calls; None if it finds none. Without: None, so its bugs are not worked around."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler
    except ImportError:
        return None
    try:
        return get_cpp_compiler()
    except (RuntimeError, OSError):  # inductor finds no compiler, or CXX names what is none
        return None
