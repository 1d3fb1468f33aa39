"""Makes token files of FineWeb-Edu, streamed from the Hugging Face hub, or of your own documents.

    python data/fineweb_edu/prepare.py                                  # sample-10BT: 10B tokens, 20 GB
    python data/fineweb_edu/prepare.py --tokens 3e9                     # the first 3B of them
    python data/fineweb_edu/prepare.py --source more/ a.parquet --out data/mine
    python data/fineweb_edu/prepare.py --tokenizer data/novel --out data/own_vocabulary
    python data/fineweb_edu/prepare.py --part 0/3 --out /scratch/mine    # files 0, 3, 6 ...; others make parts 1/3, 2/3

Writes val_000000.bin, then train_000001.bin and so on (llm.c's format: 1024 bytes of header, uint16 token ids) and
meta.json, which lists them. Every document begins with <|endoftext|>; a document may go on in the next shard.
If it is stopped, at any point, the same command goes on after the last finished shard.

With --part, each part of the source files has shards of its own, train_<part>_<shard>.bin, and a record of them,
parts/<part>.json; the beginning of the first part is val. The part that is finished last lists them all in meta.json.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository; Python adds only this folder

from data.documents import Source, first_line, local_source
from data.meta_files import CHECKSUM, read_record, write_meta
from data.prepared import damaged, document_tokenizer, locked
from data.shards import Entry, is_complete, plan, write_shards
from data.text.prepare import add_folder, whole_number
from data.tokenizer import short_name
from deskgpt.system.errors import OneLineParser, one_line_errors

REPO = "HuggingFaceFW/fineweb-edu"
SUBSETS = ("sample-10BT", "sample-100BT", "sample-350BT", "default", "CC-MAIN-2024-10 ...")
BYTES_PER_VAL_TOKEN = 40  # of files on this machine: with four bytes per token, a tenth of them is val
WAIT_S = 60.0  # for another part that lists what is made, in a moment

ENVIRONMENT = {
    "USE_TORCH": "0",  # `datasets` would import it without need
    "HF_HUB_DISABLE_XET": "1",  # its network errors cannot be told from its other errors
}


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


def make(args: argparse.Namespace) -> dict[str, Any]:
    """Makes what args ask for and args.out lacks, of this part; returns its record. Raises ValueError, OSError."""
    folder = args.out
    part: Part = args.part
    for pattern in (f"*_{part.prefix}*.bin*.tmp*", f"{part.record}*.tmp*"):  # left by a start that was killed
        for path in folder.glob(pattern):
            path.unlink()
    records = earlier_records(folder)
    earlier = next(iter(records.values()), {})
    source = local_source(args.source, args.text_column) if args.source else None
    tokenizer = document_tokenizer(args.tokenizer)
    val_tokens = args.shard_tokens
    if source:
        val_tokens = max(1, min(val_tokens, sum(map(os.path.getsize, source.files)) // BYTES_PER_VAL_TOKEN))
    identity = {
        "tokenizer": tokenizer.meta(),
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "source": source.name if source else f"{REPO}, {args.subset}",
        "text_column": args.text_column,
        "shard_tokens": args.shard_tokens,
        "val_tokens": args.val_tokens or earlier.get("val_tokens") or val_tokens,
        "parts": part.of,
    }
    for record in records.values():
        check_identity(folder, record, identity)
    meta = copy.deepcopy(records.get(part.record)) or {**identity, "revision": earlier.get("revision"), "files": {}}

    complete = is_complete(folder, shards_of(meta, part, args.tokens), meta["files"])
    bad = damaged(folder, meta["files"]) if complete else []
    if complete and not bad:
        print(f"{folder}: already prepared")
        return meta
    for name in bad:
        print(f"{name} is damaged (its checksum does not match) and is made again")
    source = source or hub_source(args, meta["revision"])
    meta["revision"] = source.revision
    mine = replace(source, files=source.files[part.number :: part.of])
    write_shards(folder, meta, part.record, mine, tokenizer, shards_of(meta, part, args.tokens), bad)
    return meta


def earlier_records(folder: Path) -> dict[str, dict[str, Any]]:
    """What earlier starts recorded of the whole and of parts, by file. Raises ValueError if one is damaged."""
    names = [f"parts/{path.name}" for path in sorted((folder / "parts").glob("[0-9]*.json"))]
    records = {name: read_record(folder, name) for name in [*names, "meta.json"]}
    return {name: record for name, record in records.items() if record}


def check_identity(folder: Path, record: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raises ValueError if the earlier start with this record was to make something else."""
    for key, wanted in identity.items():
        found: Any = record.get(key, 1 if key == "parts" else None)  # older versions do not record a single part
        if found != wanted:
            if key == "tokenizer":
                found, wanted = short_name(found), short_name(wanted)
            raise ValueError(
                f"{folder} was prepared with {key} {found}, not {wanted}; choose another --out, or delete the folder"
            )


