"""The data of a run: its two splits, their checksums, and the bytes of text that a token stands
for.
"""

from __future__ import annotations

import functools
import hashlib
import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.batches import I64, BatchSplit, Split
from data.token_files import GPT2, listed_checksums, read_meta, token_files
from data.tokenizer import Tokenizer, from_meta_offline, padded_vocab_size, short_name
from deskgpt.errors import DataError
from deskgpt.files import sha256

CHUNK = 1 << 20  # tokens that are read at once
FINGERPRINTED = 1 << 20  # tokens at the beginning of each shard
FINGERPRINTED_FILES = 1024
AT_ONCE = 256 << 20  # tokens that are verified before the run begins: in a second or so


class Dataset:
    """A folder of token files, as train.py uses it.

    `open` opens its splits, once the model is known.
    """

    train: Split
    val: Split
    checksums: Checksums

    def __init__(self, folder: Path, needed: bool = True) -> None:
        """needed: raise ValueError if a split is missing, before anything takes long."""
        self.folder = folder
        self.meta = read_meta(folder)
        self.tokenizer: dict[str, Any] = self.meta["tokenizer"]
        # The name of the template, if the data are dialogues.
        self.chat: str | None = self.meta.get("chat")
        if needed:
            token_files(folder, "train", self.meta)
            token_files(folder, "val", self.meta)
        # The mean over the text that an evaluation reads; None if it is not known.
        self.bytes_per_token: float | None = None

    @property
    def vocab_size(self) -> int:
        """Return the vocabulary of a new model."""
        return padded_vocab_size(self.tokenizer, self.meta["vocab_size"])

    def open(
        self,
        block_size: int,
        seed: int,
        vocab_size: int,
        tokenizer: dict[str, Any] | None,
        compares_checksums: bool,
    ) -> None:
        """Open both splits for a model with this vocabulary and tokenizer, None if that is not
        known; then the sizes must match, padded or not.

        Raises ValueError if they do not belong to the model or are damaged.
        """
        is_same = not tokenizer or not self.tokenizer or tokenizer == self.tokenizer
        if not is_same or vocab_size not in (self.meta["vocab_size"], self.vocab_size):
            raise ValueError(
                f"{self.folder} has a vocabulary of {self.meta['vocab_size']} (tokenizer "
                f"{short_name(self.tokenizer)}), the model one of {vocab_size} (tokenizer "
                f"{short_name(tokenizer or {})}); prepare the data with the model's tokenizer, or "
                "use --init_from=scratch"
            )
        self.train = Split(self.folder, "train", block_size, vocab_size, seed)
        self.val = Split(self.folder, "val", block_size, vocab_size, seed)
        # val first: an evaluation waits for it.
        compared = (self.val, self.train) if compares_checksums else ()
        self.checksums = Checksums(listed_checksums(self.meta), compared)

    @functools.cached_property
    def metadata(self) -> dict[str, Any]:
        """Return the facts that tell data of the same size apart, by their names in checkpoints."""
        found = {}
        for name, split in {"train": self.train, "val": self.val}.items():
            listed = listed_checksums(self.meta, name).values()
            checksum = sha256("\n".join(listed).encode())[:16] if listed else None
            found[f"{name} data"] = {
                "tokens": split.tokens,
                "fingerprint": fingerprint(split),
                "sha256": checksum,
            }
        return found

    def windows(self, sequences: int, first_row: int) -> dict[str, list[int]]:
        """Return where the windows of a global batch of this many sequences begin, by token
        file.
        """
        rows = first_row + np.arange(sequences)
        shards, begins = self.train.sequence_offsets(rows)
        return {
            self.train.shards[shard].path.name: begins[shards == shard].tolist()
            for shard in np.unique(shards)
        }

    # ---- evaluations -----------------------------------------------------------------------------

    def eval_metadata(self, batching: BatchSplit) -> dict[str, int]:
        """Return the number that tells evaluations apart, by its name in checkpoints."""
        return {"windows per evaluation": self.val.n_eval_windows(batching.eval_sequences)}

    def eval_digest(self, batching: BatchSplit) -> str:
        """Return a digest of the windows of val that an evaluation reads: losses compare if it is
        equal.
        """
        return eval_digest(self.val, self.val.n_eval_windows(batching.eval_sequences))

    # ---- for the log -----------------------------------------------------------------------------

    def lines(self, batching: BatchSplit, reads_text: bool) -> list[str]:
        """Return the lines that a run prints about its data. reads_text: read the text behind the
        tokens, for bits per byte.
        """
        tokens = f"{self.train.tokens:,} train, {self.val.tokens:,} val tokens"
        found = [f"data: {self.folder.name}, {tokens}, {self.checksums.state}"]
        if self.meta is GPT2:
            found.append(
                f"warning: {self.folder} has no meta.json or meta.pkl: its tokens are "
                "taken for GPT-2's"
            )
        if reads_text:
            try:
                windows = self.val.n_eval_windows(batching.eval_sequences)
                self.bytes_per_token = bytes_per_token(
                    self.val, windows, from_meta_offline(self.tokenizer)
                )
            except (ValueError, IndexError, OSError, ImportError) as e:
                found.append(f"bits per byte are not known: {e}")
        return found

    def bits_per_byte(self, val_loss: float) -> float | None:
        """Return a val loss (nats per token) in bits per byte of its text (The Pile,
        arXiv:2101.00027, 3.1), if known.

        The nats of end_of_text count, though it has no bytes: a model has to predict where
        documents end, too.
        """
        return val_loss / self.bytes_per_token / math.log(2) if self.bytes_per_token else None


