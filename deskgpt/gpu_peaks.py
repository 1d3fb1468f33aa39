"""Dense peak FLOP/s of GPUs as their makers publish them, by name: facts and the matching of names, no measuring.

    published_peak("NVIDIA H100 80GB HBM3", "bfloat16")     # (989e12, "NVIDIA data sheet, bfloat16")
    published_peak("4070 Ti", "float16"), published_peak("h100 pcie", "tf32")    # as people call them

16-bit figures are those with float32 accumulation and without sparsity: what a matmul in training can reach. NVIDIA's
headline figures for GeForce are two or four times that: GeForce cards since 2018 add up in float32 at half the rate,
and sparsity doubles it. A peak is SMs x boost clock x what an SM does per clock; the tests hold the published totals.

Left out, and so measured: laptop chips (power and clock are their maker's choice; those of the 20 and 16 series call
themselves like the desktop's where they are not Max-Q, which only the matmul beside the figure shows), MIG slices,
export variants (H20, H800, A800), GTX 1650 and RTX 3050 6GB (several clocks under one name), RTX 4000 Ada and RTX PRO
5000 and 4500 (sources disagree), GB10 and Jetson Orin (no 16-bit figure without sparsity, several power modes).
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    sms: int  # SMs, or compute units, or GPU cores; 0 where torch may count otherwise
    flops: dict[str, float]  # FLOP/s by "float32", "tf32", "bfloat16" and "float16"; absent: not published, or emulated
    source: str


# Where a row's figures stand. "specifications": SMs and boost clock on the product's page; the rate per SM and clock is
# the white paper's. Of the cards in a white paper's tables, the tests hold the totals in it.
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

# What an SM does per clock, in FLOPs (two per multiply-add); bfloat16 where it is as fast as float16.
_GEFORCE = {"float32": 256, "tf32": 256, "bfloat16": 512, "float16": 512}  # GA10x, AD10x and GB20x alike
_PRO = {"float32": 256, "tf32": 512, "bfloat16": 1024, "float16": 1024}
_TURING_GEFORCE = {"float32": 128, "float16": 512}
_TURING_PRO = {"float32": 128, "float16": 1024}  # Volta's too
_GA100 = {"float32": 128, "tf32": 1024, "bfloat16": 2048, "float16": 2048}
_CDNA2 = {"float32": 256, "bfloat16": 1024, "float16": 1024}  # float32 by the matrix cores
_CDNA3 = {"float32": 256, "tf32": 1024, "bfloat16": 2048, "float16": 2048}
_CDNA4 = {"float32": 256, "bfloat16": 4096, "float16": 4096}
_TURING_16 = {"float32": 128, "float16": 256}  # no tensor cores

# source: FLOPs per SM and clock, {names, separated by "/": (SMs, boost clock in MHz)}
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
            "A16": (10, 1755),  # of each of the four GPUs on a board
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
            "L40": (142, 2490),  # at GeForce's rate: its data sheet says 181
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
    # Of one of the two dies, which are two devices to torch.
    ("cdna", _CDNA2, {"Instinct MI210": (104, 1700), "Instinct MI250": (104, 1700), "Instinct MI250X": (110, 1700)}),
    ("cdna", _CDNA3, {"Instinct MI300X": (304, 2100), "Instinct MI325X": (304, 2100)}),
    ("cdna", _CDNA4, {"Instinct MI350X": (256, 2200), "Instinct MI355X": (256, 2400)}),
]

# Published totals in TFLOP/s, where clocks differ by kind of arithmetic or are not given.
# source, names: SMs, float32, TF32, bfloat16, float16 (None: not published, or not there)
BY_TOTAL: list[tuple[str, dict[str, tuple[float | None, ...]]]] = [
    ("titan", {"TITAN V": (80, 14.9, None, None, 110)}),
    ("a10g", {"A10G": (0, 35, 35, 70, 70)}),
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
            "B200": (0, 75, 1125, 2250, 2250),  # an eighth of the HGX
            "B300/B300 SXM6 AC": (0, 75, 1125, 2250, 2250),
            "GB200": (0, 80, 1250, 2500, 2500),  # a 72nd of the NVL72
            "GB300": (0, None, 1250, 2500, 2500),
        },
    ),
    (
        "rdna",
        {
            "Radeon RX 7900 XTX": (0, 61.4, None, 122.8, 122.8),
            "Radeon RX 7900 XT": (0, 51.6, None, 103, 103),
            "Radeon RX 9070 XT": (0, 48.7, None, 195, 195),
            "Radeon RX 9070": (0, 36.1, None, 145, 145),
        },
    ),
    # Apple gives figures up to the M2, of the GPU with the most cores, and none for 16 bits.
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
    # Without figures, and so measured; the name without its memory is another card's.
    ("ampere", {"GeForce RTX 3050 6GB": (18, None, None, None, None)}),
]

MEMORY = re.compile(r"\b\d+ ?gb?\b")
# Makers and family names, which drivers and people add or leave out; no two cards differ in them alone.
NOISE = re.compile(
    r"\b(nvidia|geforce|tesla|amd|radeon|instinct|apple|graphics|generation|blackwell|workstation|edition)\b"
)


def published_peak(name: str, dtype: str, sms: int | None = None) -> tuple[float, str] | None:
    """(dense peak FLOP/s, its source) of a device in "float32" (plain), "tf32", "bfloat16" or "float16".

    `name` is torch's name of it or what people call it. `sms`, where it is known, tells apart cards that share a
    name; a card with another count is not the published one. None where no row is this device in this dtype.
    """
    for card in _cards().get(_key(name), []) + _cards().get(_key(name, memory=False), []):
        if sms is None or card.sms in (0, sms):
            said = f"{card.source}, {'TF32' if dtype == 'tf32' else dtype}"
            return (card.flops[dtype], said) if dtype in card.flops else None
    return None


def _key(name: str, memory: bool = True) -> str:
    """What is left of a name when makers, families, and with memory=False the size of the memory, are taken out."""
    words = re.sub(r"[^a-z0-9]+", " ", name.lower())
    words = NOISE.sub("", words if memory else MEMORY.sub("", words))
    return re.sub(r"^(rtx|gtx|rx)", "", words.replace(" ", ""))


@functools.cache
def _cards() -> dict[str, list[Card]]:
    """The cards by key, with and without the size of their memory."""
    cards: dict[str, list[Card]] = {}

    def add(names: str, card: Card) -> None:
        for name in names.split("/"):
            for key in dict.fromkeys((_key(name), _key(name, memory=False))):
                cards.setdefault(key, []).append(card)

    for source, per_clock, rows in BY_CLOCK:
        for names, (sms, mhz) in rows.items():
            add(names, Card(sms, {d: sms * mhz * 1e6 * n for d, n in per_clock.items()}, SOURCES[source]))
    for source, totals in BY_TOTAL:
        for names, (count, *tflops) in totals.items():
            of = dict(zip(("float32", "tf32", "bfloat16", "float16"), tflops, strict=True))
            add(names, Card(int(count or 0), {d: t * 1e12 for d, t in of.items() if t}, SOURCES[source]))
    return cards
