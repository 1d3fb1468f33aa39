"""The claims that counting and arithmetic settle."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch

from bench.claims.sizes import Found, Options
from model import GPT, GPTConfig


def parameters(o: Options) -> Found:
    def model(**sizes: Any) -> GPT:
        with torch.device("meta"):  # shapes without memory
            return GPT(GPTConfig(bias=False, **sizes))

    gpt = model(n_embd=384, n_head=6)
    parts = {
        "token embedding, which is the head too (50,304 x 384)": gpt.lm_head.weight.numel(),
        "12 blocks": sum(p.numel() for p in gpt.transformer.h.parameters()),
        "final norm": sum(p.numel() for p in gpt.transformer.ln_f.parameters()),
    }
    rows: list[dict[str, Any]] = [{"part": k, "parameters": v} for k, v in parts.items()]
    rows.append({"part": "sum, as nanoGPT prints it", "parameters": gpt.num_params()})
    rows.append(
        {"part": "with position embeddings (1,024 x 384)", "parameters": sum(p.numel() for p in gpt.parameters())}
    )
    layers = min(range(1, 25), key=lambda n: abs(model(n_embd=384, n_head=6, n_layer=n).num_params() - 33e6))
    n = model(n_embd=384, n_head=6, n_layer=layers).num_params()
    says = [f"33M would be about {layers} layers: {n:,} parameters."]
    for known, step_s in ((gpt, 3.9), (model(n_embd=768), 9.3)):
        rate = known.estimate_flops() * 524_288 / step_s
        model_is = (
            f"{known.config.n_embd} wide: {known.num_params():,} parameters, {known.estimate_flops():,} FLOPs a token"
        )
        says.append(
            f"{model_is}; 524,288 tokens in {step_s} s are {rate / 1e12:.1f} TFLOP/s, {rate / 312e12:.1%} of an A100's "
            "312 TFLOP/s, to which nanoGPT's MFU refers on any card."
        )
    return Found(rows, says)


def perplexity(o: Options) -> Found:
    losses = {
        "a uniform guess among 50,257": math.log(50257),
        "perplexity 22": math.log(22),
        "loss 3.358": 3.358,
        "loss 22": 22.0,
    }
    if o.log:
        seen = re.findall(r"^step (\d+): train loss \S+ val loss ([\d.]+)", Path(o.log).read_text(), re.M)
        if not seen:
            raise ValueError(f"--log {o.log} has no line like nanoGPT's `step 0: train loss 10.9, val loss 10.9`")
        losses |= {f"the log's step {int(step):,}": float(loss) for step, loss in (seen[0], seen[-1])}
    bytes_per_token, says = None, []
    if o.documents:
        from data.fineweb_edu.prepare import local_source
        from data.tokenizer import from_meta

        texts = [text for *_, text in local_source([Path(o.documents)], "text").rows(0, 0)]
        tokens = sum(len(ids) for ids in from_meta({"name": "gpt2"}).encode_batch(texts))
        bytes_per_token = sum(len(text.encode()) for text in texts) / tokens
        says.append(f"{len(texts):,} documents, {tokens:,} tokens of GPT-2's: {bytes_per_token:.3f} bytes per token.")
    rows = []
    for name, loss in losses.items():
        row = {
            "what": name,
            "loss, nats per token": loss,
            "perplexity": math.exp(loss),
            "bits per token": loss / math.log(2),
        }
        rows.append(row | {"bits per byte": loss / math.log(2) / bytes_per_token if bytes_per_token else None})
    says.append(
        f"A model that knows nothing has a loss of {math.log(50257):.2f}: 22 is no loss of a model that trains."
    )
    return Found(rows, says)
