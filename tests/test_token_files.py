from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, assert_one_line
from hypothesis import given
from hypothesis import strategies as st

import data.dataset
from data import token_files
from data.dataset import Checksums
from data.prepared import locked, write_dataset
from data.splits import Split
from data.token_files import (
    HEADER_BYTES,
    MAGIC,
    VERSION,
    assumptions,
    check_vocabulary,
    llmc_header,
    open_tokens,
    read_meta,
    read_tokens,
    write_tokens,
)
from data.tokenizer import BytesTokenizer, CharTokenizer

ids_lists = st.lists(st.integers(0, 65535), min_size=1, max_size=700)

# ---- files ---------------------------------------------------------------------------------------------------


@given(ids=ids_lists, header=st.booleans(), draw=st.data())
def test_tokens_and_any_piece_of_them_are_read_as_they_were_written(tmp_path_factory, ids, header, draw):
    path = tmp_path_factory.mktemp("t") / "x.bin"
    write_tokens(path, np.array(ids, np.uint16), header)
    assert read_tokens(path).tolist() == ids
    assert path.stat().st_size == 2 * len(ids) + (HEADER_BYTES if header else 0)
    first = draw.draw(st.integers(0, len(ids)))
    n = draw.draw(st.integers(0, len(ids) - first))
    shard = open_tokens(path)
    assert len(shard) == len(ids)
    assert shard.read(first, n).tolist() == ids[first : first + n]
    assert np.concatenate([piece for _, piece in shard.chunks()]).tolist() == ids


def headed(tokens: int, at: int = 0, value: int = MAGIC) -> bytes:
    """A token file with one number of its header replaced."""
    content = np.frombuffer(llmc_header(tokens) + bytes(2 * tokens), "<i4").copy()
    content[at] = value
    return content.tobytes()


NOT_TOKENS = {
    "empty": b"",
    "odd": b"abc",
    "cut short": headed(100)[:-160],
    "without tokens": headed(0),
    "another version": headed(100, 1, VERSION + 1),
    "a token more": headed(100, 2, 101),
    "llm.c's 32 bits": np.array([20240801, 7, 9], "<i4").tobytes() + bytes(1024),
    "a folder": None,
}


@pytest.mark.parametrize("content", NOT_TOKENS.values(), ids=NOT_TOKENS.keys())
def test_file_that_is_no_token_file_is_named(tmp_path, content):
    path = tmp_path / "train.bin"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    for open_file in (read_tokens, open_tokens):
        with pytest.raises(ValueError, match="prepare") as e:
            open_file(path)
        assert_one_line(str(e.value), path)


@pytest.mark.skipif(os.name == "nt", reason="Windows does not change or replace mapped files")
def test_file_that_changes_under_a_run_is_noticed_and_one_that_is_replaced_is_read_on(tmp_path):
    path = tmp_path / "train.bin"
    write_tokens(path, np.arange(100, dtype=np.uint16))
    replaced = open_tokens(path)
    write_tokens(path, np.arange(100, dtype=np.uint16))
    shard = open_tokens(path)
    assert replaced.read(0, 100).tolist() == list(range(100))
    assert not replaced.was_written()

    with open(path, "r+b") as file:
        file.write(b"\x05")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))  # the system's clock may not have ticked meanwhile
    assert [shard.was_written(), shard.was_written()] == [True, False]
    os.truncate(path, 60)
    for read in (lambda: shard.read(0, 30), lambda: list(shard.chunks())):
        with pytest.raises(ValueError, match="shorter") as e:
            read()
        assert_one_line(str(e.value), path, "200 bytes", 60, "prepare the data again")


# ---- a folder ------------------------------------------------------------------------------------------------


def dataset(folder: Path, train: list[int], val: list[int]) -> Path:
    splits = {"train": np.array(train, np.uint16), "val": np.array(val, np.uint16)}
    write_dataset(folder, splits, BytesTokenizer(), "test")
    return folder


def test_two_do_not_write_at_once_and_a_file_that_is_missing_is_named(tmp_path):
    dataset(tmp_path, [1, 2, 3], [4, 5])
    with locked(tmp_path), pytest.raises(ValueError, match="wait") as e:
        dataset(tmp_path, [7, 8, 9], [7, 7])
    assert_one_line(str(e.value), tmp_path)
    dataset(tmp_path, [7, 8, 9], [7, 7])
    assert read_tokens(tmp_path / "train.bin").tolist() == [7, 8, 9]
    assert {path.name for path in tmp_path.iterdir()} <= {"train.bin", "val.bin", "meta.json"}
    (tmp_path / "val.bin").unlink()
    with pytest.raises(ValueError, match=r"val\.bin.*is missing"):
        open_tokens(*token_files.token_files(tmp_path, "val"))


