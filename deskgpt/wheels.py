"""Choose the build of torch (wheel) that serves this machine's GPU.

Only the standard library is needed.

python -m deskgpt.wheels      # the build for this machine, in one line
"""

import ctypes
import os
import re
import subprocess
import sys
from typing import NamedTuple

INDEX = "https://download.pytorch.org/whl"
TOO_NEW = "2.16"  # as in requirements.txt
ANSWER_S = 10.0  # how long a driver may take; seconds if no process keeps it loaded
# The driver's own library.
LIBRARY = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
NO_CARD = (34, 100)  # its results without a card: a build machine's stub, and the real library


class Gpu(NamedTuple):
    """An NVIDIA card by its driver."""

    name: str
    cuda: tuple[int, int]  # the newest CUDA that its driver offers
    capability: tuple[int, int]  # compute capability


def nvidia_gpu() -> Gpu | str | None:
    """Return the first NVIDIA card; or why its driver does not answer, and the remedy; or None.

    The driver's own library is asked, which torch needs too, while nvidia-smi may not be in the
    PATH. A driver may hang, or crash, so it is asked in a process of its own.
    """
    found = ask_driver()
    card = CARD.fullmatch(found)
    if card:
        return Gpu(card[1], (int(card[4]), int(card[5])), (int(card[2]), int(card[3])))
    if not found:
        return None
    return f"the NVIDIA driver does not answer ({found}): restart the machine, or update the driver"


CARD = re.compile(r"(.+), (\d+)\.(\d+), (\d+)\.(\d+)")  # its name, compute capability and CUDA


def ask_driver() -> str:
    """Return what describe_by returns in another process, or why that printed nothing."""
    process = subprocess.Popen(
        [sys.executable, __file__, LIBRARY], stdout=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        printed, _ = process.communicate(timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        process.kill()  # and not wait: in a driver that hangs, it cannot be killed
        return f"{LIBRARY}: no answer in {ANSWER_S:g} s"
    return printed.strip() if process.returncode == 0 else f"{LIBRARY} crashes"


def describe_by(path: str) -> str:
    """Return the first card as CARD has it, by a driver's library; or the number of its error; ""
    without library or card.
    """
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # it could hide the card
    try:
        library = ctypes.CDLL(path)
    except OSError:
        return ""
    error = library.cuInit(0)
    if error:
        return "" if error in NO_CARD else f"{path}: error {error}"
    name = ctypes.create_string_buffer(256)
    library.cuDeviceGetName(name, 256, 0)
    cuda, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(cuda))
    library.cuDeviceComputeCapability(ctypes.byref(major), ctypes.byref(minor), 0)
    version = f"{cuda.value // 1000}.{cuda.value % 1000 // 10}"
    return f"{name.value.decode()}, {major.value}.{minor.value}, {version}"


def wheel_for(gpu: Gpu | str | None, platform: str = sys.platform) -> tuple[str, str]:
    """Return (the build's folder below INDEX, why in one line) for what nvidia_gpu has found (torch
    2.13: RELEASE.md).
    """
    if platform == "darwin":
        return "cpu", "macOS: torch's only build, which computes on Apple's GPU too"
    if gpu is None:
        why = "no NVIDIA driver lists a card: torch's build for the CPU"
        return "cpu", f"{why} (AMD: PIP_EXTRA_INDEX_URL=ROCm's index)"
    if isinstance(gpu, str):
        return "cpu", f"{gpu}, delete .venv, start again; until then torch's build for the CPU"
    card = f"{gpu.name}, driver for CUDA {gpu.cuda[0]}.{gpu.cuda[1]}"
    if gpu.cuda >= (13, 0) and gpu.capability >= (7, 5):  # GTX 16, RTX 20 and newer
        return "cu130", f"{card}: torch's build for CUDA 13.0"
    # It runs on every driver for CUDA 12.
    if gpu.cuda >= (12, 0) and (5, 0) <= gpu.capability <= (9, 0):
        return "cu126", f"{card}: torch's build for CUDA 12.6; torch 2.14 is the last with it"
    needed = f"install driver {'580' if gpu.capability >= (7, 5) else '525'} or newer"
    return "cpu", f"{card}: no build of torch serves it; {needed}, delete .venv, start again"


def remedy(gpu: Gpu | str | None) -> str:
    """Return the command to type, or to install first, so that torch uses this machine's card."""
    if isinstance(gpu, str):
        return gpu
    wheel, why = wheel_for(gpu)
    if wheel == "cpu":
        return why
    packages = f'"torch<{TOO_NEW}" --index-url {INDEX}/{wheel}'
    return f'"{sys.executable}" -m pip install --force-reinstall {packages}'


if __name__ == "__main__":
    print(describe_by(sys.argv[1]) if sys.argv[1:] else wheel_for(nvidia_gpu())[1])
