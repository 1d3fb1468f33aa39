"""The band of a config: where the val losses of one more run are expected. deskgpt/run/loss_band.py reads it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

from bench.asking import running
from bench.asking.arms import Arm
from bench.asking.running import Place
from configurator import read_settings
from deskgpt.run import loss_band
from deskgpt.run.log import read_events
from deskgpt.system.files import write_atomically
from train import TrainConfig

FEWEST = 8  # runs
# The share of normal runs that leaves the band at any of its steps, if the losses of seeds are normally distributed.
# They have heavier tails: of 240 short runs, 4.6% left the bands of eight others, and 9.9% with 0.05 here.
FALSE_ALARMS = 0.01


def deviations(runs: int, steps: int) -> float:
    """Half the width of a band around the mean, in standard deviations between this many runs.

    A prediction interval for one more run, t sqrt(1 + 1/n) (Hahn, Journal of the American Statistical Association 65,
    1970). The steps share FALSE_ALARMS (Bonferroni), however the losses of one run depend on each other.
    """
    from scipy import stats

    t = stats.t.isf(FALSE_ALARMS / steps / 2, runs - 1)
    return float(t * math.sqrt(1 + 1 / runs))


def make_band(config: str, arm: Arm, place: Place, first_seed: int) -> Path:
    """Does FEWEST runs of a config on its whole data, and writes their band. Returns its path. Raises as running.run.

    place: with the config's own data and as many evaluations as it has.
    """
    seeds = range(first_seed + 1, first_seed + 1 + FEWEST)  # users run the first one
    running.run_all(place, [(arm, seed) for seed in seeds])
    return write_band(config, [place.out_dir(arm, seed) for seed in seeds])


def write_band(config: str, out_dirs: Sequence[Path]) -> Path:
    """Writes config/loss_bands/NAME.json for config/NAME.py from the out_dirs of finished runs. Returns its path.

    Raises ValueError where they are too few, have not ended, or are not runs of the config with a seed each.
    """
    settings = read_settings(TrainConfig, [config])
    logs = [read_events(out_dir / "log.jsonl") for out_dir in out_dirs]
    starts = [next(e for e in log if e["event"] == "start") for log in logs]
    losses = [{e["iter"]: round(e["val_loss"], 4) for e in log if e["event"] == "eval"} for log in logs]
    first = starts[0]
    expected = loss_band.experiment(settings, first.get("val_sha256"), first.get("train_tokens"))
    seeds = {start["settings"]["seed"] for start in starts}
    if len(seeds) < max(FEWEST, len(logs)):
        raise ValueError(f"{config}: a band needs at least {FEWEST} runs, each with a seed of its own")
    for start, out_dir, by_step in zip(starts, out_dirs, losses, strict=True):
        own = loss_band.experiment(start["settings"], start.get("val_sha256"), start.get("train_tokens"))
        if own != expected or by_step.keys() != losses[0].keys() or settings["max_iters"] not in by_step:
            raise ValueError(f"{out_dir}: it is no whole run of {config}, or its data differ from the others'")
    record = {
        "about": f"val losses by step of runs of {config} with other seeds, in nats per token",
        "command": f"python train.py {config} --seed=N",
        "seeds": sorted(seeds),
        "date": time.strftime("%Y-%m-%d"),
        "device": first.get("device"),
        "form": {name: first.get(name) for name in ("dtype", "compiled", "attention")},
        "versions": first.get("versions"),
        "commit": first.get("git_commit"),
        "experiment": expected,
        "deviations": round(deviations(len(starts), len(losses[0])), 4),
        "val_losses": {step: [by_step[step] for by_step in losses] for step in losses[0]},
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in record.items()]
    path = loss_band.FOLDER / f"{Path(config).stem}.json"
    write_atomically(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())
    return path
