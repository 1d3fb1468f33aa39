"""What a run starts from: random weights, a checkpoint or GPT-2's weights; and how it differs from
the run before.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from configurator import read_settings
from data.batches import BatchSplit
from data.dataset import Dataset
from deskgpt import device as machine
from deskgpt.checkpoint import (
    EVAL_WINDOWS,
    VAL_DATA,
    Checkpoint,
    is_checkpoint,
    load_checkpoint,
    load_to_resume,
    run_folder,
)
from deskgpt.compute import ComputeMode, apply_compute, choose_compute, saved_compute
from deskgpt.device import git_commit, keep_freed_memory, limit_threads, versions
from deskgpt.distributed import DistContext, agree, shards_of
from deskgpt.errors import ConfigError, shortened
from deskgpt.files import note_once, untrusted_settings
from deskgpt.stopping import Config, Schedule
from deskgpt.train_state import LR_HISTORY, TrainState, sample_lrs
from model import GPT, GPT2_CHOICES, MODERN_CHOICES, GPTConfig, ModelSettings

# If one of these changes, the best loss so far is another quantity than this run's losses.
OF_EVALUATION = {VAL_DATA, EVAL_WINDOWS}
# In a checkpoint's metadata: a change is printed.
OF_CODE = ("code", "versions", "device", "variant")
Rate = Callable[[Schedule, int], float]  # the learning rate at a step


@dataclass
class Start:
    """Where a run starts."""

    source: str  # for messages
    model_config: GPTConfig
    # Of another run, or GPT-2: its weights and tokenizer; empty for random weights.
    checkpoint: Checkpoint
    earlier: Config | None = None  # the settings of the run that is resumed

    def open_data(self, config: Config, data: Dataset, dist: DistContext) -> None:
        """Open both splits for the model that this run starts from. Raises ValueError if they do
        not belong to it or are damaged.
        """
        vocab_size = self.model_config.vocab_size
        tokenizer = self.checkpoint.tokenizer
        data.open(config.block_size, config.seed, vocab_size, tokenizer, dist.is_first)

    def check_same_experiment(
        self, config: Config, data: Dataset, rate: Rate, dist: DistContext
    ) -> None:
        """Print how a resumed run differs from the run before; forget a best loss of other
        evaluations.

        Raises ValueError if hosts differ, and if a change matters for what is learned or compared,
        unless resume_changed.
        """
        steps = self.checkpoint.iter_num
        check_same_on_all_hosts(
            asdict(config), data.metadata | {"checkpoint": f"step {steps}"}, dist
        )
        if self.earlier is None:
            return
        saved = self.checkpoint.metadata or {}
        now = (
            data.metadata
            | learning_settings(config)
            | data.eval_metadata(BatchSplit.of(config, dist.rank, dist.world))
        )
        changes = changes_between(saved | learning_settings(self.earlier), now)
        old, new = Schedule.of(self.earlier), Schedule.of(config)
        rates = saved.get(LR_HISTORY) or sample_lrs(lambda step: rate(old, step), steps)
        changes += first_changed_lr(rates, lambda step: rate(new, step))
        of_schedule = changes_between(asdict(old), asdict(new))
        if changes and not config.resume_changed and not config.eval_only:
            raise ValueError(
                f"{self.source} belongs to another experiment: "
                f"{'; '.join(map(str, changes + of_schedule))}. Continue all the same with "
                "--resume_changed=True, or begin a new run with its weights: "
                f"--init_from={self.source}"
            )
        for change in changes + of_schedule:
            dist.print0(f"changed: {change}")
        if OF_EVALUATION & {change.name.partition(",")[0] for change in changes}:
            dist.print0(
                "the best val loss begins anew, because earlier losses come from another evaluation"
            )
            self.checkpoint.best_val_loss = math.inf
            progress = self.checkpoint.progress
            # Nor do they count for patience
            self.checkpoint.progress = progress and progress | {"evaluations": []}

    def choose_compute(self, config: Config, dist: DistContext) -> ComputeMode:
        """Return how this run computes, by rule; a resumed run computes as before.

        Raises ValueError.
        """
        from deskgpt.sharding import check_sharding

        keep_freed_memory()
        limit_threads()
        check_sharding(config.dp_shard, dist.world, config.dtype, config.sample_interval)
        return choose_compute(config, dist, saved_compute(self.checkpoint.variant, dist.device))

    def choose_batch(self, config: Config, variant: ComputeMode, dist: DistContext) -> BatchSplit:
        """Return the cut of a step that the settings ask for; on CUDA, if auto_batch allows, a
        larger one that fits.

        All ranks have the same micro-batch, which the smallest card can hold. A resumed run keeps
        its own. Masks of dropout belong to a micro-batch, so with dropout the size changes only for
        a user who asks for it. Raises ValueError if a CPU surely lacks the memory.
        """
        from deskgpt.memory import check_batch_fits, larger_batch

        batching = BatchSplit.of(config, dist.rank, dist.world)
        if not config.eval_only:
            shards = shards_of(config.dp_shard, dist.world)
            check_batch_fits(self.model_config, dist.device, shards, batching, variant)
        wanted = not config.dropout if config.auto_batch == "auto" else config.auto_batch
        is_resumed = self.earlier is not None
        if (
            not wanted
            or config.eval_only
            or is_resumed
            or dist.device.type != "cuda"
            or config.dp_shard != 1
        ):
            return batching
        batch_size = agree(dist, larger_batch(self.model_config, dist.device, batching, variant))
        if batch_size > batching.batch_size:
            batching = batching.with_batch_size(batch_size)
            dist.print0(
                f"auto_batch: using {batching.flags()} (predicted to fit; the same tokens per step)"
            )
        return batching

    def with_loss_chunks(
        self, config: Config, variant: ComputeMode, batching: BatchSplit, dist: DistContext
    ) -> ComputeMode:
        """Return the variant with the fewest chunks of the loss that fit on all ranks; a resumed
        run takes no fewer.

        The limit is all memory of the device, not what is free just now: the same run takes the
        same chunks each time.
        """
        from deskgpt.memory import USABLE_SHARE, StepShape, with_fewest_chunks

        shards = shards_of(config.dp_shard, dist.world)
        step = StepShape(self.model_config, batching.batch_size, variant, dist.device.type, shards)
        fewest = with_fewest_chunks(
            step, USABLE_SHARE * machine.memory_bytes(dist.device)
        ).variant.loss_chunks
        earlier = saved_compute(self.checkpoint.variant, dist.device).get("loss_chunks", 1)
        return replace(variant, loss_chunks=int(dist.max(max(fewest, earlier))))

    def build_model(self, config: Config, variant: ComputeMode, dist: DistContext) -> GPT:
        """Return the model on this rank's device in its variant; sharded, if dp_shard asks for it.

        Raises ValueError, also if the memory cannot hold it, before any of it is taken.
        """
        from deskgpt.memory import check_model_fits
        from deskgpt.sharding import make_mesh, sharded_copy

        shards = shards_of(config.dp_shard, dist.world)
        builds = dist.is_first or shards == 1
        check_model_fits(self.model_config, dist.device, not config.eval_only, shards, builds)
        weights = self.checkpoint.model
        with nullcontext() if builds else torch.device("meta"):
            model = (
                GPT.from_state(self.model_config, weights, self.source)
                if weights
                else GPT(self.model_config)
            )
            model.crop_block_size(config.block_size)
        if shards == 1:
            model = model.to(dist.device)
        else:
            mesh = make_mesh(dist.device.type, shards, dist.world, config.dist_timeout_s)
            model = sharded_copy(model, mesh, dist.device, variant.dtype)
        apply_compute(model, variant, dist.world)
        return model

    def check_model(self, config: Config, data: Dataset, dist: DistContext) -> None:
        """Check the model, and how this run computes it, on a short text; print the result
        (check_model.py).

        Raises ValueError if something is wrong.
        """
        from deskgpt.check_model import check_model

        variant = self.choose_compute(config, dist)
        model = self.build_model(config, ComputeMode(), dist)
        idx, targets = data.short_text(model.config.block_size, model.config.vocab_size)
        problems = check_model(model, variant, idx.to(dist.device), targets.to(dist.device))
        if problems:
            raise ValueError(f"model.py: {'; '.join(problems)}")
        dist.print0(
            f"checked on {idx.numel()} tokens: no token sees later ones, the loss is the "
            f"cross-entropy of the logits, gradients reach all parameters; {variant} "
            "agrees with eager float32"
        )

    def restore(self, state: TrainState, trains: bool) -> None:
        """Give a resumed run its step, optimizer and progress; free what was loaded.

        Raises ValueError.

        If something else computes now than before, a line is printed.
        """
        if self.earlier is not None:
            for change in changes_between(
                self.checkpoint.metadata, {name: state.metadata[name] for name in OF_CODE}
            ):
                state.dist.print0(f"changed: {change}")
            state.resume(self.checkpoint, self.source, trains)
        self.checkpoint.model = {}
        self.checkpoint.optimizer = None


def find_start(config: Config, data: Dataset, dist: DistContext) -> Start:
    """Find what init_from names: the last good checkpoint of the run that is resumed, or only
    weights.

    Raises ValueError if the settings describe another model than the source has.
    """
    is_resumed = config.init_from == "resume"
    if not is_resumed and run_folder(config.out_dir) != Path(config.out_dir):
        raise ValueError(
            f"out_dir={config.out_dir} is a checkpoint's name; a new run needs a folder, "
            "such as --out_dir=out"
        )
    if config.init_from == "scratch":
        return Start(
            "scratch", GPTConfig.from_settings(config, data.vocab_size), Checkpoint({}, {})
        )
    source = config.out_dir if is_resumed else config.init_from
    given = RESUMED_SETTINGS
    # Other ranks get theirs from rank 0.
    reads = dist.is_first or shards_of(config.dp_shard, dist.world) == 1
    if is_resumed:
        saved = load_to_resume(source, dist, checksums=reads)
    elif is_checkpoint(source):
        trained = load_checkpoint(source, dist.print0, dist, checksums=reads)
        saved = Checkpoint(trained.model, trained.model_args, tokenizer=trained.tokenizer)
    else:
        from deskgpt.gpt2_weights import exported_model_args, load_gpt2, tokenizer_of

        model_args, weights = load_gpt2(source)
        saved = Checkpoint(weights, model_args, tokenizer=tokenizer_of(source))
        # GPT-2's folder lacks the others
        given = RESUMED_SETTINGS if exported_model_args(source) else MODERN_CHOICES
    model_config = GPTConfig.from_args(saved.model_args | {"dropout": config.dropout}, source)
    init = Start(source, model_config, saved)
    if is_resumed:
        dist.print0(f"resuming {source} at step {saved.iter_num}")
        # nanoGPT's checkpoint has fewer settings; one that came later has its default.
        known = known_settings(type(config), saved.config) | settings_of_model(
            saved.model_args, source
        )
        init.earlier = type(config)(**known)

    for name in given:
        # A model may be evaluated or finetuned with a shorter context. crop_block_size refuses a
        # longer one.
        if name == "block_size" and (config.eval_only or not is_resumed):
            continue
        wanted = getattr(config, name)
        actual = getattr(model_config, name)
        if wanted != actual:
            raise ValueError(
                f"{name}={wanted}, but {source} has {name}={actual}: use --{name}={actual}"
            )
    return init


# ---- what a setting is about ---------------------------------------------------------------------

# The one classification of train.py's settings. A setting belongs to learning unless it is listed
# here: a resumed run, a band of losses, bench/ask.py and bench/compare.py compare all others.
OUTPUT = {"out_dir", "log_interval", "always_save_checkpoint", "save_minutes", "sample_interval"}
OUTPUT |= {"wandb_log", "wandb_project", "wandb_run_name"}
# How many windows it reads is compared apart.
EVALUATION = {"eval_interval", "eval_iters", "eval_tokens", "eval_only"}
START = {"init_from", "resume_changed", "dry_run", "plan_for"}
END = {"max_hours", "max_minutes", "patience", "on_spike"}
# The sequences per step are compared apart.
MICRO_BATCH_SETTINGS = {"batch_size", "gradient_accumulation_steps", "auto_batch"}
MACHINE = {"device", "dtype", "cpu_kernels", "compile", "activation_checkpoint"}
MACHINE |= {"cuda_graph", "deterministic", "backend", "dp_shard", "dist_timeout_s"}
DATA = {"dataset"}  # a path; what is in it is compared apart
NOT_LEARNING = frozenset(OUTPUT | EVALUATION | START | END | MICRO_BATCH_SETTINGS | MACHINE | DATA)
# Of learning too, but compared by the rates of the steps so far: with the same past, it is the same
# experiment.
SCHEDULE = tuple(f.name for f in fields(Schedule))

# Settings of earlier versions, which old config files have, and what there is in their place.
REMOVED_SETTINGS = {"fp8": "docs/hacks/fp8.patch trains the blocks' linear layers in 8 bits"}
# What runs have that do not say it, such as nanoGPT's: whatever the defaults are now.
WITHOUT_CHOICE = GPT2_CHOICES | {"optimizer": "adamw", "lr_schedule": "cosine"}
# What a resumed run takes from its checkpoint.
RESUMED_SETTINGS = tuple(f.name for f in fields(ModelSettings) if f.name != "dropout")
# What max_minutes settles. A run that resumes keeps it.
SET_BY_MAX_MINUTES = ("max_iters", "warmup_iters", "lr_decay_iters")
ON_A_HOST = ("out_dir", "dataset", "device")  # paths and names that can differ between hosts


# ---- the settings of a start ---------------------------------------------------------------------


def settings_of_start(cls: type, argv: list[str]) -> dict[str, Any]:
    """Return all settings of the run that argv starts, by name, after init_from is followed.

    Raises ConfigError.

    A resumed run begins with the settings of its checkpoint, a finetuned one with those of the
    model; config files and the command line override them.
    """
    settings = read_settings(cls, argv)
    if settings["init_from"] == "auto" and not is_checkpoint(settings["out_dir"]):
        # No checkpoint yet: init_from is what the config files say, so that one command serves
        # every start.
        argv = [arg for arg in argv if arg != "--init_from=auto"]
        settings = read_settings(cls, argv)
        if settings["init_from"] == "auto":
            settings["init_from"] = "scratch"
    source = settings["init_from"]
    if source in ("resume", "auto"):
        return resumed_settings(cls, argv, settings["out_dir"])
    if is_checkpoint(source):
        return read_settings(
            cls,
            argv,
            settings_of_model(load_checkpoint(source, checksums=False).model_args, source),
        )
    if source == "scratch":
        return settings
    from deskgpt.gpt2_weights import exported_model_args

    exported = exported_model_args(source)
    return read_settings(cls, argv, settings_of_model(exported, source)) if exported else settings


def resumed_settings(cls: type, argv: list[str], out_dir: str) -> dict[str, Any]:
    """Return the settings of the run in out_dir, overridden by files and command line, but for the
    model's size.
    """
    saved = load_checkpoint(out_dir, checksums=False)
    of_model = [
        f"--{name}={value}" for name, value in settings_of_model(saved.model_args, out_dir).items()
    ]
    known = known_settings(cls, saved.config)
    left_out = untrusted_settings(known)
    base = {name: value for name, value in known.items() if name not in left_out}
    base |= {"out_dir": out_dir, "init_from": "resume", "eval_only": False, "resume_changed": False}
    base["max_minutes"] = 0.0  # the steps that it allowed are in max_iters
    earlier = read_settings(cls, [], base)

    settings = read_settings(cls, [*of_model, *argv], earlier)
    settings["init_from"] = "resume"
    for name, value in left_out.items():
        if settings[name] != earlier[name]:
            continue  # the user has typed it again
        text = shortened(value)
        if name == "dataset":
            raise ConfigError(
                f"dataset={text} of {out_dir} is on another host: to use it, add --dataset={text}"
            )
        note_once(f"{name}={text} of {out_dir} is left out; to have it again, add --{name}={text}")
    if settings["max_minutes"]:  # as in the same command again
        settings |= {name: earlier[name] for name in SET_BY_MAX_MINUTES} | {"max_minutes": 0.0}
        note_once(
            f"max_minutes planned {out_dir} at its start; it keeps "
            f"max_iters={settings['max_iters']}"
        )
    counts_batches = not earlier["eval_tokens"] and not settings["eval_tokens"]
    same_count = counts_batches and settings["eval_iters"] == earlier["eval_iters"]
    # An evaluation keeps its windows
    if same_count and settings["batch_size"] != earlier["batch_size"]:
        settings["eval_tokens"] = (
            earlier["eval_iters"] * earlier["batch_size"] * settings["block_size"]
        )
    return settings


def known_settings(cls: type, saved: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a checkpoint that there still are; nanoGPT has others, too."""
    names = {f.name for f in fields(cls)}
    saved = WITHOUT_CHOICE | saved
    return {name: value for name, value in saved.items() if name in names}


