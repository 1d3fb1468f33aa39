"""Which of torch's builds (wheels) serves this machine's GPU; by the standard library only, since tasks.py asks first.

python -m deskgpt.system.wheels      # what this machine needs, in one line
"""

from __future__ import annotations

import re
import subprocess
import sys
from typing import NamedTuple

INDEX = "https://download.pytorch.org/whl"
TOO_NEW = "2.16"  # as in requirements.txt
NVIDIA_SMI_TIMEOUT_S = 10.0  # it takes seconds if no process keeps the driver loaded


class Gpu(NamedTuple):
    """An NVIDIA card by nvidia-smi."""

    name: str
    cuda: tuple[int, int]  # the newest CUDA that its driver offers
    capability: tuple[int, int]  # compute capability


class Wheel(NamedTuple):
    """One kind of torch's builds for Linux and Windows (torch 2.13: RELEASE.md)."""

    name: str  # of its folder below INDEX
    cuda: tuple[int, int]  # that the driver must offer
    lowest: tuple[int, int]  # compute capability of the cards that it has kernels for
    highest: tuple[int, int]
    why: str
    gb: float  # to download, with CUDA's libraries, roughly


# The first that serves a card is taken. CUDA 12.6 runs on every driver for CUDA 12.
WHEELS = (
    Wheel("cu130", (13, 0), (7, 5), (12, 1), "torch's build for CUDA 13.0", 3.0),  # GTX 16, RTX 20 and newer
    Wheel("cu126", (12, 0), (5, 0), (9, 0), "torch's build for CUDA 12.6; torch 2.14 is the last with it", 3.0),
)
CPU = Wheel("cpu", (0, 0), (0, 0), (0, 0), "torch's build for the CPU", 0.2)


def nvidia_gpu() -> Gpu | None:
    """Return the first NVIDIA card that nvidia-smi lists; None if there is none, or no driver."""
    name = re.search(r"^GPU 0: (.+?)(?: \(UUID.*)?$", answer("nvidia-smi", "-L"), re.M)
    if name is None:
        return None
    cuda = re.search(r"CUDA (?:UMD )?Version: *(\d+)\.(\d+)", answer("nvidia-smi"))
    # Drivers too old to print the capability are too old for each of these builds.
    capability = re.match(r"(\d+)\.(\d+)", answer("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"))
    return Gpu(name[1], pair(cuda, (0, 0)), pair(capability, (7, 5)))


def pair(found: re.Match[str] | None, otherwise: tuple[int, int]) -> tuple[int, int]:
    """Return the two numbers that a pattern has found."""
    return (int(found[1]), int(found[2])) if found else otherwise


def answer(*command: str) -> str:
    """Return what a command prints; nothing if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def wheel_for(gpu: Gpu | None, platform: str = sys.platform) -> tuple[Wheel, str]:
    """Return (the build to install, why in one line) for a card, or for none."""
    if platform == "darwin":
        return CPU, "macOS: torch's only build, which computes on Apple's GPU too"
    if gpu is None:
        return CPU, f"nvidia-smi lists no card: {CPU.why} (for an AMD card set PIP_EXTRA_INDEX_URL to ROCm's index)"
    card = f"{gpu.name}, driver for CUDA {gpu.cuda[0]}.{gpu.cuda[1]}"
    for wheel in WHEELS:
        if wheel.lowest <= gpu.capability <= wheel.highest and gpu.cuda >= wheel.cuda:
            return wheel, f"{card}: {wheel.why}"
    needed = "580" if gpu.capability >= WHEELS[0].lowest else "525"
    return CPU, f"{card}: no build of torch serves it; install driver {needed} or newer, delete .venv, then start again"


def remedy() -> str:
    """Return what to type, or to install first, so that torch uses this machine's card."""
    wheel, why = wheel_for(nvidia_gpu())
    if wheel is CPU:
        return why
    return f'"{sys.executable}" -m pip install --force-reinstall "torch<{TOO_NEW}" --index-url {INDEX}/{wheel.name}'


if __name__ == "__main__":
    print(wheel_for(nvidia_gpu())[1])
