"""The text behind the tokens of a split: which it is, how long, and what a loss is in bits per byte of it."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from data.splits import SCANNED, Split
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
    targets = 0
    evaluated_bytes = 0
    for _, y in split.eval_chunks(n):
        learned = y[y >= 0]
        targets += len(learned)
        evaluated_bytes += total_bytes(learned, lengths)
    if not evaluated_bytes:
        raise ValueError("the evaluated tokens hold no text")
    all_bytes = None
    if split.tokens <= SCANNED:
        all_bytes = sum(total_bytes(ids, lengths) for shard in split.shards for _, ids in shard.chunks())
    beginning = hashlib.sha256(text_beginning(split, tokenizer, lengths)).hexdigest()[:16]
    return TextStatistics(targets, evaluated_bytes, beginning, all_bytes)


def total_bytes(ids: npt.NDArray[Any], lengths: Lengths) -> int:
    """Bytes of text of these tokens. Raises ValueError if one is past the tokenizer's vocabulary."""
    if len(ids) and ids.max() >= len(lengths):  # the model's vocabulary may be padded
        raise ValueError(f"the data holds token {ids.max()}, which its tokenizer does not have")
    return int(lengths[ids].sum())


def text_beginning(split: Split, tokenizer: Tokenizer, lengths: Lengths) -> bytes:
    """The first BEGINNING bytes of the split's text, or all of it. Raises ValueError as total_bytes."""
    text = b""
    for shard in split.shards:
        for first in range(0, len(shard), BEGINNING):  # no token of the text is shorter than a byte
            ids = shard.read(first, BEGINNING)
            if total_bytes(ids, lengths):
                text += tokenizer.decode_bytes(ids[lengths[ids] > 0].tolist())
            if len(text) >= BEGINNING:
                return text[:BEGINNING]
    return text
