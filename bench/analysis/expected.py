"""What a run's val loss is expected to be: the band of its config, and what others have published about such runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.analysis.runs import Run
from deskgpt.run import loss_band


def band_of(run: Run) -> loss_band.Band | None:
    """The band that the run belongs to, if there is one."""
    return loss_band.band_of(run.settings, run.start.get("val_sha256"), run.start.get("train_tokens"))


def verdict(run: Run) -> list[str]:
    """Whether its val losses are as usual, in a sentence, if that is known."""
    band = band_of(run)
    text = band.verdict({e["iter"]: e["val_loss"] for e in run.val}) if band else ""
    return [text] if text else []


def published() -> list[dict[str, Any]]:
    """The losses in config/loss_bands/published.json, each with its source and the settings of runs that it stands beside.

    An entry has val_losses by step, or val_loss where the step is not known.
    """
    try:
        return json.loads((loss_band.FOLDER / "published.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no page needs it
        return []


def is_beside(entry: dict[str, Any], run: Run) -> bool:
    """Whether a published loss is about runs like this one. Its settings are lists of values."""
    own = run.settings | {"dataset": Path(str(run.settings.get("dataset"))).name}
    return all(own.get(name) in values for name, values in entry["settings"].items())
