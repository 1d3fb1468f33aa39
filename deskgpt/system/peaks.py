"""A device's peak FLOP/s: the published figure of 40 GPUs, and what matmuls reach on this machine.

    find_card("NVIDIA H100 80GB HBM3").peak("bfloat16")     # (989e12, "NVIDIA data sheet, bfloat16")
    find_cards("8x A100 80GB")                              # (8, the card with 80 GB)
    peak_flops(torch.device("cuda"), "bfloat16")            # (989e12, "...; measured here 745 TFLOP/s (75%)")
    fast_dtype(torch.device("cpu"))                         # "bfloat16" if matmuls are clearly faster in it

MFU refers to the published figure if there is one, else to the measured one. The best measured figures are kept in
~/.cache/deskgpt/peaks.json, so only the first start on a machine measures, for about 0.3 s.

16-bit figures are with float32 accumulation and without sparsity: what a matmul in training can reach. NVIDIA's
headline figures for GeForce cards are two or four times as high: these cards, since 2018, accumulate in float32 at
half the rate, and sparsity doubles the figure. A card that is not here gets its measured peak. Laptop chips and MIG
slices are left out, since their clocks and sizes differ under one name.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from deskgpt.system import cache
from deskgpt.system.hardware import DTYPES, device_name, forget_peak, synchronize

# ---- the table -----------------------------------------------------------------------------------------------

TABLE = Path(__file__).with_name("cards.txt")
COLUMNS = ("float32", "tf32", "bfloat16", "float16")
MOST_CARDS = 1 << 20
MEMORY_SIZE = re.compile(r"\b(\d+) ?gb?\b")
# Names of makers and families, which drivers and people add or leave out. No two cards differ only in these.
MAKERS_AND_FAMILIES = re.compile(
    r"\b(nvidia|geforce|tesla|amd|radeon|instinct|graphics|generation|blackwell|workstation|edition)\b"
)


@dataclass(frozen=True)
class Card:
    """One row of the table."""

    names: tuple[str, ...]
    sms: int | None  # SMs or compute units; None if torch may count other units
    flops: dict[str, float]  # FLOP/s by dtype: "float32", "tf32", "bfloat16", "float16"
    source: str
    memory_gb: tuple[int, ...]  # each size that is sold, the smallest first

    @property
    def name(self) -> str:
        return self.names[0]

    def fast_dtype(self) -> str:
        """Return what train.py's dtype=auto takes on it: bfloat16, or float16 if the card emulates bfloat16."""
        return "bfloat16" if "bfloat16" in self.flops else "float16"

    def peak(self, dtype: str) -> tuple[float, str] | None:
        """Return (dense peak FLOP/s, its source) as train.py computes; None if the table has none.

        float32 is TF32 on a card that has it.
        """
        if dtype == "float32" and "tf32" in self.flops:
            return self.flops["tf32"], f"{self.source}, TF32"
        return (self.flops[dtype], f"{self.source}, {dtype}") if dtype in self.flops else None


def find_cards(text: str) -> tuple[int, Card]:
    """Return (number, card) of "8x H100" or, for one card, "H100". Raises ValueError as find_card."""
    found = re.fullmatch(r"(\d+) ?x +(.*)", text)
    number = int(found[1]) if found else 1
    if not 1 <= number <= MOST_CARDS:
        raise ValueError(f"{text!r}: the number of cards is from 1 to {MOST_CARDS:,}")
    return number, find_card(found[2] if found else text)


