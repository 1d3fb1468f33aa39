"""Trains a GPT on a folder of token files, on one CPU or GPU or on several with torchrun.

    python train.py config/train_shakespeare_char_cpu.py
    python train.py config/train_shakespeare_char.py --batch_size=32 --compile=False
    python train.py --init_from=resume --out_dir=out-shakespeare-char
    torchrun --standalone --nproc_per_node=4 train.py config/train_gpt2.py

Writes out_dir/ckpt.pt (and ckpt_best.pt) and out_dir/log.jsonl, which holds what the terminal shows.
"""

from __future__ import annotations

from deskgpt.stopping import listener

if __name__ == "__main__":
    listener.listen()  # before torch is imported, which takes seconds

import functools
import itertools
import math
import re
import signal
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from configurator import build, read_settings
from data.loader import BatchPlan, Loader, eval_batches, first_micro_batch
from data.splits import Split
from data.token_files import check_vocabulary, listed_sha256, read_meta, token_files
from data.tokenizer import padded_vocab_size
from deskgpt import checkpoint, compiling, estimate, forms, hardware, peak_flops, resuming, stopping
from deskgpt.checkpoint import Checkpoint
from deskgpt.errors import one_line_errors
from deskgpt.gpt2_weights import load_gpt2
from deskgpt.gpu_peaks import find_card
from deskgpt.health import FiniteWatch
from deskgpt.optimizer import make_optimizer
from deskgpt.plan import dry_run
from deskgpt.ranks import Ranks, start_ranks
from deskgpt.runlog import RunLog, StepTimer, Window, clock, git_commit, not_silent, start_wandb, versions
from deskgpt.runner import Evaluation, Runner
from model import GPT, MODERN_CHOICES, GPTConfig, ModelSettings, check_size

DATA = Path(__file__).parent / "data"
# What a resumed run takes from its checkpoint.
RESUMED_SETTINGS = tuple(f.name for f in fields(ModelSettings) if f.name != "dropout")

