"""Dense peak FLOP/s and memory of GPUs by name, as their makers publish them. Nothing is measured here.

    published_peak("NVIDIA H100 80GB HBM3", "bfloat16")     # (989e12, "NVIDIA data sheet, bfloat16")
    published_peak("4070 Ti", "float16")                    # names as people write them are found too
    published_peak("h100 pcie", "tf32")
    find_card("A100 80GB").memory_gb                        # (80,)

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

import difflib
import functools
import re
from dataclasses import dataclass, replace

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

# (key of SOURCES, FLOPs per SM and clock, {names of one card, separated by "/": (SMs, boost clock in MHz, GB ...)})
# GB: each size of memory that is sold under this name, the smallest first.
BY_CLOCK: list[tuple[str, dict[str, int], dict[str, tuple[int, int, *tuple[int, ...]]]]] = [
    (
        "pascal",
        {"float32": 128, "float16": 256},
        {"Tesla P100-SXM2": (56, 1480, 16), "Tesla P100-PCIE": (56, 1303, 12, 16)},
    ),
    ("pascal", {"float32": 256}, {"Tesla P40": (30, 1531, 24)}),
    (
        "volta",
        _TURING_PRO,
        {
            "Tesla V100-SXM2/V100": (80, 1530, 16, 32),
            "Tesla V100-SXM3": (80, 1597, 32),
            "Tesla V100-PCIE": (80, 1370, 16, 32),
            "Tesla V100S-PCIE/V100S": (80, 1597, 32),
        },
    ),
    (
        "turing",
        _TURING_GEFORCE,
        {
            "GeForce RTX 2080 Ti": (68, 1545, 11),
            "GeForce RTX 2080 SUPER": (48, 1815, 8),
            "GeForce RTX 2080": (46, 1710, 8),
            "GeForce RTX 2070 SUPER": (40, 1770, 8),
            "GeForce RTX 2070": (36, 1620, 8),
            "GeForce RTX 2060 SUPER": (34, 1650, 8),
            "GeForce RTX 2060": (30, 1680, 6),
            "GeForce RTX 2060 12GB": (34, 1650, 12),
        },
    ),
    (
        "turing",
        _TURING_PRO,
        {
            "TITAN RTX": (72, 1770, 24),
            "Quadro RTX 8000": (72, 1770, 48),
            "Quadro RTX 6000": (72, 1770, 24),
            "Quadro RTX 5000": (48, 1815, 16),
            "Quadro RTX 4000": (36, 1545, 8),
            "Tesla T4": (40, 1590, 16),
        },
    ),
    (
        "tu116",
        _TURING_16,
        {
            "GeForce GTX 1660 Ti": (24, 1770, 6),
            "GeForce GTX 1660 SUPER": (22, 1785, 6),
            "GeForce GTX 1660": (22, 1785, 6),
            "GeForce GTX 1650 SUPER": (20, 1725, 4),
        },
    ),
    ("ga100", _GA100, {"A100-SXM4/A100-PCIE/A100": (108, 1410, 40, 80), "A30": (56, 1440, 24)}),
    (
        "ga102",
        _GEFORCE,
        {
            "GeForce RTX 3090 Ti": (84, 1860, 24),
            "GeForce RTX 3090": (82, 1695, 24),
            "GeForce RTX 3080 Ti": (80, 1665, 12),
            "GeForce RTX 3080": (68, 1710, 10),
            "GeForce RTX 3080 12GB": (70, 1710, 12),
            "GeForce RTX 3070 Ti": (48, 1770, 8),
            "GeForce RTX 3070": (46, 1725, 8),
            "GeForce RTX 3060 Ti": (38, 1665, 8),
            "GeForce RTX 3060": (28, 1777, 8, 12),
            "GeForce RTX 3050": (20, 1777, 8),
        },
    ),
    (
        "ampere",
        _PRO,
        {
            "RTX A6000": (84, 1800, 48),
            "RTX A5500": (80, 1665, 24),
            "RTX A5000": (64, 1695, 24),
            "RTX A4500": (56, 1650, 20),
            "RTX A4000": (48, 1560, 16),
            "RTX A2000": (26, 1200, 6, 12),
            "RTX A1000": (18, 1462, 8),
            "RTX A400": (6, 1762, 4),
            "A40": (84, 1740, 48),
            "A16": (10, 1755, 16),  # one of the four GPUs on a board
            "A10": (72, 1695, 24),
            "A2": (10, 1770, 16),
        },
    ),
    (
        "ada",
        _GEFORCE,
        {
            "GeForce RTX 4090": (128, 2520, 24),
            "GeForce RTX 4090 D": (114, 2520, 24),
            "GeForce RTX 4080 SUPER": (80, 2550, 16),
            "GeForce RTX 4080": (76, 2505, 16),
            "GeForce RTX 4070 Ti SUPER": (66, 2610, 16),
            "GeForce RTX 4070 Ti": (60, 2610, 12),
            "GeForce RTX 4070 SUPER": (56, 2475, 12),
            "GeForce RTX 4070": (46, 2475, 12),
            "GeForce RTX 4060 Ti": (34, 2535, 8, 16),
            "GeForce RTX 4060": (24, 2460, 8),
            "L40": (142, 2490, 48),  # at GeForce's FLOPs per clock: its data sheet says 181
        },
    ),
    (
        "ada pro",
        _PRO,
        {
            "RTX 6000 Ada Generation": (142, 2505, 48),
            "RTX 5880 Ada Generation": (110, 2460, 48),
            "RTX 5000 Ada Generation": (100, 2550, 32),
            "RTX 4500 Ada Generation": (60, 2580, 24),
            "RTX 4000 SFF Ada Generation": (48, 1560, 20),
            "RTX 2000 Ada Generation": (22, 2130, 16),
            "L4": (58, 2040, 24),
        },
    ),
    (
        "blackwell",
        _GEFORCE,
        {
            "GeForce RTX 5090": (170, 2407, 32),
            "GeForce RTX 5080": (84, 2617, 16),
            "GeForce RTX 5070 Ti": (70, 2452, 16),
            "GeForce RTX 5070": (48, 2512, 12),
            "GeForce RTX 5060 Ti": (36, 2572, 8, 16),
            "GeForce RTX 5060": (30, 2497, 8),
            "GeForce RTX 5050": (20, 2572, 8),
        },
    ),
    (
        "blackwell pro",
        _PRO,
        {
            "RTX PRO 6000 Blackwell Workstation Edition": (188, 2617, 96),
            "RTX PRO 6000 Blackwell Max-Q Workstation Edition": (188, 2280, 96),
            "RTX PRO 4000 Blackwell": (70, 2055, 24),
            "RTX PRO 2000 Blackwell": (34, 1957, 16),
        },
    ),
    ("cdna", {"float32": 256, "bfloat16": 512, "float16": 1024}, {"Instinct MI100": (120, 1502, 32)}),
    # Figures of one die: torch sees the two dies of an MI250 or MI250X as two devices.
    (
        "cdna",
        _CDNA2,
        {"Instinct MI210": (104, 1700, 64), "Instinct MI250": (104, 1700, 64), "Instinct MI250X": (110, 1700, 64)},
    ),
    ("cdna", _CDNA3, {"Instinct MI300X": (304, 2100, 192), "Instinct MI325X": (304, 2100, 256)}),
    ("cdna", _CDNA4, {"Instinct MI350X": (256, 2200, 288), "Instinct MI355X": (256, 2400, 288)}),
]

# Totals, of cards whose clock differs by dtype or is not published:
# (key of SOURCES, {names of one card, separated by "/": (SMs, TFLOP/s in float32, TF32, bfloat16, float16, GB ...)})
# SMs None: torch may count other units than the maker. TFLOP/s None: not published, or the GPU lacks it. No GB: the
# memory is the machine's (Apple), or the sources disagree (B300 and GB300: 288, or an eighth of 2.1 TB).
Totals = tuple[int | None, float | None, float | None, float | None, float | None, *tuple[int, ...]]
BY_TOTAL: list[tuple[str, dict[str, Totals]]] = [
    ("titan", {"TITAN V": (80, 14.9, None, None, 110, 12)}),
    ("a10g", {"A10G": (None, 35, 35, 70, 70, 24)}),
    (
        "data sheet",
        {
            "L40S": (142, 91.6, 183, 362, 362, 48),
            "H100 HBM3/H100 SXM5/H100 SXM/H100": (132, 67, 494.5, 989, 989, 80),
            "H100 PCIe": (114, 51, 378, 756, 756, 80),
            "H100 NVL": (132, 60, 417.5, 835, 835, 94),
            "H200/H200 SXM": (132, 67, 494.5, 989, 989, 141),
            "H200 NVL": (132, 60, 417.5, 835, 835, 141),
            "GH200/GH200 HBM3/GH200 HBM3e": (132, 67, 494.5, 989, 989, 96, 144),  # 480 GB in its name are the CPU's
            "B200": (None, 75, 1125, 2250, 2250, 180),  # an eighth of the HGX
            "B300/B300 SXM6 AC": (None, 75, 1125, 2250, 2250),
            "GB200": (None, 80, 1250, 2500, 2500, 186),  # a 72nd of the NVL72
            "GB300": (None, None, 1250, 2500, 2500),
        },
    ),
    (
        "rdna",
        {
            "Radeon RX 7900 XTX": (None, 61.4, None, 122.8, 122.8, 24),
            "Radeon RX 7900 XT": (None, 51.6, None, 103, 103, 20),
            "Radeon RX 9070 XT": (None, 48.7, None, 195, 195, 16),
            "Radeon RX 9070": (None, 36.1, None, 145, 145, 16),
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
    ("ampere", {"GeForce RTX 3050 6GB": (18, None, None, None, None, 6)}),
]

# ---- finding a card ------------------------------------------------------------------------------------------

MEMORY_SIZE = re.compile(r"\b(\d+) ?gb?\b")
# Names of makers and families, which drivers and people add or leave out. No two cards differ only in these.
MAKERS_AND_FAMILIES = re.compile(
    r"\b(nvidia|geforce|tesla|amd|radeon|instinct|apple|graphics|generation|blackwell|workstation|edition)\b"
)


@dataclass(frozen=True)
class Card:
    """One row of the table."""

    names: tuple[str, ...]
    sms: int | None  # SMs, compute units or GPU cores; None if torch may count other units
    flops: dict[str, float]  # FLOP/s by dtype: "float32", "tf32", "bfloat16", "float16"
    source: str
    memory_gb: tuple[int, ...]  # each size that is sold, the smallest first; empty if the table has none

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def maker(self) -> str:
        """NVIDIA, AMD or Apple."""
        return self.source.split()[0]

    def fast_dtype(self) -> str:
        """What train.py's dtype=auto takes on it: bfloat16, unless the card emulates it."""
        if self.maker == "Apple":
            return "float32"
        return "float16" if self.flops and "bfloat16" not in self.flops else "bfloat16"

    def peak(self, dtype: str) -> tuple[float, str] | None:
        """(dense peak FLOP/s, its source) in a dtype of `flops`; None if it has none."""
        if dtype not in self.flops:
            return None
        shown = "TF32" if dtype == "tf32" else dtype
        return self.flops[dtype], f"{self.source}, {shown}"

    def peak_in_training(self, dtype: str) -> tuple[float, str] | None:
        """The same as train.py computes: float32 in TF32 where an NVIDIA card has it.

        ROCm's float32 matmuls stay float32 unless an environment variable says otherwise.
        """
        if dtype == "float32" and self.maker == "NVIDIA" and "tf32" in self.flops:
            return self.peak("tf32")
        return self.peak(dtype)


