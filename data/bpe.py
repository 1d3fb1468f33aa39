"""Trains a byte-pair encoding of one's own: text to the merges of data/tokenizer.py's BpeTokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from data.tokenizer import LARGEST_BPE, LONGEST_TOKEN, SMALLEST_BPE, BpeTokenizer

SAMPLE_BYTES = 100_000_000  # of text: enough for the counts of pairs; memory and time grow with it


def train(texts: Iterable[str], vocab_size: int) -> BpeTokenizer:
    """A tokenizer of vocab_size ids for such texts; the same texts make the same one.

    Raises ValueError where vocab_size is out of range, or larger than what the texts have pairs for.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    check_size(vocab_size)
    encoding = Tokenizer(models.BPE())
    encoding.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # GPT-2's pattern
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,  # without END_OF_TEXT, which is no text
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=LONGEST_TOKEN,
        show_progress=False,
    )
    encoding.train_from_iterator(texts, trainer)
    merges = json.loads(encoding.to_str())["model"]["merges"]  # pairs, or in older versions lines
    tokenizer = BpeTokenizer("\n".join(pair if isinstance(pair, str) else " ".join(pair) for pair in merges))
    if tokenizer.vocab_size < vocab_size:
        raise ValueError(
            f"the text has pairs for a vocabulary of at most {tokenizer.vocab_size:,}, not {vocab_size:,}; "
            f"use --vocab_size={tokenizer.vocab_size}"
        )
    return tokenizer


def check_size(vocab_size: int) -> None:
    """Raises ValueError where a vocabulary cannot have this size."""
    if not SMALLEST_BPE <= vocab_size <= LARGEST_BPE:
        raise ValueError(
            f"vocab_size={vocab_size} is not from {SMALLEST_BPE} (bytes and the end of text) to {LARGEST_BPE:,} "
            "(token files hold uint16)"
        )


def first_bytes(texts: Iterable[str], most: int) -> Iterator[str]:
    """The first of the texts, as many as it takes to reach `most` bytes of UTF-8, or all."""
    for text in texts:
        if most <= 0:
            return
        yield text
        most -= len(text.encode())