# Sequences per step: more would take the memory, or a step without an end.
MOST_SEQUENCES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(ModelSettings):  # which has n_layer, n_head, n_embd, block_size ...
    # input and output
    out_dir: str = "out"  # checkpoints and log.jsonl; to resume from another checkpoint in it, out/ckpt_best.pt
    dataset: str = "openwebtext"  # folder below data/, or a path, with train*.bin and val*.bin
    init_from: str = "scratch"  # scratch, resume, gpt2[-medium|-large|-xl], a checkpoint, a folder in GPT-2's format
    eval_interval: int = 2000  # steps between evaluations, each followed by a checkpoint
    eval_iters: int = 200  # micro-batches per split and evaluation; a split with fewer is read whole
    eval_tokens: int = 0  # tokens per split instead, the same ones with any micro-batch; 0 = eval_iters
    eval_only: bool = False  # evaluate once, write nothing
    dry_run: bool = False  # only say what the run needs: FLOPs, memory, time
    plan_for: str = ""  # a dry run for a card that is not here: "RTX 4070", "A100 80GB"; all: a table of cards
    log_interval: int = 1  # steps per log line
    always_save_checkpoint: bool = True  # False: only when the validation loss has improved
    # saving and stopping
    save_interval: int = 0  # steps between checkpoints, beside those of evaluations; 0 = none
    save_minutes: float = 15.0  # the longest time between checkpoints; 0 = no limit
    max_hours: float = 0.0  # then save and end, to be resumed later; the schedule stays that of max_iters; 0 = no limit
    patience: int = 0  # end after so many evaluations without an improvement beyond the standard error; 0 = never
    resume_changed: bool = False  # True: resume although data, batch or schedule are not those of the run before
    max_bad_steps: int = 10  # end after so many steps in a row whose gradients are not finite; such steps are skipped
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
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # of torch.distributed; auto = nccl on CUDA, gloo elsewhere
    seed: int = 1337  # of initial weights, batch order and dropout
    # Weights & Biases
    wandb_log: bool = False
    wandb_project: str = "owt"
    wandb_run_name: str = "gpt2"

    def __post_init__(self) -> None:
        ModelSettings.__post_init__(self)
        least = dict.fromkeys(("eval_interval", "eval_iters", "log_interval", "batch_size"), 1)
        least["gradient_accumulation_steps"] = 1
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            low = least.get(name, 0)
            if isinstance(value, int | float) and value < low:
                raise ValueError(f"{name}={value} must be at least {low}")
        for name, limit in {"beta1": 1, "beta2": 1, "momentum": 1, "seed": 2**63}.items():
            if getattr(self, name) >= limit:
                raise ValueError(f"{name}={getattr(self, name)} must be below {limit}")
        for name in self.__dataclass_fields__:
            check_size(name, getattr(self, name))
        sequences = self.batch_size * self.gradient_accumulation_steps
        if sequences > MOST_SEQUENCES:
            raise ValueError(
                f"batch_size={self.batch_size} x gradient_accumulation_steps={self.gradient_accumulation_steps} are "
                f"{sequences:,} sequences per step; at most {MOST_SEQUENCES:,}"
            )
        if self.plan_for:  # who asks for a plan does not want to train
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
    hardware.keep_freed_memory()
    ranks = start_ranks("cpu" if c.plan_for else c.device, c.backend)
    hardware.forbid_spilling(ranks.device)
    plan = BatchPlan.of(c.batch_size, c.gradient_accumulation_steps, ranks.rank, ranks.world)
    torch.manual_seed(c.seed)

    # ---- data and model --------------------------------------------------------------------------------------
    meta = describe_data(c)
    start = starting_point(c, meta)
    if c.dry_run:
        dry_run(c, replace(start.config, block_size=c.block_size), ranks)
        return math.inf
    train_split, val_split = open_splits(c, start, meta)
    data = facts_of_data(c, train_split, val_split)
    if seconds_left(c, began) is None:
        say_changes(c, start, data, val_split, ranks)
    estimate.refuse_beyond_memory(start.config, copies_of_weights(c), ranks.device)
    model = start.build_model(c.block_size).to(ranks.device)

    # ---- how it runs here ------------------------------------------------------------------------------------
    batch_of = functools.partial(first_micro_batch, train_split, plan, ranks.device)
    steps = 0 if c.eval_only else c.max_iters - start.step
    runner, c = forms.settle(model, c, ranks, batch_of, start.form(ranks.device), steps, seconds_left(c, began))
    plan = BatchPlan.of(c.batch_size, c.gradient_accumulation_steps, ranks.rank, ranks.world)
    optimizer = optimizer_for(c, runner)
    if ranks.distributed:
        runner.distribute()
    left_s = seconds_left(c, began)
    if left_s is not None:
        batch = batch_of(c.batch_size)
        splits = (train_split, val_split)
        c = replace(c, **estimate.steps_within(left_s, c, runner, optimizer, batch, splits, start.step, ranks))
        say_changes(c, start, data, val_split, ranks)  # only now is the schedule known
    facts = data | facts_of_code(runner)
    say_changes_of_code(start, facts, ranks)
    if start.step and not c.eval_only:
        start.restore(optimizer, runner.scaler)
    start.release_memory()
    warm_up_s = time.perf_counter() - began

    # ---- log -------------------------------------------------------------------------------------------------
    timer = StepTimer(ranks.device)
    log = open_log(c, ranks, start)
    report = Report(c, ranks, runner, plan, timer, log)
    report.start(start.step, meta, train_split, val_split, facts, warm_up_s)
    watch = FiniteWatch(model, runner.form, start.step, kept=f"the files in {out_dir_of(c)} are unchanged")

    # ---- train -----------------------------------------------------------------------------------------------
    best_val_loss = start.best_val_loss
    loader = Loader(train_split, plan, ranks.device, start.step)
    agenda = Agenda(c, ranks, began)
    listener.has_work_to_save = True
    timer.resume()
    for step in itertools.count(start.step):
        lr = learning_rate(c, step)
        is_last = step >= c.max_iters or c.eval_only
        stop = agenda.reason_to_stop()

        # ---- evaluate ----------------------------------------------------------------------------------------
        evaluated = (step % c.eval_interval == 0 or is_last) and not stop
        improved = False
        if evaluated:
            watch.check_gradients()
            with timer.evaluation(), progress(ranks):
                train = evaluate(c, runner, train_split, plan, ranks)
                val = evaluate(c, runner, val_split, plan, ranks)
            stop = agenda.signal()  # which has broken the evaluation off
        if evaluated and not stop:
            report.evaluation(step, lr, train, val)
            watch.check_loss("val loss", val.loss, step)
            improved = val.loss < best_val_loss
            best_val_loss = min(best_val_loss, val.loss)

        # ---- save --------------------------------------------------------------------------------------------
        wanted = stop or agenda.save_is_due(step) or (evaluated and (improved or c.always_save_checkpoint))
        is_new = step > start.step or not start.best_is_comparable
        if wanted and is_new and ranks.is_first:
            ranks.say(f"saving checkpoint to {out_dir_of(c)}")
            with timer.saving():
                state = state_of_run(c, runner, optimizer, step, best_val_loss, meta, facts, log)
                checkpoint.save(state, out_dir_of(c), best=improved)
            report.saved(step, improved)
        if is_last or stop:
            break

        # ---- one optimizer step ------------------------------------------------------------------------------
        for group in optimizer.param_groups:
            group["lr"] = lr

        if model.config.dropout:  # a new random stream at each step, so that a resumed run needs no generator state
            torch.manual_seed(hash((c.seed, step, ranks.rank)) % 2**63)
        loss = torch.zeros((), device=ranks.device)
        for micro_step in range(plan.micro_steps):
            x, y = loader.next()
            loss += runner.backward(x, y, plan.micro_steps, last=micro_step == plan.micro_steps - 1)

        runner.scaler.unscale_(optimizer)
        grad_norms = torch.stack(torch._foreach_norm(runner.gradients()))
        grad_norm = torch.linalg.vector_norm(grad_norms)
        torch.nn.utils.clip_grads_with_norm_(runner.parameters, c.grad_clip or math.inf, grad_norm)

        if not runner.scaler.is_enabled() or runner.scaler.get_scale() < 1:  # above 1, float16 skips such a step
            watch.see(step, grad_norms)
        logs = step % c.log_interval == 0 or step == c.max_iters - 1
        if logs or ranks.device.type == "cpu":  # elsewhere asking would wait for the device
            watch.check_gradients()

        runner.scaler.step(optimizer)
        runner.scaler.update()
        optimizer.zero_grad(set_to_none=True)
        timer.step_done()

        # ---- log ---------------------------------------------------------------------------------------------
        if logs:
            mean_loss = ranks.sum(loss).item() / ranks.world
            window = timer.end_window(loader.take_wait_s())
            watch.check_loss("loss", mean_loss, step)
            report.step(step, lr, mean_loss, grad_norm.item(), window)

    # ---- end -------------------------------------------------------------------------------------------------
    report.end(step, step - start.step, best_val_loss)
    loader.close()
    log.close()
    ranks.close()
    if stop:
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
    """What the data folder says about its tokens, as read_meta. Raises ValueError if a split is missing."""
    folder = DATA / c.dataset
    if not c.dry_run:
        for split in ("train", "val"):
            token_files(folder, split)
    return read_meta(folder)


