"""The cache of the tokens so far, so that a new one costs a pass over itself only.

Each module of the model finds its own entries of earlier passes there.

Shape legend: B batch, T time, S time with what is cached, H heads, D head width.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn


class KVCache:
    """The keys and values of attention, and the last input of other modules."""

    # True: `append` returns all block_size slots, and attention masks the empty ones.
    returns_all_slots = False

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.clear()

    def clear(self) -> None:
        """Forget all tokens."""
        self.length = 0  # tokens held
        self._tokens = torch.empty(0)  # of the last run (B, T)
        self._kv: dict[nn.Module, list[Tensor]] = {}  # two of (B, H, block_size, D)
        self._last: dict[nn.Module, Tensor] = {}

    def run(self, forward: Callable[[Tensor], Tensor], idx: Tensor) -> Tensor:
        """Return forward of the tokens of idx (B, T) that the cache does not hold; of all if idx
        begins otherwise.

        At the end of the context positions shift with each token, so that nothing cached is valid.
        """
        n = self.length
        if not 0 < n < idx.size(1) or not torch.equal(idx[:, :n], self._tokens):
            self.clear()
        self._tokens = idx
        out = forward(idx[:, self.length :])
        self.length = idx.size(1)
        return out

    def positions(self, T: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the positions of T new tokens (T,), and of the keys with which `append` answers
        (S,).
        """
        self._end = self.length + T
        key_positions = torch.arange(self._end, device=device)
        self._positions = key_positions[self.length :]
        return self._positions, key_positions

    def append(self, module: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append a module's k and v (B, H, T, D), and return all that it has appended (B, H, S,
        D).
        """
        if module not in self._kv:  # only now are batch, device and autocast's dtype known
            self._kv[module] = [
                x.new_zeros(*x.shape[:2], self.block_size, x.size(3)) for x in (k, v)
            ]
        keys, values = self._kv[module]
        keys.index_copy_(2, self._positions, k)
        values.index_copy_(2, self._positions, v)
        return keys[:, :, : self._end], values[:, :, : self._end]

    def swap_last_input(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """Keep x for the module's next pass; return what it kept in its last one, None in its
        first.
        """
        last = self._last.get(module)
        if last is None:
            self._last[module] = x.clone()
            return None
        before = last.clone()
        last.copy_(x)
        return before


class GraphedKVCache(KVCache):
    """A KVCache on CUDA that records the pass over one token as a CUDA graph, and replays it for
    each further token.

    The CPU takes longer to launch a small model's kernels one by one than the card takes to compute
    them. Python code of the model does not run in a replay, so the size of nothing may change: keys
    that are not written yet are masked, as they lie behind the token's own position.
    """

    returns_all_slots = True

    def clear(self) -> None:
        super().clear()
        self._new: Tensor | None = None  # the token (B, 1) that the graph reads
        self._graph: torch.cuda.CUDAGraph | None = None

    def positions(self, T: int, device: torch.device) -> tuple[Tensor, Tensor]:
        self._end = self.block_size
        self._positions = self._length + self._span[:T]
        return self._positions, self._span

    def run(self, forward: Callable[[Tensor], Tensor], idx: Tensor) -> Tensor:
        return super().run(functools.partial(self._replay, forward), idx)

    def _replay(self, forward: Callable[[Tensor], Tensor], new: Tensor) -> Tensor:
        """Return forward of new tokens (B, T), by the graph if they are one."""
        if self.length == 0:
            self._span = torch.arange(self.block_size, device=new.device)
            self._length = new.new_zeros(1)  # the tokens held, for the graph to read
        self._length.fill_(self.length)
        if new.size(1) > 1:
            return forward(new)
        if self._new is None:  # libraries allocate at the first pass, which a graph must not
            self._new = new.clone()
            return forward(self._new)
        self._new.copy_(new)
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._out = forward(self._new)
        self._graph.replay()
        return self._out
