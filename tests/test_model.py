from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import MODERN, MODERN_SETTINGS, SMALL, make, tokens
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel

from deskgpt.compute.optimizer import make_optimizer
from deskgpt.compute.runner import Form, Runner
from deskgpt.faster import kernels
from deskgpt.machine import hardware
from deskgpt.share.gpt2_weights import load_gpt2
from model import ATTENTION, GPT, Block, GPTConfig, is_kept, rotate


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("vocab", [65, 50304])
def test_initial_loss_is_near_ln_of_the_vocabulary(vocab):
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=64, vocab_size=vocab, n_layer=2, n_head=2, n_embd=64))
    _, loss = model(tokens(8, 64, vocab=vocab), tokens(8, 64, vocab=vocab).flip(0))
    assert abs(loss.item() - math.log(vocab)) < 0.05


@pytest.mark.parametrize("config", [SMALL, MODERN])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # explicit attention
def test_causality_later_tokens_leave_earlier_logits_alone(config, dtype):
    model, idx = make(config), tokens(2, 32)
    changed = idx.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 100
    with hardware.autocast(torch.device("cpu"), dtype):
        a, b = (model(ids)[0].float() for ids in (idx, changed))
    torch.testing.assert_close(a[:, :20], b[:, :20], rtol=0, atol=1e-6)
    assert (a[:, 20:] - b[:, 20:]).abs().amax(-1).min() > 1e-3


# ---- activation checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [SMALL, MODERN])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_that_are_computed_again_leave_gradients_bit_equal(config, dropout, dtype):
    model = make(replace(config, dropout=dropout))
    names = list(model.state_dict())
    idx = tokens(3, 32)
    results = []
    for which in ("none", "full", "selective"):
        model.checkpoint_activations(which)
        assert list(model.state_dict()) == names
        for explicit in (False, True):
            runner = Runner(model, Form(dtype, explicit=explicit))
            torch.manual_seed(3)
            loss = runner.backward(idx, idx.roll(-1, 1))
            results.append([loss, *gradients(model).values(), torch.rand(3)])  # the same random stream afterwards
            runner.drop_gradients()
    for i, found in enumerate(results[2:]):
        assert all(torch.equal(a, b) for a, b in zip(found, results[i % 2], strict=True))


@pytest.mark.parametrize("which", ["full", "selective"])
def test_only_passes_with_gradients_are_checkpointed(which, monkeypatch):
    model = make(MODERN)
    model.checkpoint_activations(which)
    blocks = []
    compute = Block.compute

    def counted(block, *args):
        blocks.append(block)
        return compute(block, *args)

    monkeypatch.setattr(Block, "compute", counted)
    loss = model(tokens(2, 32), tokens(2, 32))[1]
    loss.backward()
    assert len(blocks) == 2 * MODERN.n_layer
    blocks.clear()

    def refuse(*args, **options):
        raise AssertionError

    monkeypatch.setattr("model.checkpoint", refuse)
    with torch.no_grad():
        model(tokens(2, 32), tokens(2, 32))
    list(model.generate(tokens(2, 4), 3))
    model.checkpoint_activations("none")
    model(tokens(2, 32), tokens(2, 32))
    assert blocks


def test_selective_checkpoints_compute_one_matmul_again_and_all_that_draws_random_numbers():
    for attention in ATTENTION:
        assert is_kept(0.0, None, attention)
        assert not is_kept(0.1, None, attention)
    flops = {}
    for which in ("none", "selective", "full"):
        model = make(SMALL)
        model.checkpoint_activations(which)
        with FlopCounterMode(display=False) as counter:
            model(tokens(2, 32), tokens(2, 32))[1].backward()
        flops[which] = counter.get_total_flops()
    first_of_mlp = 2 * (2 * 32) * SMALL.n_embd * (4 * SMALL.n_embd)
    assert flops["selective"] == flops["none"] + SMALL.n_layer * first_of_mlp < flops["full"]


# ---- GPT-2 as transformers has it ----------------------------------------------------------------------------


def hugging_face() -> GPT2LMHeadModel:
    torch.manual_seed(2)
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=100,
            n_positions=32,
            n_layer=2,
            n_head=4,
            n_embd=32,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return theirs


