"""A device's peak FLOP/s: the published figure of some 50 GPUs, and what matmuls reach on this
machine.

    find_card("NVIDIA H100 80GB HBM3").peak("bfloat16")  # (989e12, "NVIDIA data sheet, bfloat16")
    find_cards("8xA100 80GB")                               # (8, the card with 80 GB)
    peak_flops(torch.device("cuda"), "bfloat16")  # (989e12, "...; measured here 745 TFLOP/s (75%)")
    measured_flops(torch.device("cpu"))  # FLOP/s of one thread by dtype, for dtype=auto

MFU refers to the published figure if there is one, else to the measured one. The best measured
figures are kept in ~/.cache/deskgpt/peaks.json, so only the first start on a machine measures, for
about 0.3 s.

16-bit figures are with float32 accumulation and without sparsity: what a matmul in training can
reach. NVIDIA's headline figures for GeForce cards are two or four times as high: these cards, since
2018, accumulate in float32 at half the rate, and sparsity doubles the figure. A card that is not
here gets its measured peak. Laptop chips and MIG slices are left out, since their clocks and sizes
differ under one name, and so is what has no published dense figure in 16 bits (DGX Spark).
"""

import difflib
import functools
import json
import math
import re
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deskgpt.device import DTYPES, device_name, free_unused, synchronize, torch_variables
from deskgpt.files import cache_folder, is_trusted, write_atomically

# ---- the table -----------------------------------------------------------------------------------

CARDS = Path(__file__).with_name("cards.txt")
COLUMNS = ("float32", "tf32", "bfloat16", "float16")
MEMORY_SIZE = re.compile(r"\b(\d+) ?gb?\b", re.IGNORECASE)
# Names of makers and families, which drivers and people add or leave out. No two cards differ only
# in these.
MAKERS_AND_FAMILIES = re.compile(
    r"\b(nvidia|geforce|tesla|amd|radeon|instinct|graphics|generation|blackwell|workstation|edition)\b"
)


@dataclass(frozen=True)
class Card:
    """One row of the table."""

    name: str
    flops: dict[str, float]  # FLOP/s by dtype: "float32", "tf32", "bfloat16", "float16"
    source: str
    sizes_gb: tuple[int, ...]  # in which it is sold, the smallest first

    def default_dtype(self) -> str:
        """Return the dtype that train.py's dtype=auto takes on it: bfloat16, or float16 if the card
        emulates bfloat16.
        """
        return "bfloat16" if "bfloat16" in self.flops else "float16"

    def peak(self, dtype: str) -> tuple[float, str] | None:
        """Return (dense peak FLOP/s, its source) as train.py computes: in float32 by TF32, if the
        card has it. None if the table has none.
        """
        if dtype == "float32" and "tf32" in self.flops:
            return self.flops["tf32"], f"{self.source}, TF32"
        return (self.flops[dtype], f"{self.source}, {dtype}") if dtype in self.flops else None


def find_cards(text: str) -> tuple[int, Card, int]:
    """Return (number, card, its GB of memory) of "8xH100" or "2*RTX 4090", or of "H100", one card.

    The memory is the stated one, or the smallest in which the card is sold. Raises ValueError as
    find_card.
    """
    found = re.fullmatch(r"([1-9]\d{0,6}) ?[x*] ?(.*)", text)
    number, name = (int(found[1]), found[2]) if found else (1, text)
    card = find_card(name)
    stated = MEMORY_SIZE.search(name)
    if stated and int(stated[1]) in card.sizes_gb:
        return number, card, int(stated[1])
    return number, card, card.sizes_gb[0]


def find_card(name: str) -> Card:
    """Return the card that `name` means: torch's name for a device, or what people call it.

    Raises ValueError, with similar names, if the table does not have it.
    """
    key = name_key(MEMORY_SIZE.sub("", name))
    if key not in card_table():
        similar = difflib.get_close_matches(key, card_table(), n=5, cutoff=0.4)
        names = ", ".join(dict.fromkeys(card_table()[each].name for each in similar))
        raise ValueError(
            f"{name!r} is not a known card; did you mean one of "
            f"{names or 'those in deskgpt/cards.txt'}? On a machine that has it, "
            "--dry_run=True measures it"
        )
    return card_table()[key]


@functools.cache
def card_table() -> dict[str, Card]:
    """Return the cards of TABLE by the keys of all their names."""
    cards: dict[str, Card] = {}
    for line in CARDS.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        names, *tflops, sizes_gb, source = [cell.strip() for cell in line.split("|")]
        figures = zip(COLUMNS, tflops, strict=True)
        flops = {dtype: float(cell) * 1e12 for dtype, cell in figures if cell != "-"}
        card = Card(names.split("/")[0], flops, source, tuple(map(int, sizes_gb.split(", "))))
        cards |= {name_key(each): card for each in names.split("/")}
    return cards


