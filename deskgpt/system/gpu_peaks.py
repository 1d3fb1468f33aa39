"""Dense peak FLOP/s and memory of GPUs by name, as their makers publish them. Nothing is measured here.

    card_named("NVIDIA H100 80GB HBM3").peak("bfloat16")    # (989e12, "NVIDIA data sheet, bfloat16")
    card_named("4070 Ti").peak("float16")                   # names as people write them are found too
    find_card("A100 80GB").memory_gb                        # (80,)

16-bit figures are with float32 accumulation and without sparsity: what a matmul in training can reach. NVIDIA's
headline figures for GeForce cards are two or four times as high: these cards, since 2018, accumulate in float32 at
half the rate, and sparsity doubles the figure.

A card that is not here gets its measured peak. These are left out for a reason:
- Laptop chips: their makers choose power and clock. Those of the 20 series that are not Max-Q have the desktop cards'
  names and get their peak; only the measured matmul printed next to it shows the difference.
- MIG slices, and the export variants H20, H800 and A800.
- Cards with several clocks under one name, or whose sources disagree: RTX 3050, RTX 4000 Ada, RTX PRO 4500 and 5000.
- GB10, Jetson Orin and Apple's chips: no 16-bit figure without sparsity.
"""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass, replace

# ---- the table -----------------------------------------------------------------------------------------------

DTYPES = ("float32", "tf32", "bfloat16", "float16")

