"""Data folders: token files with their checksums and descriptions, which anybody may have made; the
windows of a split, each once in an epoch, in an order for ever, in memory ahead of the training
loop.
"""

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
from conftest import CPU, POSIX, ROOT, Code, raises_one_line, until
from hypothesis import given
from hypothesis import strategies as st

from data.batches import MICRO_BATCHES_AHEAD, BatchSplit, Loader, NumberFile, Split
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


def llmc_file(ids: list[int], n: int, magic: int = MAGIC) -> bytes:
    """Return a token file in llm.c's format. n: the number of tokens that its header has."""
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:3] = magic, VERSION, n
    return header.tobytes() + np.array(ids, "<u2").tobytes()


small = st.integers(0, 700)


@given(st.lists(st.integers(0, 65535), min_size=1, max_size=700), st.booleans(), small, small)
def test_any_piece_of_a_token_file_is_read_as_it_was_written(
    tmp_path_factory, ids, has_header, first, n
):
    path = tmp_path_factory.mktemp("t") / "x.bin"
    path.write_bytes(llmc_file(ids, len(ids)) if has_header else np.array(ids, "<u2").tobytes())
    shard = NumberFile(tokens_in_file(path), "<u2")
    assert shard.n == len(ids)
    assert shard.read(first, n).tolist() == ids[first : first + n]


NOT_TOKENS = {
    "empty": b"",
    "odd": b"abc",
    "cut short": llmc_file([0] * 20, 100),
    "llm.c's 32 bits": llmc_file([0] * 100, 100, magic=20240801),
    "ids of 32 bits": np.arange(300, dtype="<u4").tobytes(),
}


@pytest.mark.parametrize("kind", NOT_TOKENS)
def test_file_that_is_no_token_file_is_named(tmp_path, kind):
    path = tmp_path / "train.bin"
    path.write_bytes(NOT_TOKENS[kind])
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


@POSIX
def test_file_that_is_cut_short_is_noticed_and_one_that_is_replaced_is_still_read(tmp_path):
    path = bytes_data(tmp_path) / "train.bin"
    shard = NumberFile(tokens_in_file(path), "<u2")
    write_atomically(path, BYTES[::-1].tobytes())
    assert shard.read(0, 250).tolist() == BYTES.tolist()
    shard = NumberFile(tokens_in_file(path), "<u2")
    os.truncate(path, 60)
    with raises_one_line(path, "shorter", "prepare the data again"):
        shard.read(0, 31)


def test_dataset_is_a_folder_below_data_or_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    for name in ("mine", "./mine/", str(tmp_path / "mine")):
        assert dataset_folder(name).resolve() == tmp_path / "mine"
    assert dataset_folder("text") == ROOT / "data" / "text"
    with raises_one_line("shakespear_chars has no train.bin", "did you mean shakespeare_char?"):
        token_files(dataset_folder("shakespear_chars"), "train", {})


def test_files_of_a_folder_without_a_list_are_those_of_one_name(tmp_path):
    def read(*names):
        for name in names:
            (tmp_path / name).touch()
        return [path.name for path in token_files(tmp_path, "train", {})]

    numbered = [f"web_train_00000{number}.bin" for number in (1, 2)]
    assert read(*numbered[::-1]) == numbered
    with raises_one_line("of one kind", "b_train_000001.bin", *numbered):
        read("b_train_000001.bin")
    assert read("train.bin", "train_old.bin", "train_000.bin") == ["train.bin"]


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
    digest = hashlib.file_digest

    def held_up(file, kind):
        assert file.name.endswith("val.bin") or may_verify.wait(60)
        return digest(file, kind)

    monkeypatch.setattr("hashlib.file_digest", held_up)
    found = opened(tmp_path)
    assert found.checksums.state == "checksums are verified while it trains"
    if split == "train":
        found.checksums.wait(all_files=False)  # an evaluation waits for val only
    may_verify.set()
    with raises_one_line(path, "prepare the data again"):
        found.checksums.wait(all_files=split == "train")
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
    opened(tmp_path, 50304, {"name": "gpt2"})  # padded


# ---- meta.json -----------------------------------------------------------------------------------

ENTRY = {"tokens": 5, "sha256": "0" * 64}
META = {
    "tokenizer": {"name": "char", "chars": "\nab"},
    "vocab_size": 3,
    "source": "a text",
    "files": {"train.bin": ENTRY, "val.bin": ENTRY},
}


