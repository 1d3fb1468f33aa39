"""What several config files share."""

from __future__ import annotations

import math


def split_step(sequences: int, largest: int) -> tuple[int, int]:
    """Split the sequences of one optimizer step into (batch_size, gradient_accumulation_steps).

    batch_size is the greatest common divisor of `sequences` and `largest`, so the tokens per step stay the same.
    """
    batch_size = math.gcd(sequences, largest)
    return batch_size, sequences // batch_size
