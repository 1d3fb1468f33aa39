"""The facts under every measured number: device, dtype, peak FLOP/s, memory, synchronisation, versions.

    python hardware.py      # this machine, and its peak FLOP/s: published, and measured now

Measured peaks are kept in ~/.cache/deskgpt/peaks.json, or below XDG_CACHE_HOME.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import remembered
from peaks import published_peak

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# The square matmuls whose best speed is a device's measured peak, by size, and the one that is a look in passing.
MATMUL_SIZES: dict[str, tuple[int, ...]] = {"cpu": (512, 1024, 2048), "gpu": (512, 2048, 4096, 8192)}
QUICK_SIZES: dict[str, tuple[int, ...]] = {"cpu": (1024,), "gpu": (4096,)}

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

# Most bytes allocated on a GPU before a sweep of matmuls, which is no part of what a run needs.
_peak_before_sweep: dict[torch.device, int] = {}


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


def why_not_compiled(error: Exception) -> str:
    """What torch.compile failed for, in one line: the package that it lacks here, else the error's own words."""
    words = " ".join(str(error).split())
    for pattern, remedy in COMPILE_NEEDS.items():
        if re.search(pattern, words):
            said = remedy.get(sys.platform, remedy["linux"])
            return f"CXX={os.environ['CXX']!r}: {said}" if "C++" in said and "CXX" in os.environ else said
    return words[:200]


def fast_dtype(device: torch.device) -> str:
    """The dtype with the faster matmuls, of those that train as well as float32: by measurement on a CPU."""
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    if device.type == "cpu":
        float32, bfloat16 = (measured_matmul_flops(device, dtype) for dtype in ("float32", "bfloat16"))
        return "bfloat16" if bfloat16 > float32 else "float32"
    return "float32"


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
        return max(torch.cuda.max_memory_allocated(device), _peak_before_sweep.get(device, 0))
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
        _peak_before_sweep.pop(device, None)


