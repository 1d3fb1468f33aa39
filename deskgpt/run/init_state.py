"""Where a run starts: from random weights, a checkpoint or GPT-2's weights; and what it must not start with."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deskgpt.checkpoint import store
from deskgpt.checkpoint.store import Checkpoint
from deskgpt.compute import sharding
from deskgpt.compute.batching import Batching
from deskgpt.compute.checks import Batch
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.implementation import EarlierVariant, Options, Tuner, choose_implementation, dtype_of_shards
from deskgpt.compute.runner import Runner
from deskgpt.estimate.fit import refuse_beyond_memory, smaller_batch, times_memory
from deskgpt.estimate.memory import MakeOptimizer
from deskgpt.export.gpt2_weights import exported_model_args, load_gpt2, tokenizer_of
from deskgpt.run import resuming
from deskgpt.run.lock import check_shared
from deskgpt.run.log import RunLog, start_wandb
from deskgpt.run.resuming import Facts, LearningRate, Settings
from deskgpt.run.saver import Kept
from deskgpt.run.time_budget import seconds_left
from deskgpt.run.train_state import Run
from deskgpt.system import hardware
from deskgpt.system.provenance import git_commit, versions
from model import GPT, MODERN_CHOICES, GPTConfig, ModelSettings

# What a resumed run takes from its checkpoint.
RESUMED_SETTINGS = tuple(name for name in ModelSettings.__dataclass_fields__ if name != "dropout")


def prepare_machine(settings: Settings, ranks: DistContext) -> None:
    """What a run sets before anything else. Raises ValueError where hosts do not share the folder of the run."""
    hardware.keep_freed_memory()
    hardware.forbid_spilling(ranks.device)
    if not settings["eval_only"] and not settings["dry_run"]:
        check_shared(store.folder_of(settings["out_dir"]), ranks)
    hardware.seed_all(settings["seed"], ranks.device)


# ---- the starting point --------------------------------------------------------------------------------------


@dataclass
class InitState:
    """What a run starts from."""

    settings: Settings  # of the run that starts
    ranks: DistContext
    source: str  # for messages
    config: GPTConfig
    weights: dict[str, Tensor] | None = None  # None: random ones, or the weights of `saved`
    saved: Checkpoint | None = None  # that has the weights
    tokenizer: dict[str, Any] | None = None  # that the weights were trained with, None if not known
    resumed: Checkpoint | None = None
    earlier: dict[str, Any] | None = None  # all settings of the resumed run, if its checkpoint has them
    # of the resumed run:
    step: int = 0
    best_val_loss: float = math.inf
    best_is_comparable: bool = True  # with this run's validation losses
    wandb_run_id: str | None = None
    progress: dict[str, Any] | None = None  # Checkpoint.health
    kept: Kept | None = None

    def model(self, make: MakeOptimizer) -> GPT:
        """The model on this rank's device, as a whole or sharded. make: the optimizer that it will train with.

        Where it is sharded, only the first rank builds it in the machine's memory, and none where each can read its own
        rows from a checkpoint. Raises ValueError, also where the memory cannot hold it, before any of it is taken.
        """
        ranks = self.ranks
        settings = self.settings
        shards = sharding.shards_of(settings["dp_shard"], ranks.world)
        trained_with = None if settings["eval_only"] else make
        refuse_beyond_memory(self.config, ranks.device, trained_with, shards, ranks.is_first or shards == 1)
        if shards == 1:
            return self._built().to(ranks.device)
        each_reads = self.saved is not None and settings["block_size"] == self.config.block_size
        each_reads = each_reads and not sharding.has_other_buffers(GPT.without_storage(self.config))
        builds = ranks.is_first and not each_reads
        with nullcontext() if builds else torch.device("meta"):
            built = self._built(reads=builds)
        mesh = sharding.make_mesh(ranks.device.type, shards, ranks.world, settings["dist_timeout_s"])
        reshard = settings["reshard_after_forward"]
        dtype = dtype_of_shards(settings["dtype"], self.earlier_form, ranks)
        if self.saved is None or not each_reads:
            return sharding.sharded_copy(built, mesh, reshard, ranks.device, dtype)
        model = sharding.empty_copy(built, mesh, reshard, ranks.device, dtype)
        store.restore_weights(model, self.saved)
        return model

    @property
    def earlier_form(self) -> EarlierVariant:
        batch_size = (self.earlier or {}).get("batch_size")
        return EarlierVariant.of(self.resumed.form if self.resumed else None, self.ranks.device, batch_size)

    def _built(self, reads: bool = True) -> GPT:
        """The model on the CPU, with its context shortened to block_size. Raises ValueError.

        reads: whether the weights of a checkpoint's folder matter; where a model is sharded, they do not on each rank.
        """
        weights = self.weights
        if self.saved is not None:
            weights = store.weights_of(self.saved) if reads else self.saved.model
        model = GPT(self.config) if weights is None else GPT.from_state(self.config, weights, self.source)
        model.crop_block_size(self.settings["block_size"])
        return model

    def fastest_form(
        self, model: GPT, make: MakeOptimizer, split: Batching, batch_of: Callable[[int], Batch], began: float
    ) -> tuple[Runner, Batching]:
        """As fastest_right_form, with ranks connected. split: as the settings say. began: the instant of the start."""
        settings = self.settings
        ranks = self.ranks
        steps = 0 if settings["eval_only"] else settings["max_iters"] - self.step
        wanted = Options.of(settings, self.earlier_form, steps, seconds_left(settings, began))
        may_halve = wanted.may_split_anew(ranks.device)
        smaller = functools.partial(smaller_batch, model.config, make, ranks.device, may_halve)
        trained_with = None if settings["eval_only"] else make
        shards = sharding.shards_of(settings["dp_shard"], ranks.world)
        times = functools.partial(times_memory, model.config, trained_with, ranks.device, shards)
        runner, batching = choose_implementation(Tuner(model, split, wanted, ranks, batch_of, smaller, times))
        if ranks.distributed and not settings["eval_only"]:
            runner.distribute(*batch_of(batching.batch_size))
        return runner, batching

    def resume(self, run: Run) -> None:
        """Takes the resumed run's step, optimizer and progress into run, and frees the memory of what was loaded.

        Raises ValueError where they do not fit.
        """
        if self.resumed is not None:
            run.resume(self.resumed, self.source, self.best_val_loss, self.progress, not self.settings["eval_only"])
        self.weights = None
        self.saved = None
        self.resumed = None

    # ---- what is not as it was ---------------------------------------------------------------------------

    def say_changes(
        self, now: Settings, data: Facts, n_eval_windows: Callable[[int], int], learning_rate: LearningRate
    ) -> None:
        """Says how a resumed run differs from the run before. The best loss of other evaluations is forgotten.

        now: the settings that the run will have. n_eval_windows: as Split.n_eval_windows. Raises ValueError where that
        changes what is learned or compared, unless the settings have resume_changed.
        """
        if self.resumed is None:
            return
        changes = resuming.changes(self.resumed, self.earlier, now, data, n_eval_windows, learning_rate)
        refused = [str(change) for change in changes if change.matters]
        if refused and not now["resume_changed"] and not now["eval_only"]:
            remedy = resuming.remedy(self.earlier, now, learning_rate, self.resumed.iter_num)
            raise ValueError(
                f"{self.source} belongs to another experiment: {'; '.join(refused)}. {remedy}Go on all the same with "
                f"--resume_changed=True, or begin a new run with its weights: --init_from={self.source}"
            )
        for change in changes:
            self.ranks.print0(f"changed: {change}")
        if resuming.OF_EVALUATION & {change.name for change in changes}:
            self.best_val_loss = math.inf
            self.best_is_comparable = False
            if self.progress:  # nor is patience counted across them
                self.progress["evaluations"] = []

    def say_changes_of_code(self, code: Facts) -> None:
        """Says what else computes now than in the run before."""
        if self.resumed is not None:
            for change in resuming.compare(self.resumed.facts, code):
                self.ranks.print0(f"changed: {change}")


def starting_point(
    settings: Settings, scratch: GPTConfig, earlier_settings: EarlierSettings, ranks: DistContext
) -> InitState:
    """Where init_from says that the run starts. Raises ValueError where settings name another model than the source.

    scratch: the model if it is a new one. earlier_settings: all settings of a run from those that its checkpoint has.
    """
    init_from = settings["init_from"]
    out_dir = settings["out_dir"]
    dropout = {"dropout": settings["dropout"]}
    writes = not settings["eval_only"] and not settings["dry_run"]
    if init_from != "resume" and writes and store.is_name(Path(out_dir).name):
        raise ValueError(f"out_dir={out_dir} is a checkpoint's name; a new run needs a folder, such as --out_dir=out")
    if init_from == "scratch":
        return InitState(settings, ranks, "scratch", scratch)

    if init_from == "resume":
        saved = store.resume(out_dir, ranks.print0, ranks)
        start = InitState(
            settings=settings,
            ranks=ranks,
            source=out_dir,
            config=GPTConfig.from_args(saved.model_args | dropout, out_dir),
            saved=saved,
            tokenizer=saved.tokenizer,
            resumed=saved,
            earlier=earlier_settings(saved.config),
            step=saved.iter_num,
            best_val_loss=saved.best_val_loss,
            wandb_run_id=saved.wandb_run_id,
            progress=saved.health,
            kept=Kept(Path(out_dir), saved.iter_num),
        )
        if start.step > settings["max_iters"] and writes:
            raise ValueError(
                f"{out_dir} is at step {start.step:,}, past max_iters={settings['max_iters']}: raise --max_iters"
            )
        ranks.print0(f"going on from {out_dir}, step {start.step}")
        given = RESUMED_SETTINGS
    elif store.is_one(init_from):
        if writes and store.folder_of(init_from).resolve() == store.folder_of(out_dir).resolve():
            raise ValueError(
                f"init_from={init_from} is where the new run would write, too: choose another --out_dir, or go on "
                "with that run: --init_from=resume"
            )
        saved = store.load(init_from, ranks=ranks)
        config = GPTConfig.from_args(saved.model_args | dropout, init_from)
        start = InitState(settings, ranks, init_from, config, saved=saved, tokenizer=saved.tokenizer)
        given = RESUMED_SETTINGS
    else:
        model_args, weights = load_gpt2(init_from)
        config = GPTConfig.from_args(model_args | dropout, init_from)
        start = InitState(settings, ranks, init_from, config, weights, tokenizer=tokenizer_of(init_from))
        given = MODERN_CHOICES if exported_model_args(init_from) is None else RESUMED_SETTINGS

    for name in given:
        wanted = settings[name]
        there = getattr(start.config, name)
        # Evaluated, or finetuned, with the context of another model. build_model refuses a longer one.
        if name == "block_size" and (settings["eval_only"] or start.resumed is None):
            continue
        if wanted != there:
            raise ValueError(f"{name}={wanted}, but {start.source} has {name}={there}: take --{name}={there}")
    return start


EarlierSettings = Callable[[Mapping[str, Any]], "dict[str, Any] | None"]

# ---- provenance and log --------------------------------------------------------------------------------------


def facts_of_code(runner: Runner) -> Facts:
    """What computes: none of it changes the experiment."""
    on_cpu = runner.device.type == "cpu"  # whose name would have the number of threads, which ranks share
    device = hardware.processor()[0] if on_cpu else hardware.device_name(runner.device)
    return {"code": git_commit(), "versions": versions(), "device": device, "form": str(runner.form)}


def open_log(run: Run, start: InitState) -> RunLog:
    """The log of this run; an earlier run in out_dir is moved aside. Other ranks and eval_only write no file."""
    settings = run.settings
    ranks = run.ranks
    if not ranks.is_first or settings["eval_only"]:
        return RunLog(None)
    wandb_run = None
    if settings["wandb_log"]:
        wandb_run = start_wandb(settings["wandb_project"], settings["wandb_run_name"], settings, start.wandb_run_id)
    out_dir = store.folder_of(settings["out_dir"])
    if settings["init_from"] != "resume":
        found = tuple(path.name for path in store.candidates(out_dir))
        old = store.set_aside(out_dir, (*found, "log.jsonl"))
        if old:
            ranks.print0(f"{out_dir} held an earlier run; it is now in {old}")
    elif not start.best_is_comparable:
        best = store.best_of(out_dir)
        is_last = best in store.candidates(out_dir)[:1]  # a folder, which the run goes on from
        old = store.set_aside(out_dir, () if best is None or is_last else (best.name,))
        kept = f"; {best.name} is now in {old}" if best and old else ""
        ranks.print0(f"the best val loss begins anew, because earlier losses come from another evaluation{kept}")
    log = RunLog(out_dir / "log.jsonl", wandb_run, start.wandb_run_id)
    run.wandb_run_id = log.wandb_run_id
    return log
