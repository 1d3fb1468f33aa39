"""max_minutes: how many steps a run can take in a given time, found by timing its own steps and evaluations."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from deskgpt.compute.batching import Batching
from deskgpt.compute.checks import Batch
from deskgpt.compute.optimizer import step_if_finite
from deskgpt.compute.runner import Runner
from deskgpt.compute.sharding import local
from deskgpt.run.train_state import Run
from deskgpt.system import hardware
from deskgpt.system.formatting import clock

EVAL_SHARE = 0.2  # of the time is spent on evaluation at most,
LEAST_EVAL_BATCHES = 8  # but each split gives at least this many batches: fewer say nothing about their own noise
WARMUP_SHARE = 0.1  # of the steps warm the learning rate up at most
TIMED = 7  # steps, at most ...
TIMED_S = 3.0  # ... and about the seconds that this may take

# What steps_within settles, as the checkpoint of its run has it; a run that goes on plans no second time.
PLANNED = ("max_minutes", "max_iters", "warmup_iters", "lr_decay_iters", "cooldown_iters", "eval_iters", "eval_tokens")


@dataclass(frozen=True)
class Time:
    """Of a run, in steps and evaluations."""

    steps: int
    step_s: float
    eval_interval: int  # steps
    eval_batches: int  # per evaluation, of both splits and each rank
    batch_s: float

    def evaluations(self) -> int:
        """At the beginning, after each eval_interval steps and at the end."""
        return 2 + (self.steps - 1) // self.eval_interval

    def eval_s(self) -> float:
        return self.eval_batches * self.batch_s

    def total_s(self) -> float:
        return self.steps * self.step_s + self.evaluations() * self.eval_s()


def seconds_left(settings: Mapping[str, Any], began: float) -> float | None:
    """Of max_minutes, since the instant `began`; None without a limit."""
    if not settings["max_minutes"] or settings["eval_only"]:
        return None
    return 60 * settings["max_minutes"] - (time.perf_counter() - began)


def steps_within(
    began: float, run: Run, batching: Batching, eval_windows: Sequence[int], batch: Batch, first_step: int
) -> dict[str, Any]:
    """Settings with which a run that would take longer than max_minutes ends in time; {} if it takes no longer.

    began: the instant of its start. eval_windows: that an evaluation reads of each split. batch: a micro-batch. Steps
    and evaluation are timed. max_iters becomes the steps that fit. What is longer than these in the schedule is
    shortened; in a resumed run, only with resume_changed. Where evaluations would take more than EVAL_SHARE of the
    time, they read less. All ranks get the same settings. Leaves weights and optimizer as they were.
    """
    settings = run.settings
    ranks = run.ranks
    seconds = ranks.max(max(seconds_left(settings, began) or 0.0, 0.0))
    step_s = ranks.max(time_step(run, batch, batching.micro_steps))
    batch_s = ranks.max(time_evaluation(run.runner, batch))
    eval_batches = sum(batching.eval_batches(n) for n in eval_windows)
    time_of_run = Time(settings["max_iters"] - first_step, step_s, settings["eval_interval"], eval_batches, batch_s)
    found: dict[str, Any] = {}
    if time_of_run.total_s() > seconds:
        unbroken = replace(time_of_run, steps=int(seconds / step_s))  # if evaluation took no time
        most = int(EVAL_SHARE * seconds / (unbroken.evaluations() * batch_s))
        per_split = max(LEAST_EVAL_BATCHES, most // len(eval_windows))
        if eval_batches > per_split * len(eval_windows):
            time_of_run = replace(time_of_run, eval_batches=per_split * len(eval_windows))
            if settings["eval_tokens"]:
                found["eval_tokens"] = per_split * batching.batch_size * batching.world * batching.block_size
            else:
                found["eval_iters"] = per_split * batching.world
        eval_s = time_of_run.eval_s()
        fit = int((seconds - 2 * eval_s) / (step_s + eval_s / time_of_run.eval_interval))
        time_of_run = replace(time_of_run, steps=max(1, min(time_of_run.steps, fit)))
        found["max_iters"] = first_step + time_of_run.steps
        if first_step == 0 or settings["resume_changed"]:  # otherwise the steps so far would have had other rates
            found["warmup_iters"] = min(settings["warmup_iters"], math.ceil(time_of_run.steps * WARMUP_SHARE))
            found["lr_decay_iters"] = min(settings["lr_decay_iters"], found["max_iters"])
            found["cooldown_iters"] = min(settings["cooldown_iters"], time_of_run.steps)
    ranks.print0(
        f"max_minutes={settings['max_minutes']:g}: {time_of_run.steps:,} steps of about {step_s * 1e3:.3g} ms "
        f"({time_of_run.steps * batching.tokens_per_step:,} tokens) and {time_of_run.evaluations()} evaluations of "
        f"about {clock(time_of_run.eval_s())}: done in about {clock(time_of_run.total_s())}"
    )
    return found


def time_step(run: Run, batch: Batch, micro_steps: int) -> float:
    """Median seconds of an optimizer step of `micro_steps` micro-batches. Leaves weights and optimizer as they were."""
    runner = run.runner
    optimizer = run.optimizer
    optimizer_before = copy.deepcopy(run.optimizer_state.state())
    scaler_before = runner.scaler.state_dict()
    tensors = [local(x.detach()) for x in runner.model.parameters()]
    values = [x.to("cpu", copy=True) for x in tensors]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    passes = []
    updates = []
    for _ in range(TIMED):
        t0 = time.perf_counter()
        runner.forward_backward(*batch, micro_steps)
        hardware.synchronize(runner.device)
        t1 = time.perf_counter()
        runner.scaler.unscale_(optimizer)
        norm = torch.linalg.vector_norm(runner.gradient_norms())
        torch.nn.utils.clip_grads_with_norm_(runner.parameters, 1.0, norm)
        step_if_finite(optimizer, runner.scaler, norm)
        optimizer.zero_grad(set_to_none=True)
        hardware.synchronize(runner.device)
        passes.append(t1 - t0)
        updates.append(time.perf_counter() - t1)
        if run.ranks.max(sum(passes)) > TIMED_S:  # all ranks go through the same steps
            break
    run.optimizer_state.load(optimizer_before, "the state before")
    if scaler_before:
        runner.scaler.load_state_dict(scaler_before)
    for x, value in zip(tensors, values, strict=True):
        x.copy_(value)
    usual_updates = updates[1:] or updates  # the first one makes the optimizer's state
    return micro_steps * statistics.median(passes) + statistics.median(usual_updates)


def time_evaluation(runner: Runner, batch: Batch) -> float:
    """Median seconds of a micro-batch of evaluation."""
    times = []
    with runner.evaluating():
        for _ in range(3):
            t0 = time.perf_counter()
            runner.loss(*batch)
            hardware.synchronize(runner.device)
            times.append(time.perf_counter() - t0)
    return statistics.median(times)
