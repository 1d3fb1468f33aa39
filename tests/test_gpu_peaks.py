from __future__ import annotations

import math

import pytest

from deskgpt.system import gpu_peaks


def test_figures_of_a_card_agree_with_each_other():
    """A digit that is wrong in one of its four totals shows in their ratios, which are about powers of two."""
    for card in gpu_peaks.table():
        totals = list(card.flops.values())
        for total in totals:
            factor = math.log2(total / totals[0])
            assert abs(factor - round(factor)) < 0.21, card.name  # 0.2 for the H100 NVL, whose clocks differ by dtype
        assert card.flops.get("bfloat16", card.flops["float16"]) == card.flops["float16"], card.name
        if "tf32" in card.flops:
            assert card.flops["bfloat16"] / card.flops["tf32"] == pytest.approx(2, rel=0.03), card.name
        if card.sms:
            assert 0.15e12 < card.flops["float32"] / card.sms < 0.7e12, card.name
        assert list(card.memory_gb) == sorted(set(card.memory_gb))
        assert all(4 <= gb <= 288 for gb in card.memory_gb)


def test_peak_names_its_source():
    card = gpu_peaks.find_card("H200")
    assert card.peak("bfloat16") == (989e12, "NVIDIA data sheet, bfloat16")
    assert card.peak("tf32") == card.peak_in_training("float32") == (494.5e12, "NVIDIA data sheet, TF32")
    assert gpu_peaks.find_card("Tesla T4").peak("bfloat16") is None  # emulated


@pytest.mark.parametrize(
    ("name", "card", "gb"),
    [
        ("RTX 4060 Ti", "GeForce RTX 4060 Ti", 8),
        ("rtx 4060 ti 16gb", "GeForce RTX 4060 Ti", 16),
        ("a100 80GB", "A100-SXM4", 80),
        ("NVIDIA A100 80GB PCIe", "A100-SXM4", 80),
        ("V100 32 GB", "Tesla V100-SXM2", 32),
        ("RTX 3080", "GeForce RTX 3080", 10),
        ("RTX 3080 12GB", "GeForce RTX 3080 12GB", 12),
        ("NVIDIA GeForce RTX 4070", "GeForce RTX 4070", 12),
        ("4070 ti super", "GeForce RTX 4070 Ti SUPER", 16),
        ("geforce-rtx-3060-12gb", "GeForce RTX 3060", 12),
        ("NVIDIA H100 80GB HBM3", "H100 HBM3", 80),
        ("h100-pcie", "H100 PCIe", 80),
        ("t4", "Tesla T4", 16),
        ("RTX 6000 Ada", "RTX 6000 Ada Generation", 48),
        ("rtx pro 6000", "RTX PRO 6000 Blackwell Workstation Edition", 96),
        ("mi300x", "Instinct MI300X", 192),
    ],
)
def test_names_as_people_and_torch_write_them_are_found_with_the_size_that_they_state_or_the_smallest(name, card, gb):
    found = gpu_peaks.find_card(name)
    assert (found.name, found.memory_gb) == (card, (gb,))


def test_cards_that_share_a_name_are_told_apart_by_their_sms():
    def card(name: str, sms: int) -> str | None:
        found = gpu_peaks.card_named(name, sms)
        return None if found is None else found.name

    assert card("NVIDIA GeForce RTX 3080", 68) == "GeForce RTX 3080"
    assert card("NVIDIA GeForce RTX 3080", 70) == "GeForce RTX 3080 12GB"
    assert card("NVIDIA GeForce RTX 3080", 48) is None
    assert card("NVIDIA A10G", 72) == "A10G"  # whose SMs the table does not know


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4070 Laptop GPU",
        "NVIDIA GeForce RTX 2080 with Max-Q Design",
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA A10-24Q",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA H20",
        "AMD Radeon Graphics",
        "Apple M4",
        "AMD Ryzen 7 5800H (AVX2), 16 cores, 8 threads",
        "RTX 6000",  # Quadro, Ada or PRO
        "",
    ],
)
def test_name_that_only_looks_like_a_card_is_none(name):
    assert gpu_peaks.card_named(name) is None


def test_cards_without_bfloat16_train_in_float16_where_they_have_tensor_cores():
    found = {name: gpu_peaks.find_card(name).fast_dtype() for name in ("P100-PCIE", "V100", "T4", "RTX 4070")}
    assert found == {"P100-PCIE": "float32", "V100": "float16", "T4": "float16", "RTX 4070": "bfloat16"}
