"""What a resumed run compares with the run before, and ranks among themselves: data, settings, learning rates, code.

A checkpoint has the settings of its run, and facts that they do not show: each is a value, or several by name. What
differs is said, a line each. What changes the experiment or the meaning of its losses needs --resume_changed=True.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deskgpt.checkpoint.store import EVAL_WINDOWS, VAL_DATA, Checkpoint
from deskgpt.compute.batching import eval_windows
from deskgpt.compute.distributed import DistContext, dist_env
from deskgpt.system.errors import ConfigError
from deskgpt.system.formatting import shortened
from deskgpt.system.provenance import git_commit, versions
from deskgpt.system.untrusted import is_local

Facts = dict[str, Any]
Settings = Mapping[str, Any]  # of a run, by name
LearningRate = Callable[[Settings, int], float]  # at a step of a run of these settings

# Where one of these changes, the best loss so far is another quantity than this run's losses.
OF_EVALUATION = {VAL_DATA, EVAL_WINDOWS, "block_size"}

SETTINGS = (
    "block_size",
    "seed",
    "dropout",
    "align_documents",
    "weight_decay",
    "beta1",
    "beta2",
    "momentum",
    "grad_clip",
)
SCHEDULE = (
    *("max_iters", "learning_rate", "min_lr", "decay_lr"),
    *("lr_schedule", "warmup_iters", "lr_decay_iters", "cooldown_iters"),
)
RATES_COMPARED = 500  # steps, evenly spread
ON_A_HOST = ("out_dir", "dataset", "device")  # paths and names that can differ between hosts


@dataclass(frozen=True)
class Change:
    """A fact that is not what it was."""

    name: str
    before: str
    now: str
    matters: bool = True  # for what is learned or compared; others are only said

    def __str__(self) -> str:
        return f"{self.name}: {self.before} before, {self.now} now"


# ---- the run and the run before ------------------------------------------------------------------------------


def changes(
    saved: Checkpoint,
    before: Settings | None,
    now: Settings,
    data: Facts,
    n_eval_windows: Callable[[int], int],
    learning_rate: LearningRate,
) -> list[Change]:
    """How a run of the settings `now` that resumes `saved` differs from the run before, but for facts of its code.

    before: the settings of the run before, None if the checkpoint has none. n_eval_windows: of val data, as
    Split.n_eval_windows. What a checkpoint does not know (nanoGPT's does not know its data) is not compared.
    """
    found = compare(saved.facts or {}, data)
    if before is None:
        return found
    found += compare(facts_of_settings(before, n_eval_windows), facts_of_settings(now, n_eval_windows))
    rate = rate_change(before, now, learning_rate, saved.iter_num)
    schedule = {"schedule": {name: now[name] for name in SCHEDULE}}
    earlier = {"schedule": {name: before[name] for name in SCHEDULE}}
    return found + rate + compare(earlier, schedule, matters=bool(rate))


def facts_of_settings(settings: Settings, n_eval_windows: Callable[[int], int]) -> Facts:
    """Facts that follow from settings. A global batch in other parts is the same one."""
    facts: Facts = {name: settings[name] for name in SETTINGS}
    if settings["optimizer"] != "muon":
        del facts["momentum"]
    facts["sequences per step"] = settings["batch_size"] * settings["gradient_accumulation_steps"]
    facts[EVAL_WINDOWS] = n_eval_windows(eval_windows(settings))
    return facts


def rate_change(before: Settings, now: Settings, learning_rate: LearningRate, steps: int) -> list[Change]:
    """Where two schedules differ most in the steps done so far, as one Change; [] if they are the same.

    What comes later may differ: with the same past, it is the same experiment with another end.
    """
    n = min(steps, RATES_COMPARED)
    done = [round(i * (steps - 1) / max(1, n - 1)) for i in range(n)]

    def difference(step: int) -> float:
        a = learning_rate(before, step)
        b = learning_rate(now, step)
        return abs(a - b) / max(a, b, 1e-30)

    worst = max(done, key=difference, default=None)
    if worst is None or difference(worst) <= 1e-9:
        return []
    old = f"{learning_rate(before, worst):.6g}"
    new = f"{learning_rate(now, worst):.6g}"
    return [Change(f"learning rate at step {worst:,}", old, new)]


def remedy(before: Settings | None, now: Settings, learning_rate: LearningRate, steps: int) -> str:
    """The setting that keeps the schedule where only its end has moved, as the beginning of a sentence; else ""."""
    if before is None or not rate_change(before, now, learning_rate, steps):
        return ""
    end = before["lr_decay_iters"] or before["max_iters"]
    if rate_change(before, {**now, "lr_decay_iters": end}, learning_rate, steps):
        return ""
    return f"--lr_decay_iters={end} keeps the schedule. "


def said_again(settings: Settings) -> dict[str, Any]:
    """Those of a run that no checkpoint, which may be a stranger's, brings into another one by itself.

    wandb_log sends data away, and Windows logs in to the host that a path names.
    """
    found = {}
    wandb_log = settings.get("wandb_log", False)
    if wandb_log is not False:  # a stranger's may be a tensor, which has no truth
        found["wandb_log"] = wandb_log
    dataset = settings.get("dataset")
    if isinstance(dataset, str) and not is_local(dataset):
        found["dataset"] = dataset
    return found


def say_left_out(left_out: Settings, settings: Settings, out_dir: str) -> None:
    """Says which of said_again's settings this run goes without. Raises ConfigError if it has no dataset then."""
    for name, value in left_out.items():
        if settings[name]:
            continue
        text = shortened(value)
        if name == "dataset":
            raise ConfigError(f"dataset={text} of {out_dir} is on another host: to use it, add --dataset={text}")
        if dist_env(os.environ).rank == 0:
            print(f"note: {name}={text} of {out_dir} is left out; to have it again, add --{name}={text}")


# ---- the ranks of a run --------------------------------------------------------------------------------------


def refuse_differences(settings: dict[str, Any], facts: Facts, ranks: DistContext) -> None:
    """Raises ValueError, on all ranks, where these or the code are not the same on all hosts."""
    if ranks.world == 1:
        return
    own: Facts = {name: str(value) for name, value in settings.items() if name not in ON_A_HOST}
    own |= facts | {"torch": versions()["torch"], "code": git_commit()}
    everyone = ranks.gather((platform.node(), own))
    first_host, first = everyone[0]
    for rank, (host, theirs) in enumerate(everyone):
        for change in compare(first, theirs):
            raise ValueError(
                f"{change.name} is {change.before} on rank 0 (host {first_host}), but {change.now} on rank {rank} "
                f"(host {host}): all hosts need the same code, data and settings"
            )


# ---- facts ---------------------------------------------------------------------------------------------------


def compare(before: Any, now: Facts, matters: bool = True) -> list[Change]:
    """The facts that both know and that differ, in the order of `now`. before: a checkpoint's may be of any type."""
    before = before if isinstance(before, dict) else {}
    return [
        Change(name, fact_text(old), fact_text(new), matters)
        for name, fact in now.items()
        for old, new in differing(before.get(name), fact)
    ]


def differing(before: Any, now: Any) -> Iterator[tuple[Any, Any]]:
    """(before, now) if they differ; of several values, those that do."""
    if isinstance(now, dict) and isinstance(before, dict):
        names = [name for name in now if any(differing(before.get(name), now[name]))]
        if names:
            yield {name: before[name] for name in names}, {name: now[name] for name in names}
    elif isinstance(before, str | float | int) and now is not None and before != now:
        yield before, now


def fact_text(fact: Any) -> str:
    if isinstance(fact, dict):
        return ", ".join(f"{name} {fact_text(value)}" for name, value in fact.items())
    if type(fact) is int:
        return f"{fact:,}"
    text = str(fact)[:200]  # of a checkpoint, from anywhere
    return text if text.isprintable() else repr(text)
