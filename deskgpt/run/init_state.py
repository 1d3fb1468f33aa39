"""What a run starts from: random weights, a checkpoint, or GPT-2's weights; and what it must not start with."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deskgpt.checkpoint import store
from deskgpt.checkpoint.store import Checkpoint
from deskgpt.compute import sharding
from deskgpt.compute.batching import Batching
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.implementation import EarlierVariant, Tuner, dtype_of_shards
from deskgpt.compute.runner import Runner
from deskgpt.estimate.fit import refuse_beyond_memory
from deskgpt.estimate.memory import MakeOptimizer
from deskgpt.run.log import RunLog, git_commit, start_wandb, versions
from deskgpt.run.settings import (
    OF_EVALUATION,
    RESUMED_SETTINGS,
    Change,
    Metadata,
    RunSettings,
    compare,
    earlier_settings,
)
from deskgpt.run.train_state import TrainState
from deskgpt.system import hardware
from model import GPT, MODERN_CHOICES, GPTConfig


def prepare_machine(config: RunSettings, dist: DistContext) -> None:
    """What a run sets before anything else. Raises ValueError where settings do not work with sharded weights."""
    sharding.check_sharding(config.dp_shard, config.world or dist.world, config.dtype, config.sample_interval)
    hardware.keep_freed_memory()
    hardware.forbid_spilling(dist.device)
    hardware.seed_all(config.seed, dist.device)


@dataclass
class InitState:
    """Where a run starts."""

    source: str  # for messages
    model_config: GPTConfig
    weights: dict[str, Tensor] | None = None  # GPT-2's
    checkpoint: Checkpoint | None = None  # of another run, or of the run that is resumed
    tokenizer: dict[str, Any] | None = None  # that the weights were trained with, None if not known
    is_resumed: bool = False
    earlier: Any = None  # the settings of the resumed run, of the script's class, if its checkpoint has them

    @property
    def step(self) -> int:
        return self.checkpoint.iter_num if self.is_resumed and self.checkpoint else 0

    # ---- the model ---------------------------------------------------------------------------------------

    def build_model(self, config: RunSettings, make_optimizer: MakeOptimizer, dist: DistContext) -> GPT:
        """The model on this rank's device, as a whole or sharded.

        Where it is sharded, only the first rank builds it in the machine's memory, and none where each can read its own
        rows from a checkpoint. Raises ValueError, also where the memory cannot hold it, before any of it is taken.
        """
        shards = sharding.shards_of(config.dp_shard, dist.world)
        trained_with = None if config.eval_only else make_optimizer
        refuse_beyond_memory(self.model_config, dist.device, trained_with, shards, dist.is_first or shards == 1)
        if shards == 1:
            return self._build(config.block_size).to(dist.device)
        each_reads = self.checkpoint is not None and config.block_size == self.model_config.block_size
        buffers = [name for name, _ in GPT.without_storage(self.model_config).named_buffers()]
        each_reads = each_reads and not {*buffers} - {"transformer.rotary"}
        builds = dist.is_first and not each_reads
        with nullcontext() if builds else torch.device("meta"):
            built = self._build(config.block_size, reads=builds)
        mesh = sharding.make_mesh(dist.device.type, shards, dist.world, config.dist_timeout_s)
        dtype = dtype_of_shards(config.dtype, self.earlier_variant(dist), dist)
        if self.checkpoint is None or not each_reads:
            return sharding.sharded_copy(built, mesh, config.reshard_after_forward, dist.device, dtype)
        model = sharding.empty_copy(built, mesh, config.reshard_after_forward, dist.device, dtype)
        store.restore_weights(model, self.checkpoint)
        return model

    def _build(self, block_size: int, reads: bool = True) -> GPT:
        """The model on the CPU, with its context shortened to block_size. Raises ValueError.

        reads: whether the numbers of a checkpoint's folder matter; where a model is sharded, they do not on each rank.
        """
        weights = self.weights
        if self.checkpoint is not None:
            weights = store.weights_of(self.checkpoint) if reads else self.checkpoint.model
        if weights is None:
            model = GPT(self.model_config)
        else:
            model = GPT.from_state(self.model_config, weights, self.source)
        model.crop_block_size(block_size)
        return model

    def earlier_variant(self, dist: DistContext) -> EarlierVariant:
        """How the resumed run computed, so that this one goes on bit for bit."""
        if not self.is_resumed or self.checkpoint is None:
            return EarlierVariant()
        batch_size = self.earlier.batch_size if self.earlier else None
        return EarlierVariant.of(self.checkpoint.form, dist.device, batch_size)

    def restore(self, state: TrainState, config: RunSettings, code: Metadata) -> None:
        """Gives a resumed run its step, optimizer and progress; frees what was loaded. Raises ValueError.

        code: what computes now. Where that is not what computed before, a line is printed.
        """
        if self.is_resumed and self.checkpoint:
            for change in compare(self.checkpoint.facts, code):
                state.dist.print0(f"changed: {change}")
            state.resume(self.checkpoint, self.source, trains=not config.eval_only)
        self.weights = None
        self.checkpoint = None

    # ---- differences from the resumed run ----------------------------------------------------------------

    def check_changes(self, config: RunSettings, data: Metadata, of_settings: list[Change], dist: DistContext) -> None:
        """Prints how a resumed run differs from the run before; forgets a best loss of other evaluations.

        of_settings: what changes_of_settings has found. Raises ValueError where a change matters for what is
        learned or compared, unless resume_changed.
        """
        assert self.checkpoint is not None
        changes = compare(self.checkpoint.facts, data) + of_settings
        refused = [str(change) for change in changes if change.matters]
        if refused and not config.resume_changed and not config.eval_only:
            raise ValueError(
                f"{self.source} belongs to another experiment: {'; '.join(refused)}. Go on all the same with "
                f"--resume_changed=True, or begin a new run with its weights: --init_from={self.source}"
            )
        for change in changes:
            dist.print0(f"changed: {change}")
        if OF_EVALUATION & {change.name.partition(",")[0] for change in changes}:
            self.checkpoint.best_val_loss = math.inf
            if self.checkpoint.health:  # nor does patience count across them
                self.checkpoint.health["evaluations"] = []


def initial_state(config: RunSettings, scratch: GPTConfig, dist: DistContext) -> InitState:
    """Where init_from says that the run starts. scratch: the model if it is a new one.

    Raises ValueError where the settings describe another model than the source has.
    """
    writes = not config.eval_only and not config.dry_run
    if config.init_from != "resume" and writes and store.is_name(Path(config.out_dir).name):
        raise ValueError(
            f"out_dir={config.out_dir} is a checkpoint's name; a new run needs a folder, such as --out_dir=out"
        )
    if config.init_from == "scratch":
        return InitState("scratch", scratch)
    if config.init_from == "resume":
        init = resumed_state(config, writes, dist)
        given = RESUMED_SETTINGS
    elif store.is_one(config.init_from):
        init = finetuned_state(config, writes, dist)
        given = RESUMED_SETTINGS
    else:
        from deskgpt.export.gpt2_weights import exported_model_args, load_gpt2, tokenizer_of

        model_args, weights = load_gpt2(config.init_from)
        model_config = GPTConfig.from_args(model_args | {"dropout": config.dropout}, config.init_from)
        init = InitState(config.init_from, model_config, weights, tokenizer=tokenizer_of(config.init_from))
        given = MODERN_CHOICES if exported_model_args(config.init_from) is None else RESUMED_SETTINGS

    for name in given:
        # A model may be evaluated or finetuned with a shorter context. crop_block_size refuses a longer one.
        if name == "block_size" and (config.eval_only or not init.is_resumed):
            continue
        wanted = getattr(config, name)
        found = getattr(init.model_config, name)
        if wanted != found:
            raise ValueError(f"{name}={wanted}, but {init.source} has {name}={found}: use --{name}={found}")
    return init


def resumed_state(config: RunSettings, writes: bool, dist: DistContext) -> InitState:
    """The last good checkpoint of out_dir. Raises ValueError where the run is past max_iters already."""
    saved = store.resume(config.out_dir, dist.print0, dist)
    if saved.iter_num > config.max_iters and writes:
        raise ValueError(
            f"{config.out_dir} is at step {saved.iter_num:,}, past max_iters={config.max_iters}: raise --max_iters"
        )
    dist.print0(f"going on from {config.out_dir}, step {saved.iter_num}")
    return InitState(
        source=config.out_dir,
        model_config=GPTConfig.from_args(saved.model_args | {"dropout": config.dropout}, config.out_dir),
        checkpoint=saved,
        tokenizer=saved.tokenizer,
        is_resumed=True,
        earlier=earlier_settings(type(config), saved.config),
    )


def finetuned_state(config: RunSettings, writes: bool, dist: DistContext) -> InitState:
    """The weights of another run's checkpoint. Raises ValueError where the new run would overwrite that run."""
    source = config.init_from
    if writes and store.folder_of(source).resolve() == store.folder_of(config.out_dir).resolve():
        raise ValueError(
            f"init_from={source} is where the new run would write, too: choose another --out_dir, or go on with that "
            "run: --init_from=resume"
        )
    saved = store.load(source, ranks=dist)
    model_config = GPTConfig.from_args(saved.model_args | {"dropout": config.dropout}, source)
    return InitState(source, model_config, checkpoint=saved, tokenizer=saved.tokenizer)


