"""The device that a run computes on: which one to use, its name, its memory, and how to wait for it."""

from __future__ import annotations

import functools
import gc
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

# ---- choosing a device ---------------------------------------------------------------------------------------

NVIDIA_SMI_TIMEOUT_S = 5.0  # it takes seconds if no process keeps the driver loaded
DRIVER_NOT_LOADED = 9  # nvidia-smi's exit status, by its manual


def resolve_device(name: str, local_rank: int = 0, local_ranks: int = 1) -> torch.device:
    """The torch device for `name`: auto, cpu, cuda, cuda:N or mps.

    `local_rank` is this process's number among the `local_ranks` processes of the run on this machine. Raises
    ValueError if there is no such device, or if several ranks would share one GPU.
    """
    if name == "auto":
        name = fastest_device_type()
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name!r} is not a device; try --device=auto, cpu, cuda, cuda:0 or mps") from None
    if device.type == "cuda":
        return resolve_cuda_device(device, local_rank, local_ranks)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("device=mps: torch sees no Apple GPU here; try --device=auto")
    if device.type not in ("cpu", "mps"):
        raise ValueError(f"device={name} is not supported; try --device=auto, cpu, cuda, cuda:0 or mps")
    return device


def fastest_device_type() -> str:
    """cuda, mps or cpu: the first that torch can use here."""
    if torch.cuda.is_available() and unserved_gpu(torch.device("cuda", 0)) is None:
        return "cuda"
    if torch.backends.mps.is_available():
        return "mps"
    return "cpu"


def resolve_cuda_device(device: torch.device, local_rank: int, local_ranks: int) -> torch.device:
    """One GPU for this rank. Raises ValueError if there is none, or if several ranks would share one."""
    if not torch.cuda.is_available():
        reason = unused_gpu() or f"torch {torch.__version__} sees no CUDA device"
        raise ValueError(f"device={device}: {reason}; or try --device=auto")
    if local_ranks > 1 and device.index is not None:
        raise ValueError(f"device={device} is one GPU for {local_ranks} ranks; try --device=cuda")
    n_gpus = torch.cuda.device_count()
    if local_ranks > n_gpus:
        raise ValueError(
            f"{local_ranks} ranks need as many GPUs, this machine has {n_gpus}; try --nproc_per_node={n_gpus}"
        )
    index = local_rank if device.index is None else device.index
    if index >= n_gpus:
        available = ", ".join(f"cuda:{i}" for i in range(n_gpus))
        raise ValueError(f"device=cuda:{index}: this machine has {available}; try --device=cuda:0")
    device = torch.device("cuda", index)
    unserved = unserved_gpu(device)
    if unserved:
        raise ValueError(f"device={device}: {unserved}; or try --device=cpu")
    return device


# Below this compute capability only torch's builds for CUDA 12.6 have kernels, for 5.0 and more; the newest cards need
# a build for CUDA 13 (torch's RELEASE.md for 2.11 to 2.13; pytorch's issues 172352 and 178665).
LOWEST_OF_CUDA_13 = (7, 5)


def unserved_gpu(device: torch.device) -> str | None:
    """Why torch has no kernels for a GPU that it sees, and the remedy; None if it has. torch itself only warns."""
    architectures = torch.cuda.get_arch_list()
    if torch.version.cuda is None or not architectures:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of many lines
        card = torch.cuda.get_device_capability(device)
    if any(serves(architecture, card) for architecture in architectures):
        return None
    build = "CUDA 12.6" if card < LOWEST_OF_CUDA_13 else "CUDA 13"
    return (
        f"{torch.cuda.get_device_name(device)} has compute capability {card[0]}.{card[1]}, for which torch "
        f"{torch.__version__} has no kernels (only {' '.join(architectures)}): pip uninstall torch, then install the "
        f'same version for {build} as pytorch.org says under "Get Started"'
    )


def serves(architecture: str, card: tuple[int, int]) -> bool:
    """Whether what torch was compiled for, such as sm_86, sm_90a or compute_120, runs on a card of this capability.

    Kernels run on cards of the same major version from their minor one on, and PTX (compute_) on all later cards; with
    an "a", both on this capability alone, with an "f" within the major version (CUDA's feature set compiler targets).
    """
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
    if found is None:
        return False
    kind, major, minor, suffix = found.groups()
    lowest = (int(major), int(minor))
    if suffix == "a":
        return card == lowest
    is_for_later = kind == "compute" and not suffix
    return card >= lowest and (card[0] == lowest[0] or is_for_later)


