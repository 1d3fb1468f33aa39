"""The start of a run: random weights, a checkpoint or GPT-2's weights; and how it differs from the
run before.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Protocol

import torch

from configurator import build, read_settings
from data.batches import BatchSplit
from data.dataset import Dataset
from deskgpt import device as machine
from deskgpt.checkpoint import (
    Checkpoint,
    is_checkpoint,
    load_checkpoint,
    load_to_resume,
    run_folder,
)
from deskgpt.compiling import ComputeSettings, apply_compute, choose_compute, saved_compute
from deskgpt.compute import ComputeMode
from deskgpt.device import code_digest, versions
from deskgpt.distributed import DistContext, agree, shards_of
from deskgpt.errors import ConfigError, shortened
from deskgpt.files import note_once, untrusted_settings
from deskgpt.stopping import Schedule
from deskgpt.train_state import LR_HISTORY, TrainState, sample_lrs
from model import GPT, GPT2_CHOICES, MODERN_CHOICES, GPTConfig, ModelSettings

# If one of these changes, the best loss so far is another quantity than this run's losses.
OF_EVALUATION = {"val data", "windows per evaluation"}
# If one of these changes in the metadata, a line says so.
OF_CODE = ("code", "code_digest", "versions", "device", "variant")


class StartSettings(ComputeSettings, Protocol):
    """The settings that this file and saving.py read, beside those of ComputeSettings."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def init_from(self) -> str: ...
    @property
    def out_dir(self) -> str: ...
    @property
    def seed(self) -> int: ...
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
    @property
    def always_save_checkpoint(self) -> bool: ...
    def model_config(self, vocab_size: int) -> GPTConfig: ...
    def schedule(self) -> Schedule: ...
    def batch_split(self, rank: int = 0, world: int = 1) -> BatchSplit: ...


@dataclass
class Start:
    """Where a run starts."""

    source: str  # for messages
    model_config: GPTConfig
    # The weights and tokenizer of another run or of GPT-2; empty for random weights.
    checkpoint: Checkpoint
    earlier: StartSettings | None = None  # the settings of the run that is resumed


def find_start(config: StartSettings, data: Dataset, dist: DistContext) -> Start:
    """Find what init_from names: the last good checkpoint of the run that is resumed, or only
    weights.

    Raises ValueError if the settings describe another model than the source has.
    """
    new_model = config.model_config(data.vocab_size)
    is_resumed = config.init_from == "resume"
    if config.init_from == "scratch":
        return Start("scratch", new_model, Checkpoint({}, {}))
    source = config.out_dir if is_resumed else config.init_from
    given = RESUMED_SETTINGS
    # Other ranks get theirs from rank 0.
    reads = dist.is_first or shards_of(config.dp_shard, dist.world) == 1
    earlier = None
    if is_resumed:
        saved = load_to_resume(source, dist, checksums=reads)
        dist.print0(f"resuming {source} at step {saved.iter_num}")
        # nanoGPT's checkpoint has fewer settings; one that came later has its default.
        known = known_settings(type(config), saved.config)
        earlier = build(type(config), known | settings_of_model(saved.model_args, source))
    elif is_checkpoint(source):
        trained = load_checkpoint(source, dist.print0, dist, checksums=reads)
        saved = Checkpoint(trained.model, trained.model_args, tokenizer=trained.tokenizer)
    else:
        from deskgpt.gpt2_weights import exported_model_args, load_gpt2

        saved = load_gpt2(source)
        # GPT-2's sizes are those of its folder, whatever the settings say.
        given = RESUMED_SETTINGS if exported_model_args(source) else MODERN_CHOICES
    model_config = GPTConfig.from_args(saved.model_args | {"dropout": new_model.dropout}, source)
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
    return Start(source, model_config, saved, earlier)


