"""Training on lesser processors than this one, emulated: it learns there as float32 does here.

Each machine is a process that uses a part of the processor, by the variables of ATen, oneDNN and inductor.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, events, flags, shell
from tiny_models import MODERN_SETTINGS

pytestmark = pytest.mark.nightly

NO_VECTORS = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "TORCHINDUCTOR_CPP_MARCH": "x86-64-v3"}
AVX512 = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "TORCHINDUCTOR_CPP_MARCH": "x86-64-v4"}
# What no variable can say: how wide inductor's vectors are; and torch has no setting for a processor without bfloat16,
# so its questions about it are answered with no.
SIMDLEN = "import torch._inductor.config as c; c.cpp.simdlen = {}"
NO_BFLOAT16 = (
    "import torch; no = lambda: False; torch.cpu._is_avx512_bf16_supported = no; torch.cpu._init_amx = no; "
    "torch.cpu._is_amx_tile_supported = no; torch.cpu._is_amx_fp16_supported = no"
)
# By name: the instruction set that this processor must have, environment variables, and code that comes first.
MACHINES: dict[str, tuple[str, dict[str, str], str]] = {
    "no vectors": ("", NO_VECTORS, SIMDLEN.format(0)),
    "AVX2": ("AVX2", AVX2, SIMDLEN.format(256)),
    "AVX-512 without bfloat16": ("AVX-512", AVX512, NO_BFLOAT16),
    "no AMX": ("AMX-BF16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, "pass"),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16", **MODERN_SETTINGS},
    "bfloat16, compiled": {"dtype": "bfloat16", "compile": True, **MODERN_SETTINGS},
    "float32, C++ kernels": {"dtype": "float32", "cpu_kernels": "auto"},
    "float32, compiled": {"dtype": "float32", "compile": True},
}
SIZES = {"n_layer": 1, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 8, "learning_rate": 1e-3}
TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}  # of losses and gradient norms


def train(data: Path, out_dir: Path, settings: dict[str, Any], env: dict[str, str], code: str = "pass") -> list[Any]:
    """Return (loss, gradient norm) of each step of a run of train.py, after the code."""
    run = f"{code}; import runpy, sys; sys.argv[0] = 'train.py'; runpy.run_path('train.py', run_name='__main__')"
    own = TINY | SIZES | settings | {"dataset": data, "out_dir": out_dir}
    done = shell(sys.executable, "-c", run, *flags(**own), env=os.environ | env, timeout=480)
    assert done.returncode == 0, done.stdout + done.stderr
    return [(e["loss"], e["grad_norm"]) for e in events(out_dir, "iter")]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("machine", MACHINES)
def test_lesser_processor_learns_as_float32_does_here(machine, variant, chars, tmp_path):
    needed, env, code = MACHINES[machine]
    here = torch.backends.cpu.get_cpu_capability()
    has = {"": True, "AVX2": "AVX" in here, "AVX-512": here == "AVX512", "AMX-BF16": torch.cpu._is_amx_tile_supported()}
    if not has[needed]:
        pytest.skip(f"this processor has no {needed}")
    settings = VARIANTS[variant]
    plain = settings | {"dtype": "float32", "compile": False, "cpu_kernels": False}
    expected = train(chars, tmp_path / "here", plain, {})
    # Each machine compiles anew: inductor's cache would take code that was made for wider vectors.
    env = env | {"XDG_CACHE_HOME": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    env |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    found = train(chars, tmp_path / "there", settings, env, code)
    assert len(found) == len(expected) > 3
    for a, b in zip(found, expected, strict=True):
        assert a == pytest.approx(b, rel=TOLERANCE[settings["dtype"]])