def unused_gpu() -> str | None:
    """Why torch does not use this machine's NVIDIA GPU, and the remedy; None if it does, or if there is no GPU.

    Where torch does not see one, asks nvidia-smi, which works without torch.
    """
    if torch.cuda.is_available():
        return unserved_gpu(torch.device("cuda", 0))
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if listed.returncode == DRIVER_NOT_LOADED:
        return "nvidia-smi finds no loaded NVIDIA driver: reboot if it was just updated, or install it again"
    found = re.search(r"^GPU \d+: (.+?)(?: \(UUID.*)?$", listed.stdout, re.M)
    if found is None:
        return None
    gpu = found[1]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides {gpu} from torch; unset it to use the GPU"
    if torch.version.cuda is None:
        return (
            f"nvidia-smi lists {gpu}, but torch {torch.__version__} is a build without CUDA: "
            'pip uninstall torch, then install a build for CUDA as pytorch.org says under "Get Started"'
        )
    try:
        torch.cuda.init()
        reason = "no reason given"
    except RuntimeError as e:  # such as a driver that is too old for this build
        reason = " ".join(str(e).split())[:300]
    return (
        f"nvidia-smi lists {gpu}, but torch {torch.__version__} for CUDA {torch.version.cuda} does not see it "
        f"({reason}): update the driver, install torch's build for CUDA 12.6 (pytorch.org), or reboot"
    )


# ---- computing on it -----------------------------------------------------------------------------------------

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def autocast(device: torch.device, dtype: str, cached: bool = True) -> AbstractContextManager:
    """A context in which matmuls run in `dtype`; for float32, one that does nothing.

    cached: weights in `dtype` stay until its end, for those that are used again.
    """
    if dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[dtype], cache_enabled=cached)


def seed_all(seed: int, device: torch.device) -> None:
    """Seeds what a model on this device may draw random numbers from: torch's generators and Python's own.

    torch.manual_seed takes half a millisecond where there is no GPU: it notes the stack for a GPU that may come yet.
    """
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished all queued work, so that a clock read next includes it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


# ---- memory --------------------------------------------------------------------------------------------------


def memory_bytes(device: torch.device) -> int | None:
    """Memory of the GPU, or of the machine for a CPU or an Apple GPU; None if the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf; other systems may lack these names
        return None


def reachable_memory_bytes(device: torch.device) -> int:
    """Of a GPU's memory: what is free, and what torch's allocator holds in this process already."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes + torch.cuda.memory_reserved(device)


def usable_memory_bytes(device: torch.device) -> int | None:
    """The memory that this process can get; None if the system does not say.

    On a GPU a desktop and other processes have their part, and torch.cuda.set_per_process_memory_fraction may allow
    less still. For a CPU and an Apple GPU it is all of the machine's memory, or what a control group allows of it.
    """
    if device.type != "cuda":
        return min(filter(None, (memory_bytes(device), group_limit_bytes())), default=None)
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    cap_bytes = torch.cuda.get_per_process_memory_fraction(device) * total_bytes
    return min(reachable_memory_bytes(device), int(cap_bytes))


CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def group_limit_bytes() -> int | None:
    """The memory that this process's control groups allow (a container's, a batch job's); None without a limit.

    Of the second version of these groups, and of the first, which has a folder for memory.
    """
    limits = []
    with suppress(OSError):
        for line in OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            own = Path(path.lstrip("/"))
            for group in (own, *own.parents):  # in a container, a path of the host may stand here
                with suppress(OSError, ValueError):  # no such group, or its limit is "max"
                    limits.append(int((CONTROL_GROUPS / controllers / group / name).read_text()))
    return min(limits, default=None)


def free_memory_bytes() -> int | None:
    """What this process can still take of the machine's memory, or of its control group's (a container's, a batch
    job's); None if the system does not say."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    (available,) = re.findall(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.M)
    free_bytes = int(available) * 1024
    with suppress(OSError, ValueError, IndexError):  # no such group, or its limit is "max"
        path = re.findall(r"^0::/(.*)", Path("/proc/self/cgroup").read_text(), re.M)[0]
        group = Path("/sys/fs/cgroup") / path
        used = int((group / "memory.current").read_text())
        cached = re.findall(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.M)
        free_bytes = min(free_bytes, int((group / "memory.max").read_text()) - used + int(cached[0]))
    return free_bytes


def memory_in_words(usable_bytes: float | None, total_bytes: float | None) -> str:
    """Such as "12.0 GiB"; where less is usable, "10.9 GiB free (12.0 in all)"; "n/a" if it is not known."""
    if usable_bytes is None or total_bytes is None:
        return "n/a"
    total = f"{total_bytes / 2**30:.1f}"
    usable = f"{usable_bytes / 2**30:.1f}"
    return f"{total} GiB" if usable == total else f"{usable} GiB free ({total} in all)"


# Of a GPU's reachable memory, where the driver spills. The rest is for kernels, which CUDA loads at their first call,
# and for a desktop that grows. The figure is a choice; no machine has been measured.
SHARE_WITHOUT_SPILLING = 0.95


def forbid_spilling(device: torch.device) -> None:
    """Makes running out of a GPU's memory an error on Windows and in WSL. A smaller cap of the user's stays.

    There the driver moves what does not fit into system memory, and the run goes on many times slower
    (github.com/microsoft/WSL/issues/11050). torch's own cap comes before that.
    """
    if device.type != "cuda" or not (sys.platform == "win32" or "microsoft" in platform.release().lower()):
        return
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    fraction = SHARE_WITHOUT_SPILLING * reachable_memory_bytes(device) / total_bytes
    if fraction < torch.cuda.get_per_process_memory_fraction(device):
        torch.cuda.set_per_process_memory_fraction(fraction, device)


def peak_memory_bytes(device: torch.device) -> int | None:
    """The most memory in use at once so far; None if the system does not say.

    On CUDA: what torch allocated since `forget_peak`. Elsewhere: what this process held (peak resident set).
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():  # Linux, whose getrusage would count the process that started this one
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        kilobytes = lines["VmHWM"].split()[0]
        return int(kilobytes) * 1024
    if sys.platform != "darwin":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS gives bytes


