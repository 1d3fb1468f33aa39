from __future__ import annotations

import numpy as np
import pytest
from conftest import needs_bpe
from hypothesis import given
from hypothesis import strategies as st

from data.tokenizer import CharTokenizer, from_meta, padded_vocab_size, pieces, valid_unicode

texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(texts.filter(bool))
def test_characters_come_back(text):
    tokenizer = from_meta(CharTokenizer.of(text).meta())
    ids = tokenizer.encode(text)
    assert ids.max() < tokenizer.vocab_size == len(set(text))
    assert tokenizer.decode_bytes(ids.tolist()).decode() == text


@needs_bpe
@given(st.text(st.sampled_from("ab ,.'\n\r\t1é\u00a0\u2003"), max_size=200), st.integers(1, 30))
def test_encoding_in_pieces_equals_encoding_the_whole(text, size):
    tokenizer = from_meta({"name": "gpt2"})
    cut = pieces(text, size)
    assert "".join(cut) == text
    joined = [i for piece in cut for i in tokenizer.encode(piece).tolist()]
    assert joined == tokenizer.encode(text).tolist()


@needs_bpe
def test_special_tokens_are_spelt_out_in_data_and_meant_in_prompts():
    tokenizer = from_meta({"name": "gpt2"})
    assert tokenizer.encode_prompt("<|endoftext|>").tolist() == [50256]
    assert 50256 not in tokenizer.encode("<|endoftext|>")


HARD = ["a" * 30_000, " " * 5000 + "x", "\n" * 3000, "\t \n\r\n x", "don't I'LL we'd 'S 'ſ", "<|endoftext|>", "\0\x01"]
HARD += [
    "١٢٣ 4567 Ⅷ ½",
    "日本語の文章。",
    "ไทย",
    "हिन्दी",
    "العربية",
    "e\u0301\u0301",
    "👩‍👩‍👧🏽 🧀",
    "\u200b\ufeff\u2028\u3000x",
]
HARD += ["https://example.org/?a=1&b=%20", "x = {'a': [1, 2]}  # \u00a0", "\U00010000\U0010ffff", "ǅ\u1c80\u0870"]


def check_against_tiktoken(many: list[str]) -> None:
    import tiktoken

    ours = from_meta({"name": "gpt2"}).encode_batch(many)
    assert [ids.tolist() for ids in ours] == [tiktoken.get_encoding("gpt2").encode_ordinary(text) for text in many]
    assert all(ids.dtype == np.uint16 for ids in ours)


@needs_bpe
@given(st.lists(texts, max_size=8))
def test_many_texts_at_once_are_tiktokens_ids(many):
    check_against_tiktoken(many)


@needs_bpe
def test_difficult_texts_are_tiktokens_ids(text):
    check_against_tiktoken(HARD)
    check_against_tiktoken([a[-40:] + b[:40] for a in HARD for b in HARD])
    check_against_tiktoken([text])


def test_unknown_characters_are_named():
    with pytest.raises(ValueError, match="'x', 'é'.*'abc'"):
        CharTokenizer("abc").encode("aéxb")


@pytest.mark.parametrize("meta", [{}, {"name": "char"}, {"name": "char", "chars": ""}, {"name": 3}])
def test_description_of_nothing_is_refused(meta):
    with pytest.raises(ValueError, match="describes no tokenizer"):
        from_meta(meta)


@given(st.text())
def test_halves_of_surrogate_pairs_become_the_replacement_character_and_other_text_stays(text):
    assert valid_unicode(text) == text
    halves = f"{text}\ud83d{text}\ude00"
    assert valid_unicode(halves) == (f"{text}\ufffd{text}\ufffd" if text else "\U0001f600")


@needs_bpe
def test_encodings_that_do_not_exist_or_do_not_fit_are_named():
    with pytest.raises(ValueError, match="'nope'"):
        from_meta({"name": "nope"})


def test_only_bpe_vocabularies_are_padded():
    assert padded_vocab_size({"name": "gpt2"}, 50257) == 50304
    assert padded_vocab_size({"name": "char", "chars": "abc"}, 65) == 65
    assert padded_vocab_size({"name": "bytes"}, 256) == 256
    assert padded_vocab_size({}, 65) == 65
