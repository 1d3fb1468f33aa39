"""Checkpoints of sharded runs."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import (
    TINY,
    assert_equal,
    assert_one_line,
    assert_same_run,
    events,
    files_of_at_most,
    flags,
    tiny,
    weights,
)
from gloo import forked, resumed, run
from tiny_models import MODERN_SETTINGS, TINIEST, distance, state_of
from torch.utils._pytree import tree_map_only

import train
from configurator import build
from deskgpt.checkpoint import store
from deskgpt.checkpoint.optimizer_state import OptimizerState
from deskgpt.checkpoint.store import Checkpoint
from deskgpt.compute import sharding
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.optimizer import make_optimizer
from deskgpt.run.saver import Saver
from deskgpt.run.settings import settings_of_start
from model import GPT

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs fork and gloo as Linux has it")


def trained(kind: str = "adamw", steps: int = 2, mesh: Any = None) -> tuple[GPT, OptimizerState]:
    """Return a model, full or sharded, and its optimizer's state after steps with the same gradients in all layouts."""
    torch.manual_seed(1)
    model = GPT(TINIEST)
    if mesh is not None:
        model = sharding.sharded_copy(model, mesh, torch.device("cpu"))
    optimizer = make_optimizer(model, kind, 0.1, 1e-2, (0.9, 0.95), 0.95)
    kept = OptimizerState(optimizer, model)
    for _ in range(steps):
        for p in model.parameters():
            grad = torch.randn(p.shape)
            if mesh is not None:
                from torch.distributed.tensor import distribute_tensor

                grad = distribute_tensor(grad, mesh, p.placements, src_data_rank=None)  # type: ignore[attr-defined]
            p.grad = grad
        optimizer.step()
    return model, kept


def trained_state(model: GPT, optimizer: OptimizerState, step: int = 2, loss: float = 3.0) -> Checkpoint:
    progress = {"losses": [1.0, math.inf], "evaluations": [(step, loss, loss, 0.1)]}
    return replace(state_of(step, loss), model=model.state_dict(), optimizer=optimizer.state(), progress=progress)


def gathered(value: Any) -> Any:
    """Return a nested container with full tensors in place of sharded ones."""
    return tree_map_only(torch.Tensor, lambda x: x.full_tensor() if sharding.is_dtensor(x) else x, value)


def check_layouts(out_dir: Path, kind: str, mesh: Any, group: Any, ranks: DistContext) -> None:
    """Check that each layout loads what another one saved, with the same numbers."""
    if ranks.is_first:
        out_dir.mkdir()
    dist.barrier()
    model, optimizer = trained(kind, mesh=mesh)
    saved = trained_state(model, optimizer)
    expected = gathered(store.content_of(saved))
    saver = Saver(out_dir, print, 9.0, group=group)
    saver.save(saved, best=True)
    for p in model.parameters():  # which the snapshot does not see
        p.detach().zero_()
    saver.wait()
    saver.raise_if_last_failed()
    dist.barrier()
    loaded = store.load(out_dir, dist=ranks)
    assert_equal(store.content_of(store.full(loaded)), expected | {"model": dict(expected["model"])})  # to full
    if ranks.is_first:
        store.write_file(store.load(out_dir), out_dir / "one.pt")
    dist.barrier()
    for source in (out_dir, out_dir / "one.pt"):  # shards to shards, file to shards
        other, other_optimizer = trained(kind, steps=1, mesh=mesh)
        loaded = store.load(source)
        store.restore_weights(other, loaded)
        other_optimizer.load(loaded.optimizer, "out", loaded.folder)
        found = gathered(store.content_of(trained_state(other, other_optimizer)))
        assert_equal(found["model"], expected["model"])
        assert_equal(found["optimizer"]["state"], expected["optimizer"]["state"])


