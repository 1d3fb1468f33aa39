"""Makes token files of FineWeb-Edu, streamed from the Hugging Face hub, or of your own documents.

    python data/fineweb_edu/prepare.py                                  # sample-10BT: 10B tokens, 20 GB
    python data/fineweb_edu/prepare.py --tokens 3e9                     # the first 3B of them
    python data/fineweb_edu/prepare.py --pretokenized --tokens 1e9      # token files that somebody made: minutes
    python data/fineweb_edu/prepare.py --source more/ a.parquet --out data/mine
    python data/fineweb_edu/prepare.py --encoding bpe --vocab_size 16384 --out data/own_vocabulary
    python data/fineweb_edu/prepare.py --workers 8 --out data/mine      # each source file by itself, in 8 processes
    python data/fineweb_edu/prepare.py --part 0/3 --out /scratch/mine    # files 0, 3, 6 ...; others make parts 1/3, 2/3
    python data/fineweb_edu/prepare.py --merge --out /scratch/mine       # once all of them are made

Writes val_000000.bin, then train_000001.bin and so on (llm.c's format: 1024 bytes of header, uint16 token ids) and
meta.json, which lists them. Every document begins with <|endoftext|>; a document may go on in the next shard.
If it is stopped, at any point, the same command goes on after the last finished shard.

With --workers or --part, each source file has shards of its own, train_<file>_<shard>.bin, and a record of them,
parts/<file>.json; the beginning of the first file is val, and no document is in both. The bytes are the same whoever
made which file, and in which order. --merge lists all of them in meta.json.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import multiprocessing.connection
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository; Python adds only this folder

from data import bpe
from data.documents import FORMATS, PACKED, Source, format_of, retried
from data.meta_files import CHECKSUM, part_from_json
from data.shards import Entry, free_space, gigabytes, is_there, plan, plan_of_file, text_bytes_of, write_shards
from data.token_files import locked, named_tokenizer, read_description, read_record, read_tokens, write_meta
from data.tokenizer import Tokenizer, from_meta, short_name
from deskgpt.machine.errors import ConfigError, one_line_errors
from deskgpt.machine.files import file_sha256, sha256

REPO = "HuggingFaceFW/fineweb-edu"
SUBSET_TOKENS = {"sample-10BT": 10e9, "sample-100BT": 100e9, "sample-350BT": 350e9, "default": 1.3e12}  # about
PRETOKENIZED = "kjj0/finewebedu10B-gpt2"  # finewebedu_val_000000.bin and 99 files of train, the last one shorter
PRETOKENIZED_SHARD = 100_000_000  # tokens
PRETOKENIZED_TOKENS = 9_953_989_344
TOKEN_BYTES = 2
TEXT_BYTES_PER_TOKEN = 4  # of GPT-2's and similar encodings, about
PACKED_RATIO = 3  # bytes of text per byte of a packed file, about
MOST_BYTES_PER_TOKEN = 8  # of val, to begin with: where a vocabulary of its own is trained on what follows
HASHED = 1 << 32  # bytes: in a finished folder of at most this size the checksums are compared too, within seconds

# Defaults of the options that exclude each other: not argparse's, so that a given value can be told from a default.
DEFAULTS = {"subset": "sample-10BT", "text_column": "text", "encoding": "gpt2", "shard_tokens": 100_000_000}
OF_BPE = {"vocab_size": bpe.USUAL_SIZE, "vocab_bytes": bpe.SAMPLE_BYTES}
# Options, and the other options that have no meaning with each.
EXCLUDED = {"source": ["subset"], "pretokenized": ["source", "val_tokens", *DEFAULTS, *OF_BPE]}

PARTS = "parts"  # in --out: one record for each source file, and meta.json for what they have in common
PART_NAME = re.compile(r"(val|train)_\d{6}_\d{6}\.bin")
ENVIRONMENT = {
    "USE_TORCH": "0",  # `datasets` would import it without need
    "RAYON_NUM_THREADS": "1",  # more threads inside fastokens bring nothing
    "HF_HUB_DISABLE_XET": "1",  # its network errors cannot be told from its other errors
}

Entries = dict[str, Entry]  # of meta.json, by file name


def main(args: argparse.Namespace) -> None:
    if args.part:
        make_part(args, *args.part)
    elif args.merge or args.workers:
        if args.workers:
            make_in_processes(args)
        with if_free(args.out, "") as free:
            if not free:
                raise ValueError(f"another prepare.py is at work in {args.out}; wait for it")
            merge(args)
    else:
        with locked(args.out):
            remove_leftovers(args.out, "*.bin*.tmp*", "meta.json*.tmp*")
            prepare(args)


def prepare(args: argparse.Namespace) -> None:
    """Makes what args ask for and args.out lacks. Raises ValueError, OSError."""
    folder = args.out
    if (folder / PARTS / "meta.json").exists():
        raise ValueError(
            f"{folder} was prepared in parts: go on with --part, --workers or --merge, or choose another --out"
        )
    tokenizer = None if args.encoding == "bpe" else tokenizer_of(args)  # None: to be trained
    job = job_of(args)

    # ---- what earlier starts have made ----
    meta = earlier_meta(folder, identity_of(job, tokenizer, args))
    entries = meta["files"]
    # An earlier start may have been stopped between finishing its next shard and listing it.
    following = next((name for name, _ in job.planned() if name not in entries), None)
    refuse_foreign(folder, {*entries, following}.__contains__)
    later = later_shards(folder, job, entries)
    complete = finished(folder, job.shards(later), entries)
    bad = damaged(folder, entries) if complete else []
    if complete and not bad:
        print(f"{folder}: already prepared")
        summarize(folder, meta)
        return

    # ---- what is missing ----
    check_disk(folder, job, entries, bad)
    if args.pretokenized:
        fetch(folder, meta, job.shards(later), bad)
    else:
        source = job.local or hub_source(args.subset, args.text_column, meta["revision"])
        meta["revision"] = source.revision
        if tokenizer is None:
            tokenizer = own_tokenizer(folder, meta, source, job, args.num_proc)
        write_shards(folder, meta, source, tokenizer, job.shards(later), bad, args.num_proc, job.expected)
    refuse_val_only(folder, meta)
    summarize(folder, meta)


def summarize(folder: Path, meta: dict[str, Any]) -> None:
    """Prints what folder holds and how to train on it."""
    for split in ("train", "val"):
        entries = [entry for name, entry in meta["files"].items() if name.startswith(split)]
        tokens = sum(entry["tokens"] for entry in entries)
        documents = sum(entry["documents"] for entry in entries)
        print(f"{split}: {tokens:,} tokens, {documents:,} documents, shards: {len(entries)}")
    print(f"train on them: python train.py config/train_fineweb_125m.py --dataset={folder.resolve()}")


# ---- what to make --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What to make: from which source, and how many tokens."""

    source: str  # as meta.json records it
    available: float  # tokens that the source has, about; inf if not known
    val_tokens: int
    train_tokens: float  # inf: all there are
    shard_tokens: int
    local: Source | None = None  # documents on this machine
    by_file: bool = False  # whether each source file is made by itself

    @property
    def expected(self) -> int | None:
        """Tokens of both splits together, about; None if not known."""
        total = min(self.available, self.val_tokens + self.train_tokens)
        return int(total) if total < math.inf else None

    def planned(self) -> Iterator[tuple[str, int]]:
        """Names and sizes of the shards; endless if train_tokens is inf."""
        return plan(self.val_tokens, self.train_tokens, self.shard_tokens)

    def shards(self, later: list[tuple[str, int]]) -> Iterator[tuple[str, int]]:
        """The planned shards, then later ones of an earlier start."""
        yield from self.planned()
        yield from later


