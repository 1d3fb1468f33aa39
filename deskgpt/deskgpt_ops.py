"""What model.py and its wrapper for transformers need of deskgpt, in plain torch: export.py copies
this file.

Imports of these names from deskgpt are rewritten to come from here (export_sources.py).

Shape legend: B batch, T time, S time with what is cached, C channels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from deskgpt.kv_cache import KVCache as ModelCache

# ---- what model.py imports -----------------------------------------------------------------------

Linear = nn.Linear
AtLeast1 = int
Fraction = float


def Range(*limits: float, **further: float) -> None:
    """Stand for the range of a setting, whose value was checked before it was exported."""


def check_fields(config: Any) -> None:
    """Leave a configuration as it is."""


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    T = q.size(2)
    # A mask, not is_causal: with that, tokens see later ones in 16 bits on MPS (pytorch issue
    # 195910).
    return masked_attention(
        q, k, v, torch.ones(T, T, dtype=torch.bool, device=q.device).tril(), dropout
    )


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float = 0.0
) -> Tensor:
    # MPS is wrong for few queries that are transposed (pytorch issue 181133).
    return F.scaled_dot_product_attention(
        q.contiguous(), k.contiguous(), v.contiguous(), mask, dropout
    )


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def relu2(x: Tensor) -> Tensor:
    return F.relu(x) * F.relu(x)


def checkpoint_block(block: nn.Module, x: Tensor, context: Any) -> Tensor:
    return block(x, context)


def chunked_cross_entropy(
    logits: Callable[[Tensor], Tensor], x: Tensor, targets: Tensor, *chunks: Any
) -> Tensor:
    loss = F.cross_entropy(logits(x).flatten(0, 1).float(), targets.flatten(), ignore_index=-1)
    return loss.masked_fill((targets == -1).all(), 0.0)


# ---- transformers' padding and caches ------------------------------------------------------------


class CachesOfRows(dict[str, Any]):
    """model.py's caches, each for the rows that it names; a copy of transformers' cache begins with
    none.
    """

    def __deepcopy__(self, memo: Any) -> CachesOfRows:
        return CachesOfRows()


def hidden_states(gpt: Any, idx: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
    """Return final hidden states (B, T, C) of tokens idx (B, T), which follow those in the cache.

    The tokens of a row are put together first: the model sees none of the padding, whatever it
    computes.

    mask (B, S): 0 for padding, also of the tokens in the cache. cache: transformers'; it keeps the
    tokens only, and beside it are model.py's caches, which know of which tokens they are. None:
    nothing is kept.

    Raises ValueError for a cache of a fixed size.
    """
    T = idx.size(1)
    if cache is not None:
        if cache.is_compileable:
            raise ValueError("this model has dynamic caches only: leave cache_implementation out")
        idx = cache.update(idx[:, None, :, None], idx[:, None, :, None], 0)[0][:, 0, :, 0]  # (B, S)
    seen = torch.ones_like(idx).bool() if mask is None else mask.bool()
    if cache is None:
        # Padding last: no token looks at later ones.
        order = (~seen).int().argsort(dim=1, stable=True)
        x = gpt.transformer(idx.gather(1, order))
        return torch.zeros_like(x).scatter(1, order[:, :, None].expand_as(x), x)

    new = seen[:, -T:]
    caches = vars(cache).setdefault("of_rows", CachesOfRows())
    counts = torch.stack((seen[:, :-T].sum(1), seen.sum(1)), 1)  # (B, 2)
    parts = []
    for count in counts.unique(dim=0):  # rows with as many tokens are a pass of their own
        past, n = count.tolist()
        rows = (counts == count).all(1, keepdim=True)  # (B, 1)
        kept = caches.setdefault(str(rows.tolist()), ModelCache(gpt.config.block_size))
        if kept.length > past:  # tokens were taken back
            kept.clear()
        if n > past:
            x = kept.run(
                functools.partial(gpt.transformer, cache=kept), idx[seen & rows].view(-1, n)
            )
            parts.append((new & rows, x[:, past - n :]))
    found = x.new_zeros(*new.shape, x.size(2))
    for where, x in parts:
        found[where] = x.flatten(0, 1)
    return found
