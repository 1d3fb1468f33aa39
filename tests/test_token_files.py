from __future__ import annotations

import gc
import hashlib
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, assert_one_line
from hypothesis import given
from hypothesis import strategies as st

from data.token_files import (
    HEADER_BYTES,
    MAGIC,
    Shard,
    check_vocabulary,
    is_prepared,
    llmc_header,
    locked,
    read_meta,
    read_tokens,
    token_files,
    write_dataset,
    write_tokens,
)
from data.tokenizer import BytesTokenizer, CharTokenizer

ids_lists = st.lists(st.integers(0, 65535), min_size=1, max_size=700)

# ---- files ---------------------------------------------------------------------------------------------------


@given(ids_lists, st.booleans())
def test_tokens_are_read_as_they_were_written(tmp_path_factory, ids, header):
    path = tmp_path_factory.mktemp("t") / "x.bin"
    write_tokens(path, np.array(ids, np.uint16), header)
    assert read_tokens(path).tolist() == ids
    assert path.stat().st_size == 2 * len(ids) + (HEADER_BYTES if header else 0)
    assert [p.name for p in path.parent.iterdir()] == ["x.bin"]


def test_bare_tokens_that_begin_like_the_header_are_still_tokens(tmp_path):
    ids = np.frombuffer(np.array([MAGIC], "<i4").tobytes() + bytes(2000), "<u2")
    write_tokens(tmp_path / "x.bin", ids)
    assert np.array_equal(read_tokens(tmp_path / "x.bin"), ids)


def test_nanogpts_files_are_little_endian_uint16(tmp_path):
    np.array([1, 258, 65535], dtype=np.uint16).tofile(tmp_path / "x.bin")
    assert (tmp_path / "x.bin").read_bytes() == b"\x01\x00\x02\x01\xff\xff"
    assert read_tokens(tmp_path / "x.bin").tolist() == [1, 258, 65535]


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
    "another magic": headed(100, 0, MAGIC + 1),
    "another version": headed(100, 1, 2),
    "a token more": headed(100, 2, 101),
    "fewer than none": headed(100, 2, -1),
    "none said": headed(100, 2, 0),
    "a folder": None,
}


@pytest.mark.parametrize("content", NOT_TOKENS.values(), ids=NOT_TOKENS.keys())
def test_file_that_is_no_token_file_is_named(tmp_path, content):
    path = tmp_path / "train.bin"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    for open_file in (read_tokens, Shard):
        with pytest.raises(ValueError, match="prepare the data again") as e:
            open_file(path)
        assert_one_line(str(e.value), path)


# ---- open files ----------------------------------------------------------------------------------------------


@given(ids_lists, st.booleans(), st.booleans(), st.data())
def test_any_piece_of_an_open_file_is_read(tmp_path_factory, ids, header, has_pread, data):
    path = tmp_path_factory.mktemp("t") / "x.bin"
    write_tokens(path, np.array(ids, np.uint16), header)
    first = data.draw(st.integers(0, len(ids)))
    n = data.draw(st.integers(0, len(ids) - first))
    with pytest.MonkeyPatch.context() as patch:
        if not has_pread:  # Windows
            patch.delattr(os, "pread")
        patch.setattr("data.token_files.PIECE", 64)
        shard = Shard(path)
        assert len(shard) == len(ids)
        assert shard.read(first, n).tolist() == ids[first : first + n]
        assert np.concatenate([piece for _, piece in shard.pieces()]).tolist() == ids
        assert shard.sha256() == hashlib.sha256(path.read_bytes()).hexdigest()
        assert shard.sha256(cancelled=lambda: True) is None


def test_file_cut_short_while_it_is_open_is_named(tmp_path):
    path = tmp_path / "train.bin"
    write_tokens(path, np.arange(100, dtype=np.uint16))
    shard = Shard(path)
    os.truncate(path, 60)
    assert shard.read(0, 30).tolist() == list(range(30))
    for read in (lambda: shard.read(25, 10), lambda: shard.read(90, 1), shard.sha256, lambda: list(shard.pieces())):
        with pytest.raises(ValueError, match="shorter") as e:
            read()
        assert_one_line(str(e.value), path, "200 bytes", 60, "prepare the data again")


