"""torch.compile on this machine: inductor's settings, the compiler that it calls, why it failed."""

# ---- torch.compile -------------------------------------------------------------------------------

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from deskgpt.errors import reason

# ---- inductor's settings -------------------------------------------------------------------------

NO_ALIGNING_COPIES = "-mno-align-stringops"  # which avoids GCC's bug 113255; see work_around_gcc

MOST_GRAPHS = 64  # of a function that is compiled, such as a block

NO_COMPILER = "No working C++ compiler"
VECTOR_BITS = {"AVX2": 256, "AVX512": 512}


def compiling_switch() -> str:
    """Return the environment variable that switches torch.compile off; "" if none does."""
    for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        if os.environ.get(name) == "1":
            return f"{name}=1"
    return ""


def set_up_compiler(device: torch.device) -> None:
    """Set up what torch.compile needs, before anything is compiled.

    Silences its warnings that ask for nothing: that matmuls are not autotuned on a card of fewer
    than 68 SMs, and that FLOPs of Triton are not counted on Windows. Of inductor's settings for a
    CPU, the user's own win.
    """
    for name in ("torch._inductor.utils", "torch.utils.flop_counter"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # A change of model.py may have a graph for each layer; after torch's limit, 8, it would
    # silently go on uncompiled.
    torch._dynamo.config.recompile_limit = max(MOST_GRAPHS, torch._dynamo.config.recompile_limit)
    # TORCHDYNAMO_SUPPRESS_ERRORS would leave a block uncompiled that cannot be.
    torch._dynamo.config.suppress_errors = False
    # A model that counts its passes would be compiled again at each of them.
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    if device.type != "cpu":
        return
    import torch._inductor.config as inductor

    # At each start inductor checks whether the compiler knows AVX2 and AVX-512. Every compiler that
    # can compile torch's headers does. The check took 8 of 30 s with an empty cache, 2.5 of 8 s
    # with a warm one (docs/decisions.md).
    if "TORCHINDUCTOR_VEC_ISA_OK" not in os.environ:
        inductor.cpp.vec_isa_ok = True
    # Inductor's cache does not tell graphs for AVX2 from those for AVX-512, unless a setting does:
    # a disk that moves to another processor would bring it graphs that write beyond their tensors
    # (torch 2.13).
    if inductor.cpp.simdlen is None:
        inductor.cpp.simdlen = VECTOR_BITS.get(torch.backends.cpu.get_cpu_capability())
    work_around_gcc()


def work_around_gcc() -> None:
    """Make inductor call its compiler with -mno-align-stringops on x86, unless it is clang, which
    does not know it.

    GCC bug 113255, fixed in 14: if an inline copy first aligns its destination, the optimizer loses
    track of its source, and deletes stores that the copy reads. Inductor's bfloat16 transposes then
    return whatever the stack held before (bench/results/2026-11-22-gcc-dse.md).
    """
    from torch._inductor import config, cpp_builder

    if platform.machine() not in ("x86_64", "AMD64") or sys.platform == "win32":
        return
    # In torch 2.11 to 2.13 this is the only setting that reaches the compiler's command line
    # unchanged. Names of libraries in inductor's cache and keys of its graphs depend on it, so
    # nothing compiled without the flag is reused.
    flags = getattr(config.cpp, "enable_floating_point_contract_flag", None)
    if flags is None or NO_ALIGNING_COPIES in flags:
        return
    with suppress(RuntimeError):  # there is no compiler, which compiling will say
        if "clang" not in Path(cpp_builder.get_cpp_compiler()).name:
            config.cpp.enable_floating_point_contract_flag = f"{flags} {NO_ALIGNING_COPIES}"


def compile_s() -> float:
    """Return the seconds that torch.compile has taken in this process so far."""
    return torch._dynamo.utils.calculate_time_spent().get("total_wall_time", 0.0)


# ---- why it failed -------------------------------------------------------------------------------


@contextmanager
def explain_compile_errors() -> Iterator[None]:
    """Raise ValueError, one line with the remedy, for what torch.compile fails with in the
    block.
    """
    try:
        yield
    except RuntimeError as e:
        if NO_COMPILER not in str(e) and not type(e).__module__.startswith(
            ("torch._dynamo", "torch._inductor")
        ):
            raise
        raise ValueError(
            f"compiling fails: {reason(e)}; it needs a C++ compiler and Python's headers (Debian, "
            "Ubuntu: apt install g++ python3-dev; macOS: xcode-select --install; Windows: Build "
            "Tools for Visual Studio, and a start from its command prompt) and on a card Triton "
            "(pip install triton); or add --compile=False"
        ) from None
