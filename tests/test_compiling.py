from __future__ import annotations

import os

import pytest
import torch
import torch._inductor.config as inductor_config
from conftest import assert_one_line, shell
from torch._dynamo.testing import CompileCounter

from deskgpt.compute import compiling

CPU = torch.device("cpu")


def test_gcc_before_14_is_called_without_the_copies_that_it_gets_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("sys.platform", "linux")
    compiler = tmp_path / "g++"
    for version, needed in (("13.3.0", True), ("14.2.0", False), ("", False)):
        compiler.write_text(f"#!/bin/sh\n[ -n '{version}' ] && echo {version}\n")
        compiler.chmod(0o755)
        with inductor_config.patch(
            {"cpp.cxx": (None, str(compiler)), "cpp.enable_floating_point_contract_flag": "off"}
        ):
            for _ in range(2):  # a second time changes nothing
                assert compiling.work_around_gcc() == needed
            flags = inductor_config.cpp.enable_floating_point_contract_flag
            assert flags == ("off -mno-align-stringops" if needed else "off")


GRAPH_IS_RIGHT = """
import torch
import torch._inductor.config as inductor
from deskgpt.compute import compiling
compiling.set_up_inductor()
inductor.cpp_cache_precompile_headers = False  # for one kernel they take longer than they save
x = torch.arange(1000.0)
print(torch.equal(torch.compile(lambda x: x * 2 + 1)(x), x * 2 + 1))
"""


@pytest.mark.nightly
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="a processor with one kind of vectors")
def test_graphs_cached_on_another_processor_are_compiled_again(tmp_path):
    """Inductor would take the graph of the first process for the second, and write beyond the tensor."""
    for capability in ("avx2", "avx512"):
        env = os.environ | {"ATEN_CPU_CAPABILITY": capability, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        done = shell("python", "-c", GRAPH_IS_RIGHT, env=env)
        assert done.stdout == "True\n", done.stderr


class Scaled(torch.nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.n


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
