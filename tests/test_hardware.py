from __future__ import annotations

import os
import re
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, assert_one_line, flags

from deskgpt.system import hardware, peaks
from deskgpt.system.hardware import resolve_device

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
    for device, local_ranks, remedy in (("auto", 3, "--nproc_per_node=2"), ("cuda:1", 2, "--device=cuda")):
        with pytest.raises(ValueError, match=f"{local_ranks} ranks") as refused:
            hardware.resolve_device(device, 0, local_ranks)
        assert_one_line(refused.value, remedy)


CUDA_12_6 = "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90"
CUDA_13 = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"


@pytest.mark.parametrize(
    ("capability", "built_for", "wanted"),
    [
        ((6, 1), CUDA_13, "CUDA 12.6"),
        ((7, 0), CUDA_13, "CUDA 12.6"),
        ((12, 0), CUDA_12_6, "CUDA 13"),
        ((9, 0), "sm_80 sm_90a compute_90a", None),
        ((10, 0), "sm_80 sm_90a compute_90a", "CUDA 13"),
        ((10, 3), "sm_100f", None),
        ((11, 0), "sm_100f compute_100f", "CUDA 13"),
        ((12, 1), "sm_90 compute_90", None),
        ((8, 0), "sm_86", "CUDA 13"),
        ((6, 1), CUDA_12_6, None),
        ((8, 9), CUDA_12_6, None),
        ((12, 1), CUDA_13, None),
        ((6, 1), "", None),  # torch does not say
    ],
)
def test_gpu_that_torch_has_no_kernels_for_is_named_with_the_build_that_has(
    capability, built_for, wanted, monkeypatch, recwarn
):
    def get_device_capability(device: torch.device) -> tuple[int, int]:
        warnings.warn("many\nlines", stacklevel=1)
        return capability

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built_for.split())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce GTX 1080")
    monkeypatch.setattr(torch.cuda, "get_device_capability", get_device_capability)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert resolve_device("auto").type == ("cpu" if wanted else "cuda")
    if wanted:
        of_card = f"capability {capability[0]}.{capability[1]}"
        assert_one_line(hardware.unused_gpu(), "GTX 1080", of_card, torch.__version__, f"for {wanted} ", "pytorch.org")
        with pytest.raises(ValueError, match="device=cuda:0") as refused:
            resolve_device("cuda")
        assert_one_line(refused.value, f"for {wanted} ", "--device=cpu")
    else:
        assert hardware.unused_gpu() is None
        assert resolve_device("cuda") == CUDA
    assert not recwarn


ONE_GPU = "GPU 0: NVIDIA GeForce RTX 4070 (UUID: GPU-1b9e4b5c-0000-0000-0000-000000000000)"


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Sets what a program on the PATH answers in nvidia-smi's place. torch sees no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def answers(gpus: str = ONE_GPU, status: int = 0) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho '{gpus}'\nexit {status}\n")
        program.chmod(0o755)

    return answers


@pytest.mark.skipif(os.name == "nt", reason="nvidia-smi is a shell script here")
def test_gpu_that_torch_does_not_see_is_named_with_the_remedy(nvidia_smi, monkeypatch):
    nvidia_smi()
    assert_one_line(hardware.unused_gpu(), "GeForce RTX 4070", torch.__version__, "pytorch.org")
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\n(found version 12080)")

    monkeypatch.setattr(torch.cuda, "init", init)
    assert_one_line(hardware.unused_gpu(), "GeForce RTX 4070", "13.0", "too old (found version 12080)", "driver")
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert_one_line(hardware.unused_gpu(), "GeForce RTX 4070", f"CUDA_VISIBLE_DEVICES={hidden!r}", "unset")
    nvidia_smi("NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.", status=9)
    assert_one_line(hardware.unused_gpu(), "driver", "reboot")


@pytest.mark.skipif(os.name == "nt", reason="nvidia-smi is a shell script here")
def test_no_reason_is_given_without_a_gpu(nvidia_smi, monkeypatch):
    nvidia_smi("No devices were found", status=6)
    assert hardware.unused_gpu() is None
    monkeypatch.setenv("PATH", "nothing")
    assert hardware.unused_gpu() is None


@pytest.mark.skipif(os.name == "nt", reason="nvidia-smi is a shell script here")
def test_scripts_say_that_torch_does_not_see_the_gpu(nvidia_smi, chars, tmp_path, script):
    nvidia_smi()
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


@pytest.mark.parametrize(
    ("groups", "limits", "usable"),
    [
        ("0::/a/b\n", {"a/memory.max": "3000", "a/b/memory.max": "max"}, 3000),
        ("0::/not/seen/here\n", {"memory.max": "2000"}, 2000),  # a container's
        ("4:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "1000"}, 1000),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": str(2**63 - 4096)}, 5000),  # no limit
        ("0::/a\n", {}, 5000),
    ],
)
def test_memory_that_control_groups_forbid_is_not_usable(groups, limits, usable, tmp_path, monkeypatch):
    for name, limit in limits.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(limit)
    (tmp_path / "own").write_text(groups)
    monkeypatch.setattr(hardware, "CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(hardware, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(hardware, "memory_bytes", lambda device: 5000)
    assert hardware.usable_memory_bytes(CPU) == usable


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


# ---- its name ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capabilities", "sets"),
    [
        ("avx2 avx512_f avx512_bf16 amx_bf16 amx_tile", ["AMX-BF16", "AVX512-BF16", "AVX-512"]),
        ("avx avx2 fma3", ["AVX2"]),
        ("neon i8mm bf16 sve sve_bf16", ["SVE", "BF16"]),
        ("", []),
    ],
)
def test_processor_is_known_by_its_instruction_sets(capabilities, sets, monkeypatch):
    has = dict.fromkeys(capabilities.split(), True) | {"sve2": False, "l2_cache_size": 1}
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: True, raising=False)
    assert hardware.instruction_sets(has) == sets
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: False)
    assert hardware.instruction_sets(has) == [name for name in sets if name != "AMX-BF16"]


def test_limited_machine_has_another_name_and_another_peak(monkeypatch):
    """Set in the environment, oneDNN and torch use less than the processor has."""
    key = peaks.peak_key(CPU, "float32")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    name = hardware.device_name(CPU)
    assert "ONEDNN_MAX_CPU_ISA=AVX2" in name
    assert re.search(r"\), \d+ cores?, \d+ threads?$", name)
    assert peaks.peak_key(CPU, "float32") != key
