"""Make token files of FineWeb-Edu, streamed from the Hugging Face hub, or of your own documents.

    python data/fineweb_edu/prepare.py                                  # sample-10BT: 10B tokens, 20 GB
    python data/fineweb_edu/prepare.py --tokens 3e9                     # the first 3B of them
    python data/fineweb_edu/prepare.py --source more/ a.parquet --out data/mine
    python data/fineweb_edu/prepare.py --tokenizer data/novel-bpe --out data/own_vocabulary
    python data/fineweb_edu/prepare.py --part 0/3 --out /scratch/mine    # files 0, 3, 6 ...; others make parts 1/3, 2/3

Writes val_000000.bin, then train_000001.bin and so on (llm.c's format: 1024 bytes of header, uint16 token ids) and
meta.json, which lists them. Every document begins with <|endoftext|>; a document may continue in the next shard.
If it is stopped, at any point, the same command continues after the last finished shard.

With --part, each part of the source files has shards of its own, train_<part>_<shard>.bin, and adds them to the same
meta.json; the beginning of the first part is val.
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

from data.meta_files import read_record, write_meta
from data.prepared import damaged, document_tokenizer, locked, remove_leftovers
from data.shards import Entry, Source, TokenStream, first_line, local_source, missing_shards, write_shard
from data.text.prepare import add_folder, whole_number
from data.tokenizer import Tokenizer, short_name
from deskgpt.system.errors import OneLineParser, one_line_errors

REPO = "HuggingFaceFW/fineweb-edu"
SUBSETS = ("sample-10BT", "sample-100BT", "sample-350BT", "default", "CC-MAIN-2024-10 ...")
BYTES_PER_VAL_TOKEN = 40  # of files on this machine: with four bytes per token, a tenth of them is val
WAIT_S = 60.0  # for another part that adds a shard to meta.json, which takes a moment

Record = dict[str, Any]  # the content of meta.json


class Part(NamedTuple):
    """Every `of`-th file of the source, from file `number` on. The first part's beginning is val."""

    number: int = 0
    of: int = 1

    @property
    def prefix(self) -> str:
        """Return the beginning of its shards' numbers."""
        return "" if self.of == 1 else f"{self.number:06}_"

    def entries(self, record: Record) -> dict[str, Entry]:
        """Return what meta.json records of this part's shards."""
        names = (f"train_{self.prefix}", f"val_{self.prefix}")
        return {name: entry for name, entry in record["files"].items() if name.startswith(names)}

    def shards(self, record: Record, tokens: float) -> Iterator[tuple[str, int]]:
        """Yield names and sizes of the shards that hold this part's share of `tokens`, math.inf for all there are."""
        share = math.ceil(tokens / self.of) if tokens < math.inf else tokens
        # Shards of an earlier start with more --tokens stay as they are: training reads all that are listed.
        made = sum(entry["tokens"] for name, entry in self.entries(record).items() if name.startswith("train"))
        number = 0
        for split, left in (("val", 0 if self.number else record["val_tokens"]), ("train", max(share, made))):
            while left > 0:
                yield f"{split}_{self.prefix}{number:06}.bin", int(min(record["shard_tokens"], left))
                left -= record["shard_tokens"]
                number += 1

    def is_made(self, record: Record, tokens: float) -> bool:
        """Return whether meta.json lists all shards of this part."""
        return next(missing_shards(self.shards(record, tokens), record["files"]), None) is None


def main(args: argparse.Namespace) -> None:
    with locked(args.out, f".part_{args.part.prefix}"):
        record = make(args)
    parts = [Part(number, args.part.of) for number in range(args.part.of)]
    missing = [part.number for part in parts if not part.is_made(record, args.tokens)]
    if missing and args.part.of > 1:
        example = f"--part={missing[0]}/{args.part.of}"
        print(f"{args.out}: {len(missing)} of {args.part.of} parts are still to be made, {example} among them")
    else:
        print_totals(args.out, record)


# ---- make ----------------------------------------------------------------------------------------------------


def make(args: argparse.Namespace) -> Record:
    """Make the shards of this part that args.out lacks. Return what meta.json records. Raises ValueError, OSError."""
    folder: Path = args.out
    part: Part = args.part
    source = local_source(args.source, args.text_column) if args.source else None
    if not source and not read_record(folder):
        source = hub_source(args.subset, args.text_column, None)
    tokenizer = document_tokenizer(args.tokenizer)
    settings = settings_of(args, source, tokenizer)
    record = add_shards(folder, settings, {})
    if not args.source:
        source = None  # another part may have been first, with another revision
    remove_leftovers(folder, f"*_{part.prefix}*.bin.")
    entries = part.entries(record)
    harmed = damaged(folder, entries)
    for name in harmed:
        print(f"{name} is missing or damaged (its checksum does not match) and is made again")
    stream: TokenStream | None = None
    for name, size, start in missing_shards(part.shards(record, args.tokens), entries, harmed):
        source = source or hub_source(args.subset, args.text_column, record["revision"])
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
            entries[max(entries, key=lambda name: name[-10:])]["last"] = True
        record = add_shards(folder, settings, entries)
    if stream is None:
        print(f"{folder}: already prepared")
    return record


def settings_of(args: argparse.Namespace, source: Source | None, tokenizer: Tokenizer) -> Record:
    """Return the settings that all shards of a folder share, and the revision of the first source."""
    val_tokens = args.shard_tokens
    if args.source and source:
        val_tokens = max(1, min(val_tokens, sum(map(os.path.getsize, source.files)) // BYTES_PER_VAL_TOKEN))
    return {
        "tokenizer": tokenizer.meta(),
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "source": source.name if args.source and source else f"{REPO}, {args.subset}",
        "revision": source.revision if source else None,
        "text_column": args.text_column,
        "shard_tokens": args.shard_tokens,
        "val_tokens": args.val_tokens or val_tokens,
        "parts": args.part.of,
    }


def add_shards(folder: Path, settings: Record, entries: dict[str, Entry]) -> Record:
    """List shards in the folder's meta.json, and return what it records then.

    Raises ValueError if the shards that it lists were made with other settings.
    """
    with locked(folder, wait_s=WAIT_S):
        record = read_record(folder)
        if not record.get("files"):  # settings that made no shard do not count
            record = settings | {"revision": record.get("revision", settings["revision"]), "files": {}}
        for key, wanted in settings.items():
            found = record.get(key)
            if key != "revision" and found != wanted:
                if key == "tokenizer":
                    found, wanted = short_name(record[key]), short_name(wanted)
                remedy = "choose another --out, or delete the folder"
                raise ValueError(f"{folder} was made with {key} {found}, not {wanted}; {remedy}")
        record["files"] = dict(sorted((record["files"] | entries).items()))
        remove_leftovers(folder, "meta.json.")
        write_meta(folder, record)
    return record


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


def print_totals(folder: Path, meta: Record) -> None:
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
