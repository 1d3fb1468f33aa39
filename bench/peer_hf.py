"""Trains transformers' GPT-2 in a plain loop: a peer of bench/speed.py, which passes the settings as JSON.

Prints `iter N: loss X, time T ms` for each step until it is stopped.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

from data.splits import Split
from data.token_files import read_meta
from deskgpt.machine import hardware, peak_flops


def gpt2(c: dict[str, Any], vocab_size: int) -> torch.nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocab_size,
            n_positions=c["block_size"],
            n_layer=c["n_layer"],
            n_head=c["n_head"],
            n_embd=c["n_embd"],
            resid_pdrop=c["dropout"],
            embd_pdrop=c["dropout"],
            attn_pdrop=c["dropout"],
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )


def main(c: dict[str, Any]) -> None:
    """Trains on c["dataset"] without an end."""
    device = hardware.resolve_device(c["device"])
    dtype = peak_flops.fast_dtype(device) if c["dtype"] == "auto" else c["dtype"]
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # as in train.py and nanoGPT
    folder = Path(c["dataset"])
    vocab_size = read_meta(folder)["vocab_size"]
    if vocab_size == 50257:
        vocab_size = 50304  # as train.py pads it
    model = gpt2(c, vocab_size).to(device).train()
    options = {"lr": c["learning_rate"], "betas": (c["beta1"], c["beta2"]), "weight_decay": c["weight_decay"]}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **options)
    split = Split(folder, "train", c["block_size"], vocab_size)
    amp = hardware.autocast(device, dtype)
    B = c["batch_size"]
    micro_steps = c["gradient_accumulation_steps"]
    for step in range(1_000_000):
        hardware.synchronize(device)
        t0 = time.perf_counter()
        for micro in range(micro_steps):
            rows = micro * B + np.arange(B)
            batch = [torch.from_numpy(a).to(device) for a in split.train_batch(step, rows, B * micro_steps)]
            x = batch[0]
            with amp:
                loss = model(input_ids=x, labels=x).loss / micro_steps  # it shifts the labels itself
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), c["grad_clip"] or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item() * micro_steps
        hardware.synchronize(device)
        print(f"iter {step}: loss {value:.4f}, time {(time.perf_counter() - t0) * 1e3:.2f}ms", flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
