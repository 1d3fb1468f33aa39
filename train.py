"""Trains a GPT on a folder of token files, on one CPU or GPU or on several with torchrun.

    python train.py config/train_shakespeare_char_cpu.py
    python train.py config/train_shakespeare_char.py --batch_size=32 --compile=False
    python train.py --init_from=resume --out_dir=out-shakespeare-char
    torchrun --standalone --nproc_per_node=4 train.py config/train_gpt2.py

Writes out_dir/ckpt.pt (and ckpt_best.pt) and out_dir/log.jsonl, which holds what the terminal shows.
"""

from __future__ import annotations

import functools
import math
import os
import re
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from configurator import build, read_settings
from data.loader import Loader, to_device
from data.splits import Split
from data.token_files import check_vocabulary, read_meta, token_files
from data.tokenizer import padded_vocab_size
from deskgpt import checkpoint, compiling, estimate, forms, hardware, peak_flops, runlog
from deskgpt.errors import one_line_errors
from deskgpt.optimizer import make_optimizer
from deskgpt.runlog import RunLog, clock, start_wandb
from deskgpt.runner import Form, all_sum
from model import CHOICES, GPT, GPTConfig

DATA = Path(__file__).parent / "data"
# What a resumed run has from its checkpoint.
MODEL_SETTINGS = ("n_layer", "n_head", "n_embd", "bias", "block_size", *CHOICES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    # input and output
    out_dir: str = "out"  # checkpoints and log.jsonl; to resume from another checkpoint in it, out/ckpt_best.pt
    dataset: str = "openwebtext"  # folder below data/, or a path, with train*.bin and val*.bin
    init_from: str = "scratch"  # scratch, resume, gpt2, gpt2-medium, gpt2-large, gpt2-xl or a folder in GPT-2's format
    eval_interval: int = 2000  # steps between evaluations, each followed by a checkpoint
    eval_iters: int = 200  # micro-batches per split and evaluation; a split with fewer is read whole
    eval_tokens: int = 0  # in place of eval_iters: tokens, the same ones whatever the micro-batch; 0 = eval_iters
    eval_only: bool = False  # evaluate once, write nothing
    dry_run: bool = False  # only say what the run needs: FLOPs, memory, time
    log_interval: int = 1  # steps per log line
    always_save_checkpoint: bool = True  # False: only when the validation loss has improved
    # model
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768  # width
    dropout: float = 0.0  # 0 for pretraining; 0.1 and more for small data
    bias: bool = False  # in Linear and LayerNorm layers
    position: Literal["learned", "rope"] = "learned"  # the defaults of these seven are GPT-2
    norm: Literal["layer", "rms"] = "layer"
    qk_norm: bool = False  # RMS norm of queries and keys
    activation: Literal["gelu_tanh", "gelu", "relu2"] = "gelu_tanh"  # gelu is nanoGPT's; relu2 the fastest
    tie_weights: bool = True  # one matrix for token embedding and head
    zero_init: bool = False  # what adds to the residual stream, and an untied head, begins as zero
    token_shift: bool = False  # blocks see a quarter of the channels of the token before in place of their own
    # batch
    batch_size: int = 12  # sequences per micro-batch; lower this first when memory runs out
    block_size: int = 1024  # context length in tokens
    gradient_accumulation_steps: int = 5 * 8  # micro-batches per step, over all ranks
    auto_batch: bool = False  # where memory runs out at the start: halve batch_size, double the accumulation
    align_documents: bool = False  # begin training windows where a document begins, if one does within them
    # optimizer
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the blocks' matrices, AdamW for the rest
    learning_rate: float = 6e-4  # its maximum
    max_iters: int = 600000  # steps
    max_minutes: float = 0.0  # as many of max_iters as take so long here, compiling and evaluation included; 0 = all
    weight_decay: float = 1e-1  # of matrices and embeddings
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.95  # of Muon
    grad_clip: float = 1.0  # longest gradient norm; 0 = no limit
    # learning rate schedule
    decay_lr: bool = True  # False: constant from the first step
    lr_schedule: Literal["cosine", "linear", "trapezoid"] = (
        "cosine"  # after a linear warm-up; trapezoid: constant first
    )
    warmup_iters: int = 2000  # steps
    lr_decay_iters: int = 0  # step at which min_lr is reached; 0 = max_iters
    cooldown_iters: int = 0  # steps of trapezoid's decay, which is linear; 0 = a fifth of lr_decay_iters
    min_lr: float | None = None  # None = learning_rate / 10
    # machine
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of the matmuls; weights stay float32
    compile: Literal["auto", True, False] = (
        "auto"  # torch.compile: faster steps after a slow start; auto: on CUDA, and on a CPU where it pays
    )
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # of torch.distributed; auto = nccl on CUDA, gloo elsewhere
    seed: int = 1337  # of initial weights, batch order and dropout
    # Weights & Biases
    wandb_log: bool = False
    wandb_project: str = "owt"
    wandb_run_name: str = "gpt2"

    def __post_init__(self) -> None:
        GPTConfig(dropout=self.dropout, **{name: getattr(self, name) for name in MODEL_SETTINGS})
        least = dict.fromkeys(("eval_interval", "eval_iters", "log_interval", "batch_size"), 1)
        least["gradient_accumulation_steps"] = 1
        for name in self.__dataclass_fields__:
            value, low = getattr(self, name), least.get(name, 0)
            if isinstance(value, int | float) and value < low:
                raise ValueError(f"{name}={value} must be at least {low}")
        for name, limit in {"beta1": 1, "beta2": 1, "momentum": 1, "seed": 2**63}.items():
            if getattr(self, name) >= limit:
                raise ValueError(f"{name}={getattr(self, name)} must be below {limit}")


def main(c: TrainConfig) -> float:
    """Trains as c says; returns the best validation loss (nats per token), math.inf where none was taken."""
    # ---- ranks and device ------------------------------------------------------------------------------------
    began = time.perf_counter()
    rank, world, local_rank = (
        int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    hardware.keep_freed_memory()
    device = hardware.resolve_device(c.device, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if c.gradient_accumulation_steps % world:
        nearest = -(-c.gradient_accumulation_steps // world) * world
        raise ValueError(
            f"gradient_accumulation_steps={c.gradient_accumulation_steps} does not divide among {world} ranks; "
            f"try --gradient_accumulation_steps={nearest}"
        )
    global_batch = c.batch_size * c.gradient_accumulation_steps  # sequences per optimizer step
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32 for what stays float32, as nanoGPT has it
    distributed = "RANK" in os.environ
    if distributed:
        if c.backend == "nccl" and device.type != "cuda":
            raise ValueError(f"backend=nccl is for CUDA, the device is {device}; try --backend=auto")
        dist.init_process_group(
            "nccl" if c.backend == "auto" and device.type == "cuda" else c.backend.replace("auto", "gloo")
        )
    say = functools.partial(print, flush=True) if rank == 0 else lambda *_: None  # flushed: for files, tee and tail
    if c.device == "auto" and device.type == "cpu" and rank == 0 and (reason := hardware.unseen_gpu()):
        say(f"{reason}; training on the CPU")
    torch.manual_seed(c.seed)

    # ---- data and model --------------------------------------------------------------------------------------
    folder = DATA / c.dataset
    for split in ("train", "val") if not c.dry_run else ():
        token_files(folder, split)  # raises where there are none: sooner than a vocabulary is found wanting
    meta = read_meta(folder)
    saved: dict[str, Any] = {}
    source = c.out_dir if c.init_from == "resume" else c.init_from
    if c.init_from == "scratch":
        vocab_size = padded_vocab_size(meta["tokenizer"], meta["vocab_size"])
        args = GPTConfig(vocab_size=vocab_size, dropout=c.dropout, **{k: getattr(c, k) for k in MODEL_SETTINGS})
    elif c.init_from == "resume":
        saved = checkpoint.load(c.out_dir)
        args = GPTConfig.of(saved["model_args"] | {"dropout": c.dropout}, source)
    else:
        model_args, weights = checkpoint.load_gpt2(c.init_from)
        args = GPTConfig.of(model_args | {"dropout": c.dropout}, source)
        saved = {"model": weights, "tokenizer": {"name": "gpt2"}}
    for name in MODEL_SETTINGS if c.init_from == "resume" else CHOICES:
        shorter = name == "block_size" and c.eval_only  # to evaluate with the context of another model
        if getattr(c, name) != getattr(args, name) and not shorter:
            raise ValueError(f"{name}={getattr(c, name)}, but {source} has {name}={getattr(args, name)}: leave it out")
    T = c.block_size
    if c.dry_run:
        dtype = peak_flops.fast_dtype(device) if c.dtype == "auto" else c.dtype
        shape = (c.batch_size, c.gradient_accumulation_steps, world)
        estimate.report(replace(args, block_size=T), device, dtype, c.compile is not False, *shape, c.max_iters, say)
        return math.inf
    check_vocabulary(folder, meta, args.vocab_size, saved.get("tokenizer"))
    start = meta["end_of_text"] if c.align_documents else None
    if c.align_documents and start is None:
        raise ValueError(f"align_documents=True: {folder} does not say which token documents begin with; leave it out")
    train_split, val_split = (Split(folder, s, T, args.vocab_size, c.seed, start) for s in ("train", "val"))
    model = GPT.from_state(args, saved["model"], source) if saved else GPT(args)
    model.crop_block_size(T)
    start_iter: int = saved.get("iter_num", 0)
    if saved.get("train_tokens", train_split.tokens) != train_split.tokens:
        say(f"the data had {saved['train_tokens']:,} train tokens before: from here on, batches come in another order")
    best_val_loss: float = saved.get("best_val_loss", math.inf)

    # ---- how it runs here, optimizer, DDP --------------------------------------------------------------------
    model.to(device)
    left_s = 60 * c.max_minutes - (time.perf_counter() - began) if c.max_minutes else None
    batch_of = functools.partial(first_micro_batch, train_split, global_batch, device)
    steps = 0 if c.eval_only else c.max_iters - start_iter
    earlier = forms.earlier_form(saved, device)
    runner, c = forms.settle(model, c, earlier, batch_of, world, distributed, left_s, steps, say)
    micro_steps = c.gradient_accumulation_steps // world  # of this rank, per optimizer step
    dtype, scaler = runner.form.dtype, runner.scaler
    fast = dtype == "bfloat16" if device.type == "cpu" else peak_flops.fast_dtype(device) == "bfloat16"
    betas = (c.beta1, c.beta2)
    optimizer = make_optimizer(
        model, c.optimizer, c.weight_decay, c.learning_rate, betas, c.momentum, device.type, fast
    )
    if distributed:
        runner.distribute()
    if c.max_minutes and not c.eval_only:
        left_s = 60 * c.max_minutes - (time.perf_counter() - began)
        batch = batch_of(c.batch_size)
        splits = (train_split, val_split)
        c = replace(c, **estimate.steps_within(left_s, c, runner, optimizer, batch, splits, start_iter, world, say))
    if start_iter and not c.eval_only:
        checkpoint.restore_optimizer(optimizer, saved["optimizer"], source)
        scaler.load_state_dict(saved.get("scaler") or scaler.state_dict())
    wandb_run_id = saved.get("wandb_run_id")
    saved = {}  # frees what the memory-mapped file holds
    warm_up_s = time.perf_counter() - began

    # ---- log -------------------------------------------------------------------------------------------------
    out_dir = checkpoint.folder_of(c.out_dir)
    records = rank == 0 and not c.eval_only
    files = (checkpoint.NAME, checkpoint.BEST, "log.jsonl")
    wandb_run = (
        start_wandb(c.wandb_project, c.wandb_run_name, asdict(c), wandb_run_id) if c.wandb_log and records else None
    )
    if records and c.init_from != "resume" and (old := checkpoint.set_aside(out_dir, files)):
        say(f"{out_dir} held an earlier run; it is now in {old}")
    log = RunLog(out_dir / "log.jsonl" if records else None, wandb_run)
    tokens_per_step = global_batch * T
    flops_per_token = model.estimate_flops()
    peak, peak_source = peak_flops.peak_flops(device, dtype)
    total_peak = all_sum(torch.tensor([peak], dtype=torch.float64), device).item()  # of all ranks
    say(f"data: {folder.name}, {train_split.tokens:,} train and {val_split.tokens:,} val tokens")
    say(f"number of parameters: {model.num_params() / 1e6:.2f}M, {flops_per_token / 1e6:.2f} MFLOPs per token")
    compiler = compiling.compiler_name(device) if runner.form.compiled else None
    by = re.sub(r" \(.*?\)", "", f" by {compiler}") if compiler else ""  # "g++ 12.2.0", without its package's name
    say(f"device: {world} x {hardware.device_name(device)}, {runner.form}{by}")
    say(f"mfu refers to {total_peak / 1e12:.2f} TFLOP/s ({peak_source}); warm-up took {warm_up_s:.1f}s")
    say(f"tokens per iteration will be: {tokens_per_step:,}")
    log.write(
        "start",
        settings=asdict(c),
        iter=start_iter,
        model_args=asdict(model.config),
        parameters=model.num_params(),
        flops_per_token=flops_per_token,
        tokens_per_step=tokens_per_step,
        tokenizer=meta["tokenizer"].get("name"),
        train_tokens=train_split.tokens,
        val_tokens=val_split.tokens,
        val_sha256=val_split.fingerprint(),
        device=hardware.device_name(device),
        cpu=hardware.cpu_facts() if device.type == "cpu" else None,
        world_size=world,
        dtype=dtype,
        compiled=runner.form.compiled,
        explicit_attention=runner.form.explicit,
        compiler=compiler,
        peak_flops=total_peak,
        peak_source=peak_source,
        warm_up_s=warm_up_s,
        versions=runlog.versions(),
        git_commit=runlog.git_commit(),
    )
    # ---- train -----------------------------------------------------------------------------------------------
    step = start_iter
    windows = estimate.eval_windows(c)
    kept = f"what {out_dir} holds stays"
    watch = GradientWatch([name for name, _ in model.named_parameters()], device)
    loader = Loader(train_split, device, c.batch_size, micro_steps, step, rank, world)
    window_steps, window_s = 0, 0.0  # since the last log line: steps, and seconds of these alone
    train_s = wait_s = eval_s = save_s = last_eval_s = last_save_s = 0.0
    t0 = time.perf_counter()
    while True:
        lr = learning_rate(c, step)

        # ---- evaluate and save -------------------------------------------------------------------------------
        if step % c.eval_interval == 0 or step >= c.max_iters or c.eval_only:
            hardware.synchronize(device)
            t1 = time.perf_counter()
            window_s += t1 - t0
            watch.raise_if_not_finite(runner.form, start_iter, kept)
            # A terminal shows a progress bar.
            shown = nullcontext() if sys.stderr.isatty() else forms.not_silent("still evaluating", say)
            with shown:
                train_loss, _ = runner.evaluate(train_split, windows, c.batch_size, rank, world)
                val_loss, val_se = runner.evaluate(val_split, windows, c.batch_size, rank, world)
            t0 = time.perf_counter()
            last_eval_s, eval_s = t0 - t1, eval_s + t0 - t1
            losses = {"train_loss": train_loss, "val_loss": val_loss, "val_se": val_se}  # its standard error
            spent = {"tokens": step * tokens_per_step, "train_s": train_s + window_s, "eval_s": last_eval_s}
            log.write("eval", iter=step, **losses, lr=lr, **spent)
            error = "" if val_se is None else f", standard error {val_se:.4f}"
            said = f"train loss {train_loss:.4f}, val loss {val_loss:.4f}, eval time {last_eval_s:.2f}s"
            say(f"step {step}: {said}{error}")
            if not math.isfinite(val_loss):
                remedy = advice(runner.form, step == start_iter)
                raise ValueError(f"val loss is {val_loss} at step {step}; {kept}; {remedy}")
            improved = val_loss < best_val_loss
            best_val_loss = min(best_val_loss, val_loss)
            if step > start_iter and rank == 0 and (improved or c.always_save_checkpoint):
                say(f"saving checkpoint to {out_dir}")
                state: dict[str, Any] = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "model_args": model.config.as_args(),
                    "iter_num": step,
                    "best_val_loss": best_val_loss,
                    "config": asdict(c),
                    "scaler": scaler.state_dict(),
                    "tokenizer": meta["tokenizer"],
                    "train_tokens": train_split.tokens,
                    "form": forms.saved_form(runner),
                    "wandb_run_id": wandb_run.id if wandb_run else wandb_run_id,
                }
                checkpoint.save(state, out_dir, best=improved)
                last_save_s = time.perf_counter() - t0
                save_s += last_save_s
                log.write("save", iter=step, best=improved, save_s=last_save_s)
            t0 = time.perf_counter()
        if step >= c.max_iters or c.eval_only:
            break

        # ---- one optimizer step ------------------------------------------------------------------------------
        for group in optimizer.param_groups:
            group["lr"] = lr
        if model.config.dropout:  # its random stream starts anew at each step: a resumed run needs no generator state
            torch.manual_seed(hash((c.seed, step, rank)) % 2**63)
        step_loss = torch.zeros((), device=device)
        for micro in range(micro_steps):
            x, y = loader.next()
            step_loss += runner.backward(x, y, micro_steps, last=micro == micro_steps - 1)
        scaler.unscale_(optimizer)
        grad_norms = torch.stack(torch._foreach_norm(runner.gradients()))
        grad_norm = torch.linalg.vector_norm(grad_norms)
        torch.nn.utils.clip_grads_with_norm_(runner.parameters, c.grad_clip or math.inf, grad_norm)
        if not scaler.is_enabled() or scaler.get_scale() < 1:  # above 1 it skips such steps, and scales less
            watch.see(step, grad_norms)
        logs = step % c.log_interval == 0 or step == c.max_iters - 1
        if logs or device.type == "cpu":  # elsewhere asking would wait for the device
            watch.raise_if_not_finite(runner.form, start_iter, kept)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        window_steps += 1

        # ---- log ---------------------------------------------------------------------------------------------
        if logs:
            mean_loss = all_sum(step_loss, device).item() / world
            hardware.synchronize(device)
            t1 = time.perf_counter()
            window_s, t0 = window_s + t1 - t0, t1
            step_s = window_s / window_steps
            train_s += window_s
            data_wait, wait_s, loader.wait_s = loader.wait_s / window_s, wait_s + loader.wait_s, 0.0
            window_steps, window_s = 0, 0.0
            tokens_per_s = tokens_per_step / step_s
            mfu = tokens_per_s * flops_per_token / total_peak
            evals_left = math.ceil(c.max_iters / c.eval_interval) - step // c.eval_interval
            eta_s = (c.max_iters - step - 1) * step_s + evals_left * (last_eval_s + last_save_s)
            say(
                f"iter {step}: loss {mean_loss:.4f}, time {step_s * 1e3:.2f}ms, mfu {mfu * 100:.2f}%, "
                f"tok/s {tokens_per_s:,.0f}, lr {lr:.3e}, grad_norm {grad_norm.item():.3f}, "
                f"data wait {data_wait * 100:.1f}%, eta {clock(eta_s)}"
            )
            if not math.isfinite(mean_loss):
                remedy = advice(runner.form, step == start_iter)
                raise ValueError(f"loss is {mean_loss} at step {step}; {kept}; {remedy}")
            log.write(
                "iter",
                iter=step,
                loss=mean_loss,
                time_ms=step_s * 1e3,
                mfu=mfu,
                tokens_per_s=tokens_per_s,
                data_wait=data_wait,
                lr=lr,
                grad_norm=grad_norm.item(),
                tokens=(step + 1) * tokens_per_step,
                train_s=train_s,
                peak_memory_bytes=hardware.peak_memory_bytes(device),
            )
        step += 1

    # ---- end -------------------------------------------------------------------------------------------------
    memory = hardware.peak_memory_bytes(device)
    memory_gib = "n/a" if memory is None else f"{memory / 2**30:.2f} GiB"
    say(
        f"{step - start_iter} steps: {clock(train_s)} of training ({clock(wait_s)} waiting for data), "
        f"{clock(eval_s)} of evaluation, {clock(save_s)} of saving; peak memory {memory_gib}; "
        f"best val loss {best_val_loss:.4f}"
    )
    log.write(
        "end",
        iter=step,
        train_s=train_s,
        data_wait_s=wait_s,
        eval_s=eval_s,
        save_s=save_s,
        peak_memory_bytes=memory,
        best_val_loss=best_val_loss,
    )
    loader.close()
    log.close()
    if distributed:
        dist.barrier()  # no rank leaves while rank 0 saves: torchrun would take a fault of one for the end of all
        dist.destroy_process_group()
    return best_val_loss


def first_micro_batch(split: Split, global_batch: int, device: torch.device, rows: int) -> tuple[Tensor, Tensor]:
    """The first sequences of the first step's batch: inputs and targets (rows, T)."""
    return to_device(split.train_batch(0, np.arange(rows), global_batch), device)


class GradientWatch:
    """Remembers the first step whose gradients were not finite, on the device: seeing a step does not wait for it."""

    def __init__(self, names: list[str], device: torch.device) -> None:
        self.names = names
        self.step = torch.full((), -1, device=device)
        self.bad = torch.zeros(len(names), dtype=torch.bool, device=device)

    def see(self, step: int, norms: Tensor) -> None:
        """norms: of each parameter's gradient, in the order of the names."""
        bad = ~norms.isfinite()
        is_first = bad.any() & (self.step < 0)
        self.step = torch.where(is_first, step, self.step)
        self.bad = torch.where(is_first, bad, self.bad)

    def raise_if_not_finite(self, form: Form, first_step: int, kept: str) -> None:
        """ValueError for a step whose gradients were not finite: which, and what can be done about it."""
        step = int(self.step)
        if step < 0:
            return
        names = [name for name, bad in zip(self.names, self.bad.tolist(), strict=True) if bad]
        which = ", ".join(names[:2]) + (f" and {len(names) - 2} more" if names[2:] else "")
        which = "all parameters" if len(names) == len(self.names) else f"{which} of {len(self.names)} parameters"
        raise ValueError(
            f"gradients are not finite at step {step} ({form}): those of {which}; {kept}; "
            f"{advice(form, step == first_step)}"
        )


def advice(form: Form, first: bool) -> str:
    """What to try after a loss or gradients that are not finite; first: before this run has changed the weights."""
    tries = ["--compile=False"] if form.compiled else []
    tries += ["--dtype=float32"] if form.dtype != "float32" else []
    if not first:
        return f"try a lower --learning_rate{', then ' + ', then '.join(tries) if tries else ''}"
    remedy = f"try {', then '.join(tries)}" if tries else "check the weights that it starts from, and the data"
    return f"no update of this run came before, so it is not the learning rate: {remedy}"


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


def resumed_settings(argv: list[str], out_dir: str) -> dict[str, Any]:
    """The settings of the run in out_dir, overridden by config files (but for the model's size) and command line."""
    saved = checkpoint.load(out_dir)
    args = GPTConfig.of(saved["model_args"], out_dir)
    sizes = [f"--{name}={getattr(args, name)}" for name in MODEL_SETTINGS]
    known = {k: v for k, v in saved["config"].items() if k in TrainConfig.__dataclass_fields__}
    # The checkpoint's max_iters are what its max_minutes came to. More minutes are asked for anew, and mean more steps.
    known |= {"out_dir": out_dir, "init_from": "resume", "eval_only": False, "max_minutes": 0.0}
    settings = read_settings(TrainConfig, [*sizes, *argv], known)
    if settings["max_minutes"] and not any(arg.startswith("--max_iters=") for arg in argv):
        settings["max_iters"] = TrainConfig.__dataclass_fields__["max_iters"].default
    return settings


if __name__ == "__main__":
    with one_line_errors(
        "halve --batch_size and double --gradient_accumulation_steps, the same training, or take a smaller model"
    ):
        settings = read_settings(TrainConfig, sys.argv[1:])
        if settings["init_from"] == "resume":
            settings = resumed_settings(sys.argv[1:], settings["out_dir"])
        main(build(TrainConfig, settings))