@dataclass
class StartingPoint:
    """What a run starts from: random weights, a checkpoint or GPT-2's weights."""

    source: str  # for messages
    config: GPTConfig
    weights: dict[str, Tensor] | None = None  # None: random ones
    tokenizer: dict[str, Any] | None = None  # that the weights were trained with, None if not known
    resumed: Checkpoint | None = None
    # of the resumed run:
    step: int = 0
    best_val_loss: float = math.inf
    best_is_comparable: bool = True  # with this run's validation losses
    wandb_run_id: str | None = None

    def build_model(self, block_size: int) -> GPT:
        """The model on the CPU, with its context shortened to block_size. Raises ValueError."""
        model = GPT(self.config) if self.weights is None else GPT.from_state(self.config, self.weights, self.source)
        model.crop_block_size(block_size)
        return model

    def form(self, device: torch.device) -> forms.EarlierForm:
        return forms.EarlierForm.of(self.resumed.form if self.resumed else None, device)

    def restore(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        """Loads the resumed run's optimizer and scaler. Raises ValueError where they do not fit."""
        if self.resumed is not None:
            checkpoint.restore_optimizer(optimizer, self.resumed.optimizer, self.source)
            if self.resumed.scaler:
                scaler.load_state_dict(self.resumed.scaler)

    def release_memory(self) -> None:
        """Drops what the memory-mapped file holds, once it is loaded."""
        self.weights = None
        self.resumed = None


def starting_point(c: TrainConfig, meta: dict[str, Any]) -> StartingPoint:
    """Where init_from says that the run starts. Raises ValueError where c names another model than the source has."""
    if c.init_from == "scratch":
        vocab_size = padded_vocab_size(meta["tokenizer"], meta["vocab_size"])
        return StartingPoint("scratch", GPTConfig.from_settings(c, vocab_size))

    if c.init_from == "resume":
        saved = checkpoint.load(c.out_dir)
        start = StartingPoint(
            source=c.out_dir,
            config=GPTConfig.from_args(saved.model_args | {"dropout": c.dropout}, c.out_dir),
            weights=saved.model,
            tokenizer=saved.tokenizer,
            resumed=saved,
            step=saved.iter_num,
            best_val_loss=saved.best_val_loss,
            wandb_run_id=saved.wandb_run_id,
        )
        if start.step > c.max_iters and not c.eval_only and not c.dry_run:
            raise ValueError(f"{c.out_dir} is at step {start.step:,}, past max_iters={c.max_iters}: raise --max_iters")
        given = RESUMED_SETTINGS
    elif checkpoint.is_one(c.init_from):
        writes = not c.eval_only and not c.dry_run
        if writes and checkpoint.folder_of(c.init_from).resolve() == out_dir_of(c).resolve():
            raise ValueError(
                f"init_from={c.init_from} is where the new run would write, too: choose another --out_dir, or go on "
                "with that run: --init_from=resume"
            )
        saved = checkpoint.load(c.init_from)
        config = GPTConfig.from_args(saved.model_args | {"dropout": c.dropout}, c.init_from)
        start = StartingPoint(c.init_from, config, saved.model, saved.tokenizer)
        given = RESUMED_SETTINGS
    else:
        model_args, weights = load_gpt2(c.init_from)
        config = GPTConfig.from_args(model_args | {"dropout": c.dropout}, c.init_from)
        start = StartingPoint(c.init_from, config, weights, {"name": "gpt2"})
        given = MODERN_CHOICES

    for name in given:
        wanted = getattr(c, name)
        there = getattr(start.config, name)
        # Evaluated, or finetuned, with the context of another model. build_model refuses a longer one.
        if name == "block_size" and (c.eval_only or start.resumed is None):
            continue
        if wanted != there:
            raise ValueError(f"{name}={wanted}, but {start.source} has {name}={there}: leave it out")
    return start


def facts_of_data(c: TrainConfig, train: Split, val: Split) -> resuming.Facts:
    """What tells data of the same size apart."""
    facts: resuming.Facts = {}
    for name, split in ((resuming.TRAIN_DATA, train), (resuming.VAL_DATA, val)):
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


def say_changes_of_code(start: StartingPoint, facts: resuming.Facts, ranks: Ranks) -> None:
    """Says what else computes now than in the run before."""
    if start.resumed is not None:
        of_code = {name: fact for name, fact in facts.items() if name not in (resuming.TRAIN_DATA, resuming.VAL_DATA)}
        for change in resuming.compare(start.resumed.facts, of_code):
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
        old = checkpoint.set_aside(out_dir_of(c), (checkpoint.NAME, checkpoint.BEST, "log.jsonl"))
        if old:
            ranks.say(f"{out_dir_of(c)} held an earlier run; it is now in {old}")
    elif not start.best_is_comparable:
        old = checkpoint.set_aside(out_dir_of(c), (checkpoint.BEST,))
        kept = f"; {checkpoint.BEST} is now in {old}" if old else ""
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
    """When a run saves and stops beside what its step count says."""

    def __init__(self, c: TrainConfig, ranks: Ranks, began: float) -> None:
        self.c = c
        self.ranks = ranks
        self.ends_at = began + 3600 * c.max_hours if c.max_hours else math.inf
        self.saved_at = time.perf_counter()

    def reason_to_stop(self) -> str | None:
        """A signal's name or max_hours, the same on all ranks; None to go on."""
        if time.perf_counter() >= self.ends_at:
            return "max_hours"
        return self.signal()

    def signal(self) -> str | None:
        """The name of the signal that one of the ranks got."""
        return signal.Signals(listener.signal).name if listener.signal else None

    def save_is_due(self, step: int) -> bool:
        """Whether save_interval or save_minutes ask for a checkpoint."""
        return False

    def exit_status(self, stop: str) -> int:
        """The conventional status: 0 after max_hours, 128 and the signal's number otherwise."""
        return 0 if stop == "max_hours" else stopping.exit_status(signal.Signals[stop])


def evaluate(c: TrainConfig, runner: Runner, split: Split, plan: BatchPlan, ranks: Ranks) -> Evaluation:
    """The split's loss; a signal breaks it off."""
    batches = eval_batches(split, plan, estimate.eval_windows(c), ranks.device)
    return runner.evaluate(itertools.takewhile(lambda _: not listener.signal, batches), ranks)


def progress(ranks: Ranks) -> AbstractContextManager[None]:
    """Says now and then that an evaluation goes on. A terminal shows a progress bar instead."""
    return nullcontext() if sys.stderr.isatty() else not_silent("still evaluating", ranks.say)


def state_of_run(
    c: TrainConfig,
    runner: Runner,
    optimizer: torch.optim.Optimizer,
    step: int,
    best_val_loss: float,
    meta: dict[str, Any],
    facts: dict[str, Any],
    log: RunLog,
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
        train_tokens=facts["train data"]["tokens"],
        form=forms.saved_form(runner),
        wandb_run_id=log.wandb_run_id,
        facts=facts,
    )


# ---- what a run reports --------------------------------------------------------------------------------------


class Report:
    """What a run says on the terminal and writes to log.jsonl."""

    def __init__(
        self, c: TrainConfig, ranks: Ranks, runner: Runner, plan: BatchPlan, timer: StepTimer, log: RunLog
    ) -> None:
        self.c = c
        self.ranks = ranks
        self.runner = runner
        self.timer = timer
        self.log = log
        self.tokens_per_step = plan.global_batch * c.block_size
        self.flops_per_token = runner.model.estimate_flops()
        peak, self.peak_source = peak_flops.peak_flops(ranks.device, runner.form.dtype)
        measured = peak_flops.measured_matmul_flops(ranks.device, runner.form.dtype)
        of_all_ranks = ranks.sum(torch.tensor([peak, measured], dtype=torch.float64))
        self.peak_flops, self.measured_flops = of_all_ranks.tolist()

    def start(
        self, step: int, meta: dict[str, Any], train: Split, val: Split, facts: dict[str, Any], warm_up_s: float
    ) -> None:
        c = self.c
        say = self.ranks.say
        device = self.ranks.device
        form = self.runner.form
        model = self.runner.model
        compiler = compiling.compiler_name(device) if form.compiled else None
        by = re.sub(r" \(.*?\)", "", f" by {compiler}") if compiler else ""  # "g++ 12.2.0", without its package's name
        name = hardware.device_name(device)
        say(f"data: {(DATA / c.dataset).name}, {train.tokens:,} train and {val.tokens:,} val tokens")
        say(f"number of parameters: {model.num_params() / 1e6:.2f}M, {self.flops_per_token / 1e6:.2f} MFLOPs per token")
        say(f"device: {self.ranks.world} x {name}, {form}{by}")
        say(f"mfu refers to {self.peak_flops / 1e12:.2f} TFLOP/s ({self.peak_source}); warm-up took {warm_up_s:.1f}s")
        say(f"tokens per iteration will be: {self.tokens_per_step:,}")
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
            val_sha256=facts[resuming.VAL_DATA]["fingerprint"],
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
        self.log.write(
            "eval",
            iter=step,
            train_loss=train.loss,
            val_loss=val.loss,
            val_se=val.standard_error,
            lr=lr,
            tokens=step * self.tokens_per_step,
            train_s=self.timer.trained_s(),
            eval_s=eval_s,
        )
        error = "" if val.standard_error is None else f", standard error {val.standard_error:.4f}"
        self.ranks.say(
            f"step {step}: train loss {train.loss:.4f}, val loss {val.loss:.4f}, eval time {eval_s:.2f}s{error}"
        )

    def saved(self, step: int, best: bool) -> None:
        self.log.write("save", iter=step, best=best, save_s=self.timer.last_save_s)

    def step(self, step: int, lr: float, loss: float, grad_norm: float, window: Window) -> None:
        """window: the steps since the last of these lines."""
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
            tokens=(step + 1) * self.tokens_per_step,
            train_s=timer.train_s,
            peak_memory_bytes=hardware.peak_memory_bytes(self.ranks.device),
        )

    def end(self, step: int, steps: int, best_val_loss: float) -> None:
        timer = self.timer
        memory = hardware.peak_memory_bytes(self.ranks.device)
        memory_gib = "n/a" if memory is None else f"{memory / 2**30:.2f} GiB"
        self.ranks.say(
            f"{steps} steps: {clock(timer.train_s)} of training ({clock(timer.wait_s)} waiting for data), "
            f"{clock(timer.eval_s)} of evaluation, {clock(timer.save_s)} of saving; peak memory {memory_gib}; "
            f"best val loss {best_val_loss:.4f}"
        )
        self.log.write(
            "end",
            iter=step,
            train_s=timer.train_s,
            data_wait_s=timer.wait_s,
            eval_s=timer.eval_s,
            save_s=timer.save_s,
            peak_memory_bytes=memory,
            best_val_loss=best_val_loss,
        )


