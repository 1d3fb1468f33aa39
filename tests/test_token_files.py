"""Token files, checksums, meta.json and meta.pkl, which anybody may have made."""

from __future__ import annotations

import json
import os
import pickle
from typing import Any

import numpy as np
import pytest
from conftest import assert_one_line, raises_one_line
from hypothesis import given
from hypothesis import strategies as st

import data.dataset
from data import meta_files
from data.dataset import Checksums
from data.meta_files import read_record, write_meta
from data.prepared import write_dataset
from data.splits import Split
from data.token_files import HEADER_BYTES, MAGIC, VERSION, check_vocabulary, open_tokens, read_meta, token_files
from data.tokenizer import MOST_MERGES_BYTES, BytesTokenizer, CharTokenizer
from deskgpt.system.files import write_atomically

BYTES = np.arange(250, dtype=np.uint16)


def llmc_file(ids: list[int], magic: int = MAGIC, version: int = VERSION, tokens: int | None = None) -> bytes:
    """Return a token file in llm.c's format. tokens: their number, as its header has it."""
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:3] = magic, version, len(ids) if tokens is None else tokens
    return header.tobytes() + np.array(ids, "<u2").tobytes()


@given(ids=st.lists(st.integers(0, 65535), min_size=1, max_size=700), header=st.booleans(), draw=st.data())
def test_any_piece_of_a_token_file_is_read_as_it_was_written(tmp_path_factory, ids, header, draw):
    path = tmp_path_factory.mktemp("t") / "x.bin"
    path.write_bytes(llmc_file(ids) if header else np.array(ids, "<u2").tobytes())
    first = draw.draw(st.integers(0, len(ids)))
    n = draw.draw(st.integers(0, len(ids) - first))
    shard = open_tokens(path)
    assert len(shard) == len(ids)
    assert shard.read(first, n).tolist() == ids[first : first + n]


NOT_TOKENS = {
    "missing": None,
    "empty": b"",
    "odd": b"abc",
    "cut short": llmc_file([0] * 100)[:-160],
    "without tokens": llmc_file([]),
    "another version": llmc_file([0] * 100, version=2),
    "a token more": llmc_file([0] * 100, tokens=101),
    "llm.c's 32 bits": llmc_file([0] * 100, magic=20240801, version=7),
}


@pytest.mark.parametrize("content", NOT_TOKENS.values(), ids=NOT_TOKENS.keys())
def test_file_that_is_no_token_file_is_named(tmp_path, content):
    path = tmp_path / "train.bin"
    if content is not None:
        path.write_bytes(content)
    with raises_one_line(path, "prepare"):
        open_tokens(path)


@pytest.mark.skipif(os.name == "nt", reason="Windows does not change or replace open files")
def test_file_that_changes_under_a_run_is_noticed_and_one_that_is_replaced_is_still_read(tmp_path):
    path = tmp_path / "train.bin"
    np.arange(100, dtype=np.uint16).tofile(path)
    replaced = open_tokens(path)
    write_atomically(path, path.read_bytes())
    shard = open_tokens(path)
    assert replaced.read(0, 100).tolist() == list(range(100))
    assert not replaced.was_written()

    with open(path, "r+b") as file:
        file.write(b"\x05")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))  # the system's clock may not have ticked meanwhile
    assert [shard.was_written(), shard.was_written()] == [True, False]
    os.truncate(path, 60)
    with raises_one_line(path, "shorter", "200 bytes", 60, "prepare the data again"):
        shard.read(0, 30)


# The files of a folder without a list, and those that are read as train; None if that is not clear.
FOUND: list[tuple[list[str], list[str] | None]] = [
    (["train.bin", "train_old.bin", "train_000.bin"], ["train.bin"]),
    (["web_train_000002.bin", "web_train_000001.bin"], ["web_train_000001.bin", "web_train_000002.bin"]),
    (["tiny_shakespeare_train.bin"], ["tiny_shakespeare_train.bin"]),
    (["a_train_000001.bin", "b_train_000001.bin"], None),
]


@pytest.mark.parametrize(("names", "read"), FOUND, ids=lambda value: " ".join(value or ["an error"]))
def test_files_of_a_folder_without_a_list_are_those_of_one_name(tmp_path, names, read):
    for name in names:
        np.arange(300, 320, dtype=np.uint16).tofile(tmp_path / name)
    if read is None:
        with raises_one_line("several files for train", *names):
            token_files(tmp_path, "train")
    else:
        assert [path.name for path in token_files(tmp_path, "train")] == read


@pytest.mark.parametrize("at_once", [True, False], ids=["before the run", "while it trains"])
def test_one_flipped_bit_is_named_and_without_a_list_nothing_is_verified(tmp_path, monkeypatch, at_once):
    def verified() -> str:
        checksums = Checksums(tmp_path, [Split(tmp_path, split, 8, 256) for split in ("train", "val")])
        checksums._thread.join()
        checksums.check()
        return checksums.state

    write_dataset(tmp_path, {"train": BYTES, "val": BYTES}, BytesTokenizer(), "test")
    monkeypatch.setattr(data.dataset, "AT_ONCE", 1 << 30 if at_once else 0)
    assert verified() == ("checksums verified" if at_once else "checksums are verified while it trains")
    flipped = BYTES.copy()
    flipped[3] ^= 1
    flipped.tofile(tmp_path / "val.bin")
    with raises_one_line(tmp_path / "val.bin", "prepare the data again"):
        verified()
    (tmp_path / "meta.json").unlink()
    assert verified() == "no checksums (no meta.json that lists files)"


