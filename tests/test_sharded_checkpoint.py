"""Checkpoints of sharded runs. The ranks are forked from this process, which has imported torch."""

from __future__ import annotations

import json
import math
import os
import shutil
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
from tiny_models import MODERN_SETTINGS, TINIEST, save_folder, state_of

import train
from configurator import build
from deskgpt.checkpoint import folders, store
from deskgpt.checkpoint.optimizer_state import OptimizerState
from deskgpt.checkpoint.store import Checkpoint
from deskgpt.compute import sharding
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.optimizer import make_optimizer
from deskgpt.kernels.verify import whole
from deskgpt.run.saver import Saver
from deskgpt.run.settings import settings_of_start
from model import GPT

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs fork and gloo as Linux has it")

# ---- what is written -----------------------------------------------------------------------------------------


def trained(kind: str = "adamw", steps: int = 2, mesh: Any = None) -> tuple[GPT, OptimizerState]:
    """A model, whole or sharded, and its optimizer's after a few steps with gradients that all layouts draw alike."""
    torch.manual_seed(1)
    model = GPT(TINIEST)
    if mesh is not None:
        model = sharding.sharded_copy(model, mesh, True, torch.device("cpu"))
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
    health = {"losses": [1.0, math.inf], "evaluations": []}
    return replace(state_of(step, loss), model=model.state_dict(), optimizer=optimizer.state(), health=health)


def gathered(value: Any) -> Any:
    """A nested container with whole tensors in the place of sharded ones; tuples as JSON has them."""
    if isinstance(value, torch.Tensor):
        return whole(value)
    if isinstance(value, dict):
        return {k: gathered(v) for k, v in value.items()}
    return [gathered(v) for v in value] if isinstance(value, list | tuple) else value


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run's folder with a checkpoint of two ranks; see the test of its name for what is checked on the way."""
    out_dir = tmp_path_factory.mktemp("sharded")

    def work(rank: int) -> None:
        dist.init_process_group("gloo", rank=rank, world_size=2)
        mesh = sharding.make_mesh("cpu", -1, 2)
        ranks = DistContext(torch.device("cpu"), rank, 2, distributed=True)
        group = sharding.group_for_saves(60)
        for kind in ("adamw", "muon"):
            check_layouts(out_dir / kind, kind, mesh, group, ranks)
        model, optimizer = trained(mesh=mesh)
        store.save(trained_state(model, optimizer, 1, 4.0), out_dir, True, 2, group)
        store.save(trained_state(model, optimizer, 2, 5.0), out_dir, False, 2, group)
        check_failures(out_dir, model, optimizer, group)
        dist.barrier()
        dist.destroy_process_group()

    forked(2, work)
    return out_dir


def check_layouts(out_dir: Path, kind: str, mesh: Any, group: Any, ranks: DistContext) -> None:
    """What is saved in one layout is loaded in each other, with the same numbers."""
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
    assert_equal(gathered(store.content_of(store.whole(loaded))), expected)  # folder to whole
    if ranks.is_first:
        store.write_file(store.load(out_dir), out_dir / "one.pt")
    dist.barrier()
    for source in (out_dir, out_dir / "one.pt"):  # folder to sharded, file to sharded
        other, other_optimizer = trained(kind, steps=1, mesh=mesh)
        loaded = store.load(source)
        store.restore_weights(other, loaded)
        other_optimizer.load(loaded.optimizer, "out", loaded.folder)
        found = gathered(store.content_of(trained_state(other, other_optimizer)))
        assert_equal(found["model"], expected["model"])
        assert_equal(found["optimizer"]["state"], expected["optimizer"]["state"])


