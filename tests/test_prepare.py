from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from conftest import SHAKESPEARE, assert_one_line, assert_refused, files_of_at_most, needs_bpe
from fineweb import fails

from data.shakespeare_char.prepare import SHA256, download
from data.token_files import read_meta, read_tokens
from data.tokenizer import from_meta

needs_shakespeare = pytest.mark.skipif(not SHAKESPEARE.exists(), reason="tiny Shakespeare's text is not at hand")


def decoded(folder: Path, split: str) -> str:
    tokenizer = from_meta(read_meta(folder)["tokenizer"])
    return tokenizer.decode_bytes(read_tokens(folder / f"{split}.bin").tolist()).decode()


@needs_shakespeare
def test_shakespeare_has_the_usual_sizes_and_is_prepared_once(tmp_path, script):
    prepare = ("data/shakespeare_char/prepare.py", "--input", SHAKESPEARE, "--out", tmp_path / "s")
    done = script(*prepare)
    assert (done.code, done.err) == (0, "")
    assert "vocab_size 65" in done.out
    assert "train.bin has 1,003,854 tokens" in done.out
    assert "val.bin has 111,540 tokens" in done.out
    assert decoded(tmp_path / "s", "train") + decoded(tmp_path / "s", "val") == SHAKESPEARE.read_text()
    assert SHA256 in (tmp_path / "s" / "meta.json").read_text()
    assert script(*prepare).out == "s: already prepared\n"


@needs_shakespeare
@needs_bpe
def test_shakespeare_with_gpt2s_tokens(tmp_path, script):
    done = script("data/shakespeare/prepare.py", "--input", SHAKESPEARE, "--out", tmp_path / "s")
    assert "train.bin has 301,966 tokens" in done.out
    assert "val.bin has 36,059 tokens" in done.out


@pytest.mark.parametrize("tokenizer", ["char", "bytes", pytest.param("gpt2", marks=needs_bpe)])
def test_own_text_with_each_tokenizer(tmp_path, script, tokenizer):
    (tmp_path / "a.txt").write_text("Käse, 🧀!\r\n" * 30, encoding="utf-8", newline="")
    (tmp_path / "b.txt").write_text("\ufeffno newline at the end", encoding="utf-8")
    done = script(
        *("data/text/prepare.py", tmp_path / "a.txt", tmp_path / "b.txt"),
        *("--name", tmp_path / "own", "--tokenizer", tokenizer),
    )
    assert done.code == 0, done.err
    whole = decoded(tmp_path / "own", "train") + decoded(tmp_path / "own", "val")
    assert whole.replace("\r\n", "\n") == "Käse, 🧀!\n" * 30 + "no newline at the end\n"
    done = script("data/text/prepare.py", tmp_path / "a.txt", "--name", tmp_path / "own", "--tokenizer", tokenizer)
    assert "already prepared" not in done.out  # another text


def test_faults_of_own_text_are_named(tmp_path, script):
    (tmp_path / "empty.txt").write_bytes(b"\xef\xbb\xbf")
    (tmp_path / "fine.txt").write_bytes(b"abc" * 50)
    for name, option in (("empty.txt", ""), ("nowhere.txt", ""), ("pattern*.txt", ""), ("fine.txt", "nope")):
        options = [f"--tokenizer={option}"] if option else []
        fails(script("data/text/prepare.py", tmp_path / name, *options, "--name", tmp_path / "own"), option or name)
        assert not (tmp_path / "own").exists()
    for option in ("--name=", "--out="):  # which would be the working directory
        assert_refused(script("data/text/prepare.py", tmp_path / "fine.txt", option), option.rstrip("="))


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe", "char"])
def test_lines_of_end_of_text_become_the_token_or_a_line_says_that_they_do_not(tmp_path, script, tokenizer):
    stories = [f"Once upon a time {i} there was a cat.\n" for i in range(900)]
    (tmp_path / "a.txt").write_text("<|endoftext|>\n".join(stories), newline="\r\n")
    (tmp_path / "0.txt").write_text("<|endoftext|>".join(stories), newline="\r")  # each on a line with other text
    size = ["--vocab_size=300"] if tokenizer == "bpe" else []
    prepare = ("data/text/prepare.py", tmp_path / "*.txt", "--out", tmp_path / "own", "--tokenizer", tokenizer, *size)
    done = script(*prepare)
    assert done.code == 0, done.err
    assert "900 documents" in done.out
    assert "899 times <|endoftext|> is not alone" in done.out
    meta = read_meta(tmp_path / "own")
    assert ("char has no such token" in done.out) == (meta["end_of_text"] is None) == (tokenizer == "char")
    if tokenizer != "char":
        ids = np.concatenate([read_tokens(tmp_path / "own" / f"{split}.bin") for split in ("train", "val")])
        assert np.count_nonzero(ids == meta["end_of_text"]) == 900
        text = from_meta(meta["tokenizer"]).decode_bytes(ids[ids != meta["end_of_text"]].tolist()).decode()
        assert text.endswith("".join(stories).replace("\n", "\r\n"))


@pytest.mark.skipif(os.name == "nt", reason="needs a file size limit")
def test_full_disk_keeps_the_data_that_was_there(tmp_path, script):
    (tmp_path / "a.txt").write_text("abc\n" * 100)
    (tmp_path / "b.txt").write_text("abcd\n" * 100_000)
    own = tmp_path / "own"
    assert script("data/text/prepare.py", tmp_path / "a.txt", "--name", own).code == 0
    before = {p.name: p.read_bytes() for p in own.iterdir()}
    with files_of_at_most(kib=64):
        done = script("data/text/prepare.py", tmp_path / "b.txt", "--name", own)
    fails(done, own, "disk")
    assert {p.name: p.read_bytes() for p in own.iterdir()} == before


# ---- downloads -----------------------------------------------------------------------------------------------


@needs_bpe
def test_without_a_network_the_text_that_was_given_before_is_kept(tmp_path, script, monkeypatch):
    """After `prepare.py --input FILE`, the notebook runs the same script without --input."""
    monkeypatch.setattr("data.shakespeare_char.prepare.DATA", tmp_path)  # where no input.txt is
    monkeypatch.setattr("data.shakespeare_char.prepare.URL", "http://127.0.0.1:9/input.txt")
    (tmp_path / "text.txt").write_text("To be, or not to be.\n" * 100)
    prepare = ("data/shakespeare/prepare.py", "--out", tmp_path / "s")
    fails(script(*prepare), "127.0.0.1:9", "--input FILE")
    assert script(*prepare, "--input", tmp_path / "text.txt").code == 0
    assert script(*prepare).out == "s: already prepared\n"
    (tmp_path / "s" / "val.bin").unlink()
    fails(script(*prepare), "--input FILE")


@pytest.mark.parametrize(("content", "reason"), [(None, "Connection refused|cannot download"), (b"hello", "checksum")])
def test_download_arrives_whole_or_not_at_all(tmp_path, content, reason):
    (tmp_path / "page").write_bytes(content or b"")
    url = (tmp_path / "page").as_uri() if content else "http://127.0.0.1:9/x"
    with pytest.raises(ValueError, match=reason) as e:
        download(url, tmp_path / "input.txt", SHA256)
    assert_one_line(str(e.value), "--input FILE")
    assert not (tmp_path / "input.txt").exists()
    download((tmp_path / "page").as_uri(), tmp_path / "input.txt", hashlib.sha256(content or b"").hexdigest())
    assert (tmp_path / "input.txt").read_bytes() == (content or b"")
