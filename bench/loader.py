"""Measures how long training at a given rate waits for data, on synthetic shards.

    python bench/loader.py
    python bench/loader.py --tokens=10_000_000_000 --rate=4e6 --cold=True

Writes shards of random tokens to a temporary folder (--folder keeps them elsewhere), then takes micro-batches from
data/loader.py as a training would that needs nothing but data to reach `rate` tokens/s: for each the loop sleeps as
long as the work on it would take. Prints the rate reached, the share of the time spent waiting, the most that the
loader gives without pauses, and what opening the split and jumping to a far step take. --cold=True drops the shards
from the page cache first, so that every window comes from the disk.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script, Python looks beside this file only

from configurator import configure
from data.loader import Loader
from data.splits import Split
from data.token_files import read_tokens, token_files, write_tokens
from deskgpt import hardware, runlog
from deskgpt.errors import one_line_errors


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
    """Random ids below 50257, a document of 1000 tokens after the other."""
    draw = np.random.default_rng(0)
    for number, first in enumerate(range(0, c.tokens, c.shard_tokens)):
        path = folder / f"train_{number:06}.bin"
        if not path.exists():
            ids = draw.integers(0, 50256, min(c.shard_tokens, c.tokens - first), np.uint16)
            ids[::1000] = 50256
            write_tokens(path, ids, header=True)


def drop_from_cache(folder: Path) -> None:
    for path in token_files(folder, "train"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # type: ignore[attr-defined, unused-ignore]
        os.close(fd)


def main(c: LoaderConfig) -> None:
    device = hardware.resolve_device(c.device)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(c.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write_shards(folder, c)
        shards = token_files(folder, "train")
        there = sum(len(read_tokens(p)) for p in shards)
        print(f"{hardware.device_name(device)}; {runlog.versions()}, commit {runlog.git_commit()}")
        print(f"{there:,} tokens in {len(shards)} shards, {'cold' if c.cold else 'warm'}; {c}")
        start = 50256 if c.align_documents else None
        if c.cold:
            drop_from_cache(folder)
        t0 = time.perf_counter()
        split = Split(folder, "train", c.block_size, 50304, document_start=start)
        print(f"opening the split: {(time.perf_counter() - t0) * 1e3:.1f} ms")
        far = split.n_windows // c.batch_size
        for step in (0, far // 2, 1000 * far):
            t0 = time.perf_counter()
            split.train_batch(step, np.arange(c.batch_size), c.batch_size)
            print(f"a batch of step {step:,}: {(time.perf_counter() - t0) * 1e3:.2f} ms")

        batch_tokens = c.batch_size * c.block_size
        batch_s = batch_tokens / c.rate
        loader = Loader(split, device, c.batch_size, micro_steps=1)
        loader.next()
        loader.wait_s, n = 0.0, 0
        t0 = time.perf_counter()
        while time.perf_counter() - t0 < c.seconds:
            time.sleep(batch_s)
            loader.next()
            n += 1
        hardware.synchronize(device)
        elapsed_s = time.perf_counter() - t0
        print(
            f"work for {c.rate:,.0f} tokens/s: {n * batch_tokens / elapsed_s:,.0f} tokens/s reached, "
            f"{loader.wait_s / elapsed_s:.3%} of the time spent waiting for data"
        )
        t0, n = time.perf_counter(), 0
        while time.perf_counter() - t0 < c.seconds / 4:
            loader.next()
            n += 1
        hardware.synchronize(device)
        print(f"without pauses: {n * batch_tokens / (time.perf_counter() - t0):,.0f} tokens/s")
        loader.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with one_line_errors():
        main(configure(LoaderConfig, sys.argv[1:]))
