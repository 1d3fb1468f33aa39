"""The stages of bench/qualify.py, in their order."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from bench.qualifying.session import Session


@dataclass(frozen=True)
class Stage:
    number: int
    module: str  # in bench/qualifying
    heading: str
    limit_s: float  # after which it should end; together 25 minutes, and none is near 10

    def measure(self, s: Session) -> dict[str, Any]:
        return importlib.import_module(f"bench.qualifying.{self.module}").measure(s)

    def describe(self, result: dict[str, Any]) -> str:
        return importlib.import_module(f"bench.qualifying.{self.module}").describe(result)


STAGES = {
    stage.number: stage
    for stage in (
        Stage(0, "facts", "Facts", 20),
        Stage(1, "roofs", "Roofs", 60),
        Stage(2, "parity", "Parity with float32 on the CPU", 200),
        Stage(3, "suite", "Tests on the card", 300),
        Stage(4, "batches", "Micro-batches", 200),
        Stage(5, "variants", "Ways to run a step", 250),
        Stage(6, "breakdown", "Where a step's time goes", 60),
        Stage(7, "steps", "Whole steps", 100),
        Stage(8, "sampling", "Sampling", 80),
        Stage(9, "reference", "A loss known from the CPU", 100),
        Stage(10, "peer", "nanoGPT beside it", 130),
    )
}


def numbers_of(text: str) -> tuple[list[int], set[int]]:
    """(the stages that text such as "0-3,7" names, in their order; those named by themselves, here 7).

    Raises ValueError.
    """
    named: set[int] = set()
    alone: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"--stages={text}: {part!r} is no stage; name them as in --stages=0-3,7")
        numbers = range(int(first), int(last or first) + 1)
        if not numbers or numbers[-1] not in STAGES:
            raise ValueError(f"--stages={text}: {part} is not in 0-{max(STAGES)}")
        named.update(numbers)
        if not dash:
            alone.update(numbers)
    return sorted(named), alone
