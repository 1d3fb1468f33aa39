"""Published peaks of cards, found by the names that people and torch use; and the measured ones."""

from __future__ import annotations

import math
import subprocess
import sys
import time

import pytest
import torch

from deskgpt.system import cache, peaks

CPU = torch.device("cpu")

# ---- the table -----------------------------------------------------------------------------------------------


def test_figures_of_a_card_agree_with_each_other():
    """A digit that is wrong in one of its four totals shows in their ratios, which are about powers of two."""
    for card in peaks.table().values():
        totals = list(card.flops.values())
        for total in totals:
            factor = math.log2(total / totals[0])
            assert abs(factor - round(factor)) < 0.21, card.name
        assert card.flops.get("bfloat16", card.flops["float16"]) == card.flops["float16"], card.name
        if "tf32" in card.flops:
            assert card.flops["bfloat16"] / card.flops["tf32"] == pytest.approx(2, rel=0.03), card.name
        assert 4 <= card.memory_gb <= 288


@pytest.mark.parametrize(
    ("name", "number", "card", "gb"),
    [
        ("NVIDIA GeForce RTX 4070", 1, "GeForce RTX 4070", 12),
        ("geforce-rtx-3060-12gb", 1, "GeForce RTX 3060", 12),
        ("NVIDIA H100 80GB HBM3", 1, "H100 HBM3", 80),
        ("rtx pro 6000", 1, "RTX PRO 6000 Blackwell Workstation Edition", 96),
        ("16 x A100 80GB", 16, "A100-SXM4", 80),
    ],
)
def test_names_as_people_and_torch_write_them_are_found_with_their_number_and_size(name, number, card, gb):
    found, of_name = peaks.find_cards(name)
    assert (found, of_name.name, of_name.memory_gb) == (number, card, gb)


def test_name_that_only_looks_like_a_card_is_none():
    laptop, slice_of_a_card, quadro = "NVIDIA GeForce RTX 4070 Laptop GPU", "NVIDIA H200 MIG 1g.18gb", "RTX 6000"
    for name in (laptop, slice_of_a_card, quadro, "AMD Ryzen 7 5800H (AVX2), 16 cores, 8 threads", "0x H100", ""):
        with pytest.raises(ValueError, match="is not a known card"):
            peaks.find_cards(name)


# ---- a device's peak -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "measured", "peak", "printed"),
    [
        # The published peak stays if a faster matmul was measured.
        ("NVIDIA H200", "bfloat16", 1100e12, 989e12, ["NVIDIA data sheet, bfloat16", "1100 TFLOP/s (111%)"]),
        # float32 is TF32 on NVIDIA's GPUs that have it. ROCm's float32 is float32.
        ("NVIDIA H200", "float32", 400e12, 494.5e12, ["TF32"]),
        ("AMD Instinct MI300X", "float32", 100e12, 163.4e12, ["float32"]),
        # What the table does not have is measured.
        ("Tesla T4", "bfloat16", 1.5e12, 1.5e12, ["measured bfloat16 matmul"]),
    ],
)
def test_gpu_has_its_published_peak_or_the_measured_one_and_says_which(
    name, dtype, measured, peak, printed, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(peaks, "measured_matmul_flops", lambda device, dtype: measured)
    flops, source = peaks.peak_flops(torch.device("cuda"), dtype)
    assert flops == peak
    assert all(words in source for words in printed), source


# ---- measuring -----------------------------------------------------------------------------------------------


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """Set up a machine that was never measured; return a function that forgets what this process has measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    peaks.measured_flops.cache_clear()
    yield peaks.measured_flops.cache_clear
    peaks.measured_flops.cache_clear()


def test_only_the_first_start_measures(empty_cache, monkeypatch):
    first = peaks.measured_matmul_flops(CPU, "float32")
    assert 1e8 < first < 1e15
    [(key, figures)] = cache.read("peaks").items()
    empty_cache()
    with monkeypatch.context() as patch:
        patch.setattr(peaks, "best_flops", lambda *_: pytest.fail("measured again"))
        assert peaks.measured_matmul_flops(CPU, "float32") == first
    cache.keep("peaks", key, figures | {"float32": "fast"})  # damage
    empty_cache()
    assert 1e8 < peaks.measured_matmul_flops(CPU, "float32") < 1e15


@pytest.mark.parametrize(("bfloat16", "dtype"), [(0.5, "float32"), (1.1, "float32"), (1.6, "bfloat16")])
def test_dtype_auto_is_bfloat16_only_if_it_is_clearly_faster(bfloat16, dtype, empty_cache, monkeypatch):
    found = {"float32": 1e10, "bfloat16": bfloat16 * 1e10, "float16": 1e9}
    monkeypatch.setattr(peaks, "best_flops", lambda device: found)
    assert peaks.fast_dtype(CPU) == dtype


@pytest.mark.slow
def test_busy_machine_chooses_the_dtype_of_an_idle_one(empty_cache, tmp_path, monkeypatch):
    """Another torch process uses all cores, whose threads wait for each other. The ratio is what decides."""
    idle = peaks.measured_flops(CPU)
    code = "import torch; a = torch.rand(512, 512)\nwhile True: a = a @ a; a = a / a.norm()"
    other = subprocess.Popen([sys.executable, "-c", code])
    try:
        time.sleep(4)
        for i in range(2):
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(i)))
            empty_cache()
            busy = peaks.measured_flops(CPU)
            ratios = [figures["bfloat16"] / figures["float32"] for figures in (idle, busy)]
            assert ratios[1] == pytest.approx(ratios[0], rel=0.3)
    finally:
        other.kill()
        other.wait()
