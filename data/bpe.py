"""Trains a byte-pair encoding of one's own: text to the merges of data/tokenizer.py's BpeTokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator

from data.tokenizer import LONGEST_TOKEN, MOST_IDS, SMALLEST_BPE, BpeTokenizer, of_merges

USUAL_SIZE = 4096  # ids, where none is asked for
SAMPLE_BYTES = 100_000_000  # of text to train on
# The trainer takes up to 140 times the size of the different words: 0.3 GB for 100 MB of English or Python, 2.3 GB for
# the 16 MB at which it stops in a language without spaces.
MOST_WORD_BYTES = 16_000_000
BLOCK = 1 << 20  # characters
LONGEST_WORD = 256  # characters
LONG_WORD = re.compile(rf"(\S{{{LONGEST_WORD}}})(?=\S)")


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
    merges = json.loads(encoding.to_str())["model"]["merges"]  # pairs of tokens
    tokenizer = of_merges("\n".join(" ".join(pair) for pair in merges))
    if tokenizer.vocab_size < vocab_size:
        raise ValueError(
            f"the training text has pairs for a vocabulary of at most {tokenizer.vocab_size:,}, not {vocab_size:,}; "
            f"use --vocab_size={tokenizer.vocab_size}, or more text"
        )
    return tokenizer


def check_size(vocab_size: int) -> None:
    """Raises ValueError where a vocabulary cannot have this size."""
    if not SMALLEST_BPE <= vocab_size <= MOST_IDS:
        raise ValueError(
            f"vocab_size={vocab_size} is not from {SMALLEST_BPE} (bytes and the end of text) to {MOST_IDS:,} "
            "(token files hold uint16)"
        )


def sample(text: str, most_bytes: int = SAMPLE_BYTES) -> Iterator[str]:
    """The beginning of a text, about most_bytes of UTF-8 or all, in blocks; less where it has too many words.

    Words of more than LONGEST_WORD characters are cut by newlines: the trainer goes through a whole word for each merge
    in it.
    """
    words: set[str] = set()
    n_bytes = 0
    word_bytes = 0
    for begin in range(0, len(text), BLOCK):
        if n_bytes >= most_bytes or word_bytes > MOST_WORD_BYTES:
            break
        block = text[begin : begin + BLOCK]
        new = set(block.split()) - words
        words |= new
        n_bytes += len(block.encode("utf-8", "surrogatepass"))
        word_bytes += sum(len(word.encode("utf-8", "surrogatepass")) for word in new)
        yield LONG_WORD.sub(r"\1\n", block)
