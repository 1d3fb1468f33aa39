"""What a model keeps of the tokens so far, so that a new one costs a pass over itself only.

Every module of the model finds in the cache what it left there in the passes before.

Shape legend: B batch, T time, S time with what is cached, H heads, D head width.
"""

from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor


class KVCache:
    """The keys and values of attention, and the last input of other modules."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.clear()

    def clear(self) -> None:
        """Forget all tokens."""
        self.length = 0  # tokens held; Transformer.forward raises it after its last block
        self._tokens: Tensor | None = None  # of the last call of new_tokens (B, T)
        self._kv: dict[nn.Module, tuple[Tensor, Tensor]] = {}  # each (B, H, block_size, D)
        self._last: dict[nn.Module, Tensor] = {}

    def new_tokens(self, idx: Tensor) -> Tensor:
        """Return the tokens of idx (B, T) that the cache does not hold; all, after clear, if idx begins otherwise.

        At the end of the context positions shift with each token, so that nothing cached is valid.
        """
        if not self._is_continued_by(idx):
            self.clear()
        self._tokens = idx
        return idx[:, self.length :]

    def append(self, module: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append a module's k and v (B, H, T, D), and return all that it has appended (B, H, S, D)."""
        if module not in self._kv:  # only now are batch, device and autocast's dtype known
            room = (k.size(0), k.size(1), self.block_size)
            self._kv[module] = (k.new_zeros((*room, k.size(3))), v.new_zeros((*room, v.size(3))))
        keys, values = self._kv[module]
        end = self.length + k.size(2)
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]

    def swap(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """Keep x for the module's next pass; return what it kept in its last one, None in its first."""
        last = self._last.get(module)
        self._last[module] = x.clone()
        return last

    def _is_continued_by(self, idx: Tensor) -> bool:
        n = self.length
        if self._tokens is None or n == 0 or idx.size(0) != self._tokens.size(0) or idx.size(1) <= n:
            return False
        return torch.equal(idx[:, :n], self._tokens[:, :n])
