from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_equal, raises_one_line
from tiny_models import MODERN, SMALL, make, tokens
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel

from deskgpt.compute.variant import Variant, apply_variant
from deskgpt.export.gpt2_weights import load_gpt2
from deskgpt.system import hardware
from model import GPT, GPTConfig, rotate

CPU = torch.device("cpu")


class Counter(TorchDispatchMode):
    """Counts matmuls and forward passes of attention."""

    matmuls = attentions = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.overloadpacket.__name__
        self.matmuls += name in ("mm", "addmm")
        self.attentions += "attention" in name and "backward" not in name
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize(("config", "dropout"), [(SMALL, 0.3), (MODERN, 0.0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_that_are_computed_again_leave_gradients_bit_equal(config, dropout, dtype, kernels):
    model = make(replace(config, dropout=dropout))
    idx = tokens(3, 32)
    names = list(model.state_dict())
    found = {}
    counts = {}
    for which in ("none", "full", "selective"):
        apply_variant(model, Variant(dtype, recompute=which))
        assert list(model.state_dict()) == names
        torch.manual_seed(3)
        with Counter() as counts[which]:
            with hardware.autocast(CPU, dtype, cached=which == "none"):
                loss = model(idx, idx.roll(-1, 1))[1]
            loss.backward()
        gradients = [p.grad for p in model.parameters()]
        found[which] = [loss.detach(), *gradients, torch.rand(3)]  # the random numbers after it are the same, too
        model.zero_grad()
    assert_equal(found["full"], found["none"])
    assert_equal(found["selective"], found["none"])
    assert counts["none"].matmuls < counts["selective"].matmuls < counts["full"].matmuls
    if not dropout:
        assert [counts[which].attentions for which in ("none", "full", "selective")] == [2, 4, 2]


def test_weights_of_transformers_gpt2_give_its_logits_and_loss_here(kernels, tmp_path):
    torch.manual_seed(2)
    sizes: dict[str, Any] = {"vocab_size": 100, "n_positions": 32, "n_layer": 2, "n_head": 4, "n_embd": 32}
    theirs = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    theirs.save_pretrained(tmp_path)
    model_args, weights = load_gpt2(str(tmp_path))
    ours = GPT.from_state(GPTConfig(**model_args), weights, "gpt2")
    idx = tokens(3, 32)
    targets = torch.cat((idx[:, 1:], torch.full((3, 1), -1)), 1)  # transformers shifts the labels itself
    out = theirs(input_ids=idx, labels=idx)
    torch.testing.assert_close(ours(idx)[0], out.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours(idx, targets)[1], out.loss, rtol=1e-5, atol=1e-5)


def test_rotated_queries_meet_keys_by_their_distance_alone():
    transformer: Any = make(MODERN).transformer
    q, k = (torch.randn(1, 1, 1, 8).expand(1, 1, 32, 8) for _ in "qk")
    scores = rotate(q, transformer.rotary)[0, 0] @ rotate(k, transformer.rotary)[0, 0].t()
    for distance in range(-31, 32):
        assert scores.diagonal(distance).std(correction=0) < 1e-5
    assert scores[:, 0].std() > 1e-2
    torch.testing.assert_close(rotate(q, transformer.rotary).norm(dim=-1), q.norm(dim=-1))


def test_weights_begin_as_the_settings_say():
    """Tied or not; residual projections are smaller with depth, or zero."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=8, vocab_size=64, n_layer=8, n_head=2, n_embd=128))
    assert model.lm_head.weight is model.transformer.wte.weight
    block: Any = model.transformer.h[0]
    assert block.mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for projection in (block.mlp.c_proj, block.attn.c_proj):
        assert projection.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.05)
    assert GPT(MODERN)(tokens(2, 32), tokens(2, 32))[1].item() == pytest.approx(math.log(100), abs=1e-6)
    tied = GPT(replace(MODERN, tie_weights=True, embedding_norm=False))  # only what the blocks add is zero
    h = tied.transformer(tokens(2, 32))
    assert torch.equal(h, F.rms_norm(tied.transformer.wte(tokens(2, 32)), (32,), eps=1e-5))


def test_counts_of_gpt2_small_are_those_of_the_paper_and_palm_appendix_b():
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=50257, bias=True))
    assert sum(p.numel() for p in model.parameters()) == 124_439_808
    assert model.num_params() == 124_439_808 - 1024 * 768
    assert model.estimate_flops() == 6 * 123_653_376 + 12 * 12 * 12 * 64 * 1024


@pytest.mark.parametrize("config", [SMALL, MODERN])
def test_cropped_model_computes_the_same_on_short_contexts(config):
    model, idx = make(config).requires_grad_(False), tokens(2, 12)
    before = model(idx)[0]
    model.crop_block_size(12)
    assert torch.equal(model(idx)[0], before)
    assert model.config.block_size == 12
    assert not any(p.requires_grad for p in model.parameters())  # what is frozen stays frozen
    with pytest.raises(ValueError, match="13.*block_size=12"):
        model(tokens(2, 13))
    with pytest.raises(ValueError, match="--block_size=12"):
        model.crop_block_size(13)


def test_impossible_settings_and_weights_of_another_shape_are_named():
    for settings, named in (
        ({"n_embd": 30, "n_head": 4}, ["n_embd=30", "n_head=4", "try --n_head=3"]),
        ({"position": "rotary"}, ["position='rotary'", "learned, rope"]),
        ({"position": "rope", "n_embd": 33, "n_head": 11}, ["even width", "3"]),
    ):
        with raises_one_line(*named):
            GPTConfig(**settings)
    for width in (8, 10**6):  # the large one's 48 TB are not taken
        with pytest.raises(ValueError, match="out"):
            GPT.from_state(replace(SMALL, n_head=1, n_embd=width), make().state_dict(), "out")


def test_block_that_a_second_pass_would_change_is_refused():
    model = make()
    apply_variant(model, Variant(recompute="full"))
    block: Any = model.transformer.h[0]
    block.register_buffer("mean", torch.zeros(()))
    idx = tokens(2, 8)
    for change in (lambda: block.mean.add_(1), lambda: setattr(block, "mean", block.mean + 1), random.random):
        handle = block.ln_1.register_forward_hook(lambda m, a, y, change=change: (change(), y)[1])
        with raises_one_line("activation_checkpoint=full", "--activation_checkpoint=none"):
            model(idx)
        with torch.no_grad():
            model(idx)  # without gradients nothing is computed again
        handle.remove()


def test_dropout_acts_on_embeddings_attention_and_both_outputs_of_a_block_in_training_only(monkeypatch):
    model = make(replace(SMALL, n_layer=1, dropout=0.3))
    rates: list[float] = []
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda module, args, out: rates.append(module.p if module.training else 0.0))
    attention = torch.nn.functional.scaled_dot_product_attention

    def seen(*args, **kwargs):
        rates.append(kwargs["dropout_p"])
        return attention(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    for training in (True, False):
        rates.clear()
        model.train(training)(tokens(2, 8))
        assert rates == [0.3 * training] * 4
