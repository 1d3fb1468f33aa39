from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, raises_one_line
from hypothesis import given
from hypothesis import strategies as st

import data.dataset
from data import token_files
from data.dataset import Checksums
from data.prepared import write_dataset
from data.splits import Split
from data.token_files import HEADER_BYTES, MAGIC, VERSION, check_vocabulary, open_tokens, read_meta
from data.tokenizer import BytesTokenizer, CharTokenizer
from deskgpt.system.files import write_atomically

# ---- files ---------------------------------------------------------------------------------------------------


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


# ---- a folder ------------------------------------------------------------------------------------------------


def dataset(folder: Path, train: list[int], val: list[int]) -> Path:
    splits = {"train": np.array(train, np.uint16), "val": np.array(val, np.uint16)}
    write_dataset(folder, splits, BytesTokenizer(), "test")
    return folder


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
            token_files.token_files(tmp_path, "train")
    else:
        assert [path.name for path in token_files.token_files(tmp_path, "train")] == read


def test_missing_data_names_the_script_that_makes_it(tmp_path):
    for folder, script in ((tmp_path / "nothing", "text"), (ROOT / "data" / "shakespeare_char", "shakespeare_char")):
        with raises_one_line(folder, "python ", f"data/{script}/prepare.py"):
            token_files.token_files(folder, "nope")


# ---- checksums -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [True, False], ids=["before the run", "while it trains"])
def test_one_flipped_bit_is_named_and_without_a_list_nothing_is_verified(tmp_path, monkeypatch, at_once):
    def verified() -> str:
        checksums = Checksums(tmp_path, [Split(tmp_path, split, 8, 256) for split in ("train", "val")])
        checksums._thread.join()
        checksums.check()
        return checksums.state

    dataset(tmp_path, [*range(250)], [*range(250)])
    monkeypatch.setattr(data.dataset, "AT_ONCE", 1 << 30 if at_once else 0)
    assert verified() == ("checksums verified" if at_once else "checksums are verified while it trains")
    ids = np.fromfile(tmp_path / "val.bin", "<u2")
    ids[3] ^= 1
    ids.tofile(tmp_path / "val.bin")
    with raises_one_line(tmp_path / "val.bin", "prepare the data again"):
        verified()
    (tmp_path / "meta.json").unlink()
    assert verified() == "no checksums (no meta.json that lists files)"


# ---- the description -----------------------------------------------------------------------------------------


def test_meta_json_wins_over_meta_pkl_and_without_either_it_is_gpt2(tmp_path):
    assert read_meta(tmp_path) == {"tokenizer": {"name": "gpt2"}, "vocab_size": 50257, "end_of_text": 50256}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 2, "itos": {0: "b", 1: "a"}}))
    assert read_meta(tmp_path) == {"tokenizer": {"name": "char", "chars": "ba"}, "vocab_size": 2, "end_of_text": None}
    dataset(tmp_path, [1], [1])
    assert read_meta(tmp_path) == {"tokenizer": {"name": "bytes"}, "vocab_size": 256, "end_of_text": None}


def test_vocabularies_must_match(tmp_path):
    chars, other = CharTokenizer("abc").meta(), CharTokenizer("abd").meta()
    meta = {"tokenizer": chars, "vocab_size": 3}
    check_vocabulary(tmp_path, meta, 3, chars)
    check_vocabulary(tmp_path, meta, 3, None)  # a nanoGPT checkpoint does not say
    for size, tokenizer in ((65, None), (3, other)):
        with raises_one_line(tmp_path, 3, size, "prepare the data", "--init_from=scratch"):
            check_vocabulary(tmp_path, meta, size, tokenizer)
    gpt2 = {"tokenizer": {"name": "gpt2"}, "vocab_size": 50257}
    for model_vocab in (50257, 50304):
        check_vocabulary(tmp_path, gpt2, model_vocab, {"name": "gpt2"})
