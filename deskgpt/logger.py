"""Metrics of a run: the time of its steps, lines on the terminal, events in log.jsonl, Weights &
Biases.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from data.batches import Loader
from deskgpt import device as machine
from deskgpt.checkpoint import CKPT, CKPT_BEST, archive_previous_run, run_folder
from deskgpt.compiling import compile_s
from deskgpt.device import DeferredCalls, copy_to_host, peak_memory_bytes, synchronize
from deskgpt.distributed import shards_of, unsharded
from deskgpt.errors import clock, millions, reason
from deskgpt.evaluation import Evaluation
from deskgpt.files import check_not_replaced, note_once, read_small
from deskgpt.resume import StartSettings
from deskgpt.stopping import StopConditions, StopSettings
from deskgpt.train_state import TrainState

# ---- the time of steps ---------------------------------------------------------------------------


class LogWindow(NamedTuple):
    """The steps from one log line to the next."""

    steps: int
    tokens: int  # over all ranks
    seconds: float
    wait_s: float  # the part of them that was spent waiting for data


class StepTimer:
    """Seconds of a run by their use: training steps, evaluation, saving, waiting for data.

    Its clock is read when the device has finished all queued work, and stands still while
    torch.compile compiles. Steps are timed from the moment when it is made, without the blocks of
    `timed`, even if these raise.
    """

    def __init__(
        self, device: torch.device, compile_s: Callable[[], float], wait_s: Callable[[], float]
    ) -> None:
        """compile_s, wait_s: return the seconds so far of compiling, and of waiting for data."""
        self.device = device
        self._compile_s = compile_s
        self._wait_s = wait_s
        self.total_s = {"evaluation": 0.0, "saving": 0.0}
        self.last_s = dict(self.total_s)
        self._started_at = self._now()
        self.window_ended_s = 0.0  # training time at the end of the last window
        self._window_wait_s = 0.0  # wait for data by then

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter() - self._compile_s()

    def train_s(self) -> float:
        """Return the seconds of all steps so far, the wait for data included. Do not call it within
        a block of `timed`.
        """
        return self._now() - self._started_at - sum(self.total_s.values())

    def spent_s(self) -> tuple[float, float]:
        """Return the seconds of compiling and of waiting for data so far, for `log_window`."""
        return self._compile_s(), self._wait_s()

    def log_window(
        self, steps: int, tokens: int, done_at: float, spent_s: tuple[float, float]
    ) -> LogWindow:
        """Return the steps since the last call.

        done_at: when the device had done the last of them. spent_s: by the time that it was queued.
        """
        compile_s, total_wait_s = spent_s
        now_s = done_at - compile_s - self._started_at - sum(self.total_s.values())
        window_s = now_s - self.window_ended_s
        wait_s = total_wait_s - self._window_wait_s
        self.window_ended_s = now_s
        self._window_wait_s = total_wait_s
        return LogWindow(steps, tokens, window_s, wait_s)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Time evaluation or saving."""
        began = self._now()
        try:
            yield
        finally:
            self.last_s[what] = self._now() - began
            self.total_s[what] += self.last_s[what]


# ---- lines and events ----------------------------------------------------------------------------


# A number of a step: a float, a 0-d tensor, or a function of the steps since the last line.
Number = float | Tensor | Callable[[LogWindow], float]
# The numbers that main gives the log of each step, and those that the log adds.
STEP_NUMBERS = {"loss", "lr", "grad_norm", "tokens_per_s", "mfu"}
RESERVED_FIELDS = {
    "event",
    "iter",
    "time_ms",
    "data_wait",
    "clip_rate",
    "tokens",
    "train_s",
    "peak_memory_bytes",
}
STEP_FIELDS = STEP_NUMBERS | RESERVED_FIELDS


class LogSettings(StartSettings, StopSettings, Protocol):
    """The settings of train.py that this file reads, beside those of a start and a stop."""

    @property
    def log_interval(self) -> int: ...
    @property
    def grad_clip(self) -> float: ...
    @property
    def wandb_log(self) -> bool: ...


