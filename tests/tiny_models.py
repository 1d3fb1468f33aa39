"""Models and token ids that several test files share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from model import GPT, GPTConfig

SMALL = GPTConfig(block_size=32, vocab_size=100, n_layer=2, n_head=4, n_embd=32, bias=True)
MODERN_SETTINGS: dict[str, Any] = {
    "position": "rope",
    "norm": "rms",
    "qk_norm": True,
    "activation": "relu2",
    "tie_weights": False,
    "zero_init": True,
    "embedding_norm": True,
    "token_shift": True,
}
MODERN = replace(SMALL, bias=False, **MODERN_SETTINGS)


def make(config: GPTConfig = SMALL, seed: int = 0) -> GPT:
    """A model whose biases and gains are random too, so that a test notices where they are left out."""
    torch.manual_seed(seed)
    model = GPT(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def tokens(*shape: int, vocab: int = 100) -> torch.Tensor:
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(1))