def job_of(args: argparse.Namespace) -> Job:
    """What args ask for. Raises ValueError where --source cannot be read."""
    if args.source:
        local = local_source(args.source, args.text_column)
        # Before it is tokenized, only the size of a text is known.
        available = text_bytes(local) // (1 if args.encoding == "bytes" else TEXT_BYTES_PER_TOKEN)
        return Job(
            source=local.name,
            available=available,
            val_tokens=args.val_tokens or max(1, min(args.shard_tokens, available // 10)),
            train_tokens=args.tokens,
            shard_tokens=args.shard_tokens,
            local=local,
        )
    if args.pretokenized:
        return Job(
            source=PRETOKENIZED,
            available=PRETOKENIZED_TOKENS,
            val_tokens=PRETOKENIZED_SHARD,
            train_tokens=min(args.tokens, PRETOKENIZED_TOKENS - PRETOKENIZED_SHARD),
            shard_tokens=PRETOKENIZED_SHARD,
        )
    return Job(
        source=f"{REPO}, {args.subset}",
        available=SUBSET_TOKENS.get(args.subset, math.inf),
        val_tokens=args.val_tokens or args.shard_tokens,
        train_tokens=args.tokens,
        shard_tokens=args.shard_tokens,
    )


def tokenizer_of(args: argparse.Namespace) -> Tokenizer:
    """The tokenizer that --encoding names. Raises ValueError where it has no token between documents."""
    tokenizer = from_meta(named_tokenizer(args.encoding))
    if tokenizer.end_of_text is None:
        raise ValueError(f"--encoding {args.encoding}: it has no token that documents could begin with; use another")
    return tokenizer


def identity_of(job: Job, tokenizer: Tokenizer | None, args: argparse.Namespace) -> dict[str, Any]:
    """The part of meta.json that must be the same in each start on a folder.

    Of a tokenizer that is yet to be trained (None), the name and what its training depends on.
    """
    if tokenizer is None:
        of_tokenizer = {
            "tokenizer": {"name": "bpe"},
            "vocab_size": args.vocab_size,
            "end_of_text": args.vocab_size - 1,
            "vocab_bytes": args.vocab_bytes,
        }
    else:
        of_tokenizer = {
            "tokenizer": tokenizer.meta(),
            "vocab_size": tokenizer.vocab_size,
            "end_of_text": tokenizer.end_of_text,
        }
    return of_tokenizer | {
        "source": job.source,
        "text_column": args.text_column,
        "shard_tokens": job.shard_tokens,
        "val_tokens": job.val_tokens,
    }


# ---- each source file by itself ------------------------------------------------------------------------------


class Parts(NamedTuple):
    """What all who make the parts of a folder agree on."""

    record: dict[str, Any]  # PARTS/meta.json: the settings, the revision and the listing of the source's files
    source: Source
    tokenizer: Tokenizer
    job: Job
    numbers: range  # of the source files to make: all of them, or the first --files


def parts_of(args: argparse.Namespace) -> Parts:
    """What args.out is made of; the first one who comes lists the source. Raises ValueError where others differ."""
    folder = args.out
    if (folder / "meta.json").exists() and not (folder / PARTS / "meta.json").exists():
        raise ValueError(f"{folder} was not prepared in parts; choose another --out")
    refuse_foreign(folder, PART_NAME.fullmatch)
    tokenizer = tokenizer_of(args)
    job = job_of(args)
    identity = identity_of(job, tokenizer, args)
    if job.local:
        sizes = [(os.path.basename(path), os.path.getsize(path)) for path in job.local.files]
        identity["listing"] = [f"{name} ({size:,} bytes)" for name, size in sizes]
    while not (record := read_record(folder / PARTS)):
        with if_free(folder / PARTS, "") as free:
            if free and not (folder / PARTS / "meta.json").exists():
                source = job.local or hub_source(args.subset, args.text_column, None)
                write_meta(folder / PARTS, {"listing": source.files} | identity | {"revision": source.revision})
        time.sleep(0.1)  # another one may be listing it
    check_identity(folder, record, identity)
    source = job.local or Source(job.source, record["listing"], args.text_column, record["revision"])
    return Parts(record, source, tokenizer, job, range(len(record["listing"]))[: args.files])


@contextmanager
def if_free(folder: Path, name: str) -> Iterator[bool]:
    """Whether nobody has the lock of this name in folder; if so, it is held meanwhile. Raises OSError."""
    from filelock import Timeout

    from deskgpt.run import lock

    try:
        held = lock.locked(folder, name=name)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        held.release()


def part_record(folder: Path, parts: Parts, number: int) -> dict[str, Any]:
    """What was recorded of the shards of a source file, or a record without shards. Raises ValueError."""
    new = {"file": parts.record["listing"][number], "job": parts.record[CHECKSUM], "files": {}}
    path = folder / PARTS / f"{number:06}.json"
    if not path.exists():
        return new
    record = read_description(path, part_from_json)
    if record["job"] != new["job"]:
        raise ValueError(f"{path} was made with other settings than {path.parent / 'meta.json'}: delete {folder}")
    return record


def is_made(folder: Path, record: dict[str, Any]) -> bool:
    """Whether all shards of a source file, whose record this is, are there."""
    return "done" in record and all(is_there(folder / name, 0, entry) for name, entry in record["files"].items())


def make_part(args: argparse.Namespace, i: int, n: int) -> None:
    """Makes the shards that source files i, i + n, i + 2n ... lack, but for those files that others are making.

    One of --workers then helps with the rest of the files. Raises ValueError, OSError.
    """
    folder = args.out
    parts = parts_of(args)
    mine = parts.numbers[i::n]
    order = sorted(parts.numbers, key=lambda number: number not in mine) if args.workers else mine
    entries: Entries = {}
    for number in order:
        entries |= part_record(folder, parts, number)["files"]
    share = len(order) / len(parts.record["listing"])
    check_disk(folder, replace(parts.job, available=parts.job.available * share, by_file=True), entries, [])
    others = []
    for number in order:
        with if_free(folder / PARTS, f".{number:06}") as free:
            if free:
                make_file(folder, parts, number, args.num_proc, verify=number in mine)
            else:
                others.append(number)
    if not args.workers:
        rest = f"; others are making {len(others)}" if others else ""
        print(f"part {i}/{n}: {len(order) - len(others)} of {len(order)} source files are made{rest}")
        print("once all parts are made: the same command with --merge instead of --part")


def make_file(folder: Path, parts: Parts, number: int, threads: int, verify: bool) -> None:
    """Makes the shards of a source file that folder lacks or that are damaged, for one who holds the file's lock."""
    record = part_record(folder, parts, number)
    made = is_made(folder, record)
    bad = damaged(folder, record["files"]) if made and verify else []
    if made and not bad:
        return
    name = f"{PARTS}/{number:06}.json"
    remove_leftovers(folder, f"*_{number:06}_*.bin*.tmp*", f"{name}*.tmp*")
    source = replace(parts.source, files=[parts.source.files[number]])
    shards = plan_of_file(number, 0 if number else parts.job.val_tokens, parts.job.shard_tokens)
    write_shards(folder, record, source, parts.tokenizer, shards, bad, threads, None, name, whole_documents=True)
    write_meta(folder, record | {"done": True}, name)


def merge(args: argparse.Namespace) -> None:
    """Writes the meta.json of a folder all of whose parts are made. Raises ValueError where some are not."""
    folder = args.out
    remove_leftovers(folder, "meta.json*.tmp*")
    parts = parts_of(args)
    entries: Entries = {}
    missing = []
    for number in parts.numbers:
        record = part_record(folder, parts, number)
        if not is_made(folder, record):
            missing.append(number)
            continue
        for name, entry in record["files"].items():
            entries[name] = {key: entry[key] for key in ("tokens", "documents", "sha256")}
    missing = sorted({*missing, *map(file_of, damaged(folder, entries))})
    if missing:
        listing = parts.record["listing"]
        names = ", ".join(f"{number:06} ({os.path.basename(listing[number])})" for number in missing[:3])
        raise ValueError(
            f"{folder}: {len(missing)} of {len(parts.numbers)} source files are not made: {names}; the same command "
            f"with --part={missing[0]}/{len(listing)} instead of --merge makes the first of them, with --part=0/1 all"
        )
    refuse_foreign(folder, entries.__contains__)
    shared = {key: value for key, value in parts.record.items() if key not in ("listing", CHECKSUM)}
    meta = shared | {"parts": len(parts.numbers), "files": entries}
    write_meta(folder, meta)
    refuse_val_only(folder, meta)
    summarize(folder, meta)


def file_of(name: str) -> int:
    """The number of the source file that a shard comes from."""
    return int(name.split("_")[1])


def make_in_processes(args: argparse.Namespace) -> None:
    """Makes all parts in processes of this machine, which end when this one does. Raises ValueError where one fails."""
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=(args, i), daemon=True) for i in range(args.workers)]
    for worker in workers:
        worker.start()
    while workers:
        multiprocessing.connection.wait([worker.sentinel for worker in workers])
        for failed in [worker.exitcode for worker in workers if worker.exitcode]:
            raise ValueError(
                f"a worker ended with exit status {failed}; the same command goes on after finished shards"
            )
        workers = [worker for worker in workers if worker.exitcode is None]


