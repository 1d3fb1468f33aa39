from __future__ import annotations

import pytest
import torch
import torch._inductor.config as inductor_config
from conftest import assert_one_line
from torch._dynamo.testing import CompileCounter

from deskgpt.compute import compiling


def test_gcc_is_called_without_the_copies_that_it_gets_wrong_before_version_14(tmp_path, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("sys.platform", "linux")
    for name, needed in (("g++", True), ("c++", True), ("clang++-17", False), ("none", False)):
        compiler = tmp_path / name
        if name != "none":
            compiler.write_text("#!/bin/sh\n")
            compiler.chmod(0o755)
        with inductor_config.patch(
            {"cpp.cxx": (None, str(compiler)), "cpp.enable_floating_point_contract_flag": "off"}
        ):
            for _ in range(2):  # a second time changes nothing
                compiling.work_around_gcc()
            flags = inductor_config.cpp.enable_floating_point_contract_flag
            assert flags == ("off -mno-align-stringops" if needed else "off")


class Scaled(torch.nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.n


@pytest.mark.slow
def test_blocks_with_a_constant_for_each_layer_have_a_graph_each():
    """More than torch's limit of eight, after which it would continue uncompiled."""
    counter = CompileCounter()
    compiling.prepare(torch.device("meta"))
    for n in range(12):
        block = Scaled(n)
        block.compile(backend=counter, dynamic=False)
        assert block(torch.ones(3))[0] == 1 + n
    assert counter.frame_count == 12


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("No working C++ compiler found in torch._inductor.config.cpp.cxx: (None, 'g++')", "xcode-select"),
        ("Command '['/usr/bin/gcc', '/tmp/x/cuda_utils.c']' returned non-zero exit status 1.", "Python.h"),
        ("Cannot find a working triton installation. Either the package", "pip install triton"),
        ("something\n  else", "something else"),
    ],
)
def test_missing_compiler_is_named_with_its_package(error, remedy):
    assert_one_line(compiling.why_not_compiled(RuntimeError(error)), remedy)
