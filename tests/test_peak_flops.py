from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import shell
from torch.utils.benchmark import Timer

from deskgpt.machine import hardware, peak_flops, remembered

CPU = torch.device("cpu")


# ---- answers -------------------------------------------------------------------------------------------------


def test_measured_peak_is_one_that_a_matmul_reaches():
    peak, source = peak_flops.peak_flops(CPU, "float32")
    assert source == "measured float32 matmul"
    a = torch.randn(1024, 1024)
    times = [Timer("a @ a", globals={"a": a}).timeit(1).median for _ in range(10)]
    assert peak > 0.5 * 2 * 1024**3 / min(times)
    assert peak < 50 * 2 * 1024**3 / min(times)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU with this name, these SMs, and these FLOP/s of matmuls."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def says(name: str, sms: int, measured: float) -> torch.device:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(peak_flops, "compute_units", lambda device: sms)
        monkeypatch.setattr(peak_flops, "measured_matmul_flops", lambda device, dtype: measured)
        return torch.device("cuda")

    return says


def test_known_gpu_has_the_published_peak_and_shows_what_matmuls_reach(gpu):
    h200 = gpu("NVIDIA H200", 132, 745e12)
    said = "NVIDIA data sheet, bfloat16; measured here 745 TFLOP/s (75%)"
    assert peak_flops.peak_flops(h200, "bfloat16") == (989e12, said)
    assert peak_flops.peak_flops(gpu("NVIDIA H200", 132, 1000e12), "bfloat16")[0] == 989e12
    assert peak_flops.peak_flops(gpu("NVIDIA H200", 132, math.nan), "bfloat16") == (
        989e12,
        "NVIDIA data sheet, bfloat16; not measured",
    )


def test_float32_is_tf32_on_nvidias_gpus_that_have_it(gpu):
    assert peak_flops.peak_flops(gpu("NVIDIA H200", 132, 400e12), "float32")[0] == 494.5e12
    assert peak_flops.peak_flops(gpu("Tesla T4", 40, 4e12), "float32")[0] == pytest.approx(8.14e12, rel=1e-3)
    instinct = gpu("AMD Instinct MI300X", 304, 100e12)  # ROCm's float32 is float32
    assert peak_flops.peak_flops(instinct, "float32")[0] == pytest.approx(163.4e12, rel=1e-3)


def test_peak_stays_the_published_one_where_a_faster_matmul_was_measured(gpu):
    flops, source = peak_flops.peak_flops(gpu("NVIDIA H200", 132, 1100e12), "bfloat16")
    assert flops == 989e12
    assert source.startswith("NVIDIA data sheet, bfloat16; measured here 1100 TFLOP/s (111%: its clock is above")
    assert "its row in gpu_peaks.py is wrong" in source


def test_gpu_that_is_not_in_the_table_is_measured(gpu):
    for name, sms in (("NVIDIA H200 MIG 1g.18gb", 16), ("NVIDIA H200", 16), ("Tesla T4", 40)):
        expected = (1.5e12, "measured bfloat16 matmul")
        assert peak_flops.peak_flops(gpu(name, sms, 1.5e12), "bfloat16") == expected


def test_fast_dtype_of_a_cpu_is_the_one_with_the_faster_matmuls(monkeypatch):
    for float32, bfloat16, expected in ((1e12, 2e12, "bfloat16"), (2e12, 1e12, "float32"), (1e12, math.nan, "float32")):
        flops = {"float32": float32, "bfloat16": bfloat16}
        monkeypatch.setattr(peak_flops, "measured_matmul_flops", lambda device, dtype, flops=flops: flops[dtype])
        assert peak_flops.fast_dtype(CPU) == expected


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


def test_measured_peak_is_kept_and_only_checked_again(sweeps):
    assert sweeps.peak(2e12) == 2e12
    assert sweeps.asked == ["full"]
    assert peak_flops.measured_matmul_flops(CPU, "float32") == 2e12  # measured in this process: no sweep
    assert sweeps.peak(1e12) == 2e12
    assert sweeps.asked == ["quick"]
    assert [p.name for p in remembered.path_of("peaks").parent.iterdir()] == ["peaks.json"]


def test_best_measured_peak_is_kept(sweeps):
    sweeps.peak(2e12)
    assert sweeps.peak(2.1e12, 3e12) == 3e12  # a better quick sweep leads to a full one
    assert sweeps.asked == ["quick", "full"]
    assert sweeps.peak(1e12) == 3e12
    assert sweeps.peak(3.1e12, 2.5e12) == 3e12
    assert sweeps.peak(math.nan) == 3e12
    assert peak_flops.keep_best(CPU, "bfloat16", 5e12) == 5e12
    assert sweeps.peak(1e12) == 3e12  # each dtype has its own


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", "null", '{"KEY": "fast"}', '{"KEY": -1.0}', '{"KEY": NaN}', "\xff"]
)
def test_damaged_file_of_peaks_counts_as_no_file(sweeps, content):
    path = remembered.path_of("peaks")
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


@pytest.mark.slow
def test_script_prints_what_this_machine_reaches(tmp_path):
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = shell("python", "-m", "deskgpt.machine", env=env)
    assert done.returncode == 0, done.stderr
    for dtype in hardware.DTYPES:
        line = rf"^{dtype}: published .*, measured now [\d.]+, best so far [\d.]+ TFLOP/s$"
        assert re.search(line, done.stdout, re.M)
    assert len(json.loads((tmp_path / "deskgpt" / "peaks.json").read_text())) == 3
