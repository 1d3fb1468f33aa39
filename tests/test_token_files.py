"""Data folders: token files with their checksums and descriptions, which anybody may have made; the
windows of a split, each once in an epoch, in an order for ever, in memory ahead of the training
loop.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CPU, ROOT, Code, assert_one_line, raises_one_line, until
from hypothesis import given
from hypothesis import strategies as st

import data.dataset
from data.batches import AHEAD, BatchSplit, Loader, NumberFile, Split
from data.dataset import Dataset, eval_digest, fingerprint
from data.prepared import write_dataset
from data.token_files import (
    HEADER_BYTES,
    JSON_BYTES,
    MAGIC,
    VERSION,
    dataset_folder,
    read_meta,
    read_record,
    to_json,
    token_files,
    tokens_in_file,
)
from data.tokenizer import BytesTokenizer, CharTokenizer
from deskgpt.files import write_atomically

BYTES = np.arange(250, dtype=np.uint16)


def llmc_file(
    ids: list[int], magic: int = MAGIC, version: int = VERSION, tokens: int | None = None
) -> bytes:
    """Return a token file in llm.c's format. tokens: their number, as its header has it."""
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:3] = magic, version, len(ids) if tokens is None else tokens
    return header.tobytes() + np.array(ids, "<u2").tobytes()


@given(
    ids=st.lists(st.integers(0, 65535), min_size=1, max_size=700),
    header=st.booleans(),
    draw=st.data(),
)
def test_any_piece_of_a_token_file_is_read_as_it_was_written(tmp_path_factory, ids, header, draw):
    path = tmp_path_factory.mktemp("t") / "x.bin"
    path.write_bytes(llmc_file(ids) if header else np.array(ids, "<u2").tobytes())
    first = draw.draw(st.integers(0, len(ids)))
    n = draw.draw(st.integers(0, len(ids) - first))
    shard = NumberFile(tokens_in_file(path), "<u2")
    assert shard.n == len(ids)
    assert shard.read(first, n).tolist() == ids[first : first + n]


NOT_TOKENS = {
    "empty": b"",
    "odd": b"abc",
    "cut short": llmc_file([0] * 100)[:-160],
    "a token more": llmc_file([0] * 100, tokens=101),
    "llm.c's 32 bits": llmc_file([0] * 100, magic=20240801, version=7),
    "npy": b"\x93NUMPY\1\0" + bytes(4000),
    "ids of 32 bits": np.arange(300, dtype="<u4").tobytes(),
}


@pytest.mark.parametrize("content", NOT_TOKENS.values(), ids=NOT_TOKENS.keys())
def test_file_that_is_no_token_file_is_named(tmp_path, content):
    path = tmp_path / "train.bin"
    path.write_bytes(content)
    with raises_one_line(path, "prepare"):
        tokens_in_file(path)


def opened(folder: Path, vocab_size: int = 256, tokenizer: Any = None) -> Dataset:
    data = Dataset(folder)
    data.open(8, 0, vocab_size, tokenizer, compares_checksums=True)
    return data


def bytes_data(folder: Path) -> Path:
    """Write the same 250 tokens as train and val."""
    write_dataset(folder, {"train": BYTES, "val": BYTES}, BytesTokenizer(), "test")
    return folder


@pytest.mark.skipif(os.name == "nt", reason="Windows does not change or replace open files")
def test_file_that_changes_under_a_run_is_noticed_and_one_that_is_replaced_is_still_read(tmp_path):
    data = opened(bytes_data(tmp_path))
    path = tmp_path / "train.bin"
    with open(path, "r+b") as file:
        file.write(b"\x00")
    # The system's clock may not have ticked meanwhile.
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    [warning] = data.changes()
    assert_one_line(warning, tmp_path, "written into")
    write_atomically(path, BYTES[::-1].tobytes())
    assert data.train.shards[0].read(0, 250).tolist() == BYTES.tolist()
    assert data.changes() == []

    shard = NumberFile(tokens_in_file(path), "<u2")
    os.truncate(path, 60)
    with raises_one_line(path, "shorter", "prepare the data again"):
        shard.read(0, 31)


