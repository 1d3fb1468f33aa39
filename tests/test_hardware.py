from __future__ import annotations

import json
import math
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, flags, shell
from torch.utils.benchmark import Timer

from deskgpt import compiling, gpu_peaks, hardware, peak_flops, remembered, runlog
from deskgpt.gpu_peaks import published_peak

CPU = torch.device("cpu")


def test_auto_takes_what_is_there():
    assert hardware.resolve_device("cpu") == CPU
    expected = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert hardware.resolve_device("auto").type == expected


def test_ranks_never_share_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert hardware.resolve_device("auto", 1, 2) == torch.device("cuda:1")
    with pytest.raises(ValueError, match="3 ranks need as many GPUs, this machine has 2; try --nproc_per_node=2"):
        hardware.resolve_device("auto", 1, 3)
    with pytest.raises(ValueError, match="cuda:1 is one GPU for 2 ranks; try --device=cuda"):
        hardware.resolve_device("cuda:1", 0, 2)


def test_fast_dtype_of_a_cpu_is_the_one_with_the_faster_matmuls(monkeypatch):
    for float32, bfloat16, expected in ((1e12, 2e12, "bfloat16"), (2e12, 1e12, "float32"), (1e12, math.nan, "float32")):
        flops = {"float32": float32, "bfloat16": bfloat16}
        monkeypatch.setattr(peak_flops, "measured_matmul_flops", lambda device, dtype, flops=flops: flops[dtype])
        assert peak_flops.fast_dtype(CPU) == expected


# Two headers of nvidia-smi: the words before the versions have changed with driver 610.
OLD_HEADER = "| NVIDIA-SMI 570.86.10    Driver Version: 570.86.10    CUDA Version: 12.8     |"
NEW_HEADER = "| NVIDIA-SMI 610.43.02    KMD Version: 610.43.02       CUDA UMD Version: 13.3 |"
ONE_GPU = "GPU 0: NVIDIA GeForce RTX 4070 (UUID: GPU-1b9e4b5c-0000-0000-0000-000000000000)"


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts a program on the PATH that answers like nvidia-smi, and torch on a build for `cuda` that sees no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def answers(header: str, gpus: str = ONE_GPU, cuda: str | None = None, status: int = 0) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] && echo '{gpus}' || echo '{header}'\nexit {status}\n")
        program.chmod(0o755)
        monkeypatch.setattr(torch.version, "cuda", cuda)

    return answers


@pytest.mark.skipif(os.name == "nt", reason="nvidia-smi is a shell script here")
def test_gpu_that_torch_does_not_see_is_named_with_the_remedy(nvidia_smi, monkeypatch):
    def said() -> str:
        reason = hardware.unseen_gpu()
        assert reason
        assert "\n" not in reason
        return reason

    nvidia_smi(OLD_HEADER)
    assert f"lists NVIDIA GeForce RTX 4070, but torch {torch.__version__} is a build without CUDA" in said()
    assert "driver 570.86.10 takes CUDA up to 12.8" in said()
    assert "install a build for CUDA 12 as pytorch.org says" in said()
    nvidia_smi(NEW_HEADER, f"{ONE_GPU}\n{ONE_GPU.replace('GPU 0', 'GPU 1')}")
    assert "2 GPUs (NVIDIA GeForce RTX 4070, ...)" in said()
    assert "driver 610.43.02 takes CUDA up to 13.3" in said()
    nvidia_smi(OLD_HEADER, cuda="13.0")
    assert "is built for CUDA 13.0, but driver 570.86.10 takes CUDA up to 12.8: update the driver" in said()
    nvidia_smi(OLD_HEADER, cuda="12.9")  # runs on it: something else is wrong, which torch may know

    def init() -> None:
        raise RuntimeError("CUDA unknown error -\nthis may be due to an incorrectly set up environment")

    monkeypatch.setattr(torch.cuda, "init", init)
    assert "does not see it (CUDA unknown error - this may be due" in said()
    nvidia_smi("no header at all")
    assert "a build without CUDA (the driver): " in said()
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert (
            said() == f"CUDA_VISIBLE_DEVICES={hidden!r} hides NVIDIA GeForce RTX 4070 from torch; unset it to use that"
        )
    nvidia_smi("NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.", "", status=9)
    assert "finds no NVIDIA driver at work: reboot" in said()


