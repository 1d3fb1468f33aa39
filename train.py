"""Trains a GPT on a folder of token files, on one CPU or GPU or on several with torchrun.

    python train.py config/train_shakespeare_char_cpu.py
    python train.py config/train_shakespeare_char.py --batch_size=32 --compile=False
    python train.py --init_from=resume --out_dir=out-shakespeare-char
    torchrun --standalone --nproc_per_node=4 train.py config/train_gpt2.py

Writes out_dir/ckpt.pt (and ckpt_best.pt) and out_dir/log.jsonl, which holds what the terminal shows.
"""

from __future__ import annotations

from deskgpt.machine.terminal import lasting_output, open_standard_files
from deskgpt.run.stopping import listener

if __name__ == "__main__":
    open_standard_files()
    listener.listen()  # before torch is imported, which takes seconds

import functools
import itertools
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from configurator import build, read_settings
from data.loader import BatchPlan, Loader, eval_batches, first_micro_batch
from data.splits import Split
from data.text_facts import TextFacts, text_facts
from data.token_files import check_vocabulary, listed_sha256, read_meta, record_of, shard_names
from data.tokenizer import from_meta, from_meta_offline, padded_vocab_size
from data.verify import Verification
from deskgpt.checkpoint import store as checkpoint
from deskgpt.checkpoint.store import Checkpoint
from deskgpt.compute import compiling, forms, sharding
from deskgpt.compute.optimizer import make_optimizer, step_if_finite
from deskgpt.compute.ranks import Ranks, place_of, start_ranks
from deskgpt.compute.runner import Evaluation, Runner
from deskgpt.machine import hardware, peak_flops
from deskgpt.machine.errors import message_for_user, one_line_errors
from deskgpt.machine.gpu_peaks import find_card
from deskgpt.predict import memory as estimate
from deskgpt.predict.plan import dry_run
from deskgpt.run import resuming, stopping
from deskgpt.run.health import Evaluated, Health, Spike, Step, bad_parameters, lowest, overfit, without_improvement
from deskgpt.run.lock import RESTART_S, check_shared, only_run_in
from deskgpt.run.log import RunLog, StepTimer, Window, clock, git_commit, not_silent, start_wandb, versions
from deskgpt.run.saver import Saved, Saver
from deskgpt.share.gpt2_weights import exported_model_args, load_gpt2, tokenizer_of
from model import GPT, MODERN_CHOICES, GPTConfig, ModelSettings
from sample import Sampler

DATA = Path(__file__).parent / "data"
# What a resumed run takes from its checkpoint.
RESUMED_SETTINGS = tuple(f.name for f in fields(ModelSettings) if f.name != "dropout")
MAX_REWINDS = 5  # to the same checkpoint: spikes that other batches do not avoid are not theirs

# Sequences per step: more would take the memory, or a step without an end.
MOST_SEQUENCES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(ModelSettings):  # which has n_layer, n_head, n_embd, block_size ...
    # input and output
    out_dir: str = "out"  # checkpoints and log.jsonl; to resume from another checkpoint in it, out/ckpt_best.pt
    dataset: str = "openwebtext"  # folder below data/, or a path, with train*.bin and val*.bin
    init_from: str = "scratch"  # scratch, resume, auto (resume if there is one), gpt2..., a checkpoint, a folder
    eval_interval: int = 2000  # steps between evaluations, each followed by a checkpoint
    eval_iters: int = 200  # micro-batches per split and evaluation; a split with fewer is read whole
    eval_tokens: int = 0  # tokens per split instead, the same ones with any micro-batch; 0 = eval_iters
    eval_only: bool = False  # evaluate once, write nothing
    sample_interval: int = 0  # evaluations between samples: short texts in log.jsonl, which report.py shows; 0 = none
    dry_run: bool = False  # only say what the run needs: FLOPs, memory, time
    plan_for: str = ""  # a dry run for a card that is not here: "RTX 4070", "A100 80GB"; all: a table of cards
    log_interval: int = 1  # steps per log line
    tasks: str = ""  # benchmarks after evaluations: names of lm_eval's tasks, or YAML files (docs/benchmarks.md)
    tasks_interval: int = 1  # evaluations from one benchmark to the next; the last evaluation always has one
    tasks_limit: int = 0  # items per task, its first ones; 0 = all
    always_save_checkpoint: bool = True  # False: an evaluation saves only if the validation loss has improved
    # saving and stopping
    save_interval: int = 0  # steps between checkpoints, beside those of evaluations; 0 = none
    save_minutes: float = 15.0  # the longest time between checkpoints; 0 = no limit
    save_async: bool = True  # False: training waits until a checkpoint is on the disk
    keep_checkpoints: int = 1  # the latest ones that are kept, beside the best
    max_hours: float = 0.0  # then save and end, to be resumed later; the schedule stays that of max_iters; 0 = no limit
    patience: int = 0  # end after so many evaluations without an improvement beyond the standard error; 0 = never
    resume_changed: bool = False  # True: resume although data, batch or schedule are not those of the run before
    max_bad_steps: int = 10  # steps in a row with NaN or infinite gradients, all skipped, that end the run; 0 = never
    on_spike: Literal["go", "stop", "rewind"] = "go"  # rewind: back to the last checkpoint, past the batches since then
    # batch
    batch_size: int = 12  # sequences per micro-batch; lower this first when memory runs out
    gradient_accumulation_steps: int = 5 * 8  # micro-batches per step, over all ranks
    auto_batch: bool = False  # same tokens per step: halve batch_size until it fits; on CUDA first double it, if faster
    align_documents: bool = False  # move training windows to the first document that begins within them
    # optimizer
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the blocks' matrices, AdamW for the rest
    learning_rate: float = 6e-4  # its maximum
    max_iters: int = 600000  # steps
    max_minutes: float = 0.0  # fewer max_iters, so that the run ends in about this time, evaluation included; 0 = all
    weight_decay: float = 1e-1  # of matrices and embeddings
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.95  # of Muon
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
    compile: Literal["auto", True, False] = "auto"  # a slow start, faster steps; auto: on CUDA, and on a CPU if it pays
    activation_checkpoint: Literal["none", "full", "selective"] = "none"  # compute activations again: less memory
    seed: int = 1337  # of initial weights, batch order and dropout
    # several ranks, started by torchrun (docs/many-gpus.md)
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # of torch.distributed; auto = nccl on CUDA, gloo elsewhere
    dp_shard: int = 1  # ranks that share one copy of weights and moments (FSDP); -1 = all; 1 = each has its own (DDP)
    reshard_after_forward: bool = True  # sharded: gather weights again for the backward pass; False: keep them
    dist_timeout_s: float = 600.0  # the longest that ranks wait for each other; then the run ends
    world: int = 0  # a dry run for so many ranks, which need not be here; 0 = those that torchrun started
    # Weights & Biases
    wandb_log: bool = False
    wandb_project: str = "owt"
    wandb_run_name: str = "gpt2"

    def __post_init__(self) -> None:
        ModelSettings.__post_init__(self)
        least = dict.fromkeys(("eval_interval", "eval_iters", "tasks_interval", "log_interval", "batch_size"), 1)
        least |= {"dist_timeout_s": 1, "gradient_accumulation_steps": 1, "keep_checkpoints": 1, "dp_shard": -1}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            low = least.get(name, 0)
            if isinstance(value, int | float) and value < low:
                raise ValueError(f"{name}={value} must be at least {low}")
        for name, limit in {"beta1": 1, "beta2": 1, "momentum": 1, "seed": 2**63}.items():
            if getattr(self, name) >= limit:
                raise ValueError(f"{name}={getattr(self, name)} must be below {limit}")
        sequences = self.batch_size * self.gradient_accumulation_steps
        if sequences > MOST_SEQUENCES:
            raise ValueError(
                f"batch_size={self.batch_size} x gradient_accumulation_steps={self.gradient_accumulation_steps} are "
                f"{sequences:,} sequences per step; at most {MOST_SEQUENCES:,}"
            )
        if self.world > MOST_SEQUENCES:
            raise ValueError(f"world={self.world:,} must be at most {MOST_SEQUENCES:,}: each rank has a sequence")
        if self.plan_for or self.world:  # who asks for a plan does not want to train
            object.__setattr__(self, "dry_run", True)
        if self.plan_for not in ("", "all"):
            try:
                find_card(self.plan_for)
            except ValueError as e:
                raise ValueError(f"plan_for={e}") from None


