from __future__ import annotations

import hashlib
import http.server
import json
import os
import threading
from pathlib import Path

import pytest
from conftest import SHAKESPEARE, assert_one_line, needs_bpe
from fineweb import fails, no_file_larger_than

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
    assert hashlib.sha256(SHAKESPEARE.read_bytes()).hexdigest() == SHA256
    assert decoded(tmp_path / "s", "train") + decoded(tmp_path / "s", "val") == SHAKESPEARE.read_text()
    meta = json.loads((tmp_path / "s" / "meta.json").read_text())
    assert meta["vocab_size"] == 65
    assert SHA256 in meta["source"]
    before = (tmp_path / "s" / "train.bin").stat().st_mtime_ns
    assert script(*prepare).out == "s: already prepared\n"
    assert (tmp_path / "s" / "train.bin").stat().st_mtime_ns == before


@needs_shakespeare
@needs_bpe
def test_shakespeare_with_gpt2s_tokens(tmp_path, script):
    done = script("data/shakespeare/prepare.py", "--input", SHAKESPEARE, "--out", tmp_path / "s")
    assert done.code == 0, done.err
    assert "train.bin has 301,966 tokens" in done.out
    assert "val.bin has 36,059 tokens" in done.out
    assert decoded(tmp_path / "s", "val") == SHAKESPEARE.read_text()[int(1_115_394 * 0.9) :]


def test_standard_library_is_a_corpus_on_every_machine(tmp_path, script):
    done = script("data/python_char/prepare.py", "--out", tmp_path / "p")
    assert (done.code, done.err) == (0, "")
    text = decoded(tmp_path / "p", "train")
    assert len(text) > 1_000_000
    assert text.isascii()
    assert text.count("\ndef ") > 100
    assert script("data/python_char/prepare.py", "--out", tmp_path / "p").out == "p: already prepared\n"


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
    def refused(name: str, content: bytes | None, *options: str) -> None:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        done = script("data/text/prepare.py", tmp_path / name, *options, "--name", tmp_path / "own")
        fails(done, *(option.partition("=")[2] for option in options) if options else [name])
        assert not (tmp_path / "own").exists()

    refused("latin1.txt", "Käse".encode("latin-1") * 50)
    refused("empty.txt", b"")
    refused("nowhere.txt", None)
    refused("fine.txt", b"abc" * 50, "--tokenizer=nope")


@pytest.mark.skipif(os.name == "nt", reason="needs a file size limit")
def test_full_disk_keeps_the_data_that_was_there(tmp_path, script):
    (tmp_path / "a.txt").write_text("abc\n" * 100)
    (tmp_path / "b.txt").write_text("abcd\n" * 100_000)
    own = tmp_path / "own"
    assert script("data/text/prepare.py", tmp_path / "a.txt", "--name", own).code == 0
    before = {p.name: p.read_bytes() for p in own.iterdir()}
    with no_file_larger_than(64 << 10):
        done = script("data/text/prepare.py", tmp_path / "b.txt", "--name", own)
    fails(done, own, "disk")
    assert {p.name: p.read_bytes() for p in own.iterdir()} == before


# ---- downloads -----------------------------------------------------------------------------------------------


class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(404 if self.path == "/missing" else 200)
        self.send_header("Content-Length", "11")
        self.end_headers()
        self.wfile.write(b"hello" if self.path == "/cut" else b"hello world")

    def log_message(self, *args):
        pass


@pytest.fixture
def url(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_download_arrives_whole_or_not_at_all(tmp_path, url):
    path, checksum = tmp_path / "deep" / "input.txt", hashlib.sha256(b"hello world").hexdigest()
    download(f"{url}/text", path, checksum)
    assert path.read_bytes() == b"hello world"
    for page, reason in (("missing", "404"), ("cut", "checksum|IncompleteRead|bytes"), ("text", "checksum")):
        wrong = checksum if page != "text" else SHA256
        with pytest.raises(ValueError, match=reason) as e:
            download(f"{url}/{page}", tmp_path / "other.txt", wrong)
        assert_one_line(str(e.value), "--input FILE")
    with pytest.raises(ValueError, match="--input FILE"):
        download("http://127.0.0.1:9/x", tmp_path / "other.txt", checksum)
    assert [p.name for p in tmp_path.iterdir()] == ["deep"]
