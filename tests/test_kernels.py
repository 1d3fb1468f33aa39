"""The loss in chunks is the plain cross-entropy of the logits; and the kernels in C++, and their
library.
"""

import functools
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import CPU, assert_equal, assert_one_line, raises_one_line, slow
from hypothesis import example, given
from hypothesis import strategies as st
from test_model import chosen
from torch import Tensor

from deskgpt import cpu_kernels, kernels
from deskgpt.kernels import causal_attention, chunked_cross_entropy, gelu_tanh, relu2
from deskgpt.kernels_self_test import LIMIT, add_norm, error_of, heads, shift

B, T, C, V = 3, 20, 8, 50


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Chunks of 16 tokens, also with our kernel, in any dtype; and one thread after the test."""
    monkeypatch.setattr(kernels, "LOGITS_ON_CPU", 16 * V)
    monkeypatch.setattr(kernels, "BYTES_WITH_KERNEL", 16 * V * 4)
    monkeypatch.setattr(kernels, "WHOLE_TILES", 1)
    yield
    torch.set_num_threads(1)


class Net(nn.Module):
    """Hidden states of some tokens, and a head with further parameters.

    `logits` is one of HEADS.
    """

    def __init__(self, logits):
        super().__init__()
        torch.manual_seed(0)

        def parameter(*shape):
            return nn.Parameter(torch.randn(shape))

        self.wte = parameter(V, C)
        self.head = parameter(V, C)
        self.bias = parameter(V)
        self.number = parameter(1)
        self.wide = parameter(4 * C, C)
        self.narrow = parameter(C, 4 * C)
        self.function = logits
        self.calls = 0
        self.kept: list[Tensor] = []

    def hidden(self, idx):
        x = F.rms_norm(F.embedding(idx, self.wte), (C,))
        self.activation = x.mean() * self.number
        return x

    def logits(self, x):
        self.calls += 1
        return self.function(self, x)


def by_rows(net, x):
    """Only tokens from 40 on, of which the first chunk has none, use the bias."""
    y = F.linear(x, net.head)
    rare = F.rms_norm(net.wte[40:], (C,)).detach()
    chosen = (x[..., None, :] == rare).all(-1).any(-1)
    return y.index_put((chosen,), (y[chosen] + net.bias).type_as(y)) if chosen.any() else y


def keeping(net, x):
    y = F.linear(x, net.head)
    net.kept.append(y.detach())
    return y


HEADS = {
    "linear": lambda net, x: F.linear(x, net.head),
    "tied": lambda net, x: F.linear(x, net.wte),
    "cap with a learned number": lambda net, x: (
        net.number * torch.tanh(F.linear(x, net.head) / net.number)
    ),
    "mlp": lambda net, x: F.linear(
        F.linear(F.gelu(F.linear(x, net.wide)), net.narrow) + x, net.head
    ),
    "head that is not trained": lambda net, x: F.linear(x, net.head.detach()),
    "activation": lambda net, x: F.linear(x, net.head) * net.activation,
    "no hidden states": lambda net, x: net.bias.expand(*x.shape[:-1], V),
    "masked token": lambda net, x: F.linear(x, net.head).index_fill(
        -1, torch.tensor([0]), -torch.inf
    ),
    "other parameters": by_rows,
    "weight cast and as it is": lambda net, x: F.linear(x, net.head).float() + net.head.sum(1),
}
AT_ONCE = {"activation"}


def a_batch():
    torch.manual_seed(1)
    idx = torch.randint(1, V, (B, T + 1))
    idx[0] = 1 + idx[0] % 20  # see by_rows
    y = idx[:, 1:].clone()
    y[0, 3:7] = -1
    y[2] = -1
    return idx[:, :-1], y


def plain(net, x, targets):
    return F.cross_entropy(net.logits(x).flatten(0, 1).float(), targets.flatten(), ignore_index=-1)


def chunked(net, x, targets):
    return chunked_cross_entropy(net.logits, x, targets, V)


def results(net, function, dtype="float32"):
    """The loss without and with gradients, and all gradients of two micro-batches."""
    idx, y = a_batch()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        with torch.no_grad():
            without = function(net, net.hidden(idx), y)
        values = [without]
        for ids, of_ids in ((idx, y), (idx.flip(0), y.flip(0))):
            values.append(function(net, net.hidden(ids), of_ids) * 0.5)
            values[-1].backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]
    return [value.detach() for value in values] + gradients


def assert_close(found, expected, dtype="float32"):
    assert all(x.isfinite().all() for x in expected)
    largest = max(x.norm() for x in expected)
    for a, b in zip(found, expected, strict=True):
        limit = 1e-5 if dtype == "float32" else 2e-2
        assert (a.float() - b.float()).norm() <= limit * max(b.norm(), 1e-2 * largest)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", HEADS)
def test_loss_in_chunks_is_the_plain_one_with_all_gradients(head, dtype, kernels):
    whole, parts = Net(HEADS[head]), Net(HEADS[head])
    expected = results(whole, plain, dtype=dtype)
    found = results(parts, chunked, dtype=dtype)
    assert_close(found, expected, dtype)
    assert parts.calls >= 3 * 2 or head in AT_ONCE


def test_loss_of_no_targets_is_zero_and_so_are_its_gradients(kernels):
    def untargeted(net, x, targets):
        return chunked(net, x, torch.full_like(targets, -1))

    assert not any(x.any() for x in results(Net(HEADS["mlp"]), untargeted))


def test_logits_that_a_model_keeps_for_its_log_stay_as_they_are(kernels):
    net = Net(keeping)
    results(net, chunked)
    idx, _ = a_batch()
    first = F.linear(net.hidden(idx), net.head).flatten(0, 1).detach()
    assert torch.equal(torch.cat([y.flatten(0, 1) for y in net.kept[:4]]), first)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hook_of_a_parameter_gets_each_gradient_once_and_whole(dtype):
    def seen(function):
        net = Net(HEADS["linear"])
        norms = []
        net.head.register_hook(lambda gradient: norms.append(gradient.norm()))
        results(net, function, dtype)
        return norms

    assert_close(seen(chunked), seen(plain), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_heads_that_share_a_matrix_in_one_pass(dtype):
    """As for the token after the next one. Autocast casts the matrix once, for both."""

    def two(function):
        def both(net: Net, x: Tensor, targets: Tensor) -> Tensor:
            later = F.linear(x[:, :-1], net.narrow @ net.wide)
            return function(net, x, targets) + 0.3 * function(net, later, targets[:, 1:])

        return both

    found = results(Net(HEADS["tied"]), two(chunked), dtype=dtype)
    assert_close(found, results(Net(HEADS["tied"]), two(plain), dtype=dtype), dtype)


def test_graph_can_be_kept_for_another_pass_and_a_second_derivative_is_refused():
    net = Net(HEADS["linear"])
    idx, targets = a_batch()
    value = chunked(net, net.hidden(idx), targets)
    (first,) = torch.autograd.grad(value, net.head, retain_graph=True)
    (second,) = torch.autograd.grad(2 * value, net.head)
    assert torch.equal(second, 2 * first)
    with raises_one_line(
        "no second derivative", "create_graph=True", "GPT.loss", kind=RuntimeError
    ):
        torch.autograd.grad(chunked(net, net.hidden(idx), targets), net.head, create_graph=True)


def test_further_loss_of_what_logits_has_kept_is_refused():
    """It would be that of the last chunk, and its gradient would end there."""

    def keeping_z(net, x):
        y = F.linear(x, net.head)
        net.kept = [y.logsumexp(-1)]
        return y

    net = Net(keeping_z)
    idx, targets = a_batch()
    total = chunked(net, net.hidden(idx), targets) + net.kept[0].square().mean()
    with raises_one_line("keeps a tensor", "GPT.logits", "GPT.forward", kind=RuntimeError):
        total.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax_that_a_card_compiles_is_torchs(dtype):
    torch.manual_seed(0)
    logits = torch.randn(7, 33).mul(4).to(dtype)
    index = torch.randint(33, (7, 1))
    ignored = torch.arange(7)[:, None] % 3 == 1
    p, log_p = kernels.fused_softmax(logits, ignored, index)
    expected = logits.log_softmax(1, dtype=torch.float32)
    torch.testing.assert_close(p, expected.exp().masked_fill(ignored, 0.0).to(dtype))
    torch.testing.assert_close(log_p, expected.gather(1, index))


# ---- kernels in C++ ------------------------------------------------------------------------------

torch_attention = functools.partial(F.scaled_dot_product_attention, is_causal=True)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(scope="module")
def built():
    """The path of the library, which is loaded."""
    if not cpu_kernels.is_supported_platform():
        pytest.skip("the kernels are for Linux on a processor with AVX2 or AVX-512")
    cpu_kernels.load()
    yield cpu_kernels.path()
    cpu_kernels.unload()


def needs(dtype):
    if dtype not in cpu_kernels.dtypes():
        pytest.skip("oneDNN does not multiply this type here")


def heads_of(B, H, T, D, dtype):
    """q, k and v (B, H, T, D), laid out as the layer has them."""
    torch.manual_seed(B + T + D)
    qkv = torch.randn(B, T, 3, H, D).to(dtype)
    return list(qkv.transpose(1, 3).unbind(2))


@DTYPES
@given(
    B=st.integers(1, 3),
    T=st.integers(1, 300),
    D=st.integers(1, 96),
    threads=st.integers(1, 16),
    rows=st.booleans(),
)
@example(B=1, T=1100, D=64, threads=3, rows=True)  # three chunks of keys
@example(B=1, T=2, D=1, threads=1, rows=False)  # a gradient of differences that nearly cancel
def test_attention_of_any_shape_and_its_gradients_are_torchs(built, dtype, B, T, D, threads, rows):
    """With more threads than heads, several take a part of one head. rows: the last dimension is
    contiguous.

    Of a few numbers in bfloat16, torch's flash attention can lie further than LIMIT from float64:
    like ours, its gradient comes from the rounded result. Torch takes it for contiguous rows only.
    """
    needs(dtype)
    q, k, v = heads_of(B, 2, T, D, dtype)
    of_torch = error_of(torch_attention, (q, k, v))
    if not rows:
        q = q.mT.contiguous().mT
    torch.set_num_threads(threads)
    assert error_of(causal_attention, (q, k, v)) <= max(LIMIT[dtype], 1.5 * of_torch)


@DTYPES
@given(
    n=st.integers(1, 3000), scale=st.floats(0.01, 30), name=st.sampled_from(cpu_kernels.ACTIVATIONS)
)
def test_activations_of_any_size_and_their_slopes_are_torchs(built, name, dtype, n, scale):
    needs(dtype)
    torch.manual_seed(n)
    x = (torch.randn(n) * scale).to(dtype)
    assert error_of(getattr(kernels, name), [x]) <= LIMIT[dtype]


@DTYPES
@given(
    T=st.integers(1, 300), D=st.integers(4, 48), threads=st.integers(1, 3), scale=st.floats(0.1, 30)
)
def test_norms_heads_and_token_shift_of_any_shape_are_torchs(built, dtype, T, D, threads, scale):
    """The norms' rows are of odd widths; of one or two channels, a gradient is rounding only."""
    needs(dtype)
    x, y, _ = heads_of(2, 3, T, 2 * D, dtype)
    x = x * scale
    torch.set_num_threads(threads)
    for kind in (kernels.RMSNorm, kernels.LayerNorm):
        odd = [each[..., 1:].contiguous() for each in (x, y)]
        assert error_of(functools.partial(add_norm, kind), odd) <= LIMIT[dtype]
    assert error_of(heads, [x]) <= LIMIT[dtype]
    assert error_of(shift, [x[0]]) <= LIMIT[dtype]


