from __future__ import annotations

import pytest
import torch
from tiny_models import MODERN, SMALL, make, tokens

from model import sample_tokens


@pytest.mark.parametrize("config", [SMALL, MODERN])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("prompt", [1, 9, 40])
def test_generation_with_kv_cache_equals_full_recompute_token_for_token(prompt, temperature, config):
    model, idx = make(config).eval(), tokens(3, prompt)
    drawn = [
        torch.stack(list(model.generate(idx, 45, temperature=temperature, seed=5, use_cache=use_cache)))
        for use_cache in (True, False)
    ]  # 45 new tokens: past block_size=32 from every prompt
    assert torch.equal(*drawn)
    if temperature == 0:  # and both are what the whole model says
        whole = torch.cat((idx, drawn[0].t()), 1)
        for t in range(prompt, prompt + 45):
            context = whole[:, max(0, t - 32) : t]
            assert torch.equal(model(context)[0][:, -1].argmax(1), whole[:, t])


def test_a_sample_does_not_depend_on_how_many_are_drawn_with_it():
    model, idx = make().eval(), tokens(1, 4)
    many = torch.stack(list(model.generate(idx.expand(5, -1), 20, seed=7)), 1)
    for i in range(5):
        alone = torch.stack(list(model.generate(idx, 20, seed=7 + i)), 1)
        assert torch.equal(many[i : i + 1], alone)
    assert len({tuple(row.tolist()) for row in many}) == 5


def test_padding_of_the_vocabulary_is_never_drawn():
    model = make().eval()
    drawn = torch.stack(list(model.generate(tokens(4, 4), 60, temperature=5.0, vocab_size=7)))
    assert drawn.max() == 6


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
