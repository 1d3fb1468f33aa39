"""Devices: their names, memory, published and measured peaks; and which build of torch serves a
card.

The NVIDIA driver's library is a stub.
"""

import itertools
import math
import os
import re
import shutil
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    CPU,
    CUDA,
    POSIX,
    TINY,
    assert_one_line,
    events,
    flags,
    raises_one_line,
    run_tiny,
    shell,
    slow,
)

from deskgpt import limits, peaks, wheels
from deskgpt.compiling import default_dtype
from deskgpt.device import (
    limit_threads,
    peak_memory_bytes,
    psutil,
    resolve_device,
    usable_memory_bytes,
)
from deskgpt.peaks import read_peaks, write_peaks
from deskgpt.wheels import Gpu


def test_ranks_never_share_a_gpu(monkeypatch):
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda n, device: ones(n))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto", 1, 2) == torch.device("cuda:1")
    for device, local_ranks, remedy in (
        ("auto", 3, "--nproc_per_node=2"),
        ("cuda:1", 2, "--device=cuda"),
    ):
        with raises_one_line(f"{local_ranks} ranks", remedy):
            resolve_device(device, 0, local_ranks)


# ---- which build of torch ------------------------------------------------------------------------


# Compute capability, the driver's CUDA, the build, and what its line names.
BUILDS = """
8.9 13.0 cu130 13.0
6.1 13.0 cu126 2.14     Pascal: torch 2.14 is the last with a build
8.9 12.2 cu126 12.6     a driver below 580
12.0 12.8 cpu 580       Blackwell needs one
6.1 11.4 cpu 525
"""


def test_build_of_torch_follows_from_the_card_and_its_driver():
    for row in BUILDS.strip().splitlines():
        capability, cuda, wheel, named = row.split()[:4]
        numbers = [tuple(map(int, version.split("."))) for version in (cuda, capability)]
        found, why = wheels.wheel_for(Gpu("a card", *numbers), "linux")  # type: ignore[arg-type]
        assert found == wheel
        assert_one_line(why, "a card", named)


# As the header of CUDA's driver declares them.
DRIVER = """
#include <string.h>
#include <unistd.h>
int cuInit(unsigned flags) { return STATUS; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strcpy(name, "Tesla T4"); return 0; }
int cuDeviceComputeCapability(int *major, int *minor, int device) { *minor = *major = 7; return 0; }
"""


# What cuInit returns, and what is found.
ANSWERS = [
    ("0", Gpu("Tesla T4", (13, 0), (7, 7))),
    ("100", None),  # no card
    ("803", "error 803"),  # an updated driver, and no restart
    ("sleep(60)", "no answer in 0.5 s"),
    ("*(int *)0", "crashes"),
]


@POSIX
@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
@pytest.mark.parametrize(("status", "found"), ANSWERS)
def test_card_is_the_one_that_the_drivers_library_names(status, found, tmp_path, monkeypatch):
    library = tmp_path / "libcuda.so"
    source = DRIVER.replace("STATUS", status)
    shell("cc", "-O0", "-shared", "-fPIC", "-xc", "-", "-o", library, input=source)
    monkeypatch.setattr(wheels, "LIBRARY", str(library))
    monkeypatch.setattr(wheels, "ANSWER_S", 0.5 if "sleep" in status else 60.0)
    gpu = wheels.nvidia_gpu()
    if isinstance(gpu, str):
        assert_one_line(wheels.remedy(gpu), found, "restart the machine")
        assert_one_line(wheels.wheel_for(gpu, "linux")[1], found, "delete .venv", "for the CPU")
    else:
        assert gpu == found


def test_remedy_is_the_build_to_install_and_without_a_card_the_one_for_the_cpu():
    assert wheels.remedy(ANSWERS[0][1]).startswith(f'"{sys.executable}" -m pip install ')
    assert_one_line(wheels.wheel_for(None, "linux")[1], "lists a card", "for the CPU")