def test_results_are_the_same_to_the_last_bit_each_time(built):
    inputs = [x.requires_grad_() for x in heads_of(1, 1, 1100, 32, torch.float32)]
    q, k, v = inputs
    torch.set_num_threads(4)  # which share one head
    o = causal_attention(q, k, v)
    first = torch.autograd.grad(o.square().sum(), inputs, retain_graph=True)
    for _ in range(5):
        assert torch.equal(causal_attention(q, k, v), o)
        assert_equal(torch.autograd.grad(o.square().sum(), inputs, retain_graph=True), first)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_visible(built, bad):
    """exp_u20 would turn NaN into a number, and a run would continue with it."""
    q, k, v = heads_of(1, 1, 80, 16, torch.float32)
    q[:, :, 40] = bad
    q.requires_grad_()
    o = causal_attention(q, k, v)
    assert o[:, :, 40].isnan().all()
    assert o[:, :, :40].isfinite().all()
    assert not torch.autograd.grad(o.sum(), q)[0].isfinite().all()
    logits = torch.randn(4, 100)
    logits[2, 50] = bad
    p, log_p = cpu_kernels.softmax(logits, torch.zeros(4, dtype=torch.int64))
    assert p[2].isnan().all()
    assert not log_p[2].isfinite()
    assert p[[0, 1, 3]].isfinite().all()


