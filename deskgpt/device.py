"""The device that a run computes on: which one to use, its name, its memory, how to wait for it."""

import functools
import hashlib
import os
import platform
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from deskgpt.errors import ROOT, reason
from deskgpt.limits import memory_limits, usable_cores

# ---- choosing a device ---------------------------------------------------------------------------


def resolve_device(name: str, local_rank: int = 0, local_ranks: int = 1) -> torch.device:
    """Return the torch device for `name`: auto (the first of cuda, mps and cpu that works), cpu,
    cuda, cuda:N or mps.

    local_rank: this process's number among the local_ranks processes of the run on this machine.
    Raises ValueError if there is no such device, or if several ranks would share one GPU.
    """
    if name == "auto":
        name = "mps" if torch.backends.mps.is_available() else "cpu"
        if torch.cuda.is_available():
            unserved = unserved_gpu(torch.device("cuda", local_rank % torch.cuda.device_count()))
            name = "cpu" if unserved else "cuda"
    if not re.fullmatch(r"cpu|cuda(:\d\d?)?|mps", name):
        raise ValueError(
            f"device={name!r} is not one of auto, cpu, cuda, cuda:N, mps; try --device=auto"
        )
    device = torch.device(name)
    if not torch.get_device_module(device).is_available():
        why = unused_gpu() or f"torch {torch.__version__} sees no such device"
        raise ValueError(f"device={name}: {why}; or try --device=auto")
    if device.type != "cuda":
        return device
    n_gpus = torch.cuda.device_count()
    index = local_rank if device.index is None else device.index
    if local_ranks > n_gpus or index >= n_gpus or (local_ranks > 1 and device.index is not None):
        raise ValueError(
            f"device={name} for {local_ranks} ranks: this machine has {n_gpus} GPUs, and each rank "
            f"needs its own; try --device=cuda, with torchrun --nproc_per_node={n_gpus}"
        )
    device = torch.device("cuda", index)
    unserved = unserved_gpu(device)
    if unserved:
        raise ValueError(f"device={device}: {unserved}; or try --device=cpu")
    return device


def unserved_gpu(device: torch.device) -> str | None:
    """Return why torch cannot compute on a GPU that it sees, and the remedy; None if it can. torch
    only warns.
    """
    from deskgpt import wheels

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of many lines
            torch.ones(1, device=device).add_(1)
    except torch.OutOfMemoryError:  # the run itself will say so
        return None
    except RuntimeError as e:
        name = torch.cuda.get_device_name(device)
        remedy = wheels.remedy(wheels.nvidia_gpu())
        return f"torch {torch.__version__} cannot compute on {name} ({reason(e)}): {remedy}"
    return None


def unused_gpu() -> str | None:
    """Return why torch does not use this machine's NVIDIA GPU, and the remedy; None if it does, or
    there is none.

    A driver that does not answer counts as a GPU: a run of a night must not be on the CPU unsaid.
    """
    from deskgpt import wheels

    if torch.cuda.is_available():
        return unserved_gpu(torch.device("cuda", 0))
    gpu = wheels.nvidia_gpu()
    if not isinstance(gpu, wheels.Gpu):
        return gpu
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and torch.version.cuda:
        return f"CUDA_VISIBLE_DEVICES={hidden!r} leaves torch no GPU: unset it to use {gpu.name}"
    return f"torch {torch.__version__} cannot use {gpu.name}: {wheels.remedy(gpu)}"


# ---- computing on it -----------------------------------------------------------------------------

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work, so that a clock read next includes it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def copy_to_host(x: Tensor) -> Tensor:
    """Return a copy of x in the host's memory; from CUDA without waiting for it: read it within
    DeferredCalls.
    """
    return x.to("cpu", non_blocking=x.is_cuda, copy=True)  # non_blocking: torch pins the copy


class DeferredCalls:
    """Calls functions of what was copied to the host: at once, but on CUDA only when `run` is
    called.

    If that is after the next step is queued, the card has work while the host reads and prints.
    `done_at` is the instant, of time.perf_counter, at which the device had done what was queued
    before the function was added.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._waiting: list[tuple[torch.cuda.Event, Callable[[], None]]] = []
        if device.type == "cuda":
            self._done = self._event()
            self._done.synchronize()
        self.done_at = time.perf_counter()

    def add(self, function: Callable[[], None]) -> None:
        """Call the function when all that was queued so far is done."""
        if self.device.type == "cuda":
            self._waiting.append((self._event(), function))
        else:
            self.done_at = time.perf_counter()
            function()

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def run(self) -> None:
        """Call the waiting functions, in order. What one of them raises drops those after it."""
        waiting, self._waiting = self._waiting, []
        for event, function in waiting:
            if event.query():  # some time ago: queueing takes longer than the card's work
                self.done_at += self._done.elapsed_time(event) / 1e3
            else:
                event.synchronize()  # waits for this event only, not for what was queued since
                self.done_at = time.perf_counter()
            self._done = event
            function()


def limit_threads() -> None:
    """Make torch use no more threads than a container's CPU quota allows, unless OMP_NUM_THREADS
    says how many.

    The system stops threads beyond the quota in the middle of a matmul, and the others wait for
    them.
    """
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > usable_cores():
        torch.set_num_threads(usable_cores())


# ---- memory --------------------------------------------------------------------------------------


def memory_bytes(device: torch.device) -> int:
    """Return the memory of the GPU, or of the machine for a CPU or an Apple GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total


