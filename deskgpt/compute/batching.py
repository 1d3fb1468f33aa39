"""How the sequences of an optimizer step, and of an evaluation, are split into micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batching:
    """One split of the same training: an optimizer step has the same sequences in every other one.

    Raises ValueError where the ranks cannot share the micro-batches.
    """

    batch_size: int  # sequences per micro-batch
    accumulation: int = 1  # micro-batches per optimizer step, over all ranks
    block_size: int = 1  # tokens per sequence
    eval_windows: int = 1  # of each split that an evaluation reads, at most
    rank: int = 0
    world: int = 1
    eval_tokens: int = 0  # that the user has asked for, instead of a number of micro-batches

    def __post_init__(self) -> None:
        if self.accumulation % self.world:
            nearest = (self.accumulation // self.world + 1) * self.world
            raise ValueError(
                f"gradient_accumulation_steps={self.accumulation} does not divide among {self.world} ranks; "
                f"try --gradient_accumulation_steps={nearest}"
            )

    @classmethod
    def of(cls, settings: Mapping[str, Any], rank: int = 0, world: int = 1) -> Batching:
        """From settings of train.py; gradient_accumulation_steps counts the micro-batches of all ranks."""
        eval_windows = settings["eval_iters"] * settings["batch_size"]
        if settings["eval_tokens"]:
            eval_windows = math.ceil(settings["eval_tokens"] / settings["block_size"])
        return cls(
            batch_size=settings["batch_size"],
            accumulation=settings["gradient_accumulation_steps"],
            block_size=settings["block_size"],
            eval_windows=eval_windows,
            rank=rank,
            world=world,
            eval_tokens=settings["eval_tokens"],
        )

    @property
    def micro_steps(self) -> int:
        """Micro-batches per optimizer step on each rank."""
        return self.accumulation // self.world

    @property
    def sequences(self) -> int:
        """Per optimizer step, over all ranks: the global batch."""
        return self.batch_size * self.accumulation

    @property
    def tokens_per_step(self) -> int:
        return self.sequences * self.block_size

    def with_batch_size(self, batch_size: int) -> Batching:
        """The same training in micro-batches of this size, which must divide the sequences of a step."""
        assert self.sequences % batch_size == 0
        return replace(self, batch_size=batch_size, accumulation=self.sequences // batch_size)

    def settings(self) -> dict[str, int]:
        """The settings of train.py that ask for this split; an evaluation keeps its windows."""
        return {
            "batch_size": self.batch_size,
            "gradient_accumulation_steps": self.accumulation,
            "eval_tokens": self.eval_tokens or self.eval_windows * self.block_size,
        }

    def flags(self) -> str:
        """What a user types for this split."""
        named = self.settings()
        if self.eval_tokens:
            del named["eval_tokens"]  # it is as the user has it
        return " ".join(f"--{name}={value}" for name, value in named.items())

    def number(self, micro_step: int) -> int:
        """Of this rank's micro-batch within the step, over all ranks: it has the same rows at any world size."""
        return micro_step * self.world + self.rank

    def rows(self, micro_step: int) -> I64:
        """This rank's rows (batch_size,) of the global batch in one micro-batch."""
        return self.number(micro_step) * self.batch_size + np.arange(self.batch_size)

    def eval_rows(self, n: int) -> Iterator[I64]:
        """This rank's rows of an evaluation of n windows, a batch at a time. Rows from n on are padding.

        All ranks have equally many batches: where weights are sharded, each needs the others.
        """
        for first in range(0, n, self.world * self.batch_size):
            yield first + self.rank * self.batch_size + np.arange(self.batch_size)

    def eval_batches(self, n: int) -> int:
        """Micro-batches of each rank in an evaluation of n windows."""
        return math.ceil(n / (self.world * self.batch_size))
