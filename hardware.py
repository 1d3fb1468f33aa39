"""The facts under every measured number: device, dtype, peak FLOP/s, memory, synchronisation, versions."""

from __future__ import annotations

import functools
import gc
import os
import platform
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from pathlib import Path

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# On a CPU with bfloat16 instructions autocast pays from about this width on: below it, the casts cost more than
# the matmuls save (bench/results/2026-11-21-cpu-dtype.md).
CPU_BFLOAT16_MIN_N_EMBD = 192

# Dense peak of a device in FLOP/s by the full name that torch gives it: 16-bit tensor cores with float32
# accumulation, and TF32. From NVIDIA's data sheets (their figures "with sparsity" halved) and, for GeForce, the
# appendices of the GA102 and AD102 white papers. Any other name (a laptop chip, a MIG slice, a CPU) is measured.
NVIDIA_PEAKS = {
    "NVIDIA H200": (989e12, 494.5e12),
    "NVIDIA H100 80GB HBM3": (989e12, 494.5e12),
    "NVIDIA H100 PCIe": (756e12, 378e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 156e12),
    "NVIDIA A100-SXM4-40GB": (312e12, 156e12),
    "NVIDIA A100 80GB PCIe": (312e12, 156e12),
    "NVIDIA A100-PCIE-40GB": (312e12, 156e12),
    "NVIDIA L40S": (362e12, 183e12),
    "NVIDIA GeForce RTX 4090": (165.2e12, 82.6e12),
    "NVIDIA GeForce RTX 3090": (71e12, 35.6e12),
}


def resolve_device(name: str, local_rank: int = 0, local_ranks: int = 1) -> torch.device:
    """The torch device for auto, cpu, cuda, cuda:N or mps, of one of so many ranks on this machine.

    Raises ValueError where it is not there, or where several ranks would share one GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name!r} is not a device; try --device=auto, cpu, cuda, cuda:0 or mps") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device={name}: torch {torch.__version__} sees no CUDA device; try --device=auto")
        if local_ranks > 1 and device.index is not None:
            raise ValueError(f"device={device} is one GPU for {local_ranks} ranks; try --device=cuda")
        n = torch.cuda.device_count()
        if local_ranks > n:
            raise ValueError(f"{local_ranks} ranks need as many GPUs, this machine has {n}; try --nproc_per_node={n}")
        device = torch.device("cuda", local_rank if device.index is None else device.index)
        if device.index >= n:
            there = ", ".join(f"cuda:{i}" for i in range(n))
            raise ValueError(f"device={device}: this machine has {there}; try --device=cuda:0")
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("device=mps: torch sees no Apple GPU here; try --device=auto")
    elif device.type not in ("cpu", "mps"):
        raise ValueError(f"device={name} is not supported; try --device=auto, cpu, cuda, cuda:0 or mps")
    return device


def resolve_dtype(name: str, device: torch.device, n_embd: int) -> str:
    """The dtype that matmuls run in: `name`, or for "auto" the fastest that trains as well as float32."""
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    if device.type == "cpu" and n_embd >= CPU_BFLOAT16_MIN_N_EMBD and cpu_has_bfloat16():
        return "bfloat16"
    return "float32"


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device has instructions for bfloat16 matmuls; without them they are far slower than float32's."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and cpu_has_bfloat16()


def cpu_has_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 in hardware: AMX or AVX512-BF16 on x86."""
    # torch 2.11 to 2.13 have no public way to ask for either.
    return any(getattr(torch.cpu, f, bool)() for f in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))


def autocast(device: torch.device, dtype: str) -> AbstractContextManager:
    """A context in which matmuls run in `dtype`; nothing at all for float32."""
    return nullcontext() if dtype == "float32" else torch.autocast(device.type, dtype=DTYPES[dtype])


def keep_freed_memory() -> bool:
    """Has glibc keep what large tensors free, for the next ones; whether it does. Nothing happens elsewhere.

    It gives each of them fresh pages from the kernel otherwise, zeroed one by one, which takes longer than many a
    matmul: a tenth of a step on a CPU (LOG.md, 2026-11-21).
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    import ctypes

    mallopt = ctypes.CDLL(None).mallopt
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # malloc.h
    largest_mmap = mallopt(mmap_threshold, 1 << 30) or mallopt(mmap_threshold, 1 << 25)  # the limit of older ones
    return bool(largest_mmap and mallopt(trim_threshold, (1 << 31) - 1) and mallopt(top_pad, 64 << 20))


def synchronize(device: torch.device) -> None:
    """Waits for everything queued on the device, so that a clock read next is about finished work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def peak_memory_bytes(device: torch.device) -> int | None:
    """Most memory held so far: by torch's allocator on CUDA, by the whole process (peak RSS) elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():  # Linux, where getrusage would begin at what the process was that started this one
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    if sys.platform != "darwin":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes, on macOS


def release_memory(device: torch.device) -> None:
    """Frees what torch keeps in reserve, and what was compiled, after memory has run out; forgets that peak."""
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def memory_bytes(device: torch.device) -> int | None:
    """Memory of the GPU, or of the machine; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf, others not these names
        return None


def peak_flops(device: torch.device, dtype: str) -> tuple[float, str]:
    """(dense peak FLOP/s of one device in `dtype`, where the figure comes from); measured where no table has it."""
    if device.type == "cuda" and device_name(device) in NVIDIA_PEAKS:
        half, tf32 = NVIDIA_PEAKS[device_name(device)]
        return (tf32, "NVIDIA, TF32") if dtype == "float32" else (half, f"NVIDIA, {dtype}")
    return measured_matmul_flops(device, dtype), f"measured {dtype} matmul"


@functools.cache  # of a process: what runs one after the other in it share
def measured_matmul_flops(device: torch.device, dtype: str) -> float:
    """The best FLOP/s of a few square matmuls in `dtype`: what the device reaches at most in practice."""
    best = 0.0
    for n in (512, 1024, 2048) if device.type == "cpu" else (2048, 4096, 8192):
        a, b = (torch.randn(n, n, device=device).to(DTYPES[dtype]) for _ in range(2))
        out = a @ b  # writing into one tensor keeps the allocator out of the figure
        for _ in range(5):
            synchronize(device)
            t0 = time.perf_counter()
            torch.mm(a, b, out=out)
            synchronize(device)
            best = max(best, 2 * n**3 / (time.perf_counter() - t0))
    return best


def device_name(device: torch.device) -> str:
    """The device as it calls itself, such as "NVIDIA GeForce RTX 4070"; on CPUs with the threads torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if device.type == "cpu" and cpuinfo.exists():
        models = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        name = models[0] if models else name
    return f"{name}, {torch.get_num_threads()} threads" if device.type == "cpu" else f"Apple {name}"


def versions() -> dict[str, str]:
    """Versions of what a run's figures depend on."""
    packages = {p: metadata.version(p) for p in ("numpy", "torch")}
    cuda = {"cuda": torch.version.cuda} if torch.version.cuda else {}
    return {"python": platform.python_version(), **packages, **cuda, "platform": platform.platform()}


def git_commit() -> str | None:
    """Commit of the code that runs, with "+changes" where files differ from it; None outside a git checkout."""
    try:
        describe = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), "describe", "--always", "--abbrev=12"]
        # --exclude=* leaves tags out: the commit itself, not a distance to some tag
        out = subprocess.run([*describe, "--dirty=+changes", "--exclude=*"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return out.stdout.strip() or None