def check_same_experiment(
    config: StartSettings,
    start: Start,
    data: Dataset,
    rate: Callable[[Schedule, int], float],
    dist: DistContext,
) -> None:
    """Open the data for the model, and print how a resumed run differs from the run before; forget
    a best loss of other evaluations. rate: the learning rate of a schedule at a step.

    Raises ValueError if the data do not belong to the model or are damaged, if hosts differ, and if
    a change matters for what is learned or compared, unless resume_changed.
    """
    checkpoint = start.checkpoint
    batching = config.batch_split(dist.rank, dist.world)
    vocab_size = start.model_config.vocab_size
    data.open(batching.block_size, config.seed, vocab_size, checkpoint.tokenizer, dist.is_first)
    steps = checkpoint.iter_num
    check_same_on_all_hosts(asdict(config) | data.metadata | {"step of checkpoint": steps}, dist)
    if start.earlier is None:
        return
    saved = checkpoint.metadata or {}
    now = data.metadata | learning_settings(config) | data.eval_metadata(batching)
    changes = changes_between(saved | learning_settings(start.earlier), now)
    old = start.earlier.schedule()
    new = config.schedule()
    rates = saved.get(LR_HISTORY) or sample_lrs(lambda step: rate(old, step), steps)
    changes |= first_changed_lr(rates, lambda step: rate(new, step))
    all_changes = changes | changes_between(asdict(old), asdict(new))
    lines = [f"{name}: {change}" for name, change in all_changes.items()]
    if changes and not config.resume_changed and not config.eval_only:
        raise ValueError(
            f"{start.source} belongs to another experiment: {'; '.join(lines)}. Continue all the "
            "same with --resume_changed=True, or begin a new run with its weights: "
            f"--init_from={start.source}"
        )
    for line in lines:
        dist.print0(f"changed: {line}")
    if OF_EVALUATION & {name.partition(",")[0] for name in changes}:
        dist.print0("the best val loss is reset, since earlier losses are from another evaluation")
        checkpoint.best_val_loss = math.inf
        if checkpoint.progress:  # nor do earlier losses count for patience
            checkpoint.progress = checkpoint.progress | {"evaluations": []}


def choose_compute_and_batch(
    config: StartSettings, start: Start, dist: DistContext
) -> tuple[ComputeMode, BatchSplit]:
    """Return how this run computes, and how it cuts a step: by rule, the same on all ranks.

    A resumed run computes as before. On CUDA, if auto_batch allows, a new one takes larger
    micro-batches that fit, on all ranks what the smallest card can hold. Masks of dropout belong to
    a micro-batch, so with dropout the size changes only for a user who asks for it. The loss is
    computed in the fewest chunks that fit into all memory of the device, not into what is free just
    now: the same run takes the same chunks each time. Raises ValueError if a setting does not fit
    this machine, or if a CPU surely lacks the memory.
    """
    from deskgpt.memory import (
        USABLE_SHARE,
        StepShape,
        check_batch_fits,
        larger_batch,
        with_fewest_chunks,
    )
    from deskgpt.sharding import check_sharding

    check_sharding(config.dp_shard, dist.world, config.dtype, config.sample_interval)
    shards = shards_of(config.dp_shard, dist.world)
    model = start.model_config
    earlier = saved_compute(start.checkpoint.variant, dist.device)
    compute = choose_compute(config, dist, earlier)
    batching = config.batch_split(dist.rank, dist.world)
    if not config.eval_only:
        check_batch_fits(model, dist.device, shards, batching, compute)
    is_wanted = not model.dropout if config.auto_batch == "auto" else config.auto_batch
    is_new = start.earlier is None and not config.eval_only
    if is_wanted and is_new and dist.device.type == "cuda" and shards == 1:
        batch_size = agree(dist, larger_batch(model, dist.device, batching, compute))
        if batch_size > batching.batch_size:
            batching = batching.with_batch_size(batch_size)
            dist.print0(
                f"auto_batch: using {batching.flags()} (predicted to fit; the same tokens per step)"
            )
    step = StepShape(model, batching.batch_size, compute, dist.device.type, shards)
    usable_bytes = USABLE_SHARE * machine.memory_bytes(dist.device)
    fewest = with_fewest_chunks(step, usable_bytes).compute.loss_chunks
    n_chunks = int(dist.max(max(fewest, earlier.get("loss_chunks", 1))))
    return replace(compute, loss_chunks=n_chunks), batching


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
    has_memory = dist.is_first or shards == 1  # the other ranks get their rows from rank 0
    with nullcontext() if has_memory else torch.device("meta"):
        if weights:
            model = GPT.from_state(start.model_config, weights, start.source)
        else:
            model = GPT(start.model_config)
        model.crop_block_size(config.batch_split().block_size)
    if shards == 1:
        model = model.to(dist.device)
    else:
        mesh = make_mesh(dist.device.type, shards, dist.world, config.dist_timeout_s)
        model = sharded_copy(model, mesh, dist.device, compute.dtype)
    apply_compute(model, compute, dist.world)
    return model