def settings_of_model(model_args: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the settings of a saved model, without dropout, which may change."""
    found = asdict(GPTConfig.from_args(model_args, source))
    return {name: found[name] for name in RESUMED_SETTINGS}


# ---- differences between the resumed run and this one --------------------------------------------

Metadata = dict[str, Any]


class Change(NamedTuple):
    """A setting or a property of the data that differs from the resumed run's."""

    name: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.name}: {self.before} before, {self.now} now"


def changes_between(before: Any, now: Metadata) -> list[Change]:
    """Return the keys that both have and whose values differ, in `now`'s order.

    before: of a checkpoint, so it may be of any type.
    """
    found = []
    for name, value in now.items():
        old = before.get(name) if isinstance(before, dict) else None
        if isinstance(value, dict):
            found += [
                change._replace(name=f"{name}, {change.name}")
                for change in changes_between(old, value)
            ]
        elif isinstance(old, str | float | int) and value is not None and old != value:
            found.append(Change(name, shortened(old), shortened(value)))
    return found


def learning_settings(config: Config) -> Metadata:
    """Return what the settings say about learning, without the schedule.

    The cut of a global batch does not count.
    """
    found = {
        name: value
        for name, value in asdict(config).items()
        if name not in NOT_LEARNING | {*SCHEDULE}
    }
    if config.optimizer != "muon":
        del found["momentum"]
    return found | {"sequences per step": config.batch_size * config.gradient_accumulation_steps}