# ---- how it runs here ----------------------------------------------------------------------------------------


def choose_runner(
    config: RunSettings,
    init: InitState,
    model: GPT,
    make_optimizer: MakeOptimizer,
    first_batch: Callable[[int], tuple[Tensor, Tensor]],
    dist: DistContext,
) -> Runner:
    """The fastest variant that computes as model.py does here, in a micro-batch that fits, which config gets.

    first_batch: the first micro-batch of a number of sequences. Raises ValueError where no such variant is allowed.
    """
    batching = Batching.of(asdict(config), dist.rank, dist.world)  # type: ignore[call-overload]
    steps = 0 if config.eval_only else config.max_iters - init.step
    tuner = Tuner(model, config, batching, dist, first_batch, make_optimizer, init.earlier_variant(dist), steps)
    runner, fitting = tuner.choose()
    if fitting.batch_size != config.batch_size:
        for name, value in fitting.settings().items():
            setattr(config, name, value)
    if dist.distributed and not config.eval_only:
        runner.distribute(*first_batch(config.batch_size))
    return runner


# ---- provenance and log --------------------------------------------------------------------------------------


def code_versions(runner: Runner) -> Metadata:
    """Commit, versions, device and variant, for checkpoints: a resumed run prints a change and goes on."""
    on_cpu = runner.device.type == "cpu"  # whose full name has the number of threads, which ranks share
    device = hardware.processor()[0] if on_cpu else hardware.device_name(runner.device)
    return {"code": git_commit(), "versions": versions(), "device": device, "form": str(runner.variant)}


