"""Trains a GPT on a folder of token files, on one CPU or GPU or on several with torchrun.

    python train.py config/train_shakespeare_char_cpu.py
    python train.py config/train_shakespeare_char.py --batch_size=32 --compile=False
    python train.py --init_from=resume --out_dir=out-shakespeare-char
    torchrun --standalone --nproc_per_node=4 train.py config/train_gpt2.py

Writes into out_dir ckpt.pt, the last model that was saved (to resume), ckpt_best.pt, the best (to use), and log.jsonl,
which holds what the terminal shows.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

from deskgpt.run.stopping import StopController, signal_handler
from deskgpt.system.terminal import open_standard_files

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
from data.batching import Batching
from data.dataset import Dataset
from data.loader import Loader, eval_batches
from data.splits import mix
from data.token_files import dataset_folder
from deskgpt.checkpoint import store
from deskgpt.compute import optimizer as optimizers
from deskgpt.compute.compiling import explained
from deskgpt.compute.cuda_graph import CudaGraph
from deskgpt.compute.distributed import (
    DistContext,
    data_parallel,
    dist_env,
    gradient_norms,
    gradients_exchanged,
    init_distributed,
    leave_ranks,
)
from deskgpt.compute.evaluation import evaluate, evaluation_loss
from deskgpt.compute.optimizer import step_if_finite
from deskgpt.compute.variant import Variant
from deskgpt.estimate.fit import BatchTooLargeError, halved_batch
from deskgpt.generate.training_samples import sampler_for
from deskgpt.run.health import Health
from deskgpt.run.init_state import InitState, initial_state
from deskgpt.run.log import code_versions
from deskgpt.run.report import STEP_FIELDS, Report
from deskgpt.run.saver import Saver
from deskgpt.run.schedule import Schedule, TimeBudget
from deskgpt.run.settings import RETIRED, settings_of_start
from deskgpt.run.train_state import TrainState
from deskgpt.system.errors import DataError, one_line_errors
from deskgpt.system.files import RESTART_S, only_run_in
from deskgpt.system.hardware import autocast, make_reproducible, seed_all
from deskgpt.system.peaks import find_cards
from deskgpt.system.settings import AtLeast1, FilePath, Fraction, Range
from model import GPT, ModelSettings

DATA = Path(__file__).parent / "data"
MOST_SEQUENCES = 1 << 20  # per step: more would take the memory, or a step without an end


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(ModelSettings):  # which has n_layer, n_head, n_embd, block_size ...
    retired: ClassVar[dict[str, str]] = RETIRED  # settings of earlier versions, which old config files may have
    # input and output
    out_dir: FilePath = "out"  # run folder: checkpoints and log.jsonl. To resume from one checkpoint, name the file
    dataset: FilePath = "openwebtext"  # folder below data/, or a path, with train*.bin and val*.bin
    init_from: FilePath = "scratch"  # scratch, resume, auto (resume if there is one), gpt2..., a checkpoint, a folder
    eval_interval: AtLeast1 = 2000  # steps between evaluations, each followed by a checkpoint
    eval_iters: AtLeast1 = 200  # micro-batches per split and evaluation; a split with fewer is read whole
    eval_tokens: int = 0  # tokens per split instead, the same ones with any micro-batch; 0 = eval_iters
    eval_only: bool = False  # evaluate once, write nothing
    sample_interval: int = 0  # evaluations between samples: short texts in log.jsonl, which report.py shows; 0 = none
    dry_run: bool = False  # print the estimate of FLOPs, memory and time, check the model, then exit
    plan_for: str = ""  # print the estimate for a card that is not here: "RTX 4070", "8x A100 80GB"
    log_interval: AtLeast1 = 1  # steps per log line
    always_save_checkpoint: bool = True  # False: an evaluation saves only if the validation loss has improved
    # saving and stopping
    save_minutes: float = 15.0  # the longest time between checkpoints; 0 = no limit
    max_hours: float = 0.0  # then save and end, to be resumed later; the schedule stays that of max_iters; 0 = no limit
    patience: int = 0  # end after this many evaluations without an improvement beyond the standard error; 0 = never
    resume_changed: bool = False  # True: resume although data, batch or schedule have changed
    on_spike: Literal["go", "stop"] = "go"  # go: only log a loss spike; stop: end the run
    # batch
    batch_size: AtLeast1 = 12  # sequences per micro-batch; lower this first when memory runs out
    gradient_accumulation_steps: AtLeast1 = 5 * 8  # micro-batches per step, over all ranks
    auto_batch: Literal["auto", True, False] = "auto"  # the micro-batch that fits; auto: on CUDA, without dropout
    # optimizer
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the blocks' matrices, AdamW for the rest
    learning_rate: float = 6e-4  # its maximum
    max_iters: int = 600000  # steps
    max_minutes: float = 0.0  # fewer max_iters, so that the run ends in about this time, evaluation included; 0 = all
    weight_decay: float = 1e-1  # of matrices and embeddings
    beta1: Fraction = 0.9  # AdamW: decay of the first moment
    beta2: Fraction = 0.95  # AdamW: decay of the second moment
    momentum: Fraction = 0.95  # of Muon
    grad_clip: float = 1.0  # longest gradient norm; 0 = no limit
    # learning rate schedule
    decay_lr: bool = True  # False: constant from the first step
    lr_schedule: Literal["cosine", "linear", "trapezoid"] = "cosine"  # trapezoid: the last fifth decays
    warmup_iters: int = 2000  # steps; linear
    lr_decay_iters: int = 0  # step at which min_lr is reached; 0 = max_iters
    min_lr: float | None = None  # None = learning_rate / 10
    # machine
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of the matmuls; weights stay float32
    cpu_kernels: Literal["auto", True, False] = "auto"  # ours in C++, on a CPU; auto: if they can be compiled
    deterministic: bool = False  # True: a card computes the same bits in each run, 8% slower on an H200
    compile: Literal["auto", True, False] = "auto"  # torch.compile: slow start, faster steps; auto: on CUDA
    cuda_graph: Literal["auto", True, False] = "auto"  # queue a micro-batch's kernels by one call; auto: on CUDA
    activation_checkpoint: Literal["none", "full"] = "none"  # full: compute activations again, which takes less memory
    seed: int = 1337  # of initial weights, batch order and dropout
    # several ranks, started by torchrun (docs/many-gpus.md)
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # of torch.distributed; auto = nccl on CUDA, gloo elsewhere
    dp_shard: Annotated[int, Range(-1)] = 1  # ranks that share one copy of the weights (FSDP); -1 = all; 1 = DDP
    dist_timeout_s: Annotated[float, Range(1)] = 600.0  # the longest that ranks wait for each other; then the run ends
    # Weights & Biases
    wandb_log: bool = False  # WANDB_MODE=offline needs no account
    wandb_project: str = "owt"  # the project that shows the run
    wandb_run_name: str = "gpt2"  # how the project names it

    def __post_init__(self) -> None:
        ModelSettings.__post_init__(self)
        sequences = self.batch_size * self.gradient_accumulation_steps
        if sequences > MOST_SEQUENCES:
            raise ValueError(
                f"batch_size={self.batch_size} x gradient_accumulation_steps={self.gradient_accumulation_steps} are "
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
    """Train as config says; return the best validation loss in nats per token, math.inf if none was taken.

    started: when time limits begin.
    """
    started = started or time.perf_counter()
    # ---- what, on what, from where ---------------------------------------------------------------------------
    dist = init_distributed("cpu" if config.plan_for else config.device, config.backend, config.dist_timeout_s)
    make_reproducible(config.seed, config.deterministic, dist.device)
    data = Dataset(dataset_folder(config.dataset), needed=not config.plans)
    init = initial_state(config, data, dist)  # random weights, a checkpoint, or GPT-2's weights
    if config.plans:
        return print_plan(config, init, data, dist)
    data.open(config.block_size, config.seed, init.model_config.vocab_size, init.checkpoint.tokenizer, dist.is_first)
    init.check_experiment(config, data, learning_rate, dist)

    # ---- how it is computed here: by rule, printed -----------------------------------------------------------
    chosen = init.choose_variant(config, dist)
    batching = init.fitting_batch(config, chosen, dist)
    variant = init.with_loss_chunks(config, chosen, batching, dist)
    model = init.build_model(config, variant, dist)  # on the device, sharded, its blocks compiled
    net = data_parallel(model, dist)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = build_optimizer(config, model, variant.dtype)
    optimizers.keep_rates_of_groups(optimizer, config.learning_rate)
    scaler = torch.amp.GradScaler(dist.device.type, enabled=variant.dtype == "float16")
    budget = TimeBudget(config, started, dist)
    # From here on state.schedule and state.batching are what runs; config is what was asked for.
    plan = Schedule.of(config)
    state = TrainState(asdict(config), model, optimizer, scaler, variant, batching, plan, learning_rate, data, dist)
    state.metadata = data.metadata | data.eval_metadata(batching) | code_versions(variant, dist.device)
    init.restore(state, trains=not config.eval_only)
    report = Report(config, state)
    saver = Saver.of(config, init.checkpoint.best_val_loss, state)
    health = Health(state, report, saver, config.on_spike)
    stops = StopController(dist, started, config.max_hours, config.save_minutes, config.patience)
    sampler = sampler_for(0 if config.eval_only else config.sample_interval, model, variant, dist, data.tokenizer)
    loader = Loader(data.train, batching, dist.device, state.position, report.timer.add_wait)
    micro_batch, eval_batch = cuda_graphs(net, model, scaler, variant, batching, report.warn)
    report.start(started)
    evaluated_at = -1

    try:
        while True:
            step = state.step
            lr = learning_rate(state.schedule, step)
            is_last = step >= state.schedule.max_iters or config.eval_only
            evaluates = (is_last or step % config.eval_interval == 0) and step != evaluated_at
            save_is_due = stops.poll(step > state.first_step)
            if evaluates or save_is_due or stops.reason:
                health.flush()

            try:
                # ---- evaluate ------------------------------------------------------------------------------------
                is_best = False
                if evaluates and not stops.reason:
                    report.warn(data.changes())
                    with report.timer.spent_on("evaluation"):
                        train_batches = eval_batches(data.train, state.batching, dist.device)
                        train = evaluate(model, variant, stops.until_signal(train_batches), dist, eval_batch)
                        val_batches = eval_batches(data.val, state.batching, dist.device)
                        val = evaluate(model, variant, stops.until_signal(val_batches), dist, eval_batch)
                        number = step // config.eval_interval
                        texts = sampler.texts_at(number, is_last, signal_handler.has_signal) if sampler else []
                    if not stops.is_interrupted():
                        evaluated_at = step
                        is_best = saver.is_best(val.loss, step)
                        state.add_evaluation(train, val)
                        report.evaluation(train, val, lr, texts)
                        health.check_val_loss(val.loss)
                        save_is_due = save_is_due or is_best or config.always_save_checkpoint
                        stops.check_patience(state.evaluations)

                # ---- save ----------------------------------------------------------------------------------------
                if save_is_due and not health.bad_in_a_row and not config.eval_only:
                    saver.save_if_new(state, report, val.loss if is_best else None)
                    stops.saved()
                if is_last or stops.reason:
                    break

                # ---- one optimizer step --------------------------------------------------------------------------
                for group in optimizer.param_groups:
                    group["lr"] = lr * group.get("lr_scale", 1.0)
                losses: defaultdict[str, Any] = defaultdict(float)  # by name, still on the device
                tokens = 0
                for batch in loader.step():
                    # Each micro-batch has its own random stream, on whichever rank: no generator state is saved.
                    seed_all(random_stream(config.seed, step, batch.number), dist.device)
                    with gradients_exchanged(net, now=batch.is_last):
                        parts = micro_batch(batch.x, batch.y, batch.weight)  # forward_backward, or its CUDA graph
                    for name, part in parts.items():
                        losses[name] += part
                    tokens += batch.x.numel() * dist.world
            except torch.OutOfMemoryError:  # only cards raise it; nothing of this step has changed the state
                optimizer.zero_grad(set_to_none=True)
                if not micro_batch.drop("memory runs out"):  # without the graphs' memory it may fit
                    may_halve = bool(config.auto_batch) and dist.world == 1
                    state.batching = halved_batch(dist.device, may_halve, state.batching)
                    report.smaller_batch(state.batching)
                loader.seek(state.position, state.batching)
                continue
            seed_all(random_stream(config.seed, step), dist.device)  # from here on, the same on all ranks

            scaler.unscale_(optimizer)
            grad_norms = gradient_norms(parameters)
            grad_norm = torch.linalg.vector_norm(grad_norms)
            torch.nn.utils.clip_grads_with_norm_(parameters, config.grad_clip or math.inf, grad_norm)
            step_if_finite(optimizer, scaler, grad_norm)
            optimizer.zero_grad(set_to_none=True)

            # ---- log -----------------------------------------------------------------------------------------
            report.deferred.run()  # the line of the step before: a card has this one to do meanwhile
            health.record(step, losses["loss"], grad_norms, grad_norm)
            report.step(step, lr, tokens, grad_norm=grad_norm, **losses)
            state.step = step + 1
            state.schedule = budget.replan(state.schedule, step + 1, report.timer)
    except (DataError, BatchTooLargeError) as e:  # the state is that of the last whole step
        stops.fail(e)
        health.flush()
    finally:
        report.deferred.run()  # also if the run ends with an error
    return finish(state, saver, report, health, loader, net, stops)


def forward_backward(
    model: nn.Module, scaler: torch.amp.GradScaler, variant: Variant, x: Tensor, y: Tensor, weight: float | Tensor
) -> dict[str, Tensor]:
    """Add the gradients of a micro-batch to those of the step; return its losses by name, times its weight.

    This is all that a CUDA graph records of a step: code in here may change nothing but tensors.
    """
    with autocast(x.device, variant.dtype, cached=variant.recompute == "none"):
        losses = named_losses(*model(x, y))
        loss: Any = sum(losses.values()) * weight
    scaler.scale(loss).backward()
    return {name: value.detach() * weight for name, value in losses.items()}


def learning_rate(schedule: Schedule, step: int) -> float:
    """Linear warm-up to learning_rate, then down to min_lr at lr_decay_iters as lr_schedule says, then min_lr."""
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
        raise ValueError(f"lr_schedule={schedule.lr_schedule} is not computed: write it in learning_rate of train.py")
    return low + left * (high - low)


def named_losses(logits: None, loss: Tensor, further: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the losses of GPT.forward by name. Raises ValueError if a further one cannot be added."""
    for name, part in (further or {}).items():
        is_taken = name in STEP_FIELDS or name == "step"
        if is_taken or not isinstance(part, Tensor) or part.numel() != 1:
            raise ValueError(
                f"GPT.forward returns a further loss {name!r}: it must be a tensor of one number, with its own name"
            )
    return {"loss": loss, **(further or {})}


