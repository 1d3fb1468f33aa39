"""Devices, their memory and names; and which build of torch serves a card. nvidia-smi is a stub."""

from __future__ import annotations

import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, assert_one_line, flags

from deskgpt.system import hardware, wheels
from deskgpt.system.wheels import Gpu

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
POSIX = pytest.mark.skipif(os.name == "nt", reason="nvidia-smi is a shell script here")


# ---- choosing a device ---------------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs as torch reports them. `gpus.problem` is what a kernel raises on them."""
    gpus = SimpleNamespace(problem=None)
    ones = torch.ones

    def ones_on_gpu(n: int, device: torch.device) -> torch.Tensor:
        if gpus.problem:
            raise RuntimeError(gpus.problem)
        return ones(n)

    monkeypatch.setattr(torch, "ones", ones_on_gpu)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce GTX 1080")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    return gpus


def test_ranks_never_share_a_gpu(gpus):
    assert hardware.resolve_device("auto", 1, 2) == torch.device("cuda:1")
    for device, local_ranks, remedy in (("auto", 3, "--nproc_per_node=2"), ("cuda:1", 2, "--device=cuda")):
        with pytest.raises(ValueError, match=f"{local_ranks} ranks") as refused:
            hardware.resolve_device(device, 0, local_ranks)
        assert_one_line(refused.value, remedy)


def test_gpu_that_torch_has_no_kernels_for_is_named_and_the_cpu_taken(gpus, nvidia_smi):
    nvidia_smi("NVIDIA GeForce GTX 1080", "6.1", "13.0")
    gpus.problem = "CUDA error: no kernel image is available for execution on the device\nmore"
    assert hardware.resolve_device("auto").type == "cpu"
    assert_one_line(hardware.unused_gpu(), "GTX 1080", torch.__version__, "no kernel image", "pip install", "cu126")
    with pytest.raises(ValueError, match="device=cuda:0") as refused:
        hardware.resolve_device("cuda")
    assert_one_line(refused.value, "cu126", "--device=cpu")


# ---- which build of torch ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "cuda", "wheel", "named"),
    [
        ((8, 9), (13, 0), "cu130", "13.0"),
        ((7, 5), (13, 1), "cu130", "13.0"),
        ((12, 0), (13, 0), "cu130", "13.0"),
        ((6, 1), (13, 0), "cu126", "2.14"),  # Pascal: torch 2.14 is the last with a build
        ((7, 0), (12, 2), "cu126", "2.14"),
        ((8, 9), (12, 2), "cu126", "12.6"),  # a driver below 580
        ((12, 0), (12, 8), "cpu", "580"),  # Blackwell needs one
        ((6, 1), (11, 4), "cpu", "525"),
        ((3, 5), (11, 4), "cpu", "no build"),
        (None, (12, 2), "cu126", "12.6"),
    ],
)
def test_build_of_torch_follows_from_the_card_and_its_driver(capability, cuda, wheel, named):
    found, why = wheels.wheel_for(Gpu("a card", cuda, capability), "linux")
    assert found.name == wheel
    assert_one_line(why, "a card", named)


def test_machines_without_nvidias_cards_get_the_small_build(monkeypatch):
    for platform in ("linux", "win32", "darwin"):
        assert wheels.wheel_for(None, platform)[0].name == "cpu"
    monkeypatch.setattr(wheels.shutil, "which", lambda program: "/opt/rocm/bin/rocminfo")
    assert_one_line(wheels.wheel_for(None, "linux")[1], "ROCm", "PIP_EXTRA_INDEX_URL")


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Sets what a program on the PATH answers in nvidia-smi's place: name, capability, the driver's CUDA."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def answers(card: str, capability: str, cuda: str, status: int = 0) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(
            f'#!/bin/sh\ncase "$1" in\n--query-gpu*) echo "{capability}";;\n'
            f'-L) echo "GPU 0: {card} (UUID: GPU-1)";;\n'
            f'*) echo "| Driver Version: 575.1   CUDA Version: {cuda} |";;\nesac\nexit {status}\n'
        )
        program.chmod(0o755)

    return answers


