"""Trains a GPT on a folder of token files, on one CPU or GPU or on several with torchrun.

    python train.py config/train_shakespeare_char_cpu.py
    python train.py config/train_shakespeare_char.py --batch_size=32 --compile=False
    python train.py --init_from=resume --out_dir=out-shakespeare-char
    torchrun --standalone --nproc_per_node=4 train.py config/train_gpt2.py

Writes into out_dir ckpt.pt, the last model that was saved (to resume), ckpt_best.pt, the best (to
use), and log.jsonl, which holds what the terminal shows.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

from deskgpt.errors import open_standard_files
from deskgpt.stopping import StopConditions, signal_handler

if __name__ == "__main__":
    open_standard_files()
    signal_handler.install()  # before torch is imported, which takes seconds

import functools
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from configurator import HELP, build, read_settings
from data.batches import BatchSplit, Loader, Split, eval_batches, splitmix64
from data.dataset import Dataset
from data.token_files import dataset_folder
from deskgpt.checkpoint import run_folder
from deskgpt.compute import ComputeMode, CudaGraph, autocast, seed_all, set_seed
from deskgpt.device import code_versions
from deskgpt.distributed import (
    DistContext,
    dist_env,
    gradient_norms,
    init_distributed,
    shutdown_distributed,
    wrap_ddp,
)
from deskgpt.errors import BatchTooLargeError, DataError, one_line_errors
from deskgpt.evaluation import Evaluation, evaluate, evaluation_loss
from deskgpt.files import RESTART_S, lock_out_dir
from deskgpt.logger import STEP_FIELDS, RunLogger
from deskgpt.monitor import LossMonitor
from deskgpt.optim import keep_rates_of_groups, make_optimizer, step_if_finite
from deskgpt.peaks import find_cards
from deskgpt.resume import REMOVED_SETTINGS, Start, find_start, settings_of_start
from deskgpt.saving import Checkpointer
from deskgpt.settings import AtLeast1, FilePath, Fraction, Range
from deskgpt.stopping import Schedule, TimeBudget
from deskgpt.train_state import TrainState
from model import GPT, ModelSettings

DATA = Path(__file__).parent / "data"
MOST_SEQUENCES = 1 << 20  # per step: more would take the memory, or a step without an end


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(ModelSettings):  # which has n_layer, n_head, n_embd, block_size ...
    # Settings of earlier versions, which old config files may have.
    retired: ClassVar[dict[str, str]] = REMOVED_SETTINGS
    # input and output
    out_dir: FilePath = "out"  # its ckpt.pt, the last model; or a file: out/ckpt_best.pt, the best
    dataset: FilePath = "openwebtext"  # folder below data/, or a path, with train*.bin and val*.bin
    init_from: FilePath = "scratch"  # scratch, resume, auto (if it can), gpt2..., a .pt or folder
    eval_interval: AtLeast1 = 2000  # steps between evaluations, each followed by a checkpoint
    eval_iters: AtLeast1 = 200  # micro-batches per split and evaluation, at most the whole split
    eval_tokens: int = 0  # tokens per split instead, whatever the micro-batch; 0 = eval_iters
    eval_only: bool = False  # evaluate once, write nothing
    sample_interval: int = 0  # evaluations between short texts in log.jsonl; 0 = no texts
    dry_run: bool = False  # print the estimate of FLOPs, memory and time, check the model, exit
    plan_for: str = ""  # print the estimate for a card that is not here: "RTX 4070", "8x A100 80GB"
    log_interval: AtLeast1 = 1  # steps per log line
    always_save_checkpoint: bool = True  # False: save only if the validation loss improves
    # saving and stopping
    save_minutes: float = 15.0  # the longest time between checkpoints; 0 = no limit
    max_hours: float = 0.0  # stop after this many hours: save, exit, resume later; 0 = no limit
    patience: int = 0  # stop after this many evaluations without an improvement; 0 = never
    resume_changed: bool = False  # True: resume although data, batch or schedule have changed
    on_spike: Literal["go", "stop"] = "go"  # go: only log a loss spike; stop: end the run
    # batch
    batch_size: AtLeast1 = 12  # sequences per micro-batch; lower this first when memory runs out
    gradient_accumulation_steps: AtLeast1 = 5 * 8  # micro-batches per step, over all ranks
    auto_batch: Literal["auto", True, False] = "auto"  # take what fits; auto: on CUDA
    # optimizer
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for blocks' matrices, AdamW else
    learning_rate: float = 6e-4  # its maximum
    max_iters: int = 600000  # steps
    max_minutes: float = 0.0  # wall-clock budget: max_iters and schedule shrink to fit; 0 = none
    weight_decay: float = 1e-1  # of matrices and embeddings
    beta1: Fraction = 0.9  # AdamW: decay of the first moment
    beta2: Fraction = 0.95  # AdamW: decay of the second moment
    momentum: Fraction = 0.95  # of Muon
    grad_clip: float = 1.0  # longest gradient norm; 0 = no limit
    # learning rate schedule
    decay_lr: bool = True  # False: constant from the first step
    lr_schedule: Literal["cosine", "linear", "trapezoid"] = "cosine"  # trapezoid: the last fifth
    warmup_iters: int = 2000  # steps; linear
    lr_decay_iters: int = 0  # step at which min_lr is reached; 0 = max_iters
    min_lr: float | None = None  # None = learning_rate / 10
    # machine
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matmuls, not of weights
    cpu_kernels: Literal["auto", True, False] = "auto"  # ours in C++; auto: if they compile here
    deterministic: bool = False  # True: the same bits in each run on a card, 8% slower on an H200
    compile: Literal["auto", True, False] = "auto"  # torch.compile; auto: on CUDA
    cuda_graph: Literal["auto", True, False] = "auto"  # of a micro-batch; auto: on CUDA
    activation_checkpoint: Literal["none", "full"] = "none"  # full: recompute them in less memory
    seed: int = 1337  # of initial weights, batch order and dropout
    # several ranks, started by torchrun (docs/many-gpus.md)
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # auto = nccl on CUDA, gloo elsewhere
    dp_shard: Annotated[int, Range(-1)] = 1  # ranks that share weights; -1 = all; 1 = DDP
    dist_timeout_s: Annotated[float, Range(1)] = 600.0  # the longest that ranks wait for each other
    # Weights & Biases
    wandb_log: bool = False  # WANDB_MODE=offline needs no account
    wandb_project: str = "owt"  # the project that shows the run
    wandb_run_name: str = "gpt2"  # how the project names it

    def __post_init__(self) -> None:
        ModelSettings.__post_init__(self)
        sequences = self.batch_size * self.gradient_accumulation_steps
        if sequences > MOST_SEQUENCES:
            raise ValueError(
                f"batch_size={self.batch_size} x "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps} are "
                f"{sequences:,} sequences per step; at most {MOST_SEQUENCES:,}"
            )
        if self.plan_for:
            try:
                find_cards(self.plan_for)
            except ValueError as e:
                raise ValueError(f"plan_for={e}") from None

    @property
    def plans(self) -> bool:
        """Return whether the run ends after its estimate."""
        return self.dry_run or bool(self.plan_for)


def main(config: TrainConfig, started: float | None = None) -> float:
    """Train as config says. Return the best validation loss in nats per token; inf without one.

    started: when time limits begin.
    """
    from deskgpt.engine import sampler_for
    from deskgpt.memory import halved_batch

    started = started or time.perf_counter()
    # ---- what is trained, on what, from where ----------------------------------------------------
    device = "cpu" if config.plan_for else config.device
    dist = init_distributed(device, config.backend, config.dist_timeout_s)
    set_seed(config.seed, config.deterministic, dist.device)
    data = Dataset(dataset_folder(config.dataset), needed=not config.plans)
    start = find_start(config, data, dist)  # random weights, a checkpoint, or GPT-2's weights
    if config.plans:
        return print_plan(config, start, data, dist)
    start.open_data(config, data, dist)
    start.check_same_experiment(config, data, learning_rate, dist)

    # ---- how it is computed here: by rule, printed -----------------------------------------------
    chosen = start.choose_compute(config, dist)
    batch = start.choose_batch(config, chosen, dist)
    compute = start.with_loss_chunks(config, chosen, batch, dist)
    model = start.build_model(config, compute, dist)  # on the device, sharded, its blocks compiled
    ddp_model: Any = wrap_ddp(model, dist)  # the model itself, if there is one rank
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = build_optimizer(config, model, compute.dtype)
    keep_rates_of_groups(optimizer, config.learning_rate)
    scaler = torch.amp.GradScaler(dist.device.type, enabled=compute.dtype == "float16")
    budget = TimeBudget(config, started, dist)
    # From here on state.schedule and state.batching are what runs; config is what was asked for.
    settings = asdict(config)
    schedule = Schedule.of(config)
    state = TrainState(
        settings, model, optimizer, scaler, compute, batch, schedule, learning_rate, data, dist
    )
    state.metadata = data.metadata | data.eval_metadata(batch) | code_versions(compute, dist.device)
    start.restore(state, trains=not config.eval_only)

    # ---- who watches it --------------------------------------------------------------------------
    logger = RunLogger(config, state)
    checkpointer = Checkpointer.of(config, start.checkpoint.best_val_loss, state)
    monitor = LossMonitor(state, logger, checkpointer, config.on_spike)
    stop = StopConditions(dist, started, config.max_hours, config.save_minutes, config.patience)
    sample_interval = 0 if config.eval_only else config.sample_interval
    texts_at = sampler_for(sample_interval, model, compute, dist, data.tokenizer)
    loader = Loader(data.train, batch, dist.device, state.step, logger.timer.add_wait)
    micro_batch, eval_batch = cuda_graphs(ddp_model, model, scaler, compute, batch, logger.warn)
    logger.start(started)
    evaluated_at = -1

    try:
        while True:
            step = state.step
            lr = learning_rate(state.schedule, step)
            is_last = step >= state.schedule.max_iters or config.eval_only
            evaluates = (is_last or step % config.eval_interval == 0) and step != evaluated_at
            save_is_due = stop.check(step > state.first_step)
            if evaluates or save_is_due or stop.reason:
                monitor.flush()

            try:
                # ---- evaluate --------------------------------------------------------------------
                is_best = False
                if evaluates and not stop.reason:
                    logger.warn(data.changes())
                    with logger.timer.timed("evaluation"):
                        train = evaluate_split(data.train, state, stop, eval_batch)
                        val = evaluate_split(data.val, state, stop, eval_batch)
                        texts = texts_at(step // config.eval_interval, is_last)
                    if not stop.is_interrupted():
                        evaluated_at = step
                        is_best = checkpointer.is_best(val.loss, step)
                        state.add_evaluation(train, val)
                        logger.evaluation(train, val, lr, texts)
                        monitor.check_val_loss(val.loss)
                        save_is_due = save_is_due or is_best or config.always_save_checkpoint
                        stop.check_patience(state.evaluations)

                # ---- save ------------------------------------------------------------------------
                if save_is_due and not monitor.consecutive_bad_steps and not config.eval_only:
                    checkpointer.save_if_new(state, logger, val.loss if is_best else None)
                    stop.mark_saved()
                if is_last or stop.reason:
                    break

                # ---- one optimizer step ----------------------------------------------------------
                for group in optimizer.param_groups:
                    group["lr"] = lr * group.get("lr_scale", 1.0)
                loss_sums: defaultdict[str, Any] = defaultdict(float)  # by name, on the device
                tokens = 0
                for micro in loader.step():
                    # Each micro-batch draws from a random stream of its own: dropout does not
                    # depend on the ranks, and a checkpoint needs no state of generators.
                    seed_all(micro_batch_seed(config.seed, step, micro.index), dist.device)
                    if dist.distributed:  # ranks exchange gradients after their last micro-batch
                        ddp_model.require_backward_grad_sync = micro.is_last
                    # This is forward_backward, or its CUDA graph.
                    losses = micro_batch(micro.x, micro.y, micro.weight)
                    for name, loss in losses.items():
                        loss_sums[name] += loss
                    tokens += micro.x.numel() * dist.world
            except torch.OutOfMemoryError:  # only cards raise it; this step has changed nothing yet
                optimizer.zero_grad(set_to_none=True)
                if not micro_batch.drop("memory runs out"):  # without the graphs' memory it may fit
                    may_halve = bool(config.auto_batch) and dist.world == 1
                    state.batching = halved_batch(dist.device, may_halve, state.batching)
                    logger.smaller_batch(state.batching)
                loader.restart_at(state.step, state.batching)
                continue
            seed_all(micro_batch_seed(config.seed, step), dist.device)  # the same on all ranks

            scaler.unscale_(optimizer)
            grad_norms = gradient_norms(parameters)  # of each parameter: a NaN has a name
            grad_norm = torch.linalg.vector_norm(grad_norms)
            max_norm = config.grad_clip or math.inf
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, grad_norm)
            step_if_finite(optimizer, scaler, grad_norm)
            optimizer.zero_grad(set_to_none=True)

            # ---- log -----------------------------------------------------------------------------
            logger.deferred.run()  # the line of the step before: a card computes this one
            monitor.add(step, loss_sums["loss"], grad_norms, grad_norm)
            logger.step(step, lr, tokens, grad_norm=grad_norm, **loss_sums)
            state.step = step + 1
            state.schedule = budget.replan(state.schedule, step + 1, logger.timer)
    except (DataError, BatchTooLargeError) as e:  # the state is that of the last whole step
        stop.fail(e)
        monitor.flush()
    finally:
        logger.deferred.run()  # also if the run ends with an error
    return finish(state, checkpointer, logger, monitor, loader, ddp_model, stop)


def forward_backward(
    model: nn.Module,
    scaler: torch.amp.GradScaler,
    variant: ComputeMode,
    x: Tensor,
    y: Tensor,
    weight: float | Tensor,
) -> dict[str, Tensor]:
    """Add the gradients of a micro-batch to those of the step; return its losses by name, times its
    weight.

    This is all that a CUDA graph records of a step: code in here may change nothing but tensors.
    """
    with autocast(x.device, variant.dtype, cached=variant.recompute == "none"):
        losses = named_losses(*model(x, y))
        loss: Any = sum(losses.values()) * weight
    scaler.scale(loss).backward()
    return {name: value.detach() * weight for name, value in losses.items()}


def learning_rate(schedule: Schedule, step: int) -> float:
    """Linear warm-up to learning_rate, then down to min_lr at lr_decay_iters as lr_schedule says,
    then min_lr.
    """
    high = schedule.learning_rate
    if not schedule.decay_lr:
        return high
    low = high / 10 if schedule.min_lr is None else schedule.min_lr
    if step < schedule.warmup_iters:
        return high * (step + 1) / (schedule.warmup_iters + 1)
    if step >= schedule.end:
        return low
    left = (schedule.end - step) / (schedule.end - schedule.warmup_iters)
    if schedule.lr_schedule == "cosine":
        left = 0.5 * (1 - math.cos(math.pi * left))
    elif schedule.lr_schedule == "trapezoid":
        decay_steps = min(math.ceil(schedule.end / 5), schedule.end - schedule.warmup_iters)
        left = min(1.0, (schedule.end - step) / decay_steps)
    elif schedule.lr_schedule != "linear":
        raise ValueError(
            f"lr_schedule={schedule.lr_schedule} is not computed: write it in "
            "learning_rate of train.py"
        )
    return low + left * (high - low)


def named_losses(
    logits: None, loss: Tensor, further: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the losses of GPT.forward by name.

    Raises ValueError if a further one cannot be added.
    """
    for name, part in (further or {}).items():
        is_taken = name in STEP_FIELDS or name == "step"
        if is_taken or not isinstance(part, Tensor) or part.numel() != 1:
            raise ValueError(
                f"GPT.forward returns a further loss {name!r}: it must be a tensor of one "
                "number, with its own name"
            )
    return {"loss": loss, **(further or {})}


