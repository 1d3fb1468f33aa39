"""One run per folder, and one prepare.py: a lock that the system releases when its process ends, however it ends."""

from __future__ import annotations

import errno
import json
import os
import platform
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from deskgpt.system.files import read_small, write_atomically

if TYPE_CHECKING:
    from deskgpt.compute.distributed import DistContext

LOCK = ".lock"
HOLDER = ".holder.json"  # who is in the folder, for the message of a run that is refused
HOLDER_BYTES = 1 << 16  # of that file, at most
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
RESTART_S = 100.0  # a file server keeps the lock of a host that is gone for so long; NFS has 90 seconds
SEEN_WITHIN_S = 10.0  # the longest that a network file system may hide a new file from another host


@contextmanager
def only_run_in(folder: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Makes the folder if need be, and keeps other runs out of it during the block; leaves no file of its own.

    wait_s: how long another run may take to leave it. Raises ValueError where one stays, OSError where it cannot be
    written.
    """
    holder = {"pid": os.getpid(), "host": platform.node(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
    with if_free(folder, wait_s=wait_s, remedy="choose another --out_dir") as is_free:
        if not is_free:
            raise in_use(folder)
        write_atomically(folder / HOLDER, json.dumps(holder).encode())
        try:
            yield
        finally:
            with suppress(OSError):  # the folder may have gone
                (folder / HOLDER).unlink()


@contextmanager
def if_free(folder: Path, name: str = "", wait_s: float = 0.0, remedy: str = "choose another folder") -> Iterator[bool]:
    """Makes the folder if need be. Gives True and holds the folder's lock of this name, or False if another has it.

    wait_s: how long another one may take to leave. Raises OSError, with the remedy, where the folder cannot be written.
    """
    # filelock's own fallback, a file, would outlive a crash.
    lock = FileLock(folder / (LOCK + name), fallback_to_soft=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=wait_s, poll_interval=0.3)
    except Timeout:
        yield False
        return
    except OSError as e:
        if e.errno not in NO_LOCKS:
            raise OSError(f"{folder} cannot be written: {e.strerror}; {remedy}") from None
        print(f"note: the file system of {folder} has no locks: see to it that only one run is there", file=sys.stderr)
    try:
        yield True
    finally:
        with suppress(OSError):  # the folder may have gone; Windows removes no open file
            (folder / (LOCK + name)).unlink(missing_ok=True)
        lock.release()


def in_use(folder: Path) -> ValueError:
    """The refusal, which names the run that is in the folder."""
    time.sleep(0.1)  # it may be writing its name just now
    try:
        holder = json.loads(read_small(folder / HOLDER, HOLDER_BYTES))
        who = f"a run that started {holder['started']} (pid {holder['pid']} on host {holder['host']})"
    except (OSError, ValueError, KeyError, TypeError):
        who = "another run"
    return ValueError(f"out_dir={folder} is in use by {who}: wait for it, stop it, or choose another --out_dir")


def check_shared(folder: Path, ranks: DistContext) -> None:
    """Raises ValueError, on all ranks, where a host does not have the folder that the first rank writes to.

    There it would find no checkpoint to resume.
    """
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":  # torchrun's name for the number of hosts
        return
    mark = folder / f".shared-{ranks.agree(secrets.randbits(60) if ranks.is_first else 0):x}"
    try:
        if ranks.is_first:
            mark.touch()
        ranks.agree(0)  # from here on it is there
        latest = time.monotonic() + SEEN_WITHIN_S
        while not mark.exists() and time.monotonic() < latest:
            time.sleep(0.2)
        hosts = ranks.gather((platform.node(), mark.exists()))
    finally:
        if ranks.is_first:
            mark.unlink(missing_ok=True)
    for rank, (host, is_seen) in enumerate(hosts):
        if not is_seen:
            raise ValueError(
                f"out_dir={folder} on host {host} (rank {rank}) is not the folder that rank 0 writes to on host "
                f"{hosts[0][0]}: choose an --out_dir that all hosts share"
            )
