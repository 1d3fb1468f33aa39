"""Choose the build of torch (wheel) that serves this machine's GPU.

Only the standard library is needed.

python -m deskgpt.wheels      # what this machine needs, in one line
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


def nvidia_gpu() -> Gpu | None:
    """Return the first NVIDIA card that nvidia-smi lists; None if there is none, or its driver does
    not describe it.
    """
    listed = first_line_of("nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader")
    card = re.match(r"(.+), (\d+)\.(\d+)", listed)
    cuda = re.search(r"CUDA (?:UMD )?Version: *(\d+)\.(\d+)", first_line_of("nvidia-smi"))
    if card is None or cuda is None:
        return None
    return Gpu(card[1], (int(cuda[1]), int(cuda[2])), (int(card[2]), int(card[3])))


def first_line_of(*command: str) -> str:
    """Return what a command prints; nothing if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def wheel_for(gpu: Gpu | None, platform: str = sys.platform) -> tuple[str, str]:
    """Return (the build's folder below INDEX, why in one line) for a card, or for none (torch 2.13:
    RELEASE.md).
    """
    if platform == "darwin":
        return "cpu", "macOS: torch's only build, which computes on Apple's GPU too"
    if gpu is None:
        return (
            "cpu",
            "nvidia-smi lists no card: torch's build for the CPU (AMD: "
            "PIP_EXTRA_INDEX_URL=ROCm's index)",
        )
    card = f"{gpu.name}, driver for CUDA {gpu.cuda[0]}.{gpu.cuda[1]}"
    if gpu.cuda >= (13, 0) and gpu.capability >= (7, 5):  # GTX 16, RTX 20 and newer
        return "cu130", f"{card}: torch's build for CUDA 13.0"
    # It runs on every driver for CUDA 12.
    if gpu.cuda >= (12, 0) and (5, 0) <= gpu.capability <= (9, 0):
        return "cu126", f"{card}: torch's build for CUDA 12.6; torch 2.14 is the last with it"
    needed = "580" if gpu.capability >= (7, 5) else "525"
    return (
        "cpu",
        f"{card}: no build of torch serves it; install driver {needed} or newer, delete "
        ".venv, start again",
    )


def remedy() -> str:
    """Return what to type, or to install first, so that torch uses this machine's card."""
    wheel, why = wheel_for(nvidia_gpu())
    if wheel == "cpu":
        return why
    packages = f'"torch<{TOO_NEW}" --index-url {INDEX}/{wheel}'
    return f'"{sys.executable}" -m pip install --force-reinstall {packages}'


if __name__ == "__main__":
    print(wheel_for(nvidia_gpu())[1])
