"""Dense peak FLOP/s of GPUs by name, as their makers publish them. Nothing is measured here.

    published_peak("NVIDIA H100 80GB HBM3", "bfloat16")     # (989e12, "NVIDIA data sheet, bfloat16")
    published_peak("4070 Ti", "float16")                    # names as people write them are found too
    published_peak("h100 pcie", "tf32")

16-bit figures are with float32 accumulation and without sparsity: what a matmul in training can reach. NVIDIA's
headline figures for GeForce cards are two or four times as high: these cards, since 2018, accumulate in float32 at
half the rate, and sparsity doubles the figure. A peak is SMs x boost clock x FLOPs per SM and clock; the tests compare
it with the published totals.

These GPUs are left out, so their peak is measured:
- Laptop chips: their makers choose power and clock. Those of the 20 and 16 series that are not Max-Q have the desktop
  cards' names and get their peak; only the measured matmul printed next to it shows the difference.
- MIG slices, and the export variants H20, H800 and A800.
- GTX 1650 and RTX 3050 6GB: one name, several clocks.
- RTX 4000 Ada, RTX PRO 5000 and RTX PRO 4500: the sources disagree.
- GB10 and Jetson Orin: no 16-bit figure without sparsity, and several power modes.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

# ---- the table -----------------------------------------------------------------------------------------------

# Where the figures of a row come from. "specifications" means SMs and boost clock from the product's page, and FLOPs
# per SM and clock from the white paper. For cards in a white paper's tables, the tests hold its totals.
SOURCES = {
    "pascal": "NVIDIA Tesla P100 white paper, P40 data sheet",
    "volta": "NVIDIA Tesla V100 white paper and data sheets",
    "turing": "NVIDIA Turing white paper and specifications",  # reference clocks; Founders Editions have up to 6% more
    "tu116": "NVIDIA GTX 16 specifications",
    "ga100": "NVIDIA A100 white paper, A30 data sheet",
    "ga102": "NVIDIA GA102 white paper V2.0 and specifications",
    "ampere": "NVIDIA GA102 white paper V2.0 and data sheets",
    "ada": "NVIDIA Ada white paper V2.01 and specifications",
    "ada pro": "NVIDIA Ada data sheets",
    "blackwell": "NVIDIA RTX Blackwell white paper and specifications",
    "blackwell pro": "NVIDIA RTX PRO Blackwell data sheets",
    "data sheet": "NVIDIA data sheet",
    "titan": "NVIDIA specifications",
    "a10g": "NVIDIA and AWS, A10G",
    "cdna": "AMD Instinct data sheets",
    "rdna": "AMD Radeon specifications",
    "apple": "Apple newsroom",
}

# FLOPs per SM and clock; a multiply-add counts as two. A dtype that is not listed is emulated, or not published.
_GEFORCE = {"float32": 256, "tf32": 256, "bfloat16": 512, "float16": 512}  # GA10x, AD10x and GB20x
_PRO = {"float32": 256, "tf32": 512, "bfloat16": 1024, "float16": 1024}
_TURING_GEFORCE = {"float32": 128, "float16": 512}
_TURING_PRO = {"float32": 128, "float16": 1024}  # also Volta's
_GA100 = {"float32": 128, "tf32": 1024, "bfloat16": 2048, "float16": 2048}
_CDNA2 = {"float32": 256, "bfloat16": 1024, "float16": 1024}  # float32 on the matrix cores
_CDNA3 = {"float32": 256, "tf32": 1024, "bfloat16": 2048, "float16": 2048}
_CDNA4 = {"float32": 256, "bfloat16": 4096, "float16": 4096}
_TURING_16 = {"float32": 128, "float16": 256}  # no tensor cores

# (key of SOURCES, FLOPs per SM and clock, {names of one card, separated by "/": (SMs, boost clock in MHz)})
BY_CLOCK: list[tuple[str, dict[str, int], dict[str, tuple[int, int]]]] = [
    ("pascal", {"float32": 128, "float16": 256}, {"Tesla P100-SXM2": (56, 1480), "Tesla P100-PCIE": (56, 1303)}),
    ("pascal", {"float32": 256}, {"Tesla P40": (30, 1531)}),
    (
        "volta",
        _TURING_PRO,
        {
            "Tesla V100-SXM2/V100": (80, 1530),
            "Tesla V100-SXM3": (80, 1597),
            "Tesla V100-PCIE": (80, 1370),
            "Tesla V100S-PCIE/V100S": (80, 1597),
        },
    ),
    (
        "turing",
        _TURING_GEFORCE,
        {
            "GeForce RTX 2080 Ti": (68, 1545),
            "GeForce RTX 2080 SUPER": (48, 1815),
            "GeForce RTX 2080": (46, 1710),
            "GeForce RTX 2070 SUPER": (40, 1770),
            "GeForce RTX 2070": (36, 1620),
            "GeForce RTX 2060 SUPER": (34, 1650),
            "GeForce RTX 2060": (30, 1680),
            "GeForce RTX 2060 12GB": (34, 1650),
        },
    ),
    (
        "turing",
        _TURING_PRO,
        {
            "TITAN RTX": (72, 1770),
            "Quadro RTX 8000": (72, 1770),
            "Quadro RTX 6000": (72, 1770),
            "Quadro RTX 5000": (48, 1815),
            "Quadro RTX 4000": (36, 1545),
            "Tesla T4": (40, 1590),
        },
    ),
    (
        "tu116",
        _TURING_16,
        {
            "GeForce GTX 1660 Ti": (24, 1770),
            "GeForce GTX 1660 SUPER": (22, 1785),
            "GeForce GTX 1660": (22, 1785),
            "GeForce GTX 1650 SUPER": (20, 1725),
        },
    ),
    ("ga100", _GA100, {"A100-SXM4/A100-PCIE/A100": (108, 1410), "A30": (56, 1440)}),
    (
        "ga102",
        _GEFORCE,
        {
            "GeForce RTX 3090 Ti": (84, 1860),
            "GeForce RTX 3090": (82, 1695),
            "GeForce RTX 3080 Ti": (80, 1665),
            "GeForce RTX 3080": (68, 1710),
            "GeForce RTX 3080 12GB": (70, 1710),
            "GeForce RTX 3070 Ti": (48, 1770),
            "GeForce RTX 3070": (46, 1725),
            "GeForce RTX 3060 Ti": (38, 1665),
            "GeForce RTX 3060": (28, 1777),
            "GeForce RTX 3050": (20, 1777),
        },
    ),
    (
        "ampere",
        _PRO,
        {
            "RTX A6000": (84, 1800),
            "RTX A5500": (80, 1665),
            "RTX A5000": (64, 1695),
            "RTX A4500": (56, 1650),
            "RTX A4000": (48, 1560),
            "RTX A2000": (26, 1200),
            "RTX A1000": (18, 1462),
            "RTX A400": (6, 1762),
            "A40": (84, 1740),
            "A16": (10, 1755),  # one of the four GPUs on a board
            "A10": (72, 1695),
            "A2": (10, 1770),
        },
    ),
    (
        "ada",
        _GEFORCE,
        {
            "GeForce RTX 4090": (128, 2520),
            "GeForce RTX 4090 D": (114, 2520),
            "GeForce RTX 4080 SUPER": (80, 2550),
            "GeForce RTX 4080": (76, 2505),
            "GeForce RTX 4070 Ti SUPER": (66, 2610),
            "GeForce RTX 4070 Ti": (60, 2610),
            "GeForce RTX 4070 SUPER": (56, 2475),
            "GeForce RTX 4070": (46, 2475),
            "GeForce RTX 4060 Ti": (34, 2535),
            "GeForce RTX 4060": (24, 2460),
            "L40": (142, 2490),  # at GeForce's FLOPs per clock: its data sheet says 181
        },
    ),
    (
        "ada pro",
        _PRO,
        {
            "RTX 6000 Ada Generation": (142, 2505),
            "RTX 5880 Ada Generation": (110, 2460),
            "RTX 5000 Ada Generation": (100, 2550),
            "RTX 4500 Ada Generation": (60, 2580),
            "RTX 4000 SFF Ada Generation": (48, 1560),
            "RTX 2000 Ada Generation": (22, 2130),
            "L4": (58, 2040),
        },
    ),
    (
        "blackwell",
        _GEFORCE,
        {
            "GeForce RTX 5090": (170, 2407),
            "GeForce RTX 5080": (84, 2617),
            "GeForce RTX 5070 Ti": (70, 2452),
            "GeForce RTX 5070": (48, 2512),
            "GeForce RTX 5060 Ti": (36, 2572),
            "GeForce RTX 5060": (30, 2497),
            "GeForce RTX 5050": (20, 2572),
        },
    ),
    (
        "blackwell pro",
        _PRO,
        {
            "RTX PRO 6000 Blackwell Workstation Edition": (188, 2617),
            "RTX PRO 6000 Blackwell Max-Q Workstation Edition": (188, 2280),
            "RTX PRO 4000 Blackwell": (70, 2055),
            "RTX PRO 2000 Blackwell": (34, 1957),
        },
    ),
    ("cdna", {"float32": 256, "bfloat16": 512, "float16": 1024}, {"Instinct MI100": (120, 1502)}),
    # Figures of one die: torch sees the two dies of an MI250 or MI250X as two devices.
    ("cdna", _CDNA2, {"Instinct MI210": (104, 1700), "Instinct MI250": (104, 1700), "Instinct MI250X": (110, 1700)}),
    ("cdna", _CDNA3, {"Instinct MI300X": (304, 2100), "Instinct MI325X": (304, 2100)}),
    ("cdna", _CDNA4, {"Instinct MI350X": (256, 2200), "Instinct MI355X": (256, 2400)}),
]

# Totals, of cards whose clock differs by dtype or is not published:
# (key of SOURCES, {names of one card, separated by "/": (SMs, TFLOP/s in float32, TF32, bfloat16, float16)})
# SMs None: torch may count other units than the maker. TFLOP/s None: not published, or the GPU lacks it.
Totals = tuple[int | None, float | None, float | None, float | None, float | None]
BY_TOTAL: list[tuple[str, dict[str, Totals]]] = [
    ("titan", {"TITAN V": (80, 14.9, None, None, 110)}),
    ("a10g", {"A10G": (None, 35, 35, 70, 70)}),
    (
        "data sheet",
        {
            "L40S": (142, 91.6, 183, 362, 362),
            "H100 HBM3/H100 SXM5/H100 SXM/H100": (132, 67, 494.5, 989, 989),
            "H100 PCIe": (114, 51, 378, 756, 756),
            "H100 NVL": (132, 60, 417.5, 835, 835),
            "H200/H200 SXM": (132, 67, 494.5, 989, 989),
            "H200 NVL": (132, 60, 417.5, 835, 835),
            "GH200/GH200 HBM3/GH200 HBM3e": (132, 67, 494.5, 989, 989),
            "B200": (None, 75, 1125, 2250, 2250),  # an eighth of the HGX
            "B300/B300 SXM6 AC": (None, 75, 1125, 2250, 2250),
            "GB200": (None, 80, 1250, 2500, 2500),  # a 72nd of the NVL72
            "GB300": (None, None, 1250, 2500, 2500),
        },
    ),
    (
        "rdna",
        {
            "Radeon RX 7900 XTX": (None, 61.4, None, 122.8, 122.8),
            "Radeon RX 7900 XT": (None, 51.6, None, 103, 103),
            "Radeon RX 9070 XT": (None, 48.7, None, 195, 195),
            "Radeon RX 9070": (None, 36.1, None, 145, 145),
        },
    ),
    # Apple publishes figures up to the M2, for the GPU with the most cores, and none for 16 bits.
    (
        "apple",
        {
            "Apple M1": (8, 2.6, None, None, None),
            "Apple M1 Pro": (16, 5.2, None, None, None),
            "Apple M1 Max": (32, 10.4, None, None, None),
            "Apple M1 Ultra": (64, 21, None, None, None),
            "Apple M2": (10, 3.6, None, None, None),
            "Apple M2 Max": (38, 13.6, None, None, None),
            "Apple M2 Ultra": (76, 27.2, None, None, None),
        },
    ),
    # No figures, so it is measured. Without this row it would pass for the RTX 3050, another card.
    ("ampere", {"GeForce RTX 3050 6GB": (18, None, None, None, None)}),
]

# ---- finding a card ------------------------------------------------------------------------------------------

MEMORY_SIZE = re.compile(r"\b\d+ ?gb?\b")
# Names of makers and families, which drivers and people add or leave out. No two cards differ only in these.
MAKERS_AND_FAMILIES = re.compile(
    r"\b(nvidia|geforce|tesla|amd|radeon|instinct|apple|graphics|generation|blackwell|workstation|edition)\b"
)


@dataclass(frozen=True)
class Card:
    """One row of the table."""

    sms: int | None  # SMs, compute units or GPU cores; None if torch may count other units
    flops: dict[str, float]  # FLOP/s by dtype: "float32", "tf32", "bfloat16", "float16"
    source: str


def published_peak(name: str, dtype: str, sms: int | None = None) -> tuple[float, str] | None:
    """(dense peak FLOP/s, its source) of a device in `dtype`.

    `name` is torch's name for the device, or what people call it. `dtype` is "float32" (without TF32), "tf32",
    "bfloat16" or "float16". `sms`, if known, tells apart cards that share a name: a card with another count is another
    card. None if the table does not have this card and dtype.
    """
    for card in cards_named(name):
        if sms is not None and card.sms is not None and card.sms != sms:
            continue
        if dtype not in card.flops:
            return None
        shown = "TF32" if dtype == "tf32" else dtype
        return card.flops[dtype], f"{card.source}, {shown}"
    return None


def cards_named(name: str) -> list[Card]:
    """The cards that `name` may mean, the likeliest first: with the size of its memory, then without."""
    exact = all_cards().get(name_key(name), [])
    without_memory = all_cards().get(name_key_without_memory(name), [])
    return exact + without_memory


@functools.cache
def all_cards() -> dict[str, list[Card]]:
    """The cards of both tables, each under the keys of its names with and without the size of the memory."""
    cards: dict[str, list[Card]] = {}

    def add(names: str, card: Card) -> None:
        for name in names.split("/"):
            keys = {name_key(name), name_key_without_memory(name)}
            for key in keys:
                cards.setdefault(key, []).append(card)

    for source, flops_per_clock, by_clock in BY_CLOCK:
        for names, (sms, mhz) in by_clock.items():
            flops = {dtype: sms * mhz * 1e6 * n for dtype, n in flops_per_clock.items()}
            add(names, Card(sms, flops, SOURCES[source]))

    for source, by_total in BY_TOTAL:
        for names, (units, float32, tf32, bfloat16, float16) in by_total.items():
            tflops = {"float32": float32, "tf32": tf32, "bfloat16": bfloat16, "float16": float16}
            flops = {dtype: total * 1e12 for dtype, total in tflops.items() if total is not None}
            add(names, Card(units, flops, SOURCES[source]))
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