def random_stream(seed: int, *numbers: int) -> int:
    """Return a seed for torch's generators, below 2^63: another stream for each step and micro-batch of a run."""
    mixed = mix(np.array([seed], np.uint64))
    for number in numbers:
        mixed = mix(mixed + np.uint64(number + 1))
    return int(mixed[0] >> np.uint64(1))


def build_optimizer(config: TrainConfig, model: GPT, dtype: str = "float32") -> torch.optim.Optimizer:
    """Return the run's optimizer. dtype: of the model's matmuls, and of Muon's: the same on all ranks."""
    betas = (config.beta1, config.beta2)
    return optimizers.make_optimizer(
        model, config.optimizer, config.weight_decay, config.learning_rate, betas, config.momentum, dtype
    )


# ---- set-up and end ------------------------------------------------------------------------------------------


def cuda_graphs(
    net: nn.Module,
    model: GPT,
    scaler: torch.amp.GradScaler,
    variant: Variant,
    batching: Batching,
    warn: Callable[[list[str]], None],
) -> tuple[CudaGraph, CudaGraph]:
    """Return forward_backward and evaluation_loss, to be called as they are. On CUDA they are replayed later on.

    The first two steps run without a graph: they compile, and allocate the optimizer's state. Both graphs use the same
    memory, one after the other.
    """
    train = CudaGraph(
        functools.partial(forward_backward, net, scaler, variant),
        model,
        enabled=variant.cuda_graph,
        eager_calls=2 * batching.micro_steps,
        on_refusal=lambda why: warn([f"no CUDA graph: {why}"]),
    )
    evaluation = CudaGraph(
        functools.partial(evaluation_loss, model, variant),
        model,
        enabled=variant.cuda_graph,
        shares_memory_with=train,
        on_refusal=lambda why: warn([f"evaluations without a CUDA graph: {why}"]),
    )
    if variant.cuda_graph and getattr(net, "modules_buffers", None):  # which DDP broadcasts in some passes
        train.refuse("with several ranks, a model that has buffers needs --cuda_graph=False")
    return train, evaluation


