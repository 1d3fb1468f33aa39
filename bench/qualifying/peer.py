"""Stage 10: train.py and an unmodified nanoGPT in turns, on the same work at the best micro-batch."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import train
from bench import speed, timing
from bench.qualifying import work
from bench.qualifying.session import Session
from bench.timing import Contestant, Failed
from deskgpt.machine import hardware

MICRO_BATCHES = 8  # per step: fewer than stage 7 has, for shorter steps
TOY_MICRO_BATCHES = 2
ROUNDS = 2
ROUND_S = 15.0  # of a round's steps on a card
MARGIN = 1.3  # of the longest round so far: with less time left, no other begins


def measure(s: Session) -> dict[str, Any]:
    if s.nanogpt is None:
        return {"skipped": "no checkout of nanoGPT was named"}
    if not (s.nanogpt / "train.py").is_file():
        return {"skipped": f"{s.nanogpt} holds no train.py"}
    hardware.release_memory(s.device)  # the contestants are processes of their own, on the same device
    batch_size = work.best_batch(s)
    micro_batches = TOY_MICRO_BATCHES if s.sizes.is_toy else MICRO_BATCHES
    problems: list[str] = []
    while True:
        ours, peer = contestants(s, batch_size, micro_batches)
        try:
            return in_turns(s, ours, peer) | {
                "micro_batches": micro_batches,
                "batch_size": batch_size,
                "problems": problems,
            }
        except Failed as e:
            problems.append(f"micro-batch {batch_size}: {e}")
            too_large = "out of memory" in e.reason and batch_size % 2 == 0
            if not too_large or s.seconds_left() < ROUND_S:
                return {"skipped": "; ".join(problems)}
        batch_size //= 2
        micro_batches *= 2


def contestants(s: Session, batch_size: int, micro_batches: int) -> list[Contestant]:
    """Ours and nanoGPT's train.py with the session's model."""
    settings = work.settings_of(s.sizes.model) | {
        "batch_size": batch_size,
        "gradient_accumulation_steps": micro_batches,
        "device": str(s.device),
    }
    settings["compile"] = work.compile_setting(s)
    given = [f"--{name}={value}" for name, value in settings.items()]
    c = replace(train.TrainConfig(), **settings)
    return speed.contestants(c, given, [f"nanogpt:{s.nanogpt}"], work.tokens_for(s))


def in_turns(s: Session, ours: Contestant, peer: Contestant) -> dict[str, Any]:
    """The rows of bench/speed.py after as many rounds as there is time for. Raises Failed."""
    longest_s = 0.0
    while not ours.rounds_ms or (len(ours.rounds_ms) < ROUNDS and s.seconds_left() > MARGIN * longest_s):
        t0 = time.perf_counter()
        for x in (ours, peer):
            timing.run(x, 0, 0.0 if s.sizes.is_toy else ROUND_S)
            s.say(f"{x.name}: {x.rounds_ms[-1][-1]:.4g} ms per step")
        longest_s = max(longest_s, time.perf_counter() - t0)
    rows = speed.table([ours, peer], ours.start["tokens_per_step"])
    return {"rows": rows, "rounds": len(ours.rounds_ms), "ratio": rows[1]["ours_faster"]}


def describe(result: dict[str, Any]) -> str:
    if "skipped" in result:
        return f"Skipped: {result['skipped']}."
    r = result
    text = (
        f"Steps of {r['micro_batches']} micro-batches of {r['batch_size']}, {r['rounds']} rounds in turns; MFU of both "
        f"on the peak that ours logs.\n\n{speed.as_markdown(r['rows'])}\n\n"
        f"deskGPT is {r['ratio']:.2f} times as fast as nanoGPT."
    )
    if r["problems"]:
        text += f" Larger micro-batches did not fit both: {'; '.join(r['problems'])}."
    return text
