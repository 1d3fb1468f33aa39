"""The model; how a run computes it, chosen by rule and compiled; and what --dry_run finds wrong
with it.
"""

import itertools
import math
import random
import re
import shutil
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from conftest import CPU, CUDA, assert_equal, raises_one_line, slow
from tiny_models import MODERN, SMALL, make, tokens
from torch.utils.flop_counter import FlopCounterMode

from deskgpt import cpu_kernels
from deskgpt.check_model import check_model
from deskgpt.compiling import apply_compute, choose_compute, saved_compute, work_around_gcc
from deskgpt.compute import ComputeMode, autocast
from deskgpt.deskgpt_ops import rotate
from deskgpt.distributed import DistContext
from deskgpt.kernels import causal_attention, gradients_of_chunk
from deskgpt.kv_cache import KVCache
from model import GPT, GPTConfig
from train import TrainConfig, forward_backward

# ---- the model -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "dropout"), [(SMALL, 0.3), (MODERN, 0.0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_that_are_computed_again_leave_gradients_bit_equal(
    config, dropout, dtype, kernels
):
    model = make(replace(config, dropout=dropout))
    idx = tokens(3, 32)
    found = {}
    flops = {}
    for which in ("none", "full"):
        apply_compute(model, ComputeMode(dtype, recompute=which))
        torch.manual_seed(3)
        with FlopCounterMode(display=False) as counter:
            with autocast(CPU, dtype, cached=which == "none"):
                loss = model(idx, idx.roll(-1, 1))[1]
            loss.backward()
        flops[which] = counter.get_total_flops()
        gradients = [p.grad for p in model.parameters()]
        # The random numbers after it are the same, too.
        found[which] = [loss.detach(), *gradients, torch.rand(3)]
        model.zero_grad()
    assert_equal(found["full"], found["none"])
    assert flops["none"] < flops["full"]


def test_rotated_queries_meet_keys_by_their_distance_alone():
    transformer: Any = make(MODERN).transformer
    q, k = torch.randn(2, 1, 1, 1, 8).expand(2, 1, 1, 32, 8)
    rotated = rotate(q, transformer.rotary)
    scores = rotated[0, 0] @ rotate(k, transformer.rotary)[0, 0].t()
    for distance in range(-31, 32):
        assert scores.diagonal(distance).std(correction=0) < 1e-5
    assert scores[:, 0].std() > 1e-2
    torch.testing.assert_close(rotated.norm(dim=-1), q.norm(dim=-1))