@POSIX
@slow
def test_scripts_print_that_torch_does_not_see_the_gpu(chars, tmp_path, script, monkeypatch):
    gpu = Gpu("NVIDIA GeForce RTX 4070", (13, 0), (8, 9))
    monkeypatch.setattr(wheels, "nvidia_gpu", lambda: gpu)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    settings = flags(**TINY | {"dataset": chars, "out_dir": tmp_path, "device": "auto"})
    done = script("train.py", *settings)
    assert re.search(
        r"^torch .* cannot use NVIDIA GeForce RTX 4070.*; training on the CPU$", done.out, re.M
    )
    done = script("sample.py", f"--out_dir={tmp_path}", "--num_samples=1", "--max_new_tokens=3")
    assert done.code == 0
    assert_one_line(done.err, "RTX 4070", "sampling on the CPU")
    done = script("train.py", *settings, "--device=cuda")
    assert done.code == 1
    assert_one_line(done.err, "device=cuda", "RTX 4070", "--device=auto")


# /proc/self/cgroup, the files of control groups, and the memory and cores that they allow.
CONTAINERS = """
0::/a/b | a/memory.max=3000 a/b/memory.max=max a/cpu.max=250000,100000 | 3000 | 2
0::/not/seen/here | memory.max=2000 cpu.max=50000,100000 | 2000 | 1
4:memory:/a 3:cpu:/a 0::/ | memory/a/memory.limit_in_bytes=1000 | 1000 | 8
3:cpu:/ | cpu/cpu.cfs_quota_us=100000 cpu/cpu.cfs_period_us=100000 | 5000 | 1
3:cpuacct,cpu:/a | cpu/a/cpu.cfs_quota_us=100000 cpu/a/cpu.cfs_period_us=50000 | 5000 | 2
3:cpu:/ | cpu/cpu.cfs_quota_us=-1 cpu/cpu.cfs_period_us=100000 | 5000 | 8
0::/a | a/cpu.max=max,100000 cpu.max= memory.max=? | 5000 | 8
 | | 5000 | 8
"""