@pytest.mark.skipif(os.name == "nt", reason="nvidia-smi is a shell script here")
def test_without_a_gpu_nothing_is_said(nvidia_smi, tmp_path, monkeypatch):
    nvidia_smi(OLD_HEADER, "No devices were found", status=6)
    assert hardware.unseen_gpu() is None
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(hardware, "NVIDIA_SMI_TIMEOUT_S", 0.2)
    assert hardware.unseen_gpu() is None
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert hardware.unseen_gpu() is None


@pytest.mark.skipif(os.name == "nt", reason="nvidia-smi is a shell script here")
def test_scripts_say_that_torch_does_not_see_the_gpu(nvidia_smi, chars, tmp_path, script):
    nvidia_smi(OLD_HEADER)
    settings = flags(**(TINY | {"dataset": chars, "out_dir": tmp_path / "out", "device": "auto"}))
    done = script("train.py", *settings)
    assert done.code == 0
    assert re.search(r"^nvidia-smi lists .*; training on the CPU$", done.out, re.M)
    done = script("sample.py", f"--out_dir={tmp_path / 'out'}", "--num_samples=1", "--max_new_tokens=3")
    assert done.code == 0
    assert re.fullmatch(r"nvidia-smi lists .*; sampling on the CPU\n", done.err)
    done = script("train.py", *settings, "--device=cuda")
    assert done.code == 1
    assert re.fullmatch(r"error: device=cuda: nvidia-smi lists .* without CUDA .*; or try --device=auto\n", done.err)
    assert "nvidia-smi" not in script("train.py", *settings, "--device=cpu").out


@pytest.mark.parametrize(
    ("error", "platform", "remedy"),
    [
        ("Compiler: cl is not found.", "win32", "Build Tools for Visual Studio"),
        ("No working C++ compiler found in torch._inductor.config.cpp.cxx: (None, 'g++')", "darwin", "xcode-select"),
        (
            "RuntimeError: Failed to find C compiler. Please specify via CC environment variable",
            "linux",
            "apt install g",
        ),
        ("x.cpp:1:10: fatal error: Python.h: No such file or directory", "linux", "apt install python3-dev"),
        ("Cannot find a working triton installation. Either the package", "win32", "pip install triton-windows"),
        ("Cannot find a working triton installation. Either the package", "linux", "pip install triton"),
        ("something\n  else", "linux", "something else"),
    ],
)
def test_what_compiling_lacks_is_named_with_its_package(monkeypatch, error, platform, remedy):
    monkeypatch.setattr(hardware.sys, "platform", platform)
    assert remedy in compiling.why_not_compiled(RuntimeError(error))