def name_key(name: str) -> str:
    """Return the part of a name that identifies the card: lower case, without maker, family and
    punctuation.
    """
    words = MAKERS_AND_FAMILIES.sub("", re.sub(r"[^a-z0-9]+", " ", name.lower()))
    return re.sub(r"^(rtx|gtx|rx)", "", words.replace(" ", ""))


# ---- the peak of a device ------------------------------------------------------------------------


def peak_flops(device: torch.device, dtype: str) -> tuple[float, str]:
    """Return (dense peak FLOP/s of one device in `dtype`, its source), for matmuls as train.py runs
    them.

    It is the published peak if the table has the device, even if matmuls are faster, so that a
    device's MFU means the same in every run; otherwise the measured one; NaN if there is neither.
    """
    measured = measured_matmul_flops(device, dtype)
    published = None
    if device.type == "cuda":
        with suppress(ValueError):  # the table does not have it
            published = find_card(device_name(device)).peak(dtype)
    if published:
        flops, source = published
        share = f"{measured / flops:.0%}"
        return flops, f"{source}; measured here {measured / 1e12:.4g} TFLOP/s ({share})"
    if math.isnan(measured):
        return measured, f"{dtype} matmul cannot be measured here"
    threads = f" of one thread, times {torch.get_num_threads()}" if device.type == "cpu" else ""
    return measured, f"measured {dtype} matmul{threads}"


# ---- earlier measurements on this machine --------------------------------------------------------


def peaks_path() -> Path:
    """Return the file of the measured figures."""
    return cache_folder() / "peaks.json"


def read_peaks() -> dict[str, Any]:
    """Return the measured figures, by key; none if the file is missing, damaged or another
    user's.
    """
    path = peaks_path()
    with suppress(OSError, ValueError, RecursionError):
        entries = json.loads(path.read_bytes()) if is_trusted(path) else None
        if isinstance(entries, dict):
            return entries
    return {}


def write_peaks(key: str, value: Any) -> None:
    """Set one entry.

    If that fails, or if another process sets one at the same time, a later run tries again.
    """
    with suppress(OSError):
        write_atomically(peaks_path(), json.dumps(read_peaks() | {key: value}, indent=1).encode())


# ---- measuring -----------------------------------------------------------------------------------

# n of square matmuls.
MATMUL_SIZES = {"cpu": (128, 512, 1024), "cuda": (512, 2048, 4096, 8192), "mps": (512, 2048, 4096)}
REPEATS = 5  # timed matmuls of one size, after one to warm up
LONGEST_MATMUL_S = 0.01  # sizes that would take longer are left out
MIN_SPEEDUP = 1.2  # of bfloat16 over float32: measurements differ by a few percent


def measured_matmul_flops(device: torch.device, dtype: str) -> float:
    """Return the best FLOP/s of square matmuls in `dtype` that was measured on this machine; NaN if
    none can run.

    On a CPU it is that of one thread times the number of threads.
    """
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    return threads * measured_flops(device)[dtype] or math.nan


@functools.cache  # once in a process
def measured_flops(device: torch.device) -> dict[str, float]:
    """Return the best FLOP/s by dtype that was measured on this machine, on a CPU of one thread; 0
    if none can run.

    On a busy machine threads wait for each other up to ten times as long, in one dtype more than in
    the other, so with all threads a busy moment would decide which dtype is faster.
    """
    key = f"{device_name(device)}, torch {torch.__version__}, by dtype{torch_variables()}"
    known = read_peaks().get(key)
    if isinstance(known, dict) and known.get("float32"):
        return known
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    found = best_flops(device)
    torch.set_num_threads(threads)
    write_peaks(key, found)
    return found


def best_flops(device: torch.device) -> dict[str, float]:
    """Return the best FLOP/s by dtype over square matmuls, in which the dtypes take turns size by
    size; 0 if none could run.

    On CUDA "float32" runs in TF32, as in train.py. On a CPU the clock is the thread's own time on a
    core, so other programs hardly matter.
    """
    by_thread = device.type == "cpu" and sys.platform != "win32"  # whose clock is too coarse
    clock = time.thread_time if by_thread else time.perf_counter
    best = dict.fromkeys(DTYPES, 0.0)
    precision = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    for n in MATMUL_SIZES[device.type]:
        flops = 2 * n**3
        for name, dtype in DTYPES.items():
            if flops > LONGEST_MATMUL_S * (best[name] or math.inf):
                continue
            # Out of memory, or the device has no matmul in this dtype.
            with suppress(RuntimeError, TypeError):
                # No random numbers: measuring must not change a run's.
                x = torch.linspace(0, 1, n * n, device=device).view(n, n).to(dtype)
                out = x @ x  # to warm up; the timed ones write into this result
                for _ in range(REPEATS):
                    synchronize(device)
                    t0 = clock()
                    torch.mm(x, x, out=out)
                    synchronize(device)
                    best[name] = max(best[name], flops / max(clock() - t0, 1e-9))
    torch.set_float32_matmul_precision(precision)
    # The matrices are not the run's memory.
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    free_unused(device)
    return best
