"""Files that hold either their old content or the new one, never a part; and checksums to compare them by."""

from __future__ import annotations

import hashlib
import os
import reprlib
import secrets
import shutil
import stat
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


def sync_folder(folder: Path) -> None:
    """Makes renames in folder durable; does nothing where folders cannot be opened (Windows)."""
    if hasattr(os, "O_DIRECTORY"):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(fd)
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


def check_record(record: Any, fields: Fields, required: Iterable[str] = (), only_known: bool = False) -> None:
    """Raises ValueError where a record lacks a key, or has a wrong value, or an unknown key though only_known."""
    if not isinstance(record, dict):
        raise ValueError(f"{reprlib.repr(record)} is not a record")
    for key in required:
        if key not in record:
            raise ValueError(f"it has no {key}")
    for key, value in record.items():
        if key not in fields:
            if only_known:
                raise ValueError(f"it has an unknown key, {reprlib.repr(key)}")
        elif not fields[key](value):
            raise ValueError(f"{key}={' '.join(reprlib.repr(value).split())} cannot be right")


def is_number(value: Any) -> bool:
    """Whether a value is a whole number that can count something."""
    return type(value) is int and 0 <= value < LARGEST_NUMBER  # True is an int too


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_local(dataset: Any) -> bool:
    """Whether a checkpoint's dataset names a folder of this machine. Windows logs in to the host of \\\\host\\share."""
    return isinstance(dataset, str) and not PureWindowsPath(dataset).drive.startswith("\\\\")