def test_written_record_is_read_and_keeps_its_checksum_and_older_versions_are_read(tmp_path):
    path = tmp_path / "meta.json"
    path.write_text(json.dumps(META))
    assert read_record(tmp_path) == META
    path.write_bytes(to_json(META))
    first = path.read_bytes()
    read = read_record(tmp_path)
    assert to_json(read) == first
    assert read == META | {"sha256": read["sha256"]}


def record(**changed: Any) -> bytes:
    """Return a meta.json with these values, its checksum right."""
    return to_json(META | changed)


# What the error names, and contents of meta.json.
WRONG = {
    "recursion": b"[" * 100_000,
    "its checksum": to_json(META).replace(b"a text", b"a test"),
    "vocab_size=True": record(vocab_size=True),
    "twice": record(tokenizer={"name": "char", "chars": "aba"}),
    "vocab_size=3": record(tokenizer={"name": "bpe", "merges": "h e\nhe y"}),  # which makes 259
    "merge 2,": record(tokenizer={"name": "bpe", "merges": "h e" + "\n" * 100_000}),
    "'int'": record(tokenizer=3),
    "sha256='000": record(files={"train.bin": ENTRY | {"sha256": "0" * 63}}),
    "'../../VICTIM.txt'": record(files={"../../VICTIM.txt": ENTRY}),
    "'val/../../a.bin'": record(files={"val/../../a.bin": ENTRY}),
}


@pytest.mark.parametrize("named", WRONG)
def test_record_that_cannot_be_right_is_named_though_its_checksum_is_right(tmp_path, named):
    path = tmp_path / "meta.json"
    path.write_bytes(WRONG[named])
    with raises_one_line(path, "does not describe token files", named):
        read_meta(tmp_path)
    os.truncate(path, JSON_BYTES + 1)
    with raises_one_line("meta.json is not a file of at most"):
        read_meta(tmp_path)


# ---- meta.pkl ------------------------------------------------------------------------------------


def write_pickle(folder, meta, protocol=None):
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta, protocol))


def test_meta_pkl_of_nanogpt_is_read_in_each_protocol_not_beside_meta_json_gpt2_needs_neither(
    tmp_path,
):
    assert read_meta(tmp_path) == {"tokenizer": {"name": "gpt2"}, "vocab_size": 50257}
    chars = "\n !Aaéſ日🧀"
    meta = {"vocab_size": len(chars), "itos": dict(enumerate(chars))}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        write_pickle(tmp_path, meta | {"stoi": dict(zip(chars, range(9), strict=True))}, protocol)
        tokenizer = {"name": "char", "chars": chars}
        assert read_meta(tmp_path) == {"tokenizer": tokenizer, "vocab_size": len(chars)}
    for itos in ({}, {0: "to", 1: "be", 2: "a"}):
        write_pickle(tmp_path, {"vocab_size": 3, "itos": itos})
        assert read_meta(tmp_path) == {"tokenizer": {}, "vocab_size": 3}
    assert read_meta(bytes_data(tmp_path))["tokenizer"] == {"name": "bytes"}


WRONG_ITOS = [{0: "a", 1: "a"}, {0: "a", 1: 3}, {0: "a", 1: [["b"]]}, {0: "a", 2: "b"}, Code()]


