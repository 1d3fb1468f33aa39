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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch

from configurator import build, read_settings
from data.dataset import Dataset
from data.loader import Loader, eval_batches, first_micro_batch
from data.splits import mix
from deskgpt.checkpoint import store
from deskgpt.compute import optimizer as optimizers
from deskgpt.compute.batching import Batching
from deskgpt.compute.distributed import DistContext, dist_env, init_distributed
from deskgpt.compute.optimizer import step_if_finite
from deskgpt.run.health import Health
from deskgpt.run.init_state import choose_runner, initial_state, prepare_machine
from deskgpt.run.log import code_versions
from deskgpt.run.report import Report
from deskgpt.run.saver import Saver
from deskgpt.run.settings import settings_of_start
from deskgpt.run.timer import TimeBudget
from deskgpt.run.train_state import TrainState
from deskgpt.system import peaks
from deskgpt.system.errors import one_line_errors
from deskgpt.system.files import RESTART_S, only_run_in
from deskgpt.system.hardware import seed_all
from deskgpt.system.peaks import find_card
from deskgpt.system.settings import AtLeast1, FilePath, Fraction, Range
from model import GPT, GPTConfig, ModelSettings

if TYPE_CHECKING:
    from deskgpt.compute.runner import Runner
    from deskgpt.sampling.training_samples import Sampler

DATA = Path(__file__).parent / "data"
MOST_SEQUENCES = 1 << 20  # per step: more would take the memory, or a step without an end