def check_failures(out_dir: Path, model: GPT, optimizer: OptimizerState, group: Any) -> None:
    """What fails on one rank fails on all, and leaves what was there."""
    rank = dist.get_rank()
    averaging = torch.optim.SGD(model.parameters(), lr=0.1)
    averaging.param_groups[0]["average"] = torch.zeros(2)
    with pytest.raises(ValueError, match="SGD.* take --dp_shard=1"):
        OptimizerState(averaging, model)  # at the start, not at the first save
    before = names(out_dir)
    bad = trained_state(model, optimizer, 3)
    first = sharding.local(next(iter(bad.model.values())))
    if rank == 1:
        first[0, 0] = math.nan
    with pytest.raises(ValueError, match="ckpt-00000003 .*NaN"):
        store.save(bad, out_dir, True, 2, group)
    if rank == 1:
        first[0, 0] = 0
    said: list[str] = []
    saver = Saver(out_dir, said.append, 4.0, 2, group=group)
    with files_of_at_most(kib=0 if rank == 1 else 1000):
        saver.save(bad, best=True)
        saver.wait()
    assert saver.last is not None
    assert type(saver.last.error) is OSError
    assert_one_line(*said, "too large", "the run goes on")
    assert saver.best_val_loss == 4.0
    dist.barrier()
    assert names(out_dir) == before


def test_every_layout_loads_what_another_saved_and_what_fails_on_one_rank_fails_on_all(folder):
    loaded = store.whole(store.load(folder))
    model, _ = trained()
    torch.testing.assert_close(loaded.model, dict(model.state_dict()))  # AdamW rounds shards otherwise
    assert store.best_of(folder) == folder / "ckpt-00000001"
    assert store.resume(folder).best_val_loss == 4.0
    for tail in ("adamw", "muon"):
        files = sorted(path.name for path in (folder / tail / "ckpt-00000002").iterdir())
        assert [name.split("-")[0] for name in files] == ["checkpoint.json", "manifest.json", "shard", "shard"]


# ---- damage and strangers' files -----------------------------------------------------------------------------


def test_contents_of_strangers_are_checked_before_they_are_used(folder, tmp_path):
    path = tmp_path / "ckpt-00000001"
    shutil.copytree(folder / "ckpt-00000001", path)
    plain = json.loads((path / "checkpoint.json").read_text())
    optimizers = ({"names": 3}, {"names": ["x"], "scalars": {"x": {"step": {"tensor": 2**70}}}})
    texts = [json.dumps(plain | {"optimizer": odd}) for odd in optimizers]
    deep = json.dumps(plain | {"config": "X"}).replace('"X"', '{"a":' * 5000 + "1" + "}" * 5000)
    names = ("../../x", "/etc/passwd", "checkpoint.json/x")
    for n, odd in enumerate([*names, *texts, deep, "[" * 100_000, "3", "{", ""]):
        files = {"checkpoint.json": [1, ""], odd: [1, ""]}
        if n >= len(names):
            (path / "checkpoint.json").write_text(odd)
            files = {p.name: folders.size_and_sha256(p) for p in path.iterdir() if p.name != "manifest.json"}
        (path / "manifest.json").write_text(json.dumps({"format": 1, "files": files}))
        with pytest.raises(ValueError, match="is not a (readable|training) checkpoint") as e:
            store.load(path)
        assert_one_line(e.value, path.name)


# ---- which one -----------------------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_newest_step_of_either_form_is_resumed_and_the_best_stays(tmp_path):
    store.save(state_of(5), tmp_path, best=True)
    for step, best, newest, best_name in (
        (4, False, "ckpt.pt", "ckpt_best.pt"),
        (7, False, "ckpt-00000007", "ckpt_best.pt"),
        (7, True, "ckpt-00000007-2", "ckpt-00000007-2"),
        (9, False, "ckpt-00000009", "ckpt-00000007-2"),
    ):
        save_folder(tmp_path, step, best)
        assert store.load(tmp_path).path == tmp_path / newest
        assert store.best_of(tmp_path) == tmp_path / best_name
    store.prune(tmp_path, 2)
    assert names(tmp_path) == ["ckpt-00000007-2", "ckpt-00000009"]
    save_folder(tmp_path, 12, best=False)
    store.prune(tmp_path, 1)
    assert names(tmp_path) == ["ckpt-00000007-2", "ckpt-00000012"]
    for path in (tmp_path / "ckpt-00000007-2", str(tmp_path / "ckpt-00000007-2")):
        assert store.folder_of(path) == tmp_path
        assert store.is_checkpoint(path)
        assert store.load(path).iter_num == 7
    store.save(state_of(13), tmp_path, best=True)  # a run that is not sharded goes on
    assert names(tmp_path) == ["ckpt.pt", "ckpt_best.pt"]


