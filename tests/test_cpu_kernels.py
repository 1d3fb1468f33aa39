"""The kernels in C++: their numbers, how they are compiled, and that a wrong library is refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, assert_equal, assert_one_line, raises_one_line
from hypothesis import example, given
from hypothesis import strategies as st
from test_model import CPU, chosen
from torch import Tensor

from deskgpt.kernels import causal_attention, cpu_kernels, gelu_tanh, relu2, self_test
from deskgpt.kernels.self_test import LIMIT, our_attention

pytestmark = pytest.mark.skipif(
    not cpu_kernels.may_exist(), reason="the kernels are for Linux on a processor with AVX2 or AVX-512"
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def built():
    """The path of the library, which is loaded."""
    cpu_kernels.load()
    yield cpu_kernels.path()
    cpu_kernels.unload()


def needs(dtype: torch.dtype) -> None:
    if dtype not in cpu_kernels.dtypes():
        pytest.skip("oneDNN does not multiply this type here")


def heads_of(B: int, H: int, T: int, D: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k and v (B, H, T, D), laid out as the layer has them."""
    draw = torch.Generator().manual_seed(B + T + D)
    qkv = torch.randn(B, T, 3, H, D, generator=draw).to(dtype)
    return list(qkv.transpose(1, 3).unbind(2))


# ---- numbers -------------------------------------------------------------------------------------------------


@DTYPES
@given(B=st.integers(1, 3), T=st.integers(1, 300), D=st.integers(1, 96), threads=st.integers(1, 16), rows=st.booleans())
@example(B=1, T=1100, D=64, threads=3, rows=True)  # three chunks of keys
@example(B=1, T=2, D=1, threads=1, rows=False)  # a gradient of differences that nearly cancel
def test_attention_of_any_shape_and_its_gradients_are_torchs(dtype, B, T, D, threads, rows):
    """With more threads than heads, several take a part of one head. rows: the last dimension is contiguous.

    Of a few numbers in bfloat16, torch's flash attention can lie further than LIMIT from float64: like ours, its
    gradient comes from the rounded result. Torch takes it for contiguous rows only.
    """
    needs(dtype)
    q, k, v = heads_of(B, 2, T, D, dtype)
    of_torch = self_test.error_of(self_test.torch_attention, self_test.torch_attention, (q, k, v))
    if not rows:
        q = q.mT.contiguous().mT
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ours = self_test.error_of(our_attention, self_test.torch_attention, (q, k, v))
        assert ours <= max(LIMIT[dtype], 1.5 * of_torch)
    finally:
        torch.set_num_threads(before)


@DTYPES
@given(n=st.integers(1, 3000), scale=st.floats(0.01, 30), name=st.sampled_from(cpu_kernels.ACTIVATIONS))
def test_activations_of_any_size_and_their_slopes_are_torchs(name, dtype, n, scale):
    needs(dtype)
    x = (torch.randn(n, generator=torch.Generator().manual_seed(n)) * scale).to(dtype)
    expected = {"gelu_tanh": self_test.torch_gelu, "relu2": self_test.torch_relu2}[name]
    assert self_test.error_of(lambda x: torch.ops.deskgpt.activation(x, name), expected, (x,)) <= LIMIT[dtype]


def test_results_are_the_same_to_the_last_bit_each_time():
    inputs = [x.requires_grad_() for x in heads_of(3, 3, 200, 32, torch.float32)]
    o = our_attention(*inputs)
    first = torch.autograd.grad(o.square().sum(), inputs, retain_graph=True)
    for _ in range(5):
        assert torch.equal(our_attention(*inputs), o)
        assert_equal(torch.autograd.grad(o.square().sum(), inputs, retain_graph=True), first)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_visible(bad):
    """exp_u20 would turn NaN into a number, and a run would continue with it."""
    q, k, v = heads_of(1, 1, 80, 16, torch.float32)
    q[:, :, 40] = bad
    q.requires_grad_()
    o = our_attention(q, k, v)
    assert o[:, :, 40].isnan().all()
    assert o[:, :, :40].isfinite().all()
    assert not torch.autograd.grad(o.sum(), q)[0].isfinite().all()
    logits = torch.randn(4, 100)
    logits[2, 50] = bad
    log_p = cpu_kernels.softmax_(logits, torch.zeros(4, dtype=torch.int64))
    assert logits[2].isnan().all()
    assert not log_p[2].isfinite()
    assert logits[[0, 1, 3]].isfinite().all()


