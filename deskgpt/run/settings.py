"""The settings of a run that resumes or finetunes another one, and how those of two runs differ."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any, NamedTuple

from configurator import read_settings
from deskgpt.checkpoint import store
from deskgpt.compute.distributed import DistContext
from deskgpt.run.log import git_commit, versions
from deskgpt.run.schedule import Config, Schedule
from deskgpt.system.errors import ConfigError
from deskgpt.system.files import is_local, note_once
from deskgpt.system.terminal import shortened
from model import GPT2_CHOICES, GPTConfig, ModelSettings

# ---- what a setting is about -----------------------------------------------------------------------------------

# The one classification of train.py's settings. A setting belongs to learning unless it is listed here: a resumed run,
# a band of losses, bench/ask.py and bench/compare.py compare all others.
OUTPUT = {"out_dir", "log_interval", "always_save_checkpoint", "save_minutes", "sample_interval"}
OUTPUT |= {"wandb_log", "wandb_project", "wandb_run_name"}
EVALUATION = {"eval_interval", "eval_iters", "eval_tokens", "eval_only"}  # how many windows it reads is compared apart
START = {"init_from", "resume_changed", "dry_run", "plan_for"}
END = {"max_hours", "max_minutes", "patience", "on_spike"}
SPLIT = {"batch_size", "gradient_accumulation_steps", "auto_batch"}  # the sequences per step are compared apart
MACHINE = {"device", "dtype", "cpu_kernels", "compile", "activation_checkpoint"}
MACHINE |= {"cuda_graph", "deterministic", "backend", "dp_shard", "dist_timeout_s"}
DATA = {"dataset"}  # a path; what is in it is compared apart
NOT_LEARNING = frozenset(OUTPUT | EVALUATION | START | END | SPLIT | MACHINE | DATA)
# Of learning too, but compared by the rates of the steps so far: with the same past, it is the same experiment.
SCHEDULE = tuple(f.name for f in fields(Schedule))

# Settings of earlier versions, which old config files have, and what there is in their place.
RETIRED = dict.fromkeys(
    ("attention", "world", "sync_each_batch", "reshard_after_forward", "max_bad_steps", "cooldown_iters"), ""
)
RETIRED |= dict.fromkeys(("save_interval", "save_async", "keep_checkpoints", "align_documents"), "")
RETIRED["fp8"] = "docs/hacks/fp8.patch trains the blocks' linear layers in 8 bits"
# Choices that settings of earlier versions had; a resumed run takes the default.
RETIRED_CHOICES = (("activation_checkpoint", "selective"), ("on_spike", "rewind"))
# What runs have that do not say it, such as nanoGPT's: whatever the defaults are now.
WITHOUT_CHOICE = GPT2_CHOICES | {"optimizer": "adamw", "lr_schedule": "cosine"}
# What a resumed run takes from its checkpoint.
RESUMED_SETTINGS = tuple(f.name for f in fields(ModelSettings) if f.name != "dropout")
# What max_minutes settles. A run that resumes keeps it.
PLANNED = ("max_iters", "warmup_iters", "lr_decay_iters")
ON_A_HOST = ("out_dir", "dataset", "device")  # paths and names that can differ between hosts
RATES_COMPARED = 64  # steps, evenly spread


# ---- the settings of a start ---------------------------------------------------------------------------------


def settings_of_start(cls: type, argv: list[str]) -> dict[str, Any]:
    """Return all settings of the run that argv starts, by name, after init_from is followed. Raises ConfigError.

    A resumed run begins with the settings of its checkpoint, a finetuned one with those of the model; config files and
    the command line override them.
    """
    settings = read_settings(cls, argv)
    if settings["init_from"] == "auto" and not store.is_checkpoint(settings["out_dir"]):
        # No checkpoint yet: init_from is what the config files say, so that one command serves every start.
        argv = [arg for arg in argv if arg != "--init_from=auto"]
        settings = read_settings(cls, argv)
        if settings["init_from"] == "auto":
            settings["init_from"] = "scratch"
    source = settings["init_from"]
    if source in ("resume", "auto"):
        return resumed_settings(cls, argv, settings["out_dir"])
    if store.is_checkpoint(source):
        return read_settings(cls, argv, settings_of_model(store.load(source, checksums=False).model_args, source))
    if source == "scratch":
        return settings
    from deskgpt.export.gpt2_weights import exported_model_args

    exported = exported_model_args(source)
    return read_settings(cls, argv, settings_of_model(exported, source)) if exported else settings


def resumed_settings(cls: type, argv: list[str], out_dir: str) -> dict[str, Any]:
    """Return the settings of the run in out_dir, overridden by files and command line, but for the model's size."""
    saved = store.load(out_dir, checksums=False)
    of_model = [f"--{name}={value}" for name, value in settings_of_model(saved.model_args, out_dir).items()]
    known = known_settings(cls, saved.config)
    left_out = sensitive(known)
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
            raise ConfigError(f"dataset={text} of {out_dir} is on another host: to use it, add --dataset={text}")
        note_once(f"{name}={text} of {out_dir} is left out; to have it again, add --{name}={text}")
    if settings["max_minutes"]:  # as in the same command again
        settings |= {name: earlier[name] for name in PLANNED} | {"max_minutes": 0.0}
        note_once(f"max_minutes planned {out_dir} at its start; it keeps max_iters={settings['max_iters']}")
    counts_batches = not earlier["eval_tokens"] and not settings["eval_tokens"]
    same_count = counts_batches and settings["eval_iters"] == earlier["eval_iters"]
    if same_count and settings["batch_size"] != earlier["batch_size"]:  # an evaluation keeps its windows
        settings["eval_tokens"] = earlier["eval_iters"] * earlier["batch_size"] * settings["block_size"]
    return settings


