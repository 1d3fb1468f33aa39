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
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from configurator import build, read_settings
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
from deskgpt.compute import (
    ComputeMode,
    ComputeSettings,
    apply_compute,
    choose_compute,
    saved_compute,
)
from deskgpt.device import git_commit, versions
from deskgpt.distributed import DistContext, agree, shards_of
from deskgpt.errors import ConfigError, shortened
from deskgpt.files import note_once, untrusted_settings
from deskgpt.stopping import Schedule
from deskgpt.train_state import LR_HISTORY, TrainState, sample_lrs
from model import GPT, GPT2_CHOICES, MODERN_CHOICES, GPTConfig, ModelSettings

# If one of these changes, the best loss so far is another quantity than this run's losses.
OF_EVALUATION = {VAL_DATA, EVAL_WINDOWS}
# In a checkpoint's metadata: a change is printed.
OF_CODE = ("code", "code_digest", "versions", "device", "variant")
Rate = Callable[[Schedule, int], float]  # the learning rate at a step


class StartSettings(ComputeSettings, Protocol):
    """What this file reads of train.py's settings, beside what choose_compute reads."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def init_from(self) -> str: ...
    @property
    def out_dir(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def dropout(self) -> float: ...
    @property
    def auto_batch(self) -> str | bool: ...
    @property
    def eval_only(self) -> bool: ...
    @property
    def resume_changed(self) -> bool: ...
    @property
    def sample_interval(self) -> int: ...
    @property
    def dist_timeout_s(self) -> float: ...
    def model_config(self, vocab_size: int) -> GPTConfig: ...
    def schedule(self) -> Schedule: ...
    def batch_split(self, rank: int = 0, world: int = 1) -> BatchSplit: ...


@dataclass
class Start:
    """Where a run starts."""

    source: str  # for messages
    model_config: GPTConfig
    # Of another run, or GPT-2: its weights and tokenizer; empty for random weights.
    checkpoint: Checkpoint
    earlier: StartSettings | None = None  # the settings of the run that is resumed

    @property
    def is_finetuning(self) -> bool:
        """Return whether a new run starts from trained weights."""
        return self.earlier is None and self.source != "scratch"


def find_start(config: StartSettings, data: Dataset, dist: DistContext) -> Start:
    """Find what init_from names: the last good checkpoint of the run that is resumed, or only
    weights.

    Raises ValueError if the settings describe another model than the source has.
    """
    new_model = config.model_config(data.vocab_size)
    is_resumed = config.init_from == "resume"
    if not is_resumed and run_folder(config.out_dir) != Path(config.out_dir):
        raise ValueError(
            f"out_dir={config.out_dir} is a checkpoint's name; a new run needs a folder, "
            "such as --out_dir=out"
        )
    if config.init_from == "scratch":
        return Start("scratch", new_model, Checkpoint({}, {}))
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
    start = Start(source, model_config, saved)
    if is_resumed:
        dist.print0(f"resuming {source} at step {saved.iter_num}")
        # nanoGPT's checkpoint has fewer settings; one that came later has its default.
        known = known_settings(type(config), saved.config)
        known |= settings_of_model(saved.model_args, source)
        start.earlier = build(type(config), known)

    for name in given:
        wanted = getattr(new_model, name)
        actual = getattr(model_config, name)
        # A model may be evaluated or finetuned with a shorter context. crop_block_size refuses a
        # longer one.
        is_free = name == "block_size" and (config.eval_only or not is_resumed)
        if wanted != actual and not is_free:
            raise ValueError(
                f"{name}={wanted}, but {source} has {name}={actual}: use --{name}={actual}"
            )
    return start


def check_same_experiment(
    config: StartSettings, start: Start, data: Dataset, rate: Rate, dist: DistContext
) -> None:
    """Open the data for the model, and print how a resumed run differs from the run before; forget
    a best loss of other evaluations.

    Raises ValueError if the data do not belong to the model or are damaged, if hosts differ, and if
    a change matters for what is learned or compared, unless resume_changed.
    """
    vocab_size = start.model_config.vocab_size
    tokenizer = start.checkpoint.tokenizer
    data.open(config.block_size, config.seed, vocab_size, tokenizer, dist.is_first)
    steps = start.checkpoint.iter_num
    check_same_on_all_hosts(asdict(config), data.metadata | {"checkpoint": f"step {steps}"}, dist)
    if start.earlier is None:
        return
    saved = start.checkpoint.metadata or {}
    batch = config.batch_split(dist.rank, dist.world)
    now = data.metadata | learning_settings(config) | data.eval_metadata(batch)
    changes = changes_between(saved | learning_settings(start.earlier), now)
    old = start.earlier.schedule()
    new = config.schedule()
    rates = saved.get(LR_HISTORY) or sample_lrs(lambda step: rate(old, step), steps)
    changes += first_changed_lr(rates, lambda step: rate(new, step))
    of_schedule = changes_between(asdict(old), asdict(new))
    if changes and not config.resume_changed and not config.eval_only:
        raise ValueError(
            f"{start.source} belongs to another experiment: "
            f"{'; '.join(map(str, changes + of_schedule))}. Continue all the same with "
            "--resume_changed=True, or begin a new run with its weights: "
            f"--init_from={start.source}"
        )
    for change in changes + of_schedule:
        dist.print0(f"changed: {change}")
    if OF_EVALUATION & {change.name.partition(",")[0] for change in changes}:
        dist.print0("the best val loss is reset, since earlier losses are from another evaluation")
        start.checkpoint.best_val_loss = math.inf
        progress = start.checkpoint.progress
        # Nor do they count for patience
        start.checkpoint.progress = progress and progress | {"evaluations": []}


def choose_compute_and_batch(
    config: StartSettings, start: Start, dist: DistContext
) -> tuple[ComputeMode, BatchSplit]:
    """Return how this run computes, and how it cuts a step: by rule, the same on all ranks.

    A resumed run computes as before. The loss is computed in the fewest chunks that fit into all
    memory of the device, not into what is free just now: the same run takes the same chunks each
    time. Raises ValueError if a setting does not fit this machine.
    """
    from deskgpt.memory import USABLE_SHARE, StepShape, with_fewest_chunks
    from deskgpt.sharding import check_sharding

    check_sharding(config.dp_shard, dist.world, config.dtype, config.sample_interval)
    shards = shards_of(config.dp_shard, dist.world)
    earlier = saved_compute(start.checkpoint.variant, dist.device)
    compute = choose_compute(config, dist, earlier)
    batch = choose_batch(config, start, compute, dist)
    step = StepShape(start.model_config, batch.batch_size, compute, dist.device.type, shards)
    usable_bytes = USABLE_SHARE * machine.memory_bytes(dist.device)
    fewest = with_fewest_chunks(step, usable_bytes).compute.loss_chunks
    n_chunks = int(dist.max(max(fewest, earlier.get("loss_chunks", 1))))
    return replace(compute, loss_chunks=n_chunks), batch


def choose_batch(
    config: StartSettings, start: Start, compute: ComputeMode, dist: DistContext
) -> BatchSplit:
    """Return how the settings cut a step; on CUDA, if auto_batch allows, in larger micro-batches
    that fit.

    All ranks have the same micro-batch, which the smallest card can hold. A resumed run keeps its
    own. Masks of dropout belong to a micro-batch, so with dropout the size changes only for a user
    who asks for it. Raises ValueError if a CPU surely lacks the memory.
    """
    from deskgpt.memory import check_batch_fits, larger_batch

    batch = config.batch_split(dist.rank, dist.world)
    if config.eval_only:
        return batch
    shards = shards_of(config.dp_shard, dist.world)
    check_batch_fits(start.model_config, dist.device, shards, batch, compute)
    wanted = not config.dropout if config.auto_batch == "auto" else config.auto_batch
    is_new = start.earlier is None
    if not wanted or not is_new or dist.device.type != "cuda" or config.dp_shard != 1:
        return batch
    batch_size = agree(dist, larger_batch(start.model_config, dist.device, batch, compute))
    if batch_size > batch.batch_size:
        batch = batch.with_batch_size(batch_size)
        dist.print0(
            f"auto_batch: using {batch.flags()} (predicted to fit; the same tokens per step)"
        )
    return batch


def build_model(
    config: StartSettings, start: Start, compute: ComputeMode, dist: DistContext
) -> GPT:
    """Return the model on this rank's device, computing as `compute` says; sharded, if dp_shard
    asks for it.

    Raises ValueError, also if the memory cannot hold it, before any of it is taken.
    """
    from deskgpt.memory import check_model_fits
    from deskgpt.sharding import make_mesh, sharded_copy

    shards = shards_of(config.dp_shard, dist.world)
    check_model_fits(start.model_config, dist.device, not config.eval_only, shards)
    weights = start.checkpoint.model
    with nullcontext() if dist.is_first or shards == 1 else torch.device("meta"):
        if weights:
            model = GPT.from_state(start.model_config, weights, start.source)
        else:
            model = GPT(start.model_config)
        model.crop_block_size(config.block_size)
    if shards == 1:
        model = model.to(dist.device)
    else:
        mesh = make_mesh(dist.device.type, shards, dist.world, config.dist_timeout_s)
        model = sharded_copy(model, mesh, dist.device, compute.dtype)
    apply_compute(model, compute, dist.world)
    return model


def restore(start: Start, state: TrainState, trains: bool) -> None:
    """Give a resumed run its step, optimizer and progress; free what was loaded.

    If something else computes now than before, a line is printed. Raises ValueError.
    """
    saved = start.checkpoint
    if start.earlier is not None:
        of_code = {name: state.metadata[name] for name in OF_CODE}
        for change in changes_between(saved.metadata, of_code):
            state.dist.print0(f"changed: {change}")
        state.resume(saved, start.source, trains)
    saved.model = {}
    saved.optimizer = None


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
    if source == "scratch":
        return settings
    if is_checkpoint(source):
        model_args: dict[str, Any] | None = load_checkpoint(source, checksums=False).model_args
    else:
        from deskgpt.gpt2_weights import exported_model_args

        model_args = exported_model_args(source)
    if not model_args:
        return settings
    return read_settings(cls, argv, settings_of_model(model_args, source))


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


def settings_to_continue(config: StartSettings, smaller: dict[str, int]) -> dict[str, Any]:
    """Return the settings that change to continue a run in smaller micro-batches, after memory ran
    out and its state was saved.

    It has the model of its checkpoint, and a schedule that max_minutes may have shortened.
    """
    if config.eval_only:
        return dict(smaller)
    out_dir = str(run_folder(config.out_dir))
    saved = load_checkpoint(out_dir, checksums=False)
    found = settings_of_model(saved.model_args, out_dir) | smaller
    # The steps that max_minutes has planned: the next one has its rate from them.
    found |= {name: saved.config[name] for name in SET_BY_MAX_MINUTES}
    return found | {"out_dir": out_dir, "init_from": "resume", "resume_changed": True}


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


def learning_settings(config: StartSettings) -> Metadata:
    """Return what the settings say about learning, without the schedule.

    The cut of a global batch does not count.
    """
    left_out = NOT_LEARNING | {*SCHEDULE}
    found = {name: value for name, value in asdict(config).items() if name not in left_out}
    if found["optimizer"] != "muon":
        del found["momentum"]
    return found | {"sequences per step": config.batch_split().global_batch_size}


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
