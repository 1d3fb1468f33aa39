"""A device's peak FLOP/s: the published figure, and what matmuls reach on this machine.

MFU refers to the published figure where there is one, else to the measured one, and the measurements decide which dtype
is fast. The best measured peaks are kept in ~/.cache/deskgpt/peaks.json, or below XDG_CACHE_HOME.
"""

from __future__ import annotations

import functools
import math
import time

import torch

from deskgpt.system import cache
from deskgpt.system.gpu_peaks import Card, card_named
from deskgpt.system.hardware import DTYPES, device_name, forget_peak, synchronize

# ---- answers -------------------------------------------------------------------------------------------------

# A measurement may exceed the published peak by this factor, by its own error, before a reason is needed.
MEASURING_ERROR = 1.02


def peak_flops(device: torch.device, dtype: str) -> tuple[float, str]:
    """(dense peak FLOP/s of one device in `dtype`, where the figure comes from), for matmuls as train.py runs them.

    The published peak if gpu_peaks.py has the device, even where matmuls are faster, so that a device's MFU means the
    same in every run; otherwise the measured one; NaN if there is neither. "float32" on CUDA means TF32 if the GPU has
    it, because train.py asks for that.
    """
    measured = measured_matmul_flops(device, dtype)
    was_measured = measured > 0  # False for NaN
    published = published_flops(device, dtype)
    if published is None:
        return measured, f"measured {dtype} matmul" if was_measured else f"{dtype} matmul cannot be measured here"

    flops, source = published
    if not was_measured:
        return flops, f"{source}; not measured"
    share = f"{measured / flops:.0%}"
    if measured > MEASURING_ERROR * flops:
        share += ": its clock is above the rated one, or its row in gpu_peaks.py is wrong"
    return flops, f"{source}; measured here {measured / 1e12:.4g} TFLOP/s ({share})"


def fast_dtype(device: torch.device) -> str:
    """The dtype with the fastest matmuls among those that train as well as float32; measured on a CPU."""
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bfloat16"
        # Below 7.0 no tensor cores multiply float16, which needs a loss scale too.
        return "float16" if torch.cuda.get_device_capability(device) >= (7, 0) else "float32"
    if device.type == "cpu":
        float32_flops = measured_matmul_flops(device, "float32")
        bfloat16_flops = measured_matmul_flops(device, "bfloat16")
        return "bfloat16" if bfloat16_flops > float32_flops else "float32"
    return "float32"


def fastest_matmul(device: torch.device) -> float:
    """The best FLOP/s that square matmuls reach here in float32 or bfloat16; 0 if none can run."""
    best = 0.0
    for dtype in ("float32", "bfloat16"):
        measured = measured_matmul_flops(device, dtype)
        if measured > best:  # False for NaN
            best = measured
    return best


# ---- the published peak --------------------------------------------------------------------------------------


def published_flops(device: torch.device, dtype: str) -> tuple[float, str] | None:
    """(dense peak FLOP/s, its source) from gpu_peaks.py; None if the table does not have this device and dtype."""
    card = card_of(device)
    return None if card is None else card.peak_in_training(dtype)


def card_of(device: torch.device) -> Card | None:
    """The device's row in gpu_peaks.py; None if the table does not have it."""
    if device.type != "cuda":
        return None
    sms = torch.cuda.get_device_properties(device).multi_processor_count  # tells apart GPUs that share a name
    return card_named(device_name(device), sms)


# ---- the measured peak ---------------------------------------------------------------------------------------

# Sizes n of the square matmuls to time: all of them to find the peak, one of them to check a remembered peak.
MATMUL_SIZES: dict[str, tuple[int, ...]] = {"cpu": (512, 1024, 2048), "gpu": (512, 2048, 4096, 8192)}
QUICK_SIZES: dict[str, tuple[int, ...]] = {"cpu": (1024,), "gpu": (4096,)}

REPEATS = 5  # timed matmuls of one size, after one to warm up
LONGEST_SIZE_S = 2.0  # a size that would take longer than this in all is left out


@functools.cache  # all runs of one process share the measurement
def measured_matmul_flops(device: torch.device, dtype: str) -> float:
    """The best FLOP/s of square matmuls in `dtype` ever measured on this machine; NaN if none can run.

    Only the first run measures all sizes. Later runs time one size, which is quick, and measure all of them again
    only if that one beats the remembered peak: machines are noisy, so the best figure is kept.
    """
    key = peak_key(device, dtype)
    known = remembered_peak(key)
    if known is not None:
        quick = sweep_matmuls(device, dtype, QUICK_SIZES)
        if not quick > known:  # also when quick is NaN
            return known
    measured = sweep_matmuls(device, dtype, MATMUL_SIZES)
    if known is not None and not measured > known:
        return known
    if measured > 0:  # False for NaN
        cache.keep("peaks", key, measured)
    return measured


def sweep_matmuls(device: torch.device, dtype: str, sizes: dict[str, tuple[int, ...]]) -> float:
    """The best FLOP/s over these sizes of square matmuls, measured now; NaN if none could run.

    On CUDA "float32" runs in TF32, as in train.py. Sizes that are too large for the memory, or too slow, are left out.
    """
    best: float | None = None
    precision = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        for n in sizes["cpu" if device.type == "cpu" else "gpu"]:
            if best is not None and (1 + REPEATS) * flops_of_matmul(n) > LONGEST_SIZE_S * best:
                break
            flops = matmul_flops(device, dtype, n)
            best = flops if best is None else max(best, flops)
    except RuntimeError:  # out of memory, or the device has no matmul in this dtype: neither may end a run
        pass
    finally:
        torch.set_float32_matmul_precision(precision)
        forget_peak(device)  # the matrices are not the run's memory
    return math.nan if best is None else best


def matmul_flops(device: torch.device, dtype: str, n: int) -> float:
    """The best FLOP/s of a few n x n matmuls."""
    draw = torch.Generator(device).manual_seed(0)  # measuring must not change a run's random numbers
    a = torch.randn(n, n, device=device, generator=draw).to(DTYPES[dtype])
    b = torch.randn(n, n, device=device, generator=draw).to(DTYPES[dtype])
    out = a @ b  # every timed matmul writes into this tensor, which keeps the allocator out of the figure
    best_s = math.inf
    for _ in range(REPEATS):
        synchronize(device)
        t0 = time.perf_counter()
        torch.mm(a, b, out=out)
        synchronize(device)
        best_s = min(best_s, time.perf_counter() - t0)
    return flops_of_matmul(n) / best_s


def flops_of_matmul(n: int) -> int:
    """FLOPs of an n x n matmul: n^3 multiplications and as many additions."""
    return 2 * n**3


# ---- remembered peaks ----------------------------------------------------------------------------------------


def remembered_peak(key: str) -> float | None:
    """The remembered FLOP/s; None if there is no entry that can be a peak."""
    value = cache.read("peaks").get(key)
    return value if isinstance(value, float) and 0 < value < math.inf else None


def peak_key(device: torch.device, dtype: str) -> str:
    """Names the device, the dtype and the version of torch: each has a peak of its own."""
    return f"{device_name(device)}, {dtype}, torch {torch.__version__}"
