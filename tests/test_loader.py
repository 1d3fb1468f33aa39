from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from data.loader import AHEAD, Loader
from data.splits import Split
from data.token_files import write_tokens

CPU = torch.device("cpu")


@pytest.fixture
def split(tmp_path):
    write_tokens(tmp_path / "train.bin", np.arange(5000, dtype=np.uint16))
    return Split(tmp_path, "train", 8, 5000, seed=3)


@pytest.mark.parametrize(("rank", "world", "step"), [(0, 1, 0), (1, 2, 0), (2, 3, 7)])
def test_micro_batches_come_in_the_order_of_the_split(split, rank, world, step):
    loader = Loader(split, CPU, batch_size=2, micro_steps=3, step=step, rank=rank, world=world)
    for now in range(step, step + 5):
        global_batch = split.train_batch(now, np.arange(6 * world), 6 * world)
        for micro in range(3):
            first = (micro * world + rank) * 2
            for ours, whole in zip(loader.next(), global_batch, strict=True):
                assert torch.equal(ours, torch.from_numpy(whole[first : first + 2]))
    loader.close()


def test_what_goes_wrong_ahead_is_raised_when_its_turn_comes(split):
    split.vocab_size = 0
    loader = Loader(split, CPU, 2, 1)
    with pytest.raises(ValueError, match="the vocabulary ends at -1"):
        loader.next()
    loader.close()


def test_waiting_is_counted_and_batches_made_ahead_are_not_waited_for(split):
    class Slow:
        def train_batch(self, step, rows, global_batch):
            time.sleep(0.05)
            return split.train_batch(step, rows, global_batch)

    loader = Loader(Slow(), CPU, 2, 1)  # type: ignore[arg-type]
    loader.next()
    assert loader.wait_s > 0.02
    time.sleep(0.05 * (AHEAD + 2))
    waited = loader.wait_s
    for _ in range(AHEAD):
        loader.next()
    assert loader.wait_s - waited < 0.04
    loader.close()
