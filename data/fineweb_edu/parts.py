"""Each source file by itself: by several processes, on several machines, in any order.

A source file has shards of its own, train_<file>_<shard>.bin, and a record of them, parts/<file>.json. parts/meta.json
holds what all who make parts agree on. The beginning of the first file is val. Merging writes meta.json, which lists
all shards; it moves nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing.connection
import os
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from data.documents import Source
from data.fineweb_edu import common
from data.fineweb_edu.common import PARTS, Entries, Job
from data.meta_files import CHECKSUM, part_from_json
from data.shards import is_there, plan_of_file, write_shards
from data.token_files import read_description, read_record, write_meta
from data.tokenizer import Tokenizer
from deskgpt.machine.errors import one_line_errors
from deskgpt.run.lock import if_free

SHARD_NAME = re.compile(r"(val|train)_\d{6}_\d{6}\.bin")


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
    common.refuse_foreign(folder, SHARD_NAME.fullmatch)
    tokenizer = common.tokenizer_of(args)
    job = common.job_of(args)
    identity = common.identity_of(job, tokenizer, args)
    if job.local:
        sizes = [(os.path.basename(path), os.path.getsize(path)) for path in job.local.files]
        identity["listing"] = [f"{name} ({size:,} bytes)" for name, size in sizes]
    while not (record := read_record(folder / PARTS)):
        with if_free(folder / PARTS) as free:
            if free and not (folder / PARTS / "meta.json").exists():
                source = job.local or common.hub_source(args)
                write_meta(folder / PARTS, {"listing": source.files} | identity | {"revision": source.revision})
        time.sleep(0.1)  # another one may be listing it
    common.check_identity(folder, record, identity)
    source = job.local or Source(job.source, record["listing"], args.text_column, record["revision"])
    return Parts(record, source, tokenizer, job, range(len(record["listing"]))[: args.files])


# ---- making --------------------------------------------------------------------------------------------------


def make_part(args: argparse.Namespace, i: int, n: int) -> None:
    """Makes the shards that source files i, i + n, i + 2n ... lack, but for those files that others are making.

    One of --workers then helps with the rest of the files. Raises ValueError, OSError.
    """
    folder = args.out
    parts = parts_of(args)
    mine = parts.numbers[i::n]
    order = sorted(parts.numbers, key=lambda number: number not in mine) if args.workers else mine
    share = len(parts.numbers) / len(parts.record["listing"])
    common.check_disk(folder, parts.job.available * share)
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
    bad = common.damaged(folder, record["files"]) if made and verify else []
    if made and not bad:
        return
    name = f"{PARTS}/{number:06}.json"
    common.remove_leftovers(folder, f"*_{number:06}_*.bin*.tmp*", f"{name}*.tmp*")
    source = replace(parts.source, files=[parts.source.files[number]])
    shards = plan_of_file(number, 0 if number else parts.job.val_tokens, parts.job.shard_tokens)
    write_shards(folder, record, source, parts.tokenizer, shards, bad, threads, record=name, whole_documents=True)
    write_meta(folder, record | {"done": True}, name)


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


# ---- several processes ---------------------------------------------------------------------------------------


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


# ---- merging -------------------------------------------------------------------------------------------------


def merge(args: argparse.Namespace) -> None:
    """Writes the meta.json of a folder all of whose parts are made. Raises ValueError where some are not."""
    folder = args.out
    common.remove_leftovers(folder, "meta.json*.tmp*")
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
    if missing:
        listing = parts.record["listing"]
        first = missing[0]
        raise ValueError(
            f"{folder}: {len(missing)} of {len(parts.numbers)} source files are not made, the first of them "
            f"{os.path.basename(listing[first])}; the same command with --part={first}/{len(listing)} instead of "
            "--merge makes it, with --part=0/1 all"
        )
    common.refuse_foreign(folder, entries.__contains__)
    shared = {key: value for key, value in parts.record.items() if key not in ("listing", CHECKSUM)}
    meta = shared | {"parts": len(parts.numbers), "files": entries}
    write_meta(folder, meta)
    common.finish(folder, meta)