def assert_same_model(ours: GPT, theirs: GPT2LMHeadModel) -> None:
    """Logits, loss and every gradient agree within 1e-5."""
    idx = tokens(3, 32)
    targets = torch.cat((idx[:, 1:], torch.full((3, 1), -1)), 1)  # transformers shifts the labels itself
    theirs.zero_grad(set_to_none=True)
    out = theirs(input_ids=idx, labels=idx)
    out.loss.backward()
    _, loss = ours(idx, targets)
    loss.backward()
    torch.testing.assert_close(ours(idx)[0], out.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, out.loss, rtol=1e-5, atol=1e-5)
    their_gradients = gradients(theirs)
    our_gradients = gradients(ours)
    assert len(our_gradients) == len(their_gradients)
    for name, g in our_gradients.items():
        other: Any = their_gradients.get(name)
        if other is None:  # the tied matrix has the other of its two names
            assert name == "lm_head.weight" or name == "transformer.wte.weight"
            other = theirs.transformer.wte.weight.grad
        torch.testing.assert_close(g, other.t() if is_conv1d(name) else other, rtol=1e-5, atol=1e-5, msg=name)


def is_conv1d(name: str) -> bool:
    return ".h." in name and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))


def test_weights_of_transformers_gpt2_give_its_logits_loss_and_gradients_here(tmp_path):
    theirs = hugging_face()
    theirs.save_pretrained(tmp_path)
    model_args, weights = load_gpt2(str(tmp_path))
    assert_same_model(GPT.from_state(GPTConfig(**model_args), weights, "gpt2"), theirs)


def test_our_weights_give_our_logits_loss_and_gradients_in_transformers():
    ours, theirs = make(), hugging_face()
    state = {k: v.t() if is_conv1d(k) else v for k, v in ours.state_dict().items()}
    theirs.load_state_dict(state, strict=True)
    assert_same_model(ours, theirs)


# ---- loss ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 96])
def test_loss_in_chunks_equals_the_plain_loss_and_its_gradients(chunk, monkeypatch):
    model, idx, targets = make(), tokens(3, 32), tokens(3, 32).flip(0)
    targets[0, :10] = -1
    logits = model(idx)[0]
    plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    plain.backward()
    expected = gradients(model)
    model.zero_grad(set_to_none=True)
    monkeypatch.setattr(kernels, "LOGITS_ON_CPU", chunk * 100)
    loss = model(idx, targets)[1]
    loss.backward()
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=1e-6)
    for name, g in gradients(model).items():
        torch.testing.assert_close(g, expected[name], rtol=1e-5, atol=1e-7, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(model(idx, targets)[1], loss, rtol=1e-6, atol=1e-6)


def loss_and_gradients(loss: Any, chunk: int | None, targets: torch.Tensor) -> list[torch.Tensor]:
    """Of `loss`, a function of hidden states, weight and targets, with this number of logits in a chunk."""
    h, w = torch.randn(12, 8, generator=seeded(0)), torch.randn(20, 8, generator=seeded(1))
    h, w = h.requires_grad_(), w.requires_grad_()
    with kernels.loss_chunk(chunk):
        value = loss(h, w, targets) / 3
    return [value.detach(), *torch.autograd.grad(value, (h, w))]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("chunk", [None, 100, kernels.WHOLE], ids=["small", "in chunks", "whole"])
def test_loss_without_targets_is_zero_with_gradients_of_zero_and_others_are_torchs(chunk):
    for values in loss_and_gradients(kernels.linear_cross_entropy, chunk, torch.full((12,), -1)):
        assert not values.any()  # NaN would be true
    targets = torch.randint(0, 20, (12,), generator=seeded(2))
    targets[3:5] = -1
    ours = loss_and_gradients(kernels.linear_cross_entropy, chunk, targets)
    plain = loss_and_gradients(lambda h, w, t: F.cross_entropy(F.linear(h, w), t, ignore_index=-1), chunk, targets)
    for a, b in zip(ours, plain, strict=True):
        if chunk == 100:
            torch.testing.assert_close(a, b)
        else:
            assert torch.equal(a, b)  # bit for bit


@pytest.mark.slow
def test_compiled_loss_without_targets_is_zero_with_gradients_of_zero():
    kernels.register_operators()
    compiled = torch.compile(kernels.linear_cross_entropy)
    try:
        found = loss_and_gradients(compiled, None, torch.full((12,), -1))
    except Exception as e:
        if "compiler" in str(e).lower():
            pytest.skip("no working C++ compiler here")
        raise
    for values in found:
        assert not values.any()


def test_loss_in_chunks_under_bfloat16_autocast_stays_close_to_float32(monkeypatch):
    model, idx, targets = make(), tokens(3, 32), tokens(3, 32).flip(0)
    exact = model(idx, targets)[1]
    monkeypatch.setattr(kernels, "LOGITS_ON_CPU", 1600)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(idx, targets)[1]
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=0.01, atol=0)