def first_changed_lr(before: Any, rate: Callable[[int], float]) -> list[Change]:
    """Return the first of the steps done (sample_lrs) that has another learning rate today, or
    nothing.
    """
    for step, old in before.items() if isinstance(before, dict) else ():
        if isinstance(step, str) and step.isdecimal() and isinstance(old, float):
            now = rate(int(step))
            if not math.isclose(old, now):
                return [Change(f"learning rate at step {int(step):,}", f"{old:.6g}", f"{now:.6g}")]
    return []


def check_same_on_all_hosts(
    settings: Mapping[str, Any], metadata: Metadata, dist: DistContext
) -> None:
    """Raises ValueError, on all ranks, if settings, data or code are not the same on all hosts."""
    if dist.world == 1:
        return
    own: Metadata = {name: str(value) for name, value in settings.items() if name not in ON_A_HOST}
    own |= metadata | {"torch": versions()["torch"], "code": git_commit()}
    everyone = dist.gather((platform.node(), own))
    first_host, first = everyone[0]
    for rank, (host, theirs) in enumerate(everyone):
        for change in changes_between(first, theirs):
            raise ValueError(
                f"{change.name} is {change.before} on rank 0 (host {first_host}), but "
                f"{change.now} on rank {rank} (host {host}): all hosts need the same code, "
                "data and settings"
            )
