"""Compare a run's val losses with earlier runs that differ only in their seed: as usual or not.

config/loss_bands has a band for a config that the project ships: a JSON file with the settings and
the val losses of eight runs. A band knows one loss per step and seed, so it finds a run that learns
wrongly, not one that is a little worse.
"""

import json
import math
import statistics
from collections.abc import Mapping
from typing import Any

from deskgpt.errors import ROOT
from deskgpt.resume import NOT_LEARNING

FOLDER = ROOT / "config" / "loss_bands"
# Half the width of a band in standard deviations between its eight runs. One more run leaves the
# band at any of nine steps with a probability of 1%, if losses are normal: t sqrt(1 + 1/8), where
# |t| of 7 degrees of freedom is exceeded with probability 0.01 / 9 (Hahn, Journal of the American
# Statistical Association 65, 1970). Tails are heavier: of 240 short runs, 4.6% left the bands of
# eight others.
BAND_DEVIATIONS = 5.63
# Half the width of a band, at least: with zero_init all seeds begin at one loss, which differs by
# rounding only.
LEAST = 1e-3  # nats


def compare_with_bands(
    settings: Mapping[str, Any], data: tuple[Any, Any], val_losses: Mapping[int, float]
) -> str:
    """Return a sentence about a run's val losses by step: as usual, or unusual; "" if that is not
    known.

    settings, data: the arguments of `seed_invariant_key`.
    """
    own = seed_invariant_key(settings, *data)
    for path in FOLDER.glob("*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        if own == record["experiment"] and settings["init_from"] in ("scratch", "resume"):
            return band_sentence({int(k): v for k, v in record["val_losses"].items()}, val_losses)
    return ""


def seed_invariant_key(
    settings: Mapping[str, Any], val_sha256: Any, train_tokens: Any
) -> dict[str, Any]:
    """Return the plain values that runs have in common that differ only in their seed, variant and
    machine.

    settings: of a run. val_sha256: Split.fingerprint of the val data; train_tokens: of the train
    data.
    """
    found = {name: value for name, value in settings.items() if name not in NOT_LEARNING | {"seed"}}
    batch_size = settings["batch_size"]
    windows = math.ceil(settings["eval_tokens"] / settings["block_size"])
    found["sequences per step"] = batch_size * settings["gradient_accumulation_steps"]
    found["windows per evaluation"] = windows or settings["eval_iters"] * batch_size
    return found | {"val_sha256": val_sha256, "train_tokens": train_tokens}


def band_sentence(band: Mapping[int, list[float]], val_losses: Mapping[int, float]) -> str:
    """Return a sentence about a run with these val losses by step: as usual, or where it first left
    the band.

    "" if they share no step, and of random weights that are as usual.
    """
    sentence = ""
    for step in sorted(band.keys() & val_losses.keys()):
        mean = statistics.fmean(band[step])
        half = max(LEAST, BAND_DEVIATIONS * statistics.stdev(band[step]))
        is_usual = abs(val_losses[step] - mean) <= half
        if step > 0 or not is_usual:
            sentence = (
                f"{'as usual' if is_usual else 'unusual'}: val loss {val_losses[step]:.4f}, "
                f"expected {mean - half:.4f} to {mean + half:.4f} at step {step:,}, from "
                f"{len(band[step])} runs with other seeds"
            )
        if not is_usual:
            break
    return sentence
