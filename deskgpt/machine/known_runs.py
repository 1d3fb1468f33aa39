"""What share of a card's peak a run reaches there: qualified on this machine, known from a run, or assumed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deskgpt.machine import gpu_peaks, remembered
from deskgpt.machine.gpu_peaks import Card

ASSUMED_MFU = 0.4  # of a card that nothing is known of
SAME_SIZE = 0.01  # models whose FLOPs per token differ by less count as one size


@dataclass(frozen=True, kw_only=True)
class KnownRun:
    """A training run whose speed somebody recorded."""

    card: str  # its name in gpu_peaks.py
    dtype: str
    model: str
    flops_per_token: int
    tokens_per_step: int
    step_s: float
    source: str  # where the figures stand

    def mfu(self) -> float:
        """Share of the card's published peak."""
        peak = gpu_peaks.find_card(self.card).peak_in_training(self.dtype)
        assert peak, f"{self.card} has no published {self.dtype} peak"
        return self.flops_per_token * self.tokens_per_step / self.step_s / peak[0]

    def is_of(self, flops_per_token: float) -> bool:
        """Whether a model of these FLOPs has about the size of this run's."""
        return math.isclose(self.flops_per_token, flops_per_token, rel_tol=SAME_SIZE)

    def took(self) -> str:
        return f"{self.step_s:g}s per step of {self.tokens_per_step:,} tokens"


# No dtype is recorded of these two. It was one of 16 bits: they are faster than the card's peak in TF32.
KNOWN_RUNS = [
    KnownRun(
        card="GeForce RTX 4070",
        dtype="bfloat16",
        model="12 layers, 768 wide",
        flops_per_token=854_770_176,
        tokens_per_step=524_288,
        step_s=9.34,
        source="config/train_fineweb_125m.py",
    ),
    KnownRun(
        card="GeForce RTX 4070",
        dtype="bfloat16",
        model="12 layers, 384 wide",
        flops_per_token=299_983_104,
        tokens_per_step=524_288,
        step_s=3.9,
        source="config/train_fineweb_40m.py",
    ),
]


def known_run(card: Card | None, flops_per_token: float, dtype: str) -> KnownRun | None:
    """The known run on this card whose model takes about as many FLOPs per token; None if there is none."""
    runs = [run for run in KNOWN_RUNS if card and run.card == card.name and run.dtype == dtype]
    return min(runs, key=lambda run: abs(math.log(run.flops_per_token / flops_per_token)), default=None)


def remember_mfu(device_name: str, dtype: str, mfu: float) -> None:
    """Keeps the MFU that bench/qualify.py measured: a share of the published peak. device_name is torch's name."""
    remembered.keep("qualified", f"{device_name}, {dtype}", mfu)


def qualified_mfu(card: Card | None, dtype: str) -> float | None:
    """The MFU that bench/qualify.py measured on a card of this name, on this machine; None if it did not."""
    for key, mfu in remembered.read("qualified").items():
        device_name, _, its_dtype = key.rpartition(", ")
        qualified = gpu_peaks.card_named(device_name)
        same = qualified and card and qualified.name == card.name and its_dtype == dtype
        if same and isinstance(mfu, float) and 0 < mfu < math.inf:
            return mfu
    return None


def expected_mfu(card: Card | None, flops_per_token: float, dtype: str) -> tuple[float, str]:
    """(MFU of a run of such a model, where the figure comes from): qualified, of a known run or assumed."""
    qualified = qualified_mfu(card, dtype)
    if qualified is not None:
        return qualified, "qualified here"
    run = known_run(card, flops_per_token, dtype)
    if run is None:
        return ASSUMED_MFU, "assumed"
    return run.mfu(), "known run of these sizes" if run.is_of(flops_per_token) else f"known run of {run.model}"
