"""A device's peak FLOP/s: the published figure of 40 GPUs, and what matmuls reach on this machine.

    find_card("NVIDIA H100 80GB HBM3").peak("bfloat16")     # (989e12, "NVIDIA data sheet, bfloat16")
    find_card("A100 80GB").memory_gb                        # (80,)
    peak_flops(torch.device("cuda"), "bfloat16")            # (989e12, "...; measured here 745 TFLOP/s (75%)")

MFU refers to the published figure where there is one, else to the measured one, and the measurements decide which dtype
is fast. The best measured peaks are kept in ~/.cache/deskgpt/peaks.json.

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
from dataclasses import dataclass, replace

import torch

from deskgpt.system import cache
from deskgpt.system.hardware import DTYPES, device_name, forget_peak, synchronize

# ---- the table -----------------------------------------------------------------------------------------------

COLUMNS = ("float32", "tf32", "bfloat16", "float16")

# Each card below the source of its figures:
# names | SMs or compute units | TFLOP/s in float32, TF32, bfloat16, float16 | GB of each size that is sold
#
# Where a maker's page names no total, it is SMs x boost clock x FLOPs per SM and clock, all from that source. "-" means
# that torch may count other units, or that a dtype is emulated or its figure not published.
TABLE = """
NVIDIA Tesla V100 white paper and data sheets
Tesla V100-SXM2/V100                             |  80 |   15.7 |      - |      - |    125 | 16 32
NVIDIA Turing white paper and specifications
GeForce RTX 2080 Ti                              |  68 |   13.4 |      - |      - |   53.8 | 11
GeForce RTX 2070                                 |  36 |    7.5 |      - |      - |   29.9 | 8
GeForce RTX 2060                                 |  30 |  6.451 |      - |      - |   25.8 | 6
Tesla T4                                         |  40 |    8.1 |      - |      - |     65 | 16
NVIDIA A100 white paper
A100-SXM4/A100-PCIE/A100                         | 108 |   19.5 |    156 |    312 |    312 | 40 80
NVIDIA GA102 white paper V2.0 and specifications
GeForce RTX 3090 Ti                              |  84 |     40 |     40 |  79.99 |  79.99 | 24
GeForce RTX 3090                                 |  82 |   35.6 |   35.6 |     71 |     71 | 24
GeForce RTX 3080 Ti                              |  80 |   34.1 |   34.1 |   68.2 |   68.2 | 12
GeForce RTX 3080                                 |  68 |   29.8 |   29.8 |   59.5 |   59.5 | 10
GeForce RTX 3070 Ti                              |  48 |  21.75 |  21.75 |   43.5 |   43.5 | 8
GeForce RTX 3070                                 |  46 |   20.3 |   20.3 |   40.6 |   40.6 | 8
GeForce RTX 3060 Ti                              |  38 |   16.2 |   16.2 |  32.39 |  32.39 | 8
GeForce RTX 3060                                 |  28 |  12.74 |  12.74 |  25.48 |  25.48 | 8 12
NVIDIA GA102 white paper V2.0 and data sheets
RTX A6000                                        |  84 |   38.7 |   77.4 |  154.8 |  154.8 | 48
NVIDIA Ada white paper V2.01 and specifications
GeForce RTX 4090                                 | 128 |   82.6 |   82.6 |  165.2 |  165.2 | 24
GeForce RTX 4080 SUPER                           |  80 |  52.22 |  52.22 |  104.4 |  104.4 | 16
GeForce RTX 4080                                 |  76 |   48.7 |   48.7 |   97.5 |   97.5 | 16
GeForce RTX 4070 Ti SUPER                        |  66 |   44.1 |   44.1 |   88.2 |   88.2 | 16
GeForce RTX 4070 Ti                              |  60 |   40.1 |   40.1 |   80.2 |   80.2 | 12
GeForce RTX 4070 SUPER                           |  56 |  35.48 |  35.48 |  70.96 |  70.96 | 12
GeForce RTX 4070                                 |  46 |   29.1 |   29.1 |   58.3 |   58.3 | 12
GeForce RTX 4060 Ti                              |  34 |  22.06 |  22.06 |  44.13 |  44.13 | 8 16
GeForce RTX 4060                                 |  24 |  15.11 |  15.11 |  30.23 |  30.23 | 8
NVIDIA Ada data sheets
RTX 6000 Ada Generation                          | 142 |   91.1 |  182.1 |  364.2 |  364.2 | 48
L4                                               |  58 |   30.3 |     60 |    121 |    121 | 24
NVIDIA RTX Blackwell white paper and specifications
GeForce RTX 5090                                 | 170 |  104.8 |  104.8 |  209.5 |  209.5 | 32
GeForce RTX 5080                                 |  84 |   56.3 |   56.3 |  112.6 |  112.6 | 16
GeForce RTX 5070 Ti                              |  70 |   43.9 |   43.9 |   87.9 |   87.9 | 16
GeForce RTX 5070                                 |  48 |   30.9 |   30.9 |   61.7 |   61.7 | 12
GeForce RTX 5060 Ti                              |  36 |   23.7 |   23.7 |  47.41 |  47.41 | 8 16
NVIDIA RTX PRO Blackwell data sheets
RTX PRO 6000 Blackwell Workstation Edition       | 188 |    125 |  251.9 |  503.8 |  503.8 | 96
AMD Instinct data sheets
Instinct MI300X                                  | 304 |  163.4 |      - | 1307.4 | 1307.4 | 192
NVIDIA and AWS, A10G
A10G                                             |   - |     35 |     35 |     70 |     70 | 24
NVIDIA data sheet
L40S                                             | 142 |   91.6 |    183 |    362 |    362 | 48
H100 HBM3/H100 SXM5/H100 SXM/H100                | 132 |     67 |  494.5 |    989 |    989 | 80
H100 PCIe                                        | 114 |     51 |    378 |    756 |    756 | 80
H200/H200 SXM                                    | 132 |     67 |  494.5 |    989 |    989 | 141
B200                                             |   - |     75 |   1125 |   2250 |   2250 | 180
AMD Radeon specifications
Radeon RX 7900 XTX                               |   - |   61.4 |      - |  122.8 |  122.8 | 24
"""

# ---- finding a card ------------------------------------------------------------------------------------------

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
        """What train.py's dtype=auto takes on it: bfloat16, or float16 on a card that emulates bfloat16."""
        return "bfloat16" if "bfloat16" in self.flops else "float16"

    def peak(self, dtype: str) -> tuple[float, str] | None:
        """(dense peak FLOP/s, its source) as train.py computes; None if the table has none.

        float32 is TF32 where the card has it.
        """
        if dtype == "float32" and "tf32" in self.flops:
            return self.flops["tf32"], f"{self.source}, TF32"
        return (self.flops[dtype], f"{self.source}, {dtype}") if dtype in self.flops else None