def test_damaged_shard_is_not_the_best_model(tmp_path):
    save_folder(tmp_path, 5, best=True, loss=1.0)
    save_folder(tmp_path, 9, best=False, loss=1.0)  # which knows the best loss so far
    assert store.resume(tmp_path).best_val_loss == 1.0
    shard = next((tmp_path / "ckpt-00000005").glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    said: list[str] = []
    assert store.resume(tmp_path, said.append).best_val_loss == math.inf
    store.take_over(tmp_path, said.append, step=10)
    for line in said:
        assert_one_line(line, tmp_path / "ckpt-00000005", shard.name)
    assert store.best_of(tmp_path) is None
    assert names(tmp_path) == ["ckpt-00000009", "previous-1"]


def test_files_of_earlier_steps_are_kept(tmp_path):
    for step in range(1, 6):
        store.save(state_of(step), tmp_path, best=step == 1, keep=3)
    assert names(tmp_path) == ["ckpt-00000003.pt", "ckpt-00000004.pt", "ckpt.pt", "ckpt_best.pt"]
    assert [store.load(tmp_path / f"ckpt-0000000{n}.pt").iter_num for n in (3, 4)] == [3, 4]
    (tmp_path / "ckpt.pt").write_text("damaged")
    assert store.load(tmp_path).iter_num == 4


# ---- runs ----------------------------------------------------------------------------------------------------

SETTINGS = {"batch_size": 2, "gradient_accumulation_steps": 8, "lr_decay_iters": 30, "eval_interval": 5}
SETTINGS |= {"eval_iters": 2}


@pytest.mark.slow
def test_resumed_sharded_run_is_bit_identical_and_samples_and_converts(chars, tmp_path, script):
    options = SETTINGS | {"dp_shard": -1, "eval_interval": 3} | MODERN_SETTINGS | {"optimizer": "muon"}
    run(2, tiny(chars, tmp_path / "whole", **options))
    run(2, tiny(chars, tmp_path / "halves", max_iters=3, **options))
    assert [path.name for path in (tmp_path / "halves").glob("ckpt*")] == ["ckpt-00000003"]
    run(2, resumed(tmp_path / "halves", max_iters=6))
    assert_same_run(tmp_path / "whole", tmp_path / "halves")
    sampling = flags(device="cpu", max_new_tokens=20, num_samples=1)
    done = script("sample.py", f"--out_dir={tmp_path / 'whole'}", *sampling)
    assert done.code == 0, done.err
    assert script("export.py", f"--out_dir={tmp_path / 'whole'}", f"--to={tmp_path / 'one.pt'}").code == 0
    again = script("sample.py", f"--out_dir={tmp_path / 'one.pt'}", *sampling)
    assert again.out == done.out
    new = TINY | {"dataset": chars, "out_dir": tmp_path / "finetuned", "init_from": tmp_path / "whole", "max_iters": 1}
    run(1, build(train.TrainConfig, settings_of_start(train.TrainConfig, flags(**new))))
    assert events(tmp_path / "finetuned", "eval")[0]["val_loss"] < 4.0


@pytest.mark.slow
def test_a_run_that_changes_ranks_and_layout_learns_what_an_undisturbed_one_does(chars, tmp_path):
    """2 ranks, 4 (two shards, two copies), then DDP, and sharded again from its file."""
    out, whole = tmp_path / "out", tmp_path / "whole"
    calm = SETTINGS | {"learning_rate": 1e-3}  # at 1e-2 the rounding of another order of sums grows to 0.02
    run(1, tiny(chars, whole, max_iters=8, **calm))
    run(2, tiny(chars, out, max_iters=2, dp_shard=-1, **calm))
    for world, dp_shard, step in ((4, 2, 4), (2, 1, 6), (2, -1, 8)):
        run(world, resumed(out, dp_shard=dp_shard, max_iters=step))
        found = [path.name for path in out.glob("ckpt*") if path.name != "ckpt_best.pt"]
        assert ("ckpt.pt" in found) == (dp_shard == 1)
    a, b = weights(whole), weights(out)
    assert max((a[name] - b[name]).abs().max().item() for name in a) < 1e-5
