"""What a run starts from: random weights, a checkpoint, GPT-2's weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from data.batching import Batching
from data.dataset import Dataset
from deskgpt.checkpoint import store
from deskgpt.checkpoint.store import Checkpoint
from deskgpt.compute import sharding
from deskgpt.compute.check import check_model
from deskgpt.compute.distributed import DistContext, agree
from deskgpt.compute.variant import Variant, apply_variant, choose_variant, saved_variant
from deskgpt.estimate.fit import USABLE_SHARE, larger_batch, refuse_beyond_memory, refuse_large_batch
from deskgpt.estimate.memory import Step, with_fewest_chunks
from deskgpt.run.schedule import Config, Schedule
from deskgpt.run.settings import (
    RESUMED_SETTINGS,
    changed_rate,
    changes_between,
    check_same_on_all_hosts,
    known_settings,
    learning_settings,
    rates_of,
    settings_of_model,
)
from deskgpt.run.train_state import RATES, TrainState
from deskgpt.system import hardware
from model import GPT, MODERN_CHOICES, GPTConfig

# If one of these changes, the best loss so far is another quantity than this run's losses.
OF_EVALUATION = {store.VAL_DATA, store.EVAL_WINDOWS}
OF_CODE = ("code", "versions", "device", "variant")  # in a checkpoint's metadata: a change is printed
Rate = Callable[[Schedule, int], float]  # the learning rate at a step


@dataclass
class InitState:
    """Where a run starts."""

    source: str  # for messages
    model_config: GPTConfig
    checkpoint: Checkpoint  # of another run, or GPT-2: its weights and tokenizer; empty for random weights
    earlier: Config | None = None  # the settings of the run that is resumed

    def check_experiment(self, config: Config, data: Dataset, rate: Rate, dist: DistContext) -> None:
        """Print how a resumed run differs from the run before; forget a best loss of other evaluations.

        Raises ValueError if hosts differ, and if a change matters for what is learned or compared, unless
        resume_changed.
        """
        steps = self.checkpoint.iter_num
        check_same_on_all_hosts(asdict(config), data.metadata | {"checkpoint": f"step {steps}"}, dist)
        if self.earlier is None:
            return
        saved = self.checkpoint.metadata or {}
        now = data.metadata | learning_settings(config) | data.eval_metadata(Batching.of(config, dist.rank, dist.world))
        changes = changes_between(saved | learning_settings(self.earlier), now)
        old, new = Schedule.of(self.earlier), Schedule.of(config)
        rates = saved.get(RATES) or rates_of(lambda step: rate(old, step), steps)
        changes += changed_rate(rates, lambda step: rate(new, step))
        of_schedule = changes_between(asdict(old), asdict(new))
        if changes and not config.resume_changed and not config.eval_only:
            raise ValueError(
                f"{self.source} belongs to another experiment: {'; '.join(map(str, changes + of_schedule))}. Continue "
                f"all the same with --resume_changed=True, or begin a new run with its weights: "
                f"--init_from={self.source}"
            )
        for change in changes + of_schedule:
            dist.print0(f"changed: {change}")
        if OF_EVALUATION & {change.name.partition(",")[0] for change in changes}:
            dist.print0("the best val loss begins anew, because earlier losses come from another evaluation")
            self.checkpoint.best_val_loss = math.inf
            progress = self.checkpoint.progress
            self.checkpoint.progress = progress and progress | {"evaluations": []}  # nor do they count for patience

    def choose_variant(self, config: Config, dist: DistContext) -> Variant:
        """Return how this run computes, by rule; a resumed run computes as before. Raises ValueError."""
        hardware.keep_freed_memory()
        hardware.limit_threads()
        sharding.check_sharding(config.dp_shard, dist.world, config.dtype, config.sample_interval)
        return choose_variant(config, dist, saved_variant(self.checkpoint.variant, dist.device))

    def fitting_batch(self, config: Config, variant: Variant, dist: DistContext) -> Batching:
        """Return the cut of a step that the settings ask for; on CUDA, if auto_batch allows, a larger one that fits.

        All ranks have the same micro-batch, which the smallest card can hold. A resumed run keeps its own. Masks of
        dropout belong to a micro-batch, so with dropout the size changes only for a user who asks for it. Raises
        ValueError if a CPU surely lacks the memory.
        """
        batching = Batching.of(config, dist.rank, dist.world)
        if not config.eval_only:
            shards = sharding.shards_of(config.dp_shard, dist.world)
            refuse_large_batch(self.model_config, dist.device, shards, batching, variant)
        wanted = not config.dropout if config.auto_batch == "auto" else config.auto_batch
        is_resumed = self.earlier is not None
        if not wanted or config.eval_only or is_resumed or dist.device.type != "cuda" or config.dp_shard != 1:
            return batching
        batch_size = agree(dist, larger_batch(self.model_config, dist.device, batching, variant))
        if batch_size > batching.batch_size:
            batching = batching.with_batch_size(batch_size)
            dist.print0(f"auto_batch: using {batching.flags()} (predicted to fit; the same tokens per step)")
        return batching

    def with_loss_chunks(self, config: Config, variant: Variant, batching: Batching, dist: DistContext) -> Variant:
        """Return the variant with the fewest chunks of the loss that fit on all ranks; a resumed run takes no fewer.

        The limit is all memory of the device, not what is free just now: the same run takes the same chunks each time.
        """
        shards = sharding.shards_of(config.dp_shard, dist.world)
        step = Step(self.model_config, batching.batch_size, variant, dist.device.type, shards)
        fewest = with_fewest_chunks(step, USABLE_SHARE * hardware.memory_bytes(dist.device)).variant.loss_chunks
        earlier = saved_variant(self.checkpoint.variant, dist.device).get("loss_chunks", 1)
        return replace(variant, loss_chunks=int(dist.max(max(fewest, earlier))))

    def build_model(self, config: Config, variant: Variant, dist: DistContext) -> GPT:
        """Return the model on this rank's device in its variant; sharded, if dp_shard asks for it.

        Raises ValueError, also if the memory cannot hold it, before any of it is taken.
        """
        shards = sharding.shards_of(config.dp_shard, dist.world)
        builds = dist.is_first or shards == 1
        refuse_beyond_memory(self.model_config, dist.device, not config.eval_only, shards, builds)
        weights = self.checkpoint.model
        with nullcontext() if builds else torch.device("meta"):
            model = GPT.from_state(self.model_config, weights, self.source) if weights else GPT(self.model_config)
            model.crop_block_size(config.block_size)
        if shards == 1:
            model = model.to(dist.device)
        else:
            mesh = sharding.make_mesh(dist.device.type, shards, dist.world, config.dist_timeout_s)
            model = sharding.sharded_copy(model, mesh, dist.device, variant.dtype)
        apply_variant(model, variant, dist.world)
        return model

    def check_model(self, config: Config, data: Dataset, dist: DistContext) -> None:
        """Check the model, and how this run computes it, on a short text; print the result (compute/check.py).

        Raises ValueError if something is wrong.
        """
        variant = self.choose_variant(config, dist)
        model = self.build_model(config, Variant(), dist)
        idx, targets = data.short_text(model.config.block_size, model.config.vocab_size)
        problems = check_model(model, variant, idx.to(dist.device), targets.to(dist.device))
        if problems:
            raise ValueError(f"model.py: {'; '.join(problems)}")
        dist.print0(
            f"checked on {idx.numel()} tokens: no token sees later ones, the loss is the cross-entropy of the logits, "
            f"gradients reach all parameters; {variant} agrees with eager float32"
        )

    def restore(self, state: TrainState, trains: bool) -> None:
        """Give a resumed run its step, optimizer and progress; free what was loaded. Raises ValueError.

        If something else computes now than before, a line is printed.
        """
        if self.earlier is not None:
            for change in changes_between(self.checkpoint.metadata, {name: state.metadata[name] for name in OF_CODE}):
                state.dist.print0(f"changed: {change}")
            state.resume(self.checkpoint, self.source, trains)
        self.checkpoint.model = {}
        self.checkpoint.optimizer = None


def initial_state(config: Config, data: Dataset, dist: DistContext) -> InitState:
    """Find what init_from names: the last good checkpoint of the run that is resumed, or only weights.

    Raises ValueError if the settings describe another model than the source has.
    """
    is_resumed = config.init_from == "resume"
    if not is_resumed and store.folder_of(config.out_dir) != Path(config.out_dir):
        raise ValueError(
            f"out_dir={config.out_dir} is a checkpoint's name; a new run needs a folder, such as --out_dir=out"
        )
    if config.init_from == "scratch":
        return InitState("scratch", GPTConfig.from_settings(config, data.vocab_size), Checkpoint({}, {}))
    source = config.out_dir if is_resumed else config.init_from
    given = RESUMED_SETTINGS
    reads = dist.is_first or sharding.shards_of(config.dp_shard, dist.world) == 1  # other ranks get theirs from rank 0
    if is_resumed:
        saved = store.resume(source, dist, checksums=reads)
    elif store.is_checkpoint(source):
        trained = store.load(source, dist.print0, dist, checksums=reads)
        saved = Checkpoint(trained.model, trained.model_args, tokenizer=trained.tokenizer)
    else:
        from deskgpt.export.gpt2_weights import exported_model_args, load_gpt2, tokenizer_of

        model_args, weights = load_gpt2(source)
        saved = Checkpoint(weights, model_args, tokenizer=tokenizer_of(source))
        given = RESUMED_SETTINGS if exported_model_args(source) else MODERN_CHOICES  # GPT-2's folder lacks the others
    model_config = GPTConfig.from_args(saved.model_args | {"dropout": config.dropout}, source)
    init = InitState(source, model_config, saved)
    if is_resumed:
        dist.print0(f"resuming {source} at step {saved.iter_num}")
        # nanoGPT's checkpoint has fewer settings; one that came later has its default.
        known = known_settings(type(config), saved.config) | settings_of_model(saved.model_args, source)
        init.earlier = type(config)(**known)

    for name in given:
        # A model may be evaluated or finetuned with a shorter context. crop_block_size refuses a longer one.
        if name == "block_size" and (config.eval_only or not is_resumed):
            continue
        wanted = getattr(config, name)
        actual = getattr(model_config, name)
        if wanted != actual:
            raise ValueError(f"{name}={wanted}, but {source} has {name}={actual}: use --{name}={actual}")
    return init
