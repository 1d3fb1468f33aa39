"""The facts under every measured number: device, dtype, peak FLOP/s, memory, synchronisation, versions.

python hardware.py      # this machine, and its peak FLOP/s: published, and measured now
"""

from __future__ import annotations

import functools
import gc
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


# Instruction sets that matmuls run on, the most capable first, and their flags in /proc/cpuinfo, in
# torch.cpu.get_capabilities and in macOS's sysctl.
INSTRUCTION_SETS: dict[str, set[str]] = {
    "AMX-FP16": {"amx_fp16"},
    "AMX-BF16": {"amx_bf16"},
    "AVX512-FP16": {"avx512_fp16"},
    "AVX512-BF16": {"avx512_bf16"},
    "AVX-512": {"avx512f", "avx512_f"},
    "AVX2": {"avx2"},
    "SVE": {"sve"},
    "BF16": {"bf16", "feat_bf16"},
    "NEON": {"asimd", "neon", "advsimd"},
}
IMPLIED = {"AVX-512": "AVX2", "SVE": "NEON"}
# What torch has to answer with yes, beside the flag: without the kernel's permission AMX cannot be used.
TORCH_ASKS = {
    "AMX-FP16": ("_is_amx_fp16_supported", "_init_amx"),
    "AMX-BF16": ("_is_amx_tile_supported", "_init_amx"),
    "AVX512-BF16": ("_is_avx512_bf16_supported",),
}
# Environment variables that make oneDNN and MKL act as on a lesser processor.
LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
NVIDIA_SMI_TIMEOUT_S = 5.0  # some seconds where no process keeps the driver loaded


# Most bytes allocated on a GPU before memory that does not count, see not_counted.
_peak_before: dict[torch.device, int] = {}


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
            reason = unseen_gpu() or f"torch {torch.__version__} sees no CUDA device"
            raise ValueError(f"device={name}: {reason}; or try --device=auto")
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


