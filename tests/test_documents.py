"""What people have as documents and as text: read as it is meant, or named with its file and line."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import assert_refused, raises_one_line
from fineweb import PACK, PREPARE, SMALL, Script, as_bytes, fails, tokens, write_documents

from data.text_files import lines_in, read_text

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


NOT_TEXT = {
    "latin-1": "line\nKäse".encode("latin-1"),
    "half a surrogate": b"line\n\xed\xa0\x80",
    "zip": b"PK\x03\x04" + bytes(50),
    "packed under another name": PACK[".gz"](b"line"),
}


@pytest.mark.parametrize("content", NOT_TEXT.values(), ids=NOT_TEXT.keys())
def test_file_that_is_not_text_is_named_with_its_line(tmp_path, content):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with raises_one_line("a.txt, line 2" if content.startswith(b"line\n") else "a.txt, line 1"):
        read_text(path)


# ---- sources of data/fineweb_edu/prepare.py ------------------------------------------------------------------


def test_files_are_taken_by_their_very_names_and_formats(tmp_path, script: Script):
    """Names that look like patterns, other files in the same folder, and columns that change their type."""
    folder = tmp_path / "a [1] * x"
    write_documents(folder / "b[ab]?.parquet", ["one"])
    table = pa.table({"text": pa.array(["two", "two"]).dictionary_encode(), "meta": [None, None]})
    pq.write_table(table, folder / "c #.parquet")
    lines = ['{"text": "three"}', "", '{"meta": {"x": [1]}, "text": "four \\ud800"}', '{"text": null}']
    (folder / "d.jsonl").write_text("\n".join(lines), encoding="utf-8-sig")
    (folder / "d2.jsonl.gz").write_bytes(PACK[".gz"](b'{"text": "four and a half"}\r\n'))
    (folder / "e.txt").write_bytes(b"five\r\nsix\r\n<|endoftext|>\r\nsix and a half")
    views = pa.table({"text": pa.array(["eight"], pa.string_view())})  # as polars writes it
    pq.write_table(views, folder / "z.parquet")
    (folder / ".git").mkdir()
    for other in ("d.jsonl.bak", ".hidden.txt", "f.csv", "g.parquet.gz", ".git/h.txt"):
        (folder / other).write_text("no")
    (tmp_path / "blob").write_bytes(b"seven")
    (folder / "f.TXT").symlink_to(tmp_path / "blob")  # as in the hub's cache
    done = script(PREPARE, "--source", folder, "--tokenizer=bytes", "--val_tokens=4", "--out", tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    expected = ["one", "two", "two", "three", "four \ufffd", "four and a half"]
    expected += ["five\nsix\n", "six and a half", "seven", "eight"]
    assert tokens(tmp_path / "out").astype(np.uint8).tobytes() == as_bytes(expected)


def test_faults_of_the_source_are_one_line(tmp_path, script: Script):
    def assert_error(source: Path, *named: object, options: tuple[str, ...] = ()) -> None:
        fails(script(PREPARE, "--source", source, *SMALL, *options, "--out", tempfile.mkdtemp(dir=tmp_path)), *named)

    for name in ("good.parquet", "good.jsonl"):
        good = write_documents(tmp_path / name, ["a text"] * 3)
        assert_error(good, name, "'body'", "--text_column", options=("--text_column=body",))
        assert_error(good, name, "int", options=("--text_column=id",))
    for name, content in (("none.parquet", b"hello" * 100), ("a.csv", b"text\nhello"), ("zip.jsonl", b"PK\x03\x04")):
        (tmp_path / name).write_bytes(content)
        assert_error(tmp_path / name, name)
    (tmp_path / "folder").mkdir()
    assert_error(tmp_path / "folder", "folder", "*.parquet")
    assert_error(write_documents(tmp_path / "empty.parquet", ["", None, ""]), "empty.parquet", "--text_column")
    for bad in (b'{"text": "good', b'{"txt": "x"}', b'{"text": "K\xe4se"}', b"[1]"):
        (tmp_path / "a.jsonl").write_bytes(b'{"text": "good line"}\n' * 321 + bad + b'\n{"text": "good line"}')
        assert_error(tmp_path / "a.js*", "a.jsonl, line 322")
    assert_error(good, "char", options=("--tokenizer=char",))
    assert_refused(script(PREPARE, "--source", good, "--subset=sample-100BT"), "--subset", "--source")


def test_truncated_file_keeps_the_shards_before_it(tmp_path, script: Script, documents):
    write_documents(tmp_path / "in" / "a.parquet", documents * 4)  # more than is read ahead
    path = write_documents(tmp_path / "in" / "b.jsonl.zst", documents)
    path.write_bytes(path.read_bytes()[:-9])
    prepare = (PREPARE, "--source", tmp_path / "in", *SMALL, "--out", tmp_path / "out")
    fails(script(*prepare), path, "finished shards are kept")
    assert len(list((tmp_path / "out").glob("*.bin"))) > 1