def work(args: argparse.Namespace, i: int) -> None:
    """What one of the processes does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C reaches the parent too, which says so and ends
    threading.Thread(target=end_with_parent, daemon=True).start()
    tqdm.set_lock(threading.RLock())  # its own is a semaphore of the system, left behind when the process is ended
    with one_line_errors():
        make_part(args, i, args.workers)


def end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os._exit(1)


# ---- the folder ----------------------------------------------------------------------------------------------


def remove_leftovers(folder: Path, *patterns: str) -> None:
    """Deletes the temporary files of a start that was killed, each named by deskgpt.machine.files."""
    for pattern in patterns:
        for path in folder.glob(pattern):
            path.unlink()


def earlier_meta(folder: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """The meta.json of an earlier start, or one without files if there was none.

    Raises ValueError where that start was to make something else, or its meta.json is damaged.
    """
    try:
        meta = read_record(folder)
    except ValueError as e:
        raise ValueError(f"{e}: choose another --out, or delete the folder") from None
    if not meta:
        return identity | {"revision": None, "files": {}}
    of_shards = {"documents"} if identity["source"] == PRETOKENIZED else {"documents", "end"}
    has_all = meta.keys() >= {*identity, "revision", "files"} - {"vocab_bytes"}
    if not has_all or any(not entry.keys() >= of_shards for entry in meta["files"].values()):
        raise ValueError(
            f"{folder / 'meta.json'} is not one of this script's; choose another --out, or delete the folder"
        )
    check_identity(folder, meta, identity)
    return meta


def check_identity(folder: Path, meta: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raises ValueError where an earlier start, whose record is meta, was to make something else."""
    for key, value in identity.items():
        found = meta.get(key)
        if key == "tokenizer":  # of one that is yet to be trained, only the name is known
            found = {name: meta[key].get(name) for name in value}
        if found != value:
            raise ValueError(
                f"{folder} was prepared with {key} {meta_text(found)}, not {meta_text(value)}; "
                "choose another --out, or delete the folder"
            )