# Each card below the source of its figures:
# names | SMs or compute units | TFLOP/s in float32, TF32, bfloat16, float16 | GB of each size that is sold
#
# Where a maker's page names no total, it is SMs x boost clock x FLOPs per SM and clock, all from that source. A "-" in
# place of the SMs: torch may count other units. Of the TFLOP/s: not published, or the GPU emulates this dtype.
TABLE = """
NVIDIA Tesla P100 white paper
Tesla P100-PCIE                                  |  56 |   9.34 |      - |      - |  18.68 | 12 16

NVIDIA Tesla V100 white paper and data sheets
Tesla V100-SXM2/V100                             |  80 |   15.7 |      - |      - |    125 | 16 32
Tesla V100-PCIE                                  |  80 |     14 |      - |      - |    112 | 16 32
Tesla V100S-PCIE/V100S                           |  80 |   16.4 |      - |      - |    130 | 32

NVIDIA Turing white paper and specifications
# Reference clocks: Founders Editions have up to 6% more.
GeForce RTX 2080 Ti                              |  68 |   13.4 |      - |      - |   53.8 | 11
GeForce RTX 2080 SUPER                           |  48 |  11.15 |      - |      - |  44.61 | 8
GeForce RTX 2080                                 |  46 |   10.1 |      - |      - |   40.3 | 8
GeForce RTX 2070 SUPER                           |  40 |  9.062 |      - |      - |  36.25 | 8
GeForce RTX 2070                                 |  36 |    7.5 |      - |      - |   29.9 | 8
GeForce RTX 2060 SUPER                           |  34 |  7.181 |      - |      - |  28.72 | 8
GeForce RTX 2060                                 |  30 |  6.451 |      - |      - |   25.8 | 6
TITAN RTX                                        |  72 |   16.3 |      - |      - |  130.5 | 24
Quadro RTX 8000                                  |  72 |  16.31 |      - |      - |  130.5 | 48
Quadro RTX 6000                                  |  72 |   16.3 |      - |      - |  130.5 | 24
Tesla T4                                         |  40 |    8.1 |      - |      - |     65 | 16

NVIDIA A100 white paper, A30 data sheet
A100-SXM4/A100-PCIE/A100                         | 108 |   19.5 |    156 |    312 |    312 | 40 80
A30                                              |  56 |   10.3 |     82 |    165 |    165 | 24

NVIDIA GA102 white paper V2.0 and specifications
GeForce RTX 3090 Ti                              |  84 |     40 |     40 |  79.99 |  79.99 | 24
GeForce RTX 3090                                 |  82 |   35.6 |   35.6 |     71 |     71 | 24
GeForce RTX 3080 Ti                              |  80 |   34.1 |   34.1 |   68.2 |   68.2 | 12
GeForce RTX 3080                                 |  68 |   29.8 |   29.8 |   59.5 |   59.5 | 10
GeForce RTX 3080 12GB                            |  70 |  30.64 |  30.64 |  61.29 |  61.29 | 12
GeForce RTX 3070 Ti                              |  48 |  21.75 |  21.75 |   43.5 |   43.5 | 8
GeForce RTX 3070                                 |  46 |   20.3 |   20.3 |   40.6 |   40.6 | 8
GeForce RTX 3060 Ti                              |  38 |   16.2 |   16.2 |  32.39 |  32.39 | 8
GeForce RTX 3060                                 |  28 |  12.74 |  12.74 |  25.48 |  25.48 | 8 12

NVIDIA GA102 white paper V2.0 and data sheets
RTX A6000                                        |  84 |   38.7 |   77.4 |  154.8 |  154.8 | 48
RTX A5000                                        |  64 |   27.8 |   55.5 |  111.1 |  111.1 | 24
RTX A4500                                        |  56 |  23.65 |  47.31 |  94.62 |  94.62 | 20
RTX A4000                                        |  48 |   19.2 |   38.4 |   76.7 |   76.7 | 16
RTX A2000                                        |  26 |  7.987 |  15.97 |  31.95 |  31.95 | 6 12
A40                                              |  84 |   37.4 |   74.8 |  149.7 |  149.7 | 48
A10                                              |  72 |   31.2 |   62.5 |    125 |    125 | 24

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
# The L40 accumulates in float32 at half the rate of the L40S, as GeForce cards do.
L40                                              | 142 |   90.5 |   90.5 | 181.05 | 181.05 | 48

NVIDIA Ada data sheets
RTX 6000 Ada Generation                          | 142 |   91.1 |  182.1 |  364.2 |  364.2 | 48
RTX 5000 Ada Generation                          | 100 |  65.28 |  130.6 |  261.1 |  261.1 | 32
L4                                               |  58 |   30.3 |     60 |    121 |    121 | 24

NVIDIA RTX Blackwell white paper and specifications
GeForce RTX 5090                                 | 170 |  104.8 |  104.8 |  209.5 |  209.5 | 32
GeForce RTX 5080                                 |  84 |   56.3 |   56.3 |  112.6 |  112.6 | 16
GeForce RTX 5070 Ti                              |  70 |   43.9 |   43.9 |   87.9 |   87.9 | 16
GeForce RTX 5070                                 |  48 |   30.9 |   30.9 |   61.7 |   61.7 | 12
GeForce RTX 5060 Ti                              |  36 |   23.7 |   23.7 |  47.41 |  47.41 | 8 16
GeForce RTX 5060                                 |  30 |  19.18 |  19.18 |  38.35 |  38.35 | 8

NVIDIA RTX PRO Blackwell data sheets
RTX PRO 6000 Blackwell Workstation Edition       | 188 |    125 |  251.9 |  503.8 |  503.8 | 96

AMD Instinct data sheets
# torch sees the two dies of an MI250X as two devices; these are the figures of one die. ROCm's float32 is no TF32.
Instinct MI250X                                  | 110 |  47.85 |      - |  191.5 |  191.5 | 64
Instinct MI300X                                  | 304 |  163.4 |      - | 1307.4 | 1307.4 | 192
Instinct MI325X                                  | 304 |  163.4 |      - |   1307 |   1307 | 256

NVIDIA and AWS, A10G
A10G                                             |   - |     35 |     35 |     70 |     70 | 24

NVIDIA data sheet
L40S                                             | 142 |   91.6 |    183 |    362 |    362 | 48
H100 HBM3/H100 SXM5/H100 SXM/H100                | 132 |     67 |  494.5 |    989 |    989 | 80
H100 PCIe                                        | 114 |     51 |    378 |    756 |    756 | 80
H100 NVL                                         | 132 |     60 |  417.5 |    835 |    835 | 94
H200/H200 SXM                                    | 132 |     67 |  494.5 |    989 |    989 | 141
H200 NVL                                         | 132 |     60 |  417.5 |    835 |    835 | 141
# The 480 GB in this card's name are the CPU's.
GH200/GH200 HBM3/GH200 HBM3e                     | 132 |     67 |  494.5 |    989 |    989 | 96 144
# An eighth of the HGX.
B200                                             |   - |     75 |   1125 |   2250 |   2250 | 180
# A 72nd of the NVL72.
GB200                                            |   - |     80 |   1250 |   2500 |   2500 | 186

AMD Radeon specifications
Radeon RX 7900 XTX                               |   - |   61.4 |      - |  122.8 |  122.8 | 24
Radeon RX 7900 XT                                |   - |   51.6 |      - |    103 |    103 | 20
Radeon RX 9070 XT                                |   - |   48.7 |      - |    195 |    195 | 16
Radeon RX 9070                                   |   - |   36.1 |      - |    145 |    145 | 16
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
        """What train.py's dtype=auto takes on it: bfloat16 unless the card emulates it, then what tensor cores take."""
        if "bfloat16" in self.flops:
            return "bfloat16"
        has_tensor_cores = self.flops["float16"] > 3 * self.flops["float32"]  # others double float32 at most
        return "float16" if has_tensor_cores else "float32"

    def peak(self, dtype: str) -> tuple[float, str] | None:
        """(dense peak FLOP/s, its source) in a dtype of `flops`; None if it has none."""
        if dtype not in self.flops:
            return None
        shown = "TF32" if dtype == "tf32" else dtype
        return self.flops[dtype], f"{self.source}, {shown}"

    def peak_in_training(self, dtype: str) -> tuple[float, str] | None:
        """The same as train.py computes: float32 in TF32 where the card has it."""
        return self.peak("tf32" if dtype == "float32" and "tf32" in self.flops else dtype)