@dataclass(slots=True, kw_only=True)
class TrainConfig(ModelSettings):  # which has n_layer, n_head, n_embd, block_size ...
    # input and output
    out_dir: FilePath = "out"  # checkpoints and log.jsonl; to resume from another checkpoint in it, out/ckpt_best.pt
    dataset: FilePath = "openwebtext"  # folder below data/, or a path, with train*.bin and val*.bin
    init_from: FilePath = "scratch"  # scratch, resume, auto (resume if there is one), gpt2..., a checkpoint, a folder
    eval_interval: AtLeast1 = 2000  # steps between evaluations, each followed by a checkpoint
    eval_iters: AtLeast1 = 200  # micro-batches per split and evaluation; a split with fewer is read whole
    eval_tokens: int = 0  # tokens per split instead, the same ones with any micro-batch; 0 = eval_iters
    eval_only: bool = False  # evaluate once, write nothing
    sample_interval: int = 0  # evaluations between samples: short texts in log.jsonl, which report.py shows; 0 = none
    dry_run: bool = False  # only say what the run needs: FLOPs, memory, time
    plan_for: str = ""  # a dry run for a card that is not here: "RTX 4070", "A100 80GB"
    log_interval: AtLeast1 = 1  # steps per log line
    always_save_checkpoint: bool = True  # False: an evaluation saves only if the validation loss has improved
    # saving and stopping
    save_interval: int = 0  # steps between checkpoints, beside those of evaluations; 0 = none
    save_minutes: float = 15.0  # the longest time between checkpoints; 0 = no limit
    save_async: bool = True  # False: training waits until a checkpoint is on the disk
    keep_checkpoints: AtLeast1 = 1  # the latest ones that are kept, beside the best
    max_hours: float = 0.0  # then save and end, to be resumed later; the schedule stays that of max_iters; 0 = no limit
    patience: int = 0  # end after this many evaluations without an improvement beyond the standard error; 0 = never
    resume_changed: bool = False  # True: resume although data, batch or schedule have changed
    max_bad_steps: int = 10  # steps in a row with NaN or infinite gradients, all skipped, that end the run; 0 = never
    on_spike: Literal["go", "stop", "rewind"] = "go"  # rewind: back to the last checkpoint, past the batches since then
    # batch
    batch_size: AtLeast1 = 12  # sequences per micro-batch; lower this first when memory runs out
    gradient_accumulation_steps: AtLeast1 = 5 * 8  # micro-batches per step, over all ranks
    auto_batch: Literal["auto", True, False] = "auto"  # same training, batch_size that fits and is fast; auto: on CUDA
    align_documents: bool = False  # move training windows to the first document that begins within them
    # optimizer
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the blocks' matrices, AdamW for the rest
    learning_rate: float = 6e-4  # its maximum
    max_iters: int = 600000  # steps
    max_minutes: float = 0.0  # fewer max_iters, so that the run ends in about this time, evaluation included; 0 = all
    weight_decay: float = 1e-1  # of matrices and embeddings
    beta1: Fraction = 0.9  # how much AdamW's mean of gradients keeps per step
    beta2: Fraction = 0.95  # the same of its mean of squares
    momentum: Fraction = 0.95  # of Muon
    grad_clip: float = 1.0  # longest gradient norm; 0 = no limit
    # learning rate schedule
    decay_lr: bool = True  # False: constant from the first step
    lr_schedule: Literal["cosine", "linear", "trapezoid"] = "cosine"  # after the warm-up; trapezoid: constant first
    warmup_iters: int = 2000  # steps; linear
    lr_decay_iters: int = 0  # step at which min_lr is reached; 0 = max_iters
    cooldown_iters: int = 0  # steps of trapezoid's decay, which is linear; 0 = a fifth of lr_decay_iters
    min_lr: float | None = None  # None = learning_rate / 10
    # machine
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of the matmuls; weights stay float32
    attention: Literal["auto", "flash", "explicit", "kernels"] = "auto"  # kernels: ours, on a CPU; auto: the faster
    compile: Literal["auto", True, False] = "auto"  # a slow start, faster steps; auto: on CUDA, and on a CPU if it pays
    activation_checkpoint: Literal["none", "full", "selective"] = "none"  # compute activations again: less memory
    seed: int = 1337  # of initial weights, batch order and dropout
    # several ranks, started by torchrun (docs/many-gpus.md)
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # of torch.distributed; auto = nccl on CUDA, gloo elsewhere
    dp_shard: Annotated[int, Range(-1)] = 1  # ranks that share one copy of the weights (FSDP); -1 = all; 1 = DDP
    reshard_after_forward: bool = True  # sharded: gather weights again for the backward pass; False: keep them
    sync_each_batch: bool = True  # sharded: reduce gradients after each micro-batch; False: once, 4 bytes per parameter
    dist_timeout_s: Annotated[float, Range(1)] = 600.0  # the longest that ranks wait for each other; then the run ends
    world: Annotated[int, Range(0, MOST_SEQUENCES)] = 0  # plan a run of this many ranks; 0 = torchrun's
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
                find_card(self.plan_for)
            except ValueError as e:
                raise ValueError(f"plan_for={e}") from None
        if self.plan_for or self.world:  # whoever asks for a plan does not want to train
            self.dry_run = True