def test_target_beyond_the_vocabulary_is_an_error_and_reads_nothing_else():
    for target in (10, 10**9, -1):
        with pytest.raises(RuntimeError, match=f"target {target} is not a token below 10"):
            cpu_kernels.softmax_(torch.randn(2, 10), torch.tensor([0, target]))


def test_what_the_kernels_are_not_made_for_is_left_to_torch():
    for dtype in (torch.float16, torch.float64):
        q, k, v = heads_of(2, 4, 70, 16, dtype)
        assert torch.equal(causal_attention(q, k, v), F.scaled_dot_product_attention(q, k, v, is_causal=True))
    q = torch.randn(0, 2, 70, 16)
    assert causal_attention(q, q, q).shape == q.shape
    q, k, v = heads_of(2, 4, 70, 16, torch.float32)
    with pytest.raises(AssertionError):  # one head of keys for several of queries: not a crash
        our_attention(q, k[:, :1], v[:, :1])
    torch.manual_seed(0)
    dropped = causal_attention(q, k, v, 0.5)
    torch.manual_seed(0)
    assert torch.equal(dropped, F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, is_causal=True))
    for x in (torch.randn(0, 3), torch.randn(5, 3, dtype=torch.float64)):
        assert torch.equal(relu2(x), F.relu(x).square())
        assert torch.equal(gelu_tanh(x), F.gelu(x, approximate="tanh"))


# ---- a library that is wrong ---------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty cache, and no library in this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_kernels, "_library", None)
    monkeypatch.setattr(cpu_kernels, "_dtypes", ())
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("attention", "const Vec scale(1 / std::sqrt", "const Vec scale(1.02f / std::sqrt"),
        ("gelu_tanh", "0.0713548162726f", "0.0763548162726f"),
    ],
)
def test_library_that_computes_something_else_is_not_used_and_one_line_says_so(
    name, right, wrong, elsewhere, monkeypatch, capsys
):
    """As a compiler with a defect would make it."""
    source = cpu_kernels.SOURCE.read_text()
    assert right in source
    planted = elsewhere / "cpu_kernels.cpp"
    planted.write_text(source.replace(right, wrong))
    monkeypatch.setattr(cpu_kernels, "SOURCE", planted)
    assert not chosen(CPU, dtype="float32").cpu_kernels
    assert_one_line(capsys.readouterr().out.splitlines()[-1], "NOT using C++ kernels", name, "off by")
    assert not list(elsewhere.rglob("*.so"))
    assert cpu_kernels.dtypes() == ()


@pytest.mark.slow
def test_two_processes_that_compile_at_once_leave_one_library_that_is_intact(elsewhere):
    library = cpu_kernels.path()
    library.write_bytes(b"not a library")
    code = "from deskgpt.kernels import cpu_kernels; cpu_kernels.load(); print(cpu_kernels.dtypes())"
    command = [sys.executable, "-c", code]
    for process in [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]:
        assert "float32" in process.communicate()[0]
    assert list(library.parent.iterdir()) == [library]
    assert cpu_kernels.is_intact(library)


@pytest.mark.parametrize("compiler", ["false", "ccache-that-is-none g++"])
def test_machine_without_a_compiler_uses_torch_and_one_line_says_so(compiler, elsewhere, monkeypatch, capsys):
    monkeypatch.setenv("CXX", compiler)
    assert not chosen(CPU, dtype="float32").cpu_kernels
    assert_one_line(capsys.readouterr().out.splitlines()[-1], "NOT using C++ kernels", "may be slower")


def test_library_of_other_bytes_or_that_others_can_write_is_not_loaded(built, elsewhere, monkeypatch):
    library = Path(shutil.copy(built, cpu_kernels.path()))
    content = library.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    for damaged in (b"", content[:-4096], flipped):
        library.write_bytes(damaged)
        assert not cpu_kernels.is_intact(library)
    library.write_bytes(content)
    library.chmod(0o777)
    assert not cpu_kernels.is_intact(library)
    library.chmod(0o700)
    library.parent.chmod(0o777)
    monkeypatch.setattr(cpu_kernels, "compile_to", lambda library: None)
    with raises_one_line(library.parent, "XDG_CACHE_HOME", kind=cpu_kernels.Unavailable):
        cpu_kernels.load()
    monkeypatch.setattr(cpu_kernels, "FLAGS", ("-O1",))
    assert cpu_kernels.path() != library  # which is named after all that it is made of