def release_memory(device: torch.device) -> None:
    """After memory has run out: frees torch's reserved memory and compiled code, and forgets the peak."""
    gc.collect()
    torch.compiler.reset()
    forget_peak(device)


def forget_peak(device: torch.device) -> None:
    """On CUDA, frees what torch's allocator holds but does not use, and measures the peak from here on."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


# mallopt's parameters, from glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> bool:
    """Makes glibc keep the memory of freed tensors for the next ones; returns whether it does. glibc only.

    Otherwise each large tensor gets new pages from the kernel, which zeroes them one by one. That takes longer than
    many a matmul: a tenth of a step on a CPU (LOG.md, 2026-11-21).
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    import ctypes

    mallopt = ctypes.CDLL(None).mallopt
    if not mallopt(M_MMAP_THRESHOLD, 1 << 30) and not mallopt(M_MMAP_THRESHOLD, 1 << 25):  # older ones allow 32 MiB
        return False
    if not mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1):
        return False
    return bool(mallopt(M_TOP_PAD, 64 << 20))


# ---- its name ------------------------------------------------------------------------------------------------

# Instruction sets that matmuls use, the most capable first, as torch.cpu.get_capabilities calls them.
INSTRUCTION_SETS = {
    "AMX-FP16": "amx_fp16",
    "AMX-BF16": "amx_bf16",
    "AVX512-FP16": "avx512_fp16",
    "AVX512-BF16": "avx512_bf16",
    "AVX-512": "avx512_f",
    "AVX2": "avx2",
    "SVE": "sve",
    "BF16": "bf16",
    "NEON": "neon",
}
IMPLIED = {"AVX-512": "AVX2", "SVE": "NEON"}
# Environment variables that make torch, oneDNN and MKL use fewer instruction sets than the processor has.
LIMITING_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR")


def device_name(device: torch.device) -> str:
    """The device's own name, such as "NVIDIA GeForce RTX 4070".

    For a CPU, with what its speed depends on: "AMD Ryzen 7 5800H (AVX2), 16 cores, 8 threads". See cpu_facts.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return torch.backends.mps.get_name()  # "Apple M2 Max"
    cpu = cpu_facts()
    remarks = ", ".join([*cpu["instruction_sets"], *cpu["limits"]])
    name = f"{cpu['name']} ({remarks})" if remarks else cpu["name"]
    if cpu["cores"]:
        name += f", {counted(cpu['cores'], 'core')}"
    return f"{name}, {counted(cpu['threads'], 'thread')}"


def counted(n: int, unit: str) -> str:
    """1 core, 2 cores."""
    return f"{n} {unit}" if n == 1 else f"{n} {unit}s"


def cpu_facts() -> dict[str, Any]:
    """What a CPU's speed depends on, as log.jsonl records it."""
    processor_name, sets = processor()
    return {
        "name": processor_name,
        "instruction_sets": sets,
        "limits": [f"{name}={os.environ[name]}" for name in LIMITING_VARIABLES if os.environ.get(name)],
        # that this process may use; None if the system does not say
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


@functools.cache
def processor() -> tuple[str, list[str]]:
    """(name, instruction sets) of the CPU, by the system and by torch."""
    # A torch without this function leaves the instruction sets out of the name.
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    name = processor_name() or capabilities.get("cpu_name") or platform.processor() or platform.machine() or "CPU"
    return name, instruction_sets(capabilities)


def processor_name() -> str:
    """The name of the processor that Linux reports; empty if it has none, as on Arm, and on other systems."""
    cpuinfo = Path("/proc/cpuinfo")
    with suppress(OSError), cpuinfo.open(encoding="utf-8", errors="replace") as f:
        first = f.read(1 << 14)  # the other processors are the same, and reading about many takes a while
        found = re.search(r"^model name\s*: (.+)$", first, re.M)
        return found[1].strip() if found else ""
    return ""


def instruction_sets(capabilities: Mapping[str, Any]) -> list[str]:
    """The names in INSTRUCTION_SETS that the processor has and the system allows, without those that others imply."""
    found = [name for name, its_name in INSTRUCTION_SETS.items() if capabilities.get(its_name) is True]
    if not getattr(torch.cpu, "_init_amx", lambda: True)():  # AMX needs the kernel's permission as well
        found = [name for name in found if not name.startswith("AMX")]
    implied = {IMPLIED[name] for name in found if name in IMPLIED}
    return [name for name in found if name not in implied]
