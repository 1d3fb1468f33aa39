"""What a run starts from (random weights, a checkpoint, GPT-2's weights), and how the model runs here."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from deskgpt.run.settings import (
    RESUMED_SETTINGS,
    Change,
    Metadata,
    changed_schedule,
    check_same_on_all_hosts,
    compare,
    known_settings,
    of_experiment,
)
from deskgpt.run.train_state import TrainState
from deskgpt.system import hardware
from model import GPT, MODERN_CHOICES, GPTConfig

if TYPE_CHECKING:
    from data.dataset import Dataset
    from train import TrainConfig

# Where one of these changes, the best loss so far is another quantity than this run's losses.
OF_EVALUATION = {store.VAL_DATA, store.EVAL_WINDOWS, "block_size"}


def prepare_machine(config: TrainConfig, dist: DistContext) -> None:
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
    earlier: TrainConfig | None = None  # the settings of the resumed run, if its checkpoint has them

    @property
    def step(self) -> int:
        return self.checkpoint.iter_num if self.is_resumed and self.checkpoint else 0

    def check_experiment(
        self, config: TrainConfig, data: Dataset, rate: Callable[[TrainConfig, int], float], dist: DistContext
    ) -> None:
        """Prints how a resumed run differs from the run before; forgets a best loss of other evaluations.

        rate: the learning rate at a step. Raises ValueError where hosts differ, and where a change matters for what is
        learned or compared, unless resume_changed.
        """
        check_same_on_all_hosts(asdict(config), data.metadata | {"checkpoint": f"step {self.step}"}, dist)
        if not self.is_resumed:
            return
        assert self.checkpoint is not None
        changes = compare(self.checkpoint.metadata, data.metadata)
        allowed: list[Change] = []
        if self.earlier:
            before = of_experiment(self.earlier) | data.eval_metadata(Batching.of(asdict(self.earlier)))
            now = of_experiment(config) | data.eval_metadata(Batching.of(asdict(config)))
            changes += compare(before, now)
            rates, schedule = changed_schedule(self.earlier, config, rate, self.step)
            if rates:
                changes += rates + schedule
            else:
                allowed = schedule
        if changes and not config.resume_changed and not config.eval_only:
            raise ValueError(
                f"{self.source} belongs to another experiment: {'; '.join(map(str, changes))}. Go on all the same with "
                f"--resume_changed=True, or begin a new run with its weights: --init_from={self.source}"
            )
        for change in changes + allowed:
            dist.print0(f"changed: {change}")
        if OF_EVALUATION & {change.name.partition(",")[0] for change in changes}:
            self.checkpoint.best_val_loss = math.inf
            if self.checkpoint.progress:  # nor does patience count across them
                self.checkpoint.progress["evaluations"] = []

    def build_model(self, config: TrainConfig, dist: DistContext) -> GPT:
        """The model on this rank's device, as a whole or sharded; then only the first rank builds it as a whole.

        Raises ValueError, also where the memory cannot hold it, before any of it is taken.
        """
        shards = sharding.shards_of(config.dp_shard, dist.world)
        builds = dist.is_first or shards == 1
        refuse_beyond_memory(self.model_config, dist.device, not config.eval_only, shards, builds)
        if shards == 1:
            return self._build(config.block_size).to(dist.device)
        with nullcontext() if builds else torch.device("meta"):
            built = self._build(config.block_size, reads=builds)
        mesh = sharding.make_mesh(dist.device.type, shards, dist.world, config.dist_timeout_s)
        dtype = dtype_of_shards(config.dtype, self.earlier_variant(dist), dist)
        return sharding.sharded_copy(built, mesh, dist.device, dtype)

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
        return EarlierVariant.of(self.checkpoint.variant, dist.device, batch_size)

    def restore(self, state: TrainState, config: TrainConfig, code: Metadata) -> None:
        """Gives a resumed run its step, optimizer and progress; frees what was loaded. Raises ValueError.

        code: what computes now. Where that is not what computed before, a line is printed.
        """
        if self.is_resumed and self.checkpoint:
            for change in compare(self.checkpoint.metadata, code):
                state.dist.print0(f"changed: {change}")
            state.resume(self.checkpoint, self.source, trains=not config.eval_only)
        self.weights = None
        self.checkpoint = None


def initial_state(config: TrainConfig, scratch: GPTConfig, dist: DistContext) -> InitState:
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
    given = RESUMED_SETTINGS
    if config.init_from == "resume" or store.is_checkpoint(config.init_from):
        init = from_checkpoint(config, writes, dist)
    else:
        from deskgpt.export.gpt2_weights import exported_model_args, load_gpt2, tokenizer_of

        model_args, weights = load_gpt2(config.init_from)
        model_config = GPTConfig.from_args(model_args | {"dropout": config.dropout}, config.init_from)
        init = InitState(config.init_from, model_config, weights, tokenizer=tokenizer_of(config.init_from))
        if exported_model_args(config.init_from) is None:  # a folder of GPT-2's does not have all settings
            given = MODERN_CHOICES

    for name in given:
        # A model may be evaluated or finetuned with a shorter context. crop_block_size refuses a longer one.
        if name == "block_size" and (config.eval_only or not init.is_resumed):
            continue
        wanted = getattr(config, name)
        found = getattr(init.model_config, name)
        if wanted != found:
            raise ValueError(f"{name}={wanted}, but {init.source} has {name}={found}: use --{name}={found}")
    return init


def from_checkpoint(config: TrainConfig, writes: bool, dist: DistContext) -> InitState:
    """The last good checkpoint of the run that goes on, or the weights of another run's.

    Raises ValueError where a run that goes on is past max_iters, or a new one would overwrite the other.
    """
    is_resumed = config.init_from == "resume"
    source = config.out_dir if is_resumed else config.init_from
    earlier = None
    if is_resumed:
        saved = store.resume(source, dist.print0, dist)
        if saved.iter_num > config.max_iters and writes:
            raise ValueError(
                f"{source} is at step {saved.iter_num:,}, past max_iters={config.max_iters}: raise --max_iters"
            )
        dist.print0(f"going on from {source}, step {saved.iter_num}")
        known = known_settings(type(config), saved.config)
        if "learning_rate" in known:  # nanoGPT's has fewer; a setting that came later has its default
            earlier = type(config)(**known)
    else:
        if writes and store.folder_of(source).resolve() == store.folder_of(config.out_dir).resolve():
            raise ValueError(
                f"init_from={source} is where the new run would write, too: choose another --out_dir, or go on with "
                "that run: --init_from=resume"
            )
        saved = store.load(source, dist=dist)
    model_config = GPTConfig.from_args(saved.model_args | {"dropout": config.dropout}, source)
    return InitState(source, model_config, None, saved, saved.tokenizer, is_resumed, earlier)


def choose_runner(
    config: TrainConfig,
    init: InitState,
    model: GPT,
    make_optimizer: MakeOptimizer,
    first_batch: Callable[[int], tuple[Tensor, Tensor]],
    dist: DistContext,
) -> Runner:
    """The fastest variant that computes as model.py does here, in a micro-batch that fits, which config gets.

    first_batch: the first micro-batch of a number of sequences. Raises ValueError where no such variant is allowed.
    """
    batching = Batching.of(asdict(config), dist.rank, dist.world)
    steps = 0 if config.eval_only else config.max_iters - init.step
    tuner = Tuner(model, config, batching, dist, first_batch, make_optimizer, init.earlier_variant(dist), steps)
    runner, fitting = tuner.choose()
    if fitting.batch_size != config.batch_size:
        for name, value in fitting.settings().items():
            setattr(config, name, value)
    if dist.distributed and not config.eval_only:
        runner.distribute(*first_batch(config.batch_size))
    return runner
