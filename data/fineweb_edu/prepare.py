"""Makes token files of FineWeb-Edu, streamed from the Hugging Face hub, or of your own documents.

    python data/fineweb_edu/prepare.py                                  # sample-10BT: 10B tokens, 20 GB
    python data/fineweb_edu/prepare.py --tokens 3e9                     # the first 3B of them
    python data/fineweb_edu/prepare.py --pretokenized --tokens 1e9      # token files that somebody made: minutes
    python data/fineweb_edu/prepare.py --source more/ a.parquet --out data/mine
    python data/fineweb_edu/prepare.py --tokenizer bpe --vocab_size 16384 --out data/own_vocabulary
    python data/fineweb_edu/prepare.py --part 0/3 --out /scratch/mine    # files 0, 3, 6 ...; others make parts 1/3, 2/3
    python data/fineweb_edu/prepare.py --merge --out /scratch/mine       # once all of them are made

Writes val_000000.bin, then train_000001.bin and so on (llm.c's format: 1024 bytes of header, uint16 token ids) and
meta.json, which lists them. Every document begins with <|endoftext|>; a document may go on in the next shard.
If it is stopped, at any point, the same command goes on after the last finished shard.

With --part, each part of the source files has shards of its own, train_<part>_<shard>.bin, and a record of them,
parts/<part>.json; the beginning of the first part is val. --merge lists all of them in meta.json.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import math
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository; Python adds only this folder

from data import bpe
from data.documents import Source, local_source, retried
from data.meta_files import CHECKSUM, from_json
from data.shards import Entry, is_complete, is_there, plan, write_shards
from data.token_files import damaged, locked, named_tokenizer, read_description, read_record, read_tokens, write_meta
from data.tokenizer import Tokenizer, from_meta, short_name
from deskgpt.system.errors import ConfigError, one_line_errors
from deskgpt.system.files import file_sha256

REPO = "HuggingFaceFW/fineweb-edu"
SUBSETS = ("sample-10BT", "sample-100BT", "sample-350BT", "default", "CC-MAIN-2024-10 ...")
READY_REPO = "kjj0/finewebedu10B-gpt2"  # finewebedu_val_000000.bin and 99 files of train, the last one shorter
READY_SHARD = 100_000_000  # tokens
READY_TOKENS = 9_953_989_344
BYTES_PER_TOKEN = 4  # of text, with GPT-2's and similar tokenizers, about
# A vocabulary is trained on what comes after this many bytes of text for each token of val. Tokens of ordinary text
# have four to five bytes, so none of it is val's.
BYTES_OF_VAL_TOKEN = 8

ENVIRONMENT = {
    "USE_TORCH": "0",  # `datasets` would import it without need
    "RAYON_NUM_THREADS": "1",  # more threads inside fastokens bring nothing
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
    if args.merge:
        with locked(args.out):
            merge(args)
    elif args.part:
        with locked(args.out / "parts", f".{args.part.number:06}"):
            make(args, args.part)
        number, of = args.part
        print(f"part {number}/{of} is made; once all are: the same command with --merge instead of --part")
    else:
        with locked(args.out):
            make(args, Part())


# ---- make ----------------------------------------------------------------------------------------------------


def make(args: argparse.Namespace, part: Part) -> None:
    """Makes what args ask for and args.out lacks, of this part. Raises ValueError, OSError."""
    folder = args.out
    for pattern in (f"*_{part.prefix}*.bin*.tmp*", f"{part.record}*.tmp*"):  # left by a start that was killed
        for path in folder.glob(pattern):
            path.unlink()
    records = earlier_records(folder)
    source = local_source(args.source, args.text_column) if args.source else None
    tokenizer = None if args.tokenizer == "bpe" else named(args.tokenizer)  # None: to be trained
    identity = identity_of(args, source, tokenizer, part.of, records)
    for record in records.values():
        check_identity(folder, record, identity)
    revision = next((record["revision"] for record in records.values()), None)
    meta = copy.deepcopy(records.get(part.record)) or identity | {"revision": revision, "files": {}}

    complete = is_complete(folder, shards_of(meta, part, args.tokens), meta["files"])
    bad = damaged(folder, meta["files"]) if complete else []
    if complete and not bad:
        print(f"{folder}: already prepared")
    else:
        for name in bad:
            print(f"{name} is damaged (its checksum does not match) and is made again")
        shards = shards_of(meta, part, args.tokens)
        if args.pretokenized:
            fetch_ready(folder, meta, shards, bad)
        else:
            source = source or hub_source(args, meta["revision"])
            meta["revision"] = source.revision
            tokenizer = tokenizer or own_tokenizer(folder, meta, source, args.num_proc)
            mine = replace(source, files=source.files[part.number :: part.of])
            write_shards(folder, meta, mine, tokenizer, shards, bad, args.num_proc, part.record)
    if part.of == 1:
        finish(folder, meta)


def earlier_records(folder: Path) -> dict[str, dict[str, Any]]:
    """What earlier starts recorded of the whole and of parts, by file. Raises ValueError if a record is damaged."""
    try:
        whole = read_record(folder)
        paths = sorted((folder / "parts").glob("[0-9]*.json"))
        parts = {f"parts/{path.name}": read_description(path, from_json) for path in paths}
    except ValueError as e:
        raise ValueError(f"{e}: choose another --out, or delete the folder") from None
    return parts | ({"meta.json": whole} if whole else {})


def identity_of(
    args: argparse.Namespace, source: Source | None, tokenizer: Tokenizer | None, parts: int, records: dict[str, Any]
) -> dict[str, Any]:
    """The part of meta.json that must be the same in each start on a folder."""
    shard_tokens = READY_SHARD if args.pretokenized else args.shard_tokens
    val_tokens = args.val_tokens or next((record["val_tokens"] for record in records.values()), None)
    if not val_tokens and source:  # a tenth at most: before a text is tokenized, only its size is known
        size = sum(os.path.getsize(file) for file in source.files)
        estimate = size // (1 if args.tokenizer == "bytes" else BYTES_PER_TOKEN)
        val_tokens = max(1, min(shard_tokens, estimate // 10))
    name = source.name if source else READY_REPO if args.pretokenized else f"{REPO}, {args.subset}"
    return {
        "tokenizer": tokenizer.meta() if tokenizer else {"name": "bpe"},
        "vocab_size": tokenizer.vocab_size if tokenizer else args.vocab_size,
        "end_of_text": tokenizer.end_of_text if tokenizer else args.vocab_size - 1,
        "source": name,
        "text_column": args.text_column,
        "shard_tokens": shard_tokens,
        "val_tokens": val_tokens or shard_tokens,
        "parts": parts,
    }


def check_identity(folder: Path, record: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raises ValueError if the earlier start with this record was to make something else."""
    for key, value in identity.items():
        found = ({"parts": 1} | record).get(key)  # older versions do not say it of a single one
        if key == "tokenizer":  # if it is yet to be trained, only its name is known
            found = {name: record[key].get(name) for name in value}
        if found != value:
            was, wanted = (short_name(v) if isinstance(v, dict) else v for v in (found, value))
            raise ValueError(
                f"{folder} was prepared with {key} {was}, not {wanted}; choose another --out, or delete the folder"
            )


