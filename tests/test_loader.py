from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from data.loader import AHEAD, BatchPlan, Loader
from data.splits import Split
from data.token_files import write_tokens

CPU = torch.device("cpu")


@pytest.fixture
def split(tmp_path):
    write_tokens(tmp_path / "train.bin", np.arange(5000, dtype=np.uint16))
    return Split(tmp_path, "train", 8, 5000, seed=3)


@pytest.mark.parametrize(("rank", "world", "step"), [(0, 1, 0), (1, 2, 0), (2, 3, 7)])
def test_micro_batches_come_in_the_order_of_the_split(split, rank, world, step):
    loader = Loader(split, BatchPlan(2, 3, rank, world), CPU, step)
    for now in range(step, step + 5):
        global_batch = split.train_batch(now, np.arange(6 * world), 6 * world)
        for micro in range(3):
            first = (micro * world + rank) * 2
            *ours, weight = loader.next()
            assert weight is None  # every target is learned
            for part, whole in zip(ours, global_batch, strict=True):
                assert torch.equal(part, torch.from_numpy(whole[first : first + 2]))
    loader.close()


def test_what_goes_wrong_ahead_is_raised_when_its_turn_comes(split):
    split.vocab_size = 0
    loader = Loader(split, BatchPlan(2), CPU)
    with pytest.raises(ValueError, match="the vocabulary ends at -1"):
        loader.next()
    loader.close()


def test_waiting_is_counted_and_batches_made_ahead_are_not_waited_for(split):
    class Slow:
        masks = ()

        def train_batch(self, step, rows, global_batch):
            time.sleep(0.05)
            return split.train_batch(step, rows, global_batch)

    loader = Loader(Slow(), BatchPlan(2), CPU)  # type: ignore[arg-type]
    loader.next()
    assert loader.take_wait_s() > 0.02
    time.sleep(0.05 * (AHEAD + 2))
    for _ in range(AHEAD):
        loader.next()
    assert loader.take_wait_s() < 0.04
    assert loader.take_wait_s() == 0
    loader.close()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_and_micro_batches_share_the_rows_of_a_step_and_of_an_evaluation(world):
    plans = [BatchPlan.of(3, 8, rank, world) for rank in range(world)]
    rows = np.concatenate([plan.rows(micro) for plan in plans for micro in range(plan.micro_steps)])
    assert sorted(rows) == list(range(24))
    assert {plan.global_batch for plan in plans} == {24}
    evaluated = np.concatenate([batch for plan in plans for batch in plan.eval_rows(10)])
    assert sorted(evaluated) == list(range(12))  # the last two are padding


def test_accumulation_that_ranks_cannot_share_names_one_that_they_can():
    with pytest.raises(ValueError, match="=40 does not divide among 3 ranks; try --gradient_accumulation_steps=42$"):
        BatchPlan.of(12, 40, 0, 3)
