"""The data of a run: its two splits, their checksums, and the bytes of text that a token stands
for.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.batches import BatchSplit, Checksums, Split
from data.meta_files import read_record
from data.token_files import GPT2, check_vocabulary, listed_checksums, read_meta, token_files
from data.tokenizer import Tokenizer, from_meta_offline, padded_vocab_size
from deskgpt.files import sha256

SPLITS = ("train", "val")
SHORT = 256  # tokens of a text on which a model is checked


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
        self.checksums = Checksums(
            self.folder, (self.train, self.val) if compares_checksums else ()
        )
        self.train.check = self.checksums.check
        # It is the same at every evaluation of a run.
        self._eval_digest = functools.cache(self.val.eval_digest)

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
                "fingerprint": split.fingerprint(),
                "sha256": checksum,
            }
        return found

    def changes(self) -> list[str]:
        """Return a warning for each file that was written into since the last call."""
        written = [
            file.path for file in self.train.files() + self.val.files() if file.was_written()
        ]
        return [
            f"{path} was written into while this run reads it: its tokens may have changed"
            for path in written
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


# ---- the text behind the tokens ------------------------------------------------------------------


def bytes_per_token(split: Split, n: int, tokenizer: Tokenizer) -> float:
    """Return the bytes of text per target of an evaluation that reads n windows of a split.

    Raises ValueError if the tokenizer lacks one of the tokens, or the windows hold no text, and as
    Split.
    """
    lengths = tokenizer.token_bytes()  # 0 for end_of_text
    n_targets = 0
    n_bytes = 0
    for _, y in split.eval_chunks(n):
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
