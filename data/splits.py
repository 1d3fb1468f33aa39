"""The windows of a split and their order: a pure function says which tokens are in which row of which batch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data.meta_files import read_record
from data.token_files import NumberFile, open_masks, open_shards
from deskgpt.system.errors import DataError

# T is block_size, the number of tokens of a window.
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

CHUNK = 1 << 20  # tokens that are read at once, if it is not for a batch
FINGERPRINTED = 1 << 20  # tokens at the beginning of each shard
FINGERPRINTED_SHARDS = 1024  # at most, evenly spread
GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment: 2^64 / golden ratio
FEISTEL_ROUNDS = 6


class Split:
    """The windows of one split: inputs and targets of block_size tokens, targets one token further on.

    In an epoch every shard is cut into consecutive windows. Their inputs do not overlap and never cross the shard's
    end. The first window starts at an offset drawn for that epoch, so that later epochs see other cuts; the order of
    the windows is a pseudo-random permutation. Which window goes into which row of which batch is a pure function of
    (seed, step, row of the global batch): there is no state to save, and micro-batches and ranks change nothing.

    Packed data has windows of a fixed size (in meta.json), and is read in exactly these, all of them in each epoch.
    Masked targets are -1; windows without any other target are not evaluated.

    Raises ValueError if files are missing, damaged or too short. Each call that reads raises DataError for damage and
    for ids of vocab_size and more.
    """

    def __init__(self, folder: Path, split: str, block_size: int, vocab_size: int, seed: int = 0) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.seed = seed
        packed = read_record(folder).get("packed")
        if packed not in (None, block_size):
            raise ValueError(
                f"{folder} is packed into windows of {packed:,} tokens, and block_size={block_size}; try "
                f"--block_size={packed}, or prepare the data again with --block_size={block_size}"
            )
        found = open_shards(folder, split)
        self.shards = [shard for shard in found if len(shard) > block_size]
        if not self.shards:
            longest = max(map(len, found))
            raise ValueError(
                f"block_size={block_size} needs {block_size + 1} tokens in a row, {folder}/{split}*.bin: {longest:,}; "
                f"try more data, or --block_size={max(1, longest - 1)}"
            )
        self.masks = open_masks(folder, split, self.shards)  # one for each shard, or none
        self.lengths = np.array([len(shard) for shard in self.shards], np.int64)
        self.tokens = int(self.lengths.sum())
        first = np.zeros(1, np.int64)
        self._check_ids(first, first, self.shards[0].read(0, CHUNK)[None])  # the others as they are read
        # One window fewer than could fit, so that all of them fit whichever offset below block_size is drawn. A shard
        # with room for one window only has that one, and fewer offsets.
        self._windows = np.maximum(1, (self.lengths - block_size) // block_size)  # per shard and epoch
        self._offsets = np.minimum(block_size, self.lengths - self._windows * block_size)  # to choose from, per shard
        self._eval_windows = (self.lengths - 1) // block_size  # per shard
        if packed:
            self._windows = self._eval_windows
            self._offsets = np.ones_like(self._offsets)
        self.n_windows = int(self._windows.sum())  # per epoch
        self._evaluated = self._windows_with_targets() if self.masks else None  # None: all of them
        self.check: Callable[[], None] = lambda: None  # raises an error that a check of the files has found meanwhile
        if not self.n_eval_windows(1):
            raise ValueError(f"{self.masks[0].path}: it leaves no token to learn; prepare the data again")

    # ---- training --------------------------------------------------------------------------------------------

    def train_batch(self, step: int, rows: I64, global_batch: int) -> tuple[I64, I64]:
        """Return (inputs, targets), each (len(rows), T), of rows 0..global_batch-1 of optimizer step `step`."""
        return self._read(*self.places(step, rows, global_batch))

    def places(self, step: int, rows: I64, global_batch: int) -> tuple[I64, I64]:
        """Return (shard, its first token), each (len(rows),), of the windows of train_batch."""
        position = step * global_batch + rows  # in the sequence of all windows of all epochs
        epoch = position // self.n_windows
        key = keys(self.seed, epoch)
        window = permute(position % self.n_windows, self.n_windows, key)
        shard, window_of_shard = locate(window, self._windows)
        offset = mix(key + shard.astype(np.uint64)) % self._offsets[shard].astype(np.uint64)
        start = window_of_shard * self.block_size + offset.astype(np.int64)
        return shard, start

    def n_learned(self, step: int, global_batch: int) -> I64:
        """Return how many targets the loss masks leave (global_batch,) in each row of optimizer step `step`."""
        return self._learned(*self.places(step, np.arange(global_batch), global_batch)).sum(1)

    # ---- evaluation ------------------------------------------------------------------------------------------

    def n_eval_windows(self, at_most: int) -> int:
        """Return the size of the evaluation set: all windows without overlap that the split has, at most at_most."""
        return min(at_most, int(self._eval_windows.sum()) if self._evaluated is None else len(self._evaluated))

    def eval_batch(self, rows: I64, n: int) -> tuple[I64, I64]:
        """Return as train_batch, of rows of a fixed set of n evenly spaced windows; rows past n have targets of -1."""
        window = np.minimum(rows, n - 1) * self.n_eval_windows(2**62) // n
        if self._evaluated is not None:
            window = self._evaluated[window]
        shard, window_of_shard = locate(window, self._eval_windows)
        x, y = self._read(shard, window_of_shard * self.block_size)
        y[rows >= n] = -1  # fill the last batch rather than shorten it: a new shape would be compiled again
        return x, y

    def eval_digest(self, n: int) -> str:
        """Return 16 hex digits of the SHA-256 of what an evaluation of n windows reads, and of block_size."""
        digest = hashlib.sha256(f"{self.block_size} {n}".encode())
        for x, y in self.eval_chunks(n):
            digest.update(x.astype("<i4").tobytes())
            digest.update(y.astype("<i4").tobytes())
        return digest.hexdigest()[:16]

    def eval_chunks(self, n: int) -> Iterator[tuple[I64, I64]]:
        """Yield inputs and targets of an evaluation of n windows, about CHUNK tokens at a time."""
        at_once = max(1, CHUNK // self.block_size)
        for first in range(0, n, at_once):
            yield self.eval_batch(np.arange(first, min(first + at_once, n)), n)

    def _windows_with_targets(self) -> I64:
        """Return the numbers of the windows without overlap, through all shards, that have a learned target."""
        T = self.block_size
        windows = zip(self.masks, self._eval_windows.tolist(), strict=True)
        return np.flatnonzero(np.concatenate([mask.read(1, n * T).reshape(n, T).any(1) for mask, n in windows]))

    # ---- about the files -------------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        """Return 16 hex digits that tell these tokens: SHA-256 of the shards' lengths and first 2^20 tokens each.

        Masks, if there are any, are part of it. With more than 1,024 shards, it has every n-th one and an n-th of
        these tokens, so that it never reads more than 2 GB.
        """
        every = math.ceil(len(self.shards) / FINGERPRINTED_SHARDS)
        digest = hashlib.sha256(self.lengths.tobytes())
        for file in [*self.shards[::every], *self.masks[::every]]:
            digest.update(file.read(0, FINGERPRINTED // every).tobytes())
        return digest.hexdigest()[:16]

    def files(self) -> list[NumberFile]:
        return [*self.shards, *self.masks]

    # ---- reading ---------------------------------------------------------------------------------------------

    def _read(self, shard: I64, start: I64) -> tuple[I64, I64]:
        """Return (inputs, targets), each (len(shard), T), of windows, given the shard and first token of each."""
        block = read_rows(self.shards, shard, start, self.block_size + 1)
        self._check_ids(shard, start, block)
        x = block[:, :-1].astype(np.int64)
        y = block[:, 1:].astype(np.int64)
        if self.masks:
            y[~self._learned(shard, start)] = -1
        return x, y

    def _learned(self, shard: I64, start: I64) -> npt.NDArray[np.bool_]:
        """Return which targets (len(shard), T) of windows are learned, given the shard of each and its first token."""
        return read_rows(self.masks, shard, start + 1, self.block_size) != 0

    def _check_ids(self, shard: I64, start: I64, block: npt.NDArray[np.uint16]) -> None:
        """Raise DataError if block (rows, tokens) has too large an id; row i begins at start[i] of shard[i]."""
        if block.max() < self.vocab_size:
            return
        row, column = np.argwhere(block >= self.vocab_size)[0]
        path = self.shards[shard[row]].path
        raise DataError(
            f"{path}: token {start[row] + column:,} is {block[row, column]}, and the vocabulary ends at "
            f"{self.vocab_size - 1}; the file does not belong to this tokenizer or model"
        )


def read_rows(files: Sequence[NumberFile], file: I64, start: I64, n: int) -> npt.NDArray[Any]:
    """Return n numbers from start[i] of files[file[i]] in each row i."""
    return np.stack([files[f].read(first, n) for f, first in zip(file.tolist(), start.tolist(), strict=True)])


def locate(window: I64, windows_per_shard: I64) -> tuple[I64, I64]:
    """Return (shard, number within that shard) of windows that are numbered through all shards."""
    ends: I64 = windows_per_shard.cumsum()
    shard = np.searchsorted(ends, window, side="right")
    return shard, window - (ends[shard] - windows_per_shard[shard])


# ---- pseudo-random order -------------------------------------------------------------------------------------


def keys(seed: int, epochs: I64) -> U64:
    """Return one uint64 key per epoch number."""
    return mix(mix(np.array([seed % 2**64], np.uint64)) + epochs.astype(np.uint64) * np.uint64(GOLDEN))


def permute(i: I64, n: int, key: U64) -> I64:
    """Return where position i of 0..n-1 goes under a pseudo-random permutation: O(1) time and memory per element.

    A Feistel network permutes the smallest range 0..4^k-1 that holds n numbers. A result of n or more is sent through
    it again until it falls below n ("cycle walking", Black & Rogaway, CT-RSA 2002). i and key broadcast together.
    """
    half_bits = max(1, math.ceil((n - 1).bit_length() / 2))
    x, key = np.broadcast_arrays(i.astype(np.uint64), key)
    x = x.copy()
    todo = np.ones(x.shape, bool)
    while todo.any():
        x[todo] = feistel(x[todo], half_bits, key[todo])
        todo = x >= np.uint64(n)
    return x.astype(np.int64)


def feistel(x: U64, half_bits: int, key: U64) -> U64:
    """Apply a pseudo-random bijection of the numbers of 2·half_bits bits for each key. x, key: (n,)."""
    half = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left = x >> half
    right = x & mask
    for r in range(FEISTEL_ROUNDS):
        mixed = mix(right + key + np.uint64(r * GOLDEN % 2**64)) & mask
        new_right = left ^ mixed
        left = right
        right = new_right
    return (left << half) | right


def mix(x: U64) -> U64:
    """Apply a bijection of uint64 that looks random (splitmix64's finalizer: Steele, Lea & Flood, OOPSLA 2014).

    x: of any shape. It makes a random stream of its own from a seed and counters, as in `keys`.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