def shards_of(meta: dict[str, Any], part: Part, tokens: float) -> Iterator[tuple[str, int]]:
    """Names and sizes of a part's shards, with its share of the tokens for train; inf: all that there are."""
    share = math.ceil(tokens / part.of) if tokens < math.inf else tokens
    if meta["source"] == READY_REPO:
        share = min(share, READY_TOKENS - READY_SHARD)
    # Those of an earlier start with more --tokens are kept whole, too: training reads all that are listed.
    made = sum(entry["tokens"] for name, entry in meta["files"].items() if name.startswith("train"))
    return plan(0 if part.number else meta["val_tokens"], max(share, made), meta["shard_tokens"], part.prefix)


def merge(args: argparse.Namespace) -> None:
    """Writes the meta.json of a folder whose parts are all made. Raises ValueError if one is not."""
    folder = args.out
    records = {name: record for name, record in earlier_records(folder).items() if name != "meta.json"}
    if not records:
        raise ValueError(f"{folder} has no parts; make them: --part=0/N instead of --merge, --part=1/N ...")
    first = next(iter(records.values()))
    source = local_source(args.source, args.text_column) if args.source else None
    identity = identity_of(args, source, named(args.tokenizer), first["parts"], records)
    identity["revision"] = first["revision"]  # of the hub: the newest one when a part was begun
    entries: dict[str, Entry] = {}
    missing = []
    for number in range(first["parts"]):
        part = Part(number, first["parts"])
        record = records.get(part.record)
        if record is None:
            missing.append(number)
            continue
        check_identity(folder, record, identity)
        made = record["files"]  # none of a part whose files hold no text
        if made and not is_complete(folder, shards_of(record, part, args.tokens), made):
            missing.append(number)
        for name, entry in made.items():
            entries[name] = {key: entry[key] for key in ("tokens", "documents", "sha256")}
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} of {first['parts']} parts are not made; the same command with "
            f"--part={missing[0]}/{first['parts']} instead of --merge makes the first of them"
        )
    meta = {key: value for key, value in first.items() if key != CHECKSUM} | {"files": entries}
    write_meta(folder, meta)
    finish(folder, meta)


