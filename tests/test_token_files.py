from __future__ import annotations

import json
import os
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.splits import Split, keys, permute
from data.token_files import (
    HEADER_BYTES,
    MAGIC,
    check_vocabulary,
    is_prepared,
    llmc_header,
    read_meta,
    read_tokens,
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


@pytest.mark.parametrize("content", [b"", b"abc"])
def test_empty_and_odd_files_are_named(tmp_path, content):
    (tmp_path / "train.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"train\.bin (is empty|has 3 bytes, an odd number).*prepare the data again"):
        read_tokens(tmp_path / "train.bin")


def test_file_cut_short_behind_its_header_is_named(tmp_path):
    path = tmp_path / "train.bin"
    write_tokens(path, np.arange(100, dtype=np.uint16), header=True)
    os.truncate(path, HEADER_BYTES + 40)
    with pytest.raises(ValueError, match="a header of 100 tokens makes 1,224 bytes, the file has 1,064"):
        read_tokens(path)


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


def test_failed_write_leaves_the_old_data_set_whole(tmp_path, monkeypatch):
    dataset(tmp_path, [1, 2, 3], [4, 5])

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot write .*train\.bin.*No space left on device; free some disk space"):
        dataset(tmp_path, [7, 8, 9], [7, 7])
    assert is_prepared(tmp_path, "test")
    assert read_tokens(tmp_path / "train.bin").tolist() == [1, 2, 3]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["meta.json", "train.bin", "val.bin"]


def test_foreign_shards_are_not_mixed_with_new_data(tmp_path):
    write_tokens(tmp_path / "train_000.bin", np.arange(9, dtype=np.uint16))
    with pytest.raises(ValueError, match=r"other shards \(train_000\.bin\)"):
        dataset(tmp_path, [1, 2, 3], [4, 5])


# ---- meta ----------------------------------------------------------------------------------------------------


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
    with pytest.raises(ValueError, match=r"meta\.pkl does not describe token files.*only plain values"):
        read_meta(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"tokenizer": 3, "vocab_size": 5}', '{"tokenizer": {}}'])
def test_damaged_meta_json_is_named(tmp_path, content):
    (tmp_path / "meta.json").write_text(content)
    with pytest.raises(ValueError, match=r"meta\.json does not describe token files.*prepare the data again"):
        read_meta(tmp_path)


def test_vocabularies_must_match(tmp_path):
    chars, other = CharTokenizer("abc").meta(), CharTokenizer("abd").meta()
    meta = {"tokenizer": chars, "vocab_size": 3}
    check_vocabulary(tmp_path, meta, 3, chars)
    check_vocabulary(tmp_path, meta, 3, None)  # a nanoGPT checkpoint does not say
    with pytest.raises(ValueError, match="vocabulary of 3 .*model one of 65.*prepare the data with"):
        check_vocabulary(tmp_path, meta, 65, None)
    with pytest.raises(ValueError, match="their characters differ"):
        check_vocabulary(tmp_path, meta, 3, other)
    gpt2 = {"tokenizer": {"name": "gpt2"}, "vocab_size": 50257}
    for model_vocab in (50257, 50304):
        check_vocabulary(tmp_path, gpt2, model_vocab, {"name": "gpt2"})


# ---- order ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_permutation_is_a_bijection(n, key):
    assert sorted(permute(np.arange(n), n, np.array([key], np.uint64)).tolist()) == list(range(n))


def test_permutations_look_random():
    n, k = 1000, keys(3, np.arange(400))
    images = permute(np.arange(n)[:, None], n, k)  # (position, epoch)
    expected = (n - 1) / 2
    assert abs(images.mean(1) - expected).max() < 6 * n / 12**0.5 / 400**0.5  # every position goes everywhere
    assert np.mean(images[1:] == images[:-1] + 1) < 3 / n  # and neighbours do not stay together


@st.composite
def splits(draw):
    """(shard lengths, block size, seed) where at least one shard is long enough."""
    block = draw(st.integers(1, 9))
    lengths = draw(st.lists(st.integers(1, 120), min_size=1, max_size=4))
    lengths[0] += block
    return lengths, block, draw(st.integers(0, 10**9))


def make(folder: Path, lengths: list[int], block: int, seed: int) -> Split:
    """A split whose token at place i of all shards together is i."""
    first = 0
    for number, n in enumerate(lengths):
        ids = np.arange(first, first + n, dtype=np.uint16)
        write_tokens(folder / f"train_{number:03}.bin", ids, header=number % 2 == 1)
        first += n
    return Split(folder, "train", block, first, seed)


@given(splits(), st.integers(1, 7), st.integers(0, 2))
def test_every_window_once_per_epoch(tmp_path_factory, parts, global_batch, epoch):
    lengths, block, seed = parts
    split = make(tmp_path_factory.mktemp("s"), lengths, block, seed)
    positions = np.arange(epoch * split.n_windows, (epoch + 1) * split.n_windows)
    seen = []
    for step in range(positions[0] // global_batch, positions[-1] // global_batch + 1):
        rows = np.arange(global_batch)
        x, y = split.train_batch(step, rows, global_batch)
        assert (y == x + 1).all()  # targets are the next tokens
        inside = np.isin(step * global_batch + rows, positions)
        seen += x[inside].flatten().tolist()
    assert len(seen) == len(set(seen)) == split.n_windows * block  # nothing twice
    ends = np.cumsum(lengths)
    whole = sum((n - 1) // block for n in lengths)
    assert whole - len(lengths) <= split.n_windows <= whole  # and nothing left out but a window's worth per shard
    starts = np.array(seen).reshape(-1, block)[:, 0]
    assert (np.searchsorted(ends, starts, "right") == np.searchsorted(ends, starts + block, "right")).all()


@given(splits(), st.integers(0, 50), st.sampled_from([(12, 1), (4, 3), (3, 4), (1, 12)]))
def test_same_tokens_in_a_step_however_the_global_batch_is_split(tmp_path_factory, parts, step, shape):
    split = make(tmp_path_factory.mktemp("s"), *parts)
    whole = split.train_batch(step, np.arange(12), 12)
    size, n = shape
    pieces = [split.train_batch(step, np.arange(size) + i * size, 12) for i in range(n)]
    for a, parts_of_a in zip(whole, zip(*pieces, strict=True), strict=True):
        assert np.array_equal(a, np.concatenate(parts_of_a))


@given(st.integers(0, 2**31), st.integers(0, 1000), st.integers(1, 64))
def test_batch_is_a_function_of_its_arguments_alone(tmp_path_factory, seed, step, global_batch):
    folder = tmp_path_factory.mktemp("s")
    a, b = make(folder, [500], 4, seed), Split(folder, "train", 4, 500, seed)
    a.train_batch(step + 1, np.arange(global_batch), global_batch)  # leaves no trace
    for x, y in zip(*(s.train_batch(step, np.arange(global_batch), global_batch) for s in (a, b)), strict=True):
        assert np.array_equal(x, y)


def test_seeds_and_epochs_have_orders_of_their_own(tmp_path):
    def order(seed: int, epoch: int) -> list[int]:
        split = Split(tmp_path, "train", 10, 2000, seed)
        return split.train_batch(epoch, np.arange(split.n_windows), split.n_windows)[0][:, 0].tolist()

    make(tmp_path, [2000], 10, 0)
    orders = [order(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(o) for o in orders}) == 4
    assert orders[0] == order(0, 0)
    assert len({o[0] % 10 for o in (order(0, e) for e in range(30))}) > 5  # epochs cut at different offsets


@given(splits(), st.integers(1, 50), st.integers(1, 5))
def test_evaluation_windows_are_fixed_apart_and_all_counted(tmp_path_factory, parts, at_most, batch):
    split = make(tmp_path_factory.mktemp("s"), *parts)
    n = split.n_eval_windows(at_most)
    assert n == min(at_most, sum((length - 1) // split.block_size for length in parts[0]))
    seen = []
    for first in range(0, n, batch):
        x, y = split.eval_batch(first + np.arange(batch), n)
        kept = first + np.arange(batch) < n
        assert (y[kept] == x[kept] + 1).all()
        assert (y[~kept] == -1).all()
        seen += x[kept].flatten().tolist()
    assert len(seen) == len(set(seen)) == n * split.block_size


@given(st.integers(0, 10**6), st.lists(st.integers(1, 30), min_size=5, max_size=60), st.integers(2, 12))
def test_aligned_windows_begin_where_a_document_does(tmp_path_factory, seed, lengths, block):
    ids = np.concatenate([[0, *range(1, n)] for n in lengths]).astype(np.uint16)  # a document begins with token 0
    if len(ids) <= block:
        return
    folder = tmp_path_factory.mktemp("s")
    write_tokens(folder / "train.bin", ids)
    plain, aligned = (Split(folder, "train", block, 100, seed, start) for start in (None, 0))
    rows = np.arange(plain.n_windows)
    (x, _), (xa, ya) = (split.train_batch(1, rows, len(rows)) for split in (plain, aligned))
    places = {tuple(ids[i : i + block + 1]): i for i in reversed(range(len(ids) - block))}
    for before, after, target in zip(x.tolist(), xa.tolist(), ya.tolist(), strict=True):
        assert (*after, target[-1]) in places  # a window of the file still
        assert after[0] == 0 or after == before
        assert after == before if before[0] == 0 else True
        if after[0] != 0:  # no document begins in the window, or so late that the file ends before the window would
            assert 0 not in before or ids[len(ids) - block :].tolist().count(0) > 0
    halves = [aligned.train_batch(1, part, len(rows))[0] for part in np.array_split(rows, 2) if len(part)]
    assert np.array_equal(np.concatenate(halves), xa)


def test_any_step_of_ten_billion_tokens_is_at_hand_at_once(tmp_path):
    for n in range(100):
        with open(tmp_path / f"train_{n:06}.bin", "wb") as f:  # with holes: they take no space
            f.write(llmc_header(100_000_000))
            f.truncate(HEADER_BYTES + 200_000_000)
    tracemalloc.start()
    split = Split(tmp_path, "train", 1024, 2)
    assert split.tokens == 10_000_000_000
    batches = [split.train_batch(step, np.arange(64), 512)[0] for step in (0, 5_000, 19_000, 10**9)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16e6  # an index of the windows would be 80 MB
    assert split.n_windows > 9_760_000
    assert all(batch.shape == (64, 1024) for batch in batches)


# ---- bad data ------------------------------------------------------------------------------------------------


def test_too_short_data_names_the_block_size_that_fits(tmp_path):
    write_tokens(tmp_path / "train.bin", np.arange(10, dtype=np.uint16))
    with pytest.raises(ValueError, match="block_size=10 needs 11 tokens.*try --block_size=9"):
        Split(tmp_path, "train", 10, 100)
    assert Split(tmp_path, "train", 9, 100).n_windows == 1


def test_id_past_the_vocabulary_is_named_with_its_place(tmp_path, monkeypatch):
    ids = np.zeros(50, np.uint16)
    ids[17] = 99
    write_tokens(tmp_path / "train.bin", ids)
    message = r"train\.bin: token 17 is 99, and the vocabulary ends at 98"
    with pytest.raises(ValueError, match=message):
        Split(tmp_path, "train", 4, 99)
    monkeypatch.setattr("data.splits.SCANNED", 49)  # a larger split is checked as it is read
    split = Split(tmp_path, "train", 49, 99)
    with pytest.raises(ValueError, match=message):
        split.train_batch(0, np.arange(1), 1)


@pytest.mark.parametrize(
    "meta",
    [
        {"tokenizer": {"name": "bytes"}, "vocab_size": 0},
        {"tokenizer": {"name": "char", "chars": "ab"}, "vocab_size": 3},
        {"tokenizer": {"name": "char"}, "vocab_size": 3},
        {"tokenizer": "char", "vocab_size": 3},
    ],
)
def test_description_that_contradicts_itself_is_named(tmp_path, meta):
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match=r"meta\.json does not describe token files"):
        read_meta(tmp_path)


def test_missing_data_says_how_to_make_it(tmp_path):
    from conftest import ROOT

    with pytest.raises(ValueError, match=r"nothing does not exist"):
        Split(tmp_path / "nothing", "train", 4, 10)
    with pytest.raises(ValueError, match=r"has no nope\*\.bin; run: python .*shakespeare_char/prepare\.py"):
        Split(ROOT / "data" / "shakespeare_char", "nope", 4, 10)


def test_fingerprint_tells_tokens_apart(tmp_path):
    ids = np.arange(100, dtype=np.uint16)
    for name, tokens in {"a": ids, "b": ids, "c": ids[::-1], "d": ids[:99]}.items():
        write_tokens(tmp_path / name / "val.bin", tokens)
    a, b, c, d = (Split(tmp_path / name, "val", 4, 100).fingerprint() for name in "abcd")
    assert a == b
    assert len({a, c, d}) == 3