def check_failures(out_dir: Path, model: GPT, optimizer: OptimizerState, group: Any) -> None:
    """Check that what fails on one rank fails on all, and leaves the files as they were."""
    rank = dist.get_rank()
    before = names(out_dir)
    bad = trained_state(model, optimizer, 3)
    first = sharding.local(next(iter(bad.model.values())))
    if rank == 1:
        first[0, 0] = math.nan
    with pytest.raises(ValueError, match="ckpt.pt .*NaN"):
        store.save(bad, out_dir, True, group)
    if rank == 1:
        first[0, 0] = 0
    lines: list[str] = []
    saver = Saver(out_dir, lines.append, 4.0, group=group)
    with files_of_at_most(kib=0 if rank == 1 else 1000):
        saver.save(bad, best=True)
        saver.wait()
    assert type(saver.error) is OSError
    assert_one_line(*lines, "too large", "the run continues")
    assert saver.best_val_loss == 4.0
    dist.barrier()
    assert names(out_dir) == before


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_every_layout_loads_what_another_saved_and_a_save_fails_on_all_ranks_or_none(tmp_path):
    def work(rank: int) -> None:
        dist.init_process_group("gloo", rank=rank, world_size=2)
        mesh = sharding.make_mesh("cpu", -1, 2)
        ranks = DistContext(torch.device("cpu"), rank, 2, distributed=True)
        group = sharding.group_for_saves(60)
        for kind in ("adamw", "muon"):
            check_layouts(tmp_path / kind, kind, mesh, group, ranks)
        model, optimizer = trained(mesh=mesh)
        store.save(trained_state(model, optimizer, 1, 4.0), tmp_path, True, group)
        store.save(trained_state(model, optimizer, 2, 5.0), tmp_path, False, group)
        check_failures(tmp_path, model, optimizer, group)
        dist.barrier()
        dist.destroy_process_group()

    forked(2, work)
    loaded = store.full(store.load(tmp_path))
    model, _ = trained()
    torch.testing.assert_close(loaded.model, dict(model.state_dict()))  # AdamW rounds shards otherwise
    assert store.load(tmp_path / "ckpt_best.pt").iter_num == 1
    assert store.resume(tmp_path).best_val_loss == 4.0
    for kind in ("adamw", "muon"):
        [shards] = (tmp_path / kind).glob("shards-*")  # which ckpt.pt and ckpt_best.pt share
        assert [name.split("-")[1] for name in names(shards)] == ["00001", "00002"]
    # A checkpoint in a file takes the place of the last one; the shards of the best one stay until it is replaced.
    store.save(state_of(3), tmp_path / "adamw", best=False)
    assert store.load(tmp_path / "adamw" / "ckpt_best.pt").iter_num == 2
    store.save(state_of(4), tmp_path / "adamw", best=True)
    assert names(tmp_path / "adamw") == ["ckpt.pt", "ckpt_best.pt", "one.pt"]


SETTINGS = {"batch_size": 2, "gradient_accumulation_steps": 8, "lr_decay_iters": 30, "eval_interval": 3}


@pytest.mark.slow
def test_resumed_sharded_run_is_bit_identical_and_samples_and_converts(chars, tmp_path, script):
    options = SETTINGS | {"dp_shard": -1, "optimizer": "muon"} | MODERN_SETTINGS
    run(2, tiny(chars, tmp_path / "full", **options))
    run(2, tiny(chars, tmp_path / "halves", max_iters=3, **options))
    run(2, resumed(tmp_path / "halves", max_iters=6))
    assert_same_run(tmp_path / "full", tmp_path / "halves")
    sampling = flags(device="cpu", max_new_tokens=20, num_samples=1)
    done = script("sample.py", f"--out_dir={tmp_path / 'full'}", *sampling)
    assert done.code == 0, done.err
    assert script("export.py", f"--out_dir={tmp_path / 'full'}", f"--to={tmp_path / 'one.pt'}").code == 0
    again = script("sample.py", f"--out_dir={tmp_path / 'one.pt'}", *sampling)
    assert again.out == done.out
    new = TINY | {"dataset": chars, "out_dir": tmp_path / "finetuned", "init_from": tmp_path / "full", "max_iters": 1}
    run(1, build(train.TrainConfig, settings_of_start(train.TrainConfig, flags(**new))))
    assert events(tmp_path / "finetuned", "eval")[0]["val_loss"] < 4.0


@pytest.mark.slow
def test_run_that_changes_ranks_and_layout_learns_what_an_undisturbed_one_does(chars, tmp_path):
    """2 ranks, 4 (two shards, two copies), then DDP, and sharded again from its file."""
    out = tmp_path / "out"
    full = tmp_path / "full"
    calm = SETTINGS | {"learning_rate": 1e-3}  # at 1e-2 the rounding of another order of sums grows to 0.02
    run(1, tiny(chars, full, max_iters=8, **calm))
    run(2, tiny(chars, out, max_iters=2, dp_shard=-1, **calm))
    for world, dp_shard, step in ((4, 2, 4), (2, 1, 6), (2, -1, 8)):
        run(world, resumed(out, dp_shard=dp_shard, max_iters=step))
        assert (store.load(out).folder is None) == (dp_shard == 1)
    assert distance(weights(full), weights(out)) < 1e-5