# The files of a folder without a list, and those that are read as train; None if that is not clear.
FOUND: list[tuple[list[str], list[str] | None]] = [
    (["train.bin"], ["train.bin"]),
    (["train.bin", "train_old.bin"], ["train.bin"]),
    (["train.bin", "train_000.bin"], ["train.bin"]),
    (["web_train_000001.bin", "web_train_000002.bin"], ["web_train_000001.bin", "web_train_000002.bin"]),
    (["tiny_shakespeare_train.bin"], ["tiny_shakespeare_train.bin"]),
    (["a_train_000001.bin", "b_train_000001.bin"], None),
]


@pytest.mark.parametrize(("names", "read"), FOUND, ids=lambda value: " ".join(value or ["an error"]))
def test_files_of_a_folder_without_a_list_are_those_of_one_name(tmp_path, names, read):
    for name in (*names, "val.bin"):
        write_tokens(tmp_path / name, np.arange(300, 320, dtype=np.uint16))
    if read is None:
        with pytest.raises(ValueError, match="several files for train") as e:
            token_files.token_files(tmp_path, "train")
        assert_one_line(str(e.value), *names)
        return
    assert [path.name for path in token_files.token_files(tmp_path, "train")] == read
    printed = " ".join(assumptions(tmp_path))
    assert "no meta.json" in printed
    assert (read[-1] in printed) == (len(read) > 1)


def test_missing_data_names_the_script_that_makes_it(tmp_path):
    for folder, script in (
        (tmp_path / "nothing", "data/text"),
        (ROOT / "data" / "shakespeare_char", "shakespeare_char"),
    ):
        with pytest.raises(ValueError, match=rf"{folder} .*python .*{script}/prepare\.py"):
            token_files.token_files(folder, "nope")


# ---- checksums -----------------------------------------------------------------------------------------------


def verified(folder: Path) -> str:
    """Return the state after all files were verified. Raises what training would end with."""
    verification = Checksums(folder, [Split(folder, split, 8, 256) for split in ("train", "val")])
    verification._thread.join()
    verification.check()
    return verification.state


@pytest.mark.parametrize("at_once", [True, False], ids=["before the run", "while it trains"])
def test_one_flipped_bit_is_named(tmp_path, monkeypatch, at_once):
    dataset(tmp_path, [*range(250)], [*range(250)])
    monkeypatch.setattr(data.dataset, "AT_ONCE", 1 << 30 if at_once else 0)
    assert verified(tmp_path) == ("checksums verified" if at_once else "checksums are verified while it trains")
    ids = np.fromfile(tmp_path / "val.bin", "<u2")
    ids[3] ^= 1
    ids.tofile(tmp_path / "val.bin")
    with pytest.raises(ValueError, match="prepare the data again") as e:
        verified(tmp_path)
    assert_one_line(str(e.value), tmp_path / "val.bin")


def test_folder_without_a_list_cannot_be_verified(tmp_path):
    dataset(tmp_path, [*range(250)], [*range(250)])
    (tmp_path / "meta.json").unlink()
    assert verified(tmp_path) == "no checksums (no meta.json that lists files)"


# ---- the description -----------------------------------------------------------------------------------------


def test_meta_json_wins_over_meta_pkl_and_without_either_it_is_gpt2(tmp_path):
    assert read_meta(tmp_path) == {"tokenizer": {"name": "gpt2"}, "vocab_size": 50257, "end_of_text": 50256}
    chars = ["b", "a"]
    nanogpt = {"vocab_size": 2, "itos": dict(enumerate(chars)), "stoi": {c: i for i, c in enumerate(chars)}}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(nanogpt))
    assert read_meta(tmp_path) == {"tokenizer": {"name": "char", "chars": "ba"}, "vocab_size": 2, "end_of_text": None}
    dataset(tmp_path, [1], [1])
    assert read_meta(tmp_path) == {"tokenizer": {"name": "bytes"}, "vocab_size": 256, "end_of_text": None}


def test_vocabularies_must_match(tmp_path):
    chars, other = CharTokenizer("abc").meta(), CharTokenizer("abd").meta()
    meta = {"tokenizer": chars, "vocab_size": 3}
    check_vocabulary(tmp_path, meta, 3, chars)
    check_vocabulary(tmp_path, meta, 3, None)  # a nanoGPT checkpoint does not say
    for size, tokenizer in ((65, None), (3, other)):
        with pytest.raises(ValueError, match="prepare the data") as e:
            check_vocabulary(tmp_path, meta, size, tokenizer)
        assert_one_line(str(e.value), tmp_path, 3, size, "--init_from=scratch")
    gpt2 = {"tokenizer": {"name": "gpt2"}, "vocab_size": 50257}
    for model_vocab in (50257, 50304):
        check_vocabulary(tmp_path, gpt2, model_vocab, {"name": "gpt2"})
