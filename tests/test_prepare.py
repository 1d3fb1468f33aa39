"""The prepare.py of texts: what they read and write, what tokenizers make of it, and faults in one
line.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import (
    POSIX,
    ROOT,
    SHAKESPEARE,
    assert_refused,
    contents,
    fails,
    needs_bpe,
    raises_one_line,
)
from hypothesis import given
from hypothesis import strategies as st
from test_export import each_tokenizer
from test_fineweb import PACK, killed_at_rename

from data.prepared import write_dataset
from data.shakespeare_char.prepare import SHA256, download
from data.text.prepare import prepare, train_bpe
from data.text_files import lines_in, read_text
from data.token_files import listed_checksums, read_meta, read_record
from data.tokenizer import (
    BytesTokenizer,
    CharTokenizer,
    Tokenizer,
    from_meta,
    of_merges,
    padded_vocab_size,
)
from deskgpt.files import file_sha256, locked_folder

PREPARE = "data/text/prepare.py"

TEXT = "hello Käse 🧀\r\nand a second line\n" * 300


@pytest.mark.parametrize("suffix", ["", *PACK])
def test_text_is_read_packed_or_not_and_never_cut_short(tmp_path, suffix):
    path = tmp_path / f"a.txt{suffix}"
    content = PACK.get(suffix, bytes)(TEXT.encode("utf-8-sig"))
    path.write_bytes(content)
    assert read_text(path) == TEXT
    assert "".join(lines_in(path)) == TEXT.replace("\r\n", "\n")
    if suffix:
        path.write_bytes(content[:-9])
        with raises_one_line(path, "complete", kind=OSError):
            read_text(path)


# Bytes that are no UTF-8 text, and a command that the line names.
NOT_TEXT = [
    ("Käse".encode("latin-1"), "iconv -f LATIN1"),
    ("Käse".encode("utf-16"), "UTF-16"),
    (b"\xed\xa0\x80 half a surrogate", "iconv"),
    (b"PK\x03\x04" + bytes(50), "save a document (docx, epub) as text"),
    (b"%PDF-1.7 \xff", "pdftotext"),
]


@pytest.mark.parametrize(("content", "named"), NOT_TEXT)
def test_file_that_is_not_text_is_named_with_its_line_and_the_command_that_helps(
    tmp_path, content, named
):
    (tmp_path / "a.txt").write_bytes(b"line\n" + content)
    with raises_one_line(tmp_path / "a.txt", "line 2", named):
        read_text(tmp_path / "a.txt")


def ids_in(folder: Path) -> np.ndarray:
    """Return the tokens of train and val."""
    return np.concatenate(
        [np.fromfile(folder / f"{split}.bin", "<u2") for split in ("train", "val")]
    )


def decoded(folder: Path) -> str:
    """Return the text of train and val, without end_of_text."""
    meta = read_meta(folder)
    ids = ids_in(folder)
    return (
        from_meta(meta["tokenizer"]).decode_bytes(ids[ids != meta["end_of_text"]].tolist()).decode()
    )


of_shakespeare = pytest.mark.skipif(not SHAKESPEARE.exists(), reason="no Shakespeare")
SIZES = [
    ("shakespeare_char", "1,003,854", "111,540"),
    pytest.param("shakespeare", "301,966", "36,059", marks=[needs_bpe, of_shakespeare]),
]


@pytest.mark.parametrize(("name", "train", "val"), SIZES)
def test_shakespeare_has_the_usual_sizes(tmp_path, script, text, name, train, val):
    """By characters, any text of its length has them."""
    (tmp_path / "t").write_text(text)
    done = script(f"data/{name}/prepare.py", "--input", tmp_path / "t", "--out", tmp_path / "s")
    assert f"train.bin has {train} tokens\nval.bin has {val} tokens" in done.out
    assert file_sha256(tmp_path / "t") in (tmp_path / "s" / "meta.json").read_text()


def test_faults_of_texts_and_options_are_named_and_nothing_is_written(tmp_path, script):
    (tmp_path / "empty.txt").write_bytes(b"\xef\xbb\xbf")
    fine = tmp_path / "fine.txt"
    fine.write_text("the quick brown fox\n" * 50)
    to = f"--name={tmp_path / 'own'}"
    for name in ("empty.txt", "nowhere.txt", "pattern*.txt"):
        fails(script(PREPARE, tmp_path / name, to), name)
    fails(script(PREPARE, ROOT / "config", to), "config", "*.txt")
    for command in (PREPARE, "data/chat/prepare.py"):
        fails(script(command, fine, to, "--tokenizer=nope"), "nope", "bytes", "prepared folder")
    fails(script(PREPARE, fine, to, "--tokenizer=bpe"), "4,096", "--vocab_size=272")
    for options in (["--vocab_size=300"], ["--vocab_size=256", "--tokenizer=bpe"]):
        assert_refused(script(PREPARE, fine, to, *options), options[0], "bpe", 257, "65,536")
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize("tokenizer", ["bytes", "char", pytest.param("gpt2", marks=needs_bpe)])
def test_lines_of_end_of_text_become_the_token_or_a_line_tells_that_they_do_not(
    tmp_path, script, tokenizer
):
    stories = [f"Once upon a time {i} there was a Kätzchen 🧀.\n" for i in range(900)]
    (tmp_path / "a.txt").write_text("<|endoftext|>\n".join(stories), "utf-8-sig", newline="\r\n")
    (tmp_path / "0.txt").write_text("A <|endoftext|> in a line.")  # and no newline at the end
    own = tmp_path / "own"
    done = script(PREPARE, tmp_path / "*.txt", "--out", own, "--tokenizer", tokenizer)
    assert done.code == 0, done.err
    assert "900 documents" in done.out
    end_of_text = read_meta(own)["end_of_text"]
    assert ("char has no such token" in done.out) == (end_of_text is None) == (tokenizer == "char")
    if tokenizer != "char":
        assert np.count_nonzero(ids_in(own) == end_of_text) == 900
        assert decoded(own).endswith("\n" + "".join(stories).replace("\n", "\r\n"))


DATA_OR_MARKUP = {
    "a.jsonl": '{"text": "a line"}\n' * 20,
    "b.txt": "\n<!DOCTYPE html><html><p>a line" * 20,
    "a.csv": "id,text\n" + "1,a line\n" * 20,
    "stories.txt": "<|endoftext|>\na line\n" * 20,
    "play.txt": "[Enter HAMLET]\nYes, no, and more, {he} said.\n" * 20,
}


@pytest.mark.parametrize("name", DATA_OR_MARKUP)
def test_data_and_markup_are_named_with_what_reads_their_text(tmp_path, script, name):
    (tmp_path / name).write_text(DATA_OR_MARKUP[name])
    done = script(PREPARE, tmp_path / name, "--out", tmp_path / "own")
    assert done.code == 0
    is_named = f"note: {name} looks like" in done.out and "data/chat/prepare.py" in done.out
    assert is_named == (name not in ("stories.txt", "play.txt"))


def test_folder_means_its_texts_and_another_texts_tokenizer_is_taken_from_its_folder(
    tmp_path, script
):
    (tmp_path / "texts" / "more").mkdir(parents=True)
    for name in ("a.txt", "b.md", "more/b.TXT", ".hidden.txt", "c.py"):
        (tmp_path / "texts" / name).write_text(f"{name}\n" * 20)
    own = tmp_path / "own"
    other = tmp_path / "other"
    assert script(PREPARE, tmp_path / "texts", "--out", own).code == 0
    assert decoded(own) == "a.txt\n" * 20 + "b.md\n" * 20 + "more/b.TXT\n" * 20
    pattern = tmp_path / "texts" / "*.txt"
    assert script(PREPARE, pattern, "--tokenizer", own, "--out", other).code == 0
    assert read_meta(other)["tokenizer"] == read_meta(own)["tokenizer"]


@POSIX
def test_kill_before_any_rename_leaves_the_old_data_or_the_new_or_none(tmp_path):
    def write(text):
        ids = BytesTokenizer().encode(text)
        splits: Any = {"train": ids, "val": ids}
        write_dataset(tmp_path, splits, BytesTokenizer(), "a text", splits)

    write("new ")
    expected = contents(tmp_path)
    for at in (1, 3, 5, 7, 9):
        write("old ")
        assert killed_at_rename(at, functools.partial(write, "new "))
        if (tmp_path / "val.bin").exists():
            for name, digest in listed_checksums(read_record(tmp_path)).items():
                assert file_sha256(tmp_path / name) == digest
        write("new ")
        assert contents(tmp_path) == expected
    with locked_folder(tmp_path), raises_one_line(tmp_path, "wait"):
        write("old ")


def test_download_arrives_complete_or_not_at_all(tmp_path):
    page = tmp_path / "page"
    page.write_bytes(b"hello")
    for url, named in ((page.as_uri(), "checksum"), ("http://127.0.0.1:9/x", "cannot download")):
        with raises_one_line(named, "--input FILE"):
            download(url, tmp_path / "input.txt", SHA256)
    assert not (tmp_path / "input.txt").exists()
    download(page.as_uri(), tmp_path / "input.txt", file_sha256(page))
    assert (tmp_path / "input.txt").read_bytes() == b"hello"


# ---- tokenizers ----------------------------------------------------------------------------------

SOME = (
    "The quick brown fox, the lazy dog; the quicker fox. Über den Wölken. 日本語の文章。\n  x = "
    "[1, 22, 333]\n" * 3
)
SMALL = train_bpe(SOME, 320)
unicode = st.text() | st.text(st.sampled_from("the qu'll\t\n 1é日\u0301\u2003🧀\x00ſ"))


@functools.cache
def known(name: str) -> tuple[Tokenizer, np.ndarray]:
    """Return a tokenizer and the lengths of its tokens."""
    tokenizer = from_meta(SMALL.meta() if name == "bpe" else {"name": name})
    return tokenizer, tokenizer.token_bytes()


@each_tokenizer
@given(text=unicode)
def test_any_text_comes_back_and_its_bytes_are_counted(kind, text):
    if kind == "char":
        meta = CharTokenizer.of(text + "x").meta()
        assert meta == CharTokenizer.of("x" + text[::-1]).meta()  # whatever their order
        tokenizer = from_meta(meta)
        lengths = tokenizer.token_bytes()
    else:
        tokenizer, lengths = known(kind)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert not len(ids) or ids.max() < tokenizer.vocab_size
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode_bytes(ids.tolist()).decode() == text
    assert lengths[ids].sum() == len(text.encode())


def test_ids_are_bytes_then_merges_then_the_end_of_text():
    tokenizer = of_merges("Ġ t\nh e\nĠt he")
    assert tokenizer.end_of_text == 259
    assert tokenizer.encode("the the\xff").tolist() == [116, 257, 258, 0xC3, 0xBF]
    assert padded_vocab_size(tokenizer.meta(), 260) == 320


def test_tokenizer_is_trained_on_the_train_part_only_and_is_the_same_each_time(tmp_path, text):
    train = text[:9000]
    val = text[9000:10_000]
    for name, of_val in (("a", val), ("b", "Zyzzyva! " * 111 + "q"), ("c", val)):
        prepare(train + of_val, tmp_path / name, "bpe", "a text", 500)
    merges = [read_meta(tmp_path / name)["tokenizer"]["merges"] for name in "ab"]
    assert merges[0] == merges[1] == train_bpe(train, 500).meta()["merges"]
    assert contents(tmp_path / "a") == contents(tmp_path / "c")
