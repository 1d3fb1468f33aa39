"""Stage 10: train.py and an unmodified nanoGPT in turns, on the same work at the best micro-batch."""

from __future__ import annotations

from typing import Any

from bench import speed, timing
from bench.qualifying import work
from bench.qualifying.session import Session
from bench.qualifying.steps import contestants
from bench.timing import Contestant, Failed

MICRO_BATCHES = 8  # per step: fewer than stage 7 has, for shorter steps
TOY_MICRO_BATCHES = 2
ROUNDS = 2
ROUND_S = 15.0  # of a round's steps on a card


def measure(s: Session) -> dict[str, Any]:
    if s.nanogpt is None:
        return {"skipped": "no checkout of nanoGPT was named"}
    batch_size = work.best_batch(s)
    micro_batches = TOY_MICRO_BATCHES if s.sizes.is_toy else MICRO_BATCHES
    problems: list[str] = []
    while True:
        runs = contestants(s, batch_size, micro_batches, [f"nanogpt:{s.nanogpt}"])
        try:
            rounds = in_turns(s, runs)
            rows = speed.table(runs, runs[0].start["tokens_per_step"])
            return {"rows": rows, "rounds": rounds, "batch_size": batch_size, "problems": problems}
        except Failed as e:
            problems.append(f"micro-batch {batch_size}: {e}")
            too_large = "out of memory" in e.reason and batch_size % 2 == 0
            if not too_large or s.seconds_left() < ROUND_S:
                return {"failed": problems}
        batch_size //= 2
        micro_batches *= 2


def in_turns(s: Session, runs: list[Contestant]) -> int:
    """Takes as many rounds as there is time for; returns their number. Raises Failed."""
    for _ in s.while_there_is_time(range(ROUNDS)):
        for x in runs:
            timing.run(x, 0, 0.0 if s.sizes.is_toy else ROUND_S)
            s.print0(f"{x.name}: {x.rounds_ms[-1][-1]:.4g} ms per step")
    return len(runs[0].rounds_ms)


def describe(result: dict[str, Any]) -> str:
    if "skipped" in result:
        return f"Skipped: {result['skipped']}."
    if "failed" in result:
        return "Nothing was compared."
    text = (
        f"Micro-batches of {result['batch_size']}, {result['rounds']} rounds in turns; MFU of both refers to the peak "
        f"that ours logs.\n\n{speed.as_markdown(result['rows'])}"
    )
    if result["problems"]:
        text += f"\n\nLarger micro-batches did not fit both: {'; '.join(result['problems'])}."
    return text
