"""Trains a byte-pair encoding of one's own: text to the merges of data/tokenizer.py's BpeTokenizer."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator

from data.tokenizer import LONGEST_TOKEN, BpeTokenizer, of_merges

# The trainer takes up to 140 times the size of the different words, which are nearly all of a text without spaces.
SAMPLE_BYTES = 16_000_000
BLOCK = 1 << 20  # characters
LONG_WORD = re.compile(r"(\S{256})(?=\S)")


def train(text: str, vocab_size: int) -> BpeTokenizer:
    """A tokenizer of vocab_size ids for such text; the same text makes the same one.

    Raises ValueError if the text has not enough pairs for so many.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    encoding = Tokenizer(models.BPE())
    encoding.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # GPT-2's pattern
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,  # without END_OF_TEXT, which is not text
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=LONGEST_TOKEN,
        show_progress=False,
    )
    encoding.train_from_iterator(sample(text), trainer)
    merges = json.loads(encoding.to_str())["model"]["merges"]  # pairs of tokens
    tokenizer = of_merges("\n".join(" ".join(pair) for pair in merges))
    if tokenizer.vocab_size < vocab_size:
        raise ValueError(
            f"the training text has pairs for a vocabulary of at most {tokenizer.vocab_size:,}, not {vocab_size:,}; "
            f"use --vocab_size={tokenizer.vocab_size}, or more text"
        )
    return tokenizer


def sample(text: str) -> Iterator[str]:
    """Blocks from all over a text, about SAMPLE_BYTES or all of it.

    Long words are cut by newlines: the trainer goes through a whole word for each merge in it.
    """
    every = math.ceil(len(text.encode("utf-8", "surrogatepass")) / SAMPLE_BYTES)
    for begin in range(0, len(text), BLOCK * every):
        yield LONG_WORD.sub(r"\1\n", text[begin : begin + BLOCK])