def test_dataset_is_a_folder_below_data_or_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    found = [dataset_folder(name) for name in ("mine", "./mine/", str(tmp_path / "mine"), "text")]
    assert [path.resolve() for path in found] == [tmp_path / "mine"] * 3 + [ROOT / "data" / "text"]


# The files of a folder without a list, and those that are read as train; None if that is not clear.
FOUND: list[tuple[list[str], list[str] | None]] = [
    (["train.bin", "train_old.bin", "train_000.bin"], ["train.bin"]),
    (
        ["web_train_000002.bin", "web_train_000001.bin"],
        ["web_train_000001.bin", "web_train_000002.bin"],
    ),
    (["a_train_000001.bin", "b_train_000001.bin"], None),
]


@pytest.mark.parametrize(
    ("names", "read"), FOUND, ids=lambda value: " ".join(value or ["an error"])
)
def test_files_of_a_folder_without_a_list_are_those_of_one_name(tmp_path, names, read):
    for name in names:
        np.arange(300, 320, dtype=np.uint16).tofile(tmp_path / name)
    if read is None:
        with raises_one_line("several files for train", *names):
            token_files(tmp_path, "train", {})
    else:
        assert [path.name for path in token_files(tmp_path, "train", {})] == read


@pytest.mark.parametrize("split", ["train", "val"])
def test_one_flipped_bit_is_named_before_the_run_or_before_an_evaluation_shows_it(
    tmp_path, monkeypatch, split
):
    assert opened(bytes_data(tmp_path)).checksums.state == "checksums verified"
    path = tmp_path / f"{split}.bin"
    (BYTES ^ 1).tofile(path)
    with raises_one_line(path, "prepare the data again"):
        opened(tmp_path)

    monkeypatch.setattr("data.dataset.AT_ONCE", 0)  # as if the data were large
    may_verify = threading.Event()
    digest = data.dataset.file_digest

    def held_up(file: NumberFile) -> str:
        assert file.path.name == "val.bin" or may_verify.wait(60)
        return digest(file)

    monkeypatch.setattr("data.dataset.file_digest", held_up)
    found = opened(tmp_path)
    assert found.checksums.state == "checksums are verified while it trains"
    if split == "train":
        assert found.changes() == []  # an evaluation waits for val only
    may_verify.set()
    with raises_one_line(path, "prepare the data again"):
        found.changes(is_last=split == "train")
    with raises_one_line(path):
        next(Loader(getattr(found, split), BatchSplit(1), CPU).step(0))
    (tmp_path / "meta.json").write_text('{"tokenizer": {"name": "bytes"}, "vocab_size": 256}')
    assert opened(tmp_path).checksums.state == "no checksums (no meta.json that lists files)"


def test_vocabularies_must_match(tmp_path):
    chars = CharTokenizer("abc")
    ids = np.zeros(20, np.uint16)
    write_dataset(tmp_path, {"train": ids, "val": ids}, chars, "test")
    for tokenizer in (chars.meta(), None):  # a nanoGPT checkpoint does not say
        opened(tmp_path, 3, tokenizer)
    for size, tokenizer in ((65, None), (3, CharTokenizer("abd").meta())):
        with raises_one_line(tmp_path, 3, size, "prepare the data", "--init_from=scratch"):
            opened(tmp_path, size, tokenizer)
    (tmp_path / "meta.json").unlink()  # then they are GPT-2's
    for size in (50257, 50304):  # padded
        opened(tmp_path, size, {"name": "gpt2"})


# ---- meta.json -----------------------------------------------------------------------------------

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
    (tmp_path / "meta.json").write_bytes(to_json(META))
    first = (tmp_path / "meta.json").read_bytes()
    (tmp_path / "meta.json").write_bytes(to_json(read_record(tmp_path)))
    assert (tmp_path / "meta.json").read_bytes() == first
    assert {key: value for key, value in read_record(tmp_path).items() if key != "sha256"} == META


