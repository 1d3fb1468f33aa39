from __future__ import annotations

import math

import pytest

from deskgpt.machine import gpu_peaks
from deskgpt.machine.gpu_peaks import published_peak


def test_totals_of_a_card_agree_with_each_other():
    """A digit that is wrong in one of its four totals shows in their ratios, which are about powers of two."""
    for card in gpu_peaks.table():
        assert set(card.flops) <= set(gpu_peaks.DTYPES)
        totals = list(card.flops.values())
        for total in totals:
            factor = math.log2(total / totals[0])
            assert abs(factor - round(factor)) < 0.21, card.name  # 0.2 for the H100 NVL, whose clocks differ by dtype
        if "tf32" in card.flops:
            assert card.flops["bfloat16"] / card.flops["tf32"] == pytest.approx(2, rel=0.03), card.name
        if card.sms and totals:
            assert 0.15e12 < card.flops["float32"] / card.sms < 0.7e12, card.name


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
    assert published_peak("Tesla T4", "bfloat16") is None  # emulated
    assert {card.maker for card in gpu_peaks.table()} == {"NVIDIA", "AMD", "Apple"}


def test_bfloat16_is_as_fast_as_float16_from_ampere_on_and_not_there_before():
    without_bfloat16 = ("Turing", "GTX 16", "V100", "P100", "NVIDIA specifications", "Apple")
    for card in gpu_peaks.table():
        if any(words in card.source for words in without_bfloat16):
            assert "bfloat16" not in card.flops, card.name
        elif card.name != "Instinct MI100" and card.flops:  # where it is half as fast
            assert card.flops["bfloat16"] == card.flops["float16"], card.name


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


@pytest.mark.parametrize(
    ("loose", "name"),
    [
        ("rtx4070", "GeForce RTX 4070"),
        ("NVIDIA GeForce RTX 4070", "GeForce RTX 4070"),
        ("4090", "GeForce RTX 4090"),
        ("4070 ti super", "GeForce RTX 4070 Ti SUPER"),
        ("geforce-rtx-3060-12gb", "GeForce RTX 3060"),
        ("NVIDIA H100 80GB HBM3", "H100 HBM3"),
        ("h100 sxm", "H100 HBM3"),
        ("h100-pcie", "H100 PCIe"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("a100 80GB", "A100-SXM4"),
        ("NVIDIA A100 80GB PCIe", "A100-SXM4"),
        ("t4", "Tesla T4"),
        ("v100", "Tesla V100-SXM2"),
        ("Tesla V100S-PCIE-32GB", "Tesla V100S-PCIE"),
        ("a6000", "RTX A6000"),
        ("RTX 6000 Ada", "RTX 6000 Ada Generation"),
        ("rtx pro 6000", "RTX PRO 6000 Blackwell Workstation Edition"),
        ("mi300x", "Instinct MI300X"),
    ],
)
def test_names_as_people_and_torch_write_them_are_found(loose, name):
    found = gpu_peaks.card_named(loose)
    assert found
    assert found.name == name