def open_log(config: RunSettings, state: TrainState) -> RunLog:
    """The log of this run; an earlier run in out_dir is moved aside. Other ranks and eval_only write no file."""
    dist = state.dist
    if not dist.is_first or config.eval_only:
        return RunLog(None)
    wandb_run = None
    if config.wandb_log:
        settings = asdict(state.config)
        wandb_run = start_wandb(config.wandb_project, config.wandb_run_name, settings, state.wandb_run_id)
        state.wandb_run_id = wandb_run.id
    out_dir = store.folder_of(config.out_dir)
    if config.init_from != "resume":
        found = tuple(path.name for path in store.candidates(out_dir))
        old = store.set_aside(out_dir, (*found, "log.jsonl"))
        if old:
            dist.print0(f"{out_dir} held an earlier run; it is now in {old}")
    elif math.isinf(state.best_val_loss) and state.first_step > 0:
        best = store.best_of(out_dir)
        is_last = best in store.candidates(out_dir)[:1]  # a folder, which the run goes on from
        old = store.set_aside(out_dir, () if best is None or is_last else (best.name,))
        kept = f"; {best.name} is now in {old}" if best and old else ""
        dist.print0(f"the best val loss begins anew, because earlier losses come from another evaluation{kept}")
    return RunLog(out_dir / "log.jsonl", wandb_run)
