from __future__ import annotations

import json
import re
import statistics
from dataclasses import asdict

import numpy as np
import pytest
import torch
from conftest import assert_equal, assert_one_line, contents, events, raises_one_line, shell, tiny, weights

import train
from data.batching import Batching
from data.loader import eval_batches
from data.splits import Split
from deskgpt.checkpoint import store
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.evaluation import evaluate
from deskgpt.compute.variant import Variant
from deskgpt.run.init_state import InitState
from deskgpt.run.schedule import Schedule
from model import GPT, GPTConfig
from train import TrainConfig, main

CPU = torch.device("cpu")

# ---- what a run prints and writes ----------------------------------------------------------------------------


def test_printed_lines_are_nanogpts_and_the_log_has_all_that_its_figures_depend_on(chars, tmp_path, capsys):
    main(tiny(chars, tmp_path))
    out, err = capsys.readouterr()
    assert err == ""  # no progress bar into a pipe
    steps = events(tmp_path, "iter")
    evaluations = events(tmp_path, "eval")
    printed = re.findall(r"^iter (\d+): loss (\d+\.\d{4}), time (\d+\.\d\d)ms, mfu \d+\.\d\d%", out, re.M)
    assert printed == [(str(e["iter"]), f"{e['loss']:.4f}", f"{e['time_ms']:.2f}") for e in steps]
    printed = re.findall(r"^step (\d+): train loss (\d+\.\d{4}), val loss (\d+\.\d{4})\b", out, re.M)
    assert printed == [(str(e["iter"]), f"{e['train_loss']:.4f}", f"{e['val_loss']:.4f}") for e in evaluations]
    assert (len(steps), len(evaluations)) == (6, 3)
    first = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])
    assert first["event"] == "start"
    assert first["settings"] == asdict(tiny(chars, tmp_path))
    model = GPT.from_state(GPTConfig(**store.load(tmp_path).model_args), weights(tmp_path), "out")
    assert (first["parameters"], first["flops_per_token"]) == (model.num_params(), model.estimate_flops())
    assert torch.__version__.startswith(first["versions"]["torch"])  # without +cu130 in the wheel's metadata
    for e in steps:
        tokens_per_s = first["tokens_per_step"] / e["time_ms"] * 1e3
        assert e["tokens_per_s"] == pytest.approx(tokens_per_s)
        assert e["mfu"] == pytest.approx(tokens_per_s * first["flops_per_token"] / first["peak_flops"])
    assert events(tmp_path, "end")[0]["peak_memory_bytes"] > 1e6


@pytest.mark.parametrize("n", [7, 24])
def test_evaluation_is_the_mean_over_its_windows_the_last_batch_too(n, chars, tmp_path):
    """In batches of three. The standard error is that of the mean of their losses, from eight of them on."""
    c = tiny(chars, tmp_path, batch_size=3)
    model = GPT(GPTConfig.from_settings(c, vocab_size=100)).train()
    split = Split(chars, "val", c.block_size, 100)
    x, y = (torch.from_numpy(a) for a in split.eval_batch(np.arange(n), n))
    batches = eval_batches(split, Batching(3, eval_tokens=n), CPU)
    found = evaluate(model, Variant(), batches, DistContext(CPU))
    assert found.loss == pytest.approx(model(x, y)[1].item(), rel=1e-6)
    assert model.training
    means = [model(x[i : i + 3], y[i : i + 3])[1].item() for i in range(0, n, 3)]
    error = pytest.approx(statistics.stdev(means) / 8**0.5, rel=1e-3) if n == 24 else None
    assert found.standard_error == error


@pytest.mark.slow
@pytest.mark.parametrize("always", [True, False])
def test_worse_checkpoint_never_overwrites_the_best(always, chars, tmp_path):
    main(tiny(chars, tmp_path, max_iters=30, eval_interval=10, always_save_checkpoint=always))
    worse = {"max_iters": 36, "eval_interval": 3, "learning_rate": 3.0, "decay_lr": False, "resume_changed": True}
    main(tiny(chars, tmp_path, init_from="resume", always_save_checkpoint=always, **worse))
    best = store.load(tmp_path / "ckpt_best.pt")
    assert min(e["val_loss"] for e in events(tmp_path, "eval") if e["iter"] > 30) > best.best_val_loss
    assert best.iter_num == 30
    assert store.load(tmp_path).iter_num == (36 if always else 30)  # only what improves is saved