def usable_memory_bytes(device: torch.device) -> int:
    """Return the memory that this process can get.

    On a GPU other processes and a desktop have their share. For a CPU and an Apple GPU it is all of
    the machine's memory, or what a control group allows of it.
    """
    if device.type != "cuda":
        return min([memory_bytes(device), *memory_limits()])
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes + torch.cuda.memory_reserved(device)


def memory_in_words(usable_bytes: float, total_bytes: float) -> str:
    """Return text such as "12.0 GiB" or, if less is usable, "10.9 GiB free (12.0 in all)"."""
    total = f"{total_bytes / 2**30:.1f}"
    usable = f"{usable_bytes / 2**30:.1f}"
    return f"{total} GiB" if usable == total else f"{usable} GiB free ({total} in all)"


def peak_memory_bytes(device: torch.device) -> int | None:
    """Return the most memory in use at once so far; None if the system does not say.

    On CUDA it is torch's allocations since peaks.py measured, elsewhere the memory of this process
    (peak resident set).
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS gives bytes
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    with suppress(OSError):  # Linux, whose getrusage would count the process that started this one
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
        return int(found[1]) * 1024 if found else None
    return None


def free_unused(device: torch.device) -> None:
    """Give the memory that glibc holds for new tensors back to the system, before tensors of other
    sizes are made on a CPU.
    """
    library = glibc()
    if device.type == "cpu" and library:
        library.malloc_trim(0)


def glibc() -> Any:
    """Return the system's C library if it is glibc, else None."""
    import ctypes

    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


# mallopt's parameters, from glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> None:
    """Make glibc, if the system has it, keep the memory of freed tensors for the next ones.

    Otherwise each large tensor gets new pages from the kernel, which zeroes them one by one: a
    tenth of a step on a CPU (docs/decisions.md).
    """
    library = glibc()
    if library:
        if not library.mallopt(M_MMAP_THRESHOLD, 1 << 30):
            library.mallopt(M_MMAP_THRESHOLD, 1 << 25)  # the most in older ones
        library.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
        library.mallopt(M_TOP_PAD, 64 << 20)


# ---- its name ------------------------------------------------------------------------------------


def device_name(device: torch.device) -> str:
    """Return the device's own name, such as "NVIDIA GeForce RTX 4070".

    A CPU's name has what its speed depends on: "AMD Ryzen 7 5800H (AVX2), 16 cores, 8 threads".
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return torch.backends.mps.get_name()  # "Apple M2 Max"
    vectors = torch.backends.cpu.get_cpu_capability()
    cores = usable_cores()
    threads = torch.get_num_threads()
    return (
        f"{processor()} ({vectors}), {cores} core{'s' * (cores > 1)}, {threads} "
        f"thread{'s' * (threads > 1)}"
    )


@functools.cache
def processor() -> str:
    """Return the name of the CPU; of an Arm one, which Linux does not name, its architecture."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(errors="replace")
        if found := re.search(r"^model name\s*: (.+)$", text, re.M):
            return found[1].strip()
    return platform.processor() or platform.machine()


# ---- what a run's figures come from --------------------------------------------------------------

CODE = ("*.py", "deskgpt/*.py", "deskgpt/*.cpp", "data/*.py", "data/*/*.py")


# Names of environment variables that change how torch and its libraries compute, or how fast.
VARIABLES = re.compile(
    "TORCH_COMPILE|TORCHDYNAMO|TORCHINDUCTOR_(?!CACHE_DIR|COMPILE_THREADS)|ATEN_CPU|ONEDNN|DNNL"
    "|MKL_(?!NUM_THREADS)|NVIDIA_TF32|CUDA_LAUNCH|PYTORCH_NO_CUDA"
)


def torch_variables() -> str:
    """Return the variables that change how torch computes, such as " TORCHDYNAMO_DISABLE=1"; each
    behind a space.
    """
    found = [name for name in sorted(os.environ) if VARIABLES.match(name)]
    return "".join(f" {name}={os.environ[name]}" for name in found)


def versions() -> dict[str, str]:
    """Return the versions and variables that a run's figures depend on."""
    found = {
        "python": platform.python_version(),
        "numpy": metadata.version("numpy"),
        "torch": metadata.version("torch"),
        "cuda": torch.version.cuda or "",
        "platform": platform.platform(),
        "variables": torch_variables().strip(),
    }
    return {name: value for name, value in found.items() if value}


def git_commit() -> str | None:
    """Return the commit of the code, with "+changes" if files differ; outside a git checkout,
    DESKGPT_COMMIT.
    """
    # A hook of git sets GIT_DIR and others, which would name another repository.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # --exclude=* leaves tags out: the commit itself, not a distance to some tag
    words = ["git", "describe", "--always", "--abbrev=12", "--dirty=+changes", "--exclude=*"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=ROOT)
        commit = done.stdout.strip()
    except OSError:
        commit = ""
    return commit or os.environ.get("DESKGPT_COMMIT")


def code_digest(root: Path = ROOT) -> str:
    """Return sixteen hex digits of the SHA-256 of the code that runs in a checkout: scripts and
    model, deskgpt, how data is read. It tells two edits apart that no commit has.
    """
    digest = hashlib.sha256()
    for path in sorted(path for pattern in CODE for path in root.glob(pattern)):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


def code_versions(compute: Any, device: Any) -> dict[str, Any]:
    """Return commit, digest, versions, device and compute, for checkpoints: a resumed run prints a
    change and continues.
    """
    on_cpu = device.type == "cpu"  # whose full name has the number of threads, which ranks share
    name = processor() if on_cpu else device_name(device)
    code = {"code": git_commit(), "code_digest": code_digest()}
    return code | {"versions": versions(), "device": name, "variant": str(compute)}
