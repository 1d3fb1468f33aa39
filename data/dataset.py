"""The data of a run: its two splits, their checksums, and the bytes of text that a token stands
for.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.batches import I64, BatchSplit, NumberFile, Split
from data.meta_files import read_record
from data.token_files import GPT2, check_vocabulary, listed_checksums, read_meta, token_files
from data.tokenizer import Tokenizer, from_meta_offline, padded_vocab_size
from deskgpt.errors import DataError
from deskgpt.files import sha256

SPLITS = ("train", "val")
SHORT = 256  # tokens of a text on which a model is checked
CHUNK = 1 << 20  # tokens that are read at once
FINGERPRINTED = 1 << 20  # tokens at the beginning of each shard
FINGERPRINTED_SHARDS = 1024  # at most, evenly spread
AT_ONCE = 512 << 20  # bytes that are verified before the run begins: in a second or so


class Dataset:
    """A folder of token files, as train.py uses it.

    `open` opens its splits, once the model is known.
    """

    train: Split
    val: Split
    checksums: Checksums

    def __init__(self, folder: Path, needed: bool = True) -> None:
        """needed: raise ValueError if a split is missing, before anything takes long."""
        self.folder = folder
        if needed:
            for split in SPLITS:
                token_files(folder, split)
        self.meta = read_meta(folder)
        self.tokenizer: dict[str, Any] = self.meta["tokenizer"]
        # The name of the template, if the data are dialogues.
        self.chat: str | None = read_record(folder).get("chat")
        # Of the text that an evaluation reads, if it is known.
        self.bytes_per_token: float | None = None

    @property
    def vocab_size(self) -> int:
        """Return the vocabulary of a new model."""
        return padded_vocab_size(self.tokenizer, self.meta["vocab_size"])

    def open(
        self,
        block_size: int,
        seed: int,
        vocab_size: int,
        tokenizer: dict[str, Any] | None,
        compares_checksums: bool,
    ) -> None:
        """Open both splits for a model with this vocabulary and tokenizer, None if that is not
        known.

        Raises ValueError if they do not belong to the model or are damaged.
        """
        check_vocabulary(self.folder, self.meta, vocab_size, tokenizer)
        self.train = Split(self.folder, "train", block_size, vocab_size, seed)
        self.val = Split(self.folder, "val", block_size, vocab_size, seed)
        # val first: an evaluation waits for it.
        compared = (self.val, self.train) if compares_checksums else ()
        self.checksums = Checksums(self.folder, compared)
        self._files = [*files_of(self.train), *files_of(self.val)]
        self._modified = [modified_ns(file) for file in self._files]
        # It is the same at every evaluation of a run.
        self._eval_digest = functools.cache(functools.partial(eval_digest, self.val))

    def short_text(self, block_size: int, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets (2, T) of val, T at most SHORT; random tokens if there is no
        data.
        """
        T = min(block_size, SHORT)
        try:
            val = Split(self.folder, "val", T, vocab_size)
            x, y = val.eval_batch(np.arange(2), 2)
        except (ValueError, OSError):
            tokens = np.random.default_rng(0).integers(0, vocab_size, (2, T + 1))
            x, y = tokens[:, :-1], tokens[:, 1:]
        return torch.from_numpy(x.copy()), torch.from_numpy(y.copy())

    @functools.cached_property
    def metadata(self) -> dict[str, Any]:
        """Return what tells data of the same size apart, under the names of checkpoints."""
        found = {}
        for name, split in zip(SPLITS, (self.train, self.val), strict=True):
            listed = listed_checksums(self.folder, name).values()
            checksum = sha256("\n".join(listed).encode())[:16] if listed else None
            found[f"{name} data"] = {
                "tokens": split.tokens,
                "fingerprint": fingerprint(split),
                "sha256": checksum,
            }
        return found

    def changes(self, is_last: bool = False) -> list[str]:
        """Return a warning for each file that was written into since the last call.

        An evaluation calls it. Raises DataError if a file is damaged. This waits until val is
        verified, and before a run's last evaluation until all files are.
        """
        self.checksums.wait(2 if is_last else 1)
        before = self._modified
        self._modified = [modified_ns(file) for file in self._files]
        return [
            f"{file.path} was written into while this run reads it: its tokens may have changed"
            for file, then, now in zip(self._files, before, self._modified, strict=True)
            if then != now
        ]

    def windows(self, sequences: int, first_row: int) -> dict[str, list[int]]:
        """Return where the windows of a global batch of this many sequences begin, by token
        file.
        """
        begins: dict[str, list[int]] = {}
        places = self.train.sequence_offsets(0, first_row + np.arange(sequences), sequences)
        for shard, first in zip(*places, strict=True):
            begins.setdefault(self.train.shards[shard].path.name, []).append(int(first))
        return begins

    # ---- evaluations -----------------------------------------------------------------------------

    def eval_metadata(self, batching: BatchSplit) -> dict[str, int]:
        """Return what tells evaluations apart, under the name of checkpoints."""
        return {"windows per evaluation": self.val.n_eval_windows(batching.eval_sequences)}

    def eval_digest(self, batching: BatchSplit) -> str:
        """Return a digest of the windows of val that an evaluation reads: losses compare if it is
        equal.
        """
        return self._eval_digest(self.val.n_eval_windows(batching.eval_sequences))

    # ---- for the log -----------------------------------------------------------------------------

    def lines(self, batching: BatchSplit, reads_text: bool) -> list[str]:
        """Return what a run prints about its data. reads_text: read the text behind the tokens, for
        bits per byte.
        """
        tokens = f"{self.train.tokens:,} train, {self.val.tokens:,} val tokens"
        found = [f"data: {self.folder.name}, {tokens}, {self.checksums.state}"]
        if self.meta == GPT2 and not (self.folder / "meta.json").exists():
            found.append(
                f"warning: {self.folder} has no meta.json or meta.pkl: its tokens are "
                "taken for GPT-2's"
            )
        if reads_text:
            try:
                windows = self.val.n_eval_windows(batching.eval_sequences)
                self.bytes_per_token = bytes_per_token(
                    self.val, windows, from_meta_offline(self.tokenizer)
                )
            except (ValueError, OSError, ImportError) as e:
                found.append(f"bits per byte are not known: {e}")
        return found

    def bits_per_byte(self, val_loss: float) -> float | None:
        """Return a val loss (nats per token) in bits per byte of its text (The Pile,
        arXiv:2101.00027, 3.1), if known.

        The nats of end_of_text count, though it has no bytes: a model has to predict where
        documents end, too.
        """
        return val_loss / self.bytes_per_token / math.log(2) if self.bytes_per_token else None


