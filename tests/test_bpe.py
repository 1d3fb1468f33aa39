"""A vocabulary of one's own: what is trained, what it makes of text, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_tokenizer import HARD

from data import bpe
from data.tokenizer import CHAR_OF_BYTE, BpeTokenizer, from_meta

SOME = "The quick brown fox, the lazy dog; the quicker fox. Über den Wölken. 日本語の文章。\n  x = [1, 22, 333]\n" * 3
SMALL = bpe.train([SOME], 320)
unicode = st.text() | st.text(st.sampled_from("the qu'll\t\n 1é日\u0301\u2003🧀\x00ſ"))


# ---- encoding ------------------------------------------------------------------------------------------------


@given(unicode)
def test_any_unicode_comes_back_from_a_tokenizer_that_never_saw_it(text):
    tokenizer = from_meta(SMALL.meta())
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert tokenizer.decode_bytes(ids.tolist()).decode() == text


@given(st.binary())
def test_bytes_that_are_no_utf8_come_back_as_they_do_from_the_bytes_tokenizer(raw):
    ids = SMALL.encode(raw.decode("utf-8", "surrogateescape"))
    assert SMALL.decode_bytes(ids.tolist()) == raw


def test_half_a_surrogate_pair_which_utf8_cannot_spell_is_refused_as_by_the_bytes_tokenizer():
    for tokenizer in (SMALL, from_meta({"name": "bytes"})):
        with pytest.raises(ValueError, match=r"\\ud800"):
            tokenizer.encode("a\ud800")


def test_ids_are_bytes_then_merges_then_the_end_of_text():
    tokenizer = BpeTokenizer("Ġ t\nh e\nĠt he")
    assert tokenizer.vocab_size == 260
    assert tokenizer.end_of_text == 259
    assert tokenizer.encode("the the\xff").tolist() == [116, 257, 258, 0xC3, 0xBF]
    assert tokenizer.encode_prompt("he<|endoftext|>").tolist() == [257, 259]
    assert 259 not in tokenizer.encode("<|endoftext|>")
    assert tokenizer.token_bytes().tolist() == [1] * 256 + [2, 2, 4, 0]


@given(st.lists(unicode, max_size=4))
def test_many_texts_at_once_are_each_text_alone_and_bytes_are_counted(texts):
    for text, ids in zip(texts, SMALL.encode_batch(texts), strict=True):
        assert ids.tolist() == SMALL.encode(text).tolist()
        assert SMALL.token_bytes()[ids].sum() == len(text.encode())


def ids_of_the_tokenizers_package(tokenizer: BpeTokenizer, texts: list[str]) -> list[list[int]]:
    """What the package that trains makes of texts with the same merges."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    merges = [(left, right) for left, right in (line.split(" ") for line in tokenizer.merges.split("\n"))]
    tokens = [CHAR_OF_BYTE[byte] for byte in range(256)] + [left + right for left, right in merges]
    theirs = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return [encoding.ids for encoding in theirs.encode_batch(texts)]


@given(st.lists(unicode, min_size=1, max_size=8))
def test_ids_of_any_text_are_those_of_the_package_that_trains(texts):
    assert [ids.tolist() for ids in SMALL.encode_batch(texts)] == ids_of_the_tokenizers_package(SMALL, texts)


def test_ids_of_difficult_texts_are_those_of_the_package_that_trains(text):
    tokenizer = bpe.train([text[:50_000], *HARD], 1500)
    texts = [*HARD, *(a[-40:] + b[:40] for a in HARD for b in HARD), text[40_000:80_000]]
    ours = [ids.tolist() for ids in tokenizer.encode_batch(texts)]
    assert ours == ids_of_the_tokenizers_package(tokenizer, texts)


# ---- training ------------------------------------------------------------------------------------------------


def test_training_reaches_the_size_and_a_second_training_is_the_same():
    assert SMALL.vocab_size == 320
    assert bpe.train([SOME], 320).merges == SMALL.merges


@pytest.mark.parametrize("size", [0, -1, 256, 65_537])
def test_sizes_that_no_vocabulary_can_have_are_refused(size):
    with pytest.raises(ValueError, match=f"vocab_size={size} is not from 257 .* to 65,536"):
        bpe.train([SOME], size)


def test_text_too_small_for_the_size_is_refused_with_the_size_that_it_reaches():
    with pytest.raises(ValueError, match="at most 263, not 300; use --vocab_size=263"):
        bpe.train(["the the aaa"], 300)
    assert bpe.train(["the the aaa"], 263).vocab_size == 263