def meta_text(value: Any) -> str:
    """A value of meta.json for a message of one line: a tokenizer by its name."""
    if isinstance(value, list):  # of files
        return f"of {len(value)} files with the checksum {sha256(str(value).encode())[:8]}"
    text = short_name(value) if isinstance(value, dict) else str(value)
    return text if text.isprintable() else repr(text)


def refuse_foreign(folder: Path, is_ours: Callable[[str], Any]) -> None:
    """Raises ValueError where folder holds token files that are not ours, which training would read with them."""
    found = {path.name for split in ("train", "val") for path in folder.glob(f"{split}*.bin")}
    foreign = sorted(name for name in found if not is_ours(name))
    if foreign:
        raise ValueError(
            f"{folder} holds token files that no meta.json lists ({', '.join(foreign[:3])}), which would be read too; "
            "delete them, or choose another --out"
        )


def later_shards(folder: Path, job: Job, entries: Entries) -> list[tuple[str, int]]:
    """Names and sizes of listed shards after the planned ones; removes deleted ones of them from entries.

    They come from an earlier start with more --tokens and are kept. Training reads them, so they are checked and
    repaired like the planned ones.
    """
    if job.train_tokens == math.inf:
        return []
    planned = {name for name, _ in job.planned()}
    for name in sorted(entries.keys() - planned):
        if not (folder / name).exists():
            del entries[name]
    return [(name, entries[name]["tokens"]) for name in sorted(entries.keys() - planned)]


