"""Trains a GPT on a folder of token files, on one CPU or GPU or on several with torchrun.

    python train.py config/train_shakespeare_char_cpu.py
    python train.py config/train_shakespeare_char.py --batch_size=32 --compile=False
    python train.py --init_from=resume --out_dir=out-shakespeare-char
    torchrun --standalone --nproc_per_node=4 train.py config/train_gpt2.py

Writes into out_dir ckpt.pt, the last model that was saved (to resume), ckpt_best.pt, the best (to
use), and log.jsonl, which holds what the terminal shows. The settings with a star are enough to
begin with.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH=1 leaves this folder out

from deskgpt.errors import open_standard_files, python_command, require_torch
from deskgpt.stopping import StopConditions, signal_handler

if __name__ == "__main__":
    open_standard_files()
    signal_handler.install()  # before torch is imported, which takes seconds
    require_torch()

from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal

from deskgpt.settings import REMOVED_SETTINGS, AtLeast1, FilePath, Fraction, Range
from model import GPT, GPTConfig, ModelSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(ModelSettings):  # which has n_layer, n_head, n_embd, block_size ...
    # input and output
    out_dir: FilePath = "out"  # * folder of the run; out/ckpt_best.pt resumes from the best one
    dataset: FilePath = "openwebtext"  # * folder in data/, or a path, with train*.bin and val*.bin
    init_from: FilePath = "scratch"  # scratch, resume, auto (resume if it can), gpt2, or a file
    eval_interval: AtLeast1 = 2000  # * evaluate, and save, every so many steps
    eval_iters: AtLeast1 = 200  # micro-batches that an evaluation reads of each split
    eval_tokens: int = 0  # tokens that it reads instead; 0 = eval_iters micro-batches
    eval_answers: bool = False  # count the answers of val dialogues that the model writes exactly
    eval_only: bool = False  # evaluate once, train nothing and write nothing
    sample_interval: int = 0  # let the model write a text at every n-th evaluation; 0 = never
    dry_run: bool = False  # print what the run needs, check the model, and exit
    plan_for: str = ""  # print what the run needs on another card: "RTX 4070", "8x H100"
    log_interval: AtLeast1 = 1  # print a line every so many steps
    always_save_checkpoint: bool = True  # False: save only when the val loss improves
    # saving and stopping
    save_minutes: float = 15.0  # save at least this often; 0 = only at evaluations
    max_hours: float = 0.0  # save and stop after this time, to resume later; 0 = no limit
    patience: int = 0  # stop after so many evaluations without improvement; 0 = never
    resume_changed: bool = False  # True: resume even if data, batch or schedule have changed
    on_spike: Literal["go", "stop"] = "go"  # when the loss spikes, log it and go on, or end the run
    # batch
    batch_size: AtLeast1 = 12  # * sequences per micro-batch; halve it first when memory runs out
    gradient_accumulation_steps: AtLeast1 = 5 * 8  # micro-batches per step, over all ranks
    auto_batch: Literal["auto", True, False] = "auto"  # take a larger one that fits; auto: on CUDA
    # optimizer
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon for blocks' matrices, AdamW for the rest
    learning_rate: float = 6e-4  # * the peak, reached after the warm-up
    max_iters: int = 600000  # * optimizer steps
    max_minutes: float = 0.0  # train this long: shortens max_iters and schedule; 0 = no limit
    weight_decay: float = 1e-1  # of matrices and embeddings; norms and biases have none
    beta1: Fraction = 0.9  # AdamW's decay of the first moment
    beta2: Fraction = 0.95  # AdamW's decay of the second moment
    momentum: Fraction = 0.95  # Muon's momentum
    grad_clip: float = 1.0  # clip the gradients to this norm; 0 = do not clip
    # learning rate schedule
    decay_lr: bool = True  # False: stay at learning_rate from the first step
    lr_schedule: Literal["cosine", "linear", "trapezoid"] = "cosine"  # trapezoid falls at the end
    warmup_iters: int = 2000  # steps in which the rate rises to its peak
    lr_decay_iters: int = 0  # step at which the rate arrives at min_lr; 0 = max_iters
    min_lr: float | None = None  # the lowest rate after the warm-up; None = a tenth of the peak
    # machine
    device: str = "auto"  # * auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matmuls, not of weights
    cpu_kernels: Literal["auto", True, False] = "auto"  # ours in C++; auto: if they compile here
    deterministic: bool = False  # True: the same bits in each run on a card, 8% slower on an H200
    compile: Literal["auto", True, False] = "auto"  # torch.compile the blocks; auto: on CUDA
    cuda_graph: Literal["auto", True, False] = "auto"  # replay micro-batches; auto: on CUDA
    activation_checkpoint: Literal["none", "full"] = "none"  # full: compute twice, keep less
    seed: int = 1337  # of initial weights, batch order and dropout
    # several ranks, started by torchrun (docs/many-gpus.md)
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # auto: nccl on CUDA, gloo elsewhere
    dp_shard: Annotated[int, Range(-1)] = 1  # ranks per copy of the weights; -1 = all; 1 = DDP
    dist_timeout_s: Annotated[float, Range(1)] = 600.0  # end the run if ranks wait this long
    # Weights & Biases
    wandb_log: bool = False  # log there, too; WANDB_MODE=offline needs no account
    wandb_project: str = "owt"  # the project that shows the run
    wandb_run_name: str = "gpt2"  # how the project names it

    retired: ClassVar[dict[str, str]] = REMOVED_SETTINGS  # old config files may have them

    def __post_init__(self) -> None:
        ModelSettings.__post_init__(self)
        if self.plan_for:
            from deskgpt.peaks import find_cards

            try:
                find_cards(self.plan_for)
            except ValueError as e:
                raise ValueError(f"plan_for={e}") from None

    def model_config(self, vocab_size: int) -> GPTConfig:
        """Return the model that the settings describe."""
        return GPTConfig.from_settings(self, vocab_size)

    def schedule(self) -> Schedule:
        """Return the settings of the run's length and of its learning rate."""
        return Schedule(**{f.name: getattr(self, f.name) for f in fields(Schedule)})

    def batch_split(self, rank: int = 0, world: int = 1) -> BatchSplit:
        """Return the split of a step and of an evaluation into micro-batches and ranks."""
        return BatchSplit(
            batch_size=self.batch_size,
            grad_accum_steps=self.gradient_accumulation_steps,
            block_size=self.block_size,
            eval_iters=self.eval_iters,
            eval_tokens=self.eval_tokens,
            rank=rank,
            world=world,
        )

    def in_loop(self) -> Any:
        """Return the settings for main's loop, where reading one that the run may change raises an
        error that names what to read instead.
        """
        return SettingsInLoop(self)