def shards_of(meta: dict[str, Any], part: Part, tokens: float) -> Iterator[tuple[str, int]]:
    """Names and sizes of a part's shards, with its share of the tokens for train; inf: all that there are."""
    share = math.ceil(tokens / part.of) if tokens < math.inf else tokens
    # Those of an earlier start with more --tokens are kept whole, too: training reads all that are listed.
    made = sum(entry["tokens"] for name, entry in meta["files"].items() if name.startswith("train"))
    return plan(0 if part.number else meta["val_tokens"], max(share, made), meta["shard_tokens"], part.prefix)


def merge(folder: Path, parts: int, tokens: float) -> None:
    """Lists the shards of all parts in the folder's meta.json, once all of them are made."""
    records = earlier_records(folder)
    records.pop("meta.json", None)
    entries: dict[str, Entry] = {}
    missing = []
    for number in range(parts):
        part = Part(number, parts)
        made = records.get(part.record, {}).get("files")  # empty for a part whose files hold no text
        if made is None or (made and not is_complete(folder, shards_of(records[part.record], part, tokens), made)):
            missing.append(f"{number}/{parts}")
        entries |= made or {}
    if missing:
        print(f"{folder}: {len(missing)} of {parts} parts are still to be made, --part={missing[0]} among them")
        return
    first, *others = records.values()
    settings = {key: value for key, value in first.items() if key not in ("files", CHECKSUM)}
    for other in others:
        check_identity(folder, other, settings)
    meta = settings | {"files": entries}
    write_meta(folder, meta)
    finish(folder, meta)


def finish(folder: Path, meta: dict[str, Any]) -> None:
    """Prints what folder holds. Raises ValueError if the source left no tokens for train."""
    tokens = {"train": 0, "val": 0}
    for name, entry in meta["files"].items():
        tokens[name.partition("_")[0]] += entry["tokens"]
    if not tokens["train"]:
        remedy = f"try another --out with --val_tokens={tokens['val'] // 10 or 1}, or another --text_column"
        raise ValueError(f"{meta['source']} has {tokens['val']:,} tokens, and all of them went into val; {remedy}")
    print(f"{tokens['train']:,} train and {tokens['val']:,} val tokens in {len(meta['files'])} shards")
    print(f"train on them: python train.py config/train_fineweb_125m.py --dataset={folder.resolve()}")


def hub_source(args: argparse.Namespace, revision: str | None) -> Source:
    """The subset of FineWeb-Edu that args name, at its newest revision if none is given. Raises ValueError."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().dataset_info(REPO, revision=revision)
    except Exception as e:  # of the hub or its HTTP client, which share no class
        advice = "is there a network? --source FILE reads local files"
        raise ValueError(f"the hub does not give {REPO} ({first_line(e)}); {advice}") from None
    below = {
        "default": "data/",
        "sample": f"sample/{args.subset.removeprefix('sample-')}/",
        "CC": f"data/{args.subset}/",
    }
    folder = below.get(args.subset.partition("-")[0], "")
    names = [file.rfilename for file in info.siblings or []]
    files = sorted(name for name in names if folder and name.startswith(folder) and name.endswith(".parquet"))
    if not files:
        raise ValueError(f"--subset {args.subset}: {REPO} has no such subset; it has {', '.join(SUBSETS)}")
    urls = [f"hf://datasets/{REPO}@{info.sha}/{name}" for name in files]
    return Source(f"{REPO}, {args.subset}", urls, args.text_column, info.sha)


# ---- command line --------------------------------------------------------------------------------------------


def i_of_n(text: str) -> Part:
    """Part i of n, from i/n. Raises ValueError."""
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
    add("--tokenizer", default="gpt2", help="gpt2 or another tiktoken encoding, bytes, or a prepared folder's path")
    add("--tokens", type=whole_number, default=math.inf, help="to make for train, such as 3e9 (default: all there are)")
    add("--val_tokens", type=whole_number, help="made first (default: a shard; of --source a tenth at most)")
    add("--shard_tokens", type=whole_number, default=100_000_000, help="per file (default: 1e8)")
    add("--part", type=i_of_n, default=Part(), metavar="I/N", help="make only source files I, I + N, I + 2N ...")
    add_folder(parser, Path(__file__).resolve().parent)
    return parser.parse_args(argv)


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT | os.environ)
    with one_line_errors():
        main(arguments(sys.argv[1:]))