class RunLogger:
    """Prints and logs what happens.

    A number that `step` is given under any name goes to the terminal, to log.jsonl, to Weights &
    Biases and to the page of bench/report.py.
    """

    def __init__(
        self, config: LogSettings, state: TrainState, stop: StopConditions, loader: Loader
    ) -> None:
        """Print and log the run and its machine. From here on, steps are timed."""
        from deskgpt.peaks import peak_flops

        self.config = config
        self.state = state
        self.loader = loader
        self.data = state.data
        self.dist = state.dist
        self.print0 = state.dist.print0
        # The lines whose numbers are still on the device.
        self.deferred = DeferredCalls(self.dist.device)
        self.log = open_log(config, state)
        if self.log.wandb_run:
            state.wandb_run_id = self.log.wandb_run.id
        self._ends_at = min(stop.max_minutes_end, stop.max_hours_end)
        self.flops_per_token = state.model.estimate_flops()
        # Those of the steps since the last log line, still on the device.
        self._grad_norms: list[Tensor] = []
        self._tokens = 0  # in these steps
        peak, peak_source = peak_flops(self.dist.device, state.compute.dtype)
        # The sum over all ranks.
        self.peak_flops = self.dist.sum(torch.tensor(peak, dtype=torch.float64)).item()
        self.warm_up_s = time.perf_counter() - stop.started
        self._print_start(peak_source)
        self.timer = StepTimer(
            self.dist.device,
            lambda: compile_s() if state.compute.compiled else 0.0,
            lambda: loader.wait_s,
        )

    # ---- the beginning ---------------------------------------------------------------------------

    def _print_start(self, peak_source: str) -> None:
        state = self.state
        compute = state.compute
        batching = state.batching
        for line in self.data.lines(batching, reads_text=self.dist.is_first):
            self.print0(line)
        self.print0(f"number of parameters: {millions(state.model.num_params())}")
        shards = shards_of(self.config.dp_shard, self.dist.world)
        sharded = f"; weights sharded among {shards}" if shards > 1 else ""
        # Cards of a run can differ: name each kind once.
        names = dict.fromkeys(self.dist.gather(machine.device_name(self.dist.device)))
        device = " + ".join(names)
        self.print0(f"device: {self.dist.world} x {device}{sharded}")
        self.print0(f"computed in {compute}")
        if variables := machine.torch_variables():
            self.print0(f"variables that change how torch computes:{variables}")
        self.print0(f"mfu refers to {self.peak_flops / 1e12:.2f} TFLOP/s ({peak_source})")
        self.print0(f"tokens per iteration will be: {batching.tokens_per_step:,}")
        steps = max(0, state.schedule.max_iters - state.step)
        if not self.config.eval_only:
            self.print0(
                f"at most {steps:,} steps; an evaluation every {self.config.eval_interval:,}, into "
                f"{self.config.out_dir}"
            )
        self.log.write(
            "start",
            settings=state.settings_now(),
            command=shlex.join(sys.argv),
            date=time.strftime("%Y-%m-%d %H:%M"),
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
            device=device,
            world_size=self.dist.world,
            **asdict(compute),
            peak_flops=self.peak_flops,
            peak_source=peak_source,
            warm_up_s=self.warm_up_s,
            versions=state.metadata["versions"],
            git_commit=state.metadata["code"],
            code_digest=state.metadata["code_digest"],
        )
        if warning := state.schedule.warning():
            self.warn(warning)

    def warn(self, line: str) -> None:
        self.event("warning", f"warning: {line}", iter=self.state.step, text=line)

    # ---- steps -----------------------------------------------------------------------------------

    def should_log(self, step: int) -> bool:
        """Return whether this step has a line."""
        return step % self.config.log_interval == 0 or step == self.state.schedule.max_iters - 1

    def step(self, step: int, tokens: int, /, **numbers: Number) -> None:
        """Print and log the line of a step, if it has one: at once, on CUDA when `deferred` runs.

        tokens: that all ranks trained on. numbers, by name: floats; 0-d tensors, which are averaged
        over ranks; and functions of the LogWindow of the steps since the last line, for what
        depends on their time. `loss`, `grad_norm`, `lr`, `tokens_per_s` and `mfu` have places of
        their own in the line.
        """
        for name, value in numbers.items():
            is_number = not isinstance(value, Tensor) or value.numel() == 1
            if name in RESERVED_FIELDS or not is_number:
                raise ValueError(
                    f"logger.step({name}=...): give one number, such as a mean, under a name "
                    "that the log does not have"
                )
        self.state.note_rates(step)
        self._tokens += tokens
        grad_norm = numbers["grad_norm"]
        assert isinstance(grad_norm, Tensor)
        self._grad_norms.append(grad_norm.detach())
        if not self.should_log(step):
            return
        norms = copy_to_host(torch.stack(self._grad_norms))
        means = {name: self._mean(value) for name, value in numbers.items()}
        memory = peak_memory_bytes(self.dist.device)
        spent_s = self.timer.spent_s()
        self.deferred.add(partial(self._line, step, self._tokens, memory, spent_s, norms, means))
        self._grad_norms.clear()
        self._tokens = 0

    def _mean(self, value: Number) -> Number:
        """Return a tensor's mean over the ranks, on the host; anything else as it is."""
        if not isinstance(value, Tensor):
            return value
        value = unsharded(value.detach())
        if self.dist.world > 1:
            value = self.dist.sum(value.double()) / self.dist.world
        return copy_to_host(value)

    def _line(
        self,
        step: int,
        tokens: int,
        memory: int | None,
        spent_s: tuple[float, float],
        grad_norms: Tensor,
        numbers: dict[str, Number],
    ) -> None:
        """Print and log the line of a step that is done. tokens, grad_norms: since the last line;
        numbers: by name.
        """
        norms = grad_norms.tolist()
        window = self.timer.log_window(len(norms), tokens, self.deferred.done_at, spent_s)
        step_s = window.seconds / window.steps
        own = {
            name: float(value(window) if callable(value) else value)
            for name, value in numbers.items()
        }
        limit = self.config.grad_clip
        more = [f", {name} {own[name]:.6g}" for name in own if name not in STEP_NUMBERS]
        self.print0(
            f"iter {step}: loss {own['loss']:.4f}, time {step_s * 1e3:.2f}ms, "
            f"mfu {own['mfu'] * 100:.2f}%, tok/s {own['tokens_per_s']:,.0f}, "
            f"eta {clock(self._left_s(step, step_s))}{''.join(more)}"
        )
        self.log.write(
            "iter",
            iter=step,
            time_ms=step_s * 1e3,
            data_wait=window.wait_s / window.seconds,
            clip_rate=sum(norm > limit for norm in norms) / len(norms) if limit else None,
            tokens=self.state.tokens_before(step + 1),
            train_s=self.timer.window_ended_s,
            peak_memory_bytes=memory,
            **own,
        )
        if own["mfu"] > 1:
            from deskgpt.peaks import peaks_path

            note_once(
                "mfu above 100%: the peak is too low, or GPT.estimate_flops too high; if the peak "
                f"was measured, delete {peaks_path()} to measure it again"
            )

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

    # ---- evaluations and saves -------------------------------------------------------------------

    def evaluation(
        self,
        train: Evaluation,
        val: Evaluation,
        lr: float,
        texts: list[str],
        answered: float | None = None,
    ) -> None:
        """Print and log an evaluation. texts: samples of the model. answered: the share of val's
        answers that it writes exactly.
        """
        step = self.state.step
        val_bpb = self.data.bits_per_byte(val.loss)
        bits = "" if val_bpb is None else f", bits per byte {val_bpb:.4f}"
        if answered is not None:
            bits += f", answers {answered:.1%}"
        self.event(
            "eval",
            f"step {step}: train loss {train.loss:.4f}, val loss {val.loss:.4f}{bits}",
            iter=step,
            train_loss=train.loss,
            val_loss=val.loss,
            val_se=val.standard_error,
            val_bpb=val_bpb,
            val_answers=answered,
            lr=lr,
            tokens=self.state.tokens_before(step),
            train_s=self.timer.train_s(),
            eval_s=self.timer.last_s["evaluation"],
            eval_windows=val.windows,
            eval_digest=self.data.eval_digest(self.state.batching),
            val_batches=val.batch_losses,
        )
        if texts:
            lines = [textwrap.fill(line, 76) for line in texts[0].strip().splitlines()]
            shown = textwrap.indent("\n".join(lines), "    ")
            self.event("sample", f"it writes:\n\n{shown}\n", iter=step, texts=texts)