def memory_bytes(device: torch.device) -> int | None:
    """Memory of the GPU, or of the machine; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf, others not these names
        return None


def peak_flops(device: torch.device, dtype: str) -> tuple[float, str]:
    """(dense peak FLOP/s of one device in `dtype`, where the figure comes from), for matmuls as train.py runs them.

    The published figure where peaks.py has one, with what matmuls reach here beside it; else the measured one. Not a
    number where neither can be had. "float32" on CUDA is TF32 where the GPU has that, as train.py asks for it.
    """
    measured = measured_matmul_flops(device, dtype)
    published = published_flops(device, dtype)
    if published is None:
        return measured, f"measured {dtype} matmul" if measured > 0 else f"{dtype} matmul cannot be measured here"
    flops, source = published
    if measured > 1.02 * flops:
        why = "its clock is above the rated one, or its row in peaks.py is wrong"
        return measured, f"measured {dtype} matmul, {measured / flops:.0%} of {source}: {why}"
    beside = f"measured here {measured / 1e12:.3g} TFLOP/s ({measured / flops:.0%})" if measured > 0 else "not measured"
    return flops, f"{source}; {beside}"


def published_flops(device: torch.device, dtype: str) -> tuple[float, str] | None:
    """(dense peak FLOP/s by peaks.py, its source); None where it has none for this device."""
    if device.type == "cpu":
        return None
    name, units = device_name(device), compute_units(device)
    # ROCm's float32 matmuls stay float32 unless an environment variable says otherwise.
    if dtype == "float32" and device.type == "cuda" and not torch.version.hip:
        return published_peak(name, "tf32", units) or published_peak(name, "float32", units)
    return published_peak(name, dtype, units)


def compute_units(device: torch.device) -> int:
    """SMs of a GPU (compute units, cores): they tell apart what shares a name."""
    if device.type == "mps":
        return torch.backends.mps.get_core_count()
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache  # of a process: what runs one after the other in it share
def measured_matmul_flops(device: torch.device, dtype: str) -> float:
    """The best FLOP/s of square matmuls in `dtype` ever seen on this machine; not a number where none can run.

    What a whole sweep of sizes found is kept in a file, so that a run's start costs a look in passing; machines are
    noisy, so a look that beats it brings a new sweep, and the best is kept.
    """
    known = read_peaks().get(peak_key(device, dtype))
    if known and not sweep_matmuls(device, dtype, QUICK_SIZES) > known:
        return known
    return keep_best(device, dtype, sweep_matmuls(device, dtype, MATMUL_SIZES))


def keep_best(device: torch.device, dtype: str, measured: float) -> float:
    """The better of a measured peak and the one in the file, which it then holds."""
    key = peak_key(device, dtype)
    best = read_peaks().get(key, 0.0)
    if measured > best:
        remembered.keep("peaks", key, measured)
        return measured
    return best or measured


def peak_key(device: torch.device, dtype: str) -> str:
    return f"{device_name(device)}, {dtype}, torch {torch.__version__}"


def sweep_matmuls(device: torch.device, dtype: str, sizes: dict[str, tuple[int, ...]]) -> float:
    """The best FLOP/s of a few square matmuls of these sizes now; not a number where not one could run.

    On CUDA "float32" runs in TF32, as in train.py; the memory that this takes there is given back and does not count
    in peak_memory_bytes. Where memory runs out or a device is slow, only the smaller matmuls run.
    """
    cuda, best = device.type == "cuda", math.nan
    if cuda:
        precision, reserved = torch.get_float32_matmul_precision(), torch.cuda.memory_reserved(device)
        _peak_before_sweep[device] = peak_memory_bytes(device) or 0
        torch.set_float32_matmul_precision("high")
    try:
        for n in sizes["cpu" if device.type == "cpu" else "gpu"]:
            if 6 * 2 * n**3 > 2 * best:  # more than two seconds, by the sizes before; nan at the first
                break
            best = max(matmul_flops(device, dtype, n), best)  # the new one first: max(x, nan) is x
    except RuntimeError:  # out of memory, or the device has no matmul in this dtype: no reason to end a run
        pass
    finally:
        if cuda:
            torch.set_float32_matmul_precision(precision)
            if torch.cuda.memory_reserved(device) > reserved:
                torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
    return best


def matmul_flops(device: torch.device, dtype: str, n: int) -> float:
    """The best FLOP/s of a few n x n matmuls."""
    draw = torch.Generator(device).manual_seed(0)  # its own: no run's random numbers depend on what was measured
    a, b = (torch.randn(n, n, device=device, generator=draw).to(DTYPES[dtype]) for _ in range(2))
    out, best_s = a @ b, math.inf  # writing into one tensor keeps the allocator out of the figure
    for _ in range(5):
        synchronize(device)
        t0 = time.perf_counter()
        torch.mm(a, b, out=out)
        synchronize(device)
        best_s = min(best_s, time.perf_counter() - t0)
    return 2 * n**3 / best_s


def read_peaks() -> dict[str, float]:
    """Measured FLOP/s by device, dtype and version of torch; whatever is no such figure is left out."""
    return {k: v for k, v in remembered.read("peaks").items() if isinstance(v, float) and 0 < v < math.inf}


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


def fastest_matmul(device: torch.device) -> float:
    """The best FLOP/s that square matmuls reach here, in float32 or bfloat16; 0 where none can run."""
    flops = [measured_matmul_flops(device, dtype) for dtype in ("float32", "bfloat16")]
    return max((f for f in flops if f > 0), default=0.0)  # of what is not a number, nothing is said


def main() -> None:
    """Prints what this machine is and reaches; what it measures is kept if it is the best so far."""
    device = resolve_device("auto")
    if device.type == "cpu" and (reason := unseen_gpu()):
        print(reason)
    memory = memory_bytes(device)
    size = "n/a" if memory is None else f"{memory / 2**30:.1f} GiB"
    print(f"{device_name(device)}, memory {size}, torch {torch.__version__}")
    for dtype in DTYPES:
        now = sweep_matmuls(device, dtype, MATMUL_SIZES)
        best = keep_best(device, dtype, now)
        published = published_flops(device, dtype)
        said = f"{published[0] / 1e12:.4g} ({published[1]})" if published else "n/a"
        print(f"{dtype}: published {said}, measured now {now / 1e12:.3g}, best so far {best / 1e12:.3g} TFLOP/s")
    kept = any(name.startswith(f"{device_name(device)}, ") for name in read_peaks())
    print(
        f"the best are kept in {remembered.path_of('peaks')}"
        if kept
        else f"{remembered.path_of('peaks')} cannot be written: each run measures anew"
    )


if __name__ == "__main__":
    from configurator import one_line_errors

    with one_line_errors():
        main()
