"""The band of a config: where the val losses of one more run are expected. deskgpt/run/loss_band.py reads it."""

from __future__ import annotations

import json
import math
from pathlib import Path

from bench import output
from bench.asking.arms import Arm
from bench.asking.running import Trainer
from bench.asking.statistics import t_quantile
from deskgpt.run import loss_band
from deskgpt.run.log import read_events
from deskgpt.system.files import write_atomically

RUNS = 8
# The share of normal runs that leaves the band at any of its steps, if the losses of seeds are normally distributed.
# They have heavier tails: of 240 short runs, 4.6% left the bands of eight others, and 9.9% with 0.05 here.
FALSE_ALARMS = 0.01


def deviations(steps: int) -> float:
    """Return half the width of a band around the mean of RUNS runs, in standard deviations between them.

    A prediction interval for one more run, t sqrt(1 + 1/n) (Hahn, Journal of the American Statistical Association 65,
    1970). The steps share FALSE_ALARMS (Bonferroni), however the losses of one run depend on each other.
    """
    return t_quantile(RUNS - 1, FALSE_ALARMS / steps) * math.sqrt(1 + 1 / RUNS)


def make_band(config: str, arm: Arm, trainer: Trainer) -> Path:
    """Run a config as it is RUNS times, write config/loss_bands/NAME.json for config/NAME.py and return its path.

    Raises as Trainer.run does.
    """
    first = arm.settings["seed"]
    seeds = range(first + 1, first + 1 + RUNS)  # users run the first one
    for seed in seeds:
        trainer.run(arm, seed)
    logs = [read_events(trainer.out_dir(arm, seed) / "log.jsonl") for seed in seeds]
    start = next(e for e in logs[0] if e["event"] == "start")
    losses = [{e["iter"]: round(e["val_loss"], 4) for e in log if e["event"] == "eval"} for log in logs]
    record = {
        "about": f"val losses by step of runs of {config} with other seeds, in nats per token; {output.about(start)}",
        "seeds": list(seeds),
        "experiment": loss_band.experiment(arm.settings, start["val_sha256"], start["train_tokens"]),
        "deviations": round(deviations(len(losses[0])), 4),
        "val_losses": {step: [of_run[step] for of_run in losses] for step in losses[0]},
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in record.items()]
    path = loss_band.FOLDER / f"{Path(config).stem}.json"
    write_atomically(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())
    return path
