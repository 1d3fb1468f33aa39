"""Metrics of a run: lines on the terminal, events in log.jsonl. And the screen at its end."""

from __future__ import annotations

import math
import os
import shlex
import time
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from data.batching import Batching
from deskgpt.checkpoint import store
from deskgpt.compute import compiling, sharding
from deskgpt.compute.evaluation import Evaluation
from deskgpt.estimate.plan import reported_speed
from deskgpt.run.log import RunLog, start_wandb
from deskgpt.run.loss_band import compare_with_bands
from deskgpt.run.schedule import EXPECTED_MFU, Config
from deskgpt.run.settings import sensitive
from deskgpt.run.timer import StepTimer
from deskgpt.run.train_state import TrainState
from deskgpt.system import cache, hardware, peaks
from deskgpt.system.hardware import copy_to_host
from deskgpt.system.terminal import clock, in_gib, millions

# What the log has of a step, beside the further losses of a model and a user's own numbers.
STEP_FIELDS = {"event", "iter", "loss", "time_ms", "mfu", "tokens_per_s", "data_wait", "lr", "grad_norm", "clip_rate"}
STEP_FIELDS |= {"tokens", "train_s", "peak_memory_bytes"}


class Report:
    """Prints and logs what happens.

    A number that `step` is given under any name goes to the terminal, to log.jsonl, to Weights & Biases and to the page
    of bench/report.py.
    """

    def __init__(self, config: Config, state: TrainState) -> None:
        self.config = config
        self.state = state
        self.data = state.data
        self.dist = state.dist
        self.print0 = state.dist.print0
        self.timer = StepTimer(self.dist.device, compiling.spent_s if state.variant.compiled else lambda: 0.0)
        self.deferred = hardware.DeferredCalls(self.dist.device)  # what prints and logs numbers of the device
        self.log = open_log(config, state)
        self.wandb_run_id = self.log.wandb_run.id if self.log.wandb_run else state.wandb_run_id
        # Of all ranks, each once: cards of a run can differ.
        self.device = " + ".join(dict.fromkeys(self.dist.gather(hardware.device_name(self.dist.device))))
        self.warm_up_s = 0.0
        self._ends_at = math.inf  # by max_minutes or max_hours
        self._is_mfu_possible = True
        self.flops_per_token = state.model.estimate_flops()
        self._grad_norms: list[Tensor] = []  # of the steps since the last log line, still on the device
        self._tokens = 0  # of these steps
        peak, self.peak_source = peaks.peak_flops(self.dist.device, state.variant.dtype)
        self.peak_flops = self.dist.sum(torch.tensor(peak, dtype=torch.float64)).item()  # of all ranks

    # ---- the beginning -----------------------------------------------------------------------------------

    def start(self, started: float) -> None:
        """Print and log what runs, and on what; from here on, steps are timed. started: when the run began."""
        state = self.state
        variant = state.variant
        batching = state.batching
        for line in self.data.lines(batching, reads_text=self.dist.is_first):
            self.print0(line)
        self.print0(f"number of parameters: {millions(state.model.num_params())}")
        shards = sharding.describe_shards(self.config.dp_shard, self.dist.world)
        self.print0(f"device: {self.dist.world} x {self.device}, {variant}{shards}")
        self.warm_up_s = time.perf_counter() - started
        limits_s = (60 * self.config.max_minutes, 3600 * self.config.max_hours)
        self._ends_at = started + min(filter(None, limits_s), default=math.inf)
        self.print0(f"mfu refers to {self.peak_flops / 1e12:.2f} TFLOP/s ({self.peak_source})")
        self.print0(f"tokens per iteration will be: {batching.tokens_per_step:,}")
        if not self.config.eval_only:
            self.print0(self._outlook())
        self.log.write(
            "start",
            settings=state.settings_now(),
            iter=state.step,
            model_args=asdict(state.model.config),
            parameters=state.model.num_params(),
            flops_per_token=self.flops_per_token,
            tokens_per_step=batching.tokens_per_step,
            tokenizer=self.data.tokenizer.get("name"),
            train_tokens=self.data.train.tokens,
            val_tokens=self.data.val.tokens,
            val_sha256=self.data.metadata["val data"]["fingerprint"],
            bytes_per_token=self.data.bytes_per_token,
            device=self.device,
            world_size=self.dist.world,
            **asdict(variant),
            peak_flops=self.peak_flops,
            peak_source=self.peak_source,
            warm_up_s=self.warm_up_s,
            versions=state.metadata["versions"],
            git_commit=state.metadata["code"],
        )
        self.warn(state.schedule.warnings())
        self.timer.start()

    def _outlook(self) -> str:
        """Return a line about what will happen: steps, a predicted time, evaluations, where checkpoints go."""
        end = self.state.schedule.max_iters
        steps = end - self.state.step
        if steps <= 0:
            return f"already at step {self.state.step:,} of max_iters={end:,}: raise --max_iters to train longer"
        flops = steps * self.state.batching.tokens_per_step * self.flops_per_token
        time_needed = f"about {clock(flops / (EXPECTED_MFU * self.peak_flops))}" if self.peak_flops > 0 else "n/a"
        planned = f"{steps:,} steps, {time_needed}"
        if self.config.max_minutes:
            planned = f"as many of {steps:,} steps as fit into {self.config.max_minutes:g} minutes"
        return f"{planned}; an evaluation every {self.config.eval_interval:,}, into {self.config.out_dir}"

    def warn(self, lines: list[str]) -> None:
        for line in lines:
            self.event("warning", f"warning: {line}", iter=self.state.step, text=line)

    # ---- steps -------------------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Return whether this step has a line."""
        return step % self.config.log_interval == 0 or step == self.state.schedule.max_iters - 1

    def step(
        self, step: int, lr: float, tokens: int, /, loss: Tensor, grad_norm: Tensor, **numbers: Tensor | float
    ) -> None:
        """Print and log the line of a step, if it has one: at once, on CUDA when `deferred` runs.

        tokens: that all ranks trained on. loss, grad_norm and numbers by name are floats or 0-d tensors; tensors are
        averaged over ranks.
        """
        if taken := STEP_FIELDS & numbers.keys():
            name = min(taken)
            raise ValueError(f"report.step({name}=...): the log has a {name} of its own; give yours another name")
        self._tokens += tokens
        self._grad_norms.append(grad_norm.detach())
        if not self.is_due(step):
            return
        norms = copy_to_host(torch.stack(self._grad_norms))
        means = {name: self._mean(value) for name, value in {"loss": loss, **numbers}.items()}
        memory = hardware.peak_memory_bytes(self.dist.device)
        spent_s = self.timer.spent_s()
        self.deferred.add(partial(self._line, step, lr, self._tokens, memory, spent_s, norms, means))
        self._grad_norms.clear()
        self._tokens = 0

    def _mean(self, value: Tensor | float) -> Tensor | float:
        """Return a tensor's mean over the ranks, on the host; a float as it is."""
        if not isinstance(value, Tensor):
            return value
        value = sharding.unsharded(value.detach())
        if self.dist.world > 1:
            value = self.dist.sum(value.double()) / self.dist.world
        return copy_to_host(value)

    def _line(
        self,
        step: int,
        lr: float,
        tokens: int,
        memory: int | None,
        spent_s: tuple[float, float],
        grad_norms: Tensor,
        means: dict[str, Any],
    ) -> None:
        """Print and log the line of a step that is done. tokens, grad_norms: since the last line; means: by name."""
        norms = grad_norms.tolist()
        step_s, tokens_per_s, data_wait = self.timer.end_window(len(norms), tokens, self.deferred.done_at, spent_s)
        own = {name: float(value) for name, value in means.items()}
        loss = own.pop("loss")
        limit = self.config.grad_clip
        mfu = tokens_per_s * self.flops_per_token / self.peak_flops
        more = "".join(f", {name} {value:.6g}" for name, value in own.items())
        self.print0(
            f"iter {step}: loss {loss:.4f}, time {step_s * 1e3:.2f}ms, mfu {mfu * 100:.2f}%, "
            f"tok/s {tokens_per_s:,.0f}, eta {clock(self._left_s(step, step_s))}{more}"
        )
        self.log.write(
            "iter",
            iter=step,
            loss=loss,
            time_ms=step_s * 1e3,
            mfu=mfu,
            tokens_per_s=tokens_per_s,
            data_wait=data_wait,
            lr=lr,
            grad_norm=norms[-1],
            clip_rate=sum(norm > limit for norm in norms) / len(norms) if limit else None,
            tokens=(step + 1) * self.state.batching.tokens_per_step,
            train_s=self.timer.window_ended_s,
            peak_memory_bytes=memory,
            **own,
        )
        if mfu > 1 and self._is_mfu_possible:
            self._is_mfu_possible = False
            remedy = f"if it was measured, delete {cache.path_of('peaks')}, and the next run measures again"
            self.warn([f"mfu {mfu:.0%}: the peak is too low, or GPT.estimate_flops too high; {remedy}"])

    def _left_s(self, step: int, step_s: float) -> float:
        end = self.state.schedule.max_iters
        interval = self.config.eval_interval
        evaluations = math.ceil(end / interval) - step // interval
        left_s = (end - step - 1) * step_s + evaluations * sum(self.timer.last_s.values())
        return min(left_s, max(0.0, self._ends_at - time.perf_counter()))

    def event(self, kind: str, text: str, /, **fields: Any) -> None:
        """Print a line and log an event of this kind, such as a spike."""
        self.print0(text)
        self.log.write(kind, **fields)

    def smaller_batch(self, batching: Batching) -> None:
        """Print and log that the run goes on in smaller micro-batches, because memory ran out."""
        line = f"out of memory: continuing with {batching.flags()}, which is the same training"
        self.event("out_of_memory", line, iter=self.state.step, **batching.settings())

    # ---- evaluations and saves ---------------------------------------------------------------------------

    def evaluation(self, train: Evaluation, val: Evaluation, lr: float, texts: list[str]) -> None:
        """Print and log an evaluation. texts: samples of the model."""
        step = self.state.step
        val_bpb = self.data.bits_per_byte(val.loss)
        bits = "" if val_bpb is None else f", bits per byte {val_bpb:.4f}"
        self.event(
            "eval",
            f"step {step}: train loss {train.loss:.4f}, val loss {val.loss:.4f}{bits}",
            iter=step,
            train_loss=train.loss,
            val_loss=val.loss,
            val_se=val.standard_error,
            val_bpb=val_bpb,
            lr=lr,
            tokens=step * self.state.batching.tokens_per_step,
            train_s=self.timer.train_s(),
            eval_s=self.timer.last_s["evaluation"],
            eval_windows=val.windows,
            eval_digest=self.data.eval_digest(self.state.batching),
            val_batches=val.batch_losses,
        )
        if texts:
            self.log.write("sample", iter=step, texts=texts)

    # ---- the end -----------------------------------------------------------------------------------------

    def end(self, stop: str | None) -> float:
        """Print the screen and log the "end" event, unless eval_only. Return the best val loss, inf without one.

        stop: why the run ends before max_iters, such as a signal's name.
        """
        state, timer = self.state, self.timer
        best = min(state.evaluations, key=lambda e: e.val_loss, default=None)
        best_val_loss = best.val_loss if best else math.inf
        if self.config.eval_only:
            return best_val_loss
        if stop and state.step > 0:
            self.print0(f"stopped by {stop} at step {state.step}")
        memory = hardware.peak_memory_bytes(self.dist.device)
        self.print0(
            f"{state.step - state.first_step} steps: {clock(timer.train_s())} of training, "
            f"{clock(timer.total_s['evaluation'])} of evaluation, {clock(timer.total_s['saving'])} of saving, "
            f"{clock(self.warm_up_s)} to start"
        )
        self.print0(f"peak memory {in_gib(memory)} GiB, {clock(timer.wait_s)} of waiting for data")
        self.print0(f"best val loss {best_val_loss:.4f}")
        variant = state.variant
        reported = reported_speed(state.model.config, self.device, variant.dtype, variant.recompute)
        if reported and timer.train_s():
            tokens = (state.step - state.first_step) * state.batching.tokens_per_step / self.dist.world
            self.print0(f"{tokens / timer.train_s():,.0f} tokens/s of a card; known runs on this one: {reported}")
        of_data = (self.data.metadata["val data"]["fingerprint"], self.data.train.tokens)
        sentence = compare_with_bands(state.settings_now(), of_data, {e.step: e.val_loss for e in state.evaluations})
        if sentence:
            self.print0(sentence)
        self.log.write(
            "end",
            iter=state.step,
            stop=stop,
            train_s=timer.train_s(),
            data_wait_s=timer.wait_s,
            eval_s=timer.total_s["evaluation"],
            save_s=timer.total_s["saving"],
            peak_memory_bytes=memory,
            best_val_loss=best_val_loss,
            best_iter=best.step if best else None,
        )
        if self.dist.is_first:
            print_next_commands(self.config, state, stop)
        return best_val_loss


