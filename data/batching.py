"""How a global batch, and an evaluation, are cut into micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batching:
    """How a global batch is cut into micro-batches and ranks. Any two cuts of the same global batch train the same.

    Raises ValueError if the ranks cannot share the micro-batches equally.
    """

    batch_size: int  # sequences per micro-batch
    accumulation: int = 1  # micro-batches per optimizer step, over all ranks
    block_size: int = 1  # tokens per sequence
    eval_iters: int = 1  # micro-batches of each split that an evaluation reads, at most
    eval_tokens: int = 0  # tokens that it reads instead; 0 = eval_iters
    rank: int = 0
    world: int = 1

    @classmethod
    def of(cls, config: Any, rank: int = 0, world: int = 1) -> Batching:
        """Return how the settings of train.py cut a step and an evaluation into micro-batches and ranks."""
        c = config
        cut = (c.batch_size, c.gradient_accumulation_steps, c.block_size, c.eval_iters, c.eval_tokens)
        return cls(*cut, rank, world)

    def __post_init__(self) -> None:
        if self.accumulation % self.world:
            nearest = (self.accumulation // self.world + 1) * self.world
            raise ValueError(
                f"gradient_accumulation_steps={self.accumulation} does not divide among {self.world} ranks; "
                f"try --gradient_accumulation_steps={nearest}"
            )

    @property
    def micro_steps(self) -> int:
        """Return the micro-batches per optimizer step on each rank."""
        return self.accumulation // self.world

    @property
    def sequences(self) -> int:
        """Return the sequences per optimizer step, over all ranks: the global batch."""
        return self.batch_size * self.accumulation

    @property
    def tokens_per_step(self) -> int:
        return self.sequences * self.block_size

    @property
    def eval_windows(self) -> int:
        """Return the windows of each split that an evaluation reads, at most."""
        return math.ceil(self.eval_tokens / self.block_size) or self.eval_iters * self.batch_size

    def with_batch_size(self, batch_size: int) -> Batching:
        """Return the same training in micro-batches of this size, which must divide the sequences of a step."""
        assert self.sequences % batch_size == 0
        accumulation = self.sequences // batch_size
        eval_tokens = self.eval_tokens or self.eval_windows * self.block_size
        return replace(self, batch_size=batch_size, accumulation=accumulation, eval_tokens=eval_tokens)

    def settings(self) -> dict[str, int]:
        """Return the settings of train.py that ask for this cut and these evaluations."""
        return {
            "batch_size": self.batch_size,
            "gradient_accumulation_steps": self.accumulation,
            "eval_tokens": self.eval_tokens or self.eval_windows * self.block_size,
        }

    def flags(self) -> str:
        """Return what a user types for this cut."""
        return " ".join(f"--{name}={value}" for name, value in self.settings().items())

    def number(self, micro_step: int) -> int:
        """Return the number of this rank's micro-batch within the step, over all ranks."""
        return micro_step * self.world + self.rank

    def rows(self, micro_step: int) -> I64:
        """Return this rank's rows (batch_size,) of the global batch in one micro-batch: the same at any world size."""
        return self.number(micro_step) * self.batch_size + np.arange(self.batch_size)

    def eval_rows(self, n: int) -> Iterator[I64]:
        """Yield this rank's rows of an evaluation of n windows, a batch at a time. Rows from n on are padding.

        All ranks have equally many batches: where weights are sharded, each needs the others.
        """
        for first in range(0, n, self.world * self.batch_size):
            yield first + self.rank * self.batch_size + np.arange(self.batch_size)
