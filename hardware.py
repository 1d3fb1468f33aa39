"""What this machine is, and its peak FLOP/s: published, and measured now.

    python hardware.py

Keeps what it measures in ~/.cache/deskgpt/peaks.json, or below XDG_CACHE_HOME, if it is the best so far.
"""

from __future__ import annotations

import torch

from deskgpt import hardware, peak_flops, remembered
from deskgpt.errors import one_line_errors


def main() -> None:
    """Prints what this machine is and reaches; what it measures is kept if it is the best so far."""
    device = hardware.resolve_device("auto")
    if device.type == "cpu" and (reason := hardware.unseen_gpu()):
        print(reason)
    memory = hardware.memory_bytes(device)
    size = "n/a" if memory is None else f"{memory / 2**30:.1f} GiB"
    print(f"{hardware.device_name(device)}, memory {size}, torch {torch.__version__}")
    for dtype in hardware.DTYPES:
        now = peak_flops.sweep_matmuls(device, dtype, peak_flops.MATMUL_SIZES)
        best = peak_flops.keep_best(device, dtype, now)
        published = peak_flops.published_flops(device, dtype)
        said = f"{published[0] / 1e12:.4g} ({published[1]})" if published else "n/a"
        print(f"{dtype}: published {said}, measured now {now / 1e12:.3g}, best so far {best / 1e12:.3g} TFLOP/s")
    kept = any(name.startswith(f"{hardware.device_name(device)}, ") for name in peak_flops.read_peaks())
    print(
        f"the best are kept in {remembered.path_of('peaks')}"
        if kept
        else f"{remembered.path_of('peaks')} cannot be written: each run measures anew"
    )


if __name__ == "__main__":
    with one_line_errors():
        main()