def finished(folder: Path, shards: Iterable[tuple[str, int]], entries: Entries) -> bool:
    """Whether folder holds every one of the shards, or all that its source has."""
    for name, size in shards:
        if not is_there(folder / name, size, entries.get(name, {})):
            return False
        if "last" in entries[name]:
            break
    return True


def damaged(folder: Path, entries: Entries) -> list[str]:
    """Names of the shards whose checksum differs from meta.json; [] for a large folder, which is not checked."""
    total_bytes = sum((folder / name).stat().st_size for name in entries)
    if total_bytes > HASHED:
        print(f"sizes are right; for the checksums of {total_bytes / 1e9:.0f} GB: python -m data.describe {folder}")
        return []
    names = [name for name, entry in entries.items() if file_sha256(folder / name) != entry["sha256"]]
    for name in names:
        print(f"{name} is damaged (its checksum does not match) and is made again")
    return names


def check_disk(folder: Path, job: Job, entries: Entries, bad: list[str]) -> None:
    """Raises ValueError where the disk lacks room for the tokens that are still to be made."""
    present = 0
    for name, entry in entries.items():
        if name not in bad and is_there(folder / name, 0, entry):
            present += entry["tokens"]
    to_make = job.shard_tokens if job.expected is None else job.expected - present
    needed = TOKEN_BYTES * to_make
    free = shutil.disk_usage(folder).free
    if needed <= free:
        return
    # The number of train tokens that would fit, rounded down.
    fitting = (free // TOKEN_BYTES + present - job.val_tokens) // 10_000_000 * 10_000_000
    fewer = f" or make fewer: --tokens={fitting:.3g}" if fitting > 0 else ""
    if job.by_file:
        fewer = " or make fewer --files"
    raise ValueError(
        f"{folder} needs about {gigabytes(needed)} more, and {gigabytes(free)} are free; choose another --out{fewer}"
    )


def refuse_val_only(folder: Path, meta: dict[str, Any]) -> None:
    """Raises ValueError, and deletes what was made, where the source left no tokens for train."""
    entries: Entries = meta["files"]
    if any(name.startswith("train") for name in entries):
        return
    tokens = sum(entry["tokens"] for entry in entries.values())
    for name in [*entries, "meta.json"]:
        (folder / name).unlink()
    shutil.rmtree(folder / PARTS, ignore_errors=True)
    remedy = f"try --val_tokens={tokens // 10}" if tokens >= 10 else "is --text_column right?"
    raise ValueError(f"{meta['source']} has {tokens:,} tokens, and all of them went into val; {remedy}")


# ---- where documents come from -------------------------------------------------------------------------------


def hub_source(subset: str, text_column: str, revision: str | None) -> Source:
    """A subset of FineWeb-Edu, at its newest revision if none is given. Raises ValueError."""
    from datasets import load_dataset_builder
    from huggingface_hub import HfApi

    sha = revision or retried(lambda: HfApi().dataset_info(REPO).sha)
    try:
        builder = retried(lambda: load_dataset_builder(REPO, name=subset, revision=sha))
    except ValueError as e:
        if "BuilderConfig" not in str(e):
            raise
        named = ", ".join(SUBSET_TOKENS)
        raise ValueError(f"--subset {subset}: {REPO} has no such subset; it has {named} and CC-MAIN-...") from None
    return Source(f"{REPO}, {subset}", list(builder.config.data_files["train"]), text_column, sha)


def local_source(paths: list[Path], text_column: str) -> Source:
    """Files, and all readable files in folders, in name order. Raises ValueError where there are none."""
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"--source {path} does not exist")
        found = [p for p in path.rglob("*") if is_documents(path, p)] if path.is_dir() else [path]
        if not found:
            raise ValueError(f"--source {path} holds no *{', *'.join(FORMATS)} (or these packed: {', '.join(PACKED)})")
        files += sorted(found)
    for file in files:
        format_of(str(file))
    names = ", ".join(file.name for file in files[:3])
    if len(files) > 3:
        names += f" and {len(files) - 3} more"
    size = sum(file.stat().st_size for file in files)
    return Source(f"{names} ({size:,} bytes)", [os.path.abspath(file) for file in files], text_column)


