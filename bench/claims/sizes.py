"""What the experiments run on, on a CPU and on CUDA; their options, and what each of them finds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Settings = dict[str, Any]
Events = list[dict[str, Any]]

# The model of the claims about characters, that of config/train_shakespeare_char_cpu.py.
CHARS: Settings = {
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 128,
    "block_size": 64,
    "batch_size": 12,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-3,
    "warmup_iters": 100,
    "beta2": 0.99,
}
EVAL_TOKENS = 1 << 15  # of each split: fixed windows, the same for all that is compared


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the experiments run on, for one type of device."""

    timed: Settings  # claims 1 and 2
    vocab_size: int  # claims 1, 2 and 3
    widths: tuple[int, ...]  # claim 1; the last one: claim 2
    sequences: int  # per step, claims 1 and 2
    micro_batches: tuple[int, ...]
    compiled: tuple[Settings, ...]  # claim 3
    widened: Settings  # claim 5, with GPT-2's vocabulary
    learned: Settings  # claims 7 and 8
    learned_steps: int
    text: str  # folder below data/ for claims 7 and 8
    dtypes: tuple[str, ...]  # claim 8
    compile: bool  # in the claims that are not about compiling
    steps: int = 20  # timed, per round


def heads(n_embd: int) -> Settings:
    """A width, in heads of 64 channels."""
    return {"n_embd": n_embd, "n_head": n_embd // 64}


CPU = Sizes(
    timed={"n_layer": 4, "block_size": 128},
    vocab_size=65,
    widths=(128, 384),
    sequences=16,
    micro_batches=(1, 4, 16),
    compiled=(
        {"n_layer": 4, **heads(128), "block_size": 64, "batch_size": 12},
        {"n_layer": 6, **heads(384), "block_size": 256, "batch_size": 8},
    ),
    widened={"n_layer": 4, "block_size": 256, "batch_size": 4},
    learned=CHARS,
    learned_steps=400,
    text="shakespeare_char",
    dtypes=("float32", "bfloat16"),
    compile=False,
)
CUDA = Sizes(
    timed={"n_layer": 12, "block_size": 1024},
    vocab_size=50257,
    widths=(384, 768),
    sequences=64,
    micro_batches=(1, 4, 8, 16),
    compiled=tuple({"n_layer": 12, **heads(768), "block_size": 1024, "batch_size": b} for b in (2, 8)),
    widened={"n_layer": 12, "block_size": 1024, "batch_size": 8},
    learned={"n_layer": 12, **heads(768), "batch_size": 8, "gradient_accumulation_steps": 8, "warmup_iters": 100},
    learned_steps=500,
    text="fineweb_edu",
    dtypes=("float32", "bfloat16", "float16"),
    compile=True,
    steps=50,
)


@dataclass(kw_only=True)
class Options:
    """What was asked for on the command line, and what the runs so far used."""

    device: torch.device
    sizes: Sizes
    data: str  # a folder of token files; empty = the claim's own below data/
    rounds: int
    seeds: int
    steps: int  # most steps of any run; 0 = as many as the experiment takes
    log: str
    documents: str
    tmp: Path
    compilers: set[str] = field(default_factory=set)  # of the runs so far that were compiled


@dataclass
class Found:
    """What an experiment finds: a table, what follows from it, and the raw figures of both."""

    rows: list[dict[str, Any]]
    says: list[str]
    raw: Any = None
    dtypes: set[str] = field(default_factory=set)