def test_target_beyond_the_vocabulary_is_an_error_and_reads_nothing_else(built):
    for target in (10, 10**9, -1):
        with pytest.raises(RuntimeError, match=f"target {target} is not a token below 10"):
            cpu_kernels.softmax(torch.randn(2, 10), torch.tensor([0, target]))


def test_what_the_kernels_are_not_made_for_is_left_to_torch(built):
    for dtype in (torch.float16, torch.float64):
        q, k, v = heads_of(2, 4, 70, 16, dtype)
        assert torch.equal(causal_attention(q, k, v), torch_attention(q, k, v))
    q = torch.randn(0, 2, 70, 16)
    assert causal_attention(q, q, q).shape == q.shape
    q, k, v = heads_of(2, 4, 70, 16, torch.float32)
    with pytest.raises(AssertionError):  # one head of keys for several of queries: not a crash
        torch.ops.deskgpt.causal_attention(q, k[:, :1], v[:, :1])
    torch.manual_seed(0)
    dropped = causal_attention(q, k, v, 0.5)
    torch.manual_seed(0)
    assert torch.equal(dropped, torch_attention(q, k, v, dropout_p=0.5))
    for x in (torch.randn(0, 3), torch.randn(5, 3, dtype=torch.float64)):
        assert torch.equal(relu2(x), F.relu(x).square())
        assert torch.equal(gelu_tanh(x), F.gelu(x, approximate="tanh"))


