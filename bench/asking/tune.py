"""A setting is tuned for each arm before arms are compared: an untuned learning rate often explains a difference.

Successive halving (Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization",
2016, arXiv 1502.07943), on seeds that are not those of the comparison: three values get a run each, the better two a
second one, and the lower mean loss wins. Runs have their full length, since the schedule belongs to what is tuned.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import replace
from typing import Any

from bench.asking import running
from bench.asking.arms import Arm
from bench.asking.running import DistEnv
from bench.asking.statistics import LEAST, MOST
from deskgpt.system.errors import ConfigError
from deskgpt.system.formatting import clock

FACTORS = (0.5, 1.0, 2.0)  # of the arm's own value
RUNGS = (3, 2)  # values that get a run
SEEDS_AFTER = 2 * MOST  # the first seed of the comparison
CHANGES = ("n_layer", "n_embd", "n_head", "optimizer")  # after which another learning rate is likely the best
SIZES = ("batch_size", "gradient_accumulation_steps", "block_size")  # of a step


def check_tunable(arms: list[Arm], name: str) -> None:
    """Raises ConfigError where arms cannot be tuned by this setting."""
    for arm in arms:
        value = arm.settings.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"--tune {name}: {arm.label} has {name}={value}; tune a setting that is a number above 0")
        if arm.known is not None or f"--{name}=" in arm.text:
            raise ConfigError(f"--tune {name}: {arm.label} is {arm.text}; leave the setting out of the arms")


def tuned(arm: Arm, name: str, place: DistEnv, first_seed: int, until: float) -> tuple[Arm, str]:
    """(the arm with the best of three values of its setting, how that was found in words). Raises as running.run."""
    tried = [with_value(arm, name, factor) for factor in FACTORS]
    losses: dict[str, list[float]] = {one.text: [] for one in tried}
    for rung, kept in enumerate(RUNGS):
        tried = sorted(tried, key=lambda one: sum(losses[one.text]))[:kept]
        seed = first_seed + SEEDS_AFTER + rung
        found = running.run_all(place, [(one, seed) for one in tried], until)
        for one, run in zip(tried, found, strict=True):
            losses[one.text].append(run["val_loss"])
    best = min(tried, key=lambda one: statistics.fmean(losses[one.text]))
    of_each = ", ".join(f"{text.split('=')[-1]}: {statistics.fmean(of_one):.4f}" for text, of_one in losses.items())
    factor = best.settings[name] / arm.settings[name]
    beyond = "" if min(FACTORS) < factor < max(FACTORS) else "; it is the outermost, so the best may lie beyond"
    return best, f"{arm.label} gets {name}={best.settings[name]:g} ({of_each}{beyond})"


def with_value(arm: Arm, name: str, factor: float) -> Arm:
    value = float(f"{arm.settings[name] * factor:g}")
    if isinstance(arm.settings[name], int):
        value = round(value)
    word = f"--{name}={value:g}"
    settings = arm.settings | {name: value}
    return replace(arm, text=f"{arm.text} {word}".strip(), arguments=[*arm.arguments, word], settings=settings)


def tuned_arms(arms: list[Arm], name: str, place: DistEnv, first_seed: int, budget_s: float) -> list[Arm]:
    """All arms, each tuned; prints what each gets. Raises ConfigError where the budget is too small for that."""
    check_tunable(arms, name)
    until = time.perf_counter() + budget_s
    out = []
    for arm in arms:
        best, said = tuned(arm, name, place, first_seed, until)
        out.append(best)
        print(said, flush=True)
        run_s = running.run(place, best, first_seed + SEEDS_AFTER)["wall_s"]
        needed_s = run_s * len(arms) * (sum(RUNGS) + LEAST) / place.jobs
        if needed_s > budget_s:
            raise ConfigError(
                f"--budget={clock(budget_s)}: a run takes {clock(run_s)}, so tuning and comparing {len(arms)} arms "
                f"take {clock(needed_s)} at least; --anyway goes on"
            )
    return out


def tokens_per_step(settings: dict[str, Any]) -> int:
    return math.prod(settings.get(name, 1) for name in SIZES)


def untuned(arms: list[Arm], runs: dict[str, list[dict[str, Any]]]) -> str:
    """Of arms that are not tuned, in words, what makes another learning rate likely; empty for nothing."""
    first = arms[0]
    for arm in arms[1:]:
        if arm.known is not None or arm.settings.get("learning_rate") != first.settings.get("learning_rate"):
            continue
        changed = [name for name in CHANGES if arm.settings.get(name) != first.settings.get(name)]
        if tokens_per_step(arm.settings) != tokens_per_step(first.settings):
            changed.append("the tokens of a step")
        if not changed and runs[arm.label][0].get("parameters") != runs[first.label][0].get("parameters"):
            changed = ["the number of parameters"]
        if changed:
            return f"{arm.label} changes {changed[0]} at an untuned rate: --tune learning_rate would tell."
    return ""
