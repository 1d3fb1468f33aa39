"""The kernels in C++: their numbers, how they are compiled, and that a wrong one is refused."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, assert_equal, assert_one_line
from filelock import FileLock
from test_implementation import a_model, batch_of, chosen, plant
from torch import Tensor

import model as definition
from deskgpt.compute.variant import Variant
from deskgpt.kernels import cpu_kernels, replacements

pytestmark = pytest.mark.skipif(
    not cpu_kernels.may_exist(), reason="the kernels are for Linux on a processor with AVX2 or AVX-512"
)
GRAD_LIMIT = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # |difference| / |gradient in float64|


@pytest.fixture(autouse=True, scope="module")
def _loaded():
    if cpu_kernels.may_exist():
        cpu_kernels.load()
        return cpu_kernels.path()
    return None


@pytest.fixture(autouse=True)
def _nothing_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "remembered"))


def distance(a: Tensor, b: Tensor, least: float = 1e-9) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=least)).item()


def by_definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(q.size(2))
    scores = q @ k.mT * q.size(-1) ** -0.5
    weights = scores.masked_fill(~definition.causal_mask(at[:, None], at), -torch.inf).softmax(-1)
    return weights @ v


def attention_errors(q: Tensor, k: Tensor, v: Tensor, g: Tensor, call: Any) -> list[float]:
    """Of the result and the gradients by q, k and v, each against the definition in float64.

    Gradients below a tenth of the largest one are measured by that: those by q and k cancel where a softmax is
    almost one-hot.
    """
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    found = call(*inputs)
    expected = by_definition(*exact)
    gradients = torch.autograd.grad(found, inputs, g)
    right = torch.autograd.grad(expected, exact, g.double())
    least = 0.1 * max(x.norm().item() for x in right)
    return [distance(found, expected)] + [distance(a, b, least) for a, b in zip(gradients, right, strict=True)]


def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.ops.deskgpt.causal_attention(q, k, v)[0]


def heads_of(B: int, T: int, H: int, D: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """q, k, v and a gradient (B, H, T, D), laid out as the layer has them."""
    draw = torch.Generator().manual_seed(seed)
    qkv = torch.randn(B, T, 3, H, D, generator=draw).to(dtype) * 1.5
    g = torch.randn(B, T, H, D, generator=draw).to(dtype)
    return [*qkv.transpose(1, 3).unbind(2), g.transpose(1, 2)]


# ---- numbers ---------------------------------------------------------------------------------------------------


SHAPES = ((2, 2, 64), (2, 63, 7), (2, 64, 16), (2, 65, 80), (2, 300, 192), (1, 1100, 64))  # 1100: 3 chunks of keys


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_and_its_gradients_are_those_of_the_definition_for_all_shapes_threads_and_layouts(dtype):
    if dtype not in cpu_kernels.dtypes():
        pytest.skip("oneDNN does not multiply this type here")
    before = torch.get_num_threads()
    for i, (B, T, D) in enumerate(SHAPES):
        torch.set_num_threads((1, 3, 16)[i % 3])  # with more threads than heads, several take a part of one head
        q, k, v, g = heads_of(B, T, 2, D, dtype)
        if i % 2:  # not contiguous in the last dimension; one gradient for all sequences, as from a sum
            q, g = q.mT.contiguous().mT, g[:1].expand(B, -1, -1, -1)
        try:
            assert max(attention_errors(q, k, v, g, kernel)) <= GRAD_LIMIT[dtype], (T, D)
        finally:
            torch.set_num_threads(before)


def test_results_are_the_same_to_the_last_bit_each_time():
    q, k, v, g = heads_of(3, 200, 3, 32, torch.float32)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    o = kernel(*inputs)
    first = torch.autograd.grad(o, inputs, g, retain_graph=True)
    for _ in range(5):
        assert torch.equal(kernel(*inputs), o)
        assert_equal(torch.autograd.grad(o, inputs, g, retain_graph=True), first)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_visible(bad):
    """exp_u20 would turn NaN into a number: a run would go on with it."""
    q, k, v, g = heads_of(1, 80, 1, 16, torch.float32)
    q[:, :, 40] = bad
    q.requires_grad_()
    o = kernel(q, k, v)
    assert o[:, :, 40].isnan().all()
    assert o[:, :, :40].isfinite().all()
    assert not torch.autograd.grad(o, q, g)[0].isfinite().all()
    logits = torch.randn(4, 100)
    logits[2, 50] = bad
    log_p = cpu_kernels.softmax_(logits, torch.zeros(4, dtype=torch.int64))
    assert logits[2].isnan().all()
    assert not log_p[2].isfinite()
    assert logits[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("name", ["gelu", *cpu_kernels.ACTIVATIONS])
def test_activations_and_their_slopes_are_those_of_the_definition(name, dtype, limit):
    for n in (1, 31, 100_003):
        x = (torch.linspace(-6, 6, n) if n > 1 else torch.ones(1)).to(dtype).requires_grad_()
        exact = x.detach().double().requires_grad_()
        g = torch.randn(n, generator=torch.Generator().manual_seed(0)).to(dtype)
        y = torch.ops.deskgpt.activation(x, name)
        expected = definition.activation(exact, name)
        assert distance(y, expected) <= limit
        found = torch.autograd.grad(y, x, g)[0]
        assert distance(found, torch.autograd.grad(expected, exact, g.double())[0]) <= limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("V", [1, 33, 50_257])
def test_loss_by_kernel_is_the_definition_with_ignored_targets_and_chunks(V, dtype):
    if dtype not in cpu_kernels.dtypes():
        pytest.skip("oneDNN does not multiply this type here")
    draw = torch.Generator().manual_seed(0)
    h = torch.randn(37, 16, generator=draw).to(dtype)
    w = torch.randn(V, 16, generator=draw).to(dtype)
    targets = torch.randint(V, (37,), generator=draw)
    targets[[0, 5, 36]] = -1
    for chunk in (10, 37):
        loss, dh, dw = replacements.chunked_cross_entropy(h, w, targets, dtype, chunk, True, cpu_kernels.softmax_)
        exact = [x.double().requires_grad_() for x in (h, w)]
        expected = F.cross_entropy(exact[0] @ exact[1].T, targets, ignore_index=-1, reduction="sum")
        limit = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        assert distance(loss, expected) <= limit
        if V > 1:
            for a, b in zip((dh, dw), torch.autograd.grad(expected, exact), strict=True):
                assert distance(a, b) <= limit


def test_target_beyond_the_vocabulary_is_an_error_and_reads_nothing_else():
    for target in (10, 10**9, -1):
        with pytest.raises(RuntimeError, match=f"target {target} is not a token below 10"):
            cpu_kernels.softmax_(torch.randn(2, 10), torch.tensor([0, target]))


# ---- in training -----------------------------------------------------------------------------------------------


def test_model_with_kernels_and_activation_checkpoints_has_the_gradients_of_the_eager_one():
    model = a_model()
    x, y = batch_of(2)
    expected: list[Any] = []
    found: list[Any] = []
    for variant, into in ((Variant(), expected), (Variant("float32", False, "kernels", "selective"), found)):
        runner = Runner(model, variant)
        into.append(runner.forward_backward(x, y))
        into += [p.grad for p in runner.parameters]
        runner.model.zero_grad()
    assert all(distance(a, b) <= 1e-4 for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wrong_attention_is_left_out_alone_flash_attention_stays_and_the_name_says_it(dtype, monkeypatch):
    plant(monkeypatch, [getattr(torch, dtype)], "kernel_attention")
    printed: list[str] = []
    variant = chosen(printed, earlier={"dtype": dtype, "attention": "kernels"}, attention="auto").variant
    assert variant == Variant(dtype, attention="kernels", refused=("kernel_attention",))
    assert variant.replacements()["attention"] is replacements.flash_attention
    assert variant.replacements()["GPT.loss"] is replacements.kernel_loss
    assert str(variant) == f"{dtype}, C++ activation and loss, not compiled"
    assert variant.attention_in_use("cpu") == "flash"
    assert_one_line(printed[0], f"C++ attention in {dtype} disagrees with model.py", "using flash attention")
    with pytest.raises(ValueError, match="attention=kernels") as e:
        chosen(dtype=dtype, attention="kernels")
    assert_one_line(str(e.value), "C++ attention", "leave --attention out")


# ---- compiling and loading ---------------------------------------------------------------------------------------

LOAD = "from deskgpt.kernels import cpu_kernels; cpu_kernels.load(); print(cpu_kernels.dtypes())"


def load_elsewhere(cache: Path) -> subprocess.Popen[str]:
    """A process that loads the kernels, with a cache of its own."""
    env = os.environ | {"XDG_CACHE_HOME": str(cache)}
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", LOAD], cwd=ROOT, env=env, start_new_session=True, **options)


@pytest.mark.slow
def test_library_of_others_is_compiled_again_by_one_of_several_processes_though_one_is_killed(tmp_path, monkeypatch):
    """What lies in the cache has one of our functions, and belongs to another build."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = cpu_kernels.path()
    (tmp_path / "other.c").write_text("int attention_forward;")
    subprocess.run(["cc", "-shared", tmp_path / "other.c", "-o", library], check=True)
    old = library.with_name("cpu_kernels-0123456789abcdef.so")
    old.touch()
    os.utime(old, (0, 0))
    first = load_elsewhere(tmp_path)
    while first.poll() is None and not list(library.parent.glob("*.tmp")):
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    for process in [load_elsewhere(tmp_path) for _ in range(2)]:
        out, err = process.communicate()
        assert "float32" in out, err
    assert list(library.parent.glob("*.so")) == [library]
    assert cpu_kernels.is_intact(library)