def main(c: TrainConfig) -> float:
    """Trains as c says; returns the best validation loss (nats per token), math.inf if none was taken."""
    # ---- ranks and batch -------------------------------------------------------------------------------------
    began = time.perf_counter()
    listener.signal = None  # that of a run before this one in the same process
    hardware.keep_freed_memory()
    ranks = start_ranks("cpu" if c.plan_for else c.device, c.backend, c.dist_timeout_s)
    hardware.forbid_spilling(ranks.device)
    if not c.eval_only and not c.dry_run:
        check_shared(out_dir_of(c), ranks)
    other_cache = compiling.find_cache()
    if other_cache:
        ranks.say(other_cache)
    plan = BatchPlan.of(c.batch_size, c.gradient_accumulation_steps, ranks.rank, ranks.world)
    shards = sharding.shards_for(c, c.world or ranks.world)
    torch.manual_seed(c.seed)

    # ---- data and model --------------------------------------------------------------------------------------
    meta = describe_data(c)
    start = starting_point(c, meta, ranks)
    if c.dry_run:
        dry_run(c, replace(start.config, block_size=c.block_size), ranks)
        return math.inf
    train_split, val_split = open_splits(c, start, meta)
    verification = Verification(DATA / c.dataset, (train_split, val_split) if ranks.is_first else ())
    data = facts_of_data(c, train_split, val_split)
    resuming.refuse_differences(asdict(c), data | {"checkpoint": f"step {start.step}"}, ranks)
    if seconds_left(c, began) is None:
        say_changes(c, start, data, val_split, ranks)
    builds = ranks.is_first or shards == 1
    estimate.refuse_beyond_memory(start.config, copies_of_weights(c) / shards, ranks.device, builds)
    model = placed_model(start, c, ranks)
    model.checkpoint_activations(c.activation_checkpoint)
    benchmark = Benchmark(c, start.tokenizer or meta["tokenizer"], model, ranks) if c.tasks else None

    # ---- how it runs here ------------------------------------------------------------------------------------
    batch_of = functools.partial(first_micro_batch, train_split, plan, ranks.device)
    steps = 0 if c.eval_only else c.max_iters - start.step
    runner, c = forms.settle(model, c, ranks, batch_of, start.form(ranks.device), steps, seconds_left(c, began))
    plan = BatchPlan.of(c.batch_size, c.gradient_accumulation_steps, ranks.rank, ranks.world)
    optimizer = optimizer_for(c, runner)
    if ranks.distributed and not c.eval_only:
        runner.distribute(*batch_of(c.batch_size))
    left_s = seconds_left(c, began)
    if left_s is not None:
        batch = batch_of(c.batch_size)
        splits = (train_split, val_split)
        c = replace(c, **estimate.steps_within(left_s, c, runner, optimizer, batch, splits, start.step, ranks))
        say_changes(c, start, data, val_split, ranks)  # only now is the schedule known
    code = facts_of_code(runner)
    say_changes_of_code(start, code, ranks)
    facts = data | code | {checkpoint.EVAL_WINDOWS: val_split.n_eval_windows(estimate.eval_windows(c))}
    if start.step and not c.eval_only:
        start.restore(optimizer, runner.scaler)
    start.release_memory()
    warm_up_s = time.perf_counter() - began

    # ---- log -------------------------------------------------------------------------------------------------
    timer = StepTimer(ranks.device)
    log = open_log(c, ranks, start)
    report = Report(c, ranks, runner, plan, train_split, timer, log)
    report.start(start.step, meta, train_split, val_split, facts, verification.state, warm_up_s)
    sampler = sampler_for(c, runner, ranks, meta["tokenizer"])

    # ---- train -----------------------------------------------------------------------------------------------
    best_val_loss = start.best_val_loss
    health = Health(runner, ranks, start.step, c.grad_clip, c.max_bad_steps)
    health.restore(start.health, start.source)
    if not start.best_is_comparable:
        health.evaluations = []
    kept = start.kept
    rewound = False
    loader = Loader(train_split, plan, ranks.device, start.step + health.skipped_batches)
    writers = sharding.group_for_saves(c.dist_timeout_s) if runner.sharded else None
    saver = Saver(out_dir_of(c), ranks.say, best_val_loss, c.keep_checkpoints, c.save_async, writers)
    agenda = Agenda(c, ranks, began)
    timer.resume()
    step = start.step
    while True:
        lr = learning_rate(c, step)
        is_last = step >= c.max_iters or c.eval_only
        stop, save_is_due = agenda.due(step)
        listener.has_work_to_save = step > start.step
        verification.check()
        evaluated = (step % c.eval_interval == 0 or is_last) and not stop

        # ---- look back at the steps --------------------------------------------------------------------------
        if evaluated or save_is_due or stop:
            look_back(health, report, kept)
        back_to = after_spike(c, ranks, runner, optimizer, health, report, timer, saver, kept)
        if back_to is not None:
            step = back_to
            rewound = True
            loader.close()
            loader = Loader(train_split, plan, ranks.device, step + health.skipped_batches)
            continue

        # ---- evaluate ----------------------------------------------------------------------------------------
        improved = False
        if evaluated:
            for change in train_split.changes() + val_split.changes():
                ranks.say(f"warning: {change}")
            try:
                with timer.evaluation(), progress(ranks):
                    train = evaluate(c, runner, train_split, plan, ranks)
                    val = evaluate(c, runner, val_split, plan, ranks)
                    texts = sampled(c, sampler, step, is_last)
            except (ValueError, OSError) as e:  # a token file is not what it was
                agenda.fail(e)
            stop = agenda.broken_off()
        if evaluated and not stop:
            report.evaluation(step, lr, train, val)
            report.sampled(step, texts)
            health.check_val_loss(val.loss, step, kept_text(kept))
            best_val_loss = ranks.max(best_val_loss)  # which a save that failed has changed, on some ranks yet
            improved = val.loss < best_val_loss
            best_val_loss = min(best_val_loss, val.loss)
            if health.evaluated(step, train.loss, val.loss, val.standard_error):
                report.overfitting(health.evaluations)
        out_of_patience = evaluated and 0 < c.patience <= without_improvement(health.evaluations)

        # ---- save --------------------------------------------------------------------------------------------
        save_is_due = save_is_due and not health.bad_in_a_row  # these weights may be what fails
        wanted = stop or save_is_due or (evaluated and (improved or c.always_save_checkpoint)) or out_of_patience
        # Where a signal broke an evaluation off, the resumed run begins with it, and it may find the best.
        is_new = step > start.step or (improved and step > 0)
        saves = (wanted and is_new) or rewound
        if saves and (ranks.is_first or runner.sharded):
            ranks.say(f"saving checkpoint to {out_dir_of(c)}")
            with timer.saving():
                state = state_of_run(c, runner, optimizer, step, best_val_loss, meta, facts, log, health)
                saving = saver.save(state, best=improved)
            saving.save_s = timer.last_save_s
        for saved in saver.finished():
            report.saved(saved)
            if saved.best and saved.error and saved is saver.last:
                best_val_loss = saver.best_val_loss
        if saves:
            kept = Kept(out_dir_of(c) if runner.sharded else out_dir_of(c) / checkpoint.NAME, step)
            rewound = False
            agenda.saved_at = time.perf_counter()

        # ---- benchmark, after the save: it can take minutes --------------------------------------------------
        if benchmark and evaluated and not stop and benchmark.is_due(c, step, is_last or out_of_patience):
            with timer.evaluation(more=True), progress(ranks):
                found, in_words = benchmark.run(c, runner)
            if agenda.broken_off():
                continue  # with the end of the run
            report.tasks(step, found, in_words)
        if is_last or stop or out_of_patience:
            break

        # ---- one optimizer step ------------------------------------------------------------------------------
        for group in optimizer.param_groups:
            group["lr"] = lr

        loss = torch.zeros((), device=ranks.device)
        for micro_step in range(plan.micro_steps):
            # A random stream of its own for each micro-batch: a resumed run needs no generator state, and a row is
            # dropped out alike on whichever rank.
            if model.config.dropout:
                torch.manual_seed(hash((c.seed, step, plan.number(micro_step))) % 2**63)
            try:
                x, y, weight = loader.next()
            except (ValueError, OSError) as e:  # a token file is not what it was
                agenda.fail(e)
                break
            last = micro_step == plan.micro_steps - 1
            loss += runner.backward(x, y, plan.micro_steps, last=last, weight=weight)
        if agenda.failure:
            optimizer.zero_grad(set_to_none=True)
            continue  # with the end of the run

        runner.scaler.unscale_(optimizer)
        grad_norms = runner.gradient_norms()
        grad_norm = torch.linalg.vector_norm(grad_norms)
        torch.nn.utils.clip_grads_with_norm_(runner.parameters, c.grad_clip or math.inf, grad_norm)

        health.see(step, loss, grad_norm, grad_norms)
        step_if_finite(optimizer, runner.scaler, grad_norm)
        optimizer.zero_grad(set_to_none=True)
        timer.step_done()

        # ---- log ---------------------------------------------------------------------------------------------
        logs = step % c.log_interval == 0 or step == c.max_iters - 1
        if logs or health.must_catch_up:
            look_back(health, report, kept)
        if logs:
            window = timer.end_window(loader.take_wait_s())
            report.step(step, lr, health, window)
        step += 1

    # ---- end -------------------------------------------------------------------------------------------------
    with timer.saving():
        saver.wait()
    listener.has_work_to_save = False
    for saved in saver.finished():
        report.saved(saved)
    if not c.eval_only:
        if out_of_patience:
            report.out_of_patience(health.evaluations)
        if stop and step > 0:
            ranks.say(f"stopped by {stop} at step {step}")
        report.end(step, start.step, best_val_loss, health, kept)
    loader.close()
    if not verification.close():
        ranks.say("note: the run ended before the checksums of all its data were verified")
    log.close()
    ranks.close()
    saver.raise_if_last_failed()
    if agenda.failure:
        raise agenda.failure
    if stop and agenda.exit_status(stop):
        raise SystemExit(agenda.exit_status(stop))
    return best_val_loss


