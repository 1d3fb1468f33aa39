"""What the stages of bench/qualify.py share: the device, the sizes of their work, and the results so far.

Each stage is a module with two functions:

    measure(s: Session) -> dict[str, Any]     measures, and returns what JSON can hold
    describe(result: dict[str, Any]) -> str   that result as Markdown, without a heading

measure may raise anything: a failed stage is a result too. A stage that ends and has found something wrong says so in
result["failed"], a list of lines. What it had no time for is listed in result["unfinished"]: it is not known to be
wrong.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from model import GPTConfig

MARGIN = 1.3  # of the longest case so far: with less time left, no other begins
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large the stages' work is: GPT-2 124M on a card, a toy on a CPU."""

    model: GPTConfig  # of stages 4 to 8
    first_batch: int  # micro-batch with which stage 4 begins
    last_batch: int  # and the largest that it tries
    tokens_per_step: int  # of stage 7
    sampled_tokens: int  # of stage 8
    is_toy: bool


CARD = Sizes(
    model=GPTConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304),
    first_batch=4,
    last_batch=512,
    tokens_per_step=524_288,
    sampled_tokens=256,
    is_toy=False,
)
TOY = Sizes(
    model=GPTConfig(n_layer=2, n_head=2, n_embd=128, block_size=64, vocab_size=500),
    first_batch=2,
    last_batch=8,
    tokens_per_step=1024,
    sampled_tokens=16,
    is_toy=True,
)


@dataclass
class Session:
    """One call of bench/qualify.py."""

    device: torch.device
    sizes: Sizes
    folder: Path  # for what is needed while it runs; removed at the end
    nanogpt: Path | None = None  # an unmodified checkout of nanoGPT
    results: dict[int, dict[str, Any]] = field(default_factory=dict)  # by stage, those of earlier calls too
    deadline: float = 0.0  # time.perf_counter() at which the stage that runs should end

    def print0(self, text: str) -> None:
        print(text, flush=True)

    def seconds_left(self) -> float:
        return max(0.0, self.deadline - time.perf_counter())

    def while_there_is_time(self, cases: Iterable[T]) -> Iterator[T]:
        """The first case, and the next as long as one that takes as long as the longest so far would end in time."""
        longest_s = 0.0
        for number, case in enumerate(cases):
            if number and self.seconds_left() < MARGIN * longest_s:
                return
            t0 = time.perf_counter()
            yield case
            longest_s = max(longest_s, time.perf_counter() - t0)
