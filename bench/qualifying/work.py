"""What the stages share: the form and the micro-batch, a model and its batches, and the timing of calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bench.qualifying.session import Session
from bench.timing import write_data
from deskgpt.compute import implementation
from deskgpt.compute.optimizer import make_optimizer
from deskgpt.compute.runner import Runner, Variant
from deskgpt.system import hardware, peaks
from deskgpt.system.errors import is_out_of_memory
from model import GPT, GPTConfig, ModelSettings

MICRO_STEPS = 4  # by which a micro-batch's loss is divided
SAMPLES = 7  # of which the median counts, after one that does not
SAMPLE_S = 0.03  # a sample is as many calls as fill about this time, queued without waiting
MOST_CALLS = 200
OUT_OF_MEMORY = "out of memory"  # as problem_of says it

# ---- what the stages agree on --------------------------------------------------------------------------------


def usual_form(device: torch.device) -> Variant:
    """The form that train.py tries first here: compiled on CUDA; on a CPU only long runs win back compiling."""
    return Variant(peaks.fast_dtype(device), compiled=bool(implementation.Options().compiled(device)))


def found_form(s: Session) -> Variant:
    """The form with which stage 4 measured. Raises ValueError before stage 4."""
    best_batch(s)
    return Variant(**s.results[4]["form"])


def best_batch(s: Session) -> int:
    """The micro-batch that stage 4 has found. Raises ValueError where it has found none."""
    best = s.results.get(4, {}).get("best")
    if best is None:
        raise ValueError("no micro-batch is known: --stages=4 finds it")
    return best


def compile_setting(s: Session) -> Literal["auto", False]:
    """train.py's `compile`. auto compiles on CUDA; on a CPU it would, in runs of no end, for longer than these last."""
    return "auto" if found_form(s).compiled else False


def problem_of(e: Exception | SystemExit) -> str:
    """An error in one line."""
    if is_out_of_memory(e):
        return OUT_OF_MEMORY
    return " ".join(f"{type(e).__name__}: {e}".split())[:300]


# ---- micro-batches -------------------------------------------------------------------------------------------


def new_model(s: Session) -> GPT:
    """The model of the session's sizes on its device, the same at each call."""
    torch.manual_seed(0)
    return GPT(s.sizes.model).to(s.device)


def random_batch(s: Session, batch_size: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (batch_size, T) on the device, the same at each call."""
    c = s.sizes.model
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, c.vocab_size, (2, batch_size, c.block_size), generator=draw).to(s.device)
    return ids[0], ids[1]


def adamw(runner: Runner) -> torch.optim.AdamW:
    """train.py's AdamW; its rate of 0 leaves the weights as they are."""
    return make_optimizer(runner.model, "adamw", 0.1, 0.0, (0.9, 0.95), 0.95)


def update(runner: Runner, optimizer: torch.optim.Optimizer) -> None:
    """The end of a step: clipping, AdamW, and no gradients."""
    runner.scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(runner.parameters, 1.0)
    runner.scaler.step(optimizer)
    runner.scaler.update()
    optimizer.zero_grad(set_to_none=True)


# ---- timing --------------------------------------------------------------------------------------------------


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """The median seconds of a call, of several that are queued one after the other."""
    call()  # chooses a kernel, and loads it
    times = []
    calls = 1
    for _ in range(SAMPLES + 1):
        hardware.synchronize(device)
        t0 = time.perf_counter()
        for _ in range(calls):
            call()
        hardware.synchronize(device)
        times.append((time.perf_counter() - t0) / calls)
        if len(times) == 1:
            calls = max(1, min(MOST_CALLS, round(SAMPLE_S / times[0])))
    return statistics.median(times[1:])


# ---- memory --------------------------------------------------------------------------------------------------


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> tuple[int, int] | tuple[None, None]:
    """The most bytes that tensors took since forget_peak, and that torch had reserved for them.

    Not known on a CPU, where only the whole process's peak is.
    """
    if device.type != "cuda":
        return None, None
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


# ---- steps of train.py ---------------------------------------------------------------------------------------


def settings_of(config: GPTConfig) -> dict[str, Any]:
    """A model's settings, as those of train.py."""
    return {f.name: getattr(config, f.name) for f in fields(ModelSettings)}


def tokens_for(s: Session) -> Path:
    """A folder of random tokens for the session's model."""
    folder = s.folder / "tokens"
    if not folder.exists():
        write_data(folder, min(s.sizes.model.vocab_size, 50257))  # GPT-2's 50257 become 50304 in the model
    return folder
