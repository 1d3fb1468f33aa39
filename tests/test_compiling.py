from __future__ import annotations

import os
import re
from dataclasses import replace
from subprocess import CalledProcessError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import flags, shell, tiny

from deskgpt.checkpoint import store
from deskgpt.compute import compiling
from train import main

CPU = torch.device("cpu")


# ---- inductor's settings -------------------------------------------------------------------------------------


def test_gcc_before_14_is_called_without_the_copies_that_it_gets_wrong(tmp_path, monkeypatch):
    import torch._inductor.config as inductor

    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("sys.platform", "linux")
    compiler = tmp_path / "g++"
    for version, needed in (("12.2.0", True), ("13.3.0", True), ("14.2.0", False), ("", False)):
        compiler.write_text(f"#!/bin/sh\n[ -n '{version}' ] && echo {version}\n")
        compiler.chmod(0o755)
        with inductor.patch({"cpp.cxx": (None, str(compiler)), "cpp.enable_floating_point_contract_flag": "off"}):
            assert compiling.work_around_gcc() == needed
            assert compiling.work_around_gcc() == needed  # a second time changes nothing
            flags = inductor.cpp.enable_floating_point_contract_flag
            assert flags == ("off -mno-align-stringops" if needed else "off")
            if hasattr(inductor.cpp, "march"):
                with inductor.patch({"cpp.march": "native"}):
                    assert not compiling.work_around_gcc()


# ---- the compiler's name -------------------------------------------------------------------------------------


def test_compilers_name_is_its_own_and_inductors_settings_follow(tmp_path, monkeypatch):
    from torch._inductor import config, cpp_builder

    path = tmp_path / "c++"
    path.write_text("#!/bin/sh\necho 'g++ (Debian 12.2.0-14) 12.2.0'; echo 'Copyright'")
    path.chmod(0o755)
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: str(path))
    with config.patch({"cpp.simdlen": None}):
        assert compiling.compiler_name(CPU) == "g++ (Debian 12.2.0-14) 12.2.0"
    with config.patch({"cpp.simdlen": 256}):
        assert compiling.compiler_name(CPU) == "g++ (Debian 12.2.0-14) 12.2.0, simdlen=256"
    path.write_text("#!/bin/sh\n")
    assert compiling.compiler_name(CPU) is None
    path.unlink()
    assert compiling.compiler_name(CPU) is None

    def no_compiler() -> str:
        raise cpp_builder.exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", no_compiler)
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


# ---- why it failed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "platform", "remedy"),
    [
        ("Compiler: cl is not found.", "win32", "Build Tools for Visual Studio"),
        ("No working C++ compiler found in torch._inductor.config.cpp.cxx: (None, 'g++')", "darwin", "xcode-select"),
        ("RuntimeError: Failed to find C compiler. Please specify via CC", "linux", "apt install g++"),
        ("x.cpp:1:10: fatal error: Python.h: No such file or directory", "linux", "apt install python3-dev"),
        ("Cannot find a working triton installation. Either the package", "win32", "pip install triton-windows"),
        ("Cannot find a working triton installation. Either the package", "linux", "pip install triton"),
        ("something\n  else", "linux", "something else"),
    ],
)
def test_missing_part_of_compiling_is_named_with_its_package(monkeypatch, error, platform, remedy):
    monkeypatch.setattr(compiling.sys, "platform", platform)
    assert remedy in compiling.why_not_compiled(RuntimeError(error))


def test_errors_as_torch_raises_them_are_known(monkeypatch):
    from torch._inductor.exc import GPUTooOldForTriton, InductorError, TritonMissing

    monkeypatch.setattr(compiling.sys, "platform", "linux")
    old: Any = SimpleNamespace(name="NVIDIA GeForce GTX 1080", major=6, minor=1)
    gcc = ["/usr/bin/gcc", "/tmp/tmpx/cuda_utils.c", "-O3", "-shared", "-fPIC", "-I/usr/include/python3.12"]
    for error, remedy in {
        TritonMissing(None): "there is no working Triton: pip install triton",
        GPUTooOldForTriton(old, None): "Triton supports GPUs from compute capability 7.0 on, and this one is older",
        CalledProcessError(1, gcc): "the C compiler that Triton calls failed and says why above; often Python.h is",
    }.items():
        for raised in (error, InductorError(error, None)):
            assert compiling.why_not_compiled(raised).startswith(remedy)


@pytest.mark.slow
def test_missing_compiler_is_named_and_the_run_goes_on(chars, tmp_path):
    """An earlier run was compiled, so this one tries to."""
    main(tiny(chars, tmp_path / "out", max_iters=3, compile="auto"))
    saved = store.load(tmp_path / "out")
    store.save(replace(saved, form=(saved.form or {}) | {"compiled": True}), tmp_path / "out", best=False)
    env = os.environ | {"CXX": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    settings = flags(out_dir=tmp_path / "out", init_from="resume", max_iters=6)
    done = shell("python", "train.py", *settings, env=env)
    assert done.returncode == 0, done.stderr
    line = r"^compile=auto: NOT compiled, so steps are slower: CXX='/nonexistent': there is no C\+\+ compiler: "
    assert re.search(line, done.stdout, re.M)
    assert "step 6: train loss" in done.stdout


def test_cache_that_cannot_be_written_is_replaced_and_one_that_can_be_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    assert compiling.find_cache() is None
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    said = compiling.find_cache()
    instead = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    assert re.fullmatch(rf"TORCHINDUCTOR_CACHE_DIR={folder} cannot be written \(.*\): using {instead}", said or "")
    assert compiling.find_cache() is None
