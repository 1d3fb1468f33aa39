"""Whether a run's val losses are as usual: like those of earlier runs that differ only in their seed.

config/loss_bands has a band for a config that the project ships: the val losses of at least eight runs, which
bench/asking/band.py has put into a JSON file.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deskgpt.compute.batching import eval_windows
from deskgpt.run.resuming import SCHEDULE, SETTINGS
from deskgpt.system.files import read_small
from deskgpt.system.untrusted import Fields, check_record
from model import ModelSettings

FOLDER = Path(__file__).resolve().parents[2] / "config" / "usual"
MOST_BYTES = 1 << 20
LARGEST = 1e6  # loss that a file may hold
# Settings that make runs repeats of one experiment, besides those of its batch, its evaluation and its seed.
NAMES = sorted({*ModelSettings.__dataclass_fields__, *SETTINGS, *SCHEDULE, "optimizer"} - {"seed"})
DEFAULTS = {name: field.default for name, field in ModelSettings.__dataclass_fields__.items()}
# Half the width of a band, at least: with zero_init all seeds begin at one loss, which the precision of a form rounds.
LEAST = 1e-3  # nats


@dataclass(frozen=True)
class Band:
    """Where the val losses of one more run of an experiment are expected."""

    losses: dict[int, list[float]]  # val losses of the runs, by evaluated step
    deviations: float  # half the band's width in standard deviations between the runs

    @property
    def n_runs(self) -> int:
        return len(next(iter(self.losses.values())))

    def limits(self, step: int) -> tuple[float, float]:
        """(lowest, highest) usual val loss at one of its steps."""
        runs = self.losses[step]
        mean = statistics.fmean(runs)
        half = max(LEAST, self.deviations * statistics.stdev(runs))
        return mean - half, mean + half

    def verdict(self, val_losses: Mapping[int, float]) -> str:
        """In words, where a run with these val losses is, and where it first left the band. "" if they share no step.

        val_losses: by step.
        """
        steps = sorted(self.losses.keys() & val_losses.keys())
        if not steps:
            return ""
        last = steps[-1]
        runs = self.losses[last]
        where = "end at" if last == max(self.losses) else f"at step {last:,} have"
        usually = f"{len(runs)} runs {where} {min(runs):.3f} to {max(runs):.3f}"
        for step in steps:
            low, high = self.limits(step)
            loss = val_losses[step]
            if not low <= loss <= high:
                side = "lower" if loss < low else "higher"
                now = f"val loss {val_losses[last]:.4f} at step {last:,}"
                first = f"first {side} than usual at step {step:,} ({loss:.4f}, usual {low:.3f} to {high:.3f})"
                return f"unusual: {now}, {usually}; {first}"
        return f"as usual: {usually}"


def experiment(settings: Mapping[str, Any], val_sha256: Any, train_tokens: Any) -> dict[str, Any] | None:
    """What runs that differ only in their seed, their form and their machine have in common, as plain values.

    None where that is not known, and for runs that do not begin with new weights. val_sha256: Split.fingerprint of the
    val data; train_tokens: of the train data.
    """
    try:
        if settings["init_from"] not in ("scratch", "resume"):
            return None
        found = {name: settings[name] for name in NAMES}
        found["sequences per step"] = settings["batch_size"] * settings["gradient_accumulation_steps"]
        found["windows per evaluation"] = eval_windows(settings)
    except (KeyError, TypeError, ArithmeticError):  # a log may lack settings, or hold absurd ones
        return None
    return found | {"val_sha256": val_sha256, "train_tokens": train_tokens}


def band_of(settings: Mapping[str, Any], val_sha256: Any, train_tokens: Any) -> Band | None:
    """The band that a run belongs to, if there is one. The arguments are those of `experiment`."""
    own = experiment(settings, val_sha256, train_tokens)
    if own is not None:
        for path in sorted(FOLDER.glob("*.json")):
            record = read_record(path)
            if record and own == DEFAULTS | record["experiment"]:  # a setting that came later was at its default
                return Band({int(step): runs for step, runs in record["val_losses"].items()}, record["deviations"])
    return None


def read_record(path: Path) -> dict[str, Any] | None:
    """A band's file; None if it is damaged or something else, which ends no run."""
    try:
        record = json.loads(read_small(path, MOST_BYTES))
        check_record(record, FIELDS, required=FIELDS)
    except (OSError, ValueError, RecursionError):
        return None
    return record


def is_loss(value: Any) -> bool:
    return type(value) is float and 0 <= value < LARGEST


def is_losses(value: Any) -> bool:
    """Whether these are the losses of several runs, by step."""
    if not isinstance(value, dict) or not value:
        return False
    return all(step.isdecimal() and len(step) < 16 and is_of_runs(runs) for step, runs in value.items())


def is_of_runs(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1 and all(is_loss(loss) for loss in value)


FIELDS: Fields = {
    "experiment": lambda value: isinstance(value, dict),
    "val_losses": is_losses,
    "deviations": is_loss,
}