def open_log(config: LogSettings, state: TrainState) -> RunLog:
    """Return the log of this run; move an earlier run in out_dir aside.

    Other ranks and eval_only write no file.
    """
    dist = state.dist
    if not dist.is_first or config.eval_only:
        return RunLog(None)
    wandb_run = None
    if config.wandb_log:
        wandb_run = start_wandb(state.settings, state.wandb_run_id)
    out_dir = run_folder(config.out_dir)
    if config.init_from != "resume":
        old = archive_previous_run(out_dir, (CKPT, CKPT_BEST, "log.jsonl"))
        if old:
            dist.print0(f"{out_dir} held an earlier run; it is now in {old}")
    return RunLog(out_dir / "log.jsonl", wandb_run)


# ---- log.jsonl and Weights & Biases --------------------------------------------------------------


# Weights & Biases gets every number of a step and of an evaluation; these under nanoGPT's names.
NANOGPTS_NAMES = {"train_loss": "train/loss", "val_loss": "val/loss", "val_bpb": "val/bpb"}

# In a folder from elsewhere, a link could name any file of the user.
NO_LINK = getattr(os, "O_NOFOLLOW", 0)
# The largest log that is read. A line has about 450 bytes, so these are two million steps.
MOST_BYTES = 1 << 30


class RunLog:
    """Events as JSON lines, each written at once. A resumed run appends, from a new "start" on.

    path None writes no file. wandb_run, if given, gets the metrics too. Raises OSError if the file
    cannot be written at first; later the run continues without the lines that fail.
    """

    def __init__(self, path: Path | None, wandb_run: Any = None) -> None:
        self.path = path
        self.wandb_run = wandb_run
        if path:
            self._append(b"")

    def write(self, event: str, **fields: Any) -> None:
        if self.path:
            known = {
                k: None if isinstance(v, float) and not math.isfinite(v) else v
                for k, v in fields.items()
            }
            line = json.dumps({"event": event, **known}).encode() + b"\n"  # JSON has no NaN
            try:
                self._append(line)
            except OSError as e:
                note_once(
                    f"cannot write {self.path}: {e.strerror}; the run continues and tries again"
                )
        if self.wandb_run and event in ("iter", "eval"):
            metrics = {
                NANOGPTS_NAMES.get(name, name): value
                for name, value in fields.items()
                if isinstance(value, int | float)
            }
            if "mfu" in metrics:
                metrics["mfu"] *= 100  # nanoGPT logs percent
            self._wandb(lambda run: run.log(metrics, step=fields["iter"]))

    def _append(self, line: bytes) -> None:
        """Append a line, after ending one that a crash or a full disk left torn.

        Raises OSError; ValueError if its folder is another one now.
        """
        assert self.path is not None
        check_not_replaced(self.path.parent)
        with open(
            self.path, "a+b", opener=lambda p, flags: os.open(p, flags | NO_LINK, 0o666)
        ) as file:
            size = file.tell()
            file.seek(max(0, size - 1))
            if size and file.read(1) != b"\n":
                line = b"\n" + line
            file.write(line)

    def close(self) -> None:
        self._wandb(lambda run: run.finish())

    def _wandb(self, call: Callable[[Any], None]) -> None:
        """Call wandb, if it is used. An error there ends its part of the log, not the run."""
        if self.wandb_run:
            try:
                call(self.wandb_run)
            except Exception as e:
                print(f"wandb failed ({reason(e)}); the run continues without it", file=sys.stderr)
                self.wandb_run = None


