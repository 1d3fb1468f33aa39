"""Measures how long training at a given rate waits for data, on shards of random tokens.

    python bench/loader.py
    python bench/loader.py --tokens=10_000_000_000 --rate=4e6 --cold=True

Writes the shards to a temporary folder (--folder keeps them elsewhere). Then it takes micro-batches from data/loader.py
as a training does that could reach `rate` tokens/s with its data at hand: for each, it sleeps as long as the work on it
would take. Prints the rate that it reached, the share of the time spent waiting, the most that the loader delivers
without pauses, and how long it takes to open the split and to jump to a far step. --cold=True first drops the shards
from the page cache, so that every window comes from the disk.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

from configurator import configure
from data.loader import Loader
from data.splits import Split
from data.token_files import read_tokens, token_files, write_tokens
from deskgpt.compute.batching import Batching
from deskgpt.machine import hardware, provenance
from deskgpt.machine.errors import one_line_errors

VOCAB_SIZE = 50304
END_OF_TEXT = 50256


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    tokens: int = 1_000_000_000  # in all shards; 2 bytes each on the disk
    shard_tokens: int = 100_000_000
    block_size: int = 1024
    batch_size: int = 8  # sequences per micro-batch
    rate: float = 1e6  # tokens/s that the training would take
    seconds: float = 20  # of taking batches at that rate
    cold: bool = False  # drop the shards from the page cache first (Linux)
    align_documents: bool = False
    folder: str = ""  # where the shards are, or are written and kept; empty = a temporary folder
    device: str = "auto"


def write_shards(folder: Path, c: LoaderConfig) -> None:
    """Writes random token ids in documents of 1000 tokens, as far as the shards are not there yet."""
    draw = np.random.default_rng(0)
    for number, first in enumerate(range(0, c.tokens, c.shard_tokens)):
        path = folder / f"train_{number:06}.bin"
        if not path.exists():
            ids = draw.integers(0, END_OF_TEXT, min(c.shard_tokens, c.tokens - first), np.uint16)
            ids[::1000] = END_OF_TEXT
            write_tokens(path, ids, header=True)


def drop_from_cache(folder: Path) -> None:
    for path in token_files(folder, "train"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # type: ignore[attr-defined, unused-ignore]
        os.close(fd)


def open_split(folder: Path, c: LoaderConfig) -> Split:
    """Opens the split and takes batches of three steps, and prints how long each of that took."""
    t0 = time.perf_counter()
    start = END_OF_TEXT if c.align_documents else None
    split = Split(folder, "train", c.block_size, VOCAB_SIZE, document_start=start)
    print(f"opening the split: {(time.perf_counter() - t0) * 1e3:.1f} ms")
    epoch = split.n_windows // c.batch_size  # steps
    for step in (0, epoch // 2, 1000 * epoch):
        t0 = time.perf_counter()
        split.train_batch(step, np.arange(c.batch_size), c.batch_size)
        print(f"a batch of step {step:,}: {(time.perf_counter() - t0) * 1e3:.2f} ms")
    return split


def take_batches(loader: Loader, device: torch.device, seconds: float, pause_s: float) -> tuple[int, float]:
    """(batches, seconds they took), for at least `seconds` seconds, with a pause before each batch."""
    batches = 0
    t0 = time.perf_counter()
    while time.perf_counter() - t0 < seconds:
        if pause_s:
            time.sleep(pause_s)
        next(loader.step())
        batches += 1
    hardware.synchronize(device)
    return batches, time.perf_counter() - t0


def main(c: LoaderConfig) -> None:
    device = hardware.resolve_device(c.device)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(c.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write_shards(folder, c)
        shards = token_files(folder, "train")
        tokens = sum(len(read_tokens(path)) for path in shards)
        print(f"{hardware.device_name(device)}; {provenance.versions()}, commit {provenance.git_commit()}")
        print(f"{tokens:,} tokens in {len(shards)} shards, {'cold' if c.cold else 'warm'}; {c}")
        if c.cold:
            drop_from_cache(folder)
        split = open_split(folder, c)

        batch_tokens = c.batch_size * c.block_size
        waits_s: list[float] = []
        loader = Loader(split, Batching(c.batch_size), device, waited=waits_s.append)
        next(loader.step())
        waits_s.clear()
        batches, elapsed_s = take_batches(loader, device, c.seconds, batch_tokens / c.rate)
        print(
            f"work for {c.rate:,.0f} tokens/s: {batches * batch_tokens / elapsed_s:,.0f} tokens/s reached, "
            f"{sum(waits_s) / elapsed_s:.3%} of the time spent waiting for data"
        )
        batches, elapsed_s = take_batches(loader, device, c.seconds / 4, 0.0)
        print(f"without pauses: {batches * batch_tokens / elapsed_s:,.0f} tokens/s")
        loader.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with one_line_errors():
        main(configure(LoaderConfig, sys.argv[1:]))