# A key with a wrong value, and what the error names.
WRONG: list[tuple[str, Any, str]] = [
    ("vocab_size", True, "vocab_size=True"),
    ("tokenizer", {"name": "gpt2", "chars": "a"}, "describes no tokenizer"),
    ("tokenizer", {"name": "char", "chars": "aba"}, "twice"),
    ("tokenizer", {"name": "bpe", "merges": "h e\nhe y"}, "vocab_size=3"),  # which makes 259
    ("tokenizer", {"name": "bpe", "merges": "h e\nthe y"}, "merge 2"),
    ("tokenizer", {"name": "bpe", "merges": "\n" * 100_000}, "merge 1,"),
    ("tokenizer", 3, "'int'"),
    ("files", {"train.bin": ENTRY | {"tokens": 1e300}}, "tokens=1e+300"),
    ("files", {"train.bin": ENTRY | {"sha256": "0" * 63}}, "sha256='000"),
    ("files", {"../../VICTIM.txt": ENTRY}, "'../../VICTIM.txt'"),
    ("packed", 0, "packed=0"),
]


@pytest.mark.parametrize(("key", "value", "named"), WRONG)
def test_values_that_cannot_be_right_are_named_though_the_checksum_is_right(
    tmp_path, key, value, named
):
    (tmp_path / "meta.json").write_bytes(to_json(META | {key: value}))
    with pytest.raises(ValueError, match="does not describe token files") as e:
        read_meta(tmp_path)
    assert_one_line(e.value, named)
    assert len(str(e.value)) < 400


def test_odd_json_is_one_line_and_what_is_far_too_large_is_not_read(tmp_path):
    for content in (b"[" * 100_000, b"1" * 5000, b"\xff", b"NaN"):
        (tmp_path / "meta.json").write_bytes(content)
        with raises_one_line(tmp_path / "meta.json", "does not describe token files"):
            read_meta(tmp_path)
    os.truncate(tmp_path / "meta.json", JSON_BYTES + 1)
    with raises_one_line("meta.json is not a file of at most"):
        read_meta(tmp_path)


# ---- meta.pkl ------------------------------------------------------------------------------------


def nanogpt(chars: str) -> dict[str, Any]:
    return {
        "vocab_size": len(chars),
        "itos": dict(enumerate(chars)),
        "stoi": {c: i for i, c in enumerate(chars)},
    }


def test_meta_pkl_of_nanogpt_is_read_in_each_protocol_not_beside_meta_json_gpt2_needs_neither(
    tmp_path,
):
    assert read_meta(tmp_path) == {"tokenizer": {"name": "gpt2"}, "vocab_size": 50257}
    chars = "\n !Aaéſ日🧀"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(nanogpt(chars), protocol))
        tokenizer = {"name": "char", "chars": chars}
        assert read_meta(tmp_path) == {"tokenizer": tokenizer, "vocab_size": len(chars)}
    for meta in ({"vocab_size": 3}, {"vocab_size": 3, "itos": {0: "to", 1: "be", 2: "a"}}):
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
        assert read_meta(tmp_path) == {"tokenizer": {}, "vocab_size": 3}
    assert read_meta(bytes_data(tmp_path))["tokenizer"] == {"name": "bytes"}


def test_meta_pkl_that_contradicts_itself_is_an_error_and_a_malicious_one_runs_nothing(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    wrong: list[dict[str, Any]] = [{"vocab_size": size} for size in (3, 1 << 40, None)]
    wrong += [
        {"itos": itos} for itos in ({0: "a", 1: "a"}, {0: "a", 1: 3}, {0: "a", 1: [["b"]]}, Code())
    ]
    for change in wrong:
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(nanogpt("ab") | change))
        with raises_one_line(tmp_path / "meta.pkl", "does not describe token files"):
            read_meta(tmp_path)
    assert not (tmp_path / "ran").exists()


# ---- the windows of a split ----------------------------------------------------------------------


@st.composite
def splits(draw):
    """(shard lengths, block size, seed) where at least one shard is long enough."""
    block = draw(st.integers(1, 9))
    lengths = draw(st.lists(st.integers(1, 120), min_size=1, max_size=4))
    lengths[0] += block
    return lengths, block, draw(st.integers(0, 10**9))


