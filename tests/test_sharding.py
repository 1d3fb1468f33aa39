from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import raises_one_line, tiny, vector
from gloo import run
from tiny_models import make

from deskgpt.sharding import check_sharding, refuse_shared

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs gloo as Linux and macOS have it")

ADAMW = {"optimizer": "adamw", "dtype": "float32"}
MUON = {"optimizer": "muon", "dtype": "bfloat16"}
# Of eight ranks, two have no row of its c_proj, four own none of its four matrices.
NARROW = {"n_layer": 1, "n_embd": 6, "batch_size": 1, "gradient_accumulation_steps": 8}


def trained(world: int, data: Path, out_dir: Path, **settings: Any) -> torch.Tensor:
    """Return all weights in one after ten steps, with evaluations between them, on this number of
    ranks.
    """
    # odd: unequal shards
    run(world, tiny(data, out_dir, block_size=15, learning_rate=1e-3, max_iters=10, **settings))
    return vector(out_dir)


@pytest.mark.parametrize("kind", [ADAMW, pytest.param(MUON, marks=pytest.mark.slow)])
def test_sharded_weights_of_two_ranks_are_those_of_ddp_to_the_last_bit(kind, chars, tmp_path):
    """Without clipping: the gradients' norm is a sum in another order."""
    settings = {"gradient_accumulation_steps": 2, "grad_clip": 0.0} | kind
    sharded, full = (trained(2, chars, tmp_path / f"{n}", dp_shard=n, **settings) for n in (-1, 1))
    assert torch.equal(sharded, full)


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
    with raises_one_line("dp_shard", "transformer.h.0.", "transformer.h.1."):
        refuse_shared(tied)


@pytest.mark.parametrize(
    "world", [pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.nightly)]
)
def test_any_layout_trains_as_one_process_does(chars, tmp_path, world):
    for kind, limit in ((ADAMW, 1e-5), (MUON, 5e-3)):  # bfloat16 rounds; 0.0034 on other text
        one = trained(1, chars, tmp_path / kind["optimizer"], **NARROW | kind)
        for dp_shard in (2, -1):
            weights = trained(
                world, chars, tmp_path / f"{kind} {dp_shard}", dp_shard=dp_shard, **NARROW | kind
            )
            torch.testing.assert_close(weights, one, rtol=0, atol=limit)