def test_meta_pkl_that_contradicts_itself_is_an_error_and_a_malicious_one_runs_nothing(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    wrong = [{"vocab_size": size, "itos": {0: "a", 1: "b"}} for size in (3, 1 << 40, None)]
    for meta in wrong + [{"vocab_size": 2, "itos": itos} for itos in WRONG_ITOS]:
        write_pickle(tmp_path, meta)
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


def make(folder: Path, lengths: list[int], block: int = 8, seed: int = 1, ids: Any = None) -> Split:
    """Return a split of shards with these lengths. ids: their tokens, 0, 1, 2 ... unless given."""
    folder.mkdir(exist_ok=True)
    ids = np.arange(sum(lengths)) if ids is None else ids
    for number, part in enumerate(np.split(ids, np.cumsum(lengths)[:-1])):
        part.astype(np.uint16).tofile(folder / f"train_{number:03}.bin")
    return Split(folder, "train", block, int(ids.max()) + 1, seed)


@given(splits(), st.integers(1, 7), st.integers(0, 2))
def test_every_window_once_per_epoch(tmp_path_factory, parts, global_batch, epoch):
    lengths, block, seed = parts
    split = make(tmp_path_factory.mktemp("s"), lengths, block, seed)
    begin = epoch * split.n_windows
    end = begin + split.n_windows
    seen = []
    for step in range(begin // global_batch, (end - 1) // global_batch + 1):
        position = step * global_batch + np.arange(global_batch)
        x, y = split.train_batch(position)
        assert (y == x + 1).all()  # targets are the next tokens
        seen += x[(position >= begin) & (position < end)].tolist()
    tokens = np.array(seen)
    assert np.unique(tokens).size == tokens.size == split.n_windows * block  # nothing twice
    # And nothing left out but a window's worth per shard.
    whole = sum((n - 1) // block for n in lengths)
    assert whole - len(lengths) <= split.n_windows <= whole
    shard_of = np.searchsorted(np.cumsum(lengths), [tokens[:, 0], tokens[:, -1] + 1], "right")
    assert (shard_of[0] == shard_of[1]).all()


def test_order_is_the_one_that_earlier_versions_had(tmp_path):
    """Recorded from 561cab2: a resumed run continues with the very next batch, whatever version
    began it.

    Epochs and seeds have orders of their own there.
    """
    split = make(tmp_path, [3000, 90, 4100], 32, 1337, np.arange(7190) * 7919 % 251)
    digest = hashlib.sha256()
    for step in (0, 1, 7, 100, 12345):
        for part in split.train_batch(step * 12 + np.arange(12)):
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
    cut_elsewhere = make(tmp_path / "c", [801])
    digests = {eval_digest(split, 10), eval_digest(split, 11), eval_digest(cut_elsewhere, 10)}
    np.repeat([0, 1], [400, 401]).astype(np.uint8).tofile(tmp_path / "c" / "train_000.mask")
    digests.add(eval_digest(Split(tmp_path / "c", "train", 8, 801), 10))
    assert len(digests) == 4


@given(splits(), st.integers(1, 50), st.integers(1, 5))
def test_evaluation_windows_are_fixed_apart_and_all_counted(
    tmp_path_factory, parts, at_most, batch
):
    split = make(tmp_path_factory.mktemp("s"), *parts)
    n = split.n_eval_windows(at_most)
    assert n == min(at_most, sum((length - 1) // split.block_size for length in parts[0]))
    seen = []
    for first in range(0, n, batch):
        rows = first + np.arange(batch)
        x, y = split.eval_batch(rows, n)
        assert (y == np.where(rows[:, None] < n, x + 1, -1)).all()
        seen += x[rows < n].flatten().tolist()
    assert len(seen) == len(set(seen)) == n * split.block_size


def test_any_step_of_ten_billion_tokens_is_at_hand_at_once(tmp_path):
    for n in range(10):
        (tmp_path / f"train_{n:06}.bin").touch()
        os.truncate(tmp_path / f"train_{n:06}.bin", 2_000_000_000)  # a hole, which takes no space
    tracemalloc.start()
    split = Split(tmp_path, "train", 1024, 2)
    for step in (0, 19_000, 10**9):
        split.train_batch(step * 512 + np.arange(64))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16e6  # an index of the windows would be 80 MB
    assert split.n_windows > 9_760_000


def test_id_past_the_vocabulary_is_named_with_its_place_when_its_batch_is_trained_on(tmp_path):
    split = make(tmp_path, [50], 49)
    split.vocab_size = 49
    loader = Loader(split, BatchSplit(2), CPU)
    with raises_one_line("train_000.bin: token 49 is 49"):
        next(loader.step(0))
    loader.close()


def test_batches_are_made_ahead_and_waiting_for_one_is_counted(tmp_path, monkeypatch):
    split = make(tmp_path, [5000])
    made = []
    may_read = threading.Event()
    read = split.train_batch

    def slow(rows):
        may_read.wait()
        made.append(rows[0] // 2)
        return read(rows)

    monkeypatch.setattr(split, "train_batch", slow)
    loader = Loader(split, BatchSplit(2), CPU)
    threading.Timer(0.1, may_read.set).start()
    [*loader.step(0)]
    assert loader.wait_s > 0.05
    until(lambda: sorted(made) == list(range(1 + MICRO_BATCHES_AHEAD)))  # nobody asks for them yet
    loader.close()


def test_evaluation_reads_at_least_the_tokens_that_are_asked_for():
    for tokens, windows in ((17, 2), (0, 6)):
        assert BatchSplit(2, 1, 16, eval_iters=3, eval_tokens=tokens).eval_sequences == windows
