"""Files that hold either their old content or the new one, never a part; checksums; one process in a folder."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import reprlib
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PureWindowsPath
from typing import Any, BinaryIO

TEMPORARY = ".tmp"  # what a file's name ends with while it is written


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a new file that takes the place of `path`, in one step, when the block ends well.

    Meanwhile its name is that of `path` and an ending of its own, so that several processes may write `path` at once.
    When the block or the disk fails, the new file is removed, `path` keeps its old content, and the error passes
    through: its words are up to the caller.
    """
    # Random, since another host or a container may have a process of the same number.
    tmp = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(8)}{TEMPORARY}")
    try:
        with open(tmp, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or a power cut could leave the new name on an empty file
        os.replace(tmp, path)
    except BaseException:
        with suppress(OSError):  # the folder may be missing
            tmp.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: bytes | bytearray) -> None:
    """Writes path, in a folder made if need be. Raises OSError, one line, with the old content unharmed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(content)
    except OSError as e:
        raise cannot_write(path, e) from None


def cannot_write(path: Path, e: OSError) -> OSError:
    return OSError(f"cannot write {path}: {e.strerror or e}; free some disk space or choose another folder")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `path`, in one step, when the block ends well.

    Meanwhile it lies beside `path`, under that name and an ending of its own. When the block or the disk fails, it is
    removed with all that is in it. Raises OSError where it cannot be written, ValueError where `path` is in use.
    """
    check_unused(path)
    tmp = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(8)}{TEMPORARY}")
    try:
        tmp.mkdir()
        yield tmp
        for file in sorted(file for file in tmp.iterdir() if not file.is_symlink()):
            with open(file, "rb+") as written:
                os.fsync(written.fileno())
        sync_folder(tmp)
        check_unused(path)
        if path.is_dir():
            path.rmdir()  # it is empty; Windows renames no folder to an existing one
        os.rename(tmp, path)
        sync_folder(path.parent)
    except BaseException as e:
        shutil.rmtree(tmp, ignore_errors=True)
        if isinstance(e, OSError):
            raise cannot_write(path, e) from None
        raise


def check_unused(path: Path) -> None:
    """Raises ValueError where a new folder cannot become `path`: something is there, or nothing is where it lies."""
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}; make it first")
    if path.is_dir() and any(path.iterdir()):
        raise ValueError(f"{path} is not empty; choose another folder, or remove it first")
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise ValueError(f"{path} exists and is not a folder; choose another name")


def read_small(path: Path, at_most: int) -> bytes:
    """The content of a file that has no reason to be larger than `at_most` bytes.

    Raises ValueError where it is larger, or a pipe, device or folder, which might never end; OSError.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path.name} is not a file")
    if status.st_size > at_most:
        raise ValueError(f"{path.name} has more than {at_most:,} bytes, an absurd size")
    return path.read_bytes()


def copy(path: Path, to: Path) -> None:
    """Makes `to` a copy of path, a file of its own: damage to one leaves the other alone. Raises OSError."""
    with open(path, "rb") as source, replacing(to) as target:
        shutil.copyfileobj(source, target, 1 << 20)


# A folder's fsync on SMB, sshfs, VirtualBox's shared folders and network drives under WSL.
NO_FOLDER_SYNC = (errno.EINVAL, errno.EIO, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM)
_unsynced: set[int] = set()  # devices that were named


def sync_folder(folder: Path) -> None:
    """Make renames in folder durable, or print once that its file system cannot. Windows opens no folders."""
    if hasattr(os, "O_DIRECTORY"):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        except OSError as e:
            if e.errno not in NO_FOLDER_SYNC:
                raise
            device = os.fstat(fd).st_dev
            if device not in _unsynced:
                _unsynced.add(device)
                print(
                    f"note: the file system of {folder} syncs no folders: a power cut may undo a save", file=sys.stderr
                )
        finally:
            os.close(fd)


def sha256(content: Any) -> str:
    """The SHA-256 of bytes or of an array's bytes, in hex digits."""
    return hashlib.sha256(content).hexdigest()


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex digits. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- what untrusted files may hold ---------------------------------------------------------------------------

LARGEST_NUMBER = 1 << 53  # what JSON readers agree about
Fields = dict[str, Callable[[Any], bool]]  # what may be in a record: key to whether a value is right


def check_record(record: Any, fields: Fields, required: Iterable[str] = ()) -> None:
    """Raises ValueError where a record lacks a key, or has a wrong value."""
    if not isinstance(record, dict):
        raise ValueError(f"{reprlib.repr(record)} is not a record")
    for key in required:
        if key not in record:
            raise ValueError(f"it has no {key}")
    for key, value in record.items():
        if key in fields and not fields[key](value):
            raise ValueError(f"{key}={' '.join(reprlib.repr(value).split())} cannot be right")


def is_number(value: Any) -> bool:
    """Whether a value is a whole number that can count something."""
    return type(value) is int and 0 <= value < LARGEST_NUMBER  # True is an int too


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_local(dataset: Any) -> bool:
    """Whether a checkpoint's dataset names a folder of this machine. Windows logs in to the host of \\\\host\\share."""
    return isinstance(dataset, str) and not PureWindowsPath(dataset).drive.startswith("\\\\")


# ---- one process in a folder ---------------------------------------------------------------------------------

HOLDER = ".holder.json"  # who is in the folder, for the message of a run that is refused
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EPROTO, 524)
RESTART_S = 100.0  # a file server keeps the lock of a host that is gone for so long; NFS has 90 seconds


@contextmanager
def only_run_in(folder: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Makes the folder if need be, and keeps other runs out of it during the block; leaves no file of its own.

    wait_s: how long another run may take to leave it. Raises ValueError, which names the run, where one stays; OSError
    where it cannot be written.
    """
    holder = {"pid": os.getpid(), "host": platform.node(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
    with if_free(folder, wait_s=wait_s) as is_free:
        if not is_free:
            time.sleep(0.1)  # it may be writing its name just now
            try:
                other = json.loads((folder / HOLDER).read_bytes())
                who = f"a run that started {other['started']} (pid {other['pid']} on host {other['host']})"
            except (OSError, ValueError):
                who = "another run"
            raise ValueError(f"out_dir={folder} is in use by {who}: wait for it, stop it, or choose another --out_dir")
        write_atomically(folder / HOLDER, json.dumps(holder).encode())
        try:
            yield
        finally:
            with suppress(OSError):  # the folder may have gone
                (folder / HOLDER).unlink()


@contextmanager
def if_free(folder: Path, name: str = "", wait_s: float = 0.0) -> Iterator[bool]:
    """Makes the folder if need be. Gives True and holds the folder's lock of this name, or False if another has it.

    wait_s: how long another one may take to leave. Raises OSError where the folder cannot be written.
    """
    # filelock's own fallback, a file, would outlive a crash.
    from filelock import FileLock, Timeout  # tasks.py reads this file before any package is installed

    path = folder / f".lock{name}"
    lock = FileLock(path, fallback_to_soft=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=wait_s, poll_interval=0.3)
    except Timeout:
        yield False
        return
    except OSError as e:
        if e.errno not in NO_LOCKS:
            raise OSError(f"{folder} cannot be written: {e.strerror}; choose another folder") from None
        print(f"note: the file system of {folder} has no locks: see to it that only one run is there", file=sys.stderr)
    try:
        yield True
    finally:
        with suppress(OSError):  # the folder may have gone; Windows removes no open file
            path.unlink(missing_ok=True)
        lock.release()