def is_documents(folder: Path, path: Path) -> bool:
    """Whether to read a file found in folder: not hidden, no link to another file there, of a known format."""
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    twice = path.is_symlink() and path.resolve().is_relative_to(folder.resolve())
    try:
        return path.is_file() and not hidden and not twice and bool(format_of(str(path)))
    except ValueError:
        return False


def text_bytes(source: Source) -> int:
    """Bytes of text in local files, about. Raises ValueError where a parquet file is damaged."""
    from pyarrow import ArrowException
    from pyarrow.parquet import read_metadata

    total = 0
    for path in source.files:
        if format_of(path) != "parquet":
            total += os.path.getsize(path) * (PACKED_RATIO if path.endswith(PACKED) else 1)
            continue
        try:
            metadata = read_metadata(path)
        except (ArrowException, OSError) as e:
            raise source.unreadable(path, e) from None
        for i in range(metadata.num_row_groups):
            for j in range(metadata.num_columns):
                column = metadata.row_group(i).column(j)
                if column.path_in_schema == source.text_column:
                    total += column.total_uncompressed_size
    return total


# ---- a vocabulary of its own ---------------------------------------------------------------------------------


def own_tokenizer(folder: Path, meta: dict[str, Any], source: Source, job: Job, threads: int) -> Tokenizer:
    """The tokenizer that an earlier start has trained, else a new one, which meta.json gets at once.

    Raises ValueError where the text is too small.
    """
    if "merges" not in meta["tokenizer"]:
        trained = train_after_val(source, meta["vocab_size"], meta["vocab_bytes"], job.val_tokens, threads)
        meta["tokenizer"] = trained.meta()
        write_meta(folder, meta)
    return from_meta(meta["tokenizer"])


