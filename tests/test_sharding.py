"""Runs with sharded weights: they train as others do, and any layout resumes their one file."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import (
    CPU,
    POSIX,
    assert_equal,
    files_of_at_most,
    logged,
    raises_one_line,
    slow,
    tiny,
    vector,
)
from gloo import forked, resumed, run
from tiny_models import TINIEST, make, state_of

from deskgpt.checkpoint import load_checkpoint
from deskgpt.distributed import DistContext
from deskgpt.optim import make_optimizer
from deskgpt.saving import Checkpointer, gathered_on_first
from deskgpt.sharding import (
    check_sharding,
    copy_full,
    make_mesh,
    refuse_shared,
    sharded_as,
    sharded_copy,
)
from deskgpt.train_state import load_optimizer, optimizer_state
from model import GPT

pytestmark = POSIX


# ---- training ------------------------------------------------------------------------------------


def weights_after(data: Path, out_dir: Path, **settings: Any) -> torch.Tensor:
    """Return all weights in one after ten steps of two ranks, with evaluations between them."""
    # odd: unequal shards
    run(2, tiny(data, out_dir, block_size=15, learning_rate=1e-3, max_iters=10, **settings))
    return vector(out_dir)


@pytest.mark.parametrize(
    ("optimizer", "dtype"), [("adamw", "float32"), pytest.param("muon", "bfloat16", marks=slow)]
)
def test_sharded_weights_of_two_ranks_are_those_of_ddp_to_the_last_bit(
    optimizer, dtype, chars, tmp_path
):
    """Without clipping: the gradients' norm is a sum in another order."""
    settings = {"gradient_accumulation_steps": 2, "grad_clip": 0.0}
    settings |= {"optimizer": optimizer, "dtype": dtype}
    sharded = weights_after(chars, tmp_path / "sharded", dp_shard=-1, **settings)
    full = weights_after(chars, tmp_path / "full", **settings)
    assert torch.equal(sharded, full)
    norms = [logged(tmp_path / name, "iter", "grad_norm") for name in ("sharded", "full")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_what_sharded_weights_cannot_have_is_refused():
    for settings, named in (
        ((3, 8, "float32", 0), ["dp_shard=3", "8", "--dp_shard=-1"]),
        ((8, 8, "float16", 0), ["dtype=float16", "dp_shard=8", "--dtype=bfloat16"]),
        ((2, 8, "float32", 1), ["sample_interval=1", "dp_shard=2", "sample.py"]),
    ):
        with raises_one_line(*named):
            check_sharding(*settings)
    check_sharding(1, 8, "float16", 1)
    tied = make()
    tied.transformer.h[1] = tied.transformer.h[0]
    with raises_one_line("dp_shard", "transformer.h.1."):
        refuse_shared(tied)


# ---- checkpoints ---------------------------------------------------------------------------------


def trained(kind, mesh=None, steps=2):
    """Return a model, full or sharded, its optimizer, and both to save, after steps with the same
    gradients.
    """
    torch.manual_seed(1)
    model = GPT(TINIEST)
    if mesh is not None:
        model = sharded_copy(model, mesh, CPU)
    optimizer = make_optimizer(model, kind, 0.1, 1e-2, (0.9, 0.95), 0.95)
    for _ in range(steps):
        for p in model.parameters():
            grad = torch.randn(p.shape)
            p.grad = grad if mesh is None else sharded_as(grad, p)
        optimizer.step()
    return model, optimizer, to_save(model, optimizer)


def to_save(model, optimizer):
    state = optimizer_state(optimizer, model)
    return replace(state_of(2, 3.0), model=model.state_dict(), optimizer=state)


def check_layouts(out_dir, kind, mesh, ranks):
    """Check that a file of a sharded model is that of a full one, and that it loads into both."""
    *_, state = trained(kind, mesh)
    saver = Checkpointer(out_dir, print, 9.0, dist=ranks)
    saver.save(state, best=True)
    saver.raise_if_last_failed()
    dist.barrier()
    on_disk = load_checkpoint(out_dir, dist=ranks)
    # AdamW rounds shards otherwise
    torch.testing.assert_close(on_disk.model, dict(trained(kind)[2].model))
    head = on_disk.model["lm_head.weight"]
    assert head.data_ptr() == on_disk.model["transformer.wte.weight"].data_ptr()  # tied
    for other_mesh in (mesh, None):
        other, optimizer, _ = trained(kind, other_mesh, steps=1)
        reads = ranks.is_first or other_mesh is None
        loaded = load_checkpoint(out_dir, dist=ranks, checksums=reads)
        if other_mesh:
            copy_full(loaded.model, other.state_dict())
        else:
            other.load_state_dict(loaded.model)
        load_optimizer(optimizer, other, loaded.optimizer, "out")
        found = gathered_on_first(to_save(other, optimizer))
        if reads:
            assert_equal(dict(found.model), dict(on_disk.model))
            assert_equal(found.optimizer["state"], on_disk.optimizer["state"])


def check_failures(out_dir, mesh, ranks):
    """Check that a save that fails on rank 0 leaves the files and the best loss, about which all
    ranks agree.
    """
    saver = Checkpointer(out_dir, lambda line: None, 4.0, dist=ranks)
    with files_of_at_most(kib=0 if ranks.is_first else 1000):
        saver.save(trained("adamw", mesh)[2], best=True)
    assert saver.best_val_loss == 4.0
    if ranks.is_first:
        assert type(saver.error) is OSError
        saver.best_val_loss = 2.0
    assert not saver.is_best(3.0, step=2)


def test_every_layout_loads_what_another_saved_and_all_ranks_know_of_a_save_that_failed(tmp_path):
    def work(rank):
        dist.init_process_group("gloo", rank=rank, world_size=2)
        mesh = make_mesh("cpu", -1, 2)
        ranks = DistContext(CPU, rank, 2, distributed=True)
        for kind in ("adamw", "muon"):
            (tmp_path / kind).mkdir(exist_ok=True)
            check_layouts(tmp_path / kind, kind, mesh, ranks)
        check_failures(tmp_path, mesh, ranks)
        dist.barrier()
        dist.destroy_process_group()

    forked(2, work)
    assert sorted(path.name for path in (tmp_path / "adamw").iterdir()) == [
        "ckpt.pt",
        "ckpt_best.pt",
    ]


@slow
def test_run_that_changes_ranks_and_layout_learns_what_an_undisturbed_one_does(chars, tmp_path):
    """2 ranks, 4 (two shards, two copies), 4 (one has no row of a matrix), DDP, sharded again."""
    out = tmp_path / "out"
    full = tmp_path / "full"
    # At 1e-2 the rounding of another order of sums grows to 0.02.
    calm = {"learning_rate": 1e-3, "n_embd": 6, "optimizer": "muon", "lr_decay_iters": 30}
    calm |= {"batch_size": 2, "gradient_accumulation_steps": 8, "eval_interval": 3}
    run(1, tiny(chars, full, max_iters=10, **calm))
    run(2, tiny(chars, out, max_iters=2, dp_shard=-1, **calm))
    for world, dp_shard, step in ((4, 2, 4), (4, -1, 6), (2, 1, 8), (2, -1, 10)):
        run(world, resumed(out, dp_shard=dp_shard, max_iters=step))
    assert (vector(full) - vector(out)).abs().max() < 1e-5
