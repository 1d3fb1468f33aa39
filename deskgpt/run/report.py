"""Metrics of a run: lines on the terminal, events in log.jsonl. And the screen at its end."""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deskgpt.checkpoint import store
from deskgpt.compute import compiling, sharding
from deskgpt.compute.evaluation import Evaluation
from deskgpt.run.diagnosis import without_improvement
from deskgpt.run.log import RunLog, start_wandb
from deskgpt.run.loss_band import band_of
from deskgpt.run.schedule import Config
from deskgpt.run.settings import sensitive
from deskgpt.run.timer import StepTimer
from deskgpt.run.train_state import TrainState
from deskgpt.system import hardware, peaks
from deskgpt.system.terminal import clock, millions


class Report:
    """Prints and logs what happens.

    A number that `step` is given under any name goes to the terminal, to log.jsonl, to Weights & Biases and to the page
    of bench/report.py.
    """

    def __init__(self, config: Config, state: TrainState, forgets_best: bool) -> None:
        """forgets_best: earlier val losses come from another evaluation, and are not compared."""
        self.config = config
        self.state = state
        self.data = state.data
        self.dist = state.dist
        self.print0 = state.dist.print0
        self.timer = StepTimer(self.dist.device, compiling.spent_s if state.variant.compiled else lambda: 0.0)
        self.log = open_log(config, state, forgets_best)
        self.counts = dict.fromkeys(("bad_step", "spike", "rewind"), 0)  # in this process, for the end of the run
        self.warm_up_s = 0.0
        self.flops_per_token = state.model.estimate_flops()
        self._grad_norms: list[Tensor] = []  # of the steps since the last log line, still on the device
        dtype = state.variant.dtype
        peak, self.peak_source = peaks.peak_flops(self.dist.device, dtype)
        measured = peaks.measured_matmul_flops(self.dist.device, dtype)
        of_all_ranks = self.dist.sum(torch.tensor([peak, measured], dtype=torch.float64))
        self.peak_flops, self.measured_flops = of_all_ranks.tolist()

    @property
    def wandb_run_id(self) -> str | None:
        """Return the id of the Weights & Biases run, which a resumed run continues."""
        return self.log.wandb_run.id if self.log.wandb_run else self.state.wandb_run_id

    # ---- the beginning -----------------------------------------------------------------------------------

    def start(self, started: float) -> None:
        """Print and log what runs, and on what; from here on, steps are timed. started: when the run began."""
        state = self.state
        device = self.dist.device
        variant = state.variant
        batching = state.batching
        name = hardware.device_name(device)
        for line in self.data.lines(batching, reads_text=self.dist.is_first):
            self.print0(line)
        parameters = millions(state.model.num_params())
        self.print0(f"number of parameters: {parameters}, {self.flops_per_token / 1e6:.2f} MFLOPs per token")
        shards = sharding.describe_shards(self.config.dp_shard, self.dist.world)
        self.print0(f"device: {self.dist.world} x {name}, {variant}{shards}")
        peak = f"{self.peak_flops / 1e12:.2f} TFLOP/s ({self.peak_source})"
        self.warm_up_s = time.perf_counter() - started
        self.print0(f"mfu refers to {peak}; warm-up took {self.warm_up_s:.1f}s")
        self.print0(f"tokens per iteration will be: {batching.tokens_per_step:,}")
        for line in state.schedule.warnings():
            self.print0(f"warning: {line}")
        self.log.write(
            "start",
            settings=state.settings_now(),
            iter=state.step,
            model_args=asdict(state.model.config),
            parameters=state.model.num_params(),
            flops_per_token=self.flops_per_token,
            tokens_per_step=batching.tokens_per_step,
            **self.data.log_metadata(),
            device=name,
            world_size=self.dist.world,
            dtype=variant.dtype,
            residual_dtype=variant.residual_dtype,
            compiled=variant.compiled,
            cpu_kernels=variant.cpu_kernels,
            fp8=variant.fp8,
            peak_flops=self.peak_flops,
            peak_source=self.peak_source,
            measured_flops=self.measured_flops,
            warm_up_s=self.warm_up_s,
            versions=state.metadata["versions"],
            git_commit=state.metadata["code"],
        )
        self.timer.start()

    # ---- steps -------------------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Return whether this step has a line."""
        return step % self.config.log_interval == 0 or step == self.state.schedule.max_iters - 1

    def step(
        self, step: int, lr: float, tokens: int, loss: Tensor, grad_norm: Tensor, **numbers: Tensor | float
    ) -> None:
        """Print and log the line of a step that is done, if it has one.

        tokens: that all ranks trained on. loss, grad_norm and numbers by name are floats or 0-d tensors; tensors are
        averaged over ranks.
        """
        self.timer.step_done(tokens)
        self._grad_norms.append(grad_norm.detach())
        if not self.is_due(step):
            return
        step_s, tokens_per_s, data_wait = self.timer.end_window()
        mean_loss = self._mean(loss)
        norms, self._grad_norms = torch.stack(self._grad_norms).tolist(), []
        own = {name: self._mean(value) for name, value in numbers.items()}
        mfu = tokens_per_s * self.flops_per_token / self.peak_flops
        mfu_measured = tokens_per_s * self.flops_per_token / self.measured_flops
        has_two_peaks = math.isfinite(self.measured_flops) and self.measured_flops != self.peak_flops
        on_measured = f"mfu_measured {mfu_measured * 100:.2f}%, " if has_two_peaks else ""
        more = "".join(f", {name} {value:.6g}" for name, value in own.items())
        self.print0(
            f"iter {step}: loss {mean_loss:.4f}, time {step_s * 1e3:.2f}ms, mfu {mfu * 100:.2f}%, "
            f"tok/s {tokens_per_s:,.0f}, {on_measured}lr {lr:.3e}, grad_norm {norms[-1]:.3f}, "
            f"data wait {data_wait * 100:.1f}%, eta {clock(self._left_s(step, step_s))}{more}"
        )
        known = {
            "iter": step,
            "loss": mean_loss,
            "time_ms": step_s * 1e3,
            "mfu": mfu,
            "mfu_measured": mfu_measured,
            "tokens_per_s": tokens_per_s,
            "data_wait": data_wait,
            "lr": lr,
            "grad_norm": norms[-1],
            "clip_rate": share_above(self.config.grad_clip, norms),
            "tokens": (step + 1) * self.state.batching.tokens_per_step,
            "train_s": self.timer.train_s(),
            "peak_memory_bytes": hardware.peak_memory_bytes(self.dist.device),
        }
        for name in own.keys() & known.keys():
            raise ValueError(f"the log has a number {name!r} already: give yours another name in report.step")
        self.log.write("iter", **own, **known)

    def _mean(self, value: Tensor | float) -> float:
        """Return a tensor's mean over the ranks; a float as it is."""
        if not isinstance(value, Tensor):
            return float(value)
        value = sharding.unsharded(value.detach()).cpu().double()  # mps has no float64
        return self.dist.sum(value).item() / self.dist.world

    def _left_s(self, step: int, step_s: float) -> float:
        end = self.state.schedule.max_iters
        interval = self.config.eval_interval
        evaluations = math.ceil(end / interval) - step // interval
        between_s = sum(self.timer.last_s.values())
        return (end - step - 1) * step_s + evaluations * between_s

    def event(self, kind: str, text: str, /, **fields: Any) -> None:
        """Print a line, if there is a text, and log an event of this kind, such as a spike."""
        if text:
            self.print0(text)
        self.log.write(kind, **fields)
        if kind in self.counts:
            self.counts[kind] += 1

    # ---- evaluations and saves ---------------------------------------------------------------------------

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Time an evaluation."""
        with self.timer.spent_on("evaluation"):
            yield

    def warn(self, lines: list[str]) -> None:
        for line in lines:
            self.event("warning", f"warning: {line}", iter=self.state.step, text=line)

    def evaluation(self, train: Evaluation, val: Evaluation, lr: float, texts: list[str]) -> None:
        """Print and log an evaluation. texts: samples of the model."""
        step = self.state.step
        eval_s = self.timer.last_s["evaluation"]
        val_bpb = self.data.bits_per_byte(val.loss)
        error = "" if val.standard_error is None else f", standard error {val.standard_error:.4f}"
        bits = "" if val_bpb is None else f", bits per byte {val_bpb:.4f}"
        self.event(
            "eval",
            f"step {step}: train loss {train.loss:.4f}, val loss {val.loss:.4f}, eval time {eval_s:.2f}s{error}{bits}",
            iter=step,
            train_loss=train.loss,
            val_loss=val.loss,
            val_se=val.standard_error,
            val_bpb=val_bpb,
            lr=lr,
            tokens=step * self.state.batching.tokens_per_step,
            train_s=self.timer.train_s(),
            eval_s=eval_s,
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
        config, state, timer = self.config, self.state, self.timer
        bad, spikes, rewinds = self.counts["bad_step"], self.counts["spike"], self.counts["rewind"]
        best = min(state.evaluations, key=lambda e: e.val_loss, default=None)
        best_val_loss = best.val_loss if best else math.inf
        if config.eval_only:
            return best_val_loss
        if stop == "patience":
            n = without_improvement(state.evaluations)
            at = best.step if best else 0
            self.print0(
                f"patience={config.patience}: the last {n} evaluations improved by no more than the standard error; "
                f"the lowest val loss was {best_val_loss:.4f} at step {at}"
            )
        elif stop and state.step > 0:
            self.print0(f"stopped by {stop} at step {state.step}")
        memory = hardware.peak_memory_bytes(self.dist.device)
        memory_gib = "n/a" if memory is None else f"{memory / 2**30:.2f} GiB"
        self.print0(
            f"{state.step - state.first_step} steps: {clock(timer.train_s())} of training ({clock(timer.wait_s)} "
            f"waiting for data), {clock(timer.total_s['evaluation'])} of evaluation, {clock(timer.total_s['saving'])} "
            f"of saving; warm-up {clock(self.warm_up_s)}; peak memory {memory_gib}; best val loss "
            f"{best_val_loss:.4f}"
        )
        if bad or spikes:
            self.print0(f"{bad} steps without an update, {spikes} loss spikes, {rewinds} rewinds")
        verdict = compare_with_band(state)
        if verdict:
            self.print0(verdict)
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
            bad_steps=bad,
            spikes=spikes,
            rewinds=rewinds,
        )
        if self.dist.is_first:
            print_next_commands(config, state)
        return best_val_loss


def share_above(limit: float, norms: list[float]) -> float | None:
    """Return the share of the finite gradient norms that were clipped; None without any, or without a limit (0)."""
    finite = [norm for norm in norms if math.isfinite(norm)]
    if not finite or not limit:
        return None
    return sum(norm > limit for norm in finite) / len(finite)


def open_log(config: Config, state: TrainState, forgets_best: bool) -> RunLog:
    """Return the log of this run; move an earlier run in out_dir aside. Other ranks and eval_only write no file."""
    dist = state.dist
    if not dist.is_first or config.eval_only:
        return RunLog(None)
    wandb_run = None
    if config.wandb_log:
        wandb_run = start_wandb(config.wandb_project, config.wandb_run_name, asdict(config), state.wandb_run_id)
    out_dir = store.folder_of(config.out_dir)
    if config.init_from != "resume":
        found = tuple(path.name for path in store.candidates(out_dir))
        old = store.set_aside(out_dir, (*found, "log.jsonl"))
        if old:
            dist.print0(f"{out_dir} held an earlier run; it is now in {old}")
    elif forgets_best:
        best = store.best_of(out_dir)
        is_last = store.candidates(out_dir) == [out_dir / store.BEST]  # from which the run resumes
        old = store.set_aside(out_dir, (store.BEST,)) if best and not is_last else None
        kept = f"; {store.BEST} is now in {old}" if old else ""
        dist.print0(f"the best val loss begins anew, because earlier losses come from another evaluation{kept}")
    return RunLog(out_dir / "log.jsonl", wandb_run)


def compare_with_band(state: TrainState) -> str:
    """Compare the val losses with those of other runs like this one; return "" if no such runs are known."""
    data = state.metadata
    experiment = (state.settings_now(), data["val data"]["fingerprint"], data["train data"]["tokens"])
    band = band_of(*experiment)
    return band.verdict({e.step: e.val_loss for e in state.evaluations}) if band else ""


def print_next_commands(config: Config, state: TrainState) -> None:
    """Print the best model on the disk, and the commands to sample from it, to resume and to compare."""
    print0 = state.dist.print0
    out_dir = store.folder_of(config.out_dir)
    best = store.best_of(out_dir)
    model = best or next(iter(store.candidates(out_dir)), None)
    if model is None:
        print0(f"no checkpoint was saved in {out_dir}")
        return
    kind = "best model" if best else "last model"
    print0(f"{kind} of step {store.load(model, checksums=False).iter_num}: {model}")
    chat = ["--chat"] if state.data.chat is not None else []
    print0("sample:  " + command("python", "sample.py", f"--out_dir={model}", *chat))
    # The settings that the checkpoint does not give, and those without which a resumed run would have nothing to do.
    more = [f"--{name}={value}" for name, value in sensitive(asdict(config)).items()]
    is_longer = state.step >= state.schedule.max_iters
    has_other_end = is_longer and config.decay_lr and not state.schedule.lr_decay_iters
    if is_longer:
        more.append(f"--max_iters={2 * state.step}")
    elif 0 < config.patience <= without_improvement(state.evaluations):
        more.append("--patience=0")
    if has_other_end:
        more.append("--resume_changed=True")
    launcher = "python"
    if state.dist.distributed:
        launcher = f"torchrun --standalone --nproc_per_node={state.dist.world}"
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":  # several machines: torchrun's options have their addresses
        launcher = "torchrun (with its options as before)"
    script = command("train.py", "--init_from=resume", f"--out_dir={out_dir}", *more)
    print0(f"resume:  {launcher} {script}")
    if has_other_end:
        print0("         a longer run changes the learning rate; --resume_changed=True turns off the check for that")
    print0("report:  " + command("python", "bench/report.py", out_dir))
    print0("compare: " + command("python", "bench/compare.py", out_dir, "OTHER_OUT_DIR"))


def command(*words: str | Path) -> str:
    """Return a line to type in this system's shell."""
    texts = [str(word) for word in words]
    return subprocess.list2cmdline(texts) if sys.platform == "win32" else shlex.join(texts)