def published_peak(name: str, dtype: str, sms: int | None = None) -> tuple[float, str] | None:
    """(dense peak FLOP/s, its source) of a device in `dtype`.

    `dtype` is "float32" (without TF32), "tf32", "bfloat16" or "float16"; `name` and `sms` as for card_named. None if
    the table does not have this card and dtype.
    """
    card = card_named(name, sms)
    return None if card is None else card.peak(dtype)


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
        raise ValueError(f"{name!r} is not a card of deskgpt/machine/gpu_peaks.py; {hint}'all' lists them")
    stated = MEMORY_SIZE.search(name.lower())
    if stated is None or not cards[0].memory_gb:
        return replace(cards[0], memory_gb=cards[0].memory_gb[:1])
    gb = int(stated[1])
    for card in cards:
        if gb in card.memory_gb:
            return replace(card, memory_gb=(gb,))
    sizes = " or ".join(map(str, cards[0].memory_gb))
    raise ValueError(f"{name!r}: {cards[0].name} has {sizes} GB; leave the size out, or name one of these")


def cards_named(name: str) -> list[Card]:
    """The cards that `name` may mean, the likeliest first: with the size of its memory, then without."""
    exact = all_cards().get(name_key(name), [])
    without_memory = all_cards().get(name_key_without_memory(name), [])
    return exact + without_memory


@functools.cache
def all_cards() -> dict[str, list[Card]]:
    """The cards of both tables, each under the keys of its names with and without the size of the memory."""
    cards: dict[str, list[Card]] = {}
    for card in table():
        for name in card.names:
            keys = {name_key(name), name_key_without_memory(name)}
            for key in keys:
                cards.setdefault(key, []).append(card)
    return cards


@functools.cache
def table() -> list[Card]:
    """The cards of both tables, in their order."""
    cards = []
    for source, flops_per_clock, by_clock in BY_CLOCK:
        for names, (sms, mhz, *gb) in by_clock.items():
            flops = {dtype: sms * mhz * 1e6 * n for dtype, n in flops_per_clock.items()}
            cards.append(Card(tuple(names.split("/")), sms, flops, SOURCES[source], tuple(gb)))

    for source, by_total in BY_TOTAL:
        for names, (units, float32, tf32, bfloat16, float16, *gb) in by_total.items():
            tflops = {"float32": float32, "tf32": tf32, "bfloat16": bfloat16, "float16": float16}
            flops = {dtype: total * 1e12 for dtype, total in tflops.items() if total is not None}
            cards.append(Card(tuple(names.split("/")), units, flops, SOURCES[source], tuple(gb)))
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