def finish(folder: Path, meta: dict[str, Any]) -> None:
    """Prints what folder holds. Raises ValueError, and deletes what was made, if the source left none for train."""
    entries: dict[str, Entry] = meta["files"]
    if not any(name.startswith("train") for name in entries):
        tokens = sum(entry["tokens"] for entry in entries.values())
        for name in [*entries, "meta.json"]:
            (folder / name).unlink()
        shutil.rmtree(folder / "parts", ignore_errors=True)
        remedy = f"try --val_tokens={tokens // 10}" if tokens >= 10 else "is --text_column right?"
        raise ValueError(f"{meta['source']} has {tokens:,} tokens, and all of them went into val; {remedy}")
    for split in ("train", "val"):
        made = [entry for name, entry in entries.items() if name.startswith(split)]
        tokens, documents = (sum(entry[key] for entry in made) for key in ("tokens", "documents"))
        print(f"{split}: {tokens:,} tokens, {documents:,} documents, shards: {len(made)}")
    print(f"train on them: python train.py config/train_fineweb_125m.py --dataset={folder.resolve()}")


# ---- sources and tokenizers ----------------------------------------------------------------------------------


def hub_source(args: argparse.Namespace, revision: str | None) -> Source:
    """The subset of FineWeb-Edu that args name, at its newest revision if none is given. Raises ValueError."""
    from datasets import load_dataset_builder
    from huggingface_hub import HfApi

    sha = revision or retried(lambda: HfApi().dataset_info(REPO).sha)
    try:
        builder = retried(lambda: load_dataset_builder(REPO, name=args.subset, revision=sha))
    except ValueError as e:
        if "BuilderConfig" not in str(e):
            raise
        raise ValueError(f"--subset {args.subset}: {REPO} has no such subset; it has {', '.join(SUBSETS)}") from None
    return Source(f"{REPO}, {args.subset}", list(builder.config.data_files["train"]), args.text_column, sha)


def fetch_ready(folder: Path, meta: dict[str, Any], shards: Iterator[tuple[str, int]], bad: list[str]) -> None:
    """Downloads the ready-made shards that folder lacks or that are bad, and updates meta.json after each.

    Raises ValueError if the network keeps failing or a file arrives damaged.
    """
    from huggingface_hub import HfApi, hf_hub_download

    info = retried(lambda: HfApi().dataset_info(READY_REPO, revision=meta["revision"], files_metadata=True))
    meta["revision"] = info.sha
    checksums = {file.rfilename: file.lfs.sha256 if file.lfs else None for file in info.siblings or []}
    options: dict[str, Any] = {"repo_type": "dataset", "revision": info.sha, "local_dir": folder / ".download"}
    for name, size in shards:
        if is_there(folder / name, size, meta["files"].get(name, {})) and name not in bad:
            continue
        remote = f"finewebedu_{name}"
        if remote not in checksums:
            raise ValueError(f"{READY_REPO} has no {remote}; leave --pretokenized out, or ask for fewer --tokens")
        path = Path(retried(functools.partial(hf_hub_download, READY_REPO, remote, **options)))
        checksum = file_sha256(path)
        if checksums[remote] not in (None, checksum):
            path.unlink()
            raise ValueError(f"{remote} arrived damaged; finished shards are kept: run the same command again")
        os.replace(path, folder / name)
        ids = read_tokens(folder / name)
        documents = int(np.count_nonzero(ids == meta["end_of_text"]))
        meta["files"][name] = {"tokens": len(ids), "documents": documents, "sha256": checksum}
        write_meta(folder, meta)
        print(f"{name}: {len(ids):,} tokens, {documents:,} documents", flush=True)
    shutil.rmtree(folder / ".download", ignore_errors=True)


def named(name: str) -> Tokenizer:
    """The tokenizer that --tokenizer names. Raises ValueError if it has no token between documents."""
    tokenizer = from_meta(named_tokenizer(name))
    if tokenizer.end_of_text is None:
        raise ValueError(f"--tokenizer {name}: it has no token that documents could begin with; use another")
    return tokenizer


def own_tokenizer(folder: Path, meta: dict[str, Any], source: Source, threads: int) -> Tokenizer:
    """The tokenizer that an earlier start has trained, else a new one, which meta.json gets at once.

    Raises ValueError if no text is left after what can be val's, or too little.
    """
    if "merges" in meta["tokenizer"]:
        return from_meta(meta["tokenizer"])
    import tokenizers  # noqa: F401 (if it is missing, say so before much is read)

    os.environ["RAYON_NUM_THREADS"] = str(threads)  # which it reads when it begins to train
    begin = BYTES_OF_VAL_TOKEN * meta["val_tokens"]
    print(
        f"training a vocabulary of {meta['vocab_size']:,} on up to {bpe.SAMPLE_BYTES:,} bytes after the first {begin:,}"
    )
    texts = bpe.sample(texts_from(source, begin), bpe.SAMPLE_BYTES)
    first = next(texts, None)
    if first is None:
        raise ValueError(
            f"{source.name} has no more than {begin:,} bytes of text, which val may take: nothing is left to train "
            f"the vocabulary on; give fewer --val_tokens than {meta['val_tokens']:,}"
        )
    tokenizer = bpe.train(itertools.chain([first], texts), meta["vocab_size"])
    meta["tokenizer"] = tokenizer.meta()
    write_meta(folder, meta)
    return tokenizer


