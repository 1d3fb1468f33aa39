"""Stage 8: ms per token of generation, for one sample and ten.

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
from deskgpt.compute.inference import InferenceEngine
from deskgpt.system import hardware
from model import GPT
from sample import SampleConfig, inference_dtype

PROMPT = 8  # tokens
WARM_UP = 4  # tokens at first, after a prompt of one: at other lengths than those that are timed
SAMPLES = (1, 10)


def measure(s: Session) -> dict[str, Any]:
    model = work.new_model(s).eval()
    dtype = inference_dtype(SampleConfig(), s.device)
    n = min(s.sizes.sampled_tokens, s.sizes.model.block_size - PROMPT)
    rows = []
    for samples in SAMPLES:
        token_times(model, dtype, torch.ones(samples, 1, dtype=torch.long, device=s.device), WARM_UP)
        times = token_times(model, dtype, torch.arange(PROMPT, device=s.device).expand(samples, -1), n)
        rows.append({"samples": samples, "ms": statistics.median(times), "most_ms": max(times)})
    hardware.release_memory(s.device)
    return {"dtype": dtype, "tokens": n, "rows": rows}


def token_times(model: GPT, dtype: str, prompts: torch.Tensor, n: int) -> list[float]:
    """ms of each of n tokens but the first, after prompts of (samples, tokens)."""
    c = SampleConfig()
    times = []
    reading = InferenceEngine(model, prompts, dtype)
    hardware.synchronize(prompts.device)
    with reading.replacing():
        t0 = time.perf_counter()
        for new in model.generate(prompts, n, temperature=c.temperature, top_k=c.top_k):
            new.tolist()
            t1 = time.perf_counter()
            times.append((t1 - t0) * 1e3)
            t0 = t1
    return times[1:]


def describe(result: dict[str, Any]) -> str:
    rows = [[str(r["samples"]), f"{r['ms']:.3f}", f"{r['most_ms']:.1f}"] for r in result["rows"]]
    table = markdown_table(["samples", "median", "longest"], rows)
    return f"ms per token over {result['tokens']} tokens after a prompt of {PROMPT}, in {result['dtype']}.\n\n{table}"
