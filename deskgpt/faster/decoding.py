"""Generation with a cache of keys and values: a token costs a pass over itself, not over all tokens before it.

A Decoder stands in for GPT.next_logits of model.py. Every module of the model finds in the cache what it left there in
the passes before.

Shape legend: B batch, T time, S time with what is cached, H heads, D head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from deskgpt.faster import graphs


class KVCache:
    """What the modules of a model keep of the tokens so far: attention its keys and values, others their last input.

    static: after the first pass, each step of one token runs the same operations on the same memory, as a CUDA graph
    must. Attention then goes over room for block_size tokens, and its description of what a query sees leaves out what
    is not filled yet.
    """

    def __init__(self, block_size: int, static: bool = False) -> None:
        self.block_size = block_size
        self.static = static
        self.length = 0  # tokens held
        self._position: Tensor | None = None  # of a static step's token (1,)
        self._kv: dict[nn.Module, tuple[Tensor, Tensor]] = {}  # each (B, H, block_size, D)
        self._last: dict[nn.Module, Tensor] = {}

    def begin(self, T: int, device: torch.device) -> Tensor:
        """The positions (T,) of the tokens of the pass that begins."""
        if self._position is not None:
            return self._position
        return torch.arange(self.length, self.length + T, device=device)

    def end(self, T: int, device: torch.device) -> None:
        """Called when all modules have appended their T tokens."""
        self.length += T
        if self._position is not None:
            self._position += 1
        elif self.static:
            self._position = torch.full((1,), self.length, device=device)

    def append(self, module: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Appends a module's k and v (B, H, T, D); returns all of its keys and values (B, H, S, D) and their positions.

        Positions (S,) that are not filled yet are later than every query's.
        """
        if module not in self._kv:  # only now are batch, device and autocast's dtype known
            room = (k.size(0), k.size(1), self.block_size, k.size(3))
            self._kv[module] = (k.new_zeros(room), v.new_zeros((*room[:3], v.size(3))))
        keys, values = self._kv[module]
        if self._position is not None:
            keys.index_copy_(2, self._position, k)
            values.index_copy_(2, self._position, v)
            return keys, values, torch.arange(self.block_size, device=k.device)
        end = self.length + k.size(2)
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end], torch.arange(end, device=k.device)

    def swap(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """Keeps x for the module's next pass; returns what it kept in its last one, None in its first."""
        if module not in self._last:
            self._last[module] = x.clone()
            return None
        last = self._last[module].clone()
        self._last[module].copy_(x)
        return last


class Decoder:
    """Stands in for GPT.next_logits: the logits (B, V) that follow tokens idx (B, T).

    A call whose idx continues that of the call before computes the new tokens only. Once all block_size positions are
    taken, positions shift with every token and nothing cached is valid: such a call is left to plain.

    Where steps can be replayed as a CUDA graph, the cache is static: a token has hundreds of small kernels, which a
    graph launches at once. There, linear layers are cast to autocast's dtype once: a graph would cast them again for
    each token, and must not use autocast's own copies, which come and go.
    """

    def __init__(self, model: Any, static: bool | None = None) -> None:
        """static: None for what suits the model's device."""
        self.model = model
        self.device = next(model.parameters()).device
        self.static = graphs.can_replay(self.device) if static is None else static
        self.begin()

    def begin(self) -> None:
        """Forgets all tokens."""
        self.cache = KVCache(self.model.config.block_size, self.static)
        self._seen: Tensor | None = None  # the tokens in the cache (B, length)
        self._token: Tensor | None = None  # (B, 1), read by each static step
        self._cast: dict[str, Tensor] = {}  # weights and biases of linear layers, in autocast's dtype
        self._pass = CachedPass(self.model)
        self._step = graphs.replayed(self._one_token, self.device)

    def __call__(self, plain: Callable[..., Tensor], model: Any, idx: Tensor) -> Tensor:
        if model is not self.model or idx.size(1) > model.config.block_size:
            return plain(model, idx)
        if not self._continues(idx):
            self.begin()
        new = idx[:, self.cache.length :]
        self._seen = idx
        if self.static and self.cache.length:
            return self._static_step(new)
        return self._pass(new, self.cache)

    def _continues(self, idx: Tensor) -> bool:
        """Whether idx holds the tokens in the cache and some more, in a static step one more."""
        n = self.cache.length
        if self._seen is None or idx.size(0) != self._seen.size(0):
            return False
        more = idx.size(1) - n
        can_go_on = more == 1 if self.static else more > 0
        return can_go_on and torch.equal(idx[:, :n], self._seen)

    def _static_step(self, new: Tensor) -> Tensor:
        length = self.cache.length + 1
        if self._token is None:
            self._token = new.clone()
            self._cast_linear_layers(new.device.type)
        self._token.copy_(new)
        logits = self._step()
        self.cache.length = length  # a replayed step runs no Python
        return logits

    def _one_token(self) -> Tensor:
        # tie_weights: a head in 16 bits must not become the embedding, too.
        return torch.func.functional_call(self._pass, self._cast, (self._token, self.cache), tie_weights=False)

    def _cast_linear_layers(self, device_type: str) -> None:
        if not torch.is_autocast_enabled(device_type):
            return
        dtype = torch.get_autocast_dtype(device_type)
        for name, module in self._pass.named_modules():
            if isinstance(module, nn.Linear):
                for key, p in module.named_parameters():
                    self._cast[f"{name}.{key}"] = p.to(dtype)


class CachedPass(nn.Module):
    """The logits (B, V) after the last of some tokens idx (B, T), with what the cache holds of those before them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, idx: Tensor, cache: KVCache) -> Tensor:
        return self.model.logits(self.model.transformer(idx, cache)[:, -1])