@pytest.mark.slow
def test_missing_compiler_is_named_and_the_run_goes_on(chars, tmp_path):
    env = os.environ | {"CXX": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    settings = flags(**(TINY | {"dataset": chars, "out_dir": tmp_path / "out", "compile": True}))
    done = shell("python", "train.py", *settings, env=env)
    assert done.returncode == 0, done.stderr
    assert re.search(r"does not work here \(CXX='/nonexistent': there is no C\+\+ compiler: ", done.stdout)
    assert "step 6: train loss" in done.stdout


def test_measured_peak_is_one_that_a_matmul_reaches():
    peak, source = peak_flops.peak_flops(CPU, "float32")
    assert source == "measured float32 matmul"
    a = torch.randn(1024, 1024)
    times = [Timer("a @ a", globals={"a": a}).timeit(1).median for _ in range(10)]
    assert peak > 0.5 * 2 * 1024**3 / min(times)
    assert peak < 50 * 2 * 1024**3 / min(times)


# Totals that the makers print, in TFLOP/s: plain float32, TF32, 16 bits with float32 accumulation; None: not there.
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
    # AMD's and Apple's pages; an MI250X is two devices
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
        assert (found and found[0]) == (tflops and pytest.approx(tflops * 1e12, rel=0.01)), dtype


def test_peak_names_its_source():
    assert published_peak("NVIDIA H200", "bfloat16") == (989e12, "NVIDIA data sheet, bfloat16")
    assert published_peak("NVIDIA H200", "tf32") == (494.5e12, "NVIDIA data sheet, TF32")


def test_bfloat16_is_as_fast_as_float16_from_ampere_on_and_not_there_before():
    for card in [c for cards in gpu_peaks._cards().values() for c in cards if c.flops]:
        older = any(
            word in card.source for word in ("Turing", "GTX 16", "V100", "P100", "NVIDIA specifications", "Apple")
        )
        mi100 = card.sms == 120
        assert card.flops.get("bfloat16") == (None if older else card.flops["float16"] / (1 + mi100))


def test_names_that_are_near_are_other_cards():
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
def test_what_only_looks_like_a_card_is_none(name):
    assert [published_peak(name, d) for d in ("float32", "tf32", "bfloat16", "float16")] == [None] * 4


def test_loose_names_are_what_people_mean():
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


def test_cards_that_share_a_name_are_told_apart_by_their_sms():
    def tflops(name: str, sms: int | None = None) -> float | None:
        found = published_peak(name, "float16", sms)
        return found and round(found[0] / 1e12, 1)

    assert tflops("NVIDIA GeForce RTX 3080") == tflops("NVIDIA GeForce RTX 3080", 68) == 59.5
    assert tflops("NVIDIA GeForce RTX 3080", 70) == tflops("RTX 3080 12GB") == 61.3
    assert tflops("NVIDIA GeForce RTX 2060", 34) == 28.7
    assert tflops("NVIDIA GeForce RTX 3080", 48) is None
    assert tflops("NVIDIA A100-SXM4-80GB", 14) is None


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """Says what torch would of a GPU: its name, its SMs, and what matmuls reach on it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "hip", None)

    def says(name: str, sms: int, measured: float) -> torch.device:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(peak_flops, "compute_units", lambda device: sms)
        monkeypatch.setattr(peak_flops, "measured_matmul_flops", lambda device, dtype: measured)
        return torch.device("cuda")

    return says


def test_known_gpu_has_the_published_peak_and_what_matmuls_reach_beside_it(gpu):
    h200 = gpu("NVIDIA H200", 132, 745e12)
    said = "NVIDIA data sheet, bfloat16; measured here 745 TFLOP/s (75%)"
    assert peak_flops.peak_flops(h200, "bfloat16") == (989e12, said)
    assert peak_flops.peak_flops(gpu("NVIDIA H200", 132, 1000e12), "bfloat16")[0] == 989e12
    assert peak_flops.peak_flops(gpu("NVIDIA H200", 132, math.nan), "bfloat16") == (
        989e12,
        "NVIDIA data sheet, bfloat16; not measured",
    )


def test_float32_is_tf32_on_gpus_that_have_it(gpu, monkeypatch):
    assert peak_flops.peak_flops(gpu("NVIDIA H200", 132, 400e12), "float32")[0] == 494.5e12
    assert peak_flops.peak_flops(gpu("Tesla T4", 40, 4e12), "float32")[0] == pytest.approx(8.14e12, rel=1e-3)
    instinct = gpu("AMD Instinct MI300X", 304, 100e12)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert peak_flops.peak_flops(instinct, "float32")[0] == pytest.approx(163.4e12, rel=1e-3)


def test_measured_peak_above_the_published_one_is_taken_and_said(gpu):
    flops, source = peak_flops.peak_flops(gpu("NVIDIA H200", 132, 1100e12), "bfloat16")
    assert flops == 1100e12
    assert source.startswith("measured bfloat16 matmul, 111% of NVIDIA data sheet, bfloat16: ")
    assert "its row in gpu_peaks.py is wrong" in source


def test_gpu_that_is_not_in_the_table_is_measured(gpu):
    for name, sms in (("NVIDIA H200 MIG 1g.18gb", 16), ("NVIDIA H200", 16), ("Tesla T4", 40)):
        expected = (1.5e12, "measured bfloat16 matmul")
        assert peak_flops.peak_flops(gpu(name, sms, 1.5e12), "bfloat16") == expected


@pytest.fixture
def sweeps(monkeypatch, tmp_path):
    """Answers of the next sweeps in FLOP/s; what they were asked for is in `sweeps.asked`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    peak_flops.measured_matmul_flops.cache_clear()

    class Sweeps(list):
        asked: list[str] = []  # noqa: RUF012 (a new one for each class)

        def __call__(self, device: torch.device, dtype: str, sizes: Any) -> float:
            self.asked.append("quick" if sizes is peak_flops.QUICK_SIZES else "full")
            return self.pop(0)

        def peak(self, *answers: float) -> float:
            """The measured peak in a new process in which sweeps find these."""
            self[:], self.asked[:] = answers, []
            peak_flops.measured_matmul_flops.cache_clear()
            return peak_flops.measured_matmul_flops(CPU, "float32")

    fake = Sweeps()
    monkeypatch.setattr(peak_flops, "sweep_matmuls", fake)
    yield fake
    peak_flops.measured_matmul_flops.cache_clear()


def test_measured_peak_is_kept_and_only_looked_at_again(sweeps):
    assert sweeps.peak(2e12) == 2e12
    assert sweeps.asked == ["full"]
    assert peak_flops.measured_matmul_flops(CPU, "float32") == 2e12  # of this process: no sweep
    assert sweeps.peak(1e12) == 2e12
    assert sweeps.asked == ["quick"]
    assert [p.name for p in remembered.path_of("peaks").parent.iterdir()] == ["peaks.json"]


def test_best_measured_peak_is_kept(sweeps):
    sweeps.peak(2e12)
    assert sweeps.peak(2.1e12, 3e12) == 3e12  # a better look brings a whole sweep
    assert sweeps.asked == ["quick", "full"]
    assert sweeps.peak(1e12) == 3e12
    assert sweeps.peak(3.1e12, 2.5e12) == 3e12
    assert sweeps.peak(math.nan) == 3e12
    assert peak_flops.keep_best(CPU, "bfloat16", 5e12) == 5e12
    assert sweeps.peak(1e12) == 3e12  # of each dtype its own


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", "null", '{"KEY": "fast"}', '{"KEY": -1.0}', '{"KEY": NaN}', "\xff"]
)
def test_damaged_file_of_peaks_is_as_none(sweeps, content):
    path = remembered.path_of("peaks")
    path.parent.mkdir(parents=True)
    content = content.replace("KEY", peak_flops.peak_key(CPU, "float32"))
    path.write_bytes(content.encode("latin-1"))
    assert sweeps.peak(2e12) == 2e12
    assert sweeps.asked == ["full"]
    assert sweeps.peak(1e12) == 2e12  # and it is whole again