def unseen_gpu() -> str | None:
    """Why torch does not see the NVIDIA GPU of this machine, and the remedy; None where it does or there is none.

    Asks nvidia-smi, which knows nothing of Python, for the GPU, the driver and the newest CUDA that the driver takes.
    """
    program = shutil.which("nvidia-smi")
    if program is None or torch.cuda.is_available():
        return None
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S)
        table = subprocess.run([program], capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    if listed.returncode == 9:  # by its manual: the driver is not loaded
        return "nvidia-smi finds no NVIDIA driver at work: reboot if it was just updated, or install it anew"
    names = re.findall(r"^GPU \d+: (.+?)(?: \(UUID.*)?$", listed.stdout, re.M)
    if not names:
        return None
    gpu = names[0] if len(names) == 1 else f"{len(names)} GPUs ({names[0]}, ...)"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides {gpu} from torch; unset it to use that"
    # The words before the versions differ from driver to driver: "Driver Version", "KMD Version", "CUDA UMD Version".
    driver = re.search(r"(?:Driver|KMD) Version: *([\d.]+)", table)
    takes = re.search(r"CUDA (?:UMD )?Version: *(\d+)\.(\d+)", table)
    driver_is = f"driver {driver[1]}" if driver else "the driver"
    if takes:
        driver_is += f" takes CUDA up to {takes[1]}.{takes[2]}"
    build = f"a build for CUDA {takes[1]}" if takes else "a build for CUDA"
    torch_is = f"torch {torch.__version__}"
    if torch.version.cuda is None:
        return (
            f"nvidia-smi lists {gpu}, but {torch_is} is a build without CUDA ({driver_is}): "
            f'pip uninstall torch, then install {build} as pytorch.org says under "Get Started"'
        )
    torch_is += f" is built for CUDA {torch.version.cuda}"
    # Within one major version, a build for a newer CUDA runs on an older driver (CUDA's minor version compatibility).
    if takes and int(takes[1]) < int(torch.version.cuda.split(".")[0]):
        return f'{torch_is}, but {driver_is}: update the driver of {gpu}, or take {build} (pytorch.org, "Get Started")'
    try:
        torch.cuda.init()
        reason = "no reason given"
    except RuntimeError as e:
        reason = " ".join(str(e).split())[:200]
    return f"nvidia-smi lists {gpu} ({driver_is}); {torch_is}, does not see it ({reason}): update the driver or reboot"


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
    """Most memory held so far: by torch's allocator on CUDA, without sweeps; by the process (peak RSS) elsewhere."""
    if device.type == "cuda":
        return max(torch.cuda.max_memory_allocated(device), _peak_before.get(device, 0))
    status = Path("/proc/self/status")
    if status.exists():  # Linux, where getrusage would begin at what the process was that started this one
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    if sys.platform != "darwin":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes, on macOS


@contextmanager
def not_counted(device: torch.device) -> Iterator[None]:
    """On CUDA, memory that the block takes is given back afterwards and does not count in peak_memory_bytes."""
    if device.type != "cuda":
        yield
        return
    reserved = torch.cuda.memory_reserved(device)
    _peak_before[device] = peak_memory_bytes(device) or 0
    try:
        yield
    finally:
        if torch.cuda.memory_reserved(device) > reserved:
            torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def release_memory(device: torch.device) -> None:
    """Frees what torch keeps in reserve, and what was compiled, after memory has run out; forgets that peak."""
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        _peak_before.pop(device, None)


def memory_bytes(device: torch.device) -> int | None:
    """Memory of the GPU, or of the machine; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf, others not these names
        return None


def device_name(device: torch.device) -> str:
    """The device as it calls itself, such as "NVIDIA GeForce RTX 4070".

    A CPU with what its speed depends on: "AMD Ryzen 7 5800H (AVX2), 16 cores, 8 threads". See cpu_facts.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return torch.backends.mps.get_name()  # "Apple M2 Max"
    facts = cpu_facts()
    inside = "; ".join(filter(None, [", ".join(facts["instruction_sets"]), *facts["limits"]]))
    name = f"{facts['name']} ({inside})" if inside else facts["name"]
    counts = [f"{n} {unit}{'s' * (n != 1)}" for unit in ("core", "thread") if (n := facts[f"{unit}s"])]
    return ", ".join([name, *counts])


def cpu_facts() -> dict[str, Any]:
    """The processor for log.jsonl: name, instruction_sets, limits (what lowers them, in words), cores, threads.

    cores are those that this process may use, None where the system does not say; threads those of torch.
    """
    name, sets = processor()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    limits = processor_limits(sets)
    threads = torch.get_num_threads()
    return {"name": name, "instruction_sets": sets, "limits": limits, "cores": cores, "threads": threads}


@functools.cache  # a run asks several times, and macOS answers by a process
def processor() -> tuple[str, list[str]]:
    """(name, instruction sets) of the CPU, as the system and torch see it."""
    name, flags = parse_processor(processor_text())
    if not flags and hasattr(torch.cpu, "get_capabilities"):  # not in every torch; answers on Windows as well
        flags = {flag for flag, there in torch.cpu.get_capabilities().items() if there is True}
    usable = [s for s in instruction_sets(flags) if all(torch_says(question) for question in TORCH_ASKS.get(s, ()))]
    return name or platform.processor() or platform.machine() or "CPU", usable


def processor_text() -> str:
    """What Linux or macOS tells of the first processors; nothing on other systems."""
    try:
        if sys.platform == "darwin":
            command = ["sysctl", "machdep.cpu.brand_string", "hw.optional"]
            return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
            return f.read(1 << 14)  # the rest repeats it, and takes a while where cores are many
    except (OSError, subprocess.TimeoutExpired):
        return ""


def parse_processor(text: str) -> tuple[str, set[str]]:
    """(name, flags in lower case) in the text of /proc/cpuinfo or sysctl; empty where it does not say."""
    facts: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())  # of the first core
    name = facts.get("model name") or facts.get("machdep.cpu.brand_string", "")
    if not name and "CPU part" in facts:  # Linux names a design of Arm by its numbers alone
        name = f"Arm {facts.get('CPU implementer')}:{facts['CPU part']}"
    flags = facts.get("flags", "") or facts.get("Features", "")
    optional = {key.rpartition(".")[2] for key, value in facts.items() if "hw.optional." in key and value == "1"}
    return name, {flag.lower() for flag in (*flags.split(), *optional)}


def instruction_sets(flags: set[str]) -> list[str]:
    """Those of INSTRUCTION_SETS that the flags tell of, without what others imply."""
    found = [s for s, names in INSTRUCTION_SETS.items() if names & flags]
    implied = {IMPLIED.get(s) for s in found}
    return [s for s in found if s not in implied]


def torch_says(question: str) -> bool:
    """Torch's answer to one of its private questions about the CPU; yes where this version does not have it."""
    return bool(getattr(torch.cpu, question, lambda: True)())


def processor_limits(sets: list[str]) -> list[str]:
    """What torch's libraries are held to below what the processor has, and by what."""
    aten = torch.backends.cpu.get_cpu_capability()
    best = "AVX512" if "AVX-512" in sets else "AVX2" if "AVX2" in sets else aten
    limits = []
    if "ATEN_CPU_CAPABILITY" in os.environ:
        limits.append(f"as {aten}, by ATEN_CPU_CAPABILITY")
    elif aten != best:
        limits.append(f"as {aten}, by torch")
    return limits + [f"as {os.environ[name].upper()}, by {name}" for name in LIMITS if os.environ.get(name)]