@pytest.mark.parametrize("row", CONTAINERS.strip("\n").splitlines())
def test_memory_and_threads_are_what_a_container_allows(row, tmp_path, monkeypatch):
    groups, files, usable, cores = row.split("|")
    for file in files.split():
        name, content = file.split("=")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content.replace(",", " "))
    (tmp_path / "own").write_text("\n".join(groups.split()))
    monkeypatch.setattr(limits, "CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(limits, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=5000))
    assert usable_memory_bytes(CPU) == int(usable)

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    threads = [8]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    limit_threads()
    assert threads[-1] == 8  # as OMP_NUM_THREADS says
    monkeypatch.delenv("OMP_NUM_THREADS")
    limit_threads()
    assert threads[-1] == int(cores)


@POSIX
def test_peak_memory_is_what_the_system_counts():
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    assert peak_memory_bytes(CPU) == pytest.approx(most, rel=0.01)


# ---- published and measured peaks ----------------------------------------------------------------


def test_figures_of_a_card_agree_with_each_other():
    """A digit that is wrong in one of its four totals shows in their ratios, which are about powers
    of two.
    """
    for card in peaks.card_table().values():
        totals = list(card.flops.values())
        for total in totals:
            factor = math.log2(total / totals[0])
            assert abs(factor - round(factor)) < 0.21, card.name
        in_16_bits = card.flops["float16"]
        assert card.flops.get("bfloat16", in_16_bits) == in_16_bits, card.name
        assert in_16_bits / card.flops.get("tf32", in_16_bits / 2) == pytest.approx(2, rel=0.03)


# A name as people and torch write it; number, card and GB that are found.
NAMES = """
NVIDIA GeForce RTX 4070: 1 GeForce RTX 4070 12
geforce-rtx-3060-12gb: 1 GeForce RTX 3060 12
NVIDIA H100 80GB HBM3: 1 H100 HBM3 80
rtx pro 6000: 1 RTX PRO 6000 Blackwell Workstation Edition 96
NVIDIA H100 NVL: 1 H100 NVL 94
16 x A100 80GB: 16 A100-SXM4 80
8xH100: 8 H100 HBM3 80
4x4090: 4 GeForce RTX 4090 24
2*RTX 4090: 2 GeForce RTX 4090 24
A100: 1 A100-SXM4 40
"""


def test_names_are_found_with_their_number_and_size():
    for row in NAMES.strip().splitlines():
        name, found = row.split(": ")
        number, card, gb = peaks.find_cards(name)
        assert f"{number} {card.name} {gb}" == found


NO_CARDS = "RTX 4070 Laptop GPU,NVIDIA H200 MIG 1g.18gb,RTX 6000,0x H100,DGX Spark,H20,A30,"


def test_name_that_only_looks_like_a_card_is_none():
    for name in NO_CARDS.split(","):
        with raises_one_line("is not a known card", "did you mean"):
            peaks.find_cards(name)


# A card, a dtype, the FLOP/s of a matmul and of the peak, and what is printed of its source.
PEAKS = """
NVIDIA H200|bfloat16|1100e12|989e12|NVIDIA data sheet, bfloat16; measured here 1100 TFLOP/s (111%)
NVIDIA H200|float32|400e12|494.5e12|TF32
AMD Instinct MI300X|float32|100e12|163.4e12|float32
Tesla T4|bfloat16|1.5e12|1.5e12|measured bfloat16 matmul
"""


def test_gpu_has_its_published_peak_or_the_measured_one(monkeypatch):
    """The published one stays if a faster matmul was measured. ROCm's float32 is float32."""
    for row in PEAKS.strip().splitlines():
        name, dtype, measured, peak, printed = row.split("|")
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        found = float(measured)
        monkeypatch.setattr(peaks, "measured_matmul_flops", lambda *_, found=found: found)
        flops, source = peaks.peak_flops(CUDA, dtype)
        assert flops == float(peak)
        assert printed in source


def test_variables_that_change_how_torch_computes_are_printed_and_logged(
    chars, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    run_tiny(chars, tmp_path, compile=True, max_iters=0)
    [start] = events(tmp_path, "start")
    assert not start["compiled"]
    assert start["versions"]["variables"] == "TORCHDYNAMO_DISABLE=1"
    printed = capsys.readouterr().out
    assert "NOT compiling: TORCHDYNAMO_DISABLE=1" in printed
    assert re.search(r"^computed in .* not compiled$", printed, re.M)


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """Set up a machine that was never measured; return a function that forgets what this process
    has measured.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    peaks.measured_flops.cache_clear()
    yield peaks.measured_flops.cache_clear
    peaks.measured_flops.cache_clear()


def test_matmuls_that_take_their_time_have_their_flops_and_draw_no_random_numbers(monkeypatch):
    """By a clock on which a matmul of n takes 2n^3 / 1e12 s, and each second one twice as long."""
    now = [0.0]
    calls = itertools.count()

    def takes(x, y, out):
        now[0] += 2 * len(x) ** 3 / 1e12 * (1 + next(calls) % 2)

    monkeypatch.setattr(torch, "mm", takes)
    monkeypatch.setitem(peaks.MATMUL_SIZES, "cpu", (64, 128))
    for name in ("thread_time", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: now[0])
    state = torch.random.get_rng_state()
    assert peaks.best_flops(CPU) == pytest.approx(dict.fromkeys(peaks.DTYPES, 1e12))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_only_the_first_start_measures(empty_cache, monkeypatch):
    first = peaks.measured_matmul_flops(CPU, "float32")
    [(key, figures)] = read_peaks().items()
    assert peaks.device_name(CPU) in key
    assert first == torch.get_num_threads() * figures["float32"]
    empty_cache()
    with monkeypatch.context() as patch:
        patch.setattr(peaks, "best_flops", lambda *_: pytest.fail("measured again"))
        assert peaks.measured_matmul_flops(CPU, "float32") == first
    write_peaks(key, figures | {"float32": 0.0})  # as on a machine that failed once
    empty_cache()
    assert peaks.measured_matmul_flops(CPU, "float32") > 1e8


@pytest.mark.parametrize(
    ("bfloat16", "dtype"), [(0.5, "float32"), (1.1, "float32"), (1.6, "bfloat16")]
)
def test_dtype_auto_is_bfloat16_only_if_one_thread_is_clearly_faster_in_it(
    bfloat16, dtype, empty_cache, monkeypatch
):
    """With more threads, which wait for each other, a busy moment would decide."""
    threads = [8]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    found = {"float32": 1e10, "bfloat16": bfloat16 * 1e10, "float16": 1e9}
    monkeypatch.setattr(peaks, "best_flops", lambda device: found if threads == [8, 1] else {})
    assert default_dtype(CPU) == dtype
    assert threads == [8, 1, 8]
    assert peaks.measured_matmul_flops(CPU, "float32") == 8e10
