"""Make token files of FineWeb-Edu, streamed from the Hugging Face hub, or of your own documents.

    python data/fineweb_edu/prepare.py                                  # sample-10BT: 10B tokens, 20 GB
    python data/fineweb_edu/prepare.py --tokens 3e9                     # the first 3B of them
    python data/fineweb_edu/prepare.py --source more/ a.parquet --out data/mine
    python data/fineweb_edu/prepare.py --tokenizer data/novel-bpe --out data/own_vocabulary
    python data/fineweb_edu/prepare.py --part 0/3 --out /scratch/mine    # files 0, 3, 6 ...; others make parts 1/3, 2/3

Writes a shard for each source file, train_000000.bin and so on (uint16 token ids), and meta.json, which lists them; the
beginning of the first file is val_000000.bin. Small files of --source share a shard. Every document begins with
<|endoftext|>. If it is stopped, at any point, the same command continues after the last finished shard.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository; Python adds only this folder

from data.meta_files import read_record, write_meta
from data.prepared import damaged, document_tokenizer, locked, remove_leftovers
from data.shards import FORMATS, Entry, TokenStream, documents_in_file, first_line, tokens_in, write_shard
from data.text.prepare import add_folder, whole_number
from data.text_files import expanded
from data.tokenizer import Tokenizer, short_name
from deskgpt.system.errors import OneLineParser, one_line_errors

REPO = "HuggingFaceFW/fineweb-edu"
SUBSETS = ("sample-10BT", "sample-100BT", "sample-350BT", "default", "CC-MAIN-2024-10 ...")
VAL_TOKENS = 100_000_000
BYTES_PER_VAL_TOKEN = 40  # of the first shard's files on this machine: with four bytes per token, a tenth is val
WAIT_S = 60.0  # for another part that adds a shard to meta.json, which takes a moment

Record = dict[str, Any]  # the content of meta.json


class Part(NamedTuple):
    """The shards `number`, `number` + `of`, `number` + 2 `of` ..."""

    number: int = 0
    of: int = 1


class Source(NamedTuple):
    """Files of documents."""

    name: str  # as meta.json records it
    shards: list[list[str]]  # the files of each shard
    revision: str | None = None  # of a data set on the hub


def main(args: argparse.Namespace) -> None:
    part: Part = args.part
    with locked(args.out, f".part_{part.number}_{part.of}"):
        record = make(args)
    parts = [Part(number, part.of) for number in range(part.of)]
    missing = [other.number for other in parts if next(unfinished(record, other, args.tokens), None)]
    if missing and part.of > 1:
        example = f"--part={missing[0]}/{part.of}"
        print(f"{args.out}: {len(missing)} of {part.of} parts are still to be made, {example} among them")
    else:
        print_totals(args.out, record)


# ---- make ----------------------------------------------------------------------------------------------------


def make(args: argparse.Namespace) -> Record:
    """Make the shards of this part that args.out lacks. Return what meta.json records. Raises ValueError, OSError."""
    folder: Path = args.out
    part: Part = args.part
    source = local_source(args.source, args.shard_bytes) if args.source else None
    earlier = read_record(folder)
    if not source and not (earlier.get("files") and "shards" in earlier):
        source = hub_source(args.subset, None)
    tokenizer = document_tokenizer(args.tokenizer)
    record = add_shards(folder, settings_of(args, source, tokenizer), {})
    if part.number >= record["shards"]:
        raise ValueError(f"--part={part.number}/{part.of}: the source makes {record['shards']} shards; use fewer parts")
    own = {name: entry for name, entry in record["files"].items() if number_of(name) % part.of == part.number}
    harmed = damaged(folder, own)
    for name in harmed:
        print(f"{name} is missing or damaged (its checksum does not match) and is made again")
    is_prepared = True
    for number, tokens in unfinished(record, part, args.tokens, {number_of(name) for name in harmed}):
        is_prepared = False
        source = source or hub_source(args.subset, record["revision"])
        documents = itertools.chain(*(documents_in_file(path, args.text_column) for path in source.shards[number]))
        stream = TokenStream(tokens_in(documents, tokenizer))
        sizes = {f"train_{number:06}.bin": tokens}
        if number == 0:
            sizes = {"val_000000.bin": record["val_tokens"]} | sizes
        entries = {}
        for name, at_most in sizes.items():
            remove_leftovers(folder, f"{name}.")
            entry = write_shard(folder / name, at_most, stream)
            before = record["files"].get(name)
            if before and "cut" not in before and entry != before:
                raise ValueError(
                    f"{folder / name} differs from what it was: its source has changed; take another --out"
                )
            if entry:
                entries[name] = entry
        empty = [] if f"train_{number:06}.bin" in entries else [number]
        record.update(add_shards(folder, settings_of(args, source, tokenizer), entries, empty))
    if is_prepared:
        print(f"{folder}: already prepared")
    return record


def number_of(name: str) -> int:
    """Return the number of a shard, from the name of its file."""
    return int(Path(name).stem.split("_")[1])


def unfinished(record: Record, part: Part, tokens: float, harmed: Collection[int] = ()) -> Iterator[tuple[int, float]]:
    """Yield the numbers of a part's shards that are to be made, each with the train tokens that are still wanted.

    tokens: of all parts, math.inf for all there are. The caller lists a shard in record before it asks for the next.
    """
    wanted = math.ceil(tokens / part.of) if tokens < math.inf else tokens
    for number in range(part.number, record["shards"], part.of):
        if wanted <= 0:
            return
        name = f"train_{number:06}.bin"
        entry = record["files"].get(name, {"tokens": 0})
        is_missing = name not in record["files"] and number not in record["empty"]
        is_short = "cut" in entry and entry["tokens"] < wanted
        if is_missing or is_short or number in harmed:
            yield number, wanted
        wanted -= record["files"].get(name, {"tokens": 0})["tokens"]


def settings_of(args: argparse.Namespace, source: Source | None, tokenizer: Tokenizer) -> Record:
    """Return the settings that all shards of a folder share, without those of the source if it is not known."""
    settings = {
        "tokenizer": tokenizer.meta(),
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "source": source.name if source else f"{REPO}, {args.subset}",
        "text_column": args.text_column,
    }
    if source:
        val_tokens = VAL_TOKENS
        if args.source:
            n_bytes = sum(map(os.path.getsize, source.shards[0]))
            val_tokens = max(1, min(val_tokens, n_bytes // BYTES_PER_VAL_TOKEN))
        settings["val_tokens"] = args.val_tokens or val_tokens
        settings["shards"] = len(source.shards)
        settings["revision"] = source.revision
    return settings


def add_shards(folder: Path, settings: Record, entries: dict[str, Entry], empty: Collection[int] = ()) -> Record:
    """List shards in the folder's meta.json, and return what it records then. empty: numbers of shards without tokens.

    Raises ValueError if the shards that it lists were made with other settings.
    """
    with locked(folder, wait_s=WAIT_S):
        record = read_record(folder)
        if not record.get("files"):  # settings that made no shard do not count
            record = settings | {"files": {}, "empty": []}
        for key, wanted in settings.items():
            found = record.get(key)
            if found != wanted:
                if key == "tokenizer":
                    found, wanted = short_name(record[key]), short_name(wanted)
                remedy = "choose another --out, or delete the folder"
                raise ValueError(f"{folder} was made with {key} {found}, not {wanted}; {remedy}")
        record["files"] = dict(sorted((record["files"] | entries).items()))
        remove_leftovers(folder, "meta.json.")
        record["empty"] = sorted({*record["empty"], *empty})
        if entries or empty or not record["files"]:
            write_meta(folder, record)
    return record


def local_source(paths: list[Path], shard_bytes: int) -> Source:
    """Return a source of these files, of folders all readable ones in name order. Raises ValueError."""
    files = expanded(paths, FORMATS)
    shards: list[list[str]] = []
    n_bytes = total = 0
    for path in files:
        if not path.exists():
            raise ValueError(f"--source {path} does not exist")
        if not path.name.lower().endswith(FORMATS):
            raise ValueError(f"--source {path} is not a *.parquet, *.jsonl or *.txt file (the latter also packed)")
        if not shards or n_bytes >= shard_bytes:
            shards.append([])
            n_bytes = 0
        shards[-1].append(os.path.abspath(path))
        n_bytes += path.stat().st_size
        total += path.stat().st_size
    names = ", ".join(path.name for path in files[:3])
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return Source(f"{names}{more} ({total:,} bytes)", shards)


def hub_source(subset: str, revision: str | None) -> Source:
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
    return Source(f"{REPO}, {subset}", [[url] for url in urls], info.sha)


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
    add("--val_tokens", type=whole_number, help="(default: 1e8; of --source a tenth of the first shard at most)")
    add("--shard_bytes", type=whole_number, default=400_000_000, help="of --source files per shard (default: 4e8)")
    add("--part", type=i_of_n, default=Part(), metavar="I/N", help="make only shards I, I + N, I + 2N ...")
    add_folder(parser, Path(__file__).resolve().parent)
    return parser.parse_args(argv)


if __name__ == "__main__":
    with one_line_errors():
        main(arguments(sys.argv[1:]))
