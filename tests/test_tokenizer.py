"""Tokenizers: what they make of text, and of text that is meant to break them; a vocabulary of one's own."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import assert_refused, contents, needs_bpe, raises_one_line
from fineweb import fails
from hypothesis import given
from hypothesis import strategies as st

from data.text.prepare import prepare, train_bpe
from data.token_files import read_meta
from data.tokenizer import CharTokenizer, Tokenizer, from_meta, of_merges, padded_vocab_size, valid_unicode

SOME = "The quick brown fox, the lazy dog; the quicker fox. Über den Wölken. 日本語の文章。\n  x = [1, 22, 333]\n" * 3
SMALL = train_bpe(SOME, 320)
unicode = st.text() | st.text(st.sampled_from("the qu'll\t\n 1é日\u0301\u2003🧀\x00ſ"))


@pytest.fixture(params=["bytes", "bpe", pytest.param("gpt2", marks=needs_bpe)], scope="module")
def known(request: pytest.FixtureRequest) -> tuple[Tokenizer, np.ndarray]:
    """A tokenizer and the lengths of its tokens."""
    tokenizer = from_meta(SMALL.meta() if request.param == "bpe" else {"name": request.param})
    return tokenizer, tokenizer.token_bytes()


def check_text_comes_back(tokenizer: Tokenizer, lengths: np.ndarray, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert not len(ids) or ids.max() < tokenizer.vocab_size
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode_bytes(ids.tolist()).decode() == text
    assert lengths[ids].sum() == len(text.encode())


@given(text=unicode)
def test_any_text_comes_back_and_its_bytes_are_counted(known, text):
    tokenizer, lengths = known
    check_text_comes_back(tokenizer, lengths, text)
    characters = from_meta(CharTokenizer.of(text + "x").meta())
    check_text_comes_back(characters, characters.token_bytes(), text)


def test_description_of_nothing_is_an_error_and_unknown_characters_are_named():
    for meta in ({}, {"name": "char", "chars": ""}, {"name": 3}, {"name": "gpt2", "chars": "a"}):
        with raises_one_line("describes no tokenizer"):
            from_meta(meta)
    with raises_one_line("'x', 'é'", "'abc'"):
        CharTokenizer("abc").encode("aéxb")


@given(st.text())
def test_halves_of_surrogate_pairs_become_the_replacement_character_and_other_text_stays(text):
    assert valid_unicode(text) == text
    halves = f"{text}\ud83d{text}\ude00"
    assert valid_unicode(halves) == (f"{text}\ufffd{text}\ufffd" if text else "\U0001f600")


# ---- a vocabulary of one's own -------------------------------------------------------------------------------


def test_ids_are_bytes_then_merges_then_the_end_of_text():
    tokenizer = of_merges("Ġ t\nh e\nĠt he")
    assert tokenizer.vocab_size == 260
    assert tokenizer.end_of_text == 259
    assert tokenizer.encode("the the\xff").tolist() == [116, 257, 258, 0xC3, 0xBF]
    assert tokenizer.encode_prompt("he<|endoftext|>").tolist() == [257, 259]
    assert 259 not in tokenizer.encode("<|endoftext|>")
    assert tokenizer.token_bytes().tolist() == [1] * 256 + [2, 2, 4, 0]
    assert padded_vocab_size(tokenizer.meta(), 260) == 320


def test_tokenizer_is_trained_on_the_train_part_only_and_is_the_same_each_time(tmp_path, text):
    train = text[:9000]
    for name, val in (("a", text[9000:10_000]), ("b", "Zyzzyva! " * 111 + "q"), ("c", text[9000:10_000])):
        prepare((train + val)[:10_000], tmp_path / name, "bpe", "a text", 500)
    merges = [read_meta(tmp_path / name)["tokenizer"]["merges"] for name in "ab"]
    assert merges[0] == merges[1] == train_bpe(train, 500).meta()["merges"]
    assert contents(tmp_path / "a") == contents(tmp_path / "c")


def test_faults_of_the_options_end_in_one_line_and_write_nothing(tmp_path, script):
    (tmp_path / "a.txt").write_text("the quick brown fox\n" * 50)
    command = ("data/text/prepare.py", tmp_path / "a.txt", "--name", tmp_path / "own")
    fails(script(*command, "--tokenizer=bpe"), "4,096", "--vocab_size=272")
    for options in ("--tokenizer=bpe --vocab_size=256", "--tokenizer=bpe --vocab_size=65537", "--vocab_size=300"):
        assert_refused(script(*command, *options.split()), options.split()[-1], "bpe", 257, "65,536")
    assert not (tmp_path / "own").exists()