def train_after_val(source: Source, vocab_size: int, vocab_bytes: int, val_tokens: int, threads: int) -> Tokenizer:
    """A tokenizer trained on about vocab_bytes of the source's text, or all there are, none of them val's.

    Where val ends depends on the tokenizer. So a place is guessed, and moved until val turns out to end before it.
    Raises ValueError where no text is left.
    """
    import tokenizers  # noqa: F401 (if it is missing, say so before much is read)

    os.environ["RAYON_NUM_THREADS"] = str(threads)  # which it reads when it begins to train
    begin = MOST_BYTES_PER_TOKEN * val_tokens
    while True:
        wanted = f"at most {gigabytes(vocab_bytes)} of text"
        print(f"training a vocabulary of {vocab_size:,} on {wanted} after the first {gigabytes(begin)}", flush=True)
        texts = texts_from(source, begin)
        first = next(texts, None)
        if first is None:
            raise ValueError(
                f"{source.name} has no more than {begin:,} bytes of text, which val may take: nothing is left to train "
                f"the vocabulary on; give fewer --val_tokens than {val_tokens:,}"
            )
        tokenizer = bpe.train(bpe.sample(itertools.chain([first], texts), vocab_bytes), vocab_size)
        val_bytes = text_bytes_of(source, tokenizer, val_tokens, threads)
        if val_bytes <= begin:
            return tokenizer
        print(f"val takes the first {gigabytes(val_bytes)}: training again on later text")
        begin *= 2


def texts_from(source: Source, begin: int) -> Iterator[str]:
    """The texts of a source without their first `begin` bytes."""
    to_skip = begin
    for row in source.rows(0, 0):
        content = row.text.encode()
        if len(content) > to_skip:
            yield content[to_skip:].decode(errors="ignore")  # the cut may be within a character
        to_skip = max(0, to_skip - len(content))


# ---- ready-made token files ----------------------------------------------------------------------------------


def fetch(folder: Path, meta: dict[str, Any], shards: Iterable[tuple[str, int]], bad: list[str]) -> None:
    """Downloads the shards that folder lacks or that are bad, and updates meta.json after each.

    Raises ValueError where the network keeps failing or a file arrives damaged.
    """
    from huggingface_hub import HfApi, hf_hub_download

    info = retried(lambda: HfApi().dataset_info(PRETOKENIZED, revision=meta["revision"], files_metadata=True))
    meta["revision"] = info.sha
    checksums = {file.rfilename: file.lfs.sha256 if file.lfs else None for file in info.siblings or []}
    options: dict[str, Any] = {"repo_type": "dataset", "revision": info.sha, "local_dir": folder / ".download"}
    for name, size in shards:
        if is_there(folder / name, size, meta["files"].get(name, {})) and name not in bad:
            continue
        remote = f"finewebedu_{name}"
        if remote not in checksums:
            raise ValueError(f"{PRETOKENIZED} has no {remote}; leave --pretokenized out, or ask for fewer --tokens")
        path = Path(retried(functools.partial(hf_hub_download, PRETOKENIZED, remote, **options)))
        entry = entry_of_download(path, size, checksums[remote], meta)
        if entry is None:
            path.unlink()
            raise ValueError(f"{remote} arrived damaged; finished shards are kept: run the same command again")
        os.replace(path, folder / name)
        meta["files"][name] = entry
        write_meta(folder, meta)
        print(f"{name}: {entry['tokens']:,} tokens, {entry['documents']:,} documents, {free_space(folder)}", flush=True)
    shutil.rmtree(folder / ".download", ignore_errors=True)


def entry_of_download(path: Path, size: int, sha256: str | None, meta: dict[str, Any]) -> Entry | None:
    """The entry for meta.json of a token file with `size` tokens or more; None if the file is damaged.

    sha256 is the checksum on the hub, None if it has none.
    """
    checksum = file_sha256(path)
    if sha256 not in (None, checksum):
        return None
    try:
        ids = read_tokens(path)  # mapped until it is freed: Windows neither renames nor deletes the file before
    except ValueError:  # a header that does not fit the file
        return None
    if len(ids) < size or ids.max() >= meta["vocab_size"]:
        return None
    documents = int(np.count_nonzero(ids == meta["end_of_text"]))
    return {"tokens": len(ids), "documents": documents, "sha256": checksum}


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


def part(text: str) -> tuple[int, int]:
    """(i, n) of i/n."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match and int(match[1]) < int(match[2]):
        return int(match[1]), int(match[2])
    raise argparse.ArgumentTypeError(f"{text!r} is not one of n parts, from 0/n on, such as 0/8")


def named_path(text: str) -> Path:
    """A path that is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("it names nothing")
    return Path(text)


