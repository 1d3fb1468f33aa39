"""Trains a GPT on a folder of token files, on one CPU or GPU or on several with torchrun.

    python train.py config/train_shakespeare_char_cpu.py
    python train.py config/train_shakespeare_char.py --batch_size=32 --compile=False
    python train.py --init_from=resume --out_dir=out-shakespeare-char
    torchrun --standalone --nproc_per_node=4 train.py config/train_gpt2.py

Writes into out_dir ckpt.pt, the last model (to resume), ckpt_best.pt, the best (to use), and log.jsonl, which holds
what the terminal shows.
"""

from __future__ import annotations

from deskgpt.run.stopping import StopController, signal_handler
from deskgpt.system.terminal import lasting_output, open_standard_files

if __name__ == "__main__":
    open_standard_files()
    signal_handler.listen()  # before torch is imported, which takes seconds

import functools
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import torch

from configurator import build, read_settings
from data.dataset import Dataset
from data.loader import Loader, eval_batches, first_micro_batch
from deskgpt.checkpoint import store
from deskgpt.compute import optimizer as optimizers
from deskgpt.compute import sharding
from deskgpt.compute.batching import Batching
from deskgpt.compute.distributed import DistContext, dist_env, init_distributed
from deskgpt.compute.optimizer import step_if_finite
from deskgpt.estimate import plan
from deskgpt.export.gpt2_weights import exported_model_args
from deskgpt.run.diagnosis import without_improvement
from deskgpt.run.health import Health
from deskgpt.run.init_state import RESUMED_SETTINGS, facts_of_code, open_log, prepare_machine, starting_point
from deskgpt.run.lock import RESTART_S, only_run_in
from deskgpt.run.report import Report
from deskgpt.run.resuming import refuse_differences, said_again, say_left_out
from deskgpt.run.saver import Saver
from deskgpt.run.time_budget import PLANNED, steps_within
from deskgpt.run.train_state import Run
from deskgpt.system import peak_flops
from deskgpt.system.errors import one_line_errors
from deskgpt.system.gpu_peaks import find_card
from deskgpt.system.hardware import seed_all
from deskgpt.system.settings import AtLeast1, FilePath, Fraction, Range
from model import GPT, GPTConfig, ModelSettings
from sample import sampler_for

DATA = Path(__file__).parent / "data"
MOST_SEQUENCES = 1 << 20  # per step: more would take the memory, or a step without an end


@dataclass(frozen=True, slots=True, kw_only=True)
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
        if self.plan_for or self.world:  # who asks for a plan does not want to train
            object.__setattr__(self, "dry_run", True)
        if self.plan_for:
            try:
                find_card(self.plan_for)
            except ValueError as e:
                raise ValueError(f"plan_for={e}") from None