def main(config: TrainConfig, started: float | None = None) -> float:
    """Trains as config says; returns the best validation loss (nats per token), math.inf if none was taken.

    The micro-batch and the steps that this machine allows are put into config. started: when time limits begin.
    """
    started = started or time.perf_counter()
    # ---- data and model --------------------------------------------------------------------------------------
    dist = init_distributed("cpu" if config.plan_for else config.device, config.backend, config.dist_timeout_s)
    prepare_machine(config, dist)
    data = Dataset(DATA / config.dataset, needed=not config.dry_run)
    init = initial_state(config, GPTConfig.from_settings(config, data.vocab_size), dist)
    if config.dry_run:
        dry_run(config, init.model_config, dist)
        return math.inf
    data.open(config, init.model_config.vocab_size, init.tokenizer, dist.is_first)
    init.check_experiment(config, data, learning_rate, dist)
    make_optimizer = functools.partial(build_optimizer, config)
    model = init.build_model(config, dist)

    # ---- how it runs here: choose, verify, print -------------------------------------------------------------
    first_batch = functools.partial(first_micro_batch, data.train, batching_of(config, dist), dist.device)
    runner = choose_runner(config, init, model, make_optimizer, first_batch, dist)
    optimizer = make_optimizer(runner.model, runner.variant.dtype)
    state = TrainState(config, runner, optimizer, data, dist)
    code = code_versions(runner)
    init.restore(state, config, code)
    budget = TimeBudget(config, started, state)
    batching = budget.plan(batching_of(config, dist), data.eval_windows, first_batch(config.batch_size))
    state.metadata = data.metadata | code | data.eval_metadata(batching)

    # ---- log, saves, stops -----------------------------------------------------------------------------------
    report = Report(config, state, batching)
    saver = Saver.of(config, state)
    health = Health(config, state, report, saver)
    stops = StopController(config, dist, started, runner.sharded)
    sampler = sampler_for(config, runner, dist, data.tokenizer)
    loader = Loader(data.train, batching, dist.device, state.position, report.timer.add_wait)
    report.start(time.perf_counter() - started)

    while True:
        # ---- evaluate ----------------------------------------------------------------------------------------
        lr = float(learning_rate(config, state.step))
        is_last = state.step >= config.max_iters or config.eval_only
        evaluates = is_last or state.step % config.eval_interval == 0
        save_is_due = stops.check(state.step, state.step > state.first_step, evaluates)
        data.checksums.check()
        if evaluates or save_is_due or stops.reason:
            health.flush()
        if health.rewind_if_spiked():
            loader.seek(state.position)
            continue

        improved = False
        if evaluates and not stops.reason:
            report.warn(data.changes())
            with report.evaluating():
                with stops.catching():
                    train = runner.evaluate(stops.until_signal(eval_batches(data.train, batching, dist.device)), dist)
                    val = runner.evaluate(stops.until_signal(eval_batches(data.val, batching, dist.device)), dist)
                    number = state.step // config.eval_interval
                    texts = sampler.texts_at(number, is_last, signal_handler.has_signal) if sampler else []
                if not stops.reason:
                    report.warn(runner.verify_again(state.step, dist, is_last))  # in at most 1% of the time
            if not stops.interrupted():
                improved = state.add_evaluation(train, val)
                report.evaluation(train, val, lr, texts)
                health.check_val_loss(val.loss)
                save_is_due = save_is_due or improved or config.always_save_checkpoint
                stops.check_patience(state.evaluations)

        # ---- save --------------------------------------------------------------------------------------------
        if save_is_due:
            saver.save_if_new(state, report, best=improved)
            stops.saved()
        saver.report_ended(state, report)
        if is_last or stops.reason:
            break

        # ---- one optimizer step ------------------------------------------------------------------------------
        for group in optimizer.param_groups:
            group["lr"] = lr
        numbers: defaultdict[str, Any] = defaultdict(float)  # losses by name: sums over micro-batches
        with stops.catching():
            for batch in loader.step():
                # Each micro-batch has its own random stream, on whichever rank: no generator state is saved.
                seed_all(random_stream(config.seed, state.step, batch.number), dist.device)
                with runner.micro_batch(batch.is_last):
                    loss, parts = runner.forward(batch.x, batch.y, batching.micro_steps, batch.weight)
                    runner.backward(loss)
                for name, part in parts.items():
                    numbers[name] += part
        seed_all(random_stream(config.seed, state.step), dist.device)  # from here on, the same on all ranks
        if stops.reason:  # a token file is damaged: the step is not taken
            health.flush()
            break

        runner.scaler.unscale_(optimizer)
        grad_norms = runner.gradient_norms()
        grad_norm = torch.linalg.vector_norm(grad_norms)
        torch.nn.utils.clip_grads_with_norm_(runner.parameters, config.grad_clip or math.inf, grad_norm)
        health.record(numbers["loss"], grad_norms, grad_norm)
        step_if_finite(optimizer, runner.scaler, grad_norm)
        optimizer.zero_grad(set_to_none=True)

        report.step(lr, grad_norm=grad_norm, **numbers)
        state.step += 1
        budget.replan(report.timer)

    # ---- end -------------------------------------------------------------------------------------------------
    saver.finish(state, report, stops.reason)
    report.end(stops.reason)
    loader.close()
    data.checksums.check()
    report.log.close()
    runner.leave_ranks()
    dist.close()
    saver.raise_if_last_failed()
    stops.leave()
    return state.best_val_loss


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up to learning_rate, then down to min_lr at lr_decay_iters as lr_schedule says, then min_lr."""
    if not config.decay_lr:
        return config.learning_rate
    low = config.learning_rate / 10 if config.min_lr is None else config.min_lr
    end = config.lr_decay_iters or config.max_iters
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    if step >= end:
        return low
    left = (end - step) / (end - config.warmup_iters)
    if config.lr_schedule == "cosine":
        left = 0.5 * (1 - math.cos(math.pi * left))
    elif config.lr_schedule == "trapezoid":
        cooldown = min(config.cooldown_iters or math.ceil(end / 5), end - config.warmup_iters)
        left = min(1.0, (end - step) / cooldown)
    return low + left * (config.learning_rate - low)


def random_stream(seed: int, *numbers: int) -> int:
    """A seed for torch's generators, below 2^63: another stream for each step and micro-batch of a run."""
    mixed = mix(np.array([seed], np.uint64))
    for number in numbers:
        mixed = mix(mixed + np.uint64(number + 1))
    return int(mixed[0] >> np.uint64(1))


