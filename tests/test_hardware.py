from __future__ import annotations

import subprocess

import pytest
import torch
from conftest import shell
from torch.utils.benchmark import Timer

import hardware

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


def test_dtype_auto_on_a_cpu_is_bfloat16_only_where_it_pays(monkeypatch):
    for has, n_embd, expected in ((True, 768, "bfloat16"), (True, 64, "float32"), (False, 768, "float32")):
        monkeypatch.setattr(hardware, "cpu_has_bfloat16", lambda has=has: has)
        assert hardware.resolve_dtype("auto", CPU, n_embd) == expected
    assert hardware.resolve_dtype("float16", CPU, 64) == "float16"


def test_measured_peak_is_one_that_a_matmul_reaches():
    peak, source = hardware.peak_flops(CPU, "float32")
    assert source == "measured float32 matmul"
    a = torch.randn(1024, 1024)
    times = [Timer("a @ a", globals={"a": a}).timeit(1).median for _ in range(10)]
    assert peak > 0.5 * 2 * 1024**3 / min(times)
    assert peak < 50 * 2 * 1024**3 / min(times)


def test_peak_of_a_gpu_in_the_table_names_its_source_and_another_is_measured(monkeypatch):
    monkeypatch.setattr(hardware, "measured_matmul_flops", lambda device, dtype: 1.5e12)
    names = {
        "NVIDIA H200": (989e12, "NVIDIA, bfloat16"),
        "NVIDIA H200 MIG 1g.18gb": (1.5e12, "measured bfloat16 matmul"),
    }
    for name, expected in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert hardware.peak_flops(torch.device("cuda"), "bfloat16") == expected
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert hardware.peak_flops(torch.device("cuda"), "float32") == (494.5e12, "NVIDIA, TF32")


def test_git_commit_marks_changes(tmp_path, monkeypatch):
    def git(*words: str) -> None:
        identity = ["-c", "user.name=x", "-c", "user.email=x@x"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    monkeypatch.setattr(hardware, "__file__", str(tmp_path / "hardware.py"))
    assert hardware.git_commit() is None
    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "x")
    commit = hardware.git_commit()
    assert commit
    assert len(commit) == 12
    (tmp_path / "a").write_text("2")
    assert hardware.git_commit() == commit + "+changes"


def test_memory_is_counted_in_bytes():
    peak = hardware.peak_memory_bytes(CPU)
    assert peak is None or 50e6 < peak < 1e12


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_autocast_runs_matmuls_in_the_dtype(name):
    a = torch.ones(2, 2)
    with hardware.autocast(CPU, name):
        assert (a @ a).dtype == hardware.DTYPES[name]


def test_freed_memory_is_kept_where_glibc_does_it():
    code = "import hardware; assert hardware.keep_freed_memory() == (hardware.platform.libc_ver()[0] == 'glibc')"
    assert shell("python", "-c", code).returncode == 0
