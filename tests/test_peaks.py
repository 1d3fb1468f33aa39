"""Published peaks of cards, found by the names that people and torch use; and the measured ones."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from deskgpt.system import peaks

# ---- the table -----------------------------------------------------------------------------------------------


def test_figures_of_a_card_agree_with_each_other():
    """A digit that is wrong in one of its four totals shows in their ratios, which are about powers of two."""
    for card in peaks.table():
        totals = list(card.flops.values())
        for total in totals:
            factor = math.log2(total / totals[0])
            assert abs(factor - round(factor)) < 0.21, card.name
        assert card.flops.get("bfloat16", card.flops["float16"]) == card.flops["float16"], card.name
        if "tf32" in card.flops:
            assert card.flops["bfloat16"] / card.flops["tf32"] == pytest.approx(2, rel=0.03), card.name
        if card.sms:
            assert 0.15e12 < card.flops["float32"] / card.sms < 0.7e12, card.name
        assert list(card.memory_gb) == sorted(set(card.memory_gb))
        assert all(4 <= gb <= 288 for gb in card.memory_gb)


@pytest.mark.parametrize(
    ("name", "card", "gb"),
    [
        ("RTX 4060 Ti", "GeForce RTX 4060 Ti", 8),
        ("NVIDIA GeForce RTX 4070", "GeForce RTX 4070", 12),
        ("geforce-rtx-3060-12gb", "GeForce RTX 3060", 12),
        ("NVIDIA H100 80GB HBM3", "H100 HBM3", 80),
        ("rtx pro 6000", "RTX PRO 6000 Blackwell Workstation Edition", 96),
        ("mi300x", "Instinct MI300X", 192),
    ],
)
def test_names_as_people_and_torch_write_them_are_found_with_the_size_that_they_state_or_the_smallest(name, card, gb):
    found = peaks.find_card(name)
    assert (found.name, found.memory_gb) == (card, (gb,))


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4070 Laptop GPU",
        "NVIDIA H200 MIG 1g.18gb",
        "AMD Ryzen 7 5800H (AVX2), 16 cores, 8 threads",
        "RTX 6000",  # Quadro, Ada or PRO
        "",
    ],
)
def test_name_that_only_looks_like_a_card_is_none(name):
    with pytest.raises(ValueError, match="is not a card|leave the size out"):
        peaks.find_card(name)


def test_card_with_another_count_of_sms_is_another_card():
    assert peaks.find_card("NVIDIA GeForce RTX 3080", 68)
    assert peaks.find_card("NVIDIA A10G", 72)  # whose SMs the table does not know
    with pytest.raises(ValueError, match="is not a card"):
        peaks.find_card("NVIDIA GeForce RTX 3080", 70)  # that of 12 GB


# ---- a device's peak -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sms", "dtype", "measured", "peak", "printed"),
    [
        ("NVIDIA H200", 132, "bfloat16", 745e12, 989e12, ["NVIDIA data sheet, bfloat16", "745 TFLOP/s (75%)"]),
        # The published peak stays where a faster matmul was measured.
        ("NVIDIA H200", 132, "bfloat16", 1100e12, 989e12, ["(111%)"]),
        # float32 is TF32 on NVIDIA's GPUs that have it. ROCm's float32 is float32.
        ("NVIDIA H200", 132, "float32", 400e12, 494.5e12, ["TF32"]),
        ("AMD Instinct MI300X", 304, "float32", 100e12, 163.4e12, ["float32"]),
        # What the table does not have is measured.
        ("Tesla T4", 40, "bfloat16", 1.5e12, 1.5e12, ["measured bfloat16 matmul"]),
    ],
)
def test_gpu_has_its_published_peak_or_the_measured_one_and_says_which(
    name, sms, dtype, measured, peak, printed, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    properties = SimpleNamespace(multi_processor_count=sms)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(peaks, "measured_matmul_flops", lambda device, dtype: measured)
    flops, source = peaks.peak_flops(torch.device("cuda"), dtype)
    assert flops == peak
    assert all(words in source for words in printed), source
