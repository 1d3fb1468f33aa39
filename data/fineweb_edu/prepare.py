"""Make token files of FineWeb-Edu, streamed from the Hugging Face hub, or of your own documents.

    python data/fineweb_edu/prepare.py                                  # sample-10BT: 10B tokens, 20 GB
    python data/fineweb_edu/prepare.py --tokens 3e9                     # the first 3B of them
    python data/fineweb_edu/prepare.py --source more/ a.parquet --out data/mine
    python data/fineweb_edu/prepare.py --tokenizer data/novel-bpe --out data/own_vocabulary
    python data/fineweb_edu/prepare.py --part 0/3 --out /scratch/mine    # files 0, 3, 6 ...; others make parts 1/3, 2/3

Writes val_000000.bin, then train_000001.bin and so on (llm.c's format: 1024 bytes of header, uint16 token ids) and
meta.json, which lists them. Every document begins with <|endoftext|>; a document may continue in the next shard.
If it is stopped, at any point, the same command continues after the last finished shard.

With --part, each part of the source files has shards of its own, train_<part>_<shard>.bin, and a record of them,
parts/<part>.json; the beginning of the first part is val. The part that is finished last lists them all in meta.json.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository; Python adds only this folder

from data.meta_files import CHECKSUM, read_record, write_meta
from data.prepared import damaged, document_tokenizer, locked, remove_leftovers
from data.shards import Source, TokenStream, first_line, local_source, missing_shards, write_shard
from data.text.prepare import add_folder, whole_number
from data.token_files import HEADER_BYTES, TOKEN_BYTES
from data.tokenizer import Tokenizer, short_name
from deskgpt.system.errors import OneLineParser, one_line_errors

REPO = "HuggingFaceFW/fineweb-edu"
SUBSETS = ("sample-10BT", "sample-100BT", "sample-350BT", "default", "CC-MAIN-2024-10 ...")
BYTES_PER_VAL_TOKEN = 40  # of files on this machine: with four bytes per token, a tenth of them is val
WAIT_S = 60.0  # for another part that lists all shards, which takes a moment

Record = dict[str, Any]  # of the shards of a part, as meta.json has it


class Part(NamedTuple):
    """Every `of`-th file of the source, from file `number` on. The first part's beginning is val."""

    number: int = 0
    of: int = 1

    @property
    def record(self) -> str:
        """The file in --out that lists the shards of this part."""
        return "meta.json" if self.of == 1 else f"parts/{self.number:06}.json"

    @property
    def prefix(self) -> str:
        """The beginning of its shards' numbers."""
        return "" if self.of == 1 else f"{self.number:06}_"

    def shards(self, record: Record, tokens: float) -> Iterator[tuple[str, int]]:
        """Yield names and sizes of the shards that hold this part's share of `tokens`, math.inf for all there are."""
        share = math.ceil(tokens / self.of) if tokens < math.inf else tokens
        # Shards of an earlier start with more --tokens stay as they are: training reads all that are listed.
        made = sum(entry["tokens"] for name, entry in record["files"].items() if name.startswith("train"))
        number = 0
        for split, left in (("val", 0 if self.number else record["val_tokens"]), ("train", max(share, made))):
            while left > 0:
                yield f"{split}_{self.prefix}{number:06}.bin", int(min(record["shard_tokens"], left))
                left -= record["shard_tokens"]
                number += 1

    def is_made(self, folder: Path, record: Record, tokens: float) -> bool:
        """Return whether folder holds all shards of this part, by their sizes; none if its files hold no text."""
        if not record:
            return False
        entries = record["files"]
        harmed = [name for name, entry in entries.items() if not has_size(folder / name, entry["tokens"])]
        to_make = missing_shards(self.shards(record, tokens), entries, harmed)
        return not entries or next(to_make, None) is None


def main(args: argparse.Namespace) -> None:
    part: Part = args.part
    if part.of == 1:
        with locked(args.out):
            finish(args.out, make(args))
        return
    with locked(args.out / "parts", f".{part.number:06}"):
        make(args)
    with locked(args.out, wait_s=WAIT_S):
        merge(args.out, part.of, args.tokens)


