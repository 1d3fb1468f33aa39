"""The text behind the tokens of a split: which it is, how long, and what a loss is in bits per byte of it."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from data.splits import I64, SCANNED, Split
from data.token_files import CHUNK
from data.tokenizer import Lengths, Tokenizer

BEGINNING = 1 << 16  # bytes of text that a split is identified by


@dataclass(frozen=True)
class TextStatistics:
    """About the text of a split and of its evaluated windows. Special tokens are not text: they have no bytes."""

    targets: int  # tokens that an evaluation predicts
    evaluated_bytes: int  # of the text of these tokens
    beginning: str  # SHA-256 of the split's first 64 KiB of text, 16 hex digits: the same with any tokenizer
    all_bytes: int | None  # of the whole split's text; None for a split that would take long to read

    def as_metadata(self) -> dict[str, Any]:
        """What a run's log keeps of them."""
        return {
            "bytes_per_token": self.evaluated_bytes / self.targets,
            "val_bytes": self.evaluated_bytes,
            "val_text": self.beginning,
            "val_text_bytes": self.all_bytes,
        }

    def bits_per_byte(self, loss: float) -> float:
        """A mean loss of the targets (nats per token) in bits per byte of their text (The Pile, arXiv:2101.00027, 3.1).

        Tokenizers cut the same text into tokens of different lengths; bits per byte compare between them. The nats of
        end_of_text count, though it has no bytes: where documents end is a part of what a model has to predict.
        """
        return loss * (self.targets / self.evaluated_bytes) / math.log(2)


def text_statistics(split: Split, n: int, tokenizer: Tokenizer) -> TextStatistics:
    """The statistics of a split whose evaluation reads n windows.

    They follow from the windows alone, not from micro-batches or ranks. Raises ValueError if the tokenizer lacks one
    of the tokens, or no text is evaluated, and as Split if files cannot be read.
    """
    lengths = tokenizer.token_bytes()
    evaluated = np.zeros(split.vocab_size, np.int64)  # how often each token is a target; those of -1 count nowhere
    at_once = max(1, CHUNK // split.block_size)
    for first in range(0, n, at_once):
        _, y = split.eval_batch(np.arange(first, min(first + at_once, n)), n)
        evaluated += np.bincount(y[y >= 0], minlength=split.vocab_size)
    evaluated_bytes = total_bytes(evaluated, lengths)
    if not evaluated_bytes:
        raise ValueError("the evaluated tokens hold no text")
    all_bytes = None
    if split.tokens <= SCANNED:
        whole = np.zeros(split.vocab_size, np.int64)
        for shard in split.shards:
            for _, ids in shard.chunks():
                whole += np.bincount(ids, minlength=split.vocab_size)
        all_bytes = total_bytes(whole, lengths)
    beginning = hashlib.sha256(text_beginning(split, tokenizer, lengths)).hexdigest()[:16]
    return TextStatistics(int(evaluated.sum()), evaluated_bytes, beginning, all_bytes)


def total_bytes(counts: I64, lengths: Lengths) -> int:
    """Bytes of text of tokens that occur `counts` (vocab_size,) times. Raises ValueError if one has no length.

    The model's vocabulary, that of counts, may be padded.
    """
    check_known(np.flatnonzero(counts), lengths)
    known = counts[: len(lengths)]
    return int(known @ lengths[: len(known)])


def check_known(ids: npt.NDArray[Any], lengths: Lengths) -> None:
    """Raises ValueError if a token is past the tokenizer's vocabulary."""
    if len(ids) and ids.max() >= len(lengths):
        raise ValueError(f"the data holds token {ids.max()}, which its tokenizer does not have")


def text_beginning(split: Split, tokenizer: Tokenizer, lengths: Lengths) -> bytes:
    """The first BEGINNING bytes of the split's text, or all of it. Raises ValueError as total_bytes."""
    text = b""
    for shard in split.shards:
        for first in range(0, len(shard), BEGINNING):  # no token of the text is shorter than a byte
            ids = shard.read(first, BEGINNING)
            check_known(ids, lengths)
            text += tokenizer.decode_bytes(ids[lengths[ids] > 0].tolist())
            if len(text) >= BEGINNING:
                return text[:BEGINNING]
    return text