def test_evaluation_in_chunks_takes_the_forward_matmul_only(monkeypatch):
    monkeypatch.setattr(kernels, "LOGITS_ON_CPU", 1000)
    model, x = make(), tokens(2, 32)
    flops = {}
    for grad in (False, True):
        with torch.set_grad_enabled(grad), FlopCounterMode(display=False) as counter:
            model(x, x)
        flops[grad] = counter.get_total_flops()
    head = 2 * 64 * 32 * 100  # one of the three matmuls of the head
    assert flops[True] - flops[False] == 2 * head


@pytest.mark.parametrize(("gb", "tokens"), [(8, 4096), (12, 4096), (24, 8192), (80, 16384), (141, 16384)])
def test_chunks_on_a_gpu_are_thousands_of_tokens_by_its_memory(gb, tokens):
    logits = kernels.logits_for_memory(gb * 2**30)
    assert kernels.tokens_per_chunk(128 * 1024, 50304, logits) == tokens
    assert kernels.tokens_per_chunk(2 * 1024, 50304, logits) == 2048  # all of a small micro-batch


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 18), st.integers(1, 1 << 30))
def test_chunks_hold_no_more_logits_than_allowed_and_are_whole_tiles(N, V, logits):
    tokens = kernels.tokens_per_chunk(N, V, logits)
    assert 1 <= tokens <= N
    assert tokens == 1 or tokens * V <= logits
    if 128 <= logits // V < N:
        assert tokens % 128 == 0


def test_chunks_of_whole_batches_are_equally_large():
    for N in (8 * 1024, 12 * 1024, 16 * 256, 20 * 1024, 64 * 1024):
        for logits in (kernels.LOGITS_ON_CPU, kernels.logits_for_memory(24 * 2**30)):
            assert N % kernels.tokens_per_chunk(N, 50304, logits) == 0


def test_gradient_of_the_head_is_summed_in_its_own_precision():
    a, b = torch.randn(40, 30).bfloat16(), torch.randn(30, 20).bfloat16()
    for total_dtype, x, y in ((torch.float32, a, b), (torch.float32, a.float(), b.float()), (torch.bfloat16, a, b)):
        total = torch.ones(40, 20, dtype=total_dtype)
        kernels.add_matmul_(total, x, y)
        expected = 1 + a.float() @ b.float()
        assert (total - expected).norm() < (1e-6 if x.dtype == torch.float32 else 5e-3) * expected.norm()
        # The call that CUDA gets, checked for its types and shapes.
        kernels.add_matmul_(total.to("meta"), x.to("meta"), y.to("meta"))


@pytest.mark.slow
def test_large_vocabulary_never_holds_all_logits():
    # 4096 tokens x 50304 ids are 824 MB in float32: forward and backward must stay below that together.
    code = """
import torch
from deskgpt.machine.hardware import peak_memory_bytes
from model import GPT, GPTConfig
cpu = torch.device("cpu")
torch.manual_seed(0)
model = GPT(GPTConfig(block_size=512, vocab_size=50304, n_layer=1, n_head=1, n_embd=32))
x = torch.randint(0, 50304, (8, 512))
model(x[:, :1], x[:, :1])[1].backward()
before = peak_memory_bytes(cpu)
model(x, x)[1].backward()
print(peak_memory_bytes(cpu) - before)
"""
    if hardware.peak_memory_bytes(torch.device("cpu")) is None:
        pytest.skip("this system does not tell the peak memory of a process")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 1e6 < int(done.stdout) < 4096 * 50304 * 4 * 0.75


