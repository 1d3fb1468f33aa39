"""Generation: the cache computes what the forward pass does, tokens are drawn as asked, nothing runs besides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_one_line
from tiny_models import MODERN, SMALL, make, tokens
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from data.tokenizer import BytesTokenizer
from deskgpt.generate.engine import InferenceEngine
from deskgpt.generate.text import GenerationConfig, Sample
from deskgpt.kernels.kv_cache import KVCache
from deskgpt.kernels.ops import matmul_attention
from deskgpt.system.hardware import autocast
from model import GPT, MLP, activation, sample_tokens


def drawn(model: GPT, idx: Tensor, n: int, cached: bool, **options: Any) -> Tensor:
    """Return the next n tokens (n, B)."""
    cache = KVCache(model.config.block_size) if cached else None
    return torch.stack(list(model.generate(idx, n, cache=cache, **options)))


def text_of(engine: InferenceEngine, idx: Tensor, n: int, watch: Any = None) -> list[str]:
    """Return what the engine writes after each row of idx."""
    samples = [Sample(BytesTokenizer(), "") for _ in idx]
    for _ in engine.write(idx, samples, GenerationConfig(max_new_tokens=n), watch):
        pass
    return [sample.text for sample in samples]


# ---- the cache -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [SMALL, MODERN])
@pytest.mark.parametrize("prompt", [1, 40])
def test_generation_with_kv_cache_equals_full_recompute_token_for_token(prompt, config):
    model, idx = make(config).eval(), tokens(3, prompt)
    n = max(6, 38 - prompt)  # past block_size=32
    found = drawn(model, idx, n, cached=True, temperature=1.0, seed=5)
    assert torch.equal(found, drawn(model, idx, n, cached=False, temperature=1.0, seed=5))
    found = drawn(model, idx, n, cached=True, temperature=0.0)
    text = torch.cat((idx, found.t()), 1)
    for t in range(prompt, prompt + n):
        context = text[:, max(0, t - 32) : t]
        assert torch.equal(model(context)[0][:, -1].argmax(1), text[:, t])


def over_time(self: MLP, x: Tensor, context: Any) -> Tensor:
    """An MLP with a mean over the tokens of the pass so far, without those in the cache."""
    n = torch.arange(1, x.size(1) + 1)[:, None]
    return self.c_proj(activation(self.c_fc(x.cumsum(1) / n), self.activation))


def complete_texts(self: MLP, x: Tensor, context: Any) -> Tensor:
    """An MLP that fails if the pass does not begin with the text."""
    if int(context.positions[0]):
        raise ValueError("no earlier tokens")
    return self.c_proj(activation(self.c_fc(x), self.activation))


@pytest.mark.parametrize(("change", "named"), [(over_time, "relative error"), (complete_texts, "no earlier tokens")])
@pytest.mark.parametrize("prompt", [1, 32])
def test_cache_that_computes_something_else_is_left_out_and_one_line_names_it(
    prompt, change, named, monkeypatch, capsys
):
    monkeypatch.setattr(MLP, "forward", change)
    model, idx = make().eval(), tokens(2, prompt)
    engine = InferenceEngine(model, idx, "float32")
    assert not engine.cached
    assert_one_line(capsys.readouterr().err, "cache", "slower", named)
    options: dict[str, Any] = {"temperature": 0.8, "seed": 1337, "vocab_size": 100}
    expected = drawn(model, idx, 12, cached=False, **options)
    assert text_of(engine, idx, 12) == [bytes(row.tolist()).decode() for row in expected.t()]


def test_each_token_is_one_pass_over_itself(monkeypatch):
    model, idx = make().eval(), tokens(2, 9)
    engine = InferenceEngine(model, idx, "float32")
    assert engine.cached
    lengths = []
    model.transformer.register_forward_pre_hook(lambda module, args: lengths.append(args[0].size(1)))
    text_of(engine, idx, 20)
    assert lengths == [9] + [1] * 19


def test_weights_are_cast_once_for_a_text_in_16_bits_and_logits_are_autocasts_own():
    model, idx = make().eval(), tokens(2, 9)
    with torch.inference_mode(), autocast(torch.device("cpu"), "bfloat16"):
        expected = model.next_logits(idx)
    shapes = {tuple(m.weight.shape) for m in model.modules() if isinstance(m, torch.nn.Linear)}
    layers = sum(isinstance(m, torch.nn.Linear) for m in model.modules())
    found: list[Tensor] = []
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as p:
        engine = InferenceEngine(model, idx, "bfloat16")
        text_of(engine, idx, 10, watch=found.append)
    casts = [e for e in p.key_averages(group_by_input_shape=True) if e.key == "aten::_to_copy" and e.input_shapes]
    assert sum(e.count for e in casts if tuple(e.input_shapes[0]) in shapes) <= layers
    assert torch.equal(found[0], expected.float())


def test_tokens_on_cuda_are_not_computed_by_cudnns_attention():
    engine = InferenceEngine(make().eval(), tokens(1, 4), "float32")
    engine.device = torch.device("cuda")
    for now in (True, False):  # a setting of torch's that is restored
        torch.backends.cuda.enable_cudnn_sdp(now)
        with engine._mode():
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            assert torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.cudnn_sdp_enabled() == now
    torch.backends.cuda.enable_cudnn_sdp(True)


def test_cache_serves_only_a_text_that_continues_its_own():
    model = make().eval()
    cache = KVCache(SMALL.block_size)
    first, other = tokens(1, 8), tokens(1, 8).flip(1)
    with torch.no_grad():
        model.next_logits(first, cache)
        for text in (torch.cat((first, other), 1), other, torch.cat((other, first[:, :1]), 1), first):
            torch.testing.assert_close(model.next_logits(text, cache), model.next_logits(text))


@pytest.mark.parametrize("T", [30, 1])
def test_attention_of_apple_gpus_is_torchs(T):
    """Torch's own is wrong there (pytorch issues 181133 and 195910)."""
    q, k, v = torch.randn(3, 2, 4, 30, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(30, 30, dtype=torch.bool).tril() if T > 1 else None
    expected = F.scaled_dot_product_attention(q[:, :, -T:], k, v, attn_mask=mask)
    torch.testing.assert_close(matmul_attention(q[:, :, -T:], k, v, mask, 0.0), expected)


# ---- drawing -------------------------------------------------------------------------------------------------


def test_padding_of_the_vocabulary_is_never_drawn():
    model = make().eval()
    for cached in (False, True):
        assert drawn(model, tokens(4, 4), 60, cached, temperature=5.0, vocab_size=7).max() == 6


def counts(p: torch.Tensor, n: int = 10_000, **kwargs: object) -> torch.Tensor:
    """How often each token is drawn from probabilities p over n evenly spaced u."""
    u = (torch.arange(n, dtype=torch.float64)[:, None] + 0.5) / n
    options: dict = {"temperature": 1.0, "top_k": None, "top_p": 1.0} | kwargs
    picked = sample_tokens(p.log().expand(n, -1), u, **options)
    return torch.bincount(picked[:, 0], minlength=len(p))


def test_tokens_are_drawn_with_their_probabilities():
    p = torch.tensor([0.1, 0.4, 0.2, 0.3])
    torch.testing.assert_close(counts(p).double(), p.double() * 10_000, rtol=0, atol=1.5)
    sharper = (p**2 / (p**2).sum()).double()
    torch.testing.assert_close(counts(p, temperature=0.5).double(), sharper * 10_000, rtol=0, atol=1.5)
    assert counts(p, temperature=0).tolist() == [0, 10_000, 0, 0]


def test_top_k_keeps_the_likeliest_and_top_p_the_fewest_that_reach_it():
    p = torch.tensor([0.1, 0.4, 0.2, 0.3])
    assert (counts(p, top_k=2) > 0).tolist() == [False, True, False, True]
    assert (counts(p, top_p=0.69) > 0).tolist() == [False, True, False, True]
    assert (counts(p, top_p=0.71) > 0).tolist() == [False, True, True, True]
    assert (counts(p, top_p=1e-9) > 0).tolist() == [False, True, False, False]
    assert (counts(p, top_k=3, top_p=0.5) > 0).tolist() == [False, True, False, True]
    assert (counts(p, top_k=99) > 0).all()
