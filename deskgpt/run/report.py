"""What a run says on the terminal and writes to log.jsonl, and how its time is counted."""

from __future__ import annotations

import math
import os
import re
import shlex
import string
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deskgpt.checkpoint import store
from deskgpt.compute import compiling, sharding
from deskgpt.compute.batching import Batching
from deskgpt.compute.runner import Evaluation
from deskgpt.run.diagnosis import bad_parameters, clip_rate, lowest, overfit, without_improvement
from deskgpt.run.log import RunLog
from deskgpt.run.loss_band import band_of
from deskgpt.run.resuming import said_again
from deskgpt.run.timer import StepTimer
from deskgpt.run.train_state import Run
from deskgpt.system import hardware, peak_flops
from deskgpt.system.formatting import clock, millions
from deskgpt.system.terminal import not_silent


@dataclass(frozen=True)
class Step:
    """The numbers of an optimizer step."""

    step: int
    position: int  # of its global batch in the order of batches
    loss: float  # mean over all micro-batches and ranks
    grad_norm: float  # before clipping
    norms: list[float]  # of each parameter's gradient, in the order of the model's parameters
    bad: bool = False  # its gradients were not finite, and nothing was changed


class Report:
    """Lines on the terminal, events in log.jsonl.

    A number that `step` is given under any name goes to both, to Weights & Biases and to the page of bench/report.py.
    """

    def __init__(
        self, run: Run, log: RunLog, batching: Batching, places: Callable[[int], dict[str, list[int]]]
    ) -> None:
        """places: by token file, where the windows of the global batch at a position begin."""
        self.run = run
        self.log = log
        self.ranks = ranks = run.ranks
        self.batching = batching
        self.places = places
        self.timer = StepTimer(ranks.device)
        self.out_dir = store.folder_of(run.settings["out_dir"])
        self.last: Step | None = None
        self.n_bad = self.n_spikes = self.n_rewinds = 0
        self._norms_since_log: list[float] = []
        self.warm_up_s = 0.0
        self.flops_per_token = run.runner.model.estimate_flops()
        form = run.runner.form
        peak, self.peak_source = peak_flops.peak_flops(ranks.device, form.dtype)
        measured = peak_flops.measured_matmul_flops(ranks.device, form.dtype)
        of_all_ranks = ranks.sum(torch.tensor([peak, measured], dtype=torch.float64))
        self.peak_flops, self.measured_flops = of_all_ranks.tolist()

    # ---- the beginning -----------------------------------------------------------------------------------

    def start(self, about_data: list[str], facts: dict[str, Any], warm_up_s: float) -> None:
        """about_data: lines. facts: further ones for the log."""
        run = self.run
        settings = run.settings
        print0 = self.ranks.print0
        device = self.ranks.device
        form = run.runner.form
        model = run.runner.model
        compiler = compiling.compiler_name(device) if form.compiled else None
        by = re.sub(r" \(.*?\)", "", f" by {compiler}") if compiler else ""  # "g++ 12.2.0", without its package's name
        name = hardware.device_name(device)
        self.warm_up_s = warm_up_s
        for line in about_data:
            print0(line)
        print0(
            f"number of parameters: {millions(model.num_params())}, {self.flops_per_token / 1e6:.2f} MFLOPs per token"
        )
        shards = sharding.describe_shards(settings["dp_shard"], self.ranks.world)
        print0(f"device: {self.ranks.world} x {name}, {form}{by}{shards}")
        print0(
            f"mfu refers to {self.peak_flops / 1e12:.2f} TFLOP/s ({self.peak_source}); warm-up took {warm_up_s:.1f}s"
        )
        print0(f"tokens per iteration will be: {self.batching.tokens_per_step:,}")
        self.log.write(
            "start",
            settings=settings,
            iter=run.step,
            model_args=asdict(model.config),
            parameters=model.num_params(),
            flops_per_token=self.flops_per_token,
            tokens_per_step=self.batching.tokens_per_step,
            **facts,
            device=name,
            cpu=hardware.cpu_facts() if device.type == "cpu" else None,
            world_size=self.ranks.world,
            dtype=form.dtype,
            compiled=form.compiled,
            attention=form.attention,
            compiler=compiler,
            peak_flops=self.peak_flops,
            peak_source=self.peak_source,
            measured_flops=self.measured_flops,
            warm_up_s=warm_up_s,
            versions=run.facts["versions"],
            git_commit=run.facts["code"],
        )

    # ---- steps -------------------------------------------------------------------------------------------

    def is_due(self) -> bool:
        """Whether this step has a line."""
        settings = self.run.settings
        step = self.run.step
        return step % settings["log_interval"] == 0 or step == settings["max_iters"] - 1

    def saw(self, step: Step) -> None:
        """The numbers of a step that has been fetched from the device, whether it has a line or not."""
        self.last = step
        self._norms_since_log.append(step.grad_norm)

    def step(self, **numbers: Tensor | float) -> None:
        """A step is done; its line, where it has one. numbers: by name, plain or tensors (), means over ranks to be.

        Under loss and grad_norm, the log gets what `saw` has been told.
        """
        self.timer.step_done()
        if not self.is_due() or self.last is None:
            return
        window = self.timer.end_window()
        run = self.run
        loss = self.last.loss
        grad_norm = self.last.grad_norm
        own = {name: self._mean(value) for name, value in numbers.items() if name not in ("loss", "grad_norm")}
        lr = own.pop("lr")
        tokens_per_s = self.batching.tokens_per_step / window.step_s
        mfu = tokens_per_s * self.flops_per_token / self.peak_flops
        mfu_measured = tokens_per_s * self.flops_per_token / self.measured_flops
        has_two_peaks = math.isfinite(self.measured_flops) and self.measured_flops != self.peak_flops
        on_measured = f"mfu_measured {mfu_measured * 100:.2f}%, " if has_two_peaks else ""
        more = "".join(f", {name} {value:.6g}" for name, value in own.items())
        self.ranks.print0(
            f"iter {run.step}: loss {loss:.4f}, time {window.step_s * 1e3:.2f}ms, mfu {mfu * 100:.2f}%, "
            f"tok/s {tokens_per_s:,.0f}, {on_measured}lr {lr:.3e}, grad_norm {grad_norm:.3f}, "
            f"data wait {window.data_wait * 100:.1f}%, eta {clock(self._left_s(window.step_s))}{more}"
        )
        known = {
            "iter": run.step,
            "loss": loss,
            "time_ms": window.step_s * 1e3,
            "mfu": mfu,
            "mfu_measured": mfu_measured,
            "tokens_per_s": tokens_per_s,
            "data_wait": window.data_wait,
            "lr": lr,
            "grad_norm": grad_norm,
            "clip_rate": clip_rate(self._norms_since_log, run.settings["grad_clip"]),
            "tokens": (run.step + 1) * self.batching.tokens_per_step,
            "train_s": self.timer.train_s,
            "peak_memory_bytes": hardware.peak_memory_bytes(self.ranks.device),
        }
        self.log.write("iter", **own, **known)  # which refuses a name twice
        self._norms_since_log = []

    def _mean(self, value: Tensor | float) -> float:
        """A tensor's mean over the ranks; a plain number as it is."""
        if not isinstance(value, Tensor):
            return float(value)
        value = sharding.whole(value.detach()).cpu().to(torch.float64, copy=True)  # mps has no float64
        return self.ranks.sum(value).item() / self.ranks.world

    def _left_s(self, step_s: float) -> float:
        settings = self.run.settings
        step = self.run.step
        evaluations = math.ceil(settings["max_iters"] / settings["eval_interval"]) - step // settings["eval_interval"]
        between_s = self.timer.last_eval_s + self.timer.last_save_s
        return (settings["max_iters"] - step - 1) * step_s + evaluations * between_s

    def bad_step(self, bad: Step) -> None:
        self.n_bad += 1
        which = bad_parameters(bad.norms, self.run.runner.names)
        self.ranks.print0(f"step {bad.step}: gradients are not finite ({which}): no update; {self.rows(bad.position)}")
        scaler = self.run.runner.scaler
        self.log.write(
            "bad_step",
            iter=bad.step,
            loss=bad.loss,
            which=which,
            loss_scale=scaler.get_scale() if scaler.is_enabled() else None,
            **self.windows(bad.position),
        )

    def spike(self, at: Step, median: float) -> None:
        """median: of the losses of the steps before."""
        self.n_spikes += 1
        rows = self.rows(at.position)
        self.ranks.print0(f"step {at.step}: loss spike, {at.loss:.4f} after a median of {median:.4f}; {rows}")
        self.log.write("spike", iter=at.step, loss=at.loss, median=median, **self.windows(at.position))

    def rewind(self, spike: Step) -> None:
        self.n_rewinds += 1
        step = self.run.step
        skipped = self.run.skipped_batches
        self.ranks.print0(f"back to step {step}; the batches of steps {step} to {spike.step} are skipped")
        self.log.write("rewind", iter=step, spike=spike.step, skipped_batches=skipped)

    def rows(self, position: int) -> str:
        first, last = self.windows(position)["rows"]
        return f"its batch has rows {first:,} to {last:,}, see log.jsonl"

    def windows(self, position: int) -> dict[str, Any]:
        """Which rows of all batches a global batch has, and where in which token file their windows begin."""
        first = position * self.batching.sequences
        return {"rows": [first, first + self.batching.sequences - 1], "windows": self.places(position)}

    # ---- evaluations -------------------------------------------------------------------------------------

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Times an evaluation and says now and then that it goes on. A terminal shows a progress bar instead."""
        is_shown = sys.stderr.isatty()
        with self.timer.evaluation(), nullcontext() if is_shown else not_silent("still evaluating", self.ranks.print0):
            yield

    def warn(self, lines: list[str]) -> None:
        for line in lines:
            self.ranks.print0(f"warning: {line}")

    def evaluation(
        self, train: Evaluation, val: Evaluation, val_bpb: float | None, lr: float, texts: list[str]
    ) -> None:
        """val_bpb: the val loss in bits per byte, where that is known. texts: samples of the model."""
        step = self.run.step
        eval_s = self.timer.last_eval_s
        self.log.write(
            "eval",
            iter=step,
            train_loss=train.loss,
            val_loss=val.loss,
            val_se=val.standard_error,
            val_bpb=val_bpb,
            lr=lr,
            tokens=step * self.batching.tokens_per_step,
            train_s=self.timer.trained_s(),
            eval_s=eval_s,
        )
        error = "" if val.standard_error is None else f", standard error {val.standard_error:.4f}"
        bits = "" if val_bpb is None else f", bits per byte {val_bpb:.4f}"
        self.ranks.print0(
            f"step {step}: train loss {train.loss:.4f}, val loss {val.loss:.4f}, eval time {eval_s:.2f}s{error}{bits}"
        )
        if texts:
            self.log.write("sample", iter=step, texts=texts)
        if math.isfinite(val.loss):
            self._overfitting()

    def _overfitting(self) -> None:
        """Says so when the val loss has begun to rise while the train loss falls."""
        evaluations = self.run.evaluations
        now = overfit(evaluations)
        if now is None or self.run.is_repeated or overfit(evaluations[:-1]) is not None:
            return
        step, rise = now
        self.ranks.print0(
            f"overfitting: the val loss has risen by {rise:.4f} since step {step}, while the train loss has fallen; "
            "more data, --dropout or a smaller model may help"
        )
        self.log.write("overfit", iter=evaluations[-1].step, best_iter=step, rise=rise)

    def saved(self, step: int, best: bool, save_s: float | None, write_s: float) -> None:
        """save_s: what it cost the loop; write_s: until the files were durable."""
        self.log.write("save", iter=step, best=best, save_s=save_s, write_s=write_s)

    # ---- the end -----------------------------------------------------------------------------------------

    def end(self, stop: str | None, out_of_patience: bool, kept: Path | None) -> None:
        """One screen: why it ends, where the time went, what is best and where it is, and what can be done next.

        stop: what ended the run before its last step. kept: the latest checkpoint.
        """
        run = self.run
        timer = self.timer
        print0 = self.ranks.print0
        if out_of_patience:
            n = without_improvement(run.evaluations)
            best = lowest(run.evaluations)
            print0(
                f"patience={run.settings['patience']}: the last {n} evaluations improved by no more than the standard "
                f"error; the lowest val loss was {best.val_loss:.4f} at step {best.step}"
            )
        if stop and run.step > 0:
            print0(f"stopped by {stop} at step {run.step}")
        memory = hardware.peak_memory_bytes(self.ranks.device)
        memory_gib = "n/a" if memory is None else f"{memory / 2**30:.2f} GiB"
        print0(
            f"{run.step - run.first_step} steps: {clock(timer.train_s)} of training ({clock(timer.wait_s)} waiting for "
            f"data), {clock(timer.eval_s)} of evaluation, {clock(timer.save_s)} of saving; "
            f"warm-up {clock(self.warm_up_s)}; peak memory {memory_gib}; best val loss {run.best_val_loss:.4f}"
        )
        if self.n_bad or self.n_spikes:
            print0(f"{self.n_bad} steps without an update, {self.n_spikes} loss spikes, {self.n_rewinds} rewinds")
        self._as_usual()
        found = [e.step for e in run.evaluations if e.val_loss == run.best_val_loss]
        best_step = found[0] if found else None  # unknown where an older checkpoint has only the loss
        if kept is not None:
            self._next_commands(kept, best_step)
        self.log.write(
            "end",
            iter=run.step,
            train_s=timer.train_s,
            data_wait_s=timer.wait_s,
            eval_s=timer.eval_s,
            save_s=timer.save_s,
            peak_memory_bytes=memory,
            best_val_loss=run.best_val_loss,
            best_iter=best_step,
            bad_steps=self.n_bad,
            spikes=self.n_spikes,
            rewinds=self.n_rewinds,
        )

    def _as_usual(self) -> None:
        """Says whether the val losses are those of other runs like this one, where such runs are known."""
        facts = self.run.facts
        band = band_of(self.run.settings, facts["val data"]["fingerprint"], facts["train data"]["tokens"])
        verdict = band.verdict({e.step: e.val_loss for e in self.run.evaluations}) if band else ""
        if verdict:
            self.ranks.print0(verdict)

    def _next_commands(self, kept: Path, best_step: int | None) -> None:
        """Where the best model is, and the commands to sample from it, to go on and to compare."""
        run = self.run
        settings = run.settings
        print0 = self.ranks.print0
        best = store.best_of(self.out_dir) or kept
        of_step = "" if best_step is None else f" of step {best_step}"
        print0(f"best model{of_step}: {best}")
        chat = ["--chat"] if run.chat is not None else []
        print0("sample:  " + command("python", "sample.py", f"--out_dir={best}", *chat))
        more = []  # the settings without which a resumed run would have nothing to do
        if 0 < settings["patience"] <= without_improvement(run.evaluations):
            more = ["--patience=0"]
        if run.step >= settings["max_iters"]:
            more = [f"--max_iters={2 * run.step}"]
            if settings["decay_lr"] and not settings["lr_decay_iters"]:  # the schedule gets another end
                more.append("--resume_changed=True")
        print0("resume:  " + self._resume_command(*more))
        if "--resume_changed=True" in more:
            print0(
                "         a longer run changes the learning rate; --resume_changed=True turns off the check for that"
            )
        print0("compare: " + command("python", "bench/compare.py", str(self.out_dir), "OTHER_OUT_DIR"))

    def _resume_command(self, *more: str) -> str:
        """What to type to go on with this run; the checkpoint knows most of its settings. more: further settings."""
        again = [f"--{name}={value}" for name, value in said_again(self.run.settings).items()]
        script = command("train.py", "--init_from=resume", f"--out_dir={self.out_dir}", *again, *more)
        if not self.ranks.distributed:
            return f"python {script}"
        if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":  # several machines: torchrun's options have their addresses
            return f"torchrun (with its options as before) {script}"
        return f"torchrun --standalone --nproc_per_node={self.ranks.world} {script}"


def command(*words: str) -> str:
    """A line to type in this system's shell."""
    return subprocess.list2cmdline(words) if sys.platform == "win32" else " ".join(map(quoted, words))


def quoted(word: str) -> str:
    """A word for a POSIX shell; what the terminal would not show as it is, as bytes, which bash and zsh read."""
    encoding = sys.stdout.encoding or "utf-8"
    if word.isprintable() and word.encode(encoding, "replace").decode(encoding) == word:
        return shlex.quote(word)
    plain = string.ascii_letters + string.digits + "-_./=:,+@%"
    escaped = [chr(byte) if chr(byte) in plain else f"\\x{byte:02x}" for byte in os.fsencode(word)]
    return f"$'{''.join(escaped)}'"
