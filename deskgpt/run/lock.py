"""One run per folder, and one prepare.py: a lock that the system releases when its process ends, however it ends.

Where the file system has no locks, as some network file systems, a lease takes its place: a file that its holder keeps
refreshing, and that others take over once it was not refreshed for a while. Both are the package filelock's.
"""

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
from typing import TYPE_CHECKING, Any

from filelock import BaseFileLock, FileLock, SoftFileLease, Timeout

from deskgpt.system.files import read_small, write_atomically

if TYPE_CHECKING:
    from deskgpt.compute.distributed import DistContext

LOCK = ".lock"
LEASE = ".lease"
HOLDER = ".holder.json"  # who is in the folder, for the message of a run that is refused
HOLDER_BYTES = 1 << 16  # of that file, at most
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
RESTART_S = 100.0  # a file server keeps the lock of a host that is gone for so long; NFS has 90 seconds
LEASE_S = 60.0  # a lease is stale when it was not refreshed for so long; its holder refreshes it three times as often
SEEN_WITHIN_S = 10.0  # the longest that a network file system may hide a new file from another host


@contextmanager
def only_run_in(folder: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Makes the folder if need be, and keeps other runs out of it during the block; leaves no file of its own.

    wait_s: how long another run may take to leave it. Raises ValueError where one stays, OSError where it cannot be
    written.
    """
    facts = {"pid": os.getpid(), "host": platform.node(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
    with if_free(folder, wait_s=wait_s, remedy="choose another --out_dir") as is_free:
        if not is_free:
            raise in_use(folder)
        write_atomically(folder / HOLDER, json.dumps(facts).encode())
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
    try:
        lock = locked(folder, name, wait_s)
    except Timeout:
        yield False
        return
    except OSError as e:
        raise OSError(f"{folder} cannot be written: {e.strerror}; {remedy}") from None
    try:
        yield True
    finally:
        with suppress(OSError):  # the folder may have gone; Windows removes no open file
            (folder / (LOCK + name)).unlink(missing_ok=True)
        lock.release()


def locked(folder: Path, name: str = "", wait_s: float = 0.0) -> BaseFileLock:
    """The folder's lock of this name, or a lease in its place, taken. Raises Timeout or another OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        # filelock's own fallback is a file that would outlive a crash.
        lock: BaseFileLock = FileLock(folder / (LOCK + name), fallback_to_soft=False)
        lock.acquire(timeout=wait_s, poll_interval=0.3)
    except OSError as e:
        if e.errno not in NO_LOCKS:
            raise
        lock = SoftFileLease(folder / (LEASE + name), lease_duration=LEASE_S, on_compromise=leave)
        lock.acquire(timeout=max(wait_s, 1.5 * LEASE_S))  # it takes so long to see that a holder's host is gone
    return lock


def leave(lost: Any) -> None:
    """Ends a run whose lease another one has taken meanwhile: this machine slept, or the network was away."""
    if lost.reason != "refresh-failed":  # after which it is tried again
        print(f"error: another run has taken over {lost.lock_file}: leaving at once", file=sys.stderr, flush=True)
        os._exit(1)


def in_use(folder: Path) -> ValueError:
    """The refusal, which names the run that is in the folder."""
    time.sleep(0.1)  # it may be writing its name just now
    try:
        facts = json.loads(read_small(folder / HOLDER, HOLDER_BYTES))
        who = f"a run that started {facts['started']} (pid {facts['pid']} on host {facts['host']})"
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
