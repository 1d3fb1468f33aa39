"""A vocabulary of one's own: what is trained, what it makes of text, and what is refused."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from conftest import TINY, assert_one_line, assert_refused, flags
from fineweb import PREPARE, contents, fails, tokens, write_documents
from hypothesis import given
from hypothesis import strategies as st

from data import bpe
from data.describe import describe
from data.text.prepare import prepare
from data.token_files import read_meta, read_tokens, write_meta
from data.tokenizer import (
    LARGEST_BPE,
    MOST_MERGES_BYTES,
    BpeTokenizer,
    from_meta,
)
from deskgpt.checkpoint import store

SOME = "The quick brown fox, the lazy dog; the quicker fox. Über den Wölken. 日本語の文章。\n  x = [1, 22, 333]\n" * 3
SMALL = bpe.train([SOME], 320)
SMALL_READ = from_meta(SMALL.meta())
unicode = st.text() | st.text(st.sampled_from("the qu'll\t\n 1é日\u0301\u2003🧀\x00ſ"))


# ---- encoding ------------------------------------------------------------------------------------------------


def test_ids_are_bytes_then_merges_then_the_end_of_text():
    tokenizer = BpeTokenizer("Ġ t\nh e\nĠt he")
    assert tokenizer.vocab_size == 260
    assert tokenizer.end_of_text == 259
    assert tokenizer.encode("the the\xff").tolist() == [116, 257, 258, 0xC3, 0xBF]
    assert tokenizer.encode_prompt("he<|endoftext|>").tolist() == [257, 259]
    assert 259 not in tokenizer.encode("<|endoftext|>")
    assert tokenizer.token_bytes().tolist() == [1] * 256 + [2, 2, 4, 0]


@given(st.lists(unicode, max_size=4))
def test_any_unicode_comes_back_many_texts_are_each_text_alone_and_bytes_are_counted(texts):
    for text, ids in zip(texts, SMALL_READ.encode_batch(texts), strict=True):
        assert ids.dtype == np.uint16
        assert SMALL_READ.decode_bytes(ids.tolist()).decode() == text
        assert ids.tolist() == SMALL.encode(text).tolist()
        assert SMALL.token_bytes()[ids].sum() == len(text.encode())


# ---- training ------------------------------------------------------------------------------------------------


def test_words_without_end_are_cut_for_training():
    text = "ACGT" * 1000 + " and more"
    cut = "".join(bpe.sample([text], 10**6))
    assert cut.replace("\n", "") == text
    assert max(map(len, cut.split())) == bpe.LONGEST_WORD
    assert bpe.train([cut], 264).vocab_size == 264


# ---- the description -----------------------------------------------------------------------------------------


def meta_of(merges: object, vocab_size: int) -> dict[str, object]:
    return {"tokenizer": {"name": "bpe", "merges": merges}, "vocab_size": vocab_size, "files": {}}


WRONG = {
    "another size": meta_of("h e\nhe y", 258),
    "a part that is no token": meta_of("h e\nthe y", 259),
    "an empty line": meta_of("h e\n", 259),
    "three parts": meta_of("h e y", 258),
    "half a character": meta_of("h \ud800", 258),
    "a token twice": meta_of("h e\ne y\nhe y\nh ey", 261),
    "a long token": meta_of("\n".join(f"{'a' * 2**i} {'a' * 2**i}" for i in range(8)), 265),
    "many merges": meta_of("h e\n" * LARGEST_BPE, 258),
    "much text": meta_of("h" * (MOST_MERGES_BYTES + 1), 258),
    "null": meta_of(None, 258),
    "no merges": {"tokenizer": {"name": "bpe"}, "vocab_size": 257},
}


@pytest.mark.parametrize("meta", WRONG.values(), ids=WRONG.keys())
def test_description_that_is_not_one_is_refused_in_one_short_line(tmp_path, meta):
    write_meta(tmp_path, meta)
    with pytest.raises(ValueError, match="tokenizer") as e:
        read_meta(tmp_path)
    assert_one_line(str(e.value), tmp_path / "meta.json", "prepare the data again")
    assert len(str(e.value)) < 300 + len(str(tmp_path))


# ---- data/text/prepare.py ------------------------------------------------------------------------------------


def test_tokenizer_is_trained_on_the_train_part_only(tmp_path, text):
    train = text[:9000]
    for name, val in (("a", text[9000:10_000]), ("b", "Zyzzyva! " * 111 + "q"), ("c", text[9000:10_000])):
        prepare((train + val)[:10_000], tmp_path / name, "bpe", "a text", 500)
    made = {name: read_meta(tmp_path / name)["tokenizer"]["merges"] for name in "abc"}
    assert made["a"] == made["b"] == bpe.train([train], 500).merges
    assert contents(tmp_path / "a") == contents(tmp_path / "c")
    prepare(f"{train[:-900]}{'Zyzzyva! ' * 100}{text[9000:10_000]}", tmp_path / "d", "bpe", "a text", 500)
    assert made["a"] != read_meta(tmp_path / "d")["tokenizer"]["merges"]


@pytest.mark.slow
def test_own_text_is_prepared_trained_on_and_sampled_from_where_neither_data_nor_package_is(
    tmp_path, script, text, monkeypatch, capfd
):
    (tmp_path / "novel.txt").write_text(text[:60_000] + " 🧀 Käse", encoding="utf-8")
    command = ("data/text/prepare.py", tmp_path / "novel.txt", "--name", tmp_path / "own", "--tokenizer=bpe")
    done = script(*command, "--vocab_size=600")
    assert (done.code, done.err) == (0, "")
    assert "own: tokenizer bpe, vocab_size 600" in done.out
    assert "already prepared" in script(*command, "--vocab_size=600").out
    tokenizer = from_meta(read_meta(tmp_path / "own")["tokenizer"])
    ids = np.concatenate([read_tokens(tmp_path / "own" / f"{split}.bin") for split in ("train", "val")])
    assert tokenizer.decode_bytes(ids.tolist()).decode() == text[:60_000] + " 🧀 Käse"
    assert describe(tmp_path / "own")
    assert "tokenizer: bpe, vocabulary of 600" in capfd.readouterr().out

    monkeypatch.setitem(sys.modules, "tokenizers", None)  # as where it is not installed
    done = script("train.py", *flags(**TINY, dataset=tmp_path / "own", out_dir=tmp_path / "out"))
    assert done.code == 0, done.err
    log = (tmp_path / "out" / "log.jsonl").read_text()
    assert '"tokenizer": "bpe"' in log
    assert "merges" not in log
    saved = store.load(tmp_path / "out")
    assert saved.tokenizer == tokenizer.meta()
    assert saved.model_args["vocab_size"] == 640
    (tmp_path / "own").rename(tmp_path / "elsewhere")
    sample = ("sample.py", f"--out_dir={tmp_path / 'out'}", "--device=cpu", "--num_samples=1", "--max_new_tokens=20")
    done = script(*sample, "--start=Käse 🧀 <|endoftext|>")
    assert done.code == 0, done.err
    assert done.out.startswith("Käse 🧀 <|endoftext|>")


def test_faults_of_the_options_end_in_one_line_and_write_nothing(tmp_path, script, monkeypatch):
    (tmp_path / "a.txt").write_text("the quick brown fox\n" * 50)
    command = ("data/text/prepare.py", tmp_path / "a.txt", "--name", tmp_path / "own")

    for options, *named in (
        (["--tokenizer=bpe", "--vocab_size=256"], 256, 257),
        (["--tokenizer=bpe", "--vocab_size=65537"], 65537, "65,536"),
        (["--tokenizer=bpe"], "4,096", "--vocab_size=272"),
        (["--tokenizer=bpe", "--vocab_size=260"], "pip install tokenizers"),
    ):
        if named == ["pip install tokenizers"]:
            monkeypatch.setitem(sys.modules, "tokenizers", None)
        fails(script(*command, *options), *named)
    assert_refused(script(*command, "--vocab_size=300"), "--vocab_size", "--tokenizer char", "leave it out")
    assert not (tmp_path / "own").exists()


# ---- data/fineweb_edu/prepare.py -----------------------------------------------------------------------------

OWN = ("--tokenizer=bpe", "--vocab_size=700", "--val_tokens=5000", "--shard_tokens=50_000")


@pytest.mark.parametrize("name", ["a.txt", pytest.param("a.parquet", marks=pytest.mark.slow)])
def test_documents_are_tokenized_by_what_was_trained_on_text_after_val(tmp_path, script, text, name):
    documents = [text[i : i + 3000] for i in range(0, 150_000, 3000)]
    if name == "a.txt":
        documents = ["".join(documents)]
        (tmp_path / name).write_text(documents[0], encoding="utf-8", newline="")
    else:
        write_documents(tmp_path / name, documents)
    done = script(PREPARE, "--source", tmp_path / name, *OWN, "--out", tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    tokenizer = from_meta(read_meta(tmp_path / "out")["tokenizer"])
    assert tokenizer.vocab_size == 700
    ids = tokens(tmp_path / "out")
    assert "".join(documents) == tokenizer.decode_bytes(ids[ids != 699].tolist()).decode()
    assert np.count_nonzero(ids == 699) == len(documents)
    after_val = [documents[0][40_000:]] if name == "a.txt" else [documents[13][1000:], *documents[14:]]
    assert tokenizer.meta() == bpe.train(bpe.sample(after_val, bpe.SAMPLE_BYTES), 700).meta()
    assert "already prepared" in script(PREPARE, "--source", tmp_path / name, *OWN, "--out", tmp_path / "out").out
    prepare = (PREPARE, "--source", tmp_path / name, *OWN)
    fails(script(*prepare, "--vocab_size=701", "--out", tmp_path / "out"), "vocab_size", 700, 701)
    as_bytes = (PREPARE, "--source", tmp_path / name, *OWN[2:], "--tokenizer=bytes")
    fails(script(*as_bytes, "--out", tmp_path / "out"), "tokenizer", "bpe", "bytes")


def test_source_without_text_after_val_is_refused(tmp_path, script, text):
    source = write_documents(tmp_path / "a.jsonl", [text[:20_000]])
    done = script(PREPARE, "--source", source, *OWN, "--out", tmp_path / "out")
    fails(done, "a.jsonl", "40,000", "--val_tokens")
    assert not list((tmp_path / "out").glob("[!.]*"))
