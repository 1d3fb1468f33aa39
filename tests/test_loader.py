from __future__ import annotations

import threading
import time
from hashlib import sha256

import numpy as np
import pytest
import torch

from data.batching import Batching
from data.dataset import Checksums
from data.loader import AHEAD, Loader
from data.meta_files import write_meta
from data.splits import Split

CPU = torch.device("cpu")


@pytest.fixture
def split(tmp_path):
    np.arange(5000, dtype=np.uint16).tofile(tmp_path / "train.bin")
    return Split(tmp_path, "train", 8, 5000, seed=3)


@pytest.mark.parametrize(("rank", "world", "begin"), [(0, 1, 0), (1, 2, 0), (2, 3, 7)])
def test_micro_batches_come_in_the_order_of_the_split_from_where_it_is_sent(split, rank, world, begin):
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


def test_what_goes_wrong_ahead_is_raised_when_its_turn_comes(split):
    split.vocab_size = 0
    loader = Loader(split, Batching(2), CPU)
    with pytest.raises(ValueError, match=r"train\.bin"):
        next(loader.step())
    loader.close()


def test_batches_are_made_ahead_and_waiting_for_one_is_counted(split, monkeypatch):
    made: list[int] = []
    may_read = threading.Event()
    read = split.train_batch

    def slow(step, rows, global_batch):
        may_read.wait()
        made.append(step)
        return read(step, rows, global_batch)

    monkeypatch.setattr(split, "train_batch", slow)
    waits: list[float] = []
    loader = Loader(split, Batching(2), CPU, waited=waits.append)
    threading.Timer(0.1, may_read.set).start()
    [*loader.step()]
    assert len(waits) == 1
    assert waits[0] > 0.05
    while len(made) < 1 + AHEAD:  # nobody asks for them yet
        time.sleep(0.001)
    assert sorted(made) == list(range(1 + AHEAD))
    loader.close()


def test_more_shards_than_a_process_may_have_files_are_read(tmp_path):
    resource = pytest.importorskip("resource")  # which Windows lacks
    files = {}
    for n in reversed(range(300)):  # not in the order of their names
        ids = np.arange(20 * n, 20 * (n + 1), dtype="<u2")
        ids.tofile(tmp_path / f"train_{n:04}.bin")
        files[f"train_{n:04}.bin"] = {"tokens": 20, "sha256": sha256(ids.tobytes()).hexdigest()}
    write_meta(tmp_path, {"tokenizer": {"name": "gpt2"}, "vocab_size": 50257, "files": files})
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        split = Split(tmp_path, "train", 8, 50257)
        assert [shard.path.name for shard in split.shards] == sorted(files)
        loader = Loader(split, Batching(50), CPU)
        seen = set()
        for _ in range(6):
            [batch] = loader.step()
            assert torch.equal(batch.y, batch.x + 1)
            seen.update((batch.x[:, 0] // 20).tolist())
        loader.close()
        assert seen == set(range(300))  # an epoch has one window of each
        assert Checksums(tmp_path, [split]).state == "checksums verified"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
