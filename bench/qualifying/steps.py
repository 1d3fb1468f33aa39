"""Stage 7: whole steps of train.py as bench/speed.py times them, with AdamW and then with Muon."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import train
from bench import speed, timing
from bench.qualifying import work
from bench.qualifying.session import Session
from bench.timing import Contestant, Failed
from deskgpt.system import hardware, peaks

STEPS = 2  # after the one that warms up


def measure(s: Session) -> dict[str, Any]:
    sequences = s.sizes.tokens_per_step // s.sizes.model.block_size
    batch_size = work.best_batch(s)
    runs: list[Contestant] = []
    failed = []
    ended = 0
    both = contestants(s, batch_size, sequences // batch_size, ["ours:--optimizer=muon"])
    for x in s.while_there_is_time(both):
        ended += 1
        try:
            timing.run(x, 1 + STEPS)
            runs.append(x)
        except Failed as e:
            if not runs:
                raise
            failed.append(str(e))
    start = runs[0].start
    return {
        "batch_size": batch_size,
        "tokens_per_step": start["tokens_per_step"],
        "dtype": start["dtype"],
        "rows": speed.table(runs, start["tokens_per_step"]),
        "is_published": peaks.published_flops(s.device, start["dtype"]) is not None,
        "failed": failed,
        "unfinished": [x.name for x in both[ended:]],
    }


def contestants(s: Session, batch_size: int, micro_batches: int, peers: list[str]) -> list[Contestant]:
    """Ours with the session's model, and peers as bench/speed.py names them."""
    hardware.release_memory(s.device)  # the contestants are processes of their own, on the same device
    settings = work.settings_of(s.sizes.model) | {
        "batch_size": batch_size,
        "gradient_accumulation_steps": micro_batches,
        "device": str(s.device),
        "compile": work.compile_setting(s),
    }
    given = [f"--{name}={value}" for name, value in settings.items()]
    return speed.contestants(replace(train.TrainConfig(), **settings), given, peers, work.tokens_for(s))


def describe(result: dict[str, Any]) -> str:
    peak = "published" if result["is_published"] else "measured"
    return (
        f"Steps of {result['tokens_per_step']:,} tokens, micro-batches of {result['batch_size']}, with AdamW and with "
        f"Muon; MFU refers to the {peak} peak.\n\n{speed.as_markdown(result['rows'])}"
    )