def open_log(config: Config, state: TrainState) -> RunLog:
    """Return the log of this run; move an earlier run in out_dir aside. Other ranks and eval_only write no file."""
    dist = state.dist
    if not dist.is_first or config.eval_only:
        return RunLog(None)
    wandb_run = None
    if config.wandb_log:
        wandb_run = start_wandb(config.wandb_project, config.wandb_run_name, asdict(config), state.wandb_run_id)
    out_dir = store.folder_of(config.out_dir)
    if config.init_from != "resume":
        old = store.set_aside(out_dir, (store.NAME, store.BEST, "log.jsonl"))
        if old:
            dist.print0(f"{out_dir} held an earlier run; it is now in {old}")
    return RunLog(out_dir / "log.jsonl", wandb_run)


def print_next_commands(config: Config, state: TrainState, stop: str | None) -> None:
    """Print the best model on the disk, and the commands to sample from it, to resume and to compare."""
    print0 = state.dist.print0
    out_dir = store.folder_of(config.out_dir)
    checkpoints = store.candidates(out_dir)
    if not checkpoints:
        print0(f"no checkpoint was saved in {out_dir}")
        return
    model = checkpoints[-1]
    kind = "best model" if model.name == store.BEST else "last model"
    print0(f"{kind} of step {store.load(model, checksums=False).iter_num}: {model}")
    chat = ["--chat"] if state.data.chat is not None else []
    print0("sample:  " + shlex.join(["python", "sample.py", f"--out_dir={model}", "--num_samples=3", *chat]))
    print0("page:    " + shlex.join(["python", "sample.py", f"--out_dir={model}", "--serve", *chat]))
    # The settings that the checkpoint does not give, and those without which a resumed run would have nothing to do.
    more = [f"--{name}={value}" for name, value in sensitive(asdict(config)).items()]
    label = "resume:  "
    if state.step >= state.schedule.max_iters:
        label = "train longer: "
        more.append(f"--max_iters={2 * state.step}")
        if config.decay_lr and not state.schedule.lr_decay_iters:  # the learning rate's end moves, too
            more.append("--resume_changed=True")
    elif stop == "patience":
        more.append("--patience=0")
    launcher = f"torchrun --standalone --nproc_per_node={state.dist.world}" if state.dist.distributed else "python"
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":  # several machines: torchrun's options have their addresses
        launcher = "torchrun (with its options as before)"
    print0(f"{label}{launcher} " + shlex.join(["train.py", "--init_from=resume", f"--out_dir={out_dir}", *more]))
    print0("report:  " + shlex.join(["python", "bench/report.py", str(out_dir)]))
    print0("compare: " + shlex.join(["python", "bench/compare.py", str(out_dir), "OTHER_OUT_DIR"]))