# ---- the files and what they hold ----------------------------------------------------------------


def files_of(split: Split) -> list[NumberFile]:
    return [*split.shards, *split.masks]


def modified_ns(file: NumberFile) -> int:
    return os.fstat(file.file.fileno()).st_mtime_ns


class Checksums:
    """Compare the files of splits, masks included, with the checksums that meta.json lists.

    Raises DataError if one differs; of a large data set, `wait` raises that, and each step, which
    finds it in the split's `damage`. `state` tells the log what is compared.
    """

    def __init__(self, folder: Path, splits: Sequence[Split]) -> None:
        self._listed = listed_checksums(folder)
        self._splits = splits
        self._verified = [threading.Event() for _ in splits]
        threading.Thread(target=self._compare, name="checksums", daemon=True).start()
        self.state = "checksums are verified while it trains"
        if not self._listed:
            self.state = "no checksums (no meta.json that lists files)"
        elif sum(file.n_bytes for split in splits for file in files_of(split)) <= AT_ONCE:
            self.wait(len(splits))
            self.state = "checksums verified"

    def wait(self, n_splits: int) -> None:
        """Wait until the first splits are verified. Raises DataError if any file is damaged."""
        for verified in self._verified[:n_splits]:
            verified.wait()
        for split in self._splits:
            if split.damage is not None:
                raise split.damage

    def _compare(self) -> None:
        for split, verified in zip(self._splits, self._verified, strict=True):
            try:
                for file in files_of(split):
                    listed = self._listed.get(file.path.name)
                    if listed and file_digest(file) != listed:
                        raise ValueError(
                            f"{file.path} is damaged or was changed (its checksum); prepare the "
                            "data again"
                        )
            except Exception as e:  # raised in the main thread
                for found in self._splits:
                    found.damage = found.damage or DataError(str(e))
            verified.set()


def file_digest(file: NumberFile) -> str:
    """Return the SHA-256 of the whole file, in hex digits."""
    file.file.seek(0)
    return hashlib.file_digest(file.file, "sha256").hexdigest()


def fingerprint(split: Split) -> str:
    """Return 16 hex digits that tell these tokens: SHA-256 of the shards' lengths and first 2^20
    tokens each.

    Masks, if there are any, are part of it. With more than 1,024 shards, it has every n-th one and
    an n-th of these tokens, so that it never reads more than 2 GB.
    """
    every = math.ceil(len(split.shards) / FINGERPRINTED_SHARDS)
    digest = hashlib.sha256(split.lengths.tobytes())
    for file in [*split.shards[::every], *split.masks[::every]]:
        digest.update(file.read(0, FINGERPRINTED // every).tobytes())
    return digest.hexdigest()[:16]


def eval_chunks(split: Split, n: int) -> Iterator[tuple[I64, I64]]:
    """Yield inputs and targets of an evaluation of n windows, about CHUNK tokens at a time."""
    at_once = max(1, CHUNK // split.block_size)
    for first in range(0, n, at_once):
        yield split.eval_batch(np.arange(first, min(first + at_once, n)), n)


def eval_digest(split: Split, n: int) -> str:
    """Return 16 hex digits of the SHA-256 of what an evaluation of n windows reads, and of
    block_size.
    """
    digest = hashlib.sha256(f"{split.block_size} {n}".encode())
    for x, y in eval_chunks(split, n):
        digest.update(x.astype("<i4").tobytes())
        digest.update(y.astype("<i4").tobytes())
    return digest.hexdigest()[:16]


def bytes_per_token(split: Split, n: int, tokenizer: Tokenizer) -> float:
    """Return the bytes of text per target of an evaluation that reads n windows of a split.

    Raises ValueError if the tokenizer lacks one of the tokens, or the windows hold no text, and as
    Split.
    """
    lengths = tokenizer.token_bytes()  # 0 for end_of_text
    n_targets = 0
    n_bytes = 0
    for _, y in eval_chunks(split, n):
        targets = y[y >= 0]
        if targets.max(initial=0) >= len(lengths):  # the model's vocabulary may be padded
            raise ValueError(
                f"the data holds token {targets.max()}, which its tokenizer does not have"
            )
        n_targets += len(targets)
        n_bytes += int(lengths[targets].sum())
    if not n_bytes:
        raise ValueError("the evaluated tokens hold no text")
    return n_bytes / n_targets
