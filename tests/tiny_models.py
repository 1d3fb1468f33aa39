"""Models, token ids and checkpoints that several test files share."""

from dataclasses import replace
from typing import Any

import torch

from deskgpt.checkpoint import Checkpoint
from deskgpt.optim import make_optimizer
from deskgpt.train_state import optimizer_state
from model import GPT, GPTConfig

SMALL = GPTConfig(block_size=32, vocab_size=100, n_layer=2, n_head=4, n_embd=32, bias=True)
TINIEST = GPTConfig(block_size=8, vocab_size=20, n_layer=1, n_head=1, n_embd=8, bias=True)
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
    """Return a model whose biases and gains are random too, so that a test notices if they are left
    out.
    """
    torch.manual_seed(seed)
    model = GPT(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def tokens(*shape: int, vocab: int = 100) -> torch.Tensor:
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(1))


def state_of(step: int = 1, best_val_loss: float = 2.5) -> Checkpoint:
    """Return what a run of TINIEST saves; the weights depend on the step."""
    torch.manual_seed(step)
    model = GPT(TINIEST)
    optimizer = make_optimizer(model, "adamw", 0.1, 1e-3, (0.9, 0.95), 0.95)
    return Checkpoint(
        model=model.state_dict(),
        optimizer=optimizer_state(optimizer, model),
        model_args=TINIEST.as_args(),
        iter_num=step,
        best_val_loss=best_val_loss,
        config={"dataset": "x", "device": "cuda", "learning_rate": 0.1},
        tokenizer={"name": "bytes"},
    )
