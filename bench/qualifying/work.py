"""What stages 4 to 10 share: the form and the micro-batch, a model and its batches, and the timing of passes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bench.qualifying.session import Session
from bench.timing import write_data
from deskgpt.compute import forms
from deskgpt.compute.optimizer import make_optimizer
from deskgpt.compute.runner import Form, Runner
from deskgpt.machine import hardware, peak_flops
from deskgpt.machine.errors import is_out_of_memory
from deskgpt.predict.fit import USABLE, largest_batch
from deskgpt.predict.memory import Step
from model import GPT, GPTConfig, ModelSettings

MICRO_STEPS = 4  # by which a micro-batch's loss is divided
PASSES = 3  # that follow one another without waiting; their mean is one time
ROUNDS = 7  # such times, of which the median counts
ROUNDS_S = 3.0  # fewer rounds, but LEAST_ROUNDS, where they would take longer
LEAST_ROUNDS = 3

# ---- what the stages agree on --------------------------------------------------------------------------------


def usual_form(device: torch.device) -> Form:
    """The form that train.py tries first here: compiled on CUDA; on a CPU only long runs win back compiling."""
    return Form(peak_flops.fast_dtype(device), compiled=bool(forms.Wanted().compiled(device)))


def found_form(s: Session) -> Form:
    """The form with which stage 4 measured, or the usual one before stage 4."""
    found = s.results.get(4, {}).get("form")
    return Form(**found) if found else usual_form(s.device)


def compile_setting(s: Session) -> Literal["auto", False]:
    """train.py's `compile`. auto compiles on CUDA; on a CPU it would, in runs of no end, for longer than these last."""
    return "auto" if found_form(s).compiled else False


def best_batch(s: Session, sequences: int = 0) -> int:
    """The fastest micro-batch of stage 4, among those that divide a step of this number of sequences.

    Where stage 4 has found none, the largest predicted to fit, of the sizes that it would double.
    """
    rows = [r for r in s.results.get(4, {}).get("rows", []) if r["fits"]]
    if sequences:
        rows = [r for r in rows if sequences % r["batch_size"] == 0]
    if not rows:
        limit = USABLE * (hardware.usable_memory_bytes(s.device) or math.inf)
        form = replace(usual_form(s.device), compiled=True)
        return max(largest_batch(predicted_step(s, form, s.sizes.last_batch), limit), s.sizes.first_batch)
    return max(rows, key=lambda r: r["tokens_per_s"])["batch_size"]


def predicted_step(s: Session, form: Form, batch_size: int) -> Step:
    """What predict/memory.py predicts the memory of."""
    return Step(s.sizes.model, batch_size, form, s.device.type)


def problem_of(e: Exception) -> str:
    """An error as the cell of a table."""
    if is_out_of_memory(e):
        return "out of memory"
    return " ".join(f"{type(e).__name__}: {e}".split())[:200]


# ---- micro-batches -------------------------------------------------------------------------------------------


def new_model(s: Session) -> GPT:
    """The model of the session's sizes on its device, the same at each call."""
    if s.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # as in train.py
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


@dataclass(frozen=True)
class PassTime:
    ms: float  # of one of several that follow one another
    host_ms: float  # until the call of the first returns, with nothing queued before it


def time_passes(device: torch.device, once: Callable[[], object], passes: int = PASSES) -> PassTime:
    """The time of `once` by the device's own clock, on CUDA, or else by this process's."""
    hardware.synchronize(device)
    if device.type == "cuda":
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
    t0 = time.perf_counter()
    once()
    host_s = time.perf_counter() - t0
    for _ in range(passes - 1):
        once()
    if device.type == "cuda":
        end.record()
        hardware.synchronize(device)
        return PassTime(start.elapsed_time(end) / passes, host_s * 1e3)
    hardware.synchronize(device)
    return PassTime((time.perf_counter() - t0) / passes * 1e3, host_s * 1e3)


def rounds_for(pass_ms: float) -> int:
    return max(LEAST_ROUNDS, min(ROUNDS, int(ROUNDS_S * 1e3 / (PASSES * pass_ms))))


def median_time(device: torch.device, once: Callable[[], object]) -> PassTime:
    """Medians over several rounds."""
    times = [time_passes(device, once)]
    for _ in range(rounds_for(times[0].ms) - 1):
        times.append(time_passes(device, once))
    return PassTime(statistics.median(t.ms for t in times), statistics.median(t.host_ms for t in times))


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


# ---- words ---------------------------------------------------------------------------------------------------


def gib(size: float | None) -> str:
    return "n/a" if size is None else f"{size / 2**30:.2f}"


def percent(share: float | None) -> str:
    return "n/a" if share is None else f"{share:.1%}"
