"""The text that the tokens of a split stand for: which it is, how long, and what a loss is in bits per byte of it."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from data.splits import I64, SCANNED, Split
from data.tokenizer import Lengths, Tokenizer

BEGINNING = 1 << 16  # bytes of text that a split is identified by
AT_ONCE = 1 << 20  # tokens


@dataclass(frozen=True)
class TextFacts:
    """About the text of a split and of its evaluated windows. Special tokens are not text: they have no bytes."""

    targets: int  # tokens that an evaluation predicts
    evaluated_bytes: int  # of the text of these tokens
    beginning: str  # SHA-256 of the split's first 64 KiB of text, 16 hex digits: the same with any tokenizer
    all_bytes: int | None  # of the whole split's text; None for a split that would take long to read

    def as_facts(self) -> dict[str, Any]:
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


def text_facts(split: Split, n: int, tokenizer: Tokenizer) -> TextFacts:
    """The facts of a split whose evaluation reads n windows.

    They follow from the windows alone, not from micro-batches or ranks. Raises ValueError where the tokenizer lacks one
    of the tokens, or no text is evaluated, and as Split where files cannot be read.
    """
    lengths = tokenizer.token_bytes()
    counts = evaluated_tokens(split, n)
    evaluated_bytes = total_bytes(counts, lengths)
    if not evaluated_bytes:
        raise ValueError("the evaluated tokens hold no text")
    whole = None
    if split.tokens <= SCANNED:
        whole = np.zeros(split.vocab_size, np.int64)
        for shard in split.shards:
            for _, ids in shard.pieces():
                whole += np.bincount(ids, minlength=split.vocab_size)
    return TextFacts(
        targets=int(counts.sum()),
        evaluated_bytes=evaluated_bytes,
        beginning=hashlib.sha256(beginning(split, tokenizer, lengths)).hexdigest()[:16],
        all_bytes=None if whole is None else total_bytes(whole, lengths),
    )


def evaluated_tokens(split: Split, n: int) -> I64:
    """How often each token (vocab_size,) is a target of an evaluation of n windows; targets of -1 count nowhere."""
    counts = np.zeros(split.vocab_size, np.int64)
    rows = max(1, AT_ONCE // split.block_size)
    for first in range(0, n, rows):
        _, y = split.eval_batch(np.arange(first, min(first + rows, n)), n)
        counts += np.bincount(y[y >= 0], minlength=split.vocab_size)
    return counts


def total_bytes(counts: I64, lengths: Lengths) -> int:
    """Bytes of text of tokens that occur so often. Raises ValueError where one has no length.

    The model's vocabulary, that of counts, may be padded.
    """
    check_known(np.flatnonzero(counts), lengths)
    known = counts[: len(lengths)]
    return int(known @ lengths[: len(known)])


def check_known(ids: npt.NDArray[Any], lengths: Lengths) -> None:
    """Raises ValueError where a token is past the tokenizer's vocabulary."""
    if len(ids) and ids.max() >= len(lengths):
        raise ValueError(f"the data holds token {ids.max()}, which its tokenizer does not have")


def beginning(split: Split, tokenizer: Tokenizer, lengths: Lengths) -> bytes:
    """The first BEGINNING bytes of the split's text, or all of it. Raises ValueError as total_bytes."""
    text = b""
    for shard in split.shards:
        for first in range(0, len(shard), BEGINNING):  # no token of the text is shorter than a byte
            ids = shard.read(first, min(BEGINNING, len(shard) - first))
            check_known(ids, lengths)
            text += tokenizer.decode_bytes(ids[lengths[ids] > 0].tolist())
            if len(text) >= BEGINNING:
                return text[:BEGINNING]
    return text