def build_optimizer(config: TrainConfig, model: GPT, dtype: str = "float32") -> torch.optim.Optimizer:
    """The run's optimizer. dtype: of the model's matmuls.

    Muon uses it on a CPU, and the GPU's fastest dtype elsewhere.
    """
    device = next(model.parameters()).device
    muon_dtype = dtype if device.type == "cpu" else peaks.fast_dtype(device)
    betas = (config.beta1, config.beta2)
    return optimizers.make_optimizer(
        model, config.optimizer, config.weight_decay, config.learning_rate, betas, config.momentum, muon_dtype
    )


# ---- set-up --------------------------------------------------------------------------------------------------


def batching_of(config: TrainConfig, dist: DistContext) -> Batching:
    """How the settings split a step and an evaluation into micro-batches and ranks."""
    return Batching.of(asdict(config), dist.rank, dist.world)


def dry_run(config: TrainConfig, model_config: GPTConfig, dist: DistContext) -> None:
    """Prints what a run of config with this model needs."""
    from deskgpt.estimate import plan

    plan.dry_run(config, model_config, functools.partial(build_optimizer, config), dist)


def sampler_for(config: TrainConfig, runner: Runner, dist: DistContext, tokenizer: dict[str, Any]) -> Sampler | None:
    """What writes short texts after evaluations, where this run wants them."""
    if config.eval_only or not config.sample_interval:
        return None
    from deskgpt.sampling import training_samples

    return training_samples.sampler_for(config.sample_interval, runner, dist, tokenizer)


def lock_of(settings: dict[str, Any]) -> AbstractContextManager[None]:
    """Keeps other runs out of out_dir, where this process is one that writes there."""
    reads_only = settings["eval_only"] or settings["dry_run"] or settings["plan_for"] or settings["world"]
    if reads_only or dist_env(os.environ).rank > 0:
        return nullcontext()
    restarts = settings["init_from"] == "auto" and dist_env(os.environ).distributed
    return only_run_in(store.folder_of(settings["out_dir"]), RESTART_S if restarts else 0.0)


if __name__ == "__main__":
    remedy = "halve --batch_size and double --gradient_accumulation_steps (the same training), or take a smaller model"
    with one_line_errors(f"with --auto_batch=False, {remedy}", signal_handler.has_signal, output_lasts=True):
        settings = read_settings(TrainConfig, sys.argv[1:])
        with lock_of(settings):
            config = build(TrainConfig, settings_of_start(TrainConfig, sys.argv[1:]))
            main(config, signal_handler.installed_at)