def start_wandb(settings: dict[str, Any], run_id: str | None) -> Any:
    """Start a Weights & Biases run, or continue run_id's. settings: of train.py, by name.

    WANDB_MODE=offline needs neither account nor network.

    Raises ImportError if the package is missing or does not fit, ValueError if wandb refuses.
    """
    import wandb

    run_id = os.environ.get("WANDB_RUN_ID", run_id)  # another one for a copied or rewound folder
    project, name = settings["wandb_project"], settings["wandb_run_name"]
    try:
        return wandb.init(project=project, name=name, config=settings, id=run_id, resume="allow")
    except Exception as e:  # wandb's own errors, and pydantic's for a bad WANDB_ variable
        raise ValueError(
            f"wandb cannot start: {reason(e)}; WANDB_MODE=offline keeps the run on this "
            "disk, --wandb_log=False leaves it out"
        ) from None


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a log.jsonl, in their order. Raises OSError if the file cannot be read.

    A crash can tear a line, and a run may be writing the last one just now: incomplete lines are
    skipped. Raises ValueError if it has more than MOST_BYTES.
    """
    lines = read_small(path, MOST_BYTES).decode("utf-8", errors="replace").splitlines()
    return [event for event in map(event_of, lines) if event is not None]


def event_of(line: str) -> dict[str, Any] | None:
    """Return the event of a line of log.jsonl; None if it is no complete event."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):  # a line of brackets only
        return None
    return event if isinstance(event, dict) and "event" in event else None
