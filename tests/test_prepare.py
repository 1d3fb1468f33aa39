"""The prepare.py of texts: what they write, and what they print when something is wrong."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, SHAKESPEARE, assert_refused, contents, files_of_at_most, needs_bpe, raises_one_line
from fineweb import UNTIL_RENAME, fails

from data.meta_files import read_record
from data.shakespeare_char.prepare import SHA256, download
from data.token_files import read_meta
from data.tokenizer import from_meta

PREPARE = "data/text/prepare.py"


def ids_in(folder: Path) -> np.ndarray:
    """Return the tokens of train and val."""
    return np.concatenate([np.fromfile(folder / f"{split}.bin", "<u2") for split in ("train", "val")])


def decoded(folder: Path) -> str:
    """Return the text of train and val, without end_of_text."""
    meta = read_meta(folder)
    ids = ids_in(folder)
    return from_meta(meta["tokenizer"]).decode_bytes(ids[ids != meta["end_of_text"]].tolist()).decode()


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


def test_faults_of_own_text_are_named_and_nothing_is_written(tmp_path, script):
    (tmp_path / "empty.txt").write_bytes(b"\xef\xbb\xbf")
    (tmp_path / "fine.txt").write_bytes(b"abc" * 50)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "tokenizer.json").write_text("{}")
    for name in ("empty.txt", "nowhere.txt", "pattern*.txt", "none"):
        fails(script(PREPARE, tmp_path / name, "--name", tmp_path / "own"), name)
    fails(script(PREPARE, ROOT / "config", "--name", tmp_path / "own"), "config", "*.txt")
    for tokenizer in ("nope", tmp_path / "theirs", tmp_path / "theirs" / "tokenizer.json"):
        for prepare in (PREPARE, "data/chat/prepare.py"):
            done = script(prepare, tmp_path / "fine.txt", f"--tokenizer={tokenizer}", "--out", tmp_path / "own")
            fails(done, tokenizer, "bytes", "prepared folder")
    for option in ("--name=", "--out="):  # which would be the working directory
        assert_refused(script(PREPARE, tmp_path / "fine.txt", option), option.rstrip("="))
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe", "char", pytest.param("gpt2", marks=needs_bpe)])
def test_lines_of_end_of_text_become_the_token_or_a_line_tells_that_they_do_not(tmp_path, script, tokenizer):
    stories = [f"Once upon a time {i} there was a Kätzchen 🧀.\n" for i in range(900)]
    (tmp_path / "a.txt").write_text("<|endoftext|>\n".join(stories), "utf-8-sig", newline="\r\n")
    (tmp_path / "0.txt").write_text("A <|endoftext|> in a line.")  # and no newline at the end
    size = ["--vocab_size=300"] if tokenizer == "bpe" else []
    done = script(PREPARE, tmp_path / "*.txt", "--out", tmp_path / "own", "--tokenizer", tokenizer, *size)
    assert done.code == 0, done.err
    assert "900 documents" in done.out
    end_of_text = read_meta(tmp_path / "own")["end_of_text"]
    assert ("char has no such token" in done.out) == (end_of_text is None) == (tokenizer == "char")
    if tokenizer != "char":
        assert np.count_nonzero(ids_in(tmp_path / "own") == end_of_text) == 900
        assert decoded(tmp_path / "own").endswith("\n" + "".join(stories).replace("\n", "\r\n"))


DATA_OR_MARKUP = {
    "a.txt": ('{"text": "a line"}\n' * 20, "JSON"),
    "a.json": ("\n" + json.dumps([{"text": "a line"}] * 20, indent=1), "JSON"),
    "b.txt": ("\n<!DOCTYPE html><html><p>a line" * 20, "HTML"),
    "novel.txt": ("Yes, no, [and] more, {he} said.\n" * 20, ""),
}


def test_data_and_markup_are_named_with_what_reads_their_text(tmp_path, script):
    for name, (content, kind) in DATA_OR_MARKUP.items():
        (tmp_path / name).write_text(content)
        done = script(PREPARE, tmp_path / name, "--out", tmp_path / "own")
        notes = [line for line in done.out.splitlines() if line.startswith("note: ")]
        assert done.code == 0
        assert len(notes) == bool(kind)
        assert not kind or (name in notes[0] and kind in notes[0])


def test_folder_means_its_texts_and_another_texts_tokenizer_is_taken_from_its_folder(tmp_path, script):
    (tmp_path / "texts" / "more").mkdir(parents=True)
    for name, text in (("a.txt", "one\n"), ("more/b.TXT", "two\n"), (".hidden.txt", "x"), ("c.md", "x")):
        (tmp_path / "texts" / name).write_text(text * 20)
    assert script(PREPARE, tmp_path / "texts", "--out", tmp_path / "own").code == 0
    assert decoded(tmp_path / "own") == "one\n" * 20 + "two\n" * 20
    pattern = tmp_path / "texts" / "*.txt"
    assert script(PREPARE, pattern, "--tokenizer", tmp_path / "own", "--out", tmp_path / "other").code == 0
    assert read_meta(tmp_path / "other")["tokenizer"] == read_meta(tmp_path / "own")["tokenizer"]


@pytest.mark.skipif(os.name == "nt", reason="needs a file size limit")
def test_full_disk_keeps_the_data_that_was_there(tmp_path, script):
    (tmp_path / "a.txt").write_text("abc\n" * 100)
    (tmp_path / "b.txt").write_text("abcd\n" * 100_000)
    own = tmp_path / "own"
    assert script(PREPARE, tmp_path / "a.txt", "--name", own).code == 0
    before = contents(own)
    with files_of_at_most(kib=64):
        done = script(PREPARE, tmp_path / "b.txt", "--name", own)
    fails(done, own, "disk")
    assert contents(own) == before


@pytest.mark.skipif(os.name == "nt", reason="the quick Python of the tests is for POSIX")
@pytest.mark.parametrize("when", ["before", "after"])
def test_kill_at_any_rename_leaves_the_old_data_or_the_new_or_none(tmp_path, python, script, when):
    prepare = [PREPARE, "--tokenizer=bytes", "--out", tmp_path / "own"]
    for text in ("old ", "new "):
        (tmp_path / text.strip()).write_text(text * 50)
    for at in "123":
        assert script(*prepare, tmp_path / "old").code == 0
        code = f"{UNTIL_RENAME}import runpy; sys.argv = options; runpy.run_path(options[0], run_name='__main__')"
        subprocess.run([python, "-c", code, at, when, *prepare, tmp_path / "new"], cwd=ROOT, stdout=subprocess.DEVNULL)
        if (tmp_path / "own" / "val.bin").exists():
            for name, entry in read_record(tmp_path / "own")["files"].items():
                assert hashlib.sha256((tmp_path / "own" / name).read_bytes()).hexdigest() == entry["sha256"]
        assert script(*prepare, tmp_path / "new").code == 0
        assert decoded(tmp_path / "own") == "new " * 50
        assert {path.name for path in (tmp_path / "own").glob("[!.]*")} == {"train.bin", "val.bin", "meta.json"}


@pytest.mark.parametrize(("content", "reason"), [(b"", "cannot download"), (b"hello", "checksum")])
def test_download_arrives_complete_or_not_at_all(tmp_path, content, reason):
    (tmp_path / "page").write_bytes(content)
    url = (tmp_path / "page").as_uri() if content else "http://127.0.0.1:9/x"
    with raises_one_line(reason, "--input FILE"):
        download(url, tmp_path / "input.txt", SHA256)
    assert not (tmp_path / "input.txt").exists()
    download((tmp_path / "page").as_uri(), tmp_path / "input.txt", hashlib.sha256(content).hexdigest())
    assert (tmp_path / "input.txt").read_bytes() == content
