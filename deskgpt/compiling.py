"""torch.compile on this machine: settings of its code generator, the compiler it calls, why it failed."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from importlib import metadata

import torch

# What torch.compile cannot do without: words of inductor's, Triton's and the compiler's errors, and the remedy.
COMPILE_NEEDS = {
    r"No working C\+\+ compiler|Compiler: \S+ is not found|Failed to find C compiler": {
        "linux": "there is no C++ compiler: install g++ (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++)",
        "darwin": "there is no C++ compiler: xcode-select --install",
        "win32": "there is no C++ compiler: install Build Tools for Visual Studio, and start from its command prompt",
    },
    r"fatal error: Python\.h": {
        "linux": "the compiler finds no Python.h: install Python's headers (Debian, Ubuntu: apt install python3-dev)",
    },
    r"working triton installation|No module named 'triton": {
        "linux": "there is no working Triton: pip install triton",
        "win32": "there is no working Triton: pip install triton-windows",
    },
}


def why_not_compiled(error: Exception) -> str:
    """What torch.compile failed for, in one line: the package that it lacks here, else the error's own words."""
    words = " ".join(str(error).split())
    for pattern, remedy in COMPILE_NEEDS.items():
        if re.search(pattern, words):
            said = remedy.get(sys.platform, remedy["linux"])
            return f"CXX={os.environ['CXX']!r}: {said}" if "C++" in said and "CXX" in os.environ else said
    return words[:200]


def compiler_name(device: torch.device) -> str | None:
    """What torch.compile compiles with, such as "g++ (Debian 12.2.0-14) 12.2.0"; None where that is not known.

    A processor or vector length that inductor was told to compile for follows: "..., march=x86-64-v3".
    """
    if device.type == "cuda":
        return triton_name()
    if device.type != "cpu":
        return None
    from torch._inductor import config, cpp_builder

    try:
        command = [cpp_builder.get_cpp_compiler(), "--version"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10)
    except (OSError, RuntimeError, subprocess.TimeoutExpired):  # RuntimeError: inductor finds none
        return None
    version = (done.stdout or done.stderr).partition("\n")[0].strip()  # cl.exe names itself in stderr
    if not version:
        return None
    told = {name: getattr(config.cpp, name, None) for name in ("march", "simdlen")}
    return ", ".join([version, *(f"{name}={value}" for name, value in told.items() if value is not None)])


def triton_name() -> str | None:
    """Triton and its version, under whichever name it is installed."""
    for package in ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows"):
        try:
            return f"triton {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            pass
    return None


def set_up_inductor() -> None:
    """Settings of torch.compile's code generator for a CPU, before anything is compiled; the user's own win."""
    import torch._inductor.config as inductor

    # At each start inductor tries whether the compiler knows AVX2 and AVX-512, which all that torch's headers compile
    # with do: 8 of 30 s with an empty cache, 2.5 of 8 with a warm one (LOG.md, 2026-11-22).
    if "TORCHINDUCTOR_VEC_ISA_OK" not in os.environ:
        inductor.cpp.vec_isa_ok = True
    work_around_gcc()


NO_ALIGNING_COPIES = "-mno-align-stringops"


def work_around_gcc() -> bool:
    """Has inductor call GCC up to 13 with -mno-align-stringops on x86; returns whether it does.

    GCC bug 113255, fixed in 14: where an inline copy first aligns its destination, the optimizer loses track of its
    source and deletes stores that the copy reads. Inductor's bfloat16 transposes then hold what the stack held before
    (bench/results/2026-11-22-gcc-dse.md). A user's TORCHINDUCTOR_CPP_MARCH is left to mean what it says.
    """
    from torch._inductor import config, cpp_builder, exc

    if platform.machine() not in ("x86_64", "AMD64") or sys.platform == "win32":
        return False
    if getattr(config.cpp, "march", None) is not None:  # torch before 2.13 has no such setting
        return False
    # Of the settings of torch 2.11 to 2.13 only this one ends up in the compiler's command line as it is. The names of
    # the libraries in inductor's cache and the keys of its graphs follow from it: none compiled before is used again.
    flags = getattr(config.cpp, "enable_floating_point_contract_flag", None)
    if flags is None or NO_ALIGNING_COPIES in flags:
        return flags is not None
    try:
        command = [cpp_builder.get_cpp_compiler(), "-dumpfullversion"]  # an error in clang
        version = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (exc.InvalidCxxCompiler, OSError, subprocess.SubprocessError):
        return False
    if not version[:1].isdigit() or int(version.split(".")[0]) >= 14:
        return False
    config.cpp.enable_floating_point_contract_flag = f"{flags} {NO_ALIGNING_COPIES}"
    return True