# ---- imports of main -----------------------------------------------------------------------------
# These imports stand below the settings, so that the settings are the first thing you read.

import gc
import math
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from configurator import HELP, build, read_settings
from data.batches import BatchSplit, Loader, Split, splitmix64
from data.dataset import Dataset
from data.token_files import dataset_folder
from deskgpt.compiling import cuda_graphs, explain_compile_errors
from deskgpt.compute import ComputeMode, Pass, autocast, named_losses, seed_all
from deskgpt.device import keep_freed_memory, limit_threads
from deskgpt.distributed import gradient_norms
from deskgpt.errors import BatchTooLargeError, ConfigError, DataError, one_line_errors
from deskgpt.evaluation import (
    Evaluation,
    eval_batches,
    evaluate,
    share_answered,
    without_improvement,
)
from deskgpt.launch import init_distributed, lock_of, set_seed, shutdown_distributed, wrap_ddp
from deskgpt.logger import STEP_FIELDS, RunLogger
from deskgpt.monitor import LossMonitor
from deskgpt.optim import make_optimizer, step_if_finite
from deskgpt.resume import (
    build_model,
    check_same_experiment,
    choose_compute_and_batch,
    find_start,
    restore,
    settings_of_start,
    settings_to_continue,
)
from deskgpt.saving import Checkpointer
from deskgpt.stopping import Schedule
from deskgpt.train_state import TrainState

