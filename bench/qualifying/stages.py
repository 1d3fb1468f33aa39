"""The stages of bench/qualify.py, in their order."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from bench.qualifying.session import Session
from deskgpt.system.errors import ConfigError


@dataclass(frozen=True)
class Stage:
    number: int
    module: str  # in bench/qualifying
    heading: str
    limit_s: float  # after which it should end; together at most 25 minutes

    def measure(self, s: Session) -> dict[str, Any]:
        return importlib.import_module(f"bench.qualifying.{self.module}").measure(s)

    def describe(self, result: dict[str, Any]) -> str:
        return importlib.import_module(f"bench.qualifying.{self.module}").describe(result)


STAGES = {
    stage.number: stage
    for stage in (
        Stage(0, "facts", "Facts", 20),
        Stage(1, "roofs", "Roofs", 60),
        Stage(2, "parity", "Parity with float32 on the CPU", 150),
        Stage(3, "suite", "Tests on the card", 300),
        Stage(4, "batches", "Micro-batches", 200),
        Stage(5, "variants", "Ways to run a step", 200),
        Stage(6, "breakdown", "Where a step's time goes", 60),
        Stage(7, "steps", "Whole steps", 200),
        Stage(8, "sampling", "Sampling", 80),
        Stage(10, "peer", "nanoGPT beside it", 150),
    )
}


def numbers_of(text: str) -> list[int]:
    """The stages that text such as "0-3,7" names, in their order. Raises ConfigError."""
    named: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"--stages={text}: {part!r} is no stage; name them as in --stages=0-3,7")
        numbers = range(int(first), int(last or first) + 1)
        if not numbers or numbers[0] not in STAGES or numbers[-1] not in STAGES:
            raise ConfigError(f"--stages={text}: there is no {part}; the stages are {', '.join(map(str, STAGES))}")
        named.update(number for number in numbers if number in STAGES)
    return sorted(named)