# ---- make ----------------------------------------------------------------------------------------------------


def make(args: argparse.Namespace) -> Record:
    """Make the shards of this part that args.out lacks. Returns its record. Raises ValueError, OSError."""
    folder: Path = args.out
    part: Part = args.part
    records = earlier_records(folder)
    source = local_source(args.source, args.text_column) if args.source else None
    tokenizer = document_tokenizer(args.tokenizer)
    identity = identity_of(args, source, tokenizer)
    for record in records.values():
        check_identity(folder, record, identity)
    remove_leftovers(folder, f"*_{part.prefix}*.bin.", f"{part.record}.")

    revision = next((record.get("revision") for record in records.values()), None)  # all parts have the same one
    record = records.get(part.record) or {**identity, "revision": revision, "files": {}}
    entries = record["files"]
    harmed = damaged(folder, entries)
    for name in harmed:
        print(f"{name} is missing or damaged (its checksum does not match) and is made again")
    stream: TokenStream | None = None
    for name, size, start in missing_shards(part.shards(record, args.tokens), entries, harmed):
        source = source or hub_source(args.subset, args.text_column, record["revision"])
        record["revision"] = source.revision
        if stream is None or stream.position != start:
            of_part = replace(source, files=source.files[part.number :: part.of])
            stream = TokenStream(of_part, tokenizer, start)
        entry = write_shard(folder / name, size, stream)
        before = entries.get(name)
        if before and entry.get("tokens", 0) <= before["tokens"] and entry.get("sha256") != before["sha256"]:
            raise ValueError(f"{folder / name} differs from what it was: its source has changed; take another --out")
        if entry:
            entries[name] = entry
        elif entries:  # the source ended exactly with the shard before
            entries[list(entries)[-1]]["last"] = True
        write_meta(folder, record, part.record)
    if stream is None:
        print(f"{folder}: already prepared")
    return record