def card_named(name: str, sms: int | None = None) -> Card | None:
    """The card that `name` most likely means, torch's name for a device or what people call it; None if there is none.

    `sms`, if known, tells apart cards that share a name: a card with another count is another card.
    """
    for card in cards_named(name):
        if sms is None or card.sms is None or card.sms == sms:
            return card
    return None


def find_card(name: str) -> Card:
    """The card that `name` means, with the one size of memory that the name states, or else the smallest.

    Raises ValueError, with similar names, if the table does not have it.
    """
    cards = cards_named(name)
    if not cards:
        by_key = {name_key(its_name): card.name for card in table() for its_name in card.names}
        similar = difflib.get_close_matches(name_key(name), by_key, n=5, cutoff=0.4)
        names = list(dict.fromkeys(by_key[key] for key in similar))
        hint = f"did you mean {', '.join(names)}? " if names else ""
        raise ValueError(f"{name!r} is not a card of deskgpt/system/gpu_peaks.py; {hint}it lists them")
    stated = MEMORY_SIZE.search(name.lower())
    if stated is None:
        return replace(cards[0], memory_gb=cards[0].memory_gb[:1])
    gb = int(stated[1])
    for card in cards:
        if gb in card.memory_gb:
            return replace(card, memory_gb=(gb,))
    sizes = " or ".join(map(str, cards[0].memory_gb))
    raise ValueError(f"{name!r}: {cards[0].name} has {sizes} GB; leave the size out, or name one of these")


def cards_named(name: str) -> list[Card]:
    """The cards that `name` may mean, the likeliest first: with the size of its memory, then without."""
    found = []
    for key in (name_key(name), name_key_without_memory(name)):
        found += [card for card in table() if key in keys_of(card.names)]
    return found


@functools.cache
def keys_of(names: tuple[str, ...]) -> set[str]:
    """The keys by which a card of these names is found, with and without the size of its memory."""
    return {name_key(name) for name in names} | {name_key_without_memory(name) for name in names}


@functools.cache
def table() -> list[Card]:
    """The cards of TABLE, in its order."""
    cards = []
    source = ""
    for line in TABLE.splitlines():
        if not line or line.startswith("#"):
            continue
        if "|" not in line:
            source = line
            continue
        names, sms, *tflops, gb = (cell.strip() for cell in line.split("|"))
        flops = {dtype: float(cell) * 1e12 for dtype, cell in zip(DTYPES, tflops, strict=True) if cell != "-"}
        memory_gb = tuple(map(int, gb.split()))
        cards.append(Card(tuple(names.split("/")), None if sms == "-" else int(sms), flops, source, memory_gb))
    return cards


def name_key(name: str) -> str:
    """The part of a name that identifies the card: lower case, without maker, family, spaces and punctuation."""
    words = re.sub(r"[^a-z0-9]+", " ", name.lower())
    words = MAKERS_AND_FAMILIES.sub("", words)
    return re.sub(r"^(rtx|gtx|rx)", "", words.replace(" ", ""))


def name_key_without_memory(name: str) -> str:
    """The same, without the size of the memory."""
    words = re.sub(r"[^a-z0-9]+", " ", name.lower())
    return name_key(MEMORY_SIZE.sub("", words))
