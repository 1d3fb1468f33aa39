"""The same experiment on one rank and on several, which are processes with gloo between them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import events, tiny, vector
from gloo import on_ranks

import train
from data.loader import eval_batches
from data.splits import Split
from deskgpt.compute.batching import Batching
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.runner import Runner, Variant
from deskgpt.run.init_state import InitState
from deskgpt.run.stopping import StopController, signal_handler
from model import GPT, GPTConfig

CPU = torch.device("cpu")
NO_LIMITS: Any = SimpleNamespace(max_hours=0.0, save_interval=0, save_minutes=0.0, patience=0)
pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs gloo as Linux and macOS have it")


def recorded_run(c: train.TrainConfig, ranks: DistContext) -> dict[str, Any]:
    """Trains; returns checksums of the initial weights and of each dropout's mask, row by row, and counts."""
    found: dict[str, Any] = {"weights": "", "masks": [], "evaluated": 0}
    make_model = InitState.build_model

    def built(start: InitState, *args: Any) -> GPT:
        model = make_model(start, *args)
        content = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        found["weights"] = sha256(content).hexdigest()
        return model

    def dropped(module: torch.nn.Module, args: Any, out: torch.Tensor) -> None:
        if isinstance(module, torch.nn.Dropout) and module.training and found["masks"]:
            found["masks"][-1].append([sha256(row.numpy().tobytes()).hexdigest() for row in (out == 0)])

    def evaluated(*args: Any) -> Iterator[Any]:
        for batch in eval_batches(*args):
            found["evaluated"] += 1
            yield batch

    def seeded(*args: Any) -> None:  # before each micro-batch, and at the end of a step
        found["masks"].append([])
        seed_all(*args)

    seed_all = train.seed_all
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "init_distributed", lambda *_: ranks)
        patch.setattr(train, "seed_all", seeded)
        patch.setattr(InitState, "build_model", built)
        patch.setattr(train, "eval_batches", evaluated)
        patch.setattr(Runner, "verify_again", lambda *_: [])
        hook = torch.nn.modules.module.register_module_forward_hook(dropped)
        train.main(c)
        hook.remove()
    return found


def masks_of_micro_batches(found: dict[str, Any], n: int) -> list[Any]:
    """Those of the n micro-batches of each step; what is checked between steps draws others."""
    return [masks for i, masks in enumerate(found["masks"]) if i % (n + 1) < n]


def test_two_ranks_start_alike_drop_out_alike_and_evaluate_alike_what_does_not_divide(chars, tmp_path):
    # 17 windows to evaluate: 9 batches, the last one not full, and one of padding on the second rank.
    own: dict[str, Any] = {"dropout": 0.3, "gradient_accumulation_steps": 4, "batch_size": 2, "eval_tokens": 17 * 16}
    one = recorded_run(tiny(chars, tmp_path / "one", max_iters=4, **own), DistContext(CPU))
    c = tiny(chars, tmp_path / "two", max_iters=4, **own)
    two = on_ranks(lambda ranks: recorded_run(c, ranks), 2, tmp_path)

    assert one["weights"] == two[0]["weights"] == two[1]["weights"]
    micro_batches = masks_of_micro_batches(one, 4)
    assert len({str(masks) for masks in micro_batches}) == 4 * 4
    for rank in range(2):
        assert masks_of_micro_batches(two[rank], 2) == micro_batches[rank::2]
    evaluations = 3 * 2  # of two splits
    assert one["evaluated"] == evaluations * 9
    assert [found["evaluated"] for found in two] == [evaluations * 5] * 2
    for kind, names in (("eval", ("train_loss", "val_loss", "val_se")), ("iter", ("loss", "grad_norm"))):
        for a, b in zip(events(tmp_path / "one", kind), events(tmp_path / "two", kind), strict=True):
            assert [b[name] for name in names] == pytest.approx([a[name] for name in names], rel=1e-5)
    torch.testing.assert_close(vector(tmp_path / "two"), vector(tmp_path / "one"), rtol=1e-5, atol=1e-5)


def test_ranks_that_share_weights_break_an_evaluation_off_at_the_same_batch(chars, tmp_path):
    """A rank that a signal stops would leave the others waiting for its part of the weights."""
    split = Split(chars, "val", 16, 256)

    def batches_until_a_signal(ranks: DistContext) -> list[int]:
        counts = []
        for shared in (True, False):
            calls: list[int] = []

            def signalled(*_: Any, calls: list[int] = calls) -> None:
                calls.append(1)
                if ranks.rank == 1 and len(calls) == 3:
                    signal_handler.signal = signal.SIGTERM

            model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=16, vocab_size=256))
            model.register_forward_hook(signalled)
            batching = Batching(1, accumulation=2, eval_windows=20, rank=ranks.rank, world=2)
            own = StopController(NO_LIMITS, ranks, 0.0, sharded=shared)
            Runner(model, Variant()).evaluate(own.until_signal(eval_batches(split, batching, CPU)), ranks)
            signal_handler.signal = None
            counts.append(len(calls))
        return counts

    assert on_ranks(batches_until_a_signal, 2, tmp_path) == [[3, 10], [3, 3]]


def test_rank_that_cannot_read_its_data_ends_the_others_too(chars, tmp_path):
    c = tiny(chars, tmp_path / "out", gradient_accumulation_steps=2, eval_iters=8)

    def damaged(ranks: DistContext) -> str:
        def cut_short(split: Split, rows: Any, n: int) -> Any:
            if ranks.rank == 1 and rows[0] > 8:
                raise ValueError("train.bin became shorter")
            return eval_batch(split, rows, n)

        eval_batch = Split.eval_batch
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train, "init_distributed", lambda *_: ranks)
            patch.setattr(Split, "eval_batch", cut_short)
            with pytest.raises((ValueError, RuntimeError)) as raised:
                train.main(c)
        return str(raised.value)

    left, own = on_ranks(damaged, 2, tmp_path)
    assert own == "train.bin became shorter"
    assert "gloo" in left