def texts_from(source: Source, begin: int) -> Iterator[str]:
    """The texts of a source without their first `begin` bytes."""
    to_skip = begin
    for row in source.rows(0, 0):
        content = row.text.encode()
        if len(content) > to_skip:
            yield content[to_skip:].decode(errors="ignore")  # the cut may be within a character
        to_skip = max(0, to_skip - len(content))


# ---- command line --------------------------------------------------------------------------------------------


def whole_number(text: str) -> int:
    """A whole number of at least 1, also written as 3e9 or 1_000."""
    try:
        number = float(text)
        if 1 <= number <= 1e15 and number == int(number):
            return int(number)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 1e15, such as 100000 or 3e9")


def part_of(text: str) -> Part:
    """Part i of n, from i/n."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text, re.ASCII)
    if match and int(match[1]) < int(match[2]) > 1:
        return Part(int(match[1]), int(match[2]))
    raise argparse.ArgumentTypeError(f"{text!r} is not one of several parts, such as 0/8, the first of 8")


def named_path(text: str) -> Path:
    """A path that is not empty, which would be the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("it names nothing")
    return Path(text)


def arguments(argv: list[str]) -> argparse.Namespace:
    """The options, with their defaults. Raises ConfigError if two of them do not go together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--subset", default=SUBSETS[0], help=f"{', '.join(SUBSETS)} (default: {SUBSETS[0]})")
    add("--source", nargs="+", type=named_path, metavar="PATH", help=".parquet, .jsonl[.gz|.zst], .txt or folders")
    add("--pretokenized", action="store_true", help=f"fetch token files of {READY_REPO} instead")
    add("--text_column", default="text", help="column, or key of a jsonl line, with the text (default: text)")
    add(
        *("--tokenizer", "--encoding"),
        default="gpt2",
        help="gpt2 (default), another tiktoken encoding below 65,537 ids, bytes, bpe (trained on this text), or the "
        "path of a prepared folder, to use its tokenizer",
    )
    add("--vocab_size", type=whole_number, default=bpe.USUAL_SIZE, help=f"of --tokenizer bpe ({bpe.USUAL_SIZE})")
    add("--tokens", type=whole_number, default=math.inf, help="to make for train, such as 3e9 (default: all there are)")
    add("--val_tokens", type=whole_number, help="made first (default: a shard; of --source a tenth at most)")
    add("--shard_tokens", type=whole_number, default=100_000_000, help="per file (default: 1e8)")
    add("--num_proc", type=whole_number, default=os.cpu_count() or 1, help="threads that tokenize (default: all cores)")
    in_parts = parser.add_mutually_exclusive_group()
    in_parts.add_argument("--part", type=part_of, metavar="I/N", help="make only source files I, I + N, I + 2N ...")
    in_parts.add_argument("--merge", action="store_true", help="write meta.json once all parts are made")
    here = Path(__file__).resolve().parent
    add("--out", type=named_path, default=here, metavar="FOLDER", help="(default: data/fineweb_edu)")
    args = parser.parse_args(argv)
    given = {name for name, value in vars(args).items() if value != parser.get_default(name)}
    of_text = {"source", "subset", "text_column", "tokenizer", "vocab_size", "shard_tokens", "val_tokens"}
    rules = [
        (args.source, {"subset"}, "with --source"),
        (args.pretokenized, of_text | {"part", "merge"}, "with --pretokenized"),
        (args.tokenizer != "bpe", {"vocab_size"}, "without --tokenizer bpe"),
    ]
    for applies, options, remedy in rules:
        for option in sorted(options & given) if applies else []:
            raise ConfigError(f"--{option} has no meaning {remedy}; leave one of them out")
    if (args.part or args.merge) and args.tokenizer == "bpe":
        raise ConfigError(
            "--tokenizer bpe trains before any part can be made: prepare a small folder with it first (--tokenizer bpe "
            "--tokens 1e8 --out SMALL), then give --tokenizer SMALL here"
        )
    bpe.check_size(args.vocab_size)
    return args


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT | os.environ)
    with one_line_errors():
        main(arguments(sys.argv[1:]))