def find_card(name: str, sms: int | None = None) -> Card:
    """Return the card that `name` means: torch's name for a device, or what people call it.

    Its memory is the size that the name states, or else the smallest. sms, if known, tells apart cards that share a
    name: a card with another count is another card. Raises ValueError, with similar names, if the table does not have
    it.
    """
    keys = (name_key(name), name_key(MEMORY_SIZE.sub("", name.lower())))
    by_key = {name_key(its_name): card for card in reversed(table()) for its_name in card.names}
    card = by_key.get(keys[0]) or by_key.get(keys[1])
    if card is None or (sms is not None and card.sms not in (None, sms)):
        similar = difflib.get_close_matches(keys[0], by_key, n=5, cutoff=0.4)
        names = list(dict.fromkeys(by_key[key].name for key in similar))
        known = ", ".join(names or [each.name for each in table()])
        raise ValueError(f"{name!r} is not a known card; {'did you mean' if names else 'known are'} {known}")
    stated = MEMORY_SIZE.search(name.lower())
    gb = int(stated[1]) if stated else card.memory_gb[0]
    if gb not in card.memory_gb:
        listed = " or ".join(map(str, card.memory_gb))
        raise ValueError(f"{name!r}: {card.name} has {listed} GB; leave the size out, or name one of these")
    return replace(card, memory_gb=(gb,))


@functools.cache
def table() -> list[Card]:
    """Return the cards of TABLE, in its order."""
    cards = []
    source = ""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        if "|" not in line:
            source = line
            continue
        cells = [cell.strip() for cell in line.split("|")]
        names, sms, *tflops, gb = cells
        flops = {dtype: float(cell) * 1e12 for dtype, cell in zip(COLUMNS, tflops, strict=True) if cell != "-"}
        memory_gb = tuple(map(int, gb.split()))
        cards.append(Card(tuple(names.split("/")), None if sms == "-" else int(sms), flops, source, memory_gb))
    return cards


@functools.cache
def name_key(name: str) -> str:
    """Return the part of a name that identifies the card: lower case, without maker, family and punctuation."""
    words = MAKERS_AND_FAMILIES.sub("", re.sub(r"[^a-z0-9]+", " ", name.lower()))
    return re.sub(r"^(rtx|gtx|rx)", "", words.replace(" ", ""))


# ---- the peak of a device ------------------------------------------------------------------------------------


def peak_flops(device: torch.device, dtype: str) -> tuple[float, str]:
    """Return (dense peak FLOP/s of one device in `dtype`, its source), for matmuls as train.py runs them.

    It is the published peak if the table has the device, even if matmuls are faster, so that a device's MFU means the
    same in every run; otherwise the measured one; NaN if there is neither.
    """
    measured = measured_matmul_flops(device, dtype)
    published = published_flops(device, dtype)
    if published is None:
        threads = f" of one thread, times {torch.get_num_threads()}" if device.type == "cpu" else ""
        found = f"measured {dtype} matmul{threads}"
        return measured, found if measured > 0 else f"{dtype} matmul cannot be measured here"
    flops, source = published
    if math.isnan(measured):
        return flops, f"{source}; not measured"
    return flops, f"{source}; measured here {measured / 1e12:.4g} TFLOP/s ({measured / flops:.0%})"


def published_flops(device: torch.device, dtype: str) -> tuple[float, str] | None:
    """Return (dense peak FLOP/s, its source) from the table; None if it does not have this device and dtype."""
    if device.type != "cuda":
        return None
    sms = torch.cuda.get_device_properties(device).multi_processor_count  # tells apart GPUs that share a name
    try:
        return find_card(device_name(device), sms).peak(dtype)
    except ValueError:
        return None


def fast_dtype(device: torch.device) -> str:
    """Return the dtype that dtype=auto means: bfloat16 if the device multiplies it faster than float32.

    A GPU without bfloat16 takes float16, which needs a loss scale. A CPU is measured, since a processor may list
    bfloat16 and be slower in it (docs/decisions.md).
    """
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bfloat16"
        # Below 7.0 no tensor cores multiply float16.
        return "float16" if torch.cuda.get_device_capability(device) >= (7, 0) else "float32"
    if device.type == "cpu":
        flops = one_thread_flops()
        return "bfloat16" if flops["bfloat16"] > CLEARLY * flops["float32"] else "float32"
    return "float32"


# ---- measuring -----------------------------------------------------------------------------------------------

