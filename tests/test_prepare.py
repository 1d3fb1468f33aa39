"""The prepare.py of texts: what they read and write, what tokenizers make of it, and faults in one
line.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import (
    ROOT,
    SHAKESPEARE,
    assert_refused,
    contents,
    needs_bpe,
    raises_one_line,
)
from hypothesis import given
from hypothesis import strategies as st
from test_fineweb import PACK, UNTIL_RENAME, fails

from data.shakespeare_char.prepare import SHA256, download
from data.text.prepare import prepare, train_bpe
from data.text_files import lines_in, read_text
from data.token_files import read_meta, read_record
from data.tokenizer import (
    BytesTokenizer,
    CharTokenizer,
    Tokenizer,
    from_meta,
    of_merges,
    padded_vocab_size,
)

PREPARE = "data/text/prepare.py"

TEXT = "hello Käse 🧀\r\nand a second line\n" * 300


@pytest.mark.parametrize("suffix", ["", *PACK])
def test_text_is_read_packed_or_not_and_never_cut_short(tmp_path, suffix):
    path = tmp_path / f"a.txt{suffix}"
    content = TEXT.encode("utf-8-sig")
    content = PACK[suffix](content) if suffix else content
    path.write_bytes(content)
    assert read_text(path) == TEXT
    assert "".join(lines_in(path)) == TEXT.replace("\r\n", "\n")
    if suffix:
        path.write_bytes(content[:-9])
        with raises_one_line(path, "is damaged", kind=OSError):
            read_text(path)


# Files that are no UTF-8 text, and what the line names.
NOT_TEXT: dict[str, tuple[bytes, str]] = {
    "latin-1.txt": (
        "line\nKäse".encode("latin-1"),
        "line 2: this is not UTF-8 text: save it as UTF-8",
    ),
    "gbk.txt": (
        "line\n文章".encode("gbk"),
        "iconv -f LATIN1 -t UTF-8 if it is Latin-1 (likewise GBK",
    ),
    "half a surrogate.txt": (b"line\n\xed\xa0\x80", "line 2: this is not UTF-8 text"),
    "windows.txt": ("Käse".encode("utf-16"), "line 1: this is UTF-16: use iconv -f UTF-16"),
    "a.zip": (b"PK\x03\x04" + bytes(50), "line 1: this is a zip archive: unpack it with unzip"),
    "a.docx": (b"PK\x03\x04" + bytes(50), "pandoc -t plain"),
    "a.tar.gz": (gzip.compress(bytes(512)), "tar -xf"),
    "paper.pdf": (b"%PDF-1.7 all of it ASCII", "a PDF: use pdftotext"),
    "packed under another name.txt": (PACK[".gz"](b"line"), "give it the suffix of its kind, .gz"),
    "a.parquet": (b"PAR1" + bytes(50), "a table: use python data/fineweb_edu/prepare.py --source"),
}


@pytest.mark.parametrize("name", NOT_TEXT)
def test_file_that_is_not_text_is_named_with_its_line_and_the_command_that_helps(tmp_path, name):
    content, named = NOT_TEXT[name]
    (tmp_path / name).write_bytes(content)
    with raises_one_line(tmp_path / name, named):
        read_text(tmp_path / name)


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


SIZES = [
    ("shakespeare_char", "1,003,854", "111,540"),
    pytest.param("shakespeare", "301,966", "36,059", marks=needs_bpe),
]


@pytest.mark.skipif(not SHAKESPEARE.exists(), reason="tiny Shakespeare's text is not at hand")
@pytest.mark.parametrize(("name", "train", "val"), SIZES)
def test_shakespeare_has_the_usual_sizes(tmp_path, script, name, train, val):
    done = script(f"data/{name}/prepare.py", "--input", SHAKESPEARE, "--out", tmp_path / "s")
    assert (done.code, done.err) == (0, "")
    assert f"train.bin has {train} tokens" in done.out
    assert f"val.bin has {val} tokens" in done.out
    assert decoded(tmp_path / "s") == SHAKESPEARE.read_text()
    assert SHA256 in (tmp_path / "s" / "meta.json").read_text()


def test_faults_of_texts_and_options_are_named_and_nothing_is_written(tmp_path, script):
    (tmp_path / "empty.txt").write_bytes(b"\xef\xbb\xbf")
    fine = tmp_path / "fine.txt"
    fine.write_text("the quick brown fox\n" * 50)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "tokenizer.json").write_text("{}")
    to = f"--name={tmp_path / 'own'}"
    for name in ("empty.txt", "nowhere.txt", "pattern*.txt", "none"):
        fails(script(PREPARE, tmp_path / name, to), name)
    fails(script(PREPARE, ROOT / "config", to), "config", "*.txt")
    for tokenizer in ("nope", tmp_path / "theirs", tmp_path / "theirs" / "tokenizer.json"):
        for command in (PREPARE, "data/chat/prepare.py"):
            fails(
                script(command, fine, to, f"--tokenizer={tokenizer}"),
                tokenizer,
                "bytes",
                "prepared folder",
            )
    fails(script(PREPARE, fine, to, "--tokenizer=bpe"), "4,096", "--vocab_size=272")
    for options in (
        "--vocab_size=300",
        "--vocab_size=256 --tokenizer=bpe",
        "--vocab_size=65537 --tokenizer=bpe",
    ):
        assert_refused(
            script(PREPARE, fine, to, *options.split()), options.split()[0], "bpe", 257, "65,536"
        )
    for option in ("--name=", "--out="):  # which would be the working directory
        assert_refused(script(PREPARE, fine, option), option.rstrip("="))
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize(
    "tokenizer", ["bytes", "bpe", "char", pytest.param("gpt2", marks=needs_bpe)]
)
def test_lines_of_end_of_text_become_the_token_or_a_line_tells_that_they_do_not(
    tmp_path, script, tokenizer
):
    stories = [f"Once upon a time {i} there was a Kätzchen 🧀.\n" for i in range(900)]
    (tmp_path / "a.txt").write_text("<|endoftext|>\n".join(stories), "utf-8-sig", newline="\r\n")
    (tmp_path / "0.txt").write_text("A <|endoftext|> in a line.")  # and no newline at the end
    size = ["--vocab_size=300"] if tokenizer == "bpe" else []
    done = script(
        PREPARE, tmp_path / "*.txt", "--out", tmp_path / "own", "--tokenizer", tokenizer, *size
    )
    assert done.code == 0, done.err
    assert "900 documents" in done.out
    end_of_text = read_meta(tmp_path / "own")["end_of_text"]
    assert ("char has no such token" in done.out) == (end_of_text is None) == (tokenizer == "char")
    if tokenizer != "char":
        assert np.count_nonzero(ids_in(tmp_path / "own") == end_of_text) == 900
        assert decoded(tmp_path / "own").endswith("\n" + "".join(stories).replace("\n", "\r\n"))


def test_short_val_is_said_and_dialogues_are_sent_to_the_script_that_reads_them(tmp_path, script):
    line = "a line of a document\n"
    (tmp_path / "a.txt").write_text(line * 300 + "<|endoftext|>\nand a short one\n")
    done = script(PREPARE, tmp_path / "a.txt", "--out", tmp_path / "own")
    assert "note: val has 16 of 6,330 characters" in done.out
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n' * 20)
    done = script(PREPARE, tmp_path / "chat.jsonl", "--out", tmp_path / "own")
    assert "data/chat/prepare.py (dialogues)" in done.out


DATA_OR_MARKUP = {
    "a.txt": ('{"text": "a line"}\n' * 20, ["JSON"]),
    "a.json": ("\n" + json.dumps([{"text": "a line"}] * 20, indent=1), ["JSON"]),
    "b.txt": ("\n<!DOCTYPE html><html><p>a line" * 20, ["HTML"]),
    "a.csv": ("id,text\n" + "1,a line\n" * 20, ["CSV"]),
    "stories.txt": ("<|endoftext|>\na line\n" * 20, []),
    "play.txt": ("[Enter HAMLET]\nYes, no, and more, {he} said.\n" * 20, []),
}


@pytest.mark.parametrize("name", DATA_OR_MARKUP)
def test_data_and_markup_are_named_with_what_reads_their_text(tmp_path, script, name):
    content, kind = DATA_OR_MARKUP[name]
    (tmp_path / name).write_text(content)
    done = script(PREPARE, tmp_path / name, "--out", tmp_path / "own")
    assert done.code == 0
    assert re.findall(rf"^note: {name} looks like (\w+)", done.out, re.M) == kind


def test_folder_means_its_texts_and_another_texts_tokenizer_is_taken_from_its_folder(
    tmp_path, script
):
    (tmp_path / "texts" / "more").mkdir(parents=True)
    for name, text in (
        ("a.txt", "one\n"),
        ("more/b.TXT", "two\n"),
        (".hidden.txt", "x"),
        ("c.md", "x"),
    ):
        (tmp_path / "texts" / name).write_text(text * 20)
    assert script(PREPARE, tmp_path / "texts", "--out", tmp_path / "own").code == 0
    assert decoded(tmp_path / "own") == "one\n" * 20 + "two\n" * 20
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "c.md").write_text("three\n" * 20)
    assert script(PREPARE, tmp_path / "notes", "--out", tmp_path / "notes").code == 0
    assert decoded(tmp_path / "notes") == "three\n" * 20
    pattern = tmp_path / "texts" / "*.txt"
    assert (
        script(PREPARE, pattern, "--tokenizer", tmp_path / "own", "--out", tmp_path / "other").code
        == 0
    )
    assert read_meta(tmp_path / "other")["tokenizer"] == read_meta(tmp_path / "own")["tokenizer"]


@pytest.mark.skipif(os.name == "nt", reason="the quick Python of the tests is for POSIX")
@pytest.mark.parametrize("when", ["before", "after"])
def test_kill_at_any_rename_leaves_the_old_data_or_the_new_or_none(tmp_path, python, script, when):
    prepare = [PREPARE, "--tokenizer=bytes", "--out", tmp_path / "own"]
    for text in ("old ", "new "):
        (tmp_path / text.strip()).write_text(text * 50)
    for at in "123":
        assert script(*prepare, tmp_path / "old").code == 0
        code = (
            f"{UNTIL_RENAME}import runpy; sys.argv = options; "
            "runpy.run_path(options[0], run_name='__main__')"
        )
        subprocess.run(
            [python, "-c", code, at, when, *prepare, tmp_path / "new"],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
        )
        if (tmp_path / "own" / "val.bin").exists():
            for name, entry in read_record(tmp_path / "own")["files"].items():
                assert (
                    hashlib.sha256((tmp_path / "own" / name).read_bytes()).hexdigest()
                    == entry["sha256"]
                )
        assert script(*prepare, tmp_path / "new").code == 0
        assert decoded(tmp_path / "own") == "new " * 50
        assert {path.name for path in (tmp_path / "own").glob("[!.]*")} == {
            "train.bin",
            "val.bin",
            "meta.json",
        }


@pytest.mark.parametrize(("content", "reason"), [(b"", "cannot download"), (b"hello", "checksum")])
def test_download_arrives_complete_or_not_at_all(tmp_path, content, reason):
    (tmp_path / "page").write_bytes(content)
    url = (tmp_path / "page").as_uri() if content else "http://127.0.0.1:9/x"
    with raises_one_line(reason, "--input FILE"):
        download(url, tmp_path / "input.txt", SHA256)
    assert not (tmp_path / "input.txt").exists()
    download(
        (tmp_path / "page").as_uri(), tmp_path / "input.txt", hashlib.sha256(content).hexdigest()
    )
    assert (tmp_path / "input.txt").read_bytes() == content


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


@pytest.mark.parametrize("kind", ["char", "bytes", "bpe", pytest.param("gpt2", marks=needs_bpe)])
@given(text=unicode)
def test_any_text_comes_back_and_its_bytes_are_counted(kind, text):
    if kind == "char":
        tokenizer = from_meta(CharTokenizer.of(text + "x").meta())
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
    assert tokenizer.vocab_size == 260
    assert tokenizer.end_of_text == 259
    assert tokenizer.encode("the the\xff").tolist() == [116, 257, 258, 0xC3, 0xBF]
    assert tokenizer.encode_prompt("he<|endoftext|>").tolist() == [257, 259]
    assert BytesTokenizer().encode_prompt("h<|endoftext|>").tolist() == [104, 255]
    assert 259 not in tokenizer.encode("<|endoftext|>")
    assert tokenizer.token_bytes().tolist() == [1] * 256 + [2, 2, 4, 0]
    assert padded_vocab_size(tokenizer.meta(), 260) == 320


def test_tokenizer_is_trained_on_the_train_part_only_and_is_the_same_each_time(tmp_path, text):
    train = text[:9000]
    for name, val in (
        ("a", text[9000:10_000]),
        ("b", "Zyzzyva! " * 111 + "q"),
        ("c", text[9000:10_000]),
    ):
        prepare((train + val)[:10_000], tmp_path / name, "bpe", "a text", 500)
    merges = [read_meta(tmp_path / name)["tokenizer"]["merges"] for name in "ab"]
    assert merges[0] == merges[1] == train_bpe(train, 500).meta()["merges"]
    assert contents(tmp_path / "a") == contents(tmp_path / "c")