def find_card(name: str, sms: int | None = None) -> Card:
    """The card that `name` means: torch's name for a device, or what people call it.

    It has the one size of memory that the name states, or else the smallest. sms, if known, tells apart cards that
    share a name: a card with another count is another card. Raises ValueError, with similar names, if the table does
    not have it.
    """
    keys = (name_key(name), name_key(MEMORY_SIZE.sub("", name.lower())))
    by_key = {name_key(its_name): card for card in reversed(table()) for its_name in card.names}
    card = by_key.get(keys[0]) or by_key.get(keys[1])
    if card is None or (sms is not None and card.sms not in (None, sms)):
        similar = difflib.get_close_matches(keys[0], by_key, n=5, cutoff=0.4)
        names = list(dict.fromkeys(by_key[key].name for key in similar))
        hint = f"did you mean {', '.join(names)}? " if names else ""
        raise ValueError(f"{name!r} is not a card of deskgpt/system/peaks.py; {hint}it lists them")
    stated = MEMORY_SIZE.search(name.lower())
    gb = int(stated[1]) if stated else card.memory_gb[0]
    if gb not in card.memory_gb:
        listed = " or ".join(map(str, card.memory_gb))
        raise ValueError(f"{name!r}: {card.name} has {listed} GB; leave the size out, or name one of these")
    return replace(card, memory_gb=(gb,))


@functools.cache
def table() -> list[Card]:
    """The cards of TABLE, in its order."""
    cards = []
    source = ""
    for line in TABLE.strip().splitlines():
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
    """The part of a name that identifies the card: lower case, without maker, family, spaces and punctuation."""
    words = MAKERS_AND_FAMILIES.sub("", re.sub(r"[^a-z0-9]+", " ", name.lower()))
    return re.sub(r"^(rtx|gtx|rx)", "", words.replace(" ", ""))


# ---- the peak of a device ------------------------------------------------------------------------------------