# A run may change these: max_minutes shortens the schedule, auto_batch takes another micro-batch.
# The settings say what was asked for, so the loop reads the state.
READ_FROM_STATE = {f.name: f"state.schedule.{f.name}" for f in fields(Schedule)} | {
    "batch_size": "state.batching.batch_size",
    "gradient_accumulation_steps": "state.batching.grad_accum_steps",
}


class SettingsInLoop:
    """Gives the settings of a run; those that the run may change raise AttributeError.

    An edit that asks for config.max_iters in the loop would otherwise be right until someone sets
    max_minutes.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        if name in READ_FROM_STATE:
            raise AttributeError(f"config.{name} may change in a run: read {READ_FROM_STATE[name]}")
        return getattr(self._config, name)


def main(config: TrainConfig) -> float:
    """Train as config says. Return the best validation loss in nats per token; inf without one."""
    # ---- what is trained, on what, from where ----------------------------------------------------
    dist = init_distributed(config.device, config.backend, config.dist_timeout_s)
    stop = StopConditions(config, dist)  # signals, max_hours, max_minutes, patience
    set_seed(config.seed, config.deterministic, dist.device)  # before the weights are drawn
    data = Dataset(dataset_folder(config.dataset))  # if a split is missing, the run ends here
    start = find_start(config, data, dist)  # random weights, a checkpoint, or GPT-2's weights
    check_same_experiment(config, start, data, learning_rate, dist)  # before anything is written

    # ---- how it is computed here: by rule, printed -----------------------------------------------
    compute, batching = choose_compute_and_batch(config, start, dist)  # before memory is taken
    model = build_model(config, start, compute, dist)  # on the device, sharded, its blocks compiled
    ddp_model: Any = wrap_ddp(model, dist)  # the model itself, if there is one rank
    parameters = [p for p in model.parameters() if p.requires_grad]  # those that are not frozen
    optimizer = build_optimizer(config, model, compute.dtype)
    scaler = torch.amp.GradScaler(dist.device.type, enabled=compute.dtype == "float16")
    settings = asdict(config)
    schedule = config.schedule()
    state = TrainState(  # all that a checkpoint keeps
        settings, model, optimizer, scaler, compute, batching, schedule, learning_rate, data, dist
    )
    restore(start, state, trains=not config.eval_only)

    # ---- who watches it --------------------------------------------------------------------------
    loader = Loader(data.train, batching, dist.device, state.step, state.row0)
    logger = RunLogger(config, state, stop, loader)  # terminal, log.jsonl, W&B; it times the steps
    checkpointer = Checkpointer.of(config, start, state)  # ckpt.pt, the last, and ckpt_best.pt
    monitor = LossMonitor(state, logger, checkpointer, config.on_spike)  # NaN gradients, spikes
    texts_at = make_sampler(config.sample_interval, state)  # no texts with an interval of 0
    train_pass, eval_pass = cuda_graphs(forward_backward, ddp_model, state, logger.warn)
    config = config.in_loop()  # what a run may change is in state.schedule and state.batching

    try:
        while True:
            step = state.step
            lr = learning_rate(state.schedule, step)  # follows from the step: nothing to save
            is_last = step >= state.schedule.max_iters or config.eval_only
            save_is_due = stop.update(step > state.first_step, checkpointer.saved_at)

            # ---- evaluate and save ---------------------------------------------------------------
            val = None  # its loss on the val split, if this step is evaluated
            if (is_last or step % config.eval_interval == 0) and not stop.reason:
                val = evaluate_run(state, logger, monitor, stop, eval_pass, texts_at, is_last)
            if (val or save_is_due) and monitor.check_last_step():
                checkpointer.save_if_due(state, logger, val, save_is_due)
            if is_last or stop.reason:
                break  # the last step is evaluated; after a signal, finish saves

            # ---- one optimizer step --------------------------------------------------------------
            seed_all(micro_batch_seed(config.seed, step, -1), dist.device)  # for draws of main
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("lr_scale", 1.0)  # its share, if its lr is its own
            loss_sums: defaultdict[str, Any] = defaultdict(float)  # by name, on the device
            tokens = 0
            for micro in loader.step(step):
                # Each micro-batch draws from a random stream of its own: dropout does not depend on
                # the ranks, and a checkpoint needs no state of generators.
                seed_all(micro_batch_seed(config.seed, step, micro.index), dist.device)
                if dist.distributed:  # ranks exchange gradients after their last micro-batch
                    ddp_model.require_backward_grad_sync = micro.is_last
                x, y = micro.x, micro.y
                losses = train_pass(x, y, micro.weight)  # forward_backward
                for name in losses:
                    loss_sums[name] += losses[name]
                tokens += x.numel() * dist.world
            seed_all(micro_batch_seed(config.seed, step), dist.device)  # the same on all ranks

            scaler.unscale_(optimizer)  # float16's gradients are scaled: clip them as they are
            grad_norms = gradient_norms(parameters)  # one for each parameter: a NaN has a name
            grad_norm = torch.linalg.vector_norm(grad_norms)  # of all of them together
            clip_grads_with_norm_(parameters, config.grad_clip or math.inf, grad_norm)
            step_if_finite(optimizer, scaler, grad_norm)  # a NaN or an infinity changes nothing
            optimizer.zero_grad(set_to_none=True)  # an evaluation needs their memory more

            # ---- log -----------------------------------------------------------------------------
            logger.deferred.run()  # the line of the step before: a card computes this one
            monitor.add(step, loss_sums["loss"], grad_norms, grad_norm)
            logger.step(
                step,
                tokens,
                lr=lr,
                grad_norm=grad_norm,
                tokens_per_s=lambda w: w.tokens / w.seconds,  # w: the steps since the last line
                mfu=lambda w: w.tokens / w.seconds * logger.flops_per_token / logger.peak_flops,
                **loss_sums,
            )
            state.step = step + 1
            state.schedule = stop.replan(state.schedule, step + 1, state.first_step, logger.timer)
    except (DataError, torch.OutOfMemoryError) as e:  # the state is that of the last whole step
        stop.fail(remedied(e, config, state))
    finally:
        logger.deferred.run()  # also if the run ends with an error
    return finish(state, checkpointer, logger, monitor, ddp_model, stop)


def main_that_fits(config: TrainConfig) -> float:
    """Run main, and return the best validation loss.

    If a card's memory runs out, go on from the last whole step in half the micro-batch, which is
    the same training. main saves that step first, so a run that gets into trouble after 5,000 steps
    keeps all 5,000, and the loop never has to undo half a step.
    """
    if config.dry_run or config.plan_for:
        return print_plan(config)
    while True:
        try:
            return main(config)
        except BatchTooLargeError as e:
            if e.smaller is None:  # several ranks, --auto_batch=False, or one sequence is too much
                raise
            smaller = e.smaller
        # Outside of `except`: there the error still holds the frames of the pass that failed, and
        # with them its activations. The model and the optimizer of the first try go, too.
        gc.collect()
        config = replace(config, **settings_to_continue(config, smaller))


def forward_backward(
    model: nn.Module,
    scaler: torch.amp.GradScaler,
    compute: ComputeMode,
    x: Tensor,
    y: Tensor,
    weight: float | Tensor,
) -> dict[str, Tensor]:
    """Add the gradients of a micro-batch to those of the step, and return its losses by name.

    weight is the micro-batch's share of the step: times it, the losses of all micro-batches add up
    to the mean over the step, however it is split.

    This is all that a CUDA graph records of a step. A replay does not run its Python: anything but
    tensors that you change in here changes in the first steps only.
    """
    # The cache keeps 16-bit copies of the weights for the whole pass. Blocks that are computed
    # again make their own, so for them it would only take memory.
    with autocast(x.device, compute.dtype, cached=compute.recompute == "none"):
        losses = named_losses(model(x, y), STEP_FIELDS)
        loss: Any = sum(losses.values()) * weight
    scaler.scale(loss).backward()  # the scale keeps float16's small gradients above zero
    # Detached: a loss that is kept for the log would keep all activations with it.
    return {name: value.detach() * weight for name, value in losses.items()}


def learning_rate(schedule: Schedule, step: int) -> float:
    """Return the learning rate of a step: a linear warm-up to learning_rate, then down to min_lr at
    lr_decay_iters as lr_schedule says, then min_lr.

    Write another schedule here. Keep it a function of these two: a resumed run calls it for the
    steps already done, to notice that the schedule has changed.
    """
    high = schedule.learning_rate
    if not schedule.decay_lr:
        return high
    low = high / 10 if schedule.min_lr is None else schedule.min_lr
    if step < schedule.warmup_iters:  # AdamW's first steps are long, its moments know little yet
        return high * (step + 1) / (schedule.warmup_iters + 1)  # never 0: that step would be wasted
    if step >= schedule.end:
        return low
    left = (schedule.end - step) / (schedule.end - schedule.warmup_iters)  # falls from 1 to 0
    if schedule.lr_schedule == "cosine":
        left = 0.5 * (1 - math.cos(math.pi * left))
    elif schedule.lr_schedule == "trapezoid":
        # The last fifth. Until then the rate is the peak, so a run that was stopped before it can
        # go on with a larger max_iters, as if it had been planned so.
        decay_steps = min(math.ceil(schedule.end / 5), schedule.end - schedule.warmup_iters)
        left = min(1.0, (schedule.end - step) / decay_steps)
    elif schedule.lr_schedule != "linear":
        raise ValueError(
            f"lr_schedule={schedule.lr_schedule} is not computed: write it in "
            "learning_rate of train.py"
        )
    return low + left * (high - low)


def micro_batch_seed(seed: int, *numbers: int) -> int:
    """Return a seed for torch's generators, below 2^63: another stream for each step and
    micro-batch of a run.

    seed + step would do for one run, but the run with the next seed would draw the same numbers a
    step later. So the numbers are mixed.
    """
    mixed = splitmix64(np.array([seed], np.uint64))
    for number in numbers:
        mixed = splitmix64(mixed + np.uint64(number + 1))
    return int(mixed[0] >> np.uint64(1))


def build_optimizer(
    config: TrainConfig, model: GPT, dtype: str = "float32"
) -> torch.optim.Optimizer:
    """Return the run's optimizer. Build another one here: main asks for no more than torch's
    interface, and a group with an lr of its own keeps its share of the rate.

    dtype: of the model's matmuls, and of Muon's. It must be the same on all ranks, or their weights
    drift apart.
    """
    return make_optimizer(
        model,
        config.optimizer,
        config.weight_decay,
        config.learning_rate,
        (config.beta1, config.beta2),
        config.momentum,
        dtype,
    )


def evaluate_run(
    state: TrainState,
    logger: RunLogger,
    monitor: LossMonitor,
    stop: StopConditions,
    loss_of: Pass,
    texts_at: Callable[[int, bool], list[str]],
    is_last: bool,
) -> Evaluation | None:
    """Evaluate the model on both splits, each time on the same windows, and log the losses. Let the
    model write a text if texts_at says so.

    Return the loss on the val split; None if a signal cuts the evaluation short.
    """
    monitor.flush()  # spikes of the steps before are printed first
    state.data.checksums.wait(all_files=is_last)  # of val at least: it is evaluated now
    n_before = sum(e.step < state.step for e in state.evaluations)
    with logger.timer.timed("evaluation"):  # so that no step's time has it, nor tokens/s
        train = evaluate_split(state.data.train, state, stop, loss_of)
        val = evaluate_split(state.data.val, state, stop, loss_of)
        answered = None  # a share of val's dialogues
        if state.settings["eval_answers"]:
            batches = eval_batches(state.data.val, state.batching, state.dist.device)
            answered = share_answered(state.model, state.compute, batches, state.dist)
        texts = texts_at(n_before, is_last)
    if stop.note_signal():
        return None  # the mean of fewer windows is another number: it is neither kept nor compared
    state.add_evaluation(train, val)
    lr = learning_rate(state.schedule, state.step)
    logger.evaluation(train, val, lr, texts, answered)
    monitor.check_val_loss(val.loss)
    stop.check_patience(without_improvement(state.evaluations))
    return val


def evaluate_split(
    split: Split, state: TrainState, stop: StopConditions, loss_of: Pass
) -> Evaluation:
    """Return the loss on fixed windows of a split, on all ranks together."""
    batches = eval_batches(split, state.batching, state.dist.device)
    return evaluate(state.model, state.compute, stop.stop_on_signal(batches), state.dist, loss_of)


# ---- set-up and end ------------------------------------------------------------------------------


def make_sampler(interval: int, state: TrainState) -> Callable[[int, bool], list[str]]:
    """Return a function that lets the model write after each `interval` evaluations.

    It takes the number of evaluations so far, and whether this one is the last, and returns texts.
    """
    if not interval or not state.dist.is_first:
        return lambda n_evaluations, is_last: []
    from deskgpt.engine import sampler_for  # only runs that write need what sampling needs

    return sampler_for(interval, state.model, state.compute, state.dist, state.data.tokenizer)


def print_plan(config: TrainConfig) -> float:
    """Print the memory and time of a run and, on this machine, check its model on a short text.

    Raises ValueError if the model is wrong.
    """
    from deskgpt.check_model import check_run
    from deskgpt.memory import dry_run

    device = "cpu" if config.plan_for else config.device  # that card is elsewhere
    dist = init_distributed(device, config.backend, config.dist_timeout_s)
    set_seed(config.seed, config.deterministic, dist.device)
    data = Dataset(dataset_folder(config.dataset), needed=False)
    start = find_start(config, data, dist)
    fits = dry_run(config, start.model_config, dist)
    if fits and not config.plan_for and dist.world == 1:
        compute, _ = choose_compute_and_batch(config, start, dist)
        model = build_model(config, start, ComputeMode(), dist)
        check_run(config, model, compute, dist, forward_backward, build_optimizer)
    return math.inf


def finish(
    state: TrainState,
    checkpointer: Checkpointer,
    logger: RunLogger,
    monitor: LossMonitor,
    ddp_model: nn.Module,
    stop: StopConditions,
) -> float:
    """Save the last step if the run is to be resumed, print the end screen, and raise the run's
    error, if it has one.

    Return the best validation loss.
    """
    from deskgpt.end_screen import end_run

    if stop.reason and monitor.check_last_step():
        checkpointer.save_if_due(state, logger, is_restarting=stop.smaller is not None)
    best_val_loss = math.inf
    if stop.smaller:
        flags = " ".join(f"--{name}={value}" for name, value in stop.smaller.items())
        line = f"out of memory, nothing is lost: continuing with {flags}, the same training"
        logger.event("out_of_memory", line, iter=state.step, **stop.smaller)
    else:
        best_val_loss = end_run(logger, state, stop.reason)
    logger.loader.close()
    logger.log.close()
    shutdown_distributed(ddp_model, state.dist)
    checkpointer.raise_if_last_failed()
    stop.exit()
    return best_val_loss


def remedied(error: Exception, config: TrainConfig, state: TrainState) -> Exception:
    """Return the error that ends the run: this one or, if a card's memory ran out, one that names
    settings with which the run fits. The state is that of the last whole step.
    """
    from deskgpt.memory import batch_too_large

    if not isinstance(error, torch.OutOfMemoryError):
        return error
    # One rank cannot start again alone: the others wait for it within the step.
    may_halve = bool(config.auto_batch) and state.dist.world == 1
    return batch_too_large(state.dist.device, state.batching, may_halve)


if __name__ == "__main__":
    remedy = (
        "halve --batch_size and double --gradient_accumulation_steps (the same "
        "training), or take a smaller model"
    )
    with one_line_errors(remedy, ignore_write_errors=not HELP & {*sys.argv}):
        if not sys.argv[1:] and not dataset_folder("openwebtext").exists():  # the defaults' data
            raise ConfigError(
                f"name a config: {python_command()} train.py config/train_shakespeare_char_cpu.py; "
                "config/ has others, and --help lists the settings"
            )
        settings = read_settings(TrainConfig, sys.argv[1:])
        with lock_of(settings), explain_compile_errors():
            config = build(TrainConfig, settings_of_start(TrainConfig, sys.argv[1:]))
            limit_threads()  # beyond a container's quota they are stopped in mid-matmul
            keep_freed_memory()  # or each step asks the system for its memory again
            main_that_fits(config)