@pytest.mark.skipif(os.name == "nt", reason="Windows does not replace open files")
def test_file_that_another_takes_the_place_of_keeps_its_content_while_it_is_open(tmp_path):
    path = tmp_path / "train.bin"
    write_tokens(path, np.arange(100, dtype=np.uint16))
    shard = Shard(path)
    write_tokens(path, np.zeros(5, np.uint16))
    assert shard.read(0, 100).tolist() == list(range(100))
    assert not shard.was_written()


def test_writing_into_an_open_file_is_noticed_once(tmp_path):
    path = tmp_path / "train.bin"
    write_tokens(path, np.arange(100, dtype=np.uint16))
    shard = Shard(path)
    assert not shard.was_written()
    with open(path, "r+b") as file:
        file.write(b"\x05")
    os.utime(path, ns=(0, shard.facts.written_ns + 1))  # the system's clock may not have ticked meanwhile
    assert [shard.was_written(), shard.was_written()] == [True, False]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_dropped_files_are_closed(tmp_path):
    write_tokens(tmp_path / "train.bin", np.arange(100, dtype=np.uint16))
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    shards = [Shard(tmp_path / "train.bin") for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) == before + 20
    del shards
    assert len(os.listdir("/proc/self/fd")) == before


def dataset(folder: Path, train: list[int], val: list[int]) -> Path:
    splits = {"train": np.array(train, np.uint16), "val": np.array(val, np.uint16)}
    write_dataset(folder, splits, BytesTokenizer(), "test")
    return folder


def test_prepared_data_is_recognised_and_damage_noticed(tmp_path):
    dataset(tmp_path, [1, 2, 3], [4, 5])
    assert is_prepared(tmp_path, "test")
    assert not is_prepared(tmp_path, "other source")
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert meta["vocab_size"] == 256
    assert meta["files"]["train.bin"]["tokens"] == 3
    (tmp_path / "val.bin").write_bytes(b"\x04\x00\x06\x00")
    assert not is_prepared(tmp_path, "test")
    (tmp_path / "val.bin").unlink()
    assert not is_prepared(tmp_path, "test")


def test_two_at_once_do_not_write_into_one_folder(tmp_path):
    dataset(tmp_path, [1, 2, 3], [4, 5])
    with locked(tmp_path), pytest.raises(ValueError, match="wait") as e:
        dataset(tmp_path, [7, 8, 9], [7, 7])
    assert_one_line(str(e.value), tmp_path)
    assert is_prepared(tmp_path, "test")
    dataset(tmp_path, [7, 8, 9], [7, 7])
    assert read_tokens(tmp_path / "train.bin").tolist() == [7, 8, 9]


def test_foreign_shards_are_not_mixed_with_new_data(tmp_path):
    write_tokens(tmp_path / "train_000.bin", np.arange(9, dtype=np.uint16))
    with pytest.raises(ValueError, match=r"train_000\.bin"):
        dataset(tmp_path, [1, 2, 3], [4, 5])


def test_missing_data_says_how_to_make_it(tmp_path):
    with pytest.raises(ValueError, match=r"nothing .*python data/.*prepare\.py"):
        token_files(tmp_path / "nothing", "train")
    with pytest.raises(ValueError, match=r"nope\*\.bin.*python .*shakespeare_char/prepare\.py"):
        token_files(ROOT / "data" / "shakespeare_char", "nope")


def test_meta_json_wins_over_meta_pkl_and_without_either_it_is_gpt2(tmp_path):
    assert read_meta(tmp_path) == {"tokenizer": {"name": "gpt2"}, "vocab_size": 50257, "end_of_text": 50256}
    chars = ["b", "a"]
    nanogpt = {"vocab_size": 2, "itos": dict(enumerate(chars)), "stoi": {c: i for i, c in enumerate(chars)}}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(nanogpt))
    assert read_meta(tmp_path) == {"tokenizer": {"name": "char", "chars": "ba"}, "vocab_size": 2, "end_of_text": None}
    dataset(tmp_path, [1], [1])
    assert read_meta(tmp_path) == {"tokenizer": {"name": "bytes"}, "vocab_size": 256, "end_of_text": None}


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_malicious_meta_pkl_is_refused_and_runs_nothing(tmp_path):
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 2, "itos": Evil(tmp_path / "ran")}))
    with pytest.raises(ValueError, match=r"meta\.pkl"):
        read_meta(tmp_path)
    assert not (tmp_path / "ran").exists()


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