@pytest.mark.parametrize("compiler", ["false", "ccache-that-is-none g++"])
def test_machine_without_a_compiler_goes_on_with_one_line(compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_kernels, "_library", None)
    printed: list[str] = []
    runner = chosen(printed, dtype="float32", attention="auto")
    assert runner.variant.attention != "kernels"
    line = next(line for line in printed if "NOT using" in line)
    assert_one_line(line, "C++ kernels", "may be slower")


@pytest.fixture
def library(_loaded, tmp_path, monkeypatch):
    """A copy of the library in a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    copy = cpu_kernels.path()
    shutil.copy(_loaded, copy)
    assert cpu_kernels.is_intact(copy)
    return copy


def test_library_of_other_bytes_or_that_others_can_write_is_not_loaded(library, monkeypatch):
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
    monkeypatch.setattr(cpu_kernels, "_library", None)
    monkeypatch.setattr(cpu_kernels, "compile_to", lambda library: None)
    with pytest.raises(cpu_kernels.Unavailable) as e:
        cpu_kernels.load()
    assert_one_line(str(e.value), str(library.parent), "XDG_CACHE_HOME")
    monkeypatch.setattr(cpu_kernels, "FLAGS", ("-O1",))
    assert cpu_kernels.path() != library  # which is named after all that it is made of


def test_process_that_holds_the_lock_for_ever_is_not_waited_for(library, monkeypatch):
    monkeypatch.setattr(cpu_kernels, "COMPILE_S", 0.2)
    monkeypatch.setattr(cpu_kernels, "_library", None)
    with FileLock(library.with_suffix(".lock")), pytest.raises(cpu_kernels.Unavailable) as e:
        cpu_kernels.load()
    assert_one_line(str(e.value), "another process", "0.2 s")


# ---- the boundary ------------------------------------------------------------------------------------------------


def test_what_the_kernels_are_not_made_for_is_left_to_torch():
    at = torch.arange(70)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return replacements.kernel_attention(definition.attention, q, k, v, at, at, 0.0)

    for dtype in (torch.float16, torch.float64):
        q, k, v, g = heads_of(2, 70, 4, 16, dtype)
        assert max(attention_errors(q, k, v, g, attention)) <= (3e-3 if dtype == torch.float16 else 1e-5)
    q = torch.randn(0, 2, 70, 16)
    assert attention(q, q, q).shape == q.shape
    q, k, v, _ = heads_of(2, 70, 4, 16, torch.float32)
    with pytest.raises(AssertionError):  # one head of keys for several of queries: not a crash
        kernel(q, k[:, :1], v[:, :1])
    for x in (torch.randn(0, 3), torch.randn(5, 3, dtype=torch.float64)):
        found = replacements.kernel_activation(definition.activation, x, "relu2")
        assert torch.equal(found, definition.activation(x, "relu2"))