def test_peaks_that_cannot_be_kept_are_measured_each_time(sweeps, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert sweeps.peak(2e12) == 2e12
    assert sweeps.peak(1e12) == 1e12
    assert sweeps.asked == ["full"]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert sweeps.peak(2e12) == 2e12


def test_sweep_that_runs_out_of_memory_counts_what_ran(monkeypatch):
    def flops(device: torch.device, dtype: str, n: int) -> float:
        if n > 1024:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return n * 1e12

    monkeypatch.setattr(peak_flops, "matmul_flops", flops)
    assert peak_flops.sweep_matmuls(CPU, "float32", {"cpu": (512, 1024, 2048)}) == 1024e12
    assert math.isnan(peak_flops.sweep_matmuls(CPU, "float32", {"cpu": (2048,)}))
    monkeypatch.setattr(peak_flops, "measured_matmul_flops", lambda *_: math.nan)
    flop_s, source = peak_flops.peak_flops(CPU, "float32")
    assert math.isnan(flop_s)
    assert source == "float32 matmul cannot be measured here"


def test_slow_device_is_not_kept_busy_and_no_random_numbers_are_taken(monkeypatch):
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
def test_script_tells_what_this_machine_reaches(tmp_path):
    done = shell("python", "runlog.py", env=os.environ | {"XDG_CACHE_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    for dtype in hardware.DTYPES:
        assert re.search(
            rf"^{dtype}: published .*, measured now [\d.]+, best so far [\d.]+ TFLOP/s$", done.stdout, re.M
        )
    assert len(json.loads((tmp_path / "deskgpt" / "peaks.json").read_text())) == 3


def cpuinfo(name: str, flags: str) -> str:
    first = f"processor\t: 0\nmodel name\t: {name}\nflags\t\t: fpu sse2 {flags} arat\nbugs\t\t: spectre_v1\n"
    return first + "\nprocessor\t: 1\nmodel name\t: another\nflags\t\t: fpu amx_fp16\n"


ARM = "processor\t: 0\nFeatures\t: fp {}\nCPU implementer\t: 0x41\nCPU part\t: {}\n"
EMERALD_RAPIDS = "avx2 avx512f avx512_vnni avx512_bf16 avx512_fp16"
XEON = "Intel(R) Xeon(R) Processor"
PROCESSORS: list[tuple[str, str, list[str]]] = [
    (
        cpuinfo(XEON, f"{EMERALD_RAPIDS} amx_bf16 amx_tile amx_int8"),
        XEON,
        ["AMX-BF16", "AVX512-FP16", "AVX512-BF16", "AVX-512"],
    ),
    (cpuinfo(XEON, EMERALD_RAPIDS), XEON, ["AVX512-FP16", "AVX512-BF16", "AVX-512"]),
    (
        cpuinfo("AMD Ryzen 9 7950X", "avx avx2 avx512f avx512vl avx512_bf16"),
        "AMD Ryzen 9 7950X",
        ["AVX512-BF16", "AVX-512"],
    ),
    (cpuinfo("AMD Ryzen 7 5800H", "avx avx2 fma"), "AMD Ryzen 7 5800H", ["AVX2"]),
    (cpuinfo("Intel(R) Core(TM) i5-2400", "avx"), "Intel(R) Core(TM) i5-2400", []),
    (ARM.format("asimd i8mm bf16 sve svebf16", "0xd40"), "Arm 0x41:0xd40", ["SVE", "BF16"]),
    (ARM.format("asimd bf16", "0xd4d"), "Arm 0x41:0xd4d", ["BF16", "NEON"]),
    (
        "machdep.cpu.brand_string: Apple M2\nhw.optional.neon: 1\nhw.optional.arm.FEAT_BF16: 1\nhw.optional.avx2_0: 0",
        "Apple M2",
        ["BF16", "NEON"],
    ),
    ("hw.optional.neon: 0\nhw.optional.arm.FEAT_BF16: 0", "", []),
    ("", "", []),
]


@pytest.mark.parametrize(("text", "name", "sets"), PROCESSORS)
def test_processor_is_known_by_name_and_instruction_sets(text, name, sets):
    found, flags = hardware.parse_processor(text)
    assert (found, hardware.instruction_sets(flags)) == (name, sets)


@pytest.fixture
def xeon(monkeypatch):
    """A machine whose system tells of AMX and AVX-512: device_name's answer with what torch then says."""
    monkeypatch.setattr(hardware, "processor_text", lambda: PROCESSORS[0][0])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3}, raising=False)
    for name in ("ATEN_CPU_CAPABILITY", *hardware.LIMITS):
        monkeypatch.delenv(name, raising=False)

    def says(amx: bool, aten: str) -> str:
        for question in {q for questions in hardware.TORCH_ASKS.values() for q in questions}:
            monkeypatch.setattr(torch.cpu, question, lambda yes=amx or "amx" not in question: yes, raising=False)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: aten)
        hardware.processor.cache_clear()
        return hardware.device_name(CPU)

    yield says
    hardware.processor.cache_clear()