def peak_flops(device: torch.device, dtype: str) -> tuple[float, str]:
    """(dense peak FLOP/s of one device in `dtype`, where the figure comes from), for matmuls as train.py runs them.

    The published peak if the table has the device, even where matmuls are faster, so that a device's MFU means the same
    in every run; otherwise the measured one; NaN if there is neither.
    """
    measured = measured_matmul_flops(device, dtype)
    published = published_flops(device, dtype)
    if published is None:
        return measured, f"measured {dtype} matmul" if measured > 0 else f"{dtype} matmul cannot be measured here"
    flops, source = published
    if math.isnan(measured):
        return flops, f"{source}; not measured"
    return flops, f"{source}; measured here {measured / 1e12:.4g} TFLOP/s ({measured / flops:.0%})"


def published_flops(device: torch.device, dtype: str) -> tuple[float, str] | None:
    """(dense peak FLOP/s, its source) from the table; None if it does not have this device and dtype."""
    if device.type != "cuda":
        return None
    sms = torch.cuda.get_device_properties(device).multi_processor_count  # tells apart GPUs that share a name
    try:
        return find_card(device_name(device), sms).peak(dtype)
    except ValueError:
        return None


def fast_dtype(device: torch.device) -> str:
    """The dtype with the fastest matmuls among those that train as well as float32; measured on a CPU."""
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bfloat16"
        # Below 7.0 no tensor cores multiply float16, which needs a loss scale too.
        return "float16" if torch.cuda.get_device_capability(device) >= (7, 0) else "float32"
    if device.type == "cpu":
        is_faster = measured_matmul_flops(device, "bfloat16") > measured_matmul_flops(device, "float32")
        return "bfloat16" if is_faster else "float32"
    return "float32"


def fastest_matmul(device: torch.device) -> float:
    """The best FLOP/s that square matmuls reach here in float32 or bfloat16; 0 if none can run."""
    measured = [measured_matmul_flops(device, dtype) for dtype in ("float32", "bfloat16")]
    return max([flops for flops in measured if flops > 0], default=0.0)  # not NaN


# ---- measuring -----------------------------------------------------------------------------------------------

# Sizes n of the square matmuls to time: all of them to find the peak, the last but one to check it.
MATMUL_SIZES_ON_CPU = (512, 1024, 2048)
MATMUL_SIZES_ON_GPU = (512, 2048, 4096, 8192)
REPEATS = 5  # timed matmuls of one size, after one to warm up
LONGEST_SIZE_S = 2.0  # a size that would take longer than this in all is left out


@functools.cache  # all runs of one process share the measurement
def measured_matmul_flops(device: torch.device, dtype: str) -> float:
    """The best FLOP/s of square matmuls in `dtype` ever measured on this machine; NaN if none can run.

    Only the first run measures all sizes. Later runs time one size, which is quick, and measure all of them again
    only if that one beats the remembered peak: machines are noisy, so the best figure is kept.
    """
    sizes = MATMUL_SIZES_ON_CPU if device.type == "cpu" else MATMUL_SIZES_ON_GPU
    key = f"{device_name(device)}, {dtype}, torch {torch.__version__}"
    known = cache.read("peaks").get(key)
    if not isinstance(known, float) or not 0 < known < math.inf:
        known = 0.0
    if known and best_matmul_flops(device, dtype, sizes[-2:-1], known) <= known:
        return known
    measured = best_matmul_flops(device, dtype, sizes)
    if measured > known:
        cache.keep("peaks", key, measured)
    return max(measured, known) or math.nan


def best_matmul_flops(device: torch.device, dtype: str, sizes: tuple[int, ...], known: float = 0.0) -> float:
    """The best FLOP/s over these sizes of square matmuls, measured now; 0 if none could run.

    On CUDA "float32" runs in TF32, as in train.py. Sizes that are too large for the memory, or too slow by what is
    known or measured before, are left out.
    """
    best = 0.0
    precision = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        for n in sizes:
            if (1 + REPEATS) * 2 * n**3 > LONGEST_SIZE_S * (max(best, known) or math.inf):
                break
            best = max(best, matmul_flops(device, dtype, n))
    except RuntimeError:  # out of memory, or the device has no matmul in this dtype: neither may end a run
        pass
    finally:
        torch.set_float32_matmul_precision(precision)
        forget_peak(device)  # the matrices are not the run's memory
    return best


def matmul_flops(device: torch.device, dtype: str, n: int) -> float:
    """The best FLOP/s of a few n x n matmuls, each of n^3 multiplications and as many additions."""
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
    return 2 * n**3 / best_s
