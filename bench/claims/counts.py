"""The claims that counting and arithmetic settle."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch

from bench.claims.sizes import Found, Options
from model import GPT, GPTConfig

A100_FLOPS = 312e12
TOKENS_PER_STEP = 524_288  # of the runs that claim 6 is about


# ---- claim 6 -------------------------------------------------------------------------------------------------


def gpt(**sizes: Any) -> GPT:
    """A model without bias, as shapes without memory."""
    with torch.device("meta"):
        return GPT(GPTConfig(bias=False, **sizes))


def parameters(o: Options) -> Found:
    model = gpt(n_embd=384, n_head=6)
    parts = {
        "token embedding, which is the head too (50,304 x 384)": model.lm_head.weight.numel(),
        "12 blocks": sum(p.numel() for p in model.transformer.h.parameters()),
        "final norm": sum(p.numel() for p in model.transformer.ln_f.parameters()),
        "sum, as nanoGPT prints it": model.num_params(),
        "with position embeddings (1,024 x 384)": sum(p.numel() for p in model.parameters()),
    }
    counts = {n_layer: gpt(n_embd=384, n_head=6, n_layer=n_layer).num_params() for n_layer in range(1, 25)}
    layers = min(counts, key=lambda n_layer: abs(counts[n_layer] - 33e6))
    says = [
        f"33M would be about {layers} layers: {counts[layers]:,} parameters.",
        flops_line(model, step_s=3.9),
        flops_line(gpt(n_embd=768), step_s=9.3),
    ]
    return Found([{"part": part, "parameters": n} for part, n in parts.items()], says)


def flops_line(model: GPT, step_s: float) -> str:
    """The FLOP/s of a step, and the MFU that nanoGPT prints for it."""
    flops = model.estimate_flops()
    flops_per_s = flops * TOKENS_PER_STEP / step_s
    return (
        f"{model.config.n_embd} wide: {model.num_params():,} parameters, {flops:,} FLOPs a token; "
        f"{TOKENS_PER_STEP:,} tokens in {step_s} s are {flops_per_s / 1e12:.1f} TFLOP/s, "
        f"{flops_per_s / A100_FLOPS:.1%} of an A100's 312 TFLOP/s, to which nanoGPT's MFU refers on any card."
    )


# ---- claim 11 ------------------------------------------------------------------------------------------------


def perplexity(o: Options) -> Found:
    losses = {
        "a uniform guess among 50,257": math.log(50257),
        "perplexity 22": math.log(22),
        "loss 3.358": 3.358,
        "loss 22": 22.0,
    }
    if o.log:
        losses |= losses_of(o.log)
    says = []
    bytes_per_token = None
    if o.documents:
        bytes_per_token, line = measured_bytes_per_token(Path(o.documents))
        says.append(line)
    rows = [
        {
            "what": what,
            "loss, nats per token": loss,
            "perplexity": math.exp(loss),
            "bits per token": loss / math.log(2),
            "bits per byte": loss / math.log(2) / bytes_per_token if bytes_per_token else None,
        }
        for what, loss in losses.items()
    ]
    says.append(
        f"A model that knows nothing has a loss of {math.log(50257):.2f}: 22 is no loss of a model that trains."
    )
    return Found(rows, says)


def losses_of(log: str) -> dict[str, float]:
    """The first and the last validation loss in a log of nanoGPT's. Raises ValueError where it has none."""
    found = re.findall(r"^step (\d+): train loss \S+ val loss ([\d.]+)", Path(log).read_text(), re.M)
    if not found:
        raise ValueError(f"--log {log} has no line like nanoGPT's `step 0: train loss 10.9, val loss 10.9`")
    return {f"the log's step {int(step):,}": float(loss) for step, loss in (found[0], found[-1])}


def measured_bytes_per_token(documents: Path) -> tuple[float, str]:
    """(bytes per token of GPT-2's, the same in words) of a file or folder of documents."""
    from data.fineweb_edu.prepare import local_source
    from data.tokenizer import from_meta

    texts = [text for *_, text in local_source([documents], "text").rows(0, 0)]
    tokens = sum(len(ids) for ids in from_meta({"name": "gpt2"}).encode_batch(texts))
    found = sum(len(text.encode()) for text in texts) / tokens
    return found, f"{len(texts):,} documents, {tokens:,} tokens of GPT-2's: {found:.3f} bytes per token."
