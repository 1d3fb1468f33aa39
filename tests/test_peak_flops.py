from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.benchmark import Timer

from deskgpt.system import cache, peak_flops

CPU = torch.device("cpu")


# ---- answers -------------------------------------------------------------------------------------------------


def test_measured_peak_is_one_that_a_matmul_reaches():
    peak, source = peak_flops.peak_flops(CPU, "float32")
    assert source == "measured float32 matmul"
    a = torch.randn(1024, 1024)
    times = [Timer("a @ a", globals={"a": a}).timeit(1).median for _ in range(10)]
    assert peak > 0.5 * 2 * 1024**3 / min(times)
    assert peak < 50 * 2 * 1024**3 / min(times)


@pytest.mark.parametrize(
    ("name", "sms", "dtype", "measured", "peak", "said"),
    [
        ("NVIDIA H200", 132, "bfloat16", 745e12, 989e12, ["NVIDIA data sheet, bfloat16", "745 TFLOP/s (75%)"]),
        ("NVIDIA H200", 132, "bfloat16", math.nan, 989e12, ["not measured"]),
        # The published peak stays where a faster matmul was measured.
        ("NVIDIA H200", 132, "bfloat16", 1100e12, 989e12, ["(111%", "gpu_peaks.py"]),
        # float32 is TF32 on NVIDIA's GPUs that have it. ROCm's float32 is float32.
        ("NVIDIA H200", 132, "float32", 400e12, 494.5e12, ["TF32"]),
        ("AMD Instinct MI300X", 304, "float32", 100e12, 163.4e12, ["float32"]),
        # What the table does not have is measured.
        ("NVIDIA H200", 16, "bfloat16", 1.5e12, 1.5e12, ["measured bfloat16 matmul"]),
        ("Tesla T4", 40, "bfloat16", 1.5e12, 1.5e12, ["measured bfloat16 matmul"]),
    ],
)
def test_gpu_has_its_published_peak_or_the_measured_one_and_says_which(
    name, sms, dtype, measured, peak, said, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    properties = SimpleNamespace(multi_processor_count=sms)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(peak_flops, "measured_matmul_flops", lambda device, dtype: measured)
    flops, source = peak_flops.peak_flops(torch.device("cuda"), dtype)
    assert flops == peak
    assert all(words in source for words in said), source


def test_fast_dtype_of_a_cpu_is_the_one_with_the_faster_matmuls(monkeypatch):
    for float32, bfloat16, expected in ((1e12, 2e12, "bfloat16"), (2e12, 1e12, "float32"), (1e12, math.nan, "float32")):
        flops = {"float32": float32, "bfloat16": bfloat16}
        monkeypatch.setattr(peak_flops, "measured_matmul_flops", lambda device, dtype, flops=flops: flops[dtype])
        assert peak_flops.fast_dtype(CPU) == expected


@pytest.mark.parametrize(
    ("capability", "dtype"), [((6, 1), "float32"), ((7, 0), "float16"), ((7, 5), "float16"), ((8, 9), "bfloat16")]
)
def test_float16_is_for_cards_with_tensor_cores_that_lack_bfloat16(capability, dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: capability >= (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert peak_flops.fast_dtype(torch.device("cuda")) == dtype


# ---- measuring and remembering -------------------------------------------------------------------------------


@pytest.fixture
def sweeps(monkeypatch, tmp_path):
    """Sweeps that find given FLOP/s; `sweeps.asked` holds whether each was quick or full."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    peak_flops.measured_matmul_flops.cache_clear()

    class Sweeps(list):
        asked: list[str] = []  # noqa: RUF012 (a new one for each class)

        def __call__(self, device: torch.device, dtype: str, sizes: Any) -> float:
            self.asked.append("quick" if sizes is peak_flops.QUICK_SIZES else "full")
            return self.pop(0)

        def peak(self, *answers: float) -> float:
            """The measured peak in a new process whose sweeps find these FLOP/s."""
            self[:] = answers
            self.asked.clear()
            peak_flops.measured_matmul_flops.cache_clear()
            return peak_flops.measured_matmul_flops(CPU, "float32")

    fake = Sweeps()
    monkeypatch.setattr(peak_flops, "sweep_matmuls", fake)
    yield fake
    peak_flops.measured_matmul_flops.cache_clear()


def test_best_measured_peak_is_kept_and_only_checked_again(sweeps):
    assert sweeps.peak(2e12) == 2e12
    assert sweeps.asked == ["full"]
    assert peak_flops.measured_matmul_flops(CPU, "float32") == 2e12  # measured in this process: no sweep
    assert sweeps.peak(1e12) == 2e12
    assert sweeps.asked == ["quick"]
    assert sweeps.peak(2.1e12, 3e12) == 3e12  # a better quick sweep leads to a full one
    assert sweeps.asked == ["quick", "full"]
    assert sweeps.peak(3.1e12, 2.5e12) == 3e12
    assert sweeps.peak(math.nan) == 3e12
    cache.keep("peaks", peak_flops.peak_key(CPU, "bfloat16"), 5e12)
    assert sweeps.peak(1e12) == 3e12  # each dtype has its own


@pytest.mark.parametrize("content", ["{", "[1]", '{"KEY": "fast"}', '{"KEY": NaN}', "\xff"])
def test_damaged_file_of_peaks_counts_as_no_file(sweeps, content):
    path = cache.path_of("peaks")
    path.parent.mkdir(parents=True)
    content = content.replace("KEY", peak_flops.peak_key(CPU, "float32"))
    path.write_bytes(content.encode("latin-1"))
    assert sweeps.peak(2e12) == 2e12
    assert sweeps.asked == ["full"]
    assert sweeps.peak(1e12) == 2e12  # the file is repaired


def test_peaks_that_cannot_be_kept_are_measured_each_time(sweeps, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert sweeps.peak(2e12) == 2e12
    assert sweeps.peak(1e12) == 1e12
    assert sweeps.asked == ["full"]
    monkeypatch.delenv("XDG_CACHE_HOME")

    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", no_home)
    assert sweeps.peak(2e12) == 2e12


def test_sweep_that_runs_out_of_memory_counts_the_matmuls_before(monkeypatch):
    def flops(device: torch.device, dtype: str, n: int) -> float:
        if n > 1024:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return n * 1e12

    monkeypatch.setattr(peak_flops, "matmul_flops", flops)
    assert peak_flops.sweep_matmuls(CPU, "float32", {"cpu": (512, 1024, 2048)}) == 1024e12
    assert math.isnan(peak_flops.sweep_matmuls(CPU, "float32", {"cpu": (2048,)}))
    monkeypatch.setattr(peak_flops, "measured_matmul_flops", lambda *_: math.nan)
    flops_per_s, source = peak_flops.peak_flops(CPU, "float32")
    assert math.isnan(flops_per_s)
    assert source == "float32 matmul cannot be measured here"


def test_sweep_skips_sizes_that_are_too_slow_and_takes_no_random_numbers(monkeypatch):
    sizes: list[int] = []

    def flops(device: torch.device, dtype: str, n: int) -> float:
        sizes.append(n)
        return 1e10

    monkeypatch.setattr(peak_flops, "matmul_flops", flops)
    assert peak_flops.sweep_matmuls(CPU, "float32", peak_flops.MATMUL_SIZES) == 1e10
    assert sizes == [512, 1024]
    monkeypatch.undo()
    before = torch.get_rng_state()
    peak_flops.sweep_matmuls(CPU, "float32", peak_flops.QUICK_SIZES)
    assert torch.equal(before, torch.get_rng_state())