# ---- command line --------------------------------------------------------------------------------------------


def resumed_settings(argv: list[str], out_dir: str) -> dict[str, Any]:
    """The settings of the run in out_dir, overridden by config files (but for the model's size) and command line."""
    saved = checkpoint.load(out_dir)
    of_model = [f"--{name}={value}" for name, value in settings_of_model(saved, out_dir).items()]
    known = {k: v for k, v in saved.config.items() if k in TrainConfig.__dataclass_fields__}
    # The checkpoint's max_iters may come from its max_minutes. A user who names new minutes wants more steps.
    known |= {"out_dir": out_dir, "init_from": "resume", "eval_only": False, "max_minutes": 0.0}
    known["resume_changed"] = False  # is meant for one time
    settings = read_settings(TrainConfig, [*of_model, *argv], known)
    if settings["max_minutes"] and not any(arg.startswith("--max_iters=") for arg in argv):
        settings["max_iters"] = TrainConfig.__dataclass_fields__["max_iters"].default
    before = read_settings(TrainConfig, [], known)
    counts_batches = not before["eval_tokens"] and not settings["eval_tokens"]
    same_count = counts_batches and settings["eval_iters"] == before["eval_iters"]
    if same_count and settings["batch_size"] != before["batch_size"]:
        # An evaluation keeps its windows, however many now make a micro-batch.
        settings["eval_tokens"] = before["eval_iters"] * before["batch_size"] * settings["block_size"]
    return settings


def finetuning_settings(argv: list[str], source: str) -> dict[str, Any]:
    """The settings of a new run with the weights of a checkpoint; those of its model are the defaults."""
    return read_settings(TrainConfig, argv, settings_of_model(checkpoint.load(source), source))


def settings_of_model(saved: Checkpoint, source: str) -> dict[str, Any]:
    """Those of a checkpoint's model, without dropout, which may change."""
    config = GPTConfig.from_args(saved.model_args, source)
    return {name: getattr(config, name) for name in RESUMED_SETTINGS}


if __name__ == "__main__":
    with one_line_errors(
        "halve --batch_size and double --gradient_accumulation_steps, the same training, or take a smaller model"
    ):
        settings = read_settings(TrainConfig, sys.argv[1:])
        if settings["init_from"] == "resume":
            settings = resumed_settings(sys.argv[1:], settings["out_dir"])
        elif checkpoint.is_one(settings["init_from"]):
            settings = finetuning_settings(sys.argv[1:], settings["init_from"])
        main(build(TrainConfig, settings))
