"""What prepare.py is asked to make, and whether a folder can take it."""

from __future__ import annotations

import argparse
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from data.documents import Source, local_source, retried, text_bytes
from data.fineweb_edu import pretokenized
from data.meta_files import from_json
from data.shards import Entry, plan
from data.token_files import TOKEN_BYTES, named_tokenizer, read_description
from data.tokenizer import Tokenizer, from_meta, short_name
from deskgpt.system.formatting import BYTES, with_unit

REPO = "HuggingFaceFW/fineweb-edu"
SUBSET_TOKENS = {"sample-10BT": 10e9, "sample-100BT": 100e9, "sample-350BT": 350e9, "default": 1.3e12}  # about
TEXT_BYTES_PER_TOKEN = 4  # of GPT-2's and similar encodings, about

SHARD_OF_PART = re.compile(r"(val|train)_\d{6}_\d{6}\.bin")

Entries = dict[str, Entry]  # of meta.json, by file name


# ---- what to make --------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Every `of`-th file of the source, from file `number` on. The first part's beginning is val."""

    number: int = 0
    of: int = 1

    @property
    def record(self) -> str:
        """The file in --out that lists what is made."""
        return "meta.json" if self.of == 1 else f"parts/{self.number:06}.json"

    @property
    def prefix(self) -> str:
        """Of the numbers of its shards."""
        return "" if self.of == 1 else f"{self.number:06}_"

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


@dataclass(frozen=True)
class Job:
    """What to make: from which source, and how many tokens."""

    source: str  # as meta.json records it
    available: float  # tokens that the source has, about; inf if not known
    val_tokens: int
    shard_tokens: int
    local: Source | None = None  # documents on this machine