def test_weights_begin_as_the_settings_say():
    """Tied or not; residual projections are smaller with depth, or zero."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=8, vocab_size=64, n_layer=8, n_head=2, n_embd=128))
    assert model.lm_head.weight is model.transformer.wte.weight
    block: Any = model.transformer.h[0]
    smaller = 0.02 / math.sqrt(16)
    stds = {block.mlp.c_fc: 0.02, block.mlp.c_proj: smaller, block.attn.c_proj: smaller}
    for layer, std in stds.items():
        assert layer.weight.std().item() == pytest.approx(std, rel=0.05)
    idx = tokens(2, 32)
    assert GPT(MODERN)(idx, idx)[1].item() == pytest.approx(math.log(100), abs=1e-6)
    # Only what the blocks add is zero.
    tied = GPT(replace(MODERN, tie_weights=True, embedding_norm=False)).transformer
    assert torch.equal(tied(idx), F.rms_norm(tied.wte(idx), (32,), eps=1e-5))


def test_counts_of_gpt2_small_are_those_of_the_paper_and_palm_appendix_b():
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=50257, bias=True))
    assert sum(p.numel() for p in model.parameters()) == 124_439_808
    assert model.num_params() == 124_439_808 - 1024 * 768
    assert model.estimate_flops() == 6 * 123_653_376 + 12 * 12 * 12 * 64 * 1024


@pytest.mark.parametrize("tied", [True, False])
def test_estimated_flops_are_those_that_torch_counts(tied):
    model = GPT(replace(SMALL, block_size=4, vocab_size=1000, tie_weights=tied))
    idx = tokens(2, 4)
    with FlopCounterMode(display=False) as counter:
        model(idx, idx)[1].backward()
    assert model.estimate_flops() * idx.numel() == pytest.approx(
        counter.get_total_flops(), rel=0.05
    )


@pytest.mark.parametrize("config", [SMALL, MODERN])
def test_cropped_model_computes_the_same_on_short_contexts(config):
    model, idx = make(config).requires_grad_(False), tokens(2, 12)
    before = model(idx)[0]
    model.crop_block_size(12)
    assert torch.equal(model(idx)[0], before)
    assert model.config.block_size == 12
    assert not any(p.requires_grad for p in model.parameters())  # what is frozen stays frozen
    full = KVCache(12)
    full.length = 12
    for n, cache in ((13, None), (1, full)):
        with raises_one_line(13, "block_size=12"):
            model.transformer(tokens(2, n), cache)
    with raises_one_line("--block_size=12"):
        model.crop_block_size(13)


def test_impossible_settings_and_weights_of_another_shape_are_named():
    with raises_one_line("position='rotary'", "learned, rope"):
        GPTConfig(position="rotary")  # type: ignore[arg-type]
    with raises_one_line("even width", "3"):
        GPTConfig(position="rope", n_embd=33, n_head=11)
    for width in (8, 10**6):  # the large one's 48 TB are not taken
        with raises_one_line("out"):
            GPT.from_state(replace(SMALL, n_head=1, n_embd=width), make().state_dict(), "out")


def test_block_that_a_second_pass_would_change_is_refused():
    model = make()
    apply_compute(model, ComputeMode(recompute="full"))
    block: Any = model.transformer.h[0]
    block.register_buffer("mean", torch.zeros(()))
    idx = tokens(2, 8)
    count = itertools.count(1)
    for hook in (
        lambda module, args, y: y + block.mean.add_(1),
        lambda *_: setattr(block, "mean", block.mean + 1),
        lambda module, args, y: y * random.random(),
        lambda module, args, y: y * next(count),  # in its fourth pass, which is checked
    ):
        handle = block.ln_1.register_forward_hook(hook)
        with raises_one_line("activation_checkpoint=full", "--activation_checkpoint=none"):
            model(idx, idx)[1].backward()
        with torch.no_grad():
            model(idx)  # without gradients nothing is computed again
        handle.remove()


def test_dropout_acts_on_embeddings_attention_and_both_outputs_of_a_block_in_training_only(
    monkeypatch,
):
    model = make(replace(SMALL, n_layer=1, dropout=0.3))
    rates = []

    def dropout(x, p, training, inplace):
        rates.append(p * training)
        return x

    def attention(q, k, v, dropout_p, is_causal):
        rates.append(dropout_p)
        return q

    monkeypatch.setattr(F, "dropout", dropout)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    for training in (True, False):
        rates.clear()
        model.train(training)(tokens(2, 8))
        assert rates == [0.3 * training] * 4


# ---- chosen by rule ------------------------------------------------------------------------------


@pytest.fixture
def card(monkeypatch):
    """Set up a card with Triton, and a machine without a compiler for our kernels."""
    monkeypatch.setattr("deskgpt.compiling.has_triton", lambda device: True)
    monkeypatch.setattr("deskgpt.compiling.default_dtype", lambda device: "bfloat16")
    monkeypatch.setattr(cpu_kernels, "is_supported_platform", lambda: False)


def chosen(device=CUDA, earlier=None, **settings):
    dist = DistContext(device, world=settings.get("dp_shard", 1))
    return choose_compute(TrainConfig(**settings), dist, earlier or {})


def test_card_computes_in_bfloat16_compiled_and_with_a_graph_and_a_cpu_compiles_only_if_asked(card):
    assert chosen() == ComputeMode("bfloat16", True, False, "none", "bfloat16", cuda_graph=True)
    assert chosen(max_iters=1) == chosen()  # a trial is the same program as the long run
    with raises_one_line("cuda_graph=True", "--cuda_graph=auto"):
        chosen(cuda_graph=True, activation_checkpoint="full")
    assert chosen(dtype="float32", activation_checkpoint="full") == ComputeMode(
        "float32", True, recompute="full"
    )
    assert chosen(dp_shard=2, dtype="float16").dtype == "float32"
    assert chosen(CPU) == ComputeMode("bfloat16")
    assert chosen(CPU, compile=True).compiled
    with raises_one_line("cpu_kernels=True", "--cpu_kernels=auto"):
        chosen(CPU, cpu_kernels=True)


def test_run_without_our_kernels_uses_none_that_another_run_has_loaded(kernels):
    chosen(CPU, cpu_kernels=False)
    assert cpu_kernels.dtypes() == ()


def test_resumed_run_computes_as_before_on_the_same_kind_of_device(card):
    earlier = asdict(ComputeMode("float32", compiled=True)) | {"device": "cuda"}
    eager = saved_compute(earlier | {"compiled": False}, CUDA)
    assert not chosen(compile="auto", earlier=eager).compiled
    found = chosen(earlier=saved_compute(earlier, CUDA))
    assert found == ComputeMode("float32", True, cuda_graph=True)
    for useless in (earlier, None, {"dtype": "int4", "compiled": 1}):
        assert saved_compute(useless, CPU) == {}


@pytest.mark.parametrize("residual", ["float32", "bfloat16"])
def test_compute_mode_is_what_the_model_computes_in(residual):
    model = make(replace(SMALL, n_layer=1))
    apply_compute(model, ComputeMode("bfloat16", residual_dtype=residual))
    seen = []
    model.transformer.h[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    with autocast(CPU, "bfloat16"):
        model(tokens(1, 8))
    assert seen == [getattr(torch, residual)]


@pytest.mark.parametrize(
    ("compiler", "flags"), [("/usr/bin/g++", "off -mno-align-stringops"), ("clang++-17", "off")]
)
def test_gcc_is_called_without_the_copies_that_it_gets_wrong_before_version_14(
    compiler, flags, monkeypatch
):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: compiler)
    with inductor_config.patch({"cpp.enable_floating_point_contract_flag": "off"}):
        for _ in range(2):  # a second time changes nothing
            work_around_gcc()
        assert inductor_config.cpp.enable_floating_point_contract_flag == flags


# ---- checked -------------------------------------------------------------------------------------


def problems_of(model, compute=None):
    idx = tokens(2, 33)
    mode = compute or ComputeMode()
    return check_model(model, mode, idx[:, :-1], idx[:, 1:], forward_backward)


def seeing_the_future(q, k, v, context, dropout):
    return F.scaled_dot_product_attention(q, k, v)


def another_loss(smoothing, is_whole):
    """Return a loss with label smoothing, or one whose gradients end at the head."""

    def loss(self, x, targets):
        logits = self.logits(x if is_whole else x.detach()).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), label_smoothing=smoothing)

    return loss


def rounding(x):
    """An activation that is wrong in bfloat16 only."""
    y = F.gelu(x, approximate="tanh")
    return y * 1.5 if y.dtype == torch.bfloat16 else y


@pytest.mark.parametrize("config", [SMALL, MODERN])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nothing_is_wrong_with_the_model_as_it_is(config, dtype):
    model = make(config)
    kernels = cpu_kernels.is_supported_platform() and dtype != "float16"
    residual = "bfloat16" if dtype == "bfloat16" else "float32"
    compute = ComputeMode(dtype, cpu_kernels=kernels, residual_dtype=residual)
    assert problems_of(model, compute) == []
    assert_equal(dict(model.state_dict()), dict(make(config).state_dict()))  # as before
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    cpu_kernels.unload()


@slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_compiled_blocks_compute_what_the_model_says(monkeypatch):
    # So that the loss is computed in chunks.
    monkeypatch.setattr("deskgpt.kernels.LOGITS_ON_CPU", 1000)
    assert (
        problems_of(make(replace(MODERN, n_layer=1)), ComputeMode("bfloat16", compiled=True)) == []
    )


def doubled(*args):
    """Return a gradient of hidden states that is twice as large, of a chunk of the loss."""
    found: Any = gradients_of_chunk(*args)
    return found[0], 2 * found[1], found[2]


def losing_a_position(q, k, v, dropout):
    """A kernel of ours that is wrong: one of 32 positions is not a number."""
    y = causal_attention(q, k, v, dropout)
    is_last = torch.arange(q.size(2))[:, None] == q.size(2) - 1
    return torch.where(is_last, torch.nan, y) if cpu_kernels.dtypes() else y


@pytest.mark.parametrize(
    ("changed", "change", "named"),
    [
        # Of layers that begin as zeros, too.
        ("model.attention", seeing_the_future, "tokens see later ones"),
        ("model.GPT.loss", another_loss(0.1, True), "is not the cross-entropy of the logits"),
        ("model.GPT.loss", another_loss(0.0, False), r"no gradient reaches transformer\..* more"),
        ("model.gelu_tanh", rounding, "bfloat16.* the gradient of .* differs from eager float32's"),
        ("deskgpt.kernels.gradients_of_chunk", doubled, "loss in 3 chunks: the gradient of"),
        (
            "model.causal_attention",
            losing_a_position,
            "bfloat16, C.. kernels, not compiled, loss in 3 chunks: the gradient",
        ),
    ],
)
def test_change_that_breaks_the_model_is_named(changed, change, named, monkeypatch):
    needs_kernels = change is losing_a_position
    if needs_kernels and not cpu_kernels.is_supported_platform():
        pytest.skip("our kernels are for Linux on a processor with AVX2 or AVX-512")
    monkeypatch.setattr(changed, change)
    model = GPT(MODERN) if change is seeing_the_future else make()
    problems = problems_of(model, ComputeMode("bfloat16", cpu_kernels=needs_kernels))
    cpu_kernels.unload()
    assert re.search(named, problems[-1])
    assert "\n" not in problems[-1]


def test_parameter_that_nothing_uses_is_named_and_one_that_is_not_trained_is_not():
    model = make()
    model.register_parameter("scale", torch.nn.Parameter(torch.ones(3)))
    assert problems_of(model) == ["no gradient reaches scale"]
    model.get_parameter("scale").requires_grad_(False)
    assert problems_of(model) == []
