from __future__ import annotations

import os
import platform
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, assert_one_line, flags, shell

from deskgpt.machine import hardware, peak_flops
from deskgpt.machine.hardware import resolve_device

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


# ---- choosing a device ---------------------------------------------------------------------------------------


def test_auto_takes_the_fastest_device_there_is():
    assert hardware.resolve_device("cpu") == CPU
    if torch.cuda.is_available():
        expected = "cuda"
    elif torch.backends.mps.is_available():
        expected = "mps"
    else:
        expected = "cpu"
    assert hardware.resolve_device("auto").type == expected


def test_ranks_never_share_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert hardware.resolve_device("auto", 1, 2) == torch.device("cuda:1")
    with pytest.raises(ValueError, match="3 ranks need as many GPUs, this machine has 2; try --nproc_per_node=2"):
        hardware.resolve_device("auto", 1, 3)
    with pytest.raises(ValueError, match="cuda:1 is one GPU for 2 ranks; try --device=cuda"):
        hardware.resolve_device("cuda:1", 0, 2)


# Headers of nvidia-smi: driver 610 changed the words before the versions.
OLD_HEADER = "| NVIDIA-SMI 570.86.10    Driver Version: 570.86.10    CUDA Version: 12.8     |"
NEW_HEADER = "| NVIDIA-SMI 610.43.02    KMD Version: 610.43.02       CUDA UMD Version: 13.3 |"
ONE_GPU = "GPU 0: NVIDIA GeForce RTX 4070 (UUID: GPU-1b9e4b5c-0000-0000-0000-000000000000)"


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Sets what a program on the PATH answers in nvidia-smi's place, and the CUDA that torch is built for.

    torch sees no GPU.
    """
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
    def reason() -> str:
        line = hardware.unseen_gpu()
        assert line
        assert "\n" not in line
        return line

    nvidia_smi(OLD_HEADER)
    assert f"lists NVIDIA GeForce RTX 4070, but torch {torch.__version__} is a build without CUDA" in reason()
    assert "driver 570.86.10 supports CUDA up to 12.8" in reason()
    assert "install a build for CUDA 12 as pytorch.org says" in reason()
    nvidia_smi(NEW_HEADER, f"{ONE_GPU}\n{ONE_GPU.replace('GPU 0', 'GPU 1')}")
    assert "2 GPUs (NVIDIA GeForce RTX 4070, ...)" in reason()
    assert "driver 610.43.02 supports CUDA up to 13.3" in reason()
    nvidia_smi(OLD_HEADER, cuda="13.0")
    assert "is built for CUDA 13.0, but driver 570.86.10 supports CUDA up to 12.8: update the driver" in reason()
    nvidia_smi(OLD_HEADER, cuda="12.9")  # runs with this driver: torch may know what else is wrong

    def init() -> None:
        raise RuntimeError("CUDA unknown error -\nthis may be due to an incorrectly set up environment")

    monkeypatch.setattr(torch.cuda, "init", init)
    assert "does not see it (CUDA unknown error - this may be due" in reason()
    nvidia_smi("no header at all")
    assert "a build without CUDA (the driver): " in reason()
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        hides = f"CUDA_VISIBLE_DEVICES={hidden!r} hides NVIDIA GeForce RTX 4070 from torch; unset it to use the GPU"
        assert reason() == hides
    nvidia_smi("NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.", "", status=9)
    assert "finds no loaded NVIDIA driver: reboot" in reason()


@pytest.mark.skipif(os.name == "nt", reason="nvidia-smi is a shell script here")
def test_no_reason_is_given_without_a_gpu(nvidia_smi, tmp_path, monkeypatch):
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
    done = script("sample.py", f"--out_dir={tmp_path / 'out'}", "--num_samples=1", "--max_new_tokens=3", "--device=cpu")
    assert (done.code, done.err) == (0, "")
    done = script("train.py", *settings, "--device=cuda")
    assert done.code == 1
    assert_one_line(done.err, "device=cuda", "nvidia-smi lists", "--device=auto")


# ---- computing and memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_autocast_runs_matmuls_in_the_dtype(name):
    a = torch.ones(2, 2)
    with hardware.autocast(CPU, name):
        assert (a @ a).dtype == hardware.DTYPES[name]


@pytest.fixture
def card(monkeypatch):
    """A GPU of 12 GiB as torch.cuda would report it; returns the caps that are set."""
    gib = 2**30
    caps = [1.0]
    held = {"free": 10.5, "reserved": 0.5}  # GiB
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: SimpleNamespace(total_memory=12 * gib))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda d: (int(held["free"] * gib), 12 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda d: int(held["reserved"] * gib))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda d: caps[-1])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda f, d: caps.append(f))
    return SimpleNamespace(caps=caps, held=held)


def test_usable_memory_is_what_is_free_and_what_this_process_holds_within_its_cap(card):
    def usable_gib() -> float:
        return (hardware.usable_memory_bytes(CUDA) or 0) / 2**30

    assert usable_gib() == 11
    card.held |= {"free": 1.0, "reserved": 10.0}  # its own
    assert usable_gib() == 11
    card.caps.append(0.5)
    assert usable_gib() == 6
    card.held |= {"free": 2.0, "reserved": 0.0}  # another process has the rest
    assert usable_gib() == 2


def test_usable_memory_of_a_cpu_is_the_machines():
    assert hardware.usable_memory_bytes(CPU) == hardware.memory_bytes(CPU)


def test_memory_in_words_names_what_is_free_and_all_where_they_differ():
    gib = 2**30
    assert hardware.memory_in_words(10.94 * gib, 12 * gib) == "10.9 GiB free (12.0 in all)"
    assert hardware.memory_in_words(11.98 * gib, 12 * gib) == "12.0 GiB"
    assert hardware.memory_in_words(None, None) == "n/a"


@pytest.mark.parametrize(
    ("system", "kernel", "spills"),
    [
        ("win32", "11", True),
        ("linux", "5.15.167.4-microsoft-standard-WSL2", True),
        ("linux", "6.1.0-31-amd64", False),
    ],
)
def test_gpu_whose_driver_spills_is_capped_at_what_is_free_unless_the_user_did(
    system, kernel, spills, card, monkeypatch
):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(hardware.platform, "release", lambda: kernel)
    hardware.forbid_spilling(CUDA)
    assert card.caps[1:] == ([pytest.approx(0.95 * 11 / 12)] if spills else [])
    card.caps.append(0.25)
    hardware.forbid_spilling(CUDA)
    assert card.caps[-1] == 0.25
    hardware.forbid_spilling(CPU)
    assert card.caps[-1] == 0.25


@pytest.mark.skipif(os.name == "nt", reason="a cap needs a GPU there")
def test_scripts_start_with_the_cap(chars, tmp_path, script, monkeypatch):
    asked: list[torch.device] = []
    monkeypatch.setattr(hardware, "forbid_spilling", asked.append)
    assert script("train.py", *flags(**TINY, dataset=chars, out_dir=tmp_path)).code == 0
    assert script("sample.py", f"--out_dir={tmp_path}", "--num_samples=1", "--max_new_tokens=3").code == 0
    assert [device.type for device in asked] == ["cpu", resolve_device("auto").type]


def test_memory_is_counted_in_bytes():
    peak = hardware.peak_memory_bytes(CPU)
    assert peak is None or 50e6 < peak < 1e12


def test_freed_memory_is_kept_with_glibc():
    assert hardware.keep_freed_memory() == (platform.libc_ver()[0] == "glibc")


# ---- its name ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capabilities", "sets"),
    [
        (
            "avx2 avx512_f avx512_bf16 avx512_fp16 amx_bf16 amx_tile",
            ["AMX-BF16", "AVX512-FP16", "AVX512-BF16", "AVX-512"],
        ),
        ("avx avx2 avx512_f avx512_vl avx512_bf16", ["AVX512-BF16", "AVX-512"]),
        ("avx avx2 fma3", ["AVX2"]),
        ("avx", []),
        ("neon i8mm bf16 sve sve_bf16", ["SVE", "BF16"]),
        ("neon bf16", ["BF16", "NEON"]),
        ("", []),
    ],
)
def test_processor_is_known_by_its_instruction_sets(capabilities, sets, monkeypatch):
    has = dict.fromkeys(capabilities.split(), True) | {"sve2": False, "l2_cache_size": 1}
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: True, raising=False)
    assert hardware.instruction_sets(has) == sets
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: False)
    assert hardware.instruction_sets(has) == [name for name in sets if name != "AMX-BF16"]


def test_what_keeps_torch_below_the_processor_is_said(monkeypatch):
    for variable in ("ATEN_CPU_CAPABILITY", *hardware.LIMITING_VARIABLES):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert hardware.processor_limits(["AVX2"]) == []
    assert hardware.processor_limits(["AVX512-BF16", "AVX-512"]) == ["as AVX2, by torch"]
    monkeypatch.setenv("MKL_CBWR", "sse4_2")
    assert hardware.processor_limits(["AVX2"]) == ["as SSE4_2, by MKL_CBWR"]


@pytest.mark.slow
def test_emulated_machine_has_another_name_and_another_peak():
    code = (
        "from deskgpt.machine import hardware as h, peak_flops as p; d = h.resolve_device('cpu'); "
        "print(h.device_name(d), p.peak_key(d, 'float32'), sep='|')"
    )
    emulated = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    name, key = shell("python", "-c", code, env=os.environ | emulated).stdout.strip().split("|")
    plain, sets = hardware.processor()
    of_plain = re.escape(f"{plain} ({', '.join(sets)}".removesuffix("("))
    assert re.match(rf"{of_plain}.*as \w+, by ATEN_CPU_CAPABILITY; as AVX2, by ONEDNN_MAX_CPU_ISA\), ", name)
    assert re.search(r"\), \d+ cores?, \d+ threads?$", name)
    assert key.startswith(f"{name}, float32, torch ")
    assert key != peak_flops.peak_key(CPU, "float32")