def test_name_of_a_cpu_is_what_torch_goes_by(xeon, monkeypatch):
    sets = "AVX512-FP16, AVX512-BF16, AVX-512"
    assert xeon(amx=True, aten="AVX512") == f"{XEON} (AMX-BF16, {sets}), 2 cores, 1 thread"
    assert xeon(amx=False, aten="AVX512") == f"{XEON} ({sets}), 2 cores, 1 thread"  # the kernel does not permit it
    assert xeon(amx=False, aten="AVX2") == f"{XEON} ({sets}; as AVX2, by torch), 2 cores, 1 thread"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "avx512_core")
    assert (
        xeon(amx=False, aten="AVX512") == f"{XEON} ({sets}; as AVX512_CORE, by ONEDNN_MAX_CPU_ISA), 2 cores, 1 thread"
    )


def test_processor_that_the_system_keeps_quiet_about_has_a_name_all_the_same(xeon, monkeypatch):
    monkeypatch.setattr(hardware, "processor_text", lambda: "")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "l2_cache_size": 1}, raising=False)
    assert xeon(amx=True, aten="AVX2").endswith(" (AVX2), 2 cores, 1 thread")
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    monkeypatch.setattr(hardware.platform, "processor", lambda: "")
    monkeypatch.setattr(hardware.platform, "machine", lambda: "")
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert xeon(amx=True, aten="DEFAULT") == "CPU, 1 thread"


