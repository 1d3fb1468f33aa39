"""Stage 9: does this machine train to the loss that plain float32 on a CPU trains to?

    python -m bench.qualifying.reference --seeds=3 --size=card
    python -m bench.qualifying.reference --seeds=8 --size=toy

This command measures the known loss: it trains in float32 on the CPU, not compiled, for each seed, and prints the val
losses, their mean and spread.

The settings are those of config/train_shakespeare_char.py with fewer steps. The characters are the same on every
machine: a chain in which each character depends on the two before it, of known entropy. Initial weights and batches
depend on the seed alone, so that only rounding and the random numbers of dropout differ between devices.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import train
from bench.output import markdown_table
from bench.qualifying import work
from bench.qualifying.session import Session
from configurator import build, configure, read_settings
from data.token_files import write_tokens
from data.tokenizer import Ids
from deskgpt.machine import hardware
from deskgpt.machine.errors import one_line_errors
from deskgpt.machine.files import sha256
from deskgpt.run.log import read_events

CONFIG = "config/train_shakespeare_char.py"
STEPS = 100
CHARS = 65
SEED = 1337  # train.py's
TRAIN_TOKENS = 1 << 20
VAL_TOKENS = 1 << 16
LANES = 1 << 10  # chains that are drawn side by side, one after another in the file

# Of a character's eight successors, each pair of characters before has these four, 11 times in 20 the first.
SUCCESSORS = 8
TWENTIETHS = (11, 5, 3, 1)
ENTROPY = -sum(n / 20 * math.log(n / 20) for n in TWENTIETHS)  # nats per character, which no model falls below


@dataclass(frozen=True)
class Known:
    """What plain float32 on a CPU trains to."""

    val_loss: float
    tolerance: float  # how far another device may be from it
    date: str
    command: str
    how: str  # the tolerance was chosen


@dataclass(frozen=True)
class Size:
    settings: tuple[str, ...]  # of train.py, beside CONFIG's
    known: Known


TOY_KNOWN = Known(
    val_loss=3.0437,
    tolerance=0.03,
    date="2026-11-22",
    command="python -m bench.qualifying.reference --seeds=8 --size=toy",
    how="4 standard deviations over 8 seeds, which draw weights and batches anew too",
)
CARD_KNOWN = Known(
    val_loss=1.9345,
    tolerance=0.06,
    date="2026-11-22",
    command="python -m bench.qualifying.reference --seeds=1 --size=card",
    how="twice the toy's, because only one seed was run",
)
SHORT = (f"--max_iters={STEPS}", "--warmup_iters=10", f"--eval_interval={STEPS}")
TOY_SIZES = ("--n_layer=2", "--n_head=2", "--n_embd=64", "--block_size=64", "--batch_size=16")
SIZES = {
    "card": Size((*SHORT, f"--eval_tokens={VAL_TOKENS}"), CARD_KNOWN),
    "toy": Size((*SHORT, *TOY_SIZES, f"--eval_tokens={VAL_TOKENS // 4}"), TOY_KNOWN),
}

# ---- the characters ------------------------------------------------------------------------------------------


def characters(n: int, seed: int) -> Ids:
    """n token ids (n,) of the chain. The chain is always the same, the seed chooses what is drawn from it."""
    draw = np.random.default_rng(0)
    after_one = draw.permuted(np.tile(np.arange(CHARS), (CHARS, 1)), axis=1)[:, :SUCCESSORS]  # (CHARS, 8)
    order = draw.permuted(np.tile(np.arange(SUCCESSORS), (CHARS, CHARS, 1)), axis=2)[:, :, : len(TWENTIETHS)]
    after_two = after_one[np.arange(CHARS)[None, :, None], order]  # (before, last, 4)
    table = np.repeat(after_two, TWENTIETHS, axis=2)  # (before, last, 20)

    draw = np.random.default_rng(seed)
    length = math.ceil(n / LANES)
    out = np.empty((LANES, length), np.uint16)
    before, last = draw.integers(0, CHARS, (2, LANES))
    for t in range(length):
        following = table[before, last, draw.integers(0, 20, LANES)]
        before = last
        last = following
        out[:, t] = last
    return out.reshape(-1)[:n]


def write_characters(folder: Path) -> None:
    """A data folder of these characters."""
    folder.mkdir()
    files = {}
    for seed, (split, n) in enumerate({"train": TRAIN_TOKENS, "val": VAL_TOKENS}.items(), 1):
        ids = characters(n, seed)
        write_tokens(folder / f"{split}.bin", ids)
        files[f"{split}.bin"] = {"tokens": n, "sha256": sha256(ids.astype("<u2"))}
    tokenizer = {"name": "char", "chars": "".join(chr(0x4E00 + i) for i in range(CHARS))}
    meta = {"tokenizer": tokenizer, "vocab_size": CHARS, "source": "a chain of characters", "files": files}
    (folder / "meta.json").write_text(json.dumps(meta))


# ---- the run -------------------------------------------------------------------------------------------------


def trained(data: Path, out_dir: Path, size: Size, device: torch.device, *more: str) -> dict[str, Any]:
    """Trains; returns what the log says."""
    flags = [f"--out_dir={out_dir}", f"--dataset={data}", f"--device={device}", "--always_save_checkpoint=False"]
    settings = read_settings(train.TrainConfig, [str(train.DATA.parent / CONFIG), *size.settings, *flags, *more])
    train.main(build(train.TrainConfig, settings))
    events = read_events(out_dir / "log.jsonl")
    evaluations = [e for e in events if e["event"] == "eval"]
    steps = [e for e in events if e["event"] == "iter"]
    start = events[0]
    return {
        "steps": STEPS,
        "first_val_loss": evaluations[0]["val_loss"],
        "val_loss": evaluations[-1]["val_loss"],
        "train_s": evaluations[-1]["train_s"],
        "tokens_per_s": STEPS * start["tokens_per_step"] / evaluations[-1]["train_s"],
        "step_ms": statistics.median(e["time_ms"] for e in steps),
        "dtype": start["dtype"],
        "compiled": start["compiled"],
    }


def measure(s: Session) -> dict[str, Any]:
    size = SIZES["toy" if s.sizes.is_toy else "card"]
    data = s.folder / "characters"
    write_characters(data)
    out_dir = s.folder / "reference"
    result = trained(data, out_dir, size, s.device, f"--compile={work.compile_setting(s)}")
    hardware.release_memory(s.device)
    result |= {"entropy": ENTROPY, "uniform": math.log(CHARS)}
    return result | compared(result["val_loss"], size.known)


def compared(val_loss: float, known: Known) -> dict[str, Any]:
    """A loss next to the known one."""
    off = val_loss - known.val_loss
    agrees = abs(off) <= known.tolerance
    return {
        "known": known.val_loss,
        "off": off,
        "tolerance": known.tolerance,
        "agrees": agrees,
        "failed": [] if agrees else [f"the val loss is {off:+.4f} off, more than {known.tolerance:.4f}"],
        "known_from": f"{known.date}, {known.command}; tolerance: {known.how}",
    }


# ---- in words ------------------------------------------------------------------------------------------------


def describe(result: dict[str, Any]) -> str:
    r = result
    compiled = "compiled" if r["compiled"] else "not compiled"
    verdict = (
        f"Plain float32 on a CPU reaches {r['known']:.4f} ({r['known_from']}): this is {r['off']:+.4f} off, "
        f"{'within' if r['agrees'] else 'MORE THAN'} {r['tolerance']:.4f}."
    )
    head = ["steps", "val loss before", "val loss after", "tokens/s", "ms/step"]
    row = [str(r["steps"]), f"{r['first_val_loss']:.4f}", f"{r['val_loss']:.4f}", f"{r['tokens_per_s']:,.0f}"]
    row.append(f"{r['step_ms']:.2f}")
    return (
        f"{CONFIG} on characters of {r['entropy']:.4f} nats each, in {r['dtype']}, {compiled}.\n\n"
        f"{markdown_table(head, [row])}\n\n{verdict}"
    )


# ---- script --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceConfig:
    size: Literal["card", "toy"] = "toy"
    seeds: int = 3


def main(c: ReferenceConfig) -> None:
    """Prints the val losses of plain float32 on the CPU by seed, and their spread."""
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "characters"
        write_characters(data)
        for seed in range(SEED, SEED + c.seeds):
            t0 = time.perf_counter()
            flags = ("--dtype=float32", "--compile=False", f"--seed={seed}")
            result = trained(data, Path(folder) / str(seed), SIZES[c.size], torch.device("cpu"), *flags)
            losses.append(result["val_loss"])
            print(f"seed {seed}: val loss {losses[-1]:.5f} after {time.perf_counter() - t0:.0f} s", flush=True)
    spread = statistics.stdev(losses) if len(losses) > 1 else math.nan
    print(f"seed {SEED}: {losses[0]:.5f}; mean {statistics.mean(losses):.5f}, standard deviation {spread:.5f}")


if __name__ == "__main__":
    with one_line_errors():
        main(configure(ReferenceConfig, sys.argv[1:]))