# ---- modern choices ----------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [5, 64, 256, 300, 1024])  # in 1, 1, 2, 3 and 4 blocks
def test_explicit_attention_is_attention_with_its_gradients(T):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, T, 16, requires_grad=True) for _ in range(3))
    ours = kernels.attention_by_matmuls(q, k, v)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    upstream = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad(y, (q, k, v), upstream) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_explicit_attention_is_for_training_without_dropout_where_it_was_asked_for(monkeypatch):
    used = []

    def attention(q, k, v):
        used.append(q.shape)
        return v

    monkeypatch.setattr(kernels, "attention_by_matmuls", attention)
    idx = tokens(2, 20)
    for explicit in (False, True):
        plain = Runner(make(), Form(explicit=explicit))
        dropped = Runner(make(replace(SMALL, dropout=0.1)), Form(explicit=explicit))
        dropped.backward(idx, idx)
        plain.loss(idx, idx)  # without a backward pass, flash attention is the faster
        assert not used
        plain.backward(idx, idx)
        assert used == [(2, 4, 20, 8)] * 2 * explicit
    plain.model(idx, idx)[1].backward()  # outside the runner
    assert len(used) == 2


def test_rotated_queries_meet_keys_by_their_distance_alone():
    transformer: Any = make(MODERN).transformer
    q, k = (torch.randn(1, 1, 1, 8).expand(1, 1, 32, 8) for _ in "qk")
    scores = rotate(q, transformer.rotary)[0, 0] @ rotate(k, transformer.rotary)[0, 0].t()
    for distance in range(-31, 32):
        assert scores.diagonal(distance).std(correction=0) < 1e-5
    assert scores[:, 0].std() > 1e-2
    torch.testing.assert_close(rotate(q, transformer.rotary).norm(dim=-1), q.norm(dim=-1))


def test_activations_are_what_their_names_say():
    x = torch.linspace(-4, 4, 1001, dtype=torch.float64)
    exact = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    tanh = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    for name, expected in (("gelu", exact), ("gelu_tanh", tanh), ("relu2", x.clamp(min=0) ** 2)):
        torch.testing.assert_close(kernels.activation(x, name), expected)


def test_queries_and_keys_are_normalised_where_asked():
    """Then their length does not matter."""
    for config, same in ((MODERN, True), (replace(MODERN, qk_norm=False), False)):
        model, idx = make(config), tokens(2, 32)
        before = model(idx)[0]
        block: Any = model.transformer.h[0]
        with torch.no_grad():
            block.attn.c_attn.weight[:64] *= 3  # of q and k
        assert torch.allclose(model(idx)[0], before, atol=1e-3) == same


def test_model_that_begins_as_zero_predicts_all_tokens_alike():
    torch.manual_seed(0)
    assert GPT(MODERN)(tokens(2, 32), tokens(2, 32))[1].item() == pytest.approx(math.log(100), abs=1e-6)
    tied = GPT(replace(MODERN, tie_weights=True))  # the head is the embedding: only what the blocks add is zero
    h = tied.transformer(tokens(2, 32))
    assert torch.equal(h, F.rms_norm(tied.transformer.wte(tokens(2, 32)), (32,), eps=1e-5))


def test_untied_embedding_is_a_parameter_but_multiplies_nothing():
    tied, untied = (GPT(replace(MODERN, tie_weights=tie)) for tie in (True, False))
    assert untied.lm_head.weight is not untied.transformer.wte.weight
    assert untied.num_params() == tied.num_params() + 100 * 32
    assert untied.estimate_flops() == tied.estimate_flops()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"position": "rotary"}, "position='rotary' is not one of learned, rope"),
        ({"activation": "swish"}, "activation='swish' is not one of gelu_tanh, gelu, relu2"),
        ({"position": "rope", "n_embd": 33, "n_head": 11}, "heads of an even width, not 3"),
    ],
)
def test_choices_that_do_not_exist_are_named(settings, reason):
    with pytest.raises(ValueError, match=reason):
        GPTConfig(**settings)


# ---- parameters ----------------------------------------------------------------------------------------------


def test_counts_of_gpt2_small_are_those_of_the_paper_and_palm_appendix_b():
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=50257, bias=True))
    assert sum(p.numel() for p in model.parameters()) == 124_439_808
    assert model.num_params() == 124_439_808 - 1024 * 768
    assert model.estimate_flops() == 6 * 123_653_376 + 12 * 12 * 12 * 64 * 1024


