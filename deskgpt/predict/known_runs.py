"""What share of a card's peak a run reaches there: qualified on this machine, known from a run, or assumed."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields

from deskgpt.machine import gpu_peaks, remembered
from deskgpt.machine.gpu_peaks import Card
from model import GPT, GPTConfig

ASSUMED_MFU = 0.4  # of a card that nothing is known of

# ---- the table -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KnownRun:
    """A training run whose speed somebody recorded."""

    card: str  # its name in gpu_peaks.py
    dtype: str
    model: GPTConfig
    tokens_per_step: int
    step_s: float
    source: str  # where the figures stand

    def mfu(self) -> float:
        """Share of the card's published peak."""
        card = gpu_peaks.find_card(self.card)
        peak = card.peak_in_training(self.dtype)
        assert peak, f"{self.card} has no published {self.dtype} peak"
        return flops_per_token(self.model) * self.tokens_per_step / self.step_s / peak[0]

    def took(self) -> str:
        return f"{self.step_s:g}s per step of {self.tokens_per_step:,} tokens"

    def is_of(self, config: GPTConfig) -> bool:
        """Whether the two models are the same, but for what is not recorded of runs."""
        return all(getattr(self.model, name) == getattr(config, name) for name in RECORDED)


RECORDED = [f.name for f in fields(GPTConfig) if f.name not in ("n_head", "dropout", "bias")]

# No dtype is recorded of these two. It was one of 16 bits: they are faster than the card's peak in TF32.
KNOWN_RUNS = [
    KnownRun(
        card="GeForce RTX 4070",
        dtype="bfloat16",
        model=GPTConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304),
        tokens_per_step=524_288,
        step_s=9.34,
        source="config/train_fineweb_125m.py",
    ),
    KnownRun(
        card="GeForce RTX 4070",
        dtype="bfloat16",
        model=GPTConfig(n_layer=12, n_head=6, n_embd=384, block_size=1024, vocab_size=50304),
        tokens_per_step=524_288,
        step_s=3.9,
        source="config/train_fineweb_40m.py",
    ),
]


@functools.cache  # a table of cards asks for each of them
def flops_per_token(config: GPTConfig) -> int:
    return GPT.without_storage(config).estimate_flops()


def known_run(card: Card | None, config: GPTConfig, dtype: str) -> KnownRun | None:
    """The known run on this card whose model takes about as many FLOPs as this one; None if there is none."""
    runs = [run for run in KNOWN_RUNS if card and run.card == card.name and run.dtype == dtype]
    if not runs:
        return None
    flops = flops_per_token(config)
    return min(runs, key=lambda run: abs(math.log(flops_per_token(run.model) / flops)))


# ---- qualified here ------------------------------------------------------------------------------------------


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


# ---- the answer ----------------------------------------------------------------------------------------------


def expected_mfu(card: Card | None, config: GPTConfig, dtype: str) -> tuple[float, str]:
    """(MFU of a run of this model, where the figure comes from): qualified, of a known run or assumed."""
    qualified = qualified_mfu(card, dtype)
    if qualified is not None:
        return qualified, "qualified here"
    run = known_run(card, config, dtype)
    if run is not None:
        if run.is_of(config):
            return run.mfu(), "known run of these sizes"
        return run.mfu(), f"known run of a GPT-2, {run.model.n_layer} layers, {run.model.n_embd} wide"
    return ASSUMED_MFU, "assumed"