def main(asked: TrainConfig) -> float:
    """Trains as asked; returns the best validation loss (nats per token), math.inf if none was taken."""
    # ---- data and model --------------------------------------------------------------------------------------
    began = time.perf_counter()
    settings = asdict(asked)
    make = functools.partial(make_optimizer, asked)
    ranks = init_distributed("cpu" if asked.plan_for else asked.device, asked.backend, asked.dist_timeout_s)
    prepare_machine(settings, ranks)
    split = Batching.of(settings, ranks.rank, ranks.world)
    sharding.shards_for(settings, asked.world or ranks.world)
    data = Dataset(DATA / asked.dataset, needed=not asked.dry_run)
    scratch = GPTConfig.from_settings(asked, data.vocab_size)
    start = starting_point(settings, scratch, settings_of_earlier_run, ranks)
    if asked.dry_run:
        dry_run(asked, start.config, ranks)
        return math.inf
    data.open(asked.block_size, start.config.vocab_size, start.tokenizer, asked.seed, asked.align_documents)
    verification = data.verify(ranks.is_first)
    refuse_differences(settings, data.metadata | {"checkpoint": f"step {start.step}"}, ranks)
    is_limited = asked.max_minutes > 0 and not asked.eval_only  # then the schedule is known later
    if not is_limited:
        start.say_changes(settings, data.metadata, data.val.n_eval_windows, rate_of)
    model = start.model(make)

    # ---- how it runs here ------------------------------------------------------------------------------------
    batch_of = functools.partial(first_micro_batch, data.train, split, ranks.device)
    runner, fitting = start.fastest_form(model, make, split, batch_of, began)
    optimizer = make(runner.model, runner.form.dtype)
    run = Run(settings | fitting.changed(settings), runner, optimizer, ranks)
    if is_limited:
        first = batch_of(fitting.batch_size)
        run.settings |= steps_within(began, run, fitting, data.eval_windows(fitting), first, start.step)
        start.say_changes(run.settings, data.metadata, data.val.n_eval_windows, rate_of)
    c = TrainConfig(**run.settings)  # from here on, the settings as the run has them
    batching = Batching.of(run.settings, ranks.rank, ranks.world)
    code = facts_of_code(runner)
    start.say_changes_of_code(code)
    run.set_metadata(data.metadata | code | data.eval_metadata(batching), data.tokenizer, data.chat)
    start.resume(run)
    warm_up_s = time.perf_counter() - began

    # ---- log, saves, stops -----------------------------------------------------------------------------------
    log = open_log(run, start)
    report = Report(run, log, batching, functools.partial(data.windows, batching.sequences))
    about_data = data.lines(verification.state, batching, ranks)
    report.start(about_data, data.log_metadata(), warm_up_s)
    writers = sharding.group_for_saves(c.dist_timeout_s) if runner.sharded else None
    saver = Saver(
        report.out_dir, ranks.print0, run.best_val_loss, c.keep_checkpoints, c.save_async, writers, start.kept
    )
    health = Health(run, report, saver)
    stops = StopController(ranks, began, c.max_hours, c.save_interval, c.save_minutes, shared=runner.sharded)
    sampler = sampler_for(0 if c.eval_only else c.sample_interval, runner, ranks, data.tokenizer)
    loader = Loader(data.train, batching, ranks.device, run.position, report.timer.waited)
    report.timer.resume()

    while True:
        # ---- before a step -----------------------------------------------------------------------------------
        due = stops.due(run.step, run.step > run.first_step, run.step % c.eval_interval == 0)
        verification.check()
        lr = float(learning_rate(c, run.step))
        is_last = run.step >= c.max_iters or c.eval_only
        evaluates = (run.step % c.eval_interval == 0 or is_last) and not due.stop
        if evaluates or due.save or due.stop:
            health.flush()
        if health.rewind_if_spiked():
            loader.seek(run.position)
            continue

        # ---- evaluate ----------------------------------------------------------------------------------------
        if evaluates:
            report.warn(data.changes())
            with stops.catching(), report.evaluating():
                train = runner.evaluate(stops.until_signal(eval_batches(data.train, batching, ranks.device)), ranks)
                val = runner.evaluate(stops.until_signal(eval_batches(data.val, batching, ranks.device)), ranks)
                texts = (
                    sampler.texts_at(run.step // c.eval_interval, is_last, signal_handler.has_signal) if sampler else []
                )
        stop = due.stop or (stops.interrupted() if evaluates else None)
        evaluated = evaluates and not stop
        improved = evaluated and run.evaluated(train, val)
        out_of_patience = evaluated and 0 < c.patience <= without_improvement(run.evaluations)
        if evaluated:
            report.evaluation(train, val, data.bits_per_byte(val.loss), lr, texts)
            health.check_val_loss(val.loss)

        # ---- save --------------------------------------------------------------------------------------------
        by_time = due.save and not health.bad_in_a_row  # otherwise these weights may be what fails
        by_evaluation = evaluated and (improved or c.always_save_checkpoint)
        is_new = not c.eval_only and (run.step > run.first_step or (improved and run.step > 0))
        if saver.is_stale or (is_new and (stop or out_of_patience or by_time or by_evaluation)):
            saver.save_run(run, report, best=improved)
            stops.saved_at = time.perf_counter()
        saver.tell(run, report)

        if is_last or stop or out_of_patience:
            break

        # ---- one optimizer step ------------------------------------------------------------------------------
        for group in optimizer.param_groups:
            group["lr"] = lr

        numbers: defaultdict[str, Any] = defaultdict(float)  # losses by name: sums over micro-batches
        for batch in stops.until_failure(loader.step()):
            # Each micro-batch has its own random stream, on whichever rank: a resumed run needs no generator state.
            seed_all(hash((c.seed, run.step, batch.number)) % 2**63, ranks.device)
            with runner.micro_batch(batch.is_last):
                loss, parts = runner.forward(batch.x, batch.y, batching.micro_steps, batch.weight)
                runner.backward(loss)
            for name, part in parts.items():
                numbers[name] += part
        seed_all(hash((c.seed, run.step)) % 2**63, ranks.device)  # from here on, the same on all ranks
        if stops.failure:
            optimizer.zero_grad(set_to_none=True)
            continue  # with the end of the run

        runner.scaler.unscale_(optimizer)
        grad_norms = runner.gradient_norms()
        grad_norm = torch.linalg.vector_norm(grad_norms)
        torch.nn.utils.clip_grads_with_norm_(runner.parameters, c.grad_clip or math.inf, grad_norm)
        health.see(numbers["loss"], grad_norms, grad_norm)
        step_if_finite(optimizer, runner.scaler, grad_norm)
        optimizer.zero_grad(set_to_none=True)

        # ---- log ---------------------------------------------------------------------------------------------
        if report.is_due() or health.is_full:
            health.flush()
        report.step(lr=lr, **numbers)
        run.step += 1

    # ---- end -------------------------------------------------------------------------------------------------
    with report.timer.saving():
        saver.wait()
    saver.tell(run, report)
    if not c.eval_only:
        report.end(stop, out_of_patience, saver.kept.path if saver.kept else None)
    loader.close()
    if not verification.close():
        ranks.print0("note: the run ended before the checksums of all its data were verified")
    log.close()
    runner.leave_ranks()
    ranks.close()
    saver.raise_if_last_failed()
    stops.leave(stop)
    return run.best_val_loss


def learning_rate(c: TrainConfig, step: int) -> float:
    """Linear warm-up to c.learning_rate, then down to min_lr at lr_decay_iters as lr_schedule says, then min_lr."""
    if not c.decay_lr:
        return c.learning_rate
    low = c.learning_rate / 10 if c.min_lr is None else c.min_lr
    end = c.lr_decay_iters or c.max_iters
    if step < c.warmup_iters:
        return c.learning_rate * (step + 1) / (c.warmup_iters + 1)
    if step >= end:
        return low
    left = (end - step) / (end - c.warmup_iters)
    if c.lr_schedule == "cosine":
        left = 0.5 * (1 - math.cos(math.pi * left))
    elif c.lr_schedule == "trapezoid":
        left = min(1.0, (end - step) / (c.cooldown_iters or math.ceil(end / 5)))
    return low + left * (c.learning_rate - low)


def make_optimizer(c: TrainConfig, model: GPT, dtype: str = "float32") -> torch.optim.Optimizer:
    """The run's optimizer. dtype: of the model's matmuls; Muon's own have it on a CPU, and the fast one elsewhere."""
    device = next(model.parameters()).device
    muon_dtype = dtype if device.type == "cpu" else peak_flops.fast_dtype(device)
    betas = (c.beta1, c.beta2)
    return optimizers.make_optimizer(model, c.optimizer, c.weight_decay, c.learning_rate, betas, c.momentum, muon_dtype)


# ---- set-up --------------------------------------------------------------------------------------------------


def dry_run(c: TrainConfig, config: GPTConfig, ranks: DistContext) -> None:
    """Says what a run of c with this model needs."""
    world = c.world or ranks.world
    planned = plan.Planned(
        config=replace(config, block_size=c.block_size),
        batching=Batching.of(asdict(c), 0, world),
        max_iters=c.max_iters,
        make_optimizer=functools.partial(make_optimizer, c),
        dtype=c.dtype,
        attention=c.attention,
        compiled=c.compile is not False,
        activation_checkpoint=c.activation_checkpoint,
        dp_shard=c.dp_shard,
        reshard_after_forward=c.reshard_after_forward,
        sync_each_batch=c.sync_each_batch,
    )
    plan.dry_run(planned, c.plan_for, ranks)


def rate_of(settings: Mapping[str, Any], step: int) -> float:
    """The learning rate at a step of a run of these settings."""
    return learning_rate(SimpleNamespace(**settings), step)  # type: ignore[arg-type]


def settings_of_earlier_run(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """All settings of the run whose checkpoint has these, which resumed_settings has checked; None if it has none.

    A setting that came later has the default, which is what runs before it did.
    """
    known = {name: value for name, value in config.items() if name in TrainConfig.__dataclass_fields__}
    return asdict(TrainConfig(**known)) if "learning_rate" in known else None


# ---- command line --------------------------------------------------------------------------------------------


def settings_of_start(argv: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    """The settings after init_from is followed. settings: from the config files and the command line in argv."""
    if settings["init_from"] == "auto" and not store.is_one(settings["out_dir"]):
        # As the config files say, so that one command serves every start of a finetuning run, too.
        argv = [arg for arg in argv if arg != "--init_from=auto"]
        settings = read_settings(TrainConfig, argv)
        if settings["init_from"] == "auto":
            settings["init_from"] = "scratch"
    source = settings["init_from"]
    if source in ("resume", "auto"):
        return resumed_settings(argv, settings["out_dir"])
    if store.is_one(source) or exported_model_args(source):
        return finetuning_settings(argv, source)
    return settings


def resumed_settings(argv: list[str], out_dir: str) -> dict[str, Any]:
    """The settings of the run in out_dir, overridden by config files (but for the model's size) and command line."""
    saved = store.load(out_dir, checksums=False)
    of_model = [f"--{name}={value}" for name, value in settings_of_model(saved.model_args, out_dir).items()]
    known = {k: v for k, v in saved.config.items() if k in TrainConfig.__dataclass_fields__}
    # The checkpoint's max_iters may come from its max_minutes. A user who names new minutes wants more steps.
    known |= {"out_dir": out_dir, "init_from": "resume", "eval_only": False, "max_minutes": 0.0}
    known["resume_changed"] = False  # is meant for one time
    left_out = said_again(known)
    known |= {name: False if name == "wandb_log" else "" for name in left_out}
    settings = read_settings(TrainConfig, [*of_model, *argv], known)
    say_left_out(left_out, settings, out_dir)
    if settings["init_from"] == "auto":  # the same command as before: max_minutes has made its plan already
        settings["init_from"] = "resume"
        if settings["max_minutes"]:
            settings |= {name: known[name] for name in PLANNED if name in known}
    elif settings["max_minutes"] and not any(arg.startswith("--max_iters=") for arg in argv):
        settings["max_iters"] = TrainConfig.__dataclass_fields__["max_iters"].default
    before = read_settings(TrainConfig, [], known)
    counts_batches = not before["eval_tokens"] and not settings["eval_tokens"]
    same_count = counts_batches and settings["eval_iters"] == before["eval_iters"]
    if same_count and settings["batch_size"] != before["batch_size"]:
        # An evaluation keeps its windows, however many now make a micro-batch.
        settings["eval_tokens"] = before["eval_iters"] * before["batch_size"] * settings["block_size"]
    return settings


def finetuning_settings(argv: list[str], source: str) -> dict[str, Any]:
    """The settings of a new run with the weights of a checkpoint or of an exported folder.

    Those of its model are the defaults.
    """
    if store.is_one(source):
        model_args = store.load(source, checksums=False).model_args
    else:
        model_args = exported_model_args(source) or {}
    return read_settings(TrainConfig, argv, settings_of_model(model_args, source))


def settings_of_model(model_args: dict[str, Any], source: str) -> dict[str, Any]:
    """Those of a saved model, without dropout, which may change."""
    config = GPTConfig.from_args(model_args, source)
    return {name: getattr(config, name) for name in RESUMED_SETTINGS}


def lock_of(settings: dict[str, Any]) -> AbstractContextManager[None]:
    """Keeps other runs out of out_dir, where this process is one that writes there."""
    reads_only = settings["eval_only"] or settings["dry_run"] or settings["plan_for"] or settings["world"]
    if reads_only or dist_env(os.environ).rank > 0:
        return nullcontext()
    restarts = settings["init_from"] == "auto" and dist_env(os.environ).distributed
    return only_run_in(store.folder_of(settings["out_dir"]), RESTART_S if restarts else 0.0)


if __name__ == "__main__":
    if_out_of_memory = (
        "with --auto_batch=False, halve --batch_size and double --gradient_accumulation_steps, the same training; or "
        "take a smaller model"
    )
    with lasting_output(), one_line_errors(if_out_of_memory, signal_handler.has_signal):
        settings = read_settings(TrainConfig, sys.argv[1:])
        with lock_of(settings):
            main(build(TrainConfig, settings_of_start(sys.argv[1:], settings)))
