from __future__ import annotations

import pytest

from deskgpt.machine import gpu_peaks
from deskgpt.machine.gpu_peaks import published_peak

# Totals that the makers publish, in TFLOP/s: float32, TF32, 16 bits with float32 accumulation. None: there is none.
PUBLISHED = {
    # Turing white paper, appendix A and B; T4 data sheet; V100 data sheet
    "NVIDIA GeForce RTX 2080 Ti": (13.4, None, 53.8),
    "NVIDIA GeForce RTX 2080": (10.1, None, 40.3),
    "GeForce RTX 2070": (7.5, None, 29.9),
    "TITAN RTX": (16.3, None, 130.5),
    "Quadro RTX 6000": (16.3, None, 130.5),
    "Quadro RTX 5000": (11.2, None, 89.2),
    "Tesla T4": (8.1, None, 65),
    "Tesla V100-SXM2-16GB": (15.7, None, 125),
    "Tesla V100-PCIE-32GB": (14, None, 112),
    "Tesla V100S-PCIE-32GB": (16.4, None, 130),
    "NVIDIA TITAN V": (14.9, None, 110),
    "Tesla P100-SXM2-16GB": (10.6, None, 21.2),
    "Tesla P40": (11.8, None, None),
    "NVIDIA GeForce GTX 1660 Ti": (5.4, None, 10.9),
    # A100 white paper; GA102 white paper, tables 2, 9 and 10; data sheets of A30, A10, A2, A40, RTX A4000 to A6000
    "NVIDIA A100-SXM4-80GB": (19.5, 156, 312),
    "NVIDIA A100 80GB PCIe": (19.5, 156, 312),
    "A100-PCIE-40GB": (19.5, 156, 312),
    "NVIDIA A30": (10.3, 82, 165),
    "NVIDIA GeForce RTX 3090": (35.6, 35.6, 71),
    "GeForce RTX 3080": (29.8, 29.8, 59.5),
    "NVIDIA GeForce RTX 3070": (20.3, 20.3, 40.6),
    "NVIDIA RTX A6000": (38.7, 77.4, 154.8),
    "NVIDIA RTX A5000": (27.8, 55.5, 111.1),
    "NVIDIA RTX A4000": (19.2, 38.4, 76.7),
    "NVIDIA A40": (37.4, 74.8, 149.7),
    "NVIDIA A10": (31.2, 62.5, 125),
    "NVIDIA A10G": (35, 35, 70),
    "NVIDIA A2": (4.5, 9, 18),
    # Ada white paper, appendix A; data sheets of L4, L40, L40S and RTX 6000 Ada
    "NVIDIA GeForce RTX 4090": (82.6, 82.6, 165.2),
    "NVIDIA GeForce RTX 4080": (48.7, 48.7, 97.5),
    "NVIDIA GeForce RTX 4070 Ti": (40.1, 40.1, 80.2),
    "NVIDIA GeForce RTX 4070": (29.1, 29.1, 58.3),
    "NVIDIA RTX 6000 Ada Generation": (91.1, 182.1, 364.2),
    "NVIDIA RTX 4000 SFF Ada Generation": (19.2, 38.4, 76.7),
    "NVIDIA L4": (30.3, 60, 121),
    "NVIDIA L40": (90.5, 90.5, 181.05),
    "NVIDIA L40S": (91.6, 183, 362.05),
    # Blackwell: RTX white paper, appendix A; RTX PRO 6000 and HGX B200 data sheets
    "NVIDIA GeForce RTX 5090": (104.8, 104.8, 209.5),
    "NVIDIA GeForce RTX 5080": (56.3, 56.3, 112.6),
    "NVIDIA GeForce RTX 5070 Ti": (43.9, 43.9, 87.9),
    "NVIDIA GeForce RTX 5070": (30.9, 30.9, 61.7),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": (125, 251.9, 503.8),
    "NVIDIA B200": (75, 1125, 2250),
    # Hopper data sheets
    "NVIDIA H100 80GB HBM3": (66.9, 494.7, 989.4),
    "NVIDIA H100 PCIe": (51.2, 378, 756),
    "NVIDIA H100 NVL": (60, 417.5, 835),
    "NVIDIA H200": (67, 494.5, 989),
    "NVIDIA GH200 480GB": (67, 494.5, 989),
    # AMD's and Apple's pages; an MI250X is two devices, of half its total
    "AMD Instinct MI300X": (163.4, 653.7, 1307.4),
    "AMD Instinct MI355X": (157.3, None, 2516.6),
    "AMD Instinct MI250X": (95.7 / 2, None, 383 / 2),
    "AMD Radeon RX 7900 XTX": (61.4, None, 122.8),
    "Apple M1 Max": (10.4, None, None),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_peaks_are_those_that_the_makers_publish(name):
    for dtype, tflops in zip(("float32", "tf32", "float16"), PUBLISHED[name], strict=True):
        found = published_peak(name, dtype)
        if tflops is None:
            assert found is None, dtype
        else:
            assert found, dtype
            assert found[0] == pytest.approx(tflops * 1e12, rel=0.01), dtype


# GB of memory that the makers' pages name, of cards with one size and with several.
MEMORY_GB = {
    "GeForce RTX 2080 Ti": (11,),
    "GeForce RTX 3060": (8, 12),
    "GeForce RTX 3080": (10,),
    "GeForce RTX 3080 12GB": (12,),
    "GeForce RTX 3090": (24,),
    "GeForce RTX 4060 Ti": (8, 16),
    "GeForce RTX 4070": (12,),
    "GeForce RTX 4090": (24,),
    "GeForce RTX 5090": (32,),
    "Tesla T4": (16,),
    "Tesla V100-SXM2": (16, 32),
    "A100": (40, 80),
    "A10G": (24,),
    "L4": (24,),
    "L40S": (48,),
    "RTX A6000": (48,),
    "H100 SXM": (80,),
    "H100 NVL": (94,),
    "H200": (141,),
    "B200": (180,),
    "Instinct MI300X": (192,),
    "Radeon RX 7900 XTX": (24,),
}


def test_memory_is_that_which_the_makers_publish():
    for name, sizes in MEMORY_GB.items():
        card = gpu_peaks.card_named(name)
        assert card, name
        assert card.memory_gb == sizes, name


def test_cards_without_memory_are_those_whose_memory_is_the_machines_or_not_agreed_on():
    without = {card.name for card in gpu_peaks.table() if not card.memory_gb}
    assert without == {"B300", "GB300"} | {card.name for card in gpu_peaks.table() if card.maker == "Apple"}
    for card in gpu_peaks.table():
        assert list(card.memory_gb) == sorted(set(card.memory_gb))
        assert all(4 <= gb <= 288 for gb in card.memory_gb)


@pytest.mark.parametrize(
    ("name", "card", "gb"),
    [
        ("RTX 4060 Ti", "GeForce RTX 4060 Ti", 8),
        ("rtx 4060 ti 16gb", "GeForce RTX 4060 Ti", 16),
        ("A100", "A100-SXM4", 40),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4", 80),
        ("V100 32 GB", "Tesla V100-SXM2", 32),
        ("RTX 3080", "GeForce RTX 3080", 10),
        ("RTX 3080 12GB", "GeForce RTX 3080 12GB", 12),
        ("RTX 3050", "GeForce RTX 3050", 8),
        ("RTX 3050 6GB", "GeForce RTX 3050 6GB", 6),
    ],
)
def test_name_with_a_size_chooses_it_and_one_without_takes_the_smallest(name, card, gb):
    found = gpu_peaks.find_card(name)
    assert (found.name, found.memory_gb) == (card, (gb,))


def test_peak_names_its_source():
    assert published_peak("NVIDIA H200", "bfloat16") == (989e12, "NVIDIA data sheet, bfloat16")
    assert published_peak("NVIDIA H200", "tf32") == (494.5e12, "NVIDIA data sheet, TF32")


def test_bfloat16_is_as_fast_as_float16_from_ampere_on_and_not_there_before():
    without_bfloat16 = ("Turing", "GTX 16", "V100", "P100", "NVIDIA specifications", "Apple")
    for cards in gpu_peaks.all_cards().values():
        for card in cards:
            if not card.flops:
                continue
            if any(words in card.source for words in without_bfloat16):
                assert "bfloat16" not in card.flops
            elif card.sms == 120:  # MI100, where it is half as fast
                assert card.flops["bfloat16"] == card.flops["float16"] / 2
            else:
                assert card.flops["bfloat16"] == card.flops["float16"]


def test_similar_names_are_different_cards():
    def tflops(name: str) -> float:
        found = published_peak(name, "float16")
        assert found, name
        return found[0] / 1e12

    assert len({tflops(f"NVIDIA {n}") for n in ("RTX A4000", "A40", "A10", "A100-SXM4-40GB", "RTX A400", "A2")}) == 6
    assert len({tflops(f"NVIDIA {n}") for n in ("L4", "L40", "L40S")}) == 3
    assert len({tflops(f"NVIDIA GeForce RTX 4070{n}") for n in ("", " Ti", " SUPER", " Ti SUPER")}) == 4
    assert len({tflops(f"NVIDIA H100 {n}") for n in ("PCIe", "NVL", "80GB HBM3")}) == 3
    assert tflops("NVIDIA GeForce RTX 4090 D") < tflops("NVIDIA GeForce RTX 4090")
    assert tflops("NVIDIA GeForce RTX 4060 Ti") == tflops("RTX 4060 Ti 16GB")
    assert tflops("Radeon RX 7900 XT") < tflops("AMD Radeon RX 7900 XTX")


def test_cards_that_share_a_name_are_told_apart_by_their_sms():
    def tflops(name: str, sms: int | None = None) -> float | None:
        found = published_peak(name, "float16", sms)
        return found and round(found[0] / 1e12, 1)

    assert tflops("NVIDIA GeForce RTX 3080") == tflops("NVIDIA GeForce RTX 3080", 68) == 59.5
    assert tflops("NVIDIA GeForce RTX 3080", 70) == tflops("RTX 3080 12GB") == 61.3
    assert tflops("NVIDIA GeForce RTX 2060", 34) == 28.7
    assert tflops("NVIDIA GeForce RTX 3080", 48) is None
    assert tflops("NVIDIA A100-SXM4-80GB", 14) is None


@pytest.mark.parametrize(
    "name",
    [
        "RTX 3050 6GB",
        "NVIDIA GeForce RTX 4070 Laptop GPU",
        "NVIDIA GeForce RTX 3080 Ti Laptop GPU",
        "NVIDIA RTX A2000 8GB Laptop GPU",
        "NVIDIA RTX 5000 Ada Generation Laptop GPU",
        "NVIDIA GeForce RTX 2080 with Max-Q Design",
        "Quadro RTX 5000 with Max-Q Design",
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA A10-24Q",
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA GeForce RTX 5090 D v2",
        "NVIDIA H20",
        "NVIDIA GB10",
        "Orin",
        "AMD Radeon Graphics",
        "Apple M4",
        "Intel(R) Xeon(R) Processor, 2 threads",
        "AMD Ryzen 7 5800H (AVX2), 16 cores, 8 threads",
        "RTX 6000",  # Quadro, Ada or PRO
        "RTX 4000",
        "RTX",
        "",
    ],
)
def test_name_that_only_looks_like_a_card_has_no_peak(name):
    assert [published_peak(name, d) for d in ("float32", "tf32", "bfloat16", "float16")] == [None] * 4


def test_names_as_people_write_them_are_found():
    for loose, name in {
        "rtx4070": "NVIDIA GeForce RTX 4070",
        "RTX 4070": "NVIDIA GeForce RTX 4070",
        "4090": "NVIDIA GeForce RTX 4090",
        "4070 ti super": "NVIDIA GeForce RTX 4070 Ti SUPER",
        "geforce-rtx-3060-12gb": "NVIDIA GeForce RTX 3060",
        "h100 sxm": "NVIDIA H100 80GB HBM3",
        "H100": "NVIDIA H100 80GB HBM3",
        "h100-pcie": "NVIDIA H100 PCIe",
        "a100 80GB": "NVIDIA A100-SXM4-80GB",
        "t4": "Tesla T4",
        "v100": "Tesla V100-SXM2-16GB",
        "a6000": "NVIDIA RTX A6000",
        "RTX 6000 Ada": "NVIDIA RTX 6000 Ada Generation",
        "rtx pro 6000": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        "mi300x": "AMD Instinct MI300X",
    }.items():
        found = published_peak(loose, "float16")
        assert found, loose
        assert found == published_peak(name, "float16"), loose
