"""A split's windows and their order: which tokens are in which row of which batch, as a pure function."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data.token_files import I64, check_listed, read_tokens, token_files

SCANNED = 1 << 28  # a split of at most so many tokens is checked at the start, within a second; others as they are read
GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment: 2^64 / golden ratio
U64 = npt.NDArray[np.uint64]


def mix(x: U64) -> U64:
    """A bijection of uint64 that looks random (splitmix64's finalizer: Steele, Lea & Flood, OOPSLA 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def keys(seed: int, epochs: I64) -> U64:
    """One uint64 key per epoch number."""
    return mix(mix(np.array([seed % 2**64], np.uint64)) + epochs.astype(np.uint64) * np.uint64(GOLDEN))


def permute(i: I64, n: int, key: U64) -> I64:
    """Where position i of 0..n-1 goes under a pseudo-random permutation: O(1) time and memory an element.

    A Feistel network permutes the numbers of 2·half bits, the smallest such power of 4 that holds n; what lands
    past n is sent through again ("cycle walking", Black & Rogaway, CT-RSA 2002). i and key broadcast together.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    x, key = np.broadcast_arrays(i.astype(np.uint64), key)
    x, todo = x.copy(), np.ones(x.shape, bool)
    while todo.any():
        y, k = x[todo], key[todo]
        left, right = y >> half, y & mask
        for r in range(6):
            left, right = right, left ^ (mix(right + k + np.uint64(r * GOLDEN % 2**64)) & mask)
        x[todo] = (left << half) | right
        todo = x >= np.uint64(n)
    return x.astype(np.int64)


class Split:
    """The windows of one split: inputs and targets of block_size tokens, targets one token further on.

    In an epoch every shard is cut into consecutive windows, whose inputs do not overlap and never cross the
    shard's end; the first starts at an offset drawn for that epoch, so that later epochs see other cuts. Their
    order is a pseudo-random permutation. Which window goes into which row of which batch is a pure function of
    (seed, step, row of the global batch): there is no state to save, and nothing depends on how the global
    batch is split into micro-batches and ranks.

    With document_start, the token that documents begin with, a window of train_batch moves on to the first such
    token within its block_size; it stays where there is none. Then some tokens are in two windows, some in none.

    Raises ValueError where files are missing, damaged or too short, or hold ids of vocab_size and more.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        block_size: int,
        vocab_size: int,
        seed: int = 0,
        document_start: int | None = None,
    ) -> None:
        shards = [(path, read_tokens(path)) for path in token_files(folder, split)]
        check_listed(folder, split, {path.name: len(ids) for path, ids in shards})
        long_enough = [(path, ids) for path, ids in shards if len(ids) > block_size]
        if not long_enough:
            longest = max(len(ids) for _, ids in shards)
            shorter = f"try --block_size={longest - 1} or more data" if longest > 1 else "it needs more data"
            raise ValueError(
                f"block_size={block_size} needs {block_size + 1} tokens in a row, {folder}/{split}*.bin has "
                f"{longest:,}; {shorter}"
            )
        self.paths, self.shards = [p for p, _ in long_enough], [ids for _, ids in long_enough]
        self.block_size, self.vocab_size, self.seed = block_size, vocab_size, seed
        self.document_start = document_start
        self.lengths = np.array([len(ids) for ids in self.shards], np.int64)
        self.tokens = int(self.lengths.sum())
        if self.tokens <= SCANNED:
            for shard, ids in enumerate(self.shards):
                self._check(np.array([shard]), np.array([0]), ids[None])
        # One window fewer than could fit, except in a shard with room for one only: so every offset below
        # block_size leaves room for them all.
        counts = np.maximum(1, (self.lengths - block_size) // block_size)
        self.offsets = np.minimum(block_size, self.lengths - counts * block_size)  # number of possible offsets
        self.ends = counts.cumsum()
        self.n_windows = int(self.ends[-1])  # per epoch

    def train_batch(self, step: int, rows: I64, global_batch: int) -> tuple[I64, I64]:
        """(inputs, targets), each (len(rows), block_size), of rows 0..global_batch-1 of optimizer step `step`."""
        position = step * global_batch + rows
        epoch, i = position // self.n_windows, position % self.n_windows
        key = keys(self.seed, epoch)
        window = permute(i, self.n_windows, key)
        shard = np.searchsorted(self.ends, window, side="right")
        first = window - (self.ends - np.diff(self.ends, prepend=0))[shard]
        offset = (mix(key + shard.astype(np.uint64)) % self.offsets.astype(np.uint64)[shard]).astype(np.int64)
        start = first * self.block_size + offset
        if self.document_start is not None:
            start = np.array([self._aligned(*at) for at in zip(shard, start, strict=True)])
        return self._read(shard, start)

    def eval_batch(self, rows: I64, n: int) -> tuple[I64, I64]:
        """As train_batch, of rows of a fixed set of n evenly spaced windows; rows past n have targets of -1."""
        counts = (self.lengths - 1) // self.block_size
        ends = counts.cumsum()
        window = np.minimum(rows, n - 1) * int(ends[-1]) // n
        shard = np.searchsorted(ends, window, side="right")
        x, y = self._read(shard, (window - (ends - counts)[shard]) * self.block_size)
        y[rows >= n] = -1  # the last batch keeps its shape: a new one would be compiled anew
        return x, y

    def n_eval_windows(self, at_most: int) -> int:
        """Size of the evaluation set: every window without overlap that the split has, or at_most of them."""
        return min(at_most, int(((self.lengths - 1) // self.block_size).sum()))

    def fingerprint(self) -> str:
        """Tells these tokens from others: SHA-256 of each shard's length and first 2^20 tokens, 16 hex digits."""
        digest = hashlib.sha256(self.lengths.tobytes())
        for ids in self.shards:
            digest.update(ids[: 1 << 20].tobytes())
        return digest.hexdigest()[:16]

    def _aligned(self, shard: int, start: int) -> int:
        """The first document's start from `start` on, within a window's length and not too near the shard's end."""
        ids, T = self.shards[shard], self.block_size
        begins = np.flatnonzero(ids[start : min(start + T, len(ids) - T)] == self.document_start)
        return start + int(begins[0]) if len(begins) else start

    def _read(self, shard: I64, start: I64) -> tuple[I64, I64]:
        T = self.block_size
        block = np.stack([self.shards[s][o : o + T + 1] for s, o in zip(shard, start, strict=True)]).astype(np.int64)
        self._check(shard, start, block)
        return block[:, :-1].copy(), block[:, 1:].copy()

    def _check(self, shard: I64, start: I64, block: npt.NDArray[Any]) -> None:
        """Raises ValueError where a row of block (rows, tokens), from `start` of its shard, has an id too large."""
        if block.max() >= self.vocab_size:
            row, column = np.argwhere(block >= self.vocab_size)[0]
            raise ValueError(
                f"{self.paths[shard[row]]}: token {start[row] + column:,} is {block[row, column]}, and the vocabulary "
                f"ends at {self.vocab_size - 1}; the file does not belong to this tokenizer or model"
            )
