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
TEMPERATURE = SampleConfig.__dataclass_fields__["temperature"].default
CHOICES: dict[str, dict[str, Any]] = {
    "top_k=200": {"temperature": TEMPERATURE, "top_k": 200},
    "top_p=0.9": {"temperature": TEMPERATURE, "top_p": 0.9},
    "from all": {"temperature": TEMPERATURE},
    "likeliest": {"temperature": 0.0},
}
USUAL = "top_k=200"  # sample.py's


def measure(s: Session) -> dict[str, Any]:
    model = work.new_model(s).eval()
    dtype = dtype_of(SampleConfig(), s.device)
    n = min(s.sizes.sampled_tokens, s.sizes.model.block_size - PROMPT)
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    for samples in SAMPLES:
        try:
            rows.append(timed(s, model, dtype, samples, n, left_out))
        except Exception as e:
            rows.append({"samples": samples, "problem": work.problem_of(e)})
    hardware.release_memory(s.device)
    return {"dtype": dtype, "tokens": n, "rows": rows, "left_out": left_out}


def timed(s: Session, model: GPT, dtype: str, samples: int, n: int, left_out: list[str]) -> dict[str, Any]:
    """A row for this number of samples side by side. What time is too short for goes into left_out."""
    token_times(s, model, dtype, samples, 1, WARM_UP, CHOICES[USUAL])
    first = token_times(s, model, dtype, samples, PROMPT, n, CHOICES[USUAL])
    again = token_times(s, model, dtype, samples, PROMPT, n, CHOICES[USUAL])
    row: dict[str, Any] = {  # medians
        "samples": samples,
        "first_ms": statistics.median(first),
        "first_most_ms": max(first),
        "repeated_ms": statistics.median(again),
        "repeated_most_ms": max(again),
        "choices_ms": {},
        "problem": None,
    }
    s.say(f"{samples} at once: {row['first_ms']:.2f} ms per token, {row['repeated_ms']:.2f} at lengths met before")
    for name, choice in CHOICES.items():
        if s.seconds_left() < 2 * sum(again) / 1e3:
            left_out.append(f"{name} of {samples}")
            continue
        times = token_times(s, model, dtype, samples, PROMPT, n, choice)
        row["choices_ms"][name] = statistics.median(times)
    return row


def token_times(
    s: Session, model: GPT, dtype: str, samples: int, prompt: int, n: int, choice: dict[str, Any]
) -> list[float]:
    """ms of each of n tokens but the first, after a prompt of `prompt` tokens."""
    prompts = torch.arange(prompt, device=s.device).expand(samples, -1)
    times = []
    reading = Reading(model, prompts, dtype)
    hardware.synchronize(s.device)
    with reading.using():
        t0 = time.perf_counter()
        for new in model.generate(prompts, n, **choice):
            new.tolist()
            t1 = time.perf_counter()
            times.append((t1 - t0) * 1e3)
            t0 = t1
    return times[1:]


def describe(result: dict[str, Any]) -> str:
    head = ["samples", "first pass (most)", "second (most)", *CHOICES]
    body = []
    for r in result["rows"]:
        if r["problem"]:
            body.append([str(r["samples"]), r["problem"], *[""] * (len(head) - 2)])
            continue
        cells = [str(r["samples"])]
        cells.append(f"{r['first_ms']:.3f} ({r['first_most_ms']:.1f})")
        cells.append(f"{r['repeated_ms']:.3f} ({r['repeated_most_ms']:.1f})")
        for name in CHOICES:
            ms = r["choices_ms"].get(name)
            cells.append("n/a" if ms is None else f"{ms:.3f}")
        body.append(cells)
    lines = [
        f"ms per token over {result['tokens']} tokens after a prompt of {PROMPT}, in {result['dtype']}, not compiled. "
        f"First the medians, and the longest token, of two passes with {USUAL}: where the first takes much longer than "
        "the second, something was prepared for each new length. On CUDA one token of a pass takes long, because the "
        "graph is recorded there. Then the medians by what is drawn from.",
        "",
        markdown_table(head, body),
    ]
    if result["left_out"]:
        lines += ["", f"Not timed, for want of time: {', '.join(result['left_out'])}."]
    return "\n".join(lines)