def job_of(args: argparse.Namespace) -> Job:
    """What args ask for. Raises ValueError where --source cannot be read."""
    if args.source:
        local = local_source(args.source, args.text_column)
        # Before it is tokenized, only the size of a text is known.
        available = text_bytes(local) // (1 if args.encoding == "bytes" else TEXT_BYTES_PER_TOKEN)
        val_tokens = args.val_tokens or max(1, min(args.shard_tokens, available // 10))
        return Job(local.name, available, val_tokens, args.shard_tokens, local)
    if args.pretokenized:
        return Job(pretokenized.REPO, pretokenized.TOKENS, pretokenized.SHARD_TOKENS, pretokenized.SHARD_TOKENS)
    tokens = SUBSET_TOKENS.get(args.subset, math.inf)
    return Job(f"{REPO}, {args.subset}", tokens, args.val_tokens or args.shard_tokens, args.shard_tokens)


def tokenizer_of(args: argparse.Namespace) -> Tokenizer:
    """The tokenizer that --encoding names. Raises ValueError where it has no token between documents."""
    tokenizer = from_meta(named_tokenizer(args.encoding))
    if tokenizer.end_of_text is None:
        raise ValueError(f"--encoding {args.encoding}: it has no token that documents could begin with; use another")
    return tokenizer


def hub_source(args: argparse.Namespace, revision: str | None = None) -> Source:
    """The subset of FineWeb-Edu that args name, at its newest revision if none is given. Raises ValueError."""
    from datasets import load_dataset_builder
    from huggingface_hub import HfApi

    sha = revision or retried(lambda: HfApi().dataset_info(REPO).sha)
    try:
        builder = retried(lambda: load_dataset_builder(REPO, name=args.subset, revision=sha))
    except ValueError as e:
        if "BuilderConfig" not in str(e):
            raise
        named = ", ".join(SUBSET_TOKENS)
        raise ValueError(f"--subset {args.subset}: {REPO} has no such subset; it has {named} and CC-MAIN-...") from None
    return Source(f"{REPO}, {args.subset}", list(builder.config.data_files["train"]), args.text_column, sha)


def shards_of(job: Job, part: Part, tokens: float, entries: Entries) -> Iterator[tuple[str, int]]:
    """Names and sizes of a part's shards, with its share of the tokens for train; entries: those that are made."""
    train_tokens = math.ceil(tokens / part.of) if tokens < math.inf else tokens
    # Training reads all shards that are there: those of an earlier start with more --tokens are kept whole, too.
    made = sum(entry["tokens"] for name, entry in entries.items() if name.startswith("train"))
    val_tokens = 0 if part.number else job.val_tokens
    return plan(val_tokens, max(train_tokens, made), job.shard_tokens, part.prefix)


def identity_of(job: Job, tokenizer: Tokenizer | None, args: argparse.Namespace, part: Part) -> dict[str, Any]:
    """The part of meta.json that must be the same in each start on a folder.

    If the tokenizer is yet to be trained (None), these are its name and what its training depends on.
    """
    if tokenizer is None:
        described = {
            "tokenizer": {"name": "bpe"},
            "vocab_size": args.vocab_size,
            "end_of_text": args.vocab_size - 1,
        }
    else:
        described = {
            "tokenizer": tokenizer.meta(),
            "vocab_size": tokenizer.vocab_size,
            "end_of_text": tokenizer.end_of_text,
        }
    return described | {
        "source": job.source,
        "text_column": args.text_column,
        "shard_tokens": job.shard_tokens,
        "val_tokens": job.val_tokens,
        "parts": part.of,
    }


# ---- the folder ----------------------------------------------------------------------------------------------


def check_identity(folder: Path, meta: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raises ValueError where an earlier start, whose record is meta, was to make something else."""
    for key, value in identity.items():
        found = ({"parts": 1} | meta).get(key)  # older versions do not say it of a single one
        if key == "tokenizer":  # if it is yet to be trained, only its name is known
            found = {name: meta[key].get(name) for name in value}
        if found != value:
            raise ValueError(
                f"{folder} was prepared with {key} {meta_text(found)}, not {meta_text(value)}; "
                "choose another --out, or delete the folder"
            )


def meta_text(value: Any) -> str:
    """A value of meta.json for a message: a tokenizer by its name."""
    return short_name(value) if isinstance(value, dict) else str(value)


def records_of_parts(folder: Path) -> dict[int, dict[str, Any]]:
    """What is recorded of each part that was begun, by number. Raises ValueError where a record is damaged."""
    paths = sorted((folder / "parts").glob("[0-9]*.json"))
    return {int(path.stem): read_description(path, from_json) for path in paths}


def remove_leftovers(folder: Path, *patterns: str) -> None:
    """Deletes the temporary files of a start that was killed, each named by deskgpt.system.files."""
    for pattern in patterns:
        for path in folder.glob(pattern):
            path.unlink()


def check_disk(folder: Path, tokens: float) -> None:
    """Raises ValueError where the disk lacks room for a folder of this many tokens; inf: their number is not known."""
    present_bytes = sum(path.stat().st_size for path in folder.glob("*.bin"))
    needed_bytes = TOKEN_BYTES * tokens - present_bytes
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes < math.inf:
        raise ValueError(
            f"{folder} needs about {with_unit(needed_bytes, BYTES)} more, and {with_unit(free_bytes, BYTES)} are free; "
            "choose another --out, or make less of it with --tokens"
        )


def finish(folder: Path, meta: dict[str, Any]) -> None:
    """Prints what folder holds and how to train on it.

    Raises ValueError, and deletes what was made, where the source left no tokens for train.
    """
    entries: Entries = meta["files"]
    counts = {split: [entry for name, entry in entries.items() if name.startswith(split)] for split in ("train", "val")}
    if not counts["train"]:
        tokens = sum(entry["tokens"] for entry in entries.values())
        for name in [*entries, "meta.json"]:
            (folder / name).unlink()
        shutil.rmtree(folder / "parts", ignore_errors=True)
        remedy = f"try --val_tokens={tokens // 10}" if tokens >= 10 else "is --text_column right?"
        raise ValueError(f"{meta['source']} has {tokens:,} tokens, and all of them went into val; {remedy}")
    for split, made in counts.items():
        tokens = sum(entry["tokens"] for entry in made)
        documents = sum(entry["documents"] for entry in made)
        print(f"{split}: {tokens:,} tokens, {documents:,} documents, shards: {len(made)}")
    print(f"train on them: python train.py config/train_fineweb_125m.py --dataset={folder.resolve()}")