def arguments(argv: list[str]) -> argparse.Namespace:
    """The options, with their defaults. Raises ConfigError where two of them do not go together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--subset", help="sample-10BT (default), sample-100BT, sample-350BT, default or CC-MAIN-2024-10 ...")
    add(
        "--source", nargs="+", type=named_path, metavar="PATH", help=".parquet, .jsonl[.gz|.zst], .txt files or folders"
    )
    add("--pretokenized", action="store_true", help=f"fetch token files of {PRETOKENIZED} instead")
    add("--text_column", help="column, or key of a jsonl line, with the text (default: text)")
    add(
        *("--encoding", "--tokenizer"),
        help="gpt2 (default), another tiktoken encoding below 65,537 ids, bytes, bpe (trained on this text), or the "
        "path of a prepared folder, to use its tokenizer",
    )
    add("--vocab_size", type=whole_number, help=f"ids of --encoding bpe (default: {bpe.USUAL_SIZE})")
    add("--vocab_bytes", type=whole_number, help="of text to train --encoding bpe on, none of it in val (default: 1e8)")
    add("--tokens", type=whole_number, default=math.inf, help="to make for train, such as 3e9 (default: all there are)")
    add("--val_tokens", type=whole_number, help="made first (default: a shard; of --source a tenth at most)")
    add("--shard_tokens", type=whole_number, help="per file (default: 1e8)")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    add(
        "--num_proc", type=whole_number, help=f"threads that tokenize (default: all cores, {cores}, over all --workers)"
    )
    by_file = parser.add_mutually_exclusive_group()
    by_file.add_argument(
        "--workers", type=whole_number, metavar="N", help="make each source file by itself, in N processes, and merge"
    )
    by_file.add_argument("--part", type=part, metavar="I/N", help="make only source files I, I + N, I + 2N ...")
    by_file.add_argument("--merge", action="store_true", help="write meta.json once all parts are made")
    add("--files", type=whole_number, help="of the source, the first ones, with --workers, --part or --merge")
    here = Path(__file__).resolve().parent
    add("--out", type=named_path, default=here, metavar="FOLDER", help="(default: data/fineweb_edu)")
    args = parser.parse_args(argv)

    for option, others in EXCLUDED.items():
        given = [other for other in others if getattr(args, other)]
        if getattr(args, option) and given:
            raise ConfigError(f"--{given[0]} has no meaning with --{option}; leave one of them out")
    check_parts(args)
    for option in OF_BPE:
        if getattr(args, option) and args.encoding != "bpe":
            raise ConfigError(f"--{option} has no meaning without --encoding bpe; leave it out")
    for option, default in (DEFAULTS | OF_BPE).items():
        if not getattr(args, option):
            setattr(args, option, default)
    bpe.check_size(args.vocab_size)
    args.num_proc = args.num_proc or max(1, (cores or 1) // (args.workers or 1))
    return args


def check_parts(args: argparse.Namespace) -> None:
    """Raises ConfigError for an option that does not go together with making each source file by itself."""
    if not (args.workers or args.part or args.merge):
        if args.files:
            raise ConfigError("--files has no meaning without --workers, --part or --merge; give --tokens")
        return
    if args.pretokenized:
        raise ConfigError("--pretokenized has no source files to make; leave --workers, --part and --merge out")
    if args.tokens != math.inf:
        raise ConfigError("--tokens is not known ahead where files are made side by side; give --files, the first K")
    if args.encoding == "bpe":
        raise ConfigError(
            "--encoding bpe trains before any part can be made: prepare a small folder with it first (--encoding bpe "
            "--tokens 1e8 --out SMALL), then give --encoding SMALL here"
        )


def cache_of_this_run() -> tempfile.TemporaryDirectory[str] | None:
    """A cache for `datasets` and the hub where the user's cannot be written, else None.

    They make folders in it even for local files. It is deleted with the returned object.
    """
    try:
        user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(os.environ.get("HF_HOME") or Path(user_cache, "huggingface"), "datasets")
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return None
    except (OSError, RuntimeError):  # no home at all
        pass
    cache = tempfile.TemporaryDirectory()
    os.environ["HF_HOME"] = cache.name
    return cache


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT | os.environ)
    cache = cache_of_this_run()
    with one_line_errors():
        main(arguments(sys.argv[1:]))
