"""One run per folder: a lock on out_dir that the system releases when its process ends, however it ends.

Where the file system has no locks (some network file systems), a lease: a file that its holder touches every half a
minute. The lock is taken here and not with the package filelock, which empties the file that names the holder.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from deskgpt.files import is_at, write_atomically

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOCK = ".lock"
LEASE = ".lease"
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
HELD = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK)  # the last two are Windows'

REFRESH_S = 30.0  # a lease is touched this often
STALE_S = 300.0  # one that was not touched for so long is given up
SETTLE_S = 2.0  # who takes over a stale lease looks again after this time, since another may do the same


@contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Makes the folder if need be, and keeps other runs out of it during the block; leaves nothing of its own.

    Raises ValueError where another run is in it, OSError where it cannot be written.
    """
    is_new = not folder.exists()
    try:
        file = locked(folder / LOCK)
    except OSError as e:
        raise OSError(f"out_dir={folder} cannot be written: {e.strerror}; choose another --out_dir") from None
    ended = threading.Event()
    if file is None:
        path = folder / LEASE
        take_lease(path)
        threading.Thread(target=refresh, args=(path, path.read_bytes(), ended), daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        if file is not None:
            release(file, folder / LOCK)
        else:
            (folder / LEASE).unlink(missing_ok=True)
        if is_new:
            with suppress(OSError):  # it holds files of the run
                folder.rmdir()


def holder() -> bytes:
    """Who holds a lock, for the message of a run that is refused."""
    facts = {"pid": os.getpid(), "host": platform.node(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
    return json.dumps(facts).encode()


def in_use(folder: Path, held_by: bytes) -> ValueError:
    """The refusal; held_by: the holder's own words, which it may be writing just now."""
    try:
        facts = json.loads(held_by)
        who = f"a run that started {facts['started']} (pid {facts['pid']} on host {facts['host']})"
    except (ValueError, KeyError, TypeError):
        who = "another run"
    return ValueError(f"out_dir={folder} is in use by {who}: wait for it, stop it, or choose another --out_dir")


# ---- the system's locks --------------------------------------------------------------------------------------


def locked(path: Path) -> BinaryIO | None:
    """The lock file at path, locked, with its folder made if need be; None where the file system has no locks.

    Raises ValueError where another process has locked it, and OSError.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = open(path, "a+b", buffering=0)  # noqa: SIM115 (it stays open as long as the lock is held)
        except FileNotFoundError:  # a run that has just ended removed the folder that it had made
            continue
        try:
            lock(file)
        except OSError as e:
            time.sleep(0.1)  # the holder may be writing its name just now
            file.seek(0)
            held_by = file.read()
            file.close()
            if e.errno in NO_LOCKS:
                path.unlink(missing_ok=True)
                return None
            if e.errno in HELD:
                raise in_use(path.parent, held_by) from None
            raise
        if is_at(path, file):
            file.truncate(0)
            file.write(holder())
            return file
        file.close()  # the run before has removed this file since it was opened: take the new one


# Windows keeps others from reading the bytes that are locked. The file must stay readable: lock one far after its end.
FAR = 1 << 30


def lock(file: BinaryIO) -> None:
    """Raises OSError where another process holds the lock or there are no locks."""
    if sys.platform == "win32":
        file.seek(FAR)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def release(file: BinaryIO, path: Path) -> None:
    is_ours = is_at(path, file)  # not if the folder was moved meanwhile
    with suppress(OSError):
        if sys.platform == "win32":  # where no open file can be removed
            file.seek(FAR)
            msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)
            file.close()
        if is_ours:
            path.unlink()
    file.close()


# ---- leases --------------------------------------------------------------------------------------------------


def take_lease(path: Path) -> None:
    """Writes a lease. Raises ValueError while another run's is alive."""
    mine = holder()
    with suppress(FileExistsError):
        with open(path, "xb") as file:
            file.write(mine)
        return
    held_by = path.read_bytes()
    if not is_abandoned(path, held_by):
        raise in_use(path.parent, held_by)
    write_atomically(path, mine)
    time.sleep(SETTLE_S)
    held_by = path.read_bytes()
    if held_by != mine:
        raise in_use(path.parent, held_by)


def is_abandoned(path: Path, held_by: bytes) -> bool:
    """Whether a lease's holder has died here, or has not touched it for long. Takes a minute to be sure of that."""
    with suppress(ValueError, KeyError, TypeError):
        facts = json.loads(held_by)
        if facts["host"] == platform.node() and not is_alive(facts["pid"]):
            return True
    touched = path.stat().st_mtime
    if time.time() - touched < STALE_S:
        return False
    time.sleep(2 * REFRESH_S)  # the clocks of two hosts may differ: see whether it is touched
    return path.stat().st_mtime == touched


def is_alive(pid: int) -> bool:
    """Whether a process of this machine has this number; on Windows, where asking could end it, always True."""
    if sys.platform == "win32":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


def refresh(path: Path, mine: bytes, ended: threading.Event) -> None:
    """Touches a lease until the run has ended. A run that slept so long that another took its lease leaves at once."""
    while not ended.wait(REFRESH_S):
        with suppress(OSError):  # the network may be away for a while
            if path.read_bytes() != mine:
                print(f"error: {in_use(path.parent, path.read_bytes())}", file=sys.stderr, flush=True)
                os._exit(1)
            os.utime(path)
