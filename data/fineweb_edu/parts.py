"""Several parts of the source: made by several processes, on several machines, in any order, and merged."""

from __future__ import annotations

import argparse
import multiprocessing.connection
import os
import signal
import threading

from tqdm import tqdm

from data.fineweb_edu import common
from data.fineweb_edu.common import Entries, Part
from data.fineweb_edu.sequence import is_complete, prepare
from data.meta_files import CHECKSUM
from data.token_files import locked, write_meta
from deskgpt.system.errors import one_line_errors


def make(args: argparse.Namespace, part: Part) -> None:
    """Makes what a part lacks. Raises ValueError where another process is at it, OSError."""
    with locked(args.out / "parts", f".{part.number:06}"):
        prepare(args, part)


def merge(args: argparse.Namespace) -> None:
    """Writes the meta.json of a folder whose parts are all made. Raises ValueError where one is not."""
    folder = args.out
    common.remove_leftovers(folder, "meta.json*.tmp*")
    records = common.records_of_parts(folder)
    if not records:
        raise ValueError(f"{folder} has no parts; make them: --part=0/N instead of --merge, --part=1/N ...")
    first = next(iter(records.values()))
    of = first["parts"]
    job = common.job_of(args)
    identity = common.identity_of(job, common.tokenizer_of(args), args, Part(0, of))
    identity["revision"] = first["revision"]  # of the hub: the newest one when a part was begun
    entries: Entries = {}
    missing = []
    for number in range(of):
        record = records.get(number)
        if record is None:
            missing.append(number)
            continue
        common.check_identity(folder, record, identity)
        made: Entries = record["files"]  # none of a part whose files hold no text
        if made and not is_complete(folder, common.shards_of(job, Part(number, of), args.tokens, made), made):
            missing.append(number)
        for name, entry in made.items():
            entries[name] = {key: entry[key] for key in ("tokens", "documents", "sha256")}
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} of {of} parts are not made; the same command with --part={missing[0]}/{of} "
            "instead of --merge makes the first of them"
        )
    meta = {key: value for key, value in first.items() if key != CHECKSUM} | {"files": entries}
    write_meta(folder, meta)
    common.finish(folder, meta)


# ---- several processes ---------------------------------------------------------------------------------------


def make_in_processes(args: argparse.Namespace) -> None:
    """Makes all parts in processes of this machine, which end when this one does. Raises ValueError where one fails."""
    context = multiprocessing.get_context("spawn")
    parts = [Part(i, args.workers) for i in range(args.workers)]
    workers = [context.Process(target=work, args=(args, part), daemon=True) for part in parts]
    for worker in workers:
        worker.start()
    while workers:
        multiprocessing.connection.wait([worker.sentinel for worker in workers])
        for failed in [worker.exitcode for worker in workers if worker.exitcode]:
            raise ValueError(
                f"a worker ended with exit status {failed}; the same command goes on after finished shards"
            )
        workers = [worker for worker in workers if worker.exitcode is None]


def work(args: argparse.Namespace, part: Part) -> None:
    """What one of the processes does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C reaches the parent too, which says so and ends
    threading.Thread(target=end_with_parent, daemon=True).start()
    tqdm.set_lock(threading.RLock())  # its own is a semaphore of the system, left behind when the process is ended
    with one_line_errors():
        make(args, part)


def end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os._exit(1)