@pytest.mark.parametrize(
    "settings",
    [{}, {"bias": True}, {"norm": "rms"}, {"norm": "rms", "bias": True}, {"tie_weights": False}, MODERN_SETTINGS],
)
def test_parameters_are_counted_before_a_model_is_built(settings):
    config = GPTConfig(n_layer=3, n_head=2, n_embd=12, block_size=7, vocab_size=11, **settings)
    assert config.count_parameters(11) == sum(p.numel() for p in GPT(config).parameters())


def test_head_is_tied_and_residual_projections_start_smaller_with_depth():
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=8, vocab_size=64, n_layer=8, n_head=2, n_embd=128))
    assert model.lm_head.weight is model.transformer.wte.weight
    block: Any = model.transformer.h[0]
    assert block.mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for projection in (block.mlp.c_proj, block.attn.c_proj):
        assert projection.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.05)


def test_only_matrices_decay():
    model = make()
    optimizer = make_optimizer(model, "adamw", 0.1, 1e-3, (0.9, 0.95), 0.95, "cpu")
    decayed, others = (group["params"] for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert {p.dim() for p in decayed} == {2}
    assert {p.dim() for p in others} == {1}
    assert len(decayed) + len(others) == len(list(model.parameters()))


def test_biases_are_optional():
    names = [name for name, _ in GPT(replace(SMALL, bias=False)).named_parameters()]
    assert not [name for name in names if name.endswith("bias")]


@pytest.mark.parametrize("config", [SMALL, MODERN])
def test_cropped_model_computes_the_same_on_short_contexts(config):
    model, idx = make(config), tokens(2, 12)
    before = model(idx)[0]
    model.crop_block_size(12)
    assert torch.equal(model(idx)[0], before)
    assert model.config.block_size == 12
    with pytest.raises(ValueError, match="13 tokens do not fit into block_size=12"):
        model(tokens(2, 13))
    with pytest.raises(ValueError, match="--block_size=12"):
        model.crop_block_size(13)


def test_dropout_acts_in_training_only():
    model = make(replace(SMALL, dropout=0.5))
    idx = tokens(2, 32)
    assert not torch.equal(model(idx)[0], model(idx)[0])
    model.eval()
    assert torch.equal(model(idx)[0], model(idx)[0])


# ---- bad arguments -------------------------------------------------------------------------------------------


def test_heads_that_do_not_divide_the_width_name_the_nearest_that_do():
    with pytest.raises(ValueError, match="n_embd=30 is not a multiple of n_head=4; try --n_head=3"):
        GPTConfig(n_embd=30, n_head=4)


@pytest.mark.parametrize(("name", "value"), [("n_layer", 0), ("vocab_size", -1), ("dropout", 1.0), ("dropout", -0.1)])
def test_impossible_sizes_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        GPTConfig(**{name: value})


def test_weights_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="not a GPT of"):
        GPT.from_state(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=9), make().state_dict(), "out")
    large = GPTConfig(n_layer=1, n_head=1, n_embd=10**6, vocab_size=9)  # 48 TB, which are not taken
    with pytest.raises(ValueError, match="not a GPT of"):
        GPT.from_state(large, make().state_dict(), "out")


OTHER_DEVICE = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration
from model import GPT, GPTConfig
from deskgpt.compute.optimizer import make_optimizer

class Backend(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self):
        return [torch.bfloat16]

backend_registration._setup_privateuseone_for_python_backend("gpu", Backend())
with FakeTensorMode():
    for vocab_size in (65, 50304):
        with torch.device("gpu"):
            model = GPT(GPTConfig(block_size=1024, vocab_size=vocab_size, n_layer=1, n_head=2, n_embd=16))
            x = torch.zeros(2, 1024, dtype=torch.long)
        loss = model(x, x)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        make_optimizer(model, "adamw", 0.1, 1e-3, (0.9, 0.95), 0.95, "gpu").step()
        drawn = [t for T in (1, 1024) for kind in (0.0, 0.8) for t in model.generate(x[:, :T], 2, temperature=kind)]
        drawn += model.generate(x[:, :4], 2, top_k=3, top_p=0.9)
        print({str(t.device) for t in [loss, *drawn]})
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no devices made in Python",
)
def test_everything_stays_on_the_models_device():
    # Without a GPU: tensors without content on a device of torch's that exists by name only, and is as strict.
    done = subprocess.run([sys.executable, "-c", OTHER_DEVICE], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "{'gpu:0'}\n" * 2, done.stderr
