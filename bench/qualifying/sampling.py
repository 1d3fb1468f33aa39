"""Stage 8: ms per token of generation, for one sample and ten, at lengths met for the first time and again.

Each token is timed until its id is on the host, as sample.py shows it. The first one, which the prompt goes through, is
left out. The model has random weights: only the time counts.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from bench.output import markdown_table
from bench.qualifying import work
from bench.qualifying.session import Session
from deskgpt.compute.inference import Reading
from deskgpt.machine import hardware
from model import GPT
from sample import SampleConfig, dtype_of

PROMPT = 8  # tokens
WARM_UP = 4  # tokens at first, after a prompt of one: at other lengths than those that are timed
SAMPLES = (1, 10)


def measure(s: Session) -> dict[str, Any]:
    model = work.new_model(s).eval()
    dtype = dtype_of(SampleConfig(), s.device)
    n = min(s.sizes.sampled_tokens, s.sizes.model.block_size - PROMPT)
    rows = []
    for samples in SAMPLES:
        token_times(model, dtype, torch.ones(samples, 1, dtype=torch.long, device=s.device), WARM_UP)
        prompts = torch.arange(PROMPT, device=s.device).expand(samples, -1)
        first = token_times(model, dtype, prompts, n)
        again = token_times(model, dtype, prompts, n)
        medians = {"first_ms": statistics.median(first), "again_ms": statistics.median(again)}
        rows.append({"samples": samples, **medians, "first_most_ms": max(first), "again_most_ms": max(again)})
    hardware.release_memory(s.device)
    return {"dtype": dtype, "tokens": n, "rows": rows}


def token_times(model: GPT, dtype: str, prompts: torch.Tensor, n: int) -> list[float]:
    """ms of each of n tokens but the first, after prompts of (samples, tokens)."""
    c = SampleConfig()
    times = []
    reading = Reading(model, prompts, dtype)
    hardware.synchronize(prompts.device)
    with reading.using():
        t0 = time.perf_counter()
        for new in model.generate(prompts, n, temperature=c.temperature, top_k=c.top_k):
            new.tolist()
            t1 = time.perf_counter()
            times.append((t1 - t0) * 1e3)
            t0 = t1
    return times[1:]


def describe(result: dict[str, Any]) -> str:
    rows = []
    for r in result["rows"]:
        passes = [f"{r[f'{name}_ms']:.3f} ({r[f'{name}_most_ms']:.1f})" for name in ("first", "again")]
        rows.append([str(r["samples"]), *passes])
    return (
        f"ms per token over {result['tokens']} tokens after a prompt of {PROMPT}, in {result['dtype']}, not compiled: "
        "the median and the longest token of two passes. Where the first takes much longer than the second, something "
        "was prepared for each new length. On CUDA one token of a pass takes long, because the graph is recorded "
        f"there.\n\n{markdown_table(['samples', 'first pass (most)', 'second (most)'], rows)}"
    )