def test_emulated_machine_has_another_name_and_another_peak():
    code = (
        "from deskgpt import hardware as h, peak_flops as p; d = h.resolve_device('cpu'); "
        "print(h.device_name(d), p.peak_key(d, 'float32'), sep='|')"
    )
    emulated = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    plain, other = (
        shell("python", "-c", code, env={**os.environ, **env}).stdout.strip().split("|") for env in ({}, emulated)
    )
    assert plain[0] == hardware.device_name(CPU)
    assert re.search(r"; as \w+, by ATEN_CPU_CAPABILITY; as AVX2, by ONEDNN_MAX_CPU_ISA\), ", other[0])
    assert other[1].startswith(f"{other[0]}, float32, torch ")
    assert plain[1] != other[1]


def test_compiler_is_named_by_itself_and_what_it_is_told(tmp_path, monkeypatch):
    from torch._inductor import config, cpp_builder

    path = tmp_path / "c++"
    path.write_text("#!/bin/sh\necho 'g++ (Debian 12.2.0-14) 12.2.0'; echo 'Copyright'")
    path.chmod(0o755)
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: str(path))
    with config.patch({"cpp.simdlen": None}):
        assert compiling.compiler_name(CPU) == "g++ (Debian 12.2.0-14) 12.2.0"
    with config.patch({"cpp.simdlen": 256}):
        assert compiling.compiler_name(CPU) == "g++ (Debian 12.2.0-14) 12.2.0, simdlen=256"
    for broken in ("#!/bin/sh\n", None):
        path.write_text(broken) if broken else path.unlink()
        assert compiling.compiler_name(CPU) is None

    def none() -> str:
        raise cpp_builder.exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    assert compiling.compiler_name(CPU) is None


def test_compiler_for_cuda_is_triton_under_any_of_its_names(monkeypatch):
    installed = {"triton-windows": "3.7.0"}

    def version(package: str) -> str:
        if package not in installed:
            raise compiling.metadata.PackageNotFoundError
        return installed[package]

    monkeypatch.setattr(compiling.metadata, "version", version)
    assert compiling.compiler_name(torch.device("cuda")) == "triton 3.7.0"
    installed.clear()
    assert compiling.compiler_name(torch.device("cuda")) is None
    assert compiling.compiler_name(torch.device("mps")) is None


def test_git_commit_marks_changes(tmp_path, monkeypatch):
    def git(*words: str) -> None:
        identity = ["-c", "user.name=x", "-c", "user.email=x@x"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    monkeypatch.setattr(runlog, "__file__", str(tmp_path / "runlog.py"))
    assert runlog.git_commit() is None
    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "x")
    commit = runlog.git_commit()
    assert commit
    assert len(commit) == 12
    (tmp_path / "a").write_text("2")
    assert runlog.git_commit() == commit + "+changes"


def test_memory_is_counted_in_bytes():
    peak = hardware.peak_memory_bytes(CPU)
    assert peak is None or 50e6 < peak < 1e12


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_autocast_runs_matmuls_in_the_dtype(name):
    a = torch.ones(2, 2)
    with hardware.autocast(CPU, name):
        assert (a @ a).dtype == hardware.DTYPES[name]


def test_freed_memory_is_kept_where_glibc_does_it():
    code = "from deskgpt.hardware import *; assert keep_freed_memory() == (platform.libc_ver()[0] == 'glibc')"
    assert shell("python", "-c", code).returncode == 0
