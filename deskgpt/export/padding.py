"""Batches with padding through a network that knows none: model.py's Transformer, in programs of other conventions.

Each row's tokens are put together first, so the network sees none of the padding, whatever it computes.

Shape legend: B batch, T time, S time with what is cached, R rows of one pass, H heads, D head width, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class CacheOfRows:
    """A KVCache, as model.py asks it, whose keys and values transformers' cache keeps."""

    fixed_size = False

    def __init__(self, cache: Any, rows: Tensor | None = None, real: Tensor | None = None, length: int = 0) -> None:
        """rows (B,): True for those of the pass, which have `length` tokens in the cache where real (R, S) is True.

        rows None: all, without padding.
        """
        self.cache = cache
        self.rows = rows
        self.real = real
        self.length = length
        self.appended: list[tuple[Tensor, Tensor]] = []  # in the order of the layers

    def positions(self, T: int, device: torch.device) -> tuple[Tensor, Tensor]:
        key_positions = torch.arange(self.length + T, device=device)
        return key_positions[self.length :], key_positions

    def append(self, module: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return all keys and values (R, H, length + T, D) of the rows."""
        layer = len(self.appended)
        self.appended.append((k, v))
        if self.rows is None:
            return self.cache.update(k, v, layer)
        if self.length:
            k = torch.cat((self._earlier(self.cache.layers[layer].keys), k), 2)
            v = torch.cat((self._earlier(self.cache.layers[layer].values), v), 2)
        return k, v

    def swap(self, module: Any, x: Tensor) -> None:
        raise ValueError("transformers' cache keeps keys and values only: use_cache=False")

    def _earlier(self, kept: Tensor) -> Tensor:
        """Return those of the rows (R, H, length, D) in kept (B, H, S, D), without padding."""
        real = kept[self.rows].transpose(1, 2)[self.real]  # (R * length, H, D)
        return real.unflatten(0, (-1, self.length)).transpose(1, 2)


def hidden_states(
    transformer: Callable[..., Tensor], idx: Tensor, mask: Tensor | None, position_ids: Tensor | None, cache: Any
) -> Tensor:
    """Return what transformer makes (B, T, C) of tokens idx (B, T), which follow those in the cache.

    mask (B, S): 0 for padding, also of the tokens in the cache. cache: transformers' own; None: nothing is kept.
    Raises ValueError for other position_ids than those of the mask, and for a cache of a fixed size.
    """
    if cache is not None and cache.is_compileable:
        raise ValueError("this model has dynamic caches only: leave cache_implementation out")
    B, T = idx.shape
    n_cached = cache.get_seq_length() if cache is not None else 0
    real = torch.ones(B, n_cached + T, device=idx.device) if mask is None else mask
    positions = real.long().cumsum(1)[:, -T:] - 1  # (B, T)
    real = real.bool()
    past, new = real[:, :-T], real[:, -T:]
    if position_ids is not None and ((position_ids != positions) & new).any():
        raise ValueError("this model counts positions by attention_mask: leave position_ids out")
    if cache is None:
        order = (~new).int().argsort(dim=1, stable=True)  # padding last: no token looks at later ones
        x = transformer(idx.gather(1, order))
        return torch.zeros_like(x).scatter(1, order[:, :, None].expand_as(x), x)
    if real.all():
        return transformer(idx, CacheOfRows(cache, length=n_cached))

    # Rows with as many tokens are a pass of their own.
    counts = torch.stack((past.sum(1), new.sum(1)), 1)  # (B, 2)
    x = idx.new_zeros(0)
    passes = []
    for length, n in counts.unique(dim=0).tolist():
        rows = (past.sum(1) == length) & (new.sum(1) == n)
        kept = CacheOfRows(cache, rows, past[rows], length)
        where = new & rows[:, None]
        if n:
            out = transformer(idx[where].view(-1, n), kept)
            passes.append((where, kept.appended))
            x = x if len(passes) > 1 else out.new_zeros(*idx.shape, out.size(2))
            x[where] = out.flatten(0, 1)
    for layer in range(len(passes[0][1])):
        kv = [spread([(where, appended[layer][i]) for where, appended in passes]) for i in (0, 1)]
        cache.update(*kv, layer)
    return x


def spread(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return keys (B, H, T, D) in their places: of each part (R, H, n, D) where (B, T) is True; zeros are padding."""
    B, T = parts[0][0].shape
    _, H, _, D = parts[0][1].shape
    found = parts[0][1].new_zeros(B, T, H, D)
    for where, part in parts:
        found[where] = part.transpose(1, 2).flatten(0, 1)
    return found.transpose(1, 2)
