"""Generation with a cache of keys and values: a token costs a pass over itself, not over all tokens before it.

A Decoder replaces GPT.next_logits of model.py. Every module of the model finds in the cache what it left there in the
passes before.

Shape legend: B batch, T time, S time with what is cached, H heads, D head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor


class KVCache:
    """What the modules of a model keep of the tokens so far: attention its keys and values, others their last input."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.length = 0  # tokens held
        self._kv: dict[nn.Module, tuple[Tensor, Tensor]] = {}  # each (B, H, block_size, D)
        self._last: dict[nn.Module, Tensor] = {}

    def begin(self, T: int, device: torch.device) -> Tensor:
        """The positions (T,) of the tokens of the pass that begins."""
        return torch.arange(self.length, self.length + T, device=device)

    def end(self, T: int, device: torch.device) -> None:
        """Called when all modules have appended their T tokens."""
        self.length += T

    def append(self, module: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Appends a module's k and v (B, H, T, D); returns all of them (B, H, S, D) and their positions (S,)."""
        if module not in self._kv:  # only now are batch, device and autocast's dtype known
            room = (k.size(0), k.size(1), self.block_size, k.size(3))
            self._kv[module] = (k.new_zeros(room), v.new_zeros((*room[:3], v.size(3))))
        keys, values = self._kv[module]
        end = self.length + k.size(2)
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end], torch.arange(end, device=k.device)

    def swap(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """Keeps x for the module's next pass; returns what it kept in its last one, None in its first."""
        last = self._last.get(module)
        self._last[module] = x.clone()
        return last


class Decoder:
    """Replaces GPT.next_logits: the logits (B, V) that follow tokens idx (B, T).

    A call whose idx continues that of the call before computes the new tokens only. Once all block_size positions are
    taken, positions shift with every token and nothing cached is valid: such a call is left to the reference.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.begin()

    def begin(self) -> None:
        """Forgets all tokens."""
        self.cache = KVCache(self.model.config.block_size)
        self.steps = 0  # calls that found tokens in the cache
        self._seen: Tensor | None = None  # the tokens in the cache (B, length)

    def __call__(self, reference: Callable[..., Tensor], model: Any, idx: Tensor) -> Tensor:
        if model is not self.model or idx.size(1) > model.config.block_size:
            self.begin()
            return reference(model, idx)
        if self._continues(idx):
            self.steps += 1
        else:
            self.begin()
        new = idx[:, self.cache.length :]
        self._seen = idx
        return model.logits(model.transformer(new, self.cache)[:, -1])

    def is_due(self) -> bool:
        """Whether to compare the last call with the whole forward pass: at the steps 1, 4, 16, 64 ... of a text."""
        return self.steps > 0 and self.steps.bit_count() == 1 and self.steps.bit_length() % 2 == 1

    def _continues(self, idx: Tensor) -> bool:
        """Whether idx holds the tokens in the cache and some more."""
        n = self.cache.length
        if self._seen is None or idx.size(0) != self._seen.size(0):
            return False
        return idx.size(1) > n and torch.equal(idx[:, :n], self._seen)