def restore(start: Start, state: TrainState, trains: bool) -> None:
    """Give a resumed run its step, optimizer and progress; free the loaded weights.

    If something else computes now than before, a line is printed. Raises ValueError.
    """
    saved = start.checkpoint
    if start.earlier is not None:
        of_code = {name: state.metadata[name] for name in OF_CODE}
        for name, change in changes_between(saved.metadata, of_code).items():
            state.dist.print0(f"changed: {name}: {change}")
        state.resume(saved, start.source, trains)
    saved.model = {}
    saved.optimizer = None


# ---- settings of learning, and others ------------------------------------------------------------

# The one classification of train.py's settings. A setting belongs to learning unless it is listed
# here: a resumed run, a band of losses, bench/ask.py and bench/compare.py compare all others.
NOT_LEARNING = frozenset(
    {
        # output
        "out_dir",
        "log_interval",
        "always_save_checkpoint",
        "save_minutes",
        "sample_interval",
        "wandb_log",
        "wandb_project",
        "wandb_run_name",
        # evaluation: the number of its windows is compared apart
        "eval_interval",
        "eval_iters",
        "eval_tokens",
        "eval_answers",
        "eval_only",
        # start
        "init_from",
        "resume_changed",
        "dry_run",
        "plan_for",
        # end
        "max_hours",
        "max_minutes",
        "patience",
        "on_spike",
        # micro-batch: the sequences per step are compared apart
        "batch_size",
        "gradient_accumulation_steps",
        "auto_batch",
        # machine
        "device",
        "dtype",
        "cpu_kernels",
        "compile",
        "activation_checkpoint",
        "cuda_graph",
        "deterministic",
        "backend",
        "dp_shard",
        "dist_timeout_s",
        # data: the content of the folder is compared apart
        "dataset",
    }
)
# The schedule belongs to learning, too. It counts as changed only if a step that was already taken
# would have another rate now.
SCHEDULE = tuple(f.name for f in fields(Schedule))

# The values of runs that do not record them, such as nanoGPT's, whatever the defaults are now.
WITHOUT_CHOICE = GPT2_CHOICES | {"optimizer": "adamw", "lr_schedule": "cosine"}
# Settings that a resumed run takes from its checkpoint.
RESUMED_SETTINGS = tuple(f.name for f in fields(ModelSettings) if f.name != "dropout")
# Settings that max_minutes replaces. A resumed run keeps their values.
SET_BY_MAX_MINUTES = ("max_iters", "warmup_iters", "lr_decay_iters")
ON_A_HOST = {"out_dir", "dataset", "device"}  # paths and names that can differ between hosts


# ---- the settings of a start ---------------------------------------------------------------------