def micro_batch_seed(seed: int, *numbers: int) -> int:
    """Return a seed for torch's generators, below 2^63: another stream for each step and
    micro-batch of a run.
    """
    mixed = splitmix64(np.array([seed], np.uint64))
    for number in numbers:
        mixed = splitmix64(mixed + np.uint64(number + 1))
    return int(mixed[0] >> np.uint64(1))


def build_optimizer(
    config: TrainConfig, model: GPT, dtype: str = "float32"
) -> torch.optim.Optimizer:
    """Return the run's optimizer. dtype: of the model's matmuls, and of Muon's: the same on all
    ranks.
    """
    betas = (config.beta1, config.beta2)
    return make_optimizer(
        model,
        config.optimizer,
        config.weight_decay,
        config.learning_rate,
        betas,
        config.momentum,
        dtype,
    )


def evaluate_split(
    split: Split, state: TrainState, stop: StopConditions, graph: CudaGraph
) -> Evaluation:
    """Return the loss of the model on a fixed set of windows of a split; cut short by a signal."""
    batches = eval_batches(split, state.batching, state.dist.device)
    return evaluate(state.model, state.variant, stop.stop_on_signal(batches), state.dist, graph)


# ---- set-up and end ------------------------------------------------------------------------------


def cuda_graphs(
    ddp_model: nn.Module,
    model: GPT,
    scaler: torch.amp.GradScaler,
    variant: ComputeMode,
    batching: BatchSplit,
    warn: Callable[[list[str]], None],
) -> tuple[CudaGraph, CudaGraph]:
    """Return forward_backward and evaluation_loss, to be called as they are.

    On CUDA they are replayed later on.

    The first two steps run without a graph: they compile, and allocate the optimizer's state. Both
    graphs use the same memory, one after the other.
    """
    train = CudaGraph(
        functools.partial(forward_backward, ddp_model, scaler, variant),
        model,
        enabled=variant.cuda_graph,
        eager_calls=2 * batching.micro_steps_per_rank,
        on_refusal=lambda why: warn([f"no CUDA graph: {why}"]),
    )
    evaluation = CudaGraph(
        functools.partial(evaluation_loss, model, variant),
        model,
        enabled=variant.cuda_graph,
        shares_memory_with=train,
        on_refusal=lambda why: warn([f"evaluations without a CUDA graph: {why}"]),
    )
    # DDP broadcasts buffers in some passes only, and a recording would repeat or miss that.
    if variant.cuda_graph and getattr(ddp_model, "modules_buffers", None):
        train.refuse("with several ranks, a model that has buffers needs --cuda_graph=False")
    return train, evaluation