def identity_of(args: argparse.Namespace, source: Source | None, tokenizer: Tokenizer) -> Record:
    """Return the settings that all shards of a folder share."""
    val_tokens = args.shard_tokens
    if source:
        val_tokens = max(1, min(val_tokens, sum(map(os.path.getsize, source.files)) // BYTES_PER_VAL_TOKEN))
    return {
        "tokenizer": tokenizer.meta(),
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "source": source.name if source else f"{REPO}, {args.subset}",
        "text_column": args.text_column,
        "shard_tokens": args.shard_tokens,
        "val_tokens": args.val_tokens or val_tokens,
        "parts": args.part.of,
    }


def check_identity(folder: Path, record: Record, identity: Record) -> None:
    """Raise ValueError if the earlier start that wrote this record had other settings."""
    for key, wanted in identity.items():
        found: Any = record.get(key, 1 if key == "parts" else None)  # older versions do not record a single part
        if found != wanted:
            if key == "tokenizer":
                found, wanted = short_name(found), short_name(wanted)
            raise ValueError(
                f"{folder} was prepared with {key} {found}, not {wanted}; choose another --out, or delete the folder"
            )


def earlier_records(folder: Path) -> dict[str, Record]:
    """Return the records of parts and of the full data set, by file. Raises ValueError if one is damaged."""
    names = [f"parts/{path.name}" for path in sorted((folder / "parts").glob("[0-9]*.json"))]
    records = {name: read_record(folder, name) for name in [*names, "meta.json"]}
    return {name: record for name, record in records.items() if record}


def hub_source(subset: str, text_column: str, revision: str | None) -> Source:
    """Return a subset of FineWeb-Edu, at its newest revision if none is given. Raises ValueError."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().dataset_info(REPO, revision=revision)
    except Exception as e:  # the errors of the hub and of its HTTP client share no class
        advice = "is there a network? --source FILE reads local files"
        raise ValueError(f"the hub does not give {REPO} ({first_line(e)}); {advice}") from None
    folder = f"data/{subset}/"
    if subset == "default":
        folder = "data/"
    elif subset.startswith("sample-"):
        folder = f"sample/{subset.removeprefix('sample-')}/"
    names = [file.rfilename for file in info.siblings or []]
    files = sorted(name for name in names if name.startswith(folder) and name.endswith(".parquet"))
    if not files:
        raise ValueError(f"--subset {subset}: {REPO} has no such subset; it has {', '.join(SUBSETS)}")
    urls = [f"hf://datasets/{REPO}@{info.sha}/{name}" for name in files]
    return Source(f"{REPO}, {subset}", urls, text_column, info.sha)


# ---- list ----------------------------------------------------------------------------------------------------


def merge(folder: Path, n_parts: int, tokens: float) -> None:
    """List the shards of all parts in the folder's meta.json, once all of them are made."""
    parts = [Part(number, n_parts) for number in range(n_parts)]
    records = [read_record(folder, part.record) for part in parts]
    missing = []
    for part, record in zip(parts, records, strict=True):
        if not part.is_made(folder, record, tokens):
            missing.append(f"--part={part.number}/{n_parts}")
    if missing:
        print(f"{folder}: {len(missing)} of {n_parts} parts are still to be made, {missing[0]} among them")
        return
    meta = {key: value for key, value in records[0].items() if key not in ("files", CHECKSUM)}
    for record in records:
        check_identity(folder, record, meta)
    remove_leftovers(folder, "meta.json.")
    meta["files"] = {name: entry for record in records for name, entry in record["files"].items()}
    write_meta(folder, meta)
    finish(folder, meta)


def has_size(path: Path, tokens: int) -> bool:
    return path.is_file() and path.stat().st_size == HEADER_BYTES + TOKEN_BYTES * tokens


def finish(folder: Path, meta: Record) -> None:
    """Print what folder holds. Raises ValueError if the source left no tokens for train."""
    tokens = {"train": 0, "val": 0}
    for name, entry in meta["files"].items():
        tokens[name.partition("_")[0]] += entry["tokens"]
    if not tokens["train"]:
        remedy = f"try another --out with --val_tokens={tokens['val'] // 10 or 1}, or another --text_column"
        raise ValueError(f"{meta['source']} has {tokens['val']:,} tokens, and all of them went into val; {remedy}")
    print(f"{tokens['train']:,} train and {tokens['val']:,} val tokens in {len(meta['files'])} shards")
    print(f"train on them: python train.py config/train_fineweb_125m.py --dataset={folder.resolve()}")


# ---- command line --------------------------------------------------------------------------------------------


def i_of_n(text: str) -> Part:
    """Return part i of n, from i/n. Raises ValueError."""
    number, _, of = text.partition("/")
    part = Part(int(number), int(of))
    if not 0 <= part.number < part.of > 1:
        raise ValueError
    return part


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = OneLineParser(str(__doc__))
    add = parser.add_argument
    of = parser.add_mutually_exclusive_group().add_argument
    of("--subset", default=SUBSETS[0], help=f"{', '.join(SUBSETS)} (default: {SUBSETS[0]})")
    of("--source", nargs="+", type=Path, metavar="PATH", help=".parquet, .jsonl, .txt (also packed) or folders")
    add("--text_column", default="text", help="column, or key of a jsonl line, with the text (default: text)")
    add("--tokenizer", default="gpt2", help="gpt2, bytes, or a prepared folder's path")
    add("--tokens", type=whole_number, default=math.inf, help="to make for train, such as 3e9 (default: all there are)")
    add("--val_tokens", type=whole_number, help="made first (default: a shard; of --source a tenth at most)")
    add("--shard_tokens", type=whole_number, default=100_000_000, help="per file (default: 1e8)")
    add("--part", type=i_of_n, default=Part(), metavar="I/N", help="make only source files I, I + N, I + 2N ...")
    add_folder(parser, Path(__file__).resolve().parent)
    return parser.parse_args(argv)


if __name__ == "__main__":
    with one_line_errors():
        main(arguments(sys.argv[1:]))