def print_plan(config: TrainConfig, init: InitState, data: Dataset, dist: DistContext) -> float:
    """Print what a run of config needs and, on this machine, check its model. Raises ValueError if that is wrong."""
    from deskgpt.estimate import plan

    fits = plan.dry_run(config, init.model_config, dist)
    if fits and not config.plan_for and dist.world == 1:
        init.check_model(config, data, dist)
    return math.inf


def finish(
    state: TrainState,
    saver: Saver,
    report: Report,
    health: Health,
    loader: Loader,
    net: nn.Module,
    stops: StopController,
) -> float:
    """Save what was not saved, if the run is to be resumed; print the end screen; raise what the run ends with.

    Returns the best validation loss.
    """
    if stops.reason and not health.bad_in_a_row and not state.settings["eval_only"]:
        saver.save_if_new(state, report)
    best_val_loss = report.end(stops.reason)
    loader.close()
    report.log.close()
    leave_ranks(net, state.dist)
    saver.raise_if_last_failed()
    stops.leave()
    return best_val_loss


def lock_of(settings: dict[str, Any]) -> AbstractContextManager[None]:
    """Keep other runs out of out_dir, if this process is one that writes there."""
    reads_only = settings["eval_only"] or settings["dry_run"] or settings["plan_for"]
    if reads_only or dist_env(os.environ).rank > 0:
        return nullcontext()
    restarts = settings["init_from"] == "auto" and dist_env(os.environ).distributed
    return only_run_in(store.folder_of(settings["out_dir"]), RESTART_S if restarts else 0.0)


if __name__ == "__main__":
    remedy = "halve --batch_size and double --gradient_accumulation_steps (the same training), or take a smaller model"
    with one_line_errors(remedy, output_lasts=not HELP & {*sys.argv}):
        settings = read_settings(TrainConfig, sys.argv[1:])
        with lock_of(settings), explained():
            config = build(TrainConfig, settings_of_start(TrainConfig, sys.argv[1:]))
            main(config, signal_handler.installed_at)