# ---- set-up --------------------------------------------------------------------------------------------------


def out_dir_of(c: TrainConfig) -> Path:
    return checkpoint.folder_of(c.out_dir)


def seconds_left(c: TrainConfig, began: float) -> float | None:
    """Of max_minutes, since the instant `began`; None without a limit."""
    if not c.max_minutes or c.eval_only:
        return None
    return 60 * c.max_minutes - (time.perf_counter() - began)


def describe_data(c: TrainConfig) -> dict[str, Any]:
    """What the data folder says about its tokens, as read_meta, and "chat", the name of its template, None without one.

    Raises ValueError if a split is missing.
    """
    folder = DATA / c.dataset
    if not c.dry_run:
        for split in ("train", "val"):
            shard_names(folder, split)
    return read_meta(folder) | {"chat": record_of(folder).get("chat")}


@dataclass
class StartingPoint:
    """What a run starts from: random weights, a checkpoint or GPT-2's weights."""

    source: str  # for messages
    config: GPTConfig
    weights: dict[str, Tensor] | None = None  # None: random ones, or those of `saved`
    saved: Checkpoint | None = None  # that has the weights
    tokenizer: dict[str, Any] | None = None  # that the weights were trained with, None if not known
    resumed: Checkpoint | None = None
    # of the resumed run:
    step: int = 0
    best_val_loss: float = math.inf
    best_is_comparable: bool = True  # with this run's validation losses
    wandb_run_id: str | None = None
    health: dict[str, Any] | None = None  # Health.state
    kept: Kept | None = None

    def build_model(self, block_size: int, reads: bool = True) -> GPT:
        """The model on the CPU, with its context shortened to block_size. Raises ValueError.

        reads: whether the weights of a checkpoint's folder matter; where a model is sharded, they do not on each rank.
        """
        weights = self.weights
        if self.saved is not None:
            weights = checkpoint.weights_of(self.saved) if reads else self.saved.model
        model = GPT(self.config) if weights is None else GPT.from_state(self.config, weights, self.source)
        model.crop_block_size(block_size)
        return model

    def form(self, device: torch.device) -> forms.EarlierForm:
        return forms.EarlierForm.of(self.resumed.form if self.resumed else None, device)

    def restore(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        """Loads the resumed run's optimizer and scaler. Raises ValueError where they do not fit."""
        if self.resumed is not None:
            checkpoint.restore_optimizer(optimizer, self.resumed.optimizer, self.source, self.resumed.folder)
            if self.resumed.scaler:
                scaler.load_state_dict(self.resumed.scaler)

    def release_memory(self) -> None:
        """Drops what the memory-mapped file holds, once it is loaded."""
        self.weights = None
        self.saved = None
        self.resumed = None


def starting_point(c: TrainConfig, meta: dict[str, Any], ranks: Ranks) -> StartingPoint:
    """Where init_from says that the run starts. Raises ValueError where c names another model than the source has."""
    if c.init_from == "scratch":
        vocab_size = padded_vocab_size(meta["tokenizer"], meta["vocab_size"])
        return StartingPoint("scratch", GPTConfig.from_settings(c, vocab_size))

    if c.init_from == "resume":
        saved = checkpoint.resume(c.out_dir, ranks.say, ranks)
        start = StartingPoint(
            source=c.out_dir,
            config=GPTConfig.from_args(saved.model_args | {"dropout": c.dropout}, c.out_dir),
            saved=saved,
            tokenizer=saved.tokenizer,
            resumed=saved,
            step=saved.iter_num,
            best_val_loss=saved.best_val_loss,
            wandb_run_id=saved.wandb_run_id,
            health=saved.health,
            kept=Kept(Path(c.out_dir), saved.iter_num),
        )
        if start.step > c.max_iters and not c.eval_only and not c.dry_run:
            raise ValueError(f"{c.out_dir} is at step {start.step:,}, past max_iters={c.max_iters}: raise --max_iters")
        ranks.say(f"going on from {c.out_dir}, step {start.step}")
        given = RESUMED_SETTINGS
    elif checkpoint.is_one(c.init_from):
        writes = not c.eval_only and not c.dry_run
        if writes and checkpoint.folder_of(c.init_from).resolve() == out_dir_of(c).resolve():
            raise ValueError(
                f"init_from={c.init_from} is where the new run would write, too: choose another --out_dir, or go on "
                "with that run: --init_from=resume"
            )
        saved = checkpoint.load(c.init_from, ranks=ranks)
        config = GPTConfig.from_args(saved.model_args | {"dropout": c.dropout}, c.init_from)
        start = StartingPoint(c.init_from, config, saved=saved, tokenizer=saved.tokenizer)
        given = RESUMED_SETTINGS
    else:
        model_args, weights = load_gpt2(c.init_from)
        config = GPTConfig.from_args(model_args | {"dropout": c.dropout}, c.init_from)
        start = StartingPoint(c.init_from, config, weights, tokenizer=tokenizer_of(c.init_from))
        given = MODERN_CHOICES if exported_model_args(c.init_from) is None else RESUMED_SETTINGS

    for name in given:
        wanted = getattr(c, name)
        there = getattr(start.config, name)
        # Evaluated, or finetuned, with the context of another model. build_model refuses a longer one.
        if name == "block_size" and (c.eval_only or start.resumed is None):
            continue
        if wanted != there:
            raise ValueError(f"{name}={wanted}, but {start.source} has {name}={there}: leave it out")
    return start


def placed_model(start: StartingPoint, c: TrainConfig, ranks: Ranks) -> GPT:
    """The model on this rank's device, as a whole or sharded. Raises ValueError.

    Where it is sharded, only the first rank builds it in the machine's memory, and none where each can read its own
    rows from a checkpoint.
    """
    shards = sharding.shards_of(c.dp_shard, ranks.world)
    if shards == 1:
        return start.build_model(c.block_size).to(ranks.device)
    each_reads = start.saved is not None and c.block_size == start.config.block_size
    builds = ranks.is_first and not each_reads
    with nullcontext() if builds else torch.device("meta"):
        model = start.build_model(c.block_size, reads=builds)
    mesh = sharding.make_mesh(ranks.device.type, shards, ranks.world)
    if start.saved is not None and each_reads:
        model = sharding.empty_copy(model, mesh, c.reshard_after_forward, ranks.device)
        checkpoint.restore_weights(model, start.saved)
        return model
    return sharding.sharded_copy(model, mesh, c.reshard_after_forward, ranks.device)


def facts_of_data(c: TrainConfig, train: Split, val: Split) -> resuming.Facts:
    """What tells data of the same size apart."""
    facts: resuming.Facts = {}
    for name, split in ((resuming.TRAIN_DATA, train), (checkpoint.VAL_DATA, val)):
        listed = listed_sha256(DATA / c.dataset, name.removesuffix(" data"))
        facts[name] = {"tokens": split.tokens, "fingerprint": split.fingerprint(), "sha256": listed}
    return facts


def facts_of_code(runner: Runner) -> resuming.Facts:
    """What computes: none of it changes the experiment."""
    on_cpu = runner.device.type == "cpu"  # whose name would have the number of threads, which ranks share
    device = hardware.processor()[0] if on_cpu else hardware.device_name(runner.device)
    return {"code": git_commit(), "versions": versions(), "device": device, "form": str(runner.form)}


def say_changes(c: TrainConfig, start: StartingPoint, data: resuming.Facts, val: Split, ranks: Ranks) -> None:
    """Says how a resumed run differs from the run before. The best loss of other evaluations is forgotten.

    Raises ValueError where that changes what is learned or compared, unless c has resume_changed.
    """
    if start.resumed is None:
        return
    changes = resuming.changes(start.resumed, c, data, val.n_eval_windows, learning_rate)
    refused = [str(change) for change in changes if change.matters]
    if refused and not c.resume_changed and not c.eval_only:
        raise ValueError(
            f"{start.source} is of another experiment: {'; '.join(refused)}. "
            f"{resuming.remedy(start.resumed, c, learning_rate)}Go on all the same with --resume_changed=True, or "
            f"begin a new run with its weights: --init_from={start.source}"
        )
    for change in changes:
        ranks.say(f"changed: {change}")
    if resuming.OF_EVALUATION & {change.name for change in changes}:
        start.best_val_loss = math.inf
        start.best_is_comparable = False
        if start.health:  # nor is patience counted across them
            start.health["evaluations"] = []


def say_changes_of_code(start: StartingPoint, code: resuming.Facts, ranks: Ranks) -> None:
    """Says what else computes now than in the run before."""
    if start.resumed is not None:
        for change in resuming.compare(start.resumed.facts, code):
            ranks.say(f"changed: {change}")


def copies_of_weights(c: TrainConfig) -> int:
    """How many times the weights' memory a run takes at least: weights, gradients, two moments (Muon has one)."""
    if c.eval_only:
        return 1
    return 3 if c.optimizer == "muon" else 4


def open_splits(c: TrainConfig, start: StartingPoint, meta: dict[str, Any]) -> tuple[Split, Split]:
    """The train and the val split. Raises ValueError where they do not belong to the model or cannot be aligned."""
    folder = DATA / c.dataset
    vocab_size = start.config.vocab_size
    check_vocabulary(folder, meta, vocab_size, start.tokenizer)
    document_start = meta["end_of_text"] if c.align_documents else None
    if c.align_documents and document_start is None:
        raise ValueError(f"align_documents=True: {folder} does not say which token documents begin with; leave it out")
    train = Split(folder, "train", c.block_size, vocab_size, c.seed, document_start)
    val = Split(folder, "val", c.block_size, vocab_size, c.seed, document_start)
    return train, val


def optimizer_for(c: TrainConfig, runner: Runner) -> torch.optim.AdamW:
    """The optimizer that c names; Muon's own matmuls run in bfloat16 where the device is fast in it."""
    on_cpu = runner.device.type == "cpu"
    fast_dtype = runner.form.dtype if on_cpu else peak_flops.fast_dtype(runner.device)
    return make_optimizer(
        runner.model,
        c.optimizer,
        c.weight_decay,
        c.learning_rate,
        (c.beta1, c.beta2),
        c.momentum,
        runner.device.type,
        bfloat16=fast_dtype == "bfloat16",
    )


def open_log(c: TrainConfig, ranks: Ranks, start: StartingPoint) -> RunLog:
    """The log of this run; an earlier run in out_dir is moved aside. Other ranks and eval_only write no file."""
    if not ranks.is_first or c.eval_only:
        return RunLog(None)
    wandb_run = None
    if c.wandb_log:
        wandb_run = start_wandb(c.wandb_project, c.wandb_run_name, asdict(c), start.wandb_run_id)
    if c.init_from != "resume":
        found = tuple(path.name for path in checkpoint.candidates(out_dir_of(c)))
        old = checkpoint.set_aside(out_dir_of(c), (*found, "log.jsonl"))
        if old:
            ranks.say(f"{out_dir_of(c)} held an earlier run; it is now in {old}")
    elif not start.best_is_comparable:
        best = checkpoint.best_of(out_dir_of(c))
        is_last = best in checkpoint.candidates(out_dir_of(c))[:1]  # a folder, which the run goes on from
        old = checkpoint.set_aside(out_dir_of(c), () if best is None or is_last else (best.name,))
        kept = f"; {best.name} is now in {old}" if best and old else ""
        ranks.say(f"the best val loss begins anew, since the losses before are those of another evaluation{kept}")
    return RunLog(out_dir_of(c) / "log.jsonl", wandb_run, start.wandb_run_id)


# ---- the loop's calls ----------------------------------------------------------------------------------------


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


class Agenda:
    """When a run saves and stops beside what its step count says: what one rank finds due is due for all."""

    # Where the ranks' wishes differ, the largest counts.
    SAVE = 1
    TIME_IS_UP = 2
    SIGNAL = 0x100  # and its number
    FAILURE = 0x200

    def __init__(self, c: TrainConfig, ranks: Ranks, began: float) -> None:
        self.c = c
        self.ranks = ranks
        self.ends_at = began + 3600 * c.max_hours if c.max_hours else math.inf
        self.saved_at = time.perf_counter()
        self.failure: Exception | None = None

    def due(self, step: int) -> tuple[str | None, bool]:
        """Why the run stops now, such as a signal's name, None to go on; and whether a checkpoint is due."""
        now = time.perf_counter()
        c = self.c
        by_steps = c.save_interval > 0 and step % c.save_interval == 0
        by_time = c.save_minutes > 0 and now >= self.saved_at + 60 * c.save_minutes
        wish = self.SAVE if by_steps or by_time else 0
        if now >= self.ends_at:
            wish = self.TIME_IS_UP
        agreed = self.ranks.agree(max(wish, self._interruption()))
        return self._reason(agreed), agreed == self.SAVE

    def broken_off(self) -> str | None:
        """Why an evaluation was broken off; None if it was not."""
        return self._reason(self.ranks.agree(self._interruption()))

    def fail(self, e: Exception) -> None:
        """The run saves and ends, with this error. With several ranks it ends at once: the others are in the step."""
        if self.ranks.world > 1:
            raise e
        self.failure = e

    def exit_status(self, stop: str) -> int:
        """The conventional status: 128 and the signal's number, 0 after max_hours."""
        return stopping.exit_status(signal.Signals[stop]) if stop in signal.Signals.__members__ else 0

    def _interruption(self) -> int:
        if self.failure:
            return self.FAILURE
        return self.SIGNAL + listener.signal if listener.signal else 0

    def _reason(self, wish: int) -> str | None:
        if wish <= self.SAVE:
            return None
        reasons = {self.TIME_IS_UP: "max_hours", self.FAILURE: "an error"}
        return reasons.get(wish) or signal.Signals(wish - self.SIGNAL).name


def evaluate(c: TrainConfig, runner: Runner, split: Split, plan: BatchPlan, ranks: Ranks) -> Evaluation:
    """The split's loss; a signal breaks it off, at the same batch on all ranks where these share the weights."""
    batches = eval_batches(split, plan, estimate.eval_windows(c), ranks.device)

    def goes_on(_: object) -> bool:
        stop = listener.signal or 0
        return not (stop if c.dp_shard == 1 else ranks.agree(stop))

    return runner.evaluate(itertools.takewhile(goes_on, batches), ranks)


def sampler_for(c: TrainConfig, runner: Runner, ranks: Ranks, tokenizer: dict[str, Any]) -> Sampler | None:
    """What writes the samples; None where c wants none, and on ranks that only wait meanwhile.

    tokenizer: as in meta.json. Says in one line if it cannot be had: the run does not need it.
    """
    if not c.sample_interval or c.eval_only or not ranks.is_first:
        return None
    # On a CPU without autocast, which would cast all weights again for each token.
    amp = nullcontext() if runner.device.type == "cpu" else runner.amp
    try:
        return Sampler(runner.model, from_meta(tokenizer), amp)
    except (ValueError, ModuleNotFoundError) as e:
        ranks.say(f"sample_interval={c.sample_interval}: no samples, since {message_for_user(e, '') or e}")
        return None


def sampled(c: TrainConfig, sampler: Sampler | None, step: int, is_last: bool) -> list[str]:
    """Texts of the model as it is now, where it is their turn; a signal breaks them off."""
    if sampler is None or not (is_last or step // c.eval_interval % c.sample_interval == 0):
        return []
    return sampler.texts(lambda: listener.signal is not None)


def progress(ranks: Ranks) -> AbstractContextManager[None]:
    """Says now and then that an evaluation goes on. A terminal shows a progress bar instead."""
    return nullcontext() if sys.stderr.isatty() else not_silent("still evaluating", ranks.say)


class Benchmark:
    """Tasks of lm_eval for the model as it trains, which they leave as it is; the ranks share the items."""

    def __init__(self, c: TrainConfig, tokenizer: dict[str, Any], model: GPT, ranks: Ranks) -> None:
        """Loads and checks the tasks. Raises ValueError where one cannot be had or does not fit model and tokenizer."""
        from bench import harness  # imports lm_eval, which takes seconds

        self.harness = harness
        if not tokenizer:
            raise ValueError(f"tasks={c.tasks}: {DATA / c.dataset} does not name the tokenizer that texts need")
        if not ranks.is_first:
            ranks.agree(0)  # until the first rank has downloaded the data
        self.tasks = harness.Tasks(c.tasks, limit=c.tasks_limit)
        if ranks.is_first:
            ranks.agree(0)
        self.backend = harness.Backend(
            model, from_meta(tokenizer), ranks=ranks, stopped=lambda: listener.signal is not None
        )
        if ranks.is_first:
            self.tasks.check(self.backend)

    def is_due(self, c: TrainConfig, step: int, is_last: bool) -> bool:
        return is_last or step // c.eval_interval % c.tasks_interval == 0

    def run(self, c: TrainConfig, runner: Runner) -> tuple[dict[str, dict[str, float | None]], str]:
        """What it found, as harness.figures, and in words; empty on other ranks than the first.

        A signal breaks it off: its figures then mean nothing.
        """
        self.backend.amp = runner.amp
        self.backend.batch_size = c.batch_size
        found = self.harness.figures(self.tasks.evaluate(self.backend))
        return found, self.tasks.in_words(found)


def state_of_run(
    c: TrainConfig,
    runner: Runner,
    optimizer: torch.optim.Optimizer,
    step: int,
    best_val_loss: float,
    meta: dict[str, Any],
    facts: dict[str, Any],
    log: RunLog,
    health: Health,
) -> Checkpoint:
    return Checkpoint(
        model=runner.model.state_dict(),
        optimizer=optimizer.state_dict(),
        model_args=runner.model.config.as_args(),
        iter_num=step,
        best_val_loss=best_val_loss,
        config=asdict(c),
        scaler=runner.scaler.state_dict(),
        tokenizer=meta["tokenizer"],
        chat=meta.get("chat"),
        train_tokens=facts[resuming.TRAIN_DATA]["tokens"],
        form=forms.saved_form(runner),
        wandb_run_id=log.wandb_run_id,
        health=health.state(),
        facts=facts,
    )


@dataclass(frozen=True)
class Kept:
    """The latest checkpoint that a run can go back to."""

    path: Path  # of the file or its folder
    step: int


def kept_text(kept: Kept | None) -> str:
    """What an error says about the checkpoints."""
    if kept is None:
        return "no checkpoint was saved yet"
    best = checkpoint.folder_of(kept.path) / checkpoint.BEST
    also = f", the best one is {best}" if best.exists() and best != kept.path else ""
    return f"the last checkpoint is {kept.path} of step {kept.step}{also}"


def look_back(health: Health, report: Report, kept: Kept | None) -> None:
    """Reports what the steps since the last look showed. Raises ValueError after too many bad ones in a row."""
    found = health.catch_up()
    for bad in found.bad:
        report.bad_step(bad, health.names)
    for spike in found.spikes:
        report.spike(spike)
    health.check_gradients(kept_text(kept))


def after_spike(
    c: TrainConfig,
    ranks: Ranks,
    runner: Runner,
    optimizer: torch.optim.Optimizer,
    health: Health,
    report: Report,
    timer: StepTimer,
    saver: Saver,
    kept: Kept | None,
) -> int | None:
    """Does what on_spike says after a loss spike. Returns the step that the run went back to, None if it goes on.

    Going back changes weights in place: compiled forms and DDP hold these tensors. Raises ValueError to end the run.
    """
    spike = health.take_spike()
    if spike is None or c.on_spike == "go":
        return None
    if c.on_spike == "stop":
        raise ValueError(f"on_spike=stop: the loss leapt to {spike.loss:.4f} at step {spike.step}; {kept_text(kept)}")
    if kept is None:
        ranks.say("on_spike=rewind: no checkpoint was saved yet, so the run goes on")
        return None
    with timer.saving():
        saver.wait()
        ranks.all(True)  # the first rank has written it by now
        saved = checkpoint.load(kept.path, ranks=ranks)
        step = saved.iter_num
        if health.rewinds_to(step) >= MAX_REWINDS:
            raise ValueError(
                f"on_spike=rewind: {MAX_REWINDS} times back to step {step}, and the loss leapt again: it is not the "
                f"data; try a lower --learning_rate; {kept_text(kept)}"
            )
        checkpoint.restore_weights(runner.model, saved)
        checkpoint.restore_optimizer(optimizer, saved.optimizer, str(kept.path), saved.folder)
        if saved.scaler:
            runner.scaler.load_state_dict(saved.scaler)
        health.rewind(step, spike, saved.health, str(kept.path))
        ranks.all(True)  # no rank replaces the file while another reads it
    report.rewind(step, spike, health.skipped_batches)
    return step


# ---- what a run reports --------------------------------------------------------------------------------------


class Report:
    """What a run says on the terminal and writes to log.jsonl."""

    def __init__(
        self,
        c: TrainConfig,
        ranks: Ranks,
        runner: Runner,
        plan: BatchPlan,
        train_split: Split,
        timer: StepTimer,
        log: RunLog,
    ) -> None:
        self.c = c
        self.ranks = ranks
        self.runner = runner
        self.train_split = train_split
        self.timer = timer
        self.log = log
        self.warm_up_s = 0.0
        self.is_chat = False  # whether the data are dialogues
        self.val_text: TextFacts | None = None  # on the first rank, where it is known
        self.global_batch = plan.global_batch
        self.tokens_per_step = plan.global_batch * c.block_size
        self.flops_per_token = runner.model.estimate_flops()
        peak, self.peak_source = peak_flops.peak_flops(ranks.device, runner.form.dtype)
        measured = peak_flops.measured_matmul_flops(ranks.device, runner.form.dtype)
        of_all_ranks = ranks.sum(torch.tensor([peak, measured], dtype=torch.float64))
        self.peak_flops, self.measured_flops = of_all_ranks.tolist()

    def start(
        self,
        step: int,
        meta: dict[str, Any],
        train: Split,
        val: Split,
        facts: dict[str, Any],
        checksums: str,
        warm_up_s: float,
    ) -> None:
        c = self.c
        say = self.ranks.say
        device = self.ranks.device
        form = self.runner.form
        model = self.runner.model
        compiler = compiling.compiler_name(device) if form.compiled else None
        by = re.sub(r" \(.*?\)", "", f" by {compiler}") if compiler else ""  # "g++ 12.2.0", without its package's name
        name = hardware.device_name(device)
        self.warm_up_s = warm_up_s
        self.is_chat = meta["chat"] is not None
        say(f"data: {(DATA / c.dataset).name}, {train.tokens:,} train and {val.tokens:,} val tokens, {checksums}")
        for poverty in (train.poverty(), val.poverty()):
            if poverty:
                say(f"warning: {poverty}")
        say(f"number of parameters: {model.num_params() / 1e6:.2f}M, {self.flops_per_token / 1e6:.2f} MFLOPs per token")
        say(f"device: {self.ranks.world} x {name}, {form}{by}{sharding.in_words(c.dp_shard, self.ranks.world)}")
        say(f"mfu refers to {self.peak_flops / 1e12:.2f} TFLOP/s ({self.peak_source}); warm-up took {warm_up_s:.1f}s")
        say(f"tokens per iteration will be: {self.tokens_per_step:,}")
        if self.ranks.is_first:
            try:
                self.val_text = text_facts(val, facts[checkpoint.EVAL_WINDOWS], from_meta_offline(meta["tokenizer"]))
            except (ValueError, OSError) as e:
                say(f"bits per byte are not known: {e}")
        self.log.write(
            "start",
            settings=asdict(c),
            iter=step,
            model_args=asdict(model.config),
            parameters=model.num_params(),
            flops_per_token=self.flops_per_token,
            tokens_per_step=self.tokens_per_step,
            tokenizer=meta["tokenizer"].get("name"),
            train_tokens=train.tokens,
            val_tokens=val.tokens,
            val_sha256=facts[checkpoint.VAL_DATA]["fingerprint"],
            **(self.val_text.as_facts() if self.val_text else {}),
            device=name,
            cpu=hardware.cpu_facts() if device.type == "cpu" else None,
            world_size=self.ranks.world,
            dtype=form.dtype,
            compiled=form.compiled,
            explicit_attention=form.explicit,
            compiler=compiler,
            peak_flops=self.peak_flops,
            peak_source=self.peak_source,
            measured_flops=self.measured_flops,
            warm_up_s=warm_up_s,
            versions=facts["versions"],
            git_commit=facts["code"],
        )

    def evaluation(self, step: int, lr: float, train: Evaluation, val: Evaluation) -> None:
        eval_s = self.timer.last_eval_s
        val_bpb = self.val_text.bits_per_byte(val.loss) if self.val_text else None
        self.log.write(
            "eval",
            iter=step,
            train_loss=train.loss,
            val_loss=val.loss,
            val_se=val.standard_error,
            val_bpb=val_bpb,
            lr=lr,
            tokens=step * self.tokens_per_step,
            train_s=self.timer.trained_s(),
            eval_s=eval_s,
        )
        error = "" if val.standard_error is None else f", standard error {val.standard_error:.4f}"
        bits = "" if val_bpb is None else f", bits per byte {val_bpb:.4f}"
        self.ranks.say(
            f"step {step}: train loss {train.loss:.4f}, val loss {val.loss:.4f}, eval time {eval_s:.2f}s{error}{bits}"
        )

    def sampled(self, step: int, texts: list[str]) -> None:
        if texts:
            self.log.write("sample", iter=step, texts=texts)

    def saved(self, saved: Saved) -> None:
        if saved.error is None:
            fields = {"iter": saved.step, "best": saved.best, "save_s": saved.save_s, "write_s": saved.write_s}
            self.log.write("save", **fields)

    def tasks(self, step: int, found: dict[str, dict[str, float | None]], in_words: str) -> None:
        """found: by task its metrics and their standard errors."""
        self.log.write("tasks", iter=step, results=found)
        self.ranks.say(f"step {step}: {in_words}")

    def step(self, step: int, lr: float, health: Health, window: Window) -> None:
        """window: the steps since the last of these lines."""
        assert health.last is not None
        loss = health.last.loss
        grad_norm = health.last.grad_norm
        c = self.c
        timer = self.timer
        tokens_per_s = self.tokens_per_step / window.step_s
        mfu = tokens_per_s * self.flops_per_token / self.peak_flops
        mfu_measured = tokens_per_s * self.flops_per_token / self.measured_flops
        has_two_peaks = math.isfinite(self.measured_flops) and self.measured_flops != self.peak_flops
        on_measured = f"mfu_measured {mfu_measured * 100:.2f}%, " if has_two_peaks else ""
        evaluations_left = math.ceil(c.max_iters / c.eval_interval) - step // c.eval_interval
        eta_s = (c.max_iters - step - 1) * window.step_s
        eta_s += evaluations_left * (timer.last_eval_s + timer.last_save_s)
        self.ranks.say(
            f"iter {step}: loss {loss:.4f}, time {window.step_s * 1e3:.2f}ms, mfu {mfu * 100:.2f}%, "
            f"tok/s {tokens_per_s:,.0f}, {on_measured}lr {lr:.3e}, grad_norm {grad_norm:.3f}, "
            f"data wait {window.data_wait * 100:.1f}%, eta {clock(eta_s)}"
        )
        self.log.write(
            "iter",
            iter=step,
            loss=loss,
            time_ms=window.step_s * 1e3,
            mfu=mfu,
            mfu_measured=mfu_measured,
            tokens_per_s=tokens_per_s,
            data_wait=window.data_wait,
            lr=lr,
            grad_norm=grad_norm,
            clip_rate=health.take_clip_rate(),
            tokens=(step + 1) * self.tokens_per_step,
            train_s=timer.train_s,
            peak_memory_bytes=hardware.peak_memory_bytes(self.ranks.device),
        )

    def bad_step(self, bad: Step, names: list[str]) -> None:
        """names: of the parameters."""
        which = bad_parameters(bad.norms, names)
        self.ranks.say(f"step {bad.step}: gradients are not finite ({which}): no update; {self.batch(bad.position)}")
        scaler = self.runner.scaler
        self.log.write(
            "bad_step",
            iter=bad.step,
            loss=bad.loss,
            which=which,
            loss_scale=scaler.get_scale() if scaler.is_enabled() else None,
            **self.windows(bad.position),
        )

    def spike(self, spike: Spike) -> None:
        self.ranks.say(
            f"step {spike.step}: loss spike, {spike.loss:.4f} after a median of {spike.median:.4f}; "
            f"{self.batch(spike.position)}"
        )
        self.log.write("spike", iter=spike.step, loss=spike.loss, median=spike.median, **self.windows(spike.position))

    def rewind(self, step: int, spike: Spike, skipped_batches: int) -> None:
        self.ranks.say(f"back to step {step}; the batches from there to that of step {spike.step} are skipped")
        self.log.write("rewind", iter=step, spike=spike.step, skipped_batches=skipped_batches)

    def batch(self, position: int) -> str:
        """The rows of a global batch, and the files that they are in."""
        first = position * self.global_batch
        files = list(self.windows(position)["windows"])
        more = f" and {len(files) - 1} more files" if len(files) > 1 else ""
        return f"its batch has rows {first:,} to {first + self.global_batch - 1:,}, of {files[0]}{more}"

    def windows(self, position: int) -> dict[str, Any]:
        """Which rows of all batches a global batch has, and where in which token file their windows begin."""
        rows = np.arange(self.global_batch)
        begins: dict[str, list[int]] = {}
        for shard, first in zip(*self.train_split.places(position, rows, self.global_batch), strict=True):
            begins.setdefault(self.train_split.shards[shard].path.name, []).append(int(first))
        first_row = position * self.global_batch
        return {"rows": [first_row, first_row + self.global_batch - 1], "windows": begins}

    def overfitting(self, evaluations: list[Evaluated]) -> None:
        """Says so when the val loss has begun to rise while the train loss falls."""
        now = overfit(evaluations)
        if now is None or overfit(evaluations[:-1]) is not None:
            return
        step, rise = now
        self.ranks.say(
            f"overfitting: the val loss is {rise:.4f} above that of step {step}, while the train loss has fallen; "
            "more data, --dropout or a smaller model may help"
        )
        self.log.write("overfit", iter=evaluations[-1].step, best_iter=step, rise=rise)

    def out_of_patience(self, evaluations: list[Evaluated]) -> None:
        n = without_improvement(evaluations)
        best = lowest(evaluations)
        self.ranks.say(
            f"patience={self.c.patience}: the last {n} evaluations improved by no more than the standard error; "
            f"the lowest val loss was {best.val_loss:.4f} at step {best.step}"
        )

    def end(self, step: int, first_step: int, best_val_loss: float, health: Health, kept: Kept | None) -> None:
        """One screen: where the time went, what is best and where it is, and what can be done next."""
        timer = self.timer
        say = self.ranks.say
        memory = hardware.peak_memory_bytes(self.ranks.device)
        memory_gib = "n/a" if memory is None else f"{memory / 2**30:.2f} GiB"
        say(
            f"{step - first_step} steps: {clock(timer.train_s)} of training ({clock(timer.wait_s)} waiting for data), "
            f"{clock(timer.eval_s)} of evaluation, {clock(timer.save_s)} of saving; "
            f"warm-up {clock(self.warm_up_s)}; peak memory {memory_gib}; best val loss {best_val_loss:.4f}"
        )
        if health.n_bad or health.n_spikes:
            say(f"{health.n_bad} steps without an update, {health.n_spikes} loss spikes, {health.n_rewinds} rewinds")
        found = [e.step for e in health.evaluations if e.val_loss == best_val_loss]
        best_step = found[0] if found else None  # unknown where an older checkpoint has only the loss
        if kept is not None:
            is_over = 0 < self.c.patience <= without_improvement(health.evaluations)
            more = ["--patience=0"] if is_over else []
            if step >= self.c.max_iters:
                more = [f"--max_iters={2 * step}"]
                if self.c.decay_lr and not self.c.lr_decay_iters:  # the schedule gets another end
                    more.append("--resume_changed=True")
            self.next_commands(kept, best_step, more)
        self.log.write(
            "end",
            iter=step,
            train_s=timer.train_s,
            data_wait_s=timer.wait_s,
            eval_s=timer.eval_s,
            save_s=timer.save_s,
            peak_memory_bytes=memory,
            best_val_loss=best_val_loss,
            best_iter=best_step,
            bad_steps=health.n_bad,
            spikes=health.n_spikes,
            rewinds=health.n_rewinds,
        )

    def next_commands(self, kept: Kept, best_step: int | None, more: list[str]) -> None:
        """Where the best model is, and the commands to sample from it, to go on and to compare.

        more: the settings without which a resumed run would have nothing to do.
        """
        say = self.ranks.say
        out_dir = out_dir_of(self.c)
        best = checkpoint.best_of(out_dir) or kept.path
        of_step = "" if best_step is None else f" of step {best_step}"
        say(f"best model{of_step}: {best}")
        say("sample:  " + command("python", "sample.py", f"--out_dir={best}", *(["--chat"] if self.is_chat else [])))
        say("resume:  " + resume_command(self.c, self.ranks, *more))
        say("compare: " + command("python", "bench/compare.py", str(out_dir), "OTHER_OUT_DIR"))


def resume_command(c: TrainConfig, ranks: Ranks, *more: str) -> str:
    """What to type to go on with this run; the checkpoint knows its settings. more: further settings."""
    script = command("train.py", "--init_from=resume", f"--out_dir={out_dir_of(c)}", *more)
    if not ranks.distributed:
        return f"python {script}"
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":  # several machines: torchrun's options have their addresses
        return f"torchrun (with its options as before) {script}"
    return f"torchrun --standalone --nproc_per_node={ranks.world} {script}"


def command(*words: str) -> str:
    """A line to type in this system's shell."""
    return subprocess.list2cmdline(words) if sys.platform == "win32" else shlex.join(words)


# ---- command line --------------------------------------------------------------------------------------------


def settings_of_start(argv: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    """What init_from makes of settings, those of the config files and the command line in argv."""
    if settings["init_from"] == "auto" and not checkpoint.is_one(settings["out_dir"]):
        # As the config files say, so that one command serves every start of a finetuning run, too.
        argv = [arg for arg in argv if arg != "--init_from=auto"]
        settings = read_settings(TrainConfig, argv)
        if settings["init_from"] == "auto":
            settings["init_from"] = "scratch"
    source = settings["init_from"]
    if source in ("resume", "auto"):
        return resumed_settings(argv, settings["out_dir"])
    if checkpoint.is_one(source) or exported_model_args(source):
        return finetuning_settings(argv, source)
    return settings


def resumed_settings(argv: list[str], out_dir: str) -> dict[str, Any]:
    """The settings of the run in out_dir, overridden by config files (but for the model's size) and command line."""
    saved = checkpoint.load(out_dir, checksums=False)
    of_model = [f"--{name}={value}" for name, value in settings_of_model(saved.model_args, out_dir).items()]
    known = {k: v for k, v in saved.config.items() if k in TrainConfig.__dataclass_fields__}
    # The checkpoint's max_iters may come from its max_minutes. A user who names new minutes wants more steps.
    known |= {"out_dir": out_dir, "init_from": "resume", "eval_only": False, "max_minutes": 0.0}
    known["resume_changed"] = False  # is meant for one time
    settings = read_settings(TrainConfig, [*of_model, *argv], known)
    if settings["init_from"] == "auto":  # the same command as before: max_minutes has made its plan already
        settings["init_from"] = "resume"
        if settings["max_minutes"]:
            settings |= {name: known[name] for name in estimate.PLANNED if name in known}
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
    if checkpoint.is_one(source):
        model_args = checkpoint.load(source, checksums=False).model_args
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
    if reads_only or place_of(os.environ).rank > 0:
        return nullcontext()
    restarts = settings["init_from"] == "auto" and place_of(os.environ).distributed
    return only_run_in(checkpoint.folder_of(settings["out_dir"]), RESTART_S if restarts else 0.0)


if __name__ == "__main__":
    if_out_of_memory = (
        "halve --batch_size and double --gradient_accumulation_steps, the same training, or take a smaller model"
    )
    with lasting_output(), one_line_errors(if_out_of_memory):
        settings = read_settings(TrainConfig, sys.argv[1:])
        with lock_of(settings):
            main(build(TrainConfig, settings_of_start(sys.argv[1:], settings)))
