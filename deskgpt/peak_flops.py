"""The peak FLOP/s that MFU refers to: the published figure, and what matmuls reach on this machine.

Measured peaks are kept in ~/.cache/deskgpt/peaks.json, or below XDG_CACHE_HOME.
"""

from __future__ import annotations

import functools
import math
import time

import torch

from deskgpt import hardware, remembered
from deskgpt.gpu_peaks import published_peak
from deskgpt.hardware import DTYPES, device_name, synchronize

# The square matmuls whose best speed is a device's measured peak, by size, and the one that is a look in passing.
MATMUL_SIZES: dict[str, tuple[int, ...]] = {"cpu": (512, 1024, 2048), "gpu": (512, 2048, 4096, 8192)}


QUICK_SIZES: dict[str, tuple[int, ...]] = {"cpu": (1024,), "gpu": (4096,)}


def fast_dtype(device: torch.device) -> str:
    """The dtype with the faster matmuls, of those that train as well as float32: by measurement on a CPU."""
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    if device.type == "cpu":
        float32, bfloat16 = (measured_matmul_flops(device, dtype) for dtype in ("float32", "bfloat16"))
        return "bfloat16" if bfloat16 > float32 else "float32"
    return "float32"


def peak_flops(device: torch.device, dtype: str) -> tuple[float, str]:
    """(dense peak FLOP/s of one device in `dtype`, where the figure comes from), for matmuls as train.py runs them.

    The published figure where gpu_peaks.py has one, with what matmuls reach here beside it; else the measured one. NaN
    where neither can be had. "float32" on CUDA is TF32 where the GPU has that, as train.py asks for it.
    """
    measured = measured_matmul_flops(device, dtype)
    published = published_flops(device, dtype)
    if published is None:
        return measured, f"measured {dtype} matmul" if measured > 0 else f"{dtype} matmul cannot be measured here"
    flops, source = published
    if measured > 1.02 * flops:
        why = "its clock is above the rated one, or its row in gpu_peaks.py is wrong"
        return measured, f"measured {dtype} matmul, {measured / flops:.0%} of {source}: {why}"
    beside = f"measured here {measured / 1e12:.3g} TFLOP/s ({measured / flops:.0%})" if measured > 0 else "not measured"
    return flops, f"{source}; {beside}"


def published_flops(device: torch.device, dtype: str) -> tuple[float, str] | None:
    """(dense peak FLOP/s by gpu_peaks.py, its source); None where it has none for this device."""
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

    On CUDA "float32" runs in TF32, as in train.py. Where memory runs out or a device is slow, only the smaller
    matmuls run.
    """
    best = math.nan
    precision = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        with hardware.not_counted(device):
            for n in sizes["cpu" if device.type == "cpu" else "gpu"]:
                if 6 * 2 * n**3 > 2 * best:  # more than two seconds, by the sizes before; nan at the first
                    break
                best = max(matmul_flops(device, dtype, n), best)  # the new one first: max(x, nan) is x
    except RuntimeError:  # out of memory, or the device has no matmul in this dtype: no reason to end a run
        pass
    finally:
        torch.set_float32_matmul_precision(precision)
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


def fastest_matmul(device: torch.device) -> float:
    """The best FLOP/s that square matmuls reach here, in float32 or bfloat16; 0 where none can run."""
    flops = [measured_matmul_flops(device, dtype) for dtype in ("float32", "bfloat16")]
    return max((f for f in flops if f > 0), default=0.0)  # of what is not a number, nothing is said