def known_settings(cls: type, saved: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a checkpoint that there still are; nanoGPT has others, too."""
    names = {f.name for f in fields(cls)}
    saved = WITHOUT_CHOICE | saved
    return {name: value for name, value in saved.items() if name in names and (name, value) not in RETIRED_CHOICES}


def settings_of_model(model_args: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the settings of a saved model, without dropout, which may change."""
    found = asdict(GPTConfig.from_args(model_args, source))
    return {name: found[name] for name in RESUMED_SETTINGS}


def sensitive(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that a user must type again to have them in a resumed one.

    wandb_log sends data away, and Windows logs in to the host that a path names.
    """
    risky = {}
    if settings.get("wandb_log", False) is not False:
        risky["wandb_log"] = settings["wandb_log"]
    if not is_local(settings.get("dataset", "")):
        risky["dataset"] = settings["dataset"]
    return risky


# ---- differences between the resumed run and this one --------------------------------------------------------

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
            found += [change._replace(name=f"{name}, {change.name}") for change in changes_between(old, value)]
        elif isinstance(old, str | float | int) and value is not None and old != value:
            found.append(Change(name, shortened(old), shortened(value)))
    return found


def learning_settings(config: Config) -> Metadata:
    """Return what the settings say about learning, without the schedule. The cut of a global batch does not count."""
    found = {name: value for name, value in asdict(config).items() if name not in NOT_LEARNING | {*SCHEDULE}}
    if config.optimizer != "muon":
        del found["momentum"]
    return found | {"sequences per step": config.batch_size * config.gradient_accumulation_steps}


def rates_of(rate: Callable[[int], float], done: int) -> dict[str, float]:
    """Return the learning rates at up to RATES_COMPARED of the steps done, evenly spread, by step."""
    n = min(done, RATES_COMPARED)
    steps = [round(i * (done - 1) / max(1, n - 1)) for i in range(n)]
    return {str(step): rate(step) for step in steps}


def changed_rate(before: Any, rate: Callable[[int], float]) -> list[Change]:
    """Return the first of the steps done (rates_of) that has another learning rate today, or nothing."""
    for step, old in before.items() if isinstance(before, dict) else ():
        if isinstance(step, str) and step.isdecimal() and isinstance(old, float):
            now = rate(int(step))
            if not math.isclose(old, now):
                return [Change(f"learning rate at step {int(step):,}", f"{old:.6g}", f"{now:.6g}")]
    return []


def check_same_on_all_hosts(settings: Mapping[str, Any], metadata: Metadata, dist: DistContext) -> None:
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
                f"{change.name} is {change.before} on rank 0 (host {first_host}), but {change.now} on rank {rank} "
                f"(host {host}): all hosts need the same code, data and settings"
            )
