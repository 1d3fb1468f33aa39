"""Transformers' GPT-2 in a plain loop, as a peer of bench/speed.py, which gives the settings as JSON.

Prints `iter N: loss X, time T ms` for each step until it is stopped.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script, Python looks beside this file only

from data.splits import Split
from data.token_files import read_meta
from deskgpt import hardware, peak_flops


def main(c: dict) -> None:
    device = hardware.resolve_device(c["device"])
    dtype = peak_flops.fast_dtype(device) if c["dtype"] == "auto" else c["dtype"]
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # as ours and nanoGPT have it
    folder, B, T = Path(c["dataset"]), c["batch_size"], c["block_size"]
    vocab_size = read_meta(folder)["vocab_size"]
    vocab_size = 50304 if vocab_size == 50257 else vocab_size  # as ours pads it
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=T,
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
    model: torch.nn.Module = GPT2LMHeadModel(config)
    model.to(device).train()
    options = {"lr": c["learning_rate"], "betas": (c["beta1"], c["beta2"]), "weight_decay": c["weight_decay"]}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **options)
    split, amp = Split(folder, "train", T, vocab_size), hardware.autocast(device, dtype)
    micro_steps = c["gradient_accumulation_steps"]
    for step in range(1_000_000):
        hardware.synchronize(device)
        t0 = time.perf_counter()
        for micro in range(micro_steps):
            rows = micro * B + np.arange(B)
            x, _ = (torch.from_numpy(a).to(device) for a in split.train_batch(step, rows, B * micro_steps))
            with amp:
                loss = model(input_ids=x, labels=x).loss / micro_steps  # shifts the labels itself
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), c["grad_clip"] or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item() * micro_steps
        hardware.synchronize(device)
        print(f"iter {step}: loss {value:.4f}, time {(time.perf_counter() - t0) * 1e3:.2f}ms", flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