def print_plan(config: TrainConfig, start: Start, data: Dataset, dist: DistContext) -> float:
    """Print what a run of config needs and, on this machine, check its model.

    Raises ValueError if that is wrong.
    """
    from deskgpt.memory import dry_run

    fits = dry_run(config, start.model_config, dist)
    if fits and not config.plan_for and dist.world == 1:
        start.check_model(config, data, dist)
    return math.inf


def finish(
    state: TrainState,
    checkpointer: Checkpointer,
    logger: RunLogger,
    monitor: LossMonitor,
    loader: Loader,
    ddp_model: nn.Module,
    stop: StopConditions,
) -> float:
    """Save what was not saved, if the run is to be resumed; print the end screen; raise what the
    run ends with.

    Returns the best validation loss.
    """
    if stop.reason and not monitor.consecutive_bad_steps and not state.settings["eval_only"]:
        checkpointer.save_if_new(state, logger)
    best_val_loss = logger.end(stop.reason)
    loader.close()
    logger.log.close()
    shutdown_distributed(ddp_model, state.dist)
    checkpointer.raise_if_last_failed()
    stop.exit()
    return best_val_loss


def lock_of(settings: dict[str, Any]) -> AbstractContextManager[None]:
    """Keep other runs out of out_dir, if this process is one that writes there."""
    reads_only = settings["eval_only"] or settings["dry_run"] or settings["plan_for"]
    if reads_only or dist_env(os.environ).rank > 0:
        return nullcontext()
    restarts = settings["init_from"] == "auto" and dist_env(os.environ).distributed
    return lock_out_dir(run_folder(settings["out_dir"]), RESTART_S if restarts else 0.0)


if __name__ == "__main__":
    from deskgpt.compiling import explain_compile_errors

    remedy = (
        "halve --batch_size and double --gradient_accumulation_steps (the same "
        "training), or take a smaller model"
    )
    with one_line_errors(remedy, output_lasts=not HELP & {*sys.argv}):
        settings = read_settings(TrainConfig, sys.argv[1:])
        with lock_of(settings), explain_compile_errors():
            config = build(TrainConfig, settings_of_start(TrainConfig, sys.argv[1:]))
            main(config, signal_handler.installed_at)