SIZES_ON_CPU = (128, 512, 1024)  # n of square matmuls
SIZES_ON_GPU = (512, 2048, 4096, 8192)
REPEATS = 5  # timed matmuls of one size, after one to warm up
LONGEST_MATMUL_S = 0.01  # sizes that would take longer are left out
HIGHEST = {"cpu": 1e13, "cuda": 1e17, "mps": 1e15}  # FLOP/s: a higher figure in the file is damage
CLEARLY = 1.2  # times as fast: measurements differ by a few percent


@functools.cache  # once in a process
def measured_matmul_flops(device: torch.device, dtype: str) -> float:
    """Return the best FLOP/s of square matmuls in `dtype` that was measured on this machine; NaN if none can run.

    On a CPU it is that of one thread times the number of threads.
    """
    if device.type == "cpu":
        return torch.get_num_threads() * one_thread_flops()[dtype] or math.nan
    known = known_flops(device)
    if not known.get(dtype):
        best = best_flops(device, [dtype], SIZES_ON_GPU, time.perf_counter)
        known = keep_flops(device, known | best)
    return known[dtype] or math.nan


@functools.cache
def one_thread_flops() -> dict[str, float]:
    """Return the best FLOP/s by dtype of one thread of the CPU.

    The dtypes take turns, and the clock is the thread's own time on a core, so other programs hardly matter. With all
    threads they do: on a busy machine threads wait for each other up to ten times as long, in one dtype more than in
    the other, so a busy moment would decide which is faster.
    """
    device = torch.device("cpu")
    known = known_flops(device)
    if known.keys() >= DTYPES.keys():
        return known
    is_fine = time.get_clock_info("thread_time").resolution < 1e-4  # not on Windows
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = best_flops(device, list(DTYPES), SIZES_ON_CPU, time.thread_time if is_fine else time.perf_counter)
    finally:
        torch.set_num_threads(threads)
    return keep_flops(device, found)


def best_flops(
    device: torch.device, dtypes: list[str], sizes: tuple[int, ...], clock: Callable[[], float]
) -> dict[str, float]:
    """Return the best FLOP/s by dtype over these sizes of square matmuls, which take turns; 0 if none could run.

    On CUDA "float32" runs in TF32, as in train.py.
    """
    best = dict.fromkeys(dtypes, 0.0)
    precision = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    draw = torch.Generator(device).manual_seed(0)  # measuring must not change a run's random numbers
    for n in sizes:
        flops = 2 * n**3
        matrices = {}
        for dtype in dtypes:
            if flops > LONGEST_MATMUL_S * (best[dtype] or math.inf):
                continue
            with suppress(RuntimeError):  # out of memory, or the device has no matmul in this dtype
                x = torch.rand(n, n, device=device, generator=draw).to(DTYPES[dtype])
                matrices[dtype] = (x, x @ x)  # to warm up; the timed ones write into this result
        for _ in range(REPEATS):
            for dtype, (x, out) in matrices.items():
                synchronize(device)
                t0 = clock()
                torch.mm(x, x, out=out)
                synchronize(device)
                best[dtype] = max(best[dtype], flops / max(clock() - t0, 1e-9))
    torch.set_float32_matmul_precision(precision)
    forget_peak(device)  # the matrices are not the run's memory
    return best


# ---- keeping -------------------------------------------------------------------------------------------------


def key_of(device: torch.device) -> str:
    """Return the key of a device's figures in peaks.json."""
    return f"{device_name(device)}, torch {torch.__version__}, by dtype"


def known_flops(device: torch.device) -> dict[str, float]:
    """Return the figures that were kept on this machine, by dtype, without those that no device reaches."""
    known = cache.read("peaks").get(key_of(device))
    if not isinstance(known, dict):
        return {}
    highest = HIGHEST[device.type]
    return {dtype: flops for dtype, flops in known.items() if isinstance(flops, float) and 0 <= flops < highest}


def keep_flops(device: torch.device, found: dict[str, float]) -> dict[str, float]:
    """Keep figures for later runs; return the best of these and of those that were kept before."""
    known = known_flops(device)
    best = {dtype: max(flops, known.get(dtype, 0.0)) for dtype, flops in found.items()}
    cache.keep("peaks", key_of(device), best)
    return best
