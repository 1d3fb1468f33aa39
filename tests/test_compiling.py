from __future__ import annotations

import os
import re

import pytest
import torch
from conftest import TINY, flags, shell

from deskgpt import compiling

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


@pytest.mark.slow
def test_missing_compiler_is_named_and_the_run_goes_on(chars, tmp_path):
    env = os.environ | {"CXX": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    settings = flags(**(TINY | {"dataset": chars, "out_dir": tmp_path / "out", "compile": True}))
    done = shell("python", "train.py", *settings, env=env)
    assert done.returncode == 0, done.stderr
    assert re.search(r"does not work here \(CXX='/nonexistent': there is no C\+\+ compiler: ", done.stdout)
    assert "step 6: train loss" in done.stdout
