"""nanoGPT's runs are resumed and sampled from, and nanoGPT can read our checkpoints."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import events, tiny

from deskgpt.checkpoint import store
from deskgpt.compute.optimizer import make_optimizer
from model import GPT, GPTConfig
from train import main


def nanogpt_run(folder: Path) -> None:
    """Write a checkpoint as nanoGPT does after three steps of a compiled model, with the data it was trained on."""
    torch.manual_seed(0)
    size: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16}
    args = size | {"bias": False, "vocab_size": 4, "dropout": 0.0}
    model = GPT(GPTConfig(**args, activation="gelu"))
    optimizer = make_optimizer(model, "adamw", 0.1, 1e-3, (0.9, 0.99), 0.95, "cpu")
    for _ in range(3):
        x = torch.randint(0, 4, (2, 16))
        model(x, x)[1].backward()
        optimizer.step()
    settings = size | {"out_dir": "out", "dataset": str(folder), "init_from": "scratch"}
    settings |= {"batch_size": 4, "gradient_accumulation_steps": 1, "max_iters": 5, "eval_interval": 10}
    settings |= {"eval_iters": 2, "learning_rate": 1e-3, "min_lr": 1e-4, "lr_decay_iters": 5, "warmup_iters": 0}
    settings |= {"device": "cuda", "dtype": "float16", "compile": True, "backend": "nccl"}
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 16, 16) for i in range(2)}
    saved = {
        "model": {f"_orig_mod.{k}": v for k, v in (model.state_dict() | masks).items()},
        "optimizer": optimizer.state_dict(),
        "model_args": args,
        "iter_num": 3,
        "best_val_loss": torch.tensor(9.0),
        "config": settings,
    }
    folder.mkdir()
    torch.save(saved, folder / "ckpt.pt")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 4, "itos": dict(enumerate("\nabc"))}))
    for split in ("train", "val"):
        np.random.default_rng(0).integers(0, 4, 400).astype(np.uint16).tofile(folder / f"{split}.bin")


@pytest.mark.slow
def test_nanogpts_run_is_resumed_and_sampled_from_as_it_is(tmp_path, script):
    folder = tmp_path / "nanogpt"
    nanogpt_run(folder)
    done = script(
        "train.py",
        "--init_from=resume",
        f"--out_dir={folder}",
        "--compile=False",
        "--cpu_kernels=False",
        "--device=cpu",
    )
    assert done.code == 0, done.err
    saved = store.load(folder)
    assert saved.iter_num == 5
    assert saved.model_args["activation"] == "gelu"
    assert {int(s["step"]) for s in saved.optimizer["state"].values()} == {5}
    assert saved.best_val_loss < 9
    assert [e["lr"] for e in events(folder, "iter")] == pytest.approx([4.11e-4, 1.86e-4], rel=0.01)
    done = script("sample.py", f"--out_dir={folder}", "--start=ab", "--num_samples=2", "--max_new_tokens=30")
    assert done.code == 0, done.err
    samples = done.out.split("\n---------------\n")[:-1]
    assert len(samples) == 2
    assert all(s.startswith("ab") and len(s) == 32 and set(s) <= set("\nabc") for s in samples)


def test_our_checkpoints_have_what_nanogpt_reads(chars, tmp_path):
    main(tiny(chars, tmp_path, max_iters=3))
    saved = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    assert {"model", "optimizer", "model_args", "iter_num", "best_val_loss", "config"} <= saved.keys()
    nanogpts = {"n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout"}
    assert saved["model_args"].keys() == nanogpts
    assert not [k for k in saved["model"] if k.startswith(("_orig_mod.", "module."))]
    assert saved["config"]["dataset"] == str(chars)