# ---- a library that is wrong ---------------------------------------------------------------------


@pytest.fixture
def elsewhere(built, tmp_path, monkeypatch):
    """An empty cache, and no library in this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_kernels, "_library", None)
    monkeypatch.setattr(cpu_kernels, "_dtypes", ())
    return tmp_path


@slow
def test_library_that_computes_something_else_is_not_used_and_one_line_says_so(
    elsewhere, monkeypatch, capsys
):
    """As a compiler with a defect would make it."""
    source = cpu_kernels.SOURCE.read_text()
    factor = "0.0713548162726f"  # in gelu_tanh
    assert factor in source
    planted = elsewhere / "cpu_kernels.cpp"
    planted.write_text(source.replace(factor, "0.0763548162726f"))
    monkeypatch.setattr(cpu_kernels, "SOURCE", planted)
    assert not chosen(CPU, dtype="float32").cpu_kernels
    line = capsys.readouterr().out.splitlines()[-1]
    assert_one_line(line, "NOT using C++ kernels", "gelu_tanh", "off by")
    assert not list(elsewhere.rglob("*.so"))
    assert cpu_kernels.dtypes() == ()


@pytest.mark.parametrize("compiler", ["false", "ccache-that-is-none g++"])
def test_machine_without_a_compiler_uses_torch_and_one_line_says_so(
    compiler, elsewhere, monkeypatch, capsys
):
    monkeypatch.setenv("CXX", compiler)
    assert not chosen(CPU, dtype="float32").cpu_kernels
    assert_one_line(
        capsys.readouterr().out.splitlines()[-1], "NOT using C++ kernels", "may be slower"
    )


def test_library_of_other_bytes_or_that_others_can_write_is_not_loaded(
    built, elsewhere, monkeypatch
):
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