@POSIX
def test_nvidia_smi_of_any_age_is_understood(nvidia_smi):
    nvidia_smi("NVIDIA GeForce RTX 4070", "8.9\n7.5", "12.8")
    assert wheels.nvidia_gpu() == Gpu("NVIDIA GeForce RTX 4070", (12, 8), (8, 9))
    nvidia_smi("Tesla K80", "Field compute_cap is not valid", "11.4")
    assert wheels.nvidia_gpu() == Gpu("Tesla K80", (11, 4), None)
    nvidia_smi("NVIDIA-SMI has failed", "", "12.8", status=9)
    assert wheels.nvidia_gpu() is None


@pytest.fixture
def unseen_gpu(nvidia_smi, monkeypatch):
    """nvidia-smi lists a card that torch does not see."""
    nvidia_smi("NVIDIA GeForce RTX 4070", "8.9", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)


@POSIX
def test_gpu_that_torch_does_not_see_is_named_with_the_remedy(unseen_gpu, nvidia_smi, monkeypatch):
    remedy = (sys.executable, "-m pip install", "cu130")  # the environment's own pip
    assert_one_line(hardware.unused_gpu(), "GeForce RTX 4070", torch.__version__, *remedy)
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\n(found version 12080)")

    monkeypatch.setattr(torch.cuda, "init", init)
    assert_one_line(hardware.unused_gpu(), "GeForce RTX 4070", "13.0", "too old (found version 12080)", *remedy)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert_one_line(hardware.unused_gpu(), "GeForce RTX 4070", "CUDA_VISIBLE_DEVICES='-1'", "unset")
    nvidia_smi("NVIDIA GeForce RTX 4070", "8.9", "13.0", status=6)
    assert hardware.unused_gpu() is None


@POSIX
@pytest.mark.slow
def test_scripts_print_that_torch_does_not_see_the_gpu(unseen_gpu, chars, tmp_path, script):
    settings = flags(**(TINY | {"dataset": chars, "out_dir": tmp_path / "out", "device": "auto"}))
    done = script("train.py", *settings)
    assert done.code == 0
    assert re.search(r"^torch .* cannot use NVIDIA GeForce RTX 4070.*; training on the CPU$", done.out, re.M)
    done = script("sample.py", f"--out_dir={tmp_path / 'out'}", "--num_samples=1", "--max_new_tokens=3")
    assert done.code == 0
    assert_one_line(done.err, "RTX 4070", "sampling on the CPU")
    done = script("train.py", *settings, "--device=cuda")
    assert done.code == 1
    assert_one_line(done.err, "device=cuda", "RTX 4070", "--device=auto")


# ---- memory --------------------------------------------------------------------------------------------------


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
        return hardware.usable_memory_bytes(CUDA) / 2**30

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
        folder = (tmp_path / name).parent
        folder.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(limit)
        for used in ("memory.current", "memory.usage_in_bytes"):
            (folder / used).write_text("700")
        (folder / "memory.stat").write_text("anon 100\ninactive_file 600\n")
    (tmp_path / "own").write_text(groups)
    memory = SimpleNamespace(total=5000, available=4900)
    monkeypatch.setattr(hardware, "CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(hardware, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(hardware.psutil, "virtual_memory", lambda: memory)
    assert hardware.usable_memory_bytes(CPU) == usable
    assert hardware.free_memory_bytes() == min(4900, usable - 100)


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


# ---- its name ------------------------------------------------------------------------------------------------


def test_processor_is_known_by_its_instruction_sets_and_what_limits_them(monkeypatch):
    has = dict.fromkeys(["avx2", "avx512_f", "avx512_bf16", "amx_bf16", "amx_tile"], True) | {"sve2": False}
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: False, raising=False)
    assert hardware.instruction_sets(has) == ["AVX512-BF16", "AVX-512"]
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: True)
    assert hardware.instruction_sets(has) == ["AMX-BF16", "AVX512-BF16", "AVX-512"]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    name = hardware.device_name(CPU)
    assert "ONEDNN_MAX_CPU_ISA=AVX2" in name
    assert re.search(r"\), \d+ cores?, \d+ threads?$", name)
