"""What a resumed run compares with the run before, and hosts among themselves: data, settings, learning rates, code.

A checkpoint has the settings of its run, and metadata that they do not show: each is a value, or several by name. Each
difference is printed. What changes the experiment, or the meaning of its losses, needs --resume_changed=True.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deskgpt.checkpoint.store import EVAL_WINDOWS, VAL_DATA
from deskgpt.compute.distributed import DistContext
from deskgpt.run.settings import RunSettings
from deskgpt.system.provenance import git_commit, versions

Metadata = dict[str, Any]

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
    """Something that is not what it was."""

    name: str
    before: str
    now: str
    matters: bool = True  # for what is learned or compared; other changes are only printed
    remedy: str = ""  # a setting that undoes it

    def __str__(self) -> str:
        return f"{self.name}: {self.before} before, {self.now} now"


# ---- the run and the run before ------------------------------------------------------------------------------


def changes_of_settings(
    before: RunSettings, now: RunSettings, n_val_windows: tuple[int, int], rate_change: Change | None
) -> list[Change]:
    """How the settings of two runs differ, for what is learned and compared.

    n_val_windows: what an evaluation reads of the val data, before and now. rate_change: of learning rates so far.
    """
    n_before, n_now = n_val_windows
    found = compare(
        of_experiment(before) | {EVAL_WINDOWS: n_before},
        of_experiment(now) | {EVAL_WINDOWS: n_now},
    )
    if rate_change:
        end = before.lr_decay_iters or before.max_iters
        has_other_end = end != (now.lr_decay_iters or now.max_iters)
        remedy = f"--lr_decay_iters={end} keeps the schedule's end. " if has_other_end else ""
        found.append(replace(rate_change, remedy=remedy))
    schedule_before = {"schedule": {name: getattr(before, name) for name in SCHEDULE}}
    schedule_now = {"schedule": {name: getattr(now, name) for name in SCHEDULE}}
    return found + compare(schedule_before, schedule_now, matters=rate_change is not None)


def of_experiment(config: RunSettings) -> Metadata:
    """What the settings say about the experiment. A global batch in other micro-batches is the same one."""
    found: Metadata = {name: getattr(config, name) for name in SETTINGS}
    if config.optimizer != "muon":
        del found["momentum"]
    found["sequences per step"] = config.batch_size * config.gradient_accumulation_steps
    return found


def steps_to_compare(done: int) -> list[int]:
    """At most RATES_COMPARED of the steps 0 to done - 1, evenly spread."""
    n = min(done, RATES_COMPARED)
    return [round(i * (done - 1) / max(1, n - 1)) for i in range(n)]


def rate_change(steps: Sequence[int], before: Sequence[float], now: Sequence[float]) -> Change | None:
    """Where two schedules differ most in the steps done so far; None if their learning rates are the same.

    What comes later may differ: with the same past, it is the same experiment with another end.
    """

    def difference(i: int) -> float:
        return abs(before[i] - now[i]) / max(before[i], now[i], 1e-30)

    worst = max(range(len(steps)), key=difference, default=None)
    if worst is None or difference(worst) <= 1e-9:
        return None
    return Change(f"learning rate at step {steps[worst]:,}", f"{before[worst]:.6g}", f"{now[worst]:.6g}")


# ---- the ranks of a run --------------------------------------------------------------------------------------


def check_same_on_all_hosts(settings: Mapping[str, Any], metadata: Metadata, dist: DistContext) -> None:
    """Raises ValueError, on all ranks, where settings, data or code are not the same on all hosts."""
    if dist.world == 1:
        return
    own: Metadata = {name: str(value) for name, value in settings.items() if name not in ON_A_HOST}
    own |= metadata | {"torch": versions()["torch"], "code": git_commit()}
    everyone = dist.gather((platform.node(), own))
    first_host, first = everyone[0]
    for rank, (host, theirs) in enumerate(everyone):
        for change in compare(first, theirs):
            raise ValueError(
                f"{change.name} is {change.before} on rank 0 (host {first_host}), but {change.now} on rank {rank} "
                f"(host {host}): all hosts need the same code, data and settings"
            )


# ---- metadata ------------------------------------------------------------------------------------------------


def compare(before: Any, now: Metadata, matters: bool = True) -> list[Change]:
    """What both know and what differs, in the order of `now`. before: a checkpoint's may be of any type."""
    before = before if isinstance(before, dict) else {}
    return [
        Change(name, as_text(old), as_text(new), matters)
        for name, value in now.items()
        for old, new in differing(before.get(name), value)
    ]


def differing(before: Any, now: Any) -> Iterator[tuple[Any, Any]]:
    """(before, now) if they differ; of several values by name, those that differ."""
    if isinstance(now, dict) and isinstance(before, dict):
        names = [name for name in now if any(differing(before.get(name), now[name]))]
        if names:
            yield {name: before[name] for name in names}, {name: now[name] for name in names}
    elif isinstance(before, str | float | int) and now is not None and before != now:
        yield before, now


def as_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {as_text(entry)}" for name, entry in value.items())
    if type(value) is int:
        return f"{value:,}"
    text = str(value)[:200]  # of a checkpoint, from anywhere
    return text if text.isprintable() else repr(text)