@pytest.mark.slow
def test_new_run_in_a_used_folder_keeps_the_old_ones_files_and_eval_only_changes_none(chars, tmp_path, capsys):
    out_dir = tmp_path / "out"
    main(tiny(chars, out_dir, eval_only=True))
    assert not out_dir.exists()
    main(tiny(chars, out_dir))
    before = contents(out_dir)
    capsys.readouterr()
    main(tiny(chars, out_dir, eval_only=True, init_from="resume", batch_size=2, max_iters=3))
    assert contents(out_dir) == before
    out = capsys.readouterr().out
    assert f"resuming {out_dir} at step 6" in out
    assert len(re.findall(r"^step 6: train loss \d.*, val loss \d", out, re.M)) == 1
    assert "sample:" not in out  # nothing new to sample from
    main(tiny(chars, out_dir, seed=2, max_iters=0))
    assert contents(out_dir / "previous-1") == before
    assert str(out_dir / "previous-1") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({}, {0: 0.1, 4: 0.5, 8: 0.9, 9: 1.0, 59: 0.55, 109: 0.1, 150: 0.1}),
        ({"lr_decay_iters": 0, "max_iters": 109, "min_lr": None}, {59: 0.55, 109: 0.1}),
        ({"decay_lr": False}, {3: 1.0}),
        ({"lr_schedule": "linear", "min_lr": 0.0}, {0: 0.1, 9: 1.0, 59: 0.5, 108: 0.01, 109: 0.0}),
        ({"lr_schedule": "trapezoid"}, {9: 1.0, 87: 1.0, 98: 0.55, 109: 0.1}),
    ],
)
def test_learning_rate_warms_up_and_falls_as_the_schedule_says(settings, rates):
    usual = {"learning_rate": 1.0, "min_lr": 0.1, "warmup_iters": 9, "lr_decay_iters": 109, "max_iters": 200}
    schedule = Schedule.of(TrainConfig(**usual | settings))
    assert [train.learning_rate(schedule, step) for step in rates] == pytest.approx([*rates.values()], abs=0.003)


def test_schedule_that_contradicts_itself_is_named():
    [warmup] = Schedule.of(TrainConfig(warmup_iters=2000, max_iters=200)).warnings()
    assert_one_line(warmup, "warmup_iters=2000", "max_iters=200", "--warmup_iters=20")
    [min_lr] = Schedule.of(TrainConfig(min_lr=1e-3, learning_rate=1e-5)).warnings()
    assert_one_line(min_lr, "min_lr=0.001", "learning_rate=1e-05")
    assert Schedule.of(TrainConfig()).warnings() == []


@pytest.mark.slow
def test_finetuning_that_only_gets_worse_keeps_the_weights_it_began_with_as_the_best(chars, tmp_path, capsys):
    main(tiny(chars, tmp_path / "base", max_iters=60, eval_interval=60))
    worse = {"learning_rate": 3.0, "warmup_iters": 0, "grad_clip": 0.0, "init_from": str(tmp_path / "base")}
    main(tiny(chars, tmp_path / "out", **worse))
    best = store.load(tmp_path / "out" / "ckpt_best.pt")
    assert best.iter_num == 0
    assert_equal(dict(best.model), weights(tmp_path / "base"))
    assert f"best model of step 0: {tmp_path / 'out' / 'ckpt_best.pt'}" in capsys.readouterr().out


def test_run_whose_checkpoints_could_not_be_read_back_ends_before_it_begins(chars, tmp_path, monkeypatch):
    build_model = InitState.build_model

    def with_adapter(*args):
        model = build_model(*args)
        model.adapter = torch.nn.Linear(2, 2)  # which GPT itself does not make
        return model

    monkeypatch.setattr(InitState, "build_model", with_adapter)
    with raises_one_line("no run could resume", "adapter.weight"):
        main(tiny(chars, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_importing_the_scripts_does_nothing():
    slow = ["wandb", "datasets", "tiktoken", "transformers", "safetensors", "torch._dynamo", "tokenizers", "lm_eval"]
    code = f"""
import os, sys, torch
before = dict(os.environ)
import train, sample, export, bench.report, bench.evaluate, data.chat.prepare, data.fineweb_edu.prepare
assert dict(os.environ) == before
assert not hasattr(torch.ops.deskgpt, "causal_attention")
sys.exit(", ".join(m for m in {slow} if m in sys.modules) or None)
"""
    done = shell("python", "-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_ranks_random_streams_differ_between_steps_and_micro_batches():
    seeds = {train.random_stream(seed, step, number) for seed in (0, 1) for step in range(20) for number in range(20)}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**63 for seed in seeds)
