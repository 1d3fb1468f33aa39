"""data/fineweb_edu/prepare.py: what is wrong with a source, a folder or the options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import BPE_CACHE, assert_refused, flags
from fineweb import (
    PREPARE,
    SMALL,
    Script,
    as_bytes,
    contents,
    copied,
    fails,
    tokens,
    write_documents,
)

from data.splits import Split
from data.token_files import write_meta, write_tokens


def test_faults_of_the_source_are_one_line(tmp_path, script: Script, documents):
    def refused(source: Path, *named: object, **options: Any) -> None:
        done = script(PREPARE, "--source", source, *SMALL, *flags(**options), "--out", tmp_path / "out")
        fails(done, *named)

    def file(name: str, content: bytes) -> Path:
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    for name in ("good.parquet", "good.jsonl"):
        good = write_documents(tmp_path / name, documents)
        refused(good, name, "'body'", "--text_column", text_column="body")
        refused(good, name, "int", text_column="id")
    pq.write_table(pa.table({"tags": [["a"], ["b"]]}), tmp_path / "lists.parquet")
    refused(tmp_path / "lists.parquet", "lists.parquet", "list", text_column="tags")
    for name, content in (
        ("none.parquet", b"hello" * 100),
        ("none.jsonl", b'{"text": "a"}\n{"text"'),
        ("array.jsonl", b'["a", "b"]\n'),
        ("latin.txt", "Käse".encode("latin-1")),
        ("utf16.txt", "Käse\n".encode("utf-16-le")),
        ("a.csv", b"text\nhello"),
    ):
        refused(file(name, content), name)
    refused(tmp_path / "nowhere", "nowhere")
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", "folder", "*.parquet")
    refused(write_documents(tmp_path / "empty.parquet", ["", None, ""]), "empty.parquet", "--text_column")
    refused(good, "nope", tokenizer="nope")
    refused(good, "char", tokenizer="char")
    assert not list((tmp_path / "out").glob("[!.]*"))


def test_files_are_taken_by_their_very_names_and_formats(tmp_path, script: Script):
    """Names that look like patterns, other files in the same folder, and columns that change their type."""
    folder = tmp_path / "a [1] * x"
    write_documents(folder / "b[ab]?.parquet", ["one"])
    table = pa.table({"text": pa.array(["two", "two"]).dictionary_encode(), "meta": [None, None]})
    pq.write_table(table, folder / "c #.parquet")
    lines = [
        '\ufeff{"text": "three", "meta": null}',
        "",
        '{"meta": {"x": [1]}, "text": "four \\ud800"}',
        '{"text": null}',
    ]
    (folder / "d.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "e.txt").write_bytes(b"five\r\nsix\r\n<|endoftext|>\r\nsix and a half")
    views = pa.table({"text": pa.array(["eight"], pa.string_view())})  # as polars writes it
    pq.write_table(views, folder / "z.parquet")
    (folder / ".git").mkdir()
    for other in ("d.jsonl.bak", ".hidden.txt", "f.csv", "g.parquet.gz", ".git/h.txt"):
        (folder / other).write_text("no")
    (tmp_path / "blob").write_bytes(b"seven")
    (folder / "f.TXT").symlink_to(tmp_path / "blob")  # as in the hub's cache
    (folder / "twice.txt").symlink_to(folder / "e.txt")
    done = script(PREPARE, "--source", folder, "--tokenizer=bytes", "--val_tokens=4", "--out", tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    assert tokens(tmp_path / "out").astype(np.uint8).tobytes() == as_bytes(
        ["one", "two", "two", "three", "four \ufffd", "five\nsix\n", "six and a half", "seven", "eight"]
    )


BAD_LINES = {
    "cut": '{"text": "good',
    "list": '{"text": ["a"]}',
    "lacks": '{"txt": "x"}',
    "comment": "# x",
    "array": '["a"]',
    "latin": b'{"text": "K\xe4se"}',
}


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES.keys())
def test_bad_line_of_a_jsonl_file_is_named_by_its_number(tmp_path, script: Script, line):
    lines = [b'{"text": "good line"}'] * 500
    lines[321] = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    fails(script(PREPARE, "--source", tmp_path / "*.jsonl", *SMALL, "--out", tmp_path / "out"), "a.jsonl, line 322")


@pytest.mark.parametrize("name", ["b.parquet", "b.jsonl.gz"])
def test_truncated_file_keeps_the_shards_before_it(tmp_path, script: Script, documents, name):
    write_documents(tmp_path / "in" / "a.parquet", documents * 4)  # more than is read ahead
    path = write_documents(tmp_path / "in" / name, documents)
    whole = path.read_bytes()
    prepare = (PREPARE, "--source", tmp_path / "in", *SMALL, "--num_proc=1", "--out", tmp_path / "out")
    path.write_bytes(whole[:-9])
    fails(script(*prepare), name)
    assert len(list((tmp_path / "out").glob("*.bin"))) > 1


def test_folder_that_was_prepared_differently_is_not_changed(tmp_path, script: Script, prepared):
    source, out = prepared
    before = contents(out)
    prepare = (PREPARE, "--source", source, *SMALL)
    fails(script(*prepare, "--shard_tokens=1e5", "--out", out), "shard_tokens", 250000, 100000, "--out")
    if BPE_CACHE.is_dir():
        fails(script(*prepare, "--tokenizer=gpt2", "--out", out), "tokenizer", "bytes", "gpt2", "--out")
    assert contents(out) == before
    write_meta(tmp_path, {"tokenizer": {"name": "bytes"}, "vocab_size": 256, "source": "a text", "files": {}})
    fails(script(*prepare, "--out", tmp_path), tmp_path, "--out")


def test_training_misses_shards_that_meta_json_lists(tmp_path, prepared):
    copied(prepared, tmp_path)
    (tmp_path / "train_000002.bin").unlink()
    with pytest.raises(ValueError, match=r"train_000002\.bin has 0 tokens.*250,000"):
        Split(tmp_path, "train", 64, 256)
    write_tokens(tmp_path / "train_000002.bin", np.arange(99, dtype=np.uint16), header=True)
    with pytest.raises(ValueError, match=r"train_000002\.bin.*99"):
        Split(tmp_path, "train", 64, 256)


@pytest.mark.parametrize(
    "options",
    [
        ("--tokenizer=bytes", "--pretokenized"),
        ("--subset=sample-100BT", "--pretokenized"),
        ("--subset=sample-100BT", "--source=a.txt"),
        ("--vocab_size=300", "--pretokenized"),
        ("--vocab_size=300", "--tokenizer=gpt2"),
    ],
)
def test_options_that_have_no_meaning_with_each_other_are_refused(tmp_path, script: Script, options):
    done = script(PREPARE, *options, "--out", tmp_path / "out")
    assert_refused(done, *(option.partition("=")[0] for option in options))