# ---- the files and what they hold ----------------------------------------------------------------


class Checksums:
    """Compare the files of splits, masks included, with the checksums that meta.json lists.

    Raises DataError if one differs; of a large data set, `wait` raises that, and each step, which
    finds it in the split's `damage`. `state` tells the log what is compared.
    """

    def __init__(self, listed: dict[str, str], splits: Sequence[Split]) -> None:
        """listed: the SHA-256 of files, by name."""
        self._splits = splits
        self._threads = [
            threading.Thread(target=find_damage, args=(split, listed), daemon=True)
            for split in splits
        ]
        for thread in self._threads:
            thread.start()
        self.state = "checksums are verified while it trains"
        if not listed:
            self.state = "no checksums (no meta.json that lists files)"
        elif sum(split.tokens for split in splits) <= AT_ONCE:
            self.wait(all_files=True)
            self.state = "checksums verified"

    def wait(self, all_files: bool) -> None:
        """Wait until the first split is verified, or all are. Raises DataError if any file is
        damaged.
        """
        for thread in self._threads if all_files else self._threads[:1]:
            thread.join()
        for split in self._splits:
            if split.damage is not None:
                raise split.damage


def find_damage(split: Split, listed: dict[str, str]) -> None:
    """Set the split's `damage` if a file differs from its checksum, or cannot be read."""
    try:
        for file in split.files:
            expected = listed.get(file.path.name)
            # Read the open file: another one may have got its name meanwhile.
            if expected and hashlib.file_digest(file.file, "sha256").hexdigest() != expected:
                raise ValueError(
                    f"{file.path} is damaged or was changed (its checksum); prepare the data again"
                )
    except Exception as e:  # raised in the main thread
        split.damage = DataError(str(e))


def fingerprint(split: Split) -> str:
    """Return 16 hex digits that tell these tokens: SHA-256 of the shards' lengths and first 2^20
    tokens each.

    Masks, if there are any, are part of it. It is of the first 1,024 files, so that it never reads
    more than 2 GB.
    """
    digest = hashlib.sha256(split.lengths.tobytes())
    for file in split.files[:FINGERPRINTED_FILES]:
        digest.update(file.read(0, FINGERPRINTED).tobytes())
    return digest.hexdigest()[:16]


def eval_chunks(split: Split, n: int) -> Iterator[tuple[I64, I64]]:
    """Yield inputs and targets of an evaluation of n windows, about CHUNK tokens at a time."""
    at_once = max(1, CHUNK // split.block_size)
    for first in range(0, n, at_once):
        yield split.eval_batch(np.arange(first, min(first + at_once, n)), n)


@functools.lru_cache(1)  # it is the same at every evaluation of a run
def eval_digest(split: Split, n: int) -> str:
    """Return 16 hex digits of the SHA-256 of the tokens that an evaluation of n windows reads, and
    of block_size.
    """
    digest = hashlib.sha256(f"{split.block_size} {n}".encode())
    for x, y in eval_chunks(split, n):
        digest.update(x.astype("<i4").tobytes())
        digest.update(y.astype("<i4").tobytes())
    return digest.hexdigest()[:16]


def bytes_per_token(split: Split, n: int, tokenizer: Tokenizer) -> float:
    """Return the bytes of text per target of an evaluation that reads n windows of a split.

    Raises IndexError if the tokenizer lacks one of the tokens (the model's vocabulary may be
    padded), ValueError if the windows hold no text, and as Split.
    """
    lengths = tokenizer.token_bytes()  # 0 for end_of_text
    n_targets = 0
    n_bytes = 0
    for _, y in eval_chunks(split, n):
        targets = y[y >= 0]
        n_targets += len(targets)
        n_bytes += int(lengths[targets].sum())
    if not n_bytes:
        raise ValueError("the evaluated tokens hold no text")
    return n_bytes / n_targets