def settings_of_start(cls: type, argv: list[str]) -> dict[str, Any]:
    """Return all settings of the run that argv starts, by name. Raises ConfigError.

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
    model_args: dict[str, Any] | None = None
    if is_checkpoint(source):
        model_args = load_checkpoint(source, checksums=False).model_args
    elif source != "scratch":
        from deskgpt.gpt2_weights import exported_model_args

        model_args = exported_model_args(source)
    return (
        read_settings(cls, argv, settings_of_model(model_args, source)) if model_args else settings
    )


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
    base |= {"out_dir": out_dir, "eval_only": False, "resume_changed": False}
    base["max_minutes"] = 0.0  # the steps that it allowed are in max_iters
    earlier = read_settings(cls, [], base)

    settings = read_settings(cls, [*of_model, *argv], earlier) | {"init_from": "resume"}
    for name, value in left_out.items():
        if settings[name] != earlier[name]:
            continue  # the user has typed it again
        text = f"{name}={shortened(value)}"
        line = f"{text} of {out_dir} is left out; to have it again, add --{text}"
        if name == "dataset":
            raise ConfigError(line)
        note_once(line)
    if settings["max_minutes"]:  # the user has typed the same command again
        settings |= {name: earlier[name] for name in SET_BY_MAX_MINUTES} | {"max_minutes": 0.0}
        note_once(
            f"max_minutes planned {out_dir} at its start; it keeps "
            f"max_iters={settings['max_iters']}"
        )
    counts = (settings["eval_iters"], settings["eval_tokens"])
    # An evaluation keeps its windows, whatever the micro-batch.
    if counts == (earlier["eval_iters"], 0) and settings["batch_size"] != earlier["batch_size"]:
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
    saved = WITHOUT_CHOICE | saved
    return {f.name: saved[f.name] for f in fields(cls) if f.name in saved}


def settings_of_model(model_args: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the settings of a saved model, without dropout, which may change."""
    found = GPTConfig.from_args(model_args, source)
    return {name: getattr(found, name) for name in RESUMED_SETTINGS}


# ---- differences between the resumed run and this one --------------------------------------------

Metadata = dict[str, Any]


def changes_between(before: Any, now: Metadata, prefix: str = "") -> dict[str, str]:
    """Return the keys that both have and whose values differ, in `now`'s order, each with a text of
    both values.

    before: of a checkpoint, so it may be of any type.
    """
    found: dict[str, str] = {}
    for name, value in now.items():
        old = before.get(name) if isinstance(before, dict) else None
        if isinstance(value, dict):
            found |= changes_between(old, value, f"{prefix}{name}, ")
        elif isinstance(old, str | float | int) and value is not None and old != value:
            found[prefix + name] = f"{shortened(old)} before, {shortened(value)} now"
    return found


def learning_settings(config: StartSettings) -> Metadata:
    """Return the settings of learning, without the schedule.

    The cut of a global batch does not count.
    """
    left_out = NOT_LEARNING | {*SCHEDULE}
    found = {name: value for name, value in asdict(config).items() if name not in left_out}
    return found | {"sequences per step": config.batch_split().global_batch_size}


def first_changed_lr(before: dict[str, float], rate: Callable[[int], float]) -> dict[str, str]:
    """Return the first of the steps done (sample_lrs) that has another learning rate today, with
    both, or nothing.
    """
    for step, old in before.items():
        now = rate(int(step))
        if not math.isclose(old, now):
            return {f"learning rate at step {step}": f"{old:.6g} before, {now:.6g} now"}
    return {}


def check_same_on_all_hosts(settings: Metadata, dist: DistContext) -> None:
    """Raises ValueError, on all ranks, if settings, data, code or the kind of device are not the
    same on all hosts.
    """
    own = {"torch": versions()["torch"], "code": code_digest(), "kind of device": dist.device.type}
    everyone = dist.gather(settings | own)
    for rank, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if name not in ON_A_HOST and theirs[name] != value:
                raise ValueError(
                    f"{name} is {shortened(value)} on rank 0, but {shortened(theirs[name])} on "
                    f"rank {rank}: all hosts need the same code, data and settings, and devices "
                    "of one kind (such as --device=cpu)"
                )
