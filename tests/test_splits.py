"""The windows of a split: each once in an epoch, in an order for ever, in memory ahead of the training loop."""

from __future__ import annotations

import hashlib
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import raises_one_line, until
from hypothesis import given
from hypothesis import strategies as st

from data.batching import Batching
from data.loader import AHEAD, Loader
from data.splits import Split

CPU = torch.device("cpu")


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
    assert whole - len(lengths) <= split.n_windows <= whole  # and nothing left out but a window's worth per shard
    starts = np.array(seen).reshape(-1, block)[:, 0]
    assert (np.searchsorted(ends, starts, "right") == np.searchsorted(ends, starts + block, "right")).all()


def test_order_is_the_one_that_earlier_versions_had(tmp_path):
    """Recorded from 561cab2: a resumed run continues with the very next batch, whatever version began it.

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
    assert split.fingerprint() == "29353eb4584e012e"


def test_digest_tells_evaluations_apart_by_their_tokens_alone(tmp_path):
    split = make(tmp_path / "a", [400, 401])
    assert split.n_eval_windows(10**6) == 49 + 50
    assert make(tmp_path / "b", [400, 401], seed=2).eval_digest(10) == split.eval_digest(10)  # another seed
    others = [make(tmp_path / "d", [801]), make(tmp_path / "e", [400, 401], 9)]
    assert len({split.eval_digest(10), split.eval_digest(11), *(other.eval_digest(10) for other in others)}) == 4


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
    loader = Loader(split, Batching(2), CPU)
    with raises_one_line("train_000.bin: token 17 is 17"):
        next(loader.step())
    loader.close()


# ---- the loader -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "world", "begin"), [(0, 1, 0), (1, 2, 0), (2, 3, 7)])
def test_micro_batches_come_in_the_order_of_the_split_from_where_it_is_sent(tmp_path, rank, world, begin):
    split = make(tmp_path, [5000])
    loader = Loader(split, Batching(2, 3 * world, rank=rank, world=world), CPU, begin)
    for position in (begin, 9, 2):
        if position != begin:
            loader.seek(position)
        for now in (position, position + 1):
            global_batch = split.train_batch(now, np.arange(6 * world), 6 * world)
            batches = [*loader.step()]
            assert [batch.is_last for batch in batches] == [False, False, True]
            for micro, batch in enumerate(batches):
                first = (micro * world + rank) * 2
                assert batch.weight == 1 / 3
                for part, full in zip((batch.x, batch.y), global_batch, strict=True):
                    assert torch.equal(part, torch.from_numpy(full[first : first + 2]))
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
    loader = Loader(split, Batching(2), CPU, waited=waits.append)
    threading.Timer(0.1, may_read.set).start()
    [*loader.step()]
    [waited] = waits
    assert waited > 0.05
    until(lambda: sorted(made) == list(range(1 + AHEAD)))  # nobody asks for them yet
    loader.close()


def test_more_shards_than_a_process_may_have_files_are_read_in_the_order_of_their_names(tmp_path):
    resource = pytest.importorskip("resource")  # which Windows lacks
    for n in reversed(range(300)):
        np.arange(20 * n, 20 * (n + 1), dtype="<u2").tofile(tmp_path / f"train_{n:04}.bin")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        split = Split(tmp_path, "train", 8, 6000)
        x, y = split.train_batch(0, np.arange(300), 300)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [shard.path.name for shard in split.shards] == [f"train_{n:04}.bin" for n in range(300)]
    assert sorted(x[:, 0] // 20) == list(range(300))  # an epoch has one window of each
    assert (y == x + 1).all()