def test_vocabularies_must_match(tmp_path):
    chars, other = CharTokenizer("abc").meta(), CharTokenizer("abd").meta()
    meta = {"tokenizer": chars, "vocab_size": 3}
    check_vocabulary(tmp_path, meta, 3, chars)
    check_vocabulary(tmp_path, meta, 3, None)  # a nanoGPT checkpoint does not say
    for size, tokenizer in ((65, None), (3, other)):
        with raises_one_line(tmp_path, 3, size, "prepare the data", "--init_from=scratch"):
            check_vocabulary(tmp_path, meta, size, tokenizer)
    check_vocabulary(tmp_path, {"tokenizer": {"name": "gpt2"}, "vocab_size": 50257}, 50304, {"name": "gpt2"})  # padded


# ---- meta.json -----------------------------------------------------------------------------------------------

ENTRY = {"tokens": 5, "sha256": "0" * 64}
META: dict[str, Any] = {
    "tokenizer": {"name": "char", "chars": "\nab"},
    "vocab_size": 3,
    "source": "a text",
    "files": {"train.bin": ENTRY, "val.bin": ENTRY},
}


def test_written_record_is_read_and_keeps_its_checksum_and_older_versions_are_read(tmp_path):
    (tmp_path / "meta.json").write_text(json.dumps(META))
    assert read_record(tmp_path) == META
    write_meta(tmp_path, META)
    first = (tmp_path / "meta.json").read_bytes()
    write_meta(tmp_path, read_record(tmp_path))
    assert (tmp_path / "meta.json").read_bytes() == first
    assert {key: value for key, value in read_record(tmp_path).items() if key != "sha256"} == META


# A key with a wrong value, and what the error names.
WRONG: list[tuple[str, Any, str]] = [
    ("vocab_size", True, "vocab_size=True"),
    ("tokenizer", {"name": "gpt2", "chars": "a"}, "describes no tokenizer"),
    ("tokenizer", {"name": "char", "chars": "aba"}, "twice"),
    ("tokenizer", {"name": "bpe", "merges": "h e\nhe y"}, "vocab_size=3"),  # which makes 259
    ("tokenizer", {"name": "bpe", "merges": "h e\nthe y"}, "merge 2"),
    ("tokenizer", {"name": "bpe", "merges": "\n".join(f"{'a' * 2**i} {'a' * 2**i}" for i in range(8))}, "merge 8"),
    ("tokenizer", {"name": "bpe", "merges": "h" * (MOST_MERGES_BYTES + 1)}, "merges"),
    ("end_of_text", 3, "end_of_text=3"),
    ("files", {"train.bin": ENTRY | {"tokens": 1e300}}, "tokens=1e+300"),
    ("files", {"train.bin": ENTRY | {"sha256": "0" * 63}}, "sha256='000"),
    ("files", {"../../VICTIM.txt": ENTRY}, "'../../VICTIM.txt'"),
    ("packed", 0, "packed=0"),
]


@pytest.mark.parametrize(("key", "value", "named"), WRONG)
def test_values_that_cannot_be_right_are_named_though_the_checksum_is_right(tmp_path, key, value, named):
    write_meta(tmp_path, META | {key: value})
    with pytest.raises(ValueError, match="does not describe token files") as e:
        read_meta(tmp_path)
    assert_one_line(e.value, named)
    assert len(str(e.value)) < 400


def test_odd_json_is_one_line_and_what_is_far_too_large_is_not_read(tmp_path):
    for content in (b"[" * 100_000, b"1" * 5000, b"\xff", b"NaN"):
        (tmp_path / "meta.json").write_bytes(content)
        with raises_one_line(tmp_path / "meta.json", "does not describe token files"):
            read_meta(tmp_path)
    os.truncate(tmp_path / "meta.json", meta_files.JSON_BYTES + 1)
    with raises_one_line("meta.json has more than"):
        read_meta(tmp_path)


# ---- meta.pkl ------------------------------------------------------------------------------------------------


def nanogpt(chars: str) -> dict[str, Any]:
    return {"vocab_size": len(chars), "itos": dict(enumerate(chars)), "stoi": {c: i for i, c in enumerate(chars)}}


def test_meta_pkl_of_nanogpt_is_read_in_each_protocol_but_not_beside_meta_json_and_gpt2_needs_neither(tmp_path):
    assert read_meta(tmp_path) == {"tokenizer": {"name": "gpt2"}, "vocab_size": 50257, "end_of_text": 50256}
    chars = "\n !Aaéſ日🧀"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(nanogpt(chars), protocol))
        expected = {"tokenizer": {"name": "char", "chars": chars}, "vocab_size": len(chars), "end_of_text": None}
        assert read_meta(tmp_path) == expected
    for meta in ({"vocab_size": 3}, {"vocab_size": 3, "itos": {0: "to", 1: "be", 2: "a"}}):
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
        assert read_meta(tmp_path) == {"tokenizer": {}, "vocab_size": 3, "end_of_text": None}
    write_dataset(tmp_path, {"train": BYTES, "val": BYTES}, BytesTokenizer(), "test")
    assert read_meta(tmp_path) == {"tokenizer": {"name": "bytes"}, "vocab_size": 256, "end_of_text": None}


class Evil:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_meta_pkl_that_contradicts_itself_is_an_error_and_a_malicious_one_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong: list[dict[str, Any]] = [{"vocab_size": size} for size in (3, 1 << 40, None)]
    wrong += [{"itos": itos} for itos in ({0: "a", 1: "a"}, {0: "a", 1: 3}, {0: "a", 1: [["b"]]}, Evil())]
    wrong += [{"stoi": {"a": 1, "b": 0}}]
    for change in wrong:
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(nanogpt("ab") | change))
        with raises_one_line(tmp_path / "meta.pkl", "does not describe token files"):
            read_meta(tmp_path)
    assert not (tmp_path / "ran").exists()
