"""The settings of a run as the rooms see them, and what becomes of them when a run is resumed or finetuned.

train.py's TrainConfig is the list of settings. RunSettings names those that this room reads, with their types, so that
nothing here imports the script or reads settings by a string.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, Protocol, TypeVar

from configurator import read_settings
from deskgpt.checkpoint import store
from deskgpt.compute.distributed import dist_env
from deskgpt.export.gpt2_weights import exported_model_args
from deskgpt.system.errors import ConfigError
from deskgpt.system.formatting import shortened
from deskgpt.system.untrusted import is_local
from model import GPTConfig, ModelSettings


class RunSettings(Protocol):
    """The settings that deskgpt/run reads, by train.py's names."""

    # input and output
    out_dir: str
    init_from: str
    eval_interval: int
    eval_iters: int
    eval_tokens: int
    eval_only: bool
    dry_run: bool
    log_interval: int
    # saving and stopping
    save_interval: int
    save_minutes: float
    save_async: bool
    keep_checkpoints: int
    max_hours: float
    patience: int
    resume_changed: bool
    max_bad_steps: int
    on_spike: Any  # go, stop or rewind
    # batch
    block_size: int
    batch_size: int
    gradient_accumulation_steps: int
    align_documents: bool
    # optimizer and schedule
    optimizer: Any  # adamw or muon
    max_iters: int
    max_minutes: float
    grad_clip: float
    momentum: float
    decay_lr: bool
    warmup_iters: int
    lr_decay_iters: int
    cooldown_iters: int
    # machine
    seed: int
    dropout: float
    dtype: Any
    dp_shard: int
    world: int
    sample_interval: int
    reshard_after_forward: bool
    dist_timeout_s: float
    wandb_log: bool
    wandb_project: str
    wandb_run_name: str


Config = TypeVar("Config")

# What a resumed run takes from its checkpoint.
RESUMED_SETTINGS = tuple(f.name for f in fields(ModelSettings) if f.name != "dropout")
# What max_minutes settles. A run that goes on keeps it.
PLANNED = ("max_iters", "warmup_iters", "lr_decay_iters", "cooldown_iters")
# Settings that no checkpoint, which may come from anywhere, brings into another run: wandb_log sends data away.
UNSET = {"wandb_log": False}


def settings_of_start(cls: type[Config], argv: list[str]) -> dict[str, Any]:
    """All settings of the run that argv starts, by name, after init_from is followed. Raises ConfigError.

    cls: the script's settings. A resumed run begins with the settings of its checkpoint, a finetuned one with those of
    the model; config files and the command line override them.
    """
    settings = read_settings(cls, argv)
    if settings["init_from"] == "auto" and not store.is_one(settings["out_dir"]):
        # No checkpoint yet: init_from is what the config files say, so that one command serves every start.
        argv = [arg for arg in argv if arg != "--init_from=auto"]
        settings = read_settings(cls, argv)
        if settings["init_from"] == "auto":
            settings["init_from"] = "scratch"
    source = settings["init_from"]
    if source in ("resume", "auto"):
        return resumed_settings(cls, argv, settings["out_dir"])
    if store.is_one(source):
        return read_settings(cls, argv, settings_of_model(store.load(source, checksums=False).model_args, source))
    exported = exported_model_args(source)
    if exported:
        return read_settings(cls, argv, settings_of_model(exported, source))
    return settings


def resumed_settings(cls: type[Config], argv: list[str], out_dir: str) -> dict[str, Any]:
    """The settings of the run in out_dir, overridden by config files and command line, but for the model's size."""
    saved = store.load(out_dir, checksums=False)
    of_model = [f"--{name}={value}" for name, value in settings_of_model(saved.model_args, out_dir).items()]
    known = {name: value for name, value in saved.config.items() if name in names_of(cls)}
    left_out = sensitive(known)
    known |= {"out_dir": out_dir, "init_from": "resume", "eval_only": False, "resume_changed": False}
    for name in left_out:
        del known[name]
    planned = {name: known[name] for name in PLANNED if name in known}
    known["max_minutes"] = 0.0  # the steps that it allowed are in max_iters

    settings = read_settings(cls, [*of_model, *argv], known)
    defaults = {f.name: f.default for f in fields(cls)}  # type: ignore[arg-type]
    print_left_out({name: value for name, value in left_out.items() if settings[name] == defaults[name]}, out_dir)
    if settings["init_from"] == "auto":  # the same command as before: its time was planned already
        settings["init_from"] = "resume"
        if settings["max_minutes"]:
            settings |= planned | {"max_minutes": 0.0}
    elif settings["max_minutes"]:  # new minutes: the steps that the user names, else as many as fit
        settings["max_iters"] = read_settings(cls, argv)["max_iters"]
    keep_eval_windows(settings, read_settings(cls, [], known))
    return settings


def keep_eval_windows(settings: dict[str, Any], before: Mapping[str, Any]) -> None:
    """With another micro-batch an evaluation keeps its windows: they are stated as tokens."""
    counts_batches = not before["eval_tokens"] and not settings["eval_tokens"]
    same_count = counts_batches and settings["eval_iters"] == before["eval_iters"]
    if same_count and settings["batch_size"] != before["batch_size"]:
        settings["eval_tokens"] = before["eval_iters"] * before["batch_size"] * settings["block_size"]


def earlier_settings(cls: type[Config], saved: Mapping[str, Any]) -> Config | None:
    """The settings of the run that a checkpoint is of, None where it has none (nanoGPT's has fewer).

    A setting that came later has its default, which is what runs before it did.
    """
    known = {name: value for name, value in saved.items() if name in names_of(cls)}
    return cls(**known) if "learning_rate" in known else None


def names_of(cls: type) -> set[str]:
    return {f.name for f in fields(cls)}


def settings_of_model(model_args: dict[str, Any], source: str) -> dict[str, Any]:
    """The settings of a saved model, without dropout, which may change."""
    found = asdict(GPTConfig.from_args(model_args, source))
    return {name: found[name] for name in RESUMED_SETTINGS}


def sensitive(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that a user must type again to have them in a resumed one.

    wandb_log sends data away, and Windows logs in to the host that a path names.
    """
    found = {}
    for name, unset in UNSET.items():
        value = settings.get(name, unset)
        if type(value) is not type(unset) or value != unset:  # a damaged file may hold a tensor, which has no truth
            found[name] = value
    dataset = settings.get("dataset")
    if isinstance(dataset, str) and not is_local(dataset):
        found["dataset"] = dataset
    return found


def print_left_out(left_out: Mapping[str, Any], out_dir: str) -> None:
    """Prints which sensitive settings this run goes without. Raises ConfigError if it has no dataset then."""
    for name, value in left_out.items():
        text = shortened(value)
        if name == "dataset":
            raise ConfigError(f"dataset={text} of {out_dir} is on another host: to use it, add --dataset={text}")
        if dist_env(os.environ).rank == 0:
            print(f"note: {name}={text} of {out_dir} is left out; to have it again, add --{name}={text}")
