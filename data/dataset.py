"""The data of a run: what its folder says of itself, its two splits, their checksums, and the text behind them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from data.bits_per_byte import TextStatistics, text_statistics
from data.meta_files import read_record
from data.splits import Split
from data.token_files import assumptions, check_vocabulary, listed_sha256, read_meta, token_files
from data.tokenizer import from_meta_offline, padded_vocab_size
from data.verify import Verification
from deskgpt.compute.batching import Batching
from deskgpt.compute.distributed import DistContext

SPLITS = ("train", "val")


class Dataset:
    """A folder of token files, as train.py uses it. `open` opens its splits, once the model is known."""

    train: Split
    val: Split

    def __init__(self, folder: Path, needed: bool = True) -> None:
        """needed: raise ValueError if a split is missing, before anything takes long."""
        self.folder = folder
        if needed:
            for split in SPLITS:
                token_files(folder, split)
        self.meta = read_meta(folder)
        self.tokenizer: dict[str, Any] = self.meta["tokenizer"]
        self.chat: str | None = read_record(folder).get("chat")  # the name of the template, if the data are dialogues
        self.text: TextStatistics | None = None  # of val, if it is known
        self._digests: dict[int, str] = {}  # of evaluations, by the number of their windows

    @property
    def vocab_size(self) -> int:
        """Of a new model."""
        return padded_vocab_size(self.tokenizer, self.meta["vocab_size"])

    def open(
        self, block_size: int, vocab_size: int, tokenizer: dict[str, Any] | None, seed: int, align_documents: bool
    ) -> None:
        """Opens both splits for a model with this vocabulary, trained with this tokenizer if that is known.

        Raises ValueError if they do not belong to the model or cannot be aligned.
        """
        check_vocabulary(self.folder, self.meta, vocab_size, tokenizer)
        document_start = self.meta["end_of_text"] if align_documents else None
        if align_documents and document_start is None:
            raise ValueError(
                f"align_documents=True: {self.folder} does not say which token documents begin with; "
                "take --align_documents=False"
            )
        self.train = Split(self.folder, "train", block_size, vocab_size, seed, document_start)
        self.val = Split(self.folder, "val", block_size, vocab_size, seed, document_start)

    def verify(self, here: bool) -> Verification:
        """Their checksums. here: whether this rank is the one that verifies them."""
        return Verification(self.folder, (self.train, self.val) if here else ())

    @functools.cached_property
    def metadata(self) -> dict[str, Any]:
        """What tells data of the same size apart, under the names of checkpoints."""
        found = {}
        for name, split in zip(SPLITS, (self.train, self.val), strict=True):
            listed = listed_sha256(self.folder, name)
            found[f"{name} data"] = {"tokens": split.tokens, "fingerprint": split.fingerprint(), "sha256": listed}
        return found

    def changes(self) -> list[str]:
        """A warning for each file that somebody has written into since this was last asked."""
        return self.train.changes() + self.val.changes()

    def windows(self, sequences: int, position: int) -> dict[str, list[int]]:
        """Where the windows of a global batch of this many sequences begin, by token file."""
        begins: dict[str, list[int]] = {}
        places = self.train.places(position, np.arange(sequences), sequences)
        for shard, first in zip(*places, strict=True):
            begins.setdefault(self.train.shards[shard].path.name, []).append(int(first))
        return begins

    # ---- evaluations -----------------------------------------------------------------------------------------

    def eval_windows(self, batching: Batching) -> list[int]:
        """How many windows an evaluation reads of each split."""
        return [split.n_eval_windows(batching.eval_windows) for split in (self.train, self.val)]

    def eval_metadata(self, batching: Batching) -> dict[str, int]:
        """What tells evaluations apart, under the name of checkpoints."""
        return {"windows per evaluation": self.val.n_eval_windows(batching.eval_windows)}

    def eval_digest(self, batching: Batching) -> tuple[int, str]:
        """(number, digest) of the windows of val that an evaluation reads: two losses compare if both are equal."""
        n = self.val.n_eval_windows(batching.eval_windows)
        if n not in self._digests:  # the same at every evaluation of a run
            self._digests[n] = self.val.eval_digest(n)
        return n, self._digests[n]

    # ---- for the log -----------------------------------------------------------------------------------------

    def lines(self, checksums: str, batching: Batching, ranks: DistContext) -> list[str]:
        """What a run prints about its data, whose text it reads for bits per byte. checksums: Verification.state."""
        tokens = f"{self.train.tokens:,} train and {self.val.tokens:,} val tokens"
        warnings = [*assumptions(self.folder), self.train.single_token(), self.val.single_token()]
        found = [f"data: {self.folder.name}, {tokens}, {checksums}", *(f"warning: {w}" for w in warnings if w)]
        if ranks.is_first:
            try:
                windows = self.val.n_eval_windows(batching.eval_windows)
                self.text = text_statistics(self.val, windows, from_meta_offline(self.tokenizer))
            except (ValueError, OSError) as e:
                found.append(f"bits per byte are not known: {e}")
        return found

    def bits_per_byte(self, val_loss: float) -> float | None:
        """A val loss (nats per token) in bits per byte of text; None if the text is not known."""
        return self.text.bits_per_byte(val_loss) if self.text else None

    def log_metadata(self) -> dict[str, Any]:
        """What log.jsonl records of the data."""
        return {
            "tokenizer": self.tokenizer.get("name"),
            "train_tokens": self.train.tokens,
            "val_tokens": self.val.tokens,
            "val_sha256": self.metadata["val data"]["fingerprint"],
            **(self.text.as_metadata() if self.text else {}),
        }
