from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import assert_one_line
from tiny_models import MODERN, SMALL, make, tokens
from torch import Tensor

from deskgpt.compute.inference import InferenceEngine
from deskgpt.kernels import replacements
from deskgpt.kernels.kv_cache import Decoder
from deskgpt.kernels.overridable import replacing
from model import GPT, MLP, Transformer, activation, sample_tokens


def cached(model: GPT) -> dict[str, Any]:
    return {"GPT.next_logits": Decoder(model)}


def drawn(model: GPT, replaced: dict[str, Any], idx: torch.Tensor, n: int, **options: Any) -> torch.Tensor:
    """The next n tokens (n, B), with these replacements in use."""
    with replacing(replaced):
        return torch.stack(list(model.generate(idx, n, **options)))


@pytest.mark.parametrize("config", [SMALL, MODERN])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("prompt", [1, 9, 40])
def test_generation_with_kv_cache_equals_full_recompute_token_for_token(prompt, temperature, config):
    model, idx = make(config).eval(), tokens(3, prompt)
    n = max(6, 38 - prompt)  # past block_size=32
    found = [
        drawn(model, replaced, idx, n, temperature=temperature, seed=5)
        for replaced in (
            {},
            cached(model),
            replacements.replacements_for("cpu"),
            replacements.replacements_for("cpu") | cached(model),
        )
    ]
    assert all(torch.equal(other, found[0]) for other in found)
    if temperature == 0:  # and all are what the whole model says
        whole = torch.cat((idx, found[0].t()), 1)
        for t in range(prompt, prompt + n):
            context = whole[:, max(0, t - 32) : t]
            assert torch.equal(model(context)[0][:, -1].argmax(1), whole[:, t])


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("config", [SMALL, MODERN])
def test_attention_on_mps_is_none_of_torchs_fused_ones(config, grad, monkeypatch):
    """They are wrong there without gradients (pytorch's issues 181133 and 195910), frozen weights in training too."""
    monkeypatch.setattr(replacements.F, "scaled_dot_product_attention", lambda *args, **kwargs: pytest.fail("fused"))
    model, text = make(config).eval(), tokens(2, 30)
    for attention in ("flash", "explicit"):
        replaced = replacements.replacements_for("mps", attention)
        with torch.set_grad_enabled(grad), replacing(replaced):
            model(text, text)
        assert torch.equal(drawn(model, replaced | cached(model), text[:, :9], 6), drawn(model, {}, text[:, :9], 6))


def over_time(self: MLP, x: Tensor, context: Any) -> Tensor:
    """An MLP with a mean over the tokens of the pass so far, without those in the cache."""
    n = torch.arange(1, x.size(1) + 1)[:, None]
    return self.c_proj(activation(self.c_fc(x.cumsum(1) / n), self.activation))


def whole_texts(self: MLP, x: Tensor, context: Any) -> Tensor:
    """An MLP that fails where the pass does not begin with the text."""
    if int(context.positions[0]):
        raise ValueError("no earlier tokens")
    return self.c_proj(activation(self.c_fc(x), self.activation))


@pytest.mark.parametrize(("change", "named"), [(over_time, "disagrees"), (whole_texts, "fail")])
def test_cache_that_computes_something_else_is_left_out_and_a_line_says_so(change, named, monkeypatch):
    monkeypatch.setattr(MLP, "forward", change)
    model, idx = make().eval(), tokens(2, 9)
    printed: list[str] = []
    engine = InferenceEngine(model, idx, "float32", print0=printed.append)
    assert not engine.cached
    assert_one_line(*[line for line in printed if "cache" in line], "cached sampling", "slower", named)
    assert torch.equal(drawn(model, engine.replacements, idx, 45, seed=5), drawn(model, {}, idx, 45, seed=5))


def test_cache_is_compared_on_each_prompt_and_again_along_the_way(monkeypatch):
    """A prefix-LM whose prefix, the tokens up to the first 7, sees itself both ways; the first prompt has none."""
    prefix = 0

    def mask(query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) | (key < prefix)

    forward = Transformer.forward

    def with_prefix(self: Transformer, idx: Tensor, cache: Any = None) -> Tensor:
        nonlocal prefix
        found = (idx[0] == 7).nonzero()
        prefix = int(found[0]) + 3 if len(found) else 0
        return forward(self, idx, cache)

    monkeypatch.setattr("model.causal_mask", mask)
    monkeypatch.setattr(Transformer, "forward", with_prefix)
    model = make().eval()
    plain, with_seven = torch.full((1, 6), 3), torch.tensor([[3, 3, 7, 3]])
    printed: list[str] = []
    engine = InferenceEngine(model, plain, "float32", refused=["flash_attention"], print0=printed.append)
    assert engine.cached, printed
    found = drawn(model, engine.replacements, with_seven, 12, temperature=0.0)
    assert not engine.cached
    assert_one_line(printed[-1], "cached sampling disagrees with model.py", "without a cache")
    assert torch.equal(found, drawn(model, {}, with_seven, 12, temperature=0.0))


def test_cache_that_goes_wrong_later_is_found_and_the_text_before_is_named():
    model, idx = make().eval(), tokens(1, 4)
    printed: list[str] = []
    engine = InferenceEngine(model, idx, "float32", print0=printed.append)
    whole = engine.replacements["attention"]

    def forgetful(reference: Any, q: Tensor, k: Tensor, v: Tensor, *more: Any) -> Tensor:
        """Forgets the first tokens once there are ten."""
        first = 4 if q.size(2) == 1 and k.size(2) > 10 else 0
        return whole(reference, q, k[:, :, first:], v[:, :, first:], *more)

    engine.replacements["attention"] = forgetful
    found = drawn(model, engine.replacements, idx, 26, temperature=0.0)
    assert not engine.cached
    assert_one_line(printed[-1], "cached sampling disagrees", "the text from token 5 on may be wrong")
    assert torch.equal(found[:6], drawn(model, {}, idx, 6, temperature=0.0))


def test_padding_of_the_vocabulary_is_never_drawn():
    model = make().eval()
    for replaced in ({}, cached(model)):
        assert drawn(model, replaced, tokens(4, 4), 60, temperature=5.0, vocab_size=7).max() == 6


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