def make(folder: Path, lengths: list[int], block: int = 8, seed: int = 1) -> Split:
    """Return a split whose token at place i of all shards together is i."""
    folder.mkdir(exist_ok=True)
    first = 0
    for number, n in enumerate(lengths):
        ids = np.arange(first, first + n, dtype=np.uint16)
        ids.tofile(folder / f"train_{number:03}.bin")
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
    # And nothing left out but a window's worth per shard.
    assert whole - len(lengths) <= split.n_windows <= whole
    starts = np.array(seen).reshape(-1, block)[:, 0]
    assert (
        np.searchsorted(ends, starts, "right") == np.searchsorted(ends, starts + block, "right")
    ).all()


def test_order_is_the_one_that_earlier_versions_had(tmp_path):
    """Recorded from 561cab2: a resumed run continues with the very next batch, whatever version
    began it.

    Epochs and seeds have orders of their own there.
    """
    first = 0
    for number, n in enumerate((3000, 90, 4100)):
        ids = (np.arange(first, first + n) * 7919 % 251).astype(np.uint16)
        ids.tofile(tmp_path / f"train_{number:03}.bin")
        first += n
    split = Split(tmp_path, "train", 32, 251, 1337)
    digest = hashlib.sha256()
    for step in (0, 1, 7, 100, 12345):
        for part in split.train_batch(step, np.arange(12), 12):
            digest.update(part.tobytes())
    assert digest.hexdigest()[:16] == "8131322892bc2b63"
    x, y = split.eval_batch(np.arange(40), 40)
    assert hashlib.sha256(x.tobytes() + y.tobytes()).hexdigest()[:16] == "07a294022d4bcc4a"
    assert fingerprint(split) == "29353eb4584e012e"


def test_digest_tells_evaluations_apart_by_their_tokens_alone(tmp_path):
    split = make(tmp_path / "a", [400, 401])
    assert split.n_eval_windows(10**6) == 49 + 50
    another_seed = make(tmp_path / "b", [400, 401], seed=2)
    assert eval_digest(another_seed, 10) == eval_digest(split, 10)
    cut_elsewhere = make(tmp_path / "d", [801])
    longer = make(tmp_path / "e", [400, 401], 9)
    digests = {eval_digest(other, 10) for other in (split, cut_elsewhere, longer)}
    assert len(digests | {eval_digest(split, 11)}) == 4


@given(splits(), st.integers(1, 50), st.integers(1, 5))
def test_evaluation_windows_are_fixed_apart_and_all_counted(
    tmp_path_factory, parts, at_most, batch
):
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


def test_any_step_of_ten_billion_tokens_is_at_hand_at_once(tmp_path):
    for n in range(10):
        with open(tmp_path / f"train_{n:06}.bin", "wb") as f:  # with holes: they take no space
            f.truncate(2_000_000_000)
    tracemalloc.start()
    split = Split(tmp_path, "train", 1024, 2)
    assert split.tokens == 10_000_000_000
    batches = [split.train_batch(step, np.arange(64), 512)[0] for step in (0, 5_000, 19_000, 10**9)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16e6  # an index of the windows would be 80 MB
    assert split.n_windows > 9_760_000
    assert all(batch.shape == (64, 1024) for batch in batches)


def test_id_past_the_vocabulary_is_named_with_its_place_when_its_batch_is_trained_on(tmp_path):
    split = make(tmp_path, [50], 49)
    split.vocab_size = 17
    loader = Loader(split, BatchSplit(2), CPU)
    with raises_one_line("train_000.bin: token 17 is 17"):
        next(loader.step(0))
    loader.close()


def test_batches_are_made_ahead_and_waiting_for_one_is_counted(tmp_path, monkeypatch):
    split = make(tmp_path, [5000])
    made: list[int] = []
    waits: list[float] = []
    may_read = threading.Event()
    read = split.train_batch

    def slow(step, rows, global_batch):
        may_read.wait()
        made.append(step)
        return read(step, rows, global_batch)

    monkeypatch.setattr(split, "train_batch", slow)
    loader = Loader(split, BatchSplit(2), CPU, waited=waits.append)
    threading.Timer(0.1, may_read.set).start()
    [*loader.step(0)]
    [waited] = waits
    assert waited > 0.05
    until(lambda: sorted(made) == list(range(1 + AHEAD)))  # nobody asks for them yet
    loader.close()
