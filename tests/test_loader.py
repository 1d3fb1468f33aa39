from __future__ import annotations

import math
import time
from hashlib import sha256

import numpy as np
import pytest
import torch

from data.loader import AHEAD, BatchPlan, Loader
from data.splits import Split
from data.token_files import write_meta, write_tokens
from data.verify import Verification

try:
    import resource
except ModuleNotFoundError:  # Windows
    resource = None  # type: ignore[assignment]

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
    shares = [[*plan.eval_rows(10)] for plan in plans]
    assert {len(share) for share in shares} == {math.ceil(4 / world)}  # batches: equally many on each rank
    evaluated = np.concatenate([batch for share in shares for batch in share])
    assert sorted(evaluated) == list(range(math.ceil(4 / world) * world * 3))  # from 10 on they are padding


def test_ranks_of_any_world_read_the_same_rows_in_each_step_under_the_same_numbers(split):
    def checksums(world: int) -> dict[tuple[int, int], str]:
        """Of the tokens of each micro-batch, by its step and its number in it."""
        found = {}
        for rank in range(world):
            plan = BatchPlan.of(2, 8, rank, world)
            loader = Loader(split, plan, CPU, step=70)
            for step in range(70, 85):  # past the end of an epoch
                for micro_step in range(plan.micro_steps):
                    x, y, _ = loader.next()
                    tokens = x.numpy().tobytes() + y.numpy().tobytes()
                    found[step, plan.number(micro_step)] = sha256(tokens).hexdigest()
            loader.close()
        return found

    alone = checksums(1)
    assert len(alone) == len(set(alone.values())) == 15 * 8
    assert split.n_windows < 85 * 16
    for world in (2, 4, 8):
        assert checksums(world) == alone


@pytest.mark.skipif(resource is None, reason="needs POSIX")
@pytest.mark.parametrize("listed", [True, False])
def test_more_shards_than_a_process_may_have_files_are_read(tmp_path, listed):
    files = {}
    for n in range(1100):
        content = np.arange(20 * n, 20 * (n + 1), dtype="<u2").tobytes()
        path = tmp_path / f"train_{n:04}.bin"
        path.write_bytes(content)
        files[path.name] = {"tokens": 20, "sha256": sha256(content).hexdigest()}
    if listed:
        order = dict(reversed(files.items()))  # not that of their names
        write_meta(tmp_path, {"tokenizer": {"name": "gpt2"}, "vocab_size": 50257, "files": order})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        split = Split(tmp_path, "train", 8, 50257)
        assert [shard.path.name for shard in split.shards] == [*files]
        split.fingerprint()
        loader = Loader(split, BatchPlan(50), CPU)
        seen = set()
        for _ in range(22):
            x, y, _ = loader.next()
            assert torch.equal(y, x + 1)
            seen.update((x[:, 0] // 20).tolist())
        loader.close()
        assert seen == set(range(1100))  # an epoch has one window of each
        verification = Verification(tmp_path, [split])
        assert verification.state == ("checksums verified" if listed else "no checksums (no meta.json)")
        assert verification.close()
        assert split.changes() == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_accumulation_that_ranks_cannot_share_names_one_that_they_can():
    with pytest.raises(ValueError, match="=40 does not divide among 3 ranks; try --gradient_accumulation_steps=42$"):
        BatchPlan.of(12, 40, 0, 3)
