"""Prints what this machine is and its peak FLOP/s: the published figure, and what matmuls reach now.

    python -m deskgpt.machine

Keeps a measured peak in ~/.cache/deskgpt/peaks.json, or below XDG_CACHE_HOME, if it is the best so far.
"""

from __future__ import annotations

import torch

from deskgpt.machine import hardware, peak_flops, remembered
from deskgpt.machine.errors import one_line_errors


def main() -> None:
    """Prints what the device is and a line of peaks for each dtype; keeps a measured peak that is the best so far."""
    device = hardware.resolve_device("auto")
    if device.type == "cpu":
        reason = hardware.unseen_gpu()
        if reason:
            print(reason)
    name = hardware.device_name(device)
    memory = hardware.memory_in_words(hardware.usable_memory_bytes(device), hardware.memory_bytes(device))
    print(f"{name}, memory {memory}, torch {torch.__version__}")

    for dtype in hardware.DTYPES:
        print_peaks(device, dtype)

    path = remembered.path_of("peaks")
    if any(key.startswith(f"{name}, ") for key in peak_flops.read_peaks()):
        print(f"the best are kept in {path}")
    else:
        print(f"{path} cannot be written: each run measures again")


def print_peaks(device: torch.device, dtype: str) -> None:
    """Measures the peak in `dtype` and prints it next to the published one and the best so far."""
    published = "n/a"
    found = peak_flops.published_flops(device, dtype)
    if found is not None:
        flops, source = found
        published = f"{flops / 1e12:.4g} ({source})"
    now = peak_flops.sweep_matmuls(device, dtype, peak_flops.MATMUL_SIZES)
    best = peak_flops.keep_best(device, dtype, now)
    print(f"{dtype}: published {published}, measured now {now / 1e12:.3g}, best so far {best / 1e12:.3g} TFLOP/s")


if __name__ == "__main__":
    with one_line_errors():
        main()
